"""Looking at folders that others write to and remove meanwhile: what has vanished is no error, no symlink is followed.

Ages are differences of the wall clock and of what the file system noted; nobody decides alone by them what to remove.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator

from epochckpt import layout
from epochckpt.store import Store

MAX_ENTRIES = 100_000
"""A larger tree is measured up to here: somebody else's, as a rule."""


@dataclasses.dataclass
class Extent:
    """How much lies in a folder, and how old it is.

    Attributes:
        nbytes: bytes of its files.
        entries: files and folders in it.
        newest_ns: when something in it was last written, made, or moved; None: the store does not tell.
        moved_ns: the same of the folder itself, which changes when it is moved, too.
        oldest_ns: when the oldest thing in it was last written to; None: the store does not tell.
        problem: why it could not be looked at as a whole; empty otherwise.
    """

    nbytes: int = 0
    entries: int = 0
    newest_ns: int | None = None
    moved_ns: int | None = None
    oldest_ns: int | None = None
    problem: str = ""

    def add(self, other: Extent) -> None:
        """Takes another folder in."""
        self.nbytes, self.entries = self.nbytes + other.nbytes, self.entries + other.entries
        times = [t for t in (self.newest_ns, other.newest_ns) if t is not None]
        self.newest_ns = max(times, default=None)
        times = [t for t in (self.oldest_ns, other.oldest_ns) if t is not None]
        self.oldest_ns = min(times, default=None)
        self.problem = self.problem or other.problem

    def age_secs(self, now_ns: int) -> float | None:
        """How long ago something was last written to it; None: the store does not tell."""
        times = [t for t in (self.newest_ns, self.moved_ns) if t is not None]
        return max(now_ns - max(times), 0) / 1e9 if times else None


def extent(store: Store, path: str) -> Extent | None:
    """Measures a folder with all below it, or a file; None if it is gone."""
    return _on_disk(os.path.join(store.root, path)) if store.renames else _objects(store, path)


def names(store: Store, path: str) -> list[tuple[str, bool]]:
    """The names in a folder, with whether each is a folder; none if it is gone.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        return [(entry.name, entry.is_folder) for entry in store.list(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk(store: Store, path: str) -> Iterator[tuple[str, bool]]:
    """Every path below a folder, parents first, with whether it is a folder."""
    for name, is_folder in names(store, path):
        below = layout.join(path, name)
        yield below, is_folder
        if is_folder:
            yield from walk(store, below)


def _on_disk(place: str) -> Extent | None:
    try:
        own = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    total = Extent()
    _count(total, own)
    total.moved_ns, total.newest_ns = total.newest_ns, None
    waiting = [place] if stat.S_ISDIR(own.st_mode) else []
    while waiting and total.entries < MAX_ENTRIES:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    _count(total, found)
                    if stat.S_ISDIR(found.st_mode):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            total.problem = total.problem or str(error)
    if waiting:
        total.problem = total.problem or f"more than {MAX_ENTRIES} files; counted up to there"
    return total


def _count(total: Extent, found: os.stat_result) -> None:
    # also the time of the last change of the inode: a folder that is renamed keeps the time of its last write
    times = found.st_mtime_ns, max(found.st_mtime_ns, found.st_ctime_ns)
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    total.add(Extent(size, 1, newest_ns=times[1], oldest_ns=times[0]))


def _objects(store: Store, path: str) -> Extent | None:
    total = Extent()
    for below, is_folder in walk(store, path):
        if not is_folder:
            try:
                total.add(Extent(store.size(below), 1))
            except FileNotFoundError:
                continue
            except OSError as error:
                total.problem = total.problem or str(error)
    return total if total.entries or total.problem else None
