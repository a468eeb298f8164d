"""A whole training run: jobs and their tasks, stop conditions, resume, the runner, and Caffe2's managers.

Promises: a run ends with all that it trained on storage, or its `RunResult` and exit code tell what is not; a run that
is started again goes on after the newest epoch that all nodes can read.
"""

from epochckpt.jobs.job import Cluster, Job, Node, Task, TaskGroup, epoch_limiter
from epochckpt.jobs.result import RunResult
from epochckpt.jobs.runner import JobRunner, UploadTaskGroupBuilder
from epochckpt.jobs.session import DistributedSession, LocalHostScheduler, LocalSession
from epochckpt.jobs.upload import CopyUpload
from epochckpt.jobs.workspace import Workspace

__all__ = [
    "Cluster",
    "CopyUpload",
    "DistributedSession",
    "Job",
    "JobRunner",
    "LocalHostScheduler",
    "LocalSession",
    "Node",
    "RunResult",
    "Task",
    "TaskGroup",
    "UploadTaskGroupBuilder",
    "Workspace",
    "epoch_limiter",
]
