"""The metadata handler of a run, on the primary. Whatever it does, committed epochs and training are not harmed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from absl import logging

from epochckpt import _threads
from epochckpt.errors import say
from epochckpt.manager import SaveResult, metadata_handlers

T = TypeVar("T")

_HANDLER_SECS = 60.0


class Handler:
    """Calls a handler, and only logs when it fails.

    Args:
        handler: an `AbstractMetadataHandler`, anything with its methods, or None.
        told: what the manager tells it itself, see `CheckpointBackend.tells`.
        active: this process is the primary.
    """

    def __init__(self, handler: Any, told: Collection[str], active: bool):
        self._handler = handler if active else None
        self._told = told

    def last_epoch(self, user_epoch: int | None = None, must_say: bool = False) -> int | None:
        """What it says was saved last; None if it cannot say.

        Args:
            user_epoch: the epoch that the user names, or that the manager's handler has answered.
            must_say: raise what it raises, where a run from scratch would replace what it knows of.

        Raises:
            InvalidArgumentError: its answer is nonsense.
        """
        handler = self._handler
        if handler is None or "last_epoch" in self._told:
            return user_epoch
        try:
            answer = self._bounded(lambda: handler.last_epoch(user_epoch=user_epoch))
        except Exception as error:
            if must_say:
                raise
            logging.warning("the metadata handler does not say what was saved last: %s", say(error))
            return None
        return metadata_handlers.answered_epoch(answer, self._handler)

    def cp_accessible(self, epoch: int) -> bool:
        """Whether it says that storage can be reached; True if the manager asks it, or there is none."""
        handler = self._handler
        return handler is None or "cp_accessible" in self._told or self.agrees(lambda: handler.cp_accessible(epoch))

    def agrees(self, asked: Callable[[], Any]) -> bool:
        """What a handler's `cp_accessible` answers, as Caffe2 takes it: an error is no yes.

        An OSError is the exception: what the handler itself has to reach is away, which says nothing of the storage.
        """
        try:
            answer = self._bounded(asked)
            if not isinstance(answer, bool | np.bool_):
                logging.warning("the metadata handler's cp_accessible() gave %r, expected True or False", answer)
            return bool(answer)
        except OSError as error:
            logging.warning("the metadata handler does not say whether storage is there: %s", say(error))
            return True
        except Exception as error:
            logging.error("the metadata handler's cp_accessible() failed, nothing is saved: %s", say(error))
            return False

    def set_params(self, directory: str, nodes: list[str]) -> None:
        """Tells it where the checkpoints are.

        Raises:
            InvalidArgumentError: the handler says that it cannot serve this directory.
        """
        if "set_params" not in self._told and self._handler is not None:
            metadata_handlers.introduce(self._handler, directory, nodes)

    def saved(self, one: SaveResult) -> None:
        """Tells it what became of a save."""
        if not one.committed:
            self._call("save_failed", one.epoch, one.detail)
            return
        if "write" not in self._told:
            self._call("write", epoch=one.epoch)
        self.report("checkpoint_save", one.nodes or {"save": one.secs})

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Gives it the seconds of an action, by node."""
        if action not in self._told:
            self._call("report", action, dict(stats))

    def run_ended(self, epoch: int, reason: str) -> None:
        """Tells it that the run is over."""
        self._call("run_ended", epoch, reason)

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        call: Callable[..., Any] | None = getattr(self._handler, method, None)
        if call is not None:
            told = functools.partial(call, *arguments, **named)
            _threads.logged(f"the metadata handler's {method} failed", lambda: self._bounded(told))

    def _bounded(self, fn: Callable[[], T]) -> T:
        """Training does not wait for a handler that hangs: from then on it is not asked any more."""
        try:
            return _threads.abandonable(fn, _HANDLER_SECS)
        except TimeoutError:
            self._handler = None
            raise TimeoutError(f"no answer within {_HANDLER_SECS:g} s; this run does without it") from None
