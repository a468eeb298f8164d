"""For evaluators beside a run: `follow` yields epochs as they are committed, `attach_metrics` adds metrics to them.

Neither needs another process; `follow` only reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp

from epochckpt._threads import Deadline
from epochckpt.commit import Commits, attached_metrics, commits_of
from epochckpt.errors import InvalidArgumentError
from epochckpt.manager.reader import epoch_number
from epochckpt.orbax import StepNames
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
    is not. Epochs that are saved anew, after a rollback or a deletion of the newest, are yielded again. Reading one
    that is deleted meanwhile raises `EpochDeletedError`: go on with the next.

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

    Example:
        >>> import orbax.checkpoint as ocp
        >>> import epochckpt as ec
        >>> with ec.CheckpointManager("run") as manager:
        ...     for epoch in range(3):
        ...         saved = manager.save(epoch, args=ocp.args.StandardSave({"w": 1.5}))
        >>> list(ec.follow("run", after=0, timeout_secs=0))
        [1, 2]
    """
    if not interval_secs > 0:
        raise InvalidArgumentError(f"interval_secs must be positive, got {interval_secs!r}")
    commits = commits_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
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


def attach_metrics(
    directory: str | os.PathLike[str],
    epoch: int,
    metrics: Mapping[str, Any],
    source: str,
    *,
    save_id: str | None = None,
    options: ocp.CheckpointManagerOptions | None = None,
) -> None:
    """Attaches metrics to a committed epoch: what an evaluator found out, for example.

    They are kept in one small file per source beside the epoch's record, which never changes. `metrics(epoch)` of any
    manager has them at once; a running job looks at them after each commit, when it decides which epochs to keep
    (`best_fn`), and when it is asked to `reload()`. With Orbax's default `keep_checkpoints_without_metrics=True` an
    epoch whose metric is not there yet (`best_fn` returns None or raises KeyError) is kept until it is.

    Args:
        directory: where the epochs live: a path or a URL.
        epoch: its number.
        metrics: JSON by name; NumPy and jax scalars are fine.
        source: name of the evaluator: letters, digits, `.`, `_`, `-`. Attaching again replaces its metrics.
        save_id: the save that they are about: `CheckpointManager.save_id(epoch)` before the epoch was read;
            if the epoch was replaced since, nothing is attached.
        options: the step name format, if it is not the default.

    Raises:
        EpochNotFoundError: there is no such epoch.
        EpochDeletedError: it was deleted or replaced meanwhile; nothing is attached to anything.
        InvalidArgumentError: another source has a metric of such a name, or they are no JSON.
        UnsupportedError: stock Orbax wrote the epoch.
        AccessError: no permission to write there.

    Example:
        >>> import orbax.checkpoint as ocp
        >>> import epochckpt as ec
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(0, args=ocp.args.StandardSave({"w": 1.5}), metrics={"loss": 0.5})
        >>> ec.attach_metrics("run", 0, {"accuracy": 0.75}, source="evaluator")
        >>> with ec.CheckpointManager("run") as manager:
        ...     sorted(manager.metrics(0).items())
        [('accuracy', 0.75), ('loss', 0.5)]
    """
    commits = commits_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
    attached_metrics.attach(commits, epoch_number(epoch), metrics, source, save_id)
