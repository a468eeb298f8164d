"""Following a live run: every epoch, every save under way and every failed one is seen, in order, once."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import watch as cli_watch
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.errors import InvalidArgumentError, SaveError
from epochckpt.inspection import leftovers, text
from epochckpt.inspection import watch as watching
from epochckpt.inspection.rows import COMMITTED, IN_PROGRESS, EpochRow, NodeRow
from epochckpt.inspection.watch import DELETED, FAILED, PRESENT, SAVED, SAVING, Event, Watcher, watch
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from epochckpt.testing.faults import Hold

Save = ocp.args.StandardSave


def epoch_directory(directory: Any) -> EpochDirectory:
    return directory_of(open_store(directory), StepNames.of(ocp.CheckpointManagerOptions()))


def manager_of(directory: Any, **options: Any) -> ec.CheckpointManager:
    return ec.CheckpointManager(directory, node=["a", "b"], options=ocp.CheckpointManagerOptions(**options))


def save(manager: ec.CheckpointManager, epoch: int) -> None:
    manager.save(epoch, args=Save({"w": np.arange(1000.0) + epoch}), metrics={"loss": 1 / (epoch + 1)}, force=True)
    manager.wait_until_finished()


def seen(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.kind, event.row.epoch) for event in events]


def test_epochs_are_seen_as_they_are_committed_and_deleted(directory: str) -> None:
    """On POSIX and on object stores: once each, with all that their records say; those before a look come together."""
    with manager_of(directory) as manager:
        watcher = Watcher(epoch_directory(directory))
        assert watcher.look() == []
        save(manager, 1)
        save(manager, 2)
        events = watcher.look()
        assert seen(events) == [(SAVED, 1), (SAVED, 2)]
        assert events[1].row.metrics == {"loss": 1 / 3}
        assert [node.name for node in events[1].row.nodes] == ["a", "b"]
        assert watcher.look() == []
        manager.delete(1)
        manager.wait_until_finished()
        save(manager, 3)
        assert seen(watcher.look()) == [(DELETED, 1), (SAVED, 3)]
        assert watcher.newest is not None
        assert watcher.newest.epoch == 3


def test_a_save_under_way_is_measured_against_the_epoch_before(
    tmp_path: pathlib.Path, hold_saves: Callable[[], Hold]
) -> None:
    """It is told of when it has written something since the last look, and becomes the epoch, not a failure."""
    with manager_of(tmp_path) as manager:
        watcher = Watcher(epoch_directory(tmp_path))
        save(manager, 1)
        assert seen(watcher.look()) == [(SAVED, 1)]
        hold = hold_saves()
        manager.save(2, args=Save({"w": np.arange(1000.0)}), force=True)
        assert hold.reached.wait(60)
        (event,) = watcher.look()
        assert (event.kind, event.row.epoch) == (SAVING, 2)
        assert {(node.name, node.state) for node in event.row.nodes} == {("a", "written"), ("b", "written")}
        assert event.before is not None
        assert event.before.epoch == 1
        assert event.done is not None
        assert 0.9 < event.done <= 1
        assert watcher.look() == []
        said = "2 of the 2 nodes that began have written"
        head = r"epoch 2 saving +\d+%  [\d.]+ kB of [\d.]+ kB  "
        drawn = {width: text.to_text(cli_watch.under_way(event), width) for width in (60, 80, 200)}
        assert re.match(rf"{head}█{{19,20}} +[▁▂▃▄▅▆▇█]{{2}}  {said}\n", drawn[200])
        assert re.match(rf"{head}█{{9,10}} +[▁▂▃▄▅▆▇█]{{2}}  2 of the .*….* written\n", drawn[80])
        assert re.match(rf"{head}[▁▂▃▄▅▆▇█]{{2}}  2 of t.*….*n\n", drawn[60])
        unmeasured = text.to_text(cli_watch.under_way(dataclasses.replace(event, before=None)), 80)
        assert re.match(rf"epoch 2 saving  [\d.]+ kB  [▁▂▃▄▅▆▇█]{{2}}  {said}\n", unmeasured)
        hold.let_go()
        manager.wait_until_finished()
        assert seen(watcher.look()) == [(SAVED, 2)]


def test_a_save_that_fails_is_seen_to_fail(tmp_path: pathlib.Path, faults: Faults) -> None:
    """Its attempt is there, then gone, and no epoch has come."""
    reached, go_on = threading.Event(), threading.Event()

    def refuse(call: StoreCall) -> None:
        reached.set()
        assert go_on.wait(60)
        raise OSError(errno.ENOSPC, "the disk is full")

    faults.before(Store.create, refuse, where=lambda call: call.path.endswith("/epoch.json"))
    with manager_of(tmp_path) as manager:
        watcher = Watcher(epoch_directory(tmp_path))
        manager.save(4, args=Save({"w": np.arange(10.0)}), force=True)
        assert reached.wait(60)
        assert seen(watcher.look()) == [(SAVING, 4)]
        go_on.set()
        with pytest.raises(SaveError, match="full"):
            manager.wait_until_finished()
        (event,) = watcher.look()
        assert (event.kind, event.row.epoch) == (FAILED, 4)
        assert "not committed" in event.detail
        assert watcher.look() == []


def test_an_attempt_that_falls_silent_has_failed_once(tmp_path: pathlib.Path, hold_saves: Callable[[], Hold]) -> None:
    """After ten minutes without a byte; it is not told again, nor a second time when it is swept away."""
    with manager_of(tmp_path) as manager:
        hold = hold_saves()
        manager.save(4, args=Save({"w": np.arange(10.0)}), force=True)
        assert hold.reached.wait(60)
        now = time.time_ns() + int((leftovers.LIVE_SECS + 60) * 1e9)
        watcher = Watcher(epoch_directory(tmp_path), clock_ns=lambda: now)
        (event,) = watcher.look()
        assert (event.kind, event.row.epoch) == (FAILED, 4)
        assert watcher.look() == []
        hold.let_go()
        manager.wait_until_finished()
        assert seen(watcher.look()) == [(SAVED, 4)]


def test_an_epoch_that_is_saved_anew_is_seen_again(tmp_path: pathlib.Path) -> None:
    """Deleted and saved again between two looks: another attempt under the same number."""
    with manager_of(tmp_path) as manager:
        watcher = Watcher(epoch_directory(tmp_path))
        save(manager, 1)
        assert seen(watcher.look()) == [(SAVED, 1)]
        manager.delete(1)
        manager.wait_until_finished()
        assert seen(watcher.look()) == [(DELETED, 1)]
        save(manager, 1)
        assert seen(watcher.look()) == [(SAVED, 1)]


def test_a_live_run_is_followed_to_its_end(directory: str) -> None:
    """Every epoch in order while another thread saves; it ends with the epoch that was asked for."""
    with manager_of(directory) as manager:
        save(manager, 0)
        events = watch(epoch_directory(directory), until=5, interval_secs=0.01, history=3, timeout_secs=60)
        first = next(events)
        assert (first.kind, first.row.epoch) == (PRESENT, 0)
        run = threading.Thread(target=lambda: [save(manager, epoch) for epoch in range(1, 6)])
        run.start()
        found, ended = [], None
        while ended is None:
            try:
                found.append(next(events))
            except StopIteration as end:
                ended = end.value
        run.join()
    assert ended is True
    assert [epoch for kind, epoch in seen(found) if kind == SAVED] == [1, 2, 3, 4, 5]
    assert not [event for event in found if event.kind == FAILED]


def test_it_ends_where_nothing_comes(tmp_path: pathlib.Path) -> None:
    """After the time without an epoch, saying so; at once if the epoch is already there."""
    with manager_of(tmp_path) as manager:
        save(manager, 3)
    with pytest.raises(StopIteration) as end:
        next(watch(epoch_directory(tmp_path), timeout_secs=0.01, interval_secs=0.01))
    assert end.value.value is False
    with pytest.raises(StopIteration) as end:
        next(watch(epoch_directory(tmp_path), until=2))
    assert end.value.value is True


def test_only_the_newest_that_are_there_are_told(tmp_path: pathlib.Path) -> None:
    """A run of many epochs is not listed at the beginning."""
    with manager_of(tmp_path) as manager:
        for epoch in range(4):
            save(manager, epoch)
    events = list(watch(epoch_directory(tmp_path), until=3, history=2))
    assert seen(events) == [(PRESENT, 2), (PRESENT, 3)]


def test_a_directory_that_does_not_exist_yet_is_waited_for(tmp_path: pathlib.Path) -> None:
    """The first epoch is seen as one that was committed."""
    watcher = Watcher(epoch_directory(tmp_path / "run"))
    assert watcher.look() == []
    with manager_of(tmp_path / "run") as manager:
        assert watcher.look() == []
        save(manager, 0)
    assert seen(watcher.look()) == [(SAVED, 0)]


def test_a_damaged_epoch_is_told_among_the_others(tmp_path: pathlib.Path) -> None:
    """It is seen as what it is, and progress is measured against one that is whole; waiting for it comes to an end."""
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        save(manager, 2)
    (tmp_path / "2" / "epoch.json").write_bytes(b"{}")
    watcher = Watcher(epoch_directory(tmp_path))
    events = watcher.look()
    assert [(event.row.epoch, event.row.state) for event in events] == [(1, "committed"), (2, "damaged")]
    assert [watching.is_damaged(event) for event in events] == [False, True]
    assert watcher.newest is not None
    assert watcher.newest.epoch == 1
    assert "damaged" in text.to_text(cli_watch.line(events[1]), 200)
    assert seen(list(watch(epoch_directory(tmp_path), until=2, history=1))) == [(PRESENT, 2)]


@pytest.mark.parametrize("harm", ["its record", "its data"])
def test_the_good_epoch_that_replaced_a_damaged_one_is_told(tmp_path: pathlib.Path, harm: str) -> None:
    """Also if its whole save fell between two looks: a number is not an epoch, another attempt is another one."""
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        save(manager, 2)
    files = {"its record": "epoch.json", "its data": "*/*.safetensors"}
    (path,) = (tmp_path / "2").glob(files[harm])
    os.truncate(path, 10)
    watcher = Watcher(epoch_directory(tmp_path))
    assert seen(watcher.look()) == [(SAVED, 1), (SAVED, 2)]
    assert watcher.look() == []
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [1]
        save(manager, 2)
    assert [(e.kind, e.row.epoch, e.row.state) for e in watcher.look()] == [(SAVED, 2, "committed")]
    assert watcher.look() == []


def test_an_interval_must_be_positive() -> None:
    """Zero would never let go of the processor."""
    with pytest.raises(InvalidArgumentError, match="interval_secs"):
        next(watch(epoch_directory(f"memory://{uuid.uuid4().hex}/"), interval_secs=0))


def test_a_look_costs_no_record_that_was_read_before(tmp_path: pathlib.Path, faults: Faults) -> None:
    """A run with many epochs is followed by listing it, but for the record of the newest epoch."""
    with manager_of(tmp_path) as manager:
        for epoch in range(3):
            save(manager, epoch)
        directory = epoch_directory(tmp_path)
        watcher = Watcher(directory)
        watcher.look()
        read: list[str] = []

        def is_record(call: StoreCall) -> bool:
            return call.store is directory.store and call.path.endswith("/epoch.json")

        for method in (Store.read, Store.open_reader):
            faults.before(method, lambda call: read.append(call.path), where=is_record)
        save(manager, 3)
        assert seen(watcher.look()) == [(SAVED, 3)]
        assert read == ["2/epoch.json", "3/epoch.json"]
        assert watcher.look() == []
        assert read == ["2/epoch.json", "3/epoch.json", "3/epoch.json"]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_a_narrow_terminal_leaves_out_whole_parts_of_a_line(width: int) -> None:
    """Words of a detail may be shortened; numbers are shown whole or not at all."""
    nodes = tuple(NodeRow(f"process_{i}", 10_000_000, 9.0 if i == 3 else 1.0) for i in range(4))
    row = EpochRow(2, COMMITTED, nodes=nodes, nbytes=536_000_000, started_ns=0, committed_ns=364_000_000)
    row = dataclasses.replace(row, blocked_secs=0.223, metrics={"loss": 0.5}, save_id="a")
    begun = EpochRow(3, IN_PROGRESS, nodes=nodes[:3], nbytes=305_200_000, save_id="b")
    saved = text.to_text(cli_watch.line(Event(SAVED, 0, row), best=True), width)
    parts = ["committed", "536.0 MB in 364 ms", "★ best", "loss 0.5", "blocked 223 ms", "slow node process_3"]
    shown = [part in saved for part in parts]
    assert shown[0]
    assert shown[1:] == [mark in saved for mark in ("536", "best", "0.5", "223", "process")]
    assert all(shown) == (width > 80)
    failed = text.to_text(cli_watch.line(Event(FAILED, 0, begun, row, "it is gone and was not committed")), width)
    assert ("57%  305.2 MB of 536.0 MB" in failed) == ("MB" in failed)
    assert all(len(line) <= width for line in (saved + failed).splitlines())


def test_a_very_narrow_terminal_leaves_out_the_time() -> None:
    """Rather than what has happened."""
    event = Event(SAVED, 0, EpochRow(123, COMMITTED, nbytes=8))
    assert text.to_text(cli_watch.line(event), 20) == "epoch 123 committed\n"
    assert re.fullmatch(r"[\d:]{8}  epoch 123 committed\n", text.to_text(cli_watch.line(event), 30))
