"""The array items of steps that stock Orbax wrote, read without Orbax's handlers, which start jax's backends.

Orbax keeps the tree of an item as JSON: `_METADATA` (keys and types), `array_metadatas` (which arrays are typed PRNG
keys), `_sharding`, `_strings.json`. The arrays are zarr (version 2 or 3), each below its name, in an OCDBT database or
in plain folders (https://google.github.io/tensorstore/driver/zarr/index.html). Steps that are older than `_METADATA`
have their tree in a msgpack file `checkpoint`, in which `PLACEHOLDER://<name>` stands for an array in a folder.

Orbax writes every key of a tree as text. A leaf's path keeps that text; its name is the one that the leaf would have
with us, where a key that looks like a number is a number, as in the states of NNX.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from epochckpt import _text
from epochckpt.errors import (
    AccessError,
    DamagedError,
    EpochCheckpointError,
    FormatError,
    StorageError,
    UnsupportedError,
    is_passing,
    unreadable,
)
from epochckpt.format import ArrayItem, Box, ItemRecord, KeyPath, Leaf, flax_msgpack, grid, paths
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import marks, steps
from epochckpt.storage import Store
from epochckpt.storage.object_store import errno_in

UNKNOWN = "unknown"
"""Kind of a leaf that cannot be looked into: it is damaged, or a user's type handler wrote it."""

_EMPTY = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}  # as Orbax restores them
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_PLACEHOLDER = "PLACEHOLDER://"
_BARE_PATH, _BARE_HANDLER = (("k", "checkpoint"),), "ArrayCheckpointHandler"  # what that handler calls its only leaf
_CACHE_BYTES = 2**32  # bound on decoded chunks that are kept while an array is read through
_INDEX_BYTES = 2**27  # bound on what is kept of the index of an OCDBT database, which is read once then
_SLACK_BYTES = 2**24  # of the cache: entries take a little more than their chunks
_TOLERATED = (ValueError, IndexError, RecursionError, OSError)  # what tensorstore raises


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf as Orbax stored it.

    Attributes:
        leaf: in our terms; `shape` and `dtype` of typed keys are those of their data.
        param: Orbax's name for it.
        write_shape: of the pieces that devices held; None where Orbax does not say.
        value: of leaves that lie in the msgpack file; an array of the mapped file. Of a leaf that only a type handler
            of a user's can read: Orbax's name of the type.
        here: whether `value` is meant.
        problem: why it cannot be looked into; empty otherwise.
    """

    leaf: Leaf
    param: str
    write_shape: tuple[int, ...] | None = None
    value: Any = None
    here: bool = False
    problem: str = ""


class OrbaxItem:
    """One array item of a step; its metadata is read now, arrays later.

    Args:
        store: the directory.
        at: the item's folder in it.
        epoch: the step.
        handler: that Orbax recorded; empty if it did not.
        bare: the caller knows that the item is a single array, as `ArrayCheckpointHandler` writes it.

    Raises:
        DamagedError: its metadata is not whole.
        FormatError: its metadata is not what Orbax writes.
    """

    def __init__(self, store: Store, at: str, epoch: int, handler: str = "", bare: bool = False):
        self._store, self._at, self._epoch = store, at, epoch
        self._folder = os.path.join(store.root, at)
        self.custom_metadata: Any = None
        self._fill = self._zarr3 = False
        self._context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": _INDEX_BYTES}})
        self._ocdbt = store.exists(paths.join(at, marks.OCDBT))
        self._cached: tuple[str, ts.TensorStore | None] = ("", None)
        try:
            marks.check_files(store, at)
            if store.exists(paths.join(at, marks.TREE_RECORD)):
                rows = self._recorded(steps.tree_record(store, at, epoch))
            else:
                rows = self._aggregated()
        except EpochCheckpointError:
            raise
        except OSError as error:
            raise unreadable(at, error) from error
        if (bare or handler.endswith(_BARE_HANDLER)) and [row.leaf.path for row in rows] == [_BARE_PATH]:
            leaf = dataclasses.replace(rows[0].leaf, path=(), name=tree_lib.leaf_name(()))
            rows = [dataclasses.replace(rows[0], leaf=leaf)]
        self.leaves: tuple[StoredLeaf, ...] = tuple(rows)

    @functools.cached_property
    def by_name(self) -> dict[str, StoredLeaf]:
        """The leaves by public name, and by that of their paths."""
        numbers = _text.either([row.leaf.name for row in self.leaves])
        return {name: self.leaves[number] for name, number in numbers.items()}

    @functools.cached_property
    def shardings(self) -> dict[str, Mapping[str, Any]]:
        """How arrays lay on devices, as Orbax recorded it, by Orbax's name; empty where it did not."""
        found, _ = marks.read_object(self._store, paths.join(self._at, "_sharding"))
        out: dict[str, Mapping[str, Any]] = {}
        for key, text in (found or {}).items():
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # one is not worth an error
                row = json.loads(text)
                if isinstance(row, dict):
                    out[base64.urlsafe_b64decode(key).decode()] = row
        return out

    def record(
        self,
        handler: str = "",
        target: Any = None,
        reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> ItemRecord:
        """The item as our records would have it; `Leaf.sharding` is the leaf's own number.

        Args:
            handler: that Orbax recorded.
            target: leaves get the names that they have in this tree, where a key may be a number or text.
            reading: surrounds each read of a value that is no array.
        """
        pairs = [] if target is None else tree_lib.flatten(target)[0]
        names = {_as_text(path): tree_lib.leaf_name(path) for path, _ in pairs}
        leaves = []
        for row in self.leaves:
            kind = row.leaf.kind if row.leaf.dtype is not None else row.leaf.kind.removeprefix("long")
            leaves.append(
                dataclasses.replace(row.leaf, kind=kind, name=names.get(_as_text(row.leaf.path), row.leaf.name))
            )
        arrays = ArrayItem("", tuple(leaves), ())
        return ItemRecord("arrays", handler, arrays, _Values(self, reading), self.custom_metadata)

    def check(self, target: Any = None) -> None:
        """Raises DamagedError or UnsupportedError if a leaf cannot be looked into.

        Args:
            target: only leaves that this tree has are asked for; None: all.
        """
        asked = None if target is None else {_as_text(p) for p, x in tree_lib.flatten(target)[0] if x is not ...}
        for row in self.leaves:
            if asked is None or _as_text(row.leaf.path) in asked:
                self._check(row)

    def check_whole(self) -> None:
        """Raises DamagedError if a leaf is damaged; one that only a user's type handler can read is not."""
        for row in self.leaves:
            if row.problem:
                self._check(row)

    # -- metadata ------------------------------------------------------------------------------------------------

    def _recorded(self, tree: Mapping[str, Any]) -> list[StoredLeaf]:
        """The leaves that `_METADATA` names, in its order."""
        self.custom_metadata = tree.get("custom_metadata")
        self._zarr3 = bool(tree.get("use_zarr3"))
        self._ocdbt = self._ocdbt if tree.get("use_ocdbt") is None else bool(tree["use_ocdbt"])
        self._fill = not tree.get("store_array_data_equal_to_fill_value")
        try:
            entries = [_entry(row) for row in tree["tree_metadata"].values()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = paths.join(self._at, marks.TREE_RECORD)
            raise FormatError(where, f"is not what Orbax writes there: {error!r}") from None
        inner = {path[:depth] for path, _ in entries for depth in range(len(path))}
        entries = [(path, value) for path, value in entries if path not in inner]  # left over from partial saves
        params = [".".join(str(key) for _, key in path) for path, _ in entries]
        plain = {*_EMPTY, "string"}  # a user's type handler may write arrays, too
        arrays = [p for p, (_, v) in zip(params, entries, strict=True) if v["value_type"] not in plain]
        found = self._zarr_metadata(arrays)
        impls = steps.prng_impls(self._store, self._at)
        rows = []
        for (path, value), param in zip(entries, params, strict=True):
            array = found.get(param)
            written, impl = value["value_type"], impls.get(param)
            problem = array if isinstance(array, str) and written in _ARRAYS else ""
            shape, dtype = array if isinstance(array, tuple) else ((), None)
            if written in _EMPTY:
                kind = tree_lib.leaf_kind(_EMPTY[written]) or UNKNOWN
            elif written == "string":
                kind = "str"
            elif dtype is None:
                kind = UNKNOWN
            elif written == "scalar":
                kind, dtype = {"b": "bool", "i": "int", "u": "int", "c": "complex"}.get(dtype.kind, "float"), None
            else:
                kind = "prng" if impl is not None else "numpy" if written == "np.ndarray" else "jax"
            leaf = Leaf(path, _name(path), kind, dtype, () if dtype is None else shape, sharding=len(rows), impl=impl)
            rows.append(
                StoredLeaf(leaf, param, value["write_shape"], written if kind == UNKNOWN else None, problem=problem)
            )
        return rows

    def _zarr_metadata(self, params: Sequence[str]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | str]:
        """(shape, dtype) of arrays by Orbax's name, or what is wrong with them."""
        if not params:
            return {}
        file = "zarr.json" if self._zarr3 else ".zarray"
        out: dict[str, tuple[tuple[int, ...], np.dtype[Any]] | str] = {}
        with self._tensorstore(""):
            kv = ts.KvStore.open(self._kvstore(), context=self._context).result()
            reads = [kv.read(f"{param}/{file}") for param in params]
        for param, read in zip(params, reads, strict=True):
            try:
                with self._tensorstore(""):
                    got = read.result()
            except DamagedError as error:
                out[param] = f"cannot be read: {param}/{file}: {str(error.__cause__)[:300]}"
                continue
            try:
                if got.state != "value":
                    out[param] = f"is missing: {param}/{file} is not there"
                    continue
                row = json.loads(got.value)
                shape = tuple(row["shape"])
                dtype = _dtype(row["data_type"] if self._zarr3 else row["dtype"])
                if not all(type(d) is int and d >= 0 for d in shape) or len(shape) > 32:
                    raise ValueError(f"shape {shape}")
                if not tree_lib.fits(shape, dtype):
                    raise ValueError(f"shape {shape} is beyond what NumPy can have")
                out[param] = shape, dtype
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
                out[param] = f"cannot be read: {param}/{file}: {str(error)[:300]}"
        return out

    def _aggregated(self) -> list[StoredLeaf]:
        """The leaves of the msgpack file, in its order."""
        path = paths.join(self._at, steps.AGGREGATE)
        if not self._store.exists(path):
            raise DamagedError(paths.join(self._at, marks.TREE_RECORD), "is missing; expected the tree of the item")
        tree = flax_msgpack.load(os.path.join(self._folder, steps.AGGREGATE))
        pairs, _ = tree_lib.flatten(tree)
        away = {p: v.removeprefix(_PLACEHOLDER) for p, v in pairs if isinstance(v, str) and v.startswith(_PLACEHOLDER)}
        found = self._zarr_metadata(list(away.values()))
        rows = []
        for number, (path, value) in enumerate(pairs):
            param, array = away.get(path, ""), found.get(away.get(path, ""))
            if isinstance(array, str):
                leaf = Leaf(path, _name(path), UNKNOWN, sharding=number)
            elif array is not None:
                leaf = Leaf(path, _name(path), "jax", array[1], array[0], sharding=number)
            else:
                kind = tree_lib.leaf_kind(value) or UNKNOWN
                dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
                leaf = Leaf(path, _name(path), kind, dtype, shape, sharding=number)
            problem = array if isinstance(array, str) else ""
            rows.append(StoredLeaf(leaf, param, value=None if param else value, here=not param, problem=problem))
        return rows

    # -- values --------------------------------------------------------------------------------------------------

    def value(self, row: StoredLeaf) -> Any:
        """A leaf as a NumPy array or Python value; typed keys as their data.

        Raises:
            DamagedError: it cannot be read.
            UnsupportedError: only a user's type handler can read it.
        """
        leaf = row.leaf
        self._check(row)
        if row.here:
            return np.asarray(row.value) if isinstance(row.value, np.ndarray) else row.value
        if leaf.kind in tree_lib.EMPTY_KINDS:
            return tree_lib.empty_value(leaf.kind)
        if leaf.kind == "str":
            return self._text(row)
        with self._tensorstore(leaf.name):
            data = self._open(row).read().result()
        data = np.asarray(data)
        if leaf.dtype is not None:
            return data
        if data.ndim:
            raise DamagedError(self._at, f"has the shape {list(data.shape)}; expected one number", leaf.name)
        return data.item()

    def boxes(self, row: StoredLeaf, boxes: Iterable[Box]) -> Iterator[np.ndarray]:
        """Parts of an array, one after another; decoded chunks are kept as far as the next part needs them.

        Args:
            row: the array.
            boxes: the parts, in C order.

        Raises:
            DamagedError: it cannot be read.
        """
        self._check(row)
        if row.here:
            for box in boxes:
                yield np.asarray(row.value)[grid.slices(box)]
            return
        for box in boxes:
            with self._tensorstore(row.leaf.name):
                is_whole = grid.box_shape(box) == row.leaf.shape
                array = self._open(row) if is_whole else self._open_cached(row)
                data = array[grid.slices(box)].read().result()
            yield np.asarray(data)

    def _open_cached(self, row: StoredLeaf) -> ts.TensorStore:
        """An array that keeps the decoded chunks of one row of them; the last one stays open for the next part."""
        param, array = self._cached
        if array is None or param != row.param:
            chunks: Sequence[Any] = self._open(row).chunk_layout.read_chunk.shape or ()
            deep = math.prod(row.leaf.shape[1:]) * (chunks[0] or 1 if chunks else 1)
            array = self._open(row, min(deep * np.dtype(row.leaf.dtype).itemsize + _SLACK_BYTES, _CACHE_BYTES))
            self._cached = row.param, array
        return array

    def _check(self, row: StoredLeaf) -> None:
        if row.problem:
            raise steps.half_written(self._epoch, self._at, row.problem, row.leaf.name)
        if row.leaf.kind == UNKNOWN:
            raise UnsupportedError(
                f"leaf {row.leaf.name!r} is of the type {str(row.value)[:80]!r}: only the type handler that wrote it, "
                "which Orbax does not name, can read it"
            )

    def _text(self, row: StoredLeaf) -> str:
        path = paths.join(self._at, "_strings.json")
        node: Any = self._strings
        for token in row.param.split("/"):  # a JSON pointer, as Orbax makes it of the name
            token = token.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or token not in node:
                raise DamagedError(path, "does not hold its text", row.leaf.name)
            node = node[token]
        return str(node)

    @functools.cached_property
    def _strings(self) -> Mapping[str, Any]:
        path = paths.join(self._at, "_strings.json")
        found, problem = marks.read_object(self._store, path)
        if found is None:
            raise DamagedError(path, problem or "is missing; expected the strings of the item")
        return found

    def _kvstore(self, param: str = "") -> dict[str, Any]:
        files = {"driver": "file", "path": f"{self._folder}/"}
        if self._ocdbt:
            return {"driver": "ocdbt", "base": files, "path": param, "cache_pool": "cache_pool#ocdbt"}
        return {**files, "path": f"{self._folder}/{param}"}

    def _open(self, row: StoredLeaf, kept: int = 0) -> ts.TensorStore:
        spec = {
            "driver": "zarr3" if self._zarr3 else "zarr",
            "kvstore": self._kvstore(f"{row.param}/"),
            "fill_missing_data_reads": self._fill,  # Orbax once left out what equals the fill value
            "recheck_cached_data": False,
            "cache_pool": {"total_bytes_limit": kept},  # of decoded chunks
        }
        found = ts.open(spec, open=True, read=True, context=self._context).result()
        if row.leaf.dtype is not None and (tuple(found.shape), found.dtype.numpy_dtype) != (
            row.leaf.shape,
            row.leaf.dtype,
        ):
            raise ValueError(f"it is {found.dtype.name}{list(found.shape)} now")
        return found

    @contextlib.contextmanager
    def _tensorstore(self, name: str) -> Generator[None]:
        """Says what an error of tensorstore's means."""
        try:
            yield
        except EpochCheckpointError:
            raise
        except NotImplementedError as error:
            raise UnsupportedError(f"{self._at}: {str(error)[:500]}") from error
        except _TOLERATED as error:
            if "PERMISSION_DENIED" in str(error):
                raise AccessError(f"{self._at}: {str(error)[:500]}") from error
            code = error.errno if isinstance(error, OSError) else errno_in(error)
            if code and is_passing(found := OSError(code, str(error)[:500])):
                raise StorageError(self._at, found) from error
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            problem = f"cannot be read: {str(error)[:500]}"
            raise steps.half_written(self._epoch, self._at, problem, name or None) from error


class _Values(Mapping[int, Any]):
    """The JSON forms of an item's Python leaves by leaf number, each read when it is asked for."""

    def __init__(self, item: OrbaxItem, reading: Callable[[], contextlib.AbstractContextManager[None]]):
        self._item, self._reading = item, reading

    def __getitem__(self, number: int) -> Any:
        with self._reading():
            return tree_lib.value_to_json(self._item.value(self._item.leaves[number]))

    def __iter__(self) -> Iterator[int]:
        return (i for i, row in enumerate(self._item.leaves) if row.leaf.kind in tree_lib.VALUE_KINDS)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _as_text(path: KeyPath) -> tuple[str, ...]:
    """A key path as Orbax writes it."""
    return tuple(str(key) for _, key in path)


def _name(path: KeyPath) -> str:
    """The name of the leaf at a path, in which a key that looks like a number is one."""
    return tree_lib.leaf_name(tuple(("k", int(key)) if k == "k" and _is_number(key) else (k, key) for k, key in path))


def _is_number(key: Any) -> bool:
    return isinstance(key, str) and key.isdecimal() and str(int(key)) == key


def _entry(row: Mapping[str, Any]) -> tuple[KeyPath, Mapping[str, Any]]:
    """(key path, value metadata) of one leaf; keys of dicts are text."""
    path = tuple(
        ("s", int(key["key"])) if key["key_type"] == 1 else ("k", str(key["key"])) for key in row["key_metadata"]
    )
    value = row["value_metadata"]
    shape = value.get("write_shape")
    if shape is not None and not all(type(d) is int and d >= 0 for d in shape):
        raise ValueError(f"write_shape {shape}")
    return path, {"value_type": str(value["value_type"]), "write_shape": None if shape is None else tuple(shape)}


def _dtype(name: Any) -> np.dtype[Any]:
    """The dtype that zarr calls by this name."""
    if isinstance(name, str) and name in tree_lib.DTYPES:
        return tree_lib.DTYPES[name]
    found = np.dtype(str(name))
    if found.newbyteorder("=").name not in tree_lib.DTYPES:
        raise ValueError(f"dtype {str(name)[:40]!r}")
    return found.newbyteorder("=")
