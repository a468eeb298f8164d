"""The Orbax view: small files beside the data that let stock Orbax read an epoch without epochckpt.

Built from an epoch's record without I/O. An uncompressed zarr chunk *is* the raw bytes of a cell, so the index of an
OCDBT database points into the nodes' data files, through a symlink per node: it accepts only paths below its folder.

    <item>/manifest.ocdbt index.0 _METADATA _sharding _strings.json array_metadatas/process_0
    <item>/<node> -> ../<node>                for items of arrays
    <item>/<file> -> ../<node>/<item>/<file>  for what handlers wrote, JSON among it
    <node>/metadata -> node.json              so that Orbax may take a node's folder for an item; by the node itself
    metrics/metrics  _CHECKPOINT_METADATA  commit_success.txt

What Orbax cannot express is left out, never wrong, and named in `View.unsupported`; in a sequence a None replaces it.
"""

import base64
import collections
import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import struct
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import AxisType

from epochckpt._text import readable
from epochckpt._threads import Pool
from epochckpt._units import several
from epochckpt.errors import AccessError, DamagedError, EpochDeletedError, UnsupportedError, unreadable
from epochckpt.format import ArrayItem, EpochRecord, ItemRecord, KeyPath, Leaf, NodeEntry, checksums
from epochckpt.format import paths as layout
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import ocdbt
from epochckpt.storage import Store

JSON_HANDLER = ocp.handlers.JsonCheckpointHandler.typestr()
ARRAY_HANDLER = ocp.handlers.ArrayCheckpointHandler.typestr()
_KEY_HANDLERS = {
    ocp.handlers.JaxRandomKeyCheckpointHandler.typestr(): "jax_random_key",
    ocp.handlers.NumpyRandomKeyCheckpointHandler.typestr(): "np_random_key",
}
"""Handlers that keep arrays one folder deeper, beside a JSON file, and the folder."""
_TEXT = "string"
_BARE_PATH: KeyPath = (("k", "checkpoint"),)  # what Orbax calls an array that is not in a tree

_COMMITTED_BY_US = b"epochckpt committed this epoch.\n"  # see orbax.steps: so it is never taken for one of Orbax's
_MAX_NOTED = 100  # leaves that a record names as unsupported
_FEW = 3
MAX_CHUNKS, MAX_EXPORT_CHUNKS = 250_000, 2_000_000
"""Items with more cells get no view: every reader would read the index whole, and writing it holds up a commit."""

_EMPTY = {"none": "None", "node": "None", "dict": "Dict", "list": "List", "tuple": "Tuple"}
_TYPES = {"jax": "jax.Array", "prng": "jax.Array", "numpy": "np.ndarray", "scalar": "scalar"}
_KEY_TYPES = {"k": 2, "a": 2, "s": 1, "f": 1}  # Orbax's KeyType: DICT and SEQUENCE
_ZARR_DTYPES = frozenset(  # those of ours that TensorStore's zarr knows
    ["bool", "int2", "int4", "bfloat16", "float4_e2m1fn"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "complex64", "complex128"]
    + [f"float8_{kind}" for kind in ("e3m4", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
)

_PREFIX = "view-"  # of folders that repairs work in
_warned: set[str] = set()  # directories; once per process

Run = Callable[[list[Callable[[], None]]], None]  # runs calls, in parallel if it likes; raises the first error

_Scalars = Mapping[int, tuple[str, bytes] | None]
"""(dtype, bytes) of an item's Python values by leaf number; None for those that Orbax cannot have."""


@dataclasses.dataclass
class View:
    """What lies in an epoch's folder for Orbax's sake; paths are relative to it."""

    folders: list[str] = dataclasses.field(default_factory=list)  # to be made, in this order
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)  # content by path
    links: dict[str, str] = dataclasses.field(default_factory=dict)  # target by path
    node_links: dict[str, str] = dataclasses.field(default_factory=dict)  # the same; each node makes its own
    # Reasons by leaf name, by item; the leaf name `*` stands for the whole item.
    unsupported: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


class Views:
    """Builds the views of one manager's epochs; what does not change from epoch to epoch is built once."""

    def __init__(self, max_chunks: int | None = None) -> None:
        self._known: dict[str, _ItemView] = {}
        self._max_chunks = max_chunks

    def build(self, record: EpochRecord, *, beside_nodes: bool = True) -> View:
        """The view of an epoch that is about to be committed, `beside_nodes`: beside the nodes' folders.

        Orbax takes every folder for an item unless it is told which to restore. So a node is shown as the JSON item
        that its record is, through a link of its own.
        """
        view = View()
        handlers = {}
        for node in record.nodes if beside_nodes else ():
            if not any(f.name and f.item == layout.JSON_FILE for f in node.files):  # that link's name is taken
                handlers[node.folder] = JSON_HANDLER
                view.node_links[f"{node.folder}/{layout.JSON_FILE}"] = layout.NODE_RECORD
        for name, item in record.items.items():
            handler, lost = item.handler, ""
            if item.kind == "files":
                _add_files(view, record, name)
            elif item.arrays is None:
                lost = "it differs per node, which Orbax has no form for"
            else:
                lost = self._add_arrays(view, record, name, item, item.arrays)
                if item.arrays.is_bare and handler not in _KEY_HANDLERS:
                    handler = ARRAY_HANDLER
            if lost:
                view.unsupported[name] = {"*": lost}
            else:
                handlers[name] = handler
        if record.metrics is not None:
            view.folders.append("metrics")
            view.files["metrics/metrics"] = json.dumps(record.metrics).encode()
            handlers["metrics"] = JSON_HANDLER
        step = {
            "item_handlers": handlers,
            "metrics": record.metrics or {},
            "performance_metrics": {},
            "init_timestamp_nsecs": record.started_ns,
            "commit_timestamp_nsecs": record.committed_ns,
            "custom_metadata": dict(record.custom_metadata),
        }
        view.files["_CHECKPOINT_METADATA"] = json.dumps(step).encode()
        view.files["commit_success.txt"] = _COMMITTED_BY_US if beside_nodes else b"The checkpoint was committed.\n"
        return view

    def _add_arrays(self, view: View, record: EpochRecord, name: str, item: ItemRecord, arrays: ArrayItem) -> str:
        """Adds an item of arrays; returns why Orbax can have none of it, if so."""
        places = tuple((n.folder, tuple(f for f in n.files if f.item == name)) for n in record.nodes)
        leaves = arrays.leaves
        values = {i: tree_lib.value_from_json(leaves[i].name, leaves[i].kind, v) for i, v in item.values.items()}
        scalars = {i: _scalar(v) for i, v in values.items()}
        key = arrays, places, {i: s and s[0] for i, s in scalars.items()}, item.handler, item.custom_metadata
        known = self._known.get(name)
        if known is None or known.key[0] is not arrays or known.key[1:] != key[1:]:
            if reason := _inexpressible(arrays, self._max_chunks or MAX_CHUNKS):
                return reason
            known = self._known[name] = _ItemView(key, record, name, item, arrays, scalars)
        unsupported = known.unsupported
        if not known.tree:
            more = f" and {len(unsupported) - _FEW} more" if len(unsupported) > _FEW else ""
            nothing = f"Orbax has no form for any of its leaves: {few(unsupported)}{more}"
            return nothing if unsupported else "it has no leaves"
        kept = {i: (known.names[i], s) for i, s in scalars.items() if s and i in known.names}
        fresh = {f"{path}/0".encode(): s[1] for path, s in kept.values() if s[0] != _TEXT}
        token = bytes.fromhex(checksums.digest(f"{record.attempt} {name}".encode()))
        files = {**known.index.files(fresh, token, record.committed_ns), **known.files}
        strings = {path: values[i] for i, (path, s) in kept.items() if s[0] == _TEXT}
        if strings:
            files["_strings.json"] = _json(strings)
        base, up = name, ".."
        view.folders.append(name)
        if item.handler in _KEY_HANDLERS:
            base, up = f"{name}/{_KEY_HANDLERS[item.handler]}", "../.."
            view.folders += [base, f"{base}_metadata"]
            view.files[f"{base}_metadata/{layout.JSON_FILE}"] = _json(_key_metadata(arrays, item.handler))
        view.folders.append(f"{base}/array_metadatas")
        view.files.update({f"{base}/{path}": data for path, data in files.items()})
        view.links.update({f"{base}/{node}": f"{up}/{node}" for node in sorted(known.nodes)})
        if unsupported:
            named = dict(list(unsupported.items())[:_MAX_NOTED])  # the record stays small
            if more := len(unsupported) - len(named):
                named["*"] = f"and {several(more, 'leaf', 'leaves')} more"
            view.unsupported[name] = named
        return ""


def _add_files(view: View, record: EpochRecord, name: str) -> None:
    """Adds what handlers wrote: one link per file."""
    folders = {name}
    for number, node in enumerate(record.nodes):
        for file in (f for f in node.files if f.item == name):
            parents = layout.parents(file.path)
            folders.update(parents)
            view.links[file.path] = f"{'../' * len(parents)}{record.path(number, file)}"
    view.folders += sorted(folders)  # parents first


def _inexpressible(arrays: ArrayItem, max_chunks: int) -> str | None:
    """Why Orbax can be given nothing of an item, if so."""
    chunks = sum(len(arrays.grids[leaf.grid].holders) for leaf in arrays.leaves if leaf.grid >= 0)
    if chunks > max_chunks:
        return f"{chunks} chunks, more than {max_chunks}; an export takes {MAX_EXPORT_CHUNKS}"
    bare = arrays.is_bare and arrays.leaves[0].kind not in _TYPES.keys() | {"bool", "int", "float"}
    return f"Orbax has no form for a {arrays.leaves[0].kind} alone" if bare else None


def _key_metadata(arrays: ArrayItem, handler: str) -> dict[str, bool]:
    """What Orbax's handlers of random keys put beside the key."""
    if handler == ocp.handlers.JaxRandomKeyCheckpointHandler.typestr():
        return {"typed": arrays.leaves[0].kind == "prng"}
    return {"legacy": all(leaf.path[0][0] == "s" for leaf in arrays.leaves)}


class _ItemView:
    """An item's leaves as Orbax's parameters: what stays the same while `key`, all that it depends on, does."""

    def __init__(
        self, key: Any, record: EpochRecord, name: str, item: ItemRecord, arrays: ArrayItem, scalars: _Scalars
    ):
        self.key, self.arrays = key, arrays
        self.typed = item.handler not in _KEY_HANDLERS  # PRNG keys come back as such, else as their data
        self.unsupported: dict[str, str] = {}
        self.entries: dict[bytes, bytes | ocdbt.Piece] = {}
        self.tree: dict[str, Any] = {}
        self.metadatas: list[Any] = []
        self.nodes: set[str] = set()
        self.paths = {i: leaf.path or _BARE_PATH for i, leaf in enumerate(arrays.leaves)}
        self.names = self._name()
        for number, param in self.names.items():
            self._add(number, param, scalars.get(number))
        if self.unsupported:  # older Orbax takes a sequence's elements as they come, so the order of the leaves is kept
            out = {i for i, leaf in enumerate(arrays.leaves) if leaf.name in self.unsupported}
            nones = _placeholders(self.paths, out, self.names)
            none = {"value_type": "None", "skip_deserialize": True}
            rows = (_row(path, none) for i, path in (self.paths | nones).items() if i not in out or i in nones)
            self.tree = {key: self.tree.get(key, row) for key, row in rows}
        self._locate(record, name)
        # an empty tree: Orbax wants a database nevertheless
        self.index = ocdbt.Index(self.entries or {b".empty": b""})
        metadata = {
            "tree_metadata": self.tree,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": item.custom_metadata,
        }
        self.files = {
            "_METADATA": _json(metadata),
            "_sharding": _json(self._shardings()),
            "array_metadatas/process_0": _json({"array_metadatas": self.metadatas}),
        }

    def _name(self) -> dict[int, str]:
        """Orbax's parameter name by leaf number, for the leaves that it can name."""
        found = {i: ".".join(str(key) for _, key in path) for i, path in self.paths.items()}
        count = collections.Counter(found.values())
        out = {}
        for i, name in found.items():
            leaf = self.arrays.leaves[i]
            if count[name] > 1:
                self.unsupported[leaf.name] = f"Orbax would call it and another leaf {name!r}"
            elif not name.isprintable() or any(str(key) in ("", ".", "..") for _, key in leaf.path):
                self.unsupported[leaf.name] = "Orbax cannot name it"
            else:
                out[i] = name
        return out

    def _add(self, number: int, name: str, scalar: tuple[str, bytes] | None) -> None:
        """Adds a leaf, without the places of its chunks."""
        leaf = self.arrays.leaves[number]
        if leaf.kind in _EMPTY:
            self._record(leaf, _EMPTY[leaf.kind], skip=True)
        elif leaf.kind == "str" and scalar is None:
            self.unsupported[leaf.name] = "Orbax cannot store a lone surrogate"
        elif leaf.kind == "str":
            self._record(leaf, _TEXT)
        elif scalar is not None:
            self._record(leaf, "scalar")
            self.entries[f"{name}/.zarray".encode()] = _zarray((), (), scalar[0])
            self.entries[f"{name}/0".encode()] = scalar[1]
        elif leaf.kind not in _TYPES or leaf.dtype is None:
            self.unsupported[leaf.name] = f"Orbax has no type for this {leaf.kind}"
        elif leaf.dtype.name not in _ZARR_DTYPES:
            self.unsupported[leaf.name] = f"Orbax cannot store {leaf.dtype.name}"
        elif not math.prod(leaf.shape):
            self.unsupported[leaf.name] = "Orbax cannot store arrays without elements"
        else:
            chunk, dtype = self.arrays.cell_shape(number), leaf.dtype
            zarr_dtype = dtype.str if dtype.kind in "biufc" and dtype.isbuiltin == 1 else dtype.name
            self.entries[f"{name}/.zarray".encode()] = _zarray(leaf.shape, chunk, zarr_dtype)
            is_jax = leaf.kind in ("jax", "prng")
            self._record(leaf, _TYPES[leaf.kind], chunk if is_jax else None)
            if is_jax:
                ext = {"random_key_impl": leaf.impl} if leaf.kind == "prng" and self.typed else None
                row = {"param_name": name, "write_shape": chunk, "chunk_shape": chunk, "ext_metadata": ext}
                self.metadatas.append({"array_metadata": row})

    def _record(self, leaf: Leaf, kind: str, shape: tuple[int, ...] | None = None, *, skip: bool = False) -> None:
        written = {} if shape is None else {"write_shape": shape}
        value = {"value_type": kind, "skip_deserialize": skip, **written}
        self.tree.update([_row(leaf.path or _BARE_PATH, value)])

    def _locate(self, record: EpochRecord, name: str) -> None:
        """Adds where the chunks of the arrays lie."""
        arrays = self.arrays
        prefixes = {i: f"{p}/" for i, p in self.names.items() if f"{p}/.zarray".encode() in self.entries}
        for node, entry in enumerate(record.nodes):
            files = [f for f in entry.files if f.item == name and f.data_start]
            ends = np.cumsum([f.cells for f in files]).tolist()
            for file, part in zip(files, arrays.cut(arrays.owned(node), ends), strict=True):
                path = record.path(node, file).removeprefix(f"{name}/" if record.objects else "")
                starts = (part.offsets[:-1] + file.data_start).tolist()
                for leaf, cell, start in zip(part.leaves.tolist(), part.cells.tolist(), starts, strict=True):
                    if prefix := prefixes.get(leaf):
                        key = f"{prefix}{_chunk(arrays, leaf, cell)}"
                        self.entries[key.encode()] = (path, start, arrays.cell_bytes(leaf))
                        self.nodes.add(entry.folder)

    def _shardings(self) -> dict[str, str]:
        """Orbax's form of the recorded shardings, by parameter name in base64; without those that are nonsense."""
        text_of = functools.cache(lambda number: sharding_text(self.arrays, self.arrays.shardings[number]))
        found = {}
        for leaf, name in ((self.arrays.leaves[number], name) for number, name in self.names.items()):
            if leaf.kind in ("jax", "prng") and leaf.sharding >= 0:
                with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                    if text := text_of(leaf.sharding):
                        found[base64.b64encode(name.encode()).decode()] = text
        return found


def _row(path: KeyPath, value: Any) -> tuple[str, Any]:
    """An entry of Orbax's tree metadata."""
    keys = [{"key": str(key), "key_type": _KEY_TYPES[entry]} for entry, key in path]
    return str(tuple(k["key"] for k in keys)), {"key_metadata": keys, "value_metadata": value}


def _scalar(value: Any) -> tuple[str, bytes] | None:
    """(zarr dtype, bytes) of a Python number, as Orbax stores it; (_TEXT, nothing) of a text; None where it cannot."""
    if isinstance(value, str):
        return None if any("\ud800" <= c <= "\udfff" for c in value) else (_TEXT, b"")
    if isinstance(value, bool):
        return "|b1", bytes([value])
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return "<i8", struct.pack("<q", value)
    return ("<f8", struct.pack("<d", value)) if isinstance(value, float) else None


def _chunk(arrays: ArrayItem, leaf: int, cell: int) -> str:
    counts = arrays.counts(leaf)
    where = (0,) * len(counts) if arrays.is_whole(leaf) else np.unravel_index(cell, counts)
    return ".".join(str(int(i)) for i in where) or "0"


def _zarray(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str) -> bytes:
    plain = {"compressor": None, "dimension_separator": ".", "fill_value": None, "filters": None, "order": "C"}
    array = {"chunks": chunk, "dtype": dtype, "shape": shape, "zarr_format": 2}
    return json.dumps({**plain, **array}, sort_keys=True, separators=(",", ":")).encode()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def sharding_text(arrays: ArrayItem, row: Any) -> str | None:
    """Orbax's form of one recorded sharding; None where its device is not there."""
    if "device" in row:
        names = [str(d) for d in jax.devices() if (d.platform, d.id) == (row["platform"], row["device"])]
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": names[0]}) if names else None
    mesh = arrays.meshes[row["mesh"]]
    devices = np.array([{"id": d} for d in mesh["devices"]], dtype=object).reshape(mesh["shape"]).tolist()
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": mesh["shape"],
            "axis_names": mesh["axes"],
            "axis_types": [str(AxisType[t]) for t in mesh["axis_types"]],
            "partition_spec": row["spec"],
            "device_mesh": {"mesh": devices},
        }
    )


def _placeholders(paths: Mapping[int, KeyPath], out: Container[int], named: Container[int]) -> dict[int, KeyPath]:
    """Where Orbax needs a None because a sequence would lack an element; with a gap it reads nothing of the item.

    As a rule that is the leaf itself, so that targets still fit. An element with leaves that Orbax cannot name (not in
    `named`) becomes None as a whole. The result is the path of the None, by number of the leaf that is left `out`.
    """
    kept = {path[:depth] for i, path in paths.items() if i not in out for depth in range(len(path) + 1)}
    found = {}
    whole = set()
    for i, path in paths.items():
        for depth, (kind, _) in enumerate(path) if i in out else ():
            if kind in ("s", "f") and path[:depth] in kept and path[: depth + 1] not in kept:
                found[i] = path[: depth + 1]
                if i not in named:
                    whole.add(found[i])
                break
    return {i: element if element in whole else paths[i] for i, element in found.items()}


def few(unsupported: Mapping[str, str]) -> str:
    """The first of them with their reasons, for messages."""
    return ", ".join(f"{readable(leaf)} ({why})" for leaf, why in list(unsupported.items())[:_FEW])


def link_node(store: Store, folder: str) -> None:
    """Shows a node's record as an item of JSON, see `orbax.view`; by the node itself."""
    with contextlib.suppress(io.UnsupportedOperation):  # `write` leaves the whole view out then
        store.link(layout.join(folder, layout.JSON_FILE), layout.NODE_RECORD)


def write(store: Store, folder: str, record: EpochRecord, view: View, run: Run) -> EpochRecord:
    """Writes a view into an epoch's folder, which has its nodes; durably but for the names in that folder itself.

    The record comes back with the note of what the view lacks: all of it where the file system has no symlinks.
    """
    try:
        # The first node made this link of its own accord, or has another file of that name.
        if not store.exists(layout.join(folder, record.node_folder(0), layout.JSON_FILE)):
            raise io.UnsupportedOperation("see link_node")
        _make(store, view, folder, run)
    except io.UnsupportedOperation:
        for name in view.folders:
            store.remove_tree(layout.join(folder, name))
        if store.root not in _warned:
            _warned.add(store.root)
            logging.warning(
                "%s: the file system has no symlinks, which the Orbax view needs: stock Orbax cannot read the epochs "
                "that are saved there, epochckpt can. For stock Orbax export them, or copy them with CopyUpload to "
                "another file system; orbax_view=False saves this line",
                store.root,
            )
        lost = {"*": {"*": "the file system has no symlinks"}}
        return dataclasses.replace(record, orbax_unsupported=lost, orbax_view=None)
    files = {path: (len(data), checksums.digest(data)) for path, data in view.files.items()}
    return dataclasses.replace(record, orbax_unsupported=view.unsupported, orbax_view=files)


def check(store: Store, folder: str, record: EpochRecord) -> dict[str, DamagedError] | None:
    """Compares the view of a committed epoch with its record; one that was never made has no damage.

    Returns an error per file or link that is not as it was written, by path in the epoch's folder; None if nothing of
    the view is there. A copy in which a link became what it led to is as good as the original.
    """
    if record.orbax_view is None:
        return {}
    view = Views().build(record)
    links = view.links | view.node_links
    nodes = {record.node_folder(number): entry for number, entry in enumerate(record.nodes)}
    places = [os.path.join(store.root, folder, path) for path in (*record.orbax_view, *view.links)]
    if not any(map(os.path.lexists, places)):
        return None
    damage = {}
    for path in sorted({*record.orbax_view, *links}):
        at = layout.join(folder, path)
        try:
            if path in record.orbax_view:
                problem = _compare_file(store, at, record.orbax_view[path], view.files.get(path))
            else:
                problem = _compare_link(store, folder, nodes, path, links[path])
        except PermissionError as error:  # a link that leads out of the directory, for example
            problem = f"cannot be read: {error}"
        except OSError as error:
            found = unreadable(at, error)
            if not isinstance(found, DamagedError):
                raise
            problem = found.problem
        if problem:
            damage[path] = DamagedError(at, problem)
    return damage


def _compare_file(store: Store, path: str, recorded: tuple[int, str], fresh: bytes | None) -> str:
    """What is wrong with a file of the view; one made anew, maybe by another epochckpt, is as good as the first."""
    known = {recorded} if fresh is None else {recorded, (len(fresh), checksums.digest(fresh))}
    size = store.size(path)
    if size not in {length for length, _ in known}:
        return f"has {size} bytes, {recorded[0]} were written"
    if (size, checksums.digest(store.read(path, limit_bytes=size))) not in known:
        return "has other bytes than were written"
    return ""


def _compare_link(store: Store, folder: str, nodes: Mapping[str, NodeEntry], path: str, target: str) -> str:
    """What is wrong with a link, or with the copy of what it led to that lies in its place; `nodes` by folder."""
    place = os.path.join(store.root, folder, path)
    itself = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if os.path.realpath(place) == os.path.realpath(os.path.join(store.root, folder, itself)):
        return ""
    if not os.path.lexists(place):
        return "is missing"
    # A link to a node stands for the node's data files of the item, any other one for a file.
    files, item = [""], path.split("/")[0]
    if itself in nodes:
        files = [file.path for file in nodes[itself].files if file.item == item and file.data_start]
    for file in files:
        original = layout.join(itself, file)
        if not _same(store, layout.join(folder, path, file), layout.join(folder, original)):
            return f"does not lead to {target}" if os.path.islink(place) else f"is no copy of {original}"
    return ""


def _same(store: Store, one: str, other: str) -> bool:
    with store.open_reader(one) as a, store.open_reader(other) as b:
        return a.size == b.size and all(one == other for one, other in zip(a.pieces(), b.pieces(), strict=True))


def repair(store: Store, folder: str, record: EpochRecord) -> list[str]:
    """Makes anew what is damaged or missing of a view, and nothing else; returns its paths in the epoch's folder.

    Each file, and each item's folder as a whole, is exchanged for a new one. They are made in a folder within the
    epoch's, so that a view never comes to an epoch that has taken this one's place meanwhile.
    """
    where = f"{store.root}/{folder}"
    if record.orbax_view is None:
        why = "; ".join((record.orbax_unsupported or {}).get("*", {}).values()) or "none was asked for"
        problem = f"the epoch was saved without an Orbax view ({why}): there is none to repair. An export has one"
        raise UnsupportedError(f"{where}: {problem}")
    damage, view = check(store, folder, record), Views().build(record)
    links = view.links | view.node_links
    wrong = {*record.orbax_view, *links} if damage is None else damage.keys()
    by_node = view.node_links.keys()  # in a node's folder, of which nothing else is exchanged
    parts = sorted(wrong & by_node | {path.split("/")[0] for path in wrong - by_node})
    if not parts:
        return []
    ours = {path.split("/")[0] for path in (*view.folders, *view.files)} - {entry.folder for entry in record.nodes}
    if unknown := [part for part in parts if part not in ours | by_node]:
        raise UnsupportedError(
            f"{where}: this epochckpt makes no {', '.join(unknown)}, which belongs to the epoch's Orbax view: another "
            "version wrote it. An export has a view of its own"
        )
    staging = layout.join(folder, f"{_PREFIX}{layout.new_id()}{layout.TMP_SUFFIX}")
    try:
        for entry in store.list(folder):  # of a repair that was killed
            if entry.is_folder and entry.name.startswith(_PREFIX) and entry.name.endswith(layout.TMP_SUFFIX):
                store.remove_tree(layout.join(folder, entry.name))
        store.make_folder(staging)
        try:
            for number, part in enumerate(parts):
                draft = layout.join(staging, f"new-{number}")
                _make(store, view, draft, Pool(1).run, part)
                _exchange(store, draft, layout.join(folder, part), layout.join(staging, f"old-{number}"))
                store.sync_folder(layout.join(folder, part.rpartition("/")[0]))
        finally:
            store.remove_tree(staging)
    except io.UnsupportedOperation as error:
        raise UnsupportedError(f"{where}: the Orbax view needs symlinks: {error}. An export does without") from error
    except FileNotFoundError as error:
        raise EpochDeletedError(record.epoch, store.root, "while its Orbax view was being repaired") from error
    except PermissionError as error:
        raise AccessError(f"{where}: {error}; repairing the Orbax view needs write access to it") from error
    return parts


def _make(store: Store, view: View, folder: str, run: Run, part: str = "") -> None:
    """Makes a view below a folder, or a part of it in the folder's place, durably but for the names in the folder."""

    def place(path: str) -> str:
        return layout.join(folder, path.removeprefix(part).strip("/"))

    def of(found: Iterable[str]) -> list[str]:
        return [path for path in found if not part or path == part or path.startswith(f"{part}/")]

    for path in of(view.folders):
        store.make_folder(place(path))
    links = view.links | view.node_links if part else view.links
    for path in of(links):
        store.link(place(path), links[path])
    run([functools.partial(store.create, place(path), view.files[path]) for path in of(view.files)])
    run([functools.partial(store.sync_folder, place(path)) for path in reversed(of(view.folders))])


def _exchange(store: Store, new: str, final: str, old: str) -> None:
    """Puts a part in its place; what was there is at `old` or `new` then, or gone."""
    if os.path.lexists(os.path.join(store.root, final)):
        try:
            store.exchange(new, final)
            return
        except io.UnsupportedOperation:
            store.rename(final, old)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            store.remove_tree(final)  # overlayfs: no rename moves it
    store.rename(new, final)
