"""The epochs that a process knows: committed, requested, damaged and remote ones, each an `EpochInfo` for policies."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from absl import logging

from epochckpt import _collector
from epochckpt.directory import attached_metrics
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError, FormatVersionError
from epochckpt.saving.auto_interval import SaveIntervalEstimator
from epochckpt.saving.reports import Committed
from epochckpt.saving.run_clock import RunClock
from epochckpt.saving.save import Save
from epochckpt.saving.survey import Survey

_STEP = operator.attrgetter("step")


class EpochInfo:
    """An epoch as policies see it. Its metrics and time are read from storage when a policy asks for them."""

    def __init__(self, step: int, source: EpochSummary | Callable[[int], EpochSummary]):
        """The `source` is what is known of the epoch, or reads it from storage."""
        self.step = step
        self._source = source
        self.attached: Mapping[str, Any] = {}  # metrics that were attached later, by name, as the primary sees them
        self.is_unknown = False  # its metrics were asked for, and only a newer epochckpt can read them

    @classmethod
    def of(cls, save: Save) -> EpochInfo:
        """The info of an epoch that is being saved."""
        request = save.request
        return cls(save.epoch, EpochSummary.unrecorded(metrics=request.metrics, time_ns=request.started_ns))

    def _summary(self) -> EpochSummary:
        """What is known of it, read once. A passing error is raised, and the next look tries again."""
        if not isinstance(self._source, EpochSummary):
            self._source = self._read(self._source)
        return self._source

    def _read(self, read: Callable[[int], EpochSummary]) -> EpochSummary:
        try:
            summary = read(self.step)
            for error in summary.unread.values():
                raise error
            return summary
        except (DamagedError, FormatError, EpochNotFoundError):  # it has no metrics, and never will
            logging.warning("checkpoint %d has no readable record: it counts as one without metrics", self.step)
        except FormatVersionError as error:
            logging.warning("checkpoint %d is kept, and counts as one without metrics: %s", self.step, error)
            self.is_unknown = True
        return EpochSummary.unrecorded(metrics=None, time_ns=0)

    @property
    def metrics(self) -> Any:
        """The metrics it was saved with, and those that were attached to it; None without any."""
        return attached_metrics.merge(self._summary().metrics, {"": self.attached} if self.attached else {})

    @property
    def time(self) -> datetime.datetime:
        """When it was committed (wall clock, UTC)."""
        return datetime.datetime.fromtimestamp(self._summary().committed_ns / 1e9, tz=datetime.UTC)

    @property
    def save_id(self) -> str:
        """Its save id; empty without a readable record."""
        return self._summary().save_id


class Mirrored(Protocol):
    """What the primary knows of the directory's mirror, when it decides which epochs to delete."""

    def waiting(self) -> Collection[int]:
        """Epochs that are to be copied, or are being copied, and must stay until then."""
        ...

    def has(self, epoch: int) -> bool:
        """Whether the mirror has an epoch, as this directory has it."""
        ...

    def pop_removed(self) -> list[int]:
        """Epochs that the mirror has given up since the last call."""
        ...


class History:
    """The epochs that this process knows: committed, damaged, and requested ones.

    `committed` is what `latest_step` and `all_steps` return. `requested` is what `should_save` decides from: it depends
    only on calls that every process makes alike, not on how far the background is. `damaged` epochs are on storage and
    cannot be restored; the next save of their number may replace them. `is_own` are those that this manager has saved
    since its caller last waited for its saves: it depends on the same calls.

    Of the committed epochs, the `remote` ones are only in the mirror. `mirror` is what the primary knows of it. `held`
    gives epochs of which a deletion is under way, or was interrupted: no policy deletes them.

    `load` reads what is known of an epoch; `alone`: no other process makes the same calls.

    Several threads and signal handlers use it without a lock: each change is one operation of a dict, see `_threads`.
    """

    def __init__(
        self,
        load: Callable[[int], EpochSummary],
        alone: bool = True,
        *,
        mirror: Mirrored,
        held: Callable[[], Collection[int]] = frozenset,
    ):
        self._load = load
        self.mirror = mirror
        self.held = held
        self.remote: frozenset[int] = frozenset()
        self._committed: dict[int, EpochInfo] = {}
        self._requested: dict[int, EpochInfo] = {}
        self._own: dict[int, None] = {}
        self._gone: dict[int, None] = {}  # epochs that another run has deleted, and that count as requested so far
        self.damaged: dict[int, ReplaceCondition] = {}
        self.run = RunClock()
        self.pace = SaveIntervalEstimator(alone)

    def reset(self, survey: Survey, known: Collection[int] | None = None) -> None:
        """Starts anew from a look at storage; what is not `known`, as of its beginning, was committed meanwhile."""
        self.damaged = survey.damaged
        self.run.begin_after(survey.runs)
        with _collector.paused():  # of ten thousand epochs there are many objects, which stay
            found = {e: EpochInfo(e, self._load) for e in survey.epochs}  # any may have been replaced
        self._committed.update(found)
        for epoch in self._committed.keys() - found.keys() if known is None else {*known} - found.keys():
            self._committed.pop(epoch, None)
        self.remote = frozenset(survey.remote)
        self.forget_failed()
        self.attach(survey.attached)
        self.pace.reset(survey.costs, survey.runs)

    def adopt(self, epochs: Iterable[int]) -> tuple[list[int], list[int]]:
        """Replaces the committed epochs by those on storage, and in the mirror; returns the new and the lost ones."""
        before = list(self._committed)
        now = {*epochs, *self.remote}
        new = sorted(now.difference(before))
        gone = [e for e in before if e not in now]
        self._committed.update({e: EpochInfo(e, self._load) for e in new})
        for epoch in gone:
            self._committed.pop(epoch, None)
        self._gone.update(dict.fromkeys(gone))
        return new, gone

    def forget_gone(self) -> None:
        """What others have deleted may be requested again; all processes call it at the same point of training."""
        for epoch in list(self._gone):
            self._gone.pop(epoch, None)
            if epoch not in self._committed:
                self._requested.pop(epoch, None)

    def begin(self, epoch: int) -> None:
        """A save of an epoch is about to begin."""
        self._own[epoch] = None

    def settle(self, epoch: int) -> None:
        """The caller has been told what became of its save of an epoch."""
        self._own.pop(epoch, None)

    def is_own(self, epoch: int) -> bool:
        """Whether this manager has begun to save an epoch, and the caller has not waited for the end since."""
        return epoch in self._own

    def fail(self, save: Save) -> None:
        """An epoch was requested, and could not be saved."""
        self._requested[save.epoch] = EpochInfo.of(save)

    def commit(self, commit: Committed) -> None:
        """An epoch was requested, and committed; older epochs may have been deleted for it."""
        epoch = commit.epoch
        info = EpochInfo(epoch, commit.summary)
        self._committed[epoch] = self._requested[epoch] = info
        if commit.attached is not None:
            self.attach(commit.attached)
        self.remote = self.remote - {epoch} | {*commit.remote}
        self.drop(commit.deleted)
        self.damaged.pop(epoch, None)

    def attach(self, metrics: Mapping[int, Mapping[str, Any]]) -> None:
        """Replaces the attached metrics of every epoch; nothing is attached to epochs that are not named."""
        for info in list(self._committed.values()):
            info.attached = metrics.get(info.step, {})

    def attached(self) -> dict[int, Mapping[str, Any]]:
        """The attached metrics by epoch, as far as they are known; epochs without any are left out."""
        return {info.step: info.attached for info in list(self._committed.values()) if info.attached}

    def reject(self, damaged: Mapping[int, ReplaceCondition]) -> None:
        """Epochs have turned out to be damaged, as all processes know."""
        self.damaged.update(damaged)
        self.drop(damaged)

    def forget_damage_after(self, epoch: int) -> None:
        """The damaged epochs after this one are gone, with all others after it."""
        self.damaged = {damaged: found for damaged, found in self.damaged.items() if damaged <= epoch}

    def drop(self, epochs: Iterable[int]) -> None:
        self.remote -= {*epochs}
        for epoch in epochs:
            self._committed.pop(epoch, None)
            self._requested.pop(epoch, None)

    def pop_lost(self) -> list[int]:
        """On the primary: the remote epochs that the mirror has given up since the last call, ascending."""
        return sorted(self.remote.intersection(self.mirror.pop_removed()))

    def forget_failed(self) -> None:
        """Nothing is in flight any more: an epoch that was requested and is not committed may be requested again."""
        self._own.clear()
        self._requested.update(self._committed)
        for epoch in self._requested.keys() - self._committed.keys():
            self._requested.pop(epoch, None)

    def committed(self) -> list[EpochInfo]:
        """Committed epochs, ascending."""
        return sorted(self._committed.values(), key=_STEP)

    def requested(self, in_flight: Iterable[Save]) -> list[EpochInfo]:
        """Requested epochs (committed ones among them), ascending, with those that are being saved."""
        return sorted({**self._requested, **{save.epoch: EpochInfo.of(save) for save in in_flight}}.values(), key=_STEP)

    def is_known(self, epoch: int) -> bool:
        """Whether an epoch exists or could not be saved."""
        return epoch in self._requested
