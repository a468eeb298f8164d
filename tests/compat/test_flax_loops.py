"""Flax training loops that change the manager in the middle end where an undisturbed run ends, bit for bit."""

from __future__ import annotations

import json
import pathlib
import signal
from typing import Any

import pytest
from orbax.checkpoint import v1

from tests.support import prepared
from tests.support.processes import run_worker, start_processes

EPOCHS = 6


def train(directory: pathlib.Path, flavour: str, manager: str, until: int) -> Any:
    arguments = {"directory": str(directory), "flavour": flavour, "manager": manager, "until": until}
    (answer,) = run_worker("tests.support.flax_loops:run", arguments, 1, 4, imported=prepared.STOCK)
    return answer


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_loop_may_change_the_manager_and_go_back(tmp_path: pathlib.Path, flavour: str) -> None:
    """Ours, then stock Orbax where epochckpt cannot be imported, then ours; and the other way round."""
    undisturbed = train(tmp_path / "undisturbed", flavour, "stock", EPOCHS)["digest"]
    for first, second in (("ours", "stock"), ("stock", "ours")):
        directory = tmp_path / first
        assert train(directory, flavour, first, 2)["steps"] == [0, 1]
        middle = train(directory, flavour, second, 4)
        assert (middle["start"], middle["steps"]) == (2, [1, 2, 3])
        last = train(directory, flavour, first, EPOCHS)
        assert (last["start"], last["steps"], last["digest"]) == (4, [3, 4, 5], undisturbed)


def train_v1(directory: pathlib.Path, style: str, until: int) -> Any:
    arguments = {"directory": str(directory), "style": style, "until": until}
    (answer,) = run_worker("tests.support.flax_loops:run_v1", arguments, 1, 4, imported=prepared.STOCK)
    return answer


@pytest.mark.long
def test_a_loop_of_nnx_in_v1_style_is_killed_and_resumed(tmp_path: pathlib.Path) -> None:
    """With one import changed; killed while a save is in flight. It ends where an undisturbed run ends, bit for bit."""
    style = "orbax.checkpoint.v1" if hasattr(v1, "load") else "epochckpt.v1"  # older Orbax has other names
    undisturbed = train_v1(tmp_path / "undisturbed", style, EPOCHS)
    assert undisturbed["steps"] == [3, 4, 5]
    directory = tmp_path / "run"
    arguments = {"directory": str(directory), "style": "epochckpt.v1", "until": EPOCHS, "victim": 3}
    program = ["-m", "tests.support.worker", "tests.support.flax_loops:run_v1", json.dumps(arguments)]
    with start_processes(program, 1, devices_per_process=4) as job:
        job[0].wait_for_output("in flight", timeout=90)
        assert "ready [0, 1, 2]" in job[0].output()
        job[0].send_signal(signal.SIGKILL)
        job.wait(timeout=30)
    resumed = train_v1(directory, "epochckpt.v1", EPOCHS)
    assert (resumed["start"], resumed["steps"]) == (3, [3, 4, 5])
    assert resumed["digest"] == undisturbed["digest"]
