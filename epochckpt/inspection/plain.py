"""Rows as JSON, for programs: what `--json` prints.

Every row is an object of its dataclass's fields, in their order, and of its properties (`secs`, `slowest_node`). What
JSON lacks (NaN, infinities, bytes, complex numbers, halves of surrogate pairs) becomes text.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_MAX_DEPTH = 200
_MAX_BITS = 3300  # about a thousand digits; Python neither writes nor reads more than some thousands


def to_json(rows: object) -> Json:
    """A row, or any mapping or sequence of rows, as JSON that every reader takes, with or without `ensure_ascii`."""
    return _plain(rows, 0)


def _plain(value: object, depth: int) -> Json:
    if depth > _MAX_DEPTH:
        return f"nested deeper than {_MAX_DEPTH}"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_BITS else hex(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: _plain(getattr(value, name), depth + 1) for name in names}
    if isinstance(value, Mapping):
        return _object(value, depth)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(element, depth + 1) for element in value]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and JAX
        found: Any = value
        return _plain(found.tolist(), depth + 1)
    return _plain(str(value), depth)


def _object(value: Mapping[Any, Any], depth: int) -> Json:
    """A mapping; no entry is lost where two keys are the same as text (`1` and `"1"`)."""
    out: dict[str, Json] = {}
    for key in sorted(value, key=lambda key: not isinstance(key, str)):  # strings keep their names
        plain = _plain(key, depth + 1)
        name = text = plain if isinstance(plain, str) else json.dumps(plain)
        count = 1
        while name in out:
            count += 1
            name = f"{text} ({count})"
        out[name] = _plain(value[key], depth + 1)
    return out
