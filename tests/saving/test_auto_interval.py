"""`ec.policy.auto_interval`: near the best fixed interval on replayed failures, and alike on all processes."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide

import epochckpt as ec
from epochckpt import _threads
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import FormatVersionError, InvalidArgumentError, UnsupportedError
from epochckpt.format import RunEntry
from epochckpt.saving.auto_interval import (
    AutoInterval,
    IntervalContext,
    SaveCost,
    SaveIntervalEstimator,
    observed_mtbf,
    recent,
    young_daly,
)
from tests.support.processes import run_worker

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions


class Trace(NamedTuple):
    """A job on a machine that fails: seconds of a step, of what a save blocks, of a save, of a restart."""

    step: float
    blocked: float
    save: float
    restart: float
    mtbf: float
    steps: int = 20_000


def failures(trace: Trace, seed: int) -> collections.deque[float]:
    """When the machine fails, by a clock that goes on while the job is down."""
    chance, clock, found = random.Random(seed), 0.0, collections.deque[float]()
    while clock < 10 * trace.steps * trace.step:
        clock += chance.expovariate(1 / trace.mtbf)
        found.append(clock)
    return found


class Info(NamedTuple):
    step: int


class Auto:
    """The policy as a manager asks it, anew after each restart with what the records tell."""

    def __init__(self, policy: AutoInterval):
        self._policy, self._costs, self._runs = policy, list[SaveCost](), list[RunEntry]()

    def open(self, clock: float) -> None:
        if self._runs:
            self._runs[-1] = dataclasses.replace(self._runs[-1], killed=True)
        self._began, self._saves, self._pace = clock, 0, SaveIntervalEstimator(alone=True)
        self._pace.reset(self._costs[-9:], self._runs)

    def asks(self, step: int, last: int | None) -> bool:
        options = ocp.options.MultiprocessingOptions()
        context = IntervalContext(
            pace=self._pace, is_saving_in_progress=False, reached_preemption=False, multiprocessing_options=options
        )
        return self._policy.should_save(Info(step), [] if last is None else [Info(last)], context=context)

    def saved(self, cost: SaveCost) -> None:
        end: _threads.Future[Any] = _threads.Future()
        end.set(cost)
        self._pace.begun(end, 1.0)
        self._costs.append(cost)
        self._saves += 1
        times = int(self._began * 1e9), cost.started_ns, cost.started_ns + int(cost.secs * 1e9)
        run = RunEntry(str(self._began), *times, self._saves, cost.epoch, 0.0, 0.0, 0.0)
        self._runs = [*(r for r in self._runs if r.incarnation != run.incarnation), run]


class Fixed:
    """Saves every n-th step."""

    def __init__(self, interval: int):
        self._interval = interval

    def open(self, clock: float) -> None: ...

    def asks(self, step: int, last: int | None) -> bool:
        return step % self._interval == 0

    def saved(self, cost: SaveCost) -> None: ...


def replay(trace: Trace, seed: int, policy: Auto | Fixed) -> float:
    """The seconds that the job takes until all its steps are done."""
    fails, clock, step, last = failures(trace, seed), 0.0, 0, None
    kept = 0  # the step of the newest epoch
    waiting: tuple[int, float, float] | None = None  # (step, began, committed) of a save that goes on
    policy.open(clock)
    while step < trace.steps:
        clock += trace.step
        step += 1
        if waiting is not None and waiting[2] <= min(clock, fails[0]):
            kept, began, end = waiting
            policy.saved(SaveCost(kept, int(began * 1e9), trace.blocked, end - began))
            waiting = None
        if clock < fails[0] and waiting is None and policy.asks(step, last):
            waiting, last = (step, clock, clock + trace.save), step
            clock += trace.blocked
        if clock >= fails[0]:
            clock = fails.popleft() + trace.restart
            while fails[0] <= clock:
                clock = fails.popleft() + trace.restart
            step, waiting, last = kept, None, kept or None
            policy.open(clock)
    return clock


TRACES = {
    "saves that block long": Trace(step=2.0, blocked=20.0, save=20.0, restart=60.0, mtbf=3600.0),
    "saves in the background": Trace(step=1.0, blocked=2.0, save=40.0, restart=30.0, mtbf=1800.0),
    "long steps": Trace(step=30.0, blocked=15.0, save=20.0, restart=120.0, mtbf=7200.0, steps=6000),
}


def mean(trace: Trace, policy: Any, seeds: Sequence[int]) -> float:
    return float(np.mean([replay(trace, seed, policy()) for seed in seeds]))


@pytest.mark.parametrize(
    "name", ["long steps", *(pytest.param(name, marks=pytest.mark.slow) for name in list(TRACES)[:2])]
)
def test_replayed_failures_cost_within_two_percent_of_the_best_fixed_interval(name: str) -> None:
    """Of intervals on a grid of 25 %, found afterwards on the same failures. A wrong interval would cost much more."""
    trace, seeds = TRACES[name], (1, 2)
    guess = young_daly(trace.blocked, trace.mtbf) / trace.step
    grid = sorted({max(round(guess * 1.25**power), 1) for power in range(-5, 6)})
    fixed = {interval: mean(trace, lambda interval=interval: Fixed(interval), seeds) for interval in grid}
    best = min(fixed.values())
    found = mean(trace, lambda: Auto(ec.policy.auto_interval(mtbf=trace.mtbf)), seeds)
    assert found <= 1.02 * best, (found / best, fixed)
    assert max(fixed.values()) > 1.02 * best, fixed


@pytest.mark.long
@pytest.mark.parametrize("name", TRACES)
def test_the_time_between_failures_is_observed(name: str) -> None:
    """From what the records tell: within five percent, though the first failure comes as a surprise."""
    trace, seeds = TRACES[name], (3, 4)
    best = min(mean(trace, lambda n=n: Fixed(n), seeds) for n in _around(trace))
    assert mean(trace, lambda: Auto(ec.policy.auto_interval()), seeds) <= 1.05 * best


def _around(trace: Trace) -> list[int]:
    guess = young_daly(trace.blocked, trace.mtbf) / trace.step
    return [max(round(guess * 1.3**power), 1) for power in range(-3, 4)]


def test_the_formula_is_that_of_young_and_daly() -> None:
    """Against the minimum of Daly's exact expectation of the time that a run takes, found by trying."""
    for cost, mtbf in ((1.0, 1e3), (10.0, 1e4), (60.0, 3600.0)):
        times = np.linspace(cost, 10 * (cost * mtbf) ** 0.5, 200_000)
        wall = mtbf * np.expm1((times + cost) / mtbf) / times
        assert young_daly(cost, mtbf) == pytest.approx(times[wall.argmin()], rel=0.01)
    assert young_daly(100.0, 10.0) == 10.0


def test_observed_failures_are_kills() -> None:
    hour = 3600 * 10**9
    runs = [RunEntry(str(n), 0, hour, 2 * hour, 1, 1, 0.0, 0.0, 0.0, killed) for n, killed in enumerate((True, False))]
    assert observed_mtbf(runs) == 4 * 3600
    assert observed_mtbf(runs[1:]) == 86_400


def costs(count: int, step: float, blocked: float, secs: float) -> list[SaveCost]:
    """Saves of every tenth step."""
    return [SaveCost(10 * n, int(1e9 * n * (10 * step + blocked)), blocked, secs) for n in range(1, count + 1)]


def test_the_interval_has_bounds() -> None:
    """Saves cost at most the target, and there is one at a time; before anything is measured every step is saved."""
    policy = AutoInterval(None, 100.0)
    assert policy.steps([], []) == policy.steps(costs(1, 1.0, 1.0, 1.0), []) == 1
    assert policy.steps(costs(5, 1.0, 1.0, 1.0), []) == round(young_daly(1.0, 100.0))
    assert policy.steps(costs(5, 1.0, 1.0, 40.0), []) == 40
    assert AutoInterval(0.01, 100.0).steps(costs(5, 1.0, 1.0, 1.0), []) == 100
    assert AutoInterval(0.5, 100.0).steps(costs(5, 1.0, 1.0, 1.0), []) == round(young_daly(1.0, 100.0))
    assert policy.steps(costs(5, 0.001, 1.0, 1.0), []) == pytest.approx(1000 * young_daly(1.0, 100.0), rel=0.01)


def test_the_newest_saves_are_looked_at() -> None:
    """Nine of them, which are eight intervals; a record that only a newer version can read is passed over."""
    read: list[int] = []

    def summary(epoch: int) -> EpochSummary:
        read.append(epoch)
        if epoch == 18:
            raise FormatVersionError(f"{epoch}/epoch.json", "needs a newer version")
        measured = EpochSummary.unrecorded(metrics=None, time_ns=0)
        return dataclasses.replace(measured, started_ns=epoch, blocked_secs=0.5, secs=float(epoch))

    found = recent(range(20), summary)
    assert read == list(range(11, 20))
    assert [cost.epoch for cost in found] == [*range(11, 18), 19]
    assert found[0] == SaveCost(epoch=11, started_ns=11, blocked_secs=0.5, secs=11.0)


def test_processes_of_a_job_decide_from_the_same_saves() -> None:
    """Whatever a process has heard early: the newest save does not count, and the one before it is waited for."""
    first, *rest = costs(4, 1.0, 1.0, 1.0)
    early, late = SaveIntervalEstimator(alone=False), SaveIntervalEstimator(alone=False)
    ends = [[_threads.Future[Any]() for _ in range(3)] for _ in range(2)]
    heard: list[list[SaveCost]] = []
    for pace, found in zip((early, late), ends, strict=True):
        pace.reset([first], [])
        for end in found:
            pace.begun(end, 30.0)
    for end, cost in zip(ends[0], [rest[0], None, rest[1]], strict=True):
        end.set(cost)
    ends[1][0].set(rest[0])
    asked = _threads.start(lambda: heard.append(late.costs()))
    assert not asked.wait(0.05)
    ends[1][1].set(None)
    asked.result(30.0)
    assert heard == [early.costs()] == [[first, rest[0]]]


def test_an_interval_shrinks_by_half_at_most_in_a_job() -> None:
    pace, end = SaveIntervalEstimator(alone=False), _threads.Future[Any]()
    assert pace.interval(1, lambda _: 64) == 64
    pace.begun(end, 0.0)
    assert pace.interval(31, lambda _: 1) is None  # not even asked, so that the save before has time to end
    assert pace.interval(32, lambda _: 1) == 32
    assert pace.interval(33, lambda _: 1000) == 32  # decided once for each save
    pace.begun(_threads.Future(), 0.0)
    assert pace.interval(32, len) == 16  # the save before has not ended, and nobody waits longer


def test_a_manager_follows_it(directory: str) -> None:
    """The first steps are saved; a long time between failures ends that, and a later run goes on with it."""
    policy = ec.policy.auto_interval(mtbf="30d")
    with ec.CheckpointManager(directory, options=Options(save_decision_policy=policy)) as manager:
        saved = []
        for step in range(2000):
            if manager.save(step, args=Save({"w": np.arange(3)})):
                saved.append(step)
                manager.wait_until_finished()
        assert saved[:2] == [0, 1]
        assert len(saved) < 200
    options = Options(save_decision_policy=decide.AnySavePolicy([policy, decide.SpecificStepsPolicy([2003])]))
    with ec.CheckpointManager(directory, options=options) as manager:
        last = saved[-1]  # how many steps later the next save is due depends on how fast they are
        asked = [step for step in range(last + 1, 2010) if manager.should_save(step)]
        assert 2003 in asked
        assert last + 1 not in asked


def test_another_manager_is_refused(tmp_path: Any) -> None:
    """Stock Orbax does not measure."""
    policy = ec.policy.auto_interval()
    options = Options(save_decision_policy=policy)
    refused = pytest.raises(UnsupportedError, match="auto_interval needs an epochckpt")
    with ocp.CheckpointManager(tmp_path, options=options) as manager, refused:
        manager.should_save(1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"target_overhead": value} for value in (0, 1, -0.1, "1%", True)),
        *({"mtbf": value} for value in (0, -1, "soon", float("inf"), True)),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        ec.policy.auto_interval(**wrong)


def worker(directory: str) -> list[int]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {"w": jax.jit(lambda: jnp.arange(8.0), out_shardings=cut)()}
    options = Options(save_decision_policy=ec.policy.auto_interval(mtbf="1d"))
    with ec.CheckpointManager(directory, options=options) as manager:
        asked = [step for step in range(3000) if manager.save(step, args=Save(state))]
        manager.wait_until_finished()
        assert manager.all_steps() == asked
    return asked


@pytest.mark.slow
def test_two_processes_save_the_same_steps(tmp_path: Any) -> None:
    """Each at its own pace, and without a barrier; all of these saves are committed."""
    one, other = run_worker(f"{__name__}:worker", {"directory": str(tmp_path)}, num_processes=2)
    assert one == other
    assert one[:2] == [0, 1]
    assert len(one) < 1000


def test_a_time_between_failures_may_be_a_fraction_of_a_second() -> None:
    assert ec.policy.auto_interval(mtbf=0.5).mtbf_secs == 0.5
    assert ec.policy.auto_interval(mtbf="500ms").mtbf_secs == 0.5
