"""Where the epochs of a directory are: in the directory, its mirror, or both; and whether it is on one host's disk."""

import dataclasses
from collections.abc import Callable

from epochckpt import errors
from epochckpt.commit import Commits, commits_of
from epochckpt.commit.host_record import HostRecord, read_host_record
from epochckpt.format import paths
from epochckpt.inspection.rows import BOTH, COMMITTED, LOCAL, MIRROR, EpochRow, Overview
from epochckpt.manager.mirror_record import MirrorRecord, read_mirror_record
from epochckpt.storage import open_store


def host_of(commits: Commits) -> HostRecord | None:
    """What a directory on a disk of one host says of itself; None for others."""
    return read_host_record(commits.store) if commits.store.renames else None


def mirror_of(commits: Commits) -> tuple[Commits, MirrorRecord] | None:
    """The epochs of the directory's mirror, and what the directory knows of it; None without a mirror."""
    record = read_mirror_record(commits.store) if commits.store.renames else None
    return None if record is None else (commits_of(open_store(record.address), commits.names), record)


def with_tiers(
    commits: Commits, found: Overview, limit: int | None, row_of: Callable[[Commits, int], object]
) -> Overview:
    """The overview with the tier of each epoch, and with the epochs that only the mirror has, newest first.

    `row_of` makes the row of an epoch there. A directory on a disk of one host is said to be that.
    """
    there: dict[int, EpochRow] = {}
    url = ""
    try:
        if (host := host_of(commits)) is not None:
            found = dataclasses.replace(found, host=host.node, mirror=host.mirror)
        if (mirror := mirror_of(commits)) is None:
            return found
        (elsewhere, record), shown = mirror, {row.epoch: row for row in found.epochs if row.state == COMMITTED}
        url = record.url
        epochs = set(elsewhere.list_epochs()) - record.hidden
        copied = {e for e in epochs & shown.keys() if record.copies.get(e, ("", ""))[0] == shown[e].attempt}
        copied |= {e for e in epochs & shown.keys() - copied if elsewhere.seen_attempt(e) == shown[e].attempt}
        oldest = min(shown, default=-1) if found.hidden else -1  # an older one may be here, too, without a row
        remote = sorted((e for e in epochs - shown.keys() if e > oldest), reverse=True)[:limit]

        def read_there(epoch: int) -> None:
            row = row_of(elsewhere, epoch)
            if isinstance(row, EpochRow):
                there[epoch] = dataclasses.replace(row, tier=MIRROR)

        elsewhere.store.each(read_there, remote)
    except (errors.EpochCheckpointError, OSError) as error:
        return dataclasses.replace(
            found,
            mirror=url or found.mirror,
            problems={**found.problems, url or getattr(error, "path", "") or paths.MIRROR_RECORD: str(error)},
        )
    rows = [
        dataclasses.replace(row, tier=BOTH if row.epoch in copied else LOCAL) if row.state == COMMITTED else row
        for row in found.epochs
    ]
    rows = sorted([*rows, *there.values()], key=lambda row: row.epoch)
    return dataclasses.replace(found, epochs=tuple(rows), mirror=url)
