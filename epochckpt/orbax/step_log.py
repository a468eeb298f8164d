"""What an Orbax logger gets: an entry for every commit and every restore, with the fields of Orbax's own statistics.

Fields about what is not done here, or not on the training thread (`get_old_steps_…`), stay None. Listeners of
`jax.monitoring` hear of the same moments, see `events`.
"""

import dataclasses
import datetime
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.logging import step_statistics

from epochckpt import _threads, _units
from epochckpt.orbax.events import SaveEvents


class StepLog:
    """The logger of one manager, an object with `log_entry`. Its errors are logged and harm nothing.

    None: Orbax's own, which writes the entries to the log at INFO.
    """

    def __init__(self, logger: Any, root: str, policy: Any, primary: bool, asynchronous: bool):
        self._logger = ocp.logging.StandardLogger() if logger is None else logger
        self._events = SaveEvents(root, policy, primary, asynchronous)
        self.waited = self._events.waited
        self.restoring = self._events.restoring
        self._last: float | None = None  # when the last save was asked for, monotonic

    def begun(
        self,
        step: int,
        directory: str,
        *,
        began: float,
        planned: float,
        ready: float,
        room: float,
        preempted: bool,
        waits: bool,
        nbytes: int,
    ) -> dict[str, Any]:
        """The entry of a save that is handed to the background now; moments are on the monotonic clock.

        `save` began, went on to plan, was ready to wait for older saves, and had room. `waits`: it goes on to wait for
        the commit. `nbytes` is the size of the saved arrays.
        """
        now = time.monotonic()
        between = None if self._last is None else ready - self._last
        self._last = ready
        self._events.begun((began, planned, ready, room, now), nbytes, between)
        return dataclasses.asdict(step_statistics.SaveStepStatistics()) | {
            "step": step,
            "directory": directory,
            "reached_preemption": preempted,
            "preemption_received_at": _wall(began) if preempted else None,
            "synchronous": waits,
            "wait_for_prev_start_time": _wall(ready),
            "wait_for_prev_duration_secs": room - ready,
            "time_between_consecutive_saves_sec": between,
            "checkpointer_blocking_start_time": _wall(room),
            "checkpointer_blocking_duration_secs": now - room,
            "checkpoint_manager_blocking_start_time": _wall(began),
            "checkpoint_manager_blocking_duration_secs": now - began,
            "blocked_secs": now - began,
        }

    def committed(
        self,
        entry: Mapping[str, Any],
        committed_ns: int,
        secs: float,
        writing_secs: float,
        nbytes: int,
        nodes: Mapping[str, float],
    ) -> None:
        """Logs the entry of a save that was committed `secs` after the call of `save`, the last of them in writing.

        `nodes` are the seconds that each node wrote, as far as they are known, and `nbytes` the bytes.
        """
        self._events.committed(secs, writing_secs, nbytes, nodes)
        when = datetime.datetime.fromtimestamp(committed_ns / 1e9, tz=datetime.UTC)
        self._log({**entry, "committed": when.isoformat(), "secs": secs})

    def restored(
        self, step: int, directory: str, began: float, read: float, value: Any, notes: Mapping[str, int]
    ) -> None:
        """Logs that an epoch was restored as this value: `restore` began, and began to read, at these moments.

        `notes` are those of its `_progress.Work`.
        """
        now = time.monotonic()
        nbytes = _threads.logged("the size of the restored values is not known", lambda: _nbytes(value))
        say_restored(step, directory, now - began, nbytes or 0, notes)
        self._events.restored(now - began, nbytes)
        self._log(
            dataclasses.asdict(step_statistics.RestoreStepStatistics())
            | {
                "step": step,
                "directory": directory,
                "checkpointer_start_time": _wall(read),
                "checkpointer_duration_secs": now - read,
                "checkpoint_manager_start_time": _wall(began),
                "checkpoint_manager_duration_secs": now - began,
            }
        )

    def _log(self, entry: dict[str, Any]) -> None:
        _threads.logged("the logger of the manager failed", lambda: self._logger.log_entry(entry))


def say_restored(step: int, directory: str, secs: float, nbytes: float, notes: Mapping[str, int]) -> None:
    """Logs one line about a restore: its bytes, and how many leaves were missing or cast."""
    leaves = "".join(f", {_units.several(n, 'leaf', 'leaves')} {what}" for what, n in sorted(notes.items()))
    text = "checkpoint %d restored from %s: %s in %.2f s%s"
    logging.info(text, step, directory, _units.nbytes(nbytes), secs, leaves)


def _nbytes(value: Any) -> int:
    """Bytes of the arrays of an item, or of a Composite of items."""
    items = value.items() if isinstance(value, ocp.args.Composite) else [("", value)]
    leaves = jax.tree.leaves([item for _, item in items])
    arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray))]
    return sum([math.prod(array.shape) * array.dtype.itemsize for array in arrays])  # `nbytes` of jax takes 1 µs


def _wall(moment: float) -> float:
    """A moment of the monotonic clock as a time, in seconds since 1970."""
    return time.time() - (time.monotonic() - moment)
