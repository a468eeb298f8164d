"""What a caller wants to have restored, of whichever epoch."""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

from epochckpt.arrays import restore_items
from epochckpt.manager.access import Access
from epochckpt.manager.reader import CheckpointReader
from epochckpt.manager.readers import Readers
from epochckpt.manager.saves import Saves

T = TypeVar("T")


class RestoreRequest(abc.ABC, Generic[T]):
    """What a caller wants to have restored, of whichever epoch.

    Attributes:
        readers: open the epochs of the directory that it is in.
    """

    def __init__(self, readers: Readers):
        self.readers = readers

    @abc.abstractmethod
    def result_of(self, reader: CheckpointReader) -> T:
        """Restores it from an epoch."""


class ArgumentsRequest(RestoreRequest[Any]):
    """What Orbax's `args` ask for; a save of the result is planned in the background, before it is asked for."""

    def __init__(self, readers: Readers, args: Any, several: bool | None, saves: Saves, access: Access):
        super().__init__(readers)
        self._args = args
        self._several = several
        self._saves = saves
        self._access = access

    def result_of(self, reader: CheckpointReader) -> Any:
        value = reader.restore(self._args)
        self._saves.arguments.learn(self._several)
        if self._access.may_write:
            self._saves.planner.plan_ahead(restore_items.with_targets(self._args, value))
        return value
