"""How fast a bucket has answered lately, and what follows from that.

- The size of a request: a long latency, or a fast connection, asks for larger ones, so that a request carries bytes for
  most of its time. See `chunk_bytes`.
- When a read is late: see `late_after`.
"""

from __future__ import annotations

import collections
import math
import statistics
import threading
from collections.abc import Sequence

from epochckpt import _patience

CHUNKS_BYTES = (8 << 20, 16 << 20, 32 << 20, 64 << 20)
"""The sizes of a request for a part of a file. A smaller file is one request."""

MEMORY_BYTES = 512 << 20
"""Where requests are larger than the least, those that are under way at once have at most so many bytes."""

_LATENCIES = 4  # so much longer than the latency should a request carry bytes
_USUAL_CHUNKS = 256  # of one file: a very large one has larger chunks
_LONGEST_SECS = 15.0  # for one chunk: a request ends after `large_request_secs`
_USUAL_RATE = 64e6  # bytes a second of one request, before anything was measured

_RECENT = 64  # answers
_ENOUGH = 8  # answers, before a read can be late
_SMALL_BYTES = 64 << 10  # the time of a smaller answer is its latency
_RATED_BYTES = 1 << 20  # the time of a larger answer says how fast bytes come
_LATE_MEDIANS = 1.1
_LATE_QUANTILE = 0.95
_REPEATED = 0.05  # of all reads
_MOST_REPEATED = 10  # in a row, after many good answers
_RESERVED = 2  # of these for reads that are later than most that are late


def chunk_bytes(size: int, latency_secs: float, bytes_per_sec: float) -> int:
    """How much of a file one request carries: one of `CHUNKS_BYTES`, for a small file the least that holds it.

    Args:
        size: of the file in bytes.
        latency_secs: the time from a request to the first byte of its answer.
        bytes_per_sec: what one request carries after that, while as many as usual are under way.
    """
    by_latency = _LATENCIES * latency_secs * bytes_per_sec
    by_size = size / _USUAL_CHUNKS
    wanted = min(max(by_latency, by_size), _LONGEST_SECS * bytes_per_sec, size)
    return next((chunk for chunk in CHUNKS_BYTES if chunk >= wanted), CHUNKS_BYTES[-1])


def late_after(recent: Sequence[float], least_secs: float) -> float:
    """The seconds after which a read is late, by the seconds that others have taken; infinite after too few.

    That is the 95th percentile, and a tenth above the median, so that few reads are late where all take about as long.
    It is at least `least_secs`.
    """
    if len(recent) < _ENOUGH:
        return math.inf
    ordered = sorted(recent)
    high = ordered[math.ceil(_LATE_QUANTILE * len(ordered)) - 1]
    return max(least_secs, _LATE_MEDIANS * statistics.median(ordered), high)


def memory_bytes(concurrency: int) -> int:
    """What the chunks of all uploads of a store may take in memory.

    They take that much only where chunks are larger than the least.
    """
    least = concurrency * CHUNKS_BYTES[0]
    return max(least, min(4 * least, MEMORY_BYTES))


def span_bytes(wanted: int, concurrency: int) -> int:
    """How much one request reads, if `wanted` suits the store: as many requests as may be under way share the bound."""
    return max(CHUNKS_BYTES[0], min(wanted, MEMORY_BYTES // concurrency))


class Pace:
    """The times of the recent requests of one client. Any thread may use it."""

    def __init__(self) -> None:
        # Memory may be freed while it is held, which notes the upload that had it.
        self._lock = threading.RLock()
        self._secs: dict[int, collections.deque[float]] = {}  # of reads, by the class of their size
        self._read_rates = _recent()  # bytes a second
        self._upload_rates = _recent()
        self._allowed = 1.0 + _RESERVED  # reads that may be repeated now

    def note_read(self, nbytes: int, secs: float) -> None:
        """A read, or another small request, was answered with so many bytes."""
        with self._lock:
            self._secs.setdefault(_size_class(nbytes), _recent()).append(secs)
            self._note_rate(self._read_rates, nbytes, secs)

    def note_upload(self, nbytes: int, secs: float) -> None:
        """A part of a file was sent, and answered."""
        with self._lock:
            self._note_rate(self._upload_rates, nbytes, secs)

    def read_bytes(self, size: int) -> int:
        """How much of a file of this size one request reads."""
        with self._lock:
            return chunk_bytes(size, self._latency_secs(), _median(list(self._read_rates), _USUAL_RATE))

    def upload_bytes(self, size: int) -> int:
        """How much of a file of this size one request uploads."""
        with self._lock:
            return chunk_bytes(size, self._latency_secs(), _median(list(self._upload_rates), _USUAL_RATE))

    def memory_bytes(self, concurrency: int) -> int:
        """What the chunks of all uploads may take in memory."""
        return memory_bytes(concurrency)

    def late_secs(self, nbytes: int) -> float:
        """The seconds after which a read of so many bytes is late; infinite if nothing is known.

        It rests on reads of about that size, or on larger ones, which take longer.
        """
        least = _size_class(nbytes)
        least_secs = _patience.now().late_read_secs
        with self._lock:
            found = [late_after(self._secs[key], least_secs) for key in sorted(self._secs) if key >= least]
        return next((secs for secs in found if secs < math.inf), math.inf)

    def count_read(self) -> None:
        """A read begins: some part of all may be repeated."""
        with self._lock:
            self._allowed = min(self._allowed + _REPEATED, _MOST_REPEATED)

    def may_repeat(self, looks: int) -> bool:
        """Whether a read that is late may be repeated; then it is counted as repeated.

        `looks` says how often this was asked for this read: where times vary, many are late for a moment.
        """
        with self._lock:
            if self._allowed < (1 if looks > 1 else 1 + _RESERVED):
                return False
            self._allowed -= 1
            return True

    def _latency_secs(self) -> float:
        """The shortest: others may have waited for the bytes of larger requests."""
        return min(self._secs.get(_size_class(0), ()), default=0.0)

    def _note_rate(self, rates: collections.deque[float], nbytes: int, secs: float) -> None:
        if nbytes >= _RATED_BYTES:
            rates.append(nbytes / max(secs - self._latency_secs(), secs / 10, 1e-9))


def _recent() -> collections.deque[float]:
    return collections.deque(maxlen=_RECENT)


def _median(values: Sequence[float], default: float) -> float:
    return statistics.median(values) if values else default


def _size_class(nbytes: int) -> int:
    """Sizes of one class differ by less than a factor of four; all small ones are one class."""
    return max(nbytes, _SMALL_BYTES).bit_length() // 2
