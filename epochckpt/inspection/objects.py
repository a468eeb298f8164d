"""The contents of a directory in an object store: the head names the epochs, listings give the sizes.

The names of an attempt's objects contain its id. So one listing of everything is enough to sort them: into epochs,
attempts, epochs that were set aside, strays of late writers, and objects that are not ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from epochckpt import _units
from epochckpt.directory import attached_metrics
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head
from epochckpt.errors import AccessError, EpochCheckpointError
from epochckpt.format import parsing, paths
from epochckpt.inspection import rows
from epochckpt.inspection.leftovers import KEPT, LIVE_SECS, Leftovers, kind_of, silence
from epochckpt.inspection.leftovers import progress as progress_of
from epochckpt.inspection.rows import EpochRow, LeftoverRow, NodeRow

if TYPE_CHECKING:
    from epochckpt.directory.bucket import BucketDirectory
    from epochckpt.storage import File

OWN = paths.HEAD.partition("/")[0]

_LISTED = 4  # folders whose objects one look at a directory lists
_PAGE = 1000  # objects of somebody else's folder that are counted


@dataclasses.dataclass
class Thing:
    """Objects that belong together."""

    path: str  # of an attempt `<folder>/<attempt>`; else the folder, or the name that was set aside
    kind: str  # as that of a row: of an epoch, of a leftover, or `rows.OTHER`
    epoch: int | None = None
    save_id: str = ""
    detail: str = ""
    epochs: tuple[int, ...] = ()  # of what was set aside
    files: list[File] = dataclasses.field(default_factory=list)  # by their paths in the directory

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(file.size for file in self.files)

    def age_secs(self, now_ns: int) -> float | None:
        """How long ago one of them was written last."""
        return max(now_ns - max(file.written_ns for file in self.files), 0) / 1e9 if self.files else None


def sort(
    epoch_directory: BucketDirectory, head: Head, files: Iterable[File], todelete_subdir: str | None = None
) -> list[Thing]:
    """The things that these objects are, by path; those of a folder or of all, by their paths in the directory."""
    found = list(files)
    aside = {entry.save_id: kept.partition("/")[0] for kept, entry in head.aside.items()}
    copies = {folder for file in found if file.path == paths.join(folder := _folder(file), paths.EPOCH_RECORD)}
    records = {save_id for file in found if (save_id := _recorded(file.path))}
    unfinished = {**head.begun, **head.dead}
    listed = _listed_in(epoch_directory, head)
    at = {folder: save_id for save_id, folder in unfinished.items()}
    things = dict[str, Thing]()

    def thing(file: File) -> Thing:
        folder, _, below = file.path.partition("/")
        save_id = paths.save_id_in(below) or ""
        epoch = epoch_directory.names.parse(folder)
        if save_id in aside or folder in aside.values():
            return _aside(epoch_directory, head, aside.get(save_id, folder), todelete_subdir)
        if not save_id and folder in head.removed_steps and folder not in head.epochs:
            if kept_in := head.removed_steps[folder].kept_in:
                return _aside(epoch_directory, head, kept_in, todelete_subdir)
            return Thing(folder, rows.DELETED, epoch, detail="a deleted step of stock Orbax: no reader looks at it")
        if save_id not in unfinished:
            entry = listed.get(folder)
            if entry is not None and (save_id in ("", entry.save_id) or folder not in head.epochs):
                return Thing(folder, rows.COMMITTED, epoch, entry.save_id)
            if not save_id and folder in at:
                save_id = at[folder]
        if unfinished.get(save_id) == folder:
            if save_id in head.dead and save_id in records:
                detail = "a deleted or replaced epoch, or a save that failed at its end: no reader looks at it"
                return Thing(paths.join(folder, save_id), rows.DELETED, epoch, save_id, detail)
            return Thing(paths.join(folder, save_id), rows.ATTEMPT, epoch, save_id)
        if epoch is None:
            return _other(epoch_directory, folder, todelete_subdir)
        if is_stray(head, folder, save_id, copied=folder in copies):
            return Thing(paths.join(folder, save_id), rows.ATTEMPT, epoch, save_id)
        return Thing(folder if folder not in listed else file.path, rows.FOREIGN, epoch, detail=_NOT_OURS)

    for file in found:
        made = thing(file)
        things.setdefault(made.path, made).files.append(file)
    for each in things.values():
        if each.kind != rows.FOREIGN:
            continue
        if save_id := _late(epoch_directory, head, each):
            each.kind = rows.DELETED
            each.save_id = save_id
            each.path = paths.join(each.path, save_id)
            each.detail = "what a run that was killed or overtaken wrote late of a deleted epoch: no reader looks at it"
        elif each.path in copies:
            each.detail = _copied(epoch_directory, each)
    return sorted(things.values(), key=lambda each: each.path)


def _folder(file: File) -> str:
    return file.path.partition("/")[0]


_NOT_OURS = "named like an epoch, and none: the head names no attempt at it"


def _late(epoch_directory: BucketDirectory, head: Head, thing: Thing) -> str:
    """The attempt of this directory of whose epoch these are small copies, and nothing else; empty if they are not."""
    found = set[str | None]()
    for file in thing.files:
        name = file.path.rpartition("/")[2]
        if file.path == paths.join(thing.path, paths.EPOCH_RECORD):
            found.add(_save_id_of(epoch_directory, file.path))
        elif file.path == paths.join(thing.path, name) and paths.parse_metrics_file(name):
            found.add(attached_metrics.save_id_of(epoch_directory.store, file.path))
        else:
            return ""
    save_id = found.pop()
    if save_id is None or found or not head.knows(save_id) or save_id in {*head.named, *head.begun}:
        return ""
    return save_id


def _save_id_of(epoch_directory: BucketDirectory, path: str) -> str | None:
    try:
        record = parsing.read_record(epoch_directory.store, path, parsing.parse_head)
    except EpochCheckpointError:
        return None
    return None if record is None else record.save_id


def _copied(epoch_directory: BucketDirectory, thing: Thing) -> str:
    """What to say of a folder with a commit record that is no epoch."""
    numbers = {save_id.split("-")[1] for file in thing.files if (save_id := paths.save_id_in(file.path))}
    if numbers and str(thing.epoch) not in numbers:
        return f"a copy of checkpoint {', '.join(sorted(numbers))} under another number, which no reader looks at"
    root = epoch_directory.store.root
    return f"an epoch that {paths.HEAD} does not name, such as a copy; `epochckpt repair {root}` can help"


def is_stray(head: Head, folder: str, save_id: str, *, copied: bool) -> bool:
    """Whether an attempt that the head does not name was written by a run that it knows.

    A folder with a commit record that the head does not name was put there by people.
    """
    return head.knows(save_id) and (folder in head.epochs or not copied)


def _listed_in(epoch_directory: BucketDirectory, head: Head) -> dict[str, EpochSummary]:
    """What counts as an epoch, by folder; steps of stock Orbax also where there is no head."""
    return {
        **{epoch_directory.folder(epoch): entry for epoch, entry in epoch_directory.entries().items()},
        **head.listed,
    }


def _recorded(path: str) -> str | None:
    """The attempt whose commit record this is."""
    name = path.partition("/")[2]
    return paths.save_id_in(name) if name.endswith(".json") and "/" not in name else None


def _aside(epoch_directory: BucketDirectory, head: Head, name: str, todelete_subdir: str | None) -> Thing:
    kind, detail = kind_of(name, todelete_subdir) or (rows.QUARANTINED, "epochs that were deleted and kept")
    folders = (kept.partition("/")[2] for kept in head.aside if kept.startswith(f"{name}/"))
    epochs = sorted(epoch for folder in folders if (epoch := epoch_directory.names.parse(folder)) is not None)
    return Thing(name, kind, detail=detail, epochs=tuple(epochs))


def _other(epoch_directory: BucketDirectory, name: str, todelete_subdir: str | None) -> Thing:
    """Something that is named like no epoch."""
    if name != OWN and (kind_of(name, todelete_subdir) or ("", ""))[0] in KEPT:
        return Thing(name, rows.FOREIGN, detail=f"named like what a run sets aside, but {paths.HEAD} does not name it")
    return Thing(name, rows.OTHER)


def all_things(epoch_directory: BucketDirectory, todelete_subdir: str | None = None) -> list[Thing]:
    """All things in the directory, by one listing of everything. The head is read after it: it knows all attempts."""
    files = epoch_directory.store.files("")
    return sort(epoch_directory, epoch_directory.head.read() or Head(), files, todelete_subdir)


def attempts(epoch_directory: BucketDirectory, head: Head, now_ns: int) -> list[EpochRow]:
    """The attempts that have begun and written something: a listing for each."""
    found = _listed(epoch_directory, head, sorted(set(head.begun.values())), None)
    return [attempt_row(epoch_directory, head, each, now_ns) for each in found if each.save_id in head.begun]


def leftovers_of(
    epoch_directory: BucketDirectory, head: Head, now_ns: int, todelete_subdir: str | None = None
) -> Leftovers:
    """Attempts and other things beside the epochs: by a listing of all names, and of the objects of some folders."""
    found = Leftovers()
    aside = {kept.partition("/")[0] for kept in head.aside}
    for name in sorted(aside):
        nbytes = sum(entry.nbytes for kept, entry in head.aside.items() if kept.startswith(f"{name}/"))
        each = _aside(epoch_directory, head, name, todelete_subdir)
        found.others.append(LeftoverRow(name, each.kind, nbytes, None, each.epochs, each.detail))
    try:
        names = [entry.name for entry in epoch_directory.store.list("") if entry.is_folder and entry.name not in aside]
    except AccessError as error:
        found.problems["what lies beside the epochs"] = str(error)
        return found
    begun = sorted(set(head.begun.values()))
    dead = sorted({*head.dead.values(), *head.removed_steps})
    known = {*_listed_in(epoch_directory, head), *begun, *dead, *(kept.partition("/")[2] for kept in head.aside)}
    unknown = [name for name in names if name not in known and epoch_directory.names.parse(name) is not None]
    unknown += [name for name in names if _other(epoch_directory, name, todelete_subdir).kind == rows.FOREIGN]
    folders = list(dict.fromkeys([*begun, *dead, *unknown]))
    for each in _listed(epoch_directory, head, folders[:_LISTED], todelete_subdir, unknown):
        if each.kind == rows.ATTEMPT:
            found.attempts.append(attempt_row(epoch_directory, head, each, now_ns))
        elif each.kind in (rows.FOREIGN, rows.DELETED):
            found.others.append(leftover_row(each, now_ns))
    if more := folders[_LISTED:]:
        some = ", ".join(more[:8]) + (", …" if more[8:] else "")
        what = _units.several(len(more), "more folder holds", "more folders hold")
        found.problems[some] = (
            f"{what} something other than an epoch; `epochckpt du {epoch_directory.store.root}` shows all"
        )
    return found


def _listed(
    epoch_directory: BucketDirectory,
    head: Head,
    folders: Iterable[str],
    todelete_subdir: str | None,
    others: Collection[str] = (),
) -> list[Thing]:
    """The things in some folders. Of `others`, only the first page of objects is listed."""
    found = dict[str, list[Thing]]()

    def look(folder: str) -> None:
        files = epoch_directory.store.files(folder, _PAGE if folder in others else None)
        here = [dataclasses.replace(file, path=paths.join(folder, file.path)) for file in files]
        found[folder] = sort(epoch_directory, head, here, todelete_subdir)
        if folder in others and len(files) >= _PAGE:
            for each in found[folder]:
                each.detail += f" (the first {_units.count(len(files))} objects)"

    epoch_directory.store.each(look, folders)
    return [each for folder in sorted(found) for each in found[folder]]


def attempt_row(epoch_directory: BucketDirectory, head: Head, thing: Thing, now_ns: int) -> EpochRow:
    """The row of an attempt."""
    nodes: dict[str, list[File]] = {}
    for file in thing.files:
        node, found, _ = file.path.rpartition(f"/{thing.save_id}/")
        if found:
            nodes.setdefault(node.rpartition("/")[2], []).append(file)
    parts = []
    for node, written in nodes.items():
        done = any(file.path.endswith(f"/{paths.NODE_RECORD}") for file in written)
        size = sum(file.size for file in written)
        state = "written" if done else "writing"
        parts.append(NodeRow(paths.shown_name(node), size, None, state))
    age = thing.age_secs(now_ns) or 0.0
    state = rows.IN_PROGRESS
    detail = progress_of(parts)
    if thing.save_id not in head.begun:
        state = rows.ABANDONED
        detail = f"{detail}; it was given up, or is of an earlier run: it is never committed"
    elif age >= LIVE_SECS:
        state = rows.ABANDONED
        detail = f"{detail}; {silence(age)}"
    return EpochRow(
        thing.epoch or 0,
        state,
        detail=detail,
        folder=thing.path.partition("/")[0],
        save_id=thing.save_id,
        nodes=tuple(parts),
        nbytes=thing.nbytes,
        started_ns=min(file.written_ns for file in thing.files),
        age_secs=age,
    )


def leftover_row(thing: Thing, now_ns: int) -> LeftoverRow:
    """The row of a thing other than an epoch or an attempt."""
    epochs = thing.epochs or (() if thing.epoch is None else (thing.epoch,))
    return LeftoverRow(thing.path, thing.kind, thing.nbytes, thing.age_secs(now_ns), epochs, thing.detail)


def sizes(epoch_directory: BucketDirectory, folder: str) -> Mapping[str, int]:
    """Bytes of the objects in a folder, by path in it."""
    return {file.path: file.size for file in epoch_directory.store.files(folder)}
