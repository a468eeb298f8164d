"""The restores of a manager: of a named epoch or of the newest, now or in the background."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
from absl import logging

from epochckpt import _monitoring, _progress, _threads, errors
from epochckpt._threads import Deadline, Future
from epochckpt.agreement import CollectiveCalls, Coordinator
from epochckpt.agreement.collective import hear_secs
from epochckpt.agreement.restore_vote import Look, newest_readable, vote
from epochckpt.arrays import restore_items
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.manager.access import Access
from epochckpt.manager.administration import Administration
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.reader import CheckpointReader
from epochckpt.manager.readers import Readers, SharedReads
from epochckpt.manager.saves import Saves
from epochckpt.options import StorageOptions
from epochckpt.orbax import step_log
from epochckpt.orbax.step_log import StepLog
from epochckpt.saving import History
from epochckpt.saving.opening import Opened
from epochckpt.tiers import NO_MIRROR

T = TypeVar("T")
S = TypeVar("S")


class _Vote:
    """A vote on epochs of a directory, and the saves that this process has read for it, by epoch."""

    def __init__(self, epoch_directory: EpochDirectory):
        self._epoch_directory = epoch_directory
        self._saves: dict[int, str | None] = {}

    def note(self, epoch_directory: EpochDirectory, epoch: int, save_id: str | None) -> None:
        """An epoch was read as this save has written it; epochs of other directories do not count."""
        if epoch_directory is self._epoch_directory:
            self._saves[epoch] = save_id

    def save_of(self, epoch: int) -> str | None:
        """The save of an epoch; None if nothing of it was read."""
        return self._saves.get(epoch)

    @contextlib.contextmanager
    def going_on(self) -> Generator[None]:
        """In the block, restores take part in this vote, which decides on their epochs."""
        within = _vote.set(self)
        try:
            yield
        finally:
            _vote.reset(within)


_vote = contextvars.ContextVar[_Vote | None]("_vote", default=None)


class Response(Generic[T]):
    """What is done in the background: Orbax's `AsyncResponse`."""

    def __init__(
        self,
        wait: Callable[[float | None], T],
        told: Callable[[Any], None] = lambda failure: None,
        watch: Callable[[], T] | None = None,
    ):
        self._wait = wait  # for so many seconds, or as long as it takes
        self._told = told  # that the caller knows of a failure
        self._watch = watch or (lambda: wait(None))  # waits, and does nothing else

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result, and raises what happened; TimeoutError: it has not ended within `timeout` seconds."""
        try:
            return self._wait(timeout)
        except (errors.SaveError, errors.RemovalError) as failure:
            self._told(failure)
            raise

    def then(self, use: Callable[[T], S]) -> Response[S]:
        """The response that gives what `use` makes of this one's result."""
        return Response(lambda timeout: use(self._wait(timeout)), self._told, lambda: use(self._watch()))

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls `callback` with the result, in another thread, if it ends well."""

        def call() -> None:
            with contextlib.suppress(Exception):  # `result` raises it
                value = self._watch()
                _threads.logged("a callback of on_complete failed", lambda: callback(value))

        _threads.start(call)


class RestoreRequest(abc.ABC, Generic[T]):
    """What a caller wants to have restored, of whichever epoch.

    Attributes:
        readers: open the epochs of the directory that it is in.
    """

    def __init__(self, readers: Readers):
        self.readers = readers

    @abc.abstractmethod
    def result_of(self, reader: CheckpointReader) -> T:
        """Restores it from an epoch."""


class ArgumentsRequest(RestoreRequest[Any]):
    """What Orbax's `args` ask for; a save of the result is planned in the background, before it is asked for."""

    def __init__(self, readers: Readers, args: Any, several: bool | None, saves: Saves, access: Access):
        super().__init__(readers)
        self._args = args
        self._several = several
        self._saves = saves
        self._access = access

    def result_of(self, reader: CheckpointReader) -> Any:
        value = reader.restore(self._args)
        self._saves.arguments.learn(self._several)
        if self._access.may_write:
            self._saves.planner.plan_ahead(restore_items.with_targets(self._args, value))
        return value


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
        if (within := _vote.get()) is not None:
            within.note(self._request.readers.epoch_directory, epoch, self._save_id)
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


def in_background(fn: Callable[[], T]) -> Future[T]:
    """Calls a function in another thread, in the context variables of this one, and with its 64-bit types of jax."""
    surroundings = contextvars.copy_context()
    x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]

    def run() -> T:
        with jax.enable_x64(x64):
            return surroundings.run(fn)

    return _threads.start(run)


def finished_by_caller(finish: Callable[[], T], after: Future[T] | None) -> Response[T]:
    """A response whose `result` calls `finish`, once, in the thread that asks first, when what is `after` has ended."""
    found = Future[T]()
    once = _threads.Once()

    def wait(timeout: float | None) -> T:
        if after is not None and not after.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        if once.first():
            found.run(finish)
        return found.result(timeout)

    return Response(wait, watch=found.result)


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
            return Response(whole.result)
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
        return finished_by_caller(lambda: self.run(step, request, restore), ahead)

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
        if _vote.get() is not None:
            return restore(epoch)
        own = epoch_directory is self._epoch_directory  # of another directory nothing is remembered
        wait = self._storage.restore_timeout_secs
        known = [info.step for info in self._history.committed() if own and info.step == epoch]
        this = _Vote(epoch_directory)
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
        search = _NewestSearch(
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
        this = _Vote(epoch_directory)
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


class _NewestSearch(Generic[T]):
    """A search for the newest epoch of a directory that every process can restore, as this process takes part in it.

    `look` is how a manager looks at its own directory again; of another directory nothing but the epochs is asked.
    """

    def __init__(
        self,
        *,
        epoch_directory: EpochDirectory,
        history: History,
        restore: Callable[[int], T],
        among: Sequence[int] | None,
        primary: bool,
        look: Callable[[], None] | None,
        calls: CollectiveCalls,
        storage: StorageOptions,
    ):
        self._epoch_directory = epoch_directory
        self._history = history
        self._restore = restore
        self._among = among
        self._primary = primary
        self._look = look
        self._calls = calls
        self._storage = storage
        self._save_ids: dict[int, str | None] = {}  # the ids of the saves that were tried, by epoch

    def allowed(self) -> list[int]:
        """The committed epochs that may be taken, ascending."""
        return [i.step for i in self._history.committed() if self._among is None or i.step in self._among]

    def restore(self, epoch: int) -> T:
        """Restores one of them; the verdict is about the save that it is of now: another save is another epoch."""
        if self._primary:
            self._save_ids[epoch] = self._epoch_directory.read_save_id(epoch)
        return self._restore(epoch)

    def reject(self, rejected: Mapping[int, Exception]) -> None:
        """These were found damaged."""
        self._history.reject(
            {e: ReplaceCondition(self._save_ids.get(e), errors.say(why)) for e, why in rejected.items()}
        )

    def look_again(self, rejected: Mapping[int, Exception]) -> Look:
        """What is on storage now, for all processes alike: epochs that may be taken, and the damage of others."""
        self.reject(rejected)
        if self._look is not None:
            self._look()
        else:
            wait = 2 * self._storage.open_timeout_secs
            self._history.adopt(self._calls.broadcast("look", self._epoch_directory.list_epochs, wait))
        damaged = self._history.damaged.items()
        return self.allowed(), {e: c.damage for e, c in damaged if self._among is None or e in self._among}
