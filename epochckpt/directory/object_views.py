"""The Orbax views of the epochs in a bucket: each is written once the head names its epoch, and goes when it does not.

Another process may change the head meanwhile: `orbax.object_view` says what then holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from epochckpt import _threads
from epochckpt.errors import DamagedError, FormatError, FormatVersionError
from epochckpt.format import EpochRecord, paths
from epochckpt.orbax import Views, object_view
from epochckpt.orbax.step_files import COMMIT

if TYPE_CHECKING:
    from epochckpt.directory.epoch_summary import EpochSummary
    from epochckpt.directory.head_object import HeadObject
    from epochckpt.directory.head_record import Head
    from epochckpt.orbax.view_layouts import View
    from epochckpt.storage import Store


class ObjectViews:
    """Writes and removes views in one directory.

    Args:
        store: the directory.
        head: the head of it.
        read: an attempt's record with its items, by folder and attempt; None if it is not there.
    """

    def __init__(self, store: Store, head: HeadObject, read: Callable[[str, str], EpochRecord | None]):
        self._store = store
        self._head = head
        self._read = read
        self._wanted = object_view.is_of_use(store)
        self._views = Views()
        self._planned: tuple[str, View] | None = None  # of the attempt that is about to be committed
        self._changing = threading.Lock()  # held while a view is written or removed

    def guard(self) -> None:
        """Marks the head's folder as whole: `cleanup_tmp_directories` of stock Orbax removes every other folder."""
        if self._wanted:
            path = paths.join(paths.HEAD.partition("/")[0], COMMIT)
            what = f"{self._store.root}: {path} is missing"
            _threads.logged(what, lambda: self._store.put(path, b"", draft="", replace=True))

    def plan(self, record: EpochRecord) -> EpochRecord:
        """The record with the note of the view that its epoch will have; nothing is written."""
        self._planned = None
        if not self._wanted:
            return record
        view, noted = self._views.note(record)
        self._planned = (record.save_id, view) if view is not None else None
        return noted

    def after_commit(self, folder: str, save_id: str, old: EpochSummary | None) -> list[Callable[[], object]]:
        """The work that writes a committed epoch's view, and replaces the view of the `old` epoch, if there was one."""
        planned = self._planned
        self._planned = None
        if planned is None or planned[0] != save_id:
            return []
        what = f"{self._store.root}: stock Orbax does not see {folder}, which repair_view would change"
        return [partial(_threads.logged, what, partial(self._show, folder, save_id, planned[1], old))]

    def _show(self, folder: str, save_id: str, view: View, old: EpochSummary | None = None) -> None:
        def still() -> bool:
            found = self._head.read()
            return found is not None and folder not in found.removed_steps and found.has(folder, save_id)

        with self._changing:
            if old is not None and not old.stock:
                object_view.remove(self._store, folder, self._record(folder, old.save_id))
            elif old is not None and not still():  # the step that was here has not left yet: the next claim writes it
                return
            whole = False
            try:
                # The last look: an epoch that was deleted meanwhile must not keep the mark of a finished step.
                whole = object_view.put(self._store, folder, view, still) and still()
            finally:
                if not whole and self._is_free(folder):
                    self._store.remove_all([paths.join(folder, path) for path in {*view.files, *view.copies}])

    def remove(self, folder: str, save_id: str) -> None:
        """Removes a deleted epoch's view. If a new epoch already uses the folder, its view stays."""
        if not self._wanted:
            return
        with self._changing:
            if self._is_free(folder):
                object_view.remove(self._store, folder, self._record(folder, save_id))
            else:
                self._remove_rest(folder, save_id)

    def _remove_rest(self, folder: str, save_id: str) -> None:
        """Removes the rest of a replaced epoch's view: the files that the view of the new epoch does not have."""
        found = self._head.seen()
        entry = None if found is None else found.epochs.get(folder)
        if entry is None or entry.stock or entry.save_id == save_id:
            return
        old = self._record(folder, save_id)
        record = self._record(folder, entry.save_id)
        if old is not None and record is not None:
            object_view.remove_rest(self._store, folder, old, record)

    def _is_free(self, folder: str) -> bool:
        found = self._head.read()
        return found is not None and folder not in found.listed and folder not in found.removed_steps

    def remove_all(self, folder: str, save_ids: Container[str], files: Collection[str]) -> None:
        """The same for those attempts that were an epoch, by the files of the folder."""
        names = [name.removesuffix(".json") for name in files if "/" not in name and name.endswith(".json")]
        others = [path for path in files if paths.save_id_in(path) is None and not paths.is_about_epoch(path)]
        for save_id in names if others else ():
            if save_id in save_ids:
                self.remove(folder, save_id)

    def finish(self, found: Head) -> None:
        """Does what a run may have been killed in: views of the newest epoch, and of those rolled back.

        Also those of epochs that replaced a step of stock Orbax, which had not left yet.
        """
        if not self._wanted or not found.epochs:
            return
        for kept, entry in found.aside.items():
            folder = kept.partition("/")[2]
            lost = kept.startswith(paths.ROLLED_BACK_PREFIX) and folder not in found.epochs and not entry.stock
            if lost and object_view.is_complete(self._store, folder):
                self.remove(folder, entry.save_id)
        newest = max(found.epochs, key=lambda folder: found.epochs[folder].committed_ns)
        left = (self._head.read() or found).removed_steps if found.removed_steps else dict[str, object]()
        for folder in {newest, *(found.removed_steps.keys() & found.epochs.keys())} - left.keys():
            # Where the replaced epoch has not been removed yet, a complete view may still be its own.
            was_replaced = folder in found.dead.values()
            if not was_replaced and object_view.is_complete(self._store, folder):
                continue
            save_id = found.epochs[folder].save_id
            record = self._record(folder, save_id)
            if record is None or record.orbax_view is None:
                continue
            view = self._views.build(record)
            if not object_view.is_written(self._store, folder, record, view):
                self._show(folder, save_id, view)

    def _record(self, folder: str, save_id: str) -> EpochRecord | None:
        """An attempt's record; None if it is lost or damaged, or needs a newer epochckpt."""
        with suppress(DamagedError, FormatError, FormatVersionError):
            return self._read(folder, save_id)
        return None
