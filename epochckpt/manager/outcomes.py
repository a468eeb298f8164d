"""What a manager does about its saves: history, results, retention, and messages to metadata handler and logger."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _threads
from epochckpt.commit import Attempt, Commits, History, retention
from epochckpt.commit.attempt import Committed
from epochckpt.errors import SaveError
from epochckpt.manager import metadata_handlers
from epochckpt.manager.status import SaveResult
from epochckpt.orbax.step_log import StepLog

_KEPT = 1000  # outcomes that nobody has taken


class Outcomes:
    """The outcomes of saves that ended since somebody last took them; the newest, if they are many."""

    def __init__(self) -> None:
        self._ended: collections.deque[SaveResult] = collections.deque(maxlen=_KEPT)

    def add(self, attempt: Attempt, failure: SaveError | None) -> None:
        """A save has ended; one that this process could not begin is none, its caller has been told."""
        if attempt.error is not None:
            return
        detail = "" if failure is None else failure.reason
        times = attempt.blocked_secs, attempt.elapsed_secs, attempt.node_secs
        self._ended.append(SaveResult(attempt.epoch, failure is None, detail, *times))

    def take(self) -> list[SaveResult]:
        """The outcomes since the last call, in order."""
        taken: list[SaveResult] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._ended.popleft())
        return taken


class Listener:
    """What a manager does about its saves, see `commit.saver.SaveListener`, and about its claim to the directory.

    Attributes:
        results: how saves ended.
    """

    def __init__(
        self,
        commits: Commits,
        options: ocp.CheckpointManagerOptions,
        history: History,
        notifier: HandlerNotifier,
        step_log: StepLog,
    ):
        self._commits, self._options, self._history = commits, options, history
        self._notifier, self._step_log = notifier, step_log
        self.results = Outcomes()

    def claimed(self, epochs: Sequence[int]) -> None:
        """On every process, once: which epochs are committed as the directory is claimed."""
        new, gone = self._history.adopt(e for e in epochs if e not in self._history.damaged)
        if new or gone:
            logging.warning(
                "%s: since this manager opened it, another run has %s: all_steps() follows that",
                self._commits.store.root,
                " and ".join(
                    f"{verb} {'epochs' if len(which) > 1 else 'epoch'} {', '.join(map(str, which[:10]))}"
                    for verb, which in (("committed", new), ("deleted", gone))
                    if which
                ),
            )

    def retire(self, fresh: Committed) -> Committed:
        """See `SaveListener`."""
        return retention.retire(self._commits, self._history, self._options, fresh)

    def hide(self, epochs: Sequence[int]) -> Callable[[], None]:
        """See `SaveListener`."""
        return retention.hide(self._commits, epochs, self._options.todelete_subdir)

    def committed(self, commit: Committed) -> None:
        """See `SaveListener`."""
        self._history.commit(commit)

    def announce(self, attempt: Attempt, commit: Committed) -> None:
        """See `SaveListener`."""
        self._notifier.committed(commit.epoch, attempt.node_secs)
        self._step_log.committed(attempt.log_entry, commit.committed_ns, attempt.elapsed_secs)
        callback = getattr(self._options.async_options, "post_finalization_callback", None)
        if callback is not None:
            callback()

    def ended(self, attempt: Attempt, failure: SaveError | None) -> None:
        """See `SaveListener`."""
        if failure is not None and attempt.error is None:
            self._history.fail(attempt)
        self.results.add(attempt, failure)


class HandlerNotifier:
    """Tells a metadata handler, on the primary, of nodes and commits; what it raises is logged and harms nothing.

    Its methods are called in order, those about commits in a thread of their own: a slow one holds up no save. It hears
    of the nodes before anything else, and not before there is something to tell: a look at a directory is no run.

    Args:
        handler: it, or None.
        active: whether this process is the one that tells it.
    """

    def __init__(self, handler: Any, active: bool):
        self._handler = handler if active else None
        self._lane = _threads.Lane()
        self._stuck = False
        self._untold: tuple[str, Sequence[str]] | None = None

    def nodes(self, directory: str, names: Sequence[str]) -> None:
        """Which nodes save to which directory; told before the next thing that it is told."""
        self._untold = directory, names

    def introduce(self) -> None:
        """Tells it of the nodes, if they are not those that it was told of.

        Raises:
            InvalidArgumentError: the handler says that it cannot serve this directory.
        """
        if self._untold is not None:
            self._lane.submit(self._introduce).result()  # in line with all else that it is told

    def _introduce(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None and self._handler is not None:
            metadata_handlers.introduce(self._handler, *untold)

    def committed(self, epoch: int, secs: Mapping[str, float]) -> None:
        """An epoch was committed; how long each node wrote."""
        self._later("write", epoch=epoch)
        self._later("report", "checkpoint_save", dict(secs))

    def drain(self, timeout_secs: float) -> None:
        """Waits until it has been told everything; gives a handler up that takes longer, and waits for it no more."""
        if self._handler is not None and not self._stuck:
            self._stuck = not self._lane.submit(lambda: None).wait(timeout_secs)
            if self._stuck:
                logging.warning("metadata handler: it has not returned for %g s; not waited for any more", timeout_secs)

    def _later(self, method: str, *args: Any, **named: Any) -> None:
        self._lane.submit(functools.partial(self._tell, method, *args, **named))

    def _tell(self, method: str, *args: Any, **named: Any) -> None:
        if self._handler is not None:
            _threads.logged("metadata handler: set_params failed", self._introduce)
            call: Callable[..., Any] = getattr(self._handler, method)
            said = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])
            _threads.logged(f"metadata handler: {method}({said}) failed", functools.partial(call, *args, **named))
