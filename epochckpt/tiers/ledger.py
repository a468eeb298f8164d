"""`_epochckpt/mirror.json`, the ledger: what a directory on a file system knows of its mirror.

It says how this directory is recognised, which claims of the mirror its runs have made, what the mirror has confirmed,
and which epochs were deleted or rolled back here and have yet to leave the mirror. It is only what this directory
knows: before a run acts on it, it looks at the mirror.

An address is never taken from here: the URL is shown to people, and nothing opens it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt.commit import Commits
from epochckpt.errors import DamagedError, EpochCheckpointError, FormatError
from epochckpt.format import checksums, parsing, paths
from epochckpt.storage import Store

_FIRST_FREE_INODE = 1024  # roots of file systems have small numbers, and the same ones
_MAX_CLAIMS = 256


@dataclasses.dataclass(frozen=True)
class Identity:
    """By what a directory is told from a copy of it.

    A directory that was renamed keeps its inode, and one that was restored from a backup keeps its host and path. A
    copy has neither.
    """

    directory: str  # the id
    host: str
    path: str
    inode: int

    @classmethod
    def of(cls, store: Store, directory: str) -> Identity:
        """The identity of a directory as it is now, under an id."""
        found = os.stat(store.root)
        path = os.fsencode(os.path.realpath(store.root)).decode("utf-8", "backslashreplace")
        return cls(directory=directory, host=socket.gethostname(), path=path, inode=found.st_ino)

    def is_of(self, store: Store) -> bool:
        """Whether this is the identity of a directory itself, and not that of one that it is a copy of."""
        now = Identity.of(store, self.directory)
        if now.inode == self.inode and now.inode >= _FIRST_FREE_INODE:
            return True
        return (now.host, now.path) == (self.host, self.path)


@dataclasses.dataclass(frozen=True)
class Copy:
    """The copy of an epoch in the mirror."""

    save_id: str  # of what was copied: the save that committed it here
    mirror_id: str  # of the copy


@dataclasses.dataclass(frozen=True)
class Withdrawal:
    """Epochs that are deleted or rolled back here, and are to leave the mirror.

    It is written before anything happens here, and holds once none of its epochs is listed here any more.
    """

    to: int | None  # the epoch that is rolled back to; None for a deletion
    epochs: tuple[int, ...]
    here: Mapping[int, str]  # those of them that this directory has, with their save ids; the others are in the mirror


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a directory knows of its mirror.

    Attributes:
        url: where the mirror is, for people.
        identity: by what this directory is recognised.
        claims: the ids of claims of the mirror that are this directory's: the last that is known to hold, and those
            that runs have tried since.
        copies: by epoch, the copies that the mirror has confirmed.
        copying: a copy that has begun, and that the mirror may or may not have, by epoch.
        withdrawals: what the mirror has yet to give up, in order.
        serial: with local disks, where each has a copy of this ledger: which of them is the newest.
    """

    url: str
    identity: Identity
    claims: tuple[str, ...] = ()
    copies: Mapping[int, Copy] = dataclasses.field(default_factory=dict)
    copying: Mapping[int, Copy] = dataclasses.field(default_factory=dict)
    withdrawals: tuple[Withdrawal, ...] = ()
    serial: int = 0

    def to_bytes(self) -> bytes:
        """The file's content."""
        return checksums.seal(
            {
                "format": paths.FORMAT,
                "version": paths.VERSION,
                "record": "mirror",
                "url": self.url,
                "directory": {
                    "id": self.identity.directory,
                    "host": self.identity.host,
                    "path": self.identity.path,
                    "inode": self.identity.inode,
                },
                "claims": list(self.claims),
                "copies": _rows(self.copies),
                "copying": _rows(self.copying),
                "withdrawals": [
                    {"to": each.to, "epochs": list(each.epochs), "here": sorted(map(list, each.here.items()))}
                    for each in self.withdrawals
                ],
                "serial": self.serial,
            }
        )

    @property
    def hidden(self) -> frozenset[int]:
        """The epochs that no longer count: those of the withdrawals that hold."""
        return frozenset(epoch for each in self.withdrawals if not each.here for epoch in each.epochs)

    @property
    def may_follow(self) -> bool:
        """Whether the mirror may follow the first withdrawal: nothing of it is listed here any more."""
        return bool(self.withdrawals) and not self.withdrawals[0].here

    def claiming(self, claim: str) -> Ledger:
        """The ledger with one more claim that a run tries."""
        return dataclasses.replace(self, claims=(*self.claims, claim)[-_MAX_CLAIMS:])

    def begun(self, epoch: int, copy: Copy) -> Ledger:
        """The ledger with a copy that begins now."""
        return dataclasses.replace(self, copying={epoch: copy})

    def confirmed(self, epoch: int, copy: Copy) -> Ledger:
        """The ledger with a copy that the mirror has."""
        return dataclasses.replace(self, copies={**self.copies, epoch: copy}, copying={})

    def without(self, epoch: int) -> Ledger:
        """The ledger once the mirror has given an epoch up."""
        copies = {number: copy for number, copy in self.copies.items() if number != epoch}
        return dataclasses.replace(self, copies=copies)

    def followed(self) -> Ledger:
        """The ledger once the mirror has followed the first withdrawal."""
        gone = {*self.withdrawals[0].epochs}
        copies = {epoch: copy for epoch, copy in self.copies.items() if epoch not in gone}
        return dataclasses.replace(self, copies=copies, withdrawals=self.withdrawals[1:])


def _rows(copies: Mapping[int, Copy]) -> list[list[Any]]:
    return [[epoch, copy.save_id, copy.mirror_id] for epoch, copy in sorted(copies.items())]


def parse(path: str, data: bytes) -> Ledger:
    """Parses the ledger; raises DamagedError, FormatError or FormatVersionError."""
    fields = parsing.open_record(path, data, "mirror")
    known = parsing.Fields(path, fields.mapping("directory"), "directory.")
    identity = Identity(
        directory=paths.check_recorded_name(path, known.text("id", 32)),
        host=known.text("host"),
        path=known.text("path", 10_000),
        inode=known.integer("inode"),
    )
    return Ledger(
        url=fields.text("url"),
        identity=identity,
        claims=tuple(paths.check_recorded_name(path, claim) for claim in fields.array("claims")),
        copies=_copies(fields, "copies"),
        copying=_copies(fields, "copying"),
        withdrawals=tuple(_withdrawal(fields, each) for each in fields.array("withdrawals")),
        serial=fields.integer("serial"),
    )


def _copies(fields: parsing.Fields, name: str) -> dict[int, Copy]:
    found: dict[int, Copy] = {}
    for row in fields.array(name):
        if not isinstance(row, list) or [type(value) for value in row] != [int, str, str]:
            raise fields.fail(name, "rows of an epoch, its save id and the id of its copy")
        epoch, save_id, mirror_id = row
        found[epoch] = Copy(save_id=save_id, mirror_id=mirror_id)
    return found


def _withdrawal(fields: parsing.Fields, data: object) -> Withdrawal:
    match data:
        case {"to": None | int() as to, "epochs": [*epochs], "here": [*here]}:
            pairs: list[Any] = [row for row in here if isinstance(row, list) and [type(v) for v in row] == [int, str]]
            if all(type(epoch) is int for epoch in epochs) and len(pairs) == len(here):
                return Withdrawal(to=to, epochs=tuple(epochs), here=dict(pairs))
    raise fields.fail("withdrawals", "an epoch or null, epochs, and those that are here with their save ids")


def read_ledger(store: Store) -> Ledger | None:
    """The ledger of a directory; None if it has no mirror, or is no directory on a file system.

    Raises DamagedError, FormatError or StorageError.
    """
    return parsing.read_record(store, paths.MIRROR_RECORD, parse) if store.renames else None


def newest(texts: Sequence[str], where: str) -> Ledger | None:
    """The newest of the ledgers that local disks have, without those that cannot be used; None if there is none."""
    found = list[Ledger]()
    for text in filter(None, texts):
        try:
            found.append(parse(paths.MIRROR_RECORD, text.encode()))
        except (DamagedError, FormatError) as error:
            logging.warning("%s: what one disk knows of the mirror is left out: %s", where, error)
    return max(found, key=lambda ledger: ledger.serial, default=None)


def save_id(commits: Commits, epoch: int) -> str | None:
    """The id of the save that an epoch is of, or a copy of; None if it is not there, or its record is damaged."""
    try:
        return commits.read_head(epoch).origin
    except (EpochCheckpointError, NotADirectoryError):
        return None


def is_done(withdrawal: Withdrawal, local: Commits) -> bool:
    """Whether none of the epochs that a withdrawal is of is listed here any more."""
    if not withdrawal.here:
        return True
    listed = set(local.list_epochs())
    return not any(epoch in listed and (save_id(local, epoch) or "") == id for epoch, id in withdrawal.here.items())


class LedgerFile:
    """The ledger of a directory, as the primary of the run that has claimed it writes it.

    Every change goes through the run's claim of its directory, and is a FencedError once a newer run has claimed that.
    """

    def __init__(self, local: Commits, serials: bool):
        """With `serials`, each change is numbered: several disks have copies of the ledger."""
        self._local = local
        self._serials = serials
        self._lock = threading.Lock()  # taken by background threads only

    def read(self) -> Ledger | None:
        """See `read_ledger`."""
        return read_ledger(self._local.store)

    def known(self) -> Ledger:
        """The ledger, where there is one; DamagedError if it has gone."""
        ledger = self.read()
        if ledger is None:
            raise DamagedError(paths.MIRROR_RECORD, "has gone: somebody has removed it from a directory with a mirror")
        return ledger

    def write(self, ledger: Ledger) -> Ledger:
        """Writes the ledger as it is; returns it as it was written."""
        with self._lock:
            return self._write(ledger)

    def change(self, edit: Callable[[Ledger], Ledger]) -> Ledger:
        """Changes the ledger; returns the new one."""
        with self._lock:
            ledger = self.known()
            changed = edit(ledger)
            return ledger if changed == ledger else self._write(changed)

    def check(self) -> None:
        """Raises FencedError if a newer run has claimed the directory."""
        with self._lock:
            self._write(self.known())

    def text(self) -> str:
        """The file's content; empty if there is none."""
        ledger = self.read()
        return "" if ledger is None else ledger.to_bytes().decode()

    def _write(self, ledger: Ledger) -> Ledger:
        if self._serials:
            ledger = dataclasses.replace(ledger, serial=ledger.serial + 1)
        self._local.overwrite(paths.MIRROR_RECORD, ledger.to_bytes())
        return ledger

    def withdraw(self, to: int | None, epochs: Sequence[int], act: Callable[[], None]) -> None:
        """Has the mirror follow what `act` does here: epochs are deleted, or rolled back.

        The ledger says so first. If `act` fails, or the process is killed, what is listed then decides (`is_done`):
        an epoch that is still listed here does not leave the mirror.
        """
        plan = _threads.start(lambda: self._plan(to, epochs)).result() if self._local.store.renames else False
        try:
            act()
        except BaseException:
            if plan:
                _threads.logged("the mirror's ledger", lambda: _threads.start(self.settle).result())
            raise
        if plan:
            _threads.start(self.settle).result()

    def _plan(self, to: int | None, epochs: Sequence[int]) -> bool:
        """Writes the withdrawal, if this directory has a mirror; returns whether it has."""
        ledger = self.read()
        if ledger is None or not epochs:
            return False
        listed = set(self._local.list_epochs())
        here = {epoch: save_id(self._local, epoch) or "" for epoch in epochs if epoch in listed}
        withdrawal = Withdrawal(to=to, epochs=tuple(epochs), here=here)
        self.change(lambda now: dataclasses.replace(now, withdrawals=(*now.withdrawals, withdrawal)))
        return True

    def settle(self) -> None:
        """Drops withdrawals of what was never deleted here; those that remain hold, whatever is saved later."""
        if self.read() is not None:
            self.change(lambda now: dataclasses.replace(now, withdrawals=settled_withdrawals(now, self._local)))


def settled_withdrawals(ledger: Ledger, local: Commits) -> tuple[Withdrawal, ...]:
    """The withdrawals that hold, as such."""
    holding = (each for each in ledger.withdrawals if is_done(each, local))
    return tuple(dataclasses.replace(each, here={}) for each in holding)
