"""One run of a job, from setup to the last save. The order of steps is that of Caffe2's JobRunner.

An epoch is one collective call: each process trains the epoch and reports what its stop conditions say, whether it left
the epoch in the middle, and whether it can save; the primary decides from all reports, and adds how earlier saves have
ended. So stop, preemption and the results of saves are common to all processes. A save that fails never stops training.
"""

import dataclasses
import fnmatch
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import _text
from epochckpt.errors import FencedError, InvalidArgumentError, say
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import containers, stop
from epochckpt.jobs import metrics as metric_lib
from epochckpt.jobs.backends.base import CheckpointBackend, Names, Restored
from epochckpt.jobs.epoch_verdict import EpochReport, EpochReports, EpochVerdict, reason_of
from epochckpt.jobs.job import Job, TaskGroup
from epochckpt.jobs.notes import EPOCH, RunNotes
from epochckpt.jobs.preemption import Notice, Stopper
from epochckpt.jobs.result import RunResult, ShowEpoch
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.run_saves import EpochToSave, RunSaves
from epochckpt.jobs.session import Session
from epochckpt.manager import HandlerNotifier

PREEMPTED, FINISHED, FENCED_OFF = "preempted", "was finished already", "fenced off"
UNSAVED = "too many saves have failed"
WARN, ERROR, IGNORE = "warn", "error", "ignore"  # about blobs that are not checkpointed


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


@dataclasses.dataclass
class _TrainedEpoch:
    """An epoch as this process has trained it."""

    number: int
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the primary's
    preempted: bool = False  # the preemption notice has reached all processes
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
        self.names: Names = {}  # the blobs that are checkpointed; empty before that is known
        self._result = RunResult(unit=self.job.unit)  # so far
        self._began = time.monotonic()
        self._earlier_secs = 0.0
        self._saves = RunSaves(
            unit=self.job.unit,
            every_secs=self.settings.save_every_secs,
            max_failures_in_a_row=self.settings.max_consecutive_save_failures,
            calls=self.calls,
            backend=self.backend,
            handler=self.handler,
        )
        self._begun = 0  # of a job that counts steps: what had been done when the epoch under way began
        self._in_epoch: int | None = 0  # None when the loop is over
        self._looked_back = False
        self._stop_states: Mapping[str, Any] = {}  # as they were after the last epoch that the conditions were shown

    def train(self) -> RunResult:
        """Runs the job; see `JobRunner.train`."""
        if self.calls.primary and all(condition is stop.preempted for condition in self.job.stop_conditions):
            remedy = "job.stop_when(ec.stop.max_epochs(…)), for example, ends it"
            logging.warning("the job has no stop condition: it trains until it is preempted or killed; %s", remedy)

        # Setup runs at every start: it makes the live objects, and says how blobs come back.
        self.job.reset()
        self.session.unit = self.job.unit
        spaces = self.session.workspaces()
        before = {node: dict(ws) for node, ws in spaces.items()}
        self._run_group(self.job.setup_group)
        from_setup = {n: [b for b in ws if ws[b] is not before[n].get(b)] for n, ws in spaces.items()}

        # Either everything comes back from storage, or init makes it and epoch 0 is saved.
        try:
            restored = self._restore()
        except FencedError as error:  # of two runs that start at the same moment one is the newer one
            self._end_fenced_off(0, error.reason)
        else:
            self._begin(restored, from_setup)
        if self.notice.heard and not self._result.finished and not self._result.fenced_off:
            self._set(preempted=True, stop_reason=PREEMPTED)

        # An epoch that was saved in the middle is entered again.
        while not self._result.stop_reason:
            self._train_epoch(self._result.epoch + (0 if self._result.partial else self.job.stride))
        self._in_epoch = None

        # What follows the loop needs the last epoch on storage, and is left to the next start when time is short.
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
            total_secs=self._earlier_secs + elapsed,
        )
        return self._result

    # -- before the first epoch ----------------------------------------------------------------------------------

    def _restore(self) -> Restored | None:
        """Restores the epoch that the run goes on from, if there is one."""
        backend = self.backend
        if backend is None:
            return None
        outcome: list[Restored | None] = []
        spaces = self.session.workspaces()

        def restore() -> float:
            began = time.monotonic()
            named = self.resume_from_epoch
            resume = self.settings.resume
            outcome.append(restored := backend.resume(named, resume, self.handler))
            if restored is not None:
                self._check_unit(restored, backend.directory)
                self._check_targets(restored, backend.directory)
            return time.monotonic() - began

        secs = self.calls.collective("restore", restore, list)
        (restored,) = outcome
        if restored is None:
            return None
        epoch = restored.epoch
        notes = restored.notes
        self._set(epoch=epoch, resumed_from=epoch, partial=notes.partial)
        self._saves.resumed_from(epoch)
        self._in_epoch = epoch
        self._earlier_secs = notes.total_secs or 0.0
        self._begun = epoch if notes.begun is None else notes.begun
        self._stop_states = notes.stop_states or {}
        stop.load_states(self.job.stop_conditions, notes.stop_states)
        for workspace in spaces.values():
            workspace.epoch = epoch
        self.handler.report("checkpoint_load", dict(zip(self.session.nodes, secs, strict=False)))
        logging.info("resumed from %s%s", self._named(epoch), " (partial)" if self._result.partial else "")
        return restored

    def _begin(self, restored: Restored | None, from_setup: Names) -> None:
        """Goes on from the restored epoch, unless training was finished with it; without one, from scratch."""
        if restored is None:
            self._initialize()
            made = {node: list(blobs) for node, blobs in self.session.workspaces().items()}
            self._explain_left_out(made, from_setup)
            return
        self._check_named_blobs()
        self._agree_on_names(self._with_setup(restored.names, from_setup))
        self._explain_left_out(restored.names, from_setup)
        if self._is_finished(restored):
            self._set(finished=True, stop_reason=FINISHED, preempted=self.notice.ask(restored.epoch))
            logging.info("training was finished after %s already: nothing to train", self._named(restored.epoch))

    def _initialize(self) -> None:
        """From scratch: runs init and saves epoch 0. The blobs that exist then are checkpointed."""
        spaces = self.session.workspaces()
        declared = {  # the blobs of which setup tells how they come back
            node: {name for name in (*ws, *ws.targets) if blob_lib.target_of(ws, name) is not None}
            for node, ws in spaces.items()
        }
        self._run_group(self.job.init_group)
        self._check_named_blobs()
        self._agree_on_names({node: list(ws) if node in self._kept_nodes() else [] for node, ws in spaces.items()})
        if self.backend is not None:
            self._warn_of_types(declared)
            epoch = _TrainedEpoch(0)
            self._save(epoch, self._agree(epoch, list), force=True)
        self.notice.ask(0)

    def _check_named_blobs(self) -> None:
        """Refuses a target, or a pattern of `include`, for a blob that no node has when init has run: it is misspelt.

        A resumed run may go on from an epoch that lacks the blob: that is logged, unless nothing would be saved.
        """
        resumed = self._result.resumed_from is not None

        def report() -> dict[str, list[str]]:
            spaces = self.session.workspaces().values()
            return {"blobs": self._blobs_here(), "targets": sorted({name for ws in spaces for name in ws.targets})}

        def decide(reports: list[dict[str, list[str]]]) -> None:
            names = sorted({name for one in reports for name in one["blobs"]})
            targets = set() if resumed else {name for one in reports for name in one["targets"]}
            given = [(name, f"ws.target({name!r}, …)") for name in sorted(targets) if name not in names]
            given += [(one, f"include=[{one!r}]") for one in self.settings.include or () if not _matching(one, names)]
            for name, form in given:
                when = f"after {self._named(self._result.epoch)}" if resumed else "when init has run"
                remedy = f"correct the name, or make the blob in init; {_text.near(name, names)}"
                problem = f"{form}: no node has such a blob {when}; {remedy}"
                if not resumed or not self._chosen(names):
                    raise InvalidArgumentError(problem)
                logging.warning("%s", problem)

        self.calls.collective("the names of blobs", report, decide)

    def _blobs_here(self) -> list[str]:
        """The names of the blobs of all nodes of this process."""
        return sorted({name for workspace in self.session.workspaces().values() for name in workspace})

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

    def _check_targets(self, restored: Restored, directory: str) -> None:
        """Refuses an epoch of another job, in which all blobs are missing for which setup declared a target.

        If only some are missing, the epoch may be older than the rest of the job: that is logged.
        """
        for node, workspace in self.session.workspaces().items():
            wanted = self._chosen(sorted(workspace.targets))
            held = restored.names.get(node)
            missing = [name for name in wanted if name not in workspace]
            if not missing or not held:
                continue
            some = f"{', '.join(held[:10])}{', …' if len(held) > 10 else ''}"
            problem = (
                f"{directory}: {self._named(restored.epoch)} holds {some} for node {node}, not {', '.join(missing)}, "
                "for which setup declared targets"
            )
            hints = [f"of {name!r} {_text.near(name, held)}" for name in missing if _text.near_names(name, held)]
            hint = f" ({'; '.join(hints)})" if hints else ""
            if len(missing) == len(wanted):
                remedy = "take another directory, or correct the names" if hints else "take another directory"
                raise InvalidArgumentError(f"{problem}{hint}: something else saved it; {remedy}")
            logging.warning("%s%s; these blobs are not there unless the job makes them", problem, hint)

    def _warn_of_types(self, declared: Mapping[str, Collection[str]]) -> None:
        """Names the blobs that a resume may not be able to give back as they are, except those `declared` by setup."""
        for node, name in ((node, name) for node, names in self.names.items() for name in names):
            value = None if name in declared[node] else self.session.workspace(node)[name]
            container = containers.of(blob_lib.state_of(value))
            if container is not None and (lost := container.loses()):
                logging.warning(
                    "node %s, blob %r: %s. A resume runs init once more, without computing (jax.eval_shape), to get "
                    "it; where init cannot be traced the blob comes back as dicts and lists. Better say how, in "
                    "@job.setup: ws.target(%r, jax.eval_shape(…what makes it…))",
                    node,
                    name,
                    lost,
                    name,
                )

    def _agree_on_names(self, names: Names) -> None:
        names = {node: self._chosen(blobs) for node, blobs in names.items()}
        if self.backend is not None:
            self.backend.agree_on_names(names)
            self.names = names

    def _with_setup(self, restored: Names, from_setup: Names) -> Names:
        """The blobs of the epoch, and those that setup has made since: a run from scratch would save them, too."""
        if self.backend is None or self.backend.per_node:  # in Caffe2 the epoch alone says what is saved
            return restored
        made = {node: blobs for node, blobs in from_setup.items() if node in self._kept_nodes()}
        nodes = [*restored, *(node for node in made if node not in restored)]
        names = {n: list(dict.fromkeys([*restored.get(n, ()), *made.get(n, ())])) for n in nodes}
        for node, blobs in names.items():
            if new := self._chosen(blob for blob in blobs if blob not in restored.get(node, ())):
                shown = ", ".join(map(repr, new))
                logging.info("node %s: setup made %s, which the epoch lacks; saved from here on", node, shown)
        return names

    def _explain_left_out(self, names: Names, from_setup: Names) -> None:
        """Tells of blobs that `include` and `exclude` leave out and that no resumed run has: setup does not make them.

        A task that misses a blob is told the same.
        """
        if self.backend is None:
            return
        for node, workspace in self.session.workspaces().items():
            workspace.set_missing(self._why_missing)
            lost = [blob for blob in names.get(node, ()) if blob not in from_setup[node] and not self._chosen([blob])]
            if lost and node in self._kept_nodes():
                logging.warning(
                    "node %s: include= and exclude= leave out %s. A resumed run does not run init, and has no such "
                    "blobs: make them in @job.setup, which runs at every start, or in the epoch's tasks",
                    node,
                    ", ".join(map(repr, lost)),
                )

    def _why_missing(self, blob: str) -> str:
        if self._chosen([blob]):
            return ""
        return "include= and exclude= leave it out, so no checkpoint has it: make it in @job.setup, not in init"

    def _is_finished(self, restored: Restored) -> bool:
        """Whether nothing is left to train: asked only when the run resumes by itself.

        The stop conditions of today decide, by the recorded values. A condition that only training can answer does not
        end the run: a task's output, a blob, a callable that fails here. A callable may count its calls: it is
        asked only if the run had ended.
        """
        if restored.named or self._result.partial:
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
        epoch = _TrainedEpoch(number)
        self._in_epoch = number
        self._begun = self._begun if self._result.partial else self._result.epoch
        steps = range(0) if self.job.unit == EPOCH else range(self._begun, number)
        stopper = Stopper(self.notice, self.calls, self.job.resumable, self.settings.deadline_secs)
        for workspace in self.session.workspaces().values():
            workspace.epoch = number
            workspace.steps = steps
            workspace.set_stopper(stopper.of_one_node())

        def train() -> list[str | None]:
            # Conditions on metrics answer alike everywhere: every process shows them the primary's.
            returned = self.session.run(self.job.epoch_group)
            epoch.metrics = self.calls.broadcast(
                f"metrics of {self._named(number)}", lambda: metric_lib.merge(returned.get(self.session.nodes[0], []))
            )
            epoch.preempted = self.notice.ask(number)
            epoch.interrupted = stopper.stopped
            if epoch.interrupted:
                return []

            # The first epoch shows what its tasks make that will be lost.
            if not self._looked_back:
                self._looked_back = True
                metric_lib.check(epoch.metrics, returned, self.job.epoch_group, self.session.nodes[0])
                self._check_blobs(number)

            # Every condition looks at every finished epoch: one that counts must not miss any.
            ctx = self._context(number, epoch.metrics, time.monotonic() - self._began, epoch.preempted)
            conditions = self.job.stop_conditions
            answers = [stop.look(condition, ctx) for condition in conditions]
            self._stop_states = stop.save_states(conditions)
            return [reason_of(c, true, ctx) for c, true in zip(conditions, answers, strict=True)]

        verdict = self._agree(epoch, train)
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
        looked_back = self._looked_back
        reasons = train()
        problem = ""
        first = self._looked_back and not looked_back  # the first epoch has been trained to its end
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
            first=first,
            blobs=self._blobs_here() if first or None in reasons else [],
        )

    def _decide(self, epoch: _TrainedEpoch, reports: EpochReports) -> EpochVerdict:
        """On the primary. The epoch is saved if it is time, all can save their parts, and storage can be reached."""
        stops = reports.stops(self.job.stop_conditions)
        if reports.first:
            self._check_excluded(reports.blobs)
        due = bool(stops) or reports.interrupted or epoch.preempted or epoch.number == 0 or self._saves.is_time()
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

    def _check_excluded(self, known: Sequence[str]) -> None:
        """On the primary, after the first epoch: warns of a name in `exclude` that no node has: it may be misspelt.

        Patterns may match nothing, and a task may make the blob in a later epoch.
        """
        names = [name for name in self.settings.exclude or () if not any(mark in name for mark in "*?[")]
        for name in (name for name in names if name not in known):
            problem = f"exclude=[{name!r}]: no node has such a blob after the first {self.job.unit} of this run"
            logging.warning("%s; %s", problem, _text.near(name, known))

    def _check_blobs(self, epoch: int) -> None:
        """Names the blobs that stay from epoch to epoch and are not checkpointed, except those that `exclude` names."""
        if self.backend is None or self.settings.unsaved_blobs == IGNORE:
            return
        listed: list[str] = []
        for node, workspace in self.session.workspaces().items():
            names = self._chosen(name for name in workspace if name not in self.names.get(node, ()))
            if names and node in self._kept_nodes():
                listed.append(f"{', '.join(map(repr, names))} of node {node}")
        if not listed:
            return
        message = (
            f"blobs that are not checkpointed are in the workspace after {self._named(epoch)}: {'; '.join(listed)}. "
            "Init had not made them, or the resumed epoch lacks them. If a resumed run reads such a blob before it has "
            "made it, its results differ: make the blobs in init, put them into ws.live, or leave them out with "
            "JobRunner(exclude=[…]); unsaved_blobs='ignore' says that all of them are temporary"
        )
        if self.settings.unsaved_blobs == ERROR:
            raise InvalidArgumentError(message)
        logging.warning("%s", message)

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

    def _finish_saves(self) -> None:
        """Waits for the saves in flight; the last epoch may be tried once more."""
        last = self._saves.finish(self._result.epoch)
        if last.fenced_off:
            self._end_fenced_off(self._result.epoch, last.fenced_off)
        elif last.unsaved:
            self._set(unsaved=last.unsaved)

    def _notes(self, partial: bool) -> RunNotes:
        return RunNotes.of_run(
            nodes=self.session.nodes,
            partial=partial,
            stop_states=self._stop_states,
            total_secs=self._earlier_secs + time.monotonic() - self._began,
            went_back_to=self.resume_from_epoch,
            unit=self.job.unit,
            begun=self._begun,
        )

    def out_of_band_notes(self, epoch: int, session: Session) -> RunNotes:
        """The notes for an epoch that `JobRunner.save_checkpoints` is about to save, during this run or after it.

        Waits for the run's own saves first, and enters their results: what the backend tells later is not the run's.
        """
        backend = self.backend
        own = session is self.session
        self._saves.settle()
        current = self._in_epoch  # the run may have gone on meanwhile
        notes = self._notes(current == epoch and self.job.resumable) if own else RunNotes()
        if current is not None and (epoch > current or not own):
            notes = notes.as_out_of_band()
        if current is not None and epoch > current:
            resume = "a resumed run goes on from it only if it is named: resume_from_epoch=…"
            if backend is not None and backend.per_node:
                resume = "a metadata handler takes it for the newest epoch until the run saves its next one"
            saved = "%s is saved by save_checkpoints() while the run is in %s; %s"
            logging.warning(saved, self._named(epoch), self._named(current), resume)
        return notes

    # -- after the last epoch ------------------------------------------------------------------------------------

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

    def _chosen(self, names: Iterable[str]) -> list[str]:
        """The blobs to checkpoint, by the patterns of the user."""
        include = self.settings.include
        exclude = self.settings.exclude or ()
        wanted = [n for n in names if include is None or any(_matching(pattern, [n]) for pattern in include)]
        return [n for n in wanted if not any(_matching(pattern, [n]) for pattern in exclude)]

    def _kept_nodes(self) -> Sequence[str]:
        return self.job.nodes_to_checkpoint() or self.session.nodes

    def _context(self, epoch: int, metrics: Mapping[str, Any], secs: float, preempted: bool = False) -> stop.Context:
        root = self.session.root
        total = self._earlier_secs + secs
        times = {"elapsed_secs": secs, "total_secs": total}
        return stop.Context(
            epoch=epoch, metrics=metrics, workspace=root, **times, preempted=preempted, unit=self.job.unit
        )


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match a shell pattern."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
