"""`CheckpointManager` in one process: every promise on POSIX folders and on a store without rename."""

from __future__ import annotations

import ast
import datetime
import inspect
import logging
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

import epochckpt as ec
from epochckpt import errors
from epochckpt._units import nbytes
from epochckpt.errors import (
    DamagedError,
    EpochExistsError,
    EpochNotFoundError,
    InvalidArgumentError,
    LateNodesError,
    NotACheckpointDirectoryError,
    SaveError,
    SaveErrorGroup,
    UncertainError,
    UnfinishedError,
    UnsupportedError,
)
from epochckpt.format import paths
from epochckpt.saving import memory
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.managers import traced_memory
from tests.support.passing_time import SlowSave, passing
from tests.support.taps import (
    NO_SPACE,
    WAIT_SECS,
    calls_of,
    eventually,
    fail_writes,
    faults_of,
    hold_commits,
    hold_writes,
    is_data,
    is_record,
    store_of,
)

pytestmark = pytest.mark.usefixtures("faults")
MOMENT_SECS = 0.2  # how long something that must not happen is waited for
Options = ocp.CheckpointManagerOptions


@pytest.fixture
def m(directory: str) -> Iterator[ec.CheckpointManager]:
    """An open manager. The test says itself what it expects of `close`."""
    manager = ec.CheckpointManager(directory)
    yield manager
    try:
        manager.close()
    except SaveError as error:
        pytest.fail(f"a failure nobody asked about: {error}")


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": jnp.full((4, 2), value), "b": np.full(3, value), "n": 1}


def save(m: ec.CheckpointManager, step: int, value: float | None = None, **kwargs: Any) -> bool:
    return m.save(step, args=ocp.args.StandardSave(state(float(step) if value is None else value)), **kwargs)


def save_all(m: ec.CheckpointManager, steps: Any, **kwargs: Any) -> None:
    for step in steps:
        assert save(m, step, **kwargs)
        m.wait_until_finished()


def read_only(directory: str) -> ec.CheckpointManager:
    return ec.CheckpointManager(directory, options=Options(read_only=True))


def in_thread(call: Callable[[], Any]) -> tuple[threading.Event, list[Any]]:
    """Runs a call beside the test; the event is set when it has returned."""
    done, out = threading.Event(), []

    def job() -> None:
        try:
            out.append(call())
        finally:
            done.set()

    threading.Thread(target=job, daemon=True).start()
    return done, out


# -- Orbax's interface ---------------------------------------------------------------------------------------------


def test_it_is_an_orbax_manager_with_all_its_members() -> None:
    """Every member of the abstract class exists, is concrete, and takes what Orbax's own manager takes."""
    base = ocp.AbstractCheckpointManager
    assert base in ec.CheckpointManager.__mro__
    assert not getattr(ec.CheckpointManager, "__abstractmethods__", None)
    members = [n for n in dir(base) if not n.startswith("_")]
    assert {"save", "restore", "all_steps", "directory"} <= set(members)
    for name in members:
        theirs, ours = getattr(ocp.CheckpointManager, name), getattr(ec.CheckpointManager, name)
        assert isinstance(theirs, property) == isinstance(ours, property), name
        if not isinstance(theirs, property):
            check_signature(name, theirs, ours)


@pytest.mark.parametrize("name", ["__init__", "save", "restore"])
def test_the_parameters_are_those_of_orbax_in_its_order(name: str) -> None:
    """What is positional in Orbax's own manager is so here, with the same name, place and default."""
    check_signature(name, getattr(ocp.CheckpointManager, name), getattr(ec.CheckpointManager, name))


def check_signature(name: str, theirs: Any, ours: Any) -> None:
    expected = list(inspect.signature(theirs).parameters.values())
    found = list(inspect.signature(ours).parameters.values())
    assert [p.name for p in found[: len(expected)]] == [p.name for p in expected], name
    for a, b in zip(found, expected, strict=False):
        assert a.kind == b.kind, (name, a)
        assert a.default == b.default or b.default is inspect.Parameter.empty, (name, a)
    assert all(p.default is not inspect.Parameter.empty for p in found[len(expected) :]), name


def test_legacy_arguments_are_refused_by_name(directory: str, m: ec.CheckpointManager) -> None:
    """Orbax's legacy forms, where no handler says what they mean, say what to use instead; nothing is begun."""
    with pytest.raises(InvalidArgumentError, match="checkpointers"):
        ec.CheckpointManager(directory, ocp.PyTreeCheckpointHandler())
    with pytest.raises(UnsupportedError, match="args="):
        m.save(0, state())
    with pytest.raises(InvalidArgumentError, match="args="):
        m.save(0)
    with pytest.raises(InvalidArgumentError, match="by name"):
        m.save(0, ocp.args.StandardSave(state()))
    for step in (-1, 1.5, "1", None, True):
        with pytest.raises(InvalidArgumentError, match="epoch"):
            save(m, step, 0.0)  # type: ignore[arg-type]
    assert save(m, np.int64(0))  # type: ignore[arg-type]
    m.wait_until_finished()
    assert m.all_steps() == [0]


# -- saving and restoring ------------------------------------------------------------------------------------------


def test_what_is_saved_is_restored_by_any_manager(directory: str, m: ec.CheckpointManager) -> None:
    """By the one that saved, by one opened later, by a read-only one, and through `directory=`."""
    assert m.all_steps() == []
    assert m.latest_step() is None
    assert m.best_step() is None
    save_all(m, [0, 5])
    assert m.all_steps() == [0, 5]
    assert m.latest_step() == m.best_step() == 5
    with read_only(directory) as other:
        assert other.all_steps() == [0, 5]
        for manager in (m, other):
            for step in (0, 5):
                got = manager.restore(step, args=ocp.args.StandardRestore(state()))
                assert (got["w"] == step).all()
                assert (got["b"] == step).all()
            assert (manager.restore(None)["w"] == 5).all()
    with ec.CheckpointManager(f"memory://{uuid.uuid4().hex}/") as empty:
        assert (empty.restore(0, directory=directory)["w"] == 0).all()
        assert (empty.restore(None, directory=directory)["w"] == 5).all()


def test_a_save_in_flight_is_not_an_epoch(directory: str, m: ec.CheckpointManager) -> None:
    """Until its record is there, nobody sees it: not this manager, not another; then everybody does."""
    save_all(m, [0])
    tap = hold_commits(m)
    assert save(m, 1)
    assert tap.reached.wait(WAIT_SECS)
    assert m.is_saving_in_progress()
    assert m.latest_step() == 0
    assert m.status(1).state == "saving"
    assert m.all_steps() == [0]
    assert read_only(directory).all_steps() == [0]
    with pytest.raises(EpochNotFoundError):
        read_only(directory).restore(1)
    tap.let_go()
    assert m.restore(1)  # waits for it
    assert not m.is_saving_in_progress()
    assert m.all_steps() == read_only(directory).all_steps() == [0, 1]


def test_latest_is_the_greatest_number_not_the_last_saved(m: ec.CheckpointManager) -> None:
    """A forced save of an older epoch does not become the latest."""
    save_all(m, [5])
    assert not save(m, 3)
    assert save(m, 3, force=True)
    m.wait_until_finished()
    assert m.all_steps() == [3, 5]
    assert m.latest_step() == 5


def test_an_existing_epoch_is_not_saved_again(m: ec.CheckpointManager) -> None:
    """Without force: False. With force: an error that is Orbax's too, and says that waiting may be enough."""
    assert save(m, 0)
    m.wait_until_finished()
    assert not save(m, 0, 9.0)
    with pytest.raises(StepAlreadyExistsError, match=r"wait_until_finished\(\)") as caught:
        save(m, 0, 9.0, force=True)
    assert isinstance(caught.value, EpochExistsError)
    assert "delete()" not in str(caught.value)
    assert (m.restore(0)["w"] == 0).all()


@pytest.mark.parametrize("waits", [ec.CheckpointManager.wait_until_finished, ec.CheckpointManager.reload])
def test_the_usual_end_of_a_loop_saves_the_last_epoch_once(
    m: ec.CheckpointManager, waits: Callable[[ec.CheckpointManager], None], caplog: pytest.LogCaptureFixture
) -> None:
    """`latest_step() != step` is true while that very save is in flight, and may be of what was committed meanwhile.

    The forced save returns False then, and a line says why; once the caller has waited, it is an error again.
    """
    caplog.set_level(logging.INFO, logger="absl")
    tap = hold_commits(m)
    assert save(m, 0)
    assert m.latest_step() != 0
    assert not save(m, 0, 9.0, force=True)
    assert "checkpoint 0 is not saved again, because this manager is saving it now" in caplog.text
    tap.let_go()
    assert eventually(lambda: not m.is_saving_in_progress())
    assert m.latest_step() == 0
    assert not save(m, 0, 9.0, force=True)
    assert "because this manager has just saved it" in caplog.text
    waits(m)
    with pytest.raises(EpochExistsError):
        save(m, 0, 9.0, force=True)
    assert (m.restore(0)["w"] == 0).all()


def test_a_failed_save_is_not_taken_for_one_that_goes_on(
    m: ec.CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Every process decides alike, whether it has heard of the failure or not: after the wait it can be tried again."""
    tap = fail_writes(m)
    assert save(m, 0)
    assert eventually(lambda: not m.is_saving_in_progress())
    tap.remove()
    assert not save(m, 0, force=True)
    assert "has just tried to: that save is failed (" in caplog.text
    with pytest.raises(SaveError):
        m.wait_until_finished()
    assert save(m, 0, force=True)
    m.wait_until_finished()
    assert m.all_steps() == [0]


def test_an_epoch_of_another_run_or_session_is_still_an_error(directory: str) -> None:
    """Also where the session that finds it saves other epochs."""
    with ec.CheckpointManager(directory) as m:
        save_all(m, [0])
    with ec.CheckpointManager(directory) as m:
        assert save(m, 1)
        with pytest.raises(EpochExistsError, match="checkpoint 0 exists"):
            save(m, 0, force=True)


def test_a_missing_epoch_lists_those_that_exist(directory: str, m: ec.CheckpointManager) -> None:
    """An explicit epoch never falls back; the message says what there is."""
    with pytest.raises(EpochNotFoundError, match="no committed checkpoint"):
        m.restore(None)
    save_all(m, [2, 4])
    assert m.metrics(3) is None  # as in Orbax
    for call in (m.restore, m.metadata, m.item_metadata, m.nodes, m.delete, m.rollback_to, m.verify):
        with pytest.raises(EpochNotFoundError, match=r"no checkpoint 3; committed: 2, 4") as caught:
            call(3)
        assert caught.value.available == [2, 4]
        assert isinstance(caught.value, FileNotFoundError)


def test_a_damaged_newest_epoch_falls_back_only_if_none_was_named(m: ec.CheckpointManager) -> None:
    """`restore(None)` takes the older one and `latest_step` follows; `restore(1)` raises."""
    save_all(m, [0, 1])
    damage(m, 1)
    with pytest.raises(DamagedError, match=r"default\.safetensors"):
        m.restore(1)
    assert (m.restore(None)["w"] == 0).all()
    assert m.latest_step() == 0
    assert save(m, 1, 7.0)
    m.wait_until_finished()
    assert (m.restore(None)["w"] == 7).all()


def damage(m: ec.CheckpointManager, epoch: int) -> str:
    """Flips a bit of an epoch's data; returns the file's path."""
    store = store_of(m)
    record = m.components.directory.epoch_directory.read_record(epoch)
    path = f"{m.components.directory.epoch_directory.folder(epoch)}/{record.path(0, record.nodes[0].files[0])}"
    with store.open_reader(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    data[-5] ^= 1
    store.remove(path)
    store.create(path, bytes(data))
    return path


def test_metrics_and_metadata(directory: str, m: ec.CheckpointManager) -> None:
    """JSON kept with an epoch, NaN and NumPy scalars included; in Orbax's StepMetadata too."""
    metrics = {"loss": np.float32(0.5), "bad": math.nan, "list": [1, None, "x", -math.inf], "n": jnp.int32(3)}
    save(m, 0, metrics=metrics, custom_metadata={"commit": "abc", "deep": {"a": [1.5]}})
    save(m, 1)
    m.wait_until_finished()
    for manager in (m, read_only(directory)):
        got = manager.metrics(0)
        assert got["loss"] == 0.5
        assert math.isnan(got["bad"])
        assert got["list"] == [1, None, "x", -math.inf]
        assert got["n"] == 3
        assert manager.metrics(1) is None
        found = manager.metadata(0)
        assert isinstance(found, ocp.metadata.StepMetadata)
        assert found.custom_metadata == {"commit": "abc", "deep": {"a": [1.5]}}
        assert found.metrics["loss"] == 0.5
        assert found.init_timestamp_nsecs <= found.commit_timestamp_nsecs
    assert save(m, 3, metrics={"loss": 0.25, "model": object()})  # without best_fn what is no JSON is left out
    m.wait_until_finished()
    assert m.metrics(3) == {"loss": 0.25}
    with pytest.raises(InvalidArgumentError, match="custom_metadata"):
        save(m, 4, custom_metadata={"x": {1: 2}})
    assert not m.is_saving_in_progress()
    assert save(m, 4)


def test_item_metadata_is_a_restore_target(directory: str) -> None:
    """A fresh manager describes what it has never seen, and restores by that description."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    tree = {
        "sharded": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x"))),
        "single": jax.device_put(jnp.arange(3, dtype=jnp.bfloat16), jax.devices()[1]),
        "numpy": np.arange(5),
        "number": 3,
        "text": "x",
        "nothing": None,
        "list": [np.zeros(2), {}],
        "key": jax.random.key(1),
    }
    with ec.CheckpointManager(directory) as m:
        m.save(0, args=ocp.args.StandardSave(tree))
    fresh = read_only(directory)
    found = fresh.item_metadata(0)
    assert found["sharded"].shape == (8,)
    assert found["single"].dtype == jnp.bfloat16
    got = fresh.restore(0, args=ocp.args.StandardRestore(found))
    assert got["sharded"].sharding == tree["sharded"].sharding
    assert got["single"].devices() == {jax.devices()[1]}
    assert isinstance(got["numpy"], np.ndarray)
    for name in ("sharded", "single", "numpy"):
        assert np.asarray(got[name]).tobytes() == np.asarray(tree[name]).tobytes()
    assert (type(got["number"]), got["number"]) == (int, 3)
    assert got["text"] == "x"
    assert got["nothing"] is None
    assert got["list"][1] == {}
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()


def test_root_metadata_is_written_once(directory: str) -> None:
    """For the whole directory, with the first write; a later manager reads it and does not replace it."""
    with ec.CheckpointManager(directory, metadata={"model": "small", "n": 3}) as m:
        assert m.metadata().custom_metadata == {"model": "small", "n": 3}
        assert read_only(directory).metadata().custom_metadata == {}
        m.claim()
    with ec.CheckpointManager(directory, metadata={"model": "other"}) as m:
        m.claim()
        found = m.metadata()
        assert isinstance(found, ocp.metadata.RootMetadata)
        assert found.custom_metadata == {"model": "small", "n": 3}


def test_stock_orbax_reads_the_root_metadata(tmp_path: pathlib.Path) -> None:
    """It lies where Orbax keeps it, in its form."""
    with ec.CheckpointManager(tmp_path, metadata={"model": "small"}) as m:
        m.claim()
        assert m.metadata().custom_metadata == {"model": "small"}
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.metadata().custom_metadata == {"model": "small"}


# -- when ----------------------------------------------------------------------------------------------------------


def test_should_save_decides_from_what_was_asked_for(directory: str) -> None:
    """Not from what is committed, which depends on how far the background is."""
    m = ec.CheckpointManager(directory, options=Options(save_interval_steps=2))
    tap = hold_commits(m)
    assert m.should_save(1), "the first save is always made"
    assert save(m, 1)
    assert not m.should_save(1)
    assert not save(m, 3)
    assert save(m, 4)
    assert not m.should_save(2)
    assert not m.should_save(5)
    assert m.should_save(6)
    assert m.all_steps() == []
    assert not save(m, 5)
    tap.let_go()
    m.close()
    assert m.all_steps() == [1, 4]


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        (Options(save_interval_steps=3), [0, 3, 6]),
        (Options(save_interval_steps=5, save_on_steps=[2, 3]), [0, 2, 3, 5]),
        (Options(should_save_fn=lambda step, last: step in (1, 4) and last != 1), [1]),
        (Options(should_save_fn=lambda step, last: last is None or step - last >= 4), [0, 4]),
    ],
)
def test_the_options_decide_when(directory: str, options: Options, saved: list[int]) -> None:
    """Orbax's interval, steps and function."""
    with ec.CheckpointManager(directory, options=options) as m:
        assert [step for step in range(7) if save(m, step)] == saved
    assert m.all_steps() == saved


def test_sync_mode_returns_after_the_commit(directory: str) -> None:
    """With `enable_async_checkpointing=False` the epoch exists when `save` returns, or `save` raises."""
    with ec.CheckpointManager(directory, options=Options(enable_async_checkpointing=False)) as m:
        assert save(m, 0)
        assert m.latest_step() == 0
        tap = fail_writes(m)
        with pytest.raises(SaveError, match="checkpoint 1"):
            save(m, 1)
        tap.remove()
        assert save(m, 1)
        assert m.all_steps() == [0, 1]


def test_in_sync_mode_a_deletion_that_leaves_files_fails_no_save(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The save that waits for the removal is committed; `close` raises what became of the removal."""
    m = ec.CheckpointManager(tmp_path, options=Options(enable_async_checkpointing=False))
    assert save(m, 0)
    assert save(m, 1)
    tap = faults.fail(Store.remove_tree, NO_SPACE)
    m.delete(0)
    assert save(m, 2)
    assert save(m, 3)
    tap.remove()
    with pytest.raises(errors.RemovalError, match="checkpoint 0 is deleted"):
        m.close()
    assert m.all_steps() == [1, 2, 3]


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_failed_save_is_told_once_and_may_be_tried_again(directory: str, m: ec.CheckpointManager) -> None:
    """`wait_until_finished` raises it; the epoch does not exist; asking again works and leaves nothing behind."""
    save_all(m, [0])
    tap = fail_writes(m)
    assert save(m, 1)
    with pytest.raises(SaveError, match="No space left") as caught:
        m.wait_until_finished()
    assert caught.value.epoch == 1
    m.check_for_errors()
    m.wait_until_finished()
    assert m.latest_step() == 0
    assert m.status(1).state == "failed"
    assert "No space left" in m.status(1).detail
    tap.remove()
    assert m.should_save(1)
    assert save(m, 1)
    m.wait_until_finished()
    assert m.all_steps() == [0, 1]
    assert m.status(1).state == "committed"
    assert m.verify(1).ok


def test_saving_goes_on_after_a_failure(m: ec.CheckpointManager) -> None:
    """The next `save` saves; the old failure is raised by whoever asks."""
    tap = fail_writes(m)
    assert save(m, 0)
    m.components.saves.queue.drain()
    tap.remove()
    assert save(m, 1)
    with pytest.raises(SaveError, match="checkpoint 0"):
        m.wait_until_finished()
    assert m.all_steps() == [1]


@pytest.mark.slow
def test_a_failed_save_keeps_nothing_of_its_snapshot(directory: str, m: ec.CheckpointManager) -> None:
    """Its memory is free when it has ended, without help of the garbage collector; its error still says where."""
    tap = fail_writes(m)
    with traced_memory() as held:
        for step in range(4):
            m.save(step, args=ocp.args.StandardSave({"a": np.zeros(2**20, np.uint8)}))
            m.components.saves.queue.drain()
        assert held() < 2**20
        with pytest.raises(SaveErrorGroup) as caught:
            m.wait_until_finished()
        assert held() < 2**20
    cause = caught.value.errors[0].__cause__
    assert isinstance(cause, OSError)
    assert "write_arrays" in "".join(cause.__notes__)
    tap.remove()


def test_several_failures_are_raised_together_once(m: ec.CheckpointManager) -> None:
    """Oldest first."""
    tap = fail_writes(m)
    for step in range(3):
        assert save(m, step)
    with pytest.raises(SaveErrorGroup, match="3 saves failed") as caught:
        m.wait_until_finished()
    assert [e.epoch for e in caught.value.errors] == [0, 1, 2]
    m.check_for_errors()
    tap.remove()
    assert m.all_steps() == []


def test_a_failed_commit_leaves_no_epoch(directory: str, m: ec.CheckpointManager, faults: Faults) -> None:
    """The record could not be written: nothing is visible, and nothing is in the way of the next try."""
    tap = faults.fail(Store.create, NO_SPACE, where=lambda call: is_record(call.path))
    save(m, 0)
    with pytest.raises(SaveError):
        m.wait_until_finished()
    tap.remove()
    assert read_only(directory).all_steps() == []
    save_all(m, [0])


@pytest.mark.parametrize("committing", [True, False])
def test_a_commit_that_hangs_is_never_called_failed_and_then_takes_place(
    directory: str,
    committing: bool,
    faults: Faults,
    patience: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once the decisive call has begun it is uncertain, and nothing is deleted; given up before, it never comes."""
    patience(verdict_margin_secs=0.0)
    passes = passing(monkeypatch)
    m = ec.CheckpointManager(directory, options=Options(max_to_keep=1))
    save_all(m, [0])
    if committing and store_of(m).atomic_folder_rename:
        tap = faults.hold(Store.rename, where=lambda call: "/1-" in call.path)
    elif committing:
        before = hold_commits(m)
        assert save(m, 1)
        assert before.reached.wait(WAIT_SECS)
        tap = faults.hold(Store.replace, where=lambda call: call.path == paths.HEAD)
        before.let_go()
    else:
        tap = hold_writes(m)
    assert (committing and not store_of(m).atomic_folder_rename) or save(m, 1)
    assert tap.reached.wait(WAIT_SECS)
    passes(1e6)
    m.components.saves.queue.drain()
    with pytest.raises(UncertainError if committing else LateNodesError) as caught:
        m.check_for_errors()
    assert ("not committed" in str(caught.value)) is not committing
    assert m.status(1).state == ("uncertain" if committing else "failed")
    assert m.all_steps() == read_only(directory).all_steps() == [0]
    tap.let_go()
    m.wait_until_finished()
    with fail_writes(m):  # a save that ends has found the one before it at its end
        assert save(m, 2)
        with pytest.raises(SaveError, match="No space left"):
            m.wait_until_finished()
    assert m.all_steps() == read_only(directory).all_steps() == ([1] if committing else [0])
    assert m.status(1).state == ("committed" if committing else "failed")
    m.close()


def test_close_raises_what_nobody_was_told(directory: str) -> None:
    """A failure is never lost; a second close is quiet."""
    m = ec.CheckpointManager(directory)
    fail_writes(m)
    save(m, 0)
    with pytest.raises(SaveError):
        m.close()
    m.close()


@pytest.mark.parametrize("error", [ValueError("the user's own"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_error_in_a_with_block_is_what_the_caller_sees(directory: str, error: BaseException) -> None:
    """Also when an earlier save has failed: that is logged, and a note of the error, and does not take its place."""

    def body() -> None:
        with ec.CheckpointManager(directory) as m:
            fail_writes(m)
            save(m, 0)
            raise error

    with pytest.raises(type(error)) as caught:
        body()
    assert caught.value is error
    assert "checkpoint 0 was not committed" in "".join(traceback.format_exception(error))


def test_a_with_block_that_ends_well_raises_what_nobody_was_told(directory: str) -> None:
    """So does one that ends the program with exit code 0: the program claims that all went well."""

    def body(end: Callable[[], None]) -> None:
        with ec.CheckpointManager(directory) as m:
            fail_writes(m)
            save(m, 0)
            end()

    for end in (lambda: None, sys.exit, lambda: sys.exit(0)):
        with pytest.raises(SaveError, match="checkpoint 0 was not committed"):
            body(end)


def test_closing_in_a_finally_shows_both_errors(directory: str) -> None:
    """`finally: manager.close()` raises the failed save in place of the user's error; the output names that, too."""

    def body() -> None:
        m = ec.CheckpointManager(directory)
        try:
            fail_writes(m)
            save(m, 0)
            raise ValueError("the user's own")
        finally:
            m.close()

    with pytest.raises(SaveError) as caught:
        body()
    assert "ValueError: the user's own" in "".join(traceback.format_exception(caught.value))


def test_close_drains_and_can_be_called_again(directory: str) -> None:
    """What was asked for is committed; the closed manager still reads, and refuses to save."""
    with ec.CheckpointManager(directory) as m:
        save(m, 0)
    m.close()
    assert m.all_steps() == [0]
    assert (m.restore(0)["w"] == 0).all()
    with pytest.raises(InvalidArgumentError, match="closed"):
        save(m, 1)


def test_the_third_unwritten_save_waits_for_the_oldest(
    m: ec.CheckpointManager, caplog: pytest.LogCaptureFixture, patience: Callable[..., None]
) -> None:
    """Two may be unwritten; the third returns only after the first is written, and says why it holds training."""
    patience(long_save_secs=0.0)
    tap = hold_writes(m)
    assert save(m, 0)
    assert save(m, 1)
    assert tap.reached.wait(WAIT_SECS)
    done, out = in_thread(lambda: save(m, 2))
    held = "save(2) holds training: it waits for the save of checkpoint 0 (writing), because one save is "
    assert eventually(lambda: said(caplog, held))
    assert not done.wait(MOMENT_SECS)
    tap.let_go()
    assert done.wait(WAIT_SECS)
    assert out == [True]
    assert said(caplog, "save(2) blocked training for ")
    m.wait_until_finished()
    assert m.all_steps() == [0, 1, 2]


def test_slow_commits_hold_the_fourth_save(
    m: ec.CheckpointManager, caplog: pytest.LogCaptureFixture, patience: Callable[..., None]
) -> None:
    """One save is committed, one is written, one waits; no more are on their way, and nothing fails."""
    patience(long_save_secs=0.0)
    tap = hold_commits(m)
    assert [save(m, step) for step in range(3)] == [True] * 3
    assert tap.reached.wait(WAIT_SECS)
    done, out = in_thread(lambda: save(m, 3))
    held = "save(3) holds training: it waits for the save of checkpoint 0 (written, not committed yet)"
    assert eventually(lambda: said(caplog, held))
    assert not done.wait(MOMENT_SECS)
    tap.let_go()
    assert done.wait(WAIT_SECS)
    assert out == [True]
    m.wait_until_finished()
    assert m.all_steps() == [0, 1, 2, 3]


BOUND_SECS = 0.05  # on how long `save` holds training


@pytest.mark.parametrize("obstacle", ["a write", "a commit", "memory"])
def test_a_save_that_storage_is_behind_with_fails_and_training_goes_on(
    obstacle: str, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told at once: to whoever asks for errors, results or the status, and to the log. Older saves go on, the
    policies count it as requested, and once they are done its number may be saved."""
    limit = 100 if obstacle == "memory" else None
    storage = ec.StorageOptions(max_blocked_secs=BOUND_SECS, host_memory_limit_bytes=limit)
    why = {
        "a write": r"checkpoint 0, which began .* ago \(writing\), has to come first, because one save is written at",
        "a commit": r"checkpoint 0, .*not committed yet\), has to come first, because committing is slower than saving",
        "memory": r"checkpoint 0, .*\(writing\), has to come first, because both copies \(80 B and 80 B\)",
    }[obstacle]
    with ec.CheckpointManager(directory, storage=storage) as m:
        tap = hold_commits(m) if obstacle == "a commit" else hold_writes(m)
        late = {"a write": 2, "a commit": 3, "memory": 1}[obstacle]
        for step in range(late):
            assert save_bytes(m, step, 80)
            assert obstacle != "a commit" or m.components.saves.queue.pending()[-1].written.wait(WAIT_SECS)
        assert tap.reached.wait(WAIT_SECS)
        assert save_bytes(m, late, 80)
        with pytest.raises(
            errors.StorageBehindError, match=f"checkpoint {late} .*storage is behind: .*{why}"
        ) as caught:
            m.check_for_errors()
        m.check_for_errors()
        assert (m.status(0).state, m.status(late).state) == ("saving", "failed")
        assert m.status(late).detail == caught.value.reason
        (result,) = m.pop_save_results()
        assert (result.epoch, result.committed, result.behind) == (late, False, True)
        assert BOUND_SECS <= result.blocked_secs <= result.secs
        assert result.detail == caught.value.reason
        assert sum("storage is behind" in r.getMessage() for r in caplog.records if r.levelno == logging.ERROR) == 1
        assert (m.should_save(late), m.should_save(late + 1)) == (False, True)
        assert not save_bytes(m, late, 80)
        tap.let_go()
        m.wait_until_finished()
        assert m.all_steps() == list(range(late))
        assert save_bytes(m, late, 80)
        m.wait_until_finished()
        assert m.all_steps() == list(range(late + 1))
        assert m.status(late).state == "committed"


@pytest.mark.slow
def test_the_arrays_of_a_save_are_not_even_copied_while_storage_is_behind(directory: str) -> None:
    """Nothing of it is held, and no handler is called for it."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(max_blocked_secs=BOUND_SECS)) as m:
        tap = hold_writes(m)
        for step in range(2):
            assert save(m, step)
        assert tap.reached.wait(WAIT_SECS)
        value = np.zeros(2**20, np.uint8)
        with traced_memory() as held:
            for step in range(2, 6):
                assert m.save(step, args=ocp.args.StandardSave({"a": value}))
            assert held() < 2**19
        assert [save_id.epoch for save_id in m.components.saves.queue.pending()] == [0, 1]
        tap.let_go()
        with pytest.raises(SaveErrorGroup) as caught:
            m.wait_until_finished()
        assert [e.epoch for e in caught.value.errors] == [2, 3, 4, 5]
        assert m.all_steps() == [0, 1]


def test_a_signal_handler_that_saves_is_held_no_longer(directory: str, patience: Callable[..., None]) -> None:
    """It comes while `save` waits, and saves the same epoch and another: each is told of once, and none hangs."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(max_blocked_secs=BOUND_SECS)) as m:
        tap, inner = hold_writes(m), list[bool]()
        for step in range(2):
            assert save(m, step)
        assert tap.reached.wait(WAIT_SECS)

        def handle(*_: Any) -> None:
            inner.extend([save(m, 2), save(m, 3)])

        class Interrupts(logging.Handler):
            """Has the signal come when `save` says, for the first time, what it waits for."""

            def emit(self, record: logging.LogRecord) -> None:
                if "save(2) holds training" in record.getMessage():
                    logger.removeHandler(self)
                    signal.raise_signal(signal.SIGUSR1)

        patience(long_save_secs=0.0)
        logger = logging.getLogger("absl")
        interrupts = Interrupts()
        logger.addHandler(interrupts)
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            assert save(m, 2)
        finally:
            logger.removeHandler(interrupts)
            signal.signal(signal.SIGUSR1, before)
        assert inner == [True, True]
        tap.let_go()
        with pytest.raises(SaveErrorGroup) as caught:
            m.wait_until_finished()
        assert [e.epoch for e in caught.value.errors] == [2, 3]
        assert m.all_steps() == [0, 1]


def said(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Whether a warning had this in it."""
    return any(text in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def save_bytes(m: ec.CheckpointManager, step: int, size: int) -> bool:
    return m.save(step, args=ocp.args.StandardSave({"a": np.zeros(size, np.uint8)}))


def test_host_memory_is_bounded(directory: str) -> None:
    """A second copy that would exceed the limit waits until the first is written; one that never fits is refused."""
    storage = ec.StorageOptions(host_memory_limit_bytes=1000)
    with ec.CheckpointManager(directory, storage=storage) as m:
        tap = hold_writes(m)
        with pytest.raises(InvalidArgumentError, match="host_memory_limit_bytes"):
            save_bytes(m, 0, 2000)
        assert save_bytes(m, 0, 800)
        done, _ = in_thread(lambda: save_bytes(m, 1, 300))
        assert not done.wait(MOMENT_SECS)
        tap.let_go()
        assert done.wait(WAIT_SECS)
    assert m.all_steps() == [0, 1]


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The bytes of memory of this machine, which has a single page of it."""
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else sysconf(name))
    memory.of_this_machine.cache_clear()
    yield sysconf("SC_PAGE_SIZE")
    memory.of_this_machine.cache_clear()


def test_host_memory_is_bounded_by_the_machines(
    directory: str, caplog: pytest.LogCaptureFixture, small_machine: int, patience: Callable[..., None]
) -> None:
    """Without a limit of the user's own nothing is refused, but what is larger than half of it is held alone."""
    patience(long_save_secs=0.0)
    with ec.CheckpointManager(directory) as m:
        tap = hold_writes(m)
        assert save_bytes(m, 0, small_machine)
        done, _ = in_thread(lambda: save_bytes(m, 1, small_machine))
        held = f"both copies ({nbytes(small_machine)} and {nbytes(small_machine)}) are more than "
        held += f"{nbytes(small_machine // 2)} of memory"
        assert eventually(lambda: said(caplog, held))
        assert not done.wait(MOMENT_SECS)
        tap.let_go()
        assert done.wait(WAIT_SECS)
    assert m.all_steps() == [0, 1]


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/", {"memory.max": "7000"}, [7000]),
        ("0::/jobs/1", {"jobs/1/memory.max": "max", "jobs/memory.max": "500", "cpu.max": "3"}, [500]),
        ("0::/", {"memory.max": "7000", "../memory.max": "1"}, [7000]),
        ("5:cpu:/\n4:cpu,memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "60"}, [60]),
        ("4:memory:/outside", {"memory/memory.limit_in_bytes": "80", "memory.max": "1"}, [80]),
        ("nonsense", {"memory.max": "1"}, []),
    ],
)
def test_memory_is_that_of_the_container(
    tmp_path: pathlib.Path, own: str, files: dict[str, str], limits: list[int]
) -> None:
    """Control groups of both versions, those around the process's own, and as a container shows them."""
    groups = tmp_path / "groups"
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    assert list(memory.limits(groups, tmp_path / "own")) == limits
    whole = memory.of_this_machine()
    assert whole is not None
    assert whole > 2**28


@pytest.mark.slow
def test_the_interpreter_drains_before_it_ends(tmp_path: pathlib.Path) -> None:
    """A script that saves and ends without `close` has committed."""
    code = (
        "import sys, numpy as np, orbax.checkpoint as ocp, epochckpt as ec\n"
        "m = ec.CheckpointManager(sys.argv[1])\n"
        "for step in range(3):\n"
        "    m.save(step, args=ocp.args.StandardSave({'a': np.full(2_000_000, step)}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    m = read_only(str(tmp_path))
    assert m.all_steps() == [0, 1, 2]
    assert all(m.verify(step).ok for step in range(3))
    assert not list(tmp_path.glob("incarnation-*"))


def test_a_save_logs_one_line_and_an_entry(
    directory: str, m: ec.CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO: a line with epoch, place, size, nodes and times, and the entry that Orbax logs without `logger=`."""
    with caplog.at_level(logging.INFO, logger="absl"):
        save_all(m, [3])
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    lines = [message for message in messages if not message.startswith("{")]
    assert len(lines) == 1, lines
    assert "checkpoint 3 committed" in lines[0]
    assert "1 node" in lines[0]
    (entry,) = [ast.literal_eval(message) for message in messages if message.startswith("{")]
    assert (entry["step"], entry["event_type"], entry["directory"]) == (3, "save", m.root)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="absl"):
        m.restore(3)
    (entry,) = [ast.literal_eval(r.getMessage()) for r in caplog.records if r.getMessage().startswith("{")]
    assert (entry["step"], entry["event_type"]) == (3, "restore")


def test_the_loggers_entry(directory: str) -> None:
    """An Orbax logger is given one entry per commit."""
    entries: list[Any] = []

    class Log:
        def log_entry(self, entry: Any) -> None:
            entries.append(entry)

    with ec.CheckpointManager(directory, logger=Log()) as m:
        save_all(m, [0, 1])
    assert [e["step"] for e in entries] == [0, 1]


# -- what is kept --------------------------------------------------------------------------------------------------


def loss(metrics: Any) -> float:
    return metrics["loss"]


RETENTION = [
    (Options(), range(4), None, [0, 1, 2, 3]),
    (Options(max_to_keep=2), range(5), None, [3, 4]),
    (Options(max_to_keep=1, keep_period=2), range(6), None, [0, 2, 4, 5]),
    (Options(max_to_keep=1, best_fn=loss, best_mode="min"), range(4), [3, 1, 2, 4], [1, 3]),
    (Options(max_to_keep=1, best_fn=loss), range(3), [1, math.nan, math.nan], [0, 2]),
    (Options(max_to_keep=2, best_fn=loss), range(4), [1, 4, 3, 2], [1, 2, 3]),
    (Options(max_to_keep=1, keep_time_interval=datetime.timedelta(days=1)), range(3), None, [0, 2]),
    (Options(preservation_policy=keep.LatestN(2)), range(5), None, [3, 4]),
    (Options(preservation_policy=keep.CustomSteps([1])), range(4), None, [1, 3]),
    (
        Options(preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(1), keep.EveryNSteps(3)])),
        range(6),
        None,
        [0, 3, 5],
    ),
    (Options(preservation_policy=keep.BestN(get_metric_fn=loss, n=1)), range(3), [5, 1, 2], [0, 2]),
]


@pytest.mark.parametrize(("options", "steps", "losses", "kept"), RETENTION)
def test_what_is_kept(directory: str, options: Options, steps: Any, losses: Any, kept: list[int]) -> None:
    """Orbax's policies decide; the newest is always kept, and with `best_fn` the best; storage agrees."""
    with ec.CheckpointManager(directory, options=options) as m:
        for i, step in enumerate(steps):
            assert save(m, step, metrics=None if losses is None else {"loss": losses[i]})
            m.wait_until_finished()
        assert m.all_steps() == kept
        for step in kept:
            assert (m.restore(step)["w"] == step).all()
    assert read_only(directory).all_steps() == kept


def test_best_step_ranks_nan_last_and_ignores_what_has_no_metrics(directory: str) -> None:
    """Of equals the later; a reopened manager, which reads the metrics from storage, agrees."""
    for mode, best in (("max", 3), ("min", 4)):
        options = Options(best_fn=loss, best_mode=mode)
        with ec.CheckpointManager(directory, options=options) as m:
            if mode == "max":
                assert m.best_step() is None
                for step, value in enumerate([math.nan, 2.0, 5.0, 5.0, 1.0, math.nan]):
                    save(m, step, metrics={"loss": value})
                save(m, 6)
                m.wait_until_finished()
            assert m.best_step() == best
        reader = ec.CheckpointManager(directory, options=Options(read_only=True, best_fn=loss, best_mode=mode))
        assert reader.best_step() == best


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (Options(step_prefix="ckpt"), "ckpt_7"),
        (Options(step_format_fixed_length=6), "000007"),
        (Options(step_prefix="e", step_format_fixed_length=3), "e_007"),
        (Options(step_name_format=ocp.path.step.standard_name_format(step_prefix="run")), "run_7"),
    ],
)
def test_names_of_epochs(directory: str, options: Options, name: str) -> None:
    """By Orbax's name formats; a manager with the same format finds them, `follow` too."""
    with ec.CheckpointManager(directory, options=options) as m:
        save_all(m, [7, 12])
        assert m.node_path("process_0", 7).relative_to(m.directory).parts[0] == name
    with ec.CheckpointManager(directory, options=options) as m:
        assert m.all_steps() == [7, 12]
        assert (m.restore(7)["w"] == 7).all()
    assert list(ec.follow(directory, timeout_secs=0.01, interval_secs=0.01, options=options)) == [7, 12]


@pytest.mark.parametrize("folder", ["old", "ttl=1h", ".old epochs", "zur Löschung"])
def test_what_is_to_be_deleted_can_be_kept_elsewhere(directory: str, folder: str) -> None:
    """`todelete_subdir` moves epochs instead of removing them; it may be called as a bucket's rules want it."""
    for epochs in ([0, 1], [2]):  # the second run sweeps what the first one left, and not this
        with ec.CheckpointManager(directory, options=Options(max_to_keep=1, todelete_subdir=folder)) as m:
            save_all(m, epochs)
            assert m.all_steps() == epochs[-1:]
    for epoch in (0, 1):
        assert store_of(m).exists(f"{folder}/{epoch}/epoch.json")


def test_an_explicit_delete_may_take_the_newest(directory: str, m: ec.CheckpointManager) -> None:
    """It is gone for everybody, its bytes too, and its number is free."""
    save_all(m, [0, 1])
    m.delete(1)
    assert m.all_steps() == read_only(directory).all_steps() == [0]
    assert m.status(1).state == "absent"
    m.wait_until_finished()
    assert not list(store_of(m).list("1")) if not store_of(m).atomic_folder_rename else not (m.directory / "1").exists()
    save_all(m, [1])
    assert m.all_steps() == [0, 1]


def test_deleted_under_a_reader(directory: str, m: ec.CheckpointManager, faults: Faults) -> None:
    """A reader that loses its epoch says so; it does not call it damaged."""
    save_all(m, [0, 1])
    reader = read_only(directory)

    def delete(call: StoreCall) -> None:
        if 0 in m.all_steps():
            m.delete(0)
            m.wait_until_finished()

    tap = faults.before(Store.open_reader, delete, where=calls_of(reader, is_data))
    with pytest.raises(ec.EpochDeletedError) as caught:
        reader.restore(0)
    assert caught.value.epoch == 0
    tap.remove()
    assert (reader.restore(1)["w"] == 1).all()


def test_replaced_under_a_reader(directory: str, m: ec.CheckpointManager, faults: Faults) -> None:
    """Another attempt under the same number is another epoch: a reader never mixes the two."""
    save_all(m, [0])
    reader = read_only(directory)

    def replace(call: StoreCall) -> None:
        if m.restore(0)["w"][0, 0] == 0:
            m.delete(0)
            save(m, 0, 5.0, force=True)
            m.wait_until_finished()

    tap = faults.before(Store.open_reader, replace, where=calls_of(reader, is_data))
    with pytest.raises(ec.EpochDeletedError):
        reader.restore(0)
    tap.remove()
    assert (reader.restore(0)["w"] == 5).all()


# -- going back ----------------------------------------------------------------------------------------------------


def test_rollback_sets_later_epochs_aside(directory: str, m: ec.CheckpointManager) -> None:
    """They are gone for everybody and kept under a name of their own; saving goes on from there."""
    save_all(m, range(4))
    m.rollback_to(1)
    assert m.all_steps() == read_only(directory).all_steps() == [0, 1]
    (aside,) = [e.name for e in store_of(m).list("") if e.name.startswith("rolled-back-")]
    assert sorted(e.name for e in store_of(m).list(aside)) == ["2", "3"]
    assert save(m, 2, 9.0)
    m.wait_until_finished()
    assert (m.restore(None)["w"] == 9).all()
    m.rollback_to(2)
    assert m.all_steps() == [0, 1, 2]


def interrupt_rollback(m: ec.CheckpointManager) -> None:
    """Rolls back to 0 and fails after the newest epoch has been moved."""
    tap = faults_of(m).fail(Store.rename, NO_SPACE, where=lambda call: call.path == "2")
    with pytest.raises(UnfinishedError, match="No space left"):
        m.rollback_to(0)
    tap.remove()


def test_an_interrupted_rollback_is_obeyed_and_finished(tmp_path: pathlib.Path) -> None:
    """Readers in between see its end state; the next write completes it."""
    directory = str(tmp_path)
    m = ec.CheckpointManager(directory)
    save_all(m, range(4))
    interrupt_rollback(m)
    reader = read_only(directory)
    assert reader.all_steps() == [0]
    for step in (1, 2, 3):
        with pytest.raises(EpochNotFoundError):
            reader.restore(step)
    assert (reader.restore(None)["w"] == 0).all()
    assert reader.status(2).state == "absent"
    with ec.CheckpointManager(directory) as again:
        assert again.all_steps() == [0]
        again.claim()
        assert again.all_steps() == [0]
        names = [e.name for e in store_of(again).list("")]
        assert "rollback.json" not in names
        (aside,) = [n for n in names if n.startswith("rolled-back-")]
        assert sorted(e.name for e in store_of(again).list(aside)) == ["1", "2", "3"]
        save_all(again, [1])
    assert read_only(directory).all_steps() == [0, 1]


def test_an_interrupted_rollback_can_be_repeated(tmp_path: pathlib.Path) -> None:
    """By the manager that began it."""
    directory = str(tmp_path)
    with ec.CheckpointManager(directory) as m:
        save_all(m, range(4))
        interrupt_rollback(m)
        m.rollback_to(0)
        assert m.all_steps() == [0]
        assert not store_of(m).exists("rollback.json")
        save_all(m, [1])
        assert m.all_steps() == [0, 1]


# -- several items, several managers -------------------------------------------------------------------------------


def test_several_items(directory: str) -> None:
    """A Composite of trees, arrays and JSON; restored whole, in part, and with and without targets."""
    config = {"lr": 0.1, "layers": [1, 2, None], "name": "é"}
    with ec.CheckpointManager(directory, item_names=("state", "config", "mask")) as m:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state(3.0)),
            config=ocp.args.JsonSave(config),
            mask=ocp.args.ArraySave(jnp.arange(4)),
        )
        assert m.save(0, args=args)
        m.wait_until_finished()
        with pytest.raises(InvalidArgumentError, match="other"):
            m.save(1, args=ocp.args.Composite(other=ocp.args.StandardSave(state())))
        with pytest.raises(InvalidArgumentError, match="Composite"):
            save(m, 1)
    for manager in (m, read_only(directory)):
        got = manager.restore(0)
        assert isinstance(got, ocp.args.Composite)
        assert (got.state["w"] == 3).all()
        assert got.config == config
        assert got["mask"].tolist() == [0, 1, 2, 3]
        got = manager.restore(
            0,
            args=ocp.args.Composite(
                config=ocp.args.JsonRestore(), mask=ocp.args.ArrayRestore(), state=ocp.args.StandardRestore(state())
            ),
        )
        assert got.config == config
        assert isinstance(got.mask, jax.Array)
        got = manager.restore(0, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        assert list(got.keys()) == ["config"]
        assert manager.restore_leaves(0, "w", item="state")["w"].tolist() == [[3, 3]] * 4
        assert set(manager.item_metadata(0).keys()) == {"state", "config", "mask"}
        with pytest.raises(InvalidArgumentError, match="no item 'gone'"):
            manager.restore(0, args=ocp.args.Composite(gone=ocp.args.StandardRestore()))
        assert manager.verify(0).ok


def test_reload_sees_what_others_did(directory: str) -> None:
    """A reader's view changes when it asks, not before."""
    with ec.CheckpointManager(directory) as m:
        save_all(m, [0])
        reader = read_only(directory)
        save_all(m, [1])
        m.delete(0)
        assert reader.all_steps() == [0]
        reader.reload()
        assert reader.all_steps() == [1]
        save_all(m, [2])
        assert reader.all_steps(read=True) == [1, 2]


def test_read_only_never_writes(directory: str, m: ec.CheckpointManager) -> None:
    """Neither saves nor deletes nor opens an incarnation; several may be open beside the writer."""
    save_all(m, [0])
    before = sorted(e.name for e in store_of(m).list(""))
    with read_only(directory) as reader, read_only(directory):
        assert not reader.should_save(1)
        assert not save(reader, 1)
        assert not save(reader, 1, force=True)
        reader.delete(0)
        with pytest.raises(InvalidArgumentError, match="read only"):
            reader.rollback_to(0)
        reader.wait_until_finished()
    assert sorted(e.name for e in store_of(m).list("")) == before
    assert m.all_steps(read=True) == [0]
    save_all(m, [1])


def test_status_of_every_kind(directory: str, m: ec.CheckpointManager) -> None:
    """Committed (with nodes and bytes), saving, failed, damaged, absent."""
    save_all(m, [0, 1])
    found = m.status(0)
    assert (found.state, found.epoch, [n.name for n in found.nodes]) == ("committed", 0, ["process_0"])
    assert found.nbytes > 0
    assert m.status(7).state == "absent"
    tap = hold_writes(m)
    save(m, 2)
    assert tap.reached.wait(WAIT_SECS)
    assert (m.status(2).state, m.status(2).detail) == ("saving", "writing")
    tap.let_go()
    m.wait_until_finished()
    tap = fail_writes(m)
    save(m, 3)
    with pytest.raises(SaveError):
        m.wait_until_finished()
    tap.remove()
    assert m.status(3).state == "failed"
    record = "1/epoch.json" if store_of(m).atomic_folder_rename else f"1/{m.save_id(1)}.json"
    store_of(m).remove(record)
    store_of(m).create(record, b"{}")
    assert m.status(1).state == "damaged"
    assert record in m.status(1).detail
    assert m.status(2).state == "committed"


def test_verify_names_file_and_leaf(m: ec.CheckpointManager) -> None:
    """A flipped bit is found, and it is said where."""
    save_all(m, [0, 1])
    path = damage(m, 0)
    found = m.verify(0)
    assert not found.ok
    (problem,) = found.damage
    assert isinstance(problem, DamagedError)
    assert problem.path == path
    assert problem.leaf in ("w", "b")
    with pytest.raises(DamagedError):
        found.raise_if_damaged()
    assert m.verify(1).ok
    assert m.verify(1).nbytes == m.status(1).nbytes


def test_follow_yields_what_is_committed(directory: str) -> None:
    """From the beginning or after an epoch, also of a directory that does not exist yet; ends by its timeout."""
    assert list(ec.follow(directory, timeout_secs=0.01, interval_secs=0.01)) == []
    followed = ec.follow(directory, timeout_secs=WAIT_SECS, interval_secs=0.01)
    with ec.CheckpointManager(directory) as m:
        save_all(m, [0, 1])
        assert [next(followed), next(followed)] == [0, 1]
        tap = hold_commits(m)
        save(m, 5)
        assert tap.reached.wait(WAIT_SECS)
        done, out = in_thread(lambda: next(followed))
        assert not done.wait(MOMENT_SECS)
        tap.let_go()
        assert done.wait(WAIT_SECS)
        assert out == [5]
    assert list(ec.follow(directory, after=0, timeout_secs=0.01, interval_secs=0.01)) == [1, 5]
    assert list(ec.follow(directory, timeout_secs=None, interval_secs=0.01, stop=lambda: True)) == [0, 1, 5]
    with pytest.raises(InvalidArgumentError):
        next(ec.follow(directory, interval_secs=0))


def test_a_slow_reader_that_follows_gets_every_epoch_before_the_end(directory: str) -> None:
    """It looks anew when it has taken longer than the interval; `stop` ends it only when nothing is left."""
    with ec.CheckpointManager(directory) as m:
        save_all(m, [0, 1, 5])
    assert list(ec.follow(directory, interval_secs=1e-6, stop=lambda: True)) == [0, 1, 5]


def test_a_reader_that_is_slower_than_the_training_is_asked_whether_to_stop(directory: str) -> None:
    """It never catches up: each time that it has read an epoch there are two more."""
    found: list[int] = []
    with ec.CheckpointManager(directory) as m:
        save_all(m, [0, 1])
        for epoch in ec.follow(directory, interval_secs=1e-6, stop=lambda: True):
            found.append(epoch)
            assert epoch < 20, "it does not end"
            save_all(m, [2 * epoch + 2, 2 * epoch + 3])
    assert found == [0, 1, 2, 3]


def test_follow_yields_what_is_saved_anew(directory: str) -> None:
    """After a rollback, or a deletion, and only that; a manager that reads has what came in its place."""
    followed = ec.follow(directory, timeout_secs=0.05, interval_secs=0.01)
    with ec.CheckpointManager(directory) as m, read_only(directory) as reader:
        save_all(m, range(4))
        assert [next(followed) for _ in range(4)] == [0, 1, 2, 3]
        assert reader.metrics(2) is None
        m.rollback_to(1)
        save_all(m, [2], metrics={"loss": 2.0})
        assert next(followed) == 2
        assert reader.metrics(2) == {"loss": 2.0}
        assert reader.save_id(2) == m.save_id(2)
        save_all(m, [3, 4])
        assert [next(followed), next(followed)] == [3, 4]
        m.delete(0)  # an older one
        m.delete(4)
        save_all(m, [4])
        assert list(followed) == [4]


def test_follow_passes_over_what_is_deleted(directory: str) -> None:
    """Of the epochs that are kept none is yielded twice; `after` holds for those that are saved anew as well."""
    followed = ec.follow(directory, timeout_secs=0.05, interval_secs=0.01)
    late = ec.follow(directory, after=2, timeout_secs=0.05, interval_secs=0.01)
    with ec.CheckpointManager(directory, options=Options(max_to_keep=2)) as m:
        for epoch in range(5):
            save_all(m, [epoch])
            assert next(followed) == epoch
        assert [next(late), next(late)] == [3, 4]
        m.delete(4)
        m.delete(3)
        assert list(followed) == []
        save_all(m, [2, 3])
        assert list(late) == [3]


# -- directories ---------------------------------------------------------------------------------------------------


def test_a_relative_directory_is_resolved_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing the working directory afterwards changes nothing."""
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with ec.CheckpointManager("run/a") as m:
        monkeypatch.chdir(elsewhere)
        assert str(m.directory) == str(tmp_path / "run" / "a")
        save_all(m, [0])
    assert (tmp_path / "run" / "a" / "0" / "epoch.json").exists()
    assert list(elsewhere.iterdir()) == []


def test_places_that_are_no_directory(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file: said at once. Nothing, where nothing may be created: no epochs, a warning, and nothing is made."""
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(NotACheckpointDirectoryError, match="a file"):
        ec.CheckpointManager(file)
    for options in (Options(create=False), Options(read_only=True)):
        caplog.clear()
        with ec.CheckpointManager(tmp_path / "none", options=options) as m:
            assert m.all_steps() == []
            with pytest.raises(EpochNotFoundError):
                m.restore(None)
        assert f"{tmp_path / 'none'} does not exist, so it has no epochs" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_nodes_and_their_folders(directory: str) -> None:
    """`node=` names this process; an unknown one lists those there are; bad names are refused."""
    with ec.CheckpointManager(directory, node="trainer.0") as m:
        save_all(m, [0])
        assert m.nodes(0) == ["trainer.0"]
        assert "trainer.0" in m.node_path("trainer.0", 0).parts
        with pytest.raises(InvalidArgumentError, match=r"it has: trainer\.0"):
            m.node_path("process_0", 0)
    for bad in ("", "a/b", "x" * 200, "é" * 30):
        with pytest.raises(InvalidArgumentError, match="node name"):
            ec.CheckpointManager(directory, node=bad)


def test_the_snapshots_time_is_not_the_saves_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the device, and for handlers, however long that takes; the save's bound begins after it."""
    passes = passing(monkeypatch)
    with ec.CheckpointManager(tmp_path) as m:
        assert m.save(1, args=SlowSave(lambda: passes(1e6)))
        m.wait_until_finished()
        assert m.latest_step() == 1
