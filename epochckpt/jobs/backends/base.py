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
    """What a restore found; the blobs are in the workspaces.

    Attributes:
        epoch: its number.
        notes: what the runner wrote with it.
        names: the blobs that came back, by node of this process.
    """

    epoch: int
    notes: Mapping[str, Any]
    names: Names


class CheckpointBackend(abc.ABC):
    """A checkpoint manager, as one run or one call of the runner uses it. Every process makes the same calls.

    The session is the backend's, not the manager's: a run has one backend; what is loaded or saved beside the run in
    another session has another.

    Attributes:
        asks_jax: the manager itself asks JAX for its preemption notice, with its steps.
        chooses: the manager has its own say about the epoch to resume from, see `choose`.
        asks_manager: the manager has its own say about whether storage can be reached, see `accessible`.
        per_node: an epoch exists per node; a node that is not checkpointed has no part in it.
        handler: the manager's own metadata handler, or None.
        handler_calls: the methods of its handler that the manager calls itself, and the actions that it reports.
        directory: for messages.
    """

    asks_jax = False
    chooses = False
    asks_manager = False
    per_node = False
    handler: Any = None
    handler_calls: Collection[str] = ()
    directory = ""

    @abc.abstractmethod
    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        """The nodes of the job, all of them; takes those that the job names, if it names any.

        Raises:
            InvalidArgumentError: the manager is one of other nodes.
        """

    def open(self, session: Session, exchange: Exchange, beside: bool = False) -> None:
        """Called once, before anything but `nodes`.

        Args:
            session: whose workspaces are saved and restored.
            exchange: the other processes.
            beside: a run uses the manager in another session, or has; what it told the manager stays.
        """
        del beside
        self._session, self._exchange = session, exchange

    def handler_nodes(self, session: Session) -> list[str]:
        """The nodes that a metadata handler is told of: those that are checkpointed."""
        return list(session.nodes)

    @abc.abstractmethod
    def epochs(self) -> list[int]:
        """The committed epochs, ascending."""

    def damaged(self) -> list[int]:
        """Epochs that are on storage and cannot be used."""
        return []

    def foreign(self) -> Mapping[int, str]:
        """What lies under the number of an epoch and is none, in words, by number."""
        return {}

    def claim(self) -> None:
        """The run begins to write: an older one must not commit anything from here on. All processes call it.

        Raises:
            AccessError: nothing can be written.
        """
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
        """Restores an epoch into the workspaces; None: the newest that a run may go on from, and every node can read.

        Raises:
            EpochNotFoundError: there is no such epoch; lists those that there are.
        """

    @abc.abstractmethod
    def prepare(self, epoch: int, names: Names) -> Any:
        """What `save` is to be given, taken from the workspaces; talks to nobody.

        Raises:
            InvalidArgumentError: a blob is gone, or cannot be saved.
        """

    @abc.abstractmethod
    def save(self, epoch: int, prepared: Any, metrics: Any, notes: Mapping[str, Any], force: bool) -> bool:
        """Begins a save; returns whether it did."""

    @abc.abstractmethod
    def outcomes(self) -> list[SaveResult]:
        """Saves that have ended since the last call, as this process knows."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Waits until no save is in flight; failures show in `outcomes`."""

    def discarded(self, epoch: int) -> bool:
        """On the primary: whether an epoch was saved and then deleted at once, because the manager's options say so."""
        del epoch
        return False

    @abc.abstractmethod
    def roll_back(self, epoch: int) -> None:
        """Makes an earlier epoch the latest, durably.

        Raises:
            EpochNotFoundError: there is no such epoch.
            UnsupportedError: the manager cannot do that.
        """

    @abc.abstractmethod
    def allow_overwrite(self, epoch: int) -> None:
        """The next save of this epoch, which exists, replaces it."""

    @abc.abstractmethod
    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        """Loads single blobs of an epoch into the workspaces; False if the epoch is not there."""

    @abc.abstractmethod
    def agree_on_names(self, session: Session, exchange: Exchange, names: Names) -> None:
        """Looks at the blobs that are to be checkpointed, on all nodes together.

        Raises:
            InvalidArgumentError: one cannot be checkpointed.
        """


def check_blobs(session: Session, names: Names) -> dict[str, str]:
    """The kind of each blob of this process.

    Raises:
        InvalidArgumentError: one cannot be checkpointed.
    """
    return {
        name: blob_lib.kind_of(node, name, session.workspace(node)[name])
        for node, blobs in names.items()
        for name in blobs
    }
