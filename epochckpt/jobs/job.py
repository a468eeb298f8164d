"""`Job`, and what it is made of: tasks, groups of tasks, and nodes. Names and meaning from Caffe2."""

from __future__ import annotations

import contextvars
import inspect
import itertools
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Any, ClassVar, TypeVar

from absl import logging

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths
from epochckpt.jobs import stop, stop_states
from epochckpt.jobs.job_conditions import ComputedCondition, StopConditions, blob_condition
from epochckpt.jobs.notes import EPOCH, STEP
from epochckpt.jobs.workspace import Workspace

F = TypeVar("F", bound=Callable[[Workspace], Any])


class _Scope:
    """A context manager that makes an object the current one of its class; it may be entered again inside itself."""

    context_variable: ClassVar[contextvars.ContextVar[Any]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if _Scope in cls.__bases__:  # a user's `class MyJob(Job)` shares the variable of `Job`
            cls.context_variable = contextvars.ContextVar(f"epochckpt.{cls.__name__}", default=None)

    def __init__(self) -> None:
        self._tokens: list[contextvars.Token[Any]] = []

    def __enter__(self) -> Any:
        self._tokens.append(self.context_variable.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self.context_variable.reset(self._tokens.pop())


class Node(_Scope):
    """Inside `with Node("trainer_0"):` tasks are made for that node.

    The name is any text without '/'. The node's folder has it; characters that a folder cannot have are escaped.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = paths.check_node_name(name)
        if (cluster := Cluster.context_variable.get()) is not None:
            cluster.add(self.name)

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def current() -> str | None:
        """The name of the surrounding `with Node(…)`, or None."""
        node = Node.context_variable.get()
        return None if node is None else node.name


class Cluster(_Scope):
    """Inside `with Cluster() as cluster:` every `Node` that is made belongs to the cluster."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, None] = {}

    def add(self, node: str) -> None:
        """Adds a node, once."""
        self._nodes[node] = None

    def nodes(self) -> list[str]:
        """The nodes' names, in the order in which they were made."""
        return list(self._nodes)


class TaskOutput:
    """What a task gave when it last ran: what its function returned, or a blob."""

    def __init__(self, task: Task, blob: str | None):
        self.task = task
        self.blob = blob
        self._by_node: dict[str, Any] = {}  # the values of the last run, on the nodes of this process

    def fetch(self, node: str | None = None) -> Any:
        """The value after the last run, on the named node or the only one on which the task ran.

        Raises:
            InvalidArgumentError: the task has not run here, or it has run on several nodes and none is named.
        """
        if node is None and len(self._by_node) == 1:
            return next(iter(self._by_node.values()))
        if node not in self._by_node:
            ran = ", ".join(self._by_node) or "none"
            raise InvalidArgumentError(f"{self}: say which node's value; it has run on: {ran}")
        return self._by_node[node]

    def values(self) -> list[Any]:
        """The values of all nodes of this process on which the task has run."""
        return list(self._by_node.values())

    def give(self, node: str, value: Any) -> None:
        """The task has run on this node, and has given this value."""
        self._by_node[node] = value

    def clear(self) -> None:
        """Forgets the values of the last run."""
        self._by_node.clear()

    def __repr__(self) -> str:
        return f"output {self.blob or 'value'!r} of {self.task}"


class Task:
    """A Python callable that runs on a workspace.

    Examples:
        >>> session = ec.LocalSession()
        >>> task = ec.Task(lambda ws: ws.update(x=1), outputs="x")
        >>> session.run(task)
        {'process_0': [None]}
        >>> task.outputs()[0].fetch()
        1

    Args:
        fn: called as `fn(workspace)`.
        outputs: names of the blobs that the task gives; by default one output, what `fn` returns.
        group: by default that of the surrounding `with group:`, else the `epoch_group` of the surrounding
            `with Job() as job:`, else none.
        node: by default that of the surrounding `with Node(…):`, else every node.
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
        self._group: TaskGroup | None = None
        group = group if group is not None else TaskGroup.context_variable.get()
        if group is not None:
            group.add(self)

    @property
    def group(self) -> TaskGroup | None:
        """The group that it has joined, if any."""
        return self._group

    def join(self, group: TaskGroup) -> None:
        """Called by the group: the task belongs to it from here on, and to no other one."""
        self._group = group

    def outputs(self) -> list[TaskOutput]:
        """Its outputs; `fetch()` gives their values after a run."""
        return list(self._outputs)

    def run(self, workspace: Workspace) -> Any:
        """Runs the task on a node's workspace; called by a session."""
        returned = self.fn(workspace)
        for output in self._outputs:
            if output.blob is not None and output.blob not in workspace:
                problem = f"{self} was to give blob {output.blob!r}, which does not exist after it"
                raise InvalidArgumentError(f"{problem}; {_text.near(output.blob, workspace)}")
            output.give(workspace.node, returned if output.blob is None else workspace[output.blob])
        return returned

    def __repr__(self) -> str:
        return f"task {self.name!r}"


class TaskGroup(_Scope):
    """The tasks of one phase, in the order in which they were added. Inside `with group:` new tasks join the group.

    Examples:
        >>> with ec.TaskGroup("evaluation") as group:  # the name is for messages
        ...     task = ec.Task(lambda ws: ws["x"] + 1, node="trainer_0")
        >>> group.used_nodes()
        ['trainer_0']
    """

    def __init__(self, name: str = "group"):
        super().__init__()
        self.name = name
        self._tasks: list[Task] = []

    def add(self, task: Task) -> Task:
        """Adds a task, which must be in no group yet, at the end."""
        if not isinstance(task, Task):
            raise InvalidArgumentError(f"{self} takes tasks, got {type(task).__name__}; wrap a function: Task(fn)")
        if task.group is not None:
            raise InvalidArgumentError(f"{task} is in {task.group} already")
        task.join(self)
        self._tasks.append(task)
        return task

    def define(self, fn: Callable[[Workspace], Any]) -> None:
        """Makes a task of a function. One that a notebook's cell defines again takes the place of the older one."""
        for i, older in enumerate(self._tasks):
            if _is_defined_again(older.fn, fn):
                logging.info("%s: %s was defined again; the newer function takes its place", self, older)
                self._tasks[i] = Task(fn, group=TaskGroup(self.name), node=older.node)
                self._tasks[i].join(self)
                return
        Task(fn, group=self)

    def tasks(self) -> list[Task]:
        """Its tasks."""
        return list(self._tasks)

    def used_nodes(self) -> list[str]:
        """The nodes that its tasks name, in the order of first use."""
        return list(dict.fromkeys(t.node for t in self._tasks if t.node is not None))

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks())

    def __repr__(self) -> str:
        return f"group {self.name!r}"


class Job(_Scope):
    """A training job: what runs once, what runs every epoch, and when it is over.

    It is made with decorators for functions of a `Workspace`, and `job.stop_when(condition)`, or in Caffe2's form:
    `with Job() as job:` and tasks in `job.init_group`, `job.epoch_group`, and so on.

    Examples:
        >>> job = ec.Job()
        >>> @job.init
        ... def init(ws):
        ...     ws["total"] = 0
        >>> @job.epoch
        ... def train(ws):
        ...     ws["total"] += ws.epoch
        ...     return {"total": ws["total"]}
        >>> _ = job.stop_when(lambda ctx: ctx.metrics["total"] >= 6)
        >>> ec.JobRunner(job).train(ec.LocalSession())
        3

    Args:
        init_group: runs once, only from scratch.
        epoch_group: runs once per epoch.
        download_group: runs once, after the last epoch.
        exit_group: runs once, at the very end. If the run is preempted in this group or the download group, a restart
            runs both again.
        stop_conditions: see `add_stop_condition`.
        nodes_to_checkpoint: by default those that `init_group` uses.
        unit: what the job counts: `"epoch"`, or `"step"` for training that has no epochs.
        steps_per_epoch: of a job that counts steps: how many the tasks of `epoch_group` do each time they are called.
            Its epochs are then called steps, and numbered by the steps that have been done: 0, 1000, 2000, and so on.
            `ws.steps` is the range of those that a call does.
    """

    def __init__(
        self,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: Sequence[Any] | None = None,
        nodes_to_checkpoint: Sequence[str] | None = None,
        *,
        unit: str = EPOCH,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if unit not in (EPOCH, STEP):
            raise InvalidArgumentError(f"unit must be 'epoch' or 'step', got {unit!r}")
        if (unit == STEP) != (steps_per_epoch is not None):
            raise InvalidArgumentError("a job that counts steps says how many: Job(unit='step', steps_per_epoch=1000)")
        self.unit = unit
        self.stride = 1 if steps_per_epoch is None else _positive(steps_per_epoch)
        self.setup_group = TaskGroup("setup")
        self.init_group = _group(init_group, "init")
        self.epoch_group = _group(epoch_group, "epoch")
        self.download_group = _group(download_group, "download")
        self.exit_group = _group(exit_group, "exit")
        self.resumable = False
        self.session_class: type | None = None
        self._conditions = StopConditions(self._as_condition)
        self._nodes = [str(n) for n in nodes_to_checkpoint or ()] or None
        for condition in stop_conditions or ():
            self.add_stop_condition(condition)

    @staticmethod
    def current() -> Job | None:
        """The job of the surrounding `with Job() as job:`, or None."""
        return Job.context_variable.get()

    def __enter__(self) -> Job:
        self.epoch_group.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.epoch_group.__exit__(*exc)

    @property
    def stop_conditions(self) -> MutableSequence[stop.Condition]:
        """What ends the job; every condition is evaluated after every epoch. What is appended is added to the job."""
        return self._conditions

    @stop_conditions.setter
    def stop_conditions(self, conditions: Sequence[Any]) -> None:
        if conditions is not self._conditions:  # as after `+=`
            self._conditions[:] = list(conditions)

    def nodes_to_checkpoint(self) -> list[str]:
        """The checkpointed nodes: the given ones, or the nodes that `init_group` uses. Empty: all of the session."""
        return list(self._nodes) if self._nodes is not None else self.init_group.used_nodes()

    def nodes(self) -> list[str]:
        """All nodes that the job names, in order: in a `DistributedSession` they are the processes 0, 1, ….

        The nodes stand in the order of their first use by tasks; the tasks of `init_group` come first. If
        `nodes_to_checkpoint` lists all nodes, its order counts instead.
        """
        used = [*self.init_group.used_nodes(), *(task.node for task in self._tasks() if task.node is not None)]
        kept = self.nodes_to_checkpoint()
        return list(dict.fromkeys([*kept, *used] if set(kept) >= set(used) else [*used, *kept]))

    def _tasks(self) -> Iterator[Task]:
        groups = self.setup_group, self.init_group, self.epoch_group, self.download_group, self.exit_group
        return itertools.chain.from_iterable(groups)

    def reset(self) -> None:
        """Forgets what tasks gave and conditions counted in an earlier run of this job; every run begins with it."""
        for task in self._tasks():
            for output in task.outputs():
                output.clear()
        stop_states.load_states(self._conditions, None)

    def compile(self, session_class: type) -> None:
        """Fixes the nodes to checkpoint, and the kind of session that the job is to run in."""
        if not isinstance(session_class, type):
            raise InvalidArgumentError(f"compile() takes a session class, got {session_class!r}")
        self.session_class = session_class
        self._nodes = self.nodes_to_checkpoint() or None

    def add_stop_condition(self, output: Any) -> None:
        """Adds a stop condition.

        It is a `TaskOutput`, a `Task` with one output, the name of a blob (of one node: `node/blob`, or inside
        `with Node(…)`), a condition of `epochckpt.stop`, or any callable of a `stop.Context`. The values of outputs and
        blobs must be booleans; one node where it is true is enough.
        """
        self._conditions.append(output)

    def _as_condition(self, output: Any) -> stop.Condition:
        """The stop condition that something stands for, see `add_stop_condition`."""
        if isinstance(output, Task):
            if len(output.outputs()) != 1:
                raise InvalidArgumentError(f"{output} has {len(output.outputs())} outputs; pass one of them")
            (output,) = output.outputs()
        if isinstance(output, str):
            condition = blob_condition(output, Node.current())
        elif isinstance(output, TaskOutput):
            missing = "the task has run on no node; is it in the epoch group?"
            condition = ComputedCondition(repr(output), lambda _: output.values(), missing)
        else:
            condition = stop.as_condition(output)
        for part in stop.counts([condition]):
            if part.unit != self.unit:
                raise InvalidArgumentError(f"{part!r} ends no job that counts {self.unit}s: max_{self.unit}s(n) does")
            if part.n % self.stride:
                last = -(-part.n // self.stride) * self.stride
                logging.warning("%r is no multiple of steps_per_epoch=%d: a run ends at %d", part, self.stride, last)
        own = {id(task.fn): task for task in self._tasks()}
        for function in stop.functions([condition]):
            if (task := own.get(id(function))) is not None:  # it would be called with a stop.Context as its workspace
                raise InvalidArgumentError(
                    f"{task} of {task.group} is no stop condition: it takes a workspace. To stop when it returns True, "
                    "make it with task = ec.Task(function) and call job.stop_when(task), by itself, not in a | b"
                )
        return condition

    def stop_when(self, condition: Any) -> Any:
        """The same as `add_stop_condition`; returns the condition, so that it also decorates functions."""
        self.add_stop_condition(condition)
        return condition

    def setup(self, fn: F) -> F:
        """Decorator: runs at every start, before `init_group` or the restore.

        The function makes the live objects (model, optimizer, mesh, iterator) and declares with `ws.target` how blobs
        come back. A blob that the epoch lacks keeps what setup made.
        """
        self.setup_group.define(fn)
        return fn

    def init(self, fn: F) -> F:
        """Decorator: a task of `init_group`."""
        self.init_group.define(fn)
        return fn

    def epoch(self, fn: Callable[[Workspace], Any] | None = None, *, resumable: bool = False) -> Any:
        """Decorator: a task of `epoch_group`. It may return a mapping of scalars: the epoch's metrics.

        With `resumable=True` the position in the epoch is in its blobs, so that a preempted epoch may be saved as it
        is, and entered again.
        """
        if fn is None:
            return lambda fn: self.epoch(fn, resumable=resumable)
        self.resumable = self.resumable or resumable
        self.epoch_group.define(fn)
        return fn

    def download(self, fn: F) -> F:
        """Decorator: a task of `download_group`."""
        self.download_group.define(fn)
        return fn

    def exit(self, fn: F) -> F:
        """Decorator: a task of `exit_group`."""
        self.exit_group.define(fn)
        return fn


def epoch_limiter(job: Job, num_epochs: int) -> None:
    """Ends a job when `num_epochs` epochs have been done in all. Caffe2's name for `stop.max_epochs`.

    Examples:
        >>> job = ec.Job()
        >>> ec.epoch_limiter(job, 10)
        >>> job.stop_conditions
        [max_epochs(10)]
    """
    job.add_stop_condition(stop.max_epochs(num_epochs))


def _is_defined_again(older: Any, newer: Any) -> bool:
    """Whether a cell of a notebook was run again: a function of the same name, from another run of the same source.

    Functions of one name are several tasks in a loop (one code object), in one file (other lines), and in functions.
    """
    name = getattr(newer, "__qualname__", "_")
    if name == "_" or "<" in name or name != getattr(older, "__qualname__", None):
        return False
    if older.__module__ != newer.__module__:
        return False
    old, new = (getattr(inspect.unwrap(fn), "__code__", None) for fn in (older, newer))
    if old is None or new is None or old is new:
        return False
    return old.co_filename != new.co_filename or old.co_firstlineno == new.co_firstlineno


def _positive(steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgumentError(f"steps_per_epoch is an integer of at least 1, got {steps!r}")
    return steps


def _group(given: TaskGroup | None, name: str) -> TaskGroup:
    if given is None:
        return TaskGroup(name)
    if not isinstance(given, TaskGroup):
        raise InvalidArgumentError(f"{name}_group must be a TaskGroup, got {type(given).__name__}")
    return given
