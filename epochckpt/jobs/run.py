"""One run of a job, from setup to the last save. The order of steps is that of Caffe2's JobRunner.

An epoch is one collective call: each process trains the epoch and reports what its stop conditions say, whether it left
the epoch in the middle, and whether it can save; the primary decides from all reports, and adds how earlier saves have
ended. So stop, preemption and the results of saves are common to all processes. A save that fails never stops training.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt.errors import FencedError, InvalidArgumentError, say
from epochckpt.jobs import metrics as metric_lib
from epochckpt.jobs import stop
from epochckpt.jobs.backends.base import CheckpointBackend, Names, Restored
from epochckpt.jobs.epoch_verdict import EpochReport, EpochReports, EpochVerdict, reason_of
from epochckpt.jobs.job import Job, TaskGroup
from epochckpt.jobs.notes import EPOCH, RunNotes
from epochckpt.jobs.preemption import Notice, Stopper
from epochckpt.jobs.result import RunResult, ShowEpoch
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.run_names import RunNames
from epochckpt.jobs.run_saves import EpochToSave, RunSaves
from epochckpt.jobs.session import Session
from epochckpt.manager import HandlerNotifier

PREEMPTED = "preempted"
FINISHED = "was finished already"
FENCED_OFF = "fenced off"
UNSAVED = "too many saves have failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Arguments of `JobRunner`."""

    resume: str
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    deadline_secs: float | None
    max_consecutive_save_failures: int | None
    unsaved_blobs: str
    save_every_secs: float


@dataclasses.dataclass(frozen=True)
class _InEpoch:
    """The run is in this epoch. Before the first one, the number is that of the epoch from which the run goes on."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Over:
    """The run has trained its last epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Progress:
    """How far a run is. An epoch that is saved notes it, and a later run goes on from there."""

    where: _InEpoch | _Over = _InEpoch(0)
    begun: int = 0  # of a job that counts steps: what had been done when the epoch under way began
    trained: int = 0  # epochs that this process has trained to their end in this run
    stop_states: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # after the last epoch that was trained
    earlier_secs: float = 0.0  # that earlier runs of the job took

    @classmethod
    def noted_in(cls, restored: Restored) -> "_Progress":
        """Of a run that goes on from an epoch."""
        notes = restored.notes
        return cls(
            where=_InEpoch(restored.epoch),
            begun=restored.epoch if notes.begun is None else notes.begun,
            stop_states=notes.stop_states or {},
            earlier_secs=notes.total_secs or 0.0,
        )


@dataclasses.dataclass
class _TrainedEpoch:
    """An epoch as this process has trained it."""

    number: int
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the primary's
    preempted: bool = False  # the preemption notice has reached all processes
    first: bool = False  # the first of this run that this process has trained to its end
    interrupted: bool = False  # this process left the epoch in the middle
    prepared: Any = None  # what the backend saves, see `CheckpointBackend.prepare`


@dataclasses.dataclass(eq=False, kw_only=True)
class TrainingRun:
    """One run of a job in a session that has the job's nodes. Without a backend nothing is saved."""

    job: Job
    settings: RunSettings
    resume_from_epoch: int | None
    session: Session
    calls: RunCalls
    backend: CheckpointBackend | None
    handler: HandlerNotifier
    notice: Notice
    show_epoch: ShowEpoch
    upload: Callable[[int], TaskGroup | None]

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._progress = _Progress()
        self._result = RunResult(unit=self.job.unit)  # so far
        self._names = RunNames(
            job=self.job,
            include=self.settings.include,
            exclude=self.settings.exclude,
            unsaved_blobs=self.settings.unsaved_blobs,
            session=self.session,
            calls=self.calls,
            backend=self.backend,
        )
        self._saves = RunSaves(
            unit=self.job.unit,
            every_secs=self.settings.save_every_secs,
            max_failures_in_a_row=self.settings.max_consecutive_save_failures,
            calls=self.calls,
            backend=self.backend,
            handler=self.handler,
        )

    @property
    def names(self) -> Names:
        """The blobs that are checkpointed; empty before that is known."""
        return self._names.checkpointed

    def train(self) -> RunResult:
        """Runs the job; see `JobRunner.train`."""
        self._begin()
        while not self._result.stop_reason:  # an epoch that was saved in the middle is entered again
            self._train_epoch(self._result.epoch + (0 if self._result.partial else self.job.stride))
        self._progress = dataclasses.replace(self._progress, where=_Over())
        self._end()
        return self._result

    # -- before the first epoch ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Setup. Then either everything comes back from storage, or init makes it and epoch 0 is saved."""
        if self.calls.primary and all(condition is stop.preempted for condition in self.job.stop_conditions):
            remedy = "job.stop_when(ec.stop.max_epochs(…)), for example, ends it"
            logging.warning("the job has no stop condition: it trains until it is preempted or killed; %s", remedy)
        from_setup = self._set_up()
        try:
            restored = self._restore()
        except FencedError as error:  # of two runs that start at the same moment one is the newer one
            self._end_fenced_off(0, error.reason)
            return
        if restored is None:
            self._initialize(from_setup)
        else:
            self._go_on(restored, from_setup)
        if self.notice.heard and not self._result.finished:
            self._set(preempted=True, stop_reason=PREEMPTED)

    def _set_up(self) -> Names:
        """Setup runs at every start: it makes the live objects, and says how blobs come back. Returns what it made."""
        self.job.reset()
        self.session.unit = self.job.unit
        spaces = self.session.workspaces()
        before = {node: dict(ws) for node, ws in spaces.items()}
        self._run_group(self.job.setup_group)
        return {n: [b for b in ws if ws[b] is not before[n].get(b)] for n, ws in spaces.items()}

    def _restore(self) -> Restored | None:
        """Restores the epoch that the run goes on from, if there is one."""
        backend = self.backend
        if backend is None:
            return None
        outcome: list[Restored | None] = []

        def restore() -> float:
            began = time.monotonic()
            named = self.resume_from_epoch
            resume = self.settings.resume
            outcome.append(restored := backend.resume(named, resume, self.handler))
            if restored is not None:
                self._check_unit(restored, backend.directory)
                self._names.check_targets(restored, backend.directory)
            return time.monotonic() - began

        secs = self.calls.collective("restore", restore, list)
        (restored,) = outcome
        if restored is None:
            return None
        stop.load_states(self.job.stop_conditions, restored.notes.stop_states)
        for workspace in self.session.workspaces().values():
            workspace.epoch = restored.epoch
        self.handler.report("checkpoint_load", dict(zip(self.session.nodes, secs, strict=False)))
        partial = " (partial)" if restored.notes.partial else ""
        logging.info("resumed from %s%s", self._named(restored.epoch), partial)
        return restored

    def _go_on(self, restored: Restored, from_setup: Names) -> None:
        """Goes on from the restored epoch, unless training was finished with it."""
        epoch = restored.epoch
        self._progress = _Progress.noted_in(restored)
        self._set(epoch=epoch, resumed_from=epoch, partial=restored.notes.partial)
        self._saves.resumed_from(epoch)
        self._names.go_on(restored, from_setup)
        if self._is_finished(restored):
            self._set(finished=True, stop_reason=FINISHED, preempted=self.notice.ask(epoch))
            logging.info("training was finished after %s already: nothing to train", self._named(epoch))

    def _initialize(self, from_setup: Names) -> None:
        """From scratch: runs init and saves epoch 0. The blobs that exist then are checkpointed."""
        declared = self._names.declared()
        self._run_group(self.job.init_group)
        self._names.begin(declared)
        if self.backend is not None:
            epoch = _TrainedEpoch(0)
            self._save(epoch, self._agree(epoch, list), force=True)
        self.notice.ask(0)
        made = {node: list(blobs) for node, blobs in self.session.workspaces().items()}
        self._names.explain_left_out(made, from_setup)

    def _check_unit(self, restored: Restored, directory: str) -> None:
        """Refuses an epoch of a job that counted something else, unless the user has named it."""
        counted = restored.notes.counted
        unit = self.job.unit
        if restored.notes.is_of_run and counted != unit and self.resume_from_epoch is None:
            raise InvalidArgumentError(
                f"{directory}: {counted} {restored.epoch} is of a job that counts {counted}s, and this one counts "
                f"{unit}s: take another directory, make the job with unit={counted!r}, or name the number to go on "
                f"from (resume_from_epoch={restored.epoch})"
            )

    def _is_finished(self, restored: Restored) -> bool:
        """Whether nothing is left to train: asked only when the run resumes by itself.

        The stop conditions of today decide, by the recorded values. A condition that only training can answer does not
        end the run: a task's output, a blob, a callable that fails here. A callable may count its calls: it is
        asked only if the run had ended.
        """
        if restored.named or restored.notes.partial:
            return False
        notes = restored.notes
        conditions = self.job.stop_conditions
        ctx = self._context(restored.epoch, notes.metrics, 0.0)

        def holds(condition: stop.Condition) -> bool:
            if not stop.is_foreign(condition):
                return stop.held(condition, ctx)
            try:
                return bool(notes.finished) and condition.holds(ctx)
            except Exception as error:
                logging.warning("stop condition %r needs an epoch, so one is trained: %s", condition, say(error))
                return False

        def report() -> bool:
            held = [holds(condition) for condition in conditions]
            stop.load_states(conditions, notes.stop_states)  # callables may have counted this
            return any(held)

        return self.calls.collective("whether training is over", report, any)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _train_epoch(self, number: int) -> None:
        """Trains an epoch, does what the primary decides about the end of the run, and begins a save if it is time."""
        epoch = _TrainedEpoch(number)
        begun = self._progress.begun if self._result.partial else self._result.epoch
        self._progress = dataclasses.replace(self._progress, where=_InEpoch(number), begun=begun)
        steps = range(0) if self.job.unit == EPOCH else range(begun, number)
        stopper = Stopper(self.notice, self.calls, self.job.resumable, self.settings.deadline_secs)
        for workspace in self.session.workspaces().values():
            workspace.epoch = number
            workspace.steps = steps
            workspace.set_stopper(stopper.of_one_node())

        verdict = self._agree(epoch, lambda: self._run_epoch(epoch, stopper))
        if verdict.fenced_off:
            self._end_fenced_off(number, verdict.fenced_off)
            return
        if too_many := self._saves.too_many_failures():
            self._set(epoch=number, stop_reason=UNSAVED, unsaved=too_many)
            logging.error("the run ends after %s: %s", self._named(number), too_many)
            return

        # A run that was preempted has not finished, unless a condition other than `preempted` is true.
        stops = {} if verdict.interrupted else verdict.stop
        if epoch.preempted:
            stops = {condition: why for condition, why in stops.items() if why != repr(stop.preempted)}
        reason = "; ".join([PREEMPTED] * epoch.preempted + list(stops.values()))
        self._set(finished=bool(stops), preempted=epoch.preempted, stop_reason=reason)
        if verdict.interrupted and not self.job.resumable:
            left = self._named(number)
            last = self._named(self._result.epoch)
            logging.warning("%s was left in the middle and is dropped; %s is the last", left, last)
            return

        self._set(epoch=number, partial=verdict.interrupted)
        self.show_epoch(number, epoch.metrics)
        self._save(epoch, dataclasses.replace(verdict, stop=stops), force=bool(reason))

    def _run_epoch(self, epoch: _TrainedEpoch, stopper: Stopper) -> list[str | None]:
        """Runs the tasks, and shows what they returned to the stop conditions; see `_agree`."""
        # Conditions on metrics answer alike everywhere: every process shows them the primary's.
        number = epoch.number
        first_node = self.session.nodes[0]
        returned = self.session.run(self.job.epoch_group)
        epoch.metrics = self.calls.broadcast(
            f"metrics of {self._named(number)}", lambda: metric_lib.merge(returned.get(first_node, []))
        )
        epoch.preempted = self.notice.ask(number)
        epoch.interrupted = stopper.stopped
        if epoch.interrupted:
            return []

        # The first epoch shows what its tasks make that will be lost.
        trained = self._progress.trained
        epoch.first = trained == 0
        if epoch.first:
            metric_lib.check(epoch.metrics, returned, self.job.epoch_group, first_node)
            self._names.check_unsaved(number)

        # Every condition looks at every finished epoch: one that counts must not miss any.
        ctx = self._context(number, epoch.metrics, time.monotonic() - self._began, epoch.preempted)
        conditions = self.job.stop_conditions
        answers = [stop.look(condition, ctx) for condition in conditions]
        stop_states = stop.save_states(conditions)
        self._progress = dataclasses.replace(self._progress, trained=trained + 1, stop_states=stop_states)
        return [reason_of(c, true, ctx) for c, true in zip(conditions, answers, strict=True)]

    def _agree(self, epoch: _TrainedEpoch, train: Callable[[], list[str | None]]) -> EpochVerdict:
        """The collective call at the end of an epoch; prepares the save.

        `train` gives for each stop condition why it is true here, "" if it is false, None if it has no vote here.
        """
        answer = self.calls.collective(
            f"end of {self._named(epoch.number)}",
            lambda: self._report(epoch, train).to_json(),
            lambda told: self._decide(epoch, EpochReports(told)).to_json(),
        )
        verdict = EpochVerdict(**answer)
        self._saves.enter(verdict.results)
        return verdict

    def _report(self, epoch: _TrainedEpoch, train: Callable[[], list[str | None]]) -> EpochReport:
        """Trains the epoch, and takes what is saved of it."""
        backend = self.backend
        reasons = train()
        problem = ""
        if backend is not None and (self.job.resumable or not epoch.interrupted):
            try:
                epoch.prepared = backend.prepare(epoch.number, self.names)
            except Exception as error:
                problem = say(error)
        return EpochReport(
            reasons=reasons,
            interrupted=epoch.interrupted,
            problem=problem,
            fenced_off="" if backend is None else backend.fenced_off(),
            first=epoch.first,
            blobs=self._names.here() if epoch.first or None in reasons else [],
        )

    def _decide(self, epoch: _TrainedEpoch, reports: EpochReports) -> EpochVerdict:
        """On the primary. The epoch is saved if it is time, all can save their parts, and storage can be reached."""
        stops = reports.stops(self.job.stop_conditions)
        if reports.first:
            self._names.check_excluded(reports.blobs)
        dropped = reports.interrupted and not self.job.resumable
        last = bool(stops) or reports.interrupted or epoch.preempted
        due = not dropped and (last or epoch.number == 0 or self._saves.is_time())
        refusal = self._saves.refusal(epoch.number, reports.problem) if due else ""
        return EpochVerdict(
            stop=stops,
            interrupted=reports.interrupted,
            save=due and not refusal,
            retry=not reports.problem,
            exists=self._saves.exists(epoch.number),
            fenced_off=reports.fenced_off,
            results=self._saves.take_results(),
        )

    # -- saving --------------------------------------------------------------------------------------------------

    def _save(self, epoch: _TrainedEpoch, verdict: EpochVerdict, force: bool) -> None:
        """Begins to save an epoch, with the notes of this moment. `force`: it is the last of the run, or epoch 0."""
        metrics = dict(epoch.metrics)
        to_save = EpochToSave(
            number=epoch.number,
            prepared=epoch.prepared,
            metrics=metrics,
            notes=self._notes(self._result.partial).with_end(list(verdict.stop), metrics),
            exists=verdict.exists,
            force=force,
        )
        self._saves.save(to_save, verdict)

    def _notes(self, partial: bool) -> RunNotes:
        return RunNotes.of_run(
            nodes=self.session.nodes,
            partial=partial,
            stop_states=self._progress.stop_states,
            total_secs=self._progress.earlier_secs + time.monotonic() - self._began,
            went_back_to=self.resume_from_epoch,
            unit=self.job.unit,
            begun=self._progress.begun,
        )

    def out_of_band_notes(self, epoch: int, session: Session) -> RunNotes:
        """The notes for an epoch that `JobRunner.save_checkpoints` is about to save, during this run or after it.

        Waits for the run's own saves first, and enters their results: what the backend tells later is not the run's.
        """
        backend = self.backend
        own = session is self.session
        self._saves.settle()
        where = self._progress.where  # the run may have gone on meanwhile
        partial = where == _InEpoch(epoch) and self.job.resumable
        notes = self._notes(partial) if own else RunNotes()
        if isinstance(where, _Over):
            return notes
        later = epoch > where.number
        if later:
            resume = "a resumed run goes on from it only if it is named: resume_from_epoch=…"
            if backend is not None and backend.per_node:
                resume = "a metadata handler takes it for the newest epoch until the run saves its next one"
            saved = "%s is saved by save_checkpoints() while the run is in %s; %s"
            logging.warning(saved, self._named(epoch), self._named(where.number), resume)
        return notes.as_out_of_band() if later or not own else notes

    # -- after the last epoch ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The last save; what follows it needs the epoch on storage, and is left to the next start if time is short."""
        if not self._result.unsaved:
            self._finish_saves()
            if not self._result.preempted and not self._result.fenced_off:
                self._conclude()
        elif self.backend is not None:
            self.backend.drain()  # the result tells why its saves failed: closing the manager does not raise it again
        self.handler.run_ended(self._result.epoch, self._result.stop_reason)
        elapsed = time.monotonic() - self._began
        self._set(
            last_committed_epoch=self._saves.last_committed_epoch,
            failed_saves=self._saves.failed,
            blocked_secs=self._saves.blocked_secs,
            slowest_node=self._saves.slowest_node,
            elapsed_secs=elapsed,
            total_secs=self._progress.earlier_secs + elapsed,
        )

    def _finish_saves(self) -> None:
        """Waits for the saves in flight; the last epoch may be tried once more."""
        last = self._saves.finish(self._result.epoch)
        if last.fenced_off:
            self._end_fenced_off(self._result.epoch, last.fenced_off)
        elif last.unsaved:
            self._set(unsaved=last.unsaved)

    def _conclude(self) -> None:
        """Upload, download, exit. A run that is preempted here does all of it again when it is started again."""
        epoch = self._result.epoch
        upload = None
        if self._saves.last_committed_epoch == epoch:
            upload = self.calls.together("upload", lambda: self.upload(epoch))
        for group in (upload, self.job.download_group, self.job.exit_group):
            self._set(preempted=self.notice.ask(epoch))
            if self._result.preempted:
                return
            if group is not None:
                self._run_group(group)
        self._set(preempted=self.notice.ask(epoch))

    def _end_fenced_off(self, epoch: int, why: str) -> None:
        """A newer run saves to the directory: whatever this one would train could not be saved."""
        self._set(epoch=epoch, fenced_off=True, stop_reason=f"{FENCED_OFF}: {why}", unsaved=why)
        logging.error("the run ends after %s: %s", self._named(epoch), why)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _named(self, number: int) -> str:
        return f"{self.job.unit} {number}"

    def _set(self, **changes: Any) -> None:
        self._result = dataclasses.replace(self._result, **changes)

    def _run_group(self, group: TaskGroup) -> None:
        """Runs a group that runs once; an error on one process is raised on all."""
        for workspace in self.session.workspaces().values():
            workspace.set_stopper(self.notice.poll)
        self.calls.together(f"group {group.name}", lambda: self.session.run(group))

    def _context(self, epoch: int, metrics: Mapping[str, Any], secs: float, preempted: bool = False) -> stop.Context:
        root = self.session.root
        total = self._progress.earlier_secs + secs
        times = {"elapsed_secs": secs, "total_secs": total}
        return stop.Context(
            epoch=epoch, metrics=metrics, workspace=root, **times, preempted=preempted, unit=self.job.unit
        )
