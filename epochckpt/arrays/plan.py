"""The plan of a save: a pure function of trees, shardings and the node list, so that all nodes compute the same one.

A plan is computed once per tree structure, shapes and shardings, and kept; the training thread compares its `key`.
"""

import bisect
import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding

from epochckpt._text import readable
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import ArrayItem, Box, Grid, Leaf, checksums, safetensors
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import MAX_ITEM_CELLS, blocks, cell_box, slices
from epochckpt.format.tree import ARRAY_KINDS
from epochckpt.orbax import events
from epochckpt.storage.mmap import Assembled

HOST = frozenset({"cpu"})  # platforms whose arrays lie in this process's memory
_MAX_SPLIT = 8  # a replicated array is split between at most this many of its holders
_MAX_CUT = 10_000  # cells of a leaf, as far as `part_bytes` makes them more
_FINER = 4  # and they may be smaller by this factor than they need to be

COPY_BYTES = 64 * 1024  # of a cell: smaller ones are copied together, which costs less than a view of each

_FEW_HOLDERS, _SMALL_BYTES = 16, 256 * 1024
"""A replicated leaf of fewer bytes has its owner among the first holders: a restore opens the files of these few."""


class CellSource(NamedTuple):
    """One cell that this node writes."""

    leaf: int
    shard: int  # index of the addressable shard that holds it; -1 for NumPy and Python leaves
    cut: tuple[slice, ...] | None  # the part of that shard, or leaf; None for all of it
    staged: bool = False  # it lies on an accelerator
    alone: bool = False  # the leaf is that shard, on one device
    whole: bool = False  # to host memory that shard moves whole, once: several cells are parts of it


class Run(NamedTuple):
    """Consecutive cells that a snapshot holds as one buffer: small ones, which are copied together, or one other."""

    first: int  # the number of the first cell, in file order
    last: int  # of the last one, + 1
    nbytes: int
    copied: bool


class FilePlan(NamedTuple):
    """One part of a node's data file."""

    head: bytes  # its header
    cells: int
    runs: slice  # of those of the plan
    offsets: np.ndarray  # where each run begins in the file, and the end of the last one
    ends: np.ndarray  # of its blocks


@dataclasses.dataclass(frozen=True)
class ItemPlan:
    """What this node does for one item."""

    item: ArrayItem
    owned: tuple[np.ndarray, np.ndarray, np.ndarray]  # (leaf, cell, bytes) of every cell it writes, in file order
    sources: tuple[CellSource, ...]  # where each of these cells is found
    part_ends: tuple[int, ...]  # numbers of cells after which the data file is continued in another part
    copied_bytes: int  # of leaves that are no jax arrays
    # The same for cells that it holds and another node owns, where each host has a disk of its own.
    also: "ItemPlan | None" = None

    @functools.cached_property
    def staged(self) -> list[CellSource]:
        """The sources that lie on accelerators."""
        return [source for source in self.sources if source.staged]

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The buffers of a snapshot, in file order; each lies in one part of the data file."""
        sizes, count = self.owned[2], len(self.sources)
        copied = (sizes <= COPY_BYTES) & ~np.array([source.staged for source in self.sources], bool)
        begins = np.ones(count, bool)
        begins[1:] = ~(copied[1:] & copied[:-1])
        begins[[*self.part_ends[:-1]]] = True
        firsts = np.flatnonzero(begins)
        bounds = [*firsts.tolist(), count]
        nbytes = np.diff(np.cumsum([0, *sizes.tolist()])[bounds]).tolist()
        return [*map(Run, bounds, bounds[1:], nbytes, copied[firsts].tolist())]

    @functools.cached_property
    def copied(self) -> list[tuple[int, CellSource]]:
        """The sources of the runs that are copied, each with its leaf if that is copied as it is, else with -1."""
        found = [source for run in self.runs if run.copied for source in self.sources[run.first : run.last]]

        def plain(source: CellSource) -> bool:  # NumPy's own types alone have buffers in Python's sense
            kind, dtype = self.item.leaves[source.leaf][2:4]
            return source.alone and source.cut is None and kind == "jax" and dtype is not None and dtype.isbuiltin == 1

        return [(source.leaf if plain(source) else -1, source) for source in found]

    @functools.cached_property
    def small_bytes(self) -> int:
        """Bytes of the runs that are copied."""
        return sum(run.nbytes for run in self.runs if run.copied)

    def name(self, run: Run) -> str:
        """The name of the first leaf of a run."""
        return self.item.leaves[self.sources[run.first].leaf].name

    @functools.cached_property
    def values(self) -> list[int]:
        """The leaves that are recorded as values."""
        return [i for i, leaf in enumerate(self.item.leaves) if leaf.kind in tree_lib.VALUE_KINDS]

    def files(self, block_bytes: int) -> list[FilePlan]:
        """The parts of this node's data file, with checksums of blocks of this size."""
        if block_bytes not in self._files:
            found, firsts, cell = list[FilePlan](), [run.first for run in self.runs], 0
            for end, part in zip(self.part_ends, self.item.cut(self.owned, self.part_ends), strict=True):
                cells = zip(part.leaves.tolist(), part.cells.tolist(), strict=True)
                head = safetensors.header([self.item.tensor(*each) for each in cells])
                runs = slice(*(bisect.bisect_left(firsts, bound) for bound in (cell, end)))
                offsets = part.offsets[[first - cell for first in [*firsts[runs], end]]] + len(head)
                ends = blocks(np.diff(part.offsets), len(head), block_bytes)
                found.append(FilePlan(head, end - cell, runs, offsets, ends))
                cell = end
            self._files[block_bytes] = found
        return self._files[block_bytes]

    @functools.cached_property
    def _files(self) -> dict[int, list[FilePlan]]:
        return {}

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the item, which is the same on every node."""
        return checksums.digest(checksums.dumps_fields(self.item.json_fields).encode())

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all leaves, on all nodes together."""
        return sum(leaf.nbytes for leaf in self.item.leaves)

    @functools.cached_property
    def figures(self) -> list[tuple[str, float]]:
        """What listeners of `jax.monitoring` are told of the arrays, by name; of those with a recorded sharding."""
        copied = [_is_copied(row, self.item.meshes) for row in self.item.shardings]
        leaves = (leaf for leaf in self.item.leaves if leaf.sharding >= 0)
        return events.sizes_of_arrays((leaf.nbytes, copied[leaf.sharding]) for leaf in leaves)


def _is_copied(row: Mapping[str, Any], meshes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a sharding leaves an axis of its mesh, with more than one device, to copies."""
    if "mesh" not in row:
        return False
    mesh = meshes[row["mesh"]]
    cut = {axis for part in row["spec"] for axis in (part if isinstance(part, list) else [part])}
    return any(size > 1 for axis, size in zip(mesh["axes"], mesh["shape"], strict=True) if axis not in cut)


def key(leaves: Sequence[Any], treedef: Any) -> Any:
    """What a plan depends on, cheap to make and to compare: structure, types, shapes, dtypes and shardings."""
    return treedef, [_form(leaf) if _is_array(type(leaf)) else _leaf_key(leaf) for leaf in leaves]


_form = operator.attrgetter("shape", "dtype", "sharding")
_is_array = functools.cache(lambda kind: issubclass(kind, jax.Array))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # traced
        return _form(leaf)
    if isinstance(leaf, np.ndarray | Assembled):
        return type(leaf), leaf.shape, leaf.dtype
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
    cut: bool = False,
    per_node: bool = False,
    local_disks: bool = False,
) -> ItemPlan:
    """Plans one item from its (key path, leaf) pairs in flattening order; refuses a leaf that cannot be saved, by name.

    A replicated array larger than `replica_split_bytes` is split between several of its holders; `part_bytes` bounds a
    data file, and with `cut` what is larger is cut by rows. With `per_node`, no other process may hold a part of the
    item. With `local_disks` there is a plan of what this node holds and another one owns, too.
    """
    cell_bytes = part_bytes if cut and part_bytes else math.inf
    builder = _Builder(name, node_of_process, replica_split_bytes, cell_bytes, per_node)
    for path, value in pairs:
        builder.add(path, value)
    item, values = builder.finish(), [value for _, value in pairs]

    def planned(cells: tuple[np.ndarray, np.ndarray, np.ndarray], also: ItemPlan | None = None) -> ItemPlan:
        found = list(_sources(builder, item, values, cells))
        taken = collections.Counter((s.leaf, s.shard) for s in found if s.cut is not None and s.shard >= 0)
        shards = {(leaf, _): _shard_bytes(item.leaves[leaf], values[leaf]) for leaf, _ in taken}
        # Of most of a shard all is copied: one copy, of which the pieces are views.
        whole = {k for k, n in taken.items() if n > 1 and 2 * n * item.cell_bytes(k[0]) > shards[k]}
        sources = tuple(s._replace(whole=True) if (s.leaf, s.shard) in whole else s for s in found)
        copied = sum(item.cell_bytes(s.leaf) for s in sources if s.shard < 0)
        return ItemPlan(item, cells, sources, tuple(item.part_ends(cells, part_bytes)), copied, also)

    return planned(item.owned(node), planned(item.also(node)) if local_disks and not per_node else None)


class _Builder:
    """Collects the leaves of one item, and the rows of its tables."""

    def __init__(
        self,
        name: str,
        node_of_process: Mapping[int, int],
        replica_split_bytes: int,
        cell_bytes: float,
        per_node: bool,
    ):
        self.name, self.node_of_process = name, node_of_process
        self.replica_split_bytes, self.cell_bytes, self.per_node = replica_split_bytes, cell_bytes, per_node
        self.leaves: list[Leaf] = []
        self.names: set[str] = set()
        self.forms: dict[Any, tuple[Any, ...]] = {}  # what leaves have in common, by sharding, dtype and shape
        self.grids: dict[Grid, int] = {}
        self.equal: dict[Grid, Grid] = {}  # one of each: to compare two takes long in a large job
        self.cut: dict[Any, Grid] = {}  # by another grid, and the cells along each axis
        self.shardings: dict[Any, int] = {}
        self.meshes: dict[Any, int] = {}
        self.layouts: dict[Any, _Layout] = {}  # by sharding
        self.cells: dict[int, Grid] = {}  # by the id of a layout
        self.nodes: dict[int, np.ndarray] = {}  # by the id of its devices

    def add(self, path: tree_lib.KeyPath, value: Any) -> None:
        name = tree_lib.leaf_name(path)
        if name in self.names:
            raise InvalidArgumentError(f"item {self.name!r}: two leaves have the name {name!r}")
        self.names.add(name)
        form = None
        if isinstance(value, jax.Array):
            if value.is_deleted():
                raise InvalidArgumentError(f"leaf {name!r} was deleted or donated before save()")
            form = value.sharding, value.dtype, value.shape
            if (known := self.forms.get(form)) is not None:
                self.leaves.append(Leaf._make((path, name, *known)))
                return
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
            shape, dtype = tuple(value.shape), value.dtype
            if kind == "prng":
                impl = str(jax.random.key_impl(value))
                inner = jax.eval_shape(jax.random.key_data, value)
                shape, dtype = tuple(inner.shape), inner.dtype
            grid = self._sharding_cells(name, value)
            sharding = -1  # a kind that the tables cannot express
            if isinstance(value.sharding, NamedSharding | SingleDeviceSharding):
                sharding = self.shardings.setdefault(value.sharding, len(self.shardings))
        else:
            if kind in ("longstr", "longbytes"):
                raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                shape, dtype = (len(raw),), np.dtype(np.uint8)
            else:
                shape, dtype = value.shape, value.dtype
            grid, sharding = self._one(Grid((), ((0,),))), -1
        stored = tree_lib.parse_dtype(name, tree_lib.dtype_name(np.dtype(dtype), name))
        if math.prod(shape) == 0:  # nothing to cut: one cell without bytes
            grid = self._one(Grid((), (tuple(sorted({n for h in set(grid.holders) for n in h})),)))
        row = self.grids.setdefault(self._split(shape, stored.itemsize, grid), len(self.grids))
        self.leaves.append(Leaf(path, name, kind, stored, shape, row, 0, sharding, impl))
        if form is not None:
            self.forms[form] = self.leaves[-1][2:]

    def finish(self) -> ArrayItem:
        """Gives each leaf its rotation: the leaves of a grid row take turns, largest first, which balances the load."""
        turns = [0] * len(self.grids)
        grids = list(self.grids)
        cells = sum(len(grids[leaf.grid].holders) for leaf in self.leaves if leaf.grid >= 0)
        if cells > MAX_ITEM_CELLS:
            problem = f"item {self.name!r}: its {len(self.leaves)} leaves lie on devices in {cells} parts"
            raise InvalidArgumentError(f"{problem}; an item has at most {MAX_ITEM_CELLS}. Save it as several items")
        steps, widths = [_turn(grid) for grid in grids], [grid.width[1] for grid in grids]
        turning = [i for i, leaf in enumerate(self.leaves) if leaf.grid >= 0 and widths[leaf.grid] > 1]
        for i in sorted(turning, key=lambda i: (-self.leaves[i].nbytes, i)):
            leaf = self.leaves[i]
            width = widths[leaf.grid] if leaf.nbytes >= _SMALL_BYTES else min(widths[leaf.grid], _FEW_HOLDERS)
            if turns[leaf.grid] % width:
                self.leaves[i] = leaf._replace(rotation=turns[leaf.grid] % width)
            turns[leaf.grid] += steps[leaf.grid]
        shardings = tuple(map(self._sharding_row, self.shardings))
        return ArrayItem(self.name, tuple(self.leaves), tuple(grids), shardings, tuple(map(_mesh_row, self.meshes)))

    def layout(self, value: jax.Array) -> "_Layout":
        """How an array's sharding cuts it; cached, as far as it does not depend on the shape."""
        sharding: Any = value.sharding
        known = (sharding, value.ndim if isinstance(sharding, NamedSharding) else value.shape)
        if (found := self.layouts.get(known)) is None:
            found = self.layouts[known] = _layout(sharding, tuple(value.shape))
        return found

    def nodes_of(self, layout: "_Layout") -> np.ndarray:
        """The node of each device, or -1; int64 of shape (devices,)."""
        if (found := self.nodes.get(id(layout.devices))) is None:  # of one mesh they are one object, which lives
            of = (self.node_of_process.get(device.process_index, -1) for device in layout.devices.flat)
            found = self.nodes[id(layout.devices)] = np.fromiter(of, np.int64, layout.devices.size)
        return found

    def _one(self, grid: Grid) -> Grid:
        return self.equal.setdefault(grid, grid)

    def _sharding_cells(self, name: str, value: jax.Array) -> Grid:
        """The grid of an array's sharding, with the nodes that hold each cell; cached by sharding."""
        layout = self.layout(value)
        grid = self.cells.get(id(layout))
        if grid is None:
            counts, devices, cells = layout
            nodes = self.nodes_of(layout)
            count, here = math.prod(counts), nodes >= 0
            held = np.zeros(count, bool)
            held[cells[here]] = not self.per_node
            if (lost := np.flatnonzero(~here & ~held[cells])).size:
                raise InvalidArgumentError(
                    f"leaf {name!r} lies on {devices.flat[lost[0]]}, whose process is no node of this manager"
                    + (" (NodeSave takes arrays that only this process holds)" if self.per_node else "")
                )
            holders = _holders(cells[here], nodes[here], count)
            if len(self.node_of_process) > 1 and len({n for h in set(holders) for n in h}) == 1:
                raise InvalidArgumentError(
                    f"item {self.name!r}, leaf {name!r} lies on devices of one process only, in a job of "
                    f"{len(self.node_of_process)}: which process's value counts is not defined. Make it a global "
                    "array, for example by creating it under jax.jit with out_shardings"
                )
            while counts and counts[-1] == 1:
                counts = counts[:-1]
            grid = self.cells[id(layout)] = self._one(Grid(counts, holders))
        uneven = [d for d, c in zip(value.shape, grid.counts, strict=False) if d % c]
        if uneven:
            problem = f"leaf {name!r} of shape {value.shape} is sharded unevenly as {value.sharding}"
            raise InvalidArgumentError(problem)
        return grid

    def _split(self, shape: tuple[int, ...], itemsize: int, grid: Grid) -> Grid:
        """Cuts the cells of a large leaf into contiguous pieces: one for each holder, and none above `cell_bytes`."""
        full = grid.counts + (1,) * (len(shape) - len(grid.counts))
        cell, finer = [d // c for d, c in zip(shape, full, strict=True)], [*full]

        def nbytes() -> int:
            return math.prod(cell) * itemsize

        def cut(axis: int, pieces: int) -> None:
            cell[axis] //= pieces
            finer[axis] *= pieces

        axes = [i for i, d in enumerate(cell) if d > 1] if nbytes() else []
        if axes and nbytes() > self.replica_split_bytes:
            width = min(grid.width[0], _MAX_SPLIT)
            cut(axes[0], next(k for k in range(width, 0, -1) if cell[axes[0]] % k == 0))
        for axis in axes:
            if nbytes() <= self.cell_bytes:
                break
            cut(axis, _pieces(cell[axis], math.ceil(nbytes() / self.cell_bytes), _MAX_CUT // math.prod(finer)))
            if cell[axis] > 1:  # along another axis they would not be contiguous
                break
        if tuple(finer) == full:
            return grid
        if (found := self.cut.get((grid, *finer))) is None:
            where = np.indices(finer).reshape(len(finer), -1)
            where //= np.array([[f // c] for f, c in zip(finer, full, strict=True)])
            parents = np.ravel_multi_index(list(where), full)
            counts = tuple(finer[: max(i for i, c in enumerate(finer) if c > 1) + 1])
            found = self._one(Grid(counts, tuple(grid.holders[p] for p in parents)))
            self.cut[(grid, *finer)] = found
        return found

    def _sharding_row(self, sharding: Any) -> dict[str, Any]:
        if isinstance(sharding, NamedSharding):
            mesh = self.meshes.setdefault(sharding.mesh, len(self.meshes))
            spec = [list(e) if isinstance(e, tuple) else e for e in sharding.spec]
            return {"mesh": mesh, "spec": spec, "memory": sharding.memory_kind}
        (device,) = sharding.device_set
        return {"device": device.id, "platform": device.platform, "memory": sharding.memory_kind}


def _pieces(rows: int, wanted: int, most: int) -> int:
    """Into how many equal pieces rows are cut: `wanted`, or somewhat more; else as many below as there can be."""
    enough = (k for k in range(wanted, min(rows, _FINER * wanted, most) + 1) if rows % k == 0)
    return next(enough, 0) or next((k for k in range(min(rows, wanted, most), 1, -1) if rows % k == 0), 1)


def _shard_bytes(leaf: Leaf, value: jax.Array) -> int:
    """Bytes of each shard of a leaf, on one device."""
    return leaf.nbytes * math.prod(value.sharding.shard_shape(value.shape)) // math.prod(value.shape)


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
    width = len(grid.holders[0])
    load = collections.Counter(cell % width for cell, first in enumerate(grid.firsts) if first == 0)
    most = [k for k in range(width) if load[k] == load[0]]
    two = len({load[k] for k in range(width)}) <= 2 and most == list(range(len(most)))
    return len(most) if two else 1


def _holders(cells: np.ndarray, nodes: np.ndarray, count: int) -> tuple[tuple[int, ...], ...]:
    """The nodes of each of `count` cells, ascending; of pairs of a cell and a node."""
    pairs = np.unique(np.stack([cells, nodes]), axis=1)
    ends = np.searchsorted(pairs[0], np.arange(count), side="right").tolist()
    listed = pairs[1].tolist()
    equal: dict[tuple[int, ...], tuple[int, ...]] = {}  # to compare two takes long in a large job
    found = (tuple(listed[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    return tuple([equal.setdefault(nodes, nodes) for nodes in found])


class _Layout(NamedTuple):
    """The regular grid of a sharding."""

    counts: tuple[int, ...]  # cells per dimension
    devices: np.ndarray  # of one mesh always the same object
    cells: np.ndarray  # the cell that each of them holds; int64, flat


def _layout(sharding: Any, shape: tuple[int, ...]) -> _Layout:
    if isinstance(sharding, NamedSharding):  # arithmetic over the mesh: JAX's map of devices to indices is slower
        mesh: Any = sharding.mesh
        sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        where = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        counts = []
        cell = np.zeros(mesh.devices.shape, dtype=np.int64)
        for entry in spec:
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            for axis in axes:
                cell = cell * sizes[axis] + where[axis]
            counts.append(math.prod(sizes[axis] for axis in axes))
        return _Layout(tuple(counts), mesh.devices, cell.ravel())
    piece = sharding.shard_shape(shape)
    counts = tuple(d // p if p else 1 for d, p in zip(shape, piece, strict=True))
    cells = {}
    for device, index in sharding.devices_indices_map(shape).items():
        at = [s.indices(d)[0] // p if p else 0 for s, d, p in zip(index, shape, piece, strict=True)]
        cells[device] = int(np.ravel_multi_index(at, counts)) if shape else 0
    return _Layout(counts, np.array([*cells], dtype=object), np.array([*cells.values()], np.int64))


def device_cells(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[Any, int]]:
    """The regular grid of a sharding: cells per dimension, and the cell that each device holds."""
    counts, devices, cells = _layout(sharding, shape)
    return counts, dict(zip(devices.flat, cells.tolist(), strict=True))


def _sources(
    builder: "_Builder", item: ArrayItem, values: Sequence[Any], owned: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> Iterator[CellSource]:
    """Where this node finds each cell that it writes."""
    shards: dict[int, tuple[dict[int, int], bool, bool]] = {}
    places: dict[int, dict[Any, int]] = {}
    layouts: dict[Any, _Layout] = {}
    for leaf, cell in zip(owned[0].tolist(), owned[1].tolist(), strict=True):
        info, value = item.leaves[leaf], values[leaf]
        if not info.is_global:
            yield CellSource(leaf, -1, None if item.is_whole(leaf) else slices(item.cell_box(leaf, cell)))
            continue
        form = (info.sharding if info.sharding >= 0 else value.sharding, info.kind, info.shape)
        if (layout := layouts.get(form)) is None:
            layout = layouts[form] = builder.layout(value)
        if id(layout) not in shards:
            held, local = [shard.device for shard in value.addressable_shards], dict[int, int]()
            if (place := places.get(id(layout.devices))) is None:
                place = places[id(layout.devices)] = {device: i for i, device in enumerate(layout.devices.flat)}
            for k, device in enumerate(held):
                local.setdefault(int(layout.cells[place[device]]), k)
            shards[id(layout)] = local, {device.platform for device in held} != HOST, layout.devices.size == 1
        (local, staged, alone), counts = shards[id(layout)], layout.counts
        if item.is_whole(leaf):
            yield CellSource(leaf, next(iter(local.values())), None, staged, alone)  # maybe without elements
            continue
        # The shard is a cell of the sharding's grid, and this cell all of it or, of a split leaf, a piece.
        counts += (1,) * (len(info.shape) - len(counts))  # typed keys have the dimensions of their data in addition
        box = item.cell_box(leaf, cell)
        outer = tuple(d // c for d, c in zip(info.shape, counts, strict=True))
        parent = int(np.ravel_multi_index([start // side for (start, _), side in zip(box, outer, strict=True)], counts))
        cut = None if outer == item.cell_shape(leaf) else slices(box, cell_box(parent, counts, outer))
        yield CellSource(leaf, local[parent], cut, staged, alone)


def boxes_of_devices(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box that each addressable device holds, for an array of this shape and sharding."""
    counts, cells = device_cells(sharding, shape)
    piece = [d // c for d, c in zip(shape, counts, strict=True)]
    return {device: cell_box(cells[device], counts, piece) for device in sharding.addressable_devices}
