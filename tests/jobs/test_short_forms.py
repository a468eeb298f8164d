"""Short forms of a run: a runner that makes its own session, and a job that makes its own manager and runner."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
from typing import Any

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError, SaveError


def counting_job(epochs: int | None) -> ec.Job:
    job = ec.Job(stop_conditions=[] if epochs is None else [ec.stop.max_epochs(epochs)])
    job.init(lambda ws: ws.update(total=0))
    job.epoch(lambda ws: ws.update(total=ws["total"] + ws.epoch))
    return job


def test_a_runner_makes_the_session_that_it_needs() -> None:
    """Each run its own; `workspace` is that of the last one. Several processes: `job_runs.one_raises`."""
    runner = ec.JobRunner(counting_job(2))
    with pytest.raises(InvalidArgumentError, match="no run has begun"):
        _ = runner.workspace
    assert runner.train() == 2
    first = runner.workspace
    assert (first.node, first["total"]) == ("process_0", 3)
    assert runner() == 2
    assert runner.workspace is not first
    session = ec.LocalSession()
    runner.train(session)
    assert runner.workspace is session.workspace()
    with pytest.raises(InvalidArgumentError, match="expected a session"):
        runner.train("run")  # pyright: ignore[reportArgumentType]
    assert runner.workspace is session.workspace()


def test_the_workspace_of_several_nodes_is_that_of_all() -> None:
    """As `session.root`; a job that was compiled for a session gets one."""
    with ec.Job() as job:
        for node in ("east", "west"):
            ec.Task(lambda ws: ws.update(name=ws.node), node=node)
    ec.epoch_limiter(job, 1)
    job.compile(ec.LocalSession)
    runner = ec.JobRunner(job)
    runner.train()
    assert [runner.workspace[f"{node}/name"] for node in ("east", "west")] == ["east", "west"]

    class Own(ec.LocalSession):
        pass

    job.compile(Own)
    with pytest.raises(InvalidArgumentError, match="compiled for Own: make one"):
        runner.train()


def test_a_job_runs_in_a_directory_and_resumes_from_it(directory: str) -> None:
    """With the manager's options and the runner's arguments; without a directory nothing is saved."""
    assert ec.run(counting_job(2), directory).epoch == 2
    session = ec.LocalSession()
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    result = ec.run(counting_job(4), directory, session=session, options=options, resume="must")
    assert (result.resumed_from, result.epoch, session.workspace()["total"]) == (2, 4, 10)
    with ec.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [4]
    assert ec.run(counting_job(3)).last_committed_epoch is None
    with pytest.raises(TypeError, match="no_such_argument"):
        ec.run(counting_job(1), no_such_argument=1)


class Away(ec.metadata.JsonMetadataHandler):
    """Says that storage cannot be reached."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return False


@pytest.mark.parametrize(("what", "code"), [("finished", 0), ("unsaved", 74), ("preempted", 75)])
def test_a_job_ends_the_program_with_its_exit_code(tmp_path: pathlib.Path, what: str, code: int) -> None:
    """When that is asked for; else it returns, or raises."""
    job = counting_job(3)
    if what == "preempted":
        job.epoch(lambda ws: os.kill(os.getpid(), signal.SIGTERM) if ws.epoch == 2 else None)
    arguments: dict[str, Any] = {"metadata_handler": Away()} if what == "unsaved" else {}
    with pytest.raises(SystemExit) as ended:
        ec.run(job, tmp_path / "run", exit=True, **arguments)
    assert ended.value.code == code
    if what == "unsaved":
        with pytest.raises(SaveError, match="it is the last of the run"):
            ec.run(job, tmp_path / "run", **arguments)
    else:
        with ec.CheckpointManager(tmp_path / "run") as manager:
            assert manager.latest_step() == (3 if what == "finished" else 2)


@pytest.mark.parametrize("condition", [None, ec.stop.preempted, ec.stop.file_exists("done")])
def test_a_job_without_a_stop_condition_says_that_it_trains_for_ever(
    caplog: pytest.LogCaptureFixture, condition: Any
) -> None:
    """Once; preemption ends every job, and is none."""
    job = counting_job(None)
    if condition is not None:
        job.stop_when(condition)
    job.epoch(lambda ws: os.kill(os.getpid(), signal.SIGTERM) if ws.epoch == 2 else None)
    with caplog.at_level(logging.INFO, logger="absl"):
        result = ec.run(job)
    assert (result.preempted, result.epoch) == (True, 2)
    said = [record for record in caplog.records if "no stop condition" in record.getMessage()]
    assert [record.levelname for record in said] == (["WARNING"] if condition in (None, ec.stop.preempted) else [])
