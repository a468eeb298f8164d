"""Jobs for `test_several_nodes`, one process of them; see `tests.support.worker`."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epochckpt as ec
from tests.support.job_runs import Reader


def outcome(job: ec.Job, directory: str, **how: Any) -> dict[str, Any]:
    """Runs a job; what it raised, after how long, or what became of its saves."""
    with ec.CheckpointManager(directory) as manager:
        runner, session = ec.JobRunner(job, manager, exchange_timeout_secs=120.0, **how), ec.DistributedSession()
        began = time.monotonic()
        try:
            runner.train(session)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "secs": time.monotonic() - began}
        return {"error": "", "failed": runner.result.failed_saves, "epochs": list(manager.all_steps())}


class _NoState:
    def __call__(self, ctx: Any) -> bool:
        return False

    def get_state(self) -> Any:
        if jax.process_index() == 1:
            raise OSError("no state today")

    def set_state(self, state: Any) -> None:
        pass


def state_of_a_condition_fails(directory: str) -> dict[str, Any]:
    """The state of a stop condition cannot be had on one process."""
    job = ec.Job()
    job.init(lambda ws: ws.update(sum=0))
    job.epoch(lambda ws: None)
    job.stop_when(_NoState())
    ec.epoch_limiter(job, 2)
    return outcome(job, directory)


class _Refuses:
    def set_params(self, *args: Any, **kwargs: Any) -> None:
        raise ec.errors.InvalidArgumentError("this directory is not for me")

    def last_epoch(self, user_epoch: int | None = None) -> None:
        return None

    def write(self, epoch: int) -> None:
        pass

    def report(self, action: str, stats: Any) -> None:
        pass

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return True


def handler_refuses(directory: str) -> dict[str, Any]:
    """The metadata handler, which only the primary asks, refuses the directory."""
    job = ec.Job()
    job.init(lambda ws: ws.update(sum=0))
    ec.epoch_limiter(job, 2)
    return outcome(job, directory, metadata_handler=_Refuses())


def reader_on_one(directory: str) -> dict[str, Any]:
    """A blob that is an object with a state on one process, and None on the other."""
    job = ec.Job()
    job.init(lambda ws: ws.update(reader=Reader() if jax.process_index() == 0 else None))
    ec.epoch_limiter(job, 1)
    return outcome(job, directory)


def spread_on_some(directory: str) -> dict[str, Any]:
    """An array of the whole job, of which only one node is to be checkpointed."""
    job = ec.Job(nodes_to_checkpoint=["a"])
    sharding = NamedSharding(Mesh(jax.devices(), ("d",)), P("d"))

    def init(ws: ec.Workspace) -> None:
        ws["array"] = jax.jit(lambda: jnp.zeros(8), out_shardings=sharding)()

    for node in "ab":
        ec.Task(init, group=job.init_group, node=node)
    ec.epoch_limiter(job, 1)
    return outcome(job, directory)


def one_exits(directory: str) -> str:
    """A task of one process calls `sys.exit`."""
    job = ec.Job()
    job.init(lambda ws: ws.update(sum=0))
    job.epoch(lambda ws: sys.exit(3) if (jax.process_index(), ws.epoch) == (0, 2) else None)
    ec.epoch_limiter(job, 5)
    manager = ec.CheckpointManager(directory)
    try:
        ec.JobRunner(job, manager, exchange_timeout_secs=120.0).train(ec.DistributedSession())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
