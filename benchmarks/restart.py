"""The first restore of a new process, after the one that saved has been killed: epochckpt, stock Orbax, the limit.

Each round of a contestant saves the same tree twice in one process, which is killed when the second save is durable, or
`--later_secs` after that. A new process then opens the directory and restores the newest step, as a job does that is
started again on the same host. Another new process does so when no file is in the page cache any more. The contestants
take turns.

- "save" is the second one, until `wait_until_finished` returned; "blocked" how long it kept the training thread;
- "at once", "after a kill" (some seconds after the save) and "cold" begin before the manager is made and end when every
  array is ready. They do not count the start of the interpreter and the imports. Each contestant leaves the page cache
  as it does by itself;
- "epochckpt past" has `StorageOptions(page_cache=False)`: it writes past the page cache;
- "orbax", with compression, is its default; "uncompressed" leaves that out; "plain files" also writes a file for each
  array (`use_ocdbt=False`); "zarr3" is uncompressed, with `use_zarr3=True`;
- the limit is a file of as many bytes that was written through the page cache, and that a new process reads by two
  threads into memory that it has just asked for: from the cache, and from the disk for "cold".

    python benchmarks/restart.py
    python benchmarks/restart.py --cases=adam401 --rounds=5
"""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import common
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging

import epochckpt as ec

CASES = flags.DEFINE_list("cases", ["20x10MB", "adam401"], "adam401, adam5001, or COUNTxSIZE (KB, MB, B).")
WITHOUT = flags.DEFINE_list("without", [], "Contestants to leave out.")
LATER_SECS = flags.DEFINE_float("later_secs", 3.0, "How long after the save the job is killed, in its second part.")
CHILD = flags.DEFINE_string("child", None, "For this script itself: the part of one process, as JSON.")
LIMIT = "device limit"


def contestants() -> dict[str, Callable[[pathlib.Path], Any]]:
    """Those of all benchmarks, and ours past the page cache; their modules are imported."""
    policies = ocp.CheckpointManagerOptions(max_to_keep=None)
    past = ec.StorageOptions(page_cache=False)
    make = ec.CheckpointManager
    first, *others = common.managers().items()
    other = ("epochckpt past", lambda folder: make(folder, options=policies, storage=past))
    return dict([first, other, *others])


def say(times: Mapping[str, float]) -> None:
    print(json.dumps(times), flush=True)


def child_saves(name: str, case: str, folder: pathlib.Path) -> None:
    """Saves twice, tells how long the second save took, and waits to be killed."""
    state = common.state_of(case)
    times: dict[str, float] = {}
    if name == LIMIT:
        memory = common.aligned(common.nbytes_of(state))
        folder.mkdir()
        os.sync()
        began = time.perf_counter()
        common.write_raw(memory, folder / "raw", direct=False)
        times["save"] = time.perf_counter() - began
    else:
        manager = contestants()[name](folder)
        for epoch in range(2):
            os.sync()
            began = time.perf_counter()
            manager.save(epoch, args=ocp.args.PyTreeSave(state))
            times["blocked"] = time.perf_counter() - began
            manager.wait_until_finished()
            times["save"] = time.perf_counter() - began
    say(times)
    signal.pause()


def child_restores(name: str, case: str, folder: pathlib.Path, column: str) -> None:
    """Restores the newest step, and compares it."""
    state = common.state_of(case)
    if name == LIMIT:
        began = time.perf_counter()
        memory = np.empty(common.nbytes_of(state), np.uint8)
        common.read_raw(folder / "raw", memory)
        say({column: time.perf_counter() - began})
        return
    target = common.target_of(state)
    make = contestants()[name]
    began = time.perf_counter()
    manager = make(folder)
    restored = jax.block_until_ready(manager.restore(manager.latest_step(), args=target))
    say({column: time.perf_counter() - began})
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, restored, state)))
    manager.close()


def start(part: str, name: str, case: str, folder: pathlib.Path, column: str = "") -> subprocess.Popen[str]:
    child = {"part": part, "name": name, "case": case, "folder": str(folder), "column": column}
    command = [sys.executable, __file__, f"--child={json.dumps(child)}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> common.Times:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the benchmark has failed: {process.wait()}")
    return json.loads(line)


def saved(name: str, case: str, folder: pathlib.Path, secs: float) -> common.Times:
    """A job that saves, and is killed so many seconds later."""
    job = start("save", name, case, folder)
    try:
        times = said_by(job)
        time.sleep(secs)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    return times


def contestant_round(name: str, case: str, folder: pathlib.Path) -> common.Times:
    """Jobs that save and are killed, and jobs that restore: from what was left behind, and from the disk."""
    folder.mkdir()
    times: common.Times = {}
    for column, secs in (("at once", 0.0), ("after a kill", LATER_SECS.value)):
        times |= saved(name, case, folder / column, secs)
        with start("restore", name, case, folder / column, column) as again:
            times |= said_by(again)
    common.empty_cache(folder)
    with start("restore", name, case, folder / "at once", "cold") as again:
        times |= said_by(again)
    return times


def run_case(case: str, base: pathlib.Path) -> dict[str, common.Times]:
    names = [name for name in (*contestants(), LIMIT) if name not in WITHOUT.value]
    rounds: dict[str, Callable[[pathlib.Path], common.Times]] = {
        name: functools.partial(contestant_round, name, case) for name in names
    }
    medians = common.alternate(rounds, base)
    common.show(f"{case}, {common.nbytes_of(common.state_of(case)) / 1e6:.0f} MB", medians)
    return medians


def main(_: list[str]) -> None:
    if CHILD.value:
        logging.set_verbosity(logging.ERROR)
        child: dict[str, Any] = json.loads(CHILD.value)
        folder = pathlib.Path(child["folder"])
        if child["part"] == "save":
            child_saves(child["name"], child["case"], folder)
        else:
            child_restores(child["name"], child["case"], folder, child["column"])
        return
    common.warm_up()
    with common.scratch() as base:
        results = {case: run_case(case, base) for case in CASES.value}
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
