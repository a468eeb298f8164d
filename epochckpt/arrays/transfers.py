"""Copies of arrays on accelerators, which may still be on their way to this process when training goes on.

`StorageOptions.snapshot` says where to:

- "device": one computation per device copies this process's cells into free memory of the device, in pieces. Background
  threads move one piece after another through pinned host memory. A step that donates the originals comes later in the
  order of computations, which every backend keeps.
- "pinned_host": to pinned host memory. On the platforms of `ORDERED_PLATFORMS` training goes on during the transfers:
  in XLA's source, a computation that gets a donated buffer waits for the transfers out of that buffer.
  (`PrepareArguments` in xla/pjrt/common_pjrt_client.cc waits for the "usage events" of donated buffers, and
  `CopyToMemorySpace` adds such an event.) On other platforms the transfers are awaited.
- "host": to pinned host memory, and the transfers are always awaited.
"""

import bisect
import collections
import functools
import itertools
import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, SingleDeviceSharding

from epochckpt.options import StorageOptions

HOST = frozenset({"cpu"})  # platforms whose arrays lie in this process's memory: they are not copied here
WRITE_BYTES = 8 * 2**20  # what a thread that writes takes at once, some blocks, unless a block is more
_PIECE_BYTES = 64 * 2**20  # as fast as larger ones: a transfer takes milliseconds
_SPARE = 16  # a copy on a device leaves at least this part of its memory free
ORDERED_PLATFORMS = frozenset({"gpu", "cpu"})  # donation waits for transfers, see above; libtpu's source is not public


class AcceleratorCell(NamedTuple):
    """One cell on an accelerator."""

    data: jax.Array  # the cell's shard, on one device
    cut: tuple[slice, ...] | None  # the part of that shard; None for all of it
    shard: Any = None  # equal for cells that are parts of one shard, which moves whole; None: it is the only one

    @property
    def nbytes(self) -> int:
        if self.cut is None:
            return self.data.nbytes
        return math.prod(s.stop - s.start for s in self.cut) * self.data.dtype.itemsize

    @property
    def moves_whole(self) -> bool:
        """Whether it moves to host memory with all of its shard; else its part is cut out on the device first."""
        return self.cut is None or self.shard is not None or not _is_on_device(self.data)


class TransferSettings:
    """How one manager copies what lies on accelerators, where up to `writers` threads ask for it at once.

    On platforms that are not `ordered`, donation does not wait for the copies.
    """

    def __init__(self, options: StorageOptions, writers: int, ordered: Collection[str] = ORDERED_PLATFORMS):
        self.how = options.snapshot
        self.ordered = ordered
        # For what a thread takes at once it holds at most two pieces. All together are half of the limit, if they may.
        limit = options.host_memory_limit_bytes
        wanted = _PIECE_BYTES if limit is None else min(limit // (4 * writers), _PIECE_BYTES)
        self.piece_bytes = max(wanted, WRITE_BYTES, options.block_bytes)
        self.window_bytes = 2 * writers * self.piece_bytes
        self._step_bytes: dict[Any, int] = {}  # by device, what steps have needed besides what stays
        self._copy_bytes: dict[Any, int] = {}  # by device, the largest copy so far

    def has_room(self, device: Any, nbytes: int) -> bool:
        """Whether a copy fits into a device's free memory beside what training needs there."""
        stats = _memory_stats(device)
        limit = stats.get("bytes_limit")
        used = stats.get("bytes_in_use")
        if not limit or used is None:
            return self.how == "device"  # the allocation will tell
        # At its peak the device held what stays, what a step needs for a moment and, maybe, a copy of ours.
        peak = stats.get("peak_bytes_in_use", used) - self._copy_bytes.get(device, 0)
        self._step_bytes[device] = max(self._step_bytes.get(device, 0), peak - used)
        return nbytes <= limit - used - max(self._step_bytes[device], limit // _SPARE)

    def note_copy(self, device: Any, nbytes: int) -> None:
        """Notes that a device has held a copy: its peak may be higher by so many bytes than what training needs."""
        self._copy_bytes[device] = max(self._copy_bytes.get(device, 0), nbytes)


class Copies:
    """What one save copies from accelerators. Nothing is copied before `start`.

    A cell reaches host memory in one of three ways. It is copied on its device, in pieces, which move later. Or the
    part of the shard that it is, is cut out on the device, and moves now. Or the shard moves whole, now.

    Attributes:
        host_bytes: host memory that the copies take, at most.
    """

    def __init__(self, settings: TransferSettings, cells: Sequence[AcceleratorCell]):
        self._settings = settings
        self._cells = cells
        by_device: dict[Any, list[int]] = {}
        if settings.how in ("auto", "device"):
            for i, cell in enumerate(cells):
                if _is_on_device(cell.data):
                    by_device.setdefault(_device(cell.data), []).append(i)
        # The numbers of the cells that are copied on each device which has room for all of its own.
        self._planned: dict[Any, list[int]] = {}
        device_bytes = 0
        for device, numbers in by_device.items():
            nbytes = self._bytes_of(numbers)
            if settings.has_room(device, nbytes):
                self._planned[device] = numbers
                device_bytes += nbytes
        planned = {i for numbers in self._planned.values() for i in numbers}
        moved: dict[Any, int] = {}  # bytes of all that moves when `start` is called; of a shard once
        for i, cell in enumerate(cells):
            if i not in planned:
                moved[self._key(i)] = cell.data.nbytes if cell.moves_whole else cell.nbytes
        self.host_bytes = min(device_bytes, settings.window_bytes) + sum(moved.values())

    def start(self) -> "list[Arriving]":
        """Starts all copies, and waits where that is needed; one result per cell."""
        if not self._cells:
            return []
        pieces = self._copied_on_devices()
        window = _TransferWindow(self._settings.window_bytes, [each for i in sorted(pieces) for each in pieces[i]])
        # The rest goes to host memory now.
        rest = [i for i in range(len(self._cells)) if i not in pieces]
        cut_out = self._cut_out_on_devices([i for i in rest if not self._cells[i].moves_whole])
        shards = self._whole_shards([i for i in rest if self._cells[i].moves_whole])
        transfers = [*cut_out.values(), *shards.values()]
        for transfer, moving in zip(transfers, _to_host([each.data for each in transfers]), strict=True):
            transfer.begin(moving)
        for transfer in transfers:
            if self._settings.how == "host" or _device(transfer.data).platform not in self._settings.ordered:
                transfer.wait()
        found = list[Arriving]()
        for i, cell in enumerate(self._cells):
            if i in pieces:
                found.append(Arriving(cell.nbytes, pieces[i], window=window))
            elif i in cut_out:
                found.append(Arriving(cell.nbytes, [cut_out[i]]))
            else:
                found.append(Arriving(cell.nbytes, [shards[self._key(i)]], cut=cell.cut))
        return found

    def _copied_on_devices(self) -> "dict[int, list[_Transfer]]":
        """Copies cells on the devices that have room; the pieces of each cell that was copied."""
        pieces: dict[int, list[_Transfer]] = {}
        for device, numbers in self._planned.items():
            try:
                pieces |= self._copy(device, numbers, self._settings.piece_bytes)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                text = "%s has no memory for a copy of what is saved: it is copied to host memory instead"
                logging.log_first_n(logging.WARNING, text, 3, device)
            else:
                self._settings.note_copy(device, self._bytes_of(numbers))
        return pieces

    def _cut_out_on_devices(self, numbers: Sequence[int]) -> "dict[int, _Transfer]":
        """Copies cells that are parts of shards, on their devices; one transfer per cell."""
        by_device: dict[Any, list[int]] = {}
        for i in numbers:
            by_device.setdefault(_device(self._cells[i].data), []).append(i)
        found: dict[int, _Transfer] = {}
        for device, group in by_device.items():
            for i, pieces in self._copy(device, group, math.inf).items():
                (found[i],) = pieces
        return found

    def _whole_shards(self, numbers: Sequence[int]) -> "dict[Any, _Transfer]":
        """The shards of cells, by the keys of these cells; each shard once."""
        found: dict[Any, _Transfer] = {}
        for i in numbers:
            found.setdefault(self._key(i), _Transfer(self._cells[i].data))
        return found

    def _key(self, i: int) -> Any:
        """A key that cells share which are parts of one shard and move with it."""
        cell = self._cells[i]
        return i if cell.shard is None else cell.shard

    def _bytes_of(self, numbers: Sequence[int]) -> int:
        return sum(self._cells[i].nbytes for i in numbers)

    def _copy(self, device: Any, numbers: Sequence[int], piece_bytes: float) -> "dict[int, list[_Transfer]]":
        """Copies cells on their device, in pieces."""
        parts = tuple(_parts(self._cells[i], piece_bytes) for i in numbers)
        with jax.set_mesh(Mesh(np.array([device]), ("_",))):  # training may have set one of more devices
            copies = _copy_parts([self._cells[i].data for i in numbers], parts)
        return {i: [_Transfer(piece) for piece in each] for i, each in zip(numbers, copies, strict=True)}


@functools.partial(jax.jit, static_argnums=1)
def _copy_parts(arrays: Sequence[jax.Array], parts: Any) -> list[list[jax.Array]]:
    """Copies of the given parts of arrays, each a pair of first indices and ends, or None for all of the array."""
    return [
        [jnp.copy(x if part is None else jax.lax.slice(x, *part)) for part in each]
        for x, each in zip(arrays, parts, strict=True)
    ]


def _parts(cell: AcceleratorCell, piece_bytes: float) -> tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]:
    """Cuts a cell into contiguous pieces of at most so many bytes, as long as that is more than an element."""
    if cell.nbytes <= piece_bytes and cell.cut is None:
        return (None,)
    box = [(0, d) for d in cell.data.shape] if cell.cut is None else [(s.start, s.stop) for s in cell.cut]
    axis = len(box)
    row = cell.data.dtype.itemsize
    while axis and row * (box[axis - 1][1] - box[axis - 1][0]) <= piece_bytes:
        axis -= 1
        row *= box[axis][1] - box[axis][0]
    inner = box[axis:]
    # Axes before the last that is too long are cut at every index, that one into ranges.
    steps = [*[1] * (axis - 1), int(max(piece_bytes // row, 1))] if axis else []
    found = []
    starts = [range(start, stop, step) for (start, stop), step in zip(box, steps, strict=False)]
    for first in itertools.product(*starts):
        ends = [min(i + step, end) for i, step, (_, end) in zip(first, steps, box, strict=False)]
        found.append(((*first, *(start for start, _ in inner)), (*ends, *(end for _, end in inner))))
    return tuple(found)


class _Transfer:
    """An array that moves to host memory, or waits to.

    Attributes:
        data: the array, where it is now; None once all of it has been written.
        nbytes: its bytes.
        begun: whether it moves, or has moved.
    """

    __slots__ = ("_unwritten", "begun", "data", "nbytes")

    def __init__(self, data: jax.Array):
        self.data: Any = data
        self.nbytes = data.nbytes
        self.begun = False
        self._unwritten = data.nbytes

    def begin(self, moving: jax.Array) -> None:
        """It moves: `moving` is the array in host memory, or on its way there."""
        self.data = moving
        self.begun = True

    def wrote(self, nbytes: int) -> bool:
        """Notes that some bytes have been written; returns True with the last ones, when its memory is free."""
        self._unwritten -= nbytes
        if self._unwritten:
            return False
        self.data = None
        return True

    def wait(self) -> np.ndarray:
        """All of it in host memory, C-contiguous."""
        if not isinstance(self.data, np.ndarray):
            self.data = np.ascontiguousarray(self.data)
        return self.data


class _TransferWindow:
    """Moves pieces from devices to host memory, in order, so many bytes ahead; used by background threads only."""

    def __init__(self, nbytes: int, pieces: Iterable[_Transfer]):
        self._free = nbytes
        self._queue = collections.deque(pieces)
        self._lock = threading.Lock()

    def get(self, piece: _Transfer) -> np.ndarray:
        """The bytes of a piece, also if there is no room: its caller cannot go on without it."""
        with self._lock:
            self._start(piece)
            while self._queue and (self._queue[0].begun or self._queue[0].nbytes <= self._free):
                self._start(self._queue.popleft())
        return piece.wait()

    def _start(self, piece: _Transfer) -> None:
        if not piece.begun:
            self._free -= piece.nbytes
            (moving,) = _to_host([piece.data])
            piece.begin(moving)

    def wrote(self, piece: _Transfer, nbytes: int) -> None:
        """Some bytes of a piece have been written. With the last ones its memory is free."""
        with self._lock:
            if piece.wrote(nbytes):
                self._free += piece.nbytes


class Arriving:
    """The bytes of one cell that may still be on their way; does what `snapshot.Buffer` does."""

    sample = None  # the memory is ours

    def __init__(
        self,
        nbytes: int,
        pieces: Sequence[_Transfer],
        cut: tuple[slice, ...] | None = None,
        window: _TransferWindow | None = None,
    ):
        self._pieces = pieces
        self._cut = cut
        self._window = window
        self._ends = list(itertools.accumulate(piece.nbytes for piece in pieces))
        self.nbytes = nbytes

    @property
    def array(self) -> np.ndarray:
        """All bytes, C-contiguous; waits for them. Of a cell in several pieces the shape is lost."""
        found = [piece.wait() if self._window is None else self._window.get(piece) for piece in self._pieces]
        if len(found) > 1:
            return np.concatenate([each.reshape(-1) for each in found])
        return np.ascontiguousarray(found[0] if self._cut is None else found[0][self._cut])

    def data(self, start: int, stop: int) -> Any:
        """The bytes from `start` to `stop`."""
        if len(self._pieces) == 1 or self._window is None:
            return _bytes(self.array)[start:stop]
        found = [_bytes(self._window.get(p))[low:high] for p, low, high in self._overlaps(start, stop)]
        return found[0] if len(found) == 1 else b"".join(found)

    def _overlaps(self, start: int, stop: int) -> list[tuple[_Transfer, int, int]]:
        """The pieces that some of these bytes lie in, and which of each piece's bytes that are."""
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._ends, stop)
        found = []
        for piece, end in zip(self._pieces[first : last + 1], self._ends[first : last + 1], strict=True):
            begin = end - piece.nbytes
            found.append((piece, max(start - begin, 0), min(stop - begin, piece.nbytes)))
        return found

    def unchanged(self) -> bool:
        return True

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Some bytes have been written, for the first and last time."""
        if self._window is not None:
            for piece, low, high in self._overlaps(start, self._ends[-1] if stop is None else stop):
                self._window.wrote(piece, high - low)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _device(data: jax.Array) -> Any:
    (device,) = data.sharding.device_set
    return device


def _memory_stats(device: Any) -> Mapping[str, int]:
    """What a device says of its memory, in bytes; empty if it says nothing."""
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}


def _is_on_device(data: jax.Array) -> bool:
    """Whether an array lies in its device's own memory, rather than in the host's."""
    return data.sharding.memory_kind in (None, _device(data).default_memory().kind)


@functools.cache
def _pinned(device: Any) -> SingleDeviceSharding | None:
    if any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        return SingleDeviceSharding(device, memory_kind="pinned_host")
    return None


def _to_host(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Starts moving arrays to host memory of our own, pinned where the backend has it; their copies there."""
    found = list(arrays)
    pinned = [i for i, data in enumerate(arrays) if _pinned(_device(data)) is not None]
    # What already lies in pinned memory would be returned as it is, and with it the memory that training may donate.
    may_alias = [None if _is_on_device(arrays[i]) else False for i in pinned]
    copies = jax.device_put(
        [arrays[i] for i in pinned], [_pinned(_device(arrays[i])) for i in pinned], may_alias=may_alias
    )
    for i, copy in zip(pinned, copies, strict=True):
        found[i] = copy
    for data in found:
        if _pinned(_device(data)) is None:
            data.copy_to_host_async()
    return found
