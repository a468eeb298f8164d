"""Tables and lines for terminals of any width: columns are left out by rank, long cells are shortened, nothing wraps.

`rich.table` wraps cells or cuts them at the end where there is no room; a table of epochs that is wrapped cannot be
read, and names of leaves differ at their ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

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
    """A cell that draws itself into the room that there is; `want` is the width that it would take at most."""

    want: int
    draw: Callable[[int], Text]


def text(value: str, style: str = "", limit: int = 200) -> Text:
    """Text from storage, with control characters escaped and without markup."""
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
    words, drawing = styled(cell.words), _drawing(cell.drawing)
    if not drawing.want:
        return Fitted(words.cell_len, lambda width: shortened(words, width))
    if not words:
        return drawing
    words.append(" ")
    want = words.cell_len + drawing.want
    return Fitted(want, lambda width: shortened(words.copy().append_text(drawing.draw(drawing.want)), width))


def _drawing(drawing: Bar | Strip | Histogram | None) -> Fitted:
    if isinstance(drawing, Bar):
        style = STYLES[drawing.tone]
        if drawing.width == 1:
            return Fitted(1, lambda width: Text(_block(drawing.share), style))
        return Fitted(drawing.width, lambda width: Text("█" * round(drawing.share * width), style))
    if isinstance(drawing, Strip):
        return Fitted(len(drawing.marks), lambda width: _strip(drawing, width))
    if isinstance(drawing, Histogram):
        return Fitted(min(len(drawing.counts), _BINS), lambda width: _bins(drawing.counts, width))
    return Fitted(0, lambda width: Text())


def _block(level: float) -> str:
    """One block character for a value between 0 and 1."""
    return _BARS[min(int(level * len(_BARS)), len(_BARS) - 1)]


def _strip(strip: Strip, width: int) -> Text:
    signs = {Tone.BAD: "×", Tone.FAINT: "·"}
    marks = (mark for mark, _ in strip.fitted(width))
    return Text.assemble(*((signs.get(mark.tone) or _block(mark.level), STYLES[mark.tone]) for mark in marks))


def _bins(counts: Sequence[int], width: int) -> Text:
    """Counts as bars; where there is no room for all bins, neighbours are added up."""
    share = -(-len(counts) // width)
    bins = [sum(counts[i : i + share]) for i in range(0, len(counts), share)]
    most = max(bins)
    # An empty bin and one with a single element are told apart.
    return Text("".join(_block(n / most) if n else " " for n in bins), LIVE)


class _Lines:
    """Something that makes its lines for the width that there is. None is wrapped."""

    def lines(self, console: Console, width: int) -> Iterable[Text]:
        """The lines; what does not fit is cut off."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # To print a Text, rich looks for places to wrap it at, which takes most of the time of a long table.
        for line in self.lines(console, options.max_width):
            line.rstrip()
            line.truncate(options.max_width)
            yield from line.render(console)
            yield Segment.line()


class TextTable(_Lines):
    """Rows of cells below heads, with a cell per column; columns without any content are left out."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Row | Sequence[Fitted]], *, indent: int = 0):
        self._columns, self._indent = columns, indent
        self._rows = [
            (list(map(drawn, row.cells)), styled(row.below)) if isinstance(row, Row) else (row, Text()) for row in rows
        ]

    def lines(self, console: Console, width: int) -> Iterable[Text]:
        """The head, and each row with its remark."""
        widths = self._widths(width - self._indent)
        if any(self._columns[n].title for n in widths):
            yield self._line([drawn(Cell(column.title)) for column in self._columns], widths, HEAD)
        left = min(self._indent + 6, width // 4)
        for cells, below in self._rows:
            yield self._line(cells, widths)
            for line in below.wrap(console, max(width - left, 10), overflow="fold") if below else []:
                yield Text(" " * left).append_text(line)

    def _widths(self, width: int) -> dict[int, int]:
        """How wide each column is that is shown, by number."""
        full: dict[int, int] = {}
        for number, column in enumerate(self._columns):
            if content := max((cells[number].want for cells, _ in self._rows), default=0):
                full[number] = max(content, drawn(Cell(column.title)).want)
        least = {n: w if (at := self._columns[n].least) is None else min(w, at) for n, w in full.items()}
        ranked = sorted(least, key=lambda n: (self._columns[n].rank, n))

        def room() -> int:
            return width - sum(least.values()) - _GAP * max(len(least) - 1, 0)

        # Columns of the greatest rank go first; what room is left after that goes to those of the smallest.
        while ranked and room() < 0 and self._columns[ranked[-1]].rank > 0:
            del least[ranked.pop()]
        for number in ranked:
            least[number] += min(full[number] - least[number], max(room(), 0))
        return least

    def _line(self, cells: Sequence[Fitted], widths: dict[int, int], style: str = "") -> Text:
        line = Text(" " * self._indent, style=style)
        for number, width in widths.items():
            made = cells[number].draw(width)
            pad = " " * (width - made.cell_len)
            line.append(pad if self._columns[number].right else "")
            line.append_text(made)
            line.append(" " * _GAP if self._columns[number].right else pad + " " * _GAP)
        return line


class Fact(_Lines):
    """`name  value`: `width` columns for the name, the value wrapped beside it."""

    def __init__(self, name: Text, value: Text, width: int, indent: int = 0):
        self._name, self._value, self._width, self._indent = name, value, width, indent

    def lines(self, console: Console, width: int) -> Iterable[Text]:
        """The lines of the value, the first one behind the name."""
        left = self._indent + self._width + _GAP
        start = Text(" " * self._indent).append_text(shortened(self._name, self._width))
        start.append(" " * (left - start.cell_len))
        for line in self._value.wrap(console, max(width - left, 10), overflow="fold") or [Text()]:
            yield start.append_text(line)
            start = Text(" " * left)


class Line(_Lines):
    """One line of parts, each with its rank; those of the greatest rank are left out where there is no room."""

    def __init__(self, *parts: tuple[int, Text]):
        self._parts = [(rank, part) for rank, part in parts if part]

    def lines(self, console: Console, width: int) -> Iterable[Text]:
        """The line."""
        kept = list(self._parts)
        while len(kept) > 1 and _joined(kept).cell_len > width:
            kept.remove(max(kept, key=lambda one: one[0]))
        return [shortened(_joined(kept), width)]

    def whole(self) -> Text:
        """All of it, however long."""
        return _joined(self._parts)


def _joined(parts: Iterable[tuple[int, Text]]) -> Text:
    return Text("  ").join(part for _, part in parts)
