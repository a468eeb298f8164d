"""What the benchmarks share: states, contestants, the limits of the device, processes of a job, tables of medians."""

import ctypes
import json
import mmap
import os
import pathlib
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
import transformer
from absl import flags, logging

import epochckpt as ec

ROUNDS = flags.DEFINE_integer("rounds", 7, "Counted rounds; one more comes first and is not counted.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where to write; default: the system's temporary folder.")
WARM_UP_GIB = flags.DEFINE_integer("warm_up_gib", 4, "Memory to touch before anything is measured.")
JSON = flags.DEFINE_string("json", None, "Also write the measurements to this file.")

PIECE_BYTES = 8 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)
Times = dict[str, float]


def _sizes(case: str, d: int) -> Mapping[str, Sequence[int]]:
    """Shapes, as numbers of float32, of the parameters that a case repeats for `params`, `mu` and `nu`."""
    if case == "adam401":  # a transformer of 12 layers, 50 million parameters
        return transformer.sizes(d)
    if case == "adam5001":
        return {f"layer_{i:03d}": [[64, 4096, 1024, 7168][(i + k) % 4] for k in range(7)] for i in range(238)}
    raise ValueError(f"no case {case!r}")


def state_of(case: str, width: int = 576) -> dict[str, Any]:
    """Random float32 arrays on the default device: `COUNTxSIZE`, `adam401` (600 MB) or `adam5001` (60 MB)."""
    rng = np.random.default_rng(0)

    def array(elements: int) -> jax.Array:
        return jax.device_put(rng.random(elements, np.float32))

    if case.startswith("adam"):
        trees = [
            {name: [array(n) for n in sizes] for name, sizes in _sizes(case, width).items()}
            for _ in ("params", "mu", "nu")
        ]
        state = {"params": trees[0], "mu": trees[1], "nu": trees[2], "count": array(1), "step": array(1)}
        return state | ({"key": array(2)} if case == "adam5001" else {})
    count, _, size = case.partition("x")
    unit = {"KB": 1000, "MB": 1_000_000}.get(size[-2:], 1)
    elements = int(size[:-2] if unit > 1 else size[:-1]) * unit // 4
    return {f"layer_{i:04d}": array(elements) for i in range(int(count))}


def nbytes_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def target_of(state: Any) -> ocp.args.PyTreeRestore:
    """Restores arrays as they are in `state`."""
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))


def managers(**options: Any) -> dict[str, Callable[[pathlib.Path], Any]]:
    """Name → opens a manager of that contestant; all have the same Orbax options.

    Stock Orbax comes with its default, and with the settings that are fastest for some states: uncompressed, a file for
    each array (without OCDBT), zarr3.
    """
    policies = ocp.CheckpointManagerOptions(max_to_keep=None, **options)

    def orbax(folder: pathlib.Path, *, ocdbt: bool = True, zarr3: bool = False) -> Any:
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=ocdbt, use_zarr3=zarr3)
        return ocp.CheckpointManager(folder, options=policies, item_handlers=handler)

    return {
        "epochckpt": lambda folder: ec.CheckpointManager(folder, options=policies),
        "orbax": lambda folder: ocp.CheckpointManager(folder, options=policies),
        "orbax uncompressed": lambda folder: orbax(folder),
        "orbax plain files": lambda folder: orbax(folder, ocdbt=False),
        "orbax zarr3": lambda folder: orbax(folder, zarr3=True),
    }


def defaults(**options: Any) -> dict[str, Callable[[pathlib.Path], Any]]:
    """Those of `managers` that have default settings."""
    return {name: make for name, make in managers(**options).items() if name in ("epochckpt", "orbax")}


def aligned(nbytes: int) -> np.ndarray:
    """Memory for direct I/O, whose pages are there."""
    memory = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
    memory[:] = 1
    return memory


def parallel(pieces: Sequence[Callable[[], object]], threads: int = 2) -> None:
    """Runs calls in threads, in order of start."""
    left = list(reversed(pieces))

    def work() -> None:
        while left:
            try:
                piece = left.pop()
            except IndexError:
                return
            piece()

    workers = [threading.Thread(target=work) for _ in range(min(threads, len(pieces)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def write_raw(memory: np.ndarray, path: pathlib.Path, direct: bool) -> None:
    """One file from aligned memory, by two threads, durable: past the page cache, or with early write-back."""
    whole = len(memory) // 4096 * 4096 if direct else len(memory)
    flush = getattr(ctypes.CDLL(None), "sync_file_range", None)
    plain = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    fd = os.open(path, os.O_WRONLY | _DIRECT) if direct else plain

    def put(start: int) -> None:
        data = memory[start : min(start + PIECE_BYTES, whole)].data
        os.pwrite(fd, data, start)
        if not direct and flush is not None and len(data) == PIECE_BYTES:
            flush(fd, ctypes.c_int64(start), ctypes.c_int64(len(data)), 2)

    parallel([lambda start=start: put(start) for start in range(0, whole, PIECE_BYTES)])
    os.pwrite(plain, memory[whole:].data, whole)
    os.fsync(plain)
    for each in {plain, fd}:
        os.close(each)


def sync_folder(folder: pathlib.Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def read_raw(path: pathlib.Path, memory: np.ndarray) -> None:
    """A file into memory whose pages are there, by two threads."""
    fd = os.open(path, os.O_RDONLY)
    starts = range(0, len(memory), PIECE_BYTES)
    parallel([lambda start=start: os.preadv(fd, [memory[start : start + PIECE_BYTES].data], start) for start in starts])
    os.close(fd)


def files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def fill_cache(folder: pathlib.Path) -> None:
    """Brings all files below a folder into the page cache."""
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(PIECE_BYTES):
                pass


def empty_cache(folder: pathlib.Path) -> None:
    """Drops all files below a folder from the page cache."""
    os.sync()
    for path in files_below(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def scratch() -> Iterator[pathlib.Path]:
    """A new folder on the device that is measured, removed at the end."""
    logging.set_verbosity(logging.ERROR)
    base = pathlib.Path(tempfile.mkdtemp(prefix="epochckpt_benchmark_", dir=DIRECTORY.value))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def alternate(
    contestants: Mapping[str, Callable[[pathlib.Path], Times]], base: pathlib.Path, *, uncounted: int = 1
) -> dict[str, Times]:
    """Medians of the rounds of each contestant, which take turns, each in a new folder. The first are not counted."""
    measured: dict[str, list[Times]] = {name: [] for name in contestants}
    for number in range(ROUNDS.value + uncounted):
        for name, play in contestants.items():
            folder = base / f"{number}_{name.replace(' ', '_')}"
            times = play(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
            if number >= uncounted:
                measured[name].append(times)
    return {name: {k: statistics.median(t[k] for t in all_) for k in all_[0]} for name, all_ in measured.items()}


def show(title: str, medians: Mapping[str, Times], *, scale: float = 1e3, unit: str = "ms") -> None:
    """Prints a table, with the ratios to the first row."""
    columns = list(dict.fromkeys(key for row in medians.values() for key in row))
    best = next(iter(medians.values()))
    width = max(14, *(len(column) + 2 for column in columns)) + 7
    print(f"\n{title} ({unit}; ratio to the first row)")
    print(" " * 20 + "".join(f"{column:>{width}}" for column in columns))
    for name, row in medians.items():
        cells = [f"{row[k] * scale:.5g} {row[k] / best[k]:5.2f}x" if k in row and best.get(k) else "" for k in columns]
        print(f"{name:20}" + "".join(f"{cell:>{width}}" for cell in cells))
    sys.stdout.flush()


def finish(results: Mapping[str, Any]) -> None:
    """Writes all results, in seconds and bytes, with the machine that they are from."""
    machine = (
        f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, jax {jax.__version__} on "
        f"{jax.default_backend()}, orbax-checkpoint {ocp.__version__}"
    )
    print(f"\n{machine}")
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps({"machine": machine, **results}, indent=1))


def warm_up(nbytes: int | None = None) -> None:
    """Touches memory: the first touch of fresh memory is slow on virtual machines, and no contestant's fault.

    Two seconds after memory is free a host may have taken it back: for 1 GB it takes 0.7 to 2 seconds to give it again.
    """
    np.empty(nbytes or WARM_UP_GIB.value * 2**30, np.uint8).fill(2)


def start_job(script: str, processes: int, **arguments: Any) -> list[Any]:
    """Runs `script --child=…` as the processes of one `jax.distributed` job; the JSON that each prints last."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    place = {"processes": processes, "coordinator": f"localhost:{port}", **arguments}
    commands = [[sys.executable, script, f"--child={json.dumps({**place, 'process': i})}"] for i in range(processes)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [child.communicate(timeout=900)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise RuntimeError(f"{script} failed in a process of {processes}: {[c.returncode for c in children]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def join_job(child: Mapping[str, Any]) -> None:
    """In a process that `start_job` started: joins the job."""
    logging.set_verbosity(logging.ERROR)
    jax.distributed.initialize(child["coordinator"], child["processes"], child["process"])
