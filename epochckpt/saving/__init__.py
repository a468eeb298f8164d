"""One save, from the snapshot to the verdict. A claim of the directory comes before the first, retention after each.

Promises: only the primary commits and deletes; every wait is bounded, and its error names the node that is late.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.saving.attempt import Attempt
    from epochckpt.saving.claiming import Claim
    from epochckpt.saving.retention import EpochInfo, History
    from epochckpt.saving.saver import Attempts
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "Attempt": "attempt",
            "Claim": "claiming",
            "EpochInfo": "retention",
            "History": "retention",
            "Attempts": "saver",
        }
        return lookup(__name__, modules, name)


__all__ = ["Attempt", "Attempts", "Claim", "EpochInfo", "History"]
