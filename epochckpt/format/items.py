"""Items in `epoch.json`, and a node's own ones in `node.json`: trees, grids and values of Python leaves.

How a tree and its grids are written is in `grid.ArrayItem`, whose text each epoch of a plan has. Here they are read.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import marshal
import math
from collections.abc import Mapping
from typing import Any

from epochckpt.errors import FormatError
from epochckpt.format import checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.format.codec import MAX_BYTES, Codec, Fields, user_data
from epochckpt.format.grid import MAX_CELLS, MAX_ITEM_CELLS, ArrayItem, Grid, Leaf
from epochckpt.format.json_kinds import is_list

_MAX_DIM = 2**48
_MAX_DIMS = 32


class ItemKind(enum.Enum):
    """What an item is. The values are those of the records, and of `CheckpointManager.item_kinds`."""

    ARRAYS = "arrays"
    """A pytree in data files."""

    FILES = "files"
    """Files that a handler wrote."""

    NODE = "node"
    """A pytree that differs per node; each node's `node.json` describes its own."""


@dataclasses.dataclass(frozen=True)
class ItemRecord:
    """One item of an epoch."""

    kind: ItemKind
    handler: str = ""  # type name of the Orbax handler, as Orbax records it
    arrays: ArrayItem | None = None  # only of kind ARRAYS; so are the next two
    # Python leaves as JSON, by leaf number.
    values: Mapping[int, Any] = dataclasses.field(default_factory=dict[int, Any])
    custom_metadata: Any = None  # the caller's
    same: bool = False  # of NODE: every node of the epoch has the item, with the same content


def items(nodes: str | None) -> Codec[Mapping[str, ItemRecord]]:
    """The codec of items by name, of as many nodes as the attribute `nodes` of their record has; None: of one node."""

    def read(fields: Fields, key: str) -> dict[str, ItemRecord]:
        count = 1 if nodes is None else len(fields.found[nodes])
        return {name: parse_item(fields.path, name, entry, count) for name, entry in fields.mapping(key).items()}

    def write(items: Mapping[str, ItemRecord]) -> checksums.Json:
        texts = {name: checksums.dumps_fields(_item_fields(item)) for name, item in items.items()}
        return checksums.dumps_fields(texts)

    return Codec(read, write)


def _item_fields(item: ItemRecord) -> dict[str, Any]:
    head: dict[str, Any] = {"kind": item.kind.value, "handler": item.handler}
    if item.arrays is None:
        return {**head, "same": item.same} if item.kind is ItemKind.NODE else head
    return {
        **head,
        **item.arrays.json_fields,
        "values": {str(k): v for k, v in item.values.items()},
        "custom_metadata": checksums.pack_json(item.custom_metadata, "custom_metadata"),
    }


def parse_item(path: str, name: str, entry: object, nodes: int) -> ItemRecord:
    """An item of as many nodes; raises FormatError, with the path of the record."""
    paths.check_recorded_name(path, name)
    fields = Fields(path, entry, f"items.{name}.")
    try:
        kind = ItemKind(fields.text("kind"))
    except ValueError as error:
        raise fields.fail("kind", "'arrays', 'files' or 'node'") from error
    handler = fields.text("handler")
    if kind is not ItemKind.ARRAYS:
        return ItemRecord(kind, handler, same=kind is ItemKind.NODE and fields.boolean("same"))
    arrays = _parse_arrays(fields, name, nodes)
    return ItemRecord(kind, handler, arrays, _parse_values(fields, arrays), user_data(fields, "custom_metadata"))


def _parse_arrays(fields: Fields, name: str, nodes: int) -> ArrayItem:
    grids = [_parse_grid(fields, i, row, nodes) for i, row in enumerate(fields.array("grids"))]
    parsed: dict[bytes, tuple[Any, ...]] = {}
    leaves = [_parse_leaf(fields, i, row, grids, parsed) for i, row in enumerate(fields.array("leaves"))]
    if sum(len(grids[leaf.grid].holders) for leaf in leaves if leaf.grid >= 0) > MAX_ITEM_CELLS:
        raise fields.fail("leaves", f"at most {MAX_ITEM_CELLS} cells in all")
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise fields.fail("leaves", "distinct names")
    shardings = fields.array("shardings")
    meshes = fields.array("meshes")
    if any(leaf.sharding >= len(shardings) for leaf in leaves):
        raise fields.fail("shardings", "a row for every leaf that names one")
    return ArrayItem(name, tuple(leaves), tuple(grids), tuple(shardings), tuple(meshes))


def _parse_grid(fields: Fields, number: int, row: object, nodes: int) -> Grid:
    problem = FormatError(fields.path, f"{fields.where}grids[{number}] is not [counts, holders of every cell]")
    if not is_list(row) or len(row) != 2 or not is_list(counts := row[0]) or not is_list(holders := row[1]):
        raise problem
    if len(counts) > _MAX_DIMS or not all(type(c) is int and 0 < c <= MAX_CELLS for c in counts):
        raise problem
    if math.prod(counts) > MAX_CELLS or len(holders) != math.prod(counts):
        raise problem
    lists = [held for held in holders if is_list(held)]
    named = list(itertools.chain.from_iterable(lists))  # a large job has many: they are checked together
    if not all(lists) or {*map(type, named)} != {int} or not 0 <= min(named) <= max(named) < nodes:
        raise problem
    parsed: list[tuple[int, ...]] = []
    for held in holders:
        if is_list(held):
            parsed.append(tuple(held))
        elif type(held) is int and 0 <= held < len(parsed):  # the holders of an earlier cell
            parsed.append(parsed[held])
        else:
            raise problem
    return Grid(tuple(counts), tuple(parsed))


def _parse_leaf(
    fields: Fields, number: int, row: object, grids: list[Grid], parsed: dict[bytes, tuple[Any, ...]]
) -> Leaf:
    if not is_list(row) or len(row) not in (2, 7, 8):
        raise _no_leaf(fields, number)
    path = tree_lib.path_from_json(fields.path, row[0])
    try:
        form = marshal.dumps(row[1:], 2)  # not a tuple, which would take true for 1
    except ValueError:  # nested too deeply
        raise _no_leaf(fields, number) from None
    if (rest := parsed.get(form)) is None:
        rest = parsed[form] = _parse_form(fields, number, row, grids)
    return Leaf._make((path, tree_lib.leaf_name(path), *rest))


def _parse_form(fields: Fields, number: int, row: list[Any], grids: list[Grid]) -> tuple[Any, ...]:
    """The fields of a leaf after its name; few leaves of a tree differ in them."""
    kind = row[1]
    if not isinstance(kind, str):
        raise _no_leaf(fields, number)
    if len(row) == 2 and (kind in tree_lib.VALUE_KINDS or kind in tree_lib.EMPTY_KINDS):
        return Leaf((), "", kind).after_name
    if kind not in tree_lib.ARRAY_KINDS or len(row) < 7 or not is_list(row[3]):
        raise _no_leaf(fields, number)
    impl: str | None = None
    weak_type = False
    match kind, row[7:]:
        case "prng", [str(impl)]:
            pass
        case "jax", [True]:
            weak_type = True
        case _, [] if kind != "prng":
            pass
        case _:
            raise _no_leaf(fields, number)
    dtype = tree_lib.parse_dtype(fields.path, row[2])
    shape: list[Any] = row[3]
    grid, rotation, sharding = row[4:7]
    if {*map(type, shape), type(grid), type(rotation), type(sharding)} != {int} or len(shape) > _MAX_DIMS:
        raise _no_leaf(fields, number)
    if not 0 <= min((*shape, rotation)) <= max((*shape, rotation)) < _MAX_DIM:
        raise _no_leaf(fields, number)
    if not 0 <= grid < len(grids) or sharding < -1:
        raise _no_leaf(fields, number)
    if math.prod(shape) * dtype.itemsize >= MAX_BYTES:
        raise _no_leaf(fields, number)
    counts = grids[int(grid)].counts
    if counts and (len(counts) > len(shape) or any(d % c for d, c in zip(shape, counts, strict=False))):
        where = f"{fields.where}leaves[{number}]"
        raise FormatError(fields.path, f"{where}: shape {shape} is not cut evenly by the grid {list(counts)}")
    return kind, dtype, tuple(shape), grid, rotation, sharding, impl, weak_type


def _no_leaf(fields: Fields, number: int) -> FormatError:
    row = "[path, kind, dtype, shape, grid, rotation, sharding]"
    return FormatError(fields.path, f"{fields.where}leaves[{number}] is not {row}")


def _parse_values(fields: Fields, arrays: ArrayItem) -> dict[int, Any]:
    raw = fields.mapping("values")
    expected = {str(i): i for i, leaf in enumerate(arrays.leaves) if leaf.kind in tree_lib.VALUE_KINDS}
    if raw.keys() != expected.keys():
        raise fields.fail("values", "one value for every Python leaf")
    for k, i in expected.items():
        tree_lib.value_from_json(fields.path, arrays.leaves[i].kind, raw[k])
    return {i: raw[k] for k, i in expected.items()}
