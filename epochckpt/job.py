"""`Job`: the phases of a training job and when it ends. Names and meaning from Caffe2."""

from __future__ import annotations

import abc
import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from epochckpt import stop
from epochckpt.errors import InvalidArgumentError
from epochckpt.tasks import Node, Task, TaskGroup, TaskOutput, joining
from epochckpt.workspace import Workspace

F = TypeVar("F", bound=Callable[[Workspace], Any])

_current: contextvars.ContextVar[Job | None] = contextvars.ContextVar("epochckpt_job", default=None)


class OfEpoch(stop.Condition):
    """A stop condition on what the tasks of the epoch have computed: true if that is true on any node.

    A process that hosts no node that has a value has no vote. What the value would be is not known before an epoch has
    been trained.

    Attributes:
        unheard: what is wrong if no node of the job has a value.
    """

    unheard = ""

    @abc.abstractmethod
    def values(self, root: Workspace) -> list[Any]:
        """The values on the nodes of this process; must be booleans.

        Args:
            root: the workspace of the session.
        """

    def __call__(self, ctx: stop.Context) -> bool:
        """Whether one is true after this epoch."""
        answers = [stop.checked(self, value, ctx.epoch) for value in self.values(ctx.workspace)]
        return any(answers)

    def holds(self, ctx: stop.Context) -> bool:
        """Not known before the tasks have run."""
        del ctx
        return False


class OutputIsTrue(OfEpoch):
    """A task's output, as a stop condition.

    Args:
        output: of a task of the epoch group.
    """

    unheard = "the task has run on no node; is it in the epoch group?"

    def __init__(self, output: TaskOutput):
        self.output = output

    def values(self, root: Workspace) -> list[Any]:
        """See OfEpoch."""
        del root
        return self.output.values()

    def __repr__(self) -> str:
        return repr(self.output)


class BlobIsTrue(OfEpoch):
    """A blob, as a stop condition.

    Args:
        name: of a blob of all nodes that have it, or `node/blob` of one.
        node: look at this node only.
    """

    unheard = "no node has it after the epoch"

    def __init__(self, name: str, node: str | None):
        self.name, self.node = name, node

    def values(self, root: Workspace) -> list[Any]:
        """See OfEpoch."""
        spaces = [ws for ws in root.children.values() or [root] if self.node in (None, ws.node)]
        names = [(ws, self.name if self.name in ws else self.name.removeprefix(f"{ws.node}/")) for ws in spaces]
        return [ws[name] for ws, name in names if name in ws]

    def __repr__(self) -> str:
        return f"blob {self.name!r}" + (f" of node {self.node}" if self.node else "")


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
        used = [node for group in self._groups() for node in group.used_nodes()]
        return list(dict.fromkeys([*self.nodes_to_checkpoint(), *used]))

    def _groups(self) -> Sequence[TaskGroup]:
        return self.setup_group, self.init_group, self.epoch_group, self.download_group, self.exit_group

    def start_afresh(self) -> None:
        """Forgets what tasks gave, and conditions counted, in an earlier run of this job; a run begins with it."""
        for group in self._groups():
            for task in group.tasks():
                for output in task.outputs():
                    output.forget()
        stop.load_states(self._conditions, None)

    def compile(self, session_class: type) -> None:
        """Fixes the nodes to checkpoint, and the kind of session that the job is to run in."""
        if not isinstance(session_class, type):
            raise InvalidArgumentError(f"compile() takes a session class, got {session_class!r}")
        self.session_class = session_class
        self._nodes = self.nodes_to_checkpoint() or None

    def add_stop_condition(self, output: Any) -> None:
        """Adds a stop condition.

        Args:
            output: a `TaskOutput`, a `Task` with one output, the name of a blob (of one node: `node/blob`, or inside
                `with Node(…)`), a condition of `epochckpt.stop`, or any callable of a `stop.Context`. The values of
                outputs and blobs must be booleans; one node where it is true is enough.
        """
        if isinstance(output, str):
            output = BlobIsTrue(output, Node.current())
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
