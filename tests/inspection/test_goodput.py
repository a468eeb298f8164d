"""The ledger of a directory: what its runs have spent their time on."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import main as cli
from epochckpt.errors import FormatError
from epochckpt.format import RunEntry, checksums, parsing
from epochckpt.inspection import plots, rows, text, views
from epochckpt.inspection.rows import SPENT, Goodput, RunGoodput
from epochckpt.saving.run_clock import BLOCKED, RunClock
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.taps import NO_SPACE, fail_writes, is_record

Save = ocp.args.StandardSave
STATE = {"w": np.arange(5)}


def run(directory: Any, *epochs: int, close: bool = True, **options: Any) -> ec.CheckpointManager:
    """One run, which restores, and saves these epochs. One that does not close counts as killed for the next."""
    manager = ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options))
    if manager.latest_step() is not None:
        manager.restore(None)
    for epoch in epochs:
        manager.save(epoch, args=Save(STATE))
        manager.wait_until_finished()
    if close:
        manager.close()
    return manager


def ledger(directory: Any) -> Goodput:
    return ec.inspect(directory).goodput().goodput


def test_every_second_of_all_runs_is_in_the_ledger_once(directory: str) -> None:
    """A run that is closed, one that dies, and one that goes on."""
    run(directory, 1, 2)
    dead = run(directory, 3, 4, close=False)
    live = run(directory, 5, close=False)
    found = ledger(directory)
    first, second, third = found.runs
    assert [(r.killed, r.saves, r.epoch) for r in found.runs] == [(False, 2, 2), (True, 2, 4), (None, 1, 5)]
    assert all(r.secs == pytest.approx(sum(getattr(r, name) for name in SPENT)) for r in found.runs)
    for one, following in ((first, second), (second, third)):
        assert one.secs == pytest.approx((following.began_ns - one.began_ns) / 1e9)
    assert third.secs == pytest.approx((third.alive_ns - third.began_ns) / 1e9)
    assert all(r.trained_secs > 0 and 0 <= r.goodput < 1 for r in found.runs)
    assert (first.restoring_secs, third.blocked_secs, third.waiting_secs) == (0, 0, 0)  # nothing before its first save
    assert min(second.restoring_secs, third.restoring_secs, first.blocked_secs, first.waiting_secs) > 0
    assert first.lost_secs == third.lost_secs == 0
    record = ec.inspect(directory)[4].row
    assert record.secs is not None
    assert second.lost_secs == pytest.approx(record.secs)
    total = found.total
    assert total is not None
    assert (total.saves, found.kills) == (5, 1)
    assert total.secs == pytest.approx((third.alive_ns - first.began_ns) / 1e9)
    live.close()
    dead.close()


def test_a_run_that_dies_before_its_first_commit_is_in_the_ledger(directory: str, faults: Faults) -> None:
    """From its claim to the next run nothing is known but its end, of which the run before it is not accused."""
    run(directory, 1)
    dead = ec.CheckpointManager(directory)
    tap = fail_writes(dead)
    dead.save(2, args=Save({"w": jnp.arange(5)}))
    with pytest.raises(ec.errors.SaveError):
        dead.wait_until_finished()
    tap.remove()
    live = run(directory, 3, 4, close=False)
    first, second, third = ledger(directory).runs
    assert [(r.killed, r.saves) for r in (first, second, third)] == [(None, 1), (True, 0), (None, 2)]
    assert second.unknown_secs == second.secs == pytest.approx((third.began_ns - second.began_ns) / 1e9)
    assert first.secs == pytest.approx((second.began_ns - first.began_ns) / 1e9)
    assert "not seen" in text.to_text(text.render(views.goodput(ledger(directory))), 130)
    live.close()
    run(directory, 5)
    assert [(r.killed, r.saves) for r in ledger(directory).runs] == [(None, 1), (True, 0), (False, 2), (None, 1)]
    dead.close()


def test_a_save_that_fails_at_its_commit_is_no_save_of_the_ledger(directory: str, faults: Faults) -> None:
    """Neither counts it, nor is the training before it kept."""
    manager = run(directory, 1, close=False)
    tap = faults.fail(Store.create, NO_SPACE, where=lambda call: is_record(call.path))
    manager.save(2, args=Save(STATE))
    with pytest.raises(ec.errors.SaveError):
        manager.wait_until_finished()
    tap.remove()
    manager.save(3, args=Save(STATE))
    manager.close()
    (found,) = ledger(directory).runs
    assert (found.saves, found.epoch) == (2, 3)
    assert [row.epoch for row in ec.inspect(directory).epochs()] == [1, 3]


@pytest.mark.parametrize("width", [80, 120])
def test_each_run_of_the_ledger_says_when_it_began(tmp_path: pathlib.Path, width: int) -> None:
    """At every width: that tells one run from another. What has no room is named."""
    for epoch in (1, 2):
        run(tmp_path, epoch)
    shown = text.to_text(text.render(views.goodput(ledger(tmp_path))), width)
    assert "began" in shown
    assert ("no room for saves" in shown) is (width == 80)
    assert max(map(len, shown.splitlines())) <= width


def test_the_ledger_outlives_the_epochs(tmp_path: pathlib.Path) -> None:
    """Where one epoch is kept, its record has all runs; going on in one manager makes no run of its own."""
    for epoch in (1, 3, 5):
        run(tmp_path, epoch, epoch + 1, max_to_keep=1)
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=Save(STATE))
        manager.reload()
        manager.save(8, args=Save(STATE))
    assert [row.epoch for row in ec.inspect(tmp_path).epochs()] == [6, 7, 8]
    assert [(r.epoch, r.saves) for r in ledger(tmp_path).runs] == [(2, 2), (4, 2), (6, 2), (8, 2)]


def test_a_damaged_record_is_a_problem_and_the_next_one_tells(tmp_path: pathlib.Path) -> None:
    run(tmp_path, 1, 2)
    (tmp_path / "2" / "epoch.json").write_bytes(b"{}")
    found = ledger(tmp_path)
    assert [r.epoch for r in found.runs] == [1]
    assert list(found.problems) == ["2"]


def test_directories_without_a_ledger_have_an_empty_one(tmp_path: pathlib.Path) -> None:
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(1, args=Save({"w": np.arange(3)}))
    found = ledger(tmp_path)
    assert (found.runs, found.total, found.problems) == ((), None, {})
    assert "no epoch here tells of a run" in text.to_text(text.render(views.goodput(found)), 100)


def test_the_newest_hundred_runs_are_kept() -> None:
    clock = RunClock()
    clock.begin_after([RunEntry(f"{n:016d}", n, n, n, 1, n, 0.0, 0.0, 0.0, False) for n in range(150)])
    clock.spend(BLOCKED, 2.0)
    runs = clock.committing(7, "own", clock.so_far(), (1, 2), (f"{149:016d}", 1))
    assert (len(runs), runs[0].epoch, runs[-1].incarnation, runs[-1].blocked_secs) == (100, 51, "own", 2.0)
    assert [r.killed for r in runs[-2:]] == [False, None]  # what was known of an end stays


@pytest.mark.parametrize(
    "row", [[], 1, ["x"] * 10, ["../a", 1, 1, 1, 1, 1, 0, 0, 0, None], ["a", -1, 1, 1, 1, 1, 0, 0, 0, None]]
)
def test_runs_that_cannot_be_are_refused(tmp_path: pathlib.Path, row: Any) -> None:
    run(tmp_path, 1)
    data = json.loads((tmp_path / "1" / "epoch.json").read_bytes())
    del data["checksum"]
    with pytest.raises(FormatError, match=r"runs\[0\]|name"):
        parsing.parse_epoch("1/epoch.json", checksums.seal({**data, "runs": [row]}))


def example() -> Goodput:
    runs = [
        RunGoodput("a", 0, 5, 4, 2, True, 60.0, 5.0, 5.0, 10.0, 15.0, 5.0),
        RunGoodput("b", 9, 9, 9, 1, None, *[1.0] * 6),
    ]
    return Goodput("/data/run", tuple(runs))


def test_it_is_shown_as_text_html_and_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = text.to_text(text.render(views.goodput(example())), 130)
    first, _, total = (line.split() for line in said.splitlines()[-3:])
    assert " ".join(first[2:]) == "killed 2 4 1 min 5 s 5 s 10 s ≥ 15 s 5 s 60%"
    assert (total[0], total[-1], "1 kill" in said) == ("all", "58%", True)
    run(tmp_path, 1, 2)
    assert "open" in ec.inspect(tmp_path).goodput()._repr_html_()
    assert cli.main(["goodput", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (shown,) = found["runs"]
    assert found["total"] == shown
    assert shown["trained_secs"] == pytest.approx(ledger(tmp_path).runs[0].trained_secs)
    assert cli.main(["goodput", str(tmp_path)]) == 0
    assert "trained and kept" in capsys.readouterr().out


def test_it_is_drawn(tmp_path: pathlib.Path) -> None:
    """One bar of six parts for each run; the parts are as long as the times."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    found = example()
    ax = plots.Plots(lambda: rows.Overview("", ()), lambda: found).goodput()
    widths = [[patch.get_width() for patch in bars] for bars in ax.containers]
    assert widths == [[getattr(r, name) for r in found.runs] for name in SPENT]
    assert [label.get_text() for label in ax.get_legend().get_texts()][:2] == ["trained", "blocked"]
    run(tmp_path, 1)
    assert len(ec.inspect(tmp_path).plots.goodput().containers) == 6
    import matplotlib.pyplot as plt

    plt.close("all")


PROGRAM = """
import os, signal, sys
import numpy as np, orbax.checkpoint as ocp, epochckpt as ec
manager = ec.CheckpointManager(sys.argv[1])
for epoch in (1, 2):
    manager.save(epoch, args=ocp.args.StandardSave({"w": np.arange(5)}))
    manager.wait_until_finished()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_process_that_is_killed_is_seen_by_the_next_run(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    dead = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], timeout=100, check=False, env=environment)
    assert dead.returncode == -signal.SIGKILL
    assert [r.killed for r in ledger(tmp_path).runs] == [None]
    run(tmp_path, 3)
    killed, after = ledger(tmp_path).runs
    assert (killed.killed, killed.epoch, killed.saves, after.killed) == (True, 2, 2, None)
    assert killed.lost_secs > 0
    assert dataclasses.replace(killed, unknown_secs=0.0).secs < killed.secs
