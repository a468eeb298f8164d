"""How saves ended: kept in memory for whoever asks, and told to a metadata handler."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt.commit import Attempt
from epochckpt.errors import SaveError
from epochckpt.format import Nodes
from epochckpt.manager import metadata_handlers
from epochckpt.manager.status import SaveResult

_KEPT = 1000  # outcomes that nobody has taken


class Outcomes:
    """The outcomes of saves that ended since somebody last took them; the newest, if they are many."""

    def __init__(self) -> None:
        self._ended: collections.deque[SaveResult] = collections.deque(maxlen=_KEPT)

    def add(self, attempt: Attempt, failure: SaveError | None, nodes: Nodes) -> None:
        """A save has ended; one that this process could not begin is none, its caller has been told."""
        if attempt.error is not None:
            return
        detail = "" if failure is None else failure.reason
        secs = attempt.node_secs(nodes)
        outcome = SaveResult(attempt.epoch, failure is None, detail, attempt.blocked_secs, attempt.elapsed_secs, secs)
        self._ended.append(outcome)

    def take(self) -> list[SaveResult]:
        """The outcomes since the last call, in order."""
        taken: list[SaveResult] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._ended.popleft())
        return taken


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
