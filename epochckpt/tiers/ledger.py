"""`_epochckpt/mirror.json`, the ledger: what a directory on a file system knows of its mirror.

It says how this directory is recognised, and how its runs have claimed the mirror. It lists the copies that the mirror
has confirmed, and the epochs that were deleted or rolled back here and have yet to leave the mirror.
The mirror itself may have changed since: a run looks there before it acts.

An address is never taken from here: the URL is shown to people, and nothing opens it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt.directory import local_records
from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError, FormatVersionError
from epochckpt.format import codec, parsing, paths
from epochckpt.format.codec import Codec, Fields, stored

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
    from epochckpt.storage import Store

_FIRST_FREE_INODE = 1024  # roots of file systems have small numbers, and the same ones
_MAX_CLAIMS = 256
# In place of the id of an epoch in the mirror, also in ledgers:
NEWER_ID = "newer"  # a newer epochckpt has written it: nothing here is the same
UNUSABLE_ID = ""  # its record cannot be used: nothing tells what it is


@dataclasses.dataclass(frozen=True)
class Identity:
    """By what a directory is told from a copy of it.

    A directory that was renamed keeps its inode, and one that was restored from a backup keeps its host and path. A
    copy has neither.
    """

    directory: str = stored("id", codec.name(limit=32))
    host: str = stored("host", codec.text())
    path: str = stored("path", codec.text(10_000))
    inode: int = stored("inode", codec.INTEGER)

    @classmethod
    def of(cls, store: Store, directory: str) -> Identity:
        """The identity of a directory as it is now, under an id."""
        found = os.stat(store.root)
        path = os.fsencode(os.path.realpath(store.root)).decode("utf-8", "backslashreplace")
        return cls(directory=directory, host=socket.gethostname(), path=path, inode=found.st_ino)

    def is_of(self, store: Store) -> bool:
        """Whether a directory has this identity; a copy of that directory has not."""
        now = Identity.of(store, self.directory)
        if now.inode == self.inode and (now.inode >= _FIRST_FREE_INODE or now.path == self.path):
            return True
        return (now.host, now.path) == (self.host, self.path)


@dataclasses.dataclass(frozen=True)
class Copy:
    """The copy of an epoch in the mirror."""

    save_id: str  # of the epoch here; empty if only the mirror has it
    mirror_id: str  # of the copy


def _read_ids(fields: Fields, key: str) -> dict[int, str]:
    rows = fields.array(key)
    if not all(isinstance(row, list) and [type(value) for value in row] == [int, str] for row in rows):
        raise fields.fail(key, "rows of an epoch and the id of its copy")
    return dict(rows)


def _read_copies(fields: Fields, key: str) -> dict[int, Copy]:
    found: dict[int, Copy] = {}
    for row in fields.array(key):
        if not isinstance(row, list) or [type(value) for value in row] != [int, str, str]:
            raise fields.fail(key, "rows of an epoch, its save id and the id of its copy")
        epoch, save_id, mirror_id = row
        found[epoch] = Copy(save_id=save_id, mirror_id=mirror_id)
    return found


def _write_copies(copies: Mapping[int, Copy]) -> list[list[Any]]:
    return [[epoch, copy.save_id, copy.mirror_id] for epoch, copy in sorted(copies.items())]


_IDS: Codec[Mapping[int, str]] = Codec(_read_ids, lambda ids: sorted(map(list, ids.items())))
_COPIES: Codec[Mapping[int, Copy]] = Codec(_read_copies, _write_copies)
_EPOCHS = codec.integers("epochs")


@dataclasses.dataclass(frozen=True)
class Adoption:
    """A history of another directory that this one goes on from, until it has claimed the mirror and written there."""

    claim: str = stored("claim", codec.name())  # of the mirror, when this directory looked
    epochs: Mapping[int, str] = stored("epochs", _IDS)  # the ids of the epochs that the mirror had then


@dataclasses.dataclass(frozen=True)
class Withdrawal:
    """Epochs that are deleted or rolled back here, and are to leave the mirror.

    It is written before anything happens here, and holds once none of its epochs is listed here any more.
    """

    to: int | None = stored("to", codec.maybe(codec.INTEGER))  # the epoch that is rolled back to; None for a deletion
    epochs: tuple[int, ...] = stored("epochs", _EPOCHS)
    # Those that this directory had, and may have; empty once the withdrawal holds.
    here: tuple[int, ...] = stored("here", _EPOCHS)


_IDENTITY = codec.one(Identity)
_ADOPTION = codec.maybe(codec.one(Adoption))


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a directory knows of its mirror.

    Attributes:
        url: where the mirror is, for people.
        identity: by what this directory is recognised.
        claims: the ids of this directory's claims of the mirror: the last claim that is known to hold, and all claims
            that were tried since.
        adopted: what this directory goes on from, as long as it has written nothing to the mirror.
        copies: by epoch, the copies that the mirror has confirmed.
        copying: a copy that has begun, and that the mirror may or may not have, by epoch.
        withdrawals: what the mirror has yet to give up, in order.
        former: the URLs of mirrors that this directory had before.
        serial: with local disks, where each has a copy of this ledger: which of them is the newest.
    """

    url: str = stored("url", codec.text())
    identity: Identity = stored("directory", _IDENTITY)
    claims: tuple[str, ...] = stored("claims", codec.names(), default=())
    adopted: Adoption | None = stored("adopted", _ADOPTION, default=None)
    copies: Mapping[int, Copy] = stored("copies", _COPIES, default_factory=dict)
    copying: Mapping[int, Copy] = stored("copying", _COPIES, default_factory=dict)
    withdrawals: tuple[Withdrawal, ...] = stored("withdrawals", codec.objects(Withdrawal), default=())
    former: tuple[str, ...] = stored("former", codec.strings("URLs", 0, 10_000), default=())
    serial: int = stored("serial", codec.INTEGER, default=0)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return codec.seal("mirror", self)

    def at(self, url: str) -> Ledger:
        """The ledger for a mirror that may be another one than before."""
        if url == self.url:
            return self
        former = [each for each in dict.fromkeys((*self.former, self.url)) if each != url]
        return dataclasses.replace(self, url=url, copies={}, copying={}, former=tuple(former))

    def knows(self, claim: str) -> bool:
        """Whether a claim of the mirror is one that this directory may replace."""
        return claim in self.claims or (self.adopted is not None and claim == self.adopted.claim)

    def goes_on_from(self, claim: str, epochs: Mapping[int, str]) -> bool:
        """Whether a mirror with this claim and these epochs is as this directory has left it, or has found it."""
        return self.knows(claim) and (self.adopted is None or dict(epochs) == dict(self.adopted.epochs))

    @property
    def hidden(self) -> frozenset[int]:
        """The epochs of withdrawals that hold. They no longer count."""
        return frozenset(epoch for each in self.withdrawals if not each.here for epoch in each.epochs)

    @property
    def may_follow(self) -> bool:
        """Whether the mirror may follow the first withdrawal: nothing of it is listed here any more."""
        return bool(self.withdrawals) and not self.withdrawals[0].here

    def claiming(self, claim: str) -> Ledger:
        """The ledger with one more claim that a run tries."""
        return dataclasses.replace(self, claims=(*self.claims, claim)[-_MAX_CLAIMS:])

    def owning(self, claim: str, copies: Mapping[int, Copy]) -> Ledger:
        """The ledger of a mirror that is claimed, and has these copies."""
        return dataclasses.replace(self, claims=(claim,), adopted=None, copies=copies, copying={})

    def begun(self, epoch: int, copy: Copy) -> Ledger:
        """The ledger with a copy that begins now."""
        return dataclasses.replace(self, copying={epoch: copy})

    def confirmed(self, epoch: int, copy: Copy) -> Ledger:
        """The ledger with a copy that the mirror has."""
        return dataclasses.replace(self, copies={**self.copies, epoch: copy}, copying={})

    def without(self, epochs: Collection[int]) -> Ledger:
        """The ledger when the mirror has no copies of these epochs, or none of this directory's history."""
        copies = {epoch: copy for epoch, copy in self.copies.items() if epoch not in epochs}
        return dataclasses.replace(self, copies=copies)

    def followed(self) -> Ledger:
        """The ledger once the mirror has followed the first withdrawal."""
        left = self.without(self.withdrawals[0].epochs)
        return dataclasses.replace(left, withdrawals=self.withdrawals[1:])


def parse(path: str, data: bytes) -> Ledger:
    """Parses the ledger; raises DamagedError, FormatError or FormatVersionError."""
    return codec.parse(Ledger, parsing.open_record(path, data, "mirror"))


def read_ledger(store: Store) -> Ledger | None:
    """The ledger of a directory; None if it has no mirror, or is no directory on a file system.

    Raises DamagedError, FormatError or StorageError.
    """
    return local_records.read(store, paths.MIRROR_RECORD, parse)


def newest(texts: Sequence[str], where: str) -> Ledger | None:
    """The newest of the ledgers that local disks have, without those that cannot be used; None if there is none."""
    found = list[Ledger]()
    for text in filter(None, texts):
        try:
            found.append(parse(paths.MIRROR_RECORD, text.encode()))
        except (DamagedError, FormatError) as error:
            logging.warning("%s: what one disk knows of the mirror is left out: %s", where, error)
    return max(found, key=lambda ledger: ledger.serial, default=None)


def save_id(epoch_directory: EpochDirectory, epoch: int) -> str | None:
    """The id of the save that an epoch is of, or a copy of; None if it is not there, or its record cannot be used.

    Raises AccessError or StorageError if storage does not say.
    """
    try:
        return epoch_directory.read_head(epoch).origin
    except (DamagedError, EpochNotFoundError, FormatError, FormatVersionError, NotADirectoryError):
        return None


def seen_id(epoch_directory: EpochDirectory, epoch: int, *, anew: bool = False) -> str:
    """The id of an epoch of the mirror as of the last look, or `anew`; or what stands in its place."""
    try:
        found = epoch_directory.read_save_id(epoch) if anew else epoch_directory.seen_save_id(epoch)
        return found or UNUSABLE_ID
    except FormatVersionError:
        return NEWER_ID


def usable_ledger(store: Store) -> Ledger | None:
    """The ledger of a directory; None, with a warning, if it is damaged: the directory is as good without it.

    Raises FormatVersionError or StorageError.
    """
    try:
        return read_ledger(store)
    except (DamagedError, FormatError) as error:
        text = (
            "%s: what it knows of its mirror is damaged, and left out: %s. If its mirror belongs to this directory, an "
            "empty directory goes on from there"
        )
        logging.error(text, store.root, error)
        return None


def settled_withdrawals(ledger: Ledger, local: EpochDirectory) -> tuple[Withdrawal, ...]:
    """The withdrawals that hold: nothing of them is listed here. Storage is asked only if some may not."""
    if not any(each.here for each in ledger.withdrawals):
        return ledger.withdrawals
    listed = set(local.list_epochs())
    holding = (each for each in ledger.withdrawals if listed.isdisjoint(each.here))
    return tuple(dataclasses.replace(each, here=()) for each in holding)
