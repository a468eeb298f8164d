"""A save that no run has begun: `JobRunner.save_checkpoints`, beside a run or without one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from absl import logging

from epochckpt.errors import SaveError
from epochckpt.jobs.backends.base import CheckpointBackend, Names
from epochckpt.jobs.job import Job
from epochckpt.jobs.notes import RunNotes
from epochckpt.jobs.run import TrainingRun
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.run_saves import NOT_ACCESSIBLE
from epochckpt.jobs.session import Session
from epochckpt.manager import HandlerNotifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Saved:
    """The blobs that are saved, and the backend that saves them."""

    backend: CheckpointBackend[Any]
    names: Names


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfBandSave:
    """Saves the workspaces of a session as they are now. Every process makes the same calls."""

    job: Job
    session: Session
    run: TrainingRun | None  # the runner's run, which goes on or has ended; None if it has had none
    backend: CheckpointBackend[Any]  # of this call; a run that goes on in the session has one of its own
    calls: RunCalls
    handler: HandlerNotifier
    introduce: Callable[[CheckpointBackend[Any]], None]  # tells the metadata handler which nodes save where

    def save(self, epoch: int) -> None:
        """Saves an epoch, and waits for the save. An epoch of this number is replaced.

        Raises:
            SaveError: the metadata handler does not say that the storage can be reached.
            Others: what the backend raises where it cannot save. A save that fails later is logged.
        """
        notes = RunNotes() if self.run is None else self.run.out_of_band_notes(epoch, self.session)
        saved = self._saved()
        backend = saved.backend
        accessible, exists = self.calls.broadcast("whether storage is there", lambda: self._look(epoch, backend))
        if not accessible:
            raise SaveError(epoch, NOT_ACCESSIBLE)
        prepared = self.calls.together("what is saved", lambda: backend.prepare(epoch, saved.names))
        if exists:
            backend.allow_overwrite(epoch)
        try:
            backend.save(epoch, prepared, {}, notes, True)
            backend.drain()
        finally:  # also of a save that raised: they are no results of the run
            for one in backend.outcomes():
                self.handler.saved(one)
                if not one.committed:
                    logging.warning("%s %d could not be saved: %s", self.job.unit, one.epoch, one.detail)

    def _saved(self) -> _Saved:
        """A run in this session, if there is or was one, has its backend and its blobs. Any other save has its own."""
        run = self.run
        if run is not None and run.backend is not None and run.names and run.session is self.session:
            return _Saved(backend=run.backend, names=run.names)
        self.backend.open(self.session, self.calls, out_of_band=run is not None and bool(run.names))
        kept = self.job.nodes_to_checkpoint() or self.session.nodes
        names = {node: list(ws) if node in kept else [] for node, ws in self.session.workspaces().items()}
        self.backend.agree_on_names(names)
        return _Saved(backend=self.backend, names=names)

    def _look(self, epoch: int, backend: CheckpointBackend[Any]) -> list[bool]:
        """On the primary: whether storage can be reached, and whether the epoch is there."""
        self.introduce(backend)
        return [self.handler.cp_accessible(epoch), epoch in backend.epochs()]
