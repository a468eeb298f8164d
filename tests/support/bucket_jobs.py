"""What several processes do in a bucket."""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from tests.support import own_memory
from tests.support.jobs import global_mesh, place

VALUES = np.arange(96, dtype=np.float32).reshape(8, 12)


def save_sharded(directory: str, epochs: list[int]) -> list[int]:
    """Saves one array over all devices, in parts of half a row, and another one that each process has a copy of."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    options, storage = ocp.CheckpointManagerOptions(max_to_keep=2), ec.StorageOptions(part_bytes=VALUES[0].nbytes // 2)
    with ec.CheckpointManager(directory, options=options, storage=storage) as manager:
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


def memory_of_a_save(directory: str, arrays: int, megabytes: int) -> int:
    """How many MB more than before this process had at most while it saved arrays, of which it needs no copy."""
    content = np.resize(np.random.default_rng(0).integers(0, 255, 100_003, np.uint8), megabytes * 10**6)
    state = jax.block_until_ready({f"a{i}": jax.device_put(content + np.uint8(i)) for i in range(arrays)})
    with ec.CheckpointManager(directory) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(1000)}))
        manager.wait_until_finished()
        own_memory.forget_peak()
        before = own_memory.nbytes("VmRSS")
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        return (own_memory.nbytes("VmHWM") - before) // 10**6
