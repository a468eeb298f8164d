"""A directory as rows: what is there, whether it is whole, what is under way, and what is no epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import typing
import uuid
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.directory.epoch_directory import Rollback
from epochckpt.directory.posix import PosixDirectory
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, NotACheckpointDirectoryError, SaveError
from epochckpt.format import checksums, parsing
from epochckpt.inspection import leftovers, opening, rows, scan
from epochckpt.jobs.backends.base import NOTES
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from epochckpt.testing.faults import Hold
from tests.support.taps import eventually, is_record

Save = ocp.args.StandardSave
NOBODY = 65534


def fill(directory: str | os.PathLike[str], epochs: range, **options: Any) -> None:
    """Saves epochs whose loss falls, each by two nodes."""
    with ec.CheckpointManager(directory, node=["a", "b"], options=ocp.CheckpointManagerOptions(**options)) as manager:
        for epoch in epochs:
            custom = {"by": "me", NOTES: {"epoch": epoch}}
            value = {"w": np.arange(6.0) + epoch, "b": np.zeros(3)}
            manager.save(epoch, args=Save(value), metrics={"loss": 10.0 - epoch}, custom_metadata=custom)
        manager.wait_until_finished()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("saved") / "run"
    fill(directory, range(1, 5))
    return directory


@pytest.fixture
def run(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may damage."""
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run", symlinks=True))


def by_epoch(found: rows.Overview) -> dict[int, rows.EpochRow]:
    return {row.epoch: row for row in found.epochs}


def content(directory: pathlib.Path) -> dict[str, Any]:
    """Everything in a directory, to the byte and the time of the last write."""
    found = {}
    for path in sorted(directory.rglob("*")):
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = what, path.lstat().st_mtime_ns
    return found


def test_committed_epochs_are_rows(saved: pathlib.Path) -> None:
    """Numbers, nodes, sizes, times, metrics, and what the caller attached without the runner's notes."""
    before = content(saved)
    found = scan.look(saved, metric="loss", mode="min", limit=None)
    assert content(saved) == before, "looking changes nothing"
    assert found.directory == str(saved)
    assert [row.epoch for row in found.epochs] == [1, 2, 3, 4]
    assert (found.hidden, found.leftovers, found.problems) == (0, (), {})
    for row in found.epochs:
        record = parsing.parse_epoch("", (saved / row.folder / "epoch.json").read_bytes())
        assert (row.state, row.writer, row.detail, row.checked) == ("committed", "epochckpt", "", True)
        assert (row.save_id, row.nbytes) == (record.save_id, record.nbytes)
        assert (row.started_ns, row.committed_ns) == (record.started_ns, record.committed_ns)
        assert row.secs == (record.committed_ns - record.started_ns) / 1e9
        assert row.blocked_secs == record.timings["blocked_secs"]
        assert [(n.name, n.nbytes, n.secs, n.state) for n in row.nodes] == [
            (n.name, n.nbytes, n.secs, "committed") for n in record.nodes
        ]
        assert row.slowest_node == max(record.nodes, key=lambda n: n.secs).name
        assert (row.metrics, row.custom_metadata) == ({"loss": 10.0 - row.epoch}, {"by": "me"})
        assert row.notes == {"epoch": row.epoch}
        assert row.latest == row.best == (row.epoch == 4)


def test_the_history_of_metrics_is_of_all_epochs(saved: pathlib.Path) -> None:
    """However few are shown."""
    found = ec.inspect(saved, metric=["loss", "accuracy"], mode="min").overview(1)
    assert found.history == {"loss": ((1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0))}
    assert (found.asked, found.metric, len(found.epochs)) == (("loss", "accuracy"), "loss", 1)
    assert rows.history([(1, {"a": {"b": 1}, "c": True, "d": math.nan, "e": 10**400}), (2, {"a/b": 2.5})]) == {
        "a/b": ((1, 1), (2, 2.5))
    }


def test_limit_keeps_the_newest_and_the_best(saved: pathlib.Path) -> None:
    """The rest is counted; the best is a whole row although it is old."""
    found = scan.look(saved, metric="loss", mode="max", limit=2)
    assert [(r.epoch, r.best, r.latest) for r in found.epochs] == [
        (1, True, False),
        (3, False, False),
        (4, False, True),
    ]
    assert [n.name for n in found.epochs[0].nodes] == ["a", "b"]
    whole = by_epoch(scan.look(saved, limit=None))
    assert (found.hidden, found.hidden_nbytes) == (1, whole[2].nbytes)
    none = scan.look(saved, limit=0)
    assert (none.epochs, none.hidden, none.hidden_nbytes) == ((), 4, sum(r.nbytes for r in whole.values()))


@pytest.mark.parametrize(
    ("metrics", "metric", "mode", "best"),
    [
        ([{"a": 1.0}, {"a": math.nan}, {"a": 0.5}], "a", "max", 0),
        ([{"a": math.nan}, {"a": math.nan}], "a", "min", 1),
        ([{"a": 1}, {"a": 1}, None], "a", "max", 1),
        ([{"a": math.inf}, {"a": 2}, {"a": True}], "a", "min", 1),
        ([{"a": {"b": 3}}, {"a": {"b": 4}}], "a/b", "max", 1),
        ([{"a/b": 5}, {"a": {"b": 4}}], "a/b", "max", 0),
        ([{"a": "x"}, {}], "a", "max", None),
    ],
)
def test_the_best_epoch(tmp_path: pathlib.Path, metrics: list[Any], metric: str, mode: str, best: int | None) -> None:
    """NaN is worst, the later of equals wins, what is no number does not count."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for epoch, one in enumerate(metrics):
            manager.save(epoch, args=Save({"x": np.zeros(1)}), metrics=one)
    found = scan.look(tmp_path / "run", metric=metric, mode=mode)
    assert [row.epoch for row in found.epochs if row.best] == ([] if best is None else [best])
    assert (found.metric, found.mode) == (metric, mode)


def test_a_metric_that_has_the_very_name_wins(tmp_path: pathlib.Path) -> None:
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, value in ((1, 5), (2, 4)):
            manager.save(epoch, args=Save({"x": np.zeros(1)}), metrics={"a/b": value})
    ec.attach_metrics(tmp_path, 1, {"a": {"b": 3}}, "evaluator")
    assert [row.epoch for row in scan.look(tmp_path, metric="a/b").epochs if row.best] == [1]


def test_an_unknown_metric_is_said_with_near_names(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=Save({"x": np.zeros(1)}), metrics={"eval": {"accuracy": 0.5}})
    assert "near: 'eval/accuracy'" in scan.look(tmp_path, metric="accuracy").problems[""]
    found = scan.look(saved, metric="los")
    assert not any(row.best for row in found.epochs)
    assert "'los'" in found.problems[""]
    assert "loss" in found.problems[""]


@pytest.mark.parametrize("given", [{"limit": -1}, {"limit": True}, {"limit": 1.5}])
def test_arguments_without_sense_are_refused(saved: pathlib.Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=str(next(iter(given)))):
        scan.look(saved, **given)


# -- damage ----------------------------------------------------------------------------------------------------------


def cut(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "says", "bad"),
    [
        (lambda e: cut(e / "a" / "default.safetensors"), "3/a/default.safetensors", ["a"]),
        (lambda e: shutil.rmtree(e / "b"), "3/b/node.json: is missing", ["b"]),
        (lambda e: (cut(e / "a" / "node.json"), os.unlink(e / "b" / "node.json")), "1 more", ["a", "b"]),
        (lambda e: cut(e / "epoch.json"), "3/epoch.json: checksum differs", []),
        (lambda e: (e / "epoch.json").write_bytes(b""), "3/epoch.json: is not a JSON record", []),
        (lambda e: (os.unlink(e / "epoch.json"), (e / "epoch.json").mkdir()), "3/epoch.json: cannot be read", []),
        (lambda e: os.unlink(e / "epoch.json"), "epoch.json, is missing", []),
        (lambda e: shutil.copy(e.parent / "2" / "epoch.json", e), "is the record of checkpoint 2", []),
    ],
)
def test_a_damaged_epoch_among_good_ones(run: pathlib.Path, damage: Any, says: str, bad: list[str]) -> None:
    """It is shown, with the reason and the nodes that it concerns; the others are as they were."""
    good = by_epoch(scan.look(run))
    damage(run / "3")
    found = by_epoch(scan.look(run))
    assert found[3].state == "damaged"
    assert says in found[3].detail
    assert [n.name for n in found[3].nodes if n.state == "damaged"] == bad
    assert all(n.detail for n in found[3].nodes if n.state == "damaged")
    assert {e: found[e] for e in (1, 2, 4)} == {e: good[e] for e in (1, 2, 4)}


def test_a_damaged_newest_epoch_is_not_the_latest(run: pathlib.Path) -> None:
    """As for a manager, which does not restore it."""
    cut(run / "4" / "a" / "default.safetensors")
    assert [row.epoch for row in scan.look(run).epochs if row.latest] == [3]


@pytest.mark.parametrize("limit", [1, 2])
def test_the_latest_is_a_row_though_only_damaged_ones_are_newer(run: pathlib.Path, limit: int) -> None:
    """As many as are shown may be damaged: the one that a job would resume from is shown, too."""
    ec.attach_metrics(run, 2, {"acc": 1}, "evaluator")
    for epoch in (3, 4):
        (run / str(epoch) / "a" / "default.safetensors").unlink()
    found = scan.look(run, limit=limit)
    assert [(row.epoch, row.state) for row in found.epochs if row.latest] == [(2, "committed")]
    assert found.hidden + len(found.epochs) == 4
    assert [row.metrics for row in found.epochs if row.latest] == [{"loss": 8.0, "acc": 1}]
    with ec.CheckpointManager(run) as manager:
        assert manager.latest_step() == 2


@pytest.mark.parametrize("secs", [10**400, "1e999", "-1e999"])
def test_a_duration_beyond_all_numbers_is_no_record(run: pathlib.Path, secs: int | str) -> None:
    """Such an epoch is shown as damaged; no view of it fails."""
    path = run / "4" / "epoch.json"
    record = json.loads(path.read_text())
    del record["checksum"]
    record["timings"]["blocked_secs"] = "HERE"
    text = checksums.seal(record).replace(b'"HERE"', str(secs).encode())
    head = text[:18] + b"0" * 16 + text[34:]
    path.write_bytes(text[:18] + f"{checksums.xxh3(head):016x}".encode() + text[34:])
    row = by_epoch(scan.look(run))[4]
    assert (row.state, "timings: expected an object of finite numbers" in row.detail) == ("damaged", True)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_record_of_a_rollback_is_said(run: pathlib.Path, kind: str) -> None:
    """Its epochs are shown all the same; a manager refuses with one of our errors."""
    path = run / "rollback.json"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/etc/hostname")}[kind]()
    found = scan.look(run)
    assert [row.epoch for row in found.epochs] == [1, 2, 3, 4]
    assert "no manager can open the directory" in found.problems["rollback.json"]
    with pytest.raises(EpochCheckpointError, match=r"rollback\.json"):
        ec.CheckpointManager(run)


def test_a_damaged_epoch_is_not_the_best(run: pathlib.Path) -> None:
    """The next best is, wherever it lies."""
    cut(run / "1" / "a" / "default.safetensors")
    found = scan.look(run, metric="loss", limit=1)
    assert [(r.epoch, r.state, r.best) for r in found.epochs] == [
        (1, "damaged", False),
        (2, "committed", True),
        (4, "committed", False),
    ]
    assert found.hidden == 1


class Thrifty(PosixDirectory):
    """A look at it may check four epochs' worth less than all: two of two nodes."""

    @property
    def check_budget(self) -> int:
        return 8


def test_unchecked_rows_say_so(run: pathlib.Path) -> None:
    """Only so many files are looked at, of the newest epochs first; without a check none is."""
    cut(run / "1" / "a" / "default.safetensors")
    found = by_epoch(scan.look(run, check=False))
    assert [row.checked for row in found.values()] == [False] * 4
    found = by_epoch(scan.look(run, known=Thrifty(open_store(run), StepNames.of(ocp.CheckpointManagerOptions()))))
    assert {epoch: row.checked for epoch, row in found.items()} == {1: False, 2: False, 3: True, 4: True}
    assert found[1].state == "committed"


def test_no_tree_is_parsed_for_an_overview(run: pathlib.Path) -> None:
    """What it costs does not depend on how many leaves epochs have: the items are cut out of the text."""
    for epoch in range(1, 5):
        record = run / str(epoch) / "epoch.json"
        text = record.read_bytes()
        no_json = text.replace(b'"leaves":[', b'"leaves":[no JSON,')
        assert no_json != text
        record.write_bytes(sealed(without_checksum(no_json)))
        with pytest.raises(EpochCheckpointError):
            parsing.parse_epoch("epoch.json", record.read_bytes())
    assert [(row.epoch, row.state) for row in scan.look(run).epochs] == [(e, "committed") for e in range(1, 5)]


# -- the light parse -------------------------------------------------------------------------------------------------


def same_head(data: bytes) -> bool:
    """Whether the light parse gives what the full one gives; what that refuses because of its items it may take."""
    try:
        full = parsing.parse_epoch("epoch.json", data)
    except EpochCheckpointError:
        with contextlib.suppress(EpochCheckpointError):
            parsing.parse_head("epoch.json", data)
        return True
    return parsing.parse_head("epoch.json", data) == dataclasses.replace(full, items={})


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Commit records of all kinds, with names and values that look like parts of one."""
    directory = tmp_path_factory.mktemp("records")
    odd = {'a,"items":{': np.zeros(2), "default_item": {'"}{': 1, "\\": "}", "ü": None}, "items": [np.ones(1)]}
    keys = {"k": jax.random.key(0), "n": np.int8(3)}
    custom = {"items": {}, "default_item": {"items": [{}]}, "x": '}{"'}
    cases: list[tuple[Any, Any]] = [
        (Save({}), {}),
        (Save(odd), {}),
        (Save(keys), custom),
        (ocp.args.Composite(default_item=Save(odd), items=ocp.args.JsonSave({"a": 1})), {}),
        (
            ocp.args.Composite(one=Save(keys), two=ec.args.NodeSave({"a": {"i": 1}, "b": {"i": 2}}, by_node=True)),
            custom,
        ),
        (ocp.args.PyTreeSave({"x": np.zeros(3)}, custom_metadata=custom), {}),
    ]
    found = []
    for number, (args, attached) in enumerate(cases):
        with ec.CheckpointManager(directory / str(number), node=["a", "b"]) as manager:
            manager.save(0, args=args, metrics={"items": 1.0, "inf": math.inf}, custom_metadata=attached)
        found.append((directory / str(number) / "0" / "epoch.json").read_bytes())
    alone = NodeEpochs(directory, "me")
    alone.save(9, ocp.args.Composite(x=Save({"y": 1})), {"notes": {}})
    return [*found, (directory / "9" / "me" / "epoch.json").read_bytes()]


def test_the_light_parse_gives_what_the_full_parse_gives(records: list[bytes]) -> None:
    """Everything but the items, for all kinds of real records."""
    for data in records:
        assert parsing.parse_head("", data) == dataclasses.replace(parsing.parse_epoch("", data), items={})


def without_checksum(record: bytes) -> bytes:
    """The text of a record, see `sealed`."""
    return b"{" + record.partition(b",")[2]


def sealed(text: bytes) -> bytes:
    """A record with a checksum that fits, whatever its text is."""
    zeroed = b'{"checksum":"xxh3:' + b"0" * 16 + b'",' + text[1:]
    return zeroed.replace(b"0" * 16, f"{checksums.xxh3(zeroed):016x}".encode(), 1)


TEXTS = st.sampled_from(
    ["items", "default_item", "epoch", "a", '"', "\\", "}", "{", ',"items":{', '},"epoch":1,"b":{"']
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ['"items"', '"default_item"', '"epoch"', '"nodes"', '"metrics"', '"custom_metadata"', '"x"', '"\\u0065poch"']
)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=400, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_record_makes_the_light_parse_say_something_else(records: list[bytes], data: st.DataObject) -> None:
    """Fields twice, in another order, hidden in items, with texts that look like fields: equal, or refused by both."""
    record = json.loads(data.draw(st.sampled_from(records)))
    del record["checksum"]
    fields = [(json.dumps(name), json.dumps(value, separators=(",", ":"))) for name, value in record.items()]
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(fields)))
        value = data.draw(JSON | st.sampled_from([record["items"], record["epoch"], record["nodes"]]))
        fields.insert(place, (data.draw(NAMES), json.dumps(value, separators=(",", ":"))))
    if data.draw(st.booleans()):
        kinds = {"kind": "files", "handler": "h", "extra": data.draw(JSON)}
        place = next(i for i, (name, _) in enumerate(fields) if name == '"items"')
        fields[place] = '"items"', json.dumps({**record["items"], "more": kinds}, separators=(",", ":"))
    text = "{" + ",".join(f"{name}:{value}" for name, value in fields) + "}"
    assert same_head(sealed(text.encode()))


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200, suppress_health_check=list(hypothesis.HealthCheck))
def test_garbled_text_is_refused_or_read_alike(records: list[bytes], data: st.DataObject) -> None:
    """Bytes removed, doubled or replaced, under a checksum that fits: refused with our errors, or the same record."""
    text = without_checksum(data.draw(st.sampled_from(records)))
    at = data.draw(st.integers(1, len(text) - 1))
    piece = data.draw(
        st.sampled_from([b"", b'"', b"{", b"}", b"\\", b",", b',"items":{', b',"default_item":', b"\xff"])
    )
    broken = sealed(text[:at] + piece + text[at + data.draw(st.integers(0, 3)) :])
    assert same_head(broken)


# -- attempts --------------------------------------------------------------------------------------------------------


def later() -> int:
    """The clock of a look after the time in which an attempt may be silent."""
    return time.time_ns() + int((leftovers.LIVE_SECS + 1) * 1e9)


def test_a_save_under_way_is_seen(run: pathlib.Path, hold_saves: Callable[[], Hold]) -> None:
    """With its nodes and bytes as they are now; in progress, after ten silent minutes left over, at last committed."""
    with ec.CheckpointManager(run, node=["a", "b"]) as manager:
        hold = hold_saves()
        manager.save(7, args=Save({"w": np.arange(1000.0)}))
        assert hold.reached.wait(60)
        found = scan.look(run, limit=1)
        committed, row = found.epochs
        assert (committed.epoch, committed.latest) == (4, True)
        assert (row.epoch, row.state, row.latest) == (7, "in progress", False)
        assert [(n.name, n.state) for n in row.nodes] == [("a", "written"), ("b", "written")]
        assert row.nodes[0].nbytes > 8000
        assert row.nodes[0].secs is not None
        assert row.nbytes >= sum(n.nbytes for n in row.nodes)
        assert row.folder.startswith("incarnation-")
        assert row.age_secs is not None
        assert row.age_secs < leftovers.LIVE_SECS
        assert (run / row.folder / "a" / "node.json").exists()
        (old,) = [r for r in scan.look(run, clock_ns=later).epochs if r.epoch == 7]
        assert old.state == "abandoned"
        assert "10 min" in old.detail
        hold.let_go()
        manager.wait_until_finished()
        after = by_epoch(scan.look(run))
        assert (after[7].state, after[7].save_id) == ("committed", row.save_id)


def test_a_node_that_has_not_written_yet_is_seen(run: pathlib.Path) -> None:
    """One node's record is there, another's is not: the folder is as a job leaves it that is killed between them."""
    staging = run / f"incarnation-{'ab' * 8}.orbax-checkpoint-tmp" / "9-2"
    shutil.copytree(run / "4", staging, symlinks=True)
    os.unlink(staging / "epoch.json")
    os.unlink(staging / "b" / "node.json")
    (row,) = [r for r in scan.look(run).epochs if r.epoch == 9]
    assert (row.save_id, row.state) == (f"{'ab' * 8}-9-2", "in progress")
    assert [(n.name, n.state) for n in row.nodes] == [("a", "written"), ("b", "writing")]
    assert "1 of the 2 nodes" in row.detail


@pytest.mark.slow
def test_looking_at_a_directory_that_is_being_written_to(tmp_path: pathlib.Path) -> None:
    """Epochs come, are replaced by newer ones and go: no look fails, and none misses what stays, or sees it damaged."""
    run, failures, done = tmp_path / "run", list[BaseException](), threading.Event()
    fill(run, range(1, 3))
    looks: list[rows.Overview] = []

    def look() -> None:
        try:
            while not done.is_set():
                looks.append(scan.look(run, metric="loss"))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for begin in range(3, 40, 9):  # a look, at least, between them, however the threads get their turns
            seen = len(looks)
            assert eventually(lambda seen=seen: len(looks) > seen or bool(failures))
            fill(run, range(begin, min(begin + 9, 40)), max_to_keep=2, keep_period=2)
    finally:
        done.set()
        thread.join(60)
    assert failures == []
    for found in looks:
        assert not found.problems
        assert [row.epoch for row in found.epochs if row.state == "damaged"] == []
        numbers = [row.epoch for row in found.epochs if row.state == "committed"]
        assert numbers == sorted(set(numbers))
        assert 2 in numbers
    assert [len(looks[-1].leftovers)] == [0] or all(r.kind == "deleted" for r in looks[-1].leftovers)


# -- what is no epoch ------------------------------------------------------------------------------------------------


def test_what_was_taken_out_of_sight_is_listed(run: pathlib.Path) -> None:
    """Rolled back, damaged and replaced, deleted into a folder; staging of stock Orbax; somebody else's folder."""
    options = ocp.CheckpointManagerOptions(todelete_subdir="trash")
    cut(run / "4" / "a" / "default.safetensors")
    with ec.CheckpointManager(run, node=["a", "b"], options=options) as manager:
        manager.save(4, args=Save({"w": np.zeros(3)}))
        manager.wait_until_finished()
        manager.delete(1)
        manager.rollback_to(3)
    (run / "17" / "deep").mkdir(parents=True)
    (run / "17" / "deep" / "precious").write_text("mine")
    (run / "5.orbax-checkpoint-tmp-123" / "default").mkdir(parents=True)
    (run / "tensorboard").mkdir()
    found = scan.look(run, options=options)
    assert [row.epoch for row in found.epochs] == [2, 3]
    kinds = {row.kind: row for row in found.leftovers if row.path != "trash"}
    assert kinds.keys() == {"rolled back", "quarantined", "foreign", "orbax attempt"}
    assert (kinds["rolled back"].epochs, kinds["quarantined"].epochs) == ((4,), (4,))
    assert (kinds["foreign"].path, kinds["foreign"].nbytes) == ("17", 4)
    assert kinds["orbax attempt"].epochs == (5,)
    (trash,) = [row for row in found.leftovers if row.path == "trash"]
    assert (trash.kind, trash.epochs) == ("quarantined", (1,))
    for row in found.leftovers:
        assert row.detail
        assert row.age_secs is not None
        inside = [path for path in (run / row.path).rglob("*") if path.is_file() and not path.is_symlink()]
        assert row.nbytes == sum(path.stat().st_size for path in inside if not _behind_a_link(path, run))


def _behind_a_link(path: pathlib.Path, above: pathlib.Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(above))


def test_a_rollback_under_way_hides_its_epochs(run: pathlib.Path) -> None:
    """As it does from every reader; an unusable record of one is said, and hides nothing of the rest."""
    (run / "rollback.json").write_bytes(Rollback(2, (3, 4), "ab").to_bytes())
    found = scan.look(run)
    assert [row.epoch for row in found.epochs] == [1, 2]
    assert "setting aside 3, 4" in found.problems["rollback.json"]
    (run / "rollback.json").write_bytes(b"{}")
    found = scan.look(run)
    assert [row.epoch for row in found.epochs] == [1, 2, 3, 4]
    assert "rollback.json" in found.problems["rollback.json"]


# -- stock Orbax, single nodes, object stores ------------------------------------------------------------------------


@pytest.mark.slow
def test_folders_that_lie_very_deep_are_looked_at(tmp_path: pathlib.Path) -> None:
    """In a step of stock Orbax, and in an attempt; removing such a thing ends with an OSError."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=Save({"w": np.zeros(3)}))
    save_id = tmp_path / f"incarnation-{'ab' * 8}.orbax-checkpoint-tmp" / "3-1"
    save_id.mkdir(parents=True)
    for place in (tmp_path / "1" / "default", save_id):
        here = os.open(place, os.O_RDONLY)
        for _ in range(1200):
            os.mkdir("a", dir_fd=here)
            below = os.open("a", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
    found = scan.look(tmp_path)
    assert [(row.epoch, row.state) for row in found.epochs] == [(1, "committed"), (3, "in progress")]
    with pytest.raises(OSError, match=r"too deep|Too many open files"):
        open_store(tmp_path).remove_tree(save_id.relative_to(tmp_path).as_posix())
    subprocess.run(["rm", "-rf", str(tmp_path / "1"), str(save_id)], check=True)  # pytest could not


def test_steps_of_stock_orbax_are_rows(tmp_path: pathlib.Path) -> None:
    """With their metrics, sizes and times; one that lost a file is damaged; a save that died is no epoch."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["acc"])
    with ocp.CheckpointManager(tmp_path / "run", options=options) as stock:
        for step in (3, 5):
            stock.save(step, args=Save({"x": np.arange(4.0)}), metrics={"acc": step / 10})
        stock.wait_until_finished()
    found = scan.look(tmp_path / "run", metric="acc")
    assert [(r.epoch, r.state, r.writer, r.nodes, r.checked) for r in found.epochs] == [
        (3, "committed", "orbax", (), True),
        (5, "committed", "orbax", (), True),
    ]
    row = found.epochs[1]
    assert (row.latest, row.best, row.metrics, row.blocked_secs) == (True, True, {"acc": 0.5}, None)
    assert row.nbytes == sum(p.stat().st_size for p in (tmp_path / "run" / "5").rglob("*") if p.is_file())
    assert row.secs is not None
    assert row.secs > 0
    os.unlink(tmp_path / "run" / "5" / "default" / "_METADATA")
    row = scan.look(tmp_path / "run").epochs[1]
    assert row.state == "damaged"
    assert "_METADATA" in row.detail


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory in which two jobs save, each for its own node."""
    directory = tmp_path / "shared"
    directory.mkdir()
    for node, epochs in {"n1": (1, 2), "n2": (2,)}.items():
        own = NodeEpochs(directory, node)
        for epoch in epochs:
            own.save(
                epoch, ocp.args.Composite(b=Save({"x": np.arange(epoch)})), {"blobs": {"b": "b"}, "notes": {"t": 1}}
            )
    return directory


def test_epochs_of_single_nodes_are_one_row(shared: pathlib.Path) -> None:
    """One row per epoch, with the nodes that have it; damage of one node's part is that node's."""
    found = by_epoch(scan.look(shared))
    assert {e: [n.name for n in row.nodes] for e, row in found.items()} == {1: ["n1"], 2: ["n1", "n2"]}
    assert found[2].nbytes == sum(n.nbytes for n in found[2].nodes)
    assert (found[2].latest, found[2].notes, found[2].checked) == (True, {"t": 1}, True)
    assert found[2].custom_metadata == {}  # what its manager keeps there is nobody's
    cut(shared / "2" / "n2" / "b.safetensors")
    found = by_epoch(scan.look(shared))
    assert [(n.name, n.state) for n in found[2].nodes] == [("n1", "committed"), ("n2", "damaged")]
    assert (found[2].state, found[1].state) == ("damaged", "committed")
    (shared / "2" / "n1" / "epoch.json").write_bytes(b"{}")
    found = by_epoch(scan.look(shared))
    assert [n.state for n in found[2].nodes] == ["damaged", "damaged"]


def test_an_attempt_of_a_single_node_is_seen(shared: pathlib.Path, faults: Faults) -> None:
    """In the staging folder that carries the node's name; a record that is not listed is not asked for."""
    read: list[str] = []
    for method in (Store.read, Store.open_reader, Store.exists):
        faults.before(method, lambda call: read.append(call.path))
    staging = shared / f"node-n2-{'cd' * 8}.orbax-checkpoint-tmp" / "3-1"
    staging.mkdir(parents=True)
    (staging / "b.safetensors").write_bytes(bytes(50))
    (row,) = [r for r in scan.look(shared).epochs if r.epoch == 3]
    assert (row.state, [(n.name, n.nbytes, n.state) for n in row.nodes]) == ("in progress", [("n2", 50, "writing")])
    assert read
    assert [path for path in read if path.endswith("node.json")] == []


def test_an_object_store_is_looked_at(faults: Faults) -> None:
    """Epochs as elsewhere; attempts of the newest run may be under way, those of earlier runs are left over."""
    directory = f"memory://{uuid.uuid4().hex}/"
    fill(directory, range(1, 5))
    found = scan.look(directory, metric="loss", limit=2)
    assert [(r.epoch, r.state, r.checked) for r in found.epochs] == [
        (1, "committed", True),
        (3, "committed", True),
        (4, "committed", True),
    ]
    assert (found.hidden, found.epochs[0].best, found.epochs[2].latest) == (1, True, True)
    manager = ec.CheckpointManager(directory, node=["a", "b"])
    away = OSError(errno.EIO, "the store is away")

    def go_away(call: StoreCall) -> None:
        """Nothing can be written, so that the attempt cannot be given up, either."""
        faults.fail(Store.replace, away)
        raise away

    faults.before(Store.create, go_away, where=lambda call: is_record(call.path))
    manager.save(9, args=Save({"w": np.zeros(3)}))
    with pytest.raises(SaveError):
        manager.wait_until_finished()
    faults.clear()
    manager.close()
    (row,) = [r for r in scan.look(directory).epochs if r.epoch == 9]
    assert row.state == "in progress"
    assert [(n.name, n.state) for n in row.nodes] == [("a", "written"), ("b", "written")]
    faults.fail(Store.remove_all, away)
    with ec.CheckpointManager(directory) as newer:
        newer.claim()
    (row,) = [r for r in scan.look(directory).epochs if r.epoch == 9]
    assert row.state == "abandoned"


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere/run", "does not exist"),
        ("rum", "near it: run"),
        ("run/1/a", "one node of an epoch; pass the directory above the epoch, {tmp}/run"),
        ("run/1/epoch.json", "a record of an epoch"),
        ("run/1/a/default.safetensors", "is a file; expected a directory of epochs"),
        ("run/1/default", "one item of a step of stock Orbax"),
        ("", "pass one of them (run/, stock/)"),
        ("numbers", "pass one of them (0/, 1/)"),
        ("empty", "is empty"),
        ("git", "holds no epochs but .git/, README"),
        ("other", "holds no epochs but notes.txt"),
        ("link", "is a broken link"),
    ],
)
def test_what_is_no_checkpoint_directory_is_told_apart(odd_places: pathlib.Path, path: str, says: str) -> None:
    """The error says what it is instead, and what to pass."""
    with pytest.raises(NotACheckpointDirectoryError) as caught:
        scan.look(odd_places / path)
    assert says.format(tmp=odd_places) in str(caught.value)


@pytest.mark.parametrize("name", ["rolled-back-x", "damaged-keep"])
def test_epochs_that_were_set_aside_by_hand_make_a_checkpoint_directory(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name / "3").mkdir(parents=True)
    assert scan.look(tmp_path).epochs == ()


@pytest.fixture(scope="module")
def odd_places(saved: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    above = tmp_path_factory.mktemp("places")
    shutil.copytree(saved, above / "run", symlinks=True)
    for seed in "01":
        shutil.copytree(saved, above / "numbers" / seed, symlinks=True)
    with ocp.CheckpointManager(above / "stock") as stock:
        stock.save(3, args=Save({"x": np.arange(4.0)}))
        stock.wait_until_finished()
    (above / "empty").mkdir()
    (above / "git" / ".git").mkdir(parents=True)
    (above / "git" / "README").write_text("")
    (above / "other").mkdir()
    (above / "other" / "notes.txt").write_text("")
    (above / "link").symlink_to("gone")
    return above


AS_NOBODY = """
import os, sys
import epochckpt
from epochckpt import errors
from epochckpt.inspection import scan
from jax._src import xla_bridge
os.setgroups([]); os.setgid(65534); os.setuid(65534)
run, closed = sys.argv[1:]
for row in scan.look(run, limit=None).epochs:
    print(f"{row.epoch}|{row.state}|{row.detail}")
for place in (closed, f"{closed}/1"):
    try:
        scan.look(place)
    except errors.AccessError as error:
        print(f"AccessError|{error}")
print("backends", xla_bridge.backends_are_initialized())
"""


def test_epochs_of_other_names_are_recognised(tmp_path: pathlib.Path) -> None:
    """A prefix, or digits, that this look was not told of: said with what to do."""
    for name, options in (("prefix", {"step_prefix": "run"}), ("digits", {"step_format_fixed_length": 8})):
        with ec.CheckpointManager(tmp_path / name, options=ocp.CheckpointManagerOptions(**options)) as manager:
            manager.save(1, args=Save({"x": np.ones(2)}))
        for path in (tmp_path / name).glob("incarnation-*"):
            path.rmdir()
        with pytest.raises(NotACheckpointDirectoryError, match=rf"named otherwise .*1/.*{next(iter(options))}="):
            scan.look(tmp_path / name)
        shown = scan.look(tmp_path / name, options=ocp.CheckpointManagerOptions(**options))
        assert [row.epoch for row in shown.epochs] == [1]


@pytest.mark.slow
def test_without_permission_and_without_a_backend(saved: pathlib.Path, public_folder: pathlib.Path) -> None:
    """As another user: one closed epoch is shown as such among good ones, a closed directory is an AccessError; and
    in all of this no jax backend was started."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    run = pathlib.Path(shutil.copytree(saved, public_folder / "run", symlinks=True))
    closed = pathlib.Path(shutil.copytree(saved, public_folder / "closed", symlinks=True))
    run.chmod(0o755)
    closed.chmod(0o700)
    (run / "2").chmod(0o700)
    (run / "3" / "epoch.json").chmod(0o600)
    env = {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", AS_NOBODY, str(run), str(closed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split("|")[:2] for line in lines[:4]] == [
        ["1", "committed"],
        ["2", "damaged"],
        ["3", "damaged"],
        ["4", "committed"],
    ]
    assert all("ermission denied" in line for line in lines[1:3])
    assert lines[4].startswith(f"AccessError|{closed}:")
    assert lines[5].startswith(f"AccessError|{closed}/1:")
    assert lines[6] == "backends False"


class Flattened:
    """A part of a state that notes when it is flattened, which a save does before anything else with it."""

    times_ns: typing.ClassVar[list[int]] = []

    def flatten(self) -> tuple[tuple[tuple[Any, Any]], None]:
        self.times_ns.append(time.time_ns())
        return ((jax.tree_util.GetAttrKey("w"), np.zeros(3)),), None


jax.tree_util.register_pytree_with_keys(Flattened, Flattened.flatten, lambda _, children: Flattened())


def test_a_save_begins_when_it_is_called(tmp_path: pathlib.Path) -> None:
    """Its duration has the time in it that it held the training thread."""
    Flattened.times_ns.clear()
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"state": Flattened()}))
    (row,) = scan.look(tmp_path).epochs
    assert row.started_ns is not None
    assert row.started_ns <= Flattened.times_ns[0]


def test_a_directory_that_has_vanished_is_not_an_empty_one(tmp_path: pathlib.Path) -> None:
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
    opened = opening.open_directory(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        scan.look(tmp_path / "run", known=opened)
