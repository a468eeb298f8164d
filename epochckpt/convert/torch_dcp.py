"""Reads directories of `torch.distributed.checkpoint`, without torch.

`.metadata` is a pickle of the shapes and the chunks of all tensors, with the place of each chunk in a `.distcp` file. A
chunk has the form that `torch.save` gives it: a zip archive of a pickle and raw bytes. A pickle may name any function
of any module and have it called. Here only the names of this format are known, and each of them makes an inert record.
Chunks become views of the mapped files; only pickles are read.
"""

import collections
import dataclasses
import functools
import io
import itertools
import math
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from epochckpt.errors import DamagedError, EpochCheckpointError, FormatError, UnsupportedError
from epochckpt.format import Box
from epochckpt.format.grid import box_shape, slices, whole
from epochckpt.format.tree import dtypes
from epochckpt.storage import mapped, mmap

METADATA = ".metadata"

_MAX_PICKLE_BYTES = 256 * 2**20
_MAX_COVER_CELLS = 10**6
_MAX_VALUES = 10**6  # of an entry that is no tensor: a small pickle may refer to one list many times, on many levels
_CRC_BYTES = 8 * 2**20
_OTHER_DTYPES = re.compile(r"q?u?int\d|bits\d|complex\d|float\d")  # that NumPy and JAX may lack
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},  # Python 3.13
}
_BAD = (  # raised for invalid pickles, archives and records
    *(AttributeError, EOFError, IndexError, KeyError, NotImplementedError, OverflowError, RecursionError, TypeError),
    *(UnicodeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile, MemoryError),
)


@dataclasses.dataclass(frozen=True)
class Unread:
    """Takes the place of a value that cannot be read; `why` says so."""

    why: str


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The entries of a directory by name: arrays that are read when they are used, Python values, `Unread`."""

    entries: Mapping[str, Any]
    verify: Callable[[], None]  # reads all bytes of tensors; DamagedError if some lack their checksum


def load(folder: str) -> Loaded:
    """The entries of a directory; FormatError if it is no DCP directory, UnsupportedError for an unknown form of it."""
    path = os.path.join(folder, METADATA)
    if os.path.getsize(path) > _MAX_PICKLE_BYTES:
        raise FormatError(path, f"is larger than {_MAX_PICKLE_BYTES} bytes")
    with open(path, "rb") as file, _format_errors(path):
        record = _Unpickler(io.BytesIO(file.read())).load()
        places: dict[Any, dict[str, Any]] = {}
        for key, info in record.state["storage_data"].items():
            index = key.state
            places[index["fqn"], index.get("offset")] = info.state
        files = _Files(folder)
        loaded = {}
        for name, kind in record.state["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise TypeError("a name is no text")
            if kind.state:
                loaded[name] = _tensor(files, name, kind.state, places)
            else:
                loaded[name] = _value(files, places[name, None])
    return Loaded(loaded, files.verify)


class _format_errors:
    """Turns errors of an invalid file into a FormatError that names the file."""

    def __init__(self, path: str, what: str = ""):
        self._path = path
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _BAD) and not isinstance(error, EpochCheckpointError):
            problem = (
                f"{self._what}is not what torch.distributed.checkpoint writes: {str(error)[:200] or kind.__name__}"
            )
            raise FormatError(self._path, problem) from None


class _Record:
    """An object of a class of torch, and its state."""

    state: Any = None

    def __init__(self, *args: Any): ...


class _UnknownName(ValueError):
    """A pickle has a name that is not of the format."""


@dataclasses.dataclass(frozen=True)
class _Dtype:
    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A view of a storage; offset and strides count elements."""

    storage: _Storage
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_v2(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, storage.dtype, offset, tuple(size), tuple(stride))


def _rebuild_v3(
    storage: _Storage, offset: int, size: Any, stride: Any, _: Any, __: Any, dtype: _Dtype, *___: Any
) -> Any:
    return _Tensor(storage, dtype.name, offset, tuple(size), tuple(stride))


def _encode(text: str, _: str) -> bytes:
    return text.encode("latin1")


_PurePython = pickle._Unpickler  # pyright: ignore[reportPrivateUsage]
"""That of C takes memory for as many objects as a file says that it has."""

_REFUSED = (  # names that a program has registered, and memory of any size
    *(pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0]),
    *(pickle.BYTEARRAY8[0], pickle.NEXT_BUFFER[0]),
)


def _refuse(_: Any) -> None:
    raise _UnknownName("its pickle has an operation that is not of the format")


class _Unpickler(_PurePython):
    """Knows the names of the format, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("_codecs", "encode"):  # bytes are text in the pickles of torch
            return _encode
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuild_v2 if name.endswith("2") else _rebuild_v3
        if module in ("torch", "torch.storage"):
            if name == "Size":
                return tuple
            if name in _STORAGES:
                return _Storage("", _STORAGES[name])
            if name in dtypes() or _OTHER_DTYPES.match(name):
                return _Dtype(name)
        raise _UnknownName(f"its pickle names {module[:80]}.{name[:80]}, which is not loaded: that may be code")

    def build(self) -> None:
        """Sets the state of a record; of a class or function, a file could change what it does."""
        stack: list[Any] = vars(self)["stack"]
        state = stack.pop()
        if type(stack[-1]) is not _Record:
            raise _UnknownName(f"its pickle sets the state of a {type(stack[-1]).__name__}")
        stack[-1].state = state

    dispatch: ClassVar[dict[int, Callable[..., None]]] = (
        _PurePython.dispatch | {pickle.BUILD[0]: build} | dict.fromkeys(_REFUSED, _refuse)
    )

    def persistent_load(self, pid: Any) -> Any:
        tag, kind, key, *_ = pid
        if tag != "storage" or not isinstance(kind, _Storage) or not isinstance(key, str):
            raise ValueError("it refers to something other than a storage")
        return _Storage(key, kind.dtype)


class _MappedPart(io.RawIOBase):
    """A part of a mapped file as a file."""

    def __init__(self, data: memoryview):
        self._data = data
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._data[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Files:
    """The files of a directory, mapped, and the checksums of the parts that were read."""

    def __init__(self, folder: str):
        self._folder = folder
        self._sums: list[tuple[str, np.ndarray, int]] = []
        self._map = functools.cache(self._open)

    def _open(self, path: str) -> mapped.Mapped:
        if not os.path.isfile(path):
            raise FormatError(path, f"is missing; {METADATA} lists it")
        return mapped.open_map(path)

    def archive(self, place: Mapping[str, Any]) -> "_Archive":
        """What `torch.save` wrote to a place."""
        name = place["relative_path"]
        start = place["offset"]
        length = place["length"]
        path = os.path.join(self._folder, name)
        if os.path.basename(name) != name or not name.endswith(".distcp"):
            raise FormatError(path, f"is listed in {METADATA}, and is no .distcp file beside it")
        if place.get("transform_descriptors"):
            raise UnsupportedError(f"{path}: its entries are transformed ({str(place['transform_descriptors'])[:80]})")
        data = self._map(path)
        if not (type(start) is type(length) is int and 0 <= start <= start + length <= len(data)):
            raise FormatError(path, f"has {len(data)} bytes; {METADATA} lists some from {start}, {length} long")
        return _Archive(path, data[start : start + length], self._sums)

    def verify(self) -> None:
        for path, data, expected in self._sums:
            crc = 0
            for start in range(0, len(data), _CRC_BYTES):
                piece = data[start : start + _CRC_BYTES]
                crc = zlib.crc32(piece.data, crc)
                mmap.release(piece)
            if crc != expected:
                raise DamagedError(path, f"{len(data)} bytes of a tensor have the CRC-32 {crc}, not {expected}")


class _Archive:
    """A zip archive in memory."""

    def __init__(self, path: str, data: np.ndarray, sums: list[tuple[str, np.ndarray, int]]):
        self.path = path
        self._data = data
        self._sums = sums
        with zipfile.ZipFile(io.BufferedReader(_MappedPart(memoryview(data)))) as archive:  # type: ignore[type-var]
            self._members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in self._members and self.bytes_of("byteorder").tobytes() != b"little":
            raise UnsupportedError(f"{path}: its numbers are big-endian")

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of a member, which is not compressed."""
        info = self._members[name]
        names, extra = struct.unpack("<HH", self._data[info.header_offset + 26 : info.header_offset + 30].tobytes())
        start = info.header_offset + 30 + names + extra
        data = self._data[start : start + info.file_size]
        if info.compress_type != zipfile.ZIP_STORED or len(data) != info.file_size:
            raise ValueError(f"{name} is compressed, or cut short")
        return data

    def load(self) -> Any:
        """What was saved, with `_Tensor` in place of tensors."""
        data = self.bytes_of("data.pkl")
        if len(data) > _MAX_PICKLE_BYTES:
            raise UnsupportedError(f"{self.path}: a pickle of {len(data)} bytes")
        return _Unpickler(io.BytesIO(data.tobytes())).load()

    def array(self, tensor: _Tensor) -> np.ndarray:
        """The elements of a tensor, as a view of the file."""
        if tensor.dtype not in dtypes():
            raise UnsupportedError(f"{self.path}: a tensor is of torch.{tensor.dtype[:40]}, which NumPy and JAX lack")
        name = f"data/{tensor.storage.key}"
        dtype = dtypes()[tensor.dtype]
        raw = self.bytes_of(name)
        if any(by < 0 for by in tensor.stride) or tensor.offset < 0 or len(tensor.size) > 32:
            raise ValueError("a tensor has a negative stride, or too many dimensions")
        strides = [by * dtype.itemsize for by in tensor.stride]
        array = np.ndarray(tensor.size, dtype, raw, tensor.offset * dtype.itemsize, strides)  # checks its bounds
        self._sums.append((self.path, raw, self._members[name].CRC))
        return array.view(mapped.Mapped)


def _tensor(files: _Files, name: str, kind: Mapping[str, Any], places: Mapping[Any, Any]) -> Any:
    """One tensor, put together from its chunks."""
    shape = kind["size"]
    dtype_name = kind["properties"].state[0].name
    if dtype_name not in dtypes():
        return Unread(f"its type torch.{dtype_name[:40]} exists neither in NumPy nor in JAX")
    dtype = dtypes()[dtype_name]
    if not math.prod(shape):
        return np.empty(shape, dtype)
    pieces = []
    boxes = list[Box]()
    for chunk in kind["chunks"]:
        offsets = chunk.state["offsets"]
        sizes = chunk.state["sizes"]
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if not math.prod(sizes):
            continue
        place = places[name, offsets]
        archive = files.archive(place)
        with _format_errors(archive.path, f"{name[:200]!r} "):
            tensor = archive.load()
            if not isinstance(tensor, _Tensor) or tensor.size != box_shape(box) or tensor.dtype != dtype_name:
                raise ValueError(f"a chunk at {offsets} is not the {dtype_name} of shape {sizes} that {METADATA} lists")
            pieces.append((slices(box), archive.array(tensor)))
            boxes.append(box)
    if not _cover(shape, boxes):
        raise ValueError(f"the chunks of {name[:200]!r} do not make up its shape {tuple(shape)}")
    if len(pieces) == 1 and boxes == [whole(shape)] and pieces[0][1].flags.c_contiguous:
        return pieces[0][1]
    return mmap.Assembled(shape, dtype, pieces)


def _cover(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether boxes make up an array, each element once."""
    bounds = [sorted({0, size, *(at for box in boxes for at in box[axis])}) for axis, size in enumerate(shape)]
    if any((ends[0], ends[-1]) != (0, size) for ends, size in zip(bounds, shape, strict=True)):
        return False
    cells = [len(ends) - 1 for ends in bounds]
    if math.prod(cells) > _MAX_COVER_CELLS:
        raise UnsupportedError(f"an array of shape {shape} is cut into {len(boxes)} chunks at too many places")
    count = np.zeros(cells, np.int64)
    for box in boxes:
        count[tuple(slice(ends.index(a), ends.index(b)) for ends, (a, b) in zip(bounds, box, strict=True))] += 1
    return bool(np.all(count == 1))


def _value(files: _Files, place: Mapping[str, Any]) -> Any:
    """A value that is no tensor; tensors in it become arrays."""
    archive = files.archive(place)
    counted = itertools.count(1)

    def plain(value: Any) -> Any:
        if next(counted) > _MAX_VALUES:
            raise UnsupportedError(f"it holds more than {_MAX_VALUES} values")
        if isinstance(value, _Tensor):
            return archive.array(value)
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if not isinstance(value, None | bool | int | float | complex | str | bytes):
            raise _UnknownName(f"it holds a {type(value).__name__.strip('_')}")
        return value

    try:
        return plain(archive.load())
    except (*_BAD, UnsupportedError) as error:
        return Unread(f"{str(error)[:200] or type(error).__name__}")
