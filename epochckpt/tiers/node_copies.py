"""The making of one copy of an epoch, by the run that has claimed the destination.

On every process, `NodeCopies` copies the folders of nodes, compared with their checksums on the way. On the primary,
`CopyCommit` also makes room, and publishes the copy. Only the bytes are not new: the commit is one of the destination.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Mapping

from absl import logging

from epochckpt import _threads
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition, Stager, Staging, Writer
from epochckpt.errors import DamagedError, EpochExistsError, UncertainError, UploadError, unreadable
from epochckpt.format import EpochRecord, NodeEntry, checksums, paths
from epochckpt.orbax import step_files

_THREADS = 2


class NodeCopies:
    """What one process copies: files that the records of an epoch list, compared with their checksums on the way.

    The Orbax view is built anew, because it is made of links that only some copies keep.
    """

    def __init__(
        self,
        *,
        reader: EpochReader,
        epoch_directory: EpochDirectory,
        stager: Stager,
        save_id: str,
        progress: Callable[[int], None] | None = None,
    ):
        """The copy is made under an id of the other directory, `save_id`, by the run that has given the `stager`.

        `progress` is called with the bytes of each piece that was copied, from any thread.
        """
        self._reader = reader.verifying(_threads.Pool(_THREADS))
        self._epoch = reader.record.epoch
        self._nodes = reader.record.nodes
        self._epoch_directory = epoch_directory
        self._stager = stager
        self._save_id = save_id
        self._progress = progress

    @property
    def _staging(self) -> Staging:
        return self._stager.staging(self._epoch, self._save_id)

    @functools.cached_property
    def _record(self) -> EpochRecord:
        """The commit record of the copy: on object stores the attempt is in the paths, and few have an Orbax view."""
        record = self._reader.record
        unsupported: Mapping[str, Mapping[str, str]] | None = None
        if step_files.saves_to(self._epoch_directory.store):  # where it was saved perhaps no view could be made
            unsupported = {} if record.objects else record.orbax_unsupported
        origin = record.origin if self._save_id != record.origin else ""
        return dataclasses.replace(
            record,
            save_id=self._save_id,
            copied_from=origin,
            objects=self._epoch_directory.save_ids_in_paths,
            orbax_unsupported=unsupported,
            orbax_view=None,
            inlined={},
        )

    def copy_nodes(self, names: Collection[str]) -> list[NodeEntry]:
        """Copies the folders of these nodes; returns the entries of their copies."""
        return [self._copy_node(number, entry) for number, entry in enumerate(self._nodes) if entry.name in names]

    def _copy_node(self, number: int, entry: NodeEntry) -> NodeEntry:
        reader = self._reader
        target = self._epoch_directory.store
        staging = self._staging
        base = staging.make_node_folder(entry.name)
        recorded = reader.node_record(number)
        of_handlers = [f for f in recorded.files if f.name]
        inner = sorted({name for f in of_handlers for name in paths.parents(f.path)})  # parents first
        for name in inner:
            target.make_folder(paths.join(base, name))
        for item in dict.fromkeys(f.item for f in recorded.files if not f.name):
            own = item in recorded.items
            part = reader.of_node(number, item) if own else reader
            folder = staging.data_folder(entry.name, item)
            for file in part.files(item, 0 if own else number):
                file.copy_to(target, paths.join(folder, file.name), self._progress)
        for file in of_handlers:
            reader.node_file(number, file).copy_to(target, paths.join(base, file.path), self._progress)
        # The record of the node is last.
        data = self._node_record(number)
        view = None if self._record.orbax_unsupported is None else []
        staging.seal(entry.name, inner[::-1], data, view)
        return self.entry(number)

    def _node_record(self, number: int) -> bytes:
        """The copy of a node's record."""
        reader = self._reader
        path = self._reader.path(number)
        recorded = reader.node_record(number)
        if recorded.save_id == self._save_id and not recorded.replicas:
            return reader.guard(path, lambda: reader.store.read(path, limit_bytes=self._nodes[number].record_size))
        return dataclasses.replace(recorded, save_id=self._save_id, replicas=()).to_bytes()

    def entry(self, number: int) -> NodeEntry:
        """The entry of a node in the record of the copy."""
        data = self._node_record(number)
        return dataclasses.replace(self._nodes[number], record_size=len(data), record_digest=checksums.digest(data))


class CopyCommit(NodeCopies):
    """The same on the primary, which makes room for the copy and makes it visible."""

    def __init__(
        self,
        *,
        reader: EpochReader,
        epoch_directory: EpochDirectory,
        writer: Writer,
        save_id: str,
        replaces: ReplaceCondition | None,
        is_checked: bool,
        progress: Callable[[int], None] | None = None,
    ):
        """The copy takes the place of the epoch that it `replaces`, if any.

        If `is_checked`, the files are looked at once more just before it is made visible: another manager may have
        removed them.
        """
        super().__init__(
            reader=reader,
            epoch_directory=epoch_directory,
            stager=writer,
            save_id=save_id,
            progress=progress,
        )
        self._writer = writer
        self._replaces = replaces
        self._is_checked = is_checked
        self._may_be_visible = False

    @property
    def incarnation(self) -> str:
        """Of the run that has claimed the destination."""
        return self._writer.incarnation

    def make_room(self) -> None:
        """Begins the copy in the destination."""
        self._writer.stage(self._epoch, self._save_id)

    def publish(self, copied: Collection[NodeEntry] = ()) -> None:
        """Copies the nodes that are not `copied` yet, and makes the copy visible."""
        reader = self._reader
        epoch_directory = self._epoch_directory
        epoch = self._epoch
        there = {entry.name: entry for entry in copied}
        there |= {e.name: e for e in self.copy_nodes({entry.name for entry in self._nodes} - there.keys())}
        record = dataclasses.replace(self._record, nodes=tuple(there[entry.name] for entry in self._nodes))
        if record.orbax_unsupported is not None:
            record = self._writer.write_view(record, reader.pool.run)
        root = epoch_directory.store.root
        still_there = functools.partial(reader.check_present, "it was being copied")
        if self._is_checked:
            try:
                check_whole(epoch_directory, self._staging.folder, record)
            except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
                raise UploadError(epoch, root, f"the copy is not whole: {error}") from error
        try:
            remove = self._writer.publish(self._staging, record.to_bytes(), still_there, self._replaces)
        except UncertainError:
            self._may_be_visible = True
            raise
        self._may_be_visible = True
        if remove is not None:
            _threads.logged(f"{root}: an epoch that was replaced", remove)
        logging.info("checkpoint %d was copied to %s", epoch, paths.join(root, epoch_directory.folder(epoch)))

    def leave(self) -> None:
        """Gives up the claim to the destination."""
        _threads.logged(f"{self._epoch_directory.store.root}: the staging of a copy", self._writer.release)

    @contextlib.contextmanager
    def giving_up(self) -> Generator[None]:
        """After an error `discarding`, and gives up the claim."""
        try:
            with self.discarding():
                yield
        except Exception:
            self.leave()
            raise

    @contextlib.contextmanager
    def discarding(self) -> Generator[None]:
        """Removes, after an error, what there is of the copy, as long as no reader can see it."""
        try:
            yield
        except BaseException as error:
            what = f"{self._epoch_directory.store.root}: what a failed upload left"
            if not self._may_be_visible and not isinstance(error, EpochExistsError):
                _threads.logged(what, lambda: self._writer.discard(self._staging))
            raise


def check_whole(epoch_directory: EpochDirectory, folder: str, record: EpochRecord) -> None:
    """Raises DamagedError unless all files are there: every one in its length, nodes' records byte for byte."""
    for number, entry in enumerate(record.nodes):
        epoch_directory.check_node(folder, record, number)
        path = paths.join(folder, record.path(number))
        check = functools.partial(_check_record, epoch_directory, path, entry)
        epoch_directory.store.confirming_damage(check)


def _check_record(epoch_directory: EpochDirectory, path: str, entry: NodeEntry) -> None:
    """Raises DamagedError unless a node's record is the one that the epoch was committed with."""
    try:
        data = epoch_directory.store.read(path, limit_bytes=entry.record_size)
    except OSError as error:
        raise unreadable(path, error) from error
    if checksums.digest(data) != entry.record_digest:
        raise DamagedError(path, "is not the record that the epoch was committed with")
