"""Plots: what they show is what the rows say, they stay readable, and gaps stay gaps."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from typing import Any

import matplotlib
import numpy as np
import pytest

from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.inspection import plots, rows

matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

HOSTILE = "_$\\frac{$\x1b[31m\n\u202e" + "n" * 10_000


def of(seen: rows.Overview) -> plots.Plots:
    return plots.Plots(lambda: seen)


PLOTS = {
    "nbytes": lambda seen, ax=None: of(seen).nbytes(ax),
    "save_secs": lambda seen, ax=None: of(seen).save_secs(ax),
    "blocked_secs": lambda seen, ax=None: of(seen).blocked_secs(ax),
    "node_secs": lambda seen, ax=None: of(seen).node_secs(ax),
    "metric": lambda seen, ax=None: of(seen).metric("loss", ax),
}


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    plt.close("all")


def epoch(number: int, nodes: int = 2, name: str = "process_{}", **more: Any) -> rows.EpochRow:
    slow = {7: 3.0}
    parts = tuple(rows.NodeRow(name.replace("{}", str(i)), 10, 1.0 + i / 1000 + slow.get(i, 0.0)) for i in range(nodes))
    common: dict[str, Any] = {
        "nodes": parts,
        "nbytes": 100 + number,
        "started_ns": 0,
        "committed_ns": 2_000_000_000 + number,
        "blocked_secs": 0.5,
        "metrics": {"loss": 1 / (number + 1)},
    }
    return rows.EpochRow(number, rows.COMMITTED, **{**common, **more})


def run(count: int = 5, **more: Any) -> rows.Overview:
    return rows.Overview("/run", tuple(epoch(i, **more) for i in range(count)), metric="loss", mode="min")


def drawn(ax: Any) -> None:
    ax.figure.savefig(io.BytesIO(), dpi=40)


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("nbytes", [100, 101, 102]),
        ("save_secs", [2.0, 2.000000001, 2.000000002]),
        ("blocked_secs", [0.5, 0.5, 0.5]),
        ("node_secs", [1.0, 1.0, 1.0]),
        ("metric", [1.0, 0.5, 1 / 3]),
    ],
)
def test_the_line_is_what_the_rows_say(name: str, values: list[float]) -> None:
    """Each epoch stands at its number with its value; title and axes say what it is."""
    ax = PLOTS[name](run(3))
    line = ax.get_lines()[0]
    assert line.get_xdata().tolist() == [0, 1, 2]
    assert line.get_ydata().tolist() == values
    assert ax.get_xlabel() == "epoch"
    assert "/run" in ax.get_title()
    assert ax.get_ylabel() == "loss" or re.search(r"\((B|ms|s)\)$", ax.get_ylabel())
    drawn(ax)


@pytest.mark.parametrize(
    ("name", "value", "unit", "ticks"),
    [
        ("nbytes", {"nbytes": 2_400_000_000}, "GB", {"0", "1", "2"}),
        ("save_secs", {"committed_ns": 5400 * 10**9}, "h", {"0", "1"}),
        ("save_secs", {"committed_ns": 450 * 10**9}, "min", {"0", "2", "4", "6"}),
        ("blocked_secs", {"blocked_secs": 0.0042}, "ms", {"0", "2", "4"}),
    ],
)
def test_the_unit_of_an_axis_is_that_of_its_ticks(name: str, value: dict[str, Any], unit: str, ticks: set[str]) -> None:
    """Ticks stand at round figures of the unit that the label names."""
    ax = PLOTS[name](run(3, **value))
    drawn(ax)
    assert ax.get_ylabel().endswith(f"({unit})")
    assert ticks <= {text.get_text() for text in ax.get_yticklabels()}


def test_metrics_are_drawn_over_the_whole_run() -> None:
    """One above the other, with what was deleted, and marks for the best that is there and for a better one."""
    epochs = tuple(epoch(i, metrics={"loss": float(i), HOSTILE: 1.0}, best=i == 3, latest=i == 4) for i in (3, 4))
    deleted = tuple(rows.MetricsRow(i, 0, {"loss": float(i)}, True) for i in (1, 2))
    points = rows.history((row.epoch, row.metrics) for row in (*deleted, *epochs))
    seen = rows.Overview("/run", epochs, metric="loss", mode="min", history=points, deleted=deleted, better=1)
    figure = of(seen).metrics()
    above, below = figure.axes
    drawn(above)
    assert above.get_lines()[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert above.get_lines()[0].get_ydata().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert legend(above) == ["latest: epoch 4, 4", "best (min): epoch 3, 3", "better, deleted: epoch 1, 1"]
    assert (above.get_title(), above.get_xlabel(), above.get_ylabel()) == ("/run", "", "loss")
    assert (below.get_title(), below.get_xlabel()) == ("", "epoch")
    assert below.get_xlim() == above.get_xlim()
    assert len(of(seen).metrics("loss").axes) == 1
    with pytest.raises(InvalidArgumentError, match="no epoch has metrics"):
        of(rows.Overview("/run", ())).metrics()
    found = tuple(rows.DirectoryRow(name, "training", history=points) for name in ("a", HOSTILE))
    runs = plots.RunsPlots(lambda: rows.RunsOverview("/runs", found, "loss"))
    assert [len(ax.get_lines()) for ax in runs.metrics().axes] == [2, 2]
    assert [ax.get_ylabel() for ax in runs.metrics("loss").axes] == ["loss"]
    drawn(runs.metrics().axes[0])


@pytest.mark.slow
@pytest.mark.parametrize("style", ["default", "dark_background"])
@pytest.mark.parametrize("name", PLOTS)
def test_everything_is_drawn(name: str, style: str) -> None:
    """None, one and many epochs and nodes, with hostile names, are drawn without a warning, in any style."""
    with plt.style.context(style):
        for seen in (run(0), run(1, nodes=0), run(1, nodes=64), run(500, nodes=8), run(3, name="{}" + HOSTILE)):
            drawn(PLOTS[name](seen))
        strange = epoch(0, blocked_secs=math.nan, started_ns=None, metrics={"loss": math.nan})
        drawn(PLOTS[name](rows.Overview(HOSTILE, (strange,))))


@pytest.mark.parametrize("name", PLOTS)
def test_they_draw_where_they_are_told(name: str) -> None:
    """The axes that are given are drawn on and returned, no others are made."""
    _, ax = plt.subplots()
    figures = plt.get_fignums()  # a test of another file may have left some
    assert PLOTS[name](run(), ax) is ax
    assert plt.get_fignums() == figures


def test_what_is_not_known_is_a_gap() -> None:
    """NaN, infinities, text and what was not measured leave gaps; a value between two gaps has a marker."""
    found = [1.0, math.nan, 3.0, math.inf, "text", None, 7.0] + [8.0] * 100
    epochs = tuple(epoch(i, metrics={"loss": value}) for i, value in enumerate(found))
    ax = of(rows.Overview("/run", epochs)).metric("loss")
    values = ax.get_lines()[0].get_ydata()
    assert np.isnan(values).tolist() == [False, True, False, True, True, True, False] + [False] * 100
    assert ax.get_lines()[0].get_marker() == "."
    gaps = tuple(epoch(i, blocked_secs=None if i == 1 else 0.5) for i in range(3))
    assert np.isnan(of(rows.Overview("/run", gaps)).blocked_secs().get_lines()[0].get_ydata()).tolist() == [
        False,
        True,
        False,
    ]


def test_only_committed_epochs_are_drawn() -> None:
    """Attempts and damaged epochs have no size or duration to compare."""
    states = (rows.COMMITTED, rows.DAMAGED, rows.ABANDONED, rows.IN_PROGRESS, rows.COMMITTED)
    epochs = tuple(rows.EpochRow(i, state, nbytes=1) for i, state in enumerate(states))
    assert of(rows.Overview("/run", epochs)).nbytes().get_lines()[0].get_xdata().tolist() == [0, 4]


def test_best_and_latest_are_marked() -> None:
    """Both are named with epoch and value; the best only of the metric that the overview was made with."""
    epochs = tuple(epoch(i, latest=i == 4, best=i == 2) for i in range(5))
    ax = of(rows.Overview("/run", epochs, metric="loss", mode="min")).metric("loss")
    assert legend(ax) == ["latest: epoch 4, 0.2", "best (min): epoch 2, 0.3333"]
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.get_lines()[1:]]
    assert marks == [(4, 0.2), (2, 1 / 3)]
    other = rows.Overview("/run", epochs, metric="accuracy", mode="max")
    assert legend(of(other).metric("loss")) == ["latest: epoch 4, 0.2"]


def test_metrics_in_mappings() -> None:
    """A metric inside another mapping goes by its path; a name that has a slash itself comes first."""
    epochs = (epoch(0, metrics={"eval": {"loss": 3.0}}), epoch(1, metrics={"eval/loss": 4.0}))
    ax = of(rows.Overview("/run", epochs)).metric("eval/loss")
    assert ax.get_lines()[0].get_ydata().tolist() == [3.0, 4.0]


def test_an_unknown_metric_is_refused() -> None:
    """The error names those that there are."""
    with pytest.raises(InvalidArgumentError, match="no epoch has the metric 'los'; near: 'loss'"):
        of(run()).metric("los")


def test_many_nodes_are_a_band_and_the_slowest_by_name() -> None:
    """64 nodes have no 64 entries: most of them are a band with its median, and the slow one is named."""
    assert legend(of(run(nodes=3)).node_secs()) == ["process_0", "process_1", "process_2"]
    ax = of(run(nodes=64)).node_secs()
    assert legend(ax) == ["80 % of 64 nodes", "median", "process_7"]
    median, slow = ax.get_lines()
    assert median.get_ydata().tolist() == pytest.approx([1.0325] * 5)
    assert slow.get_ydata().tolist() == pytest.approx([4.007] * 5)


def test_matplotlib_is_imported_only_to_draw() -> None:
    """Importing the module imports no matplotlib."""
    code = "import sys, epochckpt.inspection.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else needs it, so that it may be missing."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedError, match=r'pip install "epochckpt\[plots\]"'):
        of(run()).nbytes()
