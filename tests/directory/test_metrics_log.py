"""The metrics of deleted epochs: they stay, for every view of the run, unless the run went back."""

from __future__ import annotations

import json
import math
import pathlib
import re
import uuid
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.directory import directory_of, metrics_log
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.head_object import HeadObject
from epochckpt.directory.head_record import Head
from epochckpt.directory.metrics_log import Line
from epochckpt.directory.object_log import ObjectLog
from epochckpt.format import paths
from epochckpt.inspection import whole_run
from epochckpt.inspection.directory import Inspection
from epochckpt.inspection.rows import Overview
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store

LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 1.5, 6: 1.75}


@pytest.fixture(params=["posix", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "run") if request.param == "posix" else f"memory://log/{uuid.uuid4()}"


def manager_of(
    directory: str, keep: int | None = 2, storage: ec.StorageOptions | None = None, **more: Any
) -> ec.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, **more)
    return ec.CheckpointManager(directory, options=options, storage=storage)


def save(manager: ec.CheckpointManager, losses: dict[int, float] | Sequence[int], **metrics: Any) -> None:
    for epoch in losses:
        found = {"loss": losses[epoch]} if isinstance(losses, dict) else {"loss": float(epoch)}
        assert manager.save(epoch, args=ocp.args.StandardSave({"w": jnp.ones(2)}), metrics=found | metrics, force=True)
        manager.wait_until_finished()


def look(directory: str) -> Inspection:
    return ec.inspect(directory, metric="loss", mode="min")


def losses(directory: str) -> dict[int, float]:
    return dict(look(directory).overview().history.get("loss", ()))


def test_views_are_of_the_whole_run(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Curves, extremes and rows have deleted epochs; the best is one that is there, and a better one is named."""
    with manager_of(directory, todelete_subdir="old" if directory.startswith("/") else None) as manager:
        save(manager, {1: 3.0}, eval={"accuracy": math.nan}, note="text")
        ec.attach_metrics(directory, 1, {"bleu": 7}, "translator")
        save(manager, {e: loss for e, loss in LOSSES.items() if e > 1})
    run = look(directory)
    found = run.overview(1, check=False)
    assert list(run) == [5, 6]
    assert found.history == {"loss": tuple(LOSSES.items()), "bleu": ((1, 7),)}
    assert ([row.epoch for row in found.deleted], found.better) == ([1, 2, 3, 4], 2)
    assert [row.epoch for row in found.epochs if row.best] == [5]
    table = run.metrics()
    assert [(row.epoch, row.deleted) for row in table] == [(e, e < 5) for e in LOSSES]
    assert table[0].metrics.keys() == {"loss", "eval/accuracy", "bleu"}
    assert math.isnan(table[0].metrics["eval/accuracy"])
    assert table[0].committed_ns < table[5].committed_ns
    assert json.loads(json.dumps(table.to_json()))["rows"][0]["metrics"]["bleu"] == 7
    for text in (found_text := run.to_text(100), run.to_html()):
        assert "★ best 5 by min loss: 1.5" in text
        assert "2 was better (1), and was deleted" in text
        assert "4 deleted epochs are part of the curves" in text
    assert re.search(r"loss +\S+ +3 +1.75 +1 at 2, deleted +3 at 1, deleted", found_text)
    assert "bleu" in table.to_text(100)
    assert "deleted" in table.to_html()
    if directory.startswith("/"):  # in this process alone, a bucket in memory is there for another
        runs = ec.inspect_runs(pathlib.Path(directory).parent, metric="loss", mode="min")
        assert (runs.rows()[0].best, runs.rows()[0].better) == (5, 2)
        assert main.main(["ls", str(pathlib.Path(directory).parent), "--metric", "loss", "--mode", "min"]) == 0
        assert "1.5 at 5 (1 at 2, deleted)" in capsys.readouterr().out


def test_pandas_gets_the_whole_run(directory: str) -> None:
    """An index of epochs, times in UTC, and NaN where an epoch lacks a metric."""
    pandas = pytest.importorskip("pandas")
    with manager_of(directory) as manager:
        save(manager, [1], extra=4)
        save(manager, [2, 3])
    frame = look(directory).metrics().to_pandas()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame.index.name == "epoch"
    assert frame["deleted"].tolist() == [True, False, False]
    assert frame["loss"].tolist() == [1.0, 2.0, 3.0]
    assert frame["extra"].isna().tolist() == [False, True, True]
    assert abs((frame["committed"].iloc[2] - pandas.Timestamp.now("UTC")).total_seconds()) < 86400


def test_a_run_that_goes_back_forgets_what_came_after(directory: str) -> None:
    """By a rollback, or because the newest epoch is deleted; what is saved anew counts, also once it is deleted."""
    with manager_of(directory) as manager:
        save(manager, [1, 2, 3, 4, 5])
        manager.rollback_to(4)
        assert losses(directory) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
        save(manager, {5: 50.0, 6: 60.0, 7: 70.0})
        assert losses(directory) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0, 6: 60.0, 7: 70.0}
        for epoch in (7, 6):
            manager.delete(epoch)
        manager.wait_until_finished()
        assert losses(directory) == {}  # nothing is left, and the run begins anew
        save(manager, [1])
    assert losses(directory) == {1: 1.0}


def test_epochs_that_were_removed_by_hand_are_no_part_of_the_next_run(tmp_path: pathlib.Path) -> None:
    """Nobody wrote that they are gone."""
    directory = tmp_path / "run"
    with manager_of(str(directory)) as manager:
        save(manager, [1, 2, 3, 4])
    for epoch in (3, 4):
        (directory / str(epoch)).rename(tmp_path / str(epoch))
    with manager_of(str(directory)) as manager:
        save(manager, {1: 10.0})
    assert losses(str(directory)) == {1: 10.0}


def test_epochs_under_other_names_are_no_reason_to_forget(tmp_path: pathlib.Path) -> None:
    """A run that expects other names begins beside them, and what was kept of theirs stays."""
    directory = str(tmp_path / "run")
    with manager_of(directory, step_prefix="step") as manager:
        save(manager, [1, 2, 3])
    with manager_of(directory) as manager:
        save(manager, [9])
    named = ocp.CheckpointManagerOptions(step_prefix="step")
    assert [row.epoch for row in ec.inspect(directory, options=named).metrics().rows] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("back", ["rolled back", "deleted"])
def test_a_run_that_goes_back_to_its_mirror_keeps_what_was_before(tmp_path: pathlib.Path, back: str) -> None:
    """No epoch is here then; the run goes on from one that only the mirror has."""
    directory, storage = str(tmp_path / "run"), ec.StorageOptions(mirror=str(tmp_path / "mirror"), mirror_every=2)
    for epochs in [0, 1, 2, 3], [4, 5]:  # closing waits for the copy of 3, which stays here until it is made
        with manager_of(directory, storage=storage) as manager:
            save(manager, epochs)
    with manager_of(directory, storage=storage) as manager:
        if back == "rolled back":
            manager.rollback_to(3)
        else:
            for epoch in (4, 5):
                manager.delete(epoch)
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.isdigit()]
    with manager_of(directory, storage=storage) as manager:
        assert manager.latest_step() == 3
        save(manager, {4: 10.0})
    assert losses(directory) == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 10.0}


def test_what_is_torn_or_damaged_counts_for_nothing(tmp_path: pathlib.Path) -> None:
    """A kill or a power cut tears the last line; the next one is whole all the same. No log stops a deletion."""
    directory = tmp_path / "run"
    log = directory / paths.METRICS_LOG
    with manager_of(str(directory)) as manager:
        save(manager, [1, 2, 3, 4])
        assert len(log.read_bytes().splitlines()) == 2
        log.write_bytes(log.read_bytes()[:-20])
        save(manager, [5])
        assert losses(str(directory)) == {1: 1.0, 3: 3.0, 4: 4.0, 5: 5.0}
        log.write_bytes(log.read_bytes().replace(b'"loss":1.0', b'"loss":9.0') + b"\0" * 100)
        assert losses(str(directory)) == {3: 3.0, 4: 4.0, 5: 5.0}
        log.unlink()
        log.mkdir()
        save(manager, [6])
        found = look(str(directory)).overview()
        assert [row.epoch for row in found.epochs] == [5, 6]
        assert paths.METRICS_LOG in found.problems
    with ocp.CheckpointManager(directory) as stock:
        assert stock.all_steps() == [5, 6]


def parts_in(store: Store) -> dict[str, bytes]:
    """All parts of the log."""
    found = store.find(paths.METRICS_PART_PREFIX, "_epochckpt")
    return {path: store.read(path, limit_bytes=2**20) for path in found}


LONG = {f"metric_{number:03}": 1 / 3 for number in range(200)}  # four lines with such metrics make a part


def test_lines_of_a_bucket_move_to_parts() -> None:
    """Some at a time, so that the head stays small; a late or second move writes the same, and a lost head finds it."""
    directory = f"memory://log/{uuid.uuid4()}"
    store, stale = open_store(directory), []
    with manager_of(directory) as manager:
        save(manager, range(1, 7), **LONG)
        epoch_directory = directory_of(store, StepNames.of(ocp.CheckpointManagerOptions()))
        assert isinstance(epoch_directory, BucketDirectory)
        stale.append(epoch_directory.head.read())
        save(manager, range(7, 13), **LONG)
        manager.rollback_to(11)
        save(manager, {12: 120.0, 13: 130.0, 14: 140.0}, **LONG)
        head = epoch_directory.head.read()
        assert head is not None
        assert head.logged >= 8
        assert len(head.log) <= 5
        parts = parts_in(store)
        numbers = [line.number for line in metrics_log.read_parts(store)]
        assert numbers == [*range(1, len(numbers) + 1)]
        assert len(numbers) >= head.logged
        ObjectLog(store, HeadObject(store)).move(stale[0])
        assert parts_in(store) == parts
        assert len(parts) >= 2
        for path, data in parts.items():  # of which one may have the short line that says that the run went back
            lines = metrics_log.parse(data)
            assert path == paths.metrics_part(lines[0].number)
            assert len(lines) == (5 if any(line.back for line in lines) else 4)
        expected = {e: float(e) for e in range(1, 12)} | {12: 120.0, 13: 130.0, 14: 140.0}
        assert losses(directory) == expected
    store.remove(paths.HEAD)
    ec.repair_head(directory)
    kept = losses(directory)
    assert kept.items() <= expected.items()
    assert len(kept) >= 8
    with manager_of(directory) as manager:
        save(manager, [15, 16, 17, 18, 19])
    assert losses(directory) == kept | {e: float(e) for e in range(15, 20)}


def test_short_lines_of_a_bucket_move_by_the_hundred() -> None:
    """One line less stays in the head; of more, the first hundred move."""
    store = open_store(f"memory://log/{uuid.uuid4()}")
    log = ObjectLog(store, HeadObject(store))
    lines = [Line(epoch, metrics={"loss": 1.0}) for epoch in range(150)]
    log.move(Head(log=tuple(lines[:99])))
    assert parts_in(store) == {}
    log.move(Head(log=tuple(lines)))
    (part,) = parts_in(store).values()
    assert [line.epoch for line in metrics_log.parse(part)] == list(range(100))


def test_long_lines_of_a_bucket_move_sooner() -> None:
    """The head is written with each save: it has at most some 16 KiB of them."""
    directory, many = f"memory://log/{uuid.uuid4()}", {f"metric_{number}": float(number) for number in range(150)}
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        for epoch in range(16):
            assert manager.save(epoch, args=ocp.args.StandardSave({"w": jnp.zeros(1)}), metrics=many)
            manager.wait_until_finished()
        assert len(open_store(directory).read(paths.HEAD, limit_bytes=2**20)) < 40_000
    assert [row.epoch for row in ec.inspect(directory).metrics().rows] == list(range(16))
    assert len(parts_in(open_store(directory))) >= 2


NAMES = st.text(max_size=20)
METRICS = st.dictionaries(NAMES, st.floats() | st.integers() | st.booleans() | st.none() | NAMES, max_size=8)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), METRICS, st.booleans()), max_size=12), st.binary(max_size=40))
def test_lines_say_what_was_deleted_last(events: list[tuple[int, dict[str, Any], bool]], noise: bytes) -> None:
    """As a dict that forgets does; noise between the lines changes nothing, and a line has at most so many bytes."""
    expected, data = dict[int, Any](), b""
    for number, (epoch, metrics, back) in enumerate(events):
        line = Line(epoch, back=True) if back else Line.of(epoch, "a-1-0", number, metrics)
        if back:
            expected = {e: kept for e, kept in expected.items() if e <= epoch}
        elif line is not None:
            expected[epoch] = line
            assert line.metrics.keys() <= metrics.keys()
            assert len(line.to_bytes()) < 5000
        data += (line.to_bytes() if line else b"") + noise.replace(b"\n", b"") + b"\n"
    assert repr(metrics_log.deleted(metrics_log.parse(data))) == repr(dict(sorted(expected.items())))


def test_many_metrics_are_cut() -> None:
    """A line stays small, and has what comes first."""
    line = Line.of(1, "a-1-0", 1, {f"metric {i}": float(i) for i in range(10_000)})
    assert line is not None
    assert 100 < len(line.metrics) < 1000
    assert len(line.to_bytes()) < 5000
    assert whole_run.completed(Overview("", ()), [], {1: line}).history["metric 7"] == ((1, 7.0),)
