"""Stop conditions: small objects that look at each finished epoch and say whether the run should end.

- `|` and `&` show every epoch to every operand: a condition that counts epochs never misses one.
- An answer that is no bool is an error: a forgotten `return` cannot make a run train for ever.
- A condition that is `registered` is one of `ec.stop`: flags take it, docs/jobs-reference.md lists it, and tests try
  its `example`. All else that is known of it stands in its class.
- A condition may have a state, see `stop_states`.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from absl import logging

from epochckpt import _units
from epochckpt._metrics import flat
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs.stop_values import as_scalar, check, finite_number, shown, whole_number
from epochckpt.storage import expanded, open_file, path_text, plain, with_settings

__all__ = [
    "Condition",
    "Context",
    "as_condition",
    "file_exists",
    "max_epochs",
    "max_steps",
    "max_time",
    "metric_above",
    "nan",
    "no_improvement",
    "preempted",
    "target",
]

Mode = Literal["max", "min"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a stop condition is shown of a finished epoch.

    Attributes:
        epoch: epochs, or steps, completed by all runs of the job together.
        metrics: what the epoch's tasks returned, by name.
        workspace: the job's blobs.
        elapsed_secs: seconds since this run began.
        total_secs: seconds that all runs of the job took together, this one included.
        preempted: whether this run has been asked to end soon.
        unit: what `epoch` counts: `epoch` or `step`.
    """

    epoch: int
    metrics: Mapping[str, Any]
    workspace: Any
    elapsed_secs: float
    total_secs: float
    preempted: bool = False
    unit: str = "epoch"

    @property
    def step(self) -> int:
        """The same as `epoch`, for a job that counts steps."""
        return self.epoch


class Condition(abc.ABC):
    """When a run should end.

    A subclass defines `holds`; one that counts something also `__call__`, `get_state` and `set_state`. Its `repr` is
    the key of its state: it should name the parameters, and be the same in every run.
    """

    operands: Sequence[Condition] = ()
    """The conditions that `|` or `&` has joined; empty for all others."""

    example: ClassVar[tuple[Any, ...]] = ()
    """Arguments that make such a condition, for tests."""

    _repr = ""  # its `repr`, where that is not its class's name

    def __call__(self, ctx: Context) -> bool:
        """Looks at a finished epoch, once for each epoch; may change the condition's state. By default: `holds`."""
        return self.holds(ctx)

    @abc.abstractmethod
    def holds(self, ctx: Context) -> bool:
        """Whether it is true now, without changing its state: asked when a finished run is started again.

        A metric that `ctx` lacks makes it false here: what cannot be known ends no run.
        """

    def get_state(self) -> Any:
        """What the next run has to know, as a JSON value; None if nothing."""
        return None

    def set_state(self, state: Any) -> None:
        """Restores what `get_state` returned in an earlier run; None, or a state that raises here, starts fresh."""
        del state

    def __or__(self, other: Condition | Callable[[Context], Any]) -> Condition:
        return _Both("|", self, as_condition(other))

    def __ror__(self, other: Callable[[Context], Any]) -> Condition:
        return _Both("|", as_condition(other), self)

    def __and__(self, other: Condition | Callable[[Context], Any]) -> Condition:
        return _Both("&", self, as_condition(other))

    def __rand__(self, other: Callable[[Context], Any]) -> Condition:
        return _Both("&", as_condition(other), self)

    def __repr__(self) -> str:
        return self._repr or type(self).__qualname__

    def __bool__(self) -> bool:
        # `a or b` is a, `a and b` is b: one condition would be dropped without a word
        raise InvalidArgumentError(f"{self!r} is no bool; compose conditions with | and &, not with 'or' and 'and'")


class _Both(Condition):
    """Two conditions, joined by `|` or `&`. Only its operands have a state."""

    def __init__(self, sign: str, *operands: Condition):
        self.sign = sign
        self.operands = operands

    def __call__(self, ctx: Context) -> bool:
        return self._joined([look(operand, ctx) for operand in self.operands])  # a list: every operand is called

    def holds(self, ctx: Context) -> bool:
        return self._joined([held(operand, ctx) for operand in self.operands])

    def _joined(self, answers: list[bool]) -> bool:
        return any(answers) if self.sign == "|" else all(answers)

    def __repr__(self) -> str:
        return f"({f' {self.sign} '.join(map(repr, self.operands))})"


class _Wrapped(Condition):
    """A callable; see `as_condition`."""

    def __init__(self, function: Callable[[Context], Any]):
        self.function: Any = function
        self._repr = str(getattr(function, "__qualname__", type(function).__qualname__))
        self._stateful = all(callable(getattr(function, method, None)) for method in ("get_state", "set_state"))
        self._fresh: list[Any] = []  # the state before the first run

    def holds(self, ctx: Context) -> bool:
        return checked(self, self.function(ctx), ctx)

    def get_state(self) -> Any:
        return self.function.get_state() if self._stateful else None

    def set_state(self, state: Any) -> None:
        if not self._stateful:
            return
        if state is None and not self._fresh:  # the first run begins
            with contextlib.suppress(Exception):  # raised at the end of the first epoch
                self._fresh.append(copy.deepcopy(self.function.get_state()))
        else:  # a user's object need not know what None stands for
            self.function.set_state(copy.deepcopy(self._fresh[0]) if state is None else state)


CONDITIONS: dict[str, type[Condition] | Condition] = {}
"""The conditions of `ec.stop`, by name: classes, and conditions without parameters."""

C = TypeVar("C", bound="type[Condition] | Condition")


def registered(condition: C) -> C:
    """Adds a condition to those of `ec.stop`."""
    CONDITIONS[condition.__name__ if isinstance(condition, type) else repr(condition)] = condition
    return condition


@registered
class max_epochs(Condition):
    """True once `n` epochs, at least 1, have been completed by all runs together.

    Attributes:
        n: as given.
    """

    unit = "epoch"
    example = (5,)

    def __init__(self, n: int):
        self.n = whole_number(f"max_{self.unit}s(n)", n)

    def __repr__(self) -> str:
        return f"max_{self.unit}s({self.n})"

    def holds(self, ctx: Context) -> bool:
        return ctx.epoch >= self.n


@registered
class max_steps(max_epochs):
    """True once `n` steps, at least 1, have been completed by all runs together, of a job that counts steps.

    Attributes:
        n: as given.
    """

    unit = "step"


@registered
class max_time(Condition):
    """True after the first epoch that ends when so many seconds, or `"2h"`, of this run or of all runs are over.

    Args:
        secs: seconds, more than 0, or a duration such as `"15min"` or `"2h"`.
        total: count the time of all runs of the job; without it this run's only, so that every start has as much.
    """

    example = ("15min",)

    def __init__(self, secs: float | str, total: bool = False):
        try:
            number = _units.parse_secs(secs) if isinstance(secs, str) else secs
        except ValueError as error:
            raise InvalidArgumentError(f"max_time(secs) is {shown(secs)}: {error}") from None
        self._secs = finite_number("max_time(secs)", number)
        self._total = total
        check(self._secs > 0, "max_time(secs)", "more than 0", secs)
        check(isinstance(total, bool), "max_time(total)", "True or False", total)
        self._repr = f"max_time({self._secs}, total={total})"

    def holds(self, ctx: Context) -> bool:
        return (ctx.total_secs if self._total else ctx.elapsed_secs) >= self._secs


class OfMetric(Condition):
    """A condition on the value of one metric."""

    def __init__(self, metric: str, mode: Mode = "max"):
        name = type(self).__name__
        check(isinstance(metric, str) and metric != "", f"{name}(metric)", "the name of a metric", metric)
        check(isinstance(mode, str) and mode in ("max", "min"), f"{name}(mode)", '"max" or "min"', mode)
        self._metric = metric
        self._sign = 1 if mode == "max" else -1

    def __call__(self, ctx: Context) -> bool:
        where = _where(self, ctx)
        metrics = flat(ctx.metrics)
        if self._metric not in metrics:
            names = ", ".join(map(repr, sorted(metrics))) or "none"
            problem = f"there is no metric {self._metric!r} among those of the {ctx.unit} ({names})"
            raise InvalidArgumentError(f"{where}: {problem}; return it from an epoch task, or correct the name")
        value = metrics[self._metric]
        number = as_scalar(value)
        if number is None:
            raise InvalidArgumentError(f"{where}: metric {self._metric!r} is {shown(value)}; expected a real number")
        return self._look(float(number))

    def holds(self, ctx: Context) -> bool:
        if self._metric in flat(ctx.metrics):
            return self(ctx)
        logging.warning("%s: there is no metric %r", _where(self, ctx), self._metric)
        return False

    @abc.abstractmethod
    def _look(self, value: float) -> bool:
        """Whether this value of the metric makes the condition true."""


@registered
class target(OfMetric):
    """True after an epoch whose metric has reached a value.

    Args:
        metric: its name.
        value: what to reach.
        mode: "max": reached by this much or more; "min": by this much or less.
    """

    example = ("x", 0.5)

    def __init__(self, metric: str, value: float, mode: Mode = "max"):
        super().__init__(metric, mode)
        self._value = finite_number("target(value)", value)
        self._repr = f"target({metric!r}, {self._value}, mode={mode!r})"

    def _look(self, value: float) -> bool:
        return self._sign * value >= self._sign * self._value


@registered
class metric_above(OfMetric):
    """True after an epoch whose metric is above a limit, such as the loss of a run that diverges.

    Args:
        metric: its name.
        limit: the largest value that is still in order. NaN is not above it: see `nan`.
    """

    example = ("x", 10.0)

    def __init__(self, metric: str, limit: float):
        super().__init__(metric)
        self._limit = finite_number("metric_above(limit)", limit)
        self._repr = f"metric_above({metric!r}, {self._limit})"

    def _look(self, value: float) -> bool:
        return value > self._limit


@registered
class nan(OfMetric):
    """True after an epoch whose metric of this name is NaN (an infinity is not)."""

    example = ("x",)

    def __init__(self, metric: str):
        super().__init__(metric)
        self._repr = f"nan({metric!r})"

    def _look(self, value: float) -> bool:
        return math.isnan(value)


@registered
class no_improvement(OfMetric):
    """True once so many epochs in a row have not improved a metric.

    The best value so far counts, of all runs. NaN never improves, nor does the worst infinity.

    Args:
        metric: its name.
        patience: how many epochs in a row, at least 1.
        min_delta: an improvement is larger than this.
        mode: "max": more is better; "min": less is.
    """

    example = ("x", 2)

    def __init__(self, metric: str, patience: int, min_delta: float = 0.0, mode: Mode = "max"):
        super().__init__(metric, mode)
        self._patience = whole_number("no_improvement(patience)", patience)
        self._min_delta = finite_number("no_improvement(min_delta)", min_delta)
        check(self._min_delta >= 0, "no_improvement(min_delta)", "0 or more", min_delta)
        parameters = f"patience={self._patience}, min_delta={self._min_delta}, mode={mode!r}"
        self._repr = f"no_improvement({metric!r}, {parameters})"
        self.set_state(None)

    def _look(self, value: float) -> bool:
        improved = self._sign * value > self._sign * self._best + self._min_delta
        if improved:
            self._best = value
            self._count = 0
        else:
            self._count += 1
        return self._count >= self._patience

    def holds(self, ctx: Context) -> bool:
        del ctx  # the epochs that it has looked at count
        return self._count >= self._patience

    def get_state(self) -> Any:
        return {"best": self._best if math.isfinite(self._best) else str(self._best), "count": self._count}

    def set_state(self, state: Any) -> None:
        if state is None:
            self._best = -self._sign * math.inf
            self._count = 0
            return
        best = float(state["best"])
        count = whole_number("count", state["count"], least=0)
        check(not math.isnan(best), "best", "a number", best)
        self._best = best
        self._count = count


class _Preempted(Condition):
    """True after an epoch during which the run was asked to end soon."""

    _repr = "preempted"

    def __call__(self, ctx: Context | None = None) -> Any:
        return self if ctx is None else self.holds(ctx)  # so that `preempted()` is a condition, too

    def holds(self, ctx: Context) -> bool:
        return ctx.preempted


preempted = registered(_Preempted())
"""True after an epoch during which the run was asked to end soon. `preempted()` is the same."""


@registered
class file_exists(Condition):
    """True after an epoch at whose end a file or folder exists: a way to end a run from outside.

    The path is local, or a URL (`gs://…`, `s3://…`). A look that fails is logged and counts as "not there": an outage
    of storage ends no run. A request to a bucket is repeated once, if the URL's query does not say otherwise.
    """

    example = ("/tmp/stop",)

    def __init__(self, path: str | os.PathLike[str]):
        name = path_text(path, "file_exists(path)")
        self._is_url = "://" in name
        self._repr = f"file_exists({(plain(name) if self._is_url else name)!r})"
        self._path = os.fspath(with_settings(expanded(name), {"retries": 1}))
        open_file(self._path)  # refuses what is no place for a file

    def holds(self, ctx: Context) -> bool:
        try:
            if not self._is_url:
                return os.path.exists(self._path)
            store, name = open_file(self._path)
            return store.exists(name)
        except Exception as error:  # every store has its own
            logging.warning("%s: cannot look: %s", _where(self, ctx), say(error))
            return False


def of_example(name: str) -> Condition:
    """The condition of this name with the arguments of its `example`."""
    condition = CONDITIONS[name]
    return condition(*condition.example) if isinstance(condition, type) else condition


def as_condition(obj: Any) -> Condition:
    """A condition as it is; anything else that can be called with a `Context`, as a condition.

    The state of a callable is kept if it has both `get_state()` and `set_state(state)` (never called with None), under
    its `__qualname__` or its type's. A run from scratch gives it back the state that it had before the first run.

    Raises:
        InvalidArgumentError: it cannot be called, or is a class.
    """
    if isinstance(obj, Condition):
        return obj
    if isinstance(obj, type):
        raise InvalidArgumentError(f"the class {obj.__name__} is no stop condition; call it first: {obj.__name__}(…)")
    if not callable(obj):
        raise InvalidArgumentError(
            f"{shown(obj)} is no stop condition here; expected one of ec.stop, or a callable. A task, its output, or "
            "the name of a blob is one by itself: job.stop_when(…). A job ends when any of its conditions is true"
        )
    return _Wrapped(obj)


def look(condition: Condition, ctx: Context) -> bool:
    """What a condition says of a finished epoch; an error of it is noted with the condition and the node."""
    with _noted(condition, ctx):
        return checked(condition, condition(ctx), ctx)


def held(condition: Condition, ctx: Context) -> bool:
    """Whether a condition holds, see `Condition.holds`; an error of it is noted as in `look`."""
    with _noted(condition, ctx):
        return checked(condition, condition.holds(ctx), ctx)


@contextlib.contextmanager
def _noted(condition: Condition, ctx: Context) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a user's own code may raise anything
        if not condition.operands:  # else the operand that raised is noted
            error.add_note(f"in {_where(condition, ctx)}, node {getattr(ctx.workspace, 'node', '?')}")
        raise


def checked(condition: Any, answer: Any, ctx: Context) -> bool:
    """A condition's answer; raises InvalidArgumentError, with condition, epoch and answer, if it is no bool."""
    scalar = as_scalar(answer)
    if isinstance(scalar, bool):
        return scalar
    problem = f"answered {shown(answer)}; expected a bool: True to stop after this {ctx.unit}"
    raise InvalidArgumentError(f"{_where(condition, ctx)}: {problem}")


def _where(condition: Any, ctx: Context) -> str:
    return f"stop condition {condition!r}, {ctx.unit} {ctx.epoch}"


def why(condition: Condition, ctx: Context) -> str:
    """The `repr` of a condition that was true; of `a | b`, without users' callables, only the operands that hold."""
    return " | ".join(map(repr, _holding(condition, ctx)))


def holds_by_preemption(condition: Condition, ctx: Context) -> bool:
    """Whether a condition that was true holds only because the run is being preempted."""
    return all(isinstance(part, _Preempted) for part in _holding(condition, ctx))


def _holding(condition: Condition, ctx: Context) -> list[Condition]:
    """Of `a | b` that was true, without users' callables, the operands that hold; else just the condition."""
    operands = alternatives(condition)
    if len(operands) == 1 or is_foreign(condition):
        return [condition]
    return [operand for operand in operands if held(operand, ctx)] or [condition]


def alternatives(condition: Condition) -> list[Condition]:
    """The operands of `a | b | c`; of any other condition just that."""
    if not isinstance(condition, _Both) or condition.sign != "|":
        return [condition]
    return [part for operand in condition.operands for part in alternatives(operand)]


def is_foreign(condition: Condition) -> bool:
    """Whether it contains a user's callable, which may change its state whenever it is asked."""
    return any(isinstance(part, _Wrapped) for part in parts([condition]))


def functions(conditions: Sequence[Condition]) -> list[Callable[[Context], Any]]:
    """The users' callables among the conditions and their parts."""
    return [part.function for part in parts(conditions) if isinstance(part, _Wrapped)]


def counts(conditions: Sequence[Condition]) -> list[max_epochs]:
    """The conditions, and their parts, that are true after some number of epochs or steps."""
    return [part for part in parts(conditions) if isinstance(part, max_epochs)]


def parts(conditions: Sequence[Condition]) -> Iterator[Condition]:
    """The conditions, with the operands of `|` and `&` in place of those that these join."""
    for condition in conditions:
        yield from parts(condition.operands) if condition.operands else (condition,)
