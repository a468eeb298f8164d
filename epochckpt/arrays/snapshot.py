"""The snapshot: what the training thread does so that training may go on and change, or donate, everything.

- jax arrays on CPU: zero-copy views of the owned shards (a view keeps a donated buffer alive); small ones are copied,
  and large ones leave a sample of their bytes, because jax may alias NumPy memory that the caller can still change.
- jax arrays on accelerators: copies into host memory, all started before the first is awaited, through pinned host
  memory where the backend has it. Starting a copy is not enough for donation to be safe, so they are awaited here.
- NumPy leaves: copied, but for the files of an import (`mapped.Mapped`): those are streamed from the page cache, and
  leave a sample, too. Python values: taken as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from epochckpt.arrays.plan import CellSource, ItemPlan
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import tree as tree_lib
from epochckpt.storage import mmap

COPY_BYTES = 64 * 1024  # smaller views are copied: as fast as anything, and immune to later changes
_SAMPLES = 16  # each is a miss of the processor's cache, and the training thread waits for it


@dataclasses.dataclass(slots=True)
class Buffer:
    """The bytes of one cell.

    Attributes:
        array: C-contiguous, of the stored dtype.
        sample: some of its bytes at the time of the snapshot, if the memory is not ours; else None.
    """

    array: np.ndarray
    sample: bytes | None = None

    def unchanged(self) -> bool:
        """False if memory that is not ours has visibly changed since the snapshot."""
        same = self.sample is None or _sample(self.array) == self.sample
        self.release()
        return same

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Says that some bytes have been written: those of a mapped file leave this process's memory."""
        if isinstance(self.array, mmap.Mapped):
            mmap.release(self.array, start, stop)


def _sample(array: np.ndarray) -> bytes:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _SAMPLES)].tobytes() + flat[-1:].tobytes()


def take(plan: ItemPlan, leaves: Sequence[Any], *, staged: bool = False) -> list[Buffer]:
    """Snapshots the cells that this node writes.

    Args:
        plan: the item's plan.
        leaves: the item's leaves, in flattening order.
        staged: copy arrays on CPU, too, through host memory of our own, as those on accelerators always are.

    Returns:
        One buffer per cell, in file order.

    Raises:
        InvalidArgumentError: an array was deleted or donated before `save()`, by name.
    """
    started: dict[int, jax.Array] = {}
    for i, t in enumerate(plan.takes):
        if (t.staged or staged) and t.shard >= 0:
            data = _shard(plan, leaves, t)
            started[i] = _start(data if t.cut is None else data[t.cut])
    buffers: list[Buffer] = []
    for i, t in enumerate(plan.takes):
        if t.shard < 0:
            buffers.append(_host(leaves[t.leaf], plan.item.leaves[t.leaf].dtype))
        elif i in started:
            buffers.append(Buffer(np.ascontiguousarray(started.pop(i))))
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
    view = np.asarray(data)
    if cut is not None:
        view = view[cut]
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


def values(plan: ItemPlan, leaves: Sequence[Any]) -> dict[int, Any]:
    """The Python leaves of an item as JSON, by leaf number."""
    return {
        i: tree_lib.value_to_json(leaves[i])
        for i, leaf in enumerate(plan.item.leaves)
        if leaf.kind in tree_lib.VALUE_KINDS
    }
