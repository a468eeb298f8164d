"""Blobs of a workspace as items of a checkpoint, and back.

In a job of one node a blob is an item that stock Orbax reads. With several nodes, `jax.Array`s that are spread over
processes are saved once, and everything else belongs to each node. A blob with both kinds of
values becomes two items: an item of arrays, and a second item with each node's own values. The item of arrays also has
the primary's own values, so that it is complete for other readers.
"""

import contextlib
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _renaming, _text
from epochckpt import args as own_args
from epochckpt._renaming import Rename
from epochckpt.errors import InvalidArgumentError, Remedies, UnsupportedError, say
from epochckpt.format import checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.jobs import containers
from epochckpt.jobs.job import TaskGroup
from epochckpt.jobs.workspace import Workspace

OWN_SUFFIX = ".own"  # of the item beside an item of arrays


class BlobKind(enum.Enum):
    """What a blob is, in a job of several nodes. The processes exchange the values."""

    GLOBAL = "global"  # it holds arrays that are spread over processes
    PER_NODE = "per_node"
    STATEFUL = "stateful"  # an object with a state


_UNUSABLE = re.compile(r"[^A-Za-z0-9._-]")


def item_names(blobs: Iterable[str], nodes: Collection[str] = ()) -> dict[str, str]:
    """The name of the item of each blob: the blob's name, or an allowed name that is derived from it."""
    folders = {paths.folder_name(node) for node in nodes}  # items cannot have these names
    return {blob: _item_name(blob, folders) for blob in blobs}


def _item_name(blob: str, folders: Collection[str]) -> str:
    if not blob.endswith(OWN_SUFFIX) and blob not in folders:
        with contextlib.suppress(InvalidArgumentError):
            return paths.check_item_name(blob)
    mark = f"{checksums.xxh3(blob.encode('utf-8', 'surrogatepass')):016x}"
    return f"b-{_UNUSABLE.sub('_', blob)[:60]}-{mark}"


def is_stateful(value: Any) -> bool:
    """Whether a blob is an object with a state, such as a data iterator."""
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in ("get_state", "set_state"))


REMEDIES = Remedies(
    rename="say so in @job.setup, with ws.target(blob, abstract, rename={})",
    partial="a blob is restored as a whole: a new part of the state goes into a blob of its own.",
    resize="A blob is restored in the shapes in which it was saved.",
    rest="In @job.setup, ws.target(blob, abstract) says what a blob is restored as; without it, as it was saved.",
)
"""What to do about a blob that does not fit."""


def state_of(value: Any) -> Any:
    """The pytree that a blob is saved as."""
    return value.get_state() if is_stateful(value) else value


def put_back(workspace: Workspace, name: str, tree: Any) -> None:
    """Puts a restored blob into a workspace; an object that is there already is given its state."""
    live: Any = workspace.get(name)
    if is_stateful(live):
        live.set_state(tree)
    else:
        workspace[name] = tree


def target_of(workspace: Workspace, name: str) -> Any:
    """What a blob is restored as: its target; without one what setup made, if that holds jax arrays; else None."""
    target = workspace.targets.get(name)
    if target is not None and target.abstract is not None:
        return target.abstract
    live = workspace.get(name)
    if live is None or is_stateful(live):
        return None
    return live if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(live)) else None


def rename_of(workspace: Workspace, name: str) -> Callable[[str], str] | None:
    """What gives the leaves of a blob their new names, see `Workspace.target`; epochs may have them already."""
    target = workspace.targets.get(name)
    return None if target is None or target.rename is None else _renaming.lenient(target.rename)


def argument(target: Any, rename: Rename | None) -> ocp.args.CheckpointArgs:
    """How a blob of arrays is restored as a target; None: as saved."""
    return ocp.args.StandardRestore(target) if rename is None else own_args.RenamedRestore(target, rename)


def as_saved(workspace: Workspace, name: str, value: Any, recorded: Mapping[str, Any] | None) -> Any:
    """A blob that was restored without a target, in the containers that it was saved in.

    `recorded` has the containers that the epoch records, as results of `containers.to_json`: by blob, or by `node/blob`
    if nodes differ; None if no runner saved the epoch. If the program cannot make these containers (static fields, a
    class inside a function), the containers of init's blob are used. A blob that fits neither stays unchanged, with a
    log line.
    """
    types = (recorded or {}).get(f"{workspace.node}/{name}", (recorded or {}).get(name))
    if types is None or target_of(workspace, name) is not None:
        return value
    try:
        return containers.rebuild(value, containers.from_json(types))
    except InvalidArgumentError as error:
        problem = str(error)
    try:
        made = workspace.made_by_init().get(name)
        if made is not None:
            return containers.rebuild(value, made)
    except InvalidArgumentError as error:
        problem = f"{problem}; {error}"
    where = f"node {workspace.node}, blob {name!r}"
    answer = f"say how, in @job.setup: ws.target({name!r}, …)"
    logging.warning("%s comes back as dicts, lists and arrays, not as it was saved: %s; %s", where, problem, answer)
    return value


@dataclasses.dataclass(frozen=True)
class _Untraceable:
    """Init cannot be run abstractly."""

    why: str


class InitTracer:
    """Finds the containers that init makes of a node's blobs, without computing: for types that no epoch holds.

    The first question runs the tasks of init under `jax.eval_shape`, on a copy of the workspace.
    """

    def __init__(self, group: TaskGroup, workspace: Workspace):
        self._group = group
        self._workspace = workspace

    def containers(self) -> Mapping[str, containers.Container | None]:
        """The containers by blob; None for dicts and lists alone. InvalidArgumentError: init cannot be traced."""
        if isinstance(self._traced, _Untraceable):
            raise InvalidArgumentError(self._traced.why)
        return self._traced

    @functools.cached_property
    def _traced(self) -> "Mapping[str, containers.Container | None] | _Untraceable":
        workspace = self._workspace
        logging.info("node %s: init is run abstractly (jax.eval_shape), for the types of its blobs", workspace.node)
        scratch = workspace.scratch()
        found: dict[str, containers.Container | None] = {}

        def trace() -> None:  # which gives no arrays: eval_shape would refuse the containers
            for task in self._group.tasks():
                if task.node in (None, workspace.node):
                    task.fn(scratch)
            found.update({name: containers.of(state_of(value)) for name, value in scratch.items()})

        try:
            jax.eval_shape(trace)
        except Exception as error:  # init may do anything, and was written to run on real values
            problem = f"init cannot be run abstractly (jax.eval_shape) to find out: {say(error).splitlines()[0]}"
            return _Untraceable(problem)
        return found


def kind_of(node: str, name: str, value: Any) -> BlobKind:
    """What a blob is; InvalidArgumentError: it cannot be checkpointed."""
    where = f"node {node}, blob {name!r}"
    try:
        pairs, _ = tree_lib.flatten(state_of(value))
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"{where} is not a pytree that can be saved: {error}") from error
    spread = holds_global(value)
    stateful = is_stateful(value)
    for path, leaf in pairs:
        leaf_name = f"{where}, leaf {tree_lib.leaf_name(path)!r}" if path else where
        kind = tree_lib.leaf_kind(leaf)
        if kind is None:
            raise InvalidArgumentError(
                f"{leaf_name}: a {type(leaf).__module__}.{type(leaf).__qualname__} cannot be checkpointed. Expected "
                "arrays, numbers, strings, or an object with get_state and set_state; put what is not to be saved into "
                "ws.live, make it after init, or leave it out with JobRunner(exclude=…)"
            )
        if spread and kind == "prng" and not _is_global(leaf):
            raise InvalidArgumentError(
                f"{leaf_name} is a random key of this process alone among arrays of the whole job; make it under jit "
                "with out_shardings, or give it a blob of its own"
            )
    if stateful:
        return BlobKind.STATEFUL
    return BlobKind.GLOBAL if spread else BlobKind.PER_NODE


def holds_global(value: Any) -> bool:
    """Whether a blob holds arrays that are spread over processes."""
    return not is_stateful(value) and any(map(_is_global, jax.tree.leaves(value)))


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def how_to_place(name: str) -> str:
    """What to write so that the arrays of a blob come back where this job wants them."""
    return (
        f"say where they lie in this job: ws.target({name!r}, …) in @job.setup, with a "
        "jax.ShapeDtypeStruct(shape, dtype, sharding=…) for each array"
    )


def refuse_unreachable(node: str, name: str, value: Any) -> None:
    """Raises InvalidArgumentError if arrays of a restored blob lie on the devices of one other process alone."""
    for leaf in filter(_is_global, jax.tree.leaves(value)):
        processes = {device.process_index for device in leaf.sharding.device_set}
        if len(processes) == 1:
            where = f"on devices of process {min(processes)} alone, and node {node} is process {jax.process_index()}"
            raise InvalidArgumentError(f"the arrays of blob {name!r} come back {where}; {how_to_place(name)}")


def refuse_global(node: str, values: Mapping[str, Any]) -> None:
    """Raises UnsupportedError if a blob holds arrays that are spread over processes: for Caffe2's managers."""
    for name, value in values.items():
        if holds_global(value):
            problem = f"node {node}, blob {name!r} has arrays that are spread over processes"
            raise UnsupportedError(f"{problem}: use epochckpt.CheckpointManager, not Caffe2's")


def split(tree: Any) -> tuple[Any, dict[str, Any]]:
    """Splits a blob with global arrays in two: a tree that is saved once, and leaves that are saved per node.

    Returns the tree, in which the other arrays are NumPy arrays, and its leaves that are not global, by leaf name.
    """
    pairs, treedef = tree_lib.flatten(tree)
    own = dict[str, Any]()
    leaves = []
    for path, leaf in pairs:
        if not _is_global(leaf) and leaf is not None and not (isinstance(leaf, dict | list | tuple) and not leaf):
            own[tree_lib.leaf_name(path)] = leaf
        on_host = isinstance(leaf, jax.Array) and not _is_global(leaf) and not tree_lib.is_prng_dtype(leaf.dtype)
        leaves.append(np.asarray(leaf) if on_host else leaf)
    return tree_lib.unflatten(treedef, leaves), own


def join(tree: Any, own: Mapping[str, Any], new_name: Callable[[str], str] | None = None) -> Any:
    """The inverse of `split`: a node's own leaves replace those of the primary where the two differ.

    `new_name` gives the names in the tree of those that were saved.
    """
    pairs, treedef = tree_lib.flatten(tree)
    named = [(tree_lib.leaf_name(path), leaf) for path, leaf in pairs]
    if new_name is not None:  # which takes and gives names as people read them
        own = {new_name(_text.readable(name)): leaf for name, leaf in own.items()}
        named = [(_text.readable(name), leaf) for name, leaf in named]
    leaves = [own[name] if name in own and not _alike(leaf, own[name]) else leaf for name, leaf in named]
    return tree_lib.unflatten(treedef, leaves)


def _alike(a: Any, b: Any) -> bool:
    try:
        a = np.asarray(a)
        b = np.asarray(b)
        return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    except (TypeError, ValueError, RuntimeError):
        return False
