"""The host memory that a save states before it copies: no snapshot holds more, and the limit sees all of it."""

import pathlib
import tracemalloc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import epochckpt as ec
from epochckpt.arrays.save_items import TreeItem
from epochckpt.arrays.snapshot import SavePlan, Snapshot
from epochckpt.errors import InvalidArgumentError

SMALL_BYTES = 60 * 1024  # cells of so many bytes are copied together


def small_arrays(count: int) -> dict[str, jax.Array]:
    return {f"{i:04}": jnp.full(SMALL_BYTES // 4, i, jnp.float32) for i in range(count)}


def transposed() -> jax.Array:
    """An array that is not laid out in C order."""
    layout = Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(jax.devices()[0]))
    return jax.device_put(jnp.arange(500 * 300, dtype=jnp.float32).reshape(500, 300), layout)


def sharded() -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(np.zeros((len(jax.devices()), 50_000), np.float32), NamedSharding(mesh, PartitionSpec("x")))


TREES: dict[str, Any] = {
    "small arrays": lambda: small_arrays(50),
    "large arrays": lambda: {"a": jnp.zeros(100_000), "b": sharded()},
    "transposed": lambda: {"a": transposed(), "b": jnp.zeros(100_000)},
    "NumPy": lambda: {"a": np.zeros(100_000), "b": np.zeros(10), "c": np.zeros((500, 300)).T, "d": "x" * 100_000},
    "keys": lambda: {
        "few": jax.random.split(jax.random.key(0), 4),
        "many": jax.random.split(jax.random.key(0), 20_000),
    },
    "values": lambda: {"a": 1, "b": None, "c": "text"},
    "all": lambda: {name: TREES[name]() for name in TREES if name != "all"},
}


def plan_of(manager: ec.CheckpointManager, tree: Mapping[str, Any]) -> SavePlan:
    return manager.components.saves.planner.plan([TreeItem("default", tree=tree)])


def held_bytes(snapshot: Snapshot) -> int:
    """Bytes of the buffers that are memory of the snapshot's own; a view has a sample."""
    return sum(buffer.nbytes for tree in snapshot.trees for buffer in tree.buffers if buffer.sample is None)


@pytest.mark.parametrize("name", TREES)
def test_a_snapshot_holds_what_its_plan_has_stated(tmp_path: pathlib.Path, name: str) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("about arrays in host memory")
    tree = TREES[name]()
    with ec.CheckpointManager(tmp_path) as manager:
        plan = plan_of(manager, tree)
        stated = plan.place_copies()
        snapshot = plan.snapshot()
        assert stated == held_bytes(snapshot)
        assert snapshot.host_copy_bytes == stated
        assert manager.save(0, args=ocp.args.StandardSave(tree))


def test_small_numpy_leaves_are_copied_one_after_another(tmp_path: pathlib.Path) -> None:
    """Beside the memory that they are copied to, which is mapped and not traced, there is never more than one copy."""
    tree = {f"{i:04}": np.full(SMALL_BYTES // 4, i, np.float32) for i in range(50)}
    with ec.CheckpointManager(tmp_path) as manager:
        plan_of(manager, tree).snapshot()  # what only the first save of a tree makes
        plan = plan_of(manager, tree)
        tracemalloc.start()
        try:
            plan.snapshot()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert SMALL_BYTES <= peak < 5 * SMALL_BYTES


def test_the_limit_counts_small_arrays(tmp_path: pathlib.Path) -> None:
    """Arrays on a CPU whose copies together are more than the limit are refused, as large NumPy arrays are."""
    storage = ec.StorageOptions(host_memory_limit_bytes=2**20)
    with ec.CheckpointManager(tmp_path, storage=storage) as manager:
        assert manager.save(0, args=ocp.args.StandardSave(small_arrays(10)))
        manager.wait_until_finished()
        with pytest.raises(InvalidArgumentError, match=r"copies 1\.2 MB to host memory"):
            manager.save(1, args=ocp.args.StandardSave(small_arrays(20)))
