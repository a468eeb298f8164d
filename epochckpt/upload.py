"""`CopyUpload`: the last epoch of a run, copied to another directory.

When is a copy visible? On a file system it is staged in `upload-<attempt>-<id>.orbax-checkpoint-tmp/` and renamed to
its name when all of it is durable; where another epoch gives way, the two are exchanged. On stores without rename the
files have the attempt in their names, and `epoch.json` is put, if absent, last. Nobody sees a copy before that, and a
killed one leaves nothing that is taken for an epoch.
"""

from __future__ import annotations

import os
from typing import Any

from absl import logging

from epochckpt import coordination, copying, layout, worker
from epochckpt.boundary import Exchange
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.manager import CheckpointManager
from epochckpt.node_reader import EpochReader
from epochckpt.reading import epoch_number
from epochckpt.records import EpochRecord
from epochckpt.runner import UploadTaskGroupBuilder
from epochckpt.single_node import Manager
from epochckpt.storage import open_store
from epochckpt.store import Store
from epochckpt.tasks import Task, TaskGroup, joining
from epochckpt.upload_nodes import node_by_node
from epochckpt.upload_staging import Copy, Source, in_the_way, is_there, remove_objects, said, stage, sweep
from epochckpt.worker import Pool
from epochckpt.workspace import Workspace

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
        answer = self._exchange.publish("beginning of the upload", self._prepare)
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
                    target.remove(layout.join(staging, layout.EPOCH_RECORD))
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
