"""What processes do in the tests of `test_claiming`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.errors import RetentionError
from tests.support.processes import run_worker


def args(value: float) -> Any:
    """A save of one array."""
    return ocp.args.StandardSave({"w": np.full(4, float(value))})


def look(directory: str) -> list[Any]:
    """What somebody does who only wants to see: opens the directory as a trainer would, reads everything, leaves."""
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        latest = manager.latest_step()
        assert latest is not None
        assert manager.should_save(latest + 1)
        assert manager.verify(latest).ok
        manager.reload()
        manager.item_metadata(latest)
        manager.metrics(latest)
        manager.status(latest)
        value = manager.restore(None)["w"].tolist()
    return [latest, value]


def take_over(directory: str, epoch: int) -> None:
    """A run that saves one epoch and closes."""
    with ec.CheckpointManager(directory) as manager:
        manager.save(epoch, args=args(epoch), force=True)


def die_after_a_save(directory: str) -> None:
    """A run that claims the directory and is killed."""
    manager = ec.CheckpointManager(directory)
    manager.save(1, args=args(1))
    manager.wait_until_finished()
    os.kill(os.getpid(), 9)


def overtaken_job(ran: list[str], manager: ec.CheckpointManager, epochs: int, take_over: Callable[[], Any]) -> ec.Job:
    """A job that is taken over in epoch 2, and whose epoch 3 ends when the manager knows that; `ran`: what has run."""
    job = ec.Job()
    job.init(lambda ws: ws.update(n=np.zeros(1)))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        ran.append(f"epoch {ws.epoch}")
        if ws.epoch == 2:
            manager.wait_until_finished()
            take_over()
        elif ws.epoch == 3:
            manager.components.saves.queue.drain()

    job.download(lambda ws: ran.append("download"))
    job.exit(lambda ws: ran.append("exit"))
    job.stop_when(ec.stop.max_epochs(epochs))
    return job


def train_until_fenced_off(directory: str) -> list[Any]:
    """A run of several processes; in epoch 2 another run takes its directory over. What became of it, and what ran."""
    ran: list[str] = []
    session = ec.DistributedSession()

    def newer() -> None:
        if jax.process_index() == 0:
            run_worker("tests.support.claim_jobs:take_over", {"directory": directory, "epoch": 100}, 1)

    manager = ec.CheckpointManager(directory)
    runner = ec.JobRunner(overtaken_job(ran, manager, 5, newer), manager)
    runner.train(session)
    manager.close()
    result = runner.result
    return [result.exit_code, result.fenced_off, result.stop_reason, ran]


def save_with_trash(directory: str) -> list[list[int]]:
    """A run of several processes that keeps one epoch; `trash/1` of its directory exists.

    Returns the epochs that it lists then, and those of which an error said that they are still there.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=1, todelete_subdir="trash")
    failed = list[int]()
    with ec.CheckpointManager(directory, options=options) as manager:
        for epoch in (1, 2, 3):
            manager.save(epoch, args=args(epoch))
            try:
                manager.wait_until_finished()
            except RetentionError as error:
                failed.append(error.epoch)
        return [list(manager.all_steps()), failed]
