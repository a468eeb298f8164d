"""The snapshot: what the training thread does so that training may go on and change, or donate, everything.

- jax arrays on CPU: zero-copy views of the owned shards (a view keeps a donated buffer alive); small ones are copied,
  and large ones leave a sample of their bytes, because jax may alias NumPy memory that the caller can still change.
- jax arrays on accelerators: copies into host memory, all started before the first is awaited, through pinned host
  memory where the backend has it. Starting a copy is not enough for donation to be safe, so they are awaited here.
- NumPy leaves: copied. Python values: taken as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from epochckpt import tree as tree_lib
from epochckpt.errors import InvalidArgumentError
from epochckpt.plan import ItemPlan

COPY_BYTES = 64 * 1024  # smaller views are copied: as fast as anything, and immune to later changes
_SAMPLES = 64


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
        return self.sample is None or _sample(self.array) == self.sample


def _sample(array: np.ndarray) -> bytes:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _SAMPLES)].tobytes() + flat[-1:].tobytes()


def take(plan: ItemPlan, leaves: Sequence[Any], *, staged: bool | None = None) -> list[Buffer]:
    """Snapshots the cells that this node writes.

    Args:
        plan: the item's plan.
        leaves: the item's leaves, in flattening order.
        staged: copy through host memory of our own (as on accelerators); None: where the arrays are not on CPU.

    Returns:
        One buffer per cell, in file order.

    Raises:
        InvalidArgumentError: an array was deleted or donated before `save()`, by name.
    """
    shards: dict[tuple[int, int], Any] = {}
    for t in plan.takes:
        if t.shard >= 0 and (t.leaf, t.shard) not in shards:
            name = plan.item.leaves[t.leaf].name
            shards[t.leaf, t.shard] = _start(leaves[t.leaf], plan.item.leaves[t.leaf].kind, t.shard, staged, name)
    views: dict[tuple[int, int], Buffer] = {}
    buffers: list[Buffer] = []
    for t in plan.takes:
        info = plan.item.leaves[t.leaf]
        if t.shard < 0:
            buffers.append(Buffer(_host_copy(leaves[t.leaf], info.dtype)))
            continue
        where = (t.leaf, t.shard)
        if where not in views:
            views[where] = _finish(*shards.pop(where))
        buffer = views[where]
        if t.cut is not None:
            part = buffer.array[t.cut]
            buffer = Buffer(part, None if buffer.sample is None else _sample(part))
        buffers.append(buffer)
    return buffers


def copied_bytes(plan: ItemPlan, leaves: Sequence[Any]) -> int:
    """Host memory that `take` will allocate for this item, in bytes."""
    total = 0
    for t in plan.takes:
        leaf = leaves[t.leaf]
        if t.shard < 0 or _on_accelerator(leaf):
            total += plan.item.cell_bytes(t.leaf)
    return total


def _on_accelerator(value: jax.Array) -> bool:
    return next(iter(value.sharding.device_set)).platform != "cpu"


def _start(value: Any, kind: str, shard: int, staged: bool | None, name: str) -> tuple[jax.Array, bool]:
    """Starts bringing one shard to host memory."""
    try:
        if kind == "prng":
            value = jax.random.key_data(value)
        data = value.addressable_data(shard)
        if staged is None:
            staged = _on_accelerator(data)
        if staged:
            (device,) = data.sharding.device_set
            if any(m.kind == "pinned_host" for m in device.addressable_memories()):
                data = jax.device_put(data, SingleDeviceSharding(device, memory_kind="pinned_host"))
            else:
                data.copy_to_host_async()
        return data, not staged
    except RuntimeError as error:
        if "deleted" in str(error) or "donated" in str(error):
            raise InvalidArgumentError(f"leaf {name!r} was deleted or donated before save(): {error}") from error
        raise


def _finish(data: jax.Array, aliased: bool) -> Buffer:
    view = np.asarray(data)
    if not aliased:
        return Buffer(view if view.flags.c_contiguous else np.ascontiguousarray(view))
    if view.nbytes <= COPY_BYTES or not view.flags.c_contiguous:
        return Buffer(np.array(view, order="C", copy=True))
    return Buffer(view, _sample(view))


def _host_copy(value: Any, dtype: np.dtype[Any] | None) -> np.ndarray:
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.uint8)
    return np.array(value, dtype=dtype, order="C", copy=True)


def values(plan: ItemPlan, leaves: Sequence[Any]) -> dict[int, Any]:
    """The Python leaves of an item as JSON, by leaf number."""
    return {
        i: tree_lib.value_to_json(leaves[i])
        for i, leaf in enumerate(plan.item.leaves)
        if leaf.kind in tree_lib.VALUE_KINDS
    }
