"""`attach_metrics`: another job's metrics for an epoch; needs nobody."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from epochckpt import attached
from epochckpt.opening import commits_of
from epochckpt.reading import epoch_number
from epochckpt.step_folders import step_names
from epochckpt.storage import open_store


def attach_metrics(
    directory: str | os.PathLike[str],
    epoch: int,
    metrics: Mapping[str, Any],
    source: str,
    *,
    attempt: str | None = None,
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
        source: who says so: letters, digits, `.`, `_`, `-`. A source that attaches again replaces what it said before.
        attempt: the attempt that they are about, as `CheckpointManager.attempt(epoch)` said before the epoch was read;
            if the epoch was replaced since, nothing is attached.
        options: the step name format, if it is not the default.

    Raises:
        EpochNotFoundError: there is no such epoch.
        EpochDeleted: it was deleted or replaced meanwhile; nothing is attached to anything.
        InvalidArgumentError: the epoch has a metric of such a name from somebody else, or it is no JSON.
        UnsupportedError: stock Orbax wrote the epoch.
        AccessError: no permission to write there.
    """
    commits = commits_of(open_store(directory), step_names(options or ocp.CheckpointManagerOptions()))
    attached.attach(commits, epoch_number(epoch), metrics, source, attempt)
