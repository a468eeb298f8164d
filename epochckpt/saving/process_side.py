"""What a process does in every save beside writing its nodes: `Primary` on one process, `Follower` on all others.

The calls of a save, in order; `SaveQueue` makes them in the background:

1. `begin`: there is a place to write to. The primary claims the directory before its first save, and the others learn
   of that claim;
2. `report`: the nodes of this process are durable, or it knows why they are not. It is the last act of a process on
   what is staged, because the primary may commit after it;
3. `conclude`: the verdict. The primary collects the reports, commits, and publishes the verdict, which the others
   await;
4. `remove_staged`, if the save has failed.

A save is called `<epoch>-<number>` on every process, because all processes make the same calls. Its keys lie below the
prefix that the processes agreed on when they opened the directory, so that a relaunched job never meets an old one:
`report/<save>/<process>`, the primary's `verdict/<save>/0` and, until every process has reported once, the primary's
`claim/<save>`. The first save of the other processes waits for the claim, later saves for no process.
"""

from __future__ import annotations

import abc
import dataclasses
import functools

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging

from epochckpt import _threads, errors
from epochckpt._threads import Deadline, Lane, Pool
from epochckpt.directory.epoch_directory import Staging
from epochckpt.format import Nodes
from epochckpt.options import StorageOptions
from epochckpt.saving import retention
from epochckpt.saving.claiming import Claim
from epochckpt.saving.history import History
from epochckpt.saving.in_flight import InFlight
from epochckpt.saving.job_directory import JobDirectory
from epochckpt.saving.lags import Lags
from epochckpt.saving.reports import Committed, ProcessReport
from epochckpt.saving.save import Phase, Save


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveContext:
    """What the saves of one manager work with on one process."""

    directory: JobDirectory
    prefix: str  # of the keys of its saves
    claim: Claim
    options: StorageOptions
    history: History
    policies: ocp.CheckpointManagerOptions  # they say which epochs of the history each commit deletes
    in_flight: InFlight
    commit_lane: Lane
    pool: Pool


class ProcessSide(abc.ABC):
    """What one process does in the saves of one manager, beside writing its nodes."""

    _bound_secs: float  # how long a save may take for this process
    _awaited_key: str  # kind of the keys by which other processes answer a save

    def __init__(self, context: SaveContext, nodes: Nodes):
        self.nodes = nodes
        self._directory = context.directory
        self._epoch_directory = context.directory.epoch_directory
        self._coordinator = context.directory.coordinator
        self._prefix = context.prefix
        self._claim = context.claim
        self._options = context.options
        self._history = context.history
        self._policies = context.policies
        self._in_flight = context.in_flight
        self._commit_lane = context.commit_lane
        self._undeleted: set[int] = set()  # older epochs that are still there, as was reported; the commit lane's own
        self.lags = Lags(context.options.save_timeout_secs, self._has_answered)

    def name_nodes(self, nodes: Nodes) -> None:
        """Gives the nodes of the job other names, before the first save."""
        self.nodes = nodes

    @abc.abstractmethod
    def begin(self, save: Save) -> None:
        """Makes the place to write to. The write lane calls it."""

    @abc.abstractmethod
    def report(self, save: Save, report: ProcessReport) -> None:
        """Reports what this process has written; raises SaveError if the save has been given up here."""

    @abc.abstractmethod
    def conclude(self, save: Save, error: Exception | None) -> Committed:
        """Waits for the verdict; `error` is why this process has not written its nodes. Raises why the save failed.

        The commit lane calls it.
        """

    @abc.abstractmethod
    def follow_commit(self, save: Save, commit: Committed) -> None:
        """Does what a commit asks of this process, once it is in the history."""

    def deadline(self) -> Deadline:
        """The time that a save has from now on."""
        return Deadline(self._bound_secs)

    def save_id(self, save: Save) -> str:
        """The id of a save, which no other save of any run has."""
        return f"{self._directory.incarnation}-{save.name}"

    def staging(self, save: Save) -> Staging:
        """Where the nodes of a save write."""
        return self._directory.stager.staging(save.epoch, self.save_id(save))

    def _key(self, kind: str, save: Save) -> str:
        return f"{self._prefix}/{kind}/{save.name}"

    def _has_answered(self, save: Save, process: int) -> bool:
        return self._coordinator.peek(f"{self._key(self._awaited_key, save)}/{process}") is not None

    def give_time(self, save: Save, lag: float) -> bool:
        """Gives a save more time, for processes that are behind; returns whether it has more than before."""
        return save.extend(self._bound_secs, lag)

    def _enter_commit(self, save: Save) -> None:
        """From here on this process may not give a save up; raises SaveError if it has done so already."""
        if not save.advance(Phase.COMMITTING):
            raise errors.SaveError(save.epoch, f"{self.nodes.hosted_names[0]} has given it up")

    def take_back(self, save: Save, failure: BaseException) -> BaseException:
        """Takes a failed save out of sight where it may be in place already; returns why the save has failed."""
        return self._directory.take_back(save, self.save_id(save), failure)

    def remove_staged(self, save: Save, failure: BaseException) -> None:
        """Removes what is staged of a failed save, where this process acts; an epoch that may exist keeps its data."""
        if self._directory.acts and self._claim.known and not isinstance(failure, errors.UncertainError):
            discard = functools.partial(self._directory.writer.discard, self.staging(save))
            # Later: where storage is away it takes long, and the failure is known now.
            self._commit_lane.submit(lambda: _threads.logged("the remains of a save stay", discard))

    def _delete_old(self, save: Save, commit: Committed, kind: type[errors.RemovalError]) -> Committed:
        """Takes the epochs that a commit deletes out of sight here; returns the commit without those that stay.

        Each that stays is reported once, by an error of this `kind`.
        """
        into = self._policies.todelete_subdir
        kept: list[int] = []
        try:
            here = self._directory.here(commit.hides)
        except Exception as error:  # all of them stay
            for epoch in commit.hides:
                self._note_undeleted(epoch, error, kind)
            return commit.keeping(commit.hides)
        for epoch in here:
            try:
                save.remove_later(retention.unlist(self._directory.writer, epoch, into))
            except errors.UnfinishedError as error:  # no reader sees it any more
                logging.warning("an older epoch could not be removed: %s", errors.say(error))
            except Exception as error:
                kept.append(epoch)
                self._note_undeleted(epoch, error, kind)
                continue
            self._undeleted.discard(epoch)
        return commit.keeping(kept)

    def _note_undeleted(self, epoch: int, error: Exception, kind: type[errors.RemovalError]) -> None:
        self._claim.note(error)
        if epoch not in self._undeleted and not isinstance(error, errors.FencedError):
            failure = kind(self._epoch_directory.store.root, epoch, errors.say(error))
            failure.__cause__ = errors.kept(error)
            logging.error("%s", failure)
            self._in_flight.note_failure(failure)
        self._undeleted.add(epoch)
