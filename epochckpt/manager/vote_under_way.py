"""The vote in which the restores of this process take part."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator

from epochckpt.directory import EpochDirectory


class VoteUnderWay:
    """A vote on epochs of a directory, and the saves that this process has read for it, by epoch."""

    def __init__(self, epoch_directory: EpochDirectory):
        self._epoch_directory = epoch_directory
        self._saves: dict[int, str | None] = {}

    def note(self, epoch_directory: EpochDirectory, epoch: int, save_id: str | None) -> None:
        """An epoch was read as this save has written it; epochs of other directories do not count."""
        if epoch_directory is self._epoch_directory:
            self._saves[epoch] = save_id

    def save_of(self, epoch: int) -> str | None:
        """The save of an epoch; None if nothing of it was read."""
        return self._saves.get(epoch)

    @contextlib.contextmanager
    def going_on(self) -> Generator[None]:
        """In the block, restores take part in this vote, which decides on their epochs."""
        before = _within.set(self)
        try:
            yield
        finally:
            _within.reset(before)

    @staticmethod
    def here() -> VoteUnderWay | None:
        """The vote in which the restore that calls this takes part."""
        return _within.get()


_within = contextvars.ContextVar[VoteUnderWay | None]("_within", default=None)
