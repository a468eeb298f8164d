"""The code in the documentation runs as it stands there."""

import ast
import importlib
import importlib.util
import pathlib
import re
import types

import pytest

import epochckpt as ec
from epochckpt._settings import SETTINGS
from epochckpt.options import BUCKET_SETTINGS

DOCS = pathlib.Path(__file__).resolve().parent.parent.parent / "docs"
PACKAGES = sorted(path.parent.name for path in pathlib.Path(ec.__file__).parent.glob("*/__init__.py"))
NAME = re.compile(rf"`((?:{'|'.join(PACKAGES)}|options|_threads|_monitoring|_progress)\b[\w.]*)`")
PAGES = ("manager.md", "export.md", "jobs.md", "jobs-reference.md", "caffe2.md", "recipes.md")
BLOCK = re.compile(r"^(<!-- not run -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[int, str]]:
    """(line, code) of the Python blocks of a page, but for those that say that they are not run."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = [(text.count("\n", 0, b.start(2)), b[2]) for b in BLOCK.finditer(text) if not b[1]]
    assert len(list(BLOCK.finditer(text))) == text.count("```python"), "a block was not understood"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program, in an empty directory; those after `<!-- not run -->` are left out."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    found = blocks(page)
    assert found
    for line, code in found:
        exec(compile("\n" * line + code, str(DOCS / page), "exec"), names)


def generator() -> types.ModuleType:
    """docs/tables.py."""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", generator().pages(), ids=lambda page: page.parent.name + "/" + page.name)
def test_what_is_made_of_the_code_is_as_the_code_says(page: pathlib.Path) -> None:
    """`python docs/tables.py` writes it. Every beginning of such a part has its end."""
    text = page.read_text(encoding="utf-8")
    tables = generator()
    assert text.count("<!-- made of ") == text.count("<!-- end -->") == len(tables.PART.findall(text))
    assert tables.renewed(text) == text, "run python docs/tables.py"


@pytest.mark.parametrize(("page", "names"), [("configure.md", SETTINGS), ("buckets.md", BUCKET_SETTINGS)])
def test_every_setting_has_one_row(page: str, names: dict[str, object]) -> None:
    found = re.findall(r"^\| `(\w+)` \|", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in found if name in names] == list(names)


@pytest.mark.slow
def test_the_index_of_the_tests_says_what_every_file_shows() -> None:
    """Each file begins with it."""
    tables = generator()
    rows = re.findall(r"^\| (.*) \| \[test_\w+\.py\]\((.*)\) \|$", tables.tests(), re.MULTILINE)
    assert {file for _, file in rows} == {
        str(path.relative_to(tables.TESTS)) for path in tables.TESTS.rglob("test_*.py")
    }
    assert [file for said, file in rows if len(said) < 20] == []


def test_an_old_part_is_written_anew() -> None:
    """Whatever stands in it; a part of an unknown name is an error."""
    tables = generator()
    page = "a\n<!-- made of bucket_settings -->\nold | text\n<!-- end -->\nb\n"
    new = tables.renewed(page)
    assert "| `endpoint` | `gs`, `s3`, `az` |" in new
    assert (new[:2], new[-3:], "old | text" in new) == ("a\n", "\nb\n", False)
    assert tables.renewed(new) == new
    with pytest.raises(KeyError, match="bukket_settings"):
        tables.renewed(page.replace("bucket", "bukket"))


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    """Pages and the headings in them exist."""
    for target, anchor in re.findall(r"\]\(([\w.-]*\.md)?(?:#([\w-]+))?\)", (DOCS / page).read_text(encoding="utf-8")):
        other = DOCS / (target or page)
        assert other.exists(), (page, target)
        heads = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in anchors, (page, target, anchor)


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_every_name_in_the_pages_on_the_code_exists(page: str) -> None:
    """`saving.queue.SaveQueue.submit` is a module, and what is in it."""
    names = sorted(set(NAME.findall((DOCS / page).read_text(encoding="utf-8"))))
    assert len(names) > 30
    missing = []
    for name in names:
        parts, thing = name.split("."), importlib.import_module("epochckpt")
        try:
            while parts and hasattr(thing, "__path__"):
                thing = importlib.import_module(f"{thing.__name__}.{parts[0]}")
                parts = parts[1:]
        except ModuleNotFoundError:
            pass
        for part in parts:
            thing = getattr(thing, part, None)
        if thing is None:
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("package", ["directory", "saving", "tiers"])
def test_the_table_of_the_modules_of_a_package_has_each_below_those_that_it_imports(package: str) -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = text.partition(f"| module of `{package}` |")[2].partition("\n\n")[0].splitlines()[2:]
    modules = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    folder = pathlib.Path(ec.__file__).parent / package
    assert sorted(modules) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    for place, module in enumerate(modules):
        nodes = ast.walk(ast.parse((folder / f"{module}.py").read_text(encoding="utf-8")))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        used = {(node.module or "").removeprefix(f"epochckpt.{package}.") for node in imports}
        used |= {alias.name for node in imports if node.module == f"epochckpt.{package}" for alias in node.names}
        assert used.isdisjoint(modules[place:]), module
