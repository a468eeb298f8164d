"""A job for tests of preemption, one process of it.

    python -m tests.support.preempted_job '{"directory": …, "epochs": …, …}'

Prints a line for every place that a signal could want to hit, and exits with the code of its result.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epochckpt as ec
from tests.support.job_runs import Reader

STEPS = 10
PAUSE = threading.Event()  # never set


def say(**what: Any) -> None:
    os.write(1, f"\nAT {json.dumps(what)}\n".encode())


def make_job(
    epochs: int,
    step_secs: float,
    resumable: bool,
    polls: bool,
    exit_secs: float,
    width: int,
    sigterm: tuple[int, int, int] | None = None,
    held: tuple[int, int] | None = None,
) -> ec.Job:
    """The job; `sigterm`: a process that sends itself one, at an epoch and a step; `held`: where all wait to be told.

    So that a notice comes at a place and not at a time, whatever else the machine does.
    """
    job = ec.Job()

    @job.setup
    def setup(ws: ec.Workspace) -> None:
        sharding = NamedSharding(Mesh(jax.devices(), ("d",)), P("d"))
        ws.live.make = jax.jit(lambda: jnp.ones(width * jax.device_count()), out_shardings=sharding)
        ws.target("weights", jax.ShapeDtypeStruct((width * jax.device_count(),), jnp.float32, sharding=sharding))
        ws["reader"] = Reader(10 * jax.process_index())

        @jax.jit
        def step(weights: jax.Array, number: jax.Array) -> jax.Array:
            return weights * 0.9 + jnp.roll(weights, 1) * 0.05 + weights.mean() * 0.05 + number  # talks to all

        ws.live.step = step

    @job.init
    def init(ws: ec.Workspace) -> None:
        say(place="init")
        ws["weights"], ws["total"], ws["step"] = ws.live.make(), 0, 0

    @job.epoch(resumable=resumable)
    def train(ws: ec.Workspace) -> dict[str, Any]:
        say(place="epoch", epoch=ws.epoch, step=ws["step"])
        while ws["step"] < STEPS:
            at = ws.epoch, ws["step"]
            if sigterm is not None and (jax.process_index(), *at) == tuple(sigterm):
                os.kill(os.getpid(), signal.SIGTERM)
            stops = polls and ws.should_stop()
            while held is not None and at == tuple(held) and not stops:
                PAUSE.wait(0.05)
                stops = ws.should_stop()
            if stops:
                say(place="left", epoch=ws.epoch, step=ws["step"])
                return {}
            (record,) = ws["reader"].take(1)
            ws["total"] += record
            ws["weights"] = ws.live.step(ws["weights"], jnp.float32(ws.epoch))
            ws["weights"].block_until_ready()
            PAUSE.wait(step_secs)  # stands for a longer computation
            ws["step"] += 1
        ws["step"] = 0
        return {"mean": ws["weights"].mean()}

    @job.exit
    def leave(ws: ec.Workspace) -> None:
        say(place="exit")
        end = time.monotonic() + exit_secs
        while time.monotonic() < end:
            PAUSE.wait(0.01)

    job.stop_when(ec.stop.max_epochs(epochs))
    return job


def run(directory: str, deadline_secs: float | None = None, stock: bool = False, **how: Any) -> int:
    manager: Any = ocp.CheckpointManager(directory) if stock else ec.CheckpointManager(directory)
    with manager:
        session = ec.DistributedSession()
        runner = ec.JobRunner(make_job(**how), manager, deadline_secs=deadline_secs, exchange_timeout_secs=60.0)
        say(place="train")
        runner.train(session)
    result, ws = runner.result, session.workspace()
    data = b"".join(np.asarray(s.data).tobytes() for s in ws["weights"].addressable_shards)
    say(
        place="end",
        exit=result.exit_code,
        reason=result.stop_reason,
        epoch=result.epoch,
        partial=result.partial,
        committed=result.last_committed_epoch,
        resumed=result.resumed_from,
        failed=result.failed_saves,
        total=ws["total"],
        hash=hashlib.sha256(data).hexdigest(),
    )
    return result.exit_code


def main() -> None:
    processes, me = int(os.environ["EPOCHCKPT_TEST_NUM_PROCESSES"]), int(os.environ["EPOCHCKPT_TEST_PROCESS_ID"])
    try:
        if processes > 1:
            jax.distributed.initialize(os.environ["EPOCHCKPT_TEST_COORDINATOR"], processes, me)
        say(place="ready")
        code = run(**json.loads(sys.argv[1]))
        if processes > 1:
            jax.distributed.shutdown()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    main()
