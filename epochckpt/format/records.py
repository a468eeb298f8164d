"""The two records of the format, `epoch.json` and `node.json`: their fields, and how they are written.

`parsing` reads them back. The order of the fields in the classes is their order in the files.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from epochckpt.format import checksums, paths
from epochckpt.format.grid import ArrayItem

MAX_RECORD_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One file of a node, as recorded in `node.json` and, without checksums, in `epoch.json`."""

    item: str
    part: int  # number of the part of a data file, else 0
    size: int
    data_start: int = 0  # offset of the tensors in a data file
    cells: int = 0  # in a data file
    block_bytes: int = 0  # size of the blocks that have a checksum each
    xxh3: tuple[str, ...] = ()  # one checksum per block as 16 hex digits; empty in `epoch.json`
    name: str = ""  # path inside the item's folder, for files that a handler wrote; empty for data files

    @property
    def path(self) -> str:
        """Path relative to the node's folder; `EpochRecord.path` has the one relative to the epoch's."""
        return paths.join(self.item, self.name) if self.name else paths.data_file(self.item, self.part)

    def row(self) -> list[Any]:
        """Its form in `epoch.json`."""
        row: list[Any] = [self.item, self.part, self.size, self.data_start, self.cells]
        return [*row, self.name] if self.name else row

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> DataFile:
        """The inverse of `row`."""
        return cls(*row[:5], name=row[5] if len(row) == 6 else "")


class AlsoFile(DataFile):
    """A data file with cells that another node owns, see `NodeRecord.also`."""

    @property
    def path(self) -> str:
        return paths.join(paths.ALSO_FOLDER, super().path)


@dataclasses.dataclass(frozen=True)
class NodeRecord:
    """`node.json`: what one node wrote for one attempt."""

    epoch: int
    attempt: str
    node: str
    process: int
    processes: int
    plan: str  # digest of the plan; equal on all nodes
    files: tuple[DataFile, ...]
    timings: Mapping[str, float]  # seconds by name
    items: Mapping[str, ItemRecord] = dataclasses.field(default_factory=dict)  # the node's own, by name
    # Data files of cells that this node holds and another one owns, on a disk that only this host sees. No copy of the
    # epoch has them.
    also: tuple[AlsoFile, ...] = ()

    def to_bytes(self) -> bytes:
        """The file's content."""
        fields: dict[str, Any] = {
            **vars(self),
            "files": [dataclasses.asdict(f) for f in self.files],
            "items": _items_json(self.items),
            "also": [dataclasses.asdict(f) for f in self.also],
        }
        if not self.also:
            del fields["also"]
        return _seal("node", fields)


@dataclasses.dataclass(frozen=True)
class NodeEntry:
    """One node in `epoch.json`."""

    name: str
    process: int  # JAX process index
    record_size: int  # bytes of its `node.json`
    record_digest: str  # xxh3-128 of its `node.json`
    files: tuple[DataFile, ...]  # without checksums
    secs: float = 0.0  # that the node took to write them

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return paths.folder_name(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(f.size for f in self.files)

    def row(self) -> list[Any]:
        """Its form in `epoch.json`."""
        files = [f.row() for f in self.files]
        return [self.name, self.process, self.record_size, self.record_digest, round(self.secs, 6), files]


@dataclasses.dataclass(frozen=True)
class ItemRecord:
    """One item of an epoch.

    Its kind is `arrays` (a pytree in data files), `files` (written by a handler), or `node` (a pytree that differs per
    node; each node's `node.json` describes its own).
    """

    kind: str
    handler: str = ""  # type name of the Orbax handler, as Orbax records it
    arrays: ArrayItem | None = None  # only of kind `arrays`; so are the next two
    values: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # Python leaves as JSON, by leaf number
    custom_metadata: Any = None  # the caller's
    same: bool = False  # of `node`: every node of the epoch has the item, with the same content


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """One run of a directory, from the opening of its manager to the newest epoch that it committed.

    Seconds are the primary's, up to the beginning of that save.
    """

    incarnation: str
    began_ns: int
    saved_ns: int  # when its newest save began, by the wall clock
    committed_ns: int
    saves: int  # that it has committed
    epoch: int  # the newest
    blocked_secs: float  # in `save`
    restoring_secs: float
    waiting_secs: float  # for saves to end
    killed: bool | None = None  # whether it ended without closing the directory; None until a later run has claimed


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """`epoch.json`: the commit record. Its presence under the epoch's final name makes the epoch exist."""

    epoch: int
    attempt: str
    objects: bool  # it lies in an object store, where paths have the attempt in them, see `paths.part_folder`
    plan: str  # digest of the plan, equal on all nodes
    nodes: tuple[NodeEntry, ...]
    items: Mapping[str, ItemRecord]
    default_item: bool  # its one item has no name in the caller's arguments
    metrics: Any
    custom_metadata: Mapping[str, Any]
    started_ns: int  # when the save began, by the wall clock
    committed_ns: int
    timings: Mapping[str, float]  # seconds by name
    # What the Orbax view lacks: reasons by leaf name, by item; None where no view was asked for. The item `*` stands
    # for the whole view, if none could be made.
    orbax_unsupported: Mapping[str, Mapping[str, str]] | None = None
    # (length, xxh3-128) of the Orbax view's files, by path in the epoch's folder; its links follow from the rest.
    orbax_view: Mapping[str, tuple[int, str]] | None = None
    per_node: bool = False  # one node only, whose files lie beside the record, see `jobs.caffe2_epochs`
    copied_from: str = ""  # the attempt that a copy was made of, if it could not keep that id
    # Where each host has a disk of its own: small contents that one process alone wrote. By item, then by the name of
    # the file that a handler wrote, or by the number of the leaf.
    carried: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    runs: tuple[RunEntry, ...] = ()  # the newest runs until then, oldest first; the last one saved this epoch

    # of a step of stock Orbax these are fields: see `OrbaxRecord`
    stock: ClassVar[bool] = False
    sure: ClassVar[bool] = True
    unread: ClassVar[Mapping[str, Exception]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all nodes' files."""
        return sum(n.nbytes for n in self.nodes)

    @property
    def name(self) -> str:
        """The name of its file, in the epoch's folder; on object stores `epoch.json` is a copy of it."""
        return f"{self.attempt}.json" if self.objects else paths.EPOCH_RECORD

    @property
    def origin(self) -> str:
        """The attempt that saved it; copies of one epoch have the same."""
        return self.copied_from or self.attempt

    def node_folder(self, node: int, item: str = "") -> str:
        """Folder of a node's record and handlers' files, or of its data files of an item; relative to the epoch's."""
        if self.per_node:
            return ""
        folder = self.nodes[node].folder
        return paths.part_folder(folder, self.attempt, item) if self.objects else folder

    def path(self, node: int, file: DataFile | None = None) -> str:
        """Path of a node's file, or of its record, relative to the epoch's folder."""
        if file is None:
            return paths.join(self.node_folder(node), paths.NODE_RECORD)
        return paths.join(self.node_folder(node, "" if file.name else file.item), file.path)

    def sizes(self) -> dict[str, int]:
        """The sizes of all files of nodes, by path relative to the epoch's folder."""
        found: dict[str, int] = {}
        for number, node in enumerate(self.nodes):
            found[self.path(number)] = node.record_size
            found |= {self.path(number, file): file.size for file in node.files}
        return found

    def to_bytes(self) -> bytes:
        """The file's content."""
        fields: dict[str, Any] = {
            **vars(self),
            "nodes": [n.row() for n in self.nodes],
            "items": _items_json(self.items),
            "metrics": checksums.pack_json(self.metrics, "metrics"),
            "custom_metadata": checksums.pack_json(dict(self.custom_metadata), "custom_metadata"),
        }
        fields["carried"] = pack_contents(self.carried)
        fields["runs"] = [dataclasses.astuple(run) for run in self.runs]
        for name in ("per_node", "copied_from", "carried", "runs"):
            if not fields[name]:
                del fields[name]
        return _seal("epoch", fields)


def pack_contents(contents: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, str]]:
    """Contents by item and name, for JSON."""
    packed = {item: {n: base64.b64encode(data).decode() for n, data in each.items()} for item, each in contents.items()}
    return {item: each for item, each in packed.items() if each}


def unpack_contents(packed: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, bytes]]:
    """The inverse of `pack_contents`; raises ValueError, AttributeError or TypeError for what it did not make."""
    return {item: {n: base64.b64decode(d, validate=True) for n, d in each.items()} for item, each in packed.items()}


def _seal(kind: str, fields: Mapping[str, Any]) -> bytes:
    return checksums.seal({"format": paths.FORMAT, "version": paths.VERSION, "record": kind, **fields})


def tree_digest(item: ItemRecord, files: Sequence[DataFile]) -> str:
    """Digest of one node's own tree; equal on two nodes if and only if they wrote the same, to the last bit.

    Shardings are left out, because devices have different numbers on every process. Equal arrays that different
    shardings cut differently count as different.
    """
    assert item.arrays is not None, "a node's own items are trees"
    described = item.arrays.to_json()
    content = {
        "leaves": [row[:6] + row[7:] for row in described["leaves"]],
        "grids": described["grids"],
        "values": {str(k): v for k, v in sorted(item.values.items())},
        "files": [[f.part, f.size, f.data_start, f.block_bytes, f.xxh3] for f in files],
    }
    return checksums.digest(json.dumps(content, separators=(",", ":")).encode())


def _items_json(items: Mapping[str, ItemRecord]) -> checksums.Json:
    return checksums.dumps_fields({name: checksums.dumps_fields(_item_fields(item)) for name, item in items.items()})


def _item_fields(item: ItemRecord) -> dict[str, Any]:
    head: dict[str, Any] = {"kind": item.kind, "handler": item.handler}
    if item.arrays is None:
        return {**head, "same": item.same} if item.kind == "node" else head
    return {
        **head,
        **item.arrays.json_fields,
        "values": {str(k): v for k, v in item.values.items()},
        "custom_metadata": checksums.pack_json(item.custom_metadata, "custom_metadata"),
    }
