"""The mirror as a manager knows it, on each process: `JobMirror`, and `NoMirror` for a directory that has none."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from epochckpt.agreement import Coordinator
from epochckpt.directory import EpochDirectory
from epochckpt.saving.survey import Survey
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import RecordedLedger


@dataclasses.dataclass(frozen=True, kw_only=True)
class MirroredDirectory:
    """A directory that this run has claimed, as its mirror sees it.

    Attributes:
        local: the directory.
        ledger: what the directory knows of its mirror.
        coordinator: how the processes of the job reach each other.
        prefix: of the keys of this manager.
        epochs: the committed ones.
    """

    local: EpochDirectory
    ledger: LedgerFile
    coordinator: Coordinator
    prefix: str
    epochs: Sequence[int]


class JobMirror(abc.ABC):
    """The mirror of one manager's directory, on one process.

    The calls come in this order: `take_nodes`, `complete` on the primary, `learn` on the others, `claimed` on every
    process, then `committed`, `withdrawn` and the questions of a run, and `close` or `stop`.
    """

    # -- opening -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def take_nodes(self, hosted: Sequence[str]) -> None:
        """Says which nodes this process hosts, once that is known, and when they are renamed."""

    @abc.abstractmethod
    def complete(self, local: EpochDirectory, survey: Survey, recorded: RecordedLedger) -> Survey:
        """On the primary: the survey of the directory, with the epochs that the mirror has.

        `recorded` is what the directory, or the disks of all hosts, have recorded of it.

        Raises:
            StorageError, DamagedError, …: the mirror cannot be looked at, and there is nothing here to go on with.
            InvalidArgumentError: the mirror has the epochs of another directory.
        """

    @abc.abstractmethod
    def learn(self, copies: Mapping[int, str]) -> None:
        """On the other processes: the ids of the copies that stand for epochs which are not here."""

    @abc.abstractmethod
    def claimed(self, directory: MirroredDirectory) -> None:
        """On every process, when the directory is claimed: begins to work."""

    # -- what a run tells ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def committed(self, epoch: int) -> None:
        """An epoch was committed here."""

    @abc.abstractmethod
    def withdrawn(self, epochs: Sequence[int], ledger: LedgerFile) -> None:
        """On the primary: epochs were deleted here, or rolled back. The ledger says which ones the mirror gives up."""

    @abc.abstractmethod
    def stop(self, timeout_secs: float) -> None:
        """Ends the work in the background, and waits for the step that is being done, at most so long."""

    @abc.abstractmethod
    def close(self, timeout_secs: float) -> None:
        """Waits until the newest epoch is mirrored, at most so long; then looks what is not, as long, and logs it."""

    @abc.abstractmethod
    def longest_close_secs(self, timeout_secs: float) -> float:
        """How long `close` may take with this timeout."""

    # -- what a run asks -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def copy_of(self, epoch: int, epoch_directory: EpochDirectory) -> EpochDirectory | None:
        """Where a copy of the epoch that `epoch_directory` has, or has lost, can be read; None if there is none.

        Any process may ask, at any time; storage is looked at.
        """

    @abc.abstractmethod
    def readable(self) -> Mapping[int, str]:
        """The ids of those of its epochs that are part of the directory's history, as of the last look."""

    @abc.abstractmethod
    def diverged(self) -> Mapping[int, str | None]:
        """The save ids of epochs here that are no part of its history, as of the last look before the claim."""

    @abc.abstractmethod
    def has(self, epoch: int) -> bool:
        """Whether the mirror has an epoch, as this directory has it."""

    @abc.abstractmethod
    def waiting(self) -> Collection[int]:
        """On the primary: epochs that are to be copied, or are being copied, and must stay until then."""

    @abc.abstractmethod
    def pop_removed(self) -> list[int]:
        """On the primary: epochs that the mirror has given up since the last call."""

    @abc.abstractmethod
    def pin(self, epoch: int | None) -> bool:
        """On the primary: has one epoch, to which the run goes back, stay in the mirror; False if it is not there."""


class NoMirror(JobMirror):
    """There is no mirror: epochs are in the directory only, and nothing is done in the background."""

    def take_nodes(self, hosted: Sequence[str]) -> None:
        del hosted

    def complete(self, local: EpochDirectory, survey: Survey, recorded: RecordedLedger) -> Survey:
        del local, recorded
        return survey

    def learn(self, copies: Mapping[int, str]) -> None:
        del copies

    def claimed(self, directory: MirroredDirectory) -> None:
        del directory

    def committed(self, epoch: int) -> None:
        del epoch

    def withdrawn(self, epochs: Sequence[int], ledger: LedgerFile) -> None:
        del epochs, ledger

    def stop(self, timeout_secs: float) -> None:
        del timeout_secs

    def close(self, timeout_secs: float) -> None:
        del timeout_secs

    def longest_close_secs(self, timeout_secs: float) -> float:
        del timeout_secs
        return 0.0

    def copy_of(self, epoch: int, epoch_directory: EpochDirectory) -> None:
        del epoch, epoch_directory

    def readable(self) -> Mapping[int, str]:
        return {}

    def diverged(self) -> Mapping[int, str | None]:
        return {}

    def has(self, epoch: int) -> bool:
        del epoch
        return False

    def waiting(self) -> Collection[int]:
        return ()

    def pop_removed(self) -> list[int]:
        return []

    def pin(self, epoch: int | None) -> bool:
        del epoch
        return False


NO_MIRROR = NoMirror()
