"""What lies in a directory on a file system, and the removal of garbage there.

The names are those of `directory.staging_folder` in a run's staging folder, where `<epoch>-<try>` is a save, and those
of `contents.kind_of` beside the epochs. Others write to these folders and remove them meanwhile.

- Nothing is removed that was written to or moved lately. It is measured just before it goes, and once more out of
  sight: what was written to meanwhile goes back.
- A run's staging folder itself stays: the run may be alive, and idle.
- A rename takes a thing out of sight, durably; then its bytes go. The next removal finishes one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from epochckpt.directory import staging_folder
from epochckpt.directory.contents import (
    KEPT,
    REMOVAL_PREFIX,
    AllFiles,
    Contents,
    DiskUsage,
    GarbageRemover,
    Group,
    Kind,
    Leftover,
    Leftovers,
    SavePart,
    UnfinishedSave,
    age_secs,
    epoch_group,
    epochs_in,
    is_staging,
    kind_of,
    orbax_step,
)
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import parsing, paths
from epochckpt.orbax import step_files
from epochckpt.storage import File
from epochckpt.storage.listing import names

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import EpochDirectory
    from epochckpt.storage import Store

MAX_ENTRIES = 100_000
"""A larger tree, which is hardly one of checkpoints, is measured up to here."""

_SAVE = re.compile(r"(\d+)-(\d+)\Z")
_NO_NODES = frozenset({"metrics", "descriptor"})  # folders of the Orbax view; no node may be called so
_VIEW = frozenset({step_files.OCDBT, step_files.TREE_RECORD, step_files.ARRAY_RECORDS})


def extent(store: Store, path: str) -> DiskUsage | None:
    """Measures a folder with all below it, or a file; None if it is gone."""
    place = os.path.join(store.root, path)
    total = DiskUsage()
    try:
        own = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    total.count(own)
    total.moved_ns = total.newest_ns
    total.newest_ns = None
    waiting = [place] if stat.S_ISDIR(own.st_mode) else []
    while waiting and total.entries < MAX_ENTRIES:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        total.count(found)
                        if stat.S_ISDIR(found.st_mode):
                            waiting.append(entry.path)
        except OSError as error:
            total.note(error)
    if waiting:
        total.problem = total.problem or f"more than {MAX_ENTRIES} files; counted up to there"
    return total


class _Named(NamedTuple):
    """Something that lies beside the epochs; it has not been measured."""

    path: str
    kind: Kind
    epochs: tuple[int, ...] = ()
    save_id: str = ""
    destination: str = ""


class PosixContents(Contents):
    """Sorts by names, and measures what is found."""

    def __init__(self, epoch_directory: EpochDirectory, todelete_subdir: str | None):
        self._epoch_directory = epoch_directory
        self._store = epoch_directory.store
        self._names = epoch_directory.names
        self._todelete_subdir = todelete_subdir

    def saves(self) -> list[UnfinishedSave]:
        return self.leftovers().saves

    def leftovers(self) -> Leftovers:
        found = Leftovers()
        for name, is_folder in names(self._store, ""):
            if not is_folder or self._names.parse(name) is not None:
                continue
            try:
                for named in self._classified(name):
                    if named.kind is Kind.SAVE:
                        save = self._save(named, paths.parse_node_staging(name))
                        found.saves.extend([] if save is None else [save])
                    else:
                        other = self._leftover(named)
                        found.others.extend([] if other is None else [other])
            except OSError as error:
                found.problems[name] = str(error)
        return found

    def all_leftovers(self) -> Leftovers:
        return self.leftovers()

    def all_files(self) -> AllFiles:
        problems = dict[str, str]()
        things = self._things(problems)
        found = dict[str, list[File]]({path: [] for path in things})
        for file in walk_files(self._store.root, "", problems):
            parts = file.path.split("/")
            inner = "/".join(parts[:2])
            found.setdefault(inner if inner in things else parts[0], []).append(file)
        groups = [
            Group(path=path, kind=kind, epochs=epochs, files=files)
            for path, files in found.items()
            for kind, epochs in [things.get(path, (Kind.OTHER, ()))]
        ]
        return AllFiles(groups, problems)

    def files_in(self, folder: str) -> AllFiles:
        problems = dict[str, str]()
        files = list(walk_files(self._store.root, folder, problems))
        return AllFiles([epoch_group(self._names, folder, files)], problems)

    def measure(self, path: str) -> DiskUsage | None:
        return extent(self._store, path)

    def remover(self, clock: Callable[[], float]) -> PosixRemover:
        return PosixRemover(self._store, clock)

    def _things(self, problems: dict[str, str]) -> dict[str, tuple[Kind, tuple[int, ...]]]:
        """What lies here, by path; by names, but for folders that are named like epochs."""
        epochs, foreign = self._epoch_directory.scan()
        things: dict[str, tuple[Kind, tuple[int, ...]]] = {
            self._epoch_directory.folder(epoch): (Kind.EPOCH, (epoch,)) for epoch in epochs
        }
        for epoch, name in foreign.items():
            things[name] = (Kind.EPOCH if self._holds_epoch(name, epoch) else Kind.NOT_AN_EPOCH), (epoch,)
        for epoch in self._epoch_directory.hidden():
            things[self._epoch_directory.folder(epoch)] = Kind.ROLLED_BACK, (epoch,)
        for name, is_folder in names(self._store, ""):
            if is_folder and name not in things:
                try:
                    for named in self._classified(name):
                        things[named.path] = named.kind, named.epochs
                except OSError as error:
                    problems[name] = str(error)
        return things

    def _holds_epoch(self, folder: str, epoch: int) -> bool:
        """Whether a folder without a usable record has epochs of single nodes, or an epoch that lost its records."""
        try:
            found = self._epoch_directory.read_per_node(folder, epoch)
            ours = any(not isinstance(record, str) for record in found.values())
            return ours or self._epoch_directory.lost_records(folder)
        except (EpochCheckpointError, OSError):  # a damaged epoch, unless it is gone by now
            with contextlib.suppress(OSError):
                return self._store.exists(folder)
            return True

    def _classified(self, name: str) -> Iterator[_Named]:
        """Classifies a folder that is not named like an epoch, or what lies in it, by names."""
        if is_staging(name):
            yield from self._in_staging(name)
        elif (kind := kind_of(name, self._todelete_subdir)) is not None:
            yield _Named(name, kind, epochs_in(self._store, self._names, name) if kind in KEPT else ())
        elif (step := orbax_step(self._names, name)) is not None:
            yield _Named(name, Kind.ORBAX_SAVE, (step,))

    def _in_staging(self, home: str) -> Iterator[_Named]:
        """What lies in a run's staging folder."""
        token = home.removesuffix(paths.TMP_SUFFIX).rpartition("-")[2]
        for name, is_folder in names(self._store, home):
            path = paths.join(home, name)
            save = _SAVE.match(name)
            destination = staging_folder.parse_moving(name)
            gone = staging_folder.parse_removed(name)
            if not is_folder:
                continue
            if save:
                yield _Named(path, Kind.SAVE, (int(save[1]),), save_id=f"{token}-{name}")
            elif destination is not None:
                yield _Named(path, Kind.MOVING, destination=destination)
            elif name.endswith(paths.TMP_SUFFIX):
                moves = any(staging_folder.on_the_move(self._store, path))
                yield _Named(path, Kind.HOLDS_MOVING if moves else Kind.TAKEN_OVER)
            elif gone is not None:
                epoch = self._names.parse(gone)
                kind = Kind.REMOVED_EPOCH if gone else Kind.REMOVED_DRAFT
                yield _Named(path, kind, () if epoch is None else (epoch,))
            else:
                yield _Named(path, Kind.UNKNOWN)

    def _save(self, named: _Named, node: str | None) -> UnfinishedSave | None:
        """A save, of one node or of all; None if it is gone: committed, or discarded."""
        path = named.path
        (epoch,) = named.epochs
        whole = extent(self._store, path)
        if whole is None:
            return None
        if node:
            folders = [(path, paths.folder_name(node))]
        else:
            folders = [(paths.join(path, name), name) for name, is_folder in names(self._store, path) if is_folder]
        parts = [part for folder, name in folders if (part := self._part(folder, name)) is not None]
        return UnfinishedSave(
            path=path,
            folder=path,
            epoch=epoch,
            save_id=named.save_id,
            parts=tuple(parts),
            nbytes=whole.nbytes,
            started_ns=whole.oldest_ns,
            last_ns=whole.last_ns,
            problem=whole.problem,
        )

    def _part(self, path: str, name: str) -> SavePart | None:
        """One node's part of a save; None if no node wrote the folder, or if it is gone."""
        inner = names(self._store, path)
        files = {n for n, is_folder in inner if not is_folder}
        written = paths.NODE_RECORD in files
        if not written and (name in _NO_NODES or {n for n, _ in inner} & _VIEW or self._links_up(path, files)):
            return None  # an item of the Orbax view
        size = extent(self._store, path)
        if size is None:
            return None
        record = None
        with contextlib.suppress(EpochCheckpointError, OSError):  # it is being written just now
            if written:
                record = parsing.read_record(self._store, paths.join(path, paths.NODE_RECORD), parsing.parse_node)
        return SavePart(
            node=paths.shown_name(name),
            nbytes=size.nbytes,
            secs=None if record is None else record.timings.get("write_secs"),
            is_written=record is not None,
        )

    def _links_up(self, path: str, files: Collection[str]) -> bool:
        """Whether a folder holds links into folders of nodes, as items of the Orbax view do."""
        for name in files:
            with contextlib.suppress(OSError):  # no link, or gone
                if os.readlink(os.path.join(self._store.root, path, name)).startswith("../"):
                    return True
        return False

    def _leftover(self, named: _Named) -> Leftover | None:
        size = extent(self._store, named.path)
        if size is None:
            return None
        return Leftover(
            path=named.path,
            kind=named.kind,
            epochs=named.epochs,
            nbytes=size.nbytes,
            last_ns=size.last_ns,
            destination=named.destination,
            problem=size.problem,
        )


def walk_files(root: str, start: str, problems: dict[str, str]) -> Iterator[File]:
    """Every file below a folder, or below one folder in it, each inode once; in the order of their names.

    A symlink counts as a file without bytes, and is not followed.
    """
    seen = set[tuple[int, int]]()
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        below = list[str]()
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = paths.join(folder, entry.name)
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(found.st_mode):
                            below.append(path)
                        elif found.st_nlink == 1 or (found.st_dev, found.st_ino) not in seen:
                            if found.st_nlink > 1:
                                seen.add((found.st_dev, found.st_ino))
                            yield File(path, found.st_size if stat.S_ISREG(found.st_mode) else 0, found.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            problems[folder or "."] = str(error)
        waiting += reversed(below)


class PosixRemover(GarbageRemover):
    """Moves each thing to a folder of its own, and removes it there."""

    def __init__(self, store: Store, clock: Callable[[], float]):
        super().__init__(clock)
        self._store = store
        self._home = ""  # from the first removal on, a folder of our own

    def remove(self, thing: UnfinishedSave | Leftover, refusal: Callable[[float], str]) -> str:
        store = self._store
        path = thing.path
        if not self._home:
            self._home = f"{REMOVAL_PREFIX}{paths.new_id()}{paths.TMP_SUFFIX}"
            store.make_folder(self._home)
            # The storage's clock dates that folder. If ours is ahead of it, everything looks older than it is.
            made_ns = os.lstat(os.path.join(store.root, self._home)).st_mtime_ns
            self._ahead_secs = max(time.time() - made_ns / 1e9, 0.0)
        # It is measured just before it goes, and again when it is out of sight: a write in between takes it back.
        before = extent(store, path)
        if before is None:
            return ""  # its own job, or the next one, has removed it
        reason = refusal(age_secs(before.last_ns, self.now_ns()) or 0.0) or before.problem
        if reason:
            return reason
        away = staging_folder.removed(self._home)  # without the former name, which may be too long for another
        try:
            store.rename(path, away)
        except FileNotFoundError:
            return ""
        after = extent(store, away)
        if after is not None and (after.newest_ns, after.entries) != (before.newest_ns, before.entries):
            store.rename(away, path)
            return "something was written to it just now"
        store.sync_folder(path.rpartition("/")[0])
        store.sync_folder(self._home)
        store.remove_tree(away)
        return ""

    def close(self) -> None:
        """Removes our own folder, unless something is still in it."""
        if self._home and not names(self._store, self._home):
            self._store.remove_tree(self._home)
            self._store.sync_folder("")
