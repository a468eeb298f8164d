"""Metadata handlers: what they remember, for whom, and what they say when they cannot."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt import metadata
from epochckpt.errors import (
    AccessError,
    CoordinationTimeoutError,
    DamagedError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
)
from epochckpt.manager import HandlerNotifier, metadata_handlers
from epochckpt.manager.run_database import APPLICATION_ID, VERSION
from epochckpt.storage import open_store
from tests.support import processes
from tests.support.taps import eventually

NODES = ["trainer_0", "trainer_1"]
WAIT_SECS = 60.0


def begun(handler: Any, prefix: Any, nodes: Any = NODES) -> Any:
    handler.set_params(prefix, "epochckpt", nodes)
    return handler


def database(tmp_path: pathlib.Path, run: str | None = None, **kwargs: Any) -> metadata.SqliteMetadataHandler:
    return metadata.SqliteMetadataHandler(tmp_path / "runs.db", run, **kwargs)


MAKERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "json": lambda tmp_path: metadata.JsonMetadataHandler(),
    "json elsewhere": lambda tmp_path: metadata.JsonMetadataHandler(tmp_path / "elsewhere.json"),
    "sqlite": database,
    "sqlite, named": lambda tmp_path: database(tmp_path, "run one"),
}


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Callable[[], Any]:
    """Makes handlers, each as a new process would, of one and the same run in `tmp_path / "run"`."""
    (tmp_path / "run").mkdir()
    return lambda: begun(MAKERS[request.param](tmp_path), str(tmp_path / "run"))


# -- what every handler does -------------------------------------------------------------------------------------------


def test_the_last_epoch_survives_the_handler(make: Callable[[], Any]) -> None:
    """None before the first; epoch 0 is a number; the user's epoch comes first."""
    assert make().last_epoch() is None
    for epoch in (0, 1, 2):
        make().write(epoch)
        assert make().last_epoch() == make().last_epoch(user_epoch=None) == epoch
    assert make().last_epoch(0) == make().last_epoch(user_epoch=0) == 0
    assert make().last_epoch(np.int64(7)) == 7


def test_after_a_rollback_the_epoch_written_last_counts(make: Callable[[], Any]) -> None:
    """Not the greatest; an epoch may be written again."""
    handler = make()
    for epoch in (1, 2, 3, 2):
        handler.write(epoch)
        assert make().last_epoch() == epoch


def test_what_is_no_epoch_changes_the_last_epoch_in_no_way(make: Callable[[], Any]) -> None:
    """Times, failures and ends may come before any epoch."""
    for last in (None, 4):
        if last is not None:
            make().write(last)
        make().report("checkpoint_save", {"trainer_0": 1.5, "trainer_1": np.float32(2)})
        make().report("checkpoint_load", {})
        make().save_failed(5, "the disk is full")
        make().run_ended(6, "max_epochs(6)")
        assert make().last_epoch() == last


def test_the_directory_is_looked_at_and_never_made(make: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    """With the epoch or without; its return is noticed."""
    handler = make()
    assert handler.cp_accessible() is handler.cp_accessible(3) is handler.cp_accessible(epoch=None) is True
    (tmp_path / "run").rename(tmp_path / "away")
    assert handler.cp_accessible() is handler.cp_accessible(3) is False
    assert handler.last_epoch(3) == 3
    assert not (tmp_path / "run").exists()
    (tmp_path / "away").rename(tmp_path / "run")
    assert handler.cp_accessible()


def test_all_is_there_by_keyword_as_in_caffe2(make: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    """The names of arguments are Caffe2's."""
    handler = make()
    handler.set_params(
        db_prefix=str(tmp_path / "run"), db_type="x", node_names=NODES, path_prefix=str(tmp_path), path_type="y"
    )
    handler.write(epoch=1)
    handler.report(action_name="checkpoint_save", all_stats={"trainer_0": 1})
    assert handler.last_epoch(user_epoch=None) == 1
    assert handler.cp_accessible(epoch=1)


BAD_CALLS: list[Callable[[Any], Any]] = [
    *(lambda h, v=v: h.write(v) for v in (-1, 1.0, None, "1", True, np.bool_(True), 2**63)),
    *(lambda h, v=v: h.last_epoch(v) for v in (-1, 1.5, "1", False)),
    lambda h: h.save_failed(-1, "x"),
    lambda h: h.run_ended(None, "x"),
    *(lambda h, v=v: h.report("save", v) for v in (None, [1], {"a": "1"}, {"a": None}, {"a": math.nan}, {"a": True})),
    *(lambda h, v=v: h.report("save", v) for v in ({"a": math.inf}, {1: 1.0}, {"a": np.ones(2)})),
    lambda h: h.report(None, {"a": 1.0}),
    *(lambda h, v=v: h.set_params(v, "x", NODES) for v in (None, "", b"x", 3, "a\0b")),
    *(lambda h, v=v: h.set_params("x", "x", v) for v in (None, "trainer_0", 3)),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_bad_arguments_are_refused_and_change_nothing(make: Callable[[], Any], number: int) -> None:
    """Before anything is written."""
    handler = make()
    handler.write(3)
    with pytest.raises(InvalidArgumentError):
        BAD_CALLS[number](handler)
    assert make().last_epoch() == 3


@pytest.mark.parametrize("kind", ["json", "sqlite"])
def test_without_set_params_the_error_says_so(kind: str, tmp_path: pathlib.Path) -> None:
    """There is no directory to look at."""
    for use in (lambda h: h.last_epoch(), lambda h: h.write(1), lambda h: h.cp_accessible()):
        with pytest.raises(InvalidArgumentError, match="call set_params first"):
            use(MAKERS[kind](tmp_path))


def test_threads_share_a_handler(make: Callable[[], Any]) -> None:
    """Calls come from background threads; none is lost, none breaks another."""
    handler, failures = make(), []

    def work(thread: int) -> None:
        try:
            for epoch in range(5):
                handler.write(epoch)
                handler.report(f"action_{thread}", {"trainer_0": 1.0})
        except BaseException as error:  # shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
    assert failures == []
    assert make().last_epoch() in range(5)
    if isinstance(handler, metadata.SqliteMetadataHandler):
        assert len(handler.epochs()) == len(handler.stats()) == 30


@pytest.mark.parametrize("kind", ["json", "sqlite"])
def test_jobs_that_share_a_directory_have_an_epoch_each(kind: str, tmp_path: pathlib.Path) -> None:
    """A job is known by its nodes: it may get more of them or fewer, and be split; two may even become one."""

    def job(*nodes: str) -> Any:
        return begun(MAKERS[kind](tmp_path), tmp_path, list(nodes))

    job("a").write(4)
    assert job("b").last_epoch() is None
    job("b").write(9)
    job("b").report("checkpoint_save", {"b": 1.0})
    assert (job("a").last_epoch(), job("b").last_epoch()) == (4, 9)
    assert job("c", "b").last_epoch() == 9
    job("c", "b").write(10)
    assert job("c").last_epoch() == 10
    assert job("a").last_epoch() == 4
    assert job("d").last_epoch() is None
    job("a", "d").write(11)
    assert job("d").last_epoch() == job("a").last_epoch() == 11


def test_a_job_of_all_nodes_that_only_looks_changes_nothing_for_the_others(tmp_path: pathlib.Path) -> None:
    """It gets the newest epoch that all nodes have; each job goes on from its own, also one that begins later."""

    def job(*nodes: str) -> Any:
        return begun(database(tmp_path), tmp_path, list(nodes))

    job("a").write(9)
    assert job("a", "b").last_epoch() == 9
    assert job("b").last_epoch() is None
    job("b").write(6)
    looking = job("a", "b")
    assert looking.last_epoch() == 6
    looking.report("checkpoint_partial_load", {"a": 1.0})
    assert (job("a").last_epoch(), job("b").last_epoch()) == (9, 6)
    assert [(run.nodes, run.last_epoch) for run in database(tmp_path).runs()] == [(("a",), 9), (("b",), 6)]
    looking.write(12)
    assert (job("a").last_epoch(), job("b").last_epoch()) == (12, 12)


def test_a_file_that_was_given_to_another_job_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Both jobs are named."""
    begun(metadata.JsonMetadataHandler(tmp_path / "x.json"), tmp_path, ["a"]).write(4)
    other = begun(metadata.JsonMetadataHandler(tmp_path / "x.json"), tmp_path, ["b", "c"])
    for use in (other.last_epoch, lambda: other.write(1)):
        with pytest.raises(FormatError, match="is of a job with the nodes a, and here are b, c: give each job a file"):
            use()
    assert begun(metadata.JsonMetadataHandler(tmp_path / "x.json"), tmp_path, ["a"]).last_epoch() == 4


# -- the JSON file -----------------------------------------------------------------------------------------------------


def test_the_file_is_for_people_too(tmp_path: pathlib.Path) -> None:
    """Plain JSON with the last of everything; an epoch takes the end of the run before away."""
    handler = begun(metadata.JsonMetadataHandler(), tmp_path)
    handler.save_failed(1, "no space")
    handler.run_ended(1, "max_epochs(1)")
    assert json.loads((tmp_path / "last_epoch-trainer_0.json").read_text())["ended"]["reason"] == "max_epochs(1)"
    handler.write(2)
    handler.report("checkpoint_save", {"trainer_0": 1, "trainer_1": 2.5})
    handler.report("checkpoint_save", {"trainer_0": 3})
    handler.report("checkpoint_load", {"trainer_1": 4})
    found = json.loads((tmp_path / "last_epoch-trainer_0.json").read_text())
    assert found["failed"].pop("at") <= found.pop("written")
    assert found == {
        "epochckpt": "last_epoch",
        "version": 1,
        "epoch": 2,
        "db_prefix": str(tmp_path),
        "db_type": "epochckpt",
        "path_prefix": None,
        "path_type": None,
        "nodes": NODES,
        "had": NODES,
        "failed": {"epoch": 1, "reason": "no space"},
        "ended": None,
        "stats": {"checkpoint_save": {"trainer_0": 3.0}, "checkpoint_load": {"trainer_1": 4.0}},
    }
    assert os.listdir(tmp_path) == ["last_epoch-trainer_0.json"]


def test_no_reader_takes_the_file_for_an_epoch(tmp_path: pathlib.Path) -> None:
    """Neither we nor stock Orbax, in a directory that has it before the first epoch; nor what a crash leaves behind."""
    begun(metadata.JsonMetadataHandler(), tmp_path).write(7)
    (tmp_path / ".last_epoch-trainer_0.json.0123456789abcdef.tmp").write_text("{")
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []
        manager.save(3, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
        manager.wait_until_finished()
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3]
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.all_steps() == [3]
        stock.save(4, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
    assert begun(metadata.JsonMetadataHandler(), tmp_path).last_epoch() == 7


FOREIGN = {
    "empty": b"",
    "cut": b'{"epochckpt": "last_epoch", "version": 1, "epo',
    "no text": b"\xff\xfe",
    "a list": b"[1]",
    "another's": b'{"epoch": 3}',
    "an epoch of text": b'{"epochckpt": "last_epoch", "version": 1, "epoch": "3"}',
    "a negative epoch": b'{"epochckpt": "last_epoch", "version": 1, "epoch": -3}',
    "true": b'{"epochckpt": "last_epoch", "version": 1, "epoch": true}',
    "nodes": b'{"epochckpt": "last_epoch", "version": 1, "epoch": 1, "had": [1]}',
    "stats": b'{"epochckpt": "last_epoch", "version": 1, "epoch": 1, "stats": [1]}',
    "newer": b'{"epochckpt": "last_epoch", "version": 2, "epoch": 3}',
    "deep": b"[" * 100_000,
    "digits": b'{"epochckpt": "last_epoch", "version": 1, "epoch": ' + b"9" * 10_000 + b"}",
    "large": b" " * (16 * 2**20 + 1),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_others_is_named_and_left_alone(tmp_path: pathlib.Path, case: str) -> None:
    """By whatever is asked of it; the user's epoch needs no file."""
    path = tmp_path / "last_epoch-trainer_0.json"
    path.write_bytes(FOREIGN[case])
    handler = begun(metadata.JsonMetadataHandler(), tmp_path)
    for use in (handler.last_epoch, lambda: handler.write(1), lambda: handler.report("x", {})):
        kind, match = (FormatVersionError, "this epochckpt knows") if case == "newer" else (FormatError, "move it away")
        with pytest.raises(kind, match=match) as caught:
            use()
        assert caught.value.path == str(path)
    assert path.read_bytes() == FOREIGN[case]
    assert handler.last_epoch(5) == 5


def test_a_folder_in_place_of_the_file_is_named(tmp_path: pathlib.Path) -> None:
    """As another file is."""
    (tmp_path / "last_epoch-trainer_0.json").mkdir()
    with pytest.raises(FormatError, match=r"last_epoch-trainer_0\.json: is not what JsonMetadataHandler writes"):
        begun(metadata.JsonMetadataHandler(), tmp_path).write(1)


def test_without_the_directory_writing_fails_and_makes_none(tmp_path: pathlib.Path) -> None:
    """The caller logs it, and trains on."""
    handler = begun(metadata.JsonMetadataHandler(), tmp_path / "gone")
    assert handler.last_epoch() is None
    with pytest.raises(FileNotFoundError, match="gone"):
        handler.write(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_write_that_is_killed_leaves_a_whole_file(tmp_path: pathlib.Path) -> None:
    """The old one or the new one."""
    for round_ in range(3):
        path = tmp_path / f"{round_}.json"
        code = f"from tests.support import metadata_jobs; metadata_jobs.replace_for_ever({str(path)!r})"
        with processes.start_processes(["-c", code], 1) as job:
            job[0].wait_for_output("WRITING", WAIT_SECS)
            job[0].send_signal(signal.SIGKILL)
            assert job[0].wait_for_exit(WAIT_SECS)
        assert metadata.JsonMetadataHandler(path).last_epoch() >= 5  # type: ignore[operator]


def test_a_directory_in_an_object_store(caplog: pytest.LogCaptureFixture) -> None:
    """The store is asked whether it answers, for an empty prefix is no failure there."""
    url = f"memory://{uuid.uuid4().hex}/run"
    handler = begun(metadata.JsonMetadataHandler(), f"{url}/")
    assert handler.cp_accessible()
    assert handler.last_epoch() is None
    handler.write(3)
    handler.write(2)
    assert [entry.name for entry in open_store(url).list("")] == ["last_epoch-trainer_0.json"]
    assert begun(metadata.JsonMetadataHandler(), url, [*NODES[1:], *NODES[:1]]).last_epoch() == 2
    assert metadata.JsonMetadataHandler(f"{url}/last_epoch-trainer_0.json").last_epoch() == 2
    nobody = "gs://bucket/run?endpoint=http://127.0.0.1:1&anonymous=true&retries=0"
    assert begun(metadata.JsonMetadataHandler(), nobody).cp_accessible() is False
    assert "gs://bucket/run cannot be reached: " in caplog.text


def test_a_file_may_be_named_by_its_url(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`file://` is decoded, also for a file in the root; a bucket alone is no file."""
    url = f"file://{tmp_path}/a%20b"
    for handler in (metadata.JsonMetadataHandler(f"{url}.json"), metadata.SqliteMetadataHandler(f"{url}.db")):
        begun(handler, tmp_path).write(3)
    assert sorted(os.listdir(tmp_path)) == ["a b.db", "a b.json"]
    metadata.JsonMetadataHandler("file:///h.json")
    with pytest.raises(InvalidArgumentError, match="names no store"):
        metadata.JsonMetadataHandler("memory://h.json")


def test_relative_paths_are_those_of_the_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may change the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    handlers = [begun(metadata.JsonMetadataHandler(), "run"), begun(metadata.SqliteMetadataHandler("runs.db"), "run")]
    monkeypatch.chdir(tmp_path / "other")
    for handler in handlers:
        handler.write(1)
        assert handler.cp_accessible()
    assert sorted(os.listdir(tmp_path)) == ["other", "run", "runs.db"]
    assert os.listdir("../run") == ["last_epoch-trainer_0.json"]


# -- the SQLite database -----------------------------------------------------------------------------------------------


def test_a_run_goes_on_under_its_name(tmp_path: pathlib.Path) -> None:
    """Started again it is the same row: first start, last sign of life, the nodes that have written last."""
    before = time.time()
    first = begun(database(tmp_path), tmp_path)
    (row,) = first.runs()
    assert (row.name, row.db_prefix, row.db_type, row.nodes) == (
        str(tmp_path),
        str(tmp_path),
        "epochckpt",
        tuple(NODES),
    )
    assert (row.last_epoch, row.end_reason) == (None, None)
    assert before <= row.started_secs <= row.seen_secs <= time.time()
    first.write(4)
    begun(database(tmp_path), tmp_path, ["a", "b", "trainer_1"]).write(5)
    (again,) = database(tmp_path).runs()
    assert (again.nodes, again.last_epoch, again.started_secs) == (("a", "b", "trainer_1"), 5, row.started_secs)
    assert again.seen_secs >= row.seen_secs


def test_runs_do_not_see_each_other(tmp_path: pathlib.Path) -> None:
    """Neither those of other names in one directory, nor those of other directories."""
    handlers = {name: begun(database(tmp_path, name), tmp_path) for name in ("one", "two")}
    handlers["three"] = begun(database(tmp_path, "three"), "elsewhere")
    for number, handler in enumerate(handlers.values()):
        handler.write(number)
        handler.report("checkpoint_save", {"trainer_0": number})
    assert [h.last_epoch() for h in handlers.values()] == [0, 1, 2]
    assert [(r.name, r.last_epoch) for r in database(tmp_path).runs()] == [("one", 0), ("two", 1), ("three", 2)]
    assert [(e.run, e.epoch) for e in database(tmp_path).epochs("two")] == [("two", 1)]
    assert [(s.run, s.secs) for s in database(tmp_path).stats("three")] == [("three", 2.0)]
    assert database(tmp_path).epochs("four") == database(tmp_path).stats("one", 9) == []


def test_history_is_kept_in_order(tmp_path: pathlib.Path) -> None:
    """An epoch written again after a rollback has two rows."""
    handler = begun(database(tmp_path, "r"), tmp_path)
    handler.write(1)
    handler.save_failed(2, "no space")
    handler.write(2)
    handler.write(1)
    handler.run_ended(1, "preempted")
    found = [(e.epoch, e.outcome, e.reason) for e in handler.epochs()]
    written = [(1, "written", None), (2, "failed", "no space"), (2, "written", None), (1, "written", None)]
    assert found == [*written, (1, "ended", "preempted")]
    assert [e.at_secs for e in handler.epochs()] == sorted(e.at_secs for e in handler.epochs())
    assert handler.runs()[0].end_reason == "preempted"
    begun(handler, tmp_path)
    assert handler.runs()[0].end_reason == "preempted"
    handler.write(2)
    assert handler.runs()[0].end_reason is None


def test_times_belong_to_the_epoch_named_last(tmp_path: pathlib.Path) -> None:
    """Named by the handler or to it; a new handler knows the last one written; none before the first."""
    handler = begun(database(tmp_path, "r"), tmp_path)
    steps: list[tuple[Callable[[], Any], int | None]] = [
        (handler.last_epoch, None),
        (lambda: handler.write(1), 1),
        (lambda: handler.cp_accessible(), 1),
        (lambda: handler.save_failed(2, "x"), 2),
        (lambda: handler.cp_accessible(0), 0),
        (lambda: handler.last_epoch(5), 5),
        (lambda: handler.last_epoch(), 1),
        (lambda: handler.run_ended(3, "x"), 3),
    ]
    for number, (step, _) in enumerate(steps):
        step()
        handler.report(f"action {number}", {"trainer_0": 1.0})
    fresh = begun(database(tmp_path, "r"), tmp_path)
    fresh.report("fresh", {"trainer_0": 1.0})
    assert [s.epoch for s in handler.stats()] == [expected for _, expected in steps] + [1]
    assert [s.action for s in handler.stats(epoch=1)] == ["action 1", "action 2", "action 6", "fresh"]


def test_the_slowest_node_is_named(tmp_path: pathlib.Path) -> None:
    """Over all actions and epochs; times come by node, or by the name of its folder as in Caffe2."""
    handler = begun(database(tmp_path, "r"), tmp_path)
    assert handler.slowest() is None
    for epoch in (1, 2):
        handler.write(epoch)
        handler.report("checkpoint_save", {f"/x/{epoch}/trainer_0": 2.0, f"/x/{epoch}/trainer_1": 1.0})
    handler.report("checkpoint_load", {"trainer_1": 2.5, "who/knows": 4.25})
    assert handler.slowest() == handler.slowest("r") == ("trainer_1", 4.5)
    assert handler.slowest("other") is None
    names = [(s.name, s.node) for s in handler.stats()]
    assert names[0] == ("/x/1/trainer_0", "trainer_0")
    assert names[-1] == ("who/knows", "who/knows")


def test_reading_makes_no_database(tmp_path: pathlib.Path) -> None:
    """A path that is mistyped is named."""
    for read in ("runs", "epochs", "stats", "slowest"):
        with pytest.raises(InvalidArgumentError, match=r"runs\.db: there is no such file"):
            getattr(database(tmp_path), read)()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs.db").touch()  # another process is just making it
    assert database(tmp_path).runs() == database(tmp_path).epochs() == database(tmp_path).stats() == []


@pytest.mark.slow
def test_processes_write_at_once(tmp_path: pathlib.Path) -> None:
    """Real ones, from a database that none has made yet: runs of their own, and one that all share; no row is lost."""
    args = {"path": str(tmp_path / "runs.db"), "prefix": str(tmp_path), "count": 10, "runs": ["shared", "run ME"]}
    processes.run_worker("tests.support.metadata_jobs:write_many", args, num_processes=3)
    handler = database(tmp_path)
    assert {r.name for r in handler.runs()} == {"shared", "run 0", "run 1", "run 2"}
    assert [len(handler.epochs(r.name)) for r in handler.runs() if r.name != "shared"] == [10, 10, 10]
    assert sorted(e.epoch for e in handler.epochs("shared")) == sorted([*range(10)] * 3)
    assert len(handler.stats()) == 60
    assert all(s.epoch is not None for s in handler.stats())


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [False, True])
def test_a_process_that_holds_the_database_is_waited_for_and_survived(tmp_path: pathlib.Path, waiting: bool) -> None:
    """With a bound, an error that says so, and nothing written; what a killed writer left half done is undone."""
    handler = begun(database(tmp_path, "r", timeout_secs=0.3), tmp_path)
    handler.write(1)
    code = f"from tests.support import metadata_jobs; metadata_jobs.hold({str(tmp_path / 'runs.db')!r})"
    with processes.start_processes(["-c", code], 1) as job:
        job[0].wait_for_output("LOCKED", WAIT_SECS)
        for use in (lambda: handler.write(2), lambda: handler.report("x", {"a": 1}), handler.last_epoch, handler.runs):
            begin = time.monotonic()
            with pytest.raises(CoordinationTimeoutError, match=r"runs\.db: another process .* more than 0\.3 s"):
                use()
            assert 0.25 < time.monotonic() - begin < 30
        assert isinstance(CoordinationTimeoutError("x"), TimeoutError)
        if not waiting:
            job[0].send_signal(signal.SIGKILL)
            assert job[0].wait_for_exit(WAIT_SECS)
            assert os.path.getsize(tmp_path / "runs.db-journal") > 0
        else:  # one with more patience gets it as soon as it is free
            patient, done = begun_later(tmp_path)
            job[0].send_signal(signal.SIGKILL)
            patient.join(WAIT_SECS)
            assert done == [True]
    assert [e.epoch for e in handler.epochs()][:1] == [1]
    assert handler.runs()[0].nodes == tuple(NODES)
    handler.write(2)
    assert handler.last_epoch() == 2


def begun_later(tmp_path: pathlib.Path) -> tuple[threading.Thread, list[bool]]:
    """A thread that writes an epoch, and waits as long as it takes."""
    done: list[bool] = []

    def work() -> None:
        begun(database(tmp_path, "r", timeout_secs=WAIT_SECS), tmp_path).write(7)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, done


def test_a_file_that_is_no_database_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Named, whatever is asked; a database of another program, too."""
    path = tmp_path / "runs.db"
    path.write_text("these are my notes, " * 100)
    content = path.read_bytes()
    for use in (lambda: begun(database(tmp_path), tmp_path), lambda: database(tmp_path).runs()):
        with pytest.raises(FormatError, match="is not an SQLite database; nothing was changed") as caught:
            use()
        assert caught.value.path == str(path)
    assert path.read_bytes() == content
    path.unlink()
    for statement in ("CREATE TABLE mine(x)", "PRAGMA user_version = 3", "PRAGMA application_id = 5"):
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.close()
        content = path.read_bytes()
        for use in (lambda: begun(database(tmp_path), tmp_path), lambda: database(tmp_path).runs()):
            with pytest.raises(FormatError, match="is a database of another program"):
                use()
        assert path.read_bytes() == content
        path.unlink()


def test_tables_of_a_newer_version_are_refused(tmp_path: pathlib.Path) -> None:
    """Nothing is written to them; the application id and version are in the file."""
    handler = begun(database(tmp_path, "r"), tmp_path)
    connection = sqlite3.connect(tmp_path / "runs.db")
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    for use in (lambda: handler.write(1), handler.last_epoch, handler.runs, lambda: begun(handler, tmp_path)):
        with pytest.raises(FormatVersionError, match="written by a newer epochckpt"):
            use()


def test_damage_and_missing_tables_are_named(tmp_path: pathlib.Path) -> None:
    """With the file, as one of our errors."""
    handler = begun(database(tmp_path, "r"), tmp_path)
    for epoch in range(300):
        handler.save_failed(epoch, "x" * 100)
    path = tmp_path / "runs.db"
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"runs\.db: is damaged"):
        handler.epochs()
    path.unlink()
    begun(handler, tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE epochs")
    connection.close()
    with pytest.raises(FormatError, match=r"runs\.db: cannot be used: no such table"):
        handler.write(1)


def test_a_database_that_vanished_is_not_made_anew_without_its_run(tmp_path: pathlib.Path) -> None:
    """`set_params` begins it again."""
    handler = begun(database(tmp_path, "r"), tmp_path)
    (tmp_path / "runs.db").unlink()
    with pytest.raises(InvalidArgumentError, match="the run is not in it any more; call set_params first"):
        handler.write(1)
    begun(handler, tmp_path).write(1)


def test_a_place_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    """A folder that is missing, or that stands in the file's place."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "no" / "runs.db", tmp_path / "folder"):
        with pytest.raises(AccessError, match="expected a file, or none yet"):
            begun(metadata.SqliteMetadataHandler(path), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_path_of_any_characters(tmp_path: pathlib.Path) -> None:
    """SQLite's URIs give some of them a meaning."""
    path = tmp_path / "a b?mode=ro#c%20'ü.db"
    begun(metadata.SqliteMetadataHandler(path, "a'; DROP TABLE runs; --"), tmp_path).write(1)
    assert path.exists()
    assert metadata.SqliteMetadataHandler(path).runs()[0].name == "a'; DROP TABLE runs; --"


BAD_HANDLERS: list[Callable[[], Any]] = [
    *(lambda v=v: metadata.SqliteMetadataHandler(v) for v in ("", None, 3, ":memory:", "gs://b/x.db", b"x")),
    *(lambda v=v: metadata.SqliteMetadataHandler("x", v) for v in ("", 3, b"x")),
    *(
        lambda v=v: metadata.SqliteMetadataHandler("x", timeout_secs=v)
        for v in (0, -1, math.nan, math.inf, "soon", None, True)
    ),
    *(lambda v=v: metadata.JsonMetadataHandler(v) for v in ("", 3, b"x", "http://h/x.json", "https://h/x.json")),
]


@pytest.mark.parametrize("number", range(len(BAD_HANDLERS)))
def test_bad_parameters_are_refused_at_construction(number: int) -> None:
    """Before a run depends on them."""
    with pytest.raises(InvalidArgumentError, match="MetadataHandler"):
        BAD_HANDLERS[number]()


# -- handlers of the user's own ----------------------------------------------------------------------------------------


class Caffe2Style:
    """Has the five methods, and no more."""

    def set_params(self, db_prefix: str, db_type: str, node_names: Any, path_prefix: Any, path_type: Any) -> None: ...

    def last_epoch(self, user_epoch: int | None = None) -> int | None: ...

    def write(self, epoch: int) -> None: ...

    def report(self, action_name: str, all_stats: Any) -> None: ...

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return True


def test_any_object_with_caffe2s_methods_is_a_handler(tmp_path: pathlib.Path) -> None:
    """Its class does not matter."""
    for handler in (Caffe2Style(), metadata.JsonMetadataHandler(), database(tmp_path)):
        assert metadata_handlers.check_handler(handler) is handler


def test_what_an_object_lacks_is_named() -> None:
    """All of it at once; a class in place of an object is told apart."""

    class Half:
        write = report = 3

        def last_epoch(self, user_epoch: int | None = None) -> None: ...

    with pytest.raises(InvalidArgumentError, match="is a Half without set_params, write, report, cp_accessible;"):
        metadata_handlers.check_handler(Half())
    with pytest.raises(InvalidArgumentError, match="is a NoneType without set_params, last_epoch"):
        metadata_handlers.check_handler(None)
    with pytest.raises(InvalidArgumentError, match="is the class Caffe2Style instead of an object of it"):
        metadata_handlers.check_handler(Caffe2Style)


def test_a_method_that_cannot_be_called_as_in_caffe2_is_named() -> None:
    """At once, with its signature; names of what Caffe2 gives by position do not matter."""

    class Positional(Caffe2Style):
        def report(self, name: str, stats: Any) -> None: ...

        def cp_accessible(self, number: Any = None) -> bool:
            return True

    assert metadata_handlers.check_handler(Positional())

    class Other(Positional):
        def write(self, number: int) -> None: ...

    with pytest.raises(InvalidArgumentError, match=r"Other has write\(number: .*called as write\(epoch=…\)"):
        metadata_handlers.check_handler(Other())

    class Nothing(Caffe2Style):
        def cp_accessible(self) -> bool:  # type: ignore[override]
            return True

    with pytest.raises(InvalidArgumentError, match=r"Nothing has cp_accessible\(\) .*called as cp_accessible\(…\)"):
        metadata_handlers.check_handler(Nothing())


def test_a_handler_needs_only_the_abstract_methods() -> None:
    """Failures and ends go nowhere by default."""

    class Own(Caffe2Style, metadata.AbstractMetadataHandler):
        pass

    assert Own().save_failed(1, "x") is Own().run_ended(1, "x") is None
    assert metadata.AbstractMetadataHandler.__abstractmethods__ == {
        "set_params",
        "last_epoch",
        "write",
        "report",
        "cp_accessible",
    }


@pytest.mark.parametrize("answer", [0, 7, np.int32(7), jnp.array(7), np.array(7)])
def test_an_answered_epoch_is_an_int(answer: Any) -> None:
    """Of whatever kind it came; None stays None."""
    assert type(metadata_handlers.answered_epoch(answer, Caffe2Style())) is int
    assert metadata_handlers.answered_epoch(answer, Caffe2Style()) == answer
    assert metadata_handlers.answered_epoch(None, Caffe2Style()) is None


@pytest.mark.parametrize("answer", [-1, 1.0, "7", True, False, np.bool_(True), np.ones(2, int), [], {}, 2**63])
def test_another_answer_shows_the_handler_and_the_value(answer: Any) -> None:
    """And what is expected."""
    with pytest.raises(InvalidArgumentError) as caught:
        metadata_handlers.answered_epoch(answer, Caffe2Style())
    assert "the metadata handler Caffe2Style answered last_epoch" in str(caught.value)
    assert str(answer)[:80] in str(caught.value)
    assert f"({type(answer).__name__}); expected an integer of at least 0" in str(caught.value)


@pytest.mark.slow
@settings(max_examples=25)
@given(epochs=st.lists(st.integers(0, 5), max_size=8), cuts=st.sets(st.integers(0, 8)))
def test_handlers_agree_whatever_was_written_and_when_the_job_was_restarted(
    tmp_path_factory: pytest.TempPathFactory, epochs: list[int], cuts: set[int]
) -> None:
    """Any order of epochs, a new handler at any point: each remembers the last."""
    tmp_path = tmp_path_factory.mktemp("run")
    handlers: list[Any] = []
    for number, epoch in enumerate(epochs):
        if not handlers or number in cuts:
            handlers = [begun(metadata.JsonMetadataHandler(), tmp_path), begun(database(tmp_path), tmp_path)]
        for handler in handlers:
            handler.write(epoch)
    expected = epochs[-1] if epochs else None
    assert begun(metadata.JsonMetadataHandler(), tmp_path).last_epoch() == expected
    assert begun(database(tmp_path), tmp_path).last_epoch() == expected
    assert [e.epoch for e in database(tmp_path).epochs()] == epochs


class Slow(Caffe2Style):
    """Notes what it is told, and then takes its time."""

    def __init__(self, wait: Callable[[], Any]):
        self.told, self.wait = list[int](), wait

    def write(self, epoch: int) -> None:
        self.told.append(epoch)
        self.wait()


@pytest.mark.slow
def test_a_slow_handler_is_told_everything(patience: Callable[..., None]) -> None:
    """However long all calls take together: only a single call that takes too long is one that hangs."""
    patience(handler_call_secs=3.0)
    handler = Slow(lambda: threading.Event().wait(0.3))
    tells = HandlerNotifier(handler, active=True)
    for epoch in range(12):
        tells.committed(epoch, {})
    assert tells.cp_accessible(12)
    assert handler.told == list(range(12))
    for epoch in range(12, 24):
        tells.committed(epoch, {})
    tells.drain()
    assert handler.told == list(range(24))


@pytest.mark.slow
def test_a_wait_that_ends_early_does_not_give_the_handler_up() -> None:
    """It hears the rest when it has caught up."""
    handler = Slow(lambda: threading.Event().wait(0.2))
    tells = HandlerNotifier(handler, active=True)
    for epoch in range(25):
        tells.committed(epoch, {})
    tells.drain(2.0)
    assert len(handler.told) < 25
    tells.drain()
    assert handler.told == list(range(25))


def test_a_call_that_nobody_waits_for_may_take_long(patience: Callable[..., None]) -> None:
    """Only where something waits is a handler given up, however long the bound: here none at all."""
    patience(handler_call_secs=0.0)
    gate = threading.Event()
    handler = Slow(gate.wait)
    tells = HandlerNotifier(handler, active=True)
    for epoch in range(3):
        tells.committed(epoch, {})
    gate.set()
    assert eventually(lambda: handler.told == [0, 1, 2])


@pytest.mark.parametrize("name", ["loop", "x" * 300])
def test_a_path_that_can_be_no_file_is_said_to_be_none(tmp_path: pathlib.Path, name: str) -> None:
    """It is not damage of a record: there is none."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    handler = metadata.JsonMetadataHandler(tmp_path / name)
    handler.set_params(str(tmp_path), "epochckpt", ["a"])
    with pytest.raises(FormatError, match="move it away"):
        handler.last_epoch()
