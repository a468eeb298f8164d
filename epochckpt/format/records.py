"""The two records of the format, `epoch.json` and `node.json`: their fields, each with its codec.

`parsing` reads the files. The order of the fields in the classes is their order in the files, and their names there are
those of `stored`; see `codec`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from epochckpt.format import checksums, codec, paths
from epochckpt.format.checksums import BlockSums
from epochckpt.format.codec import (
    BOOLEAN,
    INTEGER,
    MAYBE,
    NUMBER,
    NUMBERS,
    SIZE,
    Codec,
    Fields,
    Rows,
    stored,
)
from epochckpt.format.items import ItemRecord, items
from epochckpt.format.json_kinds import is_list, is_object

MAX_RECORD_BYTES = 256 * 2**20
MAX_FEATURE = 100  # characters of the name of a feature

_ATTEMPT = codec.name(limit=80)
_TEXT = codec.text()
_NODE = codec.name(paths.is_node_name)
_FEATURES = codec.strings(f"names of features, of at most {MAX_FEATURE} characters", 0, MAX_FEATURE)
_FILE_PATH: Codec[str] = codec.plain(
    "a relative path, or nothing", lambda found: all(path == "" or paths.is_file_path(path) for path in found)
)
_NODE_SECS: Codec[float] = codec.plain(
    "seconds", lambda found: all(type(s) in (int, float) and 0 <= s < 1e12 for s in found), lambda secs: round(secs, 6)
)


def _read_sums(fields: Fields, key: str) -> BlockSums:
    """The checksums of a file, which lie under the name of their kind; without any, the error names `key`."""
    kind = next((kind for name, kind in checksums.BLOCK_CHECKSUMS.items() if name in fields.data), None)
    if kind is None:
        raise fields.fail(key, f"checksums of blocks, as one of {', '.join(checksums.BLOCK_CHECKSUMS)}")
    hex_digits = codec.strings(f"strings of {kind.digits} hex digits", kind.digits, kind.digits)
    return BlockSums(kind, hex_digits.read(fields, kind.name))


_SUMS: Codec[BlockSums] = Codec(_read_sums, lambda sums: list(sums.values))


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One file of a node, as recorded in `node.json` and, without checksums, in `epoch.json`."""

    item: str = stored("item", codec.name())
    part: int = stored("part", SIZE)  # number of the part of a data file, else 0
    size: int = stored("size", SIZE)
    data_start: int = stored("data_start", SIZE, default=0)  # offset of the tensors in a data file
    cells: int = stored("cells", SIZE, default=0)  # in a data file
    block_bytes: int = stored("block_bytes", codec.integer(1, 2**31), default=0)  # of the blocks with a checksum each
    # One per block; none in `epoch.json`.
    sums: BlockSums = stored(
        checksums.WRITTEN.name, _SUMS, key_of=lambda sums: sums.kind.name, default=BlockSums(checksums.WRITTEN)
    )
    # Path inside the item's folder, for files that a handler wrote; empty for data files.
    name: str = stored("name", _FILE_PATH, default="")

    @property
    def path(self) -> str:
        """Path relative to the node's folder; `EpochRecord.path` has the one relative to the epoch's."""
        return paths.join(self.item, self.name) if self.name else paths.data_file(self.item, self.part)


class ReplicaFile(DataFile):
    """A data file with cells that another node owns, see `NodeRecord.replicas`."""

    @property
    def path(self) -> str:
        return paths.join(paths.REPLICA_FOLDER, super().path)


FILE_ROWS = Rows(DataFile, ["item", "part", "size", "data_start", "cells"], ["name"])
"""Files in `epoch.json`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """`node.json`: the files that one node wrote for one attempt."""

    epoch: int = stored("epoch", INTEGER)
    save_id: str = stored("attempt", _TEXT)
    node: str = stored("node", _NODE)
    process: int = stored("process", INTEGER)
    processes: int = stored("processes", INTEGER)
    plan: str = stored("plan", _TEXT)  # digest of the plan; equal on all nodes
    files: tuple[DataFile, ...] = stored("files", codec.objects(DataFile))
    timings: Mapping[str, float] = stored("timings", NUMBERS)  # seconds by name
    # The node's own items, by name.
    items: Mapping[str, ItemRecord] = stored("items", items(None), default_factory=dict)
    # Data files of cells that this node holds and another one owns, on a disk that only this host sees. No copy of the
    # epoch has them.
    replicas: tuple[ReplicaFile, ...] = stored("also", codec.objects(ReplicaFile), optional=True, default=())
    requires: tuple[str, ...] = stored("requires", _FEATURES, optional=True, default=())  # what a reader must know

    def to_bytes(self) -> bytes:
        """The file's content."""
        return codec.seal("node", self)


@dataclasses.dataclass(frozen=True)
class NodeEntry:
    """One node in `epoch.json`."""

    name: str = stored("name", _NODE)
    process: int = stored("process", codec.integer(-(2**63), 2**63))  # JAX process index
    record_size: int = stored("size", codec.integer(1, MAX_RECORD_BYTES + 1))  # bytes of its `node.json`
    record_digest: str = stored("digest", _TEXT)  # xxh3-128 of its `node.json`
    files: tuple[DataFile, ...] = stored("files", FILE_ROWS.codec())  # without checksums
    secs: float = stored("seconds", _NODE_SECS, default=0.0)  # that the node took to write them

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return paths.folder_name(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(f.size for f in self.files)


NODE_ROWS = Rows(NodeEntry, ["name", "process", "record_size", "record_digest", "secs", "files"])


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """One run of a directory, from the opening of its manager to the newest epoch that it committed.

    Seconds are the primary's, up to the beginning of that save.
    """

    incarnation: str = stored("incarnation", _ATTEMPT)
    began_ns: int = stored("opened", INTEGER)
    saved_ns: int = stored("newest save began", INTEGER)  # by the wall clock
    committed_ns: int = stored("committed", INTEGER)
    saves: int = stored("saves", INTEGER)  # that it has committed
    epoch: int = stored("epoch", INTEGER)  # the newest
    blocked_secs: float = stored("seconds blocked", NUMBER)  # in `save`
    restoring_secs: float = stored("seconds restoring", NUMBER)
    waiting_secs: float = stored("seconds waiting", NUMBER)  # for saves to end
    # Whether it ended without closing the directory; None until a later run has claimed.
    killed: bool | None = stored("killed", MAYBE, default=None)


_RUN_COLUMNS = ["incarnation", "began_ns", "saved_ns", "committed_ns", "saves", "epoch", "blocked_secs"]
RUN_ROWS = Rows(RunEntry, [*_RUN_COLUMNS, "restoring_secs", "waiting_secs", "killed"])


def pack_contents(contents: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, str]]:
    """Contents by item and name, for JSON."""
    packed = {item: {n: base64.b64encode(data).decode() for n, data in each.items()} for item, each in contents.items()}
    return {item: each for item, each in packed.items() if each}


def unpack_contents(packed: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, bytes]]:
    """The inverse of `pack_contents`; raises ValueError, AttributeError or TypeError for other values."""
    return {item: {n: base64.b64decode(d, validate=True) for n, d in each.items()} for item, each in packed.items()}


def _read_inlined(fields: Fields, key: str) -> dict[str, dict[str, bytes]]:
    try:
        inlined = unpack_contents(fields.mapping(key))
    except (ValueError, TypeError, AttributeError):
        raise fields.fail(key, "contents in base64, by item and name") from None
    items = fields.found["items"]
    for item, contents in inlined.items():
        arrays = items[item].arrays if item in items else None
        sizes = {} if arrays is None else {str(i): arrays.leaves[i].nbytes for i in arrays.inlined}
        if item not in items or (arrays is not None and any(sizes.get(n) != len(d) for n, d in contents.items())):
            raise fields.fail(key, "small leaves, and files, of items of the epoch")
    return inlined


def _read_unsupported(fields: Fields, key: str) -> dict[str, dict[str, str]] | None:
    if fields.data.get(key) is None:
        return None
    unsupported = fields.mapping(key)
    if not all(is_object(d) and all(isinstance(v, str) for v in d.values()) for d in unsupported.values()):
        raise fields.fail(key, "reasons by leaf, by item")
    return unsupported


def _read_view(fields: Fields, key: str) -> dict[str, tuple[int, str]] | None:
    if fields.data.get(key) is None:
        return None
    view = dict[str, tuple[int, str]]()
    for path, row in fields.mapping(key).items():
        typed = is_list(row) and [type(value) for value in row] == [int, str]
        if not typed or not 0 <= row[0] < codec.MAX_BYTES or not paths.is_file_path(path):
            raise fields.fail(key, "[length, digest] by path")
        view[path] = row[0], row[1]
    return view


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """`epoch.json`: the commit record. Its presence under the epoch's final name makes the epoch exist."""

    epoch: int = stored("epoch", INTEGER)
    save_id: str = stored("attempt", _ATTEMPT)
    # It lies in an object store, where paths have the attempt in them, see `paths.part_folder`.
    objects: bool = stored("objects", BOOLEAN)
    plan: str = stored("plan", _TEXT)  # digest of the plan, equal on all nodes
    nodes: tuple[NodeEntry, ...] = stored("nodes", NODE_ROWS.codec())
    items: Mapping[str, ItemRecord] = stored("items", items("nodes"))
    default_item: bool = stored("default_item", BOOLEAN)  # its one item has no name in the caller's arguments
    metrics: Any = stored("metrics", codec.user(object, "metrics"))
    custom_metadata: Mapping[str, Any] = stored("custom_metadata", codec.user(dict, "custom_metadata"))
    started_ns: int = stored("started_ns", INTEGER)  # when the save began, by the wall clock
    committed_ns: int = stored("committed_ns", INTEGER)
    timings: Mapping[str, float] = stored("timings", NUMBERS)  # seconds by name
    # What the Orbax view lacks: reasons by leaf name, by item; None where no view was asked for. The item `*` stands
    # for the whole view, if none could be made.
    orbax_unsupported: Mapping[str, Mapping[str, str]] | None = stored(
        "orbax_unsupported", Codec(_read_unsupported), default=None
    )
    # (length, xxh3-128) of the Orbax view's files, by path in the epoch's folder; its links follow from the rest.
    orbax_view: Mapping[str, tuple[int, str]] | None = stored("orbax_view", Codec(_read_view), default=None)
    # One node only, whose files lie beside the record, see `directory.node_directory`.
    per_node: bool = stored("per_node", BOOLEAN, optional=True, default=False)
    # The attempt that a copy was made of, if it could not keep that id.
    copied_from: str = stored("copied_from", codec.text(80), optional=True, default="")
    # Where each host has a disk of its own: small contents that one process alone wrote. By item, then by the name of
    # the file that a handler wrote, or by the number of the leaf.
    inlined: Mapping[str, Mapping[str, bytes]] = stored(
        "carried", Codec(_read_inlined, pack_contents), optional=True, default_factory=dict
    )
    # The newest runs until then, oldest first; the last one saved this epoch.
    runs: tuple[RunEntry, ...] = stored("runs", RUN_ROWS.codec(), optional=True, default=())
    requires: tuple[str, ...] = stored("requires", _FEATURES, optional=True, default=())  # what a reader must know

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
        return f"{self.save_id}.json" if self.objects else paths.EPOCH_RECORD

    @property
    def origin(self) -> str:
        """The attempt that saved it; copies of one epoch have the same."""
        return self.copied_from or self.save_id

    def node_folder(self, node: int, item: str = "") -> str:
        """Folder of a node's record and handlers' files, or of its data files of an item; relative to the epoch's."""
        if self.per_node:
            return ""
        folder = self.nodes[node].folder
        return paths.part_folder(folder, self.save_id, item) if self.objects else folder

    def path(self, node: int, file: DataFile | None = None) -> str:
        """Path of a node's file, or of its record, relative to the epoch's folder."""
        if file is None:
            return paths.join(self.node_folder(node), paths.NODE_RECORD)
        return paths.join(self.node_folder(node, "" if file.name else file.item), file.path)

    def sizes(self) -> dict[str, int]:
        """The sizes of all files of nodes, by path relative to the epoch's folder."""
        sizes: dict[str, int] = {}
        for number, node in enumerate(self.nodes):
            sizes[self.path(number)] = node.record_size
            sizes |= {self.path(number, file): file.size for file in node.files}
        return sizes

    def to_bytes(self) -> bytes:
        """The file's content."""
        return codec.seal("epoch", self)


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
        "files": [[f.part, f.size, f.data_start, f.block_bytes, f.sums.values] for f in files],
    }
    return checksums.digest(json.dumps(content, separators=(",", ":")).encode())
