"""Jobs of 1, 2, 4 and 8 processes on this machine, with as many bytes per process: blocked, and committed.

The processes form a `jax.distributed` job and save arrays that are split between them. "blocked" is that of the slowest
process, "committed" the time until `wait_until_finished` returned there. All processes share this machine's cores and
disk, so that only "blocked" can stay flat.

    python benchmarks/processes.py --sizes=1,2,4,8
"""

import json
import pathlib
import statistics
import time
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
    makers = {name: make for name, make in common.managers().items() if name != "orbax uncompressed"}
    opened = {name: make(pathlib.Path(place["folder"]) / name) for name, make in makers.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in opened}
    for epoch in range(place["rounds"] + 1):
        for name, manager in opened.items():
            multihost_utils.sync_global_devices("save")
            began = time.perf_counter()
            manager.save(epoch, args=ocp.args.PyTreeSave(state))
            blocked = time.perf_counter() - began
            manager.wait_until_finished()
            if epoch:
                times[name].append((blocked, time.perf_counter() - began))
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
        slowest = {name: [max(each[name][k] for each in found) for k in (0, 1)] for name in found[0]}
        results[str(count)] = {n: {"blocked": b, "committed": c} for n, (b, c) in slowest.items()}
        common.show(f"{count} processes, {LEAVES.value} x {LEAF_KB.value} KB each", results[str(count)])
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
