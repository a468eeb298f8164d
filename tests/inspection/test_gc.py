"""What nobody looks at is removed, and nothing else: not what a live job may need, not an epoch, not behind a link."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import posix_contents
from epochckpt.directory.contents import REMOVAL_PREFIX, DiskUsage
from epochckpt.directory.epoch_directory import Rollback
from epochckpt.errors import InvalidArgumentError, NotACheckpointDirectoryError
from epochckpt.inspection import gc, scan
from epochckpt.inspection.rows import LeftoverRow
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from tests.support.killed import KilledJob
from tests.support.taps import eventually, is_record

Save = ocp.args.StandardSave
TMP = ".orbax-checkpoint-tmp"


def next_week() -> float:
    """A clock: nothing that is there now was written to for a week."""
    return time.time() + 7 * gc.DAY_SECS


def paths(rows: Any) -> list[str]:
    return [row.path for row in rows]


def below(directory: pathlib.Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two epochs, the second of them replaced by another after it was damaged; one rolled back, one deleted."""
    directory = tmp_path / "run"
    options = ocp.CheckpointManagerOptions(todelete_subdir="trash")
    with ec.CheckpointManager(directory, options=options) as manager:
        for epoch in range(1, 5):
            manager.save(epoch, args=Save({"x": np.arange(4) + epoch}))
        manager.wait_until_finished()
        manager.delete(1)
        manager.rollback_to(3)
    os.truncate(directory / "3" / "process_0" / "default.safetensors", 5)
    with ec.CheckpointManager(directory) as manager:
        manager.save(3, args=Save({"x": np.arange(4) + 3}))
    return directory


def leave(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """What killed runs leave: attempts of ours, of single nodes, of stock Orbax, and removals that were cut off."""
    home = directory / f"incarnation-{'ab' * 8}{TMP}"
    found = {
        "attempt": home / "9-2",
        "deleted": home / f"removed-{'cd' * 8}-1",
        "discarded": home / f"removed-{'ab' * 8}",
        "swept": home / f"incarnation-{'ef' * 8}{TMP}",
        "node": directory / f"node-n1-{'ab' * 8}{TMP}" / "4-1",
        "orbax": directory / f"7{TMP}-1234",
        "export": directory / f"export-{'ab' * 8}{TMP}",
        "gc": directory / f"gc-{'ab' * 8}{TMP}",
    }
    for path in found.values():
        (path / "process_0").mkdir(parents=True)
        (path / "process_0" / "default.safetensors").write_bytes(bytes(1000))
    return found


def test_what_is_dead_goes_and_nothing_else(run: pathlib.Path) -> None:
    """Attempts and what is out of sight; epochs stay, quarantined ones too, and so does a run's own folder."""
    before = below(run)
    left = leave(run)
    found = gc.collect(run, clock=next_week)
    assert paths(found.rows) == sorted(path.relative_to(run).as_posix() for path in left.values())
    assert (found.nbytes, found.directory) == (8000, str(run))
    assert {row.kind for row in found.rows} == {"attempt", "deleted", "orbax attempt"}
    kept = {row.kind: row for row in found.others}
    assert kept.keys() == {"rolled back", "quarantined"}
    assert all("only when asked for" in found.kept[row.path].reason for row in found.others)
    assert all(path.exists() for path in left.values()), "finding removes nothing"
    seen: list[LeftoverRow] = []
    removed = gc.collect(run, delete=True, clock=next_week, progress=seen.append)
    assert paths(removed.rows) == paths(seen) == paths(found.rows)
    homes = {f"incarnation-{'ab' * 8}{TMP}", f"node-n1-{'ab' * 8}{TMP}"}
    assert below(run) == before | homes, "a run may be alive, and idle: its folder stays"
    with ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [2, 3]


def test_what_was_written_to_lately_stays(run: pathlib.Path) -> None:
    """By the time of the last write, or of the last move: an old epoch that is being deleted was moved just now."""
    left = leave(run)
    before = below(run)
    found = gc.collect(run, delete=True)
    assert found.rows == ()
    assert found.kept.keys() >= {path.relative_to(run).as_posix() for path in left.values()}
    assert all("was written to it" in found.kept[path.relative_to(run).as_posix()].reason for path in left.values())
    old = left["attempt"]
    for path in (*old.rglob("*"), old):
        os.utime(path, (1.0, 1.0))
    os.rename(old, old.with_name(f"removed-{'12' * 8}-9"))
    assert gc.collect(run).rows == ()
    assert len(below(run)) == len(before)


def test_epochs_that_were_set_aside_go_when_asked_for(run: pathlib.Path) -> None:
    """Rolled back, damaged and replaced, and those in the folder that todelete_subdir names, if it is named."""
    found = gc.collect(run, epochs_too=True, clock=next_week)
    assert [(row.kind, row.epochs) for row in found.rows] == [("quarantined", (3,)), ("rolled back", (4,))]
    options = ocp.CheckpointManagerOptions(todelete_subdir="trash")
    removed = gc.collect(run, delete=True, epochs_too=True, clock=next_week, options=options)
    assert sorted(row.epochs for row in removed.rows) == [(1,), (3,), (4,)]
    assert {path.name for path in run.iterdir()} == {"2", "3"}


def test_folders_that_are_only_called_alike_are_somebody_elses(run: pathlib.Path) -> None:
    """Ours carry an id of 16 hexadecimal digits."""
    for name in ("damaged-plots", "rolled-back-notes", "damaged-2024", f"damaged-{'AB' * 8}"):
        (run / name).mkdir()
        (run / name / "file").write_text("mine")
    found = gc.collect(run, delete=True, epochs_too=True, clock=next_week)
    assert [row.epochs for row in found.rows] == [(3,), (4,)]
    assert all((run / name / "file").exists() for name in ("damaged-plots", "rolled-back-notes", "damaged-2024"))


@pytest.mark.parametrize("name", ["a" * 190, "日" * 30, os.fsdecode(b"\xff")])
def test_what_has_a_long_or_odd_name_goes(run: pathlib.Path, name: str) -> None:
    left = run / f"export-{name}-{'ab' * 8}{TMP}"
    try:
        left.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    (left / "file").write_text("half")
    removed = gc.collect(run, delete=True, clock=next_week)
    assert paths(removed.rows) == [left.name]
    assert not left.exists()


def test_a_rollback_under_way_keeps_what_it_moved(run: pathlib.Path) -> None:
    (folder,) = run.glob("rolled-back-*")
    token = folder.name.removeprefix("rolled-back-")
    for record in (Rollback(2, (3, 4), token).to_bytes(), b"not usable", None):
        if record is None:
            (run / "rollback.json").unlink()
            (run / "rollback.json").mkdir()
        else:
            (run / "rollback.json").write_bytes(record)
        found = gc.collect(run, delete=True, epochs_too=True, clock=next_week)
        assert found.kept[folder.name].reason == "a rollback is under way"
        assert (folder / "4" / "epoch.json").exists()
        found_dirs = {path.name for path in run.iterdir()}
        assert {"2", "3"} <= found_dirs


def test_an_epoch_on_the_move_stays(run: pathlib.Path) -> None:
    """A run was killed between moving an epoch away and its successor in: the next run puts it back, gc leaves it."""
    home = run / f"incarnation-{'ab' * 8}{TMP}"
    older, oldest = f"incarnation-{'cd' * 8}{TMP}", f"incarnation-{'ef' * 8}{TMP}"
    moving = f"moving-{'12' * 8}"
    for away in (home / older / f"{moving}-trash%2F9", home / oldest / older / f"{moving}-damaged-{'34' * 8}%2F8"):
        away.mkdir(parents=True)
    os.rename(run / "3", home / f"{moving}-3")
    found = gc.collect(run, delete=True, epochs_too=True, clock=next_week)
    assert not any(path.startswith(home.name) for path in paths(found.rows))
    assert sum(path.startswith(home.name) for path in found.kept) == 3
    with ec.CheckpointManager(run) as manager:
        manager.claim()
        assert manager.all_steps() == [2, 3]


def test_links_are_not_followed(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Neither one in the place of a staging folder nor one in what is removed; what is unknown stays."""
    precious = tmp_path / "precious"
    (precious / "9-1").mkdir(parents=True)
    (precious / "9-1" / "file").write_text("mine")
    (run / f"incarnation-{'12' * 8}{TMP}").symlink_to(precious)
    (run / f"8{TMP}-1").symlink_to(precious)
    save_id = run / f"incarnation-{'ab' * 8}{TMP}" / "9-2"
    save_id.mkdir(parents=True)
    (save_id / "link").symlink_to(precious)
    (save_id.parent / "my-notes").mkdir()
    (run / "17").mkdir()
    (run / "17" / "file").write_text("mine")
    removed = gc.collect(run, delete=True, epochs_too=True, clock=next_week)
    assert save_id.relative_to(run).as_posix() in paths(removed.rows)
    assert not save_id.exists()
    assert (precious / "9-1" / "file").read_text() == "mine"
    assert (save_id.parent / "my-notes").exists()
    assert (run / "17" / "file").read_text() == "mine"


def test_what_is_written_to_while_it_is_removed_goes_back(run: pathlib.Path, faults: Faults) -> None:
    """Out of sight it is looked at once more; it is there again, whole, and the reason is told."""
    left = leave(run)

    def race(call: StoreCall) -> None:
        (run / call.path / "process_0" / "node.json").write_text("{}")

    faults.before(Store.rename, race, where=lambda call: call.path.endswith("/9-2"))
    found = gc.collect(run, delete=True, clock=next_week)
    path = left["attempt"].relative_to(run).as_posix()
    assert found.kept[path].reason == "something was written to it just now"
    assert below(left["attempt"]) == {"process_0", "process_0/default.safetensors", "process_0/node.json"}
    assert len(found.rows) == len(left) - 1
    assert not list(run.glob("gc-*"))


@pytest.mark.parametrize("secs", [0, -1, 600.0, float("nan"), float("inf"), True, "86400"])
def test_an_age_that_a_save_may_reach_is_refused(run: pathlib.Path, secs: Any) -> None:
    """A job that is saving may be silent for its save timeout."""
    with pytest.raises(InvalidArgumentError, match="save_timeout_secs"):
        gc.collect(run, older_than_secs=secs)
    with pytest.raises(InvalidArgumentError, match="7200"):
        gc.collect(run, older_than_secs=3600.0, storage=ec.StorageOptions(save_timeout_secs=7200.0))


def test_a_clock_that_is_ahead_of_the_storage_makes_nothing_old(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts for a removal is the clock of the storage, which dates a folder that is made there now."""
    leave(run)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7 * gc.DAY_SECS)
    assert gc.collect(run, delete=True, clock=time.time).rows == ()


def test_a_directory_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotACheckpointDirectoryError, match="is empty"):
        gc.collect(tmp_path, delete=True)


# -- real jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("write", 25), ("delete", 3)])
def test_what_a_killed_job_left_is_removed(tmp_path: pathlib.Path, kind: str, count: int) -> None:
    """SIGKILL within a save, or within a delete: once it is old all of it goes; the next run loses nothing."""
    job = KilledJob(tmp_path)
    job.kill({"processes": 1, "kind": kind, "count": count, "how": "after", "victim": 0, "delay_ms": 0})
    (home,) = job.directory.glob("incarnation-*")
    assert list(home.iterdir()), "it was killed in the middle"
    committed = [row for row in scan.look(job.directory).epochs if row.state == "committed"]
    assert gc.collect(job.directory, delete=True).rows == (), "it was alive just now"
    removed = gc.collect(job.directory, delete=True, clock=next_week)
    assert removed.rows
    assert [path.name for path in home.iterdir()] == ["owner.json"]
    assert [row for row in scan.look(job.directory).epochs if row.state == "committed"] == committed
    assert job.run(processes=1, epochs=4) == [0]
    assert job.violations() == []


def aged(monkeypatch: pytest.MonkeyPatch, is_old: Callable[[str], bool]) -> None:
    """Lets what was left by a dead job look a week old: the time of the last change of an inode cannot be set."""
    extent = posix_contents.extent

    def older(store: Store, path: str) -> DiskUsage | None:
        found = extent(store, path)
        if found is not None and is_old(path):
            found.newest_ns, found.moved_ns = 1, 1
        return found

    monkeypatch.setattr(posix_contents, "extent", older)


@pytest.mark.slow
def test_a_job_that_is_saving_loses_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gc over and over beside saves, replacements and deletions: what is dead goes, every save commits."""
    directory = tmp_path / "run"
    dead = re.compile(r"[/-]\d+-77\d+\Z")
    aged(monkeypatch, lambda path: dead.search(path) is not None or path.startswith(REMOVAL_PREFIX))
    failures: list[BaseException] = []
    removed: list[str] = []
    done = threading.Event()

    def collect() -> None:
        try:
            while not done.is_set():
                removed.extend(paths(gc.collect(directory, delete=True, epochs_too=True).rows))
        except BaseException as error:
            failures.append(error)

    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ec.CheckpointManager(directory, options=options, node=["a", "b"]) as manager:
        manager.save(0, args=Save({"x": np.zeros(1)}))
        manager.wait_until_finished()
        thread = threading.Thread(target=collect)
        thread.start()
        (home,) = directory.glob("incarnation-*")
        try:
            for epoch in range(1, 30):
                if epoch % 5 == 0:
                    copy = shutil.copytree(directory / str(epoch - 1), tmp_path / f"copy{epoch}", symlinks=True)
                    os.rename(copy, home / f"{epoch}-77{epoch}")
                if epoch % 15 == 0:
                    manager.allow_overwrite(epoch - 1)
                    manager.save(epoch - 1, args=Save({"x": np.arange(2000) + epoch - 1}))
                manager.save(epoch, args=Save({"x": np.arange(2000) + epoch}))
                manager.wait_until_finished()
            manager.rollback_to(28)
            assert eventually(lambda: bool(removed or failures))
        finally:
            done.set()
            thread.join(60)
        assert failures == []
        assert manager.all_steps() == [27, 28]
        for epoch in (27, 28):
            assert manager.verify(epoch).ok
            np.testing.assert_array_equal(manager.restore(epoch)["x"], np.arange(2000) + epoch)
    assert removed
    assert all(dead.search(path) for path in removed)
    gc.collect(directory, delete=True)
    assert not any(dead.search(path) for path in below(directory))


# -- object stores ---------------------------------------------------------------------------------------------------


def left_in(directory: str, epoch: int) -> None:
    """A run whose save is cut off when all nodes have written, and cannot be given up."""
    killed = OSError(errno.EIO, "killed")
    with Faults().everywhere() as faults:

        def die(call: StoreCall) -> None:
            faults.fail(Store.replace, killed)
            raise killed

        faults.before(Store.create, die, where=lambda call: is_record(call.path))
        manager = ec.CheckpointManager(directory, node=["a", "b"])
        manager.save(epoch, args=Save({"x": np.arange(4) + epoch}))
        with pytest.raises(ec.errors.SaveError):
            manager.wait_until_finished()
    manager.close()


def test_on_an_object_store_what_nobody_commits_any_more_is_removed(faults: Faults) -> None:
    """Attempts, be they dead or begun long ago, and what a dead run wrote after it was swept; not what is not ours,
    nor the data of an epoch that was rolled back or replaced, unless that is asked for."""
    directory = f"memory://{uuid.uuid4().hex}/"

    def is_left(call: StoreCall) -> bool:
        return call.path.startswith(("5/", "6/"))

    faults.fail(Store.remove_all, OSError(errno.EIO, "killed"), where=is_left)  # a claim would remove that by itself
    with ec.CheckpointManager(directory, node=["a", "b"]) as manager:
        for epoch in (1, 2, 3):
            manager.save(epoch, args=Save({"x": np.arange(4) + epoch}))
        manager.wait_until_finished()
        manager.rollback_to(2)
        incarnation = manager.components.directory.job_directory.incarnation
    left_in(directory, 5)
    left_in(directory, 6)
    faults.clear()
    store = open_store(directory)
    store.create(f"2/a/{incarnation}-2-7/late", b"x")
    store.create("2/a/00ab00ab00ab00ab-2-1/node.json", b"{}")  # of no run that was here
    assert gc.collect(directory).rows == ()  # all of it is too fresh
    assert {path.partition("/")[0] for path in gc.collect(directory).kept} == {"2", "5", "6", aside_in(store)}
    found = gc.collect(directory, clock=next_week)
    assert [row.path.partition("/")[0] for row in found.rows] == ["2", "5", "6"]
    assert list(found.kept) == ["2/a/00ab00ab00ab00ab-2-1/node.json", aside_in(store)]
    manager = ec.CheckpointManager(directory, node=["a", "b"])
    manager.save(7, args=Save({"x": np.arange(4) + 7}))
    manager.wait_until_finished()
    removed = gc.collect(directory, delete=True, clock=next_week)  # beside a run
    assert paths(removed.rows)[0] == f"2/{incarnation}-2-7"
    assert not any(store.exists(path) for path in ("5", "6", f"2/a/{incarnation}-2-7"))
    assert all(store.exists(path) for path in ("3/a", "2/a/00ab00ab00ab00ab-2-1"))
    manager.save(8, args=Save({"x": np.arange(4) + 8}))
    manager.close()
    removed = gc.collect(directory, delete=True, epochs_too=True, clock=next_week)
    assert [row.epochs for row in removed.rows] == [(3,)]
    assert not store.exists("3")
    with ec.CheckpointManager(directory, node=["a", "b"]) as manager:
        assert manager.all_steps() == [1, 2, 7, 8]
        for epoch in manager.all_steps():
            np.testing.assert_array_equal(manager.restore(epoch)["x"], np.arange(4) + epoch)


@pytest.mark.parametrize("name", ["epoch.json", "_metrics-evaluator.json"])
def test_a_small_copy_that_was_written_late_is_removed(name: str) -> None:
    """On an object store these carry no mark of the attempt, and come after the commit: its writer may be late."""
    directory = f"memory://{uuid.uuid4().hex}/"
    store = open_store(directory)
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save({"x": np.arange(4)}))
        manager.wait_until_finished()
        ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator")
        late = store.read(f"1/{name}", limit_bytes=2**20)
        manager.delete(1)
    assert not store.exists("1")
    store.create(f"1/{name}", late)
    store.create("9/epoch.json", b"{}")  # somebody's
    removed = gc.collect(directory, delete=True, clock=next_week)
    assert [row.path.partition("/")[0] for row in removed.rows] == ["1"]
    assert "9" in removed.kept
    assert not store.exists("1")
    assert store.exists("9")


def test_the_metrics_of_an_epoch_go_with_it_where_its_small_copy_is_missing() -> None:
    """A run that is killed right after the commit leaves no `epoch.json` beside the record."""
    directory = f"memory://{uuid.uuid4().hex}/"
    store = open_store(directory)
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save({"x": np.arange(4)}))
        manager.wait_until_finished()
        store.remove("1/epoch.json")
        ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator")
        manager.delete(1)
    assert not store.exists("1")


def test_an_attempt_that_gc_takes_for_dead_is_never_committed(faults: Faults) -> None:
    """On an object store: a save that wakes up after it finds that out at its commit; the next one succeeds."""
    directory = f"memory://{uuid.uuid4().hex}/"
    removed: list[LeftoverRow] = []

    def collect(call: StoreCall) -> None:
        if not removed:
            removed.extend(gc.collect(directory, delete=True, clock=next_week).rows)

    faults.before(Store.create, collect, where=lambda call: is_record(call.path))
    with ec.CheckpointManager(directory) as manager:
        manager.save(1, args=Save({"x": np.arange(4)}))
        with pytest.raises(ec.errors.SaveError, match="given up"):
            manager.wait_until_finished()
        assert len(removed) == 1
        assert manager.save(1, args=Save({"x": np.arange(4)}))
        manager.wait_until_finished()
        np.testing.assert_array_equal(manager.restore(1)["x"], np.arange(4))


def aside_in(store: Store) -> str:
    (name,) = [entry.name for entry in store.list("") if entry.name.startswith("rolled-back-")]
    return name


def test_epochs_in_a_todelete_folder_of_an_object_store_keep_their_data() -> None:
    """Only their record is there; a later run that sweeps, and gc, leave the objects that it names."""
    directory = f"memory://{uuid.uuid4().hex}/"
    options = ocp.CheckpointManagerOptions(todelete_subdir="trash")
    for _ in range(2):
        with ec.CheckpointManager(directory, options=options) as manager:
            manager.claim()  # and sweeps
            if not manager.all_steps():
                manager.save(1, args=Save({"x": np.arange(4)}))
                manager.save(2, args=Save({"x": np.arange(4)}))
                manager.wait_until_finished()
                manager.delete(1)
    gc.collect(directory, delete=True)
    store = open_store(directory)
    assert store.exists("trash/1/epoch.json")
    (save_id,) = [entry.name for entry in store.list("1/process_0")]
    assert store.exists(f"1/default/process_0/{save_id}/default.safetensors")
    removed = gc.collect(directory, delete=True, options=options, epochs_too=True, clock=next_week)
    assert paths(removed.rows) == ["trash"]
    assert not store.exists("1")
    assert not store.exists("trash")


def test_the_names_are_those_that_commits_give(tmp_path: pathlib.Path, faults: Faults) -> None:
    """A save that fails and whose remains cannot be removed, and a deletion that is cut off: both are found."""
    faults.instead(Store.remove_tree, lambda call: None)

    def is_third(call: StoreCall) -> bool:
        return re.search(r"/3-\d+/epoch\.json\Z", call.path) is not None

    faults.fail(Store.create, OSError(errno.EIO, "no"), where=is_third)
    manager = ec.CheckpointManager(tmp_path / "run")
    for epoch in (1, 2):
        manager.save(epoch, args=Save({"x": np.zeros(1)}))
    manager.wait_until_finished()
    manager.delete(1)
    manager.save(3, args=Save({"x": np.zeros(1)}))
    with pytest.raises(ec.errors.SaveError):
        manager.wait_until_finished()
    faults.clear()
    details = {row.detail.partition(",")[0]: row for row in gc.collect(tmp_path / "run", clock=next_week).rows}
    assert details.keys() == {"a deleted or replaced epoch", "a failed save"}
    assert details["a deleted or replaced epoch"].epochs == (1,)
    assert len(gc.collect(tmp_path / "run", delete=True, clock=next_week).rows) == 2
    manager.save(4, args=Save({"x": np.zeros(1)}))
    manager.close()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"2", "4"}


def test_an_epoch_is_not_deleted_where_its_place_in_the_todelete_folder_is_taken() -> None:
    """On an object store as on a file system: nothing names its data any more if its record cannot be kept."""
    directory = f"memory://{uuid.uuid4().hex}/"
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(todelete_subdir="trash")) as manager:
        for start in (0, 100):
            manager.save(1, args=Save({"x": np.arange(4) + start}), force=True)
            manager.wait_until_finished()
            if not start:
                manager.delete(1)
        with pytest.raises(ec.errors.EpochExistsError, match="trash/1 exists already"):
            manager.delete(1)
        np.testing.assert_array_equal(manager.restore(1)["x"], np.arange(4) + 100)
