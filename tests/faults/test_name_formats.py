"""Epochs of several name formats in one directory: damaged ones are replaced, and rollbacks are finished."""

from __future__ import annotations

import errno
import pathlib

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import (
    UnfinishedError,
)
from epochckpt.format import paths as layout
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.small_saves import Options, Save, cut, fill, on_storage, save_all, state, value_of


def formats() -> tuple[Options, Options]:
    """Options that write `step_<n>`, and options that read both forms and write `<n>`."""
    plain, prefixed = ocp.path.step.standard_name_format(), ocp.path.step.standard_name_format(step_prefix="step")
    both = ocp.path.step.composite_name_format(plain, [plain, prefixed])
    return Options(step_name_format=prefixed), Options(step_name_format=both)


def test_a_damaged_epoch_of_another_name_format_is_replaced(tmp_path: pathlib.Path) -> None:
    """It is quarantined under its own name, and does not come back at the next open."""
    old, both = formats()
    with ec.CheckpointManager(tmp_path, options=old) as manager:
        save_all(manager, [1, 2])
        cut(manager, 2)
    with ec.CheckpointManager(tmp_path, options=both) as manager:
        assert list(manager.all_steps()) == [1]
        assert manager.save(2, args=Save(state(22)))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(2)) == 22
    assert not (tmp_path / "step_2").exists()
    assert len(list(tmp_path.glob("damaged-*/step_2/epoch.json"))) == 1
    with ec.CheckpointManager(tmp_path, options=both) as manager:
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(None)) == 22


def test_a_rollback_over_epochs_of_another_name_format_is_finished_by_the_next_claim(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """Interrupted before the first epoch moved: readers obey it at once, the next claim moves them."""
    old, both = formats()
    fill(str(tmp_path), 1, 2, 3, options=old)
    manager = ec.CheckpointManager(tmp_path, options=both)
    killed = faults.fail(Store.rename, OSError(errno.EIO, "killed"), where=lambda call: call.path.startswith("step_"))
    with killed, pytest.raises(UnfinishedError, match="killed"):
        manager.rollback_to(1)
    assert killed.hits == 1
    assert (tmp_path / "step_3").exists()
    assert on_storage(str(tmp_path), both) == [1]
    with ec.CheckpointManager(tmp_path, options=both) as manager:
        assert list(manager.all_steps()) == [1]
        manager.claim()
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_1"]
    assert sorted(p.parent.name for p in tmp_path.glob("rolled-back-*/*/epoch.json")) == ["step_2", "step_3"]
    assert not (tmp_path / layout.ROLLBACK_RECORD).exists()
