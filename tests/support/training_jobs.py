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
from epochckpt.arrays import transfers

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


def begin(directory: str) -> list[float]:
    """Saves a state before its first step: nobody has put optax's counter anywhere."""
    state = _first_state(0.5)
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(0, args=ocp.args.StandardSave(state))
    return _facts(state)


def go_on(directory: str) -> list[list[float]]:
    """Restores that state with targets of several kinds, and saves each again."""
    state = _first_state(0.25)
    described = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    bare = described | {key: jax.tree.map(_bare, state[key]) for key in ("optimizer", "factor")}
    found = []
    with ec.CheckpointManager(directory) as manager:
        for epoch, target in enumerate([state, described, bare], start=1):
            restored = manager.restore(0, args=ocp.args.StandardRestore(target))
            assert manager.save(epoch, args=ocp.args.StandardSave(restored))
            found.append(_facts(manager.restore(epoch, args=ocp.args.StandardRestore(target))))
    return found


def read_by_orbax(directory: str) -> list[list[Any]]:
    """Saves that state, and restores it with the manager of stock Orbax, with targets of several kinds and without."""
    state = _first_state(0.5) | {"key": jax.random.key(7)}
    with ec.CheckpointManager(directory) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    described = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    bare = described | {key: jax.tree.map(_bare, state[key]) for key in ("optimizer", "factor")}
    with ocp.CheckpointManager(directory) as manager:
        found = [manager.restore(0, args=ocp.args.StandardRestore(target)) for target in (state, described, bare, None)]
    return [[float(_count(each)), float(each["factor"]), _bits(each["key"])] for each in found]


def _count(state: Any) -> Any:
    adam = state["optimizer"][0]
    return adam["count"] if isinstance(adam, dict) else adam.count


def _bits(key: jax.Array) -> list[int]:
    """The data of a typed key, or of its data."""
    return np.asarray(jax.random.key_data(key)).tolist()


def go_on_with_own_disks(directory: str) -> list[list[float]]:
    """The same where each process has a disk of its own; what the state was, and what is restored of each epoch."""
    storage = ec.StorageOptions(local_disks=True, mirror=f"{directory}/mirror", mirror_every=10)
    state = _first_state(0.5) | {"large": jnp.arange(50_000.0)}
    found = [_facts(state)]
    with ec.CheckpointManager(f"{directory}/disk-{jax.process_index()}", storage=storage) as manager:
        for epoch, target in enumerate([state, jax.tree.map(ocp.utils.to_shape_dtype_struct, state)]):
            assert manager.save(epoch, args=ocp.args.StandardSave(state))
            restored = manager.restore(epoch, args=ocp.args.StandardRestore(target))
            assert not restored["large"].committed
            assert float(restored["large"][-1]) == 49_999.0
            found.append(_facts(restored))
            state = restored
    return found


def differ(directory: str) -> list[Any]:
    """What saves say where the processes have other values, and what is restored. Copies are those of accelerators."""
    transfers.HOST = frozenset()
    storage = ec.StorageOptions(replica_split_bytes=2**16)
    large = jnp.arange(3_000_000.0)
    errors = []
    with ec.CheckpointManager(directory, storage=storage) as manager:
        for epoch, state in enumerate(
            [
                {"key": jax.random.key(jax.process_index())},
                {"key": jax.random.key(7), "large": large.at[-1].set(jax.process_index())},
                {"key": jax.random.key(7), "large": large},
            ]
        ):
            try:
                manager.save(epoch, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            except ec.errors.SaveError as error:
                errors.append(str(error))
        restored = manager.restore(2)
    key, large = restored["key"], restored["large"]
    return [errors, jax.random.key_data(key).tolist(), key.committed, float(large[-1]), large.committed]


def _first_state(factor: float) -> dict[str, Any]:
    """Parameters on a mesh over all devices, which is not set, and what lies on no device."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.jit(lambda: {"w": jnp.arange(32.0).reshape(8, 4)}, out_shardings=rows)()
    return {"params": params, "optimizer": OPTIMIZER.init(params), "factor": jnp.asarray(factor)}


def _bare(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _facts(state: Any) -> list[float]:
    """What training makes of a state, and whether it has what JAX makes of Python numbers and of counters."""
    count, factor = state["optimizer"][0].count, state["factor"]
    return [*sums(state["params"], state["optimizer"]), float(factor), count.committed, factor.weak_type]
