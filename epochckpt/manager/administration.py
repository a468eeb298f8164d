"""What a manager does to a directory beside saving: it looks again, claims, deletes, and goes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence

import orbax.checkpoint as ocp

from epochckpt.agreement import CollectiveCalls
from epochckpt.errors import EpochNotFoundError
from epochckpt.manager.access import Access
from epochckpt.manager.saves import Saves
from epochckpt.options import StorageOptions
from epochckpt.saving import History, retention
from epochckpt.saving.directory_calls import DirectoryCalls
from epochckpt.saving.opening import Opened
from epochckpt.tiers import JobMirror, LedgerFile


class Administration:
    """Looks at the directory of one manager, and changes it. All processes of the job make the same calls.

    Attributes:
        directory_calls: the collective calls of which changes are made.
        ledger: what the directory records of its mirror.
    """

    def __init__(
        self,
        *,
        directory: Opened,
        history: History,
        saves: Saves,
        access: Access,
        options: ocp.CheckpointManagerOptions,
        storage: StorageOptions,
        mirror: JobMirror,
        ledger: LedgerFile,
        calls: CollectiveCalls,
    ):
        self._epoch_directory = directory.epoch_directory
        self._job_directory = directory.job_directory
        self._history = history
        self._saves = saves
        self._access = access
        self._options = options
        self._mirror = mirror
        self.ledger = ledger
        self._calls = calls
        self.directory_calls = DirectoryCalls(
            directory=directory.job_directory,
            claim=saves.claim,
            history=history,
            wait_secs=storage.open_timeout_secs,
        )

    def connect(self, calls: CollectiveCalls) -> None:
        """Says who takes part in the calls to come."""
        self._calls = calls

    def look(self) -> None:
        """On every process: replaces the history by what the primary finds on storage."""
        known = [info.step for info in self._history.committed()]
        survey = self._job_directory.look(self._calls, self._history.damaged)
        self._saves.take_survey(survey)
        self._mirror.learn(survey.copies)
        self._history.reset(survey, known)

    def claim(self, take_over: bool) -> None:
        """See `CheckpointManager.claim`."""
        self._change("claim", None, tuple, take_over=take_over)

    def delete(self, epoch: int) -> None:
        """See `CheckpointManager.delete`."""
        self._access.check_open("delete")
        self._saves.queue.drain()

        def unlist(here: int) -> None:
            self._saves.queue.remove(retention.unlist(self._job_directory.writer, here, self._options.todelete_subdir))

        def decide() -> list[int]:
            if self._is_remote(epoch):
                self._withdraw(None, [epoch], lambda: None)  # nothing is unlisted here
            else:
                self._epoch_directory.require(epoch)
                self._withdraw(None, [epoch], lambda: unlist(epoch))
            return [epoch]

        def follow() -> None:
            for here in self._job_directory.here([epoch]):
                unlist(here)

        self._change("delete", epoch, decide, follow)

    def roll_back_to(self, epoch: int) -> None:
        """See `CheckpointManager.rollback_to`."""
        self._access.check_open("rollback_to")
        self._saves.queue.drain()

        def decide() -> list[int]:
            remote = self._is_remote(epoch)
            local = self._epoch_directory.list_epochs() if remote else self._epoch_directory.require(epoch)
            later = sorted(e for e in {*local, *self._listed()} if e > epoch)
            with self._pinned(epoch if remote else None):
                self._withdraw(epoch, later, lambda: retention.roll_back(self._job_directory.writer, epoch, remote))
            return later

        def follow() -> None:
            retention.roll_back(self._job_directory.writer, epoch, remote=True)

        self._change("rollback_to", epoch, decide, follow)
        self._history.forget_failed()
        self._history.forget_damage_after(epoch)

    def _listed(self) -> list[int]:
        return [info.step for info in self._history.committed()]

    @contextlib.contextmanager
    def _pinned(self, epoch: int | None) -> Generator[None]:
        """On the primary: an epoch that only the mirror has stays there; EpochNotFoundError if it is going already."""
        if epoch is None:
            yield
            return
        if not self._mirror.pin(epoch):
            raise EpochNotFoundError(epoch, self._epoch_directory.store.root, self._listed())
        try:
            yield
        finally:
            self._mirror.pin(None)

    def _is_remote(self, epoch: int) -> bool:
        """On the primary: whether only the mirror has an epoch."""
        return self._mirror.has(epoch) and epoch not in self._epoch_directory.list_epochs()

    def _withdraw(self, to: int | None, epochs: Sequence[int], act: Callable[[], None]) -> None:
        """On the primary: deletes epochs or rolls back, and has the mirror follow; see `LedgerFile.withdraw`."""
        try:
            self.ledger.withdraw(to, epochs, act)
        finally:
            self._mirror.withdrawn(epochs, self.ledger)

    def _change(
        self,
        verb: str,
        epoch: int | None,
        decide: Callable[[], Collection[int]],
        follow: Callable[[], None] = lambda: None,
        *,
        take_over: bool = True,
    ) -> None:
        """Changes the directory, see `DirectoryCalls.change`."""
        self._access.check_write(verb)
        call = f"{verb}({'' if epoch is None else epoch})"
        self.directory_calls.change(self._calls, call, epoch or 0, decide, follow, take_over=take_over)
