"""One epoch in full: its items, their leaves, and where each part of an array lies. Reads records, no arrays.

Nothing here asks JAX for its devices: shardings are put in the words of the records. Typed keys have the shape of their
data, which is what reading them gives.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from epochckpt import _text
from epochckpt._units import several
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeletedError, EpochNotFoundError, FormatError, say
from epochckpt.format import ArrayItem, DataFile, EpochRecord, ItemKind, ItemRecord, Leaf, paths
from epochckpt.format import tree as tree_lib
from epochckpt.inspection.leaf_reader import PerNodeReader, open_reader
from epochckpt.inspection.rows import COMMITTED, DAMAGED, EpochDetail, EpochRow, FileRow, ItemRow, LeafRow, ShardingRow
from epochckpt.manager.reader import NativeReader
from epochckpt.orbax import OrbaxRecord, step_files, steps
from epochckpt.orbax.leaves import UNKNOWN, OrbaxItem, StoredLeaf
from epochckpt.storage import Store, listing

MAX_DRAWN = 64  # parts of an array whose nodes a row lists
MAX_DEVICES = 512  # devices of an array whose parts a row lists
MAX_REPR = 120  # characters of a Python value that a row shows
_TAGS = {"threefry2x32": "fry", "rbg": "rbg", "unsafe_rbg": "urbg"}  # as jax names the dtypes of keys
_MAX_SCALARS = 1000  # numbers of a step of stock Orbax whose values are read; each is an array in a file
_MAX_FILES = 100_000
_MAX_JSON = 16_384  # bytes of a file that is shown
_MAX_READ = 8  # files of an item that are shown


def describe(epoch_directory: EpochDirectory, row: EpochRow, mirror: str | None = None) -> EpochDetail:
    """Everything that is known of one epoch without reading arrays; of one host's part, with what its `mirror` has.

    An item that cannot be looked into has a `problem`; it hides no other item. If the epoch's record itself cannot be
    read there are no items, and the row says why. Attempts that were not committed have no items.

    Raises:
        EpochDeletedError: it is not there any more.
        AccessError: it may not be read.
    """
    if row.state not in (COMMITTED, DAMAGED):
        return EpochDetail(row, ())
    try:
        reader = open_reader(epoch_directory, row.epoch, mirror)
    except EpochNotFoundError as error:
        if row.state == DAMAGED:
            return EpochDetail(row, ())
        detail = "it was there when the directory was looked at"
        raise EpochDeletedError(row.epoch, epoch_directory.store.root, detail) from error
    except (DamagedError, FormatError) as error:
        return EpochDetail(dataclasses.replace(row, state=DAMAGED, detail=row.detail or str(error)), ())
    if isinstance(reader, PerNodeReader):
        return EpochDetail(row, tuple(_per_node_items(reader)))
    record = reader.record
    if isinstance(reader, NativeReader):
        items = [_item(reader.native, name, item) for name, item in sorted(record.items.items())]
        return EpochDetail(row, tuple(items), record.orbax_unsupported)
    assert isinstance(record, OrbaxRecord), "all other epochs have a native reader"
    return EpochDetail(row, tuple(_orbax_items(epoch_directory, reader.folder, record)))


# -- epochs of ours --------------------------------------------------------------------------------------------------


def _item(reader: EpochReader, name: str, item: ItemRecord) -> ItemRow:
    handler = item.handler.rpartition(".")[2]
    if item.arrays is not None:
        return _array_item(name, reader.record, item, handler)
    if item.kind is ItemKind.NODE:
        return _node_item(reader, name, handler)
    problems: list[str] = []

    def content(file: DataFile) -> Any:
        try:
            return parsed(reader.read_file(name, file.name))
        except EpochDeletedError:
            raise
        except EpochCheckpointError as error:
            problems.append(say(error))
            return None

    found = [(number, n.name, f) for number, n in enumerate(reader.record.nodes) for f in n.files if f.item == name]
    small = [f for number, _, f in found if f.size <= _MAX_JSON and number in reader.local_nodes]
    read = {f.name: content(f) for f in small} if len(small) <= _MAX_READ else {}
    files = tuple(FileRow(f.name, node, f.size, read.get(f.name)) for _, node, f in found)
    return ItemRow(name, item.kind.value, handler, files=files, problem="; ".join(problems))


def parsed(content: bytes) -> Any:
    """What a file says if it is JSON; None if it is not."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _per_node_items(epoch: PerNodeReader) -> Iterator[ItemRow]:
    """The items of an epoch that each node saved by itself: every item is each node's own."""
    found: dict[str, dict[str, ItemRow]] = {}
    for node, reader in epoch.nodes.items():
        for name, item in reader.record.items.items():
            row = _item(reader.native, name, item)
            found.setdefault(name, {})[node] = row.nodes.get(node, row)
    unread = [f"node {node}: {problem}" for node, problem in epoch.unread.items()]
    for name, nodes in sorted(found.items()):
        problem = "; ".join([*unread, *(row.problem for row in nodes.values() if row.problem)])
        yield ItemRow(name, "node", next(iter(nodes.values())).handler, nodes=nodes, problem=problem)


def _array_item(name: str, record: EpochRecord, item: ItemRecord, handler: str) -> ItemRow:
    arrays = item.arrays
    assert arrays is not None, "callers choose array items"

    @functools.cache
    def lies(counts: tuple[int, ...], grid: int, rotation: int, sharding: int) -> ShardingRow:
        """How arrays lie; those that lie alike share a row."""
        cells = arrays.grids[grid]
        owners = tuple(record.nodes[int(n)].name for n in cells.owners(rotation))
        few = len(owners) <= MAX_DRAWN
        holders = tuple(tuple(record.nodes[n].name for n in cell) for cell in cells.holders) if few else ()
        devices = _devices(arrays, sharding, counts) if few else ()
        spec, mesh = _spec(arrays, sharding)
        return ShardingRow(counts, owners, min(map(len, cells.holders)), spec, mesh, devices, holders)

    leaves = []
    for number, (public, leaf) in enumerate(zip(arrays.public_names, arrays.leaves, strict=True)):
        value = ""
        sharding = None
        if leaf.kind in ("longstr", "longbytes"):
            value = f"<{leaf.kind.removeprefix('long')} of {leaf.nbytes} bytes>"
        elif leaf.dtype is not None:
            sharding = lies(arrays.counts(number), leaf.grid, leaf.rotation, leaf.sharding)
        elif number in item.values:
            value = shortened(tree_lib.value_from_json(paths.EPOCH_RECORD, leaf.kind, item.values[number]))
        leaves.append(_leaf(public, leaf, value, sharding))
    return ItemRow(name, "arrays", handler, leaves=tuple(leaves), custom_metadata=item.custom_metadata)


def _leaf(name: str, leaf: Leaf, value: str, sharding: ShardingRow | None) -> LeafRow:
    """The row of a leaf: of an array with its sharding, of another leaf with its value."""
    path = tuple(str(key) for _, key in leaf.path)
    if sharding is None:
        return LeafRow(name, path, leaf.kind.removeprefix("long"), nbytes=leaf.nbytes, value=value)
    dtype = f"key<{_TAGS.get(leaf.impl or '', leaf.impl)}>" if leaf.kind == "prng" else str(leaf.dtype)
    return LeafRow(name, path, leaf.kind, dtype, leaf.shape, leaf.nbytes, sharding=sharding)


def _node_item(reader: EpochReader, name: str, handler: str) -> ItemRow:
    """A pytree of each node's own: it is described in the nodes' records."""
    entries = reader.record.nodes
    found: dict[int, ItemRow] = {}

    def look(number: int) -> None:
        try:
            if number not in reader.local_nodes and reader.mirror_reader() is None:
                return  # on the disk of another host, as the row of the node says
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
    return ItemRow(name, "node", handler, nodes=nodes, problem=problem)


def _spec(arrays: ArrayItem, number: int) -> tuple[str, str]:
    """A recorded sharding in words, and its mesh; both are empty without a sharding, or if its record is invalid."""
    if number < 0:
        return "", ""
    try:
        row = arrays.shardings[number]
        if "device" in row:
            return _with_memory(f"{row['platform']}:{row['device']}", row.get("memory")), ""
        mesh = arrays.meshes[row["mesh"]]
        return _words(mesh["axes"], mesh["shape"], row["spec"], row.get("memory"))
    except (KeyError, IndexError, TypeError, ValueError):
        return "", ""


def _words(axes: Sequence[Any], shape: Sequence[Any], spec: Sequence[Any], memory: str | None) -> tuple[str, str]:
    """`P(None, 'data')`, and `data=4, model=2`."""
    cut = list(spec)
    while cut and cut[-1] is None:  # says no more than its absence
        cut.pop()
    entries = ", ".join(repr(tuple(e)) if isinstance(e, list) else repr(e) for e in cut)
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))
    return _with_memory(f"P({entries})", memory), mesh


def _devices(arrays: ArrayItem, number: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ids of the devices that had each part of an array; empty if they are not known, or very many."""
    try:
        row = arrays.shardings[number] if number >= 0 else {}
        if "device" in row:
            return ((int(row["device"]),),)
        mesh = arrays.meshes[row["mesh"]]
        axes = mesh["axes"]
        shape = mesh["shape"]
        ids = mesh["devices"]
        if len(ids) != math.prod(shape) or len(ids) > MAX_DEVICES:
            return ()
        groups = [() if e is None else e if isinstance(e, list) else [e] for e in row["spec"]]
        found: list[list[int]] = [[] for _ in range(math.prod(counts))]
        for device, where in zip(ids, itertools.product(*map(range, shape)), strict=True):
            at = dict(zip(axes, where, strict=True))
            part = 0
            for dim, count in enumerate(counts):
                within = 0
                for axis in groups[dim] if dim < len(groups) else ():
                    within = within * shape[axes.index(axis)] + at[axis]
                part = part * count + within
            found[part].append(int(device))
        return tuple(map(tuple, found)) if all(found) else ()
    except (KeyError, IndexError, TypeError, ValueError):
        return ()


def _with_memory(text: str, memory: str | None) -> str:
    return text if memory in (None, "device", "unpinned_host") else f"{text}, in {memory}"


def shortened(value: Any) -> str:
    """Repr of a Python value, its middle left out if it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * MAX_REPR:
        text = hex(value)  # Python refuses to write numbers of thousands of digits in decimal
    else:
        text = repr(value)
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 21]}…{text[-20:]}"


# -- steps of stock Orbax --------------------------------------------------------------------------------------------


def _orbax_items(epoch_directory: EpochDirectory, folder: str, record: OrbaxRecord) -> list[ItemRow]:
    rows = []
    for name in sorted(record.names):
        recorded = record.handlers.get(name, "")
        at = paths.join(folder, record.folders[name])
        kind = "files"
        handler = recorded.rpartition(".")[2]
        try:
            if steps.kind(epoch_directory.store, at, name, record) == "arrays":
                kind = "arrays"
                rows.append(_orbax_arrays(OrbaxItem(epoch_directory.store, at, record.epoch, recorded), name, handler))
            else:
                rows.append(ItemRow(name, kind, handler, files=tuple(_files(epoch_directory.store, at))))
        except (EpochCheckpointError, OSError) as error:
            if epoch_directory.read_save_id(record.epoch) != record.save_id:
                raise EpochDeletedError(record.epoch, epoch_directory.store.root, say(error)) from error
            rows.append(ItemRow(name, kind, handler, problem=say(error)))
    return rows


def _orbax_arrays(item: OrbaxItem, name: str, handler: str) -> ItemRow:
    problems = [f"leaf {row.leaf.name!r} {row.problem}" for row in item.leaves if row.problem]
    leaves = []
    scalars = 0
    for public, row in zip(_text.public(row.leaf.name for row in item.leaves), item.leaves, strict=True):
        leaf = row.leaf
        value = ""
        if leaf.kind in tree_lib.VALUE_KINDS | {"longstr", "longbytes"} and not row.problem:
            scalars += 1
            if scalars <= _MAX_SCALARS or row.in_msgpack or leaf.kind == "str":
                try:
                    value = shortened(item.value(row))
                except EpochCheckpointError as error:
                    problems.append(say(error))
        elif leaf.kind == UNKNOWN and row.value is not None:
            value = str(row.value)
        leaves.append(_leaf(public, leaf, value, None if leaf.dtype is None else _orbax_sharding(item, row)))
    problem = f"{problems[0]}{f' (and {len(problems) - 1} more)' if problems[1:] else ''}" if problems else ""
    fields = {"custom_metadata": item.custom_metadata, "problem": problem}
    return ItemRow(name, "arrays", handler, leaves=tuple(leaves), **fields)


def _orbax_sharding(item: OrbaxItem, row: StoredLeaf) -> ShardingRow:
    """The sharding of the array, as far as Orbax recorded it. Orbax does not record which node wrote a part."""
    recorded = item.shardings.get(row.param, {})
    with contextlib.suppress(KeyError, TypeError, ValueError):  # it is in no form that we know
        if recorded.get("sharding_type") == "SingleDeviceSharding":
            return ShardingRow((1,) * len(row.leaf.shape), spec=str(recorded["device_str"]))
        if recorded:
            axes = recorded["axis_names"]
            shape = recorded["shape"]
            spec = recorded["partition_spec"]
            counts = _counts(dict(zip(axes, shape, strict=True)), spec, row.leaf.shape)
            words, mesh = _words(axes, shape, spec, recorded.get("memory_kind"))
            return ShardingRow(counts, spec=words, mesh=mesh)
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
    for path, is_folder in itertools.islice(listing.walk(store, at), _MAX_FILES):
        name = path.removeprefix(f"{at}/")
        if not is_folder and name.rpartition("/")[2] != step_files.COMMIT:
            found.append(FileRow(name, "", store.size(path)))
    small = [file for file in found if file.nbytes <= _MAX_JSON]
    if len(small) > _MAX_READ:
        small = []
    read = {file.name: parsed(store.read(f"{at}/{file.name}", limit_bytes=_MAX_JSON)) for file in small}
    found = [dataclasses.replace(file, content=read.get(file.name)) for file in found]
    return sorted(found, key=lambda file: file.name)
