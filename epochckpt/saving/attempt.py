"""One attempt at saving one epoch, and how a process writes its part of it.

`CheckpointManager.save` makes an `Attempt` on the training thread, around a snapshot, and hands it to `Attempts` (see
`saver`). In the background each process writes the folders of its nodes (`write_nodes`) and reports them with a
`ProcessReport`. From all reports the primary makes the commit record (`Attempt.record`), and every process hears of
the commit as a `Committed`. Reports and commits travel as JSON (`to_wire`, `from_wire`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from epochckpt import _collector, _monitoring, _progress, _threads, _units
from epochckpt._threads import Deadline, Pool
from epochckpt.arrays import writer
from epochckpt.arrays.plan import ItemPlan
from epochckpt.arrays.snapshot import Buffer, Snapshot
from epochckpt.directory.protocol import ReplaceCondition, Staging
from epochckpt.errors import SaveError, from_wire, to_wire
from epochckpt.format import DataFile, EpochRecord, NodeEntry, NodeRecord, Nodes, checksums, paths
from epochckpt.format.records import FILE_ROWS, AlsoFile, pack_contents, tree_digest, unpack_contents
from epochckpt.options import StorageOptions
from epochckpt.orbax import events
from epochckpt.orbax.view import bases
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.storage import Tally

# Bytes of small contents that travel in the commit record: of the primary, and of all other processes together.
_CARRIED_BYTES, _CARRIED_BY_OTHERS = 2**20, 16 * 2**20


@dataclasses.dataclass(frozen=True)
class LocalReport:
    """What a node reports besides where each host has a disk of its own, on which others' values are to be, too.

    Of files of handlers, and of leaves that are no jax arrays, the values of the process that writes them count.
    """

    carried: Mapping[str, Mapping[str, bytes]]  # small contents, as in `EpochRecord`
    alike: Mapping[str, str]  # by leaf, for messages: the digest of what every process wrote by itself

    def to_wire(self) -> dict[str, Any]:
        return {"carried": pack_contents(self.carried), "alike": dict(self.alike)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> LocalReport:
        return cls(unpack_contents(wire["carried"]), wire["alike"])


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """A process's report of one node that it hosts, once the node's files are durable."""

    entry: NodeEntry  # the node as `epoch.json` will describe it
    own: Mapping[str, str]  # by item, the digest of each item that differs per node
    local: LocalReport | None = None  # where each host has a disk of its own

    def to_wire(self) -> dict[str, Any]:
        files = [FILE_ROWS.pack(file) for file in self.entry.files]
        local = {} if self.local is None else {"local": self.local.to_wire()}
        return {**vars(self.entry), "files": files, "own": dict(self.own), **local}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> NodeReport:
        fields = {**wire, "files": tuple(FILE_ROWS.parse("a report", "files", row) for row in wire["files"])}
        own, local = fields.pop("own"), fields.pop("local", None)
        return cls(NodeEntry(**fields), own, None if local is None else LocalReport.from_wire(local))


@dataclasses.dataclass(frozen=True)
class ProcessReport:
    """A process's report to the primary: the nodes that it has written, or the error that kept it from that."""

    plan: str = ""  # digest of its plan
    nodes: tuple[NodeReport, ...] = ()  # one report for each node that it hosts
    error: Exception | None = None

    def to_wire(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": to_wire(self.error)}
        return {"plan": self.plan, "nodes": [node.to_wire() for node in self.nodes]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ProcessReport:
        if "error" in wire:
            return cls(error=from_wire(wire["error"]))
        return cls(wire["plan"], tuple(map(NodeReport.from_wire, wire["nodes"])))


@dataclasses.dataclass(eq=False)
class Attempt:
    """One attempt at saving one epoch."""

    epoch: int
    number: int  # of attempts at this epoch that came before
    deadline: Deadline
    snapshot: Snapshot = dataclasses.field(default_factory=Snapshot)  # dropped as soon as it is written
    default_item: bool = True  # the epoch has one unnamed item
    metrics: Any = None
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replaces: ReplaceCondition | None = None
    # Why this process could not begin the attempt, as its caller knows already: reported in place of its nodes, so that
    # no process waits for them.
    error: Exception | None = None
    cancelled: bool = False  # by its caller: it fails at the next step before the commit
    started_ns: int = dataclasses.field(default_factory=time.time_ns)
    started: float = dataclasses.field(default_factory=time.monotonic)
    blocked_secs: float = 0.0
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)  # until it began, see `RunClock`
    cost: SaveCost | None = None  # once it is committed
    nbytes: float = 0.0  # that this process writes, about
    written_before: int = 0  # bytes that its store had written when it began to write
    writing: float = 0.0  # when this process began to write, monotonic; 0 before
    collecting: float = 0.0  # on the primary: when it began to wait for the other processes' reports; 0 before
    log_entry: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the manager's logger, see `step_log`
    state: str = "queued"  # for people
    written: _threads.Future[Any] = dataclasses.field(default_factory=_threads.Future)  # its nodes here, or a failure
    done: _threads.Future[Any] = dataclasses.field(default_factory=_threads.Future)
    reports: dict[int, ProcessReport] = dataclasses.field(default_factory=dict)  # by process
    removals: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # of older epochs
    offered: bool = False  # on the primary, with local disks: the others have been told to put it in place
    # Claimed by the thread that gives the attempt up, or by the step after which this process may not do that any more
    # (on the primary the commit, elsewhere the report): only the first of the two happens.
    binding: _threads.Once = dataclasses.field(default_factory=_threads.Once)
    dequeued: _threads.Once = dataclasses.field(default_factory=_threads.Once)  # by the thread that writes or drops it
    ended: _threads.Once = dataclasses.field(default_factory=_threads.Once)  # by the thread that ends it

    @property
    def name(self) -> str:
        """`<epoch>-<number>`: the same on every process, and no other attempt of this manager has it."""
        return f"{self.epoch}-{self.number}"

    @property
    def elapsed_secs(self) -> float:
        """Seconds since `save` was called."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def shown(self, tally: Tally) -> Generator[None]:
        """Shows how much of its part this process has written, while it is waited for; `tally` is that of its store."""

        def written() -> float:
            if self.written.done():
                return math.inf
            return tally.nbytes - self.written_before if self.state == "writing" else 0.0

        with _progress.work(f"saving checkpoint {self.epoch}") as work:
            work.follow(written, self.nbytes)
            yield

    def check(self) -> None:
        """Raises SaveError if it was cancelled."""
        if self.cancelled:
            raise SaveError(self.epoch, "it was cancelled")

    @property
    def plan(self) -> str:
        return self.snapshot.digest()

    def receive(self, found: Mapping[int, Any]) -> None:
        """On the primary: takes the reports of other processes, as JSON by process."""
        with _collector.paused():  # those of a thousand nodes are many objects, which stay until the commit
            self.reports.update({process: ProcessReport.from_wire(wire) for process, wire in found.items()})

    @property
    def node_reports(self) -> list[NodeReport]:
        """The reports of all nodes, in node order, without the nodes of processes that failed."""
        return [node for _, report in sorted(self.reports.items()) for node in report.nodes]

    @property
    def node_secs(self) -> dict[str, float]:
        """How long each node wrote, by name, as far as that was reported to this process."""
        return {node.entry.name: node.entry.secs for node in self.node_reports}

    def record(self, attempt: str, *, objects: bool, per_node: bool = False) -> EpochRecord:
        """The commit record, as of now, from the reports of all nodes; `attempt` is the attempt's id.

        SaveError says that two nodes wrote a file of one name, or one a file where another has a folder, or that hosts
        with disks of their own have different values of a leaf. `objects`: the store has no rename. `per_node`: this is
        the epoch of one node by itself.
        """
        nodes = self.node_reports
        self._check_file_names()
        carried: dict[str, dict[str, bytes]] = {}
        for node in nodes:
            for item, contents in (node.local.carried if node.local is not None else {}).items():
                carried[item] = {**carried.get(item, {}), **contents}
        self._check_alike()
        items = dict(self.snapshot.items)
        for name, item in items.items():
            if item.kind == "node":
                digests = {node.own.get(name) for node in nodes}
                items[name] = dataclasses.replace(item, same=len(digests) == 1 and None not in digests)
        return EpochRecord(
            epoch=self.epoch,
            attempt=attempt,
            objects=objects,
            plan=self.plan,
            nodes=tuple(node.entry for node in nodes),
            items=items,
            default_item=self.default_item,
            metrics=self.metrics,
            custom_metadata=self.custom_metadata,
            started_ns=self.started_ns,
            committed_ns=time.time_ns(),
            timings={"blocked_secs": round(self.blocked_secs, 6), "secs": round(self.elapsed_secs, 6)},
            per_node=per_node,
            carried=carried,
        )

    def _check_alike(self) -> None:
        """Where each host has a disk of its own, the hosts have the same values of large NumPy leaves."""
        first: dict[str, tuple[str, str]] = {}  # digest and node by leaf
        for node in self.node_reports:
            for leaf, digest in (node.local.alike if node.local is not None else {}).items():
                expected, other = first.setdefault(leaf, (digest, node.entry.name))
                if digest != expected:
                    raise SaveError(
                        self.epoch,
                        f"{leaf} is no jax array, and has other values on {node.entry.name} than on {other}. With "
                        "local_disks a large one must be the same on every process: make it a jax array of the whole "
                        "job, or save what differs with NodeSave",
                    )

    def _check_file_names(self) -> None:
        """Handlers' files of all nodes share one folder in the Orbax view."""
        writers: dict[str, str] = {}  # node by file
        folders: dict[str, str] = {}  # node by folder
        for node in (report.entry for report in self.node_reports):
            for path in (file.path for file in node.files if file.name):
                parents = paths.parents(path)
                other = writers.get(path) or folders.get(path) or next(filter(None, map(writers.get, parents)), None)
                if other is not None:
                    raise SaveError(self.epoch, f"nodes {other} and {node.name} both wrote {path}")
                writers[path] = node.name
                folders.update(dict.fromkeys(parents, node.name))

    def summary(self, record: EpochRecord) -> str:
        """The commit in a few words, for the log."""
        slowest = max(record.nodes, key=lambda node: node.secs)
        count = len(record.nodes)
        return (
            f"{_units.nbytes(record.nbytes)} from {count} node{'' if count == 1 else 's'} in "
            f"{self.elapsed_secs:.2f} s (blocked {self.blocked_secs * 1e3:.1f} ms, "
            f"slowest {slowest.name} {slowest.secs:.2f} s)"
        )


@dataclasses.dataclass(frozen=True)
class Committed:
    """A commit, as every process hears of it."""

    epoch: int
    metrics: Any
    committed_ns: int
    deleted: tuple[int, ...] = ()  # epochs that are gone now
    remote: tuple[int, ...] = ()  # epochs that only the mirror has from now on
    attached: Mapping[int, Mapping[str, Any]] | None = None  # metrics attached to other epochs; None: unknown
    attempt: str = ""  # its attempt id, on the primary
    cost: SaveCost | None = None
    hides: tuple[int, ...] = ()  # epochs that the primary takes out of sight in the directory itself

    def keeping(self, epochs: Collection[int]) -> Committed:
        """The same commit, after which these epochs, which could not be taken out of sight, are still there."""
        kept = {*epochs}
        return dataclasses.replace(
            self,
            deleted=tuple(epoch for epoch in self.deleted if epoch not in kept),
            remote=tuple(epoch for epoch in self.remote if epoch not in kept),
            hides=tuple(epoch for epoch in self.hides if epoch not in kept),
        )

    def to_wire(self, hides: bool = False) -> dict[str, Any]:
        """As JSON; with `hides`, every process takes those epochs out of sight on its own disk."""
        return {
            **({"hides": list(self.hides)} if hides else {}),
            "metrics": checksums.pack_json(self.metrics, "metrics"),
            "attached": None if self.attached is None else checksums.pack_by_number(self.attached, "metrics"),
            "committed_ns": self.committed_ns,
            "deleted": list(self.deleted),
            "remote": list(self.remote),
            "cost": None if self.cost is None else dataclasses.astuple(self.cost),
        }

    @classmethod
    def from_wire(cls, epoch: int, wire: Mapping[str, Any]) -> Committed:
        metrics = checksums.unpack_json(wire["metrics"])
        attached = None if wire["attached"] is None else checksums.unpack_by_number(wire["attached"])
        deleted, remote = tuple(wire["deleted"]), tuple(wire["remote"])
        cost = None if wire["cost"] is None else SaveCost(*wire["cost"])
        return cls(
            epoch,
            metrics,
            wire["committed_ns"],
            deleted,
            remote,
            attached,
            hides=tuple(wire.get("hides", ())),
            cost=cost,
        )


def write_nodes(staging: Staging, nodes: Nodes, attempt: Attempt, options: StorageOptions, pool: Pool) -> ProcessReport:
    """Writes and seals the folders of this process's nodes, durably."""
    try:
        writers = [_NodeWriter(staging, nodes, number, attempt, options) for number in nodes.hosted]
        began, trees, also = time.monotonic(), attempt.snapshot.trees, attempt.snapshot.also
        for each in writers:
            each.write_arrays(pool)
        sizes = sum(int(tree.plan.owned[2].sum()) for tree in [*trees, *also]), sum(each.nbytes for each in writers)
        events.wrote(staging.store.root, time.monotonic() - began, *sizes)
        if nodes.process == 0:
            for tree in trees:
                _monitoring.numbers(tree.plan.figures)
        attempt.snapshot.trees, attempt.snapshot.also = [], []  # their memory need not wait for handlers
        writers[0].write_files()
        return ProcessReport(attempt.plan, tuple(each.seal() for each in writers))
    except FileNotFoundError as missing:
        raise staging.lost() from missing


class _NodeWriter:
    """Writes the folder of one node: its arrays, then the files of handlers, and `node.json` last."""

    @_monitoring.timed(*events.MADE_FOLDERS)
    def __init__(self, staging: Staging, nodes: Nodes, number: int, attempt: Attempt, options: StorageOptions):
        self._staging, self._store, self._options = staging, staging.store, options
        self._attempt, self._number = attempt, number
        (self._name, self._process), self._processes = nodes.rows[number], nodes.processes
        self._folder = staging.make_node_folder(self._name)
        self._files: list[DataFile] = []
        self._also: list[AlsoFile] = []
        self._folders: list[str] = []
        self._secs = 0.0
        # Where each host has a disk of its own, see `LocalReport`.
        self._local = options.local_disks and nodes.processes > 1
        self._carried: dict[str, dict[str, bytes]] = {}
        self._room = min(_CARRIED_BYTES, _CARRIED_BY_OTHERS // nodes.processes) if number else _CARRIED_BYTES
        self._alike: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the files that it has written."""
        return sum(file.size for file in [*self._files, *self._also])

    def write_arrays(self, pool: Pool) -> None:
        began, epoch, size = time.monotonic(), self._attempt.epoch, self._options.block_bytes
        for plan, node, buffers in self._attempt.snapshot.trees:
            if node == self._number:
                folder = self._staging.data_folder(self._name, plan.item.name)
                self._files += writer.write_arrays(self._store, folder, epoch, plan, buffers, size, pool)
                if plan.also is not None:
                    self._note_values(plan, buffers)
        for plan, _, buffers in self._attempt.snapshot.also:  # of the only node that this process hosts
            if plan.sources and not self._folders:
                self._folders.append(paths.ALSO_FOLDER)
                self._store.make_folder(paths.join(self._folder, paths.ALSO_FOLDER))
            self._also += writer.write_arrays(self._store, self._folder, epoch, plan, buffers, size, pool, AlsoFile)
            self._note_values(plan, buffers)
        self._secs += time.monotonic() - began

    def _note_values(self, plan: ItemPlan, buffers: Sequence[Buffer]) -> None:
        """Keeps what the other hosts need, or compare, of leaves of which each process has a value of its own."""
        item, sizes = plan.item, plan.owned[2].tolist()
        for run, buffer in zip(plan.runs, buffers, strict=True):
            end = 0
            for source, size in zip(plan.sources[run.first : run.last], sizes[run.first : run.last], strict=True):
                start, end = end, end + size
                leaf = item.leaves[source.leaf]
                if source.leaf in item.carried:
                    self._carried.setdefault(item.name, {})[str(source.leaf)] = bytes(buffer.data(start, end))
                elif not leaf.is_global and leaf.nbytes:
                    digest = checksums.digest(buffer.data(start, end))
                    self._alike[f"item {item.name!r}, leaf {leaf.name!r}"] = digest

    def write_files(self) -> None:
        """Waits for the files that handlers write, and copies them."""
        began, size = time.monotonic(), self._options.block_bytes
        found = self._attempt.snapshot.collect(self._attempt.epoch, self._attempt.deadline)
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
                self._carried.setdefault(item, {})[path] = data
        self._secs += time.monotonic() - began

    @_monitoring.timed(*events.SEALED)
    def seal(self) -> NodeReport:
        began, attempt, files = time.monotonic(), self._attempt, tuple(self._files)
        own = attempt.snapshot.own.get(self._number, {})
        timings = {"write_secs": round(self._secs, 6), "blocked_secs": round(attempt.blocked_secs, 6)}
        record = NodeRecord(
            epoch=attempt.epoch,
            attempt=self._staging.save_id,
            node=self._name,
            process=self._process,
            processes=self._processes,
            plan=attempt.plan,
            files=files,
            timings=timings,
            items=own,
            also=tuple(self._also),
        )
        data = record.to_bytes()
        view: list[str] | None = [] if self._options.orbax_view else None
        if view is not None and self._processes > 1 and not self._local:
            view = bases(attempt.snapshot.items, files)
        self._staging.seal(self._name, self._folders, data, view)
        secs = self._secs + time.monotonic() - began
        entry = NodeEntry(self._name, self._process, len(data), checksums.digest(data), files, secs)
        digests = {n: tree_digest(tree, [f for f in files if f.item == n]) for n, tree in own.items()}
        return NodeReport(entry, digests, LocalReport(self._carried, self._alike) if self._local else None)
