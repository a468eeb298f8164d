"""A directory that all processes see: it looks for `host.json` itself, and refuses what only one host can use."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.agreement import Coordinator
from epochckpt.directory import directory_of
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.saving.job_directory import Place
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from epochckpt.tiers import NO_MIRROR, DirectoryPerHost, Mirror, SharedDirectory
from epochckpt.tiers.host_record import introduce

Options = ocp.CheckpointManagerOptions


def place(directory: pathlib.Path, options: Options, **storage: Any) -> Place:
    return Place(
        directory=directory,
        options=options,
        storage=ec.StorageOptions(**storage),
        names=StepNames.of(options),
    )


def test_no_epoch_looks_for_a_hosts_record(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The directory does, when it is opened and at each look; saves, restores and status of an epoch do not."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for epoch in range(3):
            assert manager.save(epoch, args=ocp.args.StandardSave({"x": np.full(3, epoch)}))
    asked: list[StoreCall] = []
    for method in (Store.exists, Store.existing, Store.read, Store.open_reader):
        faults.before(method, asked.append, where=lambda call: paths.HOST_RECORD in call.paths)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        at_open = len(asked)
        assert at_open <= 2  # whether it may be written here, and what a look finds
        manager.reload()
        assert len(asked) == at_open + 1
        for epoch in range(3):
            assert manager.restore(epoch)["x"].tolist() == [epoch] * 3
            assert manager.verify(epoch).ok
            assert manager.status(epoch).state == "committed"
        assert manager.save(3, args=ocp.args.StandardSave({"x": np.zeros(3)}))
        manager.wait_until_finished()
        assert len(asked) == at_open + 1


def test_a_reader_of_one_hosts_directory_learns_that_at_its_next_look(tmp_path: pathlib.Path) -> None:
    """The directory may get its record after it was opened."""
    options = Options(read_only=True)
    directory = SharedDirectory(place(tmp_path, options), Coordinator(), NO_MIRROR)
    epoch_directory = directory.place.epoch_directory()
    directory.survey(epoch_directory, [None], {})
    assert not directory.is_partial
    introduce(directory_of(open_store(tmp_path), StepNames.of(options)), "process_0", "gs://b/run")
    directory.check(epoch_directory, [None])  # to look is allowed
    directory.survey(epoch_directory, [None], {})
    assert directory.is_partial
    to_write = SharedDirectory(place(tmp_path, Options()), Coordinator(), NO_MIRROR)
    with pytest.raises(InvalidArgumentError, match=r"disk of one host \(of node process_0\).*mirror, gs://b/run"):
        to_write.check(epoch_directory, [None])


def test_processes_that_differ_in_local_disks_are_refused(tmp_path: pathlib.Path) -> None:
    """Whichever of them the primary is."""
    storage = {"local_disks": True, "mirror": str(tmp_path / "mirror")}
    one = place(tmp_path / "run", Options(), **storage)
    mirror = Mirror(str(tmp_path / "mirror"), one.storage, one.options)
    per_host = DirectoryPerHost(one, Coordinator(), mirror)
    told = per_host.introduce("process_0")
    shared = SharedDirectory(place(tmp_path / "run", Options()), Coordinator(), NO_MIRROR)
    for directory in (per_host, shared):
        with pytest.raises(InvalidArgumentError, match="local_disks differs between the processes"):
            directory.check(one.epoch_directory(), [told, None])
    per_host.check(one.epoch_directory(), [told, told])
