"""A directory of checkpoints in a terminal: one line per epoch, one bar per node."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from epochckpt import _units
from epochckpt.inspection import rows
from epochckpt.inspection.rows import EpochRow, LeftoverRow, Overview, flat
from epochckpt.inspection.text.table import (
    BAD,
    FAINT,
    GOOD,
    HEAD,
    LIVE,
    WARN,
    Cell,
    Column,
    Fact,
    Fitted,
    Line,
    Mark,
    Table,
    bar,
    per_mark,
    strip,
    text,
)

LATEST, BEST = "▸", "★"
STYLES = {rows.COMMITTED: "", rows.DAMAGED: BAD, rows.IN_PROGRESS: LIVE, rows.ABANDONED: WARN}
_NOTES = 20


def overview(seen: Overview, *, hint: str = "") -> RenderableType:
    """A directory: its epochs, one a line, with what each node took; damage; what else lies there.

    Args:
        seen: the directory.
        hint: how the epochs are shown that are left out.
    """
    parts: list[RenderableType] = [Line(text(seen.directory, HEAD, limit=1000)), Line(_summary(seen)), Text()]
    if seen.hidden:
        size = f" ({_units.nbytes(seen.hidden_nbytes)})" if seen.hidden_nbytes else ""
        parts.append(Text(f"… {_units.count(seen.hidden)} older epochs{size} are not shown{hint}", FAINT))
    if seen.epochs:
        parts.append(_epochs(seen))
    parts += _notes(seen)
    if seen.leftovers:
        parts += [Text(), Text("Also here, and read by nobody:", HEAD), leftovers(seen.leftovers)]
    if seen.problems:
        parts.append(Text())
        for path, why in seen.problems.items():  # of the directory as a whole: without a path
            name = text(f"{path}: " if path else "", HEAD, limit=60)
            parts.append(Fact(Text("!", BAD), name.append_text(text(why, limit=600)), 1))
    return Group(*parts)


def _summary(seen: Overview) -> Text:
    committed = [row for row in seen.epochs if row.state in (rows.COMMITTED, rows.DAMAGED)]
    count = len(committed) + seen.hidden
    size = sum(row.nbytes for row in committed) + seen.hidden_nbytes
    said = [
        Text(f"{_units.count(count)} epoch{'' if count == 1 else 's'}, {_units.nbytes(size)}" if count else "no epochs")
    ]
    damaged = sum(row.state == rows.DAMAGED for row in seen.epochs)
    if damaged:
        said.append(Text(f"{damaged} damaged", BAD))
    said += [Text(f"{LATEST} latest {row.epoch}", LIVE) for row in seen.epochs if row.latest]
    if seen.metric:
        how = f"by {seen.mode} {text(seen.metric, limit=30).plain}"
        best = [row for row in seen.epochs if row.best]
        said += [Text(f"{BEST} best {row.epoch} {how}", GOOD) for row in best]
        said += [] if best else [Text(f"no epoch has the metric {text(seen.metric, limit=30).plain}", WARN)]
    return Text.assemble((" · ", FAINT)).join(said)


def _epochs(seen: Overview) -> Table:
    metrics = _metrics(seen)
    names = _nodes(seen.epochs)
    several = len(names) > 1
    mixed = any(row.writer != "epochckpt" for row in seen.epochs)
    before = {node.name: node.nbytes for row in seen.epochs if row.latest for node in row.nodes}
    columns = [
        Column(Text("epoch"), 0, right=True),
        Column(Text(""), 0),
        Column(Text("state"), 0),
        Column(Text("bytes"), 1, right=True),
        Column(Text("took"), 2, right=True),
        Column(Text("blocked"), 7, right=True),
        *(
            Column(text(name, HEAD, limit=14), 3 if i == 0 else 6 + i, right=True, least=9)
            for i, name in enumerate(metrics)
        ),
        Column(strip_title(len(names)), 4, least=min(max(len(names), 8), 16)),
        Column(Text("slowest node"), 7, least=14),
        Column(Text("committed"), 8),
        Column(Text("by"), 9),
    ]
    lines: list[Sequence[Cell] | Text] = []
    for row in seen.epochs:
        attempt = row.state in (rows.IN_PROGRESS, rows.ABANDONED)
        values = flat(row.metrics)
        lines.append(
            [
                Text(str(row.epoch)),
                _marks(row),
                Text(row.state, STYLES.get(row.state, "")),
                Text(_units.nbytes(row.nbytes), FAINT if attempt else ""),
                _secs(row.secs),
                _secs(row.blocked_secs),
                *(metric(values.get(name), GOOD if row.best and name == seen.metric else "") for name in metrics),
                node_strip(row, names, before) if several else Text(),
                _slowest(row),
                _committed(row),
                Text(row.writer if mixed else "", FAINT),
            ]
        )
    return Table(columns, lines)


def _marks(row: EpochRow) -> Text:
    return Text.assemble((LATEST if row.latest else "", LIVE), (BEST if row.best else "", GOOD))


def _secs(value: float | None) -> Text:
    return Text() if value is None else Text(_units.secs(value))


def metric(value: Any, style: str = "") -> Text:
    """The value of a metric; users may have given anything."""
    if isinstance(value, numbers.Real):
        return Text(_units.number(float(value) if not isinstance(value, int) else value), style)
    return Text() if value is None else text(str(value), style, limit=12)


def _committed(row: EpochRow) -> Text:
    if row.committed_ns is not None:
        return Text(_units.when(row.committed_ns), FAINT)
    return Text() if row.age_secs is None else Text(f"written {_units.secs(row.age_secs)} ago", FAINT)


def _slowest(row: EpochRow) -> Text:
    slowest = next((node for node in row.nodes if node.name == row.slowest_node), None)
    if slowest is None or slowest.secs is None:
        return Text()
    return text(slowest.name, WARN).append(f" {_units.secs(slowest.secs)}", FAINT)


def _metrics(seen: Overview) -> list[str]:
    """Names of the metrics, the one that decides first."""
    found: dict[str, None] = {}
    for row in seen.epochs:
        found.update(dict.fromkeys(flat(row.metrics)))
    return sorted(found, key=lambda name: name != seen.metric)


def _nodes(epochs: Iterable[EpochRow]) -> list[str]:
    """Names of all nodes: those of the newest epoch in their order, then those that only older ones have."""
    found: dict[str, None] = {}
    for row in reversed(list(epochs)):
        found.update(dict.fromkeys(node.name for node in row.nodes))
    return list(found)


def strip_title(count: int) -> Fitted:
    """The head of a column of `node_strip`."""

    def draw(width: int) -> Text:
        share = per_mark(count, width)
        long, short = f"{count} nodes, {share} a bar", f"{count} nodes"
        return Text(long if share > 1 and len(long) <= width else short[:width])

    return Fitted(len(f"{count} nodes"), draw)


def node_strip(row: EpochRow, names: Sequence[str], before: Mapping[str, int]) -> Fitted:
    """A bar per node: how long it wrote; of an attempt: how much of what it wrote last time."""
    by_name = {node.name: node for node in row.nodes}
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)
    most = max([node.nbytes for node in row.nodes], default=0)
    marks = []
    for name in names:
        node = by_name.get(name)
        if node is None:
            marks.append(Mark("·", FAINT, -1.0))
        elif node.state == rows.DAMAGED:
            marks.append(Mark("×", BAD, 2.0))
        elif row.state in (rows.IN_PROGRESS, rows.ABANDONED):
            level = node.nbytes / max(before.get(name, most), 1)
            marks.append(Mark(bar(level), STYLES[row.state], 1.0 - min(level, 1.0)))  # the one that is behind
        elif node.secs is None or not longest:
            marks.append(Mark("■", "", 0.0))
        else:
            level = node.secs / longest
            marks.append(Mark(bar(level), WARN if name == row.slowest_node else "", level))
    return Fitted(len(names), lambda width: strip(marks, width))


def _notes(seen: Overview) -> Iterator[RenderableType]:
    """What is wrong, or known, of single epochs."""
    told = [row for row in seen.epochs if row.detail]
    told.sort(key=lambda row: row.state != rows.DAMAGED)
    if told:
        yield Text()
    for row in told[:_NOTES]:
        name = Text(f"{row.epoch} {row.state}", STYLES.get(row.state, ""))
        yield Fact(name, text(row.detail, limit=600), max(name.cell_len, 14))
    if len(told) > _NOTES:
        yield Text(f"… and {len(told) - _NOTES} more", FAINT)


def leftovers(found: Iterable[LeftoverRow]) -> Table:
    """What lies in a directory and is no epoch."""
    columns = [
        Column(Text("what")),
        Column(Text("bytes"), 1, right=True),
        Column(Text("idle for"), 2, right=True),
        Column(Text("path"), 0, least=24),
        Column(Text("epochs"), 3, least=8),
        Column(Text("detail"), 4, least=20),
    ]
    return Table(
        columns,
        [
            [
                text(left.kind, WARN, limit=30),
                Text(_units.nbytes(left.nbytes)),
                Text("" if left.age_secs is None else _units.secs(left.age_secs)),
                text(left.path),
                text(", ".join(map(str, left.epochs[:20])), limit=40),
                text(left.detail, FAINT),
            ]
            for left in found
        ],
        indent=2,
    )
