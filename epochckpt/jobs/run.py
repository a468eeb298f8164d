"""One run of a job, from setup to the last save. The order of steps is that of Caffe2's JobRunner.

Every process goes through the same steps; whatever decides about them has been agreed on (see `boundary`).

The metrics of an epoch: what its tasks returned, as plain scalars.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging

from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import first_epoch, stop
from epochckpt.jobs.backends.base import BESIDE, CheckpointBackend, Names, Restored
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.job import Job, OfEpoch, TaskGroup
from epochckpt.jobs.preemption import Notice, Stopper
from epochckpt.jobs.progress import Bar
from epochckpt.jobs.reporting import Handler
from epochckpt.jobs.result import RunResult
from epochckpt.jobs.resume import check_targets, choose, warn_of_types
from epochckpt.jobs.saves import RunCheckpoints
from epochckpt.jobs.session import Session
from epochckpt.manager import SaveResult


def merged(returned: Iterable[Any]) -> dict[str, Any]:
    """One mapping of what the tasks of one node returned; what is no mapping is left out.

    Raises:
        InvalidArgumentError: two tasks gave a metric of one name, or one is not a scalar.
    """
    out: dict[str, Any] = {}
    for mapping in returned:
        if not isinstance(mapping, Mapping):
            continue
        for name, value in mapping.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"the names of metrics are strings, got {name!r}")
            if name in out:
                raise InvalidArgumentError(f"two tasks returned a metric {name!r}; rename one")
            out[name] = scalar(name, value)
    return out


def scalar(name: str, value: Any) -> bool | int | float:
    """A metric as a Python scalar; waits for it, if it is still being computed.

    Raises:
        InvalidArgumentError: it is none.
    """
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
        plain = np.asarray(value).item()
        if isinstance(plain, bool | int | float):
            return plain
    shown = f"{type(value).__name__} of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
    raise InvalidArgumentError(f"metric {name!r} must be a scalar (a number, or a 0-d array), got a {shown}")


T = TypeVar("T")

PREEMPTED, FINISHED, FENCED_OFF = "preempted", "was finished already", "fenced off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a runner was asked for; see `JobRunner`."""

    resume_from_epoch: int | None
    resume: str
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    deadline_secs: float | None
    max_consecutive_save_failures: int | None
    unsaved_blobs: str


@dataclasses.dataclass
class _Verdict:
    """What all nodes have agreed on at the end of an epoch."""

    stop: dict[str, str]  # why, by the condition's repr
    interrupted: bool
    save: bool
    fenced_off: str  # how a node learned that a newer run has taken over
    again: bool  # if it fails, it may be tried once more
    exists: bool  # it is on storage, and is to be replaced
    outcomes: list[dict[str, Any]]


class TrainingRun:
    """One run.

    Args:
        job: what to run.
        settings: how.
        session: where; it has the job's nodes.
        exchange: the other processes.
        backend: the checkpoint manager, or None.
        handler: the metadata handler.
        notice: hears of preemption.
        bar: shows progress.
        upload: gives the group that uploads an epoch, if there is one.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        session: Session,
        exchange: Exchange,
        backend: CheckpointBackend | None,
        handler: Handler,
        notice: Notice,
        bar: Bar,
        upload: Callable[[int], TaskGroup | None],
    ):
        self._job, self._settings, self._session, self._exchange = job, settings, session, exchange
        self._backend, self._handler, self._notice, self._bar = backend, handler, notice, bar
        self._upload = upload
        self._saves = RunCheckpoints(backend, handler, exchange)
        self._names: Names = {}
        self._agreed = False
        self._began, self._before = time.monotonic(), 0.0
        self._epoch, self._partial, self._reason, self._unsaved = 0, False, "", ""
        self._finished = self._preempted = self._fenced_off = False
        self._resumed_from: int | None = None
        self._at: int | None = 0
        self._looked_back = False
        self._states: Mapping[str, Any] = {}  # of the stop conditions, after the last epoch that they were shown

    @property
    def session(self) -> Session:
        """Where it runs."""
        return self._session

    @property
    def names(self) -> Names:
        """The blobs that are checkpointed, by node of this process; empty before that is known."""
        return self._names if self._agreed else {}

    # -- from beginning to end -----------------------------------------------------------------------------------

    def train(self) -> RunResult:
        """Runs the job; see `JobRunner.train`."""
        self._job.start_afresh()
        self._phase(self._job.setup_group)
        restored = self._together("restore", self._restore)
        if restored is None:
            spaces = self._session.workspaces()
            declared = {n: blob_lib.with_targets(ws) for n, ws in spaces.items()}
            self._phase(self._job.init_group)
            kept = self._job.nodes_to_checkpoint() or self._session.nodes
            self._names = {n: list(ws) if n in kept else [] for n, ws in self._session.workspaces().items()}
        self._names = {n: self._chosen(blobs) for n, blobs in self._names.items()}
        if self._backend is not None:
            self._backend.agree_on_names(self._session, self._exchange, self._names)
            self._agreed = True
            for node, blobs in self._names.items() if restored is None else ():
                warn_of_types(spaces[node], blobs, declared[node])
        if restored is None:
            self._begin()
        elif self._is_finished(restored):
            self._finished, self._reason = True, FINISHED
            self._preempted = self._notice.ask(self._epoch)
            logging.info("training was finished after epoch %d already: nothing to train", self._epoch)
        if self._notice.heard and not self._finished:
            self._preempted, self._reason = True, PREEMPTED
        while not self._reason:
            self._train_epoch(self._epoch if self._partial else self._epoch + 1)
        self._at = None
        if not self._fenced_off:
            self._unsaved, fenced_off = self._saves.drain(self._epoch)
            if fenced_off:
                self._end_fenced_off(self._epoch, fenced_off)
        if not self._preempted and not self._fenced_off:
            self._conclude()
        self._handler.run_ended(self._epoch, self._reason)
        return self._result()

    def _restore(self) -> Restored | None:
        """Restores what is to be resumed, if anything."""
        if self._backend is None:
            return None
        began = time.monotonic()
        restored = choose(
            self._backend,
            self._settings.resume_from_epoch,
            self._settings.resume,
            self._exchange,
            self._handler,
        )
        if restored is None:
            return None
        spaces = self._session.workspaces()
        declared = {name for workspace in spaces.values() for name in workspace.targets}
        check_targets(restored, spaces, self._chosen(sorted(declared)), self._backend.directory)
        self._epoch = self._at = self._resumed_from = self._saves.ledger.last_committed = restored.epoch
        self._names = restored.names
        self._partial = bool(restored.notes.get("partial"))
        before = restored.notes.get("total_secs")
        self._before = float(before) if isinstance(before, int | float) else 0.0
        stop.load_states(self._job.stop_conditions, restored.notes.get("stop"))
        self._states = restored.notes.get("stop") or {}
        for workspace in self._session.workspaces().values():
            workspace.epoch = restored.epoch
        secs = self._exchange.gather("restored", time.monotonic() - began, list)
        self._handler.report("checkpoint_load", dict(zip(self._session.nodes, secs, strict=False)))
        logging.info("resumed from epoch %d%s", restored.epoch, " (partial)" if self._partial else "")
        return restored

    def _begin(self) -> None:
        """From scratch: saves epoch 0."""
        if self._backend is not None:
            prepared, problem = self._saves.prepare(0, self._names)
            verdict = self._meet(0, [], False, problem)
            self._save(0, prepared, {}, verdict, force=True)
        self._notice.ask(0)

    def _is_finished(self, restored: Restored) -> bool:
        """Whether there is nothing left to train: asked only of automatic resumes.

        Decided by what the conditions say now of what was recorded. One that only training can tell is no reason to
        stop: a task's output, a blob, a callable that fails here. Callables, which may count how often they are called,
        are asked only if the run had ended.
        """
        if self._settings.resume_from_epoch is not None or self._partial:
            return False
        finished = bool(restored.notes.get("finished"))
        metrics = restored.notes.get("metrics")
        ctx = self._context(restored.epoch, metrics if isinstance(metrics, dict) else {})
        ctx = dataclasses.replace(ctx, elapsed_secs=0.0, total_secs=self._before)  # nothing has been trained yet

        def holds(condition: stop.Condition) -> bool:
            if not stop.is_foreign(condition):
                return condition.holds(ctx)
            try:
                return finished and condition.holds(ctx)
            except Exception as error:
                logging.warning(
                    "stop condition %r cannot be evaluated before an epoch has been trained, so one is: %s",
                    condition,
                    say(error),
                )
                return False

        def decide(found: list[bool]) -> bool:
            return any(found)

        try:
            held = [holds(condition) for condition in self._job.stop_conditions]
            mine: Any = any(held)
            stop.load_states(self._job.stop_conditions, restored.notes.get("stop"))  # callables may have counted this
        except Exception as error:
            mine = error
        return self._exchange.gather("whether training is over", mine, decide)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _train_epoch(self, epoch: int) -> None:
        self._at = epoch
        stopper = Stopper(self._notice, self._exchange, self._job.resumable, self._settings.deadline_secs)
        for workspace in self._session.workspaces().values():
            workspace.epoch = epoch
            workspace.ask_when_to_stop(stopper.of_one_node())
        try:
            returned = self._session.run(self._job.epoch_group)
            mine = merged(returned.get(self._session.nodes[0], [])) if self._exchange.primary else {}
        except BaseException as error:
            self._exchange.abort(error)
            raise
        metrics = self._exchange.broadcast(f"metrics of epoch {epoch}", lambda: mine)
        preempted = self._notice.ask(epoch)
        conditions, reasons = self._job.stop_conditions, []
        problem: Exception | str | None = None
        if not stopper.stopped:
            try:
                self._look_back(epoch, returned, metrics)
                ctx = self._context(epoch, metrics, preempted)
                answers = [stop.checked(c, c(ctx), epoch) for c in conditions]
                self._states = stop.save_states(conditions)
                reasons = [_reason(c, true, ctx) for c, true in zip(conditions, answers, strict=True)]
            except Exception as error:
                problem = error
        prepared = None
        if problem is None and not (stopper.stopped and not self._job.resumable):
            prepared, problem = self._saves.prepare(epoch, self._names)
        verdict = self._meet(epoch, reasons, stopper.stopped, problem)
        if verdict.interrupted:
            verdict.stop = {}
        if preempted:  # a part of a condition that is only true for that does not end the job
            verdict.stop = {c: why for c, why in verdict.stop.items() if why != repr(stop.preempted)}
        stops = verdict.stop
        if verdict.fenced_off:
            self._end_fenced_off(epoch, verdict.fenced_off)
            return
        self._finished, self._preempted = bool(stops), preempted
        self._reason = "; ".join([PREEMPTED] * preempted + list(stops.values()))
        if verdict.interrupted and not self._job.resumable:
            logging.warning("epoch %d was left in the middle and is dropped; epoch %d is the last", epoch, epoch - 1)
            return
        self._partial = verdict.interrupted
        self._epoch = epoch
        self._bar.at(epoch, metrics)
        self._save(epoch, prepared, metrics, verdict, force=bool(self._reason))

    def _look_back(self, epoch: int, returned: Mapping[str, Sequence[Any]], metrics: Mapping[str, Any]) -> None:
        """Once, after the first epoch: says what its tasks have made that will be lost."""
        if self._looked_back:
            return
        self._looked_back = True
        first_epoch.check_metrics(returned, self._job.epoch_group.tasks(), metrics, self._session.nodes[0])
        if self._backend is None:
            return
        kept = self._job.nodes_to_checkpoint() or self._session.nodes
        spaces = {node: ws for node, ws in self._session.workspaces().items() if node in kept}
        first_epoch.check_blobs(epoch, spaces, self._names, self._chosen, self._settings.unsaved_blobs)

    def _chosen(self, names: Iterable[str]) -> list[str]:
        return blob_lib.chosen(names, self._settings.include, self._settings.exclude)

    def _context(self, epoch: int, metrics: Mapping[str, Any], preempted: bool = False) -> stop.Context:
        elapsed = time.monotonic() - self._began
        return stop.Context(
            epoch=epoch,
            metrics=metrics,
            workspace=self._session.root,
            elapsed_secs=elapsed,
            total_secs=self._before + elapsed,
            preempted=preempted,
        )

    def _meet(
        self, epoch: int, reasons: list[str | None], interrupted: bool, problem: Exception | str | None
    ) -> _Verdict:
        """The one exchange at the end of an epoch.

        Args:
            epoch: its number.
            reasons: of each condition why it is true on this process, "" if it is false, None if it has no vote here.
            interrupted: the epoch was left in the middle.
            problem: why it cannot be saved; an exception is raised on all.
        """
        conditions = [repr(c) for c in self._job.stop_conditions]

        def decide(found: list[dict[str, Any]]) -> dict[str, Any]:
            left = any(f["interrupted"] for f in found)
            said = [[f["reasons"][i] for f in found if f["reasons"]] for i in range(len(conditions))]
            for condition, texts in zip(self._job.stop_conditions, said, strict=True):
                if texts and isinstance(condition, OfEpoch) and all(text is None for text in texts):
                    raise InvalidArgumentError(f"stop condition {condition!r}: {condition.unheard}")
            refused = next((f["problem"] for f in found if f["problem"]), None)
            able = refused is None
            if able and self._backend is not None and not self._saves.accessible(epoch):
                refused = "the metadata handler does not say that the storage can be reached"
            ended = self._saves.ended(None if refused is None else SaveResult(epoch, False, refused, 0.0, 0.0, {}))
            stops = {c: next(filter(None, texts)) for c, texts in zip(conditions, said, strict=True) if any(texts)}
            return {
                "stop": stops,
                "interrupted": left,
                "save": refused is None,
                "again": able,
                "fenced_off": next((f["fenced_off"] for f in found if f["fenced_off"]), ""),
                "exists": self._saves.exists(epoch),
                "outcomes": ended,
            }

        mine: Any = {"reasons": reasons, "interrupted": interrupted, "problem": problem}
        mine["fenced_off"] = self._saves.fenced_off()
        if isinstance(problem, Exception):
            mine = problem
        verdict = _Verdict(**self._exchange.gather(f"end of epoch {epoch}", mine, decide))
        self._saves.enter(verdict.outcomes)
        if not verdict.fenced_off:
            self._saves.ledger.check(self._settings.max_consecutive_save_failures)
        return verdict

    def _save(self, epoch: int, prepared: Any, metrics: Mapping[str, Any], verdict: _Verdict, force: bool) -> None:
        finished = list(verdict.stop) if self._finished else None
        notes = {**self._notes(self._partial), "finished": finished, "metrics": dict(metrics)}
        self._saves.begin(
            epoch,
            prepared,
            metrics,
            notes,
            now=verdict.save,
            force=force,
            again=force and verdict.again,
            replaces=verdict.exists,
        )

    def _notes(self, partial: bool) -> dict[str, Any]:
        return {
            "version": 1,
            "nodes": list(self._session.nodes),
            "partial": partial,
            "stop": self._states,
            "total_secs": self._before + time.monotonic() - self._began,
        }

    # -- what is saved beside it ---------------------------------------------------------------------------------

    @property
    def backend(self) -> CheckpointBackend | None:
        """The checkpoint manager, as this run uses it."""
        return self._backend

    def let_save(self, epoch: int, session: Session) -> dict[str, Any]:
        """Something is about to be saved that is not this run's own doing, as it is in the middle of an epoch perhaps.

        Waits for the run's own saves, so that it is known later which outcomes are theirs.

        Returns:
            The notes for it: in this run's session those of a run that may go on from it.
        """
        self._saves.settle()
        mine, at = session is self._session, self._at
        notes = self._notes(at == epoch and self._job.resumable) if mine else {}
        if at is not None and (epoch > at or not mine):
            notes[BESIDE] = True
        if at is not None and epoch > at:
            told = self._backend is not None and self._backend.chooses
            logging.warning(
                "epoch %d is saved by save_checkpoints() while the run is in epoch %d; the run goes on with its own "
                "numbers. %s",
                epoch,
                at,
                "A metadata handler takes it for the newest epoch until the run saves its next one"
                if told
                else "A resumed run does not go on from it unless it is named: resume_from_epoch=…",
            )
        return notes

    # -- the end -------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """After the loop: upload, download, exit; a run that is preempted here does it again when started again."""
        saved = self._saves.is_saved(self._epoch)
        upload = self._together("upload", lambda: self._upload(self._epoch)) if saved else None
        for group in (upload, self._job.download_group, self._job.exit_group):
            self._preempted = self._notice.ask(self._epoch)
            if self._preempted:
                return
            if group is not None:
                self._phase(group)
        self._preempted = self._notice.ask(self._epoch)

    def _phase(self, group: TaskGroup) -> None:
        """Runs a group that runs once; an error on one node is raised on all."""
        for workspace in self._session.workspaces().values():
            workspace.ask_when_to_stop(self._notice.poll)
        self._together(f"group {group.name}", lambda: self._session.run(group))

    def _together(self, what: str, fn: Callable[[], T]) -> T:
        try:
            value = fn()
        except BaseException as error:
            self._exchange.abort(error)
            raise
        self._exchange.gather(what, None, lambda found: None)
        return value

    def _end_fenced_off(self, epoch: int, why: str) -> None:
        """A newer run saves to the directory: whatever this one would train could not be saved."""
        self._epoch, self._fenced_off, self._reason, self._unsaved = epoch, True, f"{FENCED_OFF}: {why}", why
        logging.error("the run ends after epoch %d: %s", epoch, why)

    def _result(self) -> RunResult:
        elapsed, ledger = time.monotonic() - self._began, self._saves.ledger
        return RunResult(
            stop_reason=self._reason,
            epoch=self._epoch,
            partial=self._partial,
            last_committed_epoch=ledger.last_committed,
            unsaved=self._unsaved,
            failed_saves=tuple(ledger.failed),
            preempted=self._preempted,
            finished=self._finished,
            fenced_off=self._fenced_off,
            resumed_from=self._resumed_from,
            blocked_secs=ledger.blocked_secs,
            slowest_node=ledger.slowest_node,
            elapsed_secs=elapsed,
            total_secs=self._before + elapsed,
        )


def _reason(condition: stop.Condition, true: bool, ctx: stop.Context) -> str | None:
    """Why a condition is true after an epoch; "" if it is not; None if this process has no vote on it."""
    if isinstance(condition, OfEpoch) and not condition.values(ctx.workspace):
        return None
    return stop.why(condition, ctx) if true else ""
