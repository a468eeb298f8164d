"""What a user does to a directory: save, restore, delete, roll back, follow, repair, report.

Promises: `CheckpointManager` has Orbax's interface; what only reads needs no other process and no permission to write.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.manager.manager import CheckpointManager
    from epochckpt.manager.notifier import HandlerNotifier
    from epochckpt.manager.reader import CheckpointReader
    from epochckpt.manager.readers import Readers
    from epochckpt.manager.response import Response
    from epochckpt.manager.restore_request import RestoreRequest
    from epochckpt.manager.status import EpochStatus, NodeStatus, SaveResult, Verification
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "CheckpointManager": "manager",
            "HandlerNotifier": "notifier",
            "CheckpointReader": "reader",
            "Readers": "readers",
            "Response": "response",
            "RestoreRequest": "restore_request",
            "EpochStatus": "status",
            "NodeStatus": "status",
            "SaveResult": "status",
            "Verification": "status",
        }
        return lookup(__name__, modules, name)


__all__ = [
    "CheckpointManager",
    "CheckpointReader",
    "EpochStatus",
    "HandlerNotifier",
    "NodeStatus",
    "Readers",
    "Response",
    "RestoreRequest",
    "SaveResult",
    "Verification",
]
