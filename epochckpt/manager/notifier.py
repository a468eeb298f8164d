"""Calls a metadata handler: to notify it of saves and runs, and to ask it where to resume."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from absl import logging

from epochckpt import _patience, _threads
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.manager.metadata_handlers import answered_epoch
from epochckpt.manager.status import SaveResult

T = TypeVar("T")


class HandlerNotifier:
    """Calls a metadata handler, on the primary only, one call at a time, in changing threads.

    - Manager and runner may each have a notifier: a handler must be thread-safe.
    - A notification is not waited for; an answer is, as long as no single call takes more than a minute.
    - `set_params` comes before the first other call, and not before there is one: opening a directory is no run.
    - An error of the handler is logged and harms nothing. A handler that hangs while something waits for it
      is given up, and not called again.
    """

    def __init__(
        self, handler: Any, active: bool, skip: Collection[str] = (), accessible: Callable[[int], bool] | None = None
    ):
        self._handler, self._accessible = (handler, accessible) if active else (None, None)
        self._skip = skip  # methods, and actions to report, that are left to the checkpoint manager
        self._lane = _threads.Lane()
        self._began: float | None = None  # when the call began that is running in the lane
        self._nodes: tuple[str, Sequence[str]] | None = None  # until the handler knows them

    def nodes(self, directory: str, names: Sequence[str]) -> None:
        """These nodes save to this directory: `set_params` comes before the next call."""
        if "set_params" not in self._skip:
            self._nodes = directory, names

    def introduce(self) -> None:
        """Calls `set_params` now, if it is due; raises the handler's InvalidArgumentError."""
        if self._handler is not None and self._nodes is not None:
            with contextlib.suppress(TimeoutError):
                self._ask(self._introduce)

    def _introduce(self) -> None:
        nodes = self._nodes
        self._nodes = None
        if nodes is None or self._handler is None:
            return
        directory, names = nodes
        try:
            self._handler.set_params(
                db_prefix=directory, db_type="epochckpt", node_names=list(names), path_prefix=None, path_type=None
            )
        except InvalidArgumentError:
            raise
        except Exception as error:
            logging.warning("the metadata handler's set_params failed: %s", say(error))

    def saved(self, result: SaveResult) -> None:
        """A save of a run has ended."""
        if result.committed:
            self.committed(result.epoch, result.nodes or {"save": result.secs})
        else:
            self._tell("save_failed", result.epoch, result.detail)

    def committed(self, epoch: int, secs: Mapping[str, float]) -> None:
        """An epoch was committed; how long each node wrote."""
        if "write" not in self._skip:
            self._tell("write", epoch=epoch)
        self.report("checkpoint_save", secs)

    def report(self, action: str, secs: Mapping[str, float]) -> None:
        """How long an action took, by node."""
        if action not in self._skip:
            self._tell("report", action, dict(secs))

    def run_ended(self, epoch: int, reason: str) -> None:
        """The run is over."""
        self._tell("run_ended", epoch, reason)

    def drain(self, timeout_secs: float | None = None) -> None:
        """Waits until all notifications are delivered, or `timeout_secs` have passed."""
        if self._handler is not None:
            self._wait(self._lane.submit(lambda: None), math.inf if timeout_secs is None else timeout_secs)

    def _tell(self, method: str, *args: Any, **named: Any) -> None:
        call = getattr(self._handler, method, None)
        if call is None:  # `save_failed` and `run_ended` are not Caffe2's
            return
        shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])

        def tell() -> None:
            if self._handler is not None:
                _threads.logged("metadata handler: set_params failed", self._introduce)
                _threads.logged(f"metadata handler: {method}({shown}) failed", lambda: call(*args, **named))

        self._lane.submit(lambda: self._timed(tell))

    def last_epoch(self, user_epoch: int | None = None, *, must_answer: bool = False) -> int | None:
        """The epoch that the handler says was saved last, given the one that the user or another handler names.

        An error counts as None, unless it `must_answer`: a run from scratch would replace the epochs that it knows of.
        """
        handler = self._handler
        if handler is None or "last_epoch" in self._skip:
            return user_epoch
        try:
            answer = self._ask(lambda: handler.last_epoch(user_epoch=user_epoch))
        except Exception as error:
            if must_answer:
                raise
            logging.warning("the metadata handler does not say what was saved last: %s", say(error))
            return None
        return answered_epoch(answer, handler)

    def cp_accessible(self, epoch: int) -> bool:
        """Whether neither the manager, if it is asked, nor the handler says that storage cannot be reached."""
        asked = [] if self._accessible is None else [self._accessible]
        if self._handler is not None and "cp_accessible" not in self._skip:
            asked.append(self._handler.cp_accessible)
        return all(self._agrees(ask, epoch) for ask in asked)

    def _agrees(self, ask: Callable[[int], Any], epoch: int) -> bool:
        try:
            answer = self._ask(lambda: ask(epoch))
            if not isinstance(answer, bool | np.bool_):
                logging.warning("the metadata handler's cp_accessible() gave %r, expected True or False", answer)
            return bool(answer)
        except OSError as error:  # of the handler's own storage, not of the checkpoints'
            logging.warning("the metadata handler does not say whether storage is there: %s", say(error))
            return True
        except Exception as error:  # counts as no, as in Caffe2
            logging.error("the metadata handler's cp_accessible() failed, nothing is saved: %s", say(error))
            return False

    def _ask(self, question: Callable[[], T]) -> T:
        if self._handler is not None or self._accessible is not None:
            answer = self._lane.submit(lambda: self._timed(question))
            if self._wait(answer):
                return answer.result()
        raise TimeoutError("the metadata handler has not answered")

    def _timed(self, call: Callable[[], T]) -> T:
        self._began = time.monotonic()
        try:
            return call()
        finally:
            self._began = None

    def _wait(self, future: _threads.Future[Any], timeout_secs: float = math.inf) -> bool:
        """Whether what was queued is done in time. A handler is given up if a single call of it takes too long."""
        call_secs = _patience.now().handler_call_secs if timeout_secs == math.inf else timeout_secs
        end = _threads.Deadline(timeout_secs)
        while not future.done():
            began = self._began
            left = call_secs if began is None else began + call_secs - time.monotonic()
            if left <= 0:
                logging.warning("metadata handler: it has not returned for %g s; it is not called any more", call_secs)
                self._handler = self._accessible = None
                return False
            if end.passed():
                logging.warning("metadata handler: not all has reached it within %g s", timeout_secs)
                return False
            future.wait(min(left, end.left()))
        return True
