"""Which leaves leave in an export, or come in by an import: by which names, and in which precision.

`Selection` is what the caller asks for, `SelectedArrays` an item of an epoch as it leaves.
"""

import collections
import dataclasses
import glob
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epochckpt import _text
from epochckpt._renaming import Rename, check, new_names
from epochckpt._units import several
from epochckpt.arrays import Pack, Request
from epochckpt.arrays.restore import ArraySource
from epochckpt.errors import InvalidArgumentError, UnknownNameError
from epochckpt.format import Box, Grid, KeyPath, Leaf
from epochckpt.format import tree as tree_lib

Patterns = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The `include`, `exclude`, `rename` and `dtype` of `export` and `import_`; by default everything, unchanged."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: Rename | None = None
    dtype: np.dtype[Any] | None = None

    @classmethod
    def of(cls, include: Patterns | None, exclude: Patterns | None, rename: Rename | None, dtype: Any) -> "Selection":
        """A selection of what a caller has given; InvalidArgumentError for what cannot be meant."""
        return cls(_patterns("include", include), _patterns("exclude", exclude), check(rename), _floating(dtype))

    def __bool__(self) -> bool:
        return self != Selection()

    def cast_to(self, dtype: np.dtype[Any] | None) -> np.dtype[Any] | None:
        """The dtype that an array gets: another one only of floating numbers."""
        floating = self.dtype is not None and dtype is not None and tree_lib.issubdtype(dtype, np.floating)
        return self.dtype if floating else dtype

    def paths(self, where: str, paths: Sequence[KeyPath]) -> dict[int, KeyPath]:
        """The new path of each leaf that is chosen, by its number; errors begin with `where`.

        UnknownNameError: a pattern, or an entry of `rename`, that matches nothing. InvalidArgumentError: names that two
        leaves would get, or that would be a leaf and a part of the tree at once.
        """
        if not (self.include or self.exclude or self.rename):
            return dict(enumerate(paths))
        names = _text.public(map(tree_lib.leaf_name, paths))
        chosen = self._matching(where, names, self.include) if self.include else set(range(len(names)))
        chosen -= self._matching(where, names, self.exclude)
        if not chosen:
            raise InvalidArgumentError(f"{where}: include and exclude leave none of its leaves")
        selected = {number: paths[number] for number in sorted(chosen)}
        if self.rename is not None:
            selected = _renamed(
                where, self.rename, {number: (names[number], path) for number, path in selected.items()}
            )
        return _without_gaps(selected)

    @staticmethod
    def _matching(where: str, names: Sequence[str], patterns: Sequence[str]) -> set[int]:
        """Leaves that match a pattern, or lie below the part of the tree that it names."""
        matching = set[int]()
        for pattern in patterns:
            below = f"{glob.escape(pattern.rstrip('/'))}/*"
            matched = {number for each in (pattern, below) for number in _text.matching(names, each)}
            if not matched:
                raise UnknownNameError(f"{where}: {_text.no_match(pattern, names)}")
            matching |= matched
        return matching


def _patterns(name: str, given: Patterns | None) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise InvalidArgumentError(f"{name} must be a pattern of leaves' names, or several, got {str(given)[:200]}")
    return patterns


def _floating(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        parsed = tree_lib.DTYPES[dtype] if isinstance(dtype, str) else np.dtype(dtype)
    except (KeyError, TypeError):
        parsed = None
    if parsed is None or not tree_lib.issubdtype(parsed, np.floating):
        raise InvalidArgumentError(f"dtype {str(dtype)[:80]!r} is no floating type, such as bfloat16 or float32")
    return parsed


def _renamed(where: str, rename: Rename, leaves: Mapping[int, tuple[str, KeyPath]]) -> dict[int, KeyPath]:
    """The new paths of leaves. Keys that a leaf had keep their types (of a list, an int); new ones are dict keys."""
    names = [name for name, _ in leaves.values()]
    renamed = dict[int, KeyPath]()
    owner = dict[tuple[str, ...], str]()
    for (number, (name, path)), new in zip(leaves.items(), new_names(where, rename, names), strict=True):
        keys = tuple(new.split("/"))
        if not all(keys) or len(keys) > tree_lib.MAX_DEPTH:
            problem = "which is no name of a leaf: keys joined by '/'"
            raise InvalidArgumentError(f"{where}: rename makes {_text.shown(new)!r} of {name!r}, {problem}")
        owner[keys] = name
        renamed[number] = path if new == name else _moved(tuple(name.split("/")) if path else (), path, keys)
    for keys, name in owner.items():
        above = next((keys[:depth] for depth in range(1, len(keys)) if keys[:depth] in owner), None)
        if above is not None:
            problem = f"{owner[above]!r} would be called {'/'.join(above)!r}, and {name!r} lie below it"
            raise InvalidArgumentError(f"{where}: {problem}, as {'/'.join(keys)!r}")
    return renamed


def _moved(old: Sequence[str], path: KeyPath, new: Sequence[str]) -> KeyPath:
    """The new path of a leaf. Keys that `old` and `new` share at the end, or at the beginning, keep their types."""

    def alike(a: Sequence[str], b: Sequence[str]) -> int:
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    last = alike(old[::-1], new[::-1])
    old = old[: len(old) - last]
    new = new[: len(new) - last]
    end = path[len(path) - last :]
    first = alike(old, new)
    had = dict(zip(old, path, strict=False))
    return (*path[:first], *(had.get(key, ("k", key)) for key in new[first:]), *end)


def _without_gaps(paths: Mapping[int, KeyPath]) -> dict[int, KeyPath]:
    """Lists that have lost an element become dicts, whose keys are the numbers of the elements, or such names."""
    children: dict[KeyPath, set[Any]] = collections.defaultdict(set)
    for path in paths.values():
        for depth, key in enumerate(path):
            children[path[:depth]].add(key)
    broken = {
        above
        for above, keys in children.items()
        if any(kind in "sf" for kind, _ in keys)
        and (any(kind not in "sf" for kind, _ in keys) or {i for _, i in keys} != set(range(len(keys))))
    }
    mixed = {
        above for above, keys in children.items() if len({type(key) for _, key in keys}) > 1
    }  # JAX cannot sort them

    def kept(above: KeyPath, kind: str, key: Any) -> tuple[str, Any]:
        return ("k" if above in broken | mixed else kind, str(key) if above in mixed else key)

    if not broken | mixed:
        return dict(paths)
    return {
        number: tuple(kept(path[:depth], kind, key) for depth, (kind, key) in enumerate(path))
        for number, path in paths.items()
    }


class SelectedArrays:
    """An item of arrays as it leaves: the chosen leaves, cast, each whole and of one node. An `ArraySource`."""

    def __init__(self, source: ArraySource, item: str, selection: Selection):
        entry = source.record.items[item]
        assert entry.arrays is not None, "callers choose array items"
        self.source = source
        self.folder = source.folder
        self.name = item
        self._stored = entry.arrays.leaves
        chosen = selection.paths(self.where, [leaf.path for leaf in self._stored])
        self._numbers = list(chosen)
        self.cast: dict[str, str] = {}  # the dtypes that leaves had, by their new names
        leaves = []
        for number, path in chosen.items():
            leaf = self._stored[number]
            name = leaf.name if path == leaf.path else tree_lib.leaf_name(path)
            dtype = selection.cast_to(leaf.dtype)
            grid = -1 if leaf.dtype is None else 0
            if leaf.dtype is not None and dtype != leaf.dtype:
                self.cast[_text.readable(name)] = leaf.dtype.name
            # a step of stock Orbax has no table of them, and Orbax restores no jax array without
            sharding = leaf.sharding if leaf.sharding < len(entry.arrays.shardings) else -1
            kind = "numpy" if leaf.kind == "jax" and sharding < 0 else leaf.kind
            leaves.append(Leaf(path, name, kind, dtype, leaf.shape, grid, 0, sharding, leaf.impl))
        self.arrays = dataclasses.replace(entry.arrays, name=item, leaves=tuple(leaves), grids=(Grid((), ((0,),)),))
        python = {new for new, leaf in enumerate(leaves) if leaf.kind in tree_lib.VALUE_KINDS}
        values = {new: entry.values[old] for new, old in enumerate(self._numbers) if new in python}
        recorded = dataclasses.replace(entry, arrays=self.arrays, values=values)
        self.record = dataclasses.replace(source.record, items={item: recorded}, nodes=(), objects=False)

    @property
    def where(self) -> str:
        """The item, as errors name it."""
        return f"checkpoint {self.source.record.epoch}, item {self.name!r}"

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None:
        """See `EpochReader.read`; leaves that are cast are also held in their stored form."""
        assert not packs, "no restore reads from here"
        wanted = list[Request]()
        cast = list[tuple[np.ndarray, np.ndarray]]()
        for item, leaf, box, out in requests:
            number = self._numbers[leaf]
            if (dtype := self._stored[number].dtype) != out.dtype:
                stored = np.empty(out.shape, dtype)
                cast.append((out, stored))
                out = stored
            wanted.append(Request(item, number, box, out))
        self.source.read(wanted)
        with np.errstate(all="ignore"):  # what does not fit becomes infinite, as in JAX
            for out, stored in cast:
                np.copyto(out, stored, casting="unsafe")

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """See `EpochReader.check_files`."""
        self.source.check_files(item, self._numbers[leaf], box)


def say_cast(cast: Mapping[str, str], dtype: object) -> str:
    """Which leaves were cast: `3 leaves of float32 and 1 leaf of float64 cast to bfloat16`."""
    counts = collections.Counter(cast.values())
    parts = [f"{several(count, 'leaf', 'leaves')} of {before}" for before, count in sorted(counts.items())]
    return f"{' and '.join(parts)} cast to {dtype}" if parts else ""
