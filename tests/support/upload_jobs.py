"""Jobs that upload, for real processes; see `tests.support.worker`."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import epochckpt as ec
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.job_runs import reading_job, summary
from tests.support.taps import is_data

NODES = ("a", "b", "c")


def upload(directory: str, destination: str, epochs: int = 3, fail: int | None = None) -> dict[str, Any]:
    """Runs the reading job to its end, and uploads; process `fail` has a full disk at its destination."""
    session = ec.DistributedSession()

    def refuse(call: StoreCall) -> None:
        if session.coordinator.process == fail and call.store.root == destination and is_data(call.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{destination}/{call.path}")

    with Faults().everywhere() as faults, ec.CheckpointManager(directory) as manager:
        faults.before(Store.open_writer, refuse)
        runner = ec.JobRunner(
            reading_job(epochs, []), manager, upload_task_group_builder=ec.CopyUpload(destination, timeout_secs=60)
        )
        try:
            runner.train(session)
        except ec.EpochCheckpointError as error:
            return {"error": [type(error).__name__, str(error)]}
    return summary(runner, session)


def killed(directory: str, destination: str, place: str) -> None:
    """Uploads epoch 3 of three nodes, and dies at a place: just before a call of the destination's store."""
    method, ending = {
        "data": (Store.open_writer, "/b/own.safetensors"),
        "record": (Store.create, "/c/node.json"),
        "commit": (Store.create, "/epoch.json"),
        "rename": (Store.rename, "/3-0"),
        "durable": (Store.sync_folder, ""),
    }[place]

    def is_the_place(call: StoreCall) -> bool:
        if call.store.root != destination:
            return False
        return call.path.endswith(ending) if ending else call.path == "" and call.store.exists("3")

    with Faults().everywhere() as faults, ec.CheckpointManager(directory, node=NODES) as manager:
        group = ec.CopyUpload(destination).build(3, manager)
        faults.before(method, lambda call: os.kill(os.getpid(), signal.SIGKILL), where=is_the_place)
        ec.LocalSession().run(group)
