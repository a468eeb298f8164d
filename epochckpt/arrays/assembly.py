"""Plans the reads for the requested leaves of an item, and builds the values of the leaves from the bytes.

Small arrays, which most trees have most of, are read together, into memory that they share.
"""

import abc
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from epochckpt import _collector, _progress
from epochckpt.arrays.broadcast import Sharing, Source
from epochckpt.arrays.leaf_values import LeafValues, boxes_on_devices, on_devices, uncommitted
from epochckpt.arrays.node_files import Pack
from epochckpt.arrays.reader import ArraySource, Reads, Request
from epochckpt.arrays.sharding_grids import boxes_of_devices
from epochckpt.arrays.shardings import key_dims
from epochckpt.arrays.targets import Kept, LeafRequest, RestoredAs, RestoredLeaf
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


class Assembly:
    """The restore of leaves of one item, in one batch, or in several where host memory is bounded.

    Attributes:
        item: the item as the epoch recorded it.
        leaf_values: makes the values of its leaves.
    """

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
        self.leaf_values = LeafValues(f"{reader.folder}/epoch.json", entry.values)
        self.sharing = sharing
        self.memory_limit_bytes = memory_limit_bytes
        self.pack_bytes = pack_bytes
        self._boxes: dict[Any, _LeafBoxes] = {}  # most arrays of a tree share them; the key is in `boxes`

    def run(self, requests: Sequence[LeafRequest]) -> Generator[Reads, None, list[Any]]:
        """Yields what is to be read, batch by batch; returns the values."""
        asked = [request for request in requests if isinstance(request, RestoredLeaf)]
        _progress.note("cast", sum(self.casts(request) for request in asked if request.dtype is not None))
        restored: list[Any] = []
        for batch in self._batches(asked):
            restored += yield from self._run(batch)
        if self.leaf_values.mismatches:
            raise MismatchError(self.name, self.reader.record.epoch, self.leaf_values.mismatches)
        if len(asked) == len(requests):
            return restored
        following = iter(restored)
        return [request.value if isinstance(request, Kept) else next(following) for request in requests]

    def _run(self, requests: Sequence[RestoredLeaf]) -> Generator[Reads, None, list[Any]]:
        with _collector.paused():
            batch = _Batch(self, requests)
        if self.sharing is None:
            yield Reads(batch.reads, batch.packs)
        else:
            self.sharing.read(Source(self.reader.record, self.name, self.reader.read), requests, batch.reads)
        with _collector.paused():
            restored = batch.restored()
        if self.memory_limit_bytes is not None:
            arrays = [value for value in restored if isinstance(value, jax.Array)]
            jax.block_until_ready(arrays)  # then the buffers are free
        return restored

    def _batches(self, requests: Sequence[RestoredLeaf]) -> Iterator[Sequence[RestoredLeaf]]:
        """The requests, where host memory is bounded in as many groups as that takes."""
        if self.memory_limit_bytes is None:
            yield requests
            return
        start = 0
        held = 0
        for number, request in enumerate(requests):
            size = self._host_bytes(request)
            if held and held + size > self.memory_limit_bytes:
                yield requests[start:number]
                start = number
                held = 0
            held += size
        yield requests[start:]

    def _host_bytes(self, request: RestoredLeaf) -> int:
        """Host memory that a leaf needs until it is on its devices; the same on all processes if they share reads."""
        leaf = self.item.leaves[request.leaf]
        cast = request.dtype is not None and request.dtype != leaf.dtype
        if leaf.dtype is None or (request.restored_as != RestoredAs.JAX and not cast):
            return 0  # what is read is the result
        shape = request.shape(leaf)
        itemsize = leaf.dtype.itemsize + (np.dtype(request.dtype).itemsize if cast else 0)
        if self.sharing is not None:
            return 2 * math.prod(shape) * itemsize  # a share of it is there twice
        return sum(math.prod(box_shape(box)) for box in _boxes_here(request.sharding, leaf, shape)) * itemsize

    def casts(self, request: RestoredLeaf) -> bool:
        """Whether a leaf gets another dtype than it was saved with."""
        dtype = self.item.leaves[request.leaf].dtype
        return dtype is not None and dtype is not request.dtype and dtype != request.dtype

    def boxes(self, request: RestoredLeaf) -> _LeafBoxes:
        """The boxes of an array; one value for all arrays that differ in their names only."""
        leaf = self.item.leaves[request.leaf]
        key = id(request.sharding), request.new_shape, leaf.after_name
        found = self._boxes.get(key)
        if found is None:
            found = self._new_boxes(request, leaf)
            self._boxes[key] = found
        return found

    def _new_boxes(self, request: RestoredLeaf, leaf: Leaf) -> _LeafBoxes:
        shape = request.shape(leaf)
        boxes = _boxes_here(request.sharding, leaf, shape)
        one_cell = (
            self.sharing is None
            and request.new_shape is None
            and leaf.grid >= 0
            and len(self.item.grids[leaf.grid].holders) == 1
        )
        devices = jax.local_devices() if request.sharding is None else request.sharding.device_set
        return _LeafBoxes(
            boxes=boxes,
            can_be_packed=one_cell and boxes == [whole(shape)] and 0 < leaf.nbytes < _PACKED_BELOW,
            keeps_memory=next(iter(devices)).platform == "cpu",
        )


class _Place(abc.ABC):
    """Where the bytes of a leaf, or of several leaves, are read to; it makes the values of them.

    `data` is called for all leaves of a batch before `value` is called for the first one. So a cast that loses values
    is noticed before any array reaches a device.
    """

    def __init__(self, item: ArrayItem, leaf_values: LeafValues):
        self.item = item
        self.leaf_values = leaf_values

    @abc.abstractmethod
    def data(self, request: RestoredLeaf) -> Any:
        """What was read of the leaf of a request; that of a jax array with the requested dtype."""

    @abc.abstractmethod
    def value(self, request: RestoredLeaf, data: Any) -> Any:
        """The value of the leaf. Nothing goes to a device once there are mismatches: the restore will be refused."""


class _InRecord(_Place):
    """The place of leaves that the commit record has, and of which nothing is read."""

    def data(self, request: RestoredLeaf) -> None:
        return None

    def value(self, request: RestoredLeaf, data: None) -> Any:
        return self.leaf_values.of_record(self.item.leaves[request.leaf], request)


class _OneBuffer(_Place):
    """The place of a leaf that becomes a NumPy or Python value."""

    def __init__(self, item: ArrayItem, leaf_values: LeafValues, buffer: np.ndarray):
        super().__init__(item, leaf_values)
        self._buffer = buffer

    def data(self, request: RestoredLeaf) -> np.ndarray:
        return self._buffer

    def value(self, request: RestoredLeaf, data: np.ndarray) -> Any:
        return self.leaf_values.of_buffer(self.item.leaves[request.leaf], request, data)


class _BufferPerBox(_Place):
    """The place of a leaf that becomes a jax array and needs memory of its own."""

    def __init__(self, item: ArrayItem, leaf_values: LeafValues, buffers: Mapping[Box, np.ndarray]):
        super().__init__(item, leaf_values)
        self._buffers = buffers

    def data(self, request: RestoredLeaf) -> dict[Box, np.ndarray]:
        leaf = self.item.leaves[request.leaf]
        return {box: self.leaf_values.cast(leaf, buffer, request.dtype) for box, buffer in self._buffers.items()}

    def value(self, request: RestoredLeaf, data: Mapping[Box, np.ndarray]) -> Any:
        if self.leaf_values.mismatches:
            return None
        return boxes_on_devices(self.item.leaves[request.leaf], request, data)


class _SharedMemory(_Place):
    """The place of all leaves of a batch that become jax arrays and are read together."""

    def __init__(self, item: ArrayItem, leaf_values: LeafValues, name: str, pack_bytes: int):
        super().__init__(item, leaf_values)
        self._name = name
        self._pack_bytes = pack_bytes
        self._keeps_memory: dict[int, bool] = {}  # by leaf: whether its array goes on using this memory
        self._buffers: dict[int, np.ndarray] = {}  # by leaf

    def add(self, leaf: int, keeps_memory: bool) -> None:
        """Adds a leaf; `keeps_memory` says whether its array goes on using the memory."""
        self._keeps_memory[leaf] = keeps_memory

    def allocate(self) -> list[Pack]:
        """Gives the leaves their memory, aligned, and in the order of their files, so that most reads need no copy.

        Those whose memory is free once they are on their devices, or cast, are apart.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        for leaf in self.item.in_file_order(sorted(self._keeps_memory)):
            groups.setdefault((self.item.owner(leaf, 0), self._keeps_memory[leaf]), []).append(leaf)
        packs = list[Pack]()
        for (node, _), leaves in groups.items():
            sizes = np.array([self.item.leaves[i].nbytes for i in leaves], np.int64)
            ends = np.cumsum(-(-sizes // JAX_ALIGNMENT) * JAX_ALIGNMENT)
            starts = np.concatenate([[0], ends[:-1]])
            first = 0
            while first < len(leaves):
                last = max(int(np.searchsorted(ends, starts[first] + self._pack_bytes, "right")), first + 1)
                numbers = leaves[first:last]
                pack = Pack(
                    item=self._name,
                    node=node,
                    leaves=np.array(numbers),
                    starts=starts[first:last] - starts[first],
                    sizes=sizes[first:last],
                    out=_memory(int(ends[last - 1] - starts[first])),
                )
                packs.append(pack)
                for leaf, start in zip(numbers, pack.starts.tolist(), strict=True):
                    info = self.item.leaves[leaf]
                    self._buffers[leaf] = np.ndarray(info.shape, info.dtype, pack.out, start)
                first = last
        return packs

    def data(self, request: RestoredLeaf) -> np.ndarray:
        return self.leaf_values.cast(self.item.leaves[request.leaf], self._buffers[request.leaf], request.dtype)

    def value(self, request: RestoredLeaf, data: np.ndarray) -> Any:
        return None if self.leaf_values.mismatches else on_devices(self.item.leaves[request.leaf], request, data)


class _Batch:
    """Leaves that are read at the same time.

    Attributes:
        reads: the boxes to be read, each into a buffer of its own.
        packs: the leaves to be read together.
    """

    def __init__(self, assembly: Assembly, requests: Sequence[RestoredLeaf]):
        self.reads: list[Request] = []
        self._assembly = assembly
        self._item = assembly.item
        self._leaf_values = assembly.leaf_values
        self._requests = requests
        self._in_record = _InRecord(self._item, self._leaf_values)
        self._shared = _SharedMemory(self._item, self._leaf_values, assembly.name, assembly.pack_bytes)
        self._places = [self._place(request) for request in requests]
        self.packs = self._shared.allocate()

    def _place(self, request: RestoredLeaf) -> _Place:
        """The place of one leaf; notes what is to be read into its buffers."""
        leaf = self._item.leaves[request.leaf]
        if leaf.dtype is None:
            return self._in_record
        if request.restored_as != RestoredAs.JAX:
            buffer = self._buffer(request.leaf, whole(request.shape(leaf)))
            return _OneBuffer(self._item, self._leaf_values, buffer)
        assembly = self._assembly
        needed = assembly.boxes(request)
        if not needed.can_be_packed:
            buffers = {box: self._buffer(request.leaf, box) for box in needed.boxes}
            return _BufferPerBox(self._item, self._leaf_values, buffers)
        if leaf.nbytes >= _ALIGN_FROM:
            assembly.reader.check_files(assembly.name, request.leaf, needed.boxes[0])  # before memory is allocated
        casts = request.dtype is not None and assembly.casts(request)
        self._shared.add(request.leaf, needed.keeps_memory and not casts)
        return self._shared

    def _buffer(self, leaf: int, box: Box) -> np.ndarray:
        """A buffer that a box of a leaf is read into; zeros where the box reaches beyond the leaf."""
        info = self._item.leaves[leaf]
        assert info.dtype is not None
        inside = tuple([(min(a, n), min(b, n)) for (a, b), n in zip(box, info.shape, strict=True)])
        read = inside == box or all(a < b for a, b in inside)
        if read:
            self._assembly.reader.check_files(self._assembly.name, leaf, inside)  # before memory is allocated
        if inside == box:
            out = _empty(box_shape(box), info.dtype)
            part = out
        else:
            out = np.zeros(box_shape(box), info.dtype)
            part = out[tuple(slice(0, n) for n in box_shape(inside))]
        if read:
            self.reads.append(Request(self._assembly.name, leaf, inside, part))
        return out

    def restored(self) -> list[Any]:
        """The values of the leaves, once their buffers are filled."""
        pairs = [*zip(self._places, self._requests, strict=True)]
        data = [place.data(request) for place, request in pairs]
        with jax.transfer_guard_host_to_device("allow"):  # a restore is asked for
            made = {} if self._leaf_values.mismatches else self._made_together(data)
            return [made[i] if i in made else place.value(request, data[i]) for i, (place, request) in enumerate(pairs)]

    def _made_together(self, data: Sequence[Any]) -> dict[int, jax.Array]:
        """The small arrays that are committed to no device, by their number in the batch."""
        pairs = enumerate(zip(self._places, self._requests, strict=True))
        numbers = [i for i, (place, request) in pairs if place is self._shared and request.sharding is None]
        leaves = [self._item.leaves[self._requests[i].leaf] for i in numbers]
        return dict(zip(numbers, uncommitted(leaves, [data[i] for i in numbers]), strict=True))


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
