"""The packages of epochckpt are used by what they export. That imports go downwards is a contract in pyproject.toml."""

import ast
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping

import pytest

import epochckpt as ec

PACKAGE = "epochckpt"
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / PACKAGE
LISTED = re.compile(r"^- `(\w+)`: \S", re.MULTILINE)

Sources = Mapping[str, str]  # text by dotted name below the package; of a package: of its `__init__`


def sources_of(folder: pathlib.Path) -> dict[str, str]:
    """The source texts below a folder."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path.read_text("utf-8")
    return found


def imports_of(source: str, modules: Sources) -> Iterator[tuple[int, str, str]]:
    """Line, module below the package, and name of each import from the package, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield node.lineno, alias.name.partition(".")[2], ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            if (node.module or "").split(".")[0] == PACKAGE:
                origin = (node.module or "").partition(".")[2]
                for alias in node.names:
                    below = f"{origin}.{alias.name}" if origin else alias.name
                    # `from package import x` means the module x, where there is one.
                    yield (node.lineno, below, "") if below in modules else (node.lineno, origin, alias.name)


def exports_of(source: str) -> set[str]:
    """The names in a package's `__all__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def violations(sources: Sources) -> list[str]:
    """Every import from another package for a name that the package exports, or for a private one."""
    exported = {name: exports_of(source) for name, source in sources.items() if name != "__init__"}
    found: list[str] = []
    for name in sorted(sources):
        importer = name.split(".")[0]
        for line, module, what in imports_of(sources[name], sources):
            imported = module.split(".")[0]
            where = f"{name}:{line}"
            if not imported and importer != "__main__":
                found.append(f"{where} imports {PACKAGE} itself")
            elif imported != importer and module != imported and what in exported.get(imported, ()):
                found.append(f"{where} imports {what} from {module}: {imported} exports it")
            elif imported != importer and what.startswith("_") and what != "__all__":
                found.append(f"{where} imports {module}.{what}, which is private")
    return found


@pytest.mark.slow
def test_packages_use_what_others_export() -> None:
    assert violations(sources_of(FOLDER)) == []


def test_the_packages_are_listed_in_the_order_of_the_contract() -> None:
    """The docstring of the package, and docs/architecture.md, have the layers that import-linter checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    downwards = settings["tool"]["importlinter"]["contracts"][0]["layers"][2:-1]
    docstring = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text("utf-8")), clean=False) or ""
    assert LISTED.findall(docstring) == downwards[::-1]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page.split("## ")[1], re.MULTILINE) == downwards[::-1]


def test_each_package_says_what_it_promises_and_exports_what_it_has() -> None:
    sources = sources_of(FOLDER)
    for name in LISTED.findall(ast.get_docstring(ast.parse(sources["__init__"]), clean=False) or ""):
        module = ast.parse(sources[name])
        assert ast.get_docstring(module), name
        bound = {
            alias.asname or alias.name for n in ast.walk(module) if isinstance(n, ast.ImportFrom) for alias in n.names
        }
        bound |= {n.name for n in module.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert exports_of(sources[name]) <= bound, name


SOUND = {
    "__init__": "from epochckpt.commit import EpochDirectory",
    "errors": "import os",
    "store": "from epochckpt.store.posix import Posix\n__all__ = ['Posix']",
    "store.posix": "from epochckpt.errors import E",
    "store.other": "from epochckpt.store.posix import Posix, _private",
    "commit": "from epochckpt.store import Posix, posix\nfrom epochckpt import errors as e",
    "flags": "from epochckpt.commit import EpochDirectory",
}


def test_a_sound_tree_has_no_violation() -> None:
    assert violations(SOUND) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("commit", "from epochckpt.store.posix import Posix", "commit:1 imports Posix from store.posix: store exports"),
        ("commit", "from epochckpt.store.posix import _private", "store.posix._private, which is private"),
        ("commit", "import epochckpt", "commit:1 imports epochckpt itself"),
    ],
)
def test_a_violation_is_found(module: str, source: str, expected: str) -> None:
    found = violations({**SOUND, module: source})
    assert len(found) == 1
    assert expected in found[0]


def test_dir_lists_what_is_public() -> None:
    """As an editor or a notebook completes it: no packages, no private modules."""
    assert dir(ec) == sorted([*ec.__all__, "__version__"])
