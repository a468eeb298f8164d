"""How the runner uses checkpoint managers: one small interface, and what all its forms share."""

from __future__ import annotations

import abc
import base64
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError, InvalidArgumentError
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import containers
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.session import Session
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import SaveResult

NOTES = "job_runner"  # under this name the runner's notes are in an epoch's custom metadata
BESIDE = "beside"  # in the notes: `save_checkpoints` saved it in a run, as an epoch that the run had not come to

BARE = "value"  # with stock Orbax: key of an array that is a blob by itself, which StandardSave does not take
BYTES = "base64"  # with stock Orbax: key of bytes in JSON

Names = Mapping[str, Sequence[str]]  # the blobs that are checkpointed, by node of this process


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a restore found; the blobs are in the workspaces.

    Attributes:
        epoch: its number.
        notes: what the runner wrote with it.
        names: the blobs that came back, by node of this process.
    """

    epoch: int
    notes: Mapping[str, Any]
    names: Names


class CheckpointBackend(abc.ABC):
    """A checkpoint manager, as one run or one call of the runner uses it. Every process makes the same calls.

    The session is the backend's, not the manager's: a run has one backend; what is loaded or saved beside the run in
    another session has another.

    Attributes:
        asks_jax: the manager itself asks JAX for its preemption notice, with its steps.
        chooses: the manager has its own say about the epoch to resume from, see `choose`.
        per_node: an epoch exists per node; a node that is not checkpointed has no part in it.
        handler: the manager's own metadata handler, or None.
        handler_calls: the methods of its handler that the manager calls itself, and the actions that it reports.
        directory: for messages.
    """

    asks_jax = False
    chooses = False
    per_node = False
    handler: Any = None
    handler_calls: Collection[str] = ()
    directory = ""

    def __init__(self) -> None:
        self._recorder = containers.Recorder()
        self._types_elsewhere: Mapping[str, Any] = {}

    @abc.abstractmethod
    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        """The nodes of the job, all of them; takes those that the job names, if it names any.

        Raises:
            InvalidArgumentError: the manager is one of other nodes.
        """

    def open(self, session: Session, exchange: Exchange, beside: bool = False) -> None:
        """Called once, before anything but `nodes`.

        Args:
            session: whose workspaces are saved and restored.
            exchange: the other processes.
            beside: a run uses the manager in another session, or has; what it told the manager stays.
        """
        del beside
        self._session, self._exchange = session, exchange

    def handler_nodes(self, session: Session) -> list[str]:
        """The nodes that a metadata handler is told of: those that are checkpointed."""
        return list(session.nodes)

    @abc.abstractmethod
    def epochs(self) -> list[int]:
        """The committed epochs, ascending."""

    def damaged(self) -> list[int]:
        """Epochs that are on storage and cannot be used."""
        return []

    def foreign(self) -> Mapping[int, str]:
        """What lies under the number of an epoch and is none, in words, by number."""
        return {}

    def claim(self) -> None:
        """The run begins to write: an older one must not commit anything from here on. All processes call it.

        Raises:
            AccessError: nothing can be written.
        """
        return  # nothing to claim where no run fences off another

    def fenced_off(self) -> str:
        """How this process learned that a newer run has taken over; empty as long as it has not."""
        return ""

    def choose(self, named: int | None) -> int | None:
        """The epoch to resume from, for managers that choose; None: from scratch."""
        del named
        return None

    def accessible(self, epoch: int) -> bool:
        """On the primary: whether the manager says that storage can be reached."""
        del epoch
        return True

    @abc.abstractmethod
    def restore(self, epoch: int | None) -> Restored:
        """Restores an epoch (None: the newest `resumable` one that every node can read) into the workspaces.

        Raises:
            EpochNotFoundError: there is no such epoch; lists those that there are.
        """

    @abc.abstractmethod
    def prepare(self, epoch: int, names: Names) -> Any:
        """What `save` is to be given, taken from the workspaces; talks to nobody.

        Raises:
            InvalidArgumentError: a blob is gone, or cannot be saved.
        """

    @abc.abstractmethod
    def save(self, epoch: int, prepared: Any, metrics: Any, notes: Mapping[str, Any], force: bool) -> bool:
        """Begins a save; returns whether it did."""

    @abc.abstractmethod
    def outcomes(self) -> list[SaveResult]:
        """Saves that have ended since the last call, as this process knows."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Waits until no save is in flight; failures show in `outcomes`."""

    def discarded(self, epoch: int) -> bool:
        """On the primary: whether an epoch was saved and then deleted at once, because the manager's options say so."""
        del epoch
        return False

    @abc.abstractmethod
    def roll_back(self, epoch: int) -> None:
        """Makes an earlier epoch the latest, durably.

        Raises:
            EpochNotFoundError: there is no such epoch.
            UnsupportedError: the manager cannot do that.
        """

    @abc.abstractmethod
    def allow_overwrite(self, epoch: int) -> None:
        """The next save of this epoch, which exists, replaces it."""

    @abc.abstractmethod
    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        """Loads single blobs of an epoch into the workspaces; False if the epoch is not there."""

    def notes(self, epoch: int) -> Mapping[str, Any]:
        """What the runner wrote with an epoch."""
        del epoch
        return {}

    def resumable(self) -> list[int]:
        """The epochs that a run may go on from without being told, ascending; the primary's word.

        Raises:
            InvalidArgumentError: there are only such as were saved beside a run that has none.
        """

        def look() -> list[int]:
            epochs, beside = self.epochs(), list[int]()
            while epochs and self._is_beside(epochs[-1]):
                beside.append(epochs.pop())
            if beside and not epochs:
                raise InvalidArgumentError(
                    f"{self.directory}: save_checkpoints() saved {beside} in the middle of a run, of which no epoch is "
                    "left to go on from; name one with resume_from_epoch=…, or delete them to start from scratch"
                )
            if beside:
                logging.warning(
                    "%s: save_checkpoints() saved %s in the middle of a run, which goes on from epoch %d; "
                    "name one with resume_from_epoch=… to go on from that",
                    self.directory,
                    beside,
                    epochs[-1],
                )
            return epochs

        self.drain()
        return self._exchange.broadcast("the epochs to go on from", look)

    def _is_beside(self, epoch: int) -> bool:
        try:
            return bool(self.notes(epoch).get(BESIDE))
        except (DamagedError, FormatError, EpochNotFoundError):  # the restore says it
            return False

    def agree_on_names(self, session: Session, exchange: Exchange, names: Names) -> None:
        """Looks at the blobs that are to be checkpointed, on all nodes together.

        Raises:
            InvalidArgumentError: one cannot be checkpointed.
        """

        def report() -> dict[str, Any]:
            kinds, types = check_blobs(session, names), dict[str, Any]()
            if not exchange.primary:
                spaces = session.workspaces()
                own = [(node, n) for node, blobs in names.items() for n in blobs if kinds[n] != blob_lib.GLOBAL]
                trees = {(node, name): blob_lib.state_of(spaces[node][name]) for node, name in own}
                recorded = self._recorded(trees)
                types = {f"{node}/{name}": one for (node, name), one in recorded.items() if one is not None}
            return {"kinds": kinds, "types": types}

        def decide(brought: list[Any]) -> dict[str, str]:
            found = [one["kinds"] for one in brought]
            self._types_elsewhere = {name: one for b in reversed(brought) for name, one in b["types"].items()}
            union: dict[str, str] = {}
            for one in found:
                for name, kind in one.items():
                    before = union.setdefault(name, kind)
                    unlike = before != kind and blob_lib.GLOBAL in (before, kind)
                    if unlike or (kind == blob_lib.GLOBAL and any(name not in other for other in found)):
                        raise InvalidArgumentError(
                            f"blob {name!r} holds arrays of the whole job on one node, and on another it does not, or "
                            "is not checkpointed; make it alike on all nodes, or give it names of their own"
                        )
            return union

        self.take_names(exchange.gather("the blobs to checkpoint", report, decide))

    def _recorded(self, trees: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        """The containers of blobs as JSON, by node and name; None for dicts and lists alone."""
        return {(node, name): self._recorder.record(f"{node}/{name}", tree) for (node, name), tree in trees.items()}

    def types(self, trees: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        """The containers of all blobs, to be noted with an epoch: by name, and by `node/name` where nodes differ.

        Those of other processes are as they were after init.

        Args:
            trees: the blobs of this process, by node and name.
        """
        found: dict[str, Any] = {}
        here = {f"{node}/{name}": one for (node, name), one in self._recorded(trees).items()}
        for key, one in [*here.items(), *self._types_elsewhere.items()]:
            name = key.partition("/")[2]
            if found.setdefault(name, one) != one:
                found[key] = one
        return {key: one for key, one in found.items() if one is not None or "/" in key}

    def take_names(self, kinds: Mapping[str, str]) -> None:
        """Takes the blobs of all nodes, with their kinds."""
        del kinds


def check_blobs(session: Session, names: Names) -> dict[str, str]:
    """The kind of each blob of this process.

    Raises:
        InvalidArgumentError: one cannot be checkpointed.
    """
    return {
        name: blob_lib.kind_of(node, name, session.workspace(node)[name])
        for node, blobs in names.items()
        for name in blobs
    }


def present(workspace: Workspace, name: str) -> Any:
    """A blob that is to be saved.

    Raises:
        InvalidArgumentError: it is gone.
    """
    if name not in workspace:
        raise InvalidArgumentError(
            f"node {workspace.node}: blob {name!r} is to be checkpointed, and is not in the workspace any more; "
            f"there are: {', '.join(workspace) or 'none'}"
        )
    return workspace[name]


def require(epochs: Sequence[int], epoch: int, directory: str) -> None:
    """Raises EpochNotFoundError, which lists those that there are, unless the epoch is one of them."""
    if epoch not in epochs:
        raise EpochNotFoundError(epoch, directory, epochs)


def wanted_blobs(names: Sequence[str], available: Mapping[str, str], nodes: Sequence[str]) -> dict[str, set[str]]:
    """Which blobs go to which node.

    Args:
        names: blob names, alone (all nodes) or as `node/blob`.
        available: item by blob.
        nodes: the nodes of this process.

    Returns:
        Nodes by blob; names that are not available are left out.
    """
    out: dict[str, set[str]] = {}
    for name in names:
        node, _, blob = name.partition("/")
        if name in available:
            out.setdefault(name, set()).update(nodes)
        elif blob in available:
            out.setdefault(blob, set()).update({node} & set(nodes))
    return {blob: where for blob, where in out.items() if where}


def copies(value: Any, nodes: Sequence[str]) -> dict[str, Any]:
    """One restored value for several nodes of a process; what can be changed in place is copied for each."""
    return {node: jax.tree.map(_copied, value) if number else value for number, node in enumerate(nodes)}


def _copied(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def resharded(name: str, states: Sequence[Any], count: int, reshard: Callable[..., Any] | None) -> list[Any]:
    """States of as many nodes as there are now, from those of another number.

    Raises:
        InvalidArgumentError: there is no `reshard`, or it returned another number of states.
    """
    if reshard is None:
        raise InvalidArgumentError(
            f"blob {name!r} differs per node and was saved by {len(states)} nodes; here are {count}: give "
            "ws.target(name, reshard=…), which makes new states of the old ones"
        )
    new = list(reshard(states, len(states), count))
    if len(new) != count:
        raise InvalidArgumentError(f"blob {name!r}: reshard returned {len(new)} states for {count} nodes")
    return new


def of_this_node(name: str, by_node: Mapping[str, Any], nodes: Sequence[str], workspace: Workspace) -> Any:
    """A blob that was kept as JSON with stock Orbax, one value per node, as this node is to have it.

    Raises:
        InvalidArgumentError: the values differ, were of another number of nodes, and there is no `reshard`.
    """
    states = [_decoded(data) for data in by_node.values()]
    me = nodes.index(workspace.node)
    if len(states) == len(nodes):
        return _decoded(by_node[workspace.node]) if workspace.node in by_node else states[me]
    target = workspace.targets.get(name)
    if (target is None or target.reshard is None) and all(state == states[0] for state in states):
        return states[0]
    return resharded(name, states, len(nodes), target.reshard if target else None)[me]


def _decoded(data: Any) -> Any:
    return base64.b64decode(data[BYTES]) if isinstance(data, dict) else data[0]
