"""Everything that only reads: restoring, looking at records, verifying. Needs a directory, no other process."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from jax.core import Tracer

from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader, items
from epochckpt.arrays.items import Nothing, RestoreContext
from epochckpt.arrays.restore import read_leaves
from epochckpt.commit import Commits, attached_metrics, commits_of
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochNotFoundError, FormatError, InvalidArgumentError
from epochckpt.format import EpochRecord, paths
from epochckpt.manager import status
from epochckpt.manager.orbax_reader import StepReader
from epochckpt.orbax import Handlers, OrbaxRecord, StepNames
from epochckpt.storage import Store, open_store


class Reading:
    """Reads the epochs of one directory.

    Args:
        commits: the directory's epochs.
        pool: who reads.
        verify: check every block before its bytes are used.
        here: who restores; by default one process without handlers of its own.
    """

    def __init__(self, commits: Commits, pool: Pool, verify: bool, here: RestoreContext | None = None):
        self.commits, self._pool, self._verify = commits, pool, verify
        self._here = here or RestoreContext(Handlers())

    def elsewhere(self, directory: str | os.PathLike[str], names: StepNames) -> tuple[Reading, list[int]]:
        """The same for another directory, and its epochs."""
        commits = commits_of(open_store(directory), names)
        return Reading(commits, self._pool, self._verify, self._here), commits.list_epochs()

    def reader(self, epoch: int) -> EpochReader | StepReader:
        """A reader of one epoch, ours or stock Orbax's; its record is read now."""
        record = self.commits.read_record(epoch)
        store, folder = self.commits.store, self.commits.folder(epoch)
        if isinstance(record, OrbaxRecord):
            return StepReader(store, folder, record, self._here.handlers)
        return EpochReader(store, folder, record, self._pool, self._verify)

    def restore(self, epoch: int, args: Any) -> Any:
        """Restores the items that `args` names (None: all, as they were saved)."""
        reader = self.reader(epoch)
        if isinstance(reader, StepReader):
            return reader.restore(args)
        wanted, single = items.asked_for(args, reader.record.items, reader.record.default_item)
        found = {name: items.restore_item(reader, name, arg, self._here) for name, arg in wanted.items()}
        values = {name: value for name, value in found.items() if not isinstance(value, Nothing)}
        return values.get(paths.DEFAULT_ITEM) if single else ocp.args.Composite(**values)

    def leaves(self, epoch: int, patterns: str | Sequence[str], item: str | None) -> dict[str, Any]:
        """Single leaves; see `CheckpointManager.restore_leaves`."""
        reader = self.reader(epoch)
        if isinstance(reader, StepReader):
            return reader.leaves(patterns, item)
        arrays = [name for name, r in reader.record.items.items() if r.arrays is not None]
        item = items.chosen_arrays(epoch, arrays, item)
        return read_leaves(reader, item, patterns)

    def verify(self, epoch: int, progress: Callable[[int], None] = lambda nbytes: None) -> status.Verification:
        """Reads every byte; `progress` is told how many, piece by piece, of epochs that are not stock Orbax's."""
        try:
            reader = self.reader(epoch)
            return reader.verify() if isinstance(reader, StepReader) else status.verify(reader, progress)
        except EpochNotFoundError:
            raise
        except EpochCheckpointError as error:
            return status.Verification(epoch, 0, (error,))

    def status(self, epoch: int) -> status.EpochStatus:
        """Committed, damaged or absent.

        Raises:
            AccessError, StorageError: it cannot be told.
        """
        try:
            reader = self.reader(epoch)
            return reader.status() if isinstance(reader, StepReader) else status.committed(reader.record)
        except EpochNotFoundError:
            return status.EpochStatus(epoch, "absent")
        except (DamagedError, FormatError) as error:
            return status.EpochStatus(epoch, "damaged", str(error))

    def node_path(self, node: str, epoch: int) -> epath.Path:
        """The folder of one node's files."""
        record = self.commits.read_record(epoch)
        if isinstance(record, OrbaxRecord):
            raise InvalidArgumentError(f"epoch {epoch} was written by stock Orbax: it has no folders of nodes")
        names = [n.name for n in record.nodes]
        if node not in names:
            raise InvalidArgumentError(f"epoch {epoch} has no node {node!r}; it has: {', '.join(names)}")
        return self.path(record) / record.node_folder(names.index(node))

    def metrics(self, epoch: int) -> Any:
        """All metrics of an epoch, as storage has them now."""
        record = self.commits.read_record(epoch)
        return attached_metrics.merge(record.metrics, attached_metrics.of_epoch(self.commits, record))

    def item_kinds(self, epoch: int) -> dict[str, str]:
        """Kind of every item, by name."""
        reader = self.reader(epoch)
        if isinstance(reader, StepReader):
            return reader.item_kinds()
        return {name: item.kind for name, item in reader.record.items.items()}

    def item_metadata(self, epoch: int) -> Any:
        """See `CheckpointManager.item_metadata`."""
        reader = self.reader(epoch)
        if isinstance(reader, StepReader):
            return reader.item_metadata()
        known = self._here.handlers
        return status.item_metadata(
            reader.record,
            self.path(reader.record),
            lambda name, recorded: items.files_metadata(reader, name, recorded, known),
        )

    def step_metadata(self, epoch: int) -> Any:
        """See `CheckpointManager.metadata`."""
        reader = self.reader(epoch)
        if isinstance(reader, StepReader):
            return reader.step_metadata()
        handlers = {name: item.handler for name, item in reader.record.items.items() if item.handler}
        found = attached_metrics.merge(reader.record.metrics, attached_metrics.of_epoch(self.commits, reader.record))
        record = dataclasses.replace(reader.record, metrics=found)
        return status.step_metadata(record, handlers, self.item_metadata(epoch))

    def path(self, record: EpochRecord) -> epath.Path:
        """The folder of an epoch."""
        return shown_path(self.commits.store.root) / self.commits.folder(record.epoch)


def shown_path(root: str) -> epath.Path:
    """A store's root as a path; URLs that etils does not know lose a slash, and are for showing only."""
    scheme, found, rest = root.partition("://")
    if not found or scheme in ("gs", "s3"):
        return epath.Path(root)
    return epath.Path(f"/{rest.lstrip('/')}" if scheme == "file" else f"{scheme}:/{rest}")


class Browsable:
    """The members of a manager that only read."""

    _reading: Reading
    _given_metadata: Mapping[str, Any] | None = None

    def metrics(self, step: int) -> Any:
        """The metrics that an epoch was saved with and those attached to it (`attach_metrics`), or None."""
        return self._reading.metrics(epoch_number(step))

    def save_id(self, epoch: int) -> str:
        """The id of the attempt that an epoch was committed by: another one once it was replaced, or saved anew.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        return self._reading.commits.read_head(epoch_number(epoch)).attempt

    def item_metadata(self, step: int) -> Any:
        """Shapes, dtypes and shardings of an epoch's items, as Orbax's metadata classes.

        Reads one small file, and the files of items whose handlers, not ours, can say something about them.
        """
        return self._reading.item_metadata(epoch_number(step))

    def item_kinds(self, epoch: int) -> dict[str, str]:
        """What kind of thing each item of an epoch is, by item name.

        `arrays`: a pytree of arrays and values; `files`: what a handler wrote; `node`: a pytree of each node's own
        (`NodeSave`). Items of stock Orbax are `arrays` or `files`, as far as their files say.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        return self._reading.item_kinds(epoch_number(epoch))

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's StepMetadata of an epoch, or the directory's RootMetadata: as written there, else `metadata=`."""
        if step is not None:
            return self._reading.step_metadata(epoch_number(step))
        return status.root_metadata(self._reading.commits.store, self._given_metadata)

    def nodes(self, epoch: int) -> list[str]:
        """Names of the nodes that wrote an epoch; none if stock Orbax wrote it."""
        return [n.name for n in self._reading.commits.read_record(epoch_number(epoch)).nodes]

    def node_path(self, node: str, epoch: int) -> epath.Path:
        """The folder of one node's files of a committed epoch.

        Raises:
            InvalidArgumentError: the epoch has no such node; lists those it has.
        """
        return self._reading.node_path(node, epoch_number(epoch))

    def verify(self, epoch: int) -> status.Verification:
        """Reads every byte of a committed epoch, of all nodes, and compares it with what was written.

        Damage of the Orbax view, by which stock Orbax reads the epoch, is told apart: see `view_damage`, and
        `epochckpt.repair_view`.

        Stock Orbax keeps no checksums: of its epochs it says whether they are whole and can be read; see `note`.
        """
        return self._reading.verify(epoch_number(epoch))

    def source(self, epoch: int) -> tuple[Store, str, EpochReader | None]:
        """Where an epoch lies, for who copies it: store, folder in it, and a reader unless stock Orbax wrote it.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        commits, reader = self._reading.commits, self._reading.reader(epoch_number(epoch))
        return commits.store, commits.folder(epoch), None if isinstance(reader, StepReader) else reader

    def restore_leaves(self, epoch: int, patterns: str | Sequence[str], item: str | None = None) -> dict[str, Any]:
        """Single leaves of an epoch, as NumPy arrays and Python values; reads only their blocks.

        Args:
            epoch: its number.
            patterns: shell patterns of leaf names, for example `params/*/kernel`.
            item: the item's name; may be left out if the epoch has one item.

        Returns:
            Values by leaf name.

        Raises:
            EpochNotFoundError: there is no such epoch.
            UnknownNameError: one of the patterns matches no leaf; names those that are near.
        """
        return self._reading.leaves(epoch_number(epoch), patterns, item)


def epoch_number(step: Any) -> int:
    """An epoch's number; InvalidArgumentError for what cannot be one."""
    if isinstance(step, Tracer):
        raise InvalidArgumentError(
            "the epoch (step) is a tracer: this was called inside a function that jax transforms (jit, grad, vmap, "
            "scan, …), where there are no values yet. Save, and restore, outside of it"
        )
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise InvalidArgumentError(f"an epoch (step) is an integer of at least 0, got {step!r}")
    return number
