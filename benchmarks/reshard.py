"""A restore under another sharding, in a job of several processes: time, and bytes read against bytes needed.

Matrices are saved with their rows split between all devices, and restored in tiles of rows and columns. "needed" are
the bytes of the blocks (4 MiB of rows) that a process's tiles touch; "read" is what the process has read, from
/proc/self/io (rchar), whoever restores.

    python benchmarks/reshard.py --processes=4
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

PROCESSES = flags.DEFINE_integer("processes", 4, "Processes of the job; even.")
LEAVES = flags.DEFINE_integer("leaves", 10, "Matrices.")
SIDE = flags.DEFINE_integer("side", 4096, "Rows and columns of a matrix of float32.")
CHILD = flags.DEFINE_string("child", None, "The place in a job; used by this script.")


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def child(place: dict[str, Any]) -> None:
    """One process: all contestants take turns."""
    common.join_job(place)
    side, leaves, devices = place["side"], place["leaves"], np.array(jax.devices())
    saved = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    tiles = NamedSharding(Mesh(devices.reshape(2, -1), ("x", "y")), PartitionSpec("x", "y"))
    local = np.random.default_rng(place["process"]).random((side // place["processes"], side), np.float32)
    matrix = jax.make_array_from_process_local_data(saved, local, (side, side))
    state = {f"leaf_{i}": matrix for i in range(leaves)}
    folder = pathlib.Path(place["folder"])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=tiles), state)
    args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    opened = {name: make(folder / name) for name, make in common.managers().items()}
    for manager in opened.values():
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in opened}
    for number in range(place["rounds"] + 1):
        for name, manager in opened.items():
            if place["process"] == 0:
                common.fill_cache(folder / name)
            manager.restore(0, args=args)  # of two in a row the second counts: it finds memory that the machine has
            multihost_utils.sync_global_devices("restore")
            read, began = bytes_read(), time.perf_counter()
            restored = jax.block_until_ready(manager.restore(0, args=args))
            took, read = time.perf_counter() - began, bytes_read() - read
            for shard in restored["leaf_0"].addressable_shards:
                assert shard.data.shape == (side // 2, side // (len(devices) // 2))
            del restored
            if number:
                found[name].append((took, read))
    for manager in opened.values():
        manager.close()
    indices = tiles.addressable_devices_indices_map((side, side)).values()
    rows = {index[0].indices(side)[:2] for index in indices if index is not None}
    needed = leaves * sum(stop - start for start, stop in rows) * side * 4
    medians = {name: [statistics.median(column) for column in zip(*t, strict=True)] for name, t in found.items()}
    print(json.dumps({"needed": needed, **medians}))


def main(_: list[str]) -> None:
    if CHILD.value:
        return child(json.loads(CHILD.value))
    given = {"leaves": LEAVES.value, "side": SIDE.value, "rounds": common.ROUNDS.value}
    with common.scratch() as base:
        found = common.start_job(__file__, PROCESSES.value, folder=str(base), **given)
    needed = sum(each.pop("needed") for each in found)
    times = {name: {"restore": max(each[name][0] for each in found)} for name in found[0]}
    read: dict[str, common.Times] = {"needed": {"read": needed}}
    read |= {name: {"read": sum(each[name][1] for each in found)} for name in found[0]}
    common.show(f"{PROCESSES.value} processes, {LEAVES.value} matrices of {SIDE.value}²", times)
    common.show("bytes read by all processes together", read, scale=1e-6, unit="MB")
    common.finish({"restore": times, "read": read})


if __name__ == "__main__":
    app.run(main)
