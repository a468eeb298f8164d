"""The storage that a directory takes up, by its contents: in one pass over its files, or by one listing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from epochckpt.directory.contents import Kind
from epochckpt.inspection import leftovers, opening, rows, tiers
from epochckpt.inspection.rows import Usage, UsageRow

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
    from epochckpt.directory.contents import Group

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


def measure(epoch_directory: EpochDirectory, todelete_subdir: str | None = None) -> Usage:
    """Measures a directory, which jobs may be writing to: sizes and times of files, as they are met.

    A file with several names counts once, where it is met first; a symlink counts as a file without bytes, and is not
    followed.
    """
    with opening.access(epoch_directory.store):
        everything = epoch_directory.contents(todelete_subdir).all_files()
        now_ns = time.time_ns()
        found = [_row(group, now_ns) for group in everything.groups]
        found.sort(key=lambda row: (_ORDER.index(row.kind), row.epochs, row.path))
        host = tiers.host_of(epoch_directory)
        node = "" if host is None else host.node
        return Usage(epoch_directory.place, tuple(found), everything.problems, node)


def _row(group: Group, now_ns: int) -> UsageRow:
    times = [file.written_ns for file in group.files]
    newest = max(times, default=None)
    kind = leftovers.kind_of_row(group.kind)
    if group.kind is Kind.SAVE:
        age = (now_ns - (newest or 0)) / 1e9
        kind = leftovers.state_of(given_up=group.given_up, age=age)
    size = sum(file.size for file in group.files)
    return UsageRow(kind, group.path, size, len(group.files), group.epochs, min(times, default=None), newest)
