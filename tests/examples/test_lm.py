"""examples/train_lm.py keeps its promises: it learns, and its losses are the same however often it is interrupted."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from tests.support.processes import ROOT, Processes, start_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "train_lm.py"
TINY = ["--width=32", "--context=32", "--batch_size=16", "--layers=1", "--say_every=10", "--epochs=4"]
TWO, ONE = ((2, 1), 60), ((1, 2), 150)  # (processes, devices of each), steps per epoch
TIMEOUT = 300.0


def start(workdir: pathlib.Path, how: tuple[tuple[int, int], int], *more: str) -> Processes:
    (processes, devices), steps = how
    flags = [f"--workdir={workdir}", f"--steps={steps}", *TINY, *more]
    topology = [f"--num_processes={processes}", f"--devices_per_process={devices}"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return start_processes([str(EXAMPLE), *flags, *topology], 1, env={"PYTHONPATH": path})


def run(workdir: pathlib.Path, how: tuple[tuple[int, int], int], code: int = 0, interrupt: str = "") -> str:
    """Runs the example until it ends, perhaps because it is asked to stop at a line; returns what it printed."""
    with start(workdir, how) as (job,):
        if interrupt:
            job.wait_for_output(interrupt, TIMEOUT)
            job.send_signal(signal.SIGTERM)
        assert job.wait_for_exit(TIMEOUT), f"processes are left:\n{job.output()}"
        assert job.returncode == code, job.output()
        return job.output()


def curve(workdir: pathlib.Path) -> list[float]:
    """The losses, of the steps 1, 2, 3, …"""
    rows = [json.loads(line) for line in (workdir / "loss.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def newest(workdir: pathlib.Path) -> tuple[int, bool]:
    """The newest epoch, -1 if there is none, and whether it is partial."""
    if not (workdir / "checkpoints").exists():
        return -1, False
    with ec.CheckpointManager(workdir / "checkpoints", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        epoch = manager.latest_step()
        if epoch is None:
            return -1, False
        return epoch, manager.metadata(epoch).custom_metadata["job_runner"]["partial"]


def line(step: int) -> str:
    return f"step {step:5d}  loss"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[float], str]]:
    """The curve and the output of a run that nobody disturbs."""
    runs: dict[object, tuple[list[float], str]] = {}

    def get(how: tuple[tuple[int, int], int]) -> tuple[list[float], str]:
        if how not in runs:
            workdir = tmp_path_factory.mktemp("undisturbed")
            output = run(workdir, how)
            runs[how] = curve(workdir), output
        return runs[how]

    return get


def final_hash(output: str) -> str:
    (found,) = re.findall(r"final parameters sha256 ([0-9a-f]{64})", output)
    return found


def test_it_trains_and_saves(tmp_path: pathlib.Path) -> None:
    with start(tmp_path, ((1, 2), 10), "--epochs=2") as (job,):
        assert job.wait_for_exit(TIMEOUT), job.output()
        assert job.returncode == 0, job.output()
    assert len(curve(tmp_path)) == 20
    assert newest(tmp_path) == (2, False)


@pytest.mark.long
def test_it_learns_more_than_how_frequent_bytes_are(undisturbed) -> None:
    """The loss begins at that of guessing among 256 bytes, and ends well below the unigram entropy of the text."""
    losses, output = undisturbed(ONE)
    (entropy,) = re.findall(r"unigram entropy (\S+)", output)
    assert len(losses) == 4 * ONE[1]
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert np.mean(losses[-20:]) < float(entropy) - 0.5


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kills", [2, 15])
def test_killed_at_random_moments_the_curve_is_the_same(undisturbed, tmp_path: pathlib.Path, kills: int) -> None:
    """SIGKILL of all processes at once: bit for bit. And on other processes and devices the same but for rounding."""
    expected, output = undisturbed(TWO)
    chance, moment = random.Random(kills), threading.Event()  # never set: its wait is the fault's random delay
    for _ in range(kills):
        done = max(newest(tmp_path)[0], 0) * TWO[1]
        if done >= len(expected) - TWO[1]:
            break
        with start(tmp_path, TWO) as (job,):
            job.wait_for_output(line(done + 10 * chance.randint(1, TWO[1] // 10 + 2)), TIMEOUT)
            moment.wait(chance.uniform(0.0, 0.2))
            job.kill()
            assert job.wait_for_exit(TIMEOUT)
    epoch, _ = newest(tmp_path)
    assert 0 <= epoch < 4
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "elsewhere" / "checkpoints", symlinks=True)
    last = run(tmp_path, TWO)
    assert f"resumed from epoch {epoch}" in last
    assert curve(tmp_path) == expected
    assert final_hash(last) == final_hash(output)
    run(tmp_path / "elsewhere", ((1, 2), TWO[1]))
    np.testing.assert_allclose(curve(tmp_path / "elsewhere"), expected, rtol=0, atol=1e-3)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_asked_to_stop_in_the_middle_of_an_epoch_it_goes_on_there(undisturbed, tmp_path: pathlib.Path) -> None:
    """Twice in the same one: exit status 75, the epoch is saved as it is, and replaced; in the end nobody can tell."""
    expected, output = undisturbed(ONE)
    steps = ONE[1]
    for interrupt in (line(steps + 10), line(steps + 70)):
        said = run(tmp_path, ONE, ec.PREEMPTED_EXIT_CODE, interrupt)
        assert "stopped after epoch 2 (partial): preempted" in said
        assert newest(tmp_path) == (2, True)
        assert not (tmp_path / "loss.jsonl").exists()
    last = run(tmp_path, ONE)
    assert "resumed from epoch 2" in last
    assert newest(tmp_path) == (4, False)
    assert curve(tmp_path) == expected
    assert final_hash(last) == final_hash(output)
    assert "step" not in run(tmp_path, ONE).replace("steps", "")  # it is over


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_several_processes_asked_to_stop_go_on_there(tmp_path: pathlib.Path) -> None:
    """JAX tells them all of it within seconds: the epoch is longer."""
    how = (2, 1), 600
    said = run(tmp_path, how, ec.PREEMPTED_EXIT_CODE, line(20))
    assert "stopped after epoch 1 (partial): preempted" in said
    assert newest(tmp_path) == (1, True)
    run(tmp_path, how)
    assert newest(tmp_path) == (4, False)
    run(tmp_path / "undisturbed", how)
    assert curve(tmp_path) == curve(tmp_path / "undisturbed")
