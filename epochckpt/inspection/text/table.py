"""Tables for terminals of any width: columns are left out by rank, long cells are shortened, nothing is wrapped.

`rich.table` wraps cells or cuts them at the end where there is no room; a table of epochs that is wrapped cannot be
read, and names of leaves differ at their ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from epochckpt._text import shown

# 256-colour tones that are legible on a light background as well as on a dark one.
BAD, WARN, GOOD, LIVE, FAINT, HEAD = "bold red3", "dark_orange3", "green4", "turquoise4", "dim", "bold"

BARS = "▁▂▃▄▅▆▇█"
_GAP = 2
_ELLIPSIS = "…"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A cell that draws itself into the room that there is.

    Attributes:
        want: how many columns it would take at most.
        draw: draws it into so many columns.
    """

    want: int
    draw: Callable[[int], Text]


Cell = Text | Fitted


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head.
        rank: 0: always there; the greater, the sooner it is left out.
        right: aligned to the right.
        least: cells may be shortened to so many columns; None: never.
    """

    title: Cell
    rank: int = 0
    right: bool = False
    least: int | None = None


def text(value: str, style: str = "", limit: int = 200) -> Text:
    """What came from storage, as text without markup, control characters escaped."""
    return Text.assemble((shown(value, limit=limit), style))  # a style of its own, which nothing appended takes on


def shortened(cell: Text, width: int, keep: int = 0) -> Text:
    """A text that is too long, with its middle left out; its first `keep` columns stay."""
    if cell.cell_len <= width:
        return cell
    if width - keep < 3:
        cut = cell.copy()
        cut.truncate(width, overflow="ellipsis")
        return cut
    room = width - keep - 1
    while True:  # characters may be two columns wide: then fewer of them
        tail = (room + 1) // 2
        made = Text.assemble(cell[: keep + room - tail], (_ELLIPSIS, FAINT), cell[len(cell) - tail :])
        if made.cell_len <= width or room <= 1:
            return made
        room -= 1


class Table:
    """Rows of cells below heads.

    Args:
        columns: from left to right; those without any content are left out.
        rows: as many cells each as there are columns; or one text, which is a line of its own below the row above.
        indent: columns that are left free on the left.
        heads: show the heads.
    """

    def __init__(
        self, columns: Sequence[Column], rows: Iterable[Sequence[Cell] | Text], *, indent: int = 0, heads: bool = True
    ):
        self._columns, self._rows, self._indent, self._heads = columns, list(rows), indent, heads

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width - self._indent)
        if self._heads:
            yield from _drawn(self._line([column.title for column in self._columns], widths, HEAD), console, options)
        for row in self._rows:
            line = _whole(row) if isinstance(row, Text) else self._line(row, widths)
            yield from _drawn(line, console, options)

    def _widths(self, width: int) -> dict[int, int]:
        """How wide each column is that is shown, by number."""
        full: dict[int, int] = {}
        for number, column in enumerate(self._columns):
            content = max((_want(row[number]) for row in self._rows if not isinstance(row, Text)), default=0)
            if content:
                full[number] = max(content, _want(column.title) if self._heads else 0)
        least = {n: w if (at := self._columns[n].least) is None else min(w, at) for n, w in full.items()}

        def needed() -> int:
            return sum(least.values()) + _GAP * max(len(least) - 1, 0)

        while needed() > width:
            last = max(least, key=lambda n: (self._columns[n].rank, n))
            if self._columns[last].rank == 0:
                break
            del least[last]
        room = max(width - needed(), 0)
        for number in sorted(least, key=lambda n: (self._columns[n].rank, n)):
            more = min(full[number] - least[number], room)
            least[number] += more
            room -= more
        return dict(sorted(least.items()))

    def _line(self, cells: Sequence[Cell], widths: dict[int, int], style: str = "") -> Text:
        line = Text(" " * self._indent, style=style)
        last = max(widths, default=0)
        for number, width in widths.items():
            cell = cells[number]
            drawn = cell.draw(width) if isinstance(cell, Fitted) else shortened(cell, width)
            pad = " " * (width - drawn.cell_len)
            if self._columns[number].right:
                line.append(pad)
            line.append_text(drawn)
            if number != last:
                line.append("" if self._columns[number].right else pad)
                line.append(" " * _GAP)
        return _whole(line)


def _drawn(line: Text, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
    """A line as it is, which rich would look for places to wrap at: that is most of the time of a long table."""
    if line.cell_len > options.max_width:
        line.truncate(options.max_width)
    yield from line.render(console)
    yield Segment.line()


def _whole(line: Text) -> Text:
    """A line that is never wrapped."""
    line.no_wrap, line.overflow = True, "crop"
    line.rstrip()
    return line


def _want(cell: Cell) -> int:
    return cell.want if isinstance(cell, Fitted) else cell.cell_len


class Fact:
    """`name  value`, the value wrapped beside its name.

    Args:
        name: what it is.
        value: what it says.
        width: columns for the name.
        indent: columns that are left free on the left.
    """

    def __init__(self, name: Text, value: Text, width: int, indent: int = 0):
        self._name, self._value, self._width, self._indent = name, value, width, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = self._indent + self._width + _GAP
        lines = self._value.wrap(console, max(options.max_width - left, 10), overflow="fold")
        for number, value in enumerate(lines or [Text()]):
            name = shortened(self._name, self._width) if number == 0 else Text()
            line = Text(" " * self._indent)
            line.append_text(name)
            line.append(" " * (self._width + _GAP - name.cell_len))
            line.append_text(value)
            yield _whole(line)


class Line:
    """One line, shortened in the middle where there is no room."""

    def __init__(self, line: Text):
        self._line = line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _whole(shortened(self._line, options.max_width))


class Parts:
    """One line of parts, of which those of the greatest rank are left out where there is no room.

    Args:
        parts: (rank, part) in their order; empty ones are left out.
    """

    def __init__(self, parts: Iterable[tuple[int, Text]]):
        self._parts = [(rank, part) for rank, part in parts if part]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(self._parts)
        while len(kept) > 1 and self._joined(kept).cell_len > options.max_width:
            kept.remove(max(kept, key=lambda one: one[0]))
        yield _whole(shortened(self._joined(kept), options.max_width))

    def whole(self) -> Text:
        """All of it, however long."""
        return self._joined(self._parts)

    @staticmethod
    def _joined(parts: Iterable[tuple[int, Text]]) -> Text:
        return Text("  ").join(part for _, part in parts)


@dataclasses.dataclass(frozen=True)
class Mark:
    """One character of a strip.

    Attributes:
        glyph: the character.
        style: its style.
        weight: where several marks share a column, the weightiest is shown.
    """

    glyph: str
    style: str
    weight: float


def strip(marks: Sequence[Mark], width: int) -> Text:
    """Marks side by side, as many in a column as it takes to fit."""
    share = per_mark(len(marks), width)
    line = Text()
    for first in range(0, len(marks), share):
        best = max(marks[first : first + share], key=lambda mark: mark.weight)
        line.append(best.glyph, best.style)
    return line


def per_mark(count: int, width: int) -> int:
    """How many of them share a column."""
    return max(1, -(-count // max(width, 1)))


def bar(level: float) -> str:
    """One block character for a value between 0 and 1."""
    return BARS[min(int(max(level, 0.0) * len(BARS)), len(BARS) - 1)]
