"""What several processes restore is of use at once: the state trains on as the one that was saved."""

from __future__ import annotations

import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
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
def test_stock_orbax_reads_such_a_state(tmp_path: pathlib.Path) -> None:
    """Without a target as well: then it makes NumPy arrays of what each process had for itself."""
    for found in run_worker("tests.support.training_jobs:read_by_orbax", {"directory": str(tmp_path)}, 2, 2):
        assert found == [[0.0, 0.5, [0, 7]]] * 4


@pytest.mark.slow
def test_what_each_process_has_for_itself_must_be_alike(tmp_path: pathlib.Path) -> None:
    """Else keys of random numbers that differ would come back alike, and nobody would notice."""
    for errors, key, *rest in run_worker("tests.support.training_jobs:differ", {"directory": str(tmp_path)}, 2):
        for error, leaf in zip(errors, ("key", "large"), strict=True):
            assert f"leaf {leaf!r} lies on no device, so each process has its own" in error
            assert "other values on process_1 than on process_0" in error
        assert (key, *rest) == ([0, 7], False, 2_999_999.0, False)
    (epoch,) = ec.inspect(tmp_path).epochs()
    assert [node.nbytes > 6_000_000 for node in epoch.nodes] == [True, True]  # each writes half of the large one
    with ocp.CheckpointManager(tmp_path) as manager:
        large = manager.restore(2, args=ocp.args.StandardRestore())["large"]
    assert np.asarray(large).tolist() == [*range(3_000_000)]


@pytest.mark.slow
def test_such_a_state_on_local_disks(tmp_path: pathlib.Path) -> None:
    """Each disk has the counters, and a larger array of this kind."""
    answers = run_worker("tests.support.training_jobs:go_on_with_own_disks", {"directory": str(tmp_path)}, 2, 2)
    for found in answers:
        assert found == [answers[0][0]] * 3
        assert found[0][-3:] == [0.5, False, True]
