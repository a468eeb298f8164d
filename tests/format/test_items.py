"""An item of a record: each field of another form is refused, with its place, and nothing is computed from it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from epochckpt.errors import FormatError
from epochckpt.format.codec import MAX_BYTES
from epochckpt.format.grid import MAX_CELLS
from epochckpt.format.items import ItemKind, parse_item
from epochckpt.format.tree import value_from_json, value_to_json

ENTRY: dict[str, Any] = {
    "kind": "arrays",
    "handler": "Standard",
    "leaves": [
        [["k"], "prng", "uint32", [4, 2], 1, 0, -1, "threefry2x32"],
        [["n"], "int"],
        [["w"], "jax", "float32", [4, 2], 1, 1, 0],
        [["x"], "numpy", "int8", [], 0, 0, -1],
        [["y"], "jax", "float32", [], 0, 0, 0, True],
    ],
    "grids": [[[], [[0]]], [[2, 1], [[0, 1], [1]]]],
    "shardings": [{"device": 0}],
    "meshes": [],
    "values": {"1": "0x3"},
    "custom_metadata": None,
}


def with_value(at: str, value: Any) -> dict[str, Any]:
    """The entry with another value at a place such as `leaves.0.3`."""
    entry = copy.deepcopy(ENTRY)
    *above, last = at.split(".")
    inner: Any = entry
    for key in above:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = value
    return entry


def test_an_item_is_read() -> None:
    item = parse_item("1/epoch.json", "state", json.loads(json.dumps(ENTRY)), 2)
    assert item.arrays is not None
    assert [leaf.kind for leaf in item.arrays.leaves] == ["prng", "int", "jax", "numpy", "jax"]
    assert [leaf.shape for leaf in item.arrays.leaves] == [(4, 2), (), (4, 2), (), ()]
    assert [leaf.weak_type for leaf in item.arrays.leaves] == [False, False, False, False, True]
    assert [leaf.nbytes for leaf in item.arrays.leaves if leaf.shape] == [32, 32]
    assert [item.arrays.counts(leaf) for leaf in (0, 2, 3)] == [(2, 1), (2, 1), ()]
    found = json.loads(json.dumps(item.arrays.to_json()))
    assert found == {key: ENTRY[key] for key in ("leaves", "grids", "shardings", "meshes")}
    assert item.values == {1: "0x3"}


@pytest.mark.parametrize(
    ("at", "values"),
    [
        ("kind", [None, "array", 1]),
        ("handler", [None, 1]),
        ("leaves", [None, {}, [[]], [3], [[["a"]]], [[["a"], "int", 1]], [[["a"], "int"], [["a"], "int"]]]),
        ("leaves.0.0", [None, "k", [1.5], [["k", 1, 2]]]),
        ("leaves.0.1", [None, "tpu", 3, "int"]),
        ("leaves.0.2", [None, "float33", 4, "O"]),
        ("leaves.0.3", [None, [4.0, 2], [True, 2], [-4, 2], [2**48, 1], [1] * 33, "42"]),
        ("leaves.2.3", [[3, 2], [4], [5, 1], [], [2**47, 2**15], [2**45, 2**15]]),
        ("leaves.0.4", [None, 2, -1, True, 0.0, "0"]),
        ("leaves.0.5", [None, -1, 2**48, True]),
        ("leaves.2.6", [None, -2, 1, True, 0.5]),
        ("leaves.0.7", [1, True, ["threefry2x32"]]),
        ("leaves.4.7", [False, 1, "true", None]),
        ("leaves.4", [[*ENTRY["leaves"][4], True], [["y"], "numpy", "float32", [], 0, 0, 0, True]]),
        ("leaves.0", [ENTRY["leaves"][0][:7], [["k"], "jax", "uint32", [4, 2], 1, 0, -1, "threefry2x32"], None]),
        ("grids", [None, {}, [[]], [[[], [[0]]]]]),
        ("grids.1", [None, [[2, 1]], [[2, 1], [[0], [1]], 3], {"2": 1}]),
        ("grids.1.0", [None, [2, 2], [0, 2], [2.0, 1], [True, 2], [-2, -1], [1] * 32 + [2], [MAX_CELLS + 1]]),
        ("grids.1.1", [None, [[0]], [[0], []], [[0], [2]], [[0], [-1]], [[0], [True]], [[0], 1], [0, [1]], [[0], -1]]),
        ("shardings", [None, {}, []]),
        ("meshes", [None, {}]),
        ("values", [None, {}, {"1": "0x3", "2": "0x3"}, {"2": "0x3"}, {"1": 3}, {"1": "three"}, {"1": None}, []]),
    ],
)
def test_a_field_of_another_form_is_refused(at: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(FormatError, match=r"^1/epoch\.json: "):
            parse_item("1/epoch.json", "state", with_value(at, value), 2)


def test_a_grid_may_name_the_holders_of_an_earlier_cell() -> None:
    item = parse_item("e", "state", with_value("grids.1.1", [[0, 1], 0]), 2)
    assert item.arrays is not None
    assert item.arrays.grids[1].holders == ((0, 1), (0, 1))


def test_an_array_may_be_as_large_as_a_record_can_say() -> None:
    """2**62 bytes are one too many."""
    parse_item("e", "state", with_value("leaves.3.3", [2**47, 2**14]), 2)
    with pytest.raises(FormatError):
        parse_item("e", "state", with_value("leaves.3.3", [2**47, MAX_BYTES >> 47]), 2)


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 1000])
def test_an_item_with_another_name_than_a_folder_may_have_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        parse_item("e", name, ENTRY, 2)


@pytest.mark.parametrize("kind", ["files", "node"])
def test_items_without_arrays(kind: str) -> None:
    found = parse_item("e", "i", {"kind": kind, "handler": "Json", "same": True}, 1)
    assert (found.kind, found.handler, found.same, found.arrays) == (ItemKind(kind), "Json", kind == "node", None)
    if kind == "node":
        with pytest.raises(FormatError, match="same"):
            parse_item("e", "i", {"kind": kind, "handler": "Json"}, 1)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bool", True),
        ("bool", False),
        ("int", -(2**100)),
        ("float", 1.5),
        ("float", float("inf")),
        ("complex", 1 - 2j),
        ("bytes", b"\0\xff"),
        ("str", "ä"),
        ("str", "\ud800"),
    ],
)
def test_a_python_value_comes_back_as_its_own_kind_only(kind: str, value: Any) -> None:
    recorded = json.loads(json.dumps(value_to_json(value)))
    found = value_from_json("e", kind, recorded)
    assert (type(found), found) == (type(value), value)
    for other in {"bool", "int", "float", "complex", "bytes"} - {kind}:
        if isinstance(recorded, bool) or other == "bool":
            with pytest.raises(FormatError, match=f"e: a {other} value"):
                value_from_json("e", other, recorded)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("bool", 1),
        ("bool", "True"),
        ("int", 3),
        ("int", "three"),
        ("float", 1.5),
        ("float", "00"),
        ("complex", "0" * 16),
        ("bytes", "0"),
        ("bytes", ["00"]),
        ("str", None),
        ("str", []),
        ("str", ["00", "00"]),
        ("str", [1]),
        ("str", ["zz"]),
        ("list", "x"),
    ],
)
def test_what_is_no_value_of_its_kind_is_refused(kind: str, data: Any) -> None:
    with pytest.raises(FormatError, match=f"e: a {kind} value is recorded as"):
        value_from_json("e", kind, data)
