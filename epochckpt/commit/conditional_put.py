"""Commits on stores without rename (object stores).

Guarantees:
- data objects carry their attempt's name, so that two attempts never share one;
- `epoch.json` is put last, on the condition that it is absent (or still the epoch that is to be replaced);
- incarnations are numbered, and only the highest claimed number may commit. It is looked at before and after the put;
- data that a record names is never swept, nor is the data of a quarantined record.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial

from absl import logging

from epochckpt import _threads
from epochckpt.commit import claiming
from epochckpt.commit.protocol import Commits, ReplaceCondition, Rollback
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochExistsError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    SaveError,
    UncertainError,
)
from epochckpt.format import parsing, paths, records

_CLAIM, _CLOSED = "claim", "closed"


class PutCommits(Commits):
    """Epochs become visible by the conditional put of their record."""

    def _is_foreign(self, folder: str) -> bool:
        return self.store.exists(paths.join(folder, "_CHECKPOINT_METADATA"))

    def _numbers(self) -> list[int]:
        found = [paths.parse_incarnation(e.name) for e in self.store.list("") if e.is_folder]
        return sorted(int(token) for token in found if token is not None and token.isdigit())

    @property
    def newest(self) -> str:
        """The newest incarnation that was claimed: uncommitted data of older ones is dead."""
        return f"{max(self._numbers(), default=0):08d}"

    def _check_fence(self, epoch: int) -> None:
        newest = self.newest
        if newest != self.incarnation:
            raise FencedError(
                epoch,
                f"a newer run (incarnation {int(newest)}, this is {int(self.incarnation)}) has taken over "
                f"{self.store.root}; this process can no longer save there",
            )

    def claim(self, epoch: int = 0, continues: str = "") -> None:
        data = claiming.owner_bytes(token=paths.new_id())  # unlike the bytes of every other claim
        older = int(self.newest)
        while True:
            with suppress(FileExistsError):
                self.store.create(self._path(older + 1, _CLAIM), data)
                break
            older += 1
        if older and not self.store.exists(self._path(older, _CLOSED)):
            claiming.report_takeover(self.store, self._path(older, _CLAIM))
        self.incarnation = f"{older + 1:08d}"
        self._finish_if_it_can()
        # Leftovers of earlier incarnations are removed in the background.
        leftovers = [self._path(number) for number in self._numbers() if number <= older]
        for path in self.unrecorded():
            attempt = path.rpartition("/")[2]
            if attempt != continues and not attempt.startswith(f"{self.incarnation}-"):
                leftovers.append(path)
        _threads.start(lambda: [self.sweep(path) for path in leftovers])

    def sweep(self, path: str) -> None:
        """Removes an attempt's data, and the record that an older run may have put for it meanwhile."""
        folder, attempt = path.partition("/")[0], path.rpartition("/")[2]
        record = paths.join(folder, paths.EPOCH_RECORD)
        if attempt.startswith(paths.METRICS_PREFIX) and self.store.exists(record):
            return  # saved anew by now, and these may be its metrics
        self.store.remove_tree(path)
        if self.names.parse(folder) is not None and attempt in (self._attempt_in(folder) or ()):
            self.store.remove(record)

    def _path(self, number: int, name: str = "") -> str:
        return paths.join(paths.incarnation_folder(f"{number:08d}"), name)

    def unrecorded(self, folders: Collection[str] | None = None) -> Iterator[str]:
        """Folders of attempts, see `parts`, that no commit record names, nor one that was quarantined.

        Beside them attached metrics, as `<epoch>/<file>`, where there is no epoch any more. Looks into all
        folders of epochs, or into the given ones. What is not named like an attempt at that epoch is not ours: another
        run, one folder deeper, or a model.
        """
        names = [e.name for e in self.store.list("") if e.is_folder and self.names.parse(e.name) is not None]
        chosen = [name for name in names if folders is None or name in folders]
        found = {name: self._attempt_in(name) for name in chosen if not self._is_foreign(name)}
        kept = self._quarantined()  # only now: an epoch's record is copied there before its own goes
        for folder, record in found.items():
            quarantined = kept.get(folder, set())
            if record is None or quarantined is None:
                continue  # not readable, now or ever: a person may still want to look at it
            if not record:
                yield from self.store.find(paths.METRICS_PREFIX, folder)
            for path in self.parts(folder):
                attempt = path.rpartition("/")[2]
                is_ours = paths.attempted_epoch(attempt) == self.names.parse(folder)
                if is_ours and attempt not in quarantined | record:
                    yield path

    def parts(self, folder: str) -> Iterator[str]:
        """The folders of attempts in an epoch's: `<epoch>/<node>/<attempt>` and `<epoch>/<item>/<node>/<attempt>`."""
        waiting = [folder]
        while waiting:
            above = waiting.pop()
            for entry in (e for e in self.store.list(above) if e.is_folder):
                path = paths.join(above, entry.name)
                if above != folder and paths.attempted_epoch(entry.name) is not None:
                    yield path
                elif path.count("/") < folder.count("/") + 3:
                    waiting.append(path)

    def _quarantined(self) -> dict[str, set[str] | None]:
        """The attempts that quarantined records name, by the epoch's folder; see `_attempt_in`."""
        found: dict[str, set[str] | None] = {}
        for entry in self.store.list(""):
            if not entry.is_folder or self.names.parse(entry.name) is not None or paths.parse_incarnation(entry.name):
                continue
            # rolled back, damaged, or kept by `hide`; or not ours
            for epoch in (e.name for e in self.store.list(entry.name) if e.is_folder and e.name[-1].isdigit()):
                one, other = self._attempt_in(paths.join(entry.name, epoch)), found.get(epoch, set())
                found[epoch] = None if one is None or other is None else one | other
        return found

    def _attempt_in(self, folder: str) -> set[str] | None:
        """The attempt that the record in a folder names, if there is one; None if it cannot be read."""
        path = paths.join(folder, paths.EPOCH_RECORD)
        try:
            record = parsing.read_record(self.store, path, parsing.parse_head)
        except (EpochCheckpointError, OSError):
            return None
        return set() if record is None else {record.attempt}

    def begin(self, epoch: int, attempt: str) -> None:
        self._check_fence(epoch)

    def node_folder(self, epoch: int, attempt: str, node: str) -> str:
        return paths.join(self.names.build(epoch), paths.part_folder(paths.folder_name(node), attempt))

    def data_folder(self, epoch: int, attempt: str, node: str, item: str) -> str:
        return paths.join(self.names.build(epoch), paths.part_folder(paths.folder_name(node), attempt, item))

    def publish(
        self, epoch: int, attempt: str, record: bytes, check: Callable[[], None], replaces: ReplaceCondition | None
    ) -> Callable[[], None] | None:
        path = paths.join(self.names.build(epoch), paths.EPOCH_RECORD)
        self._check_fence(epoch)
        check()
        old = self._superseded(epoch, path, replaces)
        if replaces is not None and replaces.damage and self.store.exists(path):
            self._quarantine(epoch, f"damaged-{paths.new_id()}")
            self._check_fence(epoch)
            if self.read_attempt(epoch) == replaces.attempt:
                self._remove_record(self.folder(epoch))
        # The decisive step: one conditional write.
        try:
            if old is None:
                self.store.create(path, record)
            else:
                self.store.replace(path, old, record)
        except Exception as error:
            if not self.is_there(epoch, attempt, error):
                reason = f"putting its commit record failed: {error}"
                if isinstance(error, FileExistsError):
                    reason = f"{self.store.root}/{path} exists already; delete() or rollback_to() make room"
                raise SaveError(epoch, reason) from error
        # A run that took over meanwhile may have swept the data, or may have seen the epoch already.
        try:
            self._check_fence(epoch)
        except FencedError as error:
            reason = f"its record was put while a newer run took over: {error.reason}"
            try:
                self.check_shallow(self.read_record(epoch))
            except (DamagedError, FormatError, EpochNotFoundError):  # swept: it must not be seen
                self._take_back(epoch, attempt, path, record, old)
                raise error from None
            except (EpochCheckpointError, OSError) as problem:
                raise UncertainError(epoch, f"{reason}; what is there cannot be read: {problem}") from error
            raise UncertainError(epoch, reason) from error
        except OSError as error:
            reason = f"its record was put, but whether a newer run has taken over cannot be read: {error}"
            raise UncertainError(epoch, reason) from error
        self._folders[epoch] = self.names.build(epoch)
        return None if old is None or replaces is None else partial(self.discard, epoch, str(replaces.attempt))

    def _superseded(self, epoch: int, path: str, replaces: ReplaceCondition | None) -> bytes | None:
        """The record of the good epoch that may be replaced, if it is still that one."""
        if replaces is None or replaces.damage or self.read_attempt(epoch) != replaces.attempt:
            return None
        data = self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES)
        return data if parsing.parse_epoch(path, data).attempt == replaces.attempt else None

    def _take_back(self, epoch: int, attempt: str, path: str, record: bytes, old: bytes | None) -> None:
        """Takes a record away whose data a newer run has swept; an epoch that it replaced comes back."""
        if old is None:
            if self.read_attempt(epoch) == attempt:
                self.store.remove(path)
            return
        try:
            self.store.replace(path, record, old)
        except FileNotFoundError:  # the newer run took it away, see `sweep`
            with suppress(FileExistsError):
                self.store.create(path, old)
        except FileExistsError:
            logging.info("%s/%s is the newer run's by now", self.store.root, path)

    def discard(self, epoch: int, attempt: str) -> None:
        for path in self.parts(self.names.build(epoch)):
            if path.rpartition("/")[2] == attempt:
                self.store.remove_tree(path)

    def hide(self, epoch: int, into: str | None = None) -> Callable[[], None]:
        self._check_fence(epoch)
        folder = self.folder(epoch)
        attempts = self._attempt_in(folder) or set()
        if into is not None:
            self._quarantine(epoch, into)
            attempts = set()
        self._remove_record(folder)

        def remove() -> None:
            for attempt in attempts:
                self.discard(epoch, attempt)

        return remove

    def roll_back(self, rollback: Rollback) -> None:
        self._check_fence(rollback.about)
        self.store.create(paths.ROLLBACK_RECORD, rollback.to_bytes())
        self._finish(rollback)

    def _move_rolled_back(self, rollback: Rollback) -> None:
        for epoch in sorted(rollback.epochs, reverse=True):
            path = paths.join(self.folder(epoch), paths.EPOCH_RECORD)
            if self.store.exists(path):
                if rollback.folder is not None:
                    self._quarantine(epoch, rollback.folder)
                self._remove_record(self.folder(epoch))
        self.store.remove(paths.ROLLBACK_RECORD)

    def _quarantine(self, epoch: int, into: str) -> None:
        """Copies an epoch's record and attached metrics to a folder; its data objects stay where they are."""
        folder = self.folder(epoch)
        record, kept = paths.join(folder, paths.EPOCH_RECORD), paths.join(into, folder)
        if self.store.exists(kept) and self._attempt_in(kept) not in (set(), self._attempt_in(folder)):
            raise EpochExistsError(f"{self.store.root}/{kept} exists already; move it away to delete epoch {epoch}")
        for path in (*self.store.find(paths.METRICS_PREFIX, folder), record):
            data = self.store.read(path, limit_bytes=records.MAX_RECORD_BYTES)
            try:
                self.store.create(paths.join(into, path), data)
            except FileExistsError:
                logging.info("%s/%s was copied before", into, path)

    def _remove_record(self, folder: str) -> None:
        """Removes an epoch's record, then its attached metrics: `attach` looks at the record after its write."""
        self.store.remove(paths.join(folder, paths.EPOCH_RECORD))
        for path in self.store.find(paths.METRICS_PREFIX, folder):
            self.store.remove(path)

    def release(self) -> None:
        """See Commits. The claim stays: the next incarnation counts on from it."""
        with suppress(FileExistsError):
            self.store.create(self._path(int(self.incarnation), _CLOSED), b"")
