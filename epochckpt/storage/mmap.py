"""Files mapped as read-only NumPy arrays: their bytes lie in the page cache, not in memory of this process."""

import mmap
import os
from typing import Any, cast

import numpy as np


class Mapped(np.memmap[Any, Any]):
    """A read-only map of a file that does not change while the array is used, so that `save()` need not copy it.

    The type makes that promise. The file behind another `np.memmap` may be changed, or cut short, which kills a process
    that reads the map.
    """


def open_map(file: str | os.PathLike[str]) -> Mapped:
    """A file as a read-only uint8 array, of which slices and views are `Mapped`, too; ValueError if it is empty."""
    return cast(Mapped, Mapped(file, np.uint8, "r"))


def release(array: np.ndarray, start: int = 0, stop: int | None = None) -> None:
    """Removes pages of a C-contiguous `Mapped`, from byte `start` to `stop`, from the memory of this process.

    They stay in the page cache, and reading brings them back. Without this a file that is read once counts in full.
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


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
