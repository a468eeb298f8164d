"""`import_`: makes an epoch out of a file that something else wrote: flax msgpack, safetensors.

A safetensors file is never taken into memory: its arrays are views of the mapped file, which the writer streams to
storage.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from epochckpt.arrays.snapshot import checked_json
from epochckpt.commit import commits_of
from epochckpt.errors import EpochExistsError, FormatError, InvalidArgumentError, UnsupportedError
from epochckpt.format import flax_msgpack, paths, safetensors
from epochckpt.format import tree as tree_lib
from epochckpt.manager.manager import CheckpointManager
from epochckpt.manager.reader import epoch_number
from epochckpt.manager.status import EpochStatus
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.storage import expanded, mmap, open_store, path_text, plain

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 * 2**20


def import_(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    epoch: int,
    *,
    format: str | None = None,
    item: str = paths.DEFAULT_ITEM,
    separator: str | None = ".",
    metrics: Any = None,
    custom_metadata: Mapping[str, Any] | None = None,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
) -> EpochStatus:
    """Makes a committed epoch out of a flax msgpack or a safetensors file, or a folder of those.

    Arrays become NumPy leaves, bit for bit. Safetensors are streamed in bounded memory, whatever the size of the file
    (on object stores by the size of a data file's part); msgpack files are read whole. One process does it. Like every
    manager that writes it fences off whatever else writes to `directory`: do not import into that of a running job.

    Args:
        source: a local `.msgpack` file (`flax.serialization.to_bytes`, `msgpack_serialize`), a `.safetensors` file, or
            a folder with one of them or with the parts and the index of Hugging Face. It must not change meanwhile.
        directory: where the epochs live; created if it is missing.
        epoch: the number of the new epoch.
        format: `"msgpack"` or `"safetensors"`; None: by the file's ending, else by its first bytes.
        item: name of the item.
        separator: safetensors: names are split at it into nested dicts; None: one flat dict. What `export` wrote has
            its tree noted, and gets exactly that.
        metrics: kept with the epoch.
        custom_metadata: kept with the epoch.
        options: the step name format and the mode of folders, if they are not the default.
        storage: how bytes get to storage.

    Raises:
        FormatError: the source is truncated, damaged or no such file. As after every other error nothing was written.
        UnsupportedError: a dtype that we lack, or several processes.
        EpochExistsError: there is such an epoch, be it readable or not.
        SaveError: storage refused; the epoch does not exist.
        OSError: the source cannot be read.

    Example:
        >>> from flax import serialization
        >>> with open("params.msgpack", "wb") as file:
        ...     written = file.write(serialization.to_bytes({"w": np.arange(3)}))
        >>> ec.import_("params.msgpack", "run", 0).state
        'committed'
    """
    epoch = epoch_number(epoch)
    paths.check_item_name(item, ("process_0",))
    if separator is not None and not separator:
        raise InvalidArgumentError("separator='' cannot split a name; None keeps names whole")
    if not (custom_metadata is None or isinstance(custom_metadata, Mapping)):
        raise InvalidArgumentError(f"custom_metadata must be a dict, got a {type(custom_metadata).__name__}")
    metrics = checked_json(metrics, "metrics")
    custom = checked_json(dict(custom_metadata or {}), "custom_metadata")
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"import_ works in one process, and this job has {jax.process_count()}: import before the job starts"
        )
    given = options or ocp.CheckpointManagerOptions()
    # only those that name and make folders: an import must not delete any
    naming = ("file_options", "step_name_format", "step_prefix", "step_format_fixed_length")
    names = ocp.CheckpointManagerOptions(**{name: getattr(given, name) for name in naming})
    store = open_store(directory)
    with contextlib.suppress(NotADirectoryError):  # opening it says so, once the source is known to be good
        if epoch in commits_of(store, StepNames.of(names)).list_epochs():
            raise EpochExistsError(
                f"{store.root}: epoch {epoch} exists; delete it, or choose another number (in Orbax's words: "
                f"Checkpoint for step {epoch} already exists)"
            )
    path = path_text(source, "source")
    if "://" in path:
        raise UnsupportedError(f"source {plain(path)!r}: only local files are imported; download it first")
    tree = _read(os.path.abspath(expanded(path)), format, separator)
    _check_tree(tree, path)
    # what is imported has to fit once: a bound on copies of training state is no reason to refuse it
    storage = dataclasses.replace(storage or StorageOptions(), host_memory_limit_bytes=None)
    args: Any = ocp.args.StandardSave(tree)
    if item != paths.DEFAULT_ITEM:
        args = ocp.args.Composite(**{item: args})
    with CheckpointManager(directory, options=names, storage=storage) as manager:
        manager.save(epoch, args=args, metrics=metrics, custom_metadata=custom, force=True)
        manager.wait_until_finished()
        return manager.status(epoch)


def _check_tree(tree: Any, source: str) -> None:
    """FormatError for what a save would refuse, which is after the directory was made."""
    try:
        pairs, _ = tree_lib.flatten(tree)
    except (ValueError, TypeError) as error:
        raise FormatError(source, f"is no tree for JAX, which sorts the keys of each dict: {error}") from None
    seen: set[str] = set()
    for path, value in pairs:
        name = tree_lib.leaf_name(path)
        if tree_lib.leaf_kind(value) is None:
            raise UnsupportedError(f"{source}: leaf {name[:200]!r} is a {type(value).__qualname__}; it cannot be saved")
        if name in seen:  # two keys that are NaN
            raise FormatError(source, f"has two leaves that are called {name[:200]!r}")
        seen.add(name)


def _read(path: str, format: str | None, separator: str | None) -> Any:
    """The tree of a file or folder."""
    if format not in (None, "msgpack", "safetensors"):
        raise InvalidArgumentError(f"format {format!r} is not known; expected 'msgpack' or 'safetensors'")
    files = _files(path, format) if os.path.isdir(path) else {path: None}
    for file, listed in files.items():
        if listed is None and (format or _guess(file)) == "msgpack":
            return flax_msgpack.load(file)
    pairs = [pair for file, listed in files.items() for pair in _tensors(file, separator, listed)]
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


def _files(path: str, format: str | None) -> Mapping[str, set[str] | None]:
    """The files of a folder: one, or those that an index lists, with the names of the tensors in each."""
    names = sorted(os.listdir(path))
    indices = [n for n in names if n.endswith(INDEX_SUFFIX)] if format != "msgpack" else []
    if len(indices) == 1:
        return _index(os.path.join(path, indices[0]))
    endings = (".safetensors", ".msgpack") if format is None else (f".{format}",)
    files = [n for n in names if n.endswith(endings)]
    if len(indices) > 1 or len(files) != 1:
        several = ", ".join((indices or files)[:5]) or "none"
        raise InvalidArgumentError(
            f"{path}: expected one {' or '.join(endings)} file, or parts with one '*{INDEX_SUFFIX}'; found: {several}"
        )
    return {os.path.join(path, files[0]): None}


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
    found: dict[str, set[str]] = {}
    for name, file in listed:
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise FormatError(path, f"says that {name[:200]!r} lies in {str(file)[:200]!r}, no file beside it")
        found.setdefault(os.path.join(os.path.dirname(path), file), set()).add(name)
    return found


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
    data = mmap.open_map(path)
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
