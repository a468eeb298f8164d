"""Deleting epochs that no policy keeps, and going back to an epoch, both on the primary.

Epochs are first taken out of sight, durably. Their bytes are removed later.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Callable

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging

from epochckpt import _monitoring
from epochckpt.directory import EpochDirectory, attached_metrics
from epochckpt.directory.epoch_directory import Rollback, Writer
from epochckpt.errors import (
    EpochCheckpointError,
    EpochNotFoundError,
    FencedError,
    RemovalError,
    UnfinishedError,
    say,
)
from epochckpt.format import paths
from epochckpt.orbax import events
from epochckpt.saving import policies
from epochckpt.saving.history import EpochInfo, History
from epochckpt.saving.reports import Committed

_STEP = operator.attrgetter("step")
_left_alone: set[tuple[str, int]] = set()  # (directory, epoch) of steps that are not deleted, and logged


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
    gone = policies.superfluous(options, sorted(infos.values(), key=_STEP))
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
