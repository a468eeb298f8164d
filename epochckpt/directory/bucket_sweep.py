"""The removal of objects that no epoch of a bucket needs any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from epochckpt.directory import attached_metrics
from epochckpt.directory.object_views import ObjectViews
from epochckpt.directory.stock_steps import StockStepRemoval
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import EpochRecord, parsing, paths

if TYPE_CHECKING:
    from epochckpt.directory.head_changes import Incarnation
    from epochckpt.directory.head_object import HeadObject
    from epochckpt.storage import Store


class BucketSweep:
    """Removes objects that nobody needs any more, as the head says. A claim is not needed: the head stays the judge.

    Attributes:
        views: the Orbax views of the epochs.
    """

    def __init__(self, store: Store, head: HeadObject, read: Callable[[str, str], EpochRecord | None]):
        """`read` gives the commit record of a save in a folder, or None."""
        self._store = store
        self._head = head
        self.views = ObjectViews(store, head, read)
        self._steps = StockStepRemoval(store, head)

    def finish_step(self, folder: str, incarnation: Incarnation | None = None) -> None:
        """Removes what is left of a step of stock Orbax that counts no more, or moves it; for this run, or for any."""
        self._steps.finish(folder, incarnation)

    def remove_dead(self, dead: Mapping[str, str]) -> None:
        """Removes what attempts wrote that are dead, by attempt the folder."""
        for folder in sorted(set(dead.values())):
            self._remove(folder, {save_id for save_id, where in dead.items() if where == folder})
        self._head.swept |= dead.keys()

    def _remove(self, folder: str, save_ids: Collection[str]) -> None:
        """Removes the objects of some attempts; the copy of their record goes with them, and first the Orbax view."""
        path = paths.join(folder, paths.EPOCH_RECORD)
        found = [file.path for file in self._store.files(folder)]
        self.views.remove_all(folder, save_ids, found)
        gone = [paths.join(folder, name) for name in found if paths.save_id_in(name) in save_ids]
        metrics = [paths.join(folder, name) for name in found if paths.parse_metrics_file(name)]
        copy: EpochRecord | None = None
        with suppress(EpochCheckpointError):
            copy = parsing.read_record(self._store, path, parsing.parse_head) if paths.EPOCH_RECORD in found else None
        if copy is not None and copy.save_id in save_ids:
            gone += [path, *metrics]
            if not copy.objects:  # the folder was copied from a file system
                gone += [paths.join(folder, below) for below in copy.sizes()]
        else:
            gone += [each for each in metrics if attached_metrics.save_id_of(self._store, each) in save_ids]
        # A reader that misses something looks for the record: it is gone first.
        self._store.remove_all([path for path in gone if path.count("/") == 1])
        self._store.remove_all([path for path in gone if path.count("/") > 1])
