"""Files as read-only NumPy arrays that cost no memory of their own: their bytes are those of the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import IO, Any, cast

import numpy as np

_PIECE_BYTES = 8 * 2**20


class Mapped(np.memmap[Any, Any]):
    """A read-only map of a file that stays as it is while the array is used, and so need not be copied to be saved.

    A type of its own, because that is a promise: of a `np.memmap` that a caller hands to `save()` nobody knows who
    writes to the file, or cuts it short, which ends a process that reads it then.
    """


def open_map(file: str | os.PathLike[str] | IO[bytes]) -> Mapped:
    """A file's bytes as a read-only array of uint8. Slices, `view` and `reshape` stay `Mapped`.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is empty.
    """
    return cast(Mapped, Mapped(file, np.uint8, "r"))


def release(array: np.ndarray, start: int = 0, stop: int | None = None) -> None:
    """Takes the pages of some bytes of a mapped array out of this process; they stay in the page cache.

    Without it a file that is read through once would count as this process's memory in full. Reading the bytes again
    is fine, and brings them back.

    Args:
        array: a C-contiguous `Mapped`.
        start: first byte of the array.
        stop: one beyond the last; None: all.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    base = _address(array) - _address(np.frombuffer(owner, np.uint8))
    low = (base + start) // mmap.PAGESIZE * mmap.PAGESIZE
    high = base + (array.nbytes if stop is None else stop)
    if high > low:
        owner.madvise(mmap.MADV_DONTNEED, low, high - low)


def join(chunks: Iterable[np.ndarray], folder: str) -> Mapped:
    """Pieces of mapped files as one mapped array of uint8, through a file in `folder` that has no name.

    Raises:
        OSError: storage refused.
        ValueError: there are no bytes.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        for chunk in chunks:
            flat = chunk.reshape(-1).view(np.uint8)
            for start in range(0, flat.nbytes, _PIECE_BYTES):
                file.write(flat[start : start + _PIECE_BYTES].data)
                release(flat, start, min(start + _PIECE_BYTES, flat.nbytes))
        file.flush()
        return open_map(file)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
