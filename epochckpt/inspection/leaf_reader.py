"""The reader of an epoch for an inspection: of ours, of stock Orbax, or of an epoch that each node saved by itself.

No device is needed. Ours are verified block by block before a byte of them is seen; stock Orbax keeps no checksums.
"""

from collections.abc import Callable, Mapping

from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory
from epochckpt.errors import DamagedError, EpochNotFoundError, InvalidArgumentError
from epochckpt.format import parsing, paths
from epochckpt.manager import CheckpointReader, Readers, Verification
from epochckpt.manager.reader import NativeReader, ignore
from epochckpt.tiers import named_mirror

_THREADS = 4


def open_reader(epoch_directory: EpochDirectory, epoch: int, mirror: str | None = None) -> CheckpointReader:
    """A reader of the attempt that is committed now; raises what `Readers.open` raises.

    What a directory on a disk of one host lacks is read from its `mirror`, a URL.
    """
    readers = Readers(epoch_directory, Pool(_THREADS), mirror=named_mirror(mirror, epoch_directory))
    try:
        return readers.open(epoch)
    except EpochNotFoundError:
        folder = epoch_directory.folder(epoch)
        nodes = dict[str, NativeReader]()
        unread = dict[str, str]()
        for name, record in epoch_directory.read_per_node(folder, epoch, parsing.parse_epoch).items():
            if isinstance(record, str):
                unread[paths.shown_name(name)] = record
                continue
            reader = readers.of_record(paths.join(folder, name), record)
            assert isinstance(reader, NativeReader), "stock Orbax writes no epochs of single nodes"
            nodes[record.nodes[0].name] = reader
        if not nodes:
            raise
        return PerNodeReader(nodes, unread)


class PerNodeReader(NativeReader):
    """Reads an epoch that each node saved by itself: every item is a node's own.

    `unread` says why another node cannot be read. What is inherited and asks for no node (`record`, `path`, `restore`,
    `status`, `metrics`) is of the first of `nodes`.
    """

    def __init__(self, nodes: Mapping[str, NativeReader], unread: Mapping[str, str]):
        first = next(iter(nodes.values()))
        super().__init__(first.epoch_directory, first.folder, first.record, first.context, first.native)
        self.nodes = nodes
        self.unread = unread

    def of(self, item: str, node: str) -> EpochReader:
        if node not in self.nodes:
            what = f"node {node!r} has no item {item!r} of its own" if node else f"item {item!r} is of each node's"
            raise InvalidArgumentError(f"checkpoint {self.record.epoch}: {what}")
        return self.nodes[node].of(item, node)

    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        each = [reader.verify(progress) for reader in self.nodes.values()]
        errors = [error for one in each for error in (*one.damage, *one.unread)]
        above = self.folder.rpartition("/")[0]
        errors += [DamagedError(paths.join(above, paths.folder_name(n)), why) for n, why in self.unread.items()]
        return Verification.of(self.record.epoch, sum(one.nbytes for one in each), errors)
