"""The values that users give stop conditions, and that conditions are shown: scalars, and checks of arguments."""

import math
import operator
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError


def as_scalar(value: Any) -> bool | int | float | None:
    """A bool or real number of Python, or one of NumPy or jax without dimensions, as Python's; None for all else.

    None also for an integer that is too large for a float.
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.shape == ():
        if not (value.dtype == bool or jnp.issubdtype(value.dtype, np.number)):  # a key of jax, an object
            return None
        value = float(value) if isinstance(value, np.floating) else np.asarray(value).item()
    beyond_all_floats = isinstance(value, int) and abs(value) > sys.float_info.max
    return value if isinstance(value, bool | int | float) and not beyond_all_floats else None


def shown(value: Any) -> str:
    """A value that does not fit, and its type, for an error."""
    return f"{_text.shown(repr(value), limit=120)} ({type(value).__name__})"


def check(fits: bool, what: str, expected: str, value: Any) -> None:
    """Raises InvalidArgumentError, which tells what was expected and what was found, unless the value fits."""
    if not fits:
        raise InvalidArgumentError(f"{what} must be {expected}, got {shown(value)}")


def finite_number(what: str, value: Any) -> float:
    """The value as a finite float; InvalidArgumentError: it is no finite number."""
    scalar = as_scalar(value)
    found = math.nan if scalar is None or isinstance(scalar, bool) else float(scalar)
    check(math.isfinite(found), what, "a finite number", value)
    return found


def whole_number(what: str, value: Any, least: int = 1) -> int:
    """The value as an int; InvalidArgumentError: it is no whole number, or less than `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    check(count >= least and not isinstance(value, bool), what, f"a whole number, at least {least}", value)
    return count
