"""Caffe2's checkpoint managers, name for name: each node saves its own workspace, and jobs may share a directory.

What Caffe2 runs through a session returns a `Task` or a `TaskGroup` here too, and is done when `session.run` returns:
a save is committed on that node then. Like any task, it joins the group that surrounds the call. Everything else acts
at once. The order is Caffe2's:

    nodes = job.nodes_to_checkpoint() or session.nodes  # a job that names none runs on all of its session
    manager.set_params(nodes=nodes)
    epoch = manager.get_resume_from_epoch_id(user_epoch)
    if epoch is None:  # from scratch
        session.run(job.init_group)
    session.run(manager.init(nodes, retrieve_from_epoch=epoch))
    session.run(manager.save(0) if epoch is None else manager.load(epoch))

A node's epoch lies in `<db_prefix>/<epoch>/<node>/` (see `epochckpt.node_epochs`), one item per blob. The directory is
never created; while it is missing, saves fail. In a `jax.distributed` job every process makes the same calls, runs the
tasks of its own node, and only the primary talks to the metadata handler. The stats that `report_checkpoint_stats`
reports are those of the nodes that run in its process; `JobRunner` reports those of all nodes together.
"""

from __future__ import annotations

from epochckpt.jobs import Job, JobRunner, UploadTaskGroupBuilder, epoch_limiter
from epochckpt.jobs.caffe2_managers import (
    DB_TYPE,
    CheckpointManager,
    MultiNodeCheckpointManager,
    db_name,
    get_ckpt_filename,
)

__all__ = [
    "DB_TYPE",
    "CheckpointManager",
    "Job",
    "JobRunner",
    "MultiNodeCheckpointManager",
    "UploadTaskGroupBuilder",
    "db_name",
    "epoch_limiter",
    "get_ckpt_filename",
]
