"""Reads the files of an epoch, verified block by block.

`epoch.json` alone says which bytes are needed and where they lie; the `node.json` of each node has the checksums. A
range is read as the blocks that it touches, so that no unverified byte reaches the caller. A cell that fills a
contiguous piece of its destination is read straight into it; other cells go through a buffer of a block or a row. From
an object store blocks that lie near each other come with one request.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from epochckpt import _collector
from epochckpt._threads import Pool
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeletedError, FormatError, unreadable
from epochckpt.format import ArrayItem, Box, DataFile, EpochRecord, NodeRecord, Part, checksums, grid, parsing, paths
from epochckpt.format.grid import slices
from epochckpt.format.records import MAX_RECORD_BYTES
from epochckpt.orbax import events
from epochckpt.storage import Reader, Store, writing

_CHECK_FROM = 2**20  # for smaller leaves the sizes of their files are not checked beforehand
_CHECK_OBJECTS_FROM = 2**30  # the same where that is a request for each file
_SPAN_BYTES = 16 * 2**20  # that one request reads
_GAP_BYTES = 2**20  # that it reads in vain, where that saves another request


class Request(NamedTuple):
    """A part of a leaf, and the array of its shape and of the stored dtype that it is read into."""

    item: str
    leaf: int
    box: Box
    out: np.ndarray


class _Copy(NamedTuple):
    """One use of a cell: `out[into] = cell[source]`."""

    out: np.ndarray
    into: tuple[slice, ...]
    source: tuple[slice, ...]


@contextlib.contextmanager
def _noting(damage: list[EpochCheckpointError]) -> Generator[None]:
    """Collects an error of the data; the error that the epoch was deleted is raised."""
    try:
        yield
    except EpochDeletedError:
        raise
    except EpochCheckpointError as error:
        damage.append(error)


class NodeFile:
    """One file of a node: `name` is its path in the node's folder, `path` the one in the directory."""

    def __init__(self, epoch: EpochReader, node: int, file: DataFile):
        self.epoch, self.node, self.name, self.path = epoch, node, file.path, epoch.path(node, file)
        self.size, self.data_start, self.cells = file.size, file.data_start, file.cells
        self._reader: Reader | None = None
        self._ends = np.zeros(0, dtype=np.int64)
        self._sums: tuple[str, ...] = ()

    def open(self) -> None:
        """Opens the file, and compares both records and its size."""
        if not self._sums:  # once: leaves are also read one by one, and a file may hold thousands
            where = self.epoch.path(self.node)
            mine = self.epoch.node_files(self.node).get(self.name)
            if mine is None or (mine.size, mine.data_start, mine.cells) != (self.size, self.data_start, self.cells):
                raise FormatError(where, f"does not describe {self.path} as the epoch's record does")
            self._ends = ends = self._cut(mine.block_bytes)
            if len(ends) != len(mine.xxh3):
                raise FormatError(where, f"has {len(mine.xxh3)} checksums for the {len(ends)} blocks of {self.path}")
            self._sums = mine.xxh3
        size = self.size or None  # nothing is read of an empty file, so that it is looked for
        self._reader = reader = self.epoch.guard(self.path, lambda: self.epoch.store.open_reader(self.path, size))
        try:
            self.check_size(lambda: reader.size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def check_size(self, measure: Callable[[], int]) -> None:
        """Raises DamagedError unless the file has the recorded size; EpochDeletedError if the epoch is gone."""
        found = self.epoch.guard(self.path, measure)
        if found != self.size:
            self.epoch.check_present(f"{self.path} has another size")
            raise DamagedError(self.path, f"has {found} bytes, {self.size} were written", self._leaf_at(found))

    def stream(
        self,
        use: Callable[[int, memoryview], Any],
        *,
        damage: list[EpochCheckpointError] | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Reads and verifies the whole file by blocks, in any order, with one request of memory per thread of the pool.

        `use` gets each block's offset and its bytes, which are valid only during the call. The errors of blocks that
        cannot be used go into `damage`; without it the first one is raised.
        """
        self.open()
        largest = int(np.diff(self._ends, prepend=0).max(initial=0))
        local = threading.local()

        def noting() -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext() if damage is None else _noting(damage)

        def read(blocks: Sequence[int]) -> None:
            if len(blocks) == 1 and not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(largest))
            with noting():
                for block, piece in self._pieces(blocks, local.buffer if len(blocks) == 1 else None):
                    with noting():
                        self._verify(block, piece, always=True)
                        use(self._bounds(block)[0], piece)

        try:
            spans = self._spans(range(len(self._ends)))
            (pool or self.epoch.pool).run([functools.partial(read, blocks) for blocks in spans])
        finally:
            self.close()

    def copy(self, target: Store, path: str) -> None:
        """Copies the file into a store, verified, and durable but for its name."""
        with writing(target, path, self.size) as writer:
            self.stream(writer.write)

    def _cut(self, block_bytes: int) -> np.ndarray:
        """The offsets at which the blocks end; an empty file is one block."""
        return np.array([*range(block_bytes, self.size, block_bytes), self.size], dtype=np.int64)

    def _bounds(self, block: int) -> tuple[int, int]:
        return (int(self._ends[block - 1]) if block else 0), int(self._ends[block])

    def _spans(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """Groups blocks, ascending, that are read together: on an object store those near each other."""
        group: list[int] = []
        longest = 0 if self.epoch.store.renames else _SPAN_BYTES
        for block in blocks:
            start, end = self._bounds(block)
            if group and (end - self._bounds(group[0])[0] > longest or start - self._bounds(group[-1])[1] > _GAP_BYTES):
                yield group
                group = []
            group.append(block)
        if group:
            yield group

    def _pieces(self, blocks: Sequence[int], into: memoryview | None = None) -> Iterator[tuple[int, memoryview]]:
        """Reads blocks with one call, into a buffer if one is given; gives each with its bytes, not verified."""
        start, end = self._bounds(blocks[0])[0], self._bounds(blocks[-1])[1]
        reader = self._reader
        assert reader is not None, "tasks run while the file is open"
        if into is None:
            read = functools.partial(reader.read, start, end - start)
        else:
            into = into[: end - start]
            read = functools.partial(reader.read_into, start, into)
        problem = f"bytes {start}-{end} cannot be read: "
        found = self.epoch.guard(self.path, read, problem, lambda: self._leaf_at(start)) if start < end else b""
        data = memoryview(found) if into is None else into
        self.epoch.count(nbytes=end - start)
        for block in blocks:
            a, b = self._bounds(block)
            yield block, data[a - start : b - start]

    def _verify(self, block: int, piece: memoryview, always: bool = False) -> None:
        if self.epoch.verify or always:
            began = time.monotonic()
            found = f"{checksums.xxh3(piece):016x}"
            self.epoch.count(verify_secs=time.monotonic() - began)
            if found != self._sums[block]:
                self.epoch.check_present(f"{self.path} changed")
                start, end = self._bounds(block)
                problem = f"bytes {start}-{end} differ from what was written (xxh3 {self._sums[block]}, found {found})"
                raise DamagedError(self.path, problem, self._leaf_at(start))

    def _leaf_at(self, offset: int) -> str | None:
        """The leaf whose bytes lie at an offset; None where there is none."""
        return None


class ArrayFile(NodeFile):
    """A data file, in which each cell of `part` begins at one of the `offsets`."""

    def __init__(self, epoch: EpochReader, node: int, file: DataFile, item: ArrayItem, part: Part):
        super().__init__(epoch, node, file)
        self.item, self.part, self.offsets = item, part, part.offsets + file.data_start

    def _cut(self, block_bytes: int) -> np.ndarray:
        return grid.blocks(np.diff(self.part.offsets), self.data_start, block_bytes)

    def tasks(self, wanted: dict[int, list[_Copy]]) -> list[Callable[[], None]]:
        """Opens the file; returns tasks that read the wanted cells, given by their positions in the file."""
        self.open()
        tasks: list[Callable[[], None]] = []
        whole: dict[int, memoryview] = {}  # destinations of blocks
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
                    whole[block] = direct[a - start : b - start]
            elif first == last:
                runs[first].append((cell, wanted[cell]))
            else:
                tasks.append(functools.partial(self._large, cell, wanted[cell]))
        spans = self._spans(sorted(whole.keys() | runs.keys()))
        return tasks + [functools.partial(self._deliver, blocks, whole, runs) for blocks in spans]

    def _deliver(
        self,
        blocks: list[int],
        whole: Mapping[int, memoryview],
        runs: Mapping[int, list[tuple[int, list[_Copy]]]],
    ) -> None:
        """Reads blocks with one call; each goes to one destination as it is, or its whole cells to theirs."""
        alone = whole.get(blocks[0]) if len(blocks) == 1 else None
        for block, piece in self._pieces(blocks, alone):
            self._verify(block, piece)
            if alone is None and block in whole:
                np.frombuffer(whole[block], np.uint8)[:] = np.frombuffer(piece, np.uint8)
            elif alone is None:
                self._spread(block, np.frombuffer(piece, np.uint8), runs[block])

    def _direct(self, cell: int, copies: list[_Copy]) -> memoryview | None:
        """The destination as bytes, if one whole cell goes to one contiguous place."""
        if len(copies) != 1:
            return None
        part = copies[0].out[copies[0].into] if copies[0].into else copies[0].out
        if part.nbytes != int(self.offsets[cell + 1] - self.offsets[cell]) or not part.flags.c_contiguous:
            return None
        return part.reshape(-1).view(np.uint8).data

    def _spread(self, block: int, buffer: np.ndarray, cells: list[tuple[int, list[_Copy]]]) -> None:
        """Takes whole cells out of a block."""
        start, _ = self._bounds(block)
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
        whole = {}
        for block in range(first, last + 1):
            a, b = self._bounds(block)
            whole[block] = buffer[a - begin : b - begin].data
        for blocks in self._spans(whole):
            self._deliver(blocks, whole, {})
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

    def _leaf_at(self, offset: int) -> str | None:
        if offset < self.data_start or not len(self.part.leaves):
            return None
        cell = min(int(np.searchsorted(self.offsets, offset, side="right")) - 1, len(self.part.leaves) - 1)
        return self.item.leaves[int(self.part.leaves[cell])].name


class EpochReader:
    """Reads one committed epoch from its folder in the store; without `verify`, leaves are read without checksums."""

    def __init__(self, store: Store, folder: str, record: EpochRecord, pool: Pool, verify: bool = True):
        self.store, self.folder, self.record, self.pool, self.verify = store, folder, record, pool, verify
        self._tally: list[tuple[int, float]] | None = None  # (bytes, seconds of verifying), while `read` reads
        self.node_record = functools.cache(self._node_record)
        self.node_files = functools.cache(lambda node: {file.path: file for file in self.node_record(node).files})
        self.files = functools.cache(self._files)
        self._places = functools.cache(self._places_of)
        self._check_sizes = functools.cache(self._check_sizes_of)

    def read(self, requests: Sequence[Request]) -> None:
        """Fills the `out` of every request; DamagedError, or EpochDeletedError if the epoch went away meanwhile."""
        began, self._tally = time.monotonic(), (tally := list[tuple[int, float]]())
        wanted: dict[ArrayFile, dict[int, list[_Copy]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        with _collector.paused():
            for request in requests:
                for (file, position), copy in self._cells(request):
                    wanted[file][position].append(copy)
        self.pool.run([functools.partial(self.node_record, node) for node in sorted({file.node for file in wanted})])
        try:
            with _collector.paused():
                tasks = [task for file, cells in wanted.items() for task in file.tasks(cells)]
            self.pool.run(tasks)
        finally:
            self._tally = None
            for file in wanted:
                file.close()
        if wanted:
            sizes = sum(request.out.nbytes for request in requests), sum(nbytes for nbytes, _ in tally)
            events.read(self.store.root, time.monotonic() - began, *sizes, sum(secs for _, secs in tally))

    def count(self, nbytes: int = 0, verify_secs: float = 0.0) -> None:
        """Counts bytes that `read` has read, and the time that it took to verify some; called from any thread."""
        if (tally := self._tally) is not None:
            tally.append((nbytes, verify_secs))

    def item_files(self, item: str) -> list[tuple[int, DataFile]]:
        """(node, file) of every file that handlers wrote for an item, on all nodes."""
        nodes = [n for n, entry in enumerate(self.record.nodes) if any(f.item == item for f in entry.files)]
        self.pool.run([functools.partial(self.node_record, node) for node in nodes])
        return [(node, f) for node in nodes for f in self.node_record(node).files if f.item == item and f.name]

    def read_file(self, item: str, name: str) -> bytes:
        """The content of a small file that a handler wrote, verified."""
        found = [(node, f) for node, f in self.item_files(item) if f.name == name]
        if len(found) != 1:
            raise FormatError(f"{self.folder}/{item}/{name}", "is not listed in its node's record")
        file = NodeFile(self, *found[0])
        if file.size > MAX_RECORD_BYTES:
            raise FormatError(file.path, f"is recorded with {file.size} bytes, more than {MAX_RECORD_BYTES}")
        blocks: list[bytes] = []
        file.stream(lambda _, block: blocks.append(bytes(block)), pool=Pool(1))  # in order; the first damage is raised
        return b"".join(blocks)

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """Checks the sizes of the files that hold a part of a leaf, before memory is allocated for it."""
        arrays = self._arrays(item)
        if arrays.leaves[leaf].nbytes >= (_CHECK_FROM if self.store.renames else _CHECK_OBJECTS_FROM):
            for owner in sorted({arrays.owner(leaf, cell) for cell in arrays.cells_touching(leaf, box)}):
                self._check_sizes(item, owner)

    def _check_sizes_of(self, item: str, node: int) -> None:
        for file in self.files(item, node):
            file.check_size(functools.partial(self.store.size, file.path))

    def path(self, node: int, file: DataFile | None = None) -> str:
        """Path of a node's file, or of its record, relative to the directory."""
        return paths.join(self.folder, self.record.path(node, file))

    def _node_record(self, node: int) -> NodeRecord:
        """A node's `node.json`, verified against `epoch.json`."""
        entry = self.record.nodes[node]
        path = self.path(node)
        data = self.guard(path, lambda: self.store.read(path, limit_bytes=entry.record_size))
        if len(data) != entry.record_size or checksums.digest(data) != entry.record_digest:
            self.check_present(f"{path} changed")
            raise DamagedError(path, f"its {len(data)} bytes are not the record that the epoch was committed with")
        record = parsing.parse_node(path, data)
        if (record.node, record.attempt, record.plan) != (entry.name, self.record.attempt, self.record.plan):
            raise FormatError(path, f"belongs to node {record.node!r}, attempt {record.attempt!r}, another save")
        return record

    def has(self, node: int, item: str) -> bool:
        """Whether a node saved its own tree for an item."""
        return item in self.node_record(node).items

    def of_node(self, node: int, item: str) -> EpochReader:
        """A reader of one node's own tree of an item, as if it were an epoch by itself."""
        own = self.node_record(node).items.get(item)
        if own is None:
            raise FormatError(self.path(node), f"has no tree of item {item!r}")
        record = dataclasses.replace(self.record, nodes=(self.record.nodes[node],), items={item: own})
        return EpochReader(self.store, self.folder, record, self.pool, self.verify)

    def _files(self, item: str, node: int) -> list[ArrayFile]:
        """The data files that a node wrote for an item."""
        arrays, entry = self._arrays(item), self.record.nodes[node]
        listed = [f for f in entry.files if f.item == item]
        where = paths.join(self.folder, paths.EPOCH_RECORD)
        owned = arrays.owned(node)
        ends = np.cumsum([f.cells for f in listed], dtype=np.int64).tolist()
        if [f.part for f in listed] != list(range(len(listed))) or (ends[-1] if ends else 0) != len(owned[0]):
            problem = f"node {entry.name!r}, item {item!r}: its files do not hold the {len(owned[0])} cells it owns"
            raise FormatError(where, problem)
        found = []
        for recorded, part in zip(listed, arrays.cut(owned, ends), strict=True):
            file = ArrayFile(self, node, recorded, arrays, part)
            if int(file.offsets[-1]) != file.size:
                problem = f"{file.path} is recorded with {file.size} bytes, its shards need {int(part.offsets[-1])}"
                raise FormatError(where, problem)
            found.append(file)
        return found

    def guard(
        self, path: str, read: Callable[[], Any], problem: str = "", leaf: Callable[[], str | None] = lambda: None
    ) -> Any:
        """Calls `read`; raises EpochDeletedError if the epoch is gone, else what a failure says of the file."""
        try:
            return read()
        except EpochCheckpointError:
            raise
        except (EOFError, ValueError) as error:
            self.check_present(str(error))
            raise DamagedError(path, f"{problem}{error}", leaf()) from error
        except OSError as error:
            self.check_present(str(error))
            raise unreadable(path, error) from error

    def check_present(self, detail: str) -> None:
        """Raises EpochDeletedError unless the commit record is still the one this reader began with."""
        path = paths.join(self.folder, self.record.name)
        try:
            now = parsing.read_record(self.store, path, parsing.parse_head)
        except (DamagedError, FormatError):
            return
        if now is None:
            raise EpochDeletedError(self.record.epoch, self.store.root, detail)
        if now.attempt != self.record.attempt:
            raise EpochDeletedError(self.record.epoch, self.store.root, "another attempt is committed there now")

    def verify_all(self, progress: Callable[[int], None]) -> list[EpochCheckpointError]:
        """Reads every byte of the epoch; returns one error per damaged block, and per file that cannot be read."""
        damage: list[EpochCheckpointError] = []
        for node in range(len(self.record.nodes)):
            with _noting(damage):
                record = self.node_record(node)
                for name, item in self.record.items.items():
                    written = [file for file in record.files if file.item == name]
                    with _noting(damage):
                        if item.kind == "node":
                            if written or name in record.items:  # else this node has no tree of the item
                                damage += self.of_node(node, name).verify_all(progress)
                            continue
                        of_handlers = (NodeFile(self, node, file) for file in written)
                        for file in self.files(name, node) if item.kind == "arrays" else of_handlers:
                            with _noting(damage):
                                file.stream(lambda _, block: progress(len(block)), damage=damage)
        return damage

    def _arrays(self, item: str) -> ArrayItem:
        arrays = self.record.items[item].arrays
        assert arrays is not None, "callers choose array items"
        return arrays

    def _cells(self, request: Request) -> Iterator[tuple[tuple[ArrayFile, int], _Copy]]:
        """((file, position in it), copy) for every cell that a request needs."""
        arrays = self._arrays(request.item)
        if arrays.is_whole(request.leaf):
            if request.out.size:
                places = self._places(request.item, arrays.owner(request.leaf, 0))
                copy = _Copy(request.out, slices(request.box, request.box), slices(request.box))
                yield places[request.leaf, 0], copy
            return
        for cell in arrays.cells_touching(request.leaf, request.box):
            box = arrays.cell_box(request.leaf, cell)
            meet = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(request.box, box, strict=True))
            places = self._places(request.item, arrays.owner(request.leaf, cell))
            yield places[request.leaf, cell], _Copy(request.out, slices(meet, request.box), slices(meet, box))

    def _places_of(self, item: str, node: int) -> dict[tuple[int, int], tuple[ArrayFile, int]]:
        """Where each (leaf, cell) of a node lies: the file, and the position in it."""
        found = {}
        for file in self.files(item, node):
            pairs = zip(file.part.leaves.tolist(), file.part.cells.tolist(), strict=True)
            found.update({pair: (file, i) for i, pair in enumerate(pairs)})
        return found
