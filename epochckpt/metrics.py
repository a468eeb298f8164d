"""The metrics of an epoch: what its tasks returned, as plain scalars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from epochckpt.errors import InvalidArgumentError


def merged(returned: Iterable[Any]) -> dict[str, Any]:
    """One mapping of what the tasks of one node returned; what is no mapping is left out.

    Raises:
        InvalidArgumentError: two tasks gave a metric of one name, or one is not a scalar.
    """
    out: dict[str, Any] = {}
    for mapping in returned:
        if not isinstance(mapping, Mapping):
            continue
        for name, value in mapping.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"the names of metrics are strings, got {name!r}")
            if name in out:
                raise InvalidArgumentError(f"two tasks returned a metric {name!r}; rename one")
            out[name] = scalar(name, value)
    return out


def scalar(name: str, value: Any) -> bool | int | float:
    """A metric as a Python scalar; waits for it, if it is still being computed.

    Raises:
        InvalidArgumentError: it is none.
    """
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
        plain = np.asarray(value).item()
        if isinstance(plain, bool | int | float):
            return plain
    shown = f"{type(value).__name__} of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
    raise InvalidArgumentError(f"metric {name!r} must be a scalar (a number, or a 0-d array), got a {shown}")
