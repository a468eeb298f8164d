"""The files of a node, read and verified block by block.

A range is read as the blocks that it touches, so that no unverified byte reaches the caller. A cell that fills a
contiguous piece of its destination is read straight into it; other cells go through a buffer of a block or a row. From
an object store, neighbouring blocks are read with one request.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from epochckpt._threads import Pool
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeletedError, FormatError
from epochckpt.format import ArrayItem, DataFile, NodeRecord, PartCells, checksums, grid
from epochckpt.storage import Reader, Store, writing

_Move = tuple[int, int, memoryview]  # where some bytes begin and end in a file, and the memory that they go to
_Uses = list[tuple[int, "list[CellUse]"]]  # cells by their positions in a file, and the uses of each


class Epoch(Protocol):
    """The epoch of a file: an `EpochReader`, which says what the methods do."""

    store: Store
    pool: Pool
    verify: bool

    def path(self, node: int, file: DataFile | None = None) -> str: ...

    def node_record(self, node: int) -> NodeRecord: ...

    def node_files(self, node: int) -> Mapping[str, DataFile]: ...

    def guard(
        self, path: str, read: Callable[[], Any], problem: str = "", leaf: Callable[[], str | None] = lambda: None
    ) -> Any: ...

    def check_present(self, detail: str) -> None: ...


class Tally:
    """What has been read so far, by any number of threads."""

    def __init__(self) -> None:
        # Appended to, so that no count is lost.
        self._nbytes: list[int] = []
        self._verify_secs: list[float] = []

    def add_bytes(self, nbytes: int) -> None:
        """Some bytes have been read."""
        self._nbytes.append(nbytes)

    def add_verify_secs(self, secs: float) -> None:
        """To verify some bytes took so long."""
        self._verify_secs.append(secs)

    @property
    def nbytes(self) -> int:
        """All bytes that have been read."""
        return sum(self._nbytes.copy())

    @property
    def verify_secs(self) -> float:
        """How long it took to verify them, of all threads together."""
        return sum(self._verify_secs.copy())


class Pack(NamedTuple):
    """Leaves of one item, a single cell each, that are read into one piece of memory."""

    item: str
    node: int  # that wrote them
    leaves: np.ndarray  # their numbers, in the order of the node's files
    starts: np.ndarray  # where each begins in `out`
    sizes: np.ndarray  # bytes
    out: np.ndarray  # uint8


class CellUse(NamedTuple):
    """One use of a cell: `out[into] = cell[source]`."""

    out: np.ndarray
    into: tuple[slice, ...]
    source: tuple[slice, ...]


def _memory(nbytes: int) -> memoryview:
    """Memory of its own."""
    return np.empty(nbytes, np.uint8).data


@contextlib.contextmanager
def noting(damage: list[EpochCheckpointError]) -> Generator[None]:
    """Collects an error of the data; the error that the epoch was deleted is raised."""
    try:
        yield
    except EpochDeletedError:
        raise
    except EpochCheckpointError as error:
        damage.append(error)


class NodeFile(abc.ABC):
    """One file of a node: `name` is its path in the node's folder, `path` the one in the directory."""

    def __init__(self, epoch: Epoch, node: int, file: DataFile):
        self.node = node
        self.name = file.path
        self.path = epoch.path(node, file)
        self.size = file.size
        self.data_start = file.data_start
        self.cells = file.cells
        self._reader: Reader | None = None
        self._ends = np.zeros(0, dtype=np.int64)
        self._sums = checksums.BlockSums(checksums.WRITTEN)

    @property
    @abc.abstractmethod
    def epoch(self) -> Epoch:
        """The epoch of the file. Each kind of file has its own way to refer to it."""

    def open(self) -> None:
        """Opens the file, and compares both records and its size."""
        if not self._sums.values:  # once: leaves are also read one by one, and a file may hold thousands
            where = self.epoch.path(self.node)
            mine = self.epoch.node_files(self.node).get(self.name)
            if mine is None or (mine.size, mine.data_start, mine.cells) != (self.size, self.data_start, self.cells):
                raise FormatError(where, f"does not describe {self.path} as the epoch's record does")
            self._ends = self._cut(mine.block_bytes)
            blocks = len(self._ends)
            count = len(mine.sums.values)
            if blocks != count:
                raise FormatError(where, f"has {count} checksums for the {blocks} blocks of {self.path}")
            self._sums = mine.sums
        size = self.size or None  # nothing is read of an empty file, so that it is looked for
        reader: Reader = self.epoch.guard(self.path, lambda: self.epoch.store.open_reader(self.path, size))
        self._reader = reader
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
        """Reads and verifies the whole file by blocks, in any order, with the memory of one read for each thread.

        `use` gets each block's offset and its bytes, which are valid only during the call. The errors of blocks that
        cannot be used go into `damage`; without it the first one is raised.
        """
        self.open()
        spans = [*self._spans(range(len(self._ends)))]
        largest = max(self._bounds(blocks[-1])[1] - self._bounds(blocks[0])[0] for blocks in spans)
        tally = Tally()  # `use` counts by itself what it gets
        local = threading.local()

        def expected() -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext() if damage is None else noting(damage)

        def read(blocks: Sequence[int]) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = _memory(largest)
            with expected():
                into = {}
                origin = self._bounds(blocks[0])[0]
                for block in blocks:
                    start, end = self._bounds(block)
                    into[block] = local.buffer[start - origin : end - origin]
                for block, piece in self._pieces(blocks, tally, into):
                    with expected():
                        use(self._bounds(block)[0], self._verified(block, piece, tally, always=True))

        try:
            (pool or self.epoch.pool).run([functools.partial(read, blocks) for blocks in spans])
        finally:
            self.close()

    def copy_to(self, target: Store, path: str, progress: Callable[[int], None] | None = None) -> None:
        """Copies the file into a store, verified, and durable but for its name; see `EpochCopy` for `progress`."""
        with writing(target, path, self.size) as writer:

            def write(offset: int, data: memoryview) -> None:
                writer.write(offset, data)
                if progress is not None:
                    progress(len(data))

            self.stream(write)

    def _cut(self, block_bytes: int) -> np.ndarray:
        """The offsets at which the blocks end; an empty file is one block."""
        return np.array([*range(block_bytes, self.size, block_bytes), self.size], dtype=np.int64)

    def _bounds(self, block: int) -> tuple[int, int]:
        return (int(self._ends[block - 1]) if block else 0), int(self._ends[block])

    def _spans(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """Groups blocks, ascending, that are read together: neighbouring ones, as far as that suits the store."""
        group: list[int] = []
        longest = self.epoch.store.span_bytes(self.size)
        widest_gap = self.epoch.store.gap_bytes(self.size)
        for block in blocks:
            start, end = self._bounds(block)
            if group:
                gap = start - self._bounds(group[-1])[1]
                if end - self._bounds(group[0])[0] > longest or gap > widest_gap:
                    yield group
                    group = []
            group.append(block)
        if group:
            yield group

    def _pieces(
        self, blocks: Sequence[int], tally: Tally, into: Mapping[int, memoryview]
    ) -> Iterator[tuple[int, memoryview]]:
        """Reads blocks with one call; gives each with its bytes, not verified: those of `into` in the memory there."""
        start = self._bounds(blocks[0])[0]
        end = self._bounds(blocks[-1])[1]
        reader = self._reader
        assert reader is not None, "tasks run while the file is open"
        found: dict[int, memoryview] = {}
        if into:
            parts: list[memoryview] = []
            at = start
            for block in blocks:
                a, b = self._bounds(block)
                parts.append(_memory(a - at))  # unwanted bytes
                found[block] = into[block] if block in into else _memory(b - a)
                parts.append(found[block])
                at = b
            self._guarded(start, end, functools.partial(reader.read_parts, start, [part for part in parts if part]))
        else:
            read = functools.partial(reader.read, start, end - start)
            data = memoryview(self._guarded(start, end, read) if start < end else b"")
            for block in blocks:
                a, b = self._bounds(block)
                found[block] = data[a - start : b - start]
        tally.add_bytes(end - start)
        yield from found.items()

    def _guarded(self, start: int, end: int, read: Callable[[], Any]) -> Any:
        """Calls `read`, which reads these bytes; what fails is an error of the file."""
        problem = f"bytes {start}-{end} cannot be read: "
        guarded = functools.partial(self.epoch.guard, self.path, read, problem, lambda: self._leaf_at(start))
        return self.epoch.store.confirming_damage(guarded)

    def _verified(self, block: int, piece: memoryview, tally: Tally, always: bool = False) -> memoryview:
        """The bytes of a block, verified: these, or where the store's answer was damaged those of another one."""
        if not (self.epoch.verify or always):
            return piece
        reader = self._reader
        answers = iter([piece])
        assert reader is not None, "tasks run while the file is open"

        def checked() -> memoryview:
            found = next(answers, None)
            if found is None:
                start, end = self._bounds(block)
                found = memoryview(self._guarded(start, end, functools.partial(reader.read, start, end - start)))
            self._verify(block, found, tally)
            return found

        return self.epoch.store.confirming_damage(checked)

    def _verify(self, block: int, piece: memoryview, tally: Tally) -> None:
        began = time.monotonic()
        kind = self._sums.kind
        found = kind.of(piece)
        tally.add_verify_secs(time.monotonic() - began)
        expected = self._sums.values[block]
        if found != expected:
            self.epoch.check_present(f"{self.path} changed")
            start, end = self._bounds(block)
            problem = f"bytes {start}-{end} differ from what was written ({kind.name} {expected}, found {found})"
            raise DamagedError(self.path, problem, self._leaf_at(start), self._leaves_in(start, end))

    def _leaf_at(self, offset: int) -> str | None:
        """The leaf whose bytes lie at an offset; None where there is none."""
        return None

    def _leaves_in(self, start: int, end: int) -> int:
        """How many leaves have bytes between two offsets."""
        return 1


class HandlerFile(NodeFile):
    """A file that a handler wrote. It keeps its epoch alive."""

    def __init__(self, epoch: Epoch, node: int, file: DataFile):
        super().__init__(epoch, node, file)
        self._epoch = epoch

    @property
    def epoch(self) -> Epoch:
        return self._epoch


class InlinedFile(HandlerFile):
    """A file that a handler wrote on another host's disk, and whose content is in the commit record."""

    def __init__(self, epoch: Epoch, node: int, file: DataFile, content: bytes):
        super().__init__(epoch, node, file)
        self._content = content

    def stream(
        self,
        use: Callable[[int, memoryview], Any],
        *,
        damage: list[EpochCheckpointError] | None = None,
        pool: Pool | None = None,
    ) -> None:
        del damage, pool
        use(0, memoryview(self._content))


class ArrayFile(NodeFile):
    """A data file, in which each cell of `part` begins at one of the `offsets`.

    Its epoch keeps it, so that it refers to the epoch weakly: else both would stay until the garbage collector finds
    the cycle. Whoever uses the file keeps the epoch.
    """

    def __init__(self, epoch: Epoch, node: int, file: DataFile, item: ArrayItem, part: PartCells):
        super().__init__(epoch, node, file)
        self._weak_epoch = weakref.ref(epoch)
        self.item = item
        self.part = part
        self.offsets = part.offsets + file.data_start

    @property
    def epoch(self) -> Epoch:
        epoch = self._weak_epoch()
        assert epoch is not None, "its reader is in use"
        return epoch

    def _cut(self, block_bytes: int) -> np.ndarray:
        return grid.blocks(np.diff(self.part.offsets), self.data_start, block_bytes)

    def tasks(
        self, wanted: Mapping[int, list[CellUse]], packs: Sequence[Pack], tally: Tally
    ) -> list[Callable[[], None]]:
        """Opens the file; returns tasks that read the wanted cells, given by their positions in the file, and packs.

        A cell, or a leaf of a pack, that fills one piece of memory is moved there, block by block. Other cells are
        cut out of the block that they lie in. One that spans several blocks is a task of its own.
        """
        self.open()
        tasks: list[Callable[[], None]] = []
        moves: dict[int, list[_Move]] = collections.defaultdict(list)  # by block
        cut_out: dict[int, _Uses] = collections.defaultdict(list)  # by block: the cells inside it
        for pack in packs:
            self._move_pack(pack, moves)
        cells = np.array(sorted(wanted), dtype=np.int64)
        starts = self.offsets[cells]
        ends = self.offsets[cells + 1]
        columns = (cells, starts, ends, *self._blocks(starts, ends))
        for cell, start, end, first, last in zip(*(column.tolist() for column in columns), strict=True):
            if start == end:
                continue
            direct = self._direct(cell, wanted[cell])
            if direct is not None:
                self._move(start, end, first, last, direct, moves)
            elif first == last:
                cut_out[first].append((cell, wanted[cell]))
            else:
                tasks.append(functools.partial(self._large, cell, wanted[cell], tally))
        spans = self._spans(sorted(moves.keys() | cut_out.keys()))
        return tasks + [functools.partial(self._deliver, blocks, moves, cut_out, tally) for blocks in spans]

    def _move_pack(self, pack: Pack, moves: dict[int, list[_Move]]) -> None:
        """Moves the leaves of a pack that lie in this file. Neighbours in the file and in the memory move as one."""
        # Where each leaf begins and ends in the file, and where it begins in the memory of the pack.
        cells = self.cell_of[pack.leaves]
        here = cells >= 0
        leaf_starts = self.offsets[cells[here]]
        leaf_ends = self.offsets[cells[here] + 1]
        leaf_places = pack.starts[here]
        # A stretch is what moves as one. A leaf begins a new one unless it follows on the leaf before, in the file and
        # in the memory.
        gap_in_file = leaf_starts[1:] != leaf_ends[:-1]
        shift_in_memory = np.diff(leaf_places) != np.diff(leaf_starts)
        begins = np.flatnonzero(gap_in_file | shift_in_memory) + 1
        firsts = np.concatenate([[0], begins])
        lasts = np.concatenate([begins, [len(leaf_starts)]]) - 1
        starts = leaf_starts[firsts]
        ends = leaf_ends[lasts]
        columns = (starts, ends, leaf_places[firsts], *self._blocks(starts, ends))
        out = pack.out.data
        for start, end, place, first, last in zip(*(column.tolist() for column in columns), strict=True):
            self._move(start, end, first, last, out[place : place + end - start], moves)

    @functools.cached_property
    def cell_of(self) -> np.ndarray:
        """The position of each leaf of the item, or -1; of a leaf of several cells here that of the last one."""
        found = np.full(len(self.item.leaves), -1, np.int64)
        found[self.part.leaves] = np.arange(len(self.part.leaves))
        return found

    def _blocks(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last block of each stretch of the file."""
        return np.searchsorted(self._ends, starts, side="right"), np.searchsorted(self._ends, ends, side="left")

    def _move(
        self, start: int, end: int, first: int, last: int, out: memoryview, moves: dict[int, list[_Move]]
    ) -> None:
        """Cuts a move of bytes of the file, which lie in the blocks from `first` to `last`, at the ends of these."""
        if first == last:
            moves[first].append((start, end, out))
            return
        for block in range(first, last + 1):
            a, b = self._bounds(block)
            a = max(a, start)
            b = min(b, end)
            moves[block].append((a, b, out[a - start : b - start]))

    def _deliver(
        self,
        blocks: list[int],
        moves: Mapping[int, list[_Move]],
        cut_out: Mapping[int, _Uses],
        tally: Tally,
    ) -> None:
        """Reads blocks with one call. A block goes to its destination whole, or is cut between several destinations."""
        into: dict[int, memoryview] = {}
        for block in blocks:
            alone = moves.get(block, ())
            if len(alone) == 1 and alone[0][:2] == self._bounds(block) and block not in cut_out:
                into[block] = alone[0][2]
        for block, piece in self._pieces(blocks, tally, into):
            checked = self._verified(block, piece, tally)
            if block in into:
                if checked is not piece:
                    into[block][:] = checked
                continue
            origin = self._bounds(block)[0]
            raw = np.frombuffer(checked, np.uint8)
            for start, end, out in moves.get(block, ()):
                # A copy by NumPy does not hold the interpreter lock.
                np.asarray(out)[:] = raw[start - origin : end - origin]
            self._cut_out(block, raw, cut_out.get(block, ()))

    def _direct(self, cell: int, uses: list[CellUse]) -> memoryview | None:
        """The destination as bytes, if one whole cell goes to one contiguous place."""
        if len(uses) != 1:
            return None
        (use,) = uses
        part = use.out[use.into] if use.into else use.out
        if part.nbytes != int(self.offsets[cell + 1] - self.offsets[cell]) or not part.flags.c_contiguous:
            return None
        return part.reshape(-1).view(np.uint8).data

    def _cut_out(self, block: int, buffer: np.ndarray, cells: Sequence[tuple[int, list[CellUse]]]) -> None:
        """Takes whole cells out of a block, each to all of its uses."""
        start, _ = self._bounds(block)
        for cell, uses in cells:
            raw = buffer[int(self.offsets[cell]) - start : int(self.offsets[cell + 1]) - start]
            array = self._array(cell, raw, self.item.cell_shape(int(self.part.leaves[cell])))
            for use in uses:
                use.out[use.into] = array[use.source]

    def _large(self, cell: int, uses: list[CellUse], tally: Tally) -> None:
        """Reads a part of a cell that spans several blocks: only the blocks that hold the wanted rows.

        Leading axes with one wanted index are descended into, so that a piece of a long row costs only a piece.
        """
        shape = self.item.cell_shape(int(self.part.leaves[cell]))
        start = int(self.offsets[cell])
        end = int(self.offsets[cell + 1])
        row = end - start
        bounds = []
        for axis, size in enumerate(shape):
            row //= size
            low = min(use.source[axis].start for use in uses)
            high = max(use.source[axis].stop for use in uses)
            end = start + high * row
            start += low * row
            bounds.append((low, high))
            if high - low > 1:
                break
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        begin = self._bounds(first)[0]
        buffer = np.empty(self._bounds(last)[1] - begin, dtype=np.uint8)
        whole: dict[int, list[_Move]] = {}
        for block in range(first, last + 1):
            a, b = self._bounds(block)
            whole[block] = [(a, b, buffer[a - begin : b - begin].data)]
        for blocks in self._spans(whole):
            self._deliver(blocks, whole, {}, tally)
        sizes = [high - low for low, high in bounds]
        array = self._array(cell, buffer[start - begin : end - begin], (*sizes, *shape[len(sizes) :]))
        for use in uses:
            cuts = zip(use.source, bounds, strict=False)
            moved = tuple(slice(cut.start - low, cut.stop - low) for cut, (low, _) in cuts)
            use.out[use.into] = array[(*moved, *use.source[len(moved) :])]

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

    def _leaves_in(self, start: int, end: int) -> int:
        first, last = np.searchsorted(self.offsets, [start, end - 1], side="right") - 1
        cells = slice(max(int(first), 0), int(last) + 1)
        sized = np.diff(self.offsets)[cells] > 0  # others have no bytes that could be damaged
        return max(len(np.unique(self.part.leaves[cells][sized])), 1)
