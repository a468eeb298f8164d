"""The foldable tree of an item's leaves, bounded: a tree of any size gives a page that a browser opens at once.

Each folder shows as many of its children as fit: at most `MAX_CHILDREN`, fewer where there are many folders, so that
every folder shows some. What is not listed is counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from epochckpt import _units
from epochckpt.inspection.html.parts import Html, el, fold, joined, plural, share, text
from epochckpt.inspection.html.sharding import Nodes, Thumbs, cut_words, parts_of
from epochckpt.inspection.rows import LeafRow

MAX_CHILDREN = 100
MAX_CHARS = 600_000
MAX_DEPTH = 24
_OPEN_ROWS = 40
_CHARS_OF_A_ROW = 400


@dataclasses.dataclass(eq=False)
class Folder:
    """What lies below one key.

    Attributes:
        name: its key; several joined by `/` where each is the only child of the one before.
        folders: by key.
        children: folders and leaves in order of the tree, by their keys.
        leaves: how many leaves lie below it, at any depth.
        elements: of the arrays among them.
        nbytes: of them.
    """

    name: str
    folders: dict[str, Folder] = dataclasses.field(default_factory=dict)
    children: list[tuple[str, Folder | LeafRow]] = dataclasses.field(default_factory=list)
    leaves: int = 0
    elements: int = 0
    nbytes: int = 0


def grown(leaves: Sequence[LeafRow]) -> Folder:
    """The tree of some leaves. What lies deeper than `MAX_DEPTH` keeps its path as its name."""
    root = Folder("")
    for leaf in leaves:
        path = leaf.path or (leaf.name,)
        *above, last = path if len(path) <= MAX_DEPTH else (*path[: MAX_DEPTH - 1], "/".join(path[MAX_DEPTH - 1 :]))
        here = root
        _count(here, leaf)
        for key in above:
            below = here.folders.get(key)
            if below is None:
                below = here.folders[key] = Folder(key)
                here.children.append((key, below))
            here = below
            _count(here, leaf)
        here.children.append((last, leaf))
    _merge(root)
    return root


def tree(leaves: Sequence[LeafRow], total: int, nodes: Nodes, thumbs: Thumbs, per_leaf: float) -> Html:
    """Leaves as a foldable tree.

    Args:
        leaves: in order of the tree.
        total: bytes that shares are of.
        nodes: the nodes of the view.
        thumbs: takes the small drawings of how arrays are cut.
        per_leaf: how many characters it may have, about, times its leaves. One child of each folder is shown anyhow.
    """
    root = grown(leaves)
    room = int(per_leaf * len(leaves))
    most = MAX_CHILDREN
    while most > 1 and _rows(root, most) > room // _CHARS_OF_A_ROW:
        most = most * 9 // 10
    cut = "into how many parts each dimension is cut; the colours are the nodes that wrote them"
    heads = [
        ("name", "Name"),
        ("", "Type"),
        ("", "Shape, or value"),
        ("", "Cut over nodes"),
        ("end", "Size"),
        ("", "Share"),
    ]
    titles = {"Cut over nodes": cut, "Share": "of the bytes of the epoch"}
    head = el("div", "heads", *(el("span", classes, word, title=titles.get(word)) for classes, word in heads))
    while True:
        drawn = _Drawn(total, nodes, thumbs, most, _opened(root, most))
        body = drawn.children(root)
        # Names may be long: rows are counted first, as that is cheap, and characters decide.
        if len(body) <= room or most <= 1:
            return el("div", "scroll", el("div", "tree", head, body))
        most = max(most * 2 // 3, 1)


@dataclasses.dataclass(frozen=True)
class _Drawn:
    total: int
    nodes: Nodes
    thumbs: Thumbs
    most: int
    opened: frozenset[int]

    def children(self, folder: Folder) -> Html:
        shown = [
            self._folder(child) if isinstance(child, Folder) else self._leaf(name, child)
            for name, child in folder.children[: self.most]
        ]
        rest = folder.children[self.most :]
        if rest:
            count = sum(child.leaves if isinstance(child, Folder) else 1 for _, child in rest)
            size = sum(child.nbytes for _, child in rest)
            words = f"… and {plural(count, 'leaf')} more in {folder.name or 'this item'}, not listed"
            shown.append(self._row("leaf", el("span", "name muted", text(words, 200)), "", "", "", size))
        return joined(shown)

    def _folder(self, folder: Folder) -> Html:
        name = el("span", "name mono", text(f"{folder.name}/", 120))
        many = plural(folder.leaves, "leaf")
        said = el("span", "three muted", f"{many}, {_magnitude(folder.elements)}" if folder.elements else many)
        line = joined([name, said, *self._size(folder.nbytes)])
        return fold(line, el("div", "within", self.children(folder)), open=id(folder) in self.opened)

    def _leaf(self, key: str, leaf: LeafRow) -> Html:
        name = el(
            "span", "name mono", text(key, 120) if key else el("span", "muted", "(the item itself)"), title=leaf.name
        )
        if leaf.dtype:
            shape = "×".join(map(str, leaf.shape)) if leaf.shape else "scalar"
            return self._row("leaf", name, text(leaf.dtype, 30), text(shape, 60), self._cut(leaf), leaf.nbytes)
        said = el("span", "two mono", text(leaf.value, 200), title=leaf.value)
        return el("div", "leaf", name, el("span", "", text(leaf.kind, 30)), said, *self._size(leaf.nbytes))

    def _row(self, classes: str, name: Html, kind: str, shape: str, cut: str, size: int) -> Html:
        return el(
            "div", classes, name, el("span", "", kind), el("span", "", shape), el("span", "", cut), *self._size(size)
        )

    def _size(self, size: int) -> tuple[Html, Html]:
        return el("span", "end", _units.nbytes(size) if size else "–"), share(size, self.total) if size else el("span")

    def _cut(self, leaf: LeafRow) -> Html:
        found = leaf.sharding
        if found is None:
            return Html("")
        said = [found.spec] if found.spec else []
        if parts_of(found) == 1:
            owner = found.owners[0] if found.owners else ""
            drawn, words = self.nodes.swatch(owner) if owner else "", "whole"
            said += [f"whole, written by {owner}"] if owner else ["whole"]
        else:
            drawn, words = self.thumbs.of(found), cut_words(found)
            said += (
                [f"{plural(parts_of(found), 'part')} on {plural(len(set(found.owners)), 'node')}"]
                if found.owners
                else []
            )
        said += [f"held by {plural(found.replicas, 'node')}"] if found.replicas > 1 else []
        return el("span", "", drawn, text(words, 24), title="; ".join(said))


def _count(folder: Folder, leaf: LeafRow) -> None:
    folder.leaves += 1
    folder.nbytes += leaf.nbytes
    folder.elements += math.prod(leaf.shape) if leaf.dtype else 0


def _merge(folder: Folder) -> None:
    """Joins every folder that has one child with that child, from below."""
    for i, (key, child) in enumerate(folder.children):
        if isinstance(child, Folder):
            _merge(child)
            if len(child.children) == 1:
                below, only = child.children[0]
                if isinstance(only, Folder):
                    only.name = f"{child.name}/{only.name}"
                folder.children[i] = f"{key}/{below}", only


def _rows(folder: Folder, most: int) -> int:
    shown = folder.children[:most]
    below = sum(_rows(child, most) for _, child in shown if isinstance(child, Folder))
    return len(shown) + (len(folder.children) > most) + below


def _opened(root: Folder, most: int) -> frozenset[int]:
    """The folders to be open at first: level by level, as long as all that is seen fits on a screen."""
    seen, opened, level = min(len(root.children), most), set[int](), [root]
    while level:
        below = [child for folder in level for _, child in folder.children[:most] if isinstance(child, Folder)]
        seen += sum(len(folder.children) for folder in below)
        if seen > _OPEN_ROWS:
            break
        opened.update(map(id, below))
        level = below
    return frozenset(opened)


def _magnitude(n: int) -> str:
    if n < 100_000:
        return plural(n, "element")
    size = n / 1000
    for unit in ("thousand", "million", "billion"):
        if size < 999.5:
            return f"{size:.3g} {unit} elements"
        size /= 1000
    return f"{size:.3g} trillion elements"
