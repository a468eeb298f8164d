"""EpochDirectory on stores without rename (object stores), by conditional writes of one object, the `head`.

Guarantees:
- every object of an attempt carries the attempt's id, and no two attempts share an id. So nothing is overwritten, and
  an older run that still writes or removes objects touches only its own, however late it does so;
- claiming, beginning, committing, replacing, deleting and going back are one change of the head each, on condition that
  it has not changed: whatever an older run tries fails once a newer one has claimed;
- an attempt that an older run has begun is dead from the claim on, and only what dead attempts wrote is ever removed;
- a change whose answer was lost is looked for in the head before it is repeated, or called failed.

An epoch's commit record is `<epoch>/<attempt>.json`. Its copy, `epoch.json`, and the records of epochs that were set
aside are for people who copy folders, and for `repair`: nothing that the head tells is read from them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt.directory import bucket_listing, head_turns, metrics_log, object_log, owners
from epochckpt.directory.bucket_contents import BucketContents, sizes
from epochckpt.directory.bucket_sweep import BucketSweep
from epochckpt.directory.epoch_directory import EpochDirectory, ReplaceCondition, Rollback, Stager, Staging, Writer
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_changes import (
    BeginSave,
    ClaimHead,
    GiveUp,
    Incarnation,
    KeepDeleted,
    LogDeleted,
    LogGoneBack,
    PublishEpoch,
    Release,
    UnlistEpochs,
)
from epochckpt.directory.head_object import HeadObject
from epochckpt.directory.head_record import Head
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.directory.object_log import ObjectLog
from epochckpt.errors import (
    AccessError,
    DamagedError,
    EpochCheckpointError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    NotACheckpointDirectoryError,
    SaveError,
    StorageError,
    UncertainError,
)
from epochckpt.format import EpochRecord, parsing, paths, records
from epochckpt.orbax import StepNames, steps
from epochckpt.storage import Conflicts, Store, rounds

_KEPT, _KEPT_BYTES = 4, 1 << 20  # records that are remembered, and the largest of them
_unsure: set[tuple[str, str | None]] = set()  # (directory, save id) of steps of stock Orbax whose record leaves doubts

CHECKED_REQUESTS = 10
"""About how many requests a look at a bucket takes to check files: two for an epoch of some hundred nodes."""


class BucketDirectory(EpochDirectory):
    """Epochs are what the head names."""

    save_ids_in_paths = True

    def __init__(self, store: Store, names: StepNames):
        super().__init__(store, names)
        self.head = HeadObject(store)
        self._entries: tuple[Head | None, dict[int, EpochSummary]] = None, {}  # of a head, by epoch
        self._headless: Head | None = None  # what there is of stock Orbax, while there is no head
        # Paths and contents of records, by folder and attempt. Replaced as a whole: threads share it.
        self._records: dict[tuple[str, str], tuple[str, bytes]] = {}

    def scan(self) -> tuple[list[int], dict[int, str]]:
        found = self.head.read()
        if found is None:
            beside, stock = self.beside(Head())
            if lost := next(filter(self._is_copy, sorted(beside)), ""):
                raise NotACheckpointDirectoryError(
                    f"{self.store.root} holds epochs ({paths.join(lost, paths.EPOCH_RECORD)}, …), but not the "
                    f"record of which ones count, {paths.HEAD}. If that is all there should be, `epochckpt repair "
                    f"{self.store.root}` writes it anew; one epoch is shown by `epochckpt show {self.store.root}/"
                    f"{lost}`"
                )
            self._headless = Head(stock=stock)
            foreign = beside.keys() - stock.keys()
        else:
            foreign = [name for name in found.foreign if name not in found.epochs]
        self._take_folders(found or self._headless or Head())
        numbers = {name: self.names.parse(name) for name in foreign}
        return sorted(self._folders), {e: name for name, e in numbers.items() if e is not None}

    def _take_folders(self, found: Head) -> None:
        folders: dict[int, str] = {}
        self.names.learn(found.listed)
        for folder in found.listed:
            epoch = self.names.parse(folder)
            if epoch is not None and (epoch not in folders or folder == self.names.build(epoch)):
                folders[epoch] = folder
        self._folders = folders

    def entries(self) -> dict[int, EpochSummary]:
        """What the head says of each epoch; as of the last look, or of one that is made now."""
        if self.head.last is None and self._headless is None:
            self.scan()
        found = self.head.last or self._headless or Head()
        if self._entries[0] is not found:
            self._take_folders(found)
            self._entries = found, {epoch: found.listed[folder] for epoch, folder in self._folders.items()}
        return self._entries[1]

    def read_summary(self, epoch: int) -> EpochSummary:
        entry = self.entries().get(epoch)
        if entry is None:
            self.head.read()
            entry = self.entries().get(epoch)
        if entry is None:
            raise self._unknown(epoch)
        if entry.large:
            return dataclasses.replace(EpochSummary.of(self.read_head(epoch)), attached=entry.attached)
        return entry

    def read_save_id(self, epoch: int) -> str | None:
        self.head.read()
        return self.seen_save_id(epoch)

    def seen_save_id(self, epoch: int) -> str | None:
        entry = self.entries().get(epoch)
        return entry.save_id if entry else None

    def _read(self, epoch: int, parse: Callable[[str, bytes], EpochRecord]) -> EpochRecord:
        self.head.read()
        return self.read_seen(epoch, parse)

    def read_seen(self, epoch: int, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head) -> EpochRecord:
        """The commit record of an epoch that the head named at the last look; one request while it still does."""
        entry = self.entries().get(epoch)
        if entry is None:
            raise self._unknown(epoch)
        folder = self._folders[epoch]
        if entry.stock:
            with suppress(FileNotFoundError):
                if self._is_orbax(folder):
                    return steps.read(self.store, folder, epoch)
            raise EpochNotFoundError(epoch, self.store.root, [e for e in self.entries() if e != epoch])
        while True:
            record = self.record_of(folder, entry.save_id, parse)
            if record is not None:
                return record
            # Deleted or replaced since the look at the head, or lost.
            self.head.read()
            now = self.entries().get(epoch)
            if now is None:
                raise self._unknown(epoch)
            if now.save_id == entry.save_id:
                problem = f"is missing, and {paths.HEAD} names it: checkpoint {epoch} cannot be read"
                raise DamagedError(_record_path(folder, entry.save_id), problem)
            entry = now

    def record_of(
        self, folder: str, save_id: str, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> EpochRecord | None:
        """The commit record of an attempt, or else its copy; it may be remembered, since it never changes."""
        key = (folder, save_id)
        known = self._records.get((folder, save_id))
        if known is not None:
            return parse(*known)

        def parsed(path: str, data: bytes) -> tuple[EpochRecord, bytes]:
            return parse(path, data), data

        for path in (_record_path(folder, save_id), paths.join(folder, paths.EPOCH_RECORD)):
            record, data = parsing.read_record(self.store, path, parsed) or (None, b"")
            if record is not None and record.save_id == save_id:
                if record.epoch != self.names.parse(folder):
                    raise FormatError(path, f"is the record of checkpoint {record.epoch}, found in the folder {folder}")
                if len(data) <= _KEPT_BYTES:
                    self._records = dict([*self._records.items(), (key, (path, data))][-_KEPT:])
                return record
        return None

    def forget_records(self) -> None:
        """See EpochDirectory."""
        self._records = {}

    def read_in(
        self, folder: str, epoch: int, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> EpochRecord | None:
        if "/" in folder:
            return super().read_in(folder, epoch, parse)
        found = self.head.seen() or Head()
        return self.record_of(folder, found.epochs[folder].save_id, parse) if folder in found.epochs else None

    def rollback(self) -> Rollback | None:
        return None  # it is one change of the head

    def attached(self) -> Mapping[int, tuple[str, Mapping[str, Mapping[str, Any]]]] | None:
        return {epoch: (entry.save_id, entry.attached) for epoch, entry in self.entries().items() if entry.attached}

    def deleted(self) -> dict[int, metrics_log.Line]:
        return object_log.deleted(self.store, self.head.seen() or Head())

    def check_shallow(self, record: EpochRecord, *, is_partial: bool = False) -> None:
        """See EpochDirectory."""
        del record, is_partial

    def has_something(self, epoch: int) -> bool:
        return epoch in self.list_epochs()

    def is_ours(self, epoch: int) -> bool:
        """As of the last look."""
        save_id = self.seen_save_id(epoch)
        return save_id is not None and paths.save_id_in(save_id) is not None

    def is_certain_step(self, epoch: int) -> bool:
        """See EpochDirectory. A step that was found not to be certain is not read again."""
        step = self.store.root, self.seen_save_id(epoch)
        if step in _unsure:
            return False
        sure = super().is_certain_step(epoch)
        if not sure:
            _unsure.add(step)
        return sure

    def _is_copy(self, folder: str) -> bool:
        return self.store.exists(paths.join(folder, paths.EPOCH_RECORD))

    def obstacle(self, folder: str) -> str:
        if self._is_copy(folder):
            found = f"{self.store.root}/{folder} is an epoch that {paths.HEAD} does not name, such as a copy"
            return f"{found}. `epochckpt repair {self.store.root}` takes it in; or move the folder away"
        return super().obstacle(folder)

    def beside(self, known: Head) -> tuple[dict[str, set[str] | None], dict[str, EpochSummary]]:
        """See `bucket_listing.folders`; and those of them that are steps of stock Orbax."""
        found = bucket_listing.folders(self.store, self.names, known)
        others = [name for name, save_ids in found.items() if save_ids is None or name in known.stock]
        return found, bucket_listing.steps_in(self.store, self.names, others, known)

    def owners(self) -> list[Any]:
        found = self.head.read()
        return [] if found is None or found.closed else [found.owner]

    def lineage(self) -> Lineage | None:
        found = self.head.read()
        return None if found is None else found.lineage

    # -- claiming ------------------------------------------------------------------------------------------------

    def claim(
        self,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        lineage: ClaimLineage | ClaimDirectly = ClaimDirectly(),  # noqa: B008 (a frozen value)
    ) -> BucketWriter:
        owner = owners.current()
        conflicts = Conflicts()
        for _ in rounds():
            seen = self.head.look()
            old = None if seen is None else seen.head
            pages = self.store.find(paths.HEAD_PAGE_PREFIX, paths.HEAD.rpartition("/")[0]) if old else []
            check()
            beside, stock = self.beside(old or Head())
            if old is None and any(map(self._is_copy, beside)):
                self.scan()  # raises
            change = ClaimHead(owner=owner, lineage=lineage, beside=beside, stock=stock)
            with self.head.turns.taken(head_turns.SAVES):
                claimed = self.head.swap(seen, change.apply(old or Head()))
            if claimed is not None:
                break
            logging.info("%s: another run claims it at this moment", self.store.root)
            conflicts.note(seen.data if seen else b"")
        else:
            raise conflicts.error(f"{self.store.root}/{paths.HEAD}")
        new = claimed
        writer = BucketWriter(self, new.incarnation)
        self.taken_over = None
        if old is not None and not old.closed:
            self.taken_over = old.incarnation, owners.report_takeover(self.store.root, lambda: old.owner)
        copies = sorted(name for name, save_ids in beside.items() if save_ids is not None)
        writer.clean_up(new, copies, sorted({*pages} - {page.path for page in new.pages}), is_first=old is None)
        return writer

    def join(self, incarnation: str) -> BucketStager:
        return BucketStager(self, incarnation)

    # -- contents ------------------------------------------------------------------------------------------------

    def sweep(self) -> BucketSweep:
        """What removes objects that nobody needs any more."""
        return BucketSweep(self.store, self.head, partial(self.record_of, parse=parsing.parse_epoch))

    def contents(self, todelete_subdir: str | None = None) -> BucketContents:
        return BucketContents(
            epoch_directory=self,
            head=self.head,
            sweep=self.sweep(),
            entries=self.entries,
            todelete_subdir=todelete_subdir,
        )

    # -- the cheapest looks --------------------------------------------------------------------------------------

    @property
    def has_cheap_reads(self) -> bool:
        return False

    def refresh(self) -> bool:
        return self.head.read() is not None

    def check_is_named(self) -> None:
        self.scan()

    def seen_epochs(self) -> list[int]:
        return sorted(self.entries())

    def folders(self, hidden: Collection[int]) -> dict[int, str]:
        return {epoch: self.folder(epoch) for epoch in self.entries() if epoch not in hidden}

    def current_folder(self, epoch: int) -> str | None:
        self.head.read()
        return self.folder(epoch) if epoch in self.entries() else None

    def look_in(self, folder: str, epoch: int) -> EpochRecord:
        del folder
        return self.read_seen(epoch)

    def summary(self, folder: str, epoch: int) -> EpochSummary:
        """See EpochDirectory. No request; raises EpochNotFoundError if the head named no such epoch."""
        del folder
        entry = self.entries().get(epoch)
        if entry is None:
            raise EpochNotFoundError(epoch, self.store.root, list(self.entries()))
        return entry

    def lacking_metrics(self) -> Collection[int]:
        return {epoch for epoch, entry in self.entries().items() if entry.large}

    def replaced(self, seen: Mapping[int, str]) -> set[int]:
        """See EpochDirectory. The head as it was seen last tells it of all epochs."""
        return {epoch for epoch, save_id in seen.items() if self.seen_save_id(epoch) not in (None, save_id)}

    def sizes(self, folder: str) -> Mapping[str, int]:
        return sizes(self.store, folder)

    @property
    def check_budget(self) -> int:
        return CHECKED_REQUESTS

    def check_cost(self, epoch: int, nodes: int, *, stock: bool) -> int:
        """See EpochDirectory: one request for the record, and one for each thousand objects."""
        del nodes, stock
        entry = self.entries().get(epoch)
        return 2 + 2 * (entry.nodes if entry else 0) // 1000

    def is_about_store(self, error: Exception) -> bool:
        return isinstance(error, StorageError | AccessError)

    def named_otherwise(self) -> str:
        return ""  # the head knows the epochs by their folders


class BucketStager(Stager):
    """Says where the nodes of a save write in a bucket."""

    def __init__(self, directory: BucketDirectory, incarnation: str):
        super().__init__(incarnation)
        self._directory = directory
        self._claimed = Incarnation(directory.store.root, incarnation)

    def staging(self, epoch: int, save_id: str) -> BucketStaging:
        return BucketStaging(self._directory.store, epoch, save_id, self._directory.names.build(epoch))

    def check(self, epoch: int) -> None:
        found = self._directory.head.read()
        if found is not None:
            self._claimed.check(found, epoch)


class BucketStaging(Staging):
    """Each folder in it carries the save's id: no other save ever writes there."""

    def node_folder(self, node: str) -> str:
        return paths.join(self.folder, paths.part_folder(paths.folder_name(node), self.save_id))

    def data_folder(self, node: str, item: str) -> str:
        return paths.join(self.folder, paths.part_folder(paths.folder_name(node), self.save_id, item))


class BucketWriter(Writer):
    """The right of the run that the head names: each of its changes is one conditional write of the head."""

    def __init__(self, directory: BucketDirectory, incarnation: str):
        super().__init__(directory, incarnation)
        self.directory: BucketDirectory = directory
        self._head = directory.head
        self._claimed = Incarnation(directory.store.root, incarnation)
        self._stager = BucketStager(directory, incarnation)
        self._sweep = directory.sweep()
        self._views = self._sweep.views
        self._log = ObjectLog(directory.store, directory.head)
        self._copying = threading.RLock()  # held where the copy of a record is written, or removed

    def staging(self, epoch: int, save_id: str) -> BucketStaging:
        return self._stager.staging(epoch, save_id)

    def check(self, epoch: int) -> None:
        self._stager.check(epoch)

    def clean_up(self, now: Head, copies: Iterable[str], pages: Collection[str], *, is_first: bool) -> None:
        """Removes what earlier runs left, as a claim has found it: most of it in the background.

        `now` is the head of the claim. `copies`: folders that have copies of records, and no epoch. `pages`: that the
        head does not name. `is_first`: there was no head.
        """
        if is_first:
            self._views.guard()
        for name in copies:
            _threads.logged(f"{self.store.root}/{name}: a copy of a record stays", partial(self._tidy, name, now))
        if now.dead:
            logging.info("%s: removing what earlier runs left of %d saves", self.store.root, len(now.dead))
            _threads.start(lambda: _threads.logged(self.store.root, lambda: self._sweep.remove_dead(now.dead)))

        def finish() -> None:
            if pages:  # a writer was killed before it named them, or before it removed them
                _threads.logged(f"{self.store.root}: {min(pages)} stays", lambda: self.store.remove_all(pages))
            self._remove_steps(now.removed_steps)
            _threads.logged(self.store.root, lambda: self._views.finish(now))

        _threads.start(finish)

    def keep_deleted(self, lines: Iterable[metrics_log.Line]) -> None:
        change = KeepDeleted(incarnation=self._claimed, lines=tuple(lines))
        self._log.move(self._head.write(change).head)

    def _tidy(self, folder: str, now: Head) -> None:
        """Removes the copies of a record and of metrics where there is no epoch, but for those that are set aside."""
        save_id = bucket_listing.copied_save_id(self.store, folder)
        kept = {where: entry for where, entry in now.aside.items() if entry.save_id == save_id}
        if kept:
            self._copy_aside(kept)
        elif save_id is None or now.knows(save_id):
            copies = [] if save_id is None else [paths.join(folder, paths.EPOCH_RECORD)]
            self.store.remove_all([*copies, *self.store.find(paths.METRICS_PREFIX, folder)])

    def stage(self, epoch: int, save_id: str) -> BucketStaging:
        staging = self.staging(epoch, save_id)
        if staging.folder in (self._head.seen() or Head()).removed_steps:
            self._sweep.finish_step(staging.folder, self._claimed)
        change = BeginSave(incarnation=self._claimed, epoch=epoch, folder=staging.folder, save_id=save_id)
        self._head.write(change)
        return staging

    def write_view(self, record: EpochRecord, run: Callable[[list[Callable[[], None]]], None]) -> EpochRecord:
        """See Writer. The view is only planned and noted: `publish` returns what writes it, after the commit."""
        del run
        return self._views.plan(record)

    def publish(
        self, staging: Staging, record: bytes, check: Callable[[], None], replaces: ReplaceCondition | None
    ) -> Callable[[], None] | None:
        epoch = staging.epoch
        save_id = staging.save_id
        folder = staging.folder
        path = _record_path(folder, save_id)
        entry = EpochSummary.for_head(parsing.parse_head(path, record))
        self.store.create(path, record)
        check()
        may_replace = frozenset[str]()
        kept_in: str | None = None
        if replaces is not None:
            may_replace = None if replaces.save_id is None else frozenset({replaces.save_id})
            kept_in = f"{paths.DAMAGED_PREFIX}{paths.new_id()}" if replaces.damage else None
        change = PublishEpoch(
            incarnation=self._claimed,
            epoch=epoch,
            folder=folder,
            entry=entry,
            may_replace=may_replace,
            kept_in=kept_in,
        )
        seen = self._head.seen()  # our own run alone changes what is listed in it
        # The decisive step: one conditional write.
        try:
            before = self._head.write(change).before
        except (FencedError, SaveError):
            raise
        except (EpochCheckpointError, OSError) as error:
            try:
                committed = self._give_up(staging)
            except FencedError:
                raise
            except (EpochCheckpointError, OSError) as problem:
                reason = f"the head could not be changed ({error}), nor can it be read whether it was ({problem})"
                raise UncertainError(epoch, reason) from error
            if not committed:
                raise SaveError(epoch, f"the head could not be changed: {error}") from error
            before = seen
        self.directory.note_folder(epoch, folder)
        was = None if before is None else before.listed.get(folder)
        if was is not None and kept_in is not None:
            logging.warning("%s: the damaged checkpoint %d was set aside in %s", self.store.root, epoch, kept_in)
            self._copy_aside({paths.join(kept_in, folder): was})
        copy = partial(self._copy_record, folder, save_id, record)
        steps: list[Callable[[], object]] = [partial(_threads.logged, f"{self.store.root}: the copy of a record", copy)]
        if was is not None and was.stock:
            steps.append(partial(self._remove_steps, [folder]))
        steps += self._views.after_commit(folder, save_id, was)
        if was is not None and not was.stock and kept_in is None:
            steps.append(partial(self._sweep.remove_dead, {was.save_id: folder}))
        return partial(_threads.Pool(1).run, steps)

    def _copy_record(self, folder: str, save_id: str, record: bytes) -> None:
        """Copies the record of a committed epoch; that of a newer one stays, however late this is."""
        path = paths.join(folder, paths.EPOCH_RECORD)
        with self._copying, suppress(FileExistsError):
            if (self._head.seen() or Head()).has(folder, save_id):  # it may have been set aside since
                self.store.create(path, record)
            return
        there = self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES)  # of the epoch that gave way
        if (self._head.read() or Head()).has(folder, save_id):
            self.store.replace(path, there, record)

    def _give_up(self, staging: Staging) -> bool:
        """Makes sure that a save is never committed, unless it has been; returns whether it has."""
        change = GiveUp(incarnation=self._claimed, save_ids=frozenset({staging.save_id}), epoch=staging.epoch)
        return self._head.write(change).head.has(staging.folder, staging.save_id)

    def discard(self, staging: Staging) -> None:
        if not self._give_up(staging):
            self._sweep.remove_dead({staging.save_id: staging.folder})

    def unlist(self, epoch: int, kept_in: str | None = None, *, logged: bool = False) -> Callable[[], None]:
        folder = self.directory.folder(epoch)
        seen = self._head.seen() or Head()
        occupied = kept_in is not None and folder in seen.listed and self.store.files(paths.join(kept_in, folder), 1)
        change = UnlistEpochs(
            incarnation=self._claimed,
            epoch=epoch,
            folders=(folder,),
            kept_in=kept_in,
            occupied=frozenset({folder} if occupied else ()),
            log=self._logging(seen, folder) if logged else None,
        )
        before = self._head.write(change).before or Head()
        self.directory.note_folder(epoch, None)
        gone = change.gone(before)
        steps: list[Callable[[], None]] = [lambda: self._log.move(self._head.seen())]
        if kept_in is not None:
            self._copy_aside(change.kept(before))
        elif any(entry.stock for entry in gone.values()):
            steps.insert(0, partial(self._sweep.finish_step, folder, self._claimed))
        else:
            steps.insert(0, partial(self._sweep.remove_dead, {entry.save_id: folder for entry in gone.values()}))
        return partial(_threads.Pool(1).run, steps)

    def _logging(self, seen: Head, folder: str) -> LogDeleted:
        """What the deletion of an epoch adds to the log; metrics that the head does not have are read here."""
        log = LogDeleted(self.names)
        if not log.needs_metrics(seen, folder):
            return log
        save_id = seen.listed[folder].save_id
        with suppress(EpochCheckpointError, OSError):  # whatever it is, the epoch is deleted
            record = self.directory.record_of(folder, save_id)
            if record is not None:
                log = dataclasses.replace(log, large={save_id: record.metrics})
        return log

    def roll_back(self, rollback: Rollback) -> None:
        listed = (self._head.seen() or Head()).listed
        change = UnlistEpochs(
            incarnation=self._claimed,
            epoch=rollback.about,
            folders=tuple(folder for folder in listed if self.names.parse(folder) in rollback.epochs),
            kept_in=rollback.folder,
            log=LogGoneBack(rollback.about),
        )
        self._copy_aside(change.kept(self._head.write(change).before or Head()))

    def _move_rolled_back(self, rollback: Rollback) -> None:
        del rollback  # it is done at once

    def _remove_steps(self, folders: Iterable[str]) -> None:
        """Moves or removes steps of stock Orbax that are no epochs any more; the next claim does what fails."""
        for folder in folders:
            what = f"{self.store.root}/{folder}: what is left of a step of stock Orbax stays for now"
            _threads.logged(what, partial(self._sweep.finish_step, folder, self._claimed))

    def _copy_aside(self, entries: Mapping[str, EpochSummary]) -> None:
        """Copies the records of epochs that were set aside, for people; their data objects stay where they are.

        Steps of stock Orbax are moved.
        """
        for kept, entry in entries.items():
            folder = kept.partition("/")[2]
            if entry.stock:
                self._remove_steps([folder])
                continue
            _threads.logged(self.store.root, partial(self._views.remove, folder, entry.save_id))
            path = _record_path(folder, entry.save_id)
            read = partial(self.store.read, path, limit_bytes=records.MAX_RECORD_BYTES)
            self._copy(paths.join(kept, paths.EPOCH_RECORD), read)
            with self._copying, suppress(OSError):
                metrics = self.store.find(paths.METRICS_PREFIX, folder)
                for path in metrics:
                    read = partial(self.store.read, path, limit_bytes=records.MAX_RECORD_BYTES)
                    self._copy(paths.join(kept, path.partition("/")[2]), read)
                self.store.remove_all([*metrics, paths.join(folder, paths.EPOCH_RECORD)])

    def _copy(self, path: str, read: Callable[[], bytes]) -> None:
        """Writes a copy of a record; a failure is logged, because nothing is read from it."""
        problem = f"{self.store.root}/{path}, which is a copy for people, could not be written"
        _threads.logged(problem, lambda: self.store.put(path, read(), draft="", replace=True))

    def release(self) -> None:
        """See Writer. The head stays, and the next incarnation counts on from it."""
        with suppress(FencedError):
            self._head.write(Release(incarnation=self._claimed))


def _record_path(folder: str, save_id: str) -> str:
    return paths.join(folder, f"{save_id}.json")
