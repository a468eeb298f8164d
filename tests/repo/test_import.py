"""`import epochckpt` is cheap: what draws, plots or serves the command is imported by whoever first uses it."""

import subprocess
import sys

HEAVY = (
    "epochckpt.cli",
    "epochckpt.inspection.html",
    "epochckpt.inspection.plots",
    "epochckpt.inspection.text",
    "IPython",
    "matplotlib",
    "rich",
    "tqdm",
)
PROGRAM = """
import sys
import jax, orbax.checkpoint
before = set(sys.modules)
import epochckpt
epochckpt.CheckpointManager, epochckpt.inspect, epochckpt.JobRunner
print(*(set(sys.modules) - before))
"""


def test_importing_epochckpt_imports_no_view_plot_or_command() -> None:
    """What jax and Orbax import themselves does not count."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    added = done.stdout.split()
    assert "epochckpt.manager" in added
    assert [name for name in added if name.startswith(HEAVY)] == []


def test_without_docstrings_everything_but_the_help_of_flags_is_there() -> None:
    """`python -OO` removes them, and the settings take their help from there."""
    program = "import epochckpt as ec; print(ec.flags.Settings(max_to_keep='3').max_to_keep)"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "3\n"
