"""The files of an older epoch, which leave the page cache of this host as newer ones are written."""

from __future__ import annotations

import contextlib

from epochckpt.format import paths
from epochckpt.storage import Store


class OlderFiles:
    """The data files of one node of an older epoch, in the node's folder. They may be missing, or deleted at any time.

    To evict a piece just before a piece of the same size is written has its memory used again at once. A virtual
    machine would else give it to its host, and wait for it later.
    """

    def __init__(self, store: Store, folder: str):
        self._store = store
        self._folder = folder

    def evict(self, name: str, start: int, nbytes: int) -> None:
        """Drops a piece of a file, named as in the node's folder, from the page cache."""
        if nbytes:
            self._uncache(paths.join(self._folder, name), start, nbytes)

    def evict_all(self) -> None:
        """Drops all of them, also the replicas of other nodes' arrays."""
        for folder in (self._folder, paths.join(self._folder, paths.REPLICA_FOLDER)):
            with contextlib.suppress(OSError):
                for entry in self._store.list(folder):
                    if entry.name.endswith(paths.DATA_SUFFIX):
                        self._uncache(paths.join(folder, entry.name))

    def _uncache(self, path: str, start: int = 0, nbytes: int | None = None) -> None:
        with contextlib.suppress(OSError):
            self._store.uncache(path, start, nbytes)
