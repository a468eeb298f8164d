"""From the plan of a save to a snapshot: the copies that training can no longer change.

`SavePlan.place_copies` says how much host memory the snapshot will need. Then `SavePlan.snapshot` takes the `Snapshot`,
on the training thread: it makes the records of the items, starts the handlers that are not ours, and has `take` make
the buffers of each tree. After that training may change, or donate, everything:

- small cells that lie in host memory: copied to one piece of memory, the *slab*, with a few calls for all of them.
- other jax arrays on CPU: zero-copy views of the owned shards (a view keeps a donated buffer alive). They leave a
  sample of their bytes, because jax may alias NumPy memory that the caller can still change.
- jax arrays on accelerators: copies on the device, or in host memory, which may still be on their way: `transfers`.
- other NumPy leaves: copied. Only the files of an import (`Mapped`, and arrays that are `Assembled` of them) are
  streamed from the page cache, with a sample.
"""

import collections
import dataclasses
import functools
import mmap
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from epochckpt import _collector
from epochckpt._threads import Deadline
from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays.plan import CellSource, HostSource, ItemPlan, PlanDigest, ShardSource
from epochckpt.arrays.save_items import FileItem, HandlerItem, SaveItem, TreeItem
from epochckpt.arrays.transfers import AcceleratorCell, Arriving, Copies, TransferSettings
from epochckpt.errors import InvalidArgumentError, SaveError, say
from epochckpt.format import ItemRecord
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import HandlerSave
from epochckpt.storage import mmap as memory_map
from epochckpt.storage.mapped import Mapped

_SAMPLES = 16  # each is a miss of the processor's cache, and the training thread waits for it


class PlannedTree(NamedTuple):
    """One pytree of a save, before its snapshot."""

    plan: ItemPlan
    node: int  # the number of the node that writes it
    leaves: Sequence[Any]  # in flattening order


@dataclasses.dataclass
class Snapshot:
    """What a save holds once the training thread goes on."""

    trees: "list[TreeSnapshot]" = dataclasses.field(default_factory=list)  # emptied as soon as they are written
    # Of cells that other nodes own; emptied, too.
    replicas: "list[TreeSnapshot]" = dataclasses.field(default_factory=list)
    # Of cells that every process has, see `ItemPlan.compared`; emptied, too.
    compared: "list[TreeSnapshot]" = dataclasses.field(default_factory=list)
    items: dict[str, ItemRecord] = dataclasses.field(default_factory=dict)  # as the epoch will record them
    own: dict[int, dict[str, ItemRecord]] = dataclasses.field(default_factory=dict)  # as each node records its own
    # Files of known content that this process writes, by item and path in the item's folder.
    files: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    running: Sequence[HandlerSave] = ()  # handlers that still write, or may; removed once their files are written
    plan_digest: PlanDigest | None = None
    host_copy_bytes: int = 0  # host memory that its copies take, at most

    @property
    def digest(self) -> str:
        """The digest of the plan, which must be the same on all processes; of nothing it is an empty text."""
        return "" if self.plan_digest is None else self.plan_digest.text

    @property
    def runs_handlers(self) -> bool:
        """Whether handlers still write, or may."""
        return bool(self.running)

    def collect(self, epoch: int, deadline: Deadline) -> dict[tuple[str, str], bytes | pathlib.Path]:
        """Waits for the handlers; returns all files to write, by item and path in the item's folder."""
        found: dict[tuple[str, str], bytes | pathlib.Path] = {}
        for save in self.running:
            try:
                new = save.collect(deadline)
            except BaseException as error:  # asyncio's CancelledError is one
                raise SaveError(epoch, f"item {save.item!r}: its handler failed: {say(error)}") from error
            found.update({(save.item, name): path for name, path in new.items()})
        return {**found, **self.files}

    def drop_arrays(self) -> None:
        """Lets go of the copies of arrays."""
        self.trees = []
        self.replicas = []
        self.compared = []

    def drop(self) -> None:
        """Lets go of the copies, and removes what handlers have written."""
        self.drop_arrays()
        self.files = {}
        for save in self.running:
            save.discard()
        self.running = ()


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """This process's part in one save. Nothing has been copied or run yet."""

    items: Sequence[SaveItem]
    trees: Sequence[PlannedTree]  # every pytree of the items that this process writes
    digest: PlanDigest
    primary: bool  # whether this process writes what only one process writes
    transfer_settings: TransferSettings

    def place_copies(self) -> int:
        """Decides where cells on accelerators are copied to; returns the host memory of all copies, in bytes.

        The snapshot holds at most so many bytes of copies.
        """
        return self._host_copy_bytes

    @functools.cached_property
    def _host_copy_bytes(self) -> int:
        on_host = sum(tree.plan.host_copy_bytes + _strided_bytes(tree) for tree in self._taken)
        return on_host + self._copies.host_bytes

    @functools.cached_property
    def _copies(self) -> Copies:
        """The copies of cells on accelerators, in the order of `take`. To make them decides where each cell goes."""
        cells = list[AcceleratorCell]()
        for number, tree in enumerate(self._taken):
            for source in tree.plan.accelerator_sources:
                shard = (number, source.leaf, source.shard) if source.moves_whole else None
                cells.append(AcceleratorCell(data=_shard(tree.plan, tree.leaves, source), cut=source.cut, shard=shard))
        return Copies(self.transfer_settings, cells)

    @property
    def _replicas(self) -> list[PlannedTree]:
        """The replicas that this process writes: cells that other nodes own."""
        return [tree._replace(plan=tree.plan.replicas) for tree in self.trees if tree.plan.replicas is not None]

    @property
    def _compared(self) -> list[PlannedTree]:
        """What this process compares with the others."""
        return [tree._replace(plan=tree.plan.compared) for tree in self.trees if tree.plan.compared is not None]

    @property
    def _taken(self) -> list[PlannedTree]:
        """All that the snapshot holds, in this order."""
        return [*self.trees, *self._replicas, *self._compared]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, on all nodes together; of a node's own those of this process."""
        return sum(tree.plan.nbytes for tree in self.trees)

    @property
    def runs_handlers(self) -> bool:
        """Whether handlers that are not ours take part."""
        return any(isinstance(item, HandlerItem) for item in self.items)

    def snapshot(self) -> Snapshot:
        """Takes the snapshot. Handlers that are not ours run their blocking part here."""
        # The records of the items. A node's own tree is recorded by that node, not by the epoch.
        items = {item.name: ItemRecord(kind=item.kind, handler=item.handler) for item in self.items}
        wanted = {item.name: item for item in self.items}
        own: dict[int, dict[str, ItemRecord]] = {}
        for plan, node, leaves in self.trees:
            item = wanted[plan.item.name]
            values = {i: tree_lib.value_to_json(leaves[i]) for i in plan.value_leaves}
            record = ItemRecord(kind=TreeItem.kind, arrays=plan.item, values=values)
            if isinstance(item, TreeItem):
                record = dataclasses.replace(record, handler=item.handler, custom_metadata=item.custom_metadata)
                items[item.name] = record
            else:
                own.setdefault(node, {})[item.name] = record
        # Handlers start one by one. If one of them, or a copy, fails, the started ones are ended.
        running: list[HandlerSave] = []
        try:
            for item in self.items:
                if isinstance(item, HandlerItem):
                    running.append(item.start())
            with _collector.paused():
                arriving = iter(self._copies.start())
                slab = memory_map.anonymous(sum(tree.plan.slab_bytes for tree in self._taken))
                trees = _take_trees(self.trees, arriving, slab)
                replicas = _take_trees(self._replicas, arriving, slab)
                compared = _take_trees(self._compared, arriving, slab)
        except BaseException:
            for save in running:
                save.discard()
            raise
        files = {(item.name, item.file): item.content for item in self.items if isinstance(item, FileItem)}
        return Snapshot(
            trees=trees,
            replicas=replicas,
            compared=compared,
            items=items,
            own=own,
            files=files if self.primary else {},
            running=running,
            plan_digest=self.digest,
            host_copy_bytes=self._host_copy_bytes,
        )


@dataclasses.dataclass(slots=True)
class Buffer:
    """The bytes of a cell range: of one cell, or of small ones that lie one after another."""

    array: np.ndarray  # C-contiguous; of one cell of the stored dtype
    sample: bytes | None = None  # some of its bytes at the time of the snapshot, if the memory is not ours

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def data(self, start: int, stop: int) -> Any:
        """The bytes from `start` to `stop`."""
        return self.array.reshape(-1).view(np.uint8).data[start:stop]

    def unchanged(self) -> bool:
        """False if memory that is not ours has visibly changed since the snapshot."""
        same = self.sample is None or _sample(self.array) == self.sample
        self.release()
        return same

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Some bytes have been written: those of a mapped file may leave this process's memory."""
        if isinstance(self.array, Mapped):
            memory_map.release(self.array, start, stop)


class AssembledBuffer(Buffer):
    """The bytes of one cell that is made of pieces of files: only those that are asked for are in memory."""

    def __init__(self, assembled: memory_map.Assembled):
        super().__init__(np.empty(0, np.uint8))
        self.assembled = assembled
        self.sample = self._sampled()

    @property
    def nbytes(self) -> int:
        return self.assembled.nbytes

    def data(self, start: int, stop: int) -> Any:
        size = self.assembled.dtype.itemsize
        first = start // size
        return self.assembled.read(first, -(-stop // size)).view(np.uint8).data[start - first * size :][: stop - start]

    def unchanged(self) -> bool:
        return self._sampled() == self.sample

    def _sampled(self) -> bytes:
        last = self.assembled.size - 1
        places = [*range(0, last, max(1, last // _SAMPLES)), last]
        return b"".join(self.assembled.read(at, at + 1).tobytes() for at in places)


class TreeSnapshot(NamedTuple):
    """One pytree of a snapshot."""

    plan: ItemPlan
    node: int  # the number of the node that writes it
    buffers: Sequence[Buffer | Arriving]  # one for each of the plan's `cell_ranges`


def _sample(array: np.ndarray) -> bytes:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _SAMPLES)].tobytes() + flat[-1:].tobytes()


def _take_trees(planned: Sequence[PlannedTree], arriving: Iterator[Arriving], slab: mmap.mmap) -> list[TreeSnapshot]:
    return [
        TreeSnapshot(plan=plan, node=node, buffers=take(plan, leaves, arriving, slab)) for plan, node, leaves in planned
    ]


def take(
    plan: ItemPlan, leaves: Sequence[Any], arriving: Iterator[Arriving], slab: mmap.mmap
) -> list[Buffer | Arriving]:
    """Copies, or views, the cells that this node writes; one buffer per cell range of the plan.

    Small ones are copied to `slab`, from where it stands. Those on accelerators are `arriving`, in the order of
    `ItemPlan.accelerator_sources`.
    """
    start = slab.tell()
    entries = plan.slab_entries
    try:
        _fill(slab, (leaves[i] if as_it_is else _content(plan, leaves, source) for i, as_it_is, source in entries))
    except (BufferError, ValueError):  # deleted, or laid out in another way
        slab.seek(start)
        _fill(slab, (_content(plan, leaves, source) for _, _, source in entries))
    assert slab.tell() == start + plan.slab_bytes, "the plan has the size of each leaf"
    slab_bytes = np.frombuffer(slab, np.uint8)
    found = list[Buffer | Arriving]()
    for cells in plan.cell_ranges:
        source = plan.sources[cells.start]
        if cells.in_slab:
            found.append(Buffer(slab_bytes[start : start + cells.nbytes]))
            start += cells.nbytes
        elif isinstance(source, HostSource):
            found.append(_host(leaves[source.leaf], plan.item.leaves[source.leaf].dtype, source.cut))
        elif source.on_accelerator:
            found.append(next(arriving))
        else:
            found.append(_view(_shard(plan, leaves, source), source.cut))
    return found


def _fill(slab: mmap.mmap, contents: Iterable[Any]) -> None:
    """Writes buffers one after another. None is kept: a copy that was made of a leaf goes before that of the next."""
    collections.deque(map(slab.write, contents), maxlen=0)


def _content(plan: ItemPlan, leaves: Sequence[Any], source: CellSource) -> np.ndarray:
    """The bytes of a cell, from any kind of leaf in host memory."""
    if isinstance(source, ShardSource):
        view = np.asarray(_shard(plan, leaves, source))
        return _bytes(view if source.cut is None else view[source.cut])
    buffer = _host(leaves[source.leaf], plan.item.leaves[source.leaf].dtype, source.cut)
    content = _bytes(buffer.array.copy() if isinstance(buffer.array, Mapped) else buffer.array)
    buffer.release()
    return content


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _shard(plan: ItemPlan, leaves: Sequence[Any], source: ShardSource) -> jax.Array:
    """One addressable shard; of typed keys, their data."""
    value = leaves[source.leaf]
    info = plan.item.leaves[source.leaf]
    try:
        if info.kind == "prng":
            value = jax.random.key_data(value)
        if isinstance(value.sharding, SingleDeviceSharding) and not value.is_deleted():
            return value  # the same as its only shard, which costs more to ask for
        return value.addressable_data(source.shard)
    except RuntimeError as error:
        if "deleted" in str(error) or "donated" in str(error):
            where = f"item {plan.item.name!r}, leaf {info.name!r}"
            raise InvalidArgumentError(f"{where} was deleted or donated before save(): {error}") from error
        raise


def _view(data: jax.Array, cut: tuple[slice, ...] | None) -> Buffer:
    """A view of a CPU array's memory, or a copy if it is not contiguous there."""
    view = np.asarray(data) if cut is None else np.asarray(data)[cut]
    if not view.flags.c_contiguous:
        return Buffer(np.array(view, order="C", copy=True))
    return Buffer(view, _sample(view))


def _strided_bytes(tree: PlannedTree) -> int:
    """Bytes of the cells for which `_view` makes a copy: those of arrays that are not laid out in C order."""
    return sum(nbytes for leaf, nbytes in tree.plan.viewed if not _is_in_c_order(tree.leaves[leaf]))


def _is_in_c_order(array: jax.Array) -> bool:
    form = getattr(array, "format", None)  # typed keys have none
    layout = None if form is None else form.layout  # None for an array that was deleted
    return layout is None or list(layout.major_to_minor) == sorted(layout.major_to_minor)


def _host(value: Any, dtype: np.dtype[Any] | None, cut: tuple[slice, ...] | None) -> Buffer:
    """The bytes of a leaf that is no jax array, or of a part of it."""
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return Buffer(np.frombuffer(value, dtype=np.uint8)[cut or ...])
    if cut is not None:
        value = value[cut]
    if isinstance(value, memory_map.Assembled):
        is_small = value.nbytes <= plan_lib.SLAB_CELL_BYTES
        return Buffer(value.read().reshape(value.shape)) if is_small else AssembledBuffer(value)
    if isinstance(value, Mapped) and value.dtype == dtype and value.flags.c_contiguous and value.size:
        buffer = Buffer(value, _sample(value))
        buffer.release()
        return buffer
    return Buffer(np.array(value, dtype=dtype, order="C", copy=True))
