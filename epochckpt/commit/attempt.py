"""Writes what one process has to write for one attempt: the folder of every node that it hosts.

What the training thread hands to the background for one save, and what comes of it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epochckpt import _threads, _units
from epochckpt._threads import Deadline, Pool
from epochckpt.arrays import writer
from epochckpt.arrays.plan import ItemPlan
from epochckpt.arrays.saving import Prepared, checked_json, take
from epochckpt.arrays.snapshot import Buffer
from epochckpt.commit.protocol import Commits, Replaces
from epochckpt.commit.retention import EpochInfo
from epochckpt.errors import SaveError, copied, say
from epochckpt.format import DataFile, EpochRecord, ItemRecord, NodeEntry, NodeRecord, Nodes, checksums, paths
from epochckpt.format.records import tree_digest
from epochckpt.options import StorageOptions
from epochckpt.orbax import Content, HandlerSave


@dataclasses.dataclass(eq=False)
class Attempt:
    """What the training thread hands over.

    Attributes:
        epoch: its number.
        number: how often this epoch had been tried before.
        plans: one per pytree.
        places: for each of them the number of the node that writes it.
        buffers: one list per pytree; dropped once written.
        files: what handlers write on this node; removed once written.
        items: the items as they will be recorded.
        own: the items that differ per node, as each of this process's nodes records them, by node number.
        digest: gives the digest of the plan; computed in the background.
        copied_bytes: host memory that the snapshot holds.
        replaces: the epoch of this number that may be quarantined for it: a damaged one, or one that may be replaced.
        error: what kept this process from taking part; reported to the others instead of files.
        blocked_secs: how long the training thread was blocked.
        collecting: on the primary: when it began to wait for the other nodes' reports; 0 before.
        entry: for the manager's logger, see `step_log`.
        reports: what the processes have written, by process: see `writing`.
        binding: whether this node has done what it cannot take back, so that it may not call the attempt failed by
            itself any more: on the primary, begun to commit it; elsewhere, reported its part.
        taken: whoever takes it out of the queue: to write it, or to let it go.
        ended: whoever ends it.
    """

    epoch: int
    number: int
    plans: Sequence[ItemPlan]
    places: Sequence[int]
    buffers: list[list[Buffer]]
    files: Sequence[Content | HandlerSave]
    items: dict[str, ItemRecord]
    own: dict[int, dict[str, ItemRecord]]
    digest: Callable[[], str]
    default_item: bool
    metrics: Any
    custom_metadata: dict[str, Any]
    copied_bytes: int
    deadline: Deadline
    replaces: Replaces | None = None
    error: Exception | None = None
    started_ns: int = dataclasses.field(default_factory=time.time_ns)
    started: float = dataclasses.field(default_factory=time.monotonic)
    blocked_secs: float = 0.0
    collecting: float = 0.0
    state: str = "queued"
    written: _threads.Future[Any] = dataclasses.field(default_factory=_threads.Future)
    done: _threads.Future[Any] = dataclasses.field(default_factory=_threads.Future)
    reports: dict[int, Any] = dataclasses.field(default_factory=dict)
    binding: _threads.Once = dataclasses.field(default_factory=_threads.Once)
    taken: _threads.Once = dataclasses.field(default_factory=_threads.Once)
    ended: _threads.Once = dataclasses.field(default_factory=_threads.Once)
    entry: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """`<epoch>-<try>`: the same on every process, and no other attempt of this manager has it."""
        return f"{self.epoch}-{self.number}"

    @property
    def elapsed_secs(self) -> float:
        """Seconds since `save` was called."""
        return time.monotonic() - self.started

    @property
    def info(self) -> EpochInfo:
        """What a policy may look at."""
        return EpochInfo(self.epoch, metrics=self.metrics, time_ns=self.started_ns)

    @property
    def runs_handlers(self) -> bool:
        """Whether handlers still write for it, or may."""
        return any(isinstance(f, HandlerSave) for f in self.files)

    @property
    def plan(self) -> str:
        """Digest of the plan."""
        return self.digest()

    def collect(self) -> dict[tuple[str, str], bytes | pathlib.Path]:
        """What handlers have written on this node, by item and path in its folder; waits for that.

        Raises:
            SaveError: a handler failed.
        """
        found: dict[tuple[str, str], bytes | pathlib.Path] = {}
        for files in self.files:
            try:
                new = files.collect(self.deadline)
            except BaseException as error:  # asyncio's CancelledError is one
                raise SaveError(self.epoch, f"item {files.item!r}: its handler failed: {say(error)}") from error
            found.update({(files.item, name): source for name, source in new.items()})
        return found

    def drop(self) -> None:
        """Lets go of what the snapshot holds."""
        self.buffers = []
        for files in self.files:
            files.discard()
        self.files = ()

    def entries(self, nodes: Nodes) -> tuple[NodeEntry, ...]:
        """What the nodes have reported.

        Raises:
            SaveError: two of them wrote a file of one name for an item, or one a file where another has a folder.
        """
        out = []
        seen: dict[str, str] = {}
        folders: dict[str, str] = {}
        for (name, process), report in zip(nodes.rows, self._node_reports(), strict=True):
            files = tuple(map(DataFile.from_row, report["files"]))
            for path in (f.path for f in files if f.name):
                parents = paths.parents(path)
                other = seen.get(path) or folders.get(path) or next((seen[p] for p in parents if p in seen), None)
                if other is not None:
                    raise SaveError(self.epoch, f"nodes {other} and {name} both wrote {path}")
                seen[path] = name
                folders.update(dict.fromkeys(parents, name))
            out.append(NodeEntry(name, process, report["size"], report["digest"], files, report["secs"]))
        return tuple(out)

    def _node_reports(self) -> list[dict[str, Any]]:
        """What was reported of each node, in node order."""
        return [report for _, reported in sorted(self.reports.items()) for report in reported["nodes"]]

    def node_secs(self, nodes: Nodes) -> dict[str, float]:
        """How long each node wrote, by name, as far as that was reported to this process."""
        found: dict[str, float] = {}
        for process, report in sorted(self.reports.items()):
            found.update(zip(nodes.names_of(process), (part["secs"] for part in report.get("nodes", ())), strict=False))
        return found

    def _marked(self) -> dict[str, ItemRecord]:
        """The items, with the mark of agreement on those of the nodes' own that all of them have alike."""
        items = dict(self.items)
        for name, item in self.items.items():
            if item.kind == "node":
                digests = {report["own"].get(name) for report in self._node_reports()}
                items[name] = dataclasses.replace(item, same=len(digests) == 1 and None not in digests)
        return items

    def record(self, attempt: str, nodes: tuple[NodeEntry, ...], *, objects: bool) -> EpochRecord:
        """The commit record, as of now."""
        return EpochRecord(
            self.epoch,
            attempt,
            objects,
            self.plan,
            nodes,
            self._marked(),
            self.default_item,
            self.metrics,
            self.custom_metadata,
            self.started_ns,
            time.time_ns(),
            {"blocked_secs": round(self.blocked_secs, 6), "secs": round(self.elapsed_secs, 6)},
        )

    def summary(self, record: EpochRecord) -> str:
        """What a commit was like, for the log."""
        slowest = max(record.nodes, key=lambda n: n.secs)
        count = len(record.nodes)
        return (
            f"{_units.nbytes(record.nbytes)} from {count} node{'' if count == 1 else 's'} in "
            f"{self.elapsed_secs:.2f} s (blocked {self.blocked_secs * 1e3:.1f} ms, "
            f"slowest {slowest.name} {slowest.secs:.2f} s)"
        )


@dataclasses.dataclass(frozen=True)
class Committed:
    """The good verdict, as every node hears it.

    Attributes:
        epoch: the epoch.
        metrics: those it was saved with.
        committed_ns: when, wall clock.
        deleted: epochs that are deleted now.
        attached: metrics that were attached to other epochs, by epoch; None: nobody looked.
        attempt: its attempt, on the primary.
    """

    epoch: int
    metrics: Any
    committed_ns: int
    deleted: tuple[int, ...]
    attached: Mapping[int, Mapping[str, Any]] | None = None
    attempt: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Its form as JSON."""
        attached = None if self.attached is None else checksums.pack_by_number(self.attached, "metrics")
        metrics = checksums.pack_json(self.metrics, "metrics")
        rest = {"committed_ns": self.committed_ns, "deleted": list(self.deleted)}
        return {"metrics": metrics, "attached": attached, **rest}

    @classmethod
    def from_wire(cls, epoch: int, wire: Mapping[str, Any]) -> Committed:
        """The inverse of `to_wire`."""
        metrics = checksums.unpack_json(wire["metrics"])
        attached = None if wire["attached"] is None else checksums.unpack_by_number(wire["attached"])
        return cls(epoch, metrics, wire["committed_ns"], tuple(wire["deleted"]), attached)


def snapshot(
    epoch: int,
    number: int,
    prepared: Prepared,
    *,
    default_item: bool,
    metrics: Any,
    custom_metadata: Mapping[str, Any] | None,
    timeout_secs: float,
    replaces: Replaces | None,
) -> Attempt:
    """Takes the snapshot of a planned save."""
    kept = checked_json(metrics, "metrics"), checked_json(dict(custom_metadata or {}), "custom_metadata")
    taken = take(prepared)
    return Attempt(
        epoch=epoch,
        number=number,
        plans=prepared.plans,
        places=prepared.places,
        buffers=taken.buffers,
        files=taken.files,
        items=taken.items,
        own=taken.own,
        digest=prepared.digest,
        default_item=default_item,
        metrics=kept[0],
        custom_metadata=kept[1],
        copied_bytes=prepared.copied_bytes,
        deadline=Deadline(timeout_secs),
        replaces=replaces,
    )


def broken(epoch: int, number: int, error: BaseException, timeout_secs: float) -> Attempt:
    """What takes the place of a save that this process could not begin, so that the others need not wait for it."""
    nothing: dict[str, Any] = {
        "plans": (),
        "places": (),
        "buffers": [],
        "files": (),
        "items": {},
        "own": {},
        "digest": str,
    }
    rest: dict[str, Any] = {"metrics": None, "default_item": True, "custom_metadata": {}, "copied_bytes": 0}
    return Attempt(epoch, number, **nothing, **rest, deadline=Deadline(timeout_secs), error=copied(epoch, error))


def write_nodes(
    commits: Commits, nodes: Nodes, attempt: Attempt, identity: str, options: StorageOptions, pool: Pool
) -> dict[str, Any]:
    """Writes and seals the folders of this process's nodes.

    Args:
        commits: where.
        nodes: of the job.
        attempt: the snapshot; its buffers are let go as soon as they are written.
        identity: the attempt's id.
        options: sizes.
        pool: who writes.

    Returns:
        What this process reports: the digest of its plan, and, node by node, what `epoch.json` says of it.
    """
    try:
        parts = [_Part(commits, nodes, number, attempt, identity, options) for number in nodes.hosted]
        for part in parts:
            part.write_arrays(pool)
        attempt.buffers = []  # what the snapshot holds need not wait for handlers
        parts[0].write_files()
    except FileNotFoundError as missing:
        raise commits.lost(attempt.epoch) from missing
    return {"plan": attempt.plan, "nodes": [part.seal() for part in parts]}


class _Part:
    """One node's folder."""

    def __init__(
        self,
        commits: Commits,
        nodes: Nodes,
        number: int,
        attempt: Attempt,
        identity: str,
        options: StorageOptions,
    ):
        self._commits, self._store, self._options = commits, commits.store, options
        self._nodes, self._number, self._attempt, self._identity = nodes, number, attempt, identity
        self._name, self._process = nodes.rows[number]
        self._folder = commits.make_node_folder(attempt.epoch, identity, self._name)
        self._files: list[DataFile] = []
        self._folders: list[str] = []
        self._secs = 0.0

    def write_arrays(self, pool: Pool) -> None:
        """The data files."""
        began, attempt, block_bytes = time.monotonic(), self._attempt, self._options.block_bytes
        for plan, buffers, number in zip(attempt.plans, attempt.buffers, attempt.places, strict=True):
            if number == self._number:
                self._files += writer.write_arrays(
                    self._store, self._folder, attempt.epoch, plan, buffers, block_bytes, pool
                )
        self._secs += time.monotonic() - began

    def write_files(self) -> None:
        """What handlers have written, or still write."""
        began, found = time.monotonic(), self._attempt.collect()
        self._folders = writer.folders(found)
        for path in self._folders:
            self._store.make_folder(paths.join(self._folder, path))
        for (item, path), source in found.items():
            block_bytes = self._options.block_bytes
            self._files.append(writer.write_file(self._store, self._folder, item, path, source, block_bytes))
        self._secs += time.monotonic() - began

    def seal(self) -> dict[str, Any]:
        """`node.json`, and what is reported of this node."""
        began, attempt, me = time.monotonic(), self._attempt, self._identity
        timings = {"write_secs": round(self._secs, 6), "blocked_secs": round(attempt.blocked_secs, 6)}
        own = attempt.own.get(self._number, {})
        record = NodeRecord(
            attempt.epoch,
            me,
            self._name,
            self._process,
            self._nodes.processes,
            attempt.plan,
            tuple(self._files),
            timings,
            own,
        ).to_bytes()
        view = self._options.orbax_view
        self._commits.seal_node(attempt.epoch, me, self._name, self._folders, record, view)
        return {
            "size": len(record),
            "digest": checksums.digest(record),
            "secs": self._secs + time.monotonic() - began,
            "files": [f.row() for f in self._files],
            "own": {name: tree_digest(item, [f for f in self._files if f.item == name]) for name, item in own.items()},
        }
