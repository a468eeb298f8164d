"""The one way in which the processes of a job agree: a collective call.

Every process acts and tells what came of it. The primary decides from what all have told. All processes get its
decision, or the same error. Guarantees:

- every wait is bounded (`Patience`), and the error names the processes that are late;
- an error of one process reaches all of them;
- the number of rounds in which the primary collects grows with the logarithm of the number of processes.

The keys of a call lie below its own: `told/<process>`, and the primary's `decision`. A broadcast is a call in which
only the primary acts. A vote (`restore_vote`) is a call in which every process tells whether it could restore an epoch.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from absl import logging

from epochckpt import _patience, errors
from epochckpt._threads import Deadline
from epochckpt.agreement.coordination import Coordinator, RecentKeys

T = TypeVar("T")

_KEPT_DECISIONS = 128  # decisions and votes that are kept for a process that is behind


def hear_secs(collect_secs: float) -> float:
    """How long other processes wait for the primary, which may come late and then collects for `collect_secs`."""
    return 2 * collect_secs + _patience.now().hear_margin_secs


class Patience(abc.ABC):
    """How long the processes of a collective call wait for each other."""

    @abc.abstractmethod
    def collect(self, coordinator: Coordinator, prefix: str) -> tuple[dict[int, Any], set[int]]:
        """On the primary: what the other processes have put below `prefix`, and the processes that are late."""

    @abc.abstractmethod
    def late(self, coordinator: Coordinator, processes: set[int]) -> errors.CoordinationTimeoutError:
        """The error that names late processes."""

    @abc.abstractmethod
    def hear(self, coordinator: Coordinator, key: str) -> Mapping[str, Any]:
        """On the other processes: what the primary puts under a key, else a CoordinationTimeoutError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts(Patience):
    """A number of seconds for the primary, and another one for the other processes.

    The texts are for errors; in them `{names}` and `{secs:g}` stand for the late processes and for the time.
    """

    collect_secs: float
    hear_secs: float
    late_text: str = "{names} did not answer within {secs:g} s"
    silent_text: str = "the primary, {names}, did not answer within {secs:g} s"

    def collect(self, coordinator: Coordinator, prefix: str) -> tuple[dict[int, Any], set[int]]:
        return coordinator.gather(prefix, set(range(1, coordinator.processes)), Deadline(self.collect_secs))

    def late(self, coordinator: Coordinator, processes: set[int]) -> errors.CoordinationTimeoutError:
        text = self.late_text.format(names=coordinator.named(processes), secs=self.collect_secs)
        error = errors.CoordinationTimeoutError(text)
        error.processes = sorted(processes)
        return error

    def hear(self, coordinator: Coordinator, key: str) -> Mapping[str, Any]:
        try:
            return coordinator.get(key, self.hear_secs)
        except errors.CoordinationTimeoutError:
            text = self.silent_text.format(names=coordinator.named([0]), secs=self.hear_secs)
            raise errors.CoordinationTimeoutError(text) from None


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a collective call has ended on one process."""

    value: T | None = None
    error: Exception | None = None  # of the call, on every process; or why this one has not heard the primary
    own: Exception | None = None  # what this process's own part raised
    serial: int | None = None  # the primary's number of the call; None: this process has not heard the primary

    def result(self) -> T:
        """The decision; raises the error of this process's own part, else that of the call."""
        if self.own is not None:
            raise self.own
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def first(failures: Sequence[Exception]) -> Exception:
    """Of the errors of several processes, in their order, the one that all of them raise."""
    return failures[0]


def collective(
    coordinator: Coordinator,
    key: str,
    act: Callable[[], Any],
    decide: Callable[[list[Any]], T],
    patience: Patience,
    *,
    once: bool = False,
) -> T:
    """Calls `act` on every process. The primary decides from what all have returned, and all return its decision.

    What `act` and `decide` return is JSON. What either raises on one process is raised on all, also Ctrl-C. A process
    whose own `act` fails raises that error. With `once` a process that took part before, and was relaunched since, is
    refused.
    """
    if coordinator.processes == 1:
        return decide([act()])
    return meet(coordinator, key, act, decide, patience, once=once).result()


def broadcast(coordinator: Coordinator, key: str, decide: Callable[[], T], patience: Patience) -> T:
    """The same where only the primary acts: it decides at once, and waits for no other process."""
    if coordinator.processes == 1:
        return decide()
    return meet(coordinator, key, None, lambda _: decide(), patience).result()


def meet(
    coordinator: Coordinator,
    key: str,
    act: Callable[[], Any] | None,
    decide: Callable[[list[Any]], T],
    patience: Patience,
    *,
    serial: int = 0,
    weigh: Callable[[Sequence[Exception]], Exception] = first,
    once: bool = False,
) -> Outcome[T]:
    """The same in a job of several processes, with its errors in the outcome; without `act` nothing is collected.

    With `once` a process that has told before, and was relaunched since, is refused.
    The primary numbers the call with `serial`. Of the errors of several processes `weigh` says which one counts.
    """
    # The other processes tell, and hear the decision, also of a call that they have made fail: so they stay in step.
    # What one has told that gives up is old when the primary comes.
    if not coordinator.primary:
        own = None if act is None else tell(coordinator, key, act, once=once)
        try:
            heard = patience.hear(coordinator, f"{key}/decision")
        except BaseException as silence:  # Ctrl-C, too
            if act is not None:
                coordinator.forget(_told(coordinator, key))
            if not isinstance(silence, errors.CoordinationError):
                raise
            return Outcome(error=silence, own=own)
        error = errors.from_wire(heard["error"]) if "error" in heard else None
        return Outcome(heard.get("value"), error=error, own=own, serial=heard["serial"])

    # The primary acts, collects and decides. Every error on the way is published to the other processes.
    try:
        told: list[Any] = []
        if act is not None:
            mine = act()
            told = [mine, *collect(coordinator, key, patience, weigh)]
        value = decide(told)
    except BaseException as error:
        fail(coordinator, key, error, serial)
        if not isinstance(error, Exception):
            raise
        return Outcome(error=error, serial=serial)
    coordinator.put(f"{key}/decision", {"value": value, "serial": serial})
    return Outcome(value, serial=serial)


def collect(
    coordinator: Coordinator,
    key: str,
    patience: Patience,
    weigh: Callable[[Sequence[Exception]], Exception] = first,
) -> list[Any]:
    """On the primary: what the other processes have told, in their order; raises the error of one, or who is late."""
    told, late = patience.collect(coordinator, f"{key}/told")
    failures: list[Exception] = []
    for process, one in sorted(told.items()):
        if "error" in one:
            logging.error("%s: %s", coordinator.named([process]), one["error"].get("message"))
            failures.append(errors.from_wire(one["error"]))
    if failures:
        raise weigh(failures)
    if late:
        raise patience.late(coordinator, late)
    return [told[process]["value"] for process in range(1, coordinator.processes)]


def tell(coordinator: Coordinator, key: str, act: Callable[[], Any], *, once: bool = False) -> Exception | None:
    """On another process than the primary: tells what `act` returns, or its error, which is returned here, too."""
    me = coordinator.named([coordinator.process])
    try:
        value = act()
    except BaseException as error:
        fail(coordinator, key, error)
        if not isinstance(error, Exception):
            raise
        logging.error("%s fails, and with it a call of all processes: %s", me, errors.say(error))
        return error
    try:
        coordinator.put(_told(coordinator, key), {"value": value}, again=not once)
    except errors.CoordinationError as problem:
        raise errors.CoordinationError(
            f"{me} could not take part in a call of all processes ({problem}). A process that was relaunched into a "
            "running job cannot join: restart the whole job"
        ) from problem
    return None


def fail(coordinator: Coordinator, key: str, error: BaseException, serial: int = 0) -> None:
    """Makes a call fail on all processes, in place of this process's part in it."""
    place = f"{key}/decision" if coordinator.primary else _told(coordinator, key)
    try:
        coordinator.put(place, {"error": errors.to_wire(error), "serial": serial}, again=True)
    except errors.CoordinationError as problem:
        logging.warning("the other processes do not learn of an error: %s", problem)


def _told(coordinator: Coordinator, key: str) -> str:
    return f"{key}/told/{coordinator.process}"


class CollectiveCalls:
    """The collective calls of one manager, which its users make by name, such as `reload()`.

    The key of a call is `call/<save>/<name>/<count>`: the last save (`after`), the call's name, and how often the call
    was made since that save. So a process that makes a call alone is out of step for that call only, and the next save
    starts all counts anew:

    - another process than the primary waits in vain, raises, and does not count the call;
    - the primary decides a broadcast at once. When another process makes this call next, it takes the decision, unless
      it has received a later one. For this the primary numbers all its calls, and all processes call in one order;
    - where the primary did not wait any longer for a process, that process passes over the call.
    """

    def __init__(self, coordinator: Coordinator, prefix: str, after: Callable[[], str]):
        self._coordinator = coordinator
        self._prefix = prefix
        self._after = after
        self._save = ""
        self._counts = collections.Counter[str]()
        self._serial = 0  # of the last call that the primary has made, or that this process has received
        self._votes = 0
        self._voting = ""
        self._kept = RecentKeys(_KEPT_DECISIONS)

    def collective(self, name: str, act: Callable[[], Any], decide: Callable[[list[Any]], T], timeout_secs: float) -> T:
        """Every process acts, and all get what the primary decides: see `collective`.

        The other processes wait for `timeout_secs`, the primary for half of that.
        """
        if self._coordinator.processes == 1:
            return decide([act()])
        return self._make(name, act, decide, timeout_secs)[1].result()

    def broadcast(self, name: str, decide: Callable[[], T], timeout_secs: float) -> T:
        """The primary decides, and all get its decision: see `broadcast`."""
        if self._coordinator.processes == 1:
            return decide()
        return self._make(name, None, lambda _: decide(), timeout_secs)[1].result()

    @contextlib.contextmanager
    def vote(self, name: str, candidates: Sequence[int], timeout_secs: float) -> Generator[tuple[Sequence[int], str]]:
        """A vote on epochs, see `restore_vote`: gives the primary's candidates, and the prefix of this vote's keys.

        A vote that ends because a process did not come does not count as a call.
        """
        if self._coordinator.processes == 1:
            yield candidates, ""
            return

        def announce() -> dict[str, Any]:
            self._votes += 1
            number = str(self._votes)
            self._kept.add(self._coordinator, self._vote_key(number))
            return {"candidates": list(candidates), "vote": number}

        base, outcome = self._make(name, None, lambda _: announce(), timeout_secs)
        announced = outcome.result()
        self._voting = announced["vote"]
        try:
            yield announced["candidates"], self._vote_key(self._voting)
        except errors.CoordinationTimeoutError:
            self._counts[base] -= 1
            if self._coordinator.primary:
                self._coordinator.forget(self._key(base))  # a process that comes now waits for the next vote
            raise
        finally:
            self._voting = ""

    def _vote_key(self, number: str) -> str:
        return f"{self._prefix}/vote/{number}"

    def _make(
        self,
        name: str,
        act: Callable[[], Any] | None,
        decide: Callable[[list[Any]], T],
        timeout_secs: float,
    ) -> tuple[str, Outcome[T]]:
        """Makes a call and counts it; returns the name that it is counted under, and how it has ended."""
        patience = Timeouts(
            collect_secs=timeout_secs / 2,
            hear_secs=timeout_secs,
            silent_text=f"the primary, {{names}}, did not answer {name} within {{secs:g}} s: it did not make this "
            "call, or does not answer at all. In a job of several processes all make it. Nothing has changed here; "
            "status(epoch) looks at storage from this process alone",
        )
        while True:
            base = self._base(name)
            key = self._key(base)
            if self._coordinator.primary:
                self._kept.add(self._coordinator, key)
                self._serial += 1
                self._counts[base] += 1  # first: the other processes count a call that Ctrl-C ends here, too
                return base, meet(self._coordinator, key, act, decide, patience, serial=self._serial)
            outcome = meet(self._coordinator, key, act, decide, patience)
            if outcome.serial is None:
                return base, outcome
            self._counts[base] += 1
            # The primary may have made this call without this process. Then this process has received a later decision
            # by now, or the primary stopped waiting for this process.
            is_new = outcome.serial > self._serial
            self._serial = max(self._serial, outcome.serial)
            if is_new and not self._was_late(outcome.error):
                return base, outcome

    def _was_late(self, error: Exception | None) -> bool:
        return isinstance(error, errors.CoordinationTimeoutError) and self._coordinator.process in error.processes

    def _base(self, name: str) -> str:
        """The name that a call is counted under."""
        if self._save != self._after():
            self._save = self._after()
            self._counts.clear()
        return f"{self._save or 'start'}/{name}{self._voting and f'-in-vote-{self._voting}'}"

    def _key(self, base: str) -> str:
        return f"{self._prefix}/call/{base}/{self._counts[base]}"
