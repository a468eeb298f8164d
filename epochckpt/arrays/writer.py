"""Writes one node's files for one attempt: data files in large parallel pieces of the snapshot.

The files are durable when these functions return. `node.json` comes after them (see `saving`). For a file system a
piece is copied to aligned memory, hashed there, and written from there (see `storage.posix`). So the hashed bytes are
the written bytes, also where training changes the memory that they come from. To a bucket a block is sent from the
snapshot without a copy; if its memory is not ours, it is hashed again after it was sent. The attempt fails if that
memory has changed.
"""

import collections
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from epochckpt import _collector
from epochckpt._threads import Pool
from epochckpt.arrays import transfers
from epochckpt.arrays.older_files import OlderFiles
from epochckpt.arrays.plan import ItemPlan
from epochckpt.arrays.snapshot import Buffer
from epochckpt.arrays.transfers import Arriving
from epochckpt.errors import BufferChangedError
from epochckpt.format import DataFile, checksums, paths
from epochckpt.storage import ALIGNMENT, Store, Writer, mmap, writing

_JOIN_BYTES = 64 * 2**10
_HELD_BYTES = 2 * 2**20  # so much is copied in 0.2 ms, and the interpreter lock stays held, see `checksums.xxh3`
_OPEN_FILES = 32  # at the same time, of an item: each takes two descriptors, and a process may have few

FileT = TypeVar("FileT", bound=DataFile)


def write_arrays(
    store: Store,
    folder: str,
    *,
    epoch: int,
    plan: ItemPlan,
    buffers: Sequence[Buffer | Arriving],
    block_bytes: int,
    pool: Pool,
    kind: type[FileT],
    older: OlderFiles | None,
) -> list[FileT]:
    """Writes an item's data files into the node's folder, from one buffer per cell range of the plan.

    They are of a `kind`: the node's own files, or replicas of another node's.
    The files of the same names among the `older` ones leave the page cache, piece by piece, as these are written.
    """
    with _collector.paused():  # their headers
        parts = plan.files(block_bytes)
    files = [
        _FileWriter(
            folder=folder,
            epoch=epoch,
            plan=plan,
            number=number,
            buffers=buffers,
            block_bytes=block_bytes,
            kind=kind,
        )
        for number, _ in enumerate(parts)
    ]

    if store.sequential_writes:  # one thread writes and finishes each file
        pool.run([functools.partial(file.write_all, store) for file in files])
        check_unchanged(epoch, plan, buffers)
        return [file.written() for file in files]
    memory = _Memory(files)
    for first in range(0, len(files), _OPEN_FILES):
        opened: list[Writer] = []
        batch = files[first : first + _OPEN_FILES]
        try:
            # Files are written at the same time, piece by piece. The last ones are made durable after that check.
            pieces: list[Callable[[], None]] = []
            for file in batch:
                opened.append(store.open_writer(file.path, file.record.size))
                pieces += [functools.partial(file.write_next, opened[-1], memory, older)] * len(file.pieces)
            pool.run(pieces)
            if batch[-1] is files[-1]:
                check_unchanged(epoch, plan, buffers)
            pool.run([writer.finish for writer in opened])
        except BaseException:
            for writer in opened:
                writer.abort()
            raise
    return [file.written() for file in files]


def check_unchanged(epoch: int, plan: ItemPlan, buffers: Sequence[Buffer | Arriving]) -> None:
    """A last look at memory that is not ours; raises BufferChangedError if it has changed since the snapshot."""
    for cells, buffer in zip(plan.cell_ranges, buffers, strict=True):
        if not buffer.unchanged():
            raise BufferChangedError(epoch, plan.name(cells))


def folders(names: Iterable[tuple[str, str]]) -> list[str]:
    """The folders that hold (item, path) files, below a node's folder, parents first."""
    return sorted({folder for item, name in names for folder in paths.parents(paths.join(item, name))})


def write_file(
    store: Store, folder: str, item: str, name: str, source: bytes | pathlib.Path, block_bytes: int
) -> DataFile:
    """Writes one file of an item that is not made of arrays to `folder/item/name`, whose folder exists."""
    path = paths.join(folder, item, name)
    sums: list[str] = []
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)

        def block(offset: int) -> bytes:
            length = min(block_bytes, size - offset)
            data = file.read(length)
            if len(data) != length:
                raise OSError(f"{path}: the file that its handler wrote became shorter while it was copied")
            sums.append(checksums.WRITTEN.of(data))
            return data

        if size <= block_bytes:
            store.create(path, block(0))
        else:
            with writing(store, path, size) as writer:
                for offset in range(0, size, block_bytes):
                    writer.write(offset, block(offset))
    record = DataFile(item=item, part=0, size=size, block_bytes=block_bytes, name=name)
    return dataclasses.replace(record, sums=checksums.BlockSums(checksums.WRITTEN, tuple(sums)))


class _FileWriter(Generic[FileT]):
    """One data file being written: its header, then the buffers of cell ranges, in blocks."""

    def __init__(
        self,
        folder: str,
        epoch: int,
        plan: ItemPlan,
        number: int,
        buffers: Sequence[Buffer | Arriving],
        block_bytes: int,
        kind: type[FileT],
    ):
        file = plan.files(block_bytes)[number]
        self.head = file.head
        self.offsets = file.offsets
        self.block_ends = file.block_ends
        self.epoch = epoch
        self.plan = plan
        self.ranges = plan.cell_ranges[file.ranges]
        self.buffers = buffers[file.ranges]
        self.sums = [""] * len(self.block_ends)
        self.pieces = _pieces(self.block_ends.tolist())
        self.largest = max(end - start for start, end in itertools.starmap(self._bounds, self.pieces))
        self._lock = threading.Lock()
        self._filled = 0
        self._rest = b""
        self.record = kind(
            item=plan.item.name,
            part=number,
            size=int(self.offsets[-1]),
            data_start=len(self.head),
            cells=file.cells,
            block_bytes=block_bytes,
        )
        self.path = paths.join(folder, self.record.path)

    def written(self) -> FileT:
        """The record of the file, once all of its blocks are written."""
        sums = checksums.BlockSums(checksums.WRITTEN, tuple(self.sums))
        return dataclasses.replace(self.record, sums=sums)

    def write_all(self, store: Store) -> None:
        """Opens the file, writes its blocks in order, and makes it durable."""
        with writing(store, self.path, self.record.size) as writer:
            for block in range(len(self.block_ends)):
                start, end = self._bounds(block, block + 1)
                parts = list(self._parts(start, end))
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                self.sums[block] = checksums.WRITTEN.of(data)
                writer.write(start, data)
                first, last = self._ranges(start, end)
                sampled = last - first == 1 and self.buffers[first].sample is not None
                if sampled and checksums.WRITTEN.of(data) != self.sums[block]:
                    raise BufferChangedError(self.epoch, self.plan.name(self.ranges[first]))
                self._release(start, end)

    def write_next(self, writer: Writer, memory: "_Memory", older: OlderFiles | None = None) -> None:
        """Writes the next piece. Its bytes past the last whole page are left to the piece after it.

        The same piece of the `older` file leaves the page cache before.
        """
        buffer = memory.take()
        with self._lock:  # pieces are filled in order; they are hashed and written at the same time
            first, last = self.pieces[self._filled]
            self._filled += 1
            start, end = self._bounds(first, last)
            begin = start - len(self._rest)
            at = 0
            for part in filter(None, (self._rest, *self._parts(start, end))):
                _copy(part, buffer[at : at + len(part)])
                at += len(part)
            assert at == end - begin, f"{self.path}: {at} bytes for a piece of {end - begin}"
            self._release(start, end)
            stop = end if self._filled == len(self.pieces) else end // ALIGNMENT * ALIGNMENT
            self._rest = bytes(buffer[stop - begin : end - begin])
        for block in range(first, last):
            start, end = self._bounds(block, block + 1)
            self.sums[block] = checksums.WRITTEN.of(buffer[start - begin : end - begin].data)
        if older is not None:
            older.evict(self.record.path, begin, stop - begin)
        writer.write(begin, buffer[: stop - begin].data)
        memory.give(buffer)

    def _bounds(self, first: int, last: int) -> tuple[int, int]:
        """Where some blocks begin and end in the file."""
        return (int(self.block_ends[first - 1]) if first else 0), int(self.block_ends[last - 1])

    def _ranges(self, start: int, end: int) -> tuple[int, int]:
        """The first of the cell ranges with bytes between two offsets in the file, and the last one + 1."""
        first, last = np.searchsorted(self.offsets, (start, end - 1), side="right").tolist()
        return max(first - 1, 0), last

    def _parts(self, start: int, end: int) -> Iterator[bytes | memoryview]:
        """The bytes between two offsets in the file, in turn."""
        if not start:
            yield self.head
        small: list[bytes] = []  # joined: a call that frees the interpreter lock costs more than copying
        for buffer, a, b in self._cuts(start, end):
            if buffer.nbytes <= _JOIN_BYTES:
                small.append(buffer.array.tobytes()[a:b])
                continue
            if small:
                yield b"".join(small)
                small = []
            yield buffer.data(a, b)
        if small:
            yield b"".join(small)

    def _cuts(self, start: int, end: int) -> Iterator[tuple[Buffer | Arriving, int, int]]:
        """The buffers that have bytes between two offsets in the file, and which."""
        first, last = self._ranges(start, end)
        for buffer, base in zip(self.buffers[first:last], self.offsets[first:last].tolist(), strict=True):
            yield buffer, max(start - base, 0), min(end - base, buffer.nbytes)

    def _release(self, start: int, end: int) -> None:
        for buffer, a, b in self._cuts(start, end):
            buffer.release(a, b)


def _copy(source: bytes | memoryview, target: np.ndarray) -> None:
    """Copies bytes. Only many of them are worth that the interpreter lock is released."""
    if len(source) <= _HELD_BYTES:
        target.data[:] = source
    else:
        np.copyto(target, np.frombuffer(source, np.uint8))


class _Memory:
    """Aligned memory for the pieces of some files, as much as threads use at the same time."""

    def __init__(self, files: Iterable[_FileWriter[Any]]):
        self._nbytes = max((file.largest for file in files), default=0) + ALIGNMENT
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self) -> np.ndarray:
        try:
            return self._free.pop()
        except IndexError:
            return mmap.fresh(self._nbytes)

    def give(self, buffer: np.ndarray) -> None:
        self._free.append(buffer)


def _pieces(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Groups blocks that are written together: (first, last + 1) of each."""
    pieces = list[tuple[int, int]]()
    first = 0
    start = 0
    for block, end in enumerate(ends):
        if end - start > transfers.WRITE_BYTES and block > first:
            pieces.append((first, block))
            first = block
            start = ends[block - 1]
    return [*pieces, (first, len(ends))]
