"""What happens to saves in flight when a job of several processes simply ends."""

from __future__ import annotations

import pathlib

import pytest

import epochckpt as ec
from tests.support.processes import run_worker


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_saves_in_flight_are_drained_before_the_processes_leave_the_job(tmp_path: pathlib.Path, processes: int) -> None:
    """Every process ends without close(); all its saves are committed before jax.distributed shuts down."""
    directory = tmp_path / "run"
    run_worker(
        "tests.support.jobs:save_and_return", {"directory": str(directory), "epochs": 3}, processes, 1, timeout=100
    )
    with ec.CheckpointManager(directory) as manager:
        assert list(manager.all_steps()) == [0, 1, 2]
        assert manager.verify(2).ok
    assert sorted(p.name for p in directory.iterdir()) == ["0", "1", "2"]


@pytest.mark.slow
def test_two_managers_of_one_job_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Two managers on two directories, opened one after the other by the same processes, keep to themselves."""
    results = run_worker(
        "tests.support.jobs:two_managers",
        {"one": str(tmp_path / "one"), "two": str(tmp_path / "two")},
        2,
        1,
        timeout=100,
    )
    assert results == [[[0, 1], [0, 5]], [[0, 1], [0, 5]]]


@pytest.mark.slow
def test_all_processes_answer_a_second_save_of_the_last_epoch_alike(tmp_path: pathlib.Path) -> None:
    """Also while only one of them has heard of its commit: False, and an error once all have waited for it."""
    found = run_worker("tests.support.call_jobs:end_of_loop", {"directory": str(tmp_path / "run")}, 2, timeout=100)
    ended = {"again": False, "raised": "EpochExistsError", "steps": [0]}
    assert found == [{"in flight": False, **ended}, {"in flight": True, **ended}]


@pytest.mark.slow
def test_a_call_that_one_process_makes_alone_harms_no_later_one(tmp_path: pathlib.Path) -> None:
    """It ends in time and names who did not come; what all call together afterwards, all are answered alike.

    And the coordination service is asked to keep a bounded number of keys, however much is called and opened.
    """
    primary, follower = run_worker(
        "tests.support.call_jobs:lone_calls", {"directory": str(tmp_path / "run")}, 2, timeout=110
    )
    common = [{k: v for k, v in one["common"].items() if not k.startswith("many")} for one in (primary, follower)]
    assert (
        common[0]
        == common[1]
        == {
            "reload": [1, 2, 3],
            "reload again": [1, 2, 3],
            "restore": 3.0,
            "restore again": 3.0,
            "delete": [1, 3],
            "in the end": [1, 3, 3.0],
        }
    )
    calls = {"reload 0": "reload()", "reload 1": "reload()", "restore": "restore(None)", "delete": "delete(2)"}
    calls["rollback"] = "rollback_to(1)"
    assert follower["raised"].keys() == {f"follower's {name}" for name in calls}
    for name, call in calls.items():
        said = follower["raised"][f"follower's {name}"]
        assert f"the primary, process_0, did not answer {call} within" in said
    assert primary["raised"].keys() == {"primary's restore"}
    assert "process_1 did not say" in primary["raised"]["primary's restore"]
    assert primary["common"]["many calls"] <= 400
    assert primary["common"]["many opens"] <= 400
