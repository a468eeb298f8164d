"""Which backend a checkpoint manager needs."""

import functools
from typing import Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.backends.base import CheckpointBackend
from epochckpt.jobs.backends.native import NativeBackend
from epochckpt.jobs.backends.orbax import OrbaxBackend
from epochckpt.manager import CheckpointManager

_VERBS = ("all_steps", "should_save", "save", "restore", "metadata", "wait_until_finished")  # of Orbax's interface


@functools.singledispatch
def backend_of(manager: Any) -> CheckpointBackend[Any] | None:
    """The backend of a manager; None for none. InvalidArgumentError: it is no checkpoint manager.

    A package with managers of its own registers their backend here, as `caffe2` does.
    """
    if manager is None:
        return None
    if all(callable(getattr(manager, name, None)) for name in _VERBS):
        return OrbaxBackend(manager)
    raise InvalidArgumentError(
        "checkpoint_manager must be an epochckpt.CheckpointManager, an orbax.checkpoint.AbstractCheckpointManager or a "
        f"manager of epochckpt.caffe2, got {type(manager).__name__}"
    )


backend_of.register(CheckpointManager, NativeBackend)
