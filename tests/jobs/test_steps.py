"""Jobs that count steps, and saving by time."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli.main import main
from epochckpt.errors import InvalidArgumentError


def make_job(until: int, every: int = 10, **tasks: Any) -> ec.Job:
    """Its blob has every step that was trained."""
    job = ec.Job(unit="step", steps_per_epoch=every)
    job.init(lambda ws: ws.update(steps=[]))

    @job.epoch(resumable=True)
    def train(ws: ec.Workspace) -> dict[str, float]:
        for step in ws.steps[len(ws["steps"]) - ws.steps.start :]:  # an epoch that was left goes on where it was left
            if ws.should_stop():
                break
            ws["steps"] = [*ws["steps"], step]
            if step == tasks.get("preempted_in"):
                os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 1 / ws.epoch}

    job.stop_when(ec.stop.max_steps(until))
    return job


def run(directory: pathlib.Path, job: ec.Job, **arguments: Any) -> tuple[ec.JobRunner, list[int]]:
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job, manager, **arguments)
        runner.train(session := ec.LocalSession())
        return runner, session.workspace()["steps"]


def saved_in(directory: pathlib.Path) -> list[int]:
    return [row.epoch for row in ec.inspect(directory).epochs()]


def test_steps_are_what_a_job_counts(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its epochs are numbered by steps, also by a run that goes on in other strides, and nobody reads of epochs."""
    caplog.set_level(logging.INFO, "absl")
    runner, steps = run(tmp_path, make_job(until=30))
    assert steps == list(range(30))
    assert saved_in(tmp_path) == [0, 10, 20, 30]
    assert str(runner.result).startswith("stopped after step 30: max_steps(30); step 30 is the newest on storage")
    runner, steps = run(tmp_path, make_job(until=40, every=7))
    assert steps == list(range(44))
    assert saved_in(tmp_path) == [0, 10, 20, 30, 37, 44]
    assert "resumed from step 30, stopped after step 44" in str(runner.result)
    runner, _ = run(tmp_path, make_job(until=44))
    assert runner.result.finished
    said = [record.getMessage() for record in caplog.records if record.name == "absl"]
    assert "resumed from step 30" in said
    assert "training was finished after step 44 already: nothing to train" in said


def test_a_step_job_is_preempted_in_the_middle(tmp_path: pathlib.Path) -> None:
    """The part is saved under the number that the whole will have; the whole takes its place."""
    runner, steps = run(tmp_path, make_job(until=30, preempted_in=13))
    assert (runner.result.epoch, runner.result.partial, steps) == (20, True, list(range(14)))
    runner, steps = run(tmp_path, make_job(until=25, every=5))
    assert (runner.result.epoch, steps) == (25, list(range(25)))
    assert saved_in(tmp_path) == [0, 10, 20, 25]


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    """Units that are none, and conditions, limits and directories of the other unit."""
    for wrong in ({"unit": "batch"}, {"unit": "step"}, {"steps_per_epoch": 5}):
        with pytest.raises(InvalidArgumentError):
            ec.Job(**wrong)
    for wrong in (0, True, 2.0):
        with pytest.raises(InvalidArgumentError, match="integer of at least 1"):
            ec.Job(unit="step", steps_per_epoch=wrong)
    job = make_job(until=10)
    with pytest.raises(InvalidArgumentError, match=r"max_epochs\(3\) ends no job that counts steps"):
        job.stop_when(ec.stop.nan("loss") | ec.stop.max_epochs(3))
    with pytest.raises(InvalidArgumentError, match="counts steps"):
        ec.epoch_limiter(job, 3)
    seen: list[int] = []
    job.stop_when(lambda ctx: bool(seen.append(ctx.step)))
    with pytest.raises(InvalidArgumentError, match=r"max_steps\(3\) ends no job that counts epochs"):
        ec.Job(stop_conditions=[ec.stop.max_steps(3)])
    run(tmp_path, job)
    assert seen == [10]

    of_epochs = ec.Job(stop_conditions=[ec.stop.max_epochs(12)])
    of_epochs.epoch(lambda ws: None)
    with pytest.raises(InvalidArgumentError, match="step 10 is of a job that counts steps"):
        run(tmp_path, of_epochs)
    assert saved_in(tmp_path) == [0, 10]
    runner, _ = run(tmp_path, of_epochs, resume_from_epoch=10)
    assert runner.result.epoch == 12


@pytest.mark.parametrize(("secs", "saved"), [(3600.0, [0, 5]), (1e-9, [0, 1, 2, 3, 4, 5])])
def test_saving_by_time(tmp_path: pathlib.Path, secs: float, saved: list[int]) -> None:
    """The first epoch and the last are saved, and those that end long enough after the last save."""
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(5)])
    job.init(lambda ws: ws.update(steps=[]))
    job.epoch(lambda ws: None)
    runner, _ = run(tmp_path, job, save_every_secs=secs)
    assert saved_in(tmp_path) == saved
    assert not runner.result.failed_saves
    with pytest.raises(InvalidArgumentError, match="save_every_secs"):
        ec.JobRunner(job, save_every_secs=0.0)


def test_saving_by_time_saves_a_preempted_epoch(tmp_path: pathlib.Path) -> None:
    """Whatever the time."""
    runner, steps = run(tmp_path, make_job(until=50, preempted_in=25), save_every_secs=3600.0)
    assert runner.result.preempted
    assert saved_in(tmp_path) == [0, 30]
    assert steps == list(range(26))


def test_a_dropped_epoch_after_one_that_was_not_to_be_saved(tmp_path: pathlib.Path) -> None:
    """Nothing has failed: the exit code tells a scheduler to start the run again, from the epoch that was saved."""
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(9)])
    job.init(lambda ws: ws.update(steps=[]))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        if ws.epoch == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            while not ws.should_stop():
                pass

    result = job.run(tmp_path, save_every_secs=3600.0, deadline_secs=0.0)
    assert (result.epoch, result.last_committed_epoch, result.unsaved, result.exit_code) == (2, 0, "", 75)


def test_views_speak_of_steps(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what a job that counts steps has saved, and of anything else where they are told to."""
    run(tmp_path / "a", make_job(until=30))
    with ec.CheckpointManager(tmp_path / "b") as manager:
        for step in (1000, 2000):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics={"loss": 1.0})
    for directory, unit, arguments in (("a", None, []), ("b", "step", ["--unit", "step"])):
        seen = ec.inspect(tmp_path / directory, unit=unit)
        first, second = [row.epoch for row in seen.epochs()][-2:]
        shown = [seen.to_text(200), seen.latest.to_text(200), seen.diff(first, second).to_text(200), seen.to_html()]
        shown.append(seen.metrics().to_text(200))
        for command in (["ls"], ["show"], ["watch", "--timeout", "0s"]):
            main([*command, str(tmp_path / directory), *arguments])
            shown.append(capsys.readouterr().out)
        for text in shown:
            assert "epoch" not in text.replace("epochckpt", "").replace(str(tmp_path), "")
            assert "step" in text
    assert "2 epochs" in ec.inspect(tmp_path / "b").to_text(200)
    with pytest.raises(InvalidArgumentError, match="unit 'batch' is not known"):
        ec.inspect(tmp_path / "a", unit="batch")
