"""Finds and removes garbage in a directory: dead attempts, and deleted or replaced things that were moved away.

- Committed epochs are never touched, nor what is named like an epoch, nor anything behind a symlink.
- Nothing is removed that was written to or moved within `older_than_secs`, which is more than a save may take. It is
  measured just before it goes, and once more out of sight: what was written to meanwhile goes back.
- A run's staging folder itself stays: the run may be alive, and idle.
- A rename takes a thing out of sight, durably; then its bytes go. The next removal finishes one that was killed.
- On object stores an attempt is first declared dead in the head, so that it can never be committed. What no head of the
  directory has named is not touched; age is that of the newest object.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from epochckpt import _threads, _units
from epochckpt.directory import EpochDirectory, staging_folder
from epochckpt.directory.bucket import BucketDirectory, BucketSweep
from epochckpt.directory.head_changes import ForgetDead, ForgetKept, GiveUp, Refresh, RemoveKeptSteps
from epochckpt.directory.head_record import Head
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, say
from epochckpt.format import paths
from epochckpt.inspection import leftovers, objects, scan
from epochckpt.inspection.leftovers import KEPT
from epochckpt.inspection.rows import ATTEMPT, COMMITTED, DELETED, FOREIGN, OTHER, ROLLED_BACK, EpochRow, LeftoverRow
from epochckpt.options import StorageOptions

if TYPE_CHECKING:
    from epochckpt._lazy import ocp

DAY_SECS = 86400.0


@dataclasses.dataclass(frozen=True)
class Garbage:
    """The result of a clean-up, or of a look before one."""

    directory: str
    rows: tuple[LeftoverRow, ...]  # that may be removed; after a removal, that were
    kept: Mapping[str, str]  # why other things stay, by path
    others: tuple[LeftoverRow, ...] = ()  # these other things

    @property
    def nbytes(self) -> int:
        """Bytes of all `rows`."""
        return sum(row.nbytes for row in self.rows)


def collect(
    directory: str | os.PathLike[str],
    *,
    delete: bool = False,
    older_than_secs: float = DAY_SECS,
    epochs_too: bool = False,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
    clock: Callable[[], float] = time.time,
    progress: Callable[[LeftoverRow], None] = lambda row: None,
) -> Garbage:
    """Finds what may be removed, and removes it if `delete` says so. Safe beside jobs that are saving.

    Only what nothing was written to for `older_than_secs`, which must be more than a save may take: `storage` has the
    `save_timeout_secs` of the jobs that save here. With `epochs_too` also what holds epochs, among them the folder that
    `options.todelete_subdir` names. `progress` is called with each row that is gone.
    """
    bound = (storage or StorageOptions()).save_timeout_secs
    number = isinstance(older_than_secs, int | float) and not isinstance(older_than_secs, bool)
    if not number or not math.isfinite(older_than_secs) or older_than_secs <= bound:
        raise InvalidArgumentError(
            f"older_than_secs={older_than_secs!r}: a save may be silent for {bound:g} s "
            "(StorageOptions.save_timeout_secs), and must not be taken for dead; expected more than that"
        )
    epoch_directory = scan.open_commits(directory, options)
    search = _GarbageSearch(epoch_directory, older_than_secs, epochs_too, clock)
    rows = list[LeftoverRow]()
    kept = dict[str, str]()
    with scan.access(epoch_directory.store):
        found = search.look(options.todelete_subdir if options else None)
    try:
        for row in found:
            reason = search.reason(row)
            if delete and not reason:
                try:
                    reason = search.remove(row)
                except (EpochCheckpointError, OSError) as error:
                    reason = f"could not be removed: {say(error)}"
            if reason:
                kept[row.path] = reason
                continue
            rows.append(row)
            if delete:
                progress(row)
    finally:
        _threads.logged(f"{epoch_directory.store.root}: the folder of this clean-up stays", search.end)
    return Garbage(epoch_directory.store.root, tuple(rows), kept, tuple(row for row in found if row.path in kept))


class _GarbageSearch:
    """What may go, why the rest may not, and removing it."""

    def __init__(
        self, epoch_directory: EpochDirectory, older_than_secs: float, epochs_too: bool, clock: Callable[[], float]
    ):
        self._epoch_directory = epoch_directory
        self._store = epoch_directory.store
        self._older_than_secs = older_than_secs
        self._epochs_too = epochs_too
        self._clock = clock
        self._ahead_secs = 0.0  # of our clock before the storage's
        self._home = ""  # from the first removal on a folder of our own, or in an object store that of the head

    def look(self, todelete_subdir: str | None) -> list[LeftoverRow]:
        """Everything that is no epoch, as it is now."""
        if isinstance(self._epoch_directory, BucketDirectory):
            return self._in_bucket(self._epoch_directory, todelete_subdir)
        found = leftovers.find(self._epoch_directory, self._now_ns(), todelete_subdir)
        return sorted([*map(_row, found.attempts), *found.others], key=lambda row: row.path)

    def _in_bucket(self, epoch_directory: BucketDirectory, todelete_subdir: str | None) -> list[LeftoverRow]:
        things = objects.all_things(epoch_directory, todelete_subdir)
        now_ns = self._now_ns()
        head = epoch_directory.head.seen() or Head()
        found = list[LeftoverRow]()
        for thing in things:
            if thing.kind == ATTEMPT:
                attempt = objects.attempt_row(epoch_directory, head, thing, now_ns)
                found.append(dataclasses.replace(_row(attempt), path=thing.path))
            elif thing.kind not in (COMMITTED, OTHER):
                found.append(objects.leftover_row(thing, now_ns))
        return found

    def _now_ns(self) -> int:
        """The time by our clock, or by the storage's if that is behind."""
        return int((self._clock() - self._ahead_secs) * 1e9)

    def reason(self, row: LeftoverRow) -> str:
        """Why something stays; empty if it may go."""
        if row.kind == FOREIGN:
            return "not known: nobody but you can say whether it is needed"
        if row.kind in KEPT and "/" in row.path:
            return row.detail  # on the move, in a run's staging
        if row.kind in KEPT and not self._epochs_too:
            return "holds epochs; removed only when asked for"
        if row.kind == ROLLED_BACK and self._is_rolling_back(row.path):
            return "a rollback is under way"
        age = row.age_secs or 0.0
        bound = self._older_than_secs
        if age < bound:
            return f"something was written to it {_units.secs(age)} ago; it may go after {_units.secs(bound)}"
        return ""

    def _is_rolling_back(self, folder: str) -> bool:
        """Whether epochs are being moved there just now."""
        try:
            rollback = self._epoch_directory.rollback()
        except (EpochCheckpointError, OSError):  # which folder it is about is not known
            return True
        return rollback is not None and rollback.folder == folder

    def remove(self, row: LeftoverRow) -> str:
        """Removes one thing; returns why not, or nothing."""
        if isinstance(self._epoch_directory, BucketDirectory):
            return self._remove_objects(self._epoch_directory, row)
        store = self._store
        path = row.path
        if not self._home:
            self._home = f"{leftovers.GC_PREFIX}{paths.new_id()}{paths.TMP_SUFFIX}"
            store.make_folder(self._home)
            # The storage's clock dates that folder. If ours is ahead of it, everything looks older than it is.
            made_ns = os.lstat(os.path.join(store.root, self._home)).st_mtime_ns
            self._ahead_secs = max(time.time() - made_ns / 1e9, 0.0)
        # It is measured just before it goes, and again when it is out of sight: a write in between takes it back.
        before = leftovers.extent(store, path)
        if before is None:
            return ""  # its own job, or the next one, has removed it
        reason = self.reason(dataclasses.replace(row, age_secs=before.age_secs(self._now_ns()))) or before.problem
        if reason:
            return reason
        away = staging_folder.removed(self._home)  # without the former name, which may be too long for another
        try:
            store.rename(path, away)
        except FileNotFoundError:
            return ""
        after = leftovers.extent(store, away)
        if after is not None and (after.newest_ns, after.entries) != (before.newest_ns, before.entries):
            store.rename(away, path)
            return "something was written to it just now"
        store.sync_folder(path.rpartition("/")[0])
        store.sync_folder(self._home)
        store.remove_tree(away)
        return ""

    def _remove_objects(self, epoch_directory: BucketDirectory, row: LeftoverRow) -> str:
        """Removes an attempt, or epochs that were set aside, from an object store; returns why not, or nothing."""
        if not self._home:
            self._home = objects.OWN
            self._ahead_secs = max(time.time() - _clock_ns(epoch_directory) / 1e9, 0.0)
        if reason := self.reason(dataclasses.replace(row, age_secs=(row.age_secs or 0.0) - self._ahead_secs)):
            return reason
        folder, _, name = row.path.rpartition("/")
        sweep = BucketSweep(epoch_directory)
        if row.kind == DELETED and not folder:  # a step of stock Orbax
            sweep.finish_step(name)
        elif row.kind in (ATTEMPT, DELETED):
            _bury(epoch_directory, sweep, {name: folder})
        else:
            _bury_aside(epoch_directory, sweep, row.path)
        return ""

    def end(self) -> None:
        """Removes our own folder, unless something is still in it."""
        if self._home and self._store.atomic_folder_rename and not leftovers.names(self._store, self._home):
            self._store.remove_tree(self._home)
            self._store.sync_folder("")


def _row(attempt: EpochRow) -> LeftoverRow:
    """An attempt: its folder."""
    detail = f"a save; {attempt.detail}"
    return LeftoverRow(attempt.folder, ATTEMPT, attempt.nbytes, attempt.age_secs, (attempt.epoch,), detail)


def _clock_ns(epoch_directory: BucketDirectory) -> int:
    """The time by the store's clock, nanoseconds since 1970: that of a change of the head, which is made now."""
    folder, _, name = paths.HEAD.partition("/")
    epoch_directory.head.write(Refresh())
    return next(file.written_ns for file in epoch_directory.store.files(folder) if file.path == name)


def _bury(epoch_directory: BucketDirectory, sweep: BucketSweep, attempts: Mapping[str, str]) -> None:
    """Removes attempts, by id the folder, also those that a run has begun: from now on they are dead."""
    named = epoch_directory.head.write(GiveUp(incarnation=None, save_ids=frozenset(attempts))).head.named
    sweep.remove_dead({a: f for a, f in attempts.items() if a not in named})
    epoch_directory.head.write(ForgetDead(frozenset(epoch_directory.head.swept)))


def _bury_aside(epoch_directory: BucketDirectory, sweep: BucketSweep, name: str) -> None:
    """Removes the epochs that were set aside under a name."""
    now = epoch_directory.head.write(RemoveKeptSteps(name)).head
    kept = {place: entry for place, entry in now.aside.items() if place.startswith(f"{name}/")}
    for folder in (folder for folder, step in now.removed_steps.items() if not step.kept_in):
        sweep.finish_step(folder)
    epoch_directory.store.remove_tree(name)  # named by the head until nothing is left: the next one goes on
    _bury(epoch_directory, sweep, epoch_directory.head.write(ForgetKept(kept)).head.dead)
