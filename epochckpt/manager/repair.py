"""Rebuilds from the records of epochs what follows from them: the Orbax view, and the head of a bucket."""

import dataclasses
import os
import time
from collections.abc import Mapping

import orbax.checkpoint as ocp

from epochckpt.directory import EpochDirectory, directory_of, rebuild
from epochckpt.errors import UnsupportedError
from epochckpt.manager.numbers import epoch_number
from epochckpt.orbax import StepNames, linked_view, object_view
from epochckpt.orbax.view import WHOLE
from epochckpt.storage import open_store


def repair_view(
    directory: str | os.PathLike[str], epoch: int, *, options: ocp.CheckpointManagerOptions | None = None
) -> list[str]:
    """Rebuilds what is damaged or missing of the small files by which stock Orbax reads an epoch.

    `CheckpointManager.verify(epoch).view_damage` lists the damage. Nothing else of the epoch is touched, nothing is
    claimed, and a run that saves there goes on. Each file, and the folder of each item, is exchanged as a whole.
    `options` have the step name format, if it is not the default.

    Returns:
        The paths in the epoch's folder that were rebuilt; none if the view is as it was written.

    Raises:
        EpochNotFoundError: there is no such epoch.
        EpochDeletedError: it was deleted or replaced meanwhile.
        DamagedError, FormatError: its record cannot be used.
        FormatVersionError: only a newer epochckpt can read it.
        UnsupportedError: it was saved without a view, or by stock Orbax.
        AccessError: no permission to write there.

    Examples:
        >>> import os
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(3)}))
        >>> os.remove("run/0/default/_METADATA")
        >>> ec.repair_view("run", 0)
        ['default']
    """
    epoch_directory = directory_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
    return repair(epoch_directory, epoch_number(epoch))


def repair(epoch_directory: EpochDirectory, epoch: int) -> list[str]:
    """`repair_view` in an open directory."""
    record = epoch_directory.read_record(epoch)
    if record.stock:
        raise UnsupportedError(
            f"{epoch_directory.store.root}: checkpoint {epoch} was written by stock Orbax: there is no record from "
            "which its files could be rebuilt"
        )
    store = epoch_directory.store
    folder = epoch_directory.folder(epoch)
    if record.orbax_view is None:
        why = "; ".join((record.orbax_unsupported or {}).get(WHOLE, {}).values()) or "none was asked for"
        problem = f"the epoch was saved without an Orbax view ({why}): there is none to repair. An export has one"
        raise UnsupportedError(f"{store.root}/{folder}: {problem}")
    if record.objects:
        epoch_directory.contents().remover(time.time).finish_replaced_step(folder)
        return object_view.repair(store, folder, record, lambda: epoch_directory.read_save_id(epoch) == record.save_id)
    return linked_view.repair(store, folder, record)


@dataclasses.dataclass(frozen=True)
class HeadRepair:
    """What `repair_head` has found, or written.

    Attributes:
        problem: what is wrong with the record of which epochs count; empty if it can be used.
        epochs: numbers of whole epochs that it does not name.
        aside: folders of epochs that were rolled back or kept, which it does not name.
        left_out: folders that are named like epochs and cannot be used, and why; they are left alone.
    """

    problem: str
    epochs: tuple[int, ...]
    aside: tuple[str, ...]
    left_out: Mapping[str, str]


def repair_head(
    directory: str | os.PathLike[str], *, write: bool = True, options: ocp.CheckpointManagerOptions | None = None
) -> HeadRepair:
    """Makes the record of which epochs a bucket directory has (`_epochckpt/head.json`) name all that are whole there.

    For a directory whose record is lost or damaged, and for folders of epochs that were copied into one. An epoch is
    whole if its commit record can be read and all its files are there, in their sizes. Nothing is removed. A run that
    is alive is fenced off where the record was lost or damaged.

    Args:
        directory: a URL.
        write: write what was found; else it is only looked for.
        options: the step name format, if it is not the default.

    Raises:
        InvalidArgumentError: the directory is not in an object store and has no such record; or a run may be alive that
            has not closed the directory.
        AccessError: no permission to list, read or write there.
    """
    epoch_directory = directory_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
    bucket = rebuild.with_head(epoch_directory)
    found = rebuild.look(bucket)
    if write and (found.problem or found.epochs or found.aside):
        rebuild.write(bucket, found)
    numbers = sorted(epoch_directory.names.parse(folder) or 0 for folder in found.epochs)
    return HeadRepair(found.problem, tuple(numbers), tuple(sorted(found.aside)), found.left_out)
