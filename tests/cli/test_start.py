"""What the command imports: a list of epochs, and help, need neither jax nor Orbax nor NumPy, which take long."""

import pathlib
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec

_PROGRAM = """
import sys
from epochckpt.cli.main import main
code = main(sys.argv[1:])
heavy = {"jax", "numpy", "orbax.checkpoint", "tensorstore", "epochckpt.jobs.runner", "epochckpt.manager.manager"}
sys.exit(f"exit code {code}, imported {sorted(heavy & sys.modules.keys())}")
"""


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs")
    with ec.CheckpointManager(folder / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}), metrics={"loss": 0.5})
    return folder


@pytest.mark.parametrize("asked", ["help", "a run", "runs"])
def test_a_look_imports_no_large_library(asked: str, runs: pathlib.Path) -> None:
    arguments = {"help": ["ls", "--help"], "a run": ["ls", str(runs / "run")], "runs": ["ls", str(runs)]}[asked]
    done = started(*arguments)
    assert done.stderr.splitlines()[-1:] == ["exit code 0, imported []"], done.stderr
    assert {"help": "usage:", "a run": "latest 3", "runs": "1 run"}[asked] in done.stdout


@pytest.mark.slow
def test_errors_are_those_of_orbax_where_a_manager_raises_them(runs: pathlib.Path) -> None:
    """Also where epochckpt was imported before Orbax."""
    program = (
        "import sys, epochckpt as ec\n"
        "assert 'orbax' not in sys.modules and 'jax' not in sys.modules\n"
        "manager = ec.CheckpointManager(sys.argv[1])\n"
        "from orbax.checkpoint import v1\n"
        "try: manager.restore(7)\n"
        "except v1.training.errors.StepNotFoundError as error: print(type(error).__name__)\n"
    )
    command = [sys.executable, "-c", program, str(runs / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "EpochNotFoundError\n", done.stderr
