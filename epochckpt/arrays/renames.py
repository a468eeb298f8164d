"""Where the leaves of a target come from, when their names have changed since the save.

A leaf's name is its keys joined by `/`, such as `layers/0/kernel`, whatever the type of the key 0 is.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from epochckpt import _text
from epochckpt._renaming import Rename, new_names
from epochckpt._text import near, readable
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import KeyPath, Leaf
from epochckpt.format import tree as tree_lib

Sources = Callable[[Sequence[Leaf], Sequence[KeyPath]], Mapping[str, int]]
"""Maps an epoch's leaves and a target's paths to leaf numbers by name of the target's leaf; a new leaf has none."""


def by_rename(where: str, rename: Rename, leaves: Sequence[Leaf], paths: Sequence[KeyPath]) -> dict[str, int]:
    """`Sources`, with the two first arguments given: they rename the leaves of the epoch, see `epochckpt._renaming`."""
    renamed = new_names(where, rename, _text.public([leaf.name for leaf in leaves]))
    numbers = {new: number for number, new in enumerate(renamed)}
    found = dict[str, int]()
    for name in map(tree_lib.leaf_name, paths):
        number = numbers.get(name, numbers.get(readable(name)))
        if number is not None:
            found[name] = number
    return found


def by_transforms(item: str, transforms: Any, default_to_original: bool) -> Sources:
    """Sources for Orbax's `PyTreeRestore(transforms=…)`; only renames are supported.

    The keys of `transforms`, a pytree of `ocp.transform_utils.Transform`, are regular expressions over whole names in
    the target; as in Orbax, the last match in JAX's order of keys counts. With `default_to_original`, a leaf without a
    match comes from the epoch if it is there, and `use_fallback` means the target's value; without it, the other way
    round. Refused are an `original_key` that the epoch lacks, and a transform that computes values.
    """
    patterns: list[tuple[re.Pattern[str], Any]] = []
    for path, transform in tree_lib.flatten(transforms)[0]:
        if tree_lib.leaf_kind(transform) in tree_lib.EMPTY_KINDS:
            continue
        where = _plain(path)
        if not isinstance(transform, ocp.transform_utils.Transform):
            problem = f"a {type(transform).__name__} at {where!r}; expected ocp.transform_utils.Transform"
            raise InvalidArgumentError(f"item {item!r}: transforms has {problem}")
        for name in ("value_fn", "multi_value_fn"):
            if getattr(transform, name) is not None:
                raise UnsupportedError(
                    f"item {item!r}: transforms has a Transform({name}=…) at {where!r}, which is not supported: only "
                    "original_key= and use_fallback= are. Restore the saved tree and compute the rest from it"
                )
        patterns.insert(0, (_compiled(item, where), transform))

    return _TransformSources(item=item, patterns=patterns, default_to_original=default_to_original)


@dataclasses.dataclass(frozen=True)
class _TransformSources:
    """`Sources` by Orbax's transforms; the first pattern that matches a name counts."""

    item: str
    patterns: Sequence[tuple[re.Pattern[str], Any]]  # each with its `Transform`
    default_to_original: bool

    def __call__(self, leaves: Sequence[Leaf], paths: Sequence[KeyPath]) -> dict[str, int]:
        numbers = {_plain(leaf.path): number for number, leaf in enumerate(leaves)}
        sources = dict[str, int]()
        for path in paths:
            source = self._source(_plain(path), numbers)
            if source is not None:
                sources[tree_lib.leaf_name(path)] = source
        return sources

    def _source(self, name: str, numbers: Mapping[str, int]) -> int | None:
        """The leaf of the epoch for one name of the target; None if the target's value stays."""
        for pattern, transform in self.patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if transform.use_fallback and self.default_to_original:
                return None
            source = self._original_name(match, transform)
            if source not in numbers:
                problem = f"transforms takes {name!r} from {source!r}, which the epoch lacks"
                raise InvalidArgumentError(f"item {self.item!r}: {problem}; {near(source, numbers)}")
            return numbers[source]
        return numbers.get(name) if self.default_to_original else None

    def _original_name(self, match: re.Match[str], transform: Any) -> str:
        """The name in the epoch that a transform gives for the name that has matched."""
        key = transform.original_key
        if key is None:
            return match.string
        return _expanded(self.item, match, key if isinstance(key, str) else "/".join(key))


def _plain(path: KeyPath) -> str:
    return "/".join(str(key) for _, key in path)


def _compiled(item: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        problem = f"transforms has {pattern!r}, which is no regular expression ({error})"
        raise InvalidArgumentError(f"item {item!r}: {problem}") from None


def _expanded(item: str, found: re.Match[str], template: str) -> str:
    try:
        return found.expand(template)
    except (re.error, IndexError, TypeError, AttributeError) as error:
        problem = f"transforms turns {found.re.pattern!r} into {template!r}, which is no new name for it ({error})"
        raise InvalidArgumentError(f"item {item!r}: {problem}") from None
