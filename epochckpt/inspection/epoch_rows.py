"""From an epoch's folder to its row: ours, those of single nodes, and stock Orbax's steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from epochckpt.commit import Commits, attached_metrics
from epochckpt.errors import EpochCheckpointError, StorageError, say
from epochckpt.format import EpochRecord
from epochckpt.format import paths as layout
from epochckpt.inspection import leftovers
from epochckpt.inspection.rows import COMMITTED, DAMAGED, EpochRow, LeftoverRow, NodeRow
from epochckpt.jobs.backends import base
from epochckpt.orbax import OrbaxRecord, marks, steps

_TRIES = 5  # to look at an epoch that others keep replacing
_ALONE_NOTES, _ALONE_BLOBS = "notes", "blobs"  # where the managers of `ec.caffe2` keep the runner's notes, and items


def read(
    commits: Commits, folder: str, epoch: int, *, brief: bool = False, sure: bool = False
) -> EpochRow | LeftoverRow | None:
    """What a folder is that is named like an epoch.

    Args:
        commits: the directory.
        folder: the folder.
        epoch: the number that its name stands for.
        brief: without its nodes, and of stock Orbax's steps without their size; for many that are not shown.
        sure: somebody acts on it: that storage does not answer is raised, and not shown as damage.

    Returns:
        Its row, damaged if its record cannot be used; a LeftoverRow if it is no epoch; None if it is gone.

    Raises:
        StorageError: only if `sure`.
    """
    try:
        record = commits.read_in(folder, epoch)
        if record is not None:
            return of_record(record, folder, brief=brief)
        if not commits.store.exists(folder):
            return None
        return (
            _of_orbax(commits, folder, epoch, brief) or _of_nodes(commits, folder, epoch) or _of_none(commits, folder)
        )
    except (EpochCheckpointError, OSError) as error:
        if sure and isinstance(error, StorageError):
            raise
        if not _is_there(commits, folder):
            return None
        return EpochRow(epoch, DAMAGED, detail=say(error), folder=folder)


def find(commits: Commits, epoch: int) -> EpochRow | None:
    """The row of an epoch, as its record and attached metrics say; None if there is none of this number."""
    if epoch in commits.hidden():
        return None
    row = read(commits, commits.folder(epoch), epoch)
    return with_metrics(commits, row) if isinstance(row, EpochRow) else None


def of_record(record: EpochRecord, folder: str, *, brief: bool = False) -> EpochRow:
    """The row of an epoch of ours with a usable record."""
    metrics = record.metrics
    custom, notes = split_notes(record.custom_metadata)
    return EpochRow(
        record.epoch,
        COMMITTED,
        folder=folder,
        attempt=record.attempt,
        nodes=() if brief else tuple(NodeRow(n.name, n.nbytes, n.secs) for n in record.nodes),
        nbytes=record.nbytes,
        started_ns=record.started_ns,
        committed_ns=record.committed_ns,
        blocked_secs=record.timings.get("blocked_secs"),
        metrics=metrics if isinstance(metrics, Mapping) else {} if metrics is None else {"metrics": metrics},
        custom_metadata=custom,
        notes=notes,
    )


def with_attached(row: EpochRow, sources: attached_metrics.Sources) -> EpochRow:
    """The row with the metrics that were attached to the epoch, by source."""
    if not sources:
        return row
    metrics = attached_metrics.merge(row.metrics, sources)
    by = {name: source for source in sorted(sources, reverse=True) for name in sources[source]}
    return dataclasses.replace(row, metrics=metrics, sources={n: s for n, s in by.items() if n not in row.metrics})


def with_metrics(commits: Commits, row: EpochRow) -> EpochRow:
    """The row of one epoch with the metrics that were attached to it."""
    if row.state != COMMITTED or not row.attempt:
        return row
    try:
        paths = commits.store.find(layout.METRICS_PREFIX, row.folder)
        return with_attached(row, attached_metrics.read(commits, paths, row.epoch, row.attempt)) if paths else row
    except StorageError as error:
        logging.warning("attached metrics are left out: %s", error)
        return row


def split_notes(custom: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Custom metadata without the runner's notes, and these."""
    notes = custom.get(base.NOTES)
    if not isinstance(notes, Mapping):
        return custom, {}
    return {k: v for k, v in custom.items() if k != base.NOTES}, notes


def checked(commits: Commits, row: EpochRow) -> EpochRow:
    """The row of an epoch that can be read, after a look at its files: are they there, with the sizes recorded?

    One that is replaced meanwhile is looked at again; one that is deleted keeps the row that it had.
    """
    for _ in range(_TRIES):
        if row.state == DAMAGED and not row.nodes:
            return row
        found = _checked(commits, row)
        if found.state == COMMITTED:
            return found
        fresh = read(commits, row.folder, row.epoch)
        if not isinstance(fresh, EpochRow):
            return row
        if _identity(fresh) == _identity(row):
            return found
        row = fresh
    return row


def _identity(row: EpochRow) -> tuple[Any, ...]:
    return row.state, row.attempt, row.committed_ns, row.nodes


def _checked(commits: Commits, row: EpochRow) -> EpochRow:
    try:
        if row.writer == "orbax":
            record = steps.read(commits.store, row.folder, row.epoch)
            steps.check(commits.store, row.folder, record)
            return dataclasses.replace(row, checked=True)
        record = commits.read_in(row.folder, row.epoch)
        if record is not None:
            return _with_nodes(row, [_checked_node(commits, row.folder, record, i) for i in range(len(record.nodes))])
        nodes = []
        for node in row.nodes:
            at = layout.join(row.folder, layout.folder_name(node.name))
            own = commits.read_in(at, row.epoch) if node.state == COMMITTED else None
            nodes.append(node if own is None else _checked_node(commits, at, own, 0))
        return _with_nodes(row, nodes)
    except (EpochCheckpointError, OSError) as error:
        return dataclasses.replace(row, state=DAMAGED, detail=say(error), checked=True)


def _is_there(commits: Commits, folder: str) -> bool:
    try:
        return commits.store.exists(folder)
    except OSError:
        return True


def files_of(row: EpochRow, files_per_node: int = 2) -> int:
    """About how many files a look at an epoch costs."""
    return max(files_per_node * len(row.nodes), 10 if row.writer == "orbax" else 1)


def _checked_node(commits: Commits, folder: str, record: EpochRecord, number: int) -> NodeRow:
    entry = record.nodes[number]
    row = NodeRow(entry.name, entry.nbytes, entry.secs)
    try:
        commits.check_node(folder, record, number)
    except (EpochCheckpointError, OSError) as error:
        return dataclasses.replace(row, state=DAMAGED, detail=say(error))
    return row


def _with_nodes(row: EpochRow, nodes: list[NodeRow]) -> EpochRow:
    bad = [node for node in nodes if node.state == DAMAGED]
    if not bad:
        return dataclasses.replace(row, nodes=tuple(nodes), checked=True)
    more = f" (and {len(bad) - 1} more nodes are damaged)" if len(bad) > 1 else ""
    return dataclasses.replace(row, state=DAMAGED, detail=f"{bad[0].detail}{more}", nodes=tuple(nodes), checked=True)


def _of_orbax(commits: Commits, folder: str, epoch: int, brief: bool) -> EpochRow | None:
    """The row of a step of stock Orbax; None if the folder is none."""
    store = commits.store
    if not store.renames or not marks.is_step(store, folder, lambda name: commits.names.parse(name) is not None):
        return None
    record = steps.read(store, folder, epoch)
    row = of_record(record, folder)
    return dataclasses.replace(
        row,
        writer="orbax",
        detail=_problems(record),
        nodes=(),
        nbytes=0 if brief else steps.nbytes(store, folder),
        blocked_secs=None,
    )


def _problems(record: OrbaxRecord) -> str:
    return "; ".join(f"{path} {problem}" for path, problem in record.problems.items())


def _of_nodes(commits: Commits, folder: str, epoch: int) -> EpochRow | None:
    """The row of what nodes saved that know nothing of each other (`node_epochs`); None if there is no such."""
    found: list[tuple[NodeRow, EpochRow | None]] = []
    for name, is_folder in leftovers.names(commits.store, folder):
        at = layout.join(folder, name)
        if not is_folder or not layout.is_name(name):
            continue
        try:
            record = commits.read_in(at, epoch)
        except (EpochCheckpointError, OSError) as error:
            found.append((NodeRow(layout.shown_name(name), 0, None, DAMAGED, say(error)), None))
            continue
        if record is None:
            continue
        if not record.per_node or record.nodes[0].folder != name:
            return None  # a checkpoint directory whose name is a number, for example
        row = of_record(record, folder)
        found.append((row.nodes[0], row))
    rows = [row for _, row in found if row is not None]
    if not rows:
        return None
    notes = next((n for r in rows if isinstance(n := r.custom_metadata.get(_ALONE_NOTES), Mapping)), {})
    custom = {name: value for name, value in rows[0].custom_metadata.items() if name != _ALONE_NOTES}
    blobs = custom.get(_ALONE_BLOBS)
    if isinstance(blobs, Mapping) and all(item == blob for item, blob in blobs.items()):
        del custom[_ALONE_BLOBS]  # every item is called like its blob
    row = EpochRow(
        epoch,
        COMMITTED,
        folder=folder,
        attempt=rows[0].attempt if len(rows) == 1 else "",
        nbytes=sum(r.nbytes for r in rows),
        started_ns=min(r.started_ns or 0 for r in rows),
        committed_ns=max(r.committed_ns or 0 for r in rows),
        blocked_secs=None,
        custom_metadata=custom,
        notes=notes,
    )
    return dataclasses.replace(_with_nodes(row, [node for node, _ in found]), checked=False)


def _of_none(commits: Commits, folder: str) -> EpochRow | LeftoverRow | None:
    """What else a folder with an epoch's name may be: one that lost its record, or somebody else's."""
    if commits.lost_records(folder):
        epoch = commits.names.parse(folder)
        detail = f"its commit record, {layout.EPOCH_RECORD}, is missing: nothing of it can be verified, it is not read"
        size = leftovers.extent(commits.store, folder)
        nbytes = size.nbytes if size is not None else 0
        return EpochRow(epoch or 0, DAMAGED, detail=detail, folder=folder, nbytes=nbytes)
    if not commits.store.renames and not commits.store.exists(layout.join(folder, marks.STEP_RECORD)):
        return None  # attempts, see `orphans`
    size = leftovers.extent(commits.store, folder)
    if size is None:
        return None
    detail = "named like an epoch, and none: neither ours nor stock Orbax's on a file system"
    return leftovers.row_of(folder, leftovers.FOREIGN, size, time.time_ns(), (), detail)
