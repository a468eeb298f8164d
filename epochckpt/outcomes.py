"""How saves ended: kept in memory for whoever asks, and told to a metadata handler."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epochckpt import metadata_protocol, worker
from epochckpt.attempt import Attempt
from epochckpt.errors import SaveError
from epochckpt.hosting import Nodes
from epochckpt.status import SaveOutcome

_KEPT = 1000  # outcomes that nobody has taken


class Outcomes:
    """The outcomes of saves that ended since somebody last took them; the newest, if they are many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: collections.deque[SaveOutcome] = collections.deque(maxlen=_KEPT)

    def add(self, attempt: Attempt, failure: SaveError | None, nodes: Nodes) -> None:
        """A save has ended; one that this process could not begin is none, its caller has been told."""
        if attempt.error is not None:
            return
        detail = "" if failure is None else failure.reason
        secs = attempt.node_secs(nodes)
        outcome = SaveOutcome(attempt.epoch, failure is None, detail, attempt.held_secs, attempt.elapsed_secs, secs)
        with self._lock:
            self._ended.append(outcome)

    def take(self) -> list[SaveOutcome]:
        """The outcomes since the last call, in order."""
        with self._lock:
            taken = list(self._ended)
            self._ended.clear()
            return taken


class Informer:
    """Tells a metadata handler, on the primary, of nodes and commits; what it raises is logged and harms nothing.

    Its methods are called in order, those about commits in a thread of their own: a slow one holds up no save.

    Args:
        handler: it, or None.
        active: whether this process is the one that tells it.
    """

    def __init__(self, handler: Any, active: bool):
        self._handler = handler if active else None
        self._lane = worker.Lane()

    def nodes(self, directory: str, names: Sequence[str]) -> None:
        """Which nodes save to which directory; told at once.

        Raises:
            InvalidArgumentError: the handler says that it cannot serve this directory.
        """
        if self._handler is not None:
            metadata_protocol.introduce(self._handler, directory, names)

    def committed(self, epoch: int, secs: Mapping[str, float]) -> None:
        """An epoch was committed; how long each node wrote."""
        self._later("write", epoch)
        self._later("report", "checkpoint_save", dict(secs))

    def drain(self, timeout_secs: float) -> None:
        """Waits, bounded, until it has been told everything."""
        if self._handler is not None:
            self._lane.submit(lambda: None).wait(timeout_secs)

    def _later(self, method: str, *args: Any) -> None:
        self._lane.submit(functools.partial(self._tell, method, *args))

    def _tell(self, method: str, *args: Any) -> None:
        if self._handler is not None:
            call: Callable[..., Any] = getattr(self._handler, method)
            worker.logged(f"metadata handler: {method}{args!r} failed", functools.partial(call, *args))
