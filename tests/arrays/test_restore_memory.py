"""`StorageOptions.restore_memory_limit_bytes`: what a restore holds in host memory beside its result."""

from __future__ import annotations

import functools
import gc
import pathlib
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays import restore
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

    numpy = types.ModuleType("numpy")
    vars(numpy).update(vars(np), empty=functools.partial(counted, np.empty))
    monkeypatch.setattr(restore, "np", numpy)
    monkeypatch.setattr(mmap, "_bytes", functools.partial(counted, mmap._bytes))
    monkeypatch.setattr(mmap, "_SLAB_BYTES", 0)  # a map for each
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
    small = 128
    assert LEAVES * LEAF_BYTES <= held["all"] <= LEAVES * LEAF_BYTES + small
    expected = {None: held["all"], 6 * LEAF_BYTES: 4 * LEAF_BYTES, 1: LEAF_BYTES}[limit]
    assert expected <= held["peak"] <= expected + small


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ec.args.NodeSave])
def test_small_leaves_are_read_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    """Those that a restore reads together are as many as the limit allows, and never those of before."""
    allocate, sizes = mmap.Slabs.take, list[int]()

    def counted(self: mmap.Slabs, nbytes: int) -> np.ndarray:
        sizes.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(mmap.Slabs, "take", counted)
    state = {f"w{i:02}": jnp.arange(1024, dtype=jnp.float32) + i for i in range(12)}
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(restore_memory_limit_bytes=3 * 4096)) as manager:
        manager.save(0, args=save(state))
        manager.wait_until_finished()
        found = manager.restore(0)
    assert sizes == [3 * 4096] * 4
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_restored_arrays_share_memory_and_give_it_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole leaves lie as in their file, in few maps, which go with the last array; nothing else holds them."""
    allocate, maps = mmap._bytes, list[weakref.ref[Any]]()

    def noted(nbytes: int) -> np.ndarray:
        out = allocate(nbytes)
        maps.append(weakref.ref(out.base))
        return out

    monkeypatch.setattr(mmap, "_bytes", noted)
    state = {f"w{i:02}": jnp.arange(2**18, dtype=jnp.float32) + i for i in range(40)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        found = jax.block_until_ready(manager.restore(0))
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert len(maps) == 2  # 40 MiB
    one = found.pop("w00")
    found.clear()
    gc.collect()
    assert sum(each() is not None for each in maps) <= 1, "the other one is free"
    del one
    gc.collect()
    assert not any(each() for each in maps)
