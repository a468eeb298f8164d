"""Reads the records back. Everything in them may be damaged or hostile.

Parsing checks types, ranges and cross references, and raises FormatError with the path of the file. Memory is bounded
by the size of the record.
"""

import dataclasses
import itertools
import marshal
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from epochckpt import _collector
from epochckpt.errors import FormatError, FormatVersionError, unreadable
from epochckpt.format import checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import MAX_CELLS, MAX_ITEM_CELLS, ArrayItem, Grid, Leaf
from epochckpt.format.records import (
    MAX_RECORD_BYTES,
    AlsoFile,
    DataFile,
    EpochRecord,
    ItemRecord,
    NodeEntry,
    NodeRecord,
    RunEntry,
    unpack_contents,
)
from epochckpt.storage import Store

T = TypeVar("T")

_MAX_DIM, _MAX_DIMS = 2**48, 32
_MAX_BYTES = 2**62
_MAX_BRACES = 2**16
_MAX_FEATURE, _SHOWN_FEATURES = 100, 10  # characters of the name of a feature; names in an error
_OPENING = ord("{")
_PLAIN = bytes(set(range(256)) - set(b'"{}'))  # bytes that neither begin nor end a string or an object
_STRING = re.compile(rb'"[^"]*"')


class Fields:
    """Typed access to a parsed JSON object; errors name the file and the field."""

    def __init__(self, path: str, data: object, where: str = ""):
        if not isinstance(data, dict):
            raise FormatError(path, f"{where or 'the record'} is not an object")
        self.path, self.data, self.where = path, data, where

    def fail(self, name: str, expected: str) -> FormatError:
        value = str(self.data.get(name))[:80]
        return FormatError(self.path, f"{self.where}{name}: expected {expected}, found {value!r}")

    def get(self, name: str, kind: type[T], expected: str, valid: Callable[[T], bool] = lambda value: True) -> T:
        value = self.data.get(name)
        if type(value) is not kind or not valid(value):
            raise self.fail(name, expected)
        return value

    def integer(self, name: str, low: int = 0, high: int = 2**63) -> int:
        return self.get(name, int, f"an integer of at least {low}", lambda value: low <= value < high)

    def text(self, name: str, limit: int = 1000) -> str:
        return self.get(name, str, "a short string", lambda value: len(value) <= limit)

    def boolean(self, name: str) -> bool:
        return self.get(name, bool, "true or false")

    def array(self, name: str) -> list[Any]:
        return self.get(name, list, "a list")

    def mapping(self, name: str) -> dict[str, Any]:
        return self.get(name, dict, "an object")

    def number(self, name: str) -> float:
        value = self.data.get(name)
        if not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self.fail(name, "a finite number")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        found = self.mapping(name)
        if not all(type(v) in (int, float) and abs(v) < 1e300 for v in found.values()):
            raise self.fail(name, "an object of finite numbers")
        return found


def read_record(
    store: Store, path: str, parse: Callable[[str, bytes], T], *, limit_bytes: int = MAX_RECORD_BYTES
) -> T | None:
    """Reads a small file and returns what `parse` makes of path and content; None if there is no such file.

    DamagedError or FormatError: the file cannot be used. AccessError or StorageError: storage does not give it.
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


def open_record(path: str, data: bytes, kind: str, trees: bool = True) -> Fields:
    """The fields of a sealed record of a kind, for typed access; raises like `parse_epoch`."""
    checksums.check_seal(path, data)
    fields = Fields(path, checksums.parse_sealed(path, data if trees else _without_items(data)))
    if fields.data.get("format") != paths.FORMAT:
        raise FormatError(path, f"is no epochckpt record (format {str(fields.data.get('format'))[:40]!r})")
    _check_understood(fields)
    if fields.data.get("record") != kind:
        raise FormatError(path, f"is a {str(fields.data.get('record'))[:40]!r} record, expected {kind!r}")
    return fields


def _check_understood(fields: Fields) -> None:
    """Raises FormatVersionError for a record that only a newer epochckpt can read, before its fields are looked at."""
    remedy = "install a newer epochckpt. Nothing is known to be wrong with the record"
    version = fields.data.get("version")
    if type(version) is not int or version != paths.VERSION:
        problem = f"has format version {str(version)[:40]!r}; this epochckpt reads version {paths.VERSION}"
        raise FormatVersionError(fields.path, f"{problem}: {remedy}")
    if "requires" not in fields.data:
        return
    required = fields.array("requires")
    if not all(isinstance(name, str) and len(name) <= _MAX_FEATURE for name in required):
        raise fields.fail("requires", f"names of features, of at most {_MAX_FEATURE} characters")
    unknown = [name for name in required if name not in paths.FEATURES]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_SHOWN_FEATURES]))
        problem = f"needs a newer epochckpt: it requires {shown}, which this one does not know"
        raise FormatVersionError(fields.path, f"{problem}; {remedy}", unknown[:_SHOWN_FEATURES])


def parse_node(path: str, data: bytes) -> NodeRecord:
    """Parses `node.json`; raises like `parse_epoch`."""
    fields = open_record(path, data, "node")
    items = {name: _parse_item(path, name, entry, 1) for name, entry in fields.mapping("items").items()}
    if any(item.arrays is None for item in items.values()):
        raise fields.fail("items", "pytrees")
    return NodeRecord(
        fields.integer("epoch"),
        fields.text("attempt"),
        paths.check_recorded_name(path, fields.data.get("node"), paths.is_node_name),
        fields.integer("process"),
        fields.integer("processes"),
        fields.text("plan"),
        tuple(_parse_file(Fields(path, f, f"files[{i}].")) for i, f in enumerate(fields.array("files"))),
        fields.numbers("timings"),
        items,
        _also(fields) if "also" in fields.data else (),
    )


def _also(fields: Fields) -> tuple[AlsoFile, ...]:
    files = [_parse_file(Fields(fields.path, f, f"also[{i}].")) for i, f in enumerate(fields.array("also"))]
    if any(file.name for file in files):
        raise fields.fail("also", "data files")
    return tuple(AlsoFile(**vars(file)) for file in files)


def _parse_file(fields: Fields) -> DataFile:
    sums = tuple(fields.array("xxh3"))
    if not all(isinstance(s, str) and len(s) == 16 for s in sums):
        raise fields.fail("xxh3", "strings of 16 hex digits")
    item = paths.check_recorded_name(fields.path, fields.data.get("item"))
    part, size, start, cells = (fields.integer(n, high=_MAX_BYTES) for n in ("part", "size", "data_start", "cells"))
    name = fields.text("name")
    if name and not paths.is_file_path(name):
        raise fields.fail("name", "a relative path")
    return DataFile(item, part, size, start, cells, fields.integer("block_bytes", low=1, high=2**31), sums, name)


def parse_epoch(path: str, data: bytes) -> EpochRecord:
    """Parses `epoch.json`; raises DamagedError, FormatVersionError (of a newer epochckpt) or FormatError."""
    with _collector.paused():
        return _epoch_record(open_record(path, data, "epoch"), trees=True)


def parse_head(path: str, data: bytes) -> EpochRecord:
    """Parses `epoch.json` without its items, in a small part of the time, and does not notice faults in them."""
    return _epoch_record(open_record(path, data, "epoch", trees=False), trees=False)


def _without_items(data: bytes) -> bytes:
    """The text of a record without its items; the whole text if they cannot be cut out without parsing.

    JSON has raw quotes only at the ends of strings. So `,"items":{` is always a key, and the braces outside of strings
    say how deep it lies and where its value ends.
    """
    start, end = data.find(b',"items":{'), data.find(b',"default_item":')
    if not 0 <= start < end or data.count(b"{", 0, start) != 1 or b"}" in data[:start]:
        return data  # the key is not in the outermost object, or a name has a brace
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


def _epoch_record(fields: Fields, trees: bool) -> EpochRecord:
    nodes = tuple(_parse_node_entry(fields.path, i, n) for i, n in enumerate(fields.array("nodes")))
    if not nodes or len({node.name for node in nodes}) != len(nodes):
        raise fields.fail("nodes", "at least one node, with distinct names")
    raw_items = fields.mapping("items") if trees else {}
    items = {name: _parse_item(fields.path, name, entry, len(nodes)) for name, entry in raw_items.items()}
    default_item = fields.boolean("default_item")
    if trees and default_item and paths.DEFAULT_ITEM not in items:
        raise fields.fail("items", f"the item {paths.DEFAULT_ITEM!r}")
    per_node = "per_node" in fields.data and fields.boolean("per_node")
    if per_node and len(nodes) != 1:
        raise fields.fail("per_node", "one node")
    copied_from = fields.text("copied_from", 80) if "copied_from" in fields.data else ""
    return EpochRecord(
        fields.integer("epoch"),
        paths.check_recorded_name(fields.path, fields.text("attempt", 80)),
        fields.boolean("objects"),
        fields.text("plan"),
        nodes,
        items,
        default_item,
        user_data(fields, "metrics"),
        user_data(fields, "custom_metadata", dict),
        fields.integer("started_ns"),
        fields.integer("committed_ns"),
        fields.numbers("timings"),
        _unsupported(fields),
        _view(fields),
        per_node,
        copied_from,
        _carried(fields, items) if trees and "carried" in fields.data else {},
        tuple(_parse_run(fields.path, i, row) for i, row in enumerate(fields.array("runs")))
        if "runs" in fields.data
        else (),
    )


def _parse_run(path: str, number: int, row: object) -> RunEntry:
    names = [field.name for field in dataclasses.fields(RunEntry)]
    if not isinstance(row, list) or len(row) != len(names):
        raise FormatError(path, f"runs[{number}]: expected a list of {len(names)} values")
    fields = Fields(path, dict(zip(names, row, strict=True)), f"runs[{number}].")
    integers: dict[str, Any] = {name: fields.integer(name) for name in names[1:6]}
    secs: dict[str, Any] = {name: fields.number(name) for name in names[6:9]}
    killed = None if fields.data["killed"] is None else fields.boolean("killed")
    name = paths.check_recorded_name(path, fields.text("incarnation", 80))
    return RunEntry(name, **integers, **secs, killed=killed)


def _carried(fields: Fields, items: Mapping[str, ItemRecord]) -> dict[str, dict[str, bytes]]:
    try:
        found = unpack_contents(fields.mapping("carried"))
    except (ValueError, TypeError, AttributeError):
        raise fields.fail("carried", "contents in base64, by item and name") from None
    for item, contents in found.items():
        arrays = items[item].arrays if item in items else None
        sizes = {} if arrays is None else {str(i): arrays.leaves[i].nbytes for i in arrays.carried}
        if item not in items or (arrays is not None and any(sizes.get(n) != len(d) for n, d in contents.items())):
            raise fields.fail("carried", "small leaves, and files, of items of the epoch")
    return found


def _parse_item(path: str, name: str, entry: object, nodes: int) -> ItemRecord:
    paths.check_recorded_name(path, name)
    fields = Fields(path, entry, f"items.{name}.")
    kind, handler = fields.text("kind"), fields.text("handler")
    if kind in ("files", "node"):
        return ItemRecord(kind, handler, same=kind == "node" and fields.boolean("same"))
    if kind != "arrays":
        raise fields.fail("kind", "'arrays', 'files' or 'node'")
    arrays = _parse_arrays(fields, name, nodes)
    return ItemRecord(kind, handler, arrays, _parse_values(fields, arrays), user_data(fields, "custom_metadata"))


def _unsupported(fields: Fields) -> dict[str, dict[str, str]] | None:
    name = "orbax_unsupported"
    if fields.data.get(name) is None:
        return None
    found = fields.mapping(name)
    if not all(isinstance(d, dict) and all(isinstance(v, str) for v in d.values()) for d in found.values()):
        raise fields.fail(name, "reasons by leaf, by item")
    return found


def _view(fields: Fields) -> dict[str, tuple[int, str]] | None:
    name = "orbax_view"
    if fields.data.get(name) is None:
        return None
    found = {}
    for path, row in fields.mapping(name).items():
        typed = isinstance(row, list) and [type(value) for value in row] == [int, str]
        if not typed or not 0 <= row[0] < _MAX_BYTES or not paths.is_file_path(path):
            raise fields.fail(name, "[length, digest] by path")
        found[path] = row[0], row[1]
    return found


def user_data(fields: Fields, name: str, kind: type = object) -> Any:
    """A field that holds user data as JSON; FormatError if it is nested too deeply, or of another kind."""
    try:
        found = checksums.unpack_json(fields.data.get(name))
    except RecursionError:
        raise FormatError(fields.path, f"{fields.where}{name} is nested too deeply") from None
    if not isinstance(found, kind):
        raise fields.fail(name, "an object")
    return found


def _parse_node_entry(path: str, number: int, entry: object) -> NodeEntry:
    problem = FormatError(path, f"nodes[{number}] is not [name, process, size, digest, seconds, files]")
    if not isinstance(entry, list) or len(entry) != 6 or not isinstance(entry[5], list):
        raise problem
    name, process, size, digest, secs, files = entry
    paths.check_recorded_name(path, name, paths.is_node_name)
    if type(process) is not int or type(size) is not int or not 0 < size <= MAX_RECORD_BYTES:
        raise problem
    if not isinstance(digest, str) or type(secs) not in (int, float) or not 0 <= secs < 1e12:
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


def _parse_arrays(fields: Fields, name: str, nodes: int) -> ArrayItem:
    grids = [_parse_grid(fields, i, row, nodes) for i, row in enumerate(fields.array("grids"))]
    known: dict[bytes, tuple[Any, ...]] = {}
    leaves = [_parse_leaf(fields, i, row, grids, known) for i, row in enumerate(fields.array("leaves"))]
    if sum(len(grids[leaf.grid].holders) for leaf in leaves if leaf.grid >= 0) > MAX_ITEM_CELLS:
        raise fields.fail("leaves", f"at most {MAX_ITEM_CELLS} cells in all")
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise fields.fail("leaves", "distinct names")
    shardings, meshes = fields.array("shardings"), fields.array("meshes")
    if any(leaf.sharding >= len(shardings) for leaf in leaves):
        raise fields.fail("shardings", "a row for every leaf that names one")
    return ArrayItem(name, tuple(leaves), tuple(grids), tuple(shardings), tuple(meshes))


def _parse_grid(fields: Fields, number: int, row: object, nodes: int) -> Grid:
    problem = FormatError(fields.path, f"{fields.where}grids[{number}] is not [counts, holders of every cell]")
    if not isinstance(row, list) or len(row) != 2 or not all(isinstance(x, list) for x in row):
        raise problem
    counts, holders = row
    if len(counts) > _MAX_DIMS or not all(type(c) is int and 0 < c <= MAX_CELLS for c in counts):
        raise problem
    if math.prod(counts) > MAX_CELLS or len(holders) != math.prod(counts):
        raise problem
    lists = [held for held in holders if isinstance(held, list)]
    named = list(itertools.chain.from_iterable(lists))  # a large job has many: they are checked together
    if not all(lists) or {*map(type, named)} != {int} or not 0 <= min(named) <= max(named) < nodes:
        raise problem
    parsed: list[tuple[int, ...]] = []
    for held in holders:
        if isinstance(held, list):
            parsed.append(tuple(held))
        elif type(held) is int and 0 <= held < len(parsed):  # the holders of an earlier cell
            parsed.append(parsed[held])
        else:
            raise problem
    return Grid(tuple(counts), tuple(parsed))


def _parse_leaf(
    fields: Fields, number: int, row: object, grids: list[Grid], known: dict[bytes, tuple[Any, ...]]
) -> Leaf:
    if not isinstance(row, list) or len(row) not in (2, 7, 8):
        raise _no_leaf(fields, number)
    path = tree_lib.path_from_json(fields.path, row[0])
    try:
        form = marshal.dumps(row[1:], 2)  # not a tuple, which would take true for 1
    except ValueError:  # nested too deeply
        raise _no_leaf(fields, number) from None
    if (rest := known.get(form)) is None:
        rest = known[form] = _parse_form(fields, number, row, grids)
    return Leaf._make((path, tree_lib.leaf_name(path), *rest))


def _parse_form(fields: Fields, number: int, row: list[Any], grids: list[Grid]) -> tuple[Any, ...]:
    """The fields of a leaf after its name; few leaves of a tree differ in them."""
    kind = row[1]
    if not isinstance(kind, str):
        raise _no_leaf(fields, number)
    if len(row) == 2 and (kind in tree_lib.VALUE_KINDS or kind in tree_lib.EMPTY_KINDS):
        return Leaf((), "", kind)[2:]
    if kind not in tree_lib.ARRAY_KINDS or len(row) != (8 if kind == "prng" else 7) or not isinstance(row[3], list):
        raise _no_leaf(fields, number)
    dtype = tree_lib.parse_dtype(fields.path, row[2])
    shape, (grid, rotation, sharding) = row[3], row[4:7]
    impl = row[7] if kind == "prng" else None
    if {*map(type, shape), type(grid), type(rotation), type(sharding)} != {int} or len(shape) > _MAX_DIMS:
        raise _no_leaf(fields, number)
    if not 0 <= min((*shape, rotation)) <= max((*shape, rotation)) < _MAX_DIM:
        raise _no_leaf(fields, number)
    if not 0 <= grid < len(grids) or sharding < -1:
        raise _no_leaf(fields, number)
    if math.prod(shape) * dtype.itemsize >= _MAX_BYTES or not isinstance(impl, str | None):
        raise _no_leaf(fields, number)
    counts = grids[grid].counts
    if counts and (len(counts) > len(shape) or any(d % c for d, c in zip(shape, counts, strict=False))):
        where = f"{fields.where}leaves[{number}]"
        raise FormatError(fields.path, f"{where}: shape {shape} is not cut evenly by the grid {list(counts)}")
    return kind, dtype, tuple(shape), grid, rotation, sharding, impl


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
