"""How much an array changed, added up piece by piece: two arrays of one shape, of any two dtypes.

Statistics of one leaf, read in pieces: what lies in an array of any size, in memory that does not grow with it.

The first pass counts and finds least, greatest, sum and norm; the second goes over the distances from the mean, which
are exact where the mean is not, and fills the histogram. All is added up in float64, 64-bit integers by their exact
distance from one of them. Squares are taken of values scaled by a power of two wherever they would leave the range of
float64, so that a norm is infinite only if it cannot be written as a float64. See Chan, Golub, LeVeque, "Algorithms for
computing the sample variance" (1983), on the corrected two-pass algorithm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Protocol

import numpy as np

from epochckpt.errors import InvalidArgumentError
from epochckpt.inspection.rows import LeafRow, LeafStats

ARRAYS = frozenset({"jax", "numpy", "scalar", "prng"})
"""Kinds of leaves that have statistics."""

_CHUNK = 2**16  # elements; as float64 they stay in a core's cache
_KEEP_BYTES = 2**26  # what is not larger is read once, and kept for the second pass
_MAX_BINS = 1000
_SAFE = 400  # squares and sums of values below 2**400 and above 2**-400 stay in the range of float64


class Leaves(Protocol):
    """Where the leaf comes from."""

    def pieces(self, item: str, leaf: str, node: str = "") -> Iterable[np.ndarray]:
        """A whole leaf as consecutive pieces of one dimension, in C order."""
        ...


class Norm:
    """A Euclidean norm that is added up in parts, without overflow on the way."""

    def __init__(self) -> None:
        self._squares: list[float] = []
        self._exponents: list[int] = []

    def add(self, values: np.ndarray, exponent: int = 0) -> None:
        """Adds finite values (float64), each standing for `value * 2**exponent`."""
        scale = _exponent(_greatest(values))
        if scale:
            values = np.ldexp(values, -scale)
        self._squares.append(float(np.sum(np.square(values))))
        self._exponents.append(exponent + scale)

    def scaled(self) -> tuple[float, int]:
        """The norm as (mantissa, exponent)."""
        # Only parts with something in them say how large the norm is.
        top = max((e for e, s in zip(self._exponents, self._squares, strict=True) if s), default=0)
        parts = (math.ldexp(s, 2 * (e - top)) for s, e in zip(self._squares, self._exponents, strict=True) if s)
        return math.sqrt(math.fsum(parts)), top

    @property
    def value(self) -> float:
        """The norm; infinite where it is beyond float64."""
        return times_power(*self.scaled())

    def relative(self, whole: Norm) -> float | None:
        """This norm divided by another one; None if that is 0."""
        (a, i), (b, j) = self.scaled(), whole.scaled()
        return times_power(a / b, i - j) if b else None


def times_power(value: float, exponent: int) -> float:
    """`value * 2**exponent`; infinite where that is beyond float64."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


def chunks(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Pieces of an array of any dtype, as short runs of numbers: float64, or int64 and uint64 as they are.

    Complex numbers become their absolute values; times become what they count, NaN for "not a time".
    """
    for piece in pieces:
        for start in range(0, piece.size, _CHUNK):
            yield _numbers(piece[start : start + _CHUNK])


def _numbers(values: np.ndarray) -> np.ndarray:
    kind = values.dtype.kind
    if kind in "iu" and values.dtype.itemsize == 8:
        return values
    if kind in "mM":
        missing = np.isnat(values)
        counts = values.view(np.int64)
        return np.where(missing, np.nan, counts.astype(np.float64)) if missing.any() else counts
    with np.errstate(over="ignore", invalid="ignore"):
        if kind != "c":
            return values.astype(np.float64)
        wide = values.astype(np.complex128)
        sizes = np.abs(wide)
        sizes[np.isnan(wide)] = np.nan
        # Both parts are finite, their norm is beyond float64: that is no infinity in the array.
        sizes[np.isinf(sizes) & np.isfinite(wide)] = np.finfo(np.float64).max
        return sizes


def differences(after: np.ndarray, before: np.ndarray | int) -> np.ndarray:
    """`after - before` of 64-bit integers of one type as float64, exact up to 2**53 and never wrapped around."""
    base = np.asarray(before, after.dtype)
    up = after >= base
    unsigned = np.where(up, after, base).astype(np.uint64) - np.where(up, base, after).astype(np.uint64)
    return np.where(up, 1.0, -1.0) * unsigned.astype(np.float64)


def of_leaf(leaves: Leaves, item: str, leaf: LeafRow, node: str = "", bins: int = 20) -> LeafStats:
    """Statistics of one array; of typed PRNG keys those of their key data, of datetimes those of their counts.

    Args:
        leaves: the epoch's arrays.
        item: the item's name.
        leaf: the leaf's row.
        node: the node, for a leaf of an item of each node's own.
        bins: of the histogram over [min, max]; bin i holds what is at least edge i and less than edge i + 1, the last
            one also max. An array with one value has one bin. 0: none.

    Raises:
        InvalidArgumentError: the leaf is no array, or a number of bins is meant that cannot be.
        DamagedError, EpochDeletedError: it cannot be read.
    """
    if leaf.kind not in ARRAYS:
        raise InvalidArgumentError(f"leaf {leaf.name!r} is a {leaf.kind}; expected an array: others have no statistics")
    if not 0 <= bins <= _MAX_BINS:
        raise InvalidArgumentError(f"bins: expected 0 to {_MAX_BINS}, found {bins}")
    kept: list[np.ndarray] = []
    first = _First()
    for chunk in chunks(_keeping(leaves.pieces(item, leaf.name, node), kept)):
        first.add(chunk)
    empty = LeafStats(item, node, leaf, first.count, first.nans, first.infs, first.zeros, None, None, None, None, 0.0)
    if first.least is None or first.greatest is None:
        return empty
    second = _Second(first.least, first.greatest, first.mean(), bins)
    for chunk in chunks(kept or leaves.pieces(item, leaf.name, node)):
        second.add(chunk)
    mean, std = second.mean_and_std(first.count - first.nans - first.infs)
    return dataclasses.replace(
        empty,
        min=float(first.least),
        max=float(first.greatest),
        mean=mean,
        std=std,
        norm=first.norm.value,
        edges=tuple(second.edges.tolist()),
        histogram=tuple(second.histogram.tolist()),
    )


def _keeping(pieces: Iterable[np.ndarray], kept: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The pieces; after the last one they are all in `kept`, or, if they are too large together, none."""
    size: float = 0
    for piece in pieces:
        size += piece.nbytes
        if size <= _KEEP_BYTES:
            kept.append(piece)
        else:
            kept.clear()
            size = math.inf
        yield piece


class _First:
    """What one pass over an array finds."""

    def __init__(self) -> None:
        self.count = self.nans = self.infs = self.zeros = 0
        self.least: int | float | None = None
        self.greatest: int | float | None = None
        self.norm = Norm()
        self._sums: list[tuple[float, int]] = []

    def add(self, chunk: np.ndarray) -> None:
        self.count += chunk.size
        if chunk.dtype.kind == "f":
            finite = np.isfinite(chunk)
            if not finite.all():
                nans = int(np.count_nonzero(np.isnan(chunk)))
                self.nans += nans
                self.infs += chunk.size - int(np.count_nonzero(finite)) - nans
                chunk = chunk[finite]
        if not chunk.size:
            return
        self.zeros += chunk.size - int(np.count_nonzero(chunk))
        low, high = chunk.min().item(), chunk.max().item()
        self.least = low if self.least is None else min(self.least, low)
        self.greatest = high if self.greatest is None else max(self.greatest, high)
        values = chunk.astype(np.float64, copy=False)
        self.norm.add(values)
        scale = _exponent(max(abs(low), abs(high)))
        self._sums.append((float(np.sum(np.ldexp(values, -scale) if scale else values)), scale))

    def mean(self) -> float:
        """The mean of the finite elements, as good as a sum gives it."""
        top = max(scale for _, scale in self._sums)
        total = math.fsum(math.ldexp(value, scale - top) for value, scale in self._sums)
        return times_power(total / (self.count - self.nans - self.infs), top)


class _Second:
    """What another pass finds, that knows the range and about the mean.

    Attributes:
        edges: of the bins.
        histogram: elements per bin.
    """

    def __init__(self, least: int | float, greatest: int | float, mean: float, bins: int):
        self._least, self._greatest = least, greatest
        centre = min(max(mean, least), greatest)
        # From where 64-bit integers are counted, for the mean and for the histogram.
        self._origins = (round(centre), least) if isinstance(least, int) else None
        self._centre = self._origins[0] if self._origins else centre
        self._scale = 0 if self._origins else _exponent(max(abs(least), abs(greatest)))
        self._norm = Norm()
        self._sums: list[float] = []
        self._cuts = self._bins(bins)
        self.edges = self._cuts + np.float64(least) if self._origins else self._cuts.copy()
        self.edges[-1:] = greatest
        self.histogram = np.zeros(max(len(self.edges) - 1, 0), np.int64)

    def add(self, chunk: np.ndarray) -> None:
        if self._origins:
            distances, placed = (differences(chunk, origin) for origin in self._origins)
        else:
            placed = chunk if np.isfinite(chunk).all() else chunk[np.isfinite(chunk)]
            scaled = np.ldexp(placed, -self._scale) if self._scale else placed
            distances = scaled - math.ldexp(self._centre, -self._scale)
        if not placed.size:
            return
        self._norm.add(distances)
        self._sums.append(float(np.sum(distances)))
        if len(self.histogram):
            # One comparison per edge is ten times as fast as looking for each element's bin.
            below = [int(np.count_nonzero(placed < cut)) for cut in self._cuts[1:-1]]
            self.histogram += np.diff(np.array([0, *below, placed.size]))

    def mean_and_std(self, count: int) -> tuple[float, float]:
        """Mean and standard deviation (of the population, as `numpy.std`)."""
        if self._least == self._greatest:
            return float(self._least), 0.0
        off = math.fsum(self._sums) / count  # how far the centre was from the mean
        mean = float(Fraction(self._centre) + Fraction(times_power(off, self._scale)))
        size, exponent = self._norm.scaled()
        variance = size * size / count - times_power(off, -exponent) ** 2
        std = times_power(math.sqrt(max(variance, 0.0)), exponent + self._scale)
        return min(max(mean, float(self._least)), float(self._greatest)), std

    def _bins(self, bins: int) -> np.ndarray:
        """Where the bins begin and end: for integers, distances from the least one."""
        if not bins:
            return np.zeros(0)
        least, greatest = (0, self._greatest - self._least) if self._origins else (self._least, self._greatest)
        if least == greatest:
            return np.array([least, greatest], np.float64)
        cuts = np.linspace(math.ldexp(least, -self._scale), math.ldexp(greatest, -self._scale), bins + 1)
        cuts = np.ldexp(cuts, self._scale) if self._scale else cuts
        cuts[0], cuts[-1] = least, greatest
        return np.maximum.accumulate(cuts)


def _greatest(values: np.ndarray) -> float:
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def _exponent(size: float) -> int:
    """By which power of two values of up to this size are divided before they are squared or added up: mostly none."""
    exponent = math.frexp(size)[1]
    return exponent if abs(exponent) > _SAFE and size else 0


class Change:
    """What changed between two arrays of one shape.

    NaN is equal to NaN, whatever its payload, and 0 to -0. Norms are of the elements that are finite in both.

    Args:
        numbers: whether differences mean something; else elements are only told apart.

    Attributes:
        elements: how many changed.
        lost: how many of them were finite, and are not any more.
        gained: how many were not finite, and are.
    """

    def __init__(self, numbers: bool = True):
        self.elements = self.lost = self.gained = 0
        self._numbers = numbers
        self._change, self._before = Norm(), Norm()
        self._largest = 0.0

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        """Goes on with one piece of each, of the same length."""
        for start in range(0, before.size, _CHUNK):
            self._add(before[start : start + _CHUNK], after[start : start + _CHUNK])

    @property
    def norm(self) -> float | None:
        """Euclidean norm of the change."""
        return self._change.value if self._numbers else None

    @property
    def relative(self) -> float | None:
        """That norm, divided by the norm of the array before; None if it was 0."""
        return self._change.relative(self._before) if self._numbers else None

    @property
    def largest(self) -> float | None:
        """Greatest absolute change of an element."""
        return self._largest if self._numbers else None

    @property
    def words(self) -> str:
        """What the numbers do not say; empty if nothing."""
        said = [(self.lost, "became NaN or infinite"), (self.gained, "became finite")]
        return ", ".join(f"{count} {what}" for count, what in said if count)

    def _add(self, before: np.ndarray, after: np.ndarray) -> None:
        if self._numbers:
            (values,) = chunks([before])
            values = values.astype(np.float64, copy=False)
            self._before.add(values if np.isfinite(values).all() else values[np.isfinite(values)])
        if before.dtype == after.dtype and np.array_equal(_bits(before), _bits(after)):
            return
        before, after = _comparable(before), _comparable(after)
        if before.dtype != after.dtype:
            before, after = _common(before, after)
        changed = before != after
        if before.dtype.kind in "fc":
            changed &= ~(np.isnan(before) & np.isnan(after))
        self.elements += int(np.count_nonzero(changed))
        before, after = before[changed], after[changed]
        if not self._numbers or not before.size:
            return
        if before.dtype.kind in "iu":
            self._differ(differences(after, before), 0)
            return
        was, is_now = np.isfinite(before), np.isfinite(after)
        self.lost += int(np.count_nonzero(was & ~is_now))
        self.gained += int(np.count_nonzero(is_now & ~was))
        both = was & is_now
        before, after = before[both], after[both]
        with np.errstate(over="ignore", invalid="ignore"):
            difference, exponent = np.abs(after - before), 0
            if not np.isfinite(difference).all():  # it is beyond float64, its quarter is not
                difference, exponent = np.abs(after / 4 - before / 4), 2
        self._differ(difference, exponent)

    def _differ(self, difference: np.ndarray, exponent: int) -> None:
        if difference.size:
            self._change.add(difference, exponent)
            greatest = times_power(float(np.abs(difference).max()), exponent)
            self._largest = max(self._largest, greatest)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def _comparable(values: np.ndarray) -> np.ndarray:
    """The values in a type that NumPy calculates with, each as it is: 64-bit integers, float64 or complex128."""
    if values.dtype.kind in "mM":
        return values.view(np.int64)
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    if values.dtype.kind in "iu":
        return values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def _common(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64, or as complex128 if one is that: the best there is for 64-bit integers of two types, too."""
    common = np.complex128 if "c" in (before.dtype.kind, after.dtype.kind) else np.float64
    return before.astype(common), after.astype(common)
