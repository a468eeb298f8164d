"""Whether an epoch can be restored, agreed by vote; and which one `restore(None)` takes: the newest that can.

Each process restores (and so verifies) its part of the candidate, and votes. The primary publishes that the epoch is
accepted, or the first error. Guarantees:

- every wait is bounded, and an epoch that one process finds damaged is used by none;
- an epoch that was deleted shows that the list is old: the next candidate is the newest that storage has then;
- where storage does not answer one of the processes, all of them stop instead of falling back to an older epoch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt import _monitoring, errors
from epochckpt._threads import Deadline
from epochckpt.agreement.coordination import Coordinator

_MARGIN_SECS = 60.0
_LOOKS = 16  # at a directory whose epochs are deleted again and again
ALONE = "All processes of a job restore together; one that restores alone needs a manager with read_only=True"

T = TypeVar("T")
Look = tuple[Sequence[int], Mapping[int, str]]  # committed epochs, ascending, and the damage of others


def patience(timeout_secs: float) -> float:
    """How long the other processes wait for the primary, which waits for all of them."""
    return 2 * timeout_secs + _MARGIN_SECS


def newest_readable(
    candidates: Sequence[int],
    restore: Callable[[int], T],
    look_again: Callable[[Mapping[int, Exception]], Look],
    coordinator: Coordinator,
    prefix: str,
    timeout_secs: float,
    directory: str,
) -> tuple[int, T, Mapping[int, Exception]]:
    """Restores the newest epoch of the primary's `candidates`, ascending, that every process can read.

    Returns the epoch, its restored value, and the errors of newer epochs that a process found damaged.

    `restore` raises DamagedError or FormatError for an epoch that is damaged, and EpochNotFoundError for one that is
    gone. Any other error says nothing about the epoch, and ends the search on every process. `look_again` is given what
    was rejected so far, and looks at storage for all processes alike; it is called after an epoch that was gone, and
    before giving up. Where no epoch can be restored, a DamagedError names the reason for the newest.
    """
    found = candidates
    rejected: dict[int, Exception] = {}
    damaged: Mapping[int, str] = {}
    gone: list[int] = []
    looks = 0
    for vote in itertools.count(1):
        left = [epoch for epoch in found if epoch not in rejected and epoch not in gone]
        if not left and looks <= _LOOKS:
            (found, damaged), looks = look_again(rejected), looks + 1
            left = [epoch for epoch in found if epoch not in rejected and epoch not in gone]
        if not left:
            break
        epoch = left[-1]
        value, error = try_together(lambda epoch=epoch: restore(epoch), coordinator, f"{prefix}/{vote}", timeout_secs)
        if error is None:
            return epoch, value[0], rejected
        if not isinstance(error, errors.EpochNotFoundError):
            logging.error(
                "%s: checkpoint %d is not restored, falling back to an older one: %s", directory, epoch, error
            )
            _monitoring.event("/epochckpt/read/fallback", kind=type(error).__name__)
            rejected[epoch] = errors.kept(error)  # its traceback would hold the arrays that were read of the epoch
            continue
        logging.warning("%s: checkpoint %d is not restored, it is not there any more: %s", directory, epoch, error)
        gone.append(epoch)
        if looks < _LOOKS:
            (found, damaged), looks = look_again(rejected), looks + 1
    reasons = {**damaged, **{epoch: errors.say(error) for epoch, error in rejected.items()}}
    if not reasons:
        raise errors.EpochNotFoundError(None, directory, [])
    newest = max(reasons)
    problem = f"none of the {len(reasons)} committed epochs can be restored; the newest: {reasons[newest]}"
    raise errors.DamagedError(directory, problem) from rejected.get(newest)


def try_together(
    restore: Callable[[], T], coordinator: Coordinator, key: str, timeout_secs: float
) -> tuple[list[T], Exception | None]:
    """Restores an epoch and votes; returns its value, and why it cannot be used, as all processes decide.

    An error that says nothing about the epoch is raised.
    """
    value: list[T] = []
    mine: Exception | None = None
    try:
        value.append(restore())
    except Exception as caught:
        mine = caught
    error = mine
    if coordinator.processes > 1:
        error = _vote(coordinator, key, mine, timeout_secs) or mine
    # An error that says nothing about the epoch stops this process. Where storage is silent, all take the verdict.
    if mine is not None and not _is_verdict(mine) and not (isinstance(mine, errors.StorageError) and error is not mine):
        raise mine
    if error is not None and not _is_verdict(error):
        raise error
    return value, error


def _is_verdict(error: Exception) -> bool:
    """Whether an error is about the epoch; another one stops every process."""
    return isinstance(error, errors.DamagedError | errors.FormatError | errors.EpochNotFoundError)


def _vote(coordinator: Coordinator, key: str, error: Exception | None, timeout_secs: float) -> Exception | None:
    """Votes; returns the verdict of all processes: None to accept the epoch, else the first error."""

    def wire(error: Exception | None) -> dict[str, Any]:
        return {"ok": True} if error is None else {"error": errors.to_wire(error)}

    if not coordinator.primary:
        coordinator.put(f"{key}/vote/{coordinator.process}", wire(error))
        try:
            verdict = coordinator.get(f"{key}/verdict/0", patience(timeout_secs))
        except errors.EpochCheckpointError as silence:
            if error is not None and not _is_verdict(error):
                return error
            if not isinstance(silence, errors.CoordinationTimeoutError):
                raise
            late = f"the primary, {coordinator.named([0])}, did not say within {patience(timeout_secs):g} s"
            raise errors.CoordinationTimeoutError(f"{late} whether all can restore the epoch") from None
        return errors.from_wire(verdict["error"]) if "error" in verdict else None
    # The primary waits for the votes, unless it rejects the epoch itself.
    answer = error
    if error is None:
        others = set(range(1, coordinator.processes))
        votes, missing = coordinator.gather(f"{key}/vote", others, Deadline(timeout_secs))
        bad = [errors.from_wire(vote["error"]) for _, vote in sorted(votes.items()) if "error" in vote]
        if bad:
            answer = next((e for e in bad if not _is_verdict(e)), bad[0])
        elif missing:
            late = coordinator.named(missing)
            problem = f"{late} did not say within {timeout_secs:g} s whether it can restore. {ALONE}"
            answer = errors.CoordinationTimeoutError(problem)
    coordinator.put(f"{key}/verdict/0", wire(answer))
    return answer
