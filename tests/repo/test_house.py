"""The habits that a machine can check: short modules, no sleeps, no bare TODO, types that ship, words that fit."""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import zipfile

import pytest

from epochckpt.storage.schemes import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SLEEP = re.compile(r"\btime\s*\.\s*sleep\s*\(|\bfrom\s+time\s+import\b.*\bsleep\b")
ABANDONED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
TEST_IMPORT = re.compile(
    r"^\s*(?:from tests(?:\.\w+)*\.test_\w+ import|from tests\.\w+ import test_|import tests\..*test_)"
)
NUMBERED = re.compile(r"(?<!FROM )\bepochs? (?:\0|%[a-z.]|\d)", re.IGNORECASE)  # in a text whose values are `\0`
REASONED = re.compile(r"\bTODO\([\w.@-]+\): \S+ \S+")


def python_files(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def hits(pattern: re.Pattern[str], text: str) -> list[int]:
    """Numbers of the lines that match."""
    return [number for number, line in enumerate(text.splitlines(), start=1) if pattern.search(line)]


def bare_todos(source: str) -> list[int]:
    """Lines with a leftover comment that is not `TODO(owner): reason`."""
    if not ABANDONED.search(source):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return [
        token.start[0] for token in comments if ABANDONED.search(token.string) and not REASONED.search(token.string)
    ]


def test_nothing_sleeps() -> None:
    """Neither epochckpt nor its tests wait by sleeping: they wait for events, with a bound."""
    found = {
        path.relative_to(ROOT).as_posix(): hits(SLEEP, path.read_text(encoding="utf-8"))
        for path in python_files("epochckpt", "tests")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_todo_without_an_owner_and_a_reason() -> None:
    """A leftover says whose it is and why it waits: `TODO(owner): reason`."""
    found = {
        path.relative_to(ROOT).as_posix(): bare_todos(path.read_text(encoding="utf-8"))
        for path in python_files("epochckpt", "tests", "examples", "benchmarks")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_test_imports_a_test() -> None:
    """What tests share lies in `tests/support/`: a test file can be read, moved and run by itself."""
    found = {
        path.relative_to(ROOT).as_posix(): hits(TEST_IMPORT, path.read_text(encoding="utf-8"))
        for path in python_files("tests")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_wheel_ships_the_types_and_the_license(tmp_path: pathlib.Path) -> None:
    """`py.typed` and the license are in the wheel that the project builds."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    (wheel,) = tmp_path.glob("epochckpt-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "epochckpt/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests/") for name in names)


def numbered_epochs(source: str) -> list[int]:
    """Lines with a text, no docstring, that puts a number behind the word epoch."""
    tree, found = ast.parse(source), list[int]()
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts |= {id(part) for part in node.values}
            text = "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and id(node) not in texts else None
        if isinstance(text, str) and NUMBERED.search(text):
            found.append(node.lineno)
    return found


@pytest.mark.slow
def test_no_text_calls_a_number_an_epoch() -> None:
    """It may be one of steps: what knows the unit says it, and all else says `checkpoint 60000`."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in python_files("epochckpt")
        if (lines := numbered_epochs(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize("line", ['f"no epoch {7}"', '"epochs %s are gone"', 'f"{1}" "the epoch " f"{2}: {3}"'])
def test_a_numbered_epoch_is_found(line: str) -> None:
    assert numbered_epochs(f'"""Epoch 5."""\nx = {line}\n') == [2]


@pytest.mark.parametrize("line", ["time." + "sleep(1)", "from time " + "import monotonic, sleep"])
def test_a_sleep_is_found(line: str) -> None:
    assert hits(SLEEP, f"import time\n{line}\n") == [2]


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# TODO later", [1]),
        ("# FIXME", [1]),
        ("# TODO(kim): soon", [1]),
        ("# TODO(kim): needs jax 0.11 for pinned memory", []),
        ("'TODO'", []),
    ],
)
def test_a_bare_todo_is_found(comment: str, expected: list[int]) -> None:
    assert bare_todos(f"{comment}\n") == expected


def test_only_the_table_of_schemes_knows_one_by_name() -> None:
    """A test on the scheme of a URL elsewhere would have to be found by whoever adds a scheme."""
    names = "|".join(SCHEMES)
    test = re.compile(rf"(?:startswith|removeprefix)\([^)]*[\"'](?:{names})(?::|[\"'])|[=!]= [\"'](?:{names})[\"']")
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("epochckpt")
        for line in hits(test, path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_nothing_outside_of_storage_and_directory_asks_what_kind_of_store_it_is() -> None:
    """One place does: stock Orbax marks a finished step in a bucket otherwise than on a file system."""
    found = {
        str(path.relative_to(ROOT / "epochckpt"))
        for path in python_files("epochckpt")
        if re.search(r"\blocal_path\b|isinstance\([^)]*Store\b", path.read_text(encoding="utf-8"))
    }
    assert {name for name in found if name.partition("/")[0] not in ("storage", "directory", "testing")} == {
        "orbax/step_files.py"
    }


MOST_PATCHES = 20


def patches_of_ours(source: str) -> list[int]:
    """Lines that set an attribute of something that is imported from epochckpt."""
    if "setattr" not in source:
        return []
    tree = ast.parse(source)
    ours = set[str]()
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom | ast.Import):
            aliases = [each for each in node.names if f"{module}.{each.name}".strip(".").startswith("epochckpt")]
            ours |= {each.asname or each.name.partition(".")[0] for each in aliases}
    found = list[int]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "setattr":
            continue
        owner = ast.unparse(node.args[0])
        if owner.partition(".")[0] in ours or owner.strip("'\"").startswith("epochckpt"):
            found.append(node.lineno)
    return found


@pytest.mark.slow
def test_tests_patch_few_of_our_modules() -> None:
    """A test that patches a module is written anew with it: `faults`, `patience` and arguments give what tests need."""
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}"
        for path in python_files("tests")
        for line in patches_of_ours(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST_PATCHES, found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from epochckpt.saving import queue\npatch.setattr(queue, 'a', 1)", [2]),
        ("from epochckpt.storage import PosixStore as S\npatch.setattr(S.create, 'a', 1)", [2]),
        ("import epochckpt as ec\nsetattr(ec.manager, 'a', 1)", [2]),
        ("import epochckpt.flags\nsetattr(epochckpt.flags, 'a', 1)", [2]),
        ("patch.setattr('epochckpt.storage.posix._renameat2', None)", [1]),
        ("import os\npatch.setattr(os, 'link', 1)", []),
    ],
)
def test_a_patch_of_ours_is_found(source: str, expected: list[int]) -> None:
    assert patches_of_ours(source) == expected
