"""What uploads have in common: the place where a copy is made, what is in its way, and what a failed one leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Generator

from absl import logging

from epochckpt import copying, layout, placing, worker
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochExistsError, FormatError, UploadError, say
from epochckpt.node_reader import EpochReader
from epochckpt.records import EpochRecord
from epochckpt.store import Store

PREFIX = "upload-"


@contextlib.contextmanager
def said(epoch: int, destination: str) -> Generator[None]:
    """Says of what a store refuses that it is this upload."""
    try:
        yield
    except EpochCheckpointError:
        raise
    except FileNotFoundError as error:
        reason = f"{say(error)} (another upload has begun there, or not all nodes see the same folder)"
        raise UploadError(epoch, destination, reason) from error
    except OSError as error:
        raise UploadError(epoch, destination, say(error)) from error


def is_there(target: Store, folder: str, epoch: int, attempt: str, replace: bool) -> tuple[bool, EpochRecord | None]:
    """Whether an attempt is in a folder of the destination already, whole.

    Args:
        target: the destination.
        folder: the epoch's folder there.
        epoch: its number.
        attempt: the attempt.
        replace: another attempt may give way.

    Returns:
        Whether it is there, and what is to give way.

    Raises:
        EpochExistsError: something else is there.
    """
    if not target.exists(folder if target.renames else layout.join(folder, layout.EPOCH_RECORD)):
        return False, None
    try:
        record = copying.record_in(target, folder)
    except (DamagedError, FormatError) as error:
        raise in_the_way(target, folder, epoch, f"not readable: {error}") from error
    if record is None:
        raise in_the_way(target, folder, epoch, "no epoch")
    if record.attempt != attempt:
        if not replace:
            raise in_the_way(target, folder, epoch, f"another one (attempt {record.attempt})")
        return False, record
    try:
        copying.check(target, folder, record)
    except DamagedError as error:
        logging.warning("%s: the copy of epoch %d is made anew, it is not whole: %s", target.root, epoch, error)
        return False, None
    return True, None


def in_the_way(target: Store, folder: str, epoch: int, found: str) -> EpochExistsError:
    """The error for what lies where an epoch is to go."""
    return EpochExistsError(
        f"{target.root} has {folder} already, which is {found}. Nothing there was changed: delete it or move it away, "
        f"upload epoch {epoch} to another destination, or replace epochs with CopyUpload(…, replace=True)"
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """An epoch where it is: a store, the folder in it, and who reads it; nobody if stock Orbax wrote it."""

    store: Store
    folder: str
    reader: EpochReader | None


class Copy:
    """One copy in the making.

    Args:
        target: where it goes.
        staging: the folder that it is written to.
        place: the folder that it becomes.
    """

    def __init__(self, target: Store, staging: str, place: str):
        self.target, self.staging, self.place = target, staging, place
        self.source: Source | None = None
        self._done: set[str] = set()

    def nodes(self, wanted: set[str]) -> None:
        """Copies the folders of nodes that are not copied yet."""
        assert self.source is not None, "it was found"
        reader = self.source.reader
        for number, entry in enumerate(reader.record.nodes if reader is not None else ()):
            if reader is not None and entry.name in wanted - self._done:
                copying.copy_node(reader, number, self.target, self.staging)
                self._done.add(entry.name)

    def publish(self, old: EpochRecord | None) -> None:
        """Copies what belongs to no node, and makes the copy visible, in place of an old one if there is one."""
        assert self.source is not None, "it was found"
        reader = self.source.reader
        if reader is None:
            copying.copy_tree(self.source.store, self.source.folder, self.target, self.staging)
            self._rename()
            return
        record = copying.copy_view(reader, self.target, self.staging)
        try:
            copying.check(self.target, self.staging, record)
        except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
            reason = f"the copy is not whole: {error}"
            raise UploadError(record.epoch, self.target.root, reason) from error
        reader.check_present("it was being uploaded")
        path = layout.join(self.staging, layout.EPOCH_RECORD)
        if self.target.renames:
            self.target.create(path, record.to_bytes())
            self.target.sync_folder(self.staging)
            self._rename()
            return
        if old is not None:
            self.target.remove(path)
        self.target.create(path, record.to_bytes())
        if old is not None:
            worker.logged(
                f"{self.target.root}: an epoch that was replaced", lambda: remove_objects(self.target, self.place, old)
            )

    def _rename(self) -> None:
        home = self.staging.rpartition("/")[0]
        # a copy that is not whole, or is to give way: nothing else was let through
        there = self.target.exists(self.place)
        old = placing.put(self.target, home, self.staging, self.place, replace=there)
        self.target.sync_folder("")
        if old is not None:
            self.target.sync_folder(home)
        worker.logged(f"{self.target.root}: what was replaced", lambda: sweep(self.target))

    def give_up(self) -> None:
        """Removes what there is of it, as long as nobody can see it."""
        reader = self.source.reader if self.source is not None else None
        if self.target.renames:
            sweep(self.target)
        elif reader is not None and not self.target.exists(layout.join(self.place, layout.EPOCH_RECORD)):
            remove_objects(self.target, self.place, copying.record_for(reader.record, self.target))


def stage(target: Store, label: str) -> str:
    """Makes room for a copy on a store with rename: a home (see `placing`); returns the copy's folder, not yet made."""
    home = f"{PREFIX}{label}{layout.new_id()}{layout.TMP_SUFFIX}"
    target.make_folder(home)
    return layout.join(home, "copy")


def sweep(target: Store, label: str = "") -> None:
    """Removes what killed uploads left; renamed first, so that one that is not dead after all fails.

    An epoch that was on its way out when its upload was killed, and that nothing replaced, goes back to its place.

    Args:
        target: the destination.
        label: only those that were staged with this label; empty: all.
    """
    if not target.renames:
        return
    ours = re.compile(f"{PREFIX}{re.escape(label)}{'[0-9a-f]{16}' if label else '.*'}{re.escape(layout.TMP_SUFFIX)}")
    for entry in target.list(""):
        if entry.is_folder and ours.fullmatch(entry.name):
            home = f"{PREFIX}{label}{layout.new_id()}{layout.TMP_SUFFIX}"
            target.rename(entry.name, home)
            placing.leave(target, home)


def remove_objects(target: Store, folder: str, record: EpochRecord) -> None:
    """Stores without rename: removes the files of one attempt, but for its record."""
    for number in range(len(record.nodes)):
        target.remove_tree(layout.join(folder, record.node_folder(number)))
