"""The only threads of epochckpt.

Guarantees:
- all threads are daemons: a stuck system call can never keep the interpreter from ending; `drain_at_exit` runs first;
- no thread waits for a lock here, nor does the training thread where it shares data with these threads: a signal
  handler may call the code that it interrupted, and may wait for these threads. If the handler raises, as Ctrl-C does,
  the next call finishes what is half done;
- in a forked child, where these threads do not exist, nothing waits for them;
- what runs in them sees the context variables of whoever had it started, such as the span of somebody's tracing.

`concurrent.futures` is not used: it refuses work once the interpreter has begun to shut down, which is exactly when
the last save must be drained.
"""

import atexit
import collections
import contextlib
import contextvars
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from absl import logging

from epochckpt.errors import kept, say

T = TypeVar("T")

HEAR_SIGNALS_SECS = 1.0
"""How long a wait may last before Python looks whether a signal has come."""


class Deadline:
    """A point in time on the monotonic clock.

    `secs` is the time until then from now on, and for people, too, unless there is a `whole_secs` of what began before.
    """

    def __init__(self, secs: float, clock: Callable[[], float] | None = None, *, whole_secs: float | None = None):
        self.secs = secs if whole_secs is None else whole_secs
        self._clock = clock or time.monotonic
        self._end = self._clock() + secs

    def left(self) -> float:
        """Seconds left; negative when it has passed."""
        return self._end - self._clock()

    def passed(self) -> bool:
        return self.left() <= 0


class Future(Generic[T]):
    """A result that arrives once."""

    def __init__(self) -> None:
        self._done = False
        self._waiters: collections.deque[threading.Lock] = collections.deque()
        self._value: T | None = None
        self._error: BaseException | None = None

    def set(self, value: T) -> None:
        self._value = value
        self._arrive()

    def run(self, fn: Callable[[], T]) -> None:
        """Gives the result of a call, or its error, which is raised where the result is asked for."""
        try:
            self.set(fn())
        except BaseException as error:
            trace = error.__traceback__
            self._error = error.with_traceback(trace and trace.tb_next)  # this frame would keep the future and `fn`
            self._arrive()

    def _arrive(self) -> None:
        self._done = True
        while self._waiters:
            with contextlib.suppress(IndexError):  # a waiter has given up
                self._waiters.popleft().release()

    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._done

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits; False if neither result nor error arrived in time."""
        if self._done:
            return True
        gate = threading.Lock()  # each wait has its own, not an Event's: a signal handler may wait inside a wait
        gate.acquire()
        self._waiters.append(gate)
        end = Deadline(math.inf if timeout_secs is None else timeout_secs)
        # It may have arrived before the gate was there to be opened.
        while not self._done and not end.passed():
            # Of a signal that comes just before the lock's own wait begins, Python hears when that wait ends.
            gate.acquire(timeout=min(max(end.left(), 0.0), HEAR_SIGNALS_SECS))
        with contextlib.suppress(ValueError):
            self._waiters.remove(gate)
        return self._done

    def result(self, timeout_secs: float | None = None) -> T:
        """The result; raises the error, or TimeoutError: then what gives the result goes on unobserved."""
        if not self.wait(timeout_secs):
            raise TimeoutError(f"no result within {timeout_secs} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Once:
    """Something that exactly one caller does: the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def taken(self) -> bool:
        """Whether somebody was the first."""
        return self._lock.locked()

    def first(self) -> bool:
        """Whether the caller is the first."""
        return self._lock.acquire(blocking=False)


_Inbox = queue.SimpleQueue[Callable[[], None]]

_idle: collections.deque[_Inbox] = collections.deque()
_spare: collections.deque[_Inbox] = collections.deque()  # threads that wait for the end of the interpreter

_refuses_threads_at_exit = sys.version_info[:2] == (3, 12)
"""Whether Python gives no thread any more once exit handlers run: 3.12 alone."""


def _serve(inbox: _Inbox) -> None:
    while True:
        inbox.get()()
        _idle.append(inbox)


def _run_in_new(inbox: _Inbox) -> None:
    """Starts a thread that runs what comes to its inbox; RuntimeError: Python gives no thread."""
    threading.Thread(target=_serve, args=(inbox,), daemon=True, name="epochckpt").start()


def start(fn: Callable[[], T], *, spare: bool = True) -> Future[T]:
    """Runs `fn` in a daemon thread, reusing an idle one where there is one.

    Where Python gives none, `fn` runs in the calling thread; with `spare`, in one that was kept for the end.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def job() -> None:
        context.run(future.run, fn)

    idle = _pop(_idle)
    if idle is not None:
        idle.put(job)
        return future
    inbox = _Inbox()
    inbox.put(job)  # first: if its start is interrupted, the thread still finds the job
    try:
        _run_in_new(inbox)
    except RuntimeError:  # the interpreter is ending, or the system gives no more threads
        waiting = _pop(_spare) if spare else None
        if waiting is not None:
            waiting.put(job)
        else:
            job()
    return future


def _pop(inboxes: collections.deque[_Inbox]) -> _Inbox | None:
    try:
        return inboxes.pop()
    except IndexError:
        return None


def start_thread(fn: Callable[[], T]) -> Future[T]:
    """Runs `fn`, which may take as long as the process, in a daemon thread of its own; RuntimeError: there is none."""
    future: Future[T] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(future.run, fn), daemon=True, name="epochckpt").start()
    return future


def logged(what: str, fn: Callable[[], T], failed: Callable[[Any], None] = lambda error: None) -> T | None:
    """Runs a call whose failure must not stop the caller: it is logged, `failed` hears of it, and None is returned."""
    try:
        return fn()
    except Exception as error:
        logging.warning("%s: %s", what, say(error))
        failed(kept(error))
        return None


class Pool:
    """A few threads for I/O."""

    def __init__(self, threads: int):
        self.threads = threads

    def run(self, tasks: Sequence[Callable[[], Any]]) -> None:
        """Runs all tasks, in order of start; returns when every one has ended.

        After an error no further task is started, and the first error is raised when the running ones have ended.
        KeyboardInterrupt, or SystemExit, that a signal's handler raises here is raised at once: tasks may take seconds.
        """
        pending = collections.deque(tasks)
        errors: list[BaseException] = []

        def drain() -> BaseException | None:
            while not errors:
                try:
                    task = pending.popleft()
                except IndexError:
                    return None
                try:
                    task()
                except BaseException as error:  # raised below, in the caller's thread
                    errors.append(error)
                    return error
            return None

        # Without a thread the first helper does all tasks here, as this thread would. Spare ones are for what may hang.
        helpers = [start(drain, spare=False) for _ in range(min(self.threads, len(tasks)) - 1)]
        raised = drain()
        if not isinstance(raised, KeyboardInterrupt | SystemExit):
            for helper in helpers:
                helper.result()
            raised = errors[0] if errors else None
        for error in errors:
            if error is not raised:
                kept(error)  # else it is never freed: its traceback refers to this list
        if raised is not None:
            raise raised


class Lane:
    """Runs jobs one at a time, in order, in a thread of its own while there are any; a job's error is in its future.

    `start_other` runs a function in that thread, in place of `start`.
    """

    def __init__(self, start_other: Callable[[Callable[[], None]], object] | None = None):
        self._start = start_other or start
        self._jobs: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._busy = threading.Lock()  # its holder runs the jobs; no thread waits for it
        self._coming: Once | None = None  # taken by the thread that was started last, when it begins
        _lanes.add(self)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.append((job, future))
        self.wake()
        return future

    def wake(self) -> bool:
        """Starts a thread for the queued jobs, also after an interrupted `submit`; returns whether there are any."""
        queued = bool(self._jobs)
        # A thread that has not begun will find the job. An interrupt between the next lines makes one thread too many,
        # which ends at once.
        if queued and not self._busy.locked() and (self._coming is None or self._coming.taken):
            coming = Once()
            self._start(lambda: self._drain(coming))
            self._coming = coming
        return queued

    def _drain(self, coming: Once) -> None:
        coming.first()
        while self._jobs and self._busy.acquire(blocking=False):
            try:
                while self._jobs:
                    job, future = self._jobs.popleft()
                    future.run(job)
                    del job, future
            finally:
                self._busy.release()  # the loop's condition sees a job that was queued just before

    def forget(self) -> None:
        """Drops the jobs in a forked child: they are the parent's."""
        self._jobs.clear()
        self._busy = threading.Lock()
        self._coming = None


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
_drains: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by owner, how many threads it needs


def drain_at_exit(owner: Any, threads: int = 0) -> None:
    """Registers `owner._drain_at_exit()` for the end of the interpreter, before `jax.distributed` shuts down.

    The method begins to drain and returns a function that waits, bounded, for the end; so all owners drain at the same
    time. What may hang meanwhile needs so many `threads`: where Python gives none at its end, they are started now.
    A forked child calls `owner._after_fork()` instead, when it begins.
    """
    if not _drains:  # exit handlers run in reverse order: jax's own is registered by now, and runs after this one
        atexit.unregister(_drain_all)
        atexit.register(_drain_all)
    _drains[owner] = threads
    while _refuses_threads_at_exit and len(_spare) < sum(_drains.values()):
        inbox = _Inbox()
        try:
            _run_in_new(inbox)
        except RuntimeError:
            break
        _spare.append(inbox)


def _drain_all() -> None:
    for wait in [owner._drain_at_exit() for owner in list(_drains)]:
        wait()


def _after_fork() -> None:
    _idle.clear()
    _spare.clear()
    for lane in list(_lanes):
        lane.forget()
    owners = list(_drains)
    _drains.clear()
    for owner in owners:
        owner._after_fork()


os.register_at_fork(after_in_child=_after_fork)
