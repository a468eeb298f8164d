"""Whether an epoch can be restored, agreed by vote; and which one `restore(None)` takes: the newest that can.

A vote is a collective call: each process restores (and so verifies) its part of the candidate, and tells whether it
could, and of which save. The decision is that the epoch is accepted, or the first error. Guarantees:

- an accepted epoch is of one save on all processes, also where another run replaces it while they read;
- every wait is bounded, and an epoch that one process finds damaged is used by none;
- an epoch that was deleted shows that the list is old: the next candidate is the newest that storage has then;
- where storage does not answer one of the processes, all of them stop instead of falling back to an older epoch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from absl import logging

from epochckpt import _monitoring, errors
from epochckpt.agreement.collective import Timeouts, hear_secs, meet
from epochckpt.agreement.coordination import Coordinator

_LOOKS = 16  # at a directory whose epochs are deleted again and again
ALONE = "All processes of a job restore together; one that restores alone needs a manager with read_only=True"

# Errors that are about the epoch; another one stops every process.
_VERDICTS = (errors.DamagedError, errors.FormatError, errors.EpochNotFoundError)

T = TypeVar("T")
Look = tuple[Sequence[int], Mapping[int, str]]  # committed epochs, ascending, and the damage of others


def newest_readable(
    candidates: Sequence[int],
    *,
    restore: Callable[[int], T],
    save_of: Callable[[int], str | None],
    look_again: Callable[[Mapping[int, Exception]], Look],
    coordinator: Coordinator,
    prefix: str,
    timeout_secs: float,
    directory: str,
) -> tuple[int, T, Mapping[int, Exception]]:
    """Restores the newest epoch of the primary's `candidates`, ascending, that every process can read.

    Returns the epoch, its restored value, and the errors of newer epochs that a process found damaged.

    `restore` raises DamagedError or FormatError for an epoch that is damaged, and EpochNotFoundError for one that is
    gone; `save_of` tells which save of an epoch it has read, None if that is not known. Any other error says nothing
    about the epoch, and ends the search on every process. `look_again` is given what was rejected so far, and looks at
    storage for all processes alike; it is called after an epoch that was gone or replaced, and before giving up. Where
    no epoch can be restored, a DamagedError names the reason for the newest.
    """
    candidates_left = candidates
    rejected: dict[int, Exception] = {}
    damaged: Mapping[int, str] = {}
    gone: list[int] = []
    looks = 0
    for number in itertools.count(1):
        left = [epoch for epoch in candidates_left if epoch not in rejected and epoch not in gone]
        if not left and looks <= _LOOKS:
            candidates_left, damaged = look_again(rejected)
            looks += 1
            left = [epoch for epoch in candidates_left if epoch not in rejected and epoch not in gone]
        if not left:
            break
        epoch = left[-1]
        value, error = vote(
            epoch=epoch,
            restore=restore,
            save_of=save_of,
            coordinator=coordinator,
            key=f"{prefix}/{number}",
            timeout_secs=timeout_secs,
            directory=directory,
        )
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
        if not isinstance(error, errors.EpochDeletedError) or looks >= _LOOKS:  # one that was replaced is tried again
            gone.append(epoch)
        if looks < _LOOKS:
            candidates_left, damaged = look_again(rejected)
            looks += 1
    reasons = {**damaged, **{epoch: errors.say(error) for epoch, error in rejected.items()}}
    if not reasons:
        raise errors.EpochNotFoundError(None, directory, [])
    newest = max(reasons)
    problem = f"none of the {len(reasons)} committed epochs can be restored; the newest: {reasons[newest]}"
    raise errors.DamagedError(directory, problem) from rejected.get(newest)


def vote(
    *,
    epoch: int,
    restore: Callable[[int], T],
    save_of: Callable[[int], str | None],
    coordinator: Coordinator,
    key: str,
    timeout_secs: float,
    directory: str,
) -> tuple[list[T], Exception | None]:
    """Restores an epoch in a collective call; returns its value, and why it cannot be used, as all processes decide.

    An error that says nothing about the epoch is raised. For `restore` and `save_of` see `newest_readable`.
    """
    if coordinator.processes == 1:
        try:
            return [restore(epoch)], None
        except _VERDICTS as error:
            return [], error
    value: list[T] = []

    def act() -> str | None:
        value.append(restore(epoch))
        return save_of(epoch)

    def decide(save_ids: Sequence[str | None]) -> None:
        if len({save_id for save_id in save_ids if save_id is not None}) > 1:
            raise errors.EpochDeletedError(epoch, directory, "the processes have read different saves of it")

    patience = Timeouts(
        collect_secs=timeout_secs,
        hear_secs=hear_secs(timeout_secs),
        late_text=f"{{names}} did not say within {{secs:g}} s whether it can restore. {ALONE}",
        silent_text="the primary, {names}, did not say within {secs:g} s whether all can restore the epoch",
    )
    outcome = meet(coordinator, key, act, decide, patience, weigh=_weigh)
    # An error that says nothing about the epoch stops this process. Where storage is silent, all take the verdict.
    own = outcome.own
    heard = outcome.serial is not None
    if own is not None and not isinstance(own, _VERDICTS) and not (heard and isinstance(own, errors.StorageError)):
        raise own
    if outcome.error is not None and not isinstance(outcome.error, _VERDICTS):
        raise outcome.error
    return value, outcome.error


def _weigh(failures: Sequence[Exception]) -> Exception:
    """An error that says nothing about the epoch stops all processes."""
    return next((error for error in failures if not isinstance(error, _VERDICTS)), failures[0])
