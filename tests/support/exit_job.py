"""A job as a program, in README's form or as `ec.run`: `python -m tests.support.exit_job FORM DIRECTORY EPOCHS`."""

from __future__ import annotations

import sys
import threading

import epochckpt as ec

PAUSE = threading.Event()
EPOCH_SECS = 0.05  # stands for training

form, directory, epochs = sys.argv[1:]
job = ec.Job()


@job.init
def init(ws: ec.Workspace) -> None:
    ws["sum"] = 0


@job.epoch
def train(ws: ec.Workspace) -> None:
    PAUSE.wait(EPOCH_SECS)
    ws["sum"] += ws.epoch
    print(f"trained {ws.epoch}", flush=True)


job.stop_when(ec.stop.max_epochs(int(epochs)))
if form == "ec.run":
    ec.run(job, directory, exit=True)
with ec.CheckpointManager(directory) as manager:
    runner = ec.JobRunner(job, manager, raise_if_not_saved=False)
    runner.train()
sys.exit(runner.result.exit_code)
