"""What processes do that each have the directory on a disk of their own: `<root>/disk-<index>`, and a common mirror."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from tests.support.jobs import global_mesh, place

VALUES = np.arange(96, dtype=np.float32).reshape(8, 12)


def disk(root: str) -> pathlib.Path:
    """This process's own directory."""
    return pathlib.Path(root) / f"disk-{jax.process_index()}"


def opened(root: str, keep: int | None = None, every: int = 1, **options: Any) -> ec.CheckpointManager:
    storage = ec.StorageOptions(mirror=f"{root}/mirror", mirror_every=every, local_disks=True, **options)
    return ec.CheckpointManager(disk(root), options=ocp.CheckpointManagerOptions(max_to_keep=keep), storage=storage)


def sharded(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(global_mesh((jax.device_count(), 1)), spec)


def save(manager: ec.CheckpointManager, epoch: int, shift: int = 0) -> None:
    state = {"w": place(VALUES + epoch + shift, sharded(PartitionSpec("x")))}
    manager.save(epoch, args=ocp.args.StandardSave(state), force=True)


def restored(manager: ec.CheckpointManager, epoch: int | None = None) -> int | None:
    """Restores an epoch, the newest by default; returns `w[0, 0]` if all of it that this process has is right."""
    target = {"w": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=sharded(PartitionSpec("x")))}
    found = manager.restore(epoch, args=ocp.args.StandardRestore(target))["w"]
    parts = [(shard.index, np.asarray(shard.data)) for shard in found.addressable_shards]
    base = int(parts[0][1].ravel()[0] - VALUES[parts[0][0]].ravel()[0])
    return base if all(np.array_equal(part, (VALUES + base)[index]) for index, part in parts) else None


def train(root: str, epochs: list[int], keep: int | None = None, every: int = 1, shift: int = 0) -> Any:
    """Saves epochs, one after the other; returns all that are listed, and what the newest has."""
    with opened(root, keep, every) as manager:
        print("opened", flush=True)
        for epoch in epochs:
            save(manager, epoch, shift)
            manager.wait_until_finished()
            print(f"saved {epoch}", flush=True)
        return [list(manager.all_steps()), restored(manager)]


def resume(root: str) -> Any:
    """All epochs, damaged ones, and what the newest has, or why there is none."""
    with opened(root) as manager:
        try:
            found: Any = restored(manager)
        except ec.errors.EpochCheckpointError as error:
            found = type(error).__name__
        return [list(manager.all_steps()), manager.damaged_epochs(), found]
