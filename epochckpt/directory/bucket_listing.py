"""What lies beside the epochs that the head of a bucket names, in folders that are named like epochs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head
from epochckpt.errors import DamagedError, FormatError, FormatVersionError
from epochckpt.format import parsing, paths
from epochckpt.orbax import StepNames, object_view, step_files, step_recognition, steps

if TYPE_CHECKING:
    from epochckpt.storage import Store

_LOOKED_AT = 1000  # objects of a folder whose origin is not known


def folders(store: Store, names: StepNames, known: Head) -> dict[str, set[str] | None]:
    """Folders named like epochs that the head does not name, with the dead attempts of its runs in them.

    A folder that is not ours has the value None.
    """
    named = {*known.epochs, *known.begun.values()} - known.stock.keys()
    found = [e.name for e in store.list("") if e.is_folder and e.name not in named]
    beside = dict[str, set[str] | None]()

    def look(name: str) -> None:
        files = [file.path for file in store.files(name, _LOOKED_AT)] if known.incarnation else []
        save_ids = {save_id for path in files if (save_id := paths.save_id_in(path)) and known.knows(save_id)}
        try:
            copy = copied_save_id(store, name) if paths.EPOCH_RECORD in files else None
        except FormatVersionError:  # whose it is cannot be seen: nothing there is swept
            beside[name] = None
            return
        # Beside attempts of ours other files are what is left of an Orbax view.
        only_metrics = all(map(paths.parse_metrics_file, files)) and files
        ours = save_ids or only_metrics or (copy is not None and known.knows(copy))
        ours = ours or (copy is None and object_view.is_remainder(store, name, files))
        # No sweep leaves an attempt with the copy of its record: somebody has put an epoch back.
        put_back = copy in save_ids and copy not in {*known.named, *known.dead}
        beside[name] = save_ids - known.named if ours and not put_back else None

    store.each(look, [name for name in found if names.parse(name) is not None])
    return beside


def copied_save_id(store: Store, folder: str) -> str | None:
    """The attempt whose record was copied into an epoch's folder; None without a usable copy."""
    with suppress(DamagedError, FormatError):
        copy = parsing.read_record(store, paths.join(folder, paths.EPOCH_RECORD), parsing.parse_head)
        return copy and copy.save_id
    return None


def steps_in(store: Store, names: StepNames, among: Collection[str], known: Head) -> dict[str, EpochSummary]:
    """The folders that are finished steps of stock Orbax; those that were so before are not looked at again."""
    found = {folder: known.stock[folder] for folder in among if folder in known.stock}

    def look(folder: str) -> None:
        epoch = names.parse(folder)
        if epoch is not None and step_recognition.is_step(store, folder, lambda name: names.parse(name) is not None):
            step = EpochSummary.for_head(steps.read(store, folder, epoch))
            gone = known.removed_steps.get(folder)
            if gone is None or gone.save_id != step.save_id:
                found[folder] = step

    if step_files.saves_to(store):
        store.each(look, [folder for folder in among if folder not in known.stock])
    return found
