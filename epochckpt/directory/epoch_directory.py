"""When is an epoch visible? This table is the one answer.

| on storage | state | visible to |
| --- | --- | --- |
| only below `incarnation-*` (POSIX), or named by no epoch of the head (object store) | uncommitted | nobody |
| `<epoch>/epoch.json` under its final name (POSIX), or an epoch of the head (object store) | committed | everybody |
| the same, named by a `rollback.json` (POSIX) | rolled back or deleted, being moved or removed | nobody |
| `<epoch>/` as stock Orbax finished it (see `orbax.step_recognition`) | committed | everybody |
| the same, while a save that may replace it (`allow_overwrite`) commits | committed, old or new | everybody |
| moved out of sight (POSIX), or gone from the head (object store) | deleted, being removed | nobody |

On POSIX (`posix`) an epoch is staged whole and renamed into place. On object stores (`bucket`) its objects carry the
id of the save, and one conditional write of the head makes them the epoch. A later incarnation fences off
earlier ones: it moves their staging folders away, or claims the head, which they can no longer change then.

A rollback quarantines every later epoch, and the next save of its number quarantines a damaged one. A good epoch is
replaced only if the caller allows it (`ReplaceCondition`).

Three objects, so that nobody holds a method that he may not call:

- `EpochDirectory` reads a directory, and never writes. Its `claim` is the only way to a `Writer`;
- a `Writer` is one run's right to change the directory. In a job the primary has it;
- a `Staging` says where the nodes of one save write. A `Stager` gives stagings, and nothing else: the other processes
  of a job get one when they `join` the claim.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from epochckpt import _collector, errors
from epochckpt.directory import metrics_log
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.format import EpochRecord, codec, parsing, paths
from epochckpt.format.codec import stored
from epochckpt.orbax import StepNames, step_names, step_recognition, steps
from epochckpt.storage import listing

if TYPE_CHECKING:
    from epochckpt.directory.contents import Contents
    from epochckpt.storage import Store


@dataclasses.dataclass(frozen=True)
class Rollback:
    """`rollback.json`: epochs that no longer count. Readers obey it, and the next run that writes finishes it.

    A rollback always has one. A deletion needs one only where no rename can take the epoch out of sight at once.
    """

    # The epoch that was rolled back to; None for a deletion.
    to: int | None = stored("to", codec.maybe(codec.INTEGER))
    epochs: tuple[int, ...] = stored("epochs", codec.integers("epochs"))
    id: str = stored("id", codec.name())
    # For a deletion: the folder that keeps the epochs; None: they are removed.
    kept: str | None = stored("kept", codec.maybe(codec.name()), default=None)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return codec.seal("rollback", self)

    @property
    def about(self) -> int:
        """The epoch that errors are about."""
        return self.epochs[0] if self.to is None and self.epochs else self.to or 0

    @property
    def folder(self) -> str | None:
        """Where the epochs go: a name that no clean-up touches; None: they are removed."""
        return self.kept if self.to is None else f"{paths.ROLLED_BACK_PREFIX}{self.id}"


def parse_rollback(path: str, data: bytes) -> Rollback:
    """Parses `rollback.json`; raises DamagedError, FormatError or FormatVersionError."""
    return codec.parse(Rollback, parsing.open_record(path, data, "rollback"))


@dataclasses.dataclass(frozen=True)
class ReplaceCondition:
    """Which epoch the next save of its number may replace: this attempt at it and no other."""

    save_id: str | None  # None: an epoch whose commit record cannot be used
    damage: str = ""  # a damaged epoch is quarantined first, a good one is exchanged: one is there at any moment


class Staging(abc.ABC):
    """Where the nodes of one save write before it is an epoch.

    Attributes:
        store: the directory.
        epoch: the epoch that is saved.
        save_id: what no other save is called.
        folder: what its files are found in; with others' where the store has no rename.
    """

    def __init__(self, store: Store, epoch: int, save_id: str, folder: str):
        self.store = store
        self.epoch = epoch
        self.save_id = save_id
        self.folder = folder

    @abc.abstractmethod
    def node_folder(self, node: str) -> str:
        """Where a node writes its record and handlers' files."""

    def data_folder(self, node: str, item: str) -> str:
        """Where a node writes the data files of an item."""
        del item
        return self.node_folder(node)

    def make_node_folder(self, node: str) -> str:
        """Makes a node's folder and returns its path; raises `lost` where there is no staging to make it in."""
        return self.node_folder(node)

    def seal(self, node: str, folders: Sequence[str], record: bytes, view: Sequence[str] | None) -> None:
        """Makes the names in a node's folder and in its `folders` durable, and writes `node.json` (`record`).

        It is the node's last act on its staging. `view`: None if the epoch is to have no Orbax view; else the folders
        of databases in it where this node makes the link to its folder. The primary makes those that are missing.
        """
        del folders, view
        self.store.create(paths.join(self.node_folder(node), paths.NODE_RECORD), record)

    def lost(self) -> errors.EpochCheckpointError:
        """The error of a save whose staging is gone."""
        return errors.SaveError(self.epoch, f"files of it have disappeared from {self.store.root}")

    @contextlib.contextmanager
    def guarded(self) -> Generator[None]:
        """Raises `lost` where the staging is not there any more."""
        try:
            yield
        except FileNotFoundError:
            raise self.lost() from None


CHECKED_FILES = 2000
"""About how many files a look checks; the newest epochs come first."""

_ignored: set[str] = set()  # paths that were logged as ignored, once per process


class EpochDirectory(abc.ABC):
    """The epochs of one directory, as any process may look at them. It writes nothing: a `claim` gives who does.

    Attributes:
        save_ids_in_paths: all saves of one number share a folder, so the paths of their files contain the save's id
            (`EpochRecord.objects`).
    """

    save_ids_in_paths: ClassVar[bool] = False

    def __init__(self, store: Store, names: StepNames):
        self.store = store
        self.names = names
        self.taken_over: tuple[str, int] | None = None  # incarnation and claim of a run that had not closed it
        self._ignored = frozenset[int]()
        self._folders: dict[int, str] = {}

    @property
    def place(self) -> str:
        """Where the epochs lie, for people."""
        return self.store.root

    def exists(self) -> bool:
        """Whether something lies at the directory's path; in a bucket there is no need for it."""
        return True

    def is_folder(self) -> bool:
        """Whether a folder is there, or none is needed; raises PermissionError where this user may not look."""
        return True

    def folder(self, epoch: int) -> str:
        """Folder of an epoch, relative to the directory."""
        if epoch not in self._folders and self.names.several:
            self.scan()
        return self._folders.get(epoch) or self.names.build(epoch)

    def note_folder(self, epoch: int, folder: str | None) -> None:
        """Notes the folder of an epoch that a writer has made, or None for one that it has taken out of sight."""
        if folder is None:
            self._folders.pop(epoch, None)
        else:
            self._folders[epoch] = folder

    def list_epochs(self) -> list[int]:
        """The committed epochs, ascending, as storage has them now."""
        return self.scan()[0]

    def read_record(self, epoch: int) -> EpochRecord:
        """An epoch's commit record; an `OrbaxRecord` if stock Orbax wrote it."""
        return self._read(epoch, parsing.parse_epoch)

    def read_head(self, epoch: int) -> EpochRecord:
        """The commit record without the items, in a small part of the time."""
        return self._read(epoch, parsing.parse_head)

    def forget_records(self) -> None:
        """Has the next look at an epoch read its record from storage, where it may be remembered."""
        return

    def read_summary(self, epoch: int) -> EpochSummary:
        """The summary of an epoch, with all its metrics, in the fewest requests."""
        return EpochSummary.of(self.read_head(epoch))

    def attached(self) -> Mapping[int, tuple[str, Mapping[str, Mapping[str, Any]]]] | None:
        """The attempts and attached metrics, by source, of epochs that have such; None where each is a file.

        As of the last look.
        """
        return None

    def deleted(self) -> dict[int, metrics_log.Line]:
        """What is kept of epochs that were deleted, their metrics, ascending; numbers may be in use again."""
        return metrics_log.deleted(metrics_log.read(self.store))

    def _read(self, epoch: int, parse: Callable[[str, bytes], EpochRecord]) -> EpochRecord:
        if epoch in self.hidden():
            raise self._unknown(epoch)
        folder = self.folder(epoch)
        if (record := self.read_in(folder, epoch, parse)) is not None:
            return record
        try:
            if self._is_orbax(folder):
                return steps.read(self.store, folder, epoch)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise errors.unreadable(folder, error) from error
        raise self._unknown(epoch)

    def read_in(
        self, folder: str, epoch: int, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> EpochRecord | None:
        """The commit record in a folder, by default without its items; None if there is no record of ours."""
        path = paths.join(folder, paths.EPOCH_RECORD)
        record = parsing.read_record(self.store, path, parse)
        if record is not None and record.epoch != epoch:
            raise errors.FormatError(path, f"is the record of checkpoint {record.epoch}, found under the name {epoch}")
        return record

    def _unknown(self, epoch: int) -> errors.EpochNotFoundError:
        try:
            return errors.EpochNotFoundError(epoch, self.store.root, self.list_epochs())
        except NotADirectoryError:  # not about an epoch at all
            raise
        except OSError as error:  # another epoch's folder is not permitted, for example
            raise errors.unreadable(self.store.root, error) from error

    def moving(self) -> list[int]:
        """Epochs that an earlier run was killed on the way to move: the next claim puts them where they belong."""
        return []

    def obstacle(self, folder: str) -> str:
        """Why a folder that is named like an epoch is not an epoch, and what to do about it."""
        where = f"{self.store.root}/{folder}"
        if per_node := list(self._per_node(folder)):
            return (
                f"{where} holds epochs of single nodes ({', '.join(per_node[:5])}), each saved by itself. Read them "
                "with ec.caffe2.CheckpointManager(directory, node, 'epochckpt'), and choose another directory for this"
            )
        if self.lost_records(folder):
            return (
                f"{where} is an epoch of epochckpt that lost its records: it holds no {paths.EPOCH_RECORD}. Nothing "
                "of it can be verified, so it is not read. Put a whole copy in its place, or move the folder away"
            )
        return (
            f"{where} is named like an epoch but holds no {paths.EPOCH_RECORD}, and it is no finished step of stock "
            "Orbax on a file system either. Choose another directory, or move the folder away"
        )

    def _per_node(self, folder: str) -> Iterator[str]:
        """The nodes whose epochs, each by itself and of any number, lie in a folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in (entry.name for entry in self.store.list(folder) if entry.is_folder):
                path = paths.join(folder, name, paths.EPOCH_RECORD)
                with contextlib.suppress(errors.EpochCheckpointError, OSError):  # of another program
                    record = parsing.read_record(self.store, path, parsing.parse_head)
                    if record is not None and record.per_node:
                        yield paths.shown_name(name)

    def read_per_node(
        self, folder: str, epoch: int, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> dict[str, EpochRecord | str]:
        """The epochs that nodes saved by themselves in a folder (Caffe2's managers do), by the names of their folders.

        A str says why a record cannot be used: it cannot be read, or is of another number. Other records of the number
        are passed over: a node's in a folder of another name, such as a copy, and those of epochs of all nodes.
        """
        found: dict[str, EpochRecord | str] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in (e.name for e in self.store.list(folder) if e.is_folder and paths.is_name(e.name)):
                try:
                    record = self.read_in(paths.join(folder, name), epoch, parse)
                except (errors.EpochCheckpointError, OSError) as error:
                    found[name] = errors.say(error)
                    continue
                if record is not None and record.per_node and record.nodes[0].folder == name:
                    found[name] = record
        return found

    def check_shallow(self, record: EpochRecord, *, is_partial: bool = False) -> None:
        """Raises DamagedError for the first file that is missing or has another size than recorded; reads none.

        A partial directory has the parts of one host, and the nodes of the others lie elsewhere. In a bucket nothing is
        looked at, because that would take a request for each file: a restore finds the damage, and falls back, too.
        """
        folder = self.folder(record.epoch)
        if isinstance(record, steps.OrbaxRecord):
            steps.check(self.store, folder, record)
        for number in range(len(record.nodes)):
            if not is_partial or self.store.exists(paths.join(folder, record.node_folder(number))):
                self.check_node(folder, record, number)

    def check_node(self, folder: str, record: EpochRecord, number: int, sizes: Mapping[str, int] | None = None) -> None:
        """The same as `check_shallow`, for one node of an epoch in a folder, of which `sizes` may have all files."""
        node = record.nodes[number]
        for file, size in [(None, node.record_size), *((f, f.size) for f in node.files)]:
            inner = record.path(number, file)
            path = paths.join(folder, inner)
            try:
                found = self.store.size(path) if sizes is None else sizes.get(inner)
            except OSError as error:
                raise errors.unreadable(path, error) from error
            if found is None:
                raise errors.DamagedError(path, "is missing")
            if found != size:
                raise errors.DamagedError(path, f"has {found} bytes, {size} were written")

    def scan(self) -> tuple[list[int], dict[int, str]]:
        """The committed epochs, and by number the folders that are only named like an epoch.

        Such a folder holds no commit record of ours, and is neither a step of stock Orbax nor a remainder of ours.
        """
        try:
            entries = self.store.list("")
        except FileNotFoundError:
            return [], {}
        hidden = self.hidden() if any(e.name == paths.ROLLBACK_RECORD for e in entries) else self._ignored
        folders: dict[int, str] = {}
        foreign: dict[int, str] = {}
        self.names.learn(entry.name for entry in entries)
        with _collector.paused():  # of ten thousand epochs there are many objects, which stay
            named = [(epoch, entry) for entry in entries if (epoch := self.names.parse(entry.name)) is not None]
            records = {entry.name: f"{entry.name}/{paths.EPOCH_RECORD}" for _, entry in named if entry.is_folder}
        found = self.store.existing(records.values())
        for epoch, entry in named:
            if not entry.is_folder:
                where = f"{self.store.root}/{entry.name}"
                if where not in _ignored:
                    _ignored.add(where)
                    logging.warning("%s is a symlink or a file, not a folder: not followed, and no epoch", where)
            elif records[entry.name] in found or self._is_orbax(entry.name):
                if epoch not in folders or entry.name == self.names.build(epoch):
                    folders[epoch] = entry.name
            elif epoch not in hidden:  # a deletion of ours moves a folder away before anything in it is removed
                foreign[epoch] = entry.name
        self._folders = folders
        return sorted(folders.keys() - hidden), foreign

    def hidden(self) -> frozenset[int]:
        """The epochs that a rollback hides just now, or that are ignored."""
        rollback = self.rollback()
        return self._ignored if rollback is None else self._ignored.union(rollback.epochs)

    def ignore(self, epochs: Collection[int]) -> None:
        """From now on these epochs, and no others, are left out: they lie here, and the job does not have them."""
        self._ignored = frozenset(epochs)

    def rollback(self) -> Rollback | None:
        """The rollback that is under way, or was interrupted; None without one."""
        try:
            return parsing.read_record(self.store, paths.ROLLBACK_RECORD, parse_rollback)
        except errors.FormatVersionError:
            raise
        except (errors.DamagedError, errors.FormatError) as error:
            where = f"{self.store.root}/{paths.ROLLBACK_RECORD}"
            remedy = (
                "It names the epochs that an interrupted rollback, or deletion, has taken out of sight: without it "
                "none can be listed. Move this file away; then all epochs that are there count, those that were rolled "
                "back, too, so roll back once more before you train on"
            )
            raise type(error)(where, f"{error.problem}. {remedy}") from None

    def _is_orbax(self, folder: str) -> bool:
        """Whether a folder without a commit record is a step that stock Orbax finished."""
        return step_recognition.is_step(self.store, folder, lambda n: self.names.parse(n) is not None)

    def lost_records(self, folder: str) -> bool:
        """Whether a foreign folder is an epoch of ours that lost its records; a bucket does not tell."""
        del folder
        return False

    def is_of_host(self) -> bool:
        """Whether the directory is on a disk of one host, and has only that host's parts of epochs."""
        return False

    @abc.abstractmethod
    def has_something(self, epoch: int) -> bool:
        """Whether there is something in the place of an epoch, which a new one of the number finds in its way."""

    @abc.abstractmethod
    def is_ours(self, epoch: int) -> bool:
        """Whether a listed epoch has a commit record of epochckpt; else it is a step of stock Orbax."""

    def is_certain_step(self, epoch: int) -> bool:
        """Whether a listed epoch that is not ours is a step of stock Orbax without doubt; raises as `read_record`."""
        return self.read_record(epoch).sure

    def write_refusal(self) -> errors.AccessError | None:
        """Why this process may not write to the directory, if that can be seen without trying."""
        if self.store.may_write():
            return None
        return errors.AccessError(
            f"{self.store.root}: this user (uid {os.getuid()}) may read it, but not write there: nothing can be saved "
            "or deleted. Give write access, or save to another directory"
        )

    @abc.abstractmethod
    def owners(self) -> list[Any]:
        """What is known of the processes whose runs have not closed the directory; see `owners.current`."""

    @abc.abstractmethod
    def lineage(self) -> Lineage | None:
        """Whose mirror this directory is, as storage has it now; None if no directory has claimed it as one."""

    def read_save_id(self, epoch: int) -> str | None:
        """Save id of the committed epoch on storage; None if there is no such epoch, or its record is damaged.

        FormatVersionError: only a newer epochckpt can read its record.
        """
        try:
            return self.read_head(epoch).save_id
        except (errors.DamagedError, errors.FormatError, errors.EpochNotFoundError):
            return None

    def replace_condition(self, epoch: int) -> ReplaceCondition:
        """The condition that allows a save to replace an epoch as it is on storage now.

        Raises:
            InvalidArgumentError: a save cannot take its place in one step.
        """
        record = self.read_record(epoch)
        folder = self.folder(epoch)
        if record.stock or folder != self.names.build(epoch):
            raise errors.InvalidArgumentError(
                f"checkpoint {epoch} ({self.store.root}/{folder}) was written by stock Orbax, or under another step "
                "name format, and cannot be replaced in one step; delete() makes room for it"
            )
        return ReplaceCondition(record.save_id)

    def seen_save_id(self, epoch: int) -> str | None:
        """The same as of the last look at the directory, where such a look tells it."""
        return self.read_save_id(epoch)

    def is_there(self, epoch: int, save_id: str, error: Exception) -> bool:
        """Whether an attempt has become the epoch although the decisive step has reported an error."""
        try:
            return self.read_head(epoch).save_id == save_id
        except errors.EpochNotFoundError:
            return False
        except (errors.EpochCheckpointError, OSError) as problem:
            reason = f"{errors.say(error)}; and what is there now cannot be read ({problem})"
            raise errors.UncertainError(epoch, reason) from error

    def require(self, epoch: int) -> list[int]:
        """The committed epochs; if `epoch` is missing among them, raises EpochNotFoundError, which lists them."""
        epochs = self.list_epochs()
        if epoch not in epochs:
            raise errors.EpochNotFoundError(epoch, self.store.root, epochs)
        return epochs

    # -- claiming ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def claim(
        self,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        lineage: ClaimLineage | ClaimDirectly = ClaimDirectly(),  # noqa: B008 (a frozen value)
    ) -> Writer:
        """Makes this the newest incarnation: fences off older ones, finishes a rollback, sweeps their leftovers.

        The only way to a `Writer`. The `lineage` changes with it, or the claim fails with a FencedError.

        After a failure in the middle of it, a second call makes another incarnation. Errors name `epoch`. FencedError
        says that another run has claimed at the same moment, and is the later one. `check` raises what keeps this run
        from claiming; on object stores no other run's claim comes between a check and the claim.
        """

    def claim_as(self, incarnation: str) -> Writer:
        """Claims this directory as a part of the claim that another one's process has made: each has a disk of its own.

        UnsupportedError: it is on no disk.
        """
        raise errors.UnsupportedError(f"{self.store.root} is not on a disk of one host: {incarnation} cannot claim it")

    @abc.abstractmethod
    def join(self, incarnation: str) -> Stager:
        """What another process of the run has that has claimed: it stages, and changes nothing else."""

    # -- contents ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def contents(self, todelete_subdir: str | None = None) -> Contents:
        """All that lies there, beside the epochs, too. Deleted epochs may be kept in the folder `todelete_subdir`."""

    @property
    def has_one(self) -> bool:
        """Whether it is the folder of one epoch, whatever lies beside it; there is no mirror of that."""
        return False

    # -- the cheapest looks --------------------------------------------------------------------------------------

    @property
    def has_cheap_reads(self) -> bool:
        """Whether a small file can be read without a request that counts."""
        return True

    def refresh(self) -> bool:
        """Reads anew what names all epochs; False where there is no such object, and each folder speaks for itself."""
        return False

    def check_is_named(self) -> None:
        """Raises NotACheckpointDirectoryError where epochs lie, and what should name all of them is lost."""
        return

    def seen_epochs(self) -> list[int]:
        """The committed epochs, ascending, as of the last look where one look tells them."""
        return self.list_epochs()

    def folders(self, hidden: Collection[int]) -> dict[int, str]:
        """The folder of each epoch that is not `hidden`.

        Also folders that are only named like an epoch, where nothing but a look into each tells them from epochs.
        FileNotFoundError: the directory is gone.
        """
        entries = {entry.name: entry.is_folder for entry in self.store.list("")}
        self.names.learn(entries)
        found: dict[int, str] = {}
        for name, is_folder in entries.items():
            epoch = self.names.parse(name) if is_folder else None
            if epoch is not None and epoch not in hidden and (epoch not in found or name == self.names.build(epoch)):
                found[epoch] = name
        return found

    def current_folder(self, epoch: int) -> str | None:
        """The folder of an epoch as it is now; None if it is known, without a look at the folder, not to count."""
        return None if epoch in self.hidden() else self.folder(epoch)

    def look_in(self, folder: str, epoch: int) -> EpochRecord | None:
        """The commit record in an epoch's folder, without the items; None if it is no epoch that all nodes saved.

        A record that can be remembered is that of the last look.
        """
        record = self.read_in(folder, epoch)
        if record is None and self._is_orbax(folder):
            return steps.read(self.store, folder, epoch)
        return record

    def summary(self, folder: str, epoch: int) -> EpochRecord | EpochSummary | None:
        """What the cheapest look tells of an epoch, see `look_in`: without a request where the last look has told it.

        Of some epochs it leaves out the metrics, see `lacking_metrics`.
        """
        return self.look_in(folder, epoch)

    def lacking_metrics(self) -> Collection[int]:
        """The epochs whose `summary` leaves out metrics, because they are large."""
        return ()

    def replaced(self, seen: Mapping[int, str]) -> set[int]:
        """Which of the epochs are another save than the one seen, as far as the cheapest look tells: at the newest."""
        newest = max(seen, default=None)
        if newest is None or self.seen_save_id(newest) in (None, seen[newest]):
            return set()
        return {newest}

    def sizes(self, folder: str) -> Mapping[str, int] | None:
        """Bytes of the files in a folder, by path in it, where one request tells all; None where each is asked for."""
        del folder
        return None

    @property
    def check_budget(self) -> int:
        """What a look at a directory may spend on checks of epochs' files, in the unit of `check_cost`."""
        return CHECKED_FILES

    def check_cost(self, epoch: int, nodes: int, *, stock: bool) -> int:
        """About what it takes to check the files of an epoch that so many nodes, or stock Orbax, have saved."""
        del epoch
        return max(2 * nodes, 10 if stock else 1)

    def is_about_store(self, error: Exception) -> bool:
        """Whether an error is about the store, which did not answer, and says nothing about the files."""
        del error
        return False

    def named_otherwise(self) -> str:
        """What to say of epochs that are not named as readers expect; empty if none is known."""
        return step_names.named_otherwise(self.store, listing.names(self.store, ""))


class Stager(abc.ABC):
    """What every process of a run has that has claimed a directory: it says where the nodes of a save write.

    Attributes:
        incarnation: the run's id.
    """

    def __init__(self, incarnation: str):
        self.incarnation = incarnation

    @abc.abstractmethod
    def staging(self, epoch: int, save_id: str) -> Staging:
        """Where the nodes of a save write. Nothing is written."""

    @abc.abstractmethod
    def check(self, epoch: int) -> None:
        """Raises FencedError, which names `epoch`, if a newer incarnation has claimed by now."""


class Writer(Stager):
    """One run's right to change a directory. The process that has claimed it has it: in a job the primary.

    Every method raises FencedError once a newer run has claimed.

    Attributes:
        directory: the directory as everybody may look at it.
    """

    def __init__(self, directory: EpochDirectory, incarnation: str):
        super().__init__(incarnation)
        self.directory = directory
        self.store = directory.store
        self.names = directory.names

    @abc.abstractmethod
    def stage(self, epoch: int, save_id: str) -> Staging:
        """Makes room for a save, of which other nodes may have begun to write already; returns its staging."""

    def write_view(self, record: EpochRecord, run: Callable[[list[Callable[[], None]]], None]) -> EpochRecord:
        """Writes the Orbax view of a staged epoch, durably, where the store has symlinks.

        `run` runs calls in parallel. Returns the record, which notes the leaves that the view lacks.
        """
        del run
        return record

    @abc.abstractmethod
    def publish(
        self, staging: Staging, record: bytes, check: Callable[[], None], replaces: ReplaceCondition | None
    ) -> Callable[[], None] | None:
        """Makes the epoch visible. Returns a call that does the rest in the background, or None if there is no rest.

        In a bucket the rest writes the Orbax view and the copy of the record. It also removes the bytes of a good epoch
        that gave way.

        `check` is called just before the decisive step, and raises when it is too late. An epoch of this number gives
        way only where it is the one that `replaces` names.

        Raises:
            FencedError: a newer incarnation has taken over.
            UncertainError: it may or may not have become durable; it has been taken out of sight where possible.
            SaveError: it did not become visible.
        """

    @abc.abstractmethod
    def discard(self, staging: Staging) -> None:
        """Removes the files of a failed save; files that are gone already are no error."""

    @abc.abstractmethod
    def unlist(self, epoch: int, kept_in: str | None = None, *, logged: bool = False) -> Callable[[], None]:
        """Takes an epoch out of sight, durably; the returned call removes its bytes.

        With `logged`, its metrics stay (see `EpochDirectory.deleted`), unless it is the newest: a run goes back then.
        With `kept_in`, that subfolder of the directory keeps the epoch. Where no rename can move an epoch (overlayfs,
        for epochs of a lower layer), a record hides it during the removal; UnfinishedError says that this has failed.
        """

    @abc.abstractmethod
    def roll_back(self, rollback: Rollback) -> None:
        """Quarantines epochs, durably recorded before the first one moves."""

    @abc.abstractmethod
    def keep_deleted(self, lines: Iterable[metrics_log.Line]) -> None:
        """Adds the lines that another directory has kept about its deleted epochs."""

    @abc.abstractmethod
    def release(self) -> None:
        """Ends the incarnation; removes its empty staging."""

    def write_once(self, parts: tuple[str, str], data: bytes) -> None:
        """Writes `folder/name` of the directory itself unless that file is there, and holds JSON."""
        folder, name = parts
        path = paths.join(folder, name)
        old = None
        try:
            old = self.store.read(path, limit_bytes=2**24)
            json.loads(old)
            return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (ValueError, RecursionError) as error:
            if old is None:  # larger than any of ours
                raise
            logging.warning("%s/%s is no JSON (%s): it is written anew", self.store.root, path, error)
        try:
            make_folder(self.store, folder)
            self.store.put(path, data, draft=self._draft(), replace=old is not None)
        except FileExistsError:
            logging.info("%s was written by another process", path)

    def overwrite(self, path: str, data: bytes) -> None:
        """Writes `folder/name` of the directory itself, or replaces it; FencedError as `publish`."""
        try:
            make_folder(self.store, path.rpartition("/")[0])
            self.store.put(path, data, draft=self._draft(), replace=True)
        except FileNotFoundError as error:
            raise self.lost(0) from error

    def lost(self, epoch: int) -> errors.EpochCheckpointError:
        """The error of a write for which something of this run is not there any more."""
        return errors.SaveError(epoch, f"files of it have disappeared from {self.store.root}")

    def _draft(self) -> str:
        """Where a small file is written before it is renamed; the next run removes it after a kill."""
        return paths.join(paths.incarnation_folder(self.incarnation), f"draft-{paths.new_id()}")

    def finish_rollback(self) -> None:
        """Completes a rollback, or a deletion, that was begun before, and holds since: no reader sees its epochs."""
        rollback = self.directory.rollback()
        if rollback is None:
            return
        what = "deletion of checkpoints" if rollback.to is None else f"rollback to checkpoint {rollback.to}"
        logging.warning("%s: finishing the %s that was begun before", self.store.root, what)
        self._finish(rollback)

    def _finish(self, rollback: Rollback) -> None:
        try:
            self._move_rolled_back(rollback)
        except OSError as error:
            raise errors.UnfinishedError(self.store.root, rollback.epochs, errors.say(error)) from error

    def _finish_if_it_can(self) -> None:
        """Completes a rollback for a claim, which succeeds without it: a failure is logged."""
        try:
            self.finish_rollback()
        except errors.UnfinishedError as error:
            logging.error("%s", error)

    @abc.abstractmethod
    def _move_rolled_back(self, rollback: Rollback) -> None:
        """Moves or removes the epochs of a rollback, newest first, then removes its record."""


def make_folder(store: Store, folder: str) -> None:
    """Makes a folder of the directory itself, durably, unless it is there."""
    if not store.exists(folder):
        with contextlib.suppress(FileExistsError):
            store.make_folder(folder)
        store.sync_folder("")
