"""The search for the newest epoch that every process can restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from epochckpt import errors
from epochckpt.agreement import CollectiveCalls
from epochckpt.agreement.restore_vote import Look
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition
from epochckpt.options import StorageOptions
from epochckpt.saving import History

T = TypeVar("T")


class NewestSearch(Generic[T]):
    """A search for the newest epoch of a directory that every process can restore, as this process takes part in it.

    `look` is how a manager looks at its own directory again; of another directory nothing but the epochs is asked.
    """

    def __init__(
        self,
        *,
        epoch_directory: EpochDirectory,
        history: History,
        restore: Callable[[int], T],
        among: Sequence[int] | None,
        primary: bool,
        look: Callable[[], None] | None,
        calls: CollectiveCalls,
        storage: StorageOptions,
    ):
        self._epoch_directory = epoch_directory
        self._history = history
        self._restore = restore
        self._among = among
        self._primary = primary
        self._look = look
        self._calls = calls
        self._storage = storage
        self._save_ids: dict[int, str | None] = {}  # the ids of the saves that were tried, by epoch

    def allowed(self) -> list[int]:
        """The committed epochs that may be taken, ascending."""
        return [i.step for i in self._history.committed() if self._among is None or i.step in self._among]

    def restore(self, epoch: int) -> T:
        """Restores one of them; the verdict is about the save that it is of now: another save is another epoch."""
        if self._primary:
            self._save_ids[epoch] = self._epoch_directory.read_save_id(epoch)
        return self._restore(epoch)

    def reject(self, rejected: Mapping[int, Exception]) -> None:
        """These were found damaged."""
        self._history.reject(
            {e: ReplaceCondition(self._save_ids.get(e), errors.say(why)) for e, why in rejected.items()}
        )

    def look_again(self, rejected: Mapping[int, Exception]) -> Look:
        """What is on storage now, for all processes alike: epochs that may be taken, and the damage of others."""
        self.reject(rejected)
        if self._look is not None:
            self._look()
        else:
            wait = 2 * self._storage.open_timeout_secs
            self._history.adopt(self._calls.broadcast("look", self._epoch_directory.list_epochs, wait))
        damaged = self._history.damaged.items()
        return self.allowed(), {e: c.damage for e, c in damaged if self._among is None or e in self._among}
