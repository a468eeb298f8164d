"""`restore_newest`, which `restore(None)` is made of, and `item_kinds`."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError, InvalidArgumentError
from tests.processes import run_worker

Save = ocp.args.StandardSave


def save_epochs(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save({"x": np.full(5, epoch)}))
    manager.wait_until_finished()


def test_the_callers_function_restores_the_newest_that_it_can(directory: str) -> None:
    """Called per candidate, newest first; its value and the epoch come back."""
    with ec.CheckpointManager(directory) as manager:
        with pytest.raises(EpochNotFoundError):
            manager.restore_newest(lambda epoch: epoch)
        save_epochs(manager, 1, 2, 3)
        assert manager.restore_newest(lambda epoch: [epoch]) == (3, [3])
        assert manager.restore_newest(lambda epoch: None) == (3, None)
        epoch, value = manager.restore_newest(lambda e: manager.restore(e)["x"])
        assert (epoch, value[0]) == (3, 3)


@pytest.mark.parametrize(
    "error", [DamagedError("x", "is torn"), FormatError("x", "is odd"), EpochNotFoundError(3, "x", [])]
)
def test_what_cannot_be_used_is_passed_over(directory: str, error: Exception) -> None:
    """As in `restore(None)`: the rejected epoch is no longer listed, and its number may be saved again."""
    with ec.CheckpointManager(directory) as manager:
        save_epochs(manager, 1, 2, 3)
        seen = []

        def restore(epoch: int) -> str:
            seen.append(epoch)
            if epoch == 3:
                raise error
            return f"epoch {epoch}"

        assert manager.restore_newest(restore) == (2, "epoch 2")
        assert seen == [3, 2]
        assert manager.all_steps() == [1, 2]
        save_epochs(manager, 3)
        assert manager.restore_newest(lambda epoch: epoch) == (3, 3)


def test_none_that_can_be_used_and_other_errors(directory: str) -> None:
    """All rejected: DamagedError with the newest one's reason. An error that is not the epoch's fault is raised."""
    with ec.CheckpointManager(directory) as manager:
        save_epochs(manager, 1, 2)

        def damaged(epoch: int) -> None:
            raise DamagedError(f"file of {epoch}", "is torn")

        def broken(epoch: int) -> None:
            raise KeyError(epoch)

        with pytest.raises(KeyError, match="2"):
            manager.restore_newest(broken)
        assert manager.all_steps() == [1, 2]
        with pytest.raises(DamagedError, match="none of the 2 committed epochs can be restored; the newest: file of 2"):
            manager.restore_newest(damaged)


def test_real_damage_is_found_by_a_function_that_restores(tmp_path: pathlib.Path) -> None:
    """A truncated file of the newest epoch."""
    with ec.CheckpointManager(tmp_path) as manager:
        save_epochs(manager, 1, 2)
        data = tmp_path / "2" / "process_0" / "default.safetensors"
        os.truncate(data, 100)
        epoch, value = manager.restore_newest(lambda e: manager.restore(e)["x"].tolist())
        assert (epoch, value) == (1, [1] * 5)


def vote(directory: str) -> list[Any]:
    """Process 1 cannot read epoch 3, process 0 not epoch 2."""
    me = jax.process_index()

    def restore(epoch: int) -> str:
        if epoch == 3 - me:
            raise DamagedError(f"{epoch}", f"cannot be read by {me}")
        return f"{epoch} on {me}"

    with ec.CheckpointManager(directory) as manager:
        found = manager.restore_newest(restore)
        return [*found, list(manager.all_steps())]


def test_processes_vote_on_each_epoch(tmp_path: pathlib.Path) -> None:
    """What one cannot read is used by none."""
    with ec.CheckpointManager(tmp_path) as manager:
        save_epochs(manager, 1, 2, 3)
    found = run_worker("tests.test_newest:vote", {"directory": str(tmp_path)}, 2)
    assert found == [[1, f"1 on {me}", [1]] for me in range(2)]


def test_item_kinds(directory: str) -> None:
    """Of our own epochs."""
    with ec.CheckpointManager(directory) as manager:
        items = {"a": Save({"x": 1}), "b": ocp.args.JsonSave({}), "c": ec.args.NodeSave(1)}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        assert manager.item_kinds(0) == {"a": "arrays", "b": "files", "c": "node"}
        with pytest.raises(EpochNotFoundError, match="epoch 7"):
            manager.item_kinds(7)
        with pytest.raises(InvalidArgumentError, match="integer"):
            manager.item_kinds("0")  # type: ignore[arg-type]


def test_item_kinds_of_stock_orbax(tmp_path: pathlib.Path) -> None:
    """As far as its files say; Orbax's own folder of metrics is no item."""
    with ocp.CheckpointManager(tmp_path / "several") as stock:
        items = {"a": Save({"x": np.ones(2)}), "b": ocp.args.JsonSave({"k": 1})}
        stock.save(0, args=ocp.args.Composite(**items), metrics={"loss": 1.0})
    with ocp.CheckpointManager(tmp_path / "one") as stock:
        stock.save(0, args=Save({"x": np.ones(2)}))
    with ec.CheckpointManager(tmp_path / "several") as manager:
        assert manager.item_kinds(0) == {"a": "arrays", "b": "files"}
    with ec.CheckpointManager(tmp_path / "one") as manager:
        assert manager.item_kinds(0) == {"default": "arrays"}
