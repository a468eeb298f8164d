"""Rows as JSON, for programs: what `--json` prints.

Every row is an object of its dataclass's fields, in their order, and of its properties (`secs`, `slowest_node`). What
JSON lacks (NaN, infinities, halves of surrogate pairs, integers of more than a thousand digits) becomes text.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_MAX_DEPTH = 200
_MAX_BITS = 3300  # about a thousand digits; Python neither writes nor reads more than some thousands


def to_json(rows: object) -> Json:
    """A row, or any mapping or sequence of rows, as JSON that every reader takes, with or without `ensure_ascii`."""
    return _plain(rows, 0)


def _plain(value: Any, depth: int) -> Json:
    if depth > _MAX_DEPTH:
        return f"nested deeper than {_MAX_DEPTH}"
    if isinstance(value, str):  # most are
        return _text(value)
    if value is None or isinstance(value, int):
        return value if value is None or value.bit_length() <= _MAX_BITS else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and JAX
        return _plain(value.tolist(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: _plain(getattr(value, name), depth + 1) for name in names}
    if isinstance(value, Mapping):
        return {_text(str(key)): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    return _text(str(value))


def _text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()
