"""Keeps the newest epoch in the page cache of this host, so that a process that starts again restores it from memory.

Large files are written past the page cache, which takes less processor time and never waits for memory. When an epoch
is committed, and no save is under way, its files are read back piece by piece. Each piece takes the place of a piece of
the epoch before: so its memory is used again, which a virtual machine would else have to get back from its host.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from epochckpt import _threads
from epochckpt.directory import EpochDirectory
from epochckpt.saving import memory


class PageCache:
    """The epochs of one manager whose bytes the page cache of this host may hold.

    Args:
        epoch_directory: the directory of the epochs.
        mode: `StorageOptions.page_cache`.
        is_idle: whether no save is under way.
    """

    def __init__(self, epoch_directory: EpochDirectory, mode: str, is_idle: Callable[[], bool]):
        self._epoch_directory = epoch_directory
        self._reads_back = mode == "read_back"
        self._is_idle = is_idle
        self._resident = collections.deque[int]()  # oldest first
        self._lane = _threads.Lane()
        self._closed = False

    def writing(self, nodes: Sequence[str]) -> None:
        """A save is about to write these nodes; without reads back it gets the memory of the epochs before."""
        if not self._reads_back:
            self._let_go(nodes)

    def committed(self, epoch: int, nodes: Sequence[str]) -> None:
        """An epoch was committed: has it read back in the background, as far as no save begins meanwhile."""
        if self._reads_back:
            self._lane.submit(lambda: _threads.logged("the page cache", lambda: self._read_back(epoch, nodes)))
        else:
            self._resident.append(epoch)

    def close(self) -> None:
        """Ends what is read in the background, after the piece that is being read."""
        self._closed = True

    def _read_back(self, epoch: int, nodes: Sequence[str]) -> None:
        """In the lane."""
        before = self._resident[-1] if self._resident else None
        limit = memory.of_this_machine()
        self._resident.append(epoch)
        for node in nodes:
            self._epoch_directory.cache(
                epoch,
                node,
                instead_of=before,
                limit_bytes=None if limit is None else limit // (4 * len(nodes)),
                is_wanted=lambda: self._is_idle() and not self._closed,
            )
        while len(self._resident) > 1:
            self._drop(self._resident.popleft(), nodes)

    def _let_go(self, nodes: Sequence[str]) -> None:
        while self._resident:
            self._drop(self._resident.popleft(), nodes)

    def _drop(self, epoch: int, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._epoch_directory.uncache(epoch, node)
