"""Plots of a directory's epochs, from its rows alone. Needs matplotlib, which is imported when one is drawn.

Every plot draws on the axes that it is given, or makes some, and returns them. Colours are those of matplotlib's style
in force, so that dark styles work. What is not known of an epoch is a gap. Metrics are drawn over the whole run, with
epochs that were deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from epochckpt import _text, _units
from epochckpt._metrics import flat
from epochckpt.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from epochckpt.inspection import whole_run
from epochckpt.inspection.rows import COMMITTED, SPENT, EpochRow, Goodput, Overview, RunsOverview

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_NAME = 32  # characters of a name in a legend
_MANY = 60  # epochs beyond which their markers are as small as the line is thin
_FEW = 6  # nodes up to which each has a line
_NAMED = 3  # of more nodes, how many of the slowest have one
_STACKED = 12  # metrics that are drawn where none was named
_STANDS_OUT = 0.1  # by how much of the median a node is slower, all epochs together, to be named

_Figure = Callable[[float], str]
_UNITS: Mapping[_Figure, Callable[[str], float]] = {
    _units.nbytes: _units.parse_nbytes,
    _units.secs: _units.parse_secs,
}


class Plots:
    """Plots of the epochs of a directory, by matplotlib; each draws on axes of its own unless it is given some.

    All raise UnsupportedError where matplotlib is not installed. `overview` is called for every plot.
    """

    def __init__(self, overview: Callable[[], Overview], goodput: Callable[[], Goodput] | None = None):
        self._overview = overview
        self._goodput = goodput

    def nbytes(self, ax: Axes | None = None) -> Axes:
        """Bytes of each epoch."""
        return self._curve(ax, "Size of checkpoints", "size", _units.nbytes, lambda row: row.nbytes)

    def save_secs(self, ax: Axes | None = None) -> Axes:
        """Seconds from the call of `save` to the commit of each epoch."""
        label = "from save() to commit"
        return self._curve(ax, "Time to save", label, _units.secs, lambda row: row.secs)

    def blocked_secs(self, ax: Axes | None = None) -> Axes:
        """Seconds that the training thread of the primary was blocked by each save."""
        label = "blocked in save()"
        return self._curve(ax, "Time that training was blocked", label, _units.secs, lambda row: row.blocked_secs)

    def _curve(
        self, ax: Axes | None, title: str, label: str, figure: _Figure, value: Callable[[EpochRow], Any]
    ) -> Axes:
        plot = _Plot(self._overview(), ax, title, label, figure)
        plot.line([_known(value(row)) for row in plot.epochs])
        return plot.done()

    def goodput(self, ax: Axes | None = None) -> Axes:
        """What each run has spent its time on: a bar per run, the oldest above."""
        found = self._goodput() if self._goodput is not None else Goodput("", ())
        ax = _axes(ax, "Time of runs", found.directory)
        ends = np.zeros(len(found.runs))
        places = range(len(found.runs))
        for name in SPENT:
            secs = np.array([getattr(run, name) for run in found.runs])
            ax.barh(places, secs, left=ends, label=name.removesuffix("_secs"))
            ends = ends + secs
        _in_units(ax.xaxis, "time", _units.secs, max(ends, default=0.0))
        ax.set_yticks(places, [_units.when(run.began_ns) for run in found.runs])
        ax.invert_yaxis()
        if found.runs:
            ax.legend(loc="best", fontsize="small", framealpha=0.7)
        else:
            ax.text(0.5, 0.5, "nothing is known of it", transform=ax.transAxes, ha="center", va="center")
        return ax

    def node_secs(self, ax: Axes | None = None) -> Axes:
        """Seconds that each node wrote: a line per node, or, of many, the median, most of them, and the slowest."""
        plot = _Plot(self._overview(), ax, "Time that nodes wrote", "writing of a node", _units.secs)
        names = list(dict.fromkeys(node.name for row in plot.epochs for node in row.nodes))
        times = [{node.name: _known(node.secs) for node in row.nodes} for row in plot.epochs]
        secs = np.array([[each.get(name, math.nan) for each in times] for name in names])
        many = len(names) > _FEW
        for colour, i in enumerate(plot.band(secs) if many else range(len(names)), start=int(many)):
            plot.line(secs[i].tolist(), f"C{colour}", _label(names[i]))
        return plot.done()

    def metric(self, name: str | None = None, ax: Axes | None = None) -> Axes:
        """A metric over the run; the latest is marked, and the best by the metric that `inspect` was given.

        A better one that was deleted is marked, too. A metric in a mapping is named `mapping/metric`; None means the
        one that `inspect` was given.

        Raises:
            InvalidArgumentError: no epoch has it.
        """
        seen = self._overview()
        if name is None and not seen.metric:
            raise InvalidArgumentError("which metric? Name it, or pass it: inspect(directory, metric='loss')")
        return self._metric(seen, seen.metric if name is None else name, ax)

    def metrics(self, *names: str) -> Figure:
        """Several metrics over the run, one above the other: these; or those that `inspect` was given; or all.

        Raises:
            InvalidArgumentError: no epoch has metrics, or not this one.
        """
        seen = self._overview()
        chosen = names or seen.asked or tuple(seen.history)[:_STACKED]
        return _stacked(chosen, lambda name, ax: self._metric(seen, name, ax))

    def _metric(self, seen: Overview, name: str, ax: Axes | None) -> Axes:
        plot = _Plot(seen, ax, f"{_label(name)} over {seen.unit}s", _label(name), _units.number)
        metrics = {row.epoch: flat(row.metrics) for row in whole_run.rows_of(seen)}
        if metrics and not any(name in each for each in metrics.values()):
            known = sorted({key for each in metrics.values() for key in each})
            raise UnknownNameError(f"no {seen.unit} has the metric {_text.shown(name)!r}; {_text.near(name, known)}")
        values = {epoch: _known(each.get(name)) for epoch, each in metrics.items()}
        plot.numbers = list(values)
        plot.line(list(values.values()))
        plot.mark("latest", "o", 9, "C1", [row.epoch for row in plot.epochs if row.latest], values)
        if seen.metric == name:
            best = [row.epoch for row in plot.epochs if row.best]
            better = [seen.better]
            plot.mark(f"best ({seen.mode})", "*", 15, "C2", best, values)
            plot.mark("better, deleted", "x", 9, "C3", [epoch for epoch in better if epoch is not None], values)
        return plot.done(from_zero=False)


class RunsPlots:
    """Plots of several runs over each other, by matplotlib."""

    def __init__(self, overview: Callable[[], RunsOverview]):
        self._overview = overview

    def metric(self, name: str | None = None, ax: Axes | None = None) -> Axes:
        """A metric of each run over its epochs, a line per run; None means the one that `inspect_runs` shows.

        Raises:
            UnknownNameError: no run has it.
            UnsupportedError: matplotlib is not installed.
        """
        seen = self._overview()
        return self._metric(seen, seen.metric if name is None else name, ax)

    def metrics(self, *names: str) -> Figure:
        """Several metrics of each run, one above the other: these; or all.

        Raises:
            InvalidArgumentError: no run has metrics, or not this one.
        """
        seen = self._overview()
        known = dict.fromkeys(name for row in seen.runs for name in row.history)
        chosen = names or sorted(known, key=lambda name: name != seen.metric)[:_STACKED]
        return _stacked(chosen, lambda name, ax: self._metric(seen, name, ax))

    def _metric(self, seen: RunsOverview, name: str, ax: Axes | None) -> Axes:
        curves = {row.name: row.history[name] for row in seen.runs if name in row.history}
        if not curves:
            known = sorted({each for row in seen.runs for each in row.history})
            raise UnknownNameError(f"no run has the metric {_text.shown(name)!r}; {_text.near(name, known)}")
        ax = _axes(ax, f"{_label(name)} of runs", seen.directory)
        for run, points in curves.items():
            ax.plot(*zip(*points, strict=True), marker="." if len(points) <= _MANY else "", label=_label(run))
        ax.set_xlabel(" or ".join(dict.fromkeys(row.unit for row in seen.runs)))
        ax.set_ylabel(_label(name))
        ax.yaxis.set_major_formatter(lambda value, _: _units.number(value))
        ax.grid(alpha=0.25)
        ax.legend(loc="best", fontsize="small", framealpha=0.7)
        return ax


class _Plot:
    """One plot of the committed epochs, in the making."""

    def __init__(self, seen: Overview, ax: Axes | None, title: str, label: str, figure: _Figure):
        self._ax = _axes(ax, title, seen.directory)
        self._label = label
        self._figure = figure
        from matplotlib.ticker import MaxNLocator

        self.epochs = [row for row in seen.epochs if row.state == COMMITTED]
        self.numbers = [row.epoch for row in self.epochs]  # over which lines are drawn
        self._unit = seen.unit
        self._ax.set_xlabel(seen.unit)
        self._ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        self._ax.grid(alpha=0.25)

    def line(self, values: Sequence[float], colour: str = "C0", label: str | None = None) -> None:
        """A line through the values of all epochs, with gaps where they are NaN."""
        # A value between two gaps has no line: only its marker shows it.
        size = 6 if len(values) <= _MANY else 3
        self._ax.plot(self.numbers, values, marker=".", markersize=size, linewidth=1.3, color=colour, label=label)

    def band(self, table: np.ndarray) -> list[int]:
        """Draws the range of most rows; returns those that are greater than the median by most, all epochs together."""
        known = ~np.isnan(table).all(axis=0)
        low, middle, high = np.full((3, table.shape[1]), np.nan)
        if known.any():
            low[known], middle[known], high[known] = np.nanpercentile(table[:, known], (10, 50, 90), axis=0)
        said = f"80 % of {len(table)} nodes"
        self._ax.fill_between(self.numbers, low, high, alpha=0.25, color="C0", linewidth=0, label=said)
        marker = "." if len(self.numbers) == 1 else ""
        self._ax.plot(self.numbers, middle, color="C0", linewidth=2, label="median", zorder=3, marker=marker)
        slower = np.nansum(table - middle, axis=1)
        # Where no row stands out, the greatest one is named all the same, and no other.
        least = np.nansum(middle) * _STANDS_OUT
        first = sorted(range(len(table)), key=lambda i: -slower[i])[:_NAMED]
        return [i for place, i in enumerate(first) if place == 0 or slower[i] > least]

    def mark(
        self, label: str, marker: str, size: int, colour: str, at: Sequence[int], values: Mapping[int, float]
    ) -> None:
        """Marks epochs and names them, if they have a value."""
        for number in at:
            if math.isfinite(value := values.get(number, math.nan)):
                said = f"{label}: {self._unit} {number}, {_units.number(value)}"
                self._ax.plot(number, value, marker, markersize=size, color=colour, label=said, zorder=4)

    def done(self, from_zero: bool = True) -> Axes:
        """The axes, with a legend, and with words in place of lines if nothing is known."""
        drawn = (np.asarray(line.get_ydata(), float) for line in self._ax.get_lines())
        known = [y for values in drawn for y in values.tolist() if math.isfinite(y)]
        if self._ax.get_legend_handles_labels()[0]:
            self._ax.legend(loc="best", fontsize="small", framealpha=0.7)
        _in_units(self._ax.yaxis, self._label, self._figure, max(known, default=0.0))
        if not known:
            said = "nothing is known of it" if self.epochs else "nothing is committed"
            self._ax.text(0.5, 0.5, said, transform=self._ax.transAxes, ha="center", va="center")
            self._ax.set_yticks([])
        elif from_zero:
            self._ax.set_ylim(0, max(known) * 1.08 or 1)
        return self._ax


def _in_units(axis: Axis, label: str, figure: _Figure, most: float) -> None:
    """Labels an axis with the unit that suits its greatest value, and has ticks at round figures of that unit."""
    from matplotlib.ticker import AutoLocator, FuncFormatter

    unit = figure(most).rpartition(" ")[2] if figure in _UNITS else ""
    size = _UNITS[figure](f"1{unit}") if unit else 1.0

    class Locator(AutoLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return np.asarray(super().tick_values(vmin / size, vmax / size)) * size

    axis.set_label_text(f"{label} ({unit})" if unit else label)
    axis.set_major_locator(Locator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _units.number(value / size)))


def _stacked(names: Sequence[str], draw: Callable[[str, Axes], object]) -> Figure:
    """A figure with axes for each name, one above the other, over the same epochs."""
    if not names:
        raise InvalidArgumentError("no epoch has metrics: there is nothing to plot")
    height = 1 + 2 * len(names)
    figure, grid = _pyplot().subplots(len(names), sharex=True, squeeze=False, figsize=(8, height), layout="constrained")
    for row, (name, ax) in enumerate(zip(names, grid[:, 0], strict=True)):
        draw(name, ax)
        if row:
            ax.set_title("")
        if row < len(names) - 1:
            ax.set_xlabel("")
    grid[0, 0].set_title(grid[0, 0].get_title().partition("\n")[2], fontsize="medium")  # where; labels say what
    return figure


def _axes(ax: Axes | None, title: str, directory: str) -> Axes:
    """The axes to draw on, with their title."""
    drawn: Axes = _pyplot().subplots(figsize=(8, 4), layout="constrained")[1] if ax is None else ax
    drawn.set_title(f"{title}\n{_label(directory, 80)}", fontsize="medium")
    return drawn


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedError('plots need matplotlib: pip install "epochckpt[plots]"') from error
    return plt


def _known(value: Any) -> float:
    """A number to draw; NaN, which leaves a gap, unless the value is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _label(text: str, limit: int = _NAME) -> str:
    """A name as matplotlib shows it: no formula in it, and no legend entry left out for its first letter."""
    safe = _text.shown(text, limit).replace("$", r"\$")
    return f" {safe}" if safe.startswith("_") else safe
