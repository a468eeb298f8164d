"""What two epochs have in common, told from the checksums in their nodes' records: no array and no file is read.

A cell of a leaf lies in one or more blocks of a data file, each of which has a checksum. Where the blocks of a cell
have the same checksums and lengths in both epochs, and the cell lies at the same place in them, its bytes are the
same: whoever wrote it, and whatever else changed in the tree.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from epochckpt import checksum, grid
from epochckpt.errors import EpochCheckpointError, EpochDeleted
from epochckpt.grid import ArrayItem
from epochckpt.node_reader import EpochReader


@dataclasses.dataclass(frozen=True)
class _Cells:
    """The cells of an item that are not empty, by leaf and cell: four numbers that say what bytes each has."""

    arrays: ArrayItem
    numbers: np.ndarray  # checksum, length of its first block, its place in that, its own length: shape (cells, 4)
    ends: np.ndarray  # where the cells of each leaf end

    def of(self, leaf: int) -> np.ndarray:
        """Those of one leaf."""
        return self.numbers[self.ends[leaf - 1] if leaf else 0 : self.ends[leaf]]


def leaves(before: EpochReader, after: EpochReader, item: str) -> frozenset[str]:
    """Public names of the leaves of an item whose shape, dtype and bytes are the same in two epochs.

    Leaves that are not among them may be the same all the same.

    Raises:
        EpochDeleted: one of the epochs went away.
    """
    one, other = _cells(before, item), _cells(after, item)
    found, twins = [], {name: number for number, name in enumerate(other.arrays.public_names)}
    for number, (name, leaf) in enumerate(zip(one.arrays.public_names, one.arrays.leaves, strict=True)):
        twin = twins.get(name)
        if twin is None or leaf.dtype is None or not leaf.nbytes:
            continue
        peer = other.arrays.leaves[twin]
        if (leaf.kind, leaf.dtype, leaf.impl, leaf.shape) != (peer.kind, peer.dtype, peer.impl, peer.shape):
            continue
        if one.arrays.counts(number) != other.arrays.counts(twin):
            continue
        cells = one.of(number)
        # A node whose record cannot be read has no cells here.
        complete = len(cells) == len(one.arrays.grids[leaf.grid].holders)
        if complete and np.array_equal(cells, other.of(twin)):
            found.append(name)
    return frozenset(found)


def files(before: EpochReader, after: EpochReader, item: str) -> dict[str, bool]:
    """For each file of handlers that both epochs have with the same unit of checksums: whether it is the same.

    Raises:
        EpochDeleted: one of the epochs went away.
        DamagedError, FormatError: a node's record cannot be used.
    """
    one, other = ({f.name: f for _, f in reader.item_files(item)} for reader in (before, after))
    both = ((name, f, other[name]) for name, f in one.items() if name in other)
    return {name: (a.size, a.xxh3) == (b.size, b.xxh3) for name, a, b in both if a.block_bytes == b.block_bytes}


def _cells(reader: EpochReader, item: str) -> _Cells:
    arrays = reader.record.items[item].arrays
    assert arrays is not None, "callers choose items of arrays"
    nodes = [n for n, entry in enumerate(reader.record.nodes) if any(f.item == item for f in entry.files)]
    found: dict[int, list[np.ndarray]] = {}
    reader.pool.run([functools.partial(_look, reader, item, node, found) for node in nodes])
    parts = [part for node in nodes for part in found[node]]
    rows = np.concatenate([np.zeros((0, 6), np.uint64), *parts])
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    ends = np.searchsorted(rows[:, 0], np.arange(1, len(arrays.leaves) + 1, dtype=np.uint64))
    return _Cells(arrays, rows[:, 2:], ends)


def _look(reader: EpochReader, item: str, node: int, found: dict[int, list[np.ndarray]]) -> None:
    """Notes the cells that a node wrote; none if its record cannot be used, which who reads its arrays will tell."""
    found[node] = []
    try:
        listed = {f.part: f for f in reader.node_record(node).files if f.item == item and not f.name}
        for part, file in enumerate(reader.files(item, node)):
            sizes = np.diff(file.offsets)
            ends = grid.blocks(sizes, file.data_start, listed[part].block_bytes)
            sums = np.array([int(s, 16) for s in listed[part].xxh3], np.uint64)
            if len(sums) == len(ends):
                rows = _rows(file.part.leaves, file.part.cells, file.offsets, ends, sums)
                found[node].append(rows)
    except EpochDeleted:
        raise
    except (EpochCheckpointError, KeyError, ValueError):
        found[node] = []


def _rows(leaf: np.ndarray, cell: np.ndarray, offsets: np.ndarray, ends: np.ndarray, sums: np.ndarray) -> np.ndarray:
    full = np.flatnonzero(np.diff(offsets))
    starts, stops = offsets[full], offsets[full + 1]
    first, last = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, stops, side="left")
    lengths = np.diff(ends, prepend=0).astype(np.uint64)
    keys = sums[first]
    for i in np.flatnonzero(last > first).tolist():
        blocks = slice(first[i], last[i] + 1)
        keys[i] = checksum.xxh3(sums[blocks].tobytes() + lengths[blocks].tobytes())
    places = starts - (ends - lengths.astype(np.int64))[first]
    columns = (leaf[full], cell[full], keys, lengths[first], places, stops - starts)
    return np.stack([c.astype(np.uint64) for c in columns], axis=1)
