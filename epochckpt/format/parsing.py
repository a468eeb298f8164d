"""Reading the records back: everything in them may be damaged or hostile.

Parsing checks types, ranges and cross references and raises FormatError naming the file; it allocates nothing that
the record's own size does not bound.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from epochckpt.errors import FormatError, FormatVersionError, unreadable
from epochckpt.format import checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import ArrayItem, Grid, Leaf
from epochckpt.format.records import MAX_RECORD_BYTES, DataFile, EpochRecord, ItemRecord, NodeEntry, NodeRecord
from epochckpt.storage import Store

T = TypeVar("T")

_MAX_DIM = 2**48
_MAX_BYTES = 2**62
_MAX_CELLS = 2**24
_MAX_BRACES = 2**16
_OPENING = ord("{")
_PLAIN = bytes(set(range(256)) - set(b'"{}'))  # what does not tell where strings and objects end
_STRING = re.compile(rb'"[^"]*"')


class _Fields:
    """Typed access to a parsed JSON object; every failure names the file and the field."""

    def __init__(self, path: str, data: object, where: str = ""):
        if not isinstance(data, dict):
            raise FormatError(path, f"{where or 'the record'} is not an object")
        self.path, self.data, self.where = path, data, where

    def fail(self, name: str, expected: str) -> FormatError:
        value = str(self.data.get(name))[:80]
        return FormatError(self.path, f"{self.where}{name}: expected {expected}, found {value!r}")

    def integer(self, name: str, low: int = 0, high: int = 2**63) -> int:
        value = self.data.get(name)
        if type(value) is not int or not low <= value < high:
            raise self.fail(name, f"an integer of at least {low}")
        return value

    def text(self, name: str, limit: int = 1000) -> str:
        value = self.data.get(name)
        if not isinstance(value, str) or len(value) > limit:
            raise self.fail(name, "a short string")
        return value

    def boolean(self, name: str) -> bool:
        value = self.data.get(name)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def array(self, name: str) -> list[Any]:
        value = self.data.get(name)
        if not isinstance(value, list):
            raise self.fail(name, "a list")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.data.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        value = self.mapping(name)
        if any(isinstance(v, bool) or not isinstance(v, int | float) or not abs(v) < 1e300 for v in value.values()):
            raise self.fail(name, "an object of finite numbers")
        return value


def read_record(
    store: Store, path: str, parse: Callable[[str, bytes], T], *, limit_bytes: int = MAX_RECORD_BYTES
) -> T | None:
    """Reads a small file and parses it.

    Args:
        store: where it lies.
        path: of the file; error messages name it.
        parse: makes the result of path and content, and raises DamagedError or FormatError if it cannot.
        limit_bytes: a larger file is not read.

    Returns:
        What `parse` returns; None if there is no such file.

    Raises:
        DamagedError, FormatError: the file cannot be used.
        AccessError, StorageError: storage does not give it, which says nothing about its content.
    """
    try:
        data = store.read(path, limit_bytes=limit_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise FormatError(path, str(error)) from None
    except OSError as error:
        raise unreadable(path, error) from error
    return parse(path, data)


def _open(path: str, data: bytes, kind: str, trees: bool = True) -> _Fields:
    checksums.check_seal(path, data)
    fields = _Fields(path, checksums.parse_sealed(path, data if trees else _without_items(data)))
    if fields.data.get("format") != paths.FORMAT:
        raise FormatError(path, f"is no epochckpt record (format {str(fields.data.get('format'))[:40]!r})")
    version = fields.data.get("version")
    if version != paths.VERSION:
        raise FormatVersionError(
            path,
            f"has format version {str(version)[:40]!r}; this epochckpt reads version {paths.VERSION}: "
            "install a newer one",
        )
    if fields.data.get("record") != kind:
        raise FormatError(path, f"is a {str(fields.data.get('record'))[:40]!r} record, expected {kind!r}")
    return fields


def parse_node(path: str, data: bytes) -> NodeRecord:
    """Parses `node.json`."""
    fields = _open(path, data, "node")
    files = []
    for i, entry in enumerate(fields.array("files")):
        f = _Fields(path, entry, f"files[{i}].")
        sums = tuple(f.array("xxh3"))
        if not all(isinstance(s, str) and len(s) == 16 for s in sums):
            raise f.fail("xxh3", "strings of 16 hex digits")
        item = paths.check_recorded_name(path, f.data.get("item"))
        part, size, start, cells = (f.integer(n, high=_MAX_BYTES) for n in ("part", "size", "data_start", "cells"))
        block = f.integer("block_bytes", low=1, high=2**31)
        name = f.text("name")
        if name and not paths.is_file_path(name):
            raise f.fail("name", "a relative path")
        files.append(DataFile(item, part, size, start, cells, block, sums, name))
    items = {name: _parse_item(path, name, entry, 1) for name, entry in fields.mapping("items").items()}
    if any(item.arrays is None for item in items.values()):
        raise fields.fail("items", "pytrees")
    return NodeRecord(
        fields.integer("epoch"),
        fields.text("attempt"),
        paths.check_recorded_node(path, fields.data.get("node")),
        fields.integer("process"),
        fields.integer("processes"),
        fields.text("plan"),
        tuple(files),
        fields.numbers("timings"),
        items,
    )


def parse_epoch(path: str, data: bytes) -> EpochRecord:
    """Parses `epoch.json`.

    Raises:
        DamagedError: the bytes are not those that were written.
        FormatVersionError: written by a newer epochckpt.
        FormatError: something in it is not what the format allows.
    """
    fields = _open(path, data, "epoch")
    nodes = _parse_nodes(fields)
    items = {name: _parse_item(path, name, entry, len(nodes)) for name, entry in fields.mapping("items").items()}
    if fields.boolean("default_item") and paths.DEFAULT_ITEM not in items:
        raise fields.fail("items", f"the item {paths.DEFAULT_ITEM!r}")
    return _epoch_record(fields, nodes, items)


def parse_head(path: str, data: bytes) -> EpochRecord:
    """Parses `epoch.json` without its trees: the record that `parse_epoch` gives, with no items.

    For looking at many epochs: takes a small part of the time. Raises what `parse_epoch` raises, but that what is
    wrong with the items alone is not noticed.
    """
    fields = _open(path, data, "epoch", trees=False)
    return _epoch_record(fields, _parse_nodes(fields), {})


def _without_items(data: bytes) -> bytes:
    """The text of a record without its items; all of it where they cannot be cut out without parsing.

    A raw quote stands in JSON only at the ends of strings, so `,"items":{` is a key wherever it occurs, and braces
    outside of strings tell how deep it lies, and where its value ends.
    """
    start, end = data.find(b',"items":{'), data.find(b',"default_item":')
    if not 0 <= start < end or data.count(b"{", 0, start) != 1 or b"}" in data[:start]:
        return data  # it does not lie in the outermost object, or a name has a brace
    items = data[start:end]
    if b"\\" in items:
        items = items.replace(b"\\\\", b"").replace(b'\\"', b"")
    braces = items.translate(None, _PLAIN).replace(b'""', b"")  # an even number of quotes ends and begins no string
    if b'"' in braces:
        braces = _STRING.sub(b"", braces)
    if len(braces) > _MAX_BRACES:
        return data
    depth = list(itertools.accumulate(1 if brace == _OPENING else -1 for brace in braces))
    whole = data[end - 1 : end] == b"}" and depth[-1:] == [0] and 0 not in depth[:-1]
    return data[:start] + data[end:] if whole else data


def _parse_nodes(fields: _Fields) -> tuple[NodeEntry, ...]:
    nodes = tuple(_parse_node_entry(fields.path, i, n) for i, n in enumerate(fields.array("nodes")))
    names = [n.name for n in nodes]
    if not nodes or len(set(names)) != len(names):
        raise fields.fail("nodes", "at least one node, with distinct names")
    return nodes


def _epoch_record(fields: _Fields, nodes: tuple[NodeEntry, ...], items: dict[str, ItemRecord]) -> EpochRecord:
    attempt = paths.check_recorded_name(fields.path, fields.text("attempt", 80))
    per_node = "per_node" in fields.data and fields.boolean("per_node")
    if per_node and len(nodes) != 1:
        raise fields.fail("per_node", "one node")
    return EpochRecord(
        fields.integer("epoch"),
        attempt,
        fields.boolean("objects"),
        fields.text("plan"),
        nodes,
        items,
        fields.boolean("default_item"),
        _user_data(fields, "metrics", fields.data.get("metrics")),
        _user_data(fields, "custom_metadata", fields.mapping("custom_metadata")),
        fields.integer("started_ns"),
        fields.integer("committed_ns"),
        fields.numbers("timings"),
        _unsupported(fields),
        per_node,
        _view(fields),
    )


def _parse_item(path: str, name: str, entry: object, nodes: int) -> ItemRecord:
    paths.check_recorded_name(path, name)
    fields = _Fields(path, entry, f"items.{name}.")
    kind, handler = fields.text("kind"), fields.text("handler")
    if kind in ("files", "node"):
        same = kind == "node" and "same" in fields.data and fields.boolean("same")  # older epochs lack it
        return ItemRecord(kind, handler, same=same)
    if kind != "arrays":
        raise fields.fail("kind", "'arrays', 'files' or 'node'")
    arrays = _parse_arrays(fields, name, nodes)
    attached = _user_data(fields, "an item's custom_metadata", fields.data.get("custom_metadata"))
    return ItemRecord(kind, handler, arrays, _parse_values(fields, arrays), attached)


def _unsupported(fields: _Fields) -> dict[str, dict[str, str]] | None:
    name = "orbax_unsupported"
    if fields.data.get(name) is None:
        return None
    found = fields.mapping(name)
    if not all(isinstance(d, dict) and all(isinstance(v, str) for v in d.values()) for d in found.values()):
        raise fields.fail(name, "reasons by leaf, by item")
    return found


def _view(fields: _Fields) -> dict[str, tuple[int, str]] | None:
    name = "orbax_view"
    if fields.data.get(name) is None:
        return None
    found = {}
    for path, row in fields.mapping(name).items():
        if not isinstance(row, list) or len(row) != 2 or not paths.is_file_path(path):
            raise fields.fail(name, "[length, digest] by path")
        size, digest = row
        if type(size) is not int or not 0 <= size < _MAX_BYTES or not isinstance(digest, str):
            raise fields.fail(name, "[length, digest] by path")
        found[path] = size, digest
    return found


def _user_data(fields: _Fields, name: str, value: Any) -> Any:
    try:
        found = checksums.unpack_json(value)
    except RecursionError:
        raise FormatError(fields.path, f"{name} is nested too deeply") from None
    if isinstance(value, dict) and not isinstance(found, dict) and name == "custom_metadata":
        raise fields.fail(name, "an object")
    return found


def _parse_node_entry(path: str, number: int, entry: object) -> NodeEntry:
    problem = FormatError(path, f"nodes[{number}] is not [name, process, size, digest, seconds, files]")
    if not isinstance(entry, list) or len(entry) != 6 or not isinstance(entry[5], list):
        raise problem
    name, process, size, digest, secs, files = entry
    paths.check_recorded_node(path, name)
    if type(process) is not int or type(size) is not int or not 0 < size <= MAX_RECORD_BYTES:
        raise problem
    if (
        not isinstance(digest, str)
        or isinstance(secs, bool)
        or not isinstance(secs, int | float)
        or not 0 <= secs < 1e12
    ):
        raise problem
    parsed = []
    for f in files:
        if not isinstance(f, list) or not all(type(v) is int and 0 <= v < _MAX_BYTES for v in f[1:5]):
            raise problem
        if len(f) != 5 and (len(f) != 6 or not paths.is_file_path(f[5])):
            raise problem
        paths.check_recorded_name(path, f[0])
        parsed.append(DataFile.from_row(f))
    return NodeEntry(name, process, size, digest, tuple(parsed), float(secs))


def _parse_arrays(fields: _Fields, name: str, nodes: int) -> ArrayItem:
    path = fields.path
    grids = []
    for i, row in enumerate(fields.array("grids")):
        problem = FormatError(path, f"{fields.where}grids[{i}] is not [counts, holders of every cell]")
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(x, list) for x in row):
            raise problem
        counts, holders = row
        if len(counts) > 32 or not all(type(c) is int and 0 < c <= _MAX_CELLS for c in counts):
            raise problem
        if math.prod(counts) > _MAX_CELLS or len(holders) != math.prod(counts):
            raise problem
        for held in holders:
            if not isinstance(held, list) or not held or not all(type(n) is int and 0 <= n < nodes for n in held):
                raise problem
        grids.append(Grid(tuple(counts), tuple(map(tuple, holders))))
    leaves = [_parse_leaf(fields, i, row, grids) for i, row in enumerate(fields.array("leaves"))]
    if sum(len(grids[leaf.grid].holders) for leaf in leaves if leaf.grid >= 0) > _MAX_CELLS:
        raise fields.fail("leaves", f"at most {_MAX_CELLS} cells in all")
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise fields.fail("leaves", "distinct names")
    shardings, meshes = fields.array("shardings"), fields.array("meshes")
    if any(leaf.sharding >= len(shardings) for leaf in leaves):
        raise fields.fail("shardings", "a row for every leaf that names one")
    return ArrayItem(name, tuple(leaves), tuple(grids), tuple(shardings), tuple(meshes))


def _parse_leaf(fields: _Fields, number: int, row: object, grids: list[Grid]) -> Leaf:
    where = f"{fields.where}leaves[{number}]"
    problem = FormatError(fields.path, f"{where} is not [path, kind, dtype, shape, grid, rotation, sharding]")
    if not isinstance(row, list) or len(row) not in (2, 7, 8) or not isinstance(row[1], str):
        raise problem
    path = tree_lib.path_from_json(fields.path, row[0])
    name, kind = tree_lib.leaf_name(path), row[1]
    if kind in tree_lib.VALUE_KINDS | tree_lib.EMPTY_KINDS and len(row) == 2:
        return Leaf(path, name, kind)
    if (
        kind not in tree_lib.ARRAY_KINDS
        or len(row) < 7
        or not isinstance(row[3], list)
        or (len(row) == 8) != (kind == "prng")
    ):
        raise problem
    dtype = tree_lib.parse_dtype(fields.path, row[2])
    shape, (grid, rotation, sharding) = row[3], row[4:7]
    impl = row[7] if kind == "prng" else None
    ints = all(type(v) is int for v in (*shape, grid, rotation, sharding))
    if (
        not ints
        or len(shape) > 32
        or not all(0 <= d < _MAX_DIM for d in shape)
        or (impl is not None and not isinstance(impl, str))
    ):
        raise problem
    if (
        not 0 <= grid < len(grids)
        or not 0 <= rotation < _MAX_DIM
        or sharding < -1
        or math.prod(shape) * dtype.itemsize >= _MAX_BYTES
    ):
        raise problem
    counts = grids[grid].counts
    if len(counts) > len(shape) or any(d % c for d, c in zip(shape, counts, strict=False)):
        raise FormatError(fields.path, f"{where}: shape {shape} is not cut evenly by the grid {list(counts)}")
    return Leaf(path, name, kind, dtype, tuple(shape), grid, rotation, sharding, impl)


def _parse_values(fields: _Fields, arrays: ArrayItem) -> dict[int, Any]:
    raw = fields.mapping("values")
    expected = {str(i): i for i, leaf in enumerate(arrays.leaves) if leaf.kind in tree_lib.VALUE_KINDS}
    if raw.keys() != expected.keys():
        raise fields.fail("values", "one value for every Python leaf")
    for k, i in expected.items():
        tree_lib.value_from_json(fields.path, arrays.leaves[i].kind, raw[k])
    return {i: raw[k] for k, i in expected.items()}
