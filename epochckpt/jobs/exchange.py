"""How the processes of a running job agree: at the end of every epoch, and a few times before and after the epochs.

- The silence of a process is bounded, not the length of its epoch. A process that works on its report gives signs of
  life. The other processes wait as long as it does; after the timeout without one they raise, and name its node.
- An error of one process is raised on all of them.
- Every process gets the same answer: the primary's, which knows what all processes have reported.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.agreement import Coordinator
from epochckpt.errors import CoordinationError, CoordinationTimeoutError, from_wire, to_wire

T = TypeVar("T")

_runs = itertools.count()  # runs begin in the same order on every process
_SIGNS = 4  # of life, that a process gives in the time for which it may be silent
ALIVE = "alive"  # in place of a phase: the signs of life of a run
_MARGIN_SECS = 5.0  # the other processes wait this much longer than the primary, which names the late ones


class Exchange:
    """The exchanges of one run of a job. Every process makes the same calls in the same order.

    The keys of `gather` number the phases of the run, and every broadcast belongs to the phase in which it is made: so
    a process that fails knows the keys that the other processes read next. A run that makes no exchange, such as a load
    by one process alone, has no number: the next run of all processes has the same number on all of them.

    Args:
        coordinator: of the processes of the job.
        nodes: the name of each process's node.
        timeout_secs: for how long the other processes wait for one that gives no sign of life.
        option: where a user gives that number; for errors.
        signs: whether a process gives signs of life; if not, the timeout bounds how long a report may take, too.
    """

    def __init__(
        self, coordinator: Coordinator, nodes: Sequence[str], timeout_secs: float, *, option: str, signs: bool = True
    ):
        self._coordinator, self._nodes, self._timeout = coordinator, tuple(nodes), timeout_secs
        self._option, self._signs = option, signs
        self._run: int | None = None
        self._given = itertools.count()  # signs of life
        self._phase = self._broadcasts = 0

    @property
    def primary(self) -> bool:
        """Whether this process decides."""
        return self._coordinator.primary

    def broadcast(self, what: str, decide: Callable[[], T]) -> T:
        """The primary decides, and all processes get its answer (JSON). The primary does not wait for them."""
        if self._coordinator.processes == 1:
            return decide()
        phase, number = self._key(self._phase), self._broadcasts
        self._broadcasts += 1
        if self.primary:
            return self._coordinator.agree(f"{phase}/broadcast/{number}", decide, self._timeout)
        return self._answer(what, phase, f"broadcast/{number}", lambda: [0])

    def together(self, what: str, fn: Callable[[], T]) -> T:
        """Calls `fn` on every process, and returns what it returned on this one; an error of one is raised on all."""
        returned: list[T] = []
        self.gather(what, lambda: returned.append(fn()), lambda _: None)
        return returned[0]

    def gather(self, what: str, report: Callable[[], Any], decide: Callable[[list[Any]], T]) -> T:
        """Every process reports, the primary decides from all reports, and all processes get its answer.

        `report` returns JSON, and may make exchanges itself; `decide` gets the reports by process and returns JSON.
        What either raises on one process is raised on all.
        """
        coordinator = self._coordinator
        if coordinator.processes == 1:
            return decide([report()])

        def own() -> tuple[str, Any]:
            try:
                mine = report()
                return self._key(self._phase), mine  # a later phase than before, if it has made exchanges
            except BaseException as error:  # Ctrl-C and sys.exit, too
                self._abort(what, error)
                raise
            finally:  # in step with the other processes, should they go on after an error
                self._phase, self._broadcasts = self._phase + 1, 0

        def conclude(key: str, mine: Any) -> T:
            others = set(range(1, coordinator.processes))
            found, silent = self._reports(key, others)
            errors = [from_wire(found[p]["error"]) for p in sorted(found) if "error" in found[p]]
            if errors:
                raise errors[0]
            if silent:
                raise self._late(what, sorted(silent))
            coordinator.forget(self._key(self._phase - 2))  # all processes are here: none reads it any more
            return decide([mine, *(found[p]["value"] for p in sorted(others))])

        def missing(key: str) -> list[int]:
            arrived = {int(p) for p in coordinator.get_all(f"{key}/node")}
            return [p for p in range(coordinator.processes) if p not in arrived] or [0]

        if self.primary:
            with self._alive():  # until it has answered: the other processes wait for it
                key, mine = own()
                return coordinator.agree(f"{key}/answer", lambda: conclude(key, mine), self._timeout)
        with self._alive():
            key, mine = own()
        coordinator.put(f"{key}/node/{coordinator.process}", {"value": mine})
        return self._answer(what, key, "answer", lambda: missing(key))

    def _key(self, phase: int | str) -> str:
        """What the keys of a phase begin with."""
        if self._run is None:
            self._run = next(_runs) if self._coordinator.processes > 1 else 0
        return f"epochckpt/run/{self._run}/{phase}"

    @contextlib.contextmanager
    def _alive(self) -> Generator[None]:
        """This process gives signs of life as long as the context lasts."""
        over, key = threading.Event(), f"{self._key(ALIVE)}/{self._coordinator.process}"

        def give() -> None:
            for number in self._given:
                if over.wait(self._timeout / _SIGNS):
                    return
                with contextlib.suppress(CoordinationError):  # the exchange itself fails soon
                    self._coordinator.put(key, number, again=True)

        if self._signs:
            _threads.start(give)
        try:
            yield
        finally:
            over.set()

    def _reports(self, phase: str, processes: set[int]) -> tuple[dict[int, Any], set[int]]:
        """On the primary: what these processes report, or an error of one, and those that have become silent."""
        found: dict[int, Any] = {}
        missing, signs = processes, dict[str, Any]()
        while True:
            arrived, missing = self._coordinator.gather(f"{phase}/node", missing, Deadline(self._timeout))
            found |= arrived
            before, signs = signs, dict(self._coordinator.get_all(self._key(ALIVE))) if missing else {}
            silent = {p for p in missing if signs.get(str(p)) == before.get(str(p))}
            if not missing or silent or any("error" in report for report in arrived.values()):
                return found, silent

    def _answer(self, what: str, phase: str, key: str, missing: Callable[[], list[int]]) -> Any:
        """The primary's answer on another process."""
        sign = None
        while True:
            try:
                answer = self._coordinator.get(f"{phase}/{key}", self._timeout + _MARGIN_SECS)
                break
            except CoordinationTimeoutError as error:
                before, silent = sign, [0]
                with contextlib.suppress(CoordinationError):  # JAX's service, in the primary's process, is silent, too
                    sign, silent = self._coordinator.get_all(self._key(ALIVE)).get("0"), missing()
                if sign == before:
                    raise self._late(what, silent) from error
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["value"]

    def _abort(self, what: str, error: BaseException) -> None:
        """Makes the other processes raise an error of this one at their next exchange.

        It is logged before: if the process with JAX's service has died this waits, and JAX may end this process, too.
        """
        logging.error("%s: this node, %s, fails", what, self._nodes[self._coordinator.process], exc_info=error)
        key = self._key(self._phase)
        keys = [f"{key}/node/{self._coordinator.process}"]
        if self.primary:  # the other processes may be waiting for its answer, or for a broadcast
            keys = [f"{key}/answer", f"{key}/broadcast/{self._broadcasts}"]
        try:
            for one in keys:
                self._coordinator.put(one, {"error": to_wire(error)})
        except CoordinationError as problem:
            logging.warning("the other processes do not learn of an error: %s", problem)

    def _late(self, what: str, processes: Sequence[int]) -> CoordinationTimeoutError:
        names = ", ".join(self._nodes[p] for p in processes)
        return CoordinationTimeoutError(
            f"{what}: no word from {names} within {self._timeout:g} s ({self._option}), and no sign of life; the other "
            "nodes stop. Committed epochs are untouched: start the job again to go on"
        )
