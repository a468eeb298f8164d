"""What an Orbax logger gets: an entry for every commit and every restore, with the fields of Orbax's own statistics.

Fields about what is not done here, or not on the training thread (`get_old_steps_…`), stay None.
"""

import dataclasses
import datetime
import time
from typing import Any

from orbax.checkpoint.logging import step_statistics

from epochckpt import _threads


class StepLog:
    """The logger of one manager: an object with `log_entry`, or None. What it raises is logged and harms nothing."""

    def __init__(self, logger: Any):
        self._logger = logger
        self._last: float | None = None  # when the last save was asked for, monotonic

    def begun(
        self, step: int, directory: str, *, began: float, ready: float, room: float, preempted: bool, waits: bool
    ) -> dict[str, Any]:
        """The entry of a save that is handed to the background now; moments are on the monotonic clock.

        `save` began, was ready to wait for older saves, and had room. `waits`: it goes on to wait for the commit.
        """
        now = time.monotonic()
        between, self._last = None if self._last is None else ready - self._last, ready
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

    def committed(self, entry: dict[str, Any], committed_ns: int, secs: float) -> None:
        """Logs the entry of a save that was committed `secs` after the call of `save`."""
        when = datetime.datetime.fromtimestamp(committed_ns / 1e9, tz=datetime.UTC)
        self._log({**entry, "committed": when.isoformat(), "secs": secs})

    def restored(self, step: int, directory: str, began: float, read: float) -> None:
        """Logs that an epoch was restored: `restore` began, and began to read, at these moments."""
        now = time.monotonic()
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
        if self._logger is not None:
            _threads.logged("the logger of the manager failed", lambda: self._logger.log_entry(entry))


def _wall(moment: float) -> float:
    """A moment of the monotonic clock as a time, in seconds since 1970."""
    return time.time() - (time.monotonic() - moment)
