"""Jobs that upload, for real processes; see `tests.support.worker`."""

from __future__ import annotations

import os
import signal
from typing import Any

import epochckpt as ec
from epochckpt.storage import PosixStore
from tests.support.job_runs import reading_job, summary

NODES = ("a", "b", "c")


def upload(directory: str, destination: str, epochs: int = 3, fail: int | None = None) -> dict[str, Any]:
    """Runs the reading job to its end, and uploads; process `fail` has a full disk at its destination."""
    session = ec.DistributedSession()
    if session.coordinator.process == fail:
        refuse(destination)
    with ec.CheckpointManager(directory) as manager:
        runner = ec.JobRunner(
            reading_job(epochs, []), manager, upload_task_group_builder=ec.CopyUpload(destination, timeout_secs=60)
        )
        try:
            runner.train(session)
        except ec.EpochCheckpointError as error:
            return {"error": [type(error).__name__, str(error)]}
    return summary(runner, session)


def refuse(destination: str) -> None:
    """Data files below `destination` find the disk full from now on."""
    real = PosixStore.open_writer

    def open_writer(self: PosixStore, path: str, size: int) -> Any:
        if self.root == destination and path.endswith(".safetensors"):
            raise OSError(28, os.strerror(28), f"{self.root}/{path}")
        return real(self, path, size)

    PosixStore.open_writer = open_writer  # type: ignore[method-assign]


def killed(directory: str, destination: str, place: str) -> None:
    """Uploads epoch 3 of three nodes, and dies at a place: just before a call of the destination's store."""
    call, ending = {
        "data": ("open_writer", "/b/own.safetensors"),
        "record": ("create", "/c/node.json"),
        "commit": ("create", "/epoch.json"),
        "rename": ("rename", "/3-0"),
        "durable": ("sync_folder", ""),
    }[place]
    real = getattr(PosixStore, call)

    def dying(self: PosixStore, path: str, *args: Any, **kwargs: Any) -> Any:
        here = path.endswith(ending) if ending else path == "" and self.exists("3")
        if self.root == destination and here:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, path, *args, **kwargs)

    with ec.CheckpointManager(directory, node=NODES) as manager:
        group = ec.CopyUpload(destination).build(3, manager)
        setattr(PosixStore, call, dying)
        ec.LocalSession().run(group)
