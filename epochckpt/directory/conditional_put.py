"""Commits on stores without rename (object stores), by conditional writes of one object, the `head`.

Guarantees:
- what an attempt writes carries its id, which no other attempt ever has: nothing is overwritten, and what an older run
  still writes or removes, be it late, is its own;
- claiming, beginning, committing, replacing, deleting and going back are one change of the head each, on condition that
  it has not changed: whatever an older run tries fails once a newer one has claimed;
- an attempt that an older run has begun is dead from the claim on, and only what dead attempts wrote is ever removed;
- a change whose answer was lost is looked for in the head before it is repeated, or called failed.

An epoch's commit record is `<epoch>/<attempt>.json`. Its copy, `epoch.json`, and the records of epochs that were set
aside are for people who copy folders, and for `repair`: nothing that the head tells is read from them.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt.directory import attached_metrics, head_pages, head_record, head_turns, metrics_log, owners, surroundings
from epochckpt.directory.departures import Departures
from epochckpt.directory.head_record import Head, HeadEpoch, Page, send_off
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.directory.object_log import ObjectLog
from epochckpt.directory.object_views import ObjectViews
from epochckpt.directory.protocol import Commits, ReplaceCondition, Rollback
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochExistsError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    FormatVersionError,
    NotACheckpointDirectoryError,
    SaveError,
    StorageError,
    UncertainError,
    unreadable,
)
from epochckpt.format import EpochRecord, parsing, paths, records
from epochckpt.orbax import StepNames, steps
from epochckpt.storage import Conflicts, Store, rounds

_KEPT, _KEPT_BYTES = 4, 1 << 20  # records that are remembered, and the largest of them
_LOOKS = 4  # at a head whose page is missing: until then others may have changed the head, and removed the page


class PutCommits(Commits):
    """Epochs become visible when the head names them."""

    def __init__(self, store: Store, names: StepNames):
        super().__init__(store, names)
        self._seen: tuple[Head, bytes] | None = None  # the head at the last look or change
        self._entries: tuple[Head | None, dict[int, HeadEpoch]] = None, {}  # of a head, by epoch
        self._headless: Head | None = None  # what there is of stock Orbax, while there is no head
        self._looks, self._last = itertools.count(1), 0  # threads look at it and change it at the same time
        self._pages: dict[str, Page] = {}  # of the last head, by digest; replaced as a whole
        self._unnamed: list[Page] = []  # by the head, that are still there
        self._turns = head_turns.of(store)
        # Paths and contents of records, by folder and attempt. Replaced as a whole: threads share it.
        self._records: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._copying = threading.RLock()  # held where the copy of a record is written, or removed
        self.swept: set[str] = set()  # dead attempts of which nothing is left
        self._log = ObjectLog(store)
        self._views = ObjectViews(store, self.head, partial(self._record, parse=parsing.parse_epoch))
        self.departures = Departures(store, self.head, self.change)

    # -- the head ------------------------------------------------------------------------------------------------

    def head(self) -> Head | None:
        """The head as it is now; None if there is none. One request.

        Raises:
            DamagedError, FormatError: it cannot be used; `repair` rebuilds it.
            AccessError, StorageError: storage does not give it.
        """
        found = self._look()
        return found and found[0]

    def _look(self) -> tuple[Head, bytes] | None:
        for left in reversed(range(_LOOKS)):
            try:
                return self.store.confirming_damage(self._look_once)
            except FileNotFoundError as error:  # a page: whoever changed the head since has removed it
                if not left:
                    damage = DamagedError(str(error.filename), f"is missing, and {paths.HEAD} names it")
                    raise self._advised(damage) from error
        raise AssertionError  # the last round returns or raises

    def _look_once(self) -> tuple[Head, bytes] | None:
        number, seen = next(self._looks), self._seen
        data = self.read_bytes()
        if data is None:
            return self._note(number, None)
        return self._note(number, seen if seen is not None and seen[1] == data else (self._parsed(data), data))

    def read_bytes(self) -> bytes | None:
        """The content of the head as it is now; None if there is none. One request."""
        try:
            with self.access():
                return self.store.read(paths.HEAD, limit_bytes=records.MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None

    def _note(self, number: int, seen: tuple[Head, bytes] | None) -> tuple[Head, bytes] | None:
        """Keeps what a look or a change has found, unless one that began later has ended before."""
        if number > self._last:
            self._last, self._seen = number, seen
        return seen

    def seen(self) -> Head | None:
        """The head as of the last look or change, or of a look that is made now."""
        return self._seen[0] if self._seen else self.head()

    def _parsed(self, data: bytes) -> Head:
        try:
            head = head_record.parse(paths.HEAD, data, self._read_pages)
        except FormatVersionError:  # a newer epochckpt reads it
            raise
        except (DamagedError, FormatError) as error:
            raise self._advised(error) from None
        self._pages = {page.digest: page for page in head.pages}
        return head

    def _advised(self, error: DamagedError | FormatError) -> DamagedError | FormatError:
        error.add_note(f"`epochckpt repair {self.store.root}` rebuilds it from the records of the epochs")
        return error

    def _read_pages(self, digests: Sequence[str]) -> list[Page]:
        """Pages of the head: those that are known already, and the others, several at once."""
        found = dict(self._pages)

        def read(digest: str) -> None:
            path = paths.head_page(digest)
            with self.access(path):
                data = self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES)
            found[digest] = head_record.parse_page(digest, data)

        self.store.each(read, [digest for digest in digests if digest not in found])
        return [found[digest] for digest in digests]

    def change(
        self,
        edit: Callable[[Head], Head | None],
        epoch: int,
        *,
        fenced: bool = True,
        pace: head_turns.Pace = head_turns.SAVES,
    ) -> Head:
        """Changes the head, again until nobody else was faster; returns it, with the change.

        `edit` returns the new head, or None where this one says it already. FencedError: another incarnation has
        claimed; without `fenced` any may make the change. StorageError: others are always faster, or what is read is
        out of date.
        """
        seen, fresh, conflicts = (None if pace.yields else self._seen), False, Conflicts()
        refused, patient = None, not pace.yields
        for _ in rounds(pace.pauses_secs, pace.limit_secs):
            with self._turns.taken(pace):
                if seen is None:
                    seen, fresh = self._look(), True
                if seen is None:
                    raise StorageError(self.store.root, FileNotFoundError(f"its head, {paths.HEAD}, is gone"))
                old = seen[0]
                late = fenced and old.incarnation != self.incarnation
                try:
                    new = edit(old)
                except EpochCheckpointError:
                    if fresh and late:
                        raise self._fenced(epoch, old) from None
                    if fresh:
                        raise
                    new = None
                if new is not None and not late:
                    new = new.tidied(self.swept, self._log.moved)
                    try:
                        if (written := self._put(seen, new, patient=patient)) is not None:
                            return written
                        refused = None
                        if fresh:
                            conflicts.note(seen[1])
                    except StorageError as error:
                        if not pace.yields or (patient and error.errno != errno.EBUSY):
                            raise
                        refused = error
                        patient = error.errno != errno.EBUSY  # else others write now, and may go first
                elif fresh and new is None:
                    return old
                elif fresh:
                    raise self._fenced(epoch, old)
                seen = None  # what is remembered may be of long ago
        raise refused or conflicts.error(f"{self.store.root}/{paths.HEAD}")

    def _put(self, old: tuple[Head | None, bytes] | None, new: Head, *, patient: bool = True) -> Head | None:
        """Writes the head, with its new pages, if it is still the old one; returns it, or None."""
        with self.access():
            self.store.check_conditions(paths.CONDITIONS)
            new = head_pages.paged(new)
            fresh = [page for page in new.pages if page.data]
            self.store.each(lambda page: self.store.create(page.path, page.data), fresh)
        new = dataclasses.replace(new, pages=tuple(dataclasses.replace(page, data=b"") for page in new.pages))
        data = new.to_bytes()
        try:
            with self.access():
                if old is None:
                    self.store.create(paths.HEAD, data)
                else:
                    self.store.replace(paths.HEAD, old[1], data, patient=patient)
        except (FileExistsError, FileNotFoundError):
            self._remove_pages(fresh)
            return None
        self._pages = {page.digest: page for page in new.pages}
        self._note(next(self._looks), (new, data))
        if old is not None and old[0] is not None:
            self._unnamed = [*self._unnamed, *(page for page in old[0].pages if page.digest not in self._pages)]
        if not (fresh and patient):  # a save that has written a page leaves the removal to the next change
            unnamed, self._unnamed = self._unnamed, []
            self._remove_pages(unnamed)
        return new

    def _remove_pages(self, pages: Iterable[Page]) -> None:
        """Removes pages that no head names; the next claim removes those that this misses."""
        gone = [page.path for page in pages]
        if gone:
            _threads.logged(f"{self.store.root}: {gone[0]} stays", lambda: self.store.remove_all(gone))

    def write_rebuilt(self, old: bytes | None, new: Head) -> bool:
        """Writes a head that was made anew, in place of exactly the bytes that were looked at, or of none.

        Returns whether it was written: also where the answer was lost, and a run has gone on from it since.
        """
        if self._put(None if old is None else (None, old), new) is not None:
            return True
        now = self.head()
        return now is not None and new.incarnation in (now.incarnation, *now.past)

    @contextmanager
    def access(self, path: str = paths.HEAD) -> Generator[None]:
        """Gives errors of storage about the head, or a page of it, the types that callers expect, and its URL."""
        try:
            yield
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            raise unreadable(f"{self.store.root}/{path}", error) from error

    def _fenced(self, epoch: int, found: Head) -> FencedError:
        newest, own = int(found.incarnation[:8]), int(self.incarnation[:8])
        return FencedError(
            epoch,
            f"a newer run (incarnation {newest}, this is {own}) has taken over {self.store.root}; this process can no "
            "longer save there",
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def scan(self) -> tuple[list[int], dict[int, str]]:
        if self.names.only:
            return super().scan()
        found = self.head()
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

    def entries(self) -> dict[int, HeadEpoch]:
        """What the head says of each epoch; as of the last look, or of one that is made now."""
        found = self.seen()
        if found is None and self._headless is None:
            self.scan()
        found = found or self._headless or Head()
        if self._entries[0] is not found:
            self._take_folders(found)
            self._entries = found, {epoch: found.listed[folder] for epoch, folder in self._folders.items()}
        return self._entries[1]

    def read_brief(self, epoch: int) -> EpochRecord | HeadEpoch:
        entry = self.entries().get(epoch)
        if entry is None:
            self.head()
            entry = self.entries().get(epoch)
        if entry is None:
            raise self._unknown(epoch)
        return self.read_head(epoch) if entry.large else entry

    def read_attempt(self, epoch: int) -> str | None:
        if self.names.only:
            return super().read_attempt(epoch)
        self.head()
        return self.seen_attempt(epoch)

    def seen_attempt(self, epoch: int) -> str | None:
        if self.names.only:
            return super().seen_attempt(epoch)
        entry = self.entries().get(epoch)
        return entry.attempt if entry else None

    def _read(self, epoch: int, parse: Callable[[str, bytes], EpochRecord]) -> EpochRecord:
        if self.names.only:
            return super()._read(epoch, parse)
        self.head()
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
            record = self._record(folder, entry.attempt, parse)
            if record is not None:
                return record
            # Deleted or replaced since the look at the head, or lost.
            self.head()
            now = self.entries().get(epoch)
            if now is None:
                raise self._unknown(epoch)
            if now.attempt == entry.attempt:
                problem = f"is missing, and {paths.HEAD} names it: checkpoint {epoch} cannot be read"
                raise DamagedError(_record_path(folder, entry.attempt), problem)
            entry = now

    def _record(
        self, folder: str, attempt: str, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> EpochRecord | None:
        """The commit record of an attempt, or else its copy; it may be remembered, since it never changes."""
        key, known = (folder, attempt), self._records.get((folder, attempt))
        if known is not None:
            return parse(*known)

        def parsed(path: str, data: bytes) -> tuple[EpochRecord, bytes]:
            return parse(path, data), data

        for path in (_record_path(folder, attempt), paths.join(folder, paths.EPOCH_RECORD)):
            record, data = parsing.read_record(self.store, path, parsed) or (None, b"")
            if record is not None and record.attempt == attempt:
                if record.epoch != self.names.parse(folder):
                    raise FormatError(path, f"is the record of checkpoint {record.epoch}, found in the folder {folder}")
                if len(data) <= _KEPT_BYTES:
                    self._records = dict([*self._records.items(), (key, (path, data))][-_KEPT:])
                return record
        return None

    def forget_records(self) -> None:
        """See Commits."""
        self._records = {}

    def read_in(
        self, folder: str, epoch: int, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> EpochRecord | None:
        if self.names.only or "/" in folder:
            return super().read_in(folder, epoch, parse)
        found = self.seen() or Head()
        return self._record(folder, found.epochs[folder].attempt, parse) if folder in found.epochs else None

    def rollback(self) -> Rollback | None:
        return None  # it is one change of the head

    def attached(self) -> Mapping[int, tuple[str, Mapping[str, Mapping[str, Any]]]] | None:
        if self.names.only:
            return None  # the folder has copies
        return {epoch: (entry.attempt, entry.attached) for epoch, entry in self.entries().items() if entry.attached}

    def deleted(self) -> dict[int, metrics_log.Line]:
        return {} if self.names.only else self._log.deleted(self.seen() or Head())

    def keep_deleted(self, lines: Iterable[metrics_log.Line]) -> None:
        self._log.move(self.change(lambda now: now.next(log=(*now.log, *lines)), 0))

    def _is_copy(self, folder: str) -> bool:
        return self.store.exists(paths.join(folder, paths.EPOCH_RECORD))

    def obstacle(self, folder: str) -> str:
        if self._is_copy(folder):
            found = f"{self.store.root}/{folder} is an epoch that {paths.HEAD} does not name, such as a copy"
            return f"{found}. `epochckpt repair {self.store.root}` takes it in; or move the folder away"
        return super().obstacle(folder)

    def beside(self, known: Head) -> tuple[dict[str, set[str] | None], dict[str, HeadEpoch]]:
        """See `surroundings.folders`; and those of them that are steps of stock Orbax."""
        found = surroundings.folders(self.store, self.names, known)
        others = [name for name, attempts in found.items() if attempts is None or name in known.stock]
        return found, surroundings.steps_in(self.store, self.names, others, known)

    # -- writing -------------------------------------------------------------------------------------------------

    def owners(self) -> list[Any]:
        found = self.head()
        return [] if found is None or found.closed else [found.owner]

    def lineage(self) -> Lineage | None:
        found = self.head()
        return None if found is None else found.lineage

    def claim(
        self,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        lineage: ClaimLineage | ClaimDirectly = ClaimDirectly(),  # noqa: B008 (a frozen value)
    ) -> None:
        owner, conflicts = owners.current(), Conflicts()
        for _ in rounds():
            seen = self._look()
            old = seen[0] if seen else None
            pages = self.store.find(paths.HEAD_PAGE_PREFIX, paths.HEAD.rpartition("/")[0]) if old else []
            check()
            following = lineage.apply(None if old is None else old.lineage)
            beside, stock = self.beside(old or Head())
            if old is None and any(map(self._is_copy, beside)):
                self.scan()  # raises
            leaving = {folder: step for folder, step in (old or Head()).leaving.items() if folder not in stock}
            others = beside.keys() - stock.keys() - leaving.keys()
            new = (old or Head()).claimed(owner, tuple(sorted(n for n in others if beside[n] is None)))
            strays = {attempt: name for name, attempts in beside.items() for attempt in attempts or ()}
            new = new.next(lineage=following, stock=stock, leaving=leaving, dead={**new.dead, **strays})
            with self._turns.taken(head_turns.SAVES):
                claimed = self._put(seen, new)
            if claimed is not None:
                break
            logging.info("%s: another run claims it at this moment", self.store.root)
            conflicts.note(seen[1] if seen else b"")
        else:
            raise conflicts.error(f"{self.store.root}/{paths.HEAD}")
        new = claimed
        if old is None:
            self._views.guard()
        self.incarnation, self.taken_over = new.incarnation, None
        if old is not None and not old.closed:
            self.taken_over = old.incarnation, owners.report_takeover(self.store.root, lambda: old.owner)
        for name in sorted(name for name, attempts in beside.items() if attempts is not None):
            _threads.logged(f"{self.store.root}/{name}: a copy of a record stays", partial(self._tidy, name, new))
        if new.dead:
            logging.info("%s: removing what earlier runs left of %d saves", self.store.root, len(new.dead))
            _threads.start(lambda: _threads.logged(self.store.root, lambda: self.remove_dead(new.dead)))

        unnamed = sorted({*pages} - {page.path for page in new.pages})

        def finish() -> None:
            if unnamed:  # a writer was killed before it named them, or before it removed them
                _threads.logged(f"{self.store.root}: {unnamed[0]} stays", lambda: self.store.remove_all(unnamed))
            self._depart(new.leaving)
            _threads.logged(self.store.root, lambda: self._views.finish(new))

        _threads.start(finish)

    def check_claim(self, epoch: int) -> None:
        found = self.head()
        if found is not None and found.incarnation != self.incarnation:
            raise self._fenced(epoch, found)

    def _tidy(self, folder: str, now: Head) -> None:
        """Removes the copies of a record and of metrics where there is no epoch, but for those that are set aside."""
        attempt = surroundings.copied_attempt(self.store, folder)
        kept = {where: entry for where, entry in now.aside.items() if entry.attempt == attempt}
        if kept:
            self._copy_aside(kept)
        elif attempt is None or now.knows(attempt):
            copies = [] if attempt is None else [paths.join(folder, paths.EPOCH_RECORD)]
            self.store.remove_all([*copies, *self.store.find(paths.METRICS_PREFIX, folder)])

    def remove_dead(self, dead: Mapping[str, str]) -> None:
        """Removes what attempts wrote that are dead, by attempt the folder."""
        for folder in sorted(set(dead.values())):
            self._remove(folder, {attempt for attempt, where in dead.items() if where == folder})
        self.swept |= dead.keys()

    def _remove(self, folder: str, attempts: Collection[str]) -> None:
        """Removes the objects of some attempts; the copy of their record goes with them, and first the Orbax view."""
        path, found = paths.join(folder, paths.EPOCH_RECORD), [file.path for file in self.store.files(folder)]
        self._views.remove_all(folder, attempts, found)
        gone = [paths.join(folder, name) for name in found if paths.attempt_in(name) in attempts]
        metrics = [paths.join(folder, name) for name in found if paths.parse_metrics_file(name)]
        copy: EpochRecord | None = None
        with suppress(EpochCheckpointError):
            copy = parsing.read_record(self.store, path, parsing.parse_head) if paths.EPOCH_RECORD in found else None
        if copy is not None and copy.attempt in attempts:
            gone += [path, *metrics]
            if not copy.objects:  # the folder was copied from a file system
                gone += [paths.join(folder, below) for below in copy.sizes()]
        else:
            gone += [each for each in metrics if attached_metrics.attempt_of(self.store, each) in attempts]
        # A reader that misses something looks for the record: it is gone first.
        self.store.remove_all([path for path in gone if path.count("/") == 1])
        self.store.remove_all([path for path in gone if path.count("/") > 1])

    def begin(self, epoch: int, attempt: str) -> None:
        folder = self.names.build(epoch)
        if folder in (self.seen() or Head()).leaving:
            self.departures.end(folder, self.incarnation)

        def edit(now: Head) -> Head | None:
            if folder in now.leaving:
                raise SaveError(epoch, f"{self.store.root}/{folder}: a deleted step of stock Orbax is not gone yet")
            return None if attempt in now.begun else now.next(begun={**now.begun, attempt: folder})

        self.change(edit, epoch)

    def node_folder(self, epoch: int, attempt: str, node: str) -> str:
        return paths.join(self.names.build(epoch), paths.part_folder(paths.folder_name(node), attempt))

    def data_folder(self, epoch: int, attempt: str, node: str, item: str) -> str:
        return paths.join(self.names.build(epoch), paths.part_folder(paths.folder_name(node), attempt, item))

    def write_view(self, record: EpochRecord, run: Callable[[list[Callable[[], None]]], None]) -> EpochRecord:
        """See Commits. The view is only planned and noted: `publish` returns what writes it, after the commit."""
        del run
        return self._views.plan(record)

    def publish(
        self, epoch: int, attempt: str, record: bytes, check: Callable[[], None], replaces: ReplaceCondition | None
    ) -> Callable[[], None] | None:
        folder = self.names.build(epoch)
        path, aside = _record_path(folder, attempt), paths.join(f"damaged-{paths.new_id()}", folder)
        entry = HeadEpoch.of(parsing.parse_head(path, record))
        self.store.create(path, record)
        check()
        old: HeadEpoch | None = None

        def edit(now: Head) -> Head | None:
            nonlocal old
            there = now.listed.get(folder)
            if there is not None and there.attempt == attempt:
                return None
            if attempt not in now.begun:
                raise SaveError(epoch, f"{self.store.root}: its attempt was given up or taken over meanwhile")
            if there is not None and (replaces is None or replaces.attempt not in (None, there.attempt)):
                where = f"{self.store.root}/{folder}"
                raise SaveError(epoch, f"{where} exists already; delete() or rollback_to() make room")
            old, changes = there, now.without(folder, attempt=attempt)
            changes["epochs"][folder] = entry
            if there is not None:
                send_off(changes, folder, there, aside if replaces is not None and replaces.damage else None)
            return now.next(**changes)

        # The decisive step: one conditional write.
        try:
            self.change(edit, epoch)
        except (FencedError, SaveError):
            raise
        except (EpochCheckpointError, OSError) as error:
            try:
                committed = self._give_up(epoch, attempt)
            except FencedError:
                raise
            except (EpochCheckpointError, OSError) as problem:
                reason = f"the head could not be changed ({error}), nor can it be read whether it was ({problem})"
                raise UncertainError(epoch, reason) from error
            if not committed:
                raise SaveError(epoch, f"the head could not be changed: {error}") from error
        self._folders[epoch] = folder
        was, kept = old, replaces is not None and bool(replaces.damage)
        if was is not None and kept:
            logging.warning("%s: the damaged checkpoint %d was set aside as %s", self.store.root, epoch, aside)
            self._copy_aside({aside: was})
        stock = was is not None and was.stock
        copy = partial(self._copy_record, folder, attempt, record)
        steps: list[Callable[[], object]] = [partial(_threads.logged, f"{self.store.root}: the copy of a record", copy)]
        if stock:
            steps.append(partial(self._depart, [folder]))
        steps += self._views.after_commit(folder, attempt, was)
        if was is not None and not stock and not kept:
            steps.append(partial(self.remove_dead, {was.attempt: folder}))
        return partial(_threads.Pool(1).run, steps)

    def _copy_record(self, folder: str, attempt: str, record: bytes) -> None:
        """Copies the record of a committed epoch; that of a newer one stays, however late this is."""
        path = paths.join(folder, paths.EPOCH_RECORD)
        with self._copying, suppress(FileExistsError):
            if (self.seen() or Head()).has(folder, attempt):  # it may have been set aside since
                self.store.create(path, record)
            return
        there = self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES)  # of the epoch that gave way
        if (self.head() or Head()).has(folder, attempt):
            self.store.replace(path, there, record)

    def _give_up(self, epoch: int, attempt: str) -> bool:
        """Makes sure that an attempt is never committed, unless it has been; returns whether it has."""
        folder = self.names.build(epoch)

        def edit(now: Head) -> Head | None:
            changes = {**now.without(attempt=attempt), "dead": {**now.dead, attempt: folder}}
            return now.next(**changes) if attempt in now.begun else None

        return self.change(edit, epoch).has(folder, attempt)

    def discard(self, epoch: int, attempt: str) -> None:
        if not self._give_up(epoch, attempt):
            self.remove_dead({attempt: self.names.build(epoch)})

    def hide(self, epoch: int, into: str | None = None, *, logged: bool = False) -> Callable[[], None]:
        folder, gone = self.folder(epoch), dict[str, HeadEpoch]()  # by where it is kept, or its folder

        def edit(now: Head) -> Head | None:
            if folder not in now.listed:
                return None
            entry, changes, kept = now.listed[folder], now.without(folder), paths.join(into or "", folder)
            if (into and self.store.files(kept, 1)) or (kept in now.aside and not now.aside[kept].stock):
                raise EpochExistsError(f"{self.store.root}/{kept} exists already; move it away first")
            send_off(changes, folder, entry, None if into is None else kept)
            gone[kept] = entry
            noted = self._log.noting(now, folder, self.names.parse, self._record) if logged else {}
            return now.next(**changes, **noted)

        self.change(edit, epoch)
        self._folders.pop(epoch, None)
        steps: list[Callable[[], None]] = [lambda: self._log.move(self.seen())]
        if into is not None:
            self._copy_aside(gone)
        elif any(entry.stock for entry in gone.values()):
            steps.insert(0, partial(self.departures.end, folder, self.incarnation))
        else:
            steps.insert(0, partial(self.remove_dead, {entry.attempt: folder for entry in gone.values()}))
        return partial(_threads.Pool(1).run, steps)

    def roll_back(self, rollback: Rollback) -> None:
        moved = dict[str, HeadEpoch]()

        def edit(now: Head) -> Head | None:
            later = {folder: e for folder, e in now.listed.items() if self.names.parse(folder) in rollback.epochs}
            changes = now.without(*later)
            for folder, entry in later.items():
                kept = paths.join(rollback.folder or "", folder)
                send_off(changes, folder, entry, kept)
                moved[kept] = entry
            return now.next(**changes, **now.back_to(rollback.about)) if later else None

        self.change(edit, rollback.about)
        self._copy_aside(moved)

    def _move_rolled_back(self, rollback: Rollback) -> None:
        del rollback  # it is done at once

    def _depart(self, folders: Iterable[str]) -> None:
        """Moves or removes steps of stock Orbax that are no epochs any more; the next claim does what fails."""
        for folder in folders:
            what = f"{self.store.root}/{folder}: what is left of a step of stock Orbax stays for now"
            _threads.logged(what, partial(self.departures.end, folder, self.incarnation))

    def _copy_aside(self, entries: Mapping[str, HeadEpoch]) -> None:
        """Copies the records of epochs that were set aside, for people; their data objects stay where they are.

        Steps of stock Orbax are moved.
        """
        for kept, entry in entries.items():
            folder = kept.partition("/")[2]
            if entry.stock:
                self._depart([folder])
                continue
            _threads.logged(self.store.root, partial(self._views.remove, folder, entry.attempt))
            path = _record_path(folder, entry.attempt)
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

    def attach(self, epoch: int, attempt: str, source: str, metrics: Mapping[str, Any]) -> bool:
        """Adds the metrics of a source to an epoch's entry; False if another attempt, or none, is there by now."""
        folder = self.folder(epoch)
        wanted = head_turns.Attachment(folder, attempt, source, metrics)

        def edit(now: Head) -> Head | None:
            epochs = dict(now.epochs)
            for one in list(self._turns.waiting):
                entry = epochs.get(one.folder)
                if entry is not None and entry.attempt == one.attempt and entry.attached.get(one.source) != one.metrics:
                    epochs[one.folder] = entry.with_attached(one.source, one.metrics)
            return now.next(epochs=epochs) if epochs != now.epochs else None

        self._turns.waiting.append(wanted)
        try:
            return self.change(edit, epoch, fenced=False, pace=head_turns.ATTACHMENTS).has(folder, attempt)
        finally:
            self._turns.waiting.remove(wanted)

    def release(self) -> None:
        """See Commits. The head stays, and the next incarnation counts on from it."""
        with suppress(FencedError):
            self.change(lambda now: None if now.closed else now.next(closed=True), 0)


def _record_path(folder: str, attempt: str) -> str:
    return paths.join(folder, f"{attempt}.json")
