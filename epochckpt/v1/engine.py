"""Our manager as the v1 interface needs it: how each save ended, saves that can be cancelled, items by either name."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from orbax.checkpoint import v1
from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide

from epochckpt import _threads, errors
from epochckpt._threads import Deadline, Future
from epochckpt.agreement.collective import Timeouts, collective
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.arrays import items
from epochckpt.errors import RemovalError, SaveError, StepExistsError, UnknownNameError
from epochckpt.manager import Asked, CheckpointManager, CheckpointReader, Response
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.saving import EpochInfo, Save
from epochckpt.storage import scheme_of
from epochckpt.v1 import bridge

T = TypeVar("T")

_REMEDIES = errors.Remedies(
    rename="load(step, epochckpt.args.RenamedRestore(abstract_state, rename={}))",
    partial="with pytree_options.loading.partial_load of the Context they are left out.",
    resize="array_options.loading.enable_padding_and_truncation of the Context cuts arrays, or pads them with zeros.",
    rest="load(step) without abstract_state gives everything as it was saved.",
)
STATE = "state"  # what v1 calls the one unnamed item
_IN_BUCKETS = STATE if hasattr(v1.training.Checkpointer, "save") else "pytree"
"""What it is called on `gs://`, where no link leads to `default`: so the installed Orbax's v1 finds it."""
_VOTE_SECS = 600.0  # how long a process may be behind the others when a save has ended
_KEPT_VOTES = 8


_Outcome = tuple[Save, SaveError | None]  # a save that ends, and why it failed, if so


class SaveResponse(Response[bool]):
    """The response of one save: `result` raises the SaveError that happened to that save, whatever became of others."""

    def __init__(self, engine: "Engine", outcome: "Future[_Outcome]"):
        super().__init__(self._ended, engine.told)
        self._engine, self._outcome = engine, outcome

    def _ended(self, timeout: float | None) -> bool:
        deadline = Deadline(math.inf if timeout is None else timeout)
        save, failure = self._outcome.result(timeout)
        if self._engine.is_pending(save) and not save.done.wait(None if timeout is None else deadline.left()):
            raise TimeoutError(f"no result within {timeout} s")
        self._engine.settle(save)
        if failure is not None:
            raise failure
        return True


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
        self._ends: dict[str, Future[_Outcome]] = {}  # by the save's name
        self.waits = 0  # for saves in flight: each process makes these calls alike
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
        self._restores.newest_call = "load()"

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
            if [*args] != [STATE]:
                given = ocp.args.Composite(**args)
            elif not self._commits.store.renames and scheme_of(self.root).stock_orbax:
                given = ocp.args.Composite(**{_IN_BUCKETS: args[STATE]})
            else:
                given = args[STATE]
            if not self.save(step, args=given, **kwargs):
                return None
        finally:
            self._overwrites.pop(step, None)
            self._multi = None
        name = f"{step}-{self._saves.next_try(step) - 1}"
        end = self._ends.setdefault(name, Future())
        for other in [key for key, future in self._ends.items() if key != name and future.done()]:
            self._ends.pop(other, None)
        return SaveResponse(self, end)

    def _make_way(self, step: int, overwrite: bool) -> None:
        """Lets a save take the place of an epoch, if that is asked for; a save that failed is in nobody's way."""
        if overwrite:
            self._saves.drain(step)
        in_flight = step in [save.epoch for save in self._saves.saving()]
        committed = step in self.all_steps()
        if (in_flight or committed) and not overwrite and self._history.is_own(step):
            return  # `save` says that it was requested just now
        if committed:
            if not overwrite:
                raise StepExistsError(
                    f"{self.root}: checkpoint {step} exists: overwrite=True lets this save take its place, delete() "
                    f"removes it (in Orbax's words: Step {step} already exists)"
                )
            self.allow_overwrite(step)
        elif not in_flight:
            self._history.drop([step])
        else:
            raise StepExistsError(
                f"{self.root}: checkpoint {step} is being saved: overwrite=True waits for that and lets this save take "
                f"its place (in Orbax's words: Step {step} already exists)"
            )

    def _hear(self, save: Save, failure: SaveError | None) -> None:
        """Enters how a save has ended."""
        if failure is not None and save.cancel_requested:
            self.told(failure)
        self._ends.setdefault(save.name, Future()).set((save, failure))
        if self._continuous is not None:
            self._continuous.ended(save.name)

    def settle(self, save: Save) -> None:
        """The caller has been told how a save has ended."""
        self._history.settle(save.epoch)

    def is_pending(self, save: Save) -> bool:
        """Whether a save still has to leave the saves in flight."""
        return save in self._saves.pending()

    def wait_until_finished(self) -> None:
        try:
            super().wait_until_finished()
        finally:
            self.waits += 1

    def told(self, failure: SaveError | RemovalError) -> None:
        """The caller knows of a failure: `wait_until_finished` and `close` do not raise it once more."""
        self._saves.in_flight.forget_error(failure)

    def cancel(self) -> None:
        """No save that is in flight is committed any more, unless it is just being committed; all processes call it."""
        for save in self._saves.pending():
            save.cancel_requested = True

    # -- restoring and looking -----------------------------------------------------------------------------------

    def load(self, step: int | None, abstract: Mapping[str, Any] | None, context: Any) -> dict[str, Any]:
        """The items of an epoch by name, verified; None: the newest epoch that every process can read, all items."""
        return self._restores.run(step, self._by_name(abstract, context))

    def begin_load(self, step: int | None, abstract: Mapping[str, Any] | None, context: Any) -> Response:
        """The same in the background, see `CheckpointManager.restore_async`."""
        return self._restores.begin(step, self._by_name(abstract, context))

    def _by_name(self, abstract: Mapping[str, Any] | None, context: Any) -> Asked[dict[str, Any]]:

        def restore(reader: CheckpointReader) -> dict[str, Any]:
            kinds, recorded = reader.item_kinds(), reader.item_handlers()
            stored = (
                shown_names(reader, kinds) if not abstract else {name: items.found_as(name, kinds) for name in abstract}
            )
            for name, item in stored.items():
                if item not in kinds:
                    raise items.unknown_item(reader.record.epoch, name, kinds)
            asked = {
                item: bridge.restore_args(
                    name, kinds[item], recorded.get(item, ""), (abstract or {}).get(name), context
                )
                for name, item in stored.items()
            }
            with errors.advice_for(_REMEDIES):
                found = reader.restore(ocp.args.Composite(**asked))
            return {name: found[item] for name, item in stored.items() if item in found}

        return self._readers, restore

    def look(self, step: int, look: Callable[[CheckpointReader], T]) -> T:
        """Calls a function with the reader of an epoch."""
        self._saves.drain(step)
        return self._readers.read(step, look)

    def committed(self) -> list[EpochInfo]:
        """The committed epochs, ascending."""
        return self._history.committed()

    def remove(self, step: int) -> Future[bool]:
        """Deletes an epoch, see `delete`; True when its files are removed, else RemovalError."""
        self.delete(step)
        end = self._saves.remove(lambda: None)  # in the same lane, after what was deleted

        def wait() -> bool:
            self._saves.drain_removals()
            if not end.done():
                raise RemovalError(self.root, step, f"it took more than {self._storage.save_timeout_secs:g} s")
            for failure in list(self._saves.in_flight.failures):
                if isinstance(failure, RemovalError) and failure.epoch == step:
                    raise failure
            return True

        return _threads.start(wait)

    def folder(self, epoch: int) -> str:
        """The folder of an epoch, relative to the directory."""
        return self._commits.folder(epoch)

    @property
    def voting(self) -> tuple[Any, str, Callable[[], str]]:
        """What `Continuous` needs: coordinator, prefix of keys, and the name of the last save."""
        return self._coordinator, f"{self._prefix}/next", lambda: self._saves.last


def shown_names(reader: CheckpointReader, kinds: Mapping[str, str]) -> dict[str, str]:
    """The stored name of each item by the name that v1 gives it."""
    if len(kinds) == 1 and reader.record.default_item:
        return {STATE: next(iter(kinds))}
    return {name: name for name in kinds}


def tree_name(reader: CheckpointReader) -> str:
    """The item that stands for an epoch if none is named: the unnamed one, else the first tree by name."""
    kinds = reader.item_kinds()
    name = items.found_as(STATE, kinds)
    trees = sorted(item for item, kind in kinds.items() if kind == "arrays")
    if name not in kinds and not trees:
        raise UnknownNameError(f"checkpoint {reader.record.epoch} has no tree; it has: {', '.join(kinds) or 'nothing'}")
    return name if name in kinds else trees[0]


class _Vote:
    """On the call at which the next save may begin, once a save has ended."""

    def __init__(self) -> None:
        self.ended = False  # the save, as far as this process knows
        self.result: Future[int] = Future()


class Continuous:
    """The default policy: a save whenever none is in progress. No process waits for another one's save.

    In a job of several processes all have to give one answer, and hear of the end of a save at different times. So when
    a save ends, each process names in the background the last call that it has answered, with no, and the primary makes
    the call after the last of these the next save. A process whose save has ended waits for that: for as long as the
    others are behind.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._votes: dict[str, _Vote] = {}
        self._asked: tuple[int, int] | None = None  # a step, and how often the caller had waited
        self._answer, self._calls = False, 0
        self._kept = RecentKeys(_KEPT_VOTES)

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Whether no save is in progress; the same on every process."""
        coordinator, _, last = self._engine.voting
        if coordinator.processes == 1:
            return not self._engine.is_saving_in_progress()
        asked = (step.step, self._engine.waits)
        if asked != self._asked:
            self._asked = asked
            self._calls += 1  # before the vote is looked at: see `ended`
            self._answer = not last() or self._next(self._votes.setdefault(last(), _Vote()))
        return self._answer

    def _next(self, vote: _Vote) -> bool:
        return vote.ended and self._calls >= vote.result.result()

    def ended(self, name: str) -> None:
        """Takes part in the vote that follows a save."""
        coordinator, prefix, _ = self._engine.voting
        if coordinator.processes == 1:
            return
        vote = self._votes.setdefault(name, _Vote())
        if vote.ended:  # it could not begin, and was counted as failed then
            return
        if not threading.main_thread().is_alive():  # the interpreter is ending: nobody asks for another save
            return
        vote.ended = True  # first: a call that does not see it is among those that are counted now
        answered = self._calls
        for other in [key for key in self._votes if key != name and self._votes[key].result.done()]:
            self._votes.pop(other, None)
        prefix = f"{prefix}/{name}"

        def agree() -> int:
            patience = Timeouts(
                collect_secs=_VOTE_SECS,
                hear_secs=2 * _VOTE_SECS,
                late_text=f"{{names}} did not end save {name} within {{secs:g}} s",
            )
            following = collective(coordinator, prefix, lambda: answered, lambda counts: max(counts) + 1, patience)
            if coordinator.primary:
                self._kept.add(coordinator, prefix)
            return following

        _threads.start(lambda: vote.result.run(agree))
