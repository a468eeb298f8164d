"""Details of Caffe2's managers and handlers: as in Caffe2, or as docs/caffe2.md says that they differ."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest

import epochckpt as ec
from epochckpt import caffe2
from epochckpt.errors import InvalidArgumentError
from tests.support.caffe2_jobs import Recorded


def job_of(epochs: int) -> ec.Job:
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(epochs)])
    ec.Task(lambda ws: ws.update(total=0), group=job.init_group, node="a")
    ec.Task(lambda ws: ws.update(total=ws["total"] + ws.epoch), group=job.epoch_group, node="a")
    return job


@pytest.fixture(params=["one node", "many nodes"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def manager_of(kind: str, directory: pathlib.Path, handler: Any = None) -> Any:
    directory.mkdir(exist_ok=True)
    if kind == "one node":
        return caffe2.CheckpointManager(directory, "a", "epochckpt", handler)
    if kind == "many nodes":
        return caffe2.MultiNodeCheckpointManager(directory, "epochckpt", handler)
    return ec.CheckpointManager(directory, metadata_handler=handler)


def test_a_runner_tells_the_handler_the_path_prefix_that_was_set(tmp_path: pathlib.Path, kind: str) -> None:
    """As in Caffe2, where `set_params` of a runner names the nodes alone; no file moves for it."""
    handler = Recorded()
    manager = manager_of(kind, tmp_path / "run", handler)
    manager.set_params(["a"], path_prefix=pathlib.Path("/mnt"), path_type="epochckpt")
    ec.JobRunner(job_of(1), manager).train(ec.LocalSession())
    manager.set_params(["a"], path_prefix="/other")
    told = [call for call in handler.calls if call.startswith("set_params")]
    assert told == [f"set_params run epochckpt ['a'] {prefix} epochckpt" for prefix in ("/mnt", "/mnt", "/other")]
    assert (tmp_path / "run" / "1" / "a").is_dir()


@pytest.mark.parametrize("where", ["manager", "runner"])
def test_a_handler_hears_of_the_epoch_that_the_user_has_named(
    tmp_path: pathlib.Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `ec.CheckpointManager` its answer does not count; the seconds of the load are those of that epoch."""

    class Stubborn(Recorded):
        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            super().last_epoch(user_epoch)
            return 2

    def train(handler: Any) -> int | None:
        with manager_of("ours", tmp_path / "run", handler if where == "manager" else None) as manager:
            runner = ec.JobRunner(job_of(3), manager, 1, metadata_handler=handler)
            runner.train(ec.LocalSession())
            return runner.result.resumed_from

    with manager_of("ours", tmp_path / "run") as manager:
        ec.JobRunner(job_of(3), manager).train(ec.LocalSession())
    with caplog.at_level(logging.WARNING):
        assert train(handler := Stubborn()) == 1
    assert [call for call in handler.calls if call.startswith("last_epoch")] == ["last_epoch 1"]
    assert "the metadata handler answers 2; the run goes back to 1 all the same, which was named" in caplog.text


def test_the_seconds_of_a_load_are_those_of_the_named_epoch(tmp_path: pathlib.Path) -> None:
    """The protocol does not say which epoch a report is about: it is the one of the last call that named one."""
    handler = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.db", "run")
    for named, epochs in ((None, 3), (1, 4)):
        with manager_of("ours", tmp_path / "run", handler) as manager:
            ec.JobRunner(job_of(epochs), manager, named).train(ec.LocalSession())
    assert {row.epoch for row in handler.stats() if row.action == "checkpoint_load"} == {1}


class Raising(Recorded):
    """A handler of which one method raises."""

    def __init__(self, method: str):
        super().__init__()
        setattr(self, method, self._raise)

    def _raise(self, *args: Any, **named: Any) -> Any:
        raise ZeroDivisionError(f"of a handler: {args or named}")


@pytest.mark.parametrize("method", ["set_params", "last_epoch"])
def test_a_handler_that_raises_before_a_run_ends_it(tmp_path: pathlib.Path, kind: str, method: str) -> None:
    """As in Caffe2: a run from scratch would replace the epochs of which the handler knows."""
    with pytest.raises(ZeroDivisionError):
        ec.JobRunner(job_of(1), manager_of(kind, tmp_path / "run", Raising(method))).train(ec.LocalSession())
    assert list((tmp_path / "run").iterdir()) == []
    with manager_of("ours", tmp_path / "ours", Raising(method)) as ours:  # it knows its epochs without the handler
        assert ec.JobRunner(job_of(1), ours).train(ec.LocalSession()) == 1


@pytest.mark.parametrize("method", ["write", "report"])
def test_a_handler_that_raises_in_a_run_is_logged(
    tmp_path: pathlib.Path, kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Caffe2; here the report of a load is one of these."""
    manager = manager_of(kind, tmp_path / "run", Raising(method))
    runner = ec.JobRunner(job_of(2), manager)
    for named in (None, 1):
        caplog.clear()
        runner.resume_from_epoch = named
        with caplog.at_level(logging.WARNING):
            assert runner.train(ec.LocalSession()) == 2
            assert runner.result.failed_saves == ()
        assert "of a handler" in caplog.text
    assert runner.load_blobs_from_checkpoints(["total"], 1, ec.LocalSession())


@pytest.mark.parametrize("method", ["write", "report"])
def test_a_handler_that_raises_is_raised_by_a_verb_of_the_manager(
    tmp_path: pathlib.Path, kind: str, method: str
) -> None:
    """As in Caffe2, where only a runner goes on."""
    manager = manager_of(kind, tmp_path / "run", Raising(method))
    manager.set_params(["a"])
    call = {"write": lambda: manager.write_checkpoint_metadata(1)}.get(
        method, lambda: manager.report_checkpoint_stats("checkpoint_save")
    )
    with pytest.raises(ZeroDivisionError):
        call()


def test_the_names_of_the_blobs_are_no_blob(tmp_path: pathlib.Path) -> None:
    """Caffe2's files begin with one, `blob_names`; here that is a name like any other."""
    manager, session = manager_of("one node", tmp_path / "run"), ec.LocalSession()
    session.run(ec.Task(lambda ws: ws.update(blob_names=["x"], total=1)))
    session.run(manager.init())
    session.run(manager.save(0))
    assert manager.blob_list() == ["blob_names", "total"]
    again, fresh = manager_of("one node", tmp_path / "run"), ec.LocalSession()
    fresh.run(again.init(retrieve_from_epoch=0))
    fresh.run(again.load(0))
    assert dict(fresh.workspace()) == {"blob_names": ["x"], "total": 1}


def test_the_name_of_a_node_that_a_manager_does_not_have_is_refused(tmp_path: pathlib.Path) -> None:
    """Caffe2 gives None, which a path is made of later."""
    manager = manager_of("many nodes", tmp_path / "run")
    with pytest.raises(InvalidArgumentError, match=r"knows no nodes yet; first: set_params\(nodes\), or init\(nodes\)"):
        manager.get_ckpt_db_name("a", 1)
    manager.init(["a"])
    assert manager.get_ckpt_db_name("a", 1) == str(tmp_path / "run" / "1" / "a")
    with pytest.raises(InvalidArgumentError, match="has no node 'trainer_0'; it has: a"):
        manager.get_ckpt_db_name("trainer_0", 1)


def test_an_upload_builder_finds_each_nodes_files(tmp_path: pathlib.Path) -> None:
    """By public names, in place of Caffe2's private ones."""

    class Listing(ec.UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> ec.TaskGroup:
            self.found = [
                (node, caffe2.db_name(epoch, one.node_name, one.db_prefix))
                for node, one in checkpoint_manager.node_managers
            ]
            return ec.TaskGroup("upload")

    builder = Listing()
    manager = manager_of("many nodes", tmp_path / "run")
    ec.JobRunner(job_of(2), manager, upload_task_group_builder=builder).train(ec.LocalSession())
    assert builder.found == [("a", manager.get_ckpt_db_name("a", 2))]
    assert pathlib.Path(builder.found[0][1], "epoch.json").is_file()


def test_init_determines_the_blobs_anew(tmp_path: pathlib.Path) -> None:
    """Caffe2 makes no tasks for nodes that the manager has already."""
    manager, session = manager_of("many nodes", tmp_path / "run"), ec.LocalSession()
    for name in ("first", "second"):
        session.run(ec.Task(lambda ws, name=name: ws.update({name: 1}), node="a"))
        session.run(manager.init(["a"]))
    assert manager.node_managers[0][1].blob_list() == ["first", "second"]


def test_the_log_names_what_is_saved_loaded_and_looked_for(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In words of its own: programs read `runner.result`, or have a metadata handler."""
    with caplog.at_level(logging.INFO, logger="absl"):
        for named in (None, 1):
            runner = ec.JobRunner(job_of(2), manager_of("many nodes", tmp_path / "run"), named)
            runner.train(ec.LocalSession())
        assert not runner.load_blobs_from_checkpoints(["total"], 9, ec.LocalSession())
    run = tmp_path / "run"
    for said in (
        f"{run}: checkpoint 2 of node a committed",
        "resumed from epoch 1",
        "checkpoint_save: 1 nodes, slowest",
        "checkpoint_load: 1 nodes, slowest",
        f"{run}: checkpoint 9 is not there for a",
    ):
        assert said in caplog.text
