"""Names of blobs that no node has, wherever a job names one: refused as early as it is certain, with the near names."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any

import numpy as np
import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError, MismatchError


def job_of(epochs: int, **blobs: Any) -> ec.Job:
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])
    job.init(lambda ws: ws.update(blobs or {"params": 1.5, "cache": 2}))
    job.epoch(lambda ws: None)
    return job


def test_a_target_is_refused_before_anything_is_trained(tmp_path: pathlib.Path) -> None:
    """Once init has run; epoch 0 is not saved."""
    job = job_of(1)
    job.setup(lambda ws: ws.target("parms", 0.0))
    trained = list[int]()
    job.epoch(lambda ws: trained.append(ws.epoch))
    with pytest.raises(InvalidArgumentError, match=r"ws\.target\('parms', …\): no node has .* near: 'params'"):
        ec.run(job, tmp_path / "run")
    assert (trained, [name for name in os.listdir(tmp_path / "run") if name.isdigit()]) == ([], [])


def test_a_target_may_be_that_of_another_node(tmp_path: pathlib.Path) -> None:
    """Setup runs on every node, and one of them makes the blob."""
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(1)])
    ec.Task(lambda ws: ws.update(total=0), group=job.init_group, node="trainer")
    ec.Task(lambda ws: ws.update(reader=0), group=job.init_group, node="reader")
    job.setup(lambda ws: ws.target("reader", reshard=lambda states, old, new: states * new))
    job.epoch(lambda ws: None)
    assert ec.run(job, tmp_path / "run", include=["reader", "total"], exclude=["reader"]).epoch == 1


def test_a_target_of_a_resumed_run_is_answered_with_the_near_names(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error if it has none of them, else a warning: the epoch may be older than the blob."""
    ec.run(job_of(1), tmp_path / "run")
    job = job_of(2)
    job.setup(lambda ws: ws.target("parms", 0.0))
    with pytest.raises(InvalidArgumentError, match=r"of 'parms' near: 'params'.*or correct the names"):
        ec.run(job, tmp_path / "run")
    job.setup(lambda ws: ws.target("params", 0.0))
    with caplog.at_level(logging.WARNING):
        assert ec.run(job, tmp_path / "run").epoch == 2
    assert "of 'parms' near: 'params'" in caplog.text


@pytest.mark.parametrize("pattern", ["parms", "parm*"])
def test_include_is_refused_when_init_has_run(tmp_path: pathlib.Path, pattern: str) -> None:
    """Later blobs are not checkpointed, so that it can match nothing any more."""
    with pytest.raises(InvalidArgumentError, match=r"include=\['parm.*no node has such a blob when .* near: 'params'"):
        ec.run(job_of(1), tmp_path / "run", include=["cache", pattern])


def test_include_of_a_resumed_run_may_name_a_blob_that_its_epoch_lacks(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless nothing at all would be saved."""
    ec.run(job_of(1), tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        assert ec.run(job_of(2), tmp_path / "run", include=["params", "parms", "cache"]).epoch == 2
    assert "include=['parms']: no node has such a blob after epoch 1" in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"include=\['parms'\].* after epoch 2; .*'params'"):
        ec.run(job_of(3), tmp_path / "run", include=["parms"])


def test_exclude_is_warned_of_after_the_first_epoch(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before: it may name what an epoch makes, and be right nevertheless: a later epoch may make it."""
    job = job_of(3)
    job.epoch(lambda ws: ws.update(scratch=1))
    with caplog.at_level(logging.WARNING):
        assert ec.run(job, tmp_path / "run", unsaved_blobs="error", exclude=["scratch", "none_of_them*"]).epoch == 3
        assert "no node has such a blob" not in caplog.text
        assert ec.run(job_of(2), tmp_path / "new", exclude=["cahce"]).epoch == 2
    assert "exclude=['cahce']: no node has such a blob after the first epoch of this run; near: 'cache'" in caplog.text


@pytest.mark.parametrize(("name", "near"), [("dnoe", "near: 'done'"), ("trainer/dnoe", "there are: 'cache', 'done'")])
def test_a_condition_on_a_blob_that_no_node_has_is_refused_after_the_first_epoch(name: str, near: str) -> None:
    """By that time its tasks have made it, if they do at all."""
    job = job_of(9)
    job.epoch(lambda ws: ws.update(done=False))
    job.stop_when(name)
    with pytest.raises(InvalidArgumentError, match=rf"stop condition blob '{name}'.*no node has it .*; {near}"):
        ec.run(job)


def test_the_output_of_a_task_that_does_not_exist_is_answered_with_the_near_names() -> None:
    """Such a task belongs to no condition yet."""
    task = ec.Task(lambda ws: ws.update(done=True), outputs="dnoe")
    with pytest.raises(InvalidArgumentError, match=r"was to give blob 'dnoe', .*; near: 'done'"):
        ec.LocalSession().run(task)


class Broken(ec.stop.Condition):
    """A user's own condition, of which one method raises."""

    def __init__(self, method: str):
        self._method = method

    def __repr__(self) -> str:
        return f"Broken({self._method})"

    def _raise_in(self, method: str) -> None:
        if method == self._method:
            raise ZeroDivisionError

    def __call__(self, ctx: ec.stop.Context) -> bool:
        self._raise_in("call")
        return ctx.epoch >= 2

    def holds(self, ctx: ec.stop.Context) -> bool:
        self._raise_in("holds")
        return ctx.epoch >= 2

    def get_state(self) -> Any:
        self._raise_in("get_state")
        return None


@pytest.mark.parametrize("compose", [lambda c: c, lambda c: c | ec.stop.nan("loss"), lambda c: ec.stop.preempted & c])
def test_a_condition_of_ones_own_that_raises_is_named(compose: Any) -> None:
    """Once, with its node, also as a part of another condition; the error's type stays the user's."""
    job = job_of(1)
    job.epoch(lambda ws: {"loss": 1.0})
    job.stop_when(compose(Broken("call")))
    with pytest.raises(ZeroDivisionError) as caught:
        ec.run(job)
    (note,) = [note for note in caught.value.__notes__ if "stop condition" in note]
    assert note == "in stop condition Broken(call), epoch 1, node process_0"


def test_a_condition_that_raises_when_a_run_is_started_again_is_named(tmp_path: pathlib.Path) -> None:
    """It is asked whether training is over before anything is trained."""
    ec.run(job_of(1), tmp_path / "run")
    job = job_of(5)
    job.stop_when(Broken("holds"))
    with pytest.raises(ZeroDivisionError) as caught:
        ec.run(job, tmp_path / "run")
    assert "in stop condition Broken(holds), epoch 1, node process_0" in caught.value.__notes__


def test_a_condition_whose_state_cannot_be_had_is_named(tmp_path: pathlib.Path) -> None:
    """Its state is saved with every epoch."""
    job = job_of(5)
    job.stop_when(Broken("get_state"))
    with pytest.raises(ZeroDivisionError) as caught:
        ec.run(job, tmp_path / "run")
    assert "in the state of stop condition Broken(get_state)" in caught.value.__notes__


def test_an_error_of_reshard_names_the_blob(tmp_path: pathlib.Path) -> None:
    """Too few states, and one that raises: as `ws.target`, not as an item."""

    def nodes(count: int, reshard: Any = None) -> ec.Job:
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(1)])
        for k in range(count):
            ec.Task(lambda ws, k=k: ws.update({"the reader": k}), group=job.init_group, node=f"n{k}")
        job.setup(lambda ws: ws.target("the reader", reshard=reshard))
        job.epoch(lambda ws: None)
        return job

    ec.run(nodes(2), tmp_path / "run")
    with pytest.raises(InvalidArgumentError, match=r"blob 'the reader': reshard returned 2 states for 3 nodes"):
        ec.run(nodes(3, lambda states, old, new: states), tmp_path / "run")
    with pytest.raises(ZeroDivisionError) as caught:
        ec.run(nodes(3, lambda states, old, new: 1 // 0), tmp_path / "run")
    assert "in ws.target('the reader', reshard=…), which makes 3 states of 2" in caught.value.__notes__


def test_a_blob_that_a_node_never_had_is_not_missed_by_its_successor(tmp_path: pathlib.Path) -> None:
    """As many nodes as before, one of another name: it takes the place of one that saved none."""

    def of(second: str, epochs: int) -> ec.Job:
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])
        ec.Task(lambda ws: ws.update(reader=1), group=job.init_group, node="a")
        ec.Task(lambda ws: ws.update(total=0), group=job.init_group, node=second)
        job.epoch(lambda ws: None)
        return job

    ec.run(of("b", 1), tmp_path / "run")
    job, session = of("c", 2), ec.LocalSession()
    ec.run(job, tmp_path / "run", session=session)
    assert dict(session.workspace("a")) == {"reader": 1}
    assert dict(session.workspace("c")) == {"total": 0}


def test_a_target_that_does_not_fit_is_named(tmp_path: pathlib.Path) -> None:
    """Beside the table of leaves: the words for a restore by hand are not those of a job."""
    ec.run(job_of(1, params={"w": np.ones(3)}), tmp_path / "run")
    job = job_of(2)
    job.setup(lambda ws: ws.target("params", {"v": np.ones(3)}))
    with pytest.raises(MismatchError) as caught:
        ec.run(job, tmp_path / "run")
    assert any("blob 'params' is ws.target('params', …)" in note for note in caught.value.__notes__)


def test_a_single_blob_to_load_that_an_epoch_lacks_is_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out, as in Caffe2."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        runner = ec.JobRunner(job_of(1), manager)
        runner.train()
        session = ec.LocalSession()
        with caplog.at_level(logging.WARNING):
            assert runner.load_blobs_from_checkpoints(["params", "process_0/cache", "cahce"], 1, session)
    assert dict(session.workspace()) == {"params": 1.5, "cache": 2}
    assert [r.getMessage() for r in caplog.records] == ["checkpoint 1 has no blob 'cahce'; near: 'cache'"]
