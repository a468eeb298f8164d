"""Checksums of blocks, records that carry their own checksum, and user data as strict JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash

from epochckpt.errors import DamagedError, FormatError, InvalidArgumentError
from epochckpt.format.json_kinds import is_list, is_object, is_tuple

_FIELD = b'{"checksum":"xxh3:'
_ZEROS = b"0" * 16
_HELD_BYTES = 64 * 2**10  # of more than that at once, xxhash releases the interpreter lock
_MAX_DEPTH = 100  # of user data

Buffer = bytes | bytearray | memoryview


def xxh3(data: Buffer) -> int:
    """xxh3-64 of a contiguous buffer.

    The interpreter lock stays held: 4 MiB are hashed in 0.13 ms. To get the lock back takes 5 ms beside a thread that
    runs Python all the time.
    """
    if len(data) <= _HELD_BYTES:
        return xxhash.xxh3_64_intdigest(data)
    view = memoryview(data)
    hashed = xxhash.xxh3_64()
    for start in range(0, len(view), _HELD_BYTES):
        hashed.update(view[start : start + _HELD_BYTES])
    return hashed.intdigest()


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of a record, or of a contiguous buffer, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


# -- blocks of files ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockSums:
    """The checksums of the blocks of one file, in their order."""

    kind: BlockChecksum
    values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockChecksum:
    """A kind of checksum that the blocks of a file may have.

    Attributes:
        name: the field of a file in `node.json` that holds the checksums of its blocks.
        about: which function it is, for docs/.
        digits: how many hex digits a checksum has.
        compute: the checksum of a contiguous buffer.
    """

    name: str
    about: str
    digits: int
    compute: Callable[[Buffer], int]

    def of(self, block: Buffer) -> str:
        """The checksum of a block, in hex digits."""
        return f"{self.compute(block):0{self.digits}x}"

    def sums(self, blocks: Iterable[Buffer]) -> BlockSums:
        """The checksums of all blocks of a file."""
        return BlockSums(self, tuple(map(self.of, blocks)))


BLOCK_CHECKSUMS = {
    row.name: row
    for row in (BlockChecksum(name="xxh3", about="the 64-bit XXH3 of the block", digits=16, compute=xxh3),)
}
"""The kinds of checksums that blocks may have, by name. To add a kind, add a row.

Versions before that cannot read it: as long as it is `WRITTEN`, records need a feature in `requires`.
"""

WRITTEN = BLOCK_CHECKSUMS["xxh3"]
"""The kind that new files get. Every kind is read."""


# -- records -----------------------------------------------------------------------------------------------------------

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)


class Json(str):
    """Text of JSON."""


def dumps(value: Any) -> Json:
    """A value as JSON; ValueError for what JSON has no number for."""
    return Json(_ENCODER.encode(value))


def dumps_fields(fields: Mapping[str, Any]) -> Json:
    """An object as JSON, of whose values some may be text already."""
    texts = (f"{dumps(name)}:{value if isinstance(value, Json) else dumps(value)}" for name, value in fields.items())
    return Json(f"{{{','.join(texts)}}}")


def seal(record: Mapping[str, Any]) -> bytes:
    """A record as JSON. The first field is the checksum of the whole, computed with zeros in its place."""
    body = dumps_fields(record).encode()
    zeroed = _FIELD + _ZEROS + b'"' + (b"," + body[1:] if body != b"{}" else b"}")
    return _FIELD + f"{xxh3(zeroed):016x}".encode() + zeroed[len(_FIELD) + 16 :]


def check_seal(path: str, data: bytes) -> None:
    """Raises DamagedError unless a record has the checksum that it carries."""
    start = len(_FIELD)
    if not data.startswith(b"{"):
        raise DamagedError(path, "is not a JSON record (empty, truncated or overwritten)")
    if not data.startswith(_FIELD) or len(data) < start + 17:
        raise DamagedError(path, 'does not begin with its checksum ("checksum":"xxh3:…")')
    recorded = data[start : start + 16].decode("ascii", "replace")
    expected = f"{xxh3(data[:start] + _ZEROS + data[start + 16 :]):016x}"
    if recorded != expected:
        raise DamagedError(path, f"checksum differs: recorded {recorded}, computed {expected}")


def parse_sealed(path: str, data: bytes) -> dict[str, Any]:
    """Parses a record, or the beginning of one, without comparing its checksum; FormatError if it is no JSON."""
    try:
        record = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"is not usable JSON: {str(error)[:200]}") from None
    del record["checksum"]
    return record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the constant {name} is not JSON")


def pack_json(value: Any, where: str, depth: int = 0) -> Any:
    """User data as plain JSON: NumPy and jax scalars become numbers or bools; NaN and infinities `{"$float": "nan"}`.

    Anything else raises InvalidArgumentError; `where` names the argument.
    """
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"{where} is nested deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, str):
        return value
    if is_object(value):
        bad = [k for k in value if not isinstance(k, str)]
        if bad:
            raise InvalidArgumentError(f"{where} has the key {bad[0]!r}; keys must be str")
        if value.keys() == {"$float"}:
            raise InvalidArgumentError(f"{where} holds a dict with the one key '$float': it stands for NaN")
        return {k: pack_json(v, where, depth + 1) for k, v in value.items()}
    if is_list(value) or is_tuple(value):
        return [pack_json(v, where, depth + 1) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, int):
        return value if isinstance(value, bool) else int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    raise InvalidArgumentError(
        f"{where} holds a {type(value).__name__}; expected JSON (dict, list, str, number, bool, None)"
    )


def unpack_json(value: Any, depth: int = 0) -> Any:
    """The inverse of `pack_json`. Raises RecursionError where a value is nested more deeply than `pack_json` allows."""
    if depth > _MAX_DEPTH:
        raise RecursionError(f"user data is nested deeper than {_MAX_DEPTH}")
    if is_object(value):
        if len(value) == 1 and value.get("$float") in ("nan", "inf", "-inf"):
            return float(value["$float"])
        return {k: unpack_json(v, depth + 1) for k, v in value.items()}
    return [unpack_json(v, depth + 1) for v in value] if is_list(value) else value


def pack_by_number(values: Mapping[int, Any], where: str) -> list[Any]:
    """User data by number, as a JSON list of pairs; the depth limit holds for each value."""
    return [[number, pack_json(value, where)] for number, value in sorted(values.items())]


def unpack_by_number(values: list[Any]) -> dict[int, Any]:
    """The inverse of `pack_by_number`."""
    return {number: unpack_json(value) for number, value in values}
