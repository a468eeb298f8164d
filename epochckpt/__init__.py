"""epochckpt: an epoch-level checkpoint manager for JAX training, with Orbax's interface.

Imports go strictly downwards; a test checks it (within a floor: only to the left).

    F0  escaping naming units errors memory options layout tree hosting
    F1  mapped msgpack_file worker checksum safetensors ocdbt store handle posix_store kv_store storage coordination
        calls run_database
    F2  tensor_notes grid plan snapshot records orbax_sharding orbax_left_out orbax_view orbax_view_files parsing
        node_writer node_file node_reader handlers orbax_marks orbax_steps aside owners placing commit commit_rename
        commit_put attached retention step_folders
    F3  args tree_metadata renaming targets restoring casting node_items items saving step_log attempt writing opening
        claiming lagging attempts removal status metadata_protocol outcomes orbax_tree orbax_reader choosing checks
        legacy reading epochs metadata node_staging node_epochs manager following attaching repairing copying
        export_orbax export_safetensors exporting importing
    F4  conditions stop workspace tasks job session containers blobs boundary metrics preempting result keeping
        keep_epochs keep_orbax db_names single_node multi_node keep_caffe2 keepers progress reporting resuming
        run_saves first_epoch running runner upload_staging upload_nodes upload caffe2
    F5  rows run_notes surveying remains recognising epoch_rows overview gc
        lone_nodes orbax_leaves details leaf_reading stats changes same_bytes diffing plain
        html_style html_parts html_overview html_sharding html_tree html_epoch html_compare html_views
        text_table text_tree text_leaves text_overview text_views plots
        inspected inspection
        watching setting_kinds setting_rules setting_fields settings flags
        cli_output cli_options cli_places cli_look cli_diff cli_work cli_gc cli_watch cli __main__
"""

from epochckpt import args, caffe2, errors, flags, metadata, stop
from epochckpt.attaching import attach_metrics
from epochckpt.errors import EpochCheckpointError, EpochDeleted
from epochckpt.exporting import Exported, export
from epochckpt.following import follow
from epochckpt.importing import import_
from epochckpt.inspection import inspect
from epochckpt.job import Job, epoch_limiter
from epochckpt.manager import CheckpointManager
from epochckpt.options import StorageOptions
from epochckpt.preempting import PREEMPTED_EXIT_CODE
from epochckpt.repairing import repair_view
from epochckpt.result import FENCED_OFF_EXIT_CODE, UNSAVED_EXIT_CODE, RunResult
from epochckpt.runner import JobRunner, UploadTaskGroupBuilder
from epochckpt.session import DistributedSession, LocalHostScheduler, LocalSession
from epochckpt.status import EpochStatus, NodeStatus, SaveOutcome, Verification
from epochckpt.tasks import Cluster, Node, Task, TaskGroup
from epochckpt.upload import CopyUpload
from epochckpt.workspace import Workspace

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
    "EpochDeleted",
    "EpochStatus",
    "Exported",
    "Job",
    "JobRunner",
    "LocalHostScheduler",
    "LocalSession",
    "Node",
    "NodeStatus",
    "RunResult",
    "SaveOutcome",
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
    "metadata",
    "repair_view",
    "stop",
]
