"""Imports inside epochckpt go strictly downwards, along the floors drawn in `epochckpt/__init__.py`."""

import ast
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import pytest

PACKAGE = "epochckpt"
FOLDER = pathlib.Path(__file__).resolve().parent.parent / PACKAGE
# A drawn floor: four spaces, its name, two spaces, its modules from left to right; longer ones go on below the first.
FLOOR = re.compile(r"^ {4}F(\d+)  (\w+(?:(?: +|\n {8})\w+)*)$", re.MULTILINE)


def floors_of(docstring: str) -> list[list[str]]:
    """The drawn table, lowest floor first."""
    rows = FLOOR.findall(docstring)
    assert [int(number) for number, _ in rows] == list(range(len(rows))), f"floors out of order: {rows}"
    return [modules.split() for _, modules in rows]


def sources_of(folder: pathlib.Path) -> dict[str, str]:
    """Source text by dotted name below the package, without the package's own `__init__`."""
    paths = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.py")}
    return {
        ".".join(name.parts): path.read_text(encoding="utf-8")
        for name, path in paths.items()
        if name.parts != ("__init__",)
    }


def imports_of(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level module of each import from the package, wherever it stands; "" is the package."""
    here = [PACKAGE, *name.split(".")]
    for node in ast.walk(ast.parse(source, filename=name)):
        targets: list[list[str]] = []
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = here[: len(here) - node.level] if node.level else []
            origin = [*parent, *(node.module.split(".") if node.module else [])]
            # `from package import x` means the module x.
            targets = [[*origin, alias.name] for alias in node.names] if origin == [PACKAGE] else [origin]
        for target in targets:
            if target[0] == PACKAGE:
                yield node.lineno, target[1] if len(target) > 1 else ""


def violations(floors: Sequence[Sequence[str]], sources: Mapping[str, str]) -> list[str]:
    """Every way in which the modules do not stand as drawn."""
    order = [module for floor in floors for module in floor]
    position = {module: place for place, module in enumerate(order)}
    floor_of = {module: number for number, floor in enumerate(floors) for module in floor}
    present = {name.split(".")[0] for name in sources}
    found = [f"{module} is drawn twice" for module in position if order.count(module) > 1]
    found += [f"{module} is drawn but does not exist" for module in order if module not in present]
    found += [f"{module} is not drawn on any floor" for module in sorted(present - set(order))]
    for name in sorted(sources):
        importer = name.split(".")[0]
        for line, imported in imports_of(name, sources[name]):
            where = f"{name}:{line}"
            if imported not in position:
                what = f"{imported!r}, which is not drawn" if imported else "the package itself"
                found.append(f"{where} imports {what}")
            elif importer in position and imported != importer and position[imported] > position[importer]:
                how = "upwards" if floor_of[imported] > floor_of[importer] else "to the right"
                found.append(f"{where} (F{floor_of[importer]}) imports {how}: {imported} (F{floor_of[imported]})")
    return found


def test_every_import_goes_down_the_drawn_floors() -> None:
    """No module of epochckpt imports one that stands above it or to its right."""
    docstring = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8")), clean=False)
    floors = floors_of(docstring or "")
    assert floors, "epochckpt/__init__.py draws no floors"
    assert violations(floors, sources_of(FOLDER)) == []


DRAWN = """Title.

    F0  errors layout tree
    F1  store
    F2  commit

More text.
"""
SOUND = {
    "errors": "import os",
    "layout": "from epochckpt.errors import E",
    "tree": "from epochckpt import errors, layout",
    "store": "import epochckpt.tree\nfrom . import layout",
    "commit": "from .store import Store\nfrom epochckpt import errors as e",
}


def test_the_table_is_read_as_drawn() -> None:
    assert floors_of(DRAWN) == [["errors", "layout", "tree"], ["store"], ["commit"]]


def test_a_missing_floor_is_refused() -> None:
    with pytest.raises(AssertionError, match="out of order"):
        floors_of("    F0  errors\n    F2  commit\n")


def test_a_sound_tree_has_no_violation() -> None:
    assert violations(floors_of(DRAWN), SOUND) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("errors", "from epochckpt.store import Store", "errors:1 (F0) imports upwards: store (F1)"),
        ("errors", "from epochckpt import store", "errors:1 (F0) imports upwards: store (F1)"),
        ("errors", "import epochckpt.store.posix", "errors:1 (F0) imports upwards: store (F1)"),
        ("errors", "from . import layout", "errors:1 (F0) imports to the right: layout (F0)"),
        ("layout", "\ndef f():\n    from .tree import x", "layout:3 (F0) imports to the right: tree (F0)"),
        (
            "store",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .commit import C",
            "store:3 (F1) imports upwards: commit (F2)",
        ),
        ("store.posix", "from ..commit import C", "store.posix:1 (F1) imports upwards: commit (F2)"),
        ("commit", "import epochckpt", "commit:1 imports the package itself"),
        ("commit", "from epochckpt import CheckpointManager", "'CheckpointManager', which is not drawn"),
        ("manager", "", "manager is not drawn on any floor"),
    ],
)
def test_a_violation_is_found(module: str, source: str, expected: str) -> None:
    """Imports up, to the right, in functions, for types only, from sub-modules, and modules nobody drew."""
    found = violations(floors_of(DRAWN), {**SOUND, module: source})
    assert len(found) == 1
    assert expected in found[0]


def test_a_drawn_module_that_is_missing_is_found() -> None:
    without = {name: source for name, source in SOUND.items() if name != "commit"}
    assert violations(floors_of(DRAWN), without) == ["commit is drawn but does not exist"]
