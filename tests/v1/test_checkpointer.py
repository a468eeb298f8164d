"""The trainer of Orbax's v1 style. Tests that carry `both` run with Orbax's own class, too: so it is with Orbax."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as stock

import epochckpt as ec
from epochckpt import errors
from epochckpt import v1 as ocp
from epochckpt.storage import Store
from epochckpt.testing import Faults
from epochckpt.v1 import _ORBAX
from epochckpt.v1 import context as contexts
from tests.support import stock_states
from tests.support.managers import sharding
from tests.support.processes import run_worker
from tests.support.taps import NO_SPACE, WAIT_SECS, fail_writes, hold_commits, hold_writes
from tests.support.v1_items import Abstract, Left, LeftHandler, Position, Right, RightHandler

IS_NEW = hasattr(stock, "load")  # else the installed Orbax has the older names, and less
_QUIET = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not IS_NEW, reason="the installed Orbax has other names"),
]
both = pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(stock.training.Checkpointer, id="orbax", marks=_QUIET),
        pytest.param(ocp.training.Checkpointer, id="epochckpt"),
    ],
)
saves, keeps = ocp.training.save_decision_policies, ocp.training.preservation_policies
Trainer = Callable[..., Any]


def state(value: float = 0.0) -> dict[str, Any]:
    """A tree with an array over all devices, a NumPy array, numbers and a text."""
    w = jax.device_put(jnp.arange(16.0).reshape(8, 2) + value, sharding("model"))
    return {"params": {"w": w}, "rng": np.arange(3) + int(value), "step": int(value), "rate": 0.5, "name": "run"}


def abstract(tree: Any) -> Any:
    """What a tree is loaded as."""

    def leaf(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(leaf, tree)


def same(found: Any, expected: Any) -> None:
    """Types, structure, values and shardings are alike."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
        np.testing.assert_array_equal(a, b)


def steps(checkpointer: Any) -> list[int]:
    return [checkpoint.step for checkpoint in checkpointer.checkpoints]


def context(**options: Any) -> Any:
    """A Context with some options by their full names, joined by two underscores."""
    made = stock.Context()
    for name, value in options.items():
        *groups, last = name.split("__")
        at = made
        for group in groups:
            at = getattr(at, group)
        object.__setattr__(at, last, value)
    return made


@pytest.fixture
def checkpointer(faults: Faults, tmp_path: pathlib.Path) -> Any:
    with ocp.training.Checkpointer(tmp_path / "run") as found:
        yield found


# -- as Orbax's own trainer ------------------------------------------------------------------------------------------


@both
def test_a_new_directory_is_empty(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    with trainer(tmp_path / "run") as c:
        assert str(c.directory) == str(tmp_path / "run")
        assert list(c.checkpoints) == []
        assert c.latest is None
        assert not c.is_saving_in_progress()
        with pytest.raises(FileNotFoundError):
            c.load()
        with pytest.raises(ocp.training.errors.StepNotFoundError):
            c.metadata()


@both
def test_what_is_saved_is_loaded(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """With and without a target, by the default name and another one, as the newest, by number and by its metadata."""
    with trainer(tmp_path) as c:
        assert c.save(0, state())
        assert c.save(1, state(1), metrics={"loss": 0.5})
        assert c.save(2, state(2), checkpointable_name="model")
        same(c.load(0), state())
        same(c.load(0, abstract(state())), state())
        assert isinstance(c.latest, ocp.training.CheckpointMetadata)
        assert c.latest.step == 2
        same(c.load(c.checkpoints[1], abstract(state())), state(1))
        assert c.checkpoints[1].metrics == {"loss": 0.5}
        assert c.checkpoints[0].metadata is None
        same(c.load(checkpointable_name="model"), state(2))
        assert c.load_checkpointables().keys() == {"model"}
        assert c.load_checkpointables(0).keys() == {"state"}
        with pytest.raises(KeyError):
            c.load()


@both
def test_a_name_that_was_given_comes_back(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """Also one of those that Orbax has given to the unnamed item."""
    with trainer(tmp_path) as c:
        c.save_checkpointables(0, {"pytree": state()})
        c.save(1, state())
        assert c.load_checkpointables(0).keys() == c.checkpointables_metadata(0).metadata.keys() == {"pytree"}
        assert c.load_checkpointables(1).keys() == {"state"}


@both
def test_an_existing_step_is_kept_unless_it_is_to_be_overwritten(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    with trainer(tmp_path) as c:
        c.save(0, state())
        with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
            c.save(0, state(1))
        with pytest.raises(FileExistsError):
            c.save_async(0, state(1), force=True)
        same(c.load(0), state())
        assert c.save(0, state(1), overwrite=True)
        same(c.load(0), state(1))
        assert steps(c) == [0]
        assert c.save(1, state(), overwrite=True)
        assert steps(c) == [0, 1]


@both
def test_a_step_that_does_not_exist(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    with trainer(tmp_path) as c:
        c.save(0, state())
        for call in (c.load, c.load_checkpointables, c.metadata, c.checkpointables_metadata, c.delete):
            with pytest.raises(ocp.training.errors.StepNotFoundError):
                call(1)
        assert c.delete(1, missing_ok=True) is False


@both
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, range(6)),
        (saves.FixedIntervalPolicy(2), [0, 2, 4]),
        (saves.AnySavePolicy([saves.SpecificStepsPolicy((2, 5)), saves.InitialSavePolicy()]), [0, 2, 5]),
    ],
    ids=["default", "interval", "any"],
)
def test_the_policy_decides(tmp_path: pathlib.Path, trainer: Trainer, policy: Any, expected: Sequence[int]) -> None:
    """`should_save` says what `save` does."""
    with trainer(tmp_path, save_decision_policy=policy) as c:
        for step in range(6):
            assert c.should_save(step) == (step in expected)
            assert c.save(step, {"x": np.ones(2)}) == (step in expected)
        assert steps(c) == list(expected)
        assert c.save(7, {"x": np.ones(2)}, force=True)
        assert c.latest.step == 7


@both
def test_a_policy_of_ones_own(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """It sees steps and earlier steps, with times and metrics."""
    seen = []

    class Improved(saves.SaveDecisionPolicy):
        def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
            seen.append((step.step, [p.step for p in previous_steps], context.is_saving_in_progress))
            return not previous_steps or step.step >= previous_steps[-1].step + 2

    with trainer(tmp_path, save_decision_policy=Improved()) as c:
        for step in range(4):
            c.save(step, {"x": np.ones(2)})
    assert seen == [(0, [], False), (1, [0], False), (2, [0], False), (3, [0, 2], False)]


@both
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, range(6)),
        (keeps.LatestN(2), [4, 5]),
        (keeps.EveryNSteps(5), [0, 5]),
        (keeps.AnyPreservationPolicy([keeps.LatestN(1), keeps.CustomSteps([1, 3])]), [1, 3, 5]),
        (keeps.BestN(get_metric_fn=lambda m: m["loss"], reverse=True, n=2), [0, 5]),
    ],
    ids=["default", "latest", "every", "any", "best"],
)
def test_the_policy_of_what_is_kept(
    tmp_path: pathlib.Path, trainer: Trainer, policy: Any, expected: Sequence[int]
) -> None:
    with trainer(tmp_path, preservation_policy=policy) as c:
        for step in range(6):
            c.save(step, {"x": np.ones(2)}, metrics={"loss": [0.1, 0.5, 0.6, 0.7, 0.8, 0.2][step]})
        assert steps(c) == list(expected)
        c.wait()
    assert sorted(int(p) for p in os.listdir(tmp_path) if p.isdigit()) == list(expected)


@both
def test_reload_looks_at_storage(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    with trainer(tmp_path) as c:
        c.save(0, state())
        c.save(1, state())
        shutil.rmtree(tmp_path / "1")
        assert c.latest.step == 1
        c.reload()
        assert steps(c) == [0]


@both
def test_asynchronous_saves(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """A response, a callback, or None where the policy says no; `close` waits for what is left."""
    heard, called = threading.Event(), []
    with trainer(tmp_path, save_decision_policy=saves.FixedIntervalPolicy(2)) as c:
        response = c.save_async(0, state())
        response.on_complete(lambda saved: (called.append(saved), heard.set()))
        assert response.result() is True
        assert response.result(timeout=0) is True
        assert heard.wait(WAIT_SECS)
        assert called == [True]
        assert c.save_async(1, state()) is None
        assert c.save(1, state()) is False
        c.save_checkpointables_async(2, {"state": state(2), "other": {"y": np.ones(2)}})
        c.wait()
        assert not c.is_saving_in_progress()
        assert steps(c) == [0, 2]
        c.save_async(4, state())
    with trainer(tmp_path) as c:
        assert steps(c) == [0, 2, 4]


@both
def test_names_of_folders(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    if not hasattr(stock.path, "step"):
        pytest.skip("not in the installed Orbax")
    named = stock.path.step.standard_name_format(step_prefix="ckpt", step_format_fixed_length=4)
    with trainer(tmp_path, step_name_format=named) as c:
        c.save(3, state())
        assert c.latest.path.name == "ckpt_0003"
        same(c.load(), state())
    assert (tmp_path / "ckpt_0003").is_dir()


@both
def test_metadata(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """Of the directory, which is written once, and of an epoch; the tree fits as a target."""
    for number in range(2):
        with trainer(tmp_path, custom_metadata={"run": number}) as c:
            if not number:
                c.save(0, state(), metrics={"loss": 0.5}, custom_metadata={"by": "us"})
            assert isinstance(c.root_metadata(), ocp.training.RootMetadata)
            assert c.root_metadata().custom_metadata == {"run": 0}
            found = c.metadata(0)
            assert isinstance(found, ocp.training.CheckpointMetadata)
            assert (found.step, found.metrics, found.custom_metadata) == (0, {"loss": 0.5}, {"by": "us"})
            assert found.init_timestamp_nsecs <= found.commit_timestamp_nsecs
            assert found.metadata["params"]["w"].shape == (8, 2)
            assert found.metadata["rng"].dtype == np.int64
            assert {name: type(found.metadata[name]) for name in ("step", "rate", "name")} == {
                "step": int,
                "rate": float,
                "name": str,
            }
            w, rng = found.metadata["params"]["w"], found.metadata["rng"]
            assert w.sharding == w.sharding_metadata.to_jax_sharding() == state()["params"]["w"].sharding
            assert not hasattr(rng, "sharding")
            assert w.storage_metadata.chunk_shape == w.sharding.shard_shape((8, 2))
            assert rng.storage_metadata.chunk_shape == rng.shape
            same(c.load(0, found.metadata), state())
            every = c.checkpointables_metadata()
            assert every.metadata.keys() == {"state"}
            assert every.metadata["state"]["params"]["w"].shape == (8, 2)


def test_metadata_of_either_is_a_target_for_typed_keys(tmp_path: pathlib.Path) -> None:
    """Orbax's v1 describes a typed key by its data, and so do we; both come back as the key."""
    saved = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(3), 4), "w": jnp.ones(2)}
    with ec.v1.training.Checkpointer(tmp_path) as c:
        c.save(0, saved)
        described = [c.metadata(0).metadata]
        if hasattr(stock, "load"):
            with stock.training.Checkpointer(tmp_path) as theirs:
                described.append(theirs.metadata(0).metadata)
        for each in described:
            assert stock_states.differences(c.load(0, each), saved) == []


@pytest.fixture
def registry() -> Any:
    found = stock.handlers.local_registry()
    found.add(LeftHandler)
    found.add(RightHandler)
    *_, name = (n for n in inspect.signature(found.add).parameters if n.startswith("checkpointable"))
    found.add(stock.handlers.JsonHandler, **{name: "config"})
    return found


@both
def test_checkpointables_of_ones_own(tmp_path: pathlib.Path, trainer: Trainer, registry: Any) -> None:
    """Found by class, by what saved them, and by what is asked for; beside a tree, JSON and what saves itself."""
    objects = {"state": state(), "left": Left(1, "a"), "right": Right(2, "b"), "config": [1, None, {"a": "b"}]}
    with context(checkpointables_options__registry=registry), trainer(tmp_path) as c:
        assert c.save_checkpointables(0, {**objects, "position": Position(7)})
        assert c.save_checkpointables(1, {"left": Left(3, "c")})
        wanted = dict.fromkeys(objects)
        found = c.load_checkpointables(0, {**wanted, "position": (position := Position(0))})
        same(found.pop("state"), state())
        assert found.pop("position") is position
        assert position.value == 7
        assert found == {name: objects[name] for name in ("left", "right", "config")}
        assert {type(found["left"]), type(found["right"])} == {Left, Right}
        assert c.load_checkpointables(1) == {"left": Left(3, "c")}
        switched = c.load_checkpointables(0, {"left": Abstract(Right), "right": Abstract(Left)})
        assert (type(switched["left"]), type(switched["right"])) == (Right, Left)
        assert switched["left"] == Right(1, "a")
        known = c.checkpointables_metadata(0).metadata
        assert known.keys() == {*objects, "position"}
        assert known["left"] == Abstract(Left)
        assert known["config"] is None
        assert known["position"] is None
        same(c.load(0, abstract(state())), state())


@both
def test_the_context_counts(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """The one that it was made with, and before that an active one."""
    partial = context(pytree_options__loading__partial_load=True)
    with trainer(tmp_path, context=partial) as c:
        c.save(0, state())
        part = {"params": abstract(state())["params"]}
        same(c.load(0, part), {"params": state()["params"]})
        with stock.Context(), pytest.raises((KeyError, ValueError)):
            c.load(0, part)
        with context(array_options__saving__storage_options__dtype=jnp.bfloat16):
            c.save(1, {"x": jnp.ones(3)})
        assert c.load(1)["x"].dtype == jnp.bfloat16
        by_path = context(
            array_options__saving__scoped_storage_options_creator=lambda path, leaf: (
                type(partial.array_options.saving.storage_options)(dtype=jnp.float16)
                if "y" in jax.tree_util.keystr(path)
                else None
            )
        )
        with by_path:
            c.save(2, {"x": jnp.ones(3), "y": jnp.ones(3)})
        assert {name: str(leaf.dtype) for name, leaf in c.load(2).items()} == {"x": "float32", "y": "float16"}
        with context(array_options__loading__enable_padding_and_truncation=True):
            assert c.load(1, {"x": jax.ShapeDtypeStruct((5,), jnp.bfloat16)})["x"].tolist() == [1, 1, 1, 0, 0]
            with context(
                array_options__loading__enable_padding_and_truncation=True, pytree_options__loading__partial_load=True
            ):
                assert c.load(2, {"y": jnp.zeros(2, jnp.float16)})["y"].tolist() == [1, 1]


@both
def test_a_deleted_step_is_gone(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    with trainer(tmp_path) as c:
        for step in range(3):
            c.save(step, state(step))
        assert c.delete(1)
        assert not (tmp_path / "1").exists()
        response = c.delete_async(c.latest)
        assert steps(c) == [0]
        assert response.result()
        assert not (tmp_path / "2").exists()
        assert c.save(2, state(5))
        same(c.load(), state(5))


def test_a_deletion_that_leaves_files_says_so(checkpointer: Any, faults: Faults) -> None:
    """Once: in the response, else in `wait`. The step is gone, may be saved anew, and no save fails because of it."""
    c = checkpointer
    for step in range(4):
        c.save(step, state())
    tap = faults.fail(Store.remove_tree, NO_SPACE)
    with pytest.raises(errors.RemovalError, match=r"checkpoint 0 is deleted.*No space left"):
        c.delete(0)
    c.wait()
    response = c.delete_async(1)
    assert c.save(5, state())
    with pytest.raises(errors.RemovalError, match="checkpoint 1 is deleted"):
        c.wait()
    with pytest.raises(OSError, match="checkpoint 1 is deleted"):
        response.result()
    c.manager.delete(2)
    with pytest.raises(errors.RemovalError, match="checkpoint 2 is deleted"):
        c.manager.wait_until_finished()
    assert c.save(2, state(2), force=True)
    same(c.load(2), state(2))
    assert steps(c) == [2, 3, 5]
    tap.remove()
    failing = fail_writes(c.manager)
    c.save_async(6, state())
    tap = faults.fail(Store.remove_tree, NO_SPACE, where=lambda call: "removed" in call.path)
    c.delete_async(3)
    with pytest.raises(errors.SaveError, match="checkpoint 6") as caught:
        c.wait()
    assert any("checkpoint 3 is deleted" in note for note in caught.value.__notes__)
    failing.remove()
    tap.remove()
    c.wait()


@both
def test_older_names_work_and_warn(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    with trainer(tmp_path) as c:
        with pytest.warns(DeprecationWarning, match="Use `save` instead"):
            assert c.save_pytree(0, state())
        with pytest.warns(DeprecationWarning, match="Use `save_async` instead"):
            assert c.save_pytree_async(1, state(1)).result()
        with pytest.warns(DeprecationWarning, match="Use `load` instead"):
            same(c.load_pytree(0, abstract(state())), state())
        with pytest.warns(DeprecationWarning, match="Use `metadata` instead"):
            assert c.pytree_metadata(0).metadata["step"] == 0


# -- better than Orbax's ---------------------------------------------------------------------------------------------


def test_a_response_raises_what_happened_to_its_save(checkpointer: Any) -> None:
    """Not what happened to another one; nothing raises it twice, and the step can be saved anew."""
    c, tap = checkpointer, fail_writes(checkpointer.manager)
    failed = c.save_async(0, state())
    with pytest.raises(errors.SaveError, match="No space left"):
        failed.result()
    tap.remove()
    good = c.save_async(1, state(1), force=True)
    assert good.result() is True
    with pytest.raises(errors.SaveError, match="No space left"):
        failed.result()
    c.wait()
    assert steps(c) == [1]
    assert c.save(0, state(), force=True)
    assert steps(c) == [0, 1]
    tap = fail_writes(c.manager)
    c.save_async(2, state(2))
    with pytest.raises(errors.SaveError, match="checkpoint 2"):
        c.wait()
    c.wait()
    with pytest.raises(errors.SaveError, match="checkpoint 3"):
        c.save(3, state(3))
    tap.remove()
    assert c.save(3, state(3))


def test_a_save_in_flight_is_no_checkpoint_and_no_second_one_begins(checkpointer: Any) -> None:
    """By the default policy; `result` may wait for a while only."""
    c = checkpointer
    c.save(0, state())
    tap = hold_commits(c.manager)
    response = c.save_async(1, state(1))
    assert tap.reached.wait(WAIT_SECS)
    assert c.is_saving_in_progress()
    assert c.latest.step == 0
    assert not c.should_save(2)
    assert c.save_async(2, state(2)) is None
    assert c.save_async(1, state(1)) is None
    assert c.save_async(1, state(1), force=True) is None
    assert not c.save(1, state(1), force=True)
    with pytest.raises(TimeoutError):
        response.result(timeout=0.01)
    tap.let_go()
    assert response.result()
    assert not c.is_saving_in_progress()
    assert c.latest.step == 1
    with pytest.raises(ocp.training.errors.StepAlreadyExistsError, match="checkpoint 1 exists"):
        c.save_async(1, state(1), force=True)
    assert c.should_save(2)


def test_a_cancelled_save_is_never_committed(checkpointer: Any) -> None:
    """Its response says so, nothing else does; `cancel(step)` deletes what was committed before."""
    c = checkpointer
    c.save(0, state())
    tap = hold_writes(c.manager)
    response = c.save_async(1, state(1))
    second = c.save_async(2, state(2), force=True)
    assert tap.reached.wait(WAIT_SECS)
    c.cancel()
    tap.let_go()
    for each in (response, second):
        with pytest.raises(errors.SaveError, match="it was cancelled"):
            each.result()
    c.wait()
    assert steps(c) == [0]
    assert c.save(1, state(1))
    same(c.load(), state(1))
    c.cancel(1)
    c.cancel(9)
    c.cancel()
    assert steps(c) == [0]


def test_an_overwritten_step_is_there_until_the_new_one_is(checkpointer: Any) -> None:
    c = checkpointer
    c.save(0, state())
    tap = fail_writes(c.manager)
    with pytest.raises(errors.SaveError):
        c.save(0, state(1), overwrite=True)
    tap.remove()
    same(c.load(0), state())
    assert c.save(0, state(2), overwrite=True)
    same(c.load(0), state(2))


def test_the_newest_readable_checkpoint_is_loaded(tmp_path: pathlib.Path, checkpointer: Any) -> None:
    """Every byte is verified: a damaged epoch is passed over, unless it was asked for."""
    c = checkpointer
    for step in range(2):
        c.save(step, state(step))
    (path,) = (tmp_path / "run" / "1").glob("process_0/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.DamagedError, match=r"params/w|rng"):
        c.load(1)
    same(c.load(), state())
    assert c.latest.step == 0


def test_loads_in_the_background(checkpointer: Any) -> None:
    c, heard, got = checkpointer, threading.Event(), []
    c.save(0, state())
    response = c.load_async(0, abstract(state()))
    response.on_complete(lambda value: (got.append(value), heard.set()))
    same(response.result(), state())
    assert heard.wait(WAIT_SECS)
    same(got, [state()])
    same(c.load_checkpointables_async().result()["state"], state())
    with pytest.raises(ocp.training.errors.StepNotFoundError):
        c.load_async(4).result()


def test_leaves_may_be_types_or_left_out(checkpointer: Any) -> None:
    c, tree = checkpointer, state()
    c.save(0, tree)
    target = {"params": {"w": jax.Array}, "rng": np.ndarray, "step": int, "rate": float, "name": str}
    same(c.load(0, target), tree)
    for left_out in (..., None):
        assert c.load(0, {**target, "rate": left_out})["rate"] is left_out
        assert c.load(0, {**target, "params": {"w": left_out}})["params"] == {"w": left_out}
    with pytest.raises(errors.MismatchError, match="params/w"):  # as in Orbax: None stands for one leaf
        c.load(0, {**target, "params": None})
    with pytest.raises(errors.MismatchError, match="rng"):
        c.load(0, {name: leaf for name, leaf in target.items() if name != "rng"})


def test_leaves_with_other_names_are_loaded_as_the_error_says(checkpointer: Any) -> None:
    """In the words of this interface: what `load` takes, and the options of a Context."""
    c, tree = checkpointer, state()
    c.save(0, tree)
    renamed = {**tree, "weights": tree["params"]}
    del renamed["params"]
    for load in (c.load, lambda *given: c.load_async(*given).result()):
        with pytest.raises(errors.MismatchError) as caught:
            load(0, abstract(renamed))
        said = str(caught.value)
        assert "load(step, epochckpt.args.RenamedRestore(abstract_state, rename={'params': 'weights'}))" in said
        assert "partial_load" in said
        assert not any(word in said for word in ("restore_leaves", "PyTreeRestore", "StandardRestore"))
        same(load(0, ec.args.RenamedRestore(abstract(renamed), {"params": "weights"})), renamed)
    with pytest.raises(errors.MismatchError, match="enable_padding_and_truncation"):
        c.load(0, {**abstract(tree), "rng": np.zeros(9, int)})


def test_the_manager_underneath_has_the_rest(checkpointer: Any) -> None:
    c = checkpointer
    for step in range(3):
        c.save(step, state(step))
    assert c.manager.verify(2).ok
    c.manager.rollback_to(0)
    assert steps(c) == [0]
    assert c.manager.restore_leaves(0, "step", item="state") == {"step": 0}
    assert c.save(1, state(7))


def test_a_directory_in_an_object_store() -> None:
    with ocp.training.Checkpointer(f"memory://{uuid.uuid4().hex}/run") as c:
        for step in range(3):
            assert c.save(step, state(step), metrics={"loss": 1.0})
        assert c.save(1, state(5), overwrite=True, metrics={"loss": 0.5})
        assert c.delete(2)
        assert steps(c) == [0, 1]
        same(c.load(None, abstract(state())), state(5))
        assert c.metadata().metrics == c.latest.metrics == {"loss": 0.5}
        assert c.load_async(0).result()["step"] == 0


# -- what is refused -------------------------------------------------------------------------------------------------


def test_every_member_of_orbaxs_class_is_there() -> None:
    """With its parameters, in its order; what a newer Orbax adds has to be looked at."""
    mine, theirs = ocp.training.Checkpointer, stock.training.Checkpointer
    for name in [n for n in vars(theirs) if not n.startswith("_")] + ["__init__"]:
        assert name in vars(mine), name
        member = vars(theirs)[name]
        if callable(member):
            known = inspect.signature(vars(mine)[name]).parameters
            for parameter in inspect.signature(inspect.unwrap(member)).parameters.values():
                if parameter.name not in ("args", "kwargs") and "pytree" not in name:
                    assert known[parameter.name].kind == parameter.kind, (name, parameter)
    names = [n for n in dir(stock.training) if not n.startswith("_")]
    assert set(names) - set(dir(ocp.training)) <= {"pathways"}


def test_what_orbax_has_and_we_have_not_is_refused_by_name(checkpointer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock.training.Checkpointer, "prefetch", lambda self: None, raising=False)
    version = orbax.checkpoint.__version__
    with pytest.raises(AttributeError, match=f"no attribute 'prefetch'; that of orbax-checkpoint {version} has it"):
        checkpointer.prefetch()
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        checkpointer.nonsense()
    with pytest.raises(AttributeError, match="no attribute 'load_checkpointables'; orbax"):
        ocp.load_checkpointables  # noqa: B018
    assert ec.training is ocp.training


def test_every_name_of_orbaxs_module_is_known() -> None:
    """What a loop needs beside the trainer is Orbax's own; what reads or writes single checkpoints is refused."""
    names = {name for name in dir(stock) if not name.startswith("_")}
    for name in names & _ORBAX:
        assert getattr(ocp, name) is getattr(stock, name)
    assert not IS_NEW or names >= _ORBAX - {"serialization"}  # it was a module in older Orbax
    single = re.compile(r"(save|load|delete)(_\w+)?|(\w+_)?metadata|is_orbax_checkpoint|partial")
    for name in names - _ORBAX - {"training"}:
        assert single.fullmatch(name), name
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; orbax.checkpoint.v1 has it"):
            getattr(ocp, name)


@both
def test_a_target_that_does_not_fit_is_a_key_error(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """As training code expects that tries a smaller tree then."""
    with trainer(tmp_path) as c:
        c.save(0, {"w": np.arange(3.0)})
        for wrong in ({"w": np.zeros(3), "more": np.zeros(1)}, {"v": np.zeros(3)}, {}):
            with pytest.raises(KeyError) as caught:
                c.load(0, wrong)
            assert "\n" in str(caught.value) or not isinstance(caught.value, errors.MismatchError)


@dataclasses.dataclass
class Described:
    """An array as Orbax's v1 describes one that is not sharded."""

    shape: tuple[int, ...] | None
    dtype: Any


@both
def test_a_description_without_a_sharding_asks_for_numpy(tmp_path: pathlib.Path, trainer: Trainer) -> None:
    """Whatever was saved; where it says nothing, as it was saved."""
    saved = {"jax": jnp.arange(3.0), "numpy": np.arange(3), "number": jnp.int32(4)}
    kinds = {name: (value.shape, value.dtype) for name, value in saved.items()}
    with trainer(tmp_path) as c:
        c.save(0, saved)
        for target in (
            {name: Described(*kind) for name, kind in kinds.items()},
            {name: Described(None, None) for name in kinds},
            {name: np.zeros(*kind) for name, kind in kinds.items()},
            dict.fromkeys(kinds, np.ndarray),
        ):
            found = c.load(0, target)
            assert {type(value) for value in found.values()} == {np.ndarray}
            assert {name: (value.shape, value.dtype) for name, value in found.items()} == kinds
            for name, value in saved.items():
                np.testing.assert_array_equal(found[name], value)


@pytest.mark.skipif(not hasattr(stock.Context(), "pathways_options"), reason="the installed Orbax has no such options")
def test_pathways_options_that_ask_for_nothing_are_accepted(tmp_path: pathlib.Path) -> None:
    """Training code sets them to what goes without Pathways; what needs it is refused."""
    implementations = orbax.checkpoint.pathways.CheckpointingImpl
    plain = context(pathways_options__checkpointing_impl=implementations.from_options())
    with ocp.training.Checkpointer(tmp_path / "run", context=plain) as c:
        assert c.save(0, state())
    asking = [each for each in implementations if each is not implementations.from_options()]
    assert asking
    for each in asking:
        wrong = context(pathways_options__checkpointing_impl=each)
        with pytest.raises(errors.UnsupportedError, match="epochckpt does not run on Pathways"):
            ocp.training.Checkpointer(tmp_path / "other", context=wrong)


REFUSED: dict[str, Any] = {
    "deletion_options__gcs_deletion_options__todelete_full_path": "trash",
    "memory_options__serialization_status_callback": print,
}


def test_options_of_a_context_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Before anything is written. What is about Orbax's own engine is accepted."""
    for name, value in REFUSED.items():
        if not IS_NEW and not hasattr(stock.Context(), name.split("__")[0]):
            continue
        wrong = context(**{name: value})
        with pytest.raises(errors.UnsupportedError, match=name.replace("__", ".")):
            ocp.training.Checkpointer(tmp_path / "run", context=wrong)
    with pytest.raises(errors.UnsupportedError, match="checkpoint_layout SAFETENSORS"):
        ocp.training.Checkpointer(
            tmp_path / "run", context=context(_checkpoint_layout=type(stock.Context().checkpoint_layout).SAFETENSORS)
        )
    assert not (tmp_path / "run").exists()
    engine = context(array_options__saving__use_zarr3=False, async_options__create_directories_asynchronously=False)
    with ocp.training.Checkpointer(tmp_path / "run", context=engine) as c:
        c.save(0, state())
        with pytest.raises(errors.UnsupportedError, match="an epoch is deleted as a whole"):
            c.delete(0, checkpointable_name="state")
        assert steps(c) == [0]


def options_of(value: Any, name: str) -> list[str]:
    """The full names of the options in one of a context's groups."""
    if not dataclasses.is_dataclass(value):
        return [name]
    return [n for f in dataclasses.fields(value) for n in options_of(getattr(value, f.name), f"{name}.{f.name}")]


@pytest.fixture
def newer_orbax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An Orbax whose FileOptions have one option more."""
    kind = type(stock.Context().file_options)
    frozen = kind.__dataclass_params__.frozen  # in older Orbax
    wider = dataclasses.make_dataclass("Wider", [("novelty", int, 0)], bases=(kind,), frozen=frozen)

    class Newer(stock.Context):
        def __init__(self, novelty: int = 0):
            super().__init__()
            object.__setattr__(self, "_file_options", wider(novelty=novelty))

    monkeypatch.setattr(stock, "Context", Newer)
    contexts.defaults.cache_clear()
    yield
    contexts.defaults.cache_clear()


def test_an_option_of_a_newer_orbax_is_refused_if_it_is_set(newer_orbax: None) -> None:
    """Nobody has looked yet at what it means here."""
    contexts.check(stock.Context())
    with pytest.raises(errors.UnsupportedError, match=r"file_options\.novelty is an option of a newer Orbax"):
        contexts.check(stock.Context(novelty=1))


def test_every_option_of_orbaxs_context_is_known() -> None:
    """One that a newer Orbax adds has to be looked at; until then it is refused, if it is set."""
    made = stock.Context()
    groups = {name.removeprefix("_"): value for name, value in vars(made).items() if name != "_checkpoint_layout"}
    names = [name for group, value in groups.items() for name in options_of(value, group)]
    assert len(names) > 15
    known = contexts.HONOURED | contexts.HINTS.keys() | contexts.REFUSED.keys()
    for name in names:
        parts = name.split(".")
        assert any(".".join(parts[:count]) in known for count in range(1, len(parts) + 1)), name


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a negative step": (lambda c: c.save(-1, state()), "expected an integer of at least 0"),
    "a step that is true": (lambda c: c.save(True, state()), "True"),
    "a step that is text": (lambda c: c.load("newest"), "newest"),
    "nothing": (lambda c: c.save(1, None), "'state' is None"),
    "no dict": (lambda c: c.save_checkpointables(1, [state()]), "expects a dict of objects by name, got a list"),
    "an empty dict": (lambda c: c.save_checkpointables(1, {}), "an empty one"),
    "a reserved name": (lambda c: c.save_checkpointables(1, {"metrics": state()}), "'metrics' is reserved"),
    "an empty name": (lambda c: c.save(1, state(), checkpointable_name=""), "item name '' is not usable"),
    "a path as a name": (lambda c: c.save(1, state(), checkpointable_name="../x"), "'../x' is not usable"),
    "a leaf that is no value": (lambda c: c.save(1, {"a": object()}), "'a'"),
    "metadata that is no JSON": (lambda c: c.save(1, state(), custom_metadata={"x": object()}), "custom_metadata"),
    "a name that is not there": (lambda c: c.load(0, checkpointable_name="other"), "no item 'other'; it has: default"),
    "another shape": (lambda c: c.load(0, {**state(), "rng": np.zeros(4)}), r"rng.*shape"),
    "an epoch that is not there": (lambda c: c.load_checkpointables(7, {"x": None}), "no checkpoint 7"),
    "an object that no handler takes": (
        lambda c: c.save_checkpointables(1, {"state": state(), "x": Left(1, "a")}),
        r"item 'x'.* a tests\.support\.v1_items\.Left cannot be saved",
    ),
    "an expected object that no handler takes": (
        lambda c: c.load_checkpointables(0, {"state": Abstract(Left)}),
        r"value +missing +- +Abstract",
    ),
}


@pytest.mark.parametrize("what", list(BAD))
def test_bad_input_says_what_is_wrong_and_loses_nothing(checkpointer: Any, what: str) -> None:
    call, message = BAD[what]
    checkpointer.save(0, state())
    with pytest.raises(errors.EpochCheckpointError, match=f"(?s){message}"):
        call(checkpointer)
    assert steps(checkpointer) == [0]
    same(checkpointer.load(), state())
    assert checkpointer.save(1, state(1), force=True)


def test_an_item_whose_handler_is_not_known_here_says_so(tmp_path: pathlib.Path, registry: Any) -> None:
    with context(checkpointables_options__registry=registry), ocp.training.Checkpointer(tmp_path) as c:
        c.save_checkpointables(0, {"state": state(), "left": Left(1, "a")})
    with ocp.training.Checkpointer(tmp_path) as c:
        with pytest.raises(errors.InvalidArgumentError, match=r"'left' was saved by tests\.support\.v1_items\.Left"):
            c.load_checkpointables()
        same(c.load(), state())
        with pytest.raises(errors.EpochCheckpointError, match="left"):
            c.load(checkpointable_name="left")


# -- several processes -----------------------------------------------------------------------------------------------


def part_of(step: int, index: Any) -> np.ndarray:
    return np.full(8, step, np.float32)[index]


def train_together(directory: str, policy: str) -> dict[str, Any]:
    """Saves by a policy on several processes, which are apart by some steps; barriers are errors."""

    def barrier(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a barrier")

    multihost_utils.sync_global_devices = multihost_utils.broadcast_one_to_all = barrier
    orbax.checkpoint.multihost.sync_global_processes = orbax.checkpoint.multihost.broadcast_one_to_all = barrier
    process, sizes = jax.process_index(), sharding("model")
    chosen = None if policy == "default" else saves.FixedIntervalPolicy(4)
    asked, responses = [], []
    with ocp.training.Checkpointer(directory, save_decision_policy=chosen) as c:
        for step in range(60):
            x = jax.make_array_from_callback((8,), sizes, functools.partial(part_of, step))
            asked.append(c.should_save(step))
            if (response := c.save_async(step, {"x": x})) is not None:
                responses.append((step, response))
            if policy == "default" and responses and step % 15 == 7 * process:
                responses[-1][1].result()  # each process pauses elsewhere
        ended = [(step, response.result()) for step, response in responses]
        blocking = [c.save(step, {"x": x}) for step in range(60, 65)] if policy == "default" else []
        c.reload()
        loaded = c.load(None, {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sizes)})["x"]
        value = float(loaded.addressable_shards[0].data[0])
        return {"asked": asked, "ended": ended, "steps": steps(c), "loaded": value, "blocking": blocking}


@pytest.mark.parametrize(
    "policy", [pytest.param("interval", marks=pytest.mark.long), pytest.param("default", marks=pytest.mark.slow)]
)
def test_processes_agree_without_barriers(tmp_path: pathlib.Path, policy: str) -> None:
    """All save the same steps, every one is committed, and the default policy saves again when a save has ended."""
    one, two = run_worker(
        "tests.v1.test_checkpointer:train_together", {"directory": str(tmp_path / "run"), "policy": policy}, 2, 2
    )
    assert one == two
    saved = [step for step, asked in enumerate(one["asked"]) if asked]
    assert saved == [step for step, ended in one["ended"] if ended]
    if policy == "interval":
        assert saved == list(range(0, 60, 4))
    else:
        assert saved[0] == 0
        assert len(saved) > 2
        assert one["blocking"] == [True] * 5  # no save is in progress at any of these
        saved += range(60, 65)
    assert one["steps"] == saved
    assert one["loaded"] == 59 if policy == "default" else saved[-1]
