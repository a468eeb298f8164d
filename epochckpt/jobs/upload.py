"""`CopyUpload`: the last epoch of a run, copied to another directory.

When is a copy visible? On a file system it is staged in `upload-<attempt>-<id>.orbax-checkpoint-tmp/` and renamed to
its name when all of it is durable; where another epoch gives way, the two are exchanged. On stores without rename the
files have the attempt in their names, and `epoch.json` is put, if absent, last. Nobody sees a copy before that, and a
killed one leaves nothing that is taken for an epoch.

What uploads have in common: the place where a copy is made, what is in its way, and what a failed one leaves.

Uploads of epochs that exist per node (see `node_epochs`): every node's copy is made, and appears, by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Generator
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader
from epochckpt.commit import coordination, placing
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
from epochckpt.format import EpochRecord, paths
from epochckpt.jobs.caffe2_epochs import NodeEpochs
from epochckpt.jobs.caffe2_managers import CheckpointManager as OneNodeManager
from epochckpt.jobs.caffe2_managers import Manager, MultiNodeCheckpointManager
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.job import Task, TaskGroup, joining
from epochckpt.jobs.runner import UploadTaskGroupBuilder
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import CheckpointManager, copy
from epochckpt.manager import copy as copying
from epochckpt.manager.reader import epoch_number
from epochckpt.storage import Store, open_store

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
    if not target.exists(folder if target.renames else paths.join(folder, paths.EPOCH_RECORD)):
        return False, None
    try:
        record = copy.record_in(target, folder)
    except (DamagedError, FormatError) as error:
        raise in_the_way(target, folder, epoch, f"not readable: {error}") from error
    if record is None:
        raise in_the_way(target, folder, epoch, "no epoch")
    if record.attempt != attempt:
        if not replace:
            raise in_the_way(target, folder, epoch, f"another one (attempt {record.attempt})")
        return False, record
    try:
        copy.check(target, folder, record)
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
                copy.copy_node(reader, number, self.target, self.staging)
                self._done.add(entry.name)

    def publish(self, old: EpochRecord | None) -> None:
        """Copies what belongs to no node, and makes the copy visible, in place of an old one if there is one."""
        assert self.source is not None, "it was found"
        reader = self.source.reader
        if reader is None:
            copy.copy_tree(self.source.store, self.source.folder, self.target, self.staging)
            self._rename()
            return
        record = copy.copy_view(reader, self.target, self.staging)
        try:
            copy.check(self.target, self.staging, record)
        except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
            reason = f"the copy is not whole: {error}"
            raise UploadError(record.epoch, self.target.root, reason) from error
        reader.check_present("it was being uploaded")
        path = paths.join(self.staging, paths.EPOCH_RECORD)
        if self.target.renames:
            self.target.create(path, record.to_bytes())
            self.target.sync_folder(self.staging)
            self._rename()
            return
        if old is not None:
            self.target.remove(path)
        self.target.create(path, record.to_bytes())
        if old is not None:
            _threads.logged(
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
        _threads.logged(f"{self.target.root}: what was replaced", lambda: sweep(self.target))

    def give_up(self) -> None:
        """Removes what there is of it, as long as nobody can see it."""
        reader = self.source.reader if self.source is not None else None
        if self.target.renames:
            sweep(self.target)
        elif reader is not None and not self.target.exists(paths.join(self.place, paths.EPOCH_RECORD)):
            remove_objects(self.target, self.place, copy.record_for(reader.record, self.target))


def stage(target: Store, label: str) -> str:
    """Makes room for a copy on a store with rename: a home (see `placing`); returns the copy's folder, not yet made."""
    home = f"{PREFIX}{label}{paths.new_id()}{paths.TMP_SUFFIX}"
    target.make_folder(home)
    return paths.join(home, "copy")


def sweep(target: Store, label: str = "") -> None:
    """Removes what killed uploads left; renamed first, so that one that is not dead after all fails.

    An epoch that was on its way out when its upload was killed, and that nothing replaced, goes back to its place.

    Args:
        target: the destination.
        label: only those that were staged with this label; empty: all.
    """
    if not target.renames:
        return
    ours = re.compile(f"{PREFIX}{re.escape(label)}{'[0-9a-f]{16}' if label else '.*'}{re.escape(paths.TMP_SUFFIX)}")
    for entry in target.list(""):
        if entry.is_folder and ours.fullmatch(entry.name):
            home = f"{PREFIX}{label}{paths.new_id()}{paths.TMP_SUFFIX}"
            target.rename(entry.name, home)
            placing.leave(target, home)


def remove_objects(target: Store, folder: str, record: EpochRecord) -> None:
    """Stores without rename: removes the files of one attempt, but for its record."""
    for number in range(len(record.nodes)):
        target.remove_tree(paths.join(folder, record.node_folder(number)))


def node_by_node(epoch: int, manager: Manager, destination: str, replace: bool) -> TaskGroup:
    """The task group that copies an epoch of Caffe2's managers.

    Args:
        epoch: its number.
        manager: who has it.
        destination: the other directory.
        replace: another epoch of that number gives way.

    Raises:
        UnsupportedError: the destination has no atomic rename.
    """
    target = open_store(destination)
    if not target.renames:
        raise UnsupportedError(f"{destination}: epochs of single nodes are copied only to a directory of a file system")
    if target.root == open_store(manager.db_prefix).root:
        raise InvalidArgumentError(f"destination {destination} is the checkpoint directory itself; choose another")

    def copy(workspace: Workspace) -> None:
        for node in _nodes(manager, workspace.node):
            with said(epoch, destination):
                _copy(NodeEpochs(manager.db_prefix, node), epoch, target, replace)

    with joining(group := TaskGroup("upload")):
        Task(copy, name="copy the node's folder")
    return group


def _nodes(manager: Manager, here: str) -> list[str]:
    """The names that a manager has for the node whose turn it is; none if it does not checkpoint it."""
    if isinstance(manager, MultiNodeCheckpointManager):
        return [node for node, _ in manager.node_managers if node == here]
    assert isinstance(manager, OneNodeManager), "there are two"
    return [manager.node_name] if manager.runs_on in (None, here) else []


def _copy(epochs: NodeEpochs, epoch: int, target: Store, replace: bool) -> None:
    found = epochs.reader(epoch)
    reader = EpochReader(found.store, found.folder, found.record, found.pool, verify=True)
    label = f"{paths.folder_name(epochs.node)}-"
    target.make_root()
    sweep(target, label)
    there, _ = is_there(target, reader.folder, epoch, reader.record.attempt, replace)
    if there:
        logging.info("epoch %d of node %s is in %s already", epoch, epochs.node, target.root)
        return
    staging = stage(target, label)
    home = staging.rpartition("/")[0]
    try:
        copying.copy_node(reader, 0, target, staging)
        reader.check_present("it was being uploaded")
        target.create(paths.join(staging, paths.EPOCH_RECORD), reader.record.to_bytes())
        target.sync_folder(staging)
        with contextlib.suppress(FileExistsError):  # another node was quicker
            target.make_folder(str(epoch))
        target.sync_folder("")
        # what is there is a copy that is not whole, or is to give way: nothing else was let through
        placing.put(target, home, staging, reader.folder, replace=target.exists(reader.folder))
        target.sync_folder(str(epoch))
    finally:
        _threads.logged(f"{target.root}: what is left of an upload", lambda: sweep(target, label))
    logging.info("epoch %d of node %s was uploaded to %s", epoch, epochs.node, target.root)


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

    Works with `epochckpt.CheckpointManager` and, from a file system to a file system, with stock Orbax's, where the
    primary copies the step's folder, and with those of `epochckpt.caffe2`, where each node's copy appears by itself, as
    `<epoch>/<node>`, and the destination is a `db_prefix` then.

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
        if isinstance(checkpoint_manager, Manager):
            return node_by_node(epoch_number(epoch), checkpoint_manager, self.destination, self.replace)
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
                "CopyUpload copies epochs of an epochckpt.CheckpointManager, of stock Orbax's or of a manager of "
                f"epochckpt.caffe2, got {type(manager).__name__}"
            )
        self._coordinator = coordination.connect(False)
        processes = self._coordinator.processes
        self._nodes = tuple(manager.node_names if self._ours else (f"process_{i}" for i in range(processes)))
        self._exchange = Exchange(self._coordinator, self._nodes, asked.timeout_secs)
        self._begun = False
        self._copy: Copy | None = None
        self._error: Exception | None = None
        self._old: EpochRecord | None = None  # on the primary: what is to give way

    def begin(self, workspace: Workspace) -> None:
        """The primary looks at the destination and makes room."""
        del workspace
        if self._begun:
            return
        self._copy, self._error = None, None
        answer = self._exchange.broadcast("beginning of the upload", self._prepare)
        if answer is not None:
            self._copy = Copy(open_store(answer["destination"]), answer["staging"], answer["place"])
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
            self._exchange.gather("upload of the nodes' folders", self._raise_error, lambda found: None)
            self._exchange.broadcast("end of the upload", lambda: self._publish(copy))
        except Exception:
            if self._exchange.primary:
                _threads.logged(f"{copy.target.root}: what a failed upload left", copy.give_up)
            raise

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _here(self) -> set[str]:
        """The nodes whose folders this process copies."""
        return set(self._nodes if self._coordinator.processes == 1 else [self._nodes[self._coordinator.process]])

    def _copy_nodes(self, names: set[str]) -> None:
        if self._copy is None or self._error is not None:
            return
        try:
            with said(self._epoch, self._destination):
                if self._copy.source is None:
                    self._copy.source = self._find()
                self._copy.nodes(names)
        except Exception as error:  # all processes hear of it in the next exchange
            self._error = error

    def _find(self) -> Source:
        if self._ours:
            store, folder, reader = self._manager.source(self._epoch)
        else:
            store = open_store(str(self._manager.directory))
            folder, reader = copying.find_step(store, self._epoch), None
        if reader is not None:
            reader = EpochReader(store, folder, reader.record, Pool(_THREADS), verify=True)
        return Source(store, folder, reader)

    # -- on the primary ------------------------------------------------------------------------------------------

    def _prepare(self) -> dict[str, Any] | None:
        """Looks whether there is something to do; then makes a place to stage it."""
        with said(self._epoch, self._destination):
            self._old = None
            source, target = self._find(), open_store(self._destination)
            self._check_place(source, target)
            target.make_root()
            sweep(target)
            if self._is_there(source, target):
                logging.info("epoch %d is in %s already", self._epoch, target.root)
                return None
            staging = source.folder
            if target.renames:
                attempt = f"{source.reader.record.attempt}-" if source.reader is not None else ""
                staging = stage(target, attempt)
                target.make_folder(staging)
            elif source.reader is not None:  # what a killed upload left, or a copy that is not whole
                if self._old is None:
                    target.remove(paths.join(staging, paths.EPOCH_RECORD))
                remove_objects(target, staging, copying.record_for(source.reader.record, target))
        return {"destination": target.root, "staging": staging, "place": source.folder}

    def _check_place(self, source: Source, target: Store) -> None:
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

    def _is_there(self, source: Source, target: Store) -> bool:
        """Whether the destination has this very epoch, whole; what else is to give way is in `_old`."""
        folder = source.folder
        if source.reader is not None:
            attempt = source.reader.record.attempt
            there, self._old = is_there(target, folder, self._epoch, attempt, self._replace)
            return there
        if not target.exists(folder) or copying.same_step(source.store, target, folder):
            return target.exists(folder)
        if not self._replace:
            raise in_the_way(target, folder, self._epoch, "another step, or not whole")
        return False

    def _publish(self, copy: Copy) -> None:
        with said(self._epoch, self._destination):
            source = copy.source = copy.source or self._find()
            if source.reader is not None:  # an epoch that was saved by other nodes than there are now
                copy.nodes({entry.name for entry in source.reader.record.nodes} - set(self._nodes))
            copy.publish(self._old)
        logging.info("epoch %d was uploaded to %s", self._epoch, copy.target.root)
