"""One copy of an epoch in another directory, compared with its checksums on the way.

A copy is a commit in the other directory (see `directory.epoch_directory`): the primary makes room (`EpochCopy.begin`),
processes copy the folders of nodes, and the primary publishes. Only the bytes are not new. No reader sees a copy before
it is published, and the next claim of that directory sweeps what a killed copy leaves.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Mapping

from absl import logging

from epochckpt import _threads
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition, Stager, Staging, Writer
from epochckpt.errors import (
    DamagedError,
    EpochExistsError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    UncertainError,
    UploadError,
    unreadable,
)
from epochckpt.format import EpochRecord, NodeEntry, checksums, paths
from epochckpt.orbax import step_files
from epochckpt.storage import Store

_THREADS = 2


class EpochCopy:
    """One copy of an epoch in the making: the files that its records list, compared with their checksums on the way.

    The Orbax view is built anew, because it is made of links that only some copies keep. The copy is made under the id
    of an `attempt` of the other directory. By default that is the id of the epoch itself, or on stores without rename,
    where attempts share a folder, the first one of the claim. `progress` is called with the bytes of each piece that
    was copied, from any thread.
    """

    def __init__(
        self,
        reader: EpochReader,
        epoch_directory: EpochDirectory,
        save_id: str = "",
        progress: Callable[[int], None] | None = None,
    ):
        self._reader = reader.verifying(_threads.Pool(_THREADS))
        self._progress = progress
        self.epoch_directory = epoch_directory
        self._epoch = reader.record.epoch
        self._given = save_id
        self._stager: Stager | None = None  # of the run that copies
        self._writer: Writer | None = None  # the same, on the primary
        self._replaces: ReplaceCondition | None = None
        self._may_be_visible = False

    @property
    def _save_id(self) -> str:
        if self._given:
            return self._given
        if self.epoch_directory.save_ids_in_paths:
            return f"{self._joined.incarnation}-{self._epoch}-0"
        return self._reader.record.save_id

    @property
    def _joined(self) -> Stager:
        assert self._stager is not None, "the destination was not claimed"
        return self._stager

    @property
    def writer(self) -> Writer:
        """The right to change the destination; only the primary may ask, once it has claimed the destination."""
        assert self._writer is not None, "the destination was not claimed by this process"
        return self._writer

    @property
    def _staging(self) -> Staging:
        return self._joined.staging(self._epoch, self._save_id)

    def join(self, stager: Stager) -> None:
        """On every process: copies as a part of the run that has claimed the destination."""
        self._stager = stager
        if isinstance(stager, Writer):
            self._writer = stager

    @property
    def nodes(self) -> tuple[NodeEntry, ...]:
        """The nodes of the epoch."""
        return self._reader.record.nodes

    def make_room(self, replaces: ReplaceCondition | None) -> None:
        """On the primary, which has claimed the destination: begins a copy, which may replace another epoch there."""
        self._replaces = replaces
        self.writer.stage(self._epoch, self._save_id)

    def begin(self, replace: bool) -> bool:
        """On the primary: claims the destination and makes room; False if the destination has this epoch, whole.

        Another epoch of this number gives way with `replace`, and is an EpochExistsError without.
        """
        # A run that saves there is fenced off only for a copy that is to be made.
        if self.is_there(replace):
            return False
        self.join(self.epoch_directory.claim(self._epoch))
        with self.giving_up():
            if self.is_there(replace):  # since that look
                self.writer.release()
                return False
            self.writer.stage(self._epoch, self._save_id)
        return True

    def copy_once(self, writer: Writer) -> None:
        """In one process, which has claimed the destination: makes the copy, unless the epoch is there, whole.

        Raises EpochExistsError if another epoch of this number is there.
        """
        self.join(writer)
        with self._discarding():
            if not self.is_there(False):
                writer.stage(self._epoch, self._save_id)
                self.publish()

    def is_there(self, replace: bool) -> bool:
        """Whether the destination has this epoch, whole; if not, what gives way to it is remembered.

        Raises EpochExistsError as `begin`.
        """
        self._replaces = None
        store = self.epoch_directory.store
        folder = self.epoch_directory.folder(self._epoch)
        if not self.epoch_directory.has_something(self._epoch):
            return False
        try:
            record = self.epoch_directory.read_in(folder, self._epoch)
        except (DamagedError, FormatError, FormatVersionError) as error:
            raise self._in_the_way(f"not readable: {error}") from error
        if record is None:
            raise self._in_the_way("no epoch")
        self._replaces = ReplaceCondition(record.save_id)
        if record.origin != self._reader.record.origin:
            if not replace:
                raise self._in_the_way(f"another one (attempt {record.save_id})")
            return False
        try:
            self._check(folder, record)
        except DamagedError as error:
            text = "%s: the copy of checkpoint %d is made anew, it is not whole: %s"
            logging.warning(text, store.root, self._epoch, error)
            return False
        logging.info("checkpoint %d is in %s already", self._epoch, paths.join(store.root, folder))
        return True

    def _in_the_way(self, found: str) -> EpochExistsError:
        """The error for a copy whose place is taken; `found` says by what."""
        folder = self.epoch_directory.folder(self._epoch)
        return EpochExistsError(
            f"{self.epoch_directory.store.root} has {folder} already, which is {found}. Nothing there was changed: "
            f"delete it or move it away, copy checkpoint {self._epoch} to another destination, or replace epochs with "
            "CopyUpload(…, replace=True)"
        )

    def _check(self, folder: str, record: EpochRecord) -> None:
        """Raises DamagedError unless all files are there: every one in its length, nodes' records byte for byte."""
        for number, entry in enumerate(record.nodes):
            self.epoch_directory.check_node(folder, record, number)
            path = paths.join(folder, record.path(number))
            self.epoch_directory.store.confirming_damage(functools.partial(self._check_record, path, entry))

    def _check_record(self, path: str, entry: NodeEntry) -> None:
        """Raises DamagedError unless a node's record is the one that the epoch was committed with."""
        try:
            data = self.epoch_directory.store.read(path, limit_bytes=entry.record_size)
        except OSError as error:
            raise unreadable(path, error) from error
        if checksums.digest(data) != entry.record_digest:
            raise DamagedError(path, "is not the record that the epoch was committed with")

    @functools.cached_property
    def _record(self) -> EpochRecord:
        """The commit record of the copy: on object stores the attempt is in the paths, and few have an Orbax view."""
        record = self._reader.record
        unsupported: Mapping[str, Mapping[str, str]] | None = None
        if step_files.saves_to(self.epoch_directory.store):  # where it was saved perhaps no view could be made
            unsupported = {} if record.objects else record.orbax_unsupported
        origin = record.origin if self._save_id != record.origin else ""
        return dataclasses.replace(
            record,
            save_id=self._save_id,
            copied_from=origin,
            objects=self.epoch_directory.save_ids_in_paths,
            orbax_unsupported=unsupported,
            orbax_view=None,
            inlined={},
        )

    def copy_nodes(self, names: Collection[str]) -> list[NodeEntry]:
        """Copies the folders of these nodes; returns the entries of their copies."""
        return [self._copy_node(number, entry) for number, entry in enumerate(self.nodes) if entry.name in names]

    def _copy_node(self, number: int, entry: NodeEntry) -> NodeEntry:
        reader = self._reader
        target = self.epoch_directory.store
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
            return reader.guard(path, lambda: reader.store.read(path, limit_bytes=self.nodes[number].record_size))
        return dataclasses.replace(recorded, save_id=self._save_id, replicas=()).to_bytes()

    def entry(self, number: int) -> NodeEntry:
        """The entry of a node in the record of the copy."""
        data = self._node_record(number)
        return dataclasses.replace(self.nodes[number], record_size=len(data), record_digest=checksums.digest(data))

    def publish(self, copied: Collection[NodeEntry] = ()) -> None:
        """On the primary: copies the nodes that are not `copied` yet, and makes the copy visible."""
        reader = self._reader
        epoch_directory = self.epoch_directory
        epoch = self._epoch
        there = {entry.name: entry for entry in copied}
        there |= {e.name: e for e in self.copy_nodes({entry.name for entry in self.nodes} - there.keys())}
        record = dataclasses.replace(self._record, nodes=tuple(there[entry.name] for entry in self.nodes))
        if record.orbax_unsupported is not None:
            record = self.writer.write_view(record, reader.pool.run)
        root = epoch_directory.store.root
        still_there = functools.partial(reader.check_present, "it was being copied")
        if not self._given:
            try:
                self._check(self._staging.folder, record)
            except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
                raise UploadError(epoch, root, f"the copy is not whole: {error}") from error
        try:
            remove = self.writer.publish(self._staging, record.to_bytes(), still_there, self._replaces)
        except UncertainError:
            self._may_be_visible = True
            raise
        self._may_be_visible = True
        if remove is not None:
            _threads.logged(f"{root}: an epoch that was replaced", remove)
        logging.info("checkpoint %d was copied to %s", epoch, paths.join(root, epoch_directory.folder(epoch)))

    def leave(self) -> None:
        """On the primary: gives up the claim to the destination."""
        _threads.logged(f"{self.epoch_directory.store.root}: the staging of a copy", self.writer.release)

    @contextlib.contextmanager
    def giving_up(self) -> Generator[None]:
        """On the primary: after an error `_discarding`, and gives up the claim."""
        try:
            with self._discarding():
                yield
        except Exception:
            self.leave()
            raise

    @contextlib.contextmanager
    def _discarding(self) -> Generator[None]:
        """Removes, after an error, what there is of the copy, as long as no reader can see it."""
        try:
            yield
        except BaseException as error:
            what = f"{self.epoch_directory.store.root}: what a failed upload left"
            if not self._may_be_visible and not isinstance(error, EpochExistsError):
                _threads.logged(what, lambda: self.writer.discard(self._staging))
            raise


def check_place(source: Store, target: Store) -> None:
    """Refuses a destination that lies in the source."""
    if target.lies_in(source):
        raise InvalidArgumentError(
            f"destination {target.root} lies in the checkpoint directory {source.root}; copy to one outside"
        )
    if source.is_same(target):
        raise InvalidArgumentError(f"destination {target.root} is the checkpoint directory itself; choose another")
