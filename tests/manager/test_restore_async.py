"""`CheckpointManager.restore_async`: a restore beside other work of the training thread."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _threads
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.taps import WAIT_SECS

STATE = {"w": np.arange(64, dtype=np.float32)}
ARGS = ocp.args.StandardRestore(jax.tree.map(jnp.asarray, STATE))


def is_data(path: str) -> bool:
    return path.endswith(".safetensors")


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with two epochs."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in range(2):
            manager.save(epoch, args=ocp.args.StandardSave({"w": STATE["w"] + epoch}))
    return tmp_path


def damage(saved: pathlib.Path, epoch: int) -> None:
    path = saved / str(epoch) / "process_0" / "default.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("step", [None, 1])
def test_the_caller_goes_on_while_bytes_are_read(saved: pathlib.Path, faults: Faults, step: int | None) -> None:
    """A program is compiled and runs while storage does not answer; `result` may be asked again."""
    with ec.CheckpointManager(saved) as manager:
        hold = faults.hold(Store.open_reader, where=lambda call: is_data(call.path))
        response = manager.restore_async(step, args=ARGS)
        assert hold.reached.wait(WAIT_SECS)
        step_fn = jax.jit(lambda w: w * 2).lower(STATE["w"]).compile()
        with pytest.raises(TimeoutError):
            response.result(0.001)
        hold.let_go()
        found = response.result(WAIT_SECS)
        np.testing.assert_array_equal(step_fn(found["w"]), (STATE["w"] + 1) * 2)
        assert response.result() is found
        assert manager.restore_async(0).result()["w"].tolist() == STATE["w"].tolist()


def test_errors_come_from_the_result(saved: pathlib.Path) -> None:
    """Those of the arguments come at once; a damaged epoch is passed over, as by `restore`."""
    damage(saved, 1)
    with ec.CheckpointManager(saved) as manager:
        damaged, missing = manager.restore_async(1, args=ARGS), manager.restore_async(7)
        other = manager.restore_async(0, args=ocp.args.StandardRestore({"v": STATE["w"]}))
        for response, kind in (
            (damaged, ec.errors.DamagedError),
            (missing, ec.errors.EpochNotFoundError),
            (other, ec.errors.MismatchError),
        ):
            with pytest.raises(kind):
                response.result()
        with pytest.raises(ec.errors.InvalidArgumentError, match="expected an integer"):
            manager.restore_async(-1)
        assert manager.restore_async(None, args=ARGS).result()["w"].tolist() == STATE["w"].tolist()
        assert manager.all_steps() == [0]


def test_what_is_committed_during_a_look_is_listed(saved: pathlib.Path, faults: Faults) -> None:
    """No epoch can be read, so that storage is looked at again; a save ends between that look and its use."""
    for epoch in range(2):
        damage(saved, epoch)
    with ec.CheckpointManager(saved) as manager:
        looked, go = threading.Event(), threading.Event()

        def wait(call: StoreCall) -> None:
            if not looked.is_set():  # else it is the claim of the save
                looked.set()
                assert go.wait(WAIT_SECS)

        faults.after(Store.list, wait, where=lambda call: call.path == "")
        response = manager.restore_async(None, args=ARGS)
        assert looked.wait(WAIT_SECS)
        manager.save(2, args=ocp.args.StandardSave({"w": STATE["w"] + 2}))
        manager.wait_until_finished()
        go.set()
        assert response.result(WAIT_SECS)["w"].tolist() == (STATE["w"] + 2).tolist()
        assert manager.all_steps() == [2]


def test_the_manager_keeps_no_result(saved: pathlib.Path) -> None:
    """What was restored is freed when the caller lets go of it, though the manager goes on."""
    with ec.CheckpointManager(saved) as manager:
        response = manager.restore_async(1, args=ARGS)
        found = response.result()
        kept = weakref.ref(found["w"])
        del response, found
        gc.collect()
        assert kept() is None


def test_types_of_64_bits_are_those_of_the_caller(tmp_path: pathlib.Path) -> None:
    """`jax.enable_x64` is about one thread, and holds for what that thread has begun."""
    with jax.enable_x64(True), ec.CheckpointManager(tmp_path) as manager:
        state = {"w": jnp.arange(3.0) / 3}
        manager.save(0, args=ocp.args.StandardSave(state))
        response = manager.restore_async(None, args=ocp.args.StandardRestore(state))
    found = response.result()["w"]
    assert found.dtype == np.float64
    assert found.tolist() == state["w"].tolist()


def test_close_waits_for_what_is_being_read(saved: pathlib.Path, faults: Faults) -> None:
    """The result can be had afterwards, too."""
    manager = ec.CheckpointManager(saved)
    hold = faults.hold(Store.open_reader, where=lambda call: is_data(call.path))
    response = manager.restore_async(1, args=ARGS)
    assert hold.reached.wait(WAIT_SECS)
    closing: Any = _threads.start(manager.close)
    assert not closing.wait(0.05)
    hold.let_go()
    closing.result(WAIT_SECS)
    assert response.result(0.0)["w"].tolist() == (STATE["w"] + 1).tolist()


EXITING = """
import atexit, sys
import orbax.checkpoint as ocp
import epochckpt as ec
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.taps import WAIT_SECS, is_data
atexit.register(lambda: print(response.result(0)["w"].tolist()))  # the last handler of all
faults = Faults()
with faults.everywhere():
    manager = ec.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(read_only=True))
hold = faults.hold(Store.open_reader, where=lambda call: is_data(call.path))
response = manager.restore_async(1)
assert hold.reached.wait(WAIT_SECS)
atexit.register(hold.let_go)  # the first one
"""


@pytest.mark.slow
def test_a_program_ends_when_what_it_reads_is_read(saved: pathlib.Path) -> None:
    """Also one that may only read: the end of the interpreter would abort a thread that is in jax."""
    done = subprocess.run([sys.executable, "-c", EXITING, str(saved)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str((STATE["w"] + 1).tolist())), done.stderr
