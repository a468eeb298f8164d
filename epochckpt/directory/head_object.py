"""The head of a directory in a bucket as an object: reading it, and changing it by compare-and-swap.

What a change does is a value, see `head_changes`. `HeadObject.write` applies it to the newest head, and writes the
result on condition that nobody else has changed the head meanwhile; else it looks again. A change whose answer was
lost is found in the head before it is repeated.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from epochckpt import _threads
from epochckpt.directory import head_pages, head_record, head_turns
from epochckpt.directory.head_changes import HeadChange
from epochckpt.directory.head_record import Head, Page
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    FormatError,
    FormatVersionError,
    StorageError,
    unreadable,
)
from epochckpt.format import paths, records
from epochckpt.storage import Conflicts, Store, rounds

_LOOKS = 4  # at a head whose page is missing: until then others may have changed the head, and removed the page


@dataclasses.dataclass(frozen=True)
class SeenHead:
    """A head with the bytes that a conditional write compares."""

    head: Head
    data: bytes


@dataclasses.dataclass(frozen=True)
class Written:
    """What became of a change.

    Attributes:
        before: the head that this process has changed; None if the head said it already.
        head: a head that says it.
    """

    before: Head | None
    head: Head


class HeadObject:
    """The head of one directory.

    Attributes:
        swept: dead attempts of which nothing is left: the next change leaves them out.
        moved: the number of the last line of the log that is in a part, as far as this process knows: the next change
            leaves the lines up to there out.
    """

    def __init__(self, store: Store):
        self._store = store
        self._seen: SeenHead | None = None  # at the last look or change
        # Threads look at the head and change it at the same time.
        self._looks = itertools.count(1)
        self._last_look = 0
        self._pages: dict[str, Page] = {}  # of the last head, by digest; replaced as a whole
        self._unnamed: list[Page] = []  # by the head, that are still there
        self.turns = head_turns.of(store)
        self.swept: set[str] = set()
        self.moved = 0

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self) -> Head | None:
        """The head as it is now; None if there is none. One request.

        Raises:
            DamagedError, FormatError: it cannot be used; `repair` rebuilds it.
            AccessError, StorageError: storage does not give it.
        """
        found = self.look()
        return found and found.head

    def look(self) -> SeenHead | None:
        """The same, with its bytes."""
        for left in reversed(range(_LOOKS)):
            try:
                return self._store.confirming_damage(self._look_once)
            except FileNotFoundError as error:  # a page: whoever changed the head since has removed it
                if not left:
                    damage = DamagedError(str(error.filename), f"is missing, and {paths.HEAD} names it")
                    raise self._advised(damage) from error
        raise AssertionError  # the last round returns or raises

    def _look_once(self) -> SeenHead | None:
        number = next(self._looks)
        seen = self._seen
        data = self.read_bytes()
        if data is None:
            return self._note(number, None)
        if seen is not None and seen.data == data:
            return self._note(number, seen)
        return self._note(number, SeenHead(self._parsed(data), data))

    def read_bytes(self) -> bytes | None:
        """The content of the head as it is now; None if there is none. One request."""
        try:
            with self._access():
                return self._store.read(paths.HEAD, limit_bytes=records.MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None

    def _note(self, number: int, seen: SeenHead | None) -> SeenHead | None:
        """Keeps what a look or a change has found, unless one that began later has ended before."""
        if number > self._last_look:
            self._last_look = number
            self._seen = seen
        return seen

    @property
    def last(self) -> Head | None:
        """The head as of the last look or change; None before the first look, and where there is no head."""
        return self._seen.head if self._seen else None

    def seen(self) -> Head | None:
        """The head as of the last look or change, or of a look that is made now."""
        return self._seen.head if self._seen else self.read()

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
        error.add_note(f"`epochckpt repair {self._store.root}` rebuilds it from the records of the epochs")
        return error

    def _read_pages(self, digests: Sequence[str]) -> list[Page]:
        """Pages of the head: those that are known already, and the others, several at once."""
        found = dict(self._pages)

        def read(digest: str) -> None:
            path = paths.head_page(digest)
            with self._access(path):
                data = self._store.read(path, limit_bytes=records.MAX_RECORD_BYTES)
            found[digest] = head_record.parse_page(digest, data)

        self._store.each(read, [digest for digest in digests if digest not in found])
        return [found[digest] for digest in digests]

    @contextmanager
    def _access(self, path: str = paths.HEAD) -> Generator[None]:
        """Gives errors of storage about the head, or a page of it, the types that callers expect, and its URL."""
        try:
            yield
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            raise unreadable(f"{self._store.root}/{path}", error) from error

    # -- changing ------------------------------------------------------------------------------------------------

    def write(self, change: HeadChange, pace: head_turns.Pace = head_turns.SAVES) -> Written:
        """Writes a change, again until nobody else was faster.

        Raises:
            StorageError: others are always faster, or what is read is out of date.
            EpochCheckpointError: the change is forbidden, see the change.
        """
        seen = None if pace.yields else self._seen
        fresh = False  # whether `seen` was looked at here; else it may be of long ago
        before: Head | None = None
        conflicts = Conflicts()
        refused: StorageError | None = None
        patient = not pace.yields
        for _ in rounds(pace.pauses_secs, pace.limit_secs):
            with self.turns.taken(pace):
                if seen is None:
                    seen = self.look()
                    fresh = True
                if seen is None:
                    raise StorageError(self._store.root, FileNotFoundError(f"its head, {paths.HEAD}, is gone"))
                old = seen.head
                try:
                    new = change.along_with(list(self.turns.waiting)).apply(old)
                except EpochCheckpointError:
                    if fresh:
                        raise
                    new = None
                if new is not None:
                    before = old
                    new = new.tidied(self.swept, self.moved)
                    try:
                        if (written := self.swap(seen, new, patient=patient)) is not None:
                            return Written(before, written)
                        refused = None
                        if fresh:
                            conflicts.note(seen.data)
                    except StorageError as error:
                        busy = error.errno == errno.EBUSY
                        if patient and not busy:
                            raise
                        if not pace.yields and not self._is_changed(seen):
                            raise
                        refused = error
                        patient = not (busy and pace.yields)  # others write now, and may go first
                elif fresh:
                    return Written(before, old)
                seen = None
        raise refused or conflicts.error(f"{self._store.root}/{paths.HEAD}")

    def _is_changed(self, seen: SeenHead) -> bool:
        """Whether others have changed the head meanwhile: they, and no store that is away, keep it busy."""
        now = self.look()
        return now is None or now.data != seen.data

    def swap(self, seen: SeenHead | None, new: Head, *, patient: bool = True) -> Head | None:
        """Writes a head, with its new pages, in place of the one that was seen, or of none.

        Returns the head as it was written; None if another one, or none, is there by now. With `patient`, a request
        that the store refuses is repeated.
        """
        return self._swap(None if seen is None else seen.data, new, () if seen is None else seen.head.pages, patient)

    def _swap(self, expected: bytes | None, new: Head, pages: Sequence[Page], patient: bool) -> Head | None:
        """The same in place of these bytes, of a head that has these pages."""
        with self._access():
            self._store.check_conditions(paths.CONDITIONS)
            new = head_pages.paged(new)
            fresh = [page for page in new.pages if page.data]
            self._store.each(lambda page: self._store.create(page.path, page.data), fresh)
        new = dataclasses.replace(new, pages=tuple(dataclasses.replace(page, data=b"") for page in new.pages))
        data = new.to_bytes()
        try:
            with self._access():
                if expected is None:
                    self._store.create(paths.HEAD, data)
                else:
                    self._store.replace(paths.HEAD, expected, data, patient=patient)
        except (FileExistsError, FileNotFoundError):
            self._remove_pages(fresh)
            return None
        self._pages = {page.digest: page for page in new.pages}
        self._note(next(self._looks), SeenHead(new, data))
        self._unnamed = [*self._unnamed, *(page for page in pages if page.digest not in self._pages)]
        if not (fresh and patient):  # a save that has written a page leaves the removal to the next change
            unnamed = self._unnamed
            self._unnamed = []
            self._remove_pages(unnamed)
        return new

    def _remove_pages(self, pages: Iterable[Page]) -> None:
        """Removes pages that no head names; the next claim removes those that this misses."""
        gone = [page.path for page in pages]
        if gone:
            _threads.logged(f"{self._store.root}: {gone[0]} stays", lambda: self._store.remove_all(gone))

    def write_rebuilt(self, old: bytes | None, new: Head) -> bool:
        """Writes a head that was made anew, in place of exactly the bytes that were looked at, or of none.

        Returns whether it was written: also where the answer was lost, and a run has gone on from it since.
        """
        if self._swap(old, new, (), patient=True) is not None:
            return True
        now = self.read()
        return now is not None and new.incarnation in (now.incarnation, *now.past)
