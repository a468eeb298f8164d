"""Plans the reads for the requested leaves of an item, and builds the values of the leaves from the bytes.

Small arrays, which most trees have most of, are read together, into memory that they share.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from epochckpt import _collector, _progress
from epochckpt.arrays.broadcast import Sharing, Source
from epochckpt.arrays.leaf_values import LeafValues, on_devices
from epochckpt.arrays.node_files import Pack
from epochckpt.arrays.reader import ArraySource, Reads, Request
from epochckpt.arrays.sharding_grids import boxes_of_devices
from epochckpt.arrays.shardings import key_dims
from epochckpt.arrays.targets import LeafRequest, RestoredForm
from epochckpt.errors import MismatchError
from epochckpt.format import ArrayItem, Box, Leaf
from epochckpt.format.grid import box_shape, whole
from epochckpt.storage.mmap import JAX_ALIGNMENT, aligned, fresh

_ALIGN_FROM = 64 * 1024
_MAP_FROM = 2**20
_PACKED_BELOW = 16 * 2**20
PACK_BYTES = 32 * 2**20  # of whole leaves that share memory; an array on a CPU may keep all of it


class _LeafBoxes(NamedTuple):
    """The boxes of one array that devices of this process need."""

    boxes: list[Box]
    can_be_packed: bool  # they are one cell: the leaf is read together with others
    keeps_memory: bool  # the arrays on the devices go on using the host's memory


_ByBox = dict[Box, np.ndarray]
_Planned = np.ndarray | _ByBox | _LeafBoxes | None
"""Where the bytes of a leaf are read to: one buffer, for a NumPy or Python value; a buffer for each box of a jax array;
for `_LeafBoxes`, memory that it shares with other leaves. None: a value of the record, or of the caller."""


class Assembly:
    """The restore of leaves of one item, in one batch, or in several where host memory is bounded."""

    def __init__(
        self,
        reader: ArraySource,
        name: str,
        sharing: Sharing | None = None,
        memory_limit_bytes: int | None = None,
        pack_bytes: int = PACK_BYTES,
    ):
        entry = reader.record.items[name]
        assert entry.arrays is not None, "callers choose array items"
        self.reader = reader
        self.name = name
        self.item = entry.arrays
        self.values = LeafValues(f"{reader.folder}/epoch.json", entry.values)
        self.sharing = sharing
        self.memory_limit_bytes = memory_limit_bytes
        self.pack_bytes = pack_bytes
        self._boxes: dict[Any, _LeafBoxes] = {}  # by sharding and form: most arrays of a tree share them

    def run(self, requests: Sequence[LeafRequest]) -> Generator[Reads, None, list[Any]]:
        """Yields what is to be read, batch by batch; returns the values."""
        _progress.note("cast", sum(self.casts(request) for request in requests if request.dtype is not None))
        values: list[Any] = []
        for some in self._batches(requests):
            values += yield from self._run(some)
        if self.values.mismatches:
            raise MismatchError(self.name, self.reader.record.epoch, self.values.mismatches)
        return values

    def _run(self, requests: Sequence[LeafRequest]) -> Generator[Reads, None, list[Any]]:
        with _collector.paused():
            batch = _Batch(self, requests)
        if self.sharing is None:
            yield Reads(batch.reads, batch.packs)
        else:
            self.sharing.read(Source(self.reader.record, self.name, self.reader.read), requests, batch.reads)
        with _collector.paused():
            values = batch.values()
        if self.memory_limit_bytes is not None:
            jax.block_until_ready([value for value in values if isinstance(value, jax.Array)])  # then buffers are free
        return values

    def _batches(self, requests: Sequence[LeafRequest]) -> Iterator[Sequence[LeafRequest]]:
        """The requests, where host memory is bounded in as many groups as that takes."""
        if self.memory_limit_bytes is None:
            yield requests
            return
        start = held = 0
        for number, request in enumerate(requests):
            size = self._host_bytes(request)
            if held and held + size > self.memory_limit_bytes:
                yield requests[start:number]
                start = number
                held = 0
            held += size
        yield requests[start:]

    def _host_bytes(self, request: LeafRequest) -> int:
        """Host memory that a leaf needs until it is on its devices; the same on all processes if they share reads."""
        if request.leaf < 0:
            return 0
        leaf = self.item.leaves[request.leaf]
        cast = request.dtype is not None and request.dtype != leaf.dtype
        if leaf.dtype is None or (request.form != RestoredForm.JAX and not cast):
            return 0  # what is read is the result
        shape = leaf.shape if request.shape is None else request.shape
        itemsize = leaf.dtype.itemsize + (np.dtype(request.dtype).itemsize if cast else 0)
        if self.sharing is not None:
            return 2 * math.prod(shape) * itemsize  # a share of it is there twice
        return sum(math.prod(box_shape(box)) for box in _boxes_here(request.sharding, leaf, shape)) * itemsize

    def casts(self, request: LeafRequest) -> bool:
        """Whether a leaf gets another dtype than it was saved with."""
        dtype = self.item.leaves[request.leaf].dtype if request.leaf >= 0 else None
        return dtype is not None and dtype is not request.dtype and dtype != request.dtype

    def boxes(self, request: LeafRequest) -> _LeafBoxes:
        """The boxes of an array; one value for arrays of the same form."""
        leaf = self.item.leaves[request.leaf]
        key = id(request.sharding), request.shape, leaf.after_name
        found = self._boxes.get(key)
        if found is None:
            found = self._new_boxes(request, leaf)
            self._boxes[key] = found
        return found

    def _new_boxes(self, request: LeafRequest, leaf: Leaf) -> _LeafBoxes:
        shape = leaf.shape if request.shape is None else request.shape
        boxes = _boxes_here(request.sharding, leaf, shape)
        one_cell = (
            self.sharing is None
            and request.shape is None
            and leaf.grid >= 0
            and len(self.item.grids[leaf.grid].holders) == 1
        )
        devices = jax.local_devices() if request.sharding is None else request.sharding.device_set
        return _LeafBoxes(
            boxes=boxes,
            can_be_packed=one_cell and boxes == [whole(shape)] and 0 < leaf.nbytes < _PACKED_BELOW,
            keeps_memory=next(iter(devices)).platform == "cpu",
        )


class _Batch:
    """Leaves that are read at the same time.

    Attributes:
        reads: the boxes to be read, each into a buffer of its own.
        packs: the leaves to be read together.
    """

    def __init__(self, assembly: Assembly, requests: Sequence[LeafRequest]):
        self.reads: list[Request] = []
        self._assembly = assembly
        self._item: ArrayItem = assembly.item
        self._requests = requests
        self._keeps_memory: dict[int, bool] = {}  # by leaf that is read together with others: whether its array does
        self._packed: dict[int, np.ndarray] = {}  # the buffers of these leaves
        self._planned = [self._plan(request) for request in requests]
        self.packs = self._packs()

    def _plan(self, request: LeafRequest) -> _Planned:
        """Makes the buffers of one leaf, and notes what is to be read into them."""
        if request.leaf < 0 or self._item.leaves[request.leaf].dtype is None:
            return None
        leaf = self._item.leaves[request.leaf]
        if request.form != RestoredForm.JAX:
            return self._buffer(request.leaf, whole(leaf.shape if request.shape is None else request.shape))
        assembly = self._assembly
        needed = assembly.boxes(request)
        if not needed.can_be_packed:
            return {box: self._buffer(request.leaf, box) for box in needed.boxes}
        if leaf.nbytes >= _ALIGN_FROM:
            assembly.reader.check_files(assembly.name, request.leaf, needed.boxes[0])  # before memory is allocated
        casts = request.dtype is not None and assembly.casts(request)
        self._keeps_memory[request.leaf] = needed.keeps_memory and not casts
        return needed

    def _packs(self) -> list[Pack]:
        """Gives whole leaves their memory, aligned, and in the order of their files, so that most reads need no copy.

        Those whose memory is free once they are on their devices, or cast, are apart.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        for leaf in self._item.in_file_order(sorted(self._keeps_memory)):
            groups.setdefault((self._item.owner(leaf, 0), self._keeps_memory[leaf]), []).append(leaf)
        packs = []
        for (node, _), leaves in groups.items():
            sizes = np.array([self._item.leaves[i].nbytes for i in leaves], np.int64)
            ends = np.cumsum(-(-sizes // JAX_ALIGNMENT) * JAX_ALIGNMENT)
            starts = np.concatenate([[0], ends[:-1]])
            first = 0
            while first < len(leaves):
                last = max(int(np.searchsorted(ends, starts[first] + self._assembly.pack_bytes, "right")), first + 1)
                numbers = leaves[first:last]
                at = starts[first:last] - starts[first]
                out = _memory(int(ends[last - 1] - starts[first]))
                packs.append(Pack(self._assembly.name, node, np.array(numbers), at, sizes[first:last], out))
                for leaf, start in zip(numbers, at.tolist(), strict=True):
                    info = self._item.leaves[leaf]
                    self._packed[leaf] = np.ndarray(info.shape, info.dtype, out, start)
                first = last
        return packs

    def _buffer(self, leaf: int, box: Box) -> np.ndarray:
        """A buffer that a box of a leaf is read into; zeros where the box reaches beyond the leaf."""
        info = self._item.leaves[leaf]
        assert info.dtype is not None
        inside = tuple([(min(a, n), min(b, n)) for (a, b), n in zip(box, info.shape, strict=True)])
        read = inside == box or all(a < b for a, b in inside)
        if read:
            self._assembly.reader.check_files(self._assembly.name, leaf, inside)  # before memory is allocated
        if inside == box:
            out = part = _empty(box_shape(box), info.dtype)
        else:
            out = np.zeros(box_shape(box), info.dtype)
            part = out[tuple(slice(0, n) for n in box_shape(inside))]
        if read:
            self.reads.append(Request(self._assembly.name, leaf, inside, part))
        return out

    def values(self) -> list[Any]:
        """The values of the leaves, from the buffers that their bytes were read into."""
        placed = [*map(self._placed, self._requests, self._planned)]
        with jax.transfer_guard_host_to_device("allow"):  # a restore is asked for
            return [self._value(request, data) for request, data in zip(self._requests, placed, strict=True)]

    def _placed(self, request: LeafRequest, planned: _Planned) -> np.ndarray | _ByBox | None:
        """The buffers of a leaf, those of a jax array cast: before the first array goes to a device."""
        if isinstance(planned, _LeafBoxes):
            planned = {planned.boxes[0]: self._packed[request.leaf]}
        if not isinstance(planned, dict):
            return planned
        leaf = self._item.leaves[request.leaf]
        return {box: self._assembly.values.cast(leaf, buffer, request.dtype) for box, buffer in planned.items()}

    def _value(self, request: LeafRequest, data: np.ndarray | _ByBox | None) -> Any:
        """The value of a request."""
        if request.leaf < 0:
            return request.value
        leaf = self._item.leaves[request.leaf]
        values = self._assembly.values
        if isinstance(data, dict):  # what will be refused reaches no device; the rest of it is only looked through
            return None if values.mismatches else on_devices(leaf, request, data)
        return values.of_record(leaf, request) if data is None else values.of_buffer(leaf, request, data)


def _boxes_here(sharding: Sharding | None, leaf: Leaf, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of an array of this shape that devices of this process hold; of typed keys with their data."""
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return [whole(shape)]
    logical = shape[: len(shape) - (key_dims(leaf) if leaf.kind == "prng" else 0)]
    boxes = boxes_of_devices(sharding, logical).values()
    return list(dict.fromkeys(box + whole(shape[len(box) :]) for box in boxes))


def _empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-contiguous array, aligned so that jax can use its memory without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _ALIGN_FROM:
        return np.empty(shape, dtype)
    return aligned(nbytes).view(dtype).reshape(shape)


def _memory(nbytes: int) -> np.ndarray:
    """Memory for leaves that are read together.

    In memory of its own an array lies partly beside huge pages: 82,000 small ones were touched when 400 arrays, 600 MB,
    were restored, which took as long as all the rest.
    """
    return fresh(nbytes) if nbytes >= _MAP_FROM else aligned(nbytes)
