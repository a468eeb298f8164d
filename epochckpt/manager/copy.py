"""Copies of an epoch's files in another directory, byte for byte, in the layout that the other store needs.

Of our epochs what the records list is copied, and compared with their checksums on the way; the Orbax view is built
anew, because it is made of links that only some copies keep. A step of stock Orbax is copied file by file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from epochckpt.arrays import EpochReader, NodeFile
from epochckpt.commit import Commits
from epochckpt.commit.protocol import ReplaceCondition
from epochckpt.errors import DamagedError, EpochNotFoundError, UploadError, unreadable
from epochckpt.format import EpochRecord, checksums, paths, records
from epochckpt.storage import Store, copy_file

_STEP = re.compile(r"(?:\A|_)(\d+)\Z")
_STEP_RECORD = "_CHECKPOINT_METADATA"


def record_for(record: EpochRecord, target: Store) -> EpochRecord:
    """The commit record of a copy: stores without rename have the attempt in their paths, and no Orbax view."""
    unsupported = record.orbax_unsupported if target.renames else None
    if target.renames and record.objects:  # a view could not be made where it was saved
        unsupported = {}
    return dataclasses.replace(record, objects=not target.renames, orbax_unsupported=unsupported, orbax_view=None)


def copy_node(reader: EpochReader, number: int, commits: Commits) -> None:
    """Copies the files of one node into another directory, durably, its record last.

    Args:
        reader: the epoch.
        number: the node's.
        commits: the other directory, in which the attempt that the copy keeps has begun.

    Raises:
        DamagedError: bytes differ from what was written.
        EpochDeletedError: the epoch went away.
        OSError, SaveError: the other directory refuses.
    """
    epoch, attempt, entry = reader.record.epoch, reader.record.attempt, reader.record.nodes[number]
    target, base = commits.store, commits.make_node_folder(epoch, attempt, entry.name)
    recorded = reader.node_record(number)
    files = [f for f in recorded.files if f.name]
    inner = sorted({name for f in files for name in paths.parents(f.path)})  # parents first
    for name in inner:
        target.make_folder(paths.join(base, name))
    for item in dict.fromkeys(f.item for f in recorded.files if not f.name):
        own = item in recorded.items
        part = reader.of_node(number, item) if own else reader
        for file in part.files(item, 0 if own else number):
            file.copy(target, paths.join(base, file.name))
    for file in files:
        NodeFile(reader, number, file).copy(target, paths.join(base, file.path))
    data = _read_node(reader.store, paths.join(reader.folder, reader.record.node_folder(number)), reader.record, number)
    view = record_for(reader.record, target).orbax_unsupported is not None
    commits.seal_node(epoch, attempt, entry.name, inner[::-1], data, view)


def publish(reader: EpochReader, commits: Commits, replaces: ReplaceCondition | None) -> Callable[[], None] | None:
    """Makes a copy visible of which all nodes are there; see `Commits.publish`.

    Raises:
        UploadError: files of the copy are missing or short.
        EpochDeletedError: the epoch went away meanwhile.
    """
    record = record_for(reader.record, commits.store)
    if record.orbax_unsupported is not None:
        record = commits.write_view(record, _one_by_one)
    epoch, attempt = record.epoch, record.attempt
    try:
        for number, entry in enumerate(record.nodes):
            check_node(commits.store, commits.node_folder(epoch, attempt, entry.name), record, number)
    except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
        raise UploadError(epoch, commits.store.root, f"the copy is not whole: {error}") from error
    return commits.publish(
        epoch, attempt, record.to_bytes(), lambda: reader.check_present("it was being uploaded"), replaces
    )


def _one_by_one(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def check(store: Store, folder: str, record: EpochRecord) -> None:
    """Whether an epoch's files are all there: the nodes' records, byte for byte, and every file, by its size.

    Raises:
        DamagedError: the first one that is not; says which.
    """
    for number in range(len(record.nodes)):
        check_node(store, paths.join(folder, record.node_folder(number)), record, number)


def check_node(store: Store, base: str, record: EpochRecord, number: int) -> None:
    """The same for one node, whose files lie in a folder."""
    _read_node(store, base, record, number)
    for file in record.nodes[number].files:
        path = paths.join(base, file.path)
        try:
            size = store.size(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if size != file.size:
            raise DamagedError(path, f"has {size} bytes, {file.size} were written")


def _read_node(store: Store, base: str, record: EpochRecord, number: int) -> bytes:
    """The content of a node's record, compared with the epoch's."""
    entry = record.nodes[number]
    path = paths.join(base, paths.NODE_RECORD)
    try:
        data = store.read(path, limit_bytes=records.MAX_RECORD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise DamagedError(path, str(error)) from error
    if len(data) != entry.record_size or checksums.digest(data) != entry.record_digest:
        raise DamagedError(path, "is not the record that the epoch was committed with")
    return data


# -- steps of stock Orbax --------------------------------------------------------------------------------------------


def find_step(store: Store, epoch: int) -> str:
    """The folder of a step that stock Orbax wrote, whatever format its name has.

    Raises:
        EpochNotFoundError: no folder is named like it, or several are.
    """
    steps: dict[int, list[str]] = {}
    for entry in store.list(""):
        named = _STEP.search(entry.name)
        if entry.is_folder and named:
            steps.setdefault(int(named[1]), []).append(entry.name)
    if len(found := steps.get(epoch, [])) != 1:
        raise EpochNotFoundError(epoch, store.root, sorted(steps))
    return found[0]


def copy_tree(source: Store, path: str, target: Store, into: str) -> None:
    """Copies a folder with all below it into one that exists, durably; a link to a file becomes a file."""
    for entry in source.list(path):
        here, there = paths.join(path, entry.name), paths.join(into, entry.name)
        if entry.is_folder:
            target.make_folder(there)
            copy_tree(source, here, target, there)
            continue
        copy_file(source, here, target, there)
    target.sync_folder(into)


def same_step(a: Store, b: Store, folder: str) -> bool:
    """Whether a step of stock Orbax is in both: the same names and sizes, and what Orbax says of it to the byte."""
    path = paths.join(folder, _STEP_RECORD)
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
