"""The header of a `.safetensors` file (format: github.com/huggingface/safetensors, README "Format").

Only the header is ours to write: 8 bytes of length, JSON, spaces up to a page. The data follows without holes. What is
read may come from anybody, so `parse` believes nothing: sizes, types and offsets are checked against each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epochckpt.errors import FormatError, UnsupportedError
from epochckpt.format.tree import DTYPES, fits

ALIGNMENT = 4096
MAX_READ_BYTES = 100_000_000  # what the format allows
MAX_HEADER_BYTES = 50_000_000  # the format allows 100 MB; files are continued in another part before that

_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_FNUZ = {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}  # younger than our data files: read only
_DTYPES = {kind: DTYPES[name] for name, kind in {**_TYPES, **_FNUZ}.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `start` and `stop` are positions in the file, in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def has_type(dtype: np.dtype[Any]) -> bool:
    """Whether the format has a type for arrays of this dtype."""
    return dtype.name in _TYPES


def tensor_type(dtype: np.dtype[Any], shape: Sequence[int]) -> tuple[str, list[int]]:
    """The safetensors type and shape for an array; types that it lacks are bytes with one more dimension."""
    name = _TYPES.get(dtype.name)
    if name is not None:
        return name, list(shape)
    return "U8", [*shape, dtype.itemsize] if dtype.itemsize > 1 else list(shape)


def slice_name(leaf: str, bounds: Sequence[tuple[int, int]] | None) -> str:
    """Name of a tensor: the leaf's own, with its slice in brackets where it is a shard of a larger leaf."""
    if bounds is None:
        return leaf
    return f"{leaf}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


def header(
    tensors: Sequence[tuple[str, np.dtype[Any], Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Header for tensors (name, dtype, shape, bytes) in file order, padded so that the data starts page-aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "epochckpt-1"})}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        kind, dims = tensor_type(dtype, shape)
        entries[name] = {"dtype": kind, "shape": dims, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def header_bytes_bound(name_bytes: int, dims: int) -> int:
    """Upper bound of what one tensor adds to the header."""
    return name_bytes + 96 + 21 * (dims + 1)


def parse(path: str, head: bytes, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, by name in file order, and its `__metadata__`.

    Args:
        path: for messages.
        head: the first bytes of the file: at least `8 + length of the header`, as `header_length` gives it.
        size: bytes of the whole file.

    Raises:
        FormatError: it is not what the format allows.
        UnsupportedError: a type that epochckpt does not know, by name of the tensor.
    """
    start = 8 + header_length(path, head, size)
    try:
        entries = json.loads(head[8:start], object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"its header is not usable JSON: {str(error)[:200]}") from None
    if not isinstance(entries, dict):
        raise FormatError(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(path, "its __metadata__ is not a map of strings")
    found = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    ordered = dict(sorted(found.items(), key=lambda pair: (pair[1].start, pair[1].stop)))
    end = start
    for name, tensor in ordered.items():
        if tensor.start != end:
            how = "overlaps the one before it" if tensor.start < end else "leaves a hole before it"
            raise FormatError(path, f"tensor {name[:200]!r} {how}: bytes {tensor.start}-{tensor.stop}, expected {end}")
        end = tensor.stop
    if end != size:
        how = "is truncated" if end > size else "is longer than its header says"
        raise FormatError(path, f"{how}: {size} bytes, {end} expected")
    return ordered, metadata


def header_length(path: str, head: bytes, size: int) -> int:
    """Length of the JSON of a header, from the first 8 bytes of a file of `size` bytes; FormatError if it cannot be."""
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else size
    if length > min(MAX_READ_BYTES, size - 8):
        raise FormatError(path, f"is no safetensors file: a header of {length} bytes in a file of {size}")
    return length


def _tensor(path: str, name: str, entry: Any, start: int) -> Tensor:
    problem = FormatError(path, f"tensor {name[:200]!r} is not dtype, shape and data_offsets that fit together")
    if not isinstance(entry, dict):
        raise problem
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise problem
    if len(offsets) != 2 or len(shape) > 32 or not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, *offsets)):
        raise problem
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise UnsupportedError(f"{path}: tensor {name[:200]!r} is of type {kind[:40]!r}, which NumPy and JAX lack")
    if offsets[0] + math.prod(shape) * dtype.itemsize != offsets[1] or not fits(shape, dtype):
        raise problem
    return Tensor(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found
