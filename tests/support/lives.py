"""Runs of a program that live in threads of this process, and can be killed before any step of theirs.

A step is a call that changes a store. `Life.run` does what it is given as one run. A life that is killed does nothing
more: every call of a store raises `Killed`, in every thread of that life. Stores below a place of a life can also be
away, and a step there can be held while another life goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import obstore
import pytest

from epochckpt.agreement import coordination
from epochckpt.storage import Reader, Store, Writer, opening_through
from epochckpt.testing import Faults, FaultyStore, StoreCall
from tests.support.disk_walk import InMemory, Killed, forget_at_exit, step_in_trees

T = TypeVar("T")

WAIT_SECS = 120.0
_READS = {
    method.__qualname__
    for method in (
        Store.exists,
        Store.existing,
        Store.size,
        Store.read,
        Store.open_reader,
        Store.list,
        Store.find,
        Store.files,
        Store.uncache,
        Store.may_write,
        Store.check_conditions,
        Reader.read_into,
    )
}
_REQUESTS = {
    "get": "reading",
    "head": "looking for",
    "list": "listing",
    "list_with_delimiter": "listing",
    "put": "writing",
    "copy": "copying",
    "delete": "deleting",
}
_LOOKS = ("reading", "looking for", "listing")  # what changes nothing
_here: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
_bucket: contextvars.ContextVar[str] = contextvars.ContextVar("bucket", default="")
_away: set[str] = set()  # places that do not answer
_numbers = itertools.count()


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
        self.number = next(_numbers)

    def run(self, call: Callable[[], T], *, still: bool = False) -> T:
        """What the call returns, made as this run. Raises what it raises, and `Killed`; `still`: only if that does."""
        token = _here.set(self)
        try:
            if still:
                return call()
            self.check()
            try:
                return call()
            finally:
                self.check()  # one who is dead does not tell what became of it
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

    def _die(self) -> None:
        with self._changed:
            if self.dead:
                return
            self.dead = True
        self._go.set()
        self._died()


class Job:
    """Processes of one run, in threads, over a coordinator in memory; one that is dead, or has ended, is late at once.

    Args:
        processes: how many.
        kill: which of them dies, and before its step of which number; `hold`: it waits there instead.
        together: if one dies all do.
    """

    lost_answers: frozenset[str] = frozenset()  # see `disk_walk.Run`

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


def is_away(where: str) -> bool:
    return any(where.startswith(place) for place in _away)


class _OfLife(Faults):
    """Has the calls of a life's stores be its own, and what changes a file system be its steps.

    Those of a bucket are its requests.
    """

    def __init__(self, life: Life, store: Store):
        super().__init__()
        self._life = life
        self._bucket = "" if store.atomic_folder_rename else _bucket_of(store.root)

    def make(self, call: StoreCall, made: Callable[[], T]) -> T:
        life = self._life
        if call.method == Writer.abort.__qualname__:  # it never raises
            return made()
        where = f"{call.store.root}/{call.path}"
        if not self._bucket and is_away(where) and call.method.startswith("Store."):
            life.check()
            raise OSError(errno.EIO, os.strerror(errno.EIO), where)
        if self._bucket or call.method in _READS:
            token = _bucket.set(self._bucket)
            try:
                return life.run(made)
            finally:
                _bucket.reset(token)
        with life.step(call.method.rpartition(".")[2], "file" if call.method.startswith("Writer.") else where):
            return life.run(made, still=True)


def _bucket_of(root: str) -> str:
    """What a key comes behind in the URL of an object; the keys of a bucket in memory begin with its name."""
    return "memory:/" if root.startswith("memory:") else "/".join(root.split("/")[:3])


def _owned(store: Store) -> Store:
    """The store of the life that opens it."""
    life = _here.get()
    if life is None:
        return store
    owned = FaultyStore(store, _OfLife(life, store))
    # Processes do not share their turns at a head: each reaches it by a name of its own.
    owned.endpoint = f"{store.endpoint}#{life.number}"
    return owned


def _connect(read_only: bool, *group: Any) -> coordination.Coordinator:
    life = _here.get()
    return coordination.Coordinator() if life is None or life not in _of_job else _of_job[life]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """In the block, the calls of stores and the threads of a life are its own."""
    with (
        pytest.MonkeyPatch.context() as patch,
        opening_through(_owned),
        coordination.connecting_by(_connect),
    ):
        step_in_trees(patch, _step_in_tree)
        forget_at_exit(patch)
        for name, doing in _REQUESTS.items():
            patch.setattr(obstore, name, functools.partial(_ask, doing, getattr(obstore, name)))
        yield


def _step_in_tree(call: str, path: Any) -> contextlib.AbstractContextManager[None]:
    life = _here.get()
    return contextlib.nullcontext() if life is None else life.step(call, str(path))


def _ask(doing: str, call: Callable[..., T], kv: Any, key: Any = "", *args: Any, **kwargs: Any) -> T:
    """Around each request to a bucket."""
    life = _here.get()
    if life is None:
        return call(kv, key, *args, **kwargs)
    where = f"{_bucket.get()}/{key if isinstance(key, str) else key[0]}"

    def sent() -> T:
        if is_away(where):
            raise obstore.exceptions.GenericError("Server returned status code: 503")
        return call(kv, key, *args, **kwargs)

    if doing in _LOOKS:
        life.check()
        return sent()
    with life.step(doing, where, sent):
        return sent()
