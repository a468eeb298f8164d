"""What people see of a run: a progress bar over epochs, in a terminal or a notebook, and nowhere else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from epochckpt.jobs import stop

_SHOWN = 4  # metrics


class Bar:
    """A progress bar over epochs, or nothing.

    Args:
        bar: tqdm's, or None.
    """

    def __init__(self, bar: Any):
        self._bar = bar

    def at(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Shows the epochs that are done, and what the last one gave."""
        if self._bar is None:
            return
        shown = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in list(metrics.items())[:_SHOWN]}
        self._bar.n = epoch
        self._bar.set_postfix(shown, refresh=True)


@contextmanager
def bar(shown: bool | None, primary: bool, conditions: Iterable[stop.Condition]) -> Generator[Bar]:
    """A progress bar for a run.

    Args:
        shown: show it; None: where output is a terminal or a notebook.
        primary: one process shows it.
        conditions: of the job; the least `max_epochs` is the bar's end.
    """
    notebook = _in_notebook()
    if not primary or shown is False or (shown is None and not notebook and not sys.stderr.isatty()):
        yield Bar(None)
        return
    limits = [limit for condition in conditions for limit in _limits(condition)]
    if notebook and _has_widgets():
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    with tqdm(total=min(limits, default=None), unit="epoch", desc="training") as shown_bar:
        yield Bar(shown_bar)


def _limits(condition: stop.Condition) -> list[int]:
    """The numbers of epochs that end a run, if one of them is enough."""
    if isinstance(condition, stop.max_epochs):
        return [condition.epochs]
    return [limit for part in stop.alternatives(condition) for limit in _limits(part)]


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _has_widgets() -> bool:
    return importlib.util.find_spec("ipywidgets") is not None
