"""What goes wrong around a save, a restore or a deletion, once, and what the manager makes of it."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import threading
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.arrays.restore import TreeRequest, restore_tree
from epochckpt.directory import directory_of, head_turns
from epochckpt.directory.bucket import BucketStaging, BucketWriter
from epochckpt.directory.posix import PosixStaging, PosixWriter
from epochckpt.errors import (
    EpochDeletedError,
    FencedError,
    InvalidArgumentError,
    MismatchError,
    RemovalError,
    RetentionError,
    StorageError,
    UnfinishedError,
    UnsupportedError,
)
from epochckpt.format import checksums
from epochckpt.format import paths as layout
from epochckpt.orbax import StepNames
from epochckpt.saving import survey as survey_lib
from epochckpt.storage import open_store

WAIT_SECS = 30.0
MOMENT_SECS = 0.2  # how long something that must not happen is waited for
Options = ocp.CheckpointManagerOptions
Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def new_memory() -> str:
    return f"memory://{uuid.uuid4().hex}/"


def state(value: float) -> dict[str, Any]:
    return {"a": np.full(400, float(value))}


def value_of(restored: Any) -> float:
    """What `state` was made from."""
    (value,) = set(restored["a"].tolist())
    return value


def save_all(manager: ec.CheckpointManager, epochs: Any, **kwargs: Any) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save(state(epoch)), **kwargs)
        manager.wait_until_finished()


def fill(directory: str, *epochs: int, options: Options | None = None) -> None:
    """EpochDirectory epochs and closes."""
    with ec.CheckpointManager(directory, options=options) as manager:
        save_all(manager, epochs)


def on_storage(directory: str, options: Options | None = None) -> list[int]:
    """What somebody who only reads sees now."""
    epoch_directory = directory_of(open_store(directory), StepNames.of(options or Options()))
    return epoch_directory.list_epochs()


def data_path(manager: ec.CheckpointManager, epoch: int) -> str:
    record = manager.components.directory.epoch_directory.read_record(epoch)
    return f"{manager.components.directory.epoch_directory.folder(epoch)}/{record.path(0, record.nodes[0].files[0])}"


def cut(manager: ec.CheckpointManager, epoch: int) -> None:
    """Removes the last byte of an epoch's data."""
    store, path = manager.components.directory.store, data_path(manager, epoch)
    with store.open_reader(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    store.remove(path)
    store.create(path, bytes(data[:-1]))


def edit_record(path: pathlib.Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes a sealed record, with a seal that fits."""
    body = checksums.parse_sealed(path.name, path.read_bytes())
    edit(body)
    path.write_bytes(checksums.seal(body))


class Once:
    """A method that raises at its first matching call, and is as ever afterwards.

    Args:
        patch: takes it back at the end of the test.
        owner: an object or a class.
        method: the method's name.
        error: what it raises.
        match: which calls concern us, by their arguments.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        method: str,
        error: BaseException,
        match: Callable[..., bool] = lambda *args: True,
    ):
        self.hits, original = 0, getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.hits and match(*args):
                self.hits += 1
                raise error
            return original(*args, **kwargs)

        patch.setattr(owner, method, call)


class Hold:
    """A method whose matching calls wait until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, method: str, match: Callable[..., bool]):
        self.reached, self.go, original = threading.Event(), threading.Event(), getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if match(*args):
                self.reached.set()
                assert self.go.wait(WAIT_SECS)
            return original(*args, **kwargs)

        patch.setattr(owner, method, call)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Event, list[Any]]:
    """Runs a call beside the test; the event is set when it has ended, the list holds its result or error."""
    done, out = threading.Event(), []

    def job() -> None:
        try:
            out.append(call())
        except BaseException as error:  # the test looks at it
            out.append(error)
        finally:
            done.set()

    threading.Thread(target=job, daemon=True).start()
    return done, out


def bounded(call: Callable[[], Any]) -> Any:
    """The result of a call that must end."""
    done, out = in_thread(call)
    assert done.wait(WAIT_SECS), "it hangs"
    if isinstance(out[0], BaseException):
        raise out[0]
    return out[0]


def waits_for(hold: Hold, call: Callable[[], Any]) -> list[Any]:
    """A call does not end before the hold is let go, and does then; returns what `in_thread` got of it."""
    assert hold.reached.wait(WAIT_SECS)
    done, out = in_thread(call)
    assert not done.wait(MOMENT_SECS)
    hold.go.set()
    assert done.wait(WAIT_SECS)
    return out


def timed_out() -> OSError:
    return OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


# -- passing errors are not damage ---------------------------------------------------------------------------------


def test_an_error_of_storage_at_open_is_raised_and_condemns_no_epoch(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survey tells a file that cannot be looked at now from one that is damaged."""
    with ec.CheckpointManager(directory) as manager:
        save_all(manager, [1, 2])
        store = type(manager.components.directory.store)
    method = "size" if store.atomic_folder_rename else "read"
    once = Once(monkeypatch, store, method, timed_out(), lambda _, path: path.startswith("2/"))
    with pytest.raises(StorageError):
        ec.CheckpointManager(directory)
    assert once.hits == 1
    with ec.CheckpointManager(directory) as manager:
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(None)) == 2


def test_a_passing_error_does_not_make_restore_fall_back(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """restore(None) raises it: an older epoch is no answer to a time-out. The newest stays the newest."""
    with ec.CheckpointManager(directory) as manager:
        save_all(manager, [1, 2])
        path = data_path(manager, 2)
        once = Once(
            monkeypatch,
            manager.components.directory.store,
            "open_reader",
            timed_out(),
            lambda opened, *_: opened == path,
        )
        with pytest.raises(StorageError):
            manager.restore(None)
        assert once.hits == 1
        assert list(manager.all_steps()) == [1, 2]
        assert value_of(manager.restore(None)) == 2


def test_a_passing_error_in_the_middle_of_a_file_does_not_make_restore_fall_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, if the file could be opened."""
    with ec.CheckpointManager(tmp_path) as manager:
        save_all(manager, [1, 2])
        with manager.components.directory.store.open_reader(data_path(manager, 2)) as reader:
            kind = type(reader)
        once = Once(monkeypatch, kind, "read_into", timed_out(), lambda r, *_: r.handle.name.endswith(".safetensors"))
        with pytest.raises(StorageError):
            manager.restore(None)
        assert once.hits == 1
        assert value_of(manager.restore(None)) == 2


def test_retention_deletes_nothing_while_metrics_cannot_be_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best epoch is not taken for one without metrics; the next commit retires what this one could not."""
    directory = str(tmp_path)
    options = Options(
        max_to_keep=1, best_fn=lambda m: m["acc"], best_mode="max", keep_checkpoints_without_metrics=False
    )
    with ec.CheckpointManager(directory, options=options) as manager:
        save_all(manager, [1], metrics={"acc": 0.99})
    with ec.CheckpointManager(directory, options=options) as manager:
        with monkeypatch.context() as patch:
            once = Once(
                patch, manager.components.directory.store, "read", timed_out(), lambda path: path == "1/epoch.json"
            )
            save_all(manager, [2], metrics={"acc": 0.1})
            assert once.hits == 1
        assert list(manager.all_steps()) == on_storage(directory) == [1, 2]
        save_all(manager, [3], metrics={"acc": 0.2})
        assert 1 in manager.all_steps()
        assert 2 not in manager.all_steps()


# -- saves in flight and their ends --------------------------------------------------------------------------------


def test_reload_waits_for_saves_in_flight(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that is committed while storage is being looked at is never lost from the history."""
    with ec.CheckpointManager(directory) as manager:
        save_all(manager, [1])
        saving: list[bool] = []
        survey = survey_lib.survey

        def look(*args: Any, **kwargs: Any) -> Any:
            saving.append(manager.is_saving_in_progress())
            return survey(*args, **kwargs)

        monkeypatch.setattr(survey_lib, "survey", look)
        hold = Hold(monkeypatch, manager.components.directory.job_directory.writer, "publish", lambda *args: True)
        assert manager.save(2, args=Save(state(2)))
        assert waits_for(hold, manager.reload) == [None]
        assert saving == [False]
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


def test_retired_epochs_are_out_of_sight_when_waiting_ends(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """wait_until_finished covers the deletions that follow a commit."""
    with ec.CheckpointManager(directory, options=Options(max_to_keep=1)) as manager:
        save_all(manager, [1])
        hold = Hold(
            monkeypatch,
            manager.components.directory.job_directory.writer,
            "unlist",
            lambda epoch, kept_in=None: epoch == 1,
        )
        assert manager.save(2, args=Save(state(2)))
        waits_for(hold, manager.wait_until_finished)
        assert list(manager.all_steps()) == on_storage(directory) == [2]


@pytest.mark.parametrize(
    "error", [timed_out(), RuntimeError("a bug"), InvalidArgumentError("no such name"), MemoryError(), KeyError("x")]
)
def test_waiting_ends_whatever_hiding_raises(directory: str, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The new epoch is committed, the old one stays listed; saving goes on, and the next commit deletes it."""
    manager = ec.CheckpointManager(directory, options=Options(max_to_keep=1))
    save_all(manager, [1])
    once = Once(monkeypatch, manager.components.directory.job_directory.writer, "unlist", error)
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


@pytest.mark.parametrize("call", ["seal", "publish"])
def test_a_save_ends_at_once_whatever_is_raised(directory: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    objects = "://" in directory
    writer, staging = (BucketWriter, BucketStaging) if objects else (PosixWriter, PosixStaging)

    def panic(*args: Any, **kwargs: Any) -> None:
        raise Panic("deep inside")

    with ec.CheckpointManager(directory) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(writer if call == "publish" else staging, call, panic)
            assert manager.save(1, args=Save(state(1)))
            with pytest.raises(ec.errors.SaveError, match="checkpoint 1 was not committed: Panic: deep inside"):
                manager.wait_until_finished()
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


# -- two runs on one directory -------------------------------------------------------------------------------------


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


# -- several name formats ------------------------------------------------------------------------------------------


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
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before the first epoch moved: readers obey it at once, the next claim moves them."""
    old, both = formats()
    fill(str(tmp_path), 1, 2, 3, options=old)
    manager = ec.CheckpointManager(tmp_path, options=both)
    once = Once(
        monkeypatch,
        manager.components.directory.store,
        "rename",
        OSError(errno.EIO, "killed"),
        lambda src, *_: src.startswith("step_"),
    )
    with pytest.raises(UnfinishedError, match="killed"):
        manager.rollback_to(1)
    assert once.hits == 1
    assert (tmp_path / "step_3").exists()
    assert on_storage(str(tmp_path), both) == [1]
    with ec.CheckpointManager(tmp_path, options=both) as manager:
        assert list(manager.all_steps()) == [1]
        manager.claim()
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_1"]
    assert sorted(p.parent.name for p in tmp_path.glob("rolled-back-*/*/epoch.json")) == ["step_2", "step_3"]
    assert not (tmp_path / layout.ROLLBACK_RECORD).exists()


# -- deleting ------------------------------------------------------------------------------------------------------


def test_a_deleted_epoch_is_gone_even_if_its_bytes_stay(
    directory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The name goes first; that removing the bytes failed is logged, and raised once by the next wait."""
    manager = ec.CheckpointManager(directory)
    save_all(manager, [1, 2])
    with monkeypatch.context() as patch:
        method = "remove_tree" if manager.components.directory.store.atomic_folder_rename else "remove_all"
        once = Once(patch, manager.components.directory.store, method, OSError(errno.EBUSY, "busy, says the server"))
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


@pytest.mark.parametrize("broken", ["make_folder", "rename"])
def test_an_epoch_that_cannot_be_kept_elsewhere_is_not_deleted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """With todelete_subdir nothing is ever removed: what cannot be moved there stays where it is."""
    options = Options(max_to_keep=1, todelete_subdir="old")
    manager = ec.CheckpointManager(tmp_path, options=options)
    save_all(manager, [1])
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    once = Once(
        monkeypatch,
        manager.components.directory.store,
        broken,
        no_space,
        lambda *paths: paths[-1] == "old/1" or "/removed-" in paths[0],
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


# -- replaced under a reader ---------------------------------------------------------------------------------------


def arrays(value: int) -> Any:
    return Save({"a": np.arange(4.0 + value), "b": np.full(3, value)})


def same_arrays(value: int) -> Any:
    return Save({"a": np.full(4, value)})


def one_json(value: int) -> Any:
    return ocp.args.Composite(j=ocp.args.JsonSave({"v": "x" * value}))


def read_tree(reader: Any) -> Any:
    return restore_tree(reader, "default", TreeRequest())


def read_json(reader: Any) -> Any:
    return json.loads(reader.read_file("j", "metadata"))


@pytest.mark.parametrize("record_read", [False, True], ids=["before its node's record", "after it"])
@pytest.mark.parametrize(
    ("args", "read"),
    [(arrays, read_tree), (same_arrays, read_tree), (one_json, read_json)],
    ids=["arrays of another size", "arrays of the same size", "JSON"],
)
def test_an_epoch_replaced_under_its_reader_is_deleted_not_damaged(
    directory: str, record_read: bool, args: Callable[[int], Any], read: Callable[[Any], Any]
) -> None:
    """Another attempt is committed under the number: the reader says so, and nobody throws a sound epoch away."""
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=args(1))
        manager.wait_until_finished()
        reader = manager.components.readers.open(1).native
        if record_read:
            reader.node_record(0)
        manager.delete(1)
        manager.components.saves.queue.drain_removals()
        assert manager.save(1, args=args(2))
        manager.wait_until_finished()
        with pytest.raises(EpochDeletedError):
            read(reader)
        read(manager.components.readers.open(1).native)


# -- odd places and records ----------------------------------------------------------------------------------------


def test_a_directory_named_in_another_way_is_the_same_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """restore(None, directory=) with a slash, a dot or a relative path falls back, and learns, like without it."""
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path / "run")
    for other in (f"{place}/", f"{place}/.", "run", pathlib.Path(place)):
        with ec.CheckpointManager(place) as manager:
            save_all(manager, [1, 2])
            cut(manager, 2)
            assert value_of(manager.restore(None, directory=other)) == 1
            assert list(manager.all_steps()) == [1]
            manager.delete(1)
            manager.delete(2)


def test_a_number_that_no_float_holds_is_damage_not_a_crash(tmp_path: pathlib.Path) -> None:
    """An integer of 400 digits where seconds should be."""
    fill(str(tmp_path), 1, 2)

    def edit(body: dict[str, Any]) -> None:
        assert isinstance(body["nodes"][0][4], float)
        body["nodes"][0][4] = 10**400

    edit_record(tmp_path / "2" / "epoch.json", edit)
    with ec.CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [1]
        assert value_of(manager.restore(None)) == 1
        assert manager.status(2).state == "damaged"


# -- values --------------------------------------------------------------------------------------------------------


def test_masked_arrays_are_refused_by_name(directory: str) -> None:
    """Their mask would be lost."""
    masked = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])
    with ec.CheckpointManager(directory) as manager:
        with pytest.raises(InvalidArgumentError, match=r"layer/masked.*MaskedArray"):
            manager.save(1, args=Save({"layer": {"masked": masked}}))
        manager.save(1, args=Save({"layer": {"masked": masked.data}}))
        with pytest.raises(InvalidArgumentError, match=r"layer/masked.*MaskedArray"):  # not by the plan of that
            manager.save(2, args=Save({"layer": {"masked": masked}}))
        save_all(manager, [2])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["table"])
@dataclasses.dataclass
class _Static:
    w: np.ndarray
    table: np.ndarray


def test_trees_whose_static_data_cannot_be_compared_are_saved_again(directory: str) -> None:
    """No plan is found for an array as auxiliary data of a node; each save makes its own."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2, 3):
            table = np.arange(epoch + 1)  # new: the same object would be equal
            manager.save(epoch, args=Save({"node": _Static(np.full(2, epoch), table)}))
        manager.wait_until_finished()
        assert [manager.restore(epoch)["node"]["w"].tolist() for epoch in (1, 2, 3)] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("target", [False, 0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_restored_as_bool_or_int(directory: str, value: float, target: Any) -> None:
    """NaN is neither True nor a number of any kind."""
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save({"a": value}))
        manager.wait_until_finished()
        with pytest.raises((MismatchError, InvalidArgumentError), match="a"):
            manager.restore(1, args=Restore({"a": target}))
        found = manager.restore(1, args=Restore({"a": 0.0}))["a"]
        assert found == value or (math.isnan(found) and math.isnan(value))


def test_item_metadata_is_a_target_for_bytes_too(directory: str) -> None:
    """Orbax has one class for text; bytes come back as bytes."""
    tree = {"raw": b"xx\x00\xff", "long": b"y" * 5000, "text": "é", "n": np.float32(3)}
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save(tree))
        manager.wait_until_finished()
        assert manager.restore(1, args=Restore(manager.item_metadata(1))) == tree


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_sharding_is_restored_with_the_types_of_its_axes(directory: str, kind: AxisType) -> None:
    """Without a target the array has the very sharding that was saved, so that it can be used together with others."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    saved = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save({"w": saved}))
        manager.wait_until_finished()
        found = manager.restore(1)["w"]
    assert found.sharding == saved.sharding
    assert found.sharding.mesh.axis_types == mesh.axis_types
    assert ((found + saved) == 2 * np.arange(8.0)).all()


def test_a_sharding_of_the_default_mesh_is_restored(directory: str) -> None:
    """`jax.make_mesh` without axis types, whatever its default is."""
    saved = jax.device_put(jnp.arange(8.0), NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x")))
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save({"w": saved}))
        manager.wait_until_finished()
        assert manager.restore(1)["w"].sharding == saved.sharding


def test_a_slow_commit_holds_saves_back_and_fails_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that renames slowly: a loop that saves faster than that waits in `save()`, and every epoch commits."""
    publish = PosixWriter.publish

    def slow(*args: Any) -> None:
        threading.Event().wait(MOMENT_SECS)
        publish(*args)

    monkeypatch.setattr(PosixWriter, "publish", slow)
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in range(10):
            manager.save(epoch, args=Save(state(epoch)))
        manager.wait_until_finished()
        assert manager.all_steps() == list(range(10))
