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

from epochckpt import _progress, _threads, _units
from epochckpt._threads import Deadline
from epochckpt.arrays.snapshot import Snapshot
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import SaveError, StorageBehindError
from epochckpt.format import EpochRecord
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.saving.reports import Reports
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
        self.reports = Reports()  # of what the processes have written: on the primary of all, elsewhere of this one
        self.written: _threads.Future[Any] = _threads.Future()  # its nodes here, or a failure
        self.done: _threads.Future[SaveCost | None] = _threads.Future()  # with its cost, if it was committed at once
        self.told = _threads.Once()  # by the thread that tells the manager how it has ended
        self._deadline = deadline
        self._was_cancelled = False
        self._cost: SaveCost | None = None  # once it is committed
        self._spent: Mapping[str, float] = {}
        self._taken_up_at = 0.0  # monotonic; 0 before
        self._bytes_before: int | None = None  # that the store had written when this process began to write
        self._removals: list[Callable[[], None]] = []
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

    # -- its time ------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> Deadline:
        """When it fails, or is uncertain, if nothing has ended it. Processes that are behind give it more time."""
        return self._deadline

    @property
    def secs_left(self) -> float:
        """The time until its deadline, for a wait; never quite 0."""
        return max(self._deadline.left(), 0.001)

    def start_bound(self, deadline: Deadline) -> None:
        """Another deadline counts, before any thread waits for the save."""
        self._deadline = deadline

    def extend(self, bound_secs: float, lag_secs: float) -> bool:
        """Moves the deadline: a save may take `bound_secs`, and other processes are `lag_secs` behind.

        Returns whether it has more time than before.
        """
        left = bound_secs + lag_secs - self.elapsed_secs
        if not lag_secs or left <= max(self._deadline.left() + 0.001, 0.0):  # it has been given that already
            return False
        self._deadline = Deadline(left, whole_secs=round(bound_secs + lag_secs, 1))
        return True

    @property
    def elapsed_secs(self) -> float:
        """Seconds since `save` was called."""
        return time.monotonic() - self.request.started

    @property
    def writing_secs(self) -> float:
        """Seconds since the write lane took it up."""
        return time.monotonic() - self._taken_up_at

    @property
    def spent(self) -> Mapping[str, float]:
        """What the run had spent its time on when the save began, see `RunClock`."""
        return self._spent

    def note_spent(self, spent: Mapping[str, float]) -> None:
        """Notes what the run has spent its time on until now."""
        self._spent = spent

    # -- in the lanes --------------------------------------------------------------------------------------------

    def take_up(self) -> bool:
        """The write lane takes it up; returns False if it was given up before."""
        self._taken_up_at = time.monotonic()
        return self.advance(Phase.CLAIMING)

    @property
    def was_taken_up(self) -> bool:
        """Whether the write lane has taken it up, and so lets go of its snapshot."""
        first = self._moves.get(Phase.QUEUED)
        return first is not None and first.to is Phase.CLAIMING

    def begin_writing(self, tally: Tally) -> None:
        """The directory has a place for it, and this process writes its nodes now; `tally` is that of its store."""
        self._bytes_before = tally.nbytes
        self.advance(Phase.WRITING)

    def cancel(self) -> None:
        """Its caller does not want it any more: it fails at the next step before the commit."""
        self._was_cancelled = True

    @property
    def was_cancelled(self) -> bool:
        """Whether its caller has cancelled it."""
        return self._was_cancelled

    def check_not_cancelled(self) -> None:
        """Raises SaveError if its caller has cancelled it."""
        if self._was_cancelled:
            raise SaveError(self.epoch, "it was cancelled")

    def note_cost(self, cost: SaveCost | None) -> None:
        """Notes the cost that the verdict has named."""
        self._cost = cost

    @property
    def cost(self) -> SaveCost | None:
        """What it has cost; None unless a verdict has said that it is committed."""
        return self._cost

    def remove_later(self, remove: Callable[[], None]) -> None:
        """An older epoch is out of sight for it; its bytes are removed once this save has ended."""
        self._removals.append(remove)

    def pop_removals(self) -> list[Callable[[], None]]:
        """What `remove_later` was told since the last call."""
        removals = self._removals
        self._removals = []
        return removals

    # -- for people ----------------------------------------------------------------------------------------------

    def summary_without_record(self) -> EpochSummary:
        """What this process knows of the epoch when it is committed, and its record was not read."""
        return EpochSummary.unrecorded(metrics=self.request.metrics, time_ns=time.time_ns())

    def describe(self) -> str:
        """Its phase in words, for people."""
        return _WORDS[self.phase]

    @contextlib.contextmanager
    def shown(self, tally: Tally) -> Generator[None]:
        """Shows how much of its share this process has written, while it is awaited; `tally` is that of its store."""

        def written() -> float:
            if self.written.done():
                return math.inf
            return 0.0 if self._bytes_before is None else tally.nbytes - self._bytes_before

        with _progress.work(f"saving checkpoint {self.epoch}") as work:
            work.follow(written, self.request.nbytes)
            yield

    @property
    def plan(self) -> str:
        """The digest of this process's plan for the save; it must be the same on all processes."""
        return self.snapshot.digest

    def summary(self, record: EpochRecord) -> str:
        """The commit in a few words, for the log."""
        slowest = max(record.nodes, key=lambda node: node.secs)
        return (
            f"{_units.nbytes(record.nbytes)} from {_units.several(len(record.nodes), 'node', 'nodes')} in "
            f"{self.elapsed_secs:.2f} s (blocked {self.request.blocked_secs * 1e3:.1f} ms, "
            f"slowest {slowest.name} {slowest.secs:.2f} s)"
        )
