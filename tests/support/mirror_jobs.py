"""What processes do in a directory that has a mirror."""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from tests.support.jobs import global_mesh, place

VALUES = np.arange(96, dtype=np.float32).reshape(8, 12)


def train(directory: str, mirror: str, epochs: list[int]) -> list[int]:
    """Saves one array over all devices of the job, under numbers that it also has as a value."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ec.CheckpointManager(directory, options=options, storage=ec.StorageOptions(mirror=mirror)) as manager:
        for epoch in epochs:
            state = {"w": place(VALUES + epoch, sharding), "epoch": epoch}
            manager.save(epoch, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        found = list(manager.all_steps())
        print("saved", flush=True)
    return found


def resume(directory: str, mirror: str) -> list[Any]:
    """Restores the newest epoch, from wherever it is; returns its number, all numbers, and what was right of it."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec(None, "x"))
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(mirror=mirror)) as manager:
        target = {"w": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=sharding), "epoch": 0}
        found = manager.restore(None, args=ocp.args.StandardRestore(target))
        epoch = int(found["epoch"])
        parts = [(shard.index, np.asarray(shard.data)) for shard in found["w"].addressable_shards]
        right = all(np.array_equal(part, (VALUES + epoch)[index]) for index, part in parts)
        return [epoch, list(manager.all_steps()), right]
