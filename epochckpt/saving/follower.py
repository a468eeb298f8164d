"""The side of a save that every process but the primary has: it reports what it has written, and awaits the verdict."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from epochckpt import _patience, _threads, errors
from epochckpt.agreement.collective import Timeouts, broadcast
from epochckpt.format import Nodes
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.saving.process_side import ProcessSide, SaveContext
from epochckpt.saving.reports import Committed, ProcessReport
from epochckpt.saving.save import Save

_KEPT_UNHEARD = 192  # uncertain saves whose verdict may come late


class Follower(ProcessSide):
    """The side of a process that does not decide.

    For each save, in order:

    1. `begin` waits for the primary's claim of the directory, before the first save only;
    2. `report` tells the primary what this process has written. From then on the save may be committed, and this
       process cannot give it up;
    3. `conclude` waits for the verdict. Where it does not come, storage decides: the save is committed if its epoch is
       there, and uncertain otherwise. A verdict that comes late settles an uncertain save. So does the verdict
       of a later save, because verdicts come in order.
    """

    def __init__(self, context: SaveContext, nodes: Nodes):
        super().__init__(context, nodes)
        self._bound_secs = self._options.save_timeout_secs + _patience.now().verdict_margin_secs
        self._awaited_key = self._directory.first_word
        self._report_lane = _threads.Lane()
        self._unheard: collections.deque[Save] = collections.deque(maxlen=_KEPT_UNHEARD)

    # -- 1 and 2 -------------------------------------------------------------------------------------------------

    def begin(self, save: Save) -> None:
        if self._claim.known:
            return
        left = save.secs_left
        patience = Timeouts(collect_secs=left, hear_secs=left)
        try:
            claim: dict[str, Any] = broadcast(self._coordinator, self._key("claim", save), dict[str, Any], patience)
            self._claim.learn(claim, left)
        except errors.CoordinationTimeoutError:
            raise errors.LateNodesError(save.epoch, [self.nodes.names[0]], save.deadline.secs) from None

    def report(self, save: Save, report: ProcessReport) -> None:
        save.reports.add(self._coordinator.process, report)
        self._enter_commit(save)
        # A lane of its own: where the primary's machine is silent this takes long.
        key = f"{self._key('report', save)}/{self._coordinator.process}"
        problem = f"checkpoint {save.epoch}: the primary may not hear of this node"
        self._report_lane.submit(lambda: _threads.logged(problem, lambda: self._coordinator.put(key, report.to_wire())))

    # -- 3 -------------------------------------------------------------------------------------------------------

    def conclude(self, save: Save, error: Exception | None) -> Committed:
        try:
            return self._await_verdict(save, error)
        except BaseException as caught:
            self.remove_staged(save, errors.as_save_error(save.epoch, caught))
            raise

    def follow_commit(self, save: Save, commit: Committed) -> None:
        self._delete_old(save, commit, errors.RemovalError)

    def _await_verdict(self, save: Save, error: Exception | None) -> Committed:
        self.give_time(save, self.lags.secs([0]))
        try:
            hear = functools.partial(self._hear, save)
            verdict = self._directory.verdict(save, self.save_id(save), hear, self._key)
        except errors.CoordinationError as silence:
            return self._without_verdict(save, error, silence)
        self.lags.heard([0], save)
        self._read_late_verdicts(final=True)
        if "error" in verdict:
            raise self.take_back(save, errors.from_wire(verdict["error"]))
        return Committed.from_wire(save.epoch, verdict)

    def _hear(self, save: Save, kind: str) -> dict[str, Any]:
        """What the primary says of a save, within the time that it has; else a CoordinationError."""
        while True:
            try:
                return self._coordinator.get(f"{self._key(kind, save)}/0", save.secs_left)
            except errors.CoordinationError as silence:
                self._read_late_verdicts(final=False)
                late = isinstance(silence, errors.CoordinationTimeoutError)
                if not (late and self.give_time(save, self.lags.secs([0]))):
                    raise

    def _without_verdict(self, save: Save, error: Exception | None, silence: Exception) -> Committed:
        """What storage says of a save. UncertainError: it does not have the epoch at this moment."""
        if error is not None:
            raise error  # of this process: without its report nothing is committed
        if not self._claim.known:  # nothing has been written
            raise errors.SaveError(save.epoch, f"the primary did not claim the directory: {silence}")
        if self._directory.tells_commits and self._is_there(save):
            read = self._epoch_directory.read_summary
            summary = _threads.logged("what its save cost is not known", lambda: read(save.epoch))
            return Committed(epoch=save.epoch, summary=summary or save.summary_without_record())
        self._unheard.append(save)
        self.lags.missed(save, [0])
        reason = f"the primary's verdict did not arrive ({silence}), and it is not on storage at this moment"
        raise errors.UncertainError(save.epoch, reason) from silence

    def _read_late_verdicts(self, *, final: bool) -> None:
        """Reads verdicts that had not come in time; `final`: the verdict of a later save has come."""
        while self._unheard:
            save = self._unheard[0]
            verdict = self._directory.late_verdict(functools.partial(self._peek, save))
            if verdict is None and not final:
                return
            self._unheard.popleft()
            self._settle(save, verdict)

    def _peek(self, save: Save, kind: str) -> dict[str, Any] | None:
        """What the primary has said of a save by now."""
        return self._coordinator.peek(f"{self._key(kind, save)}/0")

    def _settle(self, save: Save, verdict: Mapping[str, Any] | None) -> None:
        """Ends an uncertain save by its verdict; None: it never comes, and storage alone decides."""
        if verdict is not None and "error" in verdict:
            failure = errors.as_save_error(save.epoch, errors.from_wire(verdict["error"]))
            self.remove_staged(save, self.take_back(save, failure))
            self._in_flight.finish(save, failure)
        elif (verdict is not None or self._directory.tells_commits) and self._is_there(save):
            if verdict is None:
                commit = Committed(epoch=save.epoch, summary=save.summary_without_record())
            else:
                commit = Committed.from_wire(save.epoch, verdict)
                save.note_cost(SaveCost.of(save.epoch, commit.summary))
            self._history.commit(commit)
            self._in_flight.finish(save, commit)

    def _is_there(self, save: Save) -> bool:
        """Whether storage says that a save is committed."""
        with contextlib.suppress(OSError):  # else storage does not say
            return self._epoch_directory.read_save_id(save.epoch) == self.save_id(save)
        return False
