"""What people see of a run: a progress bar over its epochs, and what became of it."""

import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from epochckpt._units import several
from epochckpt.jobs import stop

FENCED_OFF_EXIT_CODE = 76  # a newer run saves to the directory: do not start this one again
PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: start it again
UNSAVED_EXIT_CODE = 74  # EX_IOERR of sysexits.h
_FAILURES, _METRICS = 5, 4  # as many are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What became of a run. Printed, it is one line.

    Attributes:
        stop_reason: the stop conditions that were true, `preempted`, or `was finished already`.
        epoch: the last epoch.
        partial: the last epoch was left in the middle; it is saved as it is, and will be entered again.
        last_committed_epoch: the newest epoch that is on storage; None if there is none, or no manager.
        unsaved: why the last epoch is not on storage; empty if it is, and without a manager.
        failed_saves: (epoch, reason) of the saves of this run that failed.
        preempted: the run stopped because it was preempted, or it was preempted while it ended.
        finished: a stop condition ended the run: started again it does not go on, as long as the condition holds.
        fenced_off: a newer run has taken over the directory; this one ended at once, without `download` and `exit`.
        resumed_from: the epoch that the run went on from; None from scratch.
        blocked_secs: seconds for which saving has kept this process from training.
        slowest_node: the node that took longest to write, and its seconds in all; None if nothing was written.
        elapsed_secs: seconds that this run took.
        total_secs: seconds that all runs of this job took until the last epoch.
    """

    stop_reason: str = ""
    epoch: int = 0
    partial: bool = False
    last_committed_epoch: int | None = None
    unsaved: str = ""
    failed_saves: tuple[tuple[int, str], ...] = ()
    preempted: bool = False
    finished: bool = False
    fenced_off: bool = False
    resumed_from: int | None = None
    blocked_secs: float = 0.0
    slowest_node: tuple[str, float] | None = None
    elapsed_secs: float = 0.0
    total_secs: float = 0.0

    @property
    def exit_code(self) -> int:
        """For `sys.exit`: the first of these that is true.

        76: the run was fenced off; do not start it again.
        74 (EX_IOERR of sysexits.h): the last epoch is not on storage.
        75 (EX_TEMPFAIL): the run was preempted; start it again.
        0: otherwise.
        """
        if self.fenced_off:
            return FENCED_OFF_EXIT_CODE
        if self.unsaved:
            return UNSAVED_EXIT_CODE
        return PREEMPTED_EXIT_CODE if self.preempted else 0

    def __str__(self) -> str:
        kept = "nothing" if self.last_committed_epoch is None else f"epoch {self.last_committed_epoch}"
        begun = "" if self.resumed_from is None else f"resumed from epoch {self.resumed_from}, "
        parts = [
            f"{begun}stopped after epoch {self.epoch}{' (partial)' if self.partial else ''}: {self.stop_reason}",
            f"{kept} is the newest on storage",
            f"saving blocked training for {self.blocked_secs:.2f} of {self.elapsed_secs:.1f} s",
        ]
        if self.failed_saves:
            shown = "; ".join(f"epoch {epoch}: {reason}" for epoch, reason in self.failed_saves[-_FAILURES:])
            parts.append(f"{several(len(self.failed_saves), 'save', 'saves')} failed ({shown})")
        if self.slowest_node is not None:
            parts.append("slowest node {} ({:.2f} s)".format(*self.slowest_node))
        return "; ".join(parts)


ShowEpoch = Callable[[int, Mapping[str, Any]], None]
"""Shows that an epoch is done, with its metrics."""


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
    from tqdm.auto import tqdm

    alternatives = (one for condition in conditions for one in stop.alternatives(condition))
    total = min((one.epochs for one in alternatives if isinstance(one, stop.max_epochs)), default=None)
    with tqdm(total=total, unit="epoch", desc="training") as drawn:

        def show(epoch: int, metrics: Mapping[str, Any]) -> None:
            texts = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in list(metrics.items())[:_METRICS]}
            drawn.n = epoch
            drawn.set_postfix(texts, refresh=True)

        yield show
