"""The Orbax view: small files beside the data that let stock Orbax read an epoch without epochckpt.

Built from an epoch's record without I/O. An uncompressed zarr chunk *is* the raw bytes of a cell, so the index of an
OCDBT database points into the nodes' data files, through a symlink per node: it accepts only paths below its folder.

    <item>/manifest.ocdbt index.0 _METADATA _sharding _strings.json array_metadatas/process_0
    <item>/<node> -> ../<node>                (1) for items of arrays.
    <item>/<file> -> ../<node>/<item>/<file>  for files of handlers, JSON included.
    state, pytree -> default                  for the unnamed item: Orbax's v1 looks for these names.
    <node>/metadata -> node.json              (1) lets Orbax take a node's folder for an item.
    metrics/metrics  _CHECKPOINT_METADATA  commit_success.txt

(1) In a job of several processes, each node makes these links itself.

`linked_view` writes the view. In an object store, `object_view` writes copies in place of the links that are needed
there; data files need none, because they lie below their item.

What Orbax cannot express is left out, never wrong, and named in `View.unsupported`; in a sequence a None replaces it.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import functools
import json
import math
import struct
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
from absl import logging

from epochckpt._lazy import jax, ocp
from epochckpt._text import readable
from epochckpt._units import several
from epochckpt.errors import say
from epochckpt.format import ArrayItem, DataFile, EpochRecord, ItemRecord, KeyPath, checksums
from epochckpt.format import paths as layout
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import ocdbt
from epochckpt.orbax.steps import COMMIT, array_key

_TEXT = "string"
_BARE_PATH: KeyPath = (("k", "checkpoint"),)  # what Orbax's array handler calls its array; other handlers: nothing

METRICS_FILE = "metrics/metrics"  # where the view of an epoch has its metrics
ALIAS_FILE = f"{layout.DEFAULT_ITEM}/{layout.JSON_FILE}"  # where the view of an epoch has aliases
_COMMITTED_BY_US = b"epochckpt committed this epoch.\n"  # see orbax.steps: so it is never taken for one of Orbax's
_MAX_NOTED = 100  # leaves that a record names as unsupported
_FEW = 3
_MAX_SHARDING_BYTES = 16 * 2**20  # of an item: beyond that they name no devices, and Orbax takes them in JAX's order
MAX_ENTRIES = 250_000
"""Items whose index would have more entries get no view: the first commit would wait more than 2 s for it."""

_EMPTY = {"none": "None", "node": "None", "dict": "Dict", "list": "List", "tuple": "Tuple"}
_TYPES = {"jax": "jax.Array", "prng": "jax.Array", "numpy": "np.ndarray", "scalar": "scalar"}
_KEY_TYPES = {"k": 2, "a": 2, "s": 1, "f": 1}  # Orbax's KeyType: DICT and SEQUENCE
_ZARR_DTYPES = frozenset(  # those of ours that TensorStore's zarr knows
    ["bool", "int2", "int4", "bfloat16", "float4_e2m1fn"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "complex64", "complex128"]
    + [f"float8_{kind}" for kind in ("e3m4", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
)


@functools.cache
def _json_handler() -> str:
    return ocp.handlers.JsonCheckpointHandler.typestr()


@functools.cache
def _array_handler() -> str:
    return ocp.handlers.ArrayCheckpointHandler.typestr()


@functools.cache
def _tree_handler() -> str:
    return ocp.handlers.PyTreeCheckpointHandler.typestr()


@functools.cache
def _key_handlers() -> Mapping[str, str]:
    """Handlers that keep arrays one folder deeper, beside a JSON file, and the folder."""
    return {
        ocp.handlers.JaxRandomKeyCheckpointHandler.typestr(): "jax_random_key",
        ocp.handlers.NumpyRandomKeyCheckpointHandler.typestr(): "np_random_key",
    }


Run = Callable[[list[Callable[[], None]]], None]  # runs calls, in parallel if it likes; raises the first error

_Scalars = Mapping[int, tuple[str, bytes] | None]
"""(dtype, bytes) of an item's Python values by leaf number; None for those that Orbax cannot have."""


@dataclasses.dataclass
class View:
    """What lies in an epoch's folder for Orbax's sake; paths are relative to it."""

    folders: list[str] = dataclasses.field(default_factory=list)  # to be made, in this order
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)  # content by path
    links: dict[str, str] = dataclasses.field(default_factory=dict)  # target by path
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # item by other name, as a link in a file system
    node_links: dict[str, str] = dataclasses.field(default_factory=dict)  # the same; each node makes its own
    copies: dict[str, str] = dataclasses.field(default_factory=dict)  # in an object store: see `copies`
    # Reasons by leaf name, by item; the leaf name `*` stands for the whole item.
    unsupported: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


class Views:
    """Builds the views of one manager's epochs; what does not change from epoch to epoch is built once."""

    def __init__(self, max_entries: int | None = None) -> None:
        self._known: dict[str, _ItemView] = {}
        self._said: set[tuple[str, str]] = set()  # items, and the messages already logged for them
        self._max_entries = max_entries

    def note(self, record: EpochRecord) -> tuple[View | None, EpochRecord]:
        """The view of an epoch that is about to be committed, or None, and the record with the note of it.

        What stock Orbax will not see is logged, for the first such epoch.
        """
        try:
            view = self.build(record)
        except Exception as error:  # Orbax's form cannot take it: the epoch itself is not in danger
            if self._is_new("*", say(error)):
                logging.exception("checkpoint %d: stock Orbax will not be able to read it", record.epoch)
            return None, dataclasses.replace(record, orbax_unsupported={"*": {"*": say(error)}}, orbax_view=None)
        for item, leaves in view.unsupported.items():
            text = "item %s: stock Orbax will not see %d of its leaves: %s"
            level = logging.INFO if record.items[item].kind == "node" else logging.WARNING  # that goes without saying
            if self._is_new(item, few(leaves)):
                logging.log(level, text, item, len(leaves), few(leaves))
        files = {path: (len(data), checksums.digest(data)) for path, data in view.files.items()}
        return view, dataclasses.replace(record, orbax_unsupported=view.unsupported, orbax_view=files)

    def _is_new(self, item: str, what: str) -> bool:
        """Whether this has not been logged yet; a long run would repeat it with every commit."""
        known = (item, what) in self._said
        self._said.add((item, what))
        return not known

    def build(self, record: EpochRecord, *, beside_nodes: bool = True) -> View:
        """The view of an epoch, `beside_nodes`: beside the nodes' folders.

        Orbax takes every folder for an item unless it is told which to restore. So a node is shown as the JSON item
        that its record is, through a link of its own.
        """
        view = View()
        handlers = {}
        for number, node in enumerate(record.nodes if beside_nodes else ()):
            at = f"{node.folder}/{layout.JSON_FILE}"
            if record.objects:
                handlers[node.folder] = _json_handler()
                view.files[at] = _stand_in({"node": node.name, "see": record.path(number)})
            elif not any(f.name and f.item == layout.JSON_FILE for f in node.files):  # that link's name is taken
                handlers[node.folder] = _json_handler()
                view.node_links[at] = layout.NODE_RECORD
        for name, item in record.items.items():
            handler = item.handler
            lost = ""
            if item.kind == "files":
                _add_files(view, record, name)
            elif item.arrays is None:
                lost = "it differs per node, which Orbax has no form for"
            else:
                lost = self._add_arrays(view, record, name, item, item.arrays)
                if item.arrays.is_bare and not _is_array_item(item):
                    handler = _tree_handler()  # in Orbax 0.11.33 the standard one reads no such item without a target
            if lost:
                view.unsupported[name] = {"*": lost}
                if record.objects and item.kind != "files":  # its data files are in a folder that Orbax sees
                    handlers[name] = _json_handler()
                    view.files[f"{name}/{layout.JSON_FILE}"] = _stand_in({"item": name, "not for Orbax": lost})
            else:
                handlers[name] = handler
        if beside_nodes and record.default_item and not record.objects:
            _add_aliases(view, handlers, {node.folder for node in record.nodes})
        if record.metrics is not None:
            view.folders.append("metrics")
            view.files[METRICS_FILE] = json.dumps(record.metrics).encode()
            handlers["metrics"] = _json_handler()
        step = {
            "item_handlers": handlers,
            "metrics": record.metrics or {},
            "performance_metrics": {},
            "init_timestamp_nsecs": record.started_ns,
            "commit_timestamp_nsecs": record.committed_ns,
            "custom_metadata": dict(record.custom_metadata),
        }
        view.files["_CHECKPOINT_METADATA"] = json.dumps(step).encode()
        view.files[COMMIT] = _COMMITTED_BY_US if beside_nodes else b"The checkpoint was committed.\n"
        view.copies = copies(record) if record.objects else {}
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
            if reason := _inexpressible(item, arrays, self._max_entries or MAX_ENTRIES):
                return reason
            known = self._known[name] = _ItemView(key, record, name, item, arrays, scalars)
        unsupported = known.unsupported
        if not known.tree:
            more = f" and {len(unsupported) - _FEW} more" if len(unsupported) > _FEW else ""
            nothing = f"Orbax has no form for any of its leaves: {few(unsupported)}{more}"
            return nothing if unsupported else "it has no leaves"
        kept = {i: (known.names[i], s) for i, s in scalars.items() if s and i in known.names}
        fresh = {_key(path, "0"): s[1] for path, s in kept.values() if s[0] != _TEXT}
        token = bytes.fromhex(checksums.digest(f"{record.save_id} {name}".encode()))
        files = {**known.index.files(fresh, token, record.committed_ns, _moved(record)), **known.files}
        strings = {path: values[i] for i, (path, s) in kept.items() if s[0] == _TEXT}
        if strings:
            files["_strings.json"] = _json(strings)
        base = _base(name, item)
        view.folders.append(name)
        if item.handler in _key_handlers():
            view.folders += [base, f"{base}_metadata"]
            view.files[f"{base}_metadata/{layout.JSON_FILE}"] = _json(_key_metadata(arrays, item.handler))
        view.folders.append(f"{base}/array_metadatas")
        view.files.update({f"{base}/{path}": data for path, data in files.items()})
        if record.objects:
            view.files[f"{name}/{COMMIT}"] = _COMMITTED_BY_US  # Orbax asks for it where it is given an item's path
        else:
            view.links.update(dict(link_in(base, node) for node in sorted(known.nodes)))
        if unsupported:
            named = dict(list(unsupported.items())[:_MAX_NOTED])  # the record stays small
            if more := len(unsupported) - len(named):
                named["*"] = f"and {several(more, 'leaf', 'leaves')} more"
            view.unsupported[name] = named
        return ""


def _base(name: str, item: ItemRecord) -> str:
    """The folder of an item's database."""
    return f"{name}/{_key_handlers()[item.handler]}" if item.handler in _key_handlers() else name


def bases(items: Mapping[str, ItemRecord], files: Iterable[DataFile]) -> list[str]:
    """The folders of the databases that point into a node's data files, as a rule: see `link_in`."""
    named = {file.item for file in files if file.data_start}
    found = [(_base(name, item), item, item.arrays) for name, item in items.items() if name in named]
    return [base for base, item, arrays in found if arrays and not _inexpressible(item, arrays, MAX_ENTRIES)]


def link_in(base: str, node: str) -> tuple[str, str]:
    """The link to a node's folder in the folder of a database, and its target."""
    return f"{base}/{node}", f"../{'../' * base.count('/')}{node}"


def _add_files(view: View, record: EpochRecord, name: str) -> None:
    """Adds what handlers wrote: one link per file."""
    folders = {name}
    for number, node in enumerate(record.nodes):
        for file in (f for f in node.files if f.item == name):
            parents = layout.parents(file.path)
            folders.update(parents)
            if not record.objects:
                view.links[file.path] = f"{'../' * len(parents)}{record.path(number, file)}"
    view.folders += sorted(folders)  # parents first


def _add_aliases(view: View, handlers: dict[str, str], nodes: Container[str]) -> None:
    """Adds the other names of an unnamed tree. Orbax v0, asked for all items, reads the small JSON in their place."""
    item = layout.DEFAULT_ITEM
    if ALIAS_FILE not in view.links and f"{item}/_METADATA" in view.files:
        view.aliases = {name: item for name in layout.UNNAMED if name != item and name not in nodes}
        handlers.update(dict.fromkeys(view.aliases, _json_handler()))
        view.files[ALIAS_FILE] = _stand_in({"item": item, "also called": ", ".join(view.aliases)})


def copies(record: EpochRecord) -> dict[str, str]:
    """In place of links, in an object store: the files' originals, by path; all paths are in the epoch's folder.

    They are what handlers wrote, and the data files of random keys, whose database lies deeper than other items'.
    """
    found = {}
    for number, node in enumerate(record.nodes):
        for file in node.files:
            item = record.items[file.item]
            original = record.path(number, file)
            if item.kind == "files":
                found[file.path] = original
            elif item.kind == "arrays" and item.handler in _key_handlers():
                found[original.replace("/", f"/{_key_handlers()[item.handler]}/", 1)] = original
    return found


def _moved(record: EpochRecord) -> Callable[[str], str]:
    """Where a node's data file lies, as seen from the database of its item; `<node>/<file>` in a file system."""

    def in_attempt(path: str) -> str:
        node, _, file = path.partition("/")
        return layout.join(layout.part_folder(node, record.save_id), file)

    return in_attempt if record.objects else str


def _stand_in(content: Mapping[str, str]) -> bytes:
    """What Orbax reads, as an item of JSON, in a folder that holds nothing for it."""
    return _json({"format": layout.FORMAT, **content})


def _inexpressible(item: ItemRecord, arrays: ArrayItem, max_entries: int) -> str | None:
    """Why Orbax can be given nothing of an item, if so."""
    # at most, a value's metadata and its chunks
    entries = sum(1 + (len(arrays.grids[leaf.grid].holders) if leaf.grid >= 0 else 1) for leaf in arrays.leaves)
    if entries > max_entries:
        instead = (
            f"an export takes {ocdbt.MAX_ENTRIES:,}, and with `include` it writes whole arrays, of two entries each"
        )
        return f"its index would have {entries:,} entries, more than {max_entries:,}; {instead}"
    if not arrays.is_bare:
        return None
    kind = arrays.leaves[0].kind
    known = _TYPES.keys() | {"bool", "int", "float"}
    if not _is_array_item(item):
        known |= {"str"}
    return None if kind in known else f"Orbax has no form for a {kind} alone"


def _is_array_item(item: ItemRecord) -> bool:
    """Whether Orbax's handler of the item takes a single array, and no tree."""
    return item.handler in _key_handlers() or item.handler == _array_handler()


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
        self.key = key
        self.arrays = arrays
        self.typed = item.handler not in _key_handlers()  # PRNG keys come back as such, else as their data
        self.unsupported: dict[str, str] = {}
        self.entries: dict[bytes, bytes | ocdbt.Piece] = {}
        self.tree: dict[str, Any] = {}
        self.metadatas: list[Any] = []
        self.nodes: set[str] = set()
        alone = _BARE_PATH if _is_array_item(item) else ()
        self.paths = {i: leaf.path or alone for i, leaf in enumerate(arrays.leaves)}
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
        count = collections.Counter(array_key(name, "") for name in found.values())
        out = {}
        for i, name in found.items():
            leaf = self.arrays.leaves[i]
            if count[array_key(name, "")] > 1:
                self.unsupported[leaf.name] = f"Orbax would call it and another leaf {name!r}"
            elif any("\ud800" <= c <= "\udfff" for c in name):
                self.unsupported[leaf.name] = "Orbax cannot name it"
            else:
                out[i] = name
        return out

    def _add(self, number: int, name: str, scalar: tuple[str, bytes] | None) -> None:
        """Adds a leaf, without the places of its chunks."""
        leaf = self.arrays.leaves[number]
        if leaf.kind in _EMPTY:
            self._record(number, _EMPTY[leaf.kind], skip=True)
        elif leaf.kind == "str" and scalar is None:
            self.unsupported[leaf.name] = "Orbax cannot store a lone surrogate"
        elif leaf.kind == "str" and ("/" in name or "~" in name):
            self.unsupported[leaf.name] = "Orbax finds a text by a JSON pointer, which has other uses for / and ~"
        elif leaf.kind == "str":
            self._record(number, _TEXT)
        elif scalar is not None:
            self._record(number, "scalar")
            self.entries[_key(name, ".zarray")] = _zarray((), (), scalar[0])
            self.entries[_key(name, "0")] = scalar[1]
        elif leaf.kind not in _TYPES or leaf.dtype is None:
            self.unsupported[leaf.name] = f"Orbax has no type for this {leaf.kind}"
        elif leaf.dtype.name not in _ZARR_DTYPES:
            self.unsupported[leaf.name] = f"Orbax cannot store {leaf.dtype.name}"
        elif not math.prod(leaf.shape):
            self.unsupported[leaf.name] = "Orbax cannot store arrays without elements"
        elif leaf.kind in ("jax", "prng") and leaf.path and not name:
            self.unsupported[leaf.name] = "Orbax 0.11.33 finds no sharding for an array with an empty name"
        else:
            chunk = self.arrays.cell_shape(number)
            dtype = leaf.dtype
            zarr_dtype = dtype.str if dtype.kind in "biufc" and dtype.isbuiltin == 1 else dtype.name
            self.entries[_key(name, ".zarray")] = _zarray(leaf.shape, chunk, zarr_dtype)
            is_jax = leaf.kind in ("jax", "prng")
            self._record(number, _TYPES[leaf.kind], chunk if is_jax else None)
            if is_jax:
                ext = {"random_key_impl": leaf.impl} if leaf.kind == "prng" and self.typed else None
                row = {"param_name": name, "write_shape": chunk, "chunk_shape": chunk, "ext_metadata": ext}
                self.metadatas.append({"array_metadata": row})

    def _record(self, number: int, kind: str, shape: tuple[int, ...] | None = None, *, skip: bool = False) -> None:
        written = {} if shape is None else {"write_shape": shape}
        value = {"value_type": kind, "skip_deserialize": skip, **written}
        self.tree.update([_row(self.paths[number], value)])

    def _locate(self, record: EpochRecord, name: str) -> None:
        """Adds where the chunks of the arrays lie."""
        arrays = self.arrays
        arrayed = {i: name for i, name in self.names.items() if _key(name, ".zarray") in self.entries}
        for node, entry in enumerate(record.nodes):
            files = [f for f in entry.files if f.item == name and f.data_start]
            ends = np.cumsum([f.cells for f in files]).tolist()
            for file, part in zip(files, arrays.cut(arrays.owned(node), ends), strict=True):
                path = layout.join(entry.folder, file.path)
                starts = (part.offsets[:-1] + file.data_start).tolist()
                for leaf, cell, start in zip(part.leaves.tolist(), part.cells.tolist(), starts, strict=True):
                    if leaf in arrayed:
                        key = _key(arrayed[leaf], _chunk(arrays, leaf, cell))
                        self.entries[key] = (path, start, arrays.cell_bytes(leaf))
                        self.nodes.add(entry.folder)

    def _shardings(self, devices: bool = True) -> dict[str, str]:
        """Orbax's form of the recorded shardings, by parameter name in base64; without those that are nonsense."""
        text_of = functools.cache(lambda number: sharding_text(self.arrays, self.arrays.shardings[number], devices))
        found = {}
        for leaf, name in ((self.arrays.leaves[number], name) for number, name in self.names.items()):
            if leaf.kind in ("jax", "prng") and leaf.sharding >= 0:
                with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                    if text := text_of(leaf.sharding):
                        found[base64.urlsafe_b64encode(name.encode()).decode()] = text
        return self._shardings(False) if devices and sum(map(len, found.values())) > _MAX_SHARDING_BYTES else found


def _key(name: str, file: str) -> bytes:
    """The key, in the database, of a file of the array of a parameter."""
    return array_key(name, file).encode()


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


def sharding_text(arrays: ArrayItem, row: Any, devices: bool = True) -> str | None:
    """Orbax's form of one recorded sharding, with or without its `devices`; None where its only device is not there."""
    if "device" in row:
        names = [str(d) for d in jax.devices() if (d.platform, d.id) == (row["platform"], row["device"])]
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": names[0]}) if names else None
    mesh = arrays.meshes[row["mesh"]]
    fields = {
        "sharding_type": "NamedSharding",
        "shape": mesh["shape"],
        "axis_names": mesh["axes"],
        "axis_types": [str(jax.sharding.AxisType[t]) for t in mesh["axis_types"]],
        "partition_spec": row["spec"],
    }
    if devices:
        ids = np.array([{"id": d} for d in mesh["devices"]], dtype=object)
        fields["device_mesh"] = {"mesh": ids.reshape(mesh["shape"]).tolist()}
    return json.dumps(fields)


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
