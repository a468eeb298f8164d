"""The exit code of a run tells a scheduler whether to start it again, whatever happened to its saves."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

import epochckpt as ec
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.processes import ROOT, Process, reserved_port, start_processes
from tests.support.taps import calls_of, eventually

TIMEOUT_SECS = 120.0
ENDLESS = 10_000_000
PYTHONPATH = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))


def job_of(epochs: int, epoch: Callable[[ec.Workspace], None] = lambda ws: None) -> ec.Job:
    job = ec.Job()
    job.init(lambda ws: ws.update(sum=0))
    job.epoch(epoch)
    ec.epoch_limiter(job, epochs)
    return job


def code_of(job: ec.Job, directory: pathlib.Path, **arguments: Any) -> object:
    """The exit code of a program that is `ec.run(job, directory, exit=True)`."""
    with pytest.raises(SystemExit) as end:
        ec.run(job, directory, exit=True, progress=False, **arguments)
    return end.value.code


def taken_over(directory: pathlib.Path) -> Callable[[ec.Workspace], None]:
    """A task in whose first epoch another run begins to write to the directory."""

    def take_over(ws: ec.Workspace) -> None:
        with ec.CheckpointManager(directory) as newer:
            newer.claim()

    return take_over


def test_a_run_that_a_newer_one_has_taken_over_from_ends_with_76(tmp_path: pathlib.Path) -> None:
    """Its failed saves are in its result; closing the manager does not raise them, which would be exit code 1."""

    with ec.CheckpointManager(tmp_path) as manager:  # README's form
        runner = ec.JobRunner(job_of(10, taken_over(tmp_path)), manager)
        runner.train(ec.LocalSession())
    assert runner.result.exit_code == 76

    assert code_of(job_of(10, taken_over(tmp_path)), tmp_path) == 76


def test_of_two_runs_that_start_at_the_same_moment_the_older_one_ends_with_76(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """It has trained nothing, not even run init."""
    ran: list[str] = []
    job = job_of(3)
    job.init(lambda ws: ran.append("init"))
    with ec.CheckpointManager(tmp_path) as newer, ec.CheckpointManager(tmp_path) as older:
        where = calls_of(older, lambda path: "unclaimed" in path)
        between = faults.before(Store.rename, lambda call: newer.claim(), where=where)
        runner = ec.JobRunner(job, older)
        assert runner.train(ec.LocalSession()) == 0
        assert between.hits
    assert runner.result.exit_code == 76
    assert "a newer run has taken over" in runner.result.stop_reason
    assert ran == []


@pytest.mark.parametrize("mount_point", [False, True], ids=["moved", "unmounted"])
@pytest.mark.parametrize("epochs", [3, 30])
def test_a_directory_that_goes_away_is_not_taken_for_a_newer_run(
    tmp_path: pathlib.Path, mount_point: bool, epochs: int
) -> None:
    """The run ends with 74, after the failures that it may have in a row; once the directory is back it goes on."""
    directory, away = tmp_path / "run", tmp_path / "away"

    def move(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            directory.rename(away)
            if mount_point:
                directory.mkdir()

    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job_of(epochs, move), manager, raise_if_not_saved=False)
        runner.train(ec.LocalSession())
    assert runner.result.exit_code == 74
    assert "has gone away while this run saves there" in runner.result.unsaved
    assert ("something else" if mount_point else "nothing") + " lies at its path" in runner.result.unsaved

    if mount_point:
        directory.rmdir()
    away.rename(directory)
    assert code_of(job_of(4), directory) == 0


def test_a_directory_that_comes_back_is_saved_to_again(tmp_path: pathlib.Path) -> None:
    """A failed save ends no run, and nobody has taken the directory over meanwhile."""
    directory, away = tmp_path / "run", tmp_path / "away"

    def move(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            directory.rename(away)
        if ws.epoch == 4:
            away.rename(directory)

    assert code_of(job_of(5, move), directory) == 0
    with ec.CheckpointManager(directory) as manager:
        assert manager.latest_step() == 5


# -- real processes ----------------------------------------------------------------------------------------------------


def program(form: str, directory: pathlib.Path, until: int) -> list[str]:
    """A program that trains until so many epochs, or steps, are done, and saves often."""
    if form != "train_cluster.py":
        return ["-m", "tests.support.exit_job", form, str(directory), str(until)]
    flags = [f"--ckpt_directory={directory}", f"--steps={until}", "--steps_per_epoch=20", "--batch_size=8"]
    return [f"examples/{form}", *flags, "--ckpt_save_every_secs=0.01"]


def newest(directory: pathlib.Path) -> int:
    """The newest epoch; -1 if there is none."""
    if not directory.exists():
        return -1
    with ec.CheckpointManager(directory) as manager:
        return max(manager.all_steps(), default=-1)


def begin_to_save(directory: pathlib.Path, process: Process) -> None:
    """Waits until the process has saved more than there is now."""
    before = newest(directory)
    assert eventually(lambda: process.wait_for_exit(0.0) or newest(directory) > before)
    assert process.returncode is None, process.output()


def take_over(directory: pathlib.Path) -> None:
    with ec.CheckpointManager(directory) as newer:
        newer.claim()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["README.md", "ec.run", pytest.param("train_cluster.py", marks=pytest.mark.long)])
def test_the_exit_codes_of_programs(tmp_path: pathlib.Path, form: str) -> None:
    """75 after SIGTERM, 76 after a takeover, 74 when the directory has gone, and 0 at the end, one after the other."""
    directory = tmp_path / "run"
    for code in (75, 76, 74):
        with start_processes(program(form, directory, ENDLESS), 1, env={"PYTHONPATH": PYTHONPATH}) as (process,):
            begin_to_save(directory, process)
            if code == 75:
                process.send_signal(signal.SIGTERM)
            elif code == 76:
                take_over(directory)
            else:
                directory.rename(tmp_path / "away")
                process.send_signal(signal.SIGTERM)
            assert process.wait_for_exit(TIMEOUT_SECS), process.output()
            assert process.returncode == code, process.output()
    (tmp_path / "away").rename(directory)
    with start_processes(program(form, directory, newest(directory) + 20), 1, env={"PYTHONPATH": PYTHONPATH}) as (
        process,
    ):
        assert process.wait_for_exit(TIMEOUT_SECS), process.output()
        assert process.returncode == 0, process.output()


@pytest.mark.slow
def test_all_processes_of_a_job_that_was_taken_over_from_end_with_76(tmp_path: pathlib.Path) -> None:
    """As the pods of the example do."""
    directory = tmp_path / "run"
    command = program("train_cluster.py", directory, ENDLESS)
    with contextlib.ExitStack() as stack:
        address = f"localhost:{stack.enter_context(reserved_port())}"
        env = {"COORDINATOR": address, "NUM_PROCESSES": "2", "PYTHONPATH": PYTHONPATH}
        pods = [
            stack.enter_context(start_processes(command, 1, env={**env, "JOB_COMPLETION_INDEX": str(index)}))[0]
            for index in range(2)
        ]
        begin_to_save(directory, pods[0])
        take_over(directory)
        for pod in pods:
            assert pod.wait_for_exit(TIMEOUT_SECS), pod.output()
        assert [pod.returncode for pod in pods] == [76, 76], "\n".join(pod.output() for pod in pods)
