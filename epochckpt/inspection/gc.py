"""Finds and removes garbage in a directory: dead attempts, and deleted or replaced things that were moved away.

- Committed epochs are never touched, nor what is named like an epoch, nor anything behind a symlink.
- Nothing is removed that was written to or moved within `older_than_secs`, which is more than a save may take.
- `directory.contents` says what lies there; `directory.posix_contents` and `bucket_contents` remove it safely.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from epochckpt import _threads, _units
from epochckpt.directory import EpochDirectory
from epochckpt.directory.contents import KEPT, NOT_OURS, Contents, Kind, Leftover, UnfinishedSave
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, say
from epochckpt.inspection import leftovers, opening
from epochckpt.inspection.rows import ATTEMPT, LeftoverRow
from epochckpt.options import StorageOptions

if TYPE_CHECKING:
    from epochckpt._lazy import ocp

DAY_SECS = 86400.0


@dataclasses.dataclass(frozen=True)
class Kept:
    """Why a thing stays: it may not go; or it could not be removed, which is a failure."""

    reason: str
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Garbage:
    """The result of a clean-up, or of a look before one."""

    directory: str
    rows: tuple[LeftoverRow, ...]  # that may be removed; after a removal, that were
    kept: Mapping[str, Kept]  # why other things stay, by path
    others: tuple[LeftoverRow, ...] = ()  # these other things

    @property
    def nbytes(self) -> int:
        """Bytes of all `rows`."""
        return sum(row.nbytes for row in self.rows)

    @property
    def failed(self) -> bool:
        """Whether something could not be removed."""
        return any(kept.failed for kept in self.kept.values())


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
    epoch_directory = opening.open_directory(directory, options)
    contents = epoch_directory.contents(options.todelete_subdir if options else None)
    search = _GarbageSearch(epoch_directory, older_than_secs, epochs_too)
    remover = contents.remover(clock)
    rows = list[LeftoverRow]()
    kept = dict[str, Kept]()
    with opening.access(epoch_directory.store):
        found = search.look(contents, remover.now_ns())
    try:
        for each in found:
            row = each.row
            reason = search.reason(each, row.age_secs or 0.0)
            if delete and not reason:
                try:
                    reason = remover.remove(each.thing, functools.partial(search.reason, each))
                except (EpochCheckpointError, OSError) as error:
                    kept[row.path] = Kept(f"could not be removed: {say(error)}", failed=True)
                    continue
            if reason:
                kept[row.path] = Kept(reason)
                continue
            rows.append(row)
            if delete:
                progress(row)
    finally:
        _threads.logged(f"{epoch_directory.store.root}: the folder of this clean-up stays", remover.close)
    others = tuple(each.row for each in found if each.row.path in kept)
    return Garbage(epoch_directory.store.root, tuple(rows), kept, others)


class _Found(NamedTuple):
    """A thing that lies in the directory, and its row."""

    thing: UnfinishedSave | Leftover
    row: LeftoverRow


class _GarbageSearch:
    """What may go, and why the rest may not."""

    def __init__(self, epoch_directory: EpochDirectory, older_than_secs: float, epochs_too: bool):
        self._epoch_directory = epoch_directory
        self._older_than_secs = older_than_secs
        self._epochs_too = epochs_too

    def look(self, contents: Contents, now_ns: int) -> list[_Found]:
        """Everything that is no epoch, as it is now."""
        found = contents.all_leftovers()
        things = [_Found(save, _row(save, now_ns)) for save in found.saves]
        root = self._epoch_directory.store.root
        things += [_Found(thing, leftovers.leftover_row(thing, root, now_ns)) for thing in found.others]
        return sorted(things, key=lambda found: found.row.path)

    def reason(self, found: _Found, age_secs: float) -> str:
        """Why something stays that was last written to so many seconds ago; empty if it may go."""
        kind = Kind.SAVE if isinstance(found.thing, UnfinishedSave) else found.thing.kind
        if kind in NOT_OURS:
            return "not known: nobody but you can say whether it is needed"
        if kind in (Kind.MOVING, Kind.HOLDS_MOVING):
            return found.row.detail
        if kind in KEPT and not self._epochs_too:
            return "holds epochs; removed only when asked for"
        if kind is Kind.ROLLED_BACK and self._is_rolling_back(found.row.path):
            return "a rollback is under way"
        bound = self._older_than_secs
        if age_secs < bound:
            return f"something was written to it {_units.secs(age_secs)} ago; it may go after {_units.secs(bound)}"
        return ""

    def _is_rolling_back(self, folder: str) -> bool:
        """Whether epochs are being moved there just now."""
        try:
            rollback = self._epoch_directory.rollback()
        except (EpochCheckpointError, OSError):  # which folder it is about is not known
            return True
        return rollback is not None and rollback.folder == folder


def _row(save: UnfinishedSave, now_ns: int) -> LeftoverRow:
    attempt = leftovers.attempt_row(save, now_ns)
    detail = f"a save; {attempt.detail}"
    return LeftoverRow(save.path, ATTEMPT, save.nbytes, attempt.age_secs, (save.epoch,), detail)
