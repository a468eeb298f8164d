"""What the primary does to keep a mirror as the directory is: one step after the other, in the background.

Each step is the first of these that there is to do:

1. It claims the mirror, and compares the mirror's epochs with the directory's.
2. It follows a deletion or a rollback that the ledger names.
3. It removes the oldest epoch, if the mirror has more than `mirror_keep`.
4. It removes the files of a copy that failed.
5. It copies the oldest epoch that is due.
6. It attaches metrics that were attached in the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt.directory import attached_metrics, attaching
from epochckpt.directory.epoch_directory import ReplaceCondition, Rollback, Staging, Writer
from epochckpt.directory.lineage import ClaimLineage
from epochckpt.errors import (
    DamagedError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    LateNodesError,
    UncertainError,
    UnsupportedError,
    say,
)
from epochckpt.format import paths
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorJob, MirrorTasks
from epochckpt.tiers.ledger import NEWER_ID, UNUSABLE_ID, Copy, Ledger, save_id, seen_id
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.life import WorkLife, WorkPhase
from epochckpt.tiers.node_copies import CopyCommit
from epochckpt.tiers.standing import claim_of


@dataclasses.dataclass(frozen=True)
class _NotHeld:
    """This run has yet to claim the mirror, or to claim it again."""


@dataclasses.dataclass(frozen=True)
class _Held:
    """This run has claimed the mirror, and has yet to compare its epochs, or to do so again."""

    writer: Writer


@dataclasses.dataclass(frozen=True)
class _Compared:
    """This run has claimed the mirror, and knows which epochs it has."""

    writer: Writer


class Upkeep:
    """The steps. Only the background thread does them; what any thread may call says so.

    How this run holds the mirror:

        _NotHeld ──► _Held ──► _Compared
        _Compared ──► _Held            it is not known what a step has left there
        _Held, _Compared ──► _NotHeld  another run has claimed it, or it has another history
    """

    def __init__(self, job: MirrorJob, ledger: LedgerFile, epochs: MirrorEpochs, backlog: Backlog, life: WorkLife):
        self._job = job
        self._local = job.local
        self._copies = job.copies
        self._ledger = ledger
        self._epochs = epochs
        self._backlog = backlog
        self._life = life
        self._hold: _NotHeld | _Held | _Compared = _NotHeld()
        self._tasks = MirrorTasks(job=job, ledger=ledger)
        self._copier = _Copier(job=job, tasks=self._tasks)
        self._metrics = _Metrics(job=job, ledger=ledger, epochs=epochs)
        self._unfit = set[int]()  # epochs that cannot be copied

    def committed(self, epoch: int) -> None:
        """From any thread: an epoch was committed here."""
        self._unfit.discard(epoch)
        self._backlog.committed(epoch, self._epochs)
        self._metrics.may_have_changed()

    def unmirrored(self) -> list[int]:
        """From any thread: the newest epoch here, if the mirror does not have it."""
        newest = max(self._local.list_epochs(), default=None)
        return [] if newest is None or newest in {*self._epochs.readable, *self._unfit} else [newest]

    def step(self) -> bool:
        """Does the next piece of work; False if there is none.

        Raises FencedError if another run has taken over, or the mirror has another history; or why the step failed.
        """
        if self._ledger.undecided():
            self._ledger.settle()
        match self._hold:
            case _NotHeld():
                self._claim()
            case _Held(writer):
                self._compare(writer)
            case _Compared(writer):
                return self._follow_directory(writer)
        return True

    def _follow_directory(self, writer: Writer) -> bool:
        """Does what there is to do in a mirror whose epochs are known; False if there is nothing."""
        if (ledger := self._ledger.known()).may_follow:
            self._follow(writer, ledger)
        elif (epoch := self._epochs.begin_leaving(self._job.options.mirror_keep or math.inf)) is not None:
            self._remove(writer, epoch)
        elif self._copier.has_failed:
            self._copier.remove_failed(writer)
        elif (epoch := self._take()) is not None:
            self._copy(writer, epoch)
        else:
            return self._metrics.follow()
        return True

    def end(self) -> None:
        """Tells the other processes that nothing more comes, and lets go of the mirror."""
        self._tasks.end()
        match self._hold:
            case _Held(writer) | _Compared(writer):
                _threads.logged(f"{self._job.url}: at its end", writer.release)
            case _NotHeld():
                pass

    # -- claiming ------------------------------------------------------------------------------------------------

    def forget_claim(self) -> None:
        """Another run has claimed the mirror."""
        self._hold = _NotHeld()

    def may_claim_again(self) -> bool:
        """After another run has claimed the mirror: whether the mirror is this directory's all the same.

        A run of an older claim that was paused may fence this one off before it sees that the lineage has gone on. Or
        it claims the mirror after this one has looked, and before this one claims it.
        """
        try:
            self._ledger.confirm_claim()
            claim = claim_of(self._copies.lineage())
            ledger = self._ledger.known()
            there = {} if ledger.adopted is None else self._ids()
        except FencedError:  # from the directory itself
            return False
        except Exception as error:
            logging.warning("%s: whose mirror it is cannot be read: %s", self._job.url, say(error))
            return False
        return ledger.goes_on_from(claim, there)

    def _claim(self) -> None:
        """Claims the mirror for this directory, in place of the claim that the ledger knows, and looks at it."""
        found = self._copies.lineage()
        ledger = self._ledger.known()
        there = self._ids()
        if (found is not None or there) and not ledger.goes_on_from(claim_of(found), there):
            raise self._other_history()
        claim = paths.new_id()
        # The ledger first, through this run's own claim of the directory: a newer run knows this claim, too.
        ledger = self._ledger.change(lambda now: now.claiming(claim))
        change = ClaimLineage(expected=found, directory=ledger.identity.directory, claim=claim)
        self._hold = _Held(self._copies.claim(check=self._ledger.confirm_claim, lineage=change))

    def _other_history(self) -> FencedError:
        return FencedError(
            0,
            f"it has been claimed for another directory than {self._local.store.root}, or written to, since this "
            "manager looked. Nothing is changed there: open the directory again to go on from it",
        )

    def _ids(self) -> dict[int, str]:
        """The ids of the epochs of the mirror, as they are now."""
        return {epoch: seen_id(self._copies, epoch) for epoch in self._copies.list_epochs()}

    def _compare(self, writer: Writer) -> None:
        """Compares the mirror's epochs with the directory's.

        This run has claimed the mirror, and nobody else writes there any more. An earlier owner may have written
        between this run's look and its claim: then that is another history, and this run changes nothing. Otherwise the
        adopted history is this directory's own from now on, before anything is changed there.
        """
        self._backlog.begin_look()
        ledger = self._ledger.known()
        found = self._ids()
        claim = claim_of(self._copies.lineage())
        if not ledger.goes_on_from(claim, found):  # what was listed may be another directory's already
            if ledger.knows(claim):
                self._hold = _NotHeld()
                writer.release()
            raise self._other_history()
        listed = set(self._local.list_epochs())
        copies: dict[int, Copy] = {}
        outdated = set[int]()
        for epoch, mirror_id in found.items():
            known = ledger.copies.get(epoch)
            if known is None or known.mirror_id != mirror_id:
                known = Copy(save_id="", mirror_id=mirror_id)  # of what, is read where it matters
            here = save_id(self._local, epoch) if epoch in listed else None
            if here is not None and known.save_id != here:
                known = Copy(save_id=save_id(self._copies, epoch) or "", mirror_id=mirror_id)
                if known.save_id != here:
                    outdated.add(epoch)
            copies[epoch] = known
        ledger = self._ledger.change(lambda now: now.owning(claim, copies))
        unread = outdated | ledger.hidden
        readable = {epoch: copy.mirror_id for epoch, copy in copies.items() if epoch not in unread}
        self._epochs.take(ids=found, readable=readable)
        self._hold = _Compared(writer)
        # The comparison has found older saves of epochs that were committed since it began.
        self._epochs.disown(self._backlog.correct(outdated - ledger.hidden, self._epochs.readable.keys()))

    # -- following -----------------------------------------------------------------------------------------------

    def _follow(self, writer: Writer, ledger: Ledger) -> None:
        """Gives up in the mirror what was deleted or rolled back here."""
        withdrawal = ledger.withdrawals[0]
        found = set(self._copies.list_epochs())
        there = tuple(epoch for epoch in withdrawal.epochs if epoch in found)
        if withdrawal.to is None:
            for epoch in there:
                writer.unlist(epoch, logged=True)()
        elif there:
            writer.finish_rollback()
            writer.roll_back(Rollback(withdrawal.to, there, paths.new_id()))
        self._epochs.drop(withdrawal.epochs)
        self._ledger.change(lambda now: now.followed())

    def _remove(self, writer: Writer, epoch: int) -> None:
        """Removes an epoch that the mirror keeps no longer."""
        writer.unlist(epoch, logged=True)()
        self._epochs.drop([epoch])
        self._ledger.change(lambda now: now.without([epoch]))

    # -- copying -------------------------------------------------------------------------------------------------

    def _take(self) -> int | None:
        """The next epoch to be copied, if there is one."""
        if self._life.phase is not WorkPhase.OPEN:
            for epoch in self.unmirrored():
                self._backlog.add(epoch)
        return self._backlog.take()

    def _copy(self, writer: Writer, epoch: int) -> None:
        """Copies an epoch, unless it is there; one that cannot be copied is left out."""
        try:
            self._copy_now(writer, epoch)
        except EpochNotFoundError as error:  # deleted here meanwhile; or replaced, and due again
            logging.info("%s: checkpoint %d is not mirrored: %s", self._job.url, epoch, error)
        except _UnfitError as error:
            logging.error("%s: checkpoint %d is not mirrored: %s", self._job.url, epoch, error)
            self._give_up(writer, epoch)
        except BaseException:
            self._backlog.failed()
            raise
        self._backlog.done()

    def _give_up(self, writer: Writer, epoch: int) -> None:
        """An epoch cannot be copied; an older form of it in the mirror would come back once it is deleted here."""
        self._unfit.add(epoch)
        if self._epochs.ids.get(epoch, NEWER_ID) != NEWER_ID and epoch not in self._epochs.readable:
            writer.unlist(epoch)()
            self._epochs.drop([epoch])

    def _copy_now(self, writer: Writer, epoch: int) -> None:
        with _local_errors():
            record = self._local.read_record(epoch)
            if record.stock:
                raise UnsupportedError("stock Orbax wrote it, whose steps are not copied")
        there = seen_id(self._copies, epoch, anew=True)
        if there == NEWER_ID:
            raise _UnfitError(f"a newer epochckpt has written a checkpoint {epoch} to the mirror")
        if there != UNUSABLE_ID and save_id(self._copies, epoch) == record.origin:
            copy = Copy(save_id=record.origin, mirror_id=there)
        else:
            copy = Copy(save_id=record.origin, mirror_id=self._copier.new_id(writer, epoch))
            self._copy_anew(writer, epoch, copy, there)
        try:
            ledger = self._ledger.change(lambda now: now.confirmed(epoch, copy))
        except BaseException:  # the mirror has the copy, and this run does not say so
            self._hold = _Held(writer)
            raise
        self._epochs.set(epoch, copy.mirror_id)
        self._epochs.disown(ledger.hidden)  # it may have been deleted here meanwhile, and is to go there, too

    def _copy_anew(self, writer: Writer, epoch: int, copy: Copy, there: str) -> None:
        """Makes a copy in place of what the mirror has `there`, if it has anything."""
        replaces = None
        if epoch in self._epochs.ids and there == UNUSABLE_ID:
            replaces = ReplaceCondition(None, "its record cannot be used")
        elif epoch in self._epochs.ids:
            replaces = ReplaceCondition(there, "")
        self._ledger.change(lambda now: now.begun(epoch, copy))
        try:
            self._copier.copy(writer, epoch, copy.mirror_id, replaces)
        except UncertainError:  # it may be there
            self._hold = _Held(writer)
            raise


class _Copier:
    """Makes copies of epochs, together with the other processes, and removes the files of those that failed."""

    def __init__(self, job: MirrorJob, tasks: MirrorTasks):
        self._job = job
        self._tasks = tasks
        self._attempts = 0
        self._failed: list[Staging] = []

    def new_id(self, writer: Writer, epoch: int) -> str:
        """The id of the next attempt of the mirror."""
        self._attempts += 1
        return f"{writer.incarnation}-{epoch}-{self._attempts}"

    def copy(self, writer: Writer, epoch: int, mirror_id: str, replaces: ReplaceCondition | None) -> None:
        """Copies an epoch under the id of an attempt of the mirror.

        Raises UncertainError if the copy may be there, _UnfitError if the epoch cannot be copied, or why it failed.
        """
        copy = CopyCommit(
            reader=self._job.reader(epoch),
            epoch_directory=self._job.copies,
            writer=writer,
            save_id=mirror_id,
            replaces=replaces,
            is_checked=False,
        )
        copy.make_room()
        try:
            with _local_errors():
                entries = self._tasks.copy(copy, epoch, mirror_id, writer.incarnation)
            copy.publish(entries)
        except (UncertainError, LateNodesError):  # it may be there, or a node may still write
            raise
        except BaseException:
            self._failed.append(writer.staging(epoch, mirror_id))
            raise

    @property
    def has_failed(self) -> bool:
        """Whether the files of a copy that failed are there."""
        return bool(self._failed)

    def remove_failed(self, writer: Writer) -> None:
        """Removes the files of one copy that failed."""
        writer.discard(self._failed[-1])
        self._failed.pop()


class _Metrics:
    """Metrics of the directory's epochs that the mirror is to have."""

    def __init__(self, job: MirrorJob, ledger: LedgerFile, epochs: MirrorEpochs):
        self._job = job
        self._ledger = ledger
        self._epochs = epochs
        # By epoch and source: the id of the copy, and what was attached to it. A new copy of the epoch has none of it.
        self._attached: dict[tuple[int, str], tuple[str, Any]] = {}
        # Since the last look. It is no part of the life cycle: any thread sets it, whatever the work is at.
        self._changed = True

    def may_have_changed(self) -> None:
        """From any thread: metrics may have been attached here."""
        self._changed = True

    def follow(self) -> bool:
        """Attaches in the mirror what was attached here; False if nothing may have changed since the last time."""
        if not self._changed:
            return False
        self._changed = False
        try:
            self._attach()
        except BaseException:
            self._changed = True
            raise
        return True

    def _attach(self) -> None:
        local = self._job.local
        copies = self._ledger.known().copies
        for folder, files in attached_metrics.by_folder(local).items():
            epoch = local.names.parse(folder)
            copy = None if epoch is None else copies.get(epoch)
            if epoch is None or copy is None or epoch not in self._epochs.readable:
                continue
            here = local.read_save_id(epoch) or ""
            for source, metrics in attached_metrics.read(local, files, epoch, here).items():
                attached = (copy.mirror_id, metrics)
                if self._attached.get((epoch, source)) != attached:
                    try:
                        attaching.attach(self._job.copies, epoch, metrics, source, copy.mirror_id)
                    except (EpochNotFoundError, InvalidArgumentError) as error:
                        logging.warning("%s: metrics of %s are left out: %s", self._job.url, source, error)
                    self._attached[epoch, source] = attached


class _UnfitError(Exception):
    """An epoch of this directory cannot be copied, now or later."""


@contextlib.contextmanager
def _local_errors() -> Generator[None]:
    """What is wrong with the epoch that is read here is no reason to try again."""
    try:
        yield
    except (DamagedError, FormatError, FormatVersionError, UnsupportedError) as error:
        raise _UnfitError(say(error)) from error
