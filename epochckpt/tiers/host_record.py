"""`_epochckpt/host.json` says that a directory is on a disk of one host, and has the parts of epochs that this one has.

See `StorageOptions.local_disks`. Every such directory has an id of its own. By the id, two processes notice that
they see the same directory, and a job notices that a disk was replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from epochckpt.directory import local_records
from epochckpt.directory.epoch_directory import make_folder
from epochckpt.format import codec, parsing, paths
from epochckpt.format.codec import stored

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
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

    directory: str = stored("directory", codec.text())
    node: str = stored("node", codec.text())
    mirror: str = stored("mirror", codec.text())
    disks: tuple[str, ...] = stored("disks", codec.strings("ids of directories", 0, 1000), default=())
    claim: str = stored("claim", codec.text(), default="")

    def to_bytes(self) -> bytes:
        """The file's content."""
        return codec.seal("host", self)


def read_host_record(store: Store) -> HostRecord | None:
    """The record of a directory; None if it is no host's. Raises DamagedError, FormatError or StorageError."""
    return local_records.read(store, paths.HOST_RECORD, _parse)


def _parse(path: str, data: bytes) -> HostRecord:
    return codec.parse(HostRecord, parsing.open_record(path, data, "host"))


def introduce(epoch_directory: EpochDirectory, node: str, mirror: str) -> HostRecord:
    """The record of this process's directory; writes the record first if it is missing."""
    if (found := read_host_record(epoch_directory.store)) is None:
        store = epoch_directory.store
        made = HostRecord(directory=paths.new_id(), node=node, mirror=mirror)
        make_folder(store, paths.HOST_RECORD.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):  # another process sees this directory
            draft = f"{paths.HOST_RECORD}.{paths.new_id()}{paths.TMP_SUFFIX}"
            store.put(paths.HOST_RECORD, made.to_bytes(), draft=draft)
        found = read_host_record(store)
    assert found is not None, "it has just been written"
    return found
