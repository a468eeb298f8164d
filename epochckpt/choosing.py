"""Which epoch `restore(None)` takes: the newest that every process can read, agreed by vote.

Each process restores (and so verifies) what it needs of the candidate and votes; the primary publishes `accept` or the
next older candidate. Every wait is bounded. An epoch that one process finds damaged is used by none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from absl import logging

from epochckpt.coordination import Coordinator, Deadline
from epochckpt.errors import (
    CoordinationTimeoutError,
    DamagedError,
    EpochCheckpointError,
    EpochNotFoundError,
    FormatError,
    from_wire,
    kept,
    to_wire,
)

_MARGIN_SECS = 60.0


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Choice(Generic[T]):
    """The outcome.

    Attributes:
        epoch: the epoch that was restored.
        value: what restoring it gave.
        rejected: newer epochs that some process could not read.
    """

    epoch: int
    value: T
    rejected: tuple[int, ...]


def newest_readable(
    candidates: Sequence[int],
    restore: Callable[[int], T],
    coordinator: Coordinator,
    prefix: str,
    timeout_secs: float,
    directory: str,
) -> Choice[T]:
    """Restores the newest epoch that every process can read.

    Args:
        candidates: committed epochs, ascending; the primary's count.
        restore: restores one; raises DamagedError, FormatError or EpochNotFoundError if it cannot be read.
        coordinator: the other processes.
        prefix: for this vote's keys, used once.
        timeout_secs: how long the primary waits for the votes.
        directory: for messages.

    Raises:
        EpochNotFoundError: there is no epoch at all.
        DamagedError: there are, but none of them can be read; names the reason for the newest.
        CoordinationTimeoutError: a process did not vote, or the primary's answer did not come.
    """
    candidates = coordinator.agree(f"{prefix}/candidates", lambda: list(candidates), 2 * timeout_secs + _MARGIN_SECS)
    if not candidates:
        raise EpochNotFoundError(None, directory, [])
    rejected: list[int] = []
    first: Exception | None = None
    for number, epoch in enumerate(reversed(candidates)):
        value: list[T] = []
        error, fatal = None, None
        try:
            value.append(restore(epoch))
        except (DamagedError, FormatError, EpochNotFoundError) as caught:
            error = caught
        except Exception as caught:  # not the epoch's fault: everybody stops
            error = fatal = caught
        key = f"{prefix}/{number}"
        if coordinator.processes > 1:
            error = _vote(coordinator, key, error, fatal, timeout_secs) or error
        if fatal is not None:
            raise fatal
        if error is None:
            return Choice(epoch, value[0], tuple(rejected))
        if not isinstance(error, DamagedError | FormatError | EpochNotFoundError):
            raise error
        logging.error("%s: epoch %d is not restored, falling back to an older one: %s", directory, epoch, error)
        rejected.append(epoch)
        first = first or kept(error)  # without what was read of it, while older ones are read
    assert first is not None
    raise DamagedError(
        directory, f"none of the {len(candidates)} committed epochs can be restored; the newest: {first}"
    ) from first


def _vote(
    coordinator: Coordinator, key: str, error: Exception | None, fatal: Exception | None, timeout_secs: float
) -> Exception | None:
    """Votes, and returns what everybody then knows: None to accept, else the first error."""
    mine = {"ok": True} if error is None else {"error": to_wire(error)}
    if not coordinator.primary:
        coordinator.put(f"{key}/vote/{coordinator.process}", mine)
        try:
            verdict = coordinator.get(f"{key}/verdict/0", 2 * timeout_secs + _MARGIN_SECS)
        except EpochCheckpointError as silence:
            if fatal is not None:
                return fatal
            raise silence
        return from_wire(verdict["error"]) if "error" in verdict else None
    deadline = Deadline(timeout_secs)
    votes: dict[int, Any] = {0: mine}
    missing = set(range(1, coordinator.processes))
    if error is None:
        found, missing = coordinator.gather(f"{key}/vote", missing, deadline)
        votes.update(found)
    bad = [votes[p]["error"] for p in sorted(votes) if "error" in votes[p]]
    answer: Exception | None = None
    if bad:
        answer = from_wire(bad[0]) if error is None else error
    elif missing:
        late = coordinator.named(missing)
        answer = CoordinationTimeoutError(f"{late} did not say within {timeout_secs:g} s whether it can restore")
    coordinator.put(f"{key}/verdict/0", {"ok": True} if answer is None else {"error": to_wire(answer)})
    return answer
