"""What Orbax's public guides and the Flax guide show of `CheckpointManager`, in our words, with both classes.

The guides: Checkpointing with Orbax (101), API overview, the refactored API, asynchronous checkpointing, preemption
tolerance, PyTrees of arrays, partial restoration, customizing, and Flax's "Save and load checkpoints".
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training import orbax_utils, train_state
from google.protobuf import struct_pb2
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from orbax.checkpoint.checkpoint_managers import preservation_policy, save_decision_policy
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from tests.support.managers import ManagerClass, abstract, assert_same, both, names, or_refused, sharding

pytestmark = both
Options = ocp.CheckpointManagerOptions
KEYS_WITH_ARGS = tuple(int(number) for number in ocp.__version__.split(".")[:2]) >= (0, 12)


def arrays() -> dict[str, Any]:
    """A small state on the host."""
    return {"a": np.arange(8), "b": np.linspace(0, 1, 16)}


def sharded() -> dict[str, Any]:
    """A small state, split over all devices."""
    return {"a": jax.device_put(np.arange(16), sharding("model")), "b": jax.device_put(np.ones(16), sharding("model"))}


def save_one(manager_class: ManagerClass, directory: pathlib.Path, args: Any, step: int = 0, **kwargs: Any) -> None:
    """One checkpoint by a manager of its own."""
    with manager_class(directory) as manager:
        assert manager.save(step, args=args, **kwargs)


# -- 101 -----------------------------------------------------------------------------------------------------------


def test_101_every_other_step_is_saved_and_three_are_kept(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Two named items; `restore(step)` alone brings both back; `should_save` knows the interval."""
    options = Options(max_to_keep=3, save_interval_steps=2)
    with manager_class(tmp_path, options=options, item_names=("state", "extra")) as manager:
        saved = []
        for step in range(11):
            state = {**arrays(), "step": step}
            extra: Any = [42, step]
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
            saved.append(manager.save(step, args=args))
        manager.wait_until_finished()
        assert saved == [step % 2 == 0 for step in range(11)]
        assert list(manager.all_steps()) == [6, 8, 10]
        assert manager.latest_step() == 10
        assert not manager.should_save(11)
        assert manager.should_save(12)
        restored = manager.restore(10)
        assert_same(restored.state, {**arrays(), "step": 10})
        assert restored.extra == [42, 10]
        assert manager.restore(6)["extra"] == [42, 6]
        assert {"6", "8", "10"} <= names(tmp_path)
        assert not {"0", "2", "4"} & names(tmp_path)


def test_101_a_state_comes_back_on_its_devices_or_on_others(
    manager_class: ManagerClass, tmp_path: pathlib.Path
) -> None:
    """Without a target as it was sharded; with one in the dtypes and shardings of that."""
    train = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
    state = sharded()
    with manager_class(tmp_path, options=Options(max_to_keep=3, save_interval_steps=2)) as manager:
        for step in range(10):
            state = train(state)
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert manager.latest_step() == 8
        expected = jax.tree.map(lambda x: x + 9, sharded())
        restored = manager.restore(manager.latest_step())
        assert_same(restored, expected)
        assert jax.tree.map(lambda x: x.sharding, restored) == {"a": sharding("model"), "b": sharding("model")}
        blank = jax.tree.map(lambda x: jax.device_put(np.zeros_like(x), sharding(None)), expected)
        restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract(blank)))
        assert_same(restored, expected)
        for leaf in restored.values():
            assert leaf.sharding.is_equivalent_to(sharding(None), leaf.ndim)


def test_101_each_item_has_a_folder_in_its_step(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """People look into `<directory>/<step>/<item>/`; a single item is called `default`."""
    items = ocp.args.Composite(state=ocp.args.StandardSave(arrays()), extra=ocp.args.JsonSave({"lang": "en"}))
    save_one(manager_class, tmp_path / "two", items, step=3)
    assert {"state", "extra"} <= names(tmp_path / "two" / "3")
    assert (tmp_path / "two" / "3" / "state").is_dir()
    assert (tmp_path / "two" / "3" / "extra").is_dir()
    save_one(manager_class, tmp_path / "one", ocp.args.StandardSave(arrays()), step=3)
    assert (tmp_path / "one" / "3" / "default").is_dir()


def test_101_json_lies_in_its_item_as_a_file(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Any tool can read `<directory>/<step>/<item>/metadata`."""
    items = ocp.args.Composite(extra=ocp.args.JsonSave({"lang": "en", "version": 1.5}))
    save_one(manager_class, tmp_path, items, step=3)
    assert json.loads((tmp_path / "3" / "extra" / "metadata").read_text()) == {"lang": "en", "version": 1.5}


def test_101_an_empty_directory_has_no_step(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """What every training script asks first."""
    with manager_class(tmp_path / "new", options=Options(create=True)) as manager:
        assert manager.latest_step() is None
        assert manager.best_step() is None
        assert list(manager.all_steps()) == []
        assert manager.directory.name == "new"
        with pytest.raises(FileNotFoundError):
            manager.restore(None)


def test_101_a_step_that_is_not_there_is_not_found(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`restore` of another number is a FileNotFoundError, and nothing else is harmed."""
    save_one(manager_class, tmp_path, ocp.args.StandardSave(arrays()), step=3)
    with manager_class(tmp_path, item_handlers=ocp.StandardCheckpointHandler()) as manager:
        with pytest.raises(FileNotFoundError):
            manager.restore(4, args=ocp.args.StandardRestore(abstract(arrays())))
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(abstract(arrays()))), arrays())
        assert_same(manager.restore(None, args=ocp.args.StandardRestore(abstract(arrays()))), arrays())


# -- API overview --------------------------------------------------------------------------------------------------


def test_overview_policies_decide(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """FixedIntervalPolicy and LatestN do what the plain options do."""
    options = Options(
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(2),
        preservation_policy=preservation_policy.LatestN(2),
    )
    with manager_class(tmp_path, options=options) as manager:
        for step in range(7):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(16) + step}))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [4, 6]
        assert_same(manager.restore(manager.latest_step()), {"w": jnp.arange(16) + 6})


def test_overview_a_target_may_ask_for_another_dtype(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`ShapeDtypeStruct.update(dtype=…)`: values are cast on the way in."""
    state = {"layer": {"bias": np.ones(4), "weight": jnp.arange(16)}}
    target = jax.tree.map(lambda x: x.update(dtype=np.float32), jax.tree.map(ocp.tree.to_shape_dtype_struct, state))
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.StandardRestore(target))
    assert_same(restored, jax.tree.map(lambda x: np.asarray(x, np.float32), state))


def test_overview_items_are_restored_one_by_one(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Only those that are named; None means as it was saved."""
    state = {"w": jnp.arange(16)}
    target = jax.tree.map(lambda x: x.update(dtype=np.float32), abstract(state))
    with manager_class(tmp_path) as manager:
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave({"step": 0}))
        manager.save(0, args=items)
        manager.wait_until_finished()
        everything = manager.restore(0)
        assert set(everything.keys()) == {"state", "extra"}
        assert_same(everything.state, state)
        only_extra = manager.restore(0, args=ocp.args.Composite(extra=None))
        assert dict(only_extra.items()) == {"extra": {"step": 0}}
        only_state = manager.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        assert set(only_state.keys()) == {"state"}
        assert only_state["state"]["w"].dtype == np.float32
        restored = manager.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), extra=None))
        assert_same(restored.state, {"w": np.arange(16, dtype=np.float32)})
        assert restored.extra == {"step": 0}


def test_overview_step_names_are_formatted(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Leading zeros, a prefix, and both; the numbers stay numbers, for a later manager, too."""
    for folder, options in {
        "length": Options(step_format_fixed_length=8),
        "prefix": Options(step_prefix="ckpt"),
        "both": Options(step_prefix="ckpt", step_format_fixed_length=8),
    }.items():
        expected = {"length": "00000012", "prefix": "ckpt_12", "both": "ckpt_00000012"}[folder]
        with manager_class(tmp_path / folder, options=options) as manager:
            manager.save(12, args=ocp.args.StandardSave(arrays()))
        assert (tmp_path / folder / expected).is_dir()
        with manager_class(tmp_path / folder, options=options) as manager:
            assert list(manager.all_steps()) == [12]
            assert_same(manager.restore(12, args=ocp.args.StandardRestore(abstract(arrays()))), arrays())


def test_overview_a_read_only_manager_reads(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """It saves and deletes nothing, and does not complain."""
    save_one(manager_class, tmp_path, ocp.args.StandardSave(arrays()))
    with manager_class(tmp_path, options=Options(read_only=True)) as manager:
        assert not manager.save(1, args=ocp.args.StandardSave(arrays()))
        assert not manager.should_save(1)
        assert_same(manager.restore(0, args=ocp.args.StandardRestore(abstract(arrays()))), arrays())
        assert list(manager.all_steps()) == [0]
    assert "1" not in names(tmp_path)


@pytest.mark.parametrize("fields", [{"read_only": True}, {"create": False}, {"read_only": True, "create": False}])
def test_a_manager_may_be_made_before_its_directory(
    manager_class: ManagerClass, tmp_path: pathlib.Path, fields: dict[str, Any]
) -> None:
    """As an evaluator that is started with its trainer: nothing is there, nothing is made, and `reload()` finds it."""
    run = tmp_path / "run"
    handler = ocp.StandardCheckpointHandler()
    with manager_class(run, options=Options(**fields), item_handlers=handler) as manager:
        assert (list(manager.all_steps()), manager.latest_step(), manager.best_step()) == ([], None, None)
        manager.reload()
        assert manager.metrics(3) is None
        with pytest.raises(FileNotFoundError):
            manager.restore(3)
        assert not run.exists()
        with manager_class(run) as trainer:
            trainer.save(3, args=ocp.args.StandardSave(arrays()))
        manager.reload()
        assert list(manager.all_steps()) == [3]
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(abstract(arrays()))), arrays())


def test_the_first_save_makes_a_directory_that_the_manager_did_not(
    manager_class: ManagerClass, tmp_path: pathlib.Path
) -> None:
    """`create=False` is about the construction."""
    with manager_class(tmp_path / "run", options=Options(create=False)) as manager:
        assert manager.save(0, args=ocp.args.StandardSave(arrays()))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [0]
    assert (tmp_path / "run" / "0").is_dir()


@pytest.mark.parametrize(
    "metrics",
    [{"loss": 1.0, "curve": np.arange(3)}, {"model": object()}, {(0, 1): 2.0}, object()],
    ids=["an array", "an object", "a key", "no dict"],
)
def test_metrics_that_are_no_json_harm_no_save(
    manager_class: ManagerClass, tmp_path: pathlib.Path, metrics: Any
) -> None:
    """Without `best_fn`, where Orbax keeps none. Ours keeps those that are JSON."""
    with manager_class(tmp_path) as manager:
        assert manager.save(0, args=ocp.args.StandardSave(arrays()), metrics=metrics)
        manager.wait_until_finished()
        kept = {"loss": 1.0} if isinstance(metrics, dict) and "loss" in metrics else None
        assert manager.metrics(0) in (None, kept)
        assert manager.metrics(7) is None
    with manager_class(tmp_path, options=Options(best_fn=len)) as manager:

        def save() -> None:
            manager.save(1, args=ocp.args.StandardSave(arrays()), metrics=metrics)
            manager.wait_until_finished()

        with pytest.raises((TypeError, ValueError)):
            save()


def test_overview_force_saves_off_the_interval(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """But never the same step twice: without force that returns False, with it it is an error."""
    with manager_class(tmp_path, options=Options(save_interval_steps=10)) as manager:
        args = ocp.args.StandardSave(arrays())
        assert manager.save(0, args=args)
        assert not manager.save(5, args=args)
        assert manager.save(5, args=args, force=True)
        assert not manager.save(5, args=args)
        manager.wait_until_finished()
        with pytest.raises(StepAlreadyExistsError):
            manager.save(5, args=args, force=True)
        assert list(manager.all_steps()) == [0, 5]


def test_overview_delete_and_reload(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A step can be deleted; what another manager did is seen after `reload()` or `all_steps(read=True)`."""
    with manager_class(tmp_path) as writer:
        for step in range(3):
            writer.save(step, args=ocp.args.StandardSave(arrays()))
        writer.wait_until_finished()
        with manager_class(tmp_path, options=Options(read_only=True)) as reader:
            assert list(reader.all_steps()) == [0, 1, 2]
            writer.delete(1)
            writer.save(3, args=ocp.args.StandardSave(arrays()))
            writer.wait_until_finished()
            assert list(writer.all_steps()) == [0, 2, 3]
            assert list(reader.all_steps()) == [0, 1, 2]
            assert list(reader.all_steps(read=True)) == [0, 2, 3]
            reader.reload()
            assert list(reader.all_steps()) == [0, 2, 3]
            assert reader.latest_step() == 3


def test_overview_another_directory_can_be_restored_from(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`restore(directory=…)` takes its own step numbers there."""
    save_one(manager_class, tmp_path / "base", ocp.args.StandardSave({"w": np.full(3, 7)}), step=9)
    with manager_class(tmp_path / "fine") as manager:
        target = {"w": jax.ShapeDtypeStruct((3,), np.int64)}
        args = ocp.args.StandardRestore(target)
        assert np.asarray(manager.restore(9, directory=tmp_path / "base", args=args)["w"]).tolist() == [7, 7, 7]


# -- the refactored API --------------------------------------------------------------------------------------------


def test_refactor_one_item(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Saved and restored by one manager in a `with`, without and with a target of Python numbers."""
    with manager_class(tmp_path, options=Options()) as manager:
        manager.save(0, args=ocp.args.StandardSave({"a": 3}))
        assert manager.restore(0) == {"a": 3}
        assert manager.restore(0, args=ocp.args.StandardRestore({"a": 0})) == {"a": 3}
    with manager_class(tmp_path, options=Options()) as manager:
        assert manager.restore(0, args=ocp.args.StandardRestore({"a": 0})) == {"a": 3}


def test_refactor_restore_waits_for_the_save(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Nobody needs to wait between `save` and `restore` of the same step by one manager."""
    with manager_class(tmp_path) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full((256, 256), step)}))
            assert int(manager.restore(step)["w"][0, 0]) == step


def test_refactor_one_item_with_a_registry(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`handler_registry=` tells a new manager what `default` is: `restore(step)` and `item_metadata` then work."""
    save_one(manager_class, tmp_path, ocp.args.StandardSave(arrays()))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("default", ocp.args.StandardRestore, ocp.StandardCheckpointHandler)
    with manager_class(tmp_path, options=Options(), handler_registry=registry) as manager:
        assert manager.item_metadata(0)["a"].shape == (8,)
        assert_same(manager.restore(0), arrays())


def test_refactor_several_items(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A new manager restores all or some of them, told by `args`, by `item_names`, or by handlers."""
    items = ocp.args.Composite(state=ocp.args.StandardSave({"a": 3}), extra=ocp.args.JsonSave({"version": 1.0}))
    save_one(manager_class, tmp_path, items)
    restore_state = ocp.args.StandardRestore({"a": 0})
    with manager_class(tmp_path) as manager:
        assert manager.restore(0, args=ocp.args.Composite(state=restore_state)).state == {"a": 3}
    with manager_class(tmp_path, item_names=("state", "extra")) as manager:
        restored = manager.restore(0, args=ocp.args.Composite(state=restore_state, extra=ocp.args.JsonRestore()))
        assert restored.state == {"a": 3}
        assert restored.extra == {"version": 1.0}


def state_and_extra_registry() -> Any:
    """What the refactoring guide registers for its two items."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardRestore, ocp.StandardCheckpointHandler)
    registry.add("extra", ocp.args.JsonRestore, ocp.JsonCheckpointHandler)
    return registry


HANDLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "handler_registry": lambda: {"handler_registry": state_and_extra_registry()},
    "item_handlers": lambda: {
        "item_handlers": {"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
    },
    "item_handlers and item_names": lambda: {
        "item_names": ("state", "extra"),
        "item_handlers": {"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()},
    },
}


@pytest.mark.parametrize("how", HANDLERS)
def test_refactor_handlers_are_known_in_advance(manager_class: ManagerClass, tmp_path: pathlib.Path, how: str) -> None:
    """A new manager that was given handlers needs no `args`."""
    state = sharded()
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave({"version": 1.0}))
    save_one(manager_class, tmp_path, items)
    with manager_class(tmp_path, **HANDLERS[how]()) as manager:
        metadata = manager.item_metadata(0)
        assert metadata["state"]["a"].shape == (16,)
        restored = manager.restore(0)
        assert_same(restored.state, state)
        assert restored.extra == {"version": 1.0}


def test_refactor_a_handler_saves_too(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Orbax's own handlers, unmodified, given for saving: one for the single item, a dict for several."""
    with manager_class(tmp_path / "one", item_handlers=ocp.StandardCheckpointHandler()) as manager:
        manager.save(0, args=ocp.args.StandardSave(arrays()))
        manager.wait_until_finished()
        assert_same(manager.restore(0), arrays())
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
        "vector": ocp.ArrayCheckpointHandler(),
        "extra": ocp.JsonCheckpointHandler(),
    }
    with manager_class(tmp_path / "many", item_handlers=handlers) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays()),
            vector=ocp.args.ArraySave(jnp.arange(4.0)),
            extra=ocp.args.JsonSave({"n": 1}),
        )
        manager.save(0, args=items)
        manager.wait_until_finished()
        restored = manager.restore(0)
        assert_same(restored.state, arrays())
        assert_same(restored.vector, jnp.arange(4.0))
        assert restored.extra == {"n": 1}


def test_refactor_an_item_may_be_left_out(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`item_names` is what may be saved, not what must be."""
    with manager_class(tmp_path, item_names=("state", "extra")) as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave({"a": 3})))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore({"a": 0})))
        assert restored.state == {"a": 3}
        assert not (tmp_path / "0" / "extra").exists()


MISTAKES: dict[str, tuple[str | None, Callable[[ManagerClass, pathlib.Path], Any]]] = {
    "args given as items": ("args", lambda c, d: c(d).save(0, ocp.args.StandardSave({"a": 1}))),
    "nothing to save": ("args", lambda c, d: c(d).save(0)),
    "a tree without any handler": (None, lambda c, d: c(d).save(0, {"a": 1})),
    "checkpointers and item_names": (
        "checkpointers",
        lambda c, d: c(d, ocp.PyTreeCheckpointer(), item_names=("state",)),
    ),
    "checkpointers and item_handlers": (
        "checkpointers",
        lambda c, d: c(d, ocp.PyTreeCheckpointer(), item_handlers=ocp.PyTreeCheckpointHandler()),
    ),
    "one handler and item_names": (
        "item_names",
        lambda c, d: c(d, item_names=("state",), item_handlers=ocp.PyTreeCheckpointHandler()),
    ),
    "item_handlers and handler_registry": (
        "handler_registry",
        lambda c, d: c(d, item_handlers=ocp.PyTreeCheckpointHandler(), handler_registry=state_and_extra_registry()),
    ),
    "item_names and handler_registry": (
        "handler_registry",
        lambda c, d: c(d, item_names=("state",), handler_registry=state_and_extra_registry()),
    ),
    "a handler as checkpointer": ("checkpointers", lambda c, d: c(d, ocp.PyTreeCheckpointHandler())),
    "another best_mode": ("best_mode", lambda c, d: c(d, options=Options(best_mode="least"))),
    "a policy and max_to_keep": (
        "preservation_policy",
        lambda c, d: c(d, options=Options(max_to_keep=1, preservation_policy=preservation_policy.LatestN(1))),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_refactor_what_cannot_go_together_is_a_value_error(
    manager_class: ManagerClass, tmp_path: pathlib.Path, mistake: str
) -> None:
    """The mistakes that the migration invites; nothing is saved."""
    word, call = MISTAKES[mistake]
    with pytest.raises(ValueError, match=word):
        call(manager_class, tmp_path)
    assert "0" not in names(tmp_path)


# -- asynchronous checkpointing ------------------------------------------------------------------------------------


def test_async_training_goes_on_while_saving(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Every step's values are those at the time of its `save`, although the arrays are changed in place afterwards."""
    state = {"layer": {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}}
    with manager_class(tmp_path) as manager:
        for step in range(5):
            manager.save(step, args=ocp.args.StandardSave(state))
            state["layer"]["kernel"] += 1
            state["layer"]["bias"] *= 2
        manager.wait_until_finished()
        manager.check_for_errors()
        assert not manager.is_saving_in_progress()
        assert list(manager.all_steps()) == [0, 1, 2, 3, 4]
        for step in range(5):
            restored = manager.restore(step)
            np.testing.assert_array_equal(restored["layer"]["kernel"], np.full((8, 8), 1 + step, np.float32))
            np.testing.assert_array_equal(restored["layer"]["bias"], np.full(8, 2**step, np.float32))


def test_async_a_donated_array_is_saved(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A training step may give the saved buffers away as soon as `save` has returned."""
    train = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.device_put(jnp.zeros(1024), sharding("model"))
    with manager_class(tmp_path) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({"w": state}))
            state = train(state)
        manager.wait_until_finished()
        assert [float(manager.restore(step)["w"].sum()) for step in range(3)] == [0, 1024, 2048]


def test_async_can_be_switched_off(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`save` then returns when the step is there, for others, too."""
    with manager_class(tmp_path, options=Options(enable_async_checkpointing=False)) as manager:
        manager.save(7, args=ocp.args.StandardSave(arrays()))
        manager.wait_until_finished()
        assert (tmp_path / "7" / "default").is_dir()
        assert not manager.is_saving_in_progress()
        assert manager.latest_step() == 7
        assert list(ocp.utils.checkpoint_steps(tmp_path)) == [7]


def test_async_options_call_back_once_per_step(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`AsyncOptions(post_finalization_callback=…)` has been called when `wait_until_finished` returns."""
    calls: list[int] = []
    callback = ocp.AsyncOptions(timeout_secs=60, post_finalization_callback=lambda: calls.append(1))
    with manager_class(tmp_path, options=Options(async_options=callback)) as manager:
        for step in range(2):
            manager.save(step, args=ocp.args.StandardSave(arrays()))
            manager.wait_until_finished()
            assert len(calls) == step + 1


# -- preemption tolerance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "modern"])
def test_preemption_a_restarted_run_goes_on(manager_class: ManagerClass, tmp_path: pathlib.Path, legacy: bool) -> None:
    """The guide's loop, which still has Orbax's legacy form, and the same in today's; nobody preempts here."""

    def run(until: int) -> tuple[int, dict[str, Any], list[bool]]:
        manager = (
            manager_class(tmp_path, ocp.PyTreeCheckpointer(), Options(save_interval_steps=4))
            if legacy
            else manager_class(tmp_path, options=Options(save_interval_steps=4))
        )
        with manager:
            state, start = {"a": 1, "b": 2}, 0
            if manager.latest_step() is not None:
                start = manager.latest_step()
                args = {} if legacy else {"args": ocp.args.StandardRestore(state)}
                state = manager.restore(start, **args)
            told = []
            for step in range(start, until):
                state = {"a": state["a"] + 1, "b": 2}
                manager.save(step, state) if legacy else manager.save(step, args=ocp.args.StandardSave(state))
                told.append(manager.reached_preemption(step))
            manager.wait_until_finished()
            return start, state, told

    start, state, told = run(12)
    assert (start, state["a"], any(told)) == (0, 13, False)
    assert {"0", "4", "8"} <= names(tmp_path)
    start, state, told = run(14)
    assert (start, state["a"], any(told)) == (8, 10 + 6, False)
    with manager_class(tmp_path) as manager:
        assert list(manager.all_steps()) == [0, 4, 8, 12]


# -- PyTrees of arrays ---------------------------------------------------------------------------------------------


def test_pytrees_a_target_gives_dtype_and_sharding(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Abstract, concrete, of another dtype, of another sharding."""
    state = sharded()
    with manager_class(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        for target in (abstract(state), state):
            restored = manager.restore(1, args=ocp.args.StandardRestore(target))
            assert_same(restored, state)
            assert restored["a"].sharding == sharding("model")
        short = jax.tree.map(lambda x: x.update(dtype=np.int16), abstract(state))
        restored = manager.restore(1, args=ocp.args.StandardRestore(short))
        assert_same(restored, jax.tree.map(lambda x: np.asarray(x, np.int16), state))
        replicated = jax.tree.map(lambda x: x.update(sharding=sharding()), abstract(state))
        restored = manager.restore(1, args=ocp.args.StandardRestore(replicated))
        assert_same(restored, state)
        assert restored["b"].sharding == sharding()


def of_other_shapes() -> dict[str, jax.ShapeDtypeStruct]:
    """A target like `sharded()`, of which one array is shorter and the other longer."""
    return {
        "a": jax.ShapeDtypeStruct((8,), np.int32, sharding=sharding("model")),
        "b": jax.ShapeDtypeStruct((32,), np.float32, sharding=sharding("model")),
    }


def test_pytrees_another_shape_is_an_error(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A ValueError that speaks of the shape."""
    target = of_other_shapes()
    with manager_class(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(sharded()))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="shape"):
            manager.restore(1, args=ocp.args.StandardRestore(target))


def test_pytrees_strict_false_pads_and_cuts(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """With zeros, at the end; ours says so."""
    target = of_other_shapes()
    with manager_class(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(sharded()))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore(target, strict=False))
        assert restored["a"].tolist() == list(range(8))
        assert restored["b"].tolist() == [1.0] * 16 + [0.0] * 16
        assert restored["a"].sharding == restored["b"].sharding == sharding("model")


def test_pytrees_another_structure_is_an_error(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A leaf too many or too few, without `partial_restore`."""
    with manager_class(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(sharded()))
        manager.wait_until_finished()
        target = abstract(sharded())
        with pytest.raises(ValueError, match="b"):
            manager.restore(1, args=ocp.args.StandardRestore({"a": target["a"]}))
        with pytest.raises(ValueError, match="other"):
            manager.restore(1, args=ocp.args.StandardRestore({**target, "other": target["a"]}))


def test_pytrees_save_args_choose_the_stored_dtype(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`SaveArgs(dtype=…)` for one leaf, and none for the other."""
    save_args = {"a": ocp.SaveArgs(dtype=np.dtype(np.int16)), "b": ocp.SaveArgs()}
    with manager_class(tmp_path) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(sharded()))
        manager.wait_until_finished()
        assert_same(manager.restore(1), sharded())
        manager.save(2, args=ocp.args.PyTreeSave(sharded(), save_args=save_args))
        manager.wait_until_finished()
        restored = manager.restore(2)
        assert_same(restored, {"a": np.arange(16, dtype=np.int16), "b": np.ones(16, np.float32)})
        assert manager.item_metadata(2)["a"].dtype == np.int16


def test_pytrees_save_args_with_the_standard_argument(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """StandardSave takes them, too; float to bfloat16 halves a checkpoint."""
    state = {"w": jnp.linspace(0, 1, 16)}
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16)), state)
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state, save_args=save_args))
        manager.wait_until_finished()
        assert_same(manager.restore(0), {"w": state["w"].astype(jnp.bfloat16)})
        back = manager.restore(0, args=ocp.args.StandardRestore(abstract(state)))
        assert_same(back, {"w": state["w"].astype(jnp.bfloat16).astype(jnp.float32)})


def test_pytrees_restore_args_alone(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Without `item` they are the tree: a NumPy array here, a cast and another sharding there."""
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(sharded()))
        manager.wait_until_finished()
        restore_args = {
            "a": ocp.RestoreArgs(restore_type=np.ndarray),
            "b": ocp.ArrayRestoreArgs(dtype=np.dtype(np.int16), sharding=sharding()),
        }
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=restore_args))
        assert type(restored["a"]) is np.ndarray
        assert_same(restored, {"a": np.arange(16, dtype=np.int32), "b": np.ones(16, np.int16)})
        assert restored["b"].sharding == sharding()


ARRAY_RESTORE_ARGS: dict[str, Callable[[], ocp.RestoreArgs]] = {
    "sharding": lambda: ocp.ArrayRestoreArgs(sharding=sharding("model")),
    "mesh and mesh_axes": lambda: ocp.ArrayRestoreArgs(
        mesh=jax.sharding.Mesh(np.array(jax.devices()), ("model",)), mesh_axes=jax.sharding.PartitionSpec("model")
    ),
    "restore_type": lambda: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding("model")),
    "dtype": lambda: ocp.ArrayRestoreArgs(sharding=sharding("model"), dtype=np.dtype(np.float32)),
    "global_shape": lambda: ocp.ArrayRestoreArgs(sharding=sharding("model"), global_shape=(16,)),
    "type_handlers": lambda: ocp.type_handlers.ArrayRestoreArgs(sharding=sharding("model")),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ARRAY_RESTORE_ARGS)
@pytest.mark.parametrize("with_item", [True, False])
def test_pytrees_array_restore_args(
    manager_class: ManagerClass, tmp_path: pathlib.Path, form: str, with_item: bool
) -> None:
    """Every way to say where an array goes; saved on the host, so that none of it comes from the file."""
    state = {"w": np.arange(16, dtype=np.float32)}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        args = ocp.args.PyTreeRestore(item=state if with_item else None, restore_args={"w": ARRAY_RESTORE_ARGS[form]()})
        restored = manager.restore(0, args=args)["w"]
    assert isinstance(restored, jax.Array)
    assert restored.sharding.is_equivalent_to(sharding("model"), 1)
    assert_same(restored, state["w"])


def test_pytrees_restore_args_from_a_target(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`construct_restore_args` for arrays, NumPy arrays and numbers, as everybody writes it."""
    state = {"p": sharded(), "n": np.arange(3), "step": 7, "rate": 0.5}
    target = {
        "p": jax.tree.map(lambda x: x.update(sharding=sharding()), abstract(state["p"])),
        "n": np.zeros(3, np.int64),
        "step": 0,
        "rate": 0.0,
    }
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args))
    assert_same(restored, state)
    assert restored["p"]["a"].sharding == sharding()
    assert type(restored["n"]) is np.ndarray
    assert type(restored["step"]) is int
    assert type(restored["rate"]) is float


PLACEHOLDERS: dict[str, Any] = {"zero": 0, "flag": False, "text": "", "scalar": np.zeros(()), "object": object()}


@pytest.mark.parametrize("partial", [False, True])
def test_pytrees_values_beside_restore_args_are_placeholders(
    manager_class: ManagerClass, tmp_path: pathlib.Path, partial: bool
) -> None:
    """Of `item` only the structure counts: the arguments say what each leaf becomes."""
    state = {"p": sharded(), "n": np.arange(3), "step": 7, "rate": 0.5, "text": "hello"}
    asked = {
        "p": {
            "a": ocp.ArrayRestoreArgs(sharding=sharding()),
            "b": ocp.ArrayRestoreArgs(sharding=sharding(), global_shape=(16,)),
        },
        "n": ocp.RestoreArgs(),
        "step": ocp.RestoreArgs(restore_type=np.ndarray),
        "rate": ocp.RestoreArgs(restore_type=float),
        "text": ocp.RestoreArgs(restore_type=str),
    }
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        for placeholder in PLACEHOLDERS.values():
            item = jax.tree.map(lambda _, value=placeholder: value, state)
            args = ocp.args.PyTreeRestore(item, restore_args=asked, partial_restore=partial)
            restored = manager.restore(0, args=args)
            assert_same(restored["p"], state["p"])
            assert restored["p"]["a"].sharding == restored["p"]["b"].sharding == sharding()
            assert type(restored["n"]) is type(restored["step"]) is np.ndarray
            np.testing.assert_array_equal(restored["n"], state["n"])
            assert (int(restored["step"]), restored["rate"], restored["text"]) == (7, 0.5, "hello")


def test_pytrees_typed_keys_with_restore_args(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """What `construct_restore_args` says of typed keys, themselves and abstract, brings them back as typed keys."""
    if manager_class is ocp.CheckpointManager and not KEYS_WITH_ARGS:
        pytest.skip("this Orbax cannot")
    several = jax.device_put(jax.random.split(jax.random.key(4), len(jax.devices())), sharding("model"))
    state = {"one": jax.random.key(3), "several": several}
    shapes = jax.eval_shape(lambda: state)
    target = jax.tree.map(lambda shape, key: shape.update(sharding=key.sharding), shapes, state)
    forms = {"abstract": jax.tree.map(lambda t: ocp.ArrayRestoreArgs(sharding=t.sharding, dtype=t.dtype), target)}
    if KEYS_WITH_ARGS:
        forms |= {"keys": ocp.checkpoint_utils.construct_restore_args(state)}
        forms |= {"constructed": ocp.checkpoint_utils.construct_restore_args(target)}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        for restore_args in forms.values():
            for item in (None, state, target, {"one": 0, "several": 0}):
                restored = manager.restore(0, args=ocp.args.PyTreeRestore(item, restore_args=restore_args))
                for name, key in state.items():
                    assert restored[name].dtype == key.dtype
                    assert restored[name].sharding.is_equivalent_to(key.sharding, key.ndim)
                assert_same(jax.tree.map(jax.random.key_data, restored), jax.tree.map(jax.random.key_data, state))


def test_pytrees_shardings_as_a_tree_of_their_own(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`construct_restore_args(target, sharding_tree)`."""
    target = {"a": jax.ShapeDtypeStruct((16,), np.int32), "b": jax.ShapeDtypeStruct((16,), np.float32)}
    shardings = {"a": sharding(), "b": sharding("model")}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(sharded()))
        manager.wait_until_finished()
        restore_args = ocp.checkpoint_utils.construct_restore_args(target, shardings)
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))
    assert_same(restored, sharded())
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings


@pytest.mark.slow
def test_pytrees_containers_come_back_as_in_the_target(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A TrainState with its optimizer; without a target the same leaves in plain containers."""
    state = linen_state()
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        blank = jax.tree.map(jnp.zeros_like, state)
        restored = manager.restore(0, args=ocp.args.StandardRestore(blank))
        assert type(restored) is train_state.TrainState
        assert_same(restored, jax.tree.map(jnp.asarray, state))
        raw = manager.restore(0)
        assert isinstance(raw, dict)
        assert_same(raw["params"], state.params)
        assert int(raw["step"]) == 1


@pytest.mark.slow
def test_pytrees_nnx_state(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """The Flax NNX guide: split, save the state, restore it into the abstract model's, merge."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.second = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(self.first(x))

    model = Net(nnx.Rngs(0))
    _, state = nnx.split(model)
    graphdef, target = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = nnx.merge(graphdef, manager.restore(0, args=ocp.args.StandardRestore(target)))
        manager.save(1, args=ocp.args.StandardSave(nnx.to_pure_dict(state)))
        manager.wait_until_finished()
        pure = manager.restore(1)
    x = jnp.ones((3, 4))
    np.testing.assert_array_equal(restored(x), model(x))
    assert_same(pure["first"]["kernel"], model.first.kernel[...])


# -- partial restoration -------------------------------------------------------------------------------------------


def params_and_optimizer() -> dict[str, Any]:
    """A state of which people want a part."""
    return {
        "params": {"layer": {"kernel": jax.device_put(np.ones((8, 2)), sharding("model")), "bias": jnp.arange(2.0)}},
        "opt_state": [np.full(2, 5.0), np.full(2, 6.0)],
        "step": 4,
    }


def test_partial_placeholders_are_left_out(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`PLACEHOLDER` stands where nothing is read, and stays there."""
    state = params_and_optimizer()
    target = {**abstract(state), "opt_state": [ocp.PLACEHOLDER, ocp.PLACEHOLDER], "step": ocp.PLACEHOLDER}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))
        assert_same(restored["params"], state["params"])
        assert restored["opt_state"] == [ocp.PLACEHOLDER, ocp.PLACEHOLDER]
        assert restored["step"] is ocp.PLACEHOLDER
        # One leaf only, its arguments given by hand: how layer-wise converters read huge checkpoints.
        one = jax.tree.map(lambda _: ocp.PLACEHOLDER, target)
        one["params"]["layer"]["kernel"] = target["params"]["layer"]["kernel"]
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(), target)
        arguments["params"]["layer"]["kernel"] = ocp.ArrayRestoreArgs(sharding=sharding())
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(one, restore_args=arguments))
        assert restored["params"]["layer"]["kernel"].sharding == sharding()
        assert restored["params"]["layer"]["bias"] is ocp.PLACEHOLDER


def test_partial_placeholders_without_restore_args(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """The target alone may have them."""
    state = params_and_optimizer()
    target = {**abstract(state), "opt_state": [ocp.PLACEHOLDER, abstract(state)["opt_state"][1]]}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(target))
        assert_same(restored["params"], state["params"])
        assert restored["opt_state"][0] is ocp.PLACEHOLDER
        np.testing.assert_array_equal(restored["opt_state"][1], state["opt_state"][1])


def test_partial_keys_may_be_omitted(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`partial_restore=True`: what the target does not name is not read."""
    state = params_and_optimizer()
    target = {"params": {"layer": {"kernel": abstract(state)["params"]["layer"]["kernel"]}}, "step": 0}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
        restored = manager.restore(0, args=args)
        assert_same(restored, {"params": {"layer": {"kernel": state["params"]["layer"]["kernel"]}}, "step": 4})
        with pytest.raises(ValueError, match="opt_state"):
            manager.restore(0, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))


def test_partial_what_was_not_saved_stays_as_it_is(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`partial_restore=True`: a leaf that only the target has comes back as its ShapeDtypeStruct."""
    state = {"w": jnp.arange(4.0)}
    target = {**abstract(state), "new": jax.ShapeDtypeStruct((3,), np.float32)}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(target, partial_restore=True))
    assert_same(restored["w"], state["w"])
    assert isinstance(restored["new"], jax.ShapeDtypeStruct)
    assert restored["new"].shape == (3,)


Transform = ocp.transform_utils.Transform
TRANSFORMED: dict[str, tuple[Any, Any, bool, Any]] = {  # target, transforms, transforms_default_to_original, expected
    "a subtree": (
        {"new": {"a": 0, "b": {"c": 0}}, "step": 0},
        {r"new/(.*)": Transform(original_key=r"old/\1")},
        True,
        {"new": {"a": np.arange(3.0), "b": {"c": np.ones(2)}}, "step": 5},
    ),
    "nested": (
        {"new": {"a": 0, "b": {"c": 0}}},
        {"new": {"(.*)": Transform(original_key=r"old/\1")}},
        True,
        {"new": {"a": np.arange(3.0), "b": {"c": np.ones(2)}}},
    ),
    "a list": (
        {"l": [0, 0]},
        {r"l/(\d)": Transform(original_key=r"list/\1")},
        True,
        {"l": [np.zeros(1), np.ones(1)]},
    ),
    "one to many": (
        {"x": 0, "y": 0},
        {"[xy]": Transform(original_key="old/a")},
        True,
        {"x": np.arange(3.0), "y": np.arange(3.0)},
    ),
    "the last counts": (
        {"x": 0},
        {"x": Transform(original_key="old/a"), "[x]": Transform(original_key="old/b/c")},
        True,
        {"x": np.arange(3.0)},
    ),
    "kept by the target": (
        {"x": 0, "step": 1, "new": 9},
        {"x": Transform(original_key="old/a"), "step": Transform(use_fallback=True)},
        True,
        {"x": np.arange(3.0), "step": 1, "new": 9},
    ),
    "kept unless named": (
        {"x": 0, "step": 1},
        {"x": Transform(original_key="old/a")},
        False,
        {"x": np.arange(3.0), "step": 1},
    ),
    "taken by name": ({"step": 1, "a": 1}, {"step": Transform(use_fallback=True)}, False, {"step": 5, "a": 1}),
    "nothing": ({"step": 1, "a": 1}, {}, True, {"step": 5, "a": 1}),
}


def test_partial_transforms_rename(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`PyTreeRestore(transforms=…)`: regular expressions of the target's names, and where each comes from."""
    state = {"old": {"a": np.arange(3.0), "b": {"c": np.ones(2)}}, "list": [np.zeros(1), np.ones(1)], "step": 5}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()

        def restore(target: Any, transforms: Any, default: bool) -> Any:
            kwargs = {"transforms": transforms, "transforms_default_to_original": default}
            asked = jax.tree.map(lambda _: ocp.RestoreArgs(), target)
            return manager.restore(0, args=ocp.args.PyTreeRestore(target, restore_args=asked, **kwargs))

        for target, transforms, default, expected in TRANSFORMED.values():
            assert_same(restore(target, transforms, default), expected)
        with pytest.raises(ValueError, match="nowhere"):
            restore({"x": 0}, {"x": Transform(original_key="nowhere")}, True)


# -- metadata ------------------------------------------------------------------------------------------------------


def test_metadata_of_the_directory_is_written_once(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`metadata=` of the first manager that saves stays, whatever a later one says."""
    with manager_class(tmp_path, metadata={"version": 1.1, "lang": "en"}) as manager:
        assert manager.metadata().custom_metadata == {"version": 1.1, "lang": "en"}
        manager.save(0, args=ocp.args.StandardSave(arrays()))
    with manager_class(tmp_path, metadata={"version": 2}) as manager:
        assert manager.metadata().custom_metadata == {"version": 1.1, "lang": "en"}
    with manager_class(tmp_path, options=Options(read_only=True)) as manager:
        assert manager.metadata().custom_metadata == {"version": 1.1, "lang": "en"}
    with manager_class(tmp_path / "none") as manager:
        assert manager.metadata().custom_metadata == {}


def test_metadata_of_a_reader_and_of_older_orbax(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A reader of a directory without any gives back its own; what an older Orbax wrote, a JSON item, counts."""
    run = tmp_path / "run"
    run.mkdir()
    with manager_class(run, metadata={"lang": "en"}, options=Options(read_only=True)) as manager:
        assert manager.metadata().custom_metadata == {"lang": "en"}
    assert "metadata" not in names(run)
    (run / "metadata").mkdir()
    ocp.JsonCheckpointHandler().save(run / "metadata", args=ocp.args.JsonSave({"version": 1.1, "custom": {"a": [1]}}))
    assert names(run / "metadata") == {"metadata"}
    for metadata in (None, {"version": 2}):
        with manager_class(run, metadata=metadata, options=Options(read_only=True)) as manager:
            assert manager.metadata().custom_metadata == {"version": 1.1, "custom": {"a": [1]}}


def test_metadata_of_a_step(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """What `custom_metadata=` was, its metrics, when it was saved, and its items, by any manager."""
    items = ocp.args.Composite(state=ocp.args.StandardSave(sharded()), extra=ocp.args.JsonSave({"a": 1}))
    options = Options(best_fn=lambda metrics: metrics["loss"])
    with manager_class(tmp_path, options=options) as manager:
        manager.save(2, args=items, metrics={"loss": 0.5}, custom_metadata={"learning_rate": 0.001})
        manager.wait_until_finished()
        manager.save(3, args=items, metrics={"loss": 0.25})
        manager.wait_until_finished()
    with manager_class(tmp_path, options=options, handler_registry=state_and_extra_registry()) as manager:
        metadata = manager.metadata(2)
        assert metadata.custom_metadata == {"learning_rate": 0.001}
        assert metadata.metrics == {"loss": 0.5}
        assert 0 < metadata.init_timestamp_nsecs <= metadata.commit_timestamp_nsecs
        assert metadata.commit_timestamp_nsecs <= manager.metadata(3).commit_timestamp_nsecs
        assert not manager.metadata(3).custom_metadata
        assert metadata.item_metadata["state"]["b"].shape == (16,)
        assert metadata.item_metadata["extra"] is None
        assert {"state", "extra"} <= set(metadata.item_handlers)


def test_metadata_tells_what_to_restore(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Shapes, dtypes and shardings of the saved tree: a target built from them, and nothing else, restores it."""
    state = {"p": sharded(), "list": [np.zeros((2, 3), np.int8), 5, 0.5], "text": "hello"}
    with manager_class(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        metadata = manager.item_metadata(0)
        assert metadata["p"]["a"].shape == (16,)
        assert metadata["p"]["a"].dtype == np.int32
        assert metadata["p"]["a"].sharding.to_jax_sharding() == sharding("model")
        assert metadata.tree["list"][0].shape == (2, 3)
        assert metadata.tree["list"][0].dtype == np.int8
        assert isinstance(metadata["list"][1], ocp.metadata.ScalarMetadata)
        assert isinstance(metadata["text"], ocp.metadata.StringMetadata)
        target = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), metadata.tree["p"])
        assert_same(
            manager.restore(0, args=ocp.args.PyTreeRestore({"p": target}, partial_restore=True)), {"p": state["p"]}
        )
        places = {"p": jax.tree.map(lambda m: ocp.ArrayRestoreArgs(sharding=m.sharding), metadata.tree["p"])}
        args = ocp.args.PyTreeRestore({"p": target}, restore_args=places, partial_restore=True)
        assert manager.restore(0, args=args)["p"]["a"].sharding == sharding("model")


def test_metadata_of_an_item(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """PyTreeSave and StandardSave take `custom_metadata`, which `item_metadata` gives back."""
    items = ocp.args.Composite(
        one=ocp.args.PyTreeSave(arrays(), custom_metadata={"by": "us"}),
        two=ocp.args.StandardSave(arrays(), custom_metadata={"n": [1, 2]}),
        three=ocp.args.StandardSave(arrays()),
    )
    with manager_class(tmp_path) as manager:
        manager.save(0, args=items)
        manager.wait_until_finished()
        metadata = manager.item_metadata(0)
        assert metadata["one"].custom_metadata == {"by": "us"}
        assert metadata["two"].custom_metadata == {"n": [1, 2]}
        assert not metadata["three"].custom_metadata
        assert_same(manager.restore(0).one, arrays())


# -- the best n ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["max", "min"])
def test_best_n_are_kept(manager_class: ManagerClass, tmp_path: pathlib.Path, mode: str) -> None:
    """`best_fn` ranks by the metrics; a later manager knows them, too. (The last step is among the best here.)"""
    sign = 1 if mode == "max" else -1
    scores = [sign * score for score in (0.1, 0.9, 0.3, 0.2, 0.8)]
    options = Options(max_to_keep=2, best_fn=lambda metrics: metrics["score"], best_mode=mode)
    with manager_class(tmp_path, options=options) as manager:
        for step, score in enumerate(scores):
            manager.save(step, args=ocp.args.StandardSave({"step": step}), metrics={"score": score, "other": step})
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [1, 4]
        assert manager.best_step() == 1
        assert manager.latest_step() == 4
        assert manager.metrics(4) == {"score": scores[4], "other": 4}
    with manager_class(tmp_path, options=options) as manager:
        assert manager.best_step() == 1
        assert manager.metrics(1) == {"score": scores[1], "other": 1}
        assert manager.restore(manager.best_step(), args=ocp.args.StandardRestore({"step": 0})) == {"step": 1}


def test_best_n_without_metrics(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Steps without metrics are kept beside the best, and are never the best."""
    options = Options(max_to_keep=1, best_fn=lambda metrics: metrics["score"])
    with manager_class(tmp_path, options=options) as manager:
        for step, metrics in enumerate([{"score": 1.0}, None, {"score": 2.0}]):
            manager.save(step, args=ocp.args.StandardSave({"step": step}), metrics=metrics)
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [1, 2]
        assert manager.best_step() == 2
        assert manager.metrics(1) is None


def test_best_n_as_a_policy(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`BestN`, alone or with `LatestN` and `EveryNSteps`."""
    policies = [
        preservation_policy.BestN(get_metric_fn=lambda metrics: metrics["score"], n=1),
        preservation_policy.LatestN(1),
        preservation_policy.EveryNSteps(3),
    ]
    options = Options(
        best_fn=lambda metrics: metrics["score"],
        preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
    )
    with manager_class(tmp_path, options=options) as manager:
        for step, score in enumerate([0.1, 0.9, 0.3, 0.2, 0.8, 0.7]):
            manager.save(step, args=ocp.args.StandardSave({"step": step}), metrics={"score": score})
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [0, 1, 3, 5]


# -- other items ---------------------------------------------------------------------------------------------------


def test_items_of_every_argument_class(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A tree, a single array, JSON, a protocol buffer, random states of JAX and NumPy: all in one step."""
    proto = struct_pb2.Struct()
    proto.update({"name": "run", "layers": [1, 2]})
    typed, raw, bits = jax.random.key(5), jax.random.PRNGKey(6), np.random.RandomState(7)
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(sharded()),
        vector=ocp.args.ArraySave(np.arange(4)),
        extra=ocp.args.JsonSave({"a": [1, None, "x"]}),
        config=ocp.args.ProtoSave(proto),
        key=ocp.args.JaxRandomKeySave(typed),
        old_key=ocp.args.JaxRandomKeySave(raw),
        shuffle=ocp.args.NumpyRandomKeySave(bits.get_state(legacy=False)),
    )
    save_one(manager_class, tmp_path, items)
    assert all((tmp_path / "0" / name).is_dir() for name in items)
    with manager_class(tmp_path) as manager:
        restored = manager.restore(
            0,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract(sharded())),
                vector=ocp.args.ArrayRestore(),
                extra=ocp.args.JsonRestore(),
                config=ocp.args.ProtoRestore(struct_pb2.Struct),
                key=ocp.args.JaxRandomKeyRestore(),
                old_key=ocp.args.JaxRandomKeyRestore(),
                shuffle=ocp.args.NumpyRandomKeyRestore(),
            ),
        )
    assert_same(restored.state, sharded())
    np.testing.assert_array_equal(restored.vector, np.arange(4))
    assert restored.extra == {"a": [1, None, "x"]}
    assert restored.config == proto
    assert jax.random.uniform(restored.key) == jax.random.uniform(typed)
    assert jnp.issubdtype(restored.key.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(restored.old_key, raw)
    again = np.random.RandomState()
    again.set_state(restored.shuffle)
    assert again.randint(2**31) == bits.randint(2**31)


def test_items_restored_as_saved(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """The manager that saved them needs no arguments to restore a proto's neighbours, keys and arrays."""
    key = jax.random.split(jax.random.key(5))
    state: Any = np.random.RandomState(7).get_state()
    items = ocp.args.Composite(
        vector=ocp.args.ArraySave(jnp.arange(4)),
        number=ocp.args.ArraySave(3),
        key=ocp.args.JaxRandomKeySave(key),
        shuffle=ocp.args.NumpyRandomKeySave(state),
    )
    with manager_class(tmp_path) as manager:
        manager.save(0, args=items)
        manager.wait_until_finished()
        restored = manager.restore(0)
    assert_same(restored.vector, jnp.arange(4))
    assert restored.number == 3
    np.testing.assert_array_equal(jax.random.key_data(restored.key), jax.random.key_data(key))
    assert restored.shuffle[0] == state[0]
    np.testing.assert_array_equal(restored.shuffle[1], state[1])
    assert tuple(restored.shuffle[2:]) == tuple(state[2:])


def test_items_an_array_can_be_placed(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`ArrayRestore` takes RestoreArgs: a sharding and a dtype, or NumPy."""
    with manager_class(tmp_path, item_names=("vector",)) as manager:
        manager.save(0, args=ocp.args.Composite(vector=ocp.args.ArraySave(jnp.arange(16))))
        manager.wait_until_finished()
        placed = ocp.ArrayRestoreArgs(sharding=sharding("model"), dtype=np.dtype(np.float32))
        restored = manager.restore(0, args=ocp.args.Composite(vector=ocp.args.ArrayRestore(restore_args=placed)))
        assert restored.vector.sharding == sharding("model")
        assert_same(restored.vector, np.arange(16, dtype=np.float32))
        plain = ocp.RestoreArgs(restore_type=np.ndarray)
        restored = manager.restore(0, args=ocp.args.Composite(vector=ocp.args.ArrayRestore(restore_args=plain)))
        assert type(restored.vector) is np.ndarray


# -- customizing ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    """What an application wants to save in its own way."""

    x: np.ndarray
    label: str


class PointHandler(ocp.CheckpointHandler):
    """Saves a Point as one `.npz`, on the calling thread."""

    def save(self, directory: Any, args: PointSave) -> None:
        if args.item.label == "bad":
            raise ValueError("this point cannot be saved")
        np.savez(directory / args.filename, x=args.item.x, label=args.item.label)

    def restore(self, directory: Any, args: PointRestore) -> Any:
        (path,) = directory.glob("*.npz")
        with np.load(path) as data:
            point = Point(data["x"], str(data["label"]))
        return dataclasses.asdict(point) if args.as_dict else point

    def metadata(self, directory: Any) -> Any:
        return {"shape": self.restore(directory, PointRestore()).x.shape}


class SlowPointHandler(ocp.AsyncCheckpointHandler, PointHandler):
    """Saves a Point in a thread of its own, or in one that Orbax starts when the item's folder is there."""

    def __init__(self) -> None:
        self.executor = futures.ThreadPoolExecutor(1)

    def save(self, directory: Any, args: Any) -> None:
        async def wait() -> None:
            for future in await self.async_save(directory, args):
                future.result()

        asyncio.run(wait())

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        copied = PointSave(dataclasses.replace(args.item, x=args.item.x.copy()))

        async def write() -> None:
            PointHandler.save(self, directory, copied)

        if args.own_thread:
            return [self.executor.submit(PointHandler.save, self, directory, copied)]
        return [CommitFutureAwaitingContractedSignals(write(), name="point")]

    def close(self) -> None:
        self.executor.shutdown()


@ocp.args.register_with_handler(PointHandler, for_save=True)
@dataclasses.dataclass
class PointSave(ocp.args.CheckpointArgs):
    """How to save a Point."""

    item: Point
    filename: str = "point.npz"


@ocp.args.register_with_handler(PointHandler, for_restore=True)
@dataclasses.dataclass
class PointRestore(ocp.args.CheckpointArgs):
    """How to restore a Point."""

    as_dict: bool = False


@ocp.args.register_with_handler(SlowPointHandler, for_save=True)
@dataclasses.dataclass
class SlowPointSave(ocp.args.CheckpointArgs):
    """The same, in the background."""

    item: Point
    own_thread: bool = False


@ocp.args.register_with_handler(SlowPointHandler, for_restore=True)
@dataclasses.dataclass
class SlowPointRestore(PointRestore):
    """The same as a Point that was saved in the background."""


POINT = Point(np.array([1.0, 1.5]), "here")


def point_registry() -> Any:
    """Names the item's arguments and handler."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = PointHandler()
    registry.add("point", PointSave, handler)
    registry.add("point", PointRestore, handler)
    return registry


POINT_HANDLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "by the arguments' class": dict,
    "item_names": lambda: {"item_names": ("state", "point")},
    "item_handlers": lambda: {"item_handlers": {"state": ocp.StandardCheckpointHandler(), "point": PointHandler()}},
    "handler_registry": lambda: {"handler_registry": point_registry()},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", POINT_HANDLERS)
def test_custom_a_handler_of_ones_own(manager_class: ManagerClass, tmp_path: pathlib.Path, how: str) -> None:
    """Beside arrays; its files lie in `<step>/<item>/`; a later manager restores it, with options, and its metadata."""
    items = ocp.args.Composite(state=ocp.args.StandardSave(sharded()), point=PointSave(POINT, filename="p.npz"))
    with manager_class(tmp_path, **POINT_HANDLERS[how]()) as manager:
        manager.save(0, args=items)
        manager.wait_until_finished()
        assert_same(manager.restore(0).state, sharded())
    assert (tmp_path / "0" / "point" / "p.npz").is_file()
    with manager_class(tmp_path, **POINT_HANDLERS[how]()) as manager:
        target = ocp.args.StandardRestore(abstract(sharded()))
        restored = manager.restore(0, args=ocp.args.Composite(state=target, point=PointRestore()))
        assert isinstance(restored.point, Point)
        assert_same((restored.point.x, restored.state), (POINT.x, sharded()))
        assert restored.point.label == "here"
        restored = manager.restore(0, args=ocp.args.Composite(point=PointRestore(as_dict=True)))
        assert restored.point["label"] == "here"
        assert manager.item_metadata(0)["point"] == {"shape": (2,)}


def test_custom_a_handler_of_a_single_item(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """The unnamed item can be anything, too."""
    with manager_class(tmp_path, item_handlers=PointHandler()) as manager:
        manager.save(0, args=PointSave(POINT))
        manager.wait_until_finished()
        assert (tmp_path / "0" / "default" / "point.npz").is_file()
        assert manager.restore(0, args=PointRestore()).label == "here"
    with manager_class(tmp_path) as manager:
        assert manager.restore(0, args=PointRestore(as_dict=True))["label"] == "here"


@pytest.mark.parametrize(("asynchronous", "own_thread"), [(True, False), (False, False), (False, True)])
def test_custom_an_asynchronous_handler(
    manager_class: ManagerClass, tmp_path: pathlib.Path, asynchronous: bool, own_thread: bool
) -> None:
    """Its futures are part of the save: the step is there when they are done."""
    point = Point(np.zeros(2), "slow")
    with manager_class(tmp_path, options=Options(enable_async_checkpointing=asynchronous)) as manager:
        for step in range(2):
            manager.save(step, args=ocp.args.Composite(point=SlowPointSave(point, own_thread)))
            point.x += 1
        manager.wait_until_finished()
        for step in range(2):
            restored = manager.restore(step, args=ocp.args.Composite(point=SlowPointRestore()))
            assert restored.point.x.tolist() == [step, step]


def test_custom_a_handler_that_fails_fails_the_save(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Its error reaches the caller of `save` or `wait_until_finished`, and there is no such step afterwards."""
    items = ocp.args.Composite(state=ocp.args.StandardSave(arrays()), point=SlowPointSave(Point(np.zeros(1), "bad")))

    def attempt() -> None:
        manager.save(0, args=items)
        manager.wait_until_finished()

    manager = manager_class(tmp_path)
    with pytest.raises(Exception, match="this point cannot be saved"):
        attempt()
    assert "0" not in names(tmp_path)
    with manager_class(tmp_path) as later:
        assert list(later.all_steps()) == []


class Counting(ocp.PyTreeCheckpointHandler):
    """Overrides what only Orbax's own engine calls."""

    calls = 0

    async def async_save(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return await super().async_save(*args, **kwargs)


@ocp.args.register_with_handler(Counting, for_save=True)
@dataclasses.dataclass
class CountingSave(ocp.args.PyTreeSave):
    """A tree for the handler that counts."""


@ocp.args.register_with_handler(Counting, for_restore=True)
@dataclasses.dataclass
class CountingRestore(ocp.args.PyTreeRestore):
    """The same, back."""


def test_custom_a_handler_that_overrides_internals(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """It is called, or refused by name: never ignored."""
    Counting.calls = 0
    with (
        or_refused(manager_class, "Counting"),
        manager_class(tmp_path, item_handlers={"state": Counting()}) as manager,
    ):
        manager.save(0, args=ocp.args.Composite(state=CountingSave(arrays())))
        manager.wait_until_finished()
        assert Counting.calls == 1
        assert_same(manager.restore(0, args=ocp.args.Composite(state=CountingRestore())).state, arrays())


class PointLeafHandler(ocp.type_handlers.TypeHandler):
    """Saves Points that are leaves of a tree."""

    def typestr(self) -> str:
        return "Point"

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        for value, info in zip(values, infos, strict=True):
            info.path.mkdir(exist_ok=True)
            np.savez(info.path / "point.npz", x=value.x, label=value.label)
        return []

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        points = []
        for info in infos:
            with np.load(info.path / "point.npz") as data:
                points.append(Point(data["x"], str(data["label"])))
        return points

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return [ocp.metadata.value.Metadata(name=info.name, directory=info.path) for info in infos]


def test_custom_leaf_types(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A PyTree handler that was taught a leaf type saves it; where not, the type or the registry is named."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler()), (Point, PointLeafHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    tree, options = {"array": np.arange(3), "point": POINT}, Options(enable_async_checkpointing=False)
    with (
        or_refused(manager_class, "type_handler_registry"),
        manager_class(tmp_path, item_handlers=handler, options=options) as manager,
    ):
        manager.save(0, args=ocp.args.PyTreeSave(tree))
        manager.wait_until_finished()
        restored = manager.restore(0)
        assert isinstance(restored["point"], Point)
        assert restored["point"].label == "here"


# -- legacy forms --------------------------------------------------------------------------------------------------


def linen_state() -> train_state.TrainState:
    """A TrainState after one step of momentum."""
    model = linen.Dense(features=3)
    params = model.init(jax.random.PRNGKey(0), jnp.ones(5))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))


CHECKPOINTERS: dict[str, Callable[[], Any]] = {
    "PyTreeCheckpointer": ocp.PyTreeCheckpointer,
    "Checkpointer": lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
    "AsyncCheckpointer": lambda: ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=50),
    "StandardCheckpointer": ocp.StandardCheckpointer,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTERS)
def test_legacy_a_checkpointer_and_options_by_position(
    manager_class: ManagerClass, tmp_path: pathlib.Path, name: str
) -> None:
    """`CheckpointManager(dir, checkpointer, options)`, `save(step, tree)`, `restore(step)` and with `items=`."""
    with manager_class(tmp_path, CHECKPOINTERS[name](), Options(max_to_keep=2, create=True)) as manager:
        for step in range(5):
            assert manager.save(step, {**sharded(), "step": step})
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [3, 4]
        expected = {**sharded(), "step": 4}
        assert_same(manager.restore(manager.latest_step()), expected)
        assert_same(manager.restore(4, items={**sharded(), "step": 0}), expected)
        assert (tmp_path / "4" / "default").is_dir()
        assert manager.item_metadata(4)["a"].shape == (16,)
    with manager_class(tmp_path, CHECKPOINTERS[name](), Options(max_to_keep=2)) as manager:
        assert_same(manager.restore(4), expected)


@pytest.mark.slow
def test_legacy_the_flax_guide(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A TrainState in a dict with configuration and data; `save_kwargs` and `restore_kwargs` by flax's helpers."""
    state = linen_state()
    bundle = {"model": state, "config": {"dimensions": np.array([5, 3])}, "data": [jnp.arange(5.0)]}
    blank = jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else jnp.zeros_like(x), bundle)
    save_args = orbax_utils.save_args_from_target(bundle)
    options = Options(max_to_keep=2, create=True)
    with manager_class(tmp_path, ocp.PyTreeCheckpointer(), options) as manager:
        for step in range(5):
            manager.save(step, bundle, save_kwargs={"save_args": save_args})
        assert {"3", "4"} <= names(tmp_path)
        raw = manager.restore(manager.latest_step())
        assert_same(raw["model"]["params"], state.params)
        restore_args = orbax_utils.restore_args_from_target(blank)
        for restored in (
            manager.restore(4, items=blank),
            manager.restore(4, items=blank, restore_kwargs={"restore_args": restore_args}),
        ):
            assert type(restored["model"]) is train_state.TrainState
            assert_same(restored["model"].params, state.params)
            assert_same(restored["model"].opt_state, state.opt_state)
            assert int(restored["model"].step) == 1
            np.testing.assert_array_equal(restored["config"]["dimensions"], [5, 3])
            np.testing.assert_array_equal(restored["data"][0], np.arange(5.0))


def test_legacy_the_flax_guide_onto_devices(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`restore_kwargs` with shardings alone, and made by flax from a reference."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    big = jax.device_put(np.arange(16).reshape(8, 2), place)
    reference = {"model": jax.device_put(jnp.zeros_like(big), place)}
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=50)
    with manager_class(tmp_path, checkpointer, Options()) as manager:
        manager.save(0, {"model": big})
        manager.wait_until_finished()
        shardings = {"restore_args": {"model": ocp.ArrayRestoreArgs(sharding=place)}}
        from_flax = {"restore_args": orbax_utils.restore_args_from_target(reference)}
        for restored in (
            manager.restore(0, restore_kwargs=shardings),
            manager.restore(0, items=reference, restore_kwargs=from_flax),
        ):
            assert_same(restored["model"], big)
            assert restored["model"].sharding == place


def test_legacy_the_flax_guide_with_a_new_field(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`transforms={}` keeps what the target has and the file has not."""
    old = {"w": np.arange(4)}
    new = {"w": np.zeros(4, np.int64), "batch_stats": np.arange(10)}
    with manager_class(tmp_path, ocp.PyTreeCheckpointer()) as manager:
        manager.save(0, old)
        manager.wait_until_finished()
        restore_args = ocp.checkpoint_utils.construct_restore_args(new)
        kwargs = {"transforms": {}, "restore_args": restore_args}
        restored = manager.restore(0, items=new, restore_kwargs=kwargs)
        assert_same(restored, {**old, "batch_stats": np.arange(10)})


def test_legacy_everything_by_position(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`save(step, items, save_kwargs, metrics, force)`, `restore(step, items, restore_kwargs, directory)`."""
    state, options = arrays(), Options(save_interval_steps=10, best_fn=lambda metrics: metrics["loss"])
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(), state)
    restore_args = ocp.checkpoint_utils.construct_restore_args(state)
    with manager_class(tmp_path, ocp.PyTreeCheckpointer(), options) as manager:
        assert manager.save(0, state, {"save_args": save_args}, {"loss": 1.0})
        assert not manager.save(1, state, None, {"loss": 1.0}, False)
        assert manager.save(1, state, None, {"loss": 2.0}, True)
        manager.wait_until_finished()
        assert manager.metrics(1) == {"loss": 2.0}
        assert_same(manager.restore(0, state, {"restore_args": restore_args}, tmp_path), state)
        assert_same(manager.restore(0, None, {"restore_args": restore_args}), state)


def test_legacy_a_checkpointer_per_item(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """A dict of them, and dicts in `save` and `restore`; asynchronous and not."""
    checkpointers = {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "extra": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    state = sharded()
    restore_args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=sharding()), state)
    with manager_class(tmp_path, checkpointers, options=Options()) as manager:
        manager.save(0, {"state": state, "extra": {"version": 1.0}})
        manager.wait_until_finished()
        assert {"state", "extra"} <= names(tmp_path / "0")
        everything = manager.restore(0)
        assert_same(everything["state"], state)
        assert everything["extra"] == {"version": 1.0}
        restored = manager.restore(
            0,
            items={"state": state, "extra": None},
            restore_kwargs={"state": {"restore_args": restore_args}, "extra": None},
        )
        assert_same(restored["state"], state)
        assert restored["state"]["a"].sharding == sharding()
        assert restored["extra"] == {"version": 1.0}
        assert set(manager.restore(0, items={"state": state}).keys()) == {"state"}


class LegacyPointHandler(ocp.CheckpointHandler):
    """From before there were argument classes: takes the item itself, and what options it likes."""

    def save(self, directory: Any, item: Point, use_npz: bool = True, **kwargs: Any) -> None:
        if use_npz:
            np.savez(directory / "point.npz", x=item.x, label=item.label)
        else:
            (directory / "point.json").write_text(json.dumps({"x": item.x.tolist(), "label": item.label}))

    def restore(self, directory: Any, item: Any = None, as_dict: bool = False, **kwargs: Any) -> Any:
        point = json.loads((directory / "point.json").read_text())
        return point if as_dict else Point(np.array(point["x"]), point["label"])


def test_legacy_a_handler_without_argument_classes(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """`save_kwargs` and `restore_kwargs` reach it; its files lie in the item's folder. (Or it is refused by name.)"""
    with (
        or_refused(manager_class, "LegacyPointHandler"),
        manager_class(tmp_path, ocp.Checkpointer(LegacyPointHandler())) as manager,
    ):
        manager.save(0, POINT, save_kwargs={"use_npz": False})
        manager.wait_until_finished()
        assert (tmp_path / "0" / "default" / "point.json").is_file()
        assert manager.restore(0).label == "here"
        assert manager.restore(0, restore_kwargs={"as_dict": True}) == {"x": [1.0, 1.5], "label": "here"}


def test_legacy_constructor_and_modern_arguments(manager_class: ManagerClass, tmp_path: pathlib.Path) -> None:
    """Half migrated code: a checkpointer in the constructor, `args=` in the calls, and the other way around."""
    with manager_class(tmp_path / "a", ocp.PyTreeCheckpointer()) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(arrays()))
        manager.wait_until_finished()
        assert_same(manager.restore(0, args=ocp.args.PyTreeRestore(arrays())), arrays())
    with manager_class(tmp_path / "b", item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        manager.save(0, arrays())
        manager.wait_until_finished()
        assert_same(manager.restore(0, items=arrays()), arrays())
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
    with manager_class(tmp_path / "c", item_handlers=handlers) as manager:
        manager.save(0, {"state": arrays(), "extra": [1]})
        manager.wait_until_finished()
        assert_same(manager.restore(0, items={"state": arrays()})["state"], arrays())
        assert manager.restore(0)["extra"] == [1]
