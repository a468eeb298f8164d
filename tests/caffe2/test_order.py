"""Caffe2's order of calls, the groups that its verbs join, and the attributes of its runner."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import epochckpt as ec
from epochckpt import caffe2, errors
from tests.support.caffe2_order_jobs import follow, job_of
from tests.support.processes import run_worker


def single(directory: Any, node: str = "a") -> caffe2.CheckpointManager:
    return caffe2.CheckpointManager(directory, node, "epochckpt")


def multi(directory: Any) -> caffe2.MultiNodeCheckpointManager:
    return caffe2.MultiNodeCheckpointManager(directory, "epochckpt")


@pytest.mark.parametrize(
    ("make", "nodes"),
    [(make, nodes) for make in (single, multi) for nodes in ([], ["trainer:0"])] + [(multi, ["b", "aaa"])],
)
def test_the_order_in_the_docstring_runs_as_it_stands(tmp_path: pathlib.Path, make: Any, nodes: list[str]) -> None:
    """From scratch and from an epoch, for a job that names nodes and one that names none."""
    lengths = [len(node) for node in nodes or ["process_0"]]
    for user_epoch, more in ((None, 0), (1, 1)):
        job, session, manager = job_of(nodes), ec.LocalSession(), make(tmp_path)
        assert follow(job, manager, session, user_epoch) == [n + more for n in lengths]
        session.run(job.epoch_group)
        session.run(manager.save(1))


@pytest.mark.slow
def test_the_order_in_the_docstring_runs_in_processes(tmp_path: pathlib.Path) -> None:
    """The session takes the nodes from the first group; what Caffe2's managers cannot save is refused after init."""
    directories = [str(tmp_path / "named"), str(tmp_path / "unnamed")]
    for directory in directories:
        pathlib.Path(directory).mkdir()
    found = run_worker("tests.support.caffe2_order_jobs:in_processes", {"directories": directories}, 2)
    for number, one in enumerate(found):
        length = [1, 3][number]
        assert one["totals"] == [[length], [length], [9], [9]]
        assert one["loaded"]
        assert "Name all 2, in the order of the processes: session.open([…])" in one["one of two"]
        assert one["trained"] == []
        assert "blob 'wide' has arrays that are spread over processes" in one["spread"]
    assert {p.name for p in (tmp_path / "named" / "1").iterdir()} == {"aaa", "b"}
    assert not (tmp_path / "named" / "2").exists()


def test_verbs_join_the_group_that_surrounds_them(tmp_path: pathlib.Path) -> None:
    """As tasks do in Caffe2; a manager of many nodes gives a group of its own."""
    session, manager = ec.LocalSession(), single(tmp_path)
    session.workspace()["total"] = 7
    with ec.TaskGroup() as group:
        made = [manager.init(), manager.save(0), manager.check_db_exists(0), manager.load(0)]
    assert group.tasks() == made
    session.run(group)
    assert made[2].outputs()[0].fetch() is True
    with ec.Job() as job:
        task = manager.save(1)
    assert job.epoch_group.tasks() == [task]
    many = multi(tmp_path)
    with ec.TaskGroup() as around:
        inner = many.init(["a", "b"])
        many.save(0)
    assert (len(around.tasks()), len(inner.tasks())) == (0, 2)


@pytest.mark.parametrize("make", [single, multi])
def test_a_runner_adds_nothing_to_the_job_that_surrounds_it(tmp_path: pathlib.Path, make: Any) -> None:
    """Its own saves and loads are tasks, too."""
    for epochs, named in ((2, None), (3, 1)):
        with job_of([]) as job:
            ec.epoch_limiter(job, epochs)
            before = job.epoch_group.tasks()
            runner, session = ec.JobRunner(job, make(tmp_path), named), ec.LocalSession()
            runner.train(session)
            assert runner.load_blobs_from_checkpoints(["total"], 1, session)
        assert job.epoch_group.tasks() == before
        assert runner.result.failed_saves == ()


# -- the runner's attributes -------------------------------------------------------------------------------------------


def test_what_is_assigned_to_a_runner_counts_from_the_next_call(tmp_path: pathlib.Path) -> None:
    """The manager and the epoch to resume from, as in Caffe2; nonsense is refused, and so is any other attribute."""
    job = job_of([])
    ec.epoch_limiter(job, 2)
    runner = ec.JobRunner(job)
    assert runner.train(ec.LocalSession()) == 2
    assert runner.result.last_committed_epoch is None
    runner.checkpoint_manager = multi(tmp_path)
    runner.train(ec.LocalSession())
    assert runner.result.last_committed_epoch == 2
    runner.resume_from_epoch = 1
    runner.train(ec.LocalSession())
    assert (runner.result.resumed_from, runner.result.epoch) == (1, 2)
    for name, value, words in (
        ("checkpoint_manager", None, "resume_from_epoch=1 contradicts no checkpoint_manager"),
        ("checkpoint_manager", object(), "checkpoint_manager must be"),
        ("resume_from_epoch", -1, "epoch"),
        ("job", None, "runs an epochckpt.Job"),
        ("upload_task_group_builder", object(), "needs a method build"),
    ):
        good = getattr(runner, name)
        setattr(runner, name, value)
        with pytest.raises(errors.InvalidArgumentError, match=words):
            runner.train(ec.LocalSession())
        setattr(runner, name, good)
    with pytest.raises(AttributeError, match=r"JobRunner\.deadline_secs cannot be assigned; job, checkpoint_manager"):
        runner.deadline_secs = 3.0


def test_an_upload_without_a_manager_is_refused(tmp_path: pathlib.Path) -> None:
    """It would never be built."""
    with pytest.raises(errors.InvalidArgumentError, match="nothing to upload without a checkpoint_manager"):
        ec.JobRunner(job_of([]), upload_task_group_builder=ec.CopyUpload(tmp_path))
