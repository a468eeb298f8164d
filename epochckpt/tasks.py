"""What a job is made of: tasks, groups of tasks, and the nodes that they run on. Names and meaning from Caffe2."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from epochckpt import layout
from epochckpt.errors import InvalidArgumentError
from epochckpt.workspace import Workspace

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
        self.name = layout.check_node_name(name)
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
        self.node = None if node is None else layout.check_node_name(node)
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
