"""From exec to the first step of a job that is started again: a transformer with a state of 1 GB, in pieces.

A process saves the state with each contestant, is killed, and leaves the page cache as the contestant does. Then
`resumed_job.py` starts, imports, opens the directory, restores, and gets its step from JAX's cache of compiled
programs. "before the step" is all that, the start of the interpreter included. The contestants take turns:

- "epochckpt" restores while it compiles (`restore_async`), "in turn" one after the other, as "orbax" does;
- "no restore" imports and compiles, and "raw read" is a read of a file of as many bytes from the page cache, by two
  threads. The larger of the two is the limit.

Before each start four times the state's memory is touched and freed, as the host of a virtual machine takes back what
ended processes had, and is slow to return it (`--cold_memory` leaves that out).

    python benchmarks/first_step.py
"""

import functools
import json
import math
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import common
import jax
import numpy as np
import orbax.checkpoint as ocp
import transformer
from absl import app, flags, logging

WIDTH = flags.DEFINE_integer("width", 750, "Width of the transformer; the state has 1 GB for 750.")
LAYERS = flags.DEFINE_integer("layers", 12, "Layers that the step uses; the state has 12.")
TOKENS = flags.DEFINE_integer("tokens", 64, "Length of the sequence that the step trains on.")
SAVE = flags.DEFINE_string("save", None, "For this script itself: the contestant that saves to `--folder`.")
FOLDER = flags.DEFINE_string("folder", "", "For this script itself, see `--save`.")
COLD_MEMORY = flags.DEFINE_bool("cold_memory", False, "Starts with whatever memory the machine's host left.")
JOB = pathlib.Path(__file__).with_name("resumed_job.py")


def save(name: str, folder: pathlib.Path) -> None:
    """Saves, says so, and waits to be killed."""
    manager = common.managers()[name](folder)
    manager.save(0, args=ocp.args.PyTreeSave(common.state_of("adam401", WIDTH.value)))
    manager.wait_until_finished()
    print("saved", flush=True)
    signal.pause()


def saved(name: str, folder: pathlib.Path) -> None:
    """Has a process save with a contestant, and kills it."""
    command = [sys.executable, __file__, f"--save={name}", f"--folder={folder}", f"--width={WIDTH.value}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()
    if said != "saved\n":
        raise RuntimeError(f"{name} has not saved: {process.returncode}")


def resumed(contestant: str, folder: pathlib.Path, cache: pathlib.Path) -> common.Times:
    """The pieces of one start."""
    sizes = {"width": WIDTH.value, "layers": LAYERS.value, "tokens": TOKENS.value}
    job = {"contestant": contestant, "folder": str(folder), "cache": str(cache), **sizes}
    job["began"] = time.monotonic()
    done = subprocess.run([sys.executable, str(JOB), json.dumps(job)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def raw_read(file: pathlib.Path) -> common.Times:
    memory = np.empty(file.stat().st_size, np.uint8)
    began = time.perf_counter()
    common.read_raw(file, memory)
    return {"before the step": time.perf_counter() - began}


def main(_: list[str]) -> None:
    if SAVE.value:
        logging.set_verbosity(logging.ERROR)
        save(SAVE.value, pathlib.Path(FOLDER.value))
        return
    common.warm_up()
    nbytes = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(transformer.shapes(WIDTH.value)))
    with common.scratch() as base:
        cache = base / "compiled"

        def touch() -> None:
            if not COLD_MEMORY.value:
                common.warm_up(4 * nbytes)

        def one(contestant: str, folder: pathlib.Path) -> common.Times:
            if contestant != "no restore":
                saved("orbax" if contestant == "orbax" else "epochckpt", folder)
            touch()
            return resumed(contestant, folder, cache)

        def raw(_: pathlib.Path) -> common.Times:
            touch()
            return raw_read(base / "raw")

        names = ("epochckpt", "in turn", "orbax", "no restore")
        rounds: dict[str, Callable[[pathlib.Path], common.Times]] = {
            name: functools.partial(one, name) for name in names
        }
        common.write_raw(common.aligned(nbytes), base / "raw", direct=False)
        rounds["raw read"] = raw
        medians = common.alternate(rounds, base)
    medians["limit"] = {"before the step": max(medians[name]["before the step"] for name in ("no restore", "raw read"))}
    common.show(f"from exec to the first step, {nbytes / 1e6:.0f} MB", medians)
    common.finish({"first step": medians})


if __name__ == "__main__":
    app.run(main)
