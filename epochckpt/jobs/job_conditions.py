"""The stop conditions of one job: those on values that its tasks compute, and the list of all."""

from collections.abc import Callable, MutableSequence
from typing import Any

from epochckpt.jobs import stop
from epochckpt.jobs.workspace import Workspace


class ComputedCondition(stop.Condition):
    """A stop condition on values that the tasks of the epoch compute: true if a value is true on any node.

    `values` gives the booleans on the nodes of this process, from the session's workspace; a process without one has no
    vote. `missing` says what is wrong if no process has one. `blob` is the blob that the condition reads, or empty.
    """

    def __init__(self, name: str, values: Callable[[Workspace], list[Any]], missing: str, blob: str = ""):
        self._repr = name
        self.values = values
        self.missing = missing
        self.blob = blob

    def __call__(self, ctx: stop.Context) -> bool:
        """Whether one is true after this epoch."""
        answers = [stop.checked(self, value, ctx) for value in self.values(ctx.workspace)]
        return any(answers)

    def holds(self, ctx: stop.Context) -> bool:
        """False: not known before the tasks have run."""
        return False


class StopConditions(MutableSequence[stop.Condition]):
    """The stop conditions of a job: a list, in which everything that `Job.add_stop_condition` takes may be put."""

    def __init__(self, as_condition: Callable[[Any], stop.Condition]):
        self._as_condition = as_condition
        self._conditions: list[stop.Condition] = []

    def __getitem__(self, index: Any) -> Any:
        return self._conditions[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._conditions[index] = [self._as_condition(one) for one in value]
        else:
            self._conditions[index] = self._as_condition(value)

    def __delitem__(self, index: Any) -> None:
        del self._conditions[index]

    def __len__(self) -> int:
        return len(self._conditions)

    def insert(self, index: int, value: Any) -> None:
        """See `list.insert`."""
        self._conditions.insert(index, self._as_condition(value))

    def __repr__(self) -> str:
        return repr(self._conditions)


def blob_condition(name: str, node: str | None) -> ComputedCondition:
    """A stop condition on a blob of all nodes that have it, or on one node's: `node`, or a name `node/blob`."""

    def values(root: Workspace) -> list[Any]:
        spaces = [ws for ws in root.children.values() or [root] if node in (None, ws.node)]
        names = [(ws, name if name in ws else name.removeprefix(f"{ws.node}/")) for ws in spaces]
        return [ws[blob] for ws, blob in names if blob in ws]

    of_node = f" of node {node}" if node else ""
    return ComputedCondition(
        name=f"blob {name!r}{of_node}",
        values=values,
        missing="no node has it after the epoch",
        blob=name,
    )
