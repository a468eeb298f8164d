"""A copy of an epoch that is to be made in another directory: whether there is room, and who claims that directory.

A copy is a commit in the other directory (see `directory.epoch_directory`): the primary makes room (`EpochCopy.begin`),
processes copy the folders of nodes, and the primary publishes (`node_copies`). No reader sees a copy before it is
published, and the next claim of that directory sweeps what a killed copy leaves. A mirror is claimed for many copies,
so `upkeep` makes them of `node_copies` itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from absl import logging

from epochckpt import _threads
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition, Stager, Writer
from epochckpt.errors import (
    DamagedError,
    EpochExistsError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
)
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.tiers.node_copies import CopyCommit, NodeCopies, check_whole


@dataclasses.dataclass(frozen=True)
class _Room:
    """There is room for a copy; an epoch that it `replaces` gives way."""

    replaces: ReplaceCondition | None


class EpochCopy:
    """An epoch, and the directory to which it is to be copied.

    The copy gets the id of the epoch itself, or on stores without rename, where attempts share a folder, the first id
    of the claim.
    """

    def __init__(
        self,
        reader: EpochReader,
        epoch_directory: EpochDirectory,
        progress: Callable[[int], None] | None = None,
    ):
        """`progress` is called with the bytes of each piece that was copied, from any thread."""
        self._reader = reader
        self._epoch_directory = epoch_directory
        self._epoch = reader.record.epoch
        self._progress = progress

    def begin(self, replace: bool) -> CopyCommit | None:
        """On the primary: claims the destination and makes room; None if the destination has this epoch, whole.

        Another epoch of this number gives way with `replace`, and is an EpochExistsError without.
        """
        # A run that saves there is fenced off only for a copy that is to be made.
        if self.is_there(replace):
            return None
        writer = self._epoch_directory.claim(self._epoch)
        try:
            room = self._room(replace)  # since that look
        except Exception:
            _threads.logged(f"{self._epoch_directory.store.root}: the staging of a copy", writer.release)
            raise
        if room is None:
            writer.release()
            return None
        copy = self._commit(writer, room)
        with copy.giving_up():
            copy.make_room()
        return copy

    def joined(self, incarnation: str) -> NodeCopies:
        """On the other processes: their part of the copy, once the primary has claimed the destination."""
        stager = self._epoch_directory.join(incarnation)
        return NodeCopies(
            reader=self._reader,
            epoch_directory=self._epoch_directory,
            stager=stager,
            save_id=self._save_id(stager),
            progress=self._progress,
        )

    def copy_once(self, writer: Writer) -> None:
        """In one process, which has claimed the destination: makes the copy, unless the epoch is there, whole.

        Raises EpochExistsError if another epoch of this number is there.
        """
        room = self._room(False)
        if room is None:
            return
        copy = self._commit(writer, room)
        with copy.discarding():
            copy.make_room()
            copy.publish()

    def is_there(self, replace: bool) -> bool:
        """Whether the destination has this epoch, whole. Raises EpochExistsError as `begin`."""
        return self._room(replace) is None

    def _save_id(self, stager: Stager) -> str:
        if self._epoch_directory.save_ids_in_paths:
            return f"{stager.incarnation}-{self._epoch}-0"
        return self._reader.record.save_id

    def _commit(self, writer: Writer, room: _Room) -> CopyCommit:
        return CopyCommit(
            reader=self._reader,
            epoch_directory=self._epoch_directory,
            writer=writer,
            save_id=self._save_id(writer),
            replaces=room.replaces,
            is_checked=True,  # on stores without rename a manager that is opened there clears up, too
            progress=self._progress,
        )

    def _room(self, replace: bool) -> _Room | None:
        """The room for the copy; None if the destination has this epoch, whole. Raises EpochExistsError as `begin`."""
        store = self._epoch_directory.store
        folder = self._epoch_directory.folder(self._epoch)
        if not self._epoch_directory.has_something(self._epoch):
            return _Room(None)
        try:
            record = self._epoch_directory.read_in(folder, self._epoch)
        except (DamagedError, FormatError, FormatVersionError) as error:
            raise self._in_the_way(f"not readable: {error}") from error
        if record is None:
            raise self._in_the_way("no epoch")
        room = _Room(ReplaceCondition(record.save_id))
        if record.origin != self._reader.record.origin:
            if not replace:
                raise self._in_the_way(f"another one (attempt {record.save_id})")
            return room
        try:
            check_whole(self._epoch_directory, folder, record)
        except DamagedError as error:
            text = "%s: the copy of checkpoint %d is made anew, it is not whole: %s"
            logging.warning(text, store.root, self._epoch, error)
            return room
        logging.info("checkpoint %d is in %s already", self._epoch, paths.join(store.root, folder))
        return None

    def _in_the_way(self, found: str) -> EpochExistsError:
        """The error for a copy whose place is taken; `found` says by what."""
        folder = self._epoch_directory.folder(self._epoch)
        return EpochExistsError(
            f"{self._epoch_directory.store.root} has {folder} already, which is {found}. Nothing there was changed: "
            f"delete it or move it away, copy checkpoint {self._epoch} to another destination, or replace epochs with "
            "CopyUpload(…, replace=True)"
        )


def check_place(source: Store, target: Store) -> None:
    """Refuses a destination that lies in the source."""
    if target.lies_in(source):
        raise InvalidArgumentError(
            f"destination {target.root} lies in the checkpoint directory {source.root}; copy to one outside"
        )
    if source.is_same(target):
        raise InvalidArgumentError(f"destination {target.root} is the checkpoint directory itself; choose another")
