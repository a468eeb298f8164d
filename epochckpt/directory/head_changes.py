"""How the head of a bucket changes: each change is a value, and `apply` gives the head after it, without any storage.

`head_object.HeadObject.write` writes a change with compare-and-swap. It applies the same value again to each newer head
that it meets, so `apply` answers three questions, in this order:

1. Does this head say it already? Then it returns None. A change whose answer was lost is found in this way.
2. May this run still change the head? Else it raises FencedError.
3. Does something else forbid it? Then it raises what the caller is told.

| change | made by | what it does |
| --- | --- | --- |
| `ClaimHead` | a claim | makes a run the newest; what older runs have begun is dead |
| `BeginSave` | a save | names an attempt, whose objects are then kept |
| `PublishEpoch` | a save | makes an attempt the epoch; the commit |
| `GiveUp` | a save that failed, `gc` | attempts can never be committed any more |
| `UnlistEpochs` | delete, retention, rollback, quarantine | epochs do not count any more |
| `AttachMetrics` | an evaluator | metrics of committed epochs |
| `KeepDeleted` | a copy of a directory | metrics of epochs that were deleted elsewhere |
| `FinishStepRemoval` | whoever removed a step of stock Orbax | nothing of the step is left |
| `Release` | a run at its end | it writes no more |
| `TakeIn` | `repair` | names epochs that lie in the bucket |
| `RemoveKeptSteps`, `ForgetKept`, `ForgetDead`, `Refresh` | `gc` | what it has removed, or is about to |
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from epochckpt.directory import attached_metrics
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head, RemovedStep
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage
from epochckpt.directory.metrics_log import Line
from epochckpt.errors import EpochExistsError, FencedError, InvalidArgumentError, SaveError
from epochckpt.format import paths
from epochckpt.orbax import StepNames


@dataclasses.dataclass(frozen=True)
class Incarnation:
    """One run's claim to the directory of a head.

    Attributes:
        root: the URL of the directory, for messages.
        id: the incarnation.
    """

    root: str
    id: str

    def check(self, head: Head, epoch: int) -> None:
        """Raises FencedError, which names `epoch`, if another run has claimed the directory by now."""
        if head.incarnation == self.id:
            return
        newest = int(head.incarnation[:8])
        own = int(self.id[:8])
        raise FencedError(
            epoch,
            f"a newer run (incarnation {newest}, this is {own}) has taken over {self.root}; this process can no "
            "longer save there",
        )


class HeadChange(abc.ABC):
    """One change of the head."""

    @abc.abstractmethod
    def apply(self, head: Head) -> Head | None:
        """The head after the change; None if this one says it already. Raises what forbids the change."""

    def along_with(self, waiting: Sequence[Attachment]) -> HeadChange:
        """The change together with those attachments of this process that wait for their turn, where it takes them."""
        del waiting
        return self


# -- a run -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimHead(HeadChange):
    """Makes a run the newest: nothing that an earlier one has begun can be committed any more.

    Attributes:
        owner: the process that claims, see `owners.current`.
        lineage: what becomes of the lineage of a mirror.
        beside: folders named like epochs that the head did not name when it was read, see `bucket_listing.folders`.
        stock: those of them that are steps of stock Orbax.
    """

    owner: Mapping[str, Any]
    lineage: ClaimLineage | ClaimDirectly
    beside: Mapping[str, Collection[str] | None]
    stock: Mapping[str, EpochSummary]

    def apply(self, head: Head) -> Head:
        """The head of the new run; FencedError if the lineage is not the expected one."""
        lineage = self.lineage.apply(head.lineage)
        removed_steps = {folder: step for folder, step in head.removed_steps.items() if folder not in self.stock}
        unnamed = self.beside.keys() - self.stock.keys() - removed_steps.keys()
        foreign = sorted(folder for folder in unnamed if self.beside[folder] is None)
        claimed = head.claimed(self.owner, tuple(foreign))
        strays = {save_id: folder for folder, save_ids in self.beside.items() for save_id in save_ids or ()}
        return claimed.next(
            lineage=lineage,
            stock=dict(self.stock),
            removed_steps=removed_steps,
            dead={**claimed.dead, **strays},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release(HeadChange):
    """A run says that it writes no more."""

    incarnation: Incarnation

    def apply(self, head: Head) -> Head | None:
        if head.closed:
            return None
        self.incarnation.check(head, 0)
        return head.next(closed=True)


# -- a save ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginSave(HeadChange):
    """Names an attempt at an epoch: until it is committed or given up, its objects are kept."""

    incarnation: Incarnation
    epoch: int
    folder: str
    save_id: str

    def apply(self, head: Head) -> Head | None:
        is_free = self.folder not in head.removed_steps
        if is_free and self.save_id in head.begun:
            return None
        self.incarnation.check(head, self.epoch)
        if not is_free:
            where = f"{self.incarnation.root}/{self.folder}"
            raise SaveError(self.epoch, f"{where}: a deleted step of stock Orbax is not gone yet")
        return head.next(begun={**head.begun, self.save_id: self.folder})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishEpoch(HeadChange):
    """Makes an attempt the epoch of its folder. This is the commit.

    Attributes:
        entry: what the head says of the epoch from then on; it names the attempt.
        may_replace: the attempts that give way: no attempt, the named attempt, or whatever is there (None).
        kept_in: the folder of the directory that keeps what gives way; None: it is removed.
    """

    incarnation: Incarnation
    epoch: int
    folder: str
    entry: EpochSummary
    may_replace: frozenset[str] | None = frozenset()
    kept_in: str | None = None

    def apply(self, head: Head) -> Head | None:
        save_id = self.entry.save_id
        present = head.listed.get(self.folder)
        if present is not None and present.save_id == save_id:
            return None
        self.incarnation.check(head, self.epoch)
        if save_id not in head.begun:
            problem = "its attempt was given up or taken over meanwhile"
            raise SaveError(self.epoch, f"{self.incarnation.root}: {problem}")
        if present is not None and self.may_replace is not None and present.save_id not in self.may_replace:
            where = f"{self.incarnation.root}/{self.folder}"
            raise SaveError(self.epoch, f"{where} exists already; delete() or rollback_to() make room")
        begun = {other: folder for other, folder in head.begun.items() if other != save_id}
        after = head.next(begun=begun)
        if present is not None:
            after = after.unlisting(self.folder, self.kept_in)
        return after.next(epochs={**after.epochs, self.folder: self.entry})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GiveUp(HeadChange):
    """Attempts that are not committed yet can never be committed any more: their objects may be removed.

    Attributes:
        incarnation: the run that gives up an attempt of its own; None: any process may do it.
    """

    incarnation: Incarnation | None
    save_ids: frozenset[str]
    epoch: int = 0

    def apply(self, head: Head) -> Head | None:
        given_up = {save_id: folder for save_id, folder in head.begun.items() if save_id in self.save_ids}
        if not given_up:
            return None
        if self.incarnation is not None:
            self.incarnation.check(head, self.epoch)
        begun = {save_id: folder for save_id, folder in head.begun.items() if save_id not in given_up}
        return head.next(begun=begun, dead={**head.dead, **given_up})


# -- epochs that go --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LogDeleted:
    """What a deletion adds to the log of deleted epochs: their metrics; where the newest go, that the run goes back.

    Attributes:
        large: metrics that the head does not have, because they are large, by attempt.
    """

    names: StepNames
    large: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def lines(self, head: Head, folders: Collection[str]) -> tuple[Line, ...]:
        """The lines, before the epochs of these folders go."""
        last = self._last_of_others(head, folders)
        lines = list[Line]()
        newest_go = False
        for folder in folders:
            epoch = self.names.parse(folder) or 0
            if epoch > last:
                newest_go = True
                continue
            entry = head.listed[folder]
            own = self.large.get(entry.save_id) if entry.large else entry.metrics
            line = Line.of(epoch, entry.save_id, entry.committed_ns, attached_metrics.merge(own, entry.attached))
            if line is not None:
                lines.append(line)
        return (*lines, *(head.back_to(last) if newest_go else ()))

    def needs_metrics(self, head: Head, folder: str) -> bool:
        """Whether `large` must have the metrics of an epoch that goes alone."""
        entry = head.listed.get(folder)
        if entry is None or not entry.large:
            return False
        return (self.names.parse(folder) or 0) <= self._last_of_others(head, [folder])

    def _last_of_others(self, head: Head, folders: Collection[str]) -> int:
        going = {self.names.parse(folder) for folder in folders}
        numbers = [self.names.parse(folder) for folder in head.listed]
        return max((number for number in numbers if number is not None and number not in going), default=-1)


@dataclasses.dataclass(frozen=True)
class LogGoneBack:
    """What a rollback adds to the log of deleted epochs: that the run goes back to an epoch."""

    to: int

    def lines(self, head: Head, folders: Collection[str]) -> tuple[Line, ...]:
        """The same as `LogDeleted.lines`."""
        del folders
        return head.back_to(self.to)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlistEpochs(HeadChange):
    """Epochs do not count any more. Their objects are kept, or are dead and may be removed.

    Attributes:
        epoch: the epoch that errors name.
        folders: of the epochs.
        kept_in: the folder of the directory that keeps them; None: they are removed.
        occupied: the folders of epochs that lie in `kept_in` already.
        log: what the log of deleted epochs gets; None: nothing.
    """

    incarnation: Incarnation
    epoch: int
    folders: tuple[str, ...]
    kept_in: str | None = None
    occupied: frozenset[str] = frozenset()
    log: LogDeleted | LogGoneBack | None = None

    def apply(self, head: Head) -> Head | None:
        gone = self.gone(head)
        if not gone:
            return None
        self.incarnation.check(head, self.epoch)
        for folder in gone:
            self._check_place(head, folder)
        after = head if self.log is None else head.next(log=(*head.log, *self.log.lines(head, gone)))
        for folder in gone:
            after = after.unlisting(folder, self.kept_in)
        return after

    def _check_place(self, head: Head, folder: str) -> None:
        if self.kept_in is None:
            return
        place = paths.join(self.kept_in, folder)
        kept = head.aside.get(place)
        if folder in self.occupied or (kept is not None and not kept.stock):
            raise EpochExistsError(f"{self.incarnation.root}/{place} exists already; move it away first")

    def gone(self, head: Head) -> dict[str, EpochSummary]:
        """The epochs of a head that the change unlists, by folder."""
        listed = head.listed
        return {folder: listed[folder] for folder in self.folders if folder in listed}

    def kept(self, head: Head) -> dict[str, EpochSummary]:
        """The same by the path that each is kept under; none if they are removed."""
        if self.kept_in is None:
            return {}
        return {paths.join(self.kept_in, folder): entry for folder, entry in self.gone(head).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishStepRemoval(HeadChange):
    """Nothing is left in a folder of a step of stock Orbax that is no epoch any more; see `directory.stock_steps`.

    Attributes:
        incarnation: the run that removed the step; None: any process may do it.
        step: what the head said of the step when it was removed.
    """

    incarnation: Incarnation | None
    folder: str
    step: RemovedStep

    def apply(self, head: Head) -> Head | None:
        if head.removed_steps.get(self.folder) != self.step:
            return None
        if self.incarnation is not None:
            self.incarnation.check(head, 0)
        return head.next(removed_steps={f: step for f, step in head.removed_steps.items() if f != self.folder})


# -- metrics ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attachment:
    """Metrics that a source gives for an attempt, which is the epoch of a folder."""

    folder: str
    save_id: str
    source: str
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class AttachMetrics(HeadChange):
    """Metrics of committed epochs. An attachment to an attempt that is no epoch any more has no effect."""

    attachments: tuple[Attachment, ...]

    def apply(self, head: Head) -> Head | None:
        epochs = dict(head.epochs)
        for one in self.attachments:
            entry = epochs.get(one.folder)
            if entry is not None and entry.save_id == one.save_id and entry.attached.get(one.source) != one.metrics:
                epochs[one.folder] = entry.with_attached(one.source, one.metrics)
        return None if epochs == head.epochs else head.next(epochs=epochs)

    def along_with(self, waiting: Sequence[Attachment]) -> AttachMetrics:
        """All that wait. Its own are among them, or it is alone."""
        return AttachMetrics(tuple(waiting)) if waiting else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepDeleted(HeadChange):
    """The log of deleted epochs gets lines of another directory."""

    incarnation: Incarnation
    lines: tuple[Line, ...]

    def apply(self, head: Head) -> Head | None:
        if head.log[-len(self.lines) :] == self.lines:
            return None
        self.incarnation.check(head, 0)
        return head.next(log=(*head.log, *self.lines))


# -- repair and gc: any process may make these -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakeIn(HeadChange):
    """Names epochs that lie in the bucket and that the head does not name; see `directory.rebuild`.

    Attributes:
        root: the URL of the directory, for messages.
        epochs: by folder.
        aside: epochs that were set aside, by `<name>/<folder>`.
        expected: the `change` of the head that was looked at.
    """

    root: str
    epochs: Mapping[str, EpochSummary]
    aside: Mapping[str, EpochSummary]
    expected: str

    def apply(self, head: Head) -> Head | None:
        """The head that names them; InvalidArgumentError if it is not the one that was looked at any more."""
        epochs = {**self.epochs, **head.epochs}
        aside = {**self.aside, **head.aside}
        if (epochs, aside) == (head.epochs, head.aside):
            return None
        if head.change != self.expected:
            raise head_has_changed(self.root)
        foreign = tuple(folder for folder in head.foreign if folder not in epochs)
        # What is taken in was not written by the directory whose mirror this is, perhaps.
        lineage = ClaimDirectly().apply(head.lineage)
        return head.next(epochs=epochs, aside=aside, foreign=foreign, lineage=lineage)


def head_has_changed(root: str) -> InvalidArgumentError:
    """The error of a repair whose head was written by another process meanwhile."""
    return InvalidArgumentError(
        f"{root}: {paths.HEAD} has changed since it was looked at: a run, or another repair, has written it. Nothing "
        "was changed here; look again"
    )


@dataclasses.dataclass(frozen=True)
class RemoveKeptSteps(HeadChange):
    """Steps of stock Orbax that are on their way to a folder that keeps them are removed instead."""

    kept_in: str

    def apply(self, head: Head) -> Head | None:
        removed = {
            folder: dataclasses.replace(step, kept_in="") if step.kept_in == self.kept_in else step
            for folder, step in head.removed_steps.items()
        }
        return None if removed == head.removed_steps else head.next(removed_steps=removed)


@dataclasses.dataclass(frozen=True)
class ForgetKept(HeadChange):
    """Epochs that were set aside, by `<name>/<folder>`, are not kept any more: their objects are dead."""

    kept: Mapping[str, EpochSummary]

    def apply(self, head: Head) -> Head | None:
        gone = {place: entry for place, entry in head.aside.items() if self.kept.get(place) == entry}
        if not gone:
            return None
        dead = {entry.save_id: place.partition("/")[2] for place, entry in gone.items() if not entry.stock}
        aside = {place: entry for place, entry in head.aside.items() if place not in gone}
        return head.next(aside=aside, dead={**head.dead, **dead})


@dataclasses.dataclass(frozen=True)
class ForgetDead(HeadChange):
    """Nothing is left of dead attempts: the head need not name them any more."""

    save_ids: frozenset[str]

    def apply(self, head: Head) -> Head | None:
        left = {save_id: folder for save_id, folder in head.dead.items() if save_id not in self.save_ids}
        return None if left == head.dead else head.next(dead=left)


@dataclasses.dataclass(frozen=True)
class Refresh(HeadChange):
    """Changes nothing: the head is written anew, so that its date is the present time of the store."""

    def apply(self, head: Head) -> Head:
        """The same head."""
        return head.next()
