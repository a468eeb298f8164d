"""What is checked once, when the first epoch of a run has been trained: what its tasks have made that will be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.job import Task
from epochckpt.jobs.workspace import Workspace

WARN, ERROR, IGNORE = "warn", "error", "ignore"


def check_blobs(
    epoch: int,
    spaces: Mapping[str, Workspace],
    saved: Mapping[str, Sequence[str]],
    chosen: Callable[[Iterable[str]], Sequence[str]],
    unsaved_blobs: str,
) -> None:
    """Names the blobs in checkpointed workspaces that stay from epoch to epoch and are not among the `saved` ones.

    `chosen` picks the blobs that the user has not left out.
    """
    unsaved = {node: chosen([name for name in ws if name not in saved.get(node, ())]) for node, ws in spaces.items()}
    listed = [f"{', '.join(map(repr, names))} of node {node}" for node, names in unsaved.items() if names]
    if not listed or unsaved_blobs == IGNORE:
        return
    message = (
        f"blobs that are not checkpointed are in the workspace after epoch {epoch}: {'; '.join(listed)}. They were not "
        "there when init had run, or the epoch that was resumed lacks them. A resumed run that reads them before it "
        "makes them computes something else: make them in init, put them into ws.live, or leave them out with "
        "JobRunner(exclude=[…]); unsaved_blobs='ignore' says that all of them are temporary"
    )
    if unsaved_blobs == ERROR:
        raise InvalidArgumentError(message)
    logging.warning("%s", message)


def check_metrics(
    returned: Mapping[str, Sequence[Any]], tasks: Sequence[Task], metrics: Mapping[str, Any], primary: str
) -> None:
    """Names the metrics that are not kept, and what looks like a metric and is none.

    `returned` is what the `tasks` of the epoch group returned, by node of this process; the `primary` node's `metrics`
    count.
    """
    numbers: dict[Task, str] = {}
    for node, values in returned.items():
        for task, value in zip((t for t in tasks if t.node in (None, node)), values, strict=True):
            if _is_numeric(value):
                numbers[task] = type(value).__name__
        lost = {name for value in values if isinstance(value, Mapping) for name in value} - metrics.keys()
        if lost:
            names = sorted(map(str, lost))
            logging.warning("metrics %s of node %s are not kept: those of node %s count", names, node, primary)
    for task, kind in numbers.items():
        logging.warning("%s returned a %s, which is no metric: return a mapping, such as {'loss': loss}", task, kind)


def _is_numeric(value: Any) -> bool:
    """Whether a value is a number or array, or a pytree of such; a bool is the answer to a stop condition."""
    if isinstance(value, Mapping):
        return False
    leaves, numbers = jax.tree.leaves(value), (int, float, np.generic, np.ndarray, jax.Array)
    return bool(leaves) and all(
        isinstance(x, numbers) and getattr(x, "dtype", type(x)) not in (bool, np.bool_) for x in leaves
    )
