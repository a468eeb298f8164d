"""Statistics of a leaf are those of NumPy, for every dtype and every cut into pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epochckpt.inspection import rows, stats

MAX = np.finfo(np.float64).max
SMALL = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"]
FLOATS = ["float64", "float32", "float16", "bfloat16", *SMALL]
INTEGERS = ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "int4", "uint4", "int2"]


class Pieces:
    """An epoch of one array, in pieces of some size; counts how often it is read."""

    def __init__(self, array: np.ndarray, size: int = 2**20):
        self.flat, self.size, self.reads = array.reshape(-1), size, 0

    def __call__(self) -> Iterator[np.ndarray]:
        self.reads += 1
        for start in range(0, self.flat.size, self.size):
            yield self.flat[start : start + self.size]


def row(array: np.ndarray, kind: str = "jax") -> rows.LeafRow:
    return rows.LeafRow("w", ("w",), kind, str(array.dtype), array.shape, array.nbytes)


def of(array: Any, size: int = 2**20) -> rows.LeafStats:
    array = np.asarray(array)
    return stats.of_leaf(Pieces(array, size), "default", row(array))


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


ARRAYS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=60), elements=st.floats(-4, 4, width=32))


@given(ARRAYS, st.integers(1, 500))
@settings(max_examples=20)
def test_a_picture_has_the_means_of_equal_parts(array: np.ndarray, size: int) -> None:
    """Of all elements once, whatever the pieces; the last axis lies across, at most 24 parts down and 48 across."""
    matrix = array.reshape(-1, array.shape[-1]).astype(float)
    found = np.array(stats.means(Pieces(array, size)(), array.shape))
    assert found.shape == (min(matrix.shape[0], 24), min(matrix.shape[1], 48))
    row, column = (np.arange(n) * parts // n for n, parts in zip(matrix.shape, found.shape, strict=True))
    sums, counts = np.zeros(found.shape), np.zeros(found.shape)
    np.add.at(sums, np.ix_(row, column), matrix)
    np.add.at(counts, np.ix_(row, column), 1)
    np.testing.assert_allclose(found, sums / counts, atol=1e-9)


def check(array: np.ndarray, size: int) -> None:
    """Compares all statistics of a real array with those of NumPy in long double."""
    found = of(array, size)
    with np.errstate(invalid="ignore"):  # a cast of a signalling NaN warns on some processors
        values = array.reshape(-1).astype(np.float64)
    finite = values[np.isfinite(values)].astype(np.longdouble)
    assert (found.count, found.nans) == (values.size, np.count_nonzero(np.isnan(values)))
    assert found.infs == np.count_nonzero(np.isinf(values))
    assert found.zeros == np.count_nonzero(values == 0)
    if not finite.size:
        assert (found.min, found.max, found.mean, found.std, found.norm) == (None, None, None, None, 0.0)
        assert (found.edges, found.histogram) == ((), ())
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean is not None
    assert found.std is not None
    greatest = float(np.abs(finite).max())
    assert found.norm == pytest.approx(float(np.sqrt(np.square(finite).sum())), rel=1e-12, abs=1e-150)
    assert found.mean == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-13 * greatest + 1e-300)
    assert found.std == pytest.approx(float(finite.std()), rel=1e-9, abs=1e-13 * greatest + 1e-150)
    assert found.min <= found.mean <= found.max
    assert sum(found.histogram) == finite.size
    assert (found.edges[0], found.edges[-1]) == (found.min, found.max)
    assert found.histogram == by_edges(finite.astype(np.float64).tolist(), found.edges)


def by_edges(values: list[float], edges: tuple[float, ...]) -> tuple[int, ...]:
    """How many values lie in each bin: [edge, next edge), the last one closed."""
    last = len(edges) - 2
    return tuple(
        sum(low <= v < high or (i == last and v == high) for v in values)
        for i, (low, high) in enumerate(itertools.pairwise(edges))
    )


def floats(name: str) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any bits, so that NaN, infinities, subnormals and both ends of the range come up."""
    dtype = dtype_of(name)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    limit = 16 if name == "float4_e2m1fn" else 2 ** (8 * dtype.itemsize)
    raw = hnp.arrays(bits, st.integers(0, 40), elements=st.integers(0, limit - 1))
    return raw.map(lambda a: a.view(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_any_bits(name: str) -> None:
    """NaN, infinities, subnormals, signed zeros and large values, in pieces of any size."""

    @given(floats(name), st.integers(1, 50))
    @settings(max_examples=60)
    def property_holds(array: np.ndarray, size: int) -> None:
        if name == "float64":  # squares of more are beyond float64
            array = np.where(np.isfinite(array) & (np.abs(array) > 1e150), 1.0, array)
        check(array, size)

    property_holds()


@given(
    hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1, 1)),
    st.sampled_from([0.0, 1.0, 1e8, -1e15]),
    st.sampled_from([1e-100, 1e-8, 1.0, 1e100]),
)
def test_values_about_any_mean(array: np.ndarray, mean: float, scale: float) -> None:
    """A mean that is far larger than the deviation costs few digits."""
    check(array * scale + mean, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    """Integers of every width, up to both ends of their range."""
    dtype = dtype_of(name)
    info = ml_dtypes.iinfo(dtype)
    low, high = int(info.min), int(info.max)

    @given(
        st.lists(st.one_of(st.integers(low, high), st.integers(max(low, high - 5), high)), max_size=40),
        st.integers(1, 50),
    )
    @settings(max_examples=60)
    def property_holds(values: list[int], size: int) -> None:
        array = np.array(values, np.int64 if low < 0 else np.uint64).astype(dtype)
        check(array, size) if dtype.kind in "iu" else check(array.astype(np.float64), size)
        if values and dtype.kind not in "iu":
            assert of(array, size).min == min(values)
            assert of(array, size).std == of(array.astype(np.float64), size).std

    property_holds()


def test_both_ends_of_64_bits() -> None:
    """Integers do not wrap around."""
    low, high = -(2**63), 2**63 - 1
    found = of(np.array([low, high, low, high], np.int64))
    assert (found.min, found.max) == (float(low), float(high))
    assert found.std == pytest.approx(2.0**63)
    assert found.mean == pytest.approx(-0.5, abs=1024)  # which is what float64 tells apart at that size
    assert (found.histogram[0], found.histogram[-1]) == (2, 2)
    assert of(np.array([0, 2**64 - 1], np.uint64)).max == 2.0**64


def test_bools() -> None:
    """True counts as 1."""
    found = of(np.array([True, False, True, True]))
    assert (found.min, found.max, found.mean, found.zeros) == (0.0, 1.0, 0.75, 1)
    assert found.norm == math.sqrt(3)
    assert (found.histogram[0], found.histogram[-1]) == (1, 3)


PARTS = st.one_of(st.complex_numbers(max_magnitude=1e150), st.sampled_from([complex("nan"), complex("inf+nanj")]))


@pytest.mark.slow
@given(hnp.arrays(np.complex128, st.integers(0, 30), elements=PARTS), st.integers(1, 40))
def test_complex_numbers_count_by_their_absolute_value(array: np.ndarray, size: int) -> None:
    """All is of the absolute values; what is not a number in one of its parts is NaN."""
    found = of(array, size)
    assert found.nans == sum(math.isnan(v.real) or math.isnan(v.imag) for v in array.tolist())
    sizes = [math.hypot(v.real, v.imag) for v in array.tolist() if math.isfinite(v.real) and math.isfinite(v.imag)]
    assert found.infs == found.count - found.nans - len(sizes)
    if sizes:
        assert found.max == pytest.approx(max(sizes), rel=1e-15)
        assert found.norm == pytest.approx(math.hypot(*sizes), rel=1e-12, abs=1e-150)


def test_complex64_does_not_overflow() -> None:
    """An absolute value that complex64 has no room for is no infinity."""
    found = of(np.array([3e38 + 3e38j], np.complex64))
    assert found.infs == 0
    assert found.max == pytest.approx(math.hypot(float(np.float32(3e38)), float(np.float32(3e38))))


@pytest.mark.parametrize("dtype", ["datetime64[ns]", "timedelta64[s]"])
def test_times_count_in_their_unit(dtype: str) -> None:
    """Times are what they count; "not a time" is a NaN."""
    found = of(np.array([5, 7, 9], np.int64).view(dtype))
    assert (found.min, found.max, found.mean, found.nans) == (5.0, 9.0, 7.0, 0)
    found = of(np.array([5, 7, np.iinfo(np.int64).min], np.int64).view(dtype))
    assert (found.min, found.max, found.mean, found.nans, found.count) == (5.0, 7.0, 6.0, 1, 3)


def test_keys_count_as_their_data() -> None:
    """Typed PRNG keys have the statistics of the words that they consist of."""
    data = np.array([[0, 2**32 - 1], [0, 7]], np.uint32)
    leaf = rows.LeafRow("rng", ("rng",), "prng", "key<fry>", (2,), data.nbytes)
    found = stats.of_leaf(Pieces(data), "default", leaf, "process_1")
    assert (found.count, found.zeros, found.max) == (4, 2, 2.0**32 - 1)
    assert (found.item, found.node, found.leaf) == ("default", "process_1", leaf)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2**40)])
def test_arrays_without_elements(shape: tuple[int, ...]) -> None:
    """There is nothing to say of them, and no error."""
    found = of(np.zeros(shape, np.float32))
    assert (found.count, found.min, found.mean, found.norm, found.histogram) == (0, None, None, 0.0, ())


@pytest.mark.parametrize("value", [0.1, 1e150, -5e-324, 0.0, 3.0])
def test_constant_arrays(value: float) -> None:
    """One value: the mean is that value, there is no deviation, and one bin holds all."""
    found = of(np.full(1_000_003, value))
    assert (found.min, found.max, found.mean, found.std) == (value, value, value, 0.0)
    assert (found.edges, found.histogram) == ((value, value), (1_000_003,))


def test_a_range_beyond_float64_has_a_histogram() -> None:
    """The distance between two values need not be a float64."""
    found = of(np.array([-MAX, 0.0, MAX, MAX]))
    assert found.edges[::5] == pytest.approx((-MAX, -MAX / 2, 0.0, MAX / 2, MAX))
    assert found.histogram == (1, *[0] * 9, 1, *[0] * 8, 2)
    assert found.norm == math.inf


def test_large_arrays_are_read_twice_and_small_ones_once() -> None:
    """What is kept between the passes is bounded; both ways give the same."""
    array = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)
    once, twice = Pieces(array, 70_000), Pieces(array, 70_000)
    small = stats.of_leaf(once, "default", row(array))
    large = stats.of_leaf(twice, "default", row(array), kept_bytes=array.nbytes - 1)
    assert (once.reads, twice.reads) == (1, 2)
    assert small == large
    assert small.mean == pytest.approx(array.mean(dtype=np.float64), abs=1e-14)
    assert small.std == pytest.approx(array.std(dtype=np.float64), rel=1e-12)
    assert small.histogram == tuple(np.histogram(array.astype(np.float64), small.edges)[0].tolist())


@given(st.integers(1, 400_000))
@settings(max_examples=10)
def test_the_cut_into_pieces_does_not_matter(size: int) -> None:
    """A piece may be smaller or larger than what is computed at once."""
    array = np.random.default_rng(1).standard_normal(300_000)
    found, whole = of(array, max(size, 1000)), of(array, 300_000)
    assert (found.histogram, found.edges, found.zeros) == (whole.histogram, whole.edges, whole.zeros)
    assert found.std == pytest.approx(whole.std, rel=1e-13)
    assert found.norm == pytest.approx(whole.norm, rel=1e-13)


@pytest.mark.parametrize("size", [1, 3])
def test_the_deviation_of_values_whose_squares_are_beyond_float64(size: int) -> None:
    """It is known as long as the squares of the distances are not beyond it."""
    array = 1e160 + np.array([0, 1e150, 2e150])
    assert of(array, size).std == pytest.approx(float(array.astype(np.longdouble).std()), rel=1e-5)
