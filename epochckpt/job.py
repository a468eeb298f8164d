"""`Job`: the phases of a training job and when it ends. Names and meaning from Caffe2."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from epochckpt import stop
from epochckpt.errors import InvalidArgumentError
from epochckpt.tasks import Task, TaskGroup, TaskOutput, joining
from epochckpt.workspace import Workspace

F = TypeVar("F", bound=Callable[[Workspace], Any])

_current: contextvars.ContextVar[Job | None] = contextvars.ContextVar("epochckpt_job", default=None)


class OutputIsTrue(stop.Condition):
    """A task's output, as a stop condition: true if it is on any node of this process.

    Args:
        output: of a task of the epoch group; its value must be a boolean.
    """

    def __init__(self, output: TaskOutput):
        self.output = output

    def __call__(self, ctx: stop.Context) -> bool:
        """Whether it is true after this epoch."""
        values = self.output.values()
        if not values:
            raise InvalidArgumentError(f"stop condition {self}: the task has not run here; is it in the epoch group?")
        answers = [stop.checked(self, value, ctx.epoch) for value in values]
        return any(answers)

    def holds(self, ctx: stop.Context) -> bool:
        """Not known before the task has run."""
        del ctx
        return False

    def __repr__(self) -> str:
        return repr(self.output)


def has_output(condition: stop.Condition) -> bool:
    """Whether a condition looks at the output of a task, which is not known before the task has run."""
    return isinstance(condition, OutputIsTrue) or any(map(has_output, condition.operands))


class Job:
    """A training job: what runs once, what runs every epoch, and when it is over.

    Two forms of the same thing. Caffe2's: `with Job() as job:` and tasks in `job.init_group`, `job.epoch_group`, … .
    Or decorators, for functions of a `Workspace`: `@job.setup`, `@job.init`, `@job.epoch`, `@job.download`,
    `@job.exit`, and `job.stop_when(condition)`.

    Args:
        init_group: runs once, only from scratch.
        epoch_group: runs once per epoch.
        download_group: runs once, after the last epoch.
        exit_group: runs once, at the very end. A run that is preempted there runs both again when it is started again.
        stop_conditions: `epochckpt.stop` conditions, callables, or task outputs.
        nodes_to_checkpoint: nodes whose workspaces are checkpointed; by default those that `init_group` uses.
    """

    def __init__(
        self,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: Sequence[Any] | None = None,
        nodes_to_checkpoint: Sequence[str] | None = None,
    ):
        self.init_group = _group(init_group, "init")
        self.epoch_group = _group(epoch_group, "epoch")
        self.download_group = _group(download_group, "download")
        self.exit_group = _group(exit_group, "exit")
        self.setup_group = TaskGroup("setup")
        self.resumable = False
        self.session_class: type | None = None
        self._conditions: list[stop.Condition] = []
        self._nodes = [str(n) for n in nodes_to_checkpoint or ()] or None
        self._tokens: list[contextvars.Token[Job | None]] = []
        for condition in stop_conditions or ():
            self.add_stop_condition(condition)

    @staticmethod
    def current() -> Job | None:
        """The job of the surrounding `with Job() as job:`, or None."""
        return _current.get()

    def __enter__(self) -> Job:
        self._tokens.append(_current.set(self))
        self.epoch_group.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.epoch_group.__exit__(*exc)
        _current.reset(self._tokens.pop())

    @property
    def stop_conditions(self) -> list[stop.Condition]:
        """What ends the job; every one is evaluated after every epoch."""
        return list(self._conditions)

    def nodes_to_checkpoint(self) -> list[str]:
        """The nodes whose workspaces are checkpointed: those given, or those that `init_group` uses.

        Empty if the job names no nodes: then it runs, and is checkpointed, on every node of its session.
        """
        return list(self._nodes) if self._nodes is not None else self.init_group.used_nodes()

    def nodes(self) -> list[str]:
        """All nodes that the job names, those to checkpoint first."""
        groups = (self.setup_group, self.init_group, self.epoch_group, self.download_group, self.exit_group)
        used = [node for group in groups for node in group.used_nodes()]
        return list(dict.fromkeys([*self.nodes_to_checkpoint(), *used]))

    def compile(self, session_class: type) -> None:
        """Fixes the nodes to checkpoint, and the kind of session that the job is to run in."""
        if not isinstance(session_class, type):
            raise InvalidArgumentError(f"compile() takes a session class, got {session_class!r}")
        self.session_class = session_class
        self._nodes = self.nodes_to_checkpoint() or None

    def add_stop_condition(self, output: Any) -> None:
        """Adds a stop condition.

        Args:
            output: a `TaskOutput`, a `Task` with one output, the name of a blob, a condition of `epochckpt.stop`, or
                any callable of a `stop.Context`. The values of outputs and blobs must be booleans.
        """
        if isinstance(output, str):
            blob = output
            output = Task(lambda ws: ws[blob], group=self.epoch_group, name=f"look at {blob}")
        if isinstance(output, Task):
            if len(output.outputs()) != 1:
                raise InvalidArgumentError(f"{output} has {len(output.outputs())} outputs; pass the one that is meant")
            output = output.outputs()[0]
        condition = OutputIsTrue(output) if isinstance(output, TaskOutput) else stop.as_condition(output)
        self._conditions.append(condition)

    def stop_when(self, condition: Any) -> Any:
        """The same as `add_stop_condition`; returns what it was given, so that it decorates functions, too."""
        self.add_stop_condition(condition)
        return condition

    def setup(self, fn: F) -> F:
        """Decorator: runs at every start, before `init_group` or the restore.

        It makes the live objects (model, optimizer, mesh, iterator) and says with `ws.target(name, abstract)` how
        blobs come back. A blob that the epoch lacks keeps what setup made.
        """
        return self._add(self.setup_group, fn)

    def init(self, fn: F) -> F:
        """Decorator: a task of `init_group`."""
        return self._add(self.init_group, fn)

    def epoch(self, fn: Callable[[Workspace], Any] | None = None, *, resumable: bool = False) -> Any:
        """Decorator: a task of `epoch_group`. It may return a mapping of scalars: the epoch's metrics.

        Args:
            fn: the function.
            resumable: the epoch's position is in its blobs, so that a preempted epoch may be saved as it is, and
                entered again.
        """
        if fn is None:
            return lambda fn: self.epoch(fn, resumable=resumable)
        self.resumable = self.resumable or resumable
        return self._add(self.epoch_group, fn)

    def download(self, fn: F) -> F:
        """Decorator: a task of `download_group`."""
        return self._add(self.download_group, fn)

    def exit(self, fn: F) -> F:
        """Decorator: a task of `exit_group`."""
        return self._add(self.exit_group, fn)

    @staticmethod
    def _add(group: TaskGroup, fn: F) -> F:
        with joining(group):
            Task(fn)
        return fn


def epoch_limiter(job: Job, num_epochs: int) -> None:
    """Ends a job when `num_epochs` epochs have been done in all. Caffe2's name for `stop.max_epochs`."""
    job.add_stop_condition(stop.max_epochs(num_epochs))


def _group(given: TaskGroup | None, name: str) -> TaskGroup:
    if given is None:
        return TaskGroup(name)
    if not isinstance(given, TaskGroup):
        raise InvalidArgumentError(f"{name}_group must be a TaskGroup, got {type(given).__name__}")
    return given
