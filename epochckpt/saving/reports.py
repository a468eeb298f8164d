"""What the processes of a job tell each other about a save, as JSON (`to_wire`, `from_wire`).

Every process tells the primary what its nodes have written (`ProcessReport`), and the primary tells every process of
the commit (`Committed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from epochckpt import _collector
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import from_wire, to_wire
from epochckpt.format import NodeEntry, checksums, codec
from epochckpt.format.records import FILE_ROWS, pack_contents, unpack_contents


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """A process's report of one node that it hosts, once the node's files are durable.

    Attributes:
        entry: the node as `epoch.json` will describe it.
        own: by item, the digest of each item that differs per node.
        alike: by item and number of the leaf, the digests of values that each process has for itself, and that must
            be the same on all of them.
        inlined: small contents, as in `EpochRecord`: where each host has a disk of its own, on which others' values
            are to be, too. Of files of handlers, and of leaves that are no jax arrays, the values of the process that
            writes them count.
    """

    entry: NodeEntry
    own: Mapping[str, str]
    alike: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict[str, Mapping[str, str]])
    inlined: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict[str, Mapping[str, bytes]])

    def to_wire(self) -> dict[str, Any]:
        return {
            **vars(self.entry),
            "files": [FILE_ROWS.pack(file) for file in self.entry.files],
            "own": dict(self.own),
            "alike": {item: dict(sums) for item, sums in self.alike.items()},
            "inlined": pack_contents(self.inlined),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> NodeReport:
        fields: dict[str, Any] = {
            **wire,
            "files": tuple(FILE_ROWS.parse("a report", "files", row) for row in wire["files"]),
        }
        own = fields.pop("own")
        alike = fields.pop("alike")
        inlined = unpack_contents(fields.pop("inlined"))
        return cls(entry=NodeEntry(**fields), own=own, alike=alike, inlined=inlined)


@dataclasses.dataclass(frozen=True)
class ProcessReport:
    """A process's report to the primary: the nodes that it has written, or the error that prevented this."""

    plan: str = ""  # digest of its plan
    nodes: tuple[NodeReport, ...] = ()  # a report for each node of the process
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


class Reports:
    """What the processes have reported of one save, as far as this process has heard."""

    def __init__(self) -> None:
        self._by_process: dict[int, ProcessReport] = {}

    def add(self, process: int, report: ProcessReport) -> None:
        """Enters the report of a process."""
        self._by_process[process] = report

    def receive(self, found: Mapping[int, Any]) -> None:
        """Enters the reports of other processes, as JSON by process."""
        with _collector.paused():  # those of a thousand nodes are many objects, which stay until the commit
            self._by_process.update({process: ProcessReport.from_wire(wire) for process, wire in found.items()})

    @property
    def processes(self) -> Set[int]:
        """The processes that have reported."""
        return self._by_process.keys()

    @property
    def errors(self) -> list[tuple[int, Exception]]:
        """The processes that have failed, ascending, each with its error."""
        by_process = sorted(self._by_process.items())
        return [(process, report.error) for process, report in by_process if report.error is not None]

    def with_another_plan(self, plan: str) -> list[int]:
        """The processes that have planned something else than this."""
        return [process for process, report in self._by_process.items() if report.plan != plan]

    @property
    def nodes(self) -> list[NodeReport]:
        """The reports of all nodes, in node order, without the nodes of processes that failed."""
        return [node for _, report in sorted(self._by_process.items()) for node in report.nodes]

    @property
    def node_secs(self) -> dict[str, float]:
        """How long each node wrote, by name."""
        return {node.entry.name: node.entry.secs for node in self.nodes}


@dataclasses.dataclass(frozen=True)
class Committed:
    """A commit, as every process hears of it."""

    epoch: int
    summary: EpochSummary
    deleted: tuple[int, ...] = ()  # epochs that are gone now
    remote: tuple[int, ...] = ()  # epochs that only the mirror has from now on
    attached: Mapping[int, Mapping[str, Any]] | None = None  # metrics attached to other epochs; None: unknown
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

    def to_wire(self, hides: Sequence[int] = ()) -> dict[str, Any]:
        """As JSON; every process takes the epochs of `hides` out of sight on its own disk."""
        return {
            "hides": list(hides),
            "summary": codec.pack(self.summary),
            "attached": None if self.attached is None else checksums.pack_by_number(self.attached, "metrics"),
            "deleted": list(self.deleted),
            "remote": list(self.remote),
        }

    @classmethod
    def from_wire(cls, epoch: int, wire: Mapping[str, Any]) -> Committed:
        attached = wire["attached"]
        return cls(
            epoch=epoch,
            summary=codec.parse(EpochSummary, codec.Fields("the verdict", wire["summary"])),
            deleted=tuple(wire["deleted"]),
            remote=tuple(wire["remote"]),
            attached=None if attached is None else checksums.unpack_by_number(attached),
            hides=tuple(wire["hides"]),
        )
