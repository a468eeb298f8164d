"""Copies of an epoch's files in another directory, byte for byte, in the layout that the other store needs.

Of our epochs what the records list is copied, and compared with their checksums on the way; the Orbax view is built
anew, because it is made of links that only some copies keep. A step of stock Orbax is copied file by file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp

from epochckpt.arrays import EpochReader, NodeFile
from epochckpt.commit import Commits
from epochckpt.commit.protocol import ReplaceCondition
from epochckpt.commit.rename import RenameCommits
from epochckpt.errors import DamagedError, EpochNotFoundError, UploadError, unreadable
from epochckpt.format import EpochRecord, checksums, paths, records
from epochckpt.orbax import StepNames
from epochckpt.orbax.marks import STEP_RECORD
from epochckpt.storage import Store, copy_file

_STEP = re.compile(r"(?:(.+)_)?(\d+)")


def _record_for(record: EpochRecord, target: Store) -> EpochRecord:
    """The commit record of a copy: stores without rename have the attempt in their paths, and no Orbax view."""
    unsupported = record.orbax_unsupported if target.renames else None
    if target.renames and record.objects:  # a view could not be made where it was saved
        unsupported = {}
    return dataclasses.replace(record, objects=not target.renames, orbax_unsupported=unsupported, orbax_view=None)


def copy_node(reader: EpochReader, number: int, commits: Commits) -> None:
    """Copies the files of one node into another directory, durably, its record last.

    The attempt, which the copy keeps, has begun there. DamagedError: bytes differ from what was written.
    """
    epoch, attempt, entry = reader.record.epoch, reader.record.attempt, reader.record.nodes[number]
    target, base = commits.store, commits.make_node_folder(epoch, attempt, entry.name)
    recorded = reader.node_record(number)
    of_handlers = [f for f in recorded.files if f.name]
    inner = sorted({name for f in of_handlers for name in paths.parents(f.path)})  # parents first
    for name in inner:
        target.make_folder(paths.join(base, name))
    for item in dict.fromkeys(f.item for f in recorded.files if not f.name):
        own = item in recorded.items
        part = reader.of_node(number, item) if own else reader
        for file in part.files(item, 0 if own else number):
            file.copy(target, paths.join(base, file.name))
    for file in of_handlers:
        NodeFile(reader, number, file).copy(target, paths.join(base, file.path))
    path = reader.path(number, paths.NODE_RECORD)
    data = reader.guard(path, lambda: reader.store.read(path, limit_bytes=entry.record_size))
    view = _record_for(reader.record, target).orbax_unsupported is not None
    commits.seal_node(epoch, attempt, entry.name, inner[::-1], data, view)


def publish(reader: EpochReader, commits: Commits, replaces: ReplaceCondition | None) -> Callable[[], None] | None:
    """Makes a copy visible of which all nodes are there; see `Commits.publish`.

    UploadError: files of the copy are missing or short. EpochDeletedError: the epoch went away meanwhile.
    """
    record = _record_for(reader.record, commits.store)
    if record.orbax_unsupported is not None:
        record = commits.write_view(record, reader.pool.run)
    epoch, attempt = record.epoch, record.attempt
    staged = commits.make_staging(epoch, attempt) if isinstance(commits, RenameCommits) else commits.names.build(epoch)
    try:
        check(commits, staged, record)
    except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
        raise UploadError(epoch, commits.store.root, f"the copy is not whole: {error}") from error
    return commits.publish(
        epoch, attempt, record.to_bytes(), lambda: reader.check_present("it was being uploaded"), replaces
    )


def check(commits: Commits, folder: str, record: EpochRecord) -> None:
    """Whether an epoch's files are all in a folder: every file in its length, the nodes' records byte for byte.

    Raises:
        DamagedError: the first one that is not; says which.
    """
    for number, entry in enumerate(record.nodes):
        commits.check_node(folder, record, number)
        path = paths.join(folder, record.node_folder(number), paths.NODE_RECORD)
        try:
            data = commits.store.read(path, limit_bytes=entry.record_size)
        except OSError as error:
            raise unreadable(path, error) from error
        if checksums.digest(data) != entry.record_digest:
            raise DamagedError(path, "is not the record that the epoch was committed with")


# -- steps of stock Orbax --------------------------------------------------------------------------------------------


def find_step(store: Store, epoch: int) -> tuple[str, StepNames]:
    """The folder of a step that stock Orbax wrote, and how its steps are named, whatever format that is.

    Raises:
        EpochNotFoundError: no folder is named like it, or several are.
    """
    steps = [found for entry in store.list("") if entry.is_folder and (found := _STEP.fullmatch(entry.name))]
    named = [found for found in steps if int(found[2]) == epoch]
    if len(named) != 1:
        raise EpochNotFoundError(epoch, store.root, sorted({int(found[2]) for found in steps}))
    folder, prefix, number = named[0].group(0, 1, 2)
    length = len(number) if number != str(epoch) else None
    names = ocp.path.step.standard_name_format(step_prefix=prefix, step_format_fixed_length=length)
    return folder, StepNames(names)


def copy_tree(source: Store, path: str, target: Store, into: str) -> None:
    """Copies a folder with all below it into one that exists, durably; a link to a file becomes a file."""
    for entry in source.list(path):
        here, there = paths.join(path, entry.name), paths.join(into, entry.name)
        if entry.is_folder:
            target.make_folder(there)
            copy_tree(source, here, target, there)
        else:
            copy_file(source, here, target, there)
    target.sync_folder(into)


def same_step(a: Store, b: Store, folder: str) -> bool:
    """Whether a step of stock Orbax is in both: the same names and sizes, and what Orbax says of it to the byte."""
    path = paths.join(folder, STEP_RECORD)
    if any(not store.exists(path) for store in (a, b)) or sorted(_sizes(a, folder)) != sorted(_sizes(b, folder)):
        return False
    return a.read(path, limit_bytes=records.MAX_RECORD_BYTES) == b.read(path, limit_bytes=records.MAX_RECORD_BYTES)


def _sizes(store: Store, path: str) -> Iterator[tuple[str, int]]:
    for entry in store.list(path):
        below = paths.join(path, entry.name)
        if entry.is_folder:
            yield from _sizes(store, below)
        else:
            yield below, store.size(below)
