"""Orbax's policies, applied to a history: whether to save an epoch now, which is the best, and which may be deleted."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep  # pyright: ignore[reportMissingTypeStubs]
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide  # pyright: ignore[reportMissingTypeStubs]

from epochckpt._metrics import flat
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.saving.auto_interval import IntervalContext, SaveIntervalEstimator
from epochckpt.saving.history import EpochInfo
from epochckpt.saving.ranking import best_of, rank

_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # the `best_fn`s whose users have been warned


def score(options: ocp.CheckpointManagerOptions, info: EpochInfo) -> float | None:
    """How good an epoch is by `best_fn`: larger is better, and NaN is worst of all.

    None for an epoch without metrics. An epoch counts as one if `best_fn` returns no number, or raises, as it does for
    a missing metric, or for metrics that are not of the expected form.
    """
    if options.best_fn is None or info.metrics is None:
        return None
    try:
        found = options.best_fn(info.metrics)
    except KeyError as error:  # that metric may be attached later
        return _without_score(options, info, f"finds no {error}")
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:  # the metrics may be anything
        return _without_score(options, info, f"raises {type(error).__name__} ({error!s:.200})")
    try:
        return rank(found, options.best_mode)
    except (TypeError, ValueError):  # another job may attach anything
        return _without_score(options, info, f"returns {found!r:.100}, which is no number,")


def _without_score(options: ocp.CheckpointManagerOptions, info: EpochInfo, why: str) -> None:
    """Warns, once for each `best_fn`, that it gives no score for an epoch that has metrics."""
    key: Any = options.best_fn
    try:
        hash(weakref.ref(key))
    except TypeError:  # an `operator.itemgetter` has no weak references, others no hash: a type shares one warning
        key = key.__class__
    if key in _warned:
        return
    _warned.add(key)
    known = info.metrics
    names = ", ".join(map(repr, flat(known))) if isinstance(known, Mapping) else type(known).__name__
    fate = "kept" if options.keep_checkpoints_without_metrics else "deleted"
    logging.warning(
        "best_fn %s for checkpoint %d, whose metrics are: %.500s. Until one is attached, it counts as one without: it "
        "is never the best, and where the number of epochs is limited it is %s. Logged for the first such epoch only",
        why,
        info.step,
        names,
        fate,
    )


def best(options: ocp.CheckpointManagerOptions, infos: Sequence[EpochInfo]) -> int | None:
    """The best epoch (the later of equals), or the latest without `best_fn`; None if none has metrics."""
    if options.best_fn is None:
        return infos[-1].step if infos else None
    return best_of({info.step: score(options, info) for info in infos})


def save_policy(options: ocp.CheckpointManagerOptions) -> decide.SaveDecisionPolicy:
    """The policy that the options describe: `save_decision_policy`, or that of the older options."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    policies: list[Any] = []
    if options.should_save_fn is not None:
        policies.append(_FunctionPolicy(options.should_save_fn))
    else:
        if options.save_interval_steps:
            policies.append(decide.FixedIntervalPolicy(options.save_interval_steps))
        policies.append(decide.SpecificStepsPolicy(options.save_on_steps or ()))
        policies.append(decide.InitialSavePolicy())
    policies.append(decide.PreemptionCheckpointingPolicy())
    return decide.AnySavePolicy(policies)


def decide_save(
    policy: Any,
    options: ocp.CheckpointManagerOptions,
    step: int,
    requested: Sequence[EpochInfo],
    saving: Callable[[], bool],
    preempted: bool,
    pace: SaveIntervalEstimator,
) -> bool:
    """Whether a policy saves an epoch now, after those that were requested."""
    context = IntervalContext(
        pace=pace,
        is_saving_in_progress=options.enable_should_save_is_saving_in_progress_check and saving(),
        reached_preemption=preempted,
        multiprocessing_options=options.multiprocessing_options,
    )
    info = EpochInfo(step, EpochSummary.unrecorded(metrics=None, time_ns=time.time_ns()))
    return bool(policy.should_save(info, requested, context=context))


class _FunctionPolicy(decide.SaveDecisionPolicy):
    def __init__(self, fn: Callable[[int, int | None], bool]):
        self._fn = fn

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return bool(self._fn(step.step, previous_steps[-1].step if previous_steps else None))


def superfluous(options: ocp.CheckpointManagerOptions, infos: Sequence[EpochInfo]) -> list[int]:
    """The epochs that may be deleted now. The newest is never among them, nor, with `best_fn`, the best."""
    if options.preservation_policy is not None:
        kept = _preserved(options.preservation_policy, infos)
    else:
        kept = _default_kept(options, infos)
    return [i.step for i in infos[:-1] if i.step not in kept]


def _preserved(policy: Any, infos: Sequence[EpochInfo]) -> set[int]:
    flags = policy.should_preserve(infos, context=keep.PreservationContext())
    return {i.step for i, flag in zip(infos, flags, strict=True) if flag}


def _default_kept(options: ocp.CheckpointManagerOptions, infos: Sequence[EpochInfo]) -> set[int]:
    """The epochs that the older options keep: `max_to_keep`, `keep_period` and `keep_time_interval`."""
    count = options.max_to_keep
    ranked = [i.step for i in infos]
    if count is None:
        return set(ranked)
    kept: set[int] = set()
    if options.keep_period is not None:
        kept |= _preserved(keep.EveryNSteps(options.keep_period), infos)
    if options.keep_time_interval is not None:
        secs = int(options.keep_time_interval.total_seconds())
        kept |= _preserved(keep.EveryNSeconds(interval_secs=secs), infos)
    if options.best_fn is not None:
        scores = [(score(options, i), i.step) for i in infos]
        ranked = [step for _, step in sorted((s, step) for s, step in scores if s is not None)]
        count = max(count, 1)
        if options.keep_checkpoints_without_metrics:
            kept |= {step for s, step in scores if s is None}
    return kept | set(ranked[max(0, len(ranked) - count) :])
