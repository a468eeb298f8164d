"""Save and restore: epochckpt, stock Orbax (default and uncompressed), and a raw write + fsync, in one run.

The contestants take turns on the same arrays, so that a change of the machine's speed affects all of them. The script
prints medians and ratios. Each round makes a manager in a new directory, saves, restores, and saves again:

- "blocked" is how long `save()` kept the training thread;
- "save" is the time until `wait_until_finished` returned (ours: everything is fsynced). Both are measured for the first
  save and for the next one, because a job saves the same tree again and again;
- "restore" is the time until every array is ready, from the page cache.

    python benchmarks/save_restore.py --rounds=5
"""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging

import epochckpt as ec

ROUNDS = flags.DEFINE_integer("rounds", 5, "Counted rounds; one more comes first and is not counted.")
CASES = flags.DEFINE_list("cases", ["100x10MB", "2000x1KB"], "Leaves as COUNTxSIZE, size in KB or MB.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where to write; default: the system's temporary folder.")
BUSY = flags.DEFINE_bool("busy", False, "Keep the training thread busy with Python while the save is written.")
JSON = flags.DEFINE_string("json", None, "Also write the measurements to this file.")


COLUMNS = ("first_blocked", "first_save", "blocked", "save", "restore")


@dataclasses.dataclass
class Times:
    """Seconds of one round."""

    first_blocked: float
    first_save: float
    blocked: float
    save: float
    restore: float


def arrays(case: str) -> dict[str, jax.Array]:
    """Random float32 arrays on the default device."""
    count, _, size = case.partition("x")
    unit = {"KB": 1000, "MB": 1_000_000}[size[-2:]]
    elements = int(size[:-2]) * unit // 4
    rng = np.random.default_rng(0)
    return {f"layer_{i:04d}": jax.device_put(rng.normal(size=elements).astype(np.float32)) for i in range(int(count))}


def manager_round(make: Callable[[pathlib.Path], Any], state: Any, folder: pathlib.Path) -> Times:
    """One save and one restore through a CheckpointManager."""
    manager = make(folder)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    first_blocked, first_save = timed_save(manager, 0, state)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    began = time.perf_counter()
    restored = manager.restore(0, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))
    jax.block_until_ready(restored)
    took = time.perf_counter() - began
    name = next(iter(state))
    assert np.array_equal(np.asarray(restored[name]), np.asarray(state[name]))
    del restored
    os.sync()
    blocked, saved = timed_save(manager, 1, state)
    manager.close()
    return Times(first_blocked, first_save, blocked, saved, took)


def timed_save(manager: Any, epoch: int, state: Any) -> tuple[float, float]:
    """Seconds that `save()` took, and until the epoch was durable."""
    began = time.perf_counter()
    manager.save(epoch, args=ocp.args.PyTreeSave(state))
    blocked = time.perf_counter() - began
    if BUSY.value:
        spin_until(lambda: not manager.is_saving_in_progress())
    manager.wait_until_finished()
    return blocked, time.perf_counter() - began


def spin_until(done: Callable[[], bool]) -> None:
    """A training thread that never lets go of the interpreter."""
    total = 0
    while not done():
        for i in range(20_000):
            total += i


def raw_round(state: Any, folder: pathlib.Path) -> Times:
    """What the device can do, written the plain way: one file, one thread, one fsync."""
    folder.mkdir(parents=True)
    views = [np.asarray(x) for x in state.values()]
    began = time.perf_counter()
    with (folder / "raw").open("wb", buffering=0) as file:
        for view in views:
            file.write(view.data)
        os.fsync(file.fileno())
    saved = time.perf_counter() - began
    began = time.perf_counter()
    restored = []
    with (folder / "raw").open("rb", buffering=0) as file:
        for view in views:
            buffer = np.empty(view.shape, view.dtype)
            file.readinto(buffer.data)
            restored.append(jax.device_put(buffer))
    jax.block_until_ready(restored)
    return Times(saved, saved, saved, saved, time.perf_counter() - began)


def contestants() -> dict[str, Callable[[Any, pathlib.Path], Times]]:
    """Name → one round."""
    options = ocp.CheckpointManagerOptions(max_to_keep=None)

    def ours(folder: pathlib.Path) -> Any:
        return ec.CheckpointManager(folder, options=options)

    def orbax(folder: pathlib.Path) -> Any:
        return ocp.CheckpointManager(folder, options=options)

    def uncompressed(folder: pathlib.Path) -> Any:
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        return ocp.CheckpointManager(folder, options=options, item_handlers=handler)

    makers = {"epochckpt": ours, "orbax": orbax, "orbax uncompressed": uncompressed}
    rounds = {name: lambda s, f, make=make: manager_round(make, s, f) for name, make in makers.items()}
    return {**rounds, "raw write + fsync": raw_round}


def run_case(case: str, base: pathlib.Path) -> dict[str, list[Times]]:
    """All rounds of one case, contestants alternating."""
    state = arrays(case)
    measured: dict[str, list[Times]] = {}
    for number in range(ROUNDS.value + 1):
        for name, play in contestants().items():
            folder = base / f"{case}-{number}-{name.replace(' ', '_')}"
            times = play(state, folder)
            shutil.rmtree(folder)
            os.sync()
            if number:
                measured.setdefault(name, []).append(times)
    return measured


def report(case: str, measured: dict[str, list[Times]]) -> dict[str, dict[str, float]]:
    """Prints medians, and how many times slower each contestant is than epochckpt."""
    medians = {
        name: {k: statistics.median(getattr(t, k) for t in times) for k in COLUMNS} for name, times in measured.items()
    }
    best = medians["epochckpt"]
    print(f"\n{case}: medians of {ROUNDS.value} rounds in ms, and the ratio to epochckpt")
    print(" " * 20 + "".join(f"{column:>18}" for column in COLUMNS))
    for name, m in medians.items():
        cells = "".join(f"{m[k] * 1e3:10.1f} {m[k] / best[k]:6.1f}x" for k in COLUMNS)
        print(f"{name:20}{cells}")
    return medians


def main(_: list[str]) -> None:
    """Runs the cases."""
    logging.set_verbosity(logging.ERROR)
    base = pathlib.Path(tempfile.mkdtemp(prefix="epochckpt_benchmark_", dir=DIRECTORY.value))
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"jax {jax.__version__} on {jax.default_backend()}, orbax-checkpoint {ocp.__version__}"
    )
    warm = np.ones(4 * 2**30, dtype=np.uint8)  # the first touch of fresh guest memory is slow: not a contestant's fault
    del warm
    try:
        results = {case: report(case, run_case(case, base)) for case in CASES.value}
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(results, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    app.run(main)
