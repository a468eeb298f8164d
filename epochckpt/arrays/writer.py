"""Writes one node's files for one attempt: data files in large parallel pieces straight from the snapshot.

What these functions return is durable, except `node.json`, which comes last (see `commit`). Each block is hashed and
written, and hashed again where its memory is not ours: memory that changed meanwhile fails the attempt.
"""

import dataclasses
import functools
import io
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from epochckpt import _collector
from epochckpt._threads import Pool
from epochckpt.arrays.plan import ItemPlan
from epochckpt.arrays.snapshot import Buffer
from epochckpt.errors import BufferChangedError
from epochckpt.format import ArrayItem, DataFile, Part, checksums, grid, paths, safetensors
from epochckpt.storage import Store, Writer, writing

FileT = TypeVar("FileT", bound=DataFile)


def write_arrays(
    store: Store,
    folder: str,
    epoch: int,
    plan: ItemPlan,
    buffers: Sequence[Buffer],
    block_bytes: int,
    pool: Pool,
    kind: type[FileT] = DataFile,
) -> list[FileT]:
    """Writes an item's data files into the node's folder, from one buffer per cell, in file order."""
    item = plan.item
    files: list[_File[FileT]] = []
    start = 0
    for number, part in enumerate(item.cut(plan.owned, plan.part_ends)):  # one file for each part of the plan
        end = start + len(part.leaves)
        with _collector.paused():  # its header
            files.append(_File(folder, epoch, item, number, part, buffers[start:end], block_bytes, kind))
        start = end

    def check() -> None:
        """A last look at memory that is not ours."""
        for source, buffer in zip(plan.sources, buffers, strict=True):
            if not buffer.unchanged():
                raise BufferChangedError(epoch, item.leaves[source.leaf].name)

    if not store.renames:  # each file is a stream: one thread writes and finishes it
        pool.run([functools.partial(file.write_all, store) for file in files])
        check()
        return [file.written() for file in files]
    opened: list[Writer] = []
    try:
        # All files are written at the same time, block by block, and nothing is made durable before that check.
        blocks: list[Callable[[], None]] = []
        for file in files:
            opened.append(store.open_writer(file.path, file.record.size))
            blocks += [functools.partial(file.write, opened[-1], block) for block in range(len(file.ends))]
        pool.run(blocks)
        check()
        pool.run([writer.finish for writer in opened])
    except BaseException:
        for writer in opened:
            writer.abort()
        raise
    return [file.written() for file in files]


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
            sums.append(f"{checksums.xxh3(data):016x}")
            return data

        if size <= block_bytes:
            store.create(path, block(0))
        else:
            with writing(store, path, size) as writer:
                for offset in range(0, size, block_bytes):
                    writer.write(offset, block(offset))
    return DataFile(item, 0, size, 0, 0, block_bytes, tuple(sums), name)


class _File(Generic[FileT]):
    """One data file being written: its header, then cells, in blocks that end at `ends`."""

    def __init__(
        self,
        folder: str,
        epoch: int,
        item: ArrayItem,
        number: int,
        part: Part,
        buffers: Sequence[Buffer],
        block_bytes: int,
        kind: type[FileT],
    ):
        self.epoch, self.buffers = epoch, buffers
        cells = list(zip(part.leaves.tolist(), part.cells.tolist(), strict=True))
        self.names = [item.leaves[leaf].name for leaf, _ in cells]
        self.head = safetensors.header([item.tensor(leaf, cell) for leaf, cell in cells])
        self.offsets = part.offsets + len(self.head)  # where each cell begins, and the end of the last one
        self.ends = grid.blocks(np.diff(part.offsets), len(self.head), block_bytes)
        self.sums = [""] * len(self.ends)
        self.record = kind(item.name, number, int(self.offsets[-1]), len(self.head), len(cells), block_bytes)
        self.path = paths.join(folder, self.record.path)

    def written(self) -> FileT:
        """The record of the file, once all of its blocks are written."""
        return dataclasses.replace(self.record, xxh3=tuple(self.sums))

    def write_all(self, store: Store) -> None:
        """Opens the file, writes its blocks in order, and makes it durable."""
        with writing(store, self.path, self.record.size) as writer:
            for block in range(len(self.ends)):
                self.write(writer, block)

    def write(self, writer: Writer, block: int) -> None:
        """Writes one block: the header, a piece of a large cell, or a run of small cells."""
        if not block:
            self._put(writer, 0, 0, self.head)
            return
        start, end = self.ends[block - 1 : block + 1].tolist()
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, end, side="left"))
        if last - first == 1:
            buffer = self.buffers[first]
            base = int(self.offsets[first])
            data = buffer.array.reshape(-1).view(np.uint8).data[start - base : end - base]
            self._put(writer, block, start, data)
            if buffer.sample is not None and f"{checksums.xxh3(data):016x}" != self.sums[block]:
                raise BufferChangedError(self.epoch, self.names[first])
            buffer.release(start - base, end - base)
        else:  # a run of small cells is joined: a call that frees the interpreter lock costs more than copying
            self._put(writer, block, start, b"".join([b.array.tobytes() for b in self.buffers[first:last]]))
            for b in self.buffers[first:last]:
                b.release()

    def _put(self, writer: Writer, block: int, offset: int, data: Any) -> None:
        self.sums[block] = f"{checksums.xxh3(data):016x}"
        writer.write(offset, data)
