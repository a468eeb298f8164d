"""Scalars whose dtype is weak, as JAX makes them of Python numbers: restored they give way to others as before."""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from tests.support.managers import abstract, assert_same, sharding

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def state() -> dict[str, Any]:
    """Parameters of half precision, a factor on no device and one on all, and a counter that was a Python number."""
    params = jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), sharding("model"))
    counter = jax.jit(lambda count: count + 1)(0)
    return {"params": params, "decay": jnp.asarray(0.7), "scale": jax.device_put(1.5, sharding()), "step": counter}


@jax.jit
def trained(state: dict[str, Any]) -> dict[str, Any]:
    def body(params: jax.Array, _: None) -> tuple[jax.Array, None]:
        return params * state["decay"] + state["scale"], None  # jax.lax.scan demands that the dtype stays

    params, _ = jax.lax.scan(body, state["params"], None, length=3)
    return state | {"params": params, "step": state["step"] + 1}


def weak(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.weak_type, tree)


def bare(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("form", ["nothing", "the state", "eval_shape", "with shardings", "without shardings"])
def test_training_goes_on_with_what_was_restored(tmp_path: pathlib.Path, form: str) -> None:
    """With strong dtypes the product would have full precision, and the loop would be refused."""
    expected = state()
    with pytest.raises(TypeError, match="carry"):
        trained(jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), expected))
    target: Any = {
        "nothing": None,
        "the state": expected,
        "eval_shape": jax.eval_shape(state),
        "with shardings": abstract(expected),
        "without shardings": bare(expected),
    }[form]
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Save(expected))
        for found in manager.restore(0, args=Restore(target)), manager.restore_async(0, args=Restore(target)).result():
            assert weak(found) == {"params": False, "decay": True, "scale": True, "step": True}
            assert found["scale"].sharding == expected["scale"].sharding
            assert_same(found, expected)
            assert_same(trained(found), trained(expected))
        manager.save(1, args=Save(found))
        assert weak(manager.restore(1)) == weak(expected)


def test_a_dtype_that_is_strong_from_one_save_to_the_next(tmp_path: pathlib.Path) -> None:
    """The plan of the save before does not count for it."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, strong in enumerate([False, True, False]):
            scale = jnp.float32(2) if strong else jnp.asarray(2.0)
            manager.save(epoch, args=Save({"scale": scale}))
        found = [manager.restore(epoch)["scale"].weak_type for epoch in range(3)]
    assert found == [True, False, True]


def test_another_dtype_is_strong_and_so_are_arrays(tmp_path: pathlib.Path) -> None:
    """What the target asks for is no dtype of a Python number; nor is there a way to make an array of dimensions so."""
    tree = {"scale": jnp.asarray(0.5), "row": jnp.full(3, 0.5), "complex": jnp.asarray(2j)}
    assert weak(tree) == {"scale": True, "row": True, "complex": True}
    target = {"scale": jax.ShapeDtypeStruct((), jnp.bfloat16), "row": tree["row"], "complex": tree["complex"]}
    numbers = {"scale": 0.0, "row": np.zeros(3, np.float32), "complex": 0j}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Save(tree))
        found = manager.restore(0, args=Restore(target))
        python = manager.restore(0, args=Restore(numbers))
    assert weak(found) == {"scale": False, "row": False, "complex": True}
    assert found["scale"].dtype == jnp.bfloat16
    assert [python["scale"], python["complex"]] == [0.5, 2j]


def test_no_bit_and_no_dtype_is_given_up_for_it(tmp_path: pathlib.Path) -> None:
    """A NaN that Python has not, and a dtype that is not that of Python's numbers any more."""
    signalling = np.frombuffer(struct.pack("<I", 0x7F800001), np.float32)[0]
    odd = jnp.asarray(0.0).at[...].set(signalling)
    tree = {"scale": jnp.asarray(0.1), "nan": jnp.asarray(jnp.nan), "minus zero": jnp.asarray(-0.0), "odd": odd}
    assert all(weak(tree).values())
    assert odd.tobytes() == signalling.tobytes()
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Save(tree))
        found = manager.restore(0)
        with jax.enable_x64(True):
            other = manager.restore(0)
    assert weak(found) == weak(tree) | {"odd": False}
    assert not any(weak(other).values())
    for restored in (found, other):
        for name, leaf in tree.items():
            assert restored[name].dtype == leaf.dtype
            assert restored[name].tobytes() == leaf.tobytes()


def test_the_record_says_so_of_these_only(tmp_path: pathlib.Path) -> None:
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Save(state()))
    leaves = json.loads((tmp_path / "0" / "epoch.json").read_bytes())["items"]["default"]["leaves"]
    assert {row[0][0]: row[7:] for row in leaves} == {"decay": [True], "params": [], "scale": [True], "step": [True]}
