"""What one run does for its mirror: nothing before it has claimed its directory, and copies from then on."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from absl import logging

from epochckpt import _threads
from epochckpt.format import paths
from epochckpt.tiers import ledger as ledgers
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorFollower, MirrorJob, publish_end
from epochckpt.tiers.ledger import Adoption, Identity, Ledger, save_id
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.looking import MirrorLook, is_listed, is_unchanged
from epochckpt.tiers.standing import ForeignReader, Owner, Stranger, Successor, claim_of
from epochckpt.tiers.worker import Worker

_MARGIN_SECS = 60.0  # by how much the other processes wait longer for the end than the primary


def longest_close_secs(timeout_secs: float) -> float:
    """How long `MirrorRun.close` may take with this timeout, on any process."""
    return timeout_secs + max(timeout_secs, _MARGIN_SECS)


@dataclasses.dataclass(frozen=True)
class MirrorContext:
    """What a run works with for its mirror, once its directory is claimed.

    Attributes:
        job: what is to be copied, and where to.
        ledger: what the directory knows of the mirror.
        epochs: what the mirror has.
    """

    job: MirrorJob
    ledger: LedgerFile
    epochs: MirrorEpochs


class MirrorRun(abc.ABC):
    """What a run does for its mirror, on one process.

        NotBegun ──► Idle ──► Working, Following

    It stays `Idle` where it does not write to the mirror.
    """

    def __init__(self, epochs: MirrorEpochs):
        self._epochs = epochs

    def learn(self, copies: Mapping[int, str]) -> None:
        """The ids of the copies that stand for epochs which are not here."""
        self._epochs.learn(copies)

    def was_copied(self, epoch: int, mirror_id: str) -> bool:
        """On the other processes: whether the primary's ledger has a copy that was made since this manager looked."""
        del epoch, mirror_id
        return False

    @abc.abstractmethod
    def text(self) -> str:
        """The directory's record of the mirror as it is now; empty if there is none."""

    @abc.abstractmethod
    def adopt(self, text: str) -> None:
        """See `Mirror.adopt`."""

    def committed(self, epoch: int) -> None:
        """An epoch was committed here."""
        self._epochs.disown([epoch])  # of an older save, if the mirror has one under this number

    def withdrawn(self, epochs: Sequence[int]) -> None:
        """On the primary: epochs were deleted here, or rolled back, and the ledger says so."""
        self._epochs.disown(epochs)  # they no longer count, though nobody removes them from the mirror

    def waiting(self) -> frozenset[int]:
        """On the primary: epochs that are to be copied, or are being copied, and must stay until then."""
        return frozenset()

    @abc.abstractmethod
    def stop(self, timeout_secs: float) -> None:
        """Ends the work in the background, and waits for the step that is being done, at most so long."""

    @abc.abstractmethod
    def close(self, timeout_secs: float) -> None:
        """Waits until the newest epoch is mirrored, at most so long; then looks what is not, as long, and logs it."""


class NotBegun(MirrorRun):
    """The directory is not claimed yet, so that nothing is written."""

    def text(self) -> str:
        return ""

    def adopt(self, text: str) -> None:
        del text

    def stop(self, timeout_secs: float) -> None:
        del timeout_secs

    def close(self, timeout_secs: float) -> None:
        del timeout_secs


class Begun(MirrorRun):
    """The directory is claimed; what `Idle`, `Working` and `Following` have in common."""

    def __init__(self, context: MirrorContext):
        super().__init__(context.epochs)
        self._context = context
        self._job = context.job
        self._ledger = context.ledger

    def text(self) -> str:
        return self._ledger.text()

    def adopt(self, text: str) -> None:
        self._ledger.adopt(text)

    def _started(self, work: Callable[[], None]) -> _threads.Future[None] | None:
        """Starts the work in a thread of its own. If no thread can be started, logs an error and returns None."""
        try:
            return _threads.start_thread(work)
        except RuntimeError as error:
            logging.error("%s: nothing is mirrored, there is no thread for it: %s", self._job.url, error)
            return None

    def _wait(self, work: _threads.Future[None] | None, wait_secs: float, timeout_secs: float) -> None:
        if work is not None and not work.wait(wait_secs):
            text = "%s: the mirror is not done within %g s, which nothing waits for"
            logging.warning(text, self._job.url, timeout_secs)


class Idle(Begun):
    """Nothing is copied: the mirror is another directory's, or the work has not begun, or there is no thread for it."""

    def __init__(self, context: MirrorContext):
        super().__init__(context)
        self._telling: _threads.Future[None] | None = None  # the other processes that nothing is copied

    def begin(self, look: MirrorLook, epochs: Sequence[int], backlog: Backlog) -> MirrorRun:
        """Begins to work, after this `look`, in a directory that has these epochs; returns what the run does now."""
        if not self._job.coordinator.primary:
            return Following(self._context)
        if isinstance(look.standing, ForeignReader | Stranger):  # it has said so
            self._leave_alone(look, epochs)
            return self
        begun = self._ledger.write(self._first_ledger(look))
        outdated = self._outdated(look, begun, epochs)
        self._epochs.disown(outdated)  # until the worker has compared them, or has made new copies
        backlog.begin(epochs, {*self._epochs.readable, *outdated}, outdated)
        worker = Worker(job=self._job, ledger=self._ledger, epochs=self._epochs, backlog=backlog)
        work = self._started(worker.run)
        if work is None:
            self._tell_end()
            return self
        return Working(context=self._context, worker=worker, work=work)

    def committed(self, epoch: int) -> None:
        self._replaced([epoch])

    def _replaced(self, epochs: Collection[int]) -> None:
        """What the mirror has of these epochs are older saves: neither this run nor the next may take them for copies.

        A run that writes to the mirror makes new copies instead, and its ledger says so then.
        """
        self._epochs.disown(epochs)
        self._ledger.disown(epochs, self._epochs.ids)

    def stop(self, timeout_secs: float) -> None:
        if self._telling is not None:
            self._telling.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        self._wait(self._telling, timeout_secs, timeout_secs)

    # -- beginning -----------------------------------------------------------------------------------------------

    def _leave_alone(self, look: MirrorLook, epochs: Sequence[int]) -> None:
        """Writes nothing to the mirror, which is another directory's."""
        if (found := self._ledger.read()) is not None:
            self._replaced(self._outdated(look, found, epochs))
        self._tell_end()

    def _tell_end(self) -> None:
        """Tells the other processes that nothing is copied: in the background, if there is a thread for it."""
        if self._job.coordinator.processes > 1:
            self._telling = _threads.start(lambda: publish_end(self._job))

    def _first_ledger(self, look: MirrorLook) -> Ledger:
        """The ledger with which this run begins."""
        local = self._job.local
        found = self._ledger.read()  # of a run that was alive until now, perhaps
        if found is not None and not self._ledger.kind.is_own(found, local.store):
            logging.info("%s is a copy of another directory, and gets an id of its own", local.store.root)
            found = None
        identity = Identity.of(local.store, paths.new_id() if found is None else found.identity.directory)
        ledger = found or Ledger(url=self._job.url, identity=identity)
        ledger = dataclasses.replace(ledger, identity=identity, withdrawals=ledgers.settled_withdrawals(ledger, local))
        ledger = ledger.at(self._job.url)
        match look.standing:
            case Owner(lineage=None):
                return dataclasses.replace(ledger, adopted=None, copies={}, copying={})
            case Successor(lineage=seen) as standing:
                there = self._epochs.ids
                if found is not None and not _is_as_seen(found, look):
                    return ledger  # another run of this directory has taken the mirror over meanwhile
                return dataclasses.replace(
                    ledger,
                    adopted=Adoption(claim=claim_of(seen), epochs=there),
                    copies={e: copy for e, copy in ledger.copies.items() if there.get(e) == copy.mirror_id},
                    copying={},
                    withdrawals=ledger.withdrawals if is_unchanged(standing, ledger, there) else (),
                )
            case _:
                return ledger

    def _outdated(self, look: MirrorLook, ledger: Ledger, epochs: Sequence[int]) -> set[int]:
        """The epochs here that the mirror has, or may have, from another save, as far as the ledger tells.

        The mirror is not asked: no save waits for it. The worker compares the epochs when it has claimed the mirror.
        """
        adopted = {} if ledger.adopted is None else ledger.adopted.epochs
        there = {*self._epochs.ids, *ledger.copying, *adopted}
        listed = {epoch for epoch in there if is_listed(epoch, self._epochs.ids, look.copies)}
        known = listed & ledger.copies.keys()
        same = {epoch for epoch in known if save_id(self._job.local, epoch) in (None, ledger.copies[epoch].save_id)}
        return {epoch for epoch in epochs if epoch in there and epoch not in same}


def _is_as_seen(ledger: Ledger, look: MirrorLook) -> bool:
    seen = look.ledger
    return seen is not None and (ledger.claims, ledger.adopted) == (seen.claims, seen.adopted)


class Working(Begun):
    """The primary keeps the mirror as the directory is."""

    def __init__(self, context: MirrorContext, worker: Worker, work: _threads.Future[None]):
        super().__init__(context)
        self._worker = worker
        self._work = work

    def learn(self, copies: Mapping[int, str]) -> None:
        del copies  # the worker knows better

    def committed(self, epoch: int) -> None:
        self._worker.committed(epoch)

    def withdrawn(self, epochs: Sequence[int]) -> None:
        self._worker.withdrawn(epochs)

    def waiting(self) -> frozenset[int]:
        return self._worker.waiting()

    def stop(self, timeout_secs: float) -> None:
        self._worker.stop()
        self._work.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        self._worker.close()
        self._wait(self._work, timeout_secs, timeout_secs)
        # The directory itself may be away or silent by now, and the manager closes all the same.
        what = f"{self._job.url}: what is not mirrored cannot be seen"
        left = _threads.logged(what, lambda: _threads.start(self._worker.end).result(timeout_secs))
        if left:
            text = "%s: not mirrored: checkpoint %s. The next run that saves goes on with that"
            logging.warning(text, self._job.url, ", ".join(map(str, left)))


class Following(Begun):
    """Another process than the primary copies its own nodes."""

    def __init__(self, context: MirrorContext):
        super().__init__(context)
        self._follower = MirrorFollower(job=context.job, adopt=self.adopt)
        self._work = self._started(self._follower.run)

    def was_copied(self, epoch: int, mirror_id: str) -> bool:
        ledger = self._ledger.read()
        if ledger is None:
            return False
        copy = ledger.copying.get(epoch) or ledger.copies.get(epoch)
        return epoch not in ledger.hidden and copy is not None and copy.mirror_id == mirror_id

    def stop(self, timeout_secs: float) -> None:
        self._follower.end()
        if self._work is not None:
            self._work.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        self._wait(self._work, timeout_secs + _MARGIN_SECS, timeout_secs)
        self._follower.end()
