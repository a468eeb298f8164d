"""The collective calls of a running job: at the end of every epoch, and a few times before and after the epochs.

- The silence of a process is bounded, not the length of its epoch. A process that works on its part of a call gives
  signs of life. The other processes wait as long as it does; after the timeout without one they raise, and name its
  node.
- An error of one process is raised on all of them.
- Every process gets the same answer: the primary's, which knows what all processes have told.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from absl import logging

from epochckpt import _patience, _threads
from epochckpt._threads import Deadline
from epochckpt.agreement import Coordinator
from epochckpt.agreement.collective import Patience, broadcast, collective, fail
from epochckpt.errors import CoordinationError, CoordinationTimeoutError

T = TypeVar("T")
K = TypeVar("K")

_runs = itertools.count()  # runs begin in the same order on every process
_SIGNS = 4  # of life, that a process gives in the time for which it may be silent
ALIVE = "alive"  # in place of a phase: the signs of life of a run


@dataclasses.dataclass(frozen=True)
class Part(Generic[K]):
    """What a process has done in a call of all processes."""

    kept: K  # of this process alone
    told: Any  # JSON, for the primary's decision


@dataclasses.dataclass(frozen=True)
class Met(Generic[K, T]):
    """What a process has of a call of all processes."""

    kept: K  # of its own part
    decision: T  # the same on all


class RunCalls:
    """The collective calls of one run of a job. Every process makes the same calls in the same order.

    The keys number the phases of the run: each `collective` ends one, and every broadcast belongs to the phase in which
    it is made. So a process that fails knows the keys that the other processes read next. A run that makes no call,
    such as a load by one process alone, has no number: the next run of all processes has the same one on all of them.

    Args:
        coordinator: of the processes of the job.
        nodes: the name of each process's node.
        timeout_secs: for how long the other processes wait for one that gives no sign of life.
        option: where a user gives that number; for errors.
        signs: whether a process gives signs of life; if not, the timeout bounds how long its part may take, too.
        runs: the numbers of the runs of this process, from which the run takes its own.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        nodes: Sequence[str],
        timeout_secs: float,
        *,
        option: str,
        signs: bool = True,
        runs: Iterator[int] = _runs,
    ):
        self._coordinator = coordinator
        self._nodes = tuple(nodes)
        self._timeout = timeout_secs
        self._option = option
        self._signs = signs
        self._runs = runs
        self._run: int | None = None
        self._given = itertools.count()  # signs of life
        self._phase = 0
        self._broadcasts = 0

    @property
    def primary(self) -> bool:
        """Whether this process decides."""
        return self._coordinator.primary

    def broadcast(self, what: str, decide: Callable[[], T]) -> T:
        """The primary decides, and all processes get its answer (JSON). The primary does not wait for them."""
        if self._coordinator.processes == 1:
            return decide()
        key = self._broadcast_key()
        self._broadcasts += 1
        return broadcast(self._coordinator, key, decide, self._patience(what))

    def together(self, what: str, fn: Callable[[], T]) -> T:
        """Calls `fn` on every process, and returns this process's result; an error on one process is raised on all."""
        return self.meet(what, lambda: Part(kept=fn(), told=None), lambda _: None).kept

    def gather(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Every process acts. The primary gets what all have returned (JSON), by process; the others get nothing."""
        gathered: list[Any] = []
        self.collective(what, act, gathered.extend)
        return gathered

    def collective(self, what: str, act: Callable[[], Any], decide: Callable[[list[Any]], T]) -> T:
        """Every process acts, the primary decides from what all have returned, and all processes get its answer.

        `act` returns JSON, and may make calls of all processes itself; `decide` gets what it returned, by process, and
        returns JSON. What either raises on one process is raised on all.
        """
        return self.meet(what, lambda: Part(kept=None, told=act()), decide).decision

    def meet(self, what: str, act: Callable[[], Part[K]], decide: Callable[[list[Any]], T]) -> Met[K, T]:
        """Makes the same call as `collective`. Each process also gets back the part of its own work that it keeps."""
        coordinator = self._coordinator
        if coordinator.processes == 1:
            mine = act()
            return Met(kept=mine.kept, decision=decide([mine.told]))
        with contextlib.ExitStack() as alive:
            alive.enter_context(self._alive())
            try:
                mine = act()
                phase = self._phase  # a later one than before, if it has made calls
            except BaseException as error:  # Ctrl-C and sys.exit, too
                self._abort(what, error)
                raise
            finally:  # in step with the other processes, should they go on after an error
                self._phase += 1
                self._broadcasts = 0
            if not coordinator.primary:  # the others wait for the primary until it has answered
                alive.close()

            def decided(told: list[Any]) -> T:
                coordinator.forget(self._key(phase - 1))  # all processes are here: none reads it any more
                return decide(told)

            key = self._key(phase)
            decision = collective(coordinator, key, lambda: mine.told, decided, self._patience(what, f"{key}/told"))
            return Met(kept=mine.kept, decision=decision)

    def _key(self, phase: int | str) -> str:
        """What the keys of a phase begin with."""
        if self._run is None:
            self._run = next(self._runs) if self._coordinator.processes > 1 else 0
        return f"epochckpt/run/{self._run}/{phase}"

    def _broadcast_key(self) -> str:
        return f"{self._key(self._phase)}/broadcast/{self._broadcasts}"

    def _patience(self, what: str, told: str = "") -> "_WhileAlive":
        return _WhileAlive(what, self._nodes, self._timeout, self._option, alive=self._key(ALIVE), told=told)

    @contextlib.contextmanager
    def _alive(self) -> Generator[None]:
        """This process gives signs of life as long as the context lasts."""
        over = threading.Event()
        key = f"{self._key(ALIVE)}/{self._coordinator.process}"

        def give() -> None:
            for number in self._given:
                if over.wait(self._timeout / _SIGNS):
                    return
                with contextlib.suppress(CoordinationError):  # the call itself fails soon
                    self._coordinator.put(key, number, again=True)

        if self._signs:
            _threads.start(give)
        try:
            yield
        finally:
            over.set()

    def _abort(self, what: str, error: BaseException) -> None:
        """Makes the other processes raise an error of this one at their next call.

        It is logged before: if the process with JAX's service has died this waits, and JAX may end this process, too.
        """
        logging.error("%s: this node, %s, fails", what, self._nodes[self._coordinator.process], exc_info=error)
        fail(self._coordinator, self._key(self._phase), error)
        if self.primary:  # the other processes may be waiting for a broadcast
            fail(self._coordinator, self._broadcast_key(), error)


class _WhileAlive(Patience):
    """A process is waited for as long as it gives signs of life below `alive`, which count up.

    `told` is the prefix of what the processes tell in this call; empty if they tell nothing.
    """

    def __init__(self, what: str, nodes: Sequence[str], timeout_secs: float, option: str, *, alive: str, told: str):
        self._what = what
        self._nodes = nodes
        self._timeout = timeout_secs
        self._option = option
        self._alive = alive
        self._told = told

    def collect(self, coordinator: Coordinator, prefix: str) -> tuple[dict[int, Any], set[int]]:
        answers: dict[int, Any] = {}
        missing = set(range(1, coordinator.processes))
        signs: dict[str, Any] = {}
        while True:
            arrived, missing = coordinator.gather(prefix, missing, Deadline(self._timeout))
            answers |= arrived
            before = signs
            signs = dict(coordinator.get_all(self._alive)) if missing else {}
            silent = {process for process in missing if signs.get(str(process)) == before.get(str(process))}
            if not missing or silent or any("error" in one for one in arrived.values()):
                return answers, silent

    def late(self, coordinator: Coordinator, processes: set[int]) -> CoordinationTimeoutError:
        names = ", ".join(self._nodes[process] for process in sorted(processes))
        return CoordinationTimeoutError(
            f"{self._what}: no word from {names} within {self._timeout:g} s ({self._option}), and no sign of life; the "
            "other nodes stop. Committed epochs are untouched: start the job again to go on"
        )

    def hear(self, coordinator: Coordinator, key: str) -> Mapping[str, Any]:
        sign = None
        while True:
            try:
                return coordinator.get(key, self._timeout + _patience.now().run_call_margin_secs)
            except CoordinationTimeoutError as error:
                before = sign
                silent = {0}
                with contextlib.suppress(CoordinationError):  # JAX's service, in the primary's process, is silent, too
                    sign = coordinator.get_all(self._alive).get("0")
                    silent |= self._missing(coordinator)
                if sign == before:
                    raise self.late(coordinator, silent) from error

    def _missing(self, coordinator: Coordinator) -> set[int]:
        """The other processes that have told nothing yet."""
        if not self._told:
            return set()
        return set(range(1, coordinator.processes)) - {int(process) for process in coordinator.get_all(self._told)}
