"""How a directory keeps its ledger: once for all processes, or in a copy on the disk of each host.

`layout` chooses the kind together with the form of the directory.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from epochckpt.directory import EpochDirectory
from epochckpt.storage import Store
from epochckpt.tiers import ledger as ledgers
from epochckpt.tiers.ledger import Ledger


class LedgerKind(abc.ABC):
    """What differs between the kinds.

    Attributes:
        has_copies: whether each of the other processes has a copy of the primary's ledger, and is told its changes.
    """

    has_copies: ClassVar[bool]

    @abc.abstractmethod
    def is_own(self, ledger: Ledger, store: Store) -> bool:
        """Whether a ledger that was read in the directory of a store is that directory's own."""

    @abc.abstractmethod
    def numbered(self, ledger: Ledger) -> Ledger:
        """A changed ledger, as it is written."""

    @abc.abstractmethod
    def readable_unanswered(self, readable: Mapping[int, str]) -> Mapping[int, str]:
        """Which of the epochs that the ledger knows count as readable while the mirror does not answer."""


class _OneForAll(LedgerKind):
    """The ledger in a directory that all processes see."""

    has_copies = False

    def is_own(self, ledger: Ledger, store: Store) -> bool:
        """A copied directory has brought the ledger of another directory along."""
        return ledger.identity.is_of(store)

    def numbered(self, ledger: Ledger) -> Ledger:
        return ledger

    def readable_unanswered(self, readable: Mapping[int, str]) -> Mapping[int, str]:
        return readable


class _OnePerDisk(LedgerKind):
    """The ledger on the primary's own disk. Every host keeps a copy of it, so each change is numbered."""

    has_copies = True

    def is_own(self, ledger: Ledger, store: Store) -> bool:
        """The newest of all disks is, whichever wrote it, also on a disk that has replaced another one."""
        del ledger, store
        return True

    def numbered(self, ledger: Ledger) -> Ledger:
        return dataclasses.replace(ledger, serial=ledger.serial + 1)

    def readable_unanswered(self, readable: Mapping[int, str]) -> Mapping[int, str]:
        del readable
        return {}  # the parts that are here cannot be completed


ONE_FOR_ALL: LedgerKind = _OneForAll()
ONE_PER_DISK: LedgerKind = _OnePerDisk()


@dataclasses.dataclass(frozen=True)
class RecordedLedger:
    """The ledger that counts when the primary looks at its mirror.

    Attributes:
        kind: how the directory keeps it.
        read: reads it. None if there is no usable one; raises FormatVersionError or StorageError.
    """

    kind: LedgerKind
    read: Callable[[], Ledger | None]

    @classmethod
    def in_directory(cls, local: EpochDirectory) -> RecordedLedger:
        """The ledger in a directory that all processes see."""
        return cls(kind=ONE_FOR_ALL, read=functools.partial(ledgers.usable_ledger, local.store))

    @classmethod
    def on_disks(cls, texts: Sequence[str], local: EpochDirectory) -> RecordedLedger:
        """The newest of the ledgers that the disks of all hosts have; `local` is the primary's directory."""
        return cls(kind=ONE_PER_DISK, read=functools.partial(ledgers.newest, texts, local.store.root))
