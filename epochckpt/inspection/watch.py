"""Following a live run: what changes in a directory, as events. Only looks at storage.

A look costs a listing of the directory and of the saves under way. On an object store it costs one request, for the
head, and a listing of each attempt that is under way. The record of an epoch is read once, when the epoch appears. On
POSIX the records of the newest epoch and of damaged epochs are read at every look, because another attempt may have
their number by now. Things that come and go between two looks are not seen.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Generator
from typing import TYPE_CHECKING

from epochckpt._threads import Deadline
from epochckpt.errors import InvalidArgumentError
from epochckpt.inspection import epoch_rows, leftovers
from epochckpt.inspection.rows import ABANDONED, COMMITTED, DAMAGED, EpochRow, LeftoverRow

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory

PRESENT = "present"  # an epoch that was there before the first look
SAVED = "committed"
SAVING = "saving"  # an attempt that wrote something since the last look
FAILED = "failed"  # an attempt that is gone and was not committed, or that wrote nothing for long
DELETED = "deleted"  # an epoch is gone

_IN_FULL = 5  # epochs of an object store whose records are read, the newest ones


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that was seen."""

    kind: str  # PRESENT, SAVED, SAVING, FAILED or DELETED
    time_ns: int  # when it was seen, nanoseconds since 1970
    row: EpochRow  # the epoch or the attempt; once it is gone, its last row
    before: EpochRow | None = None  # the newest committed epoch, against which progress is measured
    detail: str = ""

    @property
    def done(self) -> float | None:
        """Of an attempt: the share of the bytes of the epoch before that is written, at most 1; None: not known."""
        if self.kind not in (SAVING, FAILED) or self.before is None or not self.before.nbytes:
            return None
        return min(self.row.nbytes / self.before.nbytes, 1.0)


class Watcher:
    """Compares a directory with its state at the last look; `clock_ns` gives the time since 1970."""

    def __init__(self, epoch_directory: EpochDirectory, clock_ns: Callable[[], int] = time.time_ns):
        self._epoch_directory = epoch_directory
        self._clock_ns = clock_ns
        self._epochs: dict[int, EpochRow] = {}
        self._attempts: dict[str, EpochRow] = {}

    @property
    def newest(self) -> EpochRow | None:
        """The newest committed epoch that is whole, as it was seen last."""
        return self._epochs.get(max((n for n, row in self._epochs.items() if row.state == COMMITTED), default=-1))

    @property
    def last(self) -> int:
        """The newest epoch's number, whole or not; -1 if there is none."""
        return max(self._epochs, default=-1)

    def look(self) -> list[Event]:
        """The changes since the last look; at the first look, everything."""
        now = self._clock_ns()
        # Attempts first: one that is committed meanwhile is then seen in its new place, and not as failed.
        attempts = {row.save_id: row for row in self._under_way(now)}
        gone = [row for save_id, row in self._attempts.items() if save_id not in attempts]
        # Their epochs are read again, and so is the newest one if another attempt has its number by now.
        again = {row.epoch for row in gone}
        again |= self._epoch_directory.replaced({epoch: row.save_id for epoch, row in self._epochs.items()})
        events = []
        before = self.newest
        found = self._folders()
        for epoch in sorted(self._epochs.keys() - found.keys()):
            events.append(Event(DELETED, now, self._epochs.pop(epoch)))
        for epoch, folder in sorted(found.items()):
            known = self._epochs.get(epoch)
            if known is not None and known.state == COMMITTED and epoch not in again:
                continue
            row = self._read(epoch, folder, found)
            if isinstance(row, EpochRow) and (known is None or (row.save_id and known.save_id != row.save_id)):
                row = self._epochs[epoch] = epoch_rows.with_size(self._epoch_directory, row)
                events.append(Event(SAVED, now, row, before))
        committed = {row.save_id for row in self._epochs.values()}
        before = self.newest
        for row in gone:
            if row.save_id not in committed and row.state != ABANDONED:
                events.append(Event(FAILED, now, row, before, "it is gone and was not committed"))
        for save_id, row in attempts.items():
            known = self._attempts.get(save_id)
            if save_id in committed:
                continue
            if row.state == ABANDONED:
                if known is None or known.state != ABANDONED:
                    events.append(Event(FAILED, now, row, before, row.detail))
            elif known is None or (known.nbytes, known.nodes) != (row.nbytes, row.nodes):
                events.append(Event(SAVING, now, row, before, row.detail))
        self._attempts = attempts
        return events

    def _under_way(self, now_ns: int) -> list[EpochRow]:
        """The attempts that lie there, dead ones too; the head of an object store is read first."""
        return [leftovers.attempt_row(save, now_ns) for save in self._epoch_directory.contents().saves()]

    def _folders(self) -> dict[int, str]:
        """The folder of each epoch; none while the directory does not exist."""
        try:
            return self._epoch_directory.folders(self._epoch_directory.hidden())
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _read(self, epoch: int, folder: str, found: Collection[int]) -> EpochRow | LeftoverRow | None:
        """The row of an epoch; in an object store the head's words, if many newer ones are there."""
        if sum(other > epoch for other in found) >= _IN_FULL:
            return epoch_rows.brief(self._epoch_directory, folder, epoch, sure=True)
        return epoch_rows.read(self._epoch_directory, folder, epoch, sure=True)


def watch(
    epoch_directory: EpochDirectory,
    *,
    until: int | None = None,
    timeout_secs: float | None = None,
    interval_secs: float = 1.0,
    history: int = 0,
) -> Generator[Event, None, bool]:
    """Events as they are seen, oldest first, in a directory that need not exist yet.

    Ends with True when the epoch `until`, or a later one, exists, even if it is damaged; with False when no epoch was
    committed for `timeout_secs`. Of the epochs that are there at the beginning, the newest `history` become events.
    """
    if not interval_secs > 0:
        raise InvalidArgumentError(f"interval_secs must be positive, got {interval_secs!r}")
    watcher = Watcher(epoch_directory)
    pause = threading.Event()
    limit = math.inf if timeout_secs is None else timeout_secs
    deadline = Deadline(limit)
    # What is there at the first look has not just been committed.
    seen = watcher.look()
    present = [dataclasses.replace(event, kind=PRESENT, before=None) for event in seen if event.kind == SAVED]
    events = [*(present[-history:] if history else []), *(event for event in seen if event.kind != SAVED)]
    while True:
        for event in events:
            if event.kind == SAVED:
                deadline = Deadline(limit)
            yield event
        if until is not None and watcher.last >= until:
            return True
        if deadline.passed():
            return False
        pause.wait(max(0.0, min(interval_secs, deadline.left())))
        events = watcher.look()


def is_damaged(event: Event) -> bool:
    """Whether an epoch came that cannot be read."""
    return event.kind in (PRESENT, SAVED) and event.row.state == DAMAGED
