"""One try at saving one epoch, in the background, from the snapshot to the verdict.

Guarantees:
- nothing here runs on the training thread but `Attempts.submit`, which talks to nobody;
- every wait is bounded, and an attempt always ends: committed, failed, or (on a node other than the primary that
  could not hear the verdict) uncertain;
- only the primary decides. A node's report is its last act on its staging;
- what a node has called failed is never committed with its help: of giving an attempt up and the step after which it
  may be committed only the first to come happens (`Attempt.binding`). After that step it is uncertain at worst;
- attempts of one manager are written one after the other and end in order.

An attempt is called `<epoch>-<try>` on every process: all make the same calls. Keys (all below the prefix that the
processes agreed on when they opened the directory, so that a relaunched job never meets an old one):
`report/<attempt>/<process>`; `verdict/<attempt>/0`; `claim/<attempt>/0`, until every process has reported once: the
primary's word on its claim to the directory, see `claiming`. Nobody waits for the primary before it writes, but for
that first word.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import _threads, _units
from epochckpt._threads import Deadline
from epochckpt.commit import memory
from epochckpt.commit.attempt import Attempt, Committed, write_nodes
from epochckpt.commit.claiming import Claim
from epochckpt.commit.lagging import Lags
from epochckpt.commit.opening import Opened
from epochckpt.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    FencedError,
    InvalidArgumentError,
    LateNodesError,
    SaveError,
    UncertainError,
    as_save_error,
    from_wire,
    kept,
    to_wire,
)
from epochckpt.options import StorageOptions

LONG_SECS = 1.0  # training that is held for longer is told why
_VERDICT_MARGIN_SECS = 60.0  # by how much the others wait longer than the primary does
_MAX_UNDECIDED = 3  # written here, waiting for other nodes; nodes that compute in step are at most one save apart
_PATIENCE_SECS = 1.0  # how long nodes may take to report, once all older saves are decided, before others suffer
_COMMITTING = "every node has written, committing"
_REPORTS = 2  # attempts whose reports are kept
_REMEMBERED = 192  # keys of the primary's words that are kept for a node that was away; reports are many, words few


class Attempts:
    """The attempts of one manager on one node.

    Args:
        opened: the directory, and the other processes.
        claim: when this manager becomes the writer of the directory.
        options: bounds and sizes.
        retire: on the primary, called with a fresh commit: which epochs to delete now, what is attached to epochs, a
            call that takes them out of sight, and returns one that removes their bytes.
        on_commit: called on every node for every commit; must not fail.
        log: called after that; may fail.
        on_end: called on every node for every attempt that ends, with why it failed or None; must not fail.
    """

    def __init__(
        self,
        opened: Opened,
        claim: Claim,
        options: StorageOptions,
        retire: Callable[[Committed], tuple[list[int], Mapping[int, Any], Callable[[], Callable[[], None]]]],
        on_commit: Callable[[Committed], None],
        log: Callable[[Attempt, Committed], None],
        on_end: Callable[[Attempt, SaveError | None], None],
    ):
        self._store, self._commits, self._coordinator = opened.store, opened.commits, opened.coordinator
        self._prefix, self.nodes, self._options = f"{opened.prefix}/save", opened.nodes, options
        self._claim, self._all_know = claim, opened.coordinator.processes == 1
        self._retire, self._on_commit, self._log, self._on_end = retire, on_commit, log, on_end
        self._pool = _threads.Pool(options.io_threads)
        self._write_lane, self._report_lane, self._commit_lane = _threads.Lane(), _threads.Lane(), _threads.Lane()
        self._lags = Lags(options.save_timeout_secs, self._has_answered)
        self._memory = options.host_memory_limit_bytes or memory.default_limit()
        self.last = ""  # the name of the last attempt that was submitted
        # Of these, one operation each, never two that belong together: see the guarantees of `worker`.
        self._pending: list[Attempt] = []
        self._tries: dict[int, int] = {}  # how many attempts at an epoch the write lane has taken up
        self._errors: list[SaveError] = []
        self._failed: dict[int, tuple[str, str]] = {}
        self._unheard: collections.deque[Attempt] = collections.deque(maxlen=_REMEMBERED)
        self._reported: collections.deque[str] = collections.deque()
        self._spoken: collections.deque[str] = collections.deque()
        self._resident: collections.deque[int] = collections.deque()  # epochs whose bytes the page cache may hold

    # -- on the training thread ----------------------------------------------------------------------------------

    def make_room(self, epoch: int, copied_bytes: int, runs_handlers: bool) -> None:
        """Waits until one save at most is unwritten, and says so when that takes long; see `_in_the_way`.

        Raises:
            InvalidArgumentError: this snapshot alone is more than the limit that was asked for.
        """
        limit = self._options.host_memory_limit_bytes
        if limit is not None and copied_bytes > limit:
            raise InvalidArgumentError(
                f"this save copies {_units.nbytes(copied_bytes)} to host memory, "
                f"more than host_memory_limit_bytes allows ({_units.nbytes(limit)}); raise the limit"
            )
        began, said = time.monotonic(), False
        while found := self._in_the_way(copied_bytes, runs_handlers):
            older, event, reason = found
            if not event.wait(max(began + LONG_SECS - time.monotonic(), 0.0)):
                said = True
                text = "save(%d) holds training: it waits for the save of epoch %d (%s), because %s"
                logging.warning(text, epoch, older.epoch, older.state, reason)
            self._wait(older, event)
        if said:
            logging.warning("save(%d) blocked training for %s", epoch, _units.secs(time.monotonic() - began))

    def _in_the_way(self, copied_bytes: int, runs_handlers: bool) -> tuple[Attempt, _threads.Future[Any], str] | None:
        """The older save that a new one waits for, what of it, and why.

        One save is written and one waits for that; where no other process decides, another is committed. Snapshots
        stay within the bound on host memory, but one that is larger by itself is let through alone. A save that runs
        handlers waits until they are done with the one before: they may keep things in themselves.
        """
        pending = self.pending()
        unwritten = [a for a in pending if not a.written.done()]
        held = sum(a.copied_bytes for a in unwritten)
        oldest = unwritten[0] if unwritten else None
        if oldest is not None and len(unwritten) > 1:
            return oldest, oldest.written, "one save is written at a time, and one more may wait"
        if oldest is not None and runs_handlers and oldest.runs_handlers:
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
        return max([self._tries.get(epoch, 0), *handed])  # in this order: whoever is not in the one is in the other

    @property
    def used(self) -> bool:
        """Whether anything was ever submitted."""
        return bool(self._pending or self._tries)

    def submit(self, attempt: Attempt) -> None:
        """Takes over a snapshot. Of two with one number (a signal handler can make them) only the first is saved."""
        if not self._coordinator.primary:  # the primary decides by its own clock, and may have been called later
            attempt.deadline = Deadline(self._options.save_timeout_secs + _VERDICT_MARGIN_SECS)
        self.last = attempt.name
        self._pending.append(attempt)  # this is the moment: what is interrupted from here on, `pending` makes good
        self.pending()

    def pending(self) -> list[Attempt]:
        """Attempts without a verdict, oldest first."""
        pending = list(self._pending)
        if not all(attempt.taken.claimed for attempt in pending) and not self._write_lane.wake():
            self._write_lane.submit(self._write_all)
        return pending

    def in_flight(self) -> list[Attempt]:
        """Those of them that this process has a part in: it could begin them."""
        return [attempt for attempt in self.pending() if attempt.error is None]

    def failure(self, epoch: int) -> tuple[str, str] | None:
        """How the last attempt at an epoch ended, if not well (`failed`, `uncertain`), and why."""
        return self._failed.get(epoch)

    def take_errors(self) -> list[SaveError]:
        """Failures since the last call."""
        errors = list(self._errors)
        for error in errors:
            with contextlib.suppress(ValueError):
                self._errors.remove(error)
        return errors

    def after_fork(self) -> None:
        """In a forked child: what is in flight is the parent's."""
        self._pending.clear()
        self._errors.clear()

    def drain(self, epoch: int | None = None) -> None:
        """Waits until no attempt (at one epoch, or at any) is without a verdict. Bounded: every attempt is."""
        for attempt in self.pending():
            if epoch in (None, attempt.epoch):
                self._wait(attempt, attempt.done)

    def drain_removals(self) -> None:
        """Waits until what was deleted is removed, too; bounded like a save."""
        self.drain()
        self._commit_lane.submit(lambda: None).wait(self._options.save_timeout_secs)

    def remove(self, remove: Callable[[], None]) -> None:
        """Removes what has been hidden, in the background, after what is being done now."""
        self._commit_lane.submit(lambda: _threads.logged("what was deleted could not be removed", remove))

    @property
    def longest_secs(self) -> float:
        """No attempt goes on for longer than this."""
        return self._options.save_timeout_secs + _VERDICT_MARGIN_SECS + self._lags.most()

    def _wait(self, attempt: Attempt, event: _threads.Future[Any]) -> None:
        """Waits for a step of an attempt, and gives the attempt up when even its last bound has passed.

        That is the case only when a system call of this node's own hangs. What it still writes goes into staging that
        nobody will commit: this node neither reports it nor, on the primary, commits it.
        """
        while not event.wait(max(attempt.deadline.left(), 0.0) + _VERDICT_MARGIN_SECS):
            if attempt.deadline.left() + _VERDICT_MARGIN_SECS <= 0:
                self._give_up(attempt)
                event.wait(_VERDICT_MARGIN_SECS)  # it may be ending just now
                return

    def _give_up(self, attempt: Attempt) -> None:
        epoch, secs, state = attempt.epoch, attempt.deadline.secs, attempt.state
        if attempt.binding.claim():  # from here on nothing binding is done any more
            self._end(attempt, LateNodesError(epoch, self.nodes.hosted_names, secs))
        else:
            reason = f"storage has not answered, long after its {secs:g} s were over ({state})"
            self._end(attempt, UncertainError(epoch, reason))

    def _bind(self, attempt: Attempt) -> None:
        """From here on this node may not give the attempt up any more.

        Raises:
            SaveError: it has done so.
        """
        if not attempt.binding.claim():
            raise SaveError(attempt.epoch, f"{self.nodes.hosted_names[0]} has given it up")

    # -- writing, on every node ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Writes what waits for it, in order; runs in the write lane alone."""
        while waiting := [attempt for attempt in list(self._pending) if not attempt.taken.claimed]:
            if waiting[0].taken.claim():  # else it was given up just now, while an older write hung
                self._write(waiting[0])

    def _write(self, attempt: Attempt) -> None:
        if attempt.number < self._tries.get(attempt.epoch, 0):  # a signal handler saved inside this very `save`
            attempt.drop()
            if attempt.ended.claim():
                self._leave(attempt)
            return
        self._tries[attempt.epoch] = attempt.number + 1
        self._failed.pop(attempt.epoch, None)
        error: Exception | None = None
        try:
            attempt.state = "beginning"
            self._begin(attempt)
            if attempt.error is not None:
                raise attempt.error
            attempt.state = "writing"
            report = self._write_files(attempt)
        except Exception as caught:  # every failure becomes this node's report
            error, report = kept(caught), {"error": to_wire(caught)}
        attempt.drop()
        if not self._coordinator.primary:
            try:
                self._bind(attempt)
                self._report_lane.submit(lambda: self._report(attempt, report))
            except SaveError as caught:
                error = kept(caught)
        attempt.reports[self._coordinator.process] = report
        alone = self._coordinator.processes == 1
        attempt.state = "written, waiting for " + ("its commit" if alone else "the other nodes")
        attempt.written.set(None)
        self._commit_lane.submit(lambda: self._conclude(attempt, error))

    def _report(self, attempt: Attempt, report: dict[str, Any]) -> None:
        """Where the primary's machine is silent this takes long; nothing waits for it but the verdict."""
        try:
            self._coordinator.put(f"{self._key('report', attempt)}/{self._coordinator.process}", report)
        except CoordinationError as error:
            logging.warning("epoch %d: the primary may not hear of this node: %s", attempt.epoch, error)

    def _begin(self, attempt: Attempt) -> None:
        """Has a place to write to: on the primary in a directory that it has claimed, on the others in that one."""
        key = f"{self._key('claim', attempt)}/0"
        if not self._coordinator.primary:
            if not self._claim.known:
                attempt.state = "waiting for the primary to claim the directory"
                try:
                    word = self._coordinator.get(key, max(attempt.deadline.left(), 0.001))
                except CoordinationTimeoutError:
                    raise LateNodesError(attempt.epoch, [self.nodes.names[0]], attempt.deadline.secs) from None
                if "error" in word:
                    raise from_wire(word["error"])
                self._claim.learn(word)
            return
        try:
            self._let_older_ones_end(attempt)
            word = self._claim.take(attempt.epoch)
        except Exception as error:
            if not self._all_know:
                self._coordinator.put(key, {"error": to_wire(error)})
            raise
        if not self._all_know:
            self._coordinator.put(key, word)
        self._commits.begin(attempt.epoch, self._id(attempt))

    def _let_older_ones_end(self, attempt: Attempt) -> None:
        """On the primary: waits while too many are undecided, as long as no node is silent: slow, or behind.

        Raises:
            SaveError: a node has been silent for a while: what waits for it must not pile up on storage.
        """
        while len(waiting := [a for a in self.pending() if a.written.done()]) > _MAX_UNDECIDED:
            oldest = waiting[0]
            since = time.monotonic() - oldest.collecting
            self._lags.look()
            lag = self._lags.most()
            if oldest.collecting and oldest.state != _COMMITTING and since >= _PATIENCE_SECS and not lag:
                epochs = ", ".join(str(a.epoch) for a in waiting)
                raise SaveError(attempt.epoch, f"epochs {epochs} are still waiting for their nodes; not more than that")
            for each in self.pending():
                if not each.written.done():  # held up by that, as long as that takes
                    self._give_time(each, lag)
            if oldest.deadline.passed():
                self._wait(oldest, oldest.done)
            oldest.done.wait(_PATIENCE_SECS / 4)

    def _write_files(self, attempt: Attempt) -> dict[str, Any]:
        while self._resident:
            epoch = self._resident.popleft()
            for name in self.nodes.hosted_names:
                self._commits.uncache(epoch, name)
        return write_nodes(self._commits, self.nodes, attempt, self._id(attempt), self._options, self._pool)

    # -- the verdict ---------------------------------------------------------------------------------------------

    def _conclude(self, attempt: Attempt, error: Exception | None) -> None:
        """Ends an attempt on this node, whatever happens."""
        failure: SaveError | None = None
        hide: Callable[[], Callable[[], None]] | None = None
        try:
            if self._coordinator.primary:
                committed, hide = self._decide(attempt, error)
            else:
                committed = self._hear(attempt, error)
            self._on_commit(committed)
            _threads.logged("the logger of the manager failed", lambda: self._log(attempt, committed))
            self._resident.append(attempt.epoch)
        except Exception as caught:
            failure = kept(as_save_error(attempt.epoch, caught))
            self._claim.note(failure)
        remove = None if hide is None else _threads.logged("older epochs could not be deleted", hide)
        self._end(attempt, failure)
        if remove is not None:
            _threads.logged("what was deleted could not be removed", remove)

    def _end(self, attempt: Attempt, failure: SaveError | None) -> None:
        """Takes an attempt off the list, once; what was given up stays so."""
        if not attempt.ended.claim():
            if failure is None:
                logging.warning("epoch %d, of which that was uncertain, is committed", attempt.epoch)
            return
        attempt.state = "committed" if failure is None else "failed"
        if failure is not None:
            state = "uncertain" if isinstance(failure, UncertainError) else "failed"
            self._failed[attempt.epoch] = (state, failure.reason)
            if attempt.error is None:  # else its caller has been told
                self._errors.append(failure)
        self._on_end(attempt, failure)
        if attempt.taken.claim():  # it was never written
            attempt.drop()
        self._leave(attempt)
        if failure is not None:
            logging.error("%s: %s", self._store.root, failure)

    def _leave(self, attempt: Attempt) -> None:
        """All that is to be known of an attempt is known."""
        self._pending.remove(attempt)
        attempt.written.set(None)
        attempt.done.set(None)

    def _decide(self, attempt: Attempt, error: Exception | None) -> tuple[Committed, Callable[[], Callable[[], None]]]:
        """Primary: waits for the reports, commits, and tells everybody."""
        try:
            if error is not None:
                raise error
            attempt.collecting = time.monotonic()
            self._collect(attempt)
            attempt.state = _COMMITTING
            committed = self._publish(attempt)
        except Exception as caught:
            self._tell(attempt, {"error": to_wire(as_save_error(attempt.epoch, caught))})
            if self._claim.known and not isinstance(caught, UncertainError):  # what may exist keeps its data
                me = self._id(attempt)
                _threads.logged("the remains of a save stay", lambda: self._commits.discard(attempt.epoch, me))
            raise
        try:
            deleted, attached, hide = self._retire(committed)
        except Exception:  # a policy of the user's: a failure there must not harm the commit
            logging.exception("epoch %d is committed, but deciding what to delete failed", attempt.epoch)
            deleted, attached, hide = [], None, lambda: lambda: None
        committed = dataclasses.replace(committed, deleted=tuple(deleted), attached=attached)
        self._tell(attempt, committed.to_wire())
        return committed, hide

    def _collect(self, attempt: Attempt) -> None:
        key, missing = self._key("report", attempt), set(range(self.nodes.processes)) - attempt.reports.keys()
        if missing:
            found = {int(process): report for process, report in self._coordinator.get_all(key).items()}
            attempt.reports.update(found)
            missing -= found.keys()
            self._lags.prompt(found)
            self._await_lagging(attempt, missing)
        while missing and not any("error" in report for report in attempt.reports.values()):
            found, missing = self._coordinator.gather(key, missing, attempt.deadline)
            attempt.reports.update(found)
            self._lags.heard(attempt, found)
            if not attempt.deadline.passed():
                break  # all there, or one with an error
            if not self._await_lagging(attempt, missing):
                self._lags.missed(attempt, missing)
                break
        for process, report in sorted(attempt.reports.items()):
            if "error" in report:
                error = from_wire(report["error"])
                kind = FencedError if isinstance(error, FencedError) else SaveError
                reason = f"node {self._named([process])}: {getattr(error, 'reason', error)}"
                raise kind(attempt.epoch, reason) from error
        if missing:
            late = [name for process in sorted(missing) for name in self.nodes.names_of(process)]
            raise LateNodesError(attempt.epoch, late, attempt.deadline.secs)
        self._all_know = True
        different = [process for process, r in sorted(attempt.reports.items()) if r["plan"] != attempt.plan]
        if different:
            raise SaveError(
                attempt.epoch,
                f"{self._named(different)} planned something else than {self.nodes.names[0]}: the trees, shapes or "
                "shardings that were passed to save() differ between the processes",
            )

    def _await_lagging(self, attempt: Attempt, missing: Collection[int]) -> bool:
        """Gives an attempt more time if those that have not answered are known to be behind; returns whether it has."""
        self._lags.look()
        return self._give_time(attempt, self._lags.secs(missing))

    def _give_time(self, attempt: Attempt, lag: float) -> bool:
        bound = self._options.save_timeout_secs + (0.0 if self._coordinator.primary else _VERDICT_MARGIN_SECS)
        left = bound + lag - attempt.elapsed_secs
        if not lag or left <= max(attempt.deadline.left() + 0.001, 0.0):  # it has been given that already
            return False
        attempt.deadline = Deadline(left)
        attempt.deadline.secs = round(bound + lag, 1)  # of the whole save, for people
        return True

    def _has_answered(self, attempt: Attempt, process: int) -> bool:
        answer = self._key("report" if self._coordinator.primary else "verdict", attempt)
        try:
            self._coordinator.get(f"{answer}/{process}", 0.001)
        except CoordinationError:
            return False
        return True

    def _publish(self, attempt: Attempt) -> Committed:
        nodes = attempt.entries(self.nodes)
        record = attempt.record(self._id(attempt), nodes, objects=not self._store.renames)
        if self._options.orbax_view:
            record = self._commits.write_view(record, self._pool.run)

        def still_in_time() -> None:
            if attempt.deadline.passed():
                raise SaveError(attempt.epoch, f"its {attempt.deadline.secs:g} s were over just before the rename")
            self._bind(attempt)

        data = record.to_bytes()
        remove = self._commits.publish(attempt.epoch, record.attempt, data, still_in_time, attempt.replaces)
        if remove is not None:
            self.remove(remove)
        logging.info("epoch %d committed to %s: %s", attempt.epoch, self._store.root, attempt.summary(record))
        return Committed(attempt.epoch, attempt.metrics, record.committed_ns, (), attempt=record.attempt)

    def _tell(self, attempt: Attempt, verdict: dict[str, Any]) -> None:
        """Publishes the verdict, and forgets the keys of attempts that have ended before."""
        try:
            self._coordinator.put(f"{self._key('verdict', attempt)}/0", verdict)
        except CoordinationError as error:  # they will look at storage
            logging.warning("epoch %d: the verdict could not be published: %s", attempt.epoch, error)
        report = self._key("report", attempt)
        self._reported.append(report)
        self._spoken += [self._key("verdict", attempt), self._key("claim", attempt), report]  # some report late
        for keys, count in ((self._reported, _REPORTS), (self._spoken, _REMEMBERED)):
            while len(keys) > count:
                self._coordinator.forget(keys.popleft())

    def _hear(self, attempt: Attempt, error: Exception | None) -> Committed:
        """On the other nodes: the primary's verdict, or what storage says when it does not come."""
        self._await_lagging(attempt, [0])
        while True:
            try:
                left = max(attempt.deadline.left(), 0.001)
                verdict = self._coordinator.get(f"{self._key('verdict', attempt)}/0", left)
                break
            except CoordinationError as caught:
                silence = caught
            self._hear_late(last=False)
            if not isinstance(silence, CoordinationTimeoutError) or not self._await_lagging(attempt, [0]):
                return self._without_verdict(attempt, error, silence)
        self._lags.heard(attempt, [0])
        self._hear_late(last=True)
        if "error" in verdict:
            raise from_wire(verdict["error"])
        return Committed.from_wire(attempt.epoch, verdict)

    def _without_verdict(self, attempt: Attempt, error: Exception | None, silence: CoordinationError) -> Committed:
        if error is not None:
            raise error  # of this node, without which nothing is committed
        if not self._claim.known:  # nothing has been written
            raise SaveError(attempt.epoch, f"the primary did not claim the directory: {silence}")
        if self._is_there(attempt):
            return Committed(attempt.epoch, attempt.metrics, time.time_ns(), ())
        self._unheard.append(attempt)
        self._lags.missed(attempt, [0])
        reason = f"the primary's verdict did not arrive ({silence}), and it is not on storage at this moment"
        raise UncertainError(attempt.epoch, reason) from silence

    def _hear_late(self, *, last: bool) -> None:
        """Verdicts that had not come in time. The primary speaks in order: if a later one is there, it was the last."""
        while self._unheard:
            attempt = self._unheard[0]
            try:
                verdict = self._coordinator.get(f"{self._key('verdict', attempt)}/0", 0.001)
            except CoordinationError:
                if not last:
                    return
                verdict = Committed(attempt.epoch, attempt.metrics, time.time_ns(), ()).to_wire()
            self._unheard.popleft()
            if "error" not in verdict and self._is_there(attempt):
                logging.warning("epoch %d, of which that was uncertain, is committed", attempt.epoch)
                self._on_commit(Committed.from_wire(attempt.epoch, verdict))

    def _is_there(self, attempt: Attempt) -> bool:
        """Whether storage says that an attempt is committed."""
        try:
            return self._commits.read_attempt(attempt.epoch) == self._id(attempt)
        except OSError:  # it says nothing
            return False

    def _named(self, processes: Sequence[int]) -> str:
        """The nodes of some processes."""
        return ", ".join(name for process in processes for name in self.nodes.names_of(process))

    def _id(self, attempt: Attempt) -> str:
        return f"{self._commits.incarnation}-{attempt.name}"

    def _key(self, what: str, attempt: Attempt) -> str:
        return f"{self._prefix}/{what}/{attempt.name}"
