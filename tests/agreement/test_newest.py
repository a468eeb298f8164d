"""`restore_newest`, which `restore(None)` is made of, and `item_kinds`."""

from __future__ import annotations

import errno
import os
import pathlib
import pickle
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError, InvalidArgumentError, StorageError
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.processes import run_worker

Options = ocp.CheckpointManagerOptions
Save = ocp.args.StandardSave


def save_epochs(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save({"x": np.full(5, epoch)}))
    manager.wait_until_finished()


def value(restored: Any) -> int:
    return int(restored["x"][0])


def test_the_callers_function_restores_the_newest_that_it_can(directory: str) -> None:
    """Called per candidate, newest first; its value and the epoch come back."""
    with ec.CheckpointManager(directory) as manager:
        with pytest.raises(EpochNotFoundError):
            manager.restore_newest(lambda epoch: epoch)
        save_epochs(manager, 1, 2, 3)
        assert manager.restore_newest(lambda epoch: [epoch]) == (3, [3])
        assert manager.restore_newest(lambda epoch: epoch, np.array([1, 2])) == (2, 2)
        assert manager.restore_newest(lambda epoch: None) == (3, None)
        epoch, value = manager.restore_newest(lambda e: manager.restore(e)["x"])
        assert (epoch, value[0]) == (3, 3)


@pytest.mark.parametrize("error", [DamagedError("x", "is torn"), FormatError("x", "is odd")])
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
    """Storage answers one process not; epoch 4 is deleted; process 1 cannot read epoch 2, process 0 not epoch 3."""
    me = jax.process_index()

    def silent(epoch: int) -> int:
        if me == 1:
            raise StorageError(str(epoch), TimeoutError(errno.ETIMEDOUT, "no answer"))
        return epoch

    def restore(epoch: int) -> str:
        if epoch == 3 - me:
            raise DamagedError(f"{epoch}", f"cannot be read by {me}")
        return f"{epoch} on {me}"

    with ec.CheckpointManager(directory) as manager:
        try:
            manager.restore_newest(silent)
            error = ""
        except StorageError as caught:
            error = str(caught)
        if me == 0:
            os.rename(f"{directory}/4", f"{directory}/away")
        there = value(manager.restore(None)), list(manager.all_steps()), manager.damaged_epochs()
        found = manager.restore_newest(restore)
        return [error, there, *found, list(manager.all_steps()), manager.damaged_epochs()]


def test_processes_vote_on_each_epoch(tmp_path: pathlib.Path) -> None:
    """What one cannot read is used by none. Silence of storage ends it for all; a deletion is no damage to any."""
    with ec.CheckpointManager(tmp_path) as manager:
        save_epochs(manager, 1, 2, 3, 4)
    found = run_worker("tests.agreement.test_newest:vote", {"directory": str(tmp_path)}, 2)
    for me, (error, *rest) in enumerate(found):
        assert error.startswith("4: storage did not answer")
        assert rest == [[3, [1, 2, 3], []], 1, f"1 on {me}", [1], [2, 3]]


def read_while_replaced(directory: str) -> list[Any]:
    """Process 0 reads epoch 2, then somebody replaces it, and then process 1 reads it."""
    me = jax.process_index()
    tried = []

    with ec.CheckpointManager(f"{directory}/run") as manager:

        def restore(epoch: int) -> int:
            tried.append(epoch)
            if me == 1 and len(tried) == 1:
                with open(f"{directory}/has_read"):  # a pipe: until process 0 opens it, too
                    pass
                os.rename(f"{directory}/run/2", f"{directory}/away")
                os.rename(f"{directory}/other/2", f"{directory}/run/2")
            found = value(manager.restore(epoch))
            if me == 0 and len(tried) == 1:
                with open(f"{directory}/has_read", "w"):
                    pass
            return found

        return [*manager.restore_newest(restore), tried]


def test_all_processes_restore_one_save_of_an_epoch_that_is_replaced_meanwhile(tmp_path: pathlib.Path) -> None:
    """It is read once more, and no array is put together from both."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        save_epochs(manager, 1, 2)
    with ec.CheckpointManager(tmp_path / "other") as manager:
        assert manager.save(2, args=Save({"x": np.full(5, 20)}))
    os.mkfifo(tmp_path / "has_read")
    found = run_worker("tests.agreement.test_newest:read_while_replaced", {"directory": str(tmp_path)}, 2)
    assert found == [[2, 20, [2, 2]]] * 2


# -- what is damaged, what is deleted --------------------------------------------------------------------------------


def harm(run: pathlib.Path, epoch: int, what: str) -> None:
    os.truncate(run / f"{epoch}" / ("epoch.json" if what == "record" else "process_0/default.safetensors"), 20)


def flip(run: pathlib.Path, epoch: int) -> None:
    """Damage that only reading every byte finds."""
    path = run / f"{epoch}" / "process_0" / "default.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with the epochs 1, 2 and 3."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        save_epochs(manager, 1, 2, 3)
    return tmp_path / "run"


def reader_of(run: pathlib.Path) -> ec.CheckpointManager:
    return ec.CheckpointManager(run, options=Options(read_only=True))


@pytest.mark.parametrize("what", ["record", "size", "bytes"])
def test_a_reader_lists_the_good_epoch_that_replaced_a_damaged_one(run: pathlib.Path, what: str) -> None:
    """Damage is of one attempt: saved anew the epoch is another one, for a reader that has seen the damage, too."""
    flip(run, 3) if what == "bytes" else harm(run, 3, what)
    with reader_of(run) as reader:
        assert value(reader.restore(None)) == 2
        assert reader.damaged_epochs() == [3]
        reader.reload()
        assert (reader.all_steps(), reader.damaged_epochs()) == ([1, 2], [3])
        with ec.CheckpointManager(run) as trainer:
            assert value(trainer.restore(None)) == 2
            save_epochs(trainer, 3)
        reader.reload()
        assert (reader.all_steps(), reader.damaged_epochs()) == ([1, 2, 3], [])
        assert value(reader.restore(None)) == 3


def by_the_usual_loop(manager: ec.CheckpointManager) -> tuple[list[str], int | None]:
    """The errors of `restore(latest_step())`, and what it gives in the end."""
    raised: list[str] = []
    while (epoch := manager.latest_step()) is not None:
        assert len(raised) < 4, raised
        try:
            return raised, value(manager.restore(epoch))
        except (DamagedError, EpochNotFoundError) as error:
            raised.append(str(error))
    return raised, None


@pytest.mark.parametrize("read_only", [False, True])
def test_the_usual_loop_around_restore_gets_past_damaged_epochs(run: pathlib.Path, read_only: bool) -> None:
    """Once `restore` has failed, the manager knows of the damage; the error says so, and names `restore(None)`."""
    flip(run, 3)
    flip(run, 2)
    with ec.CheckpointManager(run, options=Options(read_only=read_only)) as manager:
        assert manager.latest_step() == 3
        raised, found = by_the_usual_loop(manager)
        assert (found, manager.all_steps(), manager.damaged_epochs()) == (1, [1], [2, 3])
        assert "Checkpoint 3 is not listed any more: latest_step() is 2 now. restore(None) takes" in raised[0]
        manager.reload()
        assert (manager.all_steps(), manager.damaged_epochs()) == ([1], [2, 3])
        with pytest.raises(DamagedError, match="3/process_0/default"):
            manager.restore(3)
        if not read_only:
            save_epochs(manager, 3)
            assert (manager.latest_step(), by_the_usual_loop(manager)) == (3, ([], 3))


def test_the_usual_loop_ends_where_every_epoch_is_damaged(run: pathlib.Path) -> None:
    """Nothing is listed any more."""
    for epoch in (1, 2, 3):
        flip(run, epoch)
    with ec.CheckpointManager(run) as manager:
        raised, found = by_the_usual_loop(manager)
        assert (len(raised), found, manager.damaged_epochs()) == (3, None, [1, 2, 3])
        assert "Checkpoint 1 is not listed any more: no other is listed." in raised[-1]


def test_the_usual_loop_gets_past_epochs_that_another_run_has_deleted(run: pathlib.Path) -> None:
    """The list is old: it is looked at again, as by `restore(None)`; an epoch that never was changes nothing."""
    with reader_of(run) as reader, ec.CheckpointManager(run) as trainer:
        trainer.delete(3)
        trainer.wait_until_finished()
        raised, found = by_the_usual_loop(reader)
        assert (len(raised), found, reader.all_steps(), reader.damaged_epochs()) == (1, 2, [1, 2], [])
        with pytest.raises(EpochNotFoundError, match="no checkpoint 9"):
            reader.restore(9)


def test_restore_in_the_background_tells_of_damage_too(run: pathlib.Path) -> None:
    """And in Orbax's v1 style, whose error names its own call."""
    flip(run, 3)
    with ec.CheckpointManager(run) as manager:
        with pytest.raises(DamagedError, match=r"restore\(None\) takes"):
            manager.restore_async(3).result()
        assert (manager.latest_step(), manager.damaged_epochs()) == (2, [3])
    with ec.training.Checkpointer(run) as checkpointer:
        with pytest.raises(DamagedError, match=r"load\(\) takes the newest"):
            checkpointer.load(3)
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 2


def loop(directory: str) -> list[Any]:
    """Process 1 cannot read epoch 3: what the loop, and a restore in the background, give this process."""
    me = jax.process_index()
    with Faults().everywhere() as faults, ec.CheckpointManager(directory) as manager:
        if me == 1:
            faults.instead(Store.read, lambda call: b"{", where=lambda call: call.path == "3/epoch.json")
        raised, found = by_the_usual_loop(manager)
        before = [raised, found, list(manager.all_steps()), manager.damaged_epochs()]
        background = value(manager.restore_async(1).result())
        if me == 0:
            os.rename(f"{directory}/2", f"{directory}/away")
        gone, left = by_the_usual_loop(manager)
        if me == 1:  # alone, without a word to the other process
            with reader_of(pathlib.Path(directory)) as reader:
                background += value(reader.restore(1))
        return [*before, background - me, len(gone), left, list(manager.all_steps())]


@pytest.mark.slow
def test_processes_get_past_a_damaged_epoch_together(tmp_path: pathlib.Path) -> None:
    """What one of them cannot read none of them gets, and `latest_step()` stays the same on all."""
    with ec.CheckpointManager(tmp_path) as manager:
        save_epochs(manager, 1, 2, 3)
    for (error, *more), *rest in run_worker("tests.agreement.test_newest:loop", {"directory": str(tmp_path)}, 2):
        assert not more
        assert error.startswith("3/epoch.json: does not begin with its checksum ")
        assert "). Checkpoint 3 is not listed any more: latest_step() is 2 now." in error
        assert rest == [2, [1, 2], [3], 1, 1, 1, [1]]


def test_a_reader_restores_the_newest_of_a_run_that_has_deleted_all_that_it_lists(run: pathlib.Path) -> None:
    """Its list is old, nothing is damaged: it looks again, and lists what it found."""
    with reader_of(run) as reader, ec.CheckpointManager(run, options=Options(max_to_keep=2)) as trainer:
        save_epochs(trainer, 4, 5, 6)
        assert reader.all_steps() == [1, 2, 3]
        assert value(reader.restore(None)) == 6
        assert (reader.all_steps(), reader.damaged_epochs()) == ([5, 6], [])
        for epoch in (5, 6):
            trainer.delete(epoch)
        with pytest.raises(EpochNotFoundError):
            reader.restore(None)
        assert (reader.all_steps(), reader.damaged_epochs()) == ([], [])


def test_an_epoch_deleted_while_a_reader_looks_at_it_is_not_damaged(run: pathlib.Path, faults: Faults) -> None:
    """While it reloads, and while it restores; saved anew it is listed."""
    with reader_of(run) as reader, ec.CheckpointManager(run) as trainer:

        def delete(call: StoreCall) -> None:
            look.remove()
            trainer.delete(3)
            trainer.wait_until_finished()

        look = faults.before(Store.size, delete, where=lambda call: call.path.startswith("3/"))
        reader.reload()
        assert look.hits == 1
        assert (reader.all_steps(), reader.damaged_epochs()) == ([1, 2], [])
        save_epochs(trainer, 3)
        reader.reload()
        assert reader.all_steps() == [1, 2, 3]

        def restore(epoch: int) -> int:
            if epoch == 3:
                trainer.delete(3)
                trainer.wait_until_finished()
            return value(reader.restore(epoch))

        assert reader.restore_newest(restore) == (2, 2)
        assert (reader.all_steps(), reader.damaged_epochs()) == ([1, 2], [])
        save_epochs(trainer, 3)
        reader.reload()
        assert reader.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("found", ["at open", "by the vote"])
def test_where_every_epoch_is_damaged_restore_says_so(run: pathlib.Path, found: str) -> None:
    """As documented, and with the reason for the newest; none of them is called missing."""
    for epoch in (1, 2, 3):
        harm(run, epoch, "record") if found == "at open" else flip(run, epoch)
    with ec.CheckpointManager(run) as manager:
        for _ in range(2):
            with pytest.raises(DamagedError, match=r"none of the 3 committed epochs can be restored; the newest: 3/"):
                manager.restore(None)
        assert (manager.all_steps(), manager.damaged_epochs()) == ([], [1, 2, 3])


def test_an_epoch_that_a_function_says_is_gone_is_passed_over_and_stays(run: pathlib.Path) -> None:
    """It is on storage all the same: nothing is quarantined, and nothing is asked for ever."""
    with ec.CheckpointManager(run) as manager:
        asked = []

        def restore(epoch: int) -> int:
            asked.append(epoch)
            if epoch == 3:
                raise EpochNotFoundError(3, "x", [])
            return epoch

        assert manager.restore_newest(restore) == (2, 2)
        assert asked == [3, 2]
        assert (manager.all_steps(), manager.damaged_epochs()) == ([1, 2, 3], [])


def test_item_kinds(directory: str) -> None:
    """Of our own epochs."""
    with ec.CheckpointManager(directory) as manager:
        items = {"a": Save({"x": 1}), "b": ocp.args.JsonSave({}), "c": ec.args.NodeSave(1)}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        assert manager.item_kinds(0) == {"a": "arrays", "b": "files", "c": "node"}
        with pytest.raises(EpochNotFoundError, match="checkpoint 7"):
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


def test_damage_of_a_block_that_many_leaves_share_is_blamed_on_none_of_them(tmp_path: pathlib.Path) -> None:
    """A single bit of the last leaf: any of them may be the one. A leaf with a block of its own is named."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=Save({f"leaf{n:02}": np.full(5, n) for n in range(30)} | {"empty": np.zeros(0)}))
        manager.save(2, args=Save({"x": np.ones(5)}))
        manager.wait_until_finished()
        flip(tmp_path, 1)
        flip(tmp_path, 2)
        with pytest.raises(DamagedError, match=r"default\.safetensors, leaf 'x': bytes") as one:
            manager.restore(2)
        with pytest.raises(
            DamagedError, match=r"default\.safetensors, one of 30 leaves from 'leaf00' on: bytes"
        ) as many:
            manager.restore(1)
    assert (one.value.leaf, one.value.leaves) == ("x", 1)
    assert pickle.loads(pickle.dumps(many.value)).leaves == 30
