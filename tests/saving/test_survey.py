"""What a look at a directory makes of epochs that were found damaged, or that only a newer epochckpt can read."""

from __future__ import annotations

import json
import pathlib

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.format import checksums, paths
from epochckpt.orbax import StepNames
from epochckpt.saving.survey import survey
from epochckpt.storage import open_store
from tests.support.claim_jobs import args

OPTIONS = ocp.CheckpointManagerOptions()


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> EpochDirectory:
    """Of the epochs 1, 2 and 3."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in (1, 2, 3):
            assert manager.save(epoch, args=args(epoch))
    return directory_of(open_store(tmp_path), StepNames.of(OPTIONS))


def make_newer(directory: EpochDirectory, epoch: int) -> None:
    """Has an epoch be one that only a newer epochckpt can read."""
    path = pathlib.Path(directory.store.root, str(epoch), paths.EPOCH_RECORD)
    record = json.loads(path.read_bytes())
    del record["checksum"]
    path.write_bytes(checksums.seal({**record, "version": paths.VERSION + 1}))


def test_an_epoch_stays_damaged_while_the_same_save_is_there(directory: EpochDirectory) -> None:
    """Another save of the number is looked at anew."""
    known = ReplaceCondition(directory.read_save_id(2), "a file is missing")
    found = survey(directory, OPTIONS, {2: known, 5: ReplaceCondition("x", "gone by now")})
    assert (found.epochs, dict(found.damaged)) == ([1, 3], {2: known})
    other = survey(directory, OPTIONS, {2: ReplaceCondition("another-2-0", "a file is missing")})
    assert (other.epochs, dict(other.damaged)) == ([1, 2, 3], {})


def test_what_only_a_newer_epochckpt_can_read_is_not_known_to_be_damaged(directory: EpochDirectory) -> None:
    """It was written since by a newer one, and may not be replaced."""
    make_newer(directory, 2)
    found = survey(directory, OPTIONS, {2: ReplaceCondition(None, "its record was damaged")})
    assert (found.epochs, dict(found.damaged)) == ([1, 2, 3], {})


def test_the_newest_epoch_is_judged_and_older_ones_are_not_looked_at(directory: EpochDirectory) -> None:
    root = pathlib.Path(directory.store.root)
    for epoch in (2, 3):
        (root / str(epoch) / paths.EPOCH_RECORD).write_bytes(b"{}")
    found = survey(directory, OPTIONS)
    assert found.epochs == [1]
    assert sorted(found.damaged) == [2, 3]
    assert all(condition.save_id is None and condition.damage for condition in found.damaged.values())
