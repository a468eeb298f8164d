"""What a user does to a directory: save, restore, delete, roll back, follow, repair, report.

Promises: `CheckpointManager` has Orbax's interface; what only reads needs no other process and no permission to write.
"""

from typing import TYPE_CHECKING

from epochckpt._lazy import names_of

if TYPE_CHECKING:
    from epochckpt.manager.manager import CheckpointManager
    from epochckpt.manager.notifier import HandlerNotifier
    from epochckpt.manager.reader import CheckpointReader
    from epochckpt.manager.readers import Readers
    from epochckpt.manager.restoring import Asked, Response
    from epochckpt.manager.status import EpochStatus, NodeStatus, SaveResult, Verification
else:
    __getattr__ = names_of(
        __name__,
        {
            "CheckpointManager": "manager",
            "HandlerNotifier": "notifier",
            "CheckpointReader": "reader",
            "Readers": "readers",
            "Asked": "restoring",
            "Response": "restoring",
            "EpochStatus": "status",
            "NodeStatus": "status",
            "SaveResult": "status",
            "Verification": "status",
        },
    )

__all__ = [
    "Asked",
    "CheckpointManager",
    "CheckpointReader",
    "EpochStatus",
    "HandlerNotifier",
    "NodeStatus",
    "Readers",
    "Response",
    "SaveResult",
    "Verification",
]
