"""Which file system a path lies on."""

import pathlib

import pytest

from epochckpt.storage.mounts import FileSystem, file_system_of

MOUNTS = rb"""\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /dev/shm rw - tmpfs none rw,size=1g
30 22 0:40 / /data rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 30 259:1 / /data/fast\040disk rw - xfs /dev/nvme0n1 rw
32 22 0:41 / /bucket rw,nosuid - fuse.gcsfuse gcsfuse rw,user_id=0
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
        ("/bucket/run", "fuse.gcsfuse"),
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
    assert not found.is_local
    assert not found.reserves_quickly


def test_disks_are_local_and_others_are_not() -> None:
    """A tmpfs fills what it reserves."""
    assert [FileSystem(kind).is_local for kind in ("ext4", "xfs", "tmpfs", "nfs4", "lustre", "fuse.gcsfuse")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert [FileSystem(kind).reserves_quickly for kind in ("ext4", "tmpfs", "nfs")] == [True, False, False]
