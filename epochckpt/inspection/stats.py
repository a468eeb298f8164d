"""Statistics of an array, and the distance of two arrays: both in pieces, so that memory does not grow with the array.

Everything is added up in float64, so that norm and deviation are infinite for values beyond about 1e150. Means and
deviations of chunks are merged as in Chan, Golub, LeVeque, "Algorithms for computing the sample variance" (1983).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from epochckpt._lazy import np
from epochckpt.inspection.rows import LeafRow, LeafStats

ARRAYS = frozenset({"jax", "numpy", "scalar", "prng"})
"""Kinds of leaves that have statistics."""

_CHUNK = 2**16  # elements; as float64 they stay in a core's cache
_DOWN = 24  # rows of an array's picture
_ACROSS = 48  # columns of it
_BINS = 20  # of the histogram over [min, max]
_KEPT_BYTES = 2**26


def of_leaf(
    pieces: Callable[[], Iterable[np.ndarray]],
    item: str,
    leaf: LeafRow,
    node: str = "",
    *,
    kept_bytes: int = _KEPT_BYTES,
) -> LeafStats:
    """Statistics of one array. Typed PRNG keys count as their key data, datetimes as their integer counts.

    `pieces` reads the array as consecutive one-dimensional pieces; it is called twice for an array of more than
    `kept_bytes`, a smaller one is read once and kept for the histogram. Bin i of the
    histogram holds the values from edge i to edge i + 1 (excluded, except in the last bin); an array with one value has
    one bin.
    """
    kept: list[np.ndarray] = []
    found = _Moments()
    for values in _chunks(_keeping(pieces(), kept, kept_bytes)):
        found.add(values)
    result = LeafStats(item, node, leaf, found.count, found.nans, found.infs, found.zeros, None, None, None, None, 0.0)
    if not found.finite:
        return result
    edges = np.array([found.least, found.greatest])
    if found.least != found.greatest:
        share = np.linspace(0.0, 1.0, _BINS + 1)  # the range itself may be beyond float64
        edges = np.maximum.accumulate(found.least * (1 - share) + found.greatest * share)
    histogram = np.zeros(len(edges) - 1, np.int64)
    for values in _chunks(kept or pieces()):
        finite = values[np.isfinite(values)]
        # One comparison per edge is ten times as fast as a search for the bin of each element.
        below = [int(np.count_nonzero(finite < edge)) for edge in edges[1:-1]]
        histogram += np.diff(np.array([0, *below, finite.size]))
    return dataclasses.replace(
        result,
        min=found.least,
        max=found.greatest,
        mean=min(max(found.mean, found.least), found.greatest),
        std=0.0 if found.least == found.greatest else math.sqrt(found.squared_distances / found.finite),
        norm=math.sqrt(found.squares),
        edges=tuple(edges.tolist()),
        histogram=tuple(histogram.tolist()),
    )


def means(pieces: Iterable[np.ndarray], shape: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """The means of parts of an array, see `rows.ArrayLook`; `pieces` are as in `of_leaf`, of an array with elements."""
    height = math.prod(shape[:-1])
    width = shape[-1] if shape else 1
    down = min(height, _DOWN)
    across = min(width, _ACROSS)
    sums = np.zeros(down * across)
    counts = np.zeros(down * across, np.int64)
    start = 0
    for values in _chunks(pieces):
        row, column = np.divmod(np.arange(start, start + values.size), width)
        part = row * down // height * across + column * across // width
        with np.errstate(over="ignore", invalid="ignore"):
            sums += np.bincount(part, values, down * across)
        counts += np.bincount(part, minlength=down * across)
        start += values.size
    found = np.where(np.isfinite(sums), sums, np.nan) / counts
    return tuple(map(tuple, found.reshape(down, across).tolist()))


def _keeping(pieces: Iterable[np.ndarray], kept: list[np.ndarray], kept_bytes: int) -> Iterator[np.ndarray]:
    """Yields the pieces and collects them in `kept`, which is left empty if they are too large together."""
    nbytes = 0
    for piece in pieces:
        nbytes += piece.nbytes
        kept.append(piece)
        if nbytes > kept_bytes:
            kept.clear()
        yield piece


def _chunks(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The pieces as short runs of float64."""
    for piece in pieces:
        for start in range(0, piece.size, _CHUNK):
            yield _floats(piece[start : start + _CHUNK])


def _floats(values: np.ndarray) -> np.ndarray:
    """Numbers as float64: complex ones as their absolute values, times as their counts, NaT as NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        if values.dtype.kind in "mM":
            return np.where(np.isnat(values), np.nan, values.view(np.int64))
        if values.dtype.kind == "c":
            wide = values.astype(np.complex128)
            return np.where(np.isnan(wide), np.nan, np.abs(wide))
        return values.astype(np.float64)


class _Moments:
    """Counts, range, mean and sums of squares of float64 values that come chunk by chunk."""

    def __init__(self) -> None:
        self.count = self.finite = self.nans = self.infs = self.zeros = 0
        self.least = math.inf
        self.greatest = -math.inf
        self.mean = self.squared_distances = self.squares = 0.0

    def add(self, values: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            finite = values[np.isfinite(values)]
            nans = int(np.count_nonzero(np.isnan(values)))
            self.count += values.size
            self.nans += nans
            self.infs += values.size - finite.size - nans
            if not finite.size:
                return
            self.zeros += finite.size - int(np.count_nonzero(finite))
            self.least = min(self.least, float(finite.min()))
            self.greatest = max(self.greatest, float(finite.max()))
            self.squares += float(np.square(finite).sum())
            mean = float(finite.mean())
            total = self.finite + finite.size
            off = mean - self.mean
            self.squared_distances += float(np.square(finite - mean).sum())
            if self.finite:  # else there is no distance, and its square may be beyond float64
                self.squared_distances += off * off * (self.finite * finite.size / total)
            self.mean += off * (finite.size / total)
            self.finite = total


class ArrayChange:
    """The difference of two arrays of one shape and any two dtypes.

    NaN equals NaN, whatever its payload, and 0 equals -0. Norms are of the elements that are finite in both arrays;
    without `numbers`, elements are only compared and there are no norms.
    """

    def __init__(self, numbers: bool = True):
        self.elements = 0  # that changed
        self.lost = self.gained = 0  # of them: that ceased to be finite, that became finite
        self.largest: float | None = 0.0 if numbers else None  # greatest absolute change of an element
        self._numbers = numbers
        self._squares = self._squares_before = 0.0

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        """Goes on with one piece of each array, of the same length."""
        for start in range(0, before.size, _CHUNK):
            self._add(before[start : start + _CHUNK], after[start : start + _CHUNK])

    @property
    def norm(self) -> float | None:
        """Euclidean norm of the change; None without `numbers`."""
        return math.sqrt(self._squares) if self._numbers else None

    @property
    def relative(self) -> float | None:
        """The norm of the change, divided by the norm of the array before; None if that is 0, or without `numbers`."""
        return math.sqrt(self._squares / self._squares_before) if self._squares_before else None

    @property
    def words(self) -> str:
        """How many elements became finite or ceased to be; empty if none."""
        counts = [(self.lost, "became NaN or infinite"), (self.gained, "became finite")]
        return ", ".join(f"{count} {what}" for count, what in counts if count)

    def _add(self, before: np.ndarray, after: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            if self._numbers:
                floats = _floats(before)
                self._squares_before += float(np.square(floats[np.isfinite(floats)]).sum())
            before, after = _comparable(before, after)
            changed = before != after
            if before.dtype.kind in "fc":
                changed &= ~(np.isnan(before) & np.isnan(after))
            before = before[changed]
            after = after[changed]
            self.elements += before.size
            if not self._numbers:
                return
            if before.dtype.kind in "iu":  # exact up to 2**53, and never wrapped around
                high = np.maximum(before, after)
                low = np.minimum(before, after)
                distances = (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
            else:
                was = np.isfinite(before)
                is_now = np.isfinite(after)
                self.lost += int(np.count_nonzero(was & ~is_now))
                self.gained += int(np.count_nonzero(is_now & ~was))
                distances = np.abs(after - before)[was & is_now]
            self._squares += float(np.square(distances).sum())
            self.largest = max(self.largest or 0.0, float(distances.max(initial=0.0)))


def _comparable(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays in one dtype in which NumPy compares their values."""
    before, after = (values.view(np.int64) if values.dtype.kind in "mM" else values for values in (before, after))
    kinds = before.dtype.kind + after.dtype.kind
    if all(kind in "iu" for kind in kinds):
        common = np.result_type(before, after)
    else:
        common = np.dtype(np.complex128 if "c" in kinds else np.float64)
    return before.astype(common), after.astype(common)
