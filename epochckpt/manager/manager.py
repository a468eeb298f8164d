"""`CheckpointManager`: Orbax's interface on the outside; everything it does is done elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from epochckpt import _threads, _units
from epochckpt._threads import Deadline
from epochckpt.arrays import Planner, items
from epochckpt.arrays.items import RestoreContext
from epochckpt.arrays.snapshot import SavePlan, checked_json, root_metadata
from epochckpt.commit import Attempt, Attempts, Calls, Claim, History, coordination, opening, retention
from epochckpt.commit.calls import forget_opening
from epochckpt.commit.protocol import ReplaceCondition
from epochckpt.commit.saver import LONG_SECS
from epochckpt.errors import EpochExistsError, InvalidArgumentError, SaveErrorGroup, copied, say
from epochckpt.format import Nodes, paths
from epochckpt.manager import metadata_handlers, outcomes
from epochckpt.manager.epochs import Epochs
from epochckpt.manager.notifier import HandlerNotifier
from epochckpt.manager.reader import epoch_number, shown_path
from epochckpt.manager.readers import Readers
from epochckpt.manager.status import SaveResult
from epochckpt.options import StorageOptions
from epochckpt.orbax import legacy, step_log
from epochckpt.orbax.options import check_args, check_options, storage_options

_QUIET_SECS = 10.0  # how long an exit may take without a word


class CheckpointManager(Epochs, ocp.AbstractCheckpointManager):
    """Saves and restores epochs as `directory/<epoch>/<node>/`; a drop-in for `orbax.checkpoint.CheckpointManager`.

    Construct it, and call `save` and `restore`, on every process. Saves are asynchronous: `save` returns when all it
    was given has been copied or can no longer change, and an epoch exists (`all_steps`, `latest_step`, any reader)
    only when every node has written its part.

    A failed save never harms an earlier epoch and never stops training: it is logged, and raised by
    `wait_until_finished`, `check_for_errors` or `close`.
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
        """Opens a directory. In a job of several processes all must do so; the waiting is bounded.

        Nothing is written but the directory itself where it is missing: a look never stops a run that trains there.
        The first save, delete, rollback or replacement claims the directory, or `claim()`; from then on an older run
        that saves there gets FencedError.

        Args:
            directory: where the epochs live: a path (relative ones and `~` are fine) or a URL that TensorStore knows.
            checkpointers: Orbax's legacy form: a Checkpointer, or several by item name; their handlers are taken.
            options: Orbax's options; its policies decide what is saved and kept.
            metadata: JSON written once for the whole directory, with the first write; see `metadata()`. Until then, and
                if read only, it is given back by `metadata()` where the directory has none.
            item_names: names of the items, if several are saved together with `args.Composite`.
            item_handlers: a handler for the one unnamed item, or handlers by item name. Orbax's own, unmodified, only
                say what our engine does; others are run.
            logger: an Orbax logger, which is given an entry for every commit and every `restore`.
            handler_registry: an Orbax `CheckpointHandlerRegistry`, instead of item_handlers.
            storage: how bytes get to storage, and timeouts.
            node: this process's node name, `process_<index>` by default; in a job of one process also the names of
                several nodes, all of which it then hosts.
            metadata_handler: an object with Caffe2's protocol (`set_params`, `last_epoch`, `write`, `report`,
                `cp_accessible`); the primary tells it of every commit, and of the nodes before the first one. What it
                raises is logged.

        Raises: see `epochckpt.commit.opening.open_directory`.
        """
        if metadata_handler is not None:
            metadata_handlers.check_handler(metadata_handler)
        self.metadata_handler = metadata_handler
        self._options = check_options(options or ocp.CheckpointManagerOptions())
        self._storage = storage_options(self._options, storage)
        self._handlers = legacy.handlers(checkpointers, item_names, item_handlers, handler_registry)
        self._async = self._options.enable_async_checkpointing and legacy.is_asynchronous(checkpointers)
        self._item_names = tuple(item_names or self._handlers.names)
        self._multi: bool | None = True if self._item_names else (False if self._handlers.single else None)
        asked = self._options.multiprocessing_options
        coordinator = coordination.connect(self._options.read_only, asked.primary_host, asked.active_processes)
        opened = opening.open_directory(directory, self._options, self._storage, node, coordinator, self._item_names)
        self._coordinator, self._commits, self._store = coordinator, opened.commits, opened.store
        self._prefix = opened.prefix
        self._pool = _threads.Pool(self._storage.io_threads)
        self._history = History(self._commits.read_head)
        self._history.reset(opened.history, opened.attached, opened.damaged)
        self._foreign = opened.foreign
        self._policy = retention.save_policy(self._options)
        self._step_log = step_log.StepLog(logger)
        root_files: dict[tuple[str, str], bytes] = {}
        if metadata is not None and self._options.save_root_metadata:
            root_files[paths.ROOT_METADATA] = root_metadata(metadata)
        tells = coordinator.primary and not self._options.read_only
        self._notifier = HandlerNotifier(metadata_handler, tells)
        self._listener = outcomes.Listener(self._commits, self._options, self._history, self._notifier, self._step_log)
        self._claim = Claim(self._commits, opened.refused, self._listener.claimed, root_files)
        self._attempts = Attempts(opened, self._claim, self._storage, self._listener)
        self._superseded: dict[int, ReplaceCondition] = {}
        self._preemption = coordination.Preemption()
        self._calls = Calls(coordinator, opened.prefix, lambda: self._attempts.last)
        self._closed = self._ended = self._forked = False
        if metadata is not None and (self._options.read_only or self._options.save_root_metadata):
            self._given_metadata = checked_json(dict(metadata), "metadata")
        self._directory = shown_path(self._store.root)
        self._take_nodes(opened.nodes)
        if not self._options.read_only:
            _threads.drain_at_exit(self)

    @property
    def directory(self) -> epath.Path:
        """The directory, resolved."""
        return self._directory

    @property
    def processes(self) -> tuple[int, ...] | None:
        """JAX process indices of the processes that save together, the primary first; None if it is read only."""
        return None if self._options.read_only else self._coordinator.ids

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes of the job, in order."""
        return self._nodes.names

    def set_nodes(self, names: Sequence[str]) -> None:
        """Names the nodes of the job, before the first save; every process calls it alike.

        Args:
            names: of all nodes, in order: node i is process i, or a single process hosts them all.

        Raises:
            InvalidArgumentError: their number does not fit the processes, something has been saved under other names,
                or the manager was opened with others (`node=`).
        """
        nodes = self._nodes.renamed(names)
        if nodes == self._nodes:
            return
        if self._attempts.used:
            raise InvalidArgumentError(
                f"{self._directory}: nodes are named before the first save; this manager has saved as "
                f"{', '.join(self.node_names)}, asked for were {', '.join(nodes.names)}"
            )
        items.check_names(self._item_names, nodes.folders, ())
        self._take_nodes(nodes)

    def introduce_handler(self) -> None:
        """Tells the metadata handler of the nodes now, if it has not been told of them, instead of before a commit.

        Raises:
            InvalidArgumentError: the handler says that it cannot serve this directory.
        """
        self._notifier.introduce()

    def _take_nodes(self, nodes: Nodes) -> None:
        self._nodes = self._attempts.nodes = nodes
        self._coordinator.nodes = nodes.names if nodes.processes > 1 else ()
        context = RestoreContext(self._handlers, nodes)
        self._readers = Readers(self._commits, self._pool, self._storage.verify, context)
        part_bytes = self._storage.part_bytes or self._store.preferred_part_bytes
        self._planner = Planner(nodes, self._storage, part_bytes)
        self._notifier.nodes(str(self._directory), nodes.names)

    def reached_preemption(self, step: int) -> bool:
        """Whether JAX's preemption notice has reached every process; all must ask for the same steps."""
        return self._preemption.reached(step)

    def should_save(self, step: int, *, ignore_later: bool = False) -> bool:
        """Whether the options ask for this epoch to be saved, after those that were asked for so far.

        Args:
            step: the epoch's number.
            ignore_later: decide as if neither it nor later ones had been asked for; else that makes it False.
        """
        if self._options.read_only:
            logging.log_first_n(logging.WARNING, "%s is read only: nothing is saved", 1, self._directory)
            return False
        asked = self._history.requested(self._attempts.in_flight())
        if ignore_later or step in self._superseded:
            asked = [info for info in asked if info.step < step]
        if asked and asked[-1].step >= step:
            logging.info(
                "epoch %d is not saved: epoch %d was asked for already (force=True saves it)",
                step,
                asked[-1].step,
            )
            return False
        return retention.decide_save(
            self._policy, self._options, step, asked, self.is_saving_in_progress, self.reached_preemption(step)
        )

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
        """Saves an epoch in the background; all processes must call it alike.

        Args:
            step: the epoch's number.
            items: Orbax's legacy form of args, for managers that were given handlers.
            save_kwargs: goes with items.
            metrics: JSON, kept with the epoch; `options.best_fn` ranks by it.
            force: save even if `should_save` says no; an existing epoch is still an error (see `allow_overwrite`).
            args: what to save: `args.StandardSave(tree)` or `args.Composite(name=…)`.
            custom_metadata: JSON, kept with the epoch.

        Returns:
            Whether a save was begun. Whether it was committed shows in `wait_until_finished` and `latest_step`.

        Raises:
            EpochExistsError: with force, for an epoch that exists or is on its way; also without, if something else
                lies in its place.
            FencedError: an earlier save, or another write, found that a newer run has taken over the directory.
            AccessError: this user may not write to the directory.
            InvalidArgumentError: something in it cannot be saved, by name. Nothing was begun.
            SaveError: only if saves are not asynchronous: it was not committed.
            Exception: what a handler raises that is not ours, as it is. Nothing was begun.
        """
        began = time.monotonic()
        step = epoch_number(step)
        if self._closed:
            raise InvalidArgumentError(f"this manager of {self._directory} is closed")
        self._check_own("save")
        args = legacy.save_args(self._handlers, items, save_kwargs, args)
        multi = check_args(args, self._multi)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        superseded = self._superseded.pop(step, None)  # this save's alone, on every process, whatever comes of it
        number = self._attempts.next_try(step)
        asked = step in [attempt.epoch for attempt in self._attempts.in_flight()] or self._history.is_known(step)
        if asked and superseded is None:
            if not force:
                return False
            raise EpochExistsError(
                f"{self._directory}: epoch {step} exists or is being saved; delete() or rollback_to() make room, "
                f"allow_overwrite() lets the next save take its place (in Orbax's words: Checkpoint for step {step} "
                "already exists)"
            )
        if step in self._foreign and superseded is None:
            raise EpochExistsError(
                f"epoch {step} cannot be saved: {self._foreign[step]}; then call reload(), or save under another number"
            )
        timeout = self._storage.save_timeout_secs
        attempt: Attempt | None = None
        try:
            self._claim.check(step)
            plan = self._plan(args)
            ready = time.monotonic()
            self._attempts.make_room(step, plan.copied_bytes, plan.runs_handlers)
            room = time.monotonic()
            attempt = Attempt(
                step,
                number,
                Deadline(timeout),
                default_item=not multi,
                metrics=checked_json(None if self._options.prevent_write_metrics else metrics, "metrics"),
                custom_metadata=checked_json(dict(custom_metadata or {}), "custom_metadata"),
                replaces=self._history.damaged.get(step) or superseded,
                snapshot=plan.snapshot(),  # last: handlers begin to write here, and nothing after it may be refused
            )
            if time.monotonic() - room > LONG_SECS:
                text = (
                    "save(%d) blocked training until its arrays were computed and copied (%s) and handlers had run: %s"
                )
                size, secs = _units.nbytes(attempt.snapshot.copied_bytes), _units.secs(time.monotonic() - room)
                logging.log_first_n(logging.WARNING, text, 3, step, size, secs)
            attempt.started, attempt.blocked_secs = began, time.monotonic() - began
            attempt.started_ns = time.time_ns() - round(attempt.blocked_secs * 1e9)
            attempt.log_entry = self._step_log.begun(
                step,
                str(self._directory),
                began=began,
                ready=ready,
                room=room,
                preempted=not force and self.reached_preemption(step),
                waits=not self._async,
            )
            self._attempts.submit(attempt)
        except BaseException as error:  # Ctrl-C, too, and it may come when the snapshot is on its way
            if attempt is not None and attempt not in self._attempts.pending():
                attempt.snapshot.drop()
            if self._coordinator.processes > 1:
                # in its place, so that the other processes need not wait for this one
                self._attempts.submit(Attempt(step, number, Deadline(timeout), error=copied(step, error)))
            raise
        self._multi = multi
        if not self._async:
            self.wait_until_finished()
        return True

    def _plan(self, args: Any) -> SavePlan:
        wanted = items.to_save(args, self._handlers)
        items.check_names([i.name for i in wanted], self._nodes.folders, self._item_names)
        return self._planner.plan(wanted)

    def is_saving_in_progress(self) -> bool:
        """Whether a save has not ended yet on this process."""
        return bool(self._attempts.pending())

    def wait_until_finished(self) -> None:
        """Waits until every save has been committed or has failed, and what was deleted is removed.

        Raises:
            SaveError: if any failed, once: the failure itself, or all of them in an SaveErrorGroup.
        """
        self._attempts.drain_removals()
        self._notifier.drain(self._storage.save_timeout_secs)
        self._history.forget_failed()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises failures of saves that have ended, once; does not wait."""
        errors = self._attempts.pop_errors()
        if errors:
            error = errors[0] if len(errors) == 1 else SaveErrorGroup(errors)
            if (other := sys.exception()) is not None:  # in a `finally`: a traceback shows the cause alone
                error.add_note(f"Raised while another error was on its way: {type(other).__name__}: {other}")
            raise error

    def pop_save_results(self) -> list[SaveResult]:
        """How the saves ended that have ended since the last call, in order; does not wait.

        Known in this process only, and at most the last thousand. What `save` itself raised is not among them.
        """
        return self._listener.results.take()

    def close(self) -> None:
        """Waits for everything, and ends this incarnation.

        Raises:
            SaveError: if a save failed that nobody has been told of.
        """
        self._closed = True
        if self._ended or self._forked:
            return
        self._attempts.drain_removals()
        self._notifier.drain(self._storage.save_timeout_secs)
        self._ended = True  # not before: Ctrl-C may end the waiting, and who closes again waits again
        if self._coordinator.primary:
            wait = self._storage.open_timeout_secs
            _threads.logged(f"{self._directory}: at its end", lambda: _threads.abandonable(self._claim.release, wait))
        forget_opening(self._coordinator, self._prefix)
        self._handlers.close()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes it. What the block itself raised stays what is raised; a failed save becomes a note of that."""
        if error is None or (isinstance(error, SystemExit) and not error.code):  # sys.exit(0) claims success
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            logging.error("%s: closing it failed, too: %s", self._directory, say(failure))
            error.add_note(f"Closing the checkpoint manager of {self._directory} failed, too: {say(failure)}")

    def _drain_at_exit(self) -> Callable[[], None]:
        deadline = Deadline(self._attempts.longest_secs)
        epochs = [attempt.epoch for attempt in self._attempts.pending()]
        closing = _threads.start(self.close)  # where it can be abandoned: a file system that is gone may never answer
        return lambda: self._await_close(closing, deadline, epochs)

    def _await_close(self, closing: _threads.Future[None], deadline: Deadline, epochs: list[int]) -> None:
        def left_to_do() -> str:
            unsaved = ", ".join(str(epoch) for epoch in epochs if epoch not in self.all_steps())
            return f"the save of epoch {unsaved}" if unsaved else "its clean-up"

        if not closing.wait(min(_QUIET_SECS, deadline.left())):
            what, secs = left_to_do(), deadline.left()
            logging.warning("%s: before it exits, the program waits up to %.0f s for %s", self._directory, secs, what)
        if closing.wait(deadline.left()):
            _threads.logged(f"{self._directory}: at exit", closing.result)
        else:
            logging.error(
                "%s: the file system has not answered for %g s; the program exits without the end of %s. What was "
                "committed before is untouched, and the next run removes what is left",
                self._directory,
                deadline.secs,
                left_to_do(),
            )

    def _after_fork(self) -> None:
        """In a forked child: this process can read, by itself; what is being saved, its parent saves."""
        self._forked = True
        self._coordinator = coordination.SingleProcess()
        self._attempts.after_fork()
