"""A directory of checkpoints as rows: its epochs, the attempts at saving one, and what else lies there. Only reads."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from epochckpt import _metrics, _text, errors
from epochckpt._lazy import ocp
from epochckpt.directory import EpochDirectory
from epochckpt.format import paths
from epochckpt.inspection import leftovers, opening, tiers, whole_run
from epochckpt.inspection.epoch_rows import brief, checked, in_full, with_attached, with_size
from epochckpt.inspection.rows import (
    COMMITTED,
    DAMAGED,
    NEWER,
    EpochRow,
    LeftoverRow,
    Overview,
)

if TYPE_CHECKING:
    from epochckpt.directory.metrics_log import Line


def look(
    directory: str | os.PathLike[str],
    *,
    metric: str | None = None,
    mode: str = "max",
    limit: int | None = 100,
    options: ocp.CheckpointManagerOptions | None = None,
    check: bool = True,
    known: EpochDirectory | None = None,
    mirror: str | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Overview:
    """Looks at a directory, which jobs may be writing to; for the arguments see `inspect` and `Inspection.overview`.

    The newest epochs up to the limit become rows. The best epoch and attempts always do, and so does the latest that
    can be read, unless the limit is 0. `check` looks at about `CHECKED_FILES` files: are they there, with the sizes
    that were recorded? In an object store it looks at about `CHECKED_REQUESTS / 2` epochs; the rows of other
    epochs are made from the head, without requests. `known`: the directory as it was opened before. `mirror`: its
    mirror, which is looked at, too. `clock_ns` gives the time since 1970.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise errors.InvalidArgumentError(f"limit is a number of epochs, or None for all; got {limit!r}")
    epoch_directory = known or opening.open_directory(directory, options, single=True)
    with opening.access(epoch_directory.store):
        todelete_subdir = options.todelete_subdir if options else None
        found = _Scan(epoch_directory, metric, mode).overview(limit, check, todelete_subdir, clock_ns())
        if epoch_directory.has_one:
            return found
        return tiers.with_tiers(epoch_directory, found, limit, _row_of, mirror)


def _row_of(epoch_directory: EpochDirectory, epoch: int) -> EpochRow | LeftoverRow | None:
    """The row of an epoch in a mirror."""
    return brief(epoch_directory, epoch_directory.folder(epoch), epoch)


class _Shown(NamedTuple):
    """The epochs whose rows are shown, and which of them are marked."""

    epochs: frozenset[int]
    latest: int | None
    best: int | None


class _Scan:
    """One look at a directory."""

    def __init__(self, epoch_directory: EpochDirectory, metric: str | None, mode: str):
        self._epoch_directory = epoch_directory
        self._metric = metric
        self._mode = mode
        self._problems: dict[str, str] = {}
        self._rows: dict[int, EpochRow] = {}

    def overview(self, limit: int | None, check: bool, todelete_subdir: str | None, now_ns: int) -> Overview:
        """Makes the rows and puts them together; see `look`."""
        directory = self._epoch_directory
        # Attempts first: one that is committed meanwhile is then seen in its new place.
        beside = leftovers.rows_of(directory.contents(todelete_subdir), directory.store.root, now_ns)
        folders = self._folders()
        beside.others.extend(self._read_all(folders))
        self._read_lacking_metrics(folders, limit)
        shown = self._choose(limit, check)
        return self._assembled(shown, beside)

    def _read_lacking_metrics(self, folders: Collection[int], limit: int | None) -> None:
        """Reads what a brief look leaves out of metrics: for the rows shown, and to compare all epochs."""
        listed = folders if limit is None or self._metric is not None else sorted(folders)[-limit or len(folders) :]
        lacking = self._epoch_directory.lacking_metrics()
        in_full_here = functools.partial(in_full, self._epoch_directory)
        self._update(in_full_here, [epoch for epoch in listed if epoch in lacking])

    def _choose(self, limit: int | None, check: bool) -> _Shown:
        """Which rows are shown: the newest, and those that are marked.

        A check may find that a marked epoch is damaged; then another one is marked.
        """
        newest = sorted(self._rows, reverse=True)
        if self._metric is not None:
            self._update(self._attach, self._rows)
        shown = set[int]()
        more = set(newest if limit is None else newest[:limit])
        while True:
            if self._metric is None:
                self._update(self._attach, more)
            if check:
                checked_here = functools.partial(checked, self._epoch_directory)
                self._update(checked_here, more if shown else self._first(more))
            shown |= more
            latest = max((epoch for epoch, row in self._rows.items() if row.state in (COMMITTED, NEWER)), default=None)
            best = self._best()
            more = {epoch for epoch in (best, latest if limit != 0 else None) if epoch is not None} - shown
            if not more:
                return _Shown(frozenset(shown), latest, best)

    def _assembled(self, shown: _Shown, beside: leftovers.LeftoverRows) -> Overview:
        """Puts the chosen rows, and the things beside the epochs, together."""
        directory = self._epoch_directory
        rows = list[EpochRow]()
        for epoch in shown.epochs:
            row = with_size(directory, self._rows[epoch])
            rows.append(dataclasses.replace(row, latest=epoch == shown.latest, best=epoch == shown.best))
        committed = {row.save_id for row in rows}
        epochs = [*rows, *(row for row in beside.attempts if row.save_id not in committed)]
        epochs.sort(key=lambda row: (row.epoch, row.state not in (COMMITTED, DAMAGED), row.save_id))
        hidden = [row for epoch, row in self._rows.items() if epoch not in shown.epochs]
        seen = Overview(
            directory=directory.place,
            epochs=tuple(epochs),
            hidden=len(hidden),
            hidden_nbytes=sum(row.nbytes for row in hidden),
            leftovers=tuple(sorted(beside.others, key=lambda row: row.path)),
            metric=self._metric or "",
            mode=self._mode,
            unit=next((row.unit for row in reversed(epochs) if row.notes), "epoch"),
        )
        seen = whole_run.completed(seen, self._rows.values(), self._deleted())
        return dataclasses.replace(seen, problems={**beside.problems, **self._problems, **self._no_metric()})

    def _deleted(self) -> Mapping[int, Line]:
        try:
            return self._epoch_directory.deleted()
        except (errors.EpochCheckpointError, OSError) as error:
            self._problems[paths.METRICS_LOG] = errors.say(error)
            return {}

    def _read_all(self, folders: Mapping[int, str]) -> list[LeftoverRow]:
        """Makes the rows of epochs; returns what is none."""
        others = list[LeftoverRow]()

        def read(epoch: int) -> None:
            row = brief(self._epoch_directory, folders[epoch], epoch)
            if isinstance(row, EpochRow):
                self._rows[epoch] = row
            elif row is not None:
                others.append(row)

        self._epoch_directory.store.each(read, list(folders))
        return others

    def _first(self, epochs: Collection[int]) -> list[int]:
        """The newest of some epochs, at least one, that together cost as much as a look may."""
        cost = 0
        chosen = list[int]()
        for epoch in sorted(epochs, reverse=True):
            row = self._rows[epoch]
            cost += self._epoch_directory.check_cost(epoch, len(row.nodes), stock=row.writer == "orbax")
            if cost > self._epoch_directory.check_budget and chosen:
                break
            chosen.append(epoch)
        return chosen

    def _folders(self) -> dict[int, str]:
        hidden: frozenset[int] = frozenset()
        try:
            hidden = self._epoch_directory.hidden()
            numbers = ", ".join(map(str, sorted(hidden)))
            problem = f"a rollback is setting aside {numbers}; the next open finishes it" if hidden else ""
        except (errors.EpochCheckpointError, ValueError, OSError) as error:
            problem = f"{error}; no manager can open the directory as long as it is there"
        if problem:
            self._problems[paths.ROLLBACK_RECORD] = problem
        found = self._epoch_directory.folders(hidden)
        if not found and not hidden:
            hint = self._epoch_directory.named_otherwise()
            self._problems |= {"": hint} if hint else {}
        return found

    def _update(self, change: Callable[[EpochRow], EpochRow], epochs: Collection[int]) -> None:
        def update(epoch: int) -> None:
            self._rows[epoch] = change(self._rows[epoch])

        self._epoch_directory.store.each(update, list(epochs))

    def _attach(self, row: EpochRow) -> EpochRow:
        try:
            return with_attached(self._epoch_directory, row)
        except OSError as error:
            self._problems[row.folder] = str(error)
            return row

    def _best(self) -> int | None:
        """The best epoch, the later of equals."""
        if self._metric is None:
            return None
        return whole_run.best(self._rows.values(), self._metric, self._mode)

    def _no_metric(self) -> dict[str, str]:
        """Why no epoch is best."""
        rows = self._rows.values()
        if self._metric is None or any(_metrics.number(row.metrics, self._metric) is not None for row in rows):
            return {}
        known = sorted({name for row in rows for name in _metrics.flat(row.metrics)})
        if not known:
            return {"": f"no epoch has metrics, so none is best by {self._metric!r}"}
        return {"": f"no epoch has the metric {self._metric!r}; {_text.near(self._metric, known)}"}
