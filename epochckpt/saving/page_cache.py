"""Which epochs the page cache of this host may hold: the newest one, so that a restart here restores it from memory.

A save is written through the page cache, and the epoch before it gives way piece by piece, as the save is written. So
the memory of a piece is used again at once. A virtual machine would else give it to its host, and needs a second to get
600 MB back.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from epochckpt.directory import EpochDirectory


class PageCache:
    """The epochs of one manager whose bytes the page cache of this host may hold; used by the lanes of its queue."""

    def __init__(self, epoch_directory: EpochDirectory):
        self._epoch_directory = epoch_directory
        self._resident = collections.deque[int]()  # oldest first

    def newest(self) -> int | None:
        """The epoch that is to give way to the next save; None if there is none."""
        return self._resident[-1] if self._resident else None

    def committed(self, epoch: int) -> None:
        """An epoch of this manager was written through the page cache, and is committed."""
        self._resident.append(epoch)

    def drop(self, nodes: Sequence[str]) -> None:
        """Drops what it still holds of these nodes: a newer save has been written."""
        while self._resident:
            epoch = self._resident.popleft()
            for node in nodes:
                self._epoch_directory.uncache(epoch, node)
