"""Which of the two commit protocols a store needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochckpt.directory.conditional_put import PutCommits
from epochckpt.directory.rename import RenameCommits

if TYPE_CHECKING:
    from epochckpt.directory.protocol import Commits
    from epochckpt.orbax import StepNames
    from epochckpt.storage import Store


def commits_of(store: Store, names: StepNames) -> Commits:
    """How attempts become epochs on this store."""
    return RenameCommits(store, names) if store.renames else PutCommits(store, names)
