"""What `import_` reads: a msgpack file, safetensors in one file or in parts, or a directory of PyTorch's DCP."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from epochckpt.convert import torch_dcp
from epochckpt.convert.formats import IMPORTED
from epochckpt.errors import FormatError, InvalidArgumentError
from epochckpt.format import flax_msgpack, safetensors
from epochckpt.format import tree as tree_lib
from epochckpt.storage import mapped

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 * 2**20


class Source(Protocol):
    """A file or folder with a tree in it."""

    def tree(self, separator: str | None) -> Any:
        """The tree; names are split at the separator into the keys of dicts. FormatError if it is none.

        Arrays may be views of mapped files, which are read when they are used.
        """

    def verify(self) -> None:
        """Compares all bytes of the tree with their checksums, if it has some; DamagedError if they differ."""


def source_of(path: str, format: str | None) -> Source:
    """What lies at a path; without a `format` the names of files tell, else the first bytes."""
    if format not in (None, *IMPORTED):
        raise InvalidArgumentError(f"format {format!r} is not known; expected one of {', '.join(map(repr, IMPORTED))}")
    if format == "dcp" or (format is None and os.path.exists(os.path.join(path, torch_dcp.METADATA))):
        return DcpFolder(path)
    if not os.path.isdir(path):
        return _single(path, format)
    names = sorted(os.listdir(path))
    indices = [n for n in names if n.endswith(INDEX_SUFFIX)] if format != "msgpack" else []
    if len(indices) == 1:
        return SafetensorsParts(path, _index(os.path.join(path, indices[0])))
    endings = (".safetensors", ".msgpack") if format is None else (f".{format}",)
    files = [n for n in names if n.endswith(endings)]
    if len(indices) > 1 or len(files) != 1:
        several = ", ".join((indices or files)[:5]) or "none"
        raise InvalidArgumentError(
            f"{path}: expected one {' or '.join(endings)} file, or parts with one '*{INDEX_SUFFIX}'; found: {several}"
        )
    return _single(os.path.join(path, files[0]), format)


def _single(path: str, format: str | None) -> Source:
    """A file by itself."""
    return MsgpackFile(path) if (format or _guess(path)) == "msgpack" else SafetensorsFile(path)


class MsgpackFile:
    """A file of `flax.serialization`; read whole."""

    def __init__(self, path: str):
        self._path = path

    def tree(self, separator: str | None) -> Any:
        return flax_msgpack.load(self._path)

    def verify(self) -> None:
        """It has no checksums."""


class SafetensorsFile:
    """One file of safetensors."""

    def __init__(self, path: str):
        self._path = path

    def tree(self, separator: str | None) -> Any:
        return _nested(_tensors(self._path, separator, None), self._path)

    def verify(self) -> None:
        """It has no checksums."""


class SafetensorsParts:
    """Files of safetensors that an index of Hugging Face lists; `listed` has the names of the tensors in each."""

    def __init__(self, folder: str, listed: Mapping[str, set[str]]):
        self._folder = folder
        self._listed = listed

    def tree(self, separator: str | None) -> Any:
        pairs = [pair for file, names in self._listed.items() for pair in _tensors(file, separator, names)]
        return _nested(pairs, self._folder)

    def verify(self) -> None:
        """They have no checksums."""


class DcpFolder:
    """What `torch.distributed.checkpoint` saved."""

    def __init__(self, path: str):
        self._path = path
        self._loaded = torch_dcp.load(path)

    def tree(self, separator: str | None) -> Any:
        pairs = list[tuple[tree_lib.KeyPath, Any]]()
        for name, value in self._loaded.entries.items():
            key = safetensors.split_name(name, separator)
            pairs += [(key + inner, leaf) for inner, leaf in tree_lib.flatten(value)[0]]
        return _nested(pairs, self._path)

    def verify(self) -> None:
        self._loaded.verify()


def _nested(pairs: list[tuple[tree_lib.KeyPath, Any]], path: str) -> Any:
    return tree_lib.nest(pairs, path) if pairs else {}


def _guess(path: str) -> str:
    for name in ("msgpack", "safetensors"):
        if path.endswith(f".{name}"):
            return name
    with open(path, "rb") as file:
        head = file.read(9)
    length = int.from_bytes(head[:8], "little")
    is_safetensors = head[8:] == b"{" and length <= min(safetensors.MAX_READ_BYTES, os.path.getsize(path) - 8)
    return "safetensors" if is_safetensors else "msgpack"


def _index(path: str) -> dict[str, set[str]]:
    """The names of the tensors in each file that an index of Hugging Face lists."""
    if os.path.getsize(path) > _MAX_INDEX_BYTES:
        raise FormatError(path, f"is larger than {_MAX_INDEX_BYTES} bytes")
    data = pathlib.Path(path).read_bytes()
    try:
        weights = json.loads(data)["weight_map"]
        listed = sorted(weights.items(), key=lambda pair: str(pair[1]))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise FormatError(path, "is not JSON with a weight_map") from None
    if not listed:
        raise FormatError(path, "lists no tensors")
    index: dict[str, set[str]] = {}
    for name, file in listed:
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise FormatError(path, f"says that {name[:200]!r} lies in {str(file)[:200]!r}, no file beside it")
        index.setdefault(os.path.join(os.path.dirname(path), file), set()).add(name)
    return index


def _tensors(path: str, separator: str | None, listed: set[str] | None) -> list[tuple[tree_lib.KeyPath, Any]]:
    """The leaves of one safetensors file."""
    if listed is not None and not os.path.exists(path):
        raise FormatError(path, "is missing; the index lists it")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        head += file.read(safetensors.header_length(path, head, size))
    tensors, metadata = safetensors.parse(path, head, size)
    if listed is not None and listed != tensors.keys():
        some = ", ".join(repr(name) for name in sorted(listed ^ tensors.keys())[:5])
        raise FormatError(path, f"does not hold the tensors that the index lists for it; they differ in {some}")
    notes = safetensors.Notes(separator or "")
    if separator is not None and safetensors.NOTES_KEY in metadata:
        notes = safetensors.parse_notes(path, metadata[safetensors.NOTES_KEY])
        separator = notes.separator
    data = mapped.open_map(path)
    pairs: list[tuple[tree_lib.KeyPath, Any]] = []
    for name, tensor in tensors.items():
        array: np.ndarray = data[tensor.start : tensor.stop].view(tensor.dtype).reshape(tensor.shape)
        by_name = safetensors.split_name(name, separator), "numpy", None
        key, kind, impl = notes.tensors.get(name, by_name)
        if len(key) > tree_lib.MAX_DEPTH:
            raise FormatError(path, f"tensor {name[:200]!r} is nested deeper than {tree_lib.MAX_DEPTH}")
        pairs.append((key, safetensors.array_of(path, array, kind, impl)))
    for key, kind, value in notes.values:
        empty = {} if kind == "node" else tree_lib.empty_value(kind)
        is_value = kind in tree_lib.VALUE_KINDS
        pairs.append((key, tree_lib.value_from_json(path, kind, value) if is_value else empty))
    return pairs
