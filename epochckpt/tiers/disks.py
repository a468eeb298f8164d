"""What the processes of a job find on disks of their own (`StorageOptions.local_disks`), and what the job has.

Guarantee: an epoch counts as whole only if each disk has its process's part of one and the same attempt. What is
left of a commit, a deletion or a rollback that a kill interrupted is on some of the disks only, and is never listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import errors
from epochckpt.agreement import Coordinator
from epochckpt.directory import EpochDirectory, attached_metrics, directory_of
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.format import RunEntry, paths
from epochckpt.orbax import StepNames
from epochckpt.saving import auto_interval
from epochckpt.saving.survey import Survey
from epochckpt.storage import Store
from epochckpt.tiers.host_record import HostRecord
from epochckpt.tiers.ledger_kinds import RecordedLedger
from epochckpt.tiers.mirror import Mirror

_MAX_MIRROR_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class DiskPart:
    """The part of an epoch on one disk: its attempt (empty if that cannot be read), and its fault, if it has any."""

    save_id: str
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class DiskReport:
    """A process's look at its own disk."""

    directory: str  # the id of its directory
    known: Sequence[str]  # the ids of all directories when a run last claimed them, by process, and that claim
    parts: Mapping[int, DiskPart]  # by epoch
    hidden: Sequence[int]  # epochs that a rollback hides there
    foreign: Mapping[int, str]  # descriptions of folders that are only named like an epoch, by number
    mirror: str  # the text of its record of the mirror; empty without one

    def to_wire(self) -> dict[str, Any]:
        parts = [[epoch, part.save_id, part.fault] for epoch, part in self.parts.items()]
        return {**vars(self), "parts": parts, "foreign": sorted(self.foreign.items())}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> DiskReport:
        parts = {epoch: DiskPart(save_id, fault) for epoch, save_id, fault in wire["parts"]}
        return cls(**{**wire, "parts": parts, "foreign": dict(map(tuple, wire["foreign"]))})


def look(store: Store, names: StepNames, record: HostRecord, process: int, processes: int) -> DiskReport:
    """Looks at the own directory, whose `record` is given; no data is read."""
    epoch_directory = directory_of(store, names)  # one that ignores nothing
    epochs, others = epoch_directory.scan()
    foreign = {epoch: epoch_directory.obstacle(name) for epoch, name in others.items()}
    parts = dict[int, DiskPart]()
    for epoch in epochs:
        save_id = ""
        try:
            head = epoch_directory.read_head(epoch)
            if head.stock:
                where = f"{store.root}/{epoch_directory.folder(epoch)}"
                foreign[epoch] = f"{where} is a step of stock Orbax, which is not read from local disks"
                continue
            save_id = head.save_id
            count = len(head.nodes)
            if processes not in (1, count):
                raise errors.DamagedError(
                    epoch_directory.folder(epoch), f"was saved by {count} processes, here are {processes}"
                )
            for number in range(count) if processes == 1 else [process]:
                epoch_directory.check_node(epoch_directory.folder(epoch), head, number)
            parts[epoch] = DiskPart(save_id)
        except errors.FormatVersionError as error:  # all hosts have the same record, which this epochckpt cannot read
            logging.error("%s: checkpoint %d cannot be read here: %s", store.root, epoch, error)
            parts[epoch] = DiskPart("")
        except (errors.DamagedError, errors.FormatError) as error:
            parts[epoch] = DiskPart(save_id, errors.say(error))
        except errors.EpochNotFoundError:  # deleted just now
            continue
    mirror = ""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        mirror = store.read(paths.MIRROR_RECORD, limit_bytes=_MAX_MIRROR_BYTES).decode()
    return DiskReport(
        record.directory, [*record.disks, record.claim], parts, sorted(epoch_directory.hidden()), foreign, mirror
    )


@dataclasses.dataclass(frozen=True)
class JobDisks:
    """The disks of all processes, in their order."""

    disks: Sequence[DiskReport]
    whole: Mapping[int, str]  # the attempts of the epochs that are whole on all of them
    faults: Mapping[int, str]  # why other epochs are not, but for those that a rollback hides
    unfinished: frozenset[int]  # those of these that no save was ever acknowledged of, or that are deleted in part

    @classmethod
    def of(cls, disks: Sequence[DiskReport], named: Callable[[Iterable[int]], str]) -> JobDisks:
        """`named` gives the names of processes."""
        whole = dict[int, str]()
        faults = dict[int, str]()
        unfinished = set[int]()
        hidden = {epoch for disk in disks for epoch in disk.hidden}
        ids = [disk.directory for disk in disks]
        same = all(list(disk.known[:-1]) == ids and disk.known == disks[0].known for disk in disks)
        for epoch in sorted({epoch for disk in disks for epoch in disk.parts} - hidden):
            found = {number: disk.parts[epoch] for number, disk in enumerate(disks) if epoch in disk.parts}
            missing = set(range(len(disks))) - found.keys()
            attempts = {part.save_id for part in found.values()}
            reasons = [f"{named([number])}: {part.fault}" for number, part in found.items() if part.fault]
            if missing:
                reasons.append(f"{named(missing)} {'has' if len(missing) == 1 else 'have'} nothing of it")
            if len(attempts) > 1:
                reasons.append("the disks have parts of different saves of it")
            if not reasons:
                whole[epoch] = attempts.pop()
                continue
            faults[epoch] = "; ".join(reasons)
            if same and not any(part.fault for part in found.values()):
                unfinished.add(epoch)  # all disks live: what was acknowledged is on all of them, and deleted on all
        return cls(disks, whole, faults, frozenset(unfinished))

    def check_apart(self, named: Callable[[Iterable[int]], str], roots: str) -> None:
        """Refuses processes that see the same directory."""
        seen: dict[str, int] = {}
        for number, disk in enumerate(self.disks):
            first = seen.setdefault(disk.directory, number)
            if first != number:
                raise errors.InvalidArgumentError(
                    f"{roots}: {named([first])} and {named([number])} see the same directory, and not one on a disk "
                    "of its own each. Leave local_disks out for a file system that they share. If one directory is a "
                    f"copy of the other, remove {paths.HOST_RECORD} from the copy"
                )

    def epochs(self) -> set[int]:
        """The epochs of which a disk has a part."""
        return {epoch for disk in self.disks for epoch in disk.parts}

    def having(self, epoch: int) -> set[int]:
        """The processes whose disk has a part of an epoch."""
        return {process for process, disk in enumerate(self.disks) if epoch in disk.parts}

    def not_of(self, epoch: int, save_id: str | None) -> list[int]:
        """The processes whose part of an epoch is of another attempt than this one."""
        parts = [(number, disk.parts.get(epoch)) for number, disk in enumerate(self.disks)]
        return [number for number, part in parts if part is not None and part.save_id != save_id]


def _runs(epoch_directory: EpochDirectory, epochs: Sequence[int]) -> tuple[RunEntry, ...]:
    """The runs of a directory until the newest epoch that this epochckpt can read."""
    for epoch in reversed(epochs):
        with suppress(errors.FormatVersionError):
            return epoch_directory.read_head(epoch).runs
    return ()


def survey_of_disks(
    epoch_directory: EpochDirectory,
    told: Sequence[Mapping[str, Any]],
    options: ocp.CheckpointManagerOptions,
    known: Mapping[int, ReplaceCondition],
    mirror: Mirror,
    coordinator: Coordinator,
) -> Survey:
    """The survey of directories on disks of the processes' own, on the primary: from what all have `told`.

    An epoch that is not whole on all of them is listed if the mirror has it. Then each process reads from the mirror
    what its disk lacks.
    """
    disks = JobDisks.of([*map(DiskReport.from_wire, told)], coordinator.named)
    disks.check_apart(coordinator.named, epoch_directory.store.root)
    whole = _survey_of_whole(epoch_directory, disks, options, known)
    recorded = RecordedLedger.on_disks([disk.mirror for disk in disks.disks], epoch_directory)
    survey = mirror.complete(epoch_directory, whole, recorded)
    return _with_unwhole(disks, survey, mirror)


def _survey_of_whole(
    epoch_directory: EpochDirectory,
    disks: JobDisks,
    options: ocp.CheckpointManagerOptions,
    known: Mapping[int, ReplaceCondition],
) -> Survey:
    """The survey of the epochs that are whole on all disks; a `known` one is damaged while the same save is there."""
    damaged = {
        epoch: condition
        for epoch, condition in known.items()
        if epoch in disks.whole and condition.save_id in (None, disks.whole[epoch])
    }
    epochs = [epoch for epoch in disks.whole if epoch not in damaged]
    needs_metrics = attached_metrics.are_needed(options)
    needs_costs = auto_interval.is_asked(options)
    return Survey(
        epochs=epochs,
        damaged=damaged,
        foreign={epoch: text for disk in reversed(disks.disks) for epoch, text in disk.foreign.items()},
        attached=attached_metrics.of_epochs(epoch_directory, epochs, disks.whole.get) if needs_metrics else {},
        runs=_runs(epoch_directory, epochs),
        costs=tuple(auto_interval.recent(epochs, epoch_directory.read_summary)) if needs_costs else (),
    )


def _with_unwhole(disks: JobDisks, survey: Survey, mirror: Mirror) -> Survey:
    """Adds to a survey, which the mirror has completed, what becomes of the epochs that are not whole on all disks.

    A disk sets aside its part of an epoch that the mirror has of another save, or lacks, or that has diverged.
    """
    damaged = dict(survey.damaged)
    remote = set(survey.remote)
    aside: dict[int, list[int]] = {process: [] for process in range(len(disks.disks))}
    for epoch in sorted(disks.epochs() - disks.whole.keys()):
        processes = disks.not_of(epoch, mirror.origin_of(epoch) if epoch in remote else None)
        for process in processes:
            aside[process].append(epoch)
        fault = disks.faults.get(epoch, "")
        if epoch in remote:
            if disks.having(epoch) - set(processes):  # the mirror has what these lack
                remote.discard(epoch)
        elif epoch in disks.unfinished:
            logging.warning("checkpoint %d was never finished, or is deleted in part: %s", epoch, fault)
        elif epoch in disks.faults:
            logging.error("checkpoint %d is not whole, and the mirror does not have it: %s", epoch, fault)
            damaged[epoch] = ReplaceCondition(None, fault)
    for epoch in survey.diverged:
        for process in disks.having(epoch):
            aside[process].append(epoch)
    return dataclasses.replace(
        survey,
        damaged=damaged,
        remote=tuple(sorted(remote)),
        aside={process: tuple(epochs) for process, epochs in aside.items() if epochs},
    )
