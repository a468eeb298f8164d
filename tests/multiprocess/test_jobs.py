"""Jobs on real `jax.distributed` processes: what is decided is decided alike, and what is per node stays per node."""

from __future__ import annotations

import json
import pathlib
import signal
from typing import Any

import pytest

import epochckpt as ec
from tests.support import job_runs
from tests.support.job_runs import PER_EPOCH, RECORDS
from tests.support.processes import run_worker, start_processes

NODES = ("trainer_0", "trainer_1", "trainer_2")


def run(function: str, processes: int, devices: int = 1, **arguments: Any) -> list[Any]:
    return run_worker(f"tests.support.job_runs:{function}", arguments, processes, devices)


def expected(number: int, epochs: int) -> list[int]:
    records = [i % RECORDS + 100 * number for i in range(PER_EPOCH * epochs)]
    return [sum(records[: PER_EPOCH * (e + 1)]) for e in range(epochs)]


@pytest.mark.slow
def test_totals_are_reproduced_from_every_resume_epoch_on_three_processes(tmp_path: pathlib.Path) -> None:
    """0 included; and by one process that has all three nodes, on the same directory."""
    directory = str(tmp_path / "run")
    named = [None, *range(6, -1, -1)]
    found = run("read_as_nodes", 3, directory=directory, epochs=6, resume_from=named)
    for number, node in enumerate(NODES):
        whole = expected(number, 7)
        assert found[number][0]["totals"] == {node: whole[:6]}
        for one, epoch in zip(found[number][1:], named[1:], strict=True):
            assert one["resumed"] == epoch
            assert one["totals"] == {node: whole[epoch : max(6, epoch + 1)]}
    local = job_runs.read_locally(directory, 6, 3)
    assert local["totals"] == {node: expected(i, 6)[3:] for i, node in enumerate(NODES)}
    again = run("read_as_nodes", 3, directory=directory, epochs=8, resume_from=[None])
    assert [one[0]["totals"] for one in again] == [{n: expected(i, 8)[6:]} for i, n in enumerate(NODES)]
    with ec.CheckpointManager(directory) as manager:
        assert [n.name for n in manager.status(8).nodes] == list(NODES)


@pytest.mark.parametrize("stock", [False, pytest.param(True, marks=pytest.mark.long)], ids=["epochckpt", "stock Orbax"])
def test_a_job_goes_on_where_it_was(tmp_path: pathlib.Path, stock: bool) -> None:
    """Spread arrays, per-node totals and readers; a finished run does nothing."""
    directory = str(tmp_path / "run")
    for epochs, resumed in ((3, None), (5, 3), (5, 5)):
        found = run("read", 2, 2, directory=directory, epochs=epochs, stock=stock)
        for number, one in enumerate(found):
            assert one["totals"] == expected(number, 5)[resumed or 0 : epochs]
            assert (one["epoch"], one["committed"], one["resumed"]) == (epochs, epochs, resumed)
            assert (one["weights"], one["steps"]) == (sum(range(epochs + 1)), epochs)
            assert one["failed"] == []
    assert {one["reason"] for one in found} == {"was finished already"}


@pytest.mark.slow
def test_a_stop_that_is_decided_on_one_node_stops_all_after_the_same_epoch(tmp_path: pathlib.Path) -> None:
    """Also when it is not the primary."""
    for who in (0, 2):
        found = run("stop_on_one", 3, directory=str(tmp_path / str(who)), who=who, when=3)
        assert {(one["epoch"], one["committed"], one["finished"]) for one in found} == {(3, 3, True)}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of several jobs that two processes have run."""
    functions = [
        "stop_on_the_word_of_one_node",
        "save_beside",
        "save_without_a_blob_of_one",
        "unsaved_on_one",
        "condition_raises_on_one",
        "stock_with_unlike_blobs",
    ]
    return run("one_after_the_other", 2, directory=str(tmp_path_factory.mktemp("on_two")), functions=functions)


@pytest.mark.slow
def test_an_output_or_a_blob_of_one_node_stops_all(on_two: list[dict[str, Any]]) -> None:
    """A process without that node has no vote; what no node has is an error on all."""
    for ends in on_two:
        found = ends["stop_on_the_word_of_one_node"]
        reasons = ["output 'value' of task '<lambda>'", "blob 'done'", "blob 'trainer_1/done'"]
        assert [(one["epoch"], one["committed"], one["reason"]) for one in found[:3]] == [(3, 3, r) for r in reasons]
        assert 'blob "nobody\'s": no node has it' in found[3]["error"]
        assert "the task has run on no node; is it in the epoch group?" in found[4]["error"]


@pytest.mark.slow
def test_a_run_goes_on_beside_what_is_loaded_and_saved_in_another_session(on_two: list[dict[str, Any]]) -> None:
    """On all processes; see test_beside_a_run."""
    for number, ends in enumerate(on_two):
        assert ends["save_beside"] == [[10 * number + w for w in (0, 1, 2, 3, 4, 5, 1)], 5, []]


def test_a_save_in_an_epoch_that_one_process_cannot_make_is_made_by_none(on_two: list[dict[str, Any]]) -> None:
    """All are told which blob is missing on which node; the run goes on."""
    for ends in on_two:
        warned, committed, failed = ends["save_without_a_blob_of_one"]
        assert any("epoch 2 could not be saved" in line and "node process_1: blob 'w'" in line for line in warned)
        assert (committed, failed) == (3, [])


@pytest.mark.slow
def test_a_load_by_one_process_alone_harms_no_later_run(tmp_path: pathlib.Path) -> None:
    """Runs are counted alike on all processes, and a load is no run, whether it succeeds or waits in vain."""
    assert run("load_by_one", 2, directory=str(tmp_path)) == [[2, 4], [2, 4]]


def test_a_blob_that_one_process_would_lose_is_an_error_on_all(on_two: list[dict[str, Any]]) -> None:
    """If it was asked for; the node is named."""
    assert ["'momentum' of node process_1" in ends["unsaved_on_one"] for ends in on_two] == [True, True]


def test_a_condition_that_raises_on_one_node_is_named_on_all(on_two: list[dict[str, Any]]) -> None:
    """With its node; a target may be that of a blob of one node alone."""
    for ends in on_two:
        text, notes = ends["condition_raises_on_one"]
        assert "division" in text
        assert next(note for note in notes if "OnOne" in note).endswith("OnOne, epoch 1, node process_1")


def test_a_blob_that_stock_orbax_cannot_save_is_the_same_error_on_all(on_two: list[dict[str, Any]]) -> None:
    """It saves arrays once, and other values for each node: the processes would wait for each other in other calls."""
    for ends in on_two:
        found = ends["stock_with_unlike_blobs"]
        for name, array in (("an array and a number", "an array"), ("an array and nothing", "a tree with arrays")):
            error = found[name]["error"]
            assert f"InvalidArgumentError: blob 'x': {array} on process_0, a value without arrays on process_1" in error
            assert "use epochckpt.CheckpointManager" in error


def test_a_blob_that_becomes_one_that_stock_orbax_cannot_save_is_a_failed_save(on_two: list[dict[str, Any]]) -> None:
    """Of that epoch alone, on all processes."""
    for ends in on_two:
        found = ends["stock_with_unlike_blobs"]["in the second epoch"]
        ((epoch, reason),) = found["failed"]
        assert epoch == 2
        assert "blob 'x': an array on process_0, a value without arrays on process_1" in reason
        assert (found["committed"], found["x"]) == (3, [0.0, 0.0, 0.0])


def test_stock_orbax_saves_values_without_arrays_for_each_node(on_two: list[dict[str, Any]]) -> None:
    """A node that lacks one has None in its place."""
    found = [ends["stock_with_unlike_blobs"]["values of each node"] for ends in on_two]
    assert [(one["own"], one["x"], one["committed"]) for one in found] == [(0, [7], 3), (1, None, 3)]


@pytest.mark.slow
def test_a_node_that_does_not_arrive_makes_the_others_raise_and_is_named(tmp_path: pathlib.Path) -> None:
    """While it is still away; what was committed is there. See test_exchange for the primary."""
    who, arguments = 1, json.dumps({"directory": str(tmp_path), "who": 1})
    command = ["-m", "tests.support.worker", "tests.support.job_runs:one_stays_away", arguments]
    with start_processes(command, num_processes=3) as processes:
        for number in (0, 2):
            processes[number].wait_for_output("it has raised", timeout=120)
        processes[who].send_signal(signal.SIGCONT)
        outcomes = processes.wait(timeout=120)
    for number in (0, 2):
        assert "CoordinationTimeoutError" in outcomes[number].stdout
        assert f"no word from process_{who} within 8 s (JobRunner(exchange_timeout_secs=" in outcomes[number].stdout
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["setup", "init", "epoch"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_task_that_raises_on_one_node_is_raised_on_all(tmp_path: pathlib.Path, phase: str, who: int) -> None:
    """With node, group and epoch; nobody waits for the one that left."""
    found = run("one_raises", 2, directory=str(tmp_path), who=who, phase=phase)
    epoch = 2 if phase == "epoch" else 0
    assert [(one["node"], one["group"], one["epoch"]) for one in found] == [(f"process_{who}", phase, epoch)] * 2
    assert all("ZeroDivisionError: no such luck" in one["text"] for one in found)
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() in ((0, 1) if phase == "epoch" else (None,))


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), *(pytest.param(*p, marks=pytest.mark.long) for p in [(2, 1), (2, 4)])]
)
def test_a_resume_on_another_number_of_processes(tmp_path: pathlib.Path, before: int, after: int) -> None:
    """Arrays come back on the new devices; what differs per node is refused by name without `reshard`."""
    directory = str(tmp_path / "run")
    run("read", before, 2, directory=directory, epochs=2)
    if before > 1:
        refused = run("on_other_nodes", after, 1, directory=directory, epochs=3, reshard=False)
        assert all("total" in one["error"] for one in refused), refused
    found = run("on_other_nodes", after, 2, directory=directory, epochs=3, reshard=True)
    total = sum(expected(number, 2)[1] for number in range(before))
    for number, one in enumerate(found):
        begin = total if number == 0 else 0
        assert one["totals"] == [begin + sum(100 * number + r for r in (6, 7, 8))]
        assert (one["weights"], one["steps"], one["resumed"]) == ([6.0], 3, 2)


@pytest.mark.slow
def test_arrays_of_another_number_of_processes_ask_for_a_target(tmp_path: pathlib.Path) -> None:
    """1 → 2 is refused by the blob's name; what the error says to write works; 2 → 1 gives NumPy, and a warning."""
    directory = str(tmp_path / "run")
    run("go_on_with_arrays", 1, 2, directory=directory, epochs=1, targets=False)
    for one in run("go_on_with_arrays", 2, 2, directory=directory, epochs=2, targets=False):
        assert "blob 'spread' come back on devices of process 0 alone, and node process_1 is process 1" in one["error"]
        assert "ws.target('spread', …) in @job.setup, with a jax.ShapeDtypeStruct" in one["error"]
        (about_alone,) = [line for line in one["said"] if "'alone'" in line]
        assert "comes back as NumPy" in about_alone
        assert "ws.target('alone', …) in @job.setup" in about_alone

    for number, one in enumerate(run("go_on_with_arrays", 2, 2, directory=directory, epochs=2, targets=True)):
        assert (one["resumed"], one["least"]) == (1, {"spread": [2.0, 6.0][number], "alone": 2.0})
        assert one["unplaced"] == [False]
        assert ["'x': 4" in form for form in one["forms"].values()] == [True, True]
        assert one["said"] == []

    (one,) = run("go_on_with_arrays", 1, 2, directory=directory, epochs=3, targets=False)
    assert (one["resumed"], one["least"], set(one["forms"].values())) == (2, {"spread": 3.0, "alone": 3.0}, {"NumPy"})
    assert one["unplaced"] == [False]
    assert [f"ws.target('{blob}', …)" in line for blob, line in zip(one["forms"], one["said"], strict=True)] == [
        True
    ] * 2


@pytest.mark.slow
def test_stock_orbax_of_another_number_of_processes_is_told_of_targets(tmp_path: pathlib.Path) -> None:
    """In the words of jobs, with what Orbax says; the target that it asks for works."""
    directory = str(tmp_path / "run")
    run("go_on_with_arrays", 2, 1, directory=directory, epochs=1, targets=False, stock=True)
    (refused,) = run("go_on_with_arrays", 1, 1, directory=directory, epochs=2, targets=False, stock=True)
    assert "2 nodes saved checkpoint 1, and here are 1" in refused["error"]
    assert "ws.target('spread', …) in @job.setup" in refused["error"]
    assert "Topology mismatch" in refused["error"]
    (one,) = run("go_on_with_arrays", 1, 1, directory=directory, epochs=2, targets=True, stock=True)
    assert (one["resumed"], one["least"]) == (1, {"spread": 2.0})


@pytest.mark.slow
def test_a_session_for_one_process_is_refused_in_a_job_of_several() -> None:
    """And the right one is named."""
    assert all("use DistributedSession" in text for text in run("wrong_session", 2))
