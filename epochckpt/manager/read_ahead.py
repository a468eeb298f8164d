"""Reading ahead: an epoch comes into the page cache of this host while the program still imports, builds and compiles.

The system reads then, in its own order. This verifies nothing. The restore does, when it reads the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from absl import logging

from epochckpt import _threads
from epochckpt.directory import EpochDirectory
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import EpochRecord, Nodes, paths


def begin(epoch_directory: EpochDirectory, epoch: int, nodes: Nodes, limit_bytes: int) -> _threads.Future[None]:
    """Begins to read an epoch ahead, at most so many bytes of it; an error is logged, because no caller depends on it.

    The returned future is done once the system has been asked for all files. Where the store leaves no files in the
    page cache of this host, nothing happens.
    """

    def read() -> None:
        try:
            _read(epoch_directory, epoch, nodes, limit_bytes)
        except (EpochCheckpointError, OSError) as error:
            logging.info("%s: checkpoint %d is not read ahead: %s", epoch_directory.store.root, epoch, error)

    return _threads.start(read)


def _read(epoch_directory: EpochDirectory, epoch: int, nodes: Nodes, limit_bytes: int) -> None:
    store = epoch_directory.store
    if not store.leaves_files_cached:
        return
    record = epoch_directory.read_record(epoch)
    if record.stock:  # its files are TensorStore's, which reads them its own way
        return
    left = limit_bytes
    for path, size in _files(epoch_directory.folder(epoch), record, nodes):
        if size > left:
            return
        left -= size
        with contextlib.suppress(FileNotFoundError):  # another host's disk has it
            store.read_ahead(path)


def _files(folder: str, record: EpochRecord, nodes: Nodes) -> Iterator[tuple[str, int]]:
    """The data files of the nodes that this process reads most of, with their sizes in bytes.

    In a job of as many nodes as have saved, those are its own. Else the processes share out the nodes.
    """
    if len(record.nodes) == len(nodes):
        numbers = nodes.hosted
    else:
        numbers = range(nodes.process, len(record.nodes), nodes.processes)
    for number in numbers:
        for file in record.nodes[number].files:
            yield paths.join(folder, record.path(number, file)), file.size
