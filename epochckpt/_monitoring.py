"""Events for the listeners of `jax.monitoring`; docs/monitoring.md lists them.

Guarantees:
- a listener runs in a thread of its own, never on the training thread nor in a signal handler, as long as the system
  gives threads: recording queues an event, in order, and waits for nothing;
- what a listener raises is logged once per event, and harms nothing;
- a listener that hangs holds up events alone. The newest `_KEPT` of them wait for it.
"""

import collections
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from absl import logging

from epochckpt import _patience, _threads
from epochckpt._lazy import jax
from epochckpt.errors import say

P = ParamSpec("P")
T = TypeVar("T")

_KEPT = 100_000

_queue: collections.deque[tuple[Callable[..., None], str, tuple[Any, ...], dict[str, Any]]] = collections.deque(
    maxlen=_KEPT
)
_lane = _threads.Lane()
_failed: set[str] = set()  # events whose listeners have failed, and that was logged
_hangs: _threads.Future[None] | None = None  # a delivery that was given up


def event(name: str, **tags: str | int) -> None:
    """Something has happened."""
    _record(jax.monitoring.record_event, (name,), (), tags)


def secs(value: float, *names: str, **tags: str | int) -> None:
    """Something took so many seconds, under all of these names."""
    _record(jax.monitoring.record_event_duration_secs, names, (value,), tags)


def number(value: float, *names: str, **tags: str | int) -> None:
    """A figure, under all of these names."""
    _record(jax.monitoring.record_scalar, names, (value,), tags)


def numbers(figures: Sequence[tuple[str, float]]) -> None:
    """Many figures, by name: a list that does not change."""
    _record(_call_each, ("",), (figures,), {})


def timed(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function whose calls are timed, unless they raise."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.monotonic()
            value = fn(*args, **kwargs)
            secs(time.monotonic() - began, *names)
            return value

        return call

    return decorate


def failing(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function whose errors are events, with their class as `kind`."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                event(name, kind=type(error).__name__)
                raise

        return call

    return decorate


def deliver() -> None:
    """Waits, for at most a second, until the listeners have been called for everything recorded so far."""
    global _hangs
    if _hangs is not None and not _hangs.done():
        return
    done = _lane.submit(_call_listeners)
    _hangs = None if done.wait(_patience.now().delivery_secs) else done


def _record(
    record: Callable[..., None], names: tuple[str, ...], values: tuple[Any, ...], tags: dict[str, str | int]
) -> None:
    for name in names:
        _queue.append((record, name, values, tags))
    if not _lane.wake():
        _lane.submit(_call_listeners)


def _call_listeners() -> None:
    while _queue:
        _call(*_queue.popleft())


def _call_each(_: str, figures: Sequence[tuple[str, float]]) -> None:
    for name, value in figures:
        _call(jax.monitoring.record_scalar, name, (value,), {})


def _call(record: Callable[..., None], name: str, values: tuple[Any, ...], tags: dict[str, str | int]) -> None:
    try:
        record(name, *values, **tags)
    except BaseException as error:  # a listener must not end the thread, either: others wait in the queue
        if name not in _failed:
            _failed.add(name)
            logging.warning("a listener of jax.monitoring failed, at the event %s: %s", name, say(error))


os.register_at_fork(after_in_child=_queue.clear)
