"""The saves of one process that have no verdict yet: waits for them, ends them, and remembers how they ended."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Protocol

from absl import logging

from epochckpt import _patience, _threads, errors
from epochckpt._threads import Deadline
from epochckpt.format import Nodes
from epochckpt.saving.history import History
from epochckpt.saving.reports import Committed
from epochckpt.saving.save import Phase, Save


class SaveListener(Protocol):
    """What a manager does when its saves end. The commit lane calls it on every process, in the order of the saves."""

    def announce(self, save: Save, commit: Committed) -> None:
        """A save is committed, and in the history. May fail."""

    def ended(self, save: Save, failure: errors.SaveError | None) -> None:
        """A save has ended, with the reason if it failed. Must not fail."""


class InFlight:
    """The saves of one manager on one process that have no verdict yet.

    Threads and signal handlers share the lists without a lock: each access is one operation of a list or dict, and no
    invariant spans two of them; see the guarantees of `_threads`.
    """

    def __init__(self, *, root: str, nodes: Nodes, history: History, listener: SaveListener):
        self._root = root
        self._nodes = nodes
        self._history = history
        self._listener = listener
        self._saves: list[Save] = []  # oldest first
        self._failed: dict[int, tuple[str, str]] = {}
        self._failures: list[errors.SaveError | errors.RemovalError] = []  # that nobody has been told of

    def name_nodes(self, nodes: Nodes) -> None:
        """Gives the nodes of the job other names."""
        self._nodes = nodes

    def all(self) -> list[Save]:
        """Saves without a verdict, oldest first."""
        return list(self._saves)

    def add(self, save: Save) -> None:
        """Enters a save. From here on it has to end."""
        self._saves.append(save)

    def failure(self, epoch: int) -> tuple[str, str] | None:
        """How the last save of an epoch ended, if not well (`failed`, `uncertain`), and why."""
        return self._failed.get(epoch)

    def forget_failure(self, epoch: int) -> None:
        """An epoch is being saved once more."""
        self._failed.pop(epoch, None)

    def note_failure(self, error: errors.SaveError | errors.RemovalError) -> None:
        """Keeps a failure until the caller is told of it."""
        self._failures.append(error)

    def untold(self) -> list[errors.SaveError | errors.RemovalError]:
        """The failures that nobody has been told of."""
        return list(self._failures)

    def pop_errors(self) -> list[errors.SaveError | errors.RemovalError]:
        """Failures since the last call."""
        popped = self.untold()
        for error in popped:
            self.forget_error(error)
        return popped

    def forget_error(self, error: errors.SaveError | errors.RemovalError) -> None:
        """The caller has been told of a failure."""
        with contextlib.suppress(ValueError):
            self._failures.remove(error)

    def after_fork(self) -> None:
        """In a forked child: the saves in flight are the parent's."""
        self._saves.clear()
        self._failures.clear()

    def wait(self, save: Save, event: _threads.Future[Any], bound: Deadline | None = None) -> bool:
        """Waits for a step of a save, and gives the save up when even its last bound has passed.

        Returns whether the step is done; False if the `bound` of the caller has passed before.
        """
        # Only a system call of this process that hangs gets that far. Its data is never committed: this process neither
        # reports it nor, on the primary, commits it.
        left = bound.left if bound is not None else lambda: math.inf
        while not event.wait(min(max(save.deadline.left(), 0.0) + _patience.now().verdict_margin_secs, left())):
            if save.deadline.left() + _patience.now().verdict_margin_secs > 0:  # it has been given more time
                if left() <= 0:
                    return False
                continue
            self._give_up(save)
            event.wait(min(_patience.now().verdict_margin_secs, left()))  # it may be ending just now
            break
        return event.done()

    def _give_up(self, save: Save) -> None:
        secs = save.deadline.secs
        late = errors.LateNodesError(save.epoch, self._nodes.hosted_names, secs)
        if save.advance(Phase.FAILED, before=Phase.COMMITTING, failure=late):
            self._leave(save)
        else:
            reason = f"storage has not answered, long after its {secs:g} s were over ({save.describe()})"
            self.finish(save, errors.UncertainError(save.epoch, reason))

    def finish(self, save: Save, outcome: Committed | errors.SaveError) -> None:
        """Ends a save, once. A save that is uncertain is settled by a later outcome that is certain."""
        failure = None if isinstance(outcome, Committed) else outcome
        if failure is None:
            to = Phase.COMMITTED
        else:
            to = Phase.UNCERTAIN if isinstance(failure, errors.UncertainError) else Phase.FAILED
        was_uncertain = save.phase is Phase.UNCERTAIN
        if save.advance(to, failure=failure) and was_uncertain and failure is None:
            logging.warning("checkpoint %d was committed after all; its outcome had been unknown", save.epoch)
        self._leave(save)  # also where Ctrl-C has kept the thread that ended it from doing so

    def drop(self, save: Save) -> None:
        """Ends a save that was not needed: a signal handler has made the same one in the middle of `save`."""
        save.snapshot.drop()
        if save.advance(Phase.DROPPED):
            self._remove(save)

    def tell(self, save: Save, failure: errors.SaveError | None) -> None:
        """Enters how a save has ended."""
        if failure is not None:
            state = "uncertain" if isinstance(failure, errors.UncertainError) else "failed"
            self._failed[save.epoch] = (state, failure.reason)
            if not save.request.was_raised:
                self.note_failure(failure)
                self._history.fail(save)
            logging.error("%s: %s", self._root, failure)
        self._listener.ended(save, failure)

    def _leave(self, save: Save) -> None:
        """Lets go of a save that has ended: tells how, and wakes the threads that wait for it. May be called again."""
        if save.told.first() and not isinstance(save.request.refusal, errors.StorageBehindError):
            self.tell(save, save.failure)  # else it was told when it was refused
        if not save.was_taken_up:
            save.snapshot.drop()
        self._remove(save)

    def _remove(self, save: Save) -> None:
        with contextlib.suppress(ValueError):
            self._saves.remove(save)
        save.written.set(None)
        save.done.set(save.cost)
