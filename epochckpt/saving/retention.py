"""Which epochs to save, to keep and to delete: the history of a directory, Orbax's policies, deleting and going back.

Policies look at the `History`, as `EpochInfo`s. Deleting and rolling back happen on the primary: epochs are first taken
out of sight, durably, and their bytes are removed later.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import operator
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep  # pyright: ignore[reportMissingTypeStubs]
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide  # pyright: ignore[reportMissingTypeStubs]

from epochckpt import _monitoring
from epochckpt._metrics import flat
from epochckpt.directory import EpochDirectory, attached_metrics
from epochckpt.directory.epoch_directory import ReplaceCondition, Rollback, Writer
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    RemovalError,
    UnfinishedError,
    say,
)
from epochckpt.format import paths
from epochckpt.orbax import events
from epochckpt.saving.auto_interval import IntervalContext, SaveIntervalEstimator
from epochckpt.saving.ranking import best_of, rank
from epochckpt.saving.reports import Committed
from epochckpt.saving.run_clock import RunClock
from epochckpt.saving.save import Save
from epochckpt.saving.survey import Survey

_STEP = operator.attrgetter("step")
_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # the `best_fn`s whose users have been warned
_left_alone: set[tuple[str, int]] = set()  # (directory, epoch) of steps that are not deleted, and logged


class EpochInfo:
    """An epoch as policies see it. Its metrics and time are read from storage when a policy asks for them."""

    def __init__(self, step: int, source: EpochSummary | Callable[[int], EpochSummary]):
        """The `source` is what is known of the epoch, or reads it from storage."""
        self.step = step
        self._source = source
        self.attached: Mapping[str, Any] = {}  # metrics that were attached later, by name, as the primary sees them
        self.is_unknown = False  # its metrics were asked for, and only a newer epochckpt can read them

    @classmethod
    def of(cls, save: Save) -> EpochInfo:
        """The info of an epoch that is being saved."""
        request = save.request
        return cls(save.epoch, EpochSummary.unrecorded(metrics=request.metrics, time_ns=request.started_ns))

    def _summary(self) -> EpochSummary:
        """What is known of it, read once. A passing error is raised, and the next look tries again."""
        if not isinstance(self._source, EpochSummary):
            self._source = self._read(self._source)
        return self._source

    def _read(self, read: Callable[[int], EpochSummary]) -> EpochSummary:
        try:
            summary = read(self.step)
            for error in summary.unread.values():
                raise error
            return summary
        except (DamagedError, FormatError, EpochNotFoundError):  # it has no metrics, and never will
            logging.warning("checkpoint %d has no readable record: it counts as one without metrics", self.step)
        except FormatVersionError as error:
            logging.warning("checkpoint %d is kept, and counts as one without metrics: %s", self.step, error)
            self.is_unknown = True
        return EpochSummary.unrecorded(metrics=None, time_ns=0)

    @property
    def metrics(self) -> Any:
        """The metrics it was saved with, and those that were attached to it; None without any."""
        return attached_metrics.merge(self._summary().metrics, {"": self.attached} if self.attached else {})

    @property
    def time(self) -> datetime.datetime:
        """When it was committed (wall clock, UTC)."""
        return datetime.datetime.fromtimestamp(self._summary().committed_ns / 1e9, tz=datetime.UTC)

    @property
    def save_id(self) -> str:
        """Its save id; empty without a readable record."""
        return self._summary().save_id


class Mirrored(Protocol):
    """What the primary knows of the directory's mirror, when it decides which epochs to delete."""

    def waiting(self) -> Collection[int]:
        """Epochs that are to be copied, or are being copied, and must stay until then."""
        ...

    def has(self, epoch: int) -> bool:
        """Whether the mirror has an epoch, as this directory has it."""
        ...

    def pop_removed(self) -> list[int]:
        """Epochs that the mirror has given up since the last call."""
        ...


class History:
    """The epochs that this process knows: committed, damaged, and requested ones.

    `committed` is what `latest_step` and `all_steps` return. `requested` is what `should_save` decides from: it depends
    only on calls that every process makes alike, not on how far the background is. `damaged` epochs are on storage and
    cannot be restored; the next save of their number may replace them. `is_own` are those that this manager has saved
    since its caller last waited for its saves: it depends on the same calls.

    Of the committed epochs, the `remote` ones are only in the mirror. `mirror` is what the primary knows of it. `held`
    gives epochs of which a deletion is under way, or was interrupted: no policy deletes them.

    `load` reads what is known of an epoch; `alone`: no other process makes the same calls.

    Several threads and signal handlers use it without a lock: each change is one operation of a dict, see `_threads`.
    """

    def __init__(
        self,
        load: Callable[[int], EpochSummary],
        alone: bool = True,
        *,
        mirror: Mirrored,
        held: Callable[[], Collection[int]] = frozenset,
    ):
        self._load = load
        self.mirror = mirror
        self.held = held
        self.remote: frozenset[int] = frozenset()
        self._committed: dict[int, EpochInfo] = {}
        self._requested: dict[int, EpochInfo] = {}
        self._own: dict[int, None] = {}
        self._gone: dict[int, None] = {}  # epochs that another run has deleted, and that count as requested so far
        self.damaged: dict[int, ReplaceCondition] = {}
        self.run = RunClock()
        self.pace = SaveIntervalEstimator(alone)

    def reset(self, survey: Survey, known: Collection[int] | None = None) -> None:
        """Starts anew from a look at storage; what is not `known`, as of its beginning, was committed meanwhile."""
        self.damaged = survey.damaged
        self.run.earlier = survey.runs
        found = {e: EpochInfo(e, self._load) for e in survey.epochs}  # any may have been replaced
        self._committed.update(found)
        for epoch in self._committed.keys() - found.keys() if known is None else {*known} - found.keys():
            self._committed.pop(epoch, None)
        self.remote = frozenset(survey.remote)
        self.forget_failed()
        self.attach(survey.attached)
        self.pace.reset(survey.costs, survey.runs)

    def adopt(self, epochs: Iterable[int]) -> tuple[list[int], list[int]]:
        """Replaces the committed epochs by those on storage, and in the mirror; returns the new and the lost ones."""
        before = list(self._committed)
        now = {*epochs, *self.remote}
        new = sorted(now.difference(before))
        gone = [e for e in before if e not in now]
        self._committed.update({e: EpochInfo(e, self._load) for e in new})
        for epoch in gone:
            self._committed.pop(epoch, None)
        self._gone.update(dict.fromkeys(gone))
        return new, gone

    def forget_gone(self) -> None:
        """What others have deleted may be requested again; all processes call it at the same point of training."""
        for epoch in list(self._gone):
            self._gone.pop(epoch, None)
            if epoch not in self._committed:
                self._requested.pop(epoch, None)

    def begin(self, epoch: int) -> None:
        """A save of an epoch is about to begin."""
        self._own[epoch] = None

    def settle(self, epoch: int) -> None:
        """The caller has been told what became of its save of an epoch."""
        self._own.pop(epoch, None)

    def is_own(self, epoch: int) -> bool:
        """Whether this manager has begun to save an epoch, and the caller has not waited for the end since."""
        return epoch in self._own

    def fail(self, save: Save) -> None:
        """An epoch was requested, and could not be saved."""
        self._requested[save.epoch] = EpochInfo.of(save)

    def commit(self, commit: Committed) -> None:
        """An epoch was requested, and committed; older epochs may have been deleted for it."""
        epoch = commit.epoch
        info = EpochInfo(epoch, commit.summary)
        self._committed[epoch] = self._requested[epoch] = info
        if commit.attached is not None:
            self.attach(commit.attached)
        self.remote = self.remote - {epoch} | {*commit.remote}
        self.drop(commit.deleted)
        self.damaged.pop(epoch, None)

    def attach(self, metrics: Mapping[int, Mapping[str, Any]]) -> None:
        """Replaces the attached metrics of every epoch; nothing is attached to epochs that are not named."""
        for info in list(self._committed.values()):
            info.attached = metrics.get(info.step, {})

    def attached(self) -> dict[int, Mapping[str, Any]]:
        """The attached metrics by epoch, as far as they are known; epochs without any are left out."""
        return {info.step: info.attached for info in list(self._committed.values()) if info.attached}

    def reject(self, damaged: Mapping[int, ReplaceCondition]) -> None:
        """Epochs have turned out to be damaged, as all processes know."""
        self.damaged.update(damaged)
        self.drop(damaged)

    def forget_damage_after(self, epoch: int) -> None:
        """The damaged epochs after this one are gone, with all others after it."""
        self.damaged = {damaged: found for damaged, found in self.damaged.items() if damaged <= epoch}

    def drop(self, epochs: Iterable[int]) -> None:
        self.remote -= {*epochs}
        for epoch in epochs:
            self._committed.pop(epoch, None)
            self._requested.pop(epoch, None)

    def pop_lost(self) -> list[int]:
        """On the primary: the remote epochs that the mirror has given up since the last call, ascending."""
        return sorted(self.remote.intersection(self.mirror.pop_removed()))

    def forget_failed(self) -> None:
        """Nothing is in flight any more: an epoch that was requested and is not committed may be requested again."""
        self._own.clear()
        self._requested.update(self._committed)
        for epoch in self._requested.keys() - self._committed.keys():
            self._requested.pop(epoch, None)

    def committed(self) -> list[EpochInfo]:
        """Committed epochs, ascending."""
        return sorted(self._committed.values(), key=_STEP)

    def requested(self, in_flight: Iterable[Save]) -> list[EpochInfo]:
        """Requested epochs (committed ones among them), ascending, with those that are being saved."""
        return sorted({**self._requested, **{save.epoch: EpochInfo.of(save) for save in in_flight}}.values(), key=_STEP)

    def is_known(self, epoch: int) -> bool:
        """Whether an epoch exists or could not be saved."""
        return epoch in self._requested


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


# -- deleting, replacing and going back, on the primary ----------------------------------------------------------------


@_monitoring.timed(events.CHOSE_OLD)
def retire(
    epoch_directory: EpochDirectory, history: History, options: ocp.CheckpointManagerOptions, fresh: Committed
) -> Committed:
    """Completes a fresh commit with the epochs that are to be deleted, and with the attached metrics of the rest.

    The caller takes them out of sight, and passes on `Committed.keeping` those that could not be.
    """
    infos = {i.step: i for i in history.committed() if i.step != fresh.epoch and i.step not in history.remote}
    if attached_metrics.are_needed(options):
        attached = attached_metrics.of_epochs(epoch_directory, infos, lambda epoch: infos[epoch].save_id)
        history.attach({e: found for e, found in history.attached().items() if e in history.remote} | attached)
    infos[fresh.epoch] = EpochInfo(fresh.epoch, fresh.summary)
    _monitoring.number(len(infos), events.EXAMINED_OLD)
    gone = superfluous(options, sorted(infos.values(), key=_STEP))
    gone = [epoch for epoch in gone if epoch != fresh.epoch]  # it may be older than the newest
    kept = {*history.mirror.waiting(), *history.held()}
    gone = [epoch for epoch in gone if epoch not in kept]
    hides = tuple(epoch for epoch in gone if _may_delete(epoch_directory, infos[epoch]))
    remote = tuple(epoch for epoch in hides if history.mirror.has(epoch))
    lost = [epoch for epoch in history.pop_lost() if epoch != fresh.epoch]
    deleted = (*lost, *(epoch for epoch in hides if epoch not in remote))
    return dataclasses.replace(fresh, deleted=deleted, remote=remote, hides=hides, attached=history.attached())


def unlist(writer: Writer, epoch: int, into: str | None) -> Callable[[], None]:
    """Takes an epoch out of sight, see `Writer.unlist`; returns what removes its bytes, or raises RemovalError.

    After an error the epoch is still listed, unless it is an UnfinishedError. The returned call raises what went wrong
    after the epoch had gone out of sight.
    """
    began = time.monotonic()
    try:
        remove = writer.unlist(epoch, into, logged=True)
    except (FencedError, UnfinishedError):
        raise
    except Exception as error:
        if _is_listed(writer.directory, epoch):
            raise
        remove = functools.partial(_raise, error)
    hiding_secs = time.monotonic() - began
    where = "" if into is None else f": it was moved to {into}"
    logging.info("checkpoint %d of %s is deleted%s", epoch, writer.store.root, where)

    def remove_it() -> None:
        began = time.monotonic()
        try:
            remove()
        except Exception as error:
            raise RemovalError(writer.store.root, epoch, say(error)) from error
        _monitoring.secs(hiding_secs + time.monotonic() - began, events.DELETED)

    return remove_it


def _is_listed(epoch_directory: EpochDirectory, epoch: int) -> bool:
    """Whether a reader may see an epoch: storage lists it, or does not answer."""
    try:
        return epoch in epoch_directory.list_epochs()
    except (OSError, EpochCheckpointError):
        return True


def _raise(error: Exception) -> None:
    raise error


def _may_delete(epoch_directory: EpochDirectory, info: EpochInfo) -> bool:
    """Whether an epoch that no caller has named may be deleted: a step of stock Orbax must be one without doubt."""
    epoch = info.step
    if info.is_unknown:  # nobody can judge its worth
        return False
    if epoch_directory.is_ours(epoch):
        return True
    try:
        sure = epoch_directory.is_certain_step(epoch)
    except EpochNotFoundError:  # as every other epoch
        return True
    except EpochCheckpointError:
        sure = False
    if not sure and (epoch_directory.store.root, epoch) not in _left_alone:
        _left_alone.add((epoch_directory.store.root, epoch))
        logging.warning(
            "%s: checkpoint %d of stock Orbax is not deleted although the options would have it: its record or its "
            "metrics cannot be used, or something else was saved in it. If nobody needs it, delete(%d) removes it",
            epoch_directory.store.root,
            epoch,
            epoch,
        )
    return sure


def replace_condition(epoch_directory: EpochDirectory, epoch: int) -> ReplaceCondition:
    """The condition that allows a save to replace an epoch as it is on storage now."""
    record = epoch_directory.read_record(epoch)
    if record.stock or epoch_directory.folder(epoch) != epoch_directory.names.build(epoch):
        raise InvalidArgumentError(
            f"checkpoint {epoch} ({epoch_directory.store.root}/{epoch_directory.folder(epoch)}) was written by stock "
            "Orbax, or under another step name format, and cannot be replaced in one step; delete() makes room for it"
        )
    return ReplaceCondition(record.save_id)


def roll_back(writer: Writer, epoch: int, remote: bool = False) -> None:
    """Quarantines every later epoch; UnfinishedError says that they no longer count, but could not be moved.

    The epoch itself may be `remote`, only in the mirror.
    """
    _monitoring.event("/epochckpt/rollback")
    writer.finish_rollback()  # of a call that was interrupted
    directory = writer.directory
    later = tuple(e for e in (directory.list_epochs() if remote else directory.require(epoch)) if e > epoch)
    if later:
        writer.roll_back(Rollback(epoch, later, paths.new_id()))
