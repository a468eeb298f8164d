"""Deletions in which something fails: what is deleted is out of sight, and what cannot be kept is not deleted."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import epochckpt as ec
from epochckpt.errors import (
    InvalidArgumentError,
    RemovalError,
    RetentionError,
)
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.small_saves import Options, on_storage, save_all, value_of


def test_a_deleted_epoch_is_gone_even_if_its_bytes_stay(
    directory: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """The name goes first; that removing the bytes failed is logged, and raised once by the next wait."""
    manager = ec.CheckpointManager(directory)
    save_all(manager, [1, 2])
    method = Store.remove_tree if manager.components.directory.store.atomic_folder_rename else Store.remove_all
    with faults.fail(method, OSError(errno.EBUSY, "busy, says the server"), times=1) as once:
        manager.delete(2)
        assert list(manager.all_steps()) == on_storage(directory) == [1]
        with pytest.raises(RemovalError, match=r"checkpoint 2 is deleted.*busy, says the server"):
            manager.wait_until_finished()
    assert once.hits == 1
    assert "busy, says the server" in caplog.text
    assert value_of(manager.restore(None)) == 1
    save_all(manager, [2])
    assert list(manager.all_steps()) == [1, 2]
    manager.close()


@pytest.mark.parametrize("broken", [Store.make_folder, Store.rename])
def test_an_epoch_that_cannot_be_kept_elsewhere_is_not_deleted(
    tmp_path: pathlib.Path, faults: Faults, broken: Callable[..., Any]
) -> None:
    """With todelete_subdir nothing is ever removed: what cannot be moved there stays where it is."""
    options = Options(max_to_keep=1, todelete_subdir="old")
    manager = ec.CheckpointManager(tmp_path, options=options)
    save_all(manager, [1])
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    once = faults.fail(
        broken, no_space, where=lambda call: call.paths[-1] == "old/1" or "/removed-" in call.path, times=1
    )
    with pytest.raises(RetentionError, match=r"checkpoint 1, .*No space left on device"):
        save_all(manager, [2])
    assert once.hits == 1
    assert list(manager.all_steps()) == [1, 2]
    manager.close()
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(1)) == 1


TAKEN = ["7", "metadata", "rollback.json", "damaged-0", "rolled-back-0", "x.orbax-checkpoint-tmp"]


@pytest.mark.parametrize("folder", ["old/epochs", "../trash", "..", ".", "/tmp/trash", "", "a\nb", "x" * 256, *TAKEN])
def test_a_todelete_subdir_that_is_no_folder_of_its_own_is_refused(tmp_path: pathlib.Path, folder: str) -> None:
    """At construction, before anything is written."""
    with pytest.raises(InvalidArgumentError, match="todelete_subdir"):
        ec.CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1, todelete_subdir=folder))
    assert not (tmp_path / "run").exists()
