"""Drawings of a page: bars, strips of nodes, histograms, and arrays as rectangles of which each node has its parts."""

from __future__ import annotations

from collections import Counter

from epochckpt import _units
from epochckpt.inspection import sharding
from epochckpt.inspection.blocks import Bar, Histogram, Strip
from epochckpt.inspection.html.elements import Html, el, joined, text
from epochckpt.inspection.html.style import node_colour
from epochckpt.inspection.rows import ShardingRow
from epochckpt.inspection.sharding import Grid, NodeLabels

_STRIP = 64  # bars of one strip
_STRIPS = 2500  # bars of all strips of a page
_PARTS = 1024  # of an array that is drawn
_SIDE = 64  # of them along one side
_ALL_PARTS = 6 * _PARTS  # of all arrays of a page
_KEYS = 24  # nodes that are named below an array


class Drawings:
    """Draws as much as a page has room for."""

    def __init__(self) -> None:
        self._bars, self._parts = _STRIPS, _ALL_PARTS

    def of(self, drawing: Bar | Strip | Histogram | None) -> Html:
        """The drawing of a cell; empty if there is none, or no room."""
        if isinstance(drawing, Bar):
            return el("span", "bar", el("i", drawing.tone.value, style=f"width:{drawing.share * 100:.3g}%"))
        if isinstance(drawing, Histogram):
            return _histogram(drawing)
        return Html("") if drawing is None else self._strip(drawing)

    def _strip(self, strip: Strip) -> Html:
        """Nodes as a row of bars; the tip of each says which nodes it stands for."""
        fitted = strip.fitted(_STRIP)
        self._bars -= len(fitted)
        if self._bars < 0:
            return Html("")
        bars: list[Html] = []
        for mark, group in fitted:
            ends = " … ".join(group[end].tip.partition(" · ")[0] for end in (0, -1))
            tip = mark.tip if len(group) == 1 else f"{ends}: {mark.tip}"
            bars.append(el("i", mark.tone.value, title=tip, style=f"height:{max(round(100 * mark.level), 15)}%"))
        return el("span", "strip", *bars)

    def cut(self, lies: ShardingRow, labels: NodeLabels) -> Html:
        """An array, each of its parts in the colour of the node that wrote it, and the names of the nodes.

        An array in too many parts is described in words.
        """
        found = sharding.grid(lies)
        parts = found.down * found.across
        if parts <= min(_PARTS, self._parts) and max(found.down, found.across) <= _SIDE:
            self._parts -= parts
            return joined([_rectangle(found, labels), _keys(found, labels)])
        words = f"{_units.count(parts)} parts, not drawn"
        if shares := Counter(lies.owners).values():
            each = " to ".join(map(_units.count, sorted({min(shares), max(shares)})))
            words += f"; {_units.several(len(shares), 'node', 'nodes')} wrote {each} of them each"
        return el("div", "faint", words)


def _histogram(drawing: Histogram) -> Html:
    """A bar for each bin that holds something, and the ends of the scale."""
    width, height = 180, 34
    most, step = max(drawing.counts), width / len(drawing.counts)
    bars = "".join(
        f"M{place * step:.4g} {height}v-{max(n / most * (height - 2), 1):.3g}h{step * 0.9:.3g}V{height}z"
        for place, n in enumerate(drawing.counts)
        if n > 0
    )
    elements = f"{_units.count(sum(drawing.counts))} elements, {drawing.words}"
    said = f"histogram of {elements}; most in a bin: {_units.count(most)}"
    paths = el("path", "hist", d=Html(bars)), el("path", "axis", d=f"M0 {height}H{width}")
    return joined([_svg(width, height + 1, el("title", "", said), *paths), el("div", "faint", drawing.words)])


def _rectangle(found: Grid, labels: NodeLabels) -> Html:
    width, height = (240, 30) if found.down == 1 else (110, 150) if found.across == 1 else (240, 150)
    x, y = width / found.across, height / found.down
    fields: dict[str, str] = {}
    numbers: list[Html] = []
    for part, owner in enumerate(found.owners):
        row, column = divmod(part, found.across)
        fields[owner] = f"{fields.get(owner, '')}M{column * x:.4g} {row * y:.4g}h{x:.4g}v{y:.4g}h-{x:.4g}z"
        at = {"x": f"{(column + 0.5) * x:.5g}", "y": f"{(row + 0.5) * y:.5g}"}
        numbers.append(el("text", "ink", labels.label(owner), **at))
    drawn = [] if found.owners else [el("path", "blank", d=f"M0 0h{width}v{height}H0z")]
    for owner, path in fields.items():
        said = f"{owner or 'node not known'}: {found.owners.count(owner)} of {len(found.owners)} parts"
        drawn.append(el("path", "", el("title", "", said), fill=node_colour(labels.place(owner)), d=Html(path)))
    if min(x, y) >= 4:
        edges = [f"M{place * x:.5g} 0V{height}" for place in range(1, found.across)]
        edges += [f"M0 {place * y:.5g}H{width}" for place in range(1, found.down)]
        drawn.append(el("path", "edge", d=Html("".join(edges))))
    return _svg(width, height, *drawn, *(numbers if x >= 15 and y >= 11 else ()))


def _keys(found: Grid, labels: NodeLabels) -> Html:
    """Which label and colour is which node's."""
    nodes = labels.of(found.owners)
    keys: list[Html] = []
    for name, label in nodes[:_KEYS]:
        swatch = el("span", "swatch", label, style=f"background:{node_colour(labels.place(name))}")
        keys.append(el("span", "", swatch, text(name, 24)))
    if len(nodes) > _KEYS:
        keys.append(el("span", "faint", f"… {_units.count(len(nodes) - _KEYS)} more"))
    return el("div", "keys", *keys)


def _svg(width: int, height: int, *drawn: Html) -> Html:
    return el("svg", "", *drawn, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img")
