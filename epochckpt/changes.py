"""How much an array changed, added up piece by piece: two arrays of one shape, of any two dtypes."""

from __future__ import annotations

import numpy as np

from epochckpt import stats


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
        self._change, self._before = stats.Norm(), stats.Norm()
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
            (values,) = stats.chunks([before])
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
            self._differ(stats.differences(after, before), 0)
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
            greatest = stats.times_power(float(np.abs(difference).max()), exponent)
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
