"""`Job`: the phases of a training job and when it ends. Names and meaning from Caffe2.

What a job is made of: tasks, groups of tasks, and the nodes that they run on. Names and meaning from Caffe2.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths
from epochckpt.jobs import stop
from epochckpt.jobs.workspace import Workspace

_node: contextvars.ContextVar[str | None] = contextvars.ContextVar("epochckpt_node", default=None)
_surrounding: contextvars.ContextVar[TaskGroup | None] = contextvars.ContextVar("epochckpt_group", default=None)
_cluster: contextvars.ContextVar[Cluster | None] = contextvars.ContextVar("epochckpt_cluster", default=None)


class _Within:
    """A context manager that sets a context variable; it may be entered again, also inside itself."""

    _variable: contextvars.ContextVar[Any]

    def __init__(self) -> None:
        self._tokens: list[contextvars.Token[Any]] = []

    def _value(self) -> Any:
        return self

    def __enter__(self) -> Any:
        self._tokens.append(self._variable.set(self._value()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._variable.reset(self._tokens.pop())


class Node(_Within):
    """Inside `with Node("trainer_0"):` tasks are made for that node.

    Args:
        name: any text without '/'. The node's folder is called so; characters that may not stand there are escaped.
    """

    _variable = _node

    def __init__(self, name: str):
        super().__init__()
        self.name = paths.check_node_name(name)
        cluster = _cluster.get()
        if cluster is not None:
            cluster.add(self.name)

    def _value(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def current() -> str | None:
        """The node of the surrounding `with Node(…)`, or None."""
        return _node.get()


class Cluster(_Within):
    """Inside `with Cluster() as cluster:` every `Node` that is made belongs to it."""

    _variable = _cluster

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[str] = []

    def add(self, node: str) -> None:
        """Adds a node, once."""
        if node not in self._nodes:
            self._nodes.append(node)

    def nodes(self) -> list[str]:
        """The nodes' names, in the order in which they were made."""
        return list(self._nodes)


class TaskOutput:
    """What a task gave when it last ran: what its function returned, or a blob."""

    def __init__(self, task: Task, blob: str | None):
        self.task, self.blob = task, blob
        self._values: dict[str, Any] = {}

    def fetch(self, node: str | None = None) -> Any:
        """The value after the last run.

        Args:
            node: of which node; may be left out if the task ran on one.

        Raises:
            InvalidArgumentError: the task has not run here, or on several nodes and none was named.
        """
        if node is None and len(self._values) == 1:
            return next(iter(self._values.values()))
        if node not in self._values:
            ran = ", ".join(self._values) or "none"
            raise InvalidArgumentError(f"{self}: say which node's value; it has run on: {ran}")
        return self._values[node]

    def forget(self) -> None:
        """Forgets the values: another run begins."""
        self._values.clear()

    def values(self) -> list[Any]:
        """The values of all nodes of this process on which the task has run."""
        return list(self._values.values())

    def __repr__(self) -> str:
        return f"output {self.blob or 'value'!r} of {self.task}"

    def take(self, workspace: Workspace, returned: Any) -> None:
        """Takes the value of a run that has just ended."""
        if self.blob is None:
            self._values[workspace.node] = returned
        elif self.blob in workspace:
            self._values[workspace.node] = workspace[self.blob]
        else:
            raise InvalidArgumentError(f"{self.task} was to give blob {self.blob!r}, which does not exist after it")


class Task:
    """A Python callable that runs on a workspace.

    Args:
        fn: called as `fn(workspace)`.
        outputs: names of the blobs that the task gives; by default one output, what `fn` returns.
        group: the group it belongs to; by default that of the surrounding `with group:`, else the `epoch_group` of
            the surrounding `with Job() as job:`, else none.
        node: the node it runs on; by default that of the surrounding `with Node(…):`, else every node.
        name: for messages; by default the function's.
    """

    def __init__(
        self,
        fn: Callable[[Workspace], Any],
        outputs: str | Sequence[str] | None = None,
        group: TaskGroup | None = None,
        *,
        node: str | Node | None = None,
        name: str | None = None,
    ):
        if not callable(fn):
            raise InvalidArgumentError(f"a task is made of a function of the workspace, got {type(fn).__name__}")
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        node = Node.current() if node is None else str(node)
        self.node = None if node is None else paths.check_node_name(node)
        blobs: Sequence[str | None] = [outputs] if isinstance(outputs, str) else (outputs or [None])
        self._outputs = [TaskOutput(self, blob) for blob in blobs]
        self.group: TaskGroup | None = None
        group = group if group is not None else _surrounding.get()
        if group is not None:
            group.add(self)

    def outputs(self) -> list[TaskOutput]:
        """Its outputs; `fetch()` gives their values after a run."""
        return list(self._outputs)

    def run(self, workspace: Workspace) -> Any:
        """Runs it; a session does that."""
        returned = self.fn(workspace)
        for output in self._outputs:
            output.take(workspace, returned)
        return returned

    def __repr__(self) -> str:
        return f"task {self.name!r}"


class TaskGroup(_Within):
    """The tasks of one phase, in the order in which they were added. Inside `with group:` new tasks join it.

    Args:
        name: for messages.
    """

    _variable = _surrounding

    def __init__(self, name: str = "group"):
        super().__init__()
        self.name = name
        self._tasks: list[Task] = []

    def add(self, task: Task) -> Task:
        """Adds a task at the end.

        Raises:
            InvalidArgumentError: it belongs to a group already.
        """
        if not isinstance(task, Task):
            raise InvalidArgumentError(f"{self} takes tasks, got {type(task).__name__}; wrap a function: Task(fn)")
        if task.group is not None:
            raise InvalidArgumentError(f"{task} is in {task.group} already")
        task.group = self
        self._tasks.append(task)
        return task

    def tasks(self) -> list[Task]:
        """Its tasks."""
        return list(self._tasks)

    def used_nodes(self) -> list[str]:
        """The nodes that its tasks name, in the order of first use."""
        return list(dict.fromkeys(t.node for t in self._tasks if t.node is not None))

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks())

    def __len__(self) -> int:
        return len(self._tasks)

    def __bool__(self) -> bool:
        return True  # an empty group is a group

    def __repr__(self) -> str:
        return f"group {self.name!r}"


@contextlib.contextmanager
def joining(group: TaskGroup | None) -> Iterator[None]:
    """Tasks that are made meanwhile join `group`; None: they join nothing, whatever surrounds it."""
    token = _surrounding.set(group)
    try:
        yield
    finally:
        _surrounding.reset(token)


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
