"""Jobs on the managers of `ec.caffe2`, in Caffe2's order, by hand; also functions that `tests.worker` runs."""

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
from epochckpt.session import Session
from tests.faults.watching import Op, Watcher, watch

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
    interrupted = None
    if at is not None:
        interrupted = Interrupted(*at[1:])
        watch(directory, interrupted)

    def during(epoch: int) -> None:
        if interrupted is not None and at is not None:
            interrupted.armed = epoch == at[0]

    manager = caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
    return train(manager, ec.LocalSession(), [node], epochs, user_epoch, branch, soft=True, during=during)


def single_job(directory: str, node: str, epochs: int, user_epoch: int | None = None) -> dict[str, Any]:
    """A job whose only node has a manager for one node."""
    manager = caffe2.CheckpointManager(directory, node, "epochckpt")
    return train(manager, ec.LocalSession(), [node], epochs, user_epoch)


class Recorded:
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
    session.run(third.init(nodes))
    try:
        session.run(third.save(3))
        refused = ""
    except errors.UnsupportedError as error:
        refused = str(error)
    total = session.workspace()[TOTAL]
    return {**out, "me": me, "calls": handler.calls, "loaded": loaded, "total": total, "refused": refused}
