"""One epoch as a row, from its record or by the cheapest look, and after a look at its files. Only reads."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt import errors
from epochckpt.directory import EpochDirectory, attached_metrics
from epochckpt.directory.contents import DiskUsage, Kind, Leftover
from epochckpt.format import EpochRecord, parsing, paths
from epochckpt.inspection import leftovers, tiers
from epochckpt.inspection.rows import (
    COMMITTED,
    DAMAGED,
    ELSEWHERE,
    NEWER,
    EpochRow,
    LeftoverRow,
    NodeRow,
    facts_of,
)
from epochckpt.jobs.notes import NOTES, NodeNotes, RunNotes
from epochckpt.orbax import steps

if TYPE_CHECKING:
    from epochckpt.directory.epoch_summary import EpochSummary

_TRIES = 5  # looks at the files of an epoch that is replaced during each look


def read(
    epoch_directory: EpochDirectory, folder: str, epoch: int, *, sure: bool = False
) -> EpochRow | LeftoverRow | None:
    """What a folder named like an epoch holds: an epoch, or a leftover; None if the folder is gone.

    An epoch whose record cannot be used is damaged. With `sure`, an error of storage is raised instead of shown as
    damage. The row of a step of stock Orbax has no size, see `with_size`.
    """
    return _row_in(epoch_directory, folder, epoch, epoch_directory.look_in, sure=sure)


def brief(
    epoch_directory: EpochDirectory, folder: str, epoch: int, *, sure: bool = False
) -> EpochRow | LeftoverRow | None:
    """The same by the cheapest look, which may leave out what `read` and `checked` have."""
    return _row_in(epoch_directory, folder, epoch, epoch_directory.summary, sure=sure)


def _row_in(
    epoch_directory: EpochDirectory,
    folder: str,
    epoch: int,
    look_in: Callable[[str, int], EpochRecord | EpochSummary | None],
    *,
    sure: bool,
) -> EpochRow | LeftoverRow | None:
    try:
        record = look_in(folder, epoch)
        if isinstance(record, EpochRecord):
            return _of_any(record, folder)
        if record is not None:
            return _of_summary(record, folder, epoch)
        if not epoch_directory.store.exists(folder):
            return None
        return _of_nodes(epoch_directory, folder, epoch) or _of_none(epoch_directory, folder)
    except (errors.EpochCheckpointError, OSError) as error:
        if epoch_directory.is_about_store(error) or (sure and isinstance(error, errors.StorageError)):
            raise
        with contextlib.suppress(OSError):
            if isinstance(error, errors.EpochNotFoundError) or not epoch_directory.store.exists(folder):
                return None
        return EpochRow(epoch, _state(error), detail=errors.say(error), folder=folder)


def _state(error: Exception) -> str:
    """The state of an epoch whose record or files cannot be used."""
    return NEWER if isinstance(error, errors.FormatVersionError) else DAMAGED


def unit_of(epoch_directory: EpochDirectory) -> str:
    """What the job counts that saved the newest three epochs: `epoch` or `step`; `epoch` if they do not tell."""
    with contextlib.suppress(errors.EpochCheckpointError, OSError):  # whoever reads on is told
        newest = epoch_directory.seen_epochs()[:-4:-1]  # several: one may be damaged, or no runner's
        rows = (read(epoch_directory, epoch_directory.folder(epoch), epoch) for epoch in newest)
        if not newest:
            folders = epoch_directory.folders(epoch_directory.hidden())
            rows = (_of_nodes(epoch_directory, folders[epoch], epoch) for epoch in sorted(folders)[:-4:-1])
        return next((row.unit for row in rows if isinstance(row, EpochRow) and row.notes), "epoch")
    return "epoch"


def _of_summary(entry: EpochSummary, folder: str, epoch: int) -> EpochRow:
    """The row of an epoch whose record was not read; `read` and `checked` have the rest."""
    metrics = entry.metrics if isinstance(entry.metrics, Mapping) else {"metrics": entry.metrics}
    row = EpochRow(
        epoch,
        COMMITTED,
        folder=folder,
        save_id=entry.save_id,
        nodes=tuple(NodeRow(name, None, secs) for name, secs in entry.node_secs.items()),
        nbytes=entry.nbytes,
        started_ns=entry.started_ns,
        committed_ns=entry.committed_ns,
        blocked_secs=entry.blocked_secs,
        metrics={} if entry.metrics is None else metrics,
        custom_metadata=None,
        notes=None,
        writer="orbax" if entry.stock else "epochckpt",
    )
    return _with_sources(row, entry.attached)


def find(epoch_directory: EpochDirectory, epoch: int) -> EpochRow | None:
    """The row of an epoch, from its record and the attached metrics; None if the epoch does not exist."""
    folder = epoch_directory.current_folder(epoch)
    row = None if folder is None else read(epoch_directory, folder, epoch)
    if not isinstance(row, EpochRow):
        return None
    try:
        row = with_attached(epoch_directory, row)
    except errors.StorageError as error:
        logging.warning("attached metrics are left out: %s", error)
    return with_size(epoch_directory, row)


def with_size(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row with the bytes of a step of stock Orbax, whose files must be looked at for that."""
    if row.writer != "orbax" or row.nbytes:
        return row
    with contextlib.suppress(OSError):
        return dataclasses.replace(row, nbytes=steps.nbytes(epoch_directory.store, row.folder))
    return row


def with_attached(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row with the metrics that were attached later."""
    if row.state != COMMITTED or not row.save_id:
        return row
    return _with_sources(row, attached_metrics.of_save(epoch_directory, row.folder, row.epoch, row.save_id))


def _with_sources(row: EpochRow, sources: Mapping[str, Mapping[str, Any]]) -> EpochRow:
    """The row with these attached metrics, in place of those that it may have."""
    if not sources:
        return row
    saved = {name: value for name, value in row.metrics.items() if name not in row.sources}
    by = {name: source for source in sorted(sources, reverse=True) for name in sources[source]}
    return dataclasses.replace(
        row,
        metrics=attached_metrics.merge(saved, sources),
        sources={name: source for name, source in by.items() if name not in saved},
    )


def _of_record(record: EpochRecord, folder: str) -> EpochRow:
    """The row of an epoch with a usable record."""
    metrics = record.metrics
    notes = record.custom_metadata.get(NOTES)
    custom = dict(record.custom_metadata)
    if isinstance(notes, Mapping):
        del custom[NOTES]
    return EpochRow(
        record.epoch,
        COMMITTED,
        folder=folder,
        nodes=tuple(_recorded_nodes(record)),
        metrics=metrics if isinstance(metrics, Mapping) else {} if metrics is None else {"metrics": metrics},
        custom_metadata=custom,
        notes=notes if isinstance(notes, Mapping) else {},
        unit=RunNotes.read(notes).unit,
        **facts_of(record),
    )


def _of_any(record: EpochRecord, folder: str) -> EpochRow:
    """The row of an epoch of ours, or of a step of stock Orbax."""
    row = _of_record(record, folder)
    if not isinstance(record, steps.OrbaxRecord):
        return row
    problems = "; ".join(f"{path} {problem}" for path, problem in record.problems.items())
    return dataclasses.replace(row, writer="orbax", detail=problems)


def _recorded_nodes(record: EpochRecord) -> Iterator[NodeRow]:
    """The nodes of an epoch as its record tells them."""
    for node in record.nodes:
        yield NodeRow(node.name, node.nbytes, node.secs)


def _checked_nodes(
    epoch_directory: EpochDirectory, folder: str, record: EpochRecord, sizes: Mapping[str, int] | None
) -> Iterator[NodeRow]:
    """The nodes of an epoch, after a look at their files in its folder.

    `sizes` has the bytes of all files in the folder, where one request tells them. On a disk of one host, nodes that
    have no folder there are elsewhere.
    """
    names: set[str] | None = None  # of the folders on the disk of a host
    if not record.per_node and tiers.host_of(epoch_directory) is not None:
        names = {entry.name for entry in epoch_directory.store.list(folder)}
    for number, node in enumerate(record.nodes):
        state = COMMITTED
        detail = ""
        try:
            if names is not None and node.folder not in names:
                state = ELSEWHERE
            else:
                epoch_directory.check_node(folder, record, number, sizes)
                if names is not None:
                    _check_replicas(epoch_directory, folder, record, number)
        except (errors.EpochCheckpointError, OSError) as error:
            state = DAMAGED
            detail = errors.say(error)
        yield NodeRow(node.name, node.nbytes, node.secs, state, detail)


def _unusable_node(name: str, problem: str) -> NodeRow:
    """A node whose record, in a folder of this name, cannot be used."""
    return NodeRow(name=paths.shown_name(name), nbytes=0, secs=None, state=DAMAGED, detail=problem)


def _check_replicas(epoch_directory: EpochDirectory, folder: str, record: EpochRecord, number: int) -> None:
    """Raises DamagedError for the first missing or short file of what a node wrote of cells that others own."""
    path = paths.join(folder, record.path(number))
    node = parsing.read_record(epoch_directory.store, path, parsing.parse_node)
    if node is not None and node.replicas:
        entry = dataclasses.replace(record.nodes[number], files=node.replicas)
        epoch_directory.check_node(folder, dataclasses.replace(record, nodes=(entry,)), 0)


def _of_nodes(epoch_directory: EpochDirectory, folder: str, epoch: int) -> EpochRow | None:
    """The row of an epoch that each node saved by itself; None if there is no such."""
    records = epoch_directory.read_per_node(folder, epoch)
    rows = [_of_record(record, folder) for record in records.values() if not isinstance(record, str)]
    if not rows:
        return None
    metadata = [dict(row.custom_metadata or {}) for row in rows]
    read = [NodeNotes.read(each) for each in metadata]
    notes = next((each.notes for each in read if each is not None and isinstance(each.notes, Mapping)), {})
    custom = metadata[0] if read[0] is None else read[0].rest_of(metadata[0])
    row = EpochRow(
        epoch,
        COMMITTED,
        folder=folder,
        save_id=rows[0].save_id if len(rows) == 1 else "",
        nbytes=sum(r.nbytes for r in rows),
        started_ns=min(r.started_ns or 0 for r in rows),
        committed_ns=max(r.committed_ns or 0 for r in rows),
        custom_metadata=custom,
        notes=notes,
        unit=RunNotes.read(notes).unit,
    )
    nodes: list[NodeRow] = []
    for name, record in records.items():
        if isinstance(record, str):
            nodes.append(_unusable_node(name, record))
        else:
            nodes += _recorded_nodes(record)
    return _with_nodes(row, nodes)


def _of_none(epoch_directory: EpochDirectory, folder: str) -> EpochRow | LeftoverRow | None:
    """What else a folder with an epoch's name may be: an epoch that lost its record, or somebody else's folder."""
    if epoch_directory.lost_records(folder):
        detail = f"its commit record, {paths.EPOCH_RECORD}, is missing: nothing of it can be verified, it is not read"
        size = epoch_directory.contents().measure(folder) or DiskUsage()
        return EpochRow(
            epoch_directory.names.parse(folder) or 0, DAMAGED, detail=detail, folder=folder, nbytes=size.nbytes
        )
    size = epoch_directory.contents().measure(folder)
    if size is None:
        return None
    thing = Leftover(
        path=folder, kind=Kind.NOT_AN_EPOCH, nbytes=size.nbytes, last_ns=size.last_ns, problem=size.problem
    )
    return leftovers.leftover_row(thing, epoch_directory.store.root, time.time_ns())


def checked(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row of an epoch after a look at its files: are they there, with the sizes recorded?

    An epoch that is replaced meanwhile is looked at again. The row of an epoch that is deleted meanwhile stays.
    """
    for _ in range(_TRIES):
        if row.state == DAMAGED and not row.nodes and not row.save_id:
            return row
        found = _checked(epoch_directory, row)
        if found.state == COMMITTED:
            return found
        epoch_directory.refresh()
        fresh = brief(epoch_directory, row.folder, row.epoch)
        if not isinstance(fresh, EpochRow):
            return row
        if _is_same(found, fresh, row.nodes):
            return found
        row = fresh
    return row


def in_full(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row as its record tells it; damaged if the record cannot be used. That of a deleted epoch stays."""
    found = read(epoch_directory, row.folder, row.epoch)
    if not isinstance(found, EpochRow):
        return row
    return found if found.save_id else dataclasses.replace(row, state=found.state, detail=found.detail)


def _is_same(row: EpochRow, fresh: EpochRow, nodes: tuple[NodeRow, ...]) -> bool:
    """Whether a second look, by the cheapest means, has found the same epoch; `nodes` are those of the first look."""
    if row.save_id and fresh.save_id:
        return row.save_id == fresh.save_id
    return not row.save_id and not fresh.save_id and row.committed_ns == fresh.committed_ns and nodes == fresh.nodes


def _checked(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row in full after one look at the files. In a bucket that takes two requests."""
    folder = row.folder
    try:
        record = epoch_directory.look_in(folder, row.epoch)
        if record is not None and (row.notes is None or row.save_id != record.save_id):  # it is brief, or of another
            row = with_attached(epoch_directory, _of_any(record, folder))
        if isinstance(record, steps.OrbaxRecord):
            steps.check(epoch_directory.store, folder, record)
            return dataclasses.replace(row, checked=True)
        records = epoch_directory.read_per_node(folder, row.epoch) if record is None else {"": record}
        sizes = epoch_directory.sizes(folder)
        nodes: list[NodeRow] = []
        for name, node_record in records.items():
            if isinstance(node_record, str):
                nodes.append(_unusable_node(name, node_record))
            else:
                nodes += _checked_nodes(epoch_directory, paths.join(folder, name), node_record, sizes)
        return dataclasses.replace(_with_nodes(row, nodes or row.nodes), checked=True)
    except (errors.EpochCheckpointError, OSError) as error:
        if epoch_directory.is_about_store(error):
            raise
        return dataclasses.replace(row, state=_state(error), detail=errors.say(error), checked=True)


def _with_nodes(row: EpochRow, nodes: Sequence[NodeRow]) -> EpochRow:
    """The row with its nodes; damaged if one of them is."""
    row = dataclasses.replace(row, nodes=tuple(nodes))
    bad = [node for node in nodes if node.state == DAMAGED]
    if nodes and all(node.state == ELSEWHERE for node in nodes):
        return dataclasses.replace(row, state=DAMAGED, detail="this host has no node's files of it")
    if not bad:
        return row
    more = f" (and {len(bad) - 1} more nodes are damaged)" if len(bad) > 1 else ""
    return dataclasses.replace(row, state=DAMAGED, detail=f"{bad[0].detail}{more}")
