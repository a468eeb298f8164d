"""The semantics of jobs and their runner, in one process; with our manager, with stock Orbax's, and without one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epochckpt as ec
from epochckpt import errors
from tests.support.job_runs import PER_EPOCH, RECORDS, Reader

T = TypeVar("T")


class Managers:
    """Makes managers of one directory."""

    def __init__(self, kind: str, directory: str):
        self.kind, self.directory = kind, directory
        self.open: list[Any] = []

    def __call__(self, **options: Any) -> Any:
        made: Any
        options = ocp.CheckpointManagerOptions(**options)
        if self.kind == "stock":
            made = ocp.CheckpointManager(self.directory, options=options)
        else:
            made = ec.CheckpointManager(self.directory, options=options)
        self.open.append(made)
        return made

    def close(self) -> None:
        for manager in self.open:
            manager.close()
        self.open = []


@pytest.fixture(params=["posix", "memory", "stock"])
def managers(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Any:
    directory = f"memory://{tmp_path.name}-{id(request)}/" if request.param == "memory" else str(tmp_path / "run")
    made = Managers(request.param, directory)
    yield made
    made.close()


@dataclasses.dataclass
class Log:
    """What has run, in order."""

    events: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, event: str) -> None:
        self.events.append(event)


def counting_job(log: Callable[[str], None], epochs: int | None = None) -> ec.Job:
    """A job of all phases, whose blobs are a sum of epochs, on the host and as an array."""
    job = ec.Job()
    job.setup(lambda ws: log("setup"))

    @job.init
    def init(ws: ec.Workspace) -> None:
        log("init")
        ws["sum"], ws["array"] = 0, jnp.zeros(3)

    @job.epoch
    def train(ws: ec.Workspace) -> dict[str, float]:
        log(f"epoch {ws.epoch}")
        ws["sum"] += ws.epoch
        ws["array"] = ws["array"] + ws.epoch
        ws["later"] = "temporary"
        return {"loss": 1.0 / ws.epoch}

    job.download(lambda ws: log("download"))
    job.exit(lambda ws: log("exit"))
    if epochs is not None:
        ec.epoch_limiter(job, epochs)
    return job


def run(
    job: ec.Job, manager: Any = None, resume_from: int | None = None, **how: Any
) -> tuple[int, ec.LocalSession, ec.JobRunner]:
    session = ec.LocalSession()
    runner = ec.JobRunner(job, manager, resume_from, **how)
    return runner.train(session), session, runner


# -- the order of steps ------------------------------------------------------------------------------------------


def test_a_run_from_scratch_saves_epoch_0_before_training_and_goes_through_all_phases(managers: Managers) -> None:
    """setup, init, save 0, epochs with their saves, download, exit."""
    log, manager = Log(), managers()
    before = []
    job = counting_job(log, 2)
    job.epoch_group.tasks()[0].fn = _first(
        job.epoch_group.tasks()[0].fn, lambda: before.append(_committed_or_pending(manager))
    )
    last, session, runner = run(job, manager)
    assert last == 2
    assert log.events == ["setup", "init", "epoch 1", "epoch 2", "download", "exit"]
    assert list(manager.all_steps()) == [0, 1, 2]
    assert before[0] == [0]
    assert session.workspace()["sum"] == 3
    assert runner.result.stop_reason == "max_epochs(2)"
    assert runner.result.last_committed_epoch == 2
    assert runner.result.exit_code == 0


def _first(fn: Callable[[Any], Any], before: Callable[[], Any]) -> Callable[[Any], Any]:
    def both(ws: ec.Workspace) -> Any:
        before()
        return fn(ws)

    return both


def _committed_or_pending(manager: Any) -> list[int]:
    manager.wait_until_finished()
    return list(manager.all_steps())


def test_a_resumed_run_does_not_init_and_goes_on_after_the_newest_epoch(managers: Managers) -> None:
    """Setup runs at every start; the blobs come from the checkpoint."""
    run(counting_job(Log(), 2), managers())
    managers.close()
    log = Log()
    last, session, runner = run(counting_job(log, 4), managers())
    assert last == 4
    assert log.events == ["setup", "epoch 3", "epoch 4", "download", "exit"]
    assert session.workspace()["sum"] == 10
    assert np.asarray(session.workspace()["array"]).tolist() == [10.0] * 3
    assert runner.result.resumed_from == 2


def test_a_finished_run_started_again_trains_nothing_and_says_so(managers: Managers) -> None:
    """It goes straight to download and exit, with its blobs; a higher limit makes it train on."""
    run(counting_job(Log(), 2), managers())
    managers.close()
    for _ in range(2):
        log = Log()
        last, session, runner = run(counting_job(log, 2), managers())
        assert (last, log.events) == (2, ["setup", "download", "exit"])
        assert runner.result.stop_reason == "was finished already"
        assert session.workspace()["sum"] == 3
        assert [int(e) for e in managers.open[-1].all_steps()] == [0, 1, 2]
        managers.close()


def test_a_named_epoch_trains_on_even_if_it_was_the_last(managers: Managers) -> None:
    """As in Caffe2: naming it says so."""
    run(counting_job(Log(), 2), managers())
    managers.close()
    log = Log()
    last, _, _ = run(counting_job(log, 2), managers(), 2)
    assert (last, log.events[1]) == (3, "epoch 3")


def test_every_stop_condition_is_evaluated_and_the_last_epoch_is_saved(managers: Managers) -> None:
    """Also those after one that is true; the epoch at which they are is on storage."""
    asked: list[int] = []
    job = counting_job(Log())
    job.stop_when(lambda ctx: ctx.epoch == 2)
    job.stop_when(lambda ctx: asked.append(ctx.epoch) or False)
    manager = managers()
    last, _, _ = run(job, manager)
    assert last == 2
    assert asked == [1, 2]
    assert list(manager.all_steps())[-1] == 2


def test_the_caffe2_form_of_a_job_is_the_same_job(managers: Managers) -> None:
    """Groups, tasks, outputs as stop conditions, blobs as stop conditions."""
    with ec.Job() as job:
        with job.init_group:
            ec.Task(lambda ws: ws.update(count=0, done=False))

        def step(ws: ec.Workspace) -> bool:
            ws["count"] += 1
            ws["done"] = ws["count"] >= 5
            return ws["count"] >= 3

        task = ec.Task(step)
        job.add_stop_condition(task.outputs()[0])
        job.add_stop_condition("done")
    assert ec.Job.current() is None
    last, session, runner = run(job, managers())
    assert (last, session.workspace()["count"]) == (3, 3)
    assert "output 'value' of task 'step'" in runner.result.stop_reason
    managers.close()
    last, _, runner = run(job, managers())  # what a task gives is not known before it has run
    assert (last, runner.result.stop_reason) == (4, "output 'value' of task 'step'")


def test_blobs_made_after_init_are_not_checkpointed(managers: Managers) -> None:
    """On a resume they are not there."""
    run(counting_job(Log(), 2), managers())
    managers.close()
    seen: list[list[str]] = []
    job = counting_job(Log(), 3)
    job.epoch_group.tasks()[0].fn = lambda ws: seen.append(sorted(ws))
    run(job, managers())
    assert seen == [["array", "sum"]]


def test_include_and_exclude_narrow_what_is_checkpointed(tmp_path: pathlib.Path) -> None:
    """By shell patterns; what is left out keeps what setup made."""
    job = counting_job(Log(), 1)
    job.init(lambda ws: ws.update({"cache.a": 1, "cache.b": 2}))
    with ec.CheckpointManager(tmp_path / "a") as manager:
        run(job, manager, exclude=["cache.*"])
        assert sorted(manager.item_kinds(1)) == ["array", "sum"]
    with ec.CheckpointManager(tmp_path / "b") as manager:
        run(job, manager, include=["s*", "cache.b"])
        assert sorted(manager.item_kinds(1)) == ["cache.b", "sum"]


def test_a_manager_is_reused_by_a_second_job_runner(managers: Managers) -> None:
    """The same object, without closing it."""
    manager = managers()
    run(counting_job(Log(), 2), manager)
    last, session, _ = run(counting_job(Log(), 3), manager)
    assert (last, session.workspace()["sum"]) == (3, 6)


def test_without_a_manager_a_job_just_runs() -> None:
    """Nothing is saved, the verbs that need a manager say so."""
    log = Log()
    last, session, runner = run(counting_job(log, 2))
    assert (last, runner.result.last_committed_epoch) == (2, None)
    with pytest.raises(ValueError, match="needs a checkpoint manager"):
        runner.load_blobs_from_checkpoints(["sum"], 1, session)
    with pytest.raises(ValueError, match="needs a checkpoint manager"):
        runner.save_checkpoints(3, session)
    with pytest.raises(ValueError, match="no checkpoint_manager"):
        ec.JobRunner(counting_job(log), None, 3)


def test_save_checkpoints_saves_the_workspaces_as_they_are(managers: Managers) -> None:
    """Between runs, on request."""
    manager = managers()
    job = counting_job(Log(), 1)
    _, session, runner = run(job, manager)
    session.workspace()["sum"] = 77
    del session.workspace()["later"]
    runner.save_checkpoints(5, session)
    assert list(manager.all_steps())[-1] == 5
    fresh = ec.LocalSession()
    assert runner.load_blobs_from_checkpoints(["sum"], 5, fresh)
    assert dict(fresh.workspace()) == {"sum": 77}


def test_save_policies_decide_about_the_epochs_between_the_first_and_the_last(managers: Managers) -> None:
    """Epoch 0 and the last are saved whatever they say; a skip is no failure."""
    manager = managers(save_interval_steps=3)
    _, _, runner = run(counting_job(Log(), 8), manager)
    assert list(manager.all_steps()) == [0, 3, 6, 8]
    assert runner.result.failed_saves == ()


def test_an_epoch_whose_place_a_foreign_folder_has_is_a_failed_save(tmp_path: pathlib.Path) -> None:
    """The run goes on, and its result names the folder; the last epoch ends the run with the same reason."""
    with ec.CheckpointManager(tmp_path) as manager:
        ec.JobRunner(counting_job(lambda _: None, 1), manager).train()
    (tmp_path / "2" / "notes").mkdir(parents=True)
    with ec.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(counting_job(lambda _: None, 3), manager)
        runner.train()
        assert manager.all_steps() == [0, 1, 3]
    ((epoch, reason),) = runner.result.failed_saves
    assert (epoch, "is named like an epoch but holds no epoch.json" in reason) == (2, True)
    (tmp_path / "4" / "notes").mkdir(parents=True)
    with ec.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(counting_job(lambda _: None, 4), manager)
        with pytest.raises(errors.SaveError, match="/4 is named like an epoch"):
            runner.train()


def test_metrics_are_merged_saved_and_shown_to_conditions(managers: Managers) -> None:
    """Scalars of any kind; two tasks, two names."""
    job = counting_job(Log(), 3)
    seen: list[dict[str, Any]] = []

    @job.epoch
    def more(ws: ec.Workspace) -> dict[str, Any]:
        return {"step": np.int64(ws.epoch), "mean": ws["array"].mean(), "good": np.bool_(True)}

    job.stop_when(lambda ctx: seen.append(dict(ctx.metrics)) or False)
    manager = managers(best_fn=lambda metrics: metrics["loss"])
    run(job, manager)
    assert seen[1] == {"loss": 0.5, "step": 2, "mean": 3.0, "good": True}
    assert manager.metrics(2) == seen[1]


# -- stop conditions survive ---------------------------------------------------------------------------------------


def test_the_state_of_stop_conditions_survives_a_resume(managers: Managers) -> None:
    """Patience that was used up before a kill is not given again."""

    def job(limit: int) -> ec.Job:
        made = counting_job(Log(), limit)
        made.epoch_group.tasks()[0].fn = lambda ws: {"loss": 1.0 if ws.epoch < 3 else 2.0}
        made.stop_when(ec.stop.no_improvement("loss", patience=4, mode="min"))
        return made

    straight, _, _ = run(job(100))
    run(job(4), managers())
    managers.close()
    resumed, _, runner = run(job(100), managers())
    assert resumed == straight == 5
    assert "no_improvement" in runner.result.stop_reason


def test_a_time_limit_counts_this_run_or_all(tmp_path: pathlib.Path) -> None:
    """`max_time` starts anew with each run, with total=True it does not."""
    directory = tmp_path / "run"

    def once(condition: Any) -> tuple[int, ec.RunResult]:
        job = counting_job(Log())
        job.stop_when(condition)
        with ec.CheckpointManager(directory) as manager:
            last, _, runner = run(job, manager)
        return last, runner.result

    first, result = once(ec.stop.max_time(1e-6))
    assert (first, result.finished) == (1, True)
    assert once(ec.stop.max_time(1e-6))[0] == 2
    assert once(ec.stop.max_time(1e-6, total=True))[1].stop_reason == "was finished already"


# -- readers, nodes ------------------------------------------------------------------------------------------------


def reading_job(epochs: int, totals: dict[str, list[int]], nodes: Sequence[str] = ()) -> ec.Job:
    """Every node reads 3 of 10 records per epoch into a running total."""
    job = ec.Job()
    for number, name in enumerate(nodes or [""]):

        def setup(ws: ec.Workspace, number: int = number) -> None:
            ws["reader"] = Reader(100 * number)

        def init(ws: ec.Workspace) -> None:
            ws["total"] = 0

        def read(ws: ec.Workspace) -> None:
            ws["total"] += sum(ws["reader"].take(PER_EPOCH))
            totals.setdefault(ws.node, []).append(ws["total"])

        for group, fn in ((job.setup_group, setup), (job.init_group, init), (job.epoch_group, read)):
            ec.Task(fn, group=group, node=name or None)
    ec.epoch_limiter(job, epochs)
    return job


def expected(number: int, epochs: int) -> list[int]:
    records = [i % RECORDS + 100 * number for i in range(PER_EPOCH * epochs)]
    return [sum(records[: PER_EPOCH * (e + 1)]) for e in range(epochs)]


NODES = ("trainer_0", "trainer_1", "trainer_2")


@pytest.mark.slow
@pytest.mark.parametrize("epoch", range(7))
@pytest.mark.parametrize("nodes", [(), NODES], ids=["one node", "three nodes"])
def test_totals_are_reproduced_from_every_resume_epoch(
    tmp_path: pathlib.Path, nodes: Sequence[str], epoch: int
) -> None:
    """0 included: it is a number, not "none"."""
    names = nodes or ("process_0",)
    totals: dict[str, list[int]] = {}
    with ec.CheckpointManager(tmp_path) as manager:
        run(reading_job(6, totals, nodes), manager)
        assert manager.nodes(6) == list(names) or tuple(n for n in manager.nodes(6)) == names
    assert totals == {name: expected(i, 6) for i, name in enumerate(names)}
    again: dict[str, list[int]] = {}
    with ec.CheckpointManager(tmp_path) as manager:
        run(reading_job(7, again, nodes), manager, epoch)
        assert list(manager.all_steps()) == list(range(max(8, epoch + 2)))
    assert again == {name: expected(i, 7)[epoch:] for i, name in enumerate(names)}


def test_each_node_of_a_process_has_its_own_folder(tmp_path: pathlib.Path) -> None:
    """And the epoch commits with all of them."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(reading_job(1, {}, NODES), manager)
        assert [(tmp_path / "1" / node / "node.json").is_file() for node in NODES] == [True] * 3
        assert [n.name for n in manager.status(1).nodes] == list(NODES)


def test_a_subset_of_blobs_is_loaded_from_many_nodes(tmp_path: pathlib.Path) -> None:
    """Into the current workspaces; an epoch that is not there gives False, unknown names are left out."""
    totals: dict[str, list[int]] = {}
    job = reading_job(3, totals, NODES)
    with ec.CheckpointManager(tmp_path) as manager:
        run(job, manager)
    with ec.CheckpointManager(tmp_path) as manager:
        session = ec.LocalSession()
        runner = ec.JobRunner(job, manager)
        assert runner.load_blobs_from_checkpoints(["total", "nothing"], 2, session)
        assert {n: dict(session.workspace(n)) for n in NODES} == {
            n: {"total": expected(i, 3)[1]} for i, n in enumerate(NODES)
        }
        with pytest.raises(ValueError, match="trainer_0/total"):
            session.root["total"]
        assert session.root["trainer_1/total"] == expected(1, 3)[1]
        fresh = ec.LocalSession()
        assert runner.load_blobs_from_checkpoints(["trainer_1/total"], 3, fresh)
        assert [dict(fresh.workspace(n)) for n in NODES] == [{}, {"total": expected(1, 3)[2]}, {}]
        assert not runner.load_blobs_from_checkpoints(["total"], 9, session)


def test_loading_blobs_reads_only_their_bytes(tmp_path: pathlib.Path) -> None:
    """A damaged blob beside them does not matter."""
    job = ec.Job()
    job.init(lambda ws: ws.update(small=jnp.arange(4.0), large=jnp.ones(100_000)))
    ec.epoch_limiter(job, 1)
    with ec.CheckpointManager(tmp_path) as manager:
        run(job, manager)
        path = tmp_path / "1" / "process_0" / "large.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        session = ec.LocalSession()
        runner = ec.JobRunner(job, manager)
        assert runner.load_blobs_from_checkpoints(["small"], 1, session)
        assert np.asarray(session.workspace()["small"]).tolist() == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(errors.DamagedError):
            runner.load_blobs_from_checkpoints(["large"], 1, session)


def test_blobs_come_back_as_setup_says(tmp_path: pathlib.Path) -> None:
    """On another sharding, as a NamedTuple; a blob that the epoch lacks keeps what setup made; names of any kind."""
    import optax

    def job(devices: int, extra: bool) -> ec.Job:
        made = ec.Job()

        @made.setup
        def setup(ws: ec.Workspace) -> None:
            sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("d",)), P("d"))
            ws.live.init = jax.jit(lambda: jnp.arange(8.0), out_shardings=sharding)
            ws.live.sharding = sharding
            abstract = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
            state = optax.adam(1e-3).init({"w": jnp.zeros(8)})
            ws.target("gpu_0/fc:w", abstract)
            ws.target("optimizer", state)
            if extra:
                ws["extra"] = {"kept": 1}

        @made.init
        def init(ws: ec.Workspace) -> None:
            ws["gpu_0/fc:w"] = {"w": ws.live.init()}
            ws["optimizer"] = optax.adam(1e-3).init({"w": jnp.ones(8)})

        return made

    first = job(4, False)
    ec.epoch_limiter(first, 1)
    with ec.CheckpointManager(tmp_path) as manager:
        run(first, manager)
    second = job(2, True)
    ec.epoch_limiter(second, 2)
    with ec.CheckpointManager(tmp_path) as manager:
        _, session, _ = run(second, manager)
    ws = session.workspace()
    assert ws["gpu_0/fc:w"]["w"].sharding == ws.live.sharding
    assert np.asarray(ws["gpu_0/fc:w"]["w"]).tolist() == list(range(8))
    assert type(ws["optimizer"]) is type(optax.adam(1e-3).init({"w": jnp.ones(8)}))
    assert ws["extra"] == {"kept": 1}


def test_another_number_of_nodes(tmp_path: pathlib.Path) -> None:
    """What all nodes had alike comes back on any number; the rest is refused by name, or resharded."""

    def job(nodes: Sequence[str], reshard: Any = None) -> ec.Job:
        made = ec.Job(nodes_to_checkpoint=nodes)

        @made.setup
        def setup(ws: ec.Workspace) -> None:
            ws.target("own", reshard=reshard)

        @made.init
        def init(ws: ec.Workspace) -> None:
            ws["alike"], ws["own"] = {"lr": 0.5}, {"name": ws.node}

        return made

    first = job(["a", "b"])
    ec.epoch_limiter(first, 1)
    with ec.CheckpointManager(tmp_path) as manager:
        run(first, manager)
    three = ["a", "b", "c"]
    with ec.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="'own'"):
        run(job(three), manager)

    def reshard(old: Sequence[Any], old_count: int, new_count: int) -> list[Any]:
        return [{"name": f"{old[i % old_count]['name']}{i}"} for i in range(new_count)]

    third = job(three, reshard)
    ec.epoch_limiter(third, 2)
    with ec.CheckpointManager(tmp_path) as manager:
        _, session, _ = run(third, manager)
    assert [session.workspace(n)["own"]["name"] for n in three] == ["a0", "b1", "a2"]
    assert [session.workspace(n)["alike"] for n in three] == [{"lr": 0.5}] * 3


def test_what_one_node_saved_is_resharded_as_it_is_there(tmp_path: pathlib.Path) -> None:
    """What a run saved with stock Orbax, and what somebody saved by hand, arrays or not."""

    def job(*blobs: str) -> ec.Job:
        made = ec.Job(nodes_to_checkpoint=["a", "b"])
        ec.epoch_limiter(made, 1)

        @made.setup
        def setup(ws: ec.Workspace) -> None:
            for blob in blobs:
                ws.target(blob, reshard=lambda old, *counts: [(old, counts)] * 2)

        return made

    def seen(directory: pathlib.Path, *blobs: str) -> list[Any]:
        with ec.CheckpointManager(directory) as manager:
            _, session, _ = run(job(*blobs), manager)
        return [session.workspace("b")[blob] for blob in blobs]

    with ocp.CheckpointManager(tmp_path / "stock") as stock:
        run(counting_job(Log(), 1), stock)
    (((array,), counts),) = seen(tmp_path / "stock", "array")
    assert (np.asarray(array).tolist(), counts) == ([1.0, 1.0, 1.0], (1, 2))
    by_hand = ocp.args.Composite(tree=ocp.args.StandardSave({"x": 1}), text=ocp.args.JsonSave({"k": [1]}))
    with ec.CheckpointManager(tmp_path / "hand") as manager:
        manager.save(1, args=by_hand)
    assert seen(tmp_path / "hand", "tree", "text") == [
        ([{"x": 1}], (1, 2)),
        ([{"k": [1]}], (1, 2)),
    ]


# -- resuming ------------------------------------------------------------------------------------------------------


def test_a_named_earlier_epoch_is_a_rollback_before_anything_is_trained(tmp_path: pathlib.Path) -> None:
    """A crash right after cannot resume the abandoned branch."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(counting_job(Log(), 5), manager)
    job = counting_job(Log(), 5)
    job.epoch_group.tasks()[0].fn = _raise
    with ec.CheckpointManager(tmp_path) as manager, pytest.raises(errors.TaskError):
        run(job, manager, 2)
    with ec.CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [0, 1, 2]
        _, session, runner = run(counting_job(Log(), 4), manager)
    assert (runner.result.resumed_from, session.workspace()["sum"]) == (2, 10)
    assert len(list(tmp_path.glob("rolled-back-*/*"))) == 3


def _raise(ws: ec.Workspace) -> None:
    raise ZeroDivisionError(f"in epoch {ws.epoch}")


def test_stock_orbax_refuses_to_go_back(tmp_path: pathlib.Path) -> None:
    """Nothing is deleted."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        run(counting_job(Log(), 3), manager)
        with pytest.raises(errors.UnsupportedError, match="going back to checkpoint 1"):
            run(counting_job(Log(), 3), manager, 1)
        assert list(manager.all_steps()) == [0, 1, 2, 3]


def test_a_resume_epoch_that_does_not_exist_lists_those_that_do(managers: Managers) -> None:
    """And changes nothing."""
    manager = managers()
    run(counting_job(Log(), 2), manager)
    with pytest.raises(errors.EpochNotFoundError, match=r"no checkpoint 7; committed: 0, 1, 2"):
        run(counting_job(Log(), 9), manager, 7)
    assert list(manager.all_steps()) == [0, 1, 2]


def test_resume_never_and_must(managers: Managers) -> None:
    """Never refuses a directory that has epochs, must one that has none."""
    manager = managers()
    with pytest.raises(errors.EpochNotFoundError, match="no committed checkpoint"):
        run(counting_job(Log(), 1), manager, resume="must")
    run(counting_job(Log(), 1), manager, resume="never")
    with pytest.raises(ValueError, match=r"resume='never', but .* has epochs up to 1"):
        run(counting_job(Log(), 2), manager, resume="never")
    assert run(counting_job(Log(), 2), manager, resume="must")[0] == 2


def test_a_damaged_newest_epoch_is_trained_again(tmp_path: pathlib.Path) -> None:
    """Automatic resume takes the one before."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(counting_job(Log(), 3), manager)
    path = tmp_path / "3" / "process_0" / "array.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with ec.CheckpointManager(tmp_path) as manager:
        _, session, runner = run(counting_job(Log(), 3), manager)
        assert (runner.result.resumed_from, session.workspace()["sum"]) == (2, 6)
        assert manager.verify(3).ok


@pytest.mark.parametrize("file", ["epoch.json", "process_0/array.safetensors"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_nothing_starts_over_in_a_directory_whose_epochs_are_all_damaged(
    tmp_path: pathlib.Path, file: str, resume: str
) -> None:
    """It is said, and nothing is touched."""
    with ec.CheckpointManager(tmp_path) as manager:
        run(counting_job(Log(), 2), manager)
    for epoch in range(3):
        data = bytearray((tmp_path / str(epoch) / file).read_bytes())
        data[-3] ^= 1
        (tmp_path / str(epoch) / file).write_bytes(data)
    log = Log()
    with ec.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=r"none of|has epochs"):
        run(counting_job(log, 3), manager, resume=resume)
    assert log.events == ["setup"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


def test_an_epoch_that_cannot_be_this_jobs_is_refused_before_anything_runs(tmp_path: pathlib.Path, caplog: Any) -> None:
    """No blob that setup has a target for is in it; if some are, the job has grown and goes on."""
    target = jax.ShapeDtypeStruct((3,), jnp.float32)

    def job_with(log: Log, *targets: str) -> ec.Job:
        job = counting_job(log, 3)
        job.setup(lambda ws: [ws.target(name, target) for name in targets])
        return job

    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.zeros(3)}))
        manager.wait_until_finished()
    log, problem = Log(), r"epoch 1 holds default .* not array, .*another directory"
    with ec.CheckpointManager(tmp_path) as manager:
        with pytest.raises(errors.InvalidArgumentError, match=problem):
            run(job_with(log, "array"), manager)
        assert log.events == ["setup"]
        assert list(manager.all_steps()) == [1]
    with ec.CheckpointManager(tmp_path / "mine") as manager:
        run(counting_job(Log(), 1), manager)
        _, session, runner = run(job_with(Log(), "array", "ema"), manager)
        assert (runner.result.resumed_from, session.workspace()["sum"]) == (1, 6)
        assert "not ema" in caplog.text


# -- saves that fail -----------------------------------------------------------------------------------------------


def broken(tmp_path: pathlib.Path) -> Any:
    """A manager that cannot commit any more: a file has taken the place of its directory."""
    manager = ec.CheckpointManager(tmp_path / "run")
    manager.claim()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").touch()
    return manager


def test_a_save_that_fails_at_every_epoch_still_trains_to_the_end(tmp_path: pathlib.Path) -> None:
    """It is visible, and the end is not silent."""
    log = Log()
    last, session, runner = run(counting_job(log, 4), broken(tmp_path), raise_if_not_saved=False)
    result = runner.result
    assert (result.exit_code, result.unsaved) == (ec.UNSAVED_EXIT_CODE, dict(result.failed_saves)[4])
    assert (last, session.workspace()["sum"], log.events[-1]) == (4, 10, "exit")
    assert result.last_committed_epoch is None
    assert {epoch for epoch, _ in result.failed_saves} == {0, 1, 2, 3, 4}
    assert "Not a directory" in str(result)


def test_failures_can_be_bounded_and_a_lost_last_epoch_can_raise(tmp_path: pathlib.Path) -> None:
    """As asked."""
    log = Log()
    with pytest.raises(errors.SaveError, match="max_consecutive_save_failures=2"):
        run(counting_job(log, 50), broken(tmp_path / "a"), max_consecutive_save_failures=2)
    assert len(log.events) < 20
    with pytest.raises(errors.SaveError, match=r"checkpoint 3 was not committed: it is the last of the run"):
        run(counting_job(Log(), 3), broken(tmp_path / "b"))


class Away(ec.metadata.JsonMetadataHandler):
    """Says that storage cannot be reached."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return False


def test_a_last_epoch_that_is_not_on_storage_is_an_error_and_an_exit_code(managers: Managers) -> None:
    """By default `train` raises, when download and exit have run; the result is there, and its exit code is 74."""
    log, session = Log(), ec.LocalSession()
    runner = ec.JobRunner(counting_job(log, 3), managers(), metadata_handler=Away())
    with pytest.raises(
        errors.SaveError, match=r"checkpoint 3 was not committed: it is the last of the run: .*storage can be reached"
    ):
        runner.train(session)
    assert log.events[-2:] == ["download", "exit"]
    assert runner.result.exit_code == ec.UNSAVED_EXIT_CODE == 74
    assert "storage can be reached" in runner.result.unsaved
    log = Log()
    with pytest.raises(errors.SaveError, match=r"6 saves in a row have failed, .*max_consecutive_save_failures=5"):
        ec.JobRunner(counting_job(log, 50), managers(), metadata_handler=Away()).train(ec.LocalSession())
    assert log.events[-1] == "epoch 5"


@pytest.mark.parametrize(("saves", "code"), [("all", 75), ("none", 74), ("no manager", 75)])
def test_preempted_says_start_again_only_if_the_epoch_is_on_storage(
    tmp_path: pathlib.Path, saves: str, code: int
) -> None:
    """A scheduler that starts it again would lose work that is nowhere: 74 comes first."""
    job = counting_job(Log(), 5)
    job.epoch(lambda ws: os.kill(os.getpid(), signal.SIGTERM) if ws.epoch == 2 else None)
    manager = None if saves == "no manager" else ec.CheckpointManager(tmp_path)
    handler = Away() if saves == "none" else None
    _, _, runner = run(job, manager, metadata_handler=handler, raise_if_not_saved=False)
    assert (runner.result.preempted, runner.result.epoch, runner.result.exit_code) == (True, 2, code)
    if manager is not None:
        manager.close()


def test_without_a_manager_the_exit_code_is_0() -> None:
    """Nothing was to be saved."""
    _, _, runner = run(counting_job(Log(), 1))
    assert (runner.result.exit_code, runner.result.unsaved) == (0, "")


def test_a_last_epoch_that_stock_orbax_deletes_as_worse_is_no_failure(tmp_path: pathlib.Path) -> None:
    """Its options say so; the epoch was saved."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="max")
    with ocp.CheckpointManager(tmp_path / "c", options=options) as manager:
        _, _, runner = run(counting_job(Log(), 3), manager)  # the loss falls: epoch 1 is the best
        assert 3 not in manager.all_steps()
    assert (runner.result.exit_code, runner.result.last_committed_epoch) == (0, 1)


def test_a_full_disk_does_not_stop_training_and_is_named(disk: pathlib.Path) -> None:
    """A real file system of 8 MB; the epochs that fitted stay, and when there is room again saving goes on."""
    job = ec.Job()
    job.init(lambda ws: ws.update(w=jnp.zeros(250_000)))  # 1 MB
    ballast = disk / "ballast"

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        ws["w"] = ws["w"] + 1
        if ws.epoch == 3:
            with contextlib.suppress(errors.SaveError):  # training does not wait for a save: these have failed now
                manager.wait_until_finished()
            ballast.unlink()

    ec.epoch_limiter(job, 5)
    with ec.CheckpointManager(disk / "run", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        ballast.write_bytes(bytes(7_600_000))
        _, _, runner = run(job, manager)
        assert runner.result.last_committed_epoch == 5
        assert {epoch for epoch, _ in runner.result.failed_saves} == {0, 1, 2}
        assert all("No space left" in reason for _, reason in runner.result.failed_saves)
        assert manager.verify(5).ok


class Handler:
    """A metadata handler that does what a test asks for."""

    def __init__(self, **answers: Any):
        self.answers, self.calls = answers, []

    def _do(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer(*arguments) if callable(answer) else answer

    def set_params(self, db_prefix: str, db_type: str, node_names: Any, path_prefix: Any, path_type: Any) -> None:
        self._do("set_params", list(node_names))

    def last_epoch(self, user_epoch: int | None = None) -> Any:
        return self._do("last_epoch")

    def write(self, epoch: int) -> None:
        self._do("write", epoch)

    def report(self, action_name: str, all_stats: Any) -> None:
        self._do("report", action_name, sorted(all_stats))

    def cp_accessible(self, epoch: int | None = None) -> Any:
        return self._do("cp_accessible", epoch) if "cp_accessible" in self.answers else True


@pytest.mark.parametrize("where", ["manager", "runner"])
def test_a_metadata_handler_is_told_of_everything(tmp_path: pathlib.Path, where: str) -> None:
    """Given to the manager or to the runner: nodes, loads, commits with the nodes' times."""
    for epochs in (2, 3):
        handler = Handler()
        own = {"metadata_handler": handler} if where == "manager" else {}
        with ec.CheckpointManager(tmp_path, **own) as manager:
            run(counting_job(Log(), epochs), manager, **({} if own else {"metadata_handler": handler}))
        calls = handler.calls
        assert ("set_params", ["process_0"]) in calls
        assert [c[1] for c in calls if c[0] == "write"] == ([0, 1, 2] if epochs == 2 else [3])
        assert ("report", "checkpoint_save", ["process_0"]) in calls
        assert (("report", "checkpoint_load", ["process_0"]) in calls) == (epochs == 3)


def test_storage_that_is_reported_away_skips_the_save(managers: Managers) -> None:
    """Training goes on; the epochs are listed as failed."""
    handler = Handler(cp_accessible=lambda epoch: epoch not in (1, 2))
    manager = managers()
    _, _, runner = run(counting_job(Log(), 3), manager, metadata_handler=handler)
    assert list(manager.all_steps()) == [0, 3]
    assert [epoch for epoch, _ in runner.result.failed_saves] == [1, 2]


def test_a_handler_that_fails_or_talks_nonsense_harms_nothing(tmp_path: pathlib.Path) -> None:
    """Failures are logged; a nonsensical epoch to resume from is a clear error."""
    bad = OSError("the database is down")
    handler = Handler(set_params=bad, last_epoch=bad, write=bad, report=bad, cp_accessible=bad)
    with ec.CheckpointManager(tmp_path, metadata_handler=handler) as manager:
        last, _, runner = run(counting_job(Log(), 2), manager)
        assert (last, runner.result.last_committed_epoch) == (2, 2)
    for answer in ("seven", -1, 1.5, True):
        with ec.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="last_epoch"):
            run(counting_job(Log(), 3), manager, metadata_handler=Handler(last_epoch=answer))
    with ec.CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [0, 1, 2]
        with pytest.raises(ValueError, match="write"):
            ec.JobRunner(counting_job(Log()), manager, metadata_handler=object())


def test_a_handler_that_knows_less_than_storage_is_no_rollback(tmp_path: pathlib.Path) -> None:
    """It may have died before it wrote; one that knows more than an empty directory is a contradiction."""
    with ec.CheckpointManager(tmp_path / "a") as manager:
        run(counting_job(Log(), 3), manager)
        _, _, runner = run(counting_job(Log(), 4), manager, metadata_handler=Handler(last_epoch=1))
        assert runner.result.resumed_from == 3
        assert list(manager.all_steps()) == [0, 1, 2, 3, 4]
    with (
        ec.CheckpointManager(tmp_path / "b") as manager,
        pytest.raises(errors.EpochNotFoundError, match="the metadata handler says it was saved there"),
    ):
        run(counting_job(Log(), 3), manager, metadata_handler=Handler(last_epoch=1))


# -- bad input -----------------------------------------------------------------------------------------------------


def test_a_task_that_raises_names_node_group_and_epoch(tmp_path: pathlib.Path) -> None:
    """What it raised is the cause, committed epochs are untouched."""
    job = reading_job(9, {}, NODES)

    def bad(ws: ec.Workspace) -> None:
        if ws.epoch == 3:
            raise ZeroDivisionError("no such luck")

    ec.Task(bad, group=job.epoch_group, node="trainer_1")
    with ec.CheckpointManager(tmp_path) as manager:
        with pytest.raises(errors.TaskError, match="task 'bad' of group 'epoch' on node trainer_1 failed in epoch 3"):
            run(job, manager)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [0, 1, 2]
    for phase in ("setup", "init", "download", "exit"):
        job = counting_job(Log(), 1)
        getattr(job, phase)(_raise)
        with pytest.raises(errors.TaskError, match=f"group '{phase}'") as caught:
            run(job)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_manager_of_other_nodes_is_refused(tmp_path: pathlib.Path) -> None:
    """By name; nothing is written."""
    with ec.CheckpointManager(tmp_path, node="reader") as manager, pytest.raises(ValueError, match="reader"):
        run(reading_job(1, {}, NODES), manager)
    with (
        ocp.CheckpointManager(tmp_path / "s") as manager,
        pytest.raises(ValueError, match="stock Orbax keeps no nodes"),
    ):
        run(reading_job(1, {}, NODES), manager)


@pytest.mark.parametrize("kept", [None, ["a"]])
def test_stock_orbax_refuses_a_second_node_that_only_trains(tmp_path: pathlib.Path, kept: Any) -> None:
    """Before anything runs, and also when single blobs are loaded."""
    job, ran = ec.Job(nodes_to_checkpoint=kept), list[str]()
    ec.Task(lambda ws: ran.append("init"), group=job.init_group, node="a")
    ec.Task(lambda ws: None, group=job.epoch_group, node="b")
    with ocp.CheckpointManager(tmp_path) as manager:
        runner = ec.JobRunner(job, manager)
        with pytest.raises(errors.UnsupportedError, match=r"the job's 2 \(a, b\) cannot be checkpointed"):
            runner.train(ec.LocalSession())
        with pytest.raises(errors.UnsupportedError, match="stock Orbax keeps no nodes"):
            runner.load_blobs_from_checkpoints(["w"], 0, ec.LocalSession())
    assert ran == []


@pytest.mark.parametrize("answer", [None, 1, "yes", np.array([True, False])])
def test_a_stop_condition_that_is_no_boolean_is_refused(tmp_path: pathlib.Path, answer: Any) -> None:
    """Names condition and epoch; the epochs before are there."""
    job = counting_job(Log())
    job.stop_when(lambda ctx: answer if ctx.epoch == 2 else False)
    with ec.CheckpointManager(tmp_path) as manager:
        with pytest.raises(errors.InvalidArgumentError, match="epoch 2"):
            run(job, manager)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [0, 1]


def test_what_cannot_be_checkpointed_is_refused_before_training(managers: Managers) -> None:
    """The blob, the leaf and the way out are named."""
    log = Log()
    job = counting_job(log, 1)
    job.init(lambda ws: ws.update(mesh={"m": Mesh(jax.devices(), ("d",))}))
    with pytest.raises(ValueError, match=r"blob 'mesh', leaf 'm'.*ws\.live"):
        run(job, managers())
    assert "epoch 1" not in log.events


def test_a_blob_that_disappears_fails_the_save_and_not_the_training(managers: Managers) -> None:
    """It is named in the result."""
    job = counting_job(Log(), 2)
    job.epoch_group.tasks()[0].fn = lambda ws: ws.pop("array", None) is None or None
    _, _, runner = run(job, managers(), raise_if_not_saved=False)
    failed = [(epoch, "blob 'array'" in reason) for epoch, reason in runner.result.failed_saves]
    assert failed == [(1, True), (2, True)]
    assert runner.result.last_committed_epoch == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"resume": "maybe"}, "resume must be"),
        ({"resume_from": -1}, "at least 0"),
        ({"resume_from": True}, "at least 0"),
        ({"resume_from": 1, "resume": "never"}, "contradicts"),
        ({"deadline_secs": -1}, "deadline_secs"),
        ({"exchange_timeout_secs": 0}, "exchange_timeout_secs"),
        ({"max_consecutive_save_failures": -1}, "max_consecutive_save_failures"),
        ({"include": "abc"}, "include is a sequence"),
        ({"upload_task_group_builder": object()}, "build"),
    ],
)
def test_bad_settings_are_refused(tmp_path: pathlib.Path, how: dict[str, Any], message: str) -> None:
    """At once, by name."""
    with ec.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=message):
        run(counting_job(Log(), 1), manager, **how)


def test_wrong_kinds_of_things_are_refused(tmp_path: pathlib.Path) -> None:
    """Sessions, jobs, managers, groups, tasks."""
    job = counting_job(Log(), 1)
    with pytest.raises(ValueError, match="LocalSession"):
        ec.JobRunner(job).train(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"epochckpt\.Job"):
        ec.JobRunner(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_manager must be"):
        ec.JobRunner(job, object())
    with pytest.raises(ValueError, match="runs tasks and task groups"):
        ec.LocalSession().run(job)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a task is made of a function"):
        ec.Task(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_group must be a TaskGroup"):
        ec.Job(init_group=[])  # type: ignore[arg-type]

    class Bad(ec.UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> Any:
            return None

    with ec.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="must return a TaskGroup"):
        run(job, manager, upload_task_group_builder=Bad())
    with pytest.raises(ValueError, match="one process per node"):
        ec.JobRunner(reading_job(1, {}, NODES)).train(ec.DistributedSession())
    job.compile(ec.DistributedSession)
    with pytest.raises(ValueError, match="compiled for DistributedSession, got a LocalSession"):
        ec.JobRunner(job).train(ec.LocalSession())
    bad = counting_job(Log(), 1)
    bad.epoch(lambda ws: {"loss": 1})
    with pytest.raises(ValueError, match="two tasks returned a metric 'loss'"):
        run(bad)
    bad = counting_job(Log(), 1)
    bad.epoch(lambda ws: {"vector": np.zeros(3)})
    with pytest.raises(ValueError, match="metric 'vector' must be a scalar"):
        run(bad)


def test_the_upload_comes_before_the_download(tmp_path: pathlib.Path) -> None:
    """And is not built for an epoch that is not on storage."""
    log = Log()

    class Upload(ec.UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> ec.TaskGroup:
            log(f"build {epoch} of {list(checkpoint_manager.all_steps())}")
            group = ec.TaskGroup("upload")
            ec.Task(lambda ws: log("upload"), group=group)
            return group

    with ec.CheckpointManager(tmp_path / "a") as manager:
        run(counting_job(log, 1), manager, upload_task_group_builder=Upload())
    assert log.events[3:] == ["build 1 of [0, 1]", "upload", "download", "exit"]
    log.events.clear()
    with pytest.raises(errors.SaveError):
        run(counting_job(log, 1), broken(tmp_path / "b"), upload_task_group_builder=Upload())
    assert log.events[3:] == ["download", "exit"]


def test_a_users_job_may_have_other_bases_and_attributes() -> None:
    """Generic ones, mixins that look at their subclasses, an attribute `scope`."""
    names = []

    class Registered:
        def __init_subclass__(cls, key: str, **arguments: Any):
            super().__init_subclass__(**arguments)
            names.append(key)

    class Mine(ec.Job, Registered, Generic[T], key="mine"):
        def __init__(self) -> None:
            super().__init__()
            self.scope = "all"

    with Mine[int]() as job:
        assert ec.Job.current() is job
    assert names == ["mine"]
    assert job.scope == "all"
