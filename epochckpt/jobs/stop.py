"""Stop conditions: small objects that look at each finished epoch and say whether the run should end.

```python
stop = ec.stop.max_epochs(100) | ec.stop.no_improvement("loss", patience=5, mode="min") | ec.stop.preempted
stop = stop | (lambda ctx: ctx.metrics["loss"] < 0.01)  # anything callable will do
```

Guarantees:
- `|` and `&` call *every* operand for every epoch: a condition that counts never misses one because of another;
- an answer that is no bool is an error that names the condition and the epoch: a forgotten `return` cannot train for
  ever, and a number cannot stop a run;
- the state of a condition is a JSON value, saved under the condition's `repr`; a condition whose `repr` has changed is
  another one and starts fresh. State that cannot be used is logged and never raises: it must not keep a run from
  resuming.
"""

from __future__ import annotations

import math
import operator
import os
import pathlib
import re
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs.conditions import (
    Condition,
    Context,
    alternatives,
    as_condition,
    checked,
    is_foreign,
    load_states,
    save_states,
    shown,
    warn_unusable,
    why,
)
from epochckpt.storage import expanded

__all__ = [
    "Condition",
    "Context",
    "alternatives",
    "as_condition",
    "checked",
    "file_exists",
    "is_foreign",
    "load_states",
    "max_epochs",
    "max_time",
    "nan",
    "no_improvement",
    "preempted",
    "save_states",
    "target",
    "why",
]

_REAL = (np.floating, np.integer, np.bool_)
_DAMAGED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


class max_epochs(Condition):
    """True once so many epochs have been completed, by all runs together.

    Args:
        n: how many, at least 1.

    Attributes:
        epochs: the same.
    """

    def __init__(self, n: int):
        self.epochs = _count("max_epochs(n)", n)

    def holds(self, ctx: Context) -> bool:
        """Whether the epoch's number has come to n."""
        return ctx.epoch >= self.epochs

    def __repr__(self) -> str:
        return f"max_epochs({self.epochs})"


class max_time(Condition):
    """True after the first epoch that ends when the time is up.

    Args:
        secs: seconds, more than 0.
        total: count the time of all runs of the job; without it this run's only, so that every start has as much.
    """

    def __init__(self, secs: float, total: bool = False):
        self._secs, self._total = _number("max_time(secs)", secs), _flag("max_time(total)", total)
        if self._secs <= 0:
            raise InvalidArgumentError(f"max_time(secs) must be more than 0, got {secs!r}")

    def holds(self, ctx: Context) -> bool:
        """Whether the time is up."""
        return (ctx.total_secs if self._total else ctx.elapsed_secs) >= self._secs

    def __repr__(self) -> str:
        return f"max_time({self._secs}, total={self._total})"


class target(Condition):
    """True after an epoch whose metric has reached a value.

    Args:
        metric: its name.
        value: what to reach.
        mode: "max": reached by this much or more; "min": by this much or less.
    """

    def __init__(self, metric: str, value: float, mode: Literal["max", "min"] = "max"):
        self._metric, self._value = _name("target(metric)", metric), _number("target(value)", value)
        self._mode = _one_of_two("target(mode)", mode)

    def __call__(self, ctx: Context) -> bool:
        """Looks at the metric, which must be there."""
        return self._reached(_metric(self, self._metric, ctx))

    def holds(self, ctx: Context) -> bool:
        """Whether the metric is there and has reached the value."""
        return _known(self, self._metric, ctx) and self(ctx)

    def _reached(self, found: float) -> bool:
        return found >= self._value if self._mode == "max" else found <= self._value

    def __repr__(self) -> str:
        return f"target({self._metric!r}, {self._value}, mode={self._mode!r})"


class no_improvement(Condition):
    """True once so many epochs in a row have not improved a metric.

    The best value so far counts, of all runs. NaN never improves, nor does the worst infinity.

    Args:
        metric: its name.
        patience: how many epochs in a row, at least 1.
        min_delta: an improvement is larger than this.
        mode: "max": more is better; "min": less is.
    """

    def __init__(self, metric: str, patience: int, min_delta: float = 0.0, mode: Literal["max", "min"] = "max"):
        self._metric = _name("no_improvement(metric)", metric)
        self._patience = _count("no_improvement(patience)", patience)
        self._min_delta = _number("no_improvement(min_delta)", min_delta)
        self._mode = _one_of_two("no_improvement(mode)", mode)
        if self._min_delta < 0:
            raise InvalidArgumentError(f"no_improvement(min_delta) must be 0 or more, got {min_delta!r}")
        self._start_fresh()

    def _start_fresh(self) -> None:
        self._best, self._count = (-math.inf if self._mode == "max" else math.inf), 0

    def __call__(self, ctx: Context) -> bool:
        """Compares the metric, which must be there, with the best so far."""
        found = _metric(self, self._metric, ctx)
        sign = 1 if self._mode == "max" else -1
        improved = sign * found > sign * self._best + self._min_delta
        self._best, self._count = (found, 0) if improved else (self._best, self._count + 1)
        return self._count >= self._patience

    def holds(self, ctx: Context) -> bool:
        """Whether the epochs looked at so far end in that many without improvement; does not look at this one."""
        del ctx
        return self._count >= self._patience

    def get_state(self) -> Any:
        """The best value so far (an infinity as text, which is JSON) and how many epochs have not improved it."""
        return {"best": self._best if math.isfinite(self._best) else str(self._best), "count": self._count}

    def set_state(self, state: Any) -> None:
        """Takes the state."""
        self._start_fresh()
        if state is None:
            return
        try:
            best, count = state["best"], state["count"]
            best = {"inf": math.inf, "-inf": -math.inf}[best] if isinstance(best, str) else _number("best", best)
            self._best, self._count = best, _count("count", count, least=0)
        except (TypeError, LookupError, InvalidArgumentError):
            warn_unusable(self, state, '{"best": number, "count": whole number}')

    def __repr__(self) -> str:
        return (
            f"no_improvement({self._metric!r}, patience={self._patience}, min_delta={self._min_delta}, "
            f"mode={self._mode!r})"
        )


class nan(Condition):
    """True after an epoch whose metric is NaN (an infinity is not).

    Args:
        metric: its name.
    """

    def __init__(self, metric: str):
        self._metric = _name("nan(metric)", metric)

    def __call__(self, ctx: Context) -> bool:
        """Looks at the metric, which must be there."""
        return math.isnan(_metric(self, self._metric, ctx))

    def holds(self, ctx: Context) -> bool:
        """Whether the metric is there and is NaN."""
        return _known(self, self._metric, ctx) and self(ctx)

    def __repr__(self) -> str:
        return f"nan({self._metric!r})"


class _Preempted(Condition):
    @overload
    def __call__(self) -> Condition: ...
    @overload
    def __call__(self, ctx: Context) -> bool: ...
    def __call__(self, ctx: Context | None = None) -> bool | Condition:
        return self if ctx is None else self.holds(ctx)  # so that `preempted()` is a condition, too

    def holds(self, ctx: Context) -> bool:
        return ctx.preempted

    def __repr__(self) -> str:
        return "preempted"


preempted = _Preempted()
"""True after an epoch during which the run was asked to end soon. `preempted()` is the same."""


class file_exists(Condition):
    """True after an epoch at whose end a file or folder exists: a way to end a run from outside.

    A look that fails is logged and counts as "not there": an outage of storage ends no run.

    Args:
        path: local, or what etils can read (`gs://…`, `s3://…`).
    """

    def __init__(self, path: str | os.PathLike[str]):
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
        if not isinstance(name, str) or not name or "\0" in name:
            raise InvalidArgumentError(f"file_exists(path) must be a path, got {path!r}")
        if isinstance(path, pathlib.PurePath) and _DAMAGED_URL.match(name):
            raise InvalidArgumentError(f"file_exists(path) {name!r} was a URL before pathlib changed it; pass a str")
        try:
            self._name, self._path = name, epath.Path(expanded(name))
        except KeyError:  # what etils says of a scheme that it does not know
            raise InvalidArgumentError(
                f"file_exists(path) is {name!r}: expected a local path, gs://… or s3://…"
            ) from None

    def holds(self, ctx: Context) -> bool:
        """Looks whether the file is there."""
        try:
            return self._path.exists()
        except ImportError:  # it could never look: not an outage
            raise
        except Exception as error:  # every store has its own
            logging.warning("stop condition %r, epoch %d: cannot look: %s", self, ctx.epoch, say(error))
            return False

    def __repr__(self) -> str:
        return f"file_exists({self._name!r})"


def _known(condition: Condition, metric: str, ctx: Context) -> bool:
    if metric not in ctx.metrics:
        logging.warning("stop condition %r, epoch %d: %s", condition, ctx.epoch, _lacks(metric, ctx))
    return metric in ctx.metrics


def _lacks(metric: str, ctx: Context) -> str:
    names = ", ".join(map(repr, sorted(map(str, ctx.metrics)))) or "none"
    return f"there is no metric {metric!r} among those of the epoch ({names})"


def _metric(condition: Condition, metric: str, ctx: Context) -> float:
    where = f"stop condition {condition!r}, epoch {ctx.epoch}"
    if metric not in ctx.metrics:
        raise InvalidArgumentError(f"{where}: {_lacks(metric, ctx)}; return it from an epoch task, or correct the name")
    found = _as_float(ctx.metrics[metric])
    if found is None:
        raise InvalidArgumentError(
            f"{where}: metric {metric!r} is {shown(ctx.metrics[metric])}; expected a real number, or an array of one "
            "without dimensions"
        )
    return found


def _number(what: str, value: Any) -> float:
    """A parameter that is a finite number; a bool is none."""
    number = math.nan if isinstance(value, bool | np.bool_) else _as_float(value)
    if number is None or not math.isfinite(number):
        raise InvalidArgumentError(f"{what} must be a finite number, got {shown(value)}")
    return number


def _as_float(value: Any) -> float | None:
    """A real number of Python, or one of NumPy or jax without dimensions, as float; None if it is something else."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        real = value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in _REAL)
    else:
        real = isinstance(value, int | float)
    try:
        return float(value) if real else None
    except OverflowError:  # an int beyond all floats
        return None


def _count(what: str, value: Any, least: int = 1) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise InvalidArgumentError(f"{what} must be a whole number, at least {least}, got {shown(value)}")
    return count


def _flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{what} must be True or False, got {shown(value)}")
    return value


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"{what} must be the name of a metric, got {shown(value)}")
    return value


def _one_of_two(what: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ("max", "min"):
        raise InvalidArgumentError(f'{what} must be "max" or "min", got {shown(value)}')
    return value
