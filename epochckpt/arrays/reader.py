"""Reads an epoch: finds where its arrays and files lie, and has `node_files` read and verify them.

`epoch.json` alone says which bytes are needed and where they lie; the `node.json` of each node has the checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from epochckpt import _collector, _progress
from epochckpt._threads import Pool
from epochckpt.arrays.node_files import (
    ArrayFile,
    CellUse,
    HandlerFile,
    InlinedFile,
    NodeFile,
    Pack,
    Tally,
    noting,
)
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochDeletedError,
    FormatError,
    FormatVersionError,
    unreadable,
)
from epochckpt.format import (
    ArrayItem,
    Box,
    DataFile,
    EpochRecord,
    ItemKind,
    NodeCells,
    NodeRecord,
    checksums,
    grid,
    parsing,
    paths,
)
from epochckpt.format.grid import slices, whole
from epochckpt.format.records import MAX_RECORD_BYTES
from epochckpt.orbax import events
from epochckpt.storage import Store

_OfNode = tuple[str, int]  # an item, and the number of a node
_Place = tuple[ArrayFile, int]  # of a cell: its file, and its position there
_Places = dict[tuple[int, int], _Place]  # by leaf and cell


class Request(NamedTuple):
    """A part of a leaf, and the array of its shape and of the stored dtype that it is read into."""

    item: str
    leaf: int
    box: Box
    out: np.ndarray


class Reads(NamedTuple):
    """What is to be read of one reader: requests, and leaves that are read into shared memory."""

    requests: Sequence[Request]
    packs: Sequence[Pack] = ()

    @property
    def nbytes(self) -> int:
        """All bytes that are to be read."""
        return sum(request.out.nbytes for request in self.requests) + sum(int(pack.sizes.sum()) for pack in self.packs)


class FileReads:
    """What is to be read of each data file, for one reader or several."""

    def __init__(self) -> None:
        # By file, and the position of a cell there: where its bytes go.
        self._cells: dict[ArrayFile, dict[int, list[CellUse]]] = {}
        self._packs: dict[ArrayFile, list[Pack]] = {}  # by file: the packs of which some leaves lie there

    @property
    def files(self) -> list[ArrayFile]:
        """The files, each once."""
        return [*dict.fromkeys([*self._packs, *self._cells])]

    def add_cell(self, file: ArrayFile, position: int, use: CellUse) -> None:
        """A cell is to be read, for one use of it."""
        self._cells.setdefault(file, {}).setdefault(position, []).append(use)

    def add_pack(self, file: ArrayFile, pack: Pack) -> None:
        """The leaves of a pack are to be read that lie in a file."""
        self._packs.setdefault(file, []).append(pack)

    def tasks(self, file: ArrayFile, tally: Tally) -> list[Callable[[], None]]:
        """Opens a file; returns tasks that read what is wanted of it."""
        return file.tasks(self._cells.get(file, {}), self._packs.get(file, []), tally)


class ArraySource(Protocol):
    """What a restore reads from: an `EpochReader`, which says what the methods do, or a step of stock Orbax."""

    folder: str

    @property
    def record(self) -> EpochRecord: ...  # it describes at least the item that is restored

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None: ...

    def check_files(self, item: str, leaf: int, box: Box) -> None: ...


class EpochReader:
    """Reads one committed epoch from its folder in the store; without `verify`, leaves are read without checksums.

    On a disk that only its own host sees, the folder has the files of `local_nodes` only. Missing parts are read from
    the mirror: `open_mirror` gives a reader of the epoch there, or None, and is called when a part is missing.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        record: EpochRecord,
        pool: Pool,
        verify: bool = True,
        local_nodes: Collection[int] | None = None,
        open_mirror: Callable[[], EpochReader | None] = lambda: None,
    ):
        self.store = store
        self.folder = folder
        self.record = record
        self.pool = pool
        self.verify = verify
        self.local_nodes = range(len(record.nodes)) if local_nodes is None else local_nodes
        self.mirror_reader = functools.cache(open_mirror)
        # What is found when it is first asked for. To cache bound methods instead would be a cycle of references, and
        # the leaves of the record would stay until the garbage collector has looked at all objects of the program.
        self._node_records: dict[int, NodeRecord] = {}
        self._node_files: dict[int, dict[str, DataFile]] = {}
        self._files: dict[_OfNode, list[ArrayFile]] = {}
        self._replica_files: dict[_OfNode, list[ArrayFile]] = {}
        self._places: dict[_OfNode, _Places] = {}
        self._replica_places: dict[_OfNode, _Places] = {}
        self._checked: set[tuple[int, str]] = set()  # reader and path of files whose sizes are as recorded

    def verifying(self, pool: Pool) -> EpochReader:
        """A reader of the same epoch, which verifies."""
        return EpochReader(
            store=self.store,
            folder=self.folder,
            record=self.record,
            pool=pool,
            verify=True,
            local_nodes=self.local_nodes,
            open_mirror=self.mirror_reader,
        )

    def of_owner(self, node: int) -> EpochReader:
        """The reader that reaches a node's files: this one, or the one of the mirror.

        DamagedError: neither this host nor a mirror has them. StorageError: the mirror does not answer.
        """
        if node in self.local_nodes:
            return self
        mirror_reader = self.mirror_reader()
        if mirror_reader is None:
            name = self.record.nodes[node].name
            has = f"which has those of {self.local_node_names or 'no node'}"
            problem = f"neither this host, {has}, nor a mirror has the files of node {name!r}"
            raise DamagedError(self.path(node), f"{problem}: only the disk of the host that wrote them does")
        return mirror_reader

    @property
    def local_node_names(self) -> str | None:
        """The names of the local nodes; None if all nodes are local."""
        if len(self.local_nodes) == len(self.record.nodes):
            return None
        return ", ".join(self.record.nodes[node].name for node in sorted(self.local_nodes))

    @property
    def nbytes(self) -> int:
        """Bytes of the files of local nodes, as far as their records tell."""
        total = 0
        for node in sorted(self.local_nodes):
            total += self.record.nodes[node].nbytes
            with contextlib.suppress(EpochCheckpointError):
                total += sum(file.size for file in self.node_record(node).replicas)
        return total

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None:
        """Fills the `out` of every request; DamagedError, or EpochDeletedError if the epoch went away meanwhile."""
        read_together([ReaderReads(self, Reads(requests, packs))])

    def prepare(self, reads: Reads, by_file: FileReads) -> None:
        """Fills the requests that the commit record answers; adds to `by_file` what is to be read for all others."""
        requests = [*reads.requests]
        for pack in reads.packs:
            if pack.node not in self.local_nodes:
                requests += self._unpacked(pack)
                continue
            for file in self.files(pack.item, pack.node):
                if np.any(file.cell_of[pack.leaves] >= 0):
                    by_file.add_pack(file, pack)
        for request in requests:
            content = self._inlined(request)
            if content is not None:
                request.out[...] = content[slices(request.box)]
                continue
            for (file, position), use in self._cells(request):
                by_file.add_cell(file, position, use)

    def load_records(self, nodes: Iterable[int]) -> None:
        """Reads the records of these nodes, several at once."""
        self.pool.run([functools.partial(self.node_record, node) for node in nodes])

    def item_files(self, item: str) -> list[tuple[int, DataFile]]:
        """(node, file) of every file that handlers wrote for an item, on all nodes."""
        inlined = self.record.inlined.get(item, {})
        listed: dict[int, list[DataFile]] = {}  # as the commit record lists them, without checksums
        for node, entry in enumerate(self.record.nodes):
            files = [file for file in entry.files if file.item == item and file.name]
            if files:
                listed[node] = files
        # The records of nodes have the checksums. Files that the commit record has need none.
        read = {
            node
            for node, files in listed.items()
            if node in self.local_nodes or any(file.name not in inlined for file in files)
        }
        self.load_records(sorted(read))
        found: list[tuple[int, DataFile]] = []
        for node, files in listed.items():
            if node in read:
                recorded = self.node_record(node).files
                found += [(node, file) for file in recorded if file.item == item and file.name]
                continue
            for file in files:
                sums = checksums.WRITTEN.sums([inlined[file.name]])  # those of its content
                found.append((node, dataclasses.replace(file, sums=sums)))
        return found

    def node_file(self, node: int, file: DataFile) -> NodeFile:
        """A file that a handler wrote, wherever it can be read."""
        content = self.record.inlined.get(file.item, {}).get(file.name)
        if node in self.local_nodes or content is None:
            return HandlerFile(self.of_owner(node), node, file)
        return InlinedFile(self, node, file, content)

    def read_file(self, item: str, name: str) -> bytes:
        """The content of a small file that a handler wrote, verified."""
        found = [(node, f) for node, f in self.item_files(item) if f.name == name]
        if len(found) != 1:
            raise FormatError(f"{self.folder}/{item}/{name}", "is not listed in its node's record")
        ((node, listed),) = found
        file = self.node_file(node, listed)
        if file.size > MAX_RECORD_BYTES:
            raise FormatError(file.path, f"is recorded with {file.size} bytes, more than {MAX_RECORD_BYTES}")
        blocks: list[bytes] = []
        file.stream(lambda _, block: blocks.append(bytes(block)), pool=Pool(1))  # in order; the first damage is raised
        return b"".join(blocks)

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """Checks the sizes of the files that hold a part of a leaf, before memory is allocated for it."""
        arrays = self._arrays(item)
        nbytes = arrays.leaves[leaf].nbytes
        if nbytes < self.store.size_check_from_bytes:
            return
        files = {self._place(item, leaf, cell)[0] for cell in arrays.cells_touching(leaf, box)}
        for file in sorted(files, key=lambda file: file.path):
            if nbytes >= file.epoch.store.size_check_from_bytes:
                self._check_size(file)

    def _check_size(self, file: NodeFile) -> None:
        if (id(file.epoch), file.path) not in self._checked:
            file.check_size(functools.partial(file.epoch.store.size, file.path))
            self._checked.add((id(file.epoch), file.path))

    def path(self, node: int, file: DataFile | None = None) -> str:
        """Path of a node's file, or of its record, relative to the directory."""
        return paths.join(self.folder, self.record.path(node, file))

    def node_record(self, node: int) -> NodeRecord:
        """A node's `node.json`, verified against `epoch.json`."""
        if node not in self.local_nodes:
            return self.of_owner(node).node_record(node)
        if node not in self._node_records:
            self._node_records[node] = self.store.confirming_damage(lambda: self._read_node_record(node))
        return self._node_records[node]

    def adopt_node_record(self, node: int, record: NodeRecord) -> None:
        """Takes the verified record of a node from another reader, so that it is not read again."""
        self._node_records[node] = record

    def node_files(self, node: int) -> dict[str, DataFile]:
        """The files of a node by path, as its record describes them."""
        if node not in self._node_files:
            record = self.node_record(node)
            self._node_files[node] = {file.path: file for file in (*record.files, *record.replicas)}
        return self._node_files[node]

    def _read_node_record(self, node: int) -> NodeRecord:
        entry = self.record.nodes[node]
        path = self.path(node)
        data = self.guard(path, lambda: self.store.read(path, limit_bytes=entry.record_size))
        if len(data) != entry.record_size or checksums.digest(data) != entry.record_digest:
            self.check_present(f"{path} changed")
            raise DamagedError(path, f"its {len(data)} bytes are not the record that the epoch was committed with")
        record = parsing.parse_node(path, data)
        if (record.node, record.save_id, record.plan) != (entry.name, self.record.save_id, self.record.plan):
            raise FormatError(path, f"belongs to node {record.node!r}, attempt {record.save_id!r}, another save")
        return record

    def has(self, node: int, item: str) -> bool:
        """Whether a node saved its own tree for an item."""
        return item in self.node_record(node).items

    def of_node(self, node: int, item: str) -> EpochReader:
        """A reader of one node's own tree of an item, as if it were an epoch by itself."""
        if node not in self.local_nodes:
            return self.of_owner(node).of_node(node, item)
        own = self.node_record(node).items.get(item)
        if own is None:
            raise FormatError(self.path(node), f"has no tree of item {item!r}")
        record = dataclasses.replace(self.record, nodes=(self.record.nodes[node],), items={item: own})
        reader = EpochReader(
            store=self.store,
            folder=self.folder,
            record=record,
            pool=self.pool,
            verify=self.verify,
        )
        reader.adopt_node_record(0, self.node_record(node))
        return reader

    def files(self, item: str, node: int) -> list[ArrayFile]:
        """The data files that a node wrote for an item."""
        if node not in self.local_nodes:
            return self.of_owner(node).files(item, node)
        if (item, node) not in self._files:
            listed = [f for f in self.record.nodes[node].files if f.item == item]
            owned = self._arrays(item).owned(node)
            where = paths.join(self.folder, paths.EPOCH_RECORD)
            self._files[item, node] = self._laid_out(item, node, listed, owned, where)
        return self._files[item, node]

    def replica_files(self, item: str, node: int) -> list[ArrayFile]:
        """The replica files that a local node wrote; none unless hosts have disks of their own."""
        if (item, node) not in self._replica_files:
            listed = [f for f in self.node_record(node).replicas if f.item == item]
            held = self._arrays(item).replicas(node)
            files = self._laid_out(item, node, listed, held, self.path(node)) if listed else []
            self._replica_files[item, node] = files
        return self._replica_files[item, node]

    def _laid_out(
        self,
        item: str,
        node: int,
        listed: Sequence[DataFile],
        cells: NodeCells,
        where: str,
    ) -> list[ArrayFile]:
        """The files in which a node has these cells of an item, as the record `where` lists them."""
        arrays = self._arrays(item)
        name = self.record.nodes[node].name
        ends = np.cumsum([f.cells for f in listed], dtype=np.int64).tolist()
        if [f.part for f in listed] != list(range(len(listed))) or (ends[-1] if ends else 0) != len(cells.leaves):
            problem = f"node {name!r}, item {item!r}: its files do not hold the {len(cells.leaves)} cells it owns"
            raise FormatError(where, problem)
        found = []
        for recorded, part in zip(listed, arrays.cut(cells, ends), strict=True):
            file = ArrayFile(self, node, recorded, arrays, part)
            if int(file.offsets[-1]) != file.size:
                problem = f"{file.path} is recorded with {file.size} bytes, its shards need {int(part.offsets[-1])}"
                raise FormatError(where, problem)
            found.append(file)
        return found

    def guard(
        self, path: str, read: Callable[[], Any], problem: str = "", leaf: Callable[[], str | None] = lambda: None
    ) -> Any:
        """Calls `read`; raises EpochDeletedError if the epoch is gone, else what a failure says of the file."""
        try:
            return read()
        except EpochCheckpointError:
            raise
        except (EOFError, ValueError) as error:
            self.check_present(str(error))
            raise DamagedError(path, f"{problem}{error}", leaf()) from error
        except OSError as error:
            self.check_present(str(error))
            raise unreadable(path, error) from error

    def check_present(self, detail: str) -> None:
        """Raises EpochDeletedError unless the commit record is still the one this reader began with."""
        path = paths.join(self.folder, self.record.name)
        try:
            now = parsing.read_record(self.store, path, parsing.parse_head)
        except (DamagedError, FormatError):
            return
        except FormatVersionError as error:
            raise EpochDeletedError(self.record.epoch, self.store.root, f"now {error}") from error
        if now is None:
            raise EpochDeletedError(self.record.epoch, self.store.root, detail)
        if now.save_id != self.record.save_id:
            raise EpochDeletedError(self.record.epoch, self.store.root, "another attempt is committed there now")

    def verify_all(self, progress: Callable[[int], None]) -> list[EpochCheckpointError]:
        """Reads every byte of local nodes; returns one error per damaged block, and per file that cannot be read."""
        damage: list[EpochCheckpointError] = []
        if not self.local_nodes:
            damage.append(DamagedError(self.folder, "has no node's files"))
        for node in sorted(self.local_nodes):
            with noting(damage):
                record = self.node_record(node)
                for name, item in self.record.items.items():
                    written = [file for file in record.files if file.item == name]
                    with noting(damage):
                        if item.kind is ItemKind.NODE:
                            if written or name in record.items:  # else this node has no tree of the item
                                damage += self.of_node(node, name).verify_all(progress)
                            continue
                        files: Iterable[NodeFile] = (HandlerFile(self, node, file) for file in written)
                        if item.kind is ItemKind.ARRAYS:
                            files = [*self.files(name, node), *self.replica_files(name, node)]
                        for file in files:
                            with noting(damage):
                                file.stream(lambda _, block: progress(len(block)), damage=damage)
        return damage

    def _arrays(self, item: str) -> ArrayItem:
        arrays = self.record.items[item].arrays
        assert arrays is not None, "callers choose array items"
        return arrays

    def _unpacked(self, pack: Pack) -> Iterator[Request]:
        """A request for each leaf of a pack."""
        for leaf, start in zip(pack.leaves.tolist(), pack.starts.tolist(), strict=True):
            info = self._arrays(pack.item).leaves[leaf]
            assert info.dtype is not None, "it has bytes"
            yield Request(pack.item, leaf, whole(info.shape), np.ndarray(info.shape, info.dtype, pack.out, start))

    def _cells(self, request: Request) -> Iterator[tuple[_Place, CellUse]]:
        """((file, position in it), use) for every cell that a request needs."""
        arrays = self._arrays(request.item)
        if arrays.is_whole(request.leaf):
            if request.out.size:
                use = CellUse(request.out, slices(request.box, request.box), slices(request.box))
                yield self._place(request.item, request.leaf, 0), use
            return
        for cell in arrays.cells_touching(request.leaf, request.box):
            box = arrays.cell_box(request.leaf, cell)
            meet = grid.meet(request.box, box)
            place = self._place(request.item, request.leaf, cell)
            yield place, CellUse(request.out, slices(meet, request.box), slices(meet, box))

    def _place(self, item: str, leaf: int, cell: int) -> _Place:
        """Where a cell is read from: the file, and the position in it."""
        owner = self._arrays(item).owner(leaf, cell)
        for node in () if owner in self.local_nodes else sorted(self.local_nodes):
            if (found := self._places_of_replicas(item, node).get((leaf, cell))) is not None:
                return found
        return self._places_of(item, owner)[leaf, cell]

    def _places_of(self, item: str, node: int) -> _Places:
        """Where the cells lie that a node wrote as their owner."""
        if (item, node) not in self._places:
            self._places[item, node] = _places_in(self.files(item, node))
        return self._places[item, node]

    def _places_of_replicas(self, item: str, node: int) -> _Places:
        """Where the cells lie that a local node wrote and another one owns."""
        if (item, node) not in self._replica_places:
            self._replica_places[item, node] = _places_in(self.replica_files(item, node))
        return self._replica_places[item, node]

    def _inlined(self, request: Request) -> np.ndarray | None:
        """The leaf of a request, if the commit record has it and its node is not local."""
        content = self.record.inlined.get(request.item, {}).get(str(request.leaf))
        arrays = self._arrays(request.item)
        if content is None or arrays.owner(request.leaf, 0) in self.local_nodes:
            return None
        leaf = arrays.leaves[request.leaf]
        assert leaf.dtype is not None, "it has bytes"
        return np.frombuffer(content, np.uint8).view(leaf.dtype).reshape(leaf.shape)


class ReaderReads(NamedTuple):
    """What is to be read of one reader."""

    reader: EpochReader
    reads: Reads


def read_together(asked: Sequence[ReaderReads]) -> None:
    """Does what `EpochReader.read` does for several readers of one directory, with the threads of the first."""
    began = time.monotonic()
    store = asked[0].reader.store
    pool = asked[0].reader.pool
    by_file = FileReads()
    with _collector.paused():
        for reader, reads in asked:
            reader.prepare(reads, by_file)
    files = by_file.files
    records = {(file.epoch, file.node) for file in files}
    pool.run([functools.partial(epoch.node_record, node) for epoch, node in records])
    tally = Tally()
    nbytes = sum(each.reads.nbytes for each in asked)
    _progress.follow(lambda: tally.nbytes, nbytes)
    at_once = store.max_open_files or max(len(files), 1)
    for first in range(0, len(files), at_once):
        _read_files(files[first : first + at_once], by_file, pool, tally)
    if files:
        events.read(store.root, time.monotonic() - began, nbytes, tally.nbytes, tally.verify_secs)


def _read_files(files: Sequence[ArrayFile], by_file: FileReads, pool: Pool, tally: Tally) -> None:
    """Reads what is wanted of some files, which are open at the same time."""
    try:
        with _collector.paused():
            tasks = [task for file in files for task in by_file.tasks(file, tally)]
        pool.run(tasks)
    finally:
        for file in files:
            file.close()


def _places_in(files: Sequence[ArrayFile]) -> _Places:
    """Where each cell of some files lies."""
    found: _Places = {}
    for file in files:
        pairs = zip(file.part.leaves.tolist(), file.part.cells.tolist(), strict=True)
        found.update({pair: (file, i) for i, pair in enumerate(pairs)})
    return found
