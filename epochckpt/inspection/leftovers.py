"""The contents of a directory beside its epochs: attempts under way or left over, and epochs that were moved away.

The names are those of `directory.staging_folder` in a run's staging folder, where `<epoch>-<try>` is an attempt, and
those of `_NAMED` beside the epochs. Others write to these folders and remove them meanwhile: what has vanished is no
error, and no symlink is followed. Ages are differences between the wall clock and the times of the file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from epochckpt import _units
from epochckpt.directory import EpochDirectory, staging_folder
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import parsing, paths
from epochckpt.inspection import rows
from epochckpt.inspection.rows import EpochRow, LeftoverRow, NodeRow

if TYPE_CHECKING:
    from epochckpt.storage import Store

MAX_ENTRIES = 100_000
"""A larger tree, which is hardly one of checkpoints, is measured up to here."""


@dataclasses.dataclass
class DiskUsage:
    """How much lies in a folder, and how old it is, in nanoseconds since 1970; None: the store does not tell."""

    nbytes: int = 0
    entries: int = 0  # files and folders
    newest_ns: int | None = None  # when something in the folder was last written, made, or moved
    moved_ns: int | None = None  # the same of the folder itself, which changes also when it is moved
    oldest_ns: int | None = None  # when the oldest thing in it was last written
    problem: str = ""  # why it could not be looked at as a whole

    def note(self, error: OSError) -> None:
        """Keeps the first error, unless it only says that something has vanished."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            self.problem = self.problem or str(error)

    def count(self, found: os.stat_result) -> None:
        """Adds a file or a folder."""
        self.entries += 1
        self.nbytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
        # The last change of the inode counts, too: a folder that is renamed keeps the time of its last write.
        self.newest_ns = max(self.newest_ns or 0, found.st_mtime_ns, found.st_ctime_ns)
        self.oldest_ns = min(self.oldest_ns or found.st_mtime_ns, found.st_mtime_ns)

    def age_secs(self, now_ns: int) -> float | None:
        """How long ago something was last written to it; None: the store does not tell."""
        times = [t for t in (self.newest_ns, self.moved_ns) if t is not None]
        return max(now_ns - max(times), 0) / 1e9 if times else None


def extent(store: Store, path: str) -> DiskUsage | None:
    """Measures a folder with all below it, or a file; None if it is gone."""
    if store.atomic_folder_rename:
        return _on_disk(os.path.join(store.root, path))
    total = DiskUsage()
    try:
        for file in store.files(path):
            total.nbytes += file.size
            total.entries += 1
            total.newest_ns = max(total.newest_ns or 0, file.written_ns)
            total.oldest_ns = min(total.oldest_ns or file.written_ns, file.written_ns)
    except OSError as error:
        total.note(error)
    return total if total.entries or total.problem else None


def names(store: Store, path: str) -> list[tuple[str, bool]]:
    """The names in a folder, with whether each is a folder; none if it is gone."""
    try:
        return [(entry.name, entry.is_folder) for entry in store.list(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk(store: Store, path: str) -> Iterator[tuple[str, bool]]:
    """Every path below a folder, parents first, with whether it is a folder."""
    for name, is_folder in names(store, path):
        below = paths.join(path, name)
        yield below, is_folder
        if is_folder:
            yield from walk(store, below)


def _on_disk(place: str) -> DiskUsage | None:
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


LIVE_SECS = 600.0
"""An attempt that something was written to within so many seconds counts as under way."""

KEPT = frozenset({rows.ROLLED_BACK, rows.QUARANTINED})
"""Kinds of leftovers that hold epochs."""

GC_PREFIX = "gc-"

_ATTEMPT = re.compile(r"(\d+)-(\d+)\Z")
_STAGED = rf"(.*-)?[0-9a-f]{{8,16}}{re.escape(paths.TMP_SUFFIX)}\Z"
_NAMED = (
    (re.compile(r"rolled-back-[0-9a-f]{16}\Z"), rows.ROLLED_BACK, "quarantined by rollback_to"),
    (re.compile(r"damaged-[0-9a-f]{16}\Z"), rows.QUARANTINED, "a damaged epoch that was replaced"),
    (
        re.compile(r"partial-[0-9a-f]{16}\Z"),
        rows.QUARANTINED,
        "parts of epochs that other hosts lack",
    ),
    (re.compile(r"diverged-[0-9a-f]{16}\Z"), rows.QUARANTINED, "no part of the history that the mirror has"),
    (re.compile(f"(?s)export-{_STAGED}"), rows.ATTEMPT, "staging of an export"),
    (re.compile(f"unclaimed-{_STAGED}"), rows.DELETED, "staging of a run that has not begun, or has ended"),
    (re.compile(f"(?s){GC_PREFIX}{_STAGED}"), rows.DELETED, "being removed, or left by a removal that was interrupted"),
)
_NO_NODES = frozenset({"metrics", "descriptor"})  # folders of the Orbax view; no node may be called so
_VIEW = frozenset({"manifest.ocdbt", "_METADATA", "array_metadatas"})


class Found(NamedTuple):
    """Something that lies beside the epochs; it has not been measured."""

    path: str
    kind: str
    epochs: tuple[int, ...]
    detail: str
    save_id: str = ""  # of a save in a run's staging folder: its id


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What was found."""

    attempts: list[EpochRow] = dataclasses.field(default_factory=list)  # saves that have not been committed
    others: list[LeftoverRow] = dataclasses.field(default_factory=list)
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by path


def find(epoch_directory: EpochDirectory, now_ns: int, todelete_subdir: str | None = None) -> Leftovers:
    """Finds and measures what lies in a POSIX directory; for object stores see `objects`."""
    found = Leftovers()
    store = epoch_directory.store
    for name, is_folder in names(store, ""):
        if not is_folder or epoch_directory.names.parse(name) is not None:
            continue
        try:
            for each in classified(epoch_directory, name, todelete_subdir):
                if each.save_id:
                    row = _save_id(store, each, paths.parse_node_staging(name), now_ns)
                    found.attempts.extend([row] if row is not None else [])
                else:
                    row = row_of(store, each.path, each.kind, now_ns, each.epochs, each.detail)
                    found.others.extend([row] if row is not None else [])
        except OSError as error:
            found.problems[name] = str(error)
    return found


def classified(epoch_directory: EpochDirectory, name: str, todelete_subdir: str | None = None) -> Iterator[Found]:
    """Classifies a folder of a POSIX directory, or its contents, by names; the folder is not named like an epoch."""
    if _is_staging(name):
        yield from _in_staging(epoch_directory, name)
    elif (known := kind_of(name, todelete_subdir)) is not None:
        kind, detail = known
        yield Found(name, kind, _epochs_in(epoch_directory, name) if kind in KEPT else (), detail)
    elif (step := _orbax_step(epoch_directory, name)) is not None:
        yield Found(name, rows.ORBAX_ATTEMPT, (step,), "a save of stock Orbax, under way or left over")


def kind_of(name: str, todelete_subdir: str | None = None) -> tuple[str, str] | None:
    """The kind of a folder beside the epochs, by its name, and what it is in words."""
    for pattern, kind, detail in _NAMED:
        if pattern.match(name):
            return kind, detail
    if name == todelete_subdir:
        return rows.QUARANTINED, "deleted epochs, kept because of todelete_subdir"
    return None


def is_sign(epoch_directory: EpochDirectory, name: str) -> bool:
    """Whether a folder that is named like no epoch shows that the directory is one of checkpoints."""
    if _is_staging(name) or _orbax_step(epoch_directory, name) is not None:
        return True
    if name.startswith(("rolled-back-", "damaged-", "partial-", "diverged-")):  # also what people have named so
        return bool(_epochs_in(epoch_directory, name))
    return name == paths.ROOT_METADATA[0] and epoch_directory.store.exists(paths.join(*paths.ROOT_METADATA))


def _is_staging(name: str) -> bool:
    return paths.parse_incarnation(name) is not None or paths.parse_node_staging(name) is not None


def _orbax_step(epoch_directory: EpochDirectory, name: str) -> int | None:
    """The step for which stock Orbax staged a folder; None for other folders."""
    step, suffix, _ = name.partition(paths.TMP_SUFFIX)
    return epoch_directory.names.parse(step) if suffix else None


def silence(age_secs: float) -> str:
    """What to say of an attempt that nothing was written to for long."""
    return f"nothing was written for {_units.secs(age_secs)}: it failed, or its job was killed"


def _in_staging(epoch_directory: EpochDirectory, home: str) -> Iterator[Found]:
    """What lies in a run's staging folder."""
    store = epoch_directory.store
    token = home.removesuffix(paths.TMP_SUFFIX).rpartition("-")[2]
    for name, is_folder in names(store, home):
        path = paths.join(home, name)
        tried = _ATTEMPT.match(name)
        where = staging_folder.parse_moving(name)
        gone = staging_folder.parse_removed(name)
        if not is_folder:
            continue
        if tried:
            yield Found(path, rows.ATTEMPT, (int(tried[1]),), "", f"{token}-{name}")
        elif where is not None:
            yield Found(path, rows.QUARANTINED, (), f"an epoch on the move to {where}: the next run puts it there")
        elif name.endswith(paths.TMP_SUFFIX) and any(staging_folder.on_the_move(store, path)):
            yield Found(path, rows.QUARANTINED, (), "what an earlier run left, with an epoch on the move in it")
        elif name.endswith(paths.TMP_SUFFIX):
            yield Found(path, rows.DELETED, (), "what an earlier run left, out of sight")
        elif gone is not None:
            epoch = epoch_directory.names.parse(gone)
            detail = "a deleted or replaced epoch, out of sight" if gone else "a failed save, or a draft, out of sight"
            yield Found(path, rows.DELETED, () if epoch is None else (epoch,), detail)
        else:
            yield Found(path, rows.FOREIGN, (), "not known")


def _save_id(store: Store, found: Found, node: str | None, now_ns: int) -> EpochRow | None:
    """The row of an attempt, of one node or of all; None if it is gone: committed, or discarded."""
    path = found.path
    (epoch,) = found.epochs
    whole = extent(store, path)
    if whole is None:
        return None
    if node:
        parts = [(path, paths.folder_name(node))]
    else:
        parts = [(paths.join(path, name), name) for name, is_folder in names(store, path) if is_folder]
    nodes = [row for part, name in parts if (row := _node(store, part, name)) is not None]
    age = whole.age_secs(now_ns) or 0.0
    state = rows.IN_PROGRESS
    detail = progress(nodes)
    if age >= LIVE_SECS:
        state = rows.ABANDONED
        detail += f"; {silence(age)}"
    fields = {"folder": path, "save_id": found.save_id, "nodes": tuple(nodes), "nbytes": whole.nbytes}
    return EpochRow(epoch, state, detail=whole.problem or detail, started_ns=whole.oldest_ns, age_secs=age, **fields)


def progress(nodes: Sequence[NodeRow]) -> str:
    """How many nodes of an attempt have written their part."""
    done = sum(n.state == "written" for n in nodes)
    began = _units.several(len(nodes), "node", "nodes")
    return f"{done} of the {began} that began {'has' if done == 1 else 'have'} written"


def _node(store: Store, path: str, name: str) -> NodeRow | None:
    """One node's part of an attempt; None if no node wrote the folder, or if it is gone."""
    inner = names(store, path)
    files = {n for n, is_folder in inner if not is_folder}
    written = paths.NODE_RECORD in files
    if not written and (name in _NO_NODES or {n for n, _ in inner} & _VIEW or _links_up(store, path, files)):
        return None  # an item of the Orbax view
    size = extent(store, path)
    if size is None:
        return None
    record = None
    with contextlib.suppress(EpochCheckpointError, OSError):  # it is being written just now
        if written:
            record = parsing.read_record(store, paths.join(path, paths.NODE_RECORD), parsing.parse_node)
    if record is None:
        return NodeRow(paths.shown_name(name), size.nbytes, None, "writing")
    return NodeRow(paths.shown_name(name), size.nbytes, record.timings.get("write_secs"), "written")


def _links_up(store: Store, path: str, names: Collection[str]) -> bool:
    """Whether a folder holds links into folders of nodes, as items of the Orbax view do."""
    for name in names if store.atomic_folder_rename else ():
        with contextlib.suppress(OSError):  # no link, or gone
            if os.readlink(os.path.join(store.root, path, name)).startswith("../"):
                return True
    return False


def _epochs_in(epoch_directory: EpochDirectory, folder: str) -> tuple[int, ...]:
    numbers = (epoch_directory.names.parse(name) for name, _ in names(epoch_directory.store, folder))
    return tuple(sorted(n for n in numbers if n is not None))


def row_of(store: Store, path: str, kind: str, now_ns: int, epochs: tuple[int, ...], detail: str) -> LeftoverRow | None:
    """The row of a folder, after measuring it; None if it is gone."""
    size = extent(store, path)
    if size is None:
        return None
    detail += f" ({size.problem})" if size.problem else ""
    return LeftoverRow(path, kind, size.nbytes, size.age_secs(now_ns), epochs, detail)
