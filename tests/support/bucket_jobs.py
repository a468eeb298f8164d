"""What several processes do in a bucket."""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from tests.support.jobs import global_mesh, place

VALUES = np.arange(96, dtype=np.float32).reshape(8, 12)


def save_sharded(directory: str, epochs: list[int]) -> list[int]:
    """Saves one array over all devices, and another one that each process has a copy of."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for epoch in epochs:
            state = {"w": place(VALUES + epoch, sharding), "epoch": epoch}
            manager.save(epoch, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        return manager.all_steps()


def restore_newest(directory: str) -> list[Any]:
    """The epochs that are listed, the one that all processes can restore as they saved it, and those listed then."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    with ec.CheckpointManager(directory) as manager:
        before = list(manager.all_steps())
        target = {"w": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=sharding), "epoch": 0}
        found = manager.restore(None, args=ocp.args.StandardRestore(target))
        parts = [(shard.index, np.asarray(shard.data)) for shard in found["w"].addressable_shards]
        assert all(np.array_equal(part, (VALUES + found["epoch"])[index]) for index, part in parts)
        return [before, int(found["epoch"]), list(manager.all_steps())]


def restore_sharded(directory: str, axis: int) -> list[Any]:
    """Restores the newest epoch, cut along another axis; returns what this process holds of it."""
    spec = PartitionSpec("x") if not axis else PartitionSpec(None, "x")
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), spec)
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        epoch = manager.latest_step()
        target = {"w": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=sharding), "epoch": 0}
        found = manager.restore(epoch, args=ocp.args.StandardRestore(target))
        parts = [(shard.index, np.asarray(shard.data)) for shard in found["w"].addressable_shards]
        assert all(np.array_equal(part, (VALUES + epoch)[index]) for index, part in parts)
        return [epoch, int(found["epoch"]), sum(part.size for _, part in parts)]


def save_some(directory: str, epochs: list[int]) -> None:
    """Saves epochs, one after the other."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in epochs:
            manager.save(epoch, args=ocp.args.StandardSave({"w": VALUES + epoch}))
            manager.wait_until_finished()


def upload(source: str, destination: str, epoch: int) -> None:
    """Copies an epoch of a directory into another one."""
    with ec.CheckpointManager(source) as manager:
        ec.LocalSession().run(ec.CopyUpload(destination).build(epoch, manager))
