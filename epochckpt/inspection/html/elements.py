"""HTML elements that escape by themselves: a `str` that becomes part of one is escaped, an `Html` is not."""

from __future__ import annotations

from collections.abc import Iterable

from epochckpt import _text
from epochckpt.inspection.blocks import Span, Tone, Words, spans
from epochckpt.inspection.html.style import PREFIX


class Html(str):
    """Markup: made by the functions here, or by the code from numbers alone (the path of a drawing)."""

    __slots__ = ()


def el(tag: str, classes: str = "", *children: str, **attributes: str | float | None) -> Html:
    """One element. Children and values of attributes that are plain `str` are escaped.

    Args:
        tag: its name, a constant of the code.
        classes: names without the prefix, separated by spaces.
        *children: what is in it.
        **attributes: by name (`_` for `-`), constants of the code; None: left out.
    """
    named = f' class="{" ".join(f"{PREFIX}-{name}" for name in classes.split())}"' if classes else ""
    rest = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, Html) else text(str(value), 400)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{named}{rest}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Several parts, one after another."""
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children))


def text(content: str, limit: int = _text.LIMIT) -> Html:
    """Text of anybody, as markup that shows it."""
    return Html(_text.html(content, limit))


def worded(words: Words) -> Html:
    """Words of a block."""
    return joined(map(_span, spans(words)))


def _span(span: Span) -> Html:
    shown = text(span.text, span.limit)
    return shown if span.tone is Tone.PLAIN else el("span", tone_class(span.tone), shown)


def tone_class(tone: Tone) -> str:
    """The class of a tone; PLAIN has none."""
    return "" if tone is Tone.PLAIN else tone.name.lower()
