"""The arrays of one epoch: plan, the copy that training cannot change (snapshot), writing, reading, restoring.

Promises: every node computes the same plan without talking; no byte reaches the caller unverified; memory is bounded.
Nothing here decides whether an epoch exists: see `epochckpt.directory`.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.arrays.node_files import NodeFile, Pack
    from epochckpt.arrays.planner import Planner
    from epochckpt.arrays.reader import EpochReader, Request
    from epochckpt.arrays.shardings import Shardings
    from epochckpt.arrays.tree_metadata import TreeMetadata
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "NodeFile": "node_files",
            "Pack": "node_files",
            "Planner": "planner",
            "EpochReader": "reader",
            "Request": "reader",
            "Shardings": "shardings",
            "TreeMetadata": "tree_metadata",
        }
        return lookup(__name__, modules, name)


__all__ = ["EpochReader", "NodeFile", "Pack", "Planner", "Request", "Shardings", "TreeMetadata"]
