"""The notebooks as they are kept: without outputs, so that a change of one is a change of what it says. And what a run
shows in one.
"""

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


TRAIN = """
import epochckpt as ec
job = ec.Job()
job.epoch(lambda ws: {"loss": 1.0 / ws.epoch})
job.stop_when(ec.stop.max_epochs(7))
ec.JobRunner(job).train();
"""


def test_a_run_shows_one_bar_below_its_cell_and_nothing_in_red() -> None:
    """In a real kernel, as `pip install -e ".[notebooks]"` brings it, without widgets: one output, which is updated."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(TRAIN)])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "display_data"
    assert "7/7" in output.data["text/plain"]
    assert "loss=0.1429" in output.data["text/plain"]
