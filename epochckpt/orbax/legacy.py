"""Orbax's older forms: a Checkpointer in the constructor, and `save(step, items, save_kwargs)`.

They are turned into the modern ones: a checkpointer is its handler, and an item with its keyword arguments is an
instance of the handler's argument class.
"""

from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import paths
from epochckpt.orbax.handlers import Handlers


def handlers(checkpointers: Any, item_names: Any, item_handlers: Any, handler_registry: Any) -> Handlers:
    """The handlers that the constructor was given, in whatever form."""
    given = {
        "checkpointers": checkpointers,
        "item_handlers": item_handlers,
        "handler_registry": handler_registry,
        "item_names": item_names,
    }
    passed = [name for name, value in given.items() if value]
    single = item_handlers is not None and not isinstance(item_handlers, Mapping)
    if len(passed) > 1 and (passed != ["item_handlers", "item_names"] or single):
        raise InvalidArgumentError(f"{' and '.join(passed)} exclude each other; pass one of them")
    if checkpointers is None:
        return Handlers(item_handlers, handler_registry)
    if isinstance(checkpointers, Mapping):
        return Handlers({name: _handler(c) for name, c in checkpointers.items()})
    return Handlers(_handler(checkpointers))


def _handler(checkpointer: Any) -> Any:
    if not isinstance(checkpointer, ocp.Checkpointer):
        raise InvalidArgumentError(
            f"checkpointers= expects an orbax.checkpoint.Checkpointer or a dict of them, got a "
            f"{type(checkpointer).__name__}; better leave this legacy form, and pass args= to save() and restore()"
        )
    handler = checkpointer.handler
    # Orbax wraps a handler without argument classes.
    is_wrapper = type(handler).__name__.endswith("LegacyCheckpointHandlerWrapper")
    return getattr(handler, "_handler", handler) if is_wrapper else handler


def is_asynchronous(checkpointers: Any) -> bool:
    """Whether saves go on in the background: not if only checkpointers were given that wait."""
    given = list(checkpointers.values()) if isinstance(checkpointers, Mapping) else [checkpointers]
    return checkpointers is None or any(isinstance(c, ocp.AsyncCheckpointer) for c in given)


def arguments(known: Handlers, items: Any, kwargs: Any, args: Any, verb: str) -> Any:
    """The argument of a `save` or `restore` (the verb) in whatever form; None if a restore has none."""
    if isinstance(items, ocp.args.CheckpointArgs):
        raise InvalidArgumentError(f"pass it by name: {verb}(step, args={type(items).__name__}(…))")
    if items is None and kwargs is None:
        return args
    if args is not None:
        raise InvalidArgumentError(f"{verb}(step, items, …_kwargs) is the older form of {verb}(step, args=…); not both")
    if not known.given:
        raise UnsupportedError(
            f"{verb}(step, items, …_kwargs) is Orbax's legacy form; use {verb}(step, "
            f"args=orbax.checkpoint.args.Standard{verb.title()}(…)), or args.Composite(name=…) for several items"
        )
    if known.single:
        return _argument(known, paths.DEFAULT_ITEM, items, kwargs, verb)
    for value in (items, kwargs):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidArgumentError(f"{verb}(): expected a dict by item name, got a {type(value).__name__}")
    names = list(items if items is not None else kwargs)
    found = {n: _argument(known, n, (items or {}).get(n), (kwargs or {}).get(n), verb) for n in names}
    return ocp.args.Composite(**found)


def _argument(known: Handlers, name: str, item: Any, kwargs: Any, verb: str) -> Any:
    if name not in known.given:
        have = ", ".join(known.given)
        raise InvalidArgumentError(f"{verb}(): there is no handler for item {name!r}; there are some for: {have}")
    if verb == "restore" and item is None and not kwargs:
        return None
    kind = ocp.args.get_registered_args_cls(known.given[name])[verb == "restore"]
    try:
        return kind(item=item, **(kwargs or {}))  # type: ignore[call-arg]
    except TypeError as error:
        raise InvalidArgumentError(
            f"{verb}(): item {name!r} cannot be passed in Orbax's legacy form ({error}); use args={kind.__name__}(…)"
        ) from None
