"""Runs that are started again, in one process or in the next: conditions count anew, and nothing is done twice."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import orbax.checkpoint as ocp

import epochckpt as ec
from tests.support.short_jobs import job_of, run


class Counts:
    """True when it has been called so often."""

    def __init__(self, limit: int):
        self.limit, self.calls = limit, 0

    def __call__(self, ctx: Any) -> bool:
        self.calls += 1
        return self.calls >= self.limit

    def get_state(self) -> int:
        return self.calls

    def set_state(self, state: int) -> None:
        self.calls = state


def test_a_job_that_runs_again_from_scratch_starts_with_fresh_conditions() -> None:
    """Patience that an earlier run of the same object used up is not missing in the next."""
    job = job_of(100, lambda ws: {"loss": 1.0})
    job.stop_when(ec.stop.no_improvement("loss", patience=3, mode="min"))
    assert [run(job)[0].epoch for _ in range(2)] == [4, 4]
    job = job_of(100)
    job.stop_when(Counts(5))
    assert [run(job)[0].epoch for _ in range(3)] == [5, 5, 5]


def test_asking_whether_a_run_has_ended_counts_for_nothing(tmp_path: pathlib.Path) -> None:
    """A callable that counts its calls is asked once more, and has counted the epochs alone."""
    for limit, epoch in ((3, 3), (5, 5)):
        job = job_of(100)
        job.stop_when(Counts(limit))
        with ec.CheckpointManager(tmp_path) as manager:
            assert run(job, manager)[0].epoch == epoch


def test_values_of_an_earlier_run_do_not_stop_the_next(tmp_path: pathlib.Path) -> None:
    """A job that runs again forgets what its tasks gave, also where its nodes have other names then."""
    job = ec.Job()
    job.init(lambda ws: ws.update(count=0))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        ws["count"] += 1

    task = ec.Task(lambda ws: ws["count"] >= 3, group=job.epoch_group)
    job.add_stop_condition(task)
    with ec.CheckpointManager(tmp_path / "a", node="a") as one, ec.CheckpointManager(tmp_path / "b", node="b") as two:
        assert [run(job, manager)[0].epoch for manager in (one, two, None)] == [3, 3, 3]
    assert task.outputs()[0].fetch("process_0") is True


def test_a_finished_run_trains_on_when_its_conditions_do_not_say_that_it_is(tmp_path: pathlib.Path) -> None:
    """They are asked of what was recorded; what only training can tell is asked after one more epoch."""

    def ended(condition: Any) -> tuple[int, str]:
        job = job_of(50, lambda ws: ws.update(sum=ws["sum"] + 1, done=False) or {"loss": 1 / ws.epoch})
        task = ec.Task(lambda ws: condition(ws), group=job.epoch_group) if condition.__name__ == "output" else None
        job.add_stop_condition(task if task is not None else condition)
        with ec.CheckpointManager(tmp_path) as manager:
            result, _ = run(job, manager)
        return result.epoch, result.stop_reason

    def below(loss: float) -> Any:
        return lambda ctx: ctx.metrics["loss"] < loss

    def output(ws: ec.Workspace) -> bool:
        return ws["sum"] >= 4

    where = "test_a_finished_run_trains_on_when_its_conditions_do_not_say_that_it_is.<locals>"
    assert ended(below(0.4)) == (3, f"{where}.below.<locals>.<lambda>")
    assert ended(below(0.4)) == (3, "was finished already")
    assert ended(below(0.3))[0] == 4  # a changed threshold, of the same name
    assert ended(output)[0] == 5  # only training tells
    assert ended(output)[0] == 6
    assert ended(lambda ctx: ctx.metrics["unknown until now"] > 0 if ctx.epoch == 6 else True)[0] == 7


def test_a_composed_preempted_does_not_say_that_training_is_over(tmp_path: pathlib.Path) -> None:
    """The run can be started again, and the result says so."""
    job = job_of(5, lambda ws: os.kill(os.getpid(), signal.SIGTERM) if ws.epoch == 2 else None)
    job.stop_when(ec.stop.max_epochs(6) | ec.stop.preempted)
    with ec.CheckpointManager(tmp_path) as manager:
        result, _ = run(job, manager)
    assert (result.epoch, result.preempted, result.finished, result.stop_reason) == (2, True, False, "preempted")
    with ec.CheckpointManager(tmp_path) as manager:
        result, _ = run(job, manager)
    assert (result.epoch, result.finished) == (5, True)


def test_preempted_before_the_upload_it_is_left_for_the_next_start(tmp_path: pathlib.Path) -> None:
    """A notice that comes while the last save is awaited does not wait for an upload of hours."""
    done: list[str] = []

    class Upload(ec.UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> ec.TaskGroup:
            group = ec.TaskGroup("upload")
            ec.Task(lambda ws: done.append("upload"), group=group)
            if not done:
                done.append("notice")
                os.kill(os.getpid(), signal.SIGTERM)
            return group

    for expected in (75, 0):
        job = job_of(1)
        job.exit(lambda ws: done.append("exit"))
        with ec.CheckpointManager(tmp_path) as manager:
            result, _ = run(job, manager, upload_task_group_builder=Upload())
        assert result.exit_code == expected
        assert result.finished
    assert done == ["notice", "upload", "exit"]


def test_a_command_that_is_started_again_goes_back_once(tmp_path: pathlib.Path) -> None:
    """A scheduler starts it with the same `resume_from_epoch`; the epochs that it has saved since are its own."""

    def train(epochs: int, named: int | None, **options: Any) -> tuple[int | None, int]:
        with ec.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(**options)) as manager:
            result, session = run(job_of(epochs, add), manager, resume_from_epoch=named)
        return result.resumed_from, session.workspace()["sum"]

    def add(ws: ec.Workspace) -> None:
        ws["sum"] += 1

    assert train(5, None) == (None, 5)
    assert train(4, 2) == (2, 4)  # goes back, and trains 3 and 4
    assert train(6, 2, max_to_keep=2) == (4, 6)  # started again; epoch 2 is deleted meanwhile
    assert train(6, 2) == (6, 6)  # it was finished
    assert train(8, 5) == (5, 8)  # another epoch is named
    assert train(9, None) == (8, 9)
    assert train(9, 5) == (5, 9)  # a run that has not gone back has saved the newest epoch
    with ec.CheckpointManager(tmp_path) as manager:
        manager.rollback_to(5)
    assert train(7, 5) == (5, 7)
