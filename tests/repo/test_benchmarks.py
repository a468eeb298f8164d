"""The scripts in `benchmarks/` run, on the smallest of their cases, and print their tables."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "benchmarks"
_ONE = """
import sys, importlib
from absl import flags
sys.path.insert(0, sys.argv[1])
import common
folder, given = sys.argv[2], ["--rounds=1", "--warm_up_gib=0", "--case=2x1KB"]
scripts = {"save_restore": ["--cases=2x1KB,1x4B"], "beside_training": ["--steps=2"]}
scripts["many_epochs"] = ["--saves=2", "--epochs=3"]
for name, more in scripts.items():
    script = importlib.import_module(name)
    known = [each for each in given + more if each[2:].partition("=")[0] in flags.FLAGS]
    flags.FLAGS.unparse_flags()
    flags.FLAGS([name, *known, f"--directory={folder}", f"--json={folder}/{name}.json"])
    script.main([])
"""


@pytest.mark.slow
def test_scripts_of_one_process_run(tmp_path: pathlib.Path) -> None:
    """Each measures every contestant."""
    command = [sys.executable, "-c", _ONE, str(FOLDER), str(tmp_path)]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    assert done.stdout.count("device limit") == 2
    found = [tables(path) for path in tmp_path.glob("*.json")]
    assert sorted(map(len, found)) == [2, 2, 2]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "count", "arguments"),
    [
        ("processes", 2, ["--sizes=1,2", "--leaves=2", "--leaf_kb=4"]),
        ("reshard", 2, ["--processes=2", "--leaves=2", "--side=64"]),
        ("memory", 1, ["--case=2x1MB"]),
    ],
)
def test_scripts_of_several_processes_run(
    tmp_path: pathlib.Path, script: str, count: int, arguments: list[str]
) -> None:
    """Each measures every contestant."""
    place = [f"--directory={tmp_path}", f"--json={tmp_path}/found.json", "--rounds=1"]
    command = [sys.executable, str(FOLDER / f"{script}.py"), *arguments, *place]
    subprocess.run(command, check=True, timeout=580)
    assert len(tables(tmp_path / "found.json")) == count


def tables(path: pathlib.Path) -> list[Any]:
    """The tables that a script has measured; each has a row for us and one for stock Orbax."""
    found = json.loads(path.read_text())
    assert found.pop("machine")
    for table in found.values():
        assert {"epochckpt", "orbax"} <= set(table)
        assert all(row and all(isinstance(value, float | int) for value in row.values()) for row in table.values())
    return list(found.values())
