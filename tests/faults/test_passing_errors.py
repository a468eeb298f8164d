"""Storage that fails once: a passing error is raised, condemns no epoch, and deletes nothing."""

from __future__ import annotations

import pathlib

import pytest

import epochckpt as ec
from epochckpt.errors import (
    StorageError,
)
from epochckpt.storage import Reader, Store
from epochckpt.testing import Faults
from tests.support.small_saves import Options, data_path, on_storage, save_all, timed_out, value_of
from tests.support.taps import is_data


def test_an_error_of_storage_at_open_is_raised_and_condemns_no_epoch(directory: str, faults: Faults) -> None:
    """The survey tells a file that cannot be looked at now from one that is damaged."""
    with ec.CheckpointManager(directory) as manager:
        save_all(manager, [1, 2])
        method = Store.size if manager.components.directory.store.atomic_folder_rename else Store.read
    once = faults.fail(method, timed_out(), where=lambda call: call.path.startswith("2/"), times=1)
    with pytest.raises(StorageError):
        ec.CheckpointManager(directory)
    assert once.hits == 1
    with ec.CheckpointManager(directory) as manager:
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(None)) == 2


def test_a_passing_error_does_not_make_restore_fall_back(directory: str, faults: Faults) -> None:
    """restore(None) raises it: an older epoch is no answer to a time-out. The newest stays the newest."""
    with ec.CheckpointManager(directory) as manager:
        save_all(manager, [1, 2])
        path = data_path(manager, 2)
        once = faults.fail(Store.open_reader, timed_out(), where=lambda call: call.path == path, times=1)
        with pytest.raises(StorageError):
            manager.restore(None)
        assert once.hits == 1
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(None)) == 2


def test_a_passing_error_in_the_middle_of_a_file_does_not_make_restore_fall_back(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """The same, if the file could be opened."""
    with ec.CheckpointManager(tmp_path) as manager:
        save_all(manager, [1, 2])
        once = faults.fail(Reader.read_into, timed_out(), where=lambda call: is_data(call.path), times=1)
        with pytest.raises(StorageError):
            manager.restore(None)
        assert once.hits == 1
        assert value_of(manager.restore(None)) == 2


def test_retention_deletes_nothing_while_metrics_cannot_be_read(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The best epoch is not taken for one without metrics; the next commit retires what this one could not."""
    directory = str(tmp_path)
    options = Options(
        max_to_keep=1, best_fn=lambda m: m["acc"], best_mode="max", keep_checkpoints_without_metrics=False
    )
    with ec.CheckpointManager(directory, options=options) as manager:
        save_all(manager, [1], metrics={"acc": 0.99})
    with ec.CheckpointManager(directory, options=options) as manager:
        with faults.fail(Store.read, timed_out(), where=lambda call: call.path == "1/epoch.json", times=1) as once:
            save_all(manager, [2], metrics={"acc": 0.1})
            assert once.hits == 1
        assert list(manager.all_steps()) == on_storage(directory) == [1, 2]
        save_all(manager, [3], metrics={"acc": 0.2})
        assert 1 in manager.all_steps()
        assert 2 not in manager.all_steps()
