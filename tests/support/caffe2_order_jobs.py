"""The order of calls in the docstring of `ec.caffe2`, as it stands there, run in processes."""

from __future__ import annotations

import textwrap
from typing import Any

import jax
import numpy as np

import epochckpt as ec
from epochckpt import caffe2, errors
from epochckpt.jobs.session import Session


def order() -> str:
    """The code in the docstring."""
    text = caffe2.__doc__ or ""
    lines = text.splitlines()
    code = [line for line in lines if line.startswith("    ")]
    return textwrap.dedent("\n".join(code))


def follow(job: ec.Job, manager: Any, session: Session, user_epoch: int | None = None) -> list[int]:
    """Runs that code; gives the totals of this process's nodes."""
    exec(order(), {"job": job, "manager": manager, "session": session, "user_epoch": user_epoch})
    return [workspace["total"] for workspace in session.workspaces().values()]


def job_of(nodes: list[str]) -> ec.Job:
    """A job of these nodes, or of none."""
    with ec.Job() as job:
        for node in nodes or [None]:
            ec.Task(lambda ws: ws.update(total=len(ws.node)), group=job.init_group, node=node)
            ec.Task(lambda ws: ws.update(total=ws["total"] + 1), node=node)
    return job


def in_processes(directories: list[str]) -> dict[str, Any]:
    """With named nodes and without; then what is refused."""
    from jax.experimental import multihost_utils

    found: dict[str, Any] = {"totals": []}
    for directory, nodes in zip(directories, (["b", "aaa"], []), strict=True):
        for user_epoch in (None, 0):
            manager, session = caffe2.MultiNodeCheckpointManager(directory, "epochckpt"), ec.DistributedSession()
            job = job_of(nodes)
            found["totals"].append(follow(job, manager, session, user_epoch))
            session.run(job.epoch_group)
            session.run(manager.save(1))
            multihost_utils.sync_global_devices(f"saved {directory} {user_epoch}")
        found["loaded"] = manager.load_blobs_locally(nodes or session.nodes, ["total"], 1, session)
    try:
        ec.DistributedSession().run(ec.Task(lambda ws: None, node="aaa"))
    except errors.InvalidArgumentError as error:
        found["one of two"] = str(error)

    job, trained = ec.Job(), []

    @job.init
    def init(ws: ec.Workspace) -> None:
        sharding = jax.sharding.NamedSharding(
            jax.make_mesh((jax.device_count(),), ("x",)), jax.sharding.PartitionSpec("x")
        )
        ws["own"] = 1
        ws["wide"] = jax.make_array_from_callback(
            (jax.device_count(),), sharding, lambda index: np.zeros(1, np.float32)
        )

    job.epoch(lambda ws: trained.append(ws.epoch))
    ec.epoch_limiter(job, 2)
    manager = caffe2.MultiNodeCheckpointManager(directories[0], "epochckpt")
    try:
        ec.JobRunner(job, manager, raise_if_not_saved=False).train(ec.DistributedSession())
    except errors.UnsupportedError as error:
        found["spread"] = str(error)
    found["trained"] = trained
    return found
