"""Reads parts of leaves out of nodes' data files, verified block by block.

Which bytes are needed, and where they lie, follows from `epoch.json` alone; the owners' `node.json` gives the
checksums. Ranges are read as the blocks they touch, so nothing unverified reaches the caller.
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

from epochckpt import checksum, layout, parsing, records
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeleted, FormatError, unreadable
from epochckpt.grid import ArrayItem, Box
from epochckpt.node_file import Copy, NodeFile
from epochckpt.records import DataFile, EpochRecord, NodeRecord
from epochckpt.store import Store
from epochckpt.worker import Pool

_CHECK_FROM = 2**20  # smaller leaves are read without a look at their files first


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
        self._parts: dict[tuple[str, int], list[NodeFile]] = {}
        self._checked: set[tuple[str, int]] = set()

    def read(self, requests: Sequence[Request]) -> None:
        """Fills every request's `out`.

        Raises:
            DamagedError: a file is missing, short, or its bytes differ from what was written.
            EpochDeleted: the epoch went away meanwhile.
        """
        wanted: dict[tuple[str, int], dict[int, list[Copy]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for request in requests:
            for owner, position, copy in self._cells(request):
                wanted[request.item, owner][position].append(copy)
        self.pool.run([functools.partial(self.node_record, owner) for owner in sorted({owner for _, owner in wanted})])
        tasks: list[Callable[[], None]] = []
        opened: list[NodeFile] = []
        try:
            for (item, owner), cells in wanted.items():
                for file in self.files(item, owner):
                    mine = {p - file.first: c for p, c in cells.items() if file.first <= p < file.first + file.cells}
                    if mine:
                        opened.append(file)
                        tasks += file.tasks(self, mine)
            self.pool.run(tasks)
        finally:
            for file in opened:
                file.close()

    def item_files(self, item: str) -> list[tuple[int, DataFile]]:
        """(node, file) of everything that handlers wrote for an item, on all nodes."""
        nodes = [n for n, entry in enumerate(self.record.nodes) if any(f.item == item for f in entry.files)]
        self.pool.run([functools.partial(self.node_record, node) for node in nodes])
        return [(node, f) for node in nodes for f in self.node_record(node).files if f.item == item and f.name]

    def read_file(self, item: str, name: str) -> bytes:
        """The content of a small file that a handler wrote, verified.

        Raises:
            FormatError: there is none, or it is too large for that.
            DamagedError: its bytes differ from what was written.
        """
        found = [(node, f) for node, f in self.item_files(item) if f.name == name]
        if len(found) != 1:
            raise FormatError(f"{self.folder}/{item}/{name}", "is not listed in its node's record")
        node, file = found[0]
        if file.size > records.MAX_RECORD_BYTES:
            problem = f"is recorded with {file.size} bytes, more than {records.MAX_RECORD_BYTES}"
            raise FormatError(self.path(node, file.path), problem)
        return b"".join(self.blocks(node, file))

    def blocks(self, node: int, file: DataFile) -> Iterator[bytes]:
        """The content of a file that a handler wrote, verified block by block."""
        path = self.path(node, file.path)
        starts = range(0, max(file.size, 1), file.block_bytes)
        if len(starts) != len(file.xxh3):
            raise FormatError(path, f"is recorded with {len(file.xxh3)} checksums for {len(starts)} blocks")
        with self.guard(path, functools.partial(self.store.open_reader, path)) as reader:
            size = self.guard(path, lambda: reader.size)
            if size != file.size:
                self.check_present(f"{path} changed")
                raise DamagedError(path, f"its {size} bytes differ from the {file.size} bytes that were written")
            for start, expected in zip(starts, file.xxh3, strict=True):
                data = bytearray(min(file.block_bytes, file.size - start))
                if data:
                    self.guard(path, functools.partial(reader.read_into, start, memoryview(data)))
                if self.verify and f"{checksum.xxh3(data):016x}" != expected:
                    self.check_present(f"{path} changed")
                    raise DamagedError(path, f"bytes [{start}, {start + len(data)}) differ from what was written")
                yield bytes(data)

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """Looks at the sizes of the files that hold a part of a leaf, before memory is taken for it.

        Raises:
            FormatError, DamagedError: they cannot hold what the record says.
        """
        arrays = self._arrays(item)
        if arrays.leaves[leaf].nbytes < _CHECK_FROM:
            return
        for owner in sorted({arrays.owner(leaf, cell) for cell in arrays.cells_touching(leaf, box)}):
            if (item, owner) in self._checked:
                continue
            for file in self.files(item, owner):
                size = self.guard(file.path, functools.partial(self.store.size, file.path))
                if size != file.size:
                    self.check_present(f"{file.path} changed")
                    raise DamagedError(file.path, f"has {size} bytes, {file.size} were written")
            self._checked.add((item, owner))

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
            self.check_present(f"{path} changed")
            raise DamagedError(path, f"its {len(data)} bytes are not the record that the epoch was committed with")
        record = parsing.parse_node(path, data)
        if (record.node, record.attempt, record.plan) != (entry.name, self.record.attempt, self.record.plan):
            raise FormatError(path, f"belongs to node {record.node!r}, attempt {record.attempt!r}, another save")
        with self._lock:
            self._nodes[node] = record
        return record

    def has(self, node: int, item: str) -> bool:
        """Whether a node saved something of its own for an item."""
        return item in self.node_record(node).items

    def of_node(self, node: int, item: str) -> EpochReader:
        """A reader of what one node saved of its own, as if it were an epoch by itself."""
        own = self.node_record(node).items.get(item)
        entry = self.record.nodes[node]
        if own is None:
            raise FormatError(self.path(node, layout.NODE_RECORD), f"has no tree of item {item!r}")
        record = dataclasses.replace(self.record, nodes=(entry,), items={item: own})
        return EpochReader(self.store, self.folder, record, self.pool, self.verify)

    def files(self, item: str, node: int) -> list[NodeFile]:
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
            found.append(NodeFile(node, path, arrays, part, first, file))
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
        except (EOFError, ValueError) as error:
            self.check_present(str(error))
            raise DamagedError(path, str(error)) from error
        except OSError as error:
            self.check_present(str(error))
            raise unreadable(path, error) from error

    def check_present(self, detail: str) -> None:
        """Raises EpochDeleted unless the commit record is still the one this reader began with.

        Raises:
            AccessError, StorageError: nobody knows: storage does not say.
        """
        path = layout.join(self.folder, layout.EPOCH_RECORD)
        try:
            now = parsing.parse_head(path, self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise EpochDeleted(self.record.epoch, self.store.root, detail) from None
        except (DamagedError, FormatError, ValueError):
            return
        except OSError as error:
            found = unreadable(path, error)
            if isinstance(found, DamagedError):
                return
            raise found from error
        if now.attempt != self.record.attempt:
            raise EpochDeleted(self.record.epoch, self.store.root, "another attempt is committed there now")

    def verify_all(self, progress: Callable[[int], None]) -> Iterator[EpochCheckpointError]:
        """Reads every byte of the epoch and yields what is wrong, file by file.

        Args:
            progress: is told how many bytes have been read, piece by piece, from any thread.
        """
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
                            yield from file.verify(self, progress)
                    elif item.kind == "node":
                        if name not in record.items and not any(f.item == name for f in record.files):
                            continue  # this node has none
                        yield from self.of_node(node, name).verify_all(progress)
                    else:
                        for file in record.files:
                            if file.item == name:
                                for block in self.blocks(node, file):
                                    progress(len(block))
                except EpochDeleted:
                    raise
                except EpochCheckpointError as error:
                    yield error

    def _arrays(self, item: str) -> ArrayItem:
        arrays = self.record.items[item].arrays
        assert arrays is not None, "callers choose array items"
        return arrays

    def _cells(self, request: Request) -> Iterator[tuple[int, int, Copy]]:
        """(owner, position among the owner's cells, copy) for every cell that a request needs."""
        arrays = self._arrays(request.item)
        if arrays.is_whole(request.leaf):
            if element_count(request.box):
                owner = arrays.owner(request.leaf, 0)
                source = tuple(slice(a, b) for a, b in request.box)
                into = tuple(slice(0, b - a) for a, b in request.box)
                yield owner, self._positions(request.item, owner)[request.leaf, 0], Copy(request.out, into, source)
            return
        for cell in arrays.cells_touching(request.leaf, request.box):
            box = arrays.cell_box(request.leaf, cell)
            meet = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(request.box, box, strict=True)]
            into = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(meet, request.box, strict=True))
            source = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(meet, box, strict=True))
            owner = arrays.owner(request.leaf, cell)
            yield (
                owner,
                self._positions(request.item, owner)[request.leaf, cell],
                Copy(request.out, into, source),
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


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, d) for d in shape)


def element_count(box: Box) -> int:
    """Elements in a box."""
    return math.prod(b - a for a, b in box)
