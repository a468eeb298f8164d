"""Holds or breaks what a manager does to its store, at a chosen moment."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import epochckpt as ec

WAIT_SECS = 60.0


def eventually(look: Callable[[], bool]) -> bool:
    """Whether something that happens in the background happens."""
    deadline, pause = time.monotonic() + WAIT_SECS, threading.Event()
    while not look():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


def store_of(m: ec.CheckpointManager) -> Any:
    """The store of a manager, to break it on purpose."""
    return m.components.directory.store


class Tap:
    """Sees calls of one method of a manager's store before they happen.

    Args:
        m: the manager.
        method: its store's method.
        match: which paths (first arguments) concern us.
        action: what happens then, instead of blocking until `let_go`.
    """

    def __init__(
        self,
        m: ec.CheckpointManager,
        method: str,
        match: Callable[[str], bool],
        action: Callable[[], None] | None = None,
    ):
        self.reached, self.go, self._match, self._action = threading.Event(), threading.Event(), match, action
        self._store, self._method, self._original = store_of(m), method, getattr(store_of(m), method)
        setattr(self._store, method, self._call)

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self._match(path):
            self.reached.set()
            if self._action is not None:
                self._action()
            else:
                assert self.go.wait(WAIT_SECS)
        return self._original(path, *args, **kwargs)

    def remove(self) -> None:
        setattr(self._store, self._method, self._original)

    def let_go(self) -> None:
        self.remove()
        self.go.set()


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hold_commits(m: ec.CheckpointManager) -> Tap:
    return Tap(m, "create", is_record)


def is_record(path: str) -> bool:
    """Whether it is a commit record: that of a staged epoch, or of an attempt on an object store."""
    return re.search(r"/(epoch|[0-9a-f]{16}-\d+-\d+)\.json$", path) is not None


def hold_writes(m: ec.CheckpointManager) -> Tap:
    return Tap(m, "open_writer", is_data)


def fail_writes(m: ec.CheckpointManager) -> Tap:
    return Tap(m, "open_writer", is_data, no_space)


def is_data(path: str) -> bool:
    return path.endswith(".safetensors")
