"""Functions that `tests.support.worker` runs inside real processes of a job."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec

SPECS = {
    "x": PartitionSpec("x"),
    "y": PartitionSpec(None, "y"),
    "xy": PartitionSpec("x", "y"),
    "none": PartitionSpec(),
}


def global_mesh(shape: tuple[int, int]) -> Mesh:
    """A mesh over all devices of the job."""
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def place(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array with the given values."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def smoke(directory: str) -> Any:
    """Saves and restores a few arrays."""
    mesh = global_mesh((jax.device_count() // 2, 2))
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=(16, 8)).astype(np.float32) for k in SPECS}
    data["big"] = rng.normal(size=(1024, 1024)).astype(np.float32)
    state = {k: place(v, NamedSharding(mesh, SPECS.get(k, PartitionSpec()))) for k, v in data.items()}
    state["step"] = 7
    with ec.CheckpointManager(
        directory, storage=ec.StorageOptions(save_timeout_secs=30, replica_split_bytes=2**20)
    ) as m:
        for e in range(3):
            m.save(e, args=ocp.args.StandardSave(state))
        m.wait_until_finished()
        steps = list(m.all_steps())
        got = m.restore(None, args=ocp.args.StandardRestore(state))
        same = all(
            np.array_equal(np.asarray(s.data), data[k][s.index]) for k in data for s in got[k].addressable_shards
        )
        ok = m.verify(2).ok
        nodes = m.nodes(2)
        size = [n.nbytes for n in m.status(2).nodes]
        m.delete(1)
        return [steps, same, ok, nodes, size, list(m.all_steps())]


def save_and_return(directory: str, epochs: int) -> list[int]:
    """Saves epochs and leaves without closing the manager: the interpreter's end has to drain them."""
    mesh = global_mesh((jax.device_count(), 1))
    state = {"w": place(np.arange(64.0, dtype=np.float32), NamedSharding(mesh, SPECS["x"]))}
    manager = ec.CheckpointManager(directory)
    KEPT_ALIVE.append(manager)
    for epoch in range(epochs):
        manager.save(epoch, args=ocp.args.StandardSave(state))
    return list(manager.all_steps())


KEPT_ALIVE: list[ec.CheckpointManager] = []


def two_managers(one: str, two: str) -> list[list[int]]:
    """Saves to two directories in turns."""
    mesh = global_mesh((jax.device_count(), 1))
    state = {"w": place(np.arange(64.0, dtype=np.float32), NamedSharding(mesh, SPECS["x"]))}
    with ec.CheckpointManager(one) as first, ec.CheckpointManager(two) as second:
        first.save(0, args=ocp.args.StandardSave(state))
        second.save(0, args=ocp.args.StandardSave(state))
        first.save(1, args=ocp.args.StandardSave(state))
        second.save(5, args=ocp.args.StandardSave(state))
        first.wait_until_finished()
        second.wait_until_finished()
        return [list(first.all_steps()), list(second.all_steps())]
