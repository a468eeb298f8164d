"""From the arguments of `save()` to a snapshot: the plan, and the copies that training can no longer change.

`Planner.plan` finds or makes a `SavePlan`, and `SavePlan.snapshot` a `Snapshot`, on the training thread. After that
training may change, or donate, everything:

- jax arrays on CPU: zero-copy views of the owned shards (a view keeps a donated buffer alive). Small ones are copied.
  Large ones leave a sample of their bytes, because jax may alias NumPy memory that the caller can still change.
- jax arrays on accelerators: copies into host memory, all started before the first is awaited, through pinned host
  memory where the backend has it. They are awaited, because a copy that has only begun is not safe from donation.
- NumPy leaves: copied. Only the files of an import (`mmap.Mapped`) are streamed from the page cache, with a sample.
"""

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from epochckpt import _collector
from epochckpt._threads import Deadline
from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays.items import SaveItem, of_hosted
from epochckpt.arrays.plan import CellSource, ItemPlan
from epochckpt.errors import InvalidArgumentError, SaveError, say
from epochckpt.format import ItemRecord, Nodes, checksums
from epochckpt.format import tree as tree_lib
from epochckpt.options import StorageOptions
from epochckpt.orbax import HandlerSave
from epochckpt.storage import mmap

COPY_BYTES = 64 * 1024  # smaller views are copied: as fast as anything, and immune to later changes
_SAMPLES = 16  # each is a miss of the processor's cache, and the training thread waits for it
_PLANS = 256  # kept plans; a job has as many as it has items, or twice that


class SavedTree(NamedTuple):
    """One pytree of a save, with the number of the node that writes it."""

    plan: ItemPlan
    node: int
    data: list[Any]  # its leaves in flattening order; in a snapshot one Buffer per cell, in file order


@dataclasses.dataclass
class Snapshot:
    """What a save holds once the training thread goes on."""

    trees: list[SavedTree] = dataclasses.field(default_factory=list)  # emptied as soon as they are written
    also: list[SavedTree] = dataclasses.field(default_factory=list)  # of cells that other nodes own; emptied, too
    items: dict[str, ItemRecord] = dataclasses.field(default_factory=dict)  # as the epoch will record them
    own: dict[int, dict[str, ItemRecord]] = dataclasses.field(default_factory=dict)  # as each node records its own
    # Files of known content that this process writes, by item and path in the item's folder.
    files: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    running: Sequence[HandlerSave] = ()  # handlers that still write, or may; removed once their files are written
    digest: Callable[[], str] = str  # of the plan, see `SavePlan`
    copied_bytes: int = 0  # host memory that it holds

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

    def drop(self) -> None:
        """Lets go of the copies, and removes what handlers have written."""
        self.trees, self.also, self.files = [], [], {}
        for save in self.running:
            save.discard()
        self.running = ()


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """What this process does for one save. Nothing has been copied or run yet."""

    items: Sequence[SaveItem]
    trees: Sequence[SavedTree]  # every pytree of the items that this process writes
    digest: Callable[[], str]  # gives the digest that all processes compare; computed with the first call
    primary: bool  # whether this process writes what only one process writes

    @property
    def copied_bytes(self) -> int:
        return sum(tree.plan.copied_bytes for tree in [*self.trees, *self._also])

    @property
    def _also(self) -> list[SavedTree]:
        """What this process writes of cells that other nodes own."""
        return [SavedTree(tree.plan.also, tree.node, tree.data) for tree in self.trees if tree.plan.also is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, on all nodes together; of a node's own those of this process."""
        return sum(tree.plan.nbytes for tree in self.trees)

    @property
    def runs_handlers(self) -> bool:
        """Whether handlers that are not ours take part."""
        return any(item.run is not None for item in self.items)

    def snapshot(self) -> Snapshot:
        """Takes the snapshot. Handlers that are not ours run their blocking part here."""
        # The records of the items. A node's own tree is recorded by that node, not by the epoch.
        items = {item.name: ItemRecord(item.kind, item.handler) for item in self.items}
        wanted = {item.name: item for item in self.items}
        own: dict[int, dict[str, ItemRecord]] = {}
        for plan, node, leaves in self.trees:
            item = wanted[plan.item.name]
            python = (i for i, leaf in enumerate(plan.item.leaves) if leaf.kind in tree_lib.VALUE_KINDS)
            values = {i: tree_lib.value_to_json(leaves[i]) for i in python}
            tree = ItemRecord("arrays", "", plan.item, values, item.custom_metadata)
            if item.kind == "node":
                own.setdefault(node, {})[item.name] = tree
            else:
                items[item.name] = dataclasses.replace(tree, handler=item.handler)
        # Handlers run one by one: those that have begun are ended when a later one, or a copy, fails.
        running: list[HandlerSave] = []
        try:
            for run in (item.run for item in self.items if item.run is not None):
                running.append(run())
            with _collector.paused():
                trees, also = (
                    [SavedTree(plan, node, take(plan, leaves)) for plan, node, leaves in each]
                    for each in (self.trees, self._also)
                )
        except BaseException:
            for save in running:
                save.discard()
            raise
        files = {(item.name, item.file[0]): item.file[1] for item in self.items if item.file and self.primary}
        return Snapshot(trees, also, items, own, files, running, self.digest, self.copied_bytes)


class Planner:
    """Plans saves of one manager, and keeps the plans; `part_bytes` bounds one data file."""

    def __init__(self, nodes: Nodes, options: StorageOptions, part_bytes: int | None):
        self._nodes, self._options, self._part_bytes = nodes, options, part_bytes
        self._plans: collections.OrderedDict[Any, ItemPlan] = collections.OrderedDict()

    def plan(self, items: Sequence[SaveItem]) -> SavePlan:
        """Plans a save; raises InvalidArgumentError for what cannot be saved."""
        trees: list[SavedTree] = []
        for item in items:
            trees_of: dict[int, Any] = {}
            if item.kind == "arrays":
                trees_of = {self._nodes.hosted[0]: item.tree}
            elif item.kind == "node":
                advice = "NodeSave({node name: pytree}, by_node=True)"
                trees_of = of_hosted(item.name, item.tree, item.by_node, self._nodes, advice)
            for node, tree in trees_of.items():
                try:
                    leaves, treedef = tree_lib.flatten_leaves(tree)
                except (ValueError, TypeError) as error:
                    problem = f"item {item.name!r} is not a pytree that can be saved: {error}"
                    raise InvalidArgumentError(problem) from error
                try:
                    key = (item.name, item.kind, plan_lib.key(leaves, treedef))
                except AttributeError:  # a traced array has no sharding
                    plan_lib.refuse_traced(item.name, tree)
                    raise
                with _collector.paused():
                    plan = self._plans[key] = self._plans.pop(key, None) or self._plan(item, tree)
                if len(self._plans) > _PLANS:
                    self._plans.popitem(last=False)
                trees.append(SavedTree(plan, node, leaves))
        shared = {item.name for item in items if item.kind == "arrays"}
        alike = {tree.plan.item.name: tree.plan for tree in trees if tree.plan.item.name in shared}
        others = sorted((item.name, item.kind, item.handler) for item in items if item.name not in shared)

        def digest() -> str:
            digests = {name: plan.digest for name, plan in alike.items()}
            agreed = {"nodes": self._nodes.rows, "others": others, "items": digests}
            return checksums.digest(json.dumps(agreed, separators=(",", ":")).encode())

        return SavePlan(items, trees, functools.cache(digest), self._nodes.process == 0)

    def _plan(self, item: SaveItem, tree: Any) -> ItemPlan:
        per_node = item.kind == "node"
        return plan_lib.plan_item(
            item.name,
            tree_lib.flatten(tree)[0],
            node=0 if per_node else self._nodes.hosted[0],
            node_of_process={self._nodes.id_of(self._nodes.process): 0} if per_node else self._nodes.writers,
            replica_split_bytes=self._options.replica_split_bytes,
            part_bytes=self._part_bytes,
            per_node=per_node,
            local_disks=self._options.local_disks and self._nodes.processes > 1,
        )


@dataclasses.dataclass(slots=True)
class Buffer:
    """The bytes of one cell."""

    array: np.ndarray  # C-contiguous, of the stored dtype
    sample: bytes | None = None  # some of its bytes at the time of the snapshot, if the memory is not ours

    def unchanged(self) -> bool:
        """False if memory that is not ours has visibly changed since the snapshot."""
        same = self.sample is None or _sample(self.array) == self.sample
        self.release()
        return same

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Some bytes have been written: those of a mapped file may leave this process's memory."""
        if isinstance(self.array, mmap.Mapped):
            mmap.release(self.array, start, stop)


def _sample(array: np.ndarray) -> bytes:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _SAMPLES)].tobytes() + flat[-1:].tobytes()


def take(plan: ItemPlan, leaves: Sequence[Any], *, staged: bool = False) -> list[Buffer]:
    """Copies, or views, the cells that this node writes, one buffer per cell in file order; `staged` copies all."""
    # All transfers from accelerators are started before the first is awaited.
    started: dict[Any, jax.Array] = {}
    keys = [(t.leaf, t.shard) if t.whole else i for i, t in enumerate(plan.sources)]
    for key, t in zip(keys, plan.sources, strict=True):
        if (t.staged or staged) and t.shard >= 0 and key not in started:
            data = _shard(plan, leaves, t)
            started[key] = _start(data if t.cut is None or t.whole else data[t.cut])
    buffers: list[Buffer] = []
    shards: dict[Any, np.ndarray] = {}
    for key, t in zip(keys, plan.sources, strict=True):
        if t.shard < 0:
            buffers.append(_host(leaves[t.leaf], plan.item.leaves[t.leaf].dtype))
        elif t.whole and (key in started or key in shards):
            if key in started:
                shards[key] = np.asarray(started.pop(key))
            buffers.append(Buffer(np.ascontiguousarray(shards[key][t.cut])))
        elif key in started:
            buffers.append(Buffer(np.ascontiguousarray(started.pop(key))))
        else:
            buffers.append(_alias(_shard(plan, leaves, t), t.cut))
    return buffers


def _shard(plan: ItemPlan, leaves: Sequence[Any], t: CellSource) -> jax.Array:
    """One addressable shard; of typed keys, their data."""
    value = leaves[t.leaf]
    info = plan.item.leaves[t.leaf]
    try:
        if info.kind == "prng":
            value = jax.random.key_data(value)
        if isinstance(value.sharding, SingleDeviceSharding) and not value.is_deleted():
            return value  # the same as its only shard, which costs more to ask for
        return value.addressable_data(t.shard)
    except RuntimeError as error:
        if "deleted" in str(error) or "donated" in str(error):
            raise InvalidArgumentError(f"leaf {info.name!r} was deleted or donated before save(): {error}") from error
        raise


def _start(data: jax.Array) -> jax.Array:
    """Starts copying a shard to host memory of our own."""
    (device,) = data.sharding.device_set
    if any(m.kind == "pinned_host" for m in device.addressable_memories()):
        return jax.device_put(data, SingleDeviceSharding(device, memory_kind="pinned_host"))
    data.copy_to_host_async()
    return data


def _alias(data: jax.Array, cut: tuple[slice, ...] | None) -> Buffer:
    """A view of a CPU array's memory, or a copy of a small one."""
    view = np.asarray(data) if cut is None else np.asarray(data)[cut]
    if view.nbytes <= COPY_BYTES or not view.flags.c_contiguous:
        return Buffer(np.array(view, order="C", copy=True))
    return Buffer(view, _sample(view))


def _host(value: Any, dtype: np.dtype[Any] | None) -> Buffer:
    """The bytes of a leaf that is no jax array."""
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return Buffer(np.frombuffer(value, dtype=np.uint8))
    if isinstance(value, mmap.Mapped) and value.dtype == dtype and value.flags.c_contiguous and value.size:
        buffer = Buffer(value, _sample(value))
        buffer.release()
        return buffer
    return Buffer(np.array(value, dtype=dtype, order="C", copy=True))


def checked_json(value: Any, where: str) -> Any:
    """User data as it will come back from JSON; raises InvalidArgumentError for what is not JSON."""
    return checksums.unpack_json(checksums.pack_json(value, where))


def root_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Content of the file in which Orbax, too, keeps a manager's own metadata."""
    data = {"internal_metadata": {}, "custom_metadata": checksums.pack_json(dict(metadata), "metadata")}
    return json.dumps(data).encode()
