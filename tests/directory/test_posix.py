"""The directory of a file system: whom it belongs to, what a claim notes, and what a failed rename says."""

from __future__ import annotations

import errno
import functools
import json
import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.directory.contents import Kind
from epochckpt.directory.epoch_directory import Rollback
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store, opening_through
from epochckpt.testing import Faults, FaultyStore


def opened(root: pathlib.Path) -> EpochDirectory:
    return directory_of(open_store(root), StepNames.of(ocp.CheckpointManagerOptions()))


def save(root: pathlib.Path, *epochs: int) -> None:
    with ec.CheckpointManager(root) as manager:
        for epoch in epochs:
            assert manager.save(epoch, args=ocp.args.StandardSave({"w": np.zeros(4)}), metrics={"loss": float(epoch)})
        manager.wait_until_finished()


@pytest.mark.parametrize("record", [b"{", b"[" * 100_000, b"\xff"], ids=["torn", "nested", "no text"])
def test_a_run_whose_owner_cannot_be_read_is_one_that_may_write(tmp_path: pathlib.Path, record: bytes) -> None:
    """It counts as a run of which nothing is known, and one look does not fail because of it."""
    save(tmp_path, 1)
    directory = opened(tmp_path)
    writer = directory.claim()
    (known,) = directory.owners()
    assert known["pid"] > 0
    (tmp_path / paths.incarnation_folder(writer.incarnation) / paths.OWNER_FILE).write_bytes(record)
    assert directory.owners() == [{}]
    writer.release()
    assert directory.owners() == []


def test_the_epochs_of_a_rollback_move_newest_first(tmp_path: pathlib.Path) -> None:
    """After each of the moves, what is left is a run without its last epochs."""
    save(tmp_path, 1, 2, 3, 4)
    store = FaultyStore(open_store(tmp_path))
    directory = directory_of(store, StepNames.of(ocp.CheckpointManagerOptions()))
    writer = directory.claim()
    moved = list[str]()
    store.faults.before(Store.rename, lambda call: moved.append(call.path))
    writer.roll_back(Rollback(to=1, epochs=(2, 3, 4), id=paths.new_id()))
    assert [name for name in moved if name.isdecimal()] == ["4", "3", "2"]
    assert directory.list_epochs() == [1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_claim_of_a_directory_from_which_all_epochs_were_removed_begins_the_run_anew(
    tmp_path: pathlib.Path, first: int
) -> None:
    """From the beginning: of the epochs that were deleted before none is part of the curves."""
    root = tmp_path / "run"
    save(root, first)
    with ec.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        assert manager.save(first + 1, args=ocp.args.StandardSave({"w": np.zeros(4)}), metrics={"loss": 0.0})
    assert sorted(opened(root).deleted()) == [first]
    (root / str(first + 1)).rename(tmp_path / "away")
    opened(root).claim().release()
    assert opened(root).deleted() == {}


@pytest.mark.parametrize(("code", "is_said"), [(errno.EXDEV, True), (errno.EIO, False)])
def test_a_commit_that_no_rename_can_make_says_what_makes_room(
    tmp_path: pathlib.Path, code: int, is_said: bool
) -> None:
    """As where an overlay file system has the older epoch in a lower layer."""
    faults = Faults()
    faults.fail(Store.rename, OSError(code, "no"), where=lambda call: call.paths[-1] == "3")
    failing = functools.partial(FaultyStore, faults=faults)
    with opening_through(failing), pytest.raises(errors.SaveError, match="renaming it into place") as caught:
        save(tmp_path, 3)
    assert ("delete(3) makes room" in str(caught.value)) is is_said
    assert caught.value.epoch == 3


def test_an_epoch_of_which_nothing_can_be_read_is_never_taken_for_garbage(tmp_path: pathlib.Path) -> None:
    """The folder is there or not: where storage does not even say that, it counts as an epoch."""
    save(tmp_path, 1)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "file").write_bytes(b"x")
    store = FaultyStore(open_store(tmp_path))
    directory = directory_of(store, StepNames.of(ocp.CheckpointManagerOptions()))

    def kind_of_2() -> Kind:
        (found,) = [group.kind for group in directory.contents().all_files().groups if group.epochs == (2,)]
        return found

    assert kind_of_2() is Kind.NOT_AN_EPOCH
    with store.faults.fail(Store.list, OSError(errno.EIO, "no"), where=lambda call: call.path == "2"):
        assert kind_of_2() is Kind.EPOCH
        with store.faults.fail(Store.exists, OSError(errno.EIO, "no"), where=lambda call: call.path == "2"):
            assert kind_of_2() is Kind.EPOCH
        store.faults.instead(Store.exists, lambda call: False, where=lambda call: call.path == "2")
        assert kind_of_2() is Kind.NOT_AN_EPOCH, "it is gone by now"


def test_a_small_record_is_replaced_whole(tmp_path: pathlib.Path) -> None:
    """And a run that was fenced off, whose drafts have no folder any more, replaces none."""
    writer = opened(tmp_path).claim()
    writer.overwrite(paths.MIRROR_RECORD, json.dumps({"a": 1}).encode())
    writer.overwrite(paths.MIRROR_RECORD, json.dumps({"a": 2}).encode())
    opened(tmp_path).claim()
    with pytest.raises(errors.FencedError) as caught:
        writer.overwrite(paths.MIRROR_RECORD, b"{}")
    assert caught.value.epoch == 0
    assert json.loads((tmp_path / paths.MIRROR_RECORD).read_bytes()) == {"a": 2}


def test_an_epoch_is_there_only_as_the_save_that_it_is_of(tmp_path: pathlib.Path) -> None:
    """Ids have no order: another save of the number is another epoch."""
    save(tmp_path, 1)
    directory = opened(tmp_path)
    save_id = directory.read_save_id(1)
    assert save_id is not None
    error = OSError("the rename")
    assert directory.is_there(1, save_id, error)
    for other in ("0", "z", save_id + "0", save_id[:-1]):
        assert not directory.is_there(1, other, error)
    assert not directory.is_there(2, save_id, error)
