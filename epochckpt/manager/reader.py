"""Reads one epoch: an abstract class, and its implementation for epochs of ours.

`orbax_reader` has the implementation for steps of stock Orbax; `readers` opens either. No other process is needed.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from epochckpt.arrays import EpochReader, Request, Shardings, TreeMetadata, item_names, restore_items
from epochckpt.arrays.reader import ArraySource
from epochckpt.arrays.restore import read_leaves, read_values
from epochckpt.arrays.restore_items import MISSING, RestoreContext
from epochckpt.directory import EpochDirectory, attached_metrics
from epochckpt.errors import InvalidArgumentError, UnknownNameError
from epochckpt.format import ArrayItem, DataFile, EpochRecord, ItemKind, Leaf, grid, paths
from epochckpt.format import tree as tree_lib
from epochckpt.manager.status import NO_VIEW, EpochStatus, NodeStatus, Verification
from epochckpt.orbax import linked_view, object_view, steps

PIECE_ELEMENTS = 2**22  # the most that a piece of an array has, unless the caller asks for another number
_SCALARS = {"bool": np.bool_, "int": np.int64, "float": np.float64, "complex": np.complex128}


def ignore(nbytes: int) -> None:
    """A progress callback that does nothing."""


class CheckpointReader(abc.ABC):
    """Reads one epoch, by the record that it had when the reader was made.

    Methods raise DamagedError if bytes differ from the saved ones or cannot be read, and EpochDeletedError if the epoch
    was deleted meanwhile. They raise InvalidArgumentError for an item, leaf, node or file that the epoch lacks.
    """

    def __init__(self, epoch_directory: EpochDirectory, folder: str, record: EpochRecord, context: RestoreContext):
        self.epoch_directory = epoch_directory
        self.folder = folder
        self.record = record
        self.context = context
        self.store = epoch_directory.store

    @property
    def path(self) -> epath.Path:
        """The epoch's folder."""
        return shown_path(self.store.root) / self.folder

    # -- implemented by each kind of epoch -----------------------------------------------------------------------

    @abc.abstractmethod
    def restore_item(self, name: str, args: Any) -> Any:
        """One item as `args` asks; None: as it was saved."""

    @abc.abstractmethod
    def arrays(self, item: str, node: str = "") -> ArraySource:
        """The arrays of an item, of one node where each node has its own."""

    @abc.abstractmethod
    def file(self, item: str, name: str, node: str = "") -> bytes:
        """The content of a small file that a handler wrote; verified if we wrote it."""

    @abc.abstractmethod
    def status(self) -> EpochStatus:
        """The status of the committed epoch; raises DamagedError if its files are plainly not whole."""

    @abc.abstractmethod
    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        """Reads every byte; `progress` is called with the bytes of each piece, from any thread."""

    @property
    @abc.abstractmethod
    def save_id(self) -> str | None:
        """The id of the save that has written it, the same on all hosts; None: it may have none, as of stock Orbax."""

    @abc.abstractmethod
    def copyable(self) -> EpochReader:
        """Reads its blocks and files, for a copy. UnsupportedError: steps of stock Orbax are not copied."""

    @abc.abstractmethod
    def check_present(self, detail: str) -> None:
        """Raises EpochDeletedError if the epoch is not there any more, as the save that was opened; see `detail`."""

    # -- common to both ------------------------------------------------------------------------------------------

    def item_kinds(self) -> dict[str, ItemKind]:
        """What each item is, by name."""
        return {name: item.kind for name, item in self.record.items.items()}

    def item_handlers(self) -> dict[str, str]:
        """The recorded handlers, by item."""
        return {name: item.handler for name, item in self.record.items.items() if item.handler}

    def restore(self, args: Any) -> Any:
        """The items that `args` names, or all as they were saved: a Composite, or the item if it is unnamed."""
        names = self.item_kinds()
        wanted, single = item_names.requested_items(args, names, self.record.default_item)
        found = {name: self.restore_item(item_names.stored_name(name, names), arg) for name, arg in wanted.items()}
        values = {name: value for name, value in found.items() if value is not MISSING}
        return values.get(paths.DEFAULT_ITEM) if single else ocp.args.Composite(**values)

    def restore_leaves(self, patterns: str | Sequence[str], item: str | None) -> dict[str, Any]:
        """Single leaves; see `CheckpointManager.restore_leaves`."""
        arrays = [name for name, kind in self.item_kinds().items() if kind is ItemKind.ARRAYS]
        item = item_names.chosen_arrays(self.record.epoch, arrays, item)
        return read_leaves(self.arrays(item), item, patterns)

    def value(self, item: str, leaf: str, node: str = "") -> Any:
        """A leaf, by its public or stored name, as a NumPy array or Python value; typed keys as their data."""
        return self.values(item, [leaf], node)[0]

    def values(self, item: str, leaves: Sequence[str], node: str = "") -> list[Any]:
        """Several leaves of one item, read together; see `value`."""
        found = [self._find(item, leaf, node) for leaf in leaves]
        return read_values(found[0][0], item, [number for _, number, _ in found]) if found else []

    def pieces(self, item: str, leaf: str, node: str = "", max_elements: int = PIECE_ELEMENTS) -> Iterator[np.ndarray]:
        """The elements of a whole array in C order, in one-dimensional pieces; an array without elements has none.

        The cut depends on the array's shape and on `max_elements` only. Memory holds one piece at a time; of stock
        Orbax also the chunks that the pieces along the first axis share.
        """
        if max_elements < 1:
            raise InvalidArgumentError(f"max_elements must be at least 1, got {max_elements}")
        source, number, info = self._find(item, leaf, node)
        if info.dtype is None or info.kind in ("longstr", "longbytes"):
            raise InvalidArgumentError(f"leaf {info.name!r} is no array but a value of kind {info.kind!r}")
        for box in grid.boxes(info.shape, max_elements):
            source.check_files(item, number, box)
            out = np.empty(grid.box_shape(box), info.dtype)
            source.read([Request(item, number, box, out)])
            yield out.reshape(-1)

    def _find(self, item: str, leaf: str, node: str) -> tuple[ArraySource, int, Leaf]:
        source = self.arrays(item, node)
        arrays = source.record.items[item].arrays
        assert arrays is not None, "`arrays` has looked"
        if leaf not in arrays.by_either_name:
            of = f" of node {node!r}" if node else ""
            raise UnknownNameError(f"checkpoint {self.record.epoch}: item {item!r}{of} has no leaf {leaf!r}")
        number = arrays.by_either_name[leaf]
        return source, number, arrays.leaves[number]

    def checksummed_files(self, item: str, node: str = "") -> dict[str, DataFile]:
        """The files of an item by name, of one node where each node has its own; none where there are no checksums."""
        return {}

    def metrics(self) -> Any:
        """All metrics of the epoch, as storage has them now."""
        return attached_metrics.merge(self.record.metrics, attached_metrics.of_epoch(self.epoch_directory, self.record))

    def node_path(self, node: str) -> epath.Path:
        """The folder of one node's files."""
        names = [n.name for n in self.record.nodes]
        if node not in names:
            there = ", ".join(names) or "none, as stock Orbax wrote it"
            raise InvalidArgumentError(f"checkpoint {self.record.epoch} has no node {node!r}; it has: {there}")
        return self.path / self.record.node_folder(names.index(node))

    def item_metadata(self) -> Any:
        """Orbax's metadata of every item, usable as restore targets: a TreeMetadata for an item of arrays.

        As in Orbax, metrics are an item beside named ones; nothing is known of it.
        """
        found = {name: self._item_metadata(name, kind) for name, kind in self.item_kinds().items()}
        if self.record.default_item and len(found) == 1:
            return found[next(iter(found))]
        if self._has_metrics():
            found[steps.METRICS] = None
        return ocp.args.Composite(**found)

    def _has_metrics(self) -> bool:
        """Whether the epoch was saved with metrics."""
        return self.record.metrics is not None or steps.METRICS in self.item_handlers()

    def _item_metadata(self, name: str, kind: ItemKind) -> Any:
        if kind is not ItemKind.ARRAYS:
            return self._files_metadata(name) if kind is ItemKind.FILES else None
        item = self.arrays(name).record.items[name]
        directory = self.path / name
        assert item.arrays is not None, "its kind says so"
        shardings = self._shardings(name, item.arrays)
        pairs = [
            (leaf.path, self._leaf_metadata(name, item.arrays, number, shardings, directory))
            for number, leaf in enumerate(item.arrays.leaves)
        ]
        return TreeMetadata(tree_lib.nest(pairs, str(directory)), item.custom_metadata)

    def _files_metadata(self, name: str) -> Any:
        """The metadata that the handler of an item of files gives, or None."""
        return None

    def _shardings(self, item: str, arrays: ArrayItem) -> Shardings:
        """The saved shardings of an item's arrays."""
        return Shardings(arrays)

    @abc.abstractmethod
    def _storage(self, item: str, arrays: ArrayItem, number: int) -> ocp.metadata.StorageMetadata | None:
        """The shapes in which an array of an item lies in the files, as far as they are known."""

    def _leaf_metadata(
        self, item: str, arrays: ArrayItem, number: int, shardings: Shardings, directory: epath.Path
    ) -> Any:
        """Orbax's metadata of a leaf, one of `ocp.metadata.ArrayMetadata` and its kin; an empty node as it is."""
        leaf = arrays.leaves[number]
        common = {"name": ".".join(str(key) for _, key in leaf.path), "directory": directory}
        if leaf.kind in tree_lib.EMPTY_KINDS:
            return tree_lib.empty_value(leaf.kind)
        if leaf.kind in ("str", "bytes", "longstr", "longbytes"):
            return ocp.metadata.StringMetadata(**common)
        if leaf.dtype is None:
            if leaf.kind not in _SCALARS:
                return ocp.metadata.Metadata(**common)  # of a user's type handler: no more is known
            return ocp.metadata.ScalarMetadata(**common, shape=(), sharding=None, dtype=np.dtype(_SCALARS[leaf.kind]))
        sharding = shardings.of(leaf)
        described = None
        if isinstance(sharding, jax.sharding.NamedSharding):
            described = ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
        elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
            described = ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
        storage = self._storage(item, arrays, number)
        return ocp.metadata.ArrayMetadata(
            **common, shape=leaf.shape, sharding=described, dtype=leaf.dtype, storage=storage
        )

    def step_metadata(self) -> Any:
        """Orbax's StepMetadata."""
        handlers = self.item_handlers()
        if self._has_metrics():
            handlers[steps.METRICS] = ocp.handlers.JsonCheckpointHandler.typestr()
        return ocp.metadata.StepMetadata(
            item_handlers=handlers,
            item_metadata=self.item_metadata(),
            metrics=self.metrics() or {},
            init_timestamp_nsecs=self.record.started_ns,
            commit_timestamp_nsecs=self.record.committed_ns,
            custom_metadata=dict(self.record.custom_metadata),
        )


class NativeReader(CheckpointReader):
    """Reads an epoch of ours. With `verify` every block is verified before its bytes are used.

    Attributes:
        native: reads its blocks and files.
    """

    def __init__(
        self,
        epoch_directory: EpochDirectory,
        folder: str,
        record: EpochRecord,
        context: RestoreContext,
        native: EpochReader,
    ):
        super().__init__(epoch_directory, folder, record, context)
        self.native = native
        self._sources: dict[tuple[str, str], EpochReader] = {}  # by item and node, see `of`

    def restore_item(self, name: str, args: Any) -> Any:
        return restore_items.restore_item(self.native, name, args, self.context)

    def arrays(self, item: str, node: str = "") -> EpochReader:
        source = self.of(item, node)
        record = source.record.items.get(item)
        if record is not None and record.kind is ItemKind.NODE:
            raise InvalidArgumentError(f"checkpoint {self.record.epoch}: item {item!r} differs per node: name the node")
        if record is None or record.arrays is None:
            of = f" of node {node!r}" if node else ""
            raise UnknownNameError(f"checkpoint {self.record.epoch}: item {item!r}{of} has no leaves")
        return source

    def of(self, item: str, node: str) -> EpochReader:
        if (item, node) not in self._sources:
            self._sources[item, node] = self._source(item, node)
        return self._sources[item, node]

    def _source(self, item: str, node: str) -> EpochReader:
        """See `of`."""
        known = self.record.items.get(item)
        if not node or (self.record.per_node and known is not None and known.kind is not ItemKind.NODE):
            return self.native  # of an epoch that one node saved by itself, every item is that node's
        number = next((i for i, entry in enumerate(self.record.nodes) if entry.name == node), -1)
        if number < 0 or not self.native.has(number, item):
            raise InvalidArgumentError(f"checkpoint {self.record.epoch}: node {node!r} has no item {item!r} of its own")
        return self.native.of_node(number, item)

    def checksummed_files(self, item: str, node: str = "") -> dict[str, DataFile]:
        return {file.name: file for _, file in self.of(item, node).item_files(item)}

    def file(self, item: str, name: str, node: str = "") -> bytes:
        return self.of(item, node).read_file(item, name)

    def status(self) -> EpochStatus:
        nodes = tuple(NodeStatus(n.name, n.nbytes, n.secs) for n in self.record.nodes)
        return EpochStatus(self.record.epoch, "committed", "", nodes)

    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        errors = self.native.verify_all(progress)
        if (names := self.native.local_node_names) is not None:
            note = f"only what this host has was read: the files of {names or 'no node'}"
            return Verification.of(self.record.epoch, self.native.nbytes, errors, note)
        found = (object_view if self.record.objects else linked_view).check(self.store, self.folder, self.record)
        if found is None or found:
            self.native.check_present("it was being verified")
        note = NO_VIEW if found is None else ""
        return Verification.of(self.record.epoch, self.record.nbytes, errors, note, (found or {}).values())

    @property
    def save_id(self) -> str:
        return self.record.origin

    def copyable(self) -> EpochReader:
        return self.native

    def check_present(self, detail: str) -> None:
        self.native.check_present(detail)

    def _storage(self, item: str, arrays: ArrayItem, number: int) -> ocp.metadata.StorageMetadata:
        cell = arrays.cell_shape(number)
        is_jax = arrays.leaves[number].is_jax  # Orbax records what was written of these only
        return ocp.metadata.StorageMetadata(chunk_shape=cell, write_shape=cell if is_jax else None)

    def _files_metadata(self, name: str) -> Any:
        return restore_items.files_metadata(self.native, name, self.record.items[name].handler, self.context.handlers)


def shown_path(root: str) -> epath.Path:
    """A store's root as a path. `memory://`, which etils does not know, loses a slash: it can only be shown."""
    return epath.Path(root.replace("memory://", "memory:/"))
