"""Which file system a path lies on."""

import mmap
import os
import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.storage import PosixStore, Store, opening_through
from epochckpt.storage.mounts import FileSystem, file_system_of
from epochckpt.storage.store import writing
from tests.support.files import resident_pages

MOUNTS = rb"""\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /dev/shm rw - tmpfs none rw,size=1g
30 22 0:40 / /data rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 30 259:1 / /data/fast\040disk rw - xfs /dev/nvme0n1 rw
32 22 0:41 / /buckets/a rw,nosuid - fuse.gcsfuse bucket-1 rw,user_id=0
35 22 0:44 / /buckets/b rw,nosuid - fuse mountpoint-s3 rw,user_id=0
33 22 0:42 / /twice rw - ext4 /dev/vdb rw
34 33 0:43 / /twice rw - lustre server@tcp:/fs rw
a line that is cut
"""


@pytest.fixture
def table(tmp_path: pathlib.Path) -> str:
    (tmp_path / "mountinfo").write_bytes(MOUNTS)
    return str(tmp_path / "mountinfo")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/not/there/yet", "ext4"),
        ("/dev/shm/run", "tmpfs"),
        ("/data", "nfs4"),
        ("/database", "ext4"),
        ("/data/fast disk/run", "xfs"),
        ("/buckets/a/run", "fuse.gcsfuse"),
        ("/twice/run", "lustre"),
    ],
)
def test_the_innermost_and_newest_mount_counts(path: str, kind: str, table: str) -> None:
    """Names of folders are compared whole, and blanks in them are understood."""
    assert file_system_of(path, table).kind == kind


def test_a_link_is_followed(table: str, tmp_path: pathlib.Path) -> None:
    """The disk of the folder that it leads to is what counts."""
    (tmp_path / "link").symlink_to("/data/fast disk")
    assert file_system_of(str(tmp_path / "link" / "run"), table).kind == "xfs"


def test_without_proc_nothing_is_known(tmp_path: pathlib.Path) -> None:
    """What is unknown is treated as a network file system."""
    found = file_system_of("/", str(tmp_path / "none"))
    assert found == FileSystem("")
    assert not found.is_local_disk
    assert not found.reserves_quickly


def test_disks_are_local_and_others_are_not() -> None:
    """A tmpfs is its own page cache, and fills what it reserves."""
    kinds = ("ext4", "xfs", "tmpfs", "nfs4", "lustre", "fuse.gcsfuse")
    assert [FileSystem(kind).is_local_disk for kind in kinds] == [True, True, False, False, False, False]
    assert [FileSystem(kind).reserves_quickly for kind in ("ext4", "tmpfs", "nfs")] == [True, False, False]


def test_buckets_that_are_shown_as_folders_are_recognised(table: str) -> None:
    """By the name that their program gives the file system, or the source."""
    places = ("/buckets/a/run", "/buckets/b/run", "/data/run", "/run")
    assert [file_system_of(place, table).bucket_scheme for place in places] == ["gs://", "s3://", "", ""]
    assert FileSystem(kind="ext4", source="gcsfuse").bucket_scheme == ""


def test_whoever_saves_into_such_a_folder_is_told_to_use_the_url(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each manager that may save; what is saved there can be restored."""

    def mounted(store: Store) -> Store:
        return PosixStore(store.root, file_system=FileSystem(kind="fuse.gcsfuse", source="bucket-1"))

    state = {"w": np.arange(1 << 19)}
    with opening_through(mounted):
        with ec.CheckpointManager(tmp_path) as manager:
            manager.save(1, args=ocp.args.StandardSave(state))
        assert [r.message for r in caplog.records if "by its URL (gs://…)" in r.message] != []
        caplog.clear()
        with ec.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
            np.testing.assert_array_equal(manager.restore(1)["w"], state["w"])
    with ec.CheckpointManager(tmp_path) as manager:
        np.testing.assert_array_equal(manager.restore(1)["w"], state["w"])
    assert "by its URL" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "cached_bytes", "stays"),
    [("nfs4", 1 << 20, False), ("xfs", 1 << 20, True), ("xfs", (1 << 20) - 1, False), ("xfs", 0, False)],
)
def test_large_files_stay_in_the_page_cache_of_local_file_systems(
    tmp_path: pathlib.Path, kind: str, cached_bytes: int, stays: bool
) -> None:
    """Up to a size. Larger ones, and those of network file systems and of unknown ones, are written past it."""
    if file_system_of(str(tmp_path)).kind == "tmpfs":
        pytest.skip("a tmpfs is its page cache")
    store = PosixStore(tmp_path, cached_bytes=cached_bytes, file_system=FileSystem(kind))
    assert store.leaves_files_cached is (kind == "xfs" and cached_bytes > 0)
    memory = mmap.mmap(-1, 1 << 20)
    memory[:] = os.urandom(1 << 20)
    with writing(store, "data", 1 << 20) as writer:
        writer.write(0, memoryview(memory))
    assert (resident_pages(tmp_path / "data") > 0) is stays
    assert store.read("data", limit_bytes=1 << 20) == memory[:]
    store.uncache("data", 0, 1 << 20)
    assert resident_pages(tmp_path / "data") == 0
