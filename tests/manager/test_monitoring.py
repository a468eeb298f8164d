"""The events of `jax.monitoring`: which there are, beside those of stock Orbax, and that no listener harms a save."""

from __future__ import annotations

import collections
import contextvars
import importlib.metadata
import logging
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _monitoring
from epochckpt.errors import DamagedError, SaveError
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.processes import run_worker
from tests.support.taps import NO_SPACE, eventually

DOCS = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "monitoring.md"
WAIT_SECS = 30.0
Save, Restore, Options = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.CheckpointManagerOptions


class Events:
    """What listeners have heard, by name: (value, tags) of each event; the value of a mere event is None."""

    def __init__(self) -> None:
        self.heard: dict[str, list[tuple[Any, Mapping[str, Any]]]] = collections.defaultdict(list)
        self.threads: set[threading.Thread] = set()

    def __getitem__(self, name: str) -> list[tuple[Any, Mapping[str, Any]]]:
        return self.heard.get(name, [])

    def event(self, name: str, **tags: Any) -> None:
        self.figure(name, None, **tags)

    def figure(self, name: str, value: Any, **tags: Any) -> None:
        if name.startswith(("/jax/orbax/", "/jax/checkpoint/", "/epochckpt/")):
            self.heard[name].append((value, tags))
            self.threads.add(threading.current_thread())

    def names(self) -> set[str]:
        """The names heard so far, which then are forgotten."""
        found = set(self.heard)
        self.heard.clear()
        return found


@pytest.fixture
def events(patience: Callable[..., None]) -> Iterator[Events]:
    """What is heard; calls end when it has been heard, however long that takes."""
    patience(delivery_secs=WAIT_SECS)
    found = Events()
    with listening(found.event, found.figure):
        yield found


class listening:
    """Listeners of events, and of durations and numbers, for the time of a `with` block."""

    def __init__(self, event: Callable[..., None], figure: Callable[..., None]):
        self._event, self._figure = event, figure

    def __enter__(self) -> None:
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._figure)
        jax.monitoring.register_scalar_listener(self._figure)

    def __exit__(self, *_: object) -> None:
        _monitoring.deliver()
        jax.monitoring.unregister_event_listener(self._event)
        jax.monitoring.unregister_event_duration_listener(self._figure)
        jax.monitoring.unregister_scalar_listener(self._figure)


STATE = {"w": jnp.arange(1000.0), "b": np.ones(3), "step": 7}


def use(manager: Any) -> None:
    """Saves and restores once."""
    with manager:
        manager.save(1, args=Save(STATE))
        manager.wait_until_finished()
        manager.restore(1, args=Restore(STATE))


def documented(heading: str) -> set[str]:
    """The names in the table below a heading of the page on monitoring."""
    section = DOCS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(/[^`]+)`", section, re.MULTILINE))


def test_most_names_of_a_stock_save_and_restore_are_emitted(tmp_path: pathlib.Path, events: Events) -> None:
    """Of the newest Orbax nine tenths; the others, and those of ours, are those that the documentation lists."""
    use(ocp.CheckpointManager(tmp_path / "stock"))
    stock = events.names()
    use(ec.CheckpointManager(tmp_path / "ours"))
    ours = events.names()
    missing = documented("What Orbax emits, and epochckpt does not")
    assert stock - ours <= missing, sorted(stock - ours - missing)
    assert ours <= documented("Events"), sorted(ours - documented("Events"))
    if importlib.metadata.version("orbax-checkpoint") == "0.12.8":
        assert stock - ours == missing
        assert (len(stock), len(stock & ours)) == (62, 56)


def test_every_name_that_is_documented_is_emitted_somewhere() -> None:
    """The table has no event that nothing emits."""
    package = pathlib.Path(ec.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    whole = set(re.findall(r'"(/(?:jax|epochckpt)/[^"{}]+)"', source))
    parts = {name for name in documented("Events") if name not in whole}
    for name in parts:  # made of a prefix and an end
        assert any(f'{name[cut:]}"' in source for cut in range(12, len(name) - 5)), name


def test_the_events_of_a_save_say_what_happened(tmp_path: pathlib.Path, events: Events) -> None:
    """Figures agree with the results of saves and the sizes of files; two hosted nodes are told apart."""
    with ec.CheckpointManager(tmp_path, node=("a", "b"), options=Options(max_to_keep=1)) as manager:
        calls, began = [], time.monotonic()
        for epoch in (1, 2):
            called = time.monotonic()
            manager.save(epoch, args=Save(STATE))
            calls.append(time.monotonic() - called)
        manager.wait_until_finished()
        lasted = time.monotonic() - began
        first, second = manager.pop_save_results()
        blocked = [secs for secs, _ in events["/epochckpt/write/blocked_secs"]]
        assert all(0 < secs <= call for secs, call in zip(blocked, calls, strict=True))
        assert events["/jax/orbax/write/success"] == [(None, {})] * 2
        totals = [secs for secs, _ in events["/jax/orbax/write/async/total_duration_secs"]]
        assert all(blocked[n] < totals[n] <= lasted for n in range(2))
        assert all(0 < result.secs <= lasted for result in (first, second))
        nodes = [tags["node"] for _, tags in events["/epochckpt/write/node_secs"]]
        assert nodes == ["a", "b", "a", "b"]
        size = manager.status(2).nbytes / 2**30
        assert 0 < events["/jax/orbax/write/gbytes"][1][0] <= size
        assert len(events["/jax/orbax/write/directory_creation_secs"]) == 4
        assert [number for number, _ in events["/jax/checkpoint/write/old_steps_examined_count"]] == [1, 2]
        assert len(events["/jax/orbax/checkpoint_manager/standard_checkpoint_deleter/duration"]) == 1
        assert len(events["/jax/orbax/checkpoint_manager/time_between_consecutive_saves_secs"]) == 1
        assert [size for size, _ in events["/jax/orbax/write/sharded_array_gb"]] == [4000 / 2**30] * 2
        manager.verify(2)
        manager.rollback_to(2)
        _monitoring.deliver()
        assert len(events["/epochckpt/verify_secs"]) == len(events["/epochckpt/rollback"]) == 1


@pytest.mark.long
def test_replicated_arrays_are_told_from_sharded_ones(tmp_path: pathlib.Path, events: Events) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec
    state = {
        "cut": jax.device_put(jnp.zeros((4, 4)), jax.sharding.NamedSharding(mesh, spec("x", "y"))),
        "both": jax.device_put(jnp.zeros((8, 4)), jax.sharding.NamedSharding(mesh, spec(("y", "x")))),
        "half": jax.device_put(jnp.zeros((2, 2)), jax.sharding.NamedSharding(mesh, spec(None, "y"))),
    }
    for manager in (ocp.CheckpointManager(tmp_path / "stock"), ec.CheckpointManager(tmp_path / "ours")):
        with manager:
            manager.save(1, args=Save(state))
    for kind in ("sharded", "replicated"):
        sizes = [float(size) for size, _ in events[f"/jax/orbax/write/{kind}_array_gb"]]
        half = len(sizes) // 2
        assert sorted(sizes[:half]) == sorted(sizes[half:]) != []


def test_saves_that_are_not_asynchronous_have_orbaxs_other_names(tmp_path: pathlib.Path, events: Events) -> None:
    with ec.CheckpointManager(tmp_path, options=Options(enable_async_checkpointing=False)) as manager:
        manager.save(1, args=Save(STATE))
    names = events.names()
    assert {"/jax/orbax/write/start", "/jax/orbax/write/start_time", "/jax/orbax/write/success"} <= names
    assert {"/jax/orbax/write/blocking_duration_secs", "/jax/orbax/write/total_duration_secs"} <= names
    assert not names & {"/jax/orbax/async_checkpointer/init", "/jax/orbax/write/async/start"}


def test_failures_and_fall_backs_are_events(tmp_path: pathlib.Path, events: Events, faults: Faults) -> None:
    """A save on a full disk, damaged epochs, and a restore of nothing but those."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save(STATE))
        manager.wait_until_finished()
        with faults.fail(Store.open_writer, NO_SPACE):
            manager.save(3, args=Save(STATE))
            with pytest.raises(SaveError):
                manager.wait_until_finished()
        assert events["/epochckpt/write/failure"] == [(None, {"kind": "SaveError"})]
        assert len(events["/jax/orbax/write/success"]) == 2

        def damage(epoch: int) -> None:
            (file,) = (tmp_path / str(epoch)).glob("*/default.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

        damage(2)
        manager.restore(None, args=Restore(STATE))
        assert events["/epochckpt/read/fallback"] == [(None, {"kind": "DamagedError"})]
        assert len(events["/jax/orbax/read/success"]) == 1
        assert events["/epochckpt/read/failure"] == []
        damage(1)
        with pytest.raises(DamagedError):
            manager.restore(1, args=Restore(STATE))
        _monitoring.deliver()
        assert events["/epochckpt/read/failure"] == [(None, {"kind": "DamagedError"})]
        assert len(events["/jax/orbax/read/success"]) == 1


def test_a_save_and_a_restore_log_one_line_each(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of either style, beside the entries that Orbax's logger writes, and nothing else."""
    with ec.CheckpointManager(tmp_path) as manager, caplog.at_level(logging.INFO, logger="absl"):
        manager.save(3, args=Save(STATE))
        manager.wait_until_finished()
        manager.restore(None, args=Restore(STATE))
    with ec.training.Checkpointer(tmp_path) as trainer:
        trainer.load(3, STATE)
        with caplog.at_level(logging.INFO, logger="absl"):
            trainer.save(4, STATE)
            trainer.load(None, STATE)
    messages = [record.getMessage() for record in caplog.records]
    lines = [message for message in messages if not message.startswith("{")]
    starts = [f"checkpoint {n} {verb} {tmp_path}" for n in (3, 4) for verb in ("committed to", "restored from")]
    assert [any(line.startswith(start) for line in lines) for start in starts] == [True] * 4
    assert len(lines) == 4, lines
    assert len(messages) == 8, messages


# -- listeners that do harm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_listener_that_raises_is_logged_once_and_harms_nothing(
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
) -> None:
    monkeypatch.setattr(_monitoring, "_failed", set())

    def broken(name: str, *_: Any, **tags: Any) -> None:
        raise kind("my dashboard is away")

    with caplog.at_level(logging.WARNING, logger="absl"), listening(broken, broken):
        with ec.CheckpointManager(tmp_path) as manager:
            for epoch in (1, 2):
                manager.save(epoch, args=Save(STATE))
            manager.wait_until_finished()
            assert manager.all_steps() == [1, 2]
            manager.restore(2, args=Restore(STATE))
        _monitoring.deliver()
    lines = [r.getMessage() for r in caplog.records if "my dashboard is away" in r.getMessage()]
    assert len(lines) == len(set(lines)) > 20
    assert sum("/jax/orbax/write/success:" in line for line in lines) == 1


def test_a_listener_that_hangs_holds_up_events_alone(
    tmp_path: pathlib.Path, events: Events, patience: Callable[..., None]
) -> None:
    """Also where the training thread holds what the listener waits for, and where a signal handler saves then."""
    patience(delivery_secs=0.1)
    lock, saved = threading.RLock(), threading.Event()

    def locked(name: str, *_: Any, **tags: Any) -> None:
        with lock:
            pass

    with ec.CheckpointManager(tmp_path) as manager:

        def handle(*_: Any) -> None:
            manager.save(2, args=Save(STATE), force=True)
            manager.wait_until_finished()
            saved.set()

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            with listening(locked, locked):
                with lock:
                    manager.save(1, args=Save(STATE))
                    signal.raise_signal(signal.SIGUSR1)
                    assert saved.wait(WAIT_SECS)
                    assert manager.all_steps() == [1, 2]
                    manager.restore(2, args=Restore(STATE))
                    assert not events["/jax/orbax/read/success"]
                assert eventually(lambda: bool(events["/jax/orbax/read/success"]))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert len(events["/jax/orbax/write/success"]) == 2
    assert len(events["/jax/orbax/read/success"]) == 1
    assert threading.main_thread() not in events.threads


def test_a_store_that_is_traced_sees_the_span_of_the_save(directory: str, faults: Faults) -> None:
    """The context variables of the caller, in whatever thread the bytes are written."""
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span", default="none")
    seen: set[tuple[str, bool]] = set()

    def trace(call: StoreCall) -> None:
        seen.add((span.get(), threading.current_thread() is threading.main_thread()))

    faults.before(Store.open_writer, trace)
    with ec.CheckpointManager(directory) as manager:
        token = span.set("step 1")
        manager.save(1, args=Save({"w": np.arange(4)}))
        span.reset(token)
        manager.wait_until_finished()
    assert seen == {("step 1", False)}


def worker(directory: str) -> dict[str, Any]:
    found = Events()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {"w": jax.jit(lambda: jnp.arange(8.0), out_shardings=cut)()}
    with listening(found.event, found.figure), ec.CheckpointManager(directory) as manager:
        manager.save(1, args=Save(state))
        manager.wait_until_finished()
        manager.restore(None, args=Restore(state))
    return {name: len(each) for name, each in found.heard.items()}


@pytest.mark.long
def test_what_is_about_the_whole_job_comes_from_the_primary(tmp_path: pathlib.Path) -> None:
    """So that one epoch counts as one; what a process does itself comes from each."""
    primary, other = run_worker(f"{__name__}:worker", {"directory": str(tmp_path)}, num_processes=2)
    for name in ("write/success", "write/async/start", "write/gbytes", "read/success", "write/sharded_array_gb"):
        assert (primary[f"/jax/orbax/{name}"], f"/jax/orbax/{name}" in other) == (1, False), name
    assert primary["/epochckpt/write/node_secs"] == 2
    for name in ("/epochckpt/write/blocked_secs", "/jax/orbax/write/worker/total_duration_secs"):
        assert primary[name] == other[name] == 1
