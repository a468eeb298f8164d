"""`follow`: yields epochs as they are committed, for evaluators; reads only, and needs nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp

from epochckpt.coordination import Deadline
from epochckpt.errors import InvalidArgumentError
from epochckpt.opening import commits_of, step_names
from epochckpt.storage import open_store


def follow(
    directory: str | os.PathLike[str],
    after: int | None = None,
    timeout_secs: float | None = None,
    *,
    interval_secs: float = 1.0,
    options: ocp.CheckpointManagerOptions | None = None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Yields each newly committed epoch, in ascending order, as it appears.

    If several appeared since the last look, each is yielded; an epoch that was deleted before it could be looked at
    is not. Reading an epoch that is deleted meanwhile raises `EpochDeleted`: go on with the next.

    Args:
        directory: checkpoint directory; need not exist yet.
        after: yield only later epochs; None: begin with those that are there.
        timeout_secs: end when no new epoch appeared for this long; None: never.
        interval_secs: how often to look.
        options: the step name format, if it is not the default.
        stop: looked at between looks; ends when it returns True.

    Raises:
        InvalidArgumentError: interval_secs is not positive.
    """
    if not interval_secs > 0:
        raise InvalidArgumentError(f"interval_secs must be positive, got {interval_secs!r}")
    commits = commits_of(open_store(directory), step_names(options or ocp.CheckpointManagerOptions()))
    last = -1 if after is None else after
    deadline = Deadline(timeout_secs) if timeout_secs is not None else None
    pause = threading.Event()
    while True:
        for epoch in commits.list_epochs():
            if epoch > last:
                last = epoch
                yield epoch
                deadline = Deadline(timeout_secs) if timeout_secs is not None else None
        if (deadline is not None and deadline.passed()) or (stop is not None and stop()):
            return
        pause.wait(interval_secs if deadline is None else max(0.0, min(interval_secs, deadline.left())))
