"""`JobRunner`: runs a job to its end, checkpoints it, and goes on where it was interrupted."""

import abc
import contextlib
import dataclasses
import enum
import inspect
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from absl import logging

from epochckpt._durations import seconds
from epochckpt.errors import InvalidArgumentError, SaveError, say
from epochckpt.jobs import backends
from epochckpt.jobs.backends.base import CheckpointBackend, Resume
from epochckpt.jobs.blobs import InitTracer
from epochckpt.jobs.job import Job, TaskGroup
from epochckpt.jobs.out_of_band import OutOfBandSave
from epochckpt.jobs.preemption import listening
from epochckpt.jobs.result import RunResult, bar
from epochckpt.jobs.run import RunSettings, TrainingRun
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.run_names import UnsavedBlobs
from epochckpt.jobs.session import DistributedSession, Session, default_session
from epochckpt.jobs.workspace import Workspace, never_stop
from epochckpt.manager import CheckpointManager, HandlerNotifier, metadata_handlers
from epochckpt.manager.notifier import NO_CALLS, Action
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions

E = TypeVar("E", bound=enum.Enum)

_ASSIGNABLE = ("job", "checkpoint_manager", "resume_from_epoch", "upload_task_group_builder")


class UploadTaskGroupBuilder(abc.ABC):
    """Builds the tasks that upload the last epoch of a run somewhere else. Caffe2's name and meaning."""

    @abc.abstractmethod
    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """The task group that uploads an epoch; called on every process when the epoch is committed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Opened:
    """What a run, or one call of the runner, uses the manager with."""

    backend: CheckpointBackend[Any] | None  # None: the runner has no manager
    calls: RunCalls
    handler: HandlerNotifier

    def required_backend(self, method: str) -> CheckpointBackend[Any]:
        """The backend, for a method of the runner that needs one; InvalidArgumentError if there is none."""
        if self.backend is None:
            raise InvalidArgumentError(f"{method} needs a checkpoint manager; give JobRunner one")
        return self.backend


class JobRunner:
    """Runs a job: from scratch or from the latest epoch, epoch by epoch, until a stop condition is true.

    1. `setup` runs. The epoch to resume from is the named one, else the newest that every node can read.
    2. From scratch: `init_group` runs, and epoch 0 is saved. Resuming: the blobs are restored instead.
    3. `epoch_group` runs, every stop condition is evaluated, and the epoch is saved; again, until one was true.
    4. The last save is waited for; then the upload, `download_group` and `exit_group` run.

    A save that fails does not stop training, unless many fail in a row; it shows in `result`. SIGTERM, or JAX's
    preemption notice, ends the run after the epoch in which it came (see `deadline_secs`), with that epoch committed.

    As in Caffe2, the first four arguments are also attributes; what is assigned to them counts from the next call on.
    Nothing else can be assigned. What ends in `_secs` is a number of seconds, or a text: `"90s"`, `"10min"`, `"1.5h"`.

    Examples:
        >>> def train(epochs):
        ...     job = ec.Job()
        ...     job.init(lambda ws: ws.update(total=0))
        ...     job.epoch(lambda ws: ws.update(total=ws["total"] + ws.epoch))
        ...     job.stop_when(ec.stop.max_epochs(epochs))
        ...     with ec.CheckpointManager("runs/one") as manager:
        ...         runner = ec.JobRunner(job, manager)
        ...         runner.train()
        ...     return runner.result.resumed_from, runner.workspace["total"]
        >>> train(epochs=2)
        (None, 3)
        >>> train(epochs=4)
        (2, 10)

    Args:
        job: what to run.
        checkpoint_manager: an `epochckpt.CheckpointManager`, one of `epochckpt.caffe2`, any other
            `orbax.checkpoint.AbstractCheckpointManager`, or None: nothing is saved.
        resume_from_epoch: go back to this epoch. Later ones are quarantined, before anything else happens. A run that
            has gone back to it and is started again, with the same argument, goes on from its own newest epoch.
        upload_task_group_builder: uploads the last epoch; needs a checkpoint_manager.
        resume: `auto`: from the newest epoch, else from scratch; `never`: from scratch, refused if there are epochs;
            `must`: from the newest epoch, refused if there are no epochs.
        metadata_handler: hears what is saved; may be given to the manager instead.
        include: shell patterns of the blobs to checkpoint, each of which must match one when init has run; None: all.
        exclude: shell patterns of blobs not to checkpoint; a warning says what no node has after the first epoch.
        deadline_secs: how long tasks that ask `ws.should_stop()` may go on with an epoch after a preemption notice;
            then it is dropped, or saved if it is resumable. None: until it is finished.
        max_consecutive_save_failures: end the run when more saves in a row have failed; None: never.
        unsaved_blobs: what to do, after the first epoch, about blobs that stay from epoch to epoch and are not
            checkpointed, though `include` and `exclude` do not leave them out: `warn`, `error` or `ignore`.
        raise_if_not_saved: raise SaveError at the very end if the last epoch could not be saved, or too many saves have
            failed; False: only log it, and tell it in the result and its exit code.
        save_every_secs: save the first epoch that ends so long after the last save began, and no other, except epoch 0,
            the last and a preempted one; the primary's clock counts. None: the manager's policies alone decide.
        exchange_timeout_secs: for how long the nodes wait for one that is silent: that has died, or hangs between
            epochs. A node that works on an epoch, however long, is not silent.
        progress: show a progress bar; None: where output is a terminal or a notebook, and else a line per epoch.
    """

    def __init__(
        self,
        job: Job,
        checkpoint_manager: Any = None,
        resume_from_epoch: int | None = None,
        upload_task_group_builder: UploadTaskGroupBuilder | None = None,
        *,
        resume: str = "auto",
        metadata_handler: Any = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        deadline_secs: float | str | None = None,
        max_consecutive_save_failures: int | None = 5,
        raise_if_not_saved: bool = True,
        unsaved_blobs: str = "warn",
        save_every_secs: float | str | None = None,
        exchange_timeout_secs: float | str = 600.0,
        progress: bool | None = None,
    ):
        limit = max_consecutive_save_failures
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidArgumentError(f"max_consecutive_save_failures is an integer of at least 0, got {limit!r}")
        deadline = None if deadline_secs is None else seconds("deadline_secs", deadline_secs, zero=True)
        save_every = 0.0 if save_every_secs is None else seconds("save_every_secs", save_every_secs)
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise InvalidArgumentError(f"{name} is a sequence of patterns, got one string: [{patterns!r}]?")
        self.job = job
        self.checkpoint_manager = checkpoint_manager
        self.resume_from_epoch = resume_from_epoch
        self.upload_task_group_builder = upload_task_group_builder
        self._handler = None if metadata_handler is None else metadata_handlers.check_handler(metadata_handler)
        self._introduced: Any = None  # the manager whose directory and nodes the handler knows
        self._settings = RunSettings(
            resume=_choice("resume", resume, Resume),
            include=include,
            exclude=exclude,
            deadline_secs=deadline,
            max_consecutive_save_failures=limit,
            unsaved_blobs=_choice("unsaved_blobs", unsaved_blobs, UnsavedBlobs),
            save_every_secs=save_every,
        )
        self._timeout = seconds("exchange_timeout_secs", exchange_timeout_secs)
        self._progress = progress
        self._must_save = raise_if_not_saved
        self._result: RunResult | None = None
        self._run: TrainingRun | None = None
        self._session: Session | None = None  # of the last run
        self._check()

    def __setattr__(self, name: str, value: Any) -> None:
        own = type(self) is JobRunner or name in inspect.signature(JobRunner).parameters  # not a subclass's
        if own and not name.startswith("_") and name not in _ASSIGNABLE:  # it would be ignored
            raise AttributeError(f"JobRunner.{name} cannot be assigned; {', '.join(_ASSIGNABLE)} can")
        super().__setattr__(name, value)

    def _check(self) -> CheckpointBackend[Any] | None:
        """Checks the attributes, which may have been set since the construction; returns a backend of the manager."""
        manager = self.checkpoint_manager
        builder = self.upload_task_group_builder
        if not isinstance(self.job, Job):
            raise InvalidArgumentError(f"JobRunner runs an epochckpt.Job, got {type(self.job).__name__}")
        if self.resume_from_epoch is not None:
            self.resume_from_epoch = epoch_number(self.resume_from_epoch)
            if self._settings.resume is Resume.NEVER or manager is None:
                what = "resume='never'" if self._settings.resume is Resume.NEVER else "no checkpoint_manager"
                raise InvalidArgumentError(f"resume_from_epoch={self.resume_from_epoch} contradicts {what}")
        if builder is not None and not callable(getattr(builder, "build", None)):
            name = type(builder).__name__
            raise InvalidArgumentError(f"upload_task_group_builder needs a method build; {name} has none")
        if builder is not None and manager is None:
            raise InvalidArgumentError("upload_task_group_builder has nothing to upload without a checkpoint_manager")
        backend = backends.backend_of(manager)
        own = backend.handler if backend is not None else None
        if self._handler is not None and own is not None and own is not self._handler:
            raise InvalidArgumentError("the manager and the runner were given different metadata handlers")
        return backend

    @property
    def result(self) -> RunResult:
        """What became of the last run; raises InvalidArgumentError before one has ended."""
        if self._result is None:
            raise InvalidArgumentError("no run has ended yet: train(session) comes first")
        return self._result

    @property
    def workspace(self) -> Workspace:
        """The workspace of the last run, or of the one under way: of the only node here, or the parent of all.

        Raises:
            InvalidArgumentError: no run has begun.
        """
        if self._session is None:
            raise InvalidArgumentError("no run has begun yet: train() comes first")
        return self._session.root

    def __call__(self, session: Session | None = None) -> int:
        """The same as `train`."""
        return self.train(session)

    def train(self, session: Session | None = None) -> int:
        """Runs the job; in a `jax.distributed` job, call it in every process. Blocks until it is over.

        Args:
            session: where it runs. None: a new one, of the class that the job was compiled for, or else a
                `DistributedSession` if `jax.distributed` has several processes, and a `LocalSession` if there is one.

        Returns:
            The number of the last epoch, or step; `result` says more.

        Raises:
            TaskError: a task raised; what is committed stays.
            EpochNotFoundError: the epoch to resume from is not there; lists those that are.
            InvalidArgumentError: something does not fit together: session, nodes, blobs, stop conditions.
            SaveError: saves have failed, if that was asked for.
            CoordinationTimeoutError: a node did not arrive at the end of an epoch; names it.
        """
        self._result = None
        if session is None:
            session = default_session(self.job.session_class)
        opened = self._open(session)
        backend = opened.backend
        calls = opened.calls
        handler = opened.handler
        self._session = session

        def open_backend() -> None:
            if backend is not None:
                backend.open(session, calls)
                self._introduced = None
                self._introduce(handler, backend)

        calls.together("beginning of the run", open_backend)
        distributed = isinstance(session, DistributedSession)
        with (
            listening(distributed, backend is not None and backend.asks_jax) as notice,
            bar(self._progress, calls.primary, self.job.stop_conditions, self.job.unit) as show_epoch,
        ):
            self._run = TrainingRun(
                job=self.job,
                settings=self._settings,
                resume_from_epoch=self.resume_from_epoch,
                session=session,
                calls=calls,
                backend=backend,
                handler=handler,
                notice=notice,
                show_epoch=show_epoch,
                upload=self._upload,
            )
            try:
                result = self._run.train()
            except BaseException:
                self._run = None
                raise
            finally:
                for workspace in session.workspaces().values():
                    workspace.attach(dataclasses.replace(workspace.hooks, should_stop=never_stop))
                handler.drain()
        self._result = result
        logging.info("%s", result)
        if result.unsaved and self._must_save and not result.fenced_off:
            raise SaveError(result.epoch, f"it is the last of the run: {result.unsaved}")
        return result.epoch

    def load_blobs_from_checkpoints(self, blob_names: Sequence[str], epoch: int, session: Session) -> bool:
        """Loads single blobs of an epoch, from every node's folder, into the session's workspaces.

        A name is that of a blob of all nodes or, as `node/blob`, of one; names that the epoch lacks are left out.
        Returns whether the blobs were loaded: False if the epoch is not there, or not of all nodes.

        Raises:
            InvalidArgumentError: there is no checkpoint manager.
        """
        opened = self._open(session)
        backend = opened.required_backend("load_blobs_from_checkpoints")
        handler = opened.handler
        backend.open(session, opened.calls, out_of_band=True)
        names = [blob_names] if isinstance(blob_names, str) else list(blob_names)
        began = time.monotonic()
        loaded = backend.load_blobs(names, epoch_number(epoch))
        secs = {session.hosted[0]: time.monotonic() - began}
        self._introduce(handler, backend)
        handler.report(Action.PARTIAL_LOAD, secs)
        handler.drain()
        return loaded

    def save_checkpoints(self, epoch: int, session: Session) -> None:
        """Saves the workspaces as they are now, and waits for the save. A failure is logged, not raised.

        Saved are the blobs that this runner's run in this session checkpoints, if there is or was one; else all blobs
        (with Caffe2's managers those that `init` has found, as in Caffe2). An epoch of this number is replaced.

        In the middle of a run, the run goes on with its own numbers and replaces this save when it reaches its number.
        If the run dies before that, a save with the number of the current epoch counts as that epoch (for a resumable
        job: as a part of it). A later number, or an epoch of another session, is resumed from only if it is named.

        Raises:
            InvalidArgumentError: there is no checkpoint manager.
        """
        opened = self._open(session)
        handler = opened.handler
        save = OutOfBandSave(
            job=self.job,
            session=session,
            run=self._run,
            backend=opened.required_backend("save_checkpoints"),
            calls=opened.calls,
            handler=handler,
            introduce=lambda backend: self._introduce(handler, backend),
        )
        try:
            save.save(epoch_number(epoch))
        except Exception as error:
            logging.warning("%s %s could not be saved: %s", self.job.unit, epoch, say(error))
        handler.drain()

    def _introduce(self, handler: HandlerNotifier, backend: CheckpointBackend[Any]) -> None:
        """Tells the metadata handler which nodes save where, unless an earlier call has; the backend is open."""
        if self._introduced is not self.checkpoint_manager:
            handler.nodes(backend.address, backend.handler_nodes)
            handler.introduce()
            self._introduced = self.checkpoint_manager

    def _upload(self, epoch: int) -> TaskGroup | None:
        builder = self.upload_task_group_builder
        group = None if builder is None else builder.build(epoch, self.checkpoint_manager)
        if builder is not None and not isinstance(group, TaskGroup):
            name = type(builder).__name__
            raise InvalidArgumentError(f"{name}.build() must return a TaskGroup, got {type(group).__name__}")
        return group

    def _open(self, session: Session) -> _Opened:
        """Gives job, session and manager the same nodes; makes what a run, or one call, uses the manager with."""
        backend = self._check()
        self._check_session(session)
        self._name_nodes(session, backend)
        for workspace in session.workspaces().values():
            tracer = InitTracer(self.job.init_group, workspace)
            workspace.attach(dataclasses.replace(workspace.hooks, made_by_init=tracer.containers))
        calls = RunCalls(
            session.coordinator,
            session.nodes,
            self._timeout,
            option="JobRunner(exchange_timeout_secs=…)",
        )
        return _Opened(backend=backend, calls=calls, handler=self._notifier(session, backend))

    def _check_session(self, session: Session) -> None:
        kind = type(session).__name__
        expected = self.job.session_class
        if not isinstance(session, Session):
            raise InvalidArgumentError(f"expected a session (LocalSession() or DistributedSession()), got {kind}")
        if expected is not None and not isinstance(session, expected):
            raise InvalidArgumentError(f"the job was compiled for {expected.__name__}, got a {kind}")

    def _name_nodes(self, session: Session, backend: CheckpointBackend[Any] | None) -> None:
        """Gives session and manager the nodes of the job.

        In a distributed job every process has its part in a save, if only to say that it has nothing.
        """
        everywhere = self.job.nodes()
        nodes = session.nodes
        if backend is not None:
            distributed = isinstance(session, DistributedSession) and not backend.per_node
            wanted = everywhere if distributed else self.job.nodes_to_checkpoint()
            nodes = backend.nodes(wanted or everywhere, session)
        session.open(everywhere or nodes)

    def _notifier(self, session: Session, backend: CheckpointBackend[Any] | None) -> HandlerNotifier:
        """What calls the metadata handler, which is the manager's, or else this runner's."""
        primary = session.coordinator.primary
        if backend is None:
            return HandlerNotifier(self._handler, active=primary)
        own = backend.handler is not None
        return HandlerNotifier(
            backend.handler if own else self._handler,
            active=primary,
            managers=backend.handler_calls if own else NO_CALLS,
            accessible=backend.accessible,
        )


def _choice(name: str, value: Any, choices: type[E]) -> E:
    """The choice that an argument of this name names; InvalidArgumentError: it names none."""
    known = {choice.value: choice for choice in choices}
    if not isinstance(value, str) or value not in known:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return known[value]


def run(
    job: Job,
    directory: str | os.PathLike[str] | None = None,
    *,
    session: Session | None = None,
    exit: bool = False,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
    **arguments: Any,
) -> RunResult:
    """Runs a job with its checkpoints in a directory, and resumes from there: a manager and a runner in one call.

    Examples:
        >>> job = ec.Job(stop_conditions=[ec.stop.max_epochs(3)])
        >>> _ = job.epoch(lambda ws: {"loss": 1 / ws.epoch})
        >>> result = ec.run(job, "my_run")
        >>> result.epoch, result.stop_reason
        (3, 'max_epochs(3)')

    Args:
        job: what to run.
        directory: of the checkpoints: a path or a URL; None: nothing is saved.
        session: where it runs, see `JobRunner.train`.
        exit: end the program, with the result's `exit_code`: a scheduler then knows whether to start it again. If the
            last epoch could not be saved, the exit code says so, and no error is raised.
        options: of the manager: when to save, what to keep.
        storage: how bytes get to storage.
        arguments: others of `JobRunner`.

    Raises:
        SystemExit: the job is over, and `exit` asks for it.
        Others are those of `CheckpointManager` and `JobRunner.train`.
    """
    arguments.setdefault("raise_if_not_saved", not exit)
    with contextlib.ExitStack() as stack:
        manager = None
        if directory is not None:
            manager = stack.enter_context(CheckpointManager(directory, options=options, storage=storage))
        runner = JobRunner(job, manager, **arguments)
        runner.train(session)
    if exit:
        sys.exit(runner.result.exit_code)
    return runner.result
