"""examples/train_digits.py keeps its promises: however it is killed, it ends where it would have ended.

Each job is the launcher as one `tests.support.processes` child in a session of its own. `wait_for_exit` waits until
the last process that has the job's output is gone, so a job that has ended left nobody behind.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from tests.support.digits import EPOCHS, EXAMPLE, start
from tests.support.processes import Process

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FOREVER = 5000  # more epochs than any test waits for
TIMEOUT = 300.0


def finish(
    workdir: pathlib.Path, epochs: int = EPOCHS, processes: int = 2, devices: int = 2, *, patience: int = 0
) -> str:
    """Runs the example to its end and returns what it printed."""
    with start(workdir, epochs, processes, devices, patience=patience) as job:
        (outcome,) = job.wait(TIMEOUT)
    assert outcome.returncode == 0, outcome.stdout
    assert f"{processes} processes, {processes * devices} devices" in outcome.stdout
    return outcome.stdout


def ended(job: Process, timeout: float = 60.0) -> str:
    """Waits until the launcher and its children are gone and returns what they printed."""
    assert job.wait_for_exit(timeout), f"processes are left:\n{job.output()}"
    return job.output()


def final_hash(output: str) -> str:
    found = re.findall(r"final parameters sha256 ([0-9a-f]{64})", output)
    assert len(found) == 1, output
    return found[0]


def final_params(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(workdir / "final_params.npz") as file:
        return dict(file)


def newest_epoch(workdir: pathlib.Path) -> int:
    """The newest epoch on storage, 0 if there is none."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def epoch_line(epoch: int) -> str:
    return f"epoch {epoch:3d}  train loss"


def children_of(job: Process) -> Sequence[int]:
    pids = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(pid) for pid in pids]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[pathlib.Path, str]]:
    """Runs the example for so many epochs, once, and returns its folder and output."""
    runs: dict[int, tuple[pathlib.Path, str]] = {}

    def run(epochs: int) -> tuple[pathlib.Path, str]:
        if epochs not in runs:
            workdir = tmp_path_factory.mktemp("undisturbed")
            runs[epochs] = workdir, finish(workdir, epochs)
        return runs[epochs]

    return run


def test_an_undisturbed_run_learns_the_digits(undisturbed) -> None:
    """All epochs are reported and saved, the accuracy is what such a network reaches, results are on disk."""
    workdir, output = undisturbed(EPOCHS)
    assert "resumed" not in output
    assert all(output.count(epoch_line(epoch)) == 1 for epoch in range(1, EPOCHS + 1)), output
    accuracy = float(re.findall(r"final accuracy (\S+)", output)[0])
    assert accuracy >= 0.95, output
    assert newest_epoch(workdir) == EPOCHS
    with ec.CheckpointManager(workdir / "final") as manager:
        assert list(manager.all_steps()) == [EPOCHS]
        assert manager.verify(EPOCHS).ok
        assert manager.metrics(EPOCHS)["accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert all(np.isfinite(array).all() for array in final_params(workdir).values())


def test_stock_orbax_reads_the_checkpoints(undisturbed) -> None:
    """The Orbax view of the job's two nodes leaves nothing out, and gives the parameters that the job ended with."""
    workdir, _ = undisturbed(EPOCHS)
    step = workdir / "checkpoints" / str(EPOCHS)
    assert json.loads((step / "epoch.json").read_bytes())["orbax_unsupported"] == {}
    item = next(path.parent for path in step.glob("*/_METADATA"))
    checkpointer = ocp.PyTreeCheckpointer()
    leaves = checkpointer.metadata(item).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
    restored = checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    found = sorted(array.tobytes() for array in jax.tree.leaves(restored["params"]))
    assert found == sorted(array.tobytes() for array in final_params(workdir).values())


def test_a_complete_run_started_again_has_nothing_left_to_do(undisturbed, tmp_path: pathlib.Path) -> None:
    """It says so, trains no epoch and reports the same parameters."""
    workdir, output = undisturbed(EPOCHS)
    shutil.copytree(workdir, tmp_path / "copy", symlinks=True)
    again = finish(tmp_path / "copy")
    assert f"resumed from epoch {EPOCHS}" in again
    assert f"stopped after epoch {EPOCHS}: was finished already" in again
    assert "train loss" not in again
    assert final_hash(again) == final_hash(output)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("kills", "epochs"), [(2, 40), (20, 400)])
def test_a_run_killed_at_random_moments_ends_bit_for_bit_equal(
    undisturbed, tmp_path: pathlib.Path, kills: int, epochs: int
) -> None:
    """SIGKILL of all processes at once, again and again: each start resumes from the newest epoch."""
    _, output = undisturbed(epochs)
    chance = random.Random(kills)
    moment = threading.Event()  # never set: its wait is the fault's random delay
    for kill in range(kills):
        newest = newest_epoch(tmp_path)
        if newest == epochs:
            break
        with start(tmp_path, epochs) as (job,):
            if kill and chance.random() < 0.25:
                moment.wait(chance.uniform(0.2, 4.0))  # while it starts, connects, restores or compiles
            else:
                target = min(newest + chance.randint(2, 12), epochs)
                job.wait_for_output(epoch_line(target), TIMEOUT)
                moment.wait(chance.uniform(0.0, 0.15))  # while it trains, writes, commits or deletes
            job.kill()
            killed = ended(job)
        assert all(int(epoch) == newest for epoch in re.findall(r"resumed from epoch (\d+)", killed)), killed
        assert newest_epoch(tmp_path) >= newest, "an epoch that existed is gone"

    newest = newest_epoch(tmp_path)
    assert newest > 0, "no kill came after a committed epoch"
    last = finish(tmp_path, epochs)
    assert f"resumed from epoch {newest}" in last
    assert final_hash(last) == final_hash(output)


def test_a_killed_run_stops_early_where_it_would_have_stopped(tmp_path: pathlib.Path) -> None:
    """Early stopping counts over the kill: the last epoch, the reason and the parameters are the same."""
    undisturbed = finish(tmp_path / "undisturbed", 200, patience=4)
    ((epoch, reason),) = re.findall(r"stopped after epoch (\d+): (no_improvement\(.*?\));", undisturbed)
    assert int(epoch) < 200
    with start(tmp_path / "killed", 200, patience=4) as (job,):
        job.wait_for_output(epoch_line(int(epoch) - 2), TIMEOUT)  # some of the epochs without improvement are over
        job.kill()
        ended(job)
    newest = newest_epoch(tmp_path / "killed")
    last = finish(tmp_path / "killed", 200, patience=4)
    assert f"resumed from epoch {newest}, stopped after epoch {epoch}: {reason};" in last or newest == int(epoch)
    assert final_hash(last) == final_hash(undisturbed)


@pytest.mark.timeout(400)
def test_a_killed_run_finishes_on_other_topologies(undisturbed, tmp_path: pathlib.Path) -> None:
    """Two processes saved; one finishes, with fewer and with as many devices, within the stated tolerance."""
    (tolerance,) = re.findall(r"^TOLERANCE = (\S+)", EXAMPLE.read_text(), re.MULTILINE)
    reference = final_params(undisturbed(EPOCHS)[0])
    killed = tmp_path / "killed"
    with start(killed, EPOCHS - 2) as (job,):
        job.wait_for_output(epoch_line(4), TIMEOUT)
        job.kill()
        ended(job)
    newest = newest_epoch(killed)
    assert 0 < newest < EPOCHS
    for processes, devices in [(1, 2), (1, 4), (3, 1)]:
        workdir = tmp_path / f"{processes}x{devices}"
        shutil.copytree(killed, workdir, symlinks=True)
        output = finish(workdir, processes=processes, devices=devices)
        assert f"resumed from epoch {newest}" in output
        params = final_params(workdir)
        assert params.keys() == reference.keys()
        for name, array in params.items():
            np.testing.assert_allclose(array, reference[name], rtol=0, atol=float(tolerance), err_msg=name)


def test_a_damaged_epoch_is_trained_again(undisturbed, tmp_path: pathlib.Path) -> None:
    """One flipped bit in one process's part: the run resumes one epoch earlier and ends bit for bit equal."""
    workdir, output = undisturbed(EPOCHS)
    shutil.copytree(workdir, tmp_path / "copy", symlinks=True)
    (data,) = (tmp_path / "copy" / "checkpoints" / str(EPOCHS) / "process_1").glob("*.safetensors")
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    again = finish(tmp_path / "copy")
    assert f"resumed from epoch {EPOCHS - 1}" in again
    assert epoch_line(EPOCHS) in again
    assert newest_epoch(tmp_path / "copy") == EPOCHS
    assert final_hash(again) == final_hash(output)
    assert f"resumed from epoch {EPOCHS}" in finish(tmp_path / "copy")


def test_a_dead_process_ends_the_job(tmp_path: pathlib.Path) -> None:
    """The launcher ends the others, says which process failed and how, and fails itself."""
    with start(tmp_path, FOREVER) as (job,):
        job.wait_for_output(epoch_line(2), TIMEOUT)
        os.kill(children_of(job)[1], signal.SIGKILL)
        output = ended(job)
    assert job.returncode == 1
    assert "process 1 failed (killed by SIGKILL)" in output


def test_a_killed_launcher_takes_its_processes_along(tmp_path: pathlib.Path) -> None:
    """SIGKILL of the launcher alone, which cannot pass anything on, leaves no process behind."""
    with start(tmp_path, FOREVER) as (job,):
        job.wait_for_output(epoch_line(2), TIMEOUT)
        job.send_signal(signal.SIGKILL)
        ended(job)
    assert job.returncode == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_job_asked_to_stop_saves_its_epoch_first(tmp_path: pathlib.Path, signum: signal.Signals) -> None:
    """The epoch that it names is on storage and the exit status says that it is to be started again, each time."""
    stopped = -1
    for moment in (epoch_line(2), "devices, checkpoints in"):
        with start(tmp_path, FOREVER) as (job,):
            job.wait_for_output(moment, TIMEOUT)
            job.send_signal(signum)
            output = ended(job)
        assert job.returncode == ec.PREEMPTED_EXIT_CODE, output
        (epoch,) = re.findall(r"stopped after epoch (\d+): preempted; epoch \1 is the newest on storage", output)
        assert newest_epoch(tmp_path) == int(epoch) > stopped
        stopped = int(epoch)
