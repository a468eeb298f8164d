"""A collective call: all get one decision or one error, no wait is without a bound, and a lone call harms no later one.

In threads over a coordinator in memory, and with real processes over the service of `jax.distributed`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest

from epochckpt import _threads
from epochckpt.agreement import CollectiveCalls, Coordinator, coordination
from epochckpt.agreement.collective import Timeouts, broadcast, collective, meet
from epochckpt.agreement.restore_vote import vote
from epochckpt.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    DamagedError,
    EpochDeletedError,
    InvalidArgumentError,
)
from tests.support.in_memory import InMemory, Service
from tests.support.processes import run_worker
from tests.support.taps import WAIT_SECS

PATIENT = Timeouts(collect_secs=WAIT_SECS, hear_secs=2 * WAIT_SECS)
SHORT_SECS = 0.2


def each(service: Service, count: int, body: Callable[[InMemory], Any]) -> list[Any]:
    """What `body` returns on each of some processes, or the error that it raises."""

    def caught(coordinator: InMemory) -> Any:
        try:
            return body(coordinator)
        except Exception as error:
            return error

    ended = [_threads.start(lambda number=number: caught(InMemory(service, number, count))) for number in range(count)]
    return [future.result(3 * WAIT_SECS) for future in ended]


def failing(process: int, error: BaseException) -> Callable[[int], int]:
    """An act that fails on one process."""

    def act(number: int) -> int:
        if number == process:
            raise error
        return number

    return act


def test_the_primary_decides_from_what_all_have_told() -> None:
    """In the order of the processes, and every process gets the decision."""
    found = each(
        Service(), 4, lambda c: collective(c, "sum", lambda: 10**c.process, lambda told: [told, sum(told)], PATIENT)
    )
    assert found == [[[1, 10, 100, 1000], 1111]] * 4


@pytest.mark.parametrize("process", [0, 2])
def test_an_error_of_one_process_is_raised_on_all(process: int) -> None:
    """Of the same class and text; and the decision is never made."""
    act = failing(process, DamagedError("default", "is torn"))

    def decide(told: list[int]) -> int:
        raise AssertionError("there is nothing to decide")

    found = each(Service(), 3, lambda c: collective(c, "x", lambda: act(c.process), decide, PATIENT))
    assert [(type(error), str(error)) for error in found] == [(DamagedError, "default: is torn")] * 3


def test_an_error_of_the_decision_is_raised_on_all() -> None:
    """Also in a broadcast."""

    def decide(*told: Any) -> None:
        raise InvalidArgumentError("no")

    for call in (
        lambda c: collective(c, "x", lambda: 1, decide, PATIENT),
        lambda c: broadcast(c, "x", decide, PATIENT),
    ):
        assert [(type(error), str(error)) for error in each(Service(), 3, call)] == [(InvalidArgumentError, "no")] * 3


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_interrupted_ends_the_call_for_all(process: int) -> None:
    """Ctrl-C is raised where it happened, at once, and named elsewhere."""
    act = failing(process, KeyboardInterrupt())

    def body(coordinator: InMemory) -> str:
        try:
            return str(collective(coordinator, "x", lambda: act(coordinator.process), len, PATIENT))
        except KeyboardInterrupt:
            return "Ctrl-C"
        except CoordinationError as error:
            return str(error)

    elsewhere = "KeyboardInterrupt in another process: KeyboardInterrupt()"
    assert each(Service(), 2, body) == (["Ctrl-C", elsewhere] if process == 0 else [elsewhere, "Ctrl-C"])


def test_a_late_process_is_named_on_all_others() -> None:
    """With its node, within the time that the primary waits."""
    patience = Timeouts(collect_secs=SHORT_SECS, hear_secs=WAIT_SECS, late_text="{names} had {secs:g} s")

    def body(coordinator: InMemory) -> Any:
        coordinator.nodes = ["left", "middle", "right"]
        return None if coordinator.process == 1 else collective(coordinator, "x", lambda: 1, sum, patience)

    primary, absent, other = each(Service(), 3, body)
    assert absent is None
    for error in (primary, other):
        assert isinstance(error, CoordinationTimeoutError)
        assert str(error) == f"middle had {SHORT_SECS:g} s"
        assert list(error.processes) == [1]


def test_a_silent_primary_is_named() -> None:
    """And what the process has told is taken back: it is old when the primary comes."""
    service = Service()
    patience = Timeouts(collect_secs=SHORT_SECS, hear_secs=SHORT_SECS, silent_text="{names} was silent for {secs:g} s")
    with pytest.raises(CoordinationTimeoutError, match=f"process 0 was silent for {SHORT_SECS:g} s"):
        collective(InMemory(service, 1, 2), "x", lambda: 1, sum, patience)
    assert service.values == {}


def test_a_broadcast_waits_for_no_process() -> None:
    """The others may come much later."""
    service = Service()
    assert broadcast(InMemory(service, 0, 3), "x", lambda: [7], PATIENT) == [7]
    assert [broadcast(InMemory(service, number, 3), "x", list, PATIENT) for number in (1, 2)] == [[7], [7]]


def test_one_process_agrees_with_itself() -> None:
    """Without any key: its coordinator has none."""
    alone = coordination.Coordinator()
    assert collective(alone, "x", lambda: 5, lambda told: [told], PATIENT) == [[5]]
    assert broadcast(alone, "x", lambda: 6, PATIENT) == 6


def test_a_process_that_was_relaunched_into_a_running_job_is_told_so() -> None:
    """It tells under a key that it has told under in its former life."""
    service = Service()
    service.values["x/told/1"] = '{"value": 1}'
    with pytest.raises(
        CoordinationError, match=r"process 1 could not take part .*ALREADY_EXISTS.*restart the whole job"
    ):
        collective(InMemory(service, 1, 2), "x", lambda: 1, sum, PATIENT, once=True)


def test_of_several_errors_the_weightiest_counts() -> None:
    """On every process; each knows its own error, too."""

    def weigh(failures: Any) -> Exception:
        return next((error for error in failures if isinstance(error, InvalidArgumentError)), failures[0])

    service = Service()
    service.values["x/told/1"] = '{"error": {"type": "DamagedError", "message": "torn", "data": {}, "notes": []}}'
    service.values["x/told/2"] = '{"error": {"type": "InvalidArgumentError", "message": "no", "data": {}, "notes": []}}'
    outcome = meet(InMemory(service, 0, 3), "x", lambda: 0, sum, PATIENT, weigh=weigh)
    assert isinstance(outcome.error, InvalidArgumentError)
    with pytest.raises(InvalidArgumentError, match="no"):
        outcome.result()


def test_a_thousand_processes_take_few_rounds() -> None:
    """In whatever order they come: each round waits for one of them, and then takes all that have come."""
    random.seed(7)

    class Arriving(coordination.Coordinator):
        def __init__(self, order: list[int]):
            super().__init__()
            self.ids = tuple(range(len(order) + 1))
            self.rounds, self._order, self._come = 0, order, 0

        def put(self, key: str, value: Any, again: bool = False) -> None:
            assert (key, value) == ("x/decision", {"value": 999, "serial": 0})

        def get(self, key: str, timeout_secs: float) -> Any:
            self.rounds += 1
            self._come = max(self._come, self._order.index(int(key.rpartition("/")[2])) + 1)
            return {"value": 1}

        def get_all(self, prefix: str) -> Mapping[str, Any]:
            return {str(process): {"value": 1} for process in self._order[: self._come]}

    for order in (list(range(1, 1000)), list(range(999, 0, -1)), random.sample(range(1, 1000), 999)):
        job = Arriving(order)
        assert collective(job, "x", lambda: 0, sum, PATIENT) == 999
        assert job.rounds < 40


# -- calls by name ---------------------------------------------------------------------------------------------------


def calls_of(coordinator: coordination.Coordinator) -> CollectiveCalls:
    return CollectiveCalls(coordinator, "job", str)


def looked(calls: CollectiveCalls, mine: int, secs: float = WAIT_SECS) -> list[int]:
    return calls.collective("look", lambda: mine, list, secs)


def both(one: Callable[[], Any], other: Callable[[], Any]) -> list[Any]:
    """What two processes get that call at the same time."""
    there = _threads.start(other)
    here = one()
    return [here, there.result(2 * WAIT_SECS)]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_call_that_a_process_makes_alone_harms_no_later_one(alone: int) -> None:
    """It raises, and names who did not come. What it told is not taken for what it tells in the next call."""
    service = Service()
    calls = [calls_of(InMemory(service, number, 2)) for number in range(2)]
    for number in range(3):
        with pytest.raises(CoordinationTimeoutError, match=f"process {1 - alone}.* did not answer"):
            looked(calls[alone], -1, SHORT_SECS)
        expected = [number, 10 + number]
        found = both(
            lambda number=number: looked(calls[0], number), lambda number=number: looked(calls[1], 10 + number)
        )
        assert found == [expected, expected]


def test_a_process_that_fails_in_a_call_is_in_step_with_the_next_one() -> None:
    """It does not take the decision of the call that it made fail for that of the next one."""
    service = Service()
    calls = [calls_of(InMemory(service, number, 2)) for number in range(2)]
    for number in range(3):

        def broken() -> int:
            raise DamagedError("disk", "is torn")

        def fails(one: CollectiveCalls, act: Callable[[], int]) -> None:
            with pytest.raises(DamagedError, match="disk: is torn"):
                one.collective("look", act, list, WAIT_SECS)

        both(lambda: fails(calls[0], lambda: 1), lambda: fails(calls[1], broken))
        found = both(
            lambda number=number: looked(calls[0], number), lambda number=number: looked(calls[1], 10 + number)
        )
        assert found == [[number, 10 + number]] * 2


def interrupted() -> None:
    raise KeyboardInterrupt


class Interrupted(InMemory):
    """A process whose first wait Ctrl-C ends."""

    waited = False

    def get(self, key: str, timeout_secs: float) -> Any:
        if not self.waited:
            self.waited = True
            interrupted()
        return super().get(key, timeout_secs)


def test_ctrl_c_on_the_primary_leaves_all_in_step() -> None:
    """The others raise with it, and the next call of that name is one call of all."""
    service = Service()
    calls = [calls_of(InMemory(service, number, 2)) for number in range(2)]

    def breaks(one: CollectiveCalls, error: type[BaseException]) -> None:
        with pytest.raises(error):
            one.broadcast("claim", interrupted, WAIT_SECS)

    both(lambda: breaks(calls[0], KeyboardInterrupt), lambda: breaks(calls[1], CoordinationError))
    found = both(
        lambda: calls[0].broadcast("claim", lambda: 7, WAIT_SECS),
        lambda: calls[1].broadcast("claim", lambda: 8, WAIT_SECS),
    )
    assert found == [7, 7]


def test_ctrl_c_on_a_process_that_waits_leaves_it_able_to_call_again() -> None:
    """Its next call tells anew, and the primary decides from that."""
    service = Service()
    calls = [calls_of(InMemory(service, 0, 2)), calls_of(Interrupted(service, 1, 2))]
    with pytest.raises(KeyboardInterrupt):
        looked(calls[1], 1)
    assert both(lambda: looked(calls[0], 0), lambda: looked(calls[1], 2)) == [[0, 2], [0, 2]]


def test_a_broadcast_that_the_primary_made_alone_is_taken_once_and_never_after_a_later_one() -> None:
    """The primary numbers its calls."""
    service = Service()
    primary, other = (calls_of(InMemory(service, number, 2)) for number in range(2))
    assert primary.broadcast("a", lambda: "first", WAIT_SECS) == "first"
    assert primary.broadcast("b", lambda: "later", WAIT_SECS) == "later"
    assert other.broadcast("b", str, WAIT_SECS) == "later"
    assert both(
        lambda: primary.broadcast("a", lambda: "second", WAIT_SECS), lambda: other.broadcast("a", str, WAIT_SECS)
    ) == [
        "second",
        "second",
    ]


# -- real processes --------------------------------------------------------------------------------------------------


def test_an_error_that_says_nothing_about_the_epoch_ends_a_vote_for_all() -> None:
    """Although another process, of a lower number, has found the epoch damaged."""
    service = Service()

    def restore(number: int) -> int:
        if number == 1:
            raise DamagedError("1", "is torn")
        if number == 2:
            raise InvalidArgumentError("no such item")
        with service.changed:  # both have told: the call ends with the errors that there are
            assert service.changed.wait_for(lambda: len(service.values) == 2, WAIT_SECS)
        return number

    def one(coordinator: Coordinator) -> Any:
        return vote(
            epoch=5,
            restore=lambda epoch: restore(coordinator.process),
            save_of=lambda epoch: "a-5-0",
            coordinator=coordinator,
            key="vote",
            timeout_secs=WAIT_SECS,
            directory="run",
        )

    found = each(service, 3, one)
    assert [type(each) for each in found] == [InvalidArgumentError] * 3


@pytest.mark.parametrize(
    ("saves", "are_accepted"),
    [
        (["a-5-0", "a-5-0", "a-5-0"], True),
        (["a-5-0", None, None], True),
        (["a-5-0", "a-5-0", "b-5-0"], False),
        (["b-5-0", None, "a-5-0"], False),
    ],
)
def test_an_epoch_is_accepted_if_all_processes_have_read_one_save_of_it(
    saves: list[str | None], are_accepted: bool
) -> None:
    """Else another run has replaced it while they read. A process that knows no id of the save has no objection."""

    def one(coordinator: Coordinator) -> tuple[list[int], Exception | None]:
        return vote(
            epoch=5,
            restore=lambda epoch: epoch,
            save_of=lambda epoch: saves[coordinator.process],
            coordinator=coordinator,
            key="vote",
            timeout_secs=WAIT_SECS,
            directory="run",
        )

    for value, error in each(Service(), 3, one):
        assert value == [5]
        assert (error is None) is are_accepted
        if error is not None:
            assert isinstance(error, EpochDeletedError)
            assert "the processes have read different saves of it" in str(error)


def test_of_many_openings_the_primary_of_several_processes_forgets_the_oldest() -> None:
    """A coordination service keeps what it is not told to forget; one process alone has told it nothing."""
    service = Service()
    primary = InMemory(service, 0, 2)
    for process in (InMemory(service, 1, 2), InMemory(service, 0, 1)):
        process.put(f"kept/{process.processes}", 0)
        for _ in range(40):
            coordination.forget_opening(process, f"kept/{process.processes}")
    for number in range(40):
        primary.put(f"opening/{number}", number)
        coordination.forget_opening(primary, f"opening/{number}")
    assert sorted(service.values) == sorted(["kept/1", "kept/2", *(f"opening/{number}" for number in range(8, 40))])


def real_service() -> list[str]:
    """What is not as it should be between one of two real processes and the service of `jax.distributed`."""
    service = coordination.connect(False)
    me = service.process
    wrong: list[str] = []

    def check(what: str, found: object, expected: object) -> None:
        if found != expected:
            wrong.append(f"{what}: {found!r}, expected {expected!r}")

    def error(call: Callable[[], Any]) -> str:
        try:
            return f"no error: {call()}"
        except CoordinationError as raised:
            return f"{type(raised).__name__}: {raised}"

    late = f"CoordinationTimeoutError: the coordination service did not give none/{me} within 0.05 s"
    check("a value that does not come", error(lambda: service.get(f"none/{me}", 0.05)), late)
    check("a look at it", service.peek(f"none/{me}"), None)
    service.put(f"mine/{me}", [me])
    check("the other's value", service.get(f"mine/{1 - me}", WAIT_SECS), [1 - me])
    check("all", dict(service.get_all("mine")), {"0": [0], "1": [1]})
    check("a second value", "ALREADY_EXISTS" in error(lambda: service.put(f"mine/{me}", 5)), True)
    service.put(f"again/{me}/value", 1)
    service.put(f"again/{me}/value", 2, again=True)
    check("its newest value", service.get(f"again/{me}/value", WAIT_SECS), 2)
    service.forget(f"again/{me}")
    check("a value that was forgotten", service.peek(f"again/{me}/value"), None)
    check("openings", [service.next_opening("a"), service.next_opening("b"), service.next_opening("a")], [1, 1, 2])
    check("primary", service.primary, me == 0)
    return wrong


def test_the_service_of_a_real_job_keeps_gives_and_forgets() -> None:
    """Every call that epochckpt makes of it, with its errors, on two processes."""
    assert run_worker("tests.agreement.test_collective:real_service", {}, 2) == [[], []]


def real_calls() -> list[Any]:
    """What one of several real processes gets from calls that succeed, fail, and are made alone."""
    me = jax.process_index()
    coordinator = coordination.connect(False)
    calls = calls_of(coordinator)
    found: list[Any] = []

    def note(call: Callable[[], Any]) -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    act = failing(2, DamagedError("disk", "is torn"))
    note(lambda: collective(coordinator, "job/0", lambda: me, list, PATIENT))
    note(lambda: collective(coordinator, "job/1", lambda: act(me), list, PATIENT))
    note(lambda: broadcast(coordinator, "job/2", lambda: f"from {me}", PATIENT))
    for late in range(3):  # each is late once, and in step afterwards
        if me != late:
            with contextlib.suppress(CoordinationTimeoutError):
                looked(calls, -1, 2 * SHORT_SECS)
                found.append(f"{late} was not missed")
        collective(coordinator, f"job/meet/{late}", lambda: None, len, PATIENT)
        note(lambda late=late: looked(calls, 10 * late + me))
    return found


@pytest.mark.slow
def test_real_processes_get_one_decision_and_one_error() -> None:
    """Three processes over the service of `jax.distributed`."""
    found = run_worker("tests.agreement.test_collective:real_calls", {}, 3)
    assert (
        found
        == [
            [
                [0, 1, 2],
                "DamagedError: disk: is torn",
                "from 0",
                [0, 1, 2],
                [10, 11, 12],
                [20, 21, 22],
            ]
        ]
        * 3
    )
