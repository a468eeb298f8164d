"""The arrays of one epoch: plan, the copy that training cannot change (snapshot), writing, reading, restoring.

Promises: every node computes the same plan without talking; no byte reaches the caller unverified; memory is bounded.
Nothing here decides whether an epoch exists: see `epochckpt.directory`.
"""

from typing import TYPE_CHECKING

from epochckpt._lazy import names_of

if TYPE_CHECKING:
    from epochckpt.arrays.node_files import NodeFile, Pack
    from epochckpt.arrays.planner import Planner
    from epochckpt.arrays.reader import EpochReader, Request
    from epochckpt.arrays.targets import Shardings, TreeMetadata
else:
    __getattr__ = names_of(
        __name__,
        {
            "NodeFile": "node_files",
            "Pack": "node_files",
            "Planner": "planner",
            "EpochReader": "reader",
            "Request": "reader",
            "Shardings": "targets",
            "TreeMetadata": "targets",
        },
    )

__all__ = ["EpochReader", "NodeFile", "Pack", "Planner", "Request", "Shardings", "TreeMetadata"]
