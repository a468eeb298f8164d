"""What HTML views are built from: elements that escape by themselves, and the parts that several views share.

A `str` that becomes part of an element is escaped, `Html` is not; so nothing of a row reaches a page as markup, and
every tag is closed.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from epochckpt import _text, _units
from epochckpt.inspection import rows
from epochckpt.inspection.html.style import PREFIX, css

SIGNS = {
    rows.COMMITTED: ("✓", "good"),
    rows.DAMAGED: ("✗", "bad"),
    rows.IN_PROGRESS: ("◐", "busy"),
    rows.ABANDONED: ("○", "idle"),
}
MAX_STRIP = 64
_VOID = frozenset({"col", "wbr"})


class Html(str):
    """Markup: made by the functions here, or by the code from numbers alone (the path of a drawing)."""

    __slots__ = ()


def el(tag: str, classes: str = "", *children: str, **attributes: str | float | None) -> Html:
    """One element. Children and values of attributes that are plain `str` are escaped.

    Args:
        tag: its name, a constant of the code.
        classes: names without the prefix, separated by spaces.
        *children: what is in it.
        **attributes: by name (`_` for `-`), constants of the code; None: left out.
    """
    named = f' class="{" ".join(f"{PREFIX}-{name}" for name in classes.split())}"' if classes else ""
    rest = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, Html) else text(str(value), 400)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Html(f"<{tag}{named}{rest}>")
    return Html(f"<{tag}{named}{rest}>{joined(children)}</{tag}>")


def joined(children: Iterable[str], between: str = "") -> Html:
    """Several parts, one after another."""
    glue = between if isinstance(between, Html) else text(between)
    return Html(glue.join(child if isinstance(child, Html) else text(child) for child in children))


def text(content: str, limit: int = _text.LIMIT) -> Html:
    """Text of anybody, as markup that shows it."""
    return Html(_text.html(content, limit))


def named(name: str, limit: int = _text.LIMIT) -> Html:
    """A path, with room for a line break after each of its slashes."""
    return joined(_text.shown(name, limit).split("/"), Html(f"/{el('wbr')}"))


def page(*parts: str, style: str = "") -> Html:
    """A whole view: the style and the root. `style` are rules of this view's own, made by the code."""
    return Html(f'<div class="{PREFIX}"><style>{css()}{style}</style>{joined(parts)}</div>')


def fold(summary: str, *children: str, open: bool = False, classes: str = "") -> Html:
    """What opens with a click, without a script."""
    return el("details", classes, el("summary", "", summary), *children, open="" if open else None)


def state(word: str, count: int | None = None) -> Html:
    """A state as sign, word and colour, and how many are in it. Nobody needs to see the colour."""
    sign, colour = SIGNS.get(word, ("·", "muted"))
    many = "" if count is None else f"{_units.count(count)} "
    return el("span", f"chip {colour}", f"{sign} {many}{word}")


def level(share: float, alone: bool = False) -> Html:
    """A bar, `share` of 1 long; thin below a number, thicker alone."""
    width = min(max(share, 0.0), 1.0) * 100 if share == share else 0.0
    return el("span", "level alone" if alone else "level", el("i", "", style=f"width:{width:.3g}%"))


def share(part: float, whole: float) -> Html:
    """What share of the whole a part is: bar and percent."""
    of = part / whole if whole > 0 else 0.0
    return el("span", "share", level(of), el("b", "", percent(of) if whole > 0 else ""))


def percent(of: float) -> str:
    """A share of 1 for people: `<0.1%`, `0.66%`, `5.3%`, `31%`."""
    return "<0.1%" if 0 < of < 0.001 else f"{of * 100:.2g}%" if of < 0.0995 else f"{of:.0%}"


def plural(n: int, word: str) -> str:
    """`1 leaf`, `2 leaves`, `3 nodes`."""
    many = word[:-1] + "ves" if word.endswith("f") else word + "s"
    return f"{_units.count(n)} {word if n == 1 else many}"


def few(names: Sequence[str], most: int = 3, limit: int = 40) -> str:
    """The first names, and how many more there are."""
    said = ", ".join(_text.shown(name, limit) for name in names[:most])
    return said + (f" and {_units.count(len(names) - most)} more" if len(names) > most else "")


def optional(value: float | None, write: Callable[[float], str]) -> str:
    """A figure, or a dash where it is not known."""
    return "–" if value is None else write(value)


def value(found: object) -> str:
    """What a caller attached, shortly: figures as figures, the rest as Python would write it."""
    if isinstance(found, (int, float)):
        return _units.number(found)
    return found if isinstance(found, str) else _SHORT.repr(found)


def listed(found: Mapping[str, object], most: int = 40) -> Html:
    """Names and values, nested ones by their dotted path."""
    pairs = list(_flat(found, "", 5))
    lines = [(text(name, 80), text(value(each), 300)) for name, each in pairs[:most]]
    lines += [(Html("…"), text(f"{_units.count(len(pairs) - most)} more"))] if pairs[most:] else []
    return el("dl", "", *(part for name, each in lines for part in (el("dt", "mono", name), el("dd", "", each))))


def strip(nodes: Sequence[rows.NodeRow], slowest: str | None) -> Html:
    """Nodes as a row of bars, as high as they were slow; what each is says its tooltip."""
    per = -(-len(nodes) // MAX_STRIP) or 1
    groups = [nodes[i : i + per] for i in range(0, len(nodes), per)]
    longest = max((n.secs or 0.0 for n in nodes), default=0.0)
    cells = [_cell(group, longest, slowest) for group in groups]
    said = plural(len(nodes), "node") + (f", slowest {slowest}" if slowest else "")
    return el("span", "strip many" if len(groups) > 16 else "strip", *cells, role="img", aria_label=said)


def node_words(node: rows.NodeRow) -> str:
    """A node in one line."""
    known = [_text.shown(node.name, 60), _units.nbytes(node.nbytes)]
    known += [_units.secs(node.secs)] if node.secs is not None else []
    known += [node.state] if node.state != rows.COMMITTED else []
    return " · ".join(known + ([node.detail] if node.detail else []))


def _cell(group: Sequence[rows.NodeRow], longest: float, slowest: str | None) -> Html:
    secs = max((n.secs or 0.0 for n in group), default=0.0)
    states = {n.state for n in group}
    mark = "bad" if rows.DAMAGED in states else "writing" if "writing" in states else ""
    mark = mark or ("written" if "written" in states else "slow" if any(n.name == slowest for n in group) else "")
    flat = mark in ("bad", "writing", "written") or not 0 < longest < math.inf or not secs <= longest
    height = 100 if flat else round(100 * max(secs / longest, 0.15))
    if len(group) == 1:
        said = node_words(group[0])
    else:
        ends = f"{_text.shown(group[0].name, 40)} … {_text.shown(group[-1].name, 40)}"
        said = f"{ends} · {_units.nbytes(sum(n.nbytes for n in group))} · up to {_units.secs(secs)}"
    return el("i", mark, title=said, style=f"height:{height}%")


def _flat(found: Mapping[str, object], before: str, depth: int) -> Iterable[tuple[str, object]]:
    for name, each in found.items():
        path = f"{before}{name}"
        if isinstance(each, Mapping) and each and depth > 1:
            yield from _flat(each, f"{path}.", depth - 1)
        else:
            yield path, each


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 3, 8, 12, 120, 120
