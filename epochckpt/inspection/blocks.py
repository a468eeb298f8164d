"""The parts of a view: lines, facts, tables, trees and drawings as data, which `html` and `text` draw.

Texts in blocks are as they were found, hostile ones included: a renderer escapes every `Span` in one place.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from epochckpt import _units

if TYPE_CHECKING:
    from epochckpt.inspection.tree import Branch

T = TypeVar("T")

_PROBLEMS = 20  # that a view lists


class Tone(enum.Enum):
    """How a text or a mark looks: its class in HTML, without the prefix; the text renderer has a style for each."""

    PLAIN = ""
    STRONG = "strong"
    FAINT = "faint"
    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    LIVE = "live"


@dataclasses.dataclass(frozen=True)
class Span:  # no tuple, because Words are tuples of spans
    """A piece of text; one that is longer than `limit` characters is shown without its middle."""

    text: str
    tone: Tone = Tone.PLAIN
    limit: int = 200


Words = str | Span | tuple[str | Span, ...]
"""Text of one or more tones; a plain `str` is a `Span` of tone PLAIN."""


def spans(words: Words) -> list[Span]:
    """The pieces of a text; empty ones are left out."""
    pieces = words if isinstance(words, tuple) else (words,)
    return [found for piece in pieces if (found := Span(piece) if isinstance(piece, str) else piece).text]


class Bar(NamedTuple):
    """In a cell: a bar, `share` of 1 long. In a terminal it takes at most `width` columns."""

    share: float
    width: int = 1
    tone: Tone = Tone.GOOD


class Mark(NamedTuple):
    """One bar of a `Strip`: a node, or a bin of a histogram."""

    level: float  # height, from 0 to 1; of 0 nothing is seen, but a terminal has signs for BAD and FAINT
    tone: Tone  # BAD: the node is damaged; FAINT: the epoch does not have it
    weight: float
    tip: str


class Strip(NamedTuple):
    """Marks side by side. Of marks that share a bar, the weightiest is drawn, or a bar for their `summed` weights."""

    marks: tuple[Mark, ...]
    summed: bool = False

    def fitted(self, width: int) -> list[tuple[Mark, Sequence[Mark]]]:
        """At most `width` bars: for each, the mark that is drawn, and all marks of the bar."""
        share = max(1, -(-len(self.marks) // max(width, 1)))
        groups = [self.marks[first : first + share] for first in range(0, len(self.marks), share)]
        if not self.summed:
            return [(max(group, key=lambda mark: mark.weight), group) for group in groups]
        sums = [sum(mark.weight for mark in group) for group in groups]
        most = max(sums, default=0) or 1
        return [(group[0]._replace(level=n / most, weight=n), group) for n, group in zip(sums, groups, strict=True)]


class Cell(NamedTuple):
    """A cell of a table: a text, a drawing, or both; `tip` is shown where a mouse can point at it."""

    words: Words = ""
    drawing: Bar | Strip | None = None
    tip: str = ""
    keep: int = 0  # a narrow terminal leaves so many of its first characters where they are

    @property
    def empty(self) -> bool:
        """Whether nothing is in it."""
        return self.drawing is None and not spans(self.words)


class Column(NamedTuple):
    """A column of a table. One whose cells are all empty is not shown."""

    title: str
    rank: int = 0  # 0: always shown; the greater, the sooner a narrow terminal leaves it out
    right: bool = False
    least: int | None = None  # a narrow terminal may shorten cells to so many characters; None: never
    tip: str = ""
    missed: bool = False  # a narrow terminal that leaves it out says so
    whole: bool = False  # a narrow terminal that shortens a cell shows all of it below the row


class Row(NamedTuple):
    """A row of a table, and a remark that is shown below it."""

    cells: tuple[Cell, ...]
    below: Words = ""


class Table(NamedTuple):
    """Rows below heads, each with a cell per column.

    If `recent` is not 0, rows ascend in time and the last so many matter most. A page, which is read from the top,
    shows these first, newest first, and folds the others.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    recent: int = 0


class TextLine(NamedTuple):
    """One line of text; a view's first one is its title."""

    words: Words
    title: bool = False


class Summary(NamedTuple):
    """Short statements side by side."""

    statements: tuple[Words, ...]


class Facts(NamedTuple):
    """Named facts, one per line."""

    facts: tuple[tuple[str, Words], ...]


class Problem(NamedTuple):
    """Something that is wrong: where, and why."""

    words: Words


class Tree(NamedTuple):
    """Leaves as a tree, which the renderer folds; shares are of `total_nbytes`.

    `usual`: the mesh, or the one device, that arrays lie on unless their line says otherwise; with `placed` some do.
    """

    root: Branch
    total_nbytes: int
    usual: tuple[str, str] = ("", "")
    placed: bool = True


class Heat(NamedTuple):
    """A matrix of squares, each as strong as its level: from -1 to 1, or NaN."""

    levels: tuple[tuple[float, ...], ...]

    @staticmethod
    def tone(level: float) -> Tone:
        """The colour of a square."""
        return Tone.BAD if math.isnan(level) else Tone.WARN if level < 0 else Tone.LIVE


class Section(NamedTuple):
    """Blocks below a heading; a page may fold them."""

    heading: Words
    blocks: tuple[Block, ...]
    open: bool = True
    on_demand: bool = False  # a terminal shows it only if it is asked for


Block = TextLine | Summary | Facts | Problem | Table | Tree | Heat | Section


def trees(blocks: Iterable[Block]) -> list[Tree]:
    """All trees of a view."""
    found = []
    for block in blocks:
        found += [block] if isinstance(block, Tree) else trees(block.blocks) if isinstance(block, Section) else []
    return found


Cells = Callable[[T], Cell | Words]


def table(found: Sequence[T], *columns: tuple[Column, Cells[T]], below: Cells[T] = lambda row: "") -> Table:
    """A table with a row for each of `found`; each column comes with the function that makes its cells."""

    def cell(made: Cell | Words) -> Cell:
        return made if isinstance(made, Cell) else Cell(made)

    rows = (Row(tuple(cell(show(one)) for _, show in columns), cell(below(one)).words) for one in found)
    return Table(tuple(column for column, _ in columns), tuple(rows))


def percent(of_one: float) -> str:
    """A share of 1: `<0.1%`, `0.66%`, `5.3%`, `31%`."""
    return "<0.1%" if 0 < of_one < 0.001 else f"{of_one * 100:.2g}%" if of_one < 0.0995 else f"{of_one:.0%}"


def ratio(part: float, whole: float) -> float:
    """A part as a share of 1; 0 where that makes no sense."""
    found = part / whole if whole > 0 else 0.0
    return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


def share(part: float, whole: float) -> Cell:
    """A share as a figure with a bar; nothing if there is none."""
    found = ratio(part, whole)
    return Cell(percent(found), Bar(found)) if found else Cell()


def secs(value: float | None) -> str:
    """A duration; empty if it is not known."""
    return "" if value is None else _units.secs(value)


def leaf_count(count: int) -> str:
    """`1 leaf`, `20,000 leaves`."""
    return _units.several(count, "leaf", "leaves")


def problems(found: Mapping[str, str]) -> list[Block]:
    """Why something could not be looked at, by path; a problem of the directory as a whole has no path."""
    blocks: list[Block] = [
        Problem((Span(f"{where}: " if where else "", Tone.STRONG, 100), Span(why, limit=600)))
        for where, why in list(found.items())[:_PROBLEMS]
    ]
    more = len(found) - _PROBLEMS
    return [*blocks, *([Problem(f"{_units.count(more)} more")] if more > 0 else [])]
