"""Restores what several processes need by reading every byte once: each reads a share, and a collective spreads it.

The processes that need the same boxes of a leaf form a group. All leaves with the same groups are one stream. The bytes
of a stream are cut into pieces, in file order. Each process of a group reads and verifies its share of the pieces, some
consecutive ones. Then the shares are gathered, a chunk at a time, in every group at once.

Guarantees:
- no process enters a collective before all have agreed that they ask for the same leaves and shardings, and that each
  has read and verified its share. If one process fails, all of them raise its error;
- every process takes part in every agreement, or has told the others why it does not: see `Sharing.__exit__`;
- collectives run on the thread that restores, in the same order on every process;
- each byte is verified where it is read. Between the processes it has the protection of JAX's collectives, no more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from epochckpt import _threads, _units, errors
from epochckpt.arrays.reader import Request
from epochckpt.arrays.sharding_grids import device_cells
from epochckpt.arrays.shardings import logical_shape
from epochckpt.arrays.targets import RestoredAs, RestoredLeaf
from epochckpt.errors import CoordinationError, CoordinationTimeoutError, EpochCheckpointError, InvalidArgumentError
from epochckpt.format import ArrayItem, Box, EpochRecord, checksums, grid
from epochckpt.storage.mmap import JAX_ALIGNMENT, aligned

CHUNK_BYTES = 64 * 2**20  # the most that a process receives with one collective
_PIECE_BYTES = 4 * 2**20  # the default of `StorageOptions.block_bytes`: most cuts between pieces lie between blocks
_SLACK = 8  # cuts may be off by this part of a share, or by a block, where that saves reading a block twice

Groups = tuple[tuple[int, ...], ...]  # JAX process indices, ascending


class Source(NamedTuple):
    """What is read: an item of an epoch, and `read` of its `ArraySource`."""

    record: EpochRecord
    item: str
    read: Callable[[Sequence[Request]], None]

    @property
    def arrays(self) -> ArrayItem:
        found = self.record.items[self.item].arrays
        assert found is not None, "callers choose array items"
        return found


class _Piece(NamedTuple):
    """A box of a leaf whose bytes lie together, in C order."""

    node: int  # that wrote it
    itemsize: int  # of the leaf's elements
    leaf: int
    cell: int
    number: int  # of the piece in the cell
    box: Box
    nbytes: int
    begins_block: bool  # no block holds bytes of this piece and of the one before, as far as that is known

    @property
    def file_order(self) -> tuple[int, ...]:
        """Pieces in this order lie one after another in the files, in which leaves with larger elements come first."""
        ends = [end for side in self.box for end in side]
        return (self.node, -self.itemsize, self.leaf, self.cell, self.number, *ends)


class _Stream:
    """What the processes of one group read and spread; other groups do the same with their boxes."""

    def __init__(self, groups: Groups, me: int, source: Source, wanted: Mapping[tuple[int, Box], list[np.ndarray]]):
        self.groups = groups
        self.wanted = wanted
        members = next(group for group in groups if me in group)
        begins = functools.cache(functools.partial(_block_starts, source))
        pieces = [piece for leaf, box in wanted for piece in _pieces(source, leaf, box, begins)]
        pieces.sort(key=operator.attrgetter("file_order"))
        cuts = _cuts(pieces, len(members))
        self.shares = [pieces[start:stop] for start, stop in itertools.pairwise(cuts)]  # of each process of the group
        self.mine = self.shares[members.index(me)]
        self.nbytes = max(_padded_bytes(share) for share in self.shares)
        self.memory = aligned(_padded_bytes(self.mine))  # of this process's share

    def requests(self, source: Source) -> Iterator[Request]:
        """Reads of this process's share into its place."""
        at = 0
        for piece in self.mine:
            out = _typed(self.memory[at : at + piece.nbytes], source.arrays, piece)
            yield Request(source.item, piece.leaf, piece.box, out)
            at += _padded(piece.nbytes)

    def spread(self, arrays: ArrayItem, nbytes: int, chunk_bytes: int, timeout_secs: float) -> None:
        """Gathers the shares of this group, of at most `nbytes` each, and copies their pieces to their destinations."""
        count = len(self.shares)
        size = _part_bytes(nbytes, chunk_bytes // count)
        into = collections.defaultdict[int, list[tuple[Box, np.ndarray]]](list)
        for (leaf, box), outs in self.wanted.items():
            into[leaf] += [(box, out) for out in outs]
        sinks = [_Sink(share, arrays, into) for share in self.shares]
        for received in _gathered(self.groups, self.memory, size, -(-nbytes // size), timeout_secs):
            for sink, part in zip(sinks, received.reshape(count, size), strict=True):
                sink.take(part)


class _Sink:
    """Takes the bytes of one share, in order, and copies its pieces to their destinations."""

    def __init__(
        self, share: Sequence[_Piece], arrays: ArrayItem, into: Mapping[int, Sequence[tuple[Box, np.ndarray]]]
    ):
        self._left = collections.deque(share)
        self._arrays = arrays
        self._into = into
        self._begun: np.ndarray | None = None  # the piece that the last chunk had a part of
        self._have = 0  # bytes of it

    def take(self, data: np.ndarray) -> None:
        at = 0
        while self._left and at < len(data):
            piece = self._left[0]
            size = _padded(piece.nbytes)
            part = data[at : at + size - self._have]
            at += len(part)
            if self._begun is not None or len(part) < size:
                if self._begun is None:
                    self._begun = aligned(size)
                self._begun[self._have : self._have + len(part)] = part
                self._have += len(part)
                if self._have < size:
                    return
                part = self._begun
                self._begun = None
                self._have = 0
            self._left.popleft()
            self._deliver(piece, _typed(part[: piece.nbytes], self._arrays, piece))

    def _deliver(self, piece: _Piece, array: np.ndarray) -> None:
        for box, out in self._into[piece.leaf]:
            meet = grid.meet(piece.box, box)
            if all(start < stop for start, stop in meet):
                out[grid.slices(meet, box)] = array[grid.slices(meet, piece.box)]


class _State(enum.Enum):
    """Whether the processes of a restore still share their reads."""

    SHARING = "sharing"
    OVER = "over"  # they agree on nothing any more: all have restored what they asked for, or know the error of one


@dataclasses.dataclass(frozen=True)
class _Plans:
    """A process tells what it is going to read together with others."""

    what: str  # for people
    digest: str  # of the leaves, shardings and groups

    step: ClassVar[str] = "plan"

    @property
    def must_agree(self) -> Any:
        return self.what, self.digest

    @property
    def text(self) -> str:
        return self.what


@dataclasses.dataclass(frozen=True)
class _HasRead:
    """A process tells that it has read its shares."""

    nbytes: Sequence[int]  # of each stream; 0 for a stream of other processes

    step: ClassVar[str] = "read"
    must_agree: ClassVar[Any] = None
    text: ClassVar[str] = "read its share"


@dataclasses.dataclass(frozen=True)
class _Done:
    """A process tells that it has restored everything."""

    step: ClassVar[str] = "all"
    must_agree: ClassVar[Any] = None
    text: ClassVar[str] = "restored all that it asked for"


@dataclasses.dataclass(frozen=True)
class _Failed:
    """A process tells its error."""

    error: Any  # as `errors.to_wire` has it

    step: ClassVar[str] = "error"


_Message = _Plans | _HasRead | _Done | _Failed
_MESSAGES: Mapping[str, type[_Message]] = {kind.step: kind for kind in (_Plans, _HasRead, _Done, _Failed)}


def _to_wire(message: _Message) -> dict[str, Any]:
    return {"step": message.step, **dataclasses.asdict(message)}


def _from_wire(told: Mapping[str, Any]) -> _Message:
    fields = {**told}
    return _MESSAGES[fields.pop("step")](**fields)


class Sharing:
    """One restore by several processes. A context manager, inside which each of them makes the same calls of `read`.

    `agree` gives every process the primary's `decide` of what all of them tell (an object as JSON), or raises its
    error; `processes` are the JAX indices of those that take part. A collective takes `chunk_bytes` to each process.
    """

    def __init__(
        self,
        processes: Sequence[int],
        agree: Callable[[Any], Any],
        timeout_secs: float,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self._me = jax.process_index()
        self._everyone = tuple(sorted(processes))
        self._agree = agree
        self._timeout_secs = timeout_secs
        self._chunk_bytes = chunk_bytes
        self._state = _State.SHARING
        self._groups: dict[Any, tuple[Groups | None, Any]] = {}

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Tells the other processes that this one is done, or its error if they do not have it yet."""
        if error is None:
            self._tell(_Done())
        else:
            self._fail(error)

    def read(self, source: Source, requests: Sequence[RestoredLeaf], reads: Sequence[Request]) -> None:
        """Reads like `source.read(reads)`, which the leaves of `requests` need; what several need is read once."""
        if self._state is _State.OVER:  # after an error: this process reads from the mirror, and the others may not
            source.read(reads)
            return
        streams, alone = self._planned(source, requests, reads)
        mine = [stream for stream in streams if stream is not None]
        try:
            source.read([*alone, *(request for stream in mine for request in stream.requests(source))])
        except BaseException as error:
            self._fail(error)
            raise
        sizes = self._tell(_HasRead([0 if stream is None else stream.nbytes for stream in streams]))
        for stream, nbytes in zip(streams, sizes, strict=True):
            if stream is not None and nbytes:
                stream.spread(source.arrays, nbytes, self._chunk_bytes, self._timeout_secs)

    def _planned(
        self, source: Source, requests: Sequence[RestoredLeaf], reads: Sequence[Request]
    ) -> tuple[list[_Stream | None], list[Request]]:
        """All streams, and the requests that this process reads alone. None stands for streams of other processes."""
        found: dict[int, set[Any]] = collections.defaultdict(set)
        rows = []
        for request in requests:
            if source.arrays.leaves[request.leaf].dtype is not None:
                groups, cells = self._of(request, source.arrays)
                found[request.leaf].add(groups)
                if groups is not None:
                    rows.append((request.leaf, request.new_shape, groups, cells))
        single = {leaf: next(iter(groups)) if len(groups) == 1 else None for leaf, groups in found.items()}
        wanted: dict[Groups, dict[tuple[int, Box], list[np.ndarray]]] = {
            groups: {} for groups in sorted({groups for groups in single.values() if groups is not None})
        }
        alone = []
        for read in reads:
            if (groups := single[read.leaf]) is None:
                alone.append(read)
            else:
                wanted[groups].setdefault((read.leaf, read.box), []).append(read.out)
        total = sum(source.arrays.leaves[leaf].nbytes for leaf, groups in single.items() if groups is not None)
        size = f"{_units.several(len(rows), 'leaf', 'leaves')} in common ({_units.nbytes(total)})"
        text = json.dumps([source.record.save_id, rows], default=str)
        what = f"checkpoint {source.record.epoch}, item {source.item!r}: {size}"
        self._tell(_Plans(what=what, digest=checksums.digest(text.encode())))
        streams = [
            _Stream(groups, self._me, source, outs) if any(self._me in group for group in groups) else None
            for groups, outs in wanted.items()
        ]
        return streams, alone

    def _of(self, request: RestoredLeaf, arrays: ArrayItem) -> tuple[Groups | None, Any]:
        """The processes that need the same parts of a leaf, None if it is not shared; and which parts that are."""
        sharding = request.sharding
        leaf = arrays.leaves[request.leaf]
        if request.restored_as != RestoredAs.JAX or sharding is None or isinstance(sharding, SingleDeviceSharding):
            return (self._everyone,), "whole"  # each process has its own
        shape = logical_shape(leaf) if request.new_shape is None else request.new_shape
        key = sharding, shape
        if key not in self._groups:
            counts, cells = device_cells(sharding, shape)
            self._groups[key] = self._grouped(counts, cells)
        return self._groups[key]

    def _grouped(self, counts: Sequence[int], cells: Mapping[Any, int]) -> tuple[Groups | None, Any]:
        held: dict[int, set[int]] = collections.defaultdict(set)
        for device, cell in cells.items():
            held[device.process_index].add(cell)
        alike: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
        for process in sorted(held):
            alike[tuple(sorted(held[process]))].append(process)
        if len({len(group) for group in alike.values()}) > 1 or len(alike) == len(held):
            return None, None
        if not held.keys() <= set(self._everyone):
            return None, None
        return tuple(sorted(map(tuple, alike.values()))), [counts, sorted(alike.items())]

    def _tell(self, message: _Message) -> list[int]:
        """Tells all processes; returns what `decide` has answered."""
        if self._state is _State.OVER:
            return []
        try:
            return self._agree(_to_wire(message))
        except BaseException:
            self._state = _State.OVER
            raise

    def _fail(self, error: BaseException) -> None:
        """Sends an error to the other processes, which raise it."""
        with contextlib.suppress(EpochCheckpointError):  # the answer is this very error, as a rule
            self._tell(_Failed(errors.to_wire(error)))
        self._state = _State.OVER


def decide(told: Sequence[Mapping[str, Any]], names: Callable[[Iterable[int]], str]) -> Any:
    """On the primary: its answer to what the processes tell; `names` names some of them. See `Sharing`.

    The answer is the largest share of each stream, in bytes, once all have read their shares; it is empty before.
    """
    messages = list[_Plans | _HasRead | _Done]()
    for message in map(_from_wire, told):
        if isinstance(message, _Failed):
            raise errors.from_wire(message.error)
        messages.append(message)
    steps = [(message.step, message.must_agree) for message in messages]
    if len(set(steps)) > 1:
        other = next(number for number, step in enumerate(steps) if step != steps[0])
        asked = [f"{names([number])} has {messages[number].text}" for number in (0, other)]
        raise InvalidArgumentError(
            f"the processes share what they read (broadcast_restore), and do not ask for the same: {'; '.join(asked)}. "
            "All of them restore the same leaves, with shardings over the devices of all; or set "
            "StorageOptions(broadcast_restore=False), and each reads for itself"
        )
    read = [message.nbytes for message in messages if isinstance(message, _HasRead)]
    return [max(sizes) for sizes in zip(*read, strict=True)]


def _pieces(source: Source, leaf: int, box: Box, begins: Callable[[int], set[tuple[int, int]]]) -> Iterator[_Piece]:
    """Cuts a box of a leaf by the cells that it lies in, and where these are large further; see `_block_starts`."""
    arrays = source.arrays
    info = source.arrays.leaves[leaf]
    assert info.dtype is not None
    itemsize = info.dtype.itemsize
    if info.grid < 0:  # of a step of stock Orbax: only Orbax knows its chunks
        nbytes = math.prod(grid.box_shape(box)) * itemsize
        if nbytes:
            yield _Piece(
                node=0,
                itemsize=itemsize,
                leaf=leaf,
                cell=0,
                number=0,
                box=box,
                nbytes=nbytes,
                begins_block=True,
            )
        return
    for cell in arrays.cells_touching(leaf, box):
        inside = arrays.cell_box(leaf, cell)
        meet = grid.meet(box, inside)
        owner = arrays.owner(leaf, cell)
        done = 0
        begins_block = (leaf, cell) in begins(owner)
        for number, part in enumerate(grid.boxes(grid.box_shape(meet), _PIECE_BYTES // itemsize)):
            nbytes = math.prod(grid.box_shape(part)) * itemsize
            moved = tuple((a + origin, b + origin) for (a, b), (origin, _) in zip(part, meet, strict=True))
            yield _Piece(
                node=owner,
                itemsize=itemsize,
                leaf=leaf,
                cell=cell,
                number=number,
                box=moved,
                nbytes=nbytes,
                begins_block=begins_block,
            )
            done += nbytes
            begins_block = meet == inside and done % _PIECE_BYTES == 0


def _block_starts(source: Source, node: int) -> set[tuple[int, int]]:
    """The (leaf, cell) with which blocks of a node's files begin, if they have the default size."""
    ends = np.cumsum([f.cells for f in source.record.nodes[node].files if f.item == source.item], dtype=np.int64)
    found = set[tuple[int, int]]()
    for part in source.arrays.cut(source.arrays.owned(node), ends.tolist()):
        first = np.isin(part.offsets[:-1], grid.blocks(np.diff(part.offsets), 0, _PIECE_BYTES))
        found.update(zip(part.leaves[first].tolist(), part.cells[first].tolist(), strict=True))
    return found


def _cuts(pieces: Sequence[_Piece], count: int) -> list[int]:
    """Numbers of the first pieces of each of `count` shares of about the same size, and of the end."""
    sizes = np.array([0, *(_padded(piece.nbytes) for piece in pieces)], dtype=np.int64)
    ends = np.cumsum(sizes)
    # A cut before one of these pieces makes no block be read twice.
    between_blocks = np.array(
        [0]
        + [
            number
            for number, (before, piece) in enumerate(itertools.pairwise(pieces), start=1)
            if piece.begins_block or piece.node != before.node
        ]
    )
    cuts = [0]
    share = int(ends[-1]) / count
    for number in range(1, count):
        off = np.abs(ends - share * number)
        best = between_blocks[off[between_blocks].argmin()]
        if off[best] > max(share / _SLACK, min(share / 2, _PIECE_BYTES)):
            best = off.argmin()
        cuts.append(max(int(best), cuts[-1]))
    return [*cuts, len(pieces)]


def _part_bytes(nbytes: int, limit: int) -> int:
    """The bytes of each share, of at most `nbytes`, that one collective gathers: all of it, or some below the limit.

    There are few such numbers, because each needs a program of its own: they are multiples of a sixteenth of the next
    power of two.
    """
    sixteenth = (1 << nbytes.bit_length()) // 16
    step = max(sixteenth, JAX_ALIGNMENT)
    return min(-(-nbytes // step) * step, max(_floor(limit), JAX_ALIGNMENT))


def _padded_bytes(pieces: Sequence[_Piece]) -> int:
    return sum(_padded(piece.nbytes) for piece in pieces)


def _padded(nbytes: int) -> int:
    return -(-nbytes // JAX_ALIGNMENT) * JAX_ALIGNMENT


def _floor(nbytes: int) -> int:
    return nbytes // JAX_ALIGNMENT * JAX_ALIGNMENT


def _typed(raw: np.ndarray, arrays: ArrayItem, piece: _Piece) -> np.ndarray:
    dtype = arrays.leaves[piece.leaf].dtype
    assert dtype is not None, "it has bytes"
    return raw.view(dtype).reshape(grid.box_shape(piece.box))


@functools.lru_cache(maxsize=16)
def _program(groups: Groups) -> tuple[NamedSharding, Any]:
    """The sharding of chunks, on one device of each process, and the program that gathers chunks."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([[first[process] for process in group] for group in groups]), ("groups", "members"))
    together = NamedSharding(mesh, PartitionSpec("groups"))
    return NamedSharding(mesh, PartitionSpec(("groups", "members"))), jax.jit(lambda data: data, out_shardings=together)


def _gathered(groups: Groups, share: np.ndarray, size: int, count: int, timeout_secs: float) -> Iterator[np.ndarray]:
    """For each of `count` chunks of `size` bytes of the shares: those of all processes of this one's group, together.

    The next chunk is under way while one is used.
    """
    apart, gather = _program(groups)
    (device,) = apart.addressable_devices

    def begin(number: int) -> jax.Array:
        part = share[number * size : (number + 1) * size]
        if len(part) < size:
            whole = aligned(size)
            whole[: len(part)] = part
            whole[len(part) :] = 0
            part = whole
        shape = (len(apart.device_set) * size,)
        return gather(jax.make_array_from_single_device_arrays(shape, apart, [jax.device_put(part, device)]))

    def arrived(begun: jax.Array) -> np.ndarray:
        local = begun.addressable_shards[0].data
        _threads.start(local.block_until_ready).result(timeout_secs)
        return np.asarray(local)

    problem = "what the processes have read could not be spread"
    under_way: collections.deque[jax.Array] = collections.deque()
    for number in range(count + 1):
        try:
            if number < count:
                under_way.append(begin(number))
            if not number:
                continue
            found = arrived(under_way.popleft())
        except TimeoutError:
            raise CoordinationTimeoutError(f"{problem}: a collective took longer than {timeout_secs:g} s") from None
        except (RuntimeError, ValueError) as error:
            raise CoordinationError(f"{problem}; as a rule because one of them has ended: {error}") from error
        yield found
