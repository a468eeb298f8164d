"""One save on one process: the request, the process's share of the data, and the phase.

`CheckpointManager.save` makes a `SaveRequest` and a `Save` on the training thread, and hands the save to the
`SaveQueue`. `Phase` has a picture of what happens then, and says who makes each move.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from epochckpt import _collector, _progress, _threads, _units
from epochckpt._threads import Deadline
from epochckpt.arrays.snapshot import Snapshot
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import SaveError, StorageBehindError
from epochckpt.format import EpochRecord, ItemKind, paths
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.saving.reports import NodeReport, ProcessReport
from epochckpt.storage import Tally


class Phase(enum.IntEnum):
    """Where a save is on one process. A save moves forward only, and each move is made by whoever is first.

        QUEUED ──► CLAIMING ──► WRITING ──► WRITTEN ──► COMMITTING ──► COMMITTED
        CLAIMING ──► WRITTEN                                 there was nothing to write, or no place to write to
        QUEUED, CLAIMING, WRITING, WRITTEN, COMMITTING ──► FAILED
        WRITTEN, COMMITTING ──► UNCERTAIN ──► COMMITTED, FAILED
        QUEUED ──► DROPPED

    | move to | made by |
    | --- | --- |
    | CLAIMING | the write lane, which takes the save up |
    | WRITING | the write lane: the directory is claimed, and has a place for the save |
    | WRITTEN | the write lane: the nodes of this process are durable, or it knows why they are not |
    | COMMITTING | the primary just before it commits; another process just before it tells the primary what it has |
    | COMMITTED | the commit lane, with the verdict |
    | FAILED | the commit lane, with the verdict; or, before COMMITTING, a thread that has waited too long |
    | UNCERTAIN | the commit lane: no verdict, or not taken back; or, in COMMITTING, a thread that waited too long |
    | DROPPED | the write lane: a signal handler has queued the same save in the middle of this one |

    In COMMITTING this process may not give the save up any more, because it may be committed. A save that is UNCERTAIN
    is settled later: by a verdict that comes late, or by storage.
    """

    QUEUED = 0
    CLAIMING = 1
    WRITING = 2
    WRITTEN = 3
    COMMITTING = 4
    UNCERTAIN = 5
    COMMITTED = 6
    FAILED = 7
    DROPPED = 8

    @property
    def ended(self) -> bool:
        """Whether nobody waits for the save any more."""
        return self >= Phase.UNCERTAIN


_MAY_COME_FROM: Mapping[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset(),
    Phase.CLAIMING: frozenset({Phase.QUEUED}),
    Phase.WRITING: frozenset({Phase.CLAIMING}),
    Phase.WRITTEN: frozenset({Phase.CLAIMING, Phase.WRITING}),
    Phase.COMMITTING: frozenset({Phase.WRITTEN}),
    Phase.COMMITTED: frozenset({Phase.COMMITTING, Phase.UNCERTAIN}),
    Phase.FAILED: frozenset(phase for phase in Phase if phase <= Phase.UNCERTAIN),
    Phase.UNCERTAIN: frozenset({Phase.WRITTEN, Phase.COMMITTING}),
    Phase.DROPPED: frozenset({Phase.QUEUED}),
}
_WORDS: Mapping[Phase, str] = {
    Phase.QUEUED: "queued",
    Phase.CLAIMING: "waiting for the claim of the directory",
    Phase.WRITING: "writing",
    Phase.WRITTEN: "written, not committed yet",
    Phase.COMMITTING: "written, being committed",
    Phase.COMMITTED: "committed",
    Phase.FAILED: "failed",
    Phase.UNCERTAIN: "uncertain",
    Phase.DROPPED: "saved by a signal handler",
}


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What `save` was asked for."""

    epoch: int
    number: int  # of saves of this epoch that were requested before
    default_item: bool = True  # the epoch has one unnamed item
    metrics: Any = None
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    replaces: ReplaceCondition | None = None
    started_ns: int = dataclasses.field(default_factory=time.time_ns)  # when `save` was called
    started: float = dataclasses.field(default_factory=time.monotonic)  # the same on the monotonic clock
    blocked_secs: float = 0.0  # that training was held up
    nbytes: float = 0.0  # that this process writes, about
    # For the manager's logger, see `step_log`.
    log_entry: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    # Why this process could not begin the save. It reports that in place of its nodes, so that no process waits for it.
    refusal: Exception | None = None

    @property
    def name(self) -> str:
        """`<epoch>-<number>`: the same on every process, and no other save of this manager has it."""
        return f"{self.epoch}-{self.number}"

    @property
    def was_raised(self) -> bool:
        """Whether `save` has raised the refusal. Where storage is behind it returns, and the failure is told later."""
        return self.refusal is not None and not isinstance(self.refusal, StorageBehindError)


class _Move:
    """One move of a save to a phase. Two moves to the same phase are two objects, so each caller knows its own."""

    def __init__(self, to: Phase, failure: SaveError | None):
        self.to = to
        self.failure = failure


_BEGINNING = _Move(Phase.QUEUED, None)


class Save:
    """One save on one process."""

    def __init__(self, request: SaveRequest, snapshot: Snapshot, deadline: Deadline):
        self.request = request
        self.snapshot = snapshot  # dropped as soon as it is written
        self.deadline = deadline
        self.cancel_requested = False  # by its caller: it fails at the next step before the commit
        self.reports: dict[int, ProcessReport] = {}  # by process
        self.written: _threads.Future[Any] = _threads.Future()  # its nodes here, or a failure
        self.done: _threads.Future[SaveCost | None] = _threads.Future()
        self.cost: SaveCost | None = None  # once it is committed
        self.spent: Mapping[str, float] = {}  # by the run until the save began, see `RunClock`
        self.writing_since = 0.0  # monotonic; 0 before
        self.written_before: int | None = None  # bytes that the store had written when this process began to write
        self.removals: list[Callable[[], None]] = []  # of older epochs, once this save has ended
        self.told = _threads.Once()  # by the thread that tells the manager how it has ended
        # The move out of each phase. Threads and signal handlers share it without a lock: `setdefault` is one step, so
        # that of two moves out of one phase exactly one is made.
        self._moves: dict[Phase, _Move] = {}

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return self.request.epoch

    @property
    def name(self) -> str:
        """Its name, see `SaveRequest.name`."""
        return self.request.name

    @property
    def phase(self) -> Phase:
        """Where it is now."""
        return self._last_move.to

    @property
    def failure(self) -> SaveError | None:
        """Why it has failed, or is uncertain."""
        return self._last_move.failure

    @property
    def _last_move(self) -> _Move:
        last = _BEGINNING
        while (move := self._moves.get(last.to)) is not None:
            last = move
        return last

    def advance(self, to: Phase, *, before: Phase | None = None, failure: SaveError | None = None) -> bool:
        """Moves the save to a phase; returns whether this call has done so.

        It returns False if no move leads there from the present phase, or, with `before`, once that phase is reached.
        `failure` says why it ends, if not well.
        """
        move = _Move(to, failure)
        while (now := self.phase) in _MAY_COME_FROM[to] and (before is None or now < before):
            if self._moves.setdefault(now, move) is move:
                return True
        return False

    @property
    def was_taken_up(self) -> bool:
        """Whether the write lane has taken it up, and so lets go of its snapshot."""
        first = self._moves.get(Phase.QUEUED)
        return first is not None and first.to is Phase.CLAIMING

    def summary_without_record(self) -> EpochSummary:
        """What this process knows of the epoch when it is committed, and its record was not read."""
        return EpochSummary.unrecorded(metrics=self.request.metrics, time_ns=time.time_ns())

    def describe(self) -> str:
        """Its phase in words, for people."""
        return _WORDS[self.phase]

    @property
    def elapsed_secs(self) -> float:
        """Seconds since `save` was called."""
        return time.monotonic() - self.request.started

    @contextlib.contextmanager
    def shown(self, tally: Tally) -> Generator[None]:
        """Shows how much of its share this process has written, while it is awaited; `tally` is that of its store."""

        def written() -> float:
            if self.written.done():
                return math.inf
            return 0.0 if self.written_before is None else tally.nbytes - self.written_before

        with _progress.work(f"saving checkpoint {self.epoch}") as work:
            work.follow(written, self.request.nbytes)
            yield

    def check_not_cancelled(self) -> None:
        """Raises SaveError if its caller has cancelled it."""
        if self.cancel_requested:
            raise SaveError(self.epoch, "it was cancelled")

    @property
    def plan(self) -> str:
        """The digest of this process's plan for the save; it must be the same on all processes."""
        return self.snapshot.digest

    # -- the commit record, on the primary -----------------------------------------------------------------------

    def receive(self, found: Mapping[int, Any]) -> None:
        """Takes the reports of other processes, as JSON by process."""
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

    def record(self, save_id: str, *, objects: bool, per_node: bool = False) -> EpochRecord:
        """The commit record, as of now, from the reports of all nodes.

        SaveError says that two nodes wrote a file of one name, or one a file where another has a folder, or that hosts
        with disks of their own have different values of a leaf.

        Args:
            save_id: the save's id, which the record keeps as `attempt`.
            objects: see `EpochDirectory.save_ids_in_paths`.
            per_node: this is the epoch of one node by itself.
        """
        nodes = self.node_reports
        self._check_file_names()
        inlined: dict[str, dict[str, bytes]] = {}
        for local in filter(None, (node.local for node in nodes)):
            for item, contents in local.inlined.items():
                inlined[item] = {**inlined.get(item, {}), **contents}
        self._check_alike()
        items = dict(self.snapshot.items)
        for name, item in items.items():
            if item.kind is ItemKind.NODE:
                digests = {node.own.get(name) for node in nodes}
                items[name] = dataclasses.replace(item, same=len(digests) == 1 and None not in digests)
        request = self.request
        return EpochRecord(
            epoch=request.epoch,
            save_id=save_id,
            objects=objects,
            plan=self.plan,
            nodes=tuple(node.entry for node in nodes),
            items=items,
            default_item=request.default_item,
            metrics=request.metrics,
            custom_metadata=request.custom_metadata,
            started_ns=request.started_ns,
            committed_ns=time.time_ns(),
            timings={"blocked_secs": round(request.blocked_secs, 6), "secs": round(self.elapsed_secs, 6)},
            per_node=per_node,
            inlined=inlined,
        )

    def _check_alike(self) -> None:
        """Where each host has a disk of its own, the hosts have the same values of large NumPy leaves."""
        first: dict[str, tuple[str, str]] = {}  # digest and node by leaf
        for node in self.node_reports:
            if node.local is None:
                continue
            for leaf, digest in node.local.alike.items():
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
        return (
            f"{_units.nbytes(record.nbytes)} from {_units.several(len(record.nodes), 'node', 'nodes')} in "
            f"{self.elapsed_secs:.2f} s (blocked {self.request.blocked_secs * 1e3:.1f} ms, "
            f"slowest {slowest.name} {slowest.secs:.2f} s)"
        )
