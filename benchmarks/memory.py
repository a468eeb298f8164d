"""Memory of saves and restores: how far the process grows beyond what it had before, at most.

Each figure is from a process of its own, in which one save has gone before. Anonymous memory counts; a second process
reads it from /proc every millisecond. "save" is of arrays that stay, "save, donated" of arrays that the next step
donates at once, "restore" includes the restored arrays. All are shown relative to the size of the state.

Three rounds are enough: memory is not a matter of the machine's load.

    python benchmarks/memory.py --case=adam401 --rounds=3
"""

import gc
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import common
import jax
import orbax.checkpoint as ocp
from absl import app, flags, logging

CASE = flags.DEFINE_string("case", "adam401", "The state, as in save_restore.py.")
WITHOUT = flags.DEFINE_list("without", [], "Contestants to leave out: orbax, orbax uncompressed.")
CHILD = flags.DEFINE_list("child", None, "Contestant, what to measure, and the folder; used by this script.")

_WATCH = """
import select, sys
most = 0
print(flush=True)
while True:
    lines = [line.split() for line in open(f"/proc/{sys.argv[1]}/status")]
    most = max(most, sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:")))
    if select.select([0], [], [], 0.001)[0]:
        break
print(most)
"""


def most_memory(call: Callable[[], Any]) -> int:
    """Bytes of anonymous memory that this process has at most during a call."""
    command = [sys.executable, "-c", _WATCH, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        call()
        return int(watcher.communicate("end\n")[0].split()[-1])


def measure(name: str, what: str, folder: pathlib.Path) -> float:
    """The growth, relative to the state."""
    state = common.state_of(CASE.value)
    logging.set_verbosity(logging.ERROR)
    size, manager = common.nbytes_of(state), common.managers()[name](folder)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = jax.block_until_ready(step(state))
    manager.save(0, args=ocp.args.PyTreeSave(state))
    manager.wait_until_finished()
    restore = common.target_of(state)

    def save() -> None:
        nonlocal state
        manager.save(1, args=ocp.args.PyTreeSave(state))
        if what == "save, donated":
            state = step(state)
        manager.wait_until_finished()

    gc.collect()
    before = most_memory(lambda: None)
    most = most_memory(save if what != "restore" else lambda: jax.block_until_ready(manager.restore(0, args=restore)))
    manager.close()
    return (most - before) / size


def main(_: list[str]) -> None:
    if CHILD.value:
        name, what, folder = CHILD.value[0], CHILD.value[1].replace(";", ","), CHILD.value[2]
        print(json.dumps(measure(name, what, pathlib.Path(folder))))
        return

    def play(name: str, folder: pathlib.Path) -> common.Times:
        found = common.Times()
        for what in ("save", "save, donated", "restore"):
            child = f"--child={name},{what.replace(',', ';')},{folder / what.replace(', ', '_')}"
            command = [sys.executable, __file__, f"--case={CASE.value}", child]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
            found[what] = float(done.stdout.splitlines()[-1])
        return found

    with common.scratch() as base:
        names = [name for name in common.managers() if name not in WITHOUT.value]
        rounds = {name: lambda f, name=name: play(name, f) for name in names}
        results = common.alternate(rounds, base, uncounted=0)
    common.show(f"memory beyond what was there, {CASE.value}", results, scale=100, unit="% of the state")
    common.finish({CASE.value: results})


if __name__ == "__main__":
    app.run(main)
