"""The two records of the format, `epoch.json` and `node.json`: what they hold, and how they are written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from epochckpt.format import checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import ArrayItem

MAX_RECORD_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One file of a node, as recorded in `node.json` (and, without checksums, in `epoch.json`).

    Attributes:
        item: the item it belongs to.
        part: number of the part, for data files; 0 otherwise.
        size: bytes.
        data_start: where the tensors begin; 0 for files that are not data files.
        cells: how many cells it holds.
        block_bytes: unit of the checksums.
        xxh3: one checksum per block as 16 hex digits; empty in `epoch.json`.
        name: path inside the item's folder, for what a handler wrote; empty for data files.
    """

    item: str
    part: int
    size: int
    data_start: int = 0
    cells: int = 0
    block_bytes: int = 0
    xxh3: tuple[str, ...] = ()
    name: str = ""

    @property
    def path(self) -> str:
        """Path relative to the node's folder."""
        return paths.join(self.item, self.name) if self.name else paths.data_file(self.item, self.part)

    def row(self) -> list[Any]:
        """Its form in `epoch.json`."""
        row: list[Any] = [self.item, self.part, self.size, self.data_start, self.cells]
        return [*row, self.name] if self.name else row

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> DataFile:
        """The inverse of `row`."""
        return cls(*row[:5], name=row[5] if len(row) == 6 else "")


@dataclasses.dataclass(frozen=True)
class NodeRecord:
    """`node.json`: what one node wrote for one attempt.

    Attributes:
        items: the trees of items that differ per node, by item name.
    """

    epoch: int
    attempt: str
    node: str
    process: int
    processes: int
    plan: str
    files: tuple[DataFile, ...]
    timings: Mapping[str, float]
    items: Mapping[str, ItemRecord] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return checksums.seal(
            {
                "format": paths.FORMAT,
                "version": paths.VERSION,
                "record": "node",
                "epoch": self.epoch,
                "attempt": self.attempt,
                "node": self.node,
                "process": self.process,
                "processes": self.processes,
                "plan": self.plan,
                "files": [dataclasses.asdict(f) for f in self.files],
                "timings": dict(self.timings),
                "items": {name: _item_json(item) for name, item in self.items.items()},
            }
        )


@dataclasses.dataclass(frozen=True)
class NodeEntry:
    """What `epoch.json` says of one node.

    Attributes:
        name: the node's name.
        process: JAX process index that wrote it.
        record_size: bytes of its `node.json`.
        record_digest: xxh3-128 of its `node.json`.
        files: its files, without checksums.
        secs: how long it wrote.
    """

    name: str
    process: int
    record_size: int
    record_digest: str
    files: tuple[DataFile, ...]
    secs: float = 0.0

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return paths.folder_name(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(f.size for f in self.files)


@dataclasses.dataclass(frozen=True)
class ItemRecord:
    """One item of an epoch.

    Attributes:
        kind: `arrays` (a pytree in data files), `files` (what a handler wrote), or `node` (a pytree of each node's own,
            described in its `node.json`).
        handler: the Orbax handler that stands for it, by the name that Orbax records.
        arrays: the tree and its grids, for `arrays`.
        values: JSON forms of Python leaves by leaf number, for `arrays`.
        custom_metadata: what the caller attached to the item, for `arrays`.
        same: for `node`: every node of the epoch has it, and all have the same.
    """

    kind: str
    handler: str = ""
    arrays: ArrayItem | None = None
    values: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    custom_metadata: Any = None
    same: bool = False


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """`epoch.json`: the commit record. Its presence under the epoch's final name makes the epoch exist.

    Attributes:
        orbax_unsupported: what the Orbax view lacks: reasons by leaf name, by item; None where none was asked for. The
            item `*` stands for the whole view: none could be made.
        alone: the epoch of one node by itself: its files lie beside the record, see `node_epochs`.
        orbax_view: length and xxh3-128 of the Orbax view's files, by path in the epoch's folder; None where there is no
            view. Its links are not listed: they follow from the rest.
    """

    epoch: int
    attempt: str
    objects: bool
    plan: str
    nodes: tuple[NodeEntry, ...]
    items: Mapping[str, ItemRecord]
    default_item: bool
    metrics: Any
    custom_metadata: Mapping[str, Any]
    started_ns: int
    committed_ns: int
    timings: Mapping[str, float]
    orbax_unsupported: Mapping[str, Mapping[str, str]] | None = None
    per_node: bool = False
    orbax_view: Mapping[str, tuple[int, str]] | None = None

    # of a step of stock Orbax these are fields: see `OrbaxRecord`
    stock: ClassVar[bool] = False
    sure: ClassVar[bool] = True
    unread: ClassVar[Mapping[str, Exception]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all nodes' files."""
        return sum(n.nbytes for n in self.nodes)

    def node_folder(self, node: int) -> str:
        """Folder of a node's files, relative to the epoch's folder (object stores: named by attempt)."""
        if self.per_node:
            return ""
        folder = self.nodes[node].folder
        return paths.join(folder, self.attempt) if self.objects else folder

    def to_bytes(self) -> bytes:
        """The file's content."""
        return checksums.seal(
            {
                "format": paths.FORMAT,
                "version": paths.VERSION,
                "record": "epoch",
                "epoch": self.epoch,
                "attempt": self.attempt,
                "objects": self.objects,
                "plan": self.plan,
                "nodes": [
                    [
                        n.name,
                        n.process,
                        n.record_size,
                        n.record_digest,
                        round(n.secs, 6),
                        [f.row() for f in n.files],
                    ]
                    for n in self.nodes
                ],
                "items": {name: _item_json(item) for name, item in self.items.items()},
                "default_item": self.default_item,
                "metrics": checksums.pack_json(self.metrics, "metrics"),
                "custom_metadata": checksums.pack_json(dict(self.custom_metadata), "custom_metadata"),
                "started_ns": self.started_ns,
                "committed_ns": self.committed_ns,
                "timings": dict(self.timings),
                "orbax_unsupported": self.orbax_unsupported,
                "orbax_view": None if self.orbax_view is None else {p: list(f) for p, f in self.orbax_view.items()},
                **({"per_node": True} if self.per_node else {}),
            }
        )


def array_item_json(item: ArrayItem) -> dict[str, Any]:
    """The recorded form of an array item; its digest is what nodes compare."""
    rows: list[Any] = []
    for leaf in item.leaves:
        row: list[Any] = [tree_lib.path_to_json(leaf.path), leaf.kind]
        if leaf.dtype is not None:
            name = tree_lib.dtype_name(leaf.dtype, leaf.name)
            row += [name, list(leaf.shape), leaf.grid, leaf.rotation, leaf.sharding]
            row += [leaf.impl] if leaf.impl is not None else []
        rows.append(row)
    grids = [[list(g.counts), [list(h) for h in g.holders]] for g in item.grids]
    return {"leaves": rows, "grids": grids, "shardings": list(item.shardings), "meshes": list(item.meshes)}


def tree_digest(item: ItemRecord, files: Sequence[DataFile]) -> str:
    """Digest of one node's own tree; equal on two nodes if and only if what they wrote is, to the last bit.

    What says where arrays lay is left out: devices have other numbers on every process. (Equal arrays that lay in
    pieces on several devices of a process, and were cut otherwise on another one, count as different.)

    Args:
        item: the tree, as its node records it.
        files: the data files that the node wrote for it.
    """
    assert item.arrays is not None, "a node's own items are trees"
    described = array_item_json(item.arrays)
    leaves = [row[:6] + row[7:] for row in described["leaves"]]
    blocks = [[f.part, f.size, f.data_start, f.block_bytes, list(f.xxh3)] for f in files]
    values = {str(k): v for k, v in sorted(item.values.items())}
    what = {"leaves": leaves, "grids": described["grids"], "values": values, "files": blocks}
    return checksums.digest(json.dumps(what, separators=(",", ":")).encode())


def _item_json(item: ItemRecord) -> dict[str, Any]:
    head: dict[str, Any] = {"kind": item.kind, "handler": item.handler}
    if item.arrays is None:
        return {**head, "same": item.same} if item.kind == "node" else head
    return {
        **head,
        **array_item_json(item.arrays),
        "values": {str(k): v for k, v in item.values.items()},
        "custom_metadata": checksums.pack_json(item.custom_metadata, "custom_metadata"),
    }
