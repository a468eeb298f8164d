"""What people see of a run: a progress bar over epochs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from epochckpt.jobs import stop

ShowEpoch = Callable[[int, Mapping[str, Any]], None]
"""Shows that an epoch is done, with its metrics."""

_SHOWN = 4  # metrics


@contextmanager
def bar(shown: bool | None, primary: bool, conditions: Iterable[stop.Condition]) -> Generator[ShowEpoch]:
    """A progress bar for a run, on the primary; the least `max_epochs` of the conditions is its end.

    `shown` is the runner's `progress`; None: where output is a terminal or a notebook.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    notebook = hasattr(shell, "kernel")
    if not primary or shown is False or (shown is None and not notebook and not sys.stderr.isatty()):
        yield lambda epoch, metrics: None
        return
    if notebook and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    total = min((limit for condition in conditions for limit in _limits(condition)), default=None)
    with tqdm(total=total, unit="epoch", desc="training") as drawn:

        def show(epoch: int, metrics: Mapping[str, Any]) -> None:
            texts = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in list(metrics.items())[:_SHOWN]}
            drawn.n = epoch
            drawn.set_postfix(texts, refresh=True)

        yield show


def _limits(condition: stop.Condition) -> list[int]:
    """The numbers of epochs that end a run by themselves."""
    if isinstance(condition, stop.max_epochs):
        return [condition.epochs]
    return [limit for part in stop.alternatives(condition) for limit in _limits(part)]
