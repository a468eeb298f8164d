"""How a save uses a bucket: as many chunks are under way as `concurrency` says, however many files there are."""

from __future__ import annotations

import mmap
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.arrays.reader import Request as ReadRequest
from epochckpt.storage import open_store, opening_through
from epochckpt.storage.object_client import Client
from epochckpt.storage.object_store import ObjectStore
from epochckpt.storage.pace import Pace
from epochckpt.testing import write_file
from tests.support.object_servers import Bucket, Fault, Request

CONCURRENCY = 4
Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore
STATES = {"one large array": (1, 9.0), "many arrays": (36, 0.25)}  # how many, and how many chunks is each


@pytest.fixture
def chunk(cloud: Bucket) -> Iterator[int]:
    """Small chunks, as far as the server takes such; their bytes."""
    size = 5 << 20 if cloud.scheme == "s3" else 1 << 20
    with opening_through(lambda store: ObjectStore(store.address, chunk_bytes=size)):
        yield size


class Watch:
    """Counts the chunks that are under way, and holds each until so many are."""

    def __init__(self, wanted: int):
        self.wanted, self.full, self._lock = wanted, threading.Event(), threading.Lock()
        self.now = self.most = self.bytes = self.most_bytes = 0

    def decide(self, request: Request) -> Fault | None:
        if "partNumber" not in request.target:
            return None
        size = int(request.headers["content-length"])
        self._count(1, size)
        if self.now >= self.wanted:
            self.full.set()
        return Fault(held=self.full, withheld=lambda: self._count(-1, -size))

    def _count(self, requests: int, size: int) -> None:
        with self._lock:
            self.now, self.bytes = self.now + requests, self.bytes + size
            self.most, self.most_bytes = max(self.most, self.now), max(self.most_bytes, self.bytes)


def arrays(count: int, size: float) -> dict[str, Any]:
    content = np.resize(np.random.default_rng(0).integers(0, 255, 100_003, np.uint8), int(size))
    return {f"a{i}": jax.device_put(content + np.uint8(i)) for i in range(count)}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.long)], indirect=True)
def test_as_many_chunks_are_under_way_as_may_be_and_no_more(state: str, cloud: Bucket, chunk: int) -> None:
    """Of one file or of several; and what is restored is what was saved."""
    count, chunks = STATES[state]
    watch, saved = Watch(CONCURRENCY), arrays(count, chunks * chunk)
    storage = ec.StorageOptions(part_bytes=3 * chunk, store={"concurrency": CONCURRENCY})
    with ec.CheckpointManager(cloud.new_url(), storage=storage) as manager:
        cloud.proxy.decide = watch.decide
        manager.save(0, args=Save(saved))
        manager.wait_until_finished()
        assert watch.full.is_set(), f"{watch.most} chunks at once"
        assert (watch.most, watch.now) == (CONCURRENCY, 0)
        assert watch.most_bytes <= CONCURRENCY * chunk
        cloud.proxy.decide = lambda request: None
        jax.tree.map(np.testing.assert_array_equal, manager.restore(0, args=Restore(saved)), saved)


@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_what_is_larger_than_a_part_is_cut_by_rows(cloud: Bucket) -> None:
    """No object is larger than a part and its header; and a restore of some rows reads few more than these."""
    part, header = 32 << 10, 4 << 10
    rng, mesh = np.random.default_rng(0), jax.make_mesh((4,), ("x",))
    rows = rng.normal(size=(96, 1024)).astype(np.float32)
    saved = {
        "sharded": jax.device_put(rows, NamedSharding(mesh, PartitionSpec("x"))),
        "columns": jax.device_put(rows[:2], NamedSharding(mesh, PartitionSpec(None, "x"))),
        "replicated": jax.device_put(rows[::-1], NamedSharding(mesh, PartitionSpec())),
        "wide": jax.device_put(rows.reshape(2, -1)),
        "numpy": rows[:20, :1000].T,
        "text": "epoch" * 20_000,
    }
    url, lengths = cloud.new_url(), list[int]()
    with ec.CheckpointManager(url, storage=ec.StorageOptions(part_bytes=part, orbax_view=False)) as manager:
        manager.save(0, args=Save(saved))
        manager.wait_until_finished()
        sizes = [
            file.size for file in manager.components.directory.store.files("0") if file.path.endswith(".safetensors")
        ]
        assert sum(sizes) > sum(x.nbytes for x in saved.values() if not isinstance(x, str))
        assert max(sizes) <= part + header
        jax.tree.map(np.testing.assert_array_equal, manager.restore(0, args=Restore(saved)), saved)
        native, _ = manager.source(0)
        arrays = native.record.items["default"].arrays
        cloud.proxy.requests.clear()
        for name, start, stop in (("sharded", 20, 40), ("replicated", 1, 9)):
            out = np.empty((stop - start, 1024), np.float32)
            native.read([ReadRequest("default", arrays.by_name[name], ((start, stop), (0, 1024)), out)])
            np.testing.assert_array_equal(out, np.asarray(saved[name])[start:stop])
            asked = [request.headers.get("range", "") for request in cloud.proxy.requests]
            lengths.append(
                sum(int(end) + 1 - int(start) for start, end in re.findall(r"bytes=(\d+)-(\d+)", str(asked)))
            )
            cloud.proxy.requests.clear()
    assert lengths == [3 * 8 * 4096, 2 * 8 * 4096]  # pieces have eight rows


class Maps:
    """Counts the anonymous maps of memory that are alive, in which chunks lie."""

    def __init__(self, least: int):
        self.now = self.most = 0
        self._least = least
        self._map = mmap.mmap
        self._changed = threading.Condition()

    def map(self, fileno: int, length: int, *args: Any, **kwargs: Any) -> mmap.mmap:
        """In place of `mmap.mmap`."""
        found = self._map(fileno, length, *args, **kwargs)
        if fileno == -1 and length >= self._least:
            weakref.finalize(found, self._count, -1)
            self._count(1)
        return found

    def _count(self, change: int) -> None:
        with self._changed:
            self.now += change
            self.most = max(self.most, self.now)
            self._changed.notify_all()

    def are_gone(self) -> bool:
        """Waits until none is alive; False if one stays so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.now, 60)


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_chunks_in_memory_are_bounded_and_freed(cloud: Bucket, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are filled, wait or are under way; of an upload that fails, too. None is kept without uploads."""
    maps = Maps(chunk)
    monkeypatch.setattr(mmap, "mmap", maps.map)
    storage = ec.StorageOptions(part_bytes=2 * chunk, store={"concurrency": 3, "retries": 1, "first_retry_secs": 0.01})
    saved = arrays(30, chunk / 2)
    with ec.CheckpointManager(cloud.new_url(), storage=storage) as manager:
        manager.save(0, args=Save(saved))
        manager.wait_until_finished()
        assert sum("partNumber" in request.target for request in cloud.proxy.requests) >= 14
        assert maps.most == 3
        assert maps.are_gone()
        cloud.proxy.decide = lambda request: Fault(status=503) if "partNumber" in request.target else None
        manager.save(1, args=Save(saved))
        with pytest.raises(ec.errors.SaveError, match="writing failed"):
            manager.wait_until_finished()
        assert maps.are_gone()
    assert maps.most == 3


class KnownPace(Pace):
    """Finds that requests of one size suit the store."""

    def __init__(self, chunk: int, memory: int = 1 << 30):
        super().__init__()
        self.chunk, self.memory = chunk, memory

    def upload_bytes(self, size: int) -> int:
        return self.chunk

    def read_bytes(self, size: int) -> int:
        return self.chunk

    def memory_bytes(self, concurrency: int) -> int:
        return self.memory


def test_chunks_have_the_size_that_suits_the_store(cloud: Bucket) -> None:
    """All of one file have the size that is right when it is opened; a file that is not larger is one request."""
    store, data = ObjectStore(cloud.new_url(), pace=KnownPace(16 << 20)), np.arange(5 << 20, dtype=np.int64).tobytes()
    for name, size in (("large", 40 << 20), ("small", 16 << 20)):
        cloud.proxy.requests.clear()
        write_file(store, name, data[:size])
        sent = [int(each.headers["content-length"]) >> 20 for each in cloud.proxy.requests if each.kind == "PUT"]
        assert sorted(sent) == ([8, 16, 16] if name == "large" else [16])
        assert store.read(name, limit_bytes=size) == data[:size]


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_large_chunks_are_fewer_in_memory(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes are bounded, and all are sent."""
    size = 1 << 20
    maps = Maps(size)
    monkeypatch.setattr(mmap, "mmap", maps.map)
    known = KnownPace(size, memory=2 * size + 5)
    saved = arrays(8, 3 * size)
    with (
        opening_through(lambda store: ObjectStore(store.address, pace=known)),
        ec.CheckpointManager(cloud.new_url(), storage=ec.StorageOptions(part_bytes=4 * size)) as manager,
    ):
        manager.save(0, args=Save(saved))
        manager.wait_until_finished()
        assert maps.most == 2
        assert maps.are_gone()
        jax.tree.map(np.testing.assert_array_equal, manager.restore(0, args=Restore(saved)), saved)


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_ranges_have_the_size_that_suits_the_store(cloud: Bucket) -> None:
    """A restore of the same array takes fewer requests where each reads more."""
    saved, url, requests = arrays(1, 20 << 20), cloud.new_url(), dict[int, int]()
    known = KnownPace(8 << 20)
    with opening_through(lambda store: ObjectStore(store.address, pace=known)), ec.CheckpointManager(url) as manager:
        manager.save(0, args=Save(saved))
        manager.wait_until_finished()
        for mib in (8, 32):
            known.chunk = mib << 20
            cloud.proxy.requests.clear()
            jax.tree.map(np.testing.assert_array_equal, manager.restore(0, args=Restore(saved)), saved)
            requests[mib] = sum("range" in request.headers for request in cloud.proxy.requests)
    assert requests == {8: 3, 32: 1}


@pytest.mark.parametrize("size", [1, 80 << 30, 700 << 30, 40 << 40])
def test_no_file_has_more_chunks_than_a_store_takes(size: int) -> None:
    for fixed in (None, 5 << 20):
        assert Client("memory://name", chunk_bytes=fixed).chunk_size(size) * 10_000 > size


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_one_thread_may_write_many_files_at_once(
    cloud: Bucket, patience: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for itself: each file may have one chunk in memory, after a while."""
    patience(upload_late_secs=0.02)
    data = np.random.default_rng(0).integers(0, 255, 1000, np.uint8).tobytes()
    maps = Maps(len(data))
    monkeypatch.setattr(mmap, "mmap", maps.map)
    store = ObjectStore(f"{cloud.new_url()}?concurrency=2", chunk_bytes=len(data))
    writers = [store.open_writer(f"f{number}", len(data)) for number in range(5)]
    for start, end in ((0, 600), (600, 1000)):
        for writer in writers:
            writer.write(start, data[start:end])
    assert (maps.now, maps.most) == (5, 5)
    for writer in writers:
        writer.finish()
    assert maps.are_gone()
    assert all(store.read(f"f{number}", limit_bytes=1000) == data for number in range(5))


@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_a_store_that_refuses_half_of_all_requests_only_slows_a_save(cloud: Bucket, chunk: int) -> None:
    """Each is refused when it comes first, third, …, with 429 and 503 in turns: thousands of nodes may meet that."""
    asked: dict[tuple[str, str], int] = {}
    refused: list[int] = []
    lock = threading.Lock()

    def decide(request: Request) -> Fault | None:
        with lock:
            name = request.method, request.target
            asked[name] = asked.get(name, 0) + 1
            if asked[name] % 2 == 0:
                return None
            refused.append((429, 503)[len(refused) % 2])
            return Fault(status=refused[-1])

    saved, url = arrays(20, chunk / 4), cloud.new_url()
    pauses = {"first_retry_secs": 0.01, "longest_retry_secs": 0.05}
    storage = ec.StorageOptions(part_bytes=2 * chunk, store=pauses)
    cloud.proxy.decide = decide
    with ec.CheckpointManager(url, storage=storage) as manager:
        for epoch in range(2):
            manager.save(epoch, args=Save(saved))
        manager.wait_until_finished()
        assert [result.committed for result in manager.pop_save_results()] == [True, True]
    cloud.proxy.decide = lambda request: None
    assert refused.count(429) > 10
    assert refused.count(503) > 10
    assert len(refused) >= sum(asked.values()) // 2
    with ec.CheckpointManager(url) as manager:
        jax.tree.map(np.testing.assert_array_equal, manager.restore(1, args=Restore(saved)), saved)


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_the_verdict_does_not_wait_for_the_copy_of_the_record(cloud: Bucket) -> None:
    """The copy comes after it; `wait_until_finished` waits for both."""
    go_on, done = threading.Event(), threading.Event()

    def decide(request: Request) -> Fault | None:
        return Fault(held=go_on, withheld=done.set) if "epoch%2Ejson" in request.target else None

    url = cloud.new_url()
    cloud.proxy.decide = decide
    try:
        with ec.CheckpointManager(url, storage=ec.StorageOptions(orbax_view=False)) as manager:
            manager.save(0, args=Save({"w": np.ones(3)}))
            while manager.latest_step() != 0:
                assert not done.is_set()
                threading.Event().wait(0.005)
            assert not done.is_set()
            go_on.set()
            manager.wait_until_finished()
            assert done.is_set()
    finally:
        go_on.set()
    assert open_store(url).exists("0/epoch.json")
