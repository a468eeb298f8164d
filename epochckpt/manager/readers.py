"""Opens the epochs of one directory for reading, those of ours and those of stock Orbax alike."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from absl import logging

from epochckpt import _monitoring, _progress, _threads
from epochckpt._threads import Pool
from epochckpt.agreement import CollectiveCalls, Coordinator
from epochckpt.agreement.collective import hear_secs
from epochckpt.arrays import EpochReader
from epochckpt.arrays.broadcast import CHUNK_BYTES, Sharing, decide
from epochckpt.arrays.restore_items import RestoreContext
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochDeletedError,
    EpochNotFoundError,
    FormatError,
    FormatVersionError,
)
from epochckpt.format import EpochRecord, Nodes
from epochckpt.manager import read_ahead
from epochckpt.manager.orbax_reader import OrbaxReader
from epochckpt.manager.reader import CheckpointReader, NativeReader
from epochckpt.manager.status import EpochStatus, Verification
from epochckpt.options import StorageOptions
from epochckpt.orbax import Handlers, OrbaxRecord
from epochckpt.storage import open_store
from epochckpt.tiers import NO_MIRROR, JobMirror, read_host_record

T = TypeVar("T")


class SharedReads:
    """How all processes of a job share what they read in a restore."""

    def __init__(self, coordinator: Coordinator, calls: CollectiveCalls, storage: StorageOptions):
        limit = storage.restore_memory_limit_bytes
        self._coordinator = coordinator
        self._calls = calls
        self._storage = storage
        self._chunk_bytes = CHUNK_BYTES if limit is None else min(CHUNK_BYTES, limit // 16)

    def begin(self, epoch: int) -> Sharing:
        """Begins a restore of an epoch, on every process."""
        agree = functools.partial(self._agree, epoch)
        return Sharing(self._coordinator.ids, agree, self._storage.restore_timeout_secs, self._chunk_bytes)

    def _agree(self, epoch: int, told: Any) -> Any:
        answer = functools.partial(decide, names=self._coordinator.named)
        wait_secs = hear_secs(self._storage.restore_timeout_secs)
        return self._calls.collective(f"restore({epoch})", lambda: told, answer, wait_secs)


def shared_reads(
    coordinator: Coordinator, calls: CollectiveCalls, storage: StorageOptions, asked: bool
) -> SharedReads | None:
    """How the processes share their reads, if the options ask for it; None: each process reads for itself."""
    wanted = asked if storage.broadcast_restore is None else storage.broadcast_restore
    if not wanted or coordinator.processes == 1 or storage.local_disks:
        return None
    return SharedReads(coordinator, calls, storage)


class Readers:
    """Opens the epochs of one directory; by default for one node, with Orbax's handlers.

    An epoch that is missing or damaged there is opened in the `mirror`, if that has it. What a disk that only its own
    host sees lacks of an epoch is read from there, too.
    """

    def __init__(
        self,
        epoch_directory: EpochDirectory,
        pool: Pool,
        verify: bool = True,
        context: RestoreContext | None = None,
        mirror: JobMirror = NO_MIRROR,
        is_partial: Callable[[], bool] | None = None,
    ):
        """`is_partial` says whether the directory has the parts of one host only; by default it is asked, once."""
        self.epoch_directory = epoch_directory
        self._pool = pool
        self._verify = verify
        self._mirror = mirror
        self._is_partial = is_partial or functools.cache(lambda: read_host_record(epoch_directory.store) is not None)
        self._context = context or RestoreContext(Handlers())

    def take_nodes(self, nodes: Nodes) -> None:
        """Says for which nodes epochs are read from now on."""
        self._context = dataclasses.replace(self._context, nodes=nodes)

    def elsewhere(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> Readers:
        """The same for a directory, with the same step names; these readers if it is theirs."""
        store = open_store(directory, settings=settings)
        if store.is_same(self.epoch_directory.store):
            return self
        epoch_directory = directory_of(store, self.epoch_directory.names)
        return Readers(epoch_directory, self._pool, verify=self._verify, context=self._context)

    def open(self, epoch: int) -> CheckpointReader:
        """A reader of one epoch, whose record is read now; raises EpochNotFoundError, DamagedError or FormatError."""
        return self.read(epoch, lambda reader: reader)

    def read(self, epoch: int, use: Callable[[CheckpointReader], T], sharing: Sharing | None = None) -> T:
        """What `use` makes of a reader of the epoch; of one in the mirror, where this one is missing or damaged.

        In a restore the processes may be `sharing` what they read.
        """
        try:
            return use(self._open(epoch, sharing))
        except (EpochNotFoundError, DamagedError, FormatError) as error:
            elsewhere = self._elsewhere(epoch, error)
            if elsewhere is None:
                raise
            return use(elsewhere._open(epoch, sharing))

    def read_ahead(self, epoch: int, limit_bytes: int) -> _threads.Future[None]:
        """Begins to read an epoch into the page cache of this host, see `read_ahead.begin`."""
        return read_ahead.begin(self.epoch_directory, epoch, self._context.nodes, limit_bytes)

    def summary(self, epoch: int) -> EpochSummary:
        """The summary of an epoch; raises as `open` does."""
        try:
            return self.epoch_directory.read_summary(epoch)
        except (EpochNotFoundError, DamagedError, FormatError) as error:
            elsewhere = self._elsewhere(epoch, error)
            if elsewhere is None:
                raise
            return elsewhere.epoch_directory.read_summary(epoch)

    def _elsewhere(self, epoch: int, error: EpochCheckpointError) -> Readers | None:
        """Readers of the mirror, if that has the epoch."""
        there = self._mirror.copy_of(epoch, self.epoch_directory)
        if there is None:
            return None
        if not isinstance(error, EpochNotFoundError) or isinstance(error, EpochDeletedError):
            _monitoring.event("/epochckpt/read/mirror", kind=type(error).__name__)
            logging.warning("checkpoint %d is read from its mirror %s: %s", epoch, there.store.root, error)
        return Readers(there, self._pool, verify=self._verify, context=self._context)

    def _open(self, epoch: int, sharing: Sharing | None = None) -> CheckpointReader:
        return self.of_record(self.epoch_directory.folder(epoch), self.epoch_directory.read_record(epoch), sharing)

    def of_record(self, folder: str, record: EpochRecord, sharing: Sharing | None = None) -> CheckpointReader:
        """A reader of the epoch that has this record, in this folder; the processes may be `sharing` what they read."""
        context = self._context if sharing is None else dataclasses.replace(self._context, sharing=sharing)
        if isinstance(record, OrbaxRecord):
            return OrbaxReader(self.epoch_directory, folder, record, context)
        return NativeReader(
            epoch_directory=self.epoch_directory,
            folder=folder,
            record=record,
            context=context,
            native=self._native(folder, record),
        )

    def _native(self, folder: str, record: EpochRecord) -> EpochReader:
        """A reader of an epoch of ours; with a disk per host, of this host's part of it."""
        store = self.epoch_directory.store
        local_nodes: frozenset[int] | None = None
        if not record.per_node and self._is_partial():
            try:
                found = {entry.name for entry in store.list(folder)}
            except FileNotFoundError as error:
                raise EpochDeletedError(record.epoch, store.root, str(error)) from error
            local_nodes = frozenset(
                number for number in range(len(record.nodes)) if record.node_folder(number) in found
            )
        return EpochReader(
            store=store,
            folder=folder,
            record=record,
            pool=self._pool,
            verify=self._verify,
            local_nodes=local_nodes,
            open_mirror=functools.partial(self._mirror_reader, record),
        )

    def _mirror_reader(self, record: EpochRecord) -> EpochReader | None:
        """A reader of the mirror's copy of the save that `record` is of; None if there is none."""
        there = self._mirror.copy_of(record.epoch, self.epoch_directory)
        if there is None:
            return None
        copy = there.read_record(record.epoch)
        if (copy.plan, len(copy.nodes)) != (record.plan, len(record.nodes)):
            return None
        logging.info("checkpoint %d: what this host lacks is read from the mirror %s", record.epoch, there.store.root)
        return EpochReader(
            store=there.store,
            folder=there.folder(record.epoch),
            record=copy,
            pool=self._pool,
            verify=self._verify,
        )

    @_monitoring.timed("/epochckpt/verify_secs")
    def verify(self, epoch: int) -> Verification:
        """Reads every byte of an epoch; a record that cannot be used is damage, too."""
        self.epoch_directory.forget_records()
        try:
            reader = self.open(epoch)
            with _progress.work(f"verifying checkpoint {epoch}", reader.record.nbytes) as work:
                return reader.verify(work.advance)
        except (EpochNotFoundError, FormatVersionError):
            raise
        except EpochCheckpointError as error:
            return Verification.of(epoch, 0, [error])

    def status(self, epoch: int) -> EpochStatus:
        """Committed, damaged, newer or absent; raises AccessError or StorageError if storage does not say."""
        try:
            return self.open(epoch).status()
        except EpochNotFoundError:
            return EpochStatus(epoch, "absent")
        except FormatVersionError as error:
            return EpochStatus(epoch, "newer", str(error))
        except (DamagedError, FormatError) as error:
            return EpochStatus(epoch, "damaged", str(error))
