"""What lies in a directory in a bucket, and the removal of garbage there.

The head names the epochs, listings give the sizes. The names of a save's objects contain its id. So one listing of
everything is enough to sort them: into epochs, saves, epochs that were set aside, strays of late writers, and objects
that are not ours.

A save is first declared dead in the head, so that it can never be committed; then its objects are removed. What no head
of the directory has named is not touched. The age of a thing is that of its newest object.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from epochckpt.directory import attached_metrics
from epochckpt.directory.contents import (
    KEPT,
    NOT_OURS,
    AllFiles,
    Contents,
    DiskUsage,
    GarbageRemover,
    Group,
    Kind,
    Leftover,
    Leftovers,
    SavePart,
    UnfinishedSave,
    age_secs,
    epoch_group,
    kind_of,
)
from epochckpt.directory.head_changes import ForgetDead, ForgetKept, GiveUp, Refresh, RemoveKeptSteps
from epochckpt.directory.head_record import EpochSummary, Head
from epochckpt.errors import AccessError, EpochCheckpointError
from epochckpt.format import parsing, paths
from epochckpt.storage import File

if TYPE_CHECKING:
    from epochckpt.directory.bucket_sweep import BucketSweep
    from epochckpt.directory.epoch_directory import EpochDirectory
    from epochckpt.directory.head_object import HeadObject
    from epochckpt.storage import Store

OWN = paths.HEAD.partition("/")[0]
LISTED = 4
"""Folders whose objects a quick look lists."""

_PAGE = 1000  # objects of somebody else's folder that are counted


@dataclasses.dataclass
class _Thing:
    """Objects that belong together."""

    path: str  # of a save `<folder>/<save id>`; else the folder, or the name that was set aside
    kind: Kind
    epoch: int | None = None
    save_id: str = ""
    set_aside: tuple[int, ...] = ()  # the epochs in a folder of epochs that were set aside
    numbers: tuple[str, ...] = ()
    counted: int | None = None
    files: list[File] = dataclasses.field(default_factory=list[File])  # by their paths in the directory

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs that it is about."""
        return self.set_aside or (() if self.epoch is None else (self.epoch,))

    @property
    def usage(self) -> DiskUsage:
        """How much it is, and how old."""
        total = DiskUsage()
        for file in self.files:
            total.count_object(file)
        return total


class BucketContents(Contents):
    """Sorts objects by their names and by the head."""

    def __init__(
        self,
        *,
        epoch_directory: EpochDirectory,
        head: HeadObject,
        sweep: BucketSweep,
        entries: Callable[[], Mapping[int, EpochSummary]],
        todelete_subdir: str | None,
    ):
        self._epoch_directory = epoch_directory
        self._store = epoch_directory.store
        self._names = epoch_directory.names
        self._head = head
        self._sweep = sweep
        self._entries = entries
        self._todelete_subdir = todelete_subdir

    def saves(self) -> list[UnfinishedSave]:
        """See Contents. The head is read first; then it takes a listing for each save that has begun."""
        head = self._head.read()
        if head is None:
            self._epoch_directory.scan()  # raises where there are epochs without a head
            return []
        found = self._listed(head, sorted(set(head.begun.values())))
        return [_save(head, thing) for thing in found if thing.save_id in head.begun]

    def leftovers(self) -> Leftovers:
        """See Contents: by the head as it was seen last, a listing of all names, and of the objects of some folders."""
        head = self._head.seen() or Head()
        found = Leftovers()
        aside = {kept.partition("/")[0] for kept in head.aside}
        for name in sorted(aside):
            nbytes = sum(entry.nbytes for kept, entry in head.aside.items() if kept.startswith(f"{name}/"))
            thing = self._aside(head, name)
            found.others.append(Leftover(path=name, kind=thing.kind, epochs=thing.epochs, nbytes=nbytes, last_ns=None))
        try:
            names = [entry.name for entry in self._store.list("") if entry.is_folder and entry.name not in aside]
        except AccessError as error:
            found.problems[""] = str(error)
            return found
        begun = sorted(set(head.begun.values()))
        dead = sorted({*head.dead.values(), *head.removed_steps})
        known = {*self._listed_in(head), *begun, *dead, *(kept.partition("/")[2] for kept in head.aside)}
        unknown = [name for name in names if name not in known and self._names.parse(name) is not None]
        unknown += [name for name in names if self._other(name).kind is Kind.UNLISTED_KEPT]
        folders = list(dict.fromkeys([*begun, *dead, *unknown]))
        listed = self._listed(head, folders[:LISTED], unknown)
        # What is kept is in `found` already, from the head.
        self._sort_into(found, head, [thing for thing in listed if thing.kind not in KEPT])
        found.unlisted.extend(folders[LISTED:])
        return found

    def all_leftovers(self) -> Leftovers:
        found = Leftovers()
        head, things = self._all_things()
        self._sort_into(found, head, things)
        return found

    def all_files(self) -> AllFiles:
        head, things = self._all_things()
        groups = [
            Group(
                path=thing.path,
                kind=thing.kind,
                epochs=thing.epochs,
                files=thing.files,
                given_up=thing.kind is Kind.SAVE and thing.save_id not in head.begun,
            )
            for thing in things
        ]
        return AllFiles(groups, {})

    def files_in(self, folder: str) -> AllFiles:
        return AllFiles([epoch_group(self._names, folder, self._store.files(folder))], {})

    def measure(self, path: str) -> DiskUsage | None:
        return measured(self._epoch_directory, path)

    def remover(self, clock: Callable[[], float]) -> BucketRemover:
        return BucketRemover(store=self._store, head=self._head, sweep=self._sweep, clock=clock)

    def _all_things(self) -> tuple[Head, list[_Thing]]:
        """All things, by one listing of everything. The head is read after it: it knows all saves."""
        files = self._store.files("")
        head = self._head.read() or Head()
        return head, self._sorted(head, files)

    def _sort_into(self, found: Leftovers, head: Head, things: Iterable[_Thing]) -> None:
        for thing in things:
            if thing.kind is Kind.SAVE:
                found.saves.append(_save(head, thing))
            elif thing.kind not in (Kind.EPOCH, Kind.OTHER):
                found.others.append(_leftover(thing))

    def _listed(self, head: Head, folders: Iterable[str], others: Collection[str] = ()) -> list[_Thing]:
        """The things in some folders. Of `others`, only the first page of objects is listed."""
        found = dict[str, list[_Thing]]()

        def look(folder: str) -> None:
            files = self._store.files(folder, _PAGE if folder in others else None)
            here = [dataclasses.replace(file, path=paths.join(folder, file.path)) for file in files]
            found[folder] = self._sorted(head, here)
            if folder in others and len(files) >= _PAGE:
                for thing in found[folder]:
                    thing.counted = len(files)

        self._store.each(look, folders)
        return [thing for folder in sorted(found) for thing in found[folder]]

    def _sorted(self, head: Head, files: Iterable[File]) -> list[_Thing]:
        """The things that these objects are, by path; those of a folder or of all, by their paths in the directory."""
        found = list(files)
        aside = {entry.save_id: kept.partition("/")[0] for kept, entry in head.aside.items()}
        copies = {folder for file in found if file.path == paths.join(folder := _folder(file), paths.EPOCH_RECORD)}
        records = {save_id for file in found if (save_id := _recorded(file.path))}
        unfinished = {**head.begun, **head.dead}
        listed = self._listed_in(head)
        at = {folder: save_id for save_id, folder in unfinished.items()}
        things = dict[str, _Thing]()

        def thing_of(file: File) -> _Thing:
            folder, _, below = file.path.partition("/")
            save_id = paths.save_id_in(below) or ""
            epoch = self._names.parse(folder)
            if save_id in aside or folder in aside.values():
                return self._aside(head, aside.get(save_id, folder))
            if not save_id and folder in head.removed_steps and folder not in head.epochs:
                if kept_in := head.removed_steps[folder].kept_in:
                    return self._aside(head, kept_in)
                return _Thing(folder, Kind.REMOVED_STEP, epoch)
            if save_id not in unfinished:
                entry = listed.get(folder)
                if entry is not None and (save_id in ("", entry.save_id) or folder not in head.epochs):
                    return _Thing(folder, Kind.EPOCH, epoch, entry.save_id)
                if not save_id and folder in at:
                    save_id = at[folder]
            if unfinished.get(save_id) == folder:
                kind = Kind.DEAD_EPOCH if save_id in head.dead and save_id in records else Kind.SAVE
                return _Thing(paths.join(folder, save_id), kind, epoch, save_id)
            if epoch is None:
                return self._other(folder)
            if _is_stray(head, folder, save_id, copied=folder in copies):
                return _Thing(paths.join(folder, save_id), Kind.SAVE, epoch, save_id)
            return _Thing(folder if folder not in listed else file.path, Kind.NOT_LISTED, epoch)

        for file in found:
            made = thing_of(file)
            things.setdefault(made.path, made).files.append(file)
        for thing in things.values():
            if thing.kind not in NOT_OURS:
                continue
            if save_id := self._late(head, thing):
                thing.kind = Kind.LATE_COPY
                thing.save_id = save_id
                thing.path = paths.join(thing.path, save_id)
            elif thing.path in copies:
                _note_copy(thing)
        return sorted(things.values(), key=lambda thing: thing.path)

    def _late(self, head: Head, thing: _Thing) -> str:
        """The save of this directory of whose epoch these are small copies, and nothing else; empty if they are not."""
        found = set[str | None]()
        for file in thing.files:
            name = file.path.rpartition("/")[2]
            if file.path == paths.join(thing.path, paths.EPOCH_RECORD):
                found.add(self._save_id_of(file.path))
            elif file.path == paths.join(thing.path, name) and paths.parse_metrics_file(name):
                found.add(attached_metrics.save_id_of(self._store, file.path))
            else:
                return ""
        save_id = found.pop()
        if save_id is None or found or not head.knows(save_id) or save_id in {*head.named, *head.begun}:
            return ""
        return save_id

    def _save_id_of(self, path: str) -> str | None:
        try:
            record = parsing.read_record(self._store, path, parsing.parse_head)
        except EpochCheckpointError:
            return None
        return None if record is None else record.save_id

    def _listed_in(self, head: Head) -> dict[str, EpochSummary]:
        """What counts as an epoch, by folder; steps of stock Orbax also where there is no head."""
        return {
            **{self._epoch_directory.folder(epoch): entry for epoch, entry in self._entries().items()},
            **head.listed,
        }

    def _aside(self, head: Head, name: str) -> _Thing:
        folders = (kept.partition("/")[2] for kept in head.aside if kept.startswith(f"{name}/"))
        epochs = sorted(epoch for folder in folders if (epoch := self._names.parse(folder)) is not None)
        return _Thing(name, kind_of(name, self._todelete_subdir) or Kind.SET_ASIDE, set_aside=tuple(epochs))

    def _other(self, name: str) -> _Thing:
        """Something that is named like no epoch."""
        is_kept = name != OWN and kind_of(name, self._todelete_subdir) in KEPT
        return _Thing(name, Kind.UNLISTED_KEPT if is_kept else Kind.OTHER)


def measured(epoch_directory: EpochDirectory, path: str) -> DiskUsage | None:
    """Measures the objects below a path, by one listing; None if there are none."""
    total = DiskUsage()
    try:
        for file in epoch_directory.store.files(path):
            total.count_object(file)
    except OSError as error:
        total.note(error)
    return total if total.entries or total.problem else None


def sizes(store: Store, folder: str) -> dict[str, int]:
    """Bytes of the objects in a folder, by path in it."""
    return {file.path: file.size for file in store.files(folder)}


def _folder(file: File) -> str:
    return file.path.partition("/")[0]


def _recorded(path: str) -> str | None:
    """The save whose commit record this is."""
    name = path.partition("/")[2]
    return paths.save_id_in(name) if name.endswith(".json") and "/" not in name else None


def _is_stray(head: Head, folder: str, save_id: str, *, copied: bool) -> bool:
    """Whether a save that the head does not name was written by a run that it knows.

    A folder with a commit record that the head does not name was put there by people.
    """
    return head.knows(save_id) and (folder in head.epochs or not copied)


def _note_copy(thing: _Thing) -> None:
    """Notes what a folder with a commit record is that is no epoch."""
    numbers = {save_id.split("-")[1] for file in thing.files if (save_id := paths.save_id_in(file.path))}
    thing.kind = Kind.UNLISTED_EPOCH
    if numbers and str(thing.epoch) not in numbers:
        thing.kind = Kind.RENUMBERED_COPY
        thing.numbers = tuple(sorted(numbers))


def _save(head: Head, thing: _Thing) -> UnfinishedSave:
    nodes: dict[str, list[File]] = {}
    for file in thing.files:
        node, found, _ = file.path.rpartition(f"/{thing.save_id}/")
        if found:
            nodes.setdefault(node.rpartition("/")[2], []).append(file)
    parts = [
        SavePart(
            node=paths.shown_name(node),
            nbytes=sum(file.size for file in files),
            secs=None,
            is_written=any(file.path.endswith(f"/{paths.NODE_RECORD}") for file in files),
        )
        for node, files in nodes.items()
    ]
    usage = thing.usage
    return UnfinishedSave(
        path=thing.path,
        folder=thing.path.partition("/")[0],
        epoch=thing.epoch or 0,
        save_id=thing.save_id,
        parts=tuple(parts),
        nbytes=usage.nbytes,
        started_ns=usage.oldest_ns,
        last_ns=usage.last_ns,
        given_up=thing.save_id not in head.begun,
    )


def _leftover(thing: _Thing) -> Leftover:
    usage = thing.usage
    return Leftover(
        path=thing.path,
        kind=thing.kind,
        epochs=thing.epochs,
        nbytes=usage.nbytes,
        last_ns=usage.last_ns,
        save_id=thing.save_id,
        numbers=thing.numbers,
        counted=thing.counted,
    )


class BucketRemover(GarbageRemover):
    """Declares dead what may go, and has the sweep remove its objects."""

    def __init__(self, *, store: Store, head: HeadObject, sweep: BucketSweep, clock: Callable[[], float]):
        super().__init__(clock)
        self._store = store
        self._head = head
        self._sweep = sweep
        self._looked_ns = self.now_ns()  # ages are those at the look, before which this object is made
        self._is_clock_read = False

    def remove(self, thing: UnfinishedSave | Leftover, refusal: Callable[[float], str]) -> str:
        if not self._is_clock_read:
            self._ahead_secs = max(time.time() - self._storage_ns() / 1e9, 0.0)
            self._is_clock_read = True
        if reason := refusal((age_secs(thing.last_ns, self._looked_ns) or 0.0) - self._ahead_secs):
            return reason
        folder = thing.path.partition("/")[0]
        if isinstance(thing, UnfinishedSave) or thing.kind in (Kind.DEAD_EPOCH, Kind.LATE_COPY):
            self._bury({thing.save_id: folder})
        elif thing.kind is Kind.REMOVED_STEP:
            self._sweep.finish_step(folder)
        else:
            self._bury_aside(thing.path)
        return ""

    def finish_replaced_step(self, folder: str) -> None:
        self._sweep.finish_step(folder)

    def _storage_ns(self) -> int:
        """The time by the store's clock, nanoseconds since 1970: that of a change of the head, which is made now."""
        folder, _, name = paths.HEAD.partition("/")
        self._head.write(Refresh())
        return next(file.written_ns for file in self._store.files(folder) if file.path == name)

    def _bury(self, save_ids: Mapping[str, str]) -> None:
        """Removes saves, by id the folder, also those that a run has begun: from now on they are dead."""
        named = self._head.write(GiveUp(incarnation=None, save_ids=frozenset(save_ids))).head.named
        self._sweep.remove_dead({save_id: folder for save_id, folder in save_ids.items() if save_id not in named})
        self._head.write(ForgetDead(frozenset(self._head.swept)))

    def _bury_aside(self, name: str) -> None:
        """Removes the epochs that were set aside under a name."""
        now = self._head.write(RemoveKeptSteps(name)).head
        kept = {place: entry for place, entry in now.aside.items() if place.startswith(f"{name}/")}
        for folder in (folder for folder, step in now.removed_steps.items() if not step.kept_in):
            self._sweep.finish_step(folder)
        self._store.remove_tree(name)  # named by the head until nothing is left: the next one goes on
        self._bury(self._head.write(ForgetKept(kept)).head.dead)
