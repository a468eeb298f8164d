"""What may be set aside, and on whose word.

Later epochs by a rollback; one that cannot be read by the next save of its number; a good one by the next save of its
number if the caller lets it.
"""

from __future__ import annotations

import dataclasses

from epochckpt import checksum, layout
from epochckpt.errors import FormatError


@dataclasses.dataclass(frozen=True)
class Rollback:
    """`rollback.json`: epochs that do not count any more; readers obey it, the next run that writes finishes it.

    A rollback always has one. A deletion needs one only where no rename can take the epoch out of sight at once.

    Attributes:
        to: the epoch that was rolled back to; None for a deletion.
        epochs: those that do not count.
        id: of this one.
        kept: a deletion: the folder that keeps them; None: they are removed.
    """

    to: int | None
    epochs: tuple[int, ...]
    id: str
    kept: str | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        fields = {"format": layout.FORMAT, "version": layout.VERSION, "record": "rollback"}
        what = {"to": self.to, "epochs": list(self.epochs), "id": self.id, "kept": self.kept}
        return checksum.seal({**fields, **what})

    @property
    def about(self) -> int:
        """The epoch that errors are about."""
        return self.epochs[0] if self.to is None and self.epochs else self.to or 0

    @property
    def folder(self) -> str | None:
        """Where the epochs go: a name that no clean-up touches; None: they are removed."""
        return self.kept if self.to is None else f"rolled-back-{self.id}"


def parse_rollback(data: bytes) -> Rollback:
    """Parses `rollback.json`."""
    path = layout.ROLLBACK_RECORD
    record = checksum.unseal(path, data)
    to, epochs, token, kept = (record.get(name) for name in ("to", "epochs", "id", "kept"))
    valid = (
        (to is None or type(to) is int)
        and isinstance(epochs, list)
        and all(type(e) is int for e in epochs)
        and layout.is_name(token)
        and (kept is None or layout.is_name(kept))
    )
    if record.get("record") != "rollback" or not valid:
        raise FormatError(path, "is not a rollback record")
    return Rollback(to, tuple(epochs), token, kept)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Damaged:
    """An epoch whose bytes are not those that were written. Another attempt at its number is another epoch.

    Attributes:
        attempt: its attempt id, or None where not even its record can be used.
        reason: what was found.
    """

    attempt: str | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Superseded:
    """A good epoch in whose place the next save of its number may come.

    Attributes:
        attempt: its attempt id; another one is not replaced.
    """

    attempt: str


Replaces = Damaged | Superseded
