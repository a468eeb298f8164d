"""Which items, nodes and leaves are meant: by name, by part of the tree, by shell pattern."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from epochckpt import _text
from epochckpt.errors import UnknownNameError

if TYPE_CHECKING:
    from epochckpt.inspection.rows import EpochDetail, ItemRow


def narrowed(
    details: Sequence[EpochDetail],
    patterns: str | Sequence[str] = "*",
    item: str | None = None,
    node: str | None = None,
) -> list[EpochDetail]:
    """The epochs with only the items, nodes and leaves that are asked for. Items with a problem stay.

    A pattern names a leaf, a part of the tree (`params/dense`) or an item, or is a shell pattern of `leaf` or
    `item:leaf`. With `node`, what other nodes saved of their own goes. UnknownNameError if no epoch has what is asked
    for.
    """
    where = f"checkpoint {details[-1].row.epoch}"
    sides = [list(detail.items) for detail in details]
    if item is not None:
        known = dict.fromkeys(each.name for side in sides for each in side)
        if item not in known:
            raise UnknownNameError(f"{where} has no item {quoted(item)}; {_text.near(item, known)}")
        sides = [[each for each in side if each.name == item] for side in sides]
    if node is not None:
        known = dict.fromkeys(name for side in sides for each in side for name in each.nodes)
        if node not in known:
            raise UnknownNameError(f"{where}: no node {quoted(node)} has items of its own; {_text.near(node, known)}")
        sides = [[replace(each, nodes={node: each.nodes[node]}) for each in s if node in each.nodes] for s in sides]
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in wanted:
        items = [each for side in sides for each in side]
        if pattern != "*" and not any(_matching(each, [pattern]) for each in items):
            names = dict.fromkeys(each.name for each in items) if len({each.name for each in items}) > 1 else {}
            raise UnknownNameError(f"{where}: {_text.no_match(pattern, names | dict.fromkeys(_names(items)))}")
    sides = [[less for each in side if (less := _matching(each, wanted))] for side in sides]
    return [replace(detail, items=tuple(side)) for detail, side in zip(details, sides, strict=True)]


def quoted(name: object) -> str:
    """A name in quotes, fit to be shown."""
    return repr(_text.shown(name, limit=200)) if isinstance(name, str) else repr(name)[:200]


def _matching(item: ItemRow, patterns: Sequence[str]) -> ItemRow | None:
    """An item with the leaves and files that match a pattern; None if there are none."""
    if item.name in patterns or "*" in patterns:
        return item
    wanted = [each for pattern in patterns for each in (pattern, f"{glob.escape(pattern.rstrip('/'))}/*")]

    def matches(name: str) -> bool:
        return any(_text.matches(item.name, name, pattern) for pattern in wanted)

    nodes = {node: less for node, own in item.nodes.items() if (less := _matching(own, patterns))}
    leaves = tuple(leaf for leaf in item.leaves if matches(leaf.name))
    less = replace(item, leaves=leaves, files=tuple(file for file in item.files if matches(file.name)), nodes=nodes)
    items = [pattern.partition(":")[0] if ":" in pattern else "*" for pattern in patterns]
    may_hold = item.problem and any(fnmatch.fnmatchcase(item.name, pattern) for pattern in items)
    return less if less.leaves or less.files or less.nodes or may_hold else None


def _names(items: Iterable[ItemRow]) -> Iterator[str]:
    for item in items:
        yield from (row.name for row in [*item.leaves, *item.files])
        yield from _names(item.nodes.values())
