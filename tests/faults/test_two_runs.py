"""An older and a newer run on one directory: what the newer one has committed or found stays as it is."""

from __future__ import annotations

import pytest

import epochckpt as ec
from epochckpt.directory import head_turns
from epochckpt.errors import (
    FencedError,
)
from tests.support.small_saves import Save, cut, new_memory, save_all, state, value_of


@pytest.mark.parametrize("late", [False, True])
def test_an_older_run_never_replaces_what_a_newer_one_committed(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was to replace a damaged epoch; by now there is a sound one of the same number, which stays."""
    url = new_memory()
    with ec.CheckpointManager(url) as manager:
        save_all(manager, [1, 2])
        cut(manager, 2)
    monkeypatch.setattr(head_turns, "of", lambda store: head_turns.Turns())  # as in processes of their own
    older = ec.CheckpointManager(url)
    assert value_of(older.restore(None)) == 1
    assert list(older.all_steps()) == [1]
    older.claim()
    write, begun = older.components.directory.store.replace, b'"begun":{"'

    def replace(path: str, old: bytes, new: bytes, **how: bool) -> None:
        if (begun in old) is late and (begun in new) is not late:  # the beginning, or the commit
            monkeypatch.undo()
            newer = ec.CheckpointManager(url)
            assert value_of(newer.restore(None)) == 1
            assert newer.save(2, args=Save(state(222)))
            newer.wait_until_finished()
        write(path, old, new, **how)

    monkeypatch.setattr(older.components.directory.store, "replace", replace)
    assert older.save(2, args=Save(state(22)))
    with pytest.raises(FencedError):
        older.wait_until_finished()
    with ec.CheckpointManager(url) as last:
        assert list(last.all_steps()) == [1, 2]
        assert value_of(last.restore(2)) == 222


def test_an_epoch_that_a_newer_run_found_committed_keeps_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer run came right after the commit, of which the answer is lost: the older one has saved, all the same."""
    monkeypatch.setattr(head_turns, "of", lambda store: head_turns.Turns())  # as in processes of their own
    url = new_memory()
    older = ec.CheckpointManager(url)
    save_all(older, [1])
    write, runs = older.components.directory.store.replace, list[ec.CheckpointManager]()

    def replace(path: str, old: bytes, new: bytes, **how: bool) -> None:
        write(path, old, new, **how)
        if b'"begun":{"' in old and not runs:
            runs.append(ec.CheckpointManager(url))
            runs[0].claim()
            raise FileExistsError("changed, since the first request was sent")

    monkeypatch.setattr(older.components.directory.store, "replace", replace)
    assert older.save(2, args=Save(state(2)))
    older.wait_until_finished()
    (newer,) = runs
    assert list(newer.all_steps()) == [1, 2]
    assert value_of(newer.restore(2)) == 2
    assert older.save(3, args=Save(state(3)))
    with pytest.raises(FencedError):
        older.wait_until_finished()
    newer.close()
