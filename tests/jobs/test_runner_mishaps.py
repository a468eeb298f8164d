"""What runs of jobs have got wrong, each with the test that shows it."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.manager import notifier
from tests.support.processes import run_worker
from tests.support.taps import Tap, no_space


class Counts:
    """True when it has been called so often."""

    def __init__(self, limit: int):
        self.limit, self.calls = limit, 0

    def __call__(self, ctx: Any) -> bool:
        self.calls += 1
        return self.calls >= self.limit

    def get_state(self) -> int:
        return self.calls

    def set_state(self, state: int) -> None:
        self.calls = state


def job_of(epochs: int, epoch: Any = None, **blobs: Any) -> ec.Job:
    """A job of one node with these blobs."""
    job = ec.Job()
    job.init(lambda ws: ws.update(blobs or {"sum": 0}))
    job.epoch(epoch or (lambda ws: None))
    ec.epoch_limiter(job, epochs)
    return job


def run(job: ec.Job, manager: Any = None, **how: Any) -> tuple[ec.RunResult, ec.LocalSession]:
    session = ec.LocalSession()
    runner = ec.JobRunner(job, manager, **how)
    runner.train(session)
    return runner.result, session


def test_a_job_that_runs_again_from_scratch_starts_with_fresh_conditions() -> None:
    """Patience that an earlier run of the same object used up is not missing in the next."""
    job = job_of(100, lambda ws: {"loss": 1.0})
    job.stop_when(ec.stop.no_improvement("loss", patience=3, mode="min"))
    assert [run(job)[0].epoch for _ in range(2)] == [4, 4]
    job = job_of(100)
    job.stop_when(Counts(5))
    assert [run(job)[0].epoch for _ in range(3)] == [5, 5, 5]


def test_asking_whether_a_run_has_ended_counts_for_nothing(tmp_path: pathlib.Path) -> None:
    """A callable that counts its calls is asked once more, and has counted the epochs alone."""
    for limit, epoch in ((3, 3), (5, 5)):
        job = job_of(100)
        job.stop_when(Counts(limit))
        with ec.CheckpointManager(tmp_path) as manager:
            assert run(job, manager)[0].epoch == epoch


def test_values_of_an_earlier_run_do_not_stop_the_next(tmp_path: pathlib.Path) -> None:
    """A job that runs again forgets what its tasks gave, also where its nodes have other names then."""
    job = ec.Job()
    job.init(lambda ws: ws.update(count=0))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        ws["count"] += 1

    task = ec.Task(lambda ws: ws["count"] >= 3, group=job.epoch_group)
    job.add_stop_condition(task)
    with ec.CheckpointManager(tmp_path / "a", node="a") as one, ec.CheckpointManager(tmp_path / "b", node="b") as two:
        assert [run(job, manager)[0].epoch for manager in (one, two, None)] == [3, 3, 3]
    assert task.outputs()[0].fetch("process_0") is True


def test_a_finished_run_trains_on_when_its_conditions_do_not_say_that_it_is(tmp_path: pathlib.Path) -> None:
    """They are asked of what was recorded; what only training can tell is asked after one more epoch."""

    def ended(condition: Any) -> tuple[int, str]:
        job = job_of(50, lambda ws: ws.update(sum=ws["sum"] + 1, done=False) or {"loss": 1 / ws.epoch})
        task = ec.Task(lambda ws: condition(ws), group=job.epoch_group) if condition.__name__ == "output" else None
        job.add_stop_condition(task if task is not None else condition)
        with ec.CheckpointManager(tmp_path) as manager:
            result, _ = run(job, manager)
        return result.epoch, result.stop_reason

    def below(loss: float) -> Any:
        return lambda ctx: ctx.metrics["loss"] < loss

    def output(ws: ec.Workspace) -> bool:
        return ws["sum"] >= 4

    where = "test_a_finished_run_trains_on_when_its_conditions_do_not_say_that_it_is.<locals>"
    assert ended(below(0.4)) == (3, f"{where}.below.<locals>.<lambda>")
    assert ended(below(0.4)) == (3, "was finished already")
    assert ended(below(0.3))[0] == 4  # a changed threshold, of the same name
    assert ended(output)[0] == 5  # only training tells
    assert ended(output)[0] == 6
    assert ended(lambda ctx: ctx.metrics["unknown until now"] > 0 if ctx.epoch == 6 else True)[0] == 7


def test_blobs_that_a_resumed_run_would_lack_are_named_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of epoch tasks; not those of setup, which are saved from then on, and those left out on purpose."""

    def said(epochs: int, **how: Any) -> list[str]:
        def epoch(ws: ec.Workspace) -> None:
            ws["momentum"] = ws.get("momentum", 0) + 1
            ws["cache.a"] = ws.epoch

        caplog.clear()
        job = job_of(epochs, epoch)
        job.setup(lambda ws: ws.update(new=1) if epochs > 2 else None)
        with ec.CheckpointManager(tmp_path) as manager:
            run(job, manager, **how)
        return [r.message for r in caplog.records if "not checkpointed" in r.message]

    (first,) = said(2, exclude=["cache.*"])
    assert "'momentum' of node process_0. Init" in first
    assert "after epoch 1:" in first
    (resumed,) = said(4)
    assert "epoch 3: 'momentum', 'cache.a' of node process_0" in resumed
    assert said(6, unsaved_blobs="ignore") == []
    with pytest.raises(errors.InvalidArgumentError, match=r"after epoch 7: 'momentum' of node"):
        said(9, unsaved_blobs="error", exclude=["cache.*"])
    assert run(job_of(2, lambda ws: ws.update(more=1)), None, unsaved_blobs="error")[0].epoch == 2  # nothing is saved
    with pytest.raises(ValueError, match="unsaved_blobs must be"):
        run(job_of(1), None, unsaved_blobs=True)


@pytest.mark.parametrize("name", ["best", "stopper", "made_by_init"])
def test_attributes_of_a_workspace_are_refused(name: str) -> None:
    """They would be lost, and might be the runner's own; blobs and `live` are kept."""
    ws = ec.Workspace()
    with pytest.raises(AttributeError, match=rf"write ws\['{name}'\] = .*ws.live.{name} = ") as caught:
        setattr(ws, name, 3)
    assert isinstance(caught.value, errors.InvalidArgumentError)
    ws.epoch, ws.live.best = 3, 4
    with pytest.raises(errors.InvalidArgumentError, match="task '<lambda>' of group 'epoch'"):
        run(job_of(1, lambda ws: setattr(ws, name, 3)))


def test_numbers_that_are_no_metrics_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """What a task returns beside a mapping is only its output; an answer to a stop condition is meant as that."""
    for returned in (0.5, 7, jnp.ones(()), (np.float32(1), 2), [1.0]):
        caplog.clear()
        run(job_of(2, lambda ws, returned=returned: returned))
        (said,) = [r.message for r in caplog.records if "no metric" in r.message]
        assert f"task '<lambda>' returned a {type(returned).__name__}" in said
    caplog.clear()
    for fine in (None, True, jnp.array(True), {"loss": 1.0}, "text", object()):
        run(job_of(1, lambda ws, fine=fine: fine))
    assert "no metric" not in caplog.text

    job = ec.Job()
    for number, node in enumerate("ab"):
        ec.Task(lambda ws, number=number: {"loss": 1.0, f"loss_{number}": 1.0}, group=job.epoch_group, node=node)
    ec.epoch_limiter(job, 2)
    run(job)
    assert [r.message for r in caplog.records if "not kept" in r.message] == [
        "metrics ['loss_1'] of node b are not kept: those of node a count"
    ]


def test_nodes_of_one_process_leave_an_epoch_together(tmp_path: pathlib.Path) -> None:
    """A notice that comes when one node has finished the epoch does not make another leave it: it would be trained
    twice by the first."""
    job, sent = ec.Job(), list[int]()

    def train(ws: ec.Workspace) -> None:
        while ws["step"] < 4:
            if ws.should_stop():
                return
            ws["total"], ws["step"] = ws["total"] + 1, ws["step"] + 1
            if (ws.node, ws["step"]) == ("b", 2) and not sent:
                sent.append(1)
                os.kill(os.getpid(), signal.SIGTERM)
        ws["step"] = 0

    for node in "ab":
        ec.Task(lambda ws: ws.update(step=0, total=0), group=job.init_group, node=node)
        ec.Task(train, group=job.epoch_group, node=node)
    job.resumable = True
    ec.epoch_limiter(job, 2)
    for epoch in (1, 2):
        with ec.CheckpointManager(tmp_path) as manager:
            result, session = run(job, manager)
        assert (result.epoch, result.partial) == (epoch, False)
        assert [session.workspace(node)["total"] for node in "ab"] == [4 * epoch] * 2


def test_patterns_narrow_what_a_resumed_run_saves(tmp_path: pathlib.Path) -> None:
    """They are no less asked for than in a run from scratch."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(job_of(1, sum=0, cache=1), manager)
    with ec.CheckpointManager(tmp_path) as manager:
        run(job_of(2, sum=0, cache=1), manager, exclude=["cache"])
        assert (set(manager.item_kinds(1)), set(manager.item_kinds(2))) == ({"sum", "cache"}, {"sum"})


def test_a_composed_preempted_does_not_say_that_training_is_over(tmp_path: pathlib.Path) -> None:
    """The run can be started again, and the result says so."""
    job = job_of(5, lambda ws: os.kill(os.getpid(), signal.SIGTERM) if ws.epoch == 2 else None)
    job.stop_when(ec.stop.max_epochs(6) | ec.stop.preempted)
    with ec.CheckpointManager(tmp_path) as manager:
        result, _ = run(job, manager)
    assert (result.epoch, result.preempted, result.finished, result.stop_reason) == (2, True, False, "preempted")
    with ec.CheckpointManager(tmp_path) as manager:
        result, _ = run(job, manager)
    assert (result.epoch, result.finished) == (5, True)


def test_stock_orbax_saves_values_as_they_were(tmp_path: pathlib.Path) -> None:
    """It writes JSON in the background, while the next epoch already changes the list."""
    job = job_of(20, lambda ws: ws["list"].append(ws.epoch), list=[0] * 20_000)
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        run(job, manager)
        lengths = []
        for epoch in range(21):
            session = ec.LocalSession()
            assert ec.JobRunner(job, manager).load_blobs_from_checkpoints(["list"], epoch, session)
            lengths.append(len(session.workspace()["list"]))
    assert lengths == list(range(20_000, 20_021))


def test_stock_orbax_reads_a_blob_that_is_called_default(tmp_path: pathlib.Path) -> None:
    """An item of this name is to Orbax a checkpoint of one item, in which it finds no others."""
    for epochs in (1, 2):
        with ocp.CheckpointManager(tmp_path / "c") as manager:
            result, session = run(job_of(epochs, default=7), manager)
    assert (result.resumed_from, dict(session.workspace())) == (1, {"default": 7})


def test_stock_orbax_does_not_go_on_from_an_epoch_without_named_items(tmp_path: pathlib.Path) -> None:
    """It could restore nothing and save nothing; ours can."""
    directory = tmp_path / "c"
    with ocp.CheckpointManager(directory) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.arange(3)}))
    with ocp.CheckpointManager(directory) as manager, pytest.raises(ec.errors.UnsupportedError, match="without a name"):
        run(job_of(5), manager)
    with ec.CheckpointManager(directory) as manager:
        result, session = run(job_of(5), manager)
    assert (result.resumed_from, session.workspace()["default"]["w"].tolist()) == (3, [0, 1, 2])


def test_an_epoch_that_stock_orbax_deletes_as_worse_is_no_failed_save(tmp_path: pathlib.Path) -> None:
    """It would count for max_consecutive_save_failures, and end a run in which nothing failed."""
    losses = [1.0, 2.0, 5.0, 4.0, 3.0, 0.5]
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path / "c", options=options) as manager:
        job = job_of(6, lambda ws: {"loss": losses[ws.epoch - 1]})
        result, _ = run(job, manager, max_consecutive_save_failures=0)
        assert (result.failed_saves, result.last_committed_epoch) == ((), 6)
        assert {1, 6} <= set(manager.all_steps())
        assert 3 not in manager.all_steps()


def test_a_run_with_stock_orbax_goes_on_with_ours(tmp_path: pathlib.Path) -> None:
    """What stock Orbax keeps as JSON by node, and arrays that it keeps in a tree, come back as the blobs they were."""
    values: dict[str, Any] = {"sum": 1, "bytes": b"\xff", "a/b": "x"}
    blobs = {**values, "bare": np.arange(3), "array": jnp.ones(2), "tree": {"w": jnp.ones(1)}}
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        run(job_of(1, **blobs), manager)
    job = job_of(2)
    job.setup(lambda ws: ws.target("array", jax.ShapeDtypeStruct((2,), jnp.float32)))
    with ec.CheckpointManager(tmp_path / "c") as manager:
        for _ in range(2):  # from an epoch of stock Orbax, then from one of ours
            result, session = run(job, manager)
            found = dict(session.workspace())
            assert result.failed_saves == ()
            assert {name: type(value) for name, value in found.items()} == {
                name: type(value) for name, value in blobs.items()
            }
            assert (found["sum"], found["bytes"], found["a/b"]) == (1, b"\xff", "x")
            assert (found["bare"].tolist(), found["array"].tolist()) == ([0, 1, 2], [1.0, 1.0])
    assert result.resumed_from == 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("state_of_a_condition_fails", "OSError.*no state today"),
        ("handler_refuses", "this directory is not for me"),
        ("spread_on_some", "arrays of the whole job on one node, and on another"),
    ],
)
def test_what_fails_on_one_process_is_raised_on_all_at_once(tmp_path: pathlib.Path, what: str, message: str) -> None:
    """Nobody waits for the timeout, and everybody says what it was."""
    for end in run_worker(f"tests.support.runner_mishap_jobs:{what}", {"directory": str(tmp_path / "c")}, 2):
        assert re.search(message, end["error"])
        assert end["secs"] < 100.0  # the timeout is 120 s


def test_a_blob_may_be_a_reader_on_one_node_and_nothing_on_another(tmp_path: pathlib.Path) -> None:
    """Only arrays of the whole job have to be alike everywhere."""
    for end in run_worker("tests.support.runner_mishap_jobs:reader_on_one", {"directory": str(tmp_path / "c")}, 2):
        assert end == {"error": "", "failed": [], "epochs": [0, 1]}


def test_a_handler_that_hangs_does_not_hold_the_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for once, and not asked again."""
    gone, asked = threading.Event(), list[str]()

    class Hangs(ec.metadata.AbstractMetadataHandler):
        def set_params(self, **arguments: Any) -> None:
            pass

        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            return None

        def write(self, epoch: int) -> None:
            asked.append("write")
            gone.wait(60)

        def report(self, action_name: str, all_stats: Any) -> None:
            asked.append("report")

        def cp_accessible(self, epoch: int | None = None) -> bool:
            return True

    monkeypatch.setattr(notifier, "_CALL_SECS", 0.2)
    with ec.CheckpointManager(tmp_path) as manager:
        result, _ = run(job_of(5), manager, metadata_handler=Hangs())
    gone.set()
    assert (result.epoch, result.last_committed_epoch) == (5, 5)
    assert asked == ["write"]


def test_stock_orbax_does_not_resume_what_only_we_can(tmp_path: pathlib.Path) -> None:
    """It would lose what differs per node; that is said, and our manager goes on."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(job_of(2), manager)
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        pytest.raises(errors.UnsupportedError, match="resume it with that"),
    ):
        run(job_of(3), manager)
    with ec.CheckpointManager(tmp_path) as manager:
        assert run(job_of(3), manager)[0].resumed_from == 2


def test_preempted_before_the_upload_it_is_left_for_the_next_start(tmp_path: pathlib.Path) -> None:
    """A notice that comes while the last save is awaited does not wait for an upload of hours."""
    done: list[str] = []

    class Upload(ec.UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> ec.TaskGroup:
            group = ec.TaskGroup("upload")
            ec.Task(lambda ws: done.append("upload"), group=group)
            if not done:
                done.append("notice")
                os.kill(os.getpid(), signal.SIGTERM)
            return group

    for expected in (75, 0):
        job = job_of(1)
        job.exit(lambda ws: done.append("exit"))
        with ec.CheckpointManager(tmp_path) as manager:
            result, _ = run(job, manager, upload_task_group_builder=Upload())
        assert result.exit_code == expected
        assert result.finished
    assert done == ["notice", "upload", "exit"]


def test_a_task_that_exits_one_process_is_heard_of_by_the_others(tmp_path: pathlib.Path) -> None:
    """`sys.exit` is no Exception; nobody waits for the one that left."""
    found = run_worker("tests.support.runner_mishap_jobs:one_exits", {"directory": str(tmp_path)}, 2)
    assert found == ["SystemExit: 3", "CoordinationError: SystemExit in another process: 3"]


def test_a_deletion_that_leaves_files_ends_no_run(tmp_path: pathlib.Path) -> None:
    """A task deletes an epoch whose files cannot be removed: the run goes on, saves, and ends well."""

    def delete(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            manager.delete(1)

    with ec.CheckpointManager(tmp_path) as manager:
        tap = Tap(manager, "remove_tree", lambda path: "removed" in path, no_space)
        result, _ = run(job_of(3, delete), manager)
        tap.remove()
        assert (result.epoch, manager.all_steps()) == (3, [0, 2, 3])


def test_a_command_that_is_started_again_goes_back_once(tmp_path: pathlib.Path) -> None:
    """A scheduler starts it with the same `resume_from_epoch`; the epochs that it has saved since are its own."""

    def train(epochs: int, named: int | None, **options: Any) -> tuple[int | None, int]:
        with ec.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(**options)) as manager:
            result, session = run(job_of(epochs, add), manager, resume_from_epoch=named)
        return result.resumed_from, session.workspace()["sum"]

    def add(ws: ec.Workspace) -> None:
        ws["sum"] += 1

    assert train(5, None) == (None, 5)
    assert train(4, 2) == (2, 4)  # goes back, and trains 3 and 4
    assert train(6, 2, max_to_keep=2) == (4, 6)  # started again; epoch 2 is deleted meanwhile
    assert train(6, 2) == (6, 6)  # it was finished
    assert train(8, 5) == (5, 8)  # another epoch is named
    assert train(9, None) == (8, 9)
    assert train(9, 5) == (5, 9)  # a run that has not gone back has saved the newest epoch
    with ec.CheckpointManager(tmp_path) as manager:
        manager.rollback_to(5)
    assert train(7, 5) == (5, 7)


@pytest.mark.parametrize(("kept", "order"), [(None, "ab"), (["a"], "ab"), (["b"], "ab"), (["b", "a"], "ba")])
def test_which_nodes_are_saved_does_not_change_their_order(kept: list[str] | None, order: str) -> None:
    """In a job of several processes it says which process is which node, and the metrics of the first node count."""
    with ec.Job(nodes_to_checkpoint=kept) as job:
        for number, node in enumerate("ab"):
            with ec.Node(node):
                ec.Task(lambda ws: ws.update(sum=0), group=job.init_group)
                ec.Task(lambda ws, n=number: {"number": n})
    job.stop_when(lambda ctx: [*"ab"][ctx.metrics["number"]] == order[0])
    ec.epoch_limiter(job, 5)
    result, session = run(job)
    assert job.nodes() == list(session.nodes) == [*order]
    assert result.epoch == 1
