"""`_epochckpt/host.json` says that a directory is on a disk of one host, and has the parts of epochs that this one has.

See `StorageOptions.local_disks`. Every such directory has an id of its own, by which two processes notice that they see
the same one, and a job that a disk was replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses

from epochckpt.commit.protocol import Commits
from epochckpt.format import checksums, parsing, paths
from epochckpt.storage import Store


@dataclasses.dataclass(frozen=True)
class HostRecord:
    """The directory of one host.

    Attributes:
        directory: its id.
        node: the node that wrote there last.
        mirror: the URL of the mirror.
        disks: the ids of the directories of all hosts, by process, when a run last claimed them; empty before.
        claim: that claim; empty before. A host with another one than the rest has an older disk.
    """

    directory: str
    node: str
    mirror: str
    disks: tuple[str, ...] = ()
    claim: str = ""

    def to_bytes(self) -> bytes:
        """The file's content."""
        head = {"format": paths.FORMAT, "version": paths.VERSION, "record": "host"}
        return checksums.seal({**head, **vars(self), "disks": list(self.disks)})


def read_host_record(store: Store) -> HostRecord | None:
    """The record of a directory; None if it is no host's. Raises DamagedError, FormatError or StorageError."""
    return parsing.read_record(store, paths.HOST_RECORD, _parse)


def _parse(path: str, data: bytes) -> HostRecord:
    fields = parsing.open_record(path, data, "host")
    disks = fields.array("disks")
    directory, node, mirror, claim = (fields.text(name) for name in ("directory", "node", "mirror", "claim"))
    return HostRecord(directory, node, mirror, tuple(map(str, disks)), claim)


def introduce(commits: Commits, node: str, mirror: str) -> HostRecord:
    """The record of this process's directory, which gets one if it has none."""
    if (found := read_host_record(commits.store)) is None:
        store, made = commits.store, HostRecord(paths.new_id(), node, mirror)
        commits.make_folder(paths.HOST_RECORD.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):  # another process sees this directory
            draft = f"{paths.HOST_RECORD}.{paths.new_id()}{paths.TMP_SUFFIX}"
            store.put(paths.HOST_RECORD, made.to_bytes(), draft=draft)
        found = read_host_record(store)
    assert found is not None, "it has just been written"
    return found
