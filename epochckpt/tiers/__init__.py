"""An epoch in more than one place: its copy in another directory, and the mirror of a directory.

Promises: a copy is a commit of its own, compared with its checksums on the way; a mirror belongs to one directory at a
time, and whoever finds another one's claim there writes nothing; no address that comes out of a directory is opened.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.tiers.epoch_copy import EpochCopy, check_place
    from epochckpt.tiers.ledger import Ledger, LedgerFile, read_ledger
    from epochckpt.tiers.mirror import Mirror, viewed
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "EpochCopy": "epoch_copy",
            "check_place": "epoch_copy",
            "Ledger": "ledger",
            "LedgerFile": "ledger",
            "read_ledger": "ledger",
            "Mirror": "mirror",
            "viewed": "mirror",
        }
        return lookup(__name__, modules, name)


__all__ = ["EpochCopy", "Ledger", "LedgerFile", "Mirror", "check_place", "read_ledger", "viewed"]
