"""What the nodes of a running job agree on, between epochs.

Guarantees:
- every exchange is bounded: when a node does not arrive, all others raise within the timeout, and the error names it;
- an error that one node brings is raised on all;
- what was decided is the same on all nodes: the primary decides, from what all have brought.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt._threads import Deadline
from epochckpt.commit import Coordinator
from epochckpt.errors import CoordinationError, CoordinationTimeoutError, InvalidArgumentError, from_wire, to_wire

T = TypeVar("T")

_runs = itertools.count()  # runs begin in the same order on every process
_MARGIN_SECS = 5.0  # by how much the others wait longer than the primary, who names who is late
_AHEAD = 200  # exchanges that an error is put into: `should_stop` may ask often between two meetings


class Exchange:
    """The exchanges of one run of a job. Every node makes the same calls in the same order.

    Args:
        coordinator: the other processes.
        nodes: node names by process.
        timeout_secs: bound on every exchange.
    """

    def __init__(self, coordinator: Coordinator, nodes: Sequence[str], timeout_secs: float):
        if not timeout_secs > 0:
            raise InvalidArgumentError(f"exchange_timeout_secs must be positive, got {timeout_secs!r}")
        self._coordinator, self._nodes, self._timeout = coordinator, tuple(nodes), timeout_secs
        self._prefix = f"epochckpt/run/{next(_runs) if coordinator.processes > 1 else 0}"
        self._count = 0
        self._stale: list[str] = []

    @property
    def primary(self) -> bool:
        """Whether this process decides."""
        return self._coordinator.primary

    @property
    def _single(self) -> bool:
        """Whether there is no other process."""
        return self._coordinator.processes == 1

    def broadcast(self, what: str, decide: Callable[[], T]) -> T:
        """The primary decides (JSON), everybody takes its answer; nobody waits for the others.

        Raises:
            whatever `decide` raised, on every process.
            CoordinationTimeoutError: the primary's answer did not come in time.
        """
        key = self._next()
        try:
            return self._coordinator.agree(f"{key}/answer/0", decide, self._timeout + _MARGIN_SECS)
        except CoordinationTimeoutError as error:
            raise self._late(what, [0]) from error

    def gather(self, what: str, mine: Any, decide: Callable[[list[Any]], T]) -> T:
        """Everybody brings something (JSON), the primary decides from all of it, everybody takes its answer.

        Args:
            what: for keys and messages.
            mine: what this process brings; an exception, to be raised on all.
            decide: on the primary; called with what the processes brought, in order.

        Raises:
            the exception that a process brought, or that `decide` raised, on every process.
            CoordinationTimeoutError: a process did not arrive in time; names its node.
        """
        if self._single:
            if isinstance(mine, Exception):
                raise mine
            return decide([mine])
        key, me = self._next(), self._coordinator.process
        brought = {"error": to_wire(mine)} if isinstance(mine, Exception) else {"value": mine}
        self._coordinator.put(f"{key}/node/{me}", brought)
        if not self.primary:
            if isinstance(mine, Exception):
                raise mine
            return self._hear(what, key)
        if isinstance(mine, Exception):
            self._coordinator.put(f"{key}/answer/0", brought)
            raise mine

        def conclude() -> T:
            others = set(range(1, self._coordinator.processes))
            found, missing = self._coordinator.gather(f"{key}/node", others, Deadline(self._timeout))
            errors = [from_wire(v["error"]) for _, v in sorted(found.items()) if "error" in v]
            if errors:
                raise errors[0]
            if missing:
                raise self._late(what, sorted(missing))
            self._forget(before=key)
            return decide([mine, *(found[p]["value"] for p in sorted(others))])

        return self._coordinator.agree(f"{key}/answer/0", conclude, self._timeout)

    def abort(self, error: BaseException) -> None:
        """This process cannot go on: its error is raised on all others at their next exchange. Returns."""
        if self._single:
            return
        me = self._coordinator.process
        # the primary's word is heard in any exchange; that of others only where all meet, which is not always the next
        keys = [f"{self._next()}/answer/0"] if self.primary else [f"{self._next()}/node/{me}" for _ in range(_AHEAD)]
        try:
            for key in keys:
                self._coordinator.put(key, {"error": to_wire(error)})
        except CoordinationError as problem:
            logging.warning("the other nodes could not be told of an error: %s", problem)

    def _hear(self, what: str, key: str) -> Any:
        try:
            answer = self._coordinator.get(f"{key}/answer/0", self._timeout + _MARGIN_SECS)
        except CoordinationTimeoutError as error:
            arrived = {int(p) for p in self._coordinator.get_all(f"{key}/node")}
            missing = [p for p in range(self._coordinator.processes) if p not in arrived]
            raise self._late(what, missing or [0]) from error
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["value"]

    def _late(self, what: str, processes: Sequence[int]) -> CoordinationTimeoutError:
        names = ", ".join(self._nodes[p] for p in processes)
        return CoordinationTimeoutError(
            f"{what}: no word from {names} within {self._timeout:g} s; the other nodes stop. Committed epochs are "
            "untouched: start the job again to go on"
        )

    def _next(self) -> str:
        self._count += 1
        key = f"{self._prefix}/{self._count}"
        if self.primary and not self._single:
            self._stale.append(key)
        return key

    def _forget(self, before: str) -> None:
        """Everybody has arrived here: nobody reads the keys of earlier exchanges any more."""
        while self._stale and self._stale[0] != before:
            self._coordinator.forget(self._stale.pop(0))
