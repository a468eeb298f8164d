"""What a directory takes up on storage: every file once, under what it belongs to."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.inspection import text, views
from epochckpt.inspection.rows import (
    ABANDONED,
    COMMITTED,
    DELETED,
    FOREIGN,
    IN_PROGRESS,
    OTHER,
    QUARANTINED,
    ROLLED_BACK,
    Usage,
)

Save = ocp.args.StandardSave
TMP = ".orbax-checkpoint-tmp"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """Epochs 1 to 3, one that was rolled back, one that was deleted and kept."""
    directory = tmp_path / "run"
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(todelete_subdir="trash")) as manager:
        for epoch in range(5):
            manager.save(epoch, args=Save({"x": np.arange(1000) + epoch}))
        manager.wait_until_finished()
        manager.delete(0)
        manager.rollback_to(3)
    return directory


def measured(directory: pathlib.Path) -> Usage:
    return ec.inspect(directory, options=ocp.CheckpointManagerOptions(todelete_subdir="trash")).du().usage


def on_disk(directory: pathlib.Path) -> tuple[int, int]:
    """Bytes and files by the operating system, each inode once."""
    found = {}
    for folder, folders, names in os.walk(directory):
        for path in (os.path.join(folder, name) for name in (*folders, *names)):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                found[status.st_dev, status.st_ino] = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return sum(found.values()), len(found)


def test_every_file_counts_once_and_for_what_it_belongs_to(run: pathlib.Path) -> None:
    """Epochs with their view for stock Orbax, saves alive and dead, what is out of sight, and what is not ours."""
    home = run / f"incarnation-{'ab' * 8}{TMP}"
    for name in ("9-1", "8-1", f"removed-{'cd' * 8}-1"):
        (home / name / "process_0").mkdir(parents=True)
        (home / name / "process_0" / "default.safetensors").write_bytes(bytes(1000))
    os.utime(home / "8-1" / "process_0" / "default.safetensors", (1.0, 1.0))
    (home / "owner.json").write_text("{}")
    (run / "17").mkdir()
    (run / "17" / "mine").write_bytes(bytes(70))
    (run / "notes.txt").write_bytes(bytes(30))
    found = measured(run)
    assert (found.nbytes, found.files) == on_disk(run)
    assert found.problems == {}
    rows = {(row.kind, *row.epochs): row for row in found.rows if row.kind not in (OTHER, DELETED)}
    assert rows.keys() == {
        *((COMMITTED, epoch) for epoch in (1, 2, 3)),
        (ROLLED_BACK, 4),
        (QUARANTINED, 0),
        (IN_PROGRESS, 9),
        (ABANDONED, 8),
        (FOREIGN, 17),
    }
    assert rows[COMMITTED, 1].files == on_disk(run / "1")[1]
    assert rows[COMMITTED, 1].nbytes == on_disk(run / "1")[0]
    assert (rows[ABANDONED, 8].oldest_ns, rows[ABANDONED, 8].nbytes) == (10**9, 1000)
    kinds = {each.kind: each for each in found.kinds}
    assert (kinds[COMMITTED].things, kinds[COMMITTED].nbytes) == (3, sum(on_disk(run / str(e))[0] for e in (1, 2, 3)))
    assert kinds[DELETED].nbytes == 1000
    assert {row.path for row in found.rows if row.kind == OTHER} >= {"notes.txt", home.name}
    shown = ec.inspect(run).du()
    assert "rolled back" in repr(shown)
    assert "<table" in shown.to_html()
    assert len(shown) == len(shown.to_json()["rows"])  # type: ignore[arg-type, call-overload, index]


def test_hard_links_count_once_and_symlinks_are_not_followed(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An epoch that was copied by links takes up only its own records."""
    shutil.copytree(run / "3", run / "5", symlinks=True, copy_function=os.link)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(bytes(10**6))
    (run / "linked").symlink_to(outside)
    found = measured(run)
    assert (found.nbytes, found.files) == on_disk(run)
    (copy,) = [row for row in found.rows if row.path == "5"]
    assert copy.nbytes == 0
    assert copy.files == sum(path.is_symlink() for path in (run / "5").rglob("*"))


def test_the_folder_of_one_epoch_is_measured_alone(run: pathlib.Path) -> None:
    found = ec.inspect(run / "2").du().usage
    assert [(row.kind, row.epochs) for row in found.rows] == [(COMMITTED, (2,))]
    assert (found.nbytes, found.files) == on_disk(run / "2")


def test_what_cannot_be_looked_into_is_said(run: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is measured."""
    scandir = os.scandir

    def refused(path: str) -> object:
        if str(path).endswith("1/process_0"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    whole = measured(run)
    monkeypatch.setattr(os, "scandir", refused)
    found = measured(run)
    assert "Permission denied" in found.problems["1/process_0"]
    assert 0 < found.nbytes < whole.nbytes


def test_many_epochs_are_folded_in_a_terminal(run: pathlib.Path) -> None:
    """The newest are listed, the others summed up."""
    said = text.to_text(text.render(views.usage(measured(run), 1, hint="; more")), 100)
    assert "… 2 older epochs are not shown" in said
    assert "; more" in said
