"""A job of many nodes, simulated by `benchmarks/simulate_pod.py`: what grows with their number, and what does not."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "simulate_pod.py"


@pytest.mark.slow
def test_no_node_has_more_to_do_in_a_job_of_more_nodes(tmp_path: pathlib.Path) -> None:
    """Two messages to save and two to open; few files to restore; and `epoch.json` has some 100 bytes per node more."""
    out = tmp_path / "pod.json"
    options = ["--nodes=4,40", "--leaves=100", f"--json={out}", f"--directory={tmp_path}"]
    subprocess.run([sys.executable, SCRIPT, *options], check=True, timeout=300)
    four, forty = json.loads(out.read_text())["nodes"].values()
    for row in (four, forty):
        assert row["a save's"][0] == row["opening's messages"][0] == 2
        assert row["view"]
        owners = min(16, row["nodes"])  # of the small leaves that are the same everywhere
        assert row["files on the same mesh"][0] <= 2 * (owners + 1)
    for messages in ("a save's", "opening's messages"):
        assert abs(forty[messages][1] - four[messages][1]) < 100
    assert forty["record"] - four["record"] < 36 * 250
