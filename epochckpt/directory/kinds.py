"""Which of the two commit protocols a store needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.posix import PosixDirectory

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import EpochDirectory
    from epochckpt.orbax import StepNames
    from epochckpt.storage import Store


def directory_of(store: Store, names: StepNames) -> EpochDirectory:
    """How attempts become epochs on this store."""
    return PosixDirectory(store, names) if PosixDirectory.suits(store) else BucketDirectory(store, names)
