"""Memory maps: memory without a file, arrays that are made of mapped files when they are read, and their pages."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

from epochckpt._lazy import np

_HUGE_BYTES = 2**21
JAX_ALIGNMENT = 64  # jax uses the memory of a NumPy buffer that is aligned to this, without a copy


def anonymous(nbytes: int) -> mmap.mmap:
    """Memory without a file, for so many bytes from where the map stands, which is aligned to pages.

    It consists of huge pages as far as the system gives them: the first touch of small ones takes longer than all that
    is done with them in a save. MemoryError if the system does not give it.
    """
    huge = (nbytes + _HUGE_BYTES // 2) // _HUGE_BYTES * _HUGE_BYTES
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _map(max(nbytes, 1))
    memory = _map(max(nbytes, huge) + _HUGE_BYTES)
    memory.seek(-_address(np.frombuffer(memory, np.uint8)) % _HUGE_BYTES)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, memory.tell(), huge)
    return memory


def _map(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # else a forked child shares it
    except OSError as error:
        if error.errno == errno.ENOMEM:  # an OSError would be read as one of storage
            raise MemoryError(f"{nbytes} bytes of memory: {error}") from error
        raise


def fresh(nbytes: int) -> np.ndarray:
    """So many bytes of an anonymous map, aligned to pages. The map goes with the last array that uses them."""
    memory = anonymous(nbytes)
    return np.frombuffer(memory, np.uint8, nbytes, memory.tell())


def aligned(nbytes: int) -> np.ndarray:
    """Uninitialised bytes of the heap that JAX can use without a copy."""
    raw = np.empty(nbytes + JAX_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % JAX_ALIGNMENT
    return raw[start : start + nbytes]


class Assembled:
    """An array that is made of pieces of mapped files, cast if it is of another dtype, when it is read.

    `pieces` are parts of the array, each by its place in it; together they cover it once.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], pieces: Sequence[tuple[Slices, np.ndarray]]):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.pieces = pieces

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: Slices) -> Assembled:
        """A part of it; `part` has a slice of step 1 for each dimension."""
        meets = ((_meet(part, place), place, piece) for place, piece in self.pieces)
        pieces = [
            (_shifted(meet, part), piece[*_shifted(meet, place), ...])
            for meet, place, piece in meets
            if meet is not None
        ]
        return Assembled([each.stop - each.start for each in part], self.dtype, pieces)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The elements from `start` to `stop` in C order, one-dimensional; the pages of the files are released."""
        stop = self.size if stop is None else stop
        out = np.empty(stop - start, self.dtype)
        at = 0
        for box in _boxes(self.shape, start, stop):
            part = self[box]
            target = out[at : at + part.size].reshape(part.shape)
            at += part.size
            for place, piece in part.pieces:
                with np.errstate(all="ignore"):  # what does not fit becomes infinite, as in JAX
                    np.copyto(target[*place, ...], piece, casting="unsafe")
                span = sum((n - 1) * by for n, by in zip(piece.shape, piece.strides, strict=True))
                release(piece, 0, span + piece.itemsize)
        return out


Slices = tuple[slice, ...]


def _meet(a: Slices, b: Slices) -> Slices | None:
    """What two boxes of one array have in common; None if that is nothing."""
    overlap = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return None if any(each.start >= each.stop for each in overlap) else overlap


def _shifted(box: Slices, origin: Slices) -> Slices:
    return tuple(slice(x.start - at.start, x.stop - at.start) for x, at in zip(box, origin, strict=True))


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Slices]:
    """The boxes of an array, one after the other, that make up its elements from `start` to `stop` in C order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, skip = divmod(start, row)
    last, rest = divmod(stop, row)
    if skip:  # the end of a row, or a part of it
        inner = _boxes(shape[1:], skip, rest if first == last else row)
        yield from ((slice(first, first + 1), *box) for box in inner)
        if first == last:
            return
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    yield from ((slice(last, last + 1), *box) for box in _boxes(shape[1:], 0, rest))


def release(array: np.ndarray, start: int = 0, stop: int | None = None) -> None:
    """Removes pages of a `Mapped`, from byte `start` to `stop`, from the memory of this process.

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
