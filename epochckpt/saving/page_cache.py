"""Which epoch the page cache of this host may hold: the newest one, so that a restart here restores it from memory."""

from __future__ import annotations

from collections.abc import Sequence

from epochckpt.arrays.older_files import OlderFiles
from epochckpt.format import paths
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.saving import memory
from epochckpt.storage import Store

_PART = 4  # of the machine's memory: a file may take so large a part of it in the page cache


def cached_bytes(options: StorageOptions) -> int:
    """The size in bytes up to which a file is written through the page cache; 0: every file goes past it."""
    machine = memory.of_this_machine()
    if machine is None or not options.page_cache:
        return 0
    return machine // _PART


class PageCache:
    """The newest epoch of a directory, which the page cache of this host may hold, and what leaves the cache for it.

    The lanes of one queue call it. While a save is written, the epoch before is evicted piece by piece. The commit
    evicts the rest of it. If a save fails, the rest stays.
    """

    def __init__(self, store: Store, names: StepNames, newest: int | None):
        """`newest` is the newest epoch at the start; this host may have restored it from the cache, or into it."""
        self._store = store
        self._names = names
        self._newest = newest

    def older(self, node: str) -> OlderFiles | None:
        """What a node's new files replace in the cache; None if there is nothing, or these files are not cached."""
        return None if self._newest is None else self._files(self._newest, node)

    def committed(self, epoch: int, nodes: Sequence[str]) -> None:
        """A save of an epoch is committed, of which this process has written these nodes."""
        before = self._newest
        self._newest = epoch
        if before is None or before == epoch:
            return
        for node in nodes:
            if (files := self._files(before, node)) is not None:
                files.evict_all()

    def _files(self, epoch: int, node: str) -> OlderFiles | None:
        if not self._store.leaves_files_cached:
            return None
        return OlderFiles(self._store, paths.join(self._names.build(epoch), paths.folder_name(node)))
