"""Arrays that were placed nowhere, such as the counters of optax: JAX uses them together with arrays on any devices."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import epochckpt as ec
from tests.support.managers import abstract, assert_same, sharding

OPTIMIZER = optax.adam(1e-3)


def state() -> dict[str, Any]:
    """Parameters on all devices; the optimizer's counter, the key and the step are where JAX put them."""
    params = {"w": jax.device_put(jnp.arange(8.0), sharding("model")), "b": jax.device_put(jnp.ones(3), sharding())}
    return {"params": params, "optimizer": OPTIMIZER.init(params), "step": jnp.int32(3), "key": jax.random.key(7)}


@jax.jit
def trained(state: dict[str, Any]) -> dict[str, Any]:
    noise = jax.random.uniform(state["key"]) * state["step"]
    grads = jax.tree.map(lambda x: x + noise, state["params"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}


def bare(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state()))
    return tmp_path


@pytest.mark.parametrize("form", ["the state", "with shardings", "without shardings", "restore_args"])
def test_training_goes_on_with_what_was_restored(saved: pathlib.Path, form: str) -> None:
    """Committed to one device, the counters would be refused beside parameters on four."""
    expected = state()
    target = {"with shardings": abstract, "without shardings": bare}.get(form, lambda tree: tree)(expected)
    args: Any = ocp.args.StandardRestore(target)
    if form == "restore_args":
        target = abstract(expected)
        args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    with ec.CheckpointManager(saved) as manager:
        for found in manager.restore(0, args=args), manager.restore_async(None, args=args).result():
            assert_same(trained(found), trained(expected))
            for restored, original in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert restored.committed == original.committed
                assert restored.sharding == original.sharding
        manager.save(1, args=ocp.args.StandardSave(found))
        again = manager.restore(1, args=args)
    assert not again["step"].committed
    assert_same(trained(again), trained(expected))


def test_without_a_target_too(saved: pathlib.Path) -> None:
    with ec.CheckpointManager(saved) as manager:
        found = manager.restore(None)
    assert [found["params"]["w"].committed, found["step"].committed, found["key"].committed] == [True, False, False]
    assert found["params"]["w"] + found["step"] is not None


def test_what_was_placed_on_a_device_stays_there(tmp_path: pathlib.Path) -> None:
    """An array of the same shape and device as one that was placed nowhere; and where the target is of one kind."""
    here = jax.devices()[0]
    placed = jax.device_put(np.float32(2), here)
    anywhere = jnp.float32(3)
    tree = {"a": placed, "b": jax.device_put(np.arange(3), jax.devices()[1]), "c": jax.device_put(np.arange(3))}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
        manager.save(1, args=ocp.args.StandardSave({"a": placed, "b": anywhere}))
        found = manager.restore(0)
        assert {name: leaf.committed for name, leaf in found.items()} == {"a": True, "b": True, "c": False}
        assert found["b"].sharding == SingleDeviceSharding(jax.devices()[1])
        mixed = manager.restore(1)
        assert [mixed["a"].committed, mixed["b"].committed] == [True, False]
        swapped = manager.restore(1, args=ocp.args.StandardRestore({"a": anywhere, "b": placed}))
        assert [swapped["a"].committed, swapped["b"].committed] == [False, True]
    assert [float(swapped["a"]), float(swapped["b"])] == [2.0, 3.0]


def test_a_description_may_ask_for_another_place(tmp_path: pathlib.Path) -> None:
    """Only the place where JAX shows what was placed nowhere says that it may stay so."""
    first, other = jax.devices()[:2]
    places = [
        (SingleDeviceSharding(first), False),
        (SingleDeviceSharding(other), True),
        (SingleDeviceSharding(first, memory_kind="pinned_host"), True),
    ]
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"n": jnp.float32(3)}))
        for place, committed in places:
            target = {"n": jax.ShapeDtypeStruct((), np.float32, sharding=place)}
            found = manager.restore(0, args=ocp.args.StandardRestore(target))["n"]
            assert (float(found), found.committed, found.sharding) == (3.0, committed, place)


def test_each_save_says_what_was_placed(tmp_path: pathlib.Path) -> None:
    """Also where that is all that differs from the save before."""
    number = jnp.float32(3)
    placed = jax.device_put(number, jax.devices()[0])
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, value in enumerate([number, placed, number]):
            manager.save(epoch, args=ocp.args.StandardSave({"n": value}))
        assert [manager.restore(epoch)["n"].committed for epoch in range(3)] == [False, True, False]


def test_a_number_becomes_an_array_as_the_target_is(tmp_path: pathlib.Path) -> None:
    rows = NamedSharding(sharding().mesh, PartitionSpec())
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"n": 3, "m": 4}))
        target = {"n": jnp.int32(0), "m": jax.device_put(jnp.int32(0), rows)}
        found = manager.restore(0, args=ocp.args.StandardRestore(target))
    assert isinstance(found["n"], jax.Array)
    assert [int(found["n"]), found["n"].committed] == [3, False]
    assert [int(found["m"]), found["m"].sharding] == [4, rows]


def test_the_record_says_so_of_these_only(saved: pathlib.Path) -> None:
    record = json.loads((saved / "0" / "epoch.json").read_bytes())
    shardings = record["items"]["default"]["shardings"]
    assert [row.get("committed") for row in shardings if "device" in row] == [False]
    assert all("committed" not in row for row in shardings if "mesh" in row)
