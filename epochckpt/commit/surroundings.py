"""What lies beside the epochs that the head of a bucket names, in folders that are named like epochs."""

from collections.abc import Collection, Mapping, Sequence

from epochckpt.commit.head_record import Head, HeadEpoch
from epochckpt.errors import UnsupportedError
from epochckpt.format import paths
from epochckpt.orbax import StepNames, object_view, steps
from epochckpt.storage import Store

_LOOKED_AT = 1000  # objects of a folder whose origin is not known


def folders(store: Store, names: StepNames, known: Head) -> dict[str, set[str] | None]:
    """Folders named like epochs of which the head names none, with the dead attempts of its runs in them.

    None: what is there is not ours.
    """
    named = {*known.epochs, *known.begun.values(), *known.dead.values()}
    found = [e.name for e in store.list("") if e.is_folder and e.name not in named]
    beside = dict[str, set[str] | None]()

    def look(name: str) -> None:
        attempts, foreign = set[str](), not known.incarnation
        files = [file.path for file in store.files(name, _LOOKED_AT)] if known.incarnation else []
        for path in files:
            attempt = paths.attempt_in(path)
            if attempt is not None and attempt.partition("-")[0] in known.runs:
                attempts.add(attempt)
            elif path != paths.EPOCH_RECORD:
                foreign = True
        copied = attempts and paths.EPOCH_RECORD in files  # by somebody: no sweep leaves both
        # Beside attempts of ours other files are what is left of an Orbax view.
        beside[name] = None if copied or (foreign and not attempts) else attempts - known.named

    store.each(look, [name for name in found if names.parse(name) is not None])
    return beside


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
