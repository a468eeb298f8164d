"""What `status`, `verify` and the metadata calls answer: plain values, read from records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from epochckpt.arrays import EpochReader, Shardings
from epochckpt.errors import DamagedError, EpochCheckpointError, kept
from epochckpt.format import ArrayItem, EpochRecord, Leaf, checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import TreeMetadata, view_files
from epochckpt.storage import Store

NO_VIEW = "the Orbax view is not there, as in a copy that left it out: stock Orbax cannot read the epoch, epochckpt can"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """One node's part of an epoch.

    Attributes:
        name: the node's name.
        nbytes: bytes of its files.
        secs: how long it wrote.
    """

    name: str
    nbytes: int
    secs: float


@dataclasses.dataclass(frozen=True)
class EpochStatus:
    """What is known of one epoch.

    Attributes:
        epoch: its number.
        state: `committed`, `saving`, `failed`, `damaged` or `absent`; `uncertain`: not there, but this process cannot
            know that it will not be (see `UncertainError`).
        detail: what it waits for, or why it failed; empty otherwise.
        nodes: the nodes that wrote it, if committed; none if stock Orbax wrote it.
        orbax_nbytes: bytes of its files, if stock Orbax wrote it.
    """

    epoch: int
    state: str
    detail: str = ""
    nodes: tuple[NodeStatus, ...] = ()
    orbax_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(n.nbytes for n in self.nodes) + self.orbax_nbytes


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """How one save ended.

    Attributes:
        epoch: its number.
        committed: whether the epoch exists now; False also where that is uncertain.
        detail: why it was not committed, or why that is uncertain; empty otherwise.
        blocked_secs: how long the training thread was blocked.
        secs: from the call of `save` to the end.
        nodes: how long each node wrote, in seconds by name, as far as this process knows: the primary knows all.
    """

    epoch: int
    committed: bool
    detail: str
    blocked_secs: float
    secs: float
    nodes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome of reading every byte of an epoch.

    Attributes:
        epoch: its number.
        nbytes: bytes that its records say it has.
        damage: one error per damaged place, each naming its file and, where there is one, its leaf.
        note: what could not be checked, if anything: epochs of stock Orbax have no checksums.
        view_damage: one error per damaged place of the Orbax view. The epoch itself is whole nevertheless; stock Orbax
            may not be able to read it until `repair_view` makes its view anew.
    """

    epoch: int
    nbytes: int
    damage: tuple[EpochCheckpointError, ...] = ()
    note: str = ""
    view_damage: tuple[EpochCheckpointError, ...] = ()

    def __post_init__(self) -> None:
        for error in (*self.damage, *self.view_damage):
            kept(error)  # without the blocks that were read

    @property
    def ok(self) -> bool:
        """Whether the epoch is as it was written, as far as that can be checked; the Orbax view apart."""
        return not self.damage

    def raise_if_damaged(self) -> None:
        """Raises the first damage, if there is any."""
        if self.damage:
            raise self.damage[0]


def committed(record: EpochRecord) -> EpochStatus:
    """The status of an epoch with a usable record."""
    nodes = tuple(NodeStatus(n.name, n.nbytes, n.secs) for n in record.nodes)
    return EpochStatus(record.epoch, "committed", "", nodes)


def verify(reader: EpochReader, progress: Callable[[int], None] = lambda nbytes: None) -> Verification:
    """Reads every byte of an epoch; `progress` is told how many, piece by piece, from any thread."""
    damage = tuple(reader.verify_all(progress))
    view = view_files.check(reader.store, reader.folder, reader.record)
    if view.absent or view.damage:
        reader.check_present("it was being verified")
    note = NO_VIEW if view.absent else ""
    return Verification(reader.record.epoch, reader.record.nbytes, damage, note, tuple(view.damage.values()))


def item_metadata(record: EpochRecord, directory: Any, of_files: Callable[[str, str], Any]) -> Any:
    """Orbax metadata of every item.

    Args:
        record: the epoch.
        directory: its folder.
        of_files: what the handler of an item, by item and handler name, says of what it wrote.

    Returns:
        A TreeMetadata per array item, whose leaves are `ocp.metadata.ArrayMetadata` and its kin, usable as a restore
        target; a Composite of them unless the epoch has one unnamed item.
    """
    out = {}
    for name, item in record.items.items():
        if item.arrays is not None:
            out[name] = _tree_metadata(item.arrays, directory / name, item.custom_metadata)
        else:
            out[name] = of_files(name, item.handler) if item.kind == "files" else None
    return out[next(iter(out))] if record.default_item and len(out) == 1 else ocp.args.Composite(**out)


def _tree_metadata(item: ArrayItem, directory: Any, custom_metadata: Any) -> Any:
    shardings = Shardings(item)
    pairs = [(leaf.path, _leaf_metadata(leaf, shardings, directory)) for leaf in item.leaves]
    return TreeMetadata(tree_lib.nest(pairs, str(directory)), custom_metadata)


def _leaf_metadata(leaf: Leaf, shardings: Shardings, directory: Any) -> Any:
    common = {"name": leaf.name, "directory": directory}
    if leaf.kind in tree_lib.EMPTY_KINDS:
        return {"dict": {}, "list": [], "tuple": ()}.get(leaf.kind)
    if leaf.kind in ("str", "bytes", "longstr", "longbytes"):
        return ocp.metadata.StringMetadata(**common)
    if leaf.dtype is None:
        return ocp.metadata.ScalarMetadata(**common, shape=(), sharding=None, dtype=_scalar_dtype(leaf.kind))
    sharding = shardings.of(leaf)
    row = None
    if isinstance(sharding, jax.sharding.NamedSharding):
        row = ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        row = ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    return ocp.metadata.ArrayMetadata(**common, shape=leaf.shape, sharding=row, dtype=leaf.dtype)


def _scalar_dtype(kind: str) -> Any:
    return {"bool": np.dtype(np.bool_), "int": np.dtype(np.int64), "float": np.dtype(np.float64)}.get(
        kind, np.dtype(np.complex128)
    )


def step_metadata(record: EpochRecord, handlers: Mapping[str, str], items: Any) -> Any:
    """Orbax's StepMetadata of an epoch, given its items' handlers and metadata."""
    return ocp.metadata.StepMetadata(
        item_handlers=dict(handlers),
        item_metadata=items,
        metrics=record.metrics or {},
        init_timestamp_nsecs=record.started_ns,
        commit_timestamp_nsecs=record.committed_ns,
        custom_metadata=dict(record.custom_metadata),
    )


def root_metadata(store: Store, given: Mapping[str, Any] | None = None) -> Any:
    """Orbax's RootMetadata of a directory: what was written there, else what is given.

    Raises:
        DamagedError: the file there cannot be used.
    """
    for path in (paths.join(*paths.ROOT_METADATA), paths.join(*paths.LEGACY_ROOT_METADATA)):
        try:
            data = json.loads(store.read(path, limit_bytes=2**24))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (ValueError, RecursionError) as error:
            raise DamagedError(path, f"is not usable JSON: {error}") from None
        known = ("internal_metadata", "custom_metadata")
        custom = (data.get("custom_metadata") or {}) if isinstance(data, dict) else None
        if not isinstance(custom, dict):
            raise DamagedError(path, "is not the metadata of a directory: expected a JSON object")
        # the older file holds nothing but what the user gave
        others = {key: value for key, value in data.items() if key not in known}
        return ocp.metadata.RootMetadata(custom_metadata=checksums.unpack_json({**others, **custom}))
    return ocp.metadata.RootMetadata(custom_metadata=dict(given or {}))
