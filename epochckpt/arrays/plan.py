"""The plan of a save: a pure function of trees, shardings and the node list, so that all nodes compute the same one.

A plan is computed once per tree structure, shapes and shardings, and kept; the training thread compares its `key`.
"""

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding

from epochckpt._text import readable
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import ArrayItem, Box, Grid, Leaf, checksums, records
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import cell_box, slices
from epochckpt.format.tree import ARRAY_KINDS

_MAX_SPLIT = 8  # a replicated array is split between at most this many of its holders

_Cells = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]  # counts and holders, as in `Grid`


@dataclasses.dataclass(frozen=True)
class CellSource:
    """One cell that this node writes."""

    leaf: int
    shard: int  # index of the addressable shard that holds it; -1 for NumPy and Python leaves
    cut: tuple[slice, ...] | None  # the part of that shard; None for all of it
    staged: bool = False  # it lies on an accelerator, and is copied through host memory
    whole: bool = False  # that shard is copied whole, once, and cut there: several cells are parts of it


@dataclasses.dataclass(frozen=True)
class ItemPlan:
    """What this node does for one item."""

    item: ArrayItem
    owned: tuple[np.ndarray, np.ndarray, np.ndarray]  # (leaf, cell, bytes) of every cell it writes, in file order
    sources: tuple[CellSource, ...]  # where each of these cells is found
    part_ends: tuple[int, ...]  # numbers of cells after which the data file is continued in another part
    copied_bytes: int  # host memory that a snapshot allocates
    # The same for cells that it holds and another node owns, where each host has a disk of its own.
    also: "ItemPlan | None" = None

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the item, which is the same on every node."""
        return checksums.digest(json.dumps(records.array_item_json(self.item), separators=(",", ":")).encode())

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all leaves, on all nodes together."""
        return sum(leaf.nbytes for leaf in self.item.leaves)

    @functools.cached_property
    def arrays(self) -> list[tuple[int, bool]]:
        """Of each array with a recorded sharding its bytes, and whether several devices hold the same part of it."""
        copied = [_is_copied(row, self.item.meshes) for row in self.item.shardings]
        return [(leaf.nbytes, copied[leaf.sharding]) for leaf in self.item.leaves if leaf.sharding >= 0]


def _is_copied(row: Mapping[str, Any], meshes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a sharding leaves an axis of its mesh, with more than one device, to copies."""
    if "mesh" not in row:
        return False
    mesh = meshes[row["mesh"]]
    cut = {axis for part in row["spec"] for axis in (part if isinstance(part, list) else [part])}
    return any(size > 1 for axis, size in zip(mesh["axes"], mesh["shape"], strict=True) if axis not in cut)


def key(leaves: Sequence[Any], treedef: Any) -> Any:
    """A hashable, cheap key of everything that a plan depends on: structure, types, shapes, dtypes and shardings."""
    return treedef, tuple([_leaf_key(leaf) for leaf in leaves])


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    if isinstance(leaf, np.ndarray):
        return np.ndarray, leaf.shape, leaf.dtype
    if isinstance(leaf, np.generic):
        return type(leaf), leaf.dtype
    if isinstance(leaf, str | bytes) and len(leaf) > tree_lib.INLINE_BYTES // 4:
        return type(leaf), len(leaf.encode("utf-8", "surrogatepass")) if isinstance(leaf, str) else len(leaf)
    return type(leaf)


def refuse_traced(name: str, tree: Any) -> None:
    """Raises InvalidArgumentError, with the first leaf, for a tree of item `name` with values that jax is tracing."""
    traced = [path for path, leaf in tree_lib.flatten(tree)[0] if isinstance(leaf, Tracer)]
    if traced:
        raise InvalidArgumentError(
            f"item {name!r}, leaf {readable(tree_lib.leaf_name(traced[0]))!r} ({len(traced)} in all) is a tracer, no "
            "array: save() was called inside a function that jax transforms (jit, grad, vmap, scan, …), where there "
            "are no values yet. Return the state from that function, and save what it returns"
        )


def plan_item(
    name: str,
    pairs: Sequence[tuple[tree_lib.KeyPath, Any]],
    *,
    node: int,
    node_of_process: Mapping[int, int],
    replica_split_bytes: int,
    part_bytes: int | None,
    per_node: bool = False,
    local_disks: bool = False,
) -> ItemPlan:
    """Plans one item from its (key path, leaf) pairs in flattening order; refuses a leaf that cannot be saved, by name.

    A replicated array larger than `replica_split_bytes` is split between several of its holders; `part_bytes` bounds a
    data file. With `per_node`, no other process may hold a part of the item. With `local_disks` there is a plan of what
    this node holds and another one owns, too.
    """
    builder = _Builder(name, node_of_process, replica_split_bytes, per_node)
    for path, value in pairs:
        builder.add(path, value)
    item, values = builder.finish(), [value for _, value in pairs]

    def planned(cells: tuple[np.ndarray, np.ndarray, np.ndarray], also: ItemPlan | None = None) -> ItemPlan:
        found = list(_sources(item, values, cells))
        cuts = collections.Counter((s.leaf, s.shard) for s in found if s.cut is not None)
        sources = tuple(dataclasses.replace(s, whole=True) if cuts[s.leaf, s.shard] > 1 else s for s in found)
        copied = sum(item.cell_bytes(s.leaf) for s in sources if s.staged or s.shard < 0)
        shared = {(s.leaf, s.shard) for s in sources if s.whole and s.staged}
        copied += sum(item.cell_bytes(leaf) for leaf, _ in shared)  # what this node owns of it comes, too
        return ItemPlan(item, cells, sources, tuple(item.part_ends(cells, part_bytes)), copied, also)

    return planned(item.owned(node), planned(item.also(node)) if local_disks and not per_node else None)


class _Builder:
    """Collects the leaves of one item, and the rows of its tables."""

    def __init__(self, name: str, node_of_process: Mapping[int, int], replica_split_bytes: int, per_node: bool):
        self.name, self.node_of_process = name, node_of_process
        self.replica_split_bytes, self.per_node = replica_split_bytes, per_node
        self.leaves: list[Leaf] = []
        self.names: set[str] = set()
        self.grids: dict[Grid, int] = {}
        self.shardings: dict[Any, int] = {}
        self.meshes: dict[Any, int] = {}
        self.cells: dict[Any, _Cells] = {}

    def add(self, path: tree_lib.KeyPath, value: Any) -> None:
        name = tree_lib.leaf_name(path)
        if name in self.names:
            raise InvalidArgumentError(f"item {self.name!r}: two leaves have the name {name!r}")
        self.names.add(name)
        kind = tree_lib.leaf_kind(value)
        if kind is None:
            raise InvalidArgumentError(
                f"item {self.name!r}, leaf {name!r}: a {type(value).__module__}.{type(value).__qualname__} cannot be "
                "saved; expected a jax or NumPy array, a Python number, str, bytes or None"
            )
        if kind not in ARRAY_KINDS:
            self.leaves.append(Leaf(path, name, kind))
            return
        # Shape and dtype of the stored bytes, and how the sharding cuts them.
        impl = None
        if kind in ("jax", "prng"):
            if value.is_deleted():
                raise InvalidArgumentError(f"leaf {name!r} was deleted or donated before save()")
            shape, dtype = tuple(value.shape), value.dtype
            if kind == "prng":
                impl = str(jax.random.key_impl(value))
                inner = jax.eval_shape(jax.random.key_data, value)
                shape, dtype = tuple(inner.shape), inner.dtype
            counts, holders = self._sharding_cells(name, value)
            sharding = -1  # a kind that the tables cannot express
            if isinstance(value.sharding, NamedSharding | SingleDeviceSharding):
                sharding = self.shardings.setdefault(value.sharding, len(self.shardings))
        else:
            if kind in ("longstr", "longbytes"):
                raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                shape, dtype = (len(raw),), np.dtype(np.uint8)
            else:
                shape, dtype = value.shape, value.dtype
            counts, holders, sharding = (), ((0,),), -1
        stored = tree_lib.parse_dtype(name, tree_lib.dtype_name(np.dtype(dtype), name))
        if math.prod(shape) == 0:  # nothing to cut: one cell without bytes
            counts, holders = (), (tuple(sorted({n for h in holders for n in h})),)
        counts, holders = self._split(shape, stored.itemsize, counts, holders)
        row = self.grids.setdefault(Grid(counts, holders), len(self.grids))
        self.leaves.append(Leaf(path, name, kind, stored, shape, row, 0, sharding, impl))

    def finish(self) -> ArrayItem:
        """Gives each leaf its rotation: the leaves of a grid row take turns, largest first, which balances the load."""
        turns = [0] * len(self.grids)
        grids = list(self.grids)
        steps = [_turn(grid) for grid in grids]
        for i in sorted(range(len(self.leaves)), key=lambda i: (-self.leaves[i].nbytes, i)):
            leaf = self.leaves[i]
            if leaf.grid >= 0:
                width = max(map(len, grids[leaf.grid].holders))
                if turns[leaf.grid] % width:
                    self.leaves[i] = dataclasses.replace(leaf, rotation=turns[leaf.grid] % width)
                turns[leaf.grid] += steps[leaf.grid]
        shardings = tuple(map(self._sharding_row, self.shardings))
        return ArrayItem(self.name, tuple(self.leaves), tuple(grids), shardings, tuple(map(_mesh_row, self.meshes)))

    def _sharding_cells(self, name: str, value: jax.Array) -> _Cells:
        """The grid of an array's sharding, and the nodes that hold each cell; cached by sharding."""
        sharding = value.sharding
        known = (sharding, value.ndim if isinstance(sharding, NamedSharding) else value.shape)
        if known not in self.cells:
            counts, cell_of_device = device_cells(sharding, tuple(value.shape))
            nodes: dict[int, set[int]] = {}
            elsewhere: dict[int, Any] = {}
            for device, cell in cell_of_device.items():
                node = self.node_of_process.get(device.process_index)
                if node is None:
                    elsewhere[cell] = device
                else:
                    nodes.setdefault(cell, set()).add(node)
            lost = elsewhere if self.per_node else {c: d for c, d in elsewhere.items() if c not in nodes}
            if lost:
                raise InvalidArgumentError(
                    f"leaf {name!r} lies on {next(iter(lost.values()))}, whose process is no node of this manager"
                    + (" (NodeSave takes arrays that only this process holds)" if self.per_node else "")
                )
            holders = tuple(tuple(sorted(nodes[c])) for c in range(math.prod(counts)))
            if len(self.node_of_process) > 1 and len({n for h in holders for n in h}) == 1:
                raise InvalidArgumentError(
                    f"item {self.name!r}, leaf {name!r} lies on devices of one process only, in a job of "
                    f"{len(self.node_of_process)}: which process's value counts is not defined. Make it a global "
                    "array, for example by creating it under jax.jit with out_shardings"
                )
            while counts and counts[-1] == 1:
                counts = counts[:-1]
            self.cells[known] = counts, holders
        counts, holders = self.cells[known]
        uneven = [d for d, c in zip(value.shape, counts, strict=False) if d % c]
        if uneven:
            raise InvalidArgumentError(f"leaf {name!r} of shape {value.shape} is sharded unevenly as {sharding}")
        return counts, holders

    def _split(
        self, shape: tuple[int, ...], itemsize: int, counts: tuple[int, ...], holders: tuple[tuple[int, ...], ...]
    ) -> _Cells:
        """Splits the cells of a large replicated leaf along the first axis that keeps the pieces contiguous."""
        width = min(map(len, holders))
        full = counts + (1,) * (len(shape) - len(counts))
        cell = [d // c for d, c in zip(shape, full, strict=True)]
        if width < 2 or math.prod(cell) < 2 or math.prod(cell) * itemsize <= self.replica_split_bytes:
            return counts, holders
        axis = next(i for i, d in enumerate(cell) if d > 1)
        pieces = next((k for k in range(min(width, _MAX_SPLIT), 1, -1) if cell[axis] % k == 0), 1)
        if pieces == 1:
            return counts, holders
        finer = [*full]
        finer[axis] *= pieces
        where = np.indices(finer).reshape(len(finer), -1)
        where[axis] //= pieces
        parents = np.ravel_multi_index(list(where), full)
        while finer[-1] == 1:
            finer.pop()
        return tuple(finer), tuple(holders[p] for p in parents)

    def _sharding_row(self, sharding: Any) -> dict[str, Any]:
        if isinstance(sharding, NamedSharding):
            mesh = self.meshes.setdefault(sharding.mesh, len(self.meshes))
            spec = [list(e) if isinstance(e, tuple) else e for e in sharding.spec]
            return {"mesh": mesh, "spec": spec, "memory": sharding.memory_kind}
        (device,) = sharding.device_set
        return {"device": device.id, "platform": device.platform, "memory": sharding.memory_kind}


def _mesh_row(mesh: Any) -> dict[str, Any]:
    return {
        "platform": mesh.devices.flat[0].platform,
        "axes": list(mesh.axis_names),
        "axis_types": [t.name for t in mesh.axis_types],
        "shape": list(mesh.devices.shape),
        "devices": [d.id for d in mesh.devices.flat],
    }


def _turn(grid: Grid) -> int:
    """Rotation of a leaf against the one before it in its grid row: past the holders that own the cells of that one."""
    first = grid.holders[0]
    taken = sorted({c % len(first) for c, holders in enumerate(grid.holders) if holders == first})
    return len(taken) if taken == list(range(len(taken))) else 1


def device_cells(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[Any, int]]:
    """The regular grid of a sharding: cells per dimension, and the cell that each device holds."""
    if isinstance(sharding, NamedSharding):  # arithmetic over the mesh: JAX's map of devices to indices is slower
        mesh: Any = sharding.mesh
        devices = mesh.devices
        sizes = dict(zip(mesh.axis_names, devices.shape, strict=True))
        where = dict(zip(mesh.axis_names, np.indices(devices.shape), strict=True))
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        counts = []
        cell = np.zeros(devices.shape, dtype=np.int64)
        for entry in spec:
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            for axis in axes:
                cell = cell * sizes[axis] + where[axis]
            counts.append(math.prod(sizes[axis] for axis in axes))
        return tuple(counts), dict(zip(devices.flat, cell.ravel().tolist(), strict=True))
    piece = sharding.shard_shape(shape)
    counts = tuple(d // p if p else 1 for d, p in zip(shape, piece, strict=True))
    cells = {}
    for device, index in sharding.devices_indices_map(shape).items():
        at = [s.indices(d)[0] // p if p else 0 for s, d, p in zip(index, shape, piece, strict=True)]
        cells[device] = int(np.ravel_multi_index(at, counts)) if shape else 0
    return counts, cells


def _sources(
    item: ArrayItem, values: Sequence[Any], owned: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> Iterator[CellSource]:
    """Where this node finds each cell that it writes."""
    shards: dict[Any, tuple[tuple[int, ...], dict[int, int], bool]] = {}
    for leaf, cell in zip(owned[0].tolist(), owned[1].tolist(), strict=True):
        info, value = item.leaves[leaf], values[leaf]
        if not info.is_global:
            yield CellSource(leaf, -1, None)
            continue
        known = (value.sharding, value.shape)
        if known not in shards:
            counts, cell_of_device = device_cells(value.sharding, tuple(value.shape))
            local: dict[int, int] = {}
            for k, shard in enumerate(value.addressable_shards):
                local.setdefault(cell_of_device[shard.device], k)
            shards[known] = counts, local, {device.platform for device in cell_of_device} != {"cpu"}
        counts, local, staged = shards[known]
        if item.is_whole(leaf):
            yield CellSource(leaf, next(iter(local.values())), None, staged)  # maybe without elements
            continue
        # The shard is a cell of the sharding's grid, and this cell all of it or, of a split leaf, a piece.
        counts += (1,) * (len(info.shape) - len(counts))  # typed keys have the dimensions of their data in addition
        box = item.cell_box(leaf, cell)
        outer = tuple(d // c for d, c in zip(info.shape, counts, strict=True))
        parent = int(np.ravel_multi_index([start // side for (start, _), side in zip(box, outer, strict=True)], counts))
        cut = None if outer == item.cell_shape(leaf) else slices(box, cell_box(parent, counts, outer))
        yield CellSource(leaf, local[parent], cut, staged)


def boxes_of_devices(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box that each addressable device holds, for an array of this shape and sharding."""
    counts, cells = device_cells(sharding, shape)
    piece = [d // c for d, c in zip(shape, counts, strict=True)]
    return {device: cell_box(cells[device], counts, piece) for device in sharding.addressable_devices}
