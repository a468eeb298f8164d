"""The storage that a directory takes up, by its contents: in one pass over its files, or by one listing."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.head_record import Head
from epochckpt.format import paths
from epochckpt.inspection import leftovers, objects, rows, scan, tiers
from epochckpt.inspection.rows import EpochRow, Usage, UsageRow
from epochckpt.storage import File

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory

_ORDER = (
    rows.COMMITTED,
    rows.IN_PROGRESS,
    rows.ABANDONED,
    rows.ROLLED_BACK,
    rows.QUARANTINED,
    rows.DELETED,
    rows.ATTEMPT,
    rows.ORBAX_ATTEMPT,
    rows.FOREIGN,
    rows.OTHER,
)
_Thing = tuple[str, tuple[int, ...]]  # kind, epochs


def measure(epoch_directory: EpochDirectory, todelete_subdir: str | None = None) -> Usage:
    """Measures a directory, which jobs may be writing to: sizes and times of files, as they are met.

    A file with several names counts once, where it is met first; a symlink counts as a file without bytes, and is not
    followed.
    """
    with scan.access(epoch_directory.store):
        if scan.in_bucket(epoch_directory):
            return _made(epoch_directory, _in_bucket(epoch_directory, todelete_subdir), {})
        if isinstance(epoch_directory, BucketDirectory):
            only = epoch_directory.names.only
            files = [File(only, file.size, file.written_ns) for file in epoch_directory.store.files(only)]
            return _made(epoch_directory, _rows({only: (rows.COMMITTED, _numbers(epoch_directory, only))}, files), {})
        problems = dict[str, str]()
        things = _things(epoch_directory, todelete_subdir, problems)
        found = _rows(things, _walk(epoch_directory.store.root, epoch_directory.names.only, problems))
        return _made(epoch_directory, found, problems)


def _made(epoch_directory: EpochDirectory, found: list[UsageRow], problems: dict[str, str]) -> Usage:
    found.sort(key=lambda row: (_ORDER.index(row.kind), row.epochs, row.path))
    host = tiers.host_of(epoch_directory)
    return Usage(scan.place(epoch_directory), tuple(found), problems, "" if host is None else host.node)


def _numbers(epoch_directory: EpochDirectory, folder: str) -> tuple[int, ...]:
    epoch = epoch_directory.names.parse(folder)
    return () if epoch is None else (epoch,)


def _in_bucket(epoch_directory: BucketDirectory, todelete_subdir: str | None) -> list[UsageRow]:
    things = objects.all_things(epoch_directory, todelete_subdir)
    head = epoch_directory.head.seen() or Head()
    now_ns = time.time_ns()
    found = []
    for thing in things:
        kind = thing.kind
        epochs = thing.epochs or (() if thing.epoch is None else (thing.epoch,))
        if kind == rows.ATTEMPT:
            kind = objects.attempt_row(epoch_directory, head, thing, now_ns).state
        found.append(_row(thing.path, (kind, epochs), thing.files))
    return found


def _row(path: str, thing: _Thing, files: list[File]) -> UsageRow:
    times = [file.written_ns for file in files]
    size = sum(file.size for file in files)
    return UsageRow(thing[0], path, size, len(files), thing[1], min(times, default=None), max(times, default=None))


def _things(
    epoch_directory: EpochDirectory, todelete_subdir: str | None, problems: dict[str, str]
) -> dict[str, _Thing]:
    """What lies in a POSIX directory, by path; by names, but for folders that are named like epochs."""
    epochs, foreign = epoch_directory.scan()
    things: dict[str, _Thing] = {epoch_directory.folder(epoch): (rows.COMMITTED, (epoch,)) for epoch in epochs}
    for epoch, name in foreign.items():
        per_node = isinstance(scan.read(epoch_directory, name, epoch), EpochRow)
        things[name] = rows.COMMITTED if per_node else rows.FOREIGN, (epoch,)
    for epoch in epoch_directory.hidden():
        things[epoch_directory.folder(epoch)] = rows.ROLLED_BACK, (epoch,)
    for name, is_folder in leftovers.names(epoch_directory.store, ""):
        if is_folder and name not in things and not epoch_directory.names.only:
            try:
                for each in leftovers.classified(epoch_directory, name, todelete_subdir):
                    things[each.path] = each.kind, each.epochs
            except OSError as error:
                problems[name] = str(error)
    return things


def _rows(things: dict[str, _Thing], files: Iterator[File] | list[File]) -> list[UsageRow]:
    """Groups files by the thing they belong to. An attempt with a recent file is in progress, else abandoned."""
    found = dict[str, list[File]]({path: [] for path in things})
    for file in files:
        parts = file.path.split("/")
        inner = "/".join(parts[:2])
        found.setdefault(inner if inner in things else parts[0], []).append(file)
    made = []
    for path, some in found.items():
        kind, epochs = things.get(path, (rows.OTHER, ()))
        if kind == rows.ATTEMPT and "/" in path:
            newest = max((file.written_ns for file in some), default=0)
            live = time.time_ns() - newest < leftovers.LIVE_SECS * 1e9
            kind = rows.IN_PROGRESS if live else rows.ABANDONED
        made.append(_row(path, (kind, epochs), some))
    return made


def _walk(root: str, only: str, problems: dict[str, str]) -> Iterator[File]:
    """Every file below a folder, or below one folder in it, each inode once; in the order of their names."""
    seen = set[tuple[int, int]]()
    waiting = [only]
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
