"""Blocks as text for a terminal: rich renderables that fit any width, and plain text made of them.

Every text of a block passes through `table.styled`, which escapes it; none is read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from epochckpt import _units
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import leaf_views, sharding, tree
from epochckpt.inspection.blocks import Block, Span, Tone
from epochckpt.inspection.text.table import BAD, FAINT, GOOD, Fact, Fitted, Line, TextTable, drawn, shortened, styled

_FACT = 12  # columns for the name of a fact
_INDENT = 2
_CUTS = 12  # ways of cutting arrays that are drawn
_DOWN, _ACROSS = 24, 60  # parts of a grid that are drawn
_NODES = 24  # named below it


def to_text(renderable: RenderableType, width: int | None = None, colour: bool = False) -> str:
    """What a renderable of rich looks like in so many columns; None: those of the terminal, 80 without one."""
    system = "256" if colour else None
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system=system, force_jupyter=False, no_color=False
    )
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def render(view: Sequence[Block], *, folding: tree.Folding | None = None, owners: bool = False) -> RenderableType:
    """A view as a renderable of rich; `owners` draws which node wrote which part of an array.

    Without a folding, all trees together are unfolded to about a screen.
    """
    rows = max(tree.SCREEN // max(len(kinds.trees(view)), 1), 8)
    return Group(*_blocks(view, folding or tree.Folding(rows=rows), owners))


def _blocks(view: Sequence[Block], folding: tree.Folding, owners: bool, indent: int = 0) -> Iterator[RenderableType]:
    for number, block in enumerate(view):
        # An empty line sets apart a section, and the table below a summary.
        after = view[number - 1] if number else None
        if number and (isinstance(block, kinds.Section) or isinstance(after, kinds.Summary | kinds.Facts)):
            yield Text()
        match block:
            case kinds.Line():
                yield Line((0, Text(" " * indent).append_text(styled(block.words))))
            case kinds.Summary():
                yield Text.assemble((" · ", FAINT)).join(map(styled, block.statements))
            case kinds.Facts():
                for name, words in block.facts:
                    yield Fact(styled(Span(name, Tone.FAINT)), styled(words), _FACT, _INDENT)
            case kinds.Problem():
                yield Fact(Text("!", BAD), styled(block.words), 1, indent)
            case kinds.Table():
                yield TextTable(block.columns, block.rows, indent=indent)
            case kinds.Tree():
                yield _tree(block, folding)
            case kinds.Cuts():
                yield from _cuts(block) if owners else ()
            case kinds.Section():
                yield Line((0, styled(block.heading)))
                yield from _blocks(block.blocks, folding, owners, _INDENT)


def _tree(block: kinds.Tree, folding: tree.Folding) -> TextTable:
    opened = tree.opened(block.root, folding)

    def lines(branch: tree.Branch, prefix: str) -> Iterator[list[Fitted]]:
        listed = branch.listed(folding)
        for child in listed:
            last = child is listed[-1]
            name, *cells = map(drawn, leaf_views.branch_cells(child, block.total_nbytes))
            suffix = "" if child.leaf or child.hidden else "/" if child in opened else "/ …"
            yield [_kept(f"{prefix}{'└─ ' if last else '├─ '}", name, suffix), *cells]
            if child in opened:
                yield from lines(child, f"{prefix}{'   ' if last else '│  '}")

    return TextTable(leaf_views.TREE_COLUMNS, lines(block.root, ""), indent=_INDENT)


def _kept(prefix: str, name: Fitted, suffix: str) -> Fitted:
    """A name in a tree: it keeps its place when it is shortened."""
    whole = Text.assemble((prefix, FAINT)).append_text(name.draw(name.want)).append(suffix, FAINT)
    return Fitted(whole.cell_len, lambda width: shortened(whole, width, len(prefix)))


def _cuts(block: kinds.Cuts) -> Iterator[RenderableType]:
    """Each way of cutting arrays: how, which arrays, and the label of the node that wrote each part."""
    for cut in block.cuts[:_CUTS]:
        yield Text()
        yield from (Line((0, Text("  ").append_text(styled(words)))) for words in leaf_views.cut_lines(cut))
        yield from (Text("    ").append_text(line) for line in _grid(sharding.grid(cut.sharding), block.labels))
    if len(block.cuts) > _CUTS:
        yield Text(f"  … {_units.count(len(block.cuts) - _CUTS)} more ways of cutting", FAINT)


def _grid(found: sharding.Grid, labels: sharding.NodeLabels) -> Iterator[Text]:
    if not found.owners:
        return
    width = max(len(labels.label(name)) for name in found.owners)
    for first in range(0, min(found.down, _DOWN) * found.across, found.across):
        row = found.owners[first : first + min(found.across, _ACROSS)]
        more = " …" if found.across > _ACROSS else ""
        yield Text(" ".join(labels.label(name).rjust(width) for name in row) + more, GOOD)
    if found.down > _DOWN:
        yield Text(f"… {_units.count(found.down - _DOWN)} more rows", FAINT)
    nodes = labels.of(found.owners)
    keys = [Text(f"{label} ").append_text(styled(Span(name, Tone.FAINT, 40))) for name, label in nodes[:_NODES]]
    for first in range(0, len(keys), 3):
        yield Text("  ").join(keys[first : first + 3])
    if len(nodes) > _NODES:
        yield Text(f"… {_units.count(len(nodes) - _NODES)} more nodes", FAINT)
