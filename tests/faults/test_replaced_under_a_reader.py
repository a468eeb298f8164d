"""An epoch that is replaced while somebody reads it is deleted, and not damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays.restore import TreeRequest, restore_tree
from epochckpt.errors import (
    EpochDeletedError,
)
from tests.support.small_saves import Save


def arrays(value: int) -> Any:
    return Save({"a": np.arange(4.0 + value), "b": np.full(3, value)})


def same_arrays(value: int) -> Any:
    return Save({"a": np.full(4, value)})


def one_json(value: int) -> Any:
    return ocp.args.Composite(j=ocp.args.JsonSave({"v": "x" * value}))


def read_tree(reader: Any) -> Any:
    return restore_tree(reader, "default", TreeRequest())


def read_json(reader: Any) -> Any:
    return json.loads(reader.read_file("j", "metadata"))


@pytest.mark.parametrize("record_read", [False, True], ids=["before its node's record", "after it"])
@pytest.mark.parametrize(
    ("args", "read"),
    [(arrays, read_tree), (same_arrays, read_tree), (one_json, read_json)],
    ids=["arrays of another size", "arrays of the same size", "JSON"],
)
def test_an_epoch_replaced_under_its_reader_is_deleted_not_damaged(
    directory: str, record_read: bool, args: Callable[[int], Any], read: Callable[[Any], Any]
) -> None:
    """Another attempt is committed under the number: the reader says so, and nobody throws a sound epoch away."""
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=args(1))
        manager.wait_until_finished()
        reader = manager.components.readers.open(1).copyable()
        if record_read:
            reader.node_record(0)
        manager.delete(1)
        manager.components.saves.queue.drain_removals()
        assert manager.save(1, args=args(2))
        manager.wait_until_finished()
        with pytest.raises(EpochDeletedError):
            read(reader)
        read(manager.components.readers.open(1).copyable())
