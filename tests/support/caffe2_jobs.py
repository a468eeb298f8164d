"""Jobs on the managers of `ec.caffe2`, in Caffe2's order, by hand; also functions that `tests.support.worker` runs."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import epochckpt as ec
from epochckpt import caffe2, errors
from epochckpt.jobs.session import Session
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.replace_jobs import NO_EXCHANGE
from tests.support.watching import Op, Watcher, watch

WEIGHTS, BIAS, TOTAL, READER = "gpu_0/fc_w", "gpu_0/fc:b", "total", "reader"
BLOBS = [WEIGHTS, BIAS, TOTAL, READER]
STOPPED = "STOPPED"


class Reader:
    """A data iterator."""

    def __init__(self) -> None:
        self.position = 0

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def seed(node: str) -> int:
    return zlib.crc32(node.encode()) % 1000


def fill(ws: ec.Workspace, epoch: int, branch: int = 0) -> None:
    """The blobs of a node after an epoch: a function of both, and of the branch of the run."""
    value = seed(ws.node) + 1000 * epoch + 100_000 * branch
    ws[WEIGHTS] = {"w": jnp.arange(3000, dtype=jnp.float32) + value}
    ws[BIAS] = np.full(5, value, np.int64)
    ws[TOTAL] = value
    if READER not in ws:
        ws[READER] = Reader()
    ws[READER].position = value


def found(ws: ec.Workspace) -> tuple[int, int]:
    """(branch, epoch) of which the blobs of a node are, all of them."""
    value = int(ws[TOTAL])
    np.testing.assert_array_equal(np.asarray(ws[WEIGHTS]["w"]), np.arange(3000, dtype=np.float32) + value)
    np.testing.assert_array_equal(ws[BIAS], np.full(5, value, np.int64))
    reader = ws[READER]
    assert (reader["position"] if isinstance(reader, dict) else reader.position) == value
    branch, rest = divmod(value - seed(ws.node), 100_000)
    epoch, nothing = divmod(rest, 1000)
    assert nothing == 0
    return branch, epoch


def train(
    manager: Any,
    session: Session,
    nodes: Sequence[str],
    epochs: int,
    user_epoch: int | None = None,
    branch: int = 0,
    soft: bool = False,
    during: Callable[[int], None] = lambda epoch: None,
) -> dict[str, Any]:
    """Trains up to an epoch, in Caffe2's order.

    Args:
        manager: of `ec.caffe2`.
        session: where it runs.
        nodes: the job's.
        epochs: the last epoch.
        user_epoch: to resume from, unless the handler knows better.
        branch: tells the blobs of this run from those of another one.
        soft: a save that fails is noted, and training goes on.
        during: called before every save.
    """
    failed: dict[int, str] = {}

    def save(epoch: int) -> None:
        during(epoch)
        try:
            if not manager.cp_accessible(epoch=epoch):
                failed[epoch] = "not accessible"
                return
            session.run(manager.save(epoch))
            manager.write_checkpoint_metadata(epoch)
            manager.report_checkpoint_stats("checkpoint_save")
        except Exception as error:
            if not soft:
                raise
            failed[epoch] = type(error).__name__

    def everywhere(fn: Callable[[ec.Workspace], Any]) -> ec.TaskGroup:
        group = ec.TaskGroup()
        for node in nodes:
            ec.Task(fn, group=group, node=node)
        return group

    def step(epoch: int) -> None:
        session.run(everywhere(lambda ws: fill(ws, epoch, branch)))

    manager.set_params(nodes=nodes)
    session.run(everywhere(lambda ws: ws.update({READER: Reader()})))  # what our jobs call setup, at every start
    resume = manager.get_resume_from_epoch_id(user_epoch)
    if resume is None:
        step(0)
    session.run(manager.init(nodes, retrieve_from_epoch=resume))
    if resume is None:
        save(0)
    else:
        session.run(manager.load(resume))
        manager.report_checkpoint_stats("checkpoint_load")
        for ws in session.workspaces().values():
            assert found(ws)[1] == resume
    for epoch in range(0 if resume is None else resume, epochs):
        step(epoch + 1)
        save(epoch + 1)
    return {"resumed": resume, "failed": {str(epoch): why for epoch, why in failed.items()}}


def content(directory: str, node: str, epoch: int) -> tuple[int, int] | None:
    """(branch, epoch) of what a node's epoch holds, every blob read and verified; None if there is none."""
    session = ec.LocalSession()
    manager = caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
    if not manager.load_blobs_locally([node], BLOBS, epoch, session):
        return None
    return found(session.workspace(node))


def staging(directory: str | os.PathLike[str], node: str = ".*") -> list[str]:
    """Staging folders of a node's jobs."""
    pattern = re.compile(rf"node-{node}-[0-9a-f]{{16}}\.orbax-checkpoint-tmp")
    return sorted(p.name for p in pathlib.Path(directory).iterdir() if pattern.fullmatch(p.name))


# -- in processes of their own -----------------------------------------------------------------------------------------


class Interrupted(Watcher):
    """Stops or kills this process at the n-th call of a kind, once it is armed."""

    def __init__(self, name: str, path: str, count: int, signum: int):
        self._name, self._path, self._left, self._signum = name, re.compile(path), count, signum
        self.armed = False

    def before(self, op: Op) -> None:
        if self.armed and (not self._name or op.name == self._name) and self._path.search(f"{op.path} -> {op.target}"):
            self._left -= 1
            if self._left == 0:
                if self._signum == signal.SIGSTOP:
                    os.write(1, f"\n{STOPPED}\n".encode())
                os.kill(os.getpid(), self._signum)


def job(
    directory: str,
    node: str,
    epochs: int,
    user_epoch: int | None = None,
    branch: int = 0,
    at: tuple[int, str, str, int, int] | None = None,
    exchange: bool = True,
) -> dict[str, Any]:
    """A job for one node.

    Args:
        directory: shared.
        node: its node.
        epochs: the last epoch.
        user_epoch: to resume from.
        branch: see `train`.
        at: (epoch, call, pattern of its path, count, signal): where it is interrupted.
        exchange: whether the file system can exchange two folders.
    """
    faults = Faults()
    if not exchange:
        faults.fail(Store.exchange, NO_EXCHANGE)
    interrupted = None
    if at is not None:
        _, name, path, count, signum = at
        interrupted = Interrupted(name, path, count, signum)
        watch(directory, interrupted)

    def during(epoch: int) -> None:
        if interrupted is not None and at is not None:
            interrupted.armed = epoch == at[0]

    with faults.everywhere():
        manager = caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
        return train(manager, ec.LocalSession(), [node], epochs, user_epoch, branch, soft=True, during=during)


def single_job(directory: str, node: str, epochs: int, user_epoch: int | None = None) -> dict[str, Any]:
    """A job whose only node has a manager for one node."""
    manager = caffe2.CheckpointManager(directory, node, "epochckpt")
    return train(manager, ec.LocalSession(), [node], epochs, user_epoch)


class Recorded(ec.metadata.AbstractMetadataHandler):
    """A metadata handler that knows what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stats: dict[str, Any] = {}

    def set_params(
        self, db_prefix: str, db_type: str, node_names: Any, path_prefix: Any = None, path_type: Any = None
    ) -> None:
        self.calls.append(f"set_params {os.path.basename(db_prefix)} {db_type} {node_names} {path_prefix} {path_type}")

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        self.calls.append(f"last_epoch {user_epoch}")
        return user_epoch

    def write(self, epoch: int) -> None:
        self.calls.append(f"write {epoch}")

    def report(self, action_name: str, all_stats: Any) -> None:
        self.calls.append(f"report {action_name}")
        self.stats = dict(all_stats)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        self.calls.append(f"cp_accessible {epoch}")
        return True


def distributed(directory: str) -> dict[str, Any]:
    """Every process of a `jax.distributed` job runs its own node's tasks."""
    me = jax.process_index()
    nodes = [f"process_{i}" for i in range(jax.process_count())]
    handler = Recorded()
    manager = caffe2.MultiNodeCheckpointManager(directory, "epochckpt", handler)
    train(manager, ec.DistributedSession(), nodes, 1)
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("saved")
    again = caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
    out = train(again, ec.DistributedSession(), nodes, 2, user_epoch=1)
    multihost_utils.sync_global_devices("resumed")
    session = ec.DistributedSession()
    loaded = again.load_blobs_locally(nodes, [TOTAL], 2, session)
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = jax.make_array_from_callback(
        (jax.device_count(),),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
        lambda index: np.zeros(1, np.float32),
    )
    third = caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
    session.run(ec.Task(lambda ws: ws.update(spread=spread)))
    try:
        session.run(third.init(nodes))
        refused = ""
    except errors.UnsupportedError as error:
        refused = str(error)
    total = session.workspace()[TOTAL]
    return {**out, "me": me, "calls": handler.calls, "loaded": loaded, "total": total, "refused": refused}
