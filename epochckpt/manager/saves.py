"""The saves of a manager: what is asked for is checked, planned, copied and handed to the background."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _patience, _threads, _units, errors
from epochckpt._threads import Deadline
from epochckpt.arrays import Planner, item_names, save_items
from epochckpt.arrays.snapshot import Snapshot
from epochckpt.arrays.user_json import checked_json
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.errors import (
    EpochExistsError,
    InvalidArgumentError,
    SaveError,
    SaveErrorGroup,
)
from epochckpt.format import Nodes
from epochckpt.manager.access import Access
from epochckpt.manager.arguments import Arguments
from epochckpt.manager.notifier import HandlerNotifier
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.outcomes import Listener
from epochckpt.manager.readers import Readers
from epochckpt.manager.status import SaveResult
from epochckpt.options import StorageOptions
from epochckpt.orbax.step_log import StepLog
from epochckpt.saving import Claim, History, Save, SaveQueue, SaveRequest, policies
from epochckpt.saving.opening import Opened
from epochckpt.saving.survey import Survey
from epochckpt.tiers import JobMirror, LedgerFile, MirroredDirectory


@dataclasses.dataclass(frozen=True)
class SaveCall:
    """What a caller of `save` has passed."""

    epoch: int
    args: Any  # of Orbax
    several: bool  # whether these are several items, by name
    metrics: Any
    custom_metadata: Mapping[str, Any] | None
    force: bool
    began: float  # by the monotonic clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """How a manager saves."""

    options: ocp.CheckpointManagerOptions
    storage: StorageOptions
    asynchronous: bool  # the caller does not wait for a save
    threads: int  # that write
    root_files: Mapping[tuple[str, str], bytes]  # written with the claim, see `Claim`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decisions:
    """Orbax's policy, and what it asks the manager; a subclass of the manager may override these methods."""

    policy: Any
    in_progress: Callable[[], bool]
    reached_preemption: Callable[[int], bool]


class Saves:
    """The saves of one manager on one process, with the claim to its directory and the queue of its saves.

    Attributes:
        arguments: what `save` may be given.
        claim: the claim to the directory.
        queue: the saves that have begun.
        foreign: descriptions of folders that are only named like an epoch, by number, as of the last look.
        waits: how often the caller has waited for all saves; each process makes these calls alike.
        asynchronous: whether the caller does not wait for a save.
        timeout_secs: the bound on a save, see `StorageOptions.save_timeout_secs`.
    """

    def __init__(
        self,
        *,
        directory: Opened,
        readers: Readers,
        history: History,
        arguments: Arguments,
        access: Access,
        settings: SaveSettings,
        decisions: Decisions,
        listener: Listener,
        notifier: HandlerNotifier,
        step_log: StepLog,
        mirror: JobMirror,
        ledger: LedgerFile,
    ):
        self._directory = directory
        self._readers = readers
        self._history = history
        self._access = access
        self._options = settings.options
        self._storage = settings.storage
        self._threads = settings.threads
        self._decisions = decisions
        self._listener = listener
        self._notifier = notifier
        self._step_log = step_log
        self._mirror = mirror
        self._ledger = ledger
        self._overwrites: dict[int, ReplaceCondition] = {}  # by the epochs that the next save may replace
        self.arguments = arguments
        self.foreign = directory.survey.foreign
        self.waits = 0
        self.asynchronous = settings.asynchronous
        self.timeout_secs = settings.storage.save_timeout_secs
        self.claim = Claim(
            directory=directory.job_directory,
            refused=directory.refused,
            on_claim=self._claimed,
            root_files=settings.root_files,
        )
        self.queue = SaveQueue(
            opened=directory,
            claim=self.claim,
            options=settings.storage,
            history=history,
            policies=settings.options,
            listener=listener,
        )
        self.take_nodes(directory.nodes)

    def take_survey(self, survey: Survey) -> None:
        """Learns what a look at the directory has found."""
        self.foreign = survey.foreign

    def take_nodes(self, nodes: Nodes) -> None:
        """Says which nodes save from now on."""
        store = self._directory.store
        self.nodes = nodes
        self.queue.name_nodes(nodes)
        self._directory.job_directory.name_nodes(nodes)
        self.planner = Planner(
            nodes,
            self._storage,
            self._storage.part_bytes or store.preferred_part_bytes,
            writers=self._threads,
            cut=store.sequential_writes,
        )

    def last_name(self) -> str:
        """The name of the last save that has begun; empty before the first."""
        return self.queue.last

    # -- deciding ------------------------------------------------------------------------------------------------------

    def should_save(self, step: int, *, ignore_later: bool = False) -> bool:
        """See `CheckpointManager.should_save`."""
        step = epoch_number(step)
        if not self.is_wanted(step, ignore_later=ignore_later):
            return False
        if self.is_blocked(step):
            logging.error("%s", self.how_to_unblock(step))
            return False
        return True

    def is_wanted(self, step: int, *, ignore_later: bool) -> bool:
        """Whether the options ask for an epoch; a foreign folder may be in its place."""
        if self._options.read_only:
            logging.log_first_n(logging.WARNING, "%s is read only: nothing is saved", 1, self._directory.store.root)
            return False
        requested = self._history.requested(self.queue.saving())
        if ignore_later or step in self._overwrites:
            requested = [info for info in requested if info.step < step]
        if requested and requested[-1].step >= step:
            logging.info("checkpoint %d is not saved without force: %d was requested already", step, requested[-1].step)
            return False
        return policies.decide_save(
            policy=self._decisions.policy,
            options=self._options,
            step=step,
            requested=requested,
            saving=self._decisions.in_progress,
            preempted=self._decisions.reached_preemption(step),
            pace=self._history.pace,
        )

    def is_blocked(self, step: int) -> bool:
        """Whether an epoch cannot be saved, because a foreign folder has its place."""
        return step in self.foreign and step not in self._overwrites

    def how_to_unblock(self, step: int) -> str:
        """Why an epoch is blocked, and what to do."""
        return f"checkpoint {step} cannot be saved: {self.foreign[step]}; then call reload(), or take another number"

    # -- saving --------------------------------------------------------------------------------------------------------

    def call(
        self,
        step: int,
        *,
        items: Any = None,
        save_kwargs: Any = None,
        args: Any = None,
        metrics: Any = None,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveCall:
        """Checks what a caller asks for; the arguments are those of `CheckpointManager.save`.

        Raises:
            InvalidArgumentError: the manager is closed, may not write, or cannot take these arguments.
        """
        began = time.monotonic()
        step = epoch_number(step)
        self._access.check_open("save")
        if not self._options.read_only:
            self._access.check_write("save")
        args, several = self.arguments.of_save(items, save_kwargs, args)
        return SaveCall(
            epoch=step,
            args=args,
            several=several,
            metrics=metrics,
            custom_metadata=custom_metadata,
            force=force,
            began=began,
        )

    def begin(self, call: SaveCall) -> Save | None:
        """Saves an epoch in the background, see `CheckpointManager.save`; None if it exists, and nothing is saved."""
        step = call.epoch
        directory = self._directory
        root = directory.store.root
        # An epoch that exists is only replaced with permission, which this save uses up, whatever comes of it.
        overwrite = self._overwrites.pop(step, None)
        number = self.queue.next_try(step)
        exists = step in [save.epoch for save in self.queue.saving()] or self._history.is_known(step)
        if exists and overwrite is None:
            if self._history.is_own(step):
                self._say_requested(step)
                return None
            if not call.force:
                return None
            raise EpochExistsError(
                f"{root}: checkpoint {step} exists or is being saved. If this program has saved it, it needs no "
                f"second save: after wait_until_finished(), latest_step() and all_steps() name it. To save something "
                f"else under this number, let the next save take its place with allow_overwrite({step}) (in Orbax's "
                f"words: Checkpoint for step {step} already exists). If another run has deleted it since this manager "
                "looked, reload() or claim() tells"
            )
        if step in self.foreign and overwrite is None:
            raise EpochExistsError(self.how_to_unblock(step))
        snapshot: Snapshot | None = None
        try:
            # Plan the save, wait until older ones leave room for it, then copy what can still change.
            planned = time.monotonic()
            self.claim.check(step)
            directory.epoch_directory.names.check(step)
            to_save = save_items.to_save(call.args, self.arguments.handlers)
            item_names.check_names([item.name for item in to_save], self.nodes.folders, self.arguments.item_names)
            plan = self.planner.plan(to_save)
            ready = time.monotonic()
            kept_metrics = self._metrics_of(step, call.metrics)
            kept_metadata = checked_json(dict(call.custom_metadata or {}), "custom_metadata")
            behind = self.queue.make_room(step, plan.place_copies(), plan.runs_handlers)
            room = time.monotonic()
            # Handlers begin to write with the snapshot, and nothing after it may be refused.
            snapshot = Snapshot() if behind is not None else plan.snapshot()
            if (copying_secs := time.monotonic() - room) > _patience.now().long_save_secs:
                text = "save(%d) blocked training until its arrays were computed and copied (%s) and handlers had run: "
                size = _units.nbytes(snapshot.host_copy_bytes)
                secs = _units.secs(copying_secs)
                logging.log_first_n(logging.WARNING, text + "%s", 3, step, size, secs)
            # Hand it to the background. The time starts now: the snapshot has waited for the device.
            blocked_secs = time.monotonic() - call.began
            request = SaveRequest(
                epoch=step,
                number=number,
                default_item=not call.several,
                metrics=kept_metrics,
                custom_metadata=kept_metadata,
                replaces=self._history.damaged.get(step) or overwrite,
                started_ns=time.time_ns() - round(blocked_secs * 1e9),
                started=call.began,
                blocked_secs=blocked_secs,
                nbytes=plan.nbytes / directory.coordinator.processes,
                log_entry=self._step_log.begun(
                    step,
                    root,
                    began=call.began,
                    planned=planned,
                    ready=ready,
                    room=room,
                    nbytes=plan.nbytes,
                    preempted=not call.force and self._decisions.reached_preemption(step),
                    waits=not self.asynchronous,
                ),
                refusal=behind,
            )
            save = Save(request, snapshot, Deadline(self._storage.save_timeout_secs))
            self._history.begin(step)
            if behind is None:
                self.queue.submit(save)
            else:
                self.queue.refuse(save, behind)
        except BaseException as error:  # Ctrl-C, too, and it may come when the save is already submitted
            if snapshot is not None and all(save.snapshot is not snapshot for save in self.queue.pending()):
                snapshot.drop()
            if directory.coordinator.processes > 1:  # the other processes need not wait for this one
                refused = SaveRequest(epoch=step, number=number, refusal=errors.copied(step, error))
                self.queue.submit(Save(refused, Snapshot(), Deadline(self._storage.save_timeout_secs)))
            raise
        self.arguments.learn(call.several)
        return save

    def _metrics_of(self, epoch: int, metrics: Any) -> Any:
        """The metrics that are kept with an epoch: without `best_fn` those of them that are JSON. Orbax keeps none."""
        if self._options.prevent_write_metrics:
            return None
        try:
            return checked_json(metrics, "metrics")
        except InvalidArgumentError as error:
            if self._options.best_fn is not None:
                raise
            text = "checkpoint %d is saved without some of its metrics: %s"
            logging.log_first_n(logging.WARNING, text, 3, epoch, error)
        kept = {}
        for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
            with contextlib.suppress(InvalidArgumentError):
                kept |= checked_json({name: value}, "metrics")
        return kept or None

    def _say_requested(self, epoch: int) -> None:
        """Logs why an epoch that this manager has saved just now is not saved once more."""
        again = f"{self._directory.store.root}: checkpoint {epoch} is not saved again, because this manager"
        failure = self.queue.failure(epoch)
        if epoch in [save.epoch for save in self.queue.saving()]:
            logging.info("%s is saving it now; wait_until_finished() waits for that", again)
        elif failure is None:
            logging.info("%s has just saved it", again)
        else:
            state, reason = failure
            text = "%s has just tried to: that save is %s (%s). Try again after wait_until_finished(), which raises it"
            logging.warning(text, again, state, reason)

    # -- replacing an epoch --------------------------------------------------------------------------------------------

    def allow_overwrite(self, epoch: int) -> None:
        """See `CheckpointManager.allow_overwrite`."""
        epoch = epoch_number(epoch)
        self._access.check_write("allow_overwrite")
        self._directory.job_directory.check_replaceable(epoch)
        self.claim.check(epoch)
        self.queue.drain(epoch)
        if self.claim.known:
            self._directory.job_directory.stager.check(epoch)
        if epoch in self._history.remote:  # nothing gives way here; the mirror's copy is replaced after the commit
            self._overwrites[epoch] = ReplaceCondition(self._readers.summary(epoch).save_id)
        else:
            self._overwrites[epoch] = self._directory.epoch_directory.replace_condition(epoch)

    def refuse_overwrite(self, epoch: int) -> None:
        """Takes the permission back that `allow_overwrite` gave, if no save has used it."""
        self._overwrites.pop(epoch, None)

    # -- the end of saves ----------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits as `CheckpointManager.wait_until_finished` does; raises no failure of a save."""
        try:
            self._step_log.waited(self.queue.drain_removals)
            self._notifier.drain(self._storage.save_timeout_secs)
            self._history.forget_failed()
        finally:
            self.waits += 1

    def call_at_end(self, callback: Callable[[Save, SaveError | None], None]) -> None:
        """Calls a function with every save that ends, and with its failure, if it has failed; it must not fail."""
        self._listener.call_at_end(callback)

    def pop_results(self) -> list[SaveResult]:
        """See `CheckpointManager.pop_save_results`."""
        return self._listener.pop_results()

    def check_for_errors(self) -> None:
        """See `CheckpointManager.check_for_errors`."""
        failures = self.queue.pop_failures()
        if failures:
            saves = [failure for failure in failures if isinstance(failure, SaveError)]
            error = SaveErrorGroup(saves) if len(saves) > 1 else (saves or failures)[0]
            for other in (each for each in failures if each is not error and each not in saves):
                error.add_note(str(other))
            if (other := sys.exception()) is not None:  # in a `finally`: a traceback shows the cause alone
                error.add_note(f"Raised while another error was on its way: {type(other).__name__}: {other}")
            raise error

    def release(self) -> None:
        """Lets go of the directory, on the primary, and on every process that has a disk of its own; bounded."""
        if not self._directory.job_directory.acts:
            return
        wait_secs = self._storage.open_timeout_secs
        _threads.logged(
            f"{self._directory.store.root}: at its end",
            lambda: _threads.start(self.claim.release).result(wait_secs),
        )

    def _claimed(self, epochs: list[int]) -> None:
        """On every process, when the directory is claimed: these epochs are committed there."""
        directory = self._directory
        coordinator = directory.coordinator
        self._listener.claimed(epochs)
        if coordinator.processes == 1:
            self._history.forget_gone()
        if directory.job_directory.acts:
            self._ledger.claimed(directory.job_directory.writer)
        if coordinator.primary:
            _threads.logged(f"{directory.store.root}: its mirror's ledger", self._ledger.settle)
        mirrored = MirroredDirectory(
            local=directory.epoch_directory,
            ledger=self._ledger,
            coordinator=coordinator,
            prefix=directory.prefix,
            epochs=epochs,
        )
        self._mirror.claimed(mirrored)
