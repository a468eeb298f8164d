"""A job that replaces an epoch and is killed on the way, for `tests/saving/test_replace.py`."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall

NO_EXCHANGE = io.UnsupportedOperation("no exchange here")  # as on a file system that has none


def args(value: int) -> Any:
    """What an epoch holds."""
    return ocp.args.Composite(
        state=ocp.args.StandardSave({"x": np.full(2000, value)}), note=ocp.args.JsonSave({"value": value})
    )


def kill_at(faults: Faults, place: str) -> None:
    """Kills this process before or after the exchange, or, on a file system without one, after the n-th rename."""

    def die(call: StoreCall) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after_renames(call: StoreCall) -> None:
        if place == f"after rename {renames.hits}":
            die(call)

    if "rename" in place:
        faults.fail(Store.exchange, NO_EXCHANGE)
        renames = faults.after(Store.rename, die_after_renames)
    elif place == "before the exchange":
        faults.before(Store.exchange, die)
    else:
        faults.after(Store.exchange, die)


def replace_and_die(directory: str, place: str) -> None:
    """Saves epochs 1 and 2, then replaces 1, and is killed."""
    with Faults().everywhere() as faults, ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=args(epoch))
        manager.wait_until_finished()
        manager.allow_overwrite(1)
        kill_at(faults, place)
        manager.save(1, args=args(100))
        manager.wait_until_finished()


def open_and_die(directory: str) -> None:
    """A run that is killed as soon as it has moved the staging of the one before it."""
    with Faults().everywhere() as faults:
        kill_at(faults, "after rename 1")
        ec.CheckpointManager(directory).claim()


def replace_in_a_job(directory: str) -> list[Any]:
    """Two processes replace an epoch."""
    sharding = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.P("x"))

    def state(value: float) -> Any:
        full = jax.jit(lambda: jax.numpy.full(8, value), out_shardings=sharding)()
        return ocp.args.StandardSave({"w": full})

    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=state(epoch))
        manager.wait_until_finished()
        manager.allow_overwrite(1)
        assert manager.should_save(1)
        manager.save(1, args=state(7.0))
        manager.wait_until_finished()
        got = manager.restore(1, args=ocp.args.StandardRestore({"w": state(0.0).item["w"]}))["w"]
        values = {float(v) for s in got.addressable_shards for v in np.asarray(s.data)}
        return [sorted(values), list(manager.all_steps()), [o.committed for o in manager.pop_save_results()]]
