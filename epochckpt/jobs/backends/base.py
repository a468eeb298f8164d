"""How the runner uses checkpoint managers: one small interface."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.session import Session
from epochckpt.manager import SaveResult

NOTES = "job_runner"  # under this name the runner's notes are in an epoch's custom metadata
BESIDE = "beside"  # in the notes: `save_checkpoints` saved it in a run, as an epoch that the run had not come to

Names = Mapping[str, Sequence[str]]  # the blobs that are checkpointed, by node of this process


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a restore found; the blobs are in the workspaces."""

    epoch: int
    notes: Mapping[str, Any]  # what the runner wrote with the epoch
    names: Names  # the blobs that came back


class CheckpointBackend(abc.ABC):
    """A checkpoint manager, as one run or one call of the runner uses it. Every process makes the same calls.

    The session is the backend's, not the manager's: a run has one backend; what is loaded or saved beside the run in
    another session has another.
    """

    asks_jax = False  # the manager itself asks JAX for its preemption notice, with its steps
    chooses = False  # the manager has its own say about the epoch to resume from, see `choose`
    asks_manager = False  # the manager has its own say about whether storage can be reached, see `accessible`
    per_node = False  # an epoch exists per node; a node that is not checkpointed has no part in it
    handler: Any = None  # the manager's own metadata handler
    handler_calls: Collection[str] = ()  # its methods that the manager calls itself, and the actions that it reports

    def __init__(self, manager: Any, directory: str):
        self._manager, self.directory = manager, directory
        self._ended: list[SaveResult] = []

    @abc.abstractmethod
    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        """All nodes of the job; takes those that the job names. InvalidArgumentError: the manager is one of others."""

    def open(self, session: Session, exchange: Exchange, beside: bool = False) -> None:
        """Called once, before anything but `nodes`.

        With `beside`, a run uses the manager in another session, or has: what it told the manager stays.
        """
        del beside
        self._session, self._exchange = session, exchange

    def handler_nodes(self) -> list[str]:
        """The nodes that a metadata handler is told of: those that are checkpointed."""
        return list(self._session.nodes)

    @abc.abstractmethod
    def epochs(self) -> list[int]:
        """The committed epochs, ascending."""

    def damaged(self) -> list[int]:
        """Epochs that are on storage and cannot be used."""
        return []

    def foreign(self) -> Mapping[int, str]:
        """Folders that have the number of an epoch and hold none, in words, by number."""
        return {}

    def claim(self) -> None:
        """The run begins to write: an older one must not commit anything from here on. All processes call it."""
        return  # nothing to claim where no run fences off another

    def fenced_off(self) -> str:
        """How this process learned that a newer run has taken over; empty as long as it has not."""
        return ""

    def choose(self, named: int | None) -> int | None:
        """The epoch to resume from, for managers that choose; None: from scratch."""
        del named
        return None

    def accessible(self, epoch: int) -> bool:
        """On the primary: whether the manager says that storage can be reached."""
        del epoch
        return True

    @abc.abstractmethod
    def restore(self, epoch: int | None) -> Restored:
        """Restores an epoch into the workspaces; EpochNotFoundError lists the epochs that there are.

        None stands for the newest epoch that a run may go on from, and that every node can read.
        """

    @abc.abstractmethod
    def agree_on_names(self, names: Names) -> None:
        """Looks at the blobs that are to be checkpointed, on all nodes together.

        Raises:
            InvalidArgumentError: one cannot be checkpointed.
        """

    @abc.abstractmethod
    def prepare(self, epoch: int, names: Names) -> Any:
        """Takes from the workspaces what `save` is to be given; makes no exchange.

        Raises:
            InvalidArgumentError: a blob is gone, or cannot be saved.
        """

    @abc.abstractmethod
    def save(self, epoch: int, prepared: Any, metrics: Any, notes: Mapping[str, Any], force: bool) -> bool:
        """Begins a save; returns whether it did."""

    def outcomes(self) -> list[SaveResult]:
        """The saves that have ended since the last call, as this process knows."""
        ended, self._ended = self._ended, []
        return ended

    @abc.abstractmethod
    def drain(self) -> None:
        """Waits until no save is in flight; failures show in `outcomes`."""

    def discarded(self, epoch: int) -> bool:
        """On the primary: whether an epoch was saved and then deleted at once, because the manager's options say so."""
        del epoch
        return False

    @abc.abstractmethod
    def roll_back(self, epoch: int) -> None:
        """Makes an earlier epoch the latest, durably; UnsupportedError if the manager cannot do that."""

    @abc.abstractmethod
    def allow_overwrite(self, epoch: int) -> None:
        """The next save of this epoch, which exists, replaces it."""

    @abc.abstractmethod
    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        """Loads single blobs of an epoch into the workspaces; False if the epoch is not there."""

    def _kinds_of(self, names: Names) -> dict[str, str]:
        """The kind of each blob of this process; InvalidArgumentError if one cannot be checkpointed."""
        return {
            name: blob_lib.kind_of(node, name, self._session.workspace(node)[name])
            for node, blobs in names.items()
            for name in blobs
        }
