"""Rows as JSON: every row, whatever is in it, is JSON that any reader takes, and nothing in it is lost."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochckpt.inspection import plain, rows

HOSTILE = "\x1b[31m\ud83d\ude00 \udcff <b>\u202e\u2028\0\n\"'\\" + "x" * 100
NODE = rows.NodeRow(HOSTILE, 5, 1.5, rows.DAMAGED, HOSTILE)
EPOCH = rows.EpochRow(
    epoch=12,
    state=rows.COMMITTED,
    detail=HOSTILE,
    folder=HOSTILE,
    nodes=(NODE, rows.NodeRow("fast", 3, 0.5)),
    started_ns=2**62,
    committed_ns=2**62 + 1_500_000_000,
    blocked_secs=math.inf,
    metrics={"loss": math.nan, "best": -math.inf, "half": np.float16(0.5), HOSTILE: np.array([1.0, np.nan])},
    sources={HOSTILE: HOSTILE},
    custom_metadata={"1": "str", "half": [HOSTILE, {"deep": np.int8(-3)}]},
    notes={"nested": {"a": [None, True, 2**70, math.nan]}},
)
SHARDING = rows.ShardingRow((2, 1), ("a", HOSTILE), 2, HOSTILE)
LEAF = rows.LeafRow(HOSTILE, ("a", HOSTILE), "jax", "bfloat16", (2, 3), 12, HOSTILE, SHARDING)
FILE = rows.FileRow(HOSTILE, "a", 3)
ITEM = rows.ItemRow(
    HOSTILE, "node", "Handler", (LEAF,), (FILE,), {HOSTILE: rows.ItemRow("x", "arrays")}, {"1": HOSTILE}, HOSTILE
)
STATS = rows.LeafStats("i", "n", LEAF, 3, 1, 1, 0, -math.inf, math.inf, math.nan, None, 5.0, (0.0, 1.0), (3,))
CHANGE = rows.DiffRow("i", "n", HOSTILE, rows.RETYPED, LEAF, None, math.nan, math.inf, 1.0, 5, HOSTILE)
USED = rows.UsageRow(rows.OTHER, HOSTILE, 5, 2, (1,), 1, 2)
REMAIN = rows.LeftoverRow(HOSTILE, "attempt", 5, 3.5, (1, 2), HOSTILE)
RUN = rows.RunGoodput(HOSTILE, 1, 2, 3, 4, None, math.nan, 0.5, 0.0, 0.0, 0.0, 0.0)
PLACE = rows.DirectoryRow(HOSTILE, "training", HOSTILE, 1, 2, 3, 4, 5, math.nan, {HOSTILE: ((1, 2.0),)})
METRICS = rows.MetricsRow(1, 2, {HOSTILE: math.nan}, True)
EVERY: list[Any] = [
    NODE,
    EPOCH,
    SHARDING,
    LEAF,
    FILE,
    ITEM,
    STATS,
    CHANGE,
    REMAIN,
    rows.ArrayLook(STATS, ((math.nan, 1.0), (-2.0, 0.0))),
    METRICS,
    rows.RunMetrics(HOSTILE, (METRICS,), (HOSTILE,), {HOSTILE: HOSTILE}),
    rows.Overview(HOSTILE, (EPOCH,), 3, 5, (REMAIN,), "loss", "min", {HOSTILE: HOSTILE}, deleted=(METRICS,), better=1),
    rows.EpochDetail(EPOCH, (ITEM,), {HOSTILE: {HOSTILE: HOSTILE}}),
    rows.Diff(HOSTILE, 1, 2, (CHANGE,), HOSTILE),
    rows.Usage(HOSTILE, (USED,), {HOSTILE: HOSTILE}),
    USED,
    *rows.Usage(HOSTILE, (USED,)).kinds,
    RUN,
    PLACE,
    rows.RunsOverview(HOSTILE, (PLACE,), HOSTILE, "min", True, {HOSTILE: HOSTILE}),
    rows.Goodput(HOSTILE, (RUN, RUN), {HOSTILE: HOSTILE}),
]


def strict(value: Any) -> Any:
    """What another program reads; it takes no NaN and no half of a surrogate pair."""
    made = plain.to_json(value)
    text = json.dumps(made, allow_nan=False, ensure_ascii=False)
    text.encode()
    read = json.loads(text)
    assert json.loads(json.dumps(made, allow_nan=False)) == read == made
    return read


@pytest.mark.parametrize("row", EVERY, ids=lambda row: type(row).__name__)
def test_every_row_is_an_object_of_its_fields_and_properties(row: Any) -> None:
    """Each row is strict JSON, hostile text and NaN in it included, with its fields in order, then its properties."""
    names = [field.name for field in dataclasses.fields(row)]
    read = strict(row)
    assert list(read)[: len(names)] == names
    assert set(read) - set(names) == {n for n, member in vars(type(row)).items() if isinstance(member, property)}


def test_no_row_is_forgotten_here() -> None:
    """The test above looks at every dataclass of `rows`."""
    known = {value for value in vars(rows).values() if dataclasses.is_dataclass(value)}
    assert {type(row) for row in EVERY} == known


def test_what_is_computed_is_there() -> None:
    """Properties that a program would have to compute otherwise are in the JSON."""
    read = strict(EPOCH)
    assert read["secs"] == 1.5
    assert plain.to_json(HOSTILE) == read["slowest_node"]


def test_numbers_that_json_lacks_are_text() -> None:
    """NaN and infinities are told apart, in fields and in what users attached."""
    read = strict(EPOCH)
    assert read["metrics"]["loss"] == "NaN"
    assert read["metrics"]["best"] == "-Infinity"
    assert read["blocked_secs"] == "Infinity"
    assert read["notes"]["nested"]["a"] == [None, True, 2**70, "NaN"]


def test_integers_that_json_readers_refuse_are_text() -> None:
    """Python's own stops at 4300 digits."""
    assert strict([10**900, 16**4000, -(16**4000)]) == [10**900, hex(16**4000), hex(-(16**4000))]


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"),
        (np.bool_(True), True),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.str_("a\ud800"), "a\\ud800"),
        (np.datetime64("2026-01-02", "D"), "2026-01-02"),
        (np.complex64(1 + 2j), "(1+2j)"),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (ml_dtypes.bfloat16("inf"), "Infinity"),
        (ml_dtypes.int4(-3), -3),
        (ml_dtypes.float8_e4m3fn("nan"), "NaN"),
        (np.arange(4, dtype=ml_dtypes.bfloat16).reshape(2, 2), [[0.0, 1.0], [2.0, 3.0]]),
        (np.array(None), None),
        (Colour.RED, "red"),
    ],
)
def test_values_of_other_libraries_become_plain(value: Any, expected: Any) -> None:
    """NumPy's scalars and arrays, with the types that JAX adds, become what Python has for them."""
    assert strict(value) == expected


def test_a_jax_metric_becomes_a_number() -> None:
    """Metrics that were never turned into floats are numbers, too."""
    assert strict({"loss": jnp.float32(0.25), "per class": jnp.arange(2)}) == {"loss": 0.25, "per class": [0, 1]}


def _nested(make: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(50_000):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_depth_is_bounded(make: Callable[[Any], Any]) -> None:
    """What is nested too deep for Python's own JSON is cut off, and says so."""
    assert "nested deeper" in json.dumps(strict(_nested(make)))


KEYS = st.text()
SCALARS = st.one_of(KEYS, st.text(st.characters(categories=["Cs"])), st.integers(), st.none(), st.booleans())
VALUES = st.recursive(
    st.one_of(SCALARS, st.floats(), st.floats(width=32).map(np.float32)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(KEYS, inner), st.tuples(inner, inner)),
)


@pytest.mark.slow
@given(VALUES)
def test_whatever_users_attach_is_json(value: Any) -> None:
    """Any metadata and metrics in a row are strict JSON, and no entry of a mapping is lost."""
    row = dataclasses.replace(EPOCH, custom_metadata={"value": value}, metrics={"value": value})
    read = strict(row)["custom_metadata"]["value"]
    if isinstance(value, dict | list):
        assert len(read) == len(value)
