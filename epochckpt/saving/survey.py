"""What a look at a directory finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging

from epochckpt import _monitoring, errors
from epochckpt.directory import EpochDirectory, attached_metrics
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.format import EpochRecord, RunEntry, checksums
from epochckpt.format.records import RUN_ROWS
from epochckpt.orbax import events
from epochckpt.saving import auto_interval
from epochckpt.saving.auto_interval import SaveCost

_LOOKS = 16  # at a directory whose newest epoch is deleted again and again


@dataclasses.dataclass(frozen=True)
class Survey:
    """The findings of a look at a directory; nothing large is read."""

    epochs: list[int]  # committed, ascending, without the damaged ones
    damaged: dict[int, ReplaceCondition]  # as far as known before, or as the files of the newest epochs tell
    foreign: dict[int, str]  # descriptions of folders that are only named like an epoch, by number
    attached: dict[int, Any]  # metrics that were attached to epochs, by epoch, if the options need them
    remote: tuple[int, ...] = ()  # those of the epochs that only the mirror has
    runs: tuple[RunEntry, ...] = ()  # as the newest epoch has them
    costs: tuple[SaveCost, ...] = ()  # of the newest epochs, if the options need them
    # With local disks, by process: what its disk has under these numbers are no parts of the job's epochs.
    aside: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict[int, tuple[int, ...]])
    # Ids of the mirror's copies of the remote ones.
    copies: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    diverged: tuple[int, ...] = ()  # epochs that lie here and are no part of the mirror's history

    def to_wire(self) -> dict[str, Any]:
        return {
            "epochs": self.epochs,
            "damaged": [[epoch, found.save_id, found.damage] for epoch, found in self.damaged.items()],
            "foreign": sorted(self.foreign.items()),
            "attached": checksums.pack_by_number(self.attached, "metrics"),
            "remote": list(self.remote),
            "runs": [RUN_ROWS.pack(run) for run in self.runs],
            "costs": [dataclasses.astuple(cost) for cost in self.costs],
            "copies": sorted(self.copies.items()),
            "diverged": list(self.diverged),
            "aside": [[process, list(epochs)] for process, epochs in self.aside.items()],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Survey:
        damaged = {epoch: ReplaceCondition(save_id, damage) for epoch, save_id, damage in wire["damaged"]}
        attached = checksums.unpack_by_number(wire["attached"])
        runs = tuple(RUN_ROWS.parse("a survey", "runs", row) for row in wire["runs"])
        costs = tuple(SaveCost(*row) for row in wire["costs"])
        foreign = dict(map(tuple, wire["foreign"]))
        aside = {process: tuple(found) for process, found in wire["aside"]}
        return cls(
            epochs=wire["epochs"],
            damaged=damaged,
            foreign=foreign,
            attached=attached,
            remote=tuple(wire["remote"]),
            runs=runs,
            costs=costs,
            aside=aside,
            copies=dict(map(tuple, wire["copies"])),
            diverged=tuple(wire["diverged"]),
        )


@_monitoring.timed(events.LOOKED)
def survey(
    epoch_directory: EpochDirectory,
    options: ocp.CheckpointManagerOptions,
    known: Mapping[int, ReplaceCondition] | None = None,
    *,
    is_partial: bool = False,
) -> Survey:
    """Looks at a directory; a `known` damaged epoch is still damaged, as long as the same attempt is there.

    A partial directory has the parts of one host only.

    Where storage does not give the newest epoch, nothing is decided: that is an error. An epoch that only a newer
    epochckpt can read is listed unseen, and the next older one is looked at.
    """
    epoch_directory.forget_records()
    epochs, others = epoch_directory.scan()
    foreign = {epoch: epoch_directory.obstacle(name) for epoch, name in others.items()}
    there = {epoch: found for epoch, found in (known or {}).items() if epoch in epochs}
    damaged = {epoch: found for epoch, found in there.items() if _is_still(epoch_directory, epoch, found)}
    epochs = [e for e in epochs if e not in damaged]
    looks = 0
    runs = ()
    unknown: list[int] = []
    while epochs:
        epoch = epochs[-1]
        try:
            found = _look_at(epoch_directory, epoch, is_partial)
        except errors.EpochNotFoundError:  # deleted just now: others may be gone, too, and newer ones committed
            looks += 1
            listed = epochs[:-1] if looks > _LOOKS else [e for e in epoch_directory.list_epochs() if e not in damaged]
            epochs = [e for e in listed if e not in unknown]
            continue
        except errors.FormatVersionError as error:
            logging.error("%s: checkpoint %d cannot be read here: %s", epoch_directory.store.root, epoch, error)
            unknown.append(epochs.pop())
            continue
        if not isinstance(found, ReplaceCondition):
            runs = found.runs
            break
        where = epoch_directory.store.root
        logging.error("%s: checkpoint %d is damaged and will not be used: %s", where, epoch, found.damage)
        damaged[epoch] = found
        epochs.pop()
    epochs = sorted({*epochs, *unknown})
    needed = attached_metrics.are_needed(options)
    readable = [epoch for epoch in epochs if epoch not in unknown]
    metrics = (
        attached_metrics.of_epochs(epoch_directory, readable, partial(_save_id, epoch_directory)) if needed else {}
    )
    costs = auto_interval.recent(epochs, epoch_directory.read_summary) if auto_interval.is_asked(options) else ()
    return Survey(
        epochs=epochs,
        damaged=damaged,
        foreign=foreign,
        attached=metrics,
        runs=runs,
        costs=tuple(costs),
    )


def _save_id(epoch_directory: EpochDirectory, epoch: int) -> str | None:
    """The attempt of an epoch; None if its record does not say, or not to this epochckpt."""
    with suppress(errors.FormatVersionError):
        return epoch_directory.read_save_id(epoch)
    return None


def _is_still(epoch_directory: EpochDirectory, epoch: int, damaged: ReplaceCondition) -> bool:
    """Whether an epoch is the one that was found damaged."""
    with suppress(errors.FormatVersionError):  # another one, which is not known to be damaged
        return epoch_directory.read_save_id(epoch) == damaged.save_id
    return False


def _look_at(epoch_directory: EpochDirectory, epoch: int, is_partial: bool) -> ReplaceCondition | EpochRecord:
    """The damage of an epoch, as far as its records and the sizes of its files tell; its record if it has none.

    Raises EpochNotFoundError, or FormatVersionError for one that only a newer epochckpt can read.
    """
    while True:  # one that is replaced meanwhile is looked at again
        save_id = None
        try:
            record = epoch_directory.read_record(epoch)
            save_id = record.save_id
            epoch_directory.check_shallow(record, is_partial=is_partial)
            return record
        except (errors.DamagedError, errors.FormatError) as error:
            if save_id is None or epoch_directory.read_head(epoch).save_id == save_id:
                return ReplaceCondition(save_id, errors.say(error))
