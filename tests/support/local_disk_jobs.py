"""What processes do that each have the directory on a disk of their own: `<root>/disk-<index>`, and a common mirror."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.arrays import transfers
from tests.support import topology_jobs
from tests.support.handler_jobs import Reader, ReaderRestore, ReaderSave
from tests.support.jobs import global_mesh, place

VALUES = np.arange(96, dtype=np.float32).reshape(8, 12)


def disk(root: str) -> pathlib.Path:
    """This process's own directory."""
    return pathlib.Path(root) / f"disk-{jax.process_index()}"


def opened(
    root: str, keep: int | None = None, every: int = 1, mirror: str = "", **options: Any
) -> ec.CheckpointManager:
    options |= {"mirror": mirror or f"{root}/mirror", "mirror_every": every}
    storage = ec.StorageOptions(local_disks=True, **options)
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


def train(
    root: str, epochs: list[int], keep: int | None = None, every: int = 1, shift: int = 0, mirror: str = ""
) -> Any:
    """Saves epochs, one after the other; returns all that are listed, and what the newest has."""
    with opened(root, keep, every, mirror) as manager:
        print("opened", flush=True)
        for epoch in epochs:
            save(manager, epoch, shift)
            manager.wait_until_finished()
            print(f"saved {epoch}", flush=True)
        return [list(manager.all_steps()), restored(manager)]


def lone_reloads(root: str) -> Any:
    """Each process calls `reload` alone, and after each of these calls both call it; returns what is listed then."""
    me, client = jax.process_index(), ocp.multihost.get_jax_distributed_client()
    found: list[Any] = []
    with opened(root) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        for alone in (0, 1):
            if me == alone:
                manager.components.directory.job_directory._wait_secs = 0.5
                try:
                    manager.reload()
                except ec.errors.CoordinationTimeoutError as error:
                    found.append(str(error))
                manager.components.directory.job_directory._wait_secs = 30.0
            client.wait_at_barrier(f"after {alone}", 60_000)
            manager.reload()
            found.append(list(manager.all_steps()))
    return found


def resume(root: str) -> Any:
    """All epochs, damaged ones, and what the newest has, or why there is none."""
    with opened(root) as manager:
        try:
            found: Any = restored(manager)
        except ec.errors.EpochCheckpointError as error:
            found = type(error).__name__
        return [list(manager.all_steps()), manager.damaged_epochs(), found]


# -- every kind of item ----------------------------------------------------------------------------------------------

TREE_STORAGE: dict[str, Any] = {"block_bytes": 4096, "replica_split_bytes": 2048, "part_bytes": 16384}


def everything(staged: bool = False) -> ocp.args.Composite:
    """What `save_all` saves: all kinds of arrays, and values that differ between the processes."""
    me = jax.process_index()
    state = topology_jobs.tree()
    state["each"] = np.arange(6) + 100 * me  # the primary's counts
    state["wide"] = np.arange(40_000.0) + staged
    state["unplaced"] = jnp.arange(40_000.0) + staged
    state["text"] = "éèêë"[me] * 5000
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        meta=ocp.args.JsonSave({"process": me, "staged": staged}),
        own=ec.args.NodeSave({"a": np.full(3, me)}),
        reader=ReaderSave(Reader(10 + me)),
    )


def save_all(root: str) -> list[int]:
    """Saves epoch 1, and epoch 2 as from accelerators, whose arrays are copied through host memory, and uploads it."""
    with opened(root, **TREE_STORAGE) as manager:
        manager.save(1, args=everything())
        manager.wait_until_finished()
        here, transfers.HOST = transfers.HOST, frozenset()
        manager.components.saves.planner._plans.clear()
        manager.save(2, args=everything(staged=True))
        transfers.HOST = here
        manager.wait_until_finished()
        ec.DistributedSession().run(ec.CopyUpload(f"{root}/uploaded").build(2, manager))
        return list(manager.all_steps())


def restore_all(root: str, ways: list[bool]) -> list[list[str]]:
    """Restores both epochs, on the same devices or (True) moved to others; returns what is wrong, by way."""
    with opened(root, **TREE_STORAGE) as manager:
        return [[each for epoch in (1, 2) for each in _restore_all(manager, epoch, moved)] for moved in ways]


def _restore_all(manager: ec.CheckpointManager, epoch: int, moved: bool) -> list[str]:
    me, reader = jax.process_index(), Reader()
    places = topology_jobs.shardings(topology_jobs.MOVED if moved else topology_jobs.SPECS)
    data, target = topology_jobs.values(), everything().state.item
    target["arrays"] = {
        name: jax.ShapeDtypeStruct(data[name].shape, data[name].dtype, sharding=place) for name, place in places.items()
    }
    try:
        found = manager.restore(
            epoch,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                meta=ocp.args.JsonRestore(),
                own=ec.args.NodeRestore(),
                reader=ReaderRestore(reader),
            ),
        )
    except ec.errors.DamagedError as error:
        return [str(error)]
    wrong = topology_jobs.differences(found.state, places, data, None)
    checks = {
        "each": np.array_equal(found.state["each"], np.arange(6)),
        "wide": np.array_equal(found.state["wide"], np.arange(40_000.0) + (epoch == 2)),
        "unplaced": np.array_equal(found.state["unplaced"], np.arange(40_000.0) + (epoch == 2)),
        "on no device": not found.state["unplaced"].committed,
        "text": found.state["text"] == "é" * 5000,
        "meta": found.meta == {"process": 0, "staged": epoch == 2},
        "own": np.array_equal(found.own["a"], np.full(3, me)),
        "reader": reader.position == 10 + me,
    }
    return wrong + [name for name, right in checks.items() if not right]


def differ(root: str) -> list[str]:
    """Saves a large NumPy leaf that differs between the processes, then one that does not; returns why it failed."""
    with opened(root) as manager:
        manager.save(1, args=ocp.args.StandardSave({"wide": np.arange(40_000.0) + jax.process_index()}))
        reasons: list[str] = []
        try:
            manager.wait_until_finished()
        except ec.errors.SaveError as error:
            reasons.append(str(error))
        manager.save(2, args=ocp.args.StandardSave({"wide": np.arange(40_000.0)}))
        manager.wait_until_finished()
        return [*reasons, *map(str, manager.all_steps())]


def train_away(root: str, mirror: str, epoch: int) -> Any:
    """Goes on while the mirror is away: all epochs, what the newest has, and all epochs after one more save."""
    with opened(root, mirror=mirror, store={"retries": 0}) as manager:
        found = [list(manager.all_steps()), restored(manager)]
        save(manager, epoch)
        manager.wait_until_finished()
        return [*found, list(manager.all_steps())]
