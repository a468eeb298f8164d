"""How the processes of a running job agree: at the end of every epoch, and a few times before and after the epochs.

- Every exchange is bounded: when a process does not arrive, all others raise within the timeout, and name its node.
- An error of one process is raised on all of them.
- Every process gets the same answer: the primary's, which knows what all processes have reported.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt._threads import Deadline
from epochckpt.commit import Coordinator
from epochckpt.errors import CoordinationError, CoordinationTimeoutError, from_wire, to_wire

T = TypeVar("T")

_runs = itertools.count()  # runs begin in the same order on every process
_MARGIN_SECS = 5.0  # the other processes wait this much longer than the primary, which names the late ones


class Exchange:
    """The exchanges of one run of a job. Every process makes the same calls in the same order.

    The keys of `gather` number the phases of the run, and every broadcast belongs to the phase in which it is made: so
    a process that fails knows the keys that the other processes read next.
    """

    def __init__(self, coordinator: Coordinator, nodes: Sequence[str], timeout_secs: float):
        self._coordinator, self._nodes, self._timeout = coordinator, tuple(nodes), timeout_secs
        self._prefix = f"epochckpt/run/{next(_runs) if coordinator.processes > 1 else 0}"
        self._phase = self._broadcasts = 0

    @property
    def primary(self) -> bool:
        """Whether this process decides."""
        return self._coordinator.primary

    def broadcast(self, what: str, decide: Callable[[], T]) -> T:
        """The primary decides, and all processes get its answer (JSON). The primary does not wait for them."""
        key = f"{self._prefix}/{self._phase}/broadcast/{self._broadcasts}"
        self._broadcasts += 1
        if self.primary:
            return self._coordinator.agree(key, decide, self._timeout)
        return self._answer(what, key, lambda: [0])

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
        try:
            mine = report()
        except BaseException as error:  # Ctrl-C and sys.exit, too
            self._abort(what, error)
            raise
        finally:  # in step with the other processes, should they go on after an error
            phase, self._phase, self._broadcasts = self._phase, self._phase + 1, 0
        key = f"{self._prefix}/{phase}"

        def conclude() -> T:
            others = set(range(1, coordinator.processes))
            found, missing = coordinator.gather(f"{key}/node", others, Deadline(self._timeout))
            errors = [from_wire(found[p]["error"]) for p in sorted(found) if "error" in found[p]]
            if errors:
                raise errors[0]
            if missing:
                raise self._late(what, sorted(missing))
            coordinator.forget(f"{self._prefix}/{phase - 1}")  # all processes are here: none reads it any more
            return decide([mine, *(found[p]["value"] for p in sorted(others))])

        def missing() -> list[int]:
            arrived = {int(p) for p in coordinator.get_all(f"{key}/node")}
            return [p for p in range(coordinator.processes) if p not in arrived] or [0]

        if self.primary:
            return coordinator.agree(f"{key}/answer", conclude, self._timeout)
        coordinator.put(f"{key}/node/{coordinator.process}", {"value": mine})
        return self._answer(what, f"{key}/answer", missing)

    def _answer(self, what: str, key: str, missing: Callable[[], list[int]]) -> Any:
        """The primary's answer on another process."""
        try:
            answer = self._coordinator.get(key, self._timeout + _MARGIN_SECS)
        except CoordinationTimeoutError as error:
            raise self._late(what, missing()) from error
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["value"]

    def _abort(self, what: str, error: BaseException) -> None:
        """Makes the other processes raise an error of this one at their next exchange.

        It is logged before: if the process with JAX's service has died this waits, and JAX may end this process, too.
        """
        logging.error("%s: this node, %s, fails", what, self._nodes[self._coordinator.process], exc_info=error)
        key = f"{self._prefix}/{self._phase}"
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
            f"{what}: no word from {names} within {self._timeout:g} s; the other nodes stop. Committed epochs are "
            "untouched: start the job again to go on"
        )
