"""Reads that are late are asked for a second time."""

from __future__ import annotations

import functools
import math
import queue
from collections.abc import Callable
from typing import TypeVar

from epochckpt import _threads

T = TypeVar("T")


def first_answer(
    first: Callable[[], T], second: Callable[[], T], late_secs: float, may_repeat: Callable[[int], bool]
) -> T:
    """The result of `first`, or if that is late, of whichever of the two is first to return one.

    The other one is not awaited: its result, or its error, goes nowhere. So both must be free of effects that a caller
    could see later. Both run in threads of their own, unless nothing can be late.

    Args:
        first: a read.
        second: the same read once more.
        late_secs: after so many seconds the first one is late; infinite: never.
        may_repeat: whether the second one may be called. It is asked when the first one is late, and again after twice
            as long, four times as long, and so on; its argument says how often it is asked for this read.

    Raises:
        Exception: what `first` raises, if `second` fails as well, or is not called.
    """
    if late_secs == math.inf:
        return first()
    ended: queue.SimpleQueue[_threads.Future[T]] = queue.SimpleQueue()
    early = _ask(first, ended)
    waited = 0.0
    pause = late_secs
    looks = 0
    while not early.wait(pause):
        looks += 1
        if may_repeat(looks):
            break
        waited += pause
        pause = waited  # it may be allowed when other reads have been fast
    else:
        return early.result()
    _ask(second, ended)
    try:
        return ended.get().result()
    except Exception:
        other = ended.get()
    try:
        return other.result()
    except Exception:
        return early.result()


def _ask(call: Callable[[], T], ended: queue.SimpleQueue[_threads.Future[T]]) -> _threads.Future[T]:
    """Calls in another thread; the answer is also put into the queue when it is there."""
    answer = _threads.Future[T]()
    _threads.start(functools.partial(_run, answer, call, ended))
    return answer


def _run(answer: _threads.Future[T], call: Callable[[], T], ended: queue.SimpleQueue[_threads.Future[T]]) -> None:
    answer.run(call)
    ended.put(answer)
