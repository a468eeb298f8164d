"""The garbage collector is paused where very many objects are made, and goes on afterwards."""

import gc
import os
import pathlib
import threading
from collections.abc import Iterator

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _collector


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_is_paused_and_goes_on_after_an_error() -> None:
    def fail() -> None:
        with _collector.paused(), _collector.paused():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_the_program_has_switched_off_stays_off() -> None:
    gc.disable()
    with _collector.paused():
        pass
    assert not gc.isenabled()


def test_pauses_that_overlap_leave_it_on() -> None:
    entered, may_leave = threading.Event(), threading.Event()

    def pause() -> None:
        with _collector.paused():
            entered.set()
            may_leave.wait()

    thread = threading.Thread(target=pause)
    with _collector.paused():
        thread.start()
        entered.wait()
    may_leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_a_child_that_is_forked_in_a_pause_has_its_collector() -> None:
    with _collector.paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()


@pytest.mark.slow
def test_the_collector_hardly_runs_while_many_leaves_are_restored(tmp_path: pathlib.Path) -> None:
    state = {f"leaf_{i}": np.full(4, i, np.float32) for i in range(4000)}
    runs = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            runs.append(info)

    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        gc.callbacks.append(count)
        try:
            restored = manager.restore(1, args=ocp.args.StandardRestore(state))
        finally:
            gc.callbacks.remove(count)
    np.testing.assert_array_equal(restored["leaf_7"], state["leaf_7"])
    assert len(runs) < 30, len(runs)  # without pauses 150


@pytest.mark.slow
def test_a_restore_leaves_nothing_for_the_collector(tmp_path: pathlib.Path) -> None:
    """A cycle of references would keep the record, three objects for each leaf, until a full collection."""
    tree = {f"leaf_{i:03}": np.full(3, i) for i in range(500)} | {"large": np.ones(2**19)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        manager.restore(0, args=ocp.args.StandardRestore(tree))
        gc.collect()
        gc.disable()
        for args in (ocp.args.StandardRestore(tree), None):
            restored = manager.restore(0, args=args)
            assert np.array_equal(restored["leaf_499"], tree["leaf_499"])
            del restored
            assert gc.collect() < len(tree) // 10
