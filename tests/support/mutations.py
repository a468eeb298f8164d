"""Records with one thing in them changed, for readers that must refuse them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from places(child, (*path, index))


WRONG: list[Any] = [
    None, True, False, -1, 0, 1, 2, 10**6, 2**31, 2**48, 2**62, 2**63, 2**64, 2**70, -(2**70), 1.5, 1e308, "", "x",
    "../x", "..", "/etc/passwd", "a/b", "a\x00b", "\ud800", "é", "process_0", "node.json", "jax", "prng", "numpy",
    "none",
    "longstr", "str", "int", "dict", "float32", "float64", "int4", "bool", "complex128", "<M8[ns]", "<M8[x]", "rbg",
    "fry", "ffff", "x" * 5000, [], {}, [[]], [None], [0], [-1], [1, 2, 3], [2**40, 2**40], ["x"], [["k", "x"]],
    [["s", 0]], [["s", -1]], [["z", 0]], {"x": 1}, {"$float": "nan"}, {"$float": "x"},
]  # fmt: skip


DELETE, DOUBLE = object(), object()


def mutate(record: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    record = copy.deepcopy(record)
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    if new is DELETE:
        del parent[path[-1]]
    elif new is DOUBLE:
        if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        else:
            parent[f"{path[-1]}2"] = copy.deepcopy(parent[path[-1]])
    else:
        parent[path[-1]] = new
    return record


def mutations(record: dict[str, Any], count: int | None, seed: int) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, new value): all of them, or a random choice that has every path at least once where it can."""
    rng = random.Random(seed)
    paths = list(places(record))
    everything = [(path, new) for path in paths for new in [*WRONG, DELETE, DOUBLE]]
    if count is None or count >= len(everything):
        return everything
    return [(path, rng.choice([*WRONG, DELETE, DOUBLE])) for path in paths[:count]] + rng.sample(
        everything, max(0, count - len(paths))
    )
