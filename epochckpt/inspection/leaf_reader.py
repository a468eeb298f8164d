"""Values of single leaves, and files of handlers, read without devices: from epochs of ours and of stock Orbax.

Ours are verified block by block before a byte of them is seen; stock Orbax keeps no checksums. Typed keys come as
their data. A reader that meets a deletion raises `EpochDeletedError`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader
from epochckpt.commit import Commits
from epochckpt.errors import DamagedError, EpochNotFoundError, InvalidArgumentError
from epochckpt.format import parsing, paths
from epochckpt.inspection import scan
from epochckpt.manager import CheckpointReader, Readers, Verification
from epochckpt.manager.reader import PIECE_ELEMENTS, ignore

_THREADS = 4


class LeafReader:
    """Reads leaves of the attempt that is committed when the reader is made; raises what `Readers.open` raises.

    `node` is the name of a node where each node has an item for itself, else empty.
    """

    def __init__(self, commits: Commits, epoch: int):
        self._folder = commits.folder(epoch)
        self.per_node: dict[str, CheckpointReader] = {}  # where each node saved by itself
        self.unread: dict[str, str] = {}  # why a node of such an epoch cannot be read
        readers = Readers(commits, Pool(_THREADS))
        try:
            self.whole = readers.open(epoch)
        except EpochNotFoundError:
            for name, record in scan.single_nodes(commits, self._folder, epoch, parsing.parse_epoch).items():
                if isinstance(record, str):
                    self.unread[paths.shown_name(name)] = record
                else:
                    reader = readers.of_record(paths.join(self._folder, name), record)
                    self.per_node[record.nodes[0].name] = reader
            if not self.per_node:
                raise
            self.whole = next(iter(self.per_node.values()))
        self.record = self.whole.record

    def value(self, item: str, leaf: str, node: str = "") -> Any:
        return self._of(item, node).value(item, leaf, node)

    def pieces(self, item: str, leaf: str, node: str = "", max_elements: int = PIECE_ELEMENTS) -> Iterator[np.ndarray]:
        yield from self._of(item, node).pieces(item, leaf, node, max_elements)

    def file(self, item: str, name: str, node: str = "") -> bytes:
        return self._of(item, node).file(item, name, node)

    def native(self, item: str, node: str = "") -> EpochReader | None:
        return self._of(item, node).native_of(item, node)

    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        """See `CheckpointReader.verify`; reads every byte of all nodes, of steps of stock Orbax every array."""
        if not self.per_node:
            return self.whole.verify(progress)
        each = [reader.verify(progress) for reader in self.per_node.values()]
        wrong = [error for one in each for error in one.damage]
        for node, problem in self.unread.items():
            wrong.append(DamagedError(paths.join(self._folder, paths.folder_name(node)), problem))
        return Verification(self.record.epoch, sum(one.nbytes for one in each), tuple(wrong))

    def _of(self, item: str, node: str) -> CheckpointReader:
        if not self.per_node:
            return self.whole
        if node not in self.per_node:
            what = f"node {node!r} has no item {item!r} of its own" if node else f"item {item!r} is of each node's"
            raise InvalidArgumentError(f"epoch {self.record.epoch}: {what}")
        return self.per_node[node]
