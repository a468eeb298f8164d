"""The components of a manager."""

from __future__ import annotations

import dataclasses

from epochckpt.manager.administration import Administration
from epochckpt.manager.readers import Readers
from epochckpt.manager.restoring import Restores
from epochckpt.manager.saves import Saves
from epochckpt.saving import History
from epochckpt.saving.opening import Opened
from epochckpt.tiers import JobMirror


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of one `CheckpointManager`, for packages of epochckpt that add to it; no public interface.

    Attributes:
        directory: the open directory, with the nodes and processes of the job.
        readers: open the epochs that are there.
        history: the epochs that this process knows.
        saves: saves, with the claim to the directory and the queue of saves that have begun.
        restores: restores, of a named epoch or of the newest.
        administration: looks at the directory again, deletes, and rolls back.
        mirror: the mirror of the directory.
    """

    directory: Opened
    readers: Readers
    history: History
    saves: Saves
    restores: Restores
    administration: Administration
    mirror: JobMirror
