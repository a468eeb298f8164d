"""A stopped process of a job costs one epoch and no time of the others, and never splits the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import errors
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.jobs import global_mesh, place
from tests.support.processes import Process, Processes, start_processes

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore
STOPPED_PEER_TIMEOUT = 6.0
STOPPED_PRIMARY_TIMEOUT = 20.0  # no save takes so long, however busy the disk


def say(text: str) -> None:
    """One line of output, in one write."""
    os.write(1, f"\n{text}\n".encode())


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


def stop_at(faults: Faults, hook: str) -> None:
    """Makes this process stop itself (SIGSTOP) once, just before a call of the store."""
    method, ending = {
        "data": (Store.open_writer, ".safetensors"),
        "record": (Store.create, "/epoch.json"),
        "rename": (Store.rename, ""),
    }[hook]

    def stop(call: StoreCall) -> None:
        rule.remove()
        os.kill(os.getpid(), signal.SIGSTOP)

    rule = faults.before(method, stop, where=lambda call: call.path.endswith(ending))


def stoppable(directory: str, gates: str, timeout: float, stops: dict[str, list[Any]]) -> Any:
    """Saves epoch after epoch; the process named in `stops` stops itself at that epoch, at that place."""
    me = jax.process_index()
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    step = jax.jit(lambda x: x * 1.0001 + 1)
    held = {}
    with (
        open(f"{gates}/gate-{me}") as gate,
        Faults().everywhere() as faults,
        ec.CheckpointManager(directory, storage=ec.StorageOptions(save_timeout_secs=timeout)) as m,
    ):
        for epoch in range(max(map(int, stops)) + 2):
            gate.readline()
            state = {"w": place(np.full((48, 1024), epoch, np.float32), sharding)}
            who, where = stops.get(str(epoch), (None, None))
            if who == me:
                stop_at(faults, where) if where != "before" else os.kill(os.getpid(), signal.SIGSTOP)
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
    program = ["-m", "tests.support.worker", "tests.faults.test_stopped_processes:stoppable", json.dumps(args)]
    try:
        with start_processes(program, count, imported=()) as job:  # waits for their stops
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
            assert not [p.output() for p in job if f"VERDICT {epoch}" in p.output()]
            assert is_stopped(job[0])
            job[0].send_signal(signal.SIGCONT)
            answers = [verdict(p, epoch, 60) for p in job]
            exists = (tmp_path / "run" / str(epoch)).exists()
            assert exists or epoch == 3  # whose time is over, if nobody was late and gave it more
            assert [a == "committed" for a in answers] == [exists] * 3, answers
            if not exists:
                steps.remove(epoch)
        finish(job, gates, steps)
