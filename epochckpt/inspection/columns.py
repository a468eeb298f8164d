"""What the tables of several views share: columns of metrics, curves, and the word for an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from epochckpt import _text, _units
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection.blocks import Column, Mark, Tone

COLUMNS = 12  # metrics that have a column and a curve
NAME = 40  # characters of the name of a metric
_HEAD = 10  # of them, above a column where there is no room
_VALUE = 24  # characters of a value that is not shortened
_WIDE = 40  # bars of a curve


def noun(unit: str) -> str:
    """What there are several of: an epoch, or the checkpoint of a step."""
    return "checkpoint" if unit == "step" else unit


def several(count: int, unit: str, kind: str = "") -> str:
    """How many there are: `3 older epochs`, `1 checkpoint`."""
    return _units.several(count, f"{kind}{noun(unit)}", f"{kind}{noun(unit)}s")


def measured_column(name: str, values: Iterable[str], rank: int) -> Column:
    """The column of a metric, or of a value of a config. Where there is no room, its head is shortened, no value is."""
    widest = max((min(len(value), _VALUE) for value in values), default=0)
    return Column(_text.shown(name, NAME), rank, right=True, least=max(widest, _HEAD), tip=name, missed=True)


def curve_of(points: Sequence[tuple[int, float]]) -> kinds.Strip:
    """A bar for each epoch. With many epochs a bar shows the mean of several consecutive epochs."""
    share = -(-len(points) // _WIDE)
    groups = [points[first : first + share] for first in range(0, len(points), share)]
    means = [math.fsum(value / len(group) for _, value in group) for group in groups]
    low = min(means)
    high = max(means)
    marks = []
    for group, mean in zip(groups, means, strict=True):
        level = kinds.ratio(mean / 2 - low / 2, high / 2 - low / 2) if high > low else 0.5  # halves do not overflow
        numbers = f"{group[0][0]}" if len(group) == 1 else f"{group[0][0]} to {group[-1][0]}"
        # Of bars that share a place, the last is drawn; also the least value has a bar.
        marks.append(Mark(max(level, 0.02), Tone.PLAIN, len(marks), f"at {numbers}: {_units.number(mean)}"))
    return kinds.Strip(tuple(marks))
