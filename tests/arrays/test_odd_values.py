"""Values and trees that are rare: masked arrays, values that are not finite, static data, axes with types."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.arrays import save_items
from epochckpt.errors import (
    InvalidArgumentError,
    MismatchError,
)
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.small_saves import MOMENT_SECS, Restore, Save, save_all, state


def test_masked_arrays_are_refused_by_name(directory: str) -> None:
    """Their mask would be lost."""
    masked = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])
    with ec.CheckpointManager(directory) as manager:
        with pytest.raises(InvalidArgumentError, match=r"layer/masked.*MaskedArray"):
            manager.save(1, args=Save({"layer": {"masked": masked}}))
        manager.save(1, args=Save({"layer": {"masked": masked.data}}))
        with pytest.raises(InvalidArgumentError, match=r"layer/masked.*MaskedArray"):  # not by the plan of that
            manager.save(2, args=Save({"layer": {"masked": masked}}))
        save_all(manager, [2])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["table"])
@dataclasses.dataclass
class _Static:
    w: np.ndarray
    table: np.ndarray


def test_trees_whose_static_data_cannot_be_compared_are_saved_again(directory: str) -> None:
    """No plan is found for an array as auxiliary data of a node; each save makes its own."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2, 3):
            table = np.arange(epoch + 1)  # new: the same object would be equal
            manager.save(epoch, args=Save({"node": _Static(np.full(2, epoch), table)}))
        manager.wait_until_finished()
        assert [manager.restore(epoch)["node"]["w"].tolist() for epoch in (1, 2, 3)] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("target", [False, 0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_restored_as_bool_or_int(directory: str, value: float, target: Any) -> None:
    """NaN is neither True nor a number of any kind."""
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save({"a": value}))
        manager.wait_until_finished()
        with pytest.raises((MismatchError, InvalidArgumentError), match="a"):
            manager.restore(1, args=Restore({"a": target}))
        found = manager.restore(1, args=Restore({"a": 0.0}))["a"]
        assert found == value or (math.isnan(found) and math.isnan(value))


def test_item_metadata_is_a_target_for_bytes_too(directory: str) -> None:
    """Orbax has one class for text; bytes come back as bytes."""
    tree = {"raw": b"xx\x00\xff", "long": b"y" * 5000, "text": "é", "n": np.float32(3)}
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save(tree))
        manager.wait_until_finished()
        assert manager.restore(1, args=Restore(manager.item_metadata(1))) == tree


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_sharding_is_restored_with_the_types_of_its_axes(directory: str, kind: AxisType) -> None:
    """Without a target the array has the very sharding that was saved, so that it can be used together with others."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    saved = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save({"w": saved}))
        manager.wait_until_finished()
        found = manager.restore(1)["w"]
    assert found.sharding == saved.sharding
    assert found.sharding.mesh.axis_types == mesh.axis_types
    assert ((found + saved) == 2 * np.arange(8.0)).all()


def test_a_sharding_of_the_default_mesh_is_restored(directory: str) -> None:
    """`jax.make_mesh` without axis types, whatever its default is."""
    saved = jax.device_put(jnp.arange(8.0), NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x")))
    with ec.CheckpointManager(directory) as manager:
        assert manager.save(1, args=Save({"w": saved}))
        manager.wait_until_finished()
        assert manager.restore(1)["w"].sharding == saved.sharding


def test_a_slow_commit_holds_saves_back_and_fails_none(tmp_path: pathlib.Path, faults: Faults) -> None:
    """Storage that renames slowly: a loop that saves faster than that waits in `save()`, and every epoch commits."""
    epochs = [str(epoch) for epoch in range(10)]
    slow = faults.before(
        Store.rename, lambda _: threading.Event().wait(MOMENT_SECS), where=lambda call: call.target in epochs
    )
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in range(10):
            manager.save(epoch, args=Save(state(epoch)))
        manager.wait_until_finished()
        assert manager.all_steps() == list(range(10))
    assert slow.hits == 10


STATE = {"w": jnp.arange(6.0)}


@pytest.mark.parametrize(
    ("array", "dtype", "fits"),
    [
        (np.int8([-1, 2]), np.uint16, False),
        (np.int32([-1]), np.uint32, False),
        (np.uint32([2**32 - 1]), np.int32, False),
        (np.int64([2**31 - 1, -(2**31)]), np.int32, True),
        (np.int64([2**31]), np.int32, False),
        (np.int8([1, 2]), np.uint8, True),
        (jnp.array([-1], jnp.int8), np.uint8, False),
        (jnp.array([3], jnp.int32), np.int8, True),
    ],
)
def test_integers_are_saved_in_another_type_only_if_they_fit(array: Any, dtype: Any, fits: bool) -> None:
    """Signs included."""
    tree, save_args = {"a": array}, {"a": ocp.SaveArgs(dtype=np.dtype(dtype))}
    if fits:
        got = save_items.cast("x", tree, save_args)["a"]
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.asarray(array))
    else:
        with pytest.raises(ec.errors.InvalidArgumentError, match="leaf 'a': not every value"):
            save_items.cast("x", tree, save_args)


def test_save_args_that_are_none_are_refused(tmp_path: pathlib.Path) -> None:
    """By item and leaf."""
    args = ocp.args.PyTreeSave(STATE, save_args={"w": 5})
    with (
        ec.CheckpointManager(tmp_path) as manager,
        pytest.raises(ec.errors.InvalidArgumentError, match="item 'default': save_args has a int at 'w'"),
    ):
        manager.save(0, args=args)
