"""SIGTERM at any moment: all processes leave with the code for preempted, one agreed epoch is committed, and the
resumed run ends where an undisturbed one ends. Real signals, real `jax.distributed` processes.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
import signal
import threading
from typing import Any

import pytest

import epochckpt as ec
from tests.support.processes import Processes, start_processes

PREEMPTED = ec.PREEMPTED_EXIT_CODE
JOB = {"epochs": 6, "step_secs": 0.02, "resumable": False, "polls": False, "exit_secs": 0.0, "width": 64}
LIMIT = 150.0


def start(directory: pathlib.Path, processes: int, **how: Any) -> Processes:
    arguments = json.dumps({**JOB, **how, "directory": str(directory)})
    return start_processes(["-m", "tests.support.preempted_job", arguments], processes)


def ends(job: Processes) -> tuple[list[int], list[dict[str, Any]], str]:
    """Exit statuses, what the processes said at their end, and all output."""
    outcomes = job.wait(LIMIT, 40.0)
    text = "\n".join(o.stdout for o in outcomes)
    said = [[json.loads(m) for m in re.findall(r"^AT (.*)$", o.stdout, re.MULTILINE)] for o in outcomes]
    last = [next((s for s in reversed(one) if s["place"] == "end"), {}) for one in said]
    return [o.returncode for o in outcomes], last, text


def finals(said: list[dict[str, Any]]) -> list[Any]:
    return [(end["total"], end["hash"]) for end in said]


def finish(directory: pathlib.Path, processes: int, **how: Any) -> list[dict[str, Any]]:
    with start(directory, processes, **how) as job:
        codes, said, text = ends(job)
    assert codes == [0] * processes, text
    assert not any(end["failed"] for end in said)
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the processes end with when nobody disturbs them, by number of processes and width."""
    found: dict[tuple[int, int], list[Any]] = {}

    def run(processes: int, width: int = JOB["width"]) -> list[Any]:
        if (processes, width) not in found:
            directory = tmp_path_factory.mktemp("run") / "c"
            found[processes, width] = finals(finish(directory, processes, step_secs=0.0, width=width))
        return found[processes, width]

    return run


def committed(directory: pathlib.Path) -> list[int]:
    with ec.CheckpointManager(directory) as manager:
        return list(manager.all_steps())


def disturb(directory: pathlib.Path, victim: int, place: str, delay: float, processes: int = 4, **how: Any) -> Any:
    """Runs the job, with a SIGTERM to one process some time after it has come to a place."""
    moment = threading.Event()  # never set: its wait is the fault's random delay
    with start(directory, processes, **how) as job:
        job[victim].wait_for_output(place, LIMIT)
        moment.wait(delay)
        job[victim].send_signal(signal.SIGTERM)
        return ends(job)


WIDE = 1_000_000  # 4 MB per process: its save is under way for most of the next epoch
PLACES = {
    "init": ('"init"', 0.3, {"step_secs": 0.06}),  # during the first compilation
    "epoch": ('"epoch"', 0.9, {"step_secs": 0.06}),  # in a collective, between steps, between tasks
    "save": ('"epoch": 2', 0.1, {"step_secs": 0.06, "width": WIDE}),  # while epoch 1 is written and committed
    "exit": ('"exit"', 0.3, {"exit_secs": 2.5}),  # longer than JAX takes to look
}


@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.parametrize("part", range(10))
def test_sigterm_to_one_of_four_processes_at_random_moments(
    undisturbed: Any, tmp_path: pathlib.Path, part: int
) -> None:
    """All exit with the code for preempted, after the same epoch, which is committed; the resumed run ends alike."""
    chance = random.Random(part)
    hit: dict[str, int] = {}
    for number in range(5 * part, 5 * part + 5):
        directory = tmp_path / str(number)
        name = list(PLACES)[number % len(PLACES)]
        place, longest, how = PLACES[name]
        victim, delay = chance.randrange(4), chance.uniform(0.0, longest)
        codes, said, text = disturb(directory, victim, place, delay, **how)
        assert codes == [PREEMPTED] * 4, (number, name, victim, delay, text)
        assert len({(end["epoch"], end["committed"], end["reason"]) for end in said}) == 1, said
        (epoch,) = {end["epoch"] for end in said}
        assert committed(directory)[-1] == epoch == said[0]["committed"]
        assert (epoch == JOB["epochs"]) or "preempted" in said[0]["reason"]
        where = f"{name}, epoch {epoch}"
        hit[where] = hit.get(where, 0) + 1
        width = how.get("width", JOB["width"])
        again = finish(directory, 4, step_secs=0.0, width=width)
        assert again[0]["resumed"] == epoch
        assert finals(again) == undisturbed(4, width)
    print(hit)


def notify(directory: pathlib.Path, processes: int, epoch: int, step: int, **how: Any) -> Any:
    """Runs the job; the last process gets a SIGTERM at a step."""
    with start(directory, processes, step_secs=0.0, sigterm=[processes - 1, epoch, step], **how) as job:
        return ends(job)


def left_at(text: str) -> set[tuple[int, int]]:
    """The epochs and steps at which processes left an epoch."""
    left = [json.loads(m) for m in re.findall(r"^AT (.*\"left\".*)$", text, re.MULTILINE)]
    return {(place["epoch"], place["step"]) for place in left}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_epoch_that_can_be_resumed_is_left_in_the_middle(
    undisturbed: Any, tmp_path: pathlib.Path, processes: int
) -> None:
    """It is saved as it is, entered again on resume, and the complete one replaces it."""
    codes, said, text = notify(tmp_path / "c", processes, 2, 3, resumable=True, polls=True, held=[2, 3])
    assert codes == [PREEMPTED] * processes, text
    assert all(end["partial"] for end in said), text
    assert {(end["epoch"], end["committed"]) for end in said} == {(2, 2)}
    assert committed(tmp_path / "c") == [0, 1, 2]
    assert left_at(text) == {(2, 3)}
    again = finish(tmp_path / "c", processes, resumable=True, polls=True, step_secs=0.0)
    assert again[0]["resumed"] == 2
    assert finals(again) == undisturbed(processes)
    assert committed(tmp_path / "c") == list(range(7))
    with ec.CheckpointManager(tmp_path / "c") as manager:
        assert not any(manager.metadata(e).custom_metadata["job_runner"]["partial"] for e in manager.all_steps())


@pytest.mark.slow
def test_a_second_preemption_in_the_same_epoch_keeps_the_further_part(undisturbed: Any, tmp_path: pathlib.Path) -> None:
    """A partial epoch is replaced by a later part of itself, and then by the complete one."""
    how = {"resumable": True, "polls": True}
    for step in (2, 5):
        codes, said, text = notify(tmp_path / "c", 1, 1, step, **how)
        assert codes == [PREEMPTED], text
        assert said[0]["partial"]
        assert left_at(text) == {(1, step)}
    assert finals(finish(tmp_path / "c", 1, step_secs=0.0, **how)) == undisturbed(1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_epoch_that_cannot_be_resumed_is_dropped_at_the_deadline(
    undisturbed: Any, tmp_path: pathlib.Path, processes: int
) -> None:
    """What was committed before stays the newest, and the resumed run trains the epoch from its beginning."""
    codes, said, text = notify(tmp_path / "c", processes, 2, 3, polls=True, held=[2, 3], deadline_secs=0.0)
    assert codes == [PREEMPTED] * processes, text
    assert not any(end["partial"] for end in said)
    assert {end["epoch"] for end in said} == {1}
    assert committed(tmp_path / "c") == [0, 1]
    assert left_at(text) == {(2, 3)}
    again = finish(tmp_path / "c", processes, step_secs=0.0)
    assert finals(again) == undisturbed(processes)


@pytest.mark.slow
def test_without_a_deadline_the_epoch_is_finished(undisturbed: Any, tmp_path: pathlib.Path) -> None:
    """Polling alone does not make an epoch one that is left."""
    codes, said, text = notify(tmp_path / "c", 1, 1, 3, polls=True)
    assert codes == [PREEMPTED], text
    assert "left" not in text
    assert not said[0]["partial"]
    assert said[0]["epoch"] == 1
    assert finals(finish(tmp_path / "c", 1, step_secs=0.0)) == undisturbed(1)


def test_a_second_sigterm_kills_a_process_on_its_own(tmp_path: pathlib.Path) -> None:
    """The first asks, the second is not to be argued with; what is committed stays."""
    with start(tmp_path / "c", 1, step_secs=0.0, polls=True, held=[1, 3]) as job:
        assert next(ec.follow(tmp_path / "c", timeout_secs=LIMIT)) == 0
        job[0].wait_for_output('"epoch": 1', LIMIT)
        job[0].send_signal(signal.SIGTERM)
        job[0].wait_for_output("preemption notice heard", LIMIT)
        job[0].send_signal(signal.SIGTERM)
        codes, _, text = ends(job)
    assert codes == [-signal.SIGTERM], text
    assert committed(tmp_path / "c") == [0]


@pytest.mark.long
@pytest.mark.parametrize("place", ['"epoch": 2', '"exit"'])
def test_with_stock_orbax_a_notice_is_heard_in_the_first_epoch_after_a_resume_and_in_the_exit(
    undisturbed: Any, tmp_path: pathlib.Path, place: str
) -> None:
    """Its manager asks JAX with its steps; none of them is left out."""
    directory = tmp_path / "c"
    finish(directory, 2, stock=True, epochs=1, step_secs=0.0)
    how = {"stock": True, "step_secs": 0.15} if place != '"exit"' else {"stock": True, "exit_secs": 2.5}
    codes, said, text = disturb(directory, 1, place, 0.1, 2, **how)
    assert codes == [PREEMPTED] * 2, text
    assert len({(end["epoch"], end["committed"]) for end in said}) == 1
    again = finish(directory, 2, stock=True, step_secs=0.0)
    assert again[0]["resumed"] == said[0]["epoch"]
    assert finals(again) == undisturbed(2)
