"""Flax training loops that change the manager in the middle end where an undisturbed run ends, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.support.processes import run_worker

EPOCHS = 6


def train(directory: pathlib.Path, flavour: str, manager: str, until: int) -> Any:
    arguments = {"directory": str(directory), "flavour": flavour, "manager": manager, "until": until}
    (answer,) = run_worker("tests.support.flax_loops:run", arguments, 1, 4)
    return answer


@pytest.mark.slow
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
