"""Stop conditions, composed with `|` and `&`: `ec.stop.max_epochs(100) | ec.stop.nan`. See `epochckpt.jobs.stop`."""

from __future__ import annotations

from epochckpt.jobs.stop import (
    Condition,
    Context,
    alternatives,
    as_condition,
    checked,
    file_exists,
    is_foreign,
    load_states,
    max_epochs,
    max_time,
    nan,
    no_improvement,
    preempted,
    save_states,
    target,
    why,
)

__all__ = [
    "Condition",
    "Context",
    "alternatives",
    "as_condition",
    "checked",
    "file_exists",
    "is_foreign",
    "load_states",
    "max_epochs",
    "max_time",
    "nan",
    "no_improvement",
    "preempted",
    "save_states",
    "target",
    "why",
]
