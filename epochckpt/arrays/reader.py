"""Reads parts of leaves out of the data files of nodes, verified block by block.

`epoch.json` alone says which bytes are needed and where they lie; the `node.json` of their owners has the checksums. A
range is read as the blocks that it touches, so that no unverified byte reaches the caller. A cell that fills a
contiguous piece of its destination is read straight into it; other cells go through a buffer of a block or a row.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from epochckpt._threads import Pool
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeletedError, FormatError, unreadable
from epochckpt.format import (
    ArrayItem,
    Box,
    DataFile,
    EpochRecord,
    NodeRecord,
    Part,
    checksums,
    grid,
    parsing,
    paths,
    records,
)
from epochckpt.format.grid import slices
from epochckpt.storage import Reader, Store

_CHECK_FROM = 2**20  # for smaller leaves the sizes of their files are not checked beforehand


@dataclasses.dataclass(frozen=True)
class Request:
    """A part of a leaf and where to put it.

    Attributes:
        item: name of the item.
        leaf: leaf number.
        box: the part to read.
        out: C-contiguous array of the box's shape and the stored dtype.
    """

    item: str
    leaf: int
    box: Box
    out: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Copy:
    """One use of a cell: `out[into] = cell[source]`."""

    out: np.ndarray
    into: tuple[slice, ...]
    source: tuple[slice, ...]


class NodeFile:
    """One data file of a node.

    Args:
        epoch: the epoch's reader.
        node: node number.
        path: of the file.
        item: the item.
        part: the cells in the file.
        first: position of the file's first cell among the node's cells.
        file: the file as `epoch.json` records it.
    """

    def __init__(
        self, epoch: EpochReader, node: int, path: str, item: ArrayItem, part: Part, first: int, file: DataFile
    ):
        self.epoch, self.node, self.path, self.item, self.part = epoch, node, path, item, part
        self.first, self.cells, self.size, self.data_start = first, file.cells, file.size, file.data_start
        self.offsets = part.offsets + file.data_start
        self._reader: Reader | None = None
        self._ends = np.zeros(0, dtype=np.int64)
        self._cut_at = 0
        self._sums: tuple[str, ...] = ()

    def open(self) -> None:
        """Opens the file, and compares both records and its size."""
        listed = [f for f in self.epoch.node_record(self.node).files if f.item == self.item.name]
        where = self.epoch.path(self.node, paths.NODE_RECORD)
        mine = next((f for f in listed if paths.data_file(f.item, f.part) == self.path.rpartition("/")[2]), None)
        if mine is None or (mine.size, mine.data_start, mine.cells) != (self.size, self.data_start, self.cells):
            raise FormatError(where, f"does not describe {self.path} as the epoch's record does")
        if self._cut_at != mine.block_bytes:  # once: leaves are also read one by one, and a file may hold thousands
            self._ends = grid.blocks(np.diff(self.part.offsets), self.data_start, mine.block_bytes)
            self._cut_at = mine.block_bytes
        if len(self._ends) != len(mine.xxh3):
            raise FormatError(where, f"has {len(mine.xxh3)} checksums for the {len(self._ends)} blocks of {self.path}")
        self._sums = mine.xxh3
        self._reader = reader = self.epoch.guard(self.path, lambda: self.epoch.store.open_reader(self.path))
        try:
            self.epoch.check_size(self.path, self.size, lambda: reader.size, self._leaf_at)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def verify(self, progress: Callable[[int], None]) -> list[EpochCheckpointError]:
        """Reads every block, and returns one error for each that is damaged; see `EpochReader.verify_all`."""
        problems: list[EpochCheckpointError] = []
        try:
            self.stream(lambda start, data: progress(len(data)), problems.append)
        except EpochDeletedError:
            raise
        except EpochCheckpointError as error:
            return [error]
        return problems

    def stream(
        self,
        use: Callable[[int, memoryview], None],
        damaged: Callable[[EpochCheckpointError], None] | None = None,
    ) -> None:
        """Reads the whole file by blocks, in several threads and any order, with one block of memory per thread.

        Args:
            use: is called with each block's offset and its verified bytes, which are valid only during the call.
            damaged: is called with the error of each block that cannot be used. Without it the first one is raised.

        Raises:
            DamagedError, EpochDeletedError: the file as a whole cannot be read.
        """
        self.open()
        largest = int(np.diff(self._ends, prepend=0).max(initial=0))
        local = threading.local()

        def read(block: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(largest))
            start, end = self._bounds(block)
            try:
                self._read(block, local.buffer[: end - start], always=True)
            except EpochDeletedError:
                raise
            except EpochCheckpointError as error:
                if damaged is None:
                    raise
                damaged(error)
                return
            use(start, local.buffer[: end - start])

        try:
            self.epoch.pool.run([functools.partial(read, b) for b in range(len(self._ends))])
        finally:
            self.close()

    def tasks(self, wanted: dict[int, list[_Copy]]) -> list[Callable[[], None]]:
        """Opens the file; returns tasks that read the wanted cells, given by their positions in the file."""
        self.open()
        tasks: list[Callable[[], None]] = []
        runs: dict[int, list[tuple[int, list[_Copy]]]] = collections.defaultdict(list)
        cells = np.array(sorted(wanted), dtype=np.int64)
        firsts = np.searchsorted(self._ends, self.offsets[cells], side="right").tolist()
        lasts = np.searchsorted(self._ends, self.offsets[cells + 1], side="left").tolist()
        bounds = zip(self.offsets[cells].tolist(), self.offsets[cells + 1].tolist(), strict=True)
        for cell, first, last, (start, end) in zip(cells.tolist(), firsts, lasts, bounds, strict=True):
            if start == end:
                continue
            direct = self._direct(cell, wanted[cell])
            if direct is not None and self._bounds(first)[0] == start and self._bounds(last)[1] == end:
                for block in range(first, last + 1):  # the cell is whole blocks, which go straight to their place
                    a, b = self._bounds(block)
                    tasks.append(functools.partial(self._read, block, direct[a - start : b - start]))
            elif first == last:
                runs[first].append((cell, wanted[cell]))
            else:
                tasks.append(functools.partial(self._large, cell, wanted[cell]))
        return tasks + [functools.partial(self._run, block, cells) for block, cells in runs.items()]

    def _direct(self, cell: int, copies: list[_Copy]) -> memoryview | None:
        """The destination as bytes, if one whole cell goes to one contiguous place."""
        if len(copies) != 1:
            return None
        part = copies[0].out[copies[0].into] if copies[0].into else copies[0].out
        if part.nbytes != int(self.offsets[cell + 1] - self.offsets[cell]) or not part.flags.c_contiguous:
            return None
        return part.reshape(-1).view(np.uint8).data

    def _run(self, block: int, cells: list[tuple[int, list[_Copy]]]) -> None:
        """Reads a block with whole cells in it."""
        start, end = self._bounds(block)
        buffer = np.empty(end - start, dtype=np.uint8)
        self._read(block, buffer.data)
        for cell, copies in cells:
            raw = buffer[int(self.offsets[cell]) - start : int(self.offsets[cell + 1]) - start]
            array = self._array(cell, raw, self.item.cell_shape(int(self.part.leaves[cell])))
            for copy in copies:
                copy.out[copy.into] = array[copy.source]

    def _large(self, cell: int, copies: list[_Copy]) -> None:
        """Reads a part of a cell that spans several blocks: only the blocks that hold the wanted rows.

        Leading axes with one wanted index are descended into, so that a piece of a long row costs only a piece.
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
            self._read(block, buffer[a - begin : b - begin].data)
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

    def _read(self, block: int, into: memoryview, always: bool = False) -> None:
        start, end = self._bounds(block)
        reader = self._reader
        assert reader is not None, "tasks run while the file is open"
        try:
            reader.read_into(start, into)
        except OSError as error:
            self.epoch.check_present(str(error))
            raise unreadable(self.path, error) from error
        except EOFError as error:
            self.epoch.check_present(str(error))
            problem = f"bytes {start}-{end} cannot be read: {error}"
            raise DamagedError(self.path, problem, self._leaf_at(start)) from error
        if self.epoch.verify or always:
            self.epoch.check_sum(self.path, start, into, self._sums[block], self._leaf_at)

    def _leaf_at(self, offset: int) -> str | None:
        """The leaf whose bytes lie at an offset; None in the header."""
        if offset < self.data_start or not len(self.part.leaves):
            return None
        cell = min(int(np.searchsorted(self.offsets, offset, side="right")) - 1, len(self.part.leaves) - 1)
        return self.item.leaves[int(self.part.leaves[cell])].name


class EpochReader:
    """Reads one committed epoch.

    Args:
        store: the directory.
        folder: the epoch's folder in it.
        record: its parsed `epoch.json`.
        pool: threads that read.
        verify: compare checksums.
    """

    def __init__(self, store: Store, folder: str, record: EpochRecord, pool: Pool, verify: bool = True):
        self.store, self.folder, self.record, self.pool, self.verify = store, folder, record, pool, verify
        self._lock = threading.Lock()
        self._nodes: dict[int, NodeRecord] = {}
        self._parts: dict[tuple[str, int], list[NodeFile]] = {}
        self._positions: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
        self._checked: set[tuple[str, int]] = set()

    def read(self, requests: Sequence[Request]) -> None:
        """Fills the `out` of every request.

        Raises:
            DamagedError: a file is missing, short, or its bytes differ from what was written.
            EpochDeletedError: the epoch was deleted or replaced meanwhile.
        """
        # Which cells of which owner's files are needed, by their positions among the owner's cells.
        wanted: dict[tuple[str, int], dict[int, list[_Copy]]] = collections.defaultdict(
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
                        tasks += file.tasks(mine)
            self.pool.run(tasks)
        finally:
            for file in opened:
                file.close()

    def item_files(self, item: str) -> list[tuple[int, DataFile]]:
        """(node, file) of every file that handlers wrote for an item, on all nodes."""
        nodes = [n for n, entry in enumerate(self.record.nodes) if any(f.item == item for f in entry.files)]
        self.pool.run([functools.partial(self.node_record, node) for node in nodes])
        return [(node, f) for node in nodes for f in self.node_record(node).files if f.item == item and f.name]

    def read_file(self, item: str, name: str) -> bytes:
        """The content of a small file that a handler wrote, verified.

        Raises:
            FormatError: there is no such file, or it is too large.
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
            self.check_size(path, file.size, lambda: reader.size)
            for start, expected in zip(starts, file.xxh3, strict=True):
                data = bytearray(min(file.block_bytes, file.size - start))
                if data:
                    self.guard(path, functools.partial(reader.read_into, start, memoryview(data)))
                if self.verify:
                    self.check_sum(path, start, memoryview(data), expected)
                yield bytes(data)

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """Checks the sizes of the files that hold a part of a leaf, before memory is allocated for it.

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
                self.check_size(file.path, file.size, functools.partial(self.store.size, file.path))
            self._checked.add((item, owner))

    def path(self, node: int, file: str) -> str:
        """Path of a node's file, relative to the directory."""
        return paths.join(self.folder, self.record.node_folder(node), file)

    def node_record(self, node: int) -> NodeRecord:
        """A node's `node.json`, verified against `epoch.json`."""
        with self._lock:
            if node in self._nodes:
                return self._nodes[node]
        entry = self.record.nodes[node]
        path = self.path(node, paths.NODE_RECORD)
        data = self.guard(path, lambda: self.store.read(path, limit_bytes=entry.record_size))
        if len(data) != entry.record_size or checksums.digest(data) != entry.record_digest:
            self.check_present(f"{path} changed")
            raise DamagedError(path, f"its {len(data)} bytes are not the record that the epoch was committed with")
        record = parsing.parse_node(path, data)
        if (record.node, record.attempt, record.plan) != (entry.name, self.record.attempt, self.record.plan):
            raise FormatError(path, f"belongs to node {record.node!r}, attempt {record.attempt!r}, another save")
        with self._lock:
            self._nodes[node] = record
        return record

    def has(self, node: int, item: str) -> bool:
        """Whether a node saved its own tree for an item."""
        return item in self.node_record(node).items

    def of_node(self, node: int, item: str) -> EpochReader:
        """A reader of one node's own tree of an item, as if it were an epoch by itself."""
        own = self.node_record(node).items.get(item)
        if own is None:
            raise FormatError(self.path(node, paths.NODE_RECORD), f"has no tree of item {item!r}")
        record = dataclasses.replace(self.record, nodes=(self.record.nodes[node],), items={item: own})
        return EpochReader(self.store, self.folder, record, self.pool, self.verify)

    def files(self, item: str, node: int) -> list[NodeFile]:
        """The data files that a node wrote for an item."""
        with self._lock:
            if (item, node) in self._parts:
                return self._parts[item, node]
        arrays, entry = self._arrays(item), self.record.nodes[node]
        listed = [f for f in entry.files if f.item == item]
        where = paths.join(self.folder, paths.EPOCH_RECORD)
        owned = arrays.owned(node)
        ends = np.cumsum([f.cells for f in listed], dtype=np.int64).tolist()
        if [f.part for f in listed] != list(range(len(listed))) or (ends[-1] if ends else 0) != len(owned[0]):
            problem = f"node {entry.name!r}, item {item!r}: its files do not hold the {len(owned[0])} cells it owns"
            raise FormatError(where, problem)
        found, first = [], 0
        for file, part in zip(listed, arrays.cut(owned, ends), strict=True):
            path = self.path(node, paths.data_file(item, file.part))
            if file.data_start + int(part.offsets[-1]) != file.size:
                problem = f"{path} is recorded with {file.size} bytes, its shards need {int(part.offsets[-1])}"
                raise FormatError(where, problem)
            found.append(NodeFile(self, node, path, arrays, part, first, file))
            first += file.cells
        with self._lock:
            self._parts[item, node] = found
        return found

    def guard(self, path: str, read: Callable[[], Any]) -> Any:
        """Calls `read`; raises EpochDeletedError if the epoch is gone, else what a failure says of the file."""
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

    def check_size(
        self, path: str, size: int, measure: Callable[[], int], leaf_at: Callable[[int], str | None] | None = None
    ) -> None:
        """Raises DamagedError unless a file has the recorded size; EpochDeletedError if the epoch is gone."""
        found = self.guard(path, measure)
        if found != size:
            self.check_present(f"{path} has another size")
            raise DamagedError(path, f"has {found} bytes, {size} were written", leaf_at(found) if leaf_at else None)

    def check_sum(
        self,
        path: str,
        start: int,
        data: memoryview,
        expected: str,
        leaf_at: Callable[[int], str | None] | None = None,
    ) -> None:
        """Raises DamagedError unless a block has the recorded checksum; EpochDeletedError if the epoch is gone."""
        found = f"{checksums.xxh3(data):016x}"
        if found != expected:
            self.check_present(f"{path} changed")
            where = f"bytes {start}-{start + data.nbytes}"
            problem = f"{where} differ from what was written (xxh3 {expected}, found {found})"
            raise DamagedError(path, problem, leaf_at(start) if leaf_at else None)

    def check_present(self, detail: str) -> None:
        """Raises EpochDeletedError unless the commit record is still the one this reader began with.

        Raises:
            AccessError, StorageError: storage does not say.
        """
        path = paths.join(self.folder, paths.EPOCH_RECORD)
        try:
            now = parsing.read_record(self.store, path, parsing.parse_head)
        except (DamagedError, FormatError):
            return
        if now is None:
            raise EpochDeletedError(self.record.epoch, self.store.root, detail)
        if now.attempt != self.record.attempt:
            raise EpochDeletedError(self.record.epoch, self.store.root, "another attempt is committed there now")

    def verify_all(self, progress: Callable[[int], None]) -> Iterator[EpochCheckpointError]:
        """Reads every byte of the epoch, and yields one error per damaged block, or file that cannot be read.

        Args:
            progress: is called with the number of bytes of each piece that was read, by any thread.
        """
        for node in range(len(self.record.nodes)):
            try:
                record = self.node_record(node)
            except EpochDeletedError:
                raise
            except EpochCheckpointError as error:
                yield error
                continue
            for name, item in self.record.items.items():
                written = [file for file in record.files if file.item == name]
                try:
                    if item.arrays is not None:
                        for file in self.files(name, node):
                            yield from file.verify(progress)
                    elif item.kind != "node":
                        for file in written:
                            for block in self.blocks(node, file):
                                progress(len(block))
                    elif written or name in record.items:  # else this node has no tree of the item
                        yield from self.of_node(node, name).verify_all(progress)
                except EpochDeletedError:
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
        if arrays.is_whole(request.leaf):
            if request.out.size:
                owner = arrays.owner(request.leaf, 0)
                copy = _Copy(request.out, slices(request.box, request.box), slices(request.box))
                yield owner, self._positions_of(request.item, owner)[request.leaf, 0], copy
            return
        for cell in arrays.cells_touching(request.leaf, request.box):
            box = arrays.cell_box(request.leaf, cell)
            meet = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(request.box, box, strict=True))
            owner = arrays.owner(request.leaf, cell)
            copy = _Copy(request.out, slices(meet, request.box), slices(meet, box))
            yield owner, self._positions_of(request.item, owner)[request.leaf, cell], copy

    def _positions_of(self, item: str, node: int) -> dict[tuple[int, int], int]:
        """Position among a node's cells by (leaf, cell)."""
        found = self._positions.get((item, node))
        if found is None:
            files = self.files(item, node)
            if not files:
                problem = f"lists no file of node {self.record.nodes[node].name!r}"
                raise FormatError(paths.join(self.folder, paths.EPOCH_RECORD), problem)
            found = self._positions[item, node] = {}
            for file in files:
                pairs = zip(file.part.leaves.tolist(), file.part.cells.tolist(), strict=True)
                found.update({pair: file.first + i for i, pair in enumerate(pairs)})
        return found
