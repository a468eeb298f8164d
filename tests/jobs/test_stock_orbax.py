"""Runs with the manager of stock Orbax, and directories that such runs leave to ours."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from tests.support.short_jobs import job_of, run


@pytest.mark.slow
def test_stock_orbax_saves_values_as_they_were(tmp_path: pathlib.Path) -> None:
    """It writes JSON in the background, while the next epoch already changes the list."""
    job = job_of(20, lambda ws: ws["list"].append(ws.epoch), list=[0] * 20_000)
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        run(job, manager)
        lengths = []
        for epoch in range(21):
            session = ec.LocalSession()
            assert ec.JobRunner(job, manager).load_blobs_from_checkpoints(["list"], epoch, session)
            lengths.append(len(session.workspace()["list"]))
    assert lengths == list(range(20_000, 20_021))


def test_stock_orbax_reads_a_blob_that_is_called_default(tmp_path: pathlib.Path) -> None:
    """An item of this name is to Orbax a checkpoint of one item, in which it finds no others."""
    for epochs in (1, 2):
        with ocp.CheckpointManager(tmp_path / "c") as manager:
            result, session = run(job_of(epochs, default=7), manager)
    assert (result.resumed_from, dict(session.workspace())) == (1, {"default": 7})


def test_stock_orbax_does_not_go_on_from_an_epoch_without_named_items(tmp_path: pathlib.Path) -> None:
    """It could restore nothing and save nothing; ours can."""
    directory = tmp_path / "c"
    with ocp.CheckpointManager(directory) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.arange(3)}))
    with ocp.CheckpointManager(directory) as manager, pytest.raises(ec.errors.UnsupportedError, match="without a name"):
        run(job_of(5), manager)
    with ec.CheckpointManager(directory) as manager:
        result, session = run(job_of(5), manager)
    assert (result.resumed_from, session.workspace()["default"]["w"].tolist()) == (3, [0, 1, 2])


def test_an_epoch_that_stock_orbax_deletes_as_worse_is_no_failed_save(tmp_path: pathlib.Path) -> None:
    """It would count for max_consecutive_save_failures, and end a run in which nothing failed."""
    losses = [1.0, 2.0, 5.0, 4.0, 3.0, 0.5]
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path / "c", options=options) as manager:
        job = job_of(6, lambda ws: {"loss": losses[ws.epoch - 1]})
        result, _ = run(job, manager, max_consecutive_save_failures=0)
        assert (result.failed_saves, result.last_committed_epoch) == ((), 6)
        assert {1, 6} <= set(manager.all_steps())
        assert 3 not in manager.all_steps()


def test_a_run_with_stock_orbax_goes_on_with_ours(tmp_path: pathlib.Path) -> None:
    """What stock Orbax keeps as JSON by node, and arrays that it keeps in a tree, come back as the blobs they were."""
    values: dict[str, Any] = {"sum": 1, "bytes": b"\xff", "a/b": "x"}
    blobs = {**values, "bare": np.arange(3), "array": jnp.ones(2), "tree": {"w": jnp.ones(1)}}
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        run(job_of(1, **blobs), manager)
    job = job_of(2)
    job.setup(lambda ws: ws.target("array", jax.ShapeDtypeStruct((2,), jnp.float32)))
    with ec.CheckpointManager(tmp_path / "c") as manager:
        for _ in range(2):  # from an epoch of stock Orbax, then from one of ours
            result, session = run(job, manager)
            found = dict(session.workspace())
            assert result.failed_saves == ()
            assert {name: type(value) for name, value in found.items()} == {
                name: type(value) for name, value in blobs.items()
            }
            assert (found["sum"], found["bytes"], found["a/b"]) == (1, b"\xff", "x")
            assert (found["bare"].tolist(), found["array"].tolist()) == ([0, 1, 2], [1.0, 1.0])
    assert result.resumed_from == 2


def test_stock_orbax_does_not_resume_what_only_we_can(tmp_path: pathlib.Path) -> None:
    """It would lose what differs per node; that is said, and our manager goes on."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(job_of(2), manager)
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        pytest.raises(errors.UnsupportedError, match="resume it with that"),
    ):
        run(job_of(3), manager)
    with ec.CheckpointManager(tmp_path) as manager:
        assert run(job_of(3), manager)[0].resumed_from == 2
