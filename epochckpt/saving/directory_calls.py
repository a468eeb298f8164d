"""The collective calls with which a manager changes its directory.

The primary decides, and changes its directory. Where each process has a directory of its own, the others do there what
the primary has done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from epochckpt import _threads
from epochckpt.agreement import CollectiveCalls
from epochckpt.errors import FencedError, UnfinishedError
from epochckpt.saving.claiming import Claim
from epochckpt.saving.history import History
from epochckpt.saving.job_directory import JobDirectory


class DirectoryCalls:
    """Changes of one manager's directory; `wait_secs` bounds the wait for the other processes."""

    def __init__(self, directory: JobDirectory, claim: Claim, history: History, wait_secs: float):
        self._directory = directory
        self._claim = claim
        self._history = history
        self._wait_secs = wait_secs

    def change(
        self,
        calls: CollectiveCalls,
        call: str,
        epoch: int,
        decide: Callable[[], Collection[int]],
        follow: Callable[[], None],
        *,
        take_over: bool = True,
    ) -> None:
        """The primary claims the directory, unless this manager has, and decides; every process learns of the claim.

        `decide` returns the epochs that are not listed any more. All processes drop them from the history. Then, where
        each process has a directory of its own, the others `follow` there: if one of them fails, all know the deletion.
        Epochs that are out of sight on storage, or that the mirror has given up, are not listed here either, also where
        they could not be moved away. Errors name `epoch`. `take_over`: see `Claim.take`.
        """
        wait_secs = 2 * self._wait_secs

        # The claim has a lock, which the main thread may not hold: a signal handler may need it.
        def take() -> dict[str, Any]:
            self._claim.check(epoch)
            return _threads.start(lambda: self._claim.take(epoch, take_over=take_over)).result()

        def learn(claim: dict[str, Any]) -> None:
            _threads.start(lambda: self._claim.learn(claim, self._wait_secs)).result()

        def change() -> dict[str, Any]:
            was_known = self._claim.known
            claim = take()
            learn(claim)
            if was_known:  # a change may turn out to change nothing, and so not to notice
                self._directory.stager.check(epoch)
            unlisted = decide()
            lost = _threads.start(self._history.pop_lost).result()
            return {**claim, "gone": [*unlisted, *lost], "order": _threads.start(self._directory.order).result()}

        try:
            self._directory.agree_on_claim(lambda: learn(calls.broadcast(f"claim before {call}", take, wait_secs)))
            changed = calls.broadcast(call, change, wait_secs)
            learn(changed)
            self._history.drop(changed["gone"])
            self._history.forget_gone()
            _threads.start(lambda: self._directory.follow(changed["order"], follow)).result()
        except FencedError as error:
            self._claim.note(error)
            raise
        except UnfinishedError as error:
            self._history.drop(error.epochs)
            raise
