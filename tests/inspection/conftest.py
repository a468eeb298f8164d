"""What the tests of inspection share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from epochckpt.directory import posix


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Saves stop just before they become visible: (one has come so far, go on)."""
    reached, go_on = threading.Event(), threading.Event()
    publish = posix.PosixWriter.publish

    def wait(*args: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return publish(*args)

    monkeypatch.setattr(posix.PosixWriter, "publish", wait)
    yield reached, go_on
    go_on.set()
