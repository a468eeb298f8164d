"""How arrays are cut over nodes: in words, and as a grid of parts for a drawing."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from epochckpt import _units
from epochckpt.inspection.rows import LeafRow, ShardingRow


class NodeLabels:
    """A short label for each node of a view, to be written on its parts of an array.

    A label is the number at the end of the node's name if every name ends in one of its own, else the node's place.
    """

    def __init__(self, names: Iterable[str]):
        self._places = {name: place for place, name in enumerate(dict.fromkeys(filter(None, names)))}
        numbers = [match.group() if (match := re.search(r"[0-9]{1,3}$", name)) else "" for name in self._places]
        distinct = all(numbers) and len(set(numbers)) == len(numbers)
        self._labels = numbers if distinct else [str(place) for place in self._places.values()]

    def label(self, name: str) -> str:
        """The label of a node; `?` for an unknown one."""
        return self._labels[self._places[name]] if name in self._places else "?"

    def place(self, name: str) -> int | None:
        """The node's place among the names."""
        return self._places.get(name)

    def of(self, owners: Iterable[str]) -> list[tuple[str, str]]:
        """The names of some of the nodes, in order, each with its label."""
        known = set(owners)
        return [(name, self.label(name)) for name in self._places if name in known]


class Grid(NamedTuple):
    """The parts of an array as a rectangle.

    Of two dimensions, the first gives the rows and the second the columns. Of more than two, only those that are cut
    count: the first of them gives the rows, all others together (in C order) the columns.
    """

    down: int
    across: int
    owners: tuple[str, ...]  # the node that wrote each part, in C order; empty unless all are known
    axes: str  # which dimensions go down and across, in words


def grid(sharding: ShardingRow) -> Grid:
    """The parts of an array as a rectangle."""
    counts = sharding.counts
    cut = [dimension for dimension, count in enumerate(counts) if count > 1]
    flat = len(cut) == 1 and (len(counts) == 1 or cut[0] > 0)
    rows, columns = ([], cut) if flat else (cut[:1], cut[1:])
    down, across = (math.prod(counts[dimension] for dimension in dims) for dims in (rows, columns))
    axes = "; ".join(
        f"{title}: dimension {' × '.join(map(str, dims))}, cut in {'×'.join(str(counts[d]) for d in dims)}"
        for title, dims in (("rows", rows), ("columns", columns))
        if dims
    )
    known = len(sharding.owners) == down * across
    return Grid(down, across, sharding.owners if known else (), axes)


class Cut(NamedTuple):
    """A way in which one or more arrays are cut; `example` names the first of them, whose sharding it has."""

    sharding: ShardingRow
    leaves: int
    example: str
    turns: bool  # which node wrote which part differs from one array to the next


def cuts(leaves: Sequence[LeafRow]) -> list[Cut]:
    """The ways in which some leaves are cut, the most frequent first."""
    found: dict[object, list[tuple[str, ShardingRow]]] = {}
    for leaf in leaves:
        lies = leaf.sharding
        if lies is not None and math.prod(lies.counts) > 1:
            # Owners take turns from leaf to leaf, so which node wrote which part does not count.
            key = (lies.counts, lies.spec, lies.replicas, len(set(lies.owners)))
            found.setdefault(key, []).append((leaf.name, lies))
    return [
        Cut(alike[0][1], len(alike), alike[0][0], len({lies.owners for _, lies in alike}) > 1)
        for alike in sorted(found.values(), key=len, reverse=True)
    ]


def in_words(sharding: ShardingRow) -> str:
    """How an array lies on nodes: `2×4 parts on 8 nodes, 2 copies`."""
    nodes = list(dict.fromkeys(filter(None, sharding.owners)))
    count = math.prod(sharding.counts)
    cut = "×".join(map(str, sharding.counts)) + " parts" if count > 1 else "whole"
    where = f" on {_units.count(len(nodes))} nodes" if len(nodes) > 1 else f" on {nodes[0]}" if nodes else ""
    return cut + where + (f", {sharding.replicas} copies" if sharding.replicas > 1 else "")


def owners(leaves: Iterable[LeafRow]) -> list[str]:
    """The nodes that wrote any part of some leaves, sorted by the numbers in their names."""
    found = {name for leaf in leaves if leaf.sharding is not None for name in leaf.sharding.owners if name}
    return sorted(found, key=lambda name: [part.zfill(9) for part in re.split(r"([0-9]{1,9})", name)])
