"""Real jobs of 1, 2 and 4 processes: what one topology saved, every other restores bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.support.processes import run_worker

pytestmark = pytest.mark.slow

SAVERS = (1, 2, 4)
RESTORERS = {"1": (1, 4), "2": (2, 2), "4": (4, 1), "2x3": (2, 3)}  # processes, devices of each
WAYS = ("same", "moved", "numpy", "without target")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[int, pathlib.Path]:
    """Where the job of each number of processes saves."""
    return {n: tmp_path_factory.mktemp(f"saved-by-{n}") for n in SAVERS}


@pytest.fixture(scope="module")
def saved(directories: dict[int, pathlib.Path]) -> dict[int, list[Any]]:
    """What every process of each saving job saw, with four devices in all."""
    job = "tests.support.topology_jobs:save"
    return {n: run_worker(job, {"directory": str(path)}, n, 4 // n) for n, path in directories.items()}


@pytest.fixture(scope="module")
def restored(saved: dict[int, list[Any]], directories: dict[int, pathlib.Path]) -> dict[tuple[str, str], list[Any]]:
    """What every process of each restoring job found wrong, started on first use."""
    return _Restored({str(n): str(path) for n, path in directories.items()})


class _Restored(dict[tuple[str, str], list[Any]]):
    """Runs one job per restoring topology; it restores the epochs of all saving ones. A failed job is not repeated."""

    def __init__(self, directories: dict[str, str]):
        super().__init__()
        self._directories = directories
        self._failed: dict[str, str] = {}

    def __missing__(self, key: tuple[str, str]) -> list[Any]:
        processes, devices = RESTORERS[key[0]]
        assert key[0] not in self._failed, self._failed[key[0]]
        try:
            found = run_worker(
                "tests.support.topology_jobs:restore", {"directories": self._directories}, processes, devices
            )
        except AssertionError as error:
            self._failed[key[0]] = str(error)
            raise
        for source in self._directories:
            self[key[0], source] = [process[source] for process in found]
        return self[key]


@pytest.mark.parametrize("n", SAVERS)
def test_every_process_sees_the_same_epochs_and_metrics(saved: dict[int, list[Any]], n: int) -> None:
    """After `wait_until_finished`, steps, metrics and the nodes' names and sizes are equal on all processes."""
    for process in saved[n]:
        assert process["steps"] == [3, 8]
        assert process["latest"] == 8
        assert process["metrics"] == [{"loss": 1 / 4}, {"loss": 1 / 9}]
        assert process["verified"]
        assert {k: v for k, v in process.items() if k != "own"} == {k: v for k, v in saved[n][0].items() if k != "own"}


@pytest.mark.parametrize("n", SAVERS)
def test_every_node_writes_its_own_folder_under_its_own_name(saved: dict[int, list[Any]], n: int) -> None:
    """`node=` names the folders, `node_path` finds them, and no node is without data."""
    names = [f"worker-{i}" for i in range(n)]
    for process in saved[n]:
        assert process["nodes"] == names
        assert process["folders"] == [f"8/{name}" for name in names]
        assert {"node.json", "default.safetensors", "default-00001.safetensors"} <= set(process["own"])
        assert all(size > 0 for size in process["bytes"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", SAVERS)
@pytest.mark.parametrize("m", ["2", *(pytest.param(m, marks=pytest.mark.long) for m in RESTORERS if m != "2")])
def test_any_topology_restores_what_another_saved(
    restored: dict[tuple[str, str], list[Any]], m: str, n: int, way: str
) -> None:
    """Sharded, replicated and sub-mesh arrays, keys, NumPy and Python leaves, bit for bit, in the asked sharding."""
    for process, found in enumerate(restored[m, str(n)]):
        assert found[way] == [], f"process {process}"
