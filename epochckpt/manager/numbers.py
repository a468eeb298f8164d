"""Numbers of epochs as callers give them."""

from __future__ import annotations

import operator
from typing import Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths


def _is_tracer(step: Any) -> bool:
    from jax.core import Tracer  # most callers have an int, and need no jax for it

    return isinstance(step, Tracer)


def epoch_number(step: Any, where: str = "") -> int:
    """An epoch's number as an int; raises InvalidArgumentError, which begins with `where`, for anything else."""
    if not isinstance(step, int) and _is_tracer(step):
        raise InvalidArgumentError(
            "the epoch (step) is a tracer: this was called inside a function that jax transforms (jit, grad, vmap, "
            "scan, …), where there are no values yet. Save, and restore, outside of it"
        )
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= paths.MAX_EPOCH:
        long = number.bit_length() > 256  # Python refuses to write a very long number
        shown = f"a number of {number.bit_length()} bits" if long else str(step)[:80]
        found = f"{shown} ({type(step).__name__})"
        expected = "an integer of at least 0" + ", below 2**63" * (number > 0)
        raise InvalidArgumentError(f"{where}the epoch (step) is {found}; expected {expected}")
    return number
