"""Opens a directory to look at it; refuses what is no directory of checkpoints, with a hint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from epochckpt import errors
from epochckpt._lazy import ocp
from epochckpt.directory import EpochDirectory, directory_of, single_epoch
from epochckpt.directory.contents import is_sign
from epochckpt.format import paths
from epochckpt.inspection import suggest
from epochckpt.inspection.epoch_rows import read
from epochckpt.inspection.rows import EpochRow
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store


def open_directory(
    directory: str | os.PathLike[str], options: ocp.CheckpointManagerOptions | None = None, *, single: bool = False
) -> EpochDirectory:
    """The epochs of a directory, for reading. With `single` the directory may be the folder of one epoch itself."""
    store = open_store(directory)
    epoch_directory = directory_of(store, StepNames.of(options))
    with access(store):
        if not epoch_directory.is_folder():
            raise errors.NotACheckpointDirectoryError(f"{store.root} {suggest.no_folder(store.root)}")
        if epoch_directory.refresh():
            return epoch_directory
        found = {entry.name: entry.is_folder for entry in store.list("")}
        if single and (one := single_epoch(store, set(found))) is not None:
            return one
        epoch_directory.check_is_named()
        if not any(_is_sign(epoch_directory, name, is_folder) for name, is_folder in reversed(found.items())):
            raise errors.NotACheckpointDirectoryError(f"{store.root} {suggest.folder(store, found)}")
    return epoch_directory


@contextlib.contextmanager
def access(store: Store) -> Generator[None]:
    """Turns a PermissionError into an AccessError that names the directory and the user."""
    try:
        yield
    except PermissionError as error:
        if isinstance(error, errors.EpochCheckpointError):
            raise
        raise errors.AccessError(f"{store.root}: {error}; this user (uid {os.getuid()}) needs read access") from error


def _is_sign(epoch_directory: EpochDirectory, name: str, is_folder: bool) -> bool:
    """Whether an entry shows that the directory is one of checkpoints."""
    if not is_folder:
        return name == paths.ROLLBACK_RECORD
    epoch = epoch_directory.names.parse(name)
    return (
        is_sign(epoch_directory.store, epoch_directory.names, name)
        if epoch is None
        else isinstance(read(epoch_directory, name, epoch), EpochRow)
    )
