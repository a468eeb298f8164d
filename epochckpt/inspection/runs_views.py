"""The view of several runs side by side: the state of each run, and one metric for all runs."""

from __future__ import annotations

import collections
import functools
import math
import time
from collections.abc import Iterator

from epochckpt import _text, _units
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows
from epochckpt.inspection.blocks import Block, Cell, Column, Span, TextLine, Tone, Words, table
from epochckpt.inspection.columns import COLUMNS, NAME, curve_of, measured_column, noun
from epochckpt.inspection.signs import BEST, figure

_TONES = {
    rows.DAMAGED: Tone.BAD,
    "stale": Tone.WARN,
    "ended": Tone.WARN,
    "finished": Tone.GOOD,
    "closed": Tone.PLAIN,
}

RunColumn = tuple[Column, kinds.Cells[rows.DirectoryRow]]


def runs(found: rows.RunsOverview) -> list[Block]:
    """Runs side by side."""
    runs_table = _RunsTable(found)
    title = TextLine(Span(found.directory, Tone.STRONG, 1000), title=True)
    summary = kinds.Summary(tuple(runs_table.summary()))
    return [title, summary, table(found.runs, *runs_table.columns()), *kinds.problems(found.problems)]


class _RunsTable:
    """The rows of one look at several runs as a table."""

    def __init__(self, found: rows.RunsOverview):
        self._overview = found
        self._now = time.time_ns()
        self._units = list(dict.fromkeys(row.unit for row in found.runs)) or ["epoch"]
        self._best_values = {row.name: row.best_value for row in found.runs if row.best_value is not None}
        better = min if found.mode == "min" else max
        self._winner = better(self._best_values, key=lambda name: self._best_values[name], default=None)

    def summary(self) -> Iterator[Words]:
        """How many runs there are in each state, and which is best."""
        found = self._overview
        yield _units.several(len(found.runs), "run", "runs")
        for state, count in collections.Counter(row.state for row in found.runs).items():
            yield Span(f"{_units.count(count)} {state}", _TONES.get(state, Tone.LIVE))
        yield _units.nbytes(sum(row.nbytes for row in found.runs))
        if self._winner is not None:
            figures = f"{_text.shown(found.metric, 30)}: {_units.number(self._best_values[self._winner])}"
            yield Span(f"{BEST} best {_text.shown(self._winner, 60)} by {found.mode} {figures}", Tone.GOOD)

    def columns(self) -> list[RunColumn]:
        """The columns in their order, each with what makes its cells."""
        units = self._units
        counts = " or ".join(f"{noun(unit)}s" for unit in units)
        return [
            (Column("run", 0, least=20), lambda row: Span(row.name, Tone.STRONG)),
            (Column("", 0), lambda row: Span(BEST if row.name == self._winner else "", Tone.GOOD)),
            (Column("state", 0), lambda row: Cell(Span(row.state, _TONES.get(row.state, Tone.LIVE)), tip=row.detail)),
            (Column("", 0), _damage),
            (
                Column("latest", self._rank("latest", 1), right=True, tip=" or ".join(units)),
                lambda row: "" if row.latest is None else str(row.latest),
            ),
            (Column("age", self._rank("age", 2), right=True), self._age),
            (Column("trained", self._rank("trained", 3), right=True, tip="in all, as the runner noted"), _trained),
            *self._measured(),
            (Column("best", self._rank("best", 1), right=True), self._best),
            (Column("curve", 1, least=8), self._curve),
            *self._configured(),
            (Column(counts, self._rank("epochs", 4), right=True), lambda row: _units.count(row.epochs)),
            (Column("bytes", self._rank("bytes", 5), right=True), lambda row: _units.nbytes(row.nbytes)),
            (Column("why", 3, least=16), lambda row: Span(row.detail, Tone.FAINT)),
        ]

    def _rank(self, name: str, usual: int) -> int:
        """The rank of a column; what rows are ordered by is never left out."""
        return 0 if name == self._overview.sort else usual

    def _sorts_by(self, names: str) -> bool:
        return any(self._overview.sort in getattr(row, names) for row in self._overview.runs)

    def _measured(self) -> Iterator[RunColumn]:
        """A column for the metric of the view, and for the one that rows are ordered by."""
        found = self._overview
        ordering = [found.sort] if self._sorts_by("metrics") else []
        tip = f"of the latest {' or '.join(map(noun, self._units))}"
        for name in dict.fromkeys([found.metric, *ordering]):
            column = Column(_text.shown(name, NAME), self._rank(name, 1), right=True, tip=tip)
            yield column, functools.partial(_newest, name)

    def _configured(self) -> Iterator[RunColumn]:
        """A column for each value of the runs' configs that differs, and for the one that rows are ordered by."""
        found = self._overview
        ordering = [found.sort] if self._sorts_by("config") and not self._sorts_by("metrics") else []
        names = sorted(dict.fromkeys([*found.differing, *ordering]), key=lambda name: name != found.sort)
        for name in names[:COLUMNS]:
            values = [row.config[name] for row in found.runs if name in row.config]
            column = measured_column(name, map(figure, values), self._rank(name, 2))
            right = all(isinstance(value, int | float) for value in values)
            yield column._replace(right=right, tip="of the config"), functools.partial(_setting, name)

    def _age(self, row: rows.DirectoryRow) -> Words:
        return Span("" if row.committed_ns is None else _units.age((self._now - row.committed_ns) / 1e9), Tone.FAINT)

    def _best(self, row: rows.DirectoryRow) -> Words:
        if row.best_value is None:
            return ""
        where = f" at {row.best}"
        if row.better is not None:
            better = dict(row.history[self._overview.metric])[row.better]
            where += f" ({_units.number(better)} at {row.better}, deleted)"
        tone = Tone.GOOD if row.name == self._winner else Tone.PLAIN
        return Span(_units.number(row.best_value), tone), Span(where, Tone.FAINT)

    def _curve(self, row: rows.DirectoryRow) -> Cell:
        points = row.history.get(self._overview.metric, ())
        return Cell(drawing=curve_of(points)) if len(points) > 1 else Cell()


def _damage(row: rows.DirectoryRow) -> Cell:
    if not row.damaged or row.state == rows.DAMAGED:
        return Cell()
    return Cell(Span(f"{len(row.damaged)} damaged", Tone.BAD), tip="damaged epochs")


def _trained(row: rows.DirectoryRow) -> Words:
    return "" if row.trained_secs is None else _units.secs(row.trained_secs)


def _newest(name: str, row: rows.DirectoryRow) -> Words:
    value = row.metrics.get(name)
    if value is None:
        return ""
    return Span(_units.number(value), Tone.STRONG if math.isfinite(value) else Tone.BAD)


def _setting(name: str, row: rows.DirectoryRow) -> Words:
    return Span(figure(row.config.get(name)), limit=24)
