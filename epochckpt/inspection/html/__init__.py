"""Blocks as what notebooks show: a view is one string of HTML that needs nothing else, no script and no other file.

A page is bounded in size whatever its rows are. Several views on one page do not disturb one another: no element has an
id, and their style sheets are the same. `el` makes every element: it escapes texts and closes tags, so that nothing in
a row becomes markup.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from epochckpt import _text, _units
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import leaf_views, tree
from epochckpt.inspection.blocks import Bar, Block, Cell, Column, Strip, Tone, Words
from epochckpt.inspection.html.style import PREFIX, css

T = TypeVar("T")

_TREE_CHARS = 600_000  # of all trees of a page
_TABLE_CHARS = 700_000  # of all tables of a page
_BRANCH_CHARS = 500  # about, of one row of a tree
_OPEN = 40  # rows of a tree that are seen at first
_TREE_COLUMNS = leaf_views.TREE_COLUMNS[:-1]  # the last one is the tip of the fourth
_CHILDREN = 100  # shown of one group at most
_STRIP = 64  # bars of one strip
_STRIPS = 4000  # bars of all strips of a page but histograms, which the bound of tables holds


def page(view: Sequence[Block]) -> Html:
    """A view as HTML."""
    drawn = joined(map(_Renderer(view).block, view))
    return Html(f'<div class="{PREFIX}"><style>{css()}</style>{drawn}</div>')


class _Renderer:
    """Draws the blocks of one page, which share its room."""

    def __init__(self, view: Sequence[Block]):
        self._table_chars = _TABLE_CHARS
        self._bars = _STRIPS
        self._chars_per_leaf = _TREE_CHARS / max(sum(block.root.count for block in kinds.trees(view)), 1)

    def block(self, block: Block) -> Html:
        """One block with its inner blocks."""
        match block:
            case kinds.TextLine():
                return el("div", "title" if block.title else "", worded(block.words))
            case kinds.Summary():
                return el("div", "summary", *(el("span", "", worded(words)) for words in block.statements))
            case kinds.Facts():
                facts = ((el("dt", "", name), el("dd", "", worded(words))) for name, words in block.facts)
                return el("dl", "", *(part for pair in facts for part in pair))
            case kinds.Problem():
                return el("div", "problem", worded(block.words))
            case kinds.Table():
                return self._table(block)
            case kinds.Tree():
                return self._tree(block)
            case kinds.Heat():
                return el("div", "heat", *(el("div", "", *map(_square, levels)) for levels in block.levels))
            case kinds.Section():
                blocks = map(self.block, block.blocks)
                return _fold(worded(block.heading), *blocks, open=block.open, classes="section")

    def _table(self, block: kinds.Table) -> Html:
        used = [n for n in range(len(block.columns)) if not all(row.cells[n].empty for row in block.rows)]
        columns = [block.columns[n] for n in used]
        lines: list[Html] = []
        for row in reversed(block.rows) if block.recent else block.rows:
            if self._table_chars <= 0:
                break
            line = el("tr", "row", *self._cells(columns, [row.cells[n] for n in used], "td"))
            if below := worded(row.below):
                line = joined([line, el("tr", "below", el("td", "", el("div", "", below), colspan=len(used)))])
            lines.append(line)
            self._table_chars -= len(line)
        more = len(block.rows) - len(lines)
        rest = el("div", "faint", f"… {_units.count(more)} more") if more else ""
        head = el("thead", "", el("tr", "", *_heads(columns, "th")))

        def table(rows: Sequence[Html]) -> Html:
            return el("div", "scroll", el("table", "", head, el("tbody", "", *rows)))

        if not block.recent or len(lines) <= block.recent:
            return joined([table(lines), rest])
        older = _fold(f"… {_units.count(len(block.rows) - block.recent)} more", table(lines[block.recent :]), rest)
        return joined([table(lines[: block.recent]), older])

    def _cells(self, columns: Sequence[Column], cells: Sequence[Cell], tag: str) -> Iterator[Html]:
        for column, cell in zip(columns, cells, strict=True):
            drawn = worded(cell.words), self._drawing(cell.drawing)
            yield el(tag, "right" if column.right else "", *drawn, title=cell.tip or None)

    def _tree(self, block: kinds.Tree) -> Html:
        """A tree of at most so many characters. A group shows at least one child, and the number of hidden children."""
        # Rows, which are cheap to count, come first; names may be long, so that characters decide.
        most = _CHILDREN
        room = self._chars_per_leaf * block.root.count
        while most > 1 and tree.size(block.root, _folding(most)) > room // _BRANCH_CHARS:
            most = most * 9 // 10
        while len(body := self._branches(block, _folding(most))) > room and most > 1:
            most = most * 2 // 3
        heads = el("div", "heads", *_heads(_used(block, _TREE_COLUMNS), "span"))
        return el("div", "scroll", el("div", "tree placed" if block.placed else "tree", heads, body))

    def _branches(self, block: kinds.Tree, folding: tree.Folding) -> Html:
        opened = tree.opened(block.root, folding)

        def drawn(branch: tree.Branch) -> Html:
            cells = leaf_views.branch_cells(branch, block)[: len(_TREE_COLUMNS)]
            line = joined(self._cells(_used(block, _TREE_COLUMNS), _used(block, cells), "span"))
            if branch.leaf is not None or branch.hidden:
                return el("div", "leaf", line)
            return _fold(line, el("div", "within", *map(drawn, branch.listed(folding))), open=branch in opened)

        return joined(map(drawn, block.root.listed(folding)))

    def _drawing(self, drawing: Bar | Strip | None) -> Html:
        """The drawing of a cell; empty without a drawing, or without room for it."""
        if isinstance(drawing, Bar):
            return el("span", "bar", el("i", drawing.tone.value, style=f"width:{drawing.share * 100:.3g}%"))
        return Html("") if drawing is None else self._strip(drawing)

    def _strip(self, strip: Strip) -> Html:
        """A row of bars; the tip of each says which marks it stands for."""
        fitted = strip.fitted(_STRIP)
        self._bars -= 0 if strip.summed else len(fitted)
        if self._bars < 0:
            return Html("")
        bars: list[Html] = []
        for mark, group in fitted:
            ends = " … ".join(group[end].tip.partition(" · ")[0] for end in (0, -1))
            tip = mark.tip if len(group) == 1 else f"{ends}: {mark.tip}"
            height = max(round(100 * mark.level), 10) if mark.level else 0
            bars.append(el("i", mark.tone.value, title=tip, style=f"height:{height}%"))
        return el("span", "strip", *bars)


def _square(level: float) -> Html:
    strength = {} if math.isnan(level) else {"style": f"opacity:{min(abs(level), 1.0):.2f}"}
    return el("i", kinds.Heat.tone(level).value, **strength)


def _used(block: kinds.Tree, columns: Sequence[T]) -> Sequence[T]:
    """The columns of a tree, or the cells, without those that say where arrays lie if that is the same for all."""
    return columns if block.placed else [*columns[:3], *columns[4:]]


def _heads(columns: Sequence[Column], tag: str) -> Iterator[Html]:
    return (el(tag, "right" if column.right else "", column.title, title=column.tip or None) for column in columns)


def _folding(most: int) -> tree.Folding:
    return tree.Folding(None, most, _OPEN, False)


def _fold(summary: str, *children: str, open: bool = False, classes: str = "") -> Html:
    """Children that a click on the summary opens, without a script."""
    return el("details", classes, el("summary", "", summary), *children, open="" if open else None)


class Html(str):
    """Markup, made by the functions here."""


def el(tag: str, classes: str = "", *children: str, **attributes: str | float | None) -> Html:
    """One element. Children and values of attributes that are plain `str` are escaped; None leaves an attribute out.

    The tag, the classes (without the prefix) and the names of attributes are constants of the code.
    """
    named = f' class="{" ".join(f"{PREFIX}-{name}" for name in classes.split())}"' if classes else ""
    rest = "".join(f' {name}="{text(str(value), 400)}"' for name, value in attributes.items() if value is not None)
    return Html(f"<{tag}{named}{rest}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Several parts, one after another."""
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children))


def text(content: str, limit: int = _text.LIMIT) -> Html:
    """Any text, as markup that shows it."""
    return Html(html.escape(_text.shown(content, limit)))


def worded(words: Words) -> Html:
    """Words of a block."""
    shown = ((span.tone, text(span.text, span.limit)) for span in kinds.spans(words))
    return joined(each if tone is Tone.PLAIN else el("span", tone.value, each) for tone, each in shown)
