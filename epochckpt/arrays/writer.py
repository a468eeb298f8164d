"""Writes one node's files for one attempt: data files in large parallel pieces straight from the snapshot.

Guarantees: what these functions return is durable. Each block is hashed, written, and, where its memory is not ours,
hashed again, so that memory which changed meanwhile fails the attempt instead of being committed.

`node.json` is not written here: it comes last, see `commit`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np

from epochckpt._threads import Pool
from epochckpt.arrays.plan import ItemPlan
from epochckpt.arrays.snapshot import Buffer
from epochckpt.errors import BufferChangedError
from epochckpt.format import DataFile, checksums, grid, paths, safetensors
from epochckpt.storage import Store, Writer


def write_arrays(
    store: Store,
    folder: str,
    epoch: int,
    plan: ItemPlan,
    buffers: Sequence[Buffer],
    block_bytes: int,
    pool: Pool,
) -> list[DataFile]:
    """Writes an item's data files into a node's staging folder, from one buffer per cell, in file order.

    Raises:
        OSError: storage refused.
        BufferChangedError: memory changed while it was being written.
    """
    item = plan.item
    files: list[_File] = []
    try:
        # One file for each part of the plan; all of them are written at the same time, block by block.
        start = 0
        for number, part in enumerate(item.cut(plan.owned, plan.part_ends)):
            leaves, end = part.leaves.tolist(), start + len(part.leaves)
            head = safetensors.header(
                [item.tensor(leaf, cell) for leaf, cell in zip(leaves, part.cells.tolist(), strict=True)]
            )
            size = len(head) + int(part.offsets[-1])
            ends = grid.blocks(np.diff(part.offsets), len(head), block_bytes)
            record = DataFile(item.name, number, size, len(head), end - start, block_bytes)
            names = [item.leaves[leaf].name for leaf in leaves]
            offsets = part.offsets + len(head)
            writer = store.open_writer(paths.join(folder, paths.data_file(item.name, number)), size)
            files.append(_File(record, writer, epoch, head, offsets, buffers[start:end], names, ends))
            start = end
        pool.run([task for file in files for task in file.tasks()])
        # A last look at memory that is not ours, before anything is made durable.
        for source, buffer in zip(plan.sources, buffers, strict=True):
            if not buffer.unchanged():
                raise BufferChangedError(epoch, item.leaves[source.leaf].name)
        pool.run([file.writer.finish for file in files])
    except BaseException:
        for file in files:
            file.writer.abort()
        raise
    return [dataclasses.replace(file.record, xxh3=tuple(file.sums)) for file in files]


def folders(names: Iterable[tuple[str, str]]) -> list[str]:
    """The folders that hold (item, path) files, below a node's folder, parents first."""
    return sorted({folder for item, name in names for folder in paths.parents(paths.join(item, name))})


def write_file(
    store: Store, folder: str, item: str, name: str, source: bytes | pathlib.Path, block_bytes: int
) -> DataFile:
    """Writes one file of an item that is not made of arrays to `folder/item/name`, whose folder exists.

    Raises:
        OSError: storage refused, or the source became shorter.
    """
    path = paths.join(folder, item, name)
    if isinstance(source, bytes):
        store.create(path, source)
        pieces = [source[i : i + block_bytes] for i in range(0, len(source), block_bytes)] or [b""]
        sums = [checksums.xxh3(p) for p in pieces]
        size = len(source)
    else:
        with source.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            sums = _stream(store, path, file, size, block_bytes)
    return DataFile(item, 0, size, 0, 0, block_bytes, tuple(f"{s:016x}" for s in sums), name)


def _exactly(file: BinaryIO, size: int, path: str) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise OSError(f"{path}: the file that its handler wrote became shorter while it was copied")
    return data


def _stream(store: Store, path: str, file: BinaryIO, size: int, block_bytes: int) -> list[int]:
    """Writes a file from another, block by block; returns the checksums."""
    if size <= block_bytes:
        data = _exactly(file, size, path)
        store.create(path, data)
        return [checksums.xxh3(data)]
    sums: list[int] = []
    writer = store.open_writer(path, size)
    try:
        for offset in range(0, size, block_bytes):
            data = _exactly(file, min(block_bytes, size - offset), path)
            writer.write(offset, data)
            sums.append(checksums.xxh3(data))
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return sums


@dataclasses.dataclass
class _File:
    """One data file being written: its header, then cells, in blocks that end at `ends`."""

    record: DataFile
    writer: Writer
    epoch: int
    head: bytes
    offsets: np.ndarray  # where each cell begins, and the end of the last one
    buffers: Sequence[Buffer]  # one per cell, with the names of their leaves
    names: Sequence[str]
    ends: np.ndarray

    def __post_init__(self) -> None:
        self.sums = [""] * len(self.ends)

    def tasks(self) -> list[Callable[[], None]]:
        tasks: list[Callable[[], None]] = [lambda: self._put(0, 0, self.head)]
        starts, ends = self.ends[:-1].tolist(), self.ends[1:].tolist()
        firsts = np.searchsorted(self.offsets, self.ends[:-1], side="right") - 1
        lasts = np.searchsorted(self.offsets, self.ends[1:], side="left")
        for i, (start, end, first, last) in enumerate(zip(starts, ends, firsts.tolist(), lasts.tolist(), strict=True)):
            tasks.append(functools.partial(self._block, i + 1, start, end, first, last))
        return tasks

    def _block(self, index: int, start: int, end: int, first: int, last: int) -> None:
        if last - first == 1:
            buffer = self.buffers[first]
            base = int(self.offsets[first])
            data = _bytes_of(buffer.array)[start - base : end - base]
            self._put(index, start, data)
            if buffer.sample is not None and f"{checksums.xxh3(data):016x}" != self.sums[index]:
                raise BufferChangedError(self.epoch, self.names[first])
            buffer.release(start - base, end - base)
        else:  # a run of small cells is joined: a call that frees the interpreter lock costs more than copying
            self._put(index, start, b"".join([b.array.tobytes() for b in self.buffers[first:last]]))
            for b in self.buffers[first:last]:
                b.release()

    def _put(self, index: int, offset: int, data: Any) -> None:
        self.sums[index] = f"{checksums.xxh3(data):016x}"
        self.writer.write(offset, data)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
