"""Finds the recorded leaf for each leaf of a target, if names have changed since the save.

Names in this module are the keys of a leaf joined by `/`, such as `layers/0/kernel`, whether 0 is a number, a text or a
list index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax.checkpoint import transform_utils

from epochckpt._text import near
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import KeyPath, Leaf
from epochckpt.format import tree as tree_lib

Sources = Callable[[Sequence[Leaf], Sequence[KeyPath]], Mapping[str, int]]
"""Maps an epoch's leaves and a target's paths to leaf numbers by name of the target's leaf; a new leaf has none."""


def by_patterns(item: str, rename: Mapping[str, str]) -> Sources:
    r"""Sources that rename the leaves of the epoch.

    `rename` has new names by regular expression over whole names in the epoch, with `\1` for the first group. The first
    expression that matches counts; a name without a match stays. Refused are expressions that match nothing, and two
    leaves of one new name.
    """
    if not isinstance(rename, Mapping):
        raise InvalidArgumentError(f"item {item!r}: rename expects a dict of patterns, got a {type(rename).__name__}")
    patterns = [(_compiled(item, "rename", pattern), new) for pattern, new in rename.items()]

    def sources(leaves: Sequence[Leaf], paths: Sequence[KeyPath]) -> dict[str, int]:
        numbers: dict[str, int] = {}
        used: set[str] = set()
        for number, leaf in enumerate(leaves):
            old = name = _plain(leaf.path)
            for pattern, template in patterns:
                if found := pattern.fullmatch(old):
                    used.add(pattern.pattern)
                    name = _expanded(item, "rename", found, template)
                    break
            if name in numbers:
                both = f"{_plain(leaves[numbers[name]].path)!r} and {old!r}"
                raise InvalidArgumentError(f"item {item!r}: with rename, {both} of the epoch are both called {name!r}")
            numbers[name] = number
        for unused in (pattern for pattern in rename if pattern not in used):
            problem = f"rename has {unused!r}, which matches no leaf that an earlier pattern has not taken"
            close = near(unused, [_plain(leaf.path) for leaf in leaves])
            raise InvalidArgumentError(f"item {item!r}: {problem}; {close}")
        return {tree_lib.leaf_name(path): numbers[_plain(path)] for path in paths if _plain(path) in numbers}

    return sources


def by_transforms(item: str, transforms: Any, default_to_original: bool) -> Sources:
    """Sources for Orbax's `PyTreeRestore(transforms=…)`; only renames are supported.

    `transforms` is a pytree of `ocp.transform_utils.Transform`. Its keys, joined by `/`, are regular expressions over
    whole names in the target; as in Orbax, the last match in JAX's order of keys counts. With `default_to_original`, a
    leaf without a match comes from the epoch if it is there, and `use_fallback` means the target's value; without it,
    the other way round.

    An `original_key` that the epoch lacks is refused, and so is a transform that computes values.
    """
    patterns: list[tuple[re.Pattern[str], Any]] = []
    for path, transform in tree_lib.flatten(transforms)[0]:
        if tree_lib.leaf_kind(transform) in tree_lib.EMPTY_KINDS:
            continue
        where = _plain(path)
        if not isinstance(transform, transform_utils.Transform):
            problem = f"a {type(transform).__name__} at {where!r}; expected ocp.transform_utils.Transform"
            raise InvalidArgumentError(f"item {item!r}: transforms has {problem}")
        for name in ("value_fn", "multi_value_fn"):
            if getattr(transform, name) is not None:
                raise UnsupportedError(
                    f"item {item!r}: transforms has a Transform({name}=…) at {where!r}, which is not supported: only "
                    "original_key= and use_fallback= are. Restore the saved tree and compute the rest from it"
                )
        patterns.insert(0, (_compiled(item, "transforms", where), transform))

    def sources(leaves: Sequence[Leaf], paths: Sequence[KeyPath]) -> dict[str, int]:
        numbers = {_plain(leaf.path): number for number, leaf in enumerate(leaves)}
        out: dict[str, int] = {}
        for path in paths:
            name = source = _plain(path)
            from_epoch = default_to_original
            for pattern, transform in patterns:
                found = pattern.fullmatch(name)
                if found is None:
                    continue
                from_epoch = not default_to_original if transform.use_fallback else True
                key = transform.original_key
                if key is not None:
                    source = _expanded(item, "transforms", found, key if isinstance(key, str) else "/".join(key))
                if from_epoch and source not in numbers:
                    problem = f"transforms takes {name!r} from {source!r}, which the epoch lacks"
                    raise InvalidArgumentError(f"item {item!r}: {problem}; {near(source, numbers)}")
                break
            if from_epoch and source in numbers:
                out[tree_lib.leaf_name(path)] = numbers[source]
        return out

    return sources


def _plain(path: KeyPath) -> str:
    return "/".join(str(key) for _, key in path)


def _compiled(item: str, argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        problem = f"{argument} has {pattern!r}, which is no regular expression ({error})"
        raise InvalidArgumentError(f"item {item!r}: {problem}") from None


def _expanded(item: str, argument: str, found: re.Match[str], template: str) -> str:
    try:
        return found.expand(template)
    except (re.error, IndexError, TypeError, AttributeError) as error:
        problem = f"{argument} turns {found.re.pattern!r} into {template!r}, which is no new name for it ({error})"
        raise InvalidArgumentError(f"item {item!r}: {problem}") from None
