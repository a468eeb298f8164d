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

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MAX_LINES = 1000
LONGER = {"epochckpt/manager/manager.py": 820}  # one class, which is read from top to bottom
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
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return [
        token.start[0] for token in comments if ABANDONED.search(token.string) and not REASONED.search(token.string)
    ]


def test_every_module_is_short() -> None:
    """Modules of epochckpt stay under 1000 lines; `CheckpointManager` is one class in one file."""
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files("epochckpt")
    }
    assert lines
    assert {path: count for path, count in lines.items() if count >= LONGER.get(path, MAX_LINES)} == {}


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
