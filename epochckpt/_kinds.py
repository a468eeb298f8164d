"""Kinds of values that options have, and options as fields of dataclasses: a field says once all that is known of it.

```
@dataclasses.dataclass(frozen=True)
class Example:
    threads: int = dataclasses.field(default=2, metadata=option(integer(1), "Threads that write."))

options_of(Example)["threads"].kind.parse("3")  # 3
```

Checks, flags, config files, the tables of docs/ and the samples of tests are made of these fields.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from epochckpt import _text, _units
from epochckpt.errors import InvalidArgumentError

NONE = "none"  # the text that stands for no value; for texts that is the empty one
MAX_SECS = 1e9  # 30 years; locks and timedeltas overflow somewhere above
MAX_INT = 2**63 - 1  # what files and other languages hold
_OPTION = "epochckpt.option"

Parse = Callable[[Any], Any]


class Kind(absl_flags.ArgumentParser[Any], absl_flags.ArgumentSerializer[Any]):
    """What an option may be; reads and writes its values, also as absl's parser of its flag.

    Attributes:
        expected: the values that it may have, in words, for errors and help.
        expected_in_code: the same for an argument in a program, where no text stands for a number.
        may_be_none: whether None is one of them.
        read: turns a text, or an object of a program, into the value. Raises ValueError, TypeError or OverflowError
            if that is not possible.
        examples: some values, for tests.
    """

    # `none` is the text that means None; without it, a value is required. Errors do not show `private` values.
    def __init__(
        self,
        expected: str,
        read: Parse,
        examples: Sequence[Any],
        *,
        write: Callable[[Any], str] = str,
        none: str | None = None,
        private: bool = False,
        expected_in_code: str = "",
    ):
        self.expected = self.syntactic_help = expected if none is None else f"{expected}, or {none or 'nothing'}"
        self.expected_in_code = expected_in_code or expected
        self.may_be_none = none is not None
        self.read = read
        self.examples = examples
        self._write = write
        self._none = none
        self._private = private

    def parse(self, argument: Any) -> Any:
        """The value that a text, or an object of a program, stands for; InvalidArgumentError if it stands for none."""
        empty = argument is None or (isinstance(argument, str) and argument.strip().lower() in ("", self._none))
        if empty and self.may_be_none:
            return None
        try:
            return self.read(argument)
        except (TypeError, ValueError, OverflowError) as error:
            why = f": {error}" if str(error) else ""
            shown = f"{'something else' if self._private else _text.shown(repr(argument))}{why}"
            raise InvalidArgumentError(f"expected {self.expected}, found {shown}") from None

    def check(self, name: str, value: Any) -> None:
        """Refuses the argument `name` of a program with InvalidArgumentError, unless it is a value as it stands."""
        if value is None and self.may_be_none:
            return
        try:
            fits = isinstance(value, type(self.read(value)))  # a program must pass a number, not a text of it
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            raise InvalidArgumentError(f"{name} must be {self.expected_in_code}, got {value!r}")

    def serialize(self, value: Any) -> str:
        """The text that `parse` reads as this value."""
        return str(self._none) if value is None else self._write(value)

    def flag_type(self) -> str:  # absl calls it, for --helpxml
        return self.expected


def _number(of_text: Callable[[str], Any], of_object: Parse, least: float, most: float = MAX_INT) -> Parse:
    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise TypeError("a bool is no number")
        number = of_text(value) if isinstance(value, str) else of_object(value)
        if not least <= number <= most:
            raise ValueError(f"it is not from {least} to {most}")
        return number

    return read


epoch_number = _number(int, operator.index, 0)
"""Reads the number of an epoch."""


def matching(pattern: str) -> Parse:
    """Reads a text that matches a pattern."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError
        return value

    return read


def list_of(read: Parse) -> Parse:
    """Reads a list, or a text with commas as in CSV, as a tuple."""

    def read_all(value: Any) -> tuple[Any, ...]:
        if isinstance(value, bytes | Mapping):
            raise TypeError("it is no list")
        return tuple(map(read, absl_flags.ListParser().parse(value) if isinstance(value, str) else value))

    return read_all


def integer(least: int = 0, most: int = MAX_INT, *, none: str | None = None) -> Kind:
    """An integer."""
    read = _number(int, operator.index, least, most)
    return Kind(_integers(least, most), read, (least, least + 3), none=none)


def _integers(least: int, most: int) -> str:
    return f"an integer of at least {least}" if most == MAX_INT else f"an integer from {least} to {most}"


def nbytes(least: int = 1, most: int = MAX_INT, *, none: str | None = None) -> Kind:
    """A size, also as a text such as `8GB`."""
    read = _number(_units.parse_nbytes, operator.index, least, most)
    return Kind(
        "bytes, such as 4096, 8GB or 512MiB",
        read,
        (2**20, 2**22 + 1),
        write=_units.exact_nbytes,
        none=none,
        expected_in_code=_integers(least, most),
    )


def secs(least: float = 0.001, *, none: str | None = None) -> Kind:
    """A duration, also as a text such as `10min`."""
    expected = f"seconds, such as 90, 10min or 1.5h, of at least {least}"
    read = _number(_units.parse_secs, float, least, MAX_SECS)
    return Kind(expected, read, (float(least), 7.5), write=lambda value: repr(value).removesuffix(".0"), none=none)


def boolean(*, none: str | None = None) -> Kind:
    """True or False."""
    return Kind(
        "true or false",
        absl_flags.BooleanParser().parse,
        (True, False),
        write=lambda value: "true" if value else "false",
        none=none,
        expected_in_code="a bool",
    )


def choice(*words: str) -> Kind:
    """One of some words."""
    in_code = f"one of {', '.join(map(repr, words))}"
    return Kind(" or ".join(words), absl_flags.EnumParser(words).parse, words, expected_in_code=in_code)


# -- options -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Option:
    """The metadata of an option's field: its possible values, and its purpose."""

    kind: Kind
    help: str


def option(kind: Kind, help: str) -> dict[str, Option]:
    """The metadata of a field that is an option. `help` is for flags and docs/: sentences with full stops."""
    return {_OPTION: Option(kind, help)}


def options_of(cls: type) -> dict[str, Option]:
    """The options among the fields of a dataclass, by name."""
    return {field.name: field.metadata[_OPTION] for field in dataclasses.fields(cls) if _OPTION in field.metadata}
