"""An older and a newer run on one directory: what the newer one has committed or found stays as it is."""

from __future__ import annotations

import pytest

import epochckpt as ec
from epochckpt.errors import (
    FencedError,
)
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.other_processes import as_another_process
from tests.support.small_saves import Save, cut, new_memory, save_all, state, value_of


def begins(call: StoreCall) -> bool:
    """Whether a change of the head begins a save."""
    return call.path == paths.HEAD and b'"begun":{"' in bytes(call.content or b"")


def commits(call: StoreCall) -> bool:
    """Whether a change of the head ends the save that has begun."""
    return call.path == paths.HEAD and not begins(call)


@pytest.mark.parametrize("late", [False, True])
def test_an_older_run_never_replaces_what_a_newer_one_committed(late: bool, faults: Faults) -> None:
    """It was to replace a damaged epoch; by now there is a sound one of the same number, which stays."""
    url = new_memory()
    with ec.CheckpointManager(url) as manager:
        save_all(manager, [1, 2])
        cut(manager, 2)
    older = ec.CheckpointManager(url)
    assert value_of(older.restore(None)) == 1
    assert list(older.all_steps()) == [1]
    older.claim()

    def save_newer(call: StoreCall) -> None:
        step.remove()
        with as_another_process():
            newer = ec.CheckpointManager(url)
        assert value_of(newer.restore(None)) == 1
        assert newer.save(2, args=Save(state(222)))
        newer.wait_until_finished()

    step = faults.before(Store.replace, save_newer, where=commits if late else begins)
    assert older.save(2, args=Save(state(22)))
    with pytest.raises(FencedError):
        older.wait_until_finished()
    assert step.hits == 1
    with ec.CheckpointManager(url) as last:
        assert list(last.all_steps()) == [1, 2]
        assert value_of(last.restore(2)) == 222


def test_an_epoch_that_a_newer_run_found_committed_keeps_its_data(faults: Faults) -> None:
    """The newer run came right after the commit, of which the answer is lost: the older one has saved, all the same."""
    url = new_memory()
    older = ec.CheckpointManager(url)
    save_all(older, [1])
    runs = list[ec.CheckpointManager]()

    def take_over(call: StoreCall) -> None:
        step.remove()
        with as_another_process():
            runs.append(ec.CheckpointManager(url))
        runs[0].claim()
        raise FileExistsError("changed, since the first request was sent")

    step = faults.after(Store.replace, take_over, where=commits)
    assert older.save(2, args=Save(state(2)))
    older.wait_until_finished()
    (newer,) = runs
    assert list(newer.all_steps()) == [1, 2]
    assert value_of(newer.restore(2)) == 2
    assert older.save(3, args=Save(state(3)))
    with pytest.raises(FencedError):
        older.wait_until_finished()
    newer.close()
