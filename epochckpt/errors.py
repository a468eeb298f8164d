"""The errors that epochckpt raises on purpose.

```
EpochCheckpointError
├── InvalidArgumentError (ValueError)        the call itself is wrong; nothing was done
│   ├── NodeCountError                       an item differs per node, and the number of nodes is another
│   ├── UnsupportedError                     understood, but not supported; names the form to use instead
│   ├── WorkspaceAttributeError (AttributeError)  a workspace has blobs, not attributes
│   └── UnknownNameError (KeyError)          no item, leaf, node or file of this name; offers near ones
├── EpochNotFoundError (StepNotFoundError of Orbax's v1, a FileNotFoundError)
│   │                                        no such committed epoch; lists the existing epochs
│   └── EpochDeletedError                    the epoch was deleted or replaced while it was being read
├── EpochExistsError (StepAlreadyExistsError, a ValueError)
│   └── StepExistsError (StepAlreadyExistsError of Orbax's v1, a FileExistsError)
├── NotACheckpointDirectoryError (NotADirectoryError)
├── AccessError (PermissionError)            the directory may not be read or written
├── StorageError (OSError)                   storage did not answer: this says nothing about the data
├── FormatError (ValueError)                 a record is not what the format allows
├── FormatVersionError (ValueError)          a record needs a newer epochckpt; the data may be intact
├── DamagedError (ValueError)                bytes have changed since they were written; names file and leaf
├── MismatchError (ValueError, KeyError)     the target does not fit; one table of every difference
├── SaveError (RuntimeError)                 an epoch was not saved; earlier epochs are untouched
│   ├── LateNodesError (TimeoutError)        some nodes did not report in time; names them
│   ├── StorageBehindError (TimeoutError)    older saves are still being written: this one could not begin
│   ├── FencedError                          a newer incarnation has taken over the directory
│   ├── BufferChangedError                   memory was modified while it was being written; names the leaf
│   ├── UncertainError                       this process cannot know whether the epoch was committed
│   └── SaveErrorGroup                       several saves failed; has their SaveErrors
├── UnfinishedError (RuntimeError)           a rollback or deletion holds, but its epochs could not be moved or removed
├── RemovalError (OSError)                   an epoch is deleted, but its files could not be removed yet
│   └── RetentionError                       an epoch that the options no longer keep could not be deleted
├── UploadError (RuntimeError)               an epoch could not be copied elsewhere; nothing else was touched
├── TaskError (RuntimeError)                 a task of a job raised; names task, group, node and epoch
└── CoordinationError (RuntimeError)         the processes of a job could not agree
    └── CoordinationTimeoutError (TimeoutError)
```

Every error carries its data as attributes, and pickling keeps them.
"""

import collections
import contextlib
import errno
import posixpath
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from epochckpt._text import readable
from epochckpt._units import several


class EpochCheckpointError(Exception):
    """Base of all errors that epochckpt raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[EpochCheckpointError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    # OSError insists on its own __new__, even where another built-in comes first among the bases.
    error = OSError.__new__(cls) if issubclass(cls, OSError) else cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgumentError(EpochCheckpointError, ValueError):
    """The call itself is wrong; nothing was done."""


class NodeCountError(InvalidArgumentError):
    """An item differs per node, and this job has another number of nodes than `saved_by`: see `item` and `nodes`."""

    def __init__(self, item: str, epoch: int, saved_by: int, nodes: int):
        super().__init__(
            f"item {item!r} of checkpoint {epoch} differs per node and was saved by {saved_by} nodes; this job has "
            f"{nodes}: pass NodeRestore(reshard=…), which makes new states of the old ones"
        )
        self.item = item
        self.epoch = epoch
        self.saved_by = saved_by
        self.nodes = nodes


class UnsupportedError(InvalidArgumentError):
    """epochckpt does not support this feature of Orbax; the message names the form to use instead."""


class UnknownNameError(InvalidArgumentError, KeyError):
    """There is no item, leaf, node or file of this name; the message offers near ones."""

    __str__ = Exception.__str__  # KeyError would put quotes around the message


class WorkspaceAttributeError(InvalidArgumentError, AttributeError):
    """A workspace has no such attribute: it keeps blobs as `ws["best"]`, and live objects as `ws.live.best`."""


class _StepNotFound(FileNotFoundError):
    """Stands for `StepNotFoundError` of Orbax's v1, see `join_orbax`."""


class _StepAlreadyExists(ValueError):
    """Stands for Orbax's `StepAlreadyExistsError`."""


class _StepAlreadyExistsV1(FileExistsError):
    """Stands for `StepAlreadyExistsError` of Orbax's v1."""


class EpochNotFoundError(EpochCheckpointError, _StepNotFound):
    """The `directory` has no such committed `epoch` (None: no epoch at all); `available` lists its epochs."""

    def __init__(self, epoch: int | None, directory: str, available: Sequence[int]):
        what = f"no checkpoint {epoch}"
        stock = f"Checkpoint at {directory}/{epoch} not found"
        if epoch is None:
            what = "no checkpoint"
            stock = f"No steps found in {directory}"
        have = "it holds no committed checkpoint"
        if available:
            have = f"committed: {'… ' if len(available) > 20 else ''}{', '.join(map(str, available[-20:]))}"
        super().__init__(f"{directory}: {what}; {have} (in Orbax's words: {stock})")
        self.epoch = epoch
        self.directory = directory
        self.available = list(available)


class EpochDeletedError(EpochNotFoundError):
    """The epoch was deleted or replaced while it was being read. No data is damaged: choose another epoch."""

    def __init__(self, epoch: int, directory: str, detail: str):
        EpochCheckpointError.__init__(
            self, f"{directory}: checkpoint {epoch} was deleted or replaced while it was being read ({detail})"
        )
        self.epoch = epoch
        self.directory = directory
        self.available = []


class EpochExistsError(EpochCheckpointError, _StepAlreadyExists):
    """The epoch exists already; `allow_overwrite` lets the next save replace it."""


class StepExistsError(EpochExistsError, _StepAlreadyExistsV1):
    """The same from Orbax's v1 interface; `overwrite=True` lets a save take the epoch's place."""


def join_orbax() -> None:
    """Makes these errors subclasses of Orbax's errors, so that `except` clauses that name Orbax's classes catch them.

    The managers call it when they are imported, which imports Orbax anyway. The bases cannot be the right ones from the
    start: `directory` raises these errors, too, and a look at a directory (`epochckpt ls`) must not wait for Orbax's
    import. The managers cannot raise subclasses of their own either. An `except` clause looks at real bases only, so
    every call that may meet a missing epoch, of a manager, a reader or a job, would have to replace the error that
    `directory` raised. Therefore the bases change, once, here and nowhere else.
    """
    from orbax.checkpoint import v1
    from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

    EpochNotFoundError.__bases__ = (EpochCheckpointError, v1.training.errors.StepNotFoundError)
    EpochExistsError.__bases__ = (EpochCheckpointError, StepAlreadyExistsError)
    StepExistsError.__bases__ = (EpochExistsError, v1.training.errors.StepAlreadyExistsError)


class NotACheckpointDirectoryError(EpochCheckpointError, NotADirectoryError):
    """The directory cannot hold checkpoints; the message says what the path is instead."""


class AccessError(EpochCheckpointError, PermissionError):
    """This user may not read or write the directory."""


class StorageError(EpochCheckpointError, OSError):
    """Storage did not answer at `path`, not even a second time: see `problem` and `errno`.

    This says nothing about the data, and decides nothing.
    """

    errno: int | None = None  # OSError's own does not survive pickling
    __str__ = Exception.__str__  # OSError's own changes once there is a file name

    def __init__(self, path: str, error: OSError):
        problem = f"storage did not answer: {error}"
        super().__init__(
            f"{path}: {problem}. That says nothing about the data, so nothing was decided and nothing changed: start "
            "again when it answers. If storage is lost (a broken disk), move its files away"
        )
        self.path = path
        self.problem = problem
        self.errno = error.errno


class FormatError(EpochCheckpointError, ValueError):
    """A record is not what the format allows: see `path`, relative to the checkpoint directory, and `problem`."""

    def __init__(self, path: str, problem: str):
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class FormatVersionError(EpochCheckpointError, ValueError):
    """A record needs a newer epochckpt, and is not damaged: see `path`, `problem` and `features`.

    `path` is relative to the checkpoint directory. `features` are the names in the record's `requires` that this
    epochckpt does not know; empty where it does not know the format version. An epoch whose record says so is listed,
    and is never taken for a damaged one: no save replaces it, and `restore(None)` does not pass over it.
    """

    def __init__(self, path: str, problem: str, features: Sequence[str] = ()):
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
        self.features = list(features)


class DamagedError(EpochCheckpointError, ValueError):
    """Bytes on storage have changed since they were written.

    `path` is relative to the checkpoint directory, and `problem` says more. `leaf` is None for bytes outside leaves.
    Small leaves share a checksum: if `leaves` is greater than 1, any of so many leaves may be damaged, and `leaf` is
    the first of them.
    """

    def __init__(self, path: str, problem: str, leaf: str | None = None, leaves: int = 1):
        where = path
        if leaf is not None:
            one = f"one of {leaves} leaves from {readable(leaf)!r} on" if leaves > 1 else f"leaf {readable(leaf)!r}"
            where = f"{path}, {one}"
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.problem = problem
        self.leaf = leaf
        self.leaves = leaves


@dataclass(frozen=True)
class Mismatch:
    """One row of a `MismatchError`."""

    leaf: str
    problem: str
    found: str
    expected: str


@dataclass(frozen=True)
class SuggestedRename:
    """A rename by which leaves that only the epoch has become some that only the target has.

    `leaves` are the rows of both, by their names: first those of the epoch.
    """

    old: str
    new: str
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Remedies:
    """What a caller can do about a target that does not fit, in the words of the API that was called."""

    rename: str  # `{}` stands for the mapping
    partial: str
    resize: str
    rest: str


class MismatchError(EpochCheckpointError, ValueError, KeyError):
    """The target does not fit the `item` of the `epoch`; a table shows the `rows`: every leaf that differs.

    Orbax raises a ValueError for it, its v1 a KeyError.
    """

    __str__ = Exception.__str__  # KeyError would put quotes around the message

    def __init__(
        self,
        item: str,
        epoch: int,
        rows: Sequence[Mismatch],
        renames: Sequence[SuggestedRename] = (),
        remedies: Remedies | None = None,
    ):
        self.item = item
        self.epoch = epoch
        self.rows = list(rows)
        self.renames = list(renames)
        self.say_for(remedies or _OF_MANAGERS)

    def say_for(self, remedies: Remedies) -> None:
        """Writes the message anew, for callers of the API that the remedies are about."""
        count = several(len(self.rows), "leaf", "leaves")
        lines = [f"checkpoint {self.epoch}, item {self.item!r} does not fit the target ({count}):"]
        table = [("leaf", "problem", "in the checkpoint", "in the target"), *self._table()]
        widths = [max(map(len, column)) for column in zip(*table[: _ROWS + 1], strict=True)]
        for cells in table[: _ROWS + 1]:
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            lines.append(f"  {'  '.join(padded)}".rstrip())
        if len(table) - 1 > _ROWS:
            lines.append(f"  … and {len(table) - 1 - _ROWS} more")
        if len(table) - 1 < len(self.rows):
            lines.append("  (.rows of this error has every leaf)")
        self.args = ("\n".join([*lines, *self._advice(remedies)]),)

    def _table(self) -> list[tuple[str, str, str, str]]:
        """The rows that people see: renames first, then the leaves. Similar leaves share a row."""
        shown = []
        renamed = set[str]()
        for rename in self.renames:
            renamed.update(rename.leaves)
            count = several(len(rename.leaves) // 2, "leaf", "leaves")
            shown.append((count, "renamed?", rename.old or "(the top)", rename.new or "(the top)"))
        rows = [row for row in self.rows if row.problem not in _ONE_SIDED or row.leaf not in renamed]
        for some in _alike(rows):
            if len(some) < _ALIKE:
                shown += [(readable(row.leaf), row.problem, row.found, row.expected) for row in some]
                continue
            names = [readable(row.leaf) for row in some]
            patterns = {_NUMBER.sub("*", name) for name in names}
            name = patterns.pop() if len(patterns) == 1 else f"{posixpath.commonpath(names)}/…"
            common = _common(row.found for row in some)
            expected = _common(row.expected for row in some)
            shown.append((f"{name} ({len(some)} leaves)", some[0].problem, common, expected))
        return shown

    def _advice(self, remedies: Remedies) -> list[str]:
        """What helps against the problems in the table, and nothing else."""
        mapping = {rename.old: rename.new for rename in self.renames[:_ROWS]} or {"old name": "new name"}
        texts = {
            "missing,unexpected": (
                f"Leaves that only one of the two has: if they are the same under other names, "
                f"{remedies.rename.format(mapping)}; {remedies.partial} In Orbax's words: User-provided restore item "
                "and on-disk value metadata tree structures do not match."
            ),
            "no value": (
                "The checkpoint lacks leaves that the target only describes: with partial=True they stay as the target "
                "has them, so give them values, such as freshly initialised ones, or leave them out of the target."
            ),
            "shape": (
                f"Shapes differ: was the model configured like this when it was saved? {remedies.resize} In Orbax's "
                "words: Requested shape is not compatible with the stored shape."
            ),
            **_REMEDIES,
        }
        problems = {row.problem for row in self.rows}
        advice = [text for names, text in texts.items() if not problems.isdisjoint(names.split(","))]
        return ["Nothing was restored.", *advice, remedies.rest]


def _common(texts: Iterable[str]) -> str:
    different = set(texts)
    return different.pop() if len(different) == 1 else "various"


def _alike(rows: Sequence[Mismatch]) -> list[list[Mismatch]]:
    """Rows that people may see as one: of one problem, with names that differ in numbers alone.

    Where many leaves are only on one side, those of a part of the tree are together.
    """
    groups: dict[tuple[str, ...], list[Mismatch]] = {}
    for row in rows:
        alike = _NUMBER.sub("*", readable(row.leaf)), row.problem, row.found, row.expected
        groups.setdefault(alike, []).append(row)
    counts = collections.Counter(problem for _, problem, _, _ in groups)
    parts: dict[tuple[str, ...], list[Mismatch]] = {}
    for (name, problem, *forms), some in groups.items():
        many = problem in _ONE_SIDED and counts[problem] > _LISTED
        part = (name.partition("/")[0], problem) if many else (name, problem, *forms)
        parts.setdefault(part, []).extend(some)
    return list(parts.values())


_NUMBER = re.compile(r"\d+")
_ROWS = 200  # that the message shows
_LISTED = 12  # where more are only on one side, those of a part of the tree have one row
_ALIKE = 3  # fewer leaves that are alike have a row each
_ONE_SIDED = ("missing", "unexpected")
_REMEDIES = {
    "type": "Types differ: give the target what was saved (an array, a key, a number, text), and convert that.",
    "dtype,value": "Values would be lost: give the target the dtype that was saved, or one that holds all values.",
    "sharding": "A sharding does not divide its array evenly: choose one that does.",
}
_OF_MANAGERS = Remedies(
    rename="restore with epochckpt.args.RenamedRestore(target, rename={})",
    partial="PyTreeRestore(target, partial_restore=True) leaves them out.",
    resize=(
        "StandardRestore(target, strict=False) cuts arrays, or pads them with zeros, to shapes of as many dimensions."
    ),
    rest="restore_leaves(epoch, patterns) gives single leaves, and no target at all gives everything as it was saved.",
)


@contextlib.contextmanager
def advice_for(remedies: Remedies) -> Iterator[None]:
    """A MismatchError that is raised inside says what the callers of an API can do."""
    try:
        yield
    except MismatchError as error:
        error.say_for(remedies)
        raise


class SaveError(EpochCheckpointError, RuntimeError):
    """The `epoch` was not committed: see `reason`. Earlier epochs are untouched."""

    _message = "checkpoint {} was not committed: {}"

    def __init__(self, epoch: int, reason: str):
        super().__init__(self._message.format(epoch, reason))
        self.epoch = epoch
        self.reason = reason


class LateNodesError(SaveError, TimeoutError):
    """The `nodes` did not report within the save timeout."""

    def __init__(self, epoch: int, nodes: Sequence[str], timeout_secs: float):
        SaveError.__init__(self, epoch, f"no report within {timeout_secs:g} s from {', '.join(nodes)}")
        self.nodes = list(nodes)


class StorageBehindError(SaveError, TimeoutError):
    """The save could not begin within `max_blocked_secs`: storage is too slow, or away, and older saves are unwritten.

    Nothing of it was written. The saves that it waited for go on.
    """


class FencedError(SaveError):
    """A newer incarnation of the job has taken over the directory: this one may not write any more."""

    _message = "checkpoint {}: {}"


class BufferChangedError(SaveError):
    """The memory of a `leaf` changed while it was being written."""

    def __init__(self, epoch: int, leaf: str):
        reason = (
            f"the memory of leaf {readable(leaf)!r} changed while it was being written. jax can alias NumPy memory on "
            "CPU: do not modify an array in place that was handed to jax.device_put, or hand over a copy"
        )
        super().__init__(epoch, reason)
        self.leaf = leaf


class UncertainError(SaveError):
    """This process cannot know whether the epoch was, or will be, committed.

    `status(epoch)` looks at storage; so does `reload()`, which all processes must call. If the epoch is committed later
    after all, each process learns of it with a later save.
    """

    _message = "it is uncertain whether checkpoint {} was committed: {}"


class SaveErrorGroup(SaveError):
    """Several saves failed: see `errors`, oldest first; `epoch` is the newest of their epochs."""

    def __init__(self, errors: Sequence[SaveError]):
        head = f"{several(len(errors), 'save', 'saves')} failed:"
        EpochCheckpointError.__init__(self, "\n".join([head, *(f"  {e}" for e in errors)]))
        self.errors = list(errors)
        self.epoch = errors[-1].epoch
        self.reason = "; ".join(e.reason for e in errors)


class UnfinishedError(EpochCheckpointError, RuntimeError):
    """A rollback or a deletion is recorded and holds, but its `epochs` could not be moved or removed yet.

    No reader sees these epochs any more, and their numbers cannot be saved until they are moved. The next run's first
    write, a rollback, or a save of one of the numbers moves them, once the cause is gone.
    """

    def __init__(self, directory: str, epochs: Sequence[int], reason: str):
        super().__init__(
            f"{directory}: checkpoints {', '.join(map(str, epochs))} are rolled back or deleted (see rollback.json), "
            f"and no reader sees them any more; but they could not be moved away: {reason}. Remove the cause; then the "
            "first write of the next run, or a save of one of these numbers, moves them"
        )
        self.epochs = list(epochs)


class RemovalError(EpochCheckpointError, OSError):
    """The `epoch` is deleted, and its number is free, but its files could not be removed: see `reason`."""

    __str__ = Exception.__str__

    def __init__(self, directory: str, epoch: int, reason: str):
        super().__init__(
            f"{directory}: checkpoint {epoch} is deleted, but its files could not be removed: {reason}. Nobody reads "
            "them any more; the next run that writes there removes them, once the cause is gone"
        )
        self.epoch = epoch
        self.reason = reason


class RetentionError(RemovalError):
    """The options no longer keep the `epoch`, but it could not be deleted: see `reason`. It is still listed.

    Every later commit tries to delete it again.
    """

    def __init__(self, directory: str, epoch: int, reason: str):
        EpochCheckpointError.__init__(
            self,
            f"{directory}: checkpoint {epoch}, which the options no longer keep, could not be deleted: {reason}. It is "
            "still there, and listed; every commit tries again, so remove the cause",
        )
        self.epoch = epoch
        self.reason = reason


class UploadError(EpochCheckpointError, RuntimeError):
    """The `epoch` could not be copied to the `destination`: see `reason`. No committed epoch was touched."""

    def __init__(self, epoch: int, destination: str, reason: str):
        super().__init__(
            f"checkpoint {epoch} was not uploaded to {destination}: {reason}. The checkpoint is untouched: remove the "
            "cause and start the job again, which only uploads"
        )
        self.epoch = epoch
        self.destination = destination
        self.reason = reason


class TaskError(EpochCheckpointError, RuntimeError):
    """A task of a job raised an error, which is the cause of this one. Committed epochs are untouched.

    `group` is the phase of the `task` (setup, init, epoch, download or exit). `epoch` was being trained on the `node`
    (0 before the first), in the job's `unit`. `reason` is the task's error.
    """

    def __init__(self, task: str, group: str, node: str, epoch: int, reason: str, unit: str = "epoch"):
        super().__init__(f"task {task!r} of group {group!r} on node {node} failed in {unit} {epoch}: {reason}")
        self.task = task
        self.group = group
        self.node = node
        self.epoch = epoch
        self.reason = reason
        self.unit = unit


class CoordinationError(EpochCheckpointError, RuntimeError):
    """The processes of the job could not agree on something."""


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """Another process did not answer in time; `processes` has the numbers of those, as far as they are known."""

    processes: Sequence[int] = ()


_DAMAGE = frozenset({errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG})
_ANSWERS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}) | _DAMAGE


def is_passing(error: OSError) -> bool:
    """Whether a failed read proves nothing about the stored bytes: a time-out, a bad sector, too many open files."""
    return error.errno is not None and error.errno not in _ANSWERS and not isinstance(error, EpochCheckpointError)


def unreadable(path: str, error: OSError) -> Exception:
    """The error for a file of an epoch that cannot be read: missing, damaged, not permitted, or no answer."""
    if isinstance(error, EpochCheckpointError):
        return error
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DamagedError(path, "is missing")
    if isinstance(error, PermissionError):
        return AccessError(f"{path}: {error}")
    return DamagedError(path, f"cannot be read: {error}") if error.errno in _DAMAGE else StorageError(path, error)


def say(error: BaseException) -> str:
    """An error's text, with its type where the text alone says little."""
    return str(error) if isinstance(error, OSError | EpochCheckpointError) else f"{type(error).__name__}: {error}"


def advise(error: BaseException, advice: str) -> None:
    """Lets the message of an error end with what to do."""
    error.args = (f"{error}. {advice}", *error.args[1:])


def as_save_error(epoch: int, error: BaseException) -> SaveError:
    """The error as a SaveError of this epoch; itself if it is one."""
    if isinstance(error, SaveError):
        return error
    failure = SaveError(epoch, say(error))
    failure.__cause__ = error
    return failure


def copied(epoch: int, error: BaseException) -> SaveError:
    """A SaveError of this epoch with the text and data of an error that is also raised elsewhere."""
    same = from_wire(to_wire(error))
    return same if isinstance(same, SaveError) else SaveError(epoch, say(error))


_E = TypeVar("_E", bound=BaseException)
_RAISED = "raised, outside the caller's thread, at"


def kept(error: _E) -> _E:
    """Makes an error safe to keep: the tracebacks of it and of its causes become text, in notes.

    A traceback keeps the local variables of its frames alive, and these may hold the arrays of a whole epoch.
    """
    errors: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in errors:
            continue
        errors.append(one)
        waiting += [one.__cause__, one.__context__]
        lines = _lines(one.__traceback__)
        one.__traceback__ = None
        if lines and not any(note.startswith(_RAISED) for note in getattr(one, "__notes__", ())):
            one.add_note(f"{_RAISED}\n{''.join(lines)}")
    return error


def _lines(trace: TracebackType | None) -> list[str]:
    """A traceback as text, by line numbers alone."""
    # to mark columns, `traceback` parses each line (Python 3.11); that is a SystemError if another thread parses then
    frames = [(f.f_code.co_filename, number, f.f_code.co_name, None) for f, number in traceback.walk_tb(trace)]
    return traceback.format_list(frames)


def to_wire(error: BaseException) -> dict[str, Any]:
    """An error as JSON for another process: its type, message, notes and plain attributes; no pickle.

    Notes say where it was raised; those of `kept` are long, and stay here.
    """
    data = {k: v for k, v in vars(error).items() if k != "__notes__" and _is_plain(v)}
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_RAISED)]
    return {"type": type(error).__name__, "message": str(error) or repr(error), "data": data, "notes": notes}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str | int) for each in value)
    return value is None or isinstance(value, str | int)


def from_wire(data: dict[str, Any]) -> EpochCheckpointError:
    """The error that `to_wire` described: of the same class if that is one of ours, else a CoordinationError."""
    cls = globals().get(str(data.get("type")))
    wide = (SaveErrorGroup, MismatchError)  # they hold more than plain attributes
    if not isinstance(cls, type) or not issubclass(cls, EpochCheckpointError) or cls in wide:
        error = CoordinationError(f"{data.get('type')} in another process: {data.get('message')}")
    else:
        error = _rebuild(cls, (str(data.get("message")),), dict(data.get("data") or {}))
    for note in data.get("notes") or ():
        error.add_note(str(note))
    return error
