"""What lies in a directory, as plain values.

There are epochs, saves under way or dead, epochs that are kept, garbage, and things that are not ours.

`EpochDirectory.contents()` gives a `Contents`. It looks at storage when one of its methods is called, and not before.
Its values say what a thing is (`Kind`), how large it is and when it was written last; they have no text for people.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence

from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.storage import File, Store, listing


class Kind(enum.Enum):
    """What something is that lies in a directory."""

    EPOCH = enum.auto()
    SAVE = enum.auto()  # a save of ours that has not been committed
    ORBAX_SAVE = enum.auto()  # the same of stock Orbax
    EXPORT = enum.auto()  # what an export has staged
    # Epochs that are kept, and count no more:
    ROLLED_BACK = enum.auto()
    REPLACED = enum.auto()  # a damaged epoch that was replaced
    PARTIAL = enum.auto()  # parts of epochs that other hosts lack
    DIVERGED = enum.auto()  # no part of the history that the mirror has
    DELETED_AND_KEPT = enum.auto()  # in the folder that `todelete_subdir` names
    SET_ASIDE = enum.auto()  # the same, in a folder that another run has named
    MOVING = enum.auto()  # on the way to its place, where the next run puts it
    HOLDS_MOVING = enum.auto()  # what an earlier run left, with such an epoch in it
    # Garbage:
    UNCLAIMED = enum.auto()  # staging of a run that has not begun, or has ended
    REMOVAL = enum.auto()  # what a clean-up has taken out of sight
    TAKEN_OVER = enum.auto()  # what an earlier run left
    REMOVED_EPOCH = enum.auto()
    REMOVED_DRAFT = enum.auto()  # a failed save, or a small file that was not finished
    REMOVED_STEP = enum.auto()  # a step of stock Orbax
    DEAD_EPOCH = enum.auto()  # a deleted or replaced epoch, or a save that failed when its record was written
    LATE_COPY = enum.auto()  # of a record or metrics of a deleted epoch, by a run that was killed or overtaken
    # Not ours, or nobody knows whose:
    UNKNOWN = enum.auto()  # in a run's staging folder
    NOT_AN_EPOCH = enum.auto()  # named like one
    NOT_LISTED = enum.auto()  # named like an epoch; no run that is known here has saved it
    RENUMBERED_COPY = enum.auto()  # of an epoch of another number
    UNLISTED_EPOCH = enum.auto()  # with a commit record
    UNLISTED_KEPT = enum.auto()  # named like what a run keeps; no run has put it there
    OTHER = enum.auto()  # the directory's own small files, and what is named like nothing of ours


KEPT = frozenset(
    {
        Kind.ROLLED_BACK,
        Kind.REPLACED,
        Kind.PARTIAL,
        Kind.DIVERGED,
        Kind.DELETED_AND_KEPT,
        Kind.SET_ASIDE,
        Kind.MOVING,
        Kind.HOLDS_MOVING,
    }
)
"""Kinds that hold epochs."""

NOT_OURS = frozenset(
    {
        Kind.UNKNOWN,
        Kind.NOT_AN_EPOCH,
        Kind.NOT_LISTED,
        Kind.RENUMBERED_COPY,
        Kind.UNLISTED_EPOCH,
        Kind.UNLISTED_KEPT,
    }
)
"""Kinds that nothing but a person may remove."""

REMOVAL_PREFIX = "gc-"
_ID = r"[0-9a-f]{16}\Z"
_STAGED = rf"(.*-)?[0-9a-f]{{8,16}}{re.escape(paths.TMP_SUFFIX)}\Z"
_NAMED = (
    (re.compile(f"{paths.ROLLED_BACK_PREFIX}{_ID}"), Kind.ROLLED_BACK),
    (re.compile(f"{paths.DAMAGED_PREFIX}{_ID}"), Kind.REPLACED),
    (re.compile(f"{paths.PARTIAL_PREFIX}{_ID}"), Kind.PARTIAL),
    (re.compile(f"{paths.DIVERGED_PREFIX}{_ID}"), Kind.DIVERGED),
    (re.compile(f"(?s){paths.EXPORT_PREFIX}{_STAGED}"), Kind.EXPORT),
    (re.compile(f"unclaimed-{_STAGED}"), Kind.UNCLAIMED),
    (re.compile(f"(?s){REMOVAL_PREFIX}{_STAGED}"), Kind.REMOVAL),
)


def kind_of(name: str, todelete_subdir: str | None = None) -> Kind | None:
    """The kind of a folder beside the epochs, by its name; None if the name does not tell."""
    for pattern, kind in _NAMED:
        if pattern.match(name):
            return kind
    return Kind.DELETED_AND_KEPT if name == todelete_subdir else None


def is_staging(name: str) -> bool:
    """Whether a folder is the staging of a run, or of one node."""
    return paths.parse_incarnation(name) is not None or paths.parse_node_staging(name) is not None


def orbax_step(names: StepNames, name: str) -> int | None:
    """The step for which stock Orbax staged a folder; None for other folders."""
    step, suffix, _ = name.partition(paths.TMP_SUFFIX)
    return names.parse(step) if suffix else None


def epochs_in(store: Store, names: StepNames, folder: str) -> tuple[int, ...]:
    """The numbers of the epochs that lie in a folder, by their names."""
    numbers = (names.parse(name) for name, _ in listing.names(store, folder))
    return tuple(sorted(number for number in numbers if number is not None))


def is_sign(store: Store, names: StepNames, name: str) -> bool:
    """Whether a folder that is named like no epoch shows that the directory is one of checkpoints."""
    if is_staging(name) or orbax_step(names, name) is not None:
        return True
    if name.startswith(paths.QUARANTINE_PREFIXES):  # also what people have named so
        return bool(epochs_in(store, names, name))
    return name == paths.ROOT_METADATA[0] and store.exists(paths.join(*paths.ROOT_METADATA))


def age_secs(last_ns: int | None, now_ns: int) -> float | None:
    """How long ago something was written last; None: the store does not tell."""
    return None if last_ns is None else max(now_ns - last_ns, 0) / 1e9


@dataclasses.dataclass
class DiskUsage:
    """How much lies in a folder, and how old it is, in nanoseconds since 1970; None: the store does not tell."""

    nbytes: int = 0
    entries: int = 0  # files and folders
    newest_ns: int | None = None  # when something in the folder was last written, made, or moved
    moved_ns: int | None = None  # the same of the folder itself, which changes also when it is moved
    oldest_ns: int | None = None  # when the oldest thing in it was last written
    problem: str = ""  # why it could not be looked at as a whole

    @property
    def last_ns(self) -> int | None:
        """When something was last written to it, or it was moved."""
        return max((time for time in (self.newest_ns, self.moved_ns) if time is not None), default=None)

    def note(self, error: OSError) -> None:
        """Keeps the first error, unless it only says that something has vanished."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            self.problem = self.problem or str(error)

    def count(self, found: os.stat_result) -> None:
        """Adds a file or a folder."""
        self.entries += 1
        self.nbytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
        # The last change of the inode counts, too: a folder that is renamed keeps the time of its last write.
        self.newest_ns = max(self.newest_ns or 0, found.st_mtime_ns, found.st_ctime_ns)
        self.oldest_ns = min(self.oldest_ns or found.st_mtime_ns, found.st_mtime_ns)

    def count_object(self, file: File) -> None:
        """Adds an object."""
        self.entries += 1
        self.nbytes += file.size
        self.newest_ns = max(self.newest_ns or 0, file.written_ns)
        self.oldest_ns = min(self.oldest_ns or file.written_ns, file.written_ns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavePart:
    """What one node has written of a save that has not been committed."""

    node: str
    nbytes: int
    secs: float | None  # how long it wrote; None where that was not read
    is_written: bool  # it has written all of its part


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnfinishedSave:
    """A save that has not been committed: it is under way, or dead."""

    path: str  # unlike that of any other thing in the directory
    folder: str  # where its files lie
    epoch: int
    save_id: str
    parts: tuple[SavePart, ...]
    nbytes: int
    started_ns: int | None
    last_ns: int | None  # when something was last written to it
    given_up: bool = False  # it can never be committed any more
    problem: str = ""  # why it could not be looked at as a whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that is no epoch, and no save of ours."""

    path: str
    kind: Kind
    epochs: tuple[int, ...] = ()  # whose files these are
    nbytes: int
    last_ns: int | None  # when something was last written to it; None: not known
    save_id: str = ""  # of the save that wrote it, where that matters
    destination: str = ""  # of what is `MOVING`
    numbers: tuple[str, ...] = ()  # of a `RENUMBERED_COPY`: the numbers of the epochs that were copied
    counted: int | None = None  # only so many of its objects were looked at
    problem: str = ""  # why it could not be looked at as a whole


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What lies beside the epochs."""

    saves: list[UnfinishedSave] = dataclasses.field(default_factory=list[UnfinishedSave])
    others: list[Leftover] = dataclasses.field(default_factory=list[Leftover])
    problems: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # what could not be looked at, by path
    unlisted: list[str] = dataclasses.field(default_factory=list[str])  # folders that a quick look leaves out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The files of one thing in a directory."""

    path: str
    kind: Kind
    epochs: tuple[int, ...]
    files: Sequence[File]
    given_up: bool = False  # of a save: it can never be committed any more


@dataclasses.dataclass(frozen=True)
class AllFiles:
    """Every file of a directory, by what it belongs to."""

    groups: Sequence[Group]
    problems: Mapping[str, str]  # what could not be looked at, by path


def epoch_group(names: StepNames, folder: str, files: Sequence[File]) -> Group:
    """The files of one epoch."""
    epoch = names.parse(folder)
    return Group(path=folder, kind=Kind.EPOCH, epochs=() if epoch is None else (epoch,), files=files)


class Contents(abc.ABC):
    """All that lies in a directory. Each call looks anew. Nothing is written, but by a `remover`.

    What vanishes during a look is no error. No symlink is followed.
    """

    @abc.abstractmethod
    def saves(self) -> list[UnfinishedSave]:
        """The saves that have not been committed and wrote something."""

    @abc.abstractmethod
    def leftovers(self) -> Leftovers:
        """What lies beside the epochs, by a look of few requests, which may leave some folders out."""

    @abc.abstractmethod
    def all_leftovers(self) -> Leftovers:
        """The same of all folders."""

    @abc.abstractmethod
    def all_files(self) -> AllFiles:
        """Every file, grouped by the thing that it belongs to. A file with several names counts once."""

    @abc.abstractmethod
    def files_in(self, folder: str) -> AllFiles:
        """Every file of one epoch's folder, in one group."""

    @abc.abstractmethod
    def measure(self, path: str) -> DiskUsage | None:
        """Measures a folder with all below it, or a file; None if it is gone."""

    @abc.abstractmethod
    def remover(self, clock: Callable[[], float]) -> GarbageRemover:
        """What removes garbage. It is made before the look that finds the garbage, so that nothing looks too old.

        `clock` gives the time in seconds since 1970.
        """


class GarbageRemover(abc.ABC):
    """Removes dead saves, and other things that are no epochs. Safe beside jobs that are saving.

    Committed epochs are never touched, nor anything behind a symlink. Ages are those by the storage's clock, or by this
    process's if that is behind.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._ahead_secs = 0.0  # of our clock before the storage's

    def now_ns(self) -> int:
        """The time by our clock, or by the storage's if that is behind."""
        return int((self._clock() - self._ahead_secs) * 1e9)

    @abc.abstractmethod
    def remove(self, thing: UnfinishedSave | Leftover, refusal: Callable[[float], str]) -> str:
        """Removes one thing; returns why not, or nothing.

        `refusal` says why a thing must stay that was last written to so many seconds ago; empty if it may go.
        """

    def finish_replaced_step(self, folder: str) -> None:
        """Removes what is left of a step of stock Orbax that an epoch of ours has replaced."""
        del folder

    def close(self) -> None:
        """Removes what the removals themselves have made."""
        return
