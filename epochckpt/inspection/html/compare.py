"""Statistics of arrays, and the difference of two epochs, as HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from epochckpt import _text, _units
from epochckpt.inspection import rows
from epochckpt.inspection.html.parts import Html, el, few, fold, joined, level, named, optional, percent, plural, text
from epochckpt.inspection.rows import Diff, DiffRow, LeafRow, LeafStats

_MAX_STATS = 200
_MAX_CHANGED = 200
_MAX_OTHERS = 100
_MAX_PROBLEMS = 20

_KINDS = (
    (rows.CHANGED, "≠", "busy"),
    (rows.ADDED, "+", "good"),
    (rows.REMOVED, "−", "bad"),
    (rows.RESHAPED, "⇲", "idle"),
    (rows.RETYPED, "⇄", "idle"),
    (rows.UNCHANGED, "=", "muted"),
)


def stats(found: Sequence[LeafStats]) -> Html:
    """The whole view, without its page."""
    wrong = [each for each in found if each.nans or each.infs]
    elements = _units.count(sum(each.count for each in found))
    facts = [el("span", "", el("b", "", plural(len(found), "array")), f", {elements} elements")]
    if wrong:
        names = few([each.leaf.name for each in wrong])
        facts.append(el("span", "bad", f"✗ NaN or Inf in {len(wrong)}: {names}"))
    elif found:
        facts.append(el("span", "good", "✓ no NaN, no Inf"))
    parts = [el("div", "title", "Statistics"), el("div", "facts", *facts)]
    if found:
        # Arrays that something is wrong with come first where not all are shown.
        shown = list(found) if len(found) <= _MAX_STATS else [*wrong, *(e for e in found if not (e.nans or e.infs))]
        parts.append(_stats_table(shown[:_MAX_STATS]))
    if len(found) > _MAX_STATS:
        parts.append(el("div", "muted", f"and {plural(len(found) - _MAX_STATS, 'more array')}, not listed"))
    return joined(parts)


def histogram(found: LeafStats) -> Html:
    """How the finite elements are spread, with the ends of the scale and the place of 0."""
    if not found.histogram or len(found.edges) != len(found.histogram) + 1:
        return el("span", "muted", "–")
    low, high = found.edges[0], found.edges[-1]
    if found.min is not None and found.min == found.max:
        return el("span", "muted", f"all are {_units.number(found.min)}")
    most, bins = max(found.histogram), len(found.histogram)
    width, height = 180, 34
    bars = "".join(
        f"M{i * width / bins:.4g} {height}v-{max(n / most * (height - 2), 1):.3g}h{width / bins * 0.9:.3g}V{height}z"
        for i, n in enumerate(found.histogram)
        if n > 0 and most > 0
    )
    drawn = [el("path", "hist", d=Html(bars)), el("path", "axis", d=f"M0 {height}H{width}")]
    if low < 0 < high and math.isfinite(high - low):
        drawn.append(el("path", "axis", d=f"M{-low / (high - low) * width:.4g} {height}v4", stroke_dasharray="2 1"))
    ends = f"{_units.number(low)} to {_units.number(high)}"
    said = (
        f"histogram of {_units.count(sum(found.histogram))} elements from {ends}, most in a bin: {_units.count(most)}"
    )
    svg = el(
        "svg",
        "",
        el("title", "", said),
        *drawn,
        viewBox=f"0 0 {width} {height + 5}",
        width=width,
        height=height + 5,
        role="img",
    )
    return joined([svg, el("div", "small muted", ends)])


def diff(found: Diff) -> Html:
    """The whole view, without its page."""
    places = [f"{found.before} of {_text.shown(found.directory, 100)}"]
    places += [f"{found.after} of {_text.shown(found.other_directory, 100)}"] if found.other_directory else []
    where = " → ".join(places) if found.other_directory else _text.shown(found.directory)
    parts = [
        el("div", "title", f"What changed from epoch {found.before} to {found.after}"),
        el("div", "mono muted", text(where, 300)),
    ]
    counts = Counter(row.change for row in found.rows)
    said = [(f"{sign} {_units.count(counts[kind])} {kind}", colour) for kind, sign, colour in _KINDS if counts[kind]]
    parts.append(el("div", "facts", *(el("span", f"chip {colour}", words) for words, colour in said)))
    by_kind = {kind: [row for row in found.rows if row.change == kind] for kind, _, _ in _KINDS}
    for place, why in list(found.problems.items())[:_MAX_PROBLEMS]:
        cannot = [el("span", "mono", text(place, 120)), " cannot be compared: ", text(why, 400)]
        parts.append(el("div", "note bad", *cannot))
    if len(found.problems) > _MAX_PROBLEMS:
        parts.append(el("div", "note bad", f"and {plural(len(found.problems) - _MAX_PROBLEMS, 'more problem')}"))
    if not found.rows and not found.problems:
        parts.append(el("div", "note", "There is nothing to compare."))
    elif len(by_kind[rows.UNCHANGED]) == len(found.rows) and not found.problems:
        parts.append(el("div", "note", "✓ Nothing changed: every leaf is the same in both."))
    for kind, sign, _ in _KINDS[1:5]:
        if by_kind[kind]:
            words = f"{sign} {plural(len(by_kind[kind]), 'leaf')} {kind}"
            parts.append(fold(words, _others(by_kind[kind]), open=len(by_kind[kind]) <= 20))
    if by_kind[rows.CHANGED]:
        parts.append(_changed(by_kind[rows.CHANGED]))
    same = by_kind[rows.UNCHANGED]
    if same and len(same) < len(found.rows):
        parts.append(fold(f"= {plural(len(same), 'leaf')} unchanged", _others(same)))
    return joined(parts)


def _stats_table(shown: Sequence[LeafStats]) -> Html:
    heads = [
        ("", "Array"),
        ("num", "Min"),
        ("num", "Max"),
        ("num", "Mean"),
        ("num", "Std"),
        ("num", "Norm"),
        ("num", "Zeros"),
        ("num", "NaN"),
        ("num", "Inf"),
        ("", "How its elements are spread"),
    ]
    body: list[Html] = []
    for each in shown:
        figures = [each.min, each.max, each.mean, each.std, each.norm]
        zeros = percent(each.zeros / each.count) if each.count and each.zeros else "0"
        cells = [
            el("td", "", _name(each.item, each.node, each.leaf.name), el("div", "small muted", typed(each.leaf))),
            *(el("td", "num", optional(figure, _units.number)) for figure in figures),
            el("td", "num", zeros, title=f"{_units.count(each.zeros)} of {_units.count(each.count)}"),
            *(_wrong(n, each.count) for n in (each.nans, each.infs)),
            el("td", "", histogram(each)),
        ]
        body.append(el("tr", "row", *cells))
    head = el("thead", "", el("tr", "", *(el("th", classes, word) for classes, word in heads)))
    return el("div", "scroll", el("table", "", head, el("tbody", "", *body), style="min-width:60em"))


def _wrong(n: int, count: int) -> Html:
    if not n:
        return el("td", "num muted", "0")
    return el("td", "num", el("span", "chip bad", f"✗ {_units.count(n)}"), title=f"of {_units.count(count)}")


def _name(item: str, node: str, name: str) -> Html:
    before = [el("span", "muted", f"{_text.shown(part, 40)}: ") for part in (item, node) if part and part != "default"]
    return el("span", "name mono", *before, named(name, 120), title=name)


def typed(leaf: LeafRow | None) -> str:
    """Type and shape of a leaf in words."""
    if leaf is None:
        return ""
    if not leaf.dtype:
        return f"{_text.shown(leaf.kind, 30)} {_text.shown(leaf.value, 60)}".strip()
    return f"{_text.shown(leaf.dtype, 30)} {'×'.join(map(str, leaf.shape)) if leaf.shape else 'scalar'}"


def _changed(changed: Sequence[DiffRow]) -> Html:
    def weight(row: DiffRow) -> float:
        # A change from zero has no relative norm and is as much as there can be; one to or from NaN is no less.
        if row.relative is None:
            return math.inf if row.norm or row.elements else -1.0
        return math.inf if math.isnan(row.relative) else row.relative

    most = sorted(changed, key=weight, reverse=True)
    scale = max((w for w in map(weight, most) if math.isfinite(w)), default=0.0)
    heads = [
        ("", "Changed", None),
        ("", "Relative to its norm", "norm of the change, divided by the norm before"),
        ("num", "Norm of change", None),
        ("num", "Largest", "greatest change of an element"),
        ("num", "Elements", "how many elements changed"),
        ("", "", None),
    ]
    body: list[Html] = []
    for row in most[:_MAX_CHANGED]:
        of = "" if row.elements is None or row.after is None else _of(row.elements, math.prod(row.after.shape))
        bar = [level(row.relative / scale)] if row.relative is not None and scale > 0 else []
        after = "" if row.after is None else typed(row.after) if row.after.dtype else ""
        cells = [
            el("td", "", _name(row.item, row.node, row.name), el("div", "small muted", after)),
            el("td", "", _relative(row), *bar),
            el("td", "num", optional(row.norm, _units.number)),
            el("td", "num", optional(row.largest, _units.number)),
            el("td", "num", optional(row.elements, lambda n: _units.count(int(n))), el("div", "small muted", of)),
            el("td", "small", el("span", "bad" if row.elements and not row.norm else "", text(row.detail, 200))),
        ]
        body.append(el("tr", "row", *cells))
    more = len(most) - _MAX_CHANGED
    rest = [el("div", "muted", f"and {plural(more, 'leaf')} more that changed less")] if more > 0 else []
    head = el("thead", "", el("tr", "", *(el("th", classes, word, title=why) for classes, word, why in heads)))
    return el("div", "scroll", el("table", "", head, el("tbody", "", *body), style="min-width:52em"), *rest)


def _relative(row: DiffRow) -> str:
    if row.relative is None:
        return "it was all 0" if row.norm else "–"
    return _units.number(row.relative)


def _of(elements: int, count: int) -> str:
    return "all of them" if elements == count else f"of {_units.count(count)}"


def _others(shown: Sequence[DiffRow]) -> Html:
    body = [
        el(
            "tr",
            "row",
            el("td", "", _name(row.item, row.node, row.name)),
            el("td", "", _became(row)),
            el("td", "small", text(row.detail, 200)),
        )
        for row in shown[:_MAX_OTHERS]
    ]
    more = len(shown) - _MAX_OTHERS
    rest = [el("div", "muted", f"and {plural(more, 'leaf')} more")] if more > 0 else []
    return el("div", "scroll", el("table", "fixed", el("tbody", "", *body)), *rest)


def _became(row: DiffRow) -> str:
    before, after = typed(row.before), typed(row.after)
    if row.before is None or row.after is None or before == after:
        return after if row.before is None else before
    return f"{before} → {after}"
