"""Jobs that the tests of the runner start in real processes; see `tests.worker`."""

from __future__ import annotations

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
        ws.target("weights", {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=ws.live.sharding), "steps": 0})
        number = jax.process_index() if index is None else index
        ws["reader"] = Reader(100 * number)

    @job.init
    def init(ws: ec.Workspace) -> None:
        ws["total"] = 0
        make = jax.jit(lambda: jnp.zeros(8, jnp.float32), out_shardings=ws.live.sharding)
        ws["weights"] = {"w": make(), "steps": 0}

    @job.epoch
    def train(ws: ec.Workspace) -> dict[str, Any]:
        ws["total"] += sum(ws["reader"].take(PER_EPOCH))
        weights = ws["weights"]
        ws["weights"] = {"w": weights["w"] + ws.epoch, "steps": weights["steps"] + 1}
        totals.append(ws["total"])
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
