"""Which keeper a checkpoint manager needs."""

from __future__ import annotations

from typing import Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.keep_caffe2 import Caffe2Keeper
from epochckpt.keep_epochs import EpochKeeper
from epochckpt.keep_orbax import OrbaxKeeper
from epochckpt.keeping import Keeper
from epochckpt.manager import CheckpointManager
from epochckpt.multi_node import MultiNodeCheckpointManager as OfManyNodes
from epochckpt.single_node import CheckpointManager as OfOneNode

_VERBS = (
    "all_steps",
    "should_save",
    "save",
    "restore",
    "metadata",
    "wait_until_finished",
)  # a protocol cannot be asked


def keeper_of(manager: Any) -> Keeper | None:
    """The keeper of a manager; None for none.

    Raises:
        InvalidArgumentError: it is no checkpoint manager.
    """
    if manager is None:
        return None
    if isinstance(manager, CheckpointManager):
        return EpochKeeper(manager)
    if isinstance(manager, OfOneNode | OfManyNodes):
        return Caffe2Keeper(manager)
    if all(callable(getattr(manager, name, None)) for name in _VERBS):
        return OrbaxKeeper(manager)
    raise InvalidArgumentError(
        "checkpoint_manager must be an epochckpt.CheckpointManager, an orbax.checkpoint.AbstractCheckpointManager or a "
        f"manager of epochckpt.caffe2, got {type(manager).__name__}"
    )
