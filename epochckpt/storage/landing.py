"""The memory that the answer of one ranged read goes to."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Sequence

from epochckpt._lazy import np

Buffer = bytes | memoryview


class Landing:
    """Buffers that are filled as one stretch of bytes, by any thread, until the landing is closed.

    Once `close` or `replace` has returned, no thread changes the buffers any more: whoever asked for the bytes may have
    them from another request by then, and a request that is late cannot always be ended.

    Args:
        parts: writable, C-contiguous buffers, one after the other.

    Attributes:
        nbytes: bytes of all parts.
    """

    def __init__(self, parts: Sequence[memoryview]):
        self._parts = [np.frombuffer(part, np.uint8) for part in parts if part.nbytes]
        self._ends = list(itertools.accumulate(len(part) for part in self._parts))
        self.nbytes = self._ends[-1] if self._ends else 0
        self._open = True
        self._lock = threading.Lock()

    def put(self, at: int, data: Buffer) -> bool:
        """Copies some bytes to their place, from `at` on; False if the landing is closed, and nothing was copied."""
        with self._lock:
            if self._open:
                self._copy(at, np.frombuffer(data, np.uint8))
            return self._open

    def replace(self, data: Buffer) -> None:
        """Fills all parts with other bytes, and closes; does nothing once it is closed."""
        with self._lock:
            if self._open and self.nbytes:
                self._copy(0, np.frombuffer(data, np.uint8))
            self._open = False

    def close(self) -> None:
        """From now on nothing is copied."""
        with self._lock:
            self._open = False

    def _copy(self, at: int, source: np.ndarray) -> None:
        done = 0
        number = bisect.bisect_right(self._ends, at)
        while done < len(source):
            part = self._parts[number]
            start = at + done - (self._ends[number] - len(part))
            length = min(len(part) - start, len(source) - done)
            part[start : start + length] = source[done : done + length]
            done += length
            number += 1
