"""The saves of a run: begun at the end of an epoch, ended in the background, tried once more at the very end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt.errors import CoordinationTimeoutError, say
from epochckpt.jobs import result
from epochckpt.jobs.backends.base import CheckpointBackend, Names
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.reporting import Handler
from epochckpt.manager import SaveResult


class RunCheckpoints:
    """The saves of one run. A failure never stops training; it is known to all nodes at their next exchange.

    Args:
        backend: the checkpoint manager, or None: nothing is saved.
        handler: the metadata handler.
        exchange: the other processes.

    Attributes:
        ledger: what all nodes have been told.
    """

    def __init__(self, backend: CheckpointBackend | None, handler: Handler, exchange: Exchange):
        self._backend, self._handler, self._exchange = backend, handler, exchange
        self.ledger = result.Ledger()
        self._ended: list[SaveResult] = []
        self._failures: list[SaveResult] = []
        self._retry: Callable[[], None] | None = None

    def prepare(self, epoch: int, names: Names) -> tuple[Any, str | None]:
        """What a save is to be given, or why it cannot be."""
        if self._backend is None:
            return None, None
        try:
            return self._backend.prepare(epoch, names), None
        except Exception as error:
            return None, say(error)

    def begin(
        self,
        epoch: int,
        prepared: Any,
        metrics: Mapping[str, Any],
        notes: Mapping[str, Any],
        *,
        now: bool,
        force: bool,
        again: bool,
        replaces: bool,
    ) -> None:
        """Begins a save.

        Args:
            epoch: its number.
            prepared: see `prepare`.
            metrics: scalars.
            notes: the runner's, JSON.
            now: begin it at all; otherwise it is only remembered for the end of the run.
            force: whatever the manager's policies say.
            again: it is the last of the run, and may be tried once more when it fails.
            replaces: the epoch exists: as a part of itself, or because `save_checkpoints` saved something as it.
        """
        backend = self._backend
        if backend is None:
            return

        def save() -> None:
            began = time.monotonic()
            try:
                if replaces:
                    backend.allow_overwrite(epoch)
                backend.save(epoch, prepared, dict(metrics), notes, force or replaces)
            except CoordinationTimeoutError:
                raise
            except Exception as error:
                logging.warning("epoch %d could not be saved: %s", epoch, say(error))
                self._failures.append(SaveResult(epoch, False, say(error), 0.0, 0.0, {}))
            self.ledger.blocked_secs += time.monotonic() - began

        self._retry = save if again else None
        if now:
            save()

    def settle(self) -> None:
        """Waits for saves in flight, and keeps what became of them for `ended`: another save is about to be made."""
        if self._backend is not None:
            self._backend.drain()
            self._ended += self._backend.outcomes()

    def exists(self, epoch: int) -> bool:
        """On the primary: whether an epoch is on storage already."""
        return self._backend is not None and epoch in self._backend.epochs()

    def accessible(self, epoch: int) -> bool:
        """On the primary: whether nobody says that storage is away."""
        backend = self._backend
        if backend is None:
            return True
        asks = "cp_accessible" in backend.tells
        says = not asks or self._handler.agrees(lambda: backend.accessible(epoch))
        return says and self._handler.cp_accessible(epoch)

    def ended(self, refused: SaveResult | None = None) -> list[dict[str, Any]]:
        """On the primary: saves that have ended since it was asked last, as JSON; the metadata handler is told.

        Args:
            refused: one more, that was not even begun.
        """
        found, self._ended = self._ended, []
        found += self._backend.outcomes() if self._backend is not None else []
        failed, self._failures = self._failures, []
        found += [*failed, *([refused] if refused is not None else [])]
        for one in found:
            self._handler.saved(one)
        return [result.to_json(one) for one in found]

    def enter(self, outcomes: Sequence[Mapping[str, Any]]) -> None:
        """On all nodes: what the primary found to have ended."""
        self.ledger.add(map(result.from_json, outcomes))

    def is_saved(self, epoch: int) -> bool:
        """Whether the epoch is on storage, and the newest."""
        return self.ledger.last_committed == epoch

    def fenced_off(self) -> str:
        """How this process learned that a newer run has taken over; empty as long as it has not."""
        return "" if self._backend is None else self._backend.fenced_off()

    def drain(self, epoch: int) -> tuple[str, str]:
        """Waits for saves in flight; the last epoch, if it was not saved, is tried once more.

        Args:
            epoch: the last epoch of the run.

        Returns:
            Why it is not on storage; empty if it is, or if there is no manager. And how a process learned that a newer
            run has taken over; empty if none has.
        """
        backend = self._backend
        if backend is None:
            return "", ""

        def look(found: list[str]) -> dict[str, Any]:
            outcomes, fenced_off = self.ended(), next(filter(None, found), "")
            saved = self.is_saved(epoch) or any(one["committed"] and one["epoch"] == epoch for one in outcomes)
            saved = saved or backend.discarded(epoch)
            again = self._retry is not None and not saved and not fenced_off  # only then the handler is asked once more
            again = again and self.accessible(epoch)
            return {"outcomes": outcomes, "saved": saved, "again": again, "fenced_off": fenced_off}

        for _ in range(2):
            backend.drain()
            answer = self._exchange.gather("last save", self.fenced_off(), look)
            self.enter(answer["outcomes"])
            if answer["saved"]:
                return "", ""
            if answer["fenced_off"]:
                return answer["fenced_off"], answer["fenced_off"]
            if self._retry is None or not answer["again"]:
                break
            retry, self._retry = self._retry, None
            retry()
        reason = dict(self.ledger.failed).get(epoch, "it was not asked for")
        logging.error("the last epoch, %d, was not saved: %s", epoch, reason)
        return reason, ""
