"""The only threads of epochckpt.

Guarantees:
- all threads are daemons: a stuck system call can never keep the interpreter from ending; `at_exit` drains run first;
- `Pool.run` returns when every task has ended, and raises the first error;
- a `Lane` runs its jobs one at a time, in order, and never dies of a job's error (it goes into the job's future);
- `abandonable` bounds a call that has no timeout of its own: the call may go on in a thread nobody waits for.

`concurrent.futures` is not used: it refuses work once the interpreter has begun to shut down, which is exactly when
the last save must be drained.
"""

from __future__ import annotations

import atexit
import collections
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from absl import logging

from epochckpt.errors import kept, say

T = TypeVar("T")


class Future(Generic[T]):
    """A result that arrives once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def set(self, value: T) -> None:
        """Gives the result."""
        self._value = value
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Gives the error."""
        self._error = error
        self._event.set()

    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._event.is_set()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits; False if nothing came in time."""
        return self._event.wait(timeout_secs)

    def result(self, timeout_secs: float | None = None) -> T:
        """The result; raises the error, or TimeoutError."""
        if not self._event.wait(timeout_secs):
            raise TimeoutError(f"nothing came within {timeout_secs} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


_idle: collections.deque[queue.SimpleQueue[Callable[[], None]]] = collections.deque()


def _serve(inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        inbox.get()()
        _idle.append(inbox)


def start(fn: Callable[[], T]) -> Future[T]:
    """Runs `fn` in a daemon thread, reusing an idle one where there is one."""
    future: Future[T] = Future()

    def job() -> None:
        try:
            future.set(fn())
        except BaseException as error:  # handed to whoever waits
            future.fail(error)

    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(inbox,), daemon=True, name="epochckpt").start()
        except RuntimeError:  # the interpreter is ending and gives no more threads: do it here
            job()
            return future
    inbox.put(job)
    return future


def abandonable(fn: Callable[[], T], timeout_secs: float) -> T:
    """Runs `fn` with a bound on the wait; on TimeoutError the call itself goes on unobserved."""
    return start(fn).result(timeout_secs)


def logged(what: str, fn: Callable[[], T]) -> T | None:
    """Runs something that must not stop what it follows: a failure is logged, and None returned."""
    try:
        return fn()
    except Exception as error:
        logging.warning("%s: %s", what, say(error))
        return None


class Pool:
    """A few threads for I/O."""

    def __init__(self, threads: int):
        self.threads = threads

    def run(self, tasks: Sequence[Callable[[], Any]]) -> None:
        """Runs all tasks, in order of start; after an error no further task is started.

        Raises:
            The first error of a task, when all that had been started have ended.
        """
        pending = collections.deque(tasks)
        errors: list[BaseException] = []

        def drain() -> None:
            while not errors:
                try:
                    task = pending.popleft()
                except IndexError:
                    return
                try:
                    task()
                except BaseException as error:  # raised below, in the caller's thread
                    errors.append(error)

        helpers = [start(drain) for _ in range(min(self.threads, len(tasks)) - 1)]
        drain()
        for helper in helpers:
            helper.result()
        for error in errors[1:]:
            kept(error)  # else it lives as long as itself: its traceback has this list
        if errors:
            raise errors[0]


class Lane:
    """Runs jobs one at a time, in order, in its own thread, which ends when there is nothing to do."""

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._lock = threading.Lock()
        self._running = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; its result or error is in the future."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.append((job, future))
            if self._running:
                return future
            self._running = True
        start(self._drain)
        return future

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job, future = self._jobs.popleft()
            try:
                future.set(job())
            except BaseException as error:  # handed to whoever waits
                future.fail(error)
            del job, future


_drains: weakref.WeakSet[Any] = weakref.WeakSet()


def drain_at_exit(owner: Any) -> None:
    """Calls `owner._drain_at_exit()` when the interpreter ends, before `jax.distributed` shuts down.

    Exit handlers run last registered first, so it is registered with the first manager: after jax's own.
    """
    if not _drains:
        atexit.unregister(_drain_all)
        atexit.register(_drain_all)
    _drains.add(owner)


def _drain_all() -> None:
    for owner in list(_drains):
        owner._drain_at_exit()
