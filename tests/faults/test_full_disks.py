"""A disk that is full or becomes read-only costs the epoch that is being saved, and is told once."""

from __future__ import annotations

import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from tests.support.managers import traced_memory

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def numbers(epoch: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 256), epoch, np.float32), "b": np.full(3, epoch, np.int32)}


def assert_is(got: Any, epoch: int) -> None:
    for name, value in numbers(epoch).items():
        np.testing.assert_array_equal(got[name], value)
        assert got[name].dtype == value.dtype


def raise_pending(manager: ec.CheckpointManager, how: str) -> None:
    if how == "check_for_errors":
        manager.save(1000, args=Save({"x": np.zeros(1)}))  # logs the failure before, and is the next to end
        manager.save(1001, args=Save({"x": np.zeros(1)}))
        while manager.is_saving_in_progress():
            manager.components.saves.queue.drain()
        manager.check_for_errors()
    else:
        getattr(manager, how)()


def fill_disk(disk: pathlib.Path, pages: int) -> pathlib.Path:
    """Leaves that many free pages."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes((free.f_bavail - pages) * free.f_bsize))
    assert os.statvfs(disk).f_bavail == pages
    return ballast


def test_a_full_disk_costs_one_epoch(disk: pathlib.Path) -> None:
    """Whatever file the space runs out at: the loop goes on, the epoch before stays the latest and readable, the
    failure is raised once, and the first save after the space is back commits."""
    outcomes, failures = set(), []
    directory = disk / "run"
    with ec.CheckpointManager(directory) as m:
        m.save(0, args=Save(numbers(0)))
        m.wait_until_finished()
        last = 0
        for epoch, pages in enumerate([0, 1, 2, 10, 17, 18, 19, 20, 21, 40], start=1):
            first, second = 2 * epoch - 1, 2 * epoch
            ballast = fill_disk(disk, pages)
            assert m.save(first, args=Save(numbers(first)))
            try:
                m.wait_until_finished()
                last = first
                outcomes.add("committed")
            except errors.SaveError as error:
                failures.append(error)
                assert m.status(first).state == "failed"
                assert "No space left" in m.status(first).detail
                outcomes.add("failed")
            m.check_for_errors()
            m.wait_until_finished()
            assert m.latest_step() == last
            assert_is(m.restore(None), last)
            with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as fresh:
                assert fresh.latest_step() == last
                assert fresh.verify(last).ok
            ballast.unlink()
            assert m.save(second, args=Save(numbers(second)))
            m.wait_until_finished()
            last = second
            assert m.latest_step() == last
        free = os.statvfs(disk).f_bavail
    assert outcomes == {"committed", "failed"}
    assert all("No space left" in str(error) for error in failures)
    assert len({error.epoch for error in failures}) == len(failures)
    assert os.statvfs(disk).f_bavail >= free
    assert not list(directory.glob("*.orbax-checkpoint-tmp"))


@pytest.mark.slow
def test_a_full_disk_costs_no_memory(disk: pathlib.Path) -> None:
    """What could not be written is let go when its save has failed, by all threads that wrote it."""
    with ec.CheckpointManager(disk / "run") as m:
        ballast = fill_disk(disk, 600)
        with traced_memory() as held:
            for epoch in range(4):
                m.save(epoch, args=Save({"a": np.zeros(2**22, np.uint8), "b": np.ones(2**22, np.uint8)}))
                m.components.saves.queue.drain()
            assert held() < 2**22
        ballast.unlink()
        with pytest.raises(errors.SaveErrorGroup, match="No space left"):
            m.wait_until_finished()


@pytest.mark.parametrize("how", ["wait_until_finished", "check_for_errors", "close"])
def test_a_failed_save_is_raised_once_and_never_by_save(disk: pathlib.Path, how: str) -> None:
    """save() after a failure logs it and returns normally; the failure comes from the named call, once."""
    m = ec.CheckpointManager(disk / "run")
    m.save(0, args=Save(numbers(0)))
    m.wait_until_finished()
    ballast = fill_disk(disk, 1)
    assert m.save(1, args=Save(numbers(1)))
    assert m.save(2, args=Save(numbers(2)))  # the disk is still full
    m.components.saves.queue.drain()
    ballast.unlink()
    assert m.save(3, args=Save(numbers(3)))
    with pytest.raises(errors.SaveErrorGroup, match="No space left") as caught:
        raise_pending(m, how)
    assert [e.epoch for e in caught.value.errors] == [1, 2]
    m.check_for_errors()
    if how != "close":
        m.wait_until_finished()
    assert {0, 3} <= set(m.all_steps())
    assert not {1, 2} & set(m.all_steps())
    m.close()


def test_a_directory_that_becomes_read_only_costs_one_epoch(disk: pathlib.Path) -> None:
    """remount,ro in the middle of a run, and back."""

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], timeout=30, check=True)

    with ec.CheckpointManager(disk / "run") as m:
        m.save(0, args=Save(numbers(0)))
        m.wait_until_finished()
        remount("ro")
        try:
            for epoch in (1, 2):
                assert m.save(epoch, args=Save(numbers(epoch)))
                with pytest.raises(errors.SaveError, match="Read-only file system"):
                    m.wait_until_finished()
                m.wait_until_finished()
                assert m.all_steps() == [0]
                assert m.all_steps(read=True) == [0]
                assert_is(m.restore(None), 0)
        finally:
            remount("rw")
        assert m.save(1, args=Save(numbers(1)))
        m.wait_until_finished()
        assert m.all_steps() == [0, 1]
        assert_is(m.restore(None), 1)
