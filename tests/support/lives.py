"""Runs of a program that live in threads of this process, and can be killed before any step of theirs.

A step is a call that changes a store. `Life.run` does what it is given as one run. A life that is killed does nothing
more: every call of a store raises `Killed`, in every thread of that life, and so does every wait. Stores below a place
of a life can also be away, and a step there can be held while another life goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import obstore
import pytest

from epochckpt import _threads
from epochckpt.storage import PosixStore, Store, posix
from epochckpt.storage.object_client import Client

T = TypeVar("T")

WAIT_SECS = 120.0
_READS = {
    *("exists", "existing", "size", "read", "open_reader", "list", "find", "files", "uncache", "may_write"),
    *("is_same", "address_of", "each", "check_conditions"),
}
_LOOKS = ("reading", "looking for", "listing")  # what a client does that changes nothing
_here: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
_of_object: weakref.WeakKeyDictionary[Any, Life] = weakref.WeakKeyDictionary()
_away: set[str] = set()  # places that do not answer


class Killed(BaseException):
    """The run is dead."""


class Life:
    """One run.

    Args:
        kill: it dies before the step of this number, from 0 on; None: when it is told to.
        place: the part of the storage whose steps are counted; empty: all.
        hold: in place of a kill, that step waits for `let_go`.
    """

    def __init__(self, kill: int | None = None, place: str = "", *, hold: bool = False):
        self.dead = False
        self.steps: list[str] = []
        self.held_at = ""
        self.held, self._go = threading.Event(), threading.Event()
        self._at, self._place, self._hold = kill, place, hold
        self._count, self._under_way = 0, 0
        self._changed = threading.Condition()
        self._waits: list[_threads.Future[Any]] = []

    def run(self, call: Callable[[], T]) -> T:
        """What the call returns, made as this run. Raises what it raises, and `Killed`."""
        token = _here.set(self)
        try:
            self.check()
            return call()
        finally:
            _here.reset(token)

    def start(self, call: Callable[[], object]) -> threading.Thread:
        """Makes a call as this run in a thread of its own; what it raises is its own affair."""

        def made() -> None:
            with contextlib.suppress(Killed, Exception):
                self.run(call)

        thread = threading.Thread(target=made, daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        if self.dead:
            raise Killed

    def end(self) -> None:
        """Kills the run; returns when the steps that are under way are done."""
        self._die()
        with self._changed:
            assert self._changed.wait_for(lambda: not self._under_way, WAIT_SECS), "a step does not end"

    def let_go(self) -> None:
        """The step that is held goes on."""
        self._go.set()

    @contextlib.contextmanager
    def step(self, name: str, where: str) -> Iterator[None]:
        """Around each call that changes a store."""
        held = False
        with self._changed:
            self.check()
            if self._at is not None and where.startswith(self._place):
                due = self._count == self._at
                self._count += 1
                if due and not self._hold:
                    self.steps.append(f"killed before {name} {where}")
                    self._die()
                    raise Killed
                held = due
                self.held_at = f"held before {name} {where}" if held else self.held_at
            self.steps.append(f"{name} {where}")
            self._under_way += not held
        if held:
            self.held.set()
            assert self._go.wait(WAIT_SECS), "nobody lets it go"
            with self._changed:
                self.check()
                self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def wait(self, future: _threads.Future[Any], wait: Callable[[], bool]) -> bool:
        """Waits for a future of this run, which ends when it dies."""
        with self._changed:
            self.check()
            self._waits.append(future)
        try:
            done = wait()
        finally:
            with self._changed:
                self._waits.remove(future)
        self.check()
        return done

    def _die(self) -> None:
        with self._changed:
            self.dead = True
            waits = list(self._waits)
        self._go.set()
        for future in waits:
            future.set(None)


@contextlib.contextmanager
def away(place: str) -> Iterator[None]:
    """Stores below this place do not answer."""
    _away.add(place)
    try:
        yield
    finally:
        _away.discard(place)


def set_away(place: str, gone: bool) -> None:
    """Stores below this place do not answer, or do again."""
    (_away.add if gone else _away.discard)(place)


def _is_away(where: str) -> bool:
    return any(where.startswith(place) for place in _away)


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes the calls of stores, the waits and the threads of a life its own."""
    start, drain, wait = _threads.start, _threads.drain_at_exit, _threads.Future.wait

    def start_here(fn: Callable[[], Any]) -> Any:
        if _here.get() is None:
            return start(fn)
        context = contextvars.copy_context()
        return start(lambda: context.run(fn))

    def wait_here(future: _threads.Future[Any], timeout_secs: float | None = None) -> bool:
        life = _here.get()
        if life is None:
            return wait(future, timeout_secs)
        return life.wait(future, lambda: wait(future, timeout_secs))

    def drain_later(owner: Any) -> None:
        if _here.get() is None:
            drain(owner)

    patch.setattr(_threads, "start", start_here)
    patch.setattr(_threads, "drain_at_exit", drain_later)
    patch.setattr(_threads.Future, "wait", wait_here)
    patch.setattr(posix, "os", _Os())
    _own(patch, PosixStore)
    _own(patch, Client)
    methods = {name: call for each in (Store, PosixStore) for name, call in vars(each).items()}
    for name, call in methods.items():
        if not name.startswith("_") and callable(call) and not isinstance(call, property | type):
            patch.setattr(PosixStore, name, _through(name, call), raising=False)
    for name in ("write", "finish"):
        patch.setattr(posix.PosixWriter, name, _writing(name, getattr(posix.PosixWriter, name)))
    ask = Client.ask

    def asked(client: Client, path: str, doing: str, call: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        life, where = _of_object.get(client), f"{client.root}/{path}"
        if life is None:
            return ask(client, path, doing, call, *args, **kwargs)

        def sent() -> Any:
            if _is_away(where):
                raise obstore.exceptions.GenericError("Server returned status code: 503")
            return call()

        if doing in _LOOKS:
            life.check()
            return ask(client, path, doing, sent, *args, **kwargs)
        with life.step(doing, where):
            return ask(client, path, doing, sent, *args, **kwargs)

    patch.setattr(Client, "ask", asked)


def _own(patch: pytest.MonkeyPatch, kind: Any) -> None:
    """Objects of this class belong to the life that has made them."""
    init = kind.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if (life := _here.get()) is not None:
            _of_object[self] = life
        init(self, *args, **kwargs)

    patch.setattr(kind, "__init__", made)


def _through(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def made(self: PosixStore, *args: Any, **kwargs: Any) -> Any:
        life = _of_object.get(self)
        if life is None:
            return call(self, *args, **kwargs)
        where = f"{self.root}/{args[0] if args and isinstance(args[0], str) else ''}"
        if _is_away(where):
            life.check()
            raise OSError(5, os.strerror(5), where)
        if name in _READS:
            life.check()
            return call(self, *args, **kwargs)
        with life.step(name, where):
            return call(self, *args, **kwargs)

    return made


def _writing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (life := _here.get()) is None:
            return call(self, *args, **kwargs)
        with life.step(name, "file"):
            return call(self, *args, **kwargs)

    return made


class _Os:
    """The module of the system's calls: what they remove within a tree are steps, too."""

    __getattr__ = staticmethod(functools.partial(getattr, os))

    @staticmethod
    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        _remove(os.unlink, path, dir_fd)

    @staticmethod
    def rmdir(path: str, *, dir_fd: int | None = None) -> None:
        _remove(os.rmdir, path, dir_fd)


def _remove(call: Callable[..., None], path: str, dir_fd: int | None) -> None:
    if (life := _here.get()) is None or dir_fd is None:
        return call(path, dir_fd=dir_fd)
    with life.step(call.__name__, path):
        return call(path, dir_fd=dir_fd)
