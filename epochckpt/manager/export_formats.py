"""The two forms of an export.

- A plain checkpoint of stock Orbax is the Orbax view with the data files in place of its links to nodes' folders.
- Safetensors in the form of Hugging Face: whole tensors, in one file or in parts with an index. Leaves are read in
  boxes that are contiguous in the file, so memory is bounded by the box.
"""

import dataclasses
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from epochckpt.arrays import EpochReader, Request
from epochckpt.arrays.snapshot import root_metadata
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import ArrayItem, Box, EpochRecord, grid, paths, safetensors
from epochckpt.format.safetensors import NOTES_KEY, Notes
from epochckpt.manager import status
from epochckpt.orbax import Views
from epochckpt.orbax import view as orbax_view
from epochckpt.storage import Store, writing

Unsupported = dict[str, dict[str, str]]  # what was left out: reasons by leaf name, by item


def write_orbax(reader: EpochReader, record: EpochRecord, target: Store, skip_unsupported: bool) -> Unsupported:
    """Writes the record's items and the directory's metadata, durably and verified; returns what was left out."""
    # nothing of ours is needed to read it: no attempts in paths, as object stores have them
    plain = dataclasses.replace(record, objects=False)
    view = Views(orbax_view.MAX_EXPORT_CHUNKS).build(plain, beside_nodes=False)
    if view.unsupported and not skip_unsupported:
        raise UnsupportedError(refusal(record.epoch, "orbax", view.unsupported))
    base = str(record.epoch)
    links = [path for path in view.links if record.items[path.split("/")[0]].arrays is not None]
    custom = status.root_metadata(reader.store).custom_metadata
    folders = [paths.join(base, folder) for folder in ("", *view.folders, *links)]
    folders += paths.ROOT_METADATA[:1] if custom else []
    for folder in folders:
        target.make_folder(folder)
    for path, data in view.files.items():
        target.create(paths.join(base, path), data)
    for item in (name for name, entry in record.items.items() if entry.kind == "files"):
        for node, file in reader.item_files(item):
            reader.node_file(node, file).copy(target, paths.join(base, file.path))
    numbers = {entry.folder: i for i, entry in enumerate(record.nodes)}
    for path in links:
        for file in reader.files(path.split("/")[0], numbers[path.split("/")[-1]]):
            file.copy(target, paths.join(base, path, file.name))
    if custom:
        target.create(paths.join(*paths.ROOT_METADATA), root_metadata(custom))
    for folder in (*reversed(folders), ""):
        target.sync_folder(folder)
    return view.unsupported


def refusal(epoch: int, format: str, unsupported: Unsupported) -> str:
    """The message for leaves that a format cannot express."""
    rows = [
        f"  {item if leaf == '*' else f'{item}: {leaf}'}: {why}"
        for item in unsupported
        for leaf, why in unsupported[item].items()
    ]
    more = [f"  … and {len(rows) - 50} more"] if len(rows) > 50 else []
    head = f"epoch {epoch} holds what the format {format!r} cannot express:"
    return "\n".join([head, *rows[:50], *more, "skip_unsupported=True (--skip-unsupported) exports the rest"])


FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BATCH_LEAVES = 4096  # read together at most; bounds what is kept per leaf meanwhile


@dataclasses.dataclass(frozen=True)
class TensorOptions:
    """How to write safetensors."""

    separator: str  # joins the keys of a leaf's path
    max_file_bytes: int  # bytes of tensors per file; a tensor larger than that has a file of its own
    max_buffer_bytes: int  # bound on the memory for the bytes under way
    skip_unsupported: bool  # leave out leaves that the format cannot express


def write_safetensors(reader: EpochReader, item: str, target: Store, options: TensorOptions) -> Unsupported:
    """Writes one item of arrays into an empty folder, durably and verified; returns what was left out."""
    record = reader.record
    arrays = record.items[item].arrays
    if arrays is None:
        raise UnsupportedError(f"item {item!r} is not made of arrays; only those become tensors")
    unsupported = {
        leaf.name: f"safetensors has no type for {leaf.dtype.name}"
        for leaf in arrays.leaves
        if leaf.dtype is not None and not safetensors.has_type(leaf.dtype)
    }
    if unsupported and not options.skip_unsupported:
        raise UnsupportedError(refusal(record.epoch, "safetensors", {item: unsupported}))
    tensors = _named(arrays, unsupported, options.separator)
    notes = Notes(options.separator)
    for name, i in tensors.items():
        leaf = arrays.leaves[i]
        if safetensors.split_name(name, options.separator) != leaf.path or leaf.kind not in ("jax", "numpy"):
            notes.tensors[name] = leaf.path, leaf.kind, leaf.impl
    values = record.items[item].values
    notes.values += [
        (leaf.path, leaf.kind, values.get(i)) for i, leaf in enumerate(arrays.leaves) if leaf.dtype is None
    ]
    files = _files(arrays, tensors, options.max_file_bytes)
    weights: dict[str, str] = {}
    for number, leaves in enumerate(files):
        name = FILE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        noted = {tensor: note for tensor, note in notes.tensors.items() if tensor in leaves}
        text = Notes(options.separator, noted, notes.values if number == 0 else []).to_text()
        _write_file(reader, arrays, leaves, text, target, name, options.max_buffer_bytes)
        weights.update(dict.fromkeys(leaves, name))
    if len(files) > 1:
        total = sum(arrays.leaves[i].nbytes for i in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        target.create(INDEX, json.dumps(index, indent=2).encode())
    target.sync_folder("")
    return {item: unsupported} if unsupported else {}


def _named(arrays: ArrayItem, unsupported: Container[str], separator: str) -> dict[str, int]:
    """The numbers of the leaves that become tensors, by the names of the tensors."""
    tensors: dict[str, int] = {}
    for i, leaf in enumerate(arrays.leaves):
        if leaf.dtype is None or leaf.name in unsupported:
            continue
        name = separator.join(str(key) for _, key in leaf.path) if leaf.path else leaf.name
        if name in tensors:
            raise InvalidArgumentError(
                f"leaves {arrays.leaves[tensors[name]].name!r} and {leaf.name!r} would both be called {name!r}; "
                "choose another separator= (--separator)"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(f"leaf {leaf.name!r}: its keys are no valid text, as names must be") from None
        if name == "__metadata__":
            raise InvalidArgumentError(f"leaf {leaf.name!r}: safetensors keeps the name '__metadata__' for itself")
        tensors[name] = i
    return tensors


def _files(arrays: ArrayItem, tensors: Mapping[str, int], max_bytes: int) -> list[dict[str, int]]:
    """The leaves of each file, in the tree's order; within a file the largest types first, so that all are aligned."""
    files: list[list[tuple[str, int]]] = [[]]
    size = head = 0
    for name, i in tensors.items():
        leaf = arrays.leaves[i]
        extra = 3 * safetensors.header_bytes_bound(6 * len(leaf.name), len(leaf.shape))  # name in header, notes, index
        if files[-1] and (size + leaf.nbytes > max_bytes or head + extra > safetensors.MAX_HEADER_BYTES):
            files.append([])
            size = head = 0
        files[-1].append((name, i))
        size += leaf.nbytes
        head += extra
    return [dict(sorted(file, key=lambda tensor: -_dtype(arrays, tensor[1]).itemsize)) for file in files]


def _dtype(arrays: ArrayItem, leaf: int) -> np.dtype[Any]:
    dtype = arrays.leaves[leaf].dtype
    assert dtype is not None, "only arrays become tensors"
    return dtype


def _write_file(
    reader: EpochReader, arrays: ArrayItem, leaves: dict[str, int], notes: str, target: Store, name: str, max_bytes: int
) -> None:
    """Writes the leaves one after the other, as many at once as a buffer holds; every byte of it is verified."""
    infos = [(tensor, arrays.leaves[i]) for tensor, i in leaves.items()]
    tensors = [(tensor, _dtype(arrays, leaves[tensor]), leaf.shape, leaf.nbytes) for tensor, leaf in infos]
    head = safetensors.header(tensors, {"format": "flax", NOTES_KEY: notes})
    if len(head) > safetensors.MAX_READ_BYTES:
        raise UnsupportedError(
            f"epoch {reader.record.epoch}, item {arrays.name!r}: its Python values make the header of {name} "
            f"{len(head)} bytes long; safetensors allows {safetensors.MAX_READ_BYTES}"
        )
    for leaf in leaves.values():
        reader.check_files(arrays.name, leaf, grid.whole(arrays.leaves[leaf].shape))
    buffer: np.ndarray = np.empty(0, np.uint8)
    start = len(head)
    with writing(target, name, start + sum(leaf.nbytes for _, leaf in infos)) as writer:
        writer.write(0, head)
        for batch in _batches(arrays, leaves.values(), max_bytes):
            held = sum(nbytes for _, _, nbytes in batch)
            if len(buffer) < held:
                buffer = np.empty(held, np.uint8)
            requests, offset = [], 0
            for leaf, box, nbytes in batch:
                out = buffer[offset : offset + nbytes].view(_dtype(arrays, leaf)).reshape(grid.box_shape(box))
                requests.append(Request(arrays.name, leaf, box, out))
                offset += nbytes
            reader.read(requests)
            writer.write(start, buffer[:held].data)
            start += held


def _batches(arrays: ArrayItem, leaves: Iterable[int], max_bytes: int) -> Iterator[list[tuple[int, Box, int]]]:
    """(leaf, box, bytes) of boxes that follow one another in the file, in lists that a buffer of this size holds."""
    batch: list[tuple[int, Box, int]] = []
    held = 0
    for leaf in leaves:
        itemsize = _dtype(arrays, leaf).itemsize
        for box in grid.boxes(arrays.leaves[leaf].shape, max(1, max_bytes // itemsize)):
            nbytes = math.prod(grid.box_shape(box)) * itemsize
            if batch and (held + nbytes > max_bytes or len(batch) >= _BATCH_LEAVES):
                yield batch
                batch, held = [], 0
            batch.append((leaf, box, nbytes))
            held += nbytes
    if batch:
        yield batch
