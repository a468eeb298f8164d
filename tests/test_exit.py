"""What happens to saves in flight when a job of several processes simply ends."""

from __future__ import annotations

import pathlib

import pytest

import epochckpt as ec
from tests.processes import run_worker


@pytest.mark.parametrize("processes", [2, 4])
def test_saves_in_flight_are_drained_before_the_processes_leave_the_job(tmp_path: pathlib.Path, processes: int) -> None:
    """Every process ends without close(); all its saves are committed before jax.distributed shuts down."""
    directory = tmp_path / "run"
    run_worker("tests.jobs:save_and_return", {"directory": str(directory), "epochs": 3}, processes, 1, timeout=100)
    with ec.CheckpointManager(directory) as manager:
        assert list(manager.all_steps()) == [0, 1, 2]
        assert manager.verify(2).ok
    assert sorted(p.name for p in directory.iterdir()) == ["0", "1", "2"]


def test_two_managers_of_one_job_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Two managers on two directories, opened one after the other by the same processes, keep to themselves."""
    results = run_worker(
        "tests.jobs:two_managers", {"one": str(tmp_path / "one"), "two": str(tmp_path / "two")}, 2, 1, timeout=100
    )
    assert results == [[[0, 1], [0, 5]], [[0, 1], [0, 5]]]
