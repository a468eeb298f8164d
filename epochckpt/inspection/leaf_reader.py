"""Values of single leaves, and files of handlers, read without devices: from epochs of ours and of stock Orbax.

Ours are verified block by block before a byte of them is seen; stock Orbax keeps no checksums. Typed keys come as
their data. A reader that meets a deletion raises `EpochDeletedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader
from epochckpt.commit import Commits
from epochckpt.errors import DamagedError, EpochNotFoundError, InvalidArgumentError
from epochckpt.format import EpochRecord, paths
from epochckpt.inspection import describe
from epochckpt.manager import CheckpointReader, Readers, Verification
from epochckpt.manager.reader import PIECE_ELEMENTS, ignore

_THREADS = 4


class LeafReader:
    """Reads leaves of one epoch; its record is read now, and stays the one that is read.

    Each method takes the name of a node: of the one whose item it is, for an item of each node's own, else "".

    Args:
        commits: the directory's epochs.
        epoch: its number.

    Raises:
        EpochNotFoundError: there is no such epoch.
        DamagedError, FormatError: its record cannot be used.
    """

    def __init__(self, commits: Commits, epoch: int):
        self._folder = commits.folder(epoch)
        self._per_node: dict[str, CheckpointReader] = {}  # where each node saved by itself
        self._unread: dict[str, str] = {}
        readers = Readers(commits, Pool(_THREADS))
        try:
            self._reader = readers.open(epoch)
        except EpochNotFoundError:
            per_node, self._unread = describe.readers(commits, epoch, Pool(_THREADS))
            if not per_node:
                raise
            self._per_node = {node: readers.of_record(one.folder, one.record) for node, one in per_node.items()}
            self._reader = next(iter(self._per_node.values()))
        self.record: EpochRecord = self._reader.record

    def value(self, item: str, leaf: str, node: str = "") -> Any:
        """See `CheckpointReader.value`."""
        return self._of(item, node).value(item, leaf, node)

    def pieces(self, item: str, leaf: str, node: str = "", max_elements: int = PIECE_ELEMENTS) -> Iterator[np.ndarray]:
        """See `CheckpointReader.pieces`."""
        yield from self._of(item, node).pieces(item, leaf, node, max_elements)

    def file(self, item: str, name: str, node: str = "") -> bytes:
        """See `CheckpointReader.file`."""
        return self._of(item, node).file(item, name, node)

    def reader(self, item: str, node: str = "") -> EpochReader | None:
        """The reader of an item of an epoch of ours, which gives its checksums; None for steps of stock Orbax.

        Raises:
            InvalidArgumentError: the node has no such item.
            DamagedError: the node's record cannot be used.
        """
        reader = self._of(item, node)
        return reader.native_of(item, node)

    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        """Reads every byte, of all nodes; of steps of stock Orbax every array.

        Args:
            progress: called with the bytes that have been read, piece by piece, from any thread; of stock Orbax those
                of arrays, which are fewer in its files where it compressed them.

        Raises:
            EpochDeletedError: the epoch went away meanwhile.
        """
        if not self._per_node:
            return self._reader.verify(progress)
        each = [reader.verify(progress) for reader in self._per_node.values()]
        wrong = [error for one in each for error in one.damage]
        wrong += [
            DamagedError(paths.join(self._folder, paths.folder_name(node)), problem)
            for node, problem in self._unread.items()
        ]
        return Verification(self.record.epoch, sum(one.nbytes for one in each), tuple(wrong))

    def _of(self, item: str, node: str) -> CheckpointReader:
        """What reads an item: where each node saved by itself, that node's epoch."""
        if not self._per_node:
            return self._reader
        if node not in self._per_node:
            what = f"node {node!r} has no item {item!r} of its own" if node else f"item {item!r} is of each node's"
            raise InvalidArgumentError(f"epoch {self.record.epoch}: {what}")
        return self._per_node[node]
