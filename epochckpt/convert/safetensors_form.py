"""An item as safetensors in the form of Hugging Face: whole tensors, in one file or in parts with an index.

Leaves are read in boxes that are contiguous in the file, so memory is bounded by the box.
"""

import collections
import json
import math
import textwrap
from collections.abc import Container, Mapping
from typing import Any

from epochckpt import _units
from epochckpt.convert.leaf_files import FormOptions, LeafFile, LeftOut, check_expressible, dtype_of
from epochckpt.convert.selected_arrays import SelectedArrays
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import ArrayItem, safetensors
from epochckpt.format.safetensors import NOTES_KEY, Notes
from epochckpt.storage import Store

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_safetensors(arrays: SelectedArrays, target: Store, options: FormOptions) -> LeftOut:
    """Writes an item into an empty folder, durably and verified; returns what was left out."""
    item = arrays.arrays
    unsupported = {
        leaf.name: f"safetensors has no type for {leaf.dtype.name}"
        for leaf in item.leaves
        if leaf.dtype is not None and not safetensors.has_type(leaf.dtype)
    }
    left_out = {item.name: unsupported} if unsupported else {}
    check_expressible(arrays.record.epoch, "safetensors", left_out, options)
    tensors = _named(item, unsupported, options.separator)
    notes = _notes(arrays, tensors, options.separator)
    files = _files(item, tensors, options.max_file_bytes)
    weights: dict[str, str] = {}
    for number, leaves in enumerate(files):
        name = FILE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        noted = {tensor: note for tensor, note in notes.tensors.items() if tensor in leaves}
        text = Notes(options.separator, noted, notes.values if number == 0 else []).to_text()
        rows = [
            (tensor, dtype_of(item, i), item.leaves[i].shape, item.leaves[i].nbytes) for tensor, i in leaves.items()
        ]
        head = safetensors.header(rows, {"format": options.framework, NOTES_KEY: text})
        if len(head) > safetensors.MAX_READ_BYTES:
            raise UnsupportedError(
                f"{arrays.where}: its Python values make the header of {name} {len(head)} bytes long; "
                f"safetensors allows {safetensors.MAX_READ_BYTES}"
            )
        LeafFile(head, list(leaves.values())).write(arrays, target, name, options.max_buffer_bytes)
        weights.update(dict.fromkeys(leaves, name))
    if len(files) > 1:
        total = sum(item.leaves[i].nbytes for i in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        target.create(INDEX, json.dumps(index, indent=2).encode())
    target.sync_folder("")
    return left_out


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


def _notes(arrays: SelectedArrays, tensors: Mapping[str, int], separator: str) -> Notes:
    """What tensors and their names do not say of the leaves."""
    item = arrays.arrays
    notes = Notes(separator)
    for name, i in tensors.items():
        leaf = item.leaves[i]
        if safetensors.split_name(name, separator) != leaf.path or leaf.kind not in ("jax", "numpy"):
            notes.tensors[name] = leaf.path, leaf.kind, leaf.impl
    values = arrays.record.items[item.name].values
    notes.values += [(leaf.path, leaf.kind, values.get(i)) for i, leaf in enumerate(item.leaves) if leaf.dtype is None]
    return notes


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
    return [dict(sorted(file, key=lambda tensor: -dtype_of(arrays, tensor[1]).itemsize)) for file in files]
