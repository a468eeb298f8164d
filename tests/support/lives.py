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
from epochckpt.agreement import coordination
from epochckpt.directory import head_turns
from epochckpt.storage import PosixStore, Store, posix
from epochckpt.storage.object_client import Client
from tests.support.disk_walk import InMemory, Killed

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


class Life:
    """One run, or one process of a run.

    Args:
        kill: it dies before the step of this number, from 0 on; None: when it is told to.
        place: the part of the storage whose steps are counted; empty: all.
        hold: in place of a kill, that step waits for `let_go`.
        stops: and so does every other call of a store, as if the process were stopped.
        died: called when it has died.
    """

    def __init__(
        self,
        kill: int | None = None,
        place: str = "",
        *,
        hold: bool = False,
        stops: bool = False,
        died: Callable[[], object] = lambda: None,
    ):
        self.dead = False
        self.steps: list[str] = []
        self.held_at = ""
        self.late: Callable[[], object] | None = None  # the request to a bucket before which it died
        self.held, self._go = threading.Event(), threading.Event()
        self._at, self._place, self._hold, self._stops, self._died = kill, place, hold, stops, died
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
        """Before every call of a store."""
        if self._stops and self.held.is_set():
            assert self._go.wait(WAIT_SECS), "nobody lets it go"
        if self.dead:
            raise Killed

    def arm(self, number: int) -> None:
        """From now on, the step after so many others is the one that it is killed or held before."""
        with self._changed:
            self._at, self._count = number, 0

    def end(self) -> None:
        """Kills the run; returns when the steps that are under way are done."""
        self._die()
        with self._changed:
            assert self._changed.wait_for(lambda: not self._under_way, WAIT_SECS), "a step does not end"

    def let_go(self) -> None:
        """The step that is held goes on."""
        self._go.set()

    @contextlib.contextmanager
    def step(self, name: str, where: str, late: Callable[[], object] | None = None) -> Iterator[None]:
        """Around each call that changes a store. `late` makes it after all, when the run is dead."""
        due = False
        self.check()
        with self._changed:
            if self.dead:
                raise Killed
            if self._at is not None and where.startswith(self._place):
                due = self._count == self._at
                self._count += 1
            if due:
                self.held_at = f"{'held' if self._hold else 'killed'} before {name} {where}"
            self.steps.append(self.held_at if due else f"{name} {where}")
            self._under_way += not due
        if due and not self._hold:
            self.late = late
            self._die()
            raise Killed
        if due:
            self.held.set()
            assert self._go.wait(WAIT_SECS), "nobody lets it go"
            with self._changed:
                if self.dead:
                    raise Killed
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
            if self.dead:
                raise Killed
            self._waits.append(future)
        try:
            done = wait()
        finally:
            with self._changed:
                self._waits.remove(future)
        if self.dead:
            raise Killed
        return done

    def _die(self) -> None:
        with self._changed:
            if self.dead:
                return
            self.dead = True
            waits = list(self._waits)
        self._go.set()
        for future in waits:
            future.set(None)
        self._died()


class Job:
    """Processes of one run, in threads, over a coordinator in memory; one that is dead, or has ended, is late at once.

    Args:
        processes: how many.
        kill: which of them dies, and before its step of which number; `hold`: it waits there instead.
        together: if one dies all do.
    """

    def __init__(
        self, processes: int, kill: tuple[int, int] | None = None, *, hold: bool = False, together: bool = False
    ):
        self.processes, self._together = processes, together
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self._gone: set[int] = set()
        died = self._has_died
        self.lives = [
            Life(kill[1] if kill and kill[0] == i else None, hold=hold, stops=hold, died=died) for i in range(processes)
        ]
        self.coordinators = [InMemory(self, number) for number in range(processes)]
        for number, life in enumerate(self.lives):
            _of_job[life] = self.coordinators[number]

    @property
    def dead(self) -> set[int]:
        return {number for number, life in enumerate(self.lives) if life.dead}

    @property
    def silent(self) -> set[int]:
        return self.dead | self._gone

    def step(self, process: int, what: str) -> None:
        """Before a process publishes a value."""
        with self.lives[process].step("put", what):
            pass

    def leave(self, process: int) -> None:
        """A process does nothing more by itself."""
        with self.changed:
            self._gone.add(process)
            self.changed.notify_all()

    def end(self) -> None:
        """Kills all."""
        for life in self.lives:
            life.end()

    def _has_died(self) -> None:
        if self._together:
            for life in self.lives:
                life._die()
        with self.changed:
            self.changed.notify_all()


_of_job: weakref.WeakKeyDictionary[Life, Any] = weakref.WeakKeyDictionary()


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
    start_thread = _threads.start_thread

    def start_here(fn: Callable[[], Any]) -> Any:
        if _here.get() is None:
            return start(fn)
        context = contextvars.copy_context()
        return start(lambda: context.run(fn))

    def start_thread_here(fn: Callable[[], Any]) -> Any:
        if _here.get() is None:
            return start_thread(fn)
        context = contextvars.copy_context()
        return start_thread(lambda: context.run(fn))

    def wait_here(future: _threads.Future[Any], timeout_secs: float | None = None) -> bool:
        life = _here.get()
        if life is None:
            return wait(future, timeout_secs)
        return life.wait(future, lambda: wait(future, timeout_secs))

    def drain_later(owner: Any) -> None:
        if _here.get() is None:
            drain(owner)

    connect = coordination.connect

    def connect_here(*args: Any) -> coordination.Coordinator:
        life = _here.get()
        return connect(*args) if life is None or life not in _of_job else _of_job[life]

    patch.setattr(coordination, "connect", connect_here)
    patch.setattr(_threads, "start", start_here)
    patch.setattr(_threads, "start_thread", start_thread_here)
    patch.setattr(head_turns, "of", lambda store: head_turns.Turns())  # processes do not share their turns
    patch.setattr(_threads, "drain_at_exit", drain_later)
    patch.setattr(_threads.Future, "wait", wait_here)
    patch.setattr(posix, "os", _Os())
    _own(patch, PosixStore)
    _own(patch, Client)
    methods = {name: call for each in (Store, PosixStore) for name, call in vars(each).items()}
    for name, call in methods.items():
        if (
            not name.startswith("_")
            and name != "confirming_damage"
            and callable(call)
            and not isinstance(call, property | type)
        ):
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
        with life.step(doing, where, call):
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
