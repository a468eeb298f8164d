"""Reads what `flax.serialization.to_bytes` and `msgpack_serialize` write, without flax.

Flax's types are msgpack extensions: 1 an array as (shape, dtype, bytes), 2 a complex number, 3 a NumPy scalar. An array
beyond 1 GiB is a dict of flat pieces. Files may be hostile: the `msgpack` package bounds lengths by the file and depth
by its stack of 1,024; everything that becomes an array or a dict is checked here. The whole tree is held in memory.
"""

import math
import mmap
import os
import re
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from epochckpt.errors import FormatError, UnsupportedError
from epochckpt.format import tree as tree_lib
from epochckpt.format.json_kinds import is_list, is_object

MAX_DIMS = 32
MAX_VALUES = 200_000
"""Most values: each costs a few kilobytes on its way into an epoch. An array counts as one."""

_unpackb: Any = msgpack.unpackb  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_CHUNKED = "__msgpack_chunked_array__"
_NDARRAY = 1
_COMPLEX = 2
_SCALAR = 3
_TIMES = re.compile(f"(datetime|timedelta)64{tree_lib.TIME_UNIT}")


def load(path: str, max_values: int = MAX_VALUES) -> Any:
    """The tree of a file of at most so many values: dicts, lists, Python values, NumPy scalars and arrays.

    A file that flax did not write raises FormatError, an unknown extension or dtype UnsupportedError.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise FormatError(path, "is no file")
    reader = _Unpacker(path, max_values)
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                tree = _unpackb(
                    data,
                    strict_map_key=False,
                    ext_hook=reader.extension,
                    object_pairs_hook=reader.mapping,
                    list_hook=reader.counted,
                    max_array_len=max_values,
                    max_map_len=max_values,
                )
        except (FormatError, UnsupportedError):
            raise
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise reader.problem(f"is truncated, or no msgpack file: {str(error) or type(error).__name__}") from None
    if _is_deeper(tree, tree_lib.MAX_DEPTH):
        raise reader.problem(f"is nested deeper than {tree_lib.MAX_DEPTH}")
    return tree


def _is_deeper(tree: Any, depth: int) -> bool:
    inner = tree.values() if is_object(tree) else tree if is_list(tree) else ()
    return depth < 0 or any(_is_deeper(each, depth - 1) for each in inner)


class _Unpacker:
    def __init__(self, path: str, max_values: int):
        self.path = path
        self.values = 0
        self.max_values = max_values

    def problem(self, what: str) -> FormatError:
        return FormatError(self.path, what)

    def counted(self, values: list[Any]) -> list[Any]:
        self.values += len(values)
        if self.values > self.max_values:
            raise self.problem(f"holds more than {self.max_values} values")
        return values

    def mapping(self, pairs: list[tuple[Any, Any]]) -> Any:
        """A dict, or the array that flax cut into pieces."""
        out: dict[Any, Any] = {}
        for key, value in self.counted(pairs):
            if not (key is None or isinstance(key, str | int | float)):
                raise self.problem(f"has a dict key of type {type(key).__name__}; expected str, int, float or None")
            if key in out or (key != key and any(other != other for other in out)):  # NaN is never in a dict
                raise self.problem(f"has the dict key {str(key)[:80]!r} twice")
            out[key] = value
        return self.joined(out) if _CHUNKED in out else out

    def joined(self, parts: dict[Any, Any]) -> np.ndarray:
        shape = self.sequence(parts.get("shape"))
        chunks = self.sequence(parts.get("chunks"))
        arrays: list[np.ndarray] = [chunk for chunk in chunks if isinstance(chunk, np.ndarray)]
        flat = [array for array in arrays if array.ndim == 1 and array.dtype == arrays[0].dtype]
        if not flat or len(flat) != len(chunks) or not all(type(d) is int and d >= 0 for d in shape):
            raise self.problem("has an array in pieces that do not fit together")
        if math.prod(shape) != sum(array.size for array in flat) or not math.prod(shape):
            raise self.problem(f"has an array in pieces that do not make up its shape {tuple(shape)}")
        return np.concatenate(flat).reshape(shape)

    def sequence(self, value: Any) -> list[Any]:
        """A tuple, which flax writes as a dict with the keys "0", "1" and so on."""
        if not is_object(value) or set(value) != {str(i) for i in range(len(value))}:
            raise self.problem("has an array in pieces that are not numbered")
        return [value[str(i)] for i in range(len(value))]

    def extension(self, code: int, data: bytes) -> Any:
        if code not in (_NDARRAY, _COMPLEX, _SCALAR):
            raise UnsupportedError(f"{self.path}: flax has no msgpack extension {code}")
        content = _unpackb(data, raw=True, max_array_len=1000, max_map_len=0)
        if code == _COMPLEX:
            if not is_list(content) or [isinstance(part, int | float) for part in content] != [True, True]:
                raise self.problem("has a complex number that is not two numbers")
            real, imaginary = content
            return complex(real, imaginary)
        array = self.array(content)
        if code == _SCALAR and array.ndim:
            raise self.problem("has a scalar that has a shape")
        return array[()] if code == _SCALAR else array

    def array(self, content: Any) -> np.ndarray:
        if not is_list(content) or len(content) != 3:
            raise self.problem("has an array that is not (shape, dtype, bytes)")
        shape, name, data = content
        dims = shape if is_list(shape) and len(shape) <= MAX_DIMS else [None]
        if not all(type(d) is int and d >= 0 for d in dims) or not isinstance(name, bytes):
            raise self.problem(f"has an array whose shape is no list of at most {MAX_DIMS} sizes")
        text = name.decode("utf-8", "replace")
        dtype = tree_lib.dtypes().get(text) or (np.dtype(text) if _TIMES.match(text) else None)
        if dtype is None:
            raise UnsupportedError(f"{self.path}: arrays of dtype {text[:40]!r} cannot be imported")
        size = len(data) if isinstance(data, bytes) else -1
        if size != math.prod(shape) * dtype.itemsize or not tree_lib.fits(shape, dtype):
            raise self.problem(f"has an array of shape {tuple(shape)} and dtype {dtype} that does not fit its bytes")
        return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
