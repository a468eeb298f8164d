"""epochckpt: an epoch-level checkpoint manager for JAX training, with Orbax's interface.

Imports go strictly downwards; a test checks it (within a floor: only to the left).

    F0  errors options layout tree
    F1  mapped msgpack_file worker checksum safetensors ocdbt store handle posix_store kv_store storage coordination
    F2  tensor_notes grid plan snapshot records orbax_sharding orbax_left_out orbax_view parsing node_writer node_file
        node_reader handlers orbax_marks orbax_steps commit commit_rename commit_put retention
    F3  args tree_metadata targets restoring casting items saving attempt opening attempts removal status orbax_tree
        orbax_reader choosing checks legacy reading node_epochs manager following export_orbax export_safetensors
        exporting importing
    F4  workspace blobs tasks job session caffe2
"""

from epochckpt import args, caffe2, errors
from epochckpt.errors import EpochCheckpointError, EpochDeleted
from epochckpt.exporting import Exported, export
from epochckpt.following import follow
from epochckpt.importing import import_
from epochckpt.manager import CheckpointManager
from epochckpt.options import StorageOptions
from epochckpt.status import EpochStatus, NodeStatus, Verification

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "EpochCheckpointError",
    "EpochDeleted",
    "EpochStatus",
    "Exported",
    "NodeStatus",
    "StorageOptions",
    "Verification",
    "args",
    "caffe2",
    "errors",
    "export",
    "follow",
    "import_",
]
