"""`load_blobs_from_checkpoints` and `save_checkpoints`, in a run and after it: the run goes on as if nothing had been.

With every kind of manager that a runner takes.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec


@pytest.fixture(params=["epochckpt", "stock Orbax", "caffe2, one node", "caffe2, many nodes"])
def manager(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Any]:
    if request.param.startswith("caffe2"):
        one = request.param == "caffe2, one node"
        yield (
            ec.caffe2.CheckpointManager(tmp_path, "process_0", "epochckpt")
            if one
            else ec.caffe2.MultiNodeCheckpointManager(tmp_path, "epochckpt")
        )
        return
    kind: Any = ec.CheckpointManager if request.param == "epochckpt" else ocp.CheckpointManager
    with kind(tmp_path) as made:
        yield made


def job_of(epochs: int, during: Callable[[ec.Workspace], Any]) -> ec.Job:
    """A job whose one blob counts its epochs; `during` runs in the middle of each."""
    job = ec.Job()
    job.init(lambda ws: ws.update(w=0))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        during(ws)
        ws["w"] += 1

    ec.epoch_limiter(job, epochs)
    return job


def stored(runner: ec.JobRunner, epochs: Any) -> dict[int, Any]:
    """The blobs of each of these epochs that is there."""
    found = {}
    for epoch in epochs:
        session = ec.LocalSession()
        if runner.load_blobs_from_checkpoints(["w", "x"], epoch, session):
            found[epoch] = dict(session.workspace())
    return found


@pytest.mark.slow
def test_blobs_that_are_loaded_into_another_session_stay_there(manager: Any) -> None:
    """The run, and `save_checkpoints` after it, save the session that they were given, and its blobs."""

    def look(ws: ec.Workspace) -> None:
        if ws.epoch == 4:
            assert runner.load_blobs_from_checkpoints(["w"], 1, ec.LocalSession())

    runner = ec.JobRunner(job_of(6, look), manager)
    runner.train(session := ec.LocalSession())
    assert runner.result.failed_saves == ()
    assert stored(runner, range(9)) == {epoch: {"w": epoch} for epoch in range(7)}

    other = ec.LocalSession()
    assert runner.load_blobs_from_checkpoints(["w"], 2, other)
    session.workspace().update(w=77, x=1)
    runner.save_checkpoints(7, session)
    runner.save_checkpoints(8, other)
    runner.save_checkpoints(9, session)
    assert stored(runner, (7, 8, 9)) == {7: {"w": 77}, 8: {"w": 2}, 9: {"w": 77}}


def test_another_session_is_saved_in_the_middle_of_a_run(manager: Any) -> None:
    """And is not what the run saves from then on, nor are its blobs."""
    other = ec.LocalSession()
    other.workspace().update(w=-1, x=-2)

    def save(ws: ec.Workspace) -> None:
        if ws.epoch == 4:
            runner.save_checkpoints(2, other)

    runner = ec.JobRunner(job_of(6, save), manager)
    runner.train(ec.LocalSession())
    assert runner.result.failed_saves == ()
    found = stored(runner, range(7))
    assert found.pop(2)["w"] == -1
    assert found == {epoch: {"w": epoch} for epoch in (0, 1, 3, 4, 5, 6)}


def test_the_runs_own_save_of_an_epoch_replaces_what_was_saved_in_the_middle_of_it(manager: Any) -> None:
    """However often that was; and the result says what became of the run's own saves."""
    session = ec.LocalSession()

    def save(ws: ec.Workspace) -> None:
        for _ in range(2 if ws.epoch > 1 else 0):
            runner.save_checkpoints(ws.epoch, session)

    runner = ec.JobRunner(job_of(4, save), manager)
    runner.train(session)
    assert stored(runner, range(6)) == {epoch: {"w": epoch} for epoch in range(5)}
    assert (runner.result.last_committed_epoch, runner.result.failed_saves) == (4, ())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", [ec.CheckpointManager, ocp.CheckpointManager])
def test_the_runs_own_save_replaces_what_a_task_has_saved_with_the_manager_itself(
    tmp_path: pathlib.Path, kind: Any, wait: bool
) -> None:
    """Also while that is still being written."""

    def save(ws: ec.Workspace) -> None:
        manager.save(ws.epoch, args=ocp.args.Composite(w=ocp.args.JsonSave({"half": ws.epoch})))
        if wait:
            manager.wait_until_finished()

    with kind(tmp_path) as manager:
        runner = ec.JobRunner(job_of(3, save), manager)
        runner.train(ec.LocalSession())
        assert runner.result.failed_saves == ()
        assert stored(runner, range(5)) == {epoch: {"w": epoch} for epoch in range(4)}


def test_a_larger_number_stands_in_nobodys_way(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The run saves its own epochs, says that it will not go on from that one, and does not."""
    session, died = ec.LocalSession(), list[int]()

    def save(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            runner.save_checkpoints(1000, session)
        if ws.epoch == 5 and not died:
            died.append(5)
            raise ZeroDivisionError

    runner = ec.JobRunner(job := job_of(6, save), manager)
    with pytest.raises(ec.errors.TaskError):
        runner.train(session)
    assert "epoch 1000 is saved by save_checkpoints() while the run is in epoch 2" in caplog.text
    named = 4 if hasattr(manager, "db_prefix") else None  # without a handler, Caffe2's start from scratch
    runner = ec.JobRunner(job, manager, named)
    runner.train(ec.LocalSession())
    assert (runner.result.resumed_from, runner.result.last_committed_epoch) == (4, 6)
    assert stored(runner, [*range(8), 1000]) == {**{epoch: {"w": epoch} for epoch in range(7)}, 1000: {"w": 1}}


def test_what_was_saved_in_the_middle_of_a_run_alone_is_not_gone_on_from_unless_it_is_named(
    tmp_path: pathlib.Path,
) -> None:
    """Nor does a run start from scratch beside it: the user says which of them is meant."""
    session = ec.LocalSession()
    with ec.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(job_of(1, lambda ws: runner.save_checkpoints(7, session)), manager)
        runner.train(session)
        for epoch in (0, 1):
            manager.delete(epoch)
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"\[7\] in the middle of a run.*resume_from_epoch"):
            ec.JobRunner(job_of(9, lambda ws: None), manager).train(ec.LocalSession())
        runner = ec.JobRunner(job_of(9, lambda ws: None), manager, 7)
        runner.train(session := ec.LocalSession())
    assert (runner.result.resumed_from, runner.result.epoch, session.workspace()["w"]) == (7, 9, 2)


def test_half_of_an_epoch_that_may_be_saved_as_it_is_is_entered_again(tmp_path: pathlib.Path) -> None:
    """A run that dies after `save_checkpoints` of its current epoch goes on in that epoch, with its stop conditions."""
    session, steps = ec.LocalSession(), list[tuple[int, int]]()
    job = ec.Job()
    job.init(lambda ws: ws.update(step=0))

    @job.epoch(resumable=True)
    def train(ws: ec.Workspace) -> dict[str, float]:
        while ws["step"] < 4:
            steps.append((ws.epoch, ws["step"]))
            ws["step"] += 1
            if (ws.epoch, ws["step"]) == (2, 3) and len(steps) == 7:
                runner.save_checkpoints(2, session)
                raise ZeroDivisionError
        ws["step"] = 0
        return {"loss": 1.0}

    job.stop_when(ec.stop.no_improvement("loss", patience=2, mode="min"))
    with ec.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(job, manager)
        with pytest.raises(ec.errors.TaskError):
            runner.train(session)
    with ec.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(job, manager)
        runner.train(session := ec.LocalSession())
    assert steps == [(epoch, step) for epoch in (1, 2, 3) for step in range(4)]
    assert (runner.result.epoch, runner.result.partial, runner.result.failed_saves) == (3, False, ())


@pytest.mark.parametrize("number", [90, -1])
def test_outcomes_of_a_run_are_not_taken_by_what_is_saved_beside_it(tmp_path: pathlib.Path, number: int) -> None:
    """A save of the run that had failed by then shows in its result; also if the other one is no epoch."""
    session = ec.LocalSession()

    def save(ws: ec.Workspace) -> None:
        if ws.epoch == 1:
            (tmp_path / "1").mkdir()
            (tmp_path / "1" / "theirs").touch()
        if ws.epoch == 2:
            with pytest.raises(ec.errors.SaveError):
                manager.wait_until_finished()
            runner.save_checkpoints(number, session)

    with ec.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(job_of(3, save), manager)
        runner.train(session)
        assert list(manager.all_steps()) == [0, 2, 3, *([90] if number == 90 else [])]
    assert [epoch for epoch, _ in runner.result.failed_saves] == [1]


def test_a_save_beside_a_run_that_fails_is_no_failed_save_of_the_run(tmp_path: pathlib.Path) -> None:
    """Nor of the next one, also where the save raises, as one that is not asynchronous does."""
    session = ec.LocalSession()

    def save(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            (tmp_path / "7" / "theirs").mkdir(parents=True)
            runner.save_checkpoints(7, session)

    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        runner = ec.JobRunner(job_of(3, save), manager, max_consecutive_save_failures=0)
        runner.train(session)
        assert (runner.result.failed_saves, runner.result.last_committed_epoch) == ((), 3)
        runner = ec.JobRunner(job_of(5, save), manager, max_consecutive_save_failures=0)
        runner.save_checkpoints(7, session)
        runner.train(session)
        assert (runner.result.failed_saves, runner.result.resumed_from) == ((), 3)


def test_an_epoch_that_ends_while_a_save_of_it_waits_is_no_half_one(tmp_path: pathlib.Path) -> None:
    """A thread saves the current epoch and waits for the run's own saves; meanwhile the run enters the next epoch."""
    session, waits, entered, saved = ec.LocalSession(), threading.Event(), threading.Event(), threading.Event()
    job = ec.Job()
    job.init(lambda ws: ws.update(w=0))

    def save() -> None:
        runner.save_checkpoints(1, session)
        saved.set()

    @job.epoch(resumable=True)
    def train(ws: ec.Workspace) -> None:
        if ws.epoch == 1:
            threading.Thread(target=save, name="beside", daemon=True).start()
            assert waits.wait(60)
        else:
            entered.set()
            assert saved.wait(60)

    class Slow(ec.CheckpointManager):
        """Lets the thread wait for the run's saves until the run is in the next epoch."""

        def wait_until_finished(self) -> None:
            if threading.current_thread().name == "beside":
                waits.set()
                assert entered.wait(60)
            super().wait_until_finished()

    ec.epoch_limiter(job, 2)
    with Slow(tmp_path) as manager:
        runner = ec.JobRunner(job, manager)
        runner.train(session)
        assert manager.metadata(1).custom_metadata["job_runner"]["partial"] is False
