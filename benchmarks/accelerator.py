"""Saves from an accelerator, in each mode of `StorageOptions.snapshot`, and by stock Orbax, in turns.

A step that donates the state runs right after each `save()`. The script prints medians, and ratios to stock Orbax:

- "blocked" is how long `save()` kept the training thread;
- "next step" is the time of that step, and of those of a step without a save ("alone");
- "drained" is the time from `save()` until `wait_until_finished` returned, and with it the rate.

Every restored array is compared with the saved one, bit by bit. Without an accelerator the script says so, and our
modes run over the memory kinds of jax's CPU device: then the times mean nothing.

    python benchmarks/accelerator.py --gb=20 --json=accelerator.json
"""

import json
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging

import epochckpt as ec
from epochckpt.arrays import transfers

GB = flags.DEFINE_float("gb", 4.0, "Size of the state, in GB (10⁹ bytes).")
LEAVES = flags.DEFINE_integer("leaves", 100, "Arrays in the state, on the first device.")
ROUNDS = flags.DEFINE_integer("rounds", 7, "Counted rounds; one more comes first and is not counted.")
MODES = flags.DEFINE_list("modes", ["auto", "device", "pinned_host", "host"], "Of StorageOptions.snapshot.")
WORK = flags.DEFINE_integer("work", 8, "Matrix products of 4096² in a step, besides a pass over the state.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where to write; default: the system's temporary folder.")
JSON = flags.DEFINE_string("json", None, "Also write the measurements to this file.")

STOCK = "stock Orbax"
COLUMNS = ("blocked", "step", "alone", "drained")
State = dict[str, jax.Array]


def opened(name: str, path: pathlib.Path) -> Any:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    if name == STOCK:
        return ocp.CheckpointManager(path, options=options)
    return ec.CheckpointManager(path, options=options, storage=ec.StorageOptions(snapshot=name))  # type: ignore[arg-type]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = call()
    return time.perf_counter() - begun, found


def step_of(work: int) -> Callable[[State], State]:
    """A step that donates the state, and takes some time."""

    def step(state: State) -> State:
        x = jnp.full((4096, 4096) if work else (1, 1), 1e-4, jnp.bfloat16)
        for _ in range(work):
            x = x @ x
        return {name: value * -1 + x[0, 0].astype(value.dtype) * 0 for name, value in state.items()}

    return jax.jit(step, donate_argnums=0)


def round_of(manager: Any, epoch: int, state: State, step: Callable[[State], State]) -> tuple[State, dict[str, float]]:
    """Saves the state, runs a step that donates it, restores, and compares."""
    alone, state = timed(lambda: jax.block_until_ready(step(state)))
    kept = {name: np.array(jax.device_put(value, may_alias=False)) for name, value in state.items()}
    begun = time.perf_counter()
    blocked, _ = timed(lambda: manager.save(epoch, args=ocp.args.StandardSave(state)))
    after, state = timed(lambda: jax.block_until_ready(step(state)))
    manager.wait_until_finished()
    drained = time.perf_counter() - begun
    places = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    found = manager.restore(epoch, args=ocp.args.StandardRestore(places))
    wrong = [name for name, value in kept.items() if np.asarray(found[name]).tobytes() != value.tobytes()]
    if wrong:
        raise SystemExit(f"{len(wrong)} arrays are not what was saved, {wrong[0]} first")
    return state, {"blocked": blocked, "step": after, "alone": alone, "drained": drained}


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)
    device = jax.devices()[0]
    if device.platform == "cpu":
        print("no accelerator: this is the way from one, over CPU memory; the times say nothing")
        transfers.HOST = frozenset()
        transfers._memory_stats = lambda device: {"bytes_limit": 2**50, "bytes_in_use": 0}
    size = max(int(GB.value * 1e9 / 4 / LEAVES.value), 1)
    state = {f"w{i}": jax.device_put(np.full(size, i + 1, np.float32), device) for i in range(LEAVES.value)}
    nbytes = sum(value.nbytes for value in state.values())
    step, names = step_of(WORK.value), [*MODES.value, STOCK]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    root = pathlib.Path(tempfile.mkdtemp(dir=DIRECTORY.value))
    try:
        managers = {name: opened(name, root / name.replace(" ", "_")) for name in names}
        for epoch in range(ROUNDS.value + 1):
            for name in names:
                state, row = round_of(managers[name], epoch, state, step)
                if epoch:
                    rows[name].append(row)
        for manager in managers.values():
            manager.close()
    finally:
        shutil.rmtree(root)
    medians = {name: {c: statistics.median(row[c] for row in rows[name]) for c in COLUMNS} for name in names}
    print(f"{nbytes / 1e9:g} GB in {LEAVES.value} arrays on {device.device_kind}, medians of {ROUNDS.value}")
    print("All restored arrays equal the saved ones, bit by bit.")
    print(f"{'':12}{'blocked':>22}{'next step':>26}{'drained':>32}")
    for name, row in medians.items():
        blocked = f"{row['blocked'] * 1e3:.1f} ms ({medians[STOCK]['blocked'] / row['blocked']:.1f}×)"
        after = f"{row['step'] * 1e3:.1f} ms ({row['step'] / row['alone']:.2f}× alone)"
        ratio = medians[STOCK]["drained"] / row["drained"]
        drained = f"{row['drained']:.2f} s, {nbytes / 1e9 / row['drained']:.2f} GB/s ({ratio:.1f}×)"
        print(f"{name:12}{blocked:>22}{after:>26}{drained:>32}")
    if JSON.value:
        found = {"device": device.device_kind, "platform": device.platform, "bytes": nbytes, "jax": jax.__version__}
        pathlib.Path(JSON.value).write_text(json.dumps(found | {"medians": medians, "rounds": rows}, indent=1))


if __name__ == "__main__":
    app.run(main)
