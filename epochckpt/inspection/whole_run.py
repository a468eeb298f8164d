"""The metrics of a run over all its epochs, including deleted ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from epochckpt import _metrics
from epochckpt.inspection.rows import COMMITTED, EpochRow, MetricsRow, Overview, history
from epochckpt.saving.ranking import best_of, rank

if TYPE_CHECKING:
    from epochckpt.directory.metrics_log import Line


def completed(
    found: Overview, others: Iterable[EpochRow], deleted: Mapping[int, Line], present: Collection[int] = ()
) -> Overview:
    """The overview with the metrics of more epochs: of other rows, and of deleted epochs.

    `present`: further epochs that exist, without a row. An epoch that exists does not count as deleted: it was saved
    again after its deletion.
    """
    rows = [row for row in others if row.state == COMMITTED]
    known = {row.epoch for row in (*rows, *found.epochs)}.union(present)
    known.update(epoch for points in found.history.values() for epoch, _ in points)
    gone = {row.epoch: row for row in found.deleted if row.epoch not in present}
    known -= gone.keys()
    gone |= {e: MetricsRow(e, line.committed_ns, line.metrics, True) for e, line in deleted.items() if e not in known}
    gone = dict(sorted(gone.items()))
    new = history(sorted((row.epoch, row.metrics) for row in (*rows, *gone.values())))
    names = {**found.history, **new}
    curves = {name: tuple(sorted({*found.history.get(name, ()), *new.get(name, ())})) for name in names}
    ranks = {epoch: rank(value, found.mode) for epoch, value in curves.get(found.metric, ())}
    alive = max((r for epoch, r in ranks.items() if epoch not in gone), default=None)
    best = best_of({epoch: r for epoch, r in ranks.items() if epoch in gone})
    better = best if best is not None and (alive is None or ranks[best] > alive) else None
    return dataclasses.replace(found, history=curves, deleted=tuple(gone.values()), better=better)


def best(rows: Iterable[EpochRow], metric: str, mode: str) -> int | None:
    """The best committed epoch of the rows, the later of equals; NaN is worst. None if none has the metric."""
    values = {row.epoch: _metrics.number(row.metrics, metric) for row in rows if row.state == COMMITTED}
    return best_of({epoch: None if value is None else rank(value, mode) for epoch, value in values.items()})


def rows_of(found: Overview) -> list[MetricsRow]:
    """The metrics of every committed epoch that has a row, and of those that were deleted, ascending."""
    existing = [MetricsRow(r.epoch, r.committed_ns, r.metrics, False) for r in found.epochs if r.state == COMMITTED]
    return sorted([*existing, *found.deleted], key=lambda row: row.epoch)
