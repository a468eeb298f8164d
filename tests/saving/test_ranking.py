"""How good the value of a metric is, and which epoch has the best one."""

from __future__ import annotations

import itertools
import math

import pytest

from epochckpt.saving.ranking import best_of, rank

ASCENDING = [-math.inf, -1.5, -0.0, 1, 2.5, math.inf]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_values_are_ranked_by_the_mode_and_nan_is_worst(mode: str) -> None:
    """Not even the worst number is worse than NaN."""
    ranks = [rank(value, mode) for value in ASCENDING]
    for worse, better in itertools.pairwise(ranks if mode == "max" else ranks[::-1]):
        assert worse < better
    assert rank(math.nan, mode) == -math.inf <= min(ranks)


def test_an_int_beyond_every_float_is_infinite() -> None:
    assert rank(10**400, "max") == rank(-(10**400), "min") == math.inf
    assert rank(-(10**400), "max") == rank(10**400, "min") == -math.inf


def test_the_best_is_the_later_of_equals() -> None:
    """An epoch without a rank is none, and without any there is no best one."""
    assert best_of({1: 0.5, 2: 0.5, 3: 0.25, 4: None}) == 2
    assert best_of({1: -math.inf}) == 1
    assert best_of({4: None}) is None
    assert best_of({}) is None
