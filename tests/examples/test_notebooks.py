"""The notebooks as they are kept: without outputs, so that a change of one is a change of what it says."""

import json
import pathlib

import pytest

from tests.support.processes import ROOT

NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


def test_there_are_notebooks() -> None:
    """The two that the README names."""
    assert {"tour.ipynb", "look_into.ipynb"} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stripped_and_every_cell_is_python(path: pathlib.Path) -> None:
    """No outputs, no counts, nothing of the machine that it was written on; CI executes them."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        compile("".join(cell["source"]), str(path), "exec")
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"].keys() == {"name"}
