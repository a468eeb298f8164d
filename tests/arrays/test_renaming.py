"""Epochs whose leaves are restored under other names, or with other shapes: ours and those of stock Orbax alike."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.args import RenamedRestore
from epochckpt.errors import InvalidArgumentError, MismatchError, UnsupportedError
from tests.support.managers import MANAGERS, assert_same, sharding

LAYERS = {r"params/Dense_(\d+)/(.*)": r"params/layers/\1/\2"}


def tree() -> dict[str, Any]:
    """Two layers as Flax calls them, and what is not renamed."""
    layers = {f"Dense_{i}": {"kernel": jnp.full((4, 4), i + 1.0), "bias": np.arange(4.0) + i} for i in range(2)}
    return {"params": layers, "step": 7, "note": "text", "nothing": None}


def renamed(fill: Any) -> dict[str, Any]:
    """The same with the layers in a list."""
    layers = tree()["params"].values()
    return {
        "params": {"layers": [jax.tree.map(fill, layer) for layer in layers]},
        "step": 7,
        "note": "text",
        "nothing": None,
    }


@pytest.fixture(params=MANAGERS)
def run(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with `tree()` as epoch 3, and a JSON item, saved by ours or by stock Orbax."""
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(tree()), config=ocp.args.JsonSave({}))
    with MANAGERS[request.param](tmp_path / "run") as manager:
        manager.save(3, args=items)
    return tmp_path / "run"


def restore(run: pathlib.Path, args: Any) -> Any:
    with ec.CheckpointManager(run, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        return manager.restore(None, args=ocp.args.Composite(state=args))["state"]


def test_renamed_layers_are_restored_exactly(run: pathlib.Path) -> None:
    """Every leaf of the target comes from the one that has its name now; those that no pattern matches keep theirs."""
    assert_same(restore(run, RenamedRestore(renamed(np.zeros_like), LAYERS)), renamed(np.asarray))
    target = renamed(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding()))
    found = restore(run, RenamedRestore(target, LAYERS))["params"]["layers"][1]["kernel"]
    assert (found.sharding, found.dtype, found.sum()) == (sharding(), jnp.bfloat16, 32)
    first = {r"params/Dense_0/(.*)": r"first/\1", r".*": r"rest/\g<0>"}
    found = restore(run, RenamedRestore({"first": tree()["params"]["Dense_0"]}, first, partial=True))
    assert_same(found, {"first": tree()["params"]["Dense_0"]})


def test_base_weights_become_a_part_of_a_new_state(run: pathlib.Path) -> None:
    """LoRA: the base model's weights of another run; the adapters and the optimizer stay as they are."""
    base = jax.tree.map(jnp.zeros_like, tree()["params"])
    adapters = {"Dense_0": {"a": jnp.ones((4, 2)), "b": jnp.zeros((2, 4))}}
    state = {"params": {"base": base, "lora": adapters}, "opt_state": [jnp.full(3, 5.0)], "step": 0}
    rename = {r"params/(.*)": r"params/base/\1", "step": "base_step"}
    found = restore(run, RenamedRestore(state, rename, partial=True))
    base = jax.tree.map(jnp.asarray, tree()["params"])
    assert_same(found, {**state, "params": {"base": base, "lora": adapters}})


def test_what_does_not_fit_is_named_by_both_names(run: pathlib.Path) -> None:
    """One table, with the name in the target and the one in the epoch."""
    target = renamed(np.zeros_like)
    target["params"]["layers"][0]["kernel"] = np.zeros((9, 9))
    del target["params"]["layers"][1]["bias"]
    target["params"]["head"] = np.zeros(1)
    with pytest.raises(MismatchError) as caught:
        restore(run, RenamedRestore(target, LAYERS))
    assert [(r.leaf, r.problem) for r in caught.value.rows] == [
        ("params/head", "missing"),
        ("params/layers/0/kernel (from params/Dense_0/kernel)", "shape"),
        ("params/Dense_1/bias", "unexpected"),
    ]


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({r"param/(.*)": r"\1"}, r"'param/\(\.\*\)', which matches no leaf.*'params/Dense_0/bias'"),
        ({**LAYERS, r"params/Dense_1/(.*)": r"\1"}, "that an earlier pattern has not taken"),
        ({r"params/Dense_\d/(.*)": r"params/\1"}, "both called 'params/bias'"),
        ({"step": "note"}, "both called 'note'"),
        ({"(": "x"}, r"'\(', which is no regular expression"),
        ({r"step": r"\2"}, r"turns 'step' into '\\\\2'"),
        ({"step": 5}, "turns 'step' into 5"),
        ([("a", "b")], "rename expects a dict of patterns, got a list"),
    ],
)
def test_a_rename_that_cannot_be_meant_is_refused(run: pathlib.Path, rename: Any, words: str) -> None:
    """Nothing is left at its initial value because of a misspelt pattern."""
    with pytest.raises(InvalidArgumentError, match=f"item 'state'.*{words}"):
        restore(run, RenamedRestore(tree(), rename, partial=True))


def test_only_trees_of_arrays_are_renamed(run: pathlib.Path) -> None:
    """With a target."""
    with ec.CheckpointManager(run) as manager:
        with pytest.raises(InvalidArgumentError, match="RenamedRestore does not restore"):
            manager.restore(3, args=ocp.args.Composite(config=RenamedRestore({}, {})))
        with pytest.raises(InvalidArgumentError, match="needs a target"):
            manager.restore(3, args=ocp.args.Composite(state=RenamedRestore(None, {})))


def test_transforms_that_compute_are_refused(run: pathlib.Path) -> None:
    """By name; renames are in `test_orbax_guides`. A leaf may be wanted twice, in two ways."""
    transform = ocp.transform_utils.Transform
    for name in ("value_fn", "multi_value_fn"):
        with pytest.raises(UnsupportedError, match=f"Transform\\({name}=…\\) at 'a/step'"):
            restore(
                run, ocp.args.PyTreeRestore({"a": {"step": 0}}, transforms={"a": {"step": transform(**{name: max})}})
            )
    with pytest.raises(InvalidArgumentError, match="transforms has a str at 'step'"):
        restore(run, ocp.args.PyTreeRestore({"step": 0}, transforms={"step": "steps"}))
    with pytest.raises(InvalidArgumentError, match="needs item="):
        restore(run, ocp.args.PyTreeRestore(transforms={"step": transform(original_key="steps")}))
    target = {name: jax.ShapeDtypeStruct((4, 4), name, sharding=sharding()) for name in ("float32", "bfloat16")}
    wanted = {"float32|bfloat16": transform(original_key="params/Dense_1/kernel")}
    found = restore(run, ocp.args.PyTreeRestore(target, transforms=wanted))
    assert {name: (x.dtype.name, float(x.sum())) for name, x in found.items()} == {n: (n, 32.0) for n in target}


def test_arrays_are_cut_and_padded_and_every_one_is_named(run: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """`strict=False`: arrays, NumPy ones too, get the target's shape, of what was saved and zeros; on any sharding."""
    target = tree()
    devices = len(jax.devices())
    kernel = jax.ShapeDtypeStruct((4 * devices, 2), np.float32, sharding=sharding("model"))
    target["params"]["Dense_0"] = {"kernel": kernel, "bias": np.zeros(6)}
    target["params"]["Dense_1"]["bias"] = jnp.zeros(2)
    found = restore(run, ocp.args.StandardRestore(target, strict=False))["params"]
    expected = np.zeros((4 * devices, 2), np.float32)
    expected[:4] = 1
    assert_same(found["Dense_0"], {"kernel": expected, "bias": np.array([0.0, 1, 2, 3, 0, 0])})
    assert found["Dense_0"]["kernel"].sharding == sharding("model")
    assert found["Dense_1"]["bias"].tolist() == [1, 2]
    said = [r.getMessage() for r in caplog.records if "padded with zeros" in r.getMessage()]
    assert len(said) == 3
    assert any("leaf params/Dense_0/bias, float64[4], is cut or padded with zeros to [6]" in text for text in said)
    for wrong in (np.zeros((4, 4)), np.zeros(())):
        target["params"]["Dense_0"]["bias"] = wrong
        with pytest.raises(MismatchError, match="params/Dense_0/bias"):
            restore(run, ocp.args.StandardRestore(target, strict=False))
    place = ocp.ArrayRestoreArgs(sharding=sharding(), global_shape=(5, 3), strict=False)
    only = {"params": {"Dense_1": {"kernel": place}}}
    found = restore(
        run, ocp.args.PyTreeRestore(jax.tree.map(lambda _: 0, only), restore_args=only, partial_restore=True)
    )
    assert found["params"]["Dense_1"]["kernel"].tolist() == [[2.0] * 3] * 4 + [[0.0] * 3]


def test_keys_are_never_padded(tmp_path: pathlib.Path) -> None:
    """Keys of zeros would all draw the same numbers."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"keys": jax.random.split(jax.random.key(0), 2)}))
        manager.wait_until_finished()
        target = {"keys": jax.random.split(jax.random.key(0), 4)}
        with pytest.raises(MismatchError, match="keys"):
            manager.restore(0, args=ocp.args.StandardRestore(target, strict=False))
