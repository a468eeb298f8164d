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
scripts = {"save_restore": ["--cases=2x1KB,1x4B"], "many_epochs": ["--saves=2", "--epochs=3"]}
scripts["beside_python"] = ["--state=1x4B"]
for name, more in scripts.items():
    script = importlib.import_module(name)
    known = [each for each in given + more if each[2:].partition("=")[0] in flags.FLAGS]
    flags.FLAGS.unparse_flags()
    flags.FLAGS([name, *known, f"--directory={folder}", f"--json={folder}/{name}.json"])
    script.main([])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scripts_of_one_process_run(tmp_path: pathlib.Path) -> None:
    """Each measures every contestant, under the names that the table of goals asks for."""
    command = [sys.executable, "-c", _ONE, str(FOLDER), str(tmp_path)]
    done = subprocess.run(command, check=True, timeout=580, stdout=subprocess.PIPE, text=True)
    assert done.stdout.count("device limit") == 2
    found = {path.stem: tables(path) for path in tmp_path.glob("*.json")}
    assert {name: len(all_) for name, all_ in found.items()} == {
        "save_restore": 2,
        "many_epochs": 2,
        "beside_python": 2,
    }
    for run, cases in {"large": ["100x10MB", "adam401"], "small": ["2000x1KB", "adam5001", "1x4B"]}.items():
        (tmp_path / f"{run}.json").write_text(json.dumps(dict.fromkeys(cases, found["save_restore"][0])))
    saves, opened = found["many_epochs"]
    renamed = {"saves": saves, "open 2000": opened, "open 10000": opened}
    (tmp_path / "many_epochs.json").write_text(json.dumps(renamed))
    command = [sys.executable, str(FOLDER / "goals.py"), str(tmp_path)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split(" | ") for line in printed.splitlines()[2:]]
    measured = {run for _, run, figures in rows if figures != "– |"}
    assert measured == {"large", "small", "many_epochs"}


def test_each_goal_has_a_run_and_each_run_a_script() -> None:
    """What `goals.py` reads is what `all.py` writes."""
    code = (
        "import all, goals; print({run for _, run, _ in goals.GOALS} ^ {*all.RUNS}, *{a[0] for a in all.RUNS.values()})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=FOLDER)
    unmatched, *scripts = done.stdout.split()
    assert unmatched == "set()"
    assert all((FOLDER / f"{script}.py").exists() for script in scripts)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "count", "arguments"),
    [
        ("beside_training", 2, ["--case=2x1KB", "--steps=2"]),
        ("beside_compilation", 1, ["--width=8", "--layers=1", "--tokens=4", "--warm_up_gib=0"]),
        ("processes", 2, ["--sizes=1,2", "--leaves=2", "--leaf_kb=4"]),
        ("reshard", 2, ["--processes=2", "--leaves=2", "--side=64"]),
        ("memory", 1, ["--case=2x1MB"]),
        ("first_step", 1, ["--width=16", "--layers=1", "--tokens=4"]),
        ("restart", 1, ["--cases=2x1KB", "--without=orbax uncompressed,orbax plain files,orbax zarr3"]),
    ],
)
def test_scripts_that_take_longer_run(tmp_path: pathlib.Path, script: str, count: int, arguments: list[str]) -> None:
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
