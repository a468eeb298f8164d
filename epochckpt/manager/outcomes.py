"""The effects of a manager's saves: results, and messages to metadata handler and logger."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _monitoring, _threads
from epochckpt.directory import EpochDirectory
from epochckpt.errors import SaveError, StorageBehindError
from epochckpt.manager.notifier import HandlerNotifier
from epochckpt.manager.status import SaveResult
from epochckpt.orbax.step_log import StepLog
from epochckpt.saving import History, Save
from epochckpt.saving.reports import Committed
from epochckpt.tiers import JobMirror

_KEPT = 1000  # results that are kept until they are popped; the newest


@dataclasses.dataclass(eq=False)
class Listener:
    """The `saving.in_flight.SaveListener` of a manager, which also hears of its claim to the directory."""

    epoch_directory: EpochDirectory
    options: ocp.CheckpointManagerOptions
    history: History
    notifier: HandlerNotifier
    log: StepLog
    mirror: JobMirror
    _at_end: list[Callable[[Save, SaveError | None], None]] = dataclasses.field(default_factory=list)
    _results: collections.deque[SaveResult] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_KEPT))

    def call_at_end(self, callback: Callable[[Save, SaveError | None], None]) -> None:
        """Calls a function with every save that ends, and with its failure, if it has failed."""
        self._at_end.append(callback)

    def pop_results(self) -> list[SaveResult]:
        """The results of saves since the last call, in order."""
        popped: list[SaveResult] = []
        while self._results:
            with contextlib.suppress(IndexError):  # a signal handler has popped them
                popped.append(self._results.popleft())
        return popped

    def claimed(self, epochs: Sequence[int]) -> None:
        """On every process, when the directory is claimed: these epochs are committed."""
        new, gone = self.history.adopt(e for e in epochs if e not in self.history.damaged)
        changes = (("committed checkpoint", new), ("deleted checkpoint", gone))
        told = " and ".join(f"{verb} {', '.join(map(str, found[:10]))}" for verb, found in changes if found)
        if told:
            text = "%s: since this manager opened it, another run has %s: all_steps() follows that"
            logging.warning(text, self.epoch_directory.store.root, told)

    def announce(self, save: Save, commit: Committed) -> None:
        # Whatever is wrong with the mirror, the metadata handler hears of the commit.
        what = f"{self.epoch_directory.store.root}: its mirror may not hear of checkpoint {commit.epoch}"
        _threads.logged(what, lambda: self.mirror.committed(commit.epoch))
        self.notifier.committed(commit.epoch, save.reports.node_secs)
        nbytes = sum(file.size for report in save.reports.nodes for file in report.entry.files)
        self.log.committed(
            entry=save.request.log_entry,
            committed_ns=commit.summary.committed_ns,
            secs=save.elapsed_secs,
            writing_secs=save.writing_secs,
            nbytes=nbytes,
            nodes=save.reports.node_secs,
        )
        callback = getattr(self.options.async_options, "post_finalization_callback", None)
        if callback is not None:
            callback()

    def ended(self, save: Save, failure: SaveError | None) -> None:
        for callback in self._at_end:
            callback(save, failure)
        if failure is not None:
            _monitoring.event("/epochckpt/write/failure", kind=type(failure).__name__)
        if save.request.was_raised:
            return
        self._results.append(
            SaveResult(
                epoch=save.epoch,
                committed=failure is None,
                detail="" if failure is None else failure.reason,
                blocked_secs=save.request.blocked_secs,
                secs=save.elapsed_secs,
                nodes=save.reports.node_secs,
                behind=isinstance(failure, StorageBehindError),
            )
        )
