"""Metadata handlers: what is told of a run while it trains, and asked when it starts again.

The protocol is that of Caffe2's `caffe2.python.checkpoint`. Handlers are called on the primary only, also from
background threads. What a handler raises is logged; it never harms an epoch that is committed.

The protocol of metadata handlers, and checks of what they are given and answer; users find it in `ec.metadata`.
"""

from __future__ import annotations

import abc
import datetime
import inspect
import json
import operator
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import logging
from etils import epath

from epochckpt.errors import FormatError, FormatVersionError, InvalidArgumentError, say
from epochckpt.format import checksums, paths
from epochckpt.manager.run_database import EpochRow, RunDatabase, RunRow, StatRow
from epochckpt.storage import PosixStore, expanded

T = TypeVar("T")

ETILS = ("gs://", "s3://", "az://", "hf://")
"""Where etils can write, beside local paths."""

DB_TYPE = "epochckpt"
"""What handlers are told of the kind of storage."""

_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "set_params": (0, ("db_prefix", "db_type", "node_names", "path_prefix", "path_type")),
    "last_epoch": (0, ("user_epoch",)),
    "write": (0, ("epoch",)),
    "report": (2, ()),
    "cp_accessible": (1, ()),
}
"""How Caffe2, and we, call a handler's methods: how many arguments by position, and the names of those by keyword."""


class AbstractMetadataHandler(abc.ABC):
    """Is told what a run does, and knows at the next start which epoch was the last.

    All methods are called on the primary only, from any thread, once for each event, and as Caffe2 calls them:
    `set_params`, `last_epoch` and `write` by keyword, `report` and `cp_accessible` by position. A failure is logged and
    never harms a committed epoch.
    """

    @abc.abstractmethod
    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Says which run it is, before anything else is called.

        Args:
            db_prefix: the directory of the checkpoints. It need not exist and is not created.
            db_type: the kind of storage.
            node_names: names of the nodes.
            path_prefix: where epochs are read from, if not there.
            path_type: the kind of storage of that.
        """

    @abc.abstractmethod
    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from; None if it knows of none.

        Args:
            user_epoch: the one that the user named. A handler may overrule it; those here do not.
        """

    @abc.abstractmethod
    def write(self, epoch: int) -> None:
        """An epoch has been committed. After a rollback its number is lower than one that was written before."""

    @abc.abstractmethod
    def report(self, action_name: str, all_stats: Mapping[str, float]) -> None:
        """How long an action took.

        Args:
            action_name: such as `checkpoint_save`.
            all_stats: seconds by node, or by the name of its folder.
        """

    @abc.abstractmethod
    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the checkpoints, or those of one epoch, can be reached now. If not, no save is tried.

        An OSError means that it cannot say: the save is tried, and will tell. Any other error counts as no.
        """

    def save_failed(self, epoch: int, reason: str) -> None:
        """An epoch could not be saved. Does nothing by default."""
        del epoch, reason

    def run_ended(self, epoch: int, reason: str) -> None:
        """The run has ended with this epoch. Does nothing by default."""
        del epoch, reason


class DirectoryHandler(AbstractMetadataHandler):
    """What the handlers here have in common: they know the directory of the checkpoints."""

    _prefix: str | None = None
    _directory = ""

    def _set_prefix(self, prefix: str) -> None:
        self._prefix = prefix  # as given: it may name the run
        self._directory = prefix if "://" in prefix else os.path.abspath(prefix)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the directory exists; an object store, which has no directories, is asked whether it answers.

        What etils cannot look at counts as there: the save itself will tell.
        """
        self._require_prefix()
        if self._directory.startswith(ETILS):
            try:
                epath.Path(self._directory).exists()
            except ImportError:  # the store's package is not installed: not an outage
                raise
            except Exception as error:  # every store has its own
                logging.warning("%s cannot be reached: %s", self._directory, say(error))
                return False
            return True
        return "://" in self._directory or os.path.isdir(self._directory)

    def _require_prefix(self) -> str:
        if self._prefix is None:
            raise InvalidArgumentError(f"{type(self).__name__}: call set_params first")
        return self._prefix


def check_handler(handler: T) -> T:
    """A metadata handler, if it has Caffe2's five methods, and they can be called as there; its class does not matter.

    Raises:
        InvalidArgumentError: it lacks some, or one cannot be called so; names them.
    """
    missing = [name for name in _CALLS if not callable(getattr(handler, name, None))]
    if missing or isinstance(handler, type):
        what = f"the class {handler.__name__}" if isinstance(handler, type) else f"a {type(handler).__name__}"
        problem = f"without {', '.join(missing)}" if missing else "instead of an object of it"
        raise InvalidArgumentError(
            f"the metadata handler is {what} {problem}; expected an object with {', '.join(_CALLS)}"
        )
    for method, (count, names) in _CALLS.items():
        try:
            signature = inspect.signature(getattr(handler, method))
        except (TypeError, ValueError):  # not every callable has one
            continue
        try:
            signature.bind(*[None] * count, **dict.fromkeys(names))
        except TypeError as error:
            form = ", ".join(["…"] * count + [f"{name}=…" for name in names])
            raise InvalidArgumentError(
                f"the metadata handler {type(handler).__name__} has {method}{signature}, which is called as "
                f"{method}({form}), as in Caffe2: {error}"
            ) from None
    return handler


def introduce(handler: Any, directory: str, nodes: Sequence[str]) -> None:
    """Tells a handler which nodes save to which directory; a failure of its own is logged.

    Raises:
        InvalidArgumentError: it says that it cannot serve this directory.
    """
    try:
        handler.set_params(
            db_prefix=directory, db_type=DB_TYPE, node_names=list(nodes), path_prefix=None, path_type=None
        )
    except InvalidArgumentError:
        raise
    except Exception as error:
        logging.warning("the metadata handler's set_params failed: %s", say(error))


def answered_epoch(handler_answer: Any, handler: Any = None) -> int | None:
    """The epoch that a handler's `last_epoch` answered, as an int; None if none.

    Args:
        handler_answer: what it returned.
        handler: the handler, for the error.

    Raises:
        InvalidArgumentError: it is neither None nor a whole number from 0 on.
    """
    if handler_answer is None:
        return None
    what = "the metadata handler" if handler is None else f"the metadata handler {type(handler).__name__}"
    return check_epoch(f"{what} answered last_epoch", handler_answer)


def check_epoch(what: str, epoch: Any) -> int:
    """An epoch's number as an int."""
    try:
        number = operator.index(epoch)
    except TypeError:
        number = -1
    if isinstance(epoch, bool) or not 0 <= number < 2**63:  # SQLite's integers, and everybody else's, end there
        raise InvalidArgumentError(
            f"{what}: epoch {str(epoch)[:80]!s} ({type(epoch).__name__}); expected a whole number, at least 0"
        )
    return number


def check_times(action_name: str, all_stats: Mapping[str, float]) -> list[tuple[str, float]]:
    """What `report` was given, as (name, seconds)."""
    if not isinstance(action_name, str) or not isinstance(all_stats, Mapping):
        raise InvalidArgumentError(
            f"report({action_name!r}, a {type(all_stats).__name__}); expected a name, and seconds by name in a mapping"
        )
    times = []
    for name, secs in all_stats.items():
        number = checksums.pack_json(secs, f"report({action_name!r}): {name!r}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not isinstance(name, str):
            raise InvalidArgumentError(f"report({action_name!r}): {name!r} is {secs!r}; expected a name and seconds")
        times.append((name, float(number)))
    return times


def check_params(db_prefix: Any, db_type: Any, path_prefix: Any, path_type: Any) -> dict[str, Any]:
    """What `set_params` was given, as plain text."""
    prefix = check_path("set_params(db_prefix)", db_prefix)
    others = {"db_type": db_type, "path_prefix": path_prefix, "path_type": path_type}
    return {"db_prefix": prefix, **{name: None if v is None else str(v) for name, v in others.items()}}


def check_nodes(node_names: Any) -> list[str]:
    """The nodes that `set_params` was given."""
    if isinstance(node_names, str) or not isinstance(node_names, Sequence):
        raise InvalidArgumentError(f"set_params(node_names) must be a list of names, got {node_names!r}")
    return [str(name) for name in node_names]


def check_path(what: str, path: Any) -> str:
    """A path as text, `~` expanded."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgumentError(f"{what} must be a path, got {path!r}")
    return expanded(name)


__all__ = [
    "AbstractMetadataHandler",
    "EpochRow",
    "JsonMetadataHandler",
    "RunRow",
    "SqliteMetadataHandler",
    "StatRow",
    "answered_epoch",
    "check_handler",
]

JSON_NAME = "last_epoch"
_KIND, _VERSION = "last_epoch", 1
_MAX_BYTES = 16 * 2**20
_DAY = 86_400  # SQLite counts milliseconds in an int of C
_FOREIGN = "is not what JsonMetadataHandler writes; move it away, or give the handler another path"


class JsonMetadataHandler(DirectoryHandler):
    """One small JSON file beside the epochs: the last epoch and when it was written, for people, too.

    It also holds the run's nodes, the last times of each action, the last failed save and why the run ended. Written
    whole each time: to a local path durably and by an atomic rename; to an object store through etils.

    Jobs that share a directory, each for its own nodes, have a file each. A job that is started with more or fewer
    nodes goes on from the file of a job that had one of them.

    Args:
        path: the file; None for `last_epoch-<the first node>.json` in the directory of the checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._given = None if path is None else _writable(check_path("JsonMetadataHandler(path)", path))
        self._path = self._given
        self._params: dict[str, Any] = {}
        self._nodes = frozenset[str]()
        self._lock = threading.Lock()

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Takes the run's names; writes nothing."""
        params = {**check_params(db_prefix, db_type, path_prefix, path_type), "nodes": check_nodes(node_names)}
        prefix = params["db_prefix"]
        with self._lock:
            first = "".join(f"-{paths.folder_name(name)}" for name in params["nodes"][:1])
            self._path = self._given or _writable(f"{prefix.rstrip('/')}/{JSON_NAME}{first}.json")
            self._set_prefix(prefix)
            self._params, self._nodes = params, frozenset(params["nodes"])

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The user's, else the one written last; None if there is no file.

        Raises:
            FormatError: the file is not what this handler writes, or the path that it was given is that of another job.
        """
        if user_epoch is not None:
            return check_epoch("last_epoch", user_epoch)
        with self._lock:
            return self._read().get("epoch")

    def write(self, epoch: int) -> None:
        """Notes the epoch and the time.

        Raises:
            FormatError: the file there is not what this handler writes; it is left alone.
            FileNotFoundError: the directory is not there; it is not created.
        """
        self._update(epoch=check_epoch("write", epoch), written=_now(), ended=None)

    def report(self, action_name: str, all_stats: Mapping[str, float]) -> None:
        """Notes the times in place of those that the action had before."""
        times = dict(check_times(action_name, all_stats))
        self._update(stats=lambda old: {**(old or {}), action_name: times})

    def save_failed(self, epoch: int, reason: str) -> None:
        """Notes the failure in place of the one before."""
        self._update(failed={"epoch": check_epoch("save_failed", epoch), "reason": str(reason), "at": _now()})

    def run_ended(self, epoch: int, reason: str) -> None:
        """Notes the reason; the next epoch written takes it away."""
        self._update(ended={"epoch": check_epoch("run_ended", epoch), "reason": str(reason), "at": _now()})

    def _update(self, **changes: Any) -> None:
        with self._lock:
            path, old = self._require_path(), self._read()
            record = {"epochckpt": _KIND, "version": _VERSION, "epoch": None, **old, **self._params}
            record["had"] = sorted(self._nodes.union(old.get("had") or ()))  # by these the job is known
            record |= {name: new(record.get(name)) if callable(new) else new for name, new in changes.items()}
            data = json.dumps(record, indent=1, allow_nan=False).encode() + b"\n"
            if path.startswith(ETILS):
                epath.Path(path).write_bytes(data)
            else:
                _replace(path, data)

    def _read(self) -> dict[str, Any]:
        """What this job has written; nothing if it has not.

        Before it has a file of its own, that of a job which had one of its nodes.
        """
        path = self._require_path()
        record = self._read_file(path)
        if record:
            if not self._is_ours(record):
                problem = f"is of a job with the nodes {', '.join(record['had'])}, and here are"
                raise FormatError(path, f"{problem} {', '.join(sorted(self._nodes))}: give each job a file of its own")
            return record
        others = [] if self._given else _files(path)
        return next(filter(self._is_ours, map(self._read_file, others)), {})

    def _is_ours(self, record: Mapping[str, Any]) -> bool:
        had = record.get("had") or ()
        return bool(record) and (not had or not self._nodes or not self._nodes.isdisjoint(had))

    def _read_file(self, path: str) -> dict[str, Any]:
        try:
            if path.startswith(ETILS):
                data = epath.Path(path).read_bytes()
            else:
                data = PosixStore(os.path.dirname(path)).read(os.path.basename(path), limit_bytes=_MAX_BYTES)
        except FileNotFoundError:
            return {}
        except (ValueError, IsADirectoryError) as error:  # too large, or no file
            raise FormatError(path, f"{_FOREIGN} ({error})") from None
        try:
            record = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(path, f"{_FOREIGN} (no JSON: {str(error)[:200]})") from None
        if not isinstance(record, dict) or record.get("epochckpt") != _KIND:
            raise FormatError(path, f'{_FOREIGN} (no "epochckpt": "{_KIND}")')
        if record.get("version") != _VERSION:
            raise FormatVersionError(path, f"is of version {record.get('version')!r}; this epochckpt knows {_VERSION}")
        epoch = record.get("epoch")
        if epoch is not None and (not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0):
            raise FormatError(path, f"{_FOREIGN} (the epoch is {str(epoch)[:80]})")
        if not isinstance(record.get("stats") or {}, dict):
            raise FormatError(path, f"{_FOREIGN} (stats are no object)")
        had = record.get("had") or []
        if not isinstance(had, list) or not all(isinstance(name, str) for name in had):
            raise FormatError(path, f"{_FOREIGN} (nodes are no names)")
        return record

    def _require_path(self) -> str:
        if self._path is None:
            raise InvalidArgumentError("JsonMetadataHandler without a path: call set_params first")
        return self._path


class SqliteMetadataHandler(DirectoryHandler):
    """One SQLite database for many runs: which there are, what happened to their epochs, how long each node took.

    Several processes and threads may write at once. A run that is started again goes on under its name, if one of its
    nodes was in it before: jobs that share a directory, each for its own nodes, are different runs. Nothing is ever
    overwritten: an epoch that is written again after a rollback has two rows, of which the later counts. The tables are
    documented in `epochckpt.run_database`, which any SQLite tool can read.

    The protocol does not say which epoch a `report` is about: it is the one that this handler named or was named last
    (`last_epoch`, `write`, `save_failed`, `cp_accessible(epoch)`), else the last one that the run has written.

    Reading, in a notebook: `SqliteMetadataHandler(path).runs()` and so on; no `set_params` is needed.

    Args:
        path: the file, on a local or shared file system; its folder must exist.
        run: the run's name; None for its db_prefix, as given.
        timeout_secs: how long a call may wait for a lock that another process holds.
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None, *, timeout_secs: float = 30.0):
        name = check_path("SqliteMetadataHandler(path)", path)
        if "://" in name or name == ":memory:":
            raise InvalidArgumentError(f"SqliteMetadataHandler(path) is {name!r}; SQLite needs a file on a file system")
        if run is not None and (not isinstance(run, str) or not run):
            raise InvalidArgumentError(f"SqliteMetadataHandler(run) must be a name, got {run!r}")
        if isinstance(timeout_secs, bool) or not isinstance(timeout_secs, int | float) or not 0 < timeout_secs <= _DAY:
            raise InvalidArgumentError(
                f"SqliteMetadataHandler(timeout_secs) must be a number above 0, at most {_DAY}, got {timeout_secs!r}"
            )
        self._database = RunDatabase(name, float(timeout_secs))
        self._given, self._nodes = run, frozenset[str]()
        self._epoch: int | None = None
        self._id: int | None = None

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Begins the run, or goes on with the one of that name that had one of these nodes."""
        params, nodes = check_params(db_prefix, db_type, path_prefix, path_type), check_nodes(node_names)
        self._set_prefix(params["db_prefix"])
        self._nodes = frozenset(nodes)
        self._id = self._database.start(self._given or params["db_prefix"], params, nodes, time.time())

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The user's, else the one that the run wrote last; None if there is none."""
        named = user_epoch is not None
        self._epoch = check_epoch("last_epoch", user_epoch) if named else self._database.last_epoch(self._run)
        return self._epoch

    def write(self, epoch: int) -> None:
        """Adds the epoch."""
        self._add("write", epoch, "written", None)

    def report(self, action_name: str, all_stats: Mapping[str, float]) -> None:
        """Adds the times: of one name, or folder, the node is the last part of it that is a node's name."""
        times = [(name, self._node(name), secs) for name, secs in check_times(action_name, all_stats)]
        self._database.add_stats(self._run, self._epoch, action_name, times, time.time())

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the directory exists, see `JsonMetadataHandler`."""
        if epoch is not None:
            self._epoch = check_epoch("cp_accessible", epoch)
        return super().cp_accessible(epoch)

    def save_failed(self, epoch: int, reason: str) -> None:
        """Adds the failure."""
        self._add("save_failed", epoch, "failed", str(reason))

    def run_ended(self, epoch: int, reason: str) -> None:
        """Adds the reason."""
        self._add("run_ended", epoch, "ended", str(reason))

    def runs(self) -> list[RunRow]:
        """All runs in the database, in the order in which they were first started."""
        return self._database.runs()

    def epochs(self, run: str | None = None) -> list[EpochRow]:
        """What happened to the epochs of one run, or of all, in that order."""
        return self._database.epochs(run)

    def stats(self, run: str | None = None, epoch: int | None = None) -> list[StatRow]:
        """Times of one run or of all, about one epoch or all, in the order in which they were reported."""
        return self._database.stats(run, epoch)

    def slowest(self, run: str | None = None) -> tuple[str, float] | None:
        """The node whose times, of all actions, add up to most, and the sum in seconds; of one run or of all."""
        return self._database.slowest(run)

    def _add(self, method: str, epoch: int, outcome: str, reason: str | None) -> None:
        number = check_epoch(method, epoch)
        self._database.add_epoch(self._run, number, outcome, reason, time.time())
        self._epoch = number

    @property
    def _run(self) -> int:
        self._require_prefix()
        assert self._id is not None, "set_params has set both"
        return self._id

    def _node(self, name: str) -> str:
        if name in self._nodes:
            return name
        known = {paths.folder_name(node): node for node in self._nodes}
        return next((known[part] for part in reversed(name.split("/")) if part in known), name)


def _writable(path: str) -> str:
    """The path, made absolute if it is local."""
    if path.startswith(ETILS):
        return path
    if "://" in path:
        raise InvalidArgumentError(
            f"JsonMetadataHandler cannot write {path}: expected a local path or one of {', '.join(ETILS)}…; "
            "give it a path= of its own"
        )
    return os.path.abspath(path)


def _files(path: str) -> list[str]:
    """The files of the handlers of other jobs in the directory of this one's."""
    folder, name = path.rsplit("/", 1)
    try:
        names = [p.name for p in epath.Path(folder).glob(f"{JSON_NAME}-*.json")]
    except OSError:  # there is no such folder, or it cannot be read: whoever writes will say so
        return []
    return [f"{folder}/{other}" for other in sorted(names) if other != name]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _replace(path: str, data: bytes) -> None:
    """Puts a file in place of another: after a crash there is the old one or the new one, whole."""
    store, name = PosixStore(os.path.dirname(path)), os.path.basename(path)
    # Two jobs may share the directory, so each write has a file of its own; the dot hides what a crash leaves behind
    fresh = f".{name}.{paths.new_id()}.tmp"
    store.put(name, data, draft=fresh, replace=True)
