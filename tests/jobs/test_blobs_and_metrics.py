"""What a run says of blobs and metrics that it cannot save or use, and what does not hold or end it."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.short_jobs import job_of, run
from tests.support.taps import NO_SPACE


def test_blobs_that_a_resumed_run_would_lack_are_named_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of epoch tasks; not those of setup, which are saved from then on, and those left out on purpose."""

    def said(epochs: int, **how: Any) -> list[str]:
        def epoch(ws: ec.Workspace) -> None:
            ws["momentum"] = ws.get("momentum", 0) + 1
            ws["cache.a"] = ws.epoch

        caplog.clear()
        job = job_of(epochs, epoch)
        job.setup(lambda ws: ws.update(new=1) if epochs > 2 else None)
        with ec.CheckpointManager(tmp_path) as manager:
            run(job, manager, **how)
        return [r.message for r in caplog.records if "not checkpointed" in r.message]

    (first,) = said(2, exclude=["cache.*"])
    assert "'momentum' of node process_0. Init" in first
    assert "after epoch 1:" in first
    (resumed,) = said(4)
    assert "epoch 3: 'momentum', 'cache.a' of node process_0" in resumed
    assert said(6, unsaved_blobs="ignore") == []
    with pytest.raises(errors.InvalidArgumentError, match=r"after epoch 7: 'momentum' of node"):
        said(9, unsaved_blobs="error", exclude=["cache.*"])
    assert run(job_of(2, lambda ws: ws.update(more=1)), None, unsaved_blobs="error")[0].epoch == 2  # nothing is saved
    with pytest.raises(ValueError, match="unsaved_blobs must be"):
        run(job_of(1), None, unsaved_blobs=True)


@pytest.mark.parametrize("name", ["best", "stopper", "made_by_init"])
def test_attributes_of_a_workspace_are_refused(name: str) -> None:
    """They would be lost, and might be the runner's own; blobs and `live` are kept."""
    ws = ec.Workspace()
    with pytest.raises(AttributeError, match=rf"write ws\['{name}'\] = .*ws.live.{name} = ") as caught:
        setattr(ws, name, 3)
    assert isinstance(caught.value, errors.InvalidArgumentError)
    ws.epoch, ws.live.best = 3, 4
    with pytest.raises(errors.InvalidArgumentError, match="task '<lambda>' of group 'epoch'"):
        run(job_of(1, lambda ws: setattr(ws, name, 3)))


def test_numbers_that_are_no_metrics_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """What a task returns beside a mapping is only its output; an answer to a stop condition is meant as that."""
    for returned in (0.5, 7, jnp.ones(()), (np.float32(1), 2), [1.0]):
        caplog.clear()
        run(job_of(2, lambda ws, returned=returned: returned))
        (said,) = [r.message for r in caplog.records if "no metric" in r.message]
        assert f"task '<lambda>' returned a {type(returned).__name__}" in said
    caplog.clear()
    for fine in (None, True, jnp.array(True), {"loss": 1.0}, "text", object()):
        run(job_of(1, lambda ws, fine=fine: fine))
    assert "no metric" not in caplog.text

    job = ec.Job()
    for number, node in enumerate("ab"):
        ec.Task(lambda ws, number=number: {"loss": 1.0, f"loss_{number}": 1.0}, group=job.epoch_group, node=node)
    ec.epoch_limiter(job, 2)
    run(job)
    assert [r.message for r in caplog.records if "not kept" in r.message] == [
        "metrics ['loss_1'] of node b are not kept: those of node a count"
    ]


def test_patterns_narrow_what_a_resumed_run_saves(tmp_path: pathlib.Path) -> None:
    """They are no less asked for than in a run from scratch."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(job_of(1, sum=0, cache=1), manager)
    with ec.CheckpointManager(tmp_path) as manager:
        run(job_of(2, sum=0, cache=1), manager, exclude=["cache"])
        assert (set(manager.item_kinds(1)), set(manager.item_kinds(2))) == ({"sum", "cache"}, {"sum"})


def test_a_handler_that_hangs_does_not_hold_the_training(tmp_path: pathlib.Path, patience: Callable[..., None]) -> None:
    """It is waited for once, and not asked again."""
    gone, asked = threading.Event(), list[str]()

    class Hangs(ec.metadata.AbstractMetadataHandler):
        def set_params(self, **arguments: Any) -> None:
            pass

        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            return None

        def write(self, epoch: int) -> None:
            asked.append("write")
            gone.wait(60)

        def report(self, action_name: str, all_stats: Any) -> None:
            asked.append("report")

        def cp_accessible(self, epoch: int | None = None) -> bool:
            return True

    patience(handler_call_secs=0.2)
    with ec.CheckpointManager(tmp_path) as manager:
        result, _ = run(job_of(5), manager, metadata_handler=Hangs())
    gone.set()
    assert (result.epoch, result.last_committed_epoch) == (5, 5)
    assert asked == ["write"]


def test_a_deletion_that_leaves_files_ends_no_run(tmp_path: pathlib.Path, faults: Faults) -> None:
    """A task deletes an epoch whose files cannot be removed: the run goes on, saves, and ends well."""

    def delete(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            manager.delete(1)

    with ec.CheckpointManager(tmp_path) as manager:
        tap = faults.fail(Store.remove_tree, NO_SPACE, where=lambda call: "removed" in call.path)
        result, _ = run(job_of(3, delete), manager)
        tap.remove()
        assert (result.epoch, manager.all_steps()) == (3, [0, 2, 3])
