"""`_epochckpt/host.json`: each directory gets one, once, whoever else comes to make it."""

import pathlib
from concurrent.futures import ThreadPoolExecutor

import orbax.checkpoint as ocp
import pytest

from epochckpt.directory import directory_of
from epochckpt.errors import DamagedError
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from epochckpt.tiers.host_record import HostRecord, introduce, read_host_record


def test_processes_that_see_one_directory_find_one_record(tmp_path: pathlib.Path) -> None:
    """Eight come at once: all take the record of the one that wrote it, and nothing else stays."""
    epoch_directory = directory_of(open_store(tmp_path), StepNames.of(ocp.CheckpointManagerOptions()))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: introduce(epoch_directory, f"process_{number}", "gs://b/run"), range(8)))
    assert len(set(found)) == 1
    assert read_host_record(epoch_directory.store) == found[0]
    assert [path.name for path in (tmp_path / "_epochckpt").iterdir()] == ["host.json"]


def test_a_record_is_read_as_it_was_written_and_damage_is_noticed(tmp_path: pathlib.Path) -> None:
    store, record = (
        open_store(tmp_path),
        HostRecord("0123456789abcdef", "tpu:7", "s3://b/run", ("a", "b"), "fedcba9876543210"),
    )
    assert read_host_record(store) is None
    (tmp_path / "_epochckpt").mkdir()
    (tmp_path / "_epochckpt" / "host.json").write_bytes(record.to_bytes())
    assert read_host_record(store) == record
    (tmp_path / "_epochckpt" / "host.json").write_bytes(record.to_bytes()[:-9])
    with pytest.raises(DamagedError, match=r"host\.json"):
        read_host_record(store)
