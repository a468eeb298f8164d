"""What a save does not call: Orbax's own way for arrays, and the coordinator on the training thread."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from tests.support.jobs import global_mesh, place
from tests.support.processes import run_worker

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def refuse_orbax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Orbax's own array engine raise."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Orbax's array engine was used")

    handlers = [ocp.type_handlers.ArrayHandler, ocp.type_handlers.NumpyHandler, ocp.type_handlers.ScalarHandler]
    for handler in [*handlers, ocp.type_handlers.StringHandler]:
        for name in ("serialize", "deserialize"):
            monkeypatch.setattr(handler, name, refuse)
    checkpointers = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler, ocp.ArrayCheckpointHandler)
    for handler in checkpointers:
        for name in ("save", "async_save", "restore"):
            if hasattr(handler, name):
                monkeypatch.setattr(handler, name, refuse)
    monkeypatch.setattr(ts, "open", refuse)
    monkeypatch.setattr(ts.KvStore, "open", refuse)


def test_arrays_do_not_go_through_orbax(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Orbax's array serialisation and deserialisation made to raise, ours still saves and restores."""
    refuse_orbax(monkeypatch)
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    state = {"x": jax.device_put(np.arange(64.0, dtype=np.float32), sharding), "n": np.arange(5), "s": "text", "i": 7}
    for args, back in [
        (Save(state), Restore(state)),
        (ocp.args.PyTreeSave(state), ocp.args.PyTreeRestore(state)),
        (Save(state), None),
    ]:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        with ec.CheckpointManager(directory) as m:
            m.save(0, args=args)
            m.wait_until_finished()
            got = m.restore(0, args=back)
        np.testing.assert_array_equal(got["x"], state["x"])
        assert got["x"].sharding == sharding
        np.testing.assert_array_equal(got["n"], state["n"])
        assert (got["s"], got["i"]) == ("text", 7)
    with pytest.raises(AssertionError, match="array engine was used"):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "stock", args=ocp.args.PyTreeSave(state))


class RaisingClient:
    """JAX's coordination client, which raises on the main thread while `armed`."""

    def __init__(self, client: Any):
        self._client, self.armed, self.calls = client, False, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.armed and threading.current_thread() is threading.main_thread():
                raise AssertionError(f"{name} was called on the training thread")
            return found(*args, **kwargs)

        return call


def save_with_raising_client(directory: str) -> Any:
    from jax._src import distributed

    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))  # starts the backend
    client = RaisingClient(distributed.global_state.client)
    distributed.global_state.client = client
    assert ocp.multihost.get_jax_distributed_client() is client
    with ec.CheckpointManager(directory) as m:
        before = client.calls
        for epoch in range(3):
            state = {"x": place(np.full(64, epoch, np.float32), sharding), "n": np.arange(3)}
            client.armed = True
            assert m.save(epoch, args=Save(state))
            m.is_saving_in_progress()
            m.latest_step()
            m.check_for_errors()
            client.armed = False
        m.wait_until_finished()
        client.armed = True
        try:
            client.key_value_set("control", "x")
        except AssertionError:
            pass
        else:
            raise RuntimeError("the control did not raise")
        client.armed = False
        return list(m.all_steps()), client.calls > before


@pytest.mark.slow
def test_save_does_not_talk_to_the_coordinator_on_the_training_thread(tmp_path: pathlib.Path) -> None:
    """With JAX's coordination client made to raise there, save() returns and the epochs commit."""
    results = run_worker(
        "tests.faults.test_calls_of_a_save:save_with_raising_client", {"directory": str(tmp_path / "run")}, 2
    )
    assert results == [[[0, 1, 2], True]] * 2
