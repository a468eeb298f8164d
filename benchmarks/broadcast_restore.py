"""A restore of replicated state by several processes: each reads all of it, or they share the reading.

    python benchmarks/broadcast_restore.py --processes=4 --megabytes=200 --store_megabytes_per_sec=200

The store is a directory of this machine. With `--store_megabytes_per_sec` it gives all processes together no more than
that, which stands for storage that many hosts share. Collectives go through gloo, on the loopback device.
"""

import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.storage import posix
from tests.support.processes import run_worker

PROCESSES = flags.DEFINE_list("processes", ["2", "4"], "Numbers of processes.")
MEGABYTES = flags.DEFINE_integer("megabytes", 200, "Size of the state, in arrays of 10 MB.")
STORE = flags.DEFINE_list("store_megabytes_per_sec", ["0", "200"], "What the store gives at most; 0: what it can.")
ROUNDS = flags.DEFINE_integer("rounds", 7, "Counted rounds, of both contestants in turns.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where to write; default: the system's temporary folder.")
JSON = flags.DEFINE_string("json", None, "Writes the medians to this file.")

WAYS = {"each reads all": False, "shared": True}


class Meter:
    """Counts the bytes of data files that this process reads, and slows it down to its share of the store's speed."""

    def __init__(self, bytes_per_sec: float):
        self.nbytes, self._rate, self._lock = 0, bytes_per_sec, threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        plain = posix.PosixReader.read_parts

        def read_parts(reader: Any, start: int, parts: Sequence[memoryview]) -> None:
            plain(reader, start, parts)
            nbytes = sum(part.nbytes for part in parts)
            with self._lock:
                self.nbytes += nbytes
                if self._rate:
                    time.sleep(nbytes / self._rate)

        posix.PosixReader.read_parts = read_parts  # type: ignore[method-assign]
        try:
            yield
        finally:
            posix.PosixReader.read_parts = plain


def body(directory: str, megabytes: int, store: float, rounds: int) -> dict[str, list[list[float]]]:
    """In each process: seconds and bytes of every round, by contestant."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec())
    values = {f"w{i}": np.full(2_500_000, i, np.float32) for i in range(max(1, megabytes // 10))}
    state = {k: jax.make_array_from_callback(v.shape, sharding, v.__getitem__) for k, v in values.items()}
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        managers = {}
        for way, share in WAYS.items():
            options = ec.StorageOptions(broadcast_restore=share)
            managers[way] = stack.enter_context(ec.CheckpointManager(directory, storage=options))
        managers["shared"].save(0, args=ocp.args.StandardSave(state))
        managers["shared"].wait_until_finished()
        managers["each reads all"].reload()
        for number in range(rounds + 1):
            for way, manager in managers.items():
                meter = Meter(store / jax.process_count())
                multihost_utils.sync_global_devices(f"{way} {number}")
                began = time.perf_counter()
                with meter.reading():
                    restored = manager.restore(0, args=ocp.args.StandardRestore(target))
                jax.block_until_ready(restored)
                secs = time.perf_counter() - began
                assert all(np.array_equal(restored[k].addressable_data(0), v) for k, v in values.items())
                if number:
                    found[way].append([secs, meter.nbytes])
    return found


def main(_: list[str]) -> None:
    """Runs a job for each number of processes and each store."""
    results = {}
    print(f"{MEGABYTES.value} MB, medians of {ROUNDS.value} rounds; bytes of the store as multiples of the state")
    for store in map(float, STORE.value):
        for processes in map(int, PROCESSES.value):
            with tempfile.TemporaryDirectory(dir=DIRECTORY.value) as folder:
                args = {"megabytes": MEGABYTES.value, "store": store * 1e6, "rounds": ROUNDS.value}
                place = "benchmarks.broadcast_restore:body"
                jobs = run_worker(place, {"directory": folder, **args}, processes, timeout=1800)
            row = {}
            for way in WAYS:
                rounds = list(zip(*[job[way] for job in jobs], strict=True))
                secs = statistics.median(max(secs for secs, _ in each) for each in rounds)
                nbytes = statistics.median(sum(nbytes for _, nbytes in each) for each in rounds)
                row[way] = {"secs": secs, "store_bytes": nbytes / (MEGABYTES.value * 1e6)}
            results[f"{processes} processes, {store:g} MB/s"] = row
            ratio = row["each reads all"]["secs"] / row["shared"]["secs"]
            cells = "   ".join(f"{w}: {r['secs'] * 1e3:8.0f} ms {r['store_bytes']:5.2f} x" for w, r in row.items())
            print(f"{processes} processes, store {store or float('inf'):g} MB/s   {cells}   ratio {ratio:.2f}")
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    app.run(main)
