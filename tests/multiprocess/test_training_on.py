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
