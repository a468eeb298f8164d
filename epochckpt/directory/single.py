"""A directory of one epoch: a folder of ours, a step of stock Orbax, or what a plain Orbax checkpointer saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Never

from epochckpt.directory import metrics_log
from epochckpt.directory.contents import AllFiles, Contents, DiskUsage, GarbageRemover, Leftovers, UnfinishedSave
from epochckpt.directory.epoch_directory import EpochDirectory, Rollback
from epochckpt.directory.kinds import directory_of
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.errors import UnsupportedError
from epochckpt.format import EpochRecord, paths
from epochckpt.orbax import StepNames, step_names
from epochckpt.storage import open_file

if TYPE_CHECKING:
    from epochckpt.storage import Store


class SingleEpochDirectory(EpochDirectory):
    """The one epoch that lies in a folder, whatever the folder is called and whatever lies beside it. Read only.

    The epoch is read from its own files: the head of a bucket is not asked.
    """

    def __init__(self, around: EpochDirectory, name: str):
        """`around` is the directory that the folder `name` lies in, which tells what its storage is like."""
        super().__init__(around.store, around.names)
        self._around = around
        self._name = name

    @property
    def place(self) -> str:
        return paths.join(self.store.root.rstrip("/"), self._name)

    def contents(self, todelete_subdir: str | None = None) -> Contents:
        return _SingleContents(self._around.contents(todelete_subdir), self._name)

    def rollback(self) -> Rollback | None:
        return self._around.rollback()

    def owners(self) -> list[Any]:
        return self._around.owners()

    def lineage(self) -> Lineage | None:
        return self._around.lineage()

    def deleted(self) -> dict[int, metrics_log.Line]:
        return {}  # of other epochs

    @property
    def has_one(self) -> bool:
        return True

    @property
    def has_cheap_reads(self) -> bool:
        return self._around.has_cheap_reads

    def is_of_host(self) -> bool:
        return self._around.is_of_host()

    def has_something(self, epoch: int) -> bool:
        return self.store.exists(self.folder(epoch))

    def is_ours(self, epoch: int) -> bool:
        return self.store.exists(paths.join(self.folder(epoch), paths.EPOCH_RECORD))

    def lost_records(self, folder: str) -> bool:
        return self._around.lost_records(folder)

    def check_shallow(self, record: EpochRecord, *, is_partial: bool = False) -> None:
        self._around.check_shallow(record, is_partial=is_partial)

    def sizes(self, folder: str) -> Mapping[str, int] | None:
        return self._around.sizes(folder)

    def is_about_store(self, error: Exception) -> bool:
        return self._around.is_about_store(error)

    def named_otherwise(self) -> str:
        return ""

    def claim(
        self,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        lineage: ClaimLineage | ClaimDirectly = ClaimDirectly(),  # noqa: B008 (a frozen value)
    ) -> Never:
        del epoch, check, lineage
        raise self._read_only()

    def join(self, incarnation: str) -> Never:
        del incarnation
        raise self._read_only()

    def _read_only(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.place} is the folder of one epoch, which is only read; to save or delete, open {self.store.root}"
        )


class _SingleContents(Contents):
    """The files of the one epoch; what lies around it is not looked at."""

    def __init__(self, around: Contents, name: str):
        self._around = around
        self._name = name

    def saves(self) -> list[UnfinishedSave]:
        return []

    def leftovers(self) -> Leftovers:
        return Leftovers()

    def all_leftovers(self) -> Leftovers:
        return Leftovers()

    def all_files(self) -> AllFiles:
        return self._around.files_in(self._name)

    def files_in(self, folder: str) -> AllFiles:
        return self._around.files_in(folder)

    def measure(self, path: str) -> DiskUsage | None:
        return self._around.measure(path)

    def remover(self, clock: Callable[[], float]) -> GarbageRemover:
        return self._around.remover(clock)


class _OneName(StepNames):
    """The name of the folder of one epoch, whatever it is."""

    def __init__(self, name: str, epoch: int):
        self._name = name
        self._epoch = epoch

    @property
    def several(self) -> bool:
        return False

    def build(self, epoch: int) -> str:
        return self._name if epoch == self._epoch else f"{self._name}.{epoch}"

    def parse(self, name: str) -> int | None:
        return self._epoch if name == self._name else None

    def learn(self, names: Iterable[str]) -> None:
        del names


def single_epoch(store: Store, names: set[str]) -> SingleEpochDirectory | None:
    """The directory of the one epoch that lies in a folder with these entries; None if the folder is no epoch."""
    if not step_names.is_single(names) or step_names.is_item(store, names):
        return None
    above, name = open_file(os.path.realpath(store.root) if store.atomic_folder_rename else store.address)
    return SingleEpochDirectory(directory_of(above, _OneName(name, step_names.number_of(store))), name)
