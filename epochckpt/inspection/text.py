"""Blocks as text for a terminal: rich renderables that fit any width, and plain text made of them.

Columns of a table are left out by rank, long cells lose their middle, and no row wraps: `rich.table` would wrap cells,
or cut them at the end, where names of leaves differ. Every text of a block passes through `styled`, which escapes it;
none is read as markup.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from epochckpt import _text
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import leaf_views, tree
from epochckpt.inspection.blocks import Bar, Block, Cell, Column, Row, Span, Strip, Tone, Words

# 256-colour tones that are legible on a light background as well as on a dark one.
BAD, WARN, GOOD, LIVE, FAINT, HEAD = "bold red3", "dark_orange3", "green4", "turquoise4", "dim", "bold"
STYLES = dict(zip(Tone, ("", HEAD, FAINT, GOOD, BAD, WARN, LIVE), strict=True))  # in the order of Tone
_BARS = "▁▂▃▄▅▆▇█"
_GAP = 2  # columns between those of a table
_FACT = 12  # columns for the name of a fact
_INDENT = 2


def to_text(renderable: RenderableType, width: int | None = None, colour: bool = False) -> str:
    """The text of a renderable of rich. `width` is in columns; None: that of the terminal, 80 without a terminal."""
    system = "256" if colour else None
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system=system, force_jupyter=False, no_color=False
    )
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def render(view: Sequence[Block], *, folding: tree.Folding | None = None, owners: bool = False) -> RenderableType:
    """A view as a renderable of rich; `owners` lists which node wrote which part of an array.

    Without a folding, all trees together are unfolded to about a screen.
    """
    rows = max(tree.SCREEN // max(len(kinds.trees(view)), 1), 8)
    return Group(*_blocks(view, folding or tree.Folding(rows=rows), owners))


def _blocks(view: Sequence[Block], folding: tree.Folding, owners: bool, indent: int = 0) -> Iterator[RenderableType]:
    for number, block in enumerate(view):
        # An empty line sets apart a section, a table from another one, and the table below a summary.
        after = view[number - 1] if number else None
        if isinstance(block, kinds.Section) and block.on_demand and not owners:
            continue
        two = isinstance(block, kinds.Table) and isinstance(after, kinds.Table)
        if number and (two or isinstance(block, kinds.Section) or isinstance(after, kinds.Summary | kinds.Facts)):
            yield Text()
        match block:
            case kinds.TextLine():
                yield line(block.words, indent)
            case kinds.Summary():
                yield _Summary(block)
            case kinds.Facts():
                for name, words in block.facts:
                    yield Fact(styled(Span(name, Tone.FAINT)), styled(words), _FACT, _INDENT)
            case kinds.Problem():
                yield Fact(Text("!", BAD), styled(block.words), 1, indent)
            case kinds.Table():
                yield TextTable(block.columns, block.rows, indent=indent)
            case kinds.Tree():
                yield _tree(block, folding)
            case kinds.Heat():
                yield _Heat(block)
            case kinds.Section():
                yield _heading(block.heading, indent)
                yield from _blocks(block.blocks, folding, owners, indent + _INDENT)


def _heading(words: Words, indent: int) -> TextTable:
    """A line whose faint end is left out where there is no room for it."""
    *first, last = kinds.spans(words)
    if last.tone is not Tone.FAINT or not first:
        return line(words, indent)
    end = Span(last.text.strip(), last.tone, last.limit)
    return TextTable([Column("", 0), Column("", 1)], [Row((Cell(tuple(first)), Cell(end)))], indent=indent)


def _tree(block: kinds.Tree, folding: tree.Folding) -> TextTable:
    opened = tree.opened(block.root, folding)

    def lines(branch: tree.Branch, prefix: str) -> Iterator[Row]:
        listed = branch.listed(folding)
        for child in listed:
            last = child is listed[-1]
            name, *cells = leaf_views.branch_cells(child, block)
            before = f"{prefix}{'└─ ' if last else '├─ '}"
            after = "" if child.leaf or child.hidden else "/" if child in opened else "/ …"
            words = Span(before, Tone.FAINT), *kinds.spans(name.words), Span(after, Tone.FAINT)
            yield Row((Cell(words, keep=len(before)), *cells))
            if child in opened:
                yield from lines(child, f"{prefix}{'   ' if last else '│  '}")

    return TextTable(leaf_views.TREE_COLUMNS, lines(block.root, ""), indent=_INDENT)


class Fitted(NamedTuple):
    """A cell that draws itself into the room that there is; `want` is the width that it would take at most."""

    want: int
    draw: Callable[[int], Text]


def safe(value: str, style: str = "", limit: int = 200) -> Text:
    """Text from storage, with control characters escaped and without markup."""
    return Text.assemble((_text.shown(value, limit=limit), style))  # what is appended does not take on the style


def styled(words: Words) -> Text:
    """Words of a block as text."""
    return Text.assemble(*(safe(span.text, STYLES[span.tone], span.limit) for span in kinds.spans(words)))


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
    drawing = _drawing(cell.drawing)
    if not drawing.want:
        return Fitted(words.cell_len, lambda width: shortened(words, width, cell.keep))
    if not words:
        return drawing
    words.append(" ")
    want = words.cell_len + drawing.want
    return Fitted(want, lambda width: shortened(words.copy().append_text(drawing.draw(drawing.want)), width))


def _drawing(drawing: Bar | Strip | None) -> Fitted:
    if isinstance(drawing, Bar):
        style = STYLES[drawing.tone]
        if drawing.width == 1:
            return Fitted(1, lambda width: Text(_block(drawing.share), style))
        return Fitted(drawing.width, lambda width: Text("█" * round(drawing.share * width), style))
    if isinstance(drawing, Strip):
        return Fitted(len(drawing.marks), lambda width: _strip(drawing, width))
    return Fitted(0, lambda width: Text())


def _block(level: float) -> str:
    """One block character for a value between 0 and 1."""
    return _BARS[min(int(level * len(_BARS)), len(_BARS) - 1)]


def _strip(strip: Strip, width: int) -> Text:
    signs = {Tone.BAD: "×", Tone.FAINT: "·"}
    marks = (mark for mark, _ in strip.fitted(width))
    made = ((signs.get(mark.tone) or (_block(mark.level) if mark.level else " "), STYLES[mark.tone]) for mark in marks)
    return Text.assemble(*made)


class _Lines:
    """Something that makes its lines for the width that there is; what does not fit is cut off."""

    def _made(self, console: Console, width: int) -> Iterable[Text]:
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # To print a Text, rich looks for places to wrap it at, which takes most of the time of a long table.
        for line in self._made(console, options.max_width):
            line.rstrip()
            line.truncate(options.max_width)
            yield from line.render(console)
            yield Segment.line()


def _broken(text: Text, console: Console, width: int) -> Iterator[Text]:
    """The lines of a text that is broken at its spaces; a name of a leaf, which has none, after a `/`."""
    if " " in text.plain or text.cell_len <= width:
        yield from text.wrap(console, width, overflow="fold")
        return
    made = Text()
    for key in text.split("/", include_separator=True):
        if made and made.cell_len + key.cell_len > width:
            yield from made.wrap(console, width, overflow="fold")
            made = Text()
        made.append_text(key)
    yield from made.wrap(console, width, overflow="fold")


class TextTable(_Lines):
    """Rows of cells below heads, with a cell per column; columns without any content are left out."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Row], *, indent: int = 0):
        self._columns = columns
        self._indent = indent
        self._rows = [(list(map(drawn, row.cells)), styled(row.below)) for row in rows]

    def _made(self, console: Console, width: int) -> Iterable[Text]:
        widths = self._widths(width - self._indent)
        if any(self._columns[n].title for n in widths):
            yield self._line([drawn(Cell(column.title)) for column in self._columns], widths, HEAD)
        left = min(self._indent + 6, width // 4)
        for cells, below in self._rows:
            yield self._line(cells, widths)
            cut = [n for n in widths if self._columns[n].whole and cells[n].want > widths[n]]
            for text in [*(cells[n].draw(cells[n].want) for n in cut), below]:
                for line in _broken(text, console, max(width - left, 10)) if text else []:
                    yield Text(" " * left).append_text(line)
        used = {n for cells, _ in self._rows for n, cell in enumerate(cells) if cell.want}
        missed = [self._columns[n].title for n in sorted(used - widths.keys()) if self._columns[n].missed]
        if missed:
            said = safe(f"no room for {', '.join(missed)}", FAINT, 1000)
            for line in said.wrap(console, max(width - self._indent, 10), overflow="fold"):
                yield Text(" " * self._indent).append_text(line)

    def _widths(self, width: int) -> dict[int, int]:
        """How wide each column is that is shown, by number."""
        full: dict[int, int] = {}
        for number, column in enumerate(self._columns):
            if content := max((cells[number].want for cells, _ in self._rows), default=0):
                full[number] = max(content, drawn(Cell(column.title)).want)
        narrow = {n: w if (at := self._columns[n].least) is None else min(w, at) for n, w in full.items()}
        ranked = sorted(narrow, key=lambda n: (self._columns[n].rank, n))
        least: dict[int, int] = {}

        def room() -> int:
            return width - sum(least.values()) - _GAP * max(len(least) - 1, 0)

        # Columns of the smallest rank come first, then each that still fits; those of the smallest get the rest.
        for number in ranked:
            if self._columns[number].rank == 0 or room() >= narrow[number] + _GAP * bool(least):
                least[number] = narrow[number]
        for number in least:
            least[number] += min(full[number] - least[number], max(room(), 0))
        return {number: least[number] for number in sorted(least)}

    def _line(self, cells: Sequence[Fitted], widths: dict[int, int], style: str = "") -> Text:
        line = Text(" " * self._indent, style=style)
        for number, width in widths.items():
            made = cells[number].draw(width)
            pad = " " * (width - made.cell_len)
            line.append(pad if self._columns[number].right else "")
            line.append_text(made)
            line.append(" " * _GAP if self._columns[number].right else pad + " " * _GAP)
        return line


def line(words: Words, indent: int = 0) -> TextTable:
    """Words in one line, without their middle where there is no room."""
    return TextTable([Column("", least=0)], [Row((Cell(words),))], indent=indent)


class _Summary(_Lines):
    """Statements side by side; a line ends between two of them, so that no figure is parted from its unit."""

    def __init__(self, summary: kinds.Summary):
        self._statements = list(map(styled, summary.statements))

    def _made(self, console: Console, width: int) -> Iterable[Text]:
        made = Text()
        for statement in self._statements:
            if made and made.cell_len + 3 + statement.cell_len <= width:
                made.append(" · ", FAINT).append_text(statement)
                continue
            if made:
                yield made
            *whole, made = statement.wrap(console, max(width, 10), overflow="fold") or [Text()]
            yield from whole
        yield made


class _Heat(_Lines):
    """A matrix of squares, a character each; in a narrow terminal, the strongest of some side by side."""

    def __init__(self, heat: kinds.Heat):
        self._heat = heat

    def _made(self, console: Console, width: int) -> Iterable[Text]:
        for levels in self._heat.levels:
            share = -(-len(levels) // max(width - _INDENT, 1))
            groups = (levels[first : first + share] for first in range(0, len(levels), share))
            shown = (max(group, key=lambda level: math.inf if math.isnan(level) else abs(level)) for group in groups)
            signs = ((_square(level), STYLES[kinds.Heat.tone(level)]) for level in shown)
            yield Text.assemble(" " * _INDENT, *signs)


def _square(level: float) -> str:
    return "×" if math.isnan(level) else " ░▒▓█"[min(math.ceil(abs(level) * 4), 4)]


class Fact(_Lines):
    """`name  value`: `width` columns for the name, the value wrapped beside it."""

    def __init__(self, name: Text, value: Text, width: int, indent: int = 0):
        self._name = name
        self._value = value
        self._width = width
        self._indent = indent

    def _made(self, console: Console, width: int) -> Iterable[Text]:
        left = self._indent + self._width + _GAP
        start = Text(" " * self._indent).append_text(shortened(self._name, self._width))
        start.append(" " * (left - start.cell_len))
        for line in self._value.wrap(console, max(width - left, 10), overflow="fold") or [Text()]:
            yield start.append_text(line)
            start = Text(" " * left)
