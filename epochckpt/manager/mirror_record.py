"""`_epochckpt/mirror.json`: what a directory on a file system knows of its mirror.

It is written before the mirror changes, so that whatever a kill leaves there can be told: whether an epoch there is a
copy of this directory's, or of one that it has replaced since. An epoch that was deleted or rolled back here does not
come back from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt.commit import Commits, commits_of
from epochckpt.errors import DamagedError, FormatError
from epochckpt.format import checksums, parsing, paths
from epochckpt.storage import Store, open_store


@dataclasses.dataclass(frozen=True)
class Withdrawal:
    """Epochs that were deleted here, or rolled back, and that the mirror has yet to give up."""

    to: int | None  # the epoch that was rolled back to; None for a deletion
    epochs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MirrorRecord:
    """The mirror of a directory.

    Attributes:
        url: where it is.
        address: what opens it: the same, with the settings of a bucket. They hold nothing secret.
        copies: by epoch, the attempt here, and the attempt there that is its copy, once that is committed there.
        withdrawn: what the mirror has yet to follow, in order.
        serial: with local disks, where each has a copy of this record, which of them is the newest.
    """

    url: str
    address: str
    copies: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    withdrawn: tuple[Withdrawal, ...] = ()
    serial: int = 0

    def to_bytes(self) -> bytes:
        """The file's content."""
        return checksums.seal(
            {
                "format": paths.FORMAT,
                "version": paths.VERSION,
                "record": "mirror",
                "url": self.url,
                "address": self.address,
                "copies": [[epoch, *attempts] for epoch, attempts in sorted(self.copies.items())],
                "withdrawn": [[each.to, list(each.epochs)] for each in self.withdrawn],
                **({"serial": self.serial} if self.serial else {}),
            }
        )

    @property
    def hidden(self) -> frozenset[int]:
        """Epochs that no longer count in the mirror."""
        return frozenset(epoch for each in self.withdrawn for epoch in each.epochs)

    def is_copy(self, epoch: int, attempt: str | None, there: str) -> bool:
        """Whether an attempt in the mirror is a copy of this directory's; None: of what cannot be read any more."""
        here, copy = self.copies.get(epoch, ("", ""))
        return there == attempt or (there == copy and attempt in (None, here))


def read_mirror_record(store: Store) -> MirrorRecord | None:
    """The record of a directory; None if it has no mirror. Raises DamagedError, FormatError or StorageError."""
    return parsing.read_record(store, paths.MIRROR_RECORD, _parse)


class RecordedMirror:
    """The mirror that a directory's own record names, where no other is given; see `readers.MirrorCopies`."""

    def copy_of(self, epoch: int, commits: Commits) -> Commits | None:
        """See `readers.MirrorCopies`."""
        record = read_mirror_record(commits.store)
        if record is None or epoch in record.hidden:
            return None
        there = commits_of(open_store(record.address), commits.names)
        attempt = there.read_attempt(epoch)
        is_copy = attempt is not None and record.is_copy(epoch, commits.read_attempt(epoch), attempt)
        return there if is_copy else None


def newest(texts: Sequence[str], where: str) -> MirrorRecord | None:
    """The newest of the records that local disks have, without those that cannot be used; None if there is none."""
    found = list[MirrorRecord]()
    for text in filter(None, texts):
        try:
            found.append(_parse(paths.MIRROR_RECORD, text.encode()))
        except (DamagedError, FormatError) as error:
            logging.warning("%s: what one disk knows of the mirror is left out: %s", where, error)
    return max(found, key=lambda record: record.serial, default=None)


def _parse(path: str, data: bytes) -> MirrorRecord:
    fields = parsing.open_record(path, data, "mirror")
    copies: dict[int, tuple[str, str]] = {}
    for row in fields.array("copies"):
        if not isinstance(row, list) or [type(value) for value in row] != [int, str, str]:
            raise FormatError(path, "holds a copy that is no [epoch, attempt, attempt]")
        copies[row[0]] = (row[1], row[2])
    withdrawn = tuple(_withdrawal(path, row) for row in fields.array("withdrawn"))
    serial = fields.integer("serial") if "serial" in fields.data else 0
    return MirrorRecord(fields.text("url"), fields.text("address"), copies, withdrawn, serial)


def _withdrawal(path: str, row: Any) -> Withdrawal:
    match row:
        case [None | int() as to, [*epochs]] if all(type(epoch) is int for epoch in epochs):
            return Withdrawal(to, tuple(epochs))
    raise FormatError(path, "holds a withdrawal that is no [epoch or null, epochs]")
