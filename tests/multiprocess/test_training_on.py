"""What several processes restore is of use at once: the state trains on as the one that was saved."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.processes import run_worker


@pytest.mark.slow
def test_a_restored_state_trains_on(tmp_path: pathlib.Path) -> None:
    """Descriptions without devices get the mesh that is set, and a counter that the target has placed nowhere stays so.

    It was saved as a NumPy scalar, which every process has alike, and is that again where the target only describes it.
    A number whose dtype was weak is that for each process, on all devices and on one of each process.
    """
    for found in run_worker("tests.support.training_jobs:train_on", {"directory": str(tmp_path)}, 2, 2):
        assert found["sums"] == [found["sums"][0]] * 4
        assert found["counted"] == [5.0 * 32] * 4
        assert found["committed"] == [None, False, False, None]
        assert found["weak"] == [0.5, 1.5] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "restored"), [(2, 2), (2, 1), (1, 2)])
def test_a_state_is_saved_before_its_first_step(tmp_path: pathlib.Path, saved: int, restored: int) -> None:
    """Each process has the counters of `optimizer.init` for itself, and JAX takes them beside arrays on all devices."""
    arguments = {"directory": str(tmp_path)}
    expected, *others = run_worker("tests.support.training_jobs:begin", arguments, saved, 4 // saved)
    assert others == [expected] * len(others)
    assert expected[-3:] == [0.5, False, True]
    for found in run_worker("tests.support.training_jobs:go_on", arguments, restored, 4 // restored):
        assert found == [expected] * 3


@pytest.mark.slow
def test_such_a_state_on_local_disks(tmp_path: pathlib.Path) -> None:
    """Each disk has the counters, small ones in the record of the epoch, and a larger array in a file."""
    answers = run_worker("tests.support.training_jobs:go_on_with_own_disks", {"directory": str(tmp_path)}, 2, 2)
    for found in answers:
        assert found == [answers[0][0]] * 3
        assert found[0][-3:] == [0.5, False, True]
