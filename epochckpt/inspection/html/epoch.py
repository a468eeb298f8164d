"""One epoch as HTML: its state, its nodes, what was noted with it, and its items with their trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from epochckpt import _text, _units
from epochckpt.inspection import rows, run_notes
from epochckpt.inspection.html.parts import (
    Html,
    el,
    few,
    fold,
    joined,
    level,
    listed,
    optional,
    plural,
    share,
    state,
    strip,
    text,
    value,
)
from epochckpt.inspection.html.sharding import Nodes, Thumbs, legend, owners_of
from epochckpt.inspection.html.tree import MAX_CHARS, tree
from epochckpt.inspection.rows import EpochDetail, EpochRow, FileRow, ItemRow, NodeRow

_MAX_NODES = 256
_OPEN_NODES = 8
_MAX_FILES = 200
_MAX_ITEMS = 40
_MAX_ITEM_NODES = 16
_MAX_LEFT_OUT = 40
_MAX_NOTES = 20


def epoch(found: EpochDetail, thumbs: Thumbs, nodes: Nodes) -> Html:
    """The whole view, without its page."""
    row = dataclasses.replace(found.row, metrics=rows.flat(found.row.metrics))
    marks = [el("span", "chip busy", "latest")] * row.latest + [el("span", "chip good", "★ best")] * row.best
    parts = [el("div", "title", f"Epoch {row.epoch} ", *_spaced([state(row.state), *marks]))]
    parts.append(el("div", "facts", *_facts(found)))
    if row.detail:
        parts.append(el("div", "note bad" if row.state == rows.DAMAGED else "note idle", text(row.detail, 600)))
    if row.metrics:
        parts.append(el("div", "facts", *(_metric(row, name) for name in list(row.metrics)[:40])))
    parts += _nodes(row, nodes)
    if row.custom_metadata:
        parts.append(fold("Custom metadata", listed(row.custom_metadata), open=len(row.custom_metadata) <= 6))
    noted = run_notes.told(row.notes)
    if noted:
        lines = [
            part for title, said in noted[:_MAX_NOTES] for part in (el("dt", "", title), el("dd", "", text(said, 400)))
        ]
        parts.append(fold("Noted by the runner", el("dl", "", *lines), open=len(noted) <= 6))
    parts += _unsupported(found)
    shown = found.items[:_MAX_ITEMS]
    per_leaf = chars_per_leaf(shown)
    for each in shown:
        parts.append(
            item(
                each,
                row.nbytes,
                thumbs,
                nodes,
                per_leaf,
                open=each.kind == "arrays" or len(shown) == 1,
            )
        )
    if found.items[_MAX_ITEMS:]:
        parts.append(el("div", "muted", f"and {few([i.name for i in found.items[_MAX_ITEMS:]], 8)}"))
    return joined(parts)


def item(found: ItemRow, total: int, thumbs: Thumbs, nodes: Nodes, per_leaf: float, open: bool = True) -> Html:
    """One item. `total`: the bytes of the epoch, which its shares are of; `per_leaf`: see `chars_per_leaf`."""
    total = max(total, found.nbytes)
    kinds = {"arrays": plural(len(found.leaves), "leaf"), "files": plural(len(found.files), "file")}
    what = kinds.get(found.kind, f"of each node's own, {plural(len(found.nodes), 'node')}")
    said = [f"{what}, {_units.nbytes(found.nbytes)}"]
    said += [_text.shown(found.handler, 40)] if found.handler else []
    title = [el("b", "", "Item "), el("b", "mono", text(found.name, 80)), el("span", "muted", f" · {' · '.join(said)}")]
    parts: list[Html] = []
    if found.problem:
        parts.append(el("div", "note bad", text(found.problem, 600)))
    if found.custom_metadata:
        meta = found.custom_metadata if isinstance(found.custom_metadata, Mapping) else {"value": found.custom_metadata}
        parts.append(fold("Custom metadata", listed(meta)))
    if found.leaves:
        parts += [tree(found.leaves, total, nodes, thumbs, per_leaf), legend(found.leaves, nodes, thumbs)]
    if found.files:
        parts.append(_files(found.files, total))
    for name, own in list(found.nodes.items())[:_MAX_ITEM_NODES]:
        words = f" · {plural(len(own.leaves), 'leaf')}, {_units.nbytes(own.nbytes)}"
        problem = [el("div", "note bad", text(own.problem, 600))] if own.problem else []
        line = joined([nodes.swatch(name), el("span", "mono", text(name, 80)), el("span", "muted", words)])
        parts.append(fold(line, *problem, *([tree(own.leaves, total, nodes, thumbs, per_leaf)] if own.leaves else [])))
    more = list(found.nodes)[_MAX_ITEM_NODES:]
    if more:
        parts.append(el("div", "muted", f"and {few(more)}, not listed"))
    if not parts:
        parts.append(el("div", "muted", "It is empty."))
    return fold(joined(title), *parts, open=open, classes="item")


def chars_per_leaf(items: Sequence[ItemRow]) -> float:
    """How many characters each leaf may take on average, for all trees of a view to stay within `MAX_CHARS`."""
    leaves = sum(len(each.leaves) + sum(len(own.leaves) for own in each.nodes.values()) for each in items)
    return MAX_CHARS / max(leaves, 1)


def nodes_of(found: EpochDetail) -> Nodes:
    """The nodes of an epoch, for the colours that all of its items have in common."""
    named = [n.name for n in found.row.nodes]
    return Nodes([*named, *(name for each in found.items for name in item_nodes(each))])


def item_nodes(found: ItemRow) -> list[str]:
    """The nodes that wrote something of an item."""
    return [*found.nodes, *owners_of(found.leaves)]


def _facts(found: EpochDetail) -> list[Html]:
    row = found.row
    facts = [f"{_units.nbytes(row.nbytes)} in {plural(len(found.items), 'item')}"]
    if row.nodes:
        facts[0] += f", from {plural(len(row.nodes), 'node')}"
    if row.committed_ns is not None:
        facts.append(f"committed {_units.when(row.committed_ns)}")
    elif row.age_secs is not None:
        facts.append(f"last write {_units.secs(row.age_secs)} ago")
    if row.secs is not None:
        facts.append(f"saved in {_units.secs(row.secs)}")
    if row.blocked_secs is not None:
        facts.append(f"training blocked {_units.secs(row.blocked_secs)}")
    if row.writer == "orbax":
        facts.append("written by stock Orbax")
    if row.state == rows.COMMITTED and not row.checked:
        facts.append("its files were not looked at")
    spans = [el("span", "", fact) for fact in facts]
    where = el("span", "muted", "in folder ", el("span", "mono", text(row.folder, 120)))
    return [*spans, where] if row.folder else spans


def _metric(row: EpochRow, name: str) -> Html:
    source = f"attached by {row.sources[name]}" if name in row.sources else None
    star = "★ " if row.best else ""
    said = el("b", "", text(value(row.metrics[name]), 60))
    return el(
        "span",
        "",
        el("span", "muted", f"{star if len(row.metrics) == 1 else ''}{_text.shown(name, 60)} "),
        said,
        title=source,
    )


def _nodes(row: EpochRow, nodes: Nodes) -> list[Html]:
    if not row.nodes:
        return []
    slowest = row.slowest_node
    if len(row.nodes) <= _OPEN_NODES:
        return [_node_table(row.nodes, slowest, nodes)]
    said = f"{plural(len(row.nodes), 'node')}"
    said += f", slowest {_text.shown(slowest, 40)}" if slowest is not None else ""
    broken = [n.name for n in row.nodes if n.state == rows.DAMAGED]
    wrong = [el("span", "bad", f" · ✗ {few(broken)}")] if broken else []
    more = len(row.nodes) - _MAX_NODES
    rest = [el("div", "muted", f"and {plural(more, 'more node')}")] if more > 0 else []
    return [
        strip(row.nodes, slowest),
        fold(joined([said, *wrong]), _node_table(row.nodes[:_MAX_NODES], slowest, nodes), *rest),
    ]


def _node_table(shown: Sequence[NodeRow], slowest: str | None, nodes: Nodes) -> Html:
    total = max(n.nbytes for n in shown)
    longest = max((n.secs or 0.0 for n in shown), default=0.0)
    lines: list[Html] = []
    for n in shown:
        bad = n.state != rows.COMMITTED
        name = joined([nodes.swatch(n.name), el("span", "mono", text(n.name, 80))])
        mark = [el("span", "chip", "slowest")] if n.name == slowest else []
        said = [state(n.state) if n.state == rows.DAMAGED else el("span", "chip busy", n.state)] if bad else mark
        said += [el("span", "bad", text(f" {n.detail}", 300))] if n.detail else []
        size = el("td", "num", _units.nbytes(n.nbytes))
        secs = el("td", "num", optional(n.secs, _units.secs))
        bars = el("td", "", _bar(n.nbytes, total)), el("td", "", _bar(n.secs or 0.0, longest))
        lines.append(el("tr", "row", el("td", "", name), size, bars[0], secs, bars[1], el("td", "", *said)))
    widths = ["30%", "6em", "8em", "6em", "8em", "20%"]
    columns = el("colgroup", "", *(el("col", "", style=f"width:{width}" if width else None) for width in widths))
    heads = [("", "Node"), ("num", "Size"), ("", ""), ("num", "Wrote for"), ("", ""), ("", "")]
    head = el("thead", "", el("tr", "", *(el("th", classes, word) for classes, word in heads)))
    return el("div", "scroll", el("table", "", columns, head, el("tbody", "", *lines)))


def _bar(part: float, whole: float) -> Html:
    return level(part / whole if whole > 0 else 0.0, alone=True)


def _unsupported(found: EpochDetail) -> list[Html]:
    if found.row.state != rows.COMMITTED:
        return []
    if found.unsupported is None or "*" in found.unsupported:
        why = "; ".join((found.unsupported or {}).get("*", {}).values())
        said = text(f"Stock Orbax cannot read this epoch as it lies here{why and ': '}{why}.", 300)
        return [] if found.row.writer == "orbax" else [el("div", "muted", said)]
    wrong = [(i, leaf, why) for i, leaves in found.unsupported.items() for leaf, why in leaves.items()]
    if not wrong:
        return [el("div", "muted", "Stock Orbax can read all of it.")]
    lines = [
        part
        for i, leaf, why in wrong[:_MAX_LEFT_OUT]
        for part in (el("dt", "mono", text(f"{i}: {_text.readable(leaf)}", 100)), el("dd", "", text(why, 300)))
    ]
    more = len(wrong) - _MAX_LEFT_OUT
    lines += [el("dt", "", "…"), el("dd", "muted", f"{_units.count(more)} more")] if more > 0 else []
    return [fold(f"Stock Orbax can read all of it but {plural(len(wrong), 'leaf')}", el("dl", "", *lines))]


def _files(files: Sequence[FileRow], total: int) -> Html:
    head = el(
        "tr", "", *(el("th", c, word) for c, word in [("", "File"), ("", "Node"), ("num", "Size"), ("", "Share")])
    )
    body = [
        el(
            "tr",
            "row",
            el("td", "mono", text(f.name, 120)),
            el("td", "mono", text(f.node, 60) if f.node else "–"),
            el("td", "num", _units.nbytes(f.nbytes)),
            el("td", "", share(f.nbytes, total)),
        )
        for f in files[:_MAX_FILES]
    ]
    more = files[_MAX_FILES:]
    said = f"and {plural(len(more), 'more file')}, {_units.nbytes(sum(f.nbytes for f in more))}"
    columns = el("colgroup", "", *(el("col", "", style=f"width:{w}" if w else None) for w in ["", "", "6em", "9em"]))
    table = el("table", "", columns, el("thead", "", head), el("tbody", "", *body))
    return el("div", "scroll", table, *([el("div", "muted", said)] if more else []))


def _spaced(parts: Sequence[Html]) -> list[Html]:
    return [joined(parts, " ")]
