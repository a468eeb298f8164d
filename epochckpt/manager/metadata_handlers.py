"""Caffe2's protocol of metadata handlers, and the handler that writes a JSON file; public in `epochckpt.metadata`."""

import abc
import datetime
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt.errors import DamagedError, FormatError, FormatVersionError, InvalidArgumentError, say, unreadable
from epochckpt.format import checksums, paths
from epochckpt.manager.numbers import epoch_number
from epochckpt.storage import Store, expanded, open_file, open_store, path_text, plain, read_json

T = TypeVar("T")

_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "set_params": (0, ("db_prefix", "db_type", "node_names", "path_prefix", "path_type")),
    "last_epoch": (0, ("user_epoch",)),
    "write": (0, ("epoch",)),
    "report": (2, ()),
    "cp_accessible": (1, ()),
}
"""How Caffe2, and we, call a handler's methods: the number of positional arguments, and the names of keyword ones."""


class AbstractMetadataHandler(abc.ABC):
    """Records what a run does, and knows at the next start which epoch was the last, as in `caffe2.python.checkpoint`.

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
        """Describes the run, before anything else is called.

        `db_prefix` is the directory of the checkpoints, which need not exist, and `db_type` its kind of storage.
        Epochs are read from `path_prefix`, of the kind `path_type`, if that is given.
        """

    @abc.abstractmethod
    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from; None if there is none. `user_epoch` is the one that the user has named.

        With the managers of `epochckpt.caffe2` the answer counts, whatever was named; with others a named epoch does.
        """

    @abc.abstractmethod
    def write(self, epoch: int) -> None:
        """An epoch has been committed. After a rollback its number is lower than one that was written before."""

    @abc.abstractmethod
    def report(self, action_name: str, all_stats: Mapping[str, float]) -> None:
        """How long an action, such as `checkpoint_save`, took: seconds by node, or by the name of its folder."""

    @abc.abstractmethod
    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the checkpoints, or those of one epoch, can be reached now. If not, no save is tried.

        An OSError means that the handler cannot tell, and the save is tried. Any other error counts as no.
        """

    def save_failed(self, epoch: int, reason: str) -> None:
        """An epoch could not be saved. Does nothing by default."""
        del epoch, reason

    def run_ended(self, epoch: int, reason: str) -> None:
        """The run has ended with this epoch. Does nothing by default."""
        del epoch, reason


class CheckedHandler(AbstractMetadataHandler):
    """A handler that checks its arguments, and looks at the directory of the checkpoints itself."""

    _store: Store | None = None

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        if isinstance(node_names, str) or not isinstance(node_names, Sequence):
            raise InvalidArgumentError(f"set_params(node_names) must be a list of names, got {node_names!r}")
        store = open_store(path_text(db_prefix, "set_params(db_prefix)"))
        texts = {"db_type": db_type, "path_prefix": path_prefix, "path_type": path_type}
        params: dict[str, Any] = {name: None if v is None else str(v) for name, v in texts.items()}
        self._begin({"db_prefix": store.root, **params}, [str(name) for name in node_names], store)
        self._store = store

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The user's, else the one that the run wrote last; None if there is none."""
        return self._last_epoch() if user_epoch is None else epoch_number(user_epoch, "last_epoch: ")

    def write(self, epoch: int) -> None:
        self._note("written", epoch_number(epoch, "write: "))

    def save_failed(self, epoch: int, reason: str) -> None:
        self._note("failed", epoch_number(epoch, "save_failed: "), str(reason))

    def run_ended(self, epoch: int, reason: str) -> None:
        self._note("ended", epoch_number(epoch, "run_ended: "), str(reason))

    def report(self, action_name: str, all_stats: Mapping[str, float]) -> None:
        if not isinstance(action_name, str) or not isinstance(all_stats, Mapping):
            what = f"report({action_name!r}, a {type(all_stats).__name__})"
            raise InvalidArgumentError(f"{what}; expected a name, and seconds by name in a mapping")
        times = {}
        for name, secs in all_stats.items():
            where = f"report({action_name!r}): {name!r}"
            number = checksums.pack_json(secs, where)
            if isinstance(number, bool) or not isinstance(number, int | float) or not isinstance(name, str):
                raise InvalidArgumentError(f"{where} is {secs!r}; expected a name and seconds")
            times[name] = float(number)
        self._note_times(action_name, times)

    @abc.abstractmethod
    def _begin(self, params: dict[str, Any], nodes: list[str], store: Store) -> None:
        """Begins the run of these nodes, or goes on with it; `store` is the directory of the checkpoints."""

    @abc.abstractmethod
    def _last_epoch(self) -> int | None: ...

    @abc.abstractmethod
    def _note(self, outcome: str, epoch: int, reason: str | None = None) -> None:
        """Records that an epoch was "written", that its save "failed", or that the run "ended" with it."""

    @abc.abstractmethod
    def _note_times(self, action: str, times: Mapping[str, float]) -> None: ...

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the directory exists; an object store, which has no directories, is asked whether it answers."""
        if self._store is None:
            raise InvalidArgumentError(f"{type(self).__name__}: call set_params first")
        try:
            return self._store.is_reachable()
        except OSError as error:
            logging.warning("%s cannot be reached: %s", self._store.root, say(error))
            return False


def check_handler(handler: T) -> T:
    """Returns a handler, of any class, that has Caffe2's five methods; raises InvalidArgumentError for others."""
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


def answered_epoch(answer: Any, handler: Any) -> int | None:
    """The answer of a handler's `last_epoch` as an int or None; raises InvalidArgumentError if it is neither."""
    where = f"the metadata handler {type(handler).__name__} answered last_epoch: "
    return None if answer is None else epoch_number(answer, where)


_KIND = "last_epoch"
_VERSION = 1
_MAX_BYTES = 16 * 2**20
_FOREIGN = "is not what JsonMetadataHandler writes; move it away, or give the handler another path"


class JsonMetadataHandler(CheckedHandler):
    """One small JSON file beside the epochs: the last epoch and when it was written, for people, too.

    It also holds the run's nodes, the last times of each action, the last failed save and, until the next epoch is
    written, why the run ended. Each write replaces the file atomically and durably.

    Jobs that share a directory, each for its own nodes, have a file each. A job that is started with more or fewer
    nodes goes on from the file of a job that had one of them. A file of another program or job is left alone, and
    raises FormatError.

    `path` is the file, a local path or a URL; None: `last_epoch-<the first node>.json` in the directory of the epochs.

    Examples:
        >>> import json, pathlib
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
        self._file: tuple[Store, str] | None = None
        if path is not None:
            where = expanded(path_text(path, "JsonMetadataHandler(path)"))
            if where.startswith(("http://", "https://")):
                raise InvalidArgumentError(f"JsonMetadataHandler(path) is {plain(where)!r}, which cannot be written to")
            self._file = open_file(where)
        self._params: dict[str, Any] = {}
        self._nodes = frozenset[str]()
        self._lock = threading.Lock()

    def _begin(self, params: dict[str, Any], nodes: list[str], store: Store) -> None:
        with self._lock:
            if not self._given:
                first = "".join(f"-{paths.folder_name(name)}" for name in nodes[:1])
                self._file = store, f"{_KIND}{first}.json"
            self._params = {**params, "nodes": nodes}
            self._nodes = frozenset(nodes)

    def _last_epoch(self) -> int | None:
        with self._lock:
            return self._read().get("epoch")

    def _note(self, outcome: str, epoch: int, reason: str | None = None) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        written = {"epoch": epoch, "written": now, "ended": None}
        other = {outcome: {"epoch": epoch, "reason": reason, "at": now}}
        self._update(lambda old: written if outcome == "written" else other)

    def _note_times(self, action: str, times: Mapping[str, float]) -> None:
        self._update(lambda old: {"stats": {**(old.get("stats") or {}), action: times}})

    def _update(self, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with self._lock:
            old = self._read()
            store, name = self._place
            record = {"epochckpt": _KIND, "version": _VERSION, "epoch": None, **old, **self._params, **changes(old)}
            record["had"] = sorted(self._nodes.union(old.get("had") or ()))  # by these the job is known
            data = json.dumps(record, indent=1, allow_nan=False).encode() + b"\n"
            # two jobs may share the directory, so each write has a draft of its own; a crash leaves it, hidden
            store.put(name, data, draft=f".{name}.{paths.new_id()}.tmp", replace=True)

    def _read(self) -> dict[str, Any]:
        """The record of this job. Before its first write, it is the record of an earlier job with one of its nodes."""
        store, name = self._place
        record = _read_json(store, name)
        if record and not self._is_ours(record):
            theirs = ", ".join(record["had"])
            ours = ", ".join(sorted(self._nodes))
            problem = f"is of a job with the nodes {theirs}, and here are {ours}: give each job a file of its own"
            raise FormatError(f"{store.root}/{name}", problem)
        if record:
            return record
        others = [] if self._given else [n for n in store.find(f"{_KIND}-", "") if n.endswith(".json")]
        return next(filter(self._is_ours, (_read_json(store, other) for other in others)), {})

    def _is_ours(self, record: Mapping[str, Any]) -> bool:
        had = record.get("had") or ()
        return bool(record) and (not had or not self._nodes or not self._nodes.isdisjoint(had))

    @property
    def _place(self) -> tuple[Store, str]:
        if self._file is None:
            raise InvalidArgumentError("JsonMetadataHandler without a path: call set_params first")
        return self._file


def _read_json(store: Store, name: str) -> dict[str, Any]:
    """The record in a file; empty if there is no such file."""
    path = f"{store.root}/{name}"
    try:
        record = read_json(store, name, limit_bytes=_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError, IsADirectoryError) as error:  # it is too large, no JSON or no file
        raise FormatError(path, f"{_FOREIGN} ({str(error)[:200]})") from None
    except OSError as error:
        problem = unreadable(path, error)
        raise FormatError(path, f"{_FOREIGN} ({error})") if isinstance(problem, DamagedError) else problem from error
    if not isinstance(record, dict) or record.get("epochckpt") != _KIND:
        raise FormatError(path, f'{_FOREIGN} (no "epochckpt": "{_KIND}")')
    if record.get("version") != _VERSION:
        raise FormatVersionError(path, f"is of version {record.get('version')!r}; this epochckpt knows {_VERSION}")
    epoch = record.get("epoch")
    had = record.get("had") or []
    stats = record.get("stats") or {}
    if epoch is not None and (type(epoch) is not int or epoch < 0):
        raise FormatError(path, f"{_FOREIGN} (the epoch is {str(epoch)[:80]})")
    if not isinstance(stats, dict) or not isinstance(had, list) or not all(isinstance(node, str) for node in had):
        raise FormatError(path, f"{_FOREIGN} (stats are no object, or nodes no names)")
    return record
