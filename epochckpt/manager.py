"""`CheckpointManager`: Orbax's interface on the outside; everything it does is done elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from epochckpt import choosing, coordination, items, layout, legacy, opening, removal, retention, saving, status, worker
from epochckpt.attempt import Committed, broken, snapshot
from epochckpt.attempts import Attempts
from epochckpt.checks import check_args, check_options, storage_options
from epochckpt.errors import (
    EpochExistsError,
    ErrorGroup,
    InvalidArgumentError,
    SaveError,
)
from epochckpt.options import StorageOptions
from epochckpt.reading import Browsable, Reading, epoch_number, shown_path
from epochckpt.retention import EpochInfo, History
from epochckpt.storage import open_store


class CheckpointManager(Browsable, ocp.AbstractCheckpointManager):
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
        node: str | None = None,
        metadata_handler: Any = None,
    ):
        """Opens a directory. In a job of several processes all must do so; the waiting is bounded.

        Args:
            directory: where the epochs live: a path (relative ones are fine) or a URL that TensorStore knows.
            checkpointers: Orbax's legacy form: a Checkpointer, or several by item name; their handlers are taken.
            options: Orbax's options; its policies decide what is saved and kept.
            metadata: JSON written once for the whole directory, see `metadata()`.
            item_names: names of the items, if several are saved together with `args.Composite`.
            item_handlers: a handler for the one unnamed item, or handlers by item name. Orbax's own, unmodified, only
                say what our engine does; others are run.
            logger: an Orbax logger that is given one entry per save.
            handler_registry: an Orbax `CheckpointHandlerRegistry`, instead of item_handlers.
            storage: how bytes get to storage, and timeouts.
            node: this process's node name, `process_<index>` by default.
            metadata_handler: not supported yet.

        Raises: see `epochckpt.opening.open_directory`.
        """
        if metadata_handler is not None:
            raise InvalidArgumentError("metadata_handler= is not supported yet; leave it out")
        self._options = check_options(options or ocp.CheckpointManagerOptions())
        self._storage = storage_options(self._options, storage)
        self._handlers = legacy.handlers(checkpointers, item_names, item_handlers, handler_registry)
        self._async = self._options.enable_async_checkpointing and legacy.is_asynchronous(checkpointers)
        self._item_names = tuple(item_names or self._handlers.names)
        self._multi: bool | None = True if self._item_names else (False if self._handlers.single else None)
        coordinator = coordination.connect(self._options.read_only)
        opened = opening.open_directory(directory, self._options, self._storage, node, coordinator, self._item_names)
        self._coordinator, self._commits, self._store = coordinator, opened.commits, opened.store
        self._nodes, self._prefix, self._damaged = opened.nodes, opened.prefix, opened.commits.damaged(opened.damaged)
        self._pool = worker.Pool(self._storage.io_threads)
        here = items.Here(self._handlers, tuple(n for n, _ in self._nodes), coordinator.process)
        self._reading = Reading(self._commits, self._pool, self._storage.verify, here)
        self._history = History(self._commits.read_record)
        self._history.reset(opened.history)
        self._policy = retention.save_policy(self._options)
        part_bytes = self._storage.part_bytes or self._store.preferred_part_bytes
        self._planner = saving.Planner(coordinator.process, self._nodes, self._storage, part_bytes)
        self._attempts = Attempts(
            opened,
            self._storage,
            retire=lambda fresh: removal.retire(self._commits, self._history, self._options, fresh),
            on_commit=self._committed,
            log=lambda attempt, done: attempt.announce(done, logger, self._options),
        )
        self._tries: dict[int, int] = {}
        self._preemption, self._calls, self._closed = coordination.Preemption(), 0, False
        self._directory = shown_path(self._store.root)
        if not self._options.read_only:
            if metadata is not None and self._options.save_root_metadata and coordinator.primary:
                self._commits.write_once(layout.ROOT_METADATA, saving.root_metadata(metadata))
            worker.drain_at_exit(self)

    @property
    def directory(self) -> epath.Path:
        """The directory, resolved."""
        return self._directory

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """The committed epochs, ascending.

        Args:
            read: look at storage first (see `reload`).
        """
        if read:
            self.reload()
        return [info.step for info in self._history.committed()]

    def latest_step(self) -> int | None:
        """The greatest committed epoch, or None. Saves in flight are not in it."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The epoch with the best metrics by `options.best_fn` (NaN counts as worst); without it the latest."""
        return retention.best(self._options, self._history.committed())

    def reload(self) -> None:
        """Waits for saves in flight, and looks at storage again. In a job of several processes all must call it.

        Raises:
            CoordinationTimeoutError: the primary's answer did not come in time.
        """
        self._attempts.drain()
        found, damaged = self._agree("reload", lambda: opening.survey(self._commits))
        self._damaged |= self._commits.damaged(damaged)
        self._history.reset([e for e in found if e not in self._damaged])

    def status(self, epoch: int) -> status.EpochStatus:
        """What is known of an epoch: committed, saving (and what it waits for), failed (and why), damaged or absent."""
        epoch = epoch_number(epoch)
        for attempt in self._attempts.pending():
            if attempt.epoch == epoch:
                return status.EpochStatus(epoch, "saving", attempt.state)
        found = self._reading.status(epoch)
        failure = self._attempts.failure(epoch)
        if found.state == "absent" and failure is not None:
            return status.EpochStatus(epoch, "failed", failure.reason)
        return found

    def reached_preemption(self, step: int) -> bool:
        """Whether JAX's preemption notice has reached every process; all must ask for the same steps."""
        return self._preemption.reached(step)

    def should_save(self, step: int) -> bool:
        """Whether the options ask for this epoch to be saved, after those that were asked for so far."""
        if self._options.read_only:
            logging.log_first_n(logging.WARNING, "%s is read only: nothing is saved", 1, self._directory)
            return False
        asked = self._history.requested()
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
            force: save even if `should_save` says no; an existing epoch is still an error.
            args: what to save: `args.StandardSave(tree)` or `args.Composite(name=…)`.
            custom_metadata: JSON, kept with the epoch.

        Returns:
            Whether a save was begun. Whether it was committed shows in `wait_until_finished` and `latest_step`.

        Raises:
            EpochExistsError: with force, for an epoch that exists or is on its way.
            InvalidArgumentError: something in it cannot be saved, by name. Nothing was begun.
            SaveError: only if saves are not asynchronous: it was not committed.
            Exception: what a handler raises that is not ours, as it is. Nothing was begun.
        """
        began = time.monotonic()
        step = epoch_number(step)
        if self._closed:
            raise InvalidArgumentError(f"this manager of {self._directory} is closed")
        args = legacy.save_args(self._handlers, items, save_kwargs, args)
        multi = check_args(args, self._multi)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        if self._history.is_requested(step):
            raise EpochExistsError(
                f"{self._directory}: epoch {step} exists or is being saved; delete() or rollback_to() make room"
            )
        number = self._tries.get(step, 0)
        self._tries[step] = number + 1
        timeout = self._storage.save_timeout_secs
        try:
            prepared = self._prepare(args)
            self._attempts.make_room(prepared.copied_bytes, prepared.runs_handlers)
            attempt = snapshot(
                step,
                number,
                prepared,
                default_item=not multi,
                metrics=None if self._options.prevent_write_metrics else metrics,
                custom_metadata=custom_metadata,
                timeout_secs=timeout,
                replaces=self._damaged.get(step),
            )
        except Exception as error:
            if self._coordinator.processes > 1:
                self._attempts.submit(broken(step, number, error, timeout))
            raise
        self._multi = multi
        self._history.request(EpochInfo(step, metrics=attempt.metrics, time_ns=attempt.started_ns))
        attempt.held_secs = time.monotonic() - began
        self._attempts.submit(attempt)
        if not self._async:
            self.wait_until_finished()
        return True

    def _prepare(self, args: Any) -> saving.Prepared:
        wanted = items.to_save(args, self._handlers)
        items.check_names([i.name for i in wanted], [n for n, _ in self._nodes], self._item_names)
        return self._planner.prepare(wanted)

    def is_saving_in_progress(self) -> bool:
        """Whether a save has not ended yet on this process."""
        return bool(self._attempts.pending())

    def wait_until_finished(self) -> None:
        """Waits until every save has been committed or has failed, and what was deleted is removed.

        Raises:
            SaveError: if any failed, once: the failure itself, or all of them in an ErrorGroup.
        """
        self._attempts.drain_removals()
        self._history.forget_failed()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises failures of saves that have ended, once; does not wait."""
        errors = self._attempts.take_errors()
        if errors:
            raise errors[0] if len(errors) == 1 else ErrorGroup(errors)

    def close(self) -> None:
        """Waits for everything, and ends this incarnation.

        Raises:
            SaveError: if a save failed that nobody has been told of.
        """
        if self._closed:
            return
        self._closed = True
        self._attempts.drain_removals()
        if self._coordinator.primary and not self._options.read_only:
            try:
                self._commits.release()
            except OSError as error:  # the next open sweeps it
                logging.warning("%s: the staging folder could not be removed: %s", self._directory, error)
        self._handlers.close()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drain_at_exit(self) -> None:
        with contextlib.suppress(SaveError):  # it has been logged
            self.close()

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restores an epoch, on any number of processes and any sharding; every byte is verified first.

        Args:
            step: its number, or None for the newest that every process can read (agreed by vote).
            items: Orbax's legacy form of args, for managers that were given handlers.
            restore_kwargs: goes with items.
            directory: restore from another directory.
            args: what to restore as what: `args.StandardRestore(target)`, `args.Composite(name=…)`; None for all
                items as they were saved.

        Returns:
            The item, or a Composite of items.

        Raises:
            EpochNotFoundError: there is no such epoch; says which there are.
            MismatchError: the target does not fit; lists every leaf.
            DamagedError: bytes differ from what was written.
        """
        args = legacy.restore_args(self._handlers, items, restore_kwargs, args)
        multi = check_args(args, self._multi, restoring=True)
        reading, candidates = self._reading, None
        if directory is not None and open_store(directory).root != self._store.root:
            reading, candidates = self._reading.elsewhere(directory, opening.step_names(self._options))
        self._attempts.drain(step)
        if step is not None:
            value = reading.restore(epoch_number(step), args)
        else:
            self._calls += 1
            choice = choosing.newest_readable(
                self.all_steps() if candidates is None else candidates,
                lambda epoch: reading.restore(epoch, args),
                self._coordinator,
                f"{self._prefix}/restore/{self._calls}",
                self._storage.restore_timeout_secs,
                reading.commits.store.root,
            )
            value = choice.value
            if candidates is None:
                self._damaged |= self._commits.damaged(choice.rejected)
                self._history.drop(choice.rejected)
        self._multi = multi
        return value

    def delete(self, step: int) -> None:
        """Deletes an epoch, also the newest. In a job of several processes all must call it.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        step = epoch_number(step)
        if self._options.read_only:
            logging.warning("%s is read only: epoch %d is not deleted", self._directory, step)
            return
        self._attempts.drain()

        def decide() -> None:
            self._commits.require(step)
            self._attempts.remove(removal.hide(self._commits, [step], self._options.todelete_subdir))

        self._agree("delete", decide)
        self._history.drop([step])

    def rollback_to(self, epoch: int) -> None:
        """Sets all later epochs aside, durably, so that the next save continues from this one.

        They are kept under `rolled-back-<id>/`, which nothing cleans up. In a job of several processes all must
        call it.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        epoch = epoch_number(epoch)
        if self._options.read_only:
            raise InvalidArgumentError(f"{self._directory} is open read only: it cannot be rolled back")
        self._attempts.drain()
        self._agree("rollback_to", lambda: removal.roll_back(self._commits, epoch))
        self._history.drop([e for e in self.all_steps() if e > epoch])
        self._history.forget_failed()
        self._damaged = {e: d for e, d in self._damaged.items() if e <= epoch}

    def _committed(self, done: Committed) -> None:
        """On every node, for every commit."""
        self._history.commit(EpochInfo(done.epoch, metrics=done.metrics, time_ns=done.committed_ns))
        self._history.drop(done.deleted)
        self._damaged.pop(done.epoch, None)

    def _agree(self, verb: str, decide: Callable[[], Any]) -> Any:
        """The primary does something, everybody takes its answer; every process must make the same calls."""
        self._calls += 1
        wait = self._storage.open_timeout_secs
        key = f"{self._prefix}/call/{self._calls}/{verb}"
        return self._coordinator.agree(key, decide, wait if self._coordinator.primary else 2 * wait)
