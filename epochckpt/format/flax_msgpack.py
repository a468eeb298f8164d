"""Reads flax's msgpack files larger than memory: arrays become views of the mapped file.

The `msgpack` package cannot do that: its Unpacker copies every payload whole into its buffer, even to skip it. So this
module walks the tokens itself (https://github.com/msgpack/msgpack/blob/master/spec.md). It reads what
`flax.serialization.to_bytes` and `msgpack_serialize` write. Flax's types are extensions: 1 an array as (shape, dtype,
bytes), 2 a complex number, 3 a NumPy scalar. An array beyond 1 GiB is a dict of flat pieces.

Files may be hostile: lengths are checked against the rest of the file, and depth and memory are bounded.
"""

from __future__ import annotations

import math
import os
import re
import struct
from typing import Any

import numpy as np

from epochckpt.errors import FormatError, UnsupportedError
from epochckpt.format import tree as tree_lib
from epochckpt.storage import mmap

MAX_DEPTH = 256
MAX_DIMS = 32
MAX_OBJECTS = 200_000
"""Most keys, values and containers: each costs a few kilobytes on its way into an epoch. An array counts as one."""
MAX_VALUE_BYTES = 256 * 2**20
"""Most bytes of strings and bytes outside of arrays, which are held in memory."""

_CHUNKED = "__msgpack_chunked_array__"
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    **dict(zip(range(0xCC, 0xD0), (">B", ">H", ">I", ">Q"), strict=True)),
    **dict(zip(range(0xD0, 0xD4), (">b", ">h", ">i", ">q"), strict=True)),
}
_LENGTHS = {  # token: (kind, format of the length)
    **{0xC4 + i: ("bin", f) for i, f in enumerate((">B", ">H", ">I"))},
    **{0xC7 + i: ("ext", f) for i, f in enumerate((">B", ">H", ">I"))},
    **{0xD9 + i: ("str", f) for i, f in enumerate((">B", ">H", ">I"))},
    **{0xDC + i: ("list", f) for i, f in enumerate((">H", ">I"))},
    **{0xDE + i: ("map", f) for i, f in enumerate((">H", ">I"))},
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_TIMES = re.compile(f"(datetime|timedelta)64{tree_lib.TIME_UNIT}")


def load(path: str, scratch: str) -> Any:
    """The tree of a file: dicts, lists, Python values, NumPy scalars, and arrays as `storage.mmap.Mapped`.

    The file must not change while the arrays are used. Arrays in pieces are joined in a nameless file in `scratch`. A
    file that flax did not write raises FormatError, an unknown extension or dtype UnsupportedError.
    """
    if not os.path.getsize(path):
        raise FormatError(path, "is empty")
    reader = _Reader(path, mmap.open_map(path), scratch)
    try:
        value = reader.value(0)
    except RecursionError:  # the caller is deep in its own stack
        raise reader.problem("is nested too deeply") from None
    if reader.at != reader.end:
        raise reader.problem(f"goes on for {reader.end - reader.at} bytes after its one object")
    mmap.release(reader.data)
    return value


class _Reader:
    def __init__(self, path: str, data: mmap.Mapped, scratch: str):
        self.path, self.data, self.scratch = path, data, scratch
        self.raw = data.data
        self.at, self.end = 0, len(data)
        self.objects = self.held = 0

    def problem(self, what: str) -> FormatError:
        return FormatError(self.path, f"{what} (at byte {self.at})")

    def take(self, count: int) -> int:
        """Consumes bytes, and returns the offset of the first one."""
        if count > self.end - self.at:
            raise self.problem(f"is truncated, or no msgpack file: {count} bytes expected, {self.end - self.at} left")
        self.at += count
        return self.at - count

    def number(self, form: str) -> Any:
        return struct.unpack_from(form, self.raw, self.take(struct.calcsize(form)))[0]

    def head(self) -> tuple[str, Any]:
        """(kind, length or value) of the next object."""
        token = self.raw[self.take(1)]
        if token <= 0x7F or token >= 0xE0:
            return "value", token if token <= 0x7F else token - 256
        if token <= 0xBF:
            kind = "map" if token <= 0x8F else "list" if token <= 0x9F else "str"
            return kind, token & (0x1F if kind == "str" else 0x0F)
        if token in _CONSTANTS:
            return "value", _CONSTANTS[token]
        if token in _NUMBERS:
            return "value", self.number(_NUMBERS[token])
        if token in _LENGTHS:
            kind, form = _LENGTHS[token]
            return kind, self.number(form)
        if 0xD4 <= token <= 0xD8:
            return "ext", 1 << (token - 0xD4)
        raise self.problem("holds the byte 0xc1, which msgpack never uses")

    def value(self, depth: int) -> Any:
        self.objects += 1
        if depth > MAX_DEPTH:
            raise self.problem(f"is nested deeper than {MAX_DEPTH}")
        if self.objects > MAX_OBJECTS:
            raise self.problem(f"holds more than {MAX_OBJECTS} objects (keys, values and containers)")
        if self.objects % 1024 == 0:
            mmap.release(self.data)
        kind, length = self.head()
        if kind == "value":
            return length
        if kind == "str":
            return self.text(length)
        if kind == "bin":
            return bytes(self.hold(length))
        if kind == "ext":
            return self.extension(length)
        if length * (2 if kind == "map" else 1) > self.end - self.at:  # each object takes a byte at least
            raise self.problem(f"is truncated: a {kind} of {length} objects, {self.end - self.at} bytes left")
        if kind == "list":
            return [self.value(depth + 1) for _ in range(length)]
        return self.mapping(length, depth)

    def hold(self, length: int) -> memoryview:
        start = self.take(length)
        self.held += length
        if self.held > MAX_VALUE_BYTES:
            raise self.problem(f"holds more than {MAX_VALUE_BYTES} bytes of strings and bytes outside of arrays")
        return self.raw[start : start + length]

    def text(self, length: int) -> str:
        try:
            return str(self.hold(length), "utf-8")
        except UnicodeDecodeError as error:
            raise self.problem(f"holds a string that is not UTF-8: {error}") from None

    def mapping(self, length: int, depth: int) -> Any:
        out: dict[Any, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not (key is None or isinstance(key, str | int | float)):
                raise self.problem(f"has a dict key of type {type(key).__name__}; expected str, int, float or None")
            if key in out or (key != key and any(other != other for other in out)):  # NaN is never in a dict
                raise self.problem(f"has the dict key {str(key)[:80]!r} twice")
            out[key] = self.value(depth + 1)
        return self.joined(out) if _CHUNKED in out else out

    def joined(self, parts: dict[Any, Any]) -> np.ndarray:
        """One array of the pieces that flax made of it."""
        shape = self.sequence(parts.get("shape"))
        chunks = self.sequence(parts.get("chunks"))
        flat = [c for c in chunks if isinstance(c, np.ndarray) and c.ndim == 1 and c.dtype == chunks[0].dtype]
        if not flat or len(flat) != len(chunks) or not all(type(d) is int and d >= 0 for d in shape):
            raise self.problem("has an array in pieces that do not fit together")
        if math.prod(shape) != sum(c.size for c in flat) or not math.prod(shape):
            raise self.problem(f"has an array in pieces that do not make up its shape {tuple(shape)}")
        return mmap.join(flat, self.scratch).view(flat[0].dtype).reshape(shape)

    def sequence(self, value: Any) -> list[Any]:
        """A tuple, which flax writes as a dict with the keys "0", "1" and so on."""
        if not isinstance(value, dict) or set(value) != {str(i) for i in range(len(value))}:
            raise self.problem("has an array in pieces that are not numbered")
        return [value[str(i)] for i in range(len(value))]

    def extension(self, length: int) -> Any:
        (code,) = struct.unpack_from(">b", self.raw, self.take(1))
        outer = self.end
        if length > outer - self.at:
            raise self.problem(f"is truncated: an array of {length} bytes, {outer - self.at} left")
        self.end = self.at + length
        if code in (_NDARRAY, _SCALAR):
            value: Any = self.array(MAX_DIMS if code == _NDARRAY else 0)
        elif code == _COMPLEX:
            pair = self.numbers(2)
            if pair is None or len(pair) != 2:
                raise self.problem("has a complex number that is not two numbers")
            value = complex(*pair)
        else:
            raise UnsupportedError(f"{self.path}: the msgpack extension {code} at byte {self.at} is none of flax's")
        if self.at != self.end:
            raise self.problem(f"has an array with {self.end - self.at} bytes too many")
        self.end = outer
        return np.array(value)[()] if code == _SCALAR else value

    def numbers(self, most: int) -> list[Any] | None:
        """A list of at most `most` numbers; None for anything else."""
        kind, length = self.head()
        if kind != "list" or length > most:
            return None
        heads = [self.head() for _ in range(length)]
        found = [value for kind, value in heads if kind == "value" and type(value) in (int, float)]
        return found if len(found) == length else None

    def array(self, dims: int) -> np.ndarray:
        if self.head() != ("list", 3):
            raise self.problem("has an array that is not (shape, dtype, bytes)")
        shape = self.numbers(dims)
        if shape is None or not all(type(d) is int and d >= 0 for d in shape):
            what = f"an array whose shape is no list of at most {dims} sizes" if dims else "a scalar that has a shape"
            raise self.problem(f"has {what}")
        kind, length = self.head()
        dtype = self.dtype(self.text(length) if kind == "str" else "")
        kind, length = self.head()
        if kind not in ("bin", "str") or length != math.prod(shape) * dtype.itemsize or not tree_lib.fits(shape, dtype):
            raise self.problem(f"has an array of shape {tuple(shape)} and dtype {dtype} that has {length} bytes")
        start = self.take(length)
        return self.data[start : start + length].view(dtype).reshape(shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        found = tree_lib.DTYPES.get(name)
        if found is None and _TIMES.match(name):
            found = np.dtype(name)
        if found is None:
            raise UnsupportedError(f"{self.path}: arrays of dtype {name[:40]!r} (at byte {self.at}) cannot be imported")
        return found
