"""What the fault suites share."""

import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def in_memory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder on a file system in memory, where there is one: its durability costs nothing."""
    place = "/dev/shm"
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield pathlib.Path(name)
