"""Heads of thousands of epochs, without their objects."""

import dataclasses

import orbax.checkpoint as ocp

from epochckpt.directory import commits_of
from epochckpt.directory.conditional_put import PutCommits
from epochckpt.directory.head_changes import TakeIn
from epochckpt.directory.head_record import Head, HeadEpoch
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store

NEWEST = 100_000  # the number of an epoch that comes after all that are made here


def commits(url: str) -> PutCommits:
    """The commits of a directory in a bucket."""
    found = commits_of(open_store(url), StepNames.of(ocp.CheckpointManagerOptions()))
    assert isinstance(found, PutCommits)
    return found


def older(now: Head, epochs: range) -> dict[str, HeadEpoch]:
    """Entries like that of the first epoch of the head, and older."""
    model = next(iter(now.epochs.values()))
    run, _, _ = model.attempt.partition("-")
    return {
        str(epoch): dataclasses.replace(
            model,
            attempt=f"{run}-{epoch}-0",
            started_ns=model.started_ns - (10**6 - epoch) * 10**9,
            committed_ns=model.committed_ns - (10**6 - epoch) * 10**9,
            metrics={"loss": 1 / epoch},
        )
        for epoch in epochs
    }


def lengthen(filled: PutCommits, epochs: range) -> None:
    """Adds such entries to the head."""
    head = filled.head.seen()
    assert head is not None
    filled.head.write(TakeIn(root=filled.store.root, epochs=older(head, epochs), aside={}, expected=head.change))
