"""Epochs whose leaves are restored under other names, or with other shapes: ours and those of stock Orbax alike."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import pickle
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.args import RenamedRestore
from epochckpt.arrays import mismatches
from epochckpt.errors import InvalidArgumentError, Mismatch, MismatchError, SuggestedRename, UnsupportedError
from tests.support.managers import MANAGERS, assert_same, sharding

LAYERS = {"params/Dense_*": "params/layers/*"}


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
    first = {"params/Dense_0": "first", "": "rest", "params/*": "rest/*"}
    found = restore(run, RenamedRestore({"first": tree()["params"]["Dense_0"]}, first, partial=True))
    assert_same(found, {"first": tree()["params"]["Dense_0"]})
    by_function = RenamedRestore(renamed(np.zeros_like), lambda name: re.sub(r"Dense_(\d+)", r"layers/\1", name))
    assert_same(restore(run, by_function), renamed(np.asarray))


def test_base_weights_become_a_part_of_a_new_state(run: pathlib.Path) -> None:
    """LoRA: the base model's weights of another run; the adapters and the optimizer stay as they are."""
    base = jax.tree.map(jnp.zeros_like, tree()["params"])
    adapters = {"Dense_0": {"a": jnp.ones((4, 2)), "b": jnp.zeros((2, 4))}}
    state = {"params": {"base": base, "lora": adapters}, "opt_state": [jnp.full(3, 5.0)], "step": 0}
    rename = {"params": "params/base", "step": "base_step"}
    found = restore(run, RenamedRestore(state, rename, partial=True))
    base = jax.tree.map(jnp.asarray, tree()["params"])
    assert_same(found, {**state, "params": {"base": base, "lora": adapters}})


def blocks(name: str, count: int, **more: Any) -> dict[str, Any]:
    """Blocks with an attention of this name."""
    dense = {"kernel": np.ones((4, 2)), "bias": np.ones(2)}
    block = {name: {"q": dense, "k": dense, "v": dense}, "mlp": np.ones(4)}
    return {"params": {"blocks": [block] * count, "head": np.ones(3)}, **more}


@pytest.mark.parametrize(
    ("target", "rename", "shown"),
    [
        (blocks("attention", 12), {"params/blocks/*/attn": "params/blocks/*/attention"}, 1),
        (blocks("attention", 12, new=np.ones(9)), {"params/blocks/*/attn": "params/blocks/*/attention"}, 2),
        ({"model": blocks("attn", 12)["params"]}, {"params": "model"}, 1),
        (blocks("attn", 12)["params"], {"params": ""}, 1),
        ({"ema": blocks("attn", 12)}, {"": "ema"}, 1),
        ({"params": {**{f"h_{i}": blocks("attn", 1)["params"]["blocks"][0] for i in range(12)}, "head": np.ones(3)}},
         {"params/blocks/*": "params/h_*"}, 1),
        ({"params": {"blocks": blocks("attn", 12)["params"]["blocks"], "lm_head": np.ones(3)}},
         {"params/head": "params/lm_head"}, 1),
        # neither of these two is likelier, and another shape is no other name
        ({"params": {"blocks": blocks("attn", 12)["params"]["blocks"], "a": np.ones(3), "b": np.ones(3)}}, {}, 3),
        ({"params": {"blocks": blocks("attn", 12)["params"]["blocks"], "head_": np.ones(4)}}, {}, 2),
    ],
)  # fmt: skip
def test_renamed_parts_are_found_and_the_rename_that_is_suggested_works(
    tmp_path: pathlib.Path, target: Any, rename: dict[str, str], shown: int
) -> None:
    """A row for each rename, of however many leaves; `rows` has every leaf."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(blocks("attn", 12)))
        manager.wait_until_finished()
        with pytest.raises(MismatchError) as caught:
            manager.restore(0, args=ocp.args.StandardRestore(target))
        error, text = caught.value, str(caught.value)
        assert {one.old: one.new for one in error.renames} == rename
        table = text[text.index("in the target\n") : text.index("Nothing was restored")].splitlines()[1:]
        assert len([line for line in table if ".rows of this error" not in line]) == shown
        assert len({row.leaf for row in error.rows}) == len(error.rows) >= sum(len(r.leaves) for r in error.renames)
        if rename:
            assert f"epochckpt.args.RenamedRestore(target, rename={rename!r})" in text
            partial = "new" in target
            assert_same(manager.restore(0, args=RenamedRestore(target, rename, partial)), target)
        assert repr(pickle.loads(pickle.dumps(error)).renames) == repr(error.renames)


def suggested(olds: list[str], news: list[str]) -> list[SuggestedRename]:
    """For an epoch and a target with these leaves, all of one shape, and one leaf that fits."""
    unexpected = [Mismatch(name, "unexpected", "float32[4]", "-") for name in olds]
    missing = [Mismatch(name, "missing", "-", "float32[4]") for name in news]
    return mismatches.suggested([*unexpected, *missing], [*olds, "step"], [*news, "step"])


@pytest.mark.parametrize(
    ("olds", "news", "rename"),
    [
        (["enc/bias", "enc/scale"], ["enc/offset"], {}),
        (["enc/offset"], ["enc/bias", "enc/scale"], {}),
        (["m/a", "m/b", "n/b"], ["m/c", "n/c"], {"n/b": "n/c"}),
        ([f"layers_{i}/w" for i in range(3)], [f"blocks_{i + 1}/w" for i in range(3)], {}),
        ([f"layers/{i}/w" for i in range(3)], [f"blocks/{i}/w" for i in range(4)], {}),
        (["layers_0/w"], ["layers_3/w"], {}),  # layers 1 and 2 fit
        ([f"layers_{i}/w" for i in range(3)], [f"blocks_{i}/w" for i in range(3)], {"layers_*": "blocks_*"}),
        ([f"h_{i}/Dense/w" for i in range(2)], [f"h_{i}/Dense_0/w" for i in range(2)],
         {"h_0/Dense": "h_0/Dense_0", "h_1/Dense": "h_1/Dense_0"}),
        (["a*/w"], ["b*/w"], {}),
        (["a*/w"], ["b/w"], {}),
        (["a/w"], ["b*/w"], {}),
        (["a/w"], ["b*/w", "c/w"], {}),
        (["a*/w", "a1/w"], ["b*/w", "b1/w"], {"a1": "b1"}),
        (["a/*", "a/v"], ["b/*", "b/v"], {"a": "b"}),
    ],
)  # fmt: skip
def test_a_rename_is_suggested_only_if_no_other_is_as_likely(
    olds: list[str], news: list[str], rename: dict[str, str]
) -> None:
    """A wrong one restores wrong weights without an error; `*` in a key would be read as a pattern."""
    assert {one.old: one.new for one in suggested(olds, news)} == rename


def test_a_suggested_rename_has_the_leaves_of_the_epoch_first() -> None:
    """Also one that stands for several parts."""
    (one,) = suggested([f"layers_{i}/w" for i in range(2)], [f"blocks_{i}/w" for i in range(2)])
    assert one.leaves == ("layers_0/w", "layers_1/w", "blocks_0/w", "blocks_1/w")


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("layers_{}/kernel", "layers_{}/weight", 1),
        ("params/layers_{}/kernel", "model/layers_{}/kernel", 1),
        ("params/h/layers_{}/attn/kernel", "model/h/layers_{}/attn/weight", 0),
        ("params/a{}/kernel", "params/b{}x/kernel", 1),
    ],
)
def test_renames_of_many_leaves_of_one_shape_are_found_in_few_steps(old: str, new: str, count: int) -> None:
    """Eight times the leaves take some eight times as many lines of code, not sixty-four times."""
    steps = list[int]()
    for many in (50, 400):
        names = [old.format(i) for i in range(many)], [new.format(i) for i in range(many)]
        with lines_run() as lines:
            assert len(suggested(*names)) == count
        steps.append(next(lines))
    assert steps[1] < 16 * steps[0], steps


@contextlib.contextmanager
def lines_run() -> Iterator[Iterator[int]]:
    """Counts the lines of code that this thread runs inside; the next number of the iterator is the count so far."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        next(lines)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_many_leaves_that_are_missing_have_a_row_for_their_part_of_the_tree(run: pathlib.Path) -> None:
    """An optimizer's state with arrays of many shapes, and what is missing beside it."""
    mu = {f"layer_{i}": {k: np.ones(i + 1) for k in ("kernel", "bias", "scale")} for i in range(8)}
    with pytest.raises(MismatchError) as caught:
        restore(run, ocp.args.StandardRestore({**tree(), "opt_state": {"mu": mu}, "extra": 1}))
    assert len(caught.value.rows) == 25
    shown = r"\n  extra +missing +- +int\n  opt_state/mu/… \(24 leaves\) +missing +- +various\n"
    assert re.search(shown, str(caught.value))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"param": ""}, "no leaf matches 'param'; near: 'params/Dense_0/bias'"),
        ({"params/Dense_*/scale": "x*"}, r"no leaf matches 'params/Dense_\*/scale'"),
        ({"params": "p", "params/Dense_*": "p/*"}, "has 'params', and entries with more keys"),
        ({"params/Dense_0": "p", "params/Dense_1": "p"}, "both be called 'p/bias'"),
        ({"step": "note"}, "both be called 'note'"),
        ({"params/Dense_*": "params"}, r"as many \* in the new name as in the old one"),
        ({"step": 5}, "rename must map names to names"),
        ([("a", "b")], "rename must be a mapping or a function, got a list"),
        (lambda name: None, r"rename\('.*'\) is a NoneType; expected the new name"),
    ],
)
def test_a_rename_that_cannot_be_meant_is_refused(run: pathlib.Path, rename: Any, words: str) -> None:
    """Nothing is left at its initial value because of a misspelt pattern."""
    with pytest.raises(InvalidArgumentError, match=words):
        restore(run, RenamedRestore(tree(), rename, partial=True))


@pytest.mark.parametrize("describe", [lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lambda x: ocp.RestoreArgs()])
def test_no_leaf_of_a_partial_restore_stays_a_description(run: pathlib.Path, describe: Any) -> None:
    """What the epoch lacks has a value in the target, or is named; a value may be any, also none."""
    state = {"step": 0, "ema": {"w": describe(np.zeros(3)), "decay": 0.9, "none": None}}
    with pytest.raises(MismatchError, match="give them values") as caught:
        restore(run, RenamedRestore(state, {}, partial=True))
    assert [(row.leaf, row.problem) for row in caught.value.rows] == [("ema/w", "no value")]
    state["ema"]["w"] = np.ones(3)
    assert_same(restore(run, RenamedRestore(state, {"note": "text"}, partial=True)), {**state, "step": 7})


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
