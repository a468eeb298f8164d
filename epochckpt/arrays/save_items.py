"""Turns Orbax's save arguments into items to save, with the casts that they ask for."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from google.protobuf import message, text_format

from epochckpt import args as own
from epochckpt.arrays.casts import keeps_kind
from epochckpt.arrays.item_names import ONE_FILE, arguments_by_item, file_name
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import ItemKind, checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.format.records import MAX_RECORD_BYTES
from epochckpt.orbax import Handlers, HandlerSave, handlers
from epochckpt.orbax.handlers import HandlerKind


@dataclasses.dataclass(frozen=True)
class TreeItem:
    """An item to save: one pytree for all processes."""

    name: str
    tree: Any
    handler: str = ""  # type name of the Orbax handler, as Orbax records it
    custom_metadata: Any = None  # JSON that belongs to the item

    kind: ClassVar[ItemKind] = ItemKind.ARRAYS


@dataclasses.dataclass(frozen=True)
class NodeItem:
    """An item to save: a pytree of each node's own."""

    name: str
    tree: Any
    by_node: bool = False  # the tree is a dict of pytrees by node name

    kind: ClassVar[ItemKind] = ItemKind.NODE
    handler: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class FileItem:
    """An item to save: one small file, which the primary alone writes."""

    name: str
    handler: str
    file: str  # the file's name
    content: bytes

    kind: ClassVar[ItemKind] = ItemKind.FILES


@dataclasses.dataclass(frozen=True)
class HandlerItem:
    """An item to save: the files of a handler that is not ours, which is run on every node."""

    name: str
    handler: str
    start: Callable[[], HandlerSave]  # starts the save of the handler

    kind: ClassVar[ItemKind] = ItemKind.FILES


SaveItem = TreeItem | NodeItem | FileItem | HandlerItem


def to_save(args: Any, known_handlers: Handlers) -> list[SaveItem]:
    """The items of a save argument; nothing is run or copied yet."""
    return [
        _save_item(name, value, known_handlers) for name, value in arguments_by_item(args).items() if value is not None
    ]


def _save_item(name: str, args: Any, known_handlers: Handlers) -> SaveItem:
    if isinstance(args, own.NodeSave):
        return NodeItem(name=name, tree=args.item, by_node=args.by_node)
    handler = known_handlers.find(name, args, saving=True)
    kind = handlers.kind_of(handler)
    handler_name = handlers.type_name(handler)
    if kind is HandlerKind.OTHER:
        return HandlerItem(name=name, handler=handler_name, start=functools.partial(HandlerSave, handler, name, args))
    if kind in ONE_FILE:
        data = _json(name, args.item) if kind is HandlerKind.JSON else _proto(name, args.item)
        file = file_name(handler, kind)
        if not paths.is_file_path(file) or len(data) > MAX_RECORD_BYTES:
            problem = f"{file!r} ({len(data)} bytes) is no file name, or holds more than {MAX_RECORD_BYTES} bytes"
            raise InvalidArgumentError(f"item {name!r}: {problem}; pass an array item, or a handler of your own")
        return FileItem(name=name, handler=handler_name, file=file, content=data)
    if kind is HandlerKind.JAX_KEY and not isinstance(args.item, jax.Array):
        raise InvalidArgumentError(f"item {name!r}: expected a jax random key, got a {type(args.item).__name__}")
    if kind is HandlerKind.NUMPY_KEY and not isinstance(args.item, tuple | dict):
        raise InvalidArgumentError(f"item {name!r}: expected numpy.random.get_state(), got {type(args.item).__name__}")
    if getattr(args, "ocdbt_target_data_file_size", None) is not None:
        logging.log_first_n(logging.INFO, "ocdbt_target_data_file_size has no effect: it is about Orbax's files", 1)
    tree = cast(name, args.item, getattr(args, "save_args", None))
    attached = checksums.pack_json(getattr(args, "custom_metadata", None), f"item {name!r}: custom_metadata")
    return TreeItem(name=name, tree=tree, handler=handler_name, custom_metadata=attached)


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
    leaves = [_cast(item, name, leaf, wanted.get(name)) for name, (_, leaf) in zip(names, pairs, strict=True)]
    return tree_lib.unflatten(treedef, leaves)


def _cast(item: str, name: str, leaf: Any, dtype: Any) -> Any:
    if dtype is None or getattr(leaf, "dtype", dtype) == dtype:
        return leaf
    kinds = np.floating, np.complexfloating, np.integer
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and keeps_kind(leaf.dtype, np.dtype(dtype), kinds):
        out = leaf.astype(dtype)
        if tree_lib.issubdtype(leaf.dtype, np.integer) and not _fits(leaf, out):
            where = f"item {item!r}, leaf {name!r}"
            raise InvalidArgumentError(f"{where}: not every value of its {leaf.dtype} fits in {np.dtype(dtype)}")
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
