"""Jobs of one node that do next to nothing."""

from __future__ import annotations

from typing import Any

import epochckpt as ec


def job_of(epochs: int, epoch: Any = None, **blobs: Any) -> ec.Job:
    """A job of one node with these blobs."""
    job = ec.Job()
    job.init(lambda ws: ws.update(blobs or {"sum": 0}))
    job.epoch(epoch or (lambda ws: None))
    ec.epoch_limiter(job, epochs)
    return job


def run(job: ec.Job, manager: Any = None, **how: Any) -> tuple[ec.RunResult, ec.LocalSession]:
    """Trains, and gives the result with the session, whose workspaces have the blobs."""
    session = ec.LocalSession()
    runner = ec.JobRunner(job, manager, **how)
    runner.train(session)
    return runner.result, session
