"""Where tasks run: `LocalSession` (all nodes in this process) and `DistributedSession` (this process is one node)."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from epochckpt.commit import Coordinator, coordination
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, TaskError, say
from epochckpt.jobs.job import Task, TaskGroup
from epochckpt.jobs.workspace import DEFAULT_NODE, Workspace


class Session(abc.ABC):
    """Runs tasks and groups of tasks.

    Attributes:
        root: the workspace that knows all of this process.
    """

    def __init__(self, workspace: Workspace | None = None):
        if workspace is not None and not isinstance(workspace, Workspace):
            raise InvalidArgumentError(f"a session takes an epochckpt.Workspace, got {type(workspace).__name__}")
        self.root = workspace if workspace is not None else Workspace()
        self._nodes: tuple[str, ...] = ()

    @property
    @abc.abstractmethod
    def coordinator(self) -> Coordinator:
        """The other processes."""

    @abc.abstractmethod
    def open(self, nodes: Sequence[str]) -> None:
        """Takes the nodes of a job, all of them, in order; the runner calls it before anything runs.

        By hand it is needed only in a `DistributedSession`, and there only if the first group that runs does not name
        one node for each process.

        Raises:
            InvalidArgumentError: the session cannot run these.
        """

    @property
    @abc.abstractmethod
    def hosted(self) -> tuple[str, ...]:
        """The nodes that run in this process."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the job."""
        return self._nodes or self._default_nodes()

    @abc.abstractmethod
    def _default_nodes(self) -> tuple[str, ...]:
        """The nodes of a job that names none."""

    def workspace(self, node: str | None = None) -> Workspace:
        """The workspace of a node of this process; without a name that of the only one.

        Raises:
            InvalidArgumentError: there are several, or no such node runs here.
        """
        here = self.hosted
        if node is None and len(here) != 1:
            raise InvalidArgumentError(f"several nodes run here; say which: {', '.join(here)}")
        if node is not None and node not in here:
            raise InvalidArgumentError(f"no node {node!r} runs in this process; here: {', '.join(here)}")
        return self._of(here[0] if node is None else node)

    def workspaces(self) -> Mapping[str, Workspace]:
        """The workspaces of this process, by node."""
        return {node: self._of(node) for node in self.hosted}

    def _of(self, node: str) -> Workspace:
        if len(self.nodes) == 1 or not isinstance(self, LocalSession):
            self.root.node = node
            return self.root
        return self.root.child(node)

    def run(self, runnable: Task | TaskGroup) -> dict[str, list[Any]]:
        """Runs a task, or the tasks of a group in their order, on the nodes of this process.

        Returns:
            What the tasks returned, by node.

        Raises:
            TaskError: a task raised; says where. What it raised is the cause.
        """
        if isinstance(runnable, Task):
            tasks, group = [runnable], runnable.group.name if runnable.group else "-"
        elif isinstance(runnable, TaskGroup):
            tasks, group = runnable.tasks(), runnable.name
        else:
            raise InvalidArgumentError(f"a session runs tasks and task groups, got {type(runnable).__name__}")
        self._meet(tasks)
        returned: dict[str, list[Any]] = {}
        for task in tasks:
            for node in self.hosted:
                if task.node in (None, node):
                    returned.setdefault(node, []).append(self._run(task, group, self._of(node)))
        return returned

    def _run(self, task: Task, group: str, workspace: Workspace) -> Any:
        try:
            return task.run(workspace)
        except EpochCheckpointError as error:  # says itself what is wrong, and has a type that callers know
            error.add_note(f"in {task} of group {group!r} on node {workspace.node}, epoch {workspace.epoch}")
            raise
        except Exception as error:
            raise TaskError(task.name, group, workspace.node, workspace.epoch, say(error)) from error

    def _meet(self, tasks: Sequence[Task]) -> None:
        """Looks at the nodes that tasks name, before any of them runs."""
        unknown = [t for t in tasks if t.node is not None and t.node not in self.nodes]
        if unknown:
            raise InvalidArgumentError(
                f"{unknown[0]} is for node {unknown[0].node!r}; the nodes of this session are: {', '.join(self.nodes)}"
            )


class LocalSession(Session):
    """Runs the tasks of every node in this process, each node with its own workspace.

    Args:
        workspace: of the only node; with several nodes theirs become its children.

    Raises:
        InvalidArgumentError: this is one process of a `jax.distributed` job.
    """

    def __init__(self, workspace: Workspace | None = None):
        super().__init__(workspace)
        if jax.process_count() > 1:
            raise InvalidArgumentError(
                f"LocalSession runs all nodes in one process; this is one of {jax.process_count()} of a "
                "jax.distributed job: use DistributedSession"
            )
        self._coordinator = coordination.SingleProcess()

    @property
    def coordinator(self) -> Coordinator:
        """Nobody else."""
        return self._coordinator

    @property
    def hosted(self) -> tuple[str, ...]:
        """All nodes."""
        return self.nodes

    def open(self, nodes: Sequence[str]) -> None:
        """See Session."""
        if len(self._nodes) == 1 < len(nodes):
            self.root.make_child_of(self._nodes[0])
        self._nodes = tuple(nodes)

    def _default_nodes(self) -> tuple[str, ...]:
        return (DEFAULT_NODE,)

    def _meet(self, tasks: Sequence[Task]) -> None:
        """A session that no runner has opened takes the nodes as they come."""
        new = [n for n in dict.fromkeys(t.node for t in tasks) if n is not None and n not in self._nodes]
        if len(self._nodes) == 1 and new:
            self.root.make_child_of(self._nodes[0])
        self._nodes = (*self._nodes, *new)


LocalHostScheduler = LocalSession  # Caffe2's other name for it


class DistributedSession(Session):
    """Runs the tasks of this process's node, in a `jax.distributed` job. Make one in every process.

    The job's nodes, in the order in which it names them, are the processes 0, 1, …; a job that names none runs every
    task on every process.
    """

    def __init__(self, workspace: Workspace | None = None):
        super().__init__(workspace)
        self._coordinator = coordination.connect(False)

    @property
    def coordinator(self) -> Coordinator:
        """The other processes of the job."""
        return self._coordinator

    @property
    def hosted(self) -> tuple[str, ...]:
        """This process's node."""
        return (self.nodes[self._coordinator.process],)

    def open(self, nodes: Sequence[str]) -> None:
        """See Session."""
        if len(nodes) != self._coordinator.processes:
            raise InvalidArgumentError(
                f"the job has {len(nodes)} nodes ({', '.join(nodes)}), jax.distributed has "
                f"{self._coordinator.processes} processes; a DistributedSession needs one process per node"
            )
        self._nodes = tuple(nodes)

    def _meet(self, tasks: Sequence[Task]) -> None:
        """A session that no runner has opened takes the nodes of a group that names one for each process, in order."""
        named = dict.fromkeys(task.node for task in tasks if task.node is not None)
        if not self._nodes and not named.keys() <= set(self.nodes):
            if len(named) != self._coordinator.processes:
                raise InvalidArgumentError(
                    f"these tasks name {', '.join(named)}, and the session does not know the job's nodes yet. Name all "
                    f"{self._coordinator.processes}, in the order of the processes: session.open([…])"
                )
            self.open(list(named))
        super()._meet(tasks)

    def _default_nodes(self) -> tuple[str, ...]:
        return tuple(f"process_{i}" for i in range(self._coordinator.processes))
