"""Jobs of several processes that train on with what they have restored; run by `tests.support.worker`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import epochckpt as ec

OPTIMIZER = optax.adam(1e-3)


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters that say how they lie on the mesh that is set."""
    return {"w": jax.random.normal(key, (8, 4), out_sharding=PartitionSpec("data")), "b": jnp.zeros(4)}


@jax.jit
def trained(params: Any, optimizer: Any) -> tuple[Any, Any]:
    updates, optimizer = OPTIMIZER.update(jax.tree.map(jnp.ones_like, params), optimizer)
    return optax.apply_updates(params, updates), optimizer


def sums(params: Any, optimizer: Any) -> list[float]:
    """What training makes of a state, the same on all processes."""
    params, optimizer = trained(params, optimizer)
    return [float(jnp.sum(leaf)) for leaf in jax.tree.leaves((params, optimizer))]


def doubled(number: float, mesh: Mesh) -> jax.Array:
    """A scalar on all devices of a mesh, whose dtype is weak, as that of the number is."""
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, PartitionSpec()))(number)


def train_on(directory: str) -> dict[str, Any]:
    """Saves a state on a mesh over all devices, beside a counter that every process has, and trains on."""
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Explicit,))):
        params = jax.jit(init)(jax.random.key(0))
        optimizer = jax.jit(OPTIMIZER.init)(params)
        scale = doubled(0.25, jax.sharding.get_mesh())
        firsts = {device.process_index: device for device in reversed(jax.devices())}
        few = doubled(0.75, Mesh(np.array([firsts[process] for process in sorted(firsts)]), ("data",)))
        state = {"params": params, "optimizer": optimizer, "counter": np.int32(5), "scale": scale, "few": few}
        described = jax.eval_shape(init, jax.random.key(0))
        target = {"params": described, "optimizer": optimizer, "counter": jax.device_put(np.int32(0))}
        target |= {"scale": scale, "few": few}
        bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), target)
        with ec.CheckpointManager(directory) as manager:
            manager.save(0, args=ocp.args.StandardSave(state))
            found = manager.restore(0, args=ocp.args.StandardRestore(target))
            later = manager.restore_async(0, args=ocp.args.StandardRestore(target)).result()
            unplaced = manager.restore(0, args=ocp.args.StandardRestore(bare))
        states = [state, found, later, unplaced]
        return {
            "sums": [sums(each["params"], each["optimizer"]) for each in states],
            "counted": [float(jnp.sum(each["params"]["w"] * 0 + each["counter"])) for each in states],
            "committed": [getattr(each["counter"], "committed", None) for each in states],
            "weak": [each[name].weak_type and float(each[name]) for each in states for name in ("scale", "few")],
        }
