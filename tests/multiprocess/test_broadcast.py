"""Restores in which the processes of a job share what they read."""

from __future__ import annotations

import json
import pathlib
import signal

import pytest

from tests.support.processes import parse_result, run_worker, start_processes

JOB = "tests.support.broadcast_jobs:"


@pytest.mark.slow
def test_every_byte_is_read_once_and_a_failure_of_one_process_is_raised_by_all(tmp_path: pathlib.Path) -> None:
    """Values are exact; no process waits for one that has failed, and the next restore works."""
    found = run_worker(JOB + "failures", {"directory": str(tmp_path)}, 2)
    size = sum((tmp_path / "1" / f"process_{i}" / "default.safetensors").stat().st_size for i in (0, 1))
    assert 0.9 * size < sum(each["read"] for each in found) <= size
    for each in found:
        assert each["before"] == each["between"] == each["readable again"] == each["newest"] == []
        kind, text = each["other targets"]
        assert kind == "InvalidArgumentError"
        assert "process_0 has checkpoint 1, item 'default': 16 leaves" in text
        assert "process_1 has checkpoint 1, item 'default': 17 leaves" in text
        assert each["damaged"][0] == "DamagedError"
        assert each["left"] == [0]
        assert each["named, in the background"] == []
        for share in (True, False):
            assert each[f"newest, in the background, {share}"] == [[0, 1], [], [0]]
    for name in ("other targets", "unreadable", "unreadable, newest", "damaged"):
        assert found[0][name] == found[1][name]
    assert found[0]["unreadable"][0] == "AccessError"
    assert found[0]["no target"][0] == "MismatchError"
    assert found[1]["no target"][0] == "CoordinationError"
    assert "MismatchError in another process" in found[1]["no target"][1]
    assert max(each["secs"] for each in found) < 100  # no wait ran into its bound, which is 130 s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "newest", "limit"), [(2, False, 131072), pytest.param(4, True, None, marks=pytest.mark.long)]
)
def test_parts_that_some_processes_share_are_read_once_by_these(
    replicas: int, newest: bool, limit: int | None, tmp_path: pathlib.Path
) -> None:
    """Arrays that are cut over some processes and replicated over others, saved by another number of processes."""
    run_worker(JOB + "save", {"directory": str(tmp_path), "epochs": [0]}, 1, 4)
    args = {"directory": str(tmp_path), "replicas": replicas, "newest": newest, "limit": limit}
    found = run_worker(JOB + "restore", args, 4)
    size = (tmp_path / "0" / "process_0" / "default.safetensors").stat().st_size
    assert [bad for shared, _, alone, _ in found for bad in (*shared, *alone)] == []
    assert 0.9 * size < sum(nbytes for _, nbytes, _, _ in found) < 1.1 * size  # blocks on borders are read twice
    assert sum(nbytes for *_, nbytes in found) > 1.9 * size


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_for_the_others(tmp_path: pathlib.Path) -> None:
    """It dies when all have agreed that they have read: the collective fails, and nothing hangs."""
    run_worker(JOB + "save", {"directory": str(tmp_path), "epochs": [0]}, 1, 2)
    program = ["-m", "tests.support.worker", JOB + "die", json.dumps({"directory": str(tmp_path)})]
    with start_processes(program, 2) as job:
        outcomes = job.wait(150)
        assert outcomes[1].returncode == -signal.SIGKILL
        assert outcomes[0].returncode == 0, outcomes[0].stdout
        kind, text, _ = parse_result(outcomes[0].stdout)
        assert kind == "CoordinationError"
        assert "one of them has ended" in text
