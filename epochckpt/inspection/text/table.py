"""Tables and lines for terminals of any width: columns are left out by rank, long cells are shortened, nothing wraps.

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
from epochckpt.inspection.blocks import Bar, Cell, Column, Histogram, Row, Strip, Tone, Words, spans

# 256-colour tones that are legible on a light background as well as on a dark one.
BAD, WARN, GOOD, LIVE, FAINT, HEAD = "bold red3", "dark_orange3", "green4", "turquoise4", "dim", "bold"
STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: HEAD,
    Tone.FAINT: FAINT,
    Tone.GOOD: GOOD,
    Tone.BAD: BAD,
    Tone.WARN: WARN,
    Tone.LIVE: LIVE,
}
_BARS = "▁▂▃▄▅▆▇█"
_GAP = 2
_BINS = 24  # of a histogram


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A cell that draws itself into the room that there is.

    Attributes:
        want: how many columns it would take at most.
        draw: draws it into so many columns.
    """

    want: int
    draw: Callable[[int], Text]


def text(value: str, style: str = "", limit: int = 200) -> Text:
    """What came from storage, as text without markup, control characters escaped."""
    return Text.assemble((shown(value, limit=limit), style))  # a style of its own, which nothing appended takes on


def styled(words: Words) -> Text:
    """Words of a block as text."""
    return Text.assemble(*(text(span.text, STYLES[span.tone], span.limit) for span in spans(words)))


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
        made = Text.assemble(cell[: keep + room - tail], ("…", FAINT), cell[len(cell) - tail :])
        if made.cell_len <= width or room <= 1:
            return made
        room -= 1


def drawn(cell: Cell) -> Fitted:
    """A cell of a block: its text, and what is drawn behind it."""
    words = styled(cell.words)
    want, draw = _drawing(cell.drawing)
    if not want:
        return Fitted(words.cell_len, lambda width: shortened(words, width))
    if not words:
        return Fitted(want, draw)
    words.append(" ")
    return Fitted(words.cell_len + want, lambda width: shortened(words.copy().append_text(draw(want)), width))


def _drawing(drawing: Bar | Strip | Histogram | None) -> tuple[int, Callable[[int], Text]]:
    """How wide a drawing would be at most, and what draws it."""
    if isinstance(drawing, Bar):
        style = STYLES[drawing.tone]
        if drawing.width == 1:
            return 1, lambda width: Text(_bar(drawing.share), style)
        return drawing.width, lambda width: Text("█" * round(drawing.share * width), style)
    if isinstance(drawing, Strip):
        return len(drawing.marks), lambda width: _strip(drawing, width)
    if isinstance(drawing, Histogram):
        return min(len(drawing.counts), _BINS), lambda width: _bins(drawing.counts, width)
    return 0, lambda width: Text()


def _bar(level: float) -> str:
    """One block character for a value between 0 and 1."""
    return _BARS[min(int(level * len(_BARS)), len(_BARS) - 1)]


def _strip(strip: Strip, width: int) -> Text:
    signs = {Tone.BAD: "×", Tone.FAINT: "·"}
    marks = (mark for mark, _ in strip.fitted(width))
    return Text.assemble(*((signs.get(mark.tone) or _bar(mark.level), STYLES[mark.tone]) for mark in marks))


def _bins(counts: Sequence[int], width: int) -> Text:
    """Counts as bars; where there is no room for all bins, neighbours are added up."""
    share = -(-len(counts) // width)
    bins = [sum(counts[i : i + share]) for i in range(0, len(counts), share)]
    most = max(bins)
    # An empty bin and one with a single element are told apart.
    return Text("".join(_bar(n / most) if n else " " for n in bins), LIVE)


class TextTable:
    """Rows of cells below heads.

    Args:
        columns: from left to right; those without any content are left out.
        rows: as many cells each as there are columns.
        indent: columns that are left free on the left.
        heads: show the heads.
    """

    def __init__(
        self, columns: Sequence[Column], rows: Iterable[Row | Sequence[Fitted]], *, indent: int = 0, heads: bool = True
    ):
        self._columns, self._indent, self._heads = columns, indent, heads
        self._rows = [
            (list(map(drawn, row.cells)), styled(row.below)) if isinstance(row, Row) else (row, Text()) for row in rows
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        widths = self._widths(room - self._indent)
        if self._heads and any(column.title for column in self._columns):
            heads = [drawn(Cell(column.title)) for column in self._columns]
            yield from _segments(self._line(heads, widths, HEAD), console, room)
        for cells, below in self._rows:
            yield from _segments(self._line(cells, widths), console, room)
            left = min(self._indent + 6, room // 4)
            for line in below.wrap(console, max(room - left, 10), overflow="fold") if below else []:
                yield from _segments(Text(" " * left).append_text(line), console, room)

    def _widths(self, width: int) -> dict[int, int]:
        """How wide each column is that is shown, by number."""
        full: dict[int, int] = {}
        for number, column in enumerate(self._columns):
            content = max((cells[number].want for cells, _ in self._rows), default=0)
            if content:
                full[number] = max(content, drawn(Cell(column.title)).want if self._heads else 0)
        least = {n: w if (at := self._columns[n].least) is None else min(w, at) for n, w in full.items()}

        def needed() -> int:
            return sum(least.values()) + _GAP * max(len(least) - 1, 0)

        # Columns of the greatest rank go first; what room is left after that goes to those of the smallest.
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

    def _line(self, cells: Sequence[Fitted], widths: dict[int, int], style: str = "") -> Text:
        line = Text(" " * self._indent, style=style)
        for number, width in widths.items():
            made = cells[number].draw(width)
            pad = " " * (width - made.cell_len)
            line.append(pad if self._columns[number].right else "")
            line.append_text(made)
            line.append(" " * _GAP if self._columns[number].right else pad + " " * _GAP)
        line.rstrip()
        return line


def _segments(line: Text, console: Console, width: int) -> Iterator[Segment]:
    """A line as it is, which rich would look for places to wrap at: that is most of the time of a long table."""
    if line.cell_len > width:
        line.truncate(width)
    yield from line.render(console)
    yield Segment.line()


def unwrapped(line: Text) -> Text:
    """A line that is never wrapped."""
    line.no_wrap, line.overflow = True, "crop"
    line.rstrip()
    return line


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
            line = Text(" " * self._indent).append_text(name)
            yield unwrapped(line.append(" " * (self._width + _GAP - name.cell_len)).append_text(value))


class Line:
    """One line of parts; those of the greatest rank are left out where there is no room.

    Args:
        parts: (rank, part) in their order; empty ones are left out.
    """

    def __init__(self, parts: Iterable[tuple[int, Text]]):
        self._parts = [(rank, part) for rank, part in parts if part]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(self._parts)
        while len(kept) > 1 and self._joined(kept).cell_len > options.max_width:
            kept.remove(max(kept, key=lambda one: one[0]))
        yield unwrapped(shortened(self._joined(kept), options.max_width))

    def whole(self) -> Text:
        """All of it, however long."""
        return self._joined(self._parts)

    @staticmethod
    def _joined(parts: Iterable[tuple[int, Text]]) -> Text:
        return Text("  ").join(part for _, part in parts)
