"""`follow`: yields epochs as they are committed, for evaluators; reads only, and needs nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp

from epochckpt.commit import Commits
from epochckpt.errors import InvalidArgumentError
from epochckpt.opening import commits_of
from epochckpt.step_folders import step_names
from epochckpt.storage import open_store
from epochckpt.worker import Deadline


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
    is not. Epochs that are saved anew, after a rollback or a deletion of the newest, are yielded again. Reading one
    that is deleted meanwhile raises `EpochDeleted`: go on with the next.

    Args:
        directory: checkpoint directory; need not exist yet.
        after: yield only later epochs; None: begin with those that are there.
        timeout_secs: end when no new epoch appeared for this long; None: never.
        interval_secs: how often to look.
        options: the step name format, if it is not the default.
        stop: looked at between looks; ends when it returns True.

    Raises:
        InvalidArgumentError: interval_secs is not positive.
        StorageError: storage does not answer, also when asked again; call it anew, with the last epoch as `after`.
    """
    if not interval_secs > 0:
        raise InvalidArgumentError(f"interval_secs must be positive, got {interval_secs!r}")
    commits = commits_of(open_store(directory), step_names(options or ocp.CheckpointManagerOptions()))
    followed = _Followed(commits, -1 if after is None else after)
    deadline = Deadline(timeout_secs) if timeout_secs is not None else None
    pause = threading.Event()
    while True:
        for epoch in followed.new():
            yield epoch
            deadline = Deadline(timeout_secs) if timeout_secs is not None else None
        if (deadline is not None and deadline.passed()) or (stop is not None and stop()):
            return
        pause.wait(interval_secs if deadline is None else max(0.0, min(interval_secs, deadline.left())))


class _Followed:
    """What was yielded already.

    Args:
        commits: the directory.
        after: yield only later epochs.
    """

    def __init__(self, commits: Commits, after: int):
        self._commits = commits
        self._after = after
        self._attempts: dict[int, str | None] = {}  # by epoch, ascending; None: its record is damaged

    def new(self) -> Iterator[int]:
        """The epochs that are there now and were not yielded yet, ascending."""
        there = self._commits.list_epochs()
        self._forget(frozenset(there))
        last = next(reversed(self._attempts), self._after)
        for epoch in there:
            if epoch > last:
                attempt = self._commits.read_attempt(epoch)
                if attempt is None and epoch not in self._commits.list_epochs():
                    continue  # deleted just now
                self._attempts[epoch] = attempt
                yield epoch

    def _forget(self, there: frozenset[int]) -> None:
        """Takes back the newest as far as they are gone or others have their numbers; mostly reads one record."""
        for epoch in reversed(list(self._attempts)):
            now = self._commits.read_attempt(epoch) if epoch in there else None
            if epoch in there and (now is None or now == self._attempts[epoch]):
                return
            del self._attempts[epoch]
