"""The saves of a run: how each one begins, how all processes learn what became of it, and the last one's second try.

A save ends while later epochs are trained. The primary tells how, in the collective call at the end of an epoch; so the
processes agree at every moment on what is committed, and on how many saves in a row have failed.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from epochckpt.errors import CoordinationTimeoutError, say
from epochckpt.jobs.backends.base import CheckpointBackend
from epochckpt.jobs.epoch_verdict import EpochVerdict
from epochckpt.jobs.notes import RunNotes
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.run_state import FencedOff, TooManyFailures
from epochckpt.manager import HandlerNotifier, SaveResult

NOT_ACCESSIBLE = "the metadata handler does not say that the storage can be reached"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochToSave:
    """An epoch as it was when it ended; a second try saves the same."""

    number: int
    prepared: Any  # what the backend saves, see `CheckpointBackend.prepare`
    metrics: Mapping[str, Any]
    notes: RunNotes
    exists: bool  # a part of the epoch is on storage, or what `save_checkpoints` has saved as the epoch
    force: bool  # it is the last of the run, or epoch 0


@dataclasses.dataclass(frozen=True)
class Saved:
    """The last epoch of a run is on storage, or was not to be saved."""


@dataclasses.dataclass(frozen=True)
class Unsaved:
    """The last epoch of a run is not on storage."""

    why: str


LastSave = Saved | Unsaved | FencedOff
"""What became of the last epoch of a run."""


class RunSaves:
    """The saves of one run. A save that fails never raises: it counts. Without a backend nothing is saved.

    Args:
        unit: what the job counts.
        every_secs: an epoch is saved if the last save began at least so long ago.
        max_failures_in_a_row: with more of them the run ends; None: it goes on.
        calls: of the run.
        backend: the manager.
        handler: hears how saves end.
    """

    def __init__(
        self,
        *,
        unit: str,
        every_secs: float,
        max_failures_in_a_row: int | None,
        calls: RunCalls,
        backend: CheckpointBackend[Any] | None,
        handler: HandlerNotifier,
    ):
        self._unit = unit
        self._every_secs = every_secs
        self._max_failures_in_a_row = max_failures_in_a_row
        self._calls = calls
        self._backend = backend
        self._handler = handler
        self._last_began = time.monotonic()  # of the last save; of the run before there is one
        self._ended: list[SaveResult] = []  # saves that have ended and were not reported to the other processes yet
        self._failures_in_a_row = 0
        self._secs_by_node: collections.Counter[str] = collections.Counter()
        self._retry: EpochToSave | None = None  # the last epoch, which may be saved once more
        self.last_committed_epoch: int | None = None  # the newest epoch on storage
        self.failed: tuple[tuple[int, str], ...] = ()  # (epoch, reason) of the saves that failed
        self.blocked_secs = 0.0  # for which saving has kept this process from training

    @property
    def slowest_node(self) -> tuple[str, float] | None:
        """Of several nodes the one that took longest to write, and its seconds in all."""
        secs = self._secs_by_node.most_common()
        return secs[0] if len(secs) > 1 else None

    def resumed_from(self, epoch: int) -> None:
        """The run goes on from this epoch, so it is on storage."""
        self.last_committed_epoch = epoch

    # -- one epoch -----------------------------------------------------------------------------------------------

    def is_time(self) -> bool:
        """On the primary: whether the last save began long enough ago."""
        return time.monotonic() - self._last_began >= self._every_secs

    def refusal(self, epoch: int, problem: str | None) -> str | None:
        """On the primary: why an epoch that is due cannot be saved; None if it can.

        `problem`: why a process cannot save its part; None if all can.
        """
        if problem is None and self._backend is not None and not self._handler.cp_accessible(epoch):
            return NOT_ACCESSIBLE
        return problem

    def fail(self, epoch: int, why: str) -> None:
        """On the primary: counts an epoch as a failed save, because it was due and could not be saved."""
        failed = SaveResult(epoch=epoch, committed=False, detail=why, blocked_secs=0.0, secs=0.0, nodes={})
        self._ended.append(failed)

    def exists(self, epoch: int) -> bool:
        """Whether an epoch is on storage."""
        return self._backend is not None and epoch in self._backend.epochs()

    def save(self, epoch: EpochToSave, verdict: EpochVerdict) -> None:
        """Begins to save an epoch if that was decided. If it is the last, `finish` may try it once more."""
        self._retry = epoch if epoch.force and verdict.retry else None
        if verdict.save:
            self._begin(epoch)

    def _begin(self, epoch: EpochToSave) -> None:
        backend = self._backend
        if backend is None:
            return
        began = time.monotonic()
        try:
            if epoch.exists:
                backend.allow_overwrite(epoch.number)
            force = epoch.force or epoch.exists
            if backend.save(epoch.number, epoch.prepared, epoch.metrics, epoch.notes, force):
                self._last_began = began
        except CoordinationTimeoutError:
            raise
        except Exception as error:
            logging.warning("%s %d could not be saved: %s", self._unit, epoch.number, say(error))
            self.fail(epoch.number, say(error))
        self.blocked_secs += time.monotonic() - began

    # -- how saves end -------------------------------------------------------------------------------------------

    def take_results(self) -> list[dict[str, Any]]:
        """On the primary: how saves ended since the last call, as JSON; notifies the metadata handler."""
        results = [*self._ended, *(self._backend.outcomes() if self._backend is not None else ())]
        self._ended = []
        results.sort(key=lambda one: one.epoch)
        for one in results:
            self._handler.saved(one)
        return [{**vars(one), "nodes": dict(one.nodes)} for one in results]

    def enter(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Enters how saves ended, oldest first, as all processes know it; each has the fields of a `SaveResult`."""
        for one in results:
            self._secs_by_node.update(one["nodes"])
            if one["committed"]:
                self._failures_in_a_row = 0
                self.last_committed_epoch = one["epoch"]
            else:
                self._failures_in_a_row += not one["behind"]  # the saves that it waited for count
                self.failed = (*self.failed, (one["epoch"], one["detail"]))
                said = "%s %d was not saved, training goes on: %s"
                logging.warning(said, self._unit, one["epoch"], one["detail"])

    def too_many_failures(self) -> TooManyFailures | None:
        """Which saves in a row have failed; None unless they end the run."""
        limit = self._max_failures_in_a_row
        failures = self._failures_in_a_row
        if limit is None or failures <= limit:
            return None
        failed, reason = self.failed[-1]
        many = f"{failures} saves in a row have failed, more than max_consecutive_save_failures={limit}"
        return TooManyFailures(f"{many}; the last, of {self._unit} {failed}: {reason}")

    def settle(self) -> None:
        """Waits for the saves in flight. How they ended is told with the next results of the run."""
        if self._backend is not None:
            self._backend.drain()
            self._ended += self._backend.outcomes()

    # -- the end of the run --------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Waits for the saves in flight, and enters how they ended. Nothing more is saved in this run."""
        backend = self._backend
        if backend is None:
            return
        self.enter(self._calls.collective("last results", backend.drain, lambda _: self.take_results()))

    def finish(self, epoch: int) -> LastSave:
        """Waits for the saves in flight. The last epoch, if it could not be saved, is tried once more."""
        backend = self._backend
        if backend is None:
            return Saved()

        def report() -> str | None:
            backend.drain()
            return backend.fenced_off()

        def decide(fenced_off: list[str | None]) -> dict[str, Any]:
            results = self.take_results()
            why = next((one for one in fenced_off if one is not None), None)
            saved = self.last_committed_epoch == epoch or backend.discarded == epoch
            saved = saved or any(one["committed"] and one["epoch"] == epoch for one in results)
            retry = self._retry is not None and not saved and why is None
            retry = retry and self._handler.cp_accessible(epoch)
            return {"results": results, "saved": saved, "fenced_off": why, "retry": retry}

        for _ in range(2):
            answer = self._calls.collective("last save", report, decide)
            self.enter(answer["results"])
            if answer["saved"]:
                return Saved()
            if answer["fenced_off"] is not None:
                return FencedOff(answer["fenced_off"])
            retry = self._retry
            self._retry = None
            if retry is None or not answer["retry"]:
                break
            self._begin(retry)
        unsaved = dict(self.failed).get(epoch)
        if unsaved is None:  # the epoch after it was left in the middle and is dropped
            said = "%s %d was not to be saved, and is lost with what came after"
            logging.warning(said, self._unit, epoch)
            return Saved()
        logging.error("%s %d, the last, was not saved: %s", self._unit, epoch, unsaved)
        return Unsaved(unsaved)
