"""What may be set aside, and on whose word: later epochs by a rollback, one that cannot be read by its next save."""

from __future__ import annotations

import dataclasses

from epochckpt import checksum, layout
from epochckpt.errors import FormatError


@dataclasses.dataclass(frozen=True)
class Rollback:
    """`rollback.json`: the epochs that are being set aside; readers obey it, the next open finishes it."""

    to: int
    epochs: tuple[int, ...]
    id: str

    def to_bytes(self) -> bytes:
        """The file's content."""
        fields = {"format": layout.FORMAT, "version": layout.VERSION, "record": "rollback"}
        return checksum.seal({**fields, "to": self.to, "epochs": list(self.epochs), "id": self.id})

    @property
    def folder(self) -> str:
        """Where the epochs go: a name that no clean-up touches."""
        return f"rolled-back-{self.id}"


def parse_rollback(data: bytes) -> Rollback:
    """Parses `rollback.json`."""
    path = layout.ROLLBACK_RECORD
    record = checksum.unseal(path, data)
    to, epochs, token = record.get("to"), record.get("epochs"), record.get("id")
    valid = (
        type(to) is int and isinstance(epochs, list) and all(type(e) is int for e in epochs) and layout.is_name(token)
    )
    if record.get("record") != "rollback" or not valid:
        raise FormatError(path, "is not a rollback record")
    return Rollback(to, tuple(epochs), token)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Damaged:
    """An epoch that could not be read.

    Attributes:
        attempt: its attempt id, or None where not even its record can be used.
    """

    attempt: str | None
