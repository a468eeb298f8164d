"""Restores items as Orbax's restore arguments, and our own, ask.

An item that differs per node (`NodeSave`) is restored by node. In a job of as many nodes as before, each node takes the
place of one of them. In a job of another number `NodeRestore(reshard=…)` makes new values of the old ones; without it,
a value that was the same on every node goes to every node, and any other is refused.
"""

import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from google.protobuf import text_format

from epochckpt import _renaming
from epochckpt import args as own
from epochckpt._threads import Pool
from epochckpt.args import NodeRestore
from epochckpt.arrays.broadcast import Sharing
from epochckpt.arrays.item_names import ONE_FILE, arguments_by_item, file_name, unknown_item
from epochckpt.arrays.node_values import values_by_hosted_node
from epochckpt.arrays.reader import EpochReader
from epochckpt.arrays.renames import Sources, by_rename, by_transforms
from epochckpt.arrays.restore import TreeRequest, restore_tree, restore_trees
from epochckpt.arrays.tree_metadata import plain_target
from epochckpt.errors import (
    FormatError,
    InvalidArgumentError,
    NodeCountError,
    Remedies,
    UnsupportedError,
    advice_for,
)
from epochckpt.format import DataFile, ItemKind, Nodes, paths
from epochckpt.orbax import Handlers, handlers, options
from epochckpt.orbax.handlers import HandlerKind


class Missing:
    """The type of `MISSING`."""


MISSING = Missing()
"""Stands for the value of an item that no node of this process has."""


@dataclasses.dataclass(frozen=True)
class RestoreContext:
    """The job that restores: the manager's handlers, its nodes, and which of them this process hosts."""

    handlers: Handlers
    nodes: Nodes = dataclasses.field(default_factory=Nodes)
    memory_limit_bytes: int | None = None  # see `StorageOptions.restore_memory_limit_bytes`
    sharing: Sharing | None = None  # of the current restore, if its processes share reads

    def successions(self, names: Sequence[str]) -> list[int]:
        """For each node of this job, the number of the old node that it replaces: by name, else the next free one."""
        old = {name: number for number, name in enumerate(names)}
        now = set(self.nodes.names)
        left = iter([number for number, name in enumerate(names) if name not in now])
        return [old[name] if name in old else next(left) for name in self.nodes.names]


def _restore_node(reader: EpochReader, name: str, args: NodeRestore | None, context: RestoreContext) -> Any:
    """Restores an item of kind `node`; without `args`, by node name if several are hosted here.

    `MISSING` where no node of this process has a value.
    """
    epoch = reader.record.epoch
    nodes = context.nodes
    requested = NodeRestore(by_node=len(nodes.hosted) > 1) if args is None else args
    item = {} if requested.by_node and requested.item is None else requested.item
    advice = "NodeRestore(by_node=True), with targets by node name"
    targets = values_by_hosted_node(name, item, requested.by_node, nodes, advice)
    old_nodes = _old_nodes(reader, name, requested.reshard is not None, context)
    if old_nodes is not None:
        states = _states_of(reader, name, requested, old_nodes, targets, context)
    elif requested.reshard is not None:
        states = _resharded_states(reader, name, requested.reshard, context)
    else:
        raise NodeCountError(name, epoch, len(reader.record.nodes), len(nodes))
    if requested.by_node:
        return {nodes.names[number]: state for number, state in states.items()}
    if states:
        return states[nodes.hosted[0]]
    if args is None:
        return MISSING
    raise InvalidArgumentError(
        f"item {name!r} of checkpoint {epoch}: the node whose place {nodes.hosted_names[0]} takes saved none; "
        "leave the item out, or pass NodeRestore(by_node=True), which leaves out the node"
    )


def _old_nodes(reader: EpochReader, name: str, reshards: bool, context: RestoreContext) -> dict[int, int] | None:
    """The old node whose value each node of this process gets, by numbers; None if the values must be made anew."""
    record = reader.record
    hosted = context.nodes.hosted
    count = len(record.nodes)
    if count == len(context.nodes):
        places = context.successions([node.name for node in record.nodes])
        return {number: places[number] for number in hosted}
    if record.items[name].same and not reshards:
        return {number: number % count for number in hosted}
    return None


def _states_of(
    reader: EpochReader,
    name: str,
    requested: NodeRestore,
    old_nodes: Mapping[int, int],
    targets: Mapping[int, Any],
    context: RestoreContext,
) -> dict[int, Any]:
    """The values of old nodes, by the number of the node that gets each; without those where the old node has none."""
    reader.load_records(dict.fromkeys(old_nodes.values()))
    having = [number for number, old in old_nodes.items() if reader.has(old, name)]
    renamed = _sources(name, requested.rename)
    if renamed is not None and any(targets.get(number) is None for number in having):
        raise InvalidArgumentError(
            f"item {name!r}: NodeRestore(rename=…) needs a target; without one, rename the result"
        )
    limit = context.memory_limit_bytes
    requests = [
        TreeRequest(target=plain_target(targets.get(number)), sources=renamed, memory_limit_bytes=limit)
        for number in having
    ]
    readers = [reader.of_node(old_nodes[number], name) for number in having]
    with advice_for(_OF_NODES):
        return dict(zip(having, restore_trees(readers, name, requests), strict=True))


def _resharded_states(
    reader: EpochReader,
    name: str,
    reshard: Callable[[Sequence[Any], int, int], Sequence[Any]],
    context: RestoreContext,
) -> dict[int, Any]:
    """The values that `reshard` makes of those of all old nodes, by the numbers of this process's nodes."""
    count = len(reader.record.nodes)
    now = len(context.nodes)
    reader.load_records(range(count))
    having = [number for number in range(count) if reader.has(number, name)]
    request = TreeRequest(memory_limit_bytes=context.memory_limit_bytes)
    trees = restore_trees([reader.of_node(n, name) for n in having], name, [request] * len(having))
    by_node = dict(zip(having, trees, strict=True))
    states = list(reshard([by_node.get(number) for number in range(count)], count, now))
    if len(states) != now:
        raise InvalidArgumentError(f"item {name!r}: reshard returned {len(states)} states for {now} nodes")
    return {number: states[number] for number in context.nodes.hosted}


_OF_NODES = Remedies(
    rename="restore with epochckpt.args.NodeRestore(target, rename={})",
    partial="a node's state is restored as a whole.",
    resize="A node's arrays are restored in the shapes in which they were saved.",
    rest="NodeRestore() without a target gives everything as it was saved.",
)


def with_targets(args: Any, restored: Any) -> dict[str, Any]:
    """The trees among what a restore with `args` has returned that were restored into a target, by item."""
    asked = {} if args is None else arguments_by_item(args)
    found = dict(restored.items()) if options.is_multi(args) else {paths.DEFAULT_ITEM: restored}
    return {name: found[name] for name, arg in asked.items() if name in found and _has_target(arg)}


def _has_target(args: Any) -> bool:
    kinds = ocp.args.StandardRestore | ocp.args.PyTreeRestore | ocp.args.ArrayRestore | own.RenamedRestore
    return isinstance(args, kinds) and args.item is not None


def restore_item(reader: EpochReader, name: str, args: Any, context: RestoreContext) -> Any:
    """Restores one item as its argument asks; None for the item as it was saved."""
    record = reader.record.items.get(name)
    if record is None:
        raise unknown_item(reader.record.epoch, name, reader.record.items)
    if record.kind is ItemKind.NODE or isinstance(args, own.NodeRestore):
        if record.kind is not ItemKind.NODE or not (args is None or isinstance(args, own.NodeRestore)):
            raise contradiction(name, record.handler or "NodeSave", args)
        return _restore_node(reader, name, args, context)
    if record.kind is ItemKind.ARRAYS:
        value = restore_tree(reader, name, tree_request(name, args, record.handler, context))
        is_state = record.handler == handlers.type_name(ocp.handlers.NumpyRandomKeyCheckpointHandler)
        return tuple(value) if is_state and isinstance(value, list) else value
    if args is None:
        handler, args = context.handlers.of(name, record.handler)
    elif isinstance(args, own.RenamedRestore):
        raise contradiction(name, record.handler, args)
    else:
        handler = context.handlers.find(name, args, saving=False)
    kind = handlers.kind_of(handler)
    if not handlers.same(handlers.type_name(handler), record.handler):
        raise contradiction(name, record.handler, args)
    if kind in ONE_FILE:
        file, data = _only_file(reader, name, file_name(handler, kind))
        try:
            return json.loads(data) if kind is HandlerKind.JSON else text_format.Parse(data.decode(), args.item())
        except (ValueError, RecursionError, text_format.ParseError) as error:
            if kind is HandlerKind.JSON:
                raise FormatError(f"{reader.folder}/{name}/{file}", f"is not JSON: {error}") from None
            raise InvalidArgumentError(f"item {name!r} is no {args.item.__name__}: {error}") from None
    return _with_files(reader, name, functools.partial(handler.restore, args=args))


def files_metadata(reader: EpochReader, name: str, recorded: str, known_handlers: Handlers) -> Any:
    """The metadata that an item's handler gives for its files; None if it gives none, or is not known here."""
    try:
        handler, _ = known_handlers.of(name, recorded)
    except InvalidArgumentError:
        return None
    if handlers.kind_of(handler) is not HandlerKind.OTHER or not hasattr(handler, "metadata"):
        return None
    try:
        return _with_files(reader, name, handler.metadata)
    except NotImplementedError:
        return None


def contradiction(name: str, recorded: str, args: Any) -> InvalidArgumentError:
    """The error for an argument that restores another kind of item."""
    saved = recorded.rpartition(".")[2]
    return InvalidArgumentError(f"item {name!r} was saved by {saved}; {type(args).__name__} does not restore that")


def _only_file(reader: EpochReader, name: str, file: str) -> tuple[str, bytes]:
    """(name, content) of an item's one file; it may have been saved under another name."""
    found = [f.name for _, f in reader.item_files(name)]
    chosen = file if file in found or len(found) != 1 else found[0]
    if chosen not in found:
        raise InvalidArgumentError(f"item {name!r} has no file {file!r}; it has: {', '.join(found) or 'none'}")
    return chosen, reader.read_file(name, chosen)


def tree_request(name: str, args: Any, recorded: str, context: RestoreContext) -> TreeRequest:
    """The request of a restore argument for an array item that `recorded`, an Orbax handler, saved."""
    asked = _tree_request(name, args, recorded, context.handlers)
    return dataclasses.replace(asked, sharing=context.sharing, memory_limit_bytes=context.memory_limit_bytes)


def _tree_request(name: str, args: Any, recorded: str, known_handlers: Handlers) -> TreeRequest:
    if args is None:
        return TreeRequest()
    if isinstance(args, own.RenamedRestore):
        if args.item is None:
            raise InvalidArgumentError(f"item {name!r}: RenamedRestore needs a target; without one, rename the result")
        sources = _sources(name, args.rename)
        return TreeRequest(
            target=plain_target(args.item),
            partial=args.partial,
            needs_values=args.partial,
            sources=sources,
        )
    kind = handlers.kind_of(known_handlers.find(name, args, saving=False))
    kinds = (kind for c, kind in handlers.OURS.items() if handlers.same(handlers.type_name(c), recorded))
    if kind is not next(kinds, HandlerKind.ARRAYS):
        raise contradiction(name, recorded, args)
    if kind is HandlerKind.JAX_KEY:
        return TreeRequest(restore_args=args.restore_args)
    if kind is HandlerKind.NUMPY_KEY:
        return TreeRequest()
    if not isinstance(args, ocp.args.StandardRestore | ocp.args.PyTreeRestore | ocp.args.ArrayRestore):
        raise InvalidArgumentError(
            f"item {name!r} holds arrays; restore it with StandardRestore, PyTreeRestore or ArrayRestore, "
            f"not {type(args).__name__}"
        )
    target = plain_target(args.item)
    if isinstance(args, ocp.args.ArrayRestore):
        return TreeRequest(target=target, restore_args=args.restore_args)
    if isinstance(args, ocp.args.StandardRestore):
        return TreeRequest(
            target=target,
            fallback_sharding=args.fallback_sharding,
            layouts=args.support_layout,
            resize=not args.strict,
        )
    if args.legacy_transform_fn is not None:
        raise UnsupportedError(
            f"item {name!r}: PyTreeRestore(legacy_transform_fn=…) is not supported; "
            "restore the saved tree and change it with jax.tree.map"
        )
    if args.transforms is None:
        resize = not getattr(args, "strict", True)  # the v1 style has both
        return TreeRequest(
            target=target,
            restore_args=args.restore_args,
            partial=args.partial_restore,
            resize=resize,
        )
    if target is None:
        raise InvalidArgumentError(f"item {name!r}: PyTreeRestore(transforms=…) needs item=, the target")
    sources = by_transforms(name, args.transforms, args.transforms_default_to_original)
    return TreeRequest(target=target, restore_args=args.restore_args, partial=True, sources=sources)


def _sources(name: str, rename: Any) -> Sources | None:
    """Where the leaves of a target come from, under the names that `rename` gives them; None where it is empty."""
    checked = _renaming.check(rename)
    return None if checked is None else functools.partial(by_rename, f"item {name!r}", checked)


def _with_files(reader: EpochReader, item: str, use: Callable[[epath.Path], Any]) -> Any:
    """Calls `use` with a local folder of the verified files that all nodes wrote for an item."""
    with tempfile.TemporaryDirectory(prefix="epochckpt-") as folder:

        def copy(node: int, file: DataFile) -> None:
            path = pathlib.Path(folder, file.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as out:
                reader.node_file(node, file).stream(lambda _, block: out.write(block), pool=Pool(1))  # in order

        reader.pool.run([functools.partial(copy, node, file) for node, file in reader.item_files(item)])
        return use(epath.Path(folder))
