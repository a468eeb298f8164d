"""`repair_view`: rebuilds the Orbax view of an epoch from its record; no other process is needed."""

import os

import orbax.checkpoint as ocp

from epochckpt.commit import Commits, commits_of
from epochckpt.errors import UnsupportedError
from epochckpt.manager.reader import epoch_number
from epochckpt.orbax import StepNames, linked_view, object_view
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
        UnsupportedError: it was saved without a view, or by stock Orbax.
        AccessError: no permission to write there.

    Example:
        >>> import os
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(3)}))
        >>> os.remove("run/0/default/_METADATA")
        >>> ec.repair_view("run", 0)
        ['default']
    """
    commits = commits_of(open_store(directory), StepNames.of(options or ocp.CheckpointManagerOptions()))
    return repair(commits, epoch_number(epoch))


def repair(commits: Commits, epoch: int) -> list[str]:
    """`repair_view` in an open directory."""
    record = commits.read_record(epoch)
    if record.stock:
        raise UnsupportedError(
            f"{commits.store.root}: epoch {epoch} was written by stock Orbax: there is no record from which its files "
            "could be rebuilt"
        )
    store, folder = commits.store, commits.folder(epoch)
    if record.orbax_view is None:
        why = "; ".join((record.orbax_unsupported or {}).get("*", {}).values()) or "none was asked for"
        problem = f"the epoch was saved without an Orbax view ({why}): there is none to repair. An export has one"
        raise UnsupportedError(f"{store.root}/{folder}: {problem}")
    if record.objects:
        return object_view.repair(store, folder, record, lambda: commits.read_attempt(epoch) == record.attempt)
    return linked_view.repair(store, folder, record)
