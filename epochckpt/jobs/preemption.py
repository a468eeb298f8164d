"""How a run learns that it is being preempted, and when it leaves an epoch for that.

A process on its own owns SIGTERM while it trains: the first one asks the run to stop, a second one kills it. In a
`jax.distributed` job SIGTERM stays JAX's own, which notifies all processes (see `coordination.Preemption`): every
process asks equally often and gets the same answers. The save policies of managers get the same answer.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType

import jax
import orbax.checkpoint as ocp
from absl import logging

from epochckpt.agreement import coordination
from epochckpt.jobs.run_calls import RunCalls


class Notice:
    """Whether the run is to stop for preemption: somebody calls `hear`, or `ask_jax` says so; it stays so."""

    def __init__(self, ask_jax: Callable[[], bool] | None = None):
        self._ask_jax = ask_jax
        self._heard = False

    @property
    def heard(self) -> bool:
        """Whether the notice has come, as far as this process has asked."""
        return self._heard

    def hear(self) -> None:
        """The notice has come. A signal handler may call this."""
        self._heard = True

    def ask(self, epoch: int) -> bool:
        """At an epoch's end, on every process: whether the notice has reached all of them."""
        del epoch
        return self.poll()

    def poll(self) -> bool:
        """The same, inside an epoch."""
        if self._ask_jax is not None and self._ask_jax():
            self.hear()
        return self.heard


class StepNotice(Notice):
    """JAX's preemption notice, for managers that ask JAX themselves, with their steps: then only steps may be asked.

    Every number is asked once, also those of epochs before a resume: JAX may have chosen any of them as the step at
    which all processes stop.
    """

    _asked = -1

    def ask(self, epoch: int) -> bool:
        for number in range(self._asked + 1, max(epoch, self._asked + 1) + 1):
            if ocp.utils.reached_preemption(number):
                self.hear()
            self._asked = number
        return self.heard


class Stopper:
    """Answers `ws.should_stop()` in one epoch: True once the notice has come and the time to finish the epoch is over.

    A `resumable` epoch is left at once. Any other goes on for `deadline_secs` after the notice; None: until it is done.
    """

    def __init__(self, *, notice: Notice, calls: RunCalls, resumable: bool, deadline_secs: float | None):
        self._notice = notice
        self._calls = calls
        self._resumable = resumable
        self._deadline_secs = deadline_secs
        self._noticed: float | None = None
        self._refusals = 0
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether an answer was True: this process leaves the epoch in the middle."""
        return self._stopped

    def of_one_node(self) -> "NodeStopper":
        """Answers the questions of one node of this process."""
        return NodeStopper(self)

    def answer(self, number: int) -> bool:
        """The answer to the question of this number of a node, from 0.

        Nodes of one process run in turn, and ask equally often. The n-th question of every node has the answer that
        the first node got: else some nodes would leave an epoch that other nodes have finished.
        """
        if number < self._refusals:
            return False
        self._stopped = self._stopped or (self._notice.poll() and self._is_over())
        self._refusals += not self._stopped
        return self._stopped

    def _is_over(self) -> bool:
        """After the notice: whether the time to finish the epoch is over."""
        if self._noticed is None:
            self._noticed = time.monotonic()
            logging.warning("preemption notice heard while tasks run")
        if self._resumable or self._deadline_secs is None:
            return self._resumable
        end = self._noticed + self._deadline_secs
        return self._calls.broadcast("time left to finish the epoch", lambda: time.monotonic() >= end)


class NodeStopper:
    """Counts the questions of one node in one epoch, for the `Stopper` of the epoch."""

    def __init__(self, stopper: Stopper):
        self._stopper = stopper
        self._numbers = itertools.count()

    def should_stop(self) -> bool:
        """The answer to the node's next question."""
        return self._stopper.answer(next(self._numbers))


@contextlib.contextmanager
def listening(distributed: bool, by_step: bool) -> Generator[Notice]:
    """Listens for preemption; `by_step`: the manager itself asks JAX, with its steps."""
    by_jax = distributed and jax.distributed.is_initialized()
    if by_jax and by_step:
        yield StepNotice()
        return
    notice = Notice(coordination.Preemption.ask if by_jax else None)
    with (
        contextlib.nullcontext() if by_jax else _on_sigterm(notice),
        coordination.Preemption.fed_by(lambda: notice.heard),
    ):
        yield notice


@contextlib.contextmanager
def _on_sigterm(notice: Notice) -> Generator[None]:
    """Handles SIGTERM while the context lasts."""
    if threading.current_thread() is not threading.main_thread():
        logging.warning("the runner is not in the main thread: SIGTERM is not handled")
        yield
        return

    def hear(signum: int, frame: FrameType | None) -> None:
        del frame
        if notice.heard:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        notice.hear()  # no logging here: a lock may be held

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
