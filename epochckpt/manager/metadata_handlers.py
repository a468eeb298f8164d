"""Metadata handlers: they record what a run does, and say where to resume when it starts again.

The protocol is that of Caffe2's `caffe2.python.checkpoint`; users find it in `epochckpt.metadata`. The methods of a
handler are called on the primary only, also from background threads. What a handler raises is logged, and never harms
an epoch that is committed.
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

from epochckpt.errors import DamagedError, FormatError, FormatVersionError, InvalidArgumentError, say
from epochckpt.format import checksums, parsing, paths
from epochckpt.manager.run_database import RunDatabase, RunEpochRow, RunRow, RunStatRow
from epochckpt.storage import Store, expanded, open_store, path_text

T = TypeVar("T")

DB_TYPE = "epochckpt"
"""The kind of storage that handlers get as `db_type`."""

_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "set_params": (0, ("db_prefix", "db_type", "node_names", "path_prefix", "path_type")),
    "last_epoch": (0, ("user_epoch",)),
    "write": (0, ("epoch",)),
    "report": (2, ()),
    "cp_accessible": (1, ()),
}
"""How Caffe2, and we, call a handler's methods: how many arguments by position, and the names of those by keyword."""


class AbstractMetadataHandler(abc.ABC):
    """Records what a run does, and knows at the next start which epoch was the last.

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


class _DirectoryHandler(AbstractMetadataHandler):
    """The handlers of this module: they look at the directory of the checkpoints themselves."""

    _store: Store | None = None

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Begins the run, or goes on with the one that had one of these nodes."""
        if isinstance(node_names, str) or not isinstance(node_names, Sequence):
            raise InvalidArgumentError(f"set_params(node_names) must be a list of names, got {node_names!r}")
        prefix = expanded(path_text(db_prefix, "set_params(db_prefix)"))
        texts = {"db_type": db_type, "path_prefix": path_prefix, "path_type": path_type}
        params = {"db_prefix": prefix, **{name: None if v is None else str(v) for name, v in texts.items()}}
        store = open_store(prefix)
        self._begin(params, [str(name) for name in node_names], store)
        self._store = store

    @abc.abstractmethod
    def _begin(self, params: dict[str, Any], nodes: list[str], store: Store) -> None:
        """`set_params`, with its arguments checked; `store` is the directory of the checkpoints."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the directory exists; an object store, which has no directories, is asked whether it answers."""
        if self._store is None:
            raise InvalidArgumentError(f"{type(self).__name__}: call set_params first")
        try:
            if self._store.renames:
                return os.path.isdir(self._store.root)
            self._store.exists(JSON_NAME)
        except OSError as error:
            logging.warning("%s cannot be reached: %s", self._store.root, say(error))
            return False
        return True


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


JSON_NAME = "last_epoch"
_KIND, _VERSION = "last_epoch", 1
_MAX_BYTES = 16 * 2**20
_DAY = 86_400  # SQLite counts milliseconds in an int of C
_FOREIGN = "is not what JsonMetadataHandler writes; move it away, or give the handler another path"


class JsonMetadataHandler(_DirectoryHandler):
    """One small JSON file beside the epochs: the last epoch and when it was written, for people, too.

    It also holds the run's nodes, the last times of each action, the last failed save and why the run ended. Each
    write replaces the file atomically and durably.

    Jobs that share a directory, each for its own nodes, have a file each. A job that is started with more or fewer
    nodes goes on from the file of a job that had one of them.

    Args:
        path: the file, a local path or a URL; None for `last_epoch-<the first node>.json` in the directory of the
            checkpoints.

    Example:
        >>> import json, pathlib
        >>> import orbax.checkpoint as ocp
        >>> import epochckpt as ec
        >>> handler = ec.metadata.JsonMetadataHandler("last.json")
        >>> with ec.CheckpointManager("run", metadata_handler=handler) as manager:
        ...     saved = manager.save(3, args=ocp.args.StandardSave({"w": 1.5}))
        >>> json.loads(pathlib.Path("last.json").read_text())["epoch"]
        3
        >>> handler.last_epoch()
        3
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._given = path is not None
        self._file = None if path is None else _file_at(expanded(path_text(path, "JsonMetadataHandler(path)")))
        self._params: dict[str, Any] = {}
        self._nodes = frozenset[str]()
        self._lock = threading.Lock()

    def _begin(self, params: dict[str, Any], nodes: list[str], store: Store) -> None:
        with self._lock:
            if not self._given:
                first = "".join(f"-{paths.folder_name(name)}" for name in nodes[:1])
                self._file = store, f"{JSON_NAME}{first}.json"
            self._params, self._nodes = {**params, "nodes": nodes}, frozenset(nodes)

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
            (store, name), old = self._place(), self._read()
            record = {"epochckpt": _KIND, "version": _VERSION, "epoch": None, **old, **self._params}
            record["had"] = sorted(self._nodes.union(old.get("had") or ()))  # by these the job is known
            record |= {name: new(record.get(name)) if callable(new) else new for name, new in changes.items()}
            data = json.dumps(record, indent=1, allow_nan=False).encode() + b"\n"
            # two jobs may share the directory, so each write has a draft of its own; a crash leaves it, hidden
            store.put(name, data, draft=f".{name}.{paths.new_id()}.tmp", replace=True)

    def _read(self) -> dict[str, Any]:
        """The record of this job, or, before it has written one, that of a job which had one of its nodes."""
        store, name = self._place()
        record = _read_json(store, name)
        if record:
            if not self._is_ours(record):
                problem = f"is of a job with the nodes {', '.join(record['had'])}, and here are"
                nodes = ", ".join(sorted(self._nodes))
                raise FormatError(f"{store.root}/{name}", f"{problem} {nodes}: give each job a file of its own")
            return record
        others = [] if self._given else [n for n in store.find(f"{JSON_NAME}-", "") if n.endswith(".json")]
        return next(filter(self._is_ours, (_read_json(store, other) for other in others)), {})

    def _is_ours(self, record: Mapping[str, Any]) -> bool:
        had = record.get("had") or ()
        return bool(record) and (not had or not self._nodes or not self._nodes.isdisjoint(had))

    def _place(self) -> tuple[Store, str]:
        if self._file is None:
            raise InvalidArgumentError("JsonMetadataHandler without a path: call set_params first")
        return self._file


def _file_at(path: str) -> tuple[Store, str]:
    """The store and the name in it of a file."""
    if path.startswith(("http://", "https://")):
        raise InvalidArgumentError(f"JsonMetadataHandler(path) is {path!r}, which cannot be written to")
    folder, _, name = (path if "://" in path else os.path.abspath(path)).rpartition("/")
    return open_store(folder or "/"), name


def _read_json(store: Store, name: str) -> dict[str, Any]:
    """The record in a file; empty if there is no such file."""
    path = f"{store.root}/{name}"

    def parse(_: str, data: bytes) -> dict[str, Any]:
        try:
            record = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(path, f"{_FOREIGN} (no JSON: {str(error)[:200]})") from None
        if not isinstance(record, dict) or record.get("epochckpt") != _KIND:
            raise FormatError(path, f'{_FOREIGN} (no "epochckpt": "{_KIND}")')
        if record.get("version") != _VERSION:
            raise FormatVersionError(path, f"is of version {record.get('version')!r}; this epochckpt knows {_VERSION}")
        epoch, had = record.get("epoch"), record.get("had") or []
        if epoch is not None and (type(epoch) is not int or epoch < 0):
            raise FormatError(path, f"{_FOREIGN} (the epoch is {str(epoch)[:80]})")
        if not isinstance(record.get("stats") or {}, dict):
            raise FormatError(path, f"{_FOREIGN} (stats are no object)")
        if not isinstance(had, list) or not all(isinstance(node, str) for node in had):
            raise FormatError(path, f"{_FOREIGN} (nodes are no names)")
        return record

    try:
        return parsing.read_record(store, name, parse, limit_bytes=_MAX_BYTES) or {}
    except (DamagedError, FormatError) as error:
        if error.path == path:
            raise
        raise FormatError(path, f"{_FOREIGN} ({error})") from None  # it is too large, or no file


class SqliteMetadataHandler(_DirectoryHandler):
    """One SQLite database for many runs: which there are, what happened to their epochs, how long each node took.

    Several processes and threads may write at once. A run that is started again goes on under its name, if one of its
    nodes was in it before: jobs that share a directory, each for its own nodes, are different runs. Nothing is ever
    overwritten: an epoch that is written again after a rollback has two rows, of which the later counts. The tables are
    documented in `epochckpt.manager.run_database`, which any SQLite tool can read.

    The protocol does not say which epoch a `report` is about: it is the one that this handler named or was named last
    (`last_epoch`, `write`, `save_failed`, `cp_accessible(epoch)`), else the last one that the run has written.

    Args:
        path: the file, on a local or shared file system; its folder must exist.
        run: the run's name; None for its db_prefix, as given.
        timeout_secs: how long a call may wait for a lock that another process holds.

    Example:
        >>> import orbax.checkpoint as ocp
        >>> import epochckpt as ec
        >>> handler = ec.metadata.SqliteMetadataHandler("runs.db", run="first")
        >>> with ec.CheckpointManager("run", metadata_handler=handler) as manager:
        ...     saved = manager.save(3, args=ocp.args.StandardSave({"w": 1.5}))
        >>> history = ec.metadata.SqliteMetadataHandler("runs.db")  # in a notebook, later
        >>> [(run.name, run.last_epoch) for run in history.runs()]
        [('first', 3)]
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None, *, timeout_secs: float = 30.0):
        name = expanded(path_text(path, "SqliteMetadataHandler(path)"))
        if "://" in name or name == ":memory:":
            raise InvalidArgumentError(f"SqliteMetadataHandler(path) is {name!r}; SQLite needs a file on a file system")
        if run is not None and (not isinstance(run, str) or not run):
            raise InvalidArgumentError(f"SqliteMetadataHandler(run) must be a name, got {run!r}")
        if isinstance(timeout_secs, bool) or not isinstance(timeout_secs, int | float) or not 0 < timeout_secs <= _DAY:
            raise InvalidArgumentError(
                f"SqliteMetadataHandler(timeout_secs) must be a number above 0, at most {_DAY}, got {timeout_secs!r}"
            )
        self._database = RunDatabase(name, float(timeout_secs))
        self._run, self._nodes = run, frozenset[str]()
        self._epoch: int | None = None
        self._id: int | None = None

    def _begin(self, params: dict[str, Any], nodes: list[str], store: Store) -> None:
        self._nodes = frozenset(nodes)
        self._id = self._database.start(self._run or params["db_prefix"], params, nodes, time.time())

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The user's, else the one that the run wrote last; None if there is none."""
        named = user_epoch is not None
        self._epoch = check_epoch("last_epoch", user_epoch) if named else self._database.last_epoch(self._run_id)
        return self._epoch

    def write(self, epoch: int) -> None:
        """Adds the epoch."""
        self._add("write", epoch, "written", None)

    def report(self, action_name: str, all_stats: Mapping[str, float]) -> None:
        """Adds the times: of one name, or folder, the node is the last part of it that is a node's name."""
        times = [(name, self._node(name), secs) for name, secs in check_times(action_name, all_stats)]
        self._database.add_stats(self._run_id, self._epoch, action_name, times, time.time())

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

    def epochs(self, run: str | None = None) -> list[RunEpochRow]:
        """What happened to the epochs of one run, or of all, in that order."""
        return self._database.epochs(run)

    def stats(self, run: str | None = None, epoch: int | None = None) -> list[RunStatRow]:
        """Times of one run or of all, about one epoch or all, in the order in which they were reported."""
        return self._database.stats(run, epoch)

    def slowest(self, run: str | None = None) -> tuple[str, float] | None:
        """The node whose times, of all actions, add up to most, and the sum in seconds; of one run or of all."""
        return self._database.slowest(run)

    def _add(self, method: str, epoch: int, outcome: str, reason: str | None) -> None:
        number = check_epoch(method, epoch)
        self._database.add_epoch(self._run_id, number, outcome, reason, time.time())
        self._epoch = number

    @property
    def _run_id(self) -> int:
        if self._id is None:
            raise InvalidArgumentError("SqliteMetadataHandler: call set_params first")
        return self._id

    def _node(self, name: str) -> str:
        if name in self._nodes:
            return name
        known = {paths.folder_name(node): node for node in self._nodes}
        return next((known[part] for part in reversed(name.split("/")) if part in known), name)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
