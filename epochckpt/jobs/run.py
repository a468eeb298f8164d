"""One run of a job, from setup to the last save. The order of steps is that of Caffe2's JobRunner.

An epoch is one collective call: each process trains the epoch and reports what its stop conditions say, whether it left
the epoch in the middle, and whether it can save; the primary decides from all reports, and adds how earlier saves have
ended. So stop, preemption and the results of saves are common to all processes. A save that fails never stops training.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from epochckpt.errors import FencedError, InvalidArgumentError, say
from epochckpt.jobs import metrics as metric_lib
from epochckpt.jobs import stop, stop_states
from epochckpt.jobs.backends.base import CheckpointBackend, Names, Restored, Resume
from epochckpt.jobs.epoch_verdict import EpochReport, EpochReports, EpochVerdict, NoVote, Vote, vote_of
from epochckpt.jobs.job import Job, TaskGroup
from epochckpt.jobs.notes import EPOCH, RunNotes
from epochckpt.jobs.preemption import Notice, Stopper
from epochckpt.jobs.result import RunResult, ShowEpoch
from epochckpt.jobs.run_calls import Part, RunCalls
from epochckpt.jobs.run_names import RunNames, UnsavedBlobs
from epochckpt.jobs.run_saves import EpochToSave, LastSave, RunSaves, Saved, Unsaved
from epochckpt.jobs.run_state import (
    AlreadyFinished,
    Ended,
    FencedOff,
    Finished,
    Preempted,
    Running,
    RunState,
    TooManyFailures,
)
from epochckpt.jobs.session import Session
from epochckpt.manager import HandlerNotifier
from epochckpt.manager.notifier import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Arguments of `JobRunner`."""

    resume: Resume
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    deadline_secs: float | None
    max_consecutive_save_failures: int | None
    unsaved_blobs: UnsavedBlobs
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
    resumed_from: int | None = None  # the epoch that the run has gone on from; None from scratch
    last: int = 0  # the last epoch that was trained and not dropped, or from which the run has gone on
    partial: bool = False  # that epoch was left in the middle: the run enters it again
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
            resumed_from=restored.epoch,
            last=restored.epoch,
            partial=notes.partial,
            begun=restored.epoch if notes.begun is None else notes.begun,
            stop_states=notes.stop_states or {},
            earlier_secs=notes.total_secs or 0.0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TrainedEpoch:
    """An epoch as this process has trained it. The defaults are those of epoch 0, which init has made."""

    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the primary's
    preempted: bool = False  # the preemption notice has reached all processes
    interrupted: bool = False  # this process left the epoch in the middle
    first: bool = False  # the first of this run that this process has trained to its end
    votes: Sequence[Vote] = ()  # by stop condition; empty if the epoch was left in the middle
    stop_states: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the conditions, if they have voted


class _AgreedEpoch(NamedTuple):
    """An epoch after the collective call at its end."""

    trained: _TrainedEpoch
    prepared: Any  # what the backend saves, see `CheckpointBackend.prepare`; None if nothing can be saved
    verdict: EpochVerdict


@dataclasses.dataclass(eq=False, kw_only=True)
class TrainingRun:
    """One run of a job in a session that has the job's nodes. Without a backend nothing is saved."""

    job: Job
    settings: RunSettings
    resume_from_epoch: int | None
    session: Session
    calls: RunCalls
    backend: CheckpointBackend[Any] | None
    handler: HandlerNotifier
    notice: Notice
    show_epoch: ShowEpoch
    upload: Callable[[int], TaskGroup | None]

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._progress = _Progress()
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
        state = self._begin()
        while isinstance(state, Running):
            last = self._progress.last
            state = self._train_epoch(last if self._progress.partial else last + self.job.stride)
        self._progress = dataclasses.replace(self._progress, where=_Over())
        return self._end(state)

    # -- before the first epoch ----------------------------------------------------------------------------------

    def _begin(self) -> RunState:
        """Setup. Then either everything comes back from storage, or init makes it and epoch 0 is saved."""
        if self.calls.primary and all(condition is stop.preempted for condition in self.job.stop_conditions):
            remedy = "job.stop_when(ec.stop.max_epochs(…)), for example, ends it"
            logging.warning("the job has no stop condition: it trains until it is preempted or killed; %s", remedy)
        if self.backend is not None and self.settings.resume is not Resume.NEVER:
            self.backend.read_ahead(self.resume_from_epoch)
        from_setup = self._set_up()
        try:
            restored = self._restore()
        except FencedError as error:  # of two runs that start at the same moment one is the newer one
            return self._fenced_off(0, error.reason)
        state = self._initialize(from_setup) if restored is None else self._go_on(restored, from_setup)
        return Preempted() if isinstance(state, Running) and self.notice.heard else state

    def _set_up(self) -> Names:
        """Setup runs at every start: it makes the live objects, and says how blobs come back. Returns what it made."""
        self.job.reset()
        self.session.count_in(self.job.unit)
        spaces = self.session.workspaces()
        before = {node: dict(ws) for node, ws in spaces.items()}
        self._run_group(self.job.setup_group)
        return {n: [b for b in ws if ws[b] is not before[n].get(b)] for n, ws in spaces.items()}

    def _restore(self) -> Restored | None:
        """Restores the epoch that the run goes on from, if there is one."""
        backend = self.backend
        if backend is None:
            return None

        def restore() -> Part[Restored | None]:
            began = time.monotonic()
            restored = backend.resume(self.resume_from_epoch, self.settings.resume, self.handler)
            if restored is not None:
                self._check_unit(restored, backend.directory)
                self._names.check_targets(restored, backend.directory)
            return Part(kept=restored, told=time.monotonic() - began)

        met = self.calls.meet("restore", restore, list)
        restored = met.kept
        if restored is None:
            return None
        stop_states.load_states(self.job.stop_conditions, restored.notes.stop_states)
        for workspace in self.session.workspaces().values():
            workspace.enter_epoch(restored.epoch, range(0))
        self.handler.report(Action.LOAD, dict(zip(self.session.nodes, met.decision, strict=False)))
        partial = " (partial)" if restored.notes.partial else ""
        logging.info("resumed from %s%s", self._named(restored.epoch), partial)
        return restored

    def _go_on(self, restored: Restored, from_setup: Names) -> RunState:
        """Goes on from the restored epoch, unless training was finished with it."""
        epoch = restored.epoch
        self._progress = _Progress.noted_in(restored)
        self._saves.resumed_from(epoch)
        self._names.go_on(restored, from_setup)
        if not self._is_finished(restored):
            return Running()
        preempted = self.notice.ask(epoch)
        logging.info("training was finished after %s already: nothing to train", self._named(epoch))
        return AlreadyFinished(preempted)

    def _initialize(self, from_setup: Names) -> RunState:
        """From scratch: runs init and saves epoch 0. The blobs that exist then are checkpointed."""
        declared = self._names.declared()
        self._run_group(self.job.init_group)
        self._names.begin(declared)
        if self.backend is not None:
            agreed = self._agree(0, _TrainedEpoch)
            if agreed.verdict.fenced_off is not None:
                return self._fenced_off(0, agreed.verdict.fenced_off)
            self._save(0, agreed, Running())
        self.notice.ask(0)
        made = {node: list(blobs) for node, blobs in self.session.workspaces().items()}
        self._names.explain_left_out(made, from_setup)
        return Running()

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
            stop_states.load_states(conditions, notes.stop_states)  # callables may have counted this
            return any(held)

        return self.calls.collective("whether training is over", report, any)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _train_epoch(self, number: int) -> RunState:
        """Trains an epoch, does what the primary decides about the end of the run, and begins a save if it is time."""
        begun = self._progress.begun if self._progress.partial else self._progress.last
        self._progress = dataclasses.replace(self._progress, where=_InEpoch(number), begun=begun)
        steps = range(0) if self.job.unit == EPOCH else range(begun, number)
        stopper = Stopper(
            notice=self.notice,
            calls=self.calls,
            resumable=self.job.resumable,
            deadline_secs=self.settings.deadline_secs,
        )
        for workspace in self.session.workspaces().values():
            workspace.enter_epoch(number, steps)
            workspace.attach(dataclasses.replace(workspace.hooks, should_stop=stopper.of_one_node().should_stop))

        agreed = self._agree(number, lambda: self._run_epoch(number, stopper))
        trained = agreed.trained
        verdict = agreed.verdict
        if not trained.interrupted:
            done = self._progress.trained + 1
            self._progress = dataclasses.replace(self._progress, trained=done, stop_states=trained.stop_states)
        if verdict.fenced_off is not None:
            return self._fenced_off(number, verdict.fenced_off)
        if (too_many := self._saves.too_many_failures()) is not None:
            self._progress = dataclasses.replace(self._progress, last=number)
            logging.error("the run ends after %s: %s", self._named(number), too_many.why)
            return too_many

        state = self._state_after(trained, verdict)
        if verdict.interrupted and not self.job.resumable:
            left = self._named(number)
            last = self._named(self._progress.last)
            logging.warning("%s was left in the middle and is dropped; %s is the last", left, last)
            return state

        self._progress = dataclasses.replace(self._progress, last=number, partial=verdict.interrupted)
        self.show_epoch(number, trained.metrics)
        self._save(number, agreed, state)
        return state

    @staticmethod
    def _state_after(trained: _TrainedEpoch, verdict: EpochVerdict) -> RunState:
        """Whether the run goes on after an epoch. One that was left in the middle finishes no run."""
        if verdict.stop and not verdict.interrupted:
            return Finished(verdict.stop, trained.preempted)
        return Preempted() if trained.preempted else Running()

    def _run_epoch(self, number: int, stopper: Stopper) -> _TrainedEpoch:
        """Runs the tasks, and shows what they returned to the stop conditions."""
        # Conditions on metrics answer alike everywhere: every process shows them the primary's.
        first_node = self.session.nodes[0]
        returned = self.session.run(self.job.epoch_group)
        metrics = self.calls.broadcast(
            f"metrics of {self._named(number)}", lambda: metric_lib.merge(returned.get(first_node, []))
        )
        preempted = self.notice.ask(number)
        if stopper.stopped:
            return _TrainedEpoch(metrics=metrics, preempted=preempted, interrupted=True)

        # The first epoch shows what its tasks make that will be lost.
        first = self._progress.trained == 0
        if first:
            metric_lib.check(metrics, returned, self.job.epoch_group, first_node)
            self._names.check_unsaved(number)

        # Every condition looks at every finished epoch: one that counts must not miss any.
        ctx = self._context(number, metrics, time.monotonic() - self._began, preempted)
        conditions = self.job.stop_conditions
        answers = [stop.look(condition, ctx) for condition in conditions]
        states = stop_states.save_states(conditions)
        return _TrainedEpoch(
            metrics=metrics,
            preempted=preempted,
            first=first,
            votes=[vote_of(condition, true, ctx) for condition, true in zip(conditions, answers, strict=True)],
            stop_states=states,
        )

    def _agree(self, number: int, train: Callable[[], _TrainedEpoch]) -> _AgreedEpoch:
        """The collective call at the end of an epoch; prepares the save."""
        met = self.calls.meet(
            f"end of {self._named(number)}",
            lambda: self._report(number, train()),
            lambda told: self._decide(number, EpochReports(told)).to_json(),
        )
        trained, prepared = met.kept
        verdict = EpochVerdict(**met.decision)
        self._saves.enter(verdict.results)
        return _AgreedEpoch(trained, prepared, verdict)

    def _report(self, number: int, trained: _TrainedEpoch) -> Part[tuple[_TrainedEpoch, Any]]:
        """Takes what is saved of an epoch, and reports how the epoch ended on this process."""
        backend = self.backend
        prepared: Any = None
        problem: str | None = None
        if backend is not None and (self.job.resumable or not trained.interrupted):
            try:
                prepared = backend.prepare(number, self.names)
            except Exception as error:
                problem = say(error)
        tells_blobs = trained.first or any(isinstance(vote, NoVote) for vote in trained.votes)
        report = EpochReport(
            votes=trained.votes,
            preempted=trained.preempted,
            interrupted=trained.interrupted,
            problem=problem,
            fenced_off=None if backend is None else backend.fenced_off(),
            first=trained.first,
            blobs=self._names.here() if tells_blobs else [],
        )
        return Part(kept=(trained, prepared), told=report.to_json())

    def _decide(self, number: int, reports: EpochReports) -> EpochVerdict:
        """On the primary. The epoch is saved if it is time, all can save their parts, and storage can be reached."""
        stops = reports.stops(self.job.stop_conditions)
        if reports.first:
            self._names.check_excluded(reports.blobs)

        # An epoch that is to be dropped is not due, so that it is no failed save.
        dropped = reports.interrupted and not self.job.resumable
        last = bool(stops) or reports.interrupted or reports.preempted
        due = not dropped and (last or number == 0 or self._saves.is_time())
        refusal = self._saves.refusal(number, reports.problem) if due else None
        if refusal is not None:
            self._saves.fail(number, refusal)
        return EpochVerdict(
            stop=stops,
            interrupted=reports.interrupted,
            save=due and refusal is None,
            retry=reports.problem is None,
            exists=self._saves.exists(number),
            fenced_off=reports.fenced_off,
            results=self._saves.take_results(),
        )

    # -- saving --------------------------------------------------------------------------------------------------

    def _save(self, number: int, agreed: _AgreedEpoch, state: RunState) -> None:
        """Begins to save an epoch if that was decided, with the notes of this moment. `state`: after the epoch."""
        metrics = dict(agreed.trained.metrics)
        finished = list(state.why) if isinstance(state, Finished) else []
        to_save = EpochToSave(
            number=number,
            prepared=agreed.prepared,
            metrics=metrics,
            notes=self._notes(self._progress.partial).with_end(finished, metrics),
            exists=agreed.verdict.exists,
            force=isinstance(state, Ended) or number == 0,
        )
        self._saves.save(to_save, agreed.verdict)

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

    def _end(self, ended: Ended) -> RunResult:
        """The last save; what follows it needs the epoch on storage, and is left to the next start if time is short."""
        epoch = self._progress.last
        last = self._last_save(ended)
        preempted = ended.preempted
        if ended.finished and not preempted and not isinstance(last, FencedOff):
            preempted = self._conclude()
        reason = last.reason if isinstance(last, FencedOff) else ended.reason
        self.handler.run_ended(epoch, reason)
        elapsed = time.monotonic() - self._began
        return RunResult(
            stop_reason=reason,
            epoch=epoch,
            partial=self._progress.partial,
            last_committed_epoch=self._saves.last_committed_epoch,
            unsaved="" if isinstance(last, Saved) else last.why,
            failed_saves=self._saves.failed,
            preempted=preempted,
            finished=ended.finished,
            fenced_off=isinstance(last, FencedOff),
            resumed_from=self._progress.resumed_from,
            blocked_secs=self._saves.blocked_secs,
            slowest_node=self._saves.slowest_node,
            elapsed_secs=elapsed,
            total_secs=self._progress.earlier_secs + elapsed,
            unit=self.job.unit,
        )

    def _last_save(self, ended: Ended) -> LastSave:
        """Waits for the saves in flight; the last epoch may be tried once more, unless it is known to be lost."""
        match ended:
            case FencedOff():
                self._saves.conclude()  # closing the manager does not raise again why they failed
                return ended
            case TooManyFailures(why=why):
                self._saves.conclude()
                return Unsaved(why)
        last = self._saves.finish(self._progress.last)
        return self._fenced_off(self._progress.last, last.why) if isinstance(last, FencedOff) else last

    def _conclude(self) -> bool:
        """Upload, download, exit; returns whether the run was preempted. Then the next start does all of it again."""
        epoch = self._progress.last
        upload = None
        if self._saves.last_committed_epoch == epoch:
            upload = self.calls.together("upload", lambda: self.upload(epoch))
        for group in (upload, self.job.download_group, self.job.exit_group):
            if self.notice.ask(epoch):
                return True
            if group is not None:
                self._run_group(group)
        return self.notice.ask(epoch)

    def _fenced_off(self, epoch: int, why: str) -> FencedOff:
        """The run ends after this epoch, because a newer one saves to the directory."""
        self._progress = dataclasses.replace(self._progress, last=epoch)
        logging.error("the run ends after %s: %s", self._named(epoch), why)
        return FencedOff(why)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _named(self, number: int) -> str:
        return f"{self.job.unit} {number}"

    def _run_group(self, group: TaskGroup) -> None:
        """Runs a group that runs once; an error on one process is raised on all."""
        for workspace in self.session.workspaces().values():
            workspace.attach(dataclasses.replace(workspace.hooks, should_stop=self.notice.poll))
        self.calls.together(f"group {group.name}", lambda: self.session.run(group))

    def _context(self, epoch: int, metrics: Mapping[str, Any], secs: float, preempted: bool = False) -> stop.Context:
        root = self.session.root
        total = self._progress.earlier_secs + secs
        times = {"elapsed_secs": secs, "total_secs": total}
        return stop.Context(
            epoch=epoch, metrics=metrics, workspace=root, **times, preempted=preempted, unit=self.job.unit
        )
