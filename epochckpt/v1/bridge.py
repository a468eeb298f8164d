"""The handlers of Orbax's v1, as our manager runs those of v0: in a folder of their own, see `orbax.handlers`.

Which handler takes an item is decided by Orbax's rules (see `orbax.checkpoint.v1.handlers`), from the registry of the
context. Orbax's own handlers for trees, JSON and protobuf messages only choose what *our* engine does.
"""

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from google.protobuf import message

from epochckpt import _threads
from epochckpt.args import RenamedRestore
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import ItemKind
from epochckpt.v1 import context as contexts

_OURS = {
    ocp.v1.handlers.PyTreeHandler: "arrays",
    ocp.v1.handlers.JsonHandler: "json",
    ocp.v1.handlers.ProtoHandler: "proto",
}
"""What our engine does for an unmodified handler of Orbax's v1."""


class Registry:
    """Takes the place of a v0 registry: each argument of this module brings its handler with it."""

    def has(self, item: str | None, args: type) -> bool:
        """Whether an argument is one of this module's."""
        return issubclass(args, _Args)

    def get(self, item: str | None, args: type) -> Any:
        """The handler of such an argument."""
        return args.handler

    def get_all_entries(self) -> Mapping[Any, Any]:
        """Nothing that could be chosen without an argument."""
        return {}


class _Args(ocp.args.CheckpointArgs):
    """What a bridged handler is to do with the folder of an item."""

    handler: Any

    def __init__(self, call: Callable[[epath.Path], Any]):
        self.call = call


class _Bridge(ocp.handlers.AsyncCheckpointHandler):
    async def async_save(self, directory: epath.Path, args: _Args) -> list[Any]:
        return [await args.call(directory)]

    def save(self, directory: epath.Path, args: _Args) -> None:
        raise NotImplementedError("a bridged handler saves in the background")

    def restore(self, directory: epath.Path, args: _Args) -> Any:
        return args.call(directory)


def _bridged(recorded: str, call: Callable[[epath.Path], Any]) -> Any:
    """An argument whose handler is recorded under a name."""
    bridge = type("Bridge", (_Bridge,), {"typestr": classmethod(lambda cls: recorded)})
    return type("BridgeArgs", (_Args,), {"handler": bridge()})(call)


class _Here:
    """Orbax's `PathAwaitingCreation` of a folder that exists."""

    def __init__(self, path: epath.Path):
        self.path = path

    def __truediv__(self, other: Any) -> "_Here":
        return _Here(self.path / other)

    async def await_creation(self) -> epath.Path:
        return self.path


async def _of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _start(awaitable: Awaitable[Any]) -> _threads.Future[Any]:
    """Runs what a handler does in the background, in the context of the caller."""
    surroundings = contextvars.copy_context()
    return _threads.start(lambda: surroundings.run(asyncio.run, _of(awaitable)))


def _run(awaitable: Awaitable[Any]) -> Any:
    """The result of a handler's coroutine; beside a running event loop (in a notebook) it gets a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_of(awaitable))
    return _start(awaitable).result()


def save_args(name: str, value: Any, context: Any) -> Any:
    """How an item is saved: an argument of Orbax's v0, or one of this module's."""
    if value is None:
        raise InvalidArgumentError(f"checkpointable {name!r} is None: leave it out")
    registry = context.checkpointables_options.registry
    explicit = registry.get(name) if registry.has(name) else None
    stateful = isinstance(value, ocp.v1.StatefulCheckpointable)
    handler = None
    if explicit is None or stateful:
        handler = next((each for each in _newest_first(registry) if each.is_handleable(value)), None)
    chosen = explicit if handler is None else type(handler)
    kind = _OURS.get(chosen)
    if chosen is None or kind == "arrays":  # our engine says what it cannot save
        return contexts.save_args(value, context)
    if kind == "json":
        return ocp.args.JsonSave(value)
    if kind == "proto":
        return ocp.args.ProtoSave(value)

    async def begin(folder: epath.Path) -> Any:
        with contexts.entered(context):
            return _start(await (handler or chosen()).save(_Here(folder), value))

    return _bridged(_name(chosen), begin)


def restore_args(name: str, kind: ItemKind, recorded: str, abstract: Any, context: Any) -> Any:
    """How an item is restored that `recorded`, a handler, saved."""
    if kind is ItemKind.ARRAYS:
        target = abstract.item if isinstance(abstract, RenamedRestore) else abstract
        handler = None if target is None else _for_load(name, recorded, target, context)
        if handler is None or type(handler) in _OURS:
            return contexts.restore_args(abstract, context)
    elif kind is ItemKind.NODE or _is_native(recorded, "JsonCheckpointHandler", abstract is None):
        return None
    elif _is_native(recorded, "ProtoCheckpointHandler", _is_message(abstract)):
        return ocp.args.ProtoRestore(abstract)
    else:
        handler = _for_load(name, recorded, abstract, context)
    if handler is None:
        raise InvalidArgumentError(
            f"checkpointable {name!r} was saved by {recorded or 'an unknown handler'}, and none of the handlers that "
            f"are registered here takes {'it' if abstract is None else f'a {type(abstract).__name__}'}: register one "
            "with orbax.checkpoint.v1.handlers.register_handler, or in Context().checkpointables.registry"
        )
    return _bridged(recorded, lambda folder: _run(_load(handler, folder, abstract, context)))


def metadata_args(name: str, recorded: str, context: Any) -> Any:
    """An argument that restores the metadata of an item of files; None where no handler gives it."""
    handler = _for_load(name, recorded, None, context)
    if handler is None or type(handler) in _OURS:
        return None

    async def metadata(folder: epath.Path) -> Any:
        try:
            with contexts.entered(context):
                return await handler.metadata(folder)
        except NotImplementedError:
            return None

    return _bridged(recorded, lambda folder: _run(metadata(folder)))


async def _load(handler: Any, folder: epath.Path, abstract: Any, context: Any) -> Any:
    with contexts.entered(context):
        return await (await handler.load(folder, abstract))


def _for_load(name: str, recorded: str, abstract: Any, context: Any) -> Any:
    """The handler that restores an item, by Orbax's rules; None if there is none."""
    registry = context.checkpointables_options.registry
    explicit = _new(registry.get(name)) if registry.has(name) else None
    entries = list(reversed(registry.get_all_entries()))
    by_name = next(
        (_new(kind) for kind, _ in entries if recorded in (_name(kind), *_other_names(registry, kind))), None
    )
    both = [by_name, explicit] if isinstance(abstract, ocp.v1.StatefulCheckpointable) else [explicit, by_name]
    for handler in both:
        if handler is not None and (abstract is None or handler.is_abstract_handleable(abstract)):
            return handler
    if abstract is not None:
        for handler in _newest_first(registry):
            if handler.is_abstract_handleable(abstract):
                return handler
    return explicit


def _new(kind: type) -> Any:
    """A handler of a class; one of Orbax's own, of which none runs, is made once: each logs lines."""
    return _orbaxs(kind) if kind in _OURS else kind()


_orbaxs = functools.cache(lambda kind: kind())


def _newest_first(registry: Any) -> Iterator[Any]:
    """The handlers that take any item."""
    return (_new(kind) for kind, name in reversed(registry.get_all_entries()) if name is None)


def _other_names(registry: Any, kind: type) -> tuple[str, ...]:
    known = getattr(registry, "get_secondary_typestrs", None)  # not in older Orbax
    return tuple(known(kind)) if known else ()


def _name(kind: type) -> str:
    """The name under which Orbax's v1 records a handler."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_native(recorded: str, kind: str, fits: bool) -> bool:
    """Whether our own code restores what one of Orbax's v0 handlers saved."""
    return fits and recorded.startswith("orbax.checkpoint.") and recorded.endswith(f".{kind}")


def _is_message(abstract: Any) -> bool:
    return isinstance(abstract, type) and issubclass(abstract, message.Message)
