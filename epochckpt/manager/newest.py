"""`restore(None)`: a vote of the job's processes on the newest epoch that all can read, see `commit.restore_vote`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from epochckpt.commit import Calls, Commits, Coordinator, History, restore_vote
from epochckpt.commit.protocol import ReplaceCondition
from epochckpt.errors import say

T = TypeVar("T")


class Newest:
    """Restores the newest readable epoch of a directory; `history` learns which ones are damaged."""

    def __init__(self, commits: Commits, history: History, calls: Calls, coordinator: Coordinator, timeout_secs: float):
        self._commits, self._history, self._calls = commits, history, calls
        self._coordinator, self._timeout_secs = coordinator, timeout_secs

    def restore(
        self, restore: Callable[[int], T], among: Sequence[int] | None, look: Callable[[], None]
    ) -> tuple[int, T]:
        """See `CheckpointManager.restore_newest`; `look` renews the history from storage."""
        attempts: dict[int, str | None] = {}

        def allowed() -> list[int]:
            return [i.step for i in self._history.committed() if among is None or i.step in among]

        def restore_one(epoch: int) -> T:
            if self._coordinator.primary:  # the verdict is about this attempt: another one is another epoch
                attempts[epoch] = self._commits.read_attempt(epoch)
            return restore(epoch)

        def reject(rejected: Mapping[int, Exception]) -> None:
            self._history.damaged |= {e: ReplaceCondition(attempts.get(e), say(why)) for e, why in rejected.items()}
            self._history.drop(rejected)

        def look_again(rejected: Mapping[int, Exception]) -> restore_vote.Look:
            reject(rejected)
            look()
            damaged = {e: found.damage for e, found in self._history.damaged.items() if among is None or e in among}
            return allowed(), damaged

        candidates = allowed() if among is None else list(among)
        where, wait = self._commits.store.root, self._timeout_secs
        with self._calls.vote(candidates, restore_vote.patience(wait)) as (found, prefix):
            epoch, value, rejected = restore_vote.newest_readable(
                found, restore_one, look_again, self._coordinator, prefix, wait, where
            )
        reject(rejected)
        return epoch, value
