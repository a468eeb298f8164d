"""What a stop condition is, how two become one, and how their states are kept; `ec.stop` has them by these names."""

from __future__ import annotations

import abc
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from absl import logging

from epochckpt.errors import InvalidArgumentError, say
from epochckpt.format import checksums

_SHOWN = 120  # characters of a value in an error
_TEXT = "$json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a stop condition is shown of a finished epoch.

    Attributes:
        epoch: epochs completed, by all runs of the job together.
        metrics: what the epoch's tasks returned, by name.
        workspace: the job's blobs.
        elapsed_secs: seconds since this run began.
        total_secs: seconds that all runs of the job took together, this one included.
        preempted: whether this run has been asked to end soon.
    """

    epoch: int
    metrics: Mapping[str, Any]
    workspace: Any
    elapsed_secs: float
    total_secs: float
    preempted: bool = False


class Condition(abc.ABC):
    """When a run should end.

    A subclass says `holds`; one that counts something also `__call__`, `get_state` and `set_state`. Its `repr` is the
    key of its state: it should name the parameters, and be the same in every run.
    """

    def __call__(self, ctx: Context) -> bool:
        """Looks at a finished epoch, once for each; may change the condition's state. By default: `holds`."""
        return self.holds(ctx)

    @abc.abstractmethod
    def holds(self, ctx: Context) -> bool:
        """Whether it is true now, without changing its state: asked when a finished run is started again.

        A metric that `ctx` lacks makes it false here: what cannot be known ends no run.
        """

    def get_state(self) -> Any:
        """What it has to remember from run to run, as a JSON value; None if nothing."""
        return None

    def set_state(self, state: Any) -> None:
        """Takes what `get_state` gave, in an earlier run; None starts fresh, so does, with a warning, a wrong state."""
        del state

    @property
    def operands(self) -> Sequence[Condition]:
        """What it is composed of; nothing for most."""
        return ()

    def __or__(self, other: Condition | Callable[[Context], Any]) -> Condition:
        return _Both("|", any, self, as_condition(other))

    def __ror__(self, other: Callable[[Context], Any]) -> Condition:
        return _Both("|", any, as_condition(other), self)

    def __and__(self, other: Condition | Callable[[Context], Any]) -> Condition:
        return _Both("&", all, self, as_condition(other))

    def __rand__(self, other: Callable[[Context], Any]) -> Condition:
        return _Both("&", all, as_condition(other), self)

    def __repr__(self) -> str:
        return type(self).__qualname__

    def __bool__(self) -> bool:
        # `a or b` is a, `a and b` is b: one condition would be dropped without a word
        raise InvalidArgumentError(f"{self!r} is no bool; compose conditions with | and &, not with 'or' and 'and'")


class _Both(Condition):
    """Two conditions, of which every epoch is shown to both."""

    def __init__(self, sign: str, join: Callable[[list[bool]], bool], *operands: Condition):
        self._sign, self._join, self._operands = sign, join, operands

    @property
    def operands(self) -> Sequence[Condition]:
        return self._operands

    @property
    def is_any(self) -> bool:
        """Whether one of them is enough."""
        return self._join is any

    def __call__(self, ctx: Context) -> bool:
        return self._join([checked(o, o(ctx), ctx.epoch) for o in self._operands])  # a list: every operand is called

    def holds(self, ctx: Context) -> bool:
        return self._join([checked(o, o.holds(ctx), ctx.epoch) for o in self._operands])

    def get_state(self) -> Any:
        return [o.get_state() for o in self._operands]

    def set_state(self, state: Any) -> None:
        if not isinstance(state, list) or len(state) != len(self._operands):
            if state is not None:
                warn_unusable(self, state, f"a list of {len(self._operands)} states")
            state = [None] * len(self._operands)
        for operand, part in zip(self._operands, state, strict=True):
            _restore(operand, part)

    def __repr__(self) -> str:
        return f"({f' {self._sign} '.join(map(repr, self._operands))})"


class _Wrapped(Condition):
    """Anything callable."""

    def __init__(self, function: Callable[[Context], Any]):
        self._function = function
        name = getattr(function, "__qualname__", None)
        self._name = name if isinstance(name, str) else type(function).__qualname__
        self._stateful = all(callable(getattr(function, method, None)) for method in ("get_state", "set_state"))
        self._fresh: list[Any] = []  # the state that it began with, once that is known

    def holds(self, ctx: Context) -> bool:
        return checked(self, self._function(ctx), ctx.epoch)

    def get_state(self) -> Any:
        return self._function.get_state() if self._stateful else None

    def set_state(self, state: Any) -> None:
        if not self._stateful:
            return
        if state is not None:
            self._function.set_state(state)
        elif self._fresh:  # what is not ours need not know what None stands for
            self._function.set_state(copy.deepcopy(self._fresh[0]))
        else:  # it has not been used yet
            with suppress(Exception):  # the end of the first epoch says it
                self._fresh.append(copy.deepcopy(self._function.get_state()))

    def __repr__(self) -> str:
        return self._name


def why(condition: Condition, ctx: Context) -> str:
    """Which part of a condition that was true made it so: its `repr`, of `a | b` only what holds."""
    parts = alternatives(condition)
    if parts and not any(map(is_foreign, parts)):
        return " | ".join(why(part, ctx) for part in parts if part.holds(ctx)) or repr(condition)
    return repr(condition)


def alternatives(condition: Condition) -> Sequence[Condition]:
    """The operands of `a | b`; nothing for any other condition."""
    return condition.operands if isinstance(condition, _Both) and condition.is_any else ()


def is_foreign(condition: Condition) -> bool:
    """Whether somebody else's callable is in it, which may change whenever it is asked."""
    return isinstance(condition, _Wrapped) or any(map(is_foreign, condition.operands))


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
            f"{shown(obj)} is no stop condition; expected one of ec.stop, or a function of a Context that gives a bool"
        )
    return _Wrapped(obj)


def checked(condition: Any, answer: Any, epoch: int) -> bool:
    """What a condition answered, if that is a bool: Python's, NumPy's, or an array of one without dimensions.

    Raises:
        InvalidArgumentError: it is not; names the condition, the epoch and what came.
    """
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if isinstance(answer, np.ndarray | jax.Array) and answer.dtype == np.bool_ and answer.shape == ():
        return bool(answer)
    raise InvalidArgumentError(
        f"stop condition {condition!r}, epoch {epoch}: answered {shown(answer)}; expected a bool (of Python or NumPy, "
        "or an array of one without dimensions): return True to stop after this epoch, else False"
    )


def save_states(conditions: Sequence[Condition]) -> dict[str, Any]:
    """The states of the conditions that have one, as JSON, by their `repr`; of equal ones the second is `…#2`.

    The parts of a composition are kept one by one, so that `max_epochs(10) | c` may become `c | max_epochs(20)`.

    Raises:
        InvalidArgumentError: a state is not JSON; names the condition.
    """
    saved: dict[str, Any] = {}
    for key, condition in _keyed(conditions):
        state = checksums.pack_json(condition.get_state(), f"the state of stop condition {key}")
        # NaN and infinities in a user's state are not JSON, and their packed form may not be packed once more
        text = json.dumps(state, allow_nan=False)
        if state is not None:
            saved[key] = {_TEXT: text} if "$" in text else state
    return saved


def load_states(conditions: Sequence[Condition], saved: Mapping[str, Any] | None) -> None:
    """Gives conditions the states that `save_states` gave, as far as they are still the same conditions.

    One whose state is absent, or cannot be used (which is logged), starts fresh; never raises.
    """
    if saved is not None and not isinstance(saved, Mapping):
        logging.warning("states of stop conditions are %s; expected a mapping: all start fresh", shown(saved))
    states: dict[str, Any] = {str(k): v for k, v in saved.items()} if isinstance(saved, Mapping) else {}
    for key, condition in _keyed(conditions):
        _restore(condition, states.pop(key, None), packed=True)
    for key in states:
        logging.info("the state of stop condition %s is dropped: there is no such condition any more", key)


def _keyed(conditions: Sequence[Condition]) -> list[tuple[str, Condition]]:
    keyed: dict[str, Condition] = {}
    for condition in _parts(conditions):
        key, number = repr(condition), 1
        while key in keyed:
            number += 1
            key = f"{condition!r}#{number}"
        keyed[key] = condition
    return list(keyed.items())


def _parts(conditions: Sequence[Condition]) -> Iterator[Condition]:
    for condition in conditions:
        if condition.operands:
            yield from _parts(condition.operands)
        else:
            yield condition


def _restore(condition: Condition, state: Any, *, packed: bool = False) -> None:
    try:
        if packed and isinstance(state, dict) and state.keys() == {_TEXT}:
            state = checksums.unpack_json(json.loads(state[_TEXT]))
        condition.set_state(state)
    except Exception as error:  # a user's own code, or a state of another version of it
        warn_unusable(condition, state, f"what it can take ({say(error)})")
        with suppress(Exception):  # it may have taken half of it
            condition.set_state(None)


def warn_unusable(condition: Condition, state: Any, expected: str) -> None:
    """Logs that a condition starts fresh, although there is a state for it."""
    logging.warning("stop condition %r starts fresh: its state is %s; expected %s", condition, shown(state), expected)


def shown(value: Any) -> str:
    """A value and its type for an error, in at most about 120 characters."""
    text = repr(value)
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '…'} ({type(value).__name__})"
