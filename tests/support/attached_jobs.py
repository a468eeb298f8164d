"""What the processes of a job do in `tests/directory/test_attached_metrics.py`; runs under `tests.support.worker`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import epochckpt as ec


def best_at_every_moment(directory: str) -> dict[str, Any]:
    """What each process says is the best epoch, while the primary's machine attaches metrics between saves."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["accuracy"], max_to_keep=None)
    said: dict[str, Any] = {}

    def save(manager: ec.CheckpointManager, epoch: int) -> None:
        manager.save(epoch, args=ocp.args.StandardSave({"w": np.full(3, epoch)}), metrics={"loss": 1.0})
        manager.wait_until_finished()

    def attach(epoch: int, accuracy: float) -> None:
        if jax.process_index() == 0:
            ec.attach_metrics(directory, epoch, {"accuracy": accuracy}, "evaluator")
        multihost_utils.sync_global_devices(f"attached to {epoch}")

    with ec.CheckpointManager(directory, options=options) as manager:
        for epoch in (0, 1):
            save(manager, epoch)
        attach(0, 0.25)
        save(manager, 2)
        said["commit"] = manager.best_step()
        attach(1, 0.5)
        assert manager.best_step() == said["commit"], "nobody has told"
        manager.reload()
        said["reload"] = manager.best_step()
    with ec.CheckpointManager(directory, options=options) as manager:
        said["open"], said["kept"] = manager.best_step(), list(manager.all_steps())
    return said
