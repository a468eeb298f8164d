"""Statistics and differences of leaves in a terminal."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from epochckpt import _units
from epochckpt.inspection import rows
from epochckpt.inspection.rows import Diff, DiffRow, LeafRow, LeafStats
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
    Table,
    bar,
    text,
)
from epochckpt.inspection.text.tree import shape

_CHANGES = {
    rows.ADDED: ("+", GOOD),
    rows.REMOVED: ("−", BAD),
    rows.RESHAPED: ("≠", WARN),
    rows.RETYPED: ("≠", WARN),
    rows.CHANGED: ("~", LIVE),
    rows.UNCHANGED: ("=", FAINT),
}
_HISTOGRAM = (10, 24)
LISTED = 200


def stats(found: Sequence[LeafStats], *, hint: str = "") -> RenderableType:
    """Statistics of arrays, one a line, with a histogram of the finite elements.

    Args:
        found: statistics by leaf.
        hint: how more leaves are had.
    """
    if not found:
        return Text(f"no arrays{hint}", FAINT)
    columns = [
        *_LEAF,
        Column(Text("type"), 6),
        Column(Text("shape"), 7, least=12),
        Column(Text("min"), 1, right=True),
        Column(Text("max"), 1, right=True),
        Column(Text("mean"), 2, right=True),
        Column(Text("std"), 4, right=True),
        Column(Text("norm"), 5, right=True),
        Column(Text("NaN", HEAD), 0, right=True),
        Column(Text("inf", HEAD), 0, right=True),
        Column(Text("zero"), 8, right=True),
        Column(Text("histogram"), 3, least=_HISTOGRAM[0]),
    ]
    lines: list[Sequence[Cell]] = []
    for one, cells in zip(found, _leaf_cells(found), strict=True):
        numbers = [one.min, one.max, one.mean, one.std, one.norm]
        lines.append(
            [
                *cells,
                text(one.leaf.dtype, GOOD, limit=30),
                shape(one.leaf),
                *(Text("–", FAINT) if n is None else Text(_units.number(n)) for n in numbers),
                Text(_units.count(one.nans) if one.nans else "", BAD),
                Text(_units.count(one.infs) if one.infs else "", BAD),
                Text(f"{one.zeros / one.count:.0%}" if one.zeros and one.count else ""),
                _histogram(one.histogram),
            ]
        )
    return Table(columns, lines)


_LEAF = (Column(Text("item"), 0, least=8), Column(Text("node"), 0, least=8), Column(Text("leaf"), 0, least=36))


def _leaf_cells(
    found: Sequence[LeafStats | DiffRow], of: Sequence[LeafStats | DiffRow] | None = None
) -> list[list[Cell]]:
    """Item, node and name of every leaf; items only where there are several, in all of `of`, or one is a bare leaf."""
    several = len({one.item for one in of or found}) > 1 or any(map(_is_bare, found))
    names = [one.leaf.name if isinstance(one, LeafStats) else one.name for one in found]
    pairs = zip(found, names, strict=True)
    return [[text(one.item if several else ""), text(one.node), text(name)] for one, name in pairs]


def _is_bare(one: LeafStats | DiffRow) -> bool:
    """Whether a leaf is all there is of its item: then its name says nothing."""
    leaf = one.leaf if isinstance(one, LeafStats) else one.before or one.after
    return leaf is not None and not leaf.path


def _histogram(counts: Sequence[int]) -> Cell:
    """Counts as bars; where there is no room for all bins, neighbours are added up."""

    def draw(width: int) -> Text:
        if not counts:
            return Text()
        share = -(-len(counts) // width)
        bins = [sum(counts[i : i + share]) for i in range(0, len(counts), share)]
        most = max(bins)
        # an empty bin and one with a single element are told apart
        return Text("".join(bar(n / most) if n else " " for n in bins), LIVE)

    return Fitted(min(len(counts), _HISTOGRAM[1]), draw)


def diff(found: Diff, *, listed: int | None = LISTED, unchanged: bool = False, hint: str = "") -> RenderableType:
    """What changed between two epochs: first how much, then leaf by leaf.

    Args:
        found: the difference.
        listed: so many leaves; None: all.
        unchanged: list those, too, that did not change.
        hint: how more leaves are shown.
    """
    counts = collections.Counter(row.change for row in found.rows)
    where = text(found.directory, HEAD, limit=1000)
    after = Text.assemble(text(found.other_directory, HEAD, limit=1000), " ") if found.other_directory else Text()
    head = Text.assemble(where, f" epoch {found.before} → ", after, f"{'epoch ' if after else ''}{found.after}")
    shown = [row for row in found.rows if unchanged or row.change != rows.UNCHANGED]
    cut = shown if listed is None else shown[:listed]
    parts: list[RenderableType] = [Line(head), _counted(counts)]
    if cut:
        parts += [Text(), _diff_table(cut, found.rows)]
    if len(cut) < len(shown):
        parts.append(Text(f"… {_units.count(len(shown) - len(cut))} more leaves{hint}", FAINT))
    for where, why in list(found.problems.items())[:listed]:
        parts.append(Fact(Text("!", BAD), text(f"{where}: ", HEAD, limit=100).append_text(text(why, limit=600)), 1))
    if listed is not None and len(found.problems) > listed:
        parts.append(Text(f"… {_units.count(len(found.problems) - listed)} more cannot be compared", BAD))
    return Group(*parts)


def _counted(counts: Mapping[str, int]) -> Line:
    said = [Text(f"{_units.count(counts[name])} {name}", _CHANGES[name][1]) for name in _CHANGES if counts.get(name)]
    return Line(Text.assemble((" · ", FAINT)).join(said) if said else Text("no leaves", FAINT))


def _diff_table(found: Sequence[DiffRow], of: Sequence[DiffRow]) -> Table:
    columns = [
        Column(Text(""), 0),
        *_LEAF,
        Column(Text("change"), 6),
        Column(Text("relative"), 1, right=True),
        Column(Text(""), 4),
        Column(Text("norm"), 2, right=True),
        Column(Text("largest"), 3, right=True),
        Column(Text("elements"), 5, right=True),
        Column(Text("what"), 1, least=16),
    ]
    most = max((row.relative for row in found if row.relative is not None), default=0.0) or 1.0
    lines: list[Sequence[Cell]] = []
    for row, cells in zip(found, _leaf_cells(found, of), strict=True):
        mark, style = _CHANGES[row.change]
        lines.append(
            [
                Text(mark, style),
                *cells,
                Text(row.change, style),
                _number(row.relative),
                Text(bar(row.relative / most) if row.relative else "", style),
                _number(row.norm),
                _number(row.largest),
                Text() if row.elements is None else Text(_units.count(row.elements)),
                _what(row),
            ]
        )
    return Table(columns, lines)


def _number(value: float | None) -> Text:
    return Text() if value is None else Text(_units.number(value))


def _what(row: DiffRow) -> Text:
    """The kind of a leaf that came or went, or both of one that is another now."""
    if row.change == rows.RESHAPED and row.before and row.after:
        return shape(row.before).append(" → ").append_text(shape(row.after))
    if row.change == rows.RETYPED and row.before and row.after:
        return _kind(row.before).append(" → ").append_text(_kind(row.after))
    only = row.before or row.after
    if row.change in (rows.ADDED, rows.REMOVED) and only is not None:
        return _kind(only).append(" ").append_text(shape(only))
    return text(row.detail)


def _kind(leaf: LeafRow) -> Text:
    return text(leaf.dtype or leaf.kind, limit=30)
