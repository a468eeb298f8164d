"""A Grain pipeline per process, checkpointed with Grain's own arguments; runs under `tests.support.worker`."""

from __future__ import annotations

from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

import epochckpt as ec
from tests.support.handler_jobs import state


def pipeline() -> Any:
    """Shuffled batches of this process's part of the data."""
    me, count = jax.process_index(), jax.process_count()
    return iter(grain.MapDataset.range(me, 64, count).shuffle(seed=3).map(lambda x: x * 10).batch(2).to_iter_dataset())


def take(iterator: Any, n: int) -> list[list[int]]:
    return [next(iterator).tolist() for _ in range(n)]


def save(directory: str) -> dict[str, Any]:
    """Saves after three batches and goes on at once; returns all that it saw."""
    iterator = pipeline()
    before = take(iterator, 3)
    with ec.CheckpointManager(directory) as manager:
        args = {"state": ocp.args.StandardSave(state()), "iter": grain.checkpoint.CheckpointSave(iterator)}
        manager.save(3, args=ocp.args.Composite(**args))
        after = take(iterator, 4)
        manager.wait_until_finished()
    return {"before": before, "after": after}


def restore(directory: str) -> dict[str, Any]:
    """What a fresh iterator gives after it was restored."""
    with ec.CheckpointManager(directory) as manager:
        args = {"state": ocp.args.StandardRestore(state()), "iter": grain.checkpoint.CheckpointRestore(pipeline())}
        got = manager.restore(None, args=ocp.args.Composite(**args))
    return {"after": take(got["iter"], 4)}
