"""Real jobs whose processes have a disk each: all that they save is restored from these disks alone."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest

import epochckpt as ec
from epochckpt.cli.main import main
from epochckpt.format import parsing
from tests.support.processes import run_worker

JOBS = "tests.support.local_disk_jobs"


@pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]
)
def test_the_same_job_goes_on_from_its_disks_alone_and_others_from_the_mirror(
    tmp_path: pathlib.Path, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrays of every sharding, keys, NumPy and Python leaves, JSON, a tree per node, and a file of each process."""
    root, devices = {"root": str(tmp_path)}, 4 // processes
    assert run_worker(f"{JOBS}:save_all", root, processes, devices) == [[1, 2]] * processes
    mirror, away = tmp_path / "mirror", tmp_path / "away"
    with ec.CheckpointManager(mirror) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.verify(2).ok
    with ec.CheckpointManager(tmp_path / "uploaded") as manager:
        assert manager.verify(2).ok
    for copy in (mirror, tmp_path / "uploaded"):
        assert not list(copy.glob("*/*/_also"))
        assert b"carried" not in (copy / "2/epoch.json").read_bytes()

    # Each disk has its node's part alone, and what that holds of the others'.
    for number in range(processes):
        check_disk(tmp_path / f"disk-{number}", f"process_{number}", processes, capsys)

    # Without the mirror the same topology restores, and another sharding is told of the node that it lacks.
    mirror.rename(away)
    for same, moved in run_worker(f"{JOBS}:restore_all", {**root, "ways": [False, True]}, processes, devices):
        assert same == []
        assert [re.search(r"neither this host, .*, nor a mirror has the files of node", each) for each in moved]
    shutil.rmtree(mirror, ignore_errors=True)
    away.rename(mirror)
    # A replaced host, and another sharding, read what they lack from the mirror.
    shutil.rmtree(tmp_path / "disk-1")
    ways = {"ways": [True] if processes == 2 else [False, True]}
    for wrong in run_worker(f"{JOBS}:restore_all", {**root, **ways}, processes, devices):
        assert not any(wrong)


@pytest.mark.slow
def test_a_look_that_one_process_takes_alone_harms_no_later_one(tmp_path: pathlib.Path) -> None:
    """It ends in time and names the process that did not come; the next look, by both, finds what is there."""
    primary, other = run_worker(f"{JOBS}:lone_reloads", {"root": str(tmp_path)}, 2)
    assert re.search("process_1 did not answer within 0.5 s", primary[0])
    assert re.search(r"the primary, process_0, did not answer reload\(\) within 1 s", other[1])
    assert primary[1:] == [[1], [1]]
    assert [other[0], other[2]] == [[1], [1]]


def check_disk(disk: pathlib.Path, node: str, processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said of a directory on the disk of one host, when its mirror is there."""
    assert [path.name for path in (disk / "2").iterdir() if path.is_dir()] == [node]
    record = parsing.parse_node("node.json", (disk / "2" / node / "node.json").read_bytes())
    written = disk / "2" / node / record.replicas[0].path
    assert written.stat().st_size == record.replicas[0].size
    run = ec.inspect(disk, mirror=disk.parent / "mirror")
    overview = run.overview()
    assert (overview.host, overview.mirror) == (node, str(disk.parent / "mirror"))
    row = overview.epochs[-1]
    assert (row.state, row.tier) == ("committed", "both")
    assert [each.state for each in row.nodes].count("elsewhere") == processes - 1
    assert run.du().usage.host == node
    verified = run[2].verify()
    assert verified.ok
    assert verified.note == f"only what this host has was read: the files of {node}"
    assert run[2]["state"]["arrays/rows"].shape == (24, 48)  # most of it from the mirror
    assert set(run[2]["own"]) == {f"process_{number}" for number in range(processes)}
    assert main(["show", str(disk), "2"]) == 0
    assert f"the files of {node}" in capsys.readouterr().out

    # Damage of what only this host needs is found.
    saved = written.read_bytes()
    written.write_bytes(saved[:-8] + bytes(8))
    assert main(["verify", str(disk), "2", "--json"]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["epochs"][0]["damage"]
    assert damage["path"] == f"2/{node}/{record.replicas[0].path}"
    written.write_bytes(saved[:-8])
    states = [(row.state, row.tier) for row in run.overview().epochs if row.epoch == 2]
    assert states == [("damaged", "mirror")]
    written.write_bytes(saved)


@pytest.mark.long
def test_a_large_numpy_leaf_that_differs_between_hosts_fails_the_save(tmp_path: pathlib.Path) -> None:
    for found in run_worker(f"{JOBS}:differ", {"root": str(tmp_path)}, 2, 1):
        assert "leaf 'wide' is no jax array, and has other values on process_1 than on process_0" in found[0]
        assert found[1:] == ["2"]
