"""One epoch in full: its items, their leaves, and where each part of an array lies. Reads records, no arrays.

Nothing here asks JAX for its devices: shardings are put in the words of the records. Typed keys have the shape of their
data, which is what reading them gives.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from epochckpt import _text
from epochckpt._threads import Pool
from epochckpt._units import several
from epochckpt.arrays import EpochReader
from epochckpt.commit import Commits
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeletedError, EpochNotFoundError, FormatError, say
from epochckpt.format import ArrayItem, EpochRecord, ItemRecord, Leaf, parsing, paths
from epochckpt.format import tree as tree_lib
from epochckpt.inspection import leftovers
from epochckpt.inspection.rows import COMMITTED, DAMAGED, EpochDetail, EpochRow, FileRow, ItemRow, LeafRow, ShardingRow
from epochckpt.orbax import OrbaxRecord, marks, steps
from epochckpt.orbax.leaves import UNKNOWN, OrbaxItem, StoredLeaf
from epochckpt.storage import Store

MAX_REPR = 120
"""Characters of a Python value that a row shows."""

_TAGS = {"threefry2x32": "fry", "rbg": "rbg", "unsafe_rbg": "urbg"}  # as jax names the dtypes of keys
_MAX_SCALARS = 1000  # of stock Orbax, each of which is an array by itself, read to show its value
_MAX_FILES = 100_000
_THREADS = 4  # for the records of nodes


def readers(commits: Commits, epoch: int, pool: Pool) -> tuple[dict[str, EpochReader], dict[str, str]]:
    """Readers of an epoch that each node saved by itself, and what is wrong with the other nodes, by node.

    Args:
        commits: the directory.
        epoch: the number.
        pool: the threads that read.
    """
    folder = commits.folder(epoch)
    found: dict[str, EpochReader] = {}
    problems: dict[str, str] = {}
    for name, is_folder in sorted(leftovers.names(commits.store, folder)):
        at = paths.join(folder, name)
        if not is_folder or not paths.is_name(name):
            continue
        try:
            record = commits.read_in(at, epoch, parsing.parse_epoch)
        except (EpochCheckpointError, OSError) as error:
            problems[paths.shown_name(name)] = say(error)
            continue
        if record is not None and record.per_node and record.nodes[0].folder == name:
            found[record.nodes[0].name] = EpochReader(commits.store, at, record, pool)
    return found, problems


def describe(commits: Commits, row: EpochRow) -> EpochDetail:
    """Everything that is known of one epoch without reading arrays.

    An item that cannot be looked into has a `problem`; it hides no other item. If the epoch's record itself cannot be
    read there are no items, and the row says why. Attempts that were not committed have no items.

    Args:
        commits: the directory's epochs.
        row: the epoch, from the overview.

    Raises:
        EpochDeletedError: it is not there any more.
        AccessError: it may not be read.
    """
    if row.state not in (COMMITTED, DAMAGED):
        return EpochDetail(row, ())
    try:
        record = commits.read_record(row.epoch)
    except EpochNotFoundError as error:
        per_node, problems = readers(commits, row.epoch, Pool(_THREADS))
        if per_node or problems:
            return EpochDetail(row, tuple(_per_node_items(per_node, problems)))
        if row.state == DAMAGED:
            return EpochDetail(row, ())
        raise EpochDeletedError(
            row.epoch, commits.store.root, "it was there when the directory was looked at"
        ) from error
    except (DamagedError, FormatError) as error:
        return EpochDetail(dataclasses.replace(row, state=DAMAGED, detail=row.detail or str(error)), ())
    folder = commits.folder(row.epoch)
    if isinstance(record, OrbaxRecord):
        return EpochDetail(row, tuple(_orbax_items(commits, folder, record)))
    reader = EpochReader(commits.store, folder, record, Pool(_THREADS))
    items = [_item(reader, name, item) for name, item in sorted(record.items.items())]
    return EpochDetail(row, tuple(items), record.orbax_unsupported)


# -- epochs of ours --------------------------------------------------------------------------------------------------


def _item(reader: EpochReader, name: str, item: ItemRecord) -> ItemRow:
    handler = item.handler.rpartition(".")[2]
    if item.arrays is not None:
        return _array_item(name, reader.record, item, handler)
    if item.kind == "node":
        return _node_item(reader, name, handler)
    files = [FileRow(f.name, n.name, f.size) for n in reader.record.nodes for f in n.files if f.item == name]
    return ItemRow(name, item.kind, handler, sum(f.nbytes for f in files), files=tuple(files))


def _per_node_items(per_node: Mapping[str, EpochReader], problems: Mapping[str, str]) -> list[ItemRow]:
    """The items of an epoch that each node saved by itself: every item is each node's own."""
    found: dict[str, dict[str, ItemRow]] = {}
    for node, reader in per_node.items():
        for name, item in reader.record.items.items():
            row = _item(reader, name, item)
            found.setdefault(name, {})[node] = row.nodes.get(node, row)
    unread = [f"node {node}: {problem}" for node, problem in problems.items()]
    return [
        ItemRow(
            name,
            "node",
            next((row.handler for row in nodes.values()), ""),
            sum(row.nbytes for row in nodes.values()),
            nodes=nodes,
            problem="; ".join([*unread, *(row.problem for row in nodes.values() if row.problem)]),
        )
        for name, nodes in sorted(found.items())
    ]


def _array_item(name: str, record: EpochRecord, item: ItemRecord, handler: str = "") -> ItemRow:
    arrays = item.arrays
    assert arrays is not None, "callers choose array items"
    shardings = _Shardings(arrays, [n.name for n in record.nodes])
    leaves = []
    for number, (public, leaf) in enumerate(zip(arrays.public_names, arrays.leaves, strict=True)):
        value, sharding = "", None
        if leaf.kind in ("longstr", "longbytes"):
            value = f"<{leaf.kind.removeprefix('long')} of {leaf.nbytes} bytes>"
        elif leaf.dtype is not None:
            sharding = shardings.of(number)
        elif number in item.values:
            value = shortened(tree_lib.value_from_json(paths.EPOCH_RECORD, leaf.kind, item.values[number]))
        leaves.append(_leaf(public, leaf, value, sharding))
    nbytes = sum(leaf.nbytes for leaf in leaves)
    return ItemRow(name, "arrays", handler, nbytes, tuple(leaves), custom_metadata=item.custom_metadata)


def _leaf(name: str, leaf: Leaf, value: str, sharding: ShardingRow | None) -> LeafRow:
    """The row of a leaf: of an array with its sharding, of another leaf with its value."""
    path = tuple(str(key) for _, key in leaf.path)
    if sharding is None:
        return LeafRow(name, path, leaf.kind.removeprefix("long"), nbytes=leaf.nbytes, value=value)
    return LeafRow(name, path, leaf.kind, dtype_of(leaf), leaf.shape, leaf.nbytes, sharding=sharding)


def _node_item(reader: EpochReader, name: str, handler: str) -> ItemRow:
    """A pytree of each node's own: it is described in the nodes' records."""
    entries = reader.record.nodes
    found: dict[int, ItemRow] = {}

    def look(number: int) -> None:
        try:
            if reader.has(number, name):
                own = reader.of_node(number, name)
                found[number] = _array_item(name, own.record, own.record.items[name], handler)
        except EpochDeletedError:
            raise
        except (EpochCheckpointError, OSError) as error:
            found[number] = ItemRow(name, "arrays", handler, problem=say(error))

    reader.pool.run([functools.partial(look, number) for number in range(len(entries))])
    nodes = {entries[number].name: found[number] for number in sorted(found)}
    broken = [row.problem for row in nodes.values() if row.problem]
    count = several(len(nodes), "node", "nodes")
    problem = f"{len(broken)} of {count} cannot be looked into: {broken[0]}" if broken else ""
    return ItemRow(name, "node", handler, sum(n.nbytes for n in nodes.values()), nodes=nodes, problem=problem)


class _Shardings:
    """How the arrays of an item lie; leaves that lie alike share a row."""

    def __init__(self, arrays: ArrayItem, nodes: Sequence[str]):
        self._arrays, self._nodes = arrays, nodes
        self._known: dict[Any, ShardingRow] = {}
        self._owners: dict[tuple[int, int], tuple[str, ...]] = {}

    def of(self, number: int) -> ShardingRow:
        leaf = self._arrays.leaves[number]
        counts = self._arrays.counts(number)
        known = counts, leaf.grid, leaf.rotation, leaf.sharding
        if known not in self._known:
            grid = self._arrays.grids[leaf.grid]
            owners = self._owners.get((leaf.grid, leaf.rotation))
            if owners is None:
                owners = tuple(str(self._nodes[n]) for n in grid.owners(leaf.rotation).tolist())
                self._owners[leaf.grid, leaf.rotation] = owners
            spec = _spec(self._arrays, leaf.sharding)
            self._known[known] = ShardingRow(counts, owners, min(map(len, grid.holders)), spec)
        return self._known[known]


def _spec(arrays: ArrayItem, number: int) -> str:
    """A recorded sharding in words; empty for a row that has none, or is not valid: parsing did not check it."""
    if number < 0:
        return ""
    try:
        row = arrays.shardings[number]
        if "device" in row:
            return _with_memory(f"one device ({row['platform']}:{row['device']})", row)
        mesh = arrays.meshes[row["mesh"]]
        return _with_memory(words(mesh["axes"], mesh["shape"], row["spec"]), row)
    except (KeyError, IndexError, TypeError, ValueError):
        return ""


def _with_memory(text: str, row: Mapping[str, Any]) -> str:
    kind = row.get("memory")
    return text if kind in (None, "device", "unpinned_host") else f"{text}, in {kind}"


def words(axes: Sequence[Any], shape: Sequence[Any], spec: Sequence[Any]) -> str:
    """`PartitionSpec('data', None) on data=4, model=2`."""
    entries = ", ".join(repr(tuple(e)) if isinstance(e, list) else repr(e) for e in spec)
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))
    return f"PartitionSpec({entries}) on {mesh}"


def dtype_of(leaf: Leaf) -> str:
    """A leaf's dtype for people; typed keys as jax says it."""
    if leaf.kind == "prng":
        return f"key<{_TAGS.get(leaf.impl or '', leaf.impl)}>"
    return str(leaf.dtype)


def shortened(value: Any) -> str:
    """Repr of a Python value, its middle left out if it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * MAX_REPR:
        text = hex(value)  # Python refuses to write numbers of thousands of digits in decimal
    else:
        text = repr(value)
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 21]}…{text[-20:]}"


# -- steps of stock Orbax --------------------------------------------------------------------------------------------


def _orbax_items(commits: Commits, folder: str, record: OrbaxRecord) -> list[ItemRow]:
    rows = []
    for name in sorted(record.names):
        recorded = record.handlers.get(name, "")
        at, kind, handler = paths.join(folder, record.folders[name]), "files", recorded.rpartition(".")[2]
        try:
            if steps.kind(commits.store, at, name, record) == "arrays":
                kind = "arrays"
                rows.append(_orbax_arrays(OrbaxItem(commits.store, at, record.epoch, recorded), name, handler))
            else:
                files = tuple(_files(commits.store, at))
                rows.append(ItemRow(name, kind, handler, sum(f.nbytes for f in files), files=files))
        except (EpochCheckpointError, OSError) as error:
            if commits.read_attempt(record.epoch) != record.attempt:
                raise EpochDeletedError(record.epoch, commits.store.root, say(error)) from error
            rows.append(ItemRow(name, kind, handler, problem=say(error)))
    return rows


def _orbax_arrays(item: OrbaxItem, name: str, handler: str) -> ItemRow:
    problems = [f"leaf {row.leaf.name!r} {row.problem}" for row in item.leaves if row.problem]
    leaves = []
    scalars = 0
    for public, row in zip(_text.public(row.leaf.name for row in item.leaves), item.leaves, strict=True):
        leaf, value = row.leaf, ""
        if leaf.kind in tree_lib.VALUE_KINDS | {"longstr", "longbytes"} and not row.problem:
            scalars += 1
            if scalars <= _MAX_SCALARS or row.here or leaf.kind == "str":
                try:
                    value = shortened(item.value(row))
                except EpochCheckpointError as error:
                    problems.append(say(error))
        elif leaf.kind == UNKNOWN and row.value is not None:
            value = str(row.value)
        leaves.append(_leaf(public, leaf, value, None if leaf.dtype is None else _orbax_sharding(item, row)))
    problem = f"{problems[0]}{f' (and {len(problems) - 1} more)' if problems[1:] else ''}" if problems else ""
    nbytes = sum(leaf.nbytes for leaf in leaves)
    custom = item.custom_metadata
    return ItemRow(name, "arrays", handler, nbytes, tuple(leaves), custom_metadata=custom, problem=problem)


def _orbax_sharding(item: OrbaxItem, row: StoredLeaf) -> ShardingRow:
    """How the array lay on devices, as far as Orbax recorded it; it does not record which node wrote what."""
    recorded = item.shardings.get(row.param, {})
    try:
        if recorded.get("sharding_type") == "SingleDeviceSharding":
            return ShardingRow((1,) * len(row.leaf.shape), spec=f"one device ({recorded['device_str']})")
        if recorded:
            axes, shape, spec = recorded["axis_names"], recorded["shape"], recorded["partition_spec"]
            counts = _counts(dict(zip(axes, shape, strict=True)), spec, row.leaf.shape)
            memory = {"memory": recorded.get("memory_kind")}
            return ShardingRow(counts, spec=_with_memory(words(axes, shape, spec), memory))
    except (KeyError, TypeError, ValueError):  # it says nothing that we know
        pass
    pieces = row.write_shape
    if pieces is None or len(pieces) != len(row.leaf.shape) or not all(pieces):
        pieces = row.leaf.shape
    return ShardingRow(tuple(-(-d // p) if p else 1 for d, p in zip(row.leaf.shape, pieces, strict=True)))


def _counts(sizes: Mapping[str, int], spec: Sequence[Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Into how many parts a PartitionSpec cuts each dimension."""
    axes = [() if e is None else e if isinstance(e, list) else [e] for e in spec]
    counts = [math.prod(sizes[axis] for axis in group) for group in axes]
    if len(counts) > len(shape) or not all(type(c) is int and c > 0 for c in counts):
        raise ValueError(f"{spec} does not cut {shape}")
    return (*counts, *[1] * (len(shape) - len(counts)))


def _files(store: Store, at: str) -> list[FileRow]:
    """The files below a folder; links are not followed."""
    found = []
    for path, is_folder in itertools.islice(leftovers.walk(store, at), _MAX_FILES):
        name = path.removeprefix(f"{at}/")
        if not is_folder and name.rpartition("/")[2] != marks.COMMIT:
            found.append(FileRow(name, "", store.size(path)))
    return sorted(found, key=lambda file: file.name)
