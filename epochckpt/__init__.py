"""epochckpt: an epoch-level checkpoint manager for JAX training, with Orbax's interface.

    storage     where bytes lie: a small store interface, POSIX folders, object stores
    format      what the bytes mean: names, records, grids, checksums
    orbax       all we know of stock Orbax: options, handlers, steps, the view that lets it read our epochs
    arrays      one epoch's arrays: plan, snapshot, write, read, restore
    directory   the epochs of one directory: which there are, who may write, how they appear and go
    agreement   how the processes of a job agree
    saving      one save, from the snapshot to the verdict, with the claim before it and retention after it
    tiers       an epoch in more than one place: copies, and the mirror of a directory
    manager     what a user does to a directory: save, restore, delete, follow
    convert     epochs as files of other programs, and back: safetensors, Hugging Face, flax, torch, plain Orbax
    v1          the same in Orbax's v1 style
    jobs        a whole run: job, stop conditions, resume, the runner
    caffe2      Caffe2's managers and names, over jobs
    inspection  look, compare, tidy
    cli         the command `epochckpt`

A package imports only packages above it in this list; `lint-imports` checks it. Beside them lie the
modules that users import (`errors`, `options`, `args`, `flags`, `stop`, `policy`, `metadata`) and a few
private helpers of all packages (`_threads`, `_monitoring`, `_progress`, `_collector`, `_lazy`, `_metrics`, `_renaming`,
`_text`, `_units`, `_durations`, `_settings`). What takes long to import (jax, Orbax) is imported when it is used, see
`_lazy`.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt import args, caffe2, errors, flags, metadata, policy, stop
    from epochckpt import v1 as v1
    from epochckpt.convert.export import Exported, export
    from epochckpt.convert.import_files import ImportedLeaf, ImportPlan, import_, plan_import
    from epochckpt.errors import EpochCheckpointError, EpochDeletedError
    from epochckpt.inspection.directory import inspect
    from epochckpt.inspection.runs import inspect_runs
    from epochckpt.jobs import (
        Cluster,
        CopyUpload,
        DistributedSession,
        Job,
        JobRunner,
        LocalHostScheduler,
        LocalSession,
        Node,
        RunResult,
        Task,
        TaskGroup,
        UploadTaskGroupBuilder,
        Workspace,
        epoch_limiter,
    )
    from epochckpt.jobs.result import FENCED_OFF_EXIT_CODE, PREEMPTED_EXIT_CODE, UNSAVED_EXIT_CODE
    from epochckpt.jobs.runner import run
    from epochckpt.manager import CheckpointManager, EpochStatus, NodeStatus, SaveResult, Verification
    from epochckpt.manager.evaluator import attach_metrics, follow
    from epochckpt.manager.repair import repair_head, repair_view
    from epochckpt.options import StorageOptions
    from epochckpt.v1 import training
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "args": "",
            "caffe2": "",
            "errors": "",
            "flags": "",
            "metadata": "",
            "policy": "",
            "stop": "",
            "v1": "",
            "EpochCheckpointError": "errors",
            "EpochDeletedError": "errors",
            "inspect": "inspection.directory",
            "inspect_runs": "inspection.runs",
            "Cluster": "jobs",
            "CopyUpload": "jobs",
            "DistributedSession": "jobs",
            "Job": "jobs",
            "JobRunner": "jobs",
            "LocalHostScheduler": "jobs",
            "LocalSession": "jobs",
            "Node": "jobs",
            "RunResult": "jobs",
            "Task": "jobs",
            "TaskGroup": "jobs",
            "UploadTaskGroupBuilder": "jobs",
            "Workspace": "jobs",
            "epoch_limiter": "jobs",
            "run": "jobs.runner",
            "FENCED_OFF_EXIT_CODE": "jobs.result",
            "PREEMPTED_EXIT_CODE": "jobs.result",
            "UNSAVED_EXIT_CODE": "jobs.result",
            "CheckpointManager": "manager",
            "EpochStatus": "manager",
            "NodeStatus": "manager",
            "SaveResult": "manager",
            "Verification": "manager",
            "attach_metrics": "manager.evaluator",
            "follow": "manager.evaluator",
            "Exported": "convert.export",
            "export": "convert.export",
            "ImportedLeaf": "convert.import_files",
            "ImportPlan": "convert.import_files",
            "import_": "convert.import_files",
            "plan_import": "convert.import_files",
            "repair_head": "manager.repair",
            "repair_view": "manager.repair",
            "StorageOptions": "options",
            "training": "v1",
        }
        return lookup(__name__, modules, name)


__version__ = "0.1.0"

__all__ = [
    "FENCED_OFF_EXIT_CODE",
    "PREEMPTED_EXIT_CODE",
    "UNSAVED_EXIT_CODE",
    "CheckpointManager",
    "Cluster",
    "CopyUpload",
    "DistributedSession",
    "EpochCheckpointError",
    "EpochDeletedError",
    "EpochStatus",
    "Exported",
    "ImportPlan",
    "ImportedLeaf",
    "Job",
    "JobRunner",
    "LocalHostScheduler",
    "LocalSession",
    "Node",
    "NodeStatus",
    "RunResult",
    "SaveResult",
    "StorageOptions",
    "Task",
    "TaskGroup",
    "UploadTaskGroupBuilder",
    "Verification",
    "Workspace",
    "args",
    "attach_metrics",
    "caffe2",
    "epoch_limiter",
    "errors",
    "export",
    "flags",
    "follow",
    "import_",
    "inspect",
    "inspect_runs",
    "metadata",
    "plan_import",
    "policy",
    "repair_head",
    "repair_view",
    "run",
    "stop",
    "training",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
