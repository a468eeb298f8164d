"""What the processes of a job find on disks of their own (`StorageOptions.local_disks`), and what that makes together.

Guarantee: an epoch counts as whole only if each disk has its process's part of one and the same attempt. What is
left of a commit, a deletion or a rollback that a kill interrupted is on some of the disks only, and is never listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from absl import logging

from epochckpt import errors
from epochckpt.directory.rename import RenameCommits
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.saving.host_record import HostRecord
from epochckpt.storage import Store

_MAX_MIRROR_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class Part:
    """What one disk has of an epoch: of which attempt (empty: that cannot be read), and what is wrong with it."""

    attempt: str
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Disk:
    """A process's look at its own disk."""

    directory: str  # the id of its directory
    known: Sequence[str]  # the ids of all directories when a run last claimed them, by process, and that claim
    parts: Mapping[int, Part]  # by epoch
    hidden: Sequence[int]  # epochs that a rollback hides there
    foreign: Mapping[int, str]  # folders that are named like an epoch and are none, described, by number
    mirror: str  # the text of its record of the mirror; empty without one

    def to_wire(self) -> dict[str, Any]:
        parts = [[epoch, part.attempt, part.fault] for epoch, part in self.parts.items()]
        return {**vars(self), "parts": parts, "foreign": sorted(self.foreign.items())}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Disk:
        parts = {epoch: Part(attempt, fault) for epoch, attempt, fault in wire["parts"]}
        return cls(**{**wire, "parts": parts, "foreign": dict(map(tuple, wire["foreign"]))})


def look(store: Store, names: StepNames, record: HostRecord, process: int, processes: int) -> Disk:
    """Looks at the own directory, whose `record` is given; no data is read."""
    commits = RenameCommits(store, names)  # one that ignores nothing
    epochs, others = commits.scan()
    foreign, parts = {epoch: commits.obstacle(name) for epoch, name in others.items()}, dict[int, Part]()
    for epoch in epochs:
        attempt = ""
        try:
            head = commits.read_head(epoch)
            if head.stock:
                where = f"{store.root}/{commits.folder(epoch)}"
                foreign[epoch] = f"{where} is a step of stock Orbax, which is not read from local disks"
                continue
            attempt, count = head.attempt, len(head.nodes)
            if processes not in (1, count):
                raise errors.DamagedError(
                    commits.folder(epoch), f"was saved by {count} processes, here are {processes}"
                )
            for number in range(count) if processes == 1 else [process]:
                commits.check_node(commits.folder(epoch), head, number)
            parts[epoch] = Part(attempt)
        except errors.FormatVersionError as error:  # all hosts have the same record, which this epochckpt cannot read
            logging.error("%s: checkpoint %d cannot be read here: %s", store.root, epoch, error)
            parts[epoch] = Part("")
        except (errors.DamagedError, errors.FormatError) as error:
            parts[epoch] = Part(attempt, errors.say(error))
        except errors.EpochNotFoundError:  # deleted just now
            continue
    mirror = ""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        mirror = store.read(paths.MIRROR_RECORD, limit_bytes=_MAX_MIRROR_BYTES).decode()
    return Disk(record.directory, [*record.disks, record.claim], parts, sorted(commits.hidden()), foreign, mirror)


@dataclasses.dataclass(frozen=True)
class Together:
    """The disks of all processes, in their order."""

    disks: Sequence[Disk]
    whole: Mapping[int, str]  # the attempts of the epochs that are whole on all of them
    faults: Mapping[int, str]  # why other epochs are not, but for those that a rollback hides
    unfinished: frozenset[int]  # those of these that no save was ever acknowledged of, or that are deleted in part

    @classmethod
    def of(cls, disks: Sequence[Disk], named: Callable[[Iterable[int]], str]) -> Together:
        """`named` gives the names of processes."""
        whole, faults, unfinished = dict[int, str](), dict[int, str](), set[int]()
        hidden = {epoch for disk in disks for epoch in disk.hidden}
        ids = [disk.directory for disk in disks]
        same = all(list(disk.known[:-1]) == ids and disk.known == disks[0].known for disk in disks)
        for epoch in sorted({epoch for disk in disks for epoch in disk.parts} - hidden):
            found = {number: disk.parts[epoch] for number, disk in enumerate(disks) if epoch in disk.parts}
            missing, attempts = set(range(len(disks))) - found.keys(), {part.attempt for part in found.values()}
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

    def not_of(self, epoch: int, attempt: str | None) -> list[int]:
        """The processes whose part of an epoch is of another attempt than this one."""
        parts = [(number, disk.parts.get(epoch)) for number, disk in enumerate(self.disks)]
        return [number for number, part in parts if part is not None and part.attempt != attempt]
