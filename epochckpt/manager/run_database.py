"""`SqliteMetadataHandler`: one SQLite database that remembers many runs, written by several processes and threads.

- Each call is one transaction in a connection of its own: all of it is durable when the call returns, or none.
- Every wait for another process's lock is bounded.
- The rollback journal is used, not the write-ahead log, which does not work on network file systems.
"""

import errno
import json
import os
import pathlib
import sqlite3
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from epochckpt._durations import seconds
from epochckpt.errors import (
    AccessError,
    CoordinationTimeoutError,
    DamagedError,
    EpochCheckpointError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
)
from epochckpt.format import paths
from epochckpt.manager.metadata_handlers import CheckedHandler
from epochckpt.manager.numbers import epoch_number
from epochckpt.storage import Store, expanded, path_text, plain

APPLICATION_ID = 0x45504348  # "EPCH"
VERSION = 1

# Times are seconds since 1970. Rows of `epochs` and `stats` are only ever added: the greatest id is the last. JSON
# lists name nodes: `nodes` the nodes of the job that wrote last (in `epochs`: that wrote this row), `had` the nodes of
# all jobs that wrote in a run.
_SCHEMA = (
    """CREATE TABLE runs(
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, db_prefix TEXT NOT NULL, db_type TEXT, path_prefix TEXT,
        path_type TEXT, nodes TEXT NOT NULL, had TEXT NOT NULL, started_secs REAL NOT NULL, seen_secs REAL NOT NULL)""",
    """CREATE TABLE epochs(
        id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id), epoch INTEGER NOT NULL,
        outcome TEXT NOT NULL CHECK (outcome IN ('written', 'failed', 'ended')), reason TEXT, nodes TEXT NOT NULL,
        at_secs REAL NOT NULL)""",
    """CREATE TABLE stats(
        id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id), epoch INTEGER, action TEXT NOT NULL,
        name TEXT NOT NULL, node TEXT NOT NULL, secs REAL NOT NULL, at_secs REAL NOT NULL)""",
    "CREATE INDEX runs_of_name ON runs(name)",
    "CREATE INDEX epochs_of_run ON epochs(run_id, outcome, id)",
    "CREATE INDEX stats_of_run ON stats(run_id, epoch)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
_START = """INSERT INTO runs
    VALUES (:id, :name, :db_prefix, :db_type, :path_prefix, :path_type, :nodes, :had, :now, :now)
    ON CONFLICT(id) DO UPDATE SET
        db_prefix = :db_prefix, db_type = :db_type, path_prefix = :path_prefix, path_type = :path_type,
        seen_secs = :now"""
_ADD_EPOCH = "INSERT INTO epochs(run_id, at_secs, epoch, outcome, reason, nodes) VALUES (?, ?, ?, ?, ?, ?)"
_WRITTEN = """SELECT epoch, epochs.nodes FROM epochs JOIN runs ON runs.id = run_id
    WHERE runs.name = (SELECT name FROM runs WHERE id = :run) AND outcome = 'written' ORDER BY epochs.id DESC"""
_LAST = "SELECT {} FROM epochs WHERE run_id = runs.id {} ORDER BY id DESC LIMIT 1"
_LAST_WRITTEN = _LAST.format("epoch", "AND outcome = 'written'")
_ADD_STAT = f"""INSERT INTO stats(run_id, at_secs, epoch, action, name, node, secs)
    SELECT id, :now, COALESCE(:epoch, ({_LAST_WRITTEN})), :action, :name, :node, :secs FROM runs WHERE id = :run"""
_END = f"SELECT reason FROM ({_LAST.format('outcome, reason', '')}) WHERE outcome = 'ended'"
_OF_RUN = "JOIN runs ON runs.id = run_id WHERE (:run IS NULL OR runs.name = :run)"
_MAX_TIMEOUT_SECS = 86_400  # SQLite counts milliseconds in an int of C


@dataclass(frozen=True)
class RunRow:
    """One run; `started_secs` is the Unix time of its first start, `seen_secs` the time of its last write.

    Jobs that share a directory, each for its own nodes, may have one `name`. `db_prefix` is the directory of
    the last start, as an absolute path or URL; `last_epoch` is the epoch written last, which is not the greatest after
    a rollback. `end_reason` says why the run ended; a later write resets it to None.
    """

    name: str
    db_prefix: str
    db_type: str | None
    nodes: tuple[str, ...]
    started_secs: float
    seen_secs: float
    last_epoch: int | None
    end_reason: str | None


@dataclass(frozen=True)
class RunEpochRow:
    """One event: an epoch was "written", its save "failed", or the run "ended" with it; `at_secs` is Unix time."""

    run: str
    epoch: int
    outcome: str
    reason: str | None
    at_secs: float


@dataclass(frozen=True)
class RunStatRow:
    """How long one action took one node; `name` is the node or its folder, as it was reported."""

    run: str
    epoch: int | None
    action: str
    name: str
    node: str
    secs: float
    at_secs: float


class SqliteMetadataHandler(CheckedHandler):
    """One SQLite database for many runs: lists the runs, the fate of their epochs, and how long each node took.

    Several processes and threads may write at once. A run that is started again keeps its name, if one of its
    nodes was in it before: jobs that share a directory, each for its own nodes, are different runs. A job with the
    nodes of several of them goes on from the newest epoch that all of its nodes have; if it only looks, and writes no
    epoch, it changes nothing for the others. Nothing is ever overwritten: an epoch written again after a rollback has
    two rows, and the later row counts. Any SQLite tool can read the tables `runs`, `epochs` and `stats`.

    The protocol does not say which epoch a `report` is about. The handler takes the epoch of the last call that named
    one (`last_epoch`, `write`, `save_failed`, `cp_accessible`). If no call did, it takes the last epoch that the run
    has written. A time that is reported for a folder counts for the node that the last part of its path names.

    Args:
        path: the file, on a local or shared file system; its folder must exist.
        run: the run's name; None for the path or URL of its directory.
        timeout_secs: how long a call may wait for a lock that another process holds, in seconds or as `"1min"`.

    Examples:
        >>> handler = ec.metadata.SqliteMetadataHandler("runs.db", run="first")
        >>> with ec.CheckpointManager("run", metadata_handler=handler) as manager:
        ...     saved = manager.save(3, args=ocp.args.StandardSave({"w": 1.5}))
        >>> history = ec.metadata.SqliteMetadataHandler("runs.db")  # in a notebook, later
        >>> [(run.name, run.last_epoch) for run in history.runs()]
        [('first', 3)]
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None, *, timeout_secs: float | str = 30.0):
        name = expanded(path_text(path, "SqliteMetadataHandler(path)"))
        if "://" in name or name == ":memory:":
            raise InvalidArgumentError(
                f"SqliteMetadataHandler(path) is {plain(name)!r}; SQLite needs a file on a file system"
            )
        if run is not None and (not isinstance(run, str) or not run):
            raise InvalidArgumentError(f"SqliteMetadataHandler(run) must be a name, got {run!r}")
        timeout = seconds("SqliteMetadataHandler(timeout_secs)", timeout_secs)
        if timeout > _MAX_TIMEOUT_SECS:
            raise InvalidArgumentError(
                f"SqliteMetadataHandler(timeout_secs) is at most {_MAX_TIMEOUT_SECS}, got {timeout_secs!r}"
            )
        self._path = os.path.abspath(name)
        self._timeout_secs = float(timeout)
        self._run = run
        self._nodes = list[str]()
        self._epoch: int | None = None
        self._id: int | None = None

    def _begin(self, params: dict[str, Any], nodes: list[str], store: Store) -> None:
        name = self._run or params["db_prefix"]
        run_id = None
        with self._transaction() as connection:
            # A job goes on with the run of the same nodes. Without one it goes on with the last run that shares a node.
            of_name = connection.execute("SELECT id, nodes, had FROM runs WHERE name = ? ORDER BY id", (name,))
            runs = [(known_id, set(json.loads(now)), set(json.loads(had))) for known_id, now, had in of_name]
            for known_id, _, had in runs:
                if not had.isdisjoint(nodes) or not had or not nodes:
                    run_id = known_id
            for known_id, now, _ in runs:
                if now == set(nodes):
                    run_id = known_id
            row = {"id": run_id, "name": name, "now": time.time(), **params}
            row |= {"nodes": json.dumps(nodes), "had": json.dumps(sorted(nodes))}
            added = connection.execute(_START, row).lastrowid
        self._id = added if run_id is None else run_id
        self._nodes = nodes

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        self._epoch = super().last_epoch(user_epoch)
        return self._epoch

    def cp_accessible(self, epoch: int | None = None) -> bool:
        if epoch is not None:
            self._epoch = epoch_number(epoch, "cp_accessible: ")
        return super().cp_accessible(epoch)

    def runs(self) -> list[RunRow]:
        """All runs in the database, in the order in which they were first started."""
        found = self._rows(
            "SELECT name, db_prefix, db_type, nodes, started_secs, seen_secs, "
            f"({_LAST_WRITTEN}), ({_END}) FROM runs ORDER BY id"
        )
        return [RunRow(n, p, t, tuple(json.loads(nodes)), *rest) for n, p, t, nodes, *rest in found]

    def epochs(self, run: str | None = None) -> list[RunEpochRow]:
        """What happened to the epochs of one run, or of all, in that order."""
        columns = "runs.name, epoch, outcome, reason, at_secs"
        query = f"SELECT {columns} FROM epochs {_OF_RUN} ORDER BY epochs.id"
        return [RunEpochRow(*row) for row in self._rows(query, run=run)]

    def stats(self, run: str | None = None, epoch: int | None = None) -> list[RunStatRow]:
        """Times of one run or of all, about one epoch or all, in the order in which they were reported."""
        columns = "runs.name, epoch, action, stats.name, node, secs, at_secs"
        query = f"SELECT {columns} FROM stats {_OF_RUN} AND (:epoch IS NULL OR epoch = :epoch) ORDER BY stats.id"
        return [RunStatRow(*row) for row in self._rows(query, run=run, epoch=epoch)]

    def slowest(self, run: str | None = None) -> tuple[str, float] | None:
        """The node whose times, of all actions, add up to most, and the sum in seconds; of one run or of all."""
        query = f"SELECT node, SUM(secs) FROM stats {_OF_RUN} GROUP BY node ORDER BY 2 DESC, 1 LIMIT 1"
        return next(iter(self._rows(query, run=run)), None)

    @property
    def _run_id(self) -> int:
        if self._id is None:
            raise InvalidArgumentError("SqliteMetadataHandler: call set_params first")
        return self._id

    # -- the database ----------------------------------------------------------------------------------------------

    def _last_epoch(self) -> int | None:
        """The newest epoch that all nodes have, of those that have any.

        A node has what the last job with this node has written: one of more nodes, or of fewer, may have gone on.
        """
        last = list[int]()
        missing = set(self._nodes)
        for epoch, names in self._rows(_WRITTEN, run=self._run_id):
            nodes = set(json.loads(names))
            if missing.isdisjoint(nodes) and nodes and self._nodes:
                continue
            last.append(epoch)
            missing -= nodes
            if not missing or not nodes:
                break
        return min(last, default=None)

    def _note(self, outcome: str, epoch: int, reason: str | None = None) -> None:
        nodes = json.dumps(self._nodes)
        with self._adding() as (connection, run, now):
            connection.execute(_ADD_EPOCH, (run, now, epoch, outcome, reason, nodes))
            names = _only(connection, "SELECT had FROM runs WHERE id = ?", run)
            had = json.dumps(sorted({*json.loads(names), *self._nodes}))
            connection.execute("UPDATE runs SET nodes = ?, had = ? WHERE id = ?", (nodes, had, run))
        self._epoch = epoch

    def _note_times(self, action: str, times: Mapping[str, float]) -> None:
        folders = {paths.folder_name(node): node for node in self._nodes}
        rows: list[dict[str, Any]] = []
        for name, secs in times.items():
            found = (folders[part] for part in reversed(name.split("/")) if part in folders)
            node = name if name in self._nodes else next(found, name)
            rows.append({"epoch": self._epoch, "action": action, "name": name, "node": node, "secs": secs})
        with self._adding() as (connection, run, now):
            connection.executemany(_ADD_STAT, [{**row, "run": run, "now": now} for row in rows])

    @contextmanager
    def _adding(self) -> Generator[tuple[sqlite3.Connection, int, float]]:
        """A transaction that adds rows to this handler's run; gives the run's id and the time, too."""
        run = self._run_id
        now = time.time()
        with self._transaction() as connection:
            if not connection.execute("UPDATE runs SET seen_secs = ? WHERE id = ?", (now, run)).rowcount:
                raise InvalidArgumentError(f"{self._path}: the run is not in it any more; call set_params first")
            yield connection, run, now

    def _rows(self, query: str, **values: Any) -> list[Any]:
        if not os.path.exists(self._path):
            raise InvalidArgumentError(f"{self._path}: there is no such file; expected what a run has written")
        with self._opened("rw") as connection:  # not "ro": that could not undo what a killed writer left half done
            connection.execute("BEGIN")
            return connection.execute(query, values).fetchall() if self._has_tables(connection) else []

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._opened("rwc") as connection:
            # Locks at once: two transactions that read before they write would block each other.
            connection.execute("BEGIN IMMEDIATE")
            if not self._has_tables(connection):
                for statement in _SCHEMA:
                    connection.execute(statement)
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _opened(self, mode: str) -> Generator[sqlite3.Connection]:
        """A connection; leaving it without COMMIT undoes all."""
        try:
            uri = f"{pathlib.Path(self._path).as_uri()}?mode={mode}"
            opened = sqlite3.connect(uri, timeout=self._timeout_secs, isolation_level=None, uri=True)
            with closing(opened) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _has_tables(self, connection: sqlite3.Connection) -> bool:
        """Whether it is ours; False if it is empty."""
        application = _only(connection, "PRAGMA application_id")
        version = _only(connection, "PRAGMA user_version")
        if application == APPLICATION_ID:
            if version > VERSION:
                problem = f"was written by a newer epochckpt (tables of version {version}; this one knows {VERSION})"
                raise FormatVersionError(self._path, f"{problem}; update epochckpt, or use another file")
            return True
        tables = _only(connection, "SELECT COUNT(*) FROM sqlite_master")
        if application or version or tables:
            raise FormatError(self._path, "is a database of another program; nothing was changed; use another file")
        return False

    def _explained(self, error: sqlite3.Error) -> EpochCheckpointError | OSError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without its extension
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return CoordinationTimeoutError(
                f"{self._path}: another process has kept it locked for more than {self._timeout_secs:g} s; "
                "nothing was written"
            )
        if code == sqlite3.SQLITE_NOTADB:
            return FormatError(self._path, "is not an SQLite database; nothing was changed; use another file")
        if code == sqlite3.SQLITE_CORRUPT:
            return DamagedError(self._path, f"is damaged ({error}); move it away, a new one is then begun")
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return AccessError(
                f"{self._path}: {error}; expected a file, or none yet, that may be written, in a folder that exists "
                "and may be written"
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return OSError(errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO, str(error), self._path)
        return FormatError(self._path, f"cannot be used: {error}")


def _only(connection: sqlite3.Connection, query: str, *values: Any) -> Any:
    """The one value that a query gives."""
    return connection.execute(query, values).fetchone()[0]
