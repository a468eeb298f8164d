"""examples/slurm.sbatch and examples/kubernetes.yaml, with the training program that both start.

SLURM and Kubernetes are not here. Two small programs stand in for `srun` and `scontrol`; of an indexed job there are
its command, its variables and its policy. The training processes, their signals and what they save are real.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
import yaml

import epochckpt as ec
from tests.support.processes import ROOT, Processes, reserved_port, start_processes

TIMEOUT = 110.0
PYTHONPATH = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
# What srun does with its tasks, on one machine: their variables, and the largest of their exit codes.
SRUN = r"""#!/usr/bin/env bash
shift  # --kill-on-bad-exit=0
for ((i = 0; i < SLURM_NTASKS; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_STEP_NODELIST=localhost "$@" & tasks+=($!)
done
echo "tasks: ${tasks[*]}."
for task in "${tasks[@]}"; do
  wait "$task"; code=$?; ((code > worst)) && worst=$code
done
exit "${worst:-0}"
"""


def stand_ins(folder: pathlib.Path, **programs: str) -> dict[str, str]:
    """Writes programs to a folder; returns the variables of a job of SLURM that finds them first."""
    folder.mkdir()
    programs = {"python": f'#!/bin/sh\nexec {sys.executable} "$@"', **programs}
    programs["scontrol"] = f'#!/bin/sh\necho "$@" >>{folder}/asked'
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": PYTHONPATH, "SLURM_JOB_ID": "4242"}


def asked(folder: pathlib.Path) -> list[str]:
    """What scontrol was asked for."""
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


@contextlib.contextmanager
def start_batch(env: Mapping[str, str], tasks: int, *flags: str) -> Iterator[Processes]:
    """As slurmd starts the script: in the folder in which it was submitted, the root of the repository."""
    run = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
    with reserved_port() as port:
        env = {**env, "SLURM_NTASKS": str(tasks), "JAX_COORDINATOR_PORT": str(port)}
        with start_processes(["-c", run, "examples/slurm.sbatch", *flags], 1, env=env) as batch:
            yield batch


@pytest.mark.parametrize("code", [0, 1, ec.UNSAVED_EXIT_CODE, ec.PREEMPTED_EXIT_CODE, ec.FENCED_OFF_EXIT_CODE])
def test_the_batch_script_is_queued_again_only_when_it_was_preempted(code: int, tmp_path: pathlib.Path) -> None:
    """And it ends as the tasks did."""
    env = stand_ins(tmp_path / "bin", srun=f"#!/bin/sh\nexit {code}")
    done = subprocess.run(
        ["bash", "examples/slurm.sbatch"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert asked(tmp_path / "bin") == (["requeue 4242"] if code == ec.PREEMPTED_EXIT_CODE else [])
    assert not done.stderr or code not in (0, ec.PREEMPTED_EXIT_CODE)


@pytest.mark.slow
def test_a_run_that_slurm_ends_is_queued_again_and_goes_on(tmp_path: pathlib.Path) -> None:
    """SIGTERM before the time limit: two tasks save what they have; the next start, with one task, resumes there."""
    env = stand_ins(tmp_path / "bin", srun=SRUN)
    flags = [f"--ckpt_directory={tmp_path}/run", "--batch_size=8", "--steps_per_epoch=20"]
    with start_batch(env, 2, *flags) as (job,):
        job.wait_for_output("step     40  loss", TIMEOUT)
        (tasks,) = re.findall(r"^tasks: ([\d ]+)\.$", job.output(), re.MULTILINE)
        for pid in tasks.split():
            os.kill(int(pid), signal.SIGTERM)
        assert job.wait_for_exit(TIMEOUT), job.output()
        output = job.output()
    assert job.returncode == ec.PREEMPTED_EXIT_CODE, output
    assert asked(tmp_path / "bin") == ["requeue 4242"]
    assert "2 processes, 2 devices" in output
    (step,) = set(re.findall(r"stopped (?:in|after) step (\d+).*preempted", output))

    with start_batch(env, 1, *flags, f"--steps={int(step) + 20}") as (job,):
        assert job.wait_for_exit(TIMEOUT), job.output()
        output = job.output()
    assert job.returncode == 0, output
    assert "1 processes, 1 devices" in output
    assert f"resumed from step {step}, stopped after step {int(step) + 20}" in output
    assert asked(tmp_path / "bin") == ["requeue 4242"]


def manifest() -> tuple[dict, dict, dict]:
    """The service, the job, and the one container of its pods."""
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def test_the_indexed_job_knows_the_exit_codes_and_its_own_names() -> None:
    """What Kubernetes does with an exit code is what the package means by it; names and numbers agree."""
    service, job, container = manifest()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    rules = [(rule["action"], rule.get("onExitCodes")) for rule in spec["podFailurePolicy"]["rules"]]
    actions = {codes["values"][0]: action for action, codes in rules if codes}
    assert actions == {
        ec.FENCED_OFF_EXIT_CODE: "FailJob",
        ec.PREEMPTED_EXIT_CODE: "Ignore",
        ec.UNSAVED_EXIT_CODE: "Count",
    }
    for _, codes in rules:
        assert codes is None or (codes["containerName"], codes["operator"]) == (container["name"], "In")
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert str(spec["completions"]) == str(spec["parallelism"]) == env["NUM_PROCESSES"]
    name, port = env["COORDINATOR"].split(":")
    assert name == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert container["ports"] == [{"containerPort": int(port)}]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.long
def test_the_pods_of_the_indexed_job_train_together(tmp_path: pathlib.Path) -> None:
    """The container's command with its variables, once per index; only the coordinator has another address here."""
    _, job, container = manifest()
    program, *arguments = container["command"]
    assert program == "python"
    arguments = [argument.replace("/checkpoints/", f"{tmp_path}/") for argument in arguments]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    flags = ["--steps=40", "--steps_per_epoch=20", "--batch_size=8"]
    with contextlib.ExitStack() as stack:
        env |= {"COORDINATOR": f"localhost:{stack.enter_context(reserved_port())}", "PYTHONPATH": PYTHONPATH}
        zero, one = (
            stack.enter_context(
                start_processes([*arguments, *flags], 1, env={**env, "JOB_COMPLETION_INDEX": str(index)})
            )
            for index in range(job["spec"]["completions"])
        )
        assert zero[0].wait_for_exit(TIMEOUT), zero[0].output()
        assert one[0].wait_for_exit(TIMEOUT), one[0].output()
        assert (zero[0].returncode, one[0].returncode) == (0, 0), zero[0].output() + one[0].output()
        assert "2 processes, 2 devices" in zero[0].output()
    (directory,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    rows = {row.epoch: row for row in ec.inspect(directory).epochs()}
    assert list(rows) == [0, 40]
    assert [node.name for node in rows[40].nodes] == ["process_0", "process_1"]
