"""What the v1 interface adds to our manager: how each save ended, saves that can be cancelled, items by either name."""

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
from epochckpt.arrays import item_names
from epochckpt.errors import RemovalError, SaveError, StepExistsError, UnknownNameError
from epochckpt.format import ItemKind
from epochckpt.manager import CheckpointManager, CheckpointReader, Readers, Response, RestoreRequest
from epochckpt.manager.components import Components
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.response import FutureResponse
from epochckpt.options import StorageOptions
from epochckpt.orbax import object_view
from epochckpt.saving import EpochInfo, Save
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
        self._engine = engine
        self._outcome = outcome

    def _wait(self, timeout: float | None) -> bool:
        deadline = Deadline(math.inf if timeout is None else timeout)
        save, failure = self._outcome.result(timeout)
        if self._engine.is_pending(save) and not save.done.wait(None if timeout is None else deadline.left()):
            raise TimeoutError(f"no result within {timeout} s")
        self._engine.settle(save)
        if failure is not None:
            raise failure
        return True

    def _told(self, failure: SaveError | RemovalError) -> None:
        self._engine.told(failure)


class DeletionResponse(FutureResponse[bool]):
    """The response of a deletion: whether there was an epoch to delete; `result` raises what kept its files there."""

    def __init__(self, engine: "Engine", removed: Future[bool]):
        super().__init__(removed)
        self._engine = engine

    def _told(self, failure: SaveError | RemovalError) -> None:
        self._engine.told(failure)


class Engine:
    """A CheckpointManager for one unnamed item, or several named ones, which may differ from epoch to epoch.

    Attributes:
        manager: the manager.
    """

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
        self._continuous: Continuous | None = None
        if options.save_decision_policy is None:
            self._continuous = Continuous()
            preempted = decide.PreemptionCheckpointingPolicy()
            options.save_decision_policy = decide.AnySavePolicy(
                [decide.InitialSavePolicy(), self._continuous, preempted]
            )
        self.manager = CheckpointManager(
            directory,
            options=options,
            metadata=metadata,
            logger=logger,
            handler_registry=bridge.Registry(),
            storage=storage,
            node=node,
        )
        components = self.manager.components
        if self._continuous is not None:
            self._continuous.connect(components)
        self._directory = components.directory
        self._readers = components.readers
        self._history = components.history
        self._saves = components.saves
        self._restores = components.restores
        self._saves.call_at_end(self._hear)
        self._restores.newest_call = "load()"

    # -- saving --------------------------------------------------------------------------------------------------

    def save_epoch(
        self,
        step: int,
        items_by_name: Mapping[str, Any],
        context: Any,
        *,
        overwrite: bool,
        metrics: Any,
        force: bool,
        custom_metadata: Mapping[str, Any] | None,
    ) -> SaveResponse | None:
        """Begins to save, see `CheckpointManager.save`; None if the policy does not ask for it."""
        step = epoch_number(step)
        self._make_way(step, overwrite)
        args = self._save_args({name: bridge.save_args(name, value, context) for name, value in items_by_name.items()})
        self._saves.arguments.learn(None)  # each epoch has its own items
        try:
            call = self._saves.call(step, args=args, metrics=metrics, force=force, custom_metadata=custom_metadata)
            if not (force or self.manager.should_save(step)):
                return None
            save = self._saves.begin(call)
        finally:
            self._saves.refuse_overwrite(step)
            self._saves.arguments.learn(None)
        if save is None:
            return None
        end = self._ends.setdefault(save.name, Future())
        for other in [key for key, future in self._ends.items() if key != save.name and future.done()]:
            self._ends.pop(other, None)
        return SaveResponse(self, end)

    def _save_args(self, by_name: Mapping[str, Any]) -> Any:
        """The argument of a save: of several items by name, or of the one unnamed item."""
        if [*by_name] != [STATE]:
            return ocp.args.Composite(**by_name)
        if object_view.is_of_use(self._directory.store):
            return ocp.args.Composite(**{_IN_BUCKETS: by_name[STATE]})
        return by_name[STATE]

    def _make_way(self, step: int, overwrite: bool) -> None:
        """Lets a save take the place of an epoch, if that is asked for; a save that failed is in nobody's way."""
        if overwrite:
            self._saves.queue.drain(step)
        root = self.manager.root
        in_flight = step in [save.epoch for save in self._saves.queue.saving()]
        committed = step in self.manager.all_steps()
        if (in_flight or committed) and not overwrite and self._history.is_own(step):
            return  # `save` says that it was requested just now
        if committed:
            if not overwrite:
                raise StepExistsError(
                    f"{root}: checkpoint {step} exists: overwrite=True lets this save take its place, delete() "
                    f"removes it (in Orbax's words: Step {step} already exists)"
                )
            self._saves.allow_overwrite(step)
        elif not in_flight:
            self._history.drop([step])
        else:
            raise StepExistsError(
                f"{root}: checkpoint {step} is being saved: overwrite=True waits for that and lets this save take "
                f"its place (in Orbax's words: Step {step} already exists)"
            )

    def _hear(self, save: Save, failure: SaveError | None) -> None:
        """Enters how a save has ended."""
        if failure is not None and save.was_cancelled:
            self.told(failure)
        self._ends.setdefault(save.name, Future()).set((save, failure))
        if self._continuous is not None:
            self._continuous.ended(save.name)

    def settle(self, save: Save) -> None:
        """The caller has been told how a save has ended."""
        self._history.settle(save.epoch)

    def is_pending(self, save: Save) -> bool:
        """Whether a save still has to leave the saves in flight."""
        return save in self._saves.queue.pending()

    def told(self, failure: SaveError | RemovalError) -> None:
        """The caller knows of a failure: `wait_until_finished` and `close` do not raise it once more."""
        self._saves.queue.forget_failure(failure)

    def cancel(self) -> None:
        """No save that is in flight is committed any more, unless it is just being committed; all processes call it."""
        for save in self._saves.queue.pending():
            save.cancel()

    # -- restoring and looking -----------------------------------------------------------------------------------

    def load(self, step: int | None, abstract: Mapping[str, Any] | None, context: Any) -> dict[str, Any]:
        """The items of an epoch by name, verified; None: the newest epoch that every process can read, all items."""
        return self._restores.run(step, _ItemsByName(self._readers, abstract, context))

    def begin_load(self, step: int | None, abstract: Mapping[str, Any] | None, context: Any) -> Response:
        """The same in the background, see `CheckpointManager.restore_async`."""
        return self._restores.begin(step, _ItemsByName(self._readers, abstract, context))

    def look(self, step: int, look: Callable[[CheckpointReader], T]) -> T:
        """Calls a function with the reader of an epoch."""
        self._saves.queue.drain(step)
        return self._readers.read(step, look)

    def committed(self) -> list[EpochInfo]:
        """The committed epochs, ascending."""
        return self._history.committed()

    def remove(self, step: int) -> Future[bool]:
        """Deletes an epoch, see `delete`; True when its files are removed, else RemovalError."""
        self.manager.delete(step)
        queue = self._saves.queue
        end = queue.remove(lambda: None)  # in the same lane, after what was deleted

        def wait() -> bool:
            queue.drain_removals()
            if not end.done():
                raise RemovalError(self.manager.root, step, f"it took more than {self._saves.timeout_secs:g} s")
            for failure in queue.untold_failures():
                if isinstance(failure, RemovalError) and failure.epoch == step:
                    raise failure
            return True

        return _threads.start(wait)

    def folder(self, epoch: int) -> str:
        """The folder of an epoch, relative to the directory."""
        return self._directory.epoch_directory.folder(epoch)


class _ItemsByName(RestoreRequest[dict[str, Any]]):
    """The items of an epoch by the names that v1 gives them: those that are asked for, or all."""

    def __init__(self, readers: Readers, abstract: Mapping[str, Any] | None, context: Any):
        super().__init__(readers)
        self._abstract = abstract or {}
        self._context = context

    def result_of(self, reader: CheckpointReader) -> dict[str, Any]:
        kinds = reader.item_kinds()
        recorded = reader.item_handlers()
        stored = {name: item_names.stored_name(name, kinds) for name in self._abstract} or shown_names(reader, kinds)
        for name, item in stored.items():
            if item not in kinds:
                raise item_names.unknown_item(reader.record.epoch, name, kinds)
        args = {}
        for name, item in stored.items():
            args[item] = bridge.restore_args(
                name, kinds[item], recorded.get(item, ""), self._abstract.get(name), self._context
            )
        with errors.advice_for(_REMEDIES):
            restored = reader.restore(ocp.args.Composite(**args))
        return {name: restored[item] for name, item in stored.items() if item in restored}


def shown_names(reader: CheckpointReader, kinds: Mapping[str, ItemKind]) -> dict[str, str]:
    """The stored name of each item by the name that v1 gives it."""
    if len(kinds) == 1 and reader.record.default_item:
        return {STATE: next(iter(kinds))}
    return {name: name for name in kinds}


def tree_name(reader: CheckpointReader) -> str:
    """The item that stands for an epoch if none is named: the unnamed one, else the first tree by name."""
    kinds = reader.item_kinds()
    name = item_names.stored_name(STATE, kinds)
    trees = sorted(item for item, kind in kinds.items() if kind is ItemKind.ARRAYS)
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

    def __init__(self) -> None:
        self._votes: dict[str, _Vote] = {}
        self._asked: tuple[int, int] | None = None  # a step, and how often the caller had waited
        self._answer = False
        self._calls = 0
        self._kept = RecentKeys(_KEPT_VOTES)

    def connect(self, components: Components) -> None:
        """Says of which manager it is the policy, before that saves."""
        self._directory = components.directory
        self._saves = components.saves

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Whether no save is in progress; the same on every process."""
        if self._directory.coordinator.processes == 1:
            return not self._saves.queue.pending()
        call = (step.step, self._saves.waits)
        if call != self._asked:
            self._asked = call
            self._calls += 1  # before the vote is looked at: see `ended`
            last = self._saves.last_name()
            self._answer = not last or self._next(self._votes.setdefault(last, _Vote()))
        return self._answer

    def _next(self, vote: _Vote) -> bool:
        return vote.ended and self._calls >= vote.result.result()

    def ended(self, name: str) -> None:
        """Takes part in the vote that follows a save."""
        coordinator = self._directory.coordinator
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
        prefix = f"{self._directory.prefix}/next/{name}"

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
