"""Which item an argument means, which names items may have, and the name of the file of an item that is one file."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from epochckpt.errors import InvalidArgumentError, UnknownNameError
from epochckpt.format import paths
from epochckpt.orbax import options
from epochckpt.orbax.handlers import HandlerKind

ONE_FILE = {HandlerKind.JSON: paths.JSON_FILE, HandlerKind.PROTO: "proto.pbtxt"}
"""The kinds of handlers that write one file, and the names that Orbax's handlers give it."""


def arguments_by_item(args: Any) -> dict[str, Any]:
    """The argument of each item, by name; a single argument is the item `default`."""
    return dict(args.items()) if options.is_multi(args) else {paths.DEFAULT_ITEM: args}


def requested_items(args: Any, names: Iterable[str], default_item: bool) -> tuple[dict[str, Any], bool]:
    """The argument of each item to restore, and whether the one unnamed item is returned by itself."""
    return (
        (dict.fromkeys(names), default_item) if args is None else (arguments_by_item(args), not options.is_multi(args))
    )


def stored_name(name: str, names: Collection[str]) -> str:
    """What an item is called among the items of an epoch: the one unnamed item has had several names in Orbax."""
    if name in names or name not in paths.UNNAMED:
        return name
    others = [other for other in paths.UNNAMED if other in names]
    return others[0] if len(others) == 1 else name


def chosen_arrays(epoch: int, arrays: Sequence[str], item: str | None) -> str:
    """The named item of arrays, or the only one; else an InvalidArgumentError that lists the items."""
    item = item and stored_name(item, arrays)
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


def check_names(names: Sequence[str], folders: Collection[str], item_names: Sequence[str]) -> None:
    """Refuses item names that the format or the nodes' folders forbid, or that are not among `item_names`, if given."""
    for name in names:
        paths.check_item_name(name, folders)
        if item_names and name not in item_names:
            raise InvalidArgumentError(
                f"item {name!r} is not among item_names={list(item_names)} (in Orbax's words: it does not match with "
                "any registered handler)"
            )


def file_name(handler: Any, kind: HandlerKind) -> str:
    """The name of the one file of an item of this kind, as its handler calls it."""
    return ONE_FILE[kind] if isinstance(handler, type) else getattr(handler, "_filename", ONE_FILE[kind])
