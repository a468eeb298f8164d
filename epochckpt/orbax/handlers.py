"""Orbax's handlers: which one stands for an item, and how those that are not ours are run.

As in Orbax, the class of an argument says which handler takes the item: through the manager's `handler_registry` or
`item_handlers`, else through the global registration. Unmodified handlers of Orbax only choose what *our* engine does
(`OURS`); other handlers are run in a folder of their own on local disk. A save copies it to the node's folder in the
background; for a restore it has the verified files of all nodes.

Orbax's older forms are turned into the modern ones: a Checkpointer is its handler, and an item with its keyword
arguments, as in `save(step, items, save_kwargs)`, is an instance of the handler's argument class.
"""

import asyncio
import contextlib
import enum
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import paths


class HandlerKind(enum.Enum):
    """What our engine does for a handler."""

    ARRAYS = "arrays"  # it saves and restores a pytree
    JAX_KEY = "jax_key"  # a random key of jax, as a tree of one leaf
    NUMPY_KEY = "numpy_key"  # the state of NumPy's random numbers, as a tree
    JSON = "json"  # one file
    PROTO = "proto"  # one file
    OTHER = "other"  # nothing: the handler is run


OURS: Mapping[type, HandlerKind] = {
    ocp.handlers.StandardCheckpointHandler: HandlerKind.ARRAYS,
    ocp.handlers.PyTreeCheckpointHandler: HandlerKind.ARRAYS,
    ocp.handlers.ArrayCheckpointHandler: HandlerKind.ARRAYS,
    ocp.handlers.JaxRandomKeyCheckpointHandler: HandlerKind.JAX_KEY,
    ocp.handlers.NumpyRandomKeyCheckpointHandler: HandlerKind.NUMPY_KEY,
    ocp.handlers.JsonCheckpointHandler: HandlerKind.JSON,
    ocp.handlers.ProtoCheckpointHandler: HandlerKind.PROTO,
}
"""What our engine does for an unmodified handler of Orbax's."""

_OF_ONE_FILE = HandlerKind.JSON, HandlerKind.PROTO
_ENGINE = (*(c for c, kind in OURS.items() if kind not in _OF_ONE_FILE), ocp.handlers.CompositeCheckpointHandler)
MAX_FILES = 4096  # that a handler may write on one node for one item


class HandlerSave:
    """A handler that writes an item of this node into a folder of its own; its blocking part runs when this is made."""

    def __init__(self, handler: Any, item: str, args: Any):
        self.item = item
        self._handler = handler
        self._futures: list[Any] = []  # of what may still write; `collect` takes out what has ended
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="epochckpt-"))
        try:
            where = epath.Path(self._folder)
            if isinstance(handler, ocp.handlers.AsyncCheckpointHandler):
                self._futures = list(_finished(handler.async_save(where, args=args)) or ())
            else:
                handler.save(where, args=args)
        except BaseException as error:
            self.discard()
            error.add_note(f"raised by {type(handler).__name__} while saving item {item!r}")
            raise

    def collect(self, deadline: Deadline) -> Mapping[str, pathlib.Path]:
        """The files that it wrote, by path inside the item's folder, once it has ended; raises what the handler raises.

        InvalidArgumentError: it left something that is no plain file, or too many files. Empty folders are not kept.
        """
        while self._futures:
            self._bounded(self._futures.pop(0).result, deadline)
        finalize = getattr(type(self._handler), "finalize", None)
        if finalize not in (None, ocp.handlers.CheckpointHandler.finalize):
            self._bounded(lambda: self._handler.finalize(epath.Path(self._folder)), deadline)
        found = dict(self._walk(self._folder))
        if len(found) > MAX_FILES:
            raise InvalidArgumentError(f"item {self.item!r}: its handler wrote {len(found)} files, over {MAX_FILES}")
        return found

    def _bounded(self, call: Callable[[], Any], deadline: Deadline) -> None:
        running = _threads.start(call)
        if not running.wait(max(deadline.left(), 0.001)):
            self._futures.append(running)
            raise TimeoutError(f"it did not end within {deadline.secs:g} s")
        running.result()

    def _walk(self, folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            path = pathlib.Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(path)
                continue
            name = path.relative_to(self._folder).as_posix()
            if not entry.is_file(follow_symlinks=False) or not paths.is_file_path(name):
                raise InvalidArgumentError(f"item {self.item!r}: its handler left {name!r}, which cannot be kept")
            yield name, path

    def discard(self) -> None:
        """Removes the folder; if the handler still writes to it, when that has ended."""
        if self._futures:
            _threads.start(self._remove)
        else:
            self._remove()

    def _remove(self) -> None:
        for future in self._futures:
            with contextlib.suppress(BaseException):  # its save has ended already
                future.result()
        shutil.rmtree(self._folder, ignore_errors=True)


def _finished(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; beside a running event loop (in a notebook) it gets a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call)
    return _threads.start(lambda: asyncio.run(call)).result()


class Handlers:
    """The handlers of one manager: `given` by item name, those of a registry, and those registered globally.

    `names` are the item names that are given; `single`: a handler was given for the one unnamed item. `asynchronous`:
    saves go on in the background; not if only checkpointers were given that wait.
    """

    def __init__(
        self, item_handlers: Any = None, handler_registry: Any = None, checkpointers: Any = None, item_names: Any = None
    ):
        names = ("checkpointers", "item_handlers", "handler_registry", "item_names")
        values = (checkpointers, item_handlers, handler_registry, item_names)
        passed = [name for name, value in zip(names, values, strict=True) if value]
        by_name = item_handlers is None or isinstance(item_handlers, Mapping)
        if len(passed) > 1 and not (passed == ["item_handlers", "item_names"] and by_name):
            raise InvalidArgumentError(f"{' and '.join(passed)} exclude each other; pass one of them")
        if isinstance(checkpointers, Mapping):
            item_handlers = {name: _handler_of(checkpointer) for name, checkpointer in checkpointers.items()}
        elif checkpointers is not None:
            item_handlers = _handler_of(checkpointers)
        waiting = list(checkpointers.values()) if isinstance(checkpointers, Mapping) else [checkpointers]
        self.asynchronous = checkpointers is None or any(isinstance(c, ocp.AsyncCheckpointer) for c in waiting)
        self._registry: Any = handler_registry
        if handler_registry is not None and not hasattr(handler_registry, "get_all_entries"):
            got = type(handler_registry).__name__
            raise InvalidArgumentError(f"handler_registry expects a CheckpointHandlerRegistry, got a {got}")
        several = isinstance(item_handlers, Mapping)
        given = item_handlers if several else {} if item_handlers is None else {paths.DEFAULT_ITEM: item_handlers}
        self.names: tuple[str, ...] = tuple(given) if several else ()
        self.single = item_handlers is not None and not several
        self._made: dict[tuple[str, type], Any] = {}
        self._passed = [handler for handler in given.values() if handler is not None]
        self.given = {name: self._checked(name, handler) for name, handler in given.items() if handler is not None}
        for name, handler in self.given.items():
            if not ocp.args.has_registered_args(handler):
                raise UnsupportedError(
                    f"item_handlers[{name!r}]: {type(handler).__name__} has no argument classes; register them with "
                    "orbax.checkpoint.args.register_with_handler"
                )

        known = {name or "any": h for (name, _), h in self._entries().items()} | self.given
        chosen = sorted(name for name, h in known.items() if kind_of(h) is HandlerKind.ARRAYS)
        if chosen:
            text = "items %s: Orbax's array handlers choose epochckpt's engine; their own options change nothing here"
            logging.info(text, ", ".join(chosen))

    def arguments(self, items: Any, kwargs: Any, args: Any, verb: str) -> Any:
        """The argument of a `save` or `restore` (the verb) in whatever form; None if a restore has none."""
        if isinstance(items, ocp.args.CheckpointArgs):
            raise InvalidArgumentError(f"pass it by name: {verb}(step, args={type(items).__name__}(…))")
        if items is None and kwargs is None:
            return args
        if args is not None:
            form = f"{verb}(step, items, …_kwargs) is the older form of {verb}(step, args=…)"
            raise InvalidArgumentError(f"{form}; not both")
        if not self.given:
            raise UnsupportedError(
                f"{verb}(step, items, …_kwargs) is Orbax's legacy form; use {verb}(step, "
                f"args=orbax.checkpoint.args.Standard{verb.title()}(…)), or args.Composite(name=…) for several items"
            )
        if self.single:
            return self._argument(paths.DEFAULT_ITEM, items, kwargs, verb)
        for value in (items, kwargs):
            if value is not None and not isinstance(value, Mapping):
                raise InvalidArgumentError(f"{verb}(): expected a dict by item name, got a {type(value).__name__}")
        names = list(items if items is not None else kwargs)
        found = {n: self._argument(n, (items or {}).get(n), (kwargs or {}).get(n), verb) for n in names}
        return ocp.args.Composite(**found)

    def _argument(self, name: str, item: Any, kwargs: Any, verb: str) -> Any:
        if name not in self.given:
            have = ", ".join(self.given)
            raise InvalidArgumentError(f"{verb}(): there is no handler for item {name!r}; there are some for: {have}")
        if verb == "restore" and item is None and not kwargs:
            return None
        kind = ocp.args.get_registered_args_cls(self.given[name])[verb == "restore"]
        try:
            return kind(item, **(kwargs or {}))  # type: ignore[call-arg]  # by position, as Orbax: it may have any name
        except TypeError as error:
            raise InvalidArgumentError(
                f"{verb}(): item {name!r} cannot be passed in Orbax's legacy form ({error}); use "
                f"args={kind.__name__}(…)"
            ) from None

    def find(self, item: str, args: Any, *, saving: bool) -> Any:
        """The handler for an item with an argument: an instance, or one of the classes in `OURS`."""
        handler = self._find(item, args)
        if ocp.args.has_registered_args(handler):
            right, wrong = ocp.args.get_registered_args_cls(handler)[:: 1 if saving else -1]
            if type(args) is wrong is not right:
                verb = "saving" if saving else "restoring"
                raise InvalidArgumentError(f"item {item!r}: {wrong.__name__} is no argument for {verb}")
        return handler

    def _find(self, item: str, args: Any) -> Any:
        kind = type(args)
        for name in (item, None):
            if self._registry is not None and self._registry.has(name, kind):
                return self._checked(item, self._registry.get(name, kind))
        known = self.given.get(item)
        if known is not None:
            if not _suits(known, kind):
                taken = " and ".join(cls.__name__ for cls in ocp.args.get_registered_args_cls(known))
                raise InvalidArgumentError(
                    f"item {item!r} has a {type(known).__name__}, which takes {taken}, got a {kind.__name__}; pass one "
                    "of these, or give the item another handler (in Orbax's words: it does not match with any "
                    "registered handler)"
                )
            return known
        try:
            found = ocp.args.get_registered_handler_cls(kind)
        except ValueError:
            raise InvalidArgumentError(
                f"item {item!r}: {kind.__name__} has no handler; register it with "
                "orbax.checkpoint.args.register_with_handler, or pass handler_registry="
            ) from None
        found = _of_orbax(found)
        _check(item, found)
        return found if found in OURS else self._make(item, found)

    def _checked(self, item: str, handler: Any) -> Any:
        """A handler, or the one of Orbax's that it adds nothing to; refuses those that cannot be used."""
        kind = _of_orbax(type(handler))
        _check(item, kind, handler)
        return handler if kind is type(handler) else self._make(item, kind)

    def of(self, item: str, recorded: str) -> tuple[Any, Any]:
        """The handler of an item that was saved by the handler `recorded`, and its default argument for restoring."""
        handler = next((h for h in self._configured(item) if same(type_name(h), recorded)), None)
        if handler is None:
            found = [c for c in _registered() if same(type_name(c), recorded)]
            if not found:
                raise InvalidArgumentError(
                    f"item {item!r} was saved by {recorded}, which is not known here: pass its restore argument in "
                    "args=, or handler_registry= or item_handlers= to the manager"
                )
            handler = self._make(item, found[-1])  # a class that was defined again counts
        _, restore = ocp.args.get_registered_args_cls(handler)
        try:
            return handler, restore()
        except TypeError as error:
            raise InvalidArgumentError(
                f"item {item!r}: {restore.__name__} cannot be made without arguments ({error}); pass it in args="
            ) from None

    def _configured(self, item: str) -> list[Any]:
        """The handlers that an item may have, the most particular first."""
        given = [self.given[item]] if item in self.given else []
        named = [handler for (name, _), handler in self._entries().items() if name == item]
        anyone = [handler for (name, _), handler in self._entries().items() if name is None]
        return given + named + anyone + [handler for (name, _), handler in self._made.items() if name == item]

    def _entries(self) -> Mapping[tuple[str | None, type], Any]:
        return self._registry.get_all_entries() if self._registry is not None else {}

    def _make(self, item: str, kind: type) -> Any:
        if (item, kind) not in self._made:
            try:
                self._made[item, kind] = kind()
            except TypeError as error:
                raise InvalidArgumentError(
                    f"item {item!r}: {kind.__name__} cannot be made without arguments ({error}); pass an instance as "
                    "item_handlers= or in handler_registry="
                ) from None
        return self._made[item, kind]

    def close(self) -> None:
        every = [*self._passed, *self._entries().values(), *self._made.values()]
        for handler in {id(h): h for h in every}.values():
            close = getattr(handler, "close", None)
            if close is not None:
                _threads.logged(f"{type(handler).__name__} could not be closed", close)


def _handler_of(checkpointer: Any) -> Any:
    if not isinstance(checkpointer, ocp.Checkpointer):
        raise InvalidArgumentError(
            f"checkpointers= expects an orbax.checkpoint.Checkpointer or a dict of them, got a "
            f"{type(checkpointer).__name__}; better leave this legacy form, and pass args= to save() and restore()"
        )
    handler = checkpointer.handler
    # Orbax wraps a handler without argument classes.
    is_wrapper = type(handler).__name__.endswith("LegacyCheckpointHandlerWrapper")
    return getattr(handler, "_handler", handler) if is_wrapper else handler


def kind_of(handler: Any) -> HandlerKind:
    """What our engine does for a handler (an instance, or a class in `OURS`)."""
    return OURS.get(_of_orbax(handler if isinstance(handler, type) else type(handler)), HandlerKind.OTHER)


def type_name(handler: Any) -> str:
    """The name under which Orbax records a handler (an instance or a class)."""
    kind = handler if isinstance(handler, type) else type(handler)
    return kind.typestr() if hasattr(kind, "typestr") else f"{kind.__module__}.{kind.__qualname__}"


def same(name: str, other: str) -> bool:
    """Whether two names mean one handler; Orbax moves its own from module to module."""
    orbax = name.startswith("orbax.checkpoint.") and other.startswith("orbax.checkpoint.")
    return name == other or (orbax and name.rpartition(".")[2] == other.rpartition(".")[2])


class _Nothing(ocp.handlers.CheckpointHandler):
    """A class that adds nothing to its base."""


def _of_orbax(kind: type) -> type:
    """The handler of Orbax's engine that a class is by another name, because it adds nothing to it; else the class."""
    if kind in OURS or not issubclass(kind, _ENGINE) or len(kind.__bases__) != 1:
        return kind
    base = _of_orbax(kind.__bases__[0])
    return base if base in OURS and vars(kind).keys() <= vars(_Nothing).keys() else kind


_usual = functools.cache(lambda kind: kind())  # a handler of a class, as it is made without arguments


def _check(item: str, kind: type, handler: Any = None) -> None:
    """Refuses handlers whose work our engine would do otherwise than they do."""
    if kind in OURS:
        leaf_types = "_type_handler_registry"  # there is no public way to ask what a handler was taught about leaves
        if handler is not None and getattr(handler, leaf_types, None) is not getattr(_usual(kind), leaf_types, None):
            raise UnsupportedError(
                f"item {item!r}: {kind.__name__}(type_handler_registry=…) teaches Orbax's engine leaf types, which "
                "epochckpt does not use; save such leaves as an item of their own, with a handler"
            )
        return
    engine = next((base for base in kind.__mro__ if base in _ENGINE), None)
    if engine is not None:
        name = f"{kind.__module__}.{kind.__qualname__}"
        does = "is a part of" if kind is engine else f"changes {engine.__name__}, a part of"
        raise UnsupportedError(
            f"item {item!r}: {name} {does} Orbax's own engine, which epochckpt does not use; pass an unmodified "
            "handler of Orbax's, or none"
        )


def _suits(handler: Any, args: type) -> bool:
    """Whether a handler takes arguments of a class."""
    try:
        return _of_orbax(ocp.args.get_registered_handler_cls(args)) is type(handler)
    except ValueError:
        return False


def _registered(args: type = ocp.args.CheckpointArgs) -> Iterator[Any]:
    """Every handler that has argument classes for saving and restoring."""
    for child in args.__subclasses__():
        try:
            handler = ocp.args.get_registered_handler_cls(child)
        except ValueError:
            handler = None
        if handler is not None and ocp.args.has_registered_args(handler):
            yield handler
        yield from _registered(child)
