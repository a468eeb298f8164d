"""Where the epochs of a directory are: in the directory, its mirror, or both; and whether it is on one host's disk."""

import dataclasses
from collections.abc import Callable

from epochckpt import errors
from epochckpt.commit import Commits, commits_of
from epochckpt.commit.host_record import HostRecord, read_host_record
from epochckpt.format import paths
from epochckpt.inspection import whole_run
from epochckpt.inspection.rows import BOTH, COMMITTED, DAMAGED, LOCAL, MIRROR, NEWER, EpochRow, Overview
from epochckpt.manager.mirror_record import MirrorRecord, read_mirror_record
from epochckpt.storage import open_store


def host_of(commits: Commits) -> HostRecord | None:
    """What a directory on a disk of one host says of itself; None for others."""
    return read_host_record(commits.store) if commits.store.renames else None


def mirror_of(commits: Commits) -> MirrorRecord | None:
    """What the directory knows of its mirror; None without one."""
    return read_mirror_record(commits.store) if commits.store.renames else None


def in_mirror(commits: Commits, record: MirrorRecord) -> Commits:
    """The epochs of the directory's mirror."""
    return commits_of(open_store(record.address), commits.names)


def with_tiers(
    commits: Commits, found: Overview, limit: int | None, row_of: Callable[[Commits, int], object]
) -> Overview:
    """The overview with the tier of each epoch, and with the epochs that only the mirror has, newest first.

    What is damaged here, and whole in the mirror, is read from there: it is one row, which says both. `row_of` makes
    the row of an epoch there. A directory on a disk of one host is said to be that.
    """
    there: dict[int, EpochRow] = {}
    url = ""
    try:
        if (host := host_of(commits)) is not None:
            found = dataclasses.replace(found, host=host.node, mirror=host.mirror)
        if (record := mirror_of(commits)) is None:
            return found
        shown = {row.epoch: row for row in found.epochs if row.state in (COMMITTED, DAMAGED, NEWER)}
        elsewhere, url = in_mirror(commits, record), record.url
        epochs = set(elsewhere.list_epochs()) - record.hidden
        known = {e: record.copies[e][0] for e in epochs & shown.keys() & record.copies.keys()}
        copied = {e for e, attempt in known.items() if shown[e].attempt in ("", attempt)}
        copied |= {e for e in epochs & shown.keys() - copied if elsewhere.seen_attempt(e) == shown[e].attempt}
        oldest = min(shown, default=-1) if found.hidden else -1  # an older one may be here, too, without a row
        remote = sorted((e for e in epochs - shown.keys() if e > oldest), reverse=True)[:limit]

        def read_there(epoch: int) -> None:
            row = row_of(elsewhere, epoch)
            if isinstance(row, EpochRow):
                there[epoch] = dataclasses.replace(row, tier=MIRROR)

        elsewhere.store.each(read_there, remote)
        found = whole_run.completed(found, there.values(), elsewhere.deleted(), epochs)
    except (errors.EpochCheckpointError, OSError) as error:
        return dataclasses.replace(
            found,
            mirror=url or found.mirror,
            problems={**found.problems, url or getattr(error, "path", "") or paths.MIRROR_RECORD: str(error)},
        )

    def placed(row: EpochRow) -> EpochRow:
        if row.state in (COMMITTED, NEWER):
            return dataclasses.replace(row, tier=BOTH if row.epoch in copied else LOCAL)
        if row.state == DAMAGED and row.epoch in copied:
            return dataclasses.replace(row, tier=MIRROR, detail=f"{row.detail}; it is read from the mirror")
        return row

    rows = sorted([*map(placed, found.epochs), *there.values()], key=lambda row: row.epoch)
    best = whole_run.best(rows, found.metric, found.mode)
    rows = [dataclasses.replace(row, best=row.epoch == best and row.state == COMMITTED) for row in rows]
    return dataclasses.replace(found, epochs=tuple(rows), mirror=url)
