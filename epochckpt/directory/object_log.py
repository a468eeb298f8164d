"""The metrics of deleted epochs in an object store: lines that the head collects, and the parts that they move to.

The change that deletes an epoch adds its line, or that the run went back; that costs no request of its own. Once there
are many, they become a part of the log, after a deletion, and the next change of the head drops them. A part is an
object that never changes. The lines, and the number of lines before them, decide which lines a part has, and both are
in the head. So every run that moves them writes the same part, even if it does so late or twice.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from epochckpt import _threads
from epochckpt.directory import metrics_log
from epochckpt.directory.metrics_log import COLLECTED, Line
from epochckpt.format import paths

if TYPE_CHECKING:
    from epochckpt.directory.head_object import HeadObject
    from epochckpt.directory.head_record import Head
    from epochckpt.storage import Store


def deleted(store: Store, now: Head) -> dict[int, Line]:
    """See `EpochDirectory.deleted`; if lines have been moved, one listing, and one request for each part."""
    moved = metrics_log.read_parts(store) if now.logged else []
    return metrics_log.deleted([*(line for line in moved if line.number <= now.logged), *now.log])


class ObjectLog:
    """Moves lines of the log of one directory."""

    def __init__(self, store: Store, head: HeadObject):
        self._store = store
        self._head = head

    def move(self, now: Head | None) -> None:
        """Moves lines of the head to parts if they are many; a failure is logged."""
        if now is not None and self._head.moved < now.logged + len(_part(now.lines)):
            what = f"{self._store.root}: the metrics of deleted epochs stay in the head for now"
            _threads.logged(what, lambda: self._move(now.lines))

    def _move(self, lines: list[Line]) -> None:
        while part := _part(lines):
            if part[-1].number <= metrics_log.MAX_LINES:
                with suppress(FileExistsError):  # it was moved before
                    data = b"".join(line.to_bytes() for line in part)
                    self._store.create(paths.metrics_part(part[0].number), data)
            self._head.moved = part[-1].number
            lines = lines[len(part) :]


def _part(lines: list[Line]) -> list[Line]:
    """The first lines, as many as make a part; none if they are too few."""
    nbytes = 0
    for count, line in enumerate(lines, start=1):
        nbytes += len(line.to_bytes())
        if count >= COLLECTED or nbytes >= metrics_log.COLLECTED_BYTES:
            return lines[:count]
    return []
