"""One save, from the snapshot to the verdict. A claim of the directory comes before the first, retention after each.

Promises: only the primary commits and deletes; every wait is bounded, and its error names the node that is late.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.saving.claiming import Claim
    from epochckpt.saving.history import EpochInfo, History
    from epochckpt.saving.queue import SaveQueue
    from epochckpt.saving.save import Save, SaveRequest
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "Claim": "claiming",
            "EpochInfo": "history",
            "History": "history",
            "Save": "save",
            "SaveQueue": "queue",
            "SaveRequest": "save",
        }
        return lookup(__name__, modules, name)


__all__ = ["Claim", "EpochInfo", "History", "Save", "SaveQueue", "SaveRequest"]
