"""Bytes a second to and from a bucket: epochckpt beside the bare client, in one run and in turns.

The server is the emulator of Google Cloud Storage that the tests use, in another process of this machine. The bare
client is obstore, which epochckpt uses too: it uploads the same bytes from memory in multipart uploads of 8 MiB parts,
and downloads the same ranges as the restore in as many threads. What it downloads is dropped in one row, and kept until
the end in the other one, as a restore keeps it.

    python benchmarks/bucket_rate.py --arrays=20 --megabytes=100

With `--stalled` only this: how long a ranged read takes, the median and the 99th percentile, while the server lets
every hundredth one wait for two seconds; with and without reads that are asked a second time.

    python benchmarks/bucket_rate.py --stalled
"""

import asyncio
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import common
import jax
import numpy as np
import obstore
import orbax.checkpoint as ocp
from absl import app, flags
from obstore.store import GCSStore

import epochckpt as ec
from epochckpt.storage import open_store
from epochckpt.testing import write_file
from tests.support.gcs_server import gcs_server

ARRAYS = flags.DEFINE_integer("arrays", 20, "Arrays in the state.")
MEGABYTES = flags.DEFINE_integer("megabytes", 100, "Size of an array.")
CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Requests under way at once.")
RANGE_MIB = flags.DEFINE_integer("range_mib", 16, "Length of the bare client's ranged reads.")
STALLED = flags.DEFINE_bool("stalled", False, "Measures reads of a server that stalls some, and nothing else.")
LATENCY_MS = flags.DEFINE_float("latency_ms", 50, "How long each ranged read waits with --stalled.")
STALLED_CONCURRENCY = flags.DEFINE_integer("stalled_concurrency", 4, "Reads under way at once with --stalled.")
READS = flags.DEFINE_integer("reads", 1000, "Ranged reads of each kind that are measured with --stalled.")
SERVE = flags.DEFINE_bool("serve", False, "Is the server; for the benchmark's own use.")

_BUCKET = "bucket"
_PART_BYTES = 8 << 20
_STALL_SECS = 2.0
_STALL_EVERY = 100  # ranged reads
_READ_BYTES = 8 << 20
_UPLOADS = 4  # of the bare client at the same time: each has its share of the requests


def serve() -> None:
    """The server, until its input ends."""
    count = itertools.count(1)

    def delay_secs(request: Any) -> float:
        ranged = request.command == "GET" and "Range" in request.headers
        if not STALLED.value or not ranged:
            return 0.0
        return _STALL_SECS if next(count) % _STALL_EVERY == 0 else LATENCY_MS.value / 1000

    with gcs_server(_BUCKET, delay_secs=delay_secs) as (port, _):
        print(json.dumps(port), flush=True)
        sys.stdin.read()


@contextmanager
def server() -> Iterator[str]:
    """The URL of a server in another process."""
    given = [f"--stalled={STALLED.value}", f"--latency_ms={LATENCY_MS.value}"]
    command = [sys.executable, os.path.abspath(__file__), "--serve", *given]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield f"http://127.0.0.1:{json.loads(child.stdout.readline())}"
    finally:
        child.stdin.close()
        child.wait()


class Bare:
    """The client without epochckpt."""

    def __init__(self, url: str):
        config: Any = {"base_url": url, "skip_signature": True, "google_bearer_token": "none"}
        self.store = GCSStore(
            _BUCKET,
            config=config,
            client_options={"allow_http": True, "timeout": "90s"},
        )

    def remove(self, prefix: str) -> None:
        for page in obstore.list(self.store, prefix):
            obstore.delete(self.store, [meta["path"] for meta in page])

    def save(self, prefix: str, state: Mapping[str, Any]) -> None:
        """Uploads each array as an object."""

        async def upload() -> None:
            gate = asyncio.Semaphore(_UPLOADS)

            async def one(name: str, array: Any) -> None:
                async with gate:
                    await obstore.put_async(
                        self.store,
                        f"{prefix}/{name}",
                        np.asarray(array).view(np.uint8).data,
                        use_multipart=True,
                        chunk_size=_PART_BYTES,
                        max_concurrency=CONCURRENCY.value // _UPLOADS,
                    )

            await asyncio.gather(*(one(name, array) for name, array in state.items()))

        asyncio.run(upload())

    def restore(self, prefix: str, state: Mapping[str, Any], *, keep: bool) -> None:
        """Downloads each object by ranges."""
        length = RANGE_MIB.value << 20
        kept = list[Any]()

        def read(name: str, start: int, stop: int) -> None:
            data = obstore.get_range(self.store, f"{prefix}/{name}", start=start, end=stop)
            if keep:
                kept.append(data)

        pieces = list[Callable[[], None]]()
        for name, array in state.items():
            for start in range(0, array.nbytes, length):
                stop = min(start + length, array.nbytes)
                pieces.append(lambda name=name, start=start, stop=stop: read(name, start, stop))
        common.parallel(pieces, CONCURRENCY.value)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def timed_with_cpu(what: str, call: Callable[[], object]) -> common.Times:
    """The time of a call, and the processor time that this process needed for it: the server's is not in it."""
    before = os.times()
    secs = timed(call)
    after = os.times()
    return {what: secs, f"{what} cpu": after.user + after.system - before.user - before.system}


def measure_rate() -> dict[str, common.Times]:
    state = common.state_of(f"{ARRAYS.value}x{MEGABYTES.value}MB")
    target = common.target_of(state)
    numbers = itertools.count()
    with server() as url, common.scratch() as base:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        bare = Bare(url)

        def ours(_: Any) -> common.Times:
            directory = f"gs://{_BUCKET}/ours{next(numbers)}?concurrency={CONCURRENCY.value}"
            with ec.CheckpointManager(directory) as manager:

                def save() -> None:
                    manager.save(0, args=ocp.args.PyTreeSave(state))
                    manager.wait_until_finished()

                manager.claim()
                saved = timed_with_cpu("save", save)

            def restore() -> None:
                with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
                    jax.block_until_ready(manager.restore(0, args=target))

            restored = timed_with_cpu("restore", restore)
            bare.remove("ours")
            return {**saved, **restored}

        def raw(keep: bool) -> common.Times:
            prefix = f"raw{next(numbers)}"
            saved = timed_with_cpu("save", lambda: bare.save(prefix, state))
            restored = timed_with_cpu("restore", lambda: bare.restore(prefix, state, keep=keep))
            bare.remove(prefix)
            return {**saved, **restored}

        contestants = {"bare, dropped": lambda _: raw(False), "bare, kept": lambda _: raw(True), "epochckpt": ours}
        return common.alternate(contestants, base)


def measure_stalled() -> dict[str, common.Times]:
    """Times of single reads: of a store that asks for late reads a second time, and of one that does not."""
    size = 100 * _READ_BYTES
    content = np.resize(np.random.default_rng(0).integers(0, 255, 1_000_003, np.uint8), size)
    found: dict[str, common.Times] = {}
    with server() as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        stores = {
            f"hedged_reads={setting}": open_store(f"gs://{_BUCKET}/stalled?hedged_reads={setting}")
            for setting in ("true", "false")
        }
        write_file(next(iter(stores.values())), "file", bytes(content))
        secs = {name: list[float]() for name in stores}
        rounds = {name: list[float]() for name in stores}

        def read(name: str, reader: Any, start: int) -> None:
            out = np.empty(_READ_BYTES, np.uint8).data
            secs[name].append(timed(lambda: reader.read_into(start, out)))

        while min(map(len, secs.values())) < READS.value:
            for name, store in stores.items():
                with store.open_reader("file", size) as reader:
                    pieces = [
                        lambda name=name, reader=reader, start=start: read(name, reader, start)
                        for start in range(0, size, _READ_BYTES)
                    ]
                    rounds[name].append(timed(lambda pieces=pieces: common.parallel(pieces, STALLED_CONCURRENCY.value)))
        for name in stores:
            ordered = sorted(secs[name])
            found[name] = {
                "p50": statistics.median(ordered),
                "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
                "longest": ordered[-1],
                "100 reads, p50": statistics.median(rounds[name]),
                "100 reads, longest": max(rounds[name]),
            }
    return found


def main(_: list[str]) -> None:
    if SERVE.value:
        serve()
        return
    if STALLED.value:
        stalled = measure_stalled()
        waits = f"each waits {LATENCY_MS.value:g} ms, every {_STALL_EVERY}th {_STALL_SECS:g} s"
        title = f"reads of 8 MiB, {STALLED_CONCURRENCY.value} at once, {waits}"
        common.show(title, stalled)
        for name, times in stalled.items():
            print(f"{name:20} p99 / p50: {times['p99'] / times['p50']:.2f}")
        common.finish({"stalled": stalled})
        return
    common.warm_up()
    found = measure_rate()
    nbytes = ARRAYS.value * MEGABYTES.value * 10**6
    common.show(f"{ARRAYS.value} arrays of {MEGABYTES.value} MB, {CONCURRENCY.value} requests at once", found)
    for name, times in found.items():
        rates = {what: nbytes / times[what] / 1e6 for what in ("save", "restore")}
        print(f"{name:20}" + "".join(f"{what}: {rate:6.0f} MB/s   " for what, rate in rates.items()))
    common.finish({"rate": found})


if __name__ == "__main__":
    app.run(main)
