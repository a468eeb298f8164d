"""What people see of a run: a progress bar over its epochs or a line for each, and what became of it."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from epochckpt import _progress, _text
from epochckpt._units import several
from epochckpt.jobs import stop

FENCED_OFF_EXIT_CODE = 76  # a newer run saves to the directory: do not start this one again
PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: start it again
UNSAVED_EXIT_CODE = 74  # EX_IOERR of sysexits.h
_FAILURES = 5  # failed saves that are named
_METRICS = 4  # metrics that are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What became of a run. Printed, it is one line.

    Attributes:
        stop_reason: the stop conditions that were true, `preempted`, or `was finished already`.
        epoch: the last epoch.
        partial: the last epoch was left in the middle; it is saved as it is, and will be entered again.
        last_committed_epoch: the newest epoch on storage; None without such an epoch, or without a manager.
        unsaved: why the last epoch is not on storage; empty if it is, and without a manager.
        failed_saves: (epoch, reason) of the saves of this run that failed.
        preempted: the run stopped because it was preempted, or it was preempted while it ended.
        finished: a stop condition ended the run: started again it does not go on, as long as the condition holds.
        fenced_off: a newer run has taken over the directory; this one ended at once, without `download` and `exit`.
        resumed_from: the epoch that the run went on from; None from scratch.
        blocked_secs: seconds for which saving has kept this process from training.
        slowest_node: of several nodes the one that took longest to write, and its seconds in all; else None.
        elapsed_secs: seconds that this run took.
        total_secs: seconds that all runs of this job took until the last epoch.
        unit: what the job counts, `epoch` or `step`; of one that counts steps the numbers here are numbers of steps.
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
    unit: str = "epoch"

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
        unit = self.unit
        kept = "nothing" if self.last_committed_epoch is None else f"{unit} {self.last_committed_epoch}"
        begun = "" if self.resumed_from is None else f"resumed from {unit} {self.resumed_from}, "
        parts = [
            f"{begun}stopped after {unit} {self.epoch}{' (partial)' if self.partial else ''}: {self.stop_reason}",
            f"{kept} is the newest on storage",
            f"saving blocked training for {self.blocked_secs:.2f} of {self.elapsed_secs:.1f} s",
        ]
        if self.failed_saves:
            shown = "; ".join(f"{unit} {epoch}: {reason}" for epoch, reason in self.failed_saves[-_FAILURES:])
            parts.append(f"{several(len(self.failed_saves), 'save', 'saves')} failed ({shown})")
        if self.slowest_node is not None:
            node, secs = self.slowest_node
            parts.append(f"slowest node {node} ({secs:.2f} s)")
        return "; ".join(parts)


ShowEpoch = Callable[[int, Mapping[str, Any]], None]
"""Shows that an epoch is done, with its metrics."""


@contextlib.contextmanager
def bar(shown: bool | None, primary: bool, conditions: Iterable[stop.Condition], unit: str) -> Generator[ShowEpoch]:
    """A progress bar for a run, on the primary; the least `max_epochs` of the conditions is its end.

    `shown` is the runner's `progress`; None: where output is a terminal or a notebook, and else a line for each epoch.
    """
    alternatives = (one for condition in conditions for one in stop.alternatives(condition))
    total = min((one.n for one in alternatives if isinstance(one, stop.max_epochs)), default=None)

    def texts(metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in list(metrics.items())[:_METRICS]}

    if not primary or shown is False:
        yield lambda epoch, metrics: None
        return
    if shown is None and not _progress.is_shown():

        def say(epoch: int, metrics: Mapping[str, Any]) -> None:
            said = ", ".join(f"{name}={value}" for name, value in texts(metrics).items())
            line = f"{unit} {epoch}{'' if total is None else f'/{total}'}{': ' if said else ''}{said}"
            with contextlib.suppress(OSError, ValueError, AttributeError):  # training does not depend on a reader
                print(_text.shown(line, limit=500), file=sys.stderr, flush=True)

        yield say
        return
    with _progress.bar("training", total, unit) as drawn:

        def show(epoch: int, metrics: Mapping[str, Any]) -> None:
            drawn.n = epoch
            drawn.set_postfix(texts(metrics), refresh=True)

        yield show
