"""Epochs that exist per node: jobs that know nothing of each other share a directory, each for its own nodes.

| on storage | state |
| --- | --- |
| only below `node-<node>-<id>.orbax-checkpoint-tmp/` | uncommitted |
| `<epoch>/<node>/epoch.json`, with the node's files beside it | committed, for this node alone |

There is no record of the epoch as a whole, and nothing here ever touches another node's folders. POSIX only.

Guarantees:
- `save` returns when the epoch is durable and committed: staged whole, then one rename. An epoch of this node that has
  the number already is replaced by it, where nothing fails; otherwise it stays. At any moment one of them is there (on
  a file system that cannot exchange two folders, such as NFS: is there again when the next job for the node has saved).
- Two jobs for one node: the one that joined later takes over with its first save, by moving the staging folders that
  it found when it joined. From then on every rename of the older one fails: it gets FencedError. One that only reads
  takes nothing over.
- The directory itself is never created. Nothing is looked at before the first use.

The staging folder of a job that saves epochs of one node by itself, and the order of such jobs.

The folder's name carries the node, so that nobody takes it for another's. A job that joined later takes over with its
first save: it moves the folders that it found when it joined into its own. Every rename out of them fails from then on.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
from absl import logging

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.arrays import EpochReader, Planner, items
from epochckpt.arrays.items import RestoreContext
from epochckpt.arrays.snapshot import checked_json
from epochckpt.commit import Attempt, placing
from epochckpt.commit.attempt import NodeWriter, ProcessReport
from epochckpt.errors import (
    AccessError,
    EpochCheckpointError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    NotACheckpointDirectoryError,
    SaveError,
    UncertainError,
    UnsupportedError,
    as_save_error,
    say,
    unreadable,
)
from epochckpt.format import EpochRecord, Nodes, parsing, paths, records
from epochckpt.manager.reader import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.orbax import Handlers
from epochckpt.orbax import options as checks
from epochckpt.orbax.marks import STEP_RECORD
from epochckpt.storage import Store, open_store


class NodeStaging:
    """One job's place in a directory, for one node.

    Attributes:
        home: the staging folder, relative to the directory; empty before `join`.
    """

    def __init__(self, store: Store, node: str):
        self.store, self.node = store, node
        self.home, self._older = "", list[str]()

    @property
    def token(self) -> str:
        """The id in its name."""
        return self.home.removesuffix(paths.TMP_SUFFIX)[-16:]

    def join(self) -> None:
        """Takes this job's place in the order of jobs for this node; a save does it if nobody did before.

        Raises:
            NotACheckpointDirectoryError: the directory is missing.
            AccessError: it may not be written.
        """
        if self.home:
            return
        home = paths.node_staging_folder(self.node, paths.new_id())
        try:
            self.store.make_folder(home)
            # after making our own: of two that join at once, at least one sees the other
            found = [entry.name for entry in self.store.list("") if entry.name != home]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.missing() from error
        except PermissionError as error:
            raise self.no_access(error) from error
        self.home, self._older = home, [name for name in found if paths.parse_node_staging(name) == self.node]
        weakref.finalize(self, _leave, self.store, home, os.getpid())

    def take_over(self, epoch: int) -> None:
        """Fences off the jobs for this node that were there when this one joined, and removes what they left."""
        swept = []
        for name in self._older:
            away = placing.take_over(self.store, self.home, name)
            if not self.store.exists(self.home):
                raise self.lost(epoch, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.home))
            if away is not None:
                swept.append(away)
        self._older = []
        for away in swept:
            _threads.logged("what an earlier job left stays", lambda path=away: self.store.remove_tree(path))

    def missing(self) -> EpochCheckpointError:
        """The error for a directory that is not there."""
        found = "is a file" if os.path.lexists(self.store.root) else "does not exist"
        return NotACheckpointDirectoryError(
            f"{self.store.root} {found}; expected a directory, which is never created here: make or mount it"
        )

    def no_access(self, error: OSError) -> EpochCheckpointError:
        """The error for one that may not be read or written."""
        return AccessError(f"{self.store.root}: {error}; this user (uid {os.getuid()}) needs read and write access")

    def lost(self, epoch: int, error: OSError) -> EpochCheckpointError:
        """Why a place to write to is not there any more."""
        if not os.path.isdir(self.store.root):
            return self.missing()
        if self.store.exists(self.home):
            return SaveError(epoch, f"files of it have disappeared from {self.store.root} ({error})")
        return FencedError(
            epoch,
            f"a newer job for node {self.node} has taken over {self.store.root}, or somebody has removed the staging "
            f"folder of this one, {self.home}; this process can no longer save there",
        )


def _leave(store: Store, home: str, pid: int) -> None:
    """Removes a job's staging folder at its end."""
    if os.getpid() != pid:  # a fork of it ends
        return
    with suppress(OSError):
        placing.leave(store, home)


class NodeEpochs:
    """The epochs of one node in a directory that other jobs may share.

    Args:
        prefix: the directory; must exist when it is used first, and is never created.
        node: the node's name.
        options: sizes; an Orbax view is never written.
        lead: what the folders of epochs begin with, before the number; only for reading.

    Raises:
        UnsupportedError: the directory is a URL.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], node: str, options: StorageOptions | None = None, *, lead: str = ""
    ):
        self.node, self._lead = paths.check_node_name(node), lead
        self.store = open_store(prefix)
        if not self.store.renames:
            raise UnsupportedError(
                f"{self.store.root}: epochs of single nodes need a file system with an atomic rename; expected the "
                "path of a directory. On object stores use epochckpt.CheckpointManager"
            )
        self.options = options or StorageOptions()
        self._pool = _threads.Pool(self.options.io_threads)
        self._staging, self._ordinal = NodeStaging(self.store, self.node), 0

    @functools.cached_property
    def _nodes(self) -> Nodes:
        return Nodes((self.node,), ids=(jax.process_index(),))  # not before it is used: it starts jax's backend

    @functools.cached_property
    def _here(self) -> RestoreContext:
        return RestoreContext(Handlers(), self._nodes)

    @functools.cached_property
    def _planner(self) -> Planner:
        return Planner(self._nodes, self.options, self.options.part_bytes)

    # -- reading -------------------------------------------------------------------------------------------------

    def folder(self, epoch: int) -> str:
        """Where an epoch of this node lies, relative to the directory."""
        return paths.join(f"{self._lead}{epoch_number(epoch)}", paths.folder_name(self.node))

    def exists(self, epoch: int) -> bool:
        """Whether this node has committed an epoch. False where the directory is missing."""
        path = paths.join(self.folder(epoch), paths.EPOCH_RECORD)
        try:
            return self.store.exists(path)
        except PermissionError as error:
            raise self._staging.no_access(error) from error

    def epochs(self) -> list[int]:
        """The epochs that this node has committed, ascending."""
        try:
            entries = [e for e in self.store.list("") if e.is_folder and e.name.startswith(self._lead)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise self._staging.no_access(error) from error
        names = [e.name.removeprefix(self._lead) for e in entries]
        numbers = sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))
        return [n for n in numbers if self.exists(n)]

    def reader(self, epoch: int) -> EpochReader:
        """A reader of one epoch; its record, which has the items and the custom metadata, is read now.

        Raises:
            EpochNotFoundError: this node has no such epoch; lists those that it has.
            DamagedError, FormatError: its record cannot be used.
        """
        folder = self.folder(epoch)
        path = paths.join(folder, paths.EPOCH_RECORD)
        try:
            data = self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            where = f"{self.store.root}{f'/{self._lead}<epoch>' if self._lead else ''}, node {self.node}"
            raise EpochNotFoundError(epoch, where, self.epochs()) from None
        except ValueError as error:
            raise FormatError(path, str(error)) from None
        except OSError as error:
            raise unreadable(path, error) from error
        record = parsing.parse_epoch(path, data)
        if not record.per_node or (record.epoch, record.nodes[0].name) != (epoch, self.node):
            raise FormatError(
                path,
                f"is the record of epoch {record.epoch}, node {record.nodes[0].name!r}; expected epoch {epoch} of "
                f"node {self.node!r} by itself",
            )
        return EpochReader(self.store, folder, record, self._pool, self.options.verify)

    def restore(self, reader: EpochReader, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Restores chosen items; reads only their bytes, and verifies them.

        Args:
            reader: of the epoch.
            wanted: by item, what to restore it as: an argument such as `StandardRestore`, or None for as saved.
        """
        return {name: items.restore_item(reader, name, args, self._here) for name, args in wanted.items()}

    # -- saving --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Takes this job's place in the order of jobs for this node; a save does it if nobody did before.

        Raises:
            NotACheckpointDirectoryError: the directory is missing.
            AccessError: it may not be written.
        """
        self._staging.join()

    def save(self, epoch: int, args: Any, custom_metadata: Mapping[str, Any] | None = None) -> EpochRecord:
        """Saves an epoch of this node; durable and committed on return.

        Args:
            epoch: its number; an epoch of this node that has it already is replaced.
            args: what to save, as for `CheckpointManager.save`. Arrays must be addressable by this process.
            custom_metadata: JSON, kept with the epoch.

        Returns:
            What was committed.

        Raises:
            NotACheckpointDirectoryError: the directory is missing.
            AccessError: it may not be written.
            InvalidArgumentError: something in it cannot be saved, by name.
            FencedError: a newer job for this node has taken over.
            SaveError: it was not committed.
        """
        epoch = epoch_number(epoch)
        wanted = items.to_save(args, self._here.handlers)
        items.check_names([item.name for item in wanted], (), ())
        self._staging.join()
        attempt = Attempt(
            epoch,
            0,
            Deadline(self.options.save_timeout_secs),
            default_item=not checks.is_multi(args),
            custom_metadata=checked_json(dict(custom_metadata or {}), "custom_metadata"),
            snapshot=dataclasses.replace(self._planner.plan(wanted), primary=True).snapshot(),
        )
        self._ordinal += 1
        staging = paths.join(self._staging.home, f"{epoch}-{self._ordinal}")
        try:
            self._staging.take_over(epoch)
            record = self._stage(attempt, staging)
            self._publish(record, staging)
        except EpochCheckpointError:
            raise
        except FileNotFoundError as error:
            raise self._staging.lost(epoch, error) from error
        except PermissionError as error:
            raise self._staging.no_access(error) from error
        except Exception as error:
            raise as_save_error(epoch, error) from error
        finally:
            attempt.snapshot.drop()
            _threads.logged("the remains of a save stay", lambda: self.store.remove_tree(staging))
        logging.info("%s: epoch %d of node %s committed", self.store.root, epoch, self.node)
        return record

    def _stage(self, attempt: Attempt, staging: str) -> EpochRecord:
        """Writes all of an epoch, durably."""
        attempt_id = f"{self._staging.token}-{self._ordinal}"
        self.store.make_folder(staging)
        node = NodeWriter(self.store, staging, attempt, self._nodes, 0, self.options.block_bytes)
        node.write_arrays(self._pool)
        attempt.snapshot.trees = []  # their memory need not wait for handlers
        node.write_files()

        def seal(folders: list[str], data: bytes) -> None:
            for path in folders:
                self.store.sync_folder(paths.join(staging, path))
            self.store.create(paths.join(staging, paths.NODE_RECORD), data)

        attempt.reports[0] = ProcessReport(attempt.plan, (node.seal(attempt_id, seal),))
        record = attempt.record(attempt_id, objects=False, per_node=True)
        self.store.create(paths.join(staging, paths.EPOCH_RECORD), record.to_bytes())
        self.store.sync_folder(staging)
        return record

    def _publish(self, record: EpochRecord, staging: str) -> None:
        """Makes a staged epoch visible, durably."""
        parent, final = str(record.epoch), self.folder(record.epoch)
        with suppress(FileExistsError):
            self.store.make_folder(parent)
        self._check_place(record.epoch)
        self.store.sync_folder("")  # also if another node's job made it: nobody knows how far that one is
        home, replaced = self._staging.home, None
        try:
            replaced = placing.put(self.store, home, staging, final, replace=self.exists(record.epoch))
        except FileNotFoundError:
            raise
        except OSError as error:  # over a network the rename may have happened although it reports an error
            if not self._is_there(record, error):
                raise SaveError(record.epoch, f"renaming it to {self.store.root}/{final} failed: {error}") from error
        placing.settle(self.store, home, record.epoch, final, replaced)
        if replaced is not None:
            _threads.logged("what was replaced stays", lambda: self.store.remove_tree(replaced))

    def _check_place(self, epoch: int) -> None:
        """Refuses to write into somebody else's epoch, or over what is no epoch of this node."""
        parent, final = str(epoch), self.folder(epoch)
        for mark in (paths.EPOCH_RECORD, STEP_RECORD):
            if self.store.exists(paths.join(parent, mark)):
                raise SaveError(
                    epoch,
                    f"{self.store.root}/{parent} is an epoch of a CheckpointManager ({mark} lies in it); nodes that "
                    "save by themselves need a directory of their own",
                )
        if self.store.exists(final) and not self.exists(epoch):
            raise SaveError(
                epoch,
                f"{self.store.root}/{final} exists and holds no {paths.EPOCH_RECORD}: not replaced. Move it away",
            )

    def _is_there(self, record: EpochRecord, error: OSError) -> bool:
        """See `Commits.is_there`."""
        try:
            return self.reader(record.epoch).record.attempt == record.attempt
        except EpochNotFoundError:
            return False
        except (EpochCheckpointError, OSError) as problem:
            reason = f"{say(error)}; and what is there now cannot be read ({problem})"
            raise UncertainError(record.epoch, reason) from error
