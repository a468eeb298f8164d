"""What a look at a mirror finds, whether the run that looks ever claims it or not. Nothing is written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from absl import logging

from epochckpt.directory import EpochDirectory
from epochckpt.directory.lineage import Lineage
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    UnsupportedError,
    say,
    unreadable,
)
from epochckpt.storage import Store
from epochckpt.tiers.ledger import Copy, Ledger, save_id, seen_id, settled_withdrawals
from epochckpt.tiers.ledger_kinds import RecordedLedger
from epochckpt.tiers.standing import ForeignReader, Owner, Standing, Stranger, Successor, Unanswered, assess

_NO_ANSWER = (DamagedError, FormatError, FormatVersionError, NotACheckpointDirectoryError, OSError)


@dataclasses.dataclass(frozen=True)
class MirrorLook:
    """What a look at the mirror has found.

    Attributes:
        standing: of the directory towards the mirror.
        ids: the ids of the mirror's epochs.
        readable: the ids of those that are part of the directory's history.
        ledger: of this directory.
        copies: of the ledger here, even if copied along.
        diverged: the save ids of epochs here that are no part of the mirror's history, as of the last look that has
            told.
        known_url: of the mirror that the directory has recorded; empty if there is none.
    """

    standing: Standing
    ids: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    readable: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    ledger: Ledger | None = None
    copies: Mapping[int, Copy] = dataclasses.field(default_factory=dict[int, Copy])
    diverged: Mapping[int, str | None] = dataclasses.field(default_factory=dict[int, str | None])
    known_url: str = ""


NO_LOOK = MirrorLook(Unanswered(UnsupportedError("nobody has looked")))


class Looker:
    """Looks at one mirror."""

    def __init__(self, url: str, there: EpochDirectory):
        self._url = url
        self._there = there

    def look(
        self, local: EpochDirectory, epochs: Sequence[int], recorded: RecordedLedger, earlier: MirrorLook
    ) -> MirrorLook:
        """Asks the mirror which epochs it has, for a directory that has these `epochs`.

        What an `earlier` look has found to have diverged stays out of sight.

        Raises:
            UnsupportedError, InvalidArgumentError: the directory cannot have this mirror.
            StorageError, DamagedError, …: the mirror cannot be looked at, and there is nothing here to go on with.
        """
        self._check_apart(local.store)
        root = local.store.root
        found = recorded.read()
        ledger = None if found is None else found.at(self._url)
        if found is not None and found.url != self._url:
            logging.warning("%s: its mirror was %s, and is %s from now on", root, found.url, self._url)
        copies: Mapping[int, Copy] = {} if ledger is None else ledger.copies
        own = ledger if ledger is not None and recorded.kind.is_own(ledger, local.store) else None
        here = sorted(epochs)
        try:
            lineage, ids = self._lineage_and_epochs()
            if found is not None and self._url in found.former and ids:
                raise InvalidArgumentError(
                    f"mirror={self._url} was the mirror of {root} before, and has missed what was deleted and rolled "
                    "back here since. Choose an empty mirror, or remove the epochs of that one"
                )
            standing = assess(own, here, lineage, ids, lambda epoch: self.is_of_save(local, epoch, ids, copies))
        except _NO_ANSWER as error:
            if not here:
                raise self._refusal(error) from error
            text = "%s: its mirror %s does not answer, so that epochs which only the mirror has cannot be read: %s"
            logging.warning(text, root, self._url, say(error))
            standing = Unanswered(error)
            ids = {epoch: copy.mirror_id for epoch, copy in copies.items()}
        diverged = earlier.diverged  # that look has hidden them, and they stay so
        if isinstance(standing, Successor):
            diverged = {epoch: save_id(local, epoch) for epoch in standing.diverged}
        look = MirrorLook(
            standing=standing,
            ids=ids,
            ledger=own,
            copies=copies,
            diverged=diverged,
            known_url="" if found is None else found.url,
        )
        readable = _history(look, local, ledger if isinstance(standing, ForeignReader) else own)
        return dataclasses.replace(look, readable=readable)

    def explain(self, look: MirrorLook, root: str) -> None:
        """Logs what a look means for the directory; raises InvalidArgumentError for a stranger's mirror."""
        match look.standing:
            case Stranger():
                there = look.ids
                problem = (
                    f"mirror={self._url} holds {len(there)} epochs, the newest is {max(there, default=None)}, and none "
                    f"of them is one of the epochs in {root}. Choose an empty mirror for this directory, or open an "
                    "empty directory to go on from the mirror"
                )
                if look.known_url != self._url:
                    raise InvalidArgumentError(problem)
                logging.error("%s. Nothing is read from it or written to it", problem)
            case ForeignReader(common=common):
                text = (
                    "%s: its mirror %s belongs to another directory. Epochs up to %d, which both have, are read from "
                    "there, and nothing is written to it. A copy of a directory needs a mirror of its own; an empty "
                    "directory goes on from a mirror"
                )
                logging.warning(text, root, self._url, common)
            case Successor(diverged=gone) if gone:
                text = (
                    "%s: another directory has gone on in its mirror %s since this one wrote there. The run goes on "
                    "from the mirror; checkpoint %s of this directory is no part of that history, and is not used"
                )
                logging.warning(text, root, self._url, ", ".join(map(str, gone)))
            case _:
                pass

    def is_of_save(self, local: EpochDirectory, epoch: int, ids: Mapping[int, str], copies: Mapping[int, Copy]) -> bool:
        """Whether the mirror's epoch of a number is of the same save as the one here, as far as that can be read.

        The mirror has these `ids`, and the ledger here these `copies`.
        """
        copied = copies[epoch].save_id if is_listed(epoch, ids, copies) else ""
        here = save_id(local, epoch)
        if here is None:
            return bool(copied)
        return here == (copied or save_id(self._there, epoch))

    def _check_apart(self, local: Store) -> None:
        """Refuses a directory that cannot have this mirror."""
        if not local.atomic_folder_rename:
            problem = f"only a directory on a file system has a mirror, not {local.root}"
            raise UnsupportedError(f"mirror={self._url}: {problem}")
        there = self._there.store
        same = there.root.rstrip("/") == local.root.rstrip("/")
        if not same:
            with contextlib.suppress(OSError):  # not to be looked at: a write there will fail
                same = there.root_id() == local.root_id() != ()
        if same:
            raise InvalidArgumentError(f"mirror={self._url} is the directory itself ({local.root}); choose another")

    def _refusal(self, error: Exception) -> Exception:
        """The error for a mirror that cannot be looked at, where there is nothing else to go on with."""
        if isinstance(error, EpochCheckpointError):
            return error
        return unreadable(self._url, error) if isinstance(error, OSError) else error

    def _lineage_and_epochs(self) -> tuple[Lineage | None, dict[int, str]]:
        """The lineage of the mirror, and the ids of its epochs, as they are now."""
        lineage = self._there.lineage()
        while True:
            epochs = self._there.list_epochs()
            found = {epoch: seen_id(self._there, epoch) for epoch in epochs}
            now = self._there.lineage()
            if now == lineage:
                return lineage, found
            lineage = now  # it was claimed meanwhile, and may have other epochs


def _history(look: MirrorLook, local: EpochDirectory, ledger: Ledger | None) -> dict[int, str]:
    """Those of the mirror's epochs that are part of this directory's history."""
    ids = look.ids
    match look.standing:
        case Owner() | Unanswered():
            hidden = frozenset[int]() if ledger is None else _withdrawn(ledger, local)
        case Successor() as standing:
            unchanged = ledger is not None and is_unchanged(standing, ledger, ids)
            hidden = _withdrawn(ledger, local) if ledger is not None and unchanged else frozenset()
        case ForeignReader(common=common):
            # A copy of a directory has brought a ledger along. The epochs that it knows are of a common history.
            known = {epoch for epoch in ids if is_listed(epoch, ids, look.copies) and epoch <= common}
            hidden = frozenset(ids.keys() - known) | (frozenset() if ledger is None else ledger.hidden)
        case Stranger():
            hidden = frozenset(ids)
    return {epoch: mirror_id for epoch, mirror_id in ids.items() if epoch not in hidden}


def _withdrawn(ledger: Ledger, local: EpochDirectory) -> frozenset[int]:
    """The epochs that were deleted or rolled back here, and no longer count."""
    return dataclasses.replace(ledger, withdrawals=settled_withdrawals(ledger, local)).hidden


def is_listed(epoch: int, ids: Mapping[int, str], copies: Mapping[int, Copy]) -> bool:
    """Whether a ledger with these `copies` lists the mirror's epoch, by the `ids` that the mirror has."""
    copy = copies.get(epoch)
    return copy is not None and copy.mirror_id == ids.get(epoch)


def is_unchanged(standing: Successor, ledger: Ledger, ids: Mapping[int, str]) -> bool:
    """Whether the mirror, which has these `ids`, has exactly the copies that the ledger lists, and nothing diverged.

    If something has, the mirror's history counts, and nothing that was withdrawn here.
    """
    return not standing.diverged and {epoch: copy.mirror_id for epoch, copy in ledger.copies.items()} == ids
