"""A whole training run: jobs and their tasks, stop conditions, resume, and the runner.

Promises: a run ends with all that it trained on storage, or its `RunResult` and exit code tell what is not; a run that
is started again goes on after the newest epoch that all nodes can read.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.jobs.job import Cluster, Job, Node, Task, TaskGroup, epoch_limiter
    from epochckpt.jobs.result import RunResult
    from epochckpt.jobs.runner import JobRunner, UploadTaskGroupBuilder
    from epochckpt.jobs.session import DistributedSession, LocalHostScheduler, LocalSession
    from epochckpt.jobs.upload import CopyUpload
    from epochckpt.jobs.workspace import Workspace
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "Cluster": "job",
            "Job": "job",
            "Node": "job",
            "Task": "job",
            "TaskGroup": "job",
            "epoch_limiter": "job",
            "RunResult": "result",
            "JobRunner": "runner",
            "UploadTaskGroupBuilder": "runner",
            "DistributedSession": "session",
            "LocalHostScheduler": "session",
            "LocalSession": "session",
            "CopyUpload": "upload",
            "Workspace": "workspace",
        }
        return lookup(__name__, modules, name)


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
