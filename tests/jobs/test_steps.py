"""Jobs that count steps, and saving by time."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import signal
import uuid
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import numpy

import epochckpt as ec
from epochckpt.cli.main import main
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError
from tests.support.passing_time import passing
from tests.support.taps import fail_writes


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


def run(directory: pathlib.Path | str, job: ec.Job, **arguments: Any) -> tuple[ec.JobRunner, list[int]]:
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


def test_an_epoch_that_the_policies_leave_out_does_not_put_off_the_next_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of epochs of one day every 4th is saved where the manager wants that and the runner one after 3 days."""
    passes = passing(monkeypatch)
    day = 24 * 3600.0

    def train(ws: ec.Workspace) -> None:
        passes(day)

    job = ec.Job(stop_conditions=[ec.stop.max_epochs(13)])
    job.init(lambda ws: ws.update(steps=[]))
    job.epoch(train)
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    storage = ec.StorageOptions(save_timeout_secs=1000 * day)
    with ec.CheckpointManager(tmp_path, options=options, storage=storage) as manager:
        ec.JobRunner(job, manager, save_every_secs=3 * day).train(ec.LocalSession())
    assert saved_in(tmp_path) == [0, 4, 8, 12, 13]


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

    result = ec.run(job, tmp_path, save_every_secs=3600.0, deadline_secs=0.0)
    assert (result.epoch, result.last_committed_epoch, result.unsaved, result.exit_code) == (2, 0, "", 75)


def test_a_dropped_epoch_is_no_failed_save(tmp_path: pathlib.Path) -> None:
    """The run was preempted, and is to be started again; nothing of the epoch was to be saved."""
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(9)])
    job.init(lambda ws: ws.update(steps=[]))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while not ws.should_stop():
                pass

    class AwayInTheSecond(ec.metadata.JsonMetadataHandler):
        def cp_accessible(self, epoch: int | None = None) -> bool:
            return epoch != 2

    result = ec.run(
        job,
        tmp_path,
        metadata_handler=AwayInTheSecond(),
        max_consecutive_save_failures=0,
        deadline_secs=0.0,
    )
    assert (result.epoch, result.last_committed_epoch, result.failed_saves) == (1, 1, ())
    assert (result.stop_reason, result.unsaved, result.exit_code) == ("preempted", "", 75)


def make_heavy_job(until: int) -> ec.Job:
    """Another blob of it is an array of a file's own."""
    job = make_job(until)
    job.init(lambda ws: ws.update(w=jnp.ones(50_000)))
    return job


def damage(folder: pathlib.Path) -> None:
    next(folder.rglob("*.safetensors")).write_bytes(b"")


EPOCH = re.compile(r"\bepochs?\b(?!\.json)")
NUMBERED = re.compile(r"\bepochs? \d")


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
        shown += [seen.metrics().to_text(200), seen.du().to_text(200), seen.goodput().to_text(200)]
        for command in (["ls"], ["ls", "--no-check"], ["show"], ["du"], ["goodput"], ["watch", "--timeout", "0s"]):
            main([*command, str(tmp_path / directory), *arguments])
            shown.append(capsys.readouterr().out)
        for text in shown:
            assert not EPOCH.search(text), text
            assert "step" in text
    assert "2 epochs" in ec.inspect(tmp_path / "b").to_text(200)
    with pytest.raises(InvalidArgumentError, match="unit 'batch' is not known"):
        ec.inspect(tmp_path / "a", unit="batch")


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [False, True])
def test_commands_speak_of_steps(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], bucket: bool) -> None:
    """Each command, of what a job that counts steps has saved, on disk and in a bucket; errors name a checkpoint."""
    source = f"memory://{uuid.uuid4().hex}" if bucket else str(tmp_path / "run")
    copy, file = tmp_path / "copy", tmp_path / "weights.safetensors"
    run(source, make_heavy_job(until=50))
    numpy.save_file({"w": np.ones(3)}, file)
    if not bucket:
        damage(tmp_path / "run" / "50")
    capsys.readouterr()

    commands: list[tuple[list[object], str]] = [
        (["ls", source, "--no-check"], "step"),
        (["show", source, 30], "step 30"),
        (["stat", source, 30], ""),
        (["diff", source, 20, 30], "step 20 → 30"),
        (["verify", source], "step 30"),
        (["verify", source, "--repair-view"], "step 30"),
        (["watch", source, "--timeout", "0s"], "step 30 present"),
        (["du", source], "step"),
        (["goodput", source], "step"),
        (["gc", source], "can be removed"),
        (["export", source, 30, tmp_path / "out", "--format", "orbax"], "step 30 as orbax"),
        (["import", file, source], "import step 51"),
        (["import", file, tmp_path / "new", "--unit", "step"], "import step 0"),
        (["cp", source, copy, 0, 10, 20, "--yes"], "copy 3 checkpoints"),
        (["cp", source, copy], "3 checkpoints are there already"),
        (["rollback", copy, 10], "the newest step is 10 then"),
        (["rollback", copy, 10, "--yes"], "set aside 1 checkpoint,"),
        (["ls", copy], "step"),
        (["gc", copy, "--rolled-back", "--older-than", "11min"], "stays"),
        (["rm", copy, 0], "the newest step is 10 then"),
        (["rm", copy, 0, 10, "--yes"], "no checkpoint is left then"),
        (["show", source, 7], "no checkpoint 7; near: 0, 10"),
        (["rollback", source, 7], "no checkpoint 7"),
        (["import", file, source, "--epoch", 30], "checkpoint 30 exists"),
    ]
    if bucket:
        commands += [(["repair", source], "nothing is to be repaired")]
    else:  # what is damaged
        commands += [(["show", source, 50], "step 50"), (["rollback", source, 50], "step 50 is damaged")]
    wrong = list[tuple[list[object], str]]()
    for command, expected in commands:
        main(list(map(str, command)))
        said = "".join(capsys.readouterr())
        assert expected in said, command
        wrong += [(command, line) for line in said.splitlines() if EPOCH.search(line)]
    assert not wrong


@pytest.mark.usefixtures("faults")
def test_log_and_errors_speak_of_steps_and_checkpoints(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through saves, retention, a restore, a damaged checkpoint, saves and tasks that fail, and going back."""
    caplog.set_level(logging.INFO, "absl")
    errors: list[BaseException] = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(EpochCheckpointError) as caught:
            call()
        errors.append(caught.value)

    def fail(ws: ec.Workspace) -> None:
        raise ZeroDivisionError(ws.epoch)

    other = ocp.args.Composite(w=ocp.args.StandardSave(jnp.zeros(50_000)))
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        runner, session = ec.JobRunner(make_heavy_job(until=60), manager), ec.LocalSession()
        runner.train(session)
        runner.save_checkpoints(60, session)
        runner.load_blobs_from_checkpoints(["steps"], 60, session)
        tap = fail_writes(manager)
        runner.save_checkpoints(80, session)
        manager.save(90, args=other, force=True)
        refused(manager.wait_until_finished)
        tap.remove()
        for wrong in (
            lambda: manager.restore(7),
            lambda: manager.save(60, args=other, force=True),
            lambda: manager.restore(60, args=ocp.args.Composite(w=ocp.args.StandardRestore({"a": jnp.ones(3)}))),
            lambda: manager.restore_leaves(60, ["nothing"]),
            lambda: manager.rollback_to(7),
        ):
            refused(wrong)
    for add in (lambda job: job.epoch(fail), lambda job: job.stop_when(ec.stop.nan("x")), lambda job: job.setup(fail)):
        add(job := make_heavy_job(until=90))
        refused(lambda job=job: run(tmp_path, job))
    damaged = max(saved_in(tmp_path))
    damage(tmp_path / str(damaged))
    runner, _ = run(tmp_path, make_heavy_job(until=90))
    with ec.CheckpointManager(tmp_path) as manager:
        manager.rollback_to(80)
        manager.delete(80)

    said = [record.getMessage() for record in caplog.records]
    for part in (
        "checkpoint 60 committed to",
        "checkpoint 0 of",
        "checkpoint 60 restored from",
        f"checkpoint {damaged} is damaged",
        "step 80 could not be saved: ",
    ):
        assert any(part in text for text in said), (part, [t for t in said if "could not" in t])
    texts = [text for error in errors for text in [str(error), *getattr(error, "__notes__", ())]]
    assert any("checkpoint 90 was not committed" in text for text in texts), texts
    assert any("failed in step 70: ZeroDivisionError" in text for text in texts), texts
    assert any("stop condition nan('x'), step 70: there is no metric 'x'" in text for text in texts), texts
    assert not [text for text in [*said, *texts] if NUMBERED.search(text)]
