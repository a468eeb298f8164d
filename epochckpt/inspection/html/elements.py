"""HTML elements that escape by themselves: a `str` that becomes part of one is escaped, an `Html` is not."""

from __future__ import annotations

from collections.abc import Iterable

from epochckpt import _text
from epochckpt.inspection.blocks import Tone, Words, spans
from epochckpt.inspection.html.style import PREFIX


class Html(str):
    """Markup: made by the functions here, or by the code from numbers alone (the path of a drawing)."""

    __slots__ = ()


def el(tag: str, classes: str = "", *children: str, **attributes: str | float | None) -> Html:
    """One element. Children and values of attributes that are plain `str` are escaped.

    The tag, the classes (without the prefix) and the names of attributes are constants of the code. An attribute that
    is None is left out.
    """
    named = f' class="{" ".join(f"{PREFIX}-{name}" for name in classes.split())}"' if classes else ""
    rest = "".join(
        f' {name}="{value if isinstance(value, Html) else text(str(value), 400)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{named}{rest}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Several parts, one after another."""
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children))


def text(content: str, limit: int = _text.LIMIT) -> Html:
    """Any text, as markup that shows it."""
    return Html(_text.html(content, limit))


def worded(words: Words) -> Html:
    """Words of a block."""
    shown = ((span.tone, text(span.text, span.limit)) for span in spans(words))
    return joined(each if tone is Tone.PLAIN else el("span", tone.value, each) for tone, each in shown)
