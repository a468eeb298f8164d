"""Uploads of epochs that exist per node (see `node_epochs`): every node's copy is made, and appears, by itself."""

from __future__ import annotations

import contextlib

from absl import logging

from epochckpt import copying, layout, placing, worker
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.multi_node import MultiNodeCheckpointManager
from epochckpt.node_epochs import NodeEpochs
from epochckpt.node_reader import EpochReader
from epochckpt.single_node import CheckpointManager as OneNodeManager
from epochckpt.single_node import Manager
from epochckpt.storage import open_store
from epochckpt.store import Store
from epochckpt.tasks import Task, TaskGroup, joining
from epochckpt.upload_staging import is_there, said, stage, sweep
from epochckpt.workspace import Workspace


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
    label = f"{layout.folder_name(epochs.node)}-"
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
        target.create(layout.join(staging, layout.EPOCH_RECORD), reader.record.to_bytes())
        target.sync_folder(staging)
        with contextlib.suppress(FileExistsError):  # another node was quicker
            target.make_folder(str(epoch))
        target.sync_folder("")
        # what is there is a copy that is not whole, or is to give way: nothing else was let through
        placing.put(target, home, staging, reader.folder, replace=target.exists(reader.folder))
        target.sync_folder(str(epoch))
    finally:
        worker.logged(f"{target.root}: what is left of an upload", lambda: sweep(target, label))
    logging.info("epoch %d of node %s was uploaded to %s", epoch, epochs.node, target.root)
