"""Opens the epochs of one directory for reading, those of ours and those of stock Orbax alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from epochckpt._threads import Pool
from epochckpt.arrays.items import RestoreContext
from epochckpt.commit import Commits, commits_of
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochNotFoundError, FormatError
from epochckpt.format import EpochRecord
from epochckpt.manager.orbax_reader import OrbaxReader
from epochckpt.manager.reader import CheckpointReader, NativeReader
from epochckpt.manager.status import EpochStatus, Verification
from epochckpt.orbax import Handlers, OrbaxRecord
from epochckpt.storage import open_store


class Readers:
    """Opens the epochs of one directory; by default for one node, with Orbax's handlers."""

    def __init__(self, commits: Commits, pool: Pool, verify: bool = True, context: RestoreContext | None = None):
        self.commits, self._pool, self._verify = commits, pool, verify
        self._context = context or RestoreContext(Handlers())

    def elsewhere(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> Readers:
        """The same for a directory, with the same step names; these readers if it is theirs."""
        store = open_store(directory, settings=settings)
        if store.is_same(self.commits.store):
            return self
        return Readers(commits_of(store, self.commits.names), self._pool, self._verify, self._context)

    def open(self, epoch: int) -> CheckpointReader:
        """A reader of one epoch, whose record is read now; raises EpochNotFoundError, DamagedError or FormatError."""
        return self.of_record(self.commits.folder(epoch), self.commits.read_record(epoch))

    def of_record(self, folder: str, record: EpochRecord) -> CheckpointReader:
        """A reader of the epoch that has this record, in this folder."""
        if isinstance(record, OrbaxRecord):
            return OrbaxReader(self.commits, folder, record, self._context)
        return NativeReader(self.commits, folder, record, self._context, self._pool, self._verify)

    def verify(self, epoch: int) -> Verification:
        """Reads every byte of an epoch; a record that cannot be used is damage, too."""
        try:
            return self.open(epoch).verify()
        except EpochNotFoundError:
            raise
        except EpochCheckpointError as error:
            return Verification(epoch, 0, (error,))

    def status(self, epoch: int) -> EpochStatus:
        """Committed, damaged or absent; raises AccessError or StorageError if storage does not say."""
        try:
            return self.open(epoch).status()
        except EpochNotFoundError:
            return EpochStatus(epoch, "absent")
        except (DamagedError, FormatError) as error:
            return EpochStatus(epoch, "damaged", str(error))
