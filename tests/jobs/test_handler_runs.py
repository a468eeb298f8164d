"""Metadata handlers in a run: each hears each event once, in the form in which Caffe2 tells it."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec

NODES = ["a", "b"]


class FromCaffe2:
    """Written against Caffe2's protocol: keywords where Caffe2 has keywords, names of its own where it has none."""

    def __init__(self, accessible: Any = lambda epoch: True):
        self.calls: list[Any] = []
        self._accessible = accessible

    def set_params(self, *, db_prefix: str, db_type: str, node_names: Any, path_prefix: Any, path_type: Any) -> None:
        self.calls.append(("set_params", pathlib.Path(db_prefix).name, db_type, node_names, path_prefix, path_type))

    def last_epoch(self, *, user_epoch: int | None) -> int | None:
        self.calls.append(("last_epoch", user_epoch))
        return user_epoch

    def write(self, *, epoch: int) -> None:
        self.calls.append(("write", epoch))

    def report(self, name: str, stats: Any, /) -> None:
        self.calls.append(("report", name, sorted(pathlib.Path(node).name for node in stats)))

    def cp_accessible(self, number: int | None, /) -> Any:
        self.calls.append(("cp_accessible",))
        return self._accessible(number)


def job_of(nodes: list[str], epochs: int = 2) -> ec.Job:
    with ec.Job() as job:
        for node in nodes:
            ec.Task(lambda ws: ws.update(total=0), group=job.init_group, node=node)
            ec.Task(lambda ws: ws.update(total=ws["total"] + 1), node=node)
    ec.epoch_limiter(job, epochs)
    return job


@contextlib.contextmanager
def manager_of(kind: str, directory: pathlib.Path, handler: Any = None) -> Iterator[Any]:
    directory.mkdir(exist_ok=True)
    if kind == "many nodes":
        yield ec.caffe2.MultiNodeCheckpointManager(directory, "epochckpt", handler)
    elif kind == "one node":
        yield ec.caffe2.CheckpointManager(directory, "a", "epochckpt", handler)
    elif kind == "stock Orbax":
        with ocp.CheckpointManager(directory) as manager:
            yield manager
    else:
        with ec.CheckpointManager(directory, metadata_handler=handler) as manager:
            yield manager


CASES = [(kind, where) for kind in ("ours", "many nodes", "one node") for where in ("manager", "runner", "both")]


@pytest.mark.parametrize(("kind", "where"), [*CASES, ("stock Orbax", "runner")])
def test_each_event_is_told_once(tmp_path: pathlib.Path, kind: str, where: str) -> None:
    """Whoever was given the handler; it hears of the nodes first, and only of the job's."""
    nodes = NODES if kind in ("ours", "many nodes") else ["a"]
    begin: Any = ("set_params", "run", "epochckpt", nodes, None, None)
    saves: list[Any] = [[("cp_accessible",), ("write", epoch), ("report", "checkpoint_save")] for epoch in (0, 1, 2)]
    load = ("report", "checkpoint_load")
    expected = {
        None: [begin, ("last_epoch", None), *saves[0], *saves[1], *saves[2]],
        1: [begin, ("last_epoch", 1), load, *saves[2]],
    }
    for user_epoch in (None,) if kind == "stock Orbax" else (None, 1):  # that cannot go back
        handler = FromCaffe2()
        with manager_of(kind, tmp_path / "run", handler if where != "runner" else None) as manager:
            more = {"metadata_handler": handler} if where != "manager" else {}
            runner = ec.JobRunner(job_of(nodes), manager, user_epoch, **more)
            runner.train(ec.LocalSession())
            assert runner.load_blobs_from_checkpoints(["total"], 1, ec.LocalSession())
        calls, last = handler.calls[:-1], handler.calls[-1]
        assert last[:2] == ("report", "checkpoint_partial_load")
        assert calls[0] == begin
        if kind != "stock Orbax":  # that knows no nodes
            assert {tuple(c[2]) for c in calls if c[:2] == ("report", "checkpoint_save")} == {tuple(nodes)}
        assert sorted(map(repr, map(brief, calls))) == sorted(map(repr, map(brief, expected[user_epoch])))


@pytest.mark.parametrize(("kind", "where"), [*CASES, ("stock Orbax", "runner")])
def test_a_load_without_a_run_introduces_the_handler(tmp_path: pathlib.Path, kind: str, where: str) -> None:
    """It hears of directory and nodes before the seconds, once."""
    nodes = NODES if kind in ("ours", "many nodes") else ["a"]
    with manager_of(kind, tmp_path / "run") as manager:
        ec.JobRunner(job_of(nodes), manager).train(ec.LocalSession())
    handler = FromCaffe2()
    with manager_of(kind, tmp_path / "run", handler if where != "runner" else None) as manager:
        more = {"metadata_handler": handler} if where != "manager" else {}
        runner = ec.JobRunner(job_of(nodes), manager, **more)
        for epoch in (1, 2):
            assert runner.load_blobs_from_checkpoints(["total"], epoch, ec.LocalSession())
    begin, action = ("set_params", "run", "epochckpt", nodes, None, None), ("report", "checkpoint_partial_load")
    assert [brief(call) for call in handler.calls] == [begin, action, action]


@pytest.mark.parametrize("where", ["manager", "runner"])
def test_a_load_for_nodes_that_a_manager_does_not_have_is_refused(tmp_path: pathlib.Path, where: str) -> None:
    """The handler hears nothing of them; some of the manager's nodes may load, and it hears of all that there are."""
    handler = FromCaffe2()
    more: Any = {"metadata_handler": handler} if where == "runner" else {}
    with manager_of("many nodes", tmp_path, None if more else handler) as manager:
        ec.JobRunner(job_of(NODES), manager).train(ec.LocalSession())
        for nodes in (["c"], ["a", "c"]):
            with pytest.raises(ec.errors.InvalidArgumentError, match=f"has the nodes a, b, .* {', '.join(nodes)};"):
                ec.JobRunner(job_of(nodes), manager, **more).load_blobs_from_checkpoints(
                    ["total"], 1, ec.LocalSession()
                )
        one = ec.JobRunner(job_of(["b"]), manager, **more)
        assert one.load_blobs_from_checkpoints(["total"], 1, session := ec.LocalSession())
        assert session.workspace("b")["total"] == 1
    assert [call[3] for call in handler.calls if call[0] == "set_params"] == [NODES]


@pytest.mark.parametrize("where", ["manager", "runner"])
def test_a_handler_finds_a_directory_in_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its file lies beside the epochs there, and nothing in the working directory."""
    monkeypatch.chdir(tmp_path)
    url, handler = f"memory://{uuid.uuid4().hex}/run/", ec.metadata.JsonMetadataHandler()
    with ec.CheckpointManager(url, metadata_handler=handler if where == "manager" else None) as manager:
        more = {"metadata_handler": handler} if where == "runner" else {}
        ec.JobRunner(job_of(["a"]), manager, **more).train(ec.LocalSession())
    assert ec.metadata.JsonMetadataHandler(f"{url}last_epoch-a.json").last_epoch() == 2
    assert not os.listdir(tmp_path)


def brief(call: Any) -> Any:
    return call[:2] if call[0] == "report" else call


@pytest.mark.parametrize("kind", ["ours", "many nodes"])
@pytest.mark.parametrize("where", ["manager", "runner"])
def test_an_error_of_cp_accessible_is_no_yes(tmp_path: pathlib.Path, kind: str, where: str) -> None:
    """Nothing is saved, and the result says so; that the handler's own storage is away says nothing about ours."""

    def broken(number: Any) -> bool:
        raise TypeError("a bug of the handler's own")

    def away(number: Any) -> bool:
        raise ConnectionError("the database is down")

    answers: Any = ((broken, None), (lambda number: None, None), (away, 2), (lambda number: 1, 2))
    for case, (accessible, committed) in enumerate(answers):
        handler = FromCaffe2(accessible)
        given = {"metadata_handler": handler} if where == "runner" else {}
        with manager_of(kind, tmp_path / str(case), None if given else handler) as manager:
            runner = ec.JobRunner(job_of(NODES), manager, raise_if_not_saved=False, **given)
            assert runner.train(ec.LocalSession()) == 2
        assert runner.result.last_committed_epoch == committed
        assert [epoch for epoch, _ in runner.result.failed_saves] == ([0, 1, 2] if committed is None else [])


@pytest.mark.parametrize("make", [lambda path: ec.metadata.JsonMetadataHandler(), ec.metadata.SqliteMetadataHandler])
def test_jobs_that_share_directory_and_database_go_on_from_epochs_of_their_own(
    tmp_path: pathlib.Path, make: Any
) -> None:
    """The second can start, whatever the first has saved; each goes on from its last epoch."""
    done: dict[str, int | None] = {"a": None, "b": None}
    for node, epochs in (("a", 3), ("b", 1), ("a", 4), ("b", 2)):
        with manager_of("many nodes", tmp_path / "run", make(tmp_path / "runs.sqlite")) as manager:
            runner = ec.JobRunner(job_of([node], epochs), manager)
            assert runner.train(session := ec.LocalSession()) == epochs
        assert runner.result.resumed_from == done[node]
        assert session.workspace()["total"] == epochs
        done[node] = epochs


def test_a_look_at_a_directory_tells_a_handler_nothing(tmp_path: pathlib.Path) -> None:
    """A run begins with its first commit, or when a runner says so."""
    handler = FromCaffe2()
    with ec.CheckpointManager(tmp_path, metadata_handler=handler) as manager:
        assert manager.all_steps() == []
    assert handler.calls == []


@pytest.mark.parametrize("base", [ec.caffe2.CheckpointManager, ec.caffe2.MultiNodeCheckpointManager])
@pytest.mark.parametrize("where", [None, "manager", "runner"])
def test_a_manager_of_caffe2_is_asked_whether_storage_is_there(tmp_path: pathlib.Path, base: Any, where: Any) -> None:
    """Once per epoch, whoever has a handler, or nobody; its no counts."""
    asked: list[bool] = []

    class Own(base):
        def cp_accessible(self, epoch: int | None = None) -> bool:
            asked.append(len(asked) != 1)  # no for epoch 1
            return asked[-1]

    node = ["a"] if base is ec.caffe2.CheckpointManager else []
    handler = {where: FromCaffe2()}
    manager = Own(tmp_path, *node, "epochckpt", handler.get("manager"))
    runner = ec.JobRunner(job_of(["a"], 3), manager, metadata_handler=handler.get("runner"))
    assert runner.train(ec.LocalSession()) == 3
    assert asked == [True, False, True, True]
    assert [epoch for epoch, _ in runner.result.failed_saves] == [1]


class WhenSaid(logging.Handler):
    """Opens a gate when the log has a text."""

    def __init__(self, text: str):
        super().__init__()
        self._text = text
        self.gate = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.gate.set()

    def __enter__(self) -> WhenSaid:
        logging.getLogger("absl").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("absl").removeHandler(self)


@pytest.mark.parametrize("kind", ["ours", "stock Orbax"])
def test_a_run_that_too_many_failures_end_tells_of_the_save_in_flight(tmp_path: pathlib.Path, kind: str) -> None:
    """It is committed after the last epoch has ended: result and handler name it."""
    manager_class: Any = ec.CheckpointManager if kind == "ours" else ocp.CheckpointManager
    handler = FromCaffe2(accessible=lambda epoch: epoch == 0)
    with WhenSaid("the run ends after epoch 1") as said:

        def hold() -> None:
            assert said.gate.wait(60)

        asynchronous = ocp.options.AsyncOptions(timeout_secs=100, post_finalization_callback=hold)
        options = ocp.CheckpointManagerOptions(async_options=asynchronous)
        with manager_class(tmp_path / "run", options=options) as manager:
            how: Any = {"max_consecutive_save_failures": 0, "raise_if_not_saved": False}
            runner = ec.JobRunner(job_of(["a"], 3), manager, metadata_handler=handler, **how)
            runner.train(ec.LocalSession())
    assert (runner.result.epoch, [epoch for epoch, _ in runner.result.failed_saves]) == (1, [1])
    assert runner.result.last_committed_epoch == 0
    assert ("write", 0) in handler.calls
