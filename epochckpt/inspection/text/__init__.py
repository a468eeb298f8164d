"""Rows as text for a terminal: rich renderables that fit any width, and plain text made of them.

The same views as `html_views`, under the same names. No text of others reaches a terminal but through `escaping`, and
none is read as markup.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from epochckpt import _units
from epochckpt._text import readable
from epochckpt.inspection import rows, run_notes
from epochckpt.inspection.rows import EpochDetail, EpochRow, ItemRow, NodeRow
from epochckpt.inspection.text import tree
from epochckpt.inspection.text.leaves import diff, stats
from epochckpt.inspection.text.overview import BEST, LATEST, STYLES, metric, node_strip, overview, strip_title
from epochckpt.inspection.text.table import BAD, FAINT, GOOD, HEAD, LIVE, WARN, Cell, Column, Fact, Line, Table, text

__all__ = ["diff", "epoch", "item", "overview", "stats", "to_text"]

_NODES = 12  # of an epoch that are listed; of more than that only some
_SLOWEST = 5
_FILES = 12
_FACT = 12
_NOTES = 20  # of the runner


def to_text(renderable: RenderableType, width: int | None = None, colour: bool = False) -> str:
    """What a renderable looks like.

    Args:
        renderable: of rich.
        width: columns; None: those of the terminal, 80 without one.
        colour: with escape sequences for colours.
    """
    system = "256" if colour else None
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system=system, force_jupyter=False, no_color=False
    )
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def epoch(detail: EpochDetail, *, folding: tree.Folding | None = None, owners: bool = False) -> RenderableType:
    """One epoch: what is known of it, its nodes, its items and their trees.

    Args:
        detail: the epoch.
        folding: how far trees are unfolded; None: all items together about a screen.
        owners: draw which node wrote which part of an array.
    """
    row = detail.row
    head = Text.assemble(("epoch ", HEAD), (str(row.epoch), HEAD), "  ", (row.state, STYLES.get(row.state, "") or GOOD))
    for said, style, shown in ((f"{LATEST} latest", LIVE, row.latest), (f"{BEST} best", GOOD, row.best)):
        head.append(f"  {said}" if shown else "", style)
    parts: list[RenderableType] = [Line(head)]
    parts += [Fact(Text(name, FAINT), value, _FACT, 2) for name, value in _facts(detail)]
    if len(row.nodes) > 1:
        parts += [Text(), *_node_table(row)]
    share = max(tree.SCREEN // max(len(detail.items), 1), 8)
    for found in detail.items:
        parts += [Text(), item(found, row.nbytes, folding=folding or tree.Folding(rows=share), owners=owners)]
    return Group(*parts)


def _facts(detail: EpochDetail) -> Iterator[tuple[str, Text]]:
    row = detail.row
    if row.detail:
        yield (
            "wrong" if row.state == rows.DAMAGED else "state",
            text(row.detail, STYLES.get(row.state, ""), limit=2000),
        )
    if row.committed_ns is not None:
        yield "committed", Text(_units.when(row.committed_ns))
    took = f" in {_units.secs(row.secs)}" if row.secs is not None else ""
    held = f", training blocked {_units.secs(row.blocked_secs)}" if row.blocked_secs is not None else ""
    on = f" on {len(row.nodes)} nodes" if len(row.nodes) > 1 else f" on {row.nodes[0].name}" if row.nodes else ""
    if row.nbytes or row.nodes:
        yield "size", text(f"{_units.nbytes(row.nbytes)}{on}{took}{held}")
    yield "written by", text("stock Orbax" if row.writer == "orbax" else f"{row.writer}, attempt {row.attempt or '?'}")
    if row.folder not in ("", str(row.epoch)):
        yield "folder", text(row.folder)
    for name, value in rows.flat(row.metrics).items():
        source = f"  (attached by {row.sources[name]})" if name in row.sources else ""
        yield "metric", text(f"{name} ").append_text(metric(value, HEAD)).append_text(text(source, FAINT))
    for name, value in row.custom_metadata.items():
        yield "metadata", text(f"{name}: {value}", limit=400)
    for title, said in run_notes.told(row.notes)[:_NOTES]:
        yield title, text(said, limit=400)
    for name, left in (detail.unsupported or {}).items():
        if name == "*":  # there is no view
            yield "Orbax lacks", text(f"all of it: {'; '.join(left.values())}", WARN, limit=1000)
            continue
        why = "; ".join(f"{readable(leaf)}: {reason}" for leaf, reason in list(left.items())[:5])
        more = f"; … {len(left) - 5} more" if len(left) > 5 else ""
        yield "Orbax lacks", text(f"item {name}: {why}{more}", WARN, limit=1000)


def _node_table(row: EpochRow) -> Iterator[RenderableType]:
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)
    listed, damaged = list(row.nodes), list[NodeRow]()
    if len(row.nodes) > _NODES:
        damaged = [node for node in row.nodes if node.state == rows.DAMAGED][:_NODES]
        listed = damaged + sorted(set(row.nodes) - set(damaged), key=lambda node: -(node.secs or 0.0))[:_SLOWEST]
    if len(listed) < len(row.nodes):
        names = [node.name for node in row.nodes]
        marks = node_strip(row, names, {})
        yield Table([Column(strip_title(len(names)), least=8)], [[marks]], indent=2)
        yield Text(
            f"  the {len(listed)} slowest" + (", damaged ones first" if row.state == rows.DAMAGED else ""), FAINT
        )
    columns = [
        Column(Text("node"), 0, least=20),
        Column(Text("state"), 2),
        Column(Text("bytes"), 1, right=True),
        Column(Text("wrote for"), 1, right=True),
        Column(Text(""), 3),
        Column(Text("detail"), 4, least=20),
    ]
    lines: list[Sequence[Cell]] = []
    for node in listed:
        slowest = WARN if node.name == row.slowest_node else ""
        length = round(20 * (node.secs or 0.0) / longest) if longest else 0
        state = Text() if node.state == rows.COMMITTED else Text(node.state, STYLES.get(node.state, LIVE))
        took = Text() if node.secs is None else Text(_units.secs(node.secs), slowest)
        size = Text(_units.nbytes(node.nbytes))
        lines.append([text(node.name), state, size, took, Text("█" * length, slowest or FAINT), text(node.detail, BAD)])
    yield Table(columns, lines, indent=2)


def item(
    found: ItemRow, total_nbytes: int, *, folding: tree.Folding | None = None, owners: bool = False
) -> RenderableType:
    """An item: its tree, its files, or what each node has of its own.

    Args:
        found: the item.
        total_nbytes: bytes of the epoch, of which shares are shown.
        folding: how far the tree is unfolded; None: to about a screen.
        owners: draw which node wrote which part of an array.
    """
    folding = folding or tree.Folding()
    what = {
        "arrays": _units.several(len(found.leaves), "leaf", "leaves"),
        "files": _units.several(len(found.files), "file", "files"),
    }
    said = what.get(found.kind, _units.several(len(found.nodes), "node", "nodes") + " with their own")
    head = Text.assemble("item ", text(found.name, HEAD), f"  {said}, {_units.nbytes(found.nbytes)}")
    head.append_text(text(f"  {found.handler}" if found.handler else "", FAINT))
    parts: list[RenderableType] = [Line(head)]
    if found.problem:
        parts.append(Fact(Text("wrong", BAD), text(found.problem, BAD, limit=2000), 6, 2))
    if found.custom_metadata:
        parts.append(Fact(Text("metadata", FAINT), text(str(found.custom_metadata), limit=400), _FACT, 2))
    if found.leaves:
        parts.append(tree.tree(found.leaves, total_nbytes, folding, owners=owners))
    if found.files:
        parts += _files(found)
    if found.nodes:  # a tree whose outermost groups are the nodes: they are much alike
        below = [(node, leaf) for node, own in found.nodes.items() for leaf in own.leaves]
        leaves = [dataclasses.replace(leaf, path=(node, *(leaf.path or (leaf.name,)))) for node, leaf in below]
        parts.append(tree.tree(leaves, total_nbytes, folding, owners=owners))
        parts += [
            Fact(text(node, BAD, limit=60), text(own.problem, BAD, limit=600), 12, 2)
            for node, own in found.nodes.items()
            if own.problem
        ]
    return Group(*parts)


def _files(found: ItemRow) -> Iterator[RenderableType]:
    columns = [
        Column(Text("file"), 0, least=30),
        Column(Text("bytes"), 1, right=True),
        Column(Text("node"), 2, least=16),
    ]
    lines = [[text(f.name), Text(_units.nbytes(f.nbytes)), text(f.node, FAINT)] for f in found.files[:_FILES]]
    yield Table(columns, lines, indent=2)
    if len(found.files) > _FILES:
        yield Text(f"  … {_units.count(len(found.files) - _FILES)} more files", FAINT)
