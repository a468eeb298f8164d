"""Jobs that the tests of the runner start in real processes; see `tests.support.worker`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epochckpt as ec

RECORDS, PER_EPOCH = 10, 3


class Reader:
    """A data reader with a state: gives the records 0, 1, …, 9 and begins again."""

    def __init__(self, offset: int = 0):
        self.position, self.offset = 0, offset

    def take(self, count: int) -> list[int]:
        out = [(self.position + i) % RECORDS + self.offset for i in range(count)]
        self.position = (self.position + count) % RECORDS
        return out

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = int(state["position"])


def reading_job(epochs: int, totals: list[Any], index: int | None = None) -> ec.Job:
    """Every node reads 3 of 10 records per epoch into a running total; `weights` are spread over the whole job."""
    job = ec.Job()

    @job.setup
    def setup(ws: ec.Workspace) -> None:
        mesh = Mesh(jax.devices(), ("d",))
        ws.live.sharding = NamedSharding(mesh, P("d"))
        ws.target("weights", {"w": jax.ShapeDtypeStruct((24,), jnp.float32, sharding=ws.live.sharding), "steps": 0})
        number = jax.process_index() if index is None else index
        ws["reader"] = Reader(100 * number)

    @job.init
    def init(ws: ec.Workspace) -> None:
        ws["total"], ws["counts"] = 0, (0, {"epochs": (0,)})
        make = jax.jit(lambda: jnp.zeros(24, jnp.float32), out_shardings=ws.live.sharding)
        ws["weights"] = {"w": make(), "steps": 0}

    @job.epoch
    def train(ws: ec.Workspace) -> dict[str, Any]:
        ws["total"] += sum(ws["reader"].take(PER_EPOCH))
        weights = ws["weights"]
        ws["weights"] = {"w": weights["w"] + ws.epoch, "steps": weights["steps"] + 1}
        totals.append(ws["total"])
        before, inner = ws["counts"]
        ws["counts"] = (before + 1, {"epochs": inner["epochs"] + (ws.epoch,)})  # tuples come back as tuples
        ws["temporary"] = object()
        return {"total": ws["total"]}

    ec.epoch_limiter(job, epochs)
    return job


def summary(runner: ec.JobRunner, session: Any) -> dict[str, Any]:
    result = runner.result
    return {
        "epoch": result.epoch,
        "reason": result.stop_reason,
        "committed": result.last_committed_epoch,
        "resumed": result.resumed_from,
        "exit": result.exit_code,
        "finished": result.finished,
        "failed": [list(f) for f in result.failed_saves],
    }


def read(directory: str, epochs: int, resume_from: int | None = None, stock: bool = False) -> dict[str, Any]:
    """Runs the reading job in this process of a job."""
    totals: list[Any] = []
    session = ec.DistributedSession()
    manager: Any = ocp.CheckpointManager(directory) if stock else ec.CheckpointManager(directory)
    runner = ec.JobRunner(reading_job(epochs, totals), manager, resume_from)
    runner.train(session)
    steps = list(manager.all_steps())
    manager.close()
    ws = session.workspace()
    (weights,) = {float(v) for s in ws["weights"]["w"].addressable_shards for v in np.asarray(s.data).ravel()}
    more = {"weights": weights, "steps": ws["weights"]["steps"], "position": ws["reader"].position, "all": steps}
    return {"totals": totals, "total": ws["total"], **more, **summary(runner, session)}


def read_locally(directory: str, epochs: int, resume_from: int | None = None) -> dict[str, Any]:
    """The reading job with the nodes of a job of processes, all in this process: no arrays that are spread."""
    totals: dict[str, list[int]] = {}
    session = ec.LocalSession()
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(node_job(epochs, totals), manager, resume_from)
        runner.train(session)
    return {"totals": totals, **summary(runner, session)}


def node_job(epochs: int, totals: dict[str, list[int]]) -> ec.Job:
    """Three named nodes, each with a reader and a running total."""
    job = ec.Job()

    def setup(ws: ec.Workspace) -> None:
        ws["reader"] = Reader(100 * int(ws.node[-1]))

    def init(ws: ec.Workspace) -> None:
        ws["total"], ws["array"] = 0, np.zeros(3)

    def train(ws: ec.Workspace) -> None:
        ws["total"] += sum(ws["reader"].take(PER_EPOCH))
        ws["array"] = ws["array"] + ws["total"]
        totals.setdefault(ws.node, []).append(ws["total"])

    with ec.Cluster() as cluster:
        for number in range(3):
            with ec.Node(f"trainer_{number}"):
                ec.Task(setup, group=job.setup_group)
                ec.Task(init, group=job.init_group)
                ec.Task(train, group=job.epoch_group)
    assert cluster.nodes() == ["trainer_0", "trainer_1", "trainer_2"]
    ec.epoch_limiter(job, epochs)
    return job


def read_as_nodes(directory: str, epochs: int, resume_from: list[int | None]) -> list[dict[str, Any]]:
    """The job of three named nodes on three processes, from several resume epochs, one run after the other."""
    out = []
    for named in resume_from:
        totals: dict[str, list[int]] = {}
        session = ec.DistributedSession()
        with ec.CheckpointManager(directory) as manager:
            runner = ec.JobRunner(node_job(epochs, totals), manager, named)
            runner.train(session)
        out.append({"totals": totals, **summary(runner, session)})
    return out


def stop_on_one(directory: str, who: int, when: int) -> dict[str, Any]:
    """A condition that is true on one process only."""
    job = reading_job(50, [])
    job.stop_when(lambda ctx: jax.process_index() == who and ctx.epoch == when)
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job, manager)
        session = ec.DistributedSession()
        runner.train(session)
    return summary(runner, session)


def one_stays_away(directory: str, who: int) -> dict[str, Any]:
    """A process that is stopped in its second epoch; the others raise, and say so."""
    job = reading_job(50, [])

    def stay(ws: ec.Workspace) -> None:
        if (jax.process_index(), ws.epoch) == (who, 2):
            os.kill(os.getpid(), signal.SIGSTOP)

    job.epoch(stay)
    manager = ec.CheckpointManager(directory)
    runner = ec.JobRunner(job, manager, exchange_timeout_secs=8.0)
    try:
        runner.train(ec.DistributedSession())
    except ec.EpochCheckpointError as error:
        print("it has raised", flush=True)
        return {"error": str(error), "type": type(error).__name__}
    return {"error": None}


def load_by_one(directory: str) -> list[Any]:
    """The primary alone loads from the directory between two runs of all processes."""
    epochs = list[Any]()
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(restore_timeout_secs=15.0)) as manager:
        for limit in (2, 4):
            job = ec.Job(stop_conditions=[ec.stop.max_epochs(limit)])
            job.init(lambda ws: ws.update(w=0))
            job.epoch(lambda ws: ws.update(w=ws["w"] + 1))
            runner = ec.JobRunner(job, manager, exchange_timeout_secs=90.0)
            epochs.append(runner.train(ec.DistributedSession()))
            if jax.process_index() == 0:
                with contextlib.suppress(ec.errors.CoordinationTimeoutError):  # the others make no such call
                    runner.load_blobs_from_checkpoints(["w"], 2, ec.DistributedSession())
    return epochs


def one_raises(directory: str, who: int, phase: str) -> dict[str, Any]:
    """A task that raises on one process only."""
    job = reading_job(50, [])

    def bad(ws: ec.Workspace) -> None:
        if jax.process_index() == who and ws.epoch in (0, 2):
            raise ZeroDivisionError("no such luck")

    ec.Task(bad, group=getattr(job, f"{phase}_group"))
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job, manager, exchange_timeout_secs=30.0)
        try:
            runner.train()
        except ec.errors.TaskError as error:
            return {"node": error.node, "group": error.group, "epoch": error.epoch, "text": str(error)}
    return {}


def on_other_nodes(directory: str, epochs: int, reshard: bool) -> dict[str, Any]:
    """The reading job on another number of processes, with or without a way to make new states."""
    totals: list[Any] = []
    job = reading_job(epochs, totals)

    @job.setup
    def more(ws: ec.Workspace) -> None:
        if reshard:
            ws.target("reader", reshard=lambda old, n, m: [old[0]] * m)
            ws.target("total", reshard=lambda old, n, m: [sum(old) if i == 0 else 0 for i in range(m)])

    session = ec.DistributedSession()
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job, manager)
        try:
            runner.train(session)
        except ec.errors.InvalidArgumentError as error:
            return {"error": str(error)}
    weights = session.workspace()["weights"]
    values = sorted({float(v) for s in weights["w"].addressable_shards for v in np.asarray(s.data).ravel()})
    return {"totals": totals, "weights": values, "steps": weights["steps"], **summary(runner, session)}


def read_alone(directory: str, number: int, runs: list[tuple[int, int | None]]) -> list[list[int]]:
    """Runs of a job of one node, of several that share a directory in Caffe2's way: (epochs, epoch to resume from)."""
    return [_read_alone(directory, number, epochs, epoch) for epochs, epoch in runs]


def _read_alone(directory: str, number: int, epochs: int, epoch: int | None) -> list[int]:
    totals: dict[str, list[int]] = {}
    job, name = ec.Job(), f"trainer_{number}"

    def train(ws: ec.Workspace) -> None:
        ws["total"] += sum(ws["reader"].take(PER_EPOCH))
        totals.setdefault(ws.node, []).append(ws["total"])

    with ec.Node(name):
        ec.Task(lambda ws: ws.update(reader=Reader(100 * number)), group=job.setup_group)
        ec.Task(lambda ws: ws.update(total=0), group=job.init_group)
        ec.Task(train, group=job.epoch_group)
    ec.epoch_limiter(job, epochs)
    manager = ec.caffe2.CheckpointManager(directory, name, "epochckpt")
    ec.JobRunner(job, manager, epoch).train(ec.LocalSession())
    return totals[name]


def two_trainers_and_a_reader(epochs: int) -> ec.Job:
    """A job whose third node only reads: `init_group` does not use it, so it is not checkpointed."""
    with ec.Job() as job:
        ec.Task(lambda ws: ws.update(buffer=object()), group=job.setup_group, node="reader_0")
        for node in ("trainer_0", "trainer_1"):
            ec.Task(lambda ws: ws.update(total=0), group=job.init_group, node=node)
            ec.Task(lambda ws: ws.update(total=ws["total"] + 1), node=node)
        # what a node calls so need not be alike on the other one: each saves by itself
        ec.Task(lambda ws: ws.update(own=1), group=job.init_group, node="trainer_0")
        ec.Task(lambda ws: ws.update(own=Reader(7)), group=job.init_group, node="trainer_1")
        ec.Task(lambda ws: None, node="reader_0")
    ec.epoch_limiter(job, epochs)
    return job


def read_with_a_node_that_is_not_checkpointed(directory: str) -> dict[str, Any]:
    """One process of three; goes on after two epochs."""
    for epochs, epoch in ((2, None), (4, 2)):
        session = ec.DistributedSession()
        manager = ec.caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
        runner = ec.JobRunner(two_trainers_and_a_reader(epochs), manager, epoch)
        runner.train(session)
    loaded = [runner.load_blobs_from_checkpoints(["total"], e, session) for e in (9, 1)]
    return {"loaded": loaded, "total": session.workspace().get("total"), **summary(runner, session)}


def read_in_caffe2s_way(directory: str, epochs: int) -> dict[str, Any]:
    """One process of a job of three named nodes with Caffe2's manager and a database."""
    totals: dict[str, list[int]] = {}
    session = ec.DistributedSession()
    handler = ec.metadata.SqliteMetadataHandler(f"{directory}/runs.sqlite")
    manager = ec.caffe2.MultiNodeCheckpointManager(directory, "epochckpt", handler)
    runner = ec.JobRunner(node_job(epochs, totals), manager)
    runner.train(session)
    return {"totals": totals, **summary(runner, session)}


def wrong_session() -> str:
    """A session for one process in a job of several."""
    try:
        ec.LocalSession()
    except ec.errors.InvalidArgumentError as error:
        return str(error)
    return ""


def one_after_the_other(directory: str, functions: list[str]) -> dict[str, Any]:
    """Functions of this module, each with a directory of its own: starting processes takes longer than they do."""
    return {name: globals()[name](f"{directory}/{name}") for name in functions}


def stop_on_the_word_of_one_node(directory: str) -> list[dict[str, Any]]:
    """Jobs of two named nodes that end when a task's output, or a blob, of the second one says so, or nobody's."""

    def job_of(condition: Callable[[ec.Job, ec.Task], Any]) -> ec.Job:
        with ec.Job() as job:
            for node in ("trainer_0", "trainer_1"):
                ec.Task(lambda ws: ws.update(count=0), group=job.init_group, node=node)
            with ec.Node("trainer_0"):
                ec.Task(lambda ws: ws.update(count=ws["count"] + 1))
            with ec.Node("trainer_1"):
                task = ec.Task(lambda ws: ws.update(done=ws.epoch == 3) or ws["done"])
        job.add_stop_condition(condition(job, task))
        ec.epoch_limiter(job, 5)
        return job

    conditions: list[Callable[[ec.Job, ec.Task], Any]] = [
        lambda job, task: task,
        lambda job, task: "done",
        lambda job, task: "trainer_1/done",
        lambda job, task: "nobody's",
        lambda job, task: ec.Task(lambda ws: True, group=job.exit_group),
    ]
    out = []
    for number, condition in enumerate(conditions):
        with ec.CheckpointManager(f"{directory}/{number}") as manager:
            runner = ec.JobRunner(job_of(condition), manager)
            try:
                runner.train(session := ec.DistributedSession())
            except ec.errors.InvalidArgumentError as error:
                out.append({"error": str(error)})
            else:
                out.append(summary(runner, session))
    return out


def save_beside(directory: str) -> list[Any]:
    """A run in which another session is loaded and saved, as an epoch of the run's and as a later one."""
    session, other = ec.DistributedSession(), ec.DistributedSession()

    def during(ws: ec.Workspace) -> None:
        if ws.epoch == 3:
            assert runner.load_blobs_from_checkpoints(["w"], 1, other)
            runner.save_checkpoints(3, session)
            runner.save_checkpoints(50, other)

    job = ec.Job()
    job.init(lambda ws: ws.update(w=10 * jax.process_index()))
    job.epoch(during)
    job.epoch(lambda ws: ws.update(w=ws["w"] + 1))
    ec.epoch_limiter(job, 5)
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job, manager)
        runner.train(session)
        found = []
        for epoch in (0, 1, 2, 3, 4, 5, 50):
            assert runner.load_blobs_from_checkpoints(["w"], epoch, other)
            found.append(other.workspace()["w"])
        return [found, runner.result.last_committed_epoch, list(runner.result.failed_saves)]


def save_without_a_blob_of_one(directory: str) -> list[Any]:
    """A save in the middle of an epoch in which one process has no blob to save."""

    def during(ws: ec.Workspace) -> None:
        if ws.epoch == 2:
            value = ws["w"]
            if jax.process_index() == 1:
                del ws["w"]
            with heard_warnings() as said:
                runner.save_checkpoints(2, session)
            ws["w"] = value
            warned.extend(said)

    warned: list[str] = []
    job = ec.Job()
    job.init(lambda ws: ws.update(w=jax.process_index()))
    job.epoch(during)
    ec.epoch_limiter(job, 3)
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(job, manager)
        runner.train(session := ec.DistributedSession())
        return [warned, runner.result.last_committed_epoch, list(runner.result.failed_saves)]


def unsaved_on_one(directory: str) -> str:
    """An epoch task makes a blob on one process only, and that is an error."""
    job = ec.Job()
    job.init(lambda ws: ws.update(w=0))
    job.epoch(lambda ws: ws.update(momentum=1) if jax.process_index() == 1 else None)
    ec.epoch_limiter(job, 2)
    with ec.CheckpointManager(directory) as manager:
        try:
            ec.JobRunner(job, manager, unsaved_blobs="error").train(ec.DistributedSession())
        except ec.errors.InvalidArgumentError as error:
            return str(error)
    return ""


def condition_raises_on_one(directory: str) -> list[Any]:
    """A stop condition of the user's own class raises on process 1; setup names a blob that only process 0 makes."""

    class OnOne(ec.stop.Condition):
        def holds(self, ctx: ec.stop.Context) -> bool:
            return bool(1 // (1 - jax.process_index()))

    job = ec.Job(stop_conditions=[OnOne()])
    job.setup(lambda ws: ws.target("first", reshard=lambda old, n, m: old))
    job.init(lambda ws: ws.update(first=1) if jax.process_index() == 0 else ws.update(second=2))
    job.epoch(lambda ws: None)
    with ec.CheckpointManager(directory) as manager:
        try:
            ec.JobRunner(job, manager).train(ec.DistributedSession())
        except (ZeroDivisionError, ec.errors.CoordinationError) as error:
            return [str(error), error.__notes__]
    return []


def stock_with_unlike_blobs(directory: str) -> dict[str, Any]:
    """Jobs with stock Orbax, in which a blob is something else on each process: when init has run, later, or never."""
    here = jax.process_index()

    def second(ws: ec.Workspace) -> None:
        ws["x"] = 0 if ws.epoch == 2 and here == 1 else np.zeros(3)

    jobs: dict[str, dict[str, Any]] = {
        "an array and a number": {"init": lambda ws: ws.update(x=0 if here else np.zeros(3))},
        "an array and nothing": {"init": lambda ws: None if here else ws.update(x={"w": np.zeros(3)})},
        "in the second epoch": {"init": lambda ws: ws.update(x=np.zeros(3)), "epoch": second},
        "values of each node": {"init": lambda ws: None if here else ws.update(x=[7])},
    }
    out: dict[str, Any] = {}
    for name, tasks in jobs.items():
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(3)])
        job.init(lambda ws: ws.update(own=here))
        job.init(tasks["init"])
        job.epoch(tasks.get("epoch", lambda ws: None))
        with ocp.CheckpointManager(f"{directory}/{name}") as manager:
            try:
                runner = ec.JobRunner(job, manager, exchange_timeout_secs=20.0)
                runner.train(session := ec.DistributedSession())
            except (ec.errors.InvalidArgumentError, ec.errors.CoordinationError) as error:
                out[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            found = ec.DistributedSession()
            assert runner.load_blobs_from_checkpoints(["own", "x"], 3, found)
            x = found.workspace()["x"]
            out[name] = {"x": x.tolist() if isinstance(x, np.ndarray) else x, "own": found.workspace()["own"]}
            out[name] |= summary(runner, session)
    return out


def go_on_with_arrays(directory: str, epochs: int, targets: bool, stock: bool = False) -> dict[str, Any]:
    """Trains arrays that lie on all devices of the job, and one on the first device; with or without targets.

    Another one lies on no device, and never has a target.
    """
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shardings = {"spread": NamedSharding(mesh, P("x"))} | ({} if stock else {"alone": NamedSharding(mesh, P())})
    job = ec.Job()

    @job.setup
    def declare(ws: ec.Workspace) -> None:
        for name, sharding in shardings.items() if targets else ():
            ws.target(name, {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)})

    @job.init
    def make(ws: ec.Workspace) -> None:
        values = np.arange(8, dtype=np.float32)
        ws["spread"] = {"w": jax.make_array_from_callback((8,), shardings["spread"], lambda index: values[index])}
        if not stock:
            ws["alone"] = {"w": jax.device_put(values, jax.local_devices()[0])}
            ws["unplaced"] = jnp.asarray(values)

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        for name in shardings:
            ws[name] = jax.tree.map(lambda array: array + 1, ws[name])

    ec.epoch_limiter(job, epochs)
    manager: Any = ocp.CheckpointManager(directory) if stock else ec.CheckpointManager(directory)
    with manager, heard_warnings() as said:
        runner = ec.JobRunner(job, manager)
        try:
            runner.train()
        except ec.errors.InvalidArgumentError as error:
            return {"error": str(error), "said": said}
        found = {name: runner.workspace[name]["w"] for name in shardings}
        unplaced = [value.committed for name, value in runner.workspace.items() if name == "unplaced"]
    forms = {name: str(getattr(array, "sharding", "NumPy")) for name, array in found.items()}
    shards = {n: getattr(a, "addressable_shards", None) for n, a in found.items()}
    least = {n: float(np.min(found[n] if s is None else np.asarray(s[0].data))) for n, s in shards.items()}
    return {
        "forms": forms,
        "least": least,
        "said": said,
        "resumed": runner.result.resumed_from,
        "unplaced": unplaced,
    }


@contextlib.contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """The warnings that are logged meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
