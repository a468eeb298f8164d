"""For evaluators beside a run: `follow` yields epochs as they are committed, `attach_metrics` adds metrics to them.

Neither needs another process; `follow` only reads.
"""

import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp

from epochckpt._durations import seconds
from epochckpt._threads import Deadline
from epochckpt.directory import EpochDirectory, attaching, directory_of
from epochckpt.manager.numbers import epoch_number
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store


def follow(
    directory: str | os.PathLike[str],
    after: int | None = None,
    timeout_secs: float | str | None = None,
    *,
    interval_secs: float | str = 1.0,
    options: ocp.CheckpointManagerOptions | None = None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Yields each newly committed epoch, in ascending order, as it appears.

    If several appeared since the last look, each is yielded, unless it was deleted before that look. Epochs that are
    saved anew, after a rollback or a deletion of the newest, are yielded again. Reading an epoch that is deleted
    meanwhile raises `EpochDeletedError`: go on with the next.

    Args:
        directory: checkpoint directory; need not exist yet.
        after: yield only later epochs; None: all, the existing ones first.
        timeout_secs: end when no new epoch appeared for this long, in seconds or as `"10min"`; None: never.
        interval_secs: how often to look, in the same form.
        options: the step name format, if it is not the default.
        stop: called after each look. After it returns True, one more look follows, and its epochs are the last.

    Raises:
        InvalidArgumentError: interval_secs is not above 0, or a time cannot be understood.
        StorageError: storage does not answer, also when asked again; call it anew, with the last epoch as `after`.

    Examples:
        >>> with ec.CheckpointManager("run") as manager:
        ...     for epoch in range(3):
        ...         saved = manager.save(epoch, args=ocp.args.StandardSave({"w": 1.5}))
        >>> list(ec.follow("run", after=0, timeout_secs=0))
        [1, 2]
    """
    interval = seconds("interval_secs", interval_secs)
    wait_secs = math.inf if timeout_secs is None else seconds("timeout_secs", timeout_secs, zero=True)
    epoch_directory = directory_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
    yielded: dict[int, str | None] = {}  # attempts by epoch, ascending; None: its record is damaged
    deadline = Deadline(wait_secs)
    pause = threading.Event()
    ending = False  # `stop` has said so: one more look
    while True:
        epochs = epoch_directory.list_epochs()
        look = Deadline(interval)
        late = False
        _forget_replaced(epoch_directory, epochs, yielded)
        last = next(reversed(yielded), -1 if after is None else after)
        for number, epoch in enumerate(e for e in epochs if e > last):
            late = bool(number) and look.passed() and not ending
            if late:
                break  # the caller took its time: some of these may be deleted by now
            save_id = epoch_directory.seen_save_id(epoch)
            if save_id is None and epoch not in epoch_directory.list_epochs():
                continue  # deleted just now
            yielded[epoch] = save_id
            yield epoch
            deadline = Deadline(wait_secs)
        if ending or (not late and deadline.passed()):
            return
        ending = stop is not None and stop()
        if not (late or ending):
            pause.wait(max(0.0, min(interval, deadline.left())))


def _forget_replaced(epoch_directory: EpochDirectory, epochs: Collection[int], yielded: dict[int, str | None]) -> None:
    """Forgets the newest epochs as far as they are gone or were saved anew; mostly reads one record."""
    for epoch in reversed(list(yielded)):
        if epoch in epochs:
            save_id = epoch_directory.seen_save_id(epoch)
            if save_id is None or save_id == yielded[epoch]:
                return
        del yielded[epoch]


def attach_metrics(
    directory: str | os.PathLike[str],
    epoch: int,
    metrics: Mapping[str, Any],
    source: str,
    *,
    save_id: str | None = None,
    options: ocp.CheckpointManagerOptions | None = None,
) -> None:
    """Attaches metrics to a committed epoch, such as those of an evaluator.

    They are kept in one small file per source beside the epoch's record, which never changes. `metrics(epoch)` of any
    manager has them at once; a running job reads them after each commit, when it decides which epochs to keep
    (`best_fn`), and with `reload()`. With Orbax's default `keep_checkpoints_without_metrics=True` an epoch is kept as
    long as its metric is missing (`best_fn` returns None or raises KeyError).

    Args:
        directory: where the epochs live: a path or a URL.
        epoch: its number.
        metrics: JSON by name; NumPy and jax scalars are fine.
        source: name of the evaluator: letters, digits, `.`, `_`, `-`. Attaching again replaces its metrics.
        save_id: `CheckpointManager.save_id(epoch)` from before the epoch was read: if the epoch was replaced since,
            nothing is attached.
        options: the step name format, if it is not the default.

    Raises:
        EpochNotFoundError: there is no such epoch.
        EpochDeletedError: it was deleted or replaced meanwhile; nothing is attached.
        InvalidArgumentError: another source has a metric of that name, or the metrics are no JSON.
        UnsupportedError: stock Orbax wrote the epoch.
        AccessError: no permission to write there.

    Examples:
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(0, args=ocp.args.StandardSave({"w": 1.5}), metrics={"loss": 0.5})
        >>> ec.attach_metrics("run", 0, {"accuracy": 0.75}, source="evaluator")
        >>> with ec.CheckpointManager("run") as manager:
        ...     sorted(manager.metrics(0).items())
        [('accuracy', 0.75), ('loss', 0.5)]
    """
    epoch_directory = directory_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
    attaching.attach(epoch_directory, epoch_number(epoch), metrics, source, save_id)
