"""The parameter tree in a terminal: folded to what fits on a screen, with counts of what is not shown."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from rich.text import Text

from epochckpt import _units
from epochckpt.inspection.rows import LeafRow, ShardingRow
from epochckpt.inspection.text.table import FAINT, GOOD, HEAD, Cell, Column, Fitted, Table, bar, shortened, text

SCREEN = 60  # rows of a tree that nobody asked to unfold
CHILDREN = 40  # of one group, of those that somebody asked for
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_DRAWN = (24, 60)  # parts of a grid that are drawn, down and across
_LEGEND = 24  # names in it
_NUMBERED = re.compile(r"(.*?)(\d+)\Z", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Folding:
    """How far a tree is unfolded.

    Attributes:
        depth: so many levels; None: as many as fit into `rows`.
        children: of one group; None: all.
        rows: so many rows, if `depth` is None; None: all.
        alike: show one of several groups in a row that have the same leaves, types and shapes below them.
    """

    depth: int | None = None
    children: int | None = 12
    rows: int | None = SCREEN
    alike: bool = True

    @classmethod
    def to_depth(cls, depth: int) -> Folding:
        """So many levels, whatever room they take."""
        return cls(depth, CHILDREN, None, False)


ALL = Folding(None, None, None, False)


class Group:
    """Leaves whose paths begin alike.

    Args:
        label: the keys that lead here from the group above, joined.
    """

    def __init__(self, label: str):
        self.key = self.label = label
        self.groups: dict[str, Group] = {}
        self.order: list[Group | tuple[str, LeafRow]] = []
        self.form: tuple[object, ...] = ()
        self.leaf: LeafRow | None = None  # all there is in it: then it has no lines below its own
        self.count, self.nbytes = 0, 0

    def add(self, leaf: LeafRow) -> None:
        """Puts a leaf to its place."""
        at = self
        for key in leaf.path[:-1]:
            at.count, at.nbytes = at.count + 1, at.nbytes + leaf.nbytes
            if key not in at.groups:
                at.groups[key] = Group(key)
                at.order.append(at.groups[key])
            at = at.groups[key]
        at.count, at.nbytes = at.count + 1, at.nbytes + leaf.nbytes
        at.order.append((leaf.path[-1] if leaf.path else leaf.name, leaf))

    def merged(self) -> Group:
        """This group, or the one or the leaf that is all there is in it, with both labels."""
        at, labels = self, [self.label]
        while len(at.order) == 1 and isinstance(at.order[0], Group):
            at = at.order[0]
            labels.append(at.label)
        if len(at.order) == 1 and isinstance(at.order[0], tuple):
            labels.append(at.order[0][0])
            at.leaf = at.order[0][1]
        at.key, at.label = self.key, "/".join(labels)
        at.order = [child.merged() if isinstance(child, Group) else child for child in at.order]
        inside = ((c.label, hash(c.form)) if isinstance(c, Group) else (c[0], *_kind(c[1])) for c in at.order)
        at.form = (*labels[1:], *inside)
        return at


def _kind(leaf: LeafRow) -> tuple[object, ...]:
    return leaf.kind, leaf.dtype, leaf.shape


def tree(
    leaves: Sequence[LeafRow], total_nbytes: int, folding: Folding, *, owners: bool = False, indent: int = 2
) -> Table:
    """Leaves as a tree with a line each: type, shape, bytes, share of the total, how it lies on nodes.

    Args:
        leaves: in order of the tree.
        total_nbytes: what shares are of.
        folding: how far it is unfolded.
        owners: below each array that lies in several parts, draw who wrote which.
        indent: columns that are left free on the left.
    """
    root = Group("")
    for leaf in leaves:
        root.add(leaf)
    root.order = [child.merged() if isinstance(child, Group) else child for child in root.order]
    opened = _opened(root, folding)
    rows: list[Sequence[Cell] | Text] = []
    for prefix, below, child in _lines(root, opened, folding, ""):
        rows.append(_row(prefix, child, total_nbytes, isinstance(child, Group) and child in opened))
        leaf = child[1] if isinstance(child, tuple) else child.leaf if isinstance(child, Group) else None
        if owners and leaf is not None and leaf.sharding is not None:
            rows += [Text.assemble((" " * indent + below, FAINT)).append_text(line) for line in drawn(leaf.sharding)]
    columns = [
        Column(Text("leaf"), 0, least=30),
        Column(Text("type"), 1),
        Column(Text("shape"), 2, least=16),
        Column(Text("bytes"), 3, right=True),
        Column(Text("share"), 4, right=True),
        Column(Text("parts"), 5, least=18),
        Column(Text("on devices"), 6, least=30),
    ]
    return Table(columns, rows, indent=indent)


@dataclasses.dataclass(frozen=True)
class Rest:
    """Children that are not shown.

    Attributes:
        children: they.
        like: the label of the one that is shown in their place; empty if they are just too many.
    """

    children: Sequence[Group | tuple[str, LeafRow]]
    like: str = ""


_Child = Group | tuple[str, LeafRow] | Rest


def _listed(group: Group, folding: Folding) -> list[_Child]:
    """The children of a group that have a line, and what stands for the others."""
    if group.leaf is not None:
        return []
    listed: list[_Child] = []
    for _, run in itertools.groupby(group.order, key=lambda c: c.form if isinstance(c, Group) else id(c)):
        alike = list(run)
        first = alike[0]
        if folding.alike and len(alike) > 2 and isinstance(first, Group):
            listed += [first, Rest(alike[1:], first.key)]
        else:
            listed += alike
    most = folding.children
    if most is None or len(listed) <= most + 1:  # a line is not spared by one that stands for one
        return listed
    rest = itertools.chain.from_iterable(c.children if isinstance(c, Rest) else [c] for c in listed[most:])
    return [*listed[:most], Rest(list(rest))]


def _opened(root: Group, folding: Folding) -> set[Group]:
    """The groups whose children are shown: the upper levels first, until the screen is full."""
    children = _listed(root, folding)
    opened, used = {root}, len(children)
    waiting = collections.deque((child, 1) for child in children if isinstance(child, Group))
    while waiting:
        group, level = waiting.popleft()
        if folding.depth is not None and level >= folding.depth:
            continue
        children = _listed(group, folding)
        if folding.depth is None and folding.rows is not None and used + len(children) > folding.rows:
            continue
        used += len(children)
        opened.add(group)
        waiting.extend((child, level + 1) for child in children if isinstance(child, Group))
    return opened


def _lines(group: Group, opened: set[Group], folding: Folding, prefix: str) -> Iterator[tuple[str, str, _Child]]:
    """(what leads to it, what leads on below it, child) of every line."""
    listed = _listed(group, folding)
    for number, child in enumerate(listed):
        last = number == len(listed) - 1
        below = prefix + ("   " if last else "│  ")
        yield prefix + ("└─ " if last else "├─ "), below, child
        if isinstance(child, Group) and child in opened:
            yield from _lines(child, opened, folding, below)


def _row(prefix: str, child: _Child, total: int, opened: bool) -> list[Cell]:
    name = Text.assemble((prefix, FAINT))
    if isinstance(child, Rest):
        count = sum(c.count if isinstance(c, Group) else 1 for c in child.children)
        nbytes = sum(c.nbytes if isinstance(c, Group) else c[1].nbytes for c in child.children)
        like = f" like {text(child.like, limit=40).plain}" if child.like else ""
        name.append(f"… {_units.count(len(child.children))} more{like}", FAINT)
        cells = [_leaves(count), Text(), _nbytes(nbytes, FAINT), _share(nbytes, total), Text(), Text()]
        return [_kept(name, len(prefix)), *cells]
    if isinstance(child, Group) and child.leaf is None:
        name.append_text(text(child.label, HEAD)).append("/" if opened else "/ …", FAINT)
        cells = [_leaves(child.count), Text(), _nbytes(child.nbytes, FAINT), _share(child.nbytes, total)]
        return [_kept(name, len(prefix)), *cells, Text(), Text()]
    label, leaf = (child.label, child.leaf) if isinstance(child, Group) else child
    assert leaf is not None, "groups of more than that were dealt with"
    name.append_text(text(label))
    lies = leaf.sharding
    return [
        _kept(name, len(prefix)),
        text(leaf.dtype or leaf.kind, GOOD, limit=30),
        shape(leaf),
        _nbytes(leaf.nbytes) if leaf.nbytes else Text(),
        _share(leaf.nbytes, total),
        parts(lies) if lies is not None else Text(),
        text(lies.spec, FAINT) if lies is not None else Text(),
    ]


def _kept(name: Text, prefix: int) -> Fitted:
    """A name that keeps its place in the tree when it is shortened."""
    return Fitted(name.cell_len, lambda width: shortened(name, width, prefix))


def shape(leaf: LeafRow) -> Text:
    """Shape of an array, or the value of what is none."""
    if leaf.dtype:
        return Text("×".join(map(str, leaf.shape)) or "scalar")
    return text(leaf.value, limit=60)


def _leaves(count: int) -> Text:
    return Text(_units.several(count, "leaf", "leaves"), FAINT)


def _nbytes(count: int, style: str = "") -> Text:
    return Text(_units.nbytes(count), style)


def _share(part: int, total: int) -> Text:
    """A share in percent, with a bar."""
    if not total or not part:
        return Text()
    share = part / total
    return Text(f"{share:.1%} " if share >= 0.001 else "<0.1% ").append(bar(share), GOOD)


def parts(lies: ShardingRow) -> Text:
    """How an array lies on nodes, in a few words."""
    nodes = list(dict.fromkeys(lies.owners))
    count = math.prod(lies.counts)
    where = f"on {len(nodes)} nodes" if len(nodes) > 1 else f"on {nodes[0]}" if nodes else ""
    cut = "×".join(map(str, lies.counts)) + " parts" if count > 1 else "whole"
    copies = f", {lies.replicas} copies" if lies.replicas > 1 else ""
    return text(f"{cut} {where}{copies}".replace(" ,", ","), FAINT)


def drawn(lies: ShardingRow) -> list[Text]:
    """Who wrote which part: a letter per part, a row of letters along the last dimension."""
    if len(set(lies.owners)) < 2:
        return []
    names = sorted(set(lies.owners), key=_natural)
    letters = {name: _LETTERS[i % len(_LETTERS)] for i, name in enumerate(names)}
    across = lies.counts[-1]
    grid = [lies.owners[first : first + across] for first in range(0, len(lies.owners), across)]
    down, wide = _DRAWN
    lines = [
        Text(" ".join(letters[name] for name in row[:wide]) + (" …" if across > wide else ""), GOOD)
        for row in grid[:down]
    ]
    if len(grid) > down:
        lines.append(Text(f"… {_units.count(len(grid) - down)} more rows", FAINT))
    return [*lines, *_legend(letters)]


def _natural(name: str) -> tuple[str, int]:
    found = _NUMBERED.match(name)
    return (found[1], int(found[2])) if found else (name, -1)


def _legend(letters: dict[str, str]) -> list[Text]:
    """Which letter is whose; names that differ by their numbers only are not listed one by one."""
    listed = [f"{letter} {text(name, limit=40).plain}" for name, letter in letters.items()]
    if len(listed) > 3 and len({_natural(name)[0] for name in letters}) == 1:
        return [Text(f"{listed[0]} … {listed[-1]}", FAINT)]
    lines = [Text("  ".join(listed[first : first + 3]), FAINT) for first in range(0, min(len(listed), _LEGEND), 3)]
    return [*lines, *([Text(f"… {len(listed) - _LEGEND} more", FAINT)] if len(listed) > _LEGEND else [])]
