"""`import epochckpt` is cheap: each part is imported when something of it is first used."""

import pathlib
import subprocess
import sys

import pytest

SHOWING = ("IPython", "matplotlib", "rich", "tqdm")
PARTS = ("caffe2", "cli", "convert", "inspection", "jobs", "v1")


def added_by(program: str, *arguments: str) -> set[str]:
    """The modules that a program imports in a new process after its line `before = …`, and prints at its end."""
    command = [sys.executable, "-c", f"import sys\n{program}\nprint('added:', *(sys.modules.keys() - before))"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("added:")[2].split())


def of(added: set[str], *names: str) -> list[str]:
    """Those modules that are one of these, or lie below one."""
    return sorted(module for module in added if any(f"{module}.".startswith(f"{name}.") for name in names))


def test_importing_epochckpt_imports_nothing_else() -> None:
    """Not even jax, Orbax or NumPy: only the two modules that know where the public names lie."""
    added = added_by("before = set(sys.modules)\nimport epochckpt")
    assert of(added, "epochckpt") == ["epochckpt", "epochckpt._lazy"]
    assert of(added, *SHOWING, "jax", "numpy", "orbax", "tensorstore") == []


@pytest.mark.slow
def test_a_manager_imports_no_other_part_and_nothing_that_shows(tmp_path: pathlib.Path) -> None:
    """Neither when it is opened nor when it saves, restores, verifies and deletes."""
    program = """
import jax, numpy as np, orbax.checkpoint as ocp
before = set(sys.modules)
import epochckpt as ec
with ec.CheckpointManager(sys.argv[1]) as manager:
    for epoch in (1, 2):
        manager.save(epoch, args=ocp.args.StandardSave({"w": np.ones(3)}), metrics={"loss": 0.5})
    manager.wait_until_finished()
    assert manager.restore(1)["w"].sum() == manager.restore(None)["w"].sum() == 3
    assert manager.verify(2).ok
    manager.delete(1)
    assert manager.all_steps() == [2]
"""
    added = added_by(program, str(tmp_path))
    assert "epochckpt.manager.manager" in added
    assert of(added, *(f"epochckpt.{part}" for part in PARTS), *SHOWING) == []


@pytest.mark.slow
def test_a_look_and_a_run_import_no_view_plot_or_command() -> None:
    """What jax and Orbax import themselves does not count."""
    program = """
import jax, orbax.checkpoint
before = set(sys.modules)
import epochckpt
epochckpt.CheckpointManager, epochckpt.inspect, epochckpt.JobRunner
"""
    added = added_by(program)
    assert {"epochckpt.manager", "epochckpt.inspection.directory", "epochckpt.jobs.runner"} <= added
    views = ("epochckpt.inspection.html", "epochckpt.inspection.plots", "epochckpt.inspection.text")
    assert of(added, "epochckpt.caffe2", "epochckpt.cli", "epochckpt.convert", *views, *SHOWING) == []


@pytest.mark.slow
def test_without_docstrings_everything_but_the_help_of_flags_is_there() -> None:
    """`python -OO` removes them, and the settings take their help from there."""
    program = "import epochckpt as ec; print(ec.flags.Settings(max_to_keep='3').max_to_keep)"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "3\n"
