"""The primary's work on a mirror in the background: one step of `upkeep` after the other, until it closes."""

from __future__ import annotations

import enum
from collections.abc import Collection

from absl import logging

from epochckpt import _patience, _threads
from epochckpt.errors import FencedError, kept, say
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorJob
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.life import WorkLife, WorkPhase
from epochckpt.tiers.upkeep import Upkeep

_RECLAIMS = 16  # times in a row that a run may be fenced off from a mirror that is still its directory's


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
    """The primary's work: when to do the next step, and when to end."""

    def __init__(self, job: MirrorJob, ledger: LedgerFile, epochs: MirrorEpochs, backlog: Backlog):
        """The `ledger` has the claim of the mirror that this run replaces."""
        self._url = job.url
        self._ledger = ledger
        self._epochs = epochs
        self._backlog = backlog
        self._life = WorkLife()
        self._upkeep = Upkeep(job=job, ledger=ledger, epochs=epochs, backlog=backlog, life=self._life)
        self._bell: _threads.Future[None] = _threads.Future()
        self._failures = _Failures(url=job.url, root=job.local.store.root)
        self._fenced = 0  # in a row

    # -- what the manager tells ----------------------------------------------------------------------------------

    def committed(self, epoch: int) -> None:
        """An epoch was committed here."""
        self._epochs.disown([epoch])  # of an older save, if the mirror has one under this number
        if self._ended:
            # Nothing takes its place there any more, and the next run must not take it for a copy.
            self._ledger.disown([epoch], self._epochs.ids)
            return
        self._upkeep.committed(epoch)
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
        self._life.advance(WorkPhase.CLOSING)
        self._ring()

    def stop(self) -> None:
        """Ends the work after the step that is being done."""
        self._life.advance(WorkPhase.ENDED)
        self._ring()

    def end(self) -> list[int]:
        """Ends the work now; returns the epochs that the mirror is to have, and has not."""
        self._life.advance(WorkPhase.ENDED)
        return sorted({*self._backlog.waiting(), *self._upkeep.unmirrored()})

    @property
    def _ended(self) -> bool:
        return self._life.phase is WorkPhase.ENDED

    def _ring(self) -> None:
        self._bell.set(None)

    # -- in the background ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Does one step after the other, until the manager is closed or another run has taken over."""
        while not self._ended:
            self._bell = _threads.Future()
            phase = self._life.phase  # when it looked: whatever was to be done before the end is done
            outcome = self._try_step()
            if outcome is _Outcome.FENCED or (phase is not WorkPhase.OPEN and outcome is not _Outcome.WORKED):
                break
            if outcome is _Outcome.FAILED:
                self._bell.wait(self._failures.next_pause())
            elif outcome is _Outcome.IDLE:
                self._bell.wait()
        self._life.advance(WorkPhase.ENDED)
        self._upkeep.end()

    def _try_step(self) -> _Outcome:
        try:
            worked = self._upkeep.step()
        except FencedError as error:
            self._upkeep.forget_claim()
            self._fenced += 1
            if self._fenced <= _RECLAIMS and self._upkeep.may_claim_again():
                return _Outcome.WORKED
            if not self._ended:
                logging.error("%s: nothing more is mirrored: %s", self._url, error.reason)
                # The mirror keeps the older saves that it has of these: the next run must not take them for copies.
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
