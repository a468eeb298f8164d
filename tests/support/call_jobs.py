"""What real processes call alone that all are to call together; run by `tests.support.worker`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt import _patience
from epochckpt.agreement import coordination
from epochckpt.errors import CoordinationTimeoutError, EpochExistsError
from tests.support.taps import eventually

WAIT_MILLIS = 60_000


def lone_calls(directory: str) -> dict[str, Any]:
    """See `_lone_calls`; what is waited for beyond the options of a manager takes a moment."""
    with _patience.use(hear_margin_secs=1.0):
        return _lone_calls(directory)


def _lone_calls(directory: str) -> dict[str, Any]:
    """Each process makes calls alone, and after each of them all make them together.

    Returns:
        What the lone calls raised, what the common ones gave, and how many coordination keys there were.
    """
    me, client = jax.process_index(), ocp.multihost.get_jax_distributed_client()
    storage = ec.StorageOptions(open_timeout_secs=30, restore_timeout_secs=30, save_timeout_secs=30)
    raised: dict[str, str] = {}
    common: dict[str, Any] = {}

    def gather(name: str) -> None:
        client.wait_at_barrier(name, WAIT_MILLIS)

    def wait(secs: float) -> None:
        """How long calls wait for the other process: a moment for one that does not come, else as long as it takes."""
        m.components.directory.job_directory._wait_secs = secs
        m.components.administration.directory_calls._wait_secs = secs
        object.__setattr__(storage, "restore_timeout_secs", secs)

    def alone(who: int, name: str, call: Callable[[], Any]) -> None:
        if me == who:
            wait(1.0)
            try:
                call()
            except CoordinationTimeoutError as error:
                raised[name] = str(error)
            wait(30.0)
        gather(name)

    def keys() -> int:
        return len(client.key_value_dir_get("epochckpt/"))

    def save(m: ec.CheckpointManager, epoch: int) -> None:
        m.save(epoch, args=ocp.args.StandardSave({"a": np.full(3, float(epoch))}))
        m.wait_until_finished()

    def restored(m: ec.CheckpointManager) -> float:
        return float(m.restore(None)["a"][0])

    gather("open")
    m = ec.CheckpointManager(directory, storage=storage)
    m.reload()
    for epoch in (1, 2, 3):
        save(m, epoch)
    for number in range(2):
        alone(1, f"follower's reload {number}", m.reload)
    m.reload()
    common["reload"] = list(m.all_steps())
    alone(0, "primary's reload", m.reload)
    m.reload()
    common["reload again"] = list(m.all_steps())
    alone(1, "follower's restore", lambda: m.restore(None))
    common["restore"] = restored(m)
    alone(0, "primary's restore", lambda: m.restore(None))
    common["restore again"] = restored(m)
    alone(1, "follower's delete", lambda: m.delete(2))
    m.delete(2)
    m.reload()
    common["delete"] = list(m.all_steps())
    alone(1, "follower's rollback", lambda: m.rollback_to(1))
    m.rollback_to(1)
    save(m, 3)
    m.reload()
    common["in the end"] = [*m.all_steps(), restored(m)]

    gather("keys")
    before = keys()
    for number in range(200):
        m.reload()
        if number % 50 == 0:
            gather(f"reload {number}")  # the primary keeps its answers for those that are behind, but not for ever
    for _ in range(70):
        m.restore(None)
    gather("many calls")
    common["many calls"] = keys() - before
    m.close()
    for _ in range(40):
        ec.CheckpointManager(directory, storage=storage).close()
    gather("many opens")
    common["many opens"] = keys() - before
    gather("end")
    return {"raised": raised, "common": common}


def end_of_loop(directory: str) -> dict[str, Any]:
    """Asks for the last epoch again while the first process has committed it, and the second has not heard of that.

    Returns:
        Whether it was in flight here, what the second save gave, and what it raised once both processes had waited.
    """
    me, client = jax.process_index(), ocp.multihost.get_jax_distributed_client()
    args = ocp.args.StandardSave({"a": np.ones(3)})
    heard = threading.Event()

    class Slow(coordination.JaxCoordinator):
        """The second process does not hear of a verdict before it may."""

        def get(self, key: str, timeout_secs: float) -> Any:
            if me and "/verdict/" in key:
                assert heard.wait(WAIT_MILLIS / 1000)
            return super().get(key, timeout_secs)

    with (
        coordination.connecting_by(lambda *_: Slow(client, range(jax.process_count()), me)),
        ec.CheckpointManager(directory) as m,
    ):
        m.save(0, args=args)
        if not me:
            assert eventually(lambda: not m.is_saving_in_progress())
        client.wait_at_barrier("committed", WAIT_MILLIS)
        found = {"in flight": m.is_saving_in_progress(), "again": m.save(0, args=args, force=True)}
        client.wait_at_barrier("asked", WAIT_MILLIS)
        heard.set()
        m.wait_until_finished()
        try:
            m.save(0, args=args, force=True)
        except EpochExistsError as error:
            found["raised"] = type(error).__name__
        return {**found, "steps": list(m.all_steps())}
