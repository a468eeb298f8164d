"""The runner on the managers of `epochckpt.caffe2`, in Caffe2's order of calls.

No named epoch and no metadata handler mean from scratch; the handler may override the user; a named epoch is no
rollback, later epochs are replaced one by one. A save is committed, on each node, when it returns.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from epochckpt import _threads
from epochckpt.caffe2.managers import CheckpointManager, Manager, MultiNodeCheckpointManager
from epochckpt.errors import EpochNotFoundError, FencedError, InvalidArgumentError, say
from epochckpt.jobs import Task, TaskGroup
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs.backends.base import CheckpointBackend, Names, Restored, Resume
from epochckpt.jobs.notes import RunNotes
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.session import Session
from epochckpt.manager import HandlerNotifier, SaveResult
from epochckpt.manager.notifier import Action, ManagersCalls, Verb


@dataclasses.dataclass(frozen=True)
class _Report:
    """What one process tells of a save, as JSON."""

    error: str = ""  # why it has failed; empty if it has not
    fenced: str = ""  # how the process learned that a newer job saves its node; empty if none does
    stats: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)  # see `Caffe2Backend._stats`


class Caffe2Backend(CheckpointBackend[None]):
    """Caffe2's verbs."""

    per_node: ClassVar[bool] = True
    handler_calls = ManagersCalls(verbs=frozenset(Verb), actions=frozenset(Action))

    def __init__(self, manager: Manager):
        super().__init__(manager, manager.db_prefix)
        self.handler = manager.metadata_handler
        self.accessible = lambda epoch: manager.cp_accessible(epoch=None)
        self._wanted: list[str] = []
        self._nodes: list[str] = []  # those that the manager saves: of the job, or with one of one node of this process
        self._knows_blobs = False  # the manager does, of every node
        self._fenced: str | None = None

    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        if not self._manager.several and session.coordinator.processes == 1:
            self._manager.take_nodes(wanted or session.nodes)
        self._wanted = list(wanted)
        return wanted or session.nodes

    def open(self, session: Session, calls: RunCalls, out_of_band: bool = False) -> None:
        """See CheckpointBackend. Out of band, the blobs are those that the run's init has found, as in Caffe2."""
        super().open(session, calls)
        self._nodes = [n for n in self._wanted or session.nodes if self._manager.several or n in session.hosted]
        self._knows_blobs = out_of_band  # the run that goes on beside has called its init
        unknown = len(self._manager.managers(self._nodes)) < len(self._nodes)
        if not out_of_band or not self._manager.introduced or unknown:  # then this raises
            self._manager.set_params(self._nodes)
        self.handler_nodes = [manager.node_name for manager in self._manager.managers().values()]

    def resume(self, named: int | None, resume: Resume, handler: HandlerNotifier) -> Restored | None:
        if resume is Resume.NEVER:
            return None

        def choose() -> int | None:
            chosen = self._manager.get_resume_from_epoch_id(named)
            return handler.last_epoch(chosen, must_answer=True)  # the runner's own, which the manager does not know

        epoch = self._calls.broadcast("the epoch to resume from", choose)
        if epoch is None and resume is Resume.MUST:
            raise EpochNotFoundError(None, self.directory, [])
        if epoch is None:
            return None
        self._run(lambda: self._manager.init(self._nodes, retrieve_from_epoch=epoch))
        self._run(lambda: self._manager.load(epoch))
        self._knows_blobs = True
        names = {node: manager.blob_list() for node, manager in self._managers().items()}
        self._report(Action.LOAD, self._calls.collective(f"stats of the load of {epoch}", self._stats, list))
        return Restored(
            epoch=epoch,
            notes=RunNotes.read(self._manager.read_notes(epoch)),
            names=names,
            named=named is not None,
        )

    def _managers(self) -> Mapping[str, CheckpointManager]:
        """The managers of the nodes of this process."""
        return self._manager.managers([n for n in self._nodes if n in self._session.hosted])

    def _run(self, verb: Callable[[], Task | TaskGroup]) -> None:
        """Runs what a manager's verb returns; it joins no group that surrounds the call of the runner."""
        with TaskGroup("checkpoint"):
            runnable = verb()
        self._session.run(runnable)

    def agree_on_names(self, names: Names) -> None:
        """See CheckpointBackend. Each node saves by itself: blobs of one name may differ from node to node."""
        spaces = self._session.workspaces()

        def check() -> None:
            for node, blobs in names.items():
                blob_lib.refuse_global(node, {name: spaces[node][name] for name in blobs if name in spaces[node]})
            if not self._knows_blobs:
                self._kinds_of(names)

        unsaved = {n: sorted(set(spaces[n]) - set(blobs)) for n, blobs in names.items() if n in self._nodes}
        if any(unsaved.values()) and not self._knows_blobs:
            raise InvalidArgumentError(
                f"Caffe2's managers save all blobs that exist after init; include= and exclude= leave out {unsaved}"
            )
        self._calls.collective("the blobs to checkpoint", check, lambda _: None)
        if not self._knows_blobs:
            self._run(lambda: self._manager.init(self._nodes))

    def prepare(self, epoch: int, names: Names) -> None:
        """See CheckpointBackend. The managers look at the blobs themselves, when they save."""

    def save(self, epoch: int, prepared: None, metrics: Mapping[str, Any], notes: RunNotes, force: bool) -> bool:
        """See CheckpointBackend. An error becomes an outcome on all processes, and training goes on."""
        self._manager.notes = notes.to_json()
        began = time.monotonic()
        mine = self._save_here(epoch)
        told = self._calls.collective(f"save of checkpoint {epoch}", lambda: dataclasses.asdict(mine), list)
        reports = [_Report(**one) for one in told]
        problem = next((report.error for report in reports if report.error), "")
        self._fenced = next((report.fenced for report in reports if report.fenced), None)
        if not problem:
            _threads.logged("the metadata handler's write", lambda: self._manager.write_checkpoint_metadata(epoch))
            self._report(Action.SAVE, [report.stats for report in reports])
        by_node = {node: secs for report in reports for node, (_, secs) in report.stats.items()}
        secs = time.monotonic() - began
        self._ended.append(
            SaveResult(
                epoch=epoch,
                committed=not problem,
                detail=problem,
                blocked_secs=secs,
                secs=secs,
                nodes=by_node,
            )
        )
        return True

    def _save_here(self, epoch: int) -> "_Report":
        """Saves the nodes of this process."""
        try:
            self._run(lambda: self._manager.save(epoch))
        except Exception as error:
            cause = error if isinstance(error, FencedError) else error.__cause__
            return _Report(error=say(error), fenced=cause.reason if isinstance(cause, FencedError) else "")
        return _Report(stats=self._stats())

    def _stats(self) -> dict[str, tuple[str, float]]:
        """What the last operation saved or loaded on each node of this process: the db's name, and the seconds."""
        return {node: manager.last for node, manager in self._managers().items() if manager.last is not None}

    def _report(self, action: Action, stats: Sequence[Mapping[str, tuple[str, float]]]) -> None:
        """Reports the seconds of the nodes of all processes together."""
        by_name = dict(each for one in stats for each in one.values())
        _threads.logged("the metadata handler's report", lambda: self._manager.report(action.value, by_name))

    def fenced_off(self) -> str | None:
        return self._fenced

    def allow_overwrite(self, epoch: int) -> None:
        """See CheckpointBackend. Every save replaces."""

    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        managers = self._manager.managers(self._nodes)
        if isinstance(self._manager, MultiNodeCheckpointManager):
            with TaskGroup("checkpoint"):
                if not managers or not self._manager.load_blobs_locally(list(managers), names, epoch, self._session):
                    return False
        elif managers and all(manager.has_epoch(epoch) for manager in managers.values()):
            self._run(lambda: self._manager.load_blobs_from_checkpoint(names, epoch))
        else:
            return False
        self._report(Action.PARTIAL_LOAD, [self._stats()])
        return True
