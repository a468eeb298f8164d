"""Names and other text as people see them: made safe to show, matched by patterns, and near names where one is missing.

Text that comes from storage may hold escape sequences of a terminal, HTML, line breaks, marks that turn the direction
of writing round, or ten thousand letters. Every view passes it through `shown`.
"""

import collections
import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

LIMIT = 160


def readable(name: str) -> str:
    """A stored name of a leaf as people write it: `layers/0/größe` for `layers/%30/gr%C3%B6%C3%9Fe`.

    A key stays escaped if it holds `/`, `%` or a character that cannot be printed.
    """
    return "/".join(map(_readable, name.split("/"))) if "%" in name else name


def _readable(key: str) -> str:
    try:
        text = unquote_to_bytes(key).decode()
    except UnicodeDecodeError:
        return key
    return text if text and text.isprintable() and "/" not in text and "%" not in text else key


def shown(text: str, limit: int = LIMIT) -> str:
    r"""`text` in one line of printable characters that no terminal interprets.

    Control characters (C0, DEL, C1), format characters (bidi, zero width), line and paragraph separators, lone
    surrogates, unassigned characters and spaces other than U+0020 become escapes: `\n`, `\x1b`, `\u202e`. If the
    result is longer than `limit` characters, `…` replaces its middle; no escape is cut in two.
    """
    if len(text) <= limit and text.isprintable():
        return text
    # Each character becomes at least one: only the first and the last `limit` characters can remain.
    text = text if len(text) <= 2 * limit else text[:limit] + text[-limit:]
    tokens = [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text]
    if sum(map(len, tokens)) <= limit:
        return "".join(tokens)
    room = max(limit - 1, 0)
    last = _fitting(tokens[::-1], room // 2)
    first = _fitting(tokens, room - sum(map(len, last)))
    return "".join([*first, "…", *reversed(last)])


def _fitting(tokens: Sequence[str], room: int) -> list[str]:
    """The first tokens that have room."""
    ends = itertools.accumulate(map(len, tokens))
    return [token for token, end in zip(tokens, ends, strict=True) if end <= room]


_NEAR = 5
_LIMIT = 200
_MANY = 5000  # names; comparing with more of them takes too long


def near_names(name: str, names: Iterable[str]) -> list[str]:
    """At most five of the known names that resemble `name`, nearest first."""
    listed = list(names)
    low = name.lower()
    compared = listed
    if len(listed) > _MANY:  # only those that begin or end alike
        head, _, tail = name.rpartition("/")
        compared = [one for one in listed if one.rpartition("/")[2] == tail or one.startswith(f"{head}/")][:_MANY]
    near = difflib.get_close_matches(name, compared, _NEAR, 0.5)
    near += [one for one in listed if low and low in one.lower() and one not in near]
    return near[:_NEAR]


def near(name: str, names: Iterable[str]) -> str:
    """A hint for an error about an unknown name: `near: 'a', 'b'`, else `there are: 'c', 'd', … 7 more`."""
    listed = list(names)
    if near_ones := near_names(name, listed):
        return f"near: {_some(near_ones)}"
    return f"there are: {_some(listed)}" if listed else "there is none"


def _some(names: Sequence[str]) -> str:
    quoted = ", ".join(repr(shown(name, limit=_LIMIT)) for name in names[:_NEAR])
    return f"{quoted}, … {len(names) - _NEAR} more" if len(names) > _NEAR else quoted


def near_epochs(epoch: int, epochs: Iterable[int]) -> str:
    """A hint for an error about an unknown epoch: the nearest numbers, ascending."""
    nearest = sorted(sorted(epochs, key=lambda number: abs(number - epoch))[:_NEAR])
    return f"near: {', '.join(map(str, nearest))}" if nearest else "it holds no committed checkpoint"


def public(names: Iterable[str]) -> list[str]:
    """The names that users see of an item's leaves: readable, but as stored where two would read the same."""
    stored = list(names)
    texts = [readable(name) for name in stored]
    count = collections.Counter(texts)
    return [text if count[text] == 1 else name for name, text in zip(stored, texts, strict=True)]


def matching(names: Sequence[str], pattern: str) -> list[int]:
    """Numbers of the public names that equal `pattern` or match it as a shell pattern, which may be in stored form."""
    found = ([i for i, name in enumerate(names) if _matches(name, asked)] for asked in (pattern, readable(pattern)))
    return next(filter(None, found), [])


def matches(item: str, leaf: str, pattern: str) -> bool:
    """Whether `leaf` or `item:leaf`, by its public name, equals `pattern` or matches it as a shell pattern."""
    return any(_matches(name, asked) for asked in {pattern, readable(pattern)} for name in (leaf, f"{item}:{leaf}"))


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def no_match(pattern: str, names: Iterable[str]) -> str:
    """The error text for a pattern, or a name, that matches no leaf."""
    listed = list(names)
    quoted = repr(shown(pattern, limit=_LIMIT))
    below = pattern.rstrip("/") + "/"
    if any(other.startswith(below) for other in listed):
        return f"no leaf matches {quoted}; those below it match {shown(f'{below}*', limit=_LIMIT)!r}"
    return f"no leaf matches {quoted}; {near(pattern, listed)}"


def no_leaf(name: str, names: Iterable[str]) -> str:
    """The error text for a leaf that does not exist."""
    listed = list(names)
    quoted = repr(shown(name, limit=_LIMIT))
    if any(mark in name for mark in "*?["):
        return f"{quoted} looks like a pattern, which names no single leaf: .stats({quoted}) takes patterns"
    return f"there is no leaf {quoted}; {near(name, listed)}"
