"""Our manager as the v1 interface needs it: how each save ended, saves that can be cancelled, items by either name."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide

from epochckpt import _monitoring, _threads, errors
from epochckpt._threads import Deadline, Future
from epochckpt.arrays import items
from epochckpt.commit import Attempt, EpochInfo
from epochckpt.commit.coordination import RecentKeys
from epochckpt.errors import SaveError, StepExistsError, UnknownNameError
from epochckpt.format import paths
from epochckpt.manager import CheckpointManager, CheckpointReader
from epochckpt.manager.reader import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.v1 import bridge

T = TypeVar("T")
STATE = "state"  # what v1 calls the one unnamed item
_AHEAD = 2  # calls that a process may make between its vote on the next save and the result
_VOTE_SECS = 60.0
_KEPT_VOTES = 8


class Response(Generic[T]):
    """What is done in the background: Orbax's `AsyncResponse`."""

    def __init__(self, future: Future[T]):
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result, and raises what happened; TimeoutError: it has not ended within `timeout` seconds."""
        return self._future.result(timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls `callback` with the result, in another thread, if it ends well."""

        def call() -> None:
            with contextlib.suppress(Exception):  # `result` raises it
                value = self._future.result()
                _threads.logged("a callback of on_complete failed", lambda: callback(value))

        _threads.start(call)


class SaveResponse(Response[bool]):
    """The response of one save: `result` raises the SaveError that happened to that save, whatever became of others."""

    def __init__(self, engine: "Engine", future: Future[bool]):
        super().__init__(future)
        self._engine = engine

    def result(self, timeout: float | None = None) -> bool:
        """Waits until the epoch is committed; raises SaveError if it is not."""
        try:
            return super().result(timeout)
        except SaveError as failure:
            self._engine.told(failure)
            raise


class Engine(CheckpointManager):
    """A CheckpointManager of one unnamed item, or of several named ones, from epoch to epoch."""

    def __init__(
        self,
        directory: Any,
        options: ocp.CheckpointManagerOptions,
        metadata: Mapping[str, Any] | None,
        logger: Any,
        storage: StorageOptions | None,
        node: str | Sequence[str] | None,
    ):
        self._ends: dict[str, Future[bool]] = {}  # by attempt
        self._continuous: Continuous | None = None
        if options.save_decision_policy is None:
            self._continuous = Continuous(self)
            preempted = decide.PreemptionCheckpointingPolicy()
            options.save_decision_policy = decide.AnySavePolicy(
                [decide.InitialSavePolicy(), self._continuous, preempted]
            )
        registry = bridge.Registry()
        super().__init__(directory, None, options, metadata, None, None, logger, registry, storage=storage, node=node)
        self._listener.heard = self._hear

    # -- saving --------------------------------------------------------------------------------------------------

    def save_epoch(
        self, step: int, items_by_name: Mapping[str, Any], context: Any, overwrite: bool, **kwargs: Any
    ) -> SaveResponse | None:
        """Begins to save, see `CheckpointManager.save`; None if the policy does not ask for it."""
        step = epoch_number(step)
        self._make_way(step, overwrite)
        args = {name: bridge.save_args(name, value, context) for name, value in items_by_name.items()}
        self._multi = None  # each epoch has its own items
        try:
            if not self.save(step, args=args[STATE] if [*args] == [STATE] else ocp.args.Composite(**args), **kwargs):
                return None
        finally:
            self._overwrites.pop(step, None)
        name = f"{step}-{self._attempts.next_try(step) - 1}"
        end = self._ends.setdefault(name, Future())
        for other in [key for key, future in self._ends.items() if key != name and future.done()]:
            self._ends.pop(other, None)
        return SaveResponse(self, end)

    def _make_way(self, step: int, overwrite: bool) -> None:
        """Lets a save take the place of an epoch, if that is asked for; an attempt that failed is in nobody's way."""
        if overwrite:
            self._attempts.drain(step)
        if step in self.all_steps():
            if not overwrite:
                raise StepExistsError(
                    f"{self.root}: epoch {step} exists: overwrite=True lets this save take its place, delete() removes "
                    f"it (in Orbax's words: Step {step} already exists)"
                )
            self.allow_overwrite(step)
        elif all(attempt.epoch != step for attempt in self._attempts.in_flight()):
            self._history.drop([step])

    def _hear(self, attempt: Attempt, failure: SaveError | None) -> None:
        """Enters how an attempt has ended."""
        end = self._ends.setdefault(attempt.name, Future())
        if failure is not None and attempt.cancelled:
            self.told(failure)

        def ended() -> bool:
            if attempt in self._attempts.pending():
                attempt.done.wait()
            if failure is not None:
                raise failure
            return True

        _threads.start(lambda: end.run(ended))
        if self._continuous is not None:
            self._continuous.ended(attempt.name)

    def told(self, failure: SaveError) -> None:
        """The caller knows of a failure: `wait_until_finished` and `close` do not raise it once more."""
        self._attempts.forget_error(failure)

    def cancel(self) -> None:
        """No save that is in flight is committed any more, unless it is just being committed; all processes call it."""
        for attempt in self._attempts.pending():
            attempt.cancelled = True

    # -- restoring and looking -----------------------------------------------------------------------------------

    @_monitoring.failing("/epochckpt/read/failure")
    def restore_by_name(self, step: int | None, abstract: Mapping[str, Any] | None, context: Any) -> dict[str, Any]:
        """The items of an epoch by name, verified; None: the newest epoch that every process can read, all items."""

        def restore(reader: CheckpointReader) -> dict[str, Any]:
            kinds, recorded = reader.item_kinds(), reader.item_handlers()
            stored = shown_names(kinds) if not abstract else {name: items.found_as(name, kinds) for name in abstract}
            for name, item in stored.items():
                if item not in kinds:
                    raise items.unknown_item(reader.record.epoch, name, kinds)
            asked = {
                item: bridge.restore_args(
                    name, kinds[item], recorded.get(item, ""), (abstract or {}).get(name), context
                )
                for name, item in stored.items()
            }
            found = reader.restore(ocp.args.Composite(**asked))
            return {name: found[item] for name, item in stored.items() if item in found}

        began = time.monotonic()
        self._attempts.drain(step)
        read = time.monotonic()
        self._step_log.restoring()
        if step is None:
            step, value = self.restore_newest(lambda epoch: self._readers.read(epoch, restore))
        else:
            value = self._readers.read(step, restore)
        self._step_log.restored(step, self.root, began, read, value)
        return value

    def look(self, step: int, look: Callable[[CheckpointReader], T]) -> T:
        """Calls a function with the reader of an epoch."""
        self._attempts.drain(step)
        return self._readers.read(step, look)

    def committed(self) -> list[EpochInfo]:
        """The committed epochs, ascending."""
        return self._history.committed()

    def drain_removals(self) -> Response[bool]:
        """Waits in the background until what was deleted is removed."""

        def wait() -> bool:
            self._attempts.drain_removals()
            return True

        return Response(_threads.start(wait))

    @property
    def names(self) -> StepNames:
        """How the folders of epochs are called."""
        return self._commits.names

    @property
    def voting(self) -> tuple[Any, str, Callable[[], str]]:
        """What `Continuous` needs: coordinator, prefix of keys, and the name of the last attempt."""
        return self._coordinator, f"{self._prefix}/next", lambda: self._attempts.last


def shown_names(kinds: Mapping[str, str]) -> dict[str, str]:
    """The stored name of each item by the name that v1 gives it."""
    if len(kinds) == 1 and next(iter(kinds)) in paths.UNNAMED:
        return {STATE: next(iter(kinds))}
    return {name: name for name in kinds}


def tree_name(reader: CheckpointReader) -> str:
    """The item that stands for an epoch if none is named: the unnamed one, else the first tree by name."""
    kinds = reader.item_kinds()
    name = items.found_as(STATE, kinds)
    trees = sorted(item for item, kind in kinds.items() if kind == "arrays")
    if name not in kinds and not trees:
        raise UnknownNameError(f"epoch {reader.record.epoch} has no tree; it has: {', '.join(kinds) or 'nothing'}")
    return name if name in kinds else trees[0]


class _Vote:
    """On the call at which the next save may begin, once a save has ended."""

    def __init__(self) -> None:
        self.last = -1  # the last call that this process answers without the result; -1: the save has not ended
        self.result: Future[int] = Future()


class Continuous:
    """The default policy: a save whenever none is in progress. No process waits for another one's save.

    In a job of several processes all have to give one answer, and hear of the end of a save at different times. So when
    a save ends, each process names in the background the last call that it will still answer with no by itself, and the
    primary makes the call after the last of these the next save. Only a process that reaches its own last call before
    the result is there waits for it.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._votes: dict[str, _Vote] = {}
        self._step: int | None = None
        self._answer, self._calls = False, 0
        self._kept = RecentKeys(_KEPT_VOTES)

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Whether no save is in progress; the same on every process."""
        coordinator, _, last = self._engine.voting
        if coordinator.processes == 1:
            return not self._engine.is_saving_in_progress()
        if step.step != self._step:
            self._step = step.step
            self._calls += 1
            self._answer = not last() or self._next(self._votes.setdefault(last(), _Vote()))
        return self._answer

    def _next(self, vote: _Vote) -> bool:
        if vote.last < 0 or self._calls <= vote.last:
            return False
        try:
            return self._calls >= vote.result.result(2 * _VOTE_SECS)
        except (TimeoutError, errors.CoordinationError) as error:
            logging.error("%s: the processes did not agree on the next save: %s", self._engine.root, errors.say(error))
            return False

    def ended(self, name: str) -> None:
        """Takes part in the vote that follows a save."""
        coordinator, prefix, _ = self._engine.voting
        if coordinator.processes == 1:
            return
        vote = self._votes.setdefault(name, _Vote())
        if vote.last >= 0:  # it could not begin, and was counted as failed then
            return
        vote.last = self._calls + _AHEAD
        for other in [key for key in self._votes if key != name and self._votes[key].result.done()]:
            self._votes.pop(other, None)
        prefix = f"{prefix}/{name}"

        def agree() -> int:
            if coordinator.process:
                coordinator.put(f"{prefix}/last/{coordinator.process}", vote.last)
                return coordinator.get(f"{prefix}/next", 2 * _VOTE_SECS)
            others = set(range(1, coordinator.processes))
            found, _ = coordinator.gather(f"{prefix}/last", others, Deadline(_VOTE_SECS))
            following = max([vote.last, *found.values()]) + 1
            coordinator.put(f"{prefix}/next", following)
            self._kept.add(coordinator, prefix)
            return following

        _threads.start(lambda: vote.result.run(agree))
