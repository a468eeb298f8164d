"""Heads of thousands of epochs, without their objects."""

import dataclasses

import orbax.checkpoint as ocp

from epochckpt.directory import directory_of
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_changes import TakeIn
from epochckpt.directory.head_record import Head
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store

NEWEST = 100_000  # the number of an epoch that comes after all that are made here


def epoch_directory(url: str) -> BucketDirectory:
    """The commits of a directory in a bucket."""
    found = directory_of(open_store(url), StepNames.of(ocp.CheckpointManagerOptions()))
    assert isinstance(found, BucketDirectory)
    return found


def older(now: Head, epochs: range) -> dict[str, EpochSummary]:
    """Entries like that of the first epoch of the head, and older."""
    model = next(iter(now.epochs.values()))
    run, _, _ = model.save_id.partition("-")
    return {
        str(epoch): dataclasses.replace(
            model,
            save_id=f"{run}-{epoch}-0",
            started_ns=model.started_ns - (10**6 - epoch) * 10**9,
            committed_ns=model.committed_ns - (10**6 - epoch) * 10**9,
            metrics={"loss": 1 / epoch},
        )
        for epoch in epochs
    }


def lengthen(filled: BucketDirectory, epochs: range) -> None:
    """Adds such entries to the head."""
    head = filled.head.seen()
    assert head is not None
    filled.head.write(TakeIn(root=filled.store.root, epochs=older(head, epochs), aside={}, expected=head.change))
