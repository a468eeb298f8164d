"""The attempts of one manager, in the background, from the snapshot to the verdict.

Guarantees:
- calls on the training thread (`make_room`, `submit`) talk to no other process;
- every wait is bounded, and every attempt ends: committed, failed or, on a process without a verdict, uncertain;
- only the primary decides. A process's report is its last act on the staging of an attempt;
- an attempt that a process has called failed is never committed with its help (`Attempt.binding`);
- attempts of one manager are written one after the other, and end in order.

An attempt is called `<epoch>-<number>` on every process, because all processes make the same calls. Its keys lie below
the prefix that the processes agreed on when they opened the directory, so that a relaunched job never meets an old one:
`report/<attempt>/<process>`, the primary's `verdict/<attempt>/0` and, until every process has reported once, the
primary's `claim/<attempt>/0`. The first save of the other processes waits for the claim, later saves for no process.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _monitoring, _threads, _units, errors
from epochckpt._threads import Deadline
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.directory.protocol import Staging
from epochckpt.options import StorageOptions
from epochckpt.orbax import events
from epochckpt.saving import memory, retention, run_clock
from epochckpt.saving.attempt import Attempt, Committed, ProcessReport, write_nodes
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.saving.claiming import Claim
from epochckpt.saving.hosts import Hosts
from epochckpt.saving.lags import Lags
from epochckpt.saving.opening import Opened
from epochckpt.saving.retention import History

LONG_SECS = 1.0  # a save that holds training for longer logs why
_VERDICT_MARGIN_SECS = 60.0  # by how much the other processes wait longer than the primary does
_MAX_UNDECIDED = 3  # written here, waiting for other nodes; nodes that compute in step are at most one save apart
_PATIENCE_SECS = 1.0  # how long nodes may take to report, once all older saves are decided, before a new save fails
_COMMITTING = "every node has written, committing"
_KEPT_REPORTS = 2  # attempts whose reports the coordination service keeps
_KEPT_KEYS = 192  # other keys that it keeps, for a process that was away: reports are large, those are small


class SaveListener(Protocol):
    """A manager's part in its saves. The commit lane calls it on every process, in the order of the saves."""

    def announce(self, attempt: Attempt, commit: Committed) -> None:
        """An attempt is committed, and in the history. May fail."""

    def ended(self, attempt: Attempt, failure: errors.SaveError | None) -> None:
        """An attempt has ended, with the reason if it failed. Must not fail."""


class Attempts:
    """The attempts of one manager on one process, which saves to an opened directory once it has the claim to it.

    Orbax's `policies` (the manager's options) say which epochs of the `history` each commit deletes.
    """

    def __init__(
        self,
        opened: Opened,
        claim: Claim,
        options: StorageOptions,
        history: History,
        policies: ocp.CheckpointManagerOptions,
        listener: SaveListener,
        hosts: Hosts | None = None,
    ):
        self._store, self._commits, self._coordinator = opened.store, opened.commits, opened.coordinator
        self._prefix, self.nodes, self._options = f"{opened.prefix}/save", opened.nodes, options
        self._claim, self._claim_is_known = claim, opened.coordinator.processes == 1
        self._history, self._policies, self._listener, self._hosts = history, policies, listener, hosts
        self._pool = _threads.Pool(max(options.io_threads, self._store.concurrency))
        self._write_lane, self._report_lane, self._commit_lane = _threads.Lane(), _threads.Lane(), _threads.Lane()
        self._first = "verdict" if hosts is None else "record"  # what the primary says first of an attempt
        self._lags = Lags(options.save_timeout_secs, self._has_answered)
        machine = memory.of_this_machine()
        self._memory = options.host_memory_limit_bytes or (machine and machine // 2)  # for all snapshots together
        self.last = ""  # the name of the last attempt that was submitted; empty before the first
        # Threads and signal handlers share these without a lock: each access is one operation of a list or dict, and
        # no invariant spans two of them; see the guarantees of `_threads`.
        self._pending: list[Attempt] = []
        self._tries: dict[int, int] = {}  # how many attempts at an epoch the write lane has taken up
        self.failures: list[errors.SaveError | errors.RemovalError] = []  # that nobody has been told of
        self._failed: dict[int, tuple[str, str]] = {}
        self._undeleted = set[int]()  # older epochs that are still there, as was reported; the commit lane's own
        self._unheard: collections.deque[Attempt] = collections.deque(maxlen=_KEPT_KEYS)
        self._report_keys, self._keys = RecentKeys(_KEPT_REPORTS), RecentKeys(_KEPT_KEYS)
        self._resident = collections.deque[int]()  # epochs whose bytes the page cache may hold

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
        began, logged, secs = time.monotonic(), False, self._options.max_blocked_secs
        bound = Deadline(math.inf if secs is None else secs)
        while found := self._in_the_way(copied_bytes, runs_handlers):
            older, event, reason = found
            if not event.wait(min(began + LONG_SECS - time.monotonic(), bound.left())):
                logged = True
                text = "save(%d) holds training: it waits for the save of checkpoint %d (%s), because %s"
                logging.warning(text, epoch, older.epoch, older.state, reason)
            if not self._wait(older, event, bound):
                held = f"save() has held training for {_units.secs(time.monotonic() - began)} (max_blocked_secs)"
                first = f"checkpoint {older.epoch}, which began {_units.secs(older.elapsed_secs)} ago ({older.state})"
                text = f"storage is behind: {held}, and the save of {first}, has to come first, because {reason}"
                return errors.StorageBehindError(epoch, text)
        if logged:
            logging.warning("save(%d) blocked training for %s", epoch, _units.secs(time.monotonic() - began))
        return None

    def _in_the_way(self, copied_bytes: int, runs_handlers: bool) -> tuple[Attempt, _threads.Future[Any], str] | None:
        """The older save that a new one waits for, the event of it, and the reason; None if there is none.

        One save is written and one more may wait; in a job of one process a third may be committing. Snapshots together
        stay within the bound on host memory, but a larger one may begin when it is alone. A save that runs handlers
        waits until they are done with the save before, because handlers may keep state.
        """
        pending = self.in_flight()
        unwritten = [a for a in pending if not a.written.done()]
        held = sum(a.snapshot.copied_bytes for a in unwritten)
        oldest = unwritten[0] if unwritten else None
        if oldest is not None and len(unwritten) > 1:
            return oldest, oldest.written, "one save is written at a time, and one more may wait"
        if oldest is not None and runs_handlers and oldest.snapshot.runs_handlers:
            return oldest, oldest.written, "its handlers are not done with that one"
        if oldest is not None and held and self._memory is not None and held + copied_bytes > self._memory:
            both = f"{_units.nbytes(held)} and {_units.nbytes(copied_bytes)}"
            return oldest, oldest.written, f"both copies ({both}) are more than {_units.nbytes(self._memory)} of memory"
        if self._coordinator.processes == 1 and len(pending) > 2:
            return pending[0], pending[0].done, "committing is slower than saving"
        return None

    def next_try(self, epoch: int) -> int:
        """The number of the next attempt at an epoch, from 0."""
        handed = [attempt.number + 1 for attempt in self.pending() if attempt.epoch == epoch]
        return max([self._tries.get(epoch, 0), *handed])  # in this order: an attempt moves from `pending` to `_tries`

    def submit(self, attempt: Attempt) -> None:
        """Queues an attempt. Of two with one number (a signal handler can make them) only the first is saved."""
        if not self._coordinator.primary:  # the primary decides by its own clock, and may have begun later
            attempt.deadline = Deadline(self._options.save_timeout_secs + _VERDICT_MARGIN_SECS)
        if attempt.error is None:
            attempt.spent = self._history.run.so_far()
            self._history.run.spend(run_clock.BLOCKED, attempt.blocked_secs)
        self.last = attempt.name
        self._history.pace.begun(attempt.done, attempt.deadline.secs + _VERDICT_MARGIN_SECS)
        self._pending.append(attempt)  # from here on it is saved: after an interrupt `pending` wakes the write lane
        self.pending()

    def refuse(self, attempt: Attempt, failure: errors.StorageBehindError) -> None:
        """Counts an attempt that could not begin as failed, now; the other processes hear of it in its turn."""
        if self.next_try(attempt.epoch) == attempt.number:  # else a signal handler has saved it meanwhile
            self._tell(attempt, failure)
            attempt.error = failure
            self._history.run.spend(run_clock.BLOCKED, attempt.blocked_secs)
            if self._coordinator.processes > 1:
                self.submit(attempt)
            else:
                self._tries[attempt.epoch] = attempt.number + 1

    def pending(self) -> list[Attempt]:
        """Attempts without a verdict, oldest first. Wakes the write lane if an interrupt has kept it asleep."""
        pending = list(self._pending)
        if not all(attempt.dequeued.claimed for attempt in pending) and not self._write_lane.wake():
            self._write_lane.submit(self._write_all)
        return pending

    def in_flight(self) -> list[Attempt]:
        """The pending attempts that this process could begin."""
        return [attempt for attempt in self.pending() if attempt.error is None]

    def failure(self, epoch: int) -> tuple[str, str] | None:
        """How the last attempt at an epoch ended, if not well (`failed`, `uncertain`), and why."""
        return self._failed.get(epoch)

    def pop_errors(self) -> list[errors.SaveError | errors.RemovalError]:
        """Failures since the last call."""
        popped = list(self.failures)
        for error in popped:
            self.forget_error(error)
        return popped

    def forget_error(self, error: errors.SaveError | errors.RemovalError) -> None:
        """The caller has been told of a failure."""
        with contextlib.suppress(ValueError):
            self.failures.remove(error)

    def after_fork(self) -> None:
        """In a forked child: the saves in flight are the parent's."""
        self._pending.clear()
        self.failures.clear()

    def drain(self, epoch: int | None = None) -> None:
        """Waits until every attempt (at one epoch, or at any) has its verdict; bounded, as every attempt is."""
        for attempt in (each for each in self.pending() if epoch in (None, each.epoch)):
            with attempt.shown(self._store.written):
                self._wait(attempt, attempt.done)

    def drain_removals(self) -> None:
        """Waits until deleted epochs are removed, too; bounded like a save."""
        began = time.monotonic()
        self.drain()
        self._commit_lane.submit(lambda: None).wait(self._options.save_timeout_secs)
        self._history.run.spend(run_clock.WAITING, time.monotonic() - began)

    def remove(self, remove: Callable[[], None]) -> _threads.Future[None]:
        """Removes a hidden epoch in the background, after the saves in flight; a RemovalError is kept in `failures`."""
        return self._commit_lane.submit(lambda: _threads.logged("delete", remove, self.failures.append))

    @property
    def longest_secs(self) -> float:
        """The bound on every attempt."""
        return self._options.save_timeout_secs + _VERDICT_MARGIN_SECS + self._lags.most()

    def _wait(self, attempt: Attempt, event: _threads.Future[Any], bound: Deadline | None = None) -> bool:
        """Waits for a step of an attempt, and gives the attempt up when even its last bound has passed.

        Returns whether the step is done; False if the `bound` of the caller has passed before.
        """
        # Only a system call of this process that hangs gets that far. Its data is never committed: this process neither
        # reports it nor, on the primary, commits it.
        left = bound.left if bound is not None else lambda: math.inf
        while not event.wait(min(max(attempt.deadline.left(), 0.0) + _VERDICT_MARGIN_SECS, left())):
            if attempt.deadline.left() + _VERDICT_MARGIN_SECS > 0:  # it has been given more time
                if left() <= 0:
                    return False
                continue
            epoch, secs, state = attempt.epoch, attempt.deadline.secs, attempt.state
            if attempt.binding.claim():  # from here on this process takes no binding step
                self._end(attempt, errors.LateNodesError(epoch, self.nodes.hosted_names, secs))
            else:
                reason = f"storage has not answered, long after its {secs:g} s were over ({state})"
                self._end(attempt, errors.UncertainError(epoch, reason))
            event.wait(min(_VERDICT_MARGIN_SECS, left()))  # it may be ending just now
            break
        return event.done()

    def _bind(self, attempt: Attempt) -> None:
        """From here on this process may not give the attempt up any more; SaveError if it has done so."""
        if not attempt.binding.claim():
            raise errors.SaveError(attempt.epoch, f"{self.nodes.hosted_names[0]} has given it up")

    # -- writing, on every node ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Writes the queued attempts, in order; runs in the write lane alone."""
        while waiting := [attempt for attempt in list(self._pending) if not attempt.dequeued.claimed]:
            if waiting[0].dequeued.claim():  # else it was given up just now, while an older write hung
                self._write(waiting[0])

    def _write(self, attempt: Attempt) -> None:
        if attempt.number < self._tries.get(attempt.epoch, 0):  # a signal handler saved inside this very `save`
            attempt.snapshot.drop()
            if attempt.ended.claim():
                self._leave(attempt)
            return
        self._tries[attempt.epoch] = attempt.number + 1
        attempt.writing = time.monotonic()
        if attempt.error is None:
            self._failed.pop(attempt.epoch, None)
            _monitoring.secs(attempt.elapsed_secs - attempt.blocked_secs, "/epochckpt/write/queue_secs")
        error: Exception | None = None
        try:
            attempt.state = "beginning"
            self._begin(attempt)
            if attempt.error is not None:
                raise attempt.error
            attempt.check()
            attempt.written_before, attempt.state = self._store.written.nbytes, "writing"
            while self._resident:
                epoch = self._resident.popleft()
                for name in self.nodes.hosted_names:
                    self._commits.uncache(epoch, name)
            report = write_nodes(self._staging(attempt), self.nodes, attempt, self._options, self._pool)
        except BaseException as caught:  # every failure becomes this process's report
            failed = caught if isinstance(caught, Exception) else errors.as_save_error(attempt.epoch, caught)
            error = errors.kept(failed)
            report = ProcessReport(error=error)
        # The report is this process's last act on the staging: after it, the primary may commit.
        attempt.snapshot.drop()
        if not self._coordinator.primary:
            try:
                self._bind(attempt)
                # A lane of its own: where the primary's machine is silent this takes long.
                key = f"{self._key('report', attempt)}/{self._coordinator.process}"
                problem = f"checkpoint {attempt.epoch}: the primary may not hear of this node"
                self._report_lane.submit(
                    lambda: _threads.logged(problem, lambda: self._coordinator.put(key, report.to_wire()))
                )
            except errors.SaveError as caught:
                error = errors.kept(caught)
        attempt.reports[self._coordinator.process] = report
        attempt.state = f"written, waiting for {'its commit' if self.nodes.processes == 1 else 'the other nodes'}"
        attempt.written.set(None)
        self._commit_lane.submit(lambda: self._conclude(attempt, error))

    def _begin(self, attempt: Attempt) -> None:
        """Makes the place to write to: the primary claims the directory, and the other processes learn the claim."""

        def take() -> dict[str, Any]:
            self._let_older_ones_end(attempt)
            return self._claim.take(attempt.epoch)

        key, left = f"{self._key('claim', attempt)}/0", max(attempt.deadline.left(), 0.001)
        if self._coordinator.primary:
            self._claim.learn(take() if self._claim_is_known else self._coordinator.agree(key, take, left), left)
            self._claim.writer.stage(attempt.epoch, self._id(attempt))
        elif not self._claim.known:
            attempt.state = "waiting for the primary to claim the directory"
            try:
                self._claim.learn(self._coordinator.agree(key, take, left), left)
            except errors.CoordinationTimeoutError:
                raise errors.LateNodesError(attempt.epoch, [self.nodes.names[0]], attempt.deadline.secs) from None

    def _let_older_ones_end(self, attempt: Attempt) -> None:
        """On the primary: waits while too many saves are undecided because nodes are slow or behind."""
        while len(waiting := [a for a in self.pending() if a.written.done()]) > _MAX_UNDECIDED:
            oldest = waiting[0]
            since = time.monotonic() - oldest.collecting
            self._lags.look()
            lag = self._lags.most()
            if oldest.collecting and oldest.state != _COMMITTING and since >= _PATIENCE_SECS and not lag:
                # A node is silent: saves that wait for it must not pile up on storage.
                epochs = ", ".join(str(a.epoch) for a in waiting)
                reason = f"checkpoints {epochs} are still waiting for their nodes; not more than that"
                raise errors.SaveError(attempt.epoch, reason)
            for each in self.pending():
                if not each.written.done():  # it waits for this one, which waits for the node that is behind
                    self._give_time(each, lag)
            if oldest.deadline.passed():
                self._wait(oldest, oldest.done)
            oldest.done.wait(_PATIENCE_SECS / 4)

    # -- the verdict ---------------------------------------------------------------------------------------------

    def _conclude(self, attempt: Attempt, error: Exception | None) -> None:
        """Ends an attempt on this node, whatever happens."""
        failure: errors.SaveError | None = None
        try:
            conclude = self._decide if self._coordinator.primary else self._await_verdict
            commit = conclude(attempt, error)
            attempt.cost = commit.cost
            self._history.commit(commit)
            if self._hosts is not None and not self._coordinator.primary:
                self._delete_old(attempt, commit, errors.RemovalError)
            _threads.logged("the logger of the manager failed", lambda: self._listener.announce(attempt, commit))
            self._resident.append(attempt.epoch)
        except BaseException as caught:
            failure = errors.kept(errors.as_save_error(attempt.epoch, caught))
            self._claim.note(failure)
            if self._hosts is not None and not self._coordinator.primary:
                self._remove(attempt, failure)
        # Deleted epochs are out of sight by now. Their bytes are removed once the attempt has ended.
        began = time.monotonic()
        self._end(attempt, failure)
        for remove in attempt.removals:
            _threads.logged("a deleted epoch could not be removed", remove)
        if failure is None and self._coordinator.primary:
            _monitoring.secs(time.monotonic() - began, events.REMOVED_OLD)

    def _delete_old(self, attempt: Attempt, commit: Committed, kind: type[errors.RemovalError]) -> Committed:
        """Takes the epochs that a commit deletes out of sight here; returns the commit without those that stay.

        Each that stays is reported once, by an error of this `kind`.
        """
        into, kept = self._policies.todelete_subdir, list[int]()
        for epoch in commit.hides if self._hosts is None else self._hosts.here(commit.hides):
            try:
                attempt.removals.append(retention.unlist(self._claim.writer, epoch, into))
            except errors.UnfinishedError as error:  # no reader sees it any more
                logging.warning("an older epoch could not be removed: %s", errors.say(error))
            except Exception as error:
                kept.append(epoch)
                self._claim.note(error)
                if epoch not in self._undeleted and not isinstance(error, errors.FencedError):
                    failure = kind(self._store.root, epoch, errors.say(error))
                    failure.__cause__ = errors.kept(error)
                    logging.error("%s", failure)
                    self.failures.append(failure)
                self._undeleted.add(epoch)
                continue
            self._undeleted.discard(epoch)
        return commit.keeping(kept)

    def _end(self, attempt: Attempt, failure: errors.SaveError | None) -> None:
        """Ends an attempt, once; one that was given up stays given up."""
        if not attempt.ended.claim():
            if failure is None:
                logging.warning("checkpoint %d, of which that was uncertain, is committed", attempt.epoch)
            return
        self._tell(attempt, failure)
        if attempt.dequeued.claim():  # it was never written
            attempt.snapshot.drop()
        self._leave(attempt)

    def _tell(self, attempt: Attempt, failure: errors.SaveError | None) -> None:
        """Enters how an attempt has ended."""
        attempt.state = "committed" if failure is None else "failed"
        if failure is not None:
            state = "uncertain" if isinstance(failure, errors.UncertainError) else "failed"
            self._failed[attempt.epoch] = (state, failure.reason)
            if attempt.error is None:  # else `save` has raised it, or `refuse` has entered it
                self.failures.append(failure)
                self._history.fail(attempt)
            logging.error("%s: %s", self._store.root, failure)
        self._listener.ended(attempt, failure)

    def _leave(self, attempt: Attempt) -> None:
        """Takes an attempt off the list, and wakes the threads that wait for it."""
        self._pending.remove(attempt)
        attempt.written.set(None)
        attempt.done.set(attempt.cost)

    def _decide(self, attempt: Attempt, error: Exception | None) -> Committed:
        """Primary: waits for the reports, commits, and publishes the verdict."""
        try:
            if error is not None:
                raise error
            attempt.collecting = time.monotonic()
            self._collect(attempt)
            attempt.state = _COMMITTING
            commit = self._publish(attempt)
        except BaseException as caught:
            failure = self._taken_back(attempt, caught)  # before any other process can hear that it has failed
            self._publish_verdict(attempt, {"error": errors.to_wire(errors.as_save_error(attempt.epoch, failure))})
            self._remove(attempt, failure)
            if failure is not caught:
                raise failure from caught
            raise
        try:
            commit = retention.retire(self._commits, self._history, self._policies, commit)
        except Exception:  # a policy of the user's: a failure there must not harm the commit
            logging.exception("checkpoint %d is committed, but deciding what to delete failed", attempt.epoch)
        commit = self._delete_old(attempt, commit, errors.RetentionError)
        self._publish_verdict(attempt, commit.to_wire(hides=self._hosts is not None))
        return commit

    def _remove(self, attempt: Attempt, failure: BaseException) -> None:
        """Removes what is staged of a failed attempt; an epoch that may exist keeps its data."""
        if self._claim.known and not isinstance(failure, errors.UncertainError):
            discard = functools.partial(self._claim.writer.discard, self._staging(attempt))
            # Later: where storage is away it takes long, and the failure is known now.
            self._commit_lane.submit(lambda: _threads.logged("the remains of a save stay", discard))

    def _collect(self, attempt: Attempt) -> None:
        """Primary: waits for the report of every process; raises for processes that failed, differ, or are late."""
        key, missing = self._key("report", attempt), set(range(self.nodes.processes)) - attempt.reports.keys()

        # Processes that have reported before the primary asks are not late, whatever they were before.
        if missing:
            attempt.receive({int(process): wire for process, wire in self._coordinator.get_all(key).items()})
            self._lags.heard(missing & attempt.reports.keys())
            missing -= attempt.reports.keys()
            self._give_time(attempt, self._lags.secs(missing))
        while missing and not any(report.error for report in attempt.reports.values()):
            found, missing = self._coordinator.gather(key, missing, attempt.deadline)
            attempt.receive(found)
            self._lags.heard(found, attempt)
            if not attempt.deadline.passed():
                break  # all there, or one with an error
            if not self._give_time(attempt, self._lags.secs(missing)):
                self._lags.missed(attempt, missing)
                break
        # The first error of a process is the attempt's; then come missing reports, and plans that differ.
        for process, report in sorted(attempt.reports.items()):
            if (error := report.error) is not None:
                kinds = (errors.FencedError, errors.StorageBehindError)
                kind = next((each for each in kinds if isinstance(error, each)), errors.SaveError)
                reason = f"node {self.nodes.names[process]}: {getattr(error, 'reason', error)}"
                raise kind(attempt.epoch, reason) from error
        if missing:
            late = [self.nodes.names[process] for process in sorted(missing)]
            raise errors.LateNodesError(attempt.epoch, late, attempt.deadline.secs)
        self._claim_is_known = True
        different = [process for process, report in attempt.reports.items() if report.plan != attempt.plan]
        if different:
            reason = (
                f"{self._coordinator.named(different)} planned something else than {self.nodes.names[0]}: the trees, "
                "shapes or shardings that were passed to save(), or the sizes in StorageOptions, are not the same"
            )
            raise errors.SaveError(attempt.epoch, reason)

    def _give_time(self, attempt: Attempt, lag: float) -> bool:
        """Gives an attempt more time, for processes that are behind; returns whether it has more than before."""
        bound = self._options.save_timeout_secs + (0.0 if self._coordinator.primary else _VERDICT_MARGIN_SECS)
        left = bound + lag - attempt.elapsed_secs
        if not lag or left <= max(attempt.deadline.left() + 0.001, 0.0):  # it has been given that already
            return False
        attempt.deadline = Deadline(left)
        attempt.deadline.secs = round(bound + lag, 1)  # of the whole save, for people
        return True

    def _has_answered(self, attempt: Attempt, process: int) -> bool:
        answer = self._key("report" if self._coordinator.primary else self._first, attempt)
        return self._coordinator.peek(f"{answer}/{process}") is not None

    @_monitoring.timed(events.FINALIZED)
    def _publish(self, attempt: Attempt) -> Committed:
        record = attempt.record(self._id(attempt), objects=not self._store.renames)
        times, took_over = (record.started_ns, record.committed_ns), self._commits.taken_over
        runs = self._history.run.committing(attempt.epoch, self._claim.incarnation, attempt.spent, times, took_over)
        record = dataclasses.replace(record, runs=runs)
        if self._options.orbax_view:
            record = _monitoring.timed(events.FINALIZED_ITEMS)(self._claim.writer.write_view)(record, self._pool.run)

        def still_in_time() -> None:
            if attempt.deadline.passed():
                reason = f"its {attempt.deadline.secs:g} s were over just before the rename"
                raise errors.SaveError(attempt.epoch, reason)
            attempt.check()
            self._bind(attempt)

        data = record.to_bytes()
        if self._hosts is not None:
            self._hosts.commit(attempt, self._staging(attempt), data, still_in_time, self._key)
        elif remove := self._claim.writer.publish(self._staging(attempt), data, still_in_time, attempt.replaces):
            self._commit_lane.submit(lambda: _threads.logged("a replaced epoch could not be removed", remove))
        self._history.run.committed()
        logging.info("checkpoint %d committed to %s: %s", attempt.epoch, self._store.root, attempt.summary(record))
        cost = SaveCost.of(attempt.epoch, record)
        return Committed(attempt.epoch, attempt.metrics, record.committed_ns, attempt=record.attempt, cost=cost)

    def _publish_verdict(self, attempt: Attempt, verdict: dict[str, Any]) -> None:
        """Publishes the verdict, and forgets the keys of attempts that ended long ago."""
        problem = f"checkpoint {attempt.epoch}: the verdict could not be published"  # storage decides then
        key = f"{self._key('verdict' if attempt.offered else self._first, attempt)}/0"
        _threads.logged(problem, lambda: self._coordinator.put(key, verdict))
        report = self._key("report", attempt)
        self._report_keys.add(self._coordinator, report)  # late reports of that attempt go with its other keys
        self._keys.add(self._coordinator, self._key("verdict", attempt), self._key("claim", attempt), report)

    def _await_verdict(self, attempt: Attempt, error: Exception | None) -> Committed:
        """On the other processes: the primary's verdict; where it does not come, storage decides."""
        self._give_time(attempt, self._lags.secs([0]))
        try:
            verdict = self._hear(attempt, self._first)
            if self._hosts is not None and "record" in verdict:
                self._hosts.place(verdict, self._key("placed", attempt), attempt, self._id(attempt))
                verdict = self._hear(attempt, "verdict")
        except errors.CoordinationError as silence:
            return self._without_verdict(attempt, error, silence)
        self._lags.heard([0], attempt)
        self._read_late_verdicts(final=True)
        if "error" in verdict:
            raise self._taken_back(attempt, errors.from_wire(verdict["error"]))
        return Committed.from_wire(attempt.epoch, verdict)

    def _taken_back(self, attempt: Attempt, failure: BaseException) -> BaseException:
        return failure if self._hosts is None else self._hosts.take_back(attempt, self._id(attempt), failure)

    def _hear(self, attempt: Attempt, kind: str) -> dict[str, Any]:
        """What the primary says of an attempt, within the time that it has; else a CoordinationError."""
        while True:
            try:
                return self._coordinator.get(f"{self._key(kind, attempt)}/0", max(attempt.deadline.left(), 0.001))
            except errors.CoordinationError as silence:
                self._read_late_verdicts(final=False)
                late = isinstance(silence, errors.CoordinationTimeoutError)
                if not (late and self._give_time(attempt, self._lags.secs([0]))):
                    raise

    def _without_verdict(self, attempt: Attempt, error: Exception | None, silence: Exception) -> Committed:
        if error is not None:
            raise error  # of this process: without its report nothing is committed
        if not self._claim.known:  # nothing has been written
            raise errors.SaveError(attempt.epoch, f"the primary did not claim the directory: {silence}")
        if self._hosts is None and self._is_there(attempt):  # the own disk does not tell of the others
            epoch, read = attempt.epoch, self._commits.read_brief
            cost = _threads.logged("its cost is not known", lambda: SaveCost.of(epoch, read(epoch)))
            return Committed(attempt.epoch, attempt.metrics, time.time_ns(), cost=cost)
        self._unheard.append(attempt)
        self._lags.missed(attempt, [0])
        reason = f"the primary's verdict did not arrive ({silence}), and it is not on storage at this moment"
        raise errors.UncertainError(attempt.epoch, reason) from silence

    def _read_late_verdicts(self, *, final: bool) -> None:
        """Reads verdicts that had not come in time; `final`: the verdict of a later attempt has come."""
        while self._unheard:
            attempt = self._unheard[0]
            verdict = self._coordinator.peek(f"{self._key('verdict', attempt)}/0")
            if verdict is None and not final:
                return
            self._unheard.popleft()
            if verdict is None and self._hosts is None:  # they come in order: it never does, and storage alone decides
                verdict = Committed(attempt.epoch, attempt.metrics, time.time_ns()).to_wire()
            if verdict is not None and "error" in verdict and self._hosts is not None:
                self._remove(attempt, self._taken_back(attempt, errors.from_wire(verdict["error"])))
            elif verdict is not None and "error" not in verdict and self._is_there(attempt):
                logging.warning("checkpoint %d, of which that was uncertain, is committed", attempt.epoch)
                self._history.commit(Committed.from_wire(attempt.epoch, verdict))

    def _is_there(self, attempt: Attempt) -> bool:
        """Whether storage says that an attempt is committed."""
        with contextlib.suppress(OSError):  # else storage does not say
            return self._commits.read_attempt(attempt.epoch) == self._id(attempt)
        return False

    def _id(self, attempt: Attempt) -> str:
        return f"{self._claim.incarnation}-{attempt.name}"

    def _staging(self, attempt: Attempt) -> Staging:
        return self._claim.stager.staging(attempt.epoch, self._id(attempt))

    def _key(self, kind: str, attempt: Attempt) -> str:
        return f"{self._prefix}/{kind}/{attempt.name}"
