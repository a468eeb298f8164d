"""Orbax's v1 style over our manager: `from epochckpt import v1 as ocp`, and the training loop stays as it is.

Promises: `training` has the interface of `orbax.checkpoint.v1.training`, and what a loop needs beside it (`Context`,
`options`, `handlers`, …) is Orbax's own. What cannot mean the same here is refused by name.
"""

from typing import Any

import orbax.checkpoint as ocp

from epochckpt.v1 import training

__all__ = ["training"]

_ORBAX = frozenset(
    {
        *("AbstractCheckpointable", "AsyncResponse", "CheckpointMetadata", "Checkpointable", "CheckpointableHandler"),
        *("Context", "PLACEHOLDER", "PyTreeMetadata", "StatefulCheckpointable", "arrays", "errors", "handlers"),
        *("multihost", "options", "path", "serialization", "tree"),
    }
)
"""Names of Orbax's v1 that mean the same here: classes, options and protocols, nothing that reads or writes."""


def __getattr__(name: str) -> Any:
    if name in _ORBAX:
        return getattr(ocp.v1, name)
    hint = ""
    if not name.startswith("_") and hasattr(ocp.v1, name):
        hint = (
            "; orbax.checkpoint.v1 has it, for single checkpoints: take it from there, or epochckpt.v1.training for a "
            "directory of them"
        )
    raise AttributeError(f"module 'epochckpt.v1' has no attribute {name!r}{hint}")
