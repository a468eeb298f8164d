"""`CheckpointManager`: Orbax's interface, over the packages `commit` and `arrays` and the modules beside this one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_manager

from epochckpt import _threads, _units, errors
from epochckpt._threads import Deadline
from epochckpt.agreement import CollectiveCalls, coordination
from epochckpt.arrays import EpochReader, Planner
from epochckpt.arrays import items as items_lib
from epochckpt.arrays.snapshot import Snapshot, checked_json, root_metadata
from epochckpt.directory.protocol import ReplaceCondition
from epochckpt.errors import (
    EpochExistsError,
    EpochNotFoundError,
    InvalidArgumentError,
    RemovalError,
    SaveError,
    SaveErrorGroup,
    UnsupportedError,
)
from epochckpt.format import Nodes, paths
from epochckpt.manager import outcomes, status
from epochckpt.manager.metadata_handlers import check_handler
from epochckpt.manager.notifier import HandlerNotifier
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.reader import CheckpointReader, shown_path
from epochckpt.manager.readers import Readers, apart, together
from epochckpt.manager.restoring import Asked, Response, Restores
from epochckpt.options import StorageOptions
from epochckpt.orbax import Handlers, StepNames, step_log
from epochckpt.orbax.options import check_args, check_options, storage_options
from epochckpt.saving import Claim, History, Save, SaveQueue, SaveRequest, opening, retention
from epochckpt.saving.common_calls import CommonCalls
from epochckpt.saving.hosts import Hosts
from epochckpt.saving.queue import LONG_SECS
from epochckpt.tiers import LedgerFile, Mirror

T = TypeVar("T")

errors.join_orbax()

_QUIET_SECS = 10.0  # an exit that takes longer says why


class CheckpointManager(ocp.AbstractCheckpointManager):
    """Saves and restores epochs as `directory/<epoch>/<node>/`; a drop-in for `orbax.checkpoint.CheckpointManager`.

    Construct it, and call `save`, on every process. Saves are asynchronous: `save` returns when its arguments have been
    copied or can no longer change, and an epoch exists (`all_steps`, `latest_step`, any reader) only when every node
    has written its part.

    A failed save never harms an earlier epoch and never stops training: it is logged, and raised by
    `wait_until_finished`, `check_for_errors` or `close`.

    In a job of several processes all must call `reload`, `restore`, `restore_newest` and the methods that change the
    directory. Methods that read, replace or delete an epoch raise EpochNotFoundError if it does not exist.

    Examples:
        >>> import jax.numpy as jnp
        >>> import orbax.checkpoint as ocp
        >>> import epochckpt as ec
        >>> state = {"params": {"w": jnp.arange(3.0)}, "step": 7}
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(0, args=ocp.args.StandardSave(state))
        >>> with ec.CheckpointManager("run") as manager:
        ...     restored = manager.restore(None, args=ocp.args.StandardRestore(state))
        ...     print(manager.latest_step(), restored["params"]["w"], restored["step"])
        0 [0. 1. 2.] 7
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        storage: StorageOptions | None = None,
        node: str | Sequence[str] | None = None,
        metadata_handler: Any = None,
    ):
        """Opens a directory. In a job of several processes all must do so; the wait for them is bounded.

        Opening writes nothing but the directory itself where it is missing, and never stops a run that trains there.
        The first save, delete or rollback claims the directory, or `claim()`; from then on an older run that saves
        there gets FencedError.

        Args:
            directory: where the epochs live: a path (relative ones and `~` are fine) or a URL (`gs://`, …).
            checkpointers: Orbax's legacy form: a Checkpointer, or several by item name, for their handlers.
            options: Orbax's options; its policies decide what is saved and kept.
            metadata: JSON for the whole directory, see `metadata()`; written once, with the first write.
            item_names: names of the items, if several are saved together with `args.Composite`.
            item_handlers: a handler for the one unnamed item, or handlers by item name. Orbax's own, unmodified, only
                select what our engine does; others are run.
            logger: an Orbax logger, which is given an entry for every commit and every `restore`; without it Orbax's
                `StandardLogger`, which writes the entries to the log at INFO.
            handler_registry: an Orbax `CheckpointHandlerRegistry`, instead of item_handlers.
            storage: how bytes get to storage, and timeouts.
            node: this process's node name, `process_<index>` by default; in a job of one process also the names of
                several nodes, all of which it then hosts.
            metadata_handler: see `epochckpt.metadata`; the primary notifies it of the nodes and of every commit.

        Raises:
            NotACheckpointDirectoryError: a file is there.
            AccessError: this user may not read it, or not create it.
            FormatVersionError: a record of the directory itself needs a newer epochckpt.
            InvalidArgumentError: options that contradict each other, or unusable or repeated names of nodes or items.
            CoordinationTimeoutError: a process did not come to open it; the error names the process.
        """
        self.metadata_handler = None if metadata_handler is None else check_handler(metadata_handler)
        self._options = check_options(options or ocp.CheckpointManagerOptions())
        self._storage = storage_options(self._options, storage)
        self._handlers = Handlers(item_handlers, handler_registry, checkpointers, item_names)
        self._async = self._options.enable_async_checkpointing and self._handlers.asynchronous
        self._item_names = tuple(item_names or self._handlers.names)
        self._multi: bool | None = True if self._item_names else (False if self._handlers.single else None)
        group = self._options.multiprocessing_options
        coordinator = coordination.connect(self._options.read_only, group.primary_host, group.active_processes)
        self._mirror: Mirror | None = None
        if self._storage.mirror is not None:
            self._mirror = Mirror(self._storage.mirror, self._storage, self._options, lambda: self._nodes.hosted_names)
        opened = opening.open_directory(
            directory, self._options, self._storage, node, coordinator, self._item_names, self._mirror
        )
        self._coordinator, self._commits, self._store = coordinator, opened.commits, opened.store
        self.root = self._store.root  # the directory as text: a path or URL
        self.address = self._store.address  # what opens it again: with the settings of a bucket as its query
        self._prefix = opened.prefix
        self._ledger = LedgerFile(self._commits, serials=self._storage.local_disks)
        if self._mirror is not None:
            self._mirror.learn(opened.survey.copies)
        self._history = History(lambda epoch: self._readers.brief(epoch), coordinator.processes == 1)
        self._history.reset(opened.survey)
        self._history.mirror = self._mirror
        self._history.held = lambda: self._ledger.open
        self._foreign = opened.survey.foreign
        self._policy = retention.save_policy(self._options)
        self._step_log = step_log.StepLog(logger, self.root, self._policy, coordinator.primary, self._async)
        self._metadata: Any = None
        root_files: dict[tuple[str, str], bytes] = {}
        if metadata is not None and (self._options.read_only or self._options.save_root_metadata):
            self._metadata = checked_json(dict(metadata), "metadata")
            root_files[paths.ROOT_METADATA] = root_metadata(metadata)  # written with the claim; a reader never claims
        tells = coordinator.primary and not self._options.read_only
        self._notifier = HandlerNotifier(metadata_handler, tells)
        outcome = self._commits, self._options, self._history, self._notifier, self._step_log
        self._listener = outcomes.Listener(*outcome, self._mirror)
        self._hosts = Hosts.of(opened, self._options, self._mirror, self._storage.open_timeout_secs)
        self._claim = Claim(self._commits, opened.refused, self._claimed, root_files, self._hosts)
        self._saves = SaveQueue(
            opened=opened,
            claim=self._claim,
            options=self._storage,
            history=self._history,
            policies=self._options,
            listener=self._listener,
            hosts=self._hosts,
        )
        self._overwrites: dict[int, ReplaceCondition] = {}  # by the epochs that the next save may replace
        self._preemption = coordination.Preemption()
        self._calls = CollectiveCalls(coordinator, opened.prefix, lambda: self._saves.last)
        common = self._options, self._mirror, self._hosts, self._storage.open_timeout_secs
        self._common = CommonCalls(self._commits, self._claim, self._history, *common)
        parts = self._commits, self._history, self._saves, self._step_log
        self._restores = Restores(*parts, self._storage, self._look)
        self._restores.connect(coordinator, self._calls)
        self._closed = self._ended = self._forked = False
        self._take_nodes(opened.nodes)
        if not self._options.read_only:
            _threads.drain_at_exit(self)

    @property
    def directory(self) -> epath.Path:
        """The directory, resolved."""
        return shown_path(self.root)

    @property
    def processes(self) -> tuple[int, ...] | None:
        """JAX process indices of the processes that save together, the primary first; None if it is read only."""
        return None if self._options.read_only else self._coordinator.ids

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes of the job, in order."""
        return self._nodes.names

    def set_nodes(self, names: Sequence[str]) -> None:
        """Names all nodes of the job, in order, before the first save: node i is process i, or one process hosts all.

        Raises:
            InvalidArgumentError: their number is not that of the processes, or this manager was opened (`node=`), or
                has saved, with other names.
        """
        nodes = self._nodes.renamed(names)
        if nodes == self._nodes:
            return
        if self._saves.last:
            raise InvalidArgumentError(
                f"{self.root}: nodes are named before the first save; this manager has saved as "
                f"{', '.join(self.node_names)}, asked for were {', '.join(nodes.names)}"
            )
        items_lib.check_names(self._item_names, nodes.folders, ())
        self._take_nodes(nodes)

    def introduce_handler(self) -> None:
        """Calls the metadata handler's `set_params` now, not at the first commit; raises its InvalidArgumentError."""
        self._notifier.introduce()

    def _take_nodes(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._saves.name_nodes(nodes)
        self._coordinator.nodes = nodes.names if nodes.processes > 1 else ()
        context = items_lib.RestoreContext(self._handlers, nodes, self._storage.restore_memory_limit_bytes)
        pool = _threads.Pool(max(self._storage.io_threads, self._store.concurrency))
        asked = self._options.single_host_load_and_broadcast
        begin = together(self._coordinator, self._calls, self._storage, asked)
        self._readers = Readers(self._commits, pool, self._storage.verify, context, self._mirror, begin)
        part_bytes = self._storage.part_bytes or self._store.preferred_part_bytes
        cut = not self._store.renames
        self._planner = Planner(nodes, self._storage, part_bytes, writers=pool.threads, cut=cut)
        self._notifier.nodes(self.address, nodes.names)

    def claim(self, *, take_over: bool = True) -> None:
        """Makes this manager the writer of the directory now, instead of at its first write.

        From then on an older run can save and delete nothing: the listed epochs stay the newest until this manager
        saves. `JobRunner` calls it before it trains.

        Args:
            take_over: whether an older run that has not closed the directory, and may be alive, is fenced off; one
                whose process is known to have ended always is.

        Raises:
            FencedError: a newer run has claimed the directory since this manager did.
            AccessError: this user may not write to the directory.
            InvalidArgumentError: this manager is read only; or a run may be alive, and `take_over` is False.
        """
        self._claim.may_take_over = take_over
        self._write("claim", None, lambda: None)

    @property
    def fenced_off(self) -> str:
        """How this manager learned that a newer run has taken over the directory; empty if none has."""
        return "" if self._claim.fenced is None else self._claim.fenced.reason

    # -- which epochs there are ----------------------------------------------------------------------------------------

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """The committed epochs, ascending; with `read` storage is looked at first (see `reload`)."""
        if read:
            self.reload()
        return [info.step for info in self._history.committed()]

    def latest_step(self) -> int | None:
        """The greatest committed epoch that is not known to be damaged, or None. Saves in flight are not in it.

        Its records have been read, its arrays have not: `restore` may find damage there, and from then on this is an
        older epoch.
        """
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The epoch with the best metrics by `options.best_fn` (NaN counts as worst); without it the latest."""
        return retention.best(self._options, self._history.committed())

    def reload(self) -> None:
        """Waits for saves in flight, and looks at storage again; `status` and `verify` do so from one process alone.

        Raises:
            CoordinationTimeoutError: the primary's answer did not come in time.
            StorageError: storage does not answer; this manager knows what it knew before.
        """
        self._saves.drain()
        self._look()

    def _look(self) -> None:
        """On every process: replaces the history by what the primary finds on storage."""
        known = self.all_steps()
        survey = self._common.survey(self._calls)
        self._foreign = survey.foreign
        if self._mirror is not None:
            self._mirror.learn(survey.copies)
        self._history.reset(survey, known)

    def damaged_epochs(self) -> list[int]:
        """Epochs on storage that this manager has found to be damaged; they are not in `all_steps`.

        It learns that when it looks at the records (at construction and in `reload`), and from a restore that fails.
        """
        return sorted(self._history.damaged)

    def foreign_folders(self) -> dict[int, str]:
        """Folders named like epochs that are none, described, by number; as of the last look. They are left alone."""
        return dict(self._foreign)

    # What subclasses and users of Orbax's manager read behind its interface, as far as we found; see docs/orbax.md.

    @property
    def _checkpoints(self) -> Any:
        """The committed epochs as Orbax's `CheckpointInfos`, ascending: a copy."""
        infos: Any = self._history.committed()  # with the attributes of Orbax's
        return checkpoint_manager.checkpoint_info.CheckpointInfos(infos)

    @property
    def _step_name_format(self) -> Any:
        """Orbax's NameFormat of the steps."""
        return self._commits.names.name_format

    def _get_save_directory(self, step: int, directory: epath.Path) -> epath.Path:
        """The folder of an epoch in a directory."""
        return directory / self._commits.names.build(epoch_number(step))

    # -- saving --------------------------------------------------------------------------------------------------------

    def reached_preemption(self, step: int) -> bool:
        """Whether JAX's preemption notice has reached every process; all must call it with the same steps."""
        return self._preemption.reached(step)

    def should_save(self, step: int, *, ignore_later: bool = False) -> bool:
        """Whether the options ask for this epoch to be saved, after those that were requested so far.

        It is False if this epoch or a later one was requested; with `ignore_later` those do not count. It is False, and
        that is logged, if a folder that is no epoch lies in its place (see `foreign_folders`). Such a folder does not
        keep epochs of other numbers from being saved.
        """
        step = epoch_number(step)
        if self._options.read_only:
            logging.log_first_n(logging.WARNING, "%s is read only: nothing is saved", 1, self.root)
            return False
        requested = self._history.requested(self._saves.saving())
        if ignore_later or step in self._overwrites:
            requested = [info for info in requested if info.step < step]
        if requested and requested[-1].step >= step:
            logging.info("checkpoint %d is not saved without force: %d was requested already", step, requested[-1].step)
            return False
        saving, preempted, pace = self.is_saving_in_progress, self.reached_preemption(step), self._history.pace
        if not retention.decide_save(self._policy, self._options, step, requested, saving, preempted, pace):
            return False
        if step in self._foreign and step not in self._overwrites:
            logging.error("%s", self._blocked(step))
            return False
        return True

    def _blocked(self, step: int) -> str:
        """Why an epoch cannot be saved whose place a foreign folder has, and what to do."""
        return f"checkpoint {step} cannot be saved: {self._foreign[step]}; then call reload(), or take another number"

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves an epoch in the background; all processes must call it alike. If it raises, no save was begun.

        It holds training for the time of the copy, and while storage is behind with older saves, for at most
        `StorageOptions.max_blocked_secs`. A save that could not begin by then has failed, on all processes: with a
        StorageBehindError, which arrives as that of any other failed save. Before a save that must not be missed, such
        as the last one, call `wait_until_finished`.

        Args:
            step: the epoch's number.
            items: Orbax's legacy form of args, for managers that were given handlers.
            save_kwargs: goes with items.
            metrics: JSON, kept with the epoch, for `options.best_fn`. Without that, what is no JSON is left out, with a
                warning.
            force: save even if `should_save` says no. An existing epoch is still an error (see `allow_overwrite`), but
                one that this manager has saved since `wait_until_finished` or `reload` was last called: that is logged.
            args: what to save: `args.StandardSave(tree)` or `args.Composite(name=…)`.
            custom_metadata: JSON, kept with the epoch.

        Returns:
            Whether the epoch is to be saved. `wait_until_finished` and `latest_step` show whether it was committed.

        Raises:
            EpochExistsError: with force, the epoch exists, or a folder that is no epoch lies in its place.
            FencedError: an earlier save, or another write, found that a newer run has taken over the directory.
            AccessError: this user may not write to the directory.
            InvalidArgumentError: something in `args` cannot be saved; names it.
            SaveError: only if saves are not asynchronous: the save was begun, and not committed.
            Exception: what a handler that is not ours raises.
        """
        began = time.monotonic()
        step = epoch_number(step)
        self._check_open("save")
        if not self._options.read_only:
            self._check_may_write("save")
        args = self._handlers.arguments(items, save_kwargs, args, "save")
        multi = check_args(args, self._multi)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        # An epoch that exists is only replaced with permission, which this save uses up, whatever comes of it.
        overwrite = self._overwrites.pop(step, None)
        number = self._saves.next_try(step)
        exists = step in [save.epoch for save in self._saves.saving()] or self._history.is_known(step)
        if exists and overwrite is None:
            if self._history.is_own(step):
                self._say_requested(step)
                return False
            if not force:
                return False
            raise EpochExistsError(
                f"{self.root}: checkpoint {step} exists or is being saved. If this program has saved it, it needs no "
                f"second save: after wait_until_finished(), latest_step() and all_steps() name it. To save something "
                f"else under this number, let the next save take its place with allow_overwrite({step}) (in Orbax's "
                f"words: Checkpoint for step {step} already exists). If another run has deleted it since this manager "
                "looked, reload() or claim() tells"
            )
        if step in self._foreign and overwrite is None:
            raise EpochExistsError(self._blocked(step))
        snapshot: Snapshot | None = None
        try:
            # Plan the save, wait until older ones leave room for it, then copy what can still change.
            planned = time.monotonic()
            self._claim.check(step)
            self._commits.names.check(step)
            to_save = items_lib.to_save(args, self._handlers)
            items_lib.check_names([item.name for item in to_save], self._nodes.folders, self._item_names)
            plan = self._planner.plan(to_save)
            ready = time.monotonic()
            kept_metrics = self._metrics_of(step, metrics)
            kept_metadata = checked_json(dict(custom_metadata or {}), "custom_metadata")
            behind = self._saves.make_room(step, plan.copied_bytes, plan.runs_handlers)
            room = time.monotonic()
            # Handlers begin to write with the snapshot, and nothing after it may be refused.
            snapshot = Snapshot() if behind is not None else plan.snapshot()
            if (copying_secs := time.monotonic() - room) > LONG_SECS:
                text = "save(%d) blocked training until its arrays were computed and copied (%s) and handlers had run: "
                size, secs = _units.nbytes(snapshot.copied_bytes), _units.secs(copying_secs)
                logging.log_first_n(logging.WARNING, text + "%s", 3, step, size, secs)
            # Hand it to the background. The time starts now: the snapshot has waited for the device.
            blocked_secs = time.monotonic() - began
            request = SaveRequest(
                epoch=step,
                number=number,
                default_item=not multi,
                metrics=kept_metrics,
                custom_metadata=kept_metadata,
                replaces=self._history.damaged.get(step) or overwrite,
                started_ns=time.time_ns() - round(blocked_secs * 1e9),
                started=began,
                blocked_secs=blocked_secs,
                nbytes=plan.nbytes / self._coordinator.processes,
                log_entry=self._step_log.begun(
                    step,
                    self.root,
                    began=began,
                    planned=planned,
                    ready=ready,
                    room=room,
                    nbytes=plan.nbytes,
                    preempted=not force and self.reached_preemption(step),
                    waits=not self._async,
                ),
                refusal=behind,
            )
            save = Save(request, snapshot, Deadline(self._storage.save_timeout_secs))
            self._history.begin(step)
            if behind is None:
                self._saves.submit(save)
            else:
                self._saves.refuse(save, behind)
        except BaseException as error:  # Ctrl-C, too, and it may come when the save is already submitted
            if snapshot is not None and all(save.snapshot is not snapshot for save in self._saves.pending()):
                snapshot.drop()
            if self._coordinator.processes > 1:  # the other processes need not wait for this one
                refused = SaveRequest(epoch=step, number=number, refusal=errors.copied(step, error))
                self._saves.submit(Save(refused, Snapshot(), Deadline(self._storage.save_timeout_secs)))
            raise
        self._multi = multi
        if not self._async:
            try:
                self.wait_until_finished()
            except RemovalError as failure:  # of older epochs, not of this save, which is committed
                self._saves.in_flight.failures.append(errors.kept(failure))
        return True

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
        again = f"{self.root}: checkpoint {epoch} is not saved again, because this manager"
        failure = self._saves.in_flight.failure(epoch)
        if epoch in [save.epoch for save in self._saves.saving()]:
            logging.info("%s is saving it now; wait_until_finished() waits for that", again)
        elif failure is None:
            logging.info("%s has just saved it", again)
        else:
            state, reason = failure
            text = "%s has just tried to: that save is %s (%s). Try again after wait_until_finished(), which raises it"
            logging.warning(text, again, state, reason)

    def allow_overwrite(self, epoch: int) -> None:
        """Lets the next save of a committed epoch's number replace it; all processes call it alike.

        At any moment, also after a crash, either the old or the new epoch is there (on a file system that cannot
        exchange two folders, such as NFS: is there again after the next write). If another process changes the epoch
        meanwhile, the save fails. A save that fails, or that raises, has used the permission up: call this again.

        Raises:
            FencedError: a newer run has taken over the directory.
            InvalidArgumentError: stock Orbax wrote the epoch, or this manager is read only, or closed.
            UnsupportedError: the processes have local disks.
        """
        epoch = epoch_number(epoch)
        self._check_may_write("allow_overwrite")
        if self._hosts is not None:
            raise UnsupportedError(f"allow_overwrite: not on all disks in one step; delete({epoch}) makes room")
        self._claim.check(epoch)
        self._saves.drain(epoch)
        if self._claim.known:
            self._claim.stager.check(epoch)
        if epoch in self._history.remote:  # nothing gives way here; the mirror's copy is replaced after the commit
            self._overwrites[epoch] = ReplaceCondition(self._readers.brief(epoch).attempt)
        else:
            self._overwrites[epoch] = retention.replace_condition(self._commits, epoch)

    def is_saving_in_progress(self) -> bool:
        """Whether a save of this process has not ended yet."""
        return bool(self._saves.pending())

    def wait_until_finished(self) -> None:
        """Waits until every save is committed or has failed, and the files of deleted epochs are removed.

        Raises:
            SaveError: a save failed; each failure is raised once, several in a SaveErrorGroup.
            RemovalError: what `delete` has deleted could not be removed; or (RetentionError) an epoch that the options
                no longer keep could not be deleted, which is raised once. After a failed save this is a note there.
        """
        self._step_log.waited(self._saves.drain_removals)
        self._notifier.drain(self._storage.save_timeout_secs)
        self._history.forget_failed()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises the failures of saves and removals that have ended, each once; does not wait."""
        failures = self._saves.in_flight.pop_errors()
        if failures:
            saves = [failure for failure in failures if isinstance(failure, SaveError)]
            error = SaveErrorGroup(saves) if len(saves) > 1 else (saves or failures)[0]
            for other in (each for each in failures if each is not error and each not in saves):
                error.add_note(str(other))
            if (other := sys.exception()) is not None:  # in a `finally`: a traceback shows the cause alone
                error.add_note(f"Raised while another error was on its way: {type(other).__name__}: {other}")
            raise error

    def pop_save_results(self) -> list[status.SaveResult]:
        """Results of this process's saves that have ended since the last call, in order; does not wait.

        The newest thousand are kept. A save that `save` itself refused is not among them.
        """
        return self._listener.pop_results()

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restores an epoch, on any number of processes and any sharding; every byte is verified first.

        In a job of several processes all call it alike, and either all of them get the epoch or all raise. A process
        that restores by itself opens the directory with `read_only=True`. An epoch that turns out to be damaged is then
        in `damaged_epochs()`, and `latest_step()` names an older one: a loop around `restore(latest_step())` ends.

        Args:
            step: its number, or None for the newest that every process can read (agreed by vote).
            items: Orbax's legacy form of args, for managers that were given handlers.
            restore_kwargs: goes with items.
            directory: restore from another directory.
            args: `args.StandardRestore(target)` or `args.Composite(name=…)`; None: all items as they were saved.

        Returns:
            The item, or a Composite of items.

        Raises:
            MismatchError: the target does not fit; lists every leaf.
            DamagedError: bytes differ from what was written; if `step` is None, those of every epoch.
            StorageError: storage does not answer, also when asked again. No older epoch is taken instead.
        """
        return self._restores.run(step, self._asked(items, restore_kwargs, directory, args))

    def restore_async(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Response[Any]:
        """Like `restore`, in the background: returns a response, whose `result()` gives or raises what `restore` does.

        In a job of several processes the epoch, or the newest one that this process knows, is read ahead, and all call
        `result()`, which votes. Where processes share what they read, `result()` does it all.
        """
        return self._restores.begin(step, self._asked(items, restore_kwargs, directory, args))

    def _asked(self, items: Any, restore_kwargs: Any, directory: Any, args: Any) -> Asked[Any]:
        """What a call of `restore` asks for."""
        args = self._handlers.arguments(items, restore_kwargs, args, "restore")
        multi = check_args(args, self._multi, restoring=True)
        readers = self._readers if directory is None else self._readers.elsewhere(directory, self._storage.store)

        def restore(reader: CheckpointReader) -> Any:
            value, self._multi = reader.restore(args), multi
            if not (self._options.read_only or self._forked):
                self._planner.plan_ahead(args, value)
            return value

        return readers, restore

    def restore_newest(self, restore: Callable[[int], T], among: Sequence[int] | None = None) -> tuple[int, T]:
        """Like `restore(None)`, with the caller's own function; returns the epoch, and what `restore(epoch)` returned.

        `restore` raises DamagedError or FormatError if the epoch is damaged, and EpochNotFoundError if it is gone, as
        this manager's methods do; another error ends the search on every process. `among` are the epochs that may be
        taken, ascending; None: all.

        Raises:
            EpochNotFoundError: there is no epoch.
            DamagedError: none of the epochs can be read by every process.
        """
        self._saves.drain()
        return self._restores.newest(restore, among)

    def restore_leaves(self, epoch: int, patterns: str | Sequence[str], item: str | None = None) -> dict[str, Any]:
        """Single leaves of an epoch by name, as NumPy arrays and Python values; reads only their blocks.

        `patterns` are shell patterns of leaf names, such as `params/*/kernel`. `item` may be left out if the epoch has
        one item.

        Raises:
            UnknownNameError: one of the patterns matches no leaf; names the nearest ones.

        Examples:
            >>> state = {"params": {"w": 1.5, "b": -0.5}, "step": 7}
            >>> with ec.CheckpointManager("run") as manager:
            ...     saved = manager.save(0, args=ocp.args.StandardSave(state))
            ...     manager.wait_until_finished()
            ...     manager.restore_leaves(0, "params/*")
            {'params/b': -0.5, 'params/w': 1.5}
        """
        return self._readers.read(epoch_number(epoch), lambda reader: reader.restore_leaves(patterns, item))

    # -- looking -------------------------------------------------------------------------------------------------------

    def status(self, epoch: int) -> status.EpochStatus:
        """The status of an epoch, from storage and from the saves of this process."""
        epoch = epoch_number(epoch)
        for save in self._saves.saving():
            if save.epoch == epoch:
                return status.EpochStatus(epoch, "saving", save.describe())
        found = self._readers.status(epoch)
        failure = self._saves.in_flight.failure(epoch)
        if found.state == "absent" and failure is not None:
            return status.EpochStatus(epoch, *failure)
        return found

    def verify(self, epoch: int) -> status.Verification:
        """Reads every byte of a committed epoch, of all nodes, and compares it with what was written.

        With `StorageOptions.local_disks` that is what this process's disk has of it.

        Damage of the Orbax view is listed apart: see `view_damage`, and `epochckpt.repair_view`. Stock Orbax keeps no
        checksums: its epochs are only checked to be whole and readable; see `note`.

        Examples:
            >>> with ec.CheckpointManager("run") as manager:
            ...     saved = manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(3)}))
            ...     manager.wait_until_finished()
            ...     manager.status(0).state, manager.status(1).state, manager.verify(0).ok
            ('committed', 'absent', True)
        """
        return self._readers.verify(epoch_number(epoch))

    def metrics(self, step: int) -> Any:
        """The metrics that an epoch was saved with and those attached to it (`attach_metrics`), or None.

        None also where there is no such epoch, as in Orbax.
        """
        try:
            return self._readers.open(epoch_number(step)).metrics()
        except EpochNotFoundError:
            return None

    def save_id(self, epoch: int) -> str:
        """The id of the save that committed an epoch; it changes when the epoch is replaced or saved anew."""
        return self._readers.brief(epoch_number(epoch)).attempt

    def item_metadata(self, step: int) -> Any:
        """Shapes, dtypes and shardings of an epoch's items, as Orbax's metadata classes; reads no arrays."""
        return self._readers.open(epoch_number(step)).item_metadata()

    def item_kinds(self, epoch: int) -> dict[str, str]:
        """The kind of each item of an epoch, by item name.

        `arrays`: a pytree of arrays and values; `files`: what a handler wrote; `node`: a pytree of each node's own
        (`NodeSave`). Items of stock Orbax are `arrays` or `files`.
        """
        return self._readers.open(epoch_number(epoch)).item_kinds()

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's StepMetadata of an epoch, or the directory's RootMetadata: as written there, else `metadata=`."""
        if step is not None:
            return self._readers.open(epoch_number(step)).step_metadata()
        return status.root_metadata(self._readers.commits.store, self._metadata)

    def nodes(self, epoch: int) -> list[str]:
        """Names of the nodes that wrote an epoch; none if stock Orbax wrote it."""
        return [n.name for n in self._readers.open(epoch_number(epoch)).record.nodes]

    def node_path(self, node: str, epoch: int) -> epath.Path:
        """The folder of one node's files, in an object store only of its record and handlers' files.

        Raises InvalidArgumentError if the epoch has no such node.
        """
        return self._readers.open(epoch_number(epoch)).node_path(node)

    def source(self, epoch: int) -> tuple[EpochReader | None, StepNames]:
        """What a copy of an epoch needs: its reader, unless stock Orbax wrote it, and the names of steps."""
        return self._readers.open(epoch_number(epoch)).native, self._commits.names

    # -- deleting and going back ---------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Deletes an epoch, also the newest; its files are removed in the background, see `wait_until_finished`.

        Raises:
            UnfinishedError: it is not listed any more, but its files could not be moved or removed.
        """
        step = epoch_number(step)
        if self._options.read_only:
            logging.warning("%s is read only: checkpoint %d is not deleted", self.root, step)
            return
        self._check_open("delete")
        self._saves.drain()

        def decide() -> None:
            remote = self._is_remote(step)
            if not remote:
                self._commits.require(step)

            def hide() -> None:
                if not remote:
                    self._saves.remove(retention.unlist(self._claim.writer, step, self._options.todelete_subdir))

            self._withdraw(None, [step], hide)

        def follow(hosts: Hosts) -> None:
            for epoch in hosts.here([step]):
                self._saves.remove(retention.unlist(self._claim.writer, epoch, self._options.todelete_subdir))

        self._write("delete", step, decide, follow)
        self._history.drop([step])

    def rollback_to(self, epoch: int) -> None:
        """Quarantines all later epochs, durably, so that the next save continues from this one.

        They are kept under `rolled-back-<id>/`, which nothing cleans up.

        Raises:
            UnfinishedError: they are not listed any more, but could not be moved, and cannot be saved anew so far.

        Examples:
            >>> with ec.CheckpointManager("run") as manager:
            ...     for epoch in range(3):
            ...         saved = manager.save(epoch, args=ocp.args.StandardSave({"loss": 0.5**epoch}))
            ...     manager.wait_until_finished()
            ...     manager.rollback_to(1)
            ...     print(manager.all_steps())
            [0, 1]
        """
        epoch = epoch_number(epoch)
        self._check_open("rollback_to")
        self._saves.drain()

        def decide() -> None:
            remote = self._is_remote(epoch)
            local = self._commits.list_epochs() if remote else self._commits.require(epoch)
            later = sorted(e for e in {*local, *self.all_steps()} if e > epoch)
            with self._pinned(epoch if remote else None):
                self._withdraw(epoch, later, lambda: retention.roll_back(self._claim.writer, epoch, remote))

        self._write("rollback_to", epoch, decide, lambda _: retention.roll_back(self._claim.writer, epoch, remote=True))
        self._history.drop([e for e in self.all_steps() if e > epoch])
        self._history.forget_failed()
        self._history.damaged = {e: d for e, d in self._history.damaged.items() if e <= epoch}

    @contextlib.contextmanager
    def _pinned(self, epoch: int | None) -> Generator[None]:
        """On the primary: an epoch that only the mirror has stays there; EpochNotFoundError if it is going already."""
        mirror = self._mirror
        if mirror is None or epoch is None:
            yield
            return
        if not _threads.start(lambda: mirror.pin(epoch)).result():
            raise EpochNotFoundError(epoch, self.root, self.all_steps())
        try:
            yield
        finally:
            _threads.start(lambda: mirror.pin(None)).result()

    def _is_remote(self, epoch: int) -> bool:
        """On the primary: whether only the mirror has an epoch."""
        return self._mirror is not None and self._mirror.has(epoch) and epoch not in self._commits.list_epochs()

    def _withdraw(self, to: int | None, epochs: Sequence[int], act: Callable[[], None]) -> None:
        """On the primary: deletes epochs or rolls back, and has the mirror follow; see `LedgerFile.withdraw`."""
        try:
            self._ledger.withdraw(to, epochs, act)
        finally:
            mirror = self._mirror
            if mirror is not None and (ledger := self._ledger.read()) is not None:
                mirror.withdrawn([epoch for epoch in ledger.hidden if epoch in epochs])

    def _claimed(self, epochs: list[int]) -> None:
        """On every process, when the directory is claimed: these epochs are committed there."""
        self._listener.claimed(epochs)
        if self._coordinator.processes == 1:
            self._history.forget_gone()
        if self._coordinator.primary:
            self._ledger.claimed(self._claim.writer)
            _threads.logged(f"{self.root}: its mirror's ledger", self._ledger.settle)
        if self._mirror is not None:
            self._mirror.claimed(
                local=self._commits,
                stager=self._claim.stager,
                ledger=self._ledger,
                coordinator=self._coordinator,
                prefix=self._prefix,
                epochs=epochs,
            )

    def _write(
        self, verb: str, epoch: int | None, decide: Callable[[], Any], follow: Callable[[Hosts], None] = lambda _: None
    ) -> None:
        """Changes the directory, see `CommonCalls.change`."""
        self._check_may_write(verb)
        call = f"{verb}({'' if epoch is None else epoch})"
        self._common.change(self._calls, call, epoch or 0, decide, follow)

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{verb}: this manager of {self.root} is closed; open another one")

    def _check_may_write(self, verb: str) -> None:
        self._check_open(verb)
        if self._options.read_only:
            raise InvalidArgumentError(f"{verb}: {self.root} is open read only")
        if self._forked:
            raise InvalidArgumentError(
                f"{verb}: this process (pid {os.getpid()}) was forked off the one that opened {self.root}, and "
                "can only read with its manager. Save and delete there; or start this process with the method 'spawn', "
                "and open another directory in it"
            )

    # -- closing -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for saves, removals and the metadata handler, and lets go of the directory.

        Raises:
            SaveError, RemovalError: as `wait_until_finished`; what has been raised is not raised again.
        """
        self._closed = True
        if self._ended or self._forked:
            return
        self._restores.drain()
        self._step_log.waited(self._saves.drain_removals)
        self._notifier.drain(self._storage.save_timeout_secs)
        if self._mirror is not None:
            self._mirror.close(self._storage.save_timeout_secs)
        self._ended = True  # not before: Ctrl-C may end the wait, and the next close() waits again
        if self._coordinator.primary or self._hosts is not None:
            wait = self._storage.open_timeout_secs
            _threads.logged(f"{self.root}: at its end", lambda: _threads.start(self._claim.release).result(wait))
        coordination.forget_opening(self._coordinator, self._prefix)
        self._handlers.close()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the manager. An error of the block itself is what is raised; a failed save becomes a note on it.

        If that waits for saves the error is logged before: JAX may end this process meanwhile, as another one has died.
        """
        if error is None or (isinstance(error, SystemExit) and not error.code):  # sys.exit(0) claims success
            self.close()
            return
        if pending := self._saves.pending():
            logging.error(
                "%s: %s left the block of this manager. Before it is raised, close() waits up to %.0f s for the save "
                "of checkpoint %s",
                self.root,
                type(error).__name__,
                self._saves.longest_secs,
                ", ".join(str(save.epoch) for save in pending),
                exc_info=None if isinstance(error, SystemExit) else error,
            )
        try:
            self.close()
        except Exception as failure:
            logging.error("%s: closing it failed, too: %s", self.root, errors.say(failure))
            error.add_note(f"Closing the checkpoint manager of {self.root} failed, too: {errors.say(failure)}")

    def _drain_at_exit(self) -> Callable[[], None]:
        """Begins to close; the returned call waits for the end, as long as a save may take. See `_threads`."""
        epochs, timeout_secs = [save.epoch for save in self._saves.pending()], self._saves.longest_secs
        if self._mirror is not None:
            timeout_secs += self._storage.save_timeout_secs
        deadline, closing = Deadline(timeout_secs), _threads.start(self.close)

        def left_to_do() -> str:
            unsaved = ", ".join(str(epoch) for epoch in epochs if epoch not in self.all_steps())
            return f"the save of checkpoint {unsaved}" if unsaved else "its clean-up"

        def wait() -> None:
            if not closing.wait(min(_QUIET_SECS, deadline.left())):
                text = "%s: before it exits, the program waits up to %.0f s for %s"
                logging.warning(text, self.root, deadline.left(), left_to_do())
            if closing.wait(deadline.left()):
                _threads.logged(f"{self.root}: at exit", closing.result)
                return
            logging.error(
                "%s: the file system has not answered for %g s; the program exits without the end of %s. What was "
                "committed before is untouched, and the next run removes what is left",
                self.root,
                timeout_secs,
                left_to_do(),
            )

        return wait

    def _after_fork(self) -> None:
        """In a forked child: this process can only read; its parent goes on with what is being saved."""
        self._forked = True
        self._coordinator = coordination.Coordinator()
        self._calls = CollectiveCalls(self._coordinator, "", lambda: self._saves.last)
        self._readers.begin = apart
        self._restores.connect(self._coordinator, self._calls)
        self._saves.after_fork()
