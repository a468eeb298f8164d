"""Text that others wrote, made fit to show: the one place where names, paths and messages are escaped and shortened.

A name in a record may hold escape sequences of a terminal, HTML, line breaks, marks that turn the direction of writing
round, or ten thousand letters. Every view lets such text through here, and through here only.
"""

from __future__ import annotations

import html as _html
from collections.abc import Iterator
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
