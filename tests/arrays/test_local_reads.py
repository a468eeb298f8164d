"""The files of a local directory are read with few calls of the system, and without bytes that nobody asked for."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays import Request

BLOCK = 4096
ROWS = 1024  # of one block each


@contextlib.contextmanager
def calls() -> Iterator[list[int]]:
    """How many bytes each call reads."""
    found: list[int] = []
    preadv = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        found.append(sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield found


def test_a_large_file_is_read_with_few_calls(tmp_path: pathlib.Path) -> None:
    """After each call a thread may wait for its turn to run Python. So a sixteenth of the file is read at once."""
    saved = np.arange(ROWS * BLOCK // 4, dtype=np.int32).reshape(ROWS, -1)
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(block_bytes=BLOCK)) as manager:
        manager.save(0, args=ocp.args.StandardSave({"large": saved, "small": np.arange(3)}))
        manager.wait_until_finished()
        with calls() as sizes:
            restored = manager.restore(0)
        assert np.array_equal(restored["large"], saved)
        large = [nbytes for nbytes in sizes if nbytes > 32 * BLOCK]
        assert len(large) <= 17
        assert sum(large) > saved.nbytes * 0.9
        with calls() as sizes:
            assert manager.verify(0).ok
        assert len([nbytes for nbytes in sizes if nbytes > 32 * BLOCK]) <= 17


@pytest.mark.parametrize("row", [0, 5, ROWS - 1])
def test_a_row_costs_the_blocks_that_it_lies_in(tmp_path: pathlib.Path, row: int) -> None:
    """No bytes are read beside them."""
    saved = np.arange(ROWS * BLOCK // 4, dtype=np.int32).reshape(ROWS, -1)
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(block_bytes=BLOCK)) as manager:
        manager.save(0, args=ocp.args.StandardSave({"large": saved}))
        manager.wait_until_finished()
        native, _ = manager.source(0)
        assert native is not None
        native.load_records([0])
        found = np.empty((1, BLOCK // 4), np.int32)
        with calls() as sizes:
            native.read([Request("default", 0, ((row, row + 1), (0, BLOCK // 4)), found)])
    assert np.array_equal(found[0], saved[row])
    assert sum(sizes) <= 2 * BLOCK
