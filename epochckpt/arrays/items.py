"""Turns Orbax's arguments into items to save, and restores items as an argument asks.

An item that differs per node (`NodeSave`) is restored by node. In a job of as many nodes as before, each node takes the
place of one of them. In a job of another number `NodeRestore(reshard=…)` makes new values of the old ones; without it,
a value that was the same on every node goes to every node, and any other is refused.
"""

import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from google.protobuf import message, text_format

from epochckpt import _renaming
from epochckpt import args as own
from epochckpt._threads import Pool
from epochckpt.args import NodeRestore
from epochckpt.arrays.broadcast import Sharing
from epochckpt.arrays.reader import EpochReader
from epochckpt.arrays.restore import TreeRequest, keeps_kind, restore_tree, restore_trees
from epochckpt.arrays.targets import Sources, by_rename, by_transforms, plain_target
from epochckpt.errors import (
    FormatError,
    InvalidArgumentError,
    NodeCountError,
    Remedies,
    UnknownNameError,
    UnsupportedError,
    advice_for,
)
from epochckpt.format import DataFile, Nodes, checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.format.records import MAX_RECORD_BYTES
from epochckpt.orbax import Handlers, HandlerSave, handlers, options


class Nothing:
    """Stands for the value of an item that no node of this process has."""


@dataclasses.dataclass(frozen=True)
class RestoreContext:
    """The job that restores: the manager's handlers, its nodes, and which of them this process hosts."""

    handlers: Handlers
    nodes: Nodes = dataclasses.field(default_factory=Nodes)
    memory_limit_bytes: int | None = None  # see `StorageOptions.restore_memory_limit_bytes`
    sharing: Sharing | None = None  # of the restore that is under way, where its processes share what they read

    def successions(self, names: Sequence[str]) -> list[int]:
        """For each node of this job the old node whose place it takes: that of its name, else the next one left."""
        old, now = {name: number for number, name in enumerate(names)}, set(self.nodes.names)
        left = iter([number for number, name in enumerate(names) if name not in now])
        return [old[name] if name in old else next(left) for name in self.nodes.names]


def of_hosted(name: str, values: Any, by_node: bool, nodes: Nodes, advice: str) -> dict[int, Any]:
    """Values by node number, in that order: the value of the only node of this process, or a dict by node name."""
    if not by_node:
        if len(nodes.hosted) > 1:
            count, hosted = len(nodes.hosted), ", ".join(nodes.hosted_names)
            raise InvalidArgumentError(f"item {name!r}: this process hosts {count} nodes ({hosted}); pass {advice}")
        return {nodes.hosted[0]: values}
    if not isinstance(values, Mapping):
        problem = f"by_node=True expects a dict of pytrees by node name, got a {type(values).__name__}"
        raise InvalidArgumentError(f"item {name!r}: {problem}")
    hosted = set(nodes.hosted_names)
    unknown = [node for node in values if node not in hosted]
    if unknown:
        raise InvalidArgumentError(
            f"item {name!r}: by_node=True names {', '.join(map(repr, unknown))}; this process hosts "
            f"{', '.join(nodes.hosted_names)}"
        )
    return {number: values[nodes.names[number]] for number in nodes.hosted if nodes.names[number] in values}


def _restore_node(reader: EpochReader, name: str, args: NodeRestore | None, context: RestoreContext) -> Any:
    """Restores an item of kind `node`; without `args` by name if several are hosted here, and `Nothing` for none."""
    record, nodes = reader.record, context.nodes
    asked = NodeRestore(by_node=len(nodes.hosted) > 1) if args is None else args
    given = {} if asked.by_node and asked.item is None else asked.item
    targets = of_hosted(name, given, asked.by_node, nodes, "NodeRestore(by_node=True), with targets by node name")
    # Which old node's value each node of this process gets, by number; or new values, made of all the old ones.
    count, now = len(record.nodes), len(nodes)
    sources: dict[int, int] = {}
    states: dict[int, Any] = {}
    if count == now:
        places = context.successions([n.name for n in record.nodes])
        sources = {number: places[number] for number in nodes.hosted}
    elif asked.reshard is not None:
        reader.load_records(range(count))
        having = [n for n in range(count) if reader.has(n, name)]
        request = TreeRequest(memory_limit_bytes=context.memory_limit_bytes)
        trees = restore_trees([reader.of_node(n, name) for n in having], name, [request] * len(having))
        of_nodes = dict(zip(having, trees, strict=True))
        old = [of_nodes.get(n) for n in range(count)]
        new = list(asked.reshard(old, count, now))
        if len(new) != now:
            raise InvalidArgumentError(f"item {name!r}: reshard returned {len(new)} states for {now} nodes")
        states = {number: new[number] for number in nodes.hosted}
    elif record.items[name].same:
        sources = {number: number % count for number in nodes.hosted}
    else:
        raise NodeCountError(name, record.epoch, count, now)
    # Nodes whose old node saved no value are left out.
    reader.load_records(dict.fromkeys(sources.values()))
    having = [number for number, source in sources.items() if reader.has(source, name)]
    limit = context.memory_limit_bytes
    renamed = _sources(name, asked.rename)
    if renamed is not None and any(targets.get(number) is None for number in having):
        raise InvalidArgumentError(
            f"item {name!r}: NodeRestore(rename=…) needs a target; without one, rename the result"
        )
    requests = [
        TreeRequest(plain_target(targets.get(number)), sources=renamed, memory_limit_bytes=limit) for number in having
    ]
    readers = [reader.of_node(sources[number], name) for number in having]
    with advice_for(_OF_NODES):
        states |= dict(zip(having, restore_trees(readers, name, requests), strict=True))
    if asked.by_node:
        return {nodes.names[number]: state for number, state in states.items()}
    if states:
        return states[nodes.hosted[0]]
    if args is None:
        return Nothing()
    raise InvalidArgumentError(
        f"item {name!r} of checkpoint {record.epoch}: the node whose place {nodes.hosted_names[0]} takes saved none; "
        "leave the item out, or pass NodeRestore(by_node=True), which leaves out the node"
    )


_OF_NODES = Remedies(
    rename="restore with epochckpt.args.NodeRestore(target, rename={})",
    partial="a node's state is restored as a whole.",
    resize="A node's arrays are restored in the shapes in which they were saved.",
    rest="NodeRestore() without a target gives everything as it was saved.",
)
_FILES = {"json": paths.JSON_FILE, "proto": "proto.pbtxt"}  # the names that Orbax's handlers use


@dataclasses.dataclass(frozen=True)
class SaveItem:
    """One item to save."""

    name: str
    kind: str  # as in `ItemRecord`
    handler: str = ""  # type name of the Orbax handler, as Orbax records it
    tree: Any = None  # the pytree, for `arrays` and `node`
    by_node: bool = False  # the tree is a dict of pytrees by node name
    custom_metadata: Any = None  # JSON that belongs to the item
    file: tuple[str, bytes] | None = None  # name and content of its one file, which the primary alone writes
    run: Callable[[], HandlerSave] | None = None  # starts the save of a handler that is not ours, on every node


def named(args: Any) -> dict[str, Any]:
    """The argument of each item, by name; a single argument is the item `default`."""
    return dict(args.items()) if options.is_multi(args) else {paths.DEFAULT_ITEM: args}


def with_targets(args: Any, restored: Any) -> dict[str, Any]:
    """The trees among what a restore with `args` has returned that were restored into a target, by item."""
    asked = {} if args is None else named(args)
    found = dict(restored.items()) if options.is_multi(args) else {paths.DEFAULT_ITEM: restored}
    return {name: found[name] for name, arg in asked.items() if name in found and _has_target(arg)}


def _has_target(args: Any) -> bool:
    kinds = ocp.args.StandardRestore | ocp.args.PyTreeRestore | ocp.args.ArrayRestore | own.RenamedRestore
    return isinstance(args, kinds) and args.item is not None


def asked_for(args: Any, names: Iterable[str], default_item: bool) -> tuple[dict[str, Any], bool]:
    """The argument of each item to restore, and whether the one unnamed item is returned by itself."""
    return (dict.fromkeys(names), default_item) if args is None else (named(args), not options.is_multi(args))


def found_as(name: str, names: Collection[str]) -> str:
    """What an item is called among the items of an epoch: the one unnamed item has had several names in Orbax."""
    if name in names or name not in paths.UNNAMED:
        return name
    others = [other for other in paths.UNNAMED if other in names]
    return others[0] if len(others) == 1 else name


def chosen_arrays(epoch: int, arrays: Sequence[str], item: str | None) -> str:
    """The named item of arrays, or the only one; InvalidArgumentError, which lists the items, if there is none."""
    item = item and found_as(item, arrays)
    if item is None and len(arrays) == 1:
        return arrays[0]
    if item is None or item not in arrays:
        found = f"{len(arrays)} items of arrays" if item is None else f"no item of arrays {item!r}"
        known = ", ".join(arrays) or "none"
        raise InvalidArgumentError(f"checkpoint {epoch} has {found}; pass item= (--item), one of: {known}")
    return item


def unknown_item(epoch: int, name: str, names: Iterable[str]) -> UnknownNameError:
    """The error for an item that an epoch lacks; lists its items."""
    return UnknownNameError(
        f"checkpoint {epoch} has no item {name!r}; it has: {', '.join(sorted(names)) or 'none'} (in Orbax's words: "
        f'Item "{name}" was not found in the checkpoint)'
    )


def to_save(args: Any, known: Handlers) -> list[SaveItem]:
    """The items of a save argument; nothing is run or copied yet."""
    return [_save_item(name, value, known) for name, value in named(args).items() if value is not None]


def _save_item(name: str, args: Any, known: Handlers) -> SaveItem:
    if isinstance(args, own.NodeSave):
        return SaveItem(name, "node", tree=args.item, by_node=args.by_node)
    handler = known.find(name, args, saving=True)
    kind, handler_name = handlers.kind_of(handler), handlers.type_name(handler)
    if kind == "other":
        return SaveItem(name, "files", handler_name, run=functools.partial(HandlerSave, handler, name, args))
    if kind in _FILES:
        data = _json(name, args.item) if kind == "json" else _proto(name, args.item)
        file = _file_name(handler, kind)
        if not paths.is_file_path(file) or len(data) > MAX_RECORD_BYTES:
            problem = f"{file!r} ({len(data)} bytes) is no file name, or holds more than {MAX_RECORD_BYTES} bytes"
            raise InvalidArgumentError(f"item {name!r}: {problem}; pass an array item, or a handler of your own")
        return SaveItem(name, "files", handler_name, file=(file, data))
    if kind == "jax_key" and not isinstance(args.item, jax.Array):
        raise InvalidArgumentError(f"item {name!r}: expected a jax random key, got a {type(args.item).__name__}")
    if kind == "numpy_key" and not isinstance(args.item, tuple | dict):
        raise InvalidArgumentError(f"item {name!r}: expected numpy.random.get_state(), got {type(args.item).__name__}")
    if getattr(args, "ocdbt_target_data_file_size", None) is not None:
        logging.log_first_n(logging.INFO, "ocdbt_target_data_file_size has no effect: it is about Orbax's files", 1)
    tree = cast(name, args.item, getattr(args, "save_args", None))
    attached = checksums.pack_json(getattr(args, "custom_metadata", None), f"item {name!r}: custom_metadata")
    return SaveItem(name, "arrays", handler_name, tree, custom_metadata=attached)


def cast(item: str, tree: Any, save_args: Any) -> Any:
    """The tree with its arrays cast as `save_args`, a pytree of `ocp.SaveArgs` of the same structure, asks.

    A cast changes the precision of floating and complex arrays, or the width of integers. Python numbers, and arrays
    whose kind would change (integers to floats), are saved as they are, with a warning.
    """
    if save_args is None:
        return tree
    wanted: dict[str, Any] = {}
    for path, args in jax.tree_util.tree_leaves_with_path(save_args):
        where = tree_lib.leaf_name(tree_lib.key_path(path))
        if not isinstance(args, ocp.SaveArgs):
            problem = f"save_args has a {type(args).__name__} at {where!r}, no SaveArgs"
            raise InvalidArgumentError(f"item {item!r}: {problem}")
        if args.aggregate or args.chunk_byte_size or getattr(args, "shard_axes", ()):
            logging.log_first_n(logging.INFO, "SaveArgs: fields about Orbax's own files (chunks, …) have no effect", 1)
        wanted[where] = args.dtype
    if all(dtype is None for dtype in wanted.values()):
        return tree
    pairs, treedef = tree_lib.flatten(tree)
    names = [tree_lib.leaf_name(path) for path, _ in pairs]
    unknown = sorted(wanted.keys() - set(names))
    if unknown:
        raise InvalidArgumentError(f"item {item!r}: save_args has {unknown[0]!r}, which the item lacks")
    leaves = [_cast(name, leaf, wanted.get(name)) for name, (_, leaf) in zip(names, pairs, strict=True)]
    return tree_lib.unflatten(treedef, leaves)


def _cast(name: str, leaf: Any, dtype: Any) -> Any:
    if dtype is None or getattr(leaf, "dtype", dtype) == dtype:
        return leaf
    kinds = np.floating, np.complexfloating, np.integer
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and keeps_kind(leaf.dtype, np.dtype(dtype), kinds):
        out = leaf.astype(dtype)
        if tree_lib.issubdtype(leaf.dtype, np.integer) and not _fits(leaf, out):
            raise InvalidArgumentError(f"leaf {name!r}: not every value of its {leaf.dtype} fits in {np.dtype(dtype)}")
        return out
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    logging.log_first_n(
        logging.WARNING, "leaf %s is saved as %s, not as %s: the cast would not keep its values", 3, name, kind, dtype
    )
    return leaf


def _fits(before: Any, after: Any) -> bool:
    """Whether a cast of integers kept the values that this process holds."""
    if np.can_cast(before.dtype, after.dtype, "safe"):
        return True
    if isinstance(before, jax.Array):
        shards = zip(before.addressable_shards, after.addressable_shards, strict=True)
        return all(_fits(np.asarray(a.data), np.asarray(b.data)) for a, b in shards)
    return bool(np.array_equal(before, after.astype(before.dtype)) and np.array_equal(before < 0, after < 0))


def _file_name(handler: Any, kind: str) -> str:
    return _FILES[kind] if isinstance(handler, type) else getattr(handler, "_filename", _FILES[kind])


def _json(name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"item {name!r}: JsonSave expects JSON: {error}") from None


def _proto(name: str, value: Any) -> bytes:
    if not isinstance(value, message.Message):
        raise InvalidArgumentError(f"item {name!r}: ProtoSave expects a protobuf message, got {type(value).__name__}")
    data = text_format.MessageToString(value).encode()
    again = text_format.Parse(data.decode(), type(value)())
    if again.SerializeToString(deterministic=True) != value.SerializeToString(deterministic=True):
        raise InvalidArgumentError(f"item {name!r}: Orbax's format, protobuf text, would lose fields unknown here")
    return data


def restore_item(reader: EpochReader, name: str, args: Any, context: RestoreContext) -> Any:
    """Restores one item as its argument asks; None for the item as it was saved."""
    record = reader.record.items.get(name)
    if record is None:
        raise unknown_item(reader.record.epoch, name, reader.record.items)
    if record.kind == "node" or isinstance(args, own.NodeRestore):
        if record.kind != "node" or not (args is None or isinstance(args, own.NodeRestore)):
            raise contradiction(name, record.handler or "NodeSave", args)
        return _restore_node(reader, name, args, context)
    if record.kind == "arrays":
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
    if kind in _FILES:
        file, data = _only_file(reader, name, _file_name(handler, kind))
        try:
            return json.loads(data) if kind == "json" else text_format.Parse(data.decode(), args.item())
        except (ValueError, RecursionError, text_format.ParseError) as error:
            if kind == "json":
                raise FormatError(f"{reader.folder}/{name}/{file}", f"is not JSON: {error}") from None
            raise InvalidArgumentError(f"item {name!r} is no {args.item.__name__}: {error}") from None
    return _with_files(reader, name, functools.partial(handler.restore, args=args))


def files_metadata(reader: EpochReader, name: str, recorded: str, known: Handlers) -> Any:
    """The metadata that an item's handler gives for its files; None if it gives none, or is not known here."""
    try:
        handler, _ = known.of(name, recorded)
    except InvalidArgumentError:
        return None
    if handlers.kind_of(handler) != "other" or not hasattr(handler, "metadata"):
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


def _tree_request(name: str, args: Any, recorded: str, known: Handlers) -> TreeRequest:
    if args is None:
        return TreeRequest()
    if isinstance(args, own.RenamedRestore):
        if args.item is None:
            raise InvalidArgumentError(f"item {name!r}: RenamedRestore needs a target; without one, rename the result")
        sources = _sources(name, args.rename)
        return TreeRequest(plain_target(args.item), partial=args.partial, needs_values=args.partial, sources=sources)
    kind = handlers.kind_of(known.find(name, args, saving=False))
    saved = next((k for c, k in handlers.OURS.items() if handlers.same(handlers.type_name(c), recorded)), "arrays")
    if kind != saved:
        raise contradiction(name, recorded, args)
    if kind == "jax_key":
        return TreeRequest(None, args.restore_args)
    if kind == "numpy_key":
        return TreeRequest()
    if not isinstance(args, ocp.args.StandardRestore | ocp.args.PyTreeRestore | ocp.args.ArrayRestore):
        raise InvalidArgumentError(
            f"item {name!r} holds arrays; restore it with StandardRestore, PyTreeRestore or ArrayRestore, "
            f"not {type(args).__name__}"
        )
    target = plain_target(args.item)
    if isinstance(args, ocp.args.ArrayRestore):
        return TreeRequest(target, args.restore_args)
    if isinstance(args, ocp.args.StandardRestore):
        fallback, layouts = args.fallback_sharding, args.support_layout
        return TreeRequest(target, fallback_sharding=fallback, layouts=layouts, resize=not args.strict)
    if args.legacy_transform_fn is not None:
        raise UnsupportedError(
            f"item {name!r}: PyTreeRestore(legacy_transform_fn=…) is not supported; "
            "restore the saved tree and change it with jax.tree.map"
        )
    if args.transforms is None:
        resize = not getattr(args, "strict", True)  # the v1 style has both
        return TreeRequest(target, args.restore_args, args.partial_restore, resize=resize)
    if target is None:
        raise InvalidArgumentError(f"item {name!r}: PyTreeRestore(transforms=…) needs item=, the target")
    sources = by_transforms(name, args.transforms, args.transforms_default_to_original)
    return TreeRequest(target, args.restore_args, True, sources=sources)


def _sources(name: str, rename: Any) -> Sources | None:
    """Where the leaves of a target come from, under the names that `rename` gives them; None where it is empty."""
    checked = _renaming.check(rename)
    return None if checked is None else functools.partial(by_rename, f"item {name!r}", checked)


def check_names(names: Sequence[str], folders: Collection[str], known: Sequence[str]) -> None:
    """Refuses item names that the format or the nodes' folders forbid, or that are not among `known`, if any."""
    for name in names:
        paths.check_item_name(name, folders)
        if known and name not in known:
            raise InvalidArgumentError(
                f"item {name!r} is not among item_names={list(known)} (in Orbax's words: it does not match with any "
                "registered handler)"
            )


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
