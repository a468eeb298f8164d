"""`Workspace`: a node's named blobs, and how they are to come back from a checkpoint."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax

from epochckpt import _renaming, _text
from epochckpt._renaming import Rename
from epochckpt.errors import InvalidArgumentError, WorkspaceAttributeError

Reshard = Callable[[Sequence[Any], int, int], Sequence[Any]]

_ATTRIBUTES = frozenset({"node", "live", "epoch", "steps"})


class Target(NamedTuple):
    """How one blob comes back, see `Workspace.target`."""

    abstract: Any = None
    reshard: Reshard | None = None
    rename: Rename | None = None


def never_stop() -> bool:
    """Nobody preempts the job."""
    return False


def _not_known(blob: str) -> str | None:
    del blob
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerHooks:
    """How a runner answers the questions of one workspace. The defaults are the answers without a runner."""

    should_stop: Callable[[], bool] = never_stop  # see `Workspace.should_stop`
    made_by_init: Callable[[], Mapping[str, Any]] = dict  # see `Workspace.made_by_init`
    why_missing: Callable[[str], str | None] = _not_known  # why a blob is missing; None: the runner does not know


class Workspace(MutableMapping[str, Any]):
    """A node's blobs by name: pytrees of arrays and Python values, or objects with `get_state` and `set_state`.

    The blobs that exist when a job's `init_group` has run are checkpointed, later ones are temporary. What is not to
    be checkpointed at all (a mesh, a compiled function) goes into `live`; other attributes cannot be set.

    A session with several nodes has a workspace for each node, and a parent workspace. In the parent,
    `ws["trainer_0/total"]` is a blob of one node, and `ws["total"]` works if only one node has such a blob.

    Examples:
        >>> ws = ec.Workspace()
        >>> ws["total"] = 0
        >>> ws.live.names = ["a", "b"]
        >>> ws
        Workspace('process_0', blobs: total)

    Attributes:
        node: the node's name.
        live: a namespace of anything, never checkpointed.
        epoch: the epoch that is being trained; 0 before the first. Of a job that counts steps: the number of steps that
            will have been done.
        steps: of a job that counts steps, those that are being trained, as a range: the first is the number of steps
            that have been done. Empty otherwise.
    """

    def __init__(self, node: str = "process_0"):
        self.node = node
        self.live = types.SimpleNamespace()
        self.epoch = 0
        self.steps = range(0)
        self._blobs: dict[str, Any] = {}
        self._targets: dict[str, Target] = {}
        self._children: dict[str, Workspace] = {}
        self._hooks = RunnerHooks()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ATTRIBUTES and not name.startswith("_"):
            raise WorkspaceAttributeError(
                f"ws.{name} = … would not be saved: write ws[{name!r}] = … for a blob, which is checkpointed if init "
                f"makes it, or ws.live.{name} = … for an object that is not to be saved"
            )
        super().__setattr__(name, value)

    def target(
        self, name: str, abstract: Any = None, *, reshard: Reshard | None = None, rename: Rename | None = None
    ) -> None:
        """Says how a blob comes back from a checkpoint; called in `@job.setup`.

        Args:
            name: the blob; InvalidArgumentError, when init has run, if no node has it.
            abstract: a pytree of `jax.ShapeDtypeStruct`s (with shardings) or of values, as for `StandardRestore`, for
                example `jax.eval_shape` of what makes the blob; None: as the epoch has it.
            reshard: for a blob that differs per node, see `epochckpt.args.NodeRestore`.
            rename: for a blob whose leaves had other names when it was saved, see `epochckpt.args.RenamedRestore`; it
                needs `abstract`. It may stay for ever: an entry that matches nothing in an epoch means nothing there.

        Raises:
            InvalidArgumentError: `rename` is invalid, or comes without `abstract`.
        """
        if rename is not None and abstract is None:
            raise InvalidArgumentError(f"ws.target({name!r}, rename=…) needs abstract=, what it is restored as")
        self._targets[name] = Target(abstract, reshard, _renaming.check(rename))

    @property
    def targets(self) -> Mapping[str, Target]:
        """The targets, by blob."""
        return types.MappingProxyType(self._targets)

    def should_stop(self) -> bool:
        """Whether the epoch is to be left now, because the job is being preempted and cannot finish it.

        Ask before a step, equally often on all nodes; when the answer is True, return without doing the step. The epoch
        is then dropped, or, with `@job.epoch(resumable=True)`, saved as it is. An epoch that does not ask is finished.
        """
        return self._hooks.should_stop()

    def made_by_init(self) -> Mapping[str, Any]:
        """The containers of the blobs that init makes here (see `containers.of`); empty without a runner."""
        return self._hooks.made_by_init()

    @property
    def hooks(self) -> RunnerHooks:
        """What answers the questions of this workspace."""
        return self._hooks

    def attach(self, hooks: RunnerHooks) -> None:
        """Called by the runner: these hooks answer from here on."""
        self._hooks = hooks

    def enter_epoch(self, number: int, steps: range) -> None:
        """Called by the runner before the tasks of an epoch: `epoch` and `steps` have these values from here on."""
        self.epoch = number
        self.steps = steps

    def be_of(self, node: str) -> None:
        """Called by the session: this is the workspace of its only node here, with this name."""
        self.node = node

    def scratch(self) -> Workspace:
        """A copy for trying something: blobs and live objects may be set there without changing this workspace."""
        out = Workspace(self.node)
        out.live = types.SimpleNamespace(**vars(self.live))
        out.epoch = self.epoch
        out.steps = self.steps
        out._blobs = {name: jax.tree.map(lambda leaf: leaf, value) for name, value in self._blobs.items()}
        out._targets = dict(self._targets)
        return out

    def child(self, node: str) -> Workspace:
        """The workspace of a node of this session; created on the first call."""
        return self._children.setdefault(node, Workspace(node))

    def make_child_of(self, node: str) -> None:
        """Moves what this workspace holds into a child: its node is no longer the only one."""
        if self._children:
            return
        child = self.child(node)
        child.live = self.live
        child.epoch = self.epoch
        child.steps = self.steps
        child._blobs = self._blobs
        child._targets = self._targets
        child._hooks = self._hooks
        self.live = types.SimpleNamespace()
        self._blobs = {}
        self._targets = {}

    @property
    def children(self) -> Mapping[str, Workspace]:
        """Workspaces of the nodes, if there are several."""
        return types.MappingProxyType(self._children)

    def __getitem__(self, name: str) -> Any:
        owner, blob = self._find(name)
        return owner._blobs[blob]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"a blob's name is a string that is not empty, got {name!r}")
        node, _, blob = name.partition("/")
        if node in self._children and blob:
            self._children[node][blob] = value
        else:
            self._blobs[name] = value

    def __delitem__(self, name: str) -> None:
        owner, blob = self._find(name)
        del owner._blobs[blob]

    def __iter__(self) -> Iterator[str]:
        yield from self._blobs
        for node, child in self._children.items():
            yield from (f"{node}/{name}" for name in child)

    def __len__(self) -> int:
        return len(self._blobs) + sum(map(len, self._children.values()))

    def __repr__(self) -> str:
        return f"Workspace({self.node!r}, blobs: {', '.join(self) or 'none'})"

    def _find(self, name: Any) -> tuple[Workspace, str]:
        """The workspace that has a blob, and its name there."""
        if name in self._blobs:
            return self, name
        node, _, blob = str(name).partition("/")
        if node in self._children and blob in self._children[node]._blobs:
            return self._children[node], blob
        owners = [child for child in self._children.values() if name in child._blobs]
        if len(owners) > 1:
            forms = ", ".join(f"{owner.node}/{name}" for owner in owners)
            raise InvalidArgumentError(f"blob {name!r} is in the workspaces of several nodes; say which: {forms}")
        if not owners:
            why = self._hooks.why_missing(str(name))
            raise KeyError(f"no blob {name!r}; {why or _text.near(str(name), self)}")
        return owners[0], name
