"""Stop conditions, composed with `|` and `&`; anything that can be called with a `Context` composes with them, too.

Examples:
    >>> until = ec.stop.max_epochs(100) | ec.stop.no_improvement("loss", patience=5, mode="min") | ec.stop.preempted
    >>> until | (lambda ctx: ctx.metrics["loss"] < 0.01)
    (((max_epochs(100) | no_improvement('loss', patience=5, min_delta=0.0, mode='min')) | preempted) | <lambda>)
    >>> job = ec.Job(stop_conditions=[until])
"""

from epochckpt.jobs.stop import *  # noqa: F403 - what its `__all__` lists
from epochckpt.jobs.stop import __all__ as __all__
