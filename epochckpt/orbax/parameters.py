"""The leaves of an item as parameters of Orbax: their names, metadata and chunks in an OCDBT database.

An uncompressed zarr chunk *is* the raw bytes of a cell, so the index of the database points into the nodes' data files.
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
from collections.abc import Container, Mapping
from typing import Any

from epochckpt._lazy import jax, np
from epochckpt.format import ArrayItem, DataFile, EpochRecord, ItemRecord, KeyPath, Leaf, paths
from epochckpt.orbax import ocdbt
from epochckpt.orbax.handler_types import key_folders, takes_array
from epochckpt.orbax.small_files import array_key

TEXT = "string"
MAX_ENTRIES = 250_000
"""Items whose index would have more entries get no view: the first commit would wait more than 2 s for it."""

Scalars = Mapping[int, tuple[str, bytes] | None]
"""(dtype, bytes) of an item's Python values by leaf number; None for those that Orbax cannot have."""

_BARE_PATH: KeyPath = (("k", "checkpoint"),)  # what Orbax's array handler calls its array; other handlers: nothing
_MAX_SHARDING_BYTES = 16 * 2**20  # of an item: beyond that they name no devices, and Orbax takes them in JAX's order
_EMPTY = {"none": "None", "node": "None", "dict": "Dict", "list": "List", "tuple": "Tuple"}
_TYPES = {"jax": "jax.Array", "prng": "jax.Array", "numpy": "np.ndarray", "scalar": "scalar"}
_KEY_TYPES = {"k": 2, "a": 2, "s": 1, "f": 1}  # Orbax's KeyType: DICT and SEQUENCE
_ZARR_DTYPES = frozenset(  # those of ours that TensorStore's zarr knows
    ["bool", "int2", "int4", "bfloat16", "float4_e2m1fn"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "complex64", "complex128"]
    + [f"float8_{kind}" for kind in ("e3m4", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Basis:
    """All that the parameters of an item depend on."""

    arrays: ArrayItem
    places: tuple[tuple[str, tuple[DataFile, ...]], ...]  # the folder of each node, and its data files of the item
    scalar_types: Mapping[int, str | None]
    handler: str
    custom_metadata: Any

    @classmethod
    def of(cls, record: EpochRecord, name: str, arrays: ArrayItem, scalars: Scalars) -> Basis:
        """The basis of an item in one epoch."""
        item = record.items[name]
        files = {node.folder: tuple(file for file in node.files if file.item == name) for node in record.nodes}
        return cls(
            arrays=arrays,
            places=tuple(files.items()),
            scalar_types={number: scalar and scalar[0] for number, scalar in scalars.items()},
            handler=item.handler,
            custom_metadata=item.custom_metadata,
        )

    def is_that_of(self, other: Basis) -> bool:
        """Whether they are the same; epochs of one plan share their `arrays`, which take long to compare."""
        return self.arrays is other.arrays and self._rest() == other._rest()

    def _rest(self) -> tuple[object, ...]:
        return self.places, self.scalar_types, self.handler, self.custom_metadata


def reason_against(item: ItemRecord, arrays: ArrayItem, max_entries: int) -> str | None:
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
    if not takes_array(item.handler):
        known |= {"str"}
    return None if kind in known else f"Orbax has no form for a {kind} alone"


class Parameters:
    """An item's leaves as Orbax's parameters: what stays the same from epoch to epoch while its `basis` does.

    Attributes:
        names: Orbax's name by leaf number, of the leaves that it can name.
        tree: Orbax's tree metadata; empty if it has a form for none of the leaves.
        unsupported: reasons by leaf name.
        nodes: the folders of the nodes that have chunks of the item.
        index: the database.
        files: content by path in the item's folder, without those of the index.
    """

    def __init__(self, basis: Basis, record: EpochRecord, name: str, scalars: Scalars):
        item = record.items[name]
        arrays = basis.arrays
        self.basis = basis
        self.arrays = arrays
        self.typed = item.handler not in key_folders()  # PRNG keys come back as such, else as their data
        self.unsupported: dict[str, str] = {}
        self.entries: dict[bytes, bytes | ocdbt.Piece] = {}
        self.tree: dict[str, Any] = {}
        self.metadatas: list[Any] = []
        self.nodes: set[str] = set()
        alone = _BARE_PATH if takes_array(item.handler) else ()
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
            "_METADATA": to_json(metadata),
            "_sharding": to_json(self._shardings()),
            "array_metadatas/process_0": to_json({"array_metadatas": self.metadatas}),
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
            self._record(number, TEXT)
        elif scalar is not None:
            self._record(number, "scalar")
            self.entries[parameter_key(name, ".zarray")] = _zarray((), (), scalar[0])
            self.entries[parameter_key(name, "0")] = scalar[1]
        elif leaf.kind not in _TYPES or leaf.dtype is None:
            self.unsupported[leaf.name] = f"Orbax has no type for this {leaf.kind}"
        elif leaf.dtype.name not in _ZARR_DTYPES:
            self.unsupported[leaf.name] = f"Orbax cannot store {leaf.dtype.name}"
        elif not math.prod(leaf.shape):
            self.unsupported[leaf.name] = "Orbax cannot store arrays without elements"
        elif leaf.is_jax and leaf.path and not name:
            self.unsupported[leaf.name] = "Orbax 0.11.33 finds no sharding for an array with an empty name"
        else:
            chunk = self.arrays.cell_shape(number)
            dtype = leaf.dtype
            zarr_dtype = dtype.str if dtype.kind in "biufc" and dtype.isbuiltin == 1 else dtype.name
            self.entries[parameter_key(name, ".zarray")] = _zarray(leaf.shape, chunk, zarr_dtype)
            told = self._as_told(leaf)
            self._record(number, _TYPES[told.kind], chunk if told.is_jax else None)
            if told.is_jax:
                ext = {"random_key_impl": leaf.impl} if leaf.kind == "prng" and self.typed else None
                row = {"param_name": name, "write_shape": chunk, "chunk_shape": chunk, "ext_metadata": ext}
                self.metadatas.append({"array_metadata": row})

    def _as_told(self, leaf: Leaf) -> Leaf:
        """A leaf of the kind that Orbax is told.

        An array that each process had becomes a NumPy array: Orbax would put it on the first device of the job, which
        other processes cannot reach.
        """
        is_of_each = leaf.kind == "jax" and self.arrays.is_of_each_process(leaf)
        return leaf._replace(kind="numpy") if is_of_each else leaf

    def _record(self, number: int, kind: str, shape: tuple[int, ...] | None = None, *, skip: bool = False) -> None:
        written = {} if shape is None else {"write_shape": shape}
        value = {"value_type": kind, "skip_deserialize": skip, **written}
        self.tree.update([_row(self.paths[number], value)])

    def _locate(self, record: EpochRecord, name: str) -> None:
        """Adds where the chunks of the arrays lie."""
        arrays = self.arrays
        arrayed = {i: name for i, name in self.names.items() if parameter_key(name, ".zarray") in self.entries}
        for node, entry in enumerate(record.nodes):
            files = [f for f in entry.files if f.item == name and f.data_start]
            ends = np.cumsum([f.cells for f in files]).tolist()
            for file, part in zip(files, arrays.cut(arrays.owned(node), ends), strict=True):
                path = paths.join(entry.folder, file.path)
                starts = (part.offsets[:-1] + file.data_start).tolist()
                for leaf, cell, start in zip(part.leaves.tolist(), part.cells.tolist(), starts, strict=True):
                    if leaf in arrayed:
                        key = parameter_key(arrayed[leaf], _chunk(arrays, leaf, cell))
                        self.entries[key] = (path, start, arrays.cell_bytes(leaf))
                        self.nodes.add(entry.folder)

    def _shardings(self, devices: bool = True) -> dict[str, str]:
        """Orbax's form of the recorded shardings, by parameter name in base64; without those that are nonsense."""
        text_of = functools.cache(lambda number: sharding_text(self.arrays, self.arrays.shardings[number], devices))
        replicated = {"mesh": 0, "spec": []}
        found = {}
        for leaf, name in ((self.arrays.leaves[number], name) for number, name in self.names.items()):
            if leaf.sharding >= 0 and self._as_told(leaf).is_jax:
                with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                    # A key that each process had can be no NumPy array: Orbax is to put it on all devices.
                    everywhere = self.arrays.meshes and self.arrays.is_of_each_process(leaf)
                    text = sharding_text(self.arrays, replicated, devices) if everywhere else text_of(leaf.sharding)
                    if text:
                        found[base64.urlsafe_b64encode(name.encode()).decode()] = text
        return self._shardings(False) if devices and sum(map(len, found.values())) > _MAX_SHARDING_BYTES else found


def parameter_key(name: str, file: str) -> bytes:
    """The key, in the database, of a file of the array of a parameter."""
    return array_key(name, file).encode()


def _row(path: KeyPath, value: Any) -> tuple[str, Any]:
    """An entry of Orbax's tree metadata."""
    keys = [{"key": str(key), "key_type": _KEY_TYPES[entry]} for entry, key in path]
    return str(tuple(k["key"] for k in keys)), {"key_metadata": keys, "value_metadata": value}


def scalar_of(value: Any) -> tuple[str, bytes] | None:
    """(zarr dtype, bytes) of a Python number, as Orbax stores it; (TEXT, nothing) of a text; None where it cannot."""
    if isinstance(value, str):
        return None if any("\ud800" <= c <= "\udfff" for c in value) else (TEXT, b"")
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


def to_json(value: Any) -> bytes:
    """JSON without spaces."""
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
