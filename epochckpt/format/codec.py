"""How records lie in files: a field of a dataclass says once how it is written, and how it is read back and checked.

```
@dataclasses.dataclass(frozen=True)
class Example:
    epoch: int = stored("epoch", INTEGER)
    copied_from: str = stored("copied_from", text(80), optional=True, default="")

pack(Example(3))                            # {"epoch": 3}
parse(Example, Fields(path, {"epoch": 3}))  # Example(3), or a FormatError that names the path and the field
```

The name in the file is that of `stored`, so that an attribute can be renamed. Fields are written in the order of the
class. Other fields of an object are ignored, see "How the format grows" in docs/format.md. Where there are many objects
of a class, they lie as rows without names: a `Rows` has their columns.

What is read may be damaged or hostile: a codec takes nothing that it has not checked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from epochckpt.errors import FormatError
from epochckpt.format import checksums, paths
from epochckpt.format.json_kinds import is_list

T = TypeVar("T")
MAX_BYTES = 2**62
_KEY = "epochckpt.format"
# For the type checker: what a list or an object of JSON holds may be anything.
_LIST: type[list[Any]] = list
_OBJECT: type[dict[str, Any]] = dict


class Fields:
    """Typed access to a parsed JSON object; errors name the file and the field.

    Attributes:
        found: what `parse` has read of it so far, by attribute; some fields are checked against earlier ones.
    """

    def __init__(self, path: str, data: object, where: str = ""):
        if not isinstance(data, dict):
            raise FormatError(path, f"{where or 'the record'} is not an object")
        self.path = path
        self.data: dict[str, Any] = data
        self.where = where
        self.found: dict[str, Any] = {}

    def fail(self, name: str, expected: str) -> FormatError:
        value = str(self.data.get(name))[:80]
        return FormatError(self.path, f"{self.where}{name}: expected {expected}, found {value!r}")

    def get(self, name: str, kind: type[T], expected: str, valid: Callable[[T], bool] = lambda value: True) -> T:
        value = self.data.get(name)
        if type(value) is not kind or not valid(value):
            raise self.fail(name, expected)
        return value

    def integer(self, name: str, low: int = 0, high: int = 2**63) -> int:
        return self.get(name, int, f"an integer of at least {low}", lambda value: low <= value < high)

    def text(self, name: str, limit: int = 1000) -> str:
        return self.get(name, str, "a short string", lambda value: len(value) <= limit)

    def boolean(self, name: str) -> bool:
        return self.get(name, bool, "true or false")

    def array(self, name: str) -> list[Any]:
        return self.get(name, _LIST, "a list")

    def mapping(self, name: str) -> dict[str, Any]:
        return self.get(name, _OBJECT, "an object")

    def number(self, name: str) -> float:
        value = self.data.get(name)
        if not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self.fail(name, "a finite number")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        values = self.mapping(name)
        if not all(type(v) in (int, float) and abs(v) < 1e300 for v in values.values()):
            raise self.fail(name, "an object of finite numbers")
        return values


def user_data(fields: Fields, name: str, kind: type = object) -> Any:
    """A field that holds user data as JSON; FormatError if it is nested too deeply, or of another kind."""
    try:
        unpacked = checksums.unpack_json(fields.data.get(name))
    except RecursionError:
        raise FormatError(fields.path, f"{fields.where}{name} is nested too deeply") from None
    if not isinstance(unpacked, kind):
        raise fields.fail(name, "an object")
    return unpacked


# -- codecs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Codec(Generic[T]):
    """How a value lies in JSON.

    Attributes:
        read: the value of a field, once it is checked; FormatError otherwise.
        write: the value as JSON; None: it is that already.
        column: the values of many rows, checked together; raises Unfit if a value is wrong. None: it is never in rows.
    """

    read: Callable[[Fields, str], T]
    write: Callable[[T], Any] | None = None
    column: Callable[[Sequence[Any]], Iterable[T]] | None = None


class Unfit(Exception):
    """One of many values is not what the format says."""


def plain(expected: str, valid: Callable[[Sequence[Any]], bool], write: Callable[[T], Any] | None = None) -> Codec[T]:
    """The codec of values that JSON has; `valid` says whether all of one or more values are in order."""

    def read(fields: Fields, key: str) -> T:
        value = fields.data.get(key)
        if not valid((value,)):
            raise fields.fail(key, expected)
        return value  # pyright: ignore[reportReturnType]

    def column(values: Sequence[Any]) -> Sequence[Any]:
        if not valid(values):
            raise Unfit
        return values

    return Codec(read, write, column)


def _are(values: Sequence[Any], *kinds: type) -> bool:
    return {*map(type, values)} <= {*kinds}


def integer(low: int, high: int) -> Codec[int]:
    """Integers from `low` to below `high`."""
    expected = f"an integer of at least {low}"
    return plain(expected, lambda values: _are(values, int) and low <= min(values) <= max(values) < high)


def text(limit: int = 1000) -> Codec[str]:
    """Strings of at most `limit` characters."""
    return plain("a short string", lambda values: _are(values, str) and max(map(len, values)) <= limit)


def name(usable: Callable[[object], bool] = paths.is_name, limit: int = 1000) -> Codec[str]:
    """Names that are safe in paths."""

    def read(fields: Fields, key: str) -> str:
        return paths.check_recorded_name(fields.path, fields.text(key, limit), usable)

    def column(values: Sequence[Any]) -> Sequence[str]:
        if not (_are(values, str) and max(map(len, values)) <= limit and all(map(usable, {*values}))):
            raise Unfit
        return values

    return Codec(read, column=column)


def user(kind: type, where: str) -> Codec[Any]:
    """What the caller gave, as JSON."""
    return Codec(lambda fields, key: user_data(fields, key, kind), lambda value: checksums.pack_json(value, where))


def strings(expected: str, fewest: int, most: int) -> Codec[tuple[str, ...]]:
    """Lists of strings, of at least `fewest` and at most `most` characters."""

    def read(fields: Fields, key: str) -> tuple[str, ...]:
        texts = fields.array(key)
        lengths = {*map(len, texts)} if _are(texts, str) else {-1}
        if lengths and not fewest <= min(lengths) <= max(lengths) <= most:
            raise fields.fail(key, expected)
        return tuple(texts)

    return Codec(read, list)


def names(usable: Callable[[object], bool] = paths.is_name) -> Codec[tuple[str, ...]]:
    """Lists of names that are safe in paths."""

    def read(fields: Fields, key: str) -> tuple[str, ...]:
        return tuple(paths.check_recorded_name(fields.path, each, usable) for each in fields.array(key))

    return Codec(read, list)


def integers(expected: str, low: int = 0, high: int = 2**63) -> Codec[tuple[int, ...]]:
    """Lists of integers from `low` to below `high`."""

    def read(fields: Fields, key: str) -> tuple[int, ...]:
        numbers = fields.array(key)
        if not all(type(each) is int and low <= each < high for each in numbers):
            raise fields.fail(key, expected)
        return tuple(numbers)

    return Codec(read, list)


def maybe(codec: Codec[T]) -> Codec[T | None]:
    """What another codec reads and writes, or null for None."""

    def read(fields: Fields, key: str) -> T | None:
        return None if fields.data.get(key) is None else codec.read(fields, key)

    def write(value: T | None) -> Any:
        return value if value is None or codec.write is None else codec.write(value)

    return Codec(read, write)


def _finite(values: Sequence[Any]) -> bool:
    return _are(values, int, float) and all(abs(value) < 1e300 for value in values)


INTEGER = integer(0, 2**63)
SIZE = integer(0, MAX_BYTES)
BOOLEAN: Codec[bool] = plain("true or false", lambda values: _are(values, bool))
NUMBER: Codec[float] = plain("a finite number", _finite)
NUMBERS: Codec[Mapping[str, float]] = Codec(Fields.numbers)
MAYBE: Codec[bool | None] = plain("true, false or null", lambda values: _are(values, bool, type(None)))


# -- records -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a field of a class lies in a JSON object."""

    key: str
    codec: Codec[Any]
    optional: bool  # left out where it is empty, and then read as its default
    key_of: Callable[[Any], str] | None = None  # the key that a value lies under, where that depends on the value


def stored(
    key: str,
    codec: Codec[Any],
    *,
    optional: bool = False,
    key_of: Callable[[Any], str] | None = None,
    **field: Any,
) -> Any:
    """A field of a dataclass that lies in files under `key`; `field` is what `dataclasses.field` takes.

    With `key_of`, the value says what key it is written under, and the codec looks for it under all of them.
    """
    return dataclasses.field(metadata={_KEY: Stored(key, codec, optional, key_of)}, **field)


@functools.cache
def table(cls: type[Any]) -> Mapping[str, Stored]:
    """The fields of a class that lie in files, by attribute, in their order."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(cls) if _KEY in field.metadata}


def pack(record: Any) -> dict[str, Any]:
    """The JSON object of a record."""
    packed: dict[str, Any] = {}
    for attribute, field in table(record.__class__).items():
        value = getattr(record, attribute)
        key = field.key if field.key_of is None else field.key_of(value)
        value = value if field.codec.write is None else field.codec.write(value)
        if value or not field.optional:
            packed[key] = value
    return packed


def parse(cls: type[T], fields: Fields, **given: Any) -> T:
    """The inverse of `pack`; attributes that are `given` are not read. Raises FormatError."""
    found = fields.found = dict(given)
    for attribute, field in table(cls).items():
        if attribute not in given and (not field.optional or field.key in fields.data):
            found[attribute] = field.codec.read(fields, field.key)
    return cls(**found)


def seal(kind: str, record: Any) -> bytes:
    """The file of a record."""
    return seal_fields(kind, pack(record))


def seal_fields(kind: str, fields: Mapping[str, Any]) -> bytes:
    """The file of a record, of its JSON object."""
    head = {"format": paths.FORMAT, "version": paths.VERSION, "record": kind}
    return checksums.seal({**head, **fields})


def one(cls: type[T]) -> Codec[T]:
    """An object of a class."""

    def read(fields: Fields, key: str) -> T:
        return parse(cls, Fields(fields.path, fields.data.get(key), f"{fields.where}{key}."))

    return Codec(read, pack)


def objects(cls: type[T]) -> Codec[tuple[T, ...]]:
    """Lists of objects of a class."""

    def read(fields: Fields, key: str) -> tuple[T, ...]:
        rows = fields.array(key)
        return tuple(parse(cls, Fields(fields.path, row, f"{fields.where}{key}[{i}].")) for i, row in enumerate(rows))

    return Codec(read, lambda records: [pack(record) for record in records])


class Rows(Generic[T]):
    """How objects of a class lie as rows: the attributes that are columns, and those that end a row if not empty.

    Records of large jobs have many rows. They are checked column by column; only where something is wrong, row by row.
    """

    def __init__(self, cls: type[T], columns: Sequence[str], more: Sequence[str] = ()):
        names = [*columns, *more]
        stored_as = table(cls)
        self._class = cls
        self._least = len(columns)
        self._columns = [(attribute, stored_as[attribute]) for attribute in names]
        self._values = operator.attrgetter(*names)
        codecs = [field.codec for _, field in self._columns]
        self._writes = [(i, codec.write) for i, codec in enumerate(codecs) if codec.write is not None]
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        self._padding = [defaults[attribute] for attribute in more]
        # The arguments of the class. Each is the number of a column; a field that has no column keeps its default.
        self._arguments = [(names.index(n) if n in names else None, default) for n, default in defaults.items()]

    def pack(self, record: T) -> list[Any]:
        """One row."""
        return self._packed([record])[0]

    def _packed(self, records: Iterable[T]) -> list[list[Any]]:
        rows = [*map(list, map(self._values, records))]
        for column, write in self._writes:
            for row in rows:
                row[column] = write(row[column])
        if self._padding:
            for row in rows:
                while len(row) > self._least and not row[-1]:
                    row.pop()
        return rows

    def parse(self, path: str, where: str, row: object) -> T:
        """The inverse of `pack`; FormatError, which names the column, for anything else."""
        keys = [field.key for _, field in self._columns]
        if not is_list(row) or not self._least <= len(row) <= len(keys):
            raise FormatError(path, f"{where} is not [{', '.join(keys)}]")
        fields = Fields(path, dict(zip(keys, row, strict=False)), f"{where}.")
        read = {attribute: field.codec.read(fields, field.key) for attribute, field in self._columns[: len(row)]}
        return self._class(**read)

    def _all(self, rows: Sequence[Any]) -> tuple[T, ...]:
        """What `parse` makes of all rows; raises Unfit if a row is wrong."""
        if not rows:
            return ()
        least = self._least
        most = len(self._columns)
        if not _are(rows, list) or not least <= min(map(len, rows)) <= max(map(len, rows)) <= most:
            raise Unfit
        if self._padding:
            rows = [row if len(row) == most else [*row, *self._padding[len(row) - least :]] for row in rows]
        columns = list[Iterable[Any]]()
        for values, (_, field) in zip(zip(*rows, strict=True), self._columns, strict=True):
            assert field.codec.column is not None, "see Codec"
            columns.append(field.codec.column(values))
        arguments: list[Iterable[Any]] = [
            itertools.repeat(default) if i is None else columns[i] for i, default in self._arguments
        ]
        return tuple(map(self._class, *arguments))

    def codec(self) -> Codec[tuple[T, ...]]:
        """The codec of a list of rows."""

        def read(fields: Fields, key: str) -> tuple[T, ...]:
            rows = fields.array(key)
            try:
                return self._all(rows)
            except Unfit:
                where = f"{fields.where}{key}"
                return tuple([self.parse(fields.path, f"{where}[{i}]", row) for i, row in enumerate(rows)])

        def column(lists: Sequence[Any]) -> Iterator[tuple[T, ...]]:
            if not _are(lists, list):
                raise Unfit
            found = iter(self._all([*itertools.chain.from_iterable(lists)]))
            return (tuple(itertools.islice(found, len(rows))) for rows in lists)

        return Codec(read, self._packed, column)
