"""`auto_interval`: saves as often as is best, by Young and Daly, from what saves cost and how often runs are killed.

All processes of a job must decide alike, and none asks another. So decisions depend on numbers of steps and on what the
primary has measured, never on a clock of this process: the cost of a save (`SaveCost`) comes with the verdict on it, in
the background. The interval after a save follows from all saves but that newest one. In the rare case that the one
before it has not ended by then, a job of several processes waits for its end; a job of one process never
waits, and decides from the saves that have ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide  # pyright: ignore[reportMissingTypeStubs]

from epochckpt import _units
from epochckpt._threads import Deadline, Future
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import FormatVersionError, InvalidArgumentError, UnsupportedError
from epochckpt.format import RunEntry

_WINDOW = 8  # saves that are looked at, the newest ones
_UNSEEN_SECS = 86_400.0  # time between failures where none has been seen, at least


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """A committed save, as the primary measured it: the same on every process."""

    epoch: int
    started_ns: int
    blocked_secs: float
    secs: float  # from the call of `save` to the commit

    @classmethod
    def of(cls, epoch: int, summary: EpochSummary) -> SaveCost | None:
        """The cost of a recorded save; None for a step of stock Orbax."""
        return cls(epoch, summary.started_ns, summary.blocked_secs, summary.secs) if summary.secs else None


class SaveIntervalEstimator:
    """The costs of a directory's saves, as all processes of a job know them, and the interval that was decided.

    `alone`: this process is the only one of the job.
    """

    def __init__(self, alone: bool):
        self._alone = alone
        self._earlier = list[SaveCost]()
        self.runs = tuple[RunEntry, ...]()
        self._ends: collections.deque[tuple[Future[Any], Deadline]] = collections.deque(maxlen=_WINDOW + 1)
        self._begun = 0
        self._decided = (-1, 1)  # the number of saves, and the interval after the last one of them

    def reset(self, costs: Iterable[SaveCost], runs: Sequence[RunEntry]) -> None:
        """Starts anew from a look at storage, when no save is in flight; see `Survey`."""
        self._earlier = list(costs)
        self.runs = tuple(runs)
        self._ends.clear()

    def begun(self, end: Future[Any], secs: float) -> None:
        """A save has begun; at its end its cost is there, None if it fails. Nothing waits longer than `secs`."""
        self._ends.append((end, Deadline(secs)))
        self._begun += 1

    @property
    def saving(self) -> bool:
        """Whether a save of this manager has not ended yet."""
        return any(not end.done() for end, _ in self._ends)

    def costs(self) -> list[SaveCost]:
        """The newest costs that all processes know; may wait for the save before the newest."""
        ends = list(self._ends)
        ends = [each for each in ends if each[0].done()] if self._alone else ends[:-1]
        found = (end.result() for end, bound in ends if end.wait(bound.left()))
        return [*self._earlier, *(cost for cost in found if cost is not None)][-_WINDOW - 1 :]

    def interval(self, steps: int, choose: Callable[[list[SaveCost]], int]) -> int | None:
        """The interval after the newest save, which was so many steps ago; None if it is not over for sure."""
        decided, interval = self._decided
        if self._alone:
            costs = self.costs()
            return choose(costs) if costs or not self.saving else None
        if decided != self._begun:  # it shrinks at most by half, so that the save before has time to end
            least = -(-interval // 2)
            if steps < least:
                return None
            interval = max(choose(self.costs()), least)
            self._decided = (self._begun, interval)
        return interval


@dataclasses.dataclass(kw_only=True)
class IntervalContext(decide.DecisionContext):
    """What Orbax tells a policy, and the pace of the manager."""

    pace: SaveIntervalEstimator


@dataclasses.dataclass(frozen=True)
class AutoInterval(decide.SaveDecisionPolicy):
    """The policy that `auto_interval` makes."""

    target_overhead: float | None
    mtbf_secs: float | None

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """See `orbax.checkpoint.checkpoint_managers.SaveDecisionPolicy`."""
        pace = getattr(context, "pace", None)
        if not isinstance(pace, SaveIntervalEstimator):
            raise UnsupportedError("auto_interval needs an epochckpt.CheckpointManager, which measures what saves cost")
        if context.reached_preemption or not previous_steps:
            return True
        steps = step.step - previous_steps[-1].step
        interval = pace.interval(steps, lambda costs: self.steps(costs, pace.runs))
        return interval is not None and steps >= interval

    def steps(self, costs: Sequence[SaveCost], runs: Sequence[RunEntry]) -> int:
        """The best number of steps between two saves; 1 until two saves in a row have been measured."""
        pairs = [(a, b) for a, b in itertools.pairwise(costs) if b.epoch > a.epoch and b.started_ns > a.started_ns]
        if not pairs:
            return 1
        # The median is not moved by the pause between two runs.
        trained = [((b.started_ns - a.started_ns) / 1e9 - a.blocked_secs) / (b.epoch - a.epoch) for a, b in pairs]
        step_secs = max(statistics.median(trained), 1e-9)
        blocked = statistics.median(cost.blocked_secs for cost in costs)
        secs = young_daly(blocked, self.mtbf_secs or observed_mtbf(runs))
        if self.target_overhead is not None:
            secs = max(secs, blocked / self.target_overhead)
        secs = max(secs, statistics.median(cost.secs for cost in costs))  # one save at a time
        return max(round(min(secs / step_secs, 2.0**40)), 1)


def young_daly(cost_secs: float, mtbf_secs: float) -> float:
    """The time to train between two saves that loses least, by Daly's estimate of higher order.

    `cost_secs`: how long a save holds training; `mtbf_secs`: the mean time between failures. See J. T. Daly, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", 2006, after J. W. Young, 1974.
    """
    if cost_secs >= 2 * mtbf_secs:
        return mtbf_secs
    share = cost_secs / (2 * mtbf_secs)
    return math.sqrt(2 * cost_secs * mtbf_secs) * (1 + math.sqrt(share) / 3 + share / 9) - cost_secs


def observed_mtbf(runs: Sequence[RunEntry]) -> float:
    """Mean seconds between kills of runs that have committed; a day, or as long as they ran, where none was seen."""
    secs = sum(max(run.committed_ns - run.began_ns, 0) for run in runs) / 1e9
    kills = sum(1 for run in runs if run.killed and run.saves)
    return max(secs / kills, 1.0) if kills else max(secs, _UNSEEN_SECS)


def is_asked(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether the policy of the options is, or has, an `AutoInterval`."""
    policy: Any = options.save_decision_policy
    return any(isinstance(each, AutoInterval) for each in (policy, *getattr(policy, "policies", ())))


def recent(epochs: Sequence[int], read: Callable[[int], EpochSummary]) -> list[SaveCost]:
    """The costs of the newest of these epochs, but for those that only a newer epochckpt can read."""
    found = list[SaveCost]()
    for epoch in epochs[-_WINDOW - 1 :]:
        with contextlib.suppress(FormatVersionError):
            cost = SaveCost.of(epoch, read(epoch))
            found += [] if cost is None else [cost]
    return found


def auto_interval(*, target_overhead: float | None = None, mtbf: float | str | None = None) -> AutoInterval:
    """A policy for `CheckpointManagerOptions(save_decision_policy=…)` that saves as often as loses least time.

    The first steps are saved to measure how long a save holds training, and how long a step takes; from then on the
    interval is that of Young and Daly, which balances the time that saves cost against the training that a failure
    loses. It follows what the newest saves have cost, and is never shorter than a save takes. All processes of a job
    decide alike, without a barrier. It also saves at JAX's preemption notice.

    Args:
        target_overhead: the most that saves may cost, as a share of the training between them, such as 0.01.
        mtbf: the mean time between failures of the whole job, in seconds or as `"6h"`; None: as observed, from the runs
            that the directory's records tell of (see `epochckpt goodput`), a day where no failure has been seen.

    Raises:
        InvalidArgumentError: the share is not between 0 and 1, or the time cannot be understood.

    Examples:
        >>> options = ocp.CheckpointManagerOptions(save_decision_policy=ec.policy.auto_interval(mtbf="6h"))
        >>> with ec.CheckpointManager("run", options=options) as manager:
        ...     saved = [manager.save(step, args=ocp.args.StandardSave({"step": step})) for step in range(100)]
        >>> saved[0]
        True
    """
    share: Any = target_overhead
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1):
        raise InvalidArgumentError(f"target_overhead is a share between 0 and 1, such as 0.01; got {share!r}")
    try:
        secs = _units.parse_secs(mtbf) if isinstance(mtbf, str) else mtbf
    except ValueError as error:
        raise InvalidArgumentError(f"mtbf is {mtbf!r}, which is no duration such as 6h or 1d: {error}") from None
    number = isinstance(secs, int | float) and not isinstance(secs, bool)
    if secs is not None and not (number and 0 < secs < math.inf):
        raise InvalidArgumentError(f"mtbf is a time above 0, in seconds or as '6h'; got {mtbf!r}")
    return AutoInterval(None if share is None else float(share), None if secs is None else float(secs))
