"""Metrics by name: what a name means wherever a metric is named, in options, stop conditions, commands and plots."""

import sys
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8  # inner mappings below that are values
_MAX_FLOAT = sys.float_info.max


def flat(metrics: Any) -> dict[str, Any]:
    """Metrics by name: one in an inner mapping is named `outer/inner`, and one that has no name `metrics`.

    A plain key `outer/inner` wins over an inner mapping's metric of this name.
    """
    return _flat(metrics, "", 0) if isinstance(metrics, Mapping) else {"metrics": metrics}


def _flat(metrics: Mapping[Any, Any], prefix: str, depth: int) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            inner = _flat(value, f"{prefix}{name}/", depth + 1)
            flat.update({key: each for key, each in inner.items() if key not in flat})
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def numbers(metrics: Any) -> dict[str, float]:
    """The numbers among metrics, by name: those that a float can hold, infinities and NaN."""
    numbers = {name: value for name, value in flat(metrics).items() if _is_number(value)}
    return {name: value for name, value in numbers.items() if isinstance(value, float) or abs(value) <= _MAX_FLOAT}


def number(metrics: Any, name: str) -> float | None:
    """One metric as a number, which may be an integer beyond every float; None if it is absent or no number."""
    value = flat(metrics).get(name)
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
