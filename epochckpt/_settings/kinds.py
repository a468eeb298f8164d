"""Kinds of settings: how a value is read from a text or an object, checked, and written so that it reads back equal."""

from __future__ import annotations

import csv
import dataclasses
import fractions
import io
import math
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths

T = TypeVar("T")

BYTE_UNITS: Mapping[str, fractions.Fraction] = {
    "B": fractions.Fraction(1),
    **{f"{p}B": fractions.Fraction(1000**n) for n, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": fractions.Fraction(1024**n) for n, p in enumerate("KMGT", start=1)},
}
"""Bytes in a unit."""

TIME_UNITS: Mapping[str, fractions.Fraction] = {
    "s": fractions.Fraction(1),
    "ms": fractions.Fraction(1, 1000),
    "min": fractions.Fraction(60),
    "h": fractions.Fraction(3600),
    "d": fractions.Fraction(86400),
}
"""Seconds in a unit."""

MAX_SECS = 1e9  # 30 years; locks and timedeltas overflow somewhere above
MAX_BYTES = 2**63 - 1

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([^\W\d]*)\s*", re.ASCII)
_INTEGER = re.compile(r"\s*[+-]?\d{1,19}\s*", re.ASCII)
_DAMAGED_URL = re.compile(r"[a-z0-9]{2,}:/[^/]")
_WORDS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}  # as absl reads them


class _Refusal(ValueError):
    """A value is not of a kind; may say more than that."""


@dataclasses.dataclass(frozen=True)
class Kind(Generic[T]):
    """What a setting may be.

    Attributes:
        expected: what is expected, for an error and for help.
        parse: makes the value of a text or an object; any ValueError or TypeError means that it is none.
        write: makes a text that `read` reads as this value.
        boolean: a flag of this kind may be given without a value.
    """

    expected: str
    parse: Callable[[object], T]
    write: Callable[[T], str] = str
    boolean: bool = False

    def read(self, value: object) -> T:
        """The value that a text, or an object of a program, stands for.

        Raises:
            InvalidArgumentError: none of this kind; says what was expected and found.
        """
        try:
            return self.parse(value)
        except (ValueError, TypeError, OverflowError) as error:
            found = repr(value)
            found = found if len(found) <= 120 else f"{found[:80]}… ({len(found)} characters)"
            why = f": {error}" if isinstance(error, _Refusal | InvalidArgumentError) and str(error) else ""
            raise InvalidArgumentError(f"expected {self.expected}, found {found}{why}") from None


def maybe(kind: Kind[T], none: str = "none") -> Kind[T | None]:
    """A value or none, which is written as `none`; an empty text is read as none, too."""

    def parse(value: object) -> T | None:
        if value is None or (isinstance(value, str) and value.strip().lower() in ("", none)):
            return None
        return kind.parse(value)

    def write(value: T | None) -> str:
        return none if value is None else kind.write(value)

    return Kind(f"{kind.expected}, or {none or 'nothing'}", parse, write, kind.boolean)


def choice(*words: str) -> Kind[str]:
    """One of several words."""
    return Kind(" or ".join(words), lambda value: _one_of(words, value))


def integer(least: int = 0) -> Kind[int]:
    """An integer of at least so much."""
    return Kind(f"an integer of at least {least}", lambda value: _at_least(least, _integer(value)))


def number_of_bytes(least: int = 1, most: int = MAX_BYTES) -> Kind[int]:
    """A number of bytes; a text may have a unit. A part of a byte is dropped."""

    def parse(value: object) -> int:
        number = int(_quantity(value, BYTE_UNITS)) if isinstance(value, str) else _integer(value)
        return _at_least(least, number, most)

    bounds = f", from {_write_bytes(least)} to {_write_bytes(most)}" if most < MAX_BYTES else ""
    return Kind(f"bytes, such as 4096, 8GB or 512MiB{bounds}", parse, _write_bytes)


def seconds(least: float = 0.001) -> Kind[float]:
    """A duration; a text may have a unit, seconds are meant without."""

    def parse(value: object) -> float:
        return _at_least(least, float(_quantity(value, TIME_UNITS)) if isinstance(value, str) else _float(value))

    return Kind(f"seconds, such as 90, 10min or 1.5h, of at least {least:g}", parse, _write_number)


def word_or_epoch(*words: str) -> Kind[str | int]:
    """One of several words, or the number of an epoch."""

    def parse(value: object) -> str | int:
        return str(value) if value in words else _at_least(0, _integer(value))

    return Kind(f"{', '.join(words)}, or the number of an epoch (an integer of at least 0)", parse)


def split_handler(value: str) -> tuple[str, str]:
    """The kind of a metadata handler, and its file, empty for the one that it chooses itself."""
    kind, _, path = value.partition(":")
    return kind, path


def _at_least(least: Any, number: Any, most: Any = math.inf) -> Any:
    if not least <= number <= most:
        raise _Refusal
    return number


def _one_of(words: tuple[str, ...], value: object) -> str:
    if not isinstance(value, str) or value not in words:
        raise _Refusal
    return value


def _integer(value: Any) -> int:
    """Of an integer, also NumPy's, or a text; floats are none."""
    if isinstance(value, bool | np.bool_):
        raise _Refusal
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value):
            raise _Refusal
        value = int(value)
    return _at_least(-MAX_BYTES, operator.index(value), MAX_BYTES)  # what files and other languages hold


def _float(value: Any) -> float:
    """Of a finite number, also NumPy's."""
    if isinstance(value, bool | np.bool_ | str | bytes) or not -MAX_SECS <= float(value) <= MAX_SECS:
        raise _Refusal
    return float(value)


def _quantity(text: str, units: Mapping[str, fractions.Fraction]) -> fractions.Fraction:
    """A number with a unit, exactly; without one it is in the first."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise _Refusal
    number, unit = match.groups()
    sizes = {name.lower(): size for name, size in units.items()}
    if unit and unit.lower() not in sizes:
        raise _Refusal(f"unknown unit {unit!r}; known are {', '.join(units)}")
    value = fractions.Fraction(number) * sizes[unit.lower() or next(iter(units)).lower()]
    if abs(value) > MAX_BYTES:
        raise _Refusal
    return value


def _write_bytes(value: int) -> str:
    """With the largest unit that divides it."""
    size, unit = max((int(size), unit) for unit, size in BYTE_UNITS.items() if value % size == 0)
    return str(value) if size == 1 else f"{value // size}{unit}"


def _write_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _boolean(value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    return _WORDS[_one_of(tuple(_WORDS), value.strip().lower() if isinstance(value, str) else value)]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _Refusal
    return value


def _path(value: object) -> str:
    text = _text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if isinstance(value, pathlib.PurePath) and _DAMAGED_URL.match(text):
        raise _Refusal("it was a URL before pathlib took a slash away; pass a text, or an etils.epath.Path")
    return text


def _name(value: object) -> str:
    if not paths.is_name(value):
        raise _Refusal
    return str(value)


def _free_folder(value: object) -> str:
    if not paths.is_free_folder(value):
        raise _Refusal
    return str(value)


def _items(value: object) -> list[Any]:
    """Of a sequence or set, or a text with commas, read as CSV."""
    if isinstance(value, str):
        try:
            return [item.strip() for row in csv.reader([value], strict=True) for item in row] if value.strip() else []
        except csv.Error as error:
            raise _Refusal(str(error)) from None
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping) or hasattr(value, "to_dict"):
        raise _Refusal
    return list(value)


def _texts(value: object) -> tuple[str, ...]:
    items = _items(value)
    if not all(isinstance(item, str) and item and item == item.strip() for item in items):
        raise _Refusal("each is a text, not empty, without spaces around it")
    return tuple(items)


def _write_texts(value: tuple[str, ...]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(value)
    return line.getvalue()


def _epochs(value: object) -> tuple[int, ...]:
    return tuple(sorted({_at_least(0, _integer(item)) for item in _items(value)}))


def _handler(value: object) -> str:
    text = _text(value)
    kind, path = split_handler(text)
    if kind not in ("json", "sqlite") or path != path.strip():
        raise _Refusal
    if not path and text != "json":
        raise _Refusal(f"{kind}: what is its file?")
    if path:
        _path(path)
    return text


BOOLEAN = Kind("true or false", _boolean, lambda value: "true" if value else "false", boolean=True)
TEXT = Kind("a text", _text)
PATH = Kind("a path or URL", _path)
FOLDER_NAME = Kind("letters, digits, '.', '_' and '-', a letter or digit first", _name)
FREE_FOLDER = Kind("one folder's name, none of those that epochckpt gives", _free_folder)
NODE_NAME = Kind("a node's name", paths.check_node_name)
TEXTS = Kind("texts with commas between them", _texts, _write_texts)
EPOCHS = Kind("epochs (integers of at least 0) with commas between them", _epochs, lambda v: ",".join(map(str, v)))
HANDLER = Kind("json, json:FILE or sqlite:FILE", _handler)
