"""What a user hands in is kept as JSON up to a depth, and refused beyond it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import checksums


@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: [inner], lambda inner: (inner,)])
def test_the_depth_of_user_data_is_bounded(wrap: Any) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = wrap(deep)
    packed = checksums.pack_json(deep, "custom_metadata")
    for _ in range(100):
        (packed,) = packed.values() if isinstance(packed, dict) else packed
    assert packed == 1
    with pytest.raises(InvalidArgumentError, match="custom_metadata is nested deeper than 100"):
        checksums.pack_json(wrap(deep), "custom_metadata")


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 1_000_000])
def test_a_checksum_is_that_of_all_bytes(nbytes: int) -> None:
    """However many of them are hashed at once."""
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert checksums.xxh3(data) == xxhash.xxh3_64_intdigest(data)
    assert checksums.xxh3(memoryview(data)) == checksums.xxh3(bytearray(data)) == checksums.xxh3(data)


def test_a_checksum_gives_no_turn_to_other_threads() -> None:
    """A thread that runs Python all the time would give it back only after an interval, here of ten minutes."""
    data = bytes(4 * 2**20)
    began = threading.Event()
    turns: list[int] = []
    running = True

    def run() -> None:
        began.wait()
        while running:
            turns.append(len(turns))
            if len(turns) > 100:
                return

    thread = threading.Thread(target=run)
    thread.start()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        began.set()
        checksums.xxh3(data)
        seen = len(turns)
    finally:
        sys.setswitchinterval(usual)
        running = False
        thread.join()
    assert not seen
