"""The saves of one manager, in the background, from the snapshot to the verdict.

Guarantees:
- calls on the training thread (`make_room`, `submit`) talk to no other process;
- every wait is bounded, and every save ends: committed, failed or, on a process without a verdict, uncertain;
- only the primary decides (`primary.Primary`); the other processes follow (`follower.Follower`);
- a save that a process has called failed is never committed with its help (see `Phase.COMMITTING`);
- the saves of one manager are written one after the other, and end in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging

from epochckpt import _monitoring, _patience, _threads, _units, errors
from epochckpt._threads import Deadline
from epochckpt.directory import EpochDirectory
from epochckpt.format import Nodes
from epochckpt.options import StorageOptions
from epochckpt.orbax import events
from epochckpt.saving import memory, run_clock
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.saving.claiming import Claim
from epochckpt.saving.follower import Follower
from epochckpt.saving.history import History
from epochckpt.saving.in_flight import InFlight, SaveListener
from epochckpt.saving.node_writer import write_nodes
from epochckpt.saving.opening import Opened
from epochckpt.saving.page_cache import PageCache
from epochckpt.saving.primary import Primary
from epochckpt.saving.process_side import ProcessSide, SaveContext
from epochckpt.saving.reports import ProcessReport
from epochckpt.saving.save import Phase, Save


class SaveQueue:
    """The saves of one manager on one process, to an opened directory.

    `save` runs on the training thread: it waits for room, copies, and submits. The write lane then writes the nodes of
    this process, and the commit lane waits for the verdict. Orbax's `policies` (the manager's options) say which epochs
    of the `history` each commit deletes.
    """

    def __init__(
        self,
        *,
        opened: Opened,
        claim: Claim,
        options: StorageOptions,
        history: History,
        policies: ocp.CheckpointManagerOptions,
        listener: SaveListener,
    ):
        self._store = opened.store
        self._epoch_directory: EpochDirectory = opened.epoch_directory
        self._coordinator = opened.coordinator
        self._nodes = opened.nodes
        self._claim = claim
        self._options = options
        self._history = history
        self._listener = listener
        self._pool = _threads.Pool(max(options.io_threads, self._store.concurrency))
        self._write_lane = _threads.Lane()
        self._commit_lane = _threads.Lane()
        machine = memory.of_this_machine()
        self._memory = options.host_memory_limit_bytes or (machine and machine // 2)  # for all snapshots together
        self._tries: dict[int, int] = {}  # how many saves of an epoch the write lane has taken up
        self.last = ""  # the name of the last save that was submitted; empty before the first
        self._in_flight = InFlight(
            root=self._store.root,
            nodes=opened.nodes,
            history=history,
            listener=listener,
        )
        newest = max(opened.survey.epochs, default=None)
        self._page_cache = PageCache(self._store, self._epoch_directory.names, newest)
        context = SaveContext(
            directory=opened.job_directory,
            prefix=f"{opened.prefix}/save",
            claim=claim,
            options=options,
            history=history,
            policies=policies,
            in_flight=self._in_flight,
            commit_lane=self._commit_lane,
            pool=self._pool,
        )
        kind = Primary if opened.coordinator.primary else Follower
        self._side: ProcessSide = kind(context, opened.nodes)

    def name_nodes(self, nodes: Nodes) -> None:
        """Gives the nodes of the job other names, before the first save."""
        self._nodes = nodes
        self._side.name_nodes(nodes)
        self._in_flight.name_nodes(nodes)

    # -- on the training thread ----------------------------------------------------------------------------------

    def make_room(self, epoch: int, copied_bytes: int, runs_handlers: bool) -> errors.StorageBehindError | None:
        """Waits until a new save may begin, see `_in_the_way`, and logs why when that takes long.

        Returns the failure of the save if it may not begin within `max_blocked_secs`.
        """
        limit = self._options.host_memory_limit_bytes
        if limit is not None and copied_bytes > limit:
            raise errors.InvalidArgumentError(
                f"this save copies {_units.nbytes(copied_bytes)} to host memory, "
                f"more than host_memory_limit_bytes allows ({_units.nbytes(limit)}); raise the limit"
            )
        began = time.monotonic()
        logged = False
        secs = self._options.max_blocked_secs
        bound = Deadline(math.inf if secs is None else secs)
        while found := self._in_the_way(copied_bytes, runs_handlers):
            older, event, reason = found
            if not event.wait(min(began + _patience.now().long_save_secs - time.monotonic(), bound.left())):
                logged = True
                text = "save(%d) holds training: it waits for the save of checkpoint %d (%s), because %s"
                logging.warning(text, epoch, older.epoch, older.describe(), reason)
            if not self._in_flight.wait(older, event, bound):
                held = f"save() has held training for {_units.secs(time.monotonic() - began)} (max_blocked_secs)"
                first = f"checkpoint {older.epoch}, which began {_units.secs(older.elapsed_secs)} ago"
                text = (
                    f"storage is behind: {held}, and the save of {first} ({older.describe()}), has to come first, "
                    f"because {reason}"
                )
                return errors.StorageBehindError(epoch, text)
        if logged:
            logging.warning("save(%d) blocked training for %s", epoch, _units.secs(time.monotonic() - began))
        return None

    def _in_the_way(self, copied_bytes: int, runs_handlers: bool) -> tuple[Save, _threads.Future[Any], str] | None:
        """The older save that a new one waits for, the event of it, and the reason; None if there is none.

        One save is written and one more may wait; in a job of one process a third may be committing. Snapshots together
        stay within the bound on host memory, but a larger one may begin when it is alone. A save that runs handlers
        waits until they are done with the save before, because handlers may keep state.
        """
        saving = self.saving()
        unwritten = [save for save in saving if not save.written.done()]
        held = sum(save.snapshot.host_copy_bytes for save in unwritten)
        oldest = unwritten[0] if unwritten else None
        if oldest is not None and len(unwritten) > 1:
            return oldest, oldest.written, "one save is written at a time, and one more may wait"
        if oldest is not None and runs_handlers and oldest.snapshot.runs_handlers:
            return oldest, oldest.written, "its handlers are not done with that one"
        if oldest is not None and held and self._memory is not None and held + copied_bytes > self._memory:
            both = f"{_units.nbytes(held)} and {_units.nbytes(copied_bytes)}"
            return oldest, oldest.written, f"both copies ({both}) are more than {_units.nbytes(self._memory)} of memory"
        if self._coordinator.processes == 1 and len(saving) > 2:
            return saving[0], saving[0].done, "committing is slower than saving"
        return None

    def next_try(self, epoch: int) -> int:
        """The number of the next save of an epoch, from 0."""
        handed = [save.request.number + 1 for save in self.pending() if save.epoch == epoch]
        return max([self._tries.get(epoch, 0), *handed])  # in this order: a save moves from `pending` to `_tries`

    def submit(self, save: Save) -> None:
        """Queues a save. Of two with one number (a signal handler can make them) only the first is saved."""
        if not self._coordinator.primary:  # the primary decides by its own clock, and may have begun later
            save.start_bound(self._side.deadline())
        if save.request.refusal is None:
            save.note_spent(self._history.run.so_far())
            self._history.run.spend(run_clock.BLOCKED, save.request.blocked_secs)
        self.last = save.name
        self._history.pace.begun(save.done, save.deadline.secs + _patience.now().verdict_margin_secs)
        self._in_flight.add(save)  # from here on it is saved: after an interrupt `pending` wakes the write lane
        self.pending()

    def refuse(self, save: Save, failure: errors.StorageBehindError) -> None:
        """Counts a save that could not begin as failed, now; the other processes hear of it in its turn."""
        if self.next_try(save.epoch) == save.request.number:  # else a signal handler has saved it meanwhile
            self._in_flight.tell(save, failure)
            self._history.run.spend(run_clock.BLOCKED, save.request.blocked_secs)
            if self._coordinator.processes > 1:
                self.submit(save)
            else:
                self._tries[save.epoch] = save.request.number + 1

    def pending(self) -> list[Save]:
        """Saves without a verdict, oldest first. Wakes the write lane if an interrupt has kept it asleep."""
        pending = self._in_flight.all()
        if any(save.phase is Phase.QUEUED for save in pending) and not self._write_lane.wake():
            self._write_lane.submit(self._write_all)
        return pending

    def saving(self) -> list[Save]:
        """The pending saves that this process could begin."""
        return [save for save in self.pending() if save.request.refusal is None]

    def failure(self, epoch: int) -> tuple[str, str] | None:
        """How the last save of an epoch ended, if not well (`failed`, `uncertain`), and why."""
        return self._in_flight.failure(epoch)

    def note_failure(self, error: errors.SaveError | errors.RemovalError) -> None:
        """Keeps a failure until the caller is told of it."""
        self._in_flight.note_failure(error)

    def untold_failures(self) -> list[errors.SaveError | errors.RemovalError]:
        """The failures of saves and removals that the caller has not been told of."""
        return self._in_flight.untold()

    def pop_failures(self) -> list[errors.SaveError | errors.RemovalError]:
        """The same; the caller is told of them now."""
        return self._in_flight.pop_errors()

    def forget_failure(self, error: errors.SaveError | errors.RemovalError) -> None:
        """The caller has been told of a failure."""
        self._in_flight.forget_error(error)

    def after_fork(self) -> None:
        """In a forked child: the saves in flight are the parent's."""
        self._in_flight.after_fork()

    def drain(self, epoch: int | None = None) -> None:
        """Waits until every save (of one epoch, or of any) has its verdict; bounded, as every save is."""
        for save in (each for each in self.pending() if epoch in (None, each.epoch)):
            with save.shown(self._store.written):
                self._in_flight.wait(save, save.done)

    def drain_removals(self) -> None:
        """Waits until deleted epochs are removed, too; bounded like a save."""
        began = time.monotonic()
        self.drain()
        self._commit_lane.submit(lambda: None).wait(self._options.save_timeout_secs)
        self._history.run.spend(run_clock.WAITING, time.monotonic() - began)

    def remove(self, remove: Callable[[], None]) -> _threads.Future[None]:
        """Removes a hidden epoch in the background, after the saves in flight; a RemovalError is kept."""
        return self._commit_lane.submit(lambda: _threads.logged("delete", remove, self._in_flight.note_failure))

    @property
    def longest_secs(self) -> float:
        """The bound on every save."""
        return self._options.save_timeout_secs + _patience.now().verdict_margin_secs + self._side.lags.most()

    # -- in the write lane ---------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Writes the queued saves, in order; runs in the write lane alone."""
        while waiting := [save for save in self._in_flight.all() if save.phase is Phase.QUEUED]:
            save = waiting[0]
            if save.request.number < self._tries.get(save.epoch, 0):  # a signal handler saved inside this very `save`
                self._in_flight.drop(save)
            elif save.take_up():  # else it was given up just now, while an older write hung
                self._write(save)

    def _write(self, save: Save) -> None:
        """Writes the nodes of this process, and reports them; every failure becomes this process's report."""
        self._tries[save.epoch] = save.request.number + 1
        if save.request.refusal is None:
            self._in_flight.forget_failure(save.epoch)
            queued_secs = save.elapsed_secs - save.request.blocked_secs
            _monitoring.secs(queued_secs, "/epochckpt/write/queue_secs")
        error: Exception | None = None
        try:
            self._side.begin(save)
            if save.request.refusal is not None:
                raise save.request.refusal
            report = self._write_nodes(save)
        except BaseException as caught:
            failed = caught if isinstance(caught, Exception) else errors.as_save_error(save.epoch, caught)
            error = errors.kept(failed)
            report = ProcessReport(error=error)
        save.snapshot.drop()
        save.advance(Phase.WRITTEN)
        try:
            self._side.report(save, report)
        except errors.SaveError as caught:
            error = errors.kept(caught)
        save.written.set(None)
        self._commit_lane.submit(lambda: self._conclude(save, error))

    def _write_nodes(self, save: Save) -> ProcessReport:
        save.check_not_cancelled()
        save.begin_writing(self._store.written)
        return write_nodes(
            staging=self._side.staging(save),
            nodes=self._nodes,
            save=save,
            options=self._options,
            pool=self._pool,
            page_cache=self._page_cache,
        )

    # -- in the commit lane --------------------------------------------------------------------------------------

    def _conclude(self, save: Save, error: Exception | None) -> None:
        """Ends a save on this process, whatever happens."""
        failure: errors.SaveError | None = None
        try:
            commit = self._side.conclude(save, error)
            save.note_cost(SaveCost.of(save.epoch, commit.summary))
            self._history.commit(commit)
            self._side.follow_commit(save, commit)
            problem = f"checkpoint {save.epoch} is committed, but its mirror, handler or log has not heard of it"
            _threads.logged(problem, lambda: self._listener.announce(save, commit))
            outcome = commit
        except BaseException as caught:
            failure = errors.kept(errors.as_save_error(save.epoch, caught))
            self._claim.note(failure)
            outcome = failure
        # Deleted epochs are out of sight by now. Their bytes are removed once the save has ended.
        began = time.monotonic()
        self._in_flight.finish(save, outcome)
        for remove in save.pop_removals():
            _threads.logged("a deleted epoch could not be removed", remove)
        if failure is None:
            nodes = self._nodes.hosted_names
            _threads.logged("the page cache", lambda: self._page_cache.committed(save.epoch, nodes))
        if failure is None and self._coordinator.primary:
            _monitoring.secs(time.monotonic() - began, events.REMOVED_OLD)
