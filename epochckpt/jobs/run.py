"""One run of a job, from setup to the last save. The order of steps is that of Caffe2's JobRunner.

Every process goes through the same steps. An epoch is one exchange: each process trains the epoch and reports what its
stop conditions say, whether it left the epoch in the middle, and whether it can save; the primary decides from all
reports, and adds how earlier saves have ended. So stop, preemption and the results of saves are common to all
processes. A save that fails never stops training; all processes know of it after their next exchange.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from epochckpt.errors import CoordinationTimeoutError, InvalidArgumentError, say
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import first_epoch, result, stop
from epochckpt.jobs.backends.base import BESIDE, CheckpointBackend, Names, Restored
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.job import ComputedCondition, Job, TaskGroup
from epochckpt.jobs.preemption import Notice, Stopper
from epochckpt.jobs.progress import ShowEpoch
from epochckpt.jobs.resume import check_targets, choose, warn_of_types
from epochckpt.jobs.session import Session
from epochckpt.manager import HandlerNotifier, SaveResult

PREEMPTED, FINISHED, FENCED_OFF = "preempted", "was finished already", "fenced off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a runner was asked for; see `JobRunner`."""

    resume_from_epoch: int | None
    resume: str
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    deadline_secs: float | None
    max_consecutive_save_failures: int | None
    unsaved_blobs: str


@dataclasses.dataclass
class _TrainedEpoch:
    """An epoch as this process has trained it."""

    number: int
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the primary's
    preempted: bool = False  # the preemption notice has reached all processes
    prepared: Any = None  # what the backend saves, see `CheckpointBackend.prepare`


@dataclasses.dataclass(kw_only=True)
class _Verdict:
    """What the primary has decided at the end of an epoch; the same on all processes."""

    stop: dict[str, str]  # why the run ends, by the stop condition's `repr`
    interrupted: bool  # a process left the epoch in the middle
    save: bool  # the epoch is saved now
    retry: bool  # if this is the last epoch and is not saved, it is tried once more at the end of the run
    exists: bool  # the epoch is on storage and is to be replaced
    fenced_off: str  # how a process learned that a newer run has taken over; empty if none has
    results: list[dict[str, Any]]  # of saves that have ended, as JSON


class TrainingRun:
    """One run of a job in a session that has the job's nodes. Without a backend nothing is saved.

    Attributes:
        names: the blobs that are checkpointed, by node of this process; empty before that is known.
    """

    def __init__(
        self,
        job: Job,
        settings: RunSettings,
        session: Session,
        exchange: Exchange,
        backend: CheckpointBackend | None,
        handler: HandlerNotifier,
        notice: Notice,
        show_epoch: ShowEpoch,
        upload: Callable[[int], TaskGroup | None],
    ):
        self._job, self._settings, self.session, self._exchange = job, settings, session, exchange
        self.backend, self._handler, self._notice = backend, handler, notice
        self._show_epoch, self._upload = show_epoch, upload
        self.names: Names = {}
        self._ledger = result.Ledger()
        self._ended: list[SaveResult] = []  # saves that have ended and were not reported to the other processes yet
        self._retry: Callable[[], None] | None = None  # saves the last epoch once more
        self._began, self._earlier_secs = time.monotonic(), 0.0
        self._epoch, self._partial, self._reason, self._unsaved = 0, False, "", ""
        self._finished = self._preempted = self._fenced_off = False
        self._resumed_from: int | None = None
        self._in_epoch: int | None = 0  # None when the loop is over
        self._looked_back = False
        self._stop_states: Mapping[str, Any] = {}  # as they were after the last epoch that the conditions were shown

    def train(self) -> result.RunResult:
        """Runs the job; see `JobRunner.train`."""
        # Setup runs at every start: it makes the live objects, and says how blobs come back.
        self._job.reset()
        self._run_group(self._job.setup_group)

        # Either everything comes back from storage, or init makes it and epoch 0 is saved.
        restored = self._restore()
        if restored is None:
            self._initialize()
        else:
            self._agree_on_names(restored.names)
            if self._is_finished(restored):
                self._finished, self._reason = True, FINISHED
                self._preempted = self._notice.ask(self._epoch)
                logging.info("training was finished after epoch %d already: nothing to train", self._epoch)
        if self._notice.heard and not self._finished:
            self._preempted, self._reason = True, PREEMPTED

        # An epoch that was saved in the middle is entered again.
        while not self._reason:
            self._train_epoch(self._epoch if self._partial else self._epoch + 1)
        self._in_epoch = None

        # What follows the loop needs the last epoch on storage, and is left to the next start when time is short.
        if not self._fenced_off:
            self._drain()
        if not self._preempted and not self._fenced_off:
            self._conclude()
        self._handler.run_ended(self._epoch, self._reason)
        return self._result()

    # -- before the first epoch ----------------------------------------------------------------------------------

    def _restore(self) -> Restored | None:
        """Restores the epoch that the run goes on from, if there is one."""
        backend = self.backend
        if backend is None:
            return None
        found: list[Restored | None] = []
        spaces = self.session.workspaces()

        def restore() -> float:
            began, settings = time.monotonic(), self._settings
            named, resume = settings.resume_from_epoch, settings.resume
            found.append(restored := choose(backend, named, resume, self._exchange, self._handler))
            if restored is not None:
                declared = {name for workspace in spaces.values() for name in workspace.targets}
                check_targets(restored, spaces, self._chosen(sorted(declared)), backend.directory)
            return time.monotonic() - began

        secs = self._exchange.gather("restore", restore, list)
        (restored,) = found
        if restored is None:
            return None
        self._epoch = self._in_epoch = self._resumed_from = self._ledger.last_committed = restored.epoch
        self._partial = bool(restored.notes.get("partial"))
        earlier = restored.notes.get("total_secs")
        self._earlier_secs = float(earlier) if isinstance(earlier, int | float) else 0.0
        self._stop_states = restored.notes.get("stop") or {}
        stop.load_states(self._job.stop_conditions, restored.notes.get("stop"))
        for workspace in spaces.values():
            workspace.epoch = restored.epoch
        self._handler.report("checkpoint_load", dict(zip(self.session.nodes, secs, strict=False)))
        logging.info("resumed from epoch %d%s", restored.epoch, " (partial)" if self._partial else "")
        return restored

    def _initialize(self) -> None:
        """From scratch: runs init and saves epoch 0. The blobs that exist then are checkpointed."""
        declared = {node: blob_lib.with_targets(ws) for node, ws in self.session.workspaces().items()}
        self._run_group(self._job.init_group)
        spaces = self.session.workspaces()
        self._agree_on_names({node: list(ws) if node in self._kept_nodes() else [] for node, ws in spaces.items()})
        if self.backend is not None:
            for node, names in self.names.items():
                warn_of_types(spaces[node], names, declared[node])
            epoch = _TrainedEpoch(0)
            verdict = self._agree(epoch, lambda: self._report(epoch, [], False))
            self._save(epoch, verdict, force=True)
        self._notice.ask(0)

    def _agree_on_names(self, names: Names) -> None:
        names = {node: self._chosen(blobs) for node, blobs in names.items()}
        if self.backend is not None:
            self.backend.agree_on_names(self.session, self._exchange, names)
            self.names = names

    def _is_finished(self, restored: Restored) -> bool:
        """Whether nothing is left to train: asked only when the run resumes by itself.

        The stop conditions decide, as they are now, from what was recorded. A condition that only training can answer
        does not end the run: a task's output, a blob, a callable that fails here. A callable may count its calls: it is
        asked only if the run had ended.
        """
        if self._settings.resume_from_epoch is not None or self._partial:
            return False
        metrics = restored.notes.get("metrics")
        ctx = self._context(restored.epoch, metrics if isinstance(metrics, dict) else {})
        ctx = dataclasses.replace(ctx, elapsed_secs=0.0, total_secs=self._earlier_secs)  # nothing has been trained yet

        def holds(condition: stop.Condition) -> bool:
            if not stop.is_foreign(condition):
                return condition.holds(ctx)
            try:
                return bool(restored.notes.get("finished")) and condition.holds(ctx)
            except Exception as error:
                logging.warning(
                    "stop condition %r cannot be evaluated before an epoch has been trained, so one is: %s",
                    condition,
                    say(error),
                )
                return False

        def report() -> bool:
            held = [holds(condition) for condition in self._job.stop_conditions]
            stop.load_states(self._job.stop_conditions, restored.notes.get("stop"))  # callables may have counted this
            return any(held)

        return self._exchange.gather("whether training is over", report, any)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _train_epoch(self, number: int) -> None:
        self._in_epoch = number
        stopper = Stopper(self._notice, self._exchange, self._job.resumable, self._settings.deadline_secs)
        for workspace in self.session.workspaces().values():
            workspace.epoch = number
            workspace.set_stopper(stopper.of_one_node())
        epoch = _TrainedEpoch(number)

        def train() -> dict[str, Any]:
            # Conditions on metrics answer alike everywhere: every process shows them the primary's.
            returned = self.session.run(self._job.epoch_group)
            primary = self.session.nodes[0]
            epoch.metrics = self._exchange.broadcast(
                f"metrics of epoch {number}", lambda: merge_metrics(returned.get(primary, []))
            )
            epoch.preempted = self._notice.ask(number)

            # Every condition looks at every finished epoch: one that counts must not miss any.
            reasons: list[str | None] = []
            if not stopper.stopped:
                self._look_back(epoch, returned)
                ctx = self._context(number, epoch.metrics, epoch.preempted)
                conditions = self._job.stop_conditions
                answers = [stop.checked(c, c(ctx), number) for c in conditions]
                self._stop_states = stop.save_states(conditions)
                reasons = [_reason(c, true, ctx) for c, true in zip(conditions, answers, strict=True)]
            return self._report(epoch, reasons, stopper.stopped)

        verdict = self._agree(epoch, train)
        if verdict.fenced_off:
            self._end_fenced_off(number, verdict.fenced_off)
            return

        # A run that was preempted has not finished, unless a condition says so that looks at something else.
        stops = {} if verdict.interrupted else verdict.stop
        if epoch.preempted:
            stops = {condition: why for condition, why in stops.items() if why != repr(stop.preempted)}
        self._finished, self._preempted = bool(stops), epoch.preempted
        self._reason = "; ".join([PREEMPTED] * epoch.preempted + list(stops.values()))
        if verdict.interrupted and not self._job.resumable:
            logging.warning("epoch %d was left in the middle and is dropped; epoch %d is the last", number, number - 1)
            return

        self._epoch, self._partial = number, verdict.interrupted
        self._show_epoch(number, epoch.metrics)
        self._save(epoch, dataclasses.replace(verdict, stop=stops), force=bool(self._reason))

    def _report(self, epoch: _TrainedEpoch, reasons: Sequence[str | None], interrupted: bool) -> dict[str, Any]:
        """What this process reports at the end of an epoch; prepares the save.

        Args:
            epoch: the epoch.
            reasons: of each stop condition why it is true here, "" if it is false, None if it has no vote here.
            interrupted: this process left the epoch in the middle.
        """
        problem, backend = "", self.backend
        if backend is not None and (self._job.resumable or not interrupted):
            try:
                epoch.prepared = backend.prepare(epoch.number, self.names)
            except Exception as error:
                problem = say(error)
        fenced_off = "" if backend is None else backend.fenced_off()
        return {"reasons": reasons, "interrupted": interrupted, "problem": problem, "fenced_off": fenced_off}

    def _agree(self, epoch: _TrainedEpoch, report: Callable[[], dict[str, Any]]) -> _Verdict:
        """The exchange at the end of an epoch; see `_report`."""
        conditions, backend = self._job.stop_conditions, self.backend

        def decide(reports: list[dict[str, Any]]) -> dict[str, Any]:
            # A condition is true if it is on any process that has a vote, and some process must have one.
            stops: dict[str, str] = {}
            voters = [r["reasons"] for r in reports if r["reasons"]]
            for condition, votes in zip(conditions, zip(*voters, strict=True), strict=False):
                if isinstance(condition, ComputedCondition) and all(vote is None for vote in votes):
                    raise InvalidArgumentError(f"stop condition {condition!r}: {condition.missing}")
                if any(votes):
                    stops[repr(condition)] = next(filter(None, votes))

            # The epoch is saved if every process can save its part, and storage can be reached.
            refusal = problem = next((r["problem"] for r in reports if r["problem"]), "")
            accessible = backend is None or problem or self._handler.cp_accessible(epoch.number, backend.accessible)
            if not accessible:
                refusal = "the metadata handler does not say that the storage can be reached"
            if refusal:
                self._ended.append(SaveResult(epoch.number, False, refusal, 0.0, 0.0, {}))
            verdict = _Verdict(
                stop=stops,
                interrupted=any(r["interrupted"] for r in reports),
                save=not refusal,
                retry=not problem,
                exists=backend is not None and epoch.number in backend.epochs(),
                fenced_off=next((r["fenced_off"] for r in reports if r["fenced_off"]), ""),
                results=self._take_results(),
            )
            return dataclasses.asdict(verdict)

        verdict = _Verdict(**self._exchange.gather(f"end of epoch {epoch.number}", report, decide))
        self._ledger.add(verdict.results)
        if not verdict.fenced_off:
            self._ledger.check(self._settings.max_consecutive_save_failures)
        return verdict

    def _look_back(self, epoch: _TrainedEpoch, returned: Mapping[str, Sequence[Any]]) -> None:
        """Once, after the first epoch: names what its tasks have made that will be lost."""
        if self._looked_back:
            return
        self._looked_back = True
        first_epoch.check_metrics(returned, self._job.epoch_group.tasks(), epoch.metrics, self.session.nodes[0])
        if self.backend is not None:
            spaces = {node: ws for node, ws in self.session.workspaces().items() if node in self._kept_nodes()}
            first_epoch.check_blobs(epoch.number, spaces, self.names, self._chosen, self._settings.unsaved_blobs)

    # -- saving --------------------------------------------------------------------------------------------------

    def _save(self, epoch: _TrainedEpoch, verdict: _Verdict, force: bool) -> None:
        """Begins to save an epoch. The last one of a run (`force`) may be tried once more."""
        backend, number = self.backend, epoch.number
        if backend is None:
            return
        more = {"finished": list(verdict.stop) or None, "metrics": dict(epoch.metrics)}
        notes = {**self._notes(self._partial), **more}

        def save() -> None:
            began = time.monotonic()
            try:
                if verdict.exists:  # a part of the epoch, or what `save_checkpoints` has saved as the epoch
                    backend.allow_overwrite(number)
                backend.save(number, epoch.prepared, dict(epoch.metrics), notes, force or verdict.exists)
            except CoordinationTimeoutError:
                raise
            except Exception as error:
                logging.warning("epoch %d could not be saved: %s", number, say(error))
                self._ended.append(SaveResult(number, False, say(error), 0.0, 0.0, {}))
            self._ledger.blocked_secs += time.monotonic() - began

        self._retry = save if force and verdict.retry else None
        if verdict.save:
            save()

    def _take_results(self) -> list[dict[str, Any]]:
        """On the primary: how saves ended since the last call, as JSON; notifies the metadata handler."""
        results, self._ended = [*self._ended, *(self.backend.outcomes() if self.backend is not None else ())], []
        results.sort(key=lambda one: one.epoch)
        for one in results:
            self._handler.saved(one)
        return [{**vars(one), "nodes": dict(one.nodes)} for one in results]

    def _drain(self) -> None:
        """Waits for the saves in flight. The last epoch, if it could not be saved, is tried once more."""
        backend, epoch = self.backend, self._epoch
        if backend is None:
            return

        def report() -> str:
            backend.drain()
            return backend.fenced_off()

        def decide(fenced_off: list[str]) -> dict[str, Any]:
            results = self._take_results()
            saved = self._ledger.last_committed == epoch or backend.discarded(epoch)
            saved = saved or any(one["committed"] and one["epoch"] == epoch for one in results)
            answer = {"results": results, "saved": saved, "fenced_off": next(filter(None, fenced_off), "")}
            retry = self._retry is not None and not saved and not answer["fenced_off"]
            return {**answer, "retry": retry and self._handler.cp_accessible(epoch, backend.accessible)}

        for _ in range(2):
            answer = self._exchange.gather("last save", report, decide)
            self._ledger.add(answer["results"])
            if answer["saved"]:
                return
            if answer["fenced_off"]:
                self._end_fenced_off(epoch, answer["fenced_off"])
                return
            if self._retry is None or not answer["retry"]:
                break
            retry, self._retry = self._retry, None
            retry()
        self._unsaved = dict(self._ledger.failed).get(epoch, "it was not asked for")
        logging.error("the last epoch, %d, was not saved: %s", epoch, self._unsaved)

    def _notes(self, partial: bool) -> dict[str, Any]:
        return {
            "version": 1,
            "nodes": list(self.session.nodes),
            "partial": partial,
            "stop": self._stop_states,
            "total_secs": self._earlier_secs + time.monotonic() - self._began,
        }

    def notes_beside(self, epoch: int, session: Session) -> dict[str, Any]:
        """The notes for an epoch that `JobRunner.save_checkpoints` is about to save while this run goes on.

        Waits for the run's own saves, and keeps their results: those that come later are not the run's.

        Returns:
            In this run's session the notes with which a run may go on from the epoch.
        """
        backend = self.backend
        if backend is not None:
            backend.drain()
            self._ended += backend.outcomes()
        own, current = session is self.session, self._in_epoch
        notes = self._notes(current == epoch and self._job.resumable) if own else {}
        if current is not None and (epoch > current or not own):
            notes[BESIDE] = True
        if current is not None and epoch > current:
            logging.warning(
                "epoch %d is saved by save_checkpoints() while the run is in epoch %d; the run goes on with its own "
                "numbers. %s",
                epoch,
                current,
                "A metadata handler takes it for the newest epoch until the run saves its next one"
                if backend is not None and backend.chooses
                else "A resumed run does not go on from it unless it is named: resume_from_epoch=…",
            )
        return notes

    # -- after the last epoch ------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Upload, download, exit. A run that is preempted here does all of it again when it is started again."""
        upload = None
        if self._ledger.last_committed == self._epoch:
            upload = self._together("upload", lambda: self._upload(self._epoch))
        for group in (upload, self._job.download_group, self._job.exit_group):
            self._preempted = self._notice.ask(self._epoch)
            if self._preempted:
                return
            if group is not None:
                self._run_group(group)
        self._preempted = self._notice.ask(self._epoch)

    def _end_fenced_off(self, epoch: int, why: str) -> None:
        """A newer run saves to the directory: whatever this one would train could not be saved."""
        self._epoch, self._fenced_off, self._reason, self._unsaved = epoch, True, f"{FENCED_OFF}: {why}", why
        logging.error("the run ends after epoch %d: %s", epoch, why)

    def _result(self) -> result.RunResult:
        elapsed, ledger = time.monotonic() - self._began, self._ledger
        return result.RunResult(
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
            total_secs=self._earlier_secs + elapsed,
        )

    # -- helpers -------------------------------------------------------------------------------------------------

    def _run_group(self, group: TaskGroup) -> None:
        """Runs a group that runs once; an error on one process is raised on all."""
        for workspace in self.session.workspaces().values():
            workspace.set_stopper(self._notice.poll)
        self._together(f"group {group.name}", lambda: self.session.run(group))

    def _together(self, what: str, fn: Callable[[], Any]) -> Any:
        """Calls `fn` on every process; an error of one is raised on all."""
        returned: list[Any] = []
        self._exchange.gather(what, lambda: returned.append(fn()), lambda _: None)
        return returned[0]

    def _chosen(self, names: Iterable[str]) -> list[str]:
        return blob_lib.chosen(names, self._settings.include, self._settings.exclude)

    def _kept_nodes(self) -> Sequence[str]:
        return self._job.nodes_to_checkpoint() or self.session.nodes

    def _context(self, epoch: int, metrics: Mapping[str, Any], preempted: bool = False) -> stop.Context:
        elapsed = time.monotonic() - self._began
        return stop.Context(
            epoch=epoch,
            metrics=metrics,
            workspace=self.session.root,
            elapsed_secs=elapsed,
            total_secs=self._earlier_secs + elapsed,
            preempted=preempted,
        )


def _reason(condition: stop.Condition, true: bool, ctx: stop.Context) -> str | None:
    """Why a condition is true after an epoch; "" if it is not; None if this process has no vote on it."""
    if isinstance(condition, ComputedCondition) and not condition.values(ctx.workspace):
        return None
    return stop.why(condition, ctx) if true else ""


def merge_metrics(returned: Iterable[Any]) -> dict[str, bool | int | float]:
    """One mapping of the mappings that the tasks of a node returned, with Python scalars as values.

    A value that is still being computed is waited for. What is no mapping is left out.

    Raises:
        InvalidArgumentError: two tasks returned a metric of the same name, or a metric is not a scalar.
    """
    merged: dict[str, bool | int | float] = {}
    for name, value in (pair for one in returned if isinstance(one, Mapping) for pair in one.items()):
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the names of metrics are strings, got {name!r}")
        if name in merged:
            raise InvalidArgumentError(f"two tasks returned a metric {name!r}; rename one")
        scalar = value
        if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
            scalar = np.asarray(value).item()
        if not isinstance(scalar, bool | int | float):
            shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
            raise InvalidArgumentError(
                f"metric {name!r} must be a scalar (a number, or a 0-d array), got a {type(value).__name__}{shape}"
            )
        merged[name] = scalar
    return merged
