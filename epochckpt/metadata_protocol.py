"""The protocol of metadata handlers, and checks of what they are given and answer; users find it in `ec.metadata`."""

from __future__ import annotations

import abc
import inspect
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import logging
from etils import epath

from epochckpt import checksum
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.storage import expanded

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
        number = checksum.pack_json(secs, f"report({action_name!r}): {name!r}")
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
