"""Which keeper a checkpoint manager needs."""

from __future__ import annotations

from typing import Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.backends.base import Keeper
from epochckpt.jobs.backends.caffe2 import Caffe2Keeper
from epochckpt.jobs.backends.native import EpochKeeper
from epochckpt.jobs.backends.orbax import OrbaxKeeper
from epochckpt.jobs.caffe2_managers import CheckpointManager as OfOneNode
from epochckpt.jobs.caffe2_managers import MultiNodeCheckpointManager as OfManyNodes
from epochckpt.manager import CheckpointManager

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
