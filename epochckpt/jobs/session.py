"""Where tasks run: `LocalSession` (all nodes in this process) and `DistributedSession` (this process is one node)."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from epochckpt.agreement import Coordinator, coordination
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, TaskError, say
from epochckpt.jobs.job import Task, TaskGroup
from epochckpt.jobs.workspace import Workspace


class Session(abc.ABC):
    """Runs tasks and groups of tasks. `root` is the workspace of the only node here, or the parent of all of them."""

    def __init__(self, workspace: Workspace | None, coordinator: Coordinator):
        if workspace is not None and not isinstance(workspace, Workspace):
            raise InvalidArgumentError(f"a session takes an epochckpt.Workspace, got {type(workspace).__name__}")
        self.root = workspace if workspace is not None else Workspace()
        self.coordinator = coordinator
        self._unit = "epoch"
        self._nodes: tuple[str, ...] = ()
        self._name_root()

    @abc.abstractmethod
    def open(self, nodes: Sequence[str]) -> None:
        """Takes the nodes of a job, all of them, in order; the runner calls it before anything runs.

        By hand it is needed only in a `DistributedSession`, and there only if the first group that runs does not name
        one node for each process. Raises InvalidArgumentError if the session cannot run these nodes.
        """

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the job; `process_<index>` if it names none."""
        return self._nodes or tuple(f"process_{i}" for i in range(self.coordinator.processes))

    @property
    def hosted(self) -> tuple[str, ...]:
        """The nodes that run in this process."""
        coordinator = self.coordinator
        return self.nodes if coordinator.processes == 1 else (self.nodes[coordinator.process],)

    def workspace(self, node: str | None = None) -> Workspace:
        """The workspace of a node of this process; the name may be left out if there is only one."""
        spaces = self.workspaces()
        if node is None and len(spaces) == 1:
            (node,) = spaces
        if node is None or node not in spaces:
            raise InvalidArgumentError(f"expected one of the nodes of this process, {', '.join(spaces)}; got {node!r}")
        return spaces[node]

    def workspaces(self) -> Mapping[str, Workspace]:
        """The workspaces of this process, by node."""
        first, *others = self.hosted
        return {node: self.root.child(node) for node in self.hosted} if others else {first: self.root}

    def count_in(self, unit: str) -> None:
        """Called by the runner: what the job counts, `epoch` or `step`; for errors."""
        self._unit = unit

    def _take(self, nodes: Sequence[str]) -> None:
        """These are the nodes of the job."""
        self._nodes = tuple(nodes)
        self._name_root()

    def _name_root(self) -> None:
        if len(self.hosted) == 1:
            self.root.be_of(self.hosted[0])

    def run(self, runnable: Task | TaskGroup) -> dict[str, list[Any]]:
        """Runs a task, or the tasks of a group in their order, on the nodes of this process.

        Returns what the tasks returned, by node.

        Raises:
            TaskError: a task raised; names the task and its node. The task's error is the cause.
        """
        if not isinstance(runnable, Task | TaskGroup):
            raise InvalidArgumentError(f"a session runs tasks and task groups, got {type(runnable).__name__}")
        tasks = [runnable] if isinstance(runnable, Task) else runnable.tasks()
        self._meet(list(dict.fromkeys(task.node for task in tasks if task.node is not None)))
        for unknown in (task for task in tasks if task.node not in (None, *self.nodes)):
            problem = f"{unknown} is for node {unknown.node!r}"
            raise InvalidArgumentError(f"{problem}; the nodes of this session are: {', '.join(self.nodes)}")
        returned: dict[str, list[Any]] = {}
        for task in tasks:
            for node, workspace in self.workspaces().items():
                if task.node in (None, node):
                    returned.setdefault(node, []).append(_run(task, workspace, self._unit))
        return returned

    @abc.abstractmethod
    def _meet(self, named: Sequence[str]) -> None:
        """Takes the nodes that tasks name, before any of them runs, if no runner has opened the session."""


class LocalSession(Session):
    """Runs the tasks of every node in this process, each node with its own workspace.

    Examples:
        >>> session = ec.LocalSession()
        >>> session.run(ec.Task(lambda ws: ws.update(x=1)))
        {'process_0': [None]}
        >>> session.workspace()["x"]
        1

    Args:
        workspace: of the only node; with several nodes theirs become its children.

    Raises:
        InvalidArgumentError: this is one process of a `jax.distributed` job.
    """

    def __init__(self, workspace: Workspace | None = None):
        super().__init__(workspace, Coordinator())
        if jax.process_count() > 1:
            job = f"one of {jax.process_count()} of a jax.distributed job: use DistributedSession"
            raise InvalidArgumentError(f"LocalSession runs all nodes in one process; this is {job}")

    def open(self, nodes: Sequence[str]) -> None:
        if len(self._nodes) == 1 < len(nodes):
            self.root.make_child_of(self._nodes[0])
        self._take(nodes)

    def _meet(self, named: Sequence[str]) -> None:
        self.open(list(dict.fromkeys([*self._nodes, *named])))


LocalHostScheduler = LocalSession  # Caffe2's other name for it


class DistributedSession(Session):
    """Runs the tasks of this process's node, in a `jax.distributed` job. Make one in every process.

    The job's nodes, in the order of `Job.nodes()`, are the processes 0, 1, …; a job that names none runs every task on
    every process.
    """

    def __init__(self, workspace: Workspace | None = None):
        super().__init__(workspace, coordination.connect(False))

    def open(self, nodes: Sequence[str]) -> None:
        if len(nodes) != self.coordinator.processes:
            mismatch = (
                f"the job has {len(nodes)} nodes ({', '.join(nodes)}), jax.distributed {self.coordinator.processes}"
            )
            raise InvalidArgumentError(f"{mismatch} processes; a DistributedSession needs one process per node")
        self._take(nodes)

    def _meet(self, named: Sequence[str]) -> None:
        if self._nodes or set(named) <= set(self.nodes):
            return
        if len(named) != (count := self.coordinator.processes):
            problem = f"these tasks name {', '.join(named)}, and the session does not know the job's nodes yet"
            raise InvalidArgumentError(f"{problem}. Name all {count}, in the order of the processes: session.open([…])")
        self.open(named)


def default_session(kind: type | None) -> Session:
    """A session of this class, if it is one of ours; else of the one that fits the processes of the job."""
    if kind is None:
        kind = DistributedSession if jax.process_count() > 1 else LocalSession
    if kind not in (DistributedSession, LocalSession):
        raise InvalidArgumentError(f"the job was compiled for {kind.__name__}: make one, and pass it to train()")
    return kind()


def _run(task: Task, workspace: Workspace, unit: str) -> Any:
    group = task.group.name if task.group else "-"
    node = workspace.node
    epoch = workspace.epoch
    try:
        return task.run(workspace)
    except EpochCheckpointError as error:  # its message is clear, and callers know its type
        error.add_note(f"in {task} of group {group!r} on node {node}, {unit} {epoch}")
        raise
    except Exception as error:
        raise TaskError(
            task=task.name,
            group=group,
            node=node,
            epoch=epoch,
            reason=say(error),
            unit=unit,
        ) from error
