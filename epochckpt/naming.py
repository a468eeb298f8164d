"""What to say where a name is not there: names that are near, what lies below a part of a tree, what takes patterns.

And what a pattern means.
"""

from __future__ import annotations

import collections
import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from epochckpt.escaping import readable, shown

_NEAR = 5
_LIMIT = 200
_MANY = 5000  # beyond that the distances to all names take too long


def close(name: str, listed: Sequence[str]) -> list[str]:
    """The names that are near, nearest first."""
    low = name.lower()
    found = difflib.get_close_matches(name, listed, _NEAR, 0.5) if len(listed) <= _MANY else []
    found += [other for other in listed if low and low in other.lower() and other not in found]
    if not found and len(listed) > _MANY:  # those that end or begin alike
        head, tail = name.rpartition("/")[0], name.rpartition("/")[2]
        alike = [other for other in listed if other.rpartition("/")[2] == tail or other.startswith(f"{head}/")]
        found = difflib.get_close_matches(name, alike[:_MANY], _NEAR, 0.5)
    return found


def near(name: str, known: Iterable[str]) -> str:
    """A hint: the names that are near, or some of those that there are.

    Args:
        name: what was asked for.
        known: what there is.
    """
    listed = list(known)
    if not listed:
        return "there is none"
    found = close(name, listed)
    said = ", ".join(repr(shown(other, limit=_LIMIT)) for other in (found or listed)[:_NEAR])
    more = f", … {len(listed) - _NEAR} more" if not found and len(listed) > _NEAR else ""
    return f"{'near' if found else 'there are'}: {said}{more}"


def near_epochs(epoch: int, known: Iterable[int]) -> str:
    """A hint: the numbers that are nearest, ascending."""
    nearest = sorted(sorted(known, key=lambda number: abs(number - epoch))[:_NEAR])
    return f"near: {', '.join(map(str, nearest))}" if nearest else "it holds no committed epoch"


def public(names: Iterable[str]) -> list[str]:
    """The names that leaves go by outside their files: readable, except where two of one item would be alike."""
    stored = list(names)
    texts = [readable(name) for name in stored]
    count = collections.Counter(texts)
    return [text if count[text] == 1 else name for name, text in zip(stored, texts, strict=True)]


def either(names: Sequence[str]) -> dict[str, int]:
    """Numbers of leaves by their public names, and by those that they are stored under."""
    numbers = {name: number for number, name in enumerate(public(names))}
    return numbers | {name: number for number, name in enumerate(names)}


def matching(names: Sequence[str], pattern: str) -> list[int]:
    """Numbers of the public names that a name or a shell pattern means, which may be spelt as names are stored."""
    for asked in (pattern, readable(pattern)):
        found = [i for i, name in enumerate(names) if name == asked or fnmatch.fnmatchcase(name, asked)]
        if found:
            return found
    return []


def matches(item: str, leaf: str, pattern: str) -> bool:
    """Whether a name, or a shell pattern, of `leaf` or `item:leaf` means a leaf that goes by this public name."""
    for asked in {pattern, readable(pattern)}:
        for name in (leaf, f"{item}:{leaf}"):
            if name == asked or fnmatch.fnmatchcase(name, asked):
                return True
    return False


def no_match(pattern: str, known: Iterable[str]) -> str:
    """What to say of a pattern, or a name, of leaves that matches none."""
    listed = list(known)
    quoted = repr(shown(pattern, limit=_LIMIT))
    below = pattern.rstrip("/") + "/"
    if any(other.startswith(below) for other in listed):
        return f"no leaf matches {quoted}; those below it match {shown(f'{below}*', limit=_LIMIT)!r}"
    return f"no leaf matches {quoted}; {near(pattern, listed)}"


def no_leaf(name: str, known: Iterable[str]) -> str:
    """What to say of a leaf that is not there."""
    listed = list(known)
    quoted = repr(shown(name, limit=_LIMIT))
    below = [other for other in listed if other.startswith(f"{name.rstrip('/')}/")] if name else []
    if below:
        some = ", ".join(repr(shown(other, limit=_LIMIT)) for other in below[:_NEAR])
        more = f", … {len(below) - _NEAR} more" if len(below) > _NEAR else ""
        one = "1 leaf lies" if len(below) == 1 else f"{len(below)} leaves lie"
        return f"{quoted} is no leaf, {one} below it: {some}{more}"
    if any(mark in name for mark in "*?["):
        return f"{quoted} looks like a pattern, which names no single leaf: .stats({quoted}) takes patterns"
    return f"there is no leaf {quoted}; {near(name, listed)}"
