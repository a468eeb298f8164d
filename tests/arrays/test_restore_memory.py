"""`StorageOptions.restore_memory_limit_bytes`: what a restore holds in host memory beside its result."""

from __future__ import annotations

import functools
import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays import assembly
from epochckpt.storage import mmap

LEAVES, LEAF_BYTES = 24, 2**18


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of the buffers that leaves are read into: now, at most, and in all."""
    counts = {"now": 0, "peak": 0, "all": 0}

    def gone(nbytes: int) -> None:
        counts["now"] -= nbytes

    def counted(allocate: Callable[..., np.ndarray], *asked: Any) -> np.ndarray:
        out = allocate(*asked)
        counts["now"] += out.nbytes
        counts["all"] += out.nbytes
        counts["peak"] = max(counts["peak"], counts["now"])
        weakref.finalize(out if out.base is None else out.base, gone, out.nbytes)
        return out

    for name in ("_empty", "_memory"):
        monkeypatch.setattr(assembly, name, functools.partial(counted, getattr(assembly, name)))
    return counts


@pytest.mark.parametrize("limit", [None, 6 * LEAF_BYTES, 1])
def test_buffers_stay_below_the_limit(tmp_path: pathlib.Path, held: dict[str, int], limit: int | None) -> None:
    """Leaves are cast, so that no buffer becomes the result; a leaf counts with its cast, and may exceed the limit."""
    state = {f"w{i:02}": jnp.arange(LEAF_BYTES // 4, dtype=jnp.float32) % 97 + i for i in range(LEAVES)}
    state |= {f"w{i:02}": np.asarray(state[f"w{i:02}"]) for i in range(0, LEAVES, 3)}  # NumPy arrays beside jax's
    state |= {"b": jnp.float32(0.5), "n": np.arange(3), "s": "text"}
    half = {name: jnp.bfloat16 for name in state if name[0] in "wb"}
    target = {**state, **{name: jax.ShapeDtypeStruct(state[name].shape, dtype) for name, dtype in half.items()}}
    storage = ec.StorageOptions(restore_memory_limit_bytes=limit)
    with ec.CheckpointManager(tmp_path, storage=storage) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        found = manager.restore(0, args=ocp.args.StandardRestore(target))
    for name, dtype in half.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], state[name].astype(dtype))
    assert found["s"] == "text"
    assert found["n"].tolist() == [0, 1, 2]
    small = 64 + 24  # `b`, aligned, and `n`
    assert LEAVES * LEAF_BYTES <= held["all"] <= LEAVES * LEAF_BYTES + small
    expected = {None: held["all"], 6 * LEAF_BYTES: 4 * LEAF_BYTES, 1: LEAF_BYTES}[limit]
    assert expected <= held["peak"] <= expected + small


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ec.args.NodeSave])
def test_small_leaves_are_read_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    """Those that a restore reads together are as many as the limit allows, and never those of before."""
    allocate, sizes = assembly._memory, list[int]()

    def counted(nbytes: int) -> np.ndarray:
        sizes.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(assembly, "_memory", counted)
    state = {f"w{i:02}": jnp.arange(1024, dtype=jnp.float32) + i for i in range(12)}
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(restore_memory_limit_bytes=3 * 4096)) as manager:
        manager.save(0, args=save(state))
        manager.wait_until_finished()
        found = manager.restore(0)
    assert sizes == [3 * 4096] * 4
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, weakref.ref[Any]]]:
    """The maps that a restore makes: the bytes of each, and itself as long as it lives."""
    allocate, made = assembly.fresh, list[tuple[int, weakref.ref[Any]]]()

    def noted(nbytes: int) -> np.ndarray:
        out = allocate(nbytes)
        made.append((nbytes, weakref.ref(out.base)))
        return out

    monkeypatch.setattr(assembly, "fresh", noted)
    return made


def alive(maps: list[tuple[int, weakref.ref[Any]]]) -> int:
    gc.collect()
    return sum(nbytes for nbytes, each in maps if each() is not None)


def test_restored_arrays_share_memory_and_give_it_back(
    tmp_path: pathlib.Path, maps: list[tuple[int, weakref.ref[Any]]]
) -> None:
    """Whole leaves lie in few maps, on several devices, too; each goes with the last array in it."""
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:4], ("x",)), jax.sharding.PartitionSpec())
    state = {f"w{i:02}": jax.device_put(np.full(2**18, i, np.float32), place) for i in range(40)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        found = jax.block_until_ready(manager.restore(0))
    jax.tree.map(np.testing.assert_array_equal, found, state)
    made = [nbytes for nbytes, _ in maps]
    assert made == [32 * 2**20, 8 * 2**20]
    one = found.pop("w39")
    found.clear()
    assert alive(maps) == made[-1]
    del one
    assert alive(maps) == 0


def test_what_is_cast_holds_no_memory(tmp_path: pathlib.Path, maps: list[tuple[int, weakref.ref[Any]]]) -> None:
    """The bytes of leaves that were cast are free, also if leaves beside them in the file were not cast."""
    state = {f"w{i:02}": jnp.arange(2**18, dtype=jnp.float32) + i for i in range(12)}
    kept = ("w03", "w08")
    target = {n: jax.ShapeDtypeStruct(x.shape, np.float32 if n in kept else jnp.bfloat16) for n, x in state.items()}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        found = jax.block_until_ready(manager.restore(0, args=ocp.args.StandardRestore(target)))
    for name, array in state.items():
        np.testing.assert_array_equal(found[name], array.astype(target[name].dtype))
    assert alive(maps) == len(kept) * 2**20


def test_memory_that_the_system_does_not_give() -> None:
    """It is no OSError, which would be one of storage."""
    with pytest.raises(MemoryError, match="bytes of memory"):
        mmap.fresh(2**60)
