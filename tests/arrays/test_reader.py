"""Reading parts of arrays, from a store where each call is a request too, and many small leaves at once."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt import _progress
from epochckpt.arrays import EpochReader, Request
from epochckpt.arrays.restore import TreeRequest, restore_tree
from epochckpt.format import grid
from epochckpt.orbax import events
from epochckpt.storage import opening_through
from epochckpt.testing import FaultyStore

BLOCK, SPAN = 4096, 100_000  # a sixteenth of it, more than a block, may be read in vain
TREE = {
    "long": np.arange(60_000, dtype=np.int32).reshape(300, 200),  # many blocks
    "rows": np.arange(3 * 10240, dtype=np.int16).reshape(3, 10240) * 3,  # 15 blocks
    **{f"small{i}": np.full((7, 5 + i), i, np.uint8) for i in range(30)},  # many in a block
    "empty": np.zeros((0, 4), np.float32),
    "wide": np.arange(150_000, dtype=np.uint8).reshape(2, 75_000),
}


class Spanning(FaultyStore):
    """A store of which neighbouring blocks are read with one request up to `SPAN` bytes."""

    def span_bytes(self, size: int) -> int:
        return SPAN

    def gap_bytes(self, size: int) -> int:
        return SPAN // 16


@contextlib.contextmanager
def requests_for_parts() -> Iterator[list[tuple[str, int, int]]]:
    """The object, start and end of each request for a part of an object."""
    asked: list[tuple[str, int, int]] = []
    get = obstore.get

    def noted(store: Any, key: str, *, options: Any = None) -> Any:
        if options is not None and "range" in options:
            asked.append((key, *options["range"]))
        return get(store, key, options=options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "get", noted)
        yield asked


@pytest.fixture(scope="module")
def source() -> Iterator[EpochReader]:
    """The arrays in a store that has no rename, in three files of many blocks each."""
    with opening_through(Spanning):
        storage = ec.StorageOptions(block_bytes=BLOCK, part_bytes=200_000)
        with ec.CheckpointManager(f"memory://{uuid.uuid4().hex}", storage=storage) as manager:
            manager.save(0, args=ocp.args.StandardSave(TREE))
            manager.wait_until_finished()
            native, _ = manager.source(0)
            assert native is not None
            yield native


def boxes(name: str) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Parts of an array, also empty ones."""
    axes = [
        st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: tuple(sorted(pair))) for n in TREE[name].shape
    ]
    return st.tuples(*axes)


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_any_parts_are_read_with_few_requests(source: EpochReader, data: st.DataObject) -> None:
    """Each value is right, and no request reads more than it may."""
    arrays = source.record.items["default"].arrays
    assert arrays is not None
    numbers = {leaf.name: number for number, leaf in enumerate(arrays.leaves)}
    names = data.draw(st.lists(st.sampled_from(sorted(TREE)), max_size=8, unique=True))
    requests = []
    for name in names:
        box = data.draw(boxes(name))
        requests.append(Request("default", numbers[name], box, np.empty(grid.box_shape(box), TREE[name].dtype)))
    with requests_for_parts() as ranges:
        source.read(requests)
    for name, request in zip(names, requests, strict=True):
        np.testing.assert_array_equal(request.out, TREE[name][grid.slices(request.box)])
    for path, start, end in ranges:
        assert end - start <= SPAN, path
    assert len(set(ranges)) == len(ranges)  # nothing is asked for twice


def test_a_whole_restore_is_one_request_for_as_much_as_it_may_read(source: EpochReader) -> None:
    """Every byte of the arrays once, in requests that are as large as allowed."""
    arrays = source.record.items["default"].arrays
    assert arrays is not None
    everything = [
        Request("default", number, tuple((0, n) for n in leaf.shape), np.empty(leaf.shape, leaf.dtype))
        for number, leaf in enumerate(arrays.leaves)
    ]
    with requests_for_parts() as ranges:
        source.read(everything)
    lengths = [end - start for _, start, end in ranges]
    files = source.files("default", 0)
    assert len(files) > 1
    assert sum(lengths) == sum(file.size - file.data_start for file in files)
    assert len(lengths) <= sum(-(-(file.size - file.data_start) // (SPAN - BLOCK)) for file in files)
    for request in everything:
        np.testing.assert_array_equal(request.out, TREE[arrays.leaves[request.leaf].name])


@pytest.mark.slow
@settings(max_examples=8, derandomize=True)
@given(st.data())
def test_small_leaves_that_are_read_together_are_what_was_saved(data: st.DataObject) -> None:
    """Of any sizes and types, across blocks, files and packs, on one device or all, and any part of the tree."""
    dtypes = st.sampled_from([np.int8, np.bool_, jnp.bfloat16, np.float32, np.complex64])
    leaves = data.draw(st.lists(st.tuples(dtypes, st.integers(0, 2500)), min_size=1, max_size=20))
    rng = np.random.default_rng(len(leaves))
    state = {
        f"leaf{i:02}": jnp.asarray(rng.integers(0, 99, size).astype(dtype)) for i, (dtype, size) in enumerate(leaves)
    }
    kept = data.draw(st.lists(st.sampled_from(sorted(state)), min_size=1, unique=True))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = {name: data.draw(st.sampled_from([everywhere, state[name].sharding])) for name in kept}
    target = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name in kept for x in [state[name]]
    }
    storage = ec.StorageOptions(block_bytes=BLOCK, part_bytes=data.draw(st.sampled_from([9000, 10**9])))
    with tempfile.TemporaryDirectory() as folder, ec.CheckpointManager(folder, storage=storage) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        native, _ = manager.source(0)
        assert native is not None
        found = restore_tree(native, "default", TreeRequest(target, partial=True, pack_bytes=7000))
        assert sorted(found) == sorted(kept)
        for name in kept:
            assert (found[name].dtype, found[name].sharding) == (state[name].dtype, places[name])
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(state[name]))


def test_reads_at_the_same_time_count_their_own_bytes(source: EpochReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader reads for two restores, the second while the first goes on: each reports what it has read itself."""
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(events, "read", lambda root, secs, nbytes, raw, verify_secs: reported.append((nbytes, raw)))
    began: list[str] = []

    def read(name: str) -> None:
        leaf = source.record.items["default"].arrays.by_name[name]  # type: ignore[union-attr]
        out = np.empty_like(TREE[name])
        source.read([Request("default", leaf, grid.whole(out.shape), out)])
        np.testing.assert_array_equal(out, TREE[name])

    def follow(done: Any, total: int) -> None:
        """The first read has begun: the second one begins, and ends."""
        began.append("a read")
        if len(began) == 1:
            read("rows")

    monkeypatch.setattr(_progress, "follow", follow)
    read("long")
    (of_rows, raw_of_rows), (of_long, raw_of_long) = reported
    assert (of_rows, of_long) == (TREE["rows"].nbytes, TREE["long"].nbytes)
    assert of_rows <= raw_of_rows < of_rows + 2 * BLOCK
    assert of_long <= raw_of_long < of_long + 2 * BLOCK
