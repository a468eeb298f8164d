"""Deleting and going back, on the primary: out of sight first, durably; the bytes go later."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import orbax.checkpoint as ocp

from epochckpt import layout, retention
from epochckpt.aside import Rollback
from epochckpt.attempt import Committed
from epochckpt.commit import Commits
from epochckpt.retention import EpochInfo, History


def hide(commits: Commits, epochs: Sequence[int], into: str | None) -> Callable[[], None]:
    """Takes epochs out of sight; the returned call removes their bytes (or keeps them in the subfolder `into`)."""
    removals = [commits.hide(epoch, into) for epoch in epochs]

    def remove() -> None:
        for removal in removals:
            removal()

    return remove


def retire(
    commits: Commits, history: History, options: ocp.CheckpointManagerOptions, fresh: Committed
) -> tuple[list[int], Callable[[], Callable[[], None]]]:
    """What may be deleted now that an epoch is committed, and a call that hides it."""
    infos = [i for i in history.committed() if i.step != fresh.epoch]
    infos.append(EpochInfo(fresh.epoch, metrics=fresh.metrics, time_ns=fresh.committed_ns))
    gone = retention.superfluous(options, sorted(infos, key=operator.attrgetter("step")))
    gone = [epoch for epoch in gone if epoch != fresh.epoch]  # it may be older than the newest
    gone = [epoch for epoch in gone if commits.may_retire(epoch)]
    return gone, lambda: hide(commits, gone, options.todelete_subdir)


def roll_back(commits: Commits, epoch: int) -> list[int]:
    """Sets every later epoch aside; returns them."""
    commits.finish_rollback()  # of a call that was interrupted
    later = [e for e in commits.require(epoch) if e > epoch]
    if later:
        commits.roll_back(Rollback(epoch, tuple(later), layout.new_id()))
    return later
