"""What bounds a collective call of a run: a process may take as long as it needs while it lives, and no longer than the
timeout once it is silent. Two processes, as threads over a coordinator in memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.errors import CoordinationTimeoutError
from epochckpt.jobs.run_calls import RunCalls
from tests.support.in_memory import InMemory, Service
from tests.support.taps import WAIT_SECS, eventually

TIMEOUT_SECS = 0.4
TIMEOUTS = 3


class Hasty(InMemory):
    """Does not wait: while the other process works its timeouts are over as soon as that has given one more sign."""

    def __init__(self, service: Service, process: int):
        super().__init__(service, process, 2)
        self.patient = threading.Event()
        self._over, self._seen = 0, -1

    def _time_out(self) -> bool:
        """Whether a wait is over without an answer, which it is a few times."""
        if self.patient.is_set():
            return False

        def signs() -> Mapping[str, Any]:
            return {k: int(v) for k, v in self._service.values.items() if k.endswith(f"/alive/{1 - self.process}")}

        assert eventually(lambda: any(number > self._seen for number in signs().values()))
        self._seen, self._over = max(signs().values()), self._over + 1
        if self._over == TIMEOUTS:
            self.patient.set()
        return True

    def gather(self, prefix: str, missing: set[int], deadline: Deadline) -> tuple[dict[int, Any], set[int]]:
        return ({}, missing) if self._time_out() else super().gather(prefix, missing, Deadline(WAIT_SECS))

    def get(self, key: str, timeout_secs: float) -> Any:
        if self.process > 0 and self._time_out():
            raise CoordinationTimeoutError(key)
        return super().get(key, WAIT_SECS)


@pytest.fixture
def service() -> Service:
    """Of two processes."""
    return Service()


def calls(coordinator: InMemory) -> RunCalls:
    """Of the first run of a process."""
    option = "Runner(timeout_secs=…)"
    return RunCalls(coordinator, ["left", "right"], TIMEOUT_SECS, option=option, runs=itertools.count())


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_process_waits_for_another_as_long_as_that_works(service: Service, waiting: int) -> None:
    """The primary for a report, and another process for the primary's."""
    hasty = Hasty(service, waiting)
    working = InMemory(service, 1 - waiting, 2)

    def work() -> str:
        assert hasty.patient.wait(WAIT_SECS)
        return "worked"

    def meet(coordinator: InMemory, report: Callable[[], str]) -> list[str]:
        return calls(coordinator).collective("end of epoch 1", report, list)

    other = _threads.start(lambda: meet(working, work))
    expected = ["waited", "worked"] if waiting == 0 else ["worked", "waited"]
    assert meet(hasty, lambda: "waited") == expected
    assert other.result(WAIT_SECS) == expected


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_silent_process_is_named_and_so_is_the_option(
    service: Service, waiting: int, patience: Callable[..., None]
) -> None:
    """Also one that has given a sign of life, and then no other."""
    patience(run_call_margin_secs=0.1)
    coordinator = InMemory(service, waiting, 2)
    coordinator.put(f"epochckpt/run/0/alive/{1 - waiting}", 7)
    name = ["left", "right"][1 - waiting]
    with pytest.raises(
        CoordinationTimeoutError, match=rf"end of epoch 1: no word from {name} .*Runner\(timeout_secs=…\)"
    ):
        calls(coordinator).collective("end of epoch 1", lambda: 0, len)
