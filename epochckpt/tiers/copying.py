"""Copies to a mirror, in the background: which epochs are due, and who copies what.

Each process copies the folders of its own nodes. The primary (`Worker`) publishes each copy as a task, under
`task/<number>`, for all processes. They (`MirrorFollower`) answer under `report/<number>/<process>`, and the primary
commits when all have answered. The other processes do the newest task; the last task says that no further one comes.

The worker does one step after the other, the first of these that there is to do:

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
import enum
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import _patience, _threads
from epochckpt._threads import Deadline
from epochckpt.agreement import Coordinator
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory, attached_metrics, attaching
from epochckpt.directory.epoch_directory import ReplaceCondition, Rollback, Stager, Staging, Writer
from epochckpt.directory.lineage import ClaimLineage
from epochckpt.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    DamagedError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    LateNodesError,
    UncertainError,
    UnsupportedError,
    kept,
    say,
)
from epochckpt.format import NodeEntry, paths
from epochckpt.options import StorageOptions
from epochckpt.saving.reports import NodeReport, ProcessReport
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.epoch_copy import EpochCopy
from epochckpt.tiers.ledger import Copy, Ledger, LedgerFile, save_id
from epochckpt.tiers.standing import claim_of

_LISTEN_SECS = 60.0  # one question of another process for the next task
_KEPT_TASKS = 8  # in the coordination service
_RECLAIMS = 16  # times in a row that a run may be fenced off from a mirror that is still its directory's
_END = {"end": True}
# In place of the id of an epoch in the mirror, also in ledgers:
NEWER_ID = "newer"  # a newer epochckpt has written it: nothing here is the same
UNUSABLE_ID = ""  # its record cannot be used: nothing tells what it is


@dataclasses.dataclass(frozen=True)
class MirrorJob:
    """What both the primary and the other processes need to copy the nodes of this process.

    Attributes:
        url: of the mirror.
        local: the directory.
        copies: the mirror, to write.
        coordinator: the processes.
        prefix: of the keys of this manager's mirror.
        options: how it is mirrored.
        hosted: gives the names of this process's nodes.
    """

    url: str
    local: EpochDirectory
    copies: EpochDirectory
    coordinator: Coordinator
    prefix: str
    options: StorageOptions
    hosted: Callable[[], Sequence[str]]

    def copy(self, epoch: int, mirror_id: str, stager: Stager) -> EpochCopy:
        """The copy of an epoch under the id of an attempt of the mirror, by the run that has claimed the mirror."""
        record = self.local.read_record(epoch)
        reader = EpochReader(self.local.store, self.local.folder(epoch), record, _threads.Pool(1))
        copy = EpochCopy(reader, self.copies, mirror_id)
        copy.join(stager)
        return copy


class _Outcome(enum.Enum):
    """What became of one step of the worker."""

    WORKED = "worked"
    IDLE = "idle"  # there was nothing to do
    FAILED = "failed"  # it is tried again
    FENCED = "fenced"  # another run has taken over


class _Failures:
    """Failed steps in a row: what is said of them, and how long the mirror is left alone."""

    def __init__(self, url: str, root: str):
        self._url = url
        self._root = root
        self._count = 0
        self._pause = _patience.now().mirror_pauses_secs[0]

    def add(self, error: Exception) -> None:
        """One more; the first is logged."""
        if not self._count:
            text = "%s: the mirror is behind, and tries again; saving to %s goes on: %s"
            logging.warning(text, self._url, self._root, say(error))
        kept(error)
        self._count += 1

    def next_pause(self) -> float:
        """The seconds before the next try: twice as many as the last time."""
        pause = self._pause
        self._pause = min(2 * pause, _patience.now().mirror_pauses_secs[1])
        return pause

    def end(self) -> None:
        """A step has worked."""
        if self._count:
            logging.info("%s: the mirror goes on, after %d failures", self._url, self._count)
        self._count = 0
        self._pause = _patience.now().mirror_pauses_secs[0]


class Worker:
    """The primary's work: it claims the mirror, and keeps it as the directory is."""

    def __init__(self, job: MirrorJob, ledger: LedgerFile, epochs: MirrorEpochs, backlog: Backlog):
        """The `ledger` has the claim of the mirror that this run replaces."""
        self._job = job
        self._local = job.local
        self._copies = job.copies
        self._ledger = ledger
        self._epochs = epochs
        self._backlog = backlog
        self._keys = RecentKeys(_KEPT_TASKS)
        self._bell: _threads.Future[None] = _threads.Future()
        self._metrics_changed = True
        self._writer: Writer | None = None  # while this run has claimed the mirror
        self._compared = False
        self._closing = False
        self._ended = False
        self._failures = _Failures(job.url, job.local.store.root)
        self._fenced = 0  # in a row
        self._attempts = 0
        self._tasks = 0
        self._dead: list[Staging] = []  # of copies that failed
        self._unfit = set[int]()  # epochs that cannot be copied
        self._attached: dict[tuple[int, str], Any] = {}

    # -- what the manager tells ----------------------------------------------------------------------------------

    def committed(self, epoch: int) -> None:
        """An epoch was committed here."""
        self._epochs.disown([epoch])
        if self._ended:
            self._ledger.disown([epoch], self._epochs.ids)
            return
        self._unfit.discard(epoch)
        self._backlog.committed(epoch, self._epochs)
        self._metrics_changed = True
        self._ring()

    def withdrawn(self, epochs: Collection[int]) -> None:
        """Epochs were deleted here or rolled back, and the ledger says so."""
        self._backlog.withdraw(epochs)
        self._epochs.withdraw(epochs)
        self._ring()

    def waiting(self) -> frozenset[int]:
        """The epochs that are to be copied."""
        return frozenset() if self._ended else self._backlog.waiting()

    def close(self) -> None:
        """Has the work end when nothing is left to do, or when the mirror refuses once more."""
        self._closing = True
        self._ring()

    def stop(self) -> None:
        """Ends the work after the step that is being done."""
        self._ended = True
        self._closing = True
        self._ring()

    def end(self) -> list[int]:
        """Ends the work now; returns the epochs that the mirror is to have, and has not."""
        self._ended = True
        return sorted({*self._backlog.waiting(), *self._unmirrored()})

    def _ring(self) -> None:
        self._bell.set(None)

    def _unmirrored(self) -> list[int]:
        """The newest epoch here, if the mirror does not have it."""
        newest = max(self._local.list_epochs(), default=None)
        return [] if newest is None or newest in {*self._epochs.readable, *self._unfit} else [newest]

    # -- in the background ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Does one step after the other, until the manager is closed or another run has taken over."""
        while not self._ended:
            self._bell = _threads.Future()
            closing = self._closing  # when it looked: whatever was to be done before the end is done
            outcome = self._try_step()
            if outcome is _Outcome.FENCED or (closing and outcome is not _Outcome.WORKED):
                break
            if outcome is _Outcome.FAILED:
                self._bell.wait(self._failures.next_pause())
            elif outcome is _Outcome.IDLE:
                self._bell.wait()
        self._finish()

    def _try_step(self) -> _Outcome:
        try:
            worked = self._step()
        except FencedError as error:
            if self._may_claim_again():
                return _Outcome.WORKED
            if not self._ended:
                logging.error("%s: nothing more is mirrored: %s", self._job.url, error.reason)
                self._ledger.disown(self._backlog.waiting(), self._epochs.ids)
            return _Outcome.FENCED
        except Exception as error:  # whatever it is, training does not depend on it
            self._failures.add(error)
            return _Outcome.FAILED
        if not worked:
            return _Outcome.IDLE
        self._fenced = 0
        self._failures.end()
        return _Outcome.WORKED

    def _may_claim_again(self) -> bool:
        """After another run has claimed the mirror: whether the mirror is this directory's all the same.

        A run of an older claim that was paused may fence this one off before it sees that the lineage has gone on. Or
        it claims the mirror after this one has looked, and before this one claims it.
        """
        self._writer = None
        self._compared = False
        self._fenced += 1
        if self._fenced > _RECLAIMS:
            return False
        try:
            self._ledger.check()
            claim = claim_of(self._copies.lineage())
            ledger = self._ledger.known()
            there = {} if ledger.adopted is None else self._ids()
        except FencedError:  # from the directory itself
            return False
        except Exception as error:
            logging.warning("%s: whose mirror it is cannot be read: %s", self._job.url, say(error))
            return False
        return ledger.goes_on_from(claim, there)

    def _finish(self) -> None:
        self._ended = True
        if self._job.coordinator.processes > 1:
            what = f"{self._job.url}: the other processes do not hear of its end"
            _threads.logged(what, lambda: self._publish(_END))
        if self._writer is not None:
            _threads.logged(f"{self._job.url}: at its end", self._writer.release)

    def _step(self) -> bool:
        """The next piece of work; False if there is none."""
        if self._ledger.undecided():
            self._ledger.settle()
        if self._writer is None:
            self._claim()
        elif not self._compared:
            self._compare()
        elif (ledger := self._ledger.known()).may_follow:
            self._follow(ledger)
        elif (epoch := self._epochs.begin_leaving(self._job.options.mirror_keep or math.inf)) is not None:
            self._remove(epoch)
        elif self._dead:
            self._claimed.discard(self._dead[-1])
            self._dead.pop()
        elif (epoch := self._take()) is not None:
            self._copy(epoch)
        elif self._metrics_changed:
            self._metrics_changed = False
            try:
                self._follow_metrics()
            except BaseException:
                self._metrics_changed = True
                raise
        else:
            return False
        return True

    # -- claiming ------------------------------------------------------------------------------------------------

    @property
    def _claimed(self) -> Writer:
        assert self._writer is not None, "the mirror was not claimed"
        return self._writer

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
        self._writer = self._copies.claim(check=self._ledger.check, lineage=change)

    def _other_history(self) -> FencedError:
        return FencedError(
            0,
            f"it has been claimed for another directory than {self._local.store.root}, or written to, since this "
            "manager looked. Nothing is changed there: open the directory again to go on from it",
        )

    def _ids(self) -> dict[int, str]:
        """The ids of the epochs of the mirror, as they are now."""
        return {epoch: seen_id(self._copies, epoch) for epoch in self._copies.list_epochs()}

    def _compare(self) -> None:
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
                writer = self._claimed
                self._writer = None
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
        self._compared = True
        self._epochs.disown(self._backlog.correct(outdated - ledger.hidden, self._epochs.readable.keys()))

    # -- following -----------------------------------------------------------------------------------------------

    def _follow(self, ledger: Ledger) -> None:
        """Gives up in the mirror what was deleted or rolled back here."""
        withdrawal = ledger.withdrawals[0]
        found = set(self._copies.list_epochs())
        there = tuple(epoch for epoch in withdrawal.epochs if epoch in found)
        if withdrawal.to is None:
            for epoch in there:
                self._claimed.unlist(epoch, logged=True)()
        elif there:
            self._claimed.finish_rollback()
            self._claimed.roll_back(Rollback(withdrawal.to, there, paths.new_id()))
        self._epochs.drop(withdrawal.epochs)
        self._ledger.change(lambda now: now.followed())

    def _remove(self, epoch: int) -> None:
        """Removes an epoch that the mirror keeps no longer."""
        self._claimed.unlist(epoch, logged=True)()
        self._epochs.drop([epoch])
        self._ledger.change(lambda now: now.without([epoch]))

    def _follow_metrics(self) -> None:
        """Attaches in the mirror what was attached here."""
        copies = self._ledger.known().copies
        for folder, files in attached_metrics.by_folder(self._local).items():
            epoch = self._local.names.parse(folder)
            copy = None if epoch is None else copies.get(epoch)
            if epoch is None or copy is None or epoch not in self._epochs.readable:
                continue
            here = self._local.read_save_id(epoch) or ""
            for source, metrics in attached_metrics.read(self._local, files, epoch, here).items():
                if self._attached.get((epoch, source)) != metrics:
                    try:
                        attaching.attach(self._copies, epoch, metrics, source, copy.mirror_id)
                    except (EpochNotFoundError, InvalidArgumentError) as error:
                        logging.warning("%s: metrics of %s are left out: %s", self._job.url, source, error)
                    self._attached[epoch, source] = metrics

    # -- copying -------------------------------------------------------------------------------------------------

    def _take(self) -> int | None:
        """The next epoch to be copied, if there is one."""
        if self._closing:
            for epoch in self._unmirrored():
                self._backlog.add(epoch)
        return self._backlog.take()

    def _copy(self, epoch: int) -> None:
        """Copies an epoch, unless it is there; one that cannot be copied is left out."""
        try:
            self._copy_now(epoch)
        except EpochNotFoundError as error:  # deleted here meanwhile; or replaced, and due again
            logging.info("%s: checkpoint %d is not mirrored: %s", self._job.url, epoch, error)
        except _UnfitError as error:
            logging.error("%s: checkpoint %d is not mirrored: %s", self._job.url, epoch, error)
            self._give_up(epoch)
        except BaseException:
            self._backlog.failed()
            raise
        self._backlog.done()

    def _give_up(self, epoch: int) -> None:
        """An epoch cannot be copied; an older form of it in the mirror would come back once it is deleted here."""
        self._unfit.add(epoch)
        if self._epochs.ids.get(epoch, NEWER_ID) != NEWER_ID and epoch not in self._epochs.readable:
            self._claimed.unlist(epoch)()
            self._epochs.drop([epoch])

    def _copy_now(self, epoch: int) -> None:
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
            replaces = None
            if epoch in self._epochs.ids and there == UNUSABLE_ID:
                replaces = ReplaceCondition(None, "its record cannot be used")
            elif epoch in self._epochs.ids:
                replaces = ReplaceCondition(there, "")
            self._attempts += 1
            mirror_id = f"{self._claimed.incarnation}-{epoch}-{self._attempts}"
            copy = Copy(save_id=record.origin, mirror_id=mirror_id)
            self._ledger.change(lambda now: now.begun(epoch, copy))
            self._copy_as(mirror_id, epoch, replaces)
        try:
            ledger = self._ledger.change(lambda now: now.confirmed(epoch, copy))
        except BaseException:  # the mirror has the copy, and this run does not say so
            self._compared = False
            raise
        self._epochs.set(epoch, copy.mirror_id)
        self._epochs.disown(ledger.hidden)

    def _copy_as(self, mirror_id: str, epoch: int, replaces: ReplaceCondition | None) -> None:
        """Copies an epoch under the id of an attempt of the mirror."""
        copy = self._job.copy(epoch, mirror_id, self._claimed)
        copy.make_room(replaces)
        try:
            with _local_errors():
                entries = self._copy_together(copy, epoch, mirror_id)
            copy.publish(entries)
        except UncertainError:  # it may be there
            self._compared = False
            raise
        except LateNodesError:  # a node may still write
            raise
        except BaseException:
            self._dead.append(self._claimed.staging(epoch, mirror_id))
            raise

    def _copy_together(self, copy: EpochCopy, epoch: int, mirror_id: str) -> list[NodeEntry]:
        """Has every process copy its nodes; returns the entries of the copies."""
        job = self._job
        coordinator = job.coordinator
        if coordinator.processes == 1:
            return copy.copy_nodes(job.hosted())
        number = self._publish({"epoch": epoch, "attempt": mirror_id, "incarnation": self._claimed.incarnation})
        deadline = Deadline(job.options.save_timeout_secs)
        others = set(range(1, coordinator.processes))
        error: Exception | None = None
        entries: list[NodeEntry] = []
        try:
            entries = copy.copy_nodes(job.hosted())
        except Exception as caught:
            error = caught
        found, missing = coordinator.gather(f"{job.prefix}/report/{number}", others, deadline)
        reports = [ProcessReport.from_wire(wire) for _, wire in sorted(found.items())]
        failures = [*filter(None, [error, *(report.error for report in reports)])]
        if missing:
            late = coordinator.named(missing).split(", ")
            raise LateNodesError(epoch, late, deadline.secs) from next(iter(failures), None)
        for failure in failures:
            raise failure
        return [*entries, *(node.entry for report in reports for node in report.nodes)]

    def _publish(self, task: dict[str, Any]) -> int:
        """Publishes a task for the other processes; returns its number."""
        self._tasks += 1
        if self._ledger.on_each_disk:
            task = {**task, "record": self._ledger.known().to_bytes().decode()}
        task_key = f"{self._job.prefix}/task/{self._tasks}"
        report_key = f"{self._job.prefix}/report/{self._tasks}"
        self._job.coordinator.put(task_key, task)
        self._keys.add(self._job.coordinator, task_key, report_key)
        return self._tasks


class _UnfitError(Exception):
    """An epoch of this directory cannot be copied, now or later."""


@contextlib.contextmanager
def _local_errors() -> Generator[None]:
    """What is wrong with the epoch that is read here is no reason to try again."""
    try:
        yield
    except (DamagedError, FormatError, FormatVersionError, UnsupportedError) as error:
        raise _UnfitError(say(error)) from error


def seen_id(epoch_directory: EpochDirectory, epoch: int, *, anew: bool = False) -> str:
    """The id of an epoch of the mirror as of the last look, or `anew`; or what stands in its place."""
    try:
        found = epoch_directory.read_save_id(epoch) if anew else epoch_directory.seen_save_id(epoch)
        return found or UNUSABLE_ID
    except FormatVersionError:
        return NEWER_ID


def publish_end(job: MirrorJob) -> None:
    """On the primary: tells the other processes that there is nothing to mirror."""
    job.coordinator.put(f"{job.prefix}/task/1", _END)


class MirrorFollower:
    """The work of the other processes: the tasks of the primary, until it says that there are no more."""

    def __init__(self, job: MirrorJob, adopt: Callable[[str], None]):
        """`adopt` takes the primary's ledger, where each process has a copy of it."""
        self._job = job
        self._adopt = adopt
        self._ended = False

    def end(self) -> None:
        """Ends the work after the task that is being done."""
        self._ended = True

    def run(self) -> None:
        """Does the tasks of the primary, one after the other."""
        done = 0
        job = self._job
        while not self._ended:
            try:
                task, done = self._newest_task(done)
            except CoordinationTimeoutError:
                continue
            except CoordinationError as error:
                logging.warning("%s: this process takes no more part in mirroring: %s", job.url, error)
                return
            if "record" in task:
                self._take_ledger(task["record"])
            if task.get("end"):
                return
            self._answer(done, task)

    def _take_ledger(self, text: str) -> None:
        what = f"{self._job.url}: this disk's ledger of it is old"
        _threads.logged(what, lambda: self._adopt(text))

    def _answer(self, number: int, task: Mapping[str, Any]) -> None:
        coordinator = self._job.coordinator
        key = f"{self._job.prefix}/report/{number}/{coordinator.process}"
        report = self._report_of(task)
        what = f"{self._job.url}: the primary may not hear of this node"
        _threads.logged(what, lambda: coordinator.put(key, report.to_wire()))

    def _newest_task(self, done: int) -> tuple[dict[str, Any], int]:
        """The newest task after those that are done, and its number."""
        found: dict[int, Any] = {}
        coordinator = self._job.coordinator
        with contextlib.suppress(CoordinationTimeoutError):
            found[done + 1] = coordinator.get(f"{self._job.prefix}/task/{done + 1}", _LISTEN_SECS)
        found |= {int(number): task for number, task in coordinator.get_all(f"{self._job.prefix}/task").items()}
        newest = max(found, default=0)
        if newest <= done:
            raise CoordinationTimeoutError(f"there is no task after {done}")
        return found[newest], newest

    def _report_of(self, task: Mapping[str, Any]) -> ProcessReport:
        """Copies this process's nodes for a task."""
        try:
            stager = self._job.copies.join(task["incarnation"])
            copy = self._job.copy(task["epoch"], task["attempt"], stager)
            entries = copy.copy_nodes(self._job.hosted())
            return ProcessReport(nodes=tuple(NodeReport(entry, {}) for entry in entries))
        except Exception as error:
            return ProcessReport(error=kept(error))
