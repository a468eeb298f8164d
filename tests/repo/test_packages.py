"""The packages of epochckpt: imports go only downwards, as `epochckpt/__init__.py` says, and use what is exported."""

import ast
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import pytest

import epochckpt as ec

PACKAGE = "epochckpt"
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / PACKAGE
# Modules beside the packages: what all packages may use, and the faces and helpers that may use all packages.
BELOW = frozenset(
    {
        "errors",
        "options",
        "args",
        "_collector",
        "_durations",
        "_lazy",
        "_metrics",
        "_monitoring",
        "_progress",
        "_renaming",
        "_threads",
        "_text",
        "_units",
    }
)
ABOVE = frozenset({"flags", "stop", "metadata", "policy", "caffe2", "_settings", "testing", "__main__", "__init__"})
LISTED = re.compile(r"^ {4}(\w+) +\S", re.MULTILINE)

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


def violations(order: Sequence[str], sources: Sources) -> list[str]:
    """Every import that goes upwards, and every one that goes into a package for a name that the package exports."""
    rank = {package: place for place, package in enumerate(order, start=1)}
    rank |= dict.fromkeys(BELOW, 0) | dict.fromkeys(ABOVE, len(order) + 1)
    exported = {package: exports_of(sources[package]) for package in order if package in sources}
    present = {name.split(".")[0] for name in sources}
    found = [f"{name} is listed but does not exist" for name in order if name not in present]
    found += [f"{name} is not listed" for name in sorted(present - set(rank))]
    for name in sorted(sources):
        importer = name.split(".")[0]
        for line, module, what in imports_of(sources[name], sources):
            imported = module.split(".")[0]
            where = f"{name}:{line}"
            if not imported and importer != "__main__":
                found.append(f"{where} imports {PACKAGE} itself")
            elif rank.get(imported, 0) > rank.get(importer, 0):
                found.append(f"{where} imports upwards: {imported}")
            elif imported != importer and module != imported and what in exported.get(imported, ()):
                found.append(f"{where} imports {what} from {module}: {imported} exports it")
            elif imported != importer and what.startswith("_"):
                found.append(f"{where} imports {module}.{what}, which is private")
    return found


def test_packages_import_only_downwards_and_use_what_is_exported() -> None:
    sources = sources_of(FOLDER)
    docstring = ast.get_docstring(ast.parse(sources["__init__"]), clean=False) or ""
    order = LISTED.findall(docstring)
    assert len(order) >= 9, docstring
    assert violations(order, sources) == []


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


ORDER = ["store", "commit"]
SOUND = {
    "__init__": "from epochckpt.commit import Commits",
    "errors": "import os",
    "store": "from epochckpt.store.posix import Posix\n__all__ = ['Posix']",
    "store.posix": "from epochckpt.errors import E",
    "store.other": "from epochckpt.store.posix import Posix, _private",
    "commit": "from epochckpt.store import Posix, posix\nfrom epochckpt import errors as e",
    "flags": "from epochckpt.commit import Commits",
}


def test_a_sound_tree_has_no_violation() -> None:
    assert violations(ORDER, SOUND) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("errors", "from epochckpt.store import Posix", "errors:1 imports upwards: store"),
        ("errors", "from epochckpt import store", "errors:1 imports upwards: store"),
        ("store.posix", "import epochckpt.commit.x", "store.posix:1 imports upwards: commit"),
        ("store.posix", "\ndef f():\n    from epochckpt.commit import x", "store.posix:3 imports upwards: commit"),
        (
            "store",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from epochckpt.commit import C",
            "store:3 imports upwards: commit",
        ),
        ("store", "from epochckpt import flags", "store:1 imports upwards: flags"),
        ("commit", "from epochckpt.store.posix import Posix", "commit:1 imports Posix from store.posix: store exports"),
        ("commit", "from epochckpt.store.posix import _private", "store.posix._private, which is private"),
        ("commit", "import epochckpt", "commit:1 imports epochckpt itself"),
        ("manager", "", "manager is not listed"),
    ],
)
def test_a_violation_is_found(module: str, source: str, expected: str) -> None:
    """Imports up, in functions, for types only, past a package's exports, and modules that nobody listed."""
    found = violations(ORDER, {**SOUND, module: source})
    assert len(found) == 1
    assert expected in found[0]


def test_a_package_that_is_missing_is_found() -> None:
    without = {name: source for name, source in SOUND.items() if name.split(".")[0] != "commit"}
    assert "commit is listed but does not exist" in violations(ORDER, without)


def test_dir_lists_what_is_public() -> None:
    """As an editor or a notebook completes it: no packages, no private modules."""
    assert dir(ec) == sorted([*ec.__all__, "__version__"])
