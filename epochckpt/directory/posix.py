"""EpochDirectory on stores with an atomic folder rename (POSIX).

Guarantees:
- an epoch is staged whole and durably below the incarnation's folder, and becomes visible by one rename;
- every rename goes through that folder. A newer run moves it away, so that every later rename of an older run fails;
- an epoch that is deleted, quarantined or replaced is moved out of sight whole before a byte of it is removed.

How folders come to their places, and what a kill on the way leaves, is in `staging_folder`.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt import _threads, errors
from epochckpt.directory import attached_metrics, metrics_log, owners, staging_folder
from epochckpt.directory import lineage as lineages
from epochckpt.directory.epoch_directory import (
    EpochDirectory,
    ReplaceCondition,
    Rollback,
    Stager,
    Staging,
    Writer,
    make_folder,
)
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.directory.metrics_log import Line
from epochckpt.directory.posix_contents import PosixContents
from epochckpt.format import EpochRecord, parsing, paths
from epochckpt.orbax import StepNames, Views, linked_view, step_names, step_recognition
from epochckpt.storage.posix import owner_of, this_user

if TYPE_CHECKING:
    from epochckpt.storage import Entry, Store

_GIVEN_UP = 16  # failed attempts whose staging is looked for once more


class PosixDirectory(EpochDirectory):
    """Epochs are folders with a commit record. They become visible by the rename of a staged folder."""

    def __init__(self, store: Store, names: StepNames):
        super().__init__(store, names)
        self.claims: set[str] = set()  # claims by this object, also those that failed half-way

    @staticmethod
    def suits(store: Store) -> bool:
        """Whether epochs can be staged and renamed into place there."""
        return store.atomic_folder_rename

    def exists(self) -> bool:
        return os.path.lexists(self.store.root)

    def is_folder(self) -> bool:
        with suppress(FileNotFoundError):  # `isdir` says no where this user may not look
            os.lstat(self.store.root)
        return os.path.isdir(self.store.root)

    def owners(self) -> list[Any]:
        homes = [entry.name for entry in self.store.list("") if paths.parse_incarnation(entry.name) is not None]
        found: list[Any] = []
        for home in homes:
            try:
                found.append(owners.read(self.store, paths.join(home, paths.OWNER_FILE)))
            except (FileNotFoundError, NotADirectoryError):  # an empty home is gone by now, or nobody has claimed by it
                with suppress(FileNotFoundError, NotADirectoryError):
                    found += [{}] * bool(self.store.list(home))
            except (OSError, ValueError, RecursionError):
                found += [{}] * self.store.exists(home)
        return found

    def lineage(self) -> Lineage | None:
        try:
            return parsing.read_record(self.store, paths.LINEAGE_RECORD, lineages.parse)
        except (errors.DamagedError, errors.FormatError) as error:
            error.add_note(f"A manager that is opened at {self.store.root} itself, and claims it, writes it anew")
            raise

    def moving(self) -> list[int]:
        try:
            entries = self.store.list("")
        except FileNotFoundError:  # there is no directory yet
            return []
        homes = [entry.name for entry in entries if paths.parse_incarnation(entry.name) is not None]
        found = [where for home in homes for _, where in staging_folder.on_the_move(self.store, home)]
        epochs = [self.names.parse(where) for where in found if not self.store.exists(where)]
        return sorted(epoch for epoch in epochs if epoch is not None)

    def deleted(self) -> dict[int, Line]:
        found = super().deleted()
        rollback = self.rollback()
        to = None if rollback is None else rollback.to
        return {epoch: line for epoch, line in found.items() if to is None or epoch <= to}

    def lost_records(self, folder: str) -> bool:
        return step_recognition.lost_records(self.store, folder)

    def is_of_host(self) -> bool:
        return self.store.exists(paths.HOST_RECORD)

    def has_something(self, epoch: int) -> bool:
        return self.store.exists(self.folder(epoch))

    def is_ours(self, epoch: int) -> bool:
        return self.store.exists(paths.join(self.folder(epoch), paths.EPOCH_RECORD))

    # -- claiming ------------------------------------------------------------------------------------------------

    def claim(
        self,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        lineage: ClaimLineage | ClaimDirectly = ClaimDirectly(),  # noqa: B008 (a frozen value)
    ) -> PosixWriter:
        check()
        writer = self.claim_as(paths.new_id(), epoch)
        # Every older run is fenced off by now. If a newer one changes it between the next two steps, the second of them
        # fails, because it goes through this run's home.
        try:
            found = self._lineage_for(lineage)
            claimed = lineage.apply(found)
            if claimed is not None and claimed != found:
                writer.overwrite(paths.LINEAGE_RECORD, claimed.to_bytes())
        except BaseException:
            _threads.logged(f"{self.store.root}: a claim that failed", writer.release)
            raise
        return writer

    def _lineage_for(self, claim: ClaimLineage | ClaimDirectly) -> Lineage | None:
        """The lineage that a claim finds. An ordinary claim replaces one that is damaged."""
        try:
            return self.lineage()
        except (errors.DamagedError, errors.FormatError):
            if isinstance(claim, ClaimLineage):
                raise
            logging.warning("%s/%s is damaged: it is written anew", self.store.root, paths.LINEAGE_RECORD)
            return Lineage(directory="", claim=paths.new_id())

    def claim_as(self, incarnation: str, epoch: int = 0) -> PosixWriter:
        """The same as a given incarnation, which the processes of a job with local disks share."""
        self.claims.add(incarnation)
        writer = PosixWriter(self, PosixStager(self.store, incarnation))
        writer.take_over(epoch)
        return writer

    def join(self, incarnation: str) -> PosixStager:
        return PosixStager(self.store, incarnation)

    # -- contents ------------------------------------------------------------------------------------------------

    def contents(self, todelete_subdir: str | None = None) -> PosixContents:
        return PosixContents(self, todelete_subdir)


class PosixStager(Stager):
    """The home of a run, below which saves are staged.

    Attributes:
        home: the folder that everything of the run goes through.
    """

    def __init__(self, store: Store, incarnation: str):
        super().__init__(incarnation)
        self.store = store
        self.home = paths.incarnation_folder(incarnation)
        self._root_id: tuple[int, ...] = ()  # of the directory that was claimed, as far as this process knows it

    def staging(self, epoch: int, save_id: str) -> PosixStaging:
        return PosixStaging(self, epoch, save_id)

    def check(self, epoch: int) -> None:
        if self.store.exists(self.home):
            return
        with suppress(FileNotFoundError, NotADirectoryError):  # the directory itself has gone: nobody has taken it over
            self.store.list("")
            raise self.lost(epoch)

    def note_root(self, *, anew: bool = False) -> None:
        """Remembers which directory was claimed, because another one may lie at its path later."""
        if anew or not self._root_id:
            self._root_id = self.store.root_id()

    def lost(self, epoch: int) -> errors.EpochCheckpointError:
        """The error of a write for which something of this run is not there any more."""
        if self.store.exists(self.home):
            return errors.SaveError(epoch, "the primary has given this attempt up")
        if self.is_away():
            return errors.SaveError(epoch, self.away())
        return errors.FencedError(
            epoch,
            f"a newer run has taken over {self.store.root} (the staging folder of this one, {self.home}, is gone); "
            "this process can no longer save there",
        )

    def is_away(self) -> bool:
        """Whether the directory that was claimed is not there: then no run that is newer has taken anything over."""
        found = self.store.root_id()
        if found and found == self._root_id:
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            return all(paths.parse_incarnation(entry.name) is None for entry in self.store.list(""))
        return True

    def away(self) -> str:
        where = "something else lies at its path" if self.store.root_id() else "nothing lies at its path"
        return (
            f"the directory {self.store.root} has gone away while this run saves there ({where}): was it moved, "
            "deleted or unmounted? Nothing can be saved until it is back where it was; start the run again then"
        )


class PosixStaging(Staging):
    """A folder in the home of a run, which becomes the epoch's. Each save has its own, and no late writer meets it."""

    def __init__(self, stager: PosixStager, epoch: int, save_id: str):
        folder = paths.join(stager.home, save_id.partition("-")[2])  # `<epoch>-<number>`
        super().__init__(stager.store, epoch, save_id, folder)
        self._stager = stager

    def make(self) -> None:
        """Makes the folder, unless another node has made it."""
        with self.guarded(), suppress(FileExistsError):
            self.store.make_folder(self.folder)
        self._stager.note_root()

    def node_folder(self, node: str) -> str:
        return paths.join(self.folder, paths.folder_name(node))

    def make_node_folder(self, node: str) -> str:
        folder = self.node_folder(node)
        self.make()
        with self.guarded():
            self.store.make_folder(folder)
        return folder

    def seal(self, node: str, folders: Sequence[str], record: bytes, view: Sequence[str] | None) -> None:
        folder = self.node_folder(node)
        with self.guarded():
            for inner in folders:
                self.store.sync_folder(paths.join(folder, inner))
            if view is not None:
                has_json = paths.JSON_FILE in folders
                linked_view.link_node(self.store, self.folder, paths.folder_name(node), not has_json, view)
            super().seal(node, folders, record, view)
            self.store.sync_folder(folder)
            self.store.sync_folder(self.folder)

    def lost(self) -> errors.EpochCheckpointError:
        return self._stager.lost(self.epoch)


class PosixWriter(Writer):
    """The right of the run whose home is there: each of its renames goes through the home."""

    def __init__(self, directory: PosixDirectory, stager: PosixStager):
        super().__init__(directory, stager.incarnation)
        self.directory: PosixDirectory = directory
        self._stager = stager
        self._views = Views()
        self._given_up: collections.deque[Staging] = collections.deque(maxlen=_GIVEN_UP)
        self._latest = -1  # the newest epoch that was seen by this object, which may be gone by now

    @property
    def home(self) -> str:
        """The folder that everything of this run goes through."""
        return self._stager.home

    def staging(self, epoch: int, save_id: str) -> PosixStaging:
        return self._stager.staging(epoch, save_id)

    def check(self, epoch: int) -> None:
        self._stager.check(epoch)

    def lost(self, epoch: int) -> errors.EpochCheckpointError:
        return self._stager.lost(epoch)

    def take_over(self, epoch: int) -> None:
        """Makes the home, fences off every older run, and finishes what they left; see `EpochDirectory.claim`."""
        try:
            with self._permitted(""):
                self._take_over(epoch)
        except errors.AccessError:  # the next try would leave one more home
            _threads.logged(f"{self.store.root}: the staging folder of a claim stays", self.release)
            raise

    def _take_over(self, epoch: int) -> None:
        self.store.make_root()  # deleted since it was opened, perhaps
        draft = paths.unclaimed_folder(self.incarnation)
        self.store.make_folder(draft)
        with self._fenced(epoch):  # of two runs that claim at the same moment, one is the later one
            self.store.create(paths.join(draft, paths.OWNER_FILE), json.dumps(owners.current()).encode())
            self.store.sync_folder(draft)
            self.store.rename(draft, self.home)
            self._stager.note_root(anew=True)
            entries = self.store.list("")
            swept = [gone for gone in map(self._sweep, entries) if gone]
            if all(self.names.parse(entry.name) is None for entry in entries) and not self._is_mirrored:
                folders = [(entry.name, entry.is_folder) for entry in entries]
                if not step_names.named_otherwise(self.store, folders):  # somebody has removed them all
                    self._append(Line(-1, back=True))
            self.store.sync_folder("")
            self._finish_if_it_can()
            if not self.store.exists(self.home):
                raise self.lost(epoch)
        if swept:
            logging.info("%s: removing what %d earlier runs left unfinished", self.store.root, len(swept))
            _threads.start(lambda: [self._remove(path) for path in swept])

    def _remove(self, path: str) -> None:
        """Removes what is out of sight; a failure is logged, and the next claim tries again."""
        _threads.logged(f"{self.store.root}/{path} stays", partial(self.store.remove_tree, path))

    def _sweep(self, entry: Entry) -> str:
        """Fences off the earlier run whose staging this is; returns where that lies then, if it is to be removed."""
        if paths.parse_unclaimed(entry.name) is not None:
            away = staging_folder.removed(self.home)
            with suppress(FileNotFoundError, PermissionError):
                self.store.rename(entry.name, away)
                return away
            return ""
        older = paths.parse_incarnation(entry.name)
        if older is None or older == self.incarnation:
            return ""
        with self._permitted(entry.name):
            away = staging_folder.take_over(self.store, self.home, entry.name)
        if away is not None and older not in self.directory.claims:
            owner = paths.join(away, paths.OWNER_FILE)
            when = owners.report_takeover(self.store.root, partial(owners.read, self.store, owner))
            known = self.directory.taken_over or ("", -1)
            self.directory.taken_over = max(known, (older, when), key=lambda run: run[1])
        return away or ""

    def stage(self, epoch: int, save_id: str) -> PosixStaging:
        for given_up in list(self._given_up):
            if self.store.exists(given_up.folder):  # a late node has made it again
                self.discard(given_up)
        staging = self.staging(epoch, save_id)
        staging.make()
        return staging

    def write_view(self, record: EpochRecord, run: Callable[[list[Callable[[], None]]], None]) -> EpochRecord:
        view, noted = self._views.note(record)
        staging = self.staging(record.epoch, record.save_id)
        with staging.guarded():
            return linked_view.write(self.store, staging.folder, noted, view, run)

    def publish(
        self, staging: Staging, record: bytes, check: Callable[[], None], replaces: ReplaceCondition | None
    ) -> Callable[[], None] | None:
        epoch = staging.epoch
        # A rollback that was interrupted would hide the new epoch, too.
        if epoch in self.directory.hidden():
            try:
                self.finish_rollback()
            except errors.UnfinishedError as error:
                raise errors.SaveError(epoch, str(error)) from error
        with staging.guarded():
            self.store.create(paths.join(staging.folder, paths.EPOCH_RECORD), record)
            self.store.sync_folder(staging.folder)
        # From here on the epoch may become visible. A damaged one gives way before, a good one by the rename itself.
        check()
        present = replaces is not None and self.directory.read_save_id(epoch) == replaces.save_id
        replace = replaces is not None and present and not replaces.damage
        if present and not replace and self.store.exists(self.directory.folder(epoch)):
            away = f"{paths.DAMAGED_PREFIX}{paths.new_id()}"
            self.unlist(epoch, away)
            logging.warning("%s: the damaged checkpoint %d was moved to %s", self.store.root, epoch, away)
        return self._put_in_place(staging, replace=replace)

    def _put_in_place(self, staged: Staging, *, replace: bool) -> Callable[[], None] | None:
        """Gives a staged folder with a commit record the epoch's name, durably.

        With `replace`, what has the name gives way, and the returned call removes its bytes. Raises as `publish` does.
        """
        epoch = staged.epoch
        final = self.names.build(epoch)
        old: str | None = None
        try:
            old = staging_folder.put(self.store, self.home, staged.folder, final, replace=replace)
        except OSError as error:
            if not self._arrived(staged, error):
                raise self._refusal(epoch, error) from error
        staging_folder.settle(self.store, self.home, epoch, final, old)
        self.directory.note_folder(epoch, final)
        self._latest = max(self._latest, epoch)
        return None if old is None else partial(self.store.remove_tree, old)

    def _arrived(self, staged: Staging, error: OSError) -> bool:
        """Whether the staged epoch is in its place although the call that put it there has reported an error.

        Over a network a call may succeed and report an error, or take effect later. So a staging folder that is still
        there is taken away: then the epoch can never arrive. UncertainError says that storage does not answer.
        """
        try:
            found = self.directory.read_in(staged.folder, staged.epoch)
            if found is None:
                return self.directory.is_there(staged.epoch, staged.save_id, error)
            if found.save_id == staged.save_id:
                away = self._take_away(staged)
                _threads.logged("the remains of a save stay", lambda: self.store.remove_tree(away))
        except (errors.DamagedError, errors.FormatError, OSError) as problem:
            reason = f"{errors.say(error)}; and where it is now cannot be seen ({problem})"
            raise errors.UncertainError(staged.epoch, reason) from error
        return found.save_id != staged.save_id  # exchanged for the epoch that it replaces

    def _refusal(self, epoch: int, error: OSError) -> errors.EpochCheckpointError:
        """Why a staged epoch could not be put in its place."""
        if isinstance(error, FileNotFoundError):
            return self.lost(epoch)
        if isinstance(error, FileExistsError):
            final = self.names.build(epoch)
            reason = f"{self.store.root}/{final} exists already; delete() or rollback_to() make room"
            if final in self.directory.scan()[1].values():
                reason = f"something else is in the way: {self.directory.obstacle(final)}"
            return errors.SaveError(epoch, reason)
        reason = f"renaming it into place failed: {error}"
        if isinstance(error, PermissionError):
            reason += f". {self._whose(self.names.build(epoch))}"
        if staging_folder.immovable(error):
            reason += f". No rename moves the epoch that is there; delete({epoch}) makes room"
        return errors.SaveError(epoch, reason)

    def discard(self, staging: Staging) -> None:
        if staging.folder not in [given_up.folder for given_up in self._given_up]:
            self._given_up.append(staging)
        with suppress(FileNotFoundError):
            self.store.remove_tree(self._take_away(staging))

    def _take_away(self, staged: Staging) -> str:
        away = staging_folder.removed(self.home)
        self.store.rename(staged.folder, away)
        return away

    @property
    def _is_mirrored(self) -> bool:
        """Whether another directory may have epochs from which a run goes on here."""
        return self.store.exists(paths.MIRROR_RECORD)

    def _log(self, epoch: int) -> None:
        """Notes the metrics of an epoch that is about to be deleted, or that the run goes back to the one before."""
        is_newest = self._latest <= epoch or not self.store.exists(self.directory.folder(self._latest))
        if is_newest:  # else it is one of many deletions
            numbers = [self.names.parse(entry.name) for entry in self.store.list("") if entry.is_folder]
            others = [number for number in numbers if number not in (None, epoch)]
            self._latest = max(others, default=-1)
            if self._latest < epoch:
                self._append(Line(max(others, default=epoch - 1 if self._is_mirrored else -1), back=True))
                return
        with suppress(errors.DamagedError, errors.FormatError, errors.FormatVersionError):
            found = self.directory.read_head(epoch)
            metrics = attached_metrics.merge(found.metrics, attached_metrics.of_epoch(self.directory, found))
            if line := Line.of(epoch, found.save_id, found.committed_ns, metrics):
                self._append(line)

    def keep_deleted(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._append(line)

    def _append(self, line: Line) -> None:
        """Appends to the log of deleted epochs, unless a newer run has taken over; a failure is logged."""
        path = paths.METRICS_LOG

        def append() -> None:
            if line.back and not self.store.exists(path):
                return
            make_folder(self.store, path.partition("/")[0])
            if self.store.exists(self.home):
                self.store.append_line(path, line.to_bytes(), limit_bytes=metrics_log.MAX_BYTES)

        _threads.logged(f"{self.store.root}: the metrics of a deleted epoch are not kept", append)

    def unlist(self, epoch: int, kept_in: str | None = None, *, logged: bool = False) -> Callable[[], None]:
        name = self.directory.folder(epoch)
        kept = None if kept_in is None else paths.join(kept_in, name)
        if kept is not None and self.store.exists(kept):
            problem = f"{self.store.root}/{kept} exists already; move it away first"
            raise errors.EpochExistsError(problem)
        if logged:
            _threads.logged(f"{self.store.root}: metrics of checkpoint {epoch} are not kept", partial(self._log, epoch))
        away = staging_folder.removed(self.home, name)
        with self._fenced(epoch), self._permitted(name):
            try:
                if kept is None:
                    self.store.rename(name, away)
                else:
                    staging_folder.keep(self.store, self.home, name, kept)
            except OSError as error:
                if not staging_folder.immovable(error):
                    raise
                self.roll_back(Rollback(None, (epoch,), paths.new_id(), kept_in))
                return lambda: None
        self.store.sync_folder("")
        return lambda: self.store.remove_tree(away)  # nothing is there if it was kept

    def roll_back(self, rollback: Rollback) -> None:
        with self._fenced(rollback.about):
            try:
                self.store.put(paths.ROLLBACK_RECORD, rollback.to_bytes(), draft=self._draft())
            except FileExistsError:
                self.finish_rollback()  # one is left from before; there is one at a time
                self.roll_back(rollback)
                return
            except OSError as error:
                if self.directory.rollback() != rollback:
                    raise
                raise errors.UnfinishedError(self.store.root, rollback.epochs, errors.say(error)) from error
        self._finish(rollback)

    def _move_rolled_back(self, rollback: Rollback) -> None:
        folder = rollback.folder
        if rollback.to is not None:
            self._append(Line(rollback.to, back=True))
        with self._fenced(rollback.about):
            if folder is not None:
                staging_folder.make_folder(self.store, self.home, folder)
            for epoch in sorted(rollback.epochs, reverse=True):
                name = self.directory.folder(epoch)
                if not self.store.exists(name):
                    continue
                with self._permitted(name):
                    if folder is None or self.store.exists(paths.join(folder, name)):  # or copied
                        staging_folder.remove_here(self.store, self.home, name)
                    else:
                        staging_folder.move(self.store, self.home, name, paths.join(folder, name))
                self.store.sync_folder("")
            if folder is not None:
                self.store.sync_folder(folder)
            # not removed where it lies: by now it may be the record of a newer run
            done = paths.join(self.home, f"done-{paths.new_id()}")
            self.store.rename(paths.ROLLBACK_RECORD, done)
            self.store.sync_folder("")
            self.store.remove(done)

    def release(self) -> None:
        staging_folder.leave(self.store, self.home, paths.unclaimed_folder(self.incarnation))
        self.store.sync_folder("")

    @contextmanager
    def _permitted(self, path: str) -> Generator[None]:
        """Raises an AccessError that names the owner of a folder which this user may not move or change."""
        try:
            yield
        except errors.AccessError:
            raise
        except PermissionError as error:
            raise errors.AccessError(f"{error.strerror or error}: {self._whose(path)}") from error

    def _whose(self, path: str) -> str:
        """What to say, and to do, where permissions keep this user from moving or changing a folder."""
        place = os.path.join(self.store.root, path).rstrip("/")
        return (
            f"{place} belongs to {owner_of(place)}, and this process is {this_user()}: moving a folder needs write "
            "permission on it. Have its owner, or root, remove it, or give its group that permission (chmod -R g+w). "
            "Users that share a directory save with umask 002, or with "
            "FileOptions(path_permission_mode=0o2775)"
        )

    @contextmanager
    def _fenced(self, epoch: int) -> Generator[None]:
        """Raises FencedError where a newer run has taken this run's home, or has done the step before this run."""
        try:
            yield
        except (FileNotFoundError, FileExistsError) as error:
            if self.store.exists(self.home):
                raise
            raise self.lost(epoch) from error
