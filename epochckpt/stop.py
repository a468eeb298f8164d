"""Stop conditions, composed with `|` and `&`; anything that can be called with a `Context` composes with them, too.

Examples:
    >>> until = ec.stop.max_epochs(100) | ec.stop.no_improvement("loss", patience=5, mode="min") | ec.stop.preempted
    >>> until | (lambda ctx: ctx.metrics["loss"] < 0.01)
    (((max_epochs(100) | no_improvement('loss', patience=5, min_delta=0.0, mode='min')) | preempted) | <lambda>)
    >>> job = ec.Job(stop_conditions=[until])
"""

from epochckpt.jobs.stop import (
    Condition,
    Context,
    as_condition,
    file_exists,
    max_epochs,
    max_steps,
    max_time,
    nan,
    no_improvement,
    preempted,
    target,
)

__all__ = [
    "Condition",
    "Context",
    "as_condition",
    "file_exists",
    "max_epochs",
    "max_steps",
    "max_time",
    "nan",
    "no_improvement",
    "preempted",
    "target",
]
