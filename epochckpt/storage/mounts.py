"""Which file system a path lies on, as far as Linux tells (`/proc/self/mountinfo`, see proc_pid_mountinfo(5))."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

_OCTAL = re.compile(rb"\\([0-7]{3})")  # how the kernel writes blanks and backslashes in names
_DISKS = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"})
_RESERVING = frozenset({"ext4", "xfs"})
_MOUNTED_BUCKETS = {
    "gcsfuse": "gs://",
    "s3fs": "s3://",
    "mountpoint-s3": "s3://",
    "goofys": "s3://",
    "blobfuse": "az://",
    "blobfuse2": "az://",
}
"""Programs that show a bucket as a folder, and the scheme of the bucket."""


@dataclasses.dataclass(frozen=True)
class FileSystem:
    """A file system that is mounted here.

    Attributes:
        kind: the kernel's name for it, such as `ext4`, `nfs4` or `fuse.gcsfuse`; empty if that is unknown.
        source: what is mounted, such as a device or a bucket. Some programs of FUSE write their own name there.
    """

    kind: str
    source: str = ""

    @property
    def is_local_disk(self) -> bool:
        """Whether it is known to lie on disks of this host alone, so that its page cache always has what is there."""
        return self.kind in _DISKS

    @property
    def reserves_quickly(self) -> bool:
        """Whether fallocate(2) only marks room for a file, and does not fill it."""
        return self.kind in _RESERVING

    @property
    def bucket_scheme(self) -> str:
        """The scheme of the bucket that a program shows here as a folder, such as `gs://`; empty if none does."""
        if not self.kind.startswith("fuse"):
            return ""
        program = self.kind.partition(".")[2] or self.source
        return _MOUNTED_BUCKETS.get(program, "")


UNKNOWN = FileSystem("")


def file_system_of(path: str, table: str = "/proc/self/mountinfo") -> FileSystem:
    """The file system of an absolute path, whose last components need not exist; `UNKNOWN` if no `table` tells."""
    try:
        with open(table, "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # another system than Linux, or a sandbox without /proc
        return UNKNOWN
    return _found(os.fsencode(os.path.realpath(path)), lines)


def _found(path: bytes, lines: Iterable[bytes]) -> FileSystem:
    """That of the mount whose folder has the path; the last one, where several have the same folder."""
    best = b""
    found = UNKNOWN
    for line in lines:
        before, separator, after = line.partition(b" - ")
        fields = before.split(b" ")
        if not separator or len(fields) < 5:
            continue
        folder = _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), fields[4])
        inside = path == folder or path.startswith(folder.rstrip(b"/") + b"/")
        if inside and len(folder) >= len(best):
            best = folder
            kind, _, rest = after.partition(b" ")
            source = rest.partition(b" ")[0]
            found = FileSystem(kind=os.fsdecode(kind), source=os.fsdecode(source))
    return found
