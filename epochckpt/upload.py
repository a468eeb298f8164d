"""`CopyUpload`: the last epoch of a run, copied to another directory.

When is a copy visible? On a file system it is staged in `upload-<attempt>-<id>.orbax-checkpoint-tmp/` and renamed to
its name when all of it is durable. On stores without rename the files have the attempt in their names, and `epoch.json`
is put, if absent, last. Nobody sees a copy before that, and a killed one leaves nothing that is taken for an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator
from typing import Any

from absl import logging

from epochckpt import coordination, copying, layout, worker
from epochckpt.boundary import Exchange
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochExistsError,
    FormatError,
    InvalidArgumentError,
    UnsupportedError,
    UploadError,
    say,
)
from epochckpt.manager import CheckpointManager
from epochckpt.node_reader import EpochReader
from epochckpt.reading import epoch_number
from epochckpt.records import EpochRecord
from epochckpt.runner import UploadTaskGroupBuilder
from epochckpt.storage import open_store
from epochckpt.store import Store
from epochckpt.tasks import Task, TaskGroup, joining
from epochckpt.worker import Pool
from epochckpt.workspace import Workspace

_PREFIX = "upload-"
_THREADS = 2


class CopyUpload(UploadTaskGroupBuilder):
    """Copies an epoch to another directory, which is a checkpoint directory like any other then.

    Every node copies its own folder; when all have, the primary adds what belongs to the epoch as a whole and makes the
    copy visible, atomically and durably. It has the epoch's attempt, its folder has the same name as at home, and on a
    file system stock Orbax reads it, too.

    Checked is every byte of the epoch on its way, with the checksums that it was saved with, and, before the copy
    becomes visible, that it has all files in their length. What has been written is not read back: that is what
    `verify` of a manager of the destination does. Steps of stock Orbax have no checksums.

    Doing it again changes nothing if the copy is there, all files in their length; one that lacks something is made
    anew. What a killed upload left is removed by the next one: one job at a time uploads to a destination. All nodes
    must see it under the same name.

    Memory is bounded by blocks; on stores without rename, which take a file whole, by the largest file of a node (see
    `StorageOptions.part_bytes`).

    Works with `epochckpt.CheckpointManager` and, from a file system to a file system, with stock Orbax's: there the
    primary copies the step's folder.

    Args:
        destination: a path, or a URL that TensorStore knows; made if missing.
        replace: another epoch of this number that is there gives way when the copy is complete, and is removed; else it
            is an error.
        timeout_secs: how long the nodes wait for the slowest of them to copy its folder.
    """

    def __init__(self, destination: str | os.PathLike[str], *, replace: bool = False, timeout_secs: float = 3600.0):
        if isinstance(timeout_secs, bool) or not isinstance(timeout_secs, int | float) or not timeout_secs > 0:
            raise InvalidArgumentError(f"timeout_secs is a number of seconds, got {timeout_secs!r}")
        try:
            self.destination = open_store(destination).root
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"destination {destination!r}: {error}") from error
        self.replace, self.timeout_secs = bool(replace), timeout_secs

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """The task group that uploads an epoch; call it on every process.

        When it runs it raises on every process alike:

        - EpochExistsError: the destination has another epoch of this number, or something that cannot be read.
        - UploadError: the destination refused, or is out of reach of a node.
        - DamagedError: bytes differ from what was saved.
        - CoordinationTimeoutError: a node did not finish in time; names it.

        Args:
            epoch: its number; it is committed.
            checkpoint_manager: who has it.

        Raises:
            InvalidArgumentError: that is no manager that can be copied from, or the destination lies in its directory.
        """
        upload = _Upload(epoch_number(epoch), checkpoint_manager, self)
        with joining(group := TaskGroup("upload")):
            Task(upload.begin, name="begin upload")
            Task(upload.copy, name="copy the node's folder")
            Task(upload.finish, name="finish upload")
        return group


class _Upload:
    """One upload, as one process sees it. A process that hosts several nodes begins and finishes once for all."""

    def __init__(self, epoch: int, manager: Any, asked: CopyUpload):
        self._epoch, self._manager = epoch, manager
        self._destination, self._replace = asked.destination, asked.replace
        self._ours = isinstance(manager, CheckpointManager)
        if not self._ours and not all(hasattr(manager, name) for name in ("directory", "all_steps", "restore")):
            raise InvalidArgumentError(
                "CopyUpload copies epochs of an epochckpt.CheckpointManager or of stock Orbax's, got "
                f"{type(manager).__name__}"
            )
        self._coordinator = coordination.connect(False)
        processes = self._coordinator.processes
        self._nodes = tuple(manager.node_names if self._ours else (f"process_{i}" for i in range(processes)))
        self._exchange = Exchange(self._coordinator, self._nodes, asked.timeout_secs)
        self._begun = False
        self._copy: _Copy | None = None
        self._error: Exception | None = None
        self._old: EpochRecord | None = None  # on the primary: what is to give way

    def begin(self, workspace: Workspace) -> None:
        """The primary looks at the destination and makes room."""
        del workspace
        if self._begun:
            return
        self._copy, self._error = None, None
        answer = self._exchange.publish("beginning of the upload", self._prepare)
        if answer is not None:
            self._copy = _Copy(open_store(answer["destination"]), answer["staging"], answer["place"])
        self._begun = True

    def copy(self, workspace: Workspace) -> None:
        """Every node copies its folder."""
        if workspace.node in self._here():
            self._copy_nodes({workspace.node})

    def finish(self, workspace: Workspace) -> None:
        """When all have: the primary copies the rest and makes it visible."""
        del workspace
        copy, self._copy, begun, self._begun = self._copy, None, self._begun, False
        if copy is None or not begun:
            return
        self._copy = copy
        self._copy_nodes(self._here())  # of a session that knows nothing of the manager's nodes
        self._copy = None
        try:
            self._exchange.meet("upload of the nodes' folders", self._error, lambda found: None)
            self._exchange.publish("end of the upload", lambda: self._publish(copy))
        except Exception:
            if self._exchange.primary:
                worker.logged(f"{copy.target.root}: what a failed upload left", copy.give_up)
            raise

    def _here(self) -> set[str]:
        """The nodes whose folders this process copies."""
        return set(self._nodes if self._coordinator.processes == 1 else [self._nodes[self._coordinator.process]])

    def _copy_nodes(self, names: set[str]) -> None:
        if self._copy is None or self._error is not None:
            return
        try:
            with self._said():
                if self._copy.source is None:
                    self._copy.source = self._find()
                self._copy.nodes(names)
        except Exception as error:  # all processes hear of it in the next exchange
            self._error = error

    def _find(self) -> _Source:
        if self._ours:
            store, folder, reader = self._manager.source(self._epoch)
        else:
            store = open_store(str(self._manager.directory))
            folder, reader = copying.find_step(store, self._epoch), None
        if reader is not None:
            reader = EpochReader(store, folder, reader.record, Pool(_THREADS), verify=True)
        return _Source(store, folder, reader)

    # -- on the primary ------------------------------------------------------------------------------------------

    def _prepare(self) -> dict[str, Any] | None:
        """Looks whether there is something to do; then makes a place to stage it."""
        with self._said():
            self._old = None
            source, target = self._find(), open_store(self._destination)
            self._check_place(source, target)
            target.make_root()
            _sweep(target)
            if self._is_there(source, target):
                logging.info("epoch %d is in %s already", self._epoch, target.root)
                return None
            staging = source.folder
            if target.renames:
                attempt = f"{source.reader.record.attempt}-" if source.reader is not None else ""
                staging = f"{_PREFIX}{attempt}{layout.new_id()}{layout.TMP_SUFFIX}"
                target.make_folder(staging)
            elif source.reader is not None:  # what a killed upload left, or a copy that is not whole
                if self._old is None:
                    target.remove(layout.join(staging, layout.EPOCH_RECORD))
                _remove_objects(target, staging, copying.record_for(source.reader.record, target))
        return {"destination": target.root, "staging": staging, "place": source.folder}

    def _check_place(self, source: _Source, target: Store) -> None:
        home, there = source.store.root, target.root
        if source.reader is None and not (source.store.renames and target.renames):
            raise UnsupportedError(
                f"{home}/{source.folder} is a step of stock Orbax, which is copied only from one file system to "
                f"another; the destination is {there}"
            )
        if source.store.renames and target.renames:
            root = os.path.realpath(home)
            if os.path.commonpath([root, os.path.realpath(there)]) == root:
                raise InvalidArgumentError(
                    f"destination {there} lies in the checkpoint directory {home}; upload to one outside"
                )
        elif home.rstrip("/") == there.rstrip("/"):
            raise InvalidArgumentError(f"destination {there} is the checkpoint directory itself; choose another")

    def _is_there(self, source: _Source, target: Store) -> bool:
        """Whether the destination has this very epoch, whole.

        Raises:
            EpochExistsError: it has another one of this number.
        """
        folder = source.folder
        if not target.exists(folder if target.renames else layout.join(folder, layout.EPOCH_RECORD)):
            return False
        if source.reader is None:
            if copying.same_step(source.store, target, folder):
                return True
            if self._replace:
                return False
            found = "which is another step, or not whole"
        else:
            try:
                record = copying.record_in(target, folder)
                if record is not None and record.attempt == source.reader.record.attempt:
                    return self._is_whole(target, folder, record)
                if record is not None and self._replace:
                    self._old = record
                    return False
                found = "which is no epoch" if record is None else f"which is another one (attempt {record.attempt})"
            except (DamagedError, FormatError) as error:
                found = f"which cannot be read: {error}"
        raise EpochExistsError(
            f"{target.root} has {folder} already, {found}. Nothing there was changed: delete it or move it away, "
            f"upload epoch {self._epoch} to another destination, or replace epochs with CopyUpload(…, replace=True)"
        )

    def _is_whole(self, target: Store, folder: str, record: EpochRecord) -> bool:
        try:
            copying.check(target, folder, record)
        except DamagedError as error:
            logging.warning(
                "%s: the copy of epoch %d is made anew, it is not whole: %s", target.root, record.epoch, error
            )
            return False
        return True

    def _publish(self, copy: _Copy) -> None:
        with self._said():
            source = copy.source = copy.source or self._find()
            if source.reader is not None:  # an epoch that was saved by other nodes than there are now
                copy.nodes({entry.name for entry in source.reader.record.nodes} - set(self._nodes))
            copy.publish(self._old)
        logging.info("epoch %d was uploaded to %s", self._epoch, copy.target.root)

    @contextlib.contextmanager
    def _said(self) -> Generator[None]:
        """Says of what a store refuses that it is this upload."""
        try:
            yield
        except EpochCheckpointError:
            raise
        except FileNotFoundError as error:
            reason = f"{say(error)} (another upload has begun there, or not all nodes see the same folder)"
            raise UploadError(self._epoch, self._destination, reason) from error
        except OSError as error:
            raise UploadError(self._epoch, self._destination, say(error)) from error


@dataclasses.dataclass(frozen=True)
class _Source:
    """An epoch where it is: a store, the folder in it, and who reads it; nobody if stock Orbax wrote it."""

    store: Store
    folder: str
    reader: EpochReader | None


class _Copy:
    """One copy in the making.

    Args:
        target: where it goes.
        staging: the folder that it is written to.
        place: the folder that it becomes.
    """

    def __init__(self, target: Store, staging: str, place: str):
        self.target, self.staging, self.place = target, staging, place
        self.source: _Source | None = None
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
                f"{self.target.root}: an epoch that was replaced", lambda: _remove_objects(self.target, self.place, old)
            )

    def _rename(self) -> None:
        if self.target.exists(self.place):  # a copy that is not whole, or is to give way: nothing else was let through
            self.target.rename(self.place, f"{_PREFIX}replaced-{layout.new_id()}{layout.TMP_SUFFIX}")
        self.target.rename(self.staging, self.place)
        self.target.sync_folder("")
        worker.logged(f"{self.target.root}: what was replaced", lambda: _sweep(self.target))

    def give_up(self) -> None:
        """Removes what there is of it, as long as nobody can see it."""
        reader = self.source.reader if self.source is not None else None
        if self.target.renames:
            _sweep(self.target)
        elif reader is not None and not self.target.exists(layout.join(self.place, layout.EPOCH_RECORD)):
            _remove_objects(self.target, self.place, copying.record_for(reader.record, self.target))


def _sweep(target: Store) -> None:
    """Removes what killed uploads left; renamed first, so that one that is not dead after all fails."""
    if not target.renames:
        return
    for entry in target.list(""):
        if entry.is_folder and entry.name.startswith(_PREFIX) and entry.name.endswith(layout.TMP_SUFFIX):
            away = f"{_PREFIX}swept-{layout.new_id()}{layout.TMP_SUFFIX}"
            target.rename(entry.name, away)
            target.remove_tree(away)


def _remove_objects(target: Store, folder: str, record: EpochRecord) -> None:
    """Stores without rename: removes the files of one attempt, but for its record."""
    for number in range(len(record.nodes)):
        target.remove_tree(layout.join(folder, record.node_folder(number)))
