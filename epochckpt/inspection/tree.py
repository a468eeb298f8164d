"""Leaves as a tree of groups, folded to what a view has room for; leaves that are not shown are counted."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from epochckpt import _text, _units

if TYPE_CHECKING:
    from epochckpt.inspection.rows import LeafRow

SCREEN = 60  # rows of all trees of a view, unless a depth is asked for
_MAX_DEPTH = 24
_TWINS = 4  # a repeated group is folded if it has at least so many leaves


class Folding(NamedTuple):
    """How far a tree is unfolded."""

    depth: int | None = None  # levels; None: as many as fit into `rows`
    children: int | None = 12  # shown of one group; None: all
    rows: int | None = SCREEN  # without a depth; None: all
    alike: bool = True  # of several groups in a row with the same leaves, types and shapes, show only the first


ALL = Folding(None, None, None, False)


@dataclasses.dataclass(eq=False)
class Branch:
    """A group of leaves, a single leaf, or what stands for branches that are not shown."""

    label: str  # its keys, joined by `/`: several where each group holds nothing but the next
    leaf: LeafRow | None = None
    children: list[Branch] = dataclasses.field(default_factory=list)
    count: int = 0  # of leaves
    nbytes: int = 0
    elements: int = 0
    hidden: int = 0  # how many branches it stands for; 0 if it is one itself
    key: str = ""  # the first of its keys
    like: str = ""  # where else its leaves are shown: a group of the same names, types and shapes; see `fold_twins`
    _groups: dict[str, Branch] = dataclasses.field(default_factory=dict)
    _form: object = None

    @classmethod
    def grown(cls, leaves: Iterable[LeafRow]) -> Branch:
        """The tree of some leaves, which come in its order; keys from the 24th on are joined."""
        root = cls("")
        for leaf in leaves:
            path = leaf.path or (leaf.name,)
            if len(path) > _MAX_DEPTH:
                path = (*path[: _MAX_DEPTH - 1], "/".join(path[_MAX_DEPTH - 1 :]))
            above: list[Branch] = [root]
            for key in path[:-1]:
                above.append(above[-1]._group(key))
            own = Branch(path[-1], leaf, key=path[-1])
            above[-1].children.append(own)
            for branch in (*above, own):
                branch.count += 1
                branch.nbytes += leaf.nbytes
                branch.elements += math.prod(leaf.shape) if leaf.dtype else 0
        for child in root.children:
            child._join()
        return root

    def _group(self, key: str) -> Branch:
        if key not in self._groups:
            self._groups[key] = Branch(key, key=key)
            self.children.append(self._groups[key])
        return self._groups[key]

    def _join(self) -> None:
        """Joins each group below with its child where it has only one."""
        while len(self.children) == 1 and self.leaf is None:
            (only,) = self.children
            self.label = f"{self.label}/{only.label}"
            self.leaf = only.leaf
            self.children = only.children
        for child in self.children:
            child._join()
        keys = self.label[len(self.key) :]
        if self.leaf is not None:
            self._form = (keys, self.leaf.kind, self.leaf.dtype, self.leaf.shape)
        else:
            self._form = (keys, *((child.label, hash(child._form)) for child in self.children))

    @property
    def contents(self) -> object:
        """The names, types and shapes of its leaves: equal for two groups that differ in their own names alone."""
        return tuple((child.label, child._form) for child in self.children)

    def listed(self, folding: Folding) -> list[Branch]:
        """The children that are shown, and a branch that stands for the hidden ones."""
        if folding.alike and self.like:
            return [dataclasses.replace(_hidden(self.children), label=f"… as in {_text.shown(self.like, 40)}")]
        found = self.children
        if folding.alike:
            found = []
            # A leaf that lies in this group itself is like no other.
            for _, run in itertools.groupby(self.children, lambda c: id(c) if c.leaf and c.label == c.key else c._form):
                first, *others = run
                found += [first, _hidden(others, first.key)] if len(others) > 1 else [first, *others]
        most = folding.children
        if most is None or len(found) <= most + 1:  # one line in place of one line saves nothing
            return found
        rest = itertools.chain.from_iterable(c.children if c.hidden else [c] for c in found[most:])
        return [*found[:most], _hidden(list(rest))]


def fold_twins(trees: Mapping[str, Branch]) -> None:
    """Marks each group of the trees that repeats another group, as Adam's moments repeat the parameters.

    Of several groups with the same leaves the one nearest to its root is shown. `trees` are by item.
    """
    shown: dict[object, tuple[str, str]] = {}
    level = [(item, "", root) for item, root in trees.items()]
    while level:
        below: list[tuple[str, str, Branch]] = []
        for item, path, branch in level:
            if branch.count < _TWINS or not branch.children:
                continue
            form = branch.contents
            if form in shown:
                other, where = shown[form]
                branch.like = where if where and other == item else f"{other}/{where}".rstrip("/")
                continue
            shown[form] = item, path
            below += [(item, f"{path}/{child.label}".lstrip("/"), child) for child in branch.children]
        level = below


def _hidden(branches: Sequence[Branch], like: str = "") -> Branch:
    label = f"… {_units.count(len(branches))} more{' like ' + _text.shown(like, 40) if like else ''}"
    return Branch(
        label=label,
        children=list(branches),
        count=sum(branch.count for branch in branches),
        nbytes=sum(branch.nbytes for branch in branches),
        elements=sum(branch.elements for branch in branches),
        hidden=len(branches),
    )


def opened(root: Branch, folding: Folding) -> set[Branch]:
    """The branches whose children are shown: upper levels first, until there is no room."""
    children = root.listed(folding)
    found = {root}
    used = len(children)
    waiting = collections.deque((child, 1) for child in children)
    while waiting:
        branch, level = waiting.popleft()
        if branch.hidden or branch.leaf is not None or (folding.depth is not None and level >= folding.depth):
            continue
        children = branch.listed(folding)
        if folding.depth is None and folding.rows is not None and used + len(children) > folding.rows:
            continue
        used += len(children)
        found.add(branch)
        waiting.extend((child, level + 1) for child in children)
    return found


def size(branch: Branch, folding: Folding) -> int:
    """How many rows a tree has if every group is open."""
    listed = branch.listed(folding)
    return len(listed) + sum(size(child, folding) for child in listed if child.children and not child.hidden)
