"""What a fault may cost: the epoch being saved, never an earlier one, never the training loop, never a wrong value."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import errors
from epochckpt.arrays import writer as node_writer
from epochckpt.storage import PosixStore
from epochckpt.storage.posix import PosixWriter
from tests.support.jobs import global_mesh, place
from tests.support.managers import traced_memory
from tests.support.processes import Process, Processes, run_worker, start_processes

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore
STOPPED_PEER_TIMEOUT = 6.0
STOPPED_PRIMARY_TIMEOUT = 8.0


def say(text: str) -> None:
    """One line of output, in one write."""
    os.write(1, f"\n{text}\n".encode())


# -- stopped processes -----------------------------------------------------------------------------------------------


class Gates:
    """Lets the processes of a job go on, one step at a time: a process blocks reading its own FIFO."""

    def __init__(self, folder: pathlib.Path, count: int):
        self.files = []
        for i in range(count):
            os.mkfifo(folder / f"gate-{i}")
            self.files.append(os.open(folder / f"gate-{i}", os.O_RDWR))

    def open(self) -> None:
        for fd in self.files:
            os.write(fd, b"go\n")

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)


def stop_at(hook: str) -> None:
    """Makes this process stop itself (SIGSTOP) once, just before a call of the store."""
    name, ending = {
        "data": ("open_writer", ".safetensors"),
        "record": ("create", "/epoch.json"),
        "rename": ("rename", ""),
    }[hook]
    real = getattr(PosixStore, name)

    def stopping(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith(ending):
            setattr(PosixStore, name, real)
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(self, path, *args, **kwargs)

    setattr(PosixStore, name, stopping)


def stoppable(directory: str, gates: str, timeout: float, stops: dict[str, list[Any]]) -> Any:
    """Saves epoch after epoch; the process named in `stops` stops itself at that epoch, at that place."""
    me = jax.process_index()
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    step = jax.jit(lambda x: x * 1.0001 + 1)
    held = {}
    with (
        open(f"{gates}/gate-{me}") as gate,
        ec.CheckpointManager(directory, storage=ec.StorageOptions(save_timeout_secs=timeout)) as m,
    ):
        for epoch in range(max(map(int, stops)) + 2):
            gate.readline()
            state = {"w": place(np.full((48, 1024), epoch, np.float32), sharding)}
            who, where = stops.get(str(epoch), (None, None))
            if who == me:
                stop_at(where) if where != "before" else os.kill(os.getpid(), signal.SIGSTOP)
            began = time.monotonic()
            assert m.save(epoch, args=Save(state))
            held[epoch] = time.monotonic() - began
            say(f"RETURNED {epoch}.")
            x = step(np.ones(1000, np.float32))
            for _ in range(100):
                x = step(x)
            say(f"COMPUTED {epoch}. {float(x[0]):.3f}")
            try:
                m.wait_until_finished()
                say(f"VERDICT {epoch}. committed")
            except errors.SaveError as error:
                secs = time.monotonic() - began
                answer = {
                    "type": type(error).__name__,
                    "nodes": getattr(error, "nodes", None),
                    "secs": secs,
                    "text": str(error),
                }
                say(f"VERDICT {epoch}. {json.dumps(answer)}")
            assert m.all_steps() == m.all_steps(read=False)
        say("LAST.")
        gate.readline()
        m.reload()
        return {"held": held, "steps": list(m.all_steps())}


def verdict(process: Process, epoch: int, timeout: float) -> Any:
    process.wait_for_output(f"VERDICT {epoch}. ", timeout)
    process.wait_for_output(re.findall(rf"VERDICT {epoch}\. [^\n]*", process.output())[0] + "\n", timeout)
    text = re.findall(rf"VERDICT {epoch}\. ([^\n]*)", process.output())[0]
    return text if text == "committed" else json.loads(text)


def wait_until_stopped(process: Process) -> None:
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def is_stopped(process: Process) -> bool:
    stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def stoppable_job(
    tmp_path: pathlib.Path, count: int, timeout: float, stops: dict[int, tuple[int, str]]
) -> Iterator[tuple[Processes, Gates]]:
    gates = Gates(tmp_path, count)
    args = {"directory": str(tmp_path / "run"), "gates": str(tmp_path), "timeout": timeout, "stops": stops}
    program = ["-m", "tests.support.worker", "tests.faults.test_faults:stoppable", json.dumps(args)]
    try:
        with start_processes(program, count) as job:
            yield job, gates
    finally:
        gates.close()


def finish(job: Processes, gates: Gates, steps: list[int]) -> list[Any]:
    """Lets a job end and checks what every process, and storage, says in the end."""
    for process in job:
        process.wait_for_output("LAST.", 60)
    gates.open()
    outcomes = job.wait(150, after_failure_secs=40)
    assert [o.returncode for o in outcomes] == [0] * len(job), "\n".join(o.stdout[-3000:] for o in outcomes)
    results = [json.loads(re.findall(r"^RESULT (.*)$", o.stdout, re.M)[-1]) for o in outcomes]
    assert [r["steps"] for r in results] == [steps] * len(job)
    return results


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_stopped_node_costs_one_epoch_and_no_time_of_the_others(tmp_path: pathlib.Path) -> None:
    """Process 3 of 4 is stopped in its write, and again before its save(): the other three return from save(), go on
    computing and report it by name while it is still stopped; after SIGCONT the next epoch commits."""
    stops = {2: (3, "data"), 4: (3, "before")}
    with stoppable_job(tmp_path, 4, STOPPED_PEER_TIMEOUT, stops) as (job, gates):
        others = list(job)[:3]
        for epoch in range(6):
            gates.open()
            if epoch not in stops:
                assert [verdict(p, epoch, 60) for p in job] == ["committed"] * 4
                continue
            wait_until_stopped(job[3])
            for process in others:
                process.wait_for_output(f"COMPUTED {epoch}.", 30)
            answers = [verdict(p, epoch, 60) for p in others]
            assert is_stopped(job[3])
            for answer in answers:
                assert (answer["type"], answer["nodes"]) == ("LateNodesError", ["process_3"]), answer
                assert answer["secs"] < 3 * STOPPED_PEER_TIMEOUT
            job[3].send_signal(signal.SIGCONT)
            assert verdict(job[3], epoch, 60)["type"] == "LateNodesError"
        results = finish(job, gates, [0, 1, 3, 5])
    for result in results[:3]:
        held = {int(k): v for k, v in result["held"].items()}
        normal = max(held[e] for e in (1, 3, 5))
        # the factor is for the noise of a shared machine; a wait for the peer would be hundreds of times more
        assert max(held[2], held[4]) < 20 * normal + STOPPED_PEER_TIMEOUT / 10, held


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_stopped_primary_never_splits_the_verdict(tmp_path: pathlib.Path) -> None:
    """The primary is stopped for longer than the save timeout before it began, before it looked at its deadline, and
    between that look and the rename. The others have written, and wait: what every process says in the end is what
    storage says."""
    stops = {1: (0, "before"), 3: (0, "record"), 5: (0, "rename")}
    steps = list(range(7))
    with stoppable_job(tmp_path, 3, STOPPED_PRIMARY_TIMEOUT, stops) as (job, gates):
        for epoch in range(7):
            gates.open()
            if epoch not in stops:
                assert [verdict(p, epoch, 60) for p in job] == ["committed"] * 3
                continue
            wait_until_stopped(job[0])
            for process in list(job)[1:]:
                process.wait_for_output(f"COMPUTED {epoch}.", 30)
            assert not job[1].wait_for_exit(STOPPED_PRIMARY_TIMEOUT + 1)
            assert all(f"VERDICT {epoch}" not in p.output() for p in job)
            assert is_stopped(job[0])
            job[0].send_signal(signal.SIGCONT)
            answers = [verdict(p, epoch, 60) for p in job]
            exists = (tmp_path / "run" / str(epoch)).exists()
            assert exists or epoch == 3  # whose time is over, if nobody was late and gave it more
            assert [a == "committed" for a in answers] == [exists] * 3, answers
            if not exists:
                steps.remove(epoch)
        finish(job, gates, steps)


# -- disks -----------------------------------------------------------------------------------------------------------


def numbers(epoch: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 256), epoch, np.float32), "b": np.full(3, epoch, np.int32)}


def assert_is(got: Any, epoch: int) -> None:
    for name, value in numbers(epoch).items():
        np.testing.assert_array_equal(got[name], value)
        assert got[name].dtype == value.dtype


def raise_pending(manager: ec.CheckpointManager, how: str) -> None:
    if how == "check_for_errors":
        manager.save(1000, args=Save({"x": np.zeros(1)}))  # logs the failure before, and is the next to end
        manager.save(1001, args=Save({"x": np.zeros(1)}))
        while manager.is_saving_in_progress():
            manager.components.saves.queue.drain()
        manager.check_for_errors()
    else:
        getattr(manager, how)()


def fill_disk(disk: pathlib.Path, pages: int) -> pathlib.Path:
    """Leaves that many free pages."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes((free.f_bavail - pages) * free.f_bsize))
    assert os.statvfs(disk).f_bavail == pages
    return ballast


def test_a_full_disk_costs_one_epoch(disk: pathlib.Path) -> None:
    """Whatever file the space runs out at: the loop goes on, the epoch before stays the latest and readable, the
    failure is raised once, and the first save after the space is back commits."""
    outcomes, failures = set(), []
    directory = disk / "run"
    with ec.CheckpointManager(directory) as m:
        m.save(0, args=Save(numbers(0)))
        m.wait_until_finished()
        last = 0
        for epoch, pages in enumerate([0, 1, 2, 10, 17, 18, 19, 20, 21, 40], start=1):
            first, second = 2 * epoch - 1, 2 * epoch
            ballast = fill_disk(disk, pages)
            assert m.save(first, args=Save(numbers(first)))
            try:
                m.wait_until_finished()
                last = first
                outcomes.add("committed")
            except errors.SaveError as error:
                failures.append(error)
                assert m.status(first).state == "failed"
                assert "No space left" in m.status(first).detail
                outcomes.add("failed")
            m.check_for_errors()
            m.wait_until_finished()
            assert m.latest_step() == last
            assert_is(m.restore(None), last)
            with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as fresh:
                assert fresh.latest_step() == last
                assert fresh.verify(last).ok
            ballast.unlink()
            assert m.save(second, args=Save(numbers(second)))
            m.wait_until_finished()
            last = second
            assert m.latest_step() == last
        free = os.statvfs(disk).f_bavail
    assert outcomes == {"committed", "failed"}
    assert all("No space left" in str(error) for error in failures)
    assert len({error.epoch for error in failures}) == len(failures)
    assert os.statvfs(disk).f_bavail >= free
    assert not list(directory.glob("*.orbax-checkpoint-tmp"))


def test_a_full_disk_costs_no_memory(disk: pathlib.Path) -> None:
    """What could not be written is let go when its save has failed, by all threads that wrote it."""
    with ec.CheckpointManager(disk / "run") as m:
        ballast = fill_disk(disk, 600)
        with traced_memory() as held:
            for epoch in range(4):
                m.save(epoch, args=Save({"a": np.zeros(2**22, np.uint8), "b": np.ones(2**22, np.uint8)}))
                m.components.saves.queue.drain()
            assert held() < 2**22
        ballast.unlink()
        with pytest.raises(errors.SaveErrorGroup, match="No space left"):
            m.wait_until_finished()


@pytest.mark.parametrize("how", ["wait_until_finished", "check_for_errors", "close"])
def test_a_failed_save_is_raised_once_and_never_by_save(disk: pathlib.Path, how: str) -> None:
    """save() after a failure logs it and returns normally; the failure comes from the named call, once."""
    m = ec.CheckpointManager(disk / "run")
    m.save(0, args=Save(numbers(0)))
    m.wait_until_finished()
    ballast = fill_disk(disk, 1)
    assert m.save(1, args=Save(numbers(1)))
    assert m.save(2, args=Save(numbers(2)))  # the disk is still full
    m.components.saves.queue.drain()
    ballast.unlink()
    assert m.save(3, args=Save(numbers(3)))
    with pytest.raises(errors.SaveErrorGroup, match="No space left") as caught:
        raise_pending(m, how)
    assert [e.epoch for e in caught.value.errors] == [1, 2]
    m.check_for_errors()
    if how != "close":
        m.wait_until_finished()
    assert {0, 3} <= set(m.all_steps())
    assert not {1, 2} & set(m.all_steps())
    m.close()


def test_a_directory_that_becomes_read_only_costs_one_epoch(disk: pathlib.Path) -> None:
    """remount,ro in the middle of a run, and back."""

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], timeout=30, check=True)

    with ec.CheckpointManager(disk / "run") as m:
        m.save(0, args=Save(numbers(0)))
        m.wait_until_finished()
        remount("ro")
        try:
            for epoch in (1, 2):
                assert m.save(epoch, args=Save(numbers(epoch)))
                with pytest.raises(errors.SaveError, match="Read-only file system"):
                    m.wait_until_finished()
                m.wait_until_finished()
                assert m.all_steps() == [0]
                assert m.all_steps(read=True) == [0]
                assert_is(m.restore(None), 0)
        finally:
            remount("rw")
        assert m.save(1, args=Save(numbers(1)))
        m.wait_until_finished()
        assert m.all_steps() == [0, 1]
        assert_is(m.restore(None), 1)


# -- damage ----------------------------------------------------------------------------------------------------------

BLOCK = 4096


def damage_values(epoch: int) -> dict[str, Any]:
    """What epoch `epoch` of the damage tests holds."""
    rng = np.random.default_rng(epoch + 1)
    return {
        "sharded": rng.normal(size=(16, 512)).astype(np.float32),
        "replicated": rng.normal(size=2048).astype(np.float32),
        "small": {"half": rng.normal(size=8).astype(jnp.bfloat16), "ints": rng.integers(0, 99, 4).astype(np.int32)},
        "numpy": rng.integers(0, 2**60, 5),
        "step": 10**30 + epoch,
        "text": f"epoch {epoch} " * 400,
        "nothing": None,
    }


def damage_state(epoch: int) -> dict[str, Any]:
    mesh = global_mesh((jax.device_count(), 1))
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    state = damage_values(epoch)
    state["sharded"] = place(state["sharded"], rows)
    state["replicated"] = place(state["replicated"], whole)
    state["small"] = {k: place(v, rows if k == "half" else whole) for k, v in state["small"].items()}
    return state


def write_damage_epochs(directory: str) -> None:
    """Two epochs by all processes of a job."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(block_bytes=BLOCK)) as m:
        for epoch in (0, 1):
            m.save(
                epoch,
                args=ocp.args.Composite(state=Save(damage_state(epoch)), extra=ocp.args.JsonSave({"epoch": epoch})),
            )
        m.wait_until_finished()
        assert m.verify(1).ok


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Epochs 0 and 1, written by two nodes."""
    directory = tmp_path_factory.mktemp("damage") / "run"
    run_worker("tests.faults.test_faults:write_damage_epochs", {"directory": str(directory)}, 2, 2)
    return directory


@pytest.fixture
def saved(pristine: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(pristine, tmp_path / "run", symlinks=True))


def reader(directory: pathlib.Path, **storage: Any) -> ec.CheckpointManager:
    options = ocp.CheckpointManagerOptions(read_only=True)
    return ec.CheckpointManager(directory, options=options, storage=ec.StorageOptions(**storage))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        b = np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


def is_epoch(got: Any, epoch: int) -> bool:
    return same(damage_values(epoch), dict(got.state)) and got.extra == {"epoch": epoch}


def tensors(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """(start, end, leaf) of the tensors of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__")
    spans = ((*e["data_offsets"], name.partition("[")[0]) for name, e in entries.items())
    return sorted((8 + length + start, 8 + length + end, leaf) for start, end, leaf in spans)


def check_error(error: Exception, path: str, leaves: set[str] | None) -> None:
    """An error of ours that names the file, and one of the leaves."""
    assert isinstance(error, errors.DamagedError | errors.FormatError), error
    assert path in str(error), error
    assert error.path == path
    if leaves:
        assert isinstance(error, errors.DamagedError)
        assert error.leaf in leaves
        assert error.leaf in str(error)


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The value, or the project's error; anything else is a failure of the test."""
    try:
        return call(), None
    except errors.EpochCheckpointError as error:
        return None, error


@dataclasses.dataclass(frozen=True)
class Flip:
    """One bit of one file, and what an error about it must say."""

    kind: str
    path: str
    offset: int
    bit: int
    leaves: frozenset[str]


def flips(directory: pathlib.Path, count: int, seed: int) -> list[Flip]:
    """Random bits, so that every kind of file gets its share."""
    rng = random.Random(seed)
    nodes = ["1/process_0", "1/process_1"]
    out = []
    for _ in range(count):
        kind = rng.choices(["epoch", "node", "header", "data", "json"], [25, 25, 20, 35, 10])[0]
        path = {"epoch": "1/epoch.json", "node": f"{rng.choice(nodes)}/node.json", "json": "1/process_0/extra/metadata"}
        name = path.get(kind) or f"{rng.choice(nodes)}/state.safetensors"
        size = (directory / name).stat().st_size
        low, high, leaves = 0, size, frozenset()
        if kind in ("header", "data"):
            spans = tensors(directory / name)
            low, high = (0, spans[0][0]) if kind == "header" else (spans[0][0], size)
        offset = rng.randrange(low, high)
        if kind == "data":
            start, end, leaf = next(s for s in spans if s[0] <= offset < s[1])
            small = frozenset(name for a, b, name in spans if b - a < BLOCK)
            leaves = frozenset({leaf}) if end - start >= BLOCK else small
        out.append(Flip(kind, name, offset, rng.randrange(8), leaves))
    return out


def flip_bit(directory: pathlib.Path, flip: Flip) -> None:
    with open(directory / flip.path, "r+b") as file:
        file.seek(flip.offset)
        (byte,) = file.read(1)
        file.seek(flip.offset)
        file.write(bytes([byte ^ 1 << flip.bit]))


def check_flips(directory: pathlib.Path, count: int, seed: int) -> None:
    open_before = reader(directory)
    refused = dict.fromkeys(["epoch", "node", "header", "data", "json"], 0)
    for flip in flips(directory, count, seed):
        flip_bit(directory, flip)
        got, error = attempt(lambda: open_before.restore(1))
        if error is not None:
            check_error(error, flip.path, flip.leaves)
            refused[flip.kind] += 1
        else:
            assert is_epoch(got, 1), f"{flip} restored silently wrong"
        found = open_before.verify(1)
        assert not found.ok, f"{flip} not found by verify"
        for damage in found.damage:
            check_error(damage, flip.path, flip.leaves)
        fallen = reader(directory).restore(None)
        assert is_epoch(fallen, 1 if error is None else 0), f"{flip}: restore(None)"
        flip_bit(directory, flip)
    assert open_before.verify(1).ok
    for kind in ("epoch", "node", "data", "json"):
        assert refused[kind] > count // 30, refused


@pytest.mark.slow
def test_120_bit_flips_never_restore_silently_wrong(saved: pathlib.Path) -> None:
    """Every flip is found by verify, refused by an explicit restore (or harmless to it), and stepped over by
    restore(None); errors name the file and the leaf."""
    check_flips(saved, 120, seed=1)


@pytest.mark.long
@pytest.mark.timeout(800)
def test_10000_bit_flips_never_restore_silently_wrong(saved: pathlib.Path) -> None:
    """The same, many times more."""
    check_flips(saved, 10_000, seed=2)


def test_without_verification_a_flip_does_restore_wrong(saved: pathlib.Path) -> None:
    """The control of the test above: it can see a wrong value."""
    wrong = 0
    for flip in (f for f in flips(saved, 40, seed=3) if f.kind == "data"):
        flip_bit(saved, flip)
        got, error = attempt(lambda: reader(saved, verify=False).restore(1))
        wrong += error is None and not is_epoch(got, 1)
        flip_bit(saved, flip)
    assert wrong > 5


def _truncate(size: Callable[[int], int]) -> Callable[[pathlib.Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


def _link_out(path: pathlib.Path) -> None:
    outside = next(folder for folder in path.parents if folder.name == "run").parent / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def _folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARM: dict[str, Callable[[pathlib.Path], None]] = {
    "emptied": _truncate(lambda n: 0),
    "cut in half": _truncate(lambda n: n // 2),
    "one byte short": _truncate(lambda n: n - 1),
    "one byte long": _truncate(lambda n: n + 1),
    "a page long": _truncate(lambda n: n + 4096),
    "deleted": lambda path: path.unlink(),
    "a link out of the directory": _link_out,
    "a folder": _folder,
    "a pipe": _pipe,
}
FILES = [
    "1/epoch.json",
    "1/process_0/node.json",
    "1/process_1/node.json",
    "1/process_0/state.safetensors",
    "1/process_1/state.safetensors",
    "1/process_0/extra/metadata",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_is_not_what_was_written_is_refused(saved: pathlib.Path, harm: str, file: str) -> None:
    """Truncated, extended, deleted, replaced files: refused by name, the older epoch is taken; without its commit
    record, an epoch's folder is refused as foreign."""
    open_before = reader(saved)
    HARM[harm](saved / file)
    _, error = attempt(lambda: open_before.restore(1))
    assert error is not None
    assert file in str(error) or isinstance(error, errors.EpochNotFoundError)
    verification, error = attempt(lambda: open_before.verify(1))
    assert error is not None or not verification.ok
    got, error = attempt(lambda: reader(saved).restore(None))
    if error is None:
        assert is_epoch(got, 0)
    else:
        assert harm in ("deleted", "a link out of the directory")
        assert file in str(error) or file.rpartition("/")[0] in str(error)


SWAPS = [
    ("1/process_0/state.safetensors", "1/process_1/state.safetensors"),
    ("1/process_0/node.json", "1/process_1/node.json"),
    ("1/process_0", "1/process_1"),
    ("0/process_0/state.safetensors", "1/process_0/state.safetensors"),
    ("0/process_1/node.json", "1/process_1/node.json"),
    ("0/process_0/extra/metadata", "1/process_0/extra/metadata"),
    ("0/process_1", "1/process_1"),
    ("0/epoch.json", "1/epoch.json"),
    ("0", "1"),
]


@pytest.mark.parametrize(("one", "other"), SWAPS)
def test_swapped_files_are_refused(saved: pathlib.Path, one: str, other: str) -> None:
    """Files of the right form from another node or another epoch: refused, never mixed."""
    open_before = reader(saved)
    (saved / one).rename(saved / "kept")
    (saved / other).rename(saved / one)
    (saved / "kept").rename(saved / other)
    both = one.startswith("0")
    for epoch in (0, 1) if both else (1,):
        _, error = attempt(lambda e=epoch: open_before.restore(e))
        assert isinstance(error, errors.DamagedError | errors.FormatError)
        assert error.path.startswith(f"{epoch}/")
        assert not open_before.verify(epoch).ok
    got, error = attempt(lambda: reader(saved).restore(None))
    if both:
        assert isinstance(error, errors.EpochCheckpointError)
    else:
        assert is_epoch(got, 0)


def restore_with_damage(directory: str) -> Any:
    """In every process: what an explicit restore says, what restore(None) gives, and a new save over the damage."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    target = {"sharded": jax.ShapeDtypeStruct((16, 512), np.float32, sharding=sharding)}
    args = ocp.args.Composite(state=ocp.args.PyTreeRestore(target, partial_restore=True))
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(block_bytes=BLOCK)) as m:
        try:
            m.restore(1, args=args)
            explicit = None
        except errors.DamagedError as error:
            explicit = [error.path, error.leaf]
        got = m.restore(None, args=args).state["sharded"]
        gives = [
            epoch
            for epoch in (0, 1)
            if all(
                np.array_equal(np.asarray(s.data), damage_values(epoch)["sharded"][s.index])
                for s in got.addressable_shards
            )
        ]
        steps = list(m.all_steps())
        m.save(1, args=ocp.args.Composite(state=Save(damage_state(1))))
        m.wait_until_finished()
        return explicit, gives, steps, list(m.all_steps()), m.verify(1).ok


def test_processes_agree_on_the_older_epoch_when_one_of_them_sees_damage(saved: pathlib.Path) -> None:
    """Only process 1 reads the damaged shard, and restore(1) raises on both; restore(None) gives both epoch 0, and
    epoch 1 can be saved again."""
    file = saved / "1/process_1/state.safetensors"
    start = next(start for start, _, leaf in tensors(file) if leaf == "sharded")
    flip_bit(saved, Flip("data", "1/process_1/state.safetensors", start + 100, 3, frozenset()))
    zero, one = run_worker("tests.faults.test_faults:restore_with_damage", {"directory": str(saved)}, 2, 2)
    assert zero[0] == one[0] == ["1/process_1/state.safetensors", "sharded"]
    assert zero[1:] == one[1:] == [[0], [0], [0, 1], True]


# -- memory that changes after save() --------------------------------------------------------------------------------


class Hold:
    """Holds back the calls of a function that `when` accepts until released: makes `right after save()` certain."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool] = lambda *a, **k: True
    ):
        self.reached, self._released = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def held(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                self.reached.set()
                assert self._released.wait(20)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)

    def release(self) -> None:
        self._released.set()


SIZES = [7, 1000, 16_384, 16_388, 3_000_000]


@pytest.mark.parametrize("size", SIZES)
def test_a_numpy_leaf_may_be_changed_right_after_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """What is saved is what the array held when save() was called."""
    hold = Hold(monkeypatch, node_writer, "write_arrays")
    x, scalar = np.arange(size, dtype=np.float32), np.zeros((), np.int64)
    with ec.CheckpointManager(tmp_path) as m:
        m.save(0, args=Save({"x": x, "scalar": scalar, "view": x[::-1][::2]}))
        x[...] = -1
        scalar[...] = 9
        hold.release()
        m.wait_until_finished()
        got = m.restore(0)
    expected = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(got["x"], expected)
    np.testing.assert_array_equal(got["view"], expected[::-1][::2])
    assert got["scalar"] == 0


def shardings() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4), ("x",))
    return {
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "sharded": NamedSharding(mesh, PartitionSpec("x")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }


@pytest.mark.parametrize("kind", ["one device", "sharded", "replicated"])
def test_a_jax_array_may_be_donated_right_after_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Donated to jit before a byte is written, with new arrays over its memory: what is saved does not change, also
    not by the next saves. For accelerators `tests/arrays/test_transfers.py` has the same."""
    hold = Hold(monkeypatch, node_writer, "write_arrays")
    sharding = shardings()[kind]
    step = jax.jit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    values = {str(n): np.arange(n, dtype=np.float32) for n in (4, 1000, 16_384, 16_400, 1_000_000)}
    state = jax.jit(lambda t: jax.tree.map(lambda x: x + 0, t), out_shardings=sharding)(values)
    with ec.CheckpointManager(tmp_path) as m:
        for epoch in range(4):  # two that wait at once, and two that may use their memory
            m.save(epoch, args=Save(state))
            new = step(state)
            deleted = [x.is_deleted() for x in jax.tree.leaves(state)]
            assert any(deleted)  # jax keeps what is being looked at
            state = jax.block_until_ready(step(step(new)))
            if epoch:
                hold.release()
                m.wait_until_finished()
        for epoch in range(4):
            got = m.restore(epoch)
            for name, value in values.items():
                np.testing.assert_array_equal(got[name], -value - 1 if epoch % 2 else value)


def test_a_jax_array_donated_before_save_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Nothing is begun."""
    x = jnp.arange(10.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with ec.CheckpointManager(tmp_path) as m:
        with pytest.raises(errors.InvalidArgumentError, match="'gone'"):
            m.save(0, args=Save({"gone": x}))
        assert not m.is_saving_in_progress()
        m.save(0, args=Save({"here": jnp.arange(3.0)}))
        m.wait_until_finished()
        assert m.all_steps() == [0]


def aliased(size: int) -> tuple[np.ndarray, jax.Array]:
    """A NumPy array, and a jax array over the same memory."""
    raw = np.zeros(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + size * 4].view(np.float32)
    buffer[:] = np.arange(size)
    array = jax.device_put(buffer, jax.devices()[0])
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data, "this jax does not alias; the test needs another way"
    return buffer, array


def test_aliased_memory_changed_after_save_fails_the_attempt(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jax array over NumPy memory that the caller changes after save(): BufferChangedError naming the leaf, and
    nothing is committed."""
    buffer, array = aliased(5_000_000)
    with ec.CheckpointManager(tmp_path) as m:
        m.save(0, args=Save({"good": np.ones(3)}))
        m.wait_until_finished()
        with monkeypatch.context() as patch:
            hold = Hold(patch, node_writer, "write_arrays")
            m.save(1, args=Save({"inner": {"aliased": array}}))
            assert hold.reached.wait(60)
            buffer += 1
            hold.release()
            with pytest.raises(errors.SaveError, match="inner/aliased") as caught:
                m.wait_until_finished()
        assert isinstance(caught.value, errors.BufferChangedError)
        assert caught.value.leaf == "inner/aliased"
        assert m.all_steps() == [0]
        assert not (tmp_path / "1").exists()
        m.save(1, args=Save({"inner": {"aliased": array}}))
        m.wait_until_finished()
        np.testing.assert_array_equal(m.restore(1)["inner"]["aliased"], buffer)


def test_what_is_written_is_what_was_hashed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element that changes when its checksum is taken and its bytes are not written yet: neither sees it."""
    buffer, array = aliased(5_000_000)
    before = buffer.copy()
    with ec.CheckpointManager(tmp_path) as m:
        with monkeypatch.context() as patch:
            hold = Hold(patch, PosixWriter, "write", lambda writer, offset, data: not offset and len(data) > 2**20)
            m.save(1, args=Save({"aliased": array}))
            assert hold.reached.wait(60)
            buffer[1234] += 1
            hold.release()
            m.wait_until_finished()
        np.testing.assert_array_equal(m.restore(1)["aliased"], before)


def test_aliased_memory_changed_at_any_time_never_commits_a_mixture(tmp_path: pathlib.Path) -> None:
    """The same without holding anything back: the attempt fails, or commits exactly what save() was given."""
    buffer, array = aliased(2_000_000)
    with ec.CheckpointManager(tmp_path) as m:
        for epoch in range(12):
            before = buffer.copy()
            m.save(epoch, args=Save({"aliased": array}))
            for _ in range(epoch):
                np.sqrt(before[:200_000])  # another moment each time
            buffer += 1
            try:
                m.wait_until_finished()
            except errors.BufferChangedError:
                assert epoch not in m.all_steps()
            else:
                np.testing.assert_array_equal(m.restore(epoch)["aliased"], before)


# -- whom we do not depend on ----------------------------------------------------------------------------------------


def refuse_orbax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Orbax's own array engine raise."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Orbax's array engine was used")

    handlers = [ocp.type_handlers.ArrayHandler, ocp.type_handlers.NumpyHandler, ocp.type_handlers.ScalarHandler]
    for handler in [*handlers, ocp.type_handlers.StringHandler]:
        for name in ("serialize", "deserialize"):
            monkeypatch.setattr(handler, name, refuse)
    checkpointers = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler, ocp.ArrayCheckpointHandler)
    for handler in checkpointers:
        for name in ("save", "async_save", "restore"):
            if hasattr(handler, name):
                monkeypatch.setattr(handler, name, refuse)
    monkeypatch.setattr(ts, "open", refuse)
    monkeypatch.setattr(ts.KvStore, "open", refuse)


def test_arrays_do_not_go_through_orbax(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Orbax's array serialisation and deserialisation made to raise, ours still saves and restores."""
    refuse_orbax(monkeypatch)
    sharding = shardings()["sharded"]
    state = {"x": jax.device_put(np.arange(64.0, dtype=np.float32), sharding), "n": np.arange(5), "s": "text", "i": 7}
    for args, back in [
        (Save(state), Restore(state)),
        (ocp.args.PyTreeSave(state), ocp.args.PyTreeRestore(state)),
        (Save(state), None),
    ]:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        with ec.CheckpointManager(directory) as m:
            m.save(0, args=args)
            m.wait_until_finished()
            got = m.restore(0, args=back)
        np.testing.assert_array_equal(got["x"], state["x"])
        assert got["x"].sharding == sharding
        np.testing.assert_array_equal(got["n"], state["n"])
        assert (got["s"], got["i"]) == ("text", 7)
    with pytest.raises(AssertionError, match="array engine was used"):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "stock", args=ocp.args.PyTreeSave(state))


class RaisingClient:
    """JAX's coordination client, which raises on the main thread while `armed`."""

    def __init__(self, client: Any):
        self._client, self.armed, self.calls = client, False, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.armed and threading.current_thread() is threading.main_thread():
                raise AssertionError(f"{name} was called on the training thread")
            return found(*args, **kwargs)

        return call


def save_with_raising_client(directory: str) -> Any:
    from jax._src import distributed

    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))  # starts the backend
    client = RaisingClient(distributed.global_state.client)
    distributed.global_state.client = client
    assert ocp.multihost.get_jax_distributed_client() is client
    with ec.CheckpointManager(directory) as m:
        before = client.calls
        for epoch in range(3):
            state = {"x": place(np.full(64, epoch, np.float32), sharding), "n": np.arange(3)}
            client.armed = True
            assert m.save(epoch, args=Save(state))
            m.is_saving_in_progress()
            m.latest_step()
            m.check_for_errors()
            client.armed = False
        m.wait_until_finished()
        client.armed = True
        try:
            client.key_value_set("control", "x")
        except AssertionError:
            pass
        else:
            raise RuntimeError("the control did not raise")
        client.armed = False
        return list(m.all_steps()), client.calls > before


def test_save_does_not_talk_to_the_coordinator_on_the_training_thread(tmp_path: pathlib.Path) -> None:
    """With JAX's coordination client made to raise there, save() returns and the epochs commit."""
    results = run_worker("tests.faults.test_faults:save_with_raising_client", {"directory": str(tmp_path / "run")}, 2)
    assert results == [[[0, 1, 2], True]] * 2
