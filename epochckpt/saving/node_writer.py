"""How a process writes the folders of the nodes that it hosts: arrays, the files of handlers, then `node.json`."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence

from epochckpt import _monitoring
from epochckpt._threads import Pool
from epochckpt.arrays import writer
from epochckpt.arrays.plan import ItemPlan
from epochckpt.arrays.snapshot import Buffer
from epochckpt.arrays.transfers import Arriving
from epochckpt.directory.epoch_directory import Staging
from epochckpt.format import DataFile, NodeEntry, NodeRecord, Nodes, checksums, paths
from epochckpt.format.records import ReplicaFile, tree_digest
from epochckpt.options import StorageOptions
from epochckpt.orbax import events
from epochckpt.orbax.view import bases
from epochckpt.saving.page_cache import PageCache
from epochckpt.saving.reports import NodeReport, ProcessReport
from epochckpt.saving.save import Save

# Bytes of small contents that travel in the commit record.
_INLINED_BYTES = 2**20  # of the primary
_INLINED_BY_OTHERS = 16 * 2**20  # of all other processes together

_PIECE_BYTES = 4 * 2**20  # of an array, that have one digest where processes compare it


def write_nodes(
    *,
    staging: Staging,
    nodes: Nodes,
    save: Save,
    options: StorageOptions,
    pool: Pool,
    page_cache: PageCache | None = None,
) -> ProcessReport:
    """Writes and seals the folders of this process's nodes, durably; what the `page_cache` holds gives way to them."""
    try:
        writers = [
            _NodeWriter(
                staging=staging,
                nodes=nodes,
                number=number,
                save=save,
                options=options,
                page_cache=page_cache,
            )
            for number in nodes.hosted
        ]
        began = time.monotonic()
        trees = save.snapshot.trees
        replicas = save.snapshot.replicas
        for each in writers:
            each.write_arrays(pool)
        planned_bytes = sum(int(tree.plan.owned.nbytes.sum()) for tree in [*trees, *replicas])
        written_bytes = sum(each.nbytes for each in writers)
        events.wrote(staging.store.root, time.monotonic() - began, planned_bytes, written_bytes)
        if nodes.process == 0:
            for tree in trees:
                _monitoring.numbers(tree.plan.figures)
        save.snapshot.drop_arrays()  # their memory need not wait for handlers
        writers[0].write_files()
        return ProcessReport(save.plan, tuple(each.seal() for each in writers))
    except FileNotFoundError as missing:
        raise staging.lost() from missing


class _NodeWriter:
    """Writes the folder of one node: its arrays, then the files of handlers, and `node.json` last."""

    @_monitoring.timed(*events.MADE_FOLDERS)
    def __init__(
        self,
        *,
        staging: Staging,
        nodes: Nodes,
        number: int,
        save: Save,
        options: StorageOptions,
        page_cache: PageCache | None,
    ):
        self._staging = staging
        self._store = staging.store
        self._options = options
        self._save = save
        self._number = number
        self._name, self._process = nodes.rows[number]
        self._processes = nodes.processes
        self._older = None if page_cache is None else page_cache.older(self._name)
        self._folder = staging.make_node_folder(self._name)
        self._files: list[DataFile] = []
        self._replicas: list[ReplicaFile] = []
        self._folders: list[str] = []
        self._secs = 0.0
        # For the `NodeReport`.
        self._local = options.local_disks and nodes.processes > 1
        self._inlined: dict[str, dict[str, bytes]] = {}
        self._room = min(_INLINED_BYTES, _INLINED_BY_OTHERS // nodes.processes) if number else _INLINED_BYTES
        self._alike: dict[str, dict[str, str]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the files that it has written."""
        return sum(file.size for file in [*self._files, *self._replicas])

    def write_arrays(self, pool: Pool) -> None:
        began = time.monotonic()
        for plan, node, buffers in self._save.snapshot.trees:
            if node == self._number:
                folder = self._staging.data_folder(self._name, plan.item.name)
                self._files += self._write_item(folder, plan, buffers, DataFile, pool)
                if plan.replicas is not None:
                    self._note_values(plan, buffers)
        for plan, _, buffers in self._save.snapshot.replicas:  # of the only node that this process hosts
            if plan.sources and not self._folders:
                self._folders.append(paths.REPLICA_FOLDER)
                self._store.make_folder(paths.join(self._folder, paths.REPLICA_FOLDER))
            self._replicas += self._write_item(self._folder, plan, buffers, ReplicaFile, pool)
            self._note_values(plan, buffers)
        for plan, node, buffers in self._save.snapshot.compared:
            if node == self._number:
                self._note_uncommitted(plan, buffers)
        self._secs += time.monotonic() - began

    def _write_item(
        self, folder: str, plan: ItemPlan, buffers: Sequence[Buffer | Arriving], kind: type[writer.FileT], pool: Pool
    ) -> list[writer.FileT]:
        """Writes the data files of one item."""
        return writer.write_arrays(
            self._store,
            folder,
            epoch=self._save.epoch,
            plan=plan,
            buffers=buffers,
            block_bytes=self._options.block_bytes,
            pool=pool,
            kind=kind,
            older=self._older,
        )

    def _note_values(self, plan: ItemPlan, buffers: Sequence[Buffer | Arriving]) -> None:
        """Keeps the inlined values, for the commit record, and digests of per-process values, for comparison."""
        item = plan.item
        for leaf, buffer, start, end in _cells(plan, buffers):
            if leaf in item.inlined:
                self._inlined.setdefault(item.name, {})[str(leaf)] = bytes(buffer.data(start, end))
            elif not item.leaves[leaf].is_jax and end > start:
                alike = self._alike.setdefault(item.name, {})
                alike[str(leaf)] = checksums.digest(buffer.data(start, end))

    def _note_uncommitted(self, plan: ItemPlan, buffers: Sequence[Buffer | Arriving]) -> None:
        """Keeps digests of arrays that each process has for itself, for comparison."""
        digests = collections.defaultdict[int, list[str]](list)  # by leaf, of its pieces; all processes cut it alike
        for leaf, buffer, start, end in _cells(plan, buffers):
            for first in range(start, end, _PIECE_BYTES):
                last = min(first + _PIECE_BYTES, end)
                digests[leaf].append(checksums.digest(buffer.data(first, last)))
                buffer.release(first, last)
        writer.check_unchanged(self._save.epoch, plan, buffers)
        alike = self._alike.setdefault(plan.item.name, {})
        alike |= {str(leaf): checksums.digest("".join(each).encode()) for leaf, each in digests.items()}

    def write_files(self) -> None:
        """Waits for the files that handlers write, and copies them."""
        began = time.monotonic()
        size = self._options.block_bytes
        found = self._save.snapshot.collect(self._save.epoch, self._save.deadline)
        folders = writer.folders(found)
        for path in folders:
            self._store.make_folder(paths.join(self._folder, path))
        self._folders += folders
        for (item, path), source in found.items():
            file = writer.write_file(self._store, self._folder, item, path, source, size)
            self._files.append(file)
            if self._local and file.size <= self._room:
                self._room -= file.size
                data = source if isinstance(source, bytes) else source.read_bytes()
                self._inlined.setdefault(item, {})[path] = data
        self._secs += time.monotonic() - began

    @_monitoring.timed(*events.SEALED)
    def seal(self) -> NodeReport:
        began = time.monotonic()
        save = self._save
        files = tuple(self._files)
        own = save.snapshot.own.get(self._number, {})
        timings = {"write_secs": round(self._secs, 6), "blocked_secs": round(save.request.blocked_secs, 6)}
        record = NodeRecord(
            epoch=save.epoch,
            save_id=self._staging.save_id,
            node=self._name,
            process=self._process,
            processes=self._processes,
            plan=save.plan,
            files=files,
            timings=timings,
            items=own,
            replicas=tuple(self._replicas),
        )
        data = record.to_bytes()
        view: list[str] | None = [] if self._options.orbax_view else None
        if view is not None and self._processes > 1 and not self._local:
            view = bases(save.snapshot.items, files)
        self._staging.seal(self._name, self._folders, data, view)
        secs = self._secs + time.monotonic() - began
        entry = NodeEntry(
            name=self._name,
            process=self._process,
            record_size=len(data),
            record_digest=checksums.digest(data),
            files=files,
            secs=secs,
        )
        digests = {n: tree_digest(tree, [f for f in files if f.item == n]) for n, tree in own.items()}
        return NodeReport(entry=entry, own=digests, alike=self._alike, inlined=self._inlined)


def _cells(plan: ItemPlan, buffers: Sequence[Buffer | Arriving]) -> Iterator[tuple[int, Buffer | Arriving, int, int]]:
    """Each cell of a plan: its leaf, and its buffer with the cell's begin and end there, in bytes."""
    sizes = plan.owned.nbytes.tolist()
    for cells, buffer in zip(plan.cell_ranges, buffers, strict=True):
        end = 0
        for cell in range(cells.start, cells.stop):
            start = end
            end += sizes[cell]
            yield plan.sources[cell].leaf, buffer, start, end
