"""What is said once, when the first epoch of a run has been trained: what its tasks have made that will be lost."""

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
    what_to_do: str,
) -> None:
    """Names the blobs that stay from epoch to epoch and are not checkpointed.

    Args:
        epoch: that has been trained.
        spaces: the workspaces of this process whose nodes are checkpointed.
        saved: the blobs that are checkpointed, by node.
        chosen: those of some blobs that the user has not left out.
        what_to_do: `warn`, `error` or `ignore`.

    Raises:
        InvalidArgumentError: there are some, and that is an error.
    """
    unsaved = {node: chosen([name for name in ws if name not in saved.get(node, ())]) for node, ws in spaces.items()}
    listed = [f"{', '.join(map(repr, names))} of node {node}" for node, names in unsaved.items() if names]
    if not listed or what_to_do == IGNORE:
        return
    message = (
        f"blobs that are not checkpointed are in the workspace after epoch {epoch}: {'; '.join(listed)}. They were not "
        "there when init had run, or the epoch that was resumed lacks them. A resumed run that reads them before it "
        "makes them computes something else: make them in init, put them into ws.live, or leave them out with "
        "JobRunner(exclude=[…]); unsaved_blobs='ignore' says that all of them are temporary"
    )
    if what_to_do == ERROR:
        raise InvalidArgumentError(message)
    logging.warning("%s", message)


def check_metrics(
    returned: Mapping[str, Sequence[Any]], tasks: Sequence[Task], metrics: Mapping[str, Any], primary: str
) -> None:
    """Names what tasks of the epoch have returned that looks like metrics, and is none.

    Args:
        returned: what the tasks of each node of this process returned, in their order.
        tasks: of the epoch group.
        metrics: of the epoch.
        primary: the node whose metrics count.
    """
    numbers: dict[Task, Any] = {}
    for node, values in returned.items():
        here = [task for task in tasks if task.node in (None, node)]
        numbers |= {task: value for task, value in zip(here, values, strict=True) if _is_numeric(value)}
        given = {name for value in values if isinstance(value, Mapping) for name in value}
        lost = sorted(map(str, given - metrics.keys()))
        if lost:
            logging.warning(
                "metrics %s of node %s are not kept: those of the first node, %s, count", lost, node, primary
            )
    for task, value in numbers.items():
        logging.warning(
            "%s returned a %s, which is no metric: only a mapping is, such as {'loss': loss}. It is the task's output",
            task,
            type(value).__name__,
        )


def _is_numeric(value: Any) -> bool:
    """Whether a value is a number or array, or a list of such; a bool is the answer to a stop condition."""
    if value is None or isinstance(value, Mapping | str | bytes):
        return False
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(map(_is_number, leaves))


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, np.generic | np.ndarray | jax.Array):
        return leaf.dtype != np.bool_
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)
