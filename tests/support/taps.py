"""Rules about what one manager does to its store: it waits, or fails, at a chosen moment.

Whoever opens the manager does so with the fixture `faults`, or within `Faults().everywhere()`.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import epochckpt as ec
from epochckpt.storage import Store
from epochckpt.testing import Faults, FaultyStore, StoreCall
from epochckpt.testing.faults import Failure, Hold

WAIT_SECS = 60.0
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def eventually(look: Callable[[], bool]) -> bool:
    """Whether something that happens in the background happens."""
    deadline, pause = time.monotonic() + WAIT_SECS, threading.Event()
    while not look():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


def store_of(m: ec.CheckpointManager) -> Any:
    """The store of a manager."""
    return m.components.directory.store


def faults_of(m: ec.CheckpointManager) -> Faults:
    """The rules that the store of a manager follows."""
    store = store_of(m)
    assert isinstance(store, FaultyStore), "open it with the fixture `faults`"
    return store.faults


def calls_of(m: ec.CheckpointManager, match: Callable[[str], bool]) -> Callable[[StoreCall], bool]:
    """For a rule's `where`: the calls of this manager's store about such a path."""
    store = store_of(m)
    return lambda call: call.store is store and match(call.path)


def hold_commits(m: ec.CheckpointManager) -> Hold:
    return faults_of(m).hold(Store.create, where=calls_of(m, is_record))


def is_record(path: str) -> bool:
    """Whether it is a commit record: that of a staged epoch, or of an attempt on an object store."""
    return re.search(r"/(epoch|[0-9a-f]{16}-\d+-\d+)\.json$", path) is not None


def hold_writes(m: ec.CheckpointManager) -> Hold:
    return faults_of(m).hold(Store.open_writer, where=calls_of(m, is_data))


def fail_writes(m: ec.CheckpointManager) -> Failure:
    return faults_of(m).fail(Store.open_writer, NO_SPACE, where=calls_of(m, is_data))


def is_data(path: str) -> bool:
    return path.endswith(".safetensors")
