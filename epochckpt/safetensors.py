"""The header of a `.safetensors` file (format: github.com/huggingface/safetensors, README "Format").

Only the header is ours to write: 8 bytes of length, JSON, spaces up to a page. The data follows without holes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 4096
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


def header(tensors: Sequence[tuple[str, np.dtype[Any], Sequence[int], int]]) -> bytes:
    """Header for tensors (name, dtype, shape, bytes) in file order, padded so that the data starts page-aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "epochckpt-1"}}
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
