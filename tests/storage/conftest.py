"""The tests of storage are about the disk, so that is where their files are."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture
def tmp_path(on_disk: pathlib.Path) -> pathlib.Path:
    return on_disk
