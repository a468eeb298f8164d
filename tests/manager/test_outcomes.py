"""How saves end, as it is told afterwards: `pop_save_results`, and the metadata handler."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError, SaveError, SaveErrorGroup
from epochckpt.storage import Store
from epochckpt.testing import Faults, Rule, StoreCall
from tests.support.processes import run_worker
from tests.support.taps import NO_SPACE, eventually, hold_writes, is_record

Save = ocp.args.StandardSave
WAIT_SECS = 30.0


def failing(faults: Faults, part: str) -> Rule:
    """Every file with this in its path meets a full disk."""
    return faults.fail(Store.open_writer, NO_SPACE, where=lambda call: part in call.path)


def test_every_save_that_ended_is_told_once_in_order(tmp_path: pathlib.Path, faults: Faults) -> None:
    """Committed and failed ones, with seconds per node; not those that `save` itself refused or skipped."""
    failing(faults, "/2-")
    with ec.CheckpointManager(tmp_path, node=("a", "b")) as manager:
        assert manager.pop_save_results() == []
        for epoch in (1, 2, 3):
            manager.save(epoch, args=Save({"x": np.ones(9)}), force=True)
        with pytest.raises(InvalidArgumentError):
            manager.save(4, args=Save({"x": object()}), force=True)
        assert not manager.save(3, args=Save({"x": 1}), force=True)
        assert not manager.save(3, args=Save({"x": 1}))
        with pytest.raises(SaveError):
            manager.wait_until_finished()
        first, second, third = manager.pop_save_results()
        assert [(o.epoch, o.committed) for o in (first, second, third)] == [(1, True), (2, False), (3, True)]
        assert first.detail == ""
        assert "No space left on device" in second.detail
        assert first.nodes.keys() == third.nodes.keys() == {"a", "b"}
        assert second.nodes == {}
        assert all(0 < secs < o.secs for o in (first, third) for secs in o.nodes.values())
        assert all(0 < o.blocked_secs < o.secs for o in (first, second, third))
        assert manager.pop_save_results() == []
        with pytest.raises(dataclasses.FrozenInstanceError):
            first.epoch = 5  # type: ignore[misc]


@pytest.mark.slow
def test_outcomes_that_nobody_takes_are_bounded(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The newest are kept: here of saves that fail at once, because storage is behind."""
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(max_blocked_secs=1e-6)) as manager:
        with hold_writes(manager):
            for epoch in range(1005):
                manager.save(epoch, args=Save({"x": np.ones(3)}))
            assert [o.epoch for o in manager.pop_save_results()] == list(range(5, 1005))
        with pytest.raises(SaveErrorGroup):
            manager.wait_until_finished()
        assert [o.epoch for o in manager.pop_save_results()] == manager.all_steps() == [0, 1]


class Handler:
    """Notes what it is told; raises where it is asked to."""

    def __init__(self, bad: str = ""):
        self.calls: list[Any] = []
        self._bad = bad
        self.threads: set[int] = set()

    def _note(self, name: str, *args: Any) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((name, *args))
        if name == self._bad:
            raise RuntimeError(f"{name} is broken")

    def set_params(self, db_prefix: str, db_type: str, node_names: list[str], path_prefix: Any, path_type: Any) -> None:
        self._note("set_params", db_prefix, db_type, node_names, path_prefix, path_type)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        return user_epoch

    def write(self, epoch: int) -> None:
        self._note("write", epoch)

    def report(self, action_name: str, all_stats: Any) -> None:
        self._note("report", action_name, {n: secs > 0 for n, secs in all_stats.items()})

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return True


@pytest.mark.parametrize("bad", ["", "set_params", "write", "report"])
def test_a_metadata_handler_hears_of_nodes_and_commits(directory: str, bad: str) -> None:
    """In Caffe2's order, in the background, once of each; one that raises harms no save and hears the rest."""
    handler = Handler(bad)
    with ec.CheckpointManager(directory, metadata_handler=handler) as manager:
        assert manager.metadata_handler is handler
        manager.set_nodes(["a", "b"])
        assert handler.calls == []
        for epoch in (0, 1):
            assert manager.save(epoch, args=Save({"x": np.ones(3)}))
        manager.wait_until_finished()
        where = directory.rstrip("/")
        assert handler.calls == [
            ("set_params", where, "epochckpt", ["a", "b"], None, None),
            ("write", 0),
            ("report", "checkpoint_save", {"a": True, "b": True}),
            ("write", 1),
            ("report", "checkpoint_save", {"a": True, "b": True}),
        ]
        assert threading.get_ident() not in handler.threads
        assert manager.all_steps() == [0, 1]
        assert manager.verify(1).ok


def test_a_handler_hears_nothing_of_saves_that_failed_nor_of_reading(tmp_path: pathlib.Path, faults: Faults) -> None:
    """Only commits are written down; a read-only manager tells nothing."""
    handler = Handler()
    with ec.CheckpointManager(tmp_path, metadata_handler=handler) as manager:
        with failing(faults, "/0-"):
            manager.save(0, args=Save({"x": np.ones(3)}))
            with pytest.raises(SaveError):
                manager.wait_until_finished()
        assert handler.calls == []
    silent = Handler()
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ec.CheckpointManager(tmp_path, options=options, metadata_handler=silent) as manager:
        assert manager.metadata_handler is silent
    assert silent.calls == []


def test_a_slow_handler_holds_up_no_save(tmp_path: pathlib.Path) -> None:
    """The next epochs are committed while it still works on the first."""
    going, go_on = threading.Event(), threading.Event()

    class Slow(Handler):
        def write(self, epoch: int) -> None:
            going.set()
            assert go_on.wait(WAIT_SECS)
            super().write(epoch)

    handler = Slow()
    with ec.CheckpointManager(tmp_path, metadata_handler=handler) as manager:
        for epoch in range(3):
            manager.save(epoch, args=Save({"x": 1}))
        manager.components.saves.queue.drain()
        assert manager.all_steps() == [0, 1, 2]
        assert going.wait(WAIT_SECS)
        assert [call[0] for call in handler.calls] == ["set_params"]
        go_on.set()
        manager.wait_until_finished()
        assert [call[1] for call in handler.calls if call[0] == "write"] == [0, 1, 2]


def test_a_handler_that_hangs_is_waited_for_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bounded by the timeout of a save; then it is given up with a warning, and the manager can be closed."""
    release = threading.Event()

    class Hanging(Handler):
        def write(self, epoch: int) -> None:
            release.wait(WAIT_SECS)

    storage = ec.StorageOptions(save_timeout_secs=2)
    began = time.monotonic()
    with ec.CheckpointManager(tmp_path, metadata_handler=Hanging(), storage=storage) as manager:
        for epoch in range(3):
            manager.save(epoch, args=Save({"x": 1}))
            manager.wait_until_finished()
    assert time.monotonic() - began < WAIT_SECS / 2
    release.set()
    assert sum("it has not returned for 2 s" in record.getMessage() for record in caplog.records) == 1


def test_what_is_no_metadata_handler_is_refused(tmp_path: pathlib.Path) -> None:
    """By the names of what is missing, before anything is written."""

    class Partial:
        write = report = set_params = print
        cp_accessible = "no method"

    with pytest.raises(InvalidArgumentError, match="a Partial without last_epoch, cp_accessible"):
        ec.CheckpointManager(tmp_path / "run", metadata_handler=Partial())
    assert not (tmp_path / "run").exists()


def hear_in_a_job(directory: str) -> dict[str, Any]:
    """What the handler and the outcomes of each process of a job say."""
    handler = Handler()
    with ec.CheckpointManager(directory, metadata_handler=handler) as manager:
        sharding = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.P("x"))
        state = jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=sharding)()
        manager.save(5, args=Save({"w": state}))
        manager.wait_until_finished()
        (outcome,) = manager.pop_save_results()
        return {"calls": handler.calls, "nodes": sorted(outcome.nodes), "committed": outcome.committed}


@pytest.mark.slow
def test_in_a_job_only_the_primary_tells(tmp_path: pathlib.Path) -> None:
    """With the seconds of every node; the outcome is known on all processes."""
    first, second = run_worker("tests.manager.test_outcomes:hear_in_a_job", {"directory": str(tmp_path)}, 2)
    names = ["process_0", "process_1"]
    assert first["calls"] == [
        ["set_params", str(tmp_path), "epochckpt", names, None, None],
        ["write", 5],
        ["report", "checkpoint_save", dict.fromkeys(names, True)],
    ]
    assert second["calls"] == []
    assert first["nodes"] == names
    assert first["committed"]
    assert second["committed"]


@pytest.mark.slow
def test_an_error_is_logged_before_the_manager_that_it_leaves_waits(
    tmp_path: pathlib.Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait may be for a process that has died, and JAX may end this one meanwhile. What it waits for is named."""
    logged: list[bool] = []

    def said() -> bool:
        return "ZeroDivisionError: no such luck" in caplog.text and "for the save of checkpoint 3" in caplog.text

    def waiting(call: StoreCall) -> None:
        logged.append(eventually(said))

    def save_and_fail() -> None:
        with ec.CheckpointManager(tmp_path) as m:
            faults.before(Store.create, waiting, where=lambda call: is_record(call.path))
            m.save(3, args=Save({"w": 1}))
            raise ZeroDivisionError("no such luck")

    with pytest.raises(ZeroDivisionError):
        save_and_fail()
    assert logged == [True]
    with ec.CheckpointManager(tmp_path) as m:
        assert m.all_steps() == [3]
