"""Drawing how arrays are cut over nodes: an array as a rectangle, each part in the colour of the node that wrote it.

Two dimensions are drawn as they are: rows are the first, columns the second. Of more, only those that are cut count:
the first of them gives the rows, all others together (in C order) the columns, so that every part is a field.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from epochckpt import _text, _units
from epochckpt.inspection.html.parts import Html, el, fold, joined, plural, text
from epochckpt.inspection.html.style import LIGHT, PREFIX, node_colour
from epochckpt.inspection.rows import LeafRow, ShardingRow

MAX_FIELDS = 1024
MAX_SIDE = 64
MAX_CARDS = 12
_NAMED = 8
_MAX_COLOURS = 256
_MAX_FIELDS_OF_A_VIEW = 6 * MAX_FIELDS
_MAX_THUMBS = 256


class Nodes:
    """The nodes of a view: each has a number to be written on its parts, and a colour.

    Args:
        names: of the nodes, in the order in which they are shown.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(dict.fromkeys(name for name in names if name))
        self._index = {name: i for i, name in enumerate(self.names)}
        digits = [match.group() if (match := re.search(r"[0-9]{1,3}$", name)) else "" for name in self.names]
        own = all(digits) and len(set(digits)) == len(digits)
        self._labels = digits if own else [str(i) for i in range(len(self.names))]

    def colour(self, name: str) -> str | None:
        """Its colour; None if it is not known which node."""
        return node_colour(self._index[name]) if name in self._index else None

    def label(self, name: str) -> str:
        """Its number: that of its name if every name ends in one of its own."""
        return self._labels[self._index[name]] if name in self._index else "?"

    def swatch(self, name: str) -> Html:
        """Its number on its colour."""
        colour = self.colour(name)
        style = f"background:{colour}" if colour else None
        return el("span", "swatch", self.label(name), title=_text.shown(name) or "not known", style=style)


def parts_of(sharding: ShardingRow) -> int:
    """Into how many parts it is cut."""
    return math.prod(sharding.counts)


def cut_words(sharding: ShardingRow) -> str:
    """How it is cut, shortly: `4×1`; empty if it is whole."""
    return "" if parts_of(sharding) == 1 else "×".join(map(str, sharding.counts))


class Thumbs:
    """Small drawings for the rows of a tree, each kept once, as a rule of the view's style.

    Two views with the same drawing have the same rule by the same name, so they do not disturb one another.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._fields = 0
        self._rules: dict[str, str] = {}
        self._known: dict[tuple[tuple[int, ...], tuple[str, ...]], Html] = {}

    def of(self, sharding: ShardingRow) -> Html:
        """The drawing of one array; empty if there are too many parts, or too many drawings."""
        key = (sharding.counts, sharding.owners)
        if key not in self._known:
            self._known[key] = self._of(sharding)
        return self._known[key]

    def _of(self, sharding: ShardingRow) -> Html:
        if not sharding.owners or not _drawn(sharding):
            return Html("")
        rows, columns = _sides(sharding)
        # Finer fields would run into one grey: some stand for all.
        ys, xs = (range(0, n, -(-n // most)) for n, most in ((rows, 7), (columns, 11)))
        owners = [sharding.owners[y * columns + x] for y in ys for x in xs]
        fields = "".join(
            f"<path fill='{self._nodes.colour(owner) or '#888'}' d='{path}'/>"
            for owner, path in _paths(owners, len(ys), len(xs), 44, 28)
        )
        edges = f"stroke='{LIGHT['ink']}' stroke-opacity='.5'"
        drawn = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 44 28' {edges}>{fields}</svg>"
        name = f"thumb-{hashlib.blake2s(drawn.encode(), digest_size=6).hexdigest()}"
        if name not in self._rules and len(self._rules) >= _MAX_THUMBS:
            return Html("")
        self._rules[name] = drawn.replace("#", "%23").replace("<", "%3C").replace(">", "%3E")
        return el("i", f"thumb {name}")

    def room(self, fields: int) -> bool:
        """Whether the view has room for a drawing of so many fields, which it then takes."""
        self._fields += fields
        return self._fields <= _MAX_FIELDS_OF_A_VIEW

    @property
    def style(self) -> str:
        """The rules. They hold numbers and colours only."""
        root = f".{PREFIX}.{PREFIX} .{PREFIX}-"
        return "".join(
            f'{root}{name}{{background-image:url("data:image/svg+xml,{drawn}")}}' for name, drawn in self._rules.items()
        )


def legend(leaves: Sequence[LeafRow], nodes: Nodes, thumbs: Thumbs) -> Html:
    """Every way in which these leaves are cut, drawn once, with the nodes that wrote the parts."""
    kinds: dict[object, list[tuple[LeafRow, ShardingRow]]] = {}
    for leaf in leaves:
        found = leaf.sharding
        if found is not None and parts_of(found) > 1:
            # Leaves cut alike are one way, whoever wrote them: owners take turns from leaf to leaf.
            key = (found.counts, found.spec, found.replicas, len(set(found.owners)))
            kinds.setdefault(key, []).append((leaf, found))
    if not kinds:
        return Html("")
    most = sorted(kinds.values(), key=len, reverse=True)
    cards = [_card(alike, nodes, thumbs) for alike in most[:MAX_CARDS]]
    many = any(len(set(alike[0][1].owners)) > _NAMED for alike in most[:MAX_CARDS])
    if most[MAX_CARDS:]:
        cards.append(el("div", "muted", f"and {plural(len(most) - MAX_CARDS, 'other way')} of cutting"))
    return joined(
        [
            el("div", "part", "How its arrays are cut over nodes"),
            el("div", "cards", *cards),
            *([_colours(nodes)] if many else []),
        ]
    )


def _colours(nodes: Nodes) -> Html:
    swatches = [nodes.swatch(name) for name in nodes.names[:_MAX_COLOURS]]
    more = len(nodes.names) - _MAX_COLOURS
    swatches += [el("span", "muted", f"and {_units.count(more)} more")] if more > 0 else []
    return fold(f"Colours of the {plural(len(nodes.names), 'node')}", el("div", "keys small wide", *swatches))


def _card(alike: Sequence[tuple[LeafRow, ShardingRow]], nodes: Nodes, thumbs: Thumbs) -> Html:
    leaf, first = alike[0]
    owners = sorted(set(first.owners), key=lambda name: nodes.names.index(name) if name in nodes.names else -1)
    turns = len({sharding.owners for _, sharding in alike}) > 1
    said = [
        el("b", "", f"{cut_words(first)} parts"),
        el("span", "muted", f" · {plural(len(alike), 'leaf')}, such as "),
        el("span", "mono", text(leaf.name, 50)),
    ]
    lines = [el("div", "", *said)]
    if first.spec:
        lines.append(el("div", "mono small", text(first.spec, 200)))
    if first.replicas > 1:
        lines.append(el("div", "small muted", f"each part was held by {plural(first.replicas, 'node')}, one wrote it"))
    if turns:
        lines.append(
            el("div", "small muted", "which node wrote which part differs from leaf to leaf; drawn: the first")
        )
    lines.append(_drawing(first, nodes) if _drawn(first) and thumbs.room(parts_of(first)) else _counted(first))
    keys = [el("span", "", nodes.swatch(name), text(name, 24)) for name in owners]
    if len(owners) > _NAMED:
        ends = [el("span", "", nodes.swatch(name), text(name, 24)) for name in (first.owners[0], first.owners[-1])]
        keys = [joined(["first part ", ends[0]]), joined(["last part ", ends[1]])]
    return el("div", "card", *lines, el("div", "keys small", *keys))


def _drawing(sharding: ShardingRow, nodes: Nodes) -> Html:
    """The array, cut: `MAX_FIELDS` parts at most."""
    rows, columns = _sides(sharding)
    width, height = (240, 30) if rows == 1 else (110, 150) if columns == 1 else (240, 150)
    fields: list[str] = []
    if not sharding.owners:
        fields.append(el("path", "blank", d=Html(f"M0 0h{width}v{height}H0z")))
    share = Counter(sharding.owners)
    for owner, path in _paths(sharding.owners, rows, columns, width, height):
        said = f"{owner or 'not known which node'}: {plural(share[owner], 'part')} of {parts_of(sharding)}"
        fields.append(el("path", "", el("title", "", said), fill=nodes.colour(owner) or "#888", d=Html(path)))
    lines = [f"M{x:.5g} 0V{height}" for x in (width * i / columns for i in range(1, columns))]
    lines += [f"M0 {y:.5g}H{width}" for y in (height * i / rows for i in range(1, rows))]
    if min(width / columns, height / rows) >= 4:
        fields.append(el("path", "edge", d=Html("".join(lines))))
    if width / columns >= 15 and height / rows >= 11:
        fields += _labels(sharding, nodes, width, height)
    said = [f"rows: {_dims(sharding, _first(sharding)[0])}"] if rows > 1 else []
    said += [f"columns: {_dims(sharding, _first(sharding)[1])}"] if columns > 1 else []
    svg = el(
        "svg",
        "",
        *fields,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=f"an array cut into {cut_words(sharding)} parts",
    )
    return joined([svg, el("div", "small muted", "; ".join(said))])


def _labels(sharding: ShardingRow, nodes: Nodes, width: int, height: int) -> Iterator[Html]:
    rows, columns = _sides(sharding)
    for i, owner in enumerate(sharding.owners):
        y, x = divmod(i, columns)
        yield el(
            "text",
            "ink",
            nodes.label(owner),
            x=f"{(x + 0.5) * width / columns:.5g}",
            y=f"{(y + 0.5) * height / rows:.5g}",
        )


def _counted(sharding: ShardingRow) -> Html:
    share = Counter(sharding.owners)
    lines = [el("div", "", f"{_units.count(parts_of(sharding))} parts, not drawn")]
    if share:
        low, high = min(share.values()), max(share.values())
        each = _units.count(low) if low == high else f"{_units.count(low)} to {_units.count(high)}"
        lines.append(el("div", "", f"{plural(len(share), 'node')} wrote {each} of them each"))
    return el("div", "note small", *lines)


def _drawn(sharding: ShardingRow) -> bool:
    parts = parts_of(sharding)
    if parts < 1 or parts > MAX_FIELDS or max(_sides(sharding)) > MAX_SIDE:
        return False
    return len(sharding.owners) in (0, parts)


def _first(sharding: ShardingRow) -> tuple[list[int], list[int]]:
    """Dimensions along the rows, and along the columns."""
    cut = [i for i, n in enumerate(sharding.counts) if n > 1]
    if len(cut) == 1 and (len(sharding.counts) == 1 or cut[0] > 0):
        return [], cut
    return cut[:1], cut[1:]


def _sides(sharding: ShardingRow) -> tuple[int, int]:
    rows, columns = _first(sharding)
    return math.prod(sharding.counts[i] for i in rows), math.prod(sharding.counts[i] for i in columns)


def _dims(sharding: ShardingRow, dims: Sequence[int]) -> str:
    return f"dimension {' × '.join(map(str, dims))}, cut in {'×'.join(str(sharding.counts[i]) for i in dims)}"


def _paths(owners: Sequence[str], rows: int, columns: int, width: int, height: int) -> Iterator[tuple[str, str]]:
    """The fields of each owner, as one path."""
    step_x, step_y = width / columns, height / rows
    fields: dict[str, list[str]] = {}
    for i, owner in enumerate(owners):
        y, x = divmod(i, columns)
        fields.setdefault(owner, []).append(
            f"M{x * step_x:.4g} {y * step_y:.4g}h{step_x:.4g}v{step_y:.4g}h-{step_x:.4g}z"
        )
    return ((owner, "".join(path)) for owner, path in fields.items())


def owners_of(leaves: Iterable[LeafRow]) -> list[str]:
    """The nodes that wrote any part of these, in the order of their numbers."""
    found = {owner for leaf in leaves if leaf.sharding is not None for owner in leaf.sharding.owners if owner}
    return sorted(found, key=lambda name: [s.zfill(9) for s in re.split(r"([0-9]{1,9})", name)])
