"""The common calls of a manager's processes: the primary does something, the others take its answer.

Which answer belongs to which call is told by what is called with what, after which save, and how often it was called
there before. So a process that makes such a call alone is not out of step with the others for ever:

- on another process than the primary it waits in vain, raises, and does not count;
- on the primary it is answered at once. Another process that makes this call next takes that answer, unless it has
  heard of something later by then: the primary numbers all that it says, and calls are made in one order everywhere;
- after the next common save everything is counted anew.

Keys: `call/<save>/<call>/<number>` an answer, `vote/<number>/…` see `choosing`. The primary forgets all but the last.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

from epochckpt.commit.coordination import Coordinator
from epochckpt.errors import CoordinationTimeoutError, from_wire, to_wire

_REMEMBERED = 128  # answers and votes that are kept for a process that is behind
_opens: collections.deque[tuple[Coordinator, str]] = collections.deque()


class Calls:
    """The common calls of one manager.

    Args:
        coordinator: the other processes.
        prefix: of its keys.
        after: names the last save that was submitted; the same on every process.
    """

    def __init__(self, coordinator: Coordinator, prefix: str, after: Callable[[], str]):
        self._coordinator, self._prefix, self._after = coordinator, prefix, after
        self._place, self._counts = "", collections.Counter[str]()
        self._serial = 0  # of what the primary said last, or of what this process has heard of it last
        self._votes, self._voting = 0, ""
        self._spoken: collections.deque[tuple[Coordinator, str]] = collections.deque()

    def answer(self, call: str, decide: Callable[[], Any], timeout_secs: float) -> Any:
        """What `decide` returns on the primary (JSON), on every process that makes this call.

        Args:
            call: what is called with what: `reload()`.
            decide: called on the primary.
            timeout_secs: how long the others wait.

        Raises:
            whatever `decide` raised, on every process.
            CoordinationTimeoutError: the primary's answer did not come in time.
        """
        if self._coordinator.processes == 1:
            return decide()
        if not self._coordinator.primary:
            base, said = self._hear(call, timeout_secs)
            self._counts[base] += 1
            if "error" in said:
                raise from_wire(said["error"])
            return said["value"]
        base, key = self._next(call)
        try:
            value = decide()
        except BaseException as error:  # Ctrl-C, too
            self._say(base, key, {"error": to_wire(error)})
            raise
        self._say(base, key, {"value": value})
        return value

    @contextlib.contextmanager
    def vote(self, candidates: Sequence[int], timeout_secs: float) -> Generator[tuple[list[int], str]]:
        """A vote on epochs, see `choosing`: gives the primary's candidates, and where the keys of this vote live.

        Where it ends because a process did not come, it is as if it had not been called.
        """
        if self._coordinator.processes == 1:
            yield list(candidates), ""
            return
        call = "restore(None)"
        if self._coordinator.primary:
            self._votes += 1
            base, key = self._next(call)
            said = {"candidates": list(candidates), "vote": f"{self._prefix}/vote/{self._votes}"}
            self._say(base, key, said)
            self._forget_after(said["vote"])
        else:
            base, said = self._hear(call, timeout_secs)
            self._counts[base] += 1
        self._voting = said["vote"].rpartition("/")[2]
        try:
            yield said["candidates"], said["vote"]
        except CoordinationTimeoutError:
            self._counts[base] -= 1
            if self._coordinator.primary:
                self._coordinator.forget(key)  # who comes now waits for the next vote
            raise
        finally:
            self._voting = ""

    def _next(self, call: str) -> tuple[str, str]:
        """Under what a call is counted, and the key of its answer."""
        if self._place != self._after():
            self._place = self._after()
            self._counts.clear()
        base = f"{self._place or 'start'}/{call}{self._voting and f'-in-vote-{self._voting}'}"
        return base, f"{self._prefix}/call/{base}/{self._counts[base]}"

    def _say(self, base: str, key: str, what: dict[str, Any]) -> None:
        """On the primary: answers a call."""
        self._serial += 1
        self._counts[base] += 1
        self._forget_after(key)
        self._coordinator.put(key, {**what, "serial": self._serial})

    def _hear(self, call: str, timeout_secs: float) -> tuple[str, Any]:
        """On the others: under what a call is counted, and its answer."""
        while True:
            base, key = self._next(call)
            try:
                said = self._coordinator.get(key, timeout_secs)
            except CoordinationTimeoutError:
                raise CoordinationTimeoutError(
                    f"the primary, {self._coordinator.named([0])}, did not answer {call} within {timeout_secs:g} s: it "
                    "did not make this call, or does not answer at all. In a job of several processes all make it. "
                    "Nothing has changed here; status(epoch) looks at storage from this process alone"
                ) from None
            if said["serial"] > self._serial:
                self._serial = said["serial"]
                return base, said
            self._counts[base] += 1  # the primary called alone, before something that this process has heard of

    def _forget_after(self, key: str) -> None:
        if self._coordinator.primary:
            _forget_old(self._spoken, self._coordinator, key, _REMEMBERED)


def forget_opening(coordinator: Coordinator, *keys: str) -> None:
    """On the primary: forgets the keys of an opening, or of a manager that is closed, when some more have come."""
    if coordinator.primary and coordinator.processes > 1:
        for key in keys:
            _forget_old(_opens, coordinator, key, _REMEMBERED // 4)


def _forget_old(
    kept: collections.deque[tuple[Coordinator, str]], coordinator: Coordinator, key: str, count: int
) -> None:
    kept.append((coordinator, key))
    while len(kept) > count:
        of, old = kept.popleft()
        of.forget(old)
