"""Jobs of 1, 2, 4 and 8 processes on this machine, with as many bytes per process: blocked, and committed.

The processes form a `jax.distributed` job and save arrays that are split between them. "blocked" is that of the slowest
process, "processor" the time of a core that its training thread took meanwhile, and "committed" the time until
`wait_until_finished` returned there. All processes share this machine's cores and disk, so that only "processor" can
stay flat; "disk" is the limit: every process writes as many bytes from memory to a file, by two threads, durable.

    python benchmarks/processes.py --sizes=1,2,4,8
"""

import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZES = flags.DEFINE_list("sizes", ["1", "2", "4", "8"], "Numbers of processes.")
LEAVES = flags.DEFINE_integer("leaves", 100, "Arrays.")
LEAF_KB = flags.DEFINE_integer("leaf_kb", 1000, "Size of an array, per process.")
CHILD = flags.DEFINE_string("child", None, "The place in a job; used by this script.")


def child(place: dict[str, Any]) -> None:
    """One process: all contestants take turns."""
    common.join_job(place)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    rows = place["leaf_kb"] * 250
    local = np.random.default_rng(place["process"]).random(rows, np.float32)
    shape = (rows * place["processes"],)
    state = {
        f"leaf_{i:04d}": jax.make_array_from_process_local_data(sharding, local, shape) for i in range(place["leaves"])
    }
    makers = common.defaults()
    opened = {name: make(pathlib.Path(place["folder"]) / name) for name, make in makers.items()}
    memory = common.aligned(sum(leaf.nbytes for leaf in jax.tree.leaves(state)) // place["processes"])
    raw = pathlib.Path(place["folder"]) / f"raw_{place['process']}"

    def write(_: int) -> tuple[float, ...]:
        began = time.perf_counter()
        common.write_raw(memory, raw, direct=True)
        return 0, 0, time.perf_counter() - began

    def save(manager: Any, epoch: int) -> tuple[float, ...]:
        processor, began = time.thread_time(), time.perf_counter()
        manager.save(epoch, args=ocp.args.PyTreeSave(state))
        blocked, processor = time.perf_counter() - began, time.thread_time() - processor
        manager.wait_until_finished()
        return blocked, processor, time.perf_counter() - began

    plays: dict[str, Callable[[int], tuple[float, ...]]] = {n: functools.partial(save, m) for n, m in opened.items()}
    plays["disk"] = write
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in plays}
    for epoch in range(place["rounds"] + 1):
        for name, play in plays.items():
            multihost_utils.sync_global_devices("save")
            took = play(epoch)
            if epoch:
                times[name].append(took)
    for manager in opened.values():
        manager.close()
    medians = {name: [statistics.median(column) for column in zip(*t, strict=True)] for name, t in times.items()}
    print(json.dumps(medians))


def main(_: list[str]) -> None:
    if CHILD.value:
        return child(json.loads(CHILD.value))
    results: dict[str, Any] = {}
    for count in map(int, SIZES.value):
        with common.scratch() as base:
            given = {"folder": str(base), "rounds": common.ROUNDS.value}
            found = common.start_job(__file__, count, **given, leaves=LEAVES.value, leaf_kb=LEAF_KB.value)
        columns = ("blocked", "processor", "committed")
        slowest = {n: {c: max(each[n][k] for each in found) for k, c in enumerate(columns)} for n in found[0]}
        slowest["disk"] = {"committed": slowest["disk"]["committed"]}
        results[str(count)] = slowest
        common.show(f"{count} processes, {LEAVES.value} x {LEAF_KB.value} KB each", results[str(count)])
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
