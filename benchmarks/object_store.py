"""Requests and times on a bucket: epochckpt and stock Orbax, on the same server, in turns.

The server is the emulator of Google Cloud Storage that the tests use, behind a proxy that counts requests and lets each
wait. Stock Orbax needs `pip install gcsfs`. Its requests are those of TensorStore and gcsfs together.

    python benchmarks/object_store.py --epochs=50 --latency_ms=20

With `--memory` only this: how much more memory than before a process has at most while it saves 2 GB of arrays, of
which it needs no copy, with several values of `concurrency`. The server is in another process.

    python benchmarks/object_store.py --memory

With `--head` only this: requests and written bytes of saves of one tiny array into directories of 10, 1,000 and 10,000
epochs, and requests of opening these. Of eighty saves in a row the median and the largest: one also writes a page.

    python benchmarks/object_store.py --head
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import app, flags, logging

import epochckpt as ec
from tests.support.long_heads import NEWEST, epoch_directory, lengthen
from tests.support.object_servers import Bucket, bucket
from tests.support.processes import run_worker

EPOCHS = flags.DEFINE_integer("epochs", 50, "Epochs in the directory.")
LATENCY_MS = flags.DEFINE_float("latency_ms", 20, "How long each request waits.")
LEAVES = flags.DEFINE_integer("leaves", 20, "Arrays in an epoch.")
LEAF_KB = flags.DEFINE_integer("leaf_kb", 100, "Size of an array.")
MEMORY = flags.DEFINE_bool("memory", False, "Measures the memory of a save of 2 GB, and nothing else.")
HEAD = flags.DEFINE_bool("head", False, "Counts what a save costs that has many epochs before it, and nothing else.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Counted rounds of opening and restoring.")

CONTESTANTS: dict[str, Callable[..., Any]] = {"epochckpt": ec.CheckpointManager, "Orbax": ocp.CheckpointManager}


class Row:
    """Requests and seconds of one operation of one contestant."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.secs: list[float] = []

    def measure(self, server: Bucket, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        with server.proxy.counted() as counts:
            found = call()
        self.secs.append(time.perf_counter() - begun)
        self.requests.append(sum(counts.values()))
        return found

    def __str__(self) -> str:
        return f"{statistics.median(self.requests):8.0f} {statistics.median(self.secs):9.2f} s"


def measure_memory() -> None:
    print("a save of 20 arrays of 100 MB, in one node")
    for concurrency in (4, 16, 64):
        with bucket("gs") as server:
            args = {"directory": f"{server.new_url()}?concurrency={concurrency}", "arrays": 20, "megabytes": 100}
            place = "tests.support.bucket_jobs:memory_of_a_save"
            (grown,) = run_worker(place, args, timeout=600, env=server.environment)
        print(f"concurrency {concurrency:3}: {grown:5} MB")


def measure_head() -> None:
    logging.set_verbosity(logging.FATAL)
    args = ocp.args.StandardSave({"w": jnp.ones(3)})
    print(f"{'':6} {'epochs':>8} {'requests of a save':>20} {'bytes of a save':>20} {'requests to open':>18}")
    for scheme in ("gs", "s3"):
        with bucket(scheme) as server:
            for count in (10, 1_000, 10_000):
                url, requests, nbytes = server.new_url(), list[int](), list[int]()
                with ec.CheckpointManager(url) as manager:
                    manager.save(NEWEST, args=args, metrics={"loss": 1.0})
                lengthen(epoch_directory(url), range(1, count))
                with ec.CheckpointManager(url) as manager:
                    manager.claim()
                    for epoch in range(NEWEST + 1, NEWEST + 81):
                        start = len(server.proxy.requests)
                        manager.save(epoch, args=args, metrics={"loss": 1.0})
                        manager.wait_until_finished()
                        made = server.proxy.requests[start:]
                        requests.append(len(made))
                        nbytes.append(sum(int(one.headers.get("content-length", 0)) for one in made if one.writes))
                with server.proxy.counted() as opening:
                    ec.CheckpointManager(url, options=ocp.CheckpointManagerOptions(read_only=True)).close()
                saves = f"{statistics.median(requests):g}, at most {max(requests)}"
                sizes = f"{statistics.median(nbytes) / 1000:.0f} kB, at most {max(nbytes) / 1000:.0f}"
                print(f"{scheme:6} {count:8,} {saves:>20} {sizes:>20} {sum(opening.values()):18}", flush=True)


def main(argv: list[str]) -> None:
    del argv
    if HEAD.value:
        return measure_head()
    if MEMORY.value:
        return measure_memory()
    logging.set_verbosity(logging.ERROR)
    state = {f"w{i}": jnp.ones(LEAF_KB.value * 256) * i for i in range(LEAVES.value)}
    rows = {name: {what: Row() for what in ("save", "open", "latest step", "restore")} for name in CONTESTANTS}
    with bucket("gs") as server:
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = server.proxy.url
        urls = {name: server.new_url() for name in CONTESTANTS}
        managers = {name: contestant(urls[name]) for name, contestant in CONTESTANTS.items()}
        server.proxy.delay_secs = LATENCY_MS.value / 1000

        def save(name: str, epoch: int) -> None:
            managers[name].save(epoch, args=ocp.args.StandardSave(state))
            managers[name].wait_until_finished()

        for epoch in range(EPOCHS.value):
            for name in CONTESTANTS:
                rows[name]["save"].measure(server, lambda n=name, e=epoch: save(n, e))
        for _ in range(ROUNDS.value):
            for name, contestant in CONTESTANTS.items():
                managers[name].close()
                row = rows[name]
                managers[name] = row["open"].measure(server, lambda c=contestant, n=name: c(urls[n]))
                latest = row["latest step"].measure(server, managers[name].latest_step)
                args = ocp.args.StandardRestore(state)
                row["restore"].measure(server, lambda m=managers[name], e=latest, a=args: m.restore(e, args=a))
        for manager in managers.values():
            manager.close()
    print(f"{EPOCHS.value} epochs of {LEAVES.value} arrays of {LEAF_KB.value} KB, {LATENCY_MS.value:g} ms a request")
    print(f"{'':14}" + "".join(f"{name + ': requests, time':>28}" for name in CONTESTANTS))
    for what in rows["epochckpt"]:
        print(f"{what:14}" + "".join(f"{rows[name][what]!s:>28}" for name in CONTESTANTS))


if __name__ == "__main__":
    app.run(main)
