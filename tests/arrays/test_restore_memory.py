"""`StorageOptions.restore_memory_limit_bytes`: what a restore holds in host memory beside its result."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays import Pack, Request, restore
from epochckpt.format import Box
from epochckpt.storage import mmap
from tests.support.taps import eventually

LEAVES, LEAF_BYTES = 24, 2**18


class Watched:
    """An epoch that is restored from, and the memory that its bytes are read into.

    Attributes:
        now, peak, all: the bytes of the buffers: now, at most, and in all.
        memory: the bytes of each piece of memory that leaves share, and itself as long as it lives.
    """

    def __init__(self, manager: ec.CheckpointManager):
        source, _ = manager.source(0)
        assert source is not None
        self._source = source
        self.folder = source.folder
        self.record = source.record
        self.now = self.peak = self.all = 0
        self._older = 0  # bytes that are still there when memory is about to be allocated
        self.memory: list[tuple[int, weakref.ref[Any]]] = []

    def restore(self, target: Any = None, memory_limit_bytes: int | None = None) -> Any:
        request = restore.TreeRequest(target, memory_limit_bytes=memory_limit_bytes)
        return restore.restore_tree(self, "default", request)

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None:
        for pack in packs:
            self.memory.append((pack.out.nbytes, weakref.ref(pack.out.base)))
        new = sum(each.out.nbytes for each in (*requests, *packs))
        self.peak = max(self.peak, max(self.now, self._older) + new)
        self._older = 0
        self.now += new
        self.all += new
        for each in (*requests, *packs):
            weakref.finalize(each.out if each.out.base is None else each.out.base, self._gone, each.out.nbytes)
        self._source.read(requests, packs)

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        self._older = max(self._older, self.now)
        self._source.check_files(item, leaf, box)

    @property
    def alive(self) -> int:
        """The bytes of the memory that leaves share, as far as there are such leaves."""
        gc.collect()
        return sum(nbytes for nbytes, each in self.memory if each() is not None)

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 6 * LEAF_BYTES, 1])
def test_buffers_stay_below_the_limit(tmp_path: pathlib.Path, limit: int | None) -> None:
    """Leaves are cast, so that no buffer becomes the result; a leaf counts with its cast, and may exceed the limit."""
    state = {f"w{i:02}": jnp.arange(LEAF_BYTES // 4, dtype=jnp.float32) % 97 + i for i in range(LEAVES)}
    state |= {f"w{i:02}": np.asarray(state[f"w{i:02}"]) for i in range(0, LEAVES, 3)}  # NumPy arrays beside jax's
    state |= {"b": jnp.float32(0.5), "n": np.arange(3), "s": "text"}
    half = {name: jnp.bfloat16 for name in state if name[0] in "wb"}
    target = {**state, **{name: jax.ShapeDtypeStruct(state[name].shape, dtype) for name, dtype in half.items()}}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        held = Watched(manager)
        found = held.restore(target, limit)
    for name, dtype in half.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], state[name].astype(dtype))
    assert found["s"] == "text"
    assert found["n"].tolist() == [0, 1, 2]
    small = 64 + 24  # `b`, aligned, and `n`
    assert LEAVES * LEAF_BYTES <= held.all <= LEAVES * LEAF_BYTES + small
    expected = {None: held.all, 6 * LEAF_BYTES: 4 * LEAF_BYTES, 1: LEAF_BYTES}[limit]
    assert expected <= held.peak <= expected + small


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ec.args.NodeSave])
def test_small_leaves_are_read_once(tmp_path: pathlib.Path, save: Any) -> None:
    """Those that a restore reads together are as many as the limit allows, and never those of before."""
    sizes = list[float]()

    def listen(event: str, value: float, **_: Any) -> None:
        if event == "/jax/orbax/read/worker/io/requested/gbytes":
            sizes.append(value * 2**30)

    state = {f"w{i:02}": jnp.arange(1024, dtype=jnp.float32) + i for i in range(12)}
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(restore_memory_limit_bytes=3 * 4096)) as manager:
        manager.save(0, args=save(state))
        manager.wait_until_finished()
        jax.monitoring.register_scalar_listener(listen)
        try:
            found = manager.restore(0)
            assert eventually(lambda: len(sizes) >= 4)
            manager.close()
        finally:
            jax.monitoring.unregister_scalar_listener(listen)
    assert sizes == [3 * 4096] * 4
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.mark.slow
def test_restored_arrays_share_memory_and_give_it_back(tmp_path: pathlib.Path) -> None:
    """Whole leaves lie in few maps, on several devices, too; each goes with the last array in it."""
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:4], ("x",)), jax.sharding.PartitionSpec())
    state = {f"w{i:02}": jax.device_put(np.full(2**18, i, np.float32), place) for i in range(40)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        watched = Watched(manager)
        found = jax.block_until_ready(watched.restore())
    jax.tree.map(np.testing.assert_array_equal, found, state)
    made = [nbytes for nbytes, _ in watched.memory]
    assert made == [32 * 2**20, 8 * 2**20]
    one = found.pop("w39")
    found.clear()
    assert watched.alive == made[-1]
    del one
    assert watched.alive == 0


@pytest.mark.slow
def test_what_is_cast_holds_no_memory(tmp_path: pathlib.Path) -> None:
    """The bytes of leaves that were cast are free, also if leaves beside them in the file were not cast."""
    state = {f"w{i:02}": jnp.arange(2**18, dtype=jnp.float32) + i for i in range(12)}
    kept = ("w03", "w08")
    target = {n: jax.ShapeDtypeStruct(x.shape, np.float32 if n in kept else jnp.bfloat16) for n, x in state.items()}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        watched = Watched(manager)
        found = jax.block_until_ready(watched.restore(target))
    for name, array in state.items():
        np.testing.assert_array_equal(found[name], array.astype(target[name].dtype))
    assert watched.alive == len(kept) * 2**20


def test_memory_that_the_system_does_not_give() -> None:
    """It is no OSError, which would be one of storage."""
    with pytest.raises(MemoryError, match="bytes of memory"):
        mmap.fresh(2**60)
