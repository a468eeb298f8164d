"""A job whose functions changed between two starts: which blobs are saved, and what is said of those that are not."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import epochckpt as ec
from epochckpt import _renaming, errors
from epochckpt.errors import InvalidArgumentError, TaskError, UnsupportedError
from epochckpt.jobs import blobs


def counting_job(epochs: int) -> ec.Job:
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])
    job.init(lambda ws: ws.update(total=0))
    job.epoch(lambda ws: ws.update(total=ws["total"] + 1))
    return job


def test_a_blob_that_setup_adds_later_is_saved_from_then_on(directory: str) -> None:
    """As in a run from scratch; blobs that only an epoch's task makes stay temporary."""
    ec.run(counting_job(1), directory)

    def averaged(epochs: int) -> tuple[ec.Job, ec.LocalSession]:
        job, session = counting_job(epochs), ec.LocalSession()
        job.setup(lambda ws: ws.update(average=0))
        job.epoch(lambda ws: ws.update(average=ws["average"] + 10))
        return job, session

    for epochs, expected in ((3, 20), (4, 30)):
        job, session = averaged(epochs)
        ec.run(job, directory, session=session, unsaved_blobs="error")
        assert session.workspace()["average"] == expected


def test_a_blob_left_out_that_init_makes_is_explained(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    """When it is left out, and where a resumed run misses it; what setup makes needs no word."""

    def cached(epochs: int) -> ec.Job:
        job = counting_job(epochs)
        job.setup(lambda ws: ws.update(mesh=1))
        job.init(lambda ws: ws.update(cache=[1, 2]))
        job.epoch(lambda ws: len(ws["cache"]) and None)
        return job

    with caplog.at_level(logging.WARNING):
        ec.run(cached(1), directory, exclude=["cache", "mesh"])
    (said,) = [r.getMessage() for r in caplog.records if "leave out" in r.getMessage()]
    assert "'cache'" in said
    assert "'mesh'" not in said
    assert "@job.setup" in said
    with pytest.raises(TaskError, match=r"no blob 'cache'; include= and exclude= leave it out.*@job\.setup"):
        ec.run(cached(2), directory, exclude=["cache", "mesh"])


def test_a_misspelt_blob_is_answered_with_the_near_names() -> None:
    """In a workspace of one node, and in the parent of several."""
    workspace = ec.Workspace()
    workspace["learning_rate"] = 1
    with pytest.raises(KeyError, match="no blob 'learning_rat'; near: 'learning_rate'"):
        _ = workspace["learning_rat"]


def test_a_blob_whose_parts_have_other_names_now_comes_back(directory: str) -> None:
    """The error says how, in the words of jobs, and that is enough; also where the blob differs per node."""

    def model_job(name: str, epochs: int, **how: Any) -> ec.Job:
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])

        @job.setup
        def setup(ws: ec.Workspace) -> None:
            ws.target("model", {name: {"w": jax.ShapeDtypeStruct((3,), np.float32), "b": np.zeros(2)}}, **how)

        job.init(lambda ws: ws.update(model={name: {"w": jnp.ones(3), "b": np.ones(2)}}))
        job.epoch(lambda ws: ws.update(model=jax.tree.map(lambda x: x + 1, ws["model"])))
        return job

    ec.run(model_job("dense", 1), directory)
    with pytest.raises(errors.MismatchError) as caught:
        ec.run(model_job("linear", 2), directory)
    assert "ws.target(blob, abstract, rename={'dense': 'linear'})" in str(caught.value)
    assert "RenamedRestore" not in str(caught.value)
    session = ec.LocalSession()
    ec.run(model_job("linear", 2, rename={"dense": "linear"}), directory, session=session)
    model = session.workspace()["model"]["linear"]
    assert (model["w"].tolist(), model["b"].tolist()) == ([3.0] * 3, [3.0] * 2)
    again = ec.run(model_job("linear", 3, rename={"dense": "linear"}), directory)  # which has the new names by now
    assert (again.resumed_from, again.epoch) == (2, 3)
    with pytest.raises(InvalidArgumentError, match="needs abstract="):
        ec.Workspace().target("model", rename={"dense": "linear"})
    with pytest.raises(InvalidArgumentError, match="rename must map names to names"):
        ec.Workspace().target("model", {}, rename=cast(Any, {"dense": 1}))


def test_what_a_node_has_of_its_own_gets_its_new_name_too() -> None:
    """In a blob that holds arrays of the whole job."""
    saved_once = {"my rank": 100, "w": np.ones(2)}
    joined = blobs.join(saved_once, {"rank": 101, "w": np.ones(2)}, _renaming.lenient({"rank": "my rank"}))
    assert joined["my rank"] == 101


def test_what_is_appended_to_stop_conditions_ends_the_job() -> None:
    """As in Caffe2, where it is a list; it checks what it is given."""
    job = ec.Job()
    job.epoch(lambda ws: None)
    job.stop_conditions.append(ec.stop.max_epochs(5))
    job.stop_conditions = [*job.stop_conditions, ec.stop.max_epochs(2)]
    assert repr(job.stop_conditions) == "[max_epochs(5), max_epochs(2)]"
    assert ec.run(job).epoch == 2
    with pytest.raises(InvalidArgumentError, match=r"3 \(int\) is no stop condition"):
        job.stop_conditions[0] = cast(Any, 3)
    job.stop_conditions.clear()
    assert not job.stop_conditions


def test_a_task_is_no_part_of_a_condition() -> None:
    """A function that is a task would be called with a `stop.Context` in place of its workspace."""
    job = ec.Job()

    @job.epoch
    def finished(ws: ec.Workspace) -> bool:
        return bool(ws)

    with pytest.raises(InvalidArgumentError, match=r"task 'finished' of group 'epoch' is no stop condition.*ec\.Task"):
        job.stop_when(ec.stop.max_epochs(5) | finished)
    task = ec.Task(lambda ws: True, group=job.epoch_group)
    with pytest.raises(InvalidArgumentError, match=r"is one by itself: job\.stop_when"):
        job.stop_when(ec.stop.max_epochs(5) | task)  # pyright: ignore[reportOperatorIssue]
    job.stop_when(task)


def test_a_cell_that_runs_again_replaces_its_task() -> None:
    """In its place; functions of one name that a loop, a file or a function makes are several tasks."""
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(1)])
    job.init(lambda ws: ws.update(calls=[]))
    cell = "@job.epoch\ndef train(ws):\n    ws['calls'] = [*ws['calls'], {!r}]\n"
    space = {"job": job, "__name__": "__main__"}
    exec(compile(cell.format("old"), "cell-1", "exec"), space)
    exec(
        compile("for i in (1, 2):\n  @job.epoch\n  def more(ws, i=i):\n    ws['calls'] += [i]\n", "cell-2", "exec"),
        space,
    )
    exec(compile(cell.format("new"), "cell-3", "exec"), space)
    exec(compile(cell.format("newest"), "cell-3", "exec"), space)
    session = ec.LocalSession()
    ec.run(job, session=session)
    assert session.workspace()["calls"] == ["newest", 1, 2]


def test_caffe2_managers_refuse_the_directory_of_another_manager(tmp_path: pathlib.Path) -> None:
    """Before anything is trained or written; each kind needs its own."""
    ec.run(counting_job(1), tmp_path / "run")
    before = sorted(os.listdir(tmp_path / "run"))
    manager = ec.caffe2.MultiNodeCheckpointManager(tmp_path / "run", "epochckpt")
    with pytest.raises(
        UnsupportedError, match=r"is the directory of an epochckpt\.CheckpointManager.*take another db_prefix"
    ):
        ec.JobRunner(counting_job(2), manager).train()
    assert sorted(os.listdir(tmp_path / "run")) == before


def test_a_stop_callable_that_raises_is_named() -> None:
    """With its node, also as a part of another condition; the error's type stays the user's."""
    job = counting_job(3)

    def reached(ctx: ec.stop.Context) -> bool:
        return ctx.metrics["loss"] < 1

    job.stop_when(ec.stop.max_epochs(9) | reached)
    with pytest.raises(KeyError) as caught:
        ec.run(job)
    (note,) = [note for note in caught.value.__notes__ if "stop condition" in note]
    assert "reached, epoch 1, node process_0" in note


def test_durations_of_a_runner_may_be_text() -> None:
    """As in flags and config files: one parser."""
    texts: dict[str, Any] = {"deadline_secs": "90s", "save_every_secs": "1.5h", "exchange_timeout_secs": "10min"}
    assert ec.run(counting_job(2), **texts).epoch == 2
    with pytest.raises(InvalidArgumentError, match=r"save_every_secs is a number of seconds .* got '5 minutes'.*min"):
        ec.JobRunner(counting_job(1), save_every_secs="5 minutes")


def test_max_steps_that_is_no_multiple_says_where_the_run_ends(caplog: pytest.LogCaptureFixture) -> None:
    """The job trains whole calls of its tasks."""
    job = ec.Job(unit="step", steps_per_epoch=1000)
    job.stop_when(ec.stop.max_steps(2000))
    assert not caplog.records
    job.stop_when(ec.stop.max_steps(1500))
    assert "max_steps(1500) is no multiple of steps_per_epoch=1000: a run ends at 2000" in caplog.text


def test_a_blob_of_other_nodes_is_refused_in_the_words_of_jobs(tmp_path: pathlib.Path) -> None:
    """It names the blob and `ws.target`, not the item's arguments."""

    def job_of(count: int) -> ec.Job:
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(1)])
        for k in range(count):
            ec.Task(lambda ws, k=k: ws.update(reader={"at": k}), group=job.init_group, node=f"n{k}")
        job.epoch(lambda ws: None)
        return job

    ec.run(job_of(2), tmp_path / "run")
    with pytest.raises(InvalidArgumentError, match=r"blob 'reader' .* 2 nodes; here are 3: .*ws\.target\('reader', "):
        ec.run(job_of(3), tmp_path / "run")


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_job_goes_on_on_the_mesh_that_is_set(directory: str, devices: int, caplog: pytest.LogCaptureFixture) -> None:
    """With fewer devices or more, no target, and an optimizer whose counter was placed on no device."""
    optimizer = optax.adam(0.1)

    def job(epochs: int) -> ec.Job:
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])

        @job.init
        def init(ws: ec.Workspace) -> None:
            ws["w"] = jax.device_put(jnp.arange(8.0), jax.P("data"))
            ws["optimizer"] = optimizer.init(ws["w"])

        @job.epoch
        def train(ws: ec.Workspace) -> None:
            ws["w"], ws["optimizer"] = step(ws["w"], ws["optimizer"])

        return job

    @jax.jit
    def step(w: jax.Array, state: Any) -> Any:
        updates, state = optimizer.update(w - 3.0, state)
        return optax.apply_updates(w, updates), state

    def run(directory: str, epochs: int, devices: int) -> jax.Array:
        session = ec.LocalSession()
        here = jax.devices()[:devices]
        with jax.set_mesh(jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Explicit,), devices=here)):
            ec.run(job(epochs), directory, session=session)
        w = session.workspace()["w"]
        assert w.sharding.device_set == {*here}
        return w

    run(directory, 2, 2)
    caplog.clear()
    np.testing.assert_array_equal(run(directory, 4, devices), run(f"{directory}-undisturbed", 4, 2))
    assert "comes back as NumPy" not in caplog.text
