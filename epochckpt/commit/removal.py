"""Deleting and going back, on the primary: out of sight first, durably; the bytes go later."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from epochckpt.commit import attached_metrics, retention
from epochckpt.commit.attempt import Committed
from epochckpt.commit.protocol import Commits, Rollback, Superseded
from epochckpt.commit.retention import EpochInfo, History
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths
from epochckpt.orbax import OrbaxRecord


def hide(commits: Commits, epochs: Sequence[int], into: str | None) -> Callable[[], None]:
    """Takes epochs out of sight; the returned call removes their bytes (or keeps them in the subfolder `into`)."""
    removals = [commits.hide(epoch, into) for epoch in epochs]

    def remove() -> None:
        for removal in removals:
            removal()

    return remove


def retire(
    commits: Commits, history: History, options: ocp.CheckpointManagerOptions, fresh: Committed
) -> tuple[list[int], Mapping[int, Any], Callable[[], Callable[[], None]]]:
    """What may be deleted now that an epoch is committed, metrics attached to others by epoch, a call that hides."""
    infos = [i for i in history.committed() if i.step != fresh.epoch]
    by_number = {i.step: i for i in infos}
    if retention.reads_metrics(options):
        history.attach(attached_metrics.of_epochs(commits, by_number, lambda epoch: by_number[epoch].attempt))
    infos.append(EpochInfo(fresh.epoch, metrics=fresh.metrics, time_ns=fresh.committed_ns))
    gone = retention.superfluous(options, sorted(infos, key=operator.attrgetter("step")))
    gone = [epoch for epoch in gone if epoch != fresh.epoch]  # it may be older than the newest
    gone = [epoch for epoch in gone if commits.may_retire(epoch)]
    return gone, history.attached(), lambda: hide(commits, gone, options.todelete_subdir)


def superseded(commits: Commits, epoch: int) -> Superseded:
    """What says that an epoch, as it is on storage now, may be replaced.

    Raises:
        EpochNotFoundError: there is no such epoch.
        InvalidArgumentError: it lies in a folder that we would not write; says what to do.
    """
    record = commits.read_record(epoch)
    if isinstance(record, OrbaxRecord) or commits.folder(epoch) != commits.names.build(epoch):
        raise InvalidArgumentError(
            f"epoch {epoch} ({commits.store.root}/{commits.folder(epoch)}) was written by stock Orbax, or under "
            "another step name format, and cannot be replaced in one step; delete() makes room for it"
        )
    return Superseded(record.attempt)


def roll_back(commits: Commits, epoch: int) -> list[int]:
    """Sets every later epoch aside; returns them.

    Raises:
        EpochNotFoundError: there is no such epoch.
        UnfinishedError: they, or those of a call before, could not be moved; they count no more nevertheless.
    """
    commits.finish_rollback()  # of a call that was interrupted
    later = [e for e in commits.require(epoch) if e > epoch]
    if later:
        commits.roll_back(Rollback(epoch, tuple(later), paths.new_id()))
    return later
