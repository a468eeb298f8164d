"""Reading ahead: which files come into the page cache before a restore, when, and when none do."""

from __future__ import annotations

import mmap
import os
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.format import Nodes
from epochckpt.manager import read_ahead
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.files import resident_pages
from tests.support.taps import eventually

STATE = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
ALL = 1 << 40


@pytest.fixture
def disk(on_disk: pathlib.Path) -> pathlib.Path:
    """A directory on a disk, which has a page cache."""
    return on_disk / "run"


def saved(directory: pathlib.Path, nodes: tuple[str, ...] = ("a",)) -> dict[str, pathlib.Path]:
    """The data file of each node of epoch 0, which no page cache has."""
    with ec.CheckpointManager(directory) as manager:
        manager.set_nodes(nodes)
        own = {name: {"x": np.arange(1 << 18, dtype=np.float32)} for name in nodes}
        manager.save(
            0, args=ocp.args.Composite(w=ocp.args.StandardSave(STATE), own=ec.args.NodeSave(own, by_node=True))
        )
        manager.wait_until_finished()
    files = {name: directory / "0" / name / "own.safetensors" for name in nodes}
    for file in files.values():
        evict(file)
    return files


def evict(file: pathlib.Path) -> None:
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_pages(file) == 0


def is_resident(file: pathlib.Path) -> bool:
    return resident_pages(file) == -(-file.stat().st_size // mmap.PAGESIZE)


def test_the_newest_epoch_comes_into_the_page_cache(disk: pathlib.Path) -> None:
    """And is restored from there."""
    files = saved(disk)
    with ec.CheckpointManager(disk) as manager:
        manager.read_ahead()
        assert eventually(lambda: all(map(is_resident, files.values())))
        restored = manager.restore(0, args=ocp.args.Composite(w=ocp.args.StandardRestore(STATE)))
    np.testing.assert_array_equal(restored.w["w"], STATE["w"])


@pytest.mark.parametrize("limit", [0, 1000])
def test_no_more_is_read_than_the_bound(disk: pathlib.Path, limit: int) -> None:
    """A file that goes beyond it is left where it is."""
    files = saved(disk)
    with ec.CheckpointManager(disk) as manager:
        manager.components.readers.read_ahead(0, limit).result()
        assert not any(map(resident_pages, files.values()))


def test_nothing_is_read_where_saves_go_past_the_page_cache(disk: pathlib.Path) -> None:
    """The user has asked for that."""
    files = saved(disk)
    with ec.CheckpointManager(disk, storage=ec.StorageOptions(page_cache=False)) as manager:
        manager.read_ahead(0)
        manager.components.readers.read_ahead(0, ALL).result()
        assert not any(map(resident_pages, files.values()))


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (Nodes(names=("a", "b", "c"), process=1, processes=3), "b"),
        (Nodes(names=("x", "y"), process=0, processes=2), "ac"),
        (Nodes(names=("x", "y"), process=1, processes=2), "b"),
        (Nodes(names=("x", "y", "z"), process=0, processes=1), "abc"),
    ],
)
def test_each_process_reads_its_part(disk: pathlib.Path, nodes: Nodes, wanted: str) -> None:
    """Its own nodes, where as many have saved; else the processes share out the nodes."""
    files = saved(disk, ("a", "b", "c"))
    with ec.CheckpointManager(disk) as manager:
        directory = manager.components.directory.epoch_directory
        read_ahead.begin(directory, 0, nodes, ALL).result()
        assert eventually(lambda: all(is_resident(files[name]) for name in wanted))
        assert not any(resident_pages(files[name]) for name in files.keys() - {*wanted})


def test_an_error_of_storage_is_no_error_of_the_caller(disk: pathlib.Path, faults: Faults) -> None:
    """The restore that comes later says what is wrong, if it still is."""
    saved(disk)
    with ec.CheckpointManager(disk) as manager:
        with faults.fail(Store.read_ahead, PermissionError(13, "not now")):
            manager.read_ahead()
            manager.components.readers.read_ahead(0, ALL).result()
        manager.read_ahead(17)
        manager.components.readers.read_ahead(17, ALL).result()
        restored = manager.restore(0, args=ocp.args.Composite(w=ocp.args.StandardRestore(STATE)))
    np.testing.assert_array_equal(restored.w["w"], STATE["w"])


def job_of(epochs: int, setup: Callable[[], None]) -> ec.Job:
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])
    job.setup(lambda ws: setup())
    job.init(lambda ws: ws.update(w=STATE["w"]))
    job.epoch(lambda ws: ws.update(w=ws["w"] + 1))
    return job


def test_a_run_reads_ahead_while_it_sets_up(disk: pathlib.Path) -> None:
    """By itself: the newest epoch is in memory before the run has made what it restores into."""
    ec.run(job_of(1, lambda: None), disk)
    files = list((disk / "1").rglob("*.safetensors"))
    for file in files:
        evict(file)
    seen = list[bool]()
    result = ec.run(job_of(2, lambda: seen.append(eventually(lambda: all(map(is_resident, files))))), disk)
    assert (len(files) > 0, seen, result.epoch) == (True, [True], 2)


def test_a_run_that_begins_anew_reads_nothing_ahead(disk: pathlib.Path, faults: Faults) -> None:
    """`resume="never"` in a directory with epochs is refused, and reads nothing before."""
    ec.run(job_of(1, lambda: None), disk)
    asked = list[object]()
    faults.before(Store.read_ahead, asked.append)
    with pytest.raises(ec.errors.EpochCheckpointError):
        ec.run(job_of(2, lambda: None), disk, resume="never")
    assert asked == []
