"""What to say where a name is not there: names that are near, what lies below a part of a tree, what takes patterns.

And what a pattern means.

Text that others wrote, made fit to show: the one place where names, paths and messages are escaped and shortened.

A name in a record may hold escape sequences of a terminal, HTML, line breaks, marks that turn the direction of writing
round, or ten thousand letters. Every view lets such text through here, and through here only.
"""

from __future__ import annotations

import collections
import difflib
import fnmatch
import html as _html
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote_to_bytes

LIMIT = 160


def readable(name: str) -> str:
    """A leaf's name as people write it: `layers/0/größe` for `layers/%30/gr%C3%B6%C3%9Fe`, whatever type a key has.

    What would be read as something else stays escaped: `/` and `%` in a key, and what cannot be printed.
    """
    return "/".join(map(_readable, name.split("/"))) if "%" in name else name


def _readable(key: str) -> str:
    try:
        text = unquote_to_bytes(key).decode()
    except UnicodeDecodeError:
        return key
    return text if text and text.isprintable() and "/" not in text and "%" not in text else key


def shown(text: str, limit: int = LIMIT) -> str:
    r"""`text` in one line of printable characters, none of which does anything.

    Control characters (C0, DEL, C1), format characters (bidi, zero width), line and paragraph separators, lone
    surrogates, unassigned ones, and spaces other than U+0020 become `\n`, `\x1b`, `\u202e`, `\U000e0001`. What is
    longer than `limit` characters then loses its middle, of which `…` is left; no escape is cut in two.
    """
    if len(text) <= limit and text.isprintable():
        return text
    cut = len(text) > 2 * limit
    # Each character becomes one or more: the first and last `limit` of them are all that can be left.
    head = [_visible(c) for c in (text[:limit] if cut else text)]
    tail = [_visible(c) for c in text[-limit:]] if cut else head
    if not cut and sum(map(len, head)) <= limit:
        return "".join(head)
    room = max(limit - 1, 0)
    last = _fitting(reversed(tail), room // 2)
    first = _fitting(iter(head), room - sum(map(len, last)))
    return "".join([*first, "…", *reversed(last)])


def html(text: str, limit: int = LIMIT) -> str:
    """`shown`, with HTML's own characters escaped: fit for text and for quoted attributes."""
    return _html.escape(shown(text, limit))


def _visible(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape").decode("ascii")


def _fitting(tokens: Iterator[str], room: int) -> list[str]:
    taken: list[str] = []
    for token in tokens:
        room -= len(token)
        if room < 0:
            break
        taken.append(token)
    return taken


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
