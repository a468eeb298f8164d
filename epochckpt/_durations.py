"""Durations that a caller gives: a number of seconds, or a text such as `90s`, `10min` or `1.5h`."""

from __future__ import annotations

import numbers
from typing import Any, Generic, TypeVar

from epochckpt import _units
from epochckpt.errors import InvalidArgumentError

S = TypeVar("S", float, "float | None")


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """The seconds of an argument, which `name` names in the error; `zero`: whether it may be 0.

    Raises:
        InvalidArgumentError: it is no duration, or it is not above 0.
    """
    expected = (
        f"{name} is a number of seconds {'from' if zero else 'above'} 0, or a text such as '90s', '10min' or '1.5h'"
    )
    try:
        secs = _units.parse_secs(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidArgumentError(f"{expected}, got {value!r}: {error}") from None
    if isinstance(secs, bool) or not isinstance(secs, numbers.Real):
        raise InvalidArgumentError(f"{expected}, got {value!r}")
    number = secs if isinstance(secs, int | float) else float(secs)  # one of NumPy
    if not (number > 0 or (zero and number == 0)):
        raise InvalidArgumentError(f"{expected}, got {value!r}")
    return number


class Duration(Generic[S]):
    """A field of a dataclass that is set to seconds or to a text, and is read as seconds. `none`: it may be None."""

    def __init__(self, default: S, *, none: bool = False):
        self._default = default
        self._none = none

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._where = f"{owner.__name__}.{name}"

    def __repr__(self) -> str:  # as the default in a signature
        return repr(self._default)

    def __get__(self, instance: Any, owner: type | None = None) -> S:
        return self._default if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: S | str) -> None:
        if value is self:  # what `dataclasses.field` passes on where no value is given
            instance.__dict__[self._name] = self._default
            return
        is_none = self._none and value is None
        instance.__dict__[self._name] = None if is_none else seconds(self._where, value)
