"""Reads parts of leaves out of nodes' data files, verified block by block.

Which bytes are needed, and where they lie, follows from `epoch.json` alone; the owners' `node.json` gives the
checksums. Ranges are read as the blocks they touch, so nothing unverified reaches the caller. A cell that fills a
contiguous piece of the destination is read straight into it; everything else goes through one buffer per thread.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from epochckpt import checksum, grid, layout, records
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeleted, FormatError
from epochckpt.grid import ArrayItem, Box, Part
from epochckpt.records import EpochRecord, NodeRecord
from epochckpt.store import Reader, Store
from epochckpt.worker import Pool

Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """A part of a leaf and where to put it.

    Attributes:
        item: the item.
        leaf: leaf number.
        box: the part wanted.
        out: C-contiguous array of the box's shape and the stored dtype.
    """

    item: str
    leaf: int
    box: Box
    out: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Copy:
    """One consumer of a cell: `out[into] = cell[source]`."""

    out: np.ndarray
    into: Slices
    source: Slices


class EpochReader:
    """Reads one committed epoch.

    Args:
        store: the directory.
        folder: the epoch's folder in it.
        record: its parsed `epoch.json`.
        pool: who reads.
        verify: compare checksums.
    """

    def __init__(self, store: Store, folder: str, record: EpochRecord, pool: Pool, verify: bool = True):
        self.store, self.folder, self.record, self.pool, self.verify = store, folder, record, pool, verify
        self._lock = threading.Lock()
        self._nodes: dict[int, NodeRecord] = {}
        self._parts: dict[tuple[str, int], list[_File]] = {}

    def read(self, requests: Sequence[Request]) -> None:
        """Fills every request's `out`.

        Raises:
            DamagedError: a file is missing, short, or its bytes differ from what was written.
            EpochDeleted: the epoch went away meanwhile.
        """
        wanted: dict[tuple[str, int], dict[int, list[_Copy]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for request in requests:
            for owner, position, copy in self._cells(request):
                wanted[request.item, owner][position].append(copy)
        self.pool.run(
            [functools.partial(self.node_record, owner) for owner in sorted({owner for _, owner in wanted})]
        )
        tasks: list[Callable[[], None]] = []
        opened: list[_File] = []
        try:
            for (item, owner), cells in wanted.items():
                for file in self.files(item, owner):
                    mine = {
                        p - file.first: c
                        for p, c in cells.items()
                        if file.first <= p < file.first + file.cells
                    }
                    if mine:
                        opened.append(file)
                        tasks += file.tasks(self, mine)
            self.pool.run(tasks)
        finally:
            for file in opened:
                file.close()

    def read_file(self, item: str, name: str) -> bytes:
        """The content of an item's file that is not made of arrays, verified; written by the primary."""
        node = 0
        recorded = [f for f in self.node_record(node).files if f.item == item]
        path = self.path(node, layout.join(item, name))
        if len(recorded) != 1:
            raise FormatError(path, "is not listed in its node's record")
        if recorded[0].size > records.MAX_RECORD_BYTES:
            raise FormatError(
                path, f"is recorded with {recorded[0].size} bytes, more than {records.MAX_RECORD_BYTES}"
            )
        data = self.guard(path, lambda: self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES))
        file = recorded[0]
        pieces = [data[i : i + file.block_bytes] for i in range(0, len(data), file.block_bytes)] or [b""]
        if len(data) != file.size or tuple(f"{checksum.xxh3(p):016x}" for p in pieces) != file.xxh3:
            raise DamagedError(
                path, f"its {len(data)} bytes differ from the {file.size} bytes that were written"
            )
        return data

    def path(self, node: int, file: str) -> str:
        """Path of a node's file, relative to the directory."""
        return layout.join(self.folder, self.record.node_folder(node), file)

    def node_record(self, node: int) -> NodeRecord:
        """A node's `node.json`, verified against `epoch.json`."""
        with self._lock:
            if node in self._nodes:
                return self._nodes[node]
        entry = self.record.nodes[node]
        path = self.path(node, layout.NODE_RECORD)
        data = self.guard(path, lambda: self.store.read(path, limit_bytes=entry.record_size))
        if len(data) != entry.record_size or checksum.digest(data) != entry.record_digest:
            raise DamagedError(
                path, f"its {len(data)} bytes are not the record that the epoch was committed with"
            )
        record = records.parse_node(path, data)
        if (record.node, record.attempt, record.plan) != (entry.name, self.record.attempt, self.record.plan):
            raise FormatError(
                path, f"belongs to node {record.node!r}, attempt {record.attempt!r}, another save"
            )
        with self._lock:
            self._nodes[node] = record
        return record

    def files(self, item: str, node: int) -> list[_File]:
        """The data files that a node wrote for an item."""
        with self._lock:
            if (item, node) in self._parts:
                return self._parts[item, node]
        arrays = self._arrays(item)
        entry = self.record.nodes[node]
        listed = [f for f in entry.files if f.item == item]
        where = layout.join(self.folder, layout.EPOCH_RECORD)
        owned = arrays.owned(node)
        ends = np.cumsum([f.cells for f in listed], dtype=np.int64).tolist()
        if [f.part for f in listed] != list(range(len(listed))) or (ends[-1] if ends else 0) != len(owned[0]):
            raise FormatError(
                where,
                f"node {entry.name!r}, item {item!r}: its files do not hold the {len(owned[0])} cells it owns",
            )
        found, first = [], 0
        for file, part in zip(listed, arrays.cut(owned, ends), strict=True):
            path = self.path(node, layout.data_file(item, file.part))
            if file.data_start + int(part.offsets[-1]) != file.size:
                raise FormatError(
                    where,
                    f"{path} is recorded with {file.size} bytes, its shards need {int(part.offsets[-1])}",
                )
            found.append(_File(node, path, arrays, part, first, file))
            first += file.cells
        with self._lock:
            self._parts[item, node] = found
        return found

    def guard(self, path: str, read: Callable[[], Any]) -> Any:
        """Runs a read; tells an epoch that went away from a damaged one."""
        try:
            return read()
        except EpochCheckpointError:
            raise
        except (FileNotFoundError, EOFError, ValueError) as error:
            self.check_present(str(error))
            problem = "is missing" if isinstance(error, FileNotFoundError) else str(error)
            raise DamagedError(path, problem) from error

    def check_present(self, detail: str) -> None:
        """Raises EpochDeleted unless the commit record is still the one this reader began with."""
        path = layout.join(self.folder, layout.EPOCH_RECORD)
        try:
            now = records.parse_epoch(path, self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES))
        except FileNotFoundError:
            raise EpochDeleted(self.record.epoch, self.store.root, detail) from None
        except (EpochCheckpointError, ValueError):
            return
        if now.attempt != self.record.attempt:
            raise EpochDeleted(self.record.epoch, self.store.root, "another attempt is committed there now")

    def verify_all(self) -> Iterator[EpochCheckpointError]:
        """Reads every byte of the epoch and yields what is wrong, file by file."""
        for node in range(len(self.record.nodes)):
            try:
                record = self.node_record(node)
            except EpochDeleted:
                raise
            except EpochCheckpointError as error:
                yield error
                continue
            for name, item in self.record.items.items():
                try:
                    if item.arrays is not None:
                        for file in self.files(name, node):
                            yield from file.verify(self)
                    elif any(f.item == name for f in record.files):
                        self.read_file(name, layout.JSON_FILE)
                except EpochDeleted:
                    raise
                except EpochCheckpointError as error:
                    yield error

    def _arrays(self, item: str) -> ArrayItem:
        arrays = self.record.items[item].arrays
        assert arrays is not None, "callers choose array items"
        return arrays

    def _cells(self, request: Request) -> Iterator[tuple[int, int, _Copy]]:
        """(owner, position among the owner's cells, copy) for every cell that a request needs."""
        arrays = self._arrays(request.item)
        for cell in arrays.cells_touching(request.leaf, request.box):
            box = arrays.cell_box(request.leaf, cell)
            meet = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(request.box, box, strict=True)]
            into = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(meet, request.box, strict=True))
            source = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(meet, box, strict=True))
            owner = arrays.owner(request.leaf, cell)
            yield (
                owner,
                self._positions(request.item, owner)[request.leaf, cell],
                _Copy(request.out, into, source),
            )

    def _positions(self, item: str, node: int) -> dict[tuple[int, int], int]:
        files = self.files(item, node)
        if not files:
            raise FormatError(
                layout.join(self.folder, layout.EPOCH_RECORD),
                f"lists no file of node {self.record.nodes[node].name!r}",
            )
        if files[0].positions is None:
            positions: dict[tuple[int, int], int] = {}
            for file in files:
                pairs = zip(file.part.leaves.tolist(), file.part.cells.tolist(), strict=True)
                positions.update({pair: file.first + i for i, pair in enumerate(pairs)})
            files[0].positions = positions
        return files[0].positions


class _File:
    """One data file of a node, for reading."""

    def __init__(self, node: int, path: str, item: ArrayItem, part: Part, first: int, file: records.DataFile):
        self.node, self.path, self.item, self.part = node, path, item, part
        self.first, self.cells, self.size = first, file.cells, file.size
        self.offsets = part.offsets + file.data_start
        self.data_start = file.data_start
        self.positions: dict[tuple[int, int], int] | None = None
        self._reader: Reader | None = None
        self._ends = np.zeros(0, dtype=np.int64)
        self._sums: tuple[str, ...] = ()

    def open(self, epoch: EpochReader) -> None:
        """Opens the file and checks its size against both records."""
        listed = [f for f in epoch.node_record(self.node).files if f.item == self.item.name]
        where = epoch.path(self.node, layout.NODE_RECORD)
        mine = next(
            (f for f in listed if layout.data_file(f.item, f.part) == self.path.rpartition("/")[2]), None
        )
        if mine is None or (mine.size, mine.data_start, mine.cells) != (
            self.size,
            self.data_start,
            self.cells,
        ):
            raise FormatError(where, f"does not describe {self.path} as the epoch's record does")
        self._ends = grid.blocks(np.diff(self.part.offsets), self.data_start, mine.block_bytes)
        if len(self._ends) != len(mine.xxh3):
            raise FormatError(
                where, f"has {len(mine.xxh3)} checksums for the {len(self._ends)} blocks of {self.path}"
            )
        self._sums = mine.xxh3
        self._reader = epoch.guard(self.path, lambda: epoch.store.open_reader(self.path))
        if self._reader.size != self.size:
            found = self._reader.size
            self.close()
            epoch.check_present(f"{self.path} has another size")
            raise DamagedError(
                self.path, f"has {found} bytes, {self.size} were written", self._leaf_at(found)
            )

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def verify(self, epoch: EpochReader) -> list[EpochCheckpointError]:
        """Reads every block; returns one error for each that is damaged."""
        problems: list[EpochCheckpointError] = []
        try:
            self.open(epoch)
        except EpochDeleted:
            raise
        except EpochCheckpointError as error:
            return [error]
        largest = int(np.diff(self._ends, prepend=0).max(initial=0))
        local = threading.local()

        def check(block: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(largest))
            start, end = self._bounds(block)
            try:
                self._read(epoch, block, local.buffer[: end - start], always=True)
            except EpochDeleted:
                raise
            except EpochCheckpointError as error:
                problems.append(error)

        try:
            epoch.pool.run([functools.partial(check, b) for b in range(len(self._ends))])
        finally:
            self.close()
        return problems

    def tasks(self, epoch: EpochReader, wanted: dict[int, list[_Copy]]) -> list[Callable[[], None]]:
        """Tasks that serve the wanted cells of this file."""
        self.open(epoch)
        tasks: list[Callable[[], None]] = []
        runs: dict[int, list[tuple[int, list[_Copy]]]] = collections.defaultdict(list)
        for cell in sorted(wanted):
            start, end = int(self.offsets[cell]), int(self.offsets[cell + 1])
            if start == end:
                continue
            first = int(np.searchsorted(self._ends, start, side="right"))
            last = int(np.searchsorted(self._ends, end, side="left"))
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

    def _direct(self, cell: int, copies: list[_Copy]) -> memoryview | None:
        """The destination as bytes, if one whole cell goes to one contiguous place."""
        if len(copies) != 1:
            return None
        part = copies[0].out[copies[0].into] if copies[0].into else copies[0].out
        if part.nbytes != int(self.offsets[cell + 1] - self.offsets[cell]) or not part.flags.c_contiguous:
            return None
        return memoryview(part.reshape(-1).view(np.uint8))

    def _run(self, epoch: EpochReader, block: int, cells: list[tuple[int, list[_Copy]]]) -> None:
        """A block with whole cells in it."""
        start, end = self._bounds(block)
        buffer = np.empty(end - start, dtype=np.uint8)
        self._read(epoch, block, memoryview(buffer))
        for cell, copies in cells:
            raw = buffer[int(self.offsets[cell]) - start : int(self.offsets[cell + 1]) - start]
            array = self._array(cell, raw, self.item.cell_shape(int(self.part.leaves[cell])))
            for copy in copies:
                copy.out[copy.into] = array[copy.source]

    def _large(self, epoch: EpochReader, cell: int, copies: list[_Copy]) -> None:
        """Rows of a cell that spans several blocks: the blocks that they touch."""
        leaf = int(self.part.leaves[cell])
        shape = self.item.cell_shape(leaf)
        axis = next(i for i, d in enumerate(shape) if d > 1)
        low = min(c.source[axis].start for c in copies)
        high = max(c.source[axis].stop for c in copies)
        start, end = int(self.offsets[cell]), int(self.offsets[cell + 1])
        row = (end - start) // shape[axis]
        first = int(np.searchsorted(self._ends, start + low * row, side="right"))
        last = int(np.searchsorted(self._ends, start + high * row, side="left"))
        begin = self._bounds(first)[0]
        buffer = np.empty(self._bounds(last)[1] - begin, dtype=np.uint8)
        for block in range(first, last + 1):
            a, b = self._bounds(block)
            self._read(epoch, block, memoryview(buffer[a - begin : b - begin]))
        raw = buffer[start + low * row - begin : start + high * row - begin]
        array = self._array(cell, raw, (*shape[:axis], high - low, *shape[axis + 1 :]))
        for copy in copies:
            cut = copy.source[axis]
            moved = (*copy.source[:axis], slice(cut.start - low, cut.stop - low), *copy.source[axis + 1 :])
            copy.out[copy.into] = array[moved]

    def _array(self, cell: int, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        dtype = self.item.leaves[int(self.part.leaves[cell])].dtype
        assert dtype is not None
        if raw.ctypes.data % max(dtype.alignment, 1):
            raw = raw.copy()
        return raw.view(dtype).reshape(shape)

    def _bounds(self, block: int) -> tuple[int, int]:
        return (int(self._ends[block - 1]) if block else 0), int(self._ends[block])

    def _read(self, epoch: EpochReader, block: int, into: memoryview, always: bool = False) -> None:
        start, end = self._bounds(block)
        reader = self._reader
        assert reader is not None, "tasks run while the file is open"
        try:
            reader.read_into(start, into)
        except (EOFError, OSError) as error:
            epoch.check_present(str(error))
            raise DamagedError(
                self.path, f"bytes {start}-{end} cannot be read: {error}", self._leaf_at(start)
            ) from error
        if not (epoch.verify or always):
            return
        found = f"{checksum.xxh3(into):016x}"
        if found != self._sums[block]:
            epoch.check_present(f"{self.path} changed")
            problem = (
                f"bytes {start}-{end} differ from what was written (xxh3 {self._sums[block]}, found {found})"
            )
            raise DamagedError(self.path, problem, self._leaf_at(start))

    def _leaf_at(self, offset: int) -> str | None:
        """The leaf whose bytes lie at an offset; None in the header."""
        if offset < self.data_start or not len(self.part.leaves):
            return None
        cell = min(int(np.searchsorted(self.offsets, offset, side="right")) - 1, len(self.part.leaves) - 1)
        return self.item.leaves[int(self.part.leaves[cell])].name


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, d) for d in shape)


def element_count(box: Box) -> int:
    """Elements in a box."""
    return math.prod(b - a for a, b in box)
