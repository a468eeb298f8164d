"""Index arithmetic of the format: which node writes which part of which leaf, and where that part lies in its files.

Every node and every later reader computes the same from the same records. A leaf is cut into a regular grid of equal
cells. A `Grid` row says into how many cells each dimension is cut, and which nodes hold each cell; many leaves share
one row. The owner of a cell, the one holder that writes it, is `holders[cell][(cell + rotation) mod
len(holders[cell])]`, so that replicated bytes spread over nodes.

A node's file holds its cells ordered by item size (largest first, so that each tensor is aligned), then leaf, then
cell. Beyond `part_bytes` it is continued in another part.

In a job whose hosts have local disks (`StorageOptions.local_disks`), each disk has replicas, too: cells that the host
holds and another node owns (`ArrayItem.replicas`). Their files are laid out alike.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from epochckpt import _text
from epochckpt._lazy import np
from epochckpt.format import checksums, safetensors
from epochckpt.format import tree as tree_lib
from epochckpt.format.json_kinds import is_object
from epochckpt.format.tree import ARRAY_KINDS, KeyPath

_INLINED_LEAF = 64 * 2**10  # the most bytes of one leaf, see `ArrayItem.inlined`
_INLINED_ITEM = 512 * 2**10  # and of all leaves of an item together
Box = tuple[tuple[int, int], ...]  # (start, stop) per dimension
MAX_CELLS = 2**24
MAX_ITEM_CELLS = 2**30
"""The most cells of a leaf, and of all leaves of an item: what a record of it may have."""


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple([(0, d) for d in shape])


def box_shape(box: Box) -> tuple[int, ...]:
    """Lengths of a box's sides."""
    return tuple([stop - start for start, stop in box])


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """The index of a box in its array, or in the part of that array which another box covers."""
    if origin is None:
        return tuple([slice(start, stop) for start, stop in box])
    return tuple([slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, origin, strict=True)])


def meet(box: Box, other: Box) -> Box:
    """What two boxes of one array have in common; sides without a length where they do not touch."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))


def cell_box(cell: int, counts: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of one cell of a regular grid: `counts` cells along each dimension, each of the given shape."""
    place = np.unravel_index(cell, counts) if shape else ()
    return tuple((int(i) * side, (int(i) + 1) * side) for i, side in zip(place, shape, strict=True))


def boxes(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Cuts an array into boxes, each contiguous in C order and next to the one before; without elements, none."""
    if math.prod(shape) == 0:
        return
    axis = 0  # the first axis whose rows fit
    inner = math.prod(shape)
    while inner > max_elements:
        inner //= shape[axis]
        axis += 1
    if not axis:
        yield whole(shape)
        return
    step = max_elements // inner
    for outer in np.ndindex(*shape[: axis - 1]):
        for start in range(0, shape[axis - 1], step):
            last = min(start + step, shape[axis - 1])
            yield (*((i, i + 1) for i in outer), (start, last), *whole(shape[axis:]))


@dataclasses.dataclass(frozen=True)
class Grid:
    """One row of the grid table."""

    counts: tuple[int, ...]  # cells along each dimension, without trailing ones
    holders: tuple[tuple[int, ...], ...]  # the nodes that hold each cell, ascending; cells in C order

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.counts, self.holders))

    @functools.cached_property
    def firsts(self) -> list[int]:
        """For every cell the first cell that has the same holders."""
        known: dict[int, int] = {}  # equal tuples are one object, as a rule, and may be long
        equal: dict[tuple[int, ...], int] = {}
        for cell, nodes in enumerate(self.holders):
            if id(nodes) not in known:
                known[id(nodes)] = equal.setdefault(nodes, cell)
        return [known[id(nodes)] for nodes in self.holders]

    @functools.cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A row per distinct set of holders, how many each has, and the row of each cell."""
        cells, rows = np.unique(np.array(self.firsts, np.int64), return_inverse=True)
        firsts: list[int] = cells.tolist()
        counts = [len(self.holders[cell]) for cell in firsts]
        sizes = np.array(counts, dtype=np.int64)
        table = np.full((len(cells), max(counts)), -1, dtype=np.int64)
        for i, cell in enumerate(firsts):
            table[i, : sizes[i]] = self.holders[cell]
        return table, sizes, rows

    @functools.cached_property
    def width(self) -> tuple[int, int]:
        """How many nodes hold a cell: the fewest, and the most."""
        sizes = self._table[1]
        return int(sizes.min()), int(sizes.max())

    def owners(self, rotation: int) -> np.ndarray:
        """Node number of the owner of every cell; int64 of shape (cells,)."""
        table, sizes, rows = self._table
        return table[rows, (np.arange(len(rows)) + rotation) % sizes[rows]]

    @functools.cached_property
    def _owned(self) -> dict[tuple[int, int, bool], list[int]]:
        return {}

    def owned(self, rotation: int, node: int, others: bool = False) -> list[int]:
        """The cells that `node` writes, ascending; with `others`, its replicas instead."""
        cells = self._owned.get((rotation, node, others))
        if cells is None:
            mine = self.owners(rotation) == node
            if others:
                table, _, rows = self._table
                mine = np.any(table == node, axis=1)[rows] & ~mine
            cells = self._owned[rotation, node, others] = np.flatnonzero(mine).tolist()
        return cells


class Leaf(NamedTuple):
    """One leaf of an item's tree, as recorded. For typed PRNG keys, dtype and shape are those of their data."""

    path: KeyPath
    name: str  # the path as text
    kind: str  # one of `tree.ARRAY_KINDS`, `VALUE_KINDS`, `EMPTY_KINDS`
    dtype: np.dtype[Any] | None = None  # of the stored bytes; None for leaves without bytes in a data file
    shape: tuple[int, ...] = ()  # of the stored array
    grid: int = -1  # row in the grid table; -1 without bytes
    rotation: int = 0  # shifts the owners of the row's cells
    sharding: int = -1  # row in the sharding table; -1 for none
    impl: str | None = None  # PRNG implementation of typed keys
    weak_type: bool = False  # a jax array whose dtype gives way to that of others, as a Python number does

    after_name = property(operator.itemgetter(slice(2, None)))  # a function of Python would take twice as long
    """All fields after the name, in their order: few leaves of a tree differ in these."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stored array."""
        return math.prod(self.shape) * self.dtype.itemsize if self.dtype is not None else 0

    @property
    def is_jax(self) -> bool:
        """Whether it is a JAX array. Of other leaves each process has its own value, and the primary's is saved."""
        return self.kind in ("jax", "prng")


class NodeCells(NamedTuple):
    """Cells of one item that one node has, in the order of its file; three arrays of the same length."""

    leaves: np.ndarray  # numbers of their leaves
    cells: np.ndarray  # their numbers in the grids of these leaves
    nbytes: np.ndarray


@dataclasses.dataclass(frozen=True)
class PartCells:
    """The cells in one part of a node's data file, in file order."""

    leaves: np.ndarray  # leaf number of each cell
    cells: np.ndarray  # cell numbers
    offsets: np.ndarray  # byte offset of each cell from the start of the data, and of the end


@dataclasses.dataclass(frozen=True)
class ArrayItem:
    """An item whose leaves lie in data files: its tree, its grids and its shardings."""

    name: str
    leaves: tuple[Leaf, ...]  # in JAX's flattening order
    grids: tuple[Grid, ...]
    shardings: tuple[Any, ...] = ()  # JSON rows: how leaves lay on devices, for a restore without a target
    meshes: tuple[Any, ...] = ()  # JSON rows that `shardings` refer to

    @property
    def is_bare(self) -> bool:
        """Whether the item is a single leaf, not a tree."""
        return len(self.leaves) == 1 and not self.leaves[0].path

    def to_json(self) -> dict[str, Any]:
        """Its form in `epoch.json`."""
        rows: list[Any] = []
        for leaf in self.leaves:
            row: list[Any] = [tree_lib.path_to_json(leaf.path), leaf.kind]
            if leaf.dtype is not None:
                name = tree_lib.dtype_name(leaf.dtype, f"leaf {leaf.name!r}")
                row += [name, leaf.shape, leaf.grid, leaf.rotation, leaf.sharding]
                row += [leaf.impl] if leaf.impl is not None else []
                row += [True] if leaf.weak_type else []
            rows.append(row)
        grids = [(g.counts, [_held(g, cell, first) for cell, first in enumerate(g.firsts)]) for g in self.grids]
        return {"leaves": rows, "grids": grids, "shardings": self.shardings, "meshes": self.meshes}

    @functools.cached_property
    def json_fields(self) -> dict[str, checksums.Json]:
        """The same as text: every epoch of one plan has it."""
        return {name: checksums.dumps(value) for name, value in self.to_json().items()}

    @functools.cached_property
    def by_name(self) -> dict[str, int]:
        """Leaf numbers by leaf name."""
        return {leaf.name: i for i, leaf in enumerate(self.leaves)}

    @functools.cached_property
    def public_names(self) -> list[str]:
        """The names of the leaves outside of the files."""
        return _text.public(leaf.name for leaf in self.leaves)

    @functools.cached_property
    def by_either_name(self) -> dict[str, int]:
        """Leaf numbers by public name, and by leaf name."""
        return {name: i for i, name in enumerate(self.public_names)} | self.by_name

    @functools.cached_property
    def _forms(self) -> tuple[list[int], list[int]]:
        """Of every leaf a number, which leaves share that differ in path and name only; and the first leaf of each."""
        numbers = collections.defaultdict[Any, int](itertools.count().__next__)
        of = [numbers[leaf.after_name] for leaf in self.leaves]
        return of, np.unique(of, return_index=True)[1].tolist()

    def each(self, of: Callable[[Leaf], Any], dtype: type | str = "int64") -> np.ndarray:
        """What a function gives for every leaf; it does not depend on path and name, and is called a few times."""
        numbers, firsts = self._forms
        values = [of(self.leaves[i]) for i in firsts]
        return np.array(values, dtype)[numbers]

    @functools.cached_property
    def _file_order(self) -> np.ndarray:
        """The leaves with bytes, in the order of a node's files."""
        arrays = np.flatnonzero(self.each(lambda leaf: leaf.kind in ARRAY_KINDS, bool))
        return arrays[np.argsort(-self.each(_itemsize)[arrays], kind="stable")]

    def in_file_order(self, leaves: Iterable[int]) -> list[int]:
        """Leaves, given in ascending order, as they follow each other in the files of one node."""
        return sorted(leaves, key=lambda i: -_itemsize(self.leaves[i]))

    @functools.cached_property
    def _cells(self) -> dict[Any, tuple[tuple[int, ...], tuple[int, ...], int]]:
        return {}

    def _cell(self, leaf: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """(counts, cell shape, cell bytes) of a leaf."""
        info = self.leaves[leaf]
        key = info.dtype, info.shape, info.grid
        cell = self._cells.get(key)
        if cell is None:
            counts = self.grids[info.grid].counts
            counts += (1,) * (len(info.shape) - len(counts))
            shape = tuple(d // c for d, c in zip(info.shape, counts, strict=True))
            cell = self._cells[key] = counts, shape, math.prod(shape) * _itemsize(info)
        return cell

    def counts(self, leaf: int) -> tuple[int, ...]:
        """Cells along each dimension of a leaf."""
        return self._cell(leaf)[0]

    def cell_shape(self, leaf: int) -> tuple[int, ...]:
        """Shape of each cell of a leaf."""
        return self._cell(leaf)[1]

    def cell_bytes(self, leaf: int) -> int:
        """Bytes of each cell of a leaf."""
        return self._cell(leaf)[2]

    def is_whole(self, leaf: int) -> bool:
        """Whether the leaf is one cell."""
        return len(self.grids[self.leaves[leaf].grid].holders) == 1

    def cell_box(self, leaf: int, cell: int) -> Box:
        """The part of the leaf that a cell covers."""
        if self.is_whole(leaf):
            return whole(self.leaves[leaf].shape)
        return cell_box(cell, self.counts(leaf), self.cell_shape(leaf))

    def cells_touching(self, leaf: int, box: Box) -> list[int]:
        """The cells that intersect `box`; none of an array without elements."""
        shape = self.cell_shape(leaf)
        counts = self.counts(leaf)
        if math.prod(self.leaves[leaf].shape) == 0 or any(stop <= start for start, stop in box):
            return []
        if self.is_whole(leaf):
            return [0]
        ranges = [
            range(start // s, min(c, -(-stop // s))) for (start, stop), s, c in zip(box, shape, counts, strict=True)
        ]
        grids = np.meshgrid(*[np.arange(r.start, r.stop) for r in ranges], indexing="ij")
        return np.ravel_multi_index([g.ravel() for g in grids], counts).tolist()

    def owner(self, leaf: int, cell: int) -> int:
        """Number of the node that writes this cell."""
        info = self.leaves[leaf]
        holders = self.grids[info.grid].holders[cell]
        return holders[(cell + info.rotation) % len(holders)]

    def owned(self, node: int) -> NodeCells:
        """Every cell that `node` writes, in file order."""
        return self._cells_of(self._file_order, lambda info: self.grids[info.grid].owned(info.rotation, node))

    def is_uncommitted(self, leaf: Leaf) -> bool:
        """Whether an array was placed on no device. Each process of a job has such an array for itself."""
        row = self.shardings[leaf.sharding] if leaf.sharding >= 0 else None
        return is_object(row) and row.get("committed") is False

    def is_of_each_process(self, leaf: Leaf) -> bool:
        """Whether an array was placed on no device in a job of several processes, each of which had it."""
        return self.is_uncommitted(leaf) and len(self.grids[leaf.grid].holders[0]) > 1

    @functools.cached_property
    def uncommitted(self) -> NodeCells:
        """Every cell of the arrays that were placed on no device, in file order."""

        def cells(info: Leaf) -> list[int]:
            return [*range(len(self.grids[info.grid].holders))] if self.is_uncommitted(info) and info.nbytes else []

        return self._cells_of(self._file_order, cells)

    def replicas(self, node: int) -> NodeCells:
        """Every cell that `node` holds and another node writes; not of `inlined` leaves."""

        def held(info: Leaf) -> list[int]:
            if info.nbytes == 0:
                return []
            if not info.is_jax:  # every process has it
                return [] if self.grids[info.grid].owned(info.rotation, node) else [0]
            return self.grids[info.grid].owned(info.rotation, node, others=True)

        return self._cells_of(self._file_order[~np.isin(self._file_order, [*self.inlined])], held)

    @functools.cached_property
    def inlined(self) -> frozenset[int]:
        """The small leaves whose values differ between processes.

        Where hosts have local disks, the commit record has the primary's values of them (`EpochRecord.inlined`).
        """
        inlined = set[int]()
        left = _INLINED_ITEM
        order: list[int] = self._file_order.tolist()
        for i in order:
            size = self.leaves[i].nbytes
            if not self.leaves[i].is_jax and 0 < size <= min(left, _INLINED_LEAF):
                inlined.add(i)
                left -= size
        return frozenset(inlined)

    def _cells_of(self, leaves: np.ndarray, chosen: Callable[[Leaf], list[int]]) -> NodeCells:
        """The chosen cells of each of some leaves, in this order."""
        of, firsts = self._forms
        cells = [chosen(self.leaves[i]) if self.leaves[i].grid >= 0 else [] for i in firsts]
        counts = np.array([*map(len, cells)], np.int64)
        begins = np.cumsum(counts) - counts  # where the cells of each form begin in `every`
        forms = np.array(of, np.int64)[leaves]
        each = counts[forms]
        number = np.repeat(forms, counts[forms])
        within = np.arange(len(number)) - np.repeat(np.cumsum(each) - each, each)
        sizes = np.array([self.cell_bytes(i) if cell else 0 for i, cell in zip(firsts, cells, strict=True)], np.int64)
        every = np.array([*itertools.chain.from_iterable(cells)], np.int64)
        return NodeCells(leaves=np.repeat(leaves, each), cells=every[begins[number] + within], nbytes=sizes[number])

    def cut(self, owned: NodeCells, ends: Sequence[int]) -> list[PartCells]:
        """The parts of a node's cells that end after the given numbers of cells."""
        parts = list[PartCells]()
        start = 0
        for end in ends:
            offsets = np.concatenate([[0], np.cumsum(owned.nbytes[start:end])])
            parts.append(PartCells(owned.leaves[start:end], owned.cells[start:end], offsets))
            start = end
        return parts

    def part_ends(self, owned: NodeCells, part_bytes: int | None) -> list[int]:
        """Numbers of cells after which a new part begins, because of `part_bytes` or the size of the header."""
        leaves = owned.leaves
        sizes = owned.nbytes
        if not len(leaves):
            return []
        names = np.array([len(leaf.name) for leaf in self.leaves], np.int64)
        bounds = self.each(lambda leaf: safetensors.header_bytes_bound(2 + 42 * len(leaf.shape), len(leaf.shape)))
        extras = (names + bounds)[leaves]
        if extras.sum() <= safetensors.MAX_HEADER_BYTES and (part_bytes is None or sizes.sum() <= part_bytes):
            return [len(leaves)]
        ends: list[int] = []
        data = head = 0
        for i, (extra, size) in enumerate(zip(extras.tolist(), sizes.tolist(), strict=True)):
            full = part_bytes is not None and data + size > part_bytes
            if i > (ends[-1] if ends else 0) and (full or head + extra > safetensors.MAX_HEADER_BYTES):
                ends.append(i)
                data = head = 0
            data += size
            head += extra
        return [*ends, len(leaves)]

    def tensor(self, leaf: int, cell: int) -> tuple[str, np.dtype[Any], tuple[int, ...], int]:
        """(name, dtype, shape, bytes) of the tensor that holds a cell; of a shard the name has its slice, too."""
        info = self.leaves[leaf]
        assert info.dtype is not None
        shape = self.cell_shape(leaf)
        name = info.name
        if shape != info.shape:
            name += f"[{','.join(f'{start}:{stop}' for start, stop in self.cell_box(leaf, cell))}]"
        return name, info.dtype, shape, self.cell_bytes(leaf)


def _held(grid: Grid, cell: int, first: int) -> Sequence[int] | int:
    """The nodes that hold a cell. Several nodes that already stand at an earlier cell: the number of that cell."""
    return grid.holders[cell] if first == cell or len(grid.holders[cell]) == 1 else first


def _itemsize(leaf: Leaf) -> int:
    return leaf.dtype.itemsize if leaf.dtype is not None else 0


def blocks(sizes: np.ndarray, data_start: int, block_bytes: int) -> np.ndarray:
    """End offsets of a file's blocks: the header of `data_start` bytes, then the cells, of these sizes in file order.

    A cell of `block_bytes` or more is cut into pieces; smaller cells are joined to blocks of at most that size.
    """
    ends = [data_start]
    position = start = data_start
    for size in sizes.tolist():
        if size >= block_bytes or position + size - start > block_bytes:
            if position > start:
                ends.append(position)
            start = position
        if size >= block_bytes:
            ends.extend(range(position + block_bytes, position + size, block_bytes))
            ends.append(position + size)
            start = position + size
        position += size
    if position > start:
        ends.append(position)
    return np.array(ends, dtype=np.int64)
