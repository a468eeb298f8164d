"""Metrics of another job, attached to committed epochs: durable, about one attempt, and known to whoever decides."""

import errno
import os
import pathlib
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt import errors
from epochckpt.directory import attached_metrics, directory_of
from epochckpt.format import checksums, codec, paths
from epochckpt.inspection import gc, scan
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from tests.support.processes import run_worker


@pytest.fixture(params=["posix", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A new directory on a file system, and one in an object store."""
    return str(tmp_path / "run") if request.param == "posix" else f"memory://attached/{uuid.uuid4()}"


def save(manager: ec.CheckpointManager, epoch: int, metrics: Any = None) -> None:
    assert manager.save(epoch, args=ocp.args.StandardSave({"w": np.full(3, epoch)}), metrics=metrics)
    manager.wait_until_finished()


def epoch_directory(directory: str) -> Any:
    return directory_of(open_store(directory), StepNames.of(ocp.CheckpointManagerOptions()))


def test_attached_metrics_are_read_with_those_of_the_save(directory: str) -> None:
    """By any manager, at once; the commit record stays as it was, and a source may change its mind."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1, {"loss": 0.5})
        save(manager, 2)
        store = open_store(directory)
        before = store.read("1/epoch.json", limit_bytes=2**20)
        ec.attach_metrics(directory, 1, {"accuracy": np.float32(0.25), "nan": float("nan")}, "evaluator")
        ec.attach_metrics(directory, 1, {"bleu": 7}, "translator")
        ec.attach_metrics(directory, 2, {"accuracy": 0.75}, "evaluator")
        found = manager.metrics(1)
        assert np.isnan(found.pop("nan"))
        assert found == {"loss": 0.5, "accuracy": 0.25, "bleu": 7}
        assert manager.metrics(2) == {"accuracy": 0.75}
        assert manager.metadata(1).metrics["bleu"] == 7
        ec.attach_metrics(directory, 1, {"bleu": 8}, "translator")
        assert manager.metrics(1)["bleu"] == 8
        assert store.read("1/epoch.json", limit_bytes=2**20) == before
        assert manager.verify(1).ok
        assert np.array_equal(manager.restore(1)["w"], np.full(3, 1))
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as reader:
        assert reader.metrics(1)["bleu"] == 8


def test_bad_calls_attach_nothing_and_say_why(directory: str, tmp_path: pathlib.Path) -> None:
    """Unknown epochs, names that are taken, by whom, sources that are no names, and what is no JSON."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1, {"loss": 0.5})
        ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator")
        for metrics, source, kind, problem in [
            ({"loss": 1.0}, "evaluator", errors.InvalidArgumentError, "'loss' already, from the save itself"),
            ({"accuracy": 1.0}, "other", errors.InvalidArgumentError, "'accuracy' already, from source 'evaluator'"),
            ({"x": 1.0}, "../evil", errors.InvalidArgumentError, "source '../evil' is not usable"),
            ({"x": object()}, "other", errors.InvalidArgumentError, "metrics"),
            ([("x", 1)], "other", errors.InvalidArgumentError, "got a list"),
            ({"x": "y" * 2**20}, "other", errors.InvalidArgumentError, "at most (1048576|16384) can be attached"),
        ]:
            with pytest.raises(kind, match=problem):
                ec.attach_metrics(directory, 1, metrics, source)  # type: ignore[arg-type]
        with pytest.raises(errors.EpochNotFoundError, match="no checkpoint 7; committed: 1"):
            ec.attach_metrics(directory, 7, {"x": 1}, "evaluator")
        assert manager.metrics(1) == {"loss": 0.5, "accuracy": 0.5}
    stock = tmp_path / "stock"
    with ocp.CheckpointManager(stock) as orbax:
        orbax.save(3, args=ocp.args.StandardSave({"w": np.zeros(3)}))
    with pytest.raises(errors.UnsupportedError, match="checkpoint 3 was written by stock Orbax"):
        ec.attach_metrics(stock, 3, {"x": 1}, "evaluator")


def test_stock_orbax_reads_an_epoch_with_attached_metrics(tmp_path: pathlib.Path) -> None:
    """One more file in the folder changes nothing for it."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1, {"loss": 0.5})
    ec.attach_metrics(tmp_path, 1, {"accuracy": 0.5}, "evaluator")
    with ocp.CheckpointManager(tmp_path) as orbax:
        assert orbax.all_steps() == [1]
        assert np.array_equal(orbax.restore(1, args=ocp.args.StandardRestore({"w": np.zeros(3, int)}))["w"], [1, 1, 1])


def test_metrics_of_an_epoch_that_is_replaced_are_not_those_of_the_new_one(directory: str) -> None:
    """Neither when the caller lets the next save replace it, nor after a rollback."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            save(manager, epoch)
            ec.attach_metrics(directory, epoch, {"accuracy": 0.5}, "evaluator")
        manager.allow_overwrite(2)
        save(manager, 2)
        assert manager.metrics(2) is None
        ec.attach_metrics(directory, 2, {"accuracy": 0.75}, "evaluator")
        assert manager.metrics(2) == {"accuracy": 0.75}
        manager.rollback_to(1)
        store = open_store(directory)
        (aside,) = [e.name for e in store.list("") if e.name.startswith("rolled-back-")]
        assert store.exists(f"{aside}/2/_metrics-evaluator.json")
        save(manager, 2)
        assert manager.metrics(2) is None
        manager.delete(2)
        manager.wait_until_finished()
        assert not open_store(directory).find(paths.METRICS_PREFIX, "2")
        assert manager.metrics(1) == {"accuracy": 0.5}


def test_metrics_about_another_attempt_are_refused(directory: str) -> None:
    """An evaluator that read the old epoch does not speak about the one that replaced it."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1)
        read = manager.save_id(1)
        manager.allow_overwrite(1)
        save(manager, 1)
        assert manager.save_id(1) != read
        with pytest.raises(errors.EpochDeletedError, match=f"these metrics are about attempt {read}"):
            ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator", save_id=read)
        assert manager.metrics(1) is None
        ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator", save_id=manager.save_id(1))
        assert manager.metrics(1) == {"accuracy": 0.5}
        with pytest.raises(errors.EpochNotFoundError, match="no checkpoint 7"):
            manager.save_id(7)


def test_an_epoch_that_is_deleted_meanwhile_is_said_to_be(directory: str, faults: Faults) -> None:
    """Between the look at its record and the write: EpochDeletedError, and nothing is left of it."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            save(manager, epoch)

        def delete(call: StoreCall) -> None:
            manager.delete(1)
            manager.wait_until_finished()

        late = faults.before(Store.put, delete, where=lambda call: call.path == "1/_metrics-evaluator.json")
        with late, pytest.raises(errors.EpochDeletedError, match="checkpoint 1 was deleted or replaced"):
            ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator")
        assert not open_store(directory).find(paths.METRICS_PREFIX)
        assert list(manager.all_steps()) == [2]


def best_by_accuracy(**more: Any) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(best_fn=lambda m: m["accuracy"], best_mode="max", **more)


def test_keeping_the_best_goes_by_metrics_that_another_job_attached(directory: str) -> None:
    """An epoch that was not scored yet is kept; once it is, it stays or goes by its rank; the newest always stays."""
    with ec.CheckpointManager(directory, options=best_by_accuracy(max_to_keep=1)) as manager:
        for epoch in range(4):
            save(manager, epoch, {"loss": 1.0})
        assert list(manager.all_steps()) == [0, 1, 2, 3]
        assert manager.best_step() is None
        for epoch, accuracy in ((0, 0.25), (1, 0.75), (2, 0.5)):
            ec.attach_metrics(directory, epoch, {"accuracy": accuracy}, "evaluator")
        manager.reload()
        assert manager.best_step() == 1
        save(manager, 4, {"loss": 1.0})
        assert list(manager.all_steps()) == [1, 3, 4]
        ec.attach_metrics(directory, 3, {"accuracy": 1.0}, "evaluator")
        save(manager, 5, {"loss": 1.0})
        assert list(manager.all_steps()) == [3, 4, 5]
        assert manager.best_step() == 3
    with ec.CheckpointManager(directory, options=best_by_accuracy()) as manager:  # known from the beginning
        assert manager.best_step() == 3


@pytest.mark.slow
def test_all_processes_know_the_same_attached_metrics(tmp_path: pathlib.Path) -> None:
    """Three real processes: the primary's word counts, at the opening, at a commit and at a reload."""
    answers = run_worker("tests.support.attached_jobs:best_at_every_moment", {"directory": str(tmp_path / "run")}, 3)
    assert answers == [{"commit": 0, "reload": 1, "open": 1, "kept": [0, 1, 2]}] * 3


def test_damaged_files_are_left_out_and_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit, half a file, a file of another name or version, a draft of somebody who was killed."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1, {"loss": 0.5})
        for source in ("a", "b", "c", "good"):
            ec.attach_metrics(tmp_path, 1, {source: 1}, source)
        folder = tmp_path / "1"
        flipped = bytearray((folder / "_metrics-a.json").read_bytes())
        flipped[-3] ^= 1
        (folder / "_metrics-a.json").write_bytes(flipped)
        os.truncate(folder / "_metrics-b.json", 50)
        os.rename(folder / "_metrics-c.json", folder / "_metrics-d.json")
        (folder / f"_metrics-e.json.0{paths.TMP_SUFFIX}").write_bytes(b"{")
        (folder / "_metrics-link.json").symlink_to(folder / "_metrics-good.json")
        assert manager.metrics(1) == {"loss": 0.5, "good": 1}
        assert "1/_metrics-a.json: checksum differs" in caplog.text
        assert "1/_metrics-b.json" in caplog.text
        assert manager.verify(1).ok
        ec.attach_metrics(tmp_path, 1, {"a": 2}, "a")  # what is damaged can be said again
        assert manager.metrics(1)["a"] == 2


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_no_content_of_a_file_does_more_than_be_left_out(noise: bytes, place: int, byte: int) -> None:
    """Any bytes, and any one byte of a good file changed: our errors, or the metrics as they were."""
    file = attached_metrics.MetricsFile(written_ns=1, epoch=1, save_id="a-1", source="evaluator", metrics={"x": 1.0})
    good = codec.seal("metrics", file)
    changed = bytearray(good)
    changed[place % len(good)] = byte
    for data in (noise, bytes(changed)):
        said = ""
        try:
            assert attached_metrics.parse("f", data).metrics == {"x": 1.0}
        except errors.EpochCheckpointError as error:
            said = str(error)
        assert not said or said.startswith("f: ")


def test_sources_that_attach_at_once_all_count(directory: str) -> None:
    """Eight threads, each a source of its own, and one source eight times over: whole files, the last one stays."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1)
        run_all([lambda i=i: ec.attach_metrics(directory, 1, {f"m{i}": i}, f"s{i}") for i in range(8)])
        assert manager.metrics(1) == {f"m{i}": i for i in range(8)}
        run_all([lambda i=i: ec.attach_metrics(directory, 1, {"same": i}, "one") for i in range(8)])
        assert manager.metrics(1)["same"] in range(8)


def run_all(calls: Sequence[Any]) -> None:
    failed: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed


def test_storage_that_cannot_be_listed_harms_no_commit(tmp_path: pathlib.Path, faults: Faults) -> None:
    """What was known stays known, and nothing is deleted for want of it."""
    with ec.CheckpointManager(tmp_path, options=best_by_accuracy(max_to_keep=1)) as manager:
        save(manager, 0)
        ec.attach_metrics(tmp_path, 0, {"accuracy": 1.0}, "evaluator")
        save(manager, 1)
        assert manager.best_step() == 0
        broken = faults.fail(Store.find, OSError(errno.EIO, "Input/output error"))
        save(manager, 2)
        assert broken.hits
        assert list(manager.all_steps()) == [0, 1, 2]
        assert manager.best_step() == 0


def test_an_attachment_during_a_commit_waits_for_nobody(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The evaluator's metrics are there while the commit of the next epoch is held up."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1)
        hold = faults.hold(Store.rename, where=lambda call: call.target == "2")
        assert manager.save(2, args=ocp.args.StandardSave({"w": np.zeros(3)}))
        assert hold.reached.wait(60)
        ec.attach_metrics(tmp_path, 1, {"accuracy": 0.5}, "evaluator")
        assert manager.metrics(1) == {"accuracy": 0.5}
        assert list(manager.all_steps()) == [1]
        hold.let_go()
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2]


def test_an_overview_has_attached_metrics_and_says_whose_they_are(directory: str) -> None:
    """Also of epochs that it does not show, when it looks for the best one."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in range(4):
            save(manager, epoch, {"loss": 1.0})
            ec.attach_metrics(directory, epoch, {"accuracy": 1.0 - epoch / 10, "bleu": 3}, "evaluator")
    found = scan.look(directory, metric="accuracy", limit=2)
    assert [(row.epoch, row.best) for row in found.epochs] == [(0, True), (2, False), (3, False)]
    assert found.epochs[0].metrics == {"loss": 1.0, "accuracy": 1.0, "bleu": 3}
    assert found.epochs[0].sources == {"accuracy": "evaluator", "bleu": "evaluator"}
    assert found.epochs[0].nodes


def nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = {"a": value}
    return value


def test_metrics_as_deep_as_they_may_be_are_told_to_everybody(directory: str) -> None:
    """Whatever may be saved and attached can be told: the commit is no failure, and the directory opens again."""
    with ec.CheckpointManager(directory, options=best_by_accuracy()) as manager:
        save(manager, 0, nested(100))
        ec.attach_metrics(directory, 0, {"accuracy": 0.5, "b": nested(99)}, "evaluator")
        save(manager, 1)
        assert manager.best_step() == 0
    with ec.CheckpointManager(directory, options=best_by_accuracy()) as manager:
        assert manager.best_step() == 0
        assert manager.metrics(0) == {**nested(100), "accuracy": 0.5, "b": nested(99)}


@pytest.mark.parametrize("metrics", [{"a": {"$float": "foo"}}, {"$float": "nan"}, nested(101)])
def test_what_could_not_be_told_to_other_processes_is_left_out(tmp_path: pathlib.Path, metrics: Any) -> None:
    """A file of somebody else's making, with a good checksum: no manager fails to open or to commit for it."""
    with ec.CheckpointManager(tmp_path) as manager:
        save(manager, 1)
        save_id = manager.components.directory.epoch_directory.read_save_id(1)
    head = {"format": paths.FORMAT, "version": paths.VERSION, "record": "metrics"}
    data = checksums.seal({**head, "epoch": 1, "attempt": save_id, "source": "evil", "metrics": metrics})
    (tmp_path / "1" / "_metrics-evil.json").write_bytes(data)
    with ec.CheckpointManager(tmp_path, options=best_by_accuracy()) as manager:
        save(manager, 2, {"accuracy": 1.0})
        assert manager.best_step() == 2
        assert manager.metrics(1) is None


def test_a_reader_that_looks_again_has_the_metrics_of_what_replaced_an_epoch(directory: str) -> None:
    """Not those of the attempt that it knew before, nor a mixture of both."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1, {"accuracy": 0.75})
        save(manager, 2, {"accuracy": 0.5})
        read_only = best_by_accuracy(read_only=True)
        with ec.CheckpointManager(directory, options=read_only) as reader:
            assert reader.best_step() == 1
            manager.allow_overwrite(1)
            save(manager, 1, {"accuracy": 0.25})
            reader.reload()
            assert reader.best_step() == 2


def test_an_attachment_stays_where_nobody_can_say_whether_its_epoch_does(directory: str, faults: Faults) -> None:
    """Storage that fails for a moment after the write: that is the error, not that the epoch was deleted."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1)
        error = OSError(errno.ETIMEDOUT, "Connection timed out")
        faults.after(Store.put, lambda call: faults.fail(Store.read, error))
        with pytest.raises(OSError, match="Connection timed out") as raised:
            ec.attach_metrics(directory, 1, {"accuracy": 0.5}, "evaluator")
        faults.clear()
        assert isinstance(raised.value, errors.StorageError)
        assert manager.metrics(1) == {"accuracy": 0.5}


def test_metrics_of_an_epoch_that_is_gone_are_no_attempt() -> None:
    """On an object store an evaluator may be killed just when its epoch is deleted: its file is about no epoch."""
    directory = f"memory://attached/{uuid.uuid4()}"
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1)
        save(manager, 2)
        ec.attach_metrics(directory, 2, {"accuracy": 0.5}, "evaluator")
        data = open_store(directory).read("2/_metrics-evaluator.json", limit_bytes=2**20)
        manager.delete(2)
        manager.wait_until_finished()
    open_store(directory).create("2/_metrics-evaluator.json", data)
    assert [row.epoch for row in scan.look(directory).epochs] == [1]
    assert gc.collect(directory).rows == ()
    with ec.CheckpointManager(directory) as manager:
        assert not manager.foreign_folders()
        save(manager, 2)
        assert manager.metrics(2) is None
        ec.attach_metrics(directory, 2, {"accuracy": 0.75}, "evaluator")
        assert manager.metrics(2) == {"accuracy": 0.75}


def test_a_metric_that_is_no_number_ranks_nothing_and_stops_nothing(tmp_path: pathlib.Path) -> None:
    """Another job attached it: its epoch counts as one without, the others are kept and deleted by rank."""
    with ec.CheckpointManager(tmp_path, options=best_by_accuracy(max_to_keep=1)) as manager:
        for epoch, accuracy in enumerate(["n/a", [1.0], 0.75, 0.5, -(10**400)]):
            save(manager, epoch)
            ec.attach_metrics(tmp_path, epoch, {"accuracy": accuracy}, "evaluator")
        manager.reload()
        assert manager.best_step() == 2
        save(manager, 5)
        assert list(manager.all_steps()) == [0, 1, 2, 5]
