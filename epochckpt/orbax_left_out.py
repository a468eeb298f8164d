"""What the Orbax view says, and does, about leaves that Orbax has no form for."""

from __future__ import annotations

from collections.abc import Container, Mapping

from epochckpt.escaping import readable
from epochckpt.tree import KeyPath
from epochckpt.units import several

_MAX_NOTED = 100
_FEW = 3


def gaps(paths: Mapping[int, KeyPath], out: Container[int], named: Container[int]) -> dict[int, KeyPath]:
    """Where Orbax needs a None because a sequence would lack an element; with a gap it reads nothing of the item.

    As a rule that is the leaf itself, so that targets still fit. A sequence of which no element is left needs none.

    Args:
        paths: of all the leaves, by number.
        out: numbers of those that are left out.
        named: numbers of those that Orbax can name. An element with others becomes None as a whole.

    Returns:
        The path of the None, by number of the leaf that is left out.
    """
    kept = {path[:depth] for i, path in paths.items() if i not in out for depth in range(len(path) + 1)}
    found = {}
    whole = set()
    for i, path in paths.items():
        for depth, (kind, _) in enumerate(path) if i in out else ():
            if kind in ("s", "f") and path[:depth] in kept and path[: depth + 1] not in kept:
                found[i] = path[: depth + 1]
                if i not in named:
                    whole.add(found[i])
                break
    return {i: element if element in whole else paths[i] for i, element in found.items()}


def nothing_left(left_out: Mapping[str, str]) -> str:
    """Why an item has no view although each of its leaves was looked at."""
    more = f" and {len(left_out) - _FEW} more" if len(left_out) > _FEW else ""
    return f"Orbax has no form for any of its leaves: {few(left_out)}{more}" if left_out else "it has no leaves"


def few(left_out: Mapping[str, str]) -> str:
    """The first of them with their reasons, for messages."""
    return ", ".join(f"{readable(leaf)} ({why})" for leaf, why in list(left_out.items())[:_FEW])


def short(left_out: dict[str, str]) -> dict[str, str]:
    """At most a hundred of them: the record stays small."""
    if len(left_out) <= _MAX_NOTED:
        return left_out
    kept = dict(list(left_out.items())[:_MAX_NOTED])
    return {**kept, "*": f"and {several(len(left_out) - _MAX_NOTED, 'leaf', 'leaves')} more"}
