"""Reads and saves the epochs of single nodes, as Caffe2's managers do; see `directory.node_directory`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.arrays import Planner, item_names, save_items
from epochckpt.arrays.restore_items import RestoreContext
from epochckpt.arrays.user_json import checked_json
from epochckpt.directory import node_directory_of
from epochckpt.directory.epoch_directory import ReplaceCondition, Staging, Writer
from epochckpt.errors import (
    EpochCheckpointError,
    as_save_error,
)
from epochckpt.format import Nodes
from epochckpt.manager import CheckpointReader, Readers
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.orbax import Handlers
from epochckpt.orbax import options as checks
from epochckpt.saving import Save, SaveRequest
from epochckpt.saving.commit_record import commit_record
from epochckpt.saving.node_writer import write_nodes
from epochckpt.storage import open_store


class NodeEpochs:
    """Reads and saves the epochs of one node, without an Orbax view; UnsupportedError if the directory is a URL.

    The directory must exist when it is used first. `lead`: see `node_directory_of`.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], node: str, options: StorageOptions | None = None, *, lead: str = ""
    ):
        self.epoch_directory = node_directory_of(open_store(prefix), node, lead)
        self._options = dataclasses.replace(options or StorageOptions(), orbax_view=False)
        self._pool = _threads.Pool(self._options.io_threads)
        self._handlers = Handlers()
        self._tries = 0
        self._writer: Writer | None = None  # from the first save, or `claim`, on

    def claim(self) -> Writer:
        """Takes this job's place in the order of jobs for the node, once."""
        if self._writer is None:
            self._writer = self.epoch_directory.claim()
        return self._writer

    @functools.cached_property
    def _nodes(self) -> Nodes:
        return Nodes(
            (self.epoch_directory.node,), ids=(jax.process_index(),)
        )  # not before it is used: starts jax's backend

    @functools.cached_property
    def _planner(self) -> Planner:
        return Planner(self._nodes, self._options, self._options.part_bytes, writers=self._pool.threads)

    def reader(self, epoch: int) -> CheckpointReader:
        """A reader of one epoch, whose record is read now; EpochNotFoundError lists the epochs of this node."""
        context = RestoreContext(self._handlers, Nodes((self.epoch_directory.node,)))  # `_nodes` starts jax's backend
        return Readers(self.epoch_directory, self._pool, self._options.verify, context).open(epoch_number(epoch))

    def save(self, epoch: int, args: Any, custom_metadata: Mapping[str, Any] | None = None) -> None:
        """Saves an epoch of this node, of arrays that this process can address; durable and committed on return.

        An epoch of this node that has the number already is replaced; at any moment one of the two is there. On a file
        system that cannot exchange two folders, such as NFS, a crash may hide both until the next job for the node
        has saved.
        Raises what `NodeDirectory.claim` raises, and SaveError (or FencedError) if the epoch was not committed.
        """
        epoch = epoch_number(epoch)
        save = self._begin(epoch, args, custom_metadata)
        writer = self.claim()
        staging = writer.staging(epoch, f"{writer.incarnation}-{save.name}")
        try:
            with self.epoch_directory.access():
                writer.stage(epoch, staging.save_id)
                report = write_nodes(
                    staging=staging,
                    nodes=self._nodes,
                    save=save,
                    options=self._options,
                    pool=self._pool,
                )
                save.reports.add(0, report)
                finish_later = self._publish(writer, save, staging)
        except BaseException as error:  # Ctrl-C, too: what is staged must not stay
            _threads.logged("the remains of a save stay", lambda: writer.discard(staging))
            if isinstance(error, EpochCheckpointError) or not isinstance(error, Exception):
                raise
            lost = isinstance(error, FileNotFoundError)
            raise (writer.lost(epoch) if lost else as_save_error(epoch, error)) from error
        finally:
            save.snapshot.drop()
        if finish_later is not None:
            _threads.logged("what was replaced stays", finish_later)
        directory = self.epoch_directory
        logging.info("%s: checkpoint %d of node %s committed", directory.store.root, epoch, directory.node)

    def _begin(self, epoch: int, args: Any, custom_metadata: Mapping[str, Any] | None) -> Save:
        """Takes the snapshot. From then on the time of the save counts."""
        wanted = save_items.to_save(args, self._handlers)
        item_names.check_names([item.name for item in wanted], (), ())
        self.claim()
        self._tries += 1
        snapshot = dataclasses.replace(self._planner.plan(wanted), primary=True).snapshot()
        request = SaveRequest(
            epoch=epoch,
            number=self._tries,
            default_item=not checks.is_multi(args),
            custom_metadata=checked_json(dict(custom_metadata or {}), "custom_metadata"),
        )
        return Save(request, snapshot, Deadline(self._options.save_timeout_secs))

    def _publish(self, writer: Writer, save: Save, staging: Staging) -> Callable[[], None] | None:
        """Commits what is staged, in place of an epoch of this number; see `Writer.publish`."""
        epoch = save.request.epoch
        replaces = None
        if self.epoch_directory.is_committed(epoch):
            replaces = ReplaceCondition(self.epoch_directory.read_save_id(epoch))
        record = commit_record(save, staging.save_id, objects=False, per_node=True)
        return writer.publish(staging, record.to_bytes(), lambda: None, replaces)
