"""Reads one epoch, of ours or of stock Orbax: an abstract class, and its implementation for epochs of ours.

Steps of stock Orbax have the other one, in `orbax_reader`; `readers` opens either. Reading needs a directory, and no
other process.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.core import Tracer

from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader, Request, Shardings, items
from epochckpt.arrays.items import Nothing, RestoreContext
from epochckpt.arrays.restore import ArraySource, read_leaves, read_values
from epochckpt.commit import Commits, attached_metrics
from epochckpt.errors import InvalidArgumentError, UnknownNameError
from epochckpt.format import EpochRecord, Leaf, grid, paths
from epochckpt.format import tree as tree_lib
from epochckpt.manager.status import NO_VIEW, EpochStatus, NodeStatus, Verification
from epochckpt.orbax import TreeMetadata, view_files

PIECE_ELEMENTS = 2**22
"""How many elements a piece of an array has at most, unless the caller asks for fewer."""


def ignore(nbytes: int) -> None:
    """A progress callback that does nothing."""


class CheckpointReader(abc.ABC):
    """Reads one epoch. Its record was read when the reader was made, and stays the one that is read.

    A reader that meets a deletion raises `EpochDeletedError`, and does not call it damage.

    Attributes:
        commits: the directory's epochs.
        folder: the epoch's folder in the directory.
        record: its record.
        context: handlers and nodes of the process that restores.
        native: reads blocks and files of an epoch of ours; None for a step of stock Orbax.
    """

    native: EpochReader | None = None

    def __init__(self, commits: Commits, folder: str, record: EpochRecord, context: RestoreContext):
        self.commits, self.folder, self.record, self.context = commits, folder, record, context
        self.store = commits.store

    @property
    def path(self) -> epath.Path:
        """The epoch's folder."""
        return shown_path(self.store.root) / self.folder

    # -- what each implementation knows --------------------------------------------------------------------------

    @abc.abstractmethod
    def item_kinds(self) -> dict[str, str]:
        """What each item is, by name: `arrays`, `files` or `node`."""

    @abc.abstractmethod
    def item_handlers(self) -> dict[str, str]:
        """The handler that is recorded for an item, by name, where there is one."""

    @abc.abstractmethod
    def restore_item(self, name: str, args: Any) -> Any:
        """One item as its argument asks; None: as it was saved."""

    @abc.abstractmethod
    def arrays(self, item: str, node: str = "") -> ArraySource:
        """The arrays of an item, of one node where each node has its own.

        Raises:
            InvalidArgumentError: there is no such item, or it has no arrays.
            DamagedError: its metadata cannot be used.
        """

    @abc.abstractmethod
    def file(self, item: str, name: str, node: str = "") -> bytes:
        """The content of a small file that a handler wrote; verified if we wrote it.

        Raises:
            InvalidArgumentError: there is no such file.
            DamagedError: its bytes differ from what was written, or cannot be read.
        """

    @abc.abstractmethod
    def status(self) -> EpochStatus:
        """The status of the epoch, which is committed; raises DamagedError if it is plainly not whole."""

    @abc.abstractmethod
    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        """Reads every byte; `progress` is called with the bytes of each piece, from any thread."""

    @abc.abstractmethod
    def _shardings(self, source: ArraySource, item: str) -> Shardings:
        """How the arrays of an item lay on devices."""

    @abc.abstractmethod
    def _files_metadata(self, name: str) -> Any:
        """What the handler of an item of files says of it, or None."""

    # -- what follows from that ----------------------------------------------------------------------------------

    def restore(self, args: Any) -> Any:
        """The items that `args` names, or all as they were saved: a Composite, or the item if it is unnamed.

        Raises:
            MismatchError: the target does not fit; lists every leaf that does not.
            DamagedError: bytes differ from what was written, or cannot be read.
        """
        wanted, single = items.asked_for(args, self.item_kinds(), self.record.default_item)
        found = {name: self.restore_item(name, arg) for name, arg in wanted.items()}
        values = {name: value for name, value in found.items() if not isinstance(value, Nothing)}
        return values.get(paths.DEFAULT_ITEM) if single else ocp.args.Composite(**values)

    def restore_leaves(self, patterns: str | Sequence[str], item: str | None) -> dict[str, Any]:
        """Single leaves; see `CheckpointManager.restore_leaves`."""
        arrays = [name for name, kind in self.item_kinds().items() if kind == "arrays"]
        item = items.chosen_arrays(self.record.epoch, arrays, item)
        return read_leaves(self.arrays(item), item, patterns)

    def value(self, item: str, leaf: str, node: str = "") -> Any:
        """A leaf as a NumPy array or Python value; typed keys as their data.

        Args:
            item: the item.
            leaf: the leaf's name, public or as it is stored.
            node: whose, for an item of each node's own; empty otherwise.

        Raises:
            InvalidArgumentError: there is no such leaf.
            DamagedError: its bytes differ from what was written, or cannot be read.
        """
        source, number, _ = self._find(item, leaf, node)
        return read_values(source, item, [number])[0]

    def pieces(self, item: str, leaf: str, node: str = "", max_elements: int = PIECE_ELEMENTS) -> Iterator[np.ndarray]:
        """A whole array in consecutive runs of its elements, C order; each is one-dimensional.

        The cut depends on the array's shape and on `max_elements` only. Of an array without elements there are none.
        Memory: a few pieces; of stock Orbax also the chunks that the pieces along the first axis share.

        Args:
            item: the item.
            leaf: the leaf's name, public or as it is stored.
            node: whose, for an item of each node's own; empty otherwise.
            max_elements: of a piece.

        Raises:
            InvalidArgumentError: there is no such leaf, or it is no array.
            DamagedError: its bytes differ from what was written, or cannot be read.
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
            raise UnknownNameError(f"epoch {self.record.epoch}: item {item!r}{of} has no leaf {leaf!r}")
        number = arrays.by_either_name[leaf]
        return source, number, arrays.leaves[number]

    def native_of(self, item: str, node: str = "") -> EpochReader | None:
        """What reads the blocks of an item of an epoch of ours, of one node where each node has its own; else None."""
        return None

    def metrics(self) -> Any:
        """All metrics of the epoch, as storage has them now."""
        return attached_metrics.merge(self.record.metrics, attached_metrics.of_epoch(self.commits, self.record))

    def node_path(self, node: str) -> epath.Path:
        """The folder of one node's files."""
        names = [n.name for n in self.record.nodes]
        if not names:
            raise InvalidArgumentError(
                f"epoch {self.record.epoch} was written by stock Orbax: it has no folders of nodes"
            )
        if node not in names:
            raise InvalidArgumentError(f"epoch {self.record.epoch} has no node {node!r}; it has: {', '.join(names)}")
        return self.path / self.record.node_folder(names.index(node))

    def item_metadata(self) -> Any:
        """Orbax's metadata of every item, usable as restore targets: a TreeMetadata for an item of arrays."""
        found = {name: self._item_metadata(name, kind) for name, kind in self.item_kinds().items()}
        return found[next(iter(found))] if self.record.default_item and len(found) == 1 else ocp.args.Composite(**found)

    def _item_metadata(self, name: str, kind: str) -> Any:
        if kind != "arrays":
            return self._files_metadata(name) if kind == "files" else None
        source, directory = self.arrays(name), self.path / name
        item, shardings = source.record.items[name], self._shardings(source, name)
        assert item.arrays is not None, "its kind says so"
        pairs = [(leaf.path, self._leaf_metadata(name, leaf, shardings, directory)) for leaf in item.arrays.leaves]
        return TreeMetadata(tree_lib.nest(pairs, str(directory)), item.custom_metadata)

    def _leaf_metadata(self, item: str, leaf: Leaf, shardings: Shardings, directory: Any) -> Any:
        return _leaf_metadata(leaf, shardings, directory)

    def step_metadata(self) -> Any:
        """Orbax's StepMetadata."""
        return ocp.metadata.StepMetadata(
            item_handlers=self.item_handlers(),
            item_metadata=self.item_metadata(),
            metrics=self.metrics() or {},
            init_timestamp_nsecs=self.record.started_ns,
            commit_timestamp_nsecs=self.record.committed_ns,
            custom_metadata=dict(self.record.custom_metadata),
        )


class NativeReader(CheckpointReader):
    """Reads an epoch of ours; every block is verified before its bytes are used.

    Args:
        commits: see CheckpointReader, as the next three.
        folder: the epoch's.
        record: the epoch's.
        context: handlers and nodes of the process that restores.
        pool: reads.
        verify: False: blocks are not verified, but by `verify`.
    """

    native: EpochReader

    def __init__(
        self,
        commits: Commits,
        folder: str,
        record: EpochRecord,
        context: RestoreContext,
        pool: Pool,
        verify: bool = True,
    ):
        super().__init__(commits, folder, record, context)
        self.native = EpochReader(commits.store, folder, record, pool, verify)
        self.of = functools.cache(self._of)

    def item_kinds(self) -> dict[str, str]:
        """See CheckpointReader."""
        return {name: item.kind for name, item in self.record.items.items()}

    def item_handlers(self) -> dict[str, str]:
        """See CheckpointReader."""
        return {name: item.handler for name, item in self.record.items.items() if item.handler}

    def restore_item(self, name: str, args: Any) -> Any:
        """See CheckpointReader."""
        return items.restore_item(self.native, name, args, self.context)

    def arrays(self, item: str, node: str = "") -> EpochReader:
        """See CheckpointReader."""
        source = self.of(item, node)
        record = source.record.items.get(item)
        if record is not None and record.kind == "node":
            raise InvalidArgumentError(f"epoch {self.record.epoch}: item {item!r} is of each node's: name the node")
        if record is None or record.arrays is None:
            of = f" of node {node!r}" if node else ""
            raise UnknownNameError(f"epoch {self.record.epoch}: item {item!r}{of} has no leaves")
        return source

    def _of(self, item: str, node: str) -> EpochReader:
        """What reads an item; of each node's own, that node's."""
        if not node:
            return self.native
        number = next((i for i, entry in enumerate(self.record.nodes) if entry.name == node), -1)
        known = self.record.items.get(item)
        if self.record.per_node and known is not None and known.kind != "node":
            return self.native  # all of the epoch is the node's
        if number < 0 or not self.native.has(number, item):
            raise InvalidArgumentError(f"epoch {self.record.epoch}: node {node!r} has no item {item!r} of its own")
        return self.native.of_node(number, item)

    def native_of(self, item: str, node: str = "") -> EpochReader:
        """See CheckpointReader."""
        return self.of(item, node)

    def file(self, item: str, name: str, node: str = "") -> bytes:
        """See CheckpointReader."""
        return self.of(item, node).read_file(item, name)

    def status(self) -> EpochStatus:
        """See CheckpointReader."""
        nodes = tuple(NodeStatus(n.name, n.nbytes, n.secs) for n in self.record.nodes)
        return EpochStatus(self.record.epoch, "committed", "", nodes)

    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        """See CheckpointReader."""
        damage = tuple(self.native.verify_all(progress))
        view = view_files.check(self.store, self.folder, self.record)
        if view.absent or view.damage:
            self.native.check_present("it was being verified")
        note = NO_VIEW if view.absent else ""
        return Verification(self.record.epoch, self.record.nbytes, damage, note, tuple(view.damage.values()))

    def _shardings(self, source: ArraySource, item: str) -> Shardings:
        arrays = source.record.items[item].arrays
        assert arrays is not None, "callers choose array items"
        return Shardings(arrays)

    def _files_metadata(self, name: str) -> Any:
        return items.files_metadata(self.native, name, self.record.items[name].handler, self.context.handlers)


_SCALARS = {"bool": np.bool_, "int": np.int64, "float": np.float64, "complex": np.complex128}


def _leaf_metadata(leaf: Leaf, shardings: Shardings, directory: Any) -> Any:
    """Orbax's metadata of a leaf, one of `ocp.metadata.ArrayMetadata` and its kin; an empty node as it is."""
    common = {"name": leaf.name, "directory": directory}
    if leaf.kind in tree_lib.EMPTY_KINDS:
        return tree_lib.empty_value(leaf.kind)
    if leaf.kind in ("str", "bytes", "longstr", "longbytes"):
        return ocp.metadata.StringMetadata(**common)
    if leaf.dtype is None:
        if leaf.kind not in _SCALARS:
            return ocp.metadata.Metadata(**common)  # of a user's type handler: no more is known
        return ocp.metadata.ScalarMetadata(**common, shape=(), sharding=None, dtype=np.dtype(_SCALARS[leaf.kind]))
    sharding, described = shardings.of(leaf), None
    if isinstance(sharding, jax.sharding.NamedSharding):
        described = ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        described = ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    return ocp.metadata.ArrayMetadata(**common, shape=leaf.shape, sharding=described, dtype=leaf.dtype)


def shown_path(root: str) -> epath.Path:
    """A store's root as a path; URLs that etils does not know lose a slash, and are for showing only."""
    scheme, found, rest = root.partition("://")
    if not found or scheme in ("gs", "s3"):
        return epath.Path(root)
    return epath.Path(f"/{rest.lstrip('/')}" if scheme == "file" else f"{scheme}:/{rest}")


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
