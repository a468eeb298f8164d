"""`item_metadata` and `metadata(step)`: what they say of a leaf and of the items, compared with stock Orbax."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from tests.support.managers import sharding

Manager = type[ec.CheckpointManager] | type[ocp.CheckpointManager]
both_write = pytest.mark.parametrize("writer", [ocp.CheckpointManager, ec.CheckpointManager])
LOSS = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])


def state() -> dict[str, Any]:
    """Split and whole arrays of jax and NumPy, numbers and texts, in dicts and lists."""
    return {
        "split": jax.device_put(np.arange(32, dtype=np.int32).reshape(8, 4), sharding("model")),
        "layers": {"e.f": jnp.zeros((3, 2)), "list": [1, 2.5, np.arange(4, dtype=np.int16), True]},
        "text": "hello",
        "empty": {},
    }


def described(metadata: Any) -> dict[str, Any]:
    """What is said of each leaf, by its place in the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(metadata.tree, is_leaf=lambda x: isinstance(x, ocp.metadata.Metadata))
    fields = ("name", "shape", "dtype", "storage")
    return {
        jax.tree_util.keystr(path): (type(leaf), *(getattr(leaf, field, None) for field in fields))
        for path, leaf in leaves[0]
    }


def read(manager_class: Manager, directory: pathlib.Path) -> dict[str, Any]:
    """The description that a new manager gives of the unnamed item of step 0."""
    with manager_class(directory, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        return described(manager.item_metadata(0))


@both_write
def test_a_leaf_has_the_name_and_the_chunks_that_stock_orbax_gives(writer: Manager, tmp_path: pathlib.Path) -> None:
    """Names are joined by dots; `storage` has the shapes of an array's parts in the files, and a number has none."""
    for manager_class, folder in ((writer, "run"), (ocp.CheckpointManager, "expected")):
        with manager_class(tmp_path / folder) as manager:
            manager.save(0, args=ocp.args.PyTreeSave(state()))
    expected = read(ocp.CheckpointManager, tmp_path / "expected")
    assert read(ec.CheckpointManager, tmp_path / "run") == expected
    assert expected["['layers']['list'][2]"][1] == "layers.list.2"
    assert expected["['split']"][-1] == ocp.metadata.StorageMetadata(chunk_shape=(2, 4), write_shape=(2, 4))


def test_the_precision_of_a_number_of_numpy_in_a_stock_step_is_named(tmp_path: pathlib.Path) -> None:
    """Orbax stores such a number as a scalar with its dtype; it is restored as a Python number."""
    saved = {"half": np.float16(0.5), "int": np.int32(4), "float": 2.5}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(saved))
    found = read(ec.CheckpointManager, tmp_path)
    assert found == read(ocp.CheckpointManager, tmp_path)
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.restore(0, args=ocp.args.StandardRestore(manager.item_metadata(0))) == saved


def test_an_array_without_elements_and_a_bare_array_are_described(tmp_path: pathlib.Path) -> None:
    """Stock Orbax cannot save the first; the second has no keys, and an empty name."""
    items = {"tree": ocp.args.StandardSave({"none": np.zeros((0, 3))}), "bare": ocp.args.ArraySave(jnp.zeros(5))}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        found = manager.item_metadata(0)
    assert found["tree"]["none"].shape == found["tree"]["none"].storage.chunk_shape == (0, 3)
    assert (found["bare"].tree.name, found["bare"].tree.storage.chunk_shape) == ("", (5,))


@both_write
@pytest.mark.parametrize("named", [True, False])
def test_metrics_are_an_item_of_a_step_that_has_some(writer: Manager, named: bool, tmp_path: pathlib.Path) -> None:
    """With a handler in `metadata(step)`, and without a description among named items: as stock Orbax says it."""
    tree = ocp.args.StandardSave({"w": jnp.ones(2)})
    with writer(tmp_path, options=LOSS) as manager:
        for step, metrics in enumerate([{"loss": 0.5}, None]):
            manager.save(step, args=ocp.args.Composite(state=tree) if named else tree, metrics=metrics)
    with ec.CheckpointManager(tmp_path, options=LOSS) as manager:
        with_metrics, without = manager.metadata(0), manager.metadata(1)
        item = "state" if named else "default"
        assert set(with_metrics.item_handlers) == {item, "metrics"}
        assert with_metrics.item_handlers["metrics"] == ocp.handlers.JsonCheckpointHandler.typestr()
        assert with_metrics.metrics == {"loss": 0.5}
        assert set(without.item_handlers) == {item}
        if named:
            assert set(with_metrics.item_metadata) == set(manager.item_metadata(0)) == {"state", "metrics"}
            assert with_metrics.item_metadata["metrics"] is None
            assert set(without.item_metadata) == {"state"}
        else:
            assert with_metrics.item_metadata["w"].shape == (2,)


Composite, Save = ocp.args.Composite, ocp.args.StandardSave


Composite, Save = ocp.args.Composite, ocp.args.StandardSave


STATE = {"w": jnp.arange(6.0)}


def test_the_metadata_of_a_bare_array_is_a_target(tmp_path: pathlib.Path) -> None:
    """For ArrayRestore and StandardRestore; metadata with other custom_metadata is still the same kind of tree."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in range(2):
            tree = Save(STATE, custom_metadata={"epoch": epoch})
            manager.save(epoch, args=Composite(a=ocp.args.ArraySave(jnp.arange(3.0)), t=tree))
        manager.wait_until_finished()
        one, two = manager.item_metadata(0), manager.item_metadata(1)
        for args in (ocp.args.ArrayRestore(one["a"]), ocp.args.StandardRestore(one["a"])):
            np.testing.assert_array_equal(manager.restore(0, args=Composite(a=args)).a, np.arange(3.0))
        same = jax.tree.map(lambda x, y: x.shape == y.shape, one["t"], two["t"])
        assert same.tree == {"w": True}
        assert same.custom_metadata == {"epoch": 0}


@pytest.mark.parametrize("keys", [("b", "a"), ("b", 1)])
def test_metadata_has_the_order_of_the_saved_tree(tmp_path: pathlib.Path, keys: tuple[Any, ...]) -> None:
    """That of an OrderedDict, whose keys JAX does not sort, and need not be able to."""
    tree = collections.OrderedDict((key, jnp.zeros(size)) for size, key in enumerate(keys, 1))
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Save(tree))
        manager.wait_until_finished()
        found = manager.item_metadata(0)
    assert [x.shape for x in jax.tree.leaves(found)] == [(1,), (2,)]
    shapes = jax.tree.map(lambda x: x.shape[0], found)
    assert list(shapes.tree.items()) == list(zip(keys, (1, 2), strict=True))
    assert type(shapes.tree) is dict
