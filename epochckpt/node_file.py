"""One data file of a node, read block by block and verified.

A cell that fills a contiguous piece of the destination is read straight into it; everything else goes through one
buffer per thread.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from epochckpt import checksum, grid, layout, records
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeleted, FormatError, unreadable
from epochckpt.grid import ArrayItem, Part
from epochckpt.store import Reader, Store
from epochckpt.worker import Pool

Slices = tuple[slice, ...]


class Epoch(Protocol):
    """What a file needs to know of the epoch that it belongs to."""

    store: Store
    pool: Pool
    verify: bool

    def path(self, node: int, file: str) -> str:
        """Path of a node's file."""
        ...

    def node_record(self, node: int) -> records.NodeRecord:
        """A node's record."""
        ...

    def guard(self, path: str, read: Callable[[], Any]) -> Any:
        """Runs a read; tells an epoch that went away from a damaged one."""
        ...

    def check_present(self, detail: str) -> None:
        """Raises EpochDeleted if the epoch went away."""
        ...


@dataclasses.dataclass(frozen=True)
class Copy:
    """One consumer of a cell: `out[into] = cell[source]`."""

    out: np.ndarray
    into: Slices
    source: Slices


class NodeFile:
    """One data file of a node, for reading."""

    def __init__(self, node: int, path: str, item: ArrayItem, part: Part, first: int, file: records.DataFile):
        self.node, self.path, self.item, self.part = node, path, item, part
        self.first, self.cells, self.size = first, file.cells, file.size
        self.offsets = part.offsets + file.data_start
        self.data_start = file.data_start
        self.positions: dict[tuple[int, int], int] | None = None
        self._reader: Reader | None = None
        self._ends = np.zeros(0, dtype=np.int64)
        self._cut_at = 0
        self._sums: tuple[str, ...] = ()

    def open(self, epoch: Epoch) -> None:
        """Opens the file and checks its size against both records."""
        listed = [f for f in epoch.node_record(self.node).files if f.item == self.item.name]
        where = epoch.path(self.node, layout.NODE_RECORD)
        mine = next((f for f in listed if layout.data_file(f.item, f.part) == self.path.rpartition("/")[2]), None)
        if mine is None or (mine.size, mine.data_start, mine.cells) != (
            self.size,
            self.data_start,
            self.cells,
        ):
            raise FormatError(where, f"does not describe {self.path} as the epoch's record does")
        if self._cut_at != mine.block_bytes:  # leaves are also read one by one, and a file may hold thousands
            self._ends = grid.blocks(np.diff(self.part.offsets), self.data_start, mine.block_bytes)
            self._cut_at = mine.block_bytes
        if len(self._ends) != len(mine.xxh3):
            raise FormatError(where, f"has {len(mine.xxh3)} checksums for the {len(self._ends)} blocks of {self.path}")
        self._sums = mine.xxh3
        reader: Reader = epoch.guard(self.path, lambda: epoch.store.open_reader(self.path))
        self._reader = reader
        found = epoch.guard(self.path, lambda: reader.size)
        if found != self.size:
            self.close()
            epoch.check_present(f"{self.path} has another size")
            raise DamagedError(self.path, f"has {found} bytes, {self.size} were written", self._leaf_at(found))

    def close(self) -> None:
        """Closes the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def verify(self, epoch: Epoch, progress: Callable[[int], None]) -> list[EpochCheckpointError]:
        """Reads every block, tells how many bytes each had; returns one error for each that is damaged."""
        problems: list[EpochCheckpointError] = []
        try:
            self.stream(epoch, lambda start, data: progress(len(data)), problems.append)
        except EpochDeleted:
            raise
        except EpochCheckpointError as error:
            return [error]
        return problems

    def stream(
        self,
        epoch: Epoch,
        use: Callable[[int, memoryview], None],
        damaged: Callable[[EpochCheckpointError], None] | None = None,
    ) -> None:
        """Reads the whole file, block by block, in several threads and any order; memory: one block per thread.

        Args:
            epoch: what it belongs to.
            use: is given each block's offset and its bytes, verified, which are valid only during the call.
            damaged: is told of each block that cannot be used; without it the first one ends the stream.

        Raises:
            DamagedError, EpochDeleted: see `open`, and without `damaged` those of a block, too.
        """
        self.open(epoch)
        largest = int(np.diff(self._ends, prepend=0).max(initial=0))
        local = threading.local()

        def take(block: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(largest))
            start, end = self._bounds(block)
            try:
                self._read(epoch, block, local.buffer[: end - start], always=True)
            except EpochDeleted:
                raise
            except EpochCheckpointError as error:
                if damaged is None:
                    raise
                damaged(error)
                return
            use(start, local.buffer[: end - start])

        try:
            epoch.pool.run([functools.partial(take, b) for b in range(len(self._ends))])
        finally:
            self.close()

    def tasks(self, epoch: Epoch, wanted: dict[int, list[Copy]]) -> list[Callable[[], None]]:
        """Tasks that serve the wanted cells of this file."""
        self.open(epoch)
        tasks: list[Callable[[], None]] = []
        runs: dict[int, list[tuple[int, list[Copy]]]] = collections.defaultdict(list)
        cells = np.array(sorted(wanted), dtype=np.int64)
        firsts = np.searchsorted(self._ends, self.offsets[cells], side="right").tolist()
        lasts = np.searchsorted(self._ends, self.offsets[cells + 1], side="left").tolist()
        bounds = zip(self.offsets[cells].tolist(), self.offsets[cells + 1].tolist(), strict=True)
        for cell, first, last, (start, end) in zip(cells.tolist(), firsts, lasts, bounds, strict=True):
            if start == end:
                continue
            direct = self._direct(cell, wanted[cell])
            if direct is not None and self._bounds(first)[0] == start and self._bounds(last)[1] == end:
                for block in range(first, last + 1):
                    a, b = self._bounds(block)
                    tasks.append(functools.partial(self._read, epoch, block, direct[a - start : b - start]))
            elif first == last:
                runs[first].append((cell, wanted[cell]))
            else:
                tasks.append(functools.partial(self._large, epoch, cell, wanted[cell]))
        return tasks + [functools.partial(self._run, epoch, block, cells) for block, cells in runs.items()]

    def _direct(self, cell: int, copies: list[Copy]) -> memoryview | None:
        """The destination as bytes, if one whole cell goes to one contiguous place."""
        if len(copies) != 1:
            return None
        part = copies[0].out[copies[0].into] if copies[0].into else copies[0].out
        if part.nbytes != int(self.offsets[cell + 1] - self.offsets[cell]) or not part.flags.c_contiguous:
            return None
        return part.reshape(-1).view(np.uint8).data

    def _run(self, epoch: Epoch, block: int, cells: list[tuple[int, list[Copy]]]) -> None:
        """A block with whole cells in it."""
        start, end = self._bounds(block)
        buffer = np.empty(end - start, dtype=np.uint8)
        self._read(epoch, block, buffer.data)
        for cell, copies in cells:
            raw = buffer[int(self.offsets[cell]) - start : int(self.offsets[cell + 1]) - start]
            array = self._array(cell, raw, self.item.cell_shape(int(self.part.leaves[cell])))
            for copy in copies:
                copy.out[copy.into] = array[copy.source]

    def _large(self, epoch: Epoch, cell: int, copies: list[Copy]) -> None:
        """A part of a cell that spans several blocks: the blocks that it touches, of one row or rows next to another.

        Leading axes of which only one index is wanted are gone into, so that a piece of a long row costs only a piece.
        """
        shape = self.item.cell_shape(int(self.part.leaves[cell]))
        start, end = int(self.offsets[cell]), int(self.offsets[cell + 1])
        row, bounds = end - start, []
        for axis, size in enumerate(shape):
            row //= size
            low = min(c.source[axis].start for c in copies)
            high = max(c.source[axis].stop for c in copies)
            start, end = start + low * row, start + high * row
            bounds.append((low, high))
            if high - low > 1:
                break
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        begin = self._bounds(first)[0]
        buffer = np.empty(self._bounds(last)[1] - begin, dtype=np.uint8)
        for block in range(first, last + 1):
            a, b = self._bounds(block)
            self._read(epoch, block, buffer[a - begin : b - begin].data)
        sizes = [high - low for low, high in bounds]
        array = self._array(cell, buffer[start - begin : end - begin], (*sizes, *shape[len(sizes) :]))
        for copy in copies:
            cuts = zip(copy.source, bounds, strict=False)
            moved = tuple(slice(cut.start - low, cut.stop - low) for cut, (low, _) in cuts)
            copy.out[copy.into] = array[(*moved, *copy.source[len(moved) :])]

    def _array(self, cell: int, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        dtype = self.item.leaves[int(self.part.leaves[cell])].dtype
        assert dtype is not None
        if raw.ctypes.data % max(dtype.alignment, 1):
            raw = raw.copy()
        return raw.view(dtype).reshape(shape)

    def _bounds(self, block: int) -> tuple[int, int]:
        return (int(self._ends[block - 1]) if block else 0), int(self._ends[block])

    def _read(self, epoch: Epoch, block: int, into: memoryview, always: bool = False) -> None:
        start, end = self._bounds(block)
        reader = self._reader
        assert reader is not None, "tasks run while the file is open"
        try:
            reader.read_into(start, into)
        except OSError as error:
            epoch.check_present(str(error))
            raise unreadable(self.path, error) from error
        except EOFError as error:
            epoch.check_present(str(error))
            raise DamagedError(
                self.path, f"bytes {start}-{end} cannot be read: {error}", self._leaf_at(start)
            ) from error
        if not (epoch.verify or always):
            return
        found = f"{checksum.xxh3(into):016x}"
        if found != self._sums[block]:
            epoch.check_present(f"{self.path} changed")
            problem = f"bytes {start}-{end} differ from what was written (xxh3 {self._sums[block]}, found {found})"
            raise DamagedError(self.path, problem, self._leaf_at(start))

    def _leaf_at(self, offset: int) -> str | None:
        """The leaf whose bytes lie at an offset; None in the header."""
        if offset < self.data_start or not len(self.part.leaves):
            return None
        cell = min(int(np.searchsorted(self.offsets, offset, side="right")) - 1, len(self.part.leaves) - 1)
        return self.item.leaves[int(self.part.leaves[cell])].name
