"""One restore on one process: of a request, from an epoch that is read now or was read ahead."""

from __future__ import annotations

from typing import Generic, TypeVar

from epochckpt import _threads
from epochckpt._threads import Future
from epochckpt.manager.reader import CheckpointReader
from epochckpt.manager.readers import SharedReads
from epochckpt.manager.response import in_background
from epochckpt.manager.restore_request import RestoreRequest
from epochckpt.manager.vote_under_way import VoteUnderWay

T = TypeVar("T")


class EpochRestore(Generic[T]):
    """Restores an epoch as a request asks; one epoch may be read ahead in the background, before it is asked for."""

    def __init__(self, request: RestoreRequest[T], shared: SharedReads | None):
        self._request = request
        self._shared = shared
        self._epoch_ahead: int | None = None
        self._ahead = Future[T]()
        self._taken = _threads.Once()
        self._save_id: str | None = None  # of the save that was read last

    def read_ahead(self, epoch: int) -> Future[T]:
        """Begins to restore an epoch."""
        self._epoch_ahead = epoch
        self._ahead = in_background(lambda: self._read(epoch))
        return self._ahead

    def __call__(self, epoch: int) -> T:
        is_ahead = epoch == self._epoch_ahead and self._taken.first()
        value = self._ahead.result() if is_ahead else self._read(epoch)
        if (vote := VoteUnderWay.here()) is not None:
            vote.note(self._request.readers.epoch_directory, epoch, self._save_id)
        return value

    def _read(self, epoch: int) -> T:
        request = self._request
        if self._shared is None:
            return request.readers.read(epoch, self._use)
        with self._shared.begin(epoch) as sharing:
            return request.readers.read(epoch, self._use, sharing)

    def _use(self, reader: CheckpointReader) -> T:
        self._save_id = reader.save_id
        return self._request.result_of(reader)
