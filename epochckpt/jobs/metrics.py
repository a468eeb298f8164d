"""The metrics that the tasks of an epoch return, and warnings of values that were probably meant as metrics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.job import Task, TaskGroup
from epochckpt.jobs.stop_values import as_scalar


def merge(returned: Iterable[Any]) -> dict[str, bool | int | float]:
    """One mapping of those that the tasks of a node returned, of Python scalars; waits until they are computed."""
    merged: dict[str, bool | int | float] = {}
    for name, value in (pair for one in returned if isinstance(one, Mapping) for pair in one.items()):
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the names of metrics are strings, got {name!r}")
        if name in merged:
            raise InvalidArgumentError(f"two tasks returned a metric {name!r}; rename one")
        scalar = as_scalar(value)
        if scalar is None:
            described = f"{type(value).__name__}{f' of shape {value.shape}' if hasattr(value, 'shape') else ''}"
            described += " that is too large for a float" if isinstance(value, int) else ""
            raise InvalidArgumentError(
                f"metric {name!r} must be a scalar (a number, or a 0-d array), got a {described}"
            )
        merged[name] = scalar
    return merged


def check(metrics: Mapping[str, Any], returned: Mapping[str, Sequence[Any]], group: TaskGroup, primary: str) -> None:
    """Warns of metrics that are not kept, and of values probably meant as metrics; `returned`: by node."""
    numbers: dict[Task, str] = {}
    for node, values in returned.items():
        tasks = (task for task in group if task.node in (None, node))
        numbers |= {t: type(value).__name__ for t, value in zip(tasks, values, strict=True) if _is_numeric(value)}
        lost = {name for value in values if isinstance(value, Mapping) for name in value} - metrics.keys()
        if lost:
            names = sorted(map(str, lost))
            logging.warning("metrics %s of node %s are not kept: those of node %s count", names, node, primary)
    for task, kind in numbers.items():
        logging.warning("%s returned a %s, which is no metric: return a mapping, such as {'loss': loss}", task, kind)


def _is_numeric(value: Any) -> bool:
    """Whether a value is a number or array, or a pytree of such; a bool is the answer to a stop condition."""
    leaves = [] if isinstance(value, Mapping) else jax.tree.leaves(value)
    numbers = [x for x in leaves if isinstance(x, int | float | np.generic | np.ndarray | jax.Array)]
    return 0 < len(leaves) == len(numbers) and bool not in [getattr(x, "dtype", type(x)) for x in numbers]
