"""Targets without devices: what `jax.eval_shape` gives where a mesh has explicit axes, as of `jax.make_mesh`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from tests.support import stock_steps
from tests.support.managers import assert_same

OPTIMIZER = optax.adam(1e-3)


def mesh_of(devices: int, axis: str = "data") -> Mesh:
    return jax.make_mesh((devices,), (axis,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices])


def init(key: jax.Array) -> dict[str, Any]:
    """A state whose arrays say themselves how they lie."""
    params = {"w": jax.random.normal(key, (8, 4), out_sharding=PartitionSpec("data")), "b": jnp.zeros(4)}
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": jax.random.split(key, 8)}


def made(mesh: Mesh) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state, and its description."""
    with jax.set_mesh(mesh):
        state = jax.jit(init)(jax.random.key(0))
        described = jax.eval_shape(init, jax.random.key(0))
    assert isinstance(described["params"]["w"].sharding.mesh, jax.sharding.AbstractMesh)
    return state, described


def plain(tree: Any) -> Any:
    """The tree with the data of its keys."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


@jax.jit
def trained(state: dict[str, Any]) -> dict[str, Any]:
    grads = jax.tree.map(jnp.ones_like, state["params"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer, "key": state["key"]}


def check(found: Any, mesh: Mesh) -> None:
    """The state is that of `init`, each array lies on the mesh as the description has it, and training goes on."""
    state, described = made(mesh)
    assert_same(plain(found), plain(state))
    for restored, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(described), strict=True):
        if wanted.sharding is not None:  # `jax.eval_shape` leaves out that of a constant scalar
            assert restored.sharding.is_equivalent_to(NamedSharding(mesh, wanted.sharding.spec), restored.ndim)
    with jax.set_mesh(mesh):
        assert_same(plain(trained(found)), plain(trained(state)))


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with a state that lies on two devices."""
    state, _ = made(mesh_of(2))
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    return tmp_path


def with_restore_args(described: Any) -> ocp.args.PyTreeRestore:
    args = ocp.checkpoint_utils.construct_restore_args(described)
    return ocp.args.PyTreeRestore(described, restore_args=args)


ARGUMENTS = [ocp.args.StandardRestore, ocp.args.PyTreeRestore, with_restore_args]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("devices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_arrays_lie_on_the_mesh_that_is_set(saved: pathlib.Path, devices: int, arguments: Callable[..., Any]) -> None:
    """In the background, too, where another thread reads."""
    mesh = mesh_of(devices)
    _, described = made(mesh)
    with jax.set_mesh(mesh), ec.CheckpointManager(saved) as manager:
        check(manager.restore(0, args=arguments(described)), mesh)
        response = manager.restore_async(None, args=arguments(described))
    check(response.result(), mesh)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_where_no_mesh_is_set_they_lie_on_that_of_the_save(saved: pathlib.Path, arguments: Callable[..., Any]) -> None:
    """If it has the same axes; else the error says what to do, and the epoch stays usable."""
    _, described = made(mesh_of(2))
    with ec.CheckpointManager(saved) as manager:
        check(manager.restore(0, args=arguments(described)), mesh_of(2))
        _, larger = made(mesh_of(4))
        with pytest.raises(ec.errors.MismatchError, match=r"restore under `jax.set_mesh\(mesh\)`") as caught:
            manager.restore(0, args=arguments(larger))
        assert {row.problem for row in caught.value.rows} == {"sharding"}
        assert len(caught.value.rows) == len([leaf for leaf in jax.tree.leaves(larger) if leaf.sharding is not None])
        with jax.set_mesh(mesh_of(4, "other")), pytest.raises(ec.errors.MismatchError, match="without devices"):
            manager.restore(0, args=arguments(larger))
        assert not manager.damaged_epochs()


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_shardings_a_set_mesh_stands_for_that_of_the_save(
    saved: pathlib.Path, kind: AxisType, devices: int
) -> None:
    """Arrays of the old mesh, whose devices still exist, or do not, could not be used together with the new one."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    state, described = made(mesh_of(2))
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), described)
    with ec.CheckpointManager(saved) as manager:
        with jax.set_mesh(mesh):
            found = [manager.restore(0, args=ocp.args.StandardRestore(bare)), manager.restore(0)]
            trained(found[0])
        alone = manager.restore(0)
    for tree in found:
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(tree)} == {mesh}
        assert tree["params"]["w"].sharding.spec == PartitionSpec("data", None)
        np.testing.assert_array_equal(tree["params"]["w"], state["params"]["w"])
    assert alone["params"]["w"].sharding.mesh == mesh_of(2)


def test_a_set_mesh_stands_for_none_with_other_axes_and_for_none_of_several(tmp_path: pathlib.Path) -> None:
    values = np.arange(8, dtype=np.float32)
    rows = PartitionSpec("data")
    one = {"w": jax.device_put(values, NamedSharding(mesh_of(2), rows))}
    two = one | {"v": jax.device_put(values, NamedSharding(mesh_of(4), rows))}
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, tree in enumerate([one, two]):
            manager.save(epoch, args=ocp.args.StandardSave(tree))
        with jax.set_mesh(mesh_of(4, "other")):
            assert manager.restore(0)["w"].sharding == one["w"].sharding
        with jax.set_mesh(mesh_of(1)):
            found = manager.restore(1)
    assert {name: found[name].sharding for name in two} == {name: two[name].sharding for name in two}


def test_a_shape_that_does_not_divide_is_said(tmp_path: pathlib.Path) -> None:
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.arange(6.0, dtype=np.float32)}))
        with jax.set_mesh(mesh_of(4)):
            rows = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec("data"))
            uneven = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=rows)
            with pytest.raises(ec.errors.MismatchError, match="does not divide evenly"):
                manager.restore(0, args=ocp.args.StandardRestore({"w": uneven}))


def test_steps_of_stock_orbax_are_restored_alike(tmp_path: pathlib.Path) -> None:
    saved = np.arange(32, dtype=np.float32).reshape(8, 4)
    stock_steps.write(tmp_path, "ocdbt-zarr2-single", {0: {"w": saved}})
    mesh = mesh_of(4)
    with jax.set_mesh(mesh), ec.CheckpointManager(tmp_path) as manager:
        described = jax.eval_shape(lambda: {"w": jnp.zeros((8, 4), out_sharding=PartitionSpec("data"))})
        found = manager.restore(0, args=ocp.args.StandardRestore(described))
    assert found["w"].sharding == NamedSharding(mesh, PartitionSpec("data", None))
    np.testing.assert_array_equal(found["w"], saved)


def test_checkpointers_of_v1_take_them(saved: pathlib.Path) -> None:
    mesh = mesh_of(4)
    _, described = made(mesh)
    with jax.set_mesh(mesh), ec.v1.training.Checkpointer(saved) as checkpointer:
        check(checkpointer.load(0, described), mesh)
        response = checkpointer.load_async(0, described)
    check(response.result(), mesh)


def test_sums_that_are_not_complete_are_refused(tmp_path: pathlib.Path) -> None:
    """Each device has a part of the sum. The error names the leaf, and what it says is enough."""
    product = jax.jit(
        lambda a, b: jax.lax.dot_general(
            a, b, (((1,), (0,)), ((), ())), out_sharding=PartitionSpec(None, None, unreduced={"data"})
        )
    )
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    with jax.set_mesh(mesh_of(4)), ec.CheckpointManager(tmp_path) as manager:
        columns = jax.device_put(values, PartitionSpec(None, "data"))
        sums = product(columns, jax.device_put(values, PartitionSpec("data")))
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"leaf 'w' .*unreduced.*jax\.reshard"):
            manager.save(0, args=ocp.args.StandardSave({"w": sums}))
        manager.save(0, args=ocp.args.StandardSave({"w": jax.reshard(sums, PartitionSpec())}))
        np.testing.assert_array_equal(manager.restore(0)["w"], values @ values)
