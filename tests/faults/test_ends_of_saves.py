"""How saves in flight end while something goes wrong: each ends once, and whoever waits for it learns of it."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import (
    InvalidArgumentError,
    RetentionError,
    UnsupportedError,
)
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.small_saves import (
    WAIT_SECS,
    Options,
    Save,
    bounded,
    hiding,
    on_storage,
    save_all,
    state,
    timed_out,
    value_of,
    waits_for,
)
from tests.support.taps import hold_commits, is_record


def test_reload_waits_for_saves_in_flight(directory: str, faults: Faults) -> None:
    """An epoch that is committed while storage is being looked at is never lost from the history."""
    with ec.CheckpointManager(directory) as manager:
        save_all(manager, [1])
        saving: list[bool] = []

        def look(call: StoreCall) -> None:
            saving.append(manager.is_saving_in_progress())

        hold = hold_commits(manager)
        assert manager.save(2, args=Save(state(2)))
        assert hold.reached.wait(WAIT_SECS)
        faults.before(Store.list, look, where=lambda call: call.path == "")
        faults.before(Store.read, look, where=lambda call: call.path == paths.HEAD)
        assert waits_for(hold, manager.reload) == [None]
        assert saving
        assert not any(saving)
        assert list(manager.all_steps()) == [1, 2]


def test_a_logger_that_raises_does_not_make_a_commit_a_failure(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch is committed; the logger's error is in the log."""

    class Log:
        def log_entry(self, entry: Any) -> None:
            raise RuntimeError("the logger's own disk is full")

    manager = ec.CheckpointManager(directory, logger=Log())
    save_all(manager, [1])
    assert manager.status(1).state == "committed"
    assert list(manager.all_steps()) == [1]
    manager.close()
    assert "the logger's own disk is full" in caplog.text


def test_retired_epochs_are_out_of_sight_when_waiting_ends(directory: str, faults: Faults) -> None:
    """wait_until_finished covers the deletions that follow a commit."""
    with ec.CheckpointManager(directory, options=Options(max_to_keep=1)) as manager:
        save_all(manager, [1])
        method, hides = hiding(manager, 1)
        hold = faults.hold(method, where=hides)
        assert manager.save(2, args=Save(state(2)))
        waits_for(hold, manager.wait_until_finished)
        assert list(manager.all_steps()) == on_storage(directory) == [2]


@pytest.mark.parametrize(
    "error", [timed_out(), RuntimeError("a bug"), InvalidArgumentError("no such name"), MemoryError(), KeyError("x")]
)
def test_waiting_ends_whatever_hiding_raises(directory: str, faults: Faults, error: Exception) -> None:
    """The new epoch is committed, the old one stays listed; saving goes on, and the next commit deletes it."""
    manager = ec.CheckpointManager(directory, options=Options(max_to_keep=1))
    save_all(manager, [1])
    method, hides = hiding(manager, 1)
    once = faults.fail(method, error, where=hides, times=1)
    assert manager.save(2, args=Save(state(2)))
    with pytest.raises(RetentionError, match="checkpoint 1, "):
        bounded(manager.wait_until_finished)
    assert once.hits == 1
    assert list(manager.all_steps()) == on_storage(directory) == [1, 2]
    assert manager.save(3, args=Save(state(3)))
    bounded(manager.wait_until_finished)
    assert list(manager.all_steps()) == on_storage(directory) == [3]
    bounded(manager.close)


class Panic(BaseException):
    """As a library in another language raises it: no handler of errors sees it."""


@pytest.mark.parametrize("record", ["of the node", "of the epoch"])
def test_a_save_ends_at_once_whatever_is_raised(directory: str, faults: Faults, record: str) -> None:
    def writes_it(call: StoreCall) -> bool:
        return is_record(call.path) if record == "of the epoch" else call.path.endswith(f"/{paths.NODE_RECORD}")

    with ec.CheckpointManager(directory) as manager:
        with faults.fail(Store.create, Panic("deep inside"), where=writes_it) as panic:
            assert manager.save(1, args=Save(state(1)))
            with pytest.raises(ec.errors.SaveError, match="checkpoint 1 was not committed: Panic: deep inside"):
                manager.wait_until_finished()
        assert panic.hits == 1
        assert manager.save(2, args=Save(state(2)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


def test_a_forced_older_epoch_survives_the_retention_of_its_own_commit(directory: str) -> None:
    """What was asked for by force is not deleted the moment it is there; the next commit may retire it."""
    with ec.CheckpointManager(directory, options=Options(max_to_keep=1)) as manager:
        save_all(manager, [5])
        save_all(manager, [3], force=True)
        assert 3 in manager.all_steps()
        assert value_of(manager.restore(3)) == 3
        save_all(manager, [6])
        assert list(manager.all_steps()) == on_storage(directory) == [6]


@pytest.mark.parametrize(
    "args",
    [ocp.args.Composite(a=ocp.args.ProtoSave(None)), Save({"a": object()})],
    ids=["several items", "one item"],
)
def test_a_refused_save_does_not_decide_the_form_of_the_next(directory: str, args: Any) -> None:
    """Whether a manager has one item or several is settled by the first save that is begun, not by one refused."""
    for form in (Save(state(1)), ocp.args.Composite(b=Save(state(1)))):
        with ec.CheckpointManager(f"{directory.rstrip('/')}-{type(form).__name__}") as manager:
            with pytest.raises((InvalidArgumentError, UnsupportedError)):
                manager.save(1, args=args)
            assert manager.save(1, args=form)
            manager.wait_until_finished()
            assert list(manager.all_steps()) == [1]
