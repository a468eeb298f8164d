"""Where the epochs of a directory are: in the directory, its mirror, or both; and whether it is on one host's disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from epochckpt import errors
from epochckpt.format import paths
from epochckpt.inspection import whole_run
from epochckpt.inspection.rows import BOTH, COMMITTED, DAMAGED, LOCAL, MIRROR, NEWER, EpochRow, Overview
from epochckpt.tiers import HostRecord, Ledger, read_host_record, read_ledger

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory


def host_of(epoch_directory: EpochDirectory) -> HostRecord | None:
    """What a directory on a disk of one host says of itself; None for others."""
    return read_host_record(epoch_directory.store) if epoch_directory.is_of_host() else None


def with_tiers(
    epoch_directory: EpochDirectory,
    found: Overview,
    limit: int | None,
    row_of: Callable[[EpochDirectory, int], object],
    mirror: str | None,
) -> Overview:
    """The overview with the tier of each epoch, and with the epochs that only the mirror has, newest first.

    An epoch that is damaged here and whole in the mirror has one row, which says both. `row_of` makes the row of an
    epoch in the mirror. Without a `mirror` that the caller names, the tiers are those that the directory has recorded.
    The overview also says whether the directory is on a disk of one host.
    """
    ledger: Ledger | None = None
    try:
        if (host := host_of(epoch_directory)) is not None:
            found = dataclasses.replace(found, host=host.node, mirror=host.mirror)
        ledger = read_ledger(epoch_directory.store)
        if ledger is not None:
            found = dataclasses.replace(found, mirror=ledger.url)
        if mirror is not None:
            return _with_mirror(epoch_directory, found, limit, row_of, mirror)
    except (errors.EpochCheckpointError, OSError) as error:
        where = mirror or getattr(error, "path", "") or paths.MIRROR_RECORD
        found = dataclasses.replace(found, problems={**found.problems, where: str(error)})
    return found if ledger is None else _as_recorded(found, ledger)


def _as_recorded(found: Overview, ledger: Ledger) -> Overview:
    """The overview with the tiers that the directory knows."""

    def placed(row: EpochRow) -> EpochRow:
        if row.state != COMMITTED:
            return row
        copy = ledger.copies.get(row.epoch)
        known = copy is not None and copy.save_id == row.save_id and row.epoch not in ledger.hidden
        return dataclasses.replace(row, tier=BOTH if known else LOCAL)

    return dataclasses.replace(found, epochs=tuple(map(placed, found.epochs)))


def _with_mirror(
    epoch_directory: EpochDirectory,
    found: Overview,
    limit: int | None,
    row_of: Callable[[EpochDirectory, int], object],
    url: str,
) -> Overview:
    """The overview with what the mirror has, which is looked at."""
    there: dict[int, EpochRow] = {}
    from epochckpt.tiers import viewed  # with jax and Orbax, which a directory without a mirror needs not

    mirror = viewed(url, epoch_directory)
    epochs = set(mirror.readable())
    shown = {row.epoch: row for row in found.epochs if row.state in (COMMITTED, DAMAGED, NEWER)}
    copied = {epoch for epoch in epochs & shown.keys() if mirror.is_copy(epoch_directory, epoch)}
    oldest = min(shown, default=-1) if found.hidden else -1  # an older one may be here, too, without a row
    remote = sorted((e for e in epochs - shown.keys() if e > oldest), reverse=True)[:limit]

    def read_there(epoch: int) -> None:
        row = row_of(mirror.there, epoch)
        if isinstance(row, EpochRow):
            there[epoch] = dataclasses.replace(row, tier=MIRROR)

    mirror.there.store.each(read_there, remote)
    found = whole_run.completed(found, there.values(), mirror.there.deleted(), epochs)

    def placed(row: EpochRow) -> EpochRow:
        if row.state in (COMMITTED, NEWER):
            return dataclasses.replace(row, tier=BOTH if row.epoch in copied else LOCAL)
        if row.state == DAMAGED and row.epoch in copied:
            return dataclasses.replace(row, tier=MIRROR, detail=f"{row.detail}; it is read from the mirror")
        return row

    rows = sorted([*map(placed, found.epochs), *there.values()], key=lambda row: row.epoch)
    best = whole_run.best(rows, found.metric, found.mode)
    rows = [dataclasses.replace(row, best=row.epoch == best and row.state == COMMITTED) for row in rows]
    return dataclasses.replace(found, epochs=tuple(rows), mirror=mirror.url, mirror_seen=True)
