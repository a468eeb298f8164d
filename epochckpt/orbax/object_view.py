"""The Orbax view of an epoch in an object store: written under its final names, once the epoch is committed.

- `commit_success.txt`, without which stock Orbax takes no item and no step there for finished, is written last and goes
  first. A kill in between leaves an epoch that epochckpt reads and stock Orbax does not see; the next claim of the
  directory, or `repair_view`, completes it.
- A new file is created with a conditional write. An existing file is replaced only while this attempt is the epoch: a
  run that was paused here and superseded does not change the files of a newer run.

For an epoch of one item and one node that is nine small objects, and a look at whether the epoch is still the same; its
writer looks once more when the view is whole.
"""

from collections.abc import Callable, Collection

from epochckpt.errors import DamagedError, EpochDeletedError, UnsupportedError
from epochckpt.format import EpochRecord, paths
from epochckpt.orbax import ocdbt, step_files, step_recognition
from epochckpt.orbax.linked_view import check_known, compare_file, damage_of, same
from epochckpt.orbax.step_files import COMMIT, STEP_RECORD
from epochckpt.orbax.view import Views
from epochckpt.orbax.view_layouts import METRICS_FILE, View, copies
from epochckpt.storage import Store

_SMALL = {
    COMMIT,
    STEP_RECORD,
    step_files.TREE_RECORD,
    step_files.OCDBT,
    ocdbt.NODE,
    "_sharding",
    "_strings.json",
    paths.JSON_FILE,
}


def is_of_use(store: Store) -> bool:
    """Whether a view is read there, by stock Orbax."""
    return not store.symlinks and step_files.saves_to(store)


def put(store: Store, folder: str, view: View, still: Callable[[], bool]) -> bool:
    """Writes the view of a committed epoch into its folder; False if it is another epoch by now.

    `still` says whether the epoch is the one whose view it is.
    """
    markers = [path for path in view.files if _is_marker(path)]
    taken: list[str] = []

    def create(path: str) -> None:
        try:
            store.create(paths.join(folder, path), view.files[path])
        except FileExistsError:
            taken.append(path)

    def replace(path: str) -> None:
        store.put(paths.join(folder, path), view.files[path], draft="", replace=True)

    store.each(create, view.files.keys() - markers)
    if taken:  # by an earlier epoch of this number, or by a run that was killed here
        if not still():
            return False
        store.each(lambda path: store.remove(paths.join(folder, path)), markers)
        store.each(replace, list(taken))
    store.each(lambda path: store.copy(paths.join(folder, view.copies[path]), paths.join(folder, path)), view.copies)
    if not still():
        return False
    store.each(replace, [path for path in markers if path != COMMIT])
    replace(COMMIT)
    return True


def _is_marker(path: str) -> bool:
    return path.rpartition("/")[2] == COMMIT


def is_complete(store: Store, folder: str) -> bool:
    """Whether a view was written to its end. One request."""
    try:
        store.size(paths.join(folder, COMMIT))
    except FileNotFoundError:
        return False
    return True


def is_written(store: Store, folder: str, record: EpochRecord, view: View) -> bool:
    """Whether this `view` of an epoch was written to its end; an older epoch of the number may have left its own.

    The step's record tells: it has the times of the save, and what an older epoch left is replaced without the mark.
    """
    recorded = (record.orbax_view or {}).get(STEP_RECORD)
    if recorded is None or not is_complete(store, folder):
        return False
    try:
        return not compare_file(store, paths.join(folder, STEP_RECORD), recorded, view.files.get(STEP_RECORD))
    except FileNotFoundError:
        return False


def remove_rest(store: Store, folder: str, old: EpochRecord, record: EpochRecord) -> None:
    """Removes the files of an old epoch's view that the view of the epoch in its place does not have."""
    if old.orbax_view is not None:
        rest = {*old.orbax_view, *copies(old)} - {*(record.orbax_view or ()), *copies(record)}
        store.each(lambda path: store.remove(paths.join(folder, path)), rest)


def is_small(path: str) -> bool:
    """Whether a file of a view may be called so, as far as it holds nothing that can be restored."""
    *_, above, name = f"/{path}".split("/")
    return name in _SMALL or above == step_files.ARRAY_RECORDS or path == METRICS_FILE


def is_remainder(store: Store, folder: str, files: Collection[str]) -> bool:
    """Whether a folder has only what a late request may have left of a view, and nothing that can be restored.

    Such files carry no mark of ours: they stay, and the view of the next epoch there takes their names.
    """
    if not is_of_use(store) or not files or not all(map(is_small, files)):
        return False
    for path in files:
        if path.endswith(f"/{paths.JSON_FILE}") and not step_recognition.is_our_record(store, paths.join(folder, path)):
            return False
    if STEP_RECORD in files and not step_recognition.is_finished(store, folder):
        return False
    return not step_recognition.is_step(store, folder, lambda name: False)


def remove(store: Store, folder: str, record: EpochRecord | None) -> None:
    """Removes the view of an epoch that goes out of sight; without a record only what makes it a step of Orbax."""
    if record is not None and record.orbax_view is None:
        return
    found = {STEP_RECORD} if record is None else {*(record.orbax_view or ()), *copies(record)}
    markers = {path for path in found if _is_marker(path)} | {COMMIT}
    for group in (markers, found - markers):
        store.each(lambda path: store.remove(paths.join(folder, path)), group)


def check(store: Store, folder: str, record: EpochRecord) -> dict[str, DamagedError] | None:
    """Compares the view of a committed epoch with its record; one that was never made has no damage.

    Returns an error per damaged file, by path in the epoch's folder; None if no file of the view exists.
    """
    if record.orbax_view is None:
        return {}
    view = Views().build(record)
    damage = dict[str, DamagedError]()
    existing = list[str]()

    def look(path: str) -> None:
        at = paths.join(folder, path)
        try:
            if path in view.copies:
                problem = "" if same(store, at, paths.join(folder, view.copies[path])) else "is no copy of its original"
            else:
                problem = compare_file(store, at, (record.orbax_view or {})[path], view.files.get(path))
            existing.append(path)
        except OSError as error:
            problem = damage_of(at, error)
        if problem:
            damage[path] = DamagedError(at, problem)

    store.each(look, sorted({*record.orbax_view, *view.copies}))
    return dict(sorted(damage.items())) if existing else None


def repair(store: Store, folder: str, record: EpochRecord, still: Callable[[], bool]) -> list[str]:
    """Writes anew what is damaged or missing of a view; returns its paths in the epoch's folder. `still`: see `put`."""
    where = f"{store.root}/{folder}"
    if store.symlinks:
        raise UnsupportedError(
            f"{where}: the epoch was copied out of an object store: its Orbax view can be repaired only there. An "
            "export has one"
        )
    damage = check(store, folder, record)
    view = Views().build(record)
    wrong = sorted({*view.files, *view.copies} if damage is None else damage)
    check_known(where, wrong, view.files | view.copies)
    if wrong and not put(store, folder, view, still):
        raise EpochDeletedError(record.epoch, store.root, "while its Orbax view was being repaired")
    return wrong
