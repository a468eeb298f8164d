"""Orbax 1.0, which will give the names at its top level to the v1 style: what of epochckpt would break, and how."""

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest
from orbax.checkpoint import v1

import epochckpt

ROOT = pathlib.Path(epochckpt.__file__).parent

TAKEN = {"metadata", "multihost", "path"}
"""Names that stand for something else in the v1 style."""
GONE = {
    *("AbstractCheckpointManager", "CheckpointManager", "CheckpointManagerOptions"),
    *("Checkpointer", "AsyncCheckpointer", "JsonCheckpointHandler"),
    *("ArrayRestoreArgs", "RestoreArgs", "SaveArgs"),
    *("args", "logging", "transform_utils", "utils"),
    *("checkpoint_manager", "checkpoint_managers"),
}
"""Names that the v1 style lacks."""
STAY = {"handlers", "v1"}
"""Names of modules of which the v1 style has one, too, with other classes in it; and the name of the style."""

SHIM = """
    import importlib.metadata
    import sys
    import types

    from orbax.checkpoint import v1

    moved = types.ModuleType("orbax.checkpoint")
    moved.__dict__.update({name: value for name, value in vars(v1).items() if not name.startswith("_")})
    for name in [name for name in sys.modules if name.startswith("orbax.checkpoint")]:
        del sys.modules[name]
    sys.modules["orbax.checkpoint"] = sys.modules["orbax"].checkpoint = moved
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "1.0.0" if name == "orbax-checkpoint" else version(name)
"""


def _names() -> set[str]:
    """The names at the top level of Orbax that epochckpt uses."""
    found = set[str]()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ocp":
                found.add(node.attr)
            if isinstance(node, ast.ImportFrom) and node.module == "orbax.checkpoint":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("orbax.checkpoint."):
                found.add(str(node.module).split(".")[2])
    return found


@pytest.mark.slow
def test_what_would_break_is_known() -> None:
    """Each name that is used is in one of the three sets above, so that whoever moves to 1.0 knows what to change."""
    names = _names() - {"__version__", "options", "training"}  # the last two where `ocp` stands for the v1 style
    assert names == TAKEN | GONE | STAY
    assert {name for name in GONE if hasattr(v1, name)} == set()
    assert {name for name in TAKEN | STAY - {"v1"} if not hasattr(v1, name)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("use", ["ec.CheckpointManager", "ec.args.StandardSave", "ec.v1.training", "ec.JobRunner"])
def test_it_is_refused_by_its_name(use: str, tmp_path: pathlib.Path) -> None:
    """Whoever installs it all the same, past pip, is told which version does; not of an attribute that is missing."""
    program = textwrap.dedent(SHIM) + f"\nimport epochckpt as ec\n{use}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: epochckpt needs orbax-checkpoint below 1.0, and 1.0.0 is installed")
    assert "pip install 'orbax-checkpoint<1.0'" in last
