"""The codec of records: names in files are those that it is told, and what it reads it has checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from epochckpt.errors import FormatError
from epochckpt.format import codec
from epochckpt.format.codec import BOOLEAN, INTEGER, Fields, Rows, pack, parse, stored, table
from epochckpt.format.records import DataFile, EpochRecord, NodeEntry, NodeRecord, RunEntry


@dataclasses.dataclass(frozen=True)
class Point:
    across: int = stored("x", INTEGER)
    down: int = stored("y", codec.integer(-5, 5))
    label: str = stored("label", codec.text(5), optional=True, default="")
    note: str = "in no file"


ROWS = Rows(Point, ["down", "across"], ["label"])


@dataclasses.dataclass(frozen=True)
class Line:
    points: tuple[Point, ...] = stored("points", ROWS.codec())
    closed: bool = stored("closed", BOOLEAN)


def test_a_field_has_its_own_name_in_the_file() -> None:
    """Not that of the attribute, which may be renamed; what is in no file has its default again."""
    assert pack(Point(1, 2)) == {"x": 1, "y": 2}
    assert pack(Point(1, 2, "a", "lost")) == {"x": 1, "y": 2, "label": "a"}
    assert parse(Point, Fields("p", {"x": 1, "y": 2, "label": "a", "future": []})) == Point(1, 2, "a")


def test_rows_have_columns_in_an_order_of_their_own() -> None:
    """Of an optional one at the end an empty value is left out; rows with and without it lie side by side."""
    line = Line((Point(1, 2), Point(3, -4, "b")), True)
    assert pack(line) == {"points": [[2, 1], [-4, 3, "b"]], "closed": True}
    assert parse(Line, Fields("p", pack(line))) == line
    assert ROWS.parse("p", "row", [2, 1]) == Point(1, 2)
    assert parse(Line, Fields("p", {"points": [], "closed": False})) == Line((), False)


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        (3, "points: expected a list, found '3'"),
        ([3], r"points\[0\] is not \[y, x, label\]"),
        ([[1, 2], [1]], r"points\[1\] is not"),
        ([[1, 2, "a", 4]], r"points\[0\] is not"),
        ([[1, 2], [7, 2]], r"points\[1\]\.y: expected an integer of at least -5, found '7'"),
        ([[1, True]], r"points\[0\]\.x: expected an integer of at least 0, found 'True'"),
        ([[1, 2, "much too long"]], r"points\[0\]\.label: expected a short string"),
        ([[1, 2**63]], r"points\[0\]\.x: expected"),
        ([[1, [2]]], r"points\[0\]\.x: expected"),
        ([[None, 2]], r"points\[0\]\.y: expected"),
    ],
)
def test_what_is_wrong_in_a_row_is_named(points: Any, problem: str) -> None:
    with pytest.raises(FormatError, match=f"^path: {problem}"):
        parse(Line, Fields("path", {"points": points, "closed": True}))


@pytest.mark.parametrize("record", [DataFile, NodeRecord, NodeEntry, RunEntry, EpochRecord])
def test_all_fields_of_records_have_a_codec(record: Any) -> None:
    """And each its own name."""
    fields = table(record)
    assert list(fields) == [field.name for field in dataclasses.fields(record)]
    assert len({field.key for field in fields.values()}) == len(fields)
