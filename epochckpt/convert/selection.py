"""What a caller asks for of an export or an import: which leaves, by which names, and in which precision."""

import collections
import dataclasses
import glob
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epochckpt import _text
from epochckpt._renaming import Rename, check, new_names
from epochckpt.errors import InvalidArgumentError, UnknownNameError
from epochckpt.format import KeyPath
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
        parsed = tree_lib.dtypes()[dtype] if isinstance(dtype, str) else np.dtype(dtype)
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
