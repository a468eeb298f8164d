"""A directory of checkpoints as HTML: one row per epoch, newest first, with its nodes as a strip of bars."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from epochckpt import _text, _units
from epochckpt.inspection import rows
from epochckpt.inspection.html.parts import (
    MAX_STRIP,
    Html,
    el,
    few,
    fold,
    joined,
    level,
    optional,
    plural,
    state,
    strip,
    text,
    value,
)
from epochckpt.inspection.rows import EpochRow, LeftoverRow, Overview

SHOWN = 20
MAX_ROWS = 500
MAX_METRICS = 3
_MAX_CELLS = 4000
_MAX_REMAINS = 100
_MAX_PROBLEMS = 20

_HELP = (
    ("committed", "every node finished; the epoch can be restored"),
    ("damaged", "the epoch cannot be read, or files are missing or have other sizes than recorded; it is never loaded"),
    ("in progress", "a save that something was written to lately; it is not yet an epoch"),
    ("abandoned", "a save that failed or died; no reader looks at it"),
)


def overview(found: Overview) -> Html:
    """The whole view, without its page."""
    newest = [dataclasses.replace(row, metrics=rows.flat(row.metrics)) for row in found.epochs]
    newest.sort(key=lambda row: row.epoch, reverse=True)
    table = _Table(found, newest[:MAX_ROWS])
    parts = [el("div", "title", "Checkpoints in ", el("span", "mono", text(found.directory, 200)))]
    parts.append(el("div", "facts", *_facts(found, newest)))
    parts += _problems(found.problems)
    if not newest:
        parts.append(el("div", "note", "No epoch has been committed here yet."))
        return joined(parts + _remains(found.leftovers))
    parts.append(table.of(newest[:SHOWN]))
    older = newest[SHOWN:MAX_ROWS]
    if older:
        best = next((f", with the best: {row.epoch}" for row in older if row.best), "")
        words = f"{plural(len(older), 'older epoch')}, {older[-1].epoch} to {older[0].epoch}{best}"
        parts.append(fold(words, table.of(older, 160)))
    hidden = found.hidden + len(newest[MAX_ROWS:])
    if hidden:
        size = found.hidden_nbytes + sum(row.nbytes for row in newest[MAX_ROWS:])
        parts.append(el("div", "muted", f"{plural(hidden, 'older epoch')} not shown, {_units.nbytes(size)}"))
    return joined([*parts, *_remains(found.leftovers), _help()])


def _facts(found: Overview, newest: Sequence[EpochRow]) -> list[Html]:
    states = Counter(row.state for row in newest)
    epochs = [row for row in newest if row.state in (rows.COMMITTED, rows.DAMAGED)]
    size = sum(row.nbytes for row in epochs) + found.hidden_nbytes
    count = plural(len(epochs) + found.hidden, "epoch")
    facts = [el("span", "", el("b", "", count), f", {_units.nbytes(size)}")]
    latest = next((row for row in newest if row.latest), None)
    if latest is not None:
        when = f", {_units.when(latest.committed_ns)}" if latest.committed_ns is not None else ""
        facts.append(el("span", "", "latest ", el("b", "", str(latest.epoch)), when))
    best = next((row for row in newest if row.best), None)
    if best is not None:
        how = f" by {_text.shown(found.metric, 40)} ({found.mode}): {value(best.metrics.get(found.metric))}"
        facts.append(el("span", "", "best ", el("b", "", str(best.epoch)), how if found.metric else ""))
    counts = sorted({len(row.nodes) for row in newest if row.nodes and row.state == rows.COMMITTED})
    if counts:
        ends = (
            _units.count(counts[0]) if len(counts) == 1 else f"{_units.count(counts[0])} to {_units.count(counts[-1])}"
        )
        facts.append(el("span", "", f"{ends} {'node' if counts[-1] == 1 else 'nodes'} each"))
    for word in (rows.DAMAGED, rows.IN_PROGRESS, rows.ABANDONED):
        if states[word]:
            facts.append(state(word, states[word]))
    unchecked = sum(row.state == rows.COMMITTED and not row.checked for row in newest)
    if unchecked:
        facts.append(el("span", "muted", f"files of {plural(unchecked, 'epoch')} were not looked at"))
    return facts


def _problems(problems: Mapping[str, str]) -> list[Html]:
    shown = [
        el("div", "note bad", el("span", "mono", text(path, 120)), ": ", text(why, 400))
        for path, why in list(problems.items())[:_MAX_PROBLEMS]
    ]
    more = len(problems) - _MAX_PROBLEMS
    return [*shown, el("div", "note bad", f"and {plural(more, 'more problem')}")] if more > 0 else shown


class _Table:
    """Columns and scales, the same for newer and older epochs."""

    def __init__(self, found: Overview, epochs: Sequence[EpochRow]) -> None:
        names = dict.fromkeys([found.metric] if found.metric else [])
        names.update(dict.fromkeys(name for row in epochs for name in row.metrics))
        self._names = list(names)[:MAX_METRICS]
        self._left_out = list(names)[MAX_METRICS:]
        self._most_nbytes = max((row.nbytes for row in epochs), default=0)
        self._most_secs = max((row.secs or 0.0 for row in epochs), default=0.0)
        self._cells = _MAX_CELLS
        self._metric = found.metric

    def of(self, epochs: Sequence[EpochRow], words: int = 600) -> Html:
        """The table of some epochs. Reasons have up to `words` characters."""
        heads = [
            ("", "Epoch", None),
            ("", "State", None),
            ("num", "Size", "of its files, all nodes together"),
            ("num", "Saved in", "from the call of save to the commit"),
            ("num", "Held", "how long the training thread was kept from going on"),
            ("cut", "Committed", "local time; of a save that is not: when something was last written"),
            *(("num cut", _text.shown(name, 24), _text.shown(name)) for name in self._names),
            ("", "Nodes", "a bar each, as high as it was slow; the slowest stands out"),
        ]
        strips = any(len(row.nodes) > 1 for row in epochs)
        # In em; the last column takes what is left of the page's width.
        widths = [7.4, 8.3, 5.6, 5.0, 4.8, 10.4, *([6.2] * len(self._names)), 8.8 if strips else 7.0]
        columns = el("colgroup", "", *(el("col", "", style=f"width:{width}em") for width in widths[:-1]), el("col"))
        head = el("thead", "", el("tr", "", *(el("th", classes, word, title=why) for classes, word, why in heads)))
        body = el("tbody", "", *(part for row in epochs for part in self._row(row, words)))
        least = f"min-width:{sum(widths):.4g}em"
        return el("div", "scroll", el("table", "fixed", columns, head, body, style=least))

    def _row(self, row: EpochRow, words: int) -> list[Html]:
        marks = [("latest", "busy")] * row.latest + [("★ best", "good")] * row.best
        epoch = [
            el("b", "epoch", str(row.epoch)),
            *(Html(f" {el('span', f'chip small {c}', word)}") for word, c in marks),
        ]
        other = [el("div", "small muted", "by stock Orbax")] if row.writer == "orbax" else []
        cells = [
            el("td", "", *epoch),
            el("td", "", state(row.state), *other),
            el("td", "num", _units.nbytes(row.nbytes), self._level(row.nbytes, self._most_nbytes)),
            el("td", "num", optional(row.secs, _units.secs), self._level(row.secs or 0.0, self._most_secs)),
            el("td", "num", optional(row.blocked_secs, _units.secs)),
            el("td", "cut", _when(row)),
            *(self._measured(row, name) for name in self._names),
            el("td", "", self._nodes(row)),
        ]
        lines = [el("tr", "row", *cells)]
        why = [row.detail] if row.detail else [f"{n.name}: {n.detail}" for n in row.nodes if n.detail][:4]
        rest = [name for name in self._left_out if name in row.metrics]
        if why:
            colour = "bad" if row.state == rows.DAMAGED else "muted"
            said = el("div", colour, text("; ".join(why), words))
            lines.append(el("tr", "why", el("td", "", said, colspan=len(cells))))
        if rest:
            pairs = [f"{_text.shown(name, 24)} {_text.shown(value(row.metrics[name]), 24)}" for name in rest[:12]]
            more = f" and {plural(len(rest) - 12, 'more metric')}" if len(rest) > 12 else ""
            said = el("div", "small muted", text(", ".join(pairs) + more, words))
            lines.append(el("tr", "why", el("td", "", said, colspan=len(cells))))
        return lines

    def _level(self, part: float, whole: float) -> Html:
        return level(part / whole) if part > 0 and whole > 0 else Html("")

    def _measured(self, row: EpochRow, name: str) -> Html:
        if name not in row.metrics:
            return el("td", "num muted", "–")
        said = _text.shown(value(row.metrics[name]), 60)
        source = f"{said}, attached by {row.sources[name]}" if name in row.sources else said
        return el("td", "num cut", el("b" if row.best and name == self._metric else "span", "", said), title=source)

    def _nodes(self, row: EpochRow) -> Html:
        if not row.nodes:
            return el("span", "muted", "–")
        slowest = row.slowest_node
        broken = [n.name for n in row.nodes if n.state == rows.DAMAGED]
        if broken:
            words = el("div", "small bad", f"✗ {few(broken)}")
        elif slowest is not None:
            secs = next(n.secs for n in row.nodes if n.name == slowest)
            words = el("div", "small muted", f"slowest {_text.shown(slowest, 30)} {optional(secs, _units.secs)}")
        else:
            many = plural(len(row.nodes), "node") if len(row.nodes) > 1 else few([n.name for n in row.nodes])
            words = el("div", "small muted", many)
        cells = min(len(row.nodes), MAX_STRIP)
        if cells == 1 or cells > self._cells:
            return words
        self._cells -= cells
        return joined([strip(row.nodes, slowest), words])


def _when(row: EpochRow) -> Html:
    if row.committed_ns is not None:
        when = _units.when(row.committed_ns)
        return el("span", "", when.rpartition(":")[0] or when, title=when)
    if row.age_secs is not None:
        ago = f"{_units.secs(row.age_secs)} ago"
        return el("span", "muted", ago, title=f"something was last written {ago}")
    return el("span", "muted", "–")


def _remains(remains: Sequence[LeftoverRow]) -> list[Html]:
    if not remains:
        return []
    heads = [("", "What"), ("num", "Size"), ("num", "Last write"), ("", "Where")]
    head = el("tr", "", *(el("th", classes, word) for classes, word in heads))
    body = [
        el(
            "tr",
            "row",
            el("td", "", el("b", "", row.kind), _about(row)),
            el("td", "num", _units.nbytes(row.nbytes)),
            el("td", "num", "–" if row.age_secs is None else f"{_units.secs(row.age_secs)} ago"),
            el("td", "mono", text(row.path, 120)),
        )
        for row in remains[:_MAX_REMAINS]
    ]
    more = len(remains) - _MAX_REMAINS
    rest = [el("div", "muted", f"and {_units.count(more)} more")] if more > 0 else []
    size = _units.nbytes(sum(row.nbytes for row in remains))
    words = f"{plural(len(remains), 'other thing')} here that no reader looks at, {size}"
    table = el("table", "", el("thead", "", head), el("tbody", "", *body))
    return [fold(words, el("div", "scroll", table), *rest)]


def _about(row: LeftoverRow) -> Html:
    said = f" {plural(len(row.epochs), 'epoch')}: {few([str(n) for n in row.epochs], 8)}" if row.epochs else ""
    return joined([text(said), *([el("div", "small muted", text(row.detail, 300))] if row.detail else [])])


def _help() -> Html:
    lines = [part for word, why in _HELP for part in (el("dt", "", state(word)), el("dd", "", why))]
    nodes = "a bar each, as high as it was slow; the slowest stands out, a damaged one is hatched; point at it for more"
    lines += [el("dt", "", "Nodes"), el("dd", "", nodes)]
    lines += [el("dt", "", "Held"), el("dd", "", "how long the training thread waited for the save")]
    return fold("What this means", el("dl", "small", *lines), classes="muted")
