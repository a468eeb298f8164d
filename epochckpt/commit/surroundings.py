"""What lies beside the epochs that the head of a bucket names, in folders that are named like epochs."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from epochckpt.commit.head_record import Head, HeadEpoch
from epochckpt.errors import DamagedError, FormatError, UnsupportedError
from epochckpt.format import parsing, paths
from epochckpt.orbax import StepNames, object_view, steps
from epochckpt.storage import Store

_LOOKED_AT = 1000  # objects of a folder whose origin is not known


def folders(store: Store, names: StepNames, known: Head) -> dict[str, set[str] | None]:
    """Folders named like epochs of which the head names none, with the dead attempts of its runs in them.

    None: what is there is not ours.
    """
    named = {*known.epochs, *known.begun.values()}
    found = [e.name for e in store.list("") if e.is_folder and e.name not in named]
    beside = dict[str, set[str] | None]()

    def look(name: str) -> None:
        files = [file.path for file in store.files(name, _LOOKED_AT)] if known.incarnation else []
        attempts = {attempt for path in files if (attempt := paths.attempt_in(path)) and known.knows(attempt)}
        copy = copied_attempt(store, name) if paths.EPOCH_RECORD in files else None
        # Beside attempts of ours other files are what is left of an Orbax view.
        only_metrics = all(map(paths.parse_metrics_file, files)) and files
        ours = attempts or only_metrics or (copy is not None and known.knows(copy))
        # No sweep leaves an attempt with the copy of its record: somebody has put an epoch back.
        put_back = copy in attempts and copy not in {*known.named, *known.dead}
        beside[name] = attempts - known.named if ours and not put_back else None

    store.each(look, [name for name in found if names.parse(name) is not None])
    return beside


def copied_attempt(store: Store, folder: str) -> str | None:
    """The attempt whose record was copied into an epoch's folder; None without a usable copy."""
    with suppress(DamagedError, FormatError):
        copy = parsing.read_record(store, paths.join(folder, paths.EPOCH_RECORD), parsing.parse_head)
        return copy and copy.attempt
    return None


def steps_in(
    store: Store, names: StepNames, among: Collection[str], known: Mapping[str, HeadEpoch]
) -> dict[str, HeadEpoch]:
    """The folders that are finished steps of stock Orbax; `known` are those that were so before."""
    found = {folder: known[folder] for folder in among if folder in known}

    def look(folder: str) -> None:
        epoch = names.parse(folder)
        if epoch is not None and steps.is_step(store, folder, lambda name: names.parse(name) is not None):
            found[folder] = HeadEpoch.of(steps.read(store, folder, epoch))

    if object_view.is_of_use(store):
        store.each(look, [folder for folder in among if folder not in known])
    return found


def kept(store: Store, epochs: Sequence[int | None]) -> UnsupportedError:
    """The error for whoever would delete steps of stock Orbax in a bucket, or set them aside."""
    shown = ", ".join(map(str, epochs))
    return UnsupportedError(
        f"{store.root}: epochs of stock Orbax in a bucket ({shown}) are read and kept, not deleted or rolled back: "
        "remove their folders with a tool of the cloud; the next run that writes there knows of it"
    )
