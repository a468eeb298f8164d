"""A head that is lost, or does not name all epochs of an object store, made anew from the epochs' own records.

An epoch is taken in if all files that its record names are there in their sizes. Of several attempts in one folder
that is the one whose record is `epoch.json`, or else the newest. Nothing is removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping

from epochckpt import errors
from epochckpt.directory import attached_metrics, metrics_log, owners
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.epoch_directory import EpochDirectory
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_changes import TakeIn, head_has_changed
from epochckpt.directory.head_record import Head
from epochckpt.format import EpochRecord, parsing, paths


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """What a directory has that its head does not name."""

    epochs: Mapping[str, EpochSummary]  # by folder
    aside: Mapping[str, EpochSummary]  # by `<name>/<folder>`: epochs that were rolled back, or kept
    left_out: Mapping[str, str]  # folders that are named like epochs and cannot be used, and why
    seen: bytes | None  # the head that was looked at, if it cannot be used; None if there was none
    change: str  # of the head that was looked at, if it can be used
    problem: str = ""  # what is wrong with the head; empty: it can be used, and other epochs lie beside its own


def with_head(epoch_directory: EpochDirectory) -> BucketDirectory:
    """The directory where it has a head; raises InvalidArgumentError where it can have none."""
    if not isinstance(epoch_directory, BucketDirectory):
        raise errors.InvalidArgumentError(
            f"{epoch_directory.store.root} is on a file system, where folders alone say which epochs there are: there "
            "is nothing to repair. `epochckpt verify --repair-view` repairs what stock Orbax reads"
        )
    return epoch_directory


def look(epoch_directory: BucketDirectory) -> Rebuilt:
    """Finds what the head should name and does not; it lists and reads, and changes nothing.

    Raises:
        InvalidArgumentError: the head can be used, and a run that may be alive has not closed the directory.
        FormatVersionError: a newer epochckpt has written it; or the head is lost, and it has written epochs.
    """
    seen = epoch_directory.head.read_bytes()  # before the look: a head that changes in between is not replaced
    try:
        head = epoch_directory.head.read()
        problem = ""
    except errors.FormatVersionError:
        raise
    except (errors.DamagedError, errors.FormatError) as error:
        head = None
        problem = errors.say(error)
    if head is None:
        problem = problem or f"{paths.HEAD} is missing"
    known = head or Head()
    epochs = dict[str, EpochSummary]()
    left_out = dict[str, str]()
    named = {*known.epochs, *known.begun.values(), *known.dead.values(), paths.HEAD.partition("/")[0]}
    names = [entry.name for entry in epoch_directory.store.list("") if entry.is_folder and entry.name not in named]

    def record(where: str, folder: str, but: Container[str] = ()) -> EpochRecord | str:
        try:
            return _record(epoch_directory, where, folder, but)
        except errors.FormatVersionError as error:
            if problem:  # the head would have been one that this epochckpt cannot write
                raise
            return errors.say(error)

    # What was set aside is no epoch any more.
    aside = dict[str, EpochSummary]()
    is_aside = known.named
    for name in (name for name in names if epoch_directory.names.parse(name) is None):
        inner = [paths.join(name, entry.name) for entry in epoch_directory.store.list(name) if entry.is_folder]
        found = {kept: record(kept, kept.partition("/")[2]) for kept in inner if kept not in known.aside}
        aside |= {kept: EpochSummary.for_head(one) for kept, one in found.items() if isinstance(one, EpochRecord)}
    is_aside |= {entry.save_id for entry in aside.values()}
    for name in (name for name in names if epoch_directory.names.parse(name) is not None):
        one = record(name, name, is_aside)
        if isinstance(one, str):
            left_out[name] = one
        else:
            sources = attached_metrics.in_folder(epoch_directory, name, one.epoch, one.save_id)
            epochs[name] = dataclasses.replace(EpochSummary.for_head(one), attached=sources)
    if head is not None and epochs:
        owners.check_idle(epoch_directory)
    return Rebuilt(
        epochs=epochs,
        aside=aside,
        left_out=left_out,
        seen=seen,
        change=head.change if head else "",
        problem=problem,
    )


def write(epoch_directory: BucketDirectory, found: Rebuilt) -> None:
    """Writes what `look` has found. A run that is alive after all is fenced off where the head was lost.

    InvalidArgumentError: the head is not what was looked at any more.
    """
    if not found.problem:
        root = epoch_directory.store.root
        change = TakeIn(root=root, epochs=found.epochs, aside=found.aside, expected=found.change)
        epoch_directory.head.write(change)
        return
    save_ids = [entry.save_id for entries in (found.epochs, found.aside) for entry in entries.values()]
    runs = {save_id.partition("-")[0] for save_id in save_ids}
    last = max((run for run in runs if len(run) == 16 and run[:8].isdigit()), default="")
    head = Head(incarnation=last, past=tuple(sorted(runs - {last})), epochs=found.epochs, aside=found.aside)
    beside, stock = epoch_directory.beside(head)
    foreign = tuple(sorted(n for n, save_ids in beside.items() if save_ids is None and n not in stock))
    logged = max((line.number for line in metrics_log.read_parts(epoch_directory.store)), default=0)
    head = head.claimed(owners.current(), foreign).next(closed=True, stock=stock, logged=logged)
    if not epoch_directory.head.write_rebuilt(found.seen, head):
        raise head_has_changed(epoch_directory.store.root)


def _record(epoch_directory: BucketDirectory, where: str, folder: str, but: Container[str] = ()) -> EpochRecord | str:
    """The record of the epoch whose records are in one place and whose files are in its folder, or why not.

    The attempts `but` are passed over.
    """
    epoch = epoch_directory.names.parse(folder)
    sizes = {file.path: file.size for file in epoch_directory.store.files(folder)}
    usable = list[EpochRecord]()
    reason = f"holds no commit record that can be used ({paths.EPOCH_RECORD})"
    for path in _candidates(epoch_directory, where):
        try:
            record = parsing.read_record(epoch_directory.store, path, parsing.parse_head)
        except errors.FormatVersionError:
            raise
        except (errors.DamagedError, errors.FormatError) as error:
            reason = errors.say(error)
            continue
        if record is None or record.epoch != epoch or record.save_id in but:
            continue
        lacking = next((p for p, size in record.sizes().items() if sizes.get(p) != size), None)
        if lacking is not None:
            reason = f"{paths.join(folder, lacking)} is missing, or has another size than recorded"
        elif path.endswith(f"/{paths.EPOCH_RECORD}"):
            return record
        else:
            usable.append(record)
    return max(usable, key=lambda record: record.committed_ns, default=reason)


def _candidates(epoch_directory: BucketDirectory, where: str) -> Iterator[str]:
    """The paths of an epoch's copied record, then of the records of its attempts."""
    yield paths.join(where, paths.EPOCH_RECORD)
    for entry in epoch_directory.store.list(where):
        if not entry.is_folder and paths.save_id_in(entry.name) is not None:
            yield paths.join(where, entry.name)
