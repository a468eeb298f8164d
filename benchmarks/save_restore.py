"""Save and restore: epochckpt, stock Orbax (default and uncompressed), torch, and the limit of the device, in one run.

Each round makes a manager in a new directory, saves, restores, and saves again. The contestants take turns on the same
arrays, so that a change of the machine's speed affects all of them. Medians and ratios are printed:

- "blocked" is how long `save()` kept the training thread, "save" the time until `wait_until_finished` returned (ours:
  everything is fsynced), for the first save and for the next one: a job saves the same tree again and again;
- "cpu" is the processor time of that next save, in all threads, kernel time included;
- "restore" is the time until every array is ready, of the second of two in a row. All files are in the page cache
  before, for each contestant; before "cold" none is;
- "torch DCP" takes part where torch is installed: `async_save` of the same values in tensors, by two threads, without
  fsync, and `load` into new tensors, without checksums;
- the limit of a save is the better of two ways to write as many bytes from memory to one file: direct I/O, and plain
  writes with early write-back and one fsync, each by two threads. The limit of a restore is a read by two threads into
  memory that is there.

    python benchmarks/save_restore.py --cases=100x10MB,adam401
    python benchmarks/save_restore.py --cases=adam5001,2000x1KB,1x4B "--without=orbax plain files,orbax zarr3"
"""

import functools
import gc
import importlib.util
import os
import pathlib
import time
import warnings
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
TORCH = "torch DCP"
WITHOUT = flags.DEFINE_list("without", [], f"Contestants to leave out: orbax, orbax uncompressed, {TORCH}.")


class Manager:
    """A CheckpointManager, in a new directory."""

    def __init__(self, make: Callable[[pathlib.Path], Any], state: Any, folder: pathlib.Path):
        self._manager, self._state, self._target = make(folder), state, common.target_of(state)
        self.close = self._manager.close

    def save(self, epoch: int) -> Callable[[], object]:
        self._manager.save(epoch, args=ocp.args.PyTreeSave(self._state))
        return self._manager.wait_until_finished

    def restore(self, epoch: int) -> Any:
        return jax.block_until_ready(self._manager.restore(epoch, args=self._target))


class TorchDcp:
    """PyTorch's distributed checkpoint of as many bytes: asynchronous, with the settings that it is fastest with."""

    def __init__(self, state: Any, folder: pathlib.Path):
        warnings.filterwarnings("ignore", "torch.distributed is")  # there is one process
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import staging

        no_gpu = staging.StagingOptions(False, False, False, False)
        self._dcp, self._state, self._folder, self._stager = dcp, state, folder, staging.DefaultStager(no_gpu)
        self.close = self._stager.close  # it keeps the memory of its copies from save to save

    def save(self, epoch: int) -> Callable[[], object]:
        writer = self._dcp.FileSystemWriter(self._folder / str(epoch), sync_files=False, thread_count=2)
        return self._dcp.async_save(self._state, storage_writer=writer, async_stager=self._stager, no_dist=True).result

    def restore(self, epoch: int) -> Any:
        restored = jax.tree.map(lambda tensor: tensor.new_empty(tensor.shape), self._state)
        self._dcp.load(restored, checkpoint_id=self._folder / str(epoch), no_dist=True)
        return restored


def contestant_round(
    contestant: Callable[[pathlib.Path], Manager | TorchDcp], state: Any, folder: pathlib.Path
) -> common.Times:
    """Two saves and two restores."""
    opened, times = contestant(folder), common.Times()
    for epoch, prefix in enumerate(("first ", "")):
        os.sync()
        gc.collect()  # else jax frees at some moment what was restored before, on the training thread: 20 ms for 1 GB
        cpu, began = time.process_time(), time.perf_counter()
        wait = opened.save(epoch)
        times[f"{prefix}blocked"] = time.perf_counter() - began
        wait()
        times[f"{prefix}save"] = time.perf_counter() - began
        times["cpu"] = time.process_time() - cpu
    for column, prepare in (("restore", common.fill_cache), ("cold", common.empty_cache)):
        prepare(folder)
        if column == "restore":  # the one that counts finds memory that the machine has, see `warm_up`
            opened.restore(1)
        gc.collect()
        began = time.perf_counter()
        restored = opened.restore(1)
        times[column] = time.perf_counter() - began
        same = jax.tree.map(np.array_equal, restored, state)
        assert all(jax.tree.leaves(same))
        del restored
    opened.close()
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
    nbytes = common.nbytes_of(state)
    opens: dict[str, Callable[[pathlib.Path], Manager | TorchDcp]] = {
        name: functools.partial(Manager, make, state) for name, make in common.managers().items()
    }
    if importlib.util.find_spec("torch"):
        import torch

        opens[TORCH] = functools.partial(TorchDcp, jax.tree.map(lambda x: torch.from_numpy(np.array(x)), state))
    rounds = {name: functools.partial(contestant_round, open_, state) for name, open_ in opens.items()}
    chosen = {name: play for name, play in rounds.items() if name not in WITHOUT.value}
    medians = common.alternate({**chosen, "device limit": lambda f: limit_round(nbytes, f)}, base)
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
