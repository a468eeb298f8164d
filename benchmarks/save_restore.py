"""Save and restore: epochckpt, stock Orbax (default and uncompressed), and the limit of the device, in one run.

Each round makes a manager in a new directory, saves, restores, and saves again. The contestants take turns on the same
arrays, so that a change of the machine's speed affects all of them. Medians and ratios are printed:

- "blocked" is how long `save()` kept the training thread, "save" the time until `wait_until_finished` returned (ours:
  everything is fsynced), for the first save and for the next one: a job saves the same tree again and again;
- "cpu" is the processor time of that next save, in all threads, with that of the kernel on their behalf;
- "restore" is the time until every array is ready. All files are in the page cache before, for each contestant; before
  "cold" none is;
- the limit of a save is the best of two ways to write as many bytes from memory to one file: direct I/O, and plain
  writes with early write-back and one fsync, each by two threads. The limit of a restore is a read by two threads into
  memory that is there.

    python benchmarks/save_restore.py --cases=100x10MB,adam401
    python benchmarks/save_restore.py --cases=adam5001,2000x1KB,1x4B
"""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags

CASES = flags.DEFINE_list(
    "cases", ["100x10MB", "adam401", "adam5001", "2000x1KB", "1x4B"], "adam401, adam5001, or COUNTxSIZE (KB, MB, B)."
)


def manager_round(make: Callable[[pathlib.Path], Any], state: Any, folder: pathlib.Path) -> common.Times:
    """Two saves and two restores through a CheckpointManager."""
    manager, times = make(folder), common.Times()
    for epoch, prefix in enumerate(("first ", "")):
        os.sync()
        cpu, began = time.process_time(), time.perf_counter()
        manager.save(epoch, args=ocp.args.PyTreeSave(state))
        times[f"{prefix}blocked"] = time.perf_counter() - began
        manager.wait_until_finished()
        times[f"{prefix}save"] = time.perf_counter() - began
        times["cpu"] = time.process_time() - cpu
    for column, prepare in (("restore", common.fill_cache), ("cold", common.empty_cache)):
        prepare(folder)
        args, began = common.target_of(state), time.perf_counter()
        restored = jax.block_until_ready(manager.restore(1, args=args))
        times[column] = time.perf_counter() - began
        same = jax.tree.map(np.array_equal, restored, state)
        assert all(jax.tree.leaves(same))
        del restored
    manager.close()
    return times


def limit_round(nbytes: int, folder: pathlib.Path) -> common.Times:
    """What the device can do with as many bytes."""
    folder.mkdir(parents=True)
    memory, times = common.aligned(nbytes), common.Times()
    for direct in (False, True) if nbytes >= 4096 else (False,):
        os.sync()
        cpu, began = time.process_time(), time.perf_counter()
        common.write_raw(memory, folder / f"raw_{direct}", direct)
        took = time.perf_counter() - began
        if took < times.get("save", took + 1):
            times |= {"first save": took, "save": took, "cpu": time.process_time() - cpu}
    for column, prepare in (("restore", common.fill_cache), ("cold", common.empty_cache)):
        prepare(folder)
        began = time.perf_counter()
        common.read_raw(folder / "raw_False", memory)
        times[column] = time.perf_counter() - began
    return times


def run_case(case: str, base: pathlib.Path) -> dict[str, common.Times]:
    state = common.state_of(case)
    nbytes, makers = common.nbytes_of(state), common.managers()
    rounds = {name: lambda f, make=make: manager_round(make, state, f) for name, make in makers.items()}
    medians = common.alternate({**rounds, "device limit": lambda f: limit_round(nbytes, f)}, base)
    common.show(f"{case}, {nbytes / 1e6:.0f} MB", medians)
    return medians


def main(_: list[str]) -> None:
    common.warm_up()
    results: dict[str, Any] = {}
    with common.scratch() as base:
        for case in CASES.value:
            results[case] = run_case(case, base)
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
