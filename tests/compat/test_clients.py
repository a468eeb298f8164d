"""How training projects call a checkpoint manager, replayed in our own code, with Orbax's classes and with ours.

From their public sources:

- openpi: handlers by item name, a callback as an item, Orbax's older form of `save`;
- octo: a `Checkpointer` per directory, `save(step, tree, {"save_args": …})`;
- kauldron: a manager that is made anew when its items are known, and an evaluator beside it;
- Tunix: Orbax's v1 under a context, `except KeyError` around a load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import nnx
from flax.training import orbax_utils
from orbax.checkpoint import future
from orbax.checkpoint import v1 as stock

import epochckpt as ec
from tests.support.managers import ManagerClass, abstract, assert_same, both, names, sharding

TX = optax.sgd(0.1)  # its state has no arrays


def train_state(step: int) -> dict[str, Any]:
    """Parameters over all devices, and the state of an optimizer that has no arrays."""
    params = {"w": jax.device_put(jnp.full((8, 2), step, jnp.float32), sharding("model")), "b": jnp.zeros(2)}
    return {"params": params, "opt_state": TX.init(params), "step": step}


# -- openpi ------------------------------------------------------------------------------------------------------------


class Callback(ocp.AsyncCheckpointHandler):
    """Has the caller write an item: what is saved is a function of a folder."""

    def save(self, directory: epath.Path, args: Any) -> None:
        if jax.process_index() == 0:
            args.write(directory)

    async def async_save(self, directory: epath.Path, args: Any) -> list[Any]:
        return [future.CommitFutureAwaitingContractedSignals(asyncio.to_thread(self.save, directory, args))]

    def restore(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@ocp.args.register_with_handler(Callback, for_save=True)
@dataclasses.dataclass
class CallbackSave(ocp.args.CheckpointArgs):
    write: Callable[[epath.Path], None]


@ocp.args.register_with_handler(Callback, for_restore=True)
class CallbackRestore(ocp.args.CheckpointArgs):
    pass


@both
def test_a_loop_that_saves_assets_by_a_callback_is_resumed(tmp_path: pathlib.Path, manager_class: ManagerClass) -> None:
    """As openpi: the directory is there before the manager, and parameters are read back by a bare Checkpointer."""
    directory = tmp_path / "run"
    directory.mkdir()

    def manager() -> Any:
        return manager_class(
            directory,
            item_handlers={
                "assets": Callback(),
                "train_state": ocp.PyTreeCheckpointHandler(),
                "params": ocp.PyTreeCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=1, keep_period=2, create=False, async_options=ocp.AsyncOptions(timeout_secs=7200)
            ),
        )

    def write_assets(folder: epath.Path) -> None:
        (folder / "robot").mkdir(parents=True, exist_ok=True)
        (folder / "robot" / "norm_stats.json").write_text(json.dumps({"mean": 0.5}))

    def items(step: int, assets: Any = None) -> dict[str, Any]:
        state = train_state(step)
        params = state.pop("params")
        found = {"train_state": state, "params": {"params": params}}
        return found if assets is None else {"assets": assets, **found}

    run = manager()
    assert tuple(run.all_steps()) in [(), (0,)]
    for step in range(4):
        run.save(step, items(step, write_assets))
    run.wait_until_finished()
    run.close()
    run = manager()
    assert tuple(run.all_steps()) == (0, 2, 3)
    got = run.restore(run.latest_step(), items=items(0))
    assert_same(got["params"], items(3)["params"])
    assert_same(got["train_state"], items(3)["train_state"])
    run.close()

    assert json.loads((directory / "3" / "assets" / "robot" / "norm_stats.json").read_text()) == {"mean": 0.5}
    with ocp.PyTreeCheckpointer() as checkpointer:
        at = directory / "3" / "params"
        tree = {"params": checkpointer.metadata(at).item_metadata.tree["params"]}
        as_numpy = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), tree)
        read = checkpointer.restore(at, ocp.args.PyTreeRestore(item=tree, restore_args=as_numpy))
    assert_same(read, jax.tree.map(np.asarray, items(3)["params"]))


# -- octo --------------------------------------------------------------------------------------------------------------


@both
def test_two_directories_with_a_checkpointer_each(tmp_path: pathlib.Path, manager_class: ManagerClass) -> None:
    """As octo: the whole state keeps one step, the parameters keep all, beside files of the model's own."""

    def manager(name: str, **options: Any) -> Any:
        return manager_class(tmp_path / name, ocp.PyTreeCheckpointer(), options=ocp.CheckpointManagerOptions(**options))

    states, params = manager("run/state", max_to_keep=1), manager("run")
    (tmp_path / "run" / "config.json").write_text("{}")
    for step in (100, 200):
        state = train_state(step)
        states.save(step, state, {"save_args": orbax_utils.save_args_from_target(state)})
        params.save(step, state["params"], {"save_args": orbax_utils.save_args_from_target(state["params"])})
    for each in (states, params):
        each.wait_until_finished()
        each.close()
    assert {"config.json", "state", "100", "200"} <= names(tmp_path / "run")

    loader = manager_class(tmp_path / "run", ocp.PyTreeCheckpointer())
    assert loader.latest_step() == 200
    shapes = jax.eval_shape(lambda: train_state(0)["params"])
    read = loader.restore(100, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    assert_same(jax.tree.map(np.asarray, read), jax.tree.map(np.asarray, train_state(100)["params"]))
    resumed = manager("run/state", max_to_keep=1)
    assert list(resumed.all_steps()) == [200]
    assert_same(resumed.restore(200, items=train_state(0)), train_state(200))


# -- kauldron ----------------------------------------------------------------------------------------------------------


class Fast:
    """Derived classes list steps from what the manager has in memory, or by the names of folders alone."""

    def all_steps(self: Any, read: bool = False) -> list[int]:
        if not read:
            return [info.step for info in self._checkpoints]
        found = (each.name.rpartition("_")[2] for each in self.directory.iterdir() if "tmp" not in each.name)
        return [int(number) for number in found if number.isdigit()]


class Lazy:
    """A manager that is made when it is first asked, and once more when its items are known."""

    def __init__(self, manager_class: ManagerClass, directory: pathlib.Path, *, create: bool):
        self._class: Any = type("FastManager", (Fast, manager_class), {})
        self.directory = epath.Path(directory)
        self._handlers: Any = None
        self._manager: Any = None
        self._options = ocp.CheckpointManagerOptions(
            save_interval_steps=2,
            max_to_keep=3,
            step_prefix="ckpt",
            create=create,
            async_options=ocp.AsyncOptions(timeout_secs=1800),
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
            file_options=ocp.checkpoint_manager.FileOptions(path_permission_mode=0o770),
        )
        if create:
            self.directory.mkdir(parents=True, exist_ok=True)

    def manager(self, *items: str) -> Any:
        if self._manager is None or (items and self._handlers is None):
            self._handlers = {name: ocp.StandardCheckpointHandler() for name in items} or None
            self._manager = self._class(directory=self.directory, options=self._options, item_handlers=self._handlers)
        return self._manager

    def save(self, step: int) -> None:
        state = train_state(step)
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), timer=ocp.args.StandardSave({"secs": step}))
        self.manager("state", "timer").save(step, args=args, force=False, metrics={"loss": float(step)})

    def restore(self, step: int) -> Any:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract(train_state(0))), timer=ocp.args.StandardRestore({"secs": 0})
        )
        return self.manager("state", "timer").restore(step=step, args=args)

    def new_steps(self) -> Iterator[int]:
        """As Orbax's own poller finds them, which knows the directory alone."""
        options = self.manager()._options
        yield from ocp.checkpoint_utils.checkpoints_iterator(
            checkpoint_dir=self.manager().directory,
            step_prefix=options.step_prefix,
            step_format_fixed_length=options.step_format_fixed_length,
            seconds_to_sleep=0,
            timeout=0,
            snapshot_dir=self.directory / "_SNAPSHOTS-1",
        )


@both
def test_a_manager_that_learns_its_items_late_and_an_evaluator(
    tmp_path: pathlib.Path, manager_class: ManagerClass
) -> None:
    """As kauldron: steps are asked for before there are items; the evaluator does not create the directory."""
    trainer = Lazy(manager_class, tmp_path / "checkpoints", create=True)
    assert trainer.manager().latest_step() is None
    for step in range(5):
        if trainer.manager().should_save(step):
            trainer.save(step)
    trainer.manager().wait_until_finished()
    assert {"ckpt_0", "ckpt_2", "ckpt_4"} <= names(trainer.directory)
    assert trainer.manager().latest_step() == 4
    assert sorted(trainer.manager().all_steps(read=True)) == [0, 2, 4]
    evaluator = Lazy(manager_class, tmp_path / "checkpoints", create=False)
    assert list(evaluator.manager().all_steps()) == [0, 2, 4]
    assert list(evaluator.new_steps()) == [4]
    evaluator.manager().reload()
    got = evaluator.restore(4)
    assert_same(got["state"], train_state(4))
    assert got["timer"] == {"secs": 4}
    assert evaluator.manager().item_metadata(4)["state"]["params"]["w"].shape == (8, 2)
    for each in (trainer, evaluator):
        each.manager().close()


@both
@pytest.mark.parametrize("prefix", [None, "ckpt"])
def test_what_projects_read_behind_the_interface(
    tmp_path: pathlib.Path, manager_class: ManagerClass, prefix: str | None
) -> None:
    """The infos of steps, the folders of steps, the options."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, step_prefix=prefix)
    with manager_class(tmp_path / "run", options=options) as manager:
        assert list(manager._checkpoints) == []
        assert manager._checkpoints.latest() is None
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(2)}), metrics={"loss": 1.0})
            manager.wait_until_finished()
        assert [info.step for info in manager._checkpoints] == [2, 3]
        assert [len(manager._checkpoints), manager._checkpoints.size(), manager._checkpoints[0].step] == [2, 2, 2]
        assert manager._checkpoints.latest().step == 3
        assert abs(manager._checkpoints.latest().time.timestamp() - time.time()) < 600
        folder = tmp_path / "run" / (f"{prefix}_3" if prefix else "3")
        assert manager._get_save_directory(3, manager.directory) == epath.Path(folder)
        assert manager._step_name_format.find_step(manager.directory, 3).path == epath.Path(folder)
        assert manager._step_name_format.build_name(7) == (f"{prefix}_7" if prefix else "7")
        assert manager._options is options


@both
def test_whether_items_have_names_is_known_once_it_is_said(tmp_path: pathlib.Path, manager_class: ManagerClass) -> None:
    """By the handlers, or by the first save or restore; the error for the other form has Orbax's words."""
    single, named = tmp_path / "single", tmp_path / "named"
    tree = ocp.args.StandardSave({"w": np.ones(2)})
    with manager_class(single) as manager:
        assert manager._default_item.get() is None
        manager.save(0, args=tree)
        assert manager._default_item.get() is True
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="Cannot provide `args` of type `Composite` when dealing with a single"):
            manager.save(1, args=ocp.args.Composite(state=tree))
    with manager_class(named) as manager:
        manager.save(0, args=ocp.args.Composite(state=tree))
        assert manager._default_item.get() is False
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="Must provide `args` of type `Composite` when dealing with multiple"):
            manager.save(1, args=tree)
    with manager_class(single) as manager:
        assert manager._default_item.get() is None
        manager.restore(0, args=ocp.args.StandardRestore())
        assert manager._default_item.get() is True
    with manager_class(named, item_names=("state",)) as manager:
        assert manager._default_item.get() is False
        with pytest.raises(ValueError, match="does not match with any registered handler"):
            manager.save(1, args=ocp.args.Composite(other=tree))
    with manager_class(single, item_handlers=ocp.StandardCheckpointHandler()) as manager:
        assert manager._default_item.get() is True


@both
def test_the_file_of_the_directorys_metadata(tmp_path: pathlib.Path, manager_class: ManagerClass) -> None:
    """It has a path once there is something to read, for a manager that only reads, too."""
    readers = ocp.CheckpointManagerOptions(read_only=True, create=False)
    tree = ocp.args.StandardSave({"w": np.ones(2)})
    with manager_class(tmp_path / "none") as manager:
        manager.save(0, args=tree)
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="Metadata directory is not initialized"):
            manager._root_metadata_file_path()
    with manager_class(tmp_path / "some", metadata={"run": 1}) as manager:
        manager.save(0, args=tree)
        manager.wait_until_finished()
        file = manager._root_metadata_file_path()
    assert json.loads(file.read_text())["custom_metadata"] == {"run": 1}
    with manager_class(tmp_path / "some", options=readers) as manager:
        assert manager._root_metadata_file_path() == file
        assert manager._root_metadata_file_path(legacy=True).parent == file.parent


# -- Tunix -------------------------------------------------------------------------------------------------------------

TRAINERS = [
    pytest.param(stock, id="orbax", marks=pytest.mark.skipif(not hasattr(stock, "load"), reason="older names")),
    pytest.param(ec.v1, id="epochckpt"),
]


class Net(nnx.Module):
    """Two layers, the second with an adapter."""

    def __init__(self, seed: int):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))
        self.adapter = nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("v1", TRAINERS)
def test_adapters_are_saved_alone_and_restored_into_a_model(tmp_path: pathlib.Path, v1: Any) -> None:
    """As Tunix: a context with Pathways' options at what asks for nothing; a KeyError says that the tree is another."""
    context = v1.Context()
    if not hasattr(context, "pathways_options"):
        pytest.skip("the installed Orbax has no such options")
    context.asynchronous.timeout_secs = 1200
    context.pathways_options.checkpointing_impl = ocp.pathways.CheckpointingImpl.from_options(
        use_persistence_array_handler=False
    )

    def trainer() -> Any:
        return v1.training.Checkpointer(
            str(tmp_path / "run"),
            context=context,
            save_decision_policy=v1.training.save_decision_policies.FixedIntervalPolicy(2),
            preservation_policy=v1.training.preservation_policies.LatestN(n=2),
            step_name_format=v1.path.step.standard_name_format(),
        )

    model = Net(0)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    c = trainer()
    for step in range(5):
        parts = {
            "model_params": nnx.state(model, nnx.LoRAParam),
            "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
        }
        began = c.save_checkpointables_async(step, parts, custom_metadata={"step": step})
        assert (began is not None) == (step % 2 == 0)
        if began is not None:
            began.result()
    c.close()

    c = trainer()
    assert [each.step for each in c.checkpoints] == [2, 4]
    metadata = c.checkpointables_metadata(c.latest.step)
    assert metadata.custom_metadata == {"step": 4}
    assert "optimizer_state" in metadata.metadata
    other = Net(7)
    with pytest.raises(KeyError), context:
        c.load_checkpointables(4, {"model_params": nnx.state(other)})
    partial = v1.Context(context)
    partial.pytree.loading.partial_load = True
    with partial:
        found = c.load_checkpointables(4, {"model_params": nnx.state(other, nnx.LoRAParam)})
    nnx.update(other, found["model_params"])
    np.testing.assert_array_equal(other.adapter.lora_a[...], model.adapter.lora_a[...])
    assert (np.asarray(other.dense.kernel[...]) != np.asarray(model.dense.kernel[...])).any()
    c.close()


@pytest.mark.parametrize("v1", TRAINERS)
def test_a_step_that_is_not_whole_is_replaced_through_the_manager_underneath(tmp_path: pathlib.Path, v1: Any) -> None:
    """As a trainer on Tunix does it, for versions of v1 without `delete`; the next save is of the same step."""
    with v1.training.Checkpointer(tmp_path / "run", lightweight_initialize=True) as c:
        for step in (1, 2):
            c.save(step, {"w": np.full(2, step)})
        assert c._manager._options.lightweight_initialize
        assert list(c._manager.all_steps()) == [1, 2]
        c._manager.delete(2)
        c.reload()
        assert c.latest.step == 1
        c.save(2, {"w": np.full(2, 7)})
        np.testing.assert_array_equal(c.load(2)["w"], np.full(2, 7))
