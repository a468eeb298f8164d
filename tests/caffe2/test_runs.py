"""Whole runs with the managers of `ec.caffe2`: one node, three in one process, three processes, three separate jobs."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.caffe2.epochs import NodeEpochs
from tests.support import job_runs
from tests.support.caffe2_jobs import Recorded
from tests.support.job_runs import PER_EPOCH, RECORDS
from tests.support.processes import run_worker

NODES = ("trainer_0", "trainer_1", "trainer_2")


def expected(number: int, epochs: int) -> list[int]:
    records = [i % RECORDS + 100 * number for i in range(PER_EPOCH * epochs)]
    return [sum(records[: PER_EPOCH * (e + 1)]) for e in range(epochs)]


def test_names_are_reachable_as_in_caffe2() -> None:
    """`ec.caffe2` has all of them, and they are the same things."""
    for name in ("Job", "JobRunner", "epoch_limiter", "UploadTaskGroupBuilder"):
        assert getattr(ec.caffe2, name) is getattr(ec, name)
    for name in ("CheckpointManager", "MultiNodeCheckpointManager", "get_ckpt_filename", "db_name"):
        assert hasattr(ec.caffe2, name)


@pytest.mark.parametrize("epoch", range(7))
def test_three_nodes_in_one_process_from_every_resume_epoch(tmp_path: pathlib.Path, epoch: int) -> None:
    """0 included: it is a number, not "none"."""
    totals: dict[str, list[int]] = {}
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    runner = ec.JobRunner(job_runs.node_job(6, totals), manager)
    assert runner.train(ec.LocalSession()) == 6
    assert runner.result.last_committed_epoch == 6
    assert totals == {node: expected(i, 6) for i, node in enumerate(NODES)}
    assert (tmp_path / "3" / "trainer_1" / "epoch.json").is_file()
    again: dict[str, list[int]] = {}
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    runner = ec.JobRunner(job_runs.node_job(7, again), manager, epoch)
    runner.train(ec.LocalSession())
    assert again == {node: expected(i, 7)[epoch:] for i, node in enumerate(NODES)}
    assert runner.result.resumed_from == epoch


def test_without_a_handler_or_a_named_epoch_a_run_is_from_scratch_and_replaces_its_own(tmp_path: pathlib.Path) -> None:
    """As in Caffe2; the metadata handler remembers, and may override the user."""
    for _ in range(2):
        totals: dict[str, list[int]] = {}
        manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
        ec.JobRunner(job_runs.node_job(2, totals), manager).train(ec.LocalSession())
        assert totals["trainer_0"] == expected(0, 2)
    handler = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.sqlite")
    for epochs, begin, given in ((3, 0, handler), (5, 3, handler), (6, 5, None)):
        totals = {}
        manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt", given)
        own = handler if given is None else None  # given to the runner it remembers, too
        runner = ec.JobRunner(job_runs.node_job(epochs, totals), manager, metadata_handler=own)
        runner.train(ec.LocalSession())
        assert totals["trainer_2"] == expected(2, epochs)[begin:]
    torn = tmp_path / "torn.json"
    torn.write_text("{")
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    runner = ec.JobRunner(job_runs.node_job(6, {}), manager, metadata_handler=ec.metadata.JsonMetadataHandler(torn))
    with pytest.raises(errors.FormatError):  # nothing is replaced on its word
        runner.train(ec.LocalSession())
    actions = {row.action for row in handler.stats()}
    assert actions == {"checkpoint_save", "checkpoint_load"}
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    runner = ec.JobRunner(job_runs.node_job(9, {}), manager, 17)
    with pytest.raises(errors.EpochNotFoundError):
        runner.train(ec.LocalSession())


def test_only_the_nodes_to_checkpoint_have_epochs(tmp_path: pathlib.Path) -> None:
    """Neither the handler nor the manager hears of other nodes, whatever lies in their workspaces."""
    handler = Recorded()
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt", handler)
    runner = ec.JobRunner(job_runs.two_trainers_and_a_reader(2), manager)
    runner.train(ec.LocalSession())
    assert runner.result.failed_saves == ()
    assert handler.calls[0] == f"set_params {tmp_path.name} epochckpt ['trainer_0', 'trainer_1'] None None"
    assert sorted(p.name for p in (tmp_path / "2").iterdir()) == ["trainer_0", "trainer_1"]
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    runner, session = ec.JobRunner(job_runs.two_trainers_and_a_reader(4), manager, 2), ec.LocalSession()
    runner.train(session)
    assert session.workspace("trainer_1")["total"] == 4
    assert runner.load_blobs_from_checkpoints(["total"], 1, session)
    assert session.workspace("trainer_1")["total"] == 1


def test_the_slowest_node_has_its_own_name(tmp_path: pathlib.Path) -> None:
    """Also when the manager was given the nodes in another order, and when a save has failed."""

    class Slow:
        def get_state(self) -> int:
            threading.Event().wait(0.2)
            return 1

        def set_state(self, state: int) -> None:
            pass

    with ec.Job() as job:
        ec.Task(lambda ws: ws.update(x=1), group=job.init_group, node="a")
        ec.Task(lambda ws: ws.update(x=Slow()), group=job.init_group, node="b")
        ec.Task(lambda ws: None, node="a")
    ec.epoch_limiter(job, 1)
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    manager.set_params(["b", "a"])
    runner = ec.JobRunner(job, manager)
    runner.train(ec.LocalSession())
    assert runner.result.slowest_node is not None
    assert runner.result.slowest_node[0] == "b"


def test_the_handler_of_a_single_manager_hears_the_name_of_its_folder(tmp_path: pathlib.Path) -> None:
    """The stats are by folder: only so is the node found in them."""
    with ec.Job() as job:
        ec.Task(lambda ws: ws.update(x=1), group=job.init_group, node="trainer_0")
        ec.Task(lambda ws: None, node="trainer_0")
    ec.epoch_limiter(job, 2)
    handler = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.sqlite")
    ec.JobRunner(job, ec.caffe2.CheckpointManager(tmp_path, "temp_node", "epochckpt", handler)).train(ec.LocalSession())
    assert handler.runs()[0].nodes == ("temp_node",)
    assert {row.node for row in handler.stats()} == {"temp_node"}


def counting(during: Callable[[ec.Workspace], Any] = lambda ws: None) -> ec.Job:
    job = ec.Job()
    job.init(lambda ws: ws.update(total=0))
    job.epoch(lambda ws: ws.update(total=ws["total"] + 1, temporary=object()))
    job.epoch(during)
    ec.epoch_limiter(job, 2)
    return job


@pytest.mark.parametrize("caffe2", [True, False])
def test_save_checkpoints_saves_what_the_run_checkpoints(tmp_path: pathlib.Path, caffe2: bool) -> None:
    """Blobs that came after init are temporary, also when they could not be saved; in a run and after it."""
    session, single = ec.LocalSession(), ec.caffe2.CheckpointManager(tmp_path, "a", "epochckpt")
    with contextlib.ExitStack() as stack:
        manager = single if caffe2 else stack.enter_context(ec.CheckpointManager(tmp_path))
        runner = ec.JobRunner(counting(lambda ws: runner.save_checkpoints(10 + ws.epoch, session)), manager)
        runner.train(session)
        assert runner.result.failed_saves == ()
        session.workspace()["total"] = 77
        runner.save_checkpoints(20, session)
        for epoch, total in ((2, 2), (12, 2), (20, 77)):
            fresh = ec.LocalSession()
            assert runner.load_blobs_from_checkpoints(["total", "temporary"], epoch, fresh)
            assert dict(fresh.workspace()) == {"total": total}


def test_save_checkpoints_is_soft_and_asks_whether_storage_is_there(tmp_path: pathlib.Path) -> None:
    """Also of the manager's own handler; and a blob that cannot be saved is no error that ends the program."""
    handler, session = Recorded(), ec.LocalSession()
    manager = ec.caffe2.CheckpointManager(tmp_path, "a", "epochckpt", handler)
    runner = ec.JobRunner(counting(), manager)
    session.workspace()["thing"] = object()
    runner.save_checkpoints(1, session)
    runner.train(session := ec.LocalSession())
    handler.cp_accessible = lambda epoch=None: False
    runner.save_checkpoints(9, session)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdecimal()) == ["0", "1", "2"]
    assert NodeEpochs(tmp_path, "a").reader(1).record.custom_metadata["blobs"] == {"total": "total"}


def test_a_missing_directory_means_failing_saves_and_a_job_that_trains_to_its_end(tmp_path: pathlib.Path) -> None:
    """It is never created, and the result says what happened."""
    totals: dict[str, list[int]] = {}
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path / "missing"), "epochckpt")
    runner = ec.JobRunner(job_runs.node_job(3, totals), manager, raise_if_not_saved=False)
    assert runner.train(ec.LocalSession()) == 3
    assert runner.result.exit_code == ec.UNSAVED_EXIT_CODE
    assert totals["trainer_1"] == expected(1, 3)
    assert {epoch for epoch, _ in runner.result.failed_saves} == {0, 1, 2, 3}
    assert runner.result.last_committed_epoch is None
    assert not (tmp_path / "missing").exists()


@pytest.mark.long
def test_three_separate_jobs_share_a_directory(tmp_path: pathlib.Path) -> None:
    """They know nothing of each other; each has its own nodes; one after the other, and at once (see test_managers)."""
    for runs in ([(6, None)], [(7, epoch) for epoch in range(7)]):
        for number in range(3):
            arguments = {"directory": str(tmp_path), "number": number, "runs": runs}
            (found,) = run_worker("tests.support.job_runs:read_alone", arguments)
            assert found == [expected(number, epochs)[epoch or 0 :] for epochs, epoch in runs]
    session = ec.LocalSession()
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    runner = ec.JobRunner(job_runs.node_job(1, {}), manager)
    assert runner.load_blobs_from_checkpoints(["total"], 5, session)
    assert [session.workspace(n)["total"] for n in NODES] == [expected(i, 5)[4] for i in range(3)]
    assert not runner.load_blobs_from_checkpoints(["total"], 8, session)
    (tmp_path / "5" / "trainer_1" / "epoch.json").unlink()
    assert not runner.load_blobs_from_checkpoints(["total"], 5, session)


def test_single_blobs_are_loaded_by_the_managers_own_load_blobs_locally(tmp_path: pathlib.Path) -> None:
    """As Caffe2's runner does with a manager of several nodes."""
    asked: list[Any] = []

    class Own(ec.caffe2.MultiNodeCheckpointManager):
        def load_blobs_locally(self, nodes: Any, blob_names: Any, epoch: int, session: Any) -> bool:
            asked.append((list(nodes), list(blob_names), epoch))
            return super().load_blobs_locally(nodes, blob_names, epoch, session)

    runner = ec.JobRunner(job_runs.node_job(1, {}), Own(tmp_path, "epochckpt"))
    runner.train(ec.LocalSession())
    assert runner.load_blobs_from_checkpoints(["total"], 1, session := ec.LocalSession())
    assert [session.workspace(n)["total"] for n in NODES] == [expected(i, 1)[0] for i in range(3)]
    assert not runner.load_blobs_from_checkpoints(["total"], 8, session)
    assert asked == [(list(NODES), ["total"], 1), (list(NODES), ["total"], 8)]


@pytest.mark.slow
def test_a_process_whose_node_is_not_checkpointed(tmp_path: pathlib.Path) -> None:
    """It has no part in the epochs, and keeps nobody from resuming; blobs of one name may differ in kind."""
    arguments = {"directory": str(tmp_path)}
    found = run_worker("tests.support.job_runs:read_with_a_node_that_is_not_checkpointed", arguments, 3)
    assert [(one["loaded"], one["total"]) for one in found] == [([False, True], total) for total in (1, 1, None)]
    assert {(one["resumed"], one["committed"]) for one in found} == {(2, 4)}
    assert {p.name for p in (tmp_path / "4").iterdir()} == {"trainer_0", "trainer_1"}


@pytest.mark.slow
def test_three_processes_of_one_job(tmp_path: pathlib.Path) -> None:
    """Each runs its own node, all agree, the primary talks to the handler."""
    arguments: dict[str, Any] = {"directory": str(tmp_path), "epochs": 4}
    found = run_worker("tests.support.job_runs:read_in_caffe2s_way", arguments, 3)
    assert [one["totals"] for one in found] == [{n: expected(i, 4)} for i, n in enumerate(NODES)]
    found = run_worker("tests.support.job_runs:read_in_caffe2s_way", {**arguments, "epochs": 6}, 3)
    assert [one["totals"] for one in found] == [{n: expected(i, 6)[4:]} for i, n in enumerate(NODES)]
    assert {(one["resumed"], one["committed"]) for one in found} == {(4, 6)}
    handler = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.sqlite")
    rows = handler.epochs()
    for action, times in (("checkpoint_save", 7), ("checkpoint_load", 1)):
        told = [row.node for row in handler.stats() if row.action == action and row.name.startswith(str(tmp_path))]
        assert sorted(told) == sorted(NODES * times), action
    assert [row.epoch for row in rows if row.outcome == "written"] == [0, 1, 2, 3, 4, 5, 6]


def test_epochs_of_a_job_that_counts_steps_are_shown_as_steps(tmp_path: pathlib.Path) -> None:
    """The managers of `ec.caffe2` note what the runner tells them, each node in its own epoch."""
    job = ec.Job(unit="step", steps_per_epoch=2)

    @job.init
    def init(ws: ec.Workspace) -> None:
        ws["w"] = 0

    @job.epoch
    def epoch(ws: ec.Workspace) -> None:
        ws["w"] += 1

    job.stop_when(ec.stop.max_steps(4))
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    ec.JobRunner(job, manager).train(ec.LocalSession())
    found = ec.inspect(tmp_path)
    assert {row.unit for row in found.overview().epochs} == {"step"}
    assert found.unit == "step"
