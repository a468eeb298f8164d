"""Orbax's argument classes, taken apart into what epochckpt saves and restores."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from epochckpt import layout
from epochckpt.errors import FormatError, InvalidArgumentError, UnsupportedError
from epochckpt.node_reader import EpochReader
from epochckpt.restoring import TreeRequest, restore_tree

_ARRAY_SAVE = (ocp.args.StandardSave, ocp.args.PyTreeSave, ocp.args.ArraySave)
_ARRAY_RESTORE = (ocp.args.StandardRestore, ocp.args.PyTreeRestore, ocp.args.ArrayRestore)
_ARRAY_HANDLERS = (ocp.StandardCheckpointHandler, ocp.PyTreeCheckpointHandler, ocp.ArrayCheckpointHandler)
_KNOWN = "StandardSave/Restore, PyTreeSave/Restore, ArraySave/Restore, JsonSave/Restore and Composite of these"


@dataclasses.dataclass(frozen=True)
class SaveItem:
    """One item to save.

    Attributes:
        name: item name.
        tree: the pytree, for array items.
        data: the file's content, for JSON items; else None.
    """

    name: str
    tree: Any = None
    data: bytes | None = None


def is_multi(args: Any) -> bool:
    """Whether the argument names several items (Composite), as opposed to one unnamed item."""
    return isinstance(args, ocp.args.Composite)


def named(args: Any) -> dict[str, Any]:
    """The argument of each item, by name; a single argument is the item `default`."""
    return dict(args.items()) if is_multi(args) else {layout.DEFAULT_ITEM: args}


def to_save(args: Any) -> list[SaveItem]:
    """Takes a save argument apart.

    Raises:
        InvalidArgumentError: not a save argument, or one with something in it that cannot be saved.
        UnsupportedError: an argument class or field that epochckpt does not take.
    """
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise InvalidArgumentError(
            f"save(args=…) expects an instance of a class in orbax.checkpoint.args, got {type(args)}"
        )
    return [_save_item(name, value) for name, value in named(args).items() if value is not None]


def _save_item(name: str, args: Any) -> SaveItem:
    if isinstance(args, ocp.args.JsonSave):
        try:
            return SaveItem(name, data=json.dumps(args.item, ensure_ascii=True).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"item {name!r}: JsonSave expects JSON: {error}") from None
    if not isinstance(args, _ARRAY_SAVE):
        raise UnsupportedError(f"item {name!r}: {type(args).__name__} is not supported yet; supported: {_KNOWN}")
    if getattr(args, "custom_metadata", None) is not None:
        raise UnsupportedError(
            f"item {name!r}: custom_metadata of an item is not supported yet; "
            "use save(custom_metadata=…), which is per epoch"
        )
    for save_args in jax.tree.leaves(getattr(args, "save_args", None), is_leaf=lambda x: isinstance(x, ocp.SaveArgs)):
        if getattr(save_args, "dtype", None) is not None:
            raise UnsupportedError(
                f"item {name!r}: SaveArgs(dtype=…) is not supported yet; cast the arrays before save()"
            )
    return SaveItem(name, tree=args.item)


def restore_item(reader: EpochReader, name: str, args: Any) -> Any:
    """Restores one item as its argument asks (None: as it was saved).

    Raises:
        InvalidArgumentError: the argument does not suit the item.
        UnsupportedError: an argument class or field that epochckpt does not take.
    """
    record = reader.record.items.get(name)
    if record is None:
        have = ", ".join(sorted(reader.record.items)) or "none"
        raise InvalidArgumentError(f"epoch {reader.record.epoch} has no item {name!r}; it has: {have}")
    if record.kind == "json":
        if args is not None and not isinstance(args, ocp.args.JsonRestore):
            raise InvalidArgumentError(
                f"item {name!r} was saved as JSON; restore it with JsonRestore, not {type(args).__name__}"
            )
        data = reader.read_file(name, layout.JSON_FILE)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(reader.path(0, f"{name}/{layout.JSON_FILE}"), f"is not JSON: {error}") from None
    return restore_tree(reader, name, tree_request(name, args))


def tree_request(name: str, args: Any) -> TreeRequest:
    """What a restore argument asks of an array item."""
    if args is None:
        return TreeRequest()
    if not isinstance(args, _ARRAY_RESTORE):
        raise InvalidArgumentError(
            f"item {name!r} holds arrays; restore it with StandardRestore, PyTreeRestore or ArrayRestore, "
            f"not {type(args).__name__}"
        )
    if isinstance(args, ocp.args.ArrayRestore):
        return TreeRequest(args.item, args.restore_args)
    if isinstance(args, ocp.args.StandardRestore):
        if not args.strict:
            raise UnsupportedError(
                f"item {name!r}: StandardRestore(strict=False) pads or cuts arrays; epochckpt does not"
            )
        if args.support_layout:
            raise UnsupportedError(f"item {name!r}: StandardRestore(support_layout=True) is not supported yet")
        return TreeRequest(args.item, fallback_sharding=args.fallback_sharding)
    if args.transforms is not None or args.legacy_transform_fn is not None:
        raise UnsupportedError(
            f"item {name!r}: PyTreeRestore(transforms=…) is not supported; "
            "restore the saved tree and change it with jax.tree.map"
        )
    return TreeRequest(args.item, args.restore_args, args.partial_restore)


def check_handlers(item_handlers: Any, handler_registry: Any, checkpointers: Any) -> tuple[str, ...]:
    """Checks the constructor's handler arguments; returns the item names that they imply."""
    if checkpointers is not None:
        raise UnsupportedError(
            "CheckpointManager(checkpointers=…) is Orbax's legacy form; "
            "leave it out and pass args= to save() and restore()"
        )
    if handler_registry is not None:
        raise UnsupportedError(f"handler_registry= is not supported yet; without it these work: {_KNOWN}")
    if item_handlers is None:
        return ()
    handlers = item_handlers if isinstance(item_handlers, Mapping) else {layout.DEFAULT_ITEM: item_handlers}
    for name, handler in handlers.items():
        if type(handler) not in (*_ARRAY_HANDLERS, ocp.JsonCheckpointHandler):
            raise UnsupportedError(
                f"item_handlers[{name!r}]: {type(handler).__name__} is not supported yet; supported: {_KNOWN}"
            )
    return tuple(handlers) if isinstance(item_handlers, Mapping) else ()


def check_names(names: Sequence[str], nodes: Sequence[str]) -> None:
    """Checks item names against the format and the nodes' names."""
    for name in names:
        layout.check_item_name(name, tuple(nodes))
