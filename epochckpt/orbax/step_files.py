"""How the files of stock Orbax's steps are looked at: in a folder of a file system, or in a bucket.

`of(store)` is the one place that chooses. On a file system Orbax renames a finished step into place, and what
lies in it may be symlinks, pipes and devices. In a bucket it writes the step in place, and `commit_success.txt` last.
"""

from __future__ import annotations

import abc
import errno
import functools
import os
import stat
from collections.abc import Mapping

from epochckpt.errors import DamagedError, StorageError
from epochckpt.format import paths
from epochckpt.storage import Store, patiently, scheme_of

STEP_RECORD = "_CHECKPOINT_METADATA"
TREE_RECORD = "_METADATA"
COMMIT = "commit_success.txt"
OUR_COMMIT = b"epochckpt committed this epoch.\n"
"""The content of that file in an epoch of ours on a file system. Orbax writes its step's path, which may name us."""
OCDBT = "manifest.ocdbt"
ARRAY_RECORDS = "array_metadatas"
MAX_BYTES = 256 * 2**20

# Files of metadata, wherever they lie in a step.
_SMALL = frozenset({OCDBT, TREE_RECORD, STEP_RECORD, COMMIT, "_sharding", "_strings.json", "metadata"})
_SMALL |= {".zarray", ".zattrs", "zarr.json"}


def saves_to(store: Store) -> bool:
    """Whether stock Orbax saves to such a store: to file systems, and to one kind of bucket."""
    return scheme_of(store.root).stock_orbax


def of(store: Store) -> StepFiles:
    """How the steps in this store are looked at."""
    return BucketStepFiles(store) if store.local_path is None else FolderStepFiles(store, store.local_path)


class StepFiles(abc.ABC):
    """The files of the steps in one directory. Folders are paths in it."""

    def __init__(self, store: Store):
        self._store = store

    @abc.abstractmethod
    def may_be_step(self, folder: str) -> bool:
        """Whether a folder can be a step, whatever it holds."""

    @abc.abstractmethod
    def look(self, folder: str) -> dict[str, str]:
        """The entries of a folder by name: `folder`, `link` (not followed), `file`, or `other`: a pipe or a device."""

    @abc.abstractmethod
    def is_committed(self, entries: Mapping[str, str]) -> bool:
        """Whether Orbax has written a step to its end; `entries` is a look at the step's folder."""

    @abc.abstractmethod
    def check(self, folder: str) -> None:
        """Raises DamagedError for the first thing in a folder that Orbax and TensorStore would read and must not.

        That is a symlink that leads out of the directory, which could be any file of this user's; a pipe, for which
        TensorStore would wait for ever; metadata so large that TensorStore, which reads it whole, would end the
        process.
        """

    @abc.abstractmethod
    def commit_of(self, folder: str) -> tuple[int, str]:
        """When a step was committed whose record has no time, in nanoseconds, and what to call that save.

        FileNotFoundError if the step is gone.
        """

    @abc.abstractmethod
    def nbytes(self, folder: str) -> int:
        """Bytes of all files in a folder. Symlinks to folders, and special files, are left out."""


class FolderStepFiles(StepFiles):
    """Steps on a file system, whose path is the `root`."""

    def __init__(self, store: Store, root: str):
        super().__init__(store)
        self._root = root

    def _path(self, folder: str) -> str:
        return os.path.join(self._root, folder)

    def may_be_step(self, folder: str) -> bool:
        """Not where it is a symlink."""
        return not os.path.islink(self._path(folder))

    def look(self, folder: str) -> dict[str, str]:
        """One scandir."""
        place = self._path(folder)

        def read() -> list[tuple[str, str]]:
            with os.scandir(place) as entries:
                return [(entry.name, _kind(entry)) for entry in entries]

        return dict(sorted(patiently(place, read)))

    def is_committed(self, entries: Mapping[str, str]) -> bool:
        """Always: Orbax has renamed the finished step into place."""
        del entries
        return True

    def check(self, folder: str) -> None:
        root = os.path.realpath(self._root)
        waiting = [(folder, os.path.realpath(self._path(folder)))]
        seen = set[str]()
        while waiting:
            at, place = waiting.pop()
            if place in seen:  # links may lead in a circle
                continue
            seen.add(place)
            for name, kind in self.look(place).items():
                path = paths.join(at, name)
                target = os.path.join(place, name)
                if kind == "link":
                    target = os.path.realpath(target)
                    if os.path.commonpath([root, target]) != root:
                        raise DamagedError(
                            path,
                            f"is a symlink that leads out of {self._root}, to {target}: not followed. Nothing was "
                            "changed: put the file itself in the link's place",
                        )
                    kind = _kind_of(path, target)
                if kind == "folder":
                    waiting.append((path, target))
                elif kind == "other":
                    raise DamagedError(path, "is neither a file nor a folder, but a pipe or a device: it is not read")
                elif kind == "file" and _is_metadata(os.path.basename(place), name):
                    try:
                        size = os.path.getsize(target)
                    except OSError:  # reading it will fail, too
                        continue
                    _check_size(path, size)

    def commit_of(self, folder: str) -> tuple[int, str]:
        """What Orbax takes, too. The time changes when a file comes or goes; what identifies the folder does not."""
        found = patiently(folder, lambda: os.stat(self._path(folder)))
        return found.st_mtime_ns, f"orbax-folder-{found.st_ino}"

    def nbytes(self, folder: str) -> int:
        total = 0
        waiting = [folder]
        while waiting:
            at = waiting.pop()
            for name, kind in self.look(at).items():
                path = os.path.join(self._path(at), name)
                if kind == "folder":
                    waiting.append(paths.join(at, name))
                elif os.path.isfile(path):
                    total += os.path.getsize(path)
        return total


class BucketStepFiles(StepFiles):
    """Steps in a bucket, which has no symlinks and no devices."""

    def may_be_step(self, folder: str) -> bool:
        """Only in a bucket of the kind to which Orbax saves."""
        del folder
        return saves_to(self._store)

    def look(self, folder: str) -> dict[str, str]:
        """One listing."""
        return {entry.name: "folder" if entry.is_folder else "file" for entry in self._store.list(folder)}

    def is_committed(self, entries: Mapping[str, str]) -> bool:
        """If it has the file that Orbax writes last."""
        return entries.get(COMMIT) == "file"

    def check(self, folder: str) -> None:
        for file in self._store.files(folder):
            *_, above, name = f"{folder}/{file.path}".split("/")
            if _is_metadata(above, name):
                _check_size(paths.join(folder, file.path), file.size)

    def commit_of(self, folder: str) -> tuple[int, str]:
        """The time of the file that was written last."""
        files = self._store.files(folder)
        if not files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._store.root}/{folder}")
        newest = max(file.written_ns for file in files)
        return newest, f"orbax-folder-{newest}"

    def nbytes(self, folder: str) -> int:
        return sum(file.size for file in self._store.files(folder))


def _is_metadata(folder: str, name: str) -> bool:
    """Whether a file of this name, in a folder of this name, is one that TensorStore and Orbax read whole."""
    return name in _SMALL or folder == ARRAY_RECORDS


def _check_size(path: str, size: int) -> None:
    if size > MAX_BYTES:
        raise DamagedError(path, f"has {size} bytes; expected at most {MAX_BYTES} of such a file: it is not read")


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"


def _kind_of(path: str, target: str) -> str:
    """The same of what a link leads to; `nothing` if that is missing."""
    try:
        mode = patiently(path, functools.partial(os.stat, target)).st_mode
    except StorageError:
        raise
    except OSError:  # missing, or a link to itself
        return "nothing"
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"
