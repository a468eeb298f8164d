"""Plots of a directory's epochs, from its rows alone. Needs matplotlib, which is imported when one is drawn.

All of them take the axes to draw on, or make some, and return them. Colours are those of matplotlib's style in force,
so that dark styles work. What is not known of an epoch is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from epochckpt import _units
from epochckpt._text import shown
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.inspection.rows import COMMITTED, EpochRow, Overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAME = 32  # characters of a name in a legend
_MARKED = 60  # epochs up to which each has a marker
_FEW = 6  # nodes up to which each has a line
_NAMED = 3  # of more nodes, how many of the slowest have one
_STANDS_OUT = 0.1  # by how much of the median a node is slower, all epochs together, to be named


class Plots:
    """Plots of the epochs of a directory, by matplotlib; each draws on axes of its own unless it is given some.

    Args:
        overview: looks at the directory; called for every plot.
    """

    def __init__(self, overview: Callable[[], Overview]):
        self._seen = overview

    def nbytes(self, ax: Axes | None = None) -> Axes:
        """Bytes of each epoch."""
        return nbytes(self._seen(), ax)

    def save_secs(self, ax: Axes | None = None) -> Axes:
        """Seconds from the call of `save` to the commit of each epoch."""
        return save_secs(self._seen(), ax)

    def blocked_secs(self, ax: Axes | None = None) -> Axes:
        """Seconds that the training thread was blocked by each save."""
        return blocked_secs(self._seen(), ax)

    def node_secs(self, ax: Axes | None = None) -> Axes:
        """Seconds that each node wrote."""
        return node_secs(self._seen(), ax)

    def metric(self, name: str | None = None, ax: Axes | None = None) -> Axes:
        """A metric of each epoch, the best and the latest marked.

        Args:
            name: of the metric; None: the one that `inspect` was given.
            ax: where to draw.

        Raises:
            InvalidArgumentError: there is no such metric.
        """
        seen = self._seen()
        if name is None and not seen.metric:
            raise InvalidArgumentError("which metric? Name it, or pass it: inspect(directory, metric='loss')")
        return metric(seen, seen.metric if name is None else name, ax)


def nbytes(seen: Overview, ax: Axes | None = None) -> Axes:
    """Bytes of each epoch.

    Args:
        seen: the directory.
        ax: where to draw; None: on axes of its own.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    ax, epochs = _begin(seen, ax, "Size of epochs", "size of an epoch (bytes)", _units.nbytes)
    _line(ax, epochs, [float(row.nbytes) for row in epochs])
    return _end(ax, epochs)


def save_secs(seen: Overview, ax: Axes | None = None) -> Axes:
    """Seconds from the call of `save` to the commit of each epoch; see `nbytes`."""
    ax, epochs = _begin(seen, ax, "Time to save an epoch", "from save() to commit (seconds)", _units.secs)
    _line(ax, epochs, [_known(row.secs) for row in epochs])
    return _end(ax, epochs)


def blocked_secs(seen: Overview, ax: Axes | None = None) -> Axes:
    """Seconds that the training thread of the primary was blocked by each save; see `nbytes`."""
    ax, epochs = _begin(seen, ax, "Time that training was blocked", "blocked in save() (seconds)", _units.secs)
    _line(ax, epochs, [_known(row.blocked_secs) for row in epochs])
    return _end(ax, epochs)


def node_secs(seen: Overview, ax: Axes | None = None) -> Axes:
    """Seconds that each node wrote: a line per node, or, of many, the median, most of them, and the slowest by name.

    See `nbytes`.
    """
    ax, epochs = _begin(seen, ax, "Time that nodes wrote", "writing of a node (seconds)", _units.secs)
    names = list(dict.fromkeys(node.name for row in epochs for node in row.nodes))
    place = {name: i for i, name in enumerate(names)}
    table = np.full((len(names), len(epochs)), np.nan)
    for column, row in enumerate(epochs):
        for node in row.nodes:
            table[place[node.name], column] = _known(node.secs)
    many = len(names) > _FEW
    chosen = _with_band(ax, epochs, table) if many else range(len(names))
    for colour, i in enumerate(chosen, start=int(many)):
        _line(ax, epochs, table[i].tolist(), f"C{colour}", _label(names[i]))
    if names and epochs:
        ax.legend(loc="best", fontsize="small", framealpha=0.7)
    return _end(ax, epochs)


def metric(seen: Overview, name: str, ax: Axes | None = None) -> Axes:
    """A metric of each epoch; the latest is marked, and the best if the overview was made with this metric.

    Args:
        seen: the directory.
        name: of the metric; `a/b` for b in a mapping a.
        ax: where to draw; None: on axes of its own.

    Raises:
        InvalidArgumentError: no epoch has it; names those that there are.
        UnsupportedError: matplotlib is not installed.
    """
    rows = _epochs(seen)
    found = [_look_up(row.metrics, name) for row in rows]
    if rows and all(value is None for value in found):
        known = sorted({str(key) for row in rows for key in row.metrics})
        listed = ", ".join(shown(key, _NAME) for key in known[:20]) or "none"
        raise InvalidArgumentError(f"no epoch has the metric '{shown(name)}'; there are: {listed}")
    ax, epochs = _begin(seen, ax, f"{_label(name)} over epochs", _label(name), _units.number)
    values = [_known(value) for value in found]
    _line(ax, epochs, values)
    marks: list[tuple[str, str, Callable[[EpochRow], bool]]] = [("latest", "o", lambda row: row.latest)]
    if seen.metric == name:
        marks.append((f"best ({seen.mode})", "*", lambda row: row.best))
    for i, (label, marker, holds) in enumerate(marks):
        at = [(row.epoch, value) for row, value in zip(epochs, values, strict=True) if holds(row)]
        if at and math.isfinite(at[0][1]):
            said = f"{label}: epoch {at[0][0]}, {_units.number(at[0][1])}"
            style: dict[str, Any] = {"linestyle": "none", "markersize": 15 if marker == "*" else 9, "zorder": 4 + i}
            ax.plot(*at[0], marker=marker, color=f"C{i + 1}", label=said, **style)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="best", fontsize="small", framealpha=0.7)
    return _end(ax, epochs, from_zero=False)


def _begin(
    seen: Overview, ax: Axes | None, title: str, label: str, say: Callable[[float], str]
) -> tuple[Axes, Sequence[EpochRow]]:
    try:
        import matplotlib.pyplot as plt
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as error:
        raise UnsupportedError('plots need matplotlib: pip install "epochckpt[plots]"') from error
    if ax is None:
        _, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    epochs = _epochs(seen)
    newest = f" (the newest {len(epochs)})" if seen.hidden else ""
    ax.set_title(f"{title}{newest}\n{_label(seen.directory, 80)}", fontsize="medium")
    ax.set_xlabel("epoch")
    ax.set_ylabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    ax.grid(alpha=0.25)
    return ax, epochs


def _end(ax: Axes, epochs: Sequence[EpochRow], from_zero: bool = True) -> Axes:
    drawn = [y for line in ax.get_lines() for y in np.asarray(line.get_ydata(), float).tolist()]
    known = [y for y in drawn if math.isfinite(y)]
    if not known:
        said = "nothing is known of it" if epochs else "no committed epochs"
        ax.text(0.5, 0.5, said, transform=ax.transAxes, ha="center", va="center")
        ax.set_yticks([])
    elif from_zero:
        ax.set_ylim(0, max(known) * 1.08 or 1)
    return ax


def _epochs(seen: Overview) -> list[EpochRow]:
    return sorted((row for row in seen.epochs if row.state == COMMITTED), key=lambda row: row.epoch)


def _line(
    ax: Axes, epochs: Sequence[EpochRow], values: Sequence[float], colour: str = "C0", label: str | None = None
) -> None:
    # A value between two gaps has no line: only a marker shows it.
    alone = [
        i
        for i, value in enumerate(values)
        if not math.isnan(value) and all(math.isnan(v) for v in [*values[max(i - 1, 0) : i], *values[i + 1 : i + 2]])
    ]
    every = None if len(epochs) <= _MARKED else alone
    ax.plot(
        [row.epoch for row in epochs], values, marker=".", markevery=every, linewidth=1.3, color=colour, label=label
    )


def _with_band(ax: Axes, epochs: Sequence[EpochRow], table: np.ndarray) -> list[int]:
    """Draws what most nodes do; returns those that are slower than the median by most, all epochs together."""
    known = ~np.isnan(table).all(axis=0)
    low, middle, high = (np.full(table.shape[1], np.nan) for _ in range(3))
    if known.any():
        low[known], middle[known], high[known] = np.nanpercentile(table[:, known], (10, 50, 90), axis=0)
    numbers = [row.epoch for row in epochs]
    ax.fill_between(numbers, low, high, alpha=0.25, color="C0", linewidth=0, label=f"80 % of {len(table)} nodes")
    ax.plot(numbers, middle, color="C0", linewidth=2, label="median", zorder=3, marker="." if len(epochs) == 1 else "")
    slower = np.nansum(table - middle, axis=1)
    # Where no node stands out, the slowest one is named all the same, and no other.
    least = np.nansum(middle) * _STANDS_OUT
    first = sorted(range(len(table)), key=lambda i: -slower[i])[:_NAMED]
    return [i for place, i in enumerate(first) if place == 0 or slower[i] > least]


def _look_up(metrics: Mapping[str, Any], name: str) -> Any:
    if not isinstance(metrics, Mapping):
        return None
    if name in metrics:
        return metrics[name]
    head, _, rest = name.partition("/")
    return _look_up(metrics[head], rest) if rest and head in metrics else None


def _known(value: Any) -> float:
    """A number to draw; what is none, or not finite, is a gap."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _label(text: str, limit: int = _NAME) -> str:
    """A name as matplotlib shows it: no formula in it, and no legend entry left out for its first letter."""
    safe = shown(text, limit).replace("$", r"\$")
    return f" {safe}" if safe.startswith("_") else safe
