"""Names from others do nothing when shown, and numbers are written for people."""

import datetime
import html.parser
import itertools
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochckpt import _text, _units
from epochckpt.inspection import html as html_views

# Lone surrogates too: file names that are no UTF-8 come as these.
texts = st.text(st.characters(exclude_categories=()))


@given(texts, st.integers(1, 60))
def test_whatever_is_shown_is_one_printable_line(text: str, limit: int) -> None:
    """No character that moves a cursor, starts a line, or turns the writing round; never longer than the limit."""
    shown = _text.shown(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    shown.encode()


@given(texts)
def test_printable_text_of_usual_length_is_left_alone(text: str) -> None:
    """What does no harm is shown as it is."""
    plain = "".join(c for c in text if c.isprintable())[: _text.LIMIT]
    assert _text.shown(plain) == plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("a\nb\r\tc\0\x7f\x9b", r"a\nb\r\tc\x00\x7f\x9b"),
        ("\u202eexe.txt\u2066", r"\u202eexe.txt\u2066"),
        ("a\u2028b\u2029\u200b\ufeff\u00a0", r"a\u2028b\u2029\u200b\ufeff\xa0"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("größe/層/🙂", "größe/層/🙂"),
    ],
)
def test_each_kind_of_character_that_does_something_is_made_visible(text: str, expected: str) -> None:
    """C0, DEL, C1, bidi, separators, zero width, surrogates, tags: as escapes; letters of any script stay."""
    assert _text.shown(text) == expected


@pytest.mark.slow
def test_every_character_is_shown_or_escaped() -> None:
    """Over all of Unicode: no control, format, surrogate or separator character comes through."""
    shown = set(itertools.chain.from_iterable(_text.shown(chr(i), 20) for i in range(0x110000)))
    categories = {unicodedata.category(c) for c in shown - {" "}}
    assert categories.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"})


def test_long_text_loses_its_middle_and_no_escape_is_cut() -> None:
    """Both ends of a long name tell most."""
    assert _text.shown("params/" + "x" * 10_000 + "/kernel", 15) == "params/…/kernel"
    assert _text.shown("\x1b" * 10_000, 11) == r"\x1b…\x1b"
    assert _text.shown("abcdef", 6) == "abcdef"
    assert _text.shown("abcdefg", 6) == "abc…fg"


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(texts | st.sampled_from(["<script>", "\" onload='x", "&amp;&lt", "--><b>", "]]>"]))
def test_html_reads_back_as_what_is_shown(text: str) -> None:
    """A browser finds no tag and no attribute in it, in text and in a quoted attribute."""
    parser = _Text()
    parser.feed(f'<p title="{html_views.text(text)}">{html_views.text(text)}</p>')
    parser.close()
    shown = _text.shown(text)
    assert parser.tags == [("p", [("title", shown)])]
    assert parser.text == shown


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1234567, "1.2 MB"),
        (999_960, "1.0 MB"),
        (1_400_000_000, "1.4 GB"),
        (2.5e12, "2.5 TB"),
        (3e18, "3000.0 PB"),
    ],
)
def test_sizes(n: float, expected: str) -> None:
    """Powers of 1000, one decimal; a number that rounds up to 1000 is one of the next unit."""
    assert _units.nbytes(n) == expected


@pytest.mark.parametrize(
    ("s", "expected"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.00123, "1.2 ms"),
        (0.9999, "1 s"),
        (1.23, "1.2 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (90, "1.5 min"),
        (180, "3 min"),
        (3599, "1 h"),
        (9000, "2.5 h"),
        (40 * 86400, "40 d"),
        (-2, "−2 s"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_durations(s: float, expected: str) -> None:
    """Two or three digits, in the unit that one would say."""
    assert _units.secs(s) == expected


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0, "0"),
        (123456, "123456"),
        (0.123456, "0.1235"),
        (12345.6, "12346"),
        (1.2345678e8, "1.235e+08"),
        (-1e-7, "-1e-07"),
        (10**400, ">1e308"),
        (True, "True"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_figures(x: float, expected: str) -> None:
    """About four significant digits, never a float's whole tail."""
    assert _units.number(x) == expected


def test_times_are_local_and_none_is_refused() -> None:
    """Records may hold any number: one that no calendar has is said to be unknown."""
    moment = datetime.datetime(2026, 3, 4, 5, 6, 7)
    assert _units.when(int(moment.timestamp() * 1e9)) == "2026-03-04 05:06:07"
    assert {_units.when(n) for n in (10**40, -(10**40), math.nan, math.inf)} == {"unknown"}


def test_thousands_are_set_apart() -> None:
    """Counts of leaves and elements are long."""
    assert _units.count(1234567) == "1,234,567"
