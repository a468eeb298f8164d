"""Retention: an epoch leaves the history when it is out of sight on storage, not before; and it costs little."""

from __future__ import annotations

import collections
import errno
import os
import pathlib
import shutil

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.claim_jobs import args
from tests.support.processes import run_worker

TRASH = ocp.CheckpointManagerOptions(max_to_keep=1, todelete_subdir="trash")


def commit(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=args(epoch), force=True)
        manager.wait_until_finished()


def on_storage(directory: pathlib.Path, options: ocp.CheckpointManagerOptions | None = None) -> list[int]:
    """What a fresh look finds."""
    with ec.CheckpointManager(directory, options=options) as manager:
        return list(manager.all_steps())


def test_an_epoch_whose_deletion_fails_stays_listed_and_is_tried_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`trash/1` exists already: the list is that of a reopen, and the failure is raised once, until 1 can go."""
    (tmp_path / "trash" / "1").mkdir(parents=True)
    manager = ec.CheckpointManager(tmp_path, options=TRASH)
    commit(manager, 1)
    assert manager.save(2, args=args(2))
    with pytest.raises(errors.RetentionError, match=r"checkpoint 1, .*trash/1 exists already.*tries again"):
        manager.wait_until_finished()
    assert manager.all_steps() == on_storage(tmp_path) == [1, 2]
    assert manager.restore(1)["w"][0] == 1
    commit(manager, 3)
    assert manager.all_steps() == on_storage(tmp_path) == [1, 3], "it is not raised again, and others are deleted"
    (tmp_path / "trash" / "1").rmdir()
    commit(manager, 4)
    assert manager.all_steps() == on_storage(tmp_path) == [4]
    assert sorted(os.listdir(tmp_path / "trash")) == ["1", "2", "3"]
    manager.close()
    assert caplog.text.count("could not be deleted") == 1


@pytest.mark.parametrize("how", ["retention", "delete"])
def test_an_epoch_that_went_out_of_sight_before_the_error_is_not_listed(
    tmp_path: pathlib.Path, faults: Faults, how: str
) -> None:
    """The rename of the epoch is done, and the flush of the directory fails: a reopen does not list it either."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    manager = ec.CheckpointManager(tmp_path, options=None if how == "delete" else options)
    commit(manager, 1)
    broken = faults.fail(
        Store.sync_folder,
        OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path)),
        where=lambda call: not call.path and not (tmp_path / "1").exists(),
        times=1,
    )
    if how == "delete":
        manager.delete(1)
        with pytest.raises(errors.RemovalError, match=r"checkpoint 1 is deleted.*Input/output error"):
            manager.wait_until_finished()
    else:
        commit(manager, 2)
    assert broken.hits == 1
    assert manager.all_steps() == on_storage(tmp_path) == ([] if how == "delete" else [2])
    manager.close()


def test_a_rollback_that_was_recorded_before_the_error_holds(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The record is in its place, and the flush of the directory fails: no reader sees the later epochs, and the
    manager lists what a reopen lists; the next claim moves them."""
    manager = ec.CheckpointManager(tmp_path)
    commit(manager, 1, 2, 3)
    broken = faults.fail(
        Store.sync_folder,
        OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path)),
        where=lambda call: not call.path and (tmp_path / "rollback.json").exists(),
        times=1,
    )
    with pytest.raises(errors.UnfinishedError, match="Input/output error"):
        manager.rollback_to(1)
    assert broken.hits == 1
    assert manager.all_steps() == on_storage(tmp_path) == [1]
    manager.close()
    with ec.CheckpointManager(tmp_path) as manager:
        manager.claim()
        assert sorted(path.name for path in tmp_path.glob("rolled-back-*/*")) == ["2", "3"]


@pytest.mark.slow
def test_every_process_lists_an_epoch_whose_deletion_failed(tmp_path: pathlib.Path) -> None:
    """Two real processes: the verdict says what is gone, not what should be."""
    (tmp_path / "trash" / "1").mkdir(parents=True)
    found = run_worker("tests.support.claim_jobs:save_with_trash", {"directory": str(tmp_path)}, 2)
    assert found == [[[1, 3], [1]], [[1, 3], []]]
    assert on_storage(tmp_path) == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("into", [None, "trash"])
def test_the_first_retention_of_a_large_directory_is_linear(
    tmp_path: pathlib.Path, faults: Faults, into: str | None
) -> None:
    """A directory that was never pruned is listed as often for 24 old epochs as for 8; the rest grows with them."""
    calls = collections.Counter[str]()
    found: list[collections.Counter[str]] = []

    def note(call: StoreCall) -> None:
        calls["below" if call.path else "root"] += 1

    for count in (8, 24):
        directory = tmp_path / str(count)
        with ec.CheckpointManager(directory) as manager:
            commit(manager, *range(count))
        options = ocp.CheckpointManagerOptions(max_to_keep=1, todelete_subdir=into)
        with ec.CheckpointManager(directory, options=options) as manager:
            manager.claim()
            calls.clear()
            with faults.before(Store.list, note), faults.before(Store.find, note):
                commit(manager, count)
            found.append(calls.copy())
            assert manager.all_steps() == [count]
    assert found[0]["root"] == found[1]["root"]
    assert 0 < found[1]["below"] <= 3 * found[0]["below"]


def test_a_step_of_stock_orbax_that_is_gone_leaves_the_history_like_any_other_epoch(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has removed it by hand: there is nothing left to be careful with."""
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(1, args=args(1))
        stock.wait_until_finished()
    with ec.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        assert manager.all_steps() == [1]
        shutil.rmtree(tmp_path / "1")
        commit(manager, 2)
        assert manager.all_steps() == [2]
    assert "is not deleted" not in caplog.text
