"""epochckpt: an epoch-level checkpoint manager for JAX training, with Orbax's interface.

- `storage`: where bytes lie. A small store interface, POSIX folders, object stores.
- `format`: what the bytes mean. Names, records, grids, checksums.
- `orbax`: everything about stock Orbax. Options, handlers, its steps, and the view that lets it read our epochs.
- `arrays`: the arrays of one epoch. Plan, snapshot, write, read, restore.
- `directory`: the epochs of one directory. The list of them, who may write, how an epoch appears and goes.
- `agreement`: how the processes of a job agree.
- `saving`: one save, from the snapshot to the verdict, with the claim before it and retention after it.
- `tiers`: an epoch in more than one place. Copies, and the mirror of a directory.
- `manager`: the operations of a user on a directory. Save, restore, delete, follow.
- `convert`: epochs as files of other programs, and back. safetensors, Hugging Face, flax, torch, plain Orbax.
- `v1`: the same as `manager`, in Orbax's v1 style.
- `jobs`: a whole run. Job, stop conditions, resume, the runner.
- `caffe2`: Caffe2's managers and names, over `jobs`.
- `inspection`: views and comparisons of a directory, and its cleaning.
- `cli`: the command `epochckpt`.

A package imports only packages above it in this list; `lint-imports` checks it. `docs/architecture.md` follows a save
and a restore through the packages, and `docs/glossary.md` explains the words that the code uses.

Users also import the modules beside the packages: `errors`, `options`, `args`, `flags`, `stop`, `policy`, `metadata`.
All packages share a few private helpers: `_threads`, `_patience`, `_monitoring`, `_progress`, `_collector`, `_lazy`,
`_metrics`, `_renaming`, `_text`, `_units`, `_durations`, `_kinds`, `_settings`. Modules that take long to import (jax,
Orbax) are imported on first use, see `_lazy`.
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
