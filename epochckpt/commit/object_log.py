"""The metrics of deleted epochs in an object store: lines that the head collects, and the file that they move to.

The change that deletes an epoch adds its line, or that the run went back; that costs no request of its own. Once there
are many, they are added to the file, after a deletion, and the next change of the head drops them. The head says which
number each line has: whoever moves lines, be it late or twice, writes the same file.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from epochckpt import _threads
from epochckpt.commit import attached_metrics, metrics_log
from epochckpt.commit.head_record import Head
from epochckpt.commit.metrics_log import COLLECTED, MAX_BYTES, Line
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import EpochRecord, paths
from epochckpt.storage import Store


class ObjectLog:
    """The log of one directory.

    Attributes:
        moved: the number of the last line that is in the file, as far as this process knows.
    """

    def __init__(self, store: Store):
        self._store, self.moved = store, 0

    def noting(
        self,
        now: Head,
        folder: str,
        number_of: Callable[[str], int | None],
        read: Callable[[str, str], EpochRecord | None],
    ) -> dict[str, Any]:
        """What the deletion of an epoch adds to the head; `read` gives the record of an attempt in a folder."""
        epoch, entry = number_of(folder) or 0, now.listed[folder]
        others = [number for name in now.listed if (number := number_of(name)) not in (None, epoch)]
        if all(number < epoch for number in others):
            return now.back_to(max(others, default=-1))
        metrics = entry.metrics
        if entry.large:
            with suppress(EpochCheckpointError, OSError):  # whatever it is, the epoch is deleted
                metrics = getattr(read(folder, entry.attempt), "metrics", None)
        line = Line.of(epoch, entry.attempt, entry.committed_ns, attached_metrics.merge(metrics, entry.attached))
        return {"log": (*now.log, line)} if line else {}

    def deleted(self, now: Head) -> dict[int, Line]:
        """See `Commits.deleted`; one request if lines have been moved."""
        in_file = metrics_log.read(self._store) if now.logged else []
        return metrics_log.deleted([*(line for line in in_file if line.number <= now.logged), *now.log])

    def move(self, now: Head | None) -> None:
        """Moves the lines of the head to the file if they are many; a failure is logged."""
        if now is not None and len(now.log) >= COLLECTED and self.moved < now.lines[-1].number:
            what = f"{self._store.root}/{paths.METRICS_LOG}: the metrics of deleted epochs stay in the head for now"
            _threads.logged(what, lambda: self._move(now))

    def _move(self, now: Head) -> None:
        try:
            old = self._store.read(paths.METRICS_LOG, limit_bytes=2 * MAX_BYTES)
        except FileNotFoundError:
            old = b""
        last = max((line.number for line in metrics_log.parse(old)), default=0)
        new = old + b"".join(line.to_bytes() for line in now.lines if line.number > last)
        if new != old and len(old) < MAX_BYTES:
            if old:
                self._store.replace(paths.METRICS_LOG, old, new)
            else:
                self._store.create(paths.METRICS_LOG, new)
        self.moved = now.lines[-1].number
