"""The plan of a save: a pure function of trees, shardings and the node list, so that all nodes compute the same one.

A plan is computed once per tree structure, shapes and shardings. `planner` keeps it; a later save of the same tree
finds it by `leaf_keys`, which the training thread compares.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from epochckpt._text import readable
from epochckpt.arrays import transfers
from epochckpt.arrays.sharding_grids import ShardingGrid, grid_of
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import ArrayItem, Grid, Leaf, NodeCells, checksums, safetensors
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import MAX_ITEM_CELLS, blocks, cell_box, slices
from epochckpt.format.tree import ARRAY_KINDS
from epochckpt.orbax import events
from epochckpt.storage.mmap import Assembled

_MAX_SPLIT = 8  # a replicated array is split between at most this many of its holders
_MAX_CUT = 10_000  # cells of a leaf, as far as `part_bytes` makes them more
_FINER = 4  # and they may be smaller by this factor than they need to be

SLAB_CELL_BYTES = 64 * 1024  # of a cell: smaller ones are copied together, which costs less than a view of each

_FEW_HOLDERS = 16
_SMALL_BYTES = 256 * 1024
"""A replicated leaf of fewer bytes has its owner among the first holders: a restore opens the files of these few."""


class HostSource(NamedTuple):
    """Where a cell is found that this node writes: in a leaf of NumPy or Python."""

    leaf: int  # the leaf's number
    cut: tuple[slice, ...] | None  # the part of the leaf; None for all of it

    on_accelerator = False


class ShardSource(NamedTuple):
    """Where a cell is found that this node writes: in a shard of a jax array."""

    leaf: int  # the leaf's number
    shard: int  # the index of the addressable shard
    cut: tuple[slice, ...] | None  # the part of the shard; None for all of it
    on_accelerator: bool = False
    is_leaf: bool = False  # the leaf lies on one device: the shard is all of it
    moves_whole: bool = False  # the shard is copied from its accelerator once, for all cells that are parts of it


CellSource = HostSource | ShardSource


class CellRange(NamedTuple):
    """Consecutive cells that a snapshot holds as one buffer: small cells in its slab, or a single larger cell."""

    start: int  # the number of the first cell, in file order
    stop: int  # the number of the cell after the last one
    nbytes: int
    in_slab: bool  # see `ItemPlan.slab_entries`


class FilePlan(NamedTuple):
    """One part of a node's data file."""

    head: bytes  # its header
    cells: int  # how many it holds
    ranges: slice  # which of the plan's `cell_ranges` lie in it
    offsets: np.ndarray  # int64 of shape (ranges + 1,): where each range begins in the file, and the last one ends
    block_ends: np.ndarray  # int64 of shape (blocks,): where each block ends in the file


_SlabEntry = tuple[int, bool, CellSource]
"""A leaf's number, whether its own buffer has just the bytes of the cell, and where the cell is found."""


@dataclasses.dataclass(frozen=True)
class ItemPlan:
    """This node's part in saving one item."""

    item: ArrayItem
    owned: NodeCells  # every cell that it writes
    sources: tuple[CellSource, ...]  # where each of these cells is found
    part_ends: tuple[int, ...]  # numbers of cells after which the data file is continued in another part
    # The same for cells that it holds and another node owns, where each host has a disk of its own.
    replicas: "ItemPlan | None" = None
    # The cells of arrays that were placed on no device, in a job of several processes: each has them, and their values
    # are compared before the commit.
    compared: "ItemPlan | None" = None

    @functools.cached_property
    def accelerator_sources(self) -> list[ShardSource]:
        """The sources that lie on accelerators."""
        return [source for source in self.sources if isinstance(source, ShardSource) and source.on_accelerator]

    @functools.cached_property
    def cell_ranges(self) -> list[CellRange]:
        """The buffers of a snapshot, in file order; each lies in one part of the data file."""
        sizes = self.owned.nbytes
        count = len(self.sources)
        in_slab = (sizes <= SLAB_CELL_BYTES) & ~np.array([source.on_accelerator for source in self.sources], bool)
        begins = np.ones(count, bool)
        begins[1:] = ~(in_slab[1:] & in_slab[:-1])
        begins[[*self.part_ends[:-1]]] = True
        starts = np.flatnonzero(begins)
        bounds = [*starts.tolist(), count]
        nbytes = np.diff(np.cumsum([0, *sizes.tolist()])[bounds]).tolist()
        return [*map(CellRange, bounds, bounds[1:], nbytes, in_slab[starts].tolist())]

    @functools.cached_property
    def slab_entries(self) -> list[_SlabEntry]:
        """The cells of a snapshot's slab, in file order. The slab is one piece of memory, to which they are copied."""
        ranges = (cells for cells in self.cell_ranges if cells.in_slab)
        sources = [source for cells in ranges for source in self.sources[cells.start : cells.stop]]
        plain = self.item.each(_is_plain, bool).tolist()
        return [
            (s.leaf, isinstance(s, ShardSource) and s.is_leaf and s.cut is None and plain[s.leaf], s) for s in sources
        ]

    @functools.cached_property
    def slab_bytes(self) -> int:
        """Bytes of the cells of a snapshot's slab."""
        return sum(cells.nbytes for cells in self.cell_ranges if cells.in_slab)

    @functools.cached_property
    def host_copy_bytes(self) -> int:
        """Bytes of host memory that a snapshot takes for cells in host memory: the slab, and larger leaves of NumPy.

        Leaves of mapped files count, too, though only small ones are copied.
        Two kinds of cells are not in it. Those on accelerators have `transfers.Copies`. Larger cells of jax arrays are
        in `viewed`: how its memory is laid out decides whether one is copied, and the plan does not depend on that.
        """
        larger = ((self.sources[cells.start], cells.nbytes) for cells in self.cell_ranges if not cells.in_slab)
        return self.slab_bytes + sum(nbytes for source, nbytes in larger if isinstance(source, HostSource))

    @functools.cached_property
    def viewed(self) -> list[tuple[int, int]]:
        """(leaf, bytes) of each larger cell of a jax array in host memory."""
        larger = ((self.sources[cells.start], cells.nbytes) for cells in self.cell_ranges if not cells.in_slab)
        return [(s.leaf, n) for s, n in larger if isinstance(s, ShardSource) and not s.on_accelerator]

    def name(self, cells: CellRange) -> str:
        """The name of the first leaf of a range."""
        return self.item.leaves[self.sources[cells.start].leaf].name

    @functools.cached_property
    def value_leaves(self) -> list[int]:
        """The numbers of the leaves that are recorded as values."""
        return np.flatnonzero(self.item.each(lambda leaf: leaf.kind in tree_lib.VALUE_KINDS, bool)).tolist()

    def files(self, block_bytes: int) -> list[FilePlan]:
        """The parts of this node's data file, with checksums of blocks of this size."""
        if block_bytes not in self._files:
            found = list[FilePlan]()
            starts = [cells.start for cells in self.cell_ranges]
            cell = 0
            for end, part in zip(self.part_ends, self.item.cut(self.owned, self.part_ends), strict=True):
                numbers = zip(part.leaves.tolist(), part.cells.tolist(), strict=True)
                head = safetensors.header([self.item.tensor(leaf, number) for leaf, number in numbers])
                ranges = slice(bisect.bisect_left(starts, cell), bisect.bisect_left(starts, end))
                file = FilePlan(
                    head=head,
                    cells=end - cell,
                    ranges=ranges,
                    offsets=part.offsets[[start - cell for start in [*starts[ranges], end]]] + len(head),
                    block_ends=blocks(np.diff(part.offsets), len(head), block_bytes),
                )
                found.append(file)
                cell = end
            self._files[block_bytes] = found
        return self._files[block_bytes]

    def complete(self, block_bytes: int) -> None:
        """Computes now what saves are going to ask for; block_bytes: see `files`."""
        _ = self.accelerator_sources, self.slab_entries, self.host_copy_bytes, self.viewed, self.value_leaves
        _ = self.nbytes, self.digest, self.files(block_bytes)

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
        return int(self.item.each(lambda leaf: leaf.nbytes).sum())

    @functools.cached_property
    def figures(self) -> list[tuple[str, float]]:
        """What listeners of `jax.monitoring` are told of the arrays, by name; of those with a recorded sharding."""
        replicated = [_is_replicated(row, self.item.meshes) for row in self.item.shardings]
        leaves = (leaf for leaf in self.item.leaves if leaf.sharding >= 0)
        return events.sizes_of_arrays((leaf.nbytes, replicated[leaf.sharding]) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class PlanDigest:
    """The digest of a save's plan, which all processes compare."""

    nodes: Sequence[Any]  # a row for each node of the job
    items: Mapping[str, ItemPlan]  # the plans that are the same on all processes, by the names of their items
    others: Sequence[tuple[str, str, str]]  # name, kind and handler of all other items

    @functools.cached_property
    def text(self) -> str:
        """The digest; computed when it is first asked for, in the background."""
        digests = {name: plan.digest for name, plan in self.items.items()}
        agreed = {"nodes": self.nodes, "others": self.others, "items": digests}
        return checksums.digest(json.dumps(agreed, separators=(",", ":")).encode())


def _is_plain(leaf: Leaf) -> bool:
    """Whether an array has a buffer in Python's sense: only those of NumPy's own types do."""
    return leaf.kind == "jax" and leaf.dtype is not None and leaf.dtype.isbuiltin == 1


def _is_replicated(row: Mapping[str, Any], meshes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a sharding replicates an array along an axis of its mesh that has more than one device."""
    if "mesh" not in row:
        return False
    mesh = meshes[row["mesh"]]
    cut = {axis for part in row["spec"] for axis in (part if isinstance(part, list) else [part])}
    return any(size > 1 for axis, size in zip(mesh["axes"], mesh["shape"], strict=True) if axis not in cut)


def leaf_keys(leaves: Sequence[Any]) -> list[Any]:
    """A key of each leaf: type, shape, dtype, sharding, whether it is committed there, and whether the dtype is weak.

    A plan depends on these and on the tree's structure. The keys are cheap to make and to compare, and hold no array.
    Leaves with equal keys have one form.
    """
    return [_key_of(type(leaf))(leaf) for leaf in leaves]


_is_array = functools.cache(lambda kind: issubclass(kind, jax.Array))
_array_key = operator.attrgetter("shape", "dtype", "sharding", "committed", "weak_type")
_prng_key = operator.attrgetter("shape", "dtype", "sharding", "committed")  # of typed keys, which have no weak dtype


@functools.cache
def _key_of(kind: type) -> Callable[[Any], Any]:
    """What makes the key of a leaf of this type."""
    if not _is_array(kind):
        return _leaf_key
    return _array_key if hasattr(kind, "weak_type") else _prng_key


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # traced
        return _array_key(leaf)
    if isinstance(leaf, np.ndarray | Assembled):
        return type(leaf), leaf.shape, leaf.dtype
    if isinstance(leaf, str | bytes):  # also NumPy's
        if len(leaf) <= tree_lib.INLINE_BYTES // 4:
            return type(leaf)
        return type(leaf), len(leaf.encode("utf-8", "surrogatepass")) if isinstance(leaf, str) else len(leaf)
    if isinstance(leaf, np.generic):
        return type(leaf), leaf.dtype
    return type(leaf)


def refuse_traced(name: str, tree: Any) -> None:
    """Raises InvalidArgumentError, with the first leaf, for a tree of item `name` with values that jax is tracing."""
    traced = [path for path, leaf in tree_lib.flatten(tree)[0] if isinstance(leaf, Tracer)]
    if traced:
        raise InvalidArgumentError(
            f"item {name!r}, leaf {readable(tree_lib.leaf_name(traced[0]))!r} ({len(traced)} in all) is a tracer, no "
            "array: save() was called inside a function that jax transforms (jit, grad, vmap, scan, …), where there "
            "are no values yet. Return the state from that function, and save the returned one"
        )


class LeafForm(NamedTuple):
    """What the leaves of one form have in common, without their values."""

    kind: str  # as in `Leaf`
    dtype: np.dtype[Any] | None = None  # the dtype of the stored array; None for leaves without bytes in a data file
    shape: tuple[int, ...] = ()  # the shape of the stored array
    leaf_shape: tuple[int, ...] = ()  # the shape of the leaf itself: typed keys are stored with more dimensions
    sharding: Any = None  # of a jax array; None for leaves of NumPy and Python
    held: tuple[Any, ...] = ()  # the devices of the addressable shards, in the order of the shards
    impl: str | None = None  # the PRNG implementation of typed keys
    uncommitted: bool = False  # a jax array that was placed nowhere: JAX may use it on any device
    weak_type: bool = False  # see `Leaf`


class Forms(NamedTuple):
    """The leaves of a tree, as a plan needs them."""

    distinct: list[LeafForm]
    first: list[int]  # for each form the number of the first leaf that has it
    of: list[int]  # for each leaf the number of its form


def forms_of(keys: Sequence[Any], leaves: Sequence[Any], where: Callable[[int], tuple[str, str]]) -> Forms:
    """The forms of leaves with these `leaf_keys`; refuses a form that cannot be saved.

    `where` gives the item and the name of a leaf, for the error.
    """
    numbers = collections.defaultdict[Any, int](itertools.count().__next__)
    of = [numbers[key] for key in keys]
    first = np.unique(of, return_index=True)[1].tolist()
    distinct = list[LeafForm]()
    for i in first:
        item, name = where(i)
        distinct.append(_leaf_form(leaves[i], item, name))
    return Forms(distinct, first, of)


def _leaf_form(value: Any, item: str, name: str) -> LeafForm:
    kind = tree_lib.leaf_kind(value)
    where = f"item {item!r}, leaf {name!r}"
    if kind is None:
        raise InvalidArgumentError(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be "
            "saved; expected a jax or NumPy array, a Python number, str, bytes or None. Save None in its place, or the "
            "arrays of the model alone: equinox.filter(model, equinox.is_array), flax's nnx.state(model), ...; of a "
            "jax.Ref its value: ref[...]"
        )
    if kind not in ARRAY_KINDS:
        return LeafForm(kind)
    if kind in ("longstr", "longbytes"):
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return LeafForm(kind=kind, dtype=np.dtype(np.uint8), shape=(len(raw),))
    leaf_shape = tuple(value.shape)
    shape = leaf_shape
    dtype = value.dtype
    impl = None
    sharding = None
    uncommitted = False
    held = ()
    if kind == "prng":
        impl = str(jax.random.key_impl(value))
        inner = jax.eval_shape(jax.random.key_data, value)
        shape = tuple(inner.shape)
        dtype = inner.dtype
    if kind in ("jax", "prng"):
        if value.is_deleted():
            raise InvalidArgumentError(f"{where} was deleted or donated before save()")
        sharding = value.sharding
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        if spec.unreduced or spec.reduced:
            raise InvalidArgumentError(
                f"{where} lies as {spec}: its devices may hold parts of a sum, which cannot be "
                "saved. Save the sum: jax.reshard(array, PartitionSpec()), or with another spec without such axes"
            )
        held = tuple(shard.device for shard in value.addressable_shards)
        uncommitted = not value.committed
    stored = tree_lib.parse_dtype(name, tree_lib.dtype_name(np.dtype(dtype), where))
    return LeafForm(
        kind=kind,
        dtype=stored,
        shape=shape,
        leaf_shape=leaf_shape,
        sharding=sharding,
        held=held,
        impl=impl,
        uncommitted=uncommitted,
        weak_type=kind == "jax" and value.weak_type,
    )


def plan_item(
    name: str,
    paths: Sequence[tree_lib.KeyPath],
    forms: Forms,
    *,
    node: int,
    node_of_process: Mapping[int, int],
    replica_split_bytes: int,
    part_bytes: int | None,
    cut: bool = False,
    per_node: bool = False,
    local_disks: bool = False,
) -> ItemPlan:
    """Plans one item from the paths and forms of its leaves; refuses a leaf that cannot be saved, by name.

    A replicated array larger than `replica_split_bytes` is split between several of its holders; `part_bytes` bounds a
    data file, and with `cut` a larger cell is cut by rows. With `per_node`, no other process may hold a part of the
    item. With `local_disks` the plan has a second one, of replicas: cells that this node holds and another owns.
    Arrays that were placed on no device are replicated in a job of several processes, and the plan has one of them.
    """
    cell_bytes = part_bytes if cut and part_bytes else math.inf
    builder = _Builder(
        name=name,
        node_of_process=node_of_process,
        replica_split_bytes=replica_split_bytes,
        cell_bytes=cell_bytes,
        per_node=per_node,
    )
    item = builder.item(paths, forms)
    part = _NodePart(builder, item, forms, part_bytes)
    is_shared = len(node_of_process) > 1
    return dataclasses.replace(
        part.plan(item.owned(node)),
        replicas=part.plan(item.replicas(node)) if local_disks and not per_node else None,
        compared=part.plan(item.uncommitted) if is_shared and len(item.uncommitted.leaves) else None,
    )


class _Builder:
    """Makes one item, and the rows of its tables."""

    def __init__(
        self,
        name: str,
        node_of_process: Mapping[int, int],
        replica_split_bytes: int,
        cell_bytes: float,
        per_node: bool,
    ):
        self.name = name
        self.node_of_process = node_of_process
        self.replica_split_bytes = replica_split_bytes
        self.cell_bytes = cell_bytes
        self.per_node = per_node
        # The tables of the item: the number of each row.
        self.grids: dict[Grid, int] = {}
        self.shardings: dict[tuple[Any, bool], int] = {}  # by sharding, and whether it is that of uncommitted arrays
        self.meshes: dict[Any, int] = {}
        # What was found before.
        self.equal: dict[Grid, Grid] = {}  # one of each: to compare two takes long in a large job
        self.finer_grids: dict[tuple[Grid, tuple[int, ...]], Grid] = {}  # by another grid, and cells along each axis
        self.layouts: dict[Any, ShardingGrid] = {}  # by sharding
        self.layout_grids: dict[int, Grid] = {}  # by the id of a layout
        self.device_nodes: dict[int, np.ndarray] = {}  # by the id of a layout's devices

    def item(self, paths: Sequence[tree_lib.KeyPath], forms: Forms) -> ArrayItem:
        """The item; its leaves differ in path, name and rotation, and few of them in more."""
        names = [tree_lib.leaf_name(path) for path in paths]
        if len({*names}) != len(names):
            twice = next(name for name, count in collections.Counter(names).items() if count > 1)
            raise InvalidArgumentError(f"item {self.name!r}: two leaves have the name {twice!r}")
        fields = [self._leaf(names[i], form).after_name for i, form in zip(forms.first, forms.distinct, strict=True)]
        # By place: a tree has thousands of leaves, and with keywords one takes five times as long.
        leaves = [Leaf._make((path, name, *fields[n])) for path, name, n in zip(paths, names, forms.of, strict=True)]
        self._check_cell_count(leaves, forms)
        for i, rotation in self._rotations(leaves, forms):
            leaves[i] = leaves[i]._replace(rotation=rotation)
        shardings = tuple([self._sharding_row(sharding, uncommitted) for sharding, uncommitted in self.shardings])
        meshes = tuple(map(_mesh_row, self.meshes))
        return ArrayItem(self.name, tuple(leaves), tuple(self.grids), shardings, meshes)

    def _leaf(self, name: str, form: LeafForm) -> Leaf:
        """A leaf of a form, without its path."""
        if form.dtype is None:
            return Leaf(path=(), name=name, kind=form.kind)
        sharding = -1
        if form.sharding is None:
            grid = self._one(Grid((), ((0,),)))
        elif len(self.node_of_process) > 1 and form.uncommitted and isinstance(form.sharding, SingleDeviceSharding):
            # Each process has one, on a device of its own.
            grid = self._one(Grid((), (tuple(sorted(self.node_of_process.values())),)))
            sharding = self._sharding_number(_on_first_device(form.sharding), uncommitted=True)
        else:
            grid = self._sharding_cells(name, form)
            if isinstance(form.sharding, NamedSharding | SingleDeviceSharding):  # the tables express no other kind
                sharding = self._sharding_number(form.sharding, form.uncommitted)
        if math.prod(form.shape) == 0:  # nothing to cut: one cell without bytes
            everyone = {node for holders in set(grid.holders) for node in holders}
            grid = self._one(Grid((), (tuple(sorted(everyone)),)))
        row = self.grids.setdefault(self._split(form.shape, form.dtype.itemsize, grid), len(self.grids))
        return Leaf(
            path=(),
            name=name,
            kind=form.kind,
            dtype=form.dtype,
            shape=form.shape,
            grid=row,
            sharding=sharding,
            impl=form.impl,
            weak_type=form.weak_type,
        )

    def _sharding_number(self, sharding: Sharding, uncommitted: bool) -> int:
        return self.shardings.setdefault((sharding, uncommitted), len(self.shardings))

    def _check_cell_count(self, leaves: Sequence[Leaf], forms: Forms) -> None:
        """Refuses an item of more cells than a reader accepts."""
        grids = list(self.grids)
        cells = 0
        for first, count in zip(forms.first, np.bincount(forms.of).tolist(), strict=True):
            row = leaves[first].grid
            if row >= 0:
                cells += count * len(grids[row].holders)
        if cells > MAX_ITEM_CELLS:
            problem = f"item {self.name!r}: its {len(leaves)} leaves lie on devices in {cells} parts"
            raise InvalidArgumentError(f"{problem}; an item has at most {MAX_ITEM_CELLS}. Save it as several items")

    def _rotations(self, leaves: Sequence[Leaf], forms: Forms) -> Iterator[tuple[int, int]]:
        """(leaf, rotation) of the leaves that get one, so that the holders of cells write about as much each.

        Every cell has an owner among its holders, the nodes that have it; without a rotation the first holder. A
        rotation of r makes the holder r places later the owner. The leaves of a grid row take turns: the first one has
        the rotation 0, and each rotation is larger than the one before by the row's `_rotation_step`. Large leaves come
        first, so that the small ones even out what is left. For instance, four nodes hold all of some arrays of one
        cell each. The step is 1, and the nodes 0, 1, 2, 3, 0, … write one array each.
        """
        grids = list(self.grids)
        steps = [_rotation_step(grid) for grid in grids]
        widths = [grid.width[1] for grid in grids]  # the most holders of a cell of the row
        firsts = [leaves[i] for i in forms.first]
        can_turn = [leaf.grid >= 0 and widths[leaf.grid] > 1 for leaf in firsts]
        if not any(can_turn):
            return
        sizes = [leaf.nbytes for leaf in firsts]
        turning = [i for i, form in enumerate(forms.of) if can_turn[form]]
        rotations = [0] * len(grids)  # of the next leaf of each row
        for i in sorted(turning, key=lambda i: -sizes[forms.of[i]]):
            row = leaves[i].grid
            width = widths[row] if sizes[forms.of[i]] >= _SMALL_BYTES else min(widths[row], _FEW_HOLDERS)
            if rotations[row] % width:
                yield i, rotations[row] % width
            rotations[row] += steps[row]

    def layout(self, form: LeafForm) -> "ShardingGrid":
        """How an array's sharding cuts it; cached, as far as it does not depend on the shape."""
        shape = form.leaf_shape
        key = (form.sharding, len(shape) if isinstance(form.sharding, NamedSharding) else shape)
        if key not in self.layouts:
            self.layouts[key] = grid_of(form.sharding, shape)
        return self.layouts[key]

    def nodes_of(self, layout: "ShardingGrid") -> np.ndarray:
        """The node of each device, or -1; int64 of shape (devices,)."""
        # A mesh keeps its array of devices alive, so the array's id stays unique.
        key = id(layout.devices)
        if key not in self.device_nodes:
            nodes = (self.node_of_process.get(device.process_index, -1) for device in layout.devices.flat)
            self.device_nodes[key] = np.fromiter(nodes, np.int64, layout.devices.size)
        return self.device_nodes[key]

    def _one(self, grid: Grid) -> Grid:
        return self.equal.setdefault(grid, grid)

    def _sharding_cells(self, name: str, form: LeafForm) -> Grid:
        """The grid of an array's sharding, with the nodes that hold each cell.

        InvalidArgumentError: the sharding cuts the array unevenly.
        """
        layout = self.layout(form)
        if id(layout) not in self.layout_grids:
            self.layout_grids[id(layout)] = self._one(self._layout_grid(name, layout))
        grid = self.layout_grids[id(layout)]
        uneven = [d for d, c in zip(form.leaf_shape, grid.counts, strict=False) if d % c]
        if uneven:
            where = f"item {self.name!r}, leaf {name!r}"
            problem = f"{where} of shape {form.leaf_shape} is sharded unevenly as {form.sharding}"
            raise InvalidArgumentError(problem)
        return grid

    def _layout_grid(self, name: str, layout: ShardingGrid) -> Grid:
        """The grid of a layout; refuses one with cells that no node of the job holds, or that one process alone has."""
        nodes = self.nodes_of(layout)
        count = math.prod(layout.counts)
        here = nodes >= 0
        held = np.zeros(count, bool)
        held[layout.cells[here]] = not self.per_node
        lost = np.flatnonzero(~here & ~held[layout.cells])
        if lost.size:
            where = f"item {self.name!r}, leaf {name!r}"
            raise InvalidArgumentError(
                f"{where} lies on {layout.devices.flat[lost[0]]}, whose process is no node of this manager"
                + (" (NodeSave takes arrays that only this process holds)" if self.per_node else "")
            )
        holders = _holders(layout.cells[here], nodes[here], count)
        if len(self.node_of_process) > 1 and len({n for h in set(holders) for n in h}) == 1:
            raise InvalidArgumentError(
                f"item {self.name!r}, leaf {name!r} lies on devices of one process only, in a job of "
                f"{len(self.node_of_process)}: which process's value counts is not defined. Make it a global "
                "array, for example by creating it under jax.jit with out_shardings"
            )
        return Grid(_without_trailing_ones(layout.counts), holders)

    def _split(self, shape: tuple[int, ...], itemsize: int, grid: Grid) -> Grid:
        """Cuts the cells of a large leaf into contiguous pieces: one for each holder, and none above `cell_bytes`."""
        counts = grid.counts + (1,) * (len(shape) - len(grid.counts))
        cells = _CutCells(shape, counts, itemsize)
        axes = [i for i, d in enumerate(cells.shape) if d > 1] if cells.nbytes else []
        if axes and cells.nbytes > self.replica_split_bytes:
            width = min(grid.width[0], _MAX_SPLIT)
            rows = cells.shape[axes[0]]
            cells.cut(axes[0], next(k for k in range(width, 0, -1) if rows % k == 0))
        for axis in axes:
            if cells.nbytes <= self.cell_bytes:
                break
            wanted = math.ceil(cells.nbytes / self.cell_bytes)
            cells.cut(axis, _pieces(cells.shape[axis], wanted, _MAX_CUT // math.prod(cells.counts)))
            if cells.shape[axis] > 1:  # along another axis they would not be contiguous
                break
        finer = tuple(cells.counts)
        return grid if finer == counts else self._finer_grid(grid, counts, finer)

    def _finer_grid(self, grid: Grid, counts: tuple[int, ...], finer: tuple[int, ...]) -> Grid:
        """A grid whose cells, of these counts along all axes, are cut into more; each piece has its cell's holders."""
        if (grid, finer) not in self.finer_grids:
            where = np.indices(finer).reshape(len(finer), -1)
            where //= np.array([[f // c] for f, c in zip(finer, counts, strict=True)])
            parents = np.ravel_multi_index(list(where), counts)
            holders = tuple(grid.holders[parent] for parent in parents)
            self.finer_grids[grid, finer] = self._one(Grid(_without_trailing_ones(finer), holders))
        return self.finer_grids[grid, finer]

    def _sharding_row(self, sharding: Any, uncommitted: bool) -> dict[str, Any]:
        if isinstance(sharding, NamedSharding):
            mesh = self.meshes.setdefault(sharding.mesh, len(self.meshes))
            spec = [list(e) if isinstance(e, tuple) else e for e in sharding.spec]
            return {"mesh": mesh, "spec": spec, "memory": sharding.memory_kind}
        (device,) = sharding.device_set
        row = {"device": device.id, "platform": device.platform, "memory": sharding.memory_kind}
        return row | {"committed": False} if uncommitted else row


class _CutCells:
    """The equal cells of a leaf while they are cut further.

    Attributes:
        shape: of each cell.
        counts: cells along each axis.
    """

    def __init__(self, shape: Sequence[int], counts: Sequence[int], itemsize: int):
        self.shape = [d // c for d, c in zip(shape, counts, strict=True)]
        self.counts = [*counts]
        self._itemsize = itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of each cell."""
        return math.prod(self.shape) * self._itemsize

    def cut(self, axis: int, pieces: int) -> None:
        """Cuts each cell along an axis into so many pieces, by which its length can be divided."""
        self.shape[axis] //= pieces
        self.counts[axis] *= pieces


def _on_first_device(sharding: SingleDeviceSharding) -> SingleDeviceSharding:
    """Each process has the array on a device of its own; all of them record the first device of the job."""
    (device,) = sharding.device_set
    return SingleDeviceSharding(jax.devices(device.platform)[0], memory_kind=sharding.memory_kind)


def _without_trailing_ones(counts: tuple[int, ...]) -> tuple[int, ...]:
    while counts and counts[-1] == 1:
        counts = counts[:-1]
    return counts


def _pieces(rows: int, wanted: int, most: int) -> int:
    """Into how many equal pieces rows are cut: `wanted`, or somewhat more; else as many below as there can be."""
    for count in range(wanted, min(rows, _FINER * wanted, most) + 1):
        if rows % count == 0:
            return count
    for count in range(min(rows, wanted, most), 1, -1):
        if rows % count == 0:
            return count
    return 1


def _shard_bytes(form: LeafForm) -> int:
    """Bytes of each shard of a leaf, on one device."""
    assert form.dtype is not None, "it has bytes"
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    leaf_shape = form.leaf_shape
    return nbytes * math.prod(form.sharding.shard_shape(leaf_shape)) // math.prod(leaf_shape)


def _mesh_row(mesh: Any) -> dict[str, Any]:
    return {
        "platform": mesh.devices.flat[0].platform,
        "axes": list(mesh.axis_names),
        "axis_types": [t.name for t in mesh.axis_types],
        "shape": list(mesh.devices.shape),
        "devices": [d.id for d in mesh.devices.flat],
    }


def _rotation_step(grid: Grid) -> int:
    """By how much the rotation grows from one leaf of a grid row to the next: past the owners that have written more.

    Cell c has the holder `c % width` as its owner, of the group of holders that the first cell has. If the cells are no
    multiple of the holders, the first few own one cell more. The next leaf begins after them. For instance, four nodes
    hold all of some arrays of two cells. The nodes 0 and 1 own the cells of the first array, and the step is 2, so that
    the nodes 2 and 3 own those of the second array. With a step of 1 these would be the nodes 1 and 2.

    That holds only if holders own one of two numbers of cells, and those that own as many as the first holder are the
    first ones. The groups of holders of a sharded array may alternate from cell to cell: then the step may be 1.
    """
    width = len(grid.holders[0])
    owned = collections.Counter(cell % width for cell, first in enumerate(grid.firsts) if first == 0)
    counts = [owned[holder] for holder in range(width)]
    like_first = [holder for holder in range(width) if counts[holder] == counts[0]]
    own_two_numbers = len(set(counts)) <= 2
    come_first = like_first == list(range(len(like_first)))
    return len(like_first) if own_two_numbers and come_first else 1


def _holders(cells: np.ndarray, nodes: np.ndarray, count: int) -> tuple[tuple[int, ...], ...]:
    """The nodes of each of `count` cells, ascending; of pairs of a cell and a node."""
    pairs = np.unique(np.stack([cells, nodes]), axis=1)
    ends = np.searchsorted(pairs[0], np.arange(count), side="right").tolist()
    listed = pairs[1].tolist()
    equal: dict[tuple[int, ...], tuple[int, ...]] = {}  # to compare two takes long in a large job
    found = (tuple(listed[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    return tuple([equal.setdefault(nodes, nodes) for nodes in found])


class _HeldShards(NamedTuple):
    """The shards that this process holds of a leaf; the same for all leaves of one form."""

    layout: ShardingGrid
    numbers: dict[int, int]  # by cell of the layout: the number of the first shard that has it
    on_accelerator: bool


class _NodePart:
    """Plans a node's part in saving an item: finds each cell that it writes in the leaves that this process holds."""

    def __init__(self, builder: _Builder, item: ArrayItem, forms: Forms, part_bytes: int | None):
        self._builder = builder
        self._item = item
        self._forms = forms
        self._part_bytes = part_bytes
        self._held: dict[int, _HeldShards] = {}  # by number of the form
        self._places: dict[int, dict[Any, int]] = {}  # by the id of a layout's devices: the place of each

    def plan(self, cells: NodeCells) -> ItemPlan:
        """The plan of writing, or comparing, these cells."""
        return ItemPlan(
            item=self._item,
            owned=cells,
            sources=self._moved_whole([*self._sources(cells)]),
            part_ends=tuple(self._item.part_ends(cells, self._part_bytes)),
        )

    def _moved_whole(self, sources: Sequence[CellSource]) -> tuple[CellSource, ...]:
        """The sources, with `moves_whole` set for cells of a shard of which most is wanted, in several cells."""
        shards = [(s.leaf, s.shard) for s in sources if isinstance(s, ShardSource) and s.cut is not None]
        counts = collections.Counter(shards)
        whole = {shard for shard, count in counts.items() if count > 1 and self._is_mostly_wanted(shard[0], count)}
        if not whole:
            return tuple(sources)
        return tuple(
            [
                source._replace(moves_whole=True)
                if isinstance(source, ShardSource) and (source.leaf, source.shard) in whole
                else source
                for source in sources
            ]
        )

    def _is_mostly_wanted(self, leaf: int, count: int) -> bool:
        """Whether so many cells of one shard of a leaf are more than half of it."""
        shard_bytes = _shard_bytes(self._forms.distinct[self._forms.of[leaf]])
        return 2 * count * self._item.cell_bytes(leaf) > shard_bytes

    def _sources(self, cells: NodeCells) -> Iterator[CellSource]:
        """The source of each cell, in the order of the cells.

        The sources of leaves that are one cell differ in the leaf only, if the leaves have one form. A tree has
        thousands of them: they are made of the fields of the first one.
        """
        # By number of the form: the call that makes a source of its fields, and the fields after `leaf`.
        after_leaf: dict[int, tuple[Callable[[Any], CellSource], tuple[Any, ...]]] = {}
        for leaf, cell in zip(cells.leaves.tolist(), cells.cells.tolist(), strict=True):
            form = self._forms.of[leaf]
            found = after_leaf.get(form)
            if found is not None:
                make, fields = found
                yield make((leaf, *fields))  # by place: with keywords it takes five times as long
                continue
            source = self._source(leaf, cell)
            if self._item.is_whole(leaf):
                after_leaf[form] = type(source)._make, source[1:]
            yield source

    def _source(self, leaf: int, cell: int) -> CellSource:
        """Where a cell of a leaf is found."""
        number = self._forms.of[leaf]
        if self._forms.distinct[number].sharding is None:
            cut = None if self._item.is_whole(leaf) else slices(self._item.cell_box(leaf, cell))
            return HostSource(leaf=leaf, cut=cut)
        held = self._held_shards(number)
        shard, cut = self._place(leaf, cell, held)
        is_leaf = held.layout.devices.size == 1
        return ShardSource(leaf=leaf, shard=shard, cut=cut, on_accelerator=held.on_accelerator, is_leaf=is_leaf)

    def _held_shards(self, number: int) -> _HeldShards:
        """The shards that are here of the leaves of one form; found once."""
        if number not in self._held:
            form = self._forms.distinct[number]
            layout = self._builder.layout(form)
            devices = id(layout.devices)
            if devices not in self._places:
                self._places[devices] = {device: i for i, device in enumerate(layout.devices.flat)}
            numbers = dict[int, int]()
            for shard, device in enumerate(form.held):
                numbers.setdefault(int(layout.cells[self._places[devices][device]]), shard)
            on_accelerator = {device.platform for device in form.held} != transfers.HOST
            self._held[number] = _HeldShards(layout=layout, numbers=numbers, on_accelerator=on_accelerator)
        return self._held[number]

    def _place(self, leaf: int, cell: int, held: _HeldShards) -> tuple[int, tuple[slice, ...] | None]:
        """The number of the shard that a cell lies in, and the cell's part of that shard; None for all of it."""
        if self._item.is_whole(leaf):
            return next(iter(held.numbers.values())), None  # maybe without elements
        # The shard is a cell of the sharding's grid, and this cell all of it or, of a split leaf, a piece.
        shape = self._item.leaves[leaf].shape
        counts = held.layout.counts
        counts += (1,) * (len(shape) - len(counts))  # typed keys have the dimensions of their data, too
        shard_shape = tuple(d // c for d, c in zip(shape, counts, strict=True))
        box = self._item.cell_box(leaf, cell)
        at = [start // side for (start, _), side in zip(box, shard_shape, strict=True)]
        shard_cell = int(np.ravel_multi_index(at, counts))
        if shard_shape == self._item.cell_shape(leaf):
            return held.numbers[shard_cell], None
        return held.numbers[shard_cell], slices(box, cell_box(shard_cell, counts, shard_shape))
