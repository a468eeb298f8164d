"""Processes that are behind are waited for longer.

Processes that do not compute in step stay as far apart as a pause of one of them has put them. A bound on the wait that
is shorter than that would fail every later save. So the wait for a process that has answered late is longer by how late
that was. A silent process is not waited for longer: nothing is known of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from epochckpt.commit.attempt import Attempt

_MISSED = 16  # attempts that are looked at again, per process: the oldest, which come first, and the newest


class Lags:
    """How late other processes have answered last.

    Args:
        prompt_secs: from the start of a save; an answer within that is not late.
        answered: whether a process has answered an attempt by now.
    """

    def __init__(self, prompt_secs: float, answered: Callable[[Attempt, int], bool]):
        self._prompt_secs, self._answered = prompt_secs, answered
        self._lock = threading.Lock()
        self._secs: dict[int, float] = {}
        self._missed: dict[int, list[Attempt]] = {}

    def prompt(self, processes: Iterable[int]) -> None:
        """They had answered before anything waited for them."""
        with self._lock:
            for process in processes:
                self._missed.pop(process, None)
                self._secs.pop(process, None)

    def heard(self, attempt: Attempt, processes: Iterable[int]) -> None:
        """They have answered now."""
        with self._lock:
            for process in processes:
                self._missed.pop(process, None)
                self._note(attempt, process)

    def missed(self, attempt: Attempt, processes: Iterable[int]) -> None:
        """They have not answered, and this attempt waits for them no more."""
        with self._lock:
            for process in processes:
                self._secs.pop(process, None)
                missed = self._missed.setdefault(process, [])
                missed[_MISSED - 1 :] = [attempt]

    def look(self) -> None:
        """Looks whether processes that were missed have answered after all."""
        with self._lock:
            for process, missed in self._missed.items():
                for count in range(len(missed), 0, -1):
                    if self._answered(missed[count - 1], process):
                        self._note(missed[count - 1], process)
                        del missed[:count]
                        break

    def secs(self, processes: Iterable[int]) -> float:
        """By how much all of these are behind, at least."""
        with self._lock:
            return min((self._secs.get(process, 0.0) for process in processes), default=0.0)

    def most(self) -> float:
        """By how much the live process that is furthest behind is behind."""
        with self._lock:
            return max(self._secs.values(), default=0.0)

    def _note(self, attempt: Attempt, process: int) -> None:
        self._secs.pop(process, None)
        if attempt.elapsed_secs > self._prompt_secs:
            self._secs[process] = attempt.elapsed_secs
