"""The array items of steps that stock Orbax wrote, read without Orbax's handlers, which start jax's backends.

The tree is JSON: `_METADATA` (keys and types), `array_metadatas` (which arrays are typed PRNG keys), `_sharding`,
`_strings.json`. The arrays are zarr (version 2 or 3), each below its name, in an OCDBT database or in plain folders.
Older steps have it in a msgpack file `checkpoint`, where `PLACEHOLDER://<name>` stands for an array in a folder.
Orbax writes every key as text. A leaf's path keeps that text; in its name a key that looks like a number is a number.
"""

import base64
import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from epochckpt.errors import DamagedError, EpochCheckpointError, StorageError, UnsupportedError, is_passing, unreadable
from epochckpt.format import ArrayItem, Box, ItemKind, ItemRecord, KeyPath, Leaf, flax_msgpack, grid, paths
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import small_files, step_files, steps
from epochckpt.orbax.item_files import TensorFiles
from epochckpt.storage import Store, local_folder

UNKNOWN = "unknown"  # kind of a leaf that cannot be looked into: it is damaged, or a user's type handler wrote it

_EMPTY = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}  # as Orbax restores them
_PLACEHOLDER = "PLACEHOLDER://"
_BARE_HANDLER = "ArrayCheckpointHandler"
_BARE_PATH = (("k", "checkpoint"),)  # that handler's name for its only leaf
_TOLERATED = (ValueError, IndexError, RecursionError, OSError, NotImplementedError)  # what tensorstore raises

_READS = 128  # under way at the same time, as many as Orbax has
_NUMBERS = 1024  # read ahead when one is asked for: they are a few bytes each
_READ_BYTES = 2**31  # bound on the decoded chunks of these reads
_BAND_BYTES = 2**26  # of the bands that an array is read in, if several parts of it share chunks
_CACHE_BYTES = 2**32  # bound on the decoded chunks of one array that are kept for its next part
_SLACK_BYTES = 2**24  # of that cache: entries take a little more than their chunks
_INDEX_BYTES = 2**27  # bound on what is kept of the index of an OCDBT database

_Reading = Callable[[], contextlib.AbstractContextManager[None]]
Part = tuple["StoredLeaf", Box, np.ndarray]  # an array, the box of it that is read, and the buffer for the box
_Done = tuple[Part, EpochCheckpointError | None]


@dataclasses.dataclass(frozen=True)
class ZarrArray:
    """The zarr metadata of one array."""

    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    chunks: tuple[int, ...] = ()  # the shape of the parts that are decoded: inner chunks if there are such
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""  # why it cannot be used


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf as Orbax stored it."""

    number: int  # of the leaf in its item
    leaf: Leaf  # typed keys have the shape and dtype of their data; each leaf has its own sharding, of its number
    param: str  # Orbax's name for it; "" if it is the item by itself, except in an item of `_BARE_HANDLER`
    write_shape: tuple[int, ...] | None = None  # of the pieces that devices held, where Orbax says it
    value: Any = None  # of a leaf in the msgpack file; for a type that only a user's handler can read, its name
    in_msgpack: bool = False  # the leaf lies in the msgpack file
    array: ZarrArray | None = None
    problem: str = ""  # why the leaf cannot be looked into


class OrbaxItem:
    """One array item of a step; its metadata is read now, arrays later.

    `bare`: it is known to be a single array. `present` raises if the step is gone. Orbax leaves out
    chunks of zeros, so deleted chunks read as zeros: `present` is called after each such read. The decoded chunks of
    reads at the same time are at most `read_bytes`; what has more is read alone.
    """

    def __init__(
        self,
        store: Store,
        at: str,
        epoch: int,
        handler: str = "",
        bare: bool = False,
        present: Callable[[], None] = lambda: None,
        read_bytes: int = _READ_BYTES,
    ):
        self._store = store
        self._at = at
        self._epoch = epoch
        self._present = present
        self._read_bytes = read_bytes
        self.custom_metadata: Any = None
        self._fill = self._zarr3 = False
        self._files = TensorFiles(store, at)
        limits = self._files.resources(_READS) | {"cache_pool#ocdbt": {"total_bytes_limit": _INDEX_BYTES}}
        self._context = ts.Context(limits)
        self._ocdbt = store.exists(paths.join(at, step_files.OCDBT))
        self._cached: tuple[str, ts.TensorStore | None] = ("", None)
        self._numbers: dict[int, Any] = {}  # the reads of scalars
        self._ahead = threading.Lock()  # threads may share a reader
        try:
            step_files.of(store).check(at)
            if store.exists(paths.join(at, step_files.TREE_RECORD)):
                rows = self._recorded(small_files.tree_record(store, at, epoch))
            else:
                rows = self._aggregated()
        except EpochCheckpointError:
            raise
        except OSError as error:
            raise unreadable(at, error) from error
        if (bare or handler.endswith(_BARE_HANDLER)) and [row.leaf.path for row in rows] == [_BARE_PATH]:
            leaf = rows[0].leaf._replace(path=(), name=tree_lib.leaf_name(()))
            rows = [dataclasses.replace(rows[0], leaf=leaf)]
        self.leaves: tuple[StoredLeaf, ...] = tuple(rows)

    @functools.cached_property
    def shardings(self) -> dict[str, dict[str, Any]]:
        """How arrays lay on devices, as Orbax recorded it, by Orbax's name; empty where it did not."""
        found, _ = small_files.read_object(self._store, paths.join(self._at, "_sharding"))
        out: dict[str, dict[str, Any]] = {}
        for key, text in (found or {}).items():
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # one is not worth an error
                row = json.loads(text)
                if isinstance(row, dict):
                    out[base64.urlsafe_b64decode(key).decode()] = row
        return out

    def record(self, handler: str, target: Any, reading: _Reading) -> ItemRecord:
        """The item as our records would have it; `reading` surrounds each read of a value that is no array.

        Leaves get the names that they have in `target`, where a key may be a number or text.
        """
        pairs = [] if target is None else tree_lib.flatten(target)[0]
        names = {_as_text(path): tree_lib.leaf_name(path) for path, _ in pairs}
        leaves = []
        for leaf in (row.leaf for row in self.leaves):
            kind = leaf.kind if leaf.dtype is not None else leaf.kind.removeprefix("long")
            leaves.append(leaf._replace(kind=kind, name=names.get(_as_text(leaf.path), leaf.name)))
        values = _Values(self, reading)
        return ItemRecord(
            kind=ItemKind.ARRAYS,
            handler=handler,
            arrays=ArrayItem("", tuple(leaves), ()),
            values=values,
            custom_metadata=self.custom_metadata,
        )

    def check(self, target: Any = None, *, types: bool = True) -> None:
        """Raises DamagedError if a leaf of `target` (None: any leaf) is damaged.

        With `types`, UnsupportedError for a leaf that only a user's type handler can read.
        """
        asked = None if target is None else {_as_text(p) for p, x in tree_lib.flatten(target)[0] if x is not ...}
        for row in self.leaves:
            if (asked is None or _as_text(row.leaf.path) in asked) and (types or row.problem):
                self._check(row)

    def _check(self, row: StoredLeaf) -> None:
        if row.problem:
            raise small_files.half_written(self._epoch, self._at, row.problem, row.leaf.name)
        if row.leaf.kind == UNKNOWN:
            raise UnsupportedError(
                f"leaf {row.leaf.name!r} is of the type {str(row.value)[:80]!r}: only the type handler that wrote it, "
                "which Orbax does not name, can read it"
            )

    def _recorded(self, tree: Mapping[str, Any]) -> list[StoredLeaf]:
        """The leaves that `_METADATA` names, in its order."""
        self.custom_metadata = tree.get("custom_metadata")
        self._zarr3 = bool(tree.get("use_zarr3"))
        self._ocdbt = self._ocdbt if tree.get("use_ocdbt") is None else bool(tree["use_ocdbt"])
        self._fill = not tree.get("store_array_data_equal_to_fill_value")  # Orbax once left such data out
        try:
            entries = [_entry(row) for row in tree["tree_metadata"].values()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise small_files.unexpected(paths.join(self._at, step_files.TREE_RECORD), error) from None
        inner = {path[:depth] for path, *_ in entries for depth in range(len(path))}
        entries = [entry for entry in entries if entry[0] not in inner]  # what is left over from partial saves goes
        params = [".".join(str(key) for _, key in path) for path, *_ in entries]
        plain = {*_EMPTY, "string"}  # a user's type handler may write arrays, too
        arrays = self._zarr_arrays([p for p, (_, kind, _) in zip(params, entries, strict=True) if kind not in plain])
        impls = small_files.prng_impls(self._store, self._at)
        rows = []
        for param, (path, written, write_shape) in zip(params, entries, strict=True):
            array = arrays.get(param)
            impl = impls.get(param)
            shape, dtype = (array.shape, array.dtype) if array is not None else ((), None)
            if written in _EMPTY:
                kind = tree_lib.leaf_kind(_EMPTY[written]) or UNKNOWN
            elif written == "string":
                kind = "str"
            elif dtype is None:
                kind = UNKNOWN
            elif written == "scalar":
                kind = {"b": "bool", "i": "int", "u": "int", "c": "complex"}.get(dtype.kind, "float")
                shape = ()
                dtype = None
            else:
                kind = "prng" if impl is not None else "numpy" if written == "np.ndarray" else "jax"
            leaf = Leaf(path, _name(path), kind, dtype, shape, sharding=len(rows), impl=impl)
            problem = array.problem if array is not None and written in steps.ARRAY_TYPES else ""
            value = written if kind == UNKNOWN else None
            stored = StoredLeaf(
                number=len(rows),
                leaf=leaf,
                param=param,
                write_shape=write_shape,
                value=value,
                array=array,
                problem=problem,
            )
            rows.append(stored)
        return rows

    def _zarr_arrays(self, params: Sequence[str]) -> dict[str, ZarrArray]:
        """The arrays with these names of Orbax's; their metadata is read at the same time."""
        if not params:
            return {}
        file = "zarr.json" if self._zarr3 else ".zarray"
        out: dict[str, ZarrArray] = {}
        with self._tensorstore(""):
            kv = ts.KvStore.open(self._kvstore(), context=self._context).result()
            reads = [kv.read(small_files.array_key(param, file)) for param in params]
        for param, read in zip(params, reads, strict=True):
            where = small_files.array_key(param, file)
            try:
                with self._tensorstore(""):
                    got = read.result()
                missing = ZarrArray(problem=f"is missing: {where} is not there")
                out[param] = _zarr_array(json.loads(got.value)) if got.state == "value" else missing
            except (DamagedError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
                cause = error.__cause__ if isinstance(error, DamagedError) else error
                out[param] = ZarrArray(problem=f"cannot be read: {where}: {str(cause)[:300]}")
        return out

    def _aggregated(self) -> list[StoredLeaf]:
        """The leaves of the msgpack file, in its order."""
        path = paths.join(self._at, steps.AGGREGATE)
        if not self._store.exists(path):
            raise DamagedError(
                paths.join(self._at, step_files.TREE_RECORD), "is missing; expected the tree of the item"
            )
        with local_folder(self._store, self._at, [steps.AGGREGATE]) as folder:
            tree = flax_msgpack.load(os.path.join(folder, steps.AGGREGATE))
        pairs, _ = tree_lib.flatten(tree)
        away = {p: v.removeprefix(_PLACEHOLDER) for p, v in pairs if isinstance(v, str) and v.startswith(_PLACEHOLDER)}
        arrays = self._zarr_arrays(list(away.values()))
        rows = []
        for number, (path, value) in enumerate(pairs):
            if path in away:
                array = arrays[away[path]]
                kind = UNKNOWN if array.problem else "jax"
                leaf = Leaf(path, _name(path), kind, array.dtype, array.shape, sharding=number)
                rows.append(StoredLeaf(number, leaf, away[path], array=array, problem=array.problem))
            else:
                kind = tree_lib.leaf_kind(value) or UNKNOWN
                dtype = getattr(value, "dtype", None)
                shape = getattr(value, "shape", ())
                leaf = Leaf(path, _name(path), kind, dtype, shape, sharding=number)
                rows.append(StoredLeaf(number, leaf, "", value=value, in_msgpack=True))
        return rows

    def value(self, row: StoredLeaf) -> Any:
        """A leaf that is no array, as a Python value."""
        self._check(row)
        if row.in_msgpack:
            return row.value
        if row.leaf.kind in tree_lib.EMPTY_KINDS:
            return tree_lib.empty_value(row.leaf.kind)
        if row.leaf.kind == "str":
            return self._text(row)
        # After one number, callers ask for the next ones: many are read at the same time.
        with self._ahead:
            if row.number not in self._numbers:
                ahead = {row.number: row, **dict(itertools.islice(self._unread.items(), _NUMBERS))}
                begun = {number: self._begin(other) for number, other in ahead.items()}
                if self._fill:
                    for future in begun.values():
                        future.exception()  # waits
                    self._present()
                for number in begun:
                    del self._unread[number]
                self._numbers |= begun
        with self._tensorstore(row.leaf.name):
            return self._numbers[row.number].result().item()

    def read(self, parts: Iterable[Part], one_by_one: bool = False) -> Iterator[_Done]:
        """Reads parts of arrays, many at the same time; gives each, with its error, in order.

        If parts of one array share chunks and come one after another, as from `in_bands`, each chunk is decoded once.
        `one_by_one`: an array is read by several calls, and chunks are kept for the next one.
        """
        under_way: collections.deque[tuple[Part, int, Any]] = collections.deque()
        busy = 0
        for part in itertools.chain(parts, [None]):
            nbytes = _decoded_bytes(part[0], part[1]) if part is not None else 0
            while under_way and (part is None or len(under_way) == _READS or busy + nbytes > self._read_bytes):
                done, freed, future = under_way.popleft()
                busy -= freed
                problem = None
                try:
                    with self._tensorstore(done[0].leaf.name):
                        future.result()
                except EpochCheckpointError as error:
                    problem = error
                yield done, problem
            if part is not None:
                row, box, out = part
                future = self._begin(row, box, out, kept=0 if one_by_one else self._read_bytes)
                under_way.append((part, nbytes, future))
                busy += nbytes
        if not one_by_one:
            self._cached = "", None
        if self._fill:
            self._present()

    def _begin(self, row: StoredLeaf, box: Box = (), out: np.ndarray | None = None, kept: int = 0) -> Any:
        """A future of a part of an array that is read into `out`, or of a number; it raises what is wrong."""
        promise, future = ts.Promise.new()
        try:
            self._check(row)
            if out is None:
                return self._open(row, box, kept).read()
            if not row.in_msgpack:
                return ts.array(out, context=self._context).write(self._open(row, box, kept)[grid.slices(box)])
            out[...] = np.asarray(row.value)[grid.slices(box)]
            promise.set_result(None)
        except (EpochCheckpointError, *_TOLERATED) as error:
            promise.set_exception(error)
        return future

    def _open(self, row: StoredLeaf, box: Box, kept: int) -> ts.TensorStore:
        """An array; does not look at storage. If the box shares chunks with others, they are kept for the next box."""
        assert row.array is not None, "callers choose leaves that have one"
        shared = not _is_aligned(row, box)
        param, array = self._cached
        if shared and param == row.param and array is not None:
            return array
        limit = min(kept + _row_bytes(row) + _SLACK_BYTES, _CACHE_BYTES) if shared else 0
        spec = {
            "driver": "zarr3" if self._zarr3 else "zarr",
            "kvstore": self._kvstore(small_files.array_key(row.param, "")),
            "metadata": row.array.metadata,
            "fill_missing_data_reads": self._fill,
            "recheck_cached_data": False,
            "cache_pool": {"total_bytes_limit": limit},
        }
        array = ts.open(spec, open=True, read=True, assume_metadata=True, context=self._context).result()
        if row.leaf.dtype is None and array.ndim:
            raise ValueError(f"it has the shape {list(array.shape)}; expected one number")
        if shared:
            self._cached = row.param, array
        return array

    @functools.cached_property
    def _unread(self) -> dict[int, StoredLeaf]:
        """The numbers of the item that are not yet read, by leaf number."""
        return {row.number: row for row in self.leaves if row.array is not None and row.leaf.dtype is None}

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
        found, problem = small_files.read_object(self._store, path)
        if found is None:  # raised here: a failure is not kept
            raise DamagedError(path, problem or "is missing; expected the strings of the item")
        return found

    def _kvstore(self, param: str = "") -> dict[str, Any]:
        files = self._files.kvstore()
        if self._ocdbt:
            return {"driver": "ocdbt", "base": files, "path": param, "cache_pool": "cache_pool#ocdbt"}
        return {**files, "path": f"{files['path']}{param}"}

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
                raise unreadable(self._at, PermissionError(str(error)[:500])) from error
            code = error.errno if isinstance(error, OSError) else errno_in(error)
            if _PASSING.search(str(error)):
                raise StorageError(self._at, OSError(errno.EAGAIN, str(error)[:500])) from error
            if code and is_passing(found := OSError(code, str(error)[:500])):
                raise StorageError(self._at, found) from error
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            problem = f"cannot be read: {str(error)[:500]}"
            raise small_files.half_written(self._epoch, self._at, problem, name or None) from error


class _Values(Mapping[int, Any]):
    """The JSON forms of an item's Python leaves by leaf number, each read when it is asked for."""

    def __init__(self, item: OrbaxItem, reading: _Reading):
        self._item = item
        self._reading = reading

    def __getitem__(self, number: int) -> Any:
        with self._reading():
            return tree_lib.value_to_json(self._item.value(self._item.leaves[number]))

    def __iter__(self) -> Iterator[int]:
        return (i for i, row in enumerate(self._item.leaves) if row.leaf.kind in tree_lib.VALUE_KINDS)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def in_bands(row: StoredLeaf, pairs: Sequence[tuple[Box, np.ndarray]], band_bytes: int = _BAND_BYTES) -> Iterator[Part]:
    """The parts of an array, cut along its first axis if they share chunks: parts of the same chunks come together.

    A band has so many bytes, but at least a row of chunks.
    """
    if len(pairs) == 1 or all(_is_aligned(row, box) for box, _ in pairs):
        yield from ((row, box, out) for box, out in pairs)
        return
    assert row.array is not None, "only chunks are shared"
    rows = row.array.chunks[0] * max(1, band_bytes // _row_bytes(row))
    for start in range(0, row.leaf.shape[0], rows):
        for box, out in pairs:
            low = max(box[0][0], start)
            high = min(box[0][1], start + rows)
            if low < high:
                yield row, ((low, high), *box[1:]), out[low - box[0][0] : high - box[0][0]]


def _is_aligned(row: StoredLeaf, box: Box) -> bool:
    """Whether no other box of the array has anything of the same chunks."""
    if row.array is None:
        return True
    sides = zip(box, row.array.chunks, row.leaf.shape, strict=True) if box else ()
    return all(start % side == 0 and (stop % side == 0 or stop == length) for (start, stop), side, length in sides)


def _decoded_bytes(row: StoredLeaf, box: Box) -> int:
    """Bytes of the chunks that a box touches."""
    if row.array is None or row.leaf.dtype is None:
        return 0
    pairs = zip(box, row.array.chunks, strict=True)
    sides = [(-(-stop // side) - start // side) * side for (start, stop), side in pairs]
    return math.prod(sides) * row.leaf.dtype.itemsize


def _row_bytes(row: StoredLeaf) -> int:
    """Bytes of all chunks that begin at the same place of the first axis."""
    return _decoded_bytes(row, ((0, 1), *grid.whole(row.leaf.shape[1:]))) if row.leaf.shape else 0


def _as_text(path: KeyPath) -> tuple[str, ...]:
    """A key path as Orbax writes it."""
    return tuple(str(key) for _, key in path)


def _name(path: KeyPath) -> str:
    """The name of the leaf at a path, in which a key that looks like a number is one."""

    def named(key: Any) -> Any:
        return int(key) if isinstance(key, str) and key.isdecimal() and str(int(key)) == key else key

    return tree_lib.leaf_name(tuple((kind, named(key) if kind == "k" else key) for kind, key in path))


def _entry(row: Mapping[str, Any]) -> tuple[KeyPath, str, tuple[int, ...] | None]:
    """(key path, type, write shape) of one leaf; keys of dicts are text."""
    keys = row["key_metadata"]
    path = tuple(("s", int(key["key"])) if key["key_type"] == 1 else ("k", str(key["key"])) for key in keys)
    value = row["value_metadata"]
    shape = value.get("write_shape")
    return path, str(value["value_type"]), None if shape is None else _shape(shape)


def _zarr_array(row: Mapping[str, Any]) -> ZarrArray:
    """What an array's metadata says, of either version of zarr."""
    shape = _shape(row["shape"])
    if len(shape) > 32:
        raise ValueError(f"shape {shape}")
    if row["zarr_format"] == 2:
        dtype = _dtype(row["dtype"])
        chunks = row["chunks"]
    else:
        inner = [c["configuration"]["chunk_shape"] for c in row["codecs"] if c["name"] == "sharding_indexed"]
        dtype = _dtype(row["data_type"])
        chunks = [*inner, row["chunk_grid"]["configuration"]["chunk_shape"]][0]
    if not tree_lib.fits(shape, dtype):
        raise ValueError(f"shape {shape} is beyond what NumPy can have")
    if len(_shape(chunks)) != len(shape) or 0 in chunks:
        raise ValueError(f"chunks {chunks} of shape {shape}")
    return ZarrArray(shape, dtype, tuple(chunks), row)


def _shape(value: Sequence[Any]) -> tuple[int, ...]:
    """A shape from JSON; ValueError if it is none."""
    if not all(type(d) is int and d >= 0 for d in value):
        raise ValueError(f"shape {value}")
    return tuple(value)


def _dtype(name: Any) -> np.dtype[Any]:
    """The dtype that zarr calls by this name."""
    if isinstance(name, str) and name in tree_lib.dtypes():
        return tree_lib.dtypes()[name]
    found = np.dtype(str(name))
    if found.newbyteorder("=").name not in tree_lib.dtypes():
        raise ValueError(f"dtype {str(name)[:40]!r}")
    return found.newbyteorder("=")


_PASSING = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|ABORTED")  # of a store that is away, or refuses
_ERRNO = re.compile(r"os_error_code='(\d+)'")


def errno_in(error: BaseException) -> int | None:
    """The operating system's errno in an error of TensorStore's; None without one."""
    code = _ERRNO.search(str(error))
    return int(code[1]) if code else None
