"""The restores of a manager: of a named epoch or of the newest, now or in the background."""

from __future__ import annotations

import contextlib
import contextvars
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
from absl import logging

from epochckpt import _monitoring, _progress, _threads, errors
from epochckpt._threads import Deadline, Future
from epochckpt.agreement import CollectiveCalls, Coordinator
from epochckpt.agreement.collective import hear_secs
from epochckpt.agreement.restore_vote import Look, newest_readable, vote
from epochckpt.directory import Commits
from epochckpt.directory.protocol import ReplaceCondition
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.reader import CheckpointReader
from epochckpt.manager.readers import Readers, apart
from epochckpt.options import StorageOptions
from epochckpt.orbax import step_log
from epochckpt.orbax.step_log import StepLog
from epochckpt.saving import History, SaveQueue

T = TypeVar("T")
S = TypeVar("S")
Asked = tuple[Readers, Callable[[CheckpointReader], T]]
"""What is to be restored: readers of a directory, and what makes the result of the reader of an epoch."""

_voting = contextvars.ContextVar("_voting", default=False)  # a restore inside a vote: that vote decides on its epoch


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


class ReadAhead(Generic[T]):
    """A function that restores an epoch: one epoch is restored in the background, before it is asked for."""

    def __init__(self, restore: Callable[[int], T], epoch: int):
        self._restore, self.epoch = restore, epoch
        self.future = in_background(lambda: restore(epoch))
        self._asked = _threads.Once()

    def __call__(self, epoch: int) -> T:
        ahead = epoch == self.epoch and self._asked.first()
        return self.future.result() if ahead else self._restore(epoch)


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
    found, once = Future[T](), _threads.Once()

    def wait(timeout: float | None) -> T:
        if after is not None and not after.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        if once.first():
            found.run(finish)
        return found.result(timeout)

    return Response(wait, watch=found.result)


class Restores:
    """The restores of one manager. `look` looks at storage again, for all processes, and adopts what is there."""

    newest_call = "restore(None)"  # how users of the manager restore the newest epoch; for messages

    def __init__(
        self,
        commits: Commits,
        history: History,
        saves: SaveQueue,
        step_log: StepLog,
        storage: StorageOptions,
        look: Callable[[], None],
    ):
        self._commits, self._history, self._saves, self._step_log = commits, history, saves, step_log
        self._storage, self._look = storage, look
        self._reading = weakref.WeakSet[Future]()  # a result is its caller's alone

    def connect(self, coordinator: Coordinator, calls: CollectiveCalls) -> None:
        """Says who takes part in the restores to come."""
        self._coordinator, self._calls = coordinator, calls

    def drain(self) -> None:
        """Waits until nothing is read in the background any more."""
        for future in list(self._reading):
            future.wait()

    def _drain_at_exit(self) -> Callable[[], None]:
        """See `_threads`: a thread in the middle of jax's calls would abort the interpreter as it ends."""
        deadline, reading = Deadline(self._storage.restore_timeout_secs), list(self._reading)

        def wait() -> None:
            for future in reading:
                future.wait(deadline.left())

        return wait

    def _after_fork(self) -> None:
        self._reading.clear()

    def begin(self, step: int | None, asked: Asked[T]) -> Response[T]:
        """Begins what `run` does; see `CheckpointManager.restore_async`."""
        _threads.drain_at_exit(self)
        readers, use = asked
        step = None if step is None else epoch_number(step)
        if self._coordinator.processes == 1:
            whole = in_background(lambda: self.run(step, asked))
            self._reading.add(whole)
            return Response(whole.result)
        ahead, first = None, step
        if step is None and readers.commits is self._commits and (known := self._history.committed()):
            first = known[-1].step
        if first is not None and readers.begin is apart:
            ahead = ReadAhead(lambda epoch: readers.restore(epoch, use), first)
            self._reading.add(ahead.future)
        return finished_by_caller(lambda: self.run(step, asked, ahead), ahead and ahead.future)

    @_monitoring.failing("/epochckpt/read/failure")
    def run(self, step: int | None, asked: Asked[T], ahead: Callable[[int], T] | None = None) -> T:
        """Restores an epoch, None for the newest; `ahead` does so, too, and may have begun before."""
        step = None if step is None else epoch_number(step)
        with _progress.work("restoring" if step is None else f"restoring checkpoint {step}") as work:
            return self._run(step, asked, ahead, work.notes)

    def _run(self, step: int | None, asked: Asked[T], ahead: Callable[[int], T] | None, notes: Mapping[str, int]) -> T:
        readers, use = asked
        began = time.monotonic()
        self._saves.drain(step)
        read = time.monotonic()
        self._step_log.restoring()
        restore = ahead or (lambda epoch: readers.restore(epoch, use))
        if step is not None:
            value = self._named(readers.commits, step, lambda: restore(step))
        elif readers.commits is self._commits:
            step, value = self._newest(self._commits, self._history, restore)
        else:  # another directory, of which nothing is remembered
            history = History(readers.commits.read_brief)
            history.adopt(readers.commits.list_epochs())
            step, value = self._newest(readers.commits, history, restore)
        self._history.run.restored(began)
        self._step_log.restored(step, readers.commits.store.root, began, read, value, notes)
        return value

    def _named(self, commits: Commits, epoch: int, restore: Callable[[], T]) -> T:
        """Restores an epoch if every process can: else all of them raise, and know that it is damaged, or gone."""
        if _voting.get():
            return restore()
        own = commits is self._commits  # of another directory nothing is remembered
        wait = self._storage.restore_timeout_secs
        known = [info.step for info in self._history.committed() if own and info.step == epoch]
        with self._calls.vote(f"restore({epoch})", known, hear_secs(wait)) as (listed, prefix):
            value, error = vote(restore, self._coordinator, f"{prefix}/1", wait)
        if error is None:
            return value[0]
        if own and isinstance(error, errors.EpochNotFoundError):
            if listed:
                self._look()
        elif own:
            attempt: str | None = None  # the verdict is about this one: another attempt is another epoch
            if self._coordinator.primary:
                with contextlib.suppress(errors.EpochCheckpointError, OSError):
                    attempt = commits.seen_attempt(epoch)
            logging.error("%s: checkpoint %d is not listed any more: %s", commits.store.root, epoch, errors.say(error))
            self._history.reject({epoch: ReplaceCondition(attempt, errors.say(error))})
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
        began = time.monotonic()
        with _progress.work("restoring") as work:
            epoch, value = self._newest(self._commits, self._history, restore, among)
        step_log.say_restored(epoch, self._commits.store.root, time.monotonic() - began, work.figures()[0], work.notes)
        return epoch, value

    def _newest(
        self, commits: Commits, history: History, restore: Callable[[int], T], among: Sequence[int] | None = None
    ) -> tuple[int, T]:
        """The processes vote, see `agreement.restore_vote`; `history` learns which epochs are damaged."""
        attempts: dict[int, str | None] = {}

        def allowed() -> list[int]:
            return [i.step for i in history.committed() if among is None or i.step in among]

        def restore_one(epoch: int) -> T:
            if self._coordinator.primary:  # the verdict is about this attempt: another one is another epoch
                attempts[epoch] = commits.read_attempt(epoch)
            return restore(epoch)

        def reject(rejected: Mapping[int, Exception]) -> None:
            history.reject({e: ReplaceCondition(attempts.get(e), errors.say(why)) for e, why in rejected.items()})

        def look_again(rejected: Mapping[int, Exception]) -> Look:
            reject(rejected)
            if commits is self._commits:
                self._look()
            else:
                history.adopt(self._calls.broadcast("look", commits.list_epochs, 2 * self._storage.open_timeout_secs))
            return allowed(), {e: c.damage for e, c in history.damaged.items() if among is None or e in among}

        candidates, wait = allowed() if among is None else list(among), self._storage.restore_timeout_secs
        within = _voting.set(True)
        try:
            with self._calls.vote("restore(None)", candidates, hear_secs(wait)) as (found, prefix):
                epoch, value, rejected = newest_readable(
                    found, restore_one, look_again, self._coordinator, prefix, wait, commits.store.root
                )
        finally:
            _voting.reset(within)
        reject(rejected)
        return epoch, value
