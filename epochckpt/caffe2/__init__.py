"""Caffe2's checkpoint managers, name for name: each node saves its own workspace, and jobs may share a directory.

The methods that Caffe2 runs through a session return a `Task` or a `TaskGroup` here, too. When `session.run` returns,
the task is done: a save is committed on its node. Like any task, it joins the group that surrounds the call. All other
methods act at once. The order of calls is Caffe2's:

    nodes = job.nodes_to_checkpoint() or session.nodes  # a job that names none runs on all of its session
    manager.set_params(nodes=nodes)
    epoch = manager.get_resume_from_epoch_id(user_epoch)
    if epoch is None:  # from scratch
        session.run(job.init_group)
    session.run(manager.init(nodes, retrieve_from_epoch=epoch))
    session.run(manager.save(0) if epoch is None else manager.load(epoch))

A node's epoch lies in `<db_prefix>/<epoch>/<node>/`, one item per blob. The directory is never created; while it is
missing, saves fail. In a `jax.distributed` job every process makes the same calls and runs the tasks of its own node;
only the primary calls the metadata handler. `report_checkpoint_stats` reports the stats of the nodes that run in its
process; `JobRunner` reports those of all nodes together.
"""

from epochckpt.caffe2.backend import Caffe2Backend
from epochckpt.caffe2.managers import (
    DB_TYPE,
    CheckpointManager,
    Manager,
    MultiNodeCheckpointManager,
    db_name,
    get_ckpt_filename,
)
from epochckpt.caffe2.upload import node_upload
from epochckpt.jobs import Job, JobRunner, UploadTaskGroupBuilder, epoch_limiter
from epochckpt.jobs.backends import backend_of
from epochckpt.jobs.upload import upload_task

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

# `JobRunner` and `CopyUpload` take these managers, too; jobs itself knows nothing of them.
backend_of.register(Manager, Caffe2Backend)
upload_task.register(Manager, node_upload)
