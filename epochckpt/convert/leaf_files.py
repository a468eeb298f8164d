"""The common parts of both forms of an export: options, leaves that are left out, and files of whole tensors."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from epochckpt.arrays import Request
from epochckpt.convert.selected_arrays import SelectedArrays
from epochckpt.errors import UnsupportedError
from epochckpt.format import ArrayItem, Box, grid
from epochckpt.orbax import view
from epochckpt.storage import Store, writing

_BATCH_LEAVES = 4096  # read together at most; bounds what is kept per leaf meanwhile
_NAMED_LEAVES = 50  # in the error that refuses an export

LeftOut = Mapping[str, Mapping[str, str]]
"""What a form cannot express: reasons by leaf name, by item."""


@dataclasses.dataclass(frozen=True)
class FormOptions:
    """How to write. Only the last two are of Orbax, too."""

    separator: str  # joins the keys of a leaf's path
    framework: str  # whose names and layouts the tensors have, as Hugging Face writes it
    max_file_bytes: int  # bytes of tensors per file; a tensor larger than that has a file of its own
    max_buffer_bytes: int  # bound on the memory for the bytes under way
    skip_unsupported: bool  # leave out leaves that the format cannot express


def check_expressible(epoch: int, form: str, left_out: LeftOut, options: FormOptions) -> None:
    """UnsupportedError if something would be left out, and that is not wanted."""
    if not left_out or options.skip_unsupported:
        return
    rows = [f"  {line}" for item, leaves in left_out.items() for line in view.reasons(item, leaves)]
    more = [f"  … and {len(rows) - _NAMED_LEAVES} more"] if len(rows) > _NAMED_LEAVES else []
    head = f"checkpoint {epoch} holds what the format {form!r} cannot express:"
    advice = "skip_unsupported=True (--skip-unsupported) exports the rest"
    raise UnsupportedError("\n".join([head, *rows[:_NAMED_LEAVES], *more, advice]))


@dataclasses.dataclass(frozen=True)
class LeafFile:
    """A file of whole tensors, one after the other: its header, and the numbers of its leaves."""

    head: bytes
    leaves: Sequence[int]

    def write(self, arrays: SelectedArrays, target: Store, path: str, max_buffer_bytes: int) -> None:
        """Writes the leaves, as many at once as a buffer holds; every byte of them is verified."""
        item = arrays.arrays
        for leaf in self.leaves:
            arrays.check_files(item.name, leaf, grid.whole(item.leaves[leaf].shape))
        buffer: np.ndarray = np.empty(0, np.uint8)
        start = len(self.head)
        with writing(target, path, start + sum(item.leaves[leaf].nbytes for leaf in self.leaves)) as writer:
            writer.write(0, self.head)
            for batch in _batches(item, self.leaves, max_buffer_bytes):
                held = sum(piece.nbytes for piece in batch)
                if len(buffer) < held:
                    buffer = np.empty(held, np.uint8)
                arrays.read(_requests(item, batch, buffer))
                writer.write(start, buffer[:held].data)
                start += held


def dtype_of(arrays: ArrayItem, leaf: int) -> np.dtype[Any]:
    """The dtype of a leaf that is an array."""
    dtype = arrays.leaves[leaf].dtype
    assert dtype is not None, "only arrays become tensors"
    return dtype


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a leaf that lies in one piece in the file."""

    leaf: int
    box: Box
    nbytes: int


def _requests(arrays: ArrayItem, batch: Iterable[_Piece], buffer: np.ndarray) -> list[Request]:
    """Reads that put the pieces one after the other into a buffer."""
    requests = []
    offset = 0
    for piece in batch:
        data = buffer[offset : offset + piece.nbytes].view(dtype_of(arrays, piece.leaf))
        requests.append(Request(arrays.name, piece.leaf, piece.box, data.reshape(grid.box_shape(piece.box))))
        offset += piece.nbytes
    return requests


def _batches(arrays: ArrayItem, leaves: Iterable[int], max_bytes: int) -> Iterator[list[_Piece]]:
    """Pieces that follow one another in the file, in lists that a buffer of this size holds."""
    batch: list[_Piece] = []
    held = 0
    for leaf in leaves:
        itemsize = dtype_of(arrays, leaf).itemsize
        for box in grid.boxes(arrays.leaves[leaf].shape, max(1, max_bytes // itemsize)):
            nbytes = math.prod(grid.box_shape(box)) * itemsize
            if batch and (held + nbytes > max_bytes or len(batch) >= _BATCH_LEAVES):
                yield batch
                batch = []
                held = 0
            batch.append(_Piece(leaf, box, nbytes))
            held += nbytes
    if batch:
        yield batch
