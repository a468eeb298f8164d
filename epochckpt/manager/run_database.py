"""One SQLite database that remembers many runs, written by several processes and threads at once.

Times are seconds since 1970. The version of these tables is in `PRAGMA user_version`; `PRAGMA application_id` says
that the file is ours. Rows of `epochs` and `stats` are only ever added: history stays, and the greatest id is the last.

```
runs    id, name, db_prefix, db_type, path_prefix, path_type, nodes, had (JSON lists), started_secs, seen_secs
epochs  id, run_id, epoch, outcome ('written', 'failed', 'ended'), reason, at_secs
stats   id, run_id, epoch (or NULL), action, name, node, secs, at_secs
```

Runs of one name have no node in common: of `had`, the nodes that a run has now or has had.

Guarantees:
- each call is one transaction in a connection of its own: all of it is durable when the call returns, or none;
- every wait for another process's lock is bounded;
- the rollback journal is used, not the write-ahead log, which does not work on network file systems.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from epochckpt.errors import (
    AccessError,
    CoordinationTimeoutError,
    DamagedError,
    EpochCheckpointError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
)

APPLICATION_ID = 0x45504348  # "EPCH"
VERSION = 1

_SCHEMA = (
    """CREATE TABLE runs(
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, db_prefix TEXT NOT NULL, db_type TEXT, path_prefix TEXT,
        path_type TEXT, nodes TEXT NOT NULL, had TEXT NOT NULL, started_secs REAL NOT NULL, seen_secs REAL NOT NULL)""",
    """CREATE TABLE epochs(
        id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id), epoch INTEGER NOT NULL,
        outcome TEXT NOT NULL CHECK (outcome IN ('written', 'failed', 'ended')), reason TEXT, at_secs REAL NOT NULL)""",
    """CREATE TABLE stats(
        id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id), epoch INTEGER, action TEXT NOT NULL,
        name TEXT NOT NULL, node TEXT NOT NULL, secs REAL NOT NULL, at_secs REAL NOT NULL)""",
    "CREATE INDEX runs_of_name ON runs(name)",
    "CREATE INDEX epochs_of_run ON epochs(run_id, outcome, id)",
    "CREATE INDEX stats_of_run ON stats(run_id, epoch)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
_LAST = "SELECT {} FROM epochs WHERE run_id = runs.id {} ORDER BY id DESC LIMIT 1"
_LAST_WRITTEN = _LAST.format("epoch", "AND outcome = 'written'")
_END = f"SELECT reason FROM ({_LAST.format('outcome, reason', '')}) WHERE outcome = 'ended'"


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes:
        name: its name; jobs that share a directory, each for its own nodes, may have one name.
        db_prefix: the directory of its checkpoints, as given when it was last started.
        db_type: the kind of storage, as given.
        nodes: names of its nodes.
        started_secs: when it was first started.
        seen_secs: when it last wrote anything.
        last_epoch: the epoch written last (after going back not the greatest), None before the first.
        end_reason: why it ended, None if anything was written since.
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
    """One thing that happened to an epoch of a run.

    Attributes:
        run: name of the run.
        epoch: the epoch.
        outcome: "written", "failed" (its save) or "ended" (the run, with this epoch).
        reason: why it failed or ended.
        at_secs: when it was written.
    """

    run: str
    epoch: int
    outcome: str
    reason: str | None
    at_secs: float


@dataclass(frozen=True)
class RunStatRow:
    """How long one action took one node.

    Attributes:
        run: name of the run.
        epoch: the epoch that it was about, None where the run knew of none.
        action: name of the action.
        name: what the time was reported for, as given.
        node: the node that `name` is about.
        secs: seconds.
        at_secs: when it was written.
    """

    run: str
    epoch: int | None
    action: str
    name: str
    node: str
    secs: float
    at_secs: float


class RunDatabase:
    """The database in one file; touches nothing before the first call.

    Args:
        path: the file, made absolute now. Its folder must exist, the file need not.
        timeout_secs: how long to wait for others' locks.
    """

    def __init__(self, path: str | os.PathLike[str], timeout_secs: float):
        self.path, self._timeout_secs = os.path.abspath(path), timeout_secs

    def start(self, name: str, params: Mapping[str, Any], nodes: Sequence[str], now_secs: float) -> int:
        """Adds a run, or goes on with the one of that name that had one of these nodes; returns its id."""
        with self._transaction() as connection:
            nodes_now, had, run_id = set(nodes), set(nodes), None
            for known_id, names in connection.execute("SELECT id, had FROM runs WHERE name = ? ORDER BY id", (name,)):
                known = set(json.loads(names))
                if known & nodes_now or not known or not nodes_now:
                    run_id, had = known_id, known | nodes_now  # of several, which have become one, the last
            row = {"name": name, **params, "nodes": json.dumps(list(nodes)), "seen_secs": now_secs}
            if run_id is None:
                row |= {"had": json.dumps(sorted(had)), "started_secs": now_secs}
                values = ", ".join(f":{column}" for column in row)
                run_id = connection.execute(f"INSERT INTO runs({', '.join(row)}) VALUES ({values})", row).lastrowid
            else:
                row |= {"had": json.dumps(sorted(had)), "id": run_id}
                changed = ", ".join(f"{column} = :{column}" for column in row if column != "id")
                connection.execute(f"UPDATE runs SET {changed} WHERE id = :id", row)
            assert run_id is not None, "an insert has an id"
            return run_id

    def add_epoch(self, run: int, epoch: int, outcome: str, reason: str | None, now_secs: float) -> None:
        """Adds what happened to an epoch."""
        with self._transaction() as connection:
            self._seen(connection, run, now_secs)
            connection.execute(
                "INSERT INTO epochs(run_id, epoch, outcome, reason, at_secs) VALUES (?, ?, ?, ?, ?)",
                (run, epoch, outcome, reason, now_secs),
            )

    def add_stats(
        self, run: int, epoch: int | None, action: str, stats: Sequence[tuple[str, str, float]], now_secs: float
    ) -> None:
        """Adds (name, node, seconds) of one action; without an epoch they belong to the last one written."""
        with self._transaction() as connection:
            self._seen(connection, run, now_secs)
            if epoch is None:
                ((epoch,),) = connection.execute(f"SELECT ({_LAST_WRITTEN}) FROM runs WHERE id = ?", (run,))
            connection.executemany(
                "INSERT INTO stats(run_id, epoch, action, name, node, secs, at_secs) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(run, epoch, action, name, node, secs, now_secs) for name, node, secs in stats],
            )

    def last_epoch(self, run: int) -> int | None:
        """The epoch that a run wrote last."""
        rows = self._rows(f"SELECT ({_LAST_WRITTEN}) FROM runs WHERE id = ?", run)
        return rows[0][0] if rows else None

    def runs(self) -> list[RunRow]:
        """All runs, in the order in which they were first started."""
        found = self._rows(
            "SELECT name, db_prefix, db_type, nodes, started_secs, seen_secs, "
            f"({_LAST_WRITTEN}), ({_END}) FROM runs ORDER BY id"
        )
        return [RunRow(n, p, t, tuple(json.loads(nodes)), *rest) for n, p, t, nodes, *rest in found]

    def epochs(self, run: str | None) -> list[RunEpochRow]:
        """What happened to epochs, in that order."""
        found = self._rows(
            "SELECT runs.name, epoch, outcome, reason, at_secs FROM epochs JOIN runs ON runs.id = run_id "
            "WHERE ?1 IS NULL OR runs.name = ?1 ORDER BY epochs.id",
            run,
        )
        return [RunEpochRow(*row) for row in found]

    def stats(self, run: str | None, epoch: int | None) -> list[RunStatRow]:
        """Times, in the order in which they were reported."""
        found = self._rows(
            "SELECT runs.name, epoch, action, stats.name, node, secs, at_secs FROM stats JOIN runs ON runs.id = run_id "
            "WHERE (?1 IS NULL OR runs.name = ?1) AND (?2 IS NULL OR epoch = ?2) ORDER BY stats.id",
            run,
            epoch,
        )
        return [RunStatRow(*row) for row in found]

    def slowest(self, run: str | None) -> tuple[str, float] | None:
        """The node whose times add up to most."""
        found = self._rows(
            "SELECT node, SUM(secs) FROM stats JOIN runs ON runs.id = run_id WHERE ?1 IS NULL OR runs.name = ?1 "
            "GROUP BY node ORDER BY 2 DESC, 1 LIMIT 1",
            run,
        )
        return found[0] if found else None

    def _seen(self, connection: sqlite3.Connection, run: int, now_secs: float) -> None:
        if not connection.execute("UPDATE runs SET seen_secs = ? WHERE id = ?", (now_secs, run)).rowcount:
            raise InvalidArgumentError(f"{self.path}: the run is not in it any more; call set_params first")

    def _rows(self, query: str, *values: Any) -> list[Any]:
        if not os.path.exists(self.path):
            raise InvalidArgumentError(f"{self.path}: there is no such file; expected what a run has written")
        with self._opened("rw") as connection:  # not "ro": that could not undo what a killed writer left half done
            connection.execute("BEGIN")
            return connection.execute(query, values).fetchall() if self._has_tables(connection) else []

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._opened("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")  # at once: two that read before they write would block each other
            if not self._has_tables(connection):
                for statement in _SCHEMA:
                    connection.execute(statement)
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _opened(self, mode: str) -> Generator[sqlite3.Connection]:
        """A connection; leaving it without COMMIT undoes all."""
        try:
            uri = f"{pathlib.Path(self.path).as_uri()}?mode={mode}"
            with closing(sqlite3.connect(uri, self._timeout_secs, isolation_level=None, uri=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _has_tables(self, connection: sqlite3.Connection) -> bool:
        """Whether it is ours; False if it is empty."""
        ((application,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        if application == APPLICATION_ID:
            if version > VERSION:
                problem = f"was written by a newer epochckpt (tables of version {version}; this one knows {VERSION})"
                raise FormatVersionError(self.path, f"{problem}; update epochckpt, or use another file")
            return True
        ((tables,),) = connection.execute("SELECT COUNT(*) FROM sqlite_master")
        if application or version or tables:
            raise FormatError(self.path, "is a database of another program; nothing was changed; use another file")
        return False

    def _explained(self, error: sqlite3.Error) -> EpochCheckpointError | OSError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of the bits says more than is needed here
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return CoordinationTimeoutError(
                f"{self.path}: another process has kept it locked for more than {self._timeout_secs:g} s; "
                "nothing was written"
            )
        if code == sqlite3.SQLITE_NOTADB:
            return FormatError(self.path, "is not an SQLite database; nothing was changed; use another file")
        if code == sqlite3.SQLITE_CORRUPT:
            return DamagedError(self.path, f"is damaged ({error}); move it away, a new one is then begun")
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return AccessError(
                f"{self.path}: {error}; expected a file, or none yet, that may be written, in a folder that exists "
                "and may be written"
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return OSError(errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO, str(error), self.path)
        return FormatError(self.path, f"cannot be used: {error}")
