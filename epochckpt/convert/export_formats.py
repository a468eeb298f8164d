"""The forms of an export.

- A plain checkpoint of stock Orbax is the Orbax view with the data files in place of its links to nodes' folders. They
  are copied, or made anew of the leaves that were selected.
- Safetensors in the form of Hugging Face: whole tensors, in one file or in parts with an index. Leaves are read in
  boxes that are contiguous in the file, so memory is bounded by the box.
"""

import collections
import dataclasses
import json
import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from epochckpt import _units
from epochckpt.arrays import EpochReader, Request
from epochckpt.arrays.snapshot import root_metadata
from epochckpt.convert.selection import SelectedArrays
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import ArrayItem, Box, DataFile, EpochRecord, NodeEntry, grid, paths, safetensors
from epochckpt.format.safetensors import NOTES_KEY, Notes
from epochckpt.manager import CheckpointReader, status
from epochckpt.orbax import Views, ocdbt
from epochckpt.storage import Store, writing

Unsupported = dict[str, dict[str, str]]  # what was left out: reasons by leaf name, by item


@dataclasses.dataclass(frozen=True)
class FormatOptions:
    """How to write. Only the last two are of Orbax, too."""

    separator: str  # joins the keys of a leaf's path
    framework: str  # whose names and layouts the tensors have, as Hugging Face writes it
    max_file_bytes: int  # bytes of tensors per file; a tensor larger than that has a file of its own
    max_buffer_bytes: int  # bound on the memory for the bytes under way
    skip_unsupported: bool  # leave out leaves that the format cannot express


def write_orbax(
    reader: CheckpointReader, record: EpochRecord, target: Store, options: FormatOptions, arrays: SelectedArrays | None
) -> Unsupported:
    """Writes items and the directory's metadata, durably and verified; returns the parts that were left out.

    Writes the items of the record; or the selected `arrays`, in new data files.
    """
    files = [] if arrays is None else _data_files(arrays)
    if arrays is not None:
        node = NodeEntry("process_0", 0, 0, "", tuple(file for file, _, _ in files))
        record = dataclasses.replace(arrays.record, nodes=(node,))
    # nothing of ours is needed to read it: no attempts in paths, as object stores have them
    plain = dataclasses.replace(record, objects=False)
    view = Views(ocdbt.MAX_ENTRIES).build(plain, beside_nodes=False)
    if view.unsupported and not options.skip_unsupported:
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
    if arrays is not None:
        for path in links:
            for file, head, leaves in files:
                _write_file(arrays, head, leaves, target, paths.join(base, path, file.path), options.max_buffer_bytes)
    else:
        assert reader.native is not None, "steps of stock Orbax have no records of ours"
        _copy_files(reader.native, record, target, base, links)
    if custom:
        target.create(paths.join(*paths.ROOT_METADATA), root_metadata(custom))
    for folder in (*reversed(folders), ""):
        target.sync_folder(folder)
    return view.unsupported


def _copy_files(reader: EpochReader, record: EpochRecord, target: Store, base: str, links: Iterable[str]) -> None:
    """Copies what handlers wrote, and the data files of nodes to where the view has links to their folders."""
    for item in (name for name, entry in record.items.items() if entry.kind == "files"):
        for node, file in reader.item_files(item):
            reader.node_file(node, file).copy(target, paths.join(base, file.path))
    numbers = {entry.folder: i for i, entry in enumerate(record.nodes)}
    for path in links:
        for file in reader.files(path.split("/")[0], numbers[path.split("/")[-1]]):
            file.copy(target, paths.join(base, path, file.name))


def _data_files(arrays: SelectedArrays) -> list[tuple[DataFile, bytes, list[int]]]:
    """The data files of whole arrays of one node: what a record says of each, its header, and its leaves."""
    item = arrays.arrays
    owned = item.owned(0)
    files = []
    for number, part in enumerate(item.cut(owned, item.part_ends(owned, None))):
        leaves = part.leaves.tolist()
        head = safetensors.header([item.tensor(leaf, 0) for leaf in leaves])
        size = len(head) + int(part.offsets[-1])
        files.append((DataFile(item.name, number, size, len(head), len(leaves)), head, leaves))
    return files


def refusal(epoch: int, format: str, unsupported: Unsupported) -> str:
    """The message for leaves that a format cannot express."""
    rows = [
        f"  {item if leaf == '*' else f'{item}: {leaf}'}: {why}"
        for item in unsupported
        for leaf, why in unsupported[item].items()
    ]
    more = [f"  … and {len(rows) - 50} more"] if len(rows) > 50 else []
    head = f"checkpoint {epoch} holds what the format {format!r} cannot express:"
    return "\n".join([head, *rows[:50], *more, "skip_unsupported=True (--skip-unsupported) exports the rest"])


FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BATCH_LEAVES = 4096  # read together at most; bounds what is kept per leaf meanwhile


def write_safetensors(arrays: SelectedArrays, target: Store, options: FormatOptions) -> Unsupported:
    """Writes an item into an empty folder, durably and verified; returns what was left out."""
    item = arrays.arrays
    epoch = arrays.record.epoch
    unsupported = {
        leaf.name: f"safetensors has no type for {leaf.dtype.name}"
        for leaf in item.leaves
        if leaf.dtype is not None and not safetensors.has_type(leaf.dtype)
    }
    if unsupported and not options.skip_unsupported:
        raise UnsupportedError(refusal(epoch, "safetensors", {item.name: unsupported}))
    tensors = _named(item, unsupported, options.separator)
    notes = Notes(options.separator)
    for name, i in tensors.items():
        leaf = item.leaves[i]
        if safetensors.split_name(name, options.separator) != leaf.path or leaf.kind not in ("jax", "numpy"):
            notes.tensors[name] = leaf.path, leaf.kind, leaf.impl
    values = arrays.record.items[item.name].values
    notes.values += [(leaf.path, leaf.kind, values.get(i)) for i, leaf in enumerate(item.leaves) if leaf.dtype is None]
    files = _files(item, tensors, options.max_file_bytes)
    weights: dict[str, str] = {}
    for number, leaves in enumerate(files):
        name = FILE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        noted = {tensor: note for tensor, note in notes.tensors.items() if tensor in leaves}
        text = Notes(options.separator, noted, notes.values if number == 0 else []).to_text()
        rows = [(tensor, _dtype(item, i), item.leaves[i].shape, item.leaves[i].nbytes) for tensor, i in leaves.items()]
        head = safetensors.header(rows, {"format": options.framework, NOTES_KEY: text})
        if len(head) > safetensors.MAX_READ_BYTES:
            raise UnsupportedError(
                f"{arrays.where}: its Python values make the header of {name} {len(head)} bytes long; "
                f"safetensors allows {safetensors.MAX_READ_BYTES}"
            )
        _write_file(arrays, head, list(leaves.values()), target, name, options.max_buffer_bytes)
        weights.update(dict.fromkeys(leaves, name))
    if len(files) > 1:
        total = sum(item.leaves[i].nbytes for i in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        target.create(INDEX, json.dumps(index, indent=2).encode())
    target.sync_folder("")
    return {item.name: unsupported} if unsupported else {}


def write_model_files(arrays: SelectedArrays, target: Store, config: Mapping[str, Any] | None) -> None:
    """Writes what Hugging Face has beside the tensors: a model card to be completed, and `config.json` if given."""
    leaves = [leaf for leaf in arrays.arrays.leaves if leaf.dtype is not None]
    sizes = collections.Counter[str]()
    for leaf in leaves:
        sizes[str(leaf.dtype)] += math.prod(leaf.shape)
    card = [
        "---",
        "tags:",
        "- jax",
        "---",
        "",
        "# Model card",
        "",
        "Describe here what the model is for, what it was trained on, its limits and its license.",
        "",
        f"- Weights of checkpoint {arrays.record.epoch}, written by epochckpt",
        f"- {_units.several(len(leaves), 'tensor', 'tensors')}, {sum(sizes.values()):,} elements: "
        + (", ".join(f"{size:,} of {dtype}" for dtype, size in sizes.most_common()) or "none"),
    ]
    if arrays.record.metrics:  # a block of code, in which nothing is markup
        card += ["", "Its metrics:", "", textwrap.indent(json.dumps(arrays.record.metrics, indent=2), "    ")]
    target.create("README.md", ("\n".join(card) + "\n").encode())
    if config is not None:
        target.create("config.json", (json.dumps(config, indent=2) + "\n").encode())
    target.sync_folder("")


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
    arrays: SelectedArrays, head: bytes, leaves: Sequence[int], target: Store, path: str, max_bytes: int
) -> None:
    """Writes the leaves one after the other, as many at once as a buffer holds; every byte of it is verified."""
    item = arrays.arrays
    for leaf in leaves:
        arrays.check_files(item.name, leaf, grid.whole(item.leaves[leaf].shape))
    buffer: np.ndarray = np.empty(0, np.uint8)
    start = len(head)
    with writing(target, path, start + sum(item.leaves[leaf].nbytes for leaf in leaves)) as writer:
        writer.write(0, head)
        for batch in _batches(item, leaves, max_bytes):
            held = sum(nbytes for _, _, nbytes in batch)
            if len(buffer) < held:
                buffer = np.empty(held, np.uint8)
            requests = []
            offset = 0
            for leaf, box, nbytes in batch:
                out = buffer[offset : offset + nbytes].view(_dtype(item, leaf)).reshape(grid.box_shape(box))
                requests.append(Request(item.name, leaf, box, out))
                offset += nbytes
            arrays.read(requests)
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
                batch = []
                held = 0
            batch.append((leaf, box, nbytes))
            held += nbytes
    if batch:
        yield batch
