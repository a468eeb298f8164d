"""`.safetensors` files (format: github.com/huggingface/safetensors, README "Format"): the header, and our notes in it.

A file is a header (8 bytes of length, JSON, spaces up to a page) and the data, without holes. Foreign files may be
hostile, so `parse` checks sizes, types and offsets against each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epochckpt._lazy import jax, jnp, np
from epochckpt.errors import FormatError, UnsupportedError
from epochckpt.format import tree as tree_lib
from epochckpt.format.json_kinds import is_list, is_object
from epochckpt.format.tree import KeyPath, dtypes, fits

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTES_KEY = "epochckpt"
"""The entry of `__metadata__` that holds `Notes`."""

ALIGNMENT = 4096
MAX_READ_BYTES = 100_000_000  # of a header, by the format
MAX_HEADER_BYTES = 50_000_000  # of our headers; a larger one is continued in another part

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
_FNUZ = {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}  # not in our data files, only read
_NAMES = {kind: name for name, kind in {**_TYPES, **_FNUZ}.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `start` and `stop` are byte offsets in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def has_type(dtype: np.dtype[Any]) -> bool:
    """Whether the format has a type for arrays of this dtype."""
    return dtype.name in _TYPES


def header(
    tensors: Sequence[tuple[str, np.dtype[Any], Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The header for tensors (name, dtype, shape, bytes) in file order, padded to a page."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "epochckpt-1"})}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        kind = _TYPES.get(dtype.name)
        dims = list(shape)
        if kind is None:  # a type that the format lacks: bytes, with one more dimension
            kind = "U8"
            dims = [*dims, dtype.itemsize] if dtype.itemsize > 1 else dims
        entries[name] = {"dtype": kind, "shape": dims, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def header_bytes_bound(name_bytes: int, dims: int) -> int:
    """Upper bound of the bytes that one tensor adds to the header."""
    return name_bytes + 96 + 21 * (dims + 1)


def parse(path: str, head: bytes, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file of `size` bytes, by name in file order, and its `__metadata__`.

    `head` has at least `8 + header_length` bytes. A header that the format does not allow raises FormatError, a tensor
    of an unknown type UnsupportedError.
    """
    start = 8 + header_length(path, head, size)
    try:
        entries = json.loads(head[8:start], object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"its header is not usable JSON: {str(error)[:200]}") from None
    if not is_object(entries):
        raise FormatError(path, "its header is not a JSON object")
    metadata: Any = entries.pop("__metadata__", None) or {}
    if not is_object(metadata) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(path, "its __metadata__ is not a map of strings")
    tensors = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    ordered = dict(sorted(tensors.items(), key=lambda pair: (pair[1].start, pair[1].stop)))
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
    if not is_object(entry):
        raise problem
    kind = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    if not isinstance(kind, str) or not is_list(shape) or not is_list(offsets):
        raise problem
    if len(offsets) != 2 or len(shape) > 32 or not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, *offsets)):
        raise problem
    if kind not in _NAMES:
        raise UnsupportedError(f"{path}: tensor {name[:200]!r} is of type {kind[:40]!r}, which NumPy and JAX lack")
    dtype = dtypes()[_NAMES[kind]]
    if offsets[0] + math.prod(shape) * dtype.itemsize != offsets[1] or not fits(shape, dtype):
        raise problem
    return Tensor(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    distinct = dict(pairs)
    if len(distinct) != len(pairs):
        raise ValueError("it has a name twice")
    return distinct


@dataclasses.dataclass
class Notes:
    """What the tensors of one export cannot say: key paths, Python values, PRNG keys.

    `export` writes them as JSON to `__metadata__` under `NOTES_KEY`, and `import_` reads them; other readers ignore
    them. Paths, kinds and values are as in `epoch.json`.
    """

    separator: str  # stands between the keys in a name
    # (path, kind, PRNG implementation or None) by name of the tensor, where its name and bytes lack one
    tensors: dict[str, tuple[KeyPath, str, str | None]] = dataclasses.field(
        default_factory=dict[str, tuple[KeyPath, str, str | None]]
    )
    # (path, kind, JSON) of the rest
    values: list[tuple[KeyPath, str, Any]] = dataclasses.field(default_factory=list[tuple[KeyPath, str, Any]])

    def to_text(self) -> str:
        """As JSON."""
        rows = {n: [tree_lib.path_to_json(p), k, *([i] if i else [])] for n, (p, k, i) in self.tensors.items()}
        values = [[tree_lib.path_to_json(p), k, v] for p, k, v in self.values]
        note = {"version": 1, "separator": self.separator, "tensors": rows, "values": values}
        return json.dumps(note, separators=(",", ":"))


def split_name(name: str, separator: str | None) -> KeyPath:
    """The key path in nested dicts that a name stands for; without a separator, in one dict."""
    return tuple(("k", key) for key in (name.split(separator) if separator is not None else [name]))


def parse_notes(path: str, text: str) -> Notes:
    """Parses what `Notes.to_text` made; FormatError for anything else."""
    problem = FormatError(path, f"its __metadata__ {NOTES_KEY!r} is not what epochckpt's export writes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise problem from None
    if not is_object(data) or data.get("version") != 1:
        raise problem
    separator = data.get("separator")
    tensors = data.get("tensors")
    values = data.get("values")
    if not isinstance(separator, str) or not separator or not is_object(tensors) or not is_list(values):
        raise problem
    rows = [*tensors.values(), *values]
    if not all(is_list(row) and len(row) in (2, 3) and isinstance(row[1], str) for row in rows):
        raise problem
    notes = Notes(separator)
    for name, row in tensors.items():
        impl = row[2] if len(row) == 3 else None
        if row[1] not in tree_lib.ARRAY_KINDS or isinstance(impl, str) != (row[1] == "prng"):
            raise problem
        notes.tensors[name] = tree_lib.path_from_json(path, row[0]), row[1], impl
    for row in values:
        if len(row) != 3 or row[1] not in tree_lib.VALUE_KINDS | tree_lib.EMPTY_KINDS:
            raise problem
        notes.values.append((tree_lib.path_from_json(path, row[0]), row[1], row[2]))
    return notes


def array_of(path: str, array: NDArray[Any], kind: str, impl: str | None) -> Any:
    """A leaf from its tensor and its note; FormatError if they do not fit."""
    try:
        if kind == "prng":
            keys: Any = jnp.array(array)  # pyright: ignore[reportUnknownMemberType]
            return jax.random.wrap_key_data(keys, impl=impl)  # pyright: ignore[reportUnknownVariableType]
        if kind == "scalar" and not array.ndim:
            return array.copy()[()]
        if kind == "longbytes":
            return array.tobytes()
        if kind == "longstr":
            return array.tobytes().decode("utf-8", "surrogatepass")
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(path, f"a tensor is recorded with kind {kind}, but cannot be one: {error}") from None
    return array
