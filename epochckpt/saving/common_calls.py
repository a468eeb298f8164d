"""The collective calls of a manager: to look at storage, and to change the directory.

The primary looks, and decides; with local disks (see `hosts`) each process looks at its own, and does on it what the
primary has done on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from epochckpt import _threads
from epochckpt.agreement import CollectiveCalls
from epochckpt.directory import Commits
from epochckpt.errors import FencedError, UnfinishedError
from epochckpt.saving import opening
from epochckpt.saving.claiming import Claim
from epochckpt.saving.hosts import Hosts
from epochckpt.saving.opening import Completing, Survey
from epochckpt.saving.retention import History


class CommonCalls:
    """Looks and changes of one manager; `wait_secs` bounds the wait for the other processes."""

    def __init__(
        self,
        commits: Commits,
        claim: Claim,
        history: History,
        options: ocp.CheckpointManagerOptions,
        mirror: Completing | None,
        hosts: Hosts | None,
        wait_secs: float,
    ):
        self._commits, self._claim, self._history, self._options = commits, claim, history, options
        self._mirror, self._hosts, self._wait_secs = mirror, hosts, wait_secs

    def survey(self, calls: CollectiveCalls) -> Survey:
        """On every process: what is on storage now."""
        known, hosts, wait_secs = self._history.damaged, self._hosts, 2 * self._wait_secs

        def look() -> dict[str, Any]:
            return opening.survey(self._commits, self._options, known, self._mirror).to_wire()

        if hosts is None:
            return Survey.from_wire(calls.broadcast("reload()", look, wait_secs))
        wire = calls.collective("reload()", hosts.look, lambda told: hosts.survey(told, known), wait_secs)
        found = Survey.from_wire(wire)
        hosts.ignore(found)
        return found

    def change(
        self, calls: CollectiveCalls, call: str, epoch: int, decide: Callable[[], Any], follow: Callable[[Hosts], None]
    ) -> None:
        """The primary claims the directory, unless this manager has, and decides; every process learns of the claim.

        With local disks the other processes `follow` on theirs. Epochs that are out of sight on storage, or that the
        mirror has given up, are not listed here either, also where they could not be moved away. Errors name `epoch`.
        """
        hosts, wait_secs = self._hosts, 2 * self._wait_secs

        def take() -> dict[str, Any]:
            self._claim.check(epoch)
            # the claim has a lock, which the main thread may not hold: a signal handler may need it
            return _threads.start(lambda: self._claim.take(epoch)).result()

        def claimed() -> dict[str, Any]:
            was_known, claim = self._claim.known, take()
            if was_known:  # a change may turn out to change nothing, and so not to notice
                self._claim.stager.check(epoch)
            decide()
            claim = {**claim, "lost": _threads.start(self._history.pop_lost).result()}
            return claim if hosts is None else {**claim, "order": _threads.start(hosts.order).result()}

        def learn(claim: dict[str, Any]) -> None:
            _threads.start(lambda: self._claim.learn(claim, self._wait_secs)).result()

        try:
            if hosts is not None:  # the primary decides when all have claimed their disks
                learn(calls.broadcast(f"claim before {call}", take, wait_secs))
            claim = calls.broadcast(call, claimed, wait_secs)
            learn(claim)
            self._history.drop(claim["lost"])
            self._history.forget_gone()
            if hosts is not None:
                _threads.start(lambda: hosts.follow(claim["order"], lambda: follow(hosts))).result()
        except FencedError as error:
            self._claim.note(error)
            raise
        except UnfinishedError as error:
            self._history.drop(error.epochs)
            raise
