"""The restores of a manager: of a named epoch or of the newest, now or in the background."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt import _monitoring, _progress, _threads, errors
from epochckpt._threads import Deadline, Future
from epochckpt.agreement import CollectiveCalls, Coordinator
from epochckpt.agreement.collective import hear_secs
from epochckpt.agreement.restore_vote import newest_readable, vote
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.manager.access import Access
from epochckpt.manager.administration import Administration
from epochckpt.manager.epoch_restore import EpochRestore
from epochckpt.manager.newest_search import NewestSearch
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.readers import Readers, SharedReads
from epochckpt.manager.response import FinishedByCaller, FutureResponse, Response, in_background
from epochckpt.manager.restore_request import ArgumentsRequest, RestoreRequest
from epochckpt.manager.saves import Saves
from epochckpt.manager.vote_under_way import VoteUnderWay
from epochckpt.options import StorageOptions
from epochckpt.orbax import step_log
from epochckpt.orbax.step_log import StepLog
from epochckpt.saving import History
from epochckpt.saving.opening import Opened
from epochckpt.tiers import NO_MIRROR

T = TypeVar("T")


class Restores:
    """The restores of one manager.

    Attributes:
        newest_call: how users of the manager restore the newest epoch; for messages.
    """

    def __init__(
        self,
        *,
        directory: Opened,
        readers: Readers,
        history: History,
        saves: Saves,
        administration: Administration,
        access: Access,
        storage: StorageOptions,
        step_log: StepLog,
        calls: CollectiveCalls,
        shared: SharedReads | None,
    ):
        self._epoch_directory = directory.epoch_directory
        self._coordinator = directory.coordinator
        self._readers = readers
        self._history = history
        self._saves = saves
        self._administration = administration
        self._access = access
        self._storage = storage
        self._step_log = step_log
        self._calls = calls
        self._shared = shared
        self._reading = weakref.WeakSet[Future]()  # a result is its caller's alone
        self.newest_call = "restore(None)"

    def connect(self, coordinator: Coordinator, calls: CollectiveCalls) -> None:
        """Says who takes part in the restores to come; each process reads for itself then."""
        self._coordinator = coordinator
        self._calls = calls
        self._shared = None

    def request(self, items: Any, restore_kwargs: Any, directory: Any, args: Any) -> ArgumentsRequest:
        """What a call of `CheckpointManager.restore` asks for."""
        args, several = self._saves.arguments.of_restore(items, restore_kwargs, args)
        readers = self._readers if directory is None else self._readers.elsewhere(directory, self._storage.store)
        return ArgumentsRequest(
            readers=readers,
            args=args,
            several=several,
            saves=self._saves,
            access=self._access,
        )

    def drain(self) -> None:
        """Waits until nothing is read in the background any more."""
        for future in list(self._reading):
            future.wait()

    def _drain_at_exit(self) -> Callable[[], None]:
        """See `_threads`: a thread in the middle of jax's calls would abort the interpreter as it ends."""
        deadline = Deadline(self._storage.restore_timeout_secs)
        reading = list(self._reading)

        def wait() -> None:
            for future in reading:
                future.wait(deadline.left())

        return wait

    def _after_fork(self) -> None:
        self._reading.clear()

    def begin(self, step: int | None, request: RestoreRequest[T]) -> Response[T]:
        """Begins what `run` does; see `CheckpointManager.restore_async`."""
        _threads.drain_at_exit(self)
        step = None if step is None else epoch_number(step)
        if self._coordinator.processes == 1:
            whole = in_background(lambda: self.run(step, request))
            self._reading.add(whole)
            return FutureResponse(whole)
        restore = EpochRestore(request, self._shared)
        ahead: Future[T] | None = None
        first = step
        if (
            step is None
            and request.readers.epoch_directory is self._epoch_directory
            and (known := self._history.committed())
        ):
            first = known[-1].step
        if first is not None and self._shared is None:
            ahead = restore.read_ahead(first)
            self._reading.add(ahead)
        return FinishedByCaller(lambda: self.run(step, request, restore), ahead)

    @_monitoring.failing("/epochckpt/read/failure")
    def run(self, step: int | None, request: RestoreRequest[T], restore: EpochRestore[T] | None = None) -> T:
        """Restores an epoch, None for the newest; `restore` does so, too, and may have begun before."""
        step = None if step is None else epoch_number(step)
        restore = restore or EpochRestore(request, self._shared)
        with _progress.work("restoring" if step is None else f"restoring checkpoint {step}") as work:
            return self._run(step, request.readers.epoch_directory, restore, work.notes)

    def _run(
        self, step: int | None, epoch_directory: EpochDirectory, restore: EpochRestore[T], notes: Mapping[str, int]
    ) -> T:
        began = time.monotonic()
        self._saves.queue.drain(step)
        read = time.monotonic()
        self._step_log.restoring()
        if step is not None:
            value = self._named(epoch_directory, step, restore)
        elif epoch_directory is self._epoch_directory:
            step, value = self._newest(epoch_directory, self._history, restore)
        else:  # another directory, of which nothing is remembered
            history = History(epoch_directory.read_summary, mirror=NO_MIRROR)
            history.adopt(epoch_directory.list_epochs())
            step, value = self._newest(epoch_directory, history, restore)
        self._history.run.restored(began)
        self._step_log.restored(step, epoch_directory.store.root, began, read, value, notes)
        return value

    def _named(self, epoch_directory: EpochDirectory, epoch: int, restore: Callable[[int], T]) -> T:
        """Restores an epoch if every process can: else all of them raise, and know that it is damaged, or gone."""
        if VoteUnderWay.here() is not None:
            return restore(epoch)
        own = epoch_directory is self._epoch_directory  # of another directory nothing is remembered
        wait = self._storage.restore_timeout_secs
        known = [info.step for info in self._history.committed() if own and info.step == epoch]
        this = VoteUnderWay(epoch_directory)
        with self._calls.vote(f"restore({epoch})", known, hear_secs(wait)) as (listed, prefix), this.going_on():
            value, error = vote(
                epoch=epoch,
                restore=restore,
                save_of=this.save_of,
                coordinator=self._coordinator,
                key=f"{prefix}/1",
                timeout_secs=wait,
                directory=epoch_directory.store.root,
            )
        if error is None:
            return value[0]
        if own and isinstance(error, errors.EpochNotFoundError):
            if listed:
                self._administration.look()
        elif own:
            save_id: str | None = None  # the verdict is about this one: another attempt is another epoch
            if self._coordinator.primary:
                with contextlib.suppress(errors.EpochCheckpointError, OSError):
                    save_id = epoch_directory.seen_save_id(epoch)
            logging.error(
                "%s: checkpoint %d is not listed any more: %s", epoch_directory.store.root, epoch, errors.say(error)
            )
            self._history.reject({epoch: ReplaceCondition(save_id, errors.say(error))})
            left = self._history.committed()
            now = f"latest_step() is {left[-1].step} now" if left else "no other is listed"
            errors.advise(
                error,
                f"Checkpoint {epoch} is not listed any more: {now}. {self.newest_call} takes the newest epoch that "
                "every process can read",
            )
        raise error

    def newest(self, restore: Callable[[int], T], among: Sequence[int] | None = None) -> tuple[int, T]:
        """Restores the newest epoch that every process can read, see `CheckpointManager.restore_newest`."""
        self._saves.queue.drain()
        began = time.monotonic()
        with _progress.work("restoring") as work:
            epoch, value = self._newest(self._epoch_directory, self._history, restore, among)
        step_log.say_restored(
            epoch, self._epoch_directory.store.root, time.monotonic() - began, work.figures()[0], work.notes
        )
        return epoch, value

    def _newest(
        self,
        epoch_directory: EpochDirectory,
        history: History,
        restore: Callable[[int], T],
        among: Sequence[int] | None = None,
    ) -> tuple[int, T]:
        """The processes vote, see `agreement.restore_vote`; `history` learns which epochs are damaged."""
        search = NewestSearch(
            epoch_directory=epoch_directory,
            history=history,
            restore=restore,
            among=among,
            primary=self._coordinator.primary,
            look=self._administration.look if epoch_directory is self._epoch_directory else None,
            calls=self._calls,
            storage=self._storage,
        )
        candidates = search.allowed() if among is None else list(among)
        wait = self._storage.restore_timeout_secs
        this = VoteUnderWay(epoch_directory)
        with self._calls.vote("restore(None)", candidates, hear_secs(wait)) as (found, prefix), this.going_on():
            epoch, value, rejected = newest_readable(
                found,
                restore=search.restore,
                save_of=this.save_of,
                look_again=search.look_again,
                coordinator=self._coordinator,
                prefix=prefix,
                timeout_secs=wait,
                directory=epoch_directory.store.root,
            )
        search.reject(rejected)
        return epoch, value
