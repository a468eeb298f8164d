"""A file descriptor that several threads use."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager


class Handle:
    """A file descriptor shared by threads. It is closed when the last use of it has ended, not before."""

    def __init__(self, fd: int, name: str):
        self.name = name
        self._fd = fd
        self._lock = threading.Lock()
        self._uses = 0
        self._closed = False

    @contextmanager
    def use(self) -> Generator[int]:
        """Holds the descriptor open; ValueError if it is closed."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.name} is closed")
            self._uses += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._uses -= 1
                last = self._closed and not self._uses
            if last:
                os.close(self._fd)

    def busy(self) -> bool:
        """Whether somebody uses the descriptor now."""
        with self._lock:
            return self._uses > 0

    def close(self) -> None:
        """Closes now, or as soon as the last use has ended."""
        with self._lock:
            unused = not self._closed and not self._uses
            self._closed = True
        if unused:
            os.close(self._fd)
