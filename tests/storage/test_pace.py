"""What recent answers of a bucket say: how much a request carries, and when a read is late."""

import math

import pytest

from epochckpt.storage.pace import CHUNKS_BYTES, Pace, chunk_bytes, late_after, memory_bytes, span_bytes

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("size", "latency_secs", "bytes_per_sec", "mib"),
    [
        (0, 0.0, 1e9, 8),
        (64 * MIB, 0.001, 1e9, 8),  # a server of this machine
        (64 * MIB, 0.02, 50e6, 8),
        (64 * MIB, 0.05, 80e6, 16),  # a cloud
        (64 * MIB, 0.1, 80e6, 32),
        (64 * MIB, 0.2, 80e6, 64),  # another continent
        (64 * MIB, 2.0, 1e9, 64),  # never more
        (10 * MIB, 0.2, 80e6, 16),  # the least that holds the whole file
        (2 * GIB, 0.001, 80e6, 8),
        (4 * GIB, 0.001, 80e6, 16),  # a large file has larger chunks
        (100 * GIB, 0.001, 80e6, 64),
        (100 * GIB, 0.2, 1e6, 16),  # on a slow link a chunk must not take minutes
        (100 * GIB, 10.0, 1e3, 8),
    ],
)
def test_chunks_grow_with_the_file_and_the_latency(
    size: int, latency_secs: float, bytes_per_sec: float, mib: int
) -> None:
    assert chunk_bytes(size, latency_secs, bytes_per_sec) == mib * MIB
    assert mib * MIB in CHUNKS_BYTES


@pytest.mark.parametrize(
    ("concurrency", "upload_mib", "span_mib"), [(1, 32, 64), (4, 128, 64), (16, 512, 32), (64, 512, 8), (100, 800, 8)]
)
def test_memory_is_bounded(concurrency: int, upload_mib: int, span_mib: int) -> None:
    """By 512 MiB, or by chunks of the least size if they are more."""
    assert memory_bytes(concurrency) == upload_mib * MIB
    assert span_bytes(64 * MIB, concurrency) == span_mib * MIB
    assert span_bytes(8 * MIB, concurrency) == 8 * MIB


@pytest.mark.parametrize(
    ("recent", "secs"),
    [
        ([], math.inf),
        ([0.1] * 7, math.inf),  # too few to judge by
        ([0.001] * 8, 0.05),  # a moment is never late
        ([0.1] * 8, 0.11),
        ([0.1] * 60 + [2.0] * 3, 0.11),  # a few that were late themselves do not count
        ([0.1] * 50 + [0.4] * 14, 0.4),  # times that vary
    ],
)
def test_a_read_is_late_when_most_have_been_faster(recent: list[float], secs: float) -> None:
    assert late_after(recent, 0.05) == pytest.approx(secs)


def test_only_reads_of_that_size_or_larger_ones_say_when_a_read_is_late() -> None:
    pace = Pace()
    for _ in range(8):
        pace.note_read(100, 0.1)
    assert pace.late_secs(0) == pytest.approx(0.11)
    assert pace.late_secs(8 * MIB) == math.inf
    for _ in range(8):
        pace.note_read(16 * MIB, 1.0)
    assert pace.late_secs(8 * MIB) == pytest.approx(1.1)
    assert pace.late_secs(2 * MIB) == pytest.approx(1.1)
    assert pace.late_secs(100) == pytest.approx(0.11)


def test_old_answers_are_forgotten() -> None:
    pace = Pace()
    for secs in [9.0] * 100 + [0.1] * 64:
        pace.note_read(100, secs)
    assert pace.late_secs(100) == pytest.approx(0.11)


def test_a_twentieth_of_all_reads_may_be_repeated() -> None:
    """At first a few; after many good answers some in a row, and no more. Some are kept for those that stay late."""
    pace = Pace()
    assert [pace.may_repeat(1) for _ in range(3)] == [True, False, False]
    assert [pace.may_repeat(2) for _ in range(3)] == [True, True, False]
    repeated = 0
    for _ in range(2000):
        pace.count_read()
        repeated += pace.may_repeat(2)
    assert 90 <= repeated <= 100
    for _ in range(10_000):
        pace.count_read()
    assert sum(pace.may_repeat(1) for _ in range(1000)) == 8
    assert sum(pace.may_repeat(2) for _ in range(1000)) == 2


def test_the_pace_is_that_of_recent_requests() -> None:
    """Of reads and of uploads by themselves; the latency is that of the fastest small answer."""
    pace = Pace()
    assert pace.read_bytes(64 * MIB) == pace.upload_bytes(64 * MIB) == 8 * MIB
    for secs in (0.1, 0.9, 0.5):
        pace.note_read(0, secs)
    assert pace.read_bytes(64 * MIB) == pace.upload_bytes(64 * MIB) == 32 * MIB  # at a usual rate
    for _ in range(10):
        pace.note_upload(8 * MIB, 0.1 + 8 * MIB / 1e6)
        pace.note_read(8 * MIB, 0.1 + 8 * MIB / 1e9)
    assert pace.upload_bytes(64 * MIB) == 8 * MIB
    assert pace.read_bytes(64 * MIB) == 64 * MIB
