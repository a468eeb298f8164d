"""Which epochs to save and which to keep, with Orbax's own policies, and the history they look at."""

from __future__ import annotations

import datetime
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide

from epochckpt.commit import attached_metrics
from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError
from epochckpt.format import EpochRecord
from epochckpt.orbax import OrbaxRecord


class EpochInfo:
    """What a policy may look at; metrics and time are read from storage only when it does.

    Attributes:
        step: the epoch's number (Orbax's word).
        attached: metrics that were attached to it later, by name, as far as the primary has told.
    """

    def __init__(
        self,
        step: int,
        load: Callable[[int], EpochRecord] | None = None,
        *,
        metrics: Any = None,
        time_ns: int = 0,
        attempt: str = "",
    ):
        self.step, self._load, self._metrics, self._time_ns, self._attempt = step, load, metrics, time_ns, attempt
        self.attached: Mapping[str, Any] = {}

    def _read(self) -> None:
        """Reads the record, once. A passing error is raised, and the next look tries again."""
        load = self._load  # other threads look, too
        if load is not None:
            try:
                record = load(self.step)
                for error in record.unread.values() if isinstance(record, OrbaxRecord) else ():
                    raise error
                self._metrics, self._time_ns, self._attempt = record.metrics, record.committed_ns, record.attempt
            except (DamagedError, FormatError, EpochNotFoundError):  # it has no metrics, and never will
                logging.warning("epoch %d has no readable record: it counts as one without metrics", self.step)
            self._load = None

    @property
    def metrics(self) -> Any:
        """The metrics it was saved with, and those that were attached to it; None without any."""
        self._read()
        return attached_metrics.merge(self._metrics, {"": self.attached} if self.attached else {})

    @property
    def attempt(self) -> str:
        """Its attempt, on the primary; empty without a readable record."""
        self._read()
        return self._attempt

    @property
    def time(self) -> datetime.datetime:
        """When it was committed (wall clock, UTC)."""
        self._read()
        return datetime.datetime.fromtimestamp(self._time_ns / 1e9, tz=datetime.UTC)


class History:
    """The epochs that this process knows: committed ones, and those that were asked for.

    `committed` is what `latest_step` and `all_steps` say. `requested` is what `should_save` decides from: it depends
    only on calls that every process makes alike, not on how far the background is.

    Several threads use it, and signal handlers: without locks, see `worker`. Each change is one operation of a dict.
    """

    def __init__(self, load: Callable[[int], EpochRecord]):
        self._load = load
        self._committed: dict[int, EpochInfo] = {}
        self._requested: dict[int, EpochInfo] = {}

    def reset(self, epochs: Iterable[int], attached: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes storage's word for what is committed, and what is attached to it; nothing else was asked for."""
        self._committed = {e: EpochInfo(e, self._load) for e in sorted(epochs)}  # any may have been replaced
        self.forget_failed()
        self.attach(attached)

    def adopt(self, epochs: Iterable[int]) -> tuple[list[int], list[int]]:
        """Takes storage's word for what is committed by now, keeping what is known of each; `requested` stays as it is.

        Returns:
            Epochs that are new, and those that are gone.
        """
        before, now = self._committed, sorted(epochs)
        self._committed = {e: before.get(e) or EpochInfo(e, self._load) for e in now}
        return [e for e in now if e not in before], [e for e in before if e not in now]

    def fail(self, info: EpochInfo) -> None:
        """An epoch was asked for, and could not be saved."""
        self._requested[info.step] = info

    def commit(self, info: EpochInfo) -> None:
        """An epoch was asked for, and committed."""
        self._committed[info.step] = self._requested[info.step] = info

    def attach(self, metrics: Mapping[int, Mapping[str, Any]]) -> None:
        """The primary's word on what is attached to each epoch by now; to those that it does not name, nothing is."""
        for info in list(self._committed.values()):
            info.attached = metrics.get(info.step, {})

    def attached(self) -> dict[int, Mapping[str, Any]]:
        """What is known to be attached to each epoch; those without anything are left out."""
        return {info.step: info.attached for info in list(self._committed.values()) if info.attached}

    def drop(self, epochs: Iterable[int]) -> None:
        """Epochs were deleted."""
        for epoch in epochs:
            self._committed.pop(epoch, None)
            self._requested.pop(epoch, None)

    def forget_failed(self) -> None:
        """Nothing is in flight any more: what was asked for and is not committed may be asked for again."""
        self._requested.update(self._committed)
        for epoch in self._requested.keys() - self._committed.keys():
            self._requested.pop(epoch, None)

    def committed(self) -> list[EpochInfo]:
        """Committed epochs, ascending."""
        return sorted(self._committed.values(), key=_step)

    def requested(self, in_flight: Iterable[EpochInfo]) -> list[EpochInfo]:
        """Epochs asked for (committed ones among them), ascending, with those that are being saved."""
        flying = {info.step: info for info in in_flight}
        return sorted({**self._requested, **flying}.values(), key=_step)

    def is_known(self, epoch: int) -> bool:
        """Whether an epoch exists or could not be saved."""
        return epoch in self._requested


_step = operator.attrgetter("step")


def score(options: ocp.CheckpointManagerOptions, info: EpochInfo) -> float | None:
    """How good an epoch is by `best_fn`, larger is better; None without metrics; NaN is worst of all.

    Where `best_fn` returns None, or finds no metric of a name (KeyError), or one that is no number, the epoch counts as
    one without metrics.
    """
    if options.best_fn is None or info.metrics is None:
        return None
    try:
        found: float | None = options.best_fn(info.metrics)
    except KeyError as error:  # to be attached by somebody, perhaps
        return _without(options, info, f"finds no {error}")
    if found is None:
        return _without(options, info, "returns None")
    try:
        return rank(found, options.best_mode)
    except (TypeError, ValueError):  # another job may attach anything
        return _without(options, info, f"returns {found!r:.100}, which is no number,")


def rank(value: float, mode: str) -> float:
    """How good the value of a metric is by `mode`, `max` or `min`: larger is better, and NaN is worst."""
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        return -math.inf
    return number if mode == "max" else -number


def best_of(ranks: Mapping[int, float | None]) -> int | None:
    """The epoch with the highest rank, the later of equals; None if no epoch has one."""
    return max(((rank, epoch) for epoch, rank in ranks.items() if rank is not None), default=(0.0, None))[1]


_told: weakref.WeakSet[Any] = weakref.WeakSet()  # the `best_fn`s whose users have been warned


def _without(options: ocp.CheckpointManagerOptions, info: EpochInfo, why: str) -> None:
    """Warns, once for each `best_fn`, that it says nothing of an epoch that has metrics."""
    try:
        if options.best_fn in _told:
            return
        _told.add(options.best_fn)
    except TypeError:  # an `operator.itemgetter` has no weak references: these share one warning
        if type(options.best_fn) in _told:
            return
        _told.add(type(options.best_fn))
    known = info.metrics
    names = ", ".join(map(repr, known)) if isinstance(known, Mapping) else type(known).__name__
    what = "kept" if options.keep_checkpoints_without_metrics else "deleted"
    logging.warning(
        "best_fn %s for epoch %d, whose metrics are: %.500s. Until one is attached, it counts as one without: it "
        "is never the best, and where the number of epochs is limited it is %s. Said of the first such epoch only",
        why,
        info.step,
        names,
        what,
    )


def best(options: ocp.CheckpointManagerOptions, infos: Sequence[EpochInfo]) -> int | None:
    """The best epoch (the later of equals), or the latest without `best_fn`; None if none has metrics."""
    if options.best_fn is None:
        return infos[-1].step if infos else None
    return best_of({info.step: score(options, info) for info in infos})


def reads_metrics(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether metrics decide about anything."""
    return options.best_fn is not None or options.preservation_policy is not None


def save_policy(options: ocp.CheckpointManagerOptions) -> decide.SaveDecisionPolicy:
    """The policy that the options describe: `save_decision_policy`, or what the older options mean."""
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
    asked: Sequence[EpochInfo],
    saving: Callable[[], bool],
    preempted: bool,
) -> bool:
    """Asks a policy whether to save an epoch now, after those that were asked for."""
    context = decide.DecisionContext(
        is_saving_in_progress=options.enable_should_save_is_saving_in_progress_check and saving(),
        reached_preemption=preempted,
        multiprocessing_options=options.multiprocessing_options,
    )
    return bool(policy.should_save(EpochInfo(step, time_ns=time.time_ns()), asked, context=context))


class _FunctionPolicy(decide.SaveDecisionPolicy):
    def __init__(self, fn: Callable[[int, int | None], bool]):
        self._fn = fn

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return bool(self._fn(step.step, previous_steps[-1].step if previous_steps else None))


def superfluous(options: ocp.CheckpointManagerOptions, infos: Sequence[EpochInfo]) -> list[int]:
    """The epochs that may be deleted now. The newest is never among them, nor, with `best_fn`, the best."""
    if not infos:
        return []
    if options.preservation_policy is not None:
        seen: Any = infos
        flags = options.preservation_policy.should_preserve(seen, context=keep.PreservationContext())
        kept = {i.step for i, flag in zip(infos, flags, strict=True) if flag}
    else:
        kept = _default_kept(options, infos)
        if options.best_fn is not None and (top := best(options, infos)) is not None:
            kept.add(top)
    kept.add(infos[-1].step)
    return [i.step for i in infos if i.step not in kept]


def _default_kept(options: ocp.CheckpointManagerOptions, infos: Sequence[EpochInfo]) -> set[int]:
    n = options.max_to_keep
    policies: list[Any] = []
    if options.keep_period is not None:
        policies.append(keep.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(keep.EveryNSeconds(interval_secs=int(options.keep_time_interval.total_seconds())))
    kept: set[int] = set()
    for policy in policies:
        flags = policy.should_preserve(infos, context=keep.PreservationContext())
        kept |= {i.step for i, flag in zip(infos, flags, strict=True) if flag}
    if n is None:
        return {i.step for i in infos}
    if options.best_fn is None:
        return kept | {i.step for i in infos[max(0, len(infos) - n) :]}
    scores = [(score(options, i), i.step) for i in infos]
    ranked = sorted((s, step) for s, step in scores if s is not None)
    kept |= {step for _, step in ranked[max(0, len(ranked) - n) :]}
    if options.keep_checkpoints_without_metrics:
        kept |= {step for s, step in scores if s is None}
    return kept
