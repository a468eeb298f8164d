"""How a run hears that its machine is about to be taken away.

- One process on its own: the runner has SIGTERM while it trains. The first one asks the run to stop, a second one
  kills it.
- Processes of a `jax.distributed` job: SIGTERM stays JAX's own, which tells all processes (see
  `coordination.Preemption`). Every process asks equally often and gets the same answers.

What was heard is fed to the save policies of managers, so that nobody else asks.
"""

from __future__ import annotations

import abc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import jax
import orbax.checkpoint as ocp
from absl import logging

from epochckpt.commit import coordination
from epochckpt.jobs.exchange import Exchange

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


class Notice(abc.ABC):
    """Whether the run is to stop for preemption."""

    heard = False

    @abc.abstractmethod
    def ask(self, epoch: int) -> bool:
        """At an epoch's end, on every node: whether the notice has reached all of them. True stays True."""

    def poll(self) -> bool:
        """The same, inside an epoch."""
        return self.heard


class SignalNotice(Notice):
    """SIGTERM of this process."""

    def ask(self, epoch: int) -> bool:
        """See Notice."""
        del epoch
        return self.heard

    @contextmanager
    def installed(self) -> Generator[None]:
        """Has SIGTERM for as long as this lasts."""
        if threading.current_thread() is not threading.main_thread():
            logging.warning("the runner is not in the main thread: SIGTERM is not handled")
            yield
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.heard:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.heard = True  # no logging here: a lock may be held


class JaxNotice(Notice):
    """JAX's preemption notice, through one count of questions for the whole process."""

    def ask(self, epoch: int) -> bool:
        """See Notice."""
        del epoch
        self.heard = coordination.Preemption.ask() or self.heard
        return self.heard

    def poll(self) -> bool:
        """See Notice."""
        return self.ask(0)


class StepNotice(Notice):
    """JAX's preemption notice, for managers that ask JAX themselves with their steps: only with these numbers.

    None is left out, also those of epochs before a resume: JAX may have set any of them as the one to stop at.
    """

    def __init__(self) -> None:
        self._asked = -1

    def ask(self, epoch: int) -> bool:
        """See Notice."""
        for number in range(self._asked + 1, max(epoch, self._asked + 1) + 1):
            self.heard = bool(ocp.utils.reached_preemption(number)) or self.heard
            self._asked = number
        return self.heard


class Stopper:
    """Answers `ws.should_stop()`: once the notice has been heard and the time to finish the epoch is over.

    Args:
        notice: what hears it.
        exchange: makes the answers common.
        resumable: the epoch may be left at once.
        deadline_secs: how long after the notice an epoch may still be worked on; None: until it is finished.
        clock: seconds.
    """

    def __init__(
        self,
        notice: Notice,
        exchange: Exchange,
        resumable: bool,
        deadline_secs: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._notice, self._exchange, self._resumable = notice, exchange, resumable
        self._deadline, self._clock = deadline_secs, clock
        self._since: float | None = None
        self._refusals = 0
        self.stopped = False

    def of_one_node(self) -> Callable[[], bool]:
        """The question of one node of this process: whether to leave the epoch now; every node asks equally often.

        Nodes of one process run one after the other: what the first was answered to its n-th question, the others are
        answered to theirs, or some would leave an epoch that others have finished.
        """
        questions = itertools.count()

        def ask() -> bool:
            if next(questions) < self._refusals:
                return False
            if not self._is_to_stop():
                self._refusals += 1
            return self.stopped

        return ask

    def _is_to_stop(self) -> bool:
        if self.stopped:
            return True
        if not self._notice.poll():
            return False
        if self._since is None:
            self._since = self._clock()
            logging.warning("preemption notice heard in the middle of an epoch")
        if self._resumable:
            self.stopped = True
        elif self._deadline is not None:
            self.stopped = self._exchange.broadcast("time left to finish the epoch", self._is_over)
        return self.stopped

    def _is_over(self) -> bool:
        assert self._since is not None
        assert self._deadline is not None
        return self._clock() - self._since >= self._deadline


@contextmanager
def listening(distributed: bool, by_step: bool) -> Generator[Notice]:
    """Listens for preemption.

    Args:
        distributed: this is a process of a job that shares its decisions.
        by_step: the manager asks JAX itself, with its steps.
    """
    if not (distributed and jax.distributed.is_initialized()):
        notice = SignalNotice()
        with notice.installed(), coordination.Preemption.fed_by(lambda: notice.heard):
            yield notice
    elif by_step:
        yield StepNotice()
    else:
        notice = JaxNotice()
        with coordination.Preemption.fed_by(lambda: notice.heard):
            yield notice
