"""The views of leaves: lines of a tree, the cut of arrays over nodes, statistics, and differences."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from epochckpt import _text, _units
from epochckpt.format import grid
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows, tree
from epochckpt.inspection.blocks import (
    Bar,
    Block,
    Cell,
    Column,
    Span,
    Summary,
    TextLine,
    Tone,
    Words,
    leaf_count,
    table,
)
from epochckpt.inspection.signs import figure

LISTED = 200  # leaves of a difference
_DIGITS = re.compile(r"\d+")
_CUTS = 12  # ways of cutting arrays that are listed
_NODES = 32  # of one of these ways
_RANGES = 4  # of one node
_ACROSS = 8  # columns of a picture
_HOLDERS = 2  # nodes named in one of its cells
_DEVICES = 8  # devices named there
_CHANGES = {
    rows.ADDED: ("+", Tone.GOOD),
    rows.REMOVED: ("−", Tone.BAD),
    rows.RESHAPED: ("≠", Tone.WARN),
    rows.RETYPED: ("≠", Tone.WARN),
    rows.CHANGED: ("~", Tone.LIVE),
    rows.UNCHANGED: ("=", Tone.FAINT),
}

TREE_COLUMNS = (
    Column("leaf", 0, least=30),
    Column("type", 1),
    Column("shape", 2, least=26, tip="or value"),  # room for trillions of elements
    Column("on devices", 3, tip="how the dimensions are cut over the axes of the mesh", missed=True),
    Column("bytes", 4, right=True),
    Column("share", 5, right=True, tip="of the bytes of the checkpoint"),
    Column("parts", 6, least=18, tip="into how many parts each dimension is cut, and on how many nodes these lie"),
)


def usual_place(leaves: Sequence[rows.LeafRow]) -> tuple[str, str]:
    """The mesh that most of the arrays on a mesh lie on; and, without any, the one device that all arrays lie on."""
    lies = [leaf.sharding for leaf in leaves if leaf.sharding is not None]
    meshes = collections.Counter(each.mesh for each in lies if each.mesh)
    alone = {each.spec for each in lies}
    return (meshes.most_common(1)[0][0], "") if meshes else ("", alone.pop() if len(alone) == 1 else "")


def placed(leaf: rows.LeafRow, usual: tuple[str, str]) -> str:
    """The sharding of an array, as far as it differs from the usual one."""
    lies = leaf.sharding
    if lies is None or (lies.spec == usual[1] and not lies.mesh):
        return ""
    return f"{lies.spec} on {lies.mesh}" if lies.mesh not in ("", usual[0]) else lies.spec


def branch_cells(branch: tree.Branch, block: kinds.Tree) -> tuple[Cell, ...]:
    """A branch of a tree as cells for `TREE_COLUMNS`."""
    leaf = branch.leaf
    size = Span(_units.nbytes(branch.nbytes) if branch.nbytes else "", Tone.PLAIN if leaf else Tone.FAINT)
    sizes = Cell(size), kinds.share(branch.nbytes, block.total_nbytes)
    if leaf is None:
        name = Span(branch.label, Tone.FAINT if branch.hidden else Tone.STRONG)
        elements = f"{_units.roughly(branch.elements)} elements" if branch.elements else ""
        count = Cell(Span(leaf_count(branch.count), Tone.FAINT))
        return Cell(name), count, Cell(Span(elements, Tone.FAINT)), Cell(), *sizes, Cell()
    parts = _lies(leaf.sharding) if leaf.sharding else ""
    shape = Cell(_shape(leaf), tip="" if leaf.dtype else leaf.value)
    spec = placed(leaf, block.usual)
    what = Cell(branch.label, tip=leaf.name), Cell(_type(leaf, Tone.GOOD)), shape, Cell(spec, tip=parts)
    return *what, *sizes, Cell(Span(parts, Tone.FAINT))


def extent(leaves: Sequence[rows.LeafRow]) -> str:
    """How many leaves there are, with their elements: `28 leaves, 1.44 M elements`."""
    arrays = [leaf for leaf in leaves if leaf.dtype]
    elements = sum(math.prod(leaf.shape) for leaf in arrays)
    return leaf_count(len(rows.without_empty(leaves))) + (f", {_units.roughly(elements)} elements" if arrays else "")


def _lies(sharding: rows.ShardingRow) -> str:
    """How an array lies on nodes: `2×4 parts on 8 nodes, 2 copies`."""
    nodes = list(dict.fromkeys(filter(None, sharding.owners)))
    count = math.prod(sharding.counts)
    cut = "×".join(map(str, sharding.counts)) + " parts" if count > 1 else "whole"
    where = f" on {_units.count(len(nodes))} nodes" if len(nodes) > 1 else f" on {nodes[0]}" if nodes else ""
    return cut + where + (f", {sharding.replicas} copies" if sharding.replicas > 1 else "")


def cuts(leaves: Sequence[rows.LeafRow]) -> list[Block]:
    """The ways in which arrays are cut over nodes, the most frequent first: which node wrote which part."""
    found: dict[object, list[tuple[rows.LeafRow, rows.ShardingRow]]] = {}
    for leaf in leaves:
        lies = leaf.sharding
        if lies is not None and math.prod(lies.counts) > 1:
            # Owners take turns from leaf to leaf, so which node wrote which part does not count.
            key = (lies.counts, lies.spec, lies.mesh, lies.replicas, len(set(lies.owners)))
            found.setdefault(key, []).append((leaf, lies))
    view: list[Block] = [_cut(alike) for alike in sorted(found.values(), key=len, reverse=True)[:_CUTS]]
    if len(found) > _CUTS:
        view.append(TextLine(Span(f"… {_units.count(len(found) - _CUTS)} more ways of cutting", Tone.FAINT)))
    heading = Span("How its arrays are cut over nodes", Tone.STRONG)
    return [kinds.Section(heading, tuple(view), open=False, on_demand=True)] if view else []


def _cut(alike: Sequence[tuple[rows.LeafRow, rows.ShardingRow]]) -> kinds.Section:
    """Arrays that are cut alike, and the index ranges that each node wrote of the first one."""
    leaf, lies = alike[0]
    others = f" · {leaf_count(len(alike))}, such as " if len(alike) > 1 else " · "
    heading = Span(_lies(lies), Tone.STRONG), others, Span(leaf.name, limit=50)
    view: list[Block] = [TextLine(Span(placed(leaf, ("", "")), Tone.FAINT))] if lies.spec else []
    if len(lies.counts) != len(leaf.shape) or len(lies.owners) != math.prod(lies.counts):
        return kinds.Section(heading, tuple(view))  # the nodes are not known, as in a step of stock Orbax
    if len({each.owners for _, each in alike}) > 1:
        told = "the writers of the parts differ from leaf to leaf; shown are those of the first leaf"
        view.append(TextLine(Span(told, Tone.FAINT)))
    sides = [size // count for size, count in zip(leaf.shape, lies.counts, strict=True)]
    if (picture := _picture(lies, sides)) is not None:
        return kinds.Section(heading, (*view, picture))
    parts: dict[str, list[int]] = {}
    for part, owner in enumerate(lies.owners):
        parts.setdefault(owner, []).append(part)

    def ranges(node: str) -> str:
        boxes = [grid.cell_box(part, lies.counts, sides) for part in parts[node][:_RANGES]]
        listed = ["[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]" for box in boxes]
        return "  ".join([*listed, "…"] if len(parts[node]) > _RANGES else listed)

    nodes = table(
        list(parts)[:_NODES],
        (Column("node", 0, least=20), lambda node: node or "not known"),
        (Column("parts", 1, right=True), lambda node: _units.count(len(parts[node]))),
        (Column("index ranges", 0, least=20), ranges),
    )
    view.append(nodes)
    if len(parts) > _NODES:
        view.append(TextLine(Span(f"… {_units.several(len(parts) - _NODES, 'more node', 'more nodes')}", Tone.FAINT)))
    return kinds.Section(heading, tuple(view))


def _picture(lies: rows.ShardingRow, sides: Sequence[int]) -> kinds.Table | None:
    """The parts of a sharded array, each with its devices and nodes; None if there are too many parts."""
    cut = [dim for dim, count in enumerate(lies.counts) if count > 1]
    across = lies.counts[cut[1]] if len(cut) > 1 else 1
    if not lies.holders or len(cut) > 2 or across > _ACROSS:
        return None

    def part(down: int, right: int) -> Cell:
        number = down * across + right
        nodes = ", ".join(lies.holders[number][:_HOLDERS])
        nodes += f" and {len(lies.holders[number]) - _HOLDERS} more" if len(lies.holders[number]) > _HOLDERS else ""
        wrote = f"written by {lies.owners[number]}"
        if not lies.devices:
            return Cell(Span(nodes, limit=60), tip=wrote)
        numbers = ", ".join(map(str, lies.devices[number][:_DEVICES]))
        numbers += ", …" if len(lies.devices[number]) > _DEVICES else ""
        return Cell((Span(numbers, Tone.STRONG), Span(f" on {nodes}", Tone.FAINT, 60)), tip=wrote)

    def span(dim: int, number: int) -> str:
        return f"{number * sides[dim]}:{(number + 1) * sides[dim]}"

    def column(right: int) -> tuple[Column, kinds.Cells[int]]:
        title = span(cut[1], right) if len(cut) > 1 else "devices, nodes" if lies.devices else "nodes"
        return Column(title, 0, least=6), lambda down: part(down, right)

    first = Column(f"dim {cut[0]} ↓" + (f"  dim {cut[1]} →" if len(cut) > 1 else ""), 0)
    return table(
        range(lies.counts[cut[0]]),
        (first, lambda down: Span(span(cut[0], down), Tone.FAINT)),
        *map(column, range(across)),
    )


def stats(found: Sequence[rows.LeafStats]) -> list[Block]:
    """Statistics of arrays with their histograms. In a long list, arrays with NaN or Inf come first."""
    if not found:
        return [Summary(("no arrays",))]
    wrong = [each for each in found if each.nans or each.infs]
    elements = _units.count(sum(each.count for each in found))
    finite = Span("no NaN, no Inf", Tone.GOOD)
    if wrong:
        some = ", ".join(_text.shown(each.leaf.name, 40) for each in wrong[:3])
        more = f" and {_units.count(len(wrong) - 3)} more" if len(wrong) > 3 else ""
        finite = Span(f"NaN or Inf in {_units.count(len(wrong))}: {some}{more}", Tone.BAD)
    first = sorted(found, key=lambda row: not (row.nans or row.infs)) if len(found) > LISTED else found

    def zeros(each: rows.LeafStats) -> str:
        return kinds.percent(each.zeros / each.count) if each.zeros and each.count else ""

    made = table(
        first,
        *_leaf_columns(first, first),
        (Column("type", 6), lambda row: _type(row.leaf, Tone.GOOD)),
        (Column("shape", 7, least=12), lambda row: _shape(row.leaf)),
        (Column("min", 1, right=True), lambda row: _figure(row.min)),
        (Column("max", 1, right=True), lambda row: _figure(row.max)),
        (Column("mean", 2, right=True), lambda row: _figure(row.mean)),
        (Column("std", 4, right=True), lambda row: _figure(row.std)),
        (Column("norm", 5, right=True), lambda row: _figure(row.norm)),
        (Column("NaN", 0, right=True), lambda row: Span(_units.count(row.nans) if row.nans else "", Tone.BAD)),
        (Column("inf", 0, right=True), lambda row: Span(_units.count(row.infs) if row.infs else "", Tone.BAD)),
        (Column("zero", 8, right=True), zeros),
        (Column("histogram", 3, least=10), _histogram),
    )
    return [Summary((f"{_units.several(len(found), 'array', 'arrays')}, {elements} elements", finite)), made]


def look(found: rows.ArrayLook) -> list[Block]:
    """One array: its type and shape, its statistics, and pictures of its elements and its parts."""
    leaf = found.stats.leaf
    most = max((abs(mean) for row in found.means for mean in row if math.isfinite(mean)), default=0.0)
    levels = tuple(tuple(mean / most if most else mean * 0.0 for mean in row) for row in found.means)
    down = len(levels)
    across = len(levels[0]) if levels else 0
    each = "an element" if down * across == math.prod(leaf.shape) else "the mean of some elements"
    title = Span(leaf.name, Tone.STRONG, 400), "  ", _type(leaf, Tone.GOOD), "  ", _shape(leaf)
    bare = dataclasses.replace(found.stats, leaf=dataclasses.replace(leaf, name="", kind="", dtype="", value=""))
    colours = Span("positive", Tone.LIVE), ", ", Span("negative", Tone.WARN), ", ", Span("NaN or Inf", Tone.BAD)
    said = Span(f"each square is {each}", Tone.FAINT), Span(f"the strongest is ±{_units.number(most)}", Tone.FAINT)
    view: list[Block] = [TextLine((*title, f"  {_units.nbytes(leaf.nbytes)}"), title=True), *stats([bare])]
    view += [kinds.Summary((*said, colours)), kinds.Heat(levels)] if levels else []
    return [*view, *cuts([leaf])]


def _histogram(found: rows.LeafStats) -> Cell:
    if not found.histogram or len(found.edges) != len(found.histogram) + 1:
        return Cell()
    if found.min is not None and found.min == found.max:
        return Cell(Span(f"all {_units.number(found.min)}", Tone.FAINT))
    most = max(*found.histogram, 1)
    ends = [_units.number(edge) for edge in found.edges]
    tips = [f"{_units.count(n)} from {ends[i]} to {ends[i + 1]}" for i, n in enumerate(found.histogram)]
    marks = (kinds.Mark(n / most, Tone.LIVE, n, tip) for n, tip in zip(found.histogram, tips, strict=True))
    return Cell(drawing=kinds.Strip(tuple(marks), summed=True), tip=f"{ends[0]} to {ends[-1]}")


def diff(found: rows.Diff, *, listed: int | None = LISTED, unchanged: bool = False, hint: str = "") -> list[Block]:
    """The difference of two epochs: metrics, counts, then a line per leaf; the leaves that changed most come first.

    Leaves of layers that are alike share a line, that of the leaf that changed most, unless all are listed. At most
    `listed` lines are shown (None: all leaves); what did not change has one only with `unchanged`. `hint` says how to
    see the rest.
    """
    there: Words = (Span(found.other_directory, Tone.STRONG, 1000), f" {found.unit} ") if found.other_directory else ()
    title: Words = (
        Span(found.directory, Tone.STRONG, 1000),
        f" {found.unit} {found.before} → ",
        *there,
        str(found.after),
    )
    counts = collections.Counter(row.change for row in found.rows)
    # With its sign, which is all that a narrow terminal has room for in the rows.
    said = [
        Span(f"{sign} {_units.count(counts[each])} {each}".lstrip(), tone)
        for each, (sign, tone, *_) in _CHANGES.items()
        if counts[each]
    ]
    if found.rows and counts[rows.UNCHANGED] == len(found.rows) and not found.problems:
        said.append(Span("nothing changed", Tone.GOOD))
    view: list[Block] = [TextLine(title, title=True), Summary(tuple(said or [Span("no leaves", Tone.FAINT)]))]
    if found.metrics:
        view.append(_metrics(found.metrics))
    shown = sorted((row for row in found.rows if unchanged or row.change != rows.UNCHANGED), key=_importance)
    alike = [[row] for row in shown] if listed is None else _alike(shown)
    if alike[:listed]:
        view.append(_changes(alike[:listed], found.rows))
    if more := sum(map(len, alike[len(alike[:listed]) :])):
        view.append(TextLine(Span(f"… {_units.several(more, 'more leaf', 'more leaves')}{hint}", Tone.FAINT)))
    return [*view, *kinds.problems(found.problems)]


def _importance(row: rows.DiffRow) -> tuple[int, float]:
    """Sorts differences: kinds in the order of `_CHANGES`, and what changed more before what changed less."""
    weight = row.relative
    if weight is None or math.isnan(weight):
        # What was zero has no relative norm, and changed as much as anything can; what is NaN changed no less.
        weight = math.inf if weight is not None or row.norm or row.elements else -1.0
    return list(_CHANGES).index(row.change), -weight


def _metrics(found: Mapping[str, tuple[Any, Any]]) -> kinds.Table:
    def change(pair: tuple[Any, Any]) -> str:
        numbers = [each for each in pair if isinstance(each, int | float) and not isinstance(each, bool)]
        if len(numbers) < 2:
            return ""
        by = numbers[1] - numbers[0]
        return f"{'+' if by > 0 else ''}{_units.number(by)}"

    return table(
        list(found.items())[:LISTED],
        (Column("metric", 0, least=20), lambda row: row[0]),
        (Column("before", 0, right=True), lambda row: Span(figure(row[1][0]), limit=40)),
        (Column("after", 0, right=True), lambda row: Span(figure(row[1][1]), Tone.STRONG, 40)),
        (Column("change", 1, right=True), lambda row: change(row[1])),
    )


def _alike(found: Sequence[rows.DiffRow]) -> list[list[rows.DiffRow]]:
    """Rows whose names differ in numbers alone, with the same change, type and shape, together; three and more."""
    groups: dict[object, list[rows.DiffRow]] = {}
    for row in found:
        forms = [(leaf.kind, leaf.dtype, leaf.shape) if leaf else None for leaf in (row.before, row.after)]
        groups.setdefault((row.item, row.node, row.change, _DIGITS.sub("*", row.name), *forms), []).append(row)
    made: list[list[rows.DiffRow]] = []
    for group in groups.values():
        made += [group] if len(group) > 2 else [[row] for row in group]
    return sorted(made, key=lambda group: _importance(group[0]))


def _changes(groups: Sequence[Sequence[rows.DiffRow]], all_rows: Sequence[rows.DiffRow]) -> kinds.Table:
    found = [group[0] for group in groups]
    others = {id(group[0]): len(group) - 1 for group in groups}
    most = max((row.relative for row in found if row.relative and math.isfinite(row.relative)), default=0.0)

    def like(row: rows.DiffRow) -> Words:
        return Span(f"{_units.count(others[id(row)])} like it" if others[id(row)] else "", Tone.FAINT)

    def tone(row: rows.DiffRow) -> Tone:
        return _CHANGES[row.change][1]

    def elements(row: rows.DiffRow) -> Cell:
        count = math.prod(row.after.shape) if row.after is not None else 0
        return Cell() if row.elements is None else Cell(_units.count(row.elements), tip=f"of {_units.count(count)}")

    def relative(row: rows.DiffRow) -> Words:
        return "from 0" if row.relative is None and row.norm else _figure(row.relative, "")

    def bar(row: rows.DiffRow) -> Cell:
        return Cell(drawing=Bar(kinds.ratio(row.relative, most), tone=tone(row)) if row.relative else None)

    return table(
        found,
        (Column("", 0), lambda row: Span(_CHANGES[row.change][0], tone(row))),
        *_leaf_columns(found, all_rows),
        (Column("and", 2, tip="leaves whose names differ in numbers alone; this one changed most"), like),
        (Column("change", 6), lambda row: Span(row.change, tone(row))),
        (Column("relative", 1, right=True, tip="norm of the change, divided by the norm before"), relative),
        (Column("", 4), bar),
        (Column("norm", 3, right=True, tip="of the change"), lambda row: _figure(row.norm, "")),
        (Column("largest", 3, right=True, tip="greatest change of an element"), lambda row: _figure(row.largest, "")),
        (Column("elements", 5, right=True, tip="how many elements changed"), elements),
        (Column("what", 0, least=16, whole=True), _what),
    )


def _what(row: rows.DiffRow) -> Words:
    """The type and shape of an added or removed leaf; the old and the new one if they differ; else the detail."""
    before = row.before
    after = row.after
    if before is not None and after is not None and row.change in (rows.RESHAPED, rows.RETYPED):
        show = _shape if row.change == rows.RESHAPED else _type
        return show(before), " → ", show(after)
    only = before or after
    if row.change in (rows.ADDED, rows.REMOVED) and only is not None:
        return _type(only), " ", _shape(only)
    return row.detail


_Leaf = TypeVar("_Leaf", rows.LeafStats, rows.DiffRow)


def _leaf_columns(found: Sequence[_Leaf], of: Sequence[_Leaf]) -> list[tuple[Column, kinds.Cells[_Leaf]]]:
    """Item, node and name; the item only where all of `of` have several, or where one of `found` is a bare leaf."""

    def bare(one: _Leaf) -> bool:
        leaf = one.leaf if isinstance(one, rows.LeafStats) else one.before or one.after
        return leaf is not None and not leaf.path  # all there is of its item: then its name says nothing

    def name(one: _Leaf) -> Cell:
        text = one.leaf.name if isinstance(one, rows.LeafStats) else one.name
        return Cell(text, tip=text)

    several = len({one.item for one in of}) > 1 or any(map(bare, found))
    return [
        (Column("item", 0, least=8), lambda one: one.item if several else ""),
        (Column("node", 0, least=8), lambda one: one.node),
        (Column("leaf", 0, least=36, whole=True), name),
    ]


def _figure(value: float | None, unknown: str = "–") -> Words:
    return Span(unknown, Tone.FAINT) if value is None else _units.number(value)


def _type(leaf: rows.LeafRow, tone: Tone = Tone.PLAIN) -> Span:
    return Span(leaf.dtype or leaf.kind, tone, 30)


def _shape(leaf: rows.LeafRow) -> Span:
    """The shape of an array (of typed keys, without the dimension of their words); else the value of the leaf."""
    shape = leaf.shape[:-1] if leaf.kind == "prng" else leaf.shape
    return Span("×".join(map(str, shape)) or "scalar" if leaf.dtype else leaf.value, limit=60)
