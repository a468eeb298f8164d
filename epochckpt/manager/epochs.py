"""The members of a manager that know its epochs: which there are, which to restore, which to take away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from epochckpt import _threads
from epochckpt.arrays import EpochReader
from epochckpt.commit import (
    Attempts,
    Calls,
    Claim,
    Commits,
    Coordinator,
    History,
    opening,
    restore_vote,
    retention,
)
from epochckpt.commit.protocol import ReplaceCondition
from epochckpt.errors import FencedError, InvalidArgumentError, UnfinishedError, say
from epochckpt.manager import status
from epochckpt.manager.reader import epoch_number, shown_path
from epochckpt.manager.readers import Readers
from epochckpt.options import StorageOptions
from epochckpt.orbax import Handlers, StepNames, legacy
from epochckpt.orbax.options import check_args
from epochckpt.orbax.step_log import StepLog
from epochckpt.storage import Store, open_store

T = TypeVar("T")


class Browsable:
    """The members of a manager that only read."""

    _readers: Readers
    _given_metadata: Mapping[str, Any] | None = None

    def metrics(self, step: int) -> Any:
        """The metrics that an epoch was saved with and those attached to it (`attach_metrics`), or None."""
        return self._readers.open(epoch_number(step)).metrics()

    def save_id(self, epoch: int) -> str:
        """The id of the attempt that an epoch was committed by: another one once it was replaced, or saved anew.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        return self._readers.commits.read_head(epoch_number(epoch)).attempt

    def item_metadata(self, step: int) -> Any:
        """Shapes, dtypes and shardings of an epoch's items, as Orbax's metadata classes.

        Reads one small file, and the files of items whose handlers, not ours, can say something about them.
        """
        return self._readers.open(epoch_number(step)).item_metadata()

    def item_kinds(self, epoch: int) -> dict[str, str]:
        """What kind of thing each item of an epoch is, by item name.

        `arrays`: a pytree of arrays and values; `files`: what a handler wrote; `node`: a pytree of each node's own
        (`NodeSave`). Items of stock Orbax are `arrays` or `files`, as far as their files say.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        return self._readers.open(epoch_number(epoch)).item_kinds()

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's StepMetadata of an epoch, or the directory's RootMetadata: as written there, else `metadata=`."""
        if step is not None:
            return self._readers.open(epoch_number(step)).step_metadata()
        return status.root_metadata(self._readers.commits.store, self._given_metadata)

    def nodes(self, epoch: int) -> list[str]:
        """Names of the nodes that wrote an epoch; none if stock Orbax wrote it."""
        return [n.name for n in self._readers.commits.read_record(epoch_number(epoch)).nodes]

    def node_path(self, node: str, epoch: int) -> epath.Path:
        """The folder of one node's files of a committed epoch.

        Raises:
            InvalidArgumentError: the epoch has no such node; lists those it has.
        """
        return self._readers.open(epoch_number(epoch)).node_path(node)

    def verify(self, epoch: int) -> status.Verification:
        """Reads every byte of a committed epoch, of all nodes, and compares it with what was written.

        Damage of the Orbax view, by which stock Orbax reads the epoch, is told apart: see `view_damage`, and
        `epochckpt.repair_view`.

        Stock Orbax keeps no checksums: of its epochs it says whether they are whole and can be read; see `note`.
        """
        return self._readers.verify(epoch_number(epoch))

    def source(self, epoch: int) -> tuple[Store, str, EpochReader | None]:
        """Where an epoch lies, for who copies it: store, folder in it, and a reader unless stock Orbax wrote it.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        reader = self._readers.open(epoch_number(epoch))
        return reader.store, reader.folder, reader.native

    def restore_leaves(self, epoch: int, patterns: str | Sequence[str], item: str | None = None) -> dict[str, Any]:
        """Single leaves of an epoch, as NumPy arrays and Python values; reads only their blocks.

        Args:
            epoch: its number.
            patterns: shell patterns of leaf names, for example `params/*/kernel`.
            item: the item's name; may be left out if the epoch has one item.

        Returns:
            Values by leaf name.

        Raises:
            EpochNotFoundError: there is no such epoch.
            UnknownNameError: one of the patterns matches no leaf; names those that are near.
        """
        return self._readers.open(epoch_number(epoch)).restore_leaves(patterns, item)


class Epochs(Browsable):
    """What `CheckpointManager` says of its epochs, restores of them and does with them; it is not used alone."""

    _options: ocp.CheckpointManagerOptions
    _storage: StorageOptions
    _handlers: Handlers
    _coordinator: Coordinator
    _commits: Commits
    _store: Store
    _attempts: Attempts
    _history: History
    _superseded: dict[int, ReplaceCondition]
    _foreign: dict[int, str]
    _claim: Claim
    _directory: epath.Path
    _calls: Calls
    _multi: bool | None
    _forked: bool
    _step_log: StepLog

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

        A process that calls it alone harms nothing: the primary looks; another one raises in the end, and knows what it
        knew. `status` and `verify` look at storage from one process alone.

        Raises:
            CoordinationTimeoutError: the primary's answer did not come in time.
            StorageError: storage does not answer; this manager knows what it knew before.
        """
        self._attempts.drain()
        self._look()

    def _look(self) -> None:
        """Takes storage's word, as the primary hears it, for what is committed and what is damaged."""

        def look() -> dict[str, Any]:
            return opening.survey(self._commits, self._options, self._history.damaged).to_wire()

        survey = opening.Survey.from_wire(self._agree("reload()", look))
        self._foreign = survey.foreign
        self._history.reset(survey.epochs, survey.attached, survey.damaged)

    def status(self, epoch: int) -> status.EpochStatus:
        """What is known of an epoch: committed, saving (and what it waits for), failed or uncertain (and why), ….

        See `EpochStatus`.
        """
        epoch = epoch_number(epoch)
        for attempt in self._attempts.pending():
            if attempt.epoch == epoch:
                return status.EpochStatus(epoch, "saving", attempt.state)
        found = self._readers.status(epoch)
        failure = self._attempts.failure(epoch)
        if found.state == "absent" and failure is not None:
            return status.EpochStatus(epoch, *failure)
        return found

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
            DamagedError: bytes differ from what was written; without a number: those of every epoch.
            StorageError: storage does not answer, also when asked again. No older epoch is taken instead.
        """
        began = time.monotonic()
        args = legacy.restore_args(self._handlers, items, restore_kwargs, args)
        multi = check_args(args, self._multi, restoring=True)
        readers, candidates = self._readers, None
        if directory is not None and open_store(directory).root != self._store.root:
            readers = self._readers.elsewhere(directory, StepNames.of(self._options))
            candidates = readers.commits.list_epochs()
        self._attempts.drain(step)
        read = time.monotonic()
        if step is not None:
            step = epoch_number(step)
            value = readers.open(step).restore(args)
        elif candidates is None:
            step, value = self.restore_newest(lambda epoch: readers.open(epoch).restore(args))
        else:
            commits = readers.commits
            choice = self._choose(
                candidates,
                lambda epoch: readers.open(epoch).restore(args),
                lambda rejected: (self._agree("look", commits.list_epochs), {}),
                commits.store,
            )
            step, value = choice.epoch, choice.value
        self._multi = multi
        self._step_log.restored(step, str(shown_path(readers.commits.store.root)), began, read)
        return value

    def damaged_epochs(self) -> list[int]:
        """Epochs that are on storage, and that this manager has found to be damaged: they are not in `all_steps`."""
        return sorted(self._history.damaged)

    def restore_newest(self, restore: Callable[[int], T], among: Sequence[int] | None = None) -> tuple[int, T]:
        """Like `restore(None)`, with a function of the caller's own that restores an epoch.

        In a job of several processes all must call it: they vote on each epoch, and take the next older one if one of
        them cannot read it.

        Args:
            restore: is given an epoch's number, and raises DamagedError or FormatError if the epoch is damaged,
                EpochNotFoundError if it is not there any more, as this manager's members do; another error ends the
                search on every process.
            among: the epochs that may be taken, ascending; None: all.

        Returns:
            The epoch, and what `restore` returned for it.

        Raises:
            EpochNotFoundError: there is no epoch at all.
            DamagedError: there are, but none of them can be read.
            StorageError: storage does not answer; no older epoch is taken instead.
        """
        self._attempts.drain()
        attempts: dict[int, str | None] = {}

        def attempt(epoch: int) -> T:
            if self._coordinator.primary:  # what the verdict will be about: another attempt is another epoch
                attempts[epoch] = self._commits.read_attempt(epoch)
            return restore(epoch)

        def reject(rejected: Mapping[int, Exception]) -> None:
            self._history.damaged |= {e: ReplaceCondition(attempts.get(e), say(why)) for e, why in rejected.items()}
            self._history.drop(rejected)

        def allowed(epoch: int) -> bool:
            return among is None or epoch in among

        def look_again(rejected: Mapping[int, Exception]) -> restore_vote.Look:
            reject(rejected)
            self._look()
            damaged = {epoch: found.damage for epoch, found in self._history.damaged.items() if allowed(epoch)}
            return [epoch for epoch in self.all_steps() if allowed(epoch)], damaged

        choice = self._choose(self.all_steps() if among is None else among, attempt, look_again, self._store)
        reject(choice.rejected)
        return choice.epoch, choice.value

    def _choose(
        self,
        candidates: Sequence[int],
        restore: Callable[[int], T],
        look_again: Callable[[Mapping[int, Exception]], restore_vote.Look],
        store: Store,
    ) -> restore_vote.Choice[T]:
        wait = self._storage.restore_timeout_secs
        with self._calls.vote(candidates, restore_vote.patience(wait)) as (found, prefix):
            return restore_vote.newest_readable(found, restore, look_again, self._coordinator, prefix, wait, store.root)

    def delete(self, step: int) -> None:
        """Deletes an epoch, also the newest. In a job of several processes all must call it.

        Raises:
            EpochNotFoundError: there is no such epoch.
            UnfinishedError: nobody sees it any more, but its bytes could not be moved or removed.
        """
        step = epoch_number(step)
        if self._options.read_only:
            logging.warning("%s is read only: epoch %d is not deleted", self._directory, step)
            return
        self._attempts.drain()

        def decide() -> None:
            self._commits.require(step)
            self._attempts.remove(retention.hide(self._commits, [step], self._options.todelete_subdir))

        self._write("delete", step, decide)
        self._history.drop([step])

    def allow_overwrite(self, epoch: int) -> None:
        """Lets the next save of a committed epoch's number replace it; all processes call it alike.

        Until that save is committed the epoch stays as it is, and at any moment, also after a crash, either the old
        one or the new one is there (on a file system that cannot exchange two folders, such as NFS: is there again
        when the directory is next opened for writing). If somebody else changes the epoch meanwhile, that save fails.
        A save that fails, or that raises, has used the permission up: call this again.

        Raises:
            EpochNotFoundError: there is no such epoch.
            InvalidArgumentError: it cannot be replaced: by stock Orbax, or this manager is read only.
        """
        epoch = epoch_number(epoch)
        if self._options.read_only:
            raise InvalidArgumentError(f"{self._directory} is open read only: epoch {epoch} cannot be replaced")
        self._check_own("allow_overwrite")
        self._attempts.drain(epoch)
        self._superseded[epoch] = retention.replace_condition(self._commits, epoch)

    def rollback_to(self, epoch: int) -> None:
        """Sets all later epochs aside, durably, so that the next save continues from this one.

        They are kept under `rolled-back-<id>/`, which nothing cleans up. In a job of several processes all must
        call it.

        Raises:
            EpochNotFoundError: there is no such epoch.
            UnfinishedError: nobody sees them any more, but they could not be moved, and cannot be saved anew so far.
        """
        epoch = epoch_number(epoch)
        if self._options.read_only:
            raise InvalidArgumentError(f"{self._directory} is open read only: it cannot be rolled back")
        self._attempts.drain()
        self._write("rollback_to", epoch, lambda: retention.roll_back(self._commits, epoch))
        self._history.drop([e for e in self.all_steps() if e > epoch])
        self._history.forget_failed()
        self._history.damaged = {e: d for e, d in self._history.damaged.items() if e <= epoch}

    def claim(self) -> None:
        """Makes this manager the writer of the directory now, instead of at its first write.

        An older run that is still alive can save and delete nothing from here on, so that the epochs that are listed
        now stay the newest until this manager saves. For whoever is about to train: `JobRunner` calls it. In a job of
        several processes all must call it.

        Raises:
            FencedError: a newer run has claimed the directory since this manager did.
            AccessError: this user may not write to the directory.
            InvalidArgumentError: this manager is read only.
        """
        if self._options.read_only:
            raise InvalidArgumentError(f"{self._directory} is open read only: it cannot be claimed")
        self._write("claim", None, lambda: None)

    @property
    def fenced_off(self) -> str:
        """How this manager learned that a newer run has taken over the directory; empty as long as it has not."""
        return "" if self._claim.fenced is None else self._claim.fenced.reason

    def foreign_folders(self) -> dict[int, str]:
        """What lies under the number of an epoch and is none, in words, by number; nothing there is ever touched.

        As it was when the directory was opened or last reloaded.
        """
        return dict(self._foreign)

    def _write(self, verb: str, epoch: int | None, decide: Callable[[], Any]) -> None:
        """The primary claims the directory, unless this manager has, and writes; everybody learns of it.

        Epochs that nobody sees any more are not listed here either, also where they could not be moved away.
        """
        self._check_own(verb)

        def claimed() -> dict[str, Any]:  # in another thread: one that a signal handler interrupts may not hold a lock
            self._claim.check(epoch or 0)
            told = _threads.start(lambda: self._claim.take(epoch or 0)).result()
            decide()
            return told

        try:
            told = self._agree(f"{verb}({'' if epoch is None else epoch})", claimed)
            _threads.start(lambda: self._claim.learn(told)).result()
        except FencedError as error:
            self._claim.note(error)
            raise
        except UnfinishedError as error:
            self._history.drop(error.epochs)
            raise

    def _check_own(self, verb: str) -> None:
        """A process that was forked off may only read."""
        if self._forked:
            raise InvalidArgumentError(
                f"{verb}: this process (pid {os.getpid()}) was forked off the one that opened {self._directory}, and "
                "can only read with its manager. Save and delete there; or start this process with the method 'spawn', "
                "and open another directory in it"
            )

    def _agree(self, call: str, decide: Callable[[], Any]) -> Any:
        """The primary does something, everybody takes its answer; see `calls`."""
        return self._calls.answer(call, decide, 2 * self._storage.open_timeout_secs)
