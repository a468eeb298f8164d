"""`allow_overwrite`: an epoch is saved again, and at any moment the old one or the new one is there."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pathlib
import shutil
import signal
import threading
import uuid
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import (
    EpochDeletedError,
    EpochExistsError,
    EpochNotFoundError,
    FencedError,
    InvalidArgumentError,
    SaveError,
    UncertainError,
)
from epochckpt.format import paths
from epochckpt.storage import PosixStore, Store, open_store
from epochckpt.storage.object_store import ObjectStore
from epochckpt.testing import Faults, StoreCall
from tests.support.other_processes import as_another_process
from tests.support.processes import run_worker, start_processes
from tests.support.replace_jobs import args

READ_ONLY = ocp.CheckpointManagerOptions(read_only=True)
NO_EXCHANGE = io.UnsupportedOperation("no exchange here")
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


def save(manager: ec.CheckpointManager, epoch: int, value: int, **kwargs: Any) -> None:
    assert manager.save(epoch, args=args(value), **kwargs)
    manager.wait_until_finished()


def value_of(manager: ec.CheckpointManager, epoch: int) -> int:
    """What an epoch holds; the same everywhere in it."""
    got = manager.restore(epoch)
    (value,) = set(got["state"]["x"].tolist())
    assert got["note"] == {"value": value}
    assert manager.verify(epoch).ok
    return value


def replace(manager: ec.CheckpointManager, epoch: int, value: int) -> None:
    manager.allow_overwrite(epoch)
    save(manager, epoch, value)


def puts_staged_1_in_place(call: StoreCall) -> bool:
    """Whether a rename gives the staged folder of epoch 1 its name."""
    return call.target == "1" and "/1-" in call.path


def commits(call: StoreCall) -> bool:
    """Whether a change of a head ends the save that has begun."""
    return call.path == paths.HEAD and b'"begun":{"' not in bytes(call.content or b"")


@pytest.mark.parametrize("exchange", [True, False])
def test_the_next_save_takes_the_epochs_place(directory: str, exchange: bool, faults: Faults) -> None:
    """Once: it needs no `force`, though later epochs exist; nothing of the old one is left."""
    if not exchange:
        faults.fail(Store.exchange, NO_EXCHANGE)
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2, 3):
            save(manager, epoch, epoch)
        assert not manager.should_save(2)
        with pytest.raises(EpochExistsError, match="allow_overwrite"):
            manager.save(2, args=args(0), force=True)
        manager.allow_overwrite(2)
        assert manager.should_save(2)
        assert not manager.should_save(1)
        assert value_of(manager, 2) == 2
        old = manager.components.directory.epoch_directory.read_save_id(2)
        save(manager, 2, 20, metrics={"loss": 1.0})
        assert manager.all_steps() == [1, 2, 3]
        assert [value_of(manager, epoch) for epoch in (1, 2, 3)] == [1, 20, 3]
        assert manager.metrics(2) == {"loss": 1.0}
        assert not manager.should_save(2)
        with pytest.raises(EpochExistsError):
            manager.save(2, args=args(0), force=True)
        replace(manager, 2, 200)
        assert value_of(manager, 2) == 200
        if not manager.components.directory.store.atomic_folder_rename:
            assert old not in {e.name for e in manager.components.directory.store.list("2/process_0")}
    with ec.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [1, 2, 3]
        assert value_of(manager, 2) == 200
        assert manager.restore(None)["note"] == {"value": 3}
    if not directory.startswith("memory"):
        assert sorted(os.listdir(directory)) == ["1", "2", "3"]


def test_stock_orbax_reads_what_took_the_place(tmp_path: pathlib.Path) -> None:
    """The view goes with the epoch."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1, 1)
        replace(manager, 1, 10)
    with ocp.CheckpointManager(tmp_path, item_names=("state", "note")) as stock:
        wanted = ocp.args.StandardRestore({"x": np.zeros(2000, np.int64)})
        got = stock.restore(1, args=ocp.args.Composite(state=wanted, note=ocp.args.JsonRestore()))
        assert set(np.asarray(got["state"]["x"]).tolist()) == {10}
        assert got["note"] == {"value": 10}


@pytest.mark.slow
def test_a_reader_finds_the_old_or_the_new_one_at_any_moment(directory: str) -> None:
    """Read over and over while the epoch is replaced twenty times: never absent, never a mixture, never older again."""
    seen: list[int] = []
    problems: list[BaseException] = []
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        try:
            with ec.CheckpointManager(directory, options=READ_ONLY) as reader:
                last = False
                while not last:
                    last = over.is_set()  # one more read after the last exchange
                    try:
                        assert 2 in reader.all_steps(read=True)
                        seen.append(reader.restore(2)["note"]["value"])
                    except EpochDeletedError:
                        pass  # what it had begun with was replaced: it says so
                    begun.set()
        except BaseException as error:
            problems.append(error)
        finally:
            begun.set()

    with ec.CheckpointManager(directory) as manager:
        save(manager, 2, 0)
        thread = threading.Thread(target=read)
        thread.start()
        try:
            begun.wait()
            for value in range(1, 21):
                replace(manager, 2, value)
        finally:
            over.set()
            thread.join(60)
    assert problems == []
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 20)


def test_a_save_that_fails_leaves_the_old_one(directory: str, faults: Faults) -> None:
    """Before the exchange nothing has happened; the permission was for that save only."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1, 1)
        manager.allow_overwrite(1)
        with pytest.raises(InvalidArgumentError):
            manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave({"x": object()})))
        with pytest.raises(EpochExistsError):
            manager.save(1, args=args(10), force=True)
        manager.allow_overwrite(1)
        with faults.fail(Store.open_writer, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
            manager.save(1, args=args(10))
            with pytest.raises(SaveError):
                manager.wait_until_finished()
        assert value_of(manager, 1) == 1
        assert manager.all_steps() == [1]
        with pytest.raises(EpochExistsError):
            manager.save(1, args=args(10), force=True)
        replace(manager, 1, 10)
        assert value_of(manager, 1) == 10


def test_what_cannot_be_replaced_is_refused(tmp_path: pathlib.Path) -> None:
    """An epoch that is not there, one of stock Orbax, any when nothing is written."""
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(1, args=ocp.args.StandardSave({"x": np.ones(3)}))
    with (
        ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager,
        pytest.raises(InvalidArgumentError, match="read only"),
    ):
        manager.allow_overwrite(1)
    with ec.CheckpointManager(tmp_path) as manager:
        with pytest.raises(InvalidArgumentError, match="written by stock Orbax, or under another step name format"):
            manager.allow_overwrite(1)
        with pytest.raises(EpochNotFoundError, match="checkpoint 5"):
            manager.allow_overwrite(5)
        with pytest.raises(InvalidArgumentError, match="integer"):
            manager.allow_overwrite(-1)
    named = ocp.CheckpointManagerOptions(step_prefix="step")
    with ec.CheckpointManager(tmp_path / "named", options=named) as manager:
        save(manager, 1, 1)
    formats = [ocp.path.step.standard_name_format(), ocp.path.step.standard_name_format(step_prefix="step")]
    both = ocp.path.step.composite_name_format(formats[0], formats)
    options = ocp.CheckpointManagerOptions(step_name_format=both)
    with (
        ec.CheckpointManager(tmp_path / "named", options=options) as manager,
        pytest.raises(InvalidArgumentError, match=r"step_1.* another step name format"),
    ):
        manager.allow_overwrite(1)


def data_files(store: Store) -> dict[str, bytes]:
    """What all files of leaves hold, by path."""
    local = store.local_path
    if local is None:
        found = [file.path for file in store.files("")]
    else:
        found = [path.relative_to(local).as_posix() for path in pathlib.Path(local).rglob("*") if path.is_file()]
    return {path: store.read(path, limit_bytes=1 << 20) for path in found if path.endswith(paths.DATA_SUFFIX)}


def test_a_damaged_epoch_is_set_aside_when_its_number_is_saved(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record is kept for people, all its bytes stay, and the log says where; the new epoch is whole."""
    store = open_store(directory)
    with ec.CheckpointManager(directory) as manager:
        save(manager, 300, 1)
        before = data_files(store)
        save(manager, 301, 2)
    ((data, whole),) = data_files(store).items() - before.items()
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    store.put(data, damaged, draft=f"{data}.new", replace=True)
    with ec.CheckpointManager(directory) as manager:
        assert set(manager.restore(None)["state"]["x"].tolist()) == {1}
        assert manager.damaged_epochs() == [301]
        save(manager, 301, 3)
        assert (value_of(manager, 301), list(manager.all_steps())) == (3, [300, 301])
    (kept,) = (entry.name for entry in store.list("") if entry.name.startswith("damaged-"))
    assert "the damaged checkpoint 301 was " in caplog.text
    assert kept in caplog.text
    assert json.loads(store.read(f"{kept}/301/epoch.json", limit_bytes=1 << 20))["epoch"] == 301
    assert damaged in data_files(store).values()


def test_an_epoch_that_somebody_else_changed_meanwhile_stays(tmp_path: pathlib.Path) -> None:
    """Only what was there at `allow_overwrite` may be replaced; one that was deleted is simply saved."""
    with ec.CheckpointManager(tmp_path / "other") as other:
        save(other, 1, 50)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        save(manager, 1, 1)
        manager.allow_overwrite(1)
        shutil.rmtree(tmp_path / "run" / "1")
        shutil.copytree(tmp_path / "other" / "1", tmp_path / "run" / "1", symlinks=True)
        manager.save(1, args=args(10))
        with pytest.raises(SaveError, match="exists already"):
            manager.wait_until_finished()
        assert value_of(manager, 1) == 50
        manager.allow_overwrite(1)
        manager.delete(1)
        save(manager, 1, 10)
        assert value_of(manager, 1) == 10


# -- crashes ---------------------------------------------------------------------------------------------------------

KILLS = {
    "before the exchange": 1,
    "after the exchange": 100,
    "after rename 1": 1,  # no exchange here: the old one is quarantined
    "after rename 2": 100,  # and the new one is in its place
    "after rename 3": 100,
}


def kill(directory: pathlib.Path, place: str) -> None:
    program = ["-m", "tests.support.worker", "tests.support.replace_jobs:replace_and_die"]
    with start_processes([*program, f'{{"directory": "{directory}", "place": "{place}"}}'], 1) as job:
        (outcome,) = job.wait(150)
    assert outcome.returncode == -signal.SIGKILL, outcome.stdout


@pytest.mark.parametrize("place", KILLS)
def test_a_kill_leaves_the_old_or_the_new_one(tmp_path: pathlib.Path, place: str) -> None:
    """Around the exchange a reader sees it without any repair; without an exchange the next run puts it back."""
    kill(tmp_path / "run", place)
    if place != "after rename 1":
        with ec.CheckpointManager(tmp_path / "run", options=READ_ONLY) as reader:
            assert value_of(reader, 1) == KILLS[place]
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.claim()
        assert manager.all_steps() == [1, 2]
        assert [value_of(manager, epoch) for epoch in (1, 2)] == [KILLS[place], 2]
        replace(manager, 1, 1000)
        assert value_of(manager, 1) == 1000
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "2"]


def test_runs_that_are_killed_before_they_put_it_back_do_not_lose_it(tmp_path: pathlib.Path) -> None:
    """Each moves the staging of the one before into its own; the first that lives finds what is to be put back."""
    directory = str(tmp_path / "run")
    kill(tmp_path / "run", "after rename 1")
    for _ in range(2):
        program = [
            "-m",
            "tests.support.worker",
            "tests.support.replace_jobs:open_and_die",
            json.dumps({"directory": directory}),
        ]
        with start_processes(program, 1) as job:
            (outcome,) = job.wait(150)
        assert outcome.returncode == -signal.SIGKILL, outcome.stdout
    with ec.CheckpointManager(directory) as manager:
        manager.claim()
        assert [value_of(manager, epoch) for epoch in manager.all_steps()] == [1, 2]


def test_what_a_run_is_removing_is_put_back_by_nobody(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The new epoch came, the old one's removal was interrupted, the new one was deleted: it stays so."""
    kill(tmp_path / "run", "after rename 2")
    with faults.instead(Store.remove_tree, lambda call: None):  # killed before it removes anything
        interrupted = ec.CheckpointManager(tmp_path / "run")
        interrupted.delete(1)
        interrupted.components.saves.queue.drain_removals()
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.claim()
        assert manager.all_steps() == [2]


def test_without_putting_back_the_kill_is_found_out(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The kill between the two renames is a real one: without its cure the epoch is gone."""
    kill(tmp_path / "run", "after rename 1")
    cure = faults.instead(Store.rename, lambda call: None, where=lambda call: call.target == "1")
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.claim()
        assert cure.hits == 1
        assert manager.all_steps() == [2]


def test_a_new_one_that_cannot_be_made_durable_gives_way_to_the_old_one(tmp_path: pathlib.Path, faults: Faults) -> None:
    """A failed flush after the exchange: reported as uncertain, and the old one is there again."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1, 1)
        manager.allow_overwrite(1)
        with faults.fail(Store.sync_folder, BROKEN, where=lambda call: call.path == ""):
            manager.save(1, args=args(10))
            with pytest.raises(UncertainError, match="out of sight"):
                manager.wait_until_finished()
        assert value_of(manager, 1) == 1
        replace(manager, 1, 10)
        assert value_of(manager, 1) == 10
    assert sorted(os.listdir(tmp_path)) == ["1"]


def test_without_exchange_a_rename_that_fails_puts_the_old_one_back(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The staged folder cannot be moved: the save fails, the old epoch is in its place at once."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1, 1)
        manager.allow_overwrite(1)
        no_exchange = faults.fail(Store.exchange, NO_EXCHANGE)
        with no_exchange, faults.fail(Store.rename, BROKEN, where=puts_staged_1_in_place):
            manager.save(1, args=args(10))
            with pytest.raises(SaveError, match="renaming it into place failed"):
                manager.wait_until_finished()
        assert value_of(manager, 1) == 1


@pytest.mark.parametrize("call", ["exchange", "rename", "put"])
@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("happens", [False, True])
def test_what_a_call_that_reports_an_error_has_done_is_looked_up(
    tmp_path: pathlib.Path, call: str, blind: bool, happens: bool, faults: Faults
) -> None:
    """It is committed if it is there, failed if it cannot come any more, and uncertain if nothing can be read."""
    failed = threading.Event()
    method, concerned = {
        "exchange": (Store.exchange, lambda call: call.target == "1"),
        "rename": (Store.rename, puts_staged_1_in_place),
        "put": (Store.replace, lambda call: commits(call) and not failed.is_set()),
    }[call]

    def fail(call: StoreCall) -> None:
        failed.set()
        raise BROKEN

    with ec.CheckpointManager(f"memory://{uuid.uuid4().hex}/" if call == "put" else tmp_path) as manager:
        save(manager, 1, 1)
        manager.allow_overwrite(1)
        with contextlib.ExitStack() as stack:
            stack.enter_context(faults.fail(Store.read, BROKEN, where=lambda call: blind and failed.is_set()))
            if call == "rename":
                stack.enter_context(faults.fail(Store.exchange, NO_EXCHANGE))
            stack.enter_context((faults.after if happens else faults.before)(method, fail, where=concerned))
            manager.save(1, args=args(10))
            # On an object store the attempt can be taken back without a look, unless the head has changed.
            uncertain = blind and (happens or call != "put")
            error: type[SaveError] | None = UncertainError if uncertain else None if happens else SaveError
            with pytest.raises(error) if error else contextlib.nullcontext() as caught:
                manager.wait_until_finished()
        if caught is not None:
            assert ("not committed" in str(caught.value)) is not uncertain
        manager.reload()
        assert value_of(manager, 1) == (10 if happens else 1)
        replace(manager, 1, 100)
        assert value_of(manager, 1) == 100
    if call != "put":
        assert sorted(os.listdir(tmp_path)) == ["1"]


def test_an_exchanged_epoch_is_committed_wherever_the_old_one_is(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The old one cannot be moved on to where it is removed: the new one is in its place all the same."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1, 1)
        with faults.fail(Store.rename, BROKEN, where=lambda call: "/removed-" in call.target) as failed:
            replace(manager, 1, 10)
        assert failed.hits == 1
        assert value_of(manager, 1) == 10
    assert sorted(os.listdir(tmp_path)) == ["1"]


@pytest.mark.parametrize("late", [False, True])
def test_an_older_run_cannot_replace(directory: str, late: bool, faults: Faults) -> None:
    """A newer run has taken over before, or just before the decisive step: the old epoch stays, the save is fenced."""
    older = ec.CheckpointManager(directory)
    save(older, 1, 1)
    save(older, 2, 2)
    older.allow_overwrite(1)
    newer: list[ec.CheckpointManager] = []

    def take_over(call: StoreCall | None = None) -> None:
        if not newer:
            with as_another_process():
                newer.append(ec.CheckpointManager(directory))
            newer[0].claim()

    if late:
        faults.before(Store.exchange, take_over)
        faults.before(Store.replace, take_over, where=commits)
    else:
        take_over()
    older.save(1, args=args(10))
    with pytest.raises(FencedError):
        older.wait_until_finished()
    older.close()
    newer[0].reload()
    assert newer[0].all_steps() == [1, 2]
    assert [value_of(newer[0], epoch) for epoch in (1, 2)] == [1, 2]
    replace(newer[0], 1, 11)
    assert value_of(newer[0], 1) == 11
    newer[0].close()


@pytest.mark.slow
def test_processes_replace_together(tmp_path: pathlib.Path) -> None:
    """Each calls `allow_overwrite` and `save`; the primary exchanges."""
    found = run_worker("tests.support.replace_jobs:replace_in_a_job", {"directory": str(tmp_path)}, 2)
    assert found == [[[7.0], [1, 2], [True] * 3]] * 2
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


# -- the stores ------------------------------------------------------------------------------------------------------


def test_posix_exchanges_folders_and_replaces_no_content(tmp_path: pathlib.Path) -> None:
    """Both names are there before and after; a missing one changes nothing."""
    store = PosixStore(tmp_path)
    for name in ("a", "b"):
        store.make_folder(name)
        store.create(f"{name}/x", name.encode())
    store.exchange("a", "b")
    assert [store.read(f"{name}/x", limit_bytes=9) for name in ("a", "b")] == [b"b", b"a"]
    with pytest.raises(FileNotFoundError):
        store.exchange("a", "c")
    with pytest.raises(ValueError, match="malformed"):
        store.exchange("a", "../b")
    with pytest.raises(io.UnsupportedOperation, match="replace the content of 'a/x'"):
        store.replace("a/x", b"b", b"c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_an_object_store_replaces_what_is_as_expected() -> None:
    """Conditionally on the content that was read; nothing is exchanged."""
    store = ObjectStore(f"memory://{uuid.uuid4().hex}/")
    store.create("a/x", b"old")
    store.replace("a/x", b"old", b"newer")
    assert store.read("a/x", limit_bytes=9) == b"newer"
    with pytest.raises(FileExistsError):
        store.replace("a/x", b"old", b"newest")
    with pytest.raises(FileNotFoundError):
        store.replace("a/y", b"", b"x")
    assert store.read("a/x", limit_bytes=9) == b"newer"
    with pytest.raises(io.UnsupportedOperation, match="exchange"):
        store.exchange("a", "b")


def test_of_many_that_replace_one_content_one_wins() -> None:
    """The condition holds for the write, not only for the read before it."""
    store = ObjectStore(f"memory://{uuid.uuid4().hex}/")
    store.create("x", b"old")
    start, won = threading.Barrier(8), []

    def swap(number: int) -> None:
        start.wait(30)
        try:
            store.replace("x", b"old", str(number).encode())
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=swap, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert store.read("x", limit_bytes=9) == str(won[0]).encode()
