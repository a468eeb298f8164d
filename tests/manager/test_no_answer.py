"""Storage that does not answer: a read error is no damage. It is asked again, and then nothing is decided."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.directory import directory_of
from epochckpt.errors import StorageError
from epochckpt.format import paths
from epochckpt.inspection import watch
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from tests.support.silence import PASSING, Silence

Options = ocp.CheckpointManagerOptions
Save = ocp.args.StandardSave
BEST = Options(max_to_keep=1, best_fn=lambda m: m["acc"], keep_checkpoints_without_metrics=False)
DATA = "process_0/default.safetensors"


@pytest.fixture(autouse=True)
def short_pauses(patience: Callable[..., None]) -> None:
    """Before storage is asked again."""
    patience(read_pauses_secs=(0.001, 0.001, 0.001))


def save(manager: ec.CheckpointManager, *epochs: int, **kwargs: Any) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save({"x": np.full(5, epoch)}), **kwargs)
    manager.wait_until_finished()


def value(restored: Any) -> int:
    return int(restored["x"][0])


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with the epochs 1 and 2."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        save(manager, 1, 2)
    return tmp_path / "run"


def resume(run: pathlib.Path, **options: Any) -> tuple[list[int], int]:
    """What a job does when it starts: the epochs that it sees, and the value that it goes on from."""
    with ec.CheckpointManager(run, options=Options(**options)) as manager:
        return list(manager.all_steps()), value(manager.restore(None))


def outcome(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call returned, or what it raised."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def reads_of(run: pathlib.Path, call: Callable[[], Any]) -> int:
    """How many reads a call makes."""
    with pytest.MonkeyPatch.context() as patch:
        silence = Silence(patch, run, lambda number, path: 0)
        call()
        return silence.reads


def assert_untouched(run: pathlib.Path) -> None:
    """Both epochs are there and whole, nothing was quarantined, and a job goes on from the newest."""
    assert sorted(p.name for p in run.iterdir() if paths.TMP_SUFFIX not in p.name) == ["1", "2"]
    assert resume(run) == ([1, 2], 2)


@pytest.mark.slow
def test_any_one_read_that_fails_while_a_job_starts_costs_nothing(run: pathlib.Path) -> None:
    """Walks every read of opening and restoring; each is asked again, and the newest epoch is restored."""
    reads = reads_of(run, lambda: resume(run))
    assert reads > 30
    for number, code in zip(range(reads), itertools.cycle(PASSING), strict=False):
        with pytest.MonkeyPatch.context() as patch:
            silence = Silence(patch, run, lambda n, path, k=number, code=code: code if n == k else 0)
            assert resume(run) == ([1, 2], 2), (number, code)
            assert silence.hits == 1
    assert_untouched(run)


def test_storage_that_stays_silent_ends_the_start_and_decides_nothing(run: pathlib.Path) -> None:
    """From any read on, everything fails: a clear error, or the newest epoch; never an older one, never a change."""
    reads = reads_of(run, lambda: resume(run))
    refused = 0
    for number, code in zip(range(0, reads, 2), itertools.cycle(PASSING), strict=False):
        with pytest.MonkeyPatch.context() as patch:
            Silence(patch, run, lambda n, path, k=number, code=code: code if n >= k else 0)
            found, error = outcome(lambda: resume(run, read_only=True))
        assert error is None or isinstance(error, StorageError), (number, error)
        assert found == ([1, 2], 2) or "start again when it answers" in str(error)
        assert error is None or error.errno == code
        refused += error is not None
    assert refused > reads // 4
    assert_untouched(run)


@pytest.mark.parametrize("file", ["2/epoch.json", "2/process_0/node.json", f"2/{DATA}"])
def test_an_epoch_on_a_bad_sector_is_neither_passed_over_nor_set_aside(run: pathlib.Path, file: str) -> None:
    """Its number cannot be saved anew either; other epochs can be read by number, and `delete` makes room."""
    with ec.CheckpointManager(run) as manager, pytest.MonkeyPatch.context() as patch:
        Silence(patch, run, lambda n, path: errno.EIO if path == file else 0)
        with pytest.raises(StorageError, match=file):
            manager.restore(None)
        assert manager.all_steps() == [1, 2]
        assert manager.damaged_epochs() == []
        assert value(manager.restore(1)) == 1
        with pytest.raises(errors.EpochExistsError):
            manager.save(2, args=Save({"x": np.zeros(1)}), force=True)
        found = manager.verify(2)
        assert not found.ok
        assert (found.damage, [type(error) for error in found.unread]) == ((), [StorageError])
        if file == "2/epoch.json":
            with pytest.raises(StorageError):
                manager.status(2)
            with pytest.raises(StorageError):
                manager.reload()
            assert manager.all_steps() == [1, 2]
    assert_untouched(run)


def test_a_damaged_epoch_that_cannot_be_looked_at_is_not_set_aside(run: pathlib.Path) -> None:
    """Somebody may have put a good one in its place: the save fails, and the next one replaces it."""
    os.truncate(run / "2" / "epoch.json", 10)
    with ec.CheckpointManager(run) as manager:
        assert manager.damaged_epochs() == [2]
        with pytest.MonkeyPatch.context() as patch:
            Silence(patch, run, lambda n, path: errno.ESTALE if path == "2/epoch.json" else 0)
            with pytest.raises(errors.SaveError, match="did not answer"):
                save(manager, 2)
        assert (run / "2").exists()
        assert not list(run.glob("damaged-*"))
        save(manager, 2)
        assert len(list(run.glob("damaged-*"))) == 1
    assert resume(run) == ([1, 2], 2)


def test_a_commit_whose_outcome_nobody_can_see_is_uncertain(run: pathlib.Path, faults: Faults) -> None:
    """The rename reports an error, and so does the look at what it did: neither committed nor not committed."""
    with ec.CheckpointManager(run) as manager:
        with pytest.MonkeyPatch.context() as patch:
            silent = []

            def time_out(call: StoreCall) -> None:
                silent.append(call)
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

            faults.after(Store.rename, time_out, where=lambda call: call.target == "3")
            Silence(patch, run, lambda n, path: errno.ETIMEDOUT if silent and path == "3/epoch.json" else 0)
            with pytest.raises(errors.UncertainError):
                save(manager, 3)
        manager.reload()
        assert manager.all_steps() == [1, 2, 3]


def test_nothing_is_deleted_while_attached_metrics_cannot_be_read(tmp_path: pathlib.Path) -> None:
    """An evaluator called epoch 1 the best: retention that cannot read so deletes nothing, and later not epoch 1."""
    with ec.CheckpointManager(tmp_path, options=BEST) as manager:
        save(manager, 1)
        ec.attach_metrics(tmp_path, 1, {"acc": 0.9}, "evaluator")
        with pytest.MonkeyPatch.context() as patch:
            Silence(patch, tmp_path, lambda n, path: errno.EIO if "evaluator" in path else 0)
            save(manager, 2, metrics={"acc": 0.1})
            assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["1", "2"]
        save(manager, 3, metrics={"acc": 0.2})
        assert manager.all_steps() == [1, 3]


def test_a_step_of_stock_orbax_is_a_step_though_its_metrics_cannot_be_read(tmp_path: pathlib.Path) -> None:
    """The best step counts as none without metrics: nothing is deleted as long as they cannot be read."""
    with ocp.CheckpointManager(tmp_path, options=BEST) as stock:
        stock.save(1, args=Save({"x": np.full(5, 1)}), metrics={"acc": 0.9})
    with ec.CheckpointManager(tmp_path, options=BEST) as manager:
        with pytest.MonkeyPatch.context() as patch:
            Silence(patch, tmp_path, lambda n, path: errno.EIO if path == "1/metrics/metrics" else 0)
            assert value(manager.restore(1)) == 1
            save(manager, 2, metrics={"acc": 0.1})
            assert manager.all_steps() == [1, 2]
        save(manager, 3, metrics={"acc": 0.2})
        assert manager.all_steps() == [1, 3]


@pytest.mark.parametrize("file", ["default/_METADATA", "default/manifest.ocdbt", "_CHECKPOINT_METADATA"])
def test_a_step_of_stock_orbax_that_cannot_be_read_just_now_stays_the_newest(tmp_path: pathlib.Path, file: str) -> None:
    """No other step is restored instead, and none is taken for somebody else's folder."""
    with ocp.CheckpointManager(tmp_path) as stock:
        for step in (1, 2):
            stock.save(step, args=Save({"x": np.full(5, step)}))
    with pytest.MonkeyPatch.context() as patch:
        silence = Silence(patch, tmp_path, lambda n, path: errno.EIO if path == f"2/{file}" else 0)
        found, error = outcome(lambda: resume(tmp_path))
        assert silence.hits
    assert (found == ([1, 2], 2)) == (file == "_CHECKPOINT_METADATA")
    assert error is None or isinstance(error, StorageError)
    assert_untouched(tmp_path)


def test_what_follows_a_run_says_that_storage_does_not_answer(run: pathlib.Path) -> None:
    """Neither `follow` nor `watch` takes silence for damage or for a deletion; a new one goes on."""
    epoch_directory = directory_of(open_store(run), StepNames.of(Options()))
    watcher = watch.Watcher(epoch_directory)
    with pytest.MonkeyPatch.context() as patch:
        Silence(patch, run, lambda n, path: errno.EIO if path == "2/epoch.json" else 0)
        with pytest.raises(StorageError):
            list(ec.follow(run, timeout_secs=0))
        with pytest.raises(StorageError):
            watcher.look()
    assert [event.row.state for event in watcher.look()] == ["committed"]
    assert list(ec.follow(run, timeout_secs=0)) == [1, 2]
