"""Calls a metadata handler: to notify it of saves and runs, and to ask it where to resume."""

import contextlib
import dataclasses
import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from absl import logging

from epochckpt import _patience, _threads
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.manager.metadata_handlers import answered_epoch
from epochckpt.manager.status import SaveResult

T = TypeVar("T")


class Verb(enum.Enum):
    """A method of Caffe2's metadata handlers beside `report`."""

    SET_PARAMS = "set_params"
    LAST_EPOCH = "last_epoch"
    WRITE = "write"
    CP_ACCESSIBLE = "cp_accessible"


class Action(enum.Enum):
    """What took time, in the words of Caffe2's `report`."""

    SAVE = "checkpoint_save"
    LOAD = "checkpoint_load"
    PARTIAL_LOAD = "checkpoint_partial_load"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagersCalls:
    """What a checkpoint manager does with its metadata handler by itself: methods that it calls, actions it reports."""

    verbs: frozenset[Verb] = frozenset()
    actions: frozenset[Action] = frozenset()


NO_CALLS = ManagersCalls()


class _State(enum.Enum):
    """Whether a notifier calls anybody."""

    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    """Another process calls the handler."""

    GIVEN_UP = enum.auto()
    """A call has taken too long: there are no more."""


class HandlerNotifier:
    """Calls a metadata handler, on the primary only, one call at a time, in changing threads.

    - Manager and runner may each have a notifier: a handler must be thread-safe.
    - A notification is not waited for; an answer is, as long as no single call takes more than a minute.
    - `set_params` comes before the first other call, and not before there is one: opening a directory is no run.
    - An error of the handler is logged and harms nothing. A handler that hangs while something waits for it
      is given up, and not called again.
    """

    def __init__(
        self,
        handler: Any,
        active: bool,
        managers: ManagersCalls = NO_CALLS,
        accessible: Callable[[int], bool] | None = None,
    ):
        """`handler`: None if there is none. What is the `managers` is left to that; `accessible` asks it, too."""
        self._handler = handler
        self._accessible = accessible
        self._managers = managers
        self._state = _State.ACTIVE if active else _State.INACTIVE
        self._lane = _threads.Lane()
        self._began: float | None = None  # when the call began that is running in the lane
        self._nodes: tuple[str, Sequence[str]] | None = None  # until the handler knows them

    @property
    def _has_handler(self) -> bool:
        """Whether there is a handler that is called, here and now."""
        return self._handler is not None and self._state is _State.ACTIVE

    def nodes(self, directory: str, names: Sequence[str]) -> None:
        """These nodes save to this directory: `set_params` comes before the next call."""
        if Verb.SET_PARAMS not in self._managers.verbs:
            self._nodes = directory, names

    def introduce(self) -> None:
        """Calls `set_params` now, if it is due; raises the handler's InvalidArgumentError."""
        if self._has_handler and self._nodes is not None:
            with contextlib.suppress(TimeoutError):
                self._ask(self._introduce)

    def _introduce(self) -> None:
        nodes = self._nodes
        self._nodes = None
        if nodes is None or not self._has_handler:
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
        if Verb.WRITE not in self._managers.verbs:
            self._tell("write", epoch=epoch)
        self.report(Action.SAVE, secs)

    def report(self, action: Action, secs: Mapping[str, float]) -> None:
        """How long an action took, by node."""
        if action not in self._managers.actions:
            self._tell("report", action.value, dict(secs))

    def run_ended(self, epoch: int, reason: str) -> None:
        """The run is over."""
        self._tell("run_ended", epoch, reason)

    def drain(self, timeout_secs: float | None = None) -> None:
        """Waits until all notifications are delivered, or `timeout_secs` have passed."""
        if self._has_handler:
            self._wait(self._lane.submit(lambda: None), math.inf if timeout_secs is None else timeout_secs)

    def _tell(self, method: str, *args: Any, **named: Any) -> None:
        call = getattr(self._handler, method, None)
        if call is None or not self._has_handler:  # `save_failed` and `run_ended` are not Caffe2's
            return
        shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])

        def tell() -> None:
            if self._has_handler:
                _threads.logged("metadata handler: set_params failed", self._introduce)
                _threads.logged(f"metadata handler: {method}({shown}) failed", lambda: call(*args, **named))

        self._lane.submit(lambda: self._timed(tell))

    def last_epoch(self, user_epoch: int | None = None, *, must_answer: bool = False) -> int | None:
        """The epoch that the handler says was saved last, given the one that the user or another handler names.

        An error counts as None, unless it `must_answer`: a run from scratch would replace the epochs that it knows of.
        """
        handler = self._handler
        if not self._has_handler or Verb.LAST_EPOCH in self._managers.verbs:
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
        if self._state is not _State.ACTIVE:
            return True
        asked = [] if self._accessible is None else [self._accessible]
        if self._has_handler and Verb.CP_ACCESSIBLE not in self._managers.verbs:
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
        if self._state is _State.ACTIVE:
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
                self._state = _State.GIVEN_UP
                return False
            if end.passed():
                logging.warning("metadata handler: not all has reached it within %g s", timeout_secs)
                return False
            future.wait(min(left, end.left()))
        return True
