"""The primary's side of a save: it claims, collects the reports of all processes, commits, and says so."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

from absl import logging

from epochckpt import _monitoring, _patience, _threads, errors
from epochckpt.agreement.collective import Timeouts, broadcast
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.format import EpochRecord, Nodes
from epochckpt.orbax import events
from epochckpt.saving import retention
from epochckpt.saving.commit_record import commit_record
from epochckpt.saving.process_side import ProcessSide, SaveContext
from epochckpt.saving.reports import Committed, ProcessReport
from epochckpt.saving.save import Save

MAX_UNDECIDED = 3  # written here, waiting for other nodes; nodes that compute in step are at most one save apart
_KEPT_REPORTS = 2  # saves whose reports the coordination service keeps
_KEPT_KEYS = 192  # its other keys, which are small, are kept longer, for a process that was away


@dataclasses.dataclass(frozen=True)
class _Collecting:
    """The primary waits for the reports of a save."""

    save: str  # its name
    since: float  # monotonic


class Primary(ProcessSide):
    """The side of the process that decides.

    For each save, in order:

    1. `begin` claims the directory, unless this manager has, and tells the others the claim until it has heard from
       all of them once; then it begins the save there;
    2. `report` keeps the primary's own report;
    3. `conclude` collects the reports of all processes, writes the Orbax view, commits, takes older epochs out of
       sight, and publishes the verdict. If the save fails it takes back what is in place and publishes that.
    """

    _awaited_key = "report"

    def __init__(self, context: SaveContext, nodes: Nodes):
        super().__init__(context, nodes)
        self._pool = context.pool
        self._bound_secs = self._options.save_timeout_secs
        self._claim_is_known = self._coordinator.processes == 1
        self._report_keys = RecentKeys(_KEPT_REPORTS)
        self._keys = RecentKeys(_KEPT_KEYS)
        self._collecting: _Collecting | None = None  # set by the commit lane, read by the write lane

    # -- 1 and 2 -------------------------------------------------------------------------------------------------

    def begin(self, save: Save) -> None:
        left = save.secs_left
        take = functools.partial(self._take_claim, save)
        patience = Timeouts(collect_secs=left, hear_secs=left)
        key = self._key("claim", save)
        claim = take() if self._claim_is_known else broadcast(self._coordinator, key, take, patience)
        self._claim.learn(claim, left)
        self._directory.writer.stage(save.epoch, self.save_id(save))

    def _take_claim(self, save: Save) -> dict[str, Any]:
        self._let_older_saves_end(save)
        return self._claim.take(save.epoch)

    def _let_older_saves_end(self, save: Save) -> None:
        """Waits while too many saves are undecided because nodes are slow or behind."""
        while len(waiting := [each for each in self._in_flight.all() if each.written.done()]) > MAX_UNDECIDED:
            oldest = waiting[0]
            collecting = self._collecting
            since = collecting.since if collecting is not None and collecting.save == oldest.name else None
            self.lags.look()
            lag = self.lags.most()
            if since is not None and time.monotonic() - since >= _patience.now().report_secs and not lag:
                # A node is silent: saves that wait for it must not pile up on storage.
                epochs = ", ".join(str(each.epoch) for each in waiting)
                reason = f"checkpoints {epochs} are still waiting for their nodes; not more than that"
                raise errors.SaveError(save.epoch, reason)
            for each in self._in_flight.all():
                if not each.written.done():  # it waits for this one, which waits for the node that is behind
                    self.give_time(each, lag)
            if oldest.deadline.passed():
                self._in_flight.wait(oldest, oldest.done)
            oldest.done.wait(_patience.now().report_secs / 4)

    def report(self, save: Save, report: ProcessReport) -> None:
        save.reports.add(self._coordinator.process, report)

    # -- 3 -------------------------------------------------------------------------------------------------------

    def conclude(self, save: Save, error: Exception | None) -> Committed:
        try:
            if error is not None:
                raise error
            self._collect(save)
            commit = self._commit(save)
        except BaseException as caught:
            failure = self.take_back(save, caught)  # before any other process can hear that it has failed
            self._publish_verdict(save, {"error": errors.to_wire(errors.as_save_error(save.epoch, failure))})
            self.remove_staged(save, failure)
            if failure is not caught:
                raise failure from caught
            raise
        commit = self._retire(save, commit)
        self._publish_verdict(save, commit.to_wire(self._directory.unlisted_elsewhere(commit.hides)))
        return commit

    def _retire(self, save: Save, commit: Committed) -> Committed:
        """Takes the epochs out of sight that no policy keeps. Whatever happens here, the save stays committed."""
        try:
            commit = retention.retire(self._epoch_directory, self._history, self._policies, commit)
        except Exception:  # a policy of the user's
            logging.exception("checkpoint %d is committed, but deciding what to delete failed", save.epoch)
        return self._delete_old(save, commit, errors.RetentionError)

    def follow_commit(self, save: Save, commit: Committed) -> None:
        pass  # it was done before the verdict

    def _collect(self, save: Save) -> None:
        """Waits for the report of every process; raises for processes that failed, differ, or are late."""
        self._collecting = _Collecting(save=save.name, since=time.monotonic())
        try:
            missing = self._gather(save)
        finally:
            self._collecting = None
        # The first error of a process is the save's; then come missing reports, and plans that differ.
        for process, error in save.reports.errors:
            raise self._failure_of(process, error, save.epoch) from error
        if missing:
            late = [self.nodes.names[process] for process in sorted(missing)]
            raise errors.LateNodesError(save.epoch, late, save.deadline.secs)
        self._claim_is_known = True
        different = save.reports.with_another_plan(save.plan)
        if different:
            reason = (
                f"{self._coordinator.named(different)} planned something else than {self.nodes.names[0]}: the trees, "
                "shapes or shardings that were passed to save(), or the sizes in StorageOptions, are not the same"
            )
            raise errors.SaveError(save.epoch, reason)

    def _gather(self, save: Save) -> set[int]:
        """Gathers reports until all are there, one is an error, or the time is over; returns the late processes."""
        key = self._key("report", save)
        missing = set(range(self.nodes.processes)) - save.reports.processes
        # Processes that have reported before the primary asks are not late, whatever they were before.
        if missing:
            save.reports.receive({int(process): wire for process, wire in self._coordinator.get_all(key).items()})
            self.lags.heard(missing & save.reports.processes)
            missing -= save.reports.processes
            self.give_time(save, self.lags.secs(missing))
        while missing and not save.reports.errors:
            found, missing = self._coordinator.gather(key, missing, save.deadline)
            save.reports.receive(found)
            self.lags.heard(found, save)
            if not save.deadline.passed():
                break  # all there, or one with an error
            if not self.give_time(save, self.lags.secs(missing)):
                self.lags.missed(save, missing)
                break
        return missing

    def _failure_of(self, process: int, error: Exception, epoch: int) -> errors.SaveError:
        """The save's failure, which one process's error has caused."""
        reason = f"node {self.nodes.names[process]}: {getattr(error, 'reason', error)}"
        for kind in (errors.FencedError, errors.StorageBehindError):
            if isinstance(error, kind):
                return kind(epoch, reason)
        return errors.SaveError(epoch, reason)

    @_monitoring.timed(events.FINALIZED)
    def _commit(self, save: Save) -> Committed:
        record = self._record(save)
        data = record.to_bytes()
        check = functools.partial(self._bind, save)
        finish_later = self._directory.commit(save, self.staging(save), data, check, self._key)
        if finish_later is not None:
            what = f"checkpoint {save.epoch} is committed, and what follows a commit was not done"
            self._commit_lane.submit(lambda: _threads.logged(what, finish_later))
        self._history.run.committed()
        logging.info(
            "checkpoint %d committed to %s: %s", save.epoch, self._epoch_directory.store.root, save.summary(record)
        )
        return Committed(epoch=save.epoch, summary=EpochSummary.of(record))

    def _record(self, save: Save) -> EpochRecord:
        """The commit record, with the runs of the directory; writes the Orbax view that belongs to it."""
        record = commit_record(save, self.save_id(save), objects=self._epoch_directory.save_ids_in_paths)
        runs = self._history.run.committing(
            save.epoch,
            self._directory.incarnation,
            save.spent,
            (record.started_ns, record.committed_ns),
            self._epoch_directory.taken_over,
        )
        record = dataclasses.replace(record, runs=runs)
        if self._options.orbax_view:
            record = _monitoring.timed(events.FINALIZED_ITEMS)(self._directory.writer.write_view)(
                record, self._pool.run
            )
        return record

    def _bind(self, save: Save) -> None:
        """Just before the commit: from here on this process may not give the save up any more."""
        if save.deadline.passed():
            reason = f"its {save.deadline.secs:g} s were over just before the rename"
            raise errors.SaveError(save.epoch, reason)
        save.check_not_cancelled()
        self._enter_commit(save)

    def _publish_verdict(self, save: Save, verdict: dict[str, Any]) -> None:
        """Publishes the verdict, and forgets the keys of saves that ended long ago."""
        problem = f"checkpoint {save.epoch}: the verdict could not be published"  # storage decides then
        said = [self._key(kind, save) for kind in self._directory.verdict_keys(save)]
        for key in said:
            put = functools.partial(self._coordinator.put, f"{key}/0", verdict)
            _threads.logged(problem, put)
        report = self._key("report", save)
        self._report_keys.add(self._coordinator, report)  # late reports of that save go with its other keys
        self._keys.add(self._coordinator, *said, self._key("claim", save), report)
