"""Removes a step that stock Orbax wrote in a bucket, once it is no longer an epoch.

The step's objects carry no attempt's id. A new epoch of its number may need objects of the same names, for stock Orbax.
So the head names its folder among the `removed_steps` until the step has been removed, or moved to where it is kept,
and nothing is saved under this number before. Wherever a run ends in between, the next claim goes on. A move is a copy,
which the store makes itself; an object goes only when its copy is there.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from absl import logging

from epochckpt.directory.head_changes import FinishStepRemoval, Incarnation
from epochckpt.errors import StorageError
from epochckpt.format import paths
from epochckpt.orbax import step_files, step_recognition

if TYPE_CHECKING:
    from epochckpt.directory.head_object import HeadObject
    from epochckpt.directory.head_record import Head, RemovedStep
    from epochckpt.storage import Store

_REMOVED = 1000  # objects between two looks at the head


class StockStepRemoval:
    """Finishes these removals in one directory, one after the other."""

    def __init__(self, store: Store, head: HeadObject):
        self._store = store
        self._head = head
        self._finishing = threading.Lock()

    def finish(self, folder: str, incarnation: Incarnation | None = None) -> None:
        """Removes what is left of a step, or moves it, if the head says so; for this run, or for any.

        Raises:
            FencedError: another run has claimed.
            StorageError: a copy is not whole; then the originals stay.
        """
        with self._finishing:
            found, step = self._named(folder, incarnation)
            if found is None or step is None:
                return
            if not step_recognition.is_other(self._store, folder, step.save_id):
                self._clear(folder, step, incarnation)
            elif folder not in found.epochs:  # else it is the view of that epoch
                text = "%s/%s: stock Orbax has saved there anew: that stays, and the next run that claims looks at it"
                logging.warning(text, self._store.root, folder)

            self._head.write(FinishStepRemoval(incarnation=incarnation, folder=folder, step=step))

    def _named(self, folder: str, incarnation: Incarnation | None) -> tuple[Head | None, RemovedStep | None]:
        """The current head, and its entry for the folder's removed step, unless another run must clear it."""
        found = self._head.read()
        if found is None or (incarnation is not None and incarnation.id != found.incarnation):
            return found, None
        return found, found.removed_steps.get(folder)

    def _clear(self, folder: str, step: RemovedStep, incarnation: Incarnation | None) -> None:
        store = self._store
        sizes = {file.path: file.size for file in store.files(folder) if _is_theirs(file.path)}
        if step.kept_in:
            place = paths.join(step.kept_in, folder)

            def copy(path: str) -> None:
                with suppress(FileExistsError, FileNotFoundError):  # copied already, or moved
                    store.copy(paths.join(folder, path), paths.join(place, path), replace=False)

            there = {file.path: file.size for file in store.files(place)}
            store.each(copy, [path for path in sizes if path not in there])
            there = {file.path: file.size for file in store.files(place)}
            if wrong := next((path for path, size in sizes.items() if there.get(path) != size), None):
                problem = f"its copy {place}/{wrong} has {there.get(wrong)} bytes, {sizes[wrong]} are expected"
                raise StorageError(f"{store.root}/{folder}/{wrong}", OSError(problem))
        rest = [path for path in sizes if path != step_files.COMMIT]
        parts = (rest[start : start + _REMOVED] for start in range(0, len(rest), _REMOVED))
        for part in ([path for path in sizes if path == step_files.COMMIT], *parts):
            # This may be late: an epoch that was saved here since has a view, with objects of the same names.
            if self._named(folder, incarnation)[1] != step:
                return
            store.remove_all([paths.join(folder, path) for path in part])


def _is_theirs(path: str) -> bool:
    """Whether an object of the folder is the step's: it is not of an attempt of ours, nor about one."""
    return paths.save_id_in(path) is None and not paths.is_about_epoch(path)
