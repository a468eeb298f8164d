"""The table of the epochs of a directory. A new column is a line in `EpochTable.columns`."""

from __future__ import annotations

import collections
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence

from epochckpt import _units
from epochckpt._metrics import flat
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows
from epochckpt.inspection.blocks import Cell, Column, Span, Tone, Words, secs
from epochckpt.inspection.columns import COLUMNS, measured_column
from epochckpt.inspection.signs import (
    BEST,
    HELD_UP,
    LATEST,
    STATES,
    UNKNOWN,
    figure,
    node_strip,
    slow_node,
    strip_column,
    tone,
)
from epochckpt.jobs.notes import RunNotes

_BLOCKED = 0.1  # seconds by which a save that held training holds it longer than most
_NODES = 12  # damaged ones that a remark names


def _unusual(values: Sequence[float | None], least: float) -> tuple[float | None, set[int]]:
    """The median, and which values are greater than twice that, and by at least so much."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None, set()
    median = statistics.median(known)
    far = max(2 * median, median + least)
    return median, {i for i, value in enumerate(values) if value is not None and value > far}


class Usual:
    """What most epochs of a directory have in common: it is said once, and in the rows of those that differ."""

    def __init__(self, found: rows.Overview):
        self.rows = [row for row in found.epochs if row.state == rows.COMMITTED]
        sizes = collections.Counter(_units.nbytes(row.nbytes) for row in self.rows)
        size, count = sizes.most_common(1)[0] if sizes else ("", 0)
        self.nbytes = size if 2 * count > len(self.rows) > 1 else ""  # the size that more than half of them have
        self.secs, slow = _unusual([row.secs for row in self.rows], HELD_UP)
        self.blocked, held = _unusual([row.blocked_secs for row in self.rows], _BLOCKED)
        few = len(self.rows) < 2
        self._slow = {self.rows[i].folder for i in range(len(self.rows)) if few or i in slow}
        self._held = {self.rows[i].folder for i in range(len(self.rows)) if few or i in held}

    def size_of(self, row: rows.EpochRow) -> str:
        size = _units.nbytes(row.nbytes)
        return "" if size == self.nbytes else size

    def secs_of(self, row: rows.EpochRow) -> str:
        return secs(row.secs) if row.folder in self._slow else ""

    def blocked_of(self, row: rows.EpochRow) -> str:
        return secs(row.blocked_secs) if row.folder in self._held else ""

    def words(self) -> Iterator[Words]:
        """It in words, of several epochs."""
        if len(self.rows) < 2:
            return
        if self.nbytes:
            yield f"{self.nbytes} each"
        if self.secs is not None:
            blocked = "" if self.blocked is None else f", training blocked {_units.secs(self.blocked)}"
            yield f"saved in {_units.secs(self.secs)}{blocked}"


def metric_names(found: rows.Overview) -> list[str]:
    """The metrics in the order of a view: as asked for; else all, after the one that decides the best."""
    known = dict.fromkeys(name for row in found.epochs for name in flat(row.metrics)) | {**found.history}
    return [name for name in found.asked if name in known] or sorted(known, key=lambda name: name != found.metric)


class EpochTable:
    """The rows of one look at a directory as a table."""

    def __init__(self, found: rows.Overview):
        self._overview = found
        self._usual = Usual(found)
        # Nodes of the newest epoch come first, in their order, then those that only older epochs have.
        self._nodes = list(dict.fromkeys(node.name for row in reversed(found.epochs) for node in row.nodes))
        self._mixed = any(row.writer != "epochckpt" for row in found.epochs)
        self._before = {node.name: node.nbytes or 0 for row in found.epochs if row.latest for node in row.nodes}
        self._now = time.time_ns()

    def columns(self) -> list[tuple[Column, kinds.Cells[rows.EpochRow]]]:
        """The columns in their order, each with what makes its cells: for every view."""
        usual = self._usual
        return [
            (Column(self._overview.unit, 0, right=True), lambda row: Span(str(row.epoch), Tone.STRONG)),
            (Column("", 0), self._marks),
            (Column("", 0), self._state),
            (Column("age", 0, right=True, tip="since the commit, or since the last write of a save"), self._age),
            *self._measured(),
            (strip_column(len(self._nodes)), self._strip),
            (Column("slow node", 7, least=14, tip="it took twice as long as most, and held up the commit"), _slowest),
            (Column("bytes", 2, right=True, tip="of its files, all nodes together"), usual.size_of),
            (Column("took", 3, right=True, tip="from the call of save to the commit"), usual.secs_of),
            (Column("blocked", 7, right=True, tip="how long the training thread waited"), usual.blocked_of),
            (Column("by", 9), lambda row: Span(row.writer if self._mixed else "", Tone.FAINT)),
            (Column("in", 5, tip="the directory itself (local), its mirror, or both"), lambda row: row.tier),
        ]

    def _measured(self) -> Iterator[tuple[Column, kinds.Cells[rows.EpochRow]]]:
        """A column for each metric."""
        for number, name in enumerate(metric_names(self._overview)[:COLUMNS]):
            figures = [figure(flat(row.metrics).get(name)) for row in self._overview.epochs]
            yield measured_column(name, figures, 1 + number), functools.partial(self._value, name)

    def _value(self, name: str, row: rows.EpochRow) -> Cell:
        value = figure(flat(row.metrics).get(name))
        tip = f"{value}, attached by {row.sources[name]}" if name in row.sources else value
        is_best = row.best and name == self._overview.metric
        return Cell(Span(value, Tone.GOOD if is_best else Tone.PLAIN, 16), tip=tip)

    @staticmethod
    def _state(row: rows.EpochRow) -> Cell:
        tone, meaning = STATES.get(row.state, UNKNOWN)
        if RunNotes.read(row.notes).partial:
            return Cell(Span("partial", Tone.WARN), tip="saved in the middle of it; a run that resumes enters it")
        return Cell(Span("✓" if row.state == rows.COMMITTED else row.state, tone), tip=meaning)

    @staticmethod
    def _marks(row: rows.EpochRow) -> Cell:
        words = Span(LATEST if row.latest else "", Tone.LIVE), Span(BEST if row.best else "", Tone.GOOD)
        return Cell(words, tip=" ".join(["latest"] * row.latest + ["best"] * row.best))

    def _age(self, row: rows.EpochRow) -> Cell:
        since = row.age_secs if row.committed_ns is None else (self._now - row.committed_ns) / 1e9
        tip = "" if row.committed_ns is None else f"committed {_units.when(row.committed_ns)}"
        return Cell(Span("" if since is None else _units.age(since), Tone.FAINT), tip=tip)

    def _strip(self, row: rows.EpochRow) -> Cell:
        if len(self._nodes) < 2 or not row.nodes:
            return Cell()
        return Cell(drawing=node_strip(row, self._nodes, self._before))


def _slowest(row: rows.EpochRow) -> Words:
    node = slow_node(row)
    return () if node is None else (Span(node.name, Tone.WARN, 60), f" {_units.secs(node.secs)}")


def remark(row: rows.EpochRow) -> Words:
    """What is shown below the row of an epoch."""
    damage = "; ".join(f"{node.name}: {node.detail}" for node in row.nodes[:_NODES] if node.detail)
    return Span(row.detail or damage, Tone.PLAIN if row.state == rows.COMMITTED else tone(row.state), 600)
