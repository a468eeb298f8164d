"""What may be removed from a directory, and removing it: attempts that are dead, and what was taken out of sight.

Guarantees:
- Committed epochs are never touched, nor what is named like an epoch, nor anything behind a symlink.
- Nothing is removed that anything was written to, or that was moved, within `older_than_secs`, which must be more than
  a save may take. A row is looked at again just before it goes, and once more when it is out of sight: what somebody
  has written to meanwhile goes back.
- A run's staging folder itself stays: the run may be alive, and idle.
- First out of sight, durably, by a rename; then the bytes. What a removal leaves that is killed is removed by the next.
- Object stores do not tell when anything was written. There what earlier runs left is removed, which a later run has
  fenced off: the same as the next run would remove.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

import orbax.checkpoint as ocp

from epochckpt import _threads, _units
from epochckpt.commit.conditional_put import PutCommits
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, say
from epochckpt.format import paths
from epochckpt.inspection import leftovers, scan
from epochckpt.inspection.leftovers import ATTEMPT, DELETED, ORBAX, QUARANTINED, ROLLED_BACK
from epochckpt.inspection.rows import EpochRow, LeftoverRow
from epochckpt.options import StorageOptions

DAY_SECS = 86400.0

DEAD = frozenset({ATTEMPT, DELETED, ORBAX})
"""Kinds that nobody can want back."""

KEPT = frozenset({ROLLED_BACK, QUARANTINED})
"""Kinds that hold epochs which a person may want back: removed only when asked for."""

Progress = Callable[[LeftoverRow], None]


@dataclasses.dataclass(frozen=True)
class Garbage:
    """What was found in a directory, or what became of it.

    Attributes:
        directory: its path or URL.
        rows: what may be removed; after `remove`: what was.
        kept: the rest, with the reason why it stays, by path.
        others: the rows of the rest.
    """

    directory: str
    rows: tuple[LeftoverRow, ...]
    kept: Mapping[str, str]
    others: tuple[LeftoverRow, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of what may be removed, or was."""
        return sum(row.nbytes for row in self.rows)


def find(
    directory: str | os.PathLike[str],
    *,
    older_than_secs: float = DAY_SECS,
    epochs_too: bool = False,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
    clock: Callable[[], float] = time.time,
) -> Garbage:
    """What may be removed; nothing is changed.

    Args:
        directory: a path or a URL.
        older_than_secs: only what nothing was written to for so long; more than a save may take.
        epochs_too: also epochs that were rolled back, replaced because they were damaged, or moved to the folder that
            `todelete_subdir` names.
        options: the step name format and `todelete_subdir`, if they are not the defaults.
        storage: of the jobs that save here, if their `save_timeout_secs` is not the default.
        clock: the time, seconds since 1970.

    Raises:
        InvalidArgumentError: a save may take longer than `older_than_secs`.
        NotACheckpointDirectoryError: it is no checkpoint directory; says what it looks like instead.
        AccessError: it may not be read.
    """
    return _Search(directory, older_than_secs, epochs_too, options, storage, clock).garbage()


def remove(
    directory: str | os.PathLike[str],
    rows: Sequence[LeftoverRow] | None = None,
    *,
    older_than_secs: float = DAY_SECS,
    epochs_too: bool = False,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
    clock: Callable[[], float] = time.time,
    progress: Progress | None = None,
) -> Garbage:
    """Removes what `find` finds. Safe beside jobs that are saving.

    Args:
        directory: a path or a URL.
        rows: only these, as `find` returned them, as far as they still may be; None: all.
        older_than_secs: see `find`.
        epochs_too: see `find`.
        options: see `find`.
        storage: see `find`.
        clock: see `find`.
        progress: called with each row that is gone.

    Returns:
        What was removed; `kept` says of the rest why it was not, errors included.

    Raises:
        AccessError: it may not be read.
        InvalidArgumentError, NotACheckpointDirectoryError: see `find`.
    """
    search = _Search(directory, older_than_secs, epochs_too, options, storage, clock)
    found = search.garbage()
    wanted = found.rows if rows is None else [row for row in found.rows if row.path in {r.path for r in rows}]
    removal = _RemovalOfObjects(search) if isinstance(search.commits, PutCommits) else _Removal(search)
    gone: list[LeftoverRow] = []
    kept = dict(found.kept)
    others = list(found.others)
    try:
        for row in wanted:
            try:
                reason = removal.remove(row)
            except (EpochCheckpointError, OSError) as error:
                reason = f"could not be removed: {say(error)}"
            if reason:
                kept[row.path] = reason
                others.append(row)
            else:
                gone.append(row)
                if progress is not None:
                    progress(row)
    finally:
        _threads.logged(f"{found.directory}: the folder of this clean-up stays", removal.end)
    return Garbage(found.directory, tuple(gone), kept, tuple(others))


class _Search:
    """What may go, and why the rest may not."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        older_than_secs: float,
        epochs_too: bool,
        options: ocp.CheckpointManagerOptions | None,
        storage: StorageOptions | None,
        clock: Callable[[], float],
    ):
        bound = (storage or StorageOptions()).save_timeout_secs
        number = isinstance(older_than_secs, int | float) and not isinstance(older_than_secs, bool)
        if not number or not math.isfinite(older_than_secs) or older_than_secs <= bound:
            raise InvalidArgumentError(
                f"older_than_secs={older_than_secs!r}: a save may be silent for {bound:g} s "
                "(StorageOptions.save_timeout_secs), and must not be taken for dead; expected more than that"
            )
        self.commits = scan.open_commits(directory, options)
        self._older_than_secs, self._clock = older_than_secs, clock
        self._kinds = DEAD | KEPT if epochs_too else DEAD
        self._folder = options.todelete_subdir if options else None
        self._newest = self.commits.newest if isinstance(self.commits, PutCommits) else ""
        self.ahead_secs = 0.0

    def garbage(self) -> Garbage:
        """Looks at everything."""
        rows, kept = [], dict[str, str]()
        found = self.look()
        for row in found:
            reason = self.reason(row)
            if reason:
                kept[row.path] = reason
            else:
                rows.append(row)
        others = tuple(row for row in found if row.path in kept)
        return Garbage(self.commits.store.root, tuple(rows), kept, others)

    def look(self) -> list[LeftoverRow]:
        """Everything that is no epoch, as it is now."""
        try:
            found = leftovers.find(self.commits, self.now_ns(), self._folder)
            attempts = [_row(attempt) for attempt in found.attempts]
            if isinstance(self.commits, PutCommits):
                attempts = _rows_of_objects(leftovers.orphans(self.commits))
        except PermissionError as error:
            raise scan.no_access(self.commits, error) from error
        return sorted([*attempts, *found.others], key=lambda row: row.path)

    def now_ns(self) -> int:
        """The time, by the clock of the storage if that is the later one."""
        return int((self._clock() - max(self.ahead_secs, 0.0)) * 1e9)

    def reason(self, row: LeftoverRow) -> str:
        """Why something stays; empty if it may go."""
        if row.kind not in DEAD | KEPT:
            return "not known: nobody but you can say whether it is needed"
        if row.path.count("/") and row.kind in KEPT:
            return row.detail  # on the move, in a run's staging
        if row.kind not in self._kinds:
            return "holds epochs; removed only when asked for"
        if row.kind == ROLLED_BACK and self._is_rolling_back(row.path):
            return "a rollback is under way"
        if isinstance(self.commits, PutCommits):
            if row.kind == ATTEMPT:
                return "" if leftovers.is_fenced_off(row.path.rpartition("/")[2], self._newest) else row.detail
            return "" if row.kind in KEPT else "not known on an object store"
        if row.age_secs is None or row.age_secs < self._older_than_secs:
            age = "at an unknown time" if row.age_secs is None else f"{_units.secs(row.age_secs)} ago"
            return f"something was written to it {age}; it may go after {_units.secs(self._older_than_secs)}"
        return ""

    def _is_rolling_back(self, folder: str) -> bool:
        """Whether that is where epochs are being moved to just now."""
        try:
            rollback = self.commits.rollback()
        except (EpochCheckpointError, OSError):  # of one of them, nobody knows which
            return True
        return rollback is not None and rollback.folder == folder


def _row(attempt: EpochRow) -> LeftoverRow:
    return LeftoverRow(
        attempt.folder, ATTEMPT, attempt.nbytes, attempt.age_secs, (attempt.epoch,), f"a save; {attempt.detail}"
    )


def _rows_of_objects(attempts: Sequence[EpochRow]) -> list[LeftoverRow]:
    """One row for each node's part of an attempt: they have no folder in common."""
    return [
        LeftoverRow(
            paths.join(attempt.folder, paths.folder_name(node.name), attempt.attempt),
            ATTEMPT,
            node.nbytes,
            None,
            (attempt.epoch,),
            attempt.detail,
        )
        for attempt in attempts
        for node in attempt.nodes
    ]


class _Removal:
    """Removing on a file system, by way of a folder of its own."""

    def __init__(self, search: _Search):
        self._search, self._store, self._home = search, search.commits.store, ""

    def remove(self, row: LeftoverRow) -> str:
        """Removes one thing; returns why not, or nothing."""
        store = self._store
        if not self._home:
            self._begin()
        before = leftovers.extent(store, row.path)
        if before is None:
            return ""  # its own job, or the next one, was quicker
        reason = self._search.reason(dataclasses.replace(row, age_secs=before.age_secs(self._search.now_ns())))
        if reason or before.problem:
            return reason or before.problem
        away = paths.join(self._home, f"{paths.new_id()}-{row.path.rpartition('/')[2]}")
        try:
            store.rename(row.path, away)
        except FileNotFoundError:
            return ""
        after = leftovers.extent(store, away)
        if after is not None and (after.newest_ns, after.entries) != (before.newest_ns, before.entries):
            store.rename(away, row.path)
            return "something was written to it just now"
        store.sync_folder(row.path.rpartition("/")[0])
        store.sync_folder(self._home)
        store.remove_tree(away)
        return ""

    def _begin(self) -> None:
        home = f"{leftovers.GC_PREFIX}{paths.new_id()}{paths.TMP_SUFFIX}"
        self._store.make_folder(home)
        self._home = home
        # the storage's clock made it just now: if ours is ahead of that one, everything looks older than it is
        made_ns = os.lstat(os.path.join(self._store.root, home)).st_mtime_ns
        self._search.ahead_secs = time.time() - made_ns / 1e9

    def end(self) -> None:
        """Removes the folder, unless something is still in it."""
        if self._home and not leftovers.names(self._store, self._home):
            self._store.remove_tree(self._home)
            self._store.sync_folder("")


class _RemovalOfObjects:
    """Removing on an object store."""

    def __init__(self, search: _Search):
        assert isinstance(search.commits, PutCommits)
        self._search, self._commits = search, search.commits

    def remove(self, row: LeftoverRow) -> str:
        """Removes one thing; returns why not, or nothing."""
        if row.kind == ATTEMPT:
            folder = row.path.partition("/")[0]
            if row.path in self._commits.unrecorded([folder]):
                self._commits.sweep(row.path)
            return ""
        if row.kind not in KEPT:
            return "not known on an object store"
        store = self._commits.store
        for name, _ in leftovers.names(store, row.path):
            record, at = None, paths.join(row.path, name)
            with contextlib.suppress(EpochCheckpointError):  # its data is an attempt that no record names, from now on
                record = self._commits.read_in(at, self._commits.names.parse(name) or 0)
            store.remove_tree(at)
            if record is not None:
                parts = {paths.join(name, record.node_folder(number)) for number in range(len(record.nodes))}
                for part in parts & set(self._commits.unrecorded([name])):
                    store.remove_tree(part)
        return ""

    def end(self) -> None:
        """Nothing: there is no folder."""
