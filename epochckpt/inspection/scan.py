"""A directory of checkpoints as rows: its epochs, the attempts at saving one, and what else lies there. Only reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from absl import logging

from epochckpt import _metrics, _text, errors
from epochckpt._lazy import ocp
from epochckpt.directory import Commits, attached_metrics, commits_of
from epochckpt.directory.conditional_put import PutCommits
from epochckpt.directory.head_record import Head, HeadEpoch
from epochckpt.format import EpochRecord, parsing, paths
from epochckpt.inspection import leftovers, objects, suggest, tiers, whole_run
from epochckpt.inspection.rows import (
    COMMITTED,
    DAMAGED,
    ELSEWHERE,
    FOREIGN,
    NEWER,
    EpochRow,
    LeftoverRow,
    NodeRow,
    Overview,
    facts_of,
)
from epochckpt.jobs.notes import NOTES
from epochckpt.orbax import StepNames, step_names, steps
from epochckpt.storage import Store, open_file, open_store

if TYPE_CHECKING:
    from epochckpt.directory.metrics_log import Line

CHECKED_FILES = 2000
"""About how many files a look checks; the newest epochs come first."""

CHECKED_REQUESTS = 10
"""About how many requests a look at an object store takes to check files: two for an epoch of some hundred nodes."""

_TRIES = 5  # looks at the files of an epoch that is replaced during each look
_CAFFE2_NOTES, _CAFFE2_BLOBS = "notes", "blobs"  # keys that the managers of `ec.caffe2` use


# -- opening -----------------------------------------------------------------------------------------------------------


class _OneName(StepNames):
    """The folder of one epoch, whatever it is called."""

    def __init__(self, only: str, epoch: int):
        self.only, self._epoch = only, epoch

    @property
    def several(self) -> bool:
        return False

    def build(self, epoch: int) -> str:
        return self.only if epoch == self._epoch else f"{self.only}.{epoch}"

    def parse(self, name: str) -> int | None:
        return self._epoch if name == self.only else None

    def learn(self, names: Iterable[str]) -> None:
        del names


def open_commits(
    directory: str | os.PathLike[str], options: ocp.CheckpointManagerOptions | None = None, *, single: bool = False
) -> Commits:
    """The epochs of a directory, for reading. With `single` the directory may be the folder of one epoch itself."""
    store = open_store(directory)
    commits = commits_of(store, StepNames.of(options))
    with access(store):
        if store.renames:
            with contextlib.suppress(FileNotFoundError):  # `isdir` says no where this user may not look
                os.lstat(store.root)
            if not os.path.isdir(store.root):
                raise errors.NotACheckpointDirectoryError(f"{store.root} {suggest.no_folder(store.root)}")
        if in_bucket(commits) and commits.head.read() is not None:
            return commits
        found = {entry.name: entry.is_folder for entry in store.list("")}
        if single and step_names.is_single(set(found)) and not step_names.is_item(store, set(found)):
            # The epoch that lies in the folder, seen from the directory above it.
            above, name = open_file(os.path.realpath(store.root) if store.renames else store.address)
            return commits_of(above, _OneName(name, step_names.number_of(store)))
        if in_bucket(commits):
            commits.scan()  # raises where there are epochs without a head
        if not any(_is_sign(commits, name, is_folder) for name, is_folder in reversed(found.items())):
            raise errors.NotACheckpointDirectoryError(f"{store.root} {suggest.folder(store, found)}")
    return commits


def in_bucket(commits: Commits) -> TypeGuard[PutCommits]:
    """Whether a head says which epochs there are."""
    return isinstance(commits, PutCommits) and not commits.names.only


@contextlib.contextmanager
def access(store: Store) -> Generator[None]:
    """Turns a PermissionError into an AccessError that names the directory and the user."""
    try:
        yield
    except PermissionError as error:
        if isinstance(error, errors.EpochCheckpointError):
            raise
        raise errors.AccessError(f"{store.root}: {error}; this user (uid {os.getuid()}) needs read access") from error


def place(commits: Commits) -> str:
    """Where the epochs lie, for people: the directory, or the folder of the one epoch."""
    only = commits.names.only
    return paths.join(commits.store.root.rstrip("/"), only) if only else commits.store.root


def _is_sign(commits: Commits, name: str, is_folder: bool) -> bool:
    """Whether an entry shows that the directory is one of checkpoints."""
    if not is_folder:
        return name == paths.ROLLBACK_RECORD
    epoch = commits.names.parse(name)
    return leftovers.is_sign(commits, name) if epoch is None else isinstance(read(commits, name, epoch), EpochRow)


def folders_of(commits: Commits, entries: Mapping[str, bool], hidden: Collection[int]) -> dict[int, str]:
    """The folder of each epoch that is not hidden, going by the names in a POSIX directory."""
    found: dict[int, str] = {}
    commits.names.learn(entries)
    for name, is_folder in entries.items():
        epoch = commits.names.parse(name) if is_folder else None
        if epoch is not None and epoch not in hidden and (epoch not in found or name == commits.names.build(epoch)):
            found[epoch] = name
    return found


# -- one epoch ---------------------------------------------------------------------------------------------------------


def read(commits: Commits, folder: str, epoch: int, *, sure: bool = False) -> EpochRow | LeftoverRow | None:
    """What a folder named like an epoch holds: an epoch, or a leftover; None if the folder is gone.

    An epoch whose record cannot be used is damaged. With `sure`, an error of storage is raised instead of shown as
    damage. The row of a step of stock Orbax has no size, see `with_size`.
    """
    try:
        if in_bucket(commits):
            return _of_any(commits.read_seen(epoch), folder)
        record = commits.read_in(folder, epoch)
        if record is not None:
            return _of_record(record, folder)
        if not commits.store.exists(folder):
            return None
        return _of_orbax(commits, folder, epoch) or _of_nodes(commits, folder, epoch) or _of_none(commits, folder)
    except (errors.EpochCheckpointError, OSError) as error:
        if _says_nothing(commits, error) or (sure and isinstance(error, errors.StorageError)):
            raise
        with contextlib.suppress(OSError):
            if isinstance(error, errors.EpochNotFoundError) or not commits.store.exists(folder):
                return None
        return EpochRow(epoch, _state(error), detail=errors.say(error), folder=folder)


def _state(error: Exception) -> str:
    """The state of an epoch whose record or files cannot be used."""
    return NEWER if isinstance(error, errors.FormatVersionError) else DAMAGED


def unit_of(commits: Commits) -> str:
    """What the job counts that saved the newest three epochs: `epoch` or `step`; `epoch` if they do not tell."""
    with contextlib.suppress(errors.EpochCheckpointError, OSError):  # whoever reads on is told
        epochs = commits.entries() if in_bucket(commits) else commits.list_epochs()
        newest = sorted(epochs)[:-4:-1]  # several: one may be damaged, or no runner's
        rows = (read(commits, commits.folder(epoch), epoch) for epoch in newest)
        return next((row.unit for row in rows if isinstance(row, EpochRow) and row.notes), "epoch")
    return "epoch"


def _says_nothing(commits: Commits, error: Exception) -> bool:
    """Whether an error of an object store is about the store, and not about what lies there."""
    return not commits.store.renames and isinstance(error, errors.StorageError | errors.AccessError)


def brief(commits: PutCommits, epoch: int, entry: HeadEpoch) -> EpochRow:
    """The row of an epoch in an object store, as the head tells it; `read` and `checked` have the rest."""
    metrics = entry.metrics if isinstance(entry.metrics, Mapping) else {"metrics": entry.metrics}
    row = EpochRow(
        epoch,
        COMMITTED,
        folder=commits.folder(epoch),
        attempt=entry.attempt,
        nodes=tuple(NodeRow(name, None, secs) for name, secs in entry.node_secs.items()),
        nbytes=entry.nbytes,
        started_ns=entry.started_ns,
        committed_ns=entry.committed_ns,
        blocked_secs=entry.blocked_secs,
        metrics={} if entry.metrics is None else metrics,
        custom_metadata=None,
        notes=None,
        writer="orbax" if paths.attempt_in(entry.attempt) is None else "epochckpt",
    )
    return _with_sources(row, entry.attached)


def find(commits: Commits, epoch: int) -> EpochRow | None:
    """The row of an epoch, as its record and attached metrics say; None if there is none of this number."""
    if in_bucket(commits):
        commits.head.read()  # as it is now
        if epoch not in commits.entries():
            return None
    row = None if epoch in commits.hidden() else read(commits, commits.folder(epoch), epoch)
    if not isinstance(row, EpochRow):
        return None
    try:
        row = _with_attached(commits, row)
    except errors.StorageError as error:
        logging.warning("attached metrics are left out: %s", error)
    return with_size(commits, row)


def with_size(commits: Commits, row: EpochRow) -> EpochRow:
    """The row with the bytes of a step of stock Orbax, whose files must be looked at for that."""
    if row.writer != "orbax" or row.nbytes:
        return row
    with contextlib.suppress(OSError):
        return dataclasses.replace(row, nbytes=steps.nbytes(commits.store, row.folder))
    return row


def _with_attached(commits: Commits, row: EpochRow) -> EpochRow:
    """The row with the metrics that were attached later."""
    if row.state != COMMITTED or not row.attempt:
        return row
    return _with_sources(row, attached_metrics.of_attempt(commits, row.folder, row.epoch, row.attempt))


def _with_sources(row: EpochRow, sources: Mapping[str, Mapping[str, Any]]) -> EpochRow:
    if not sources:
        return row
    metrics = attached_metrics.merge(row.metrics, sources)
    by = {name: source for source in sorted(sources, reverse=True) for name in sources[source]}
    return dataclasses.replace(row, metrics=metrics, sources={n: s for n, s in by.items() if n not in row.metrics})


def _of_record(record: EpochRecord, folder: str) -> EpochRow:
    """The row of an epoch with a usable record."""
    metrics = record.metrics
    notes = record.custom_metadata.get(NOTES)
    custom = dict(record.custom_metadata)
    if isinstance(notes, Mapping):
        del custom[NOTES]
    return EpochRow(
        record.epoch,
        COMMITTED,
        folder=folder,
        nodes=tuple(_nodes(record)),
        metrics=metrics if isinstance(metrics, Mapping) else {} if metrics is None else {"metrics": metrics},
        custom_metadata=custom,
        notes=notes if isinstance(notes, Mapping) else {},
        unit="step" if isinstance(notes, Mapping) and notes.get("unit") == "step" else "epoch",
        **facts_of(record),
    )


def _of_orbax(commits: Commits, folder: str, epoch: int) -> EpochRow | None:
    """The row of a step of stock Orbax; None if the folder is none."""
    store = commits.store
    if not steps.is_step(store, folder, lambda name: commits.names.parse(name) is not None):
        return None
    return _of_any(steps.read(store, folder, epoch), folder)


def _of_any(record: EpochRecord, folder: str) -> EpochRow:
    """The row of an epoch of ours, or of a step of stock Orbax."""
    row = _of_record(record, folder)
    if not isinstance(record, steps.OrbaxRecord):
        return row
    problems = "; ".join(f"{path} {problem}" for path, problem in record.problems.items())
    return dataclasses.replace(row, writer="orbax", detail=problems)


def _nodes(
    record: EpochRecord | str,
    folder: str = "",
    commits: Commits | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Iterator[NodeRow]:
    """The nodes of an epoch; with `commits`, their files in its folder are looked at. A str says what is wrong.

    `sizes` has the bytes of all files in the folder, where one request tells them. On a disk of one host, nodes that
    have no folder there are elsewhere.
    """
    if isinstance(record, str):
        yield NodeRow(paths.shown_name(folder.rpartition("/")[2]), 0, None, DAMAGED, record)
        return
    here: set[str] | None = None
    if commits is not None and not record.per_node and tiers.host_of(commits) is not None:
        here = {entry.name for entry in commits.store.list(folder)}
    for number, node in enumerate(record.nodes):
        state, detail = COMMITTED, ""
        try:
            if here is not None and node.folder not in here:
                state = ELSEWHERE
            elif commits is not None:
                commits.check_node(folder, record, number, sizes)
                if here is not None:
                    _check_also(commits, folder, record, number)
        except (errors.EpochCheckpointError, OSError) as error:
            state, detail = DAMAGED, errors.say(error)
        yield NodeRow(node.name, node.nbytes, node.secs, state, detail)


def _check_also(commits: Commits, folder: str, record: EpochRecord, number: int) -> None:
    """Raises DamagedError for the first missing or short file of what a node wrote of cells that others own."""
    path = paths.join(folder, record.path(number))
    node = parsing.read_record(commits.store, path, parsing.parse_node)
    if node is not None and node.also:
        entry = dataclasses.replace(record.nodes[number], files=node.also)
        commits.check_node(folder, dataclasses.replace(record, nodes=(entry,)), 0)


def _of_nodes(commits: Commits, folder: str, epoch: int) -> EpochRow | None:
    """The row of an epoch that each node saved by itself; None if there is no such."""
    found = commits.read_per_node(folder, epoch)
    rows = [_of_record(record, folder) for record in found.values() if not isinstance(record, str)]
    if not rows:
        return None
    custom = dict(rows[0].custom_metadata or {})
    notes = next((n for r in rows if isinstance(n := (r.custom_metadata or {}).get(_CAFFE2_NOTES), Mapping)), {})
    custom.pop(_CAFFE2_NOTES, None)
    blobs = custom.get(_CAFFE2_BLOBS)
    if isinstance(blobs, Mapping) and all(item == blob for item, blob in blobs.items()):
        del custom[_CAFFE2_BLOBS]  # it says nothing: every item has the name of its blob
    row = EpochRow(
        epoch,
        COMMITTED,
        folder=folder,
        attempt=rows[0].attempt if len(rows) == 1 else "",
        nbytes=sum(r.nbytes for r in rows),
        started_ns=min(r.started_ns or 0 for r in rows),
        committed_ns=max(r.committed_ns or 0 for r in rows),
        custom_metadata=custom,
        notes=notes,
    )
    return _with_nodes(row, [node for name, record in found.items() for node in _nodes(record, name)])


def _of_none(commits: Commits, folder: str) -> EpochRow | LeftoverRow | None:
    """What else a folder with an epoch's name may be: an epoch that lost its record, or somebody else's folder."""
    if commits.lost_records(folder):
        detail = f"its commit record, {paths.EPOCH_RECORD}, is missing: nothing of it can be verified, it is not read"
        size = leftovers.extent(commits.store, folder) or leftovers.DiskUsage()
        return EpochRow(commits.names.parse(folder) or 0, DAMAGED, detail=detail, folder=folder, nbytes=size.nbytes)
    detail = "named like an epoch, and none: neither ours nor stock Orbax's on a file system"
    return leftovers.row_of(commits.store, folder, FOREIGN, time.time_ns(), (), detail)


# -- the files of one epoch --------------------------------------------------------------------------------------------


def checked(commits: Commits, row: EpochRow) -> EpochRow:
    """The row of an epoch after a look at its files: are they there, with the sizes recorded?

    An epoch that is replaced meanwhile is looked at again; one that is deleted keeps the row that it had.
    """
    for _ in range(_TRIES):
        if in_bucket(commits):
            found = _checked_objects(commits, row)
            if found.state == COMMITTED:
                return found
            commits.head.read()
            attempt = commits.seen_attempt(row.epoch)
            if attempt in (None, found.attempt):
                return row if attempt is None else found
            continue
        if row.state == DAMAGED and not row.nodes:
            return row
        found = _checked(commits, row)
        fresh = row if found.state == COMMITTED else read(commits, row.folder, row.epoch)
        if not isinstance(fresh, EpochRow):
            return row
        if all(getattr(fresh, name) == getattr(row, name) for name in ("state", "attempt", "committed_ns", "nodes")):
            return found
        row = fresh
    return row


def _checked_objects(commits: PutCommits, row: EpochRow) -> EpochRow:
    """The row in full after a look at the objects: one request for the record and one for their sizes."""
    try:
        record = commits.read_seen(row.epoch)
        fresh = _with_attached(commits, _of_any(record, row.folder))
        if isinstance(record, steps.OrbaxRecord):
            steps.check(commits.store, row.folder, record)
            return dataclasses.replace(fresh, checked=True)
        nodes = list(_nodes(record, row.folder, commits, objects.sizes(commits, row.folder)))
        return dataclasses.replace(_with_nodes(fresh, nodes), checked=True)
    except (errors.EpochCheckpointError, OSError) as error:
        if _says_nothing(commits, error):
            raise
        fields = {"state": _state(error), "detail": errors.say(error), "checked": True}
        return dataclasses.replace(row, attempt=commits.seen_attempt(row.epoch) or row.attempt, **fields)


def _checked(commits: Commits, row: EpochRow) -> EpochRow:
    try:
        if row.writer == "orbax":
            steps.check(commits.store, row.folder, steps.read(commits.store, row.folder, row.epoch))
            return dataclasses.replace(row, checked=True)
        record = commits.read_in(row.folder, row.epoch)
        found = commits.read_per_node(row.folder, row.epoch) if record is None else {"": record}
        sizes = objects.sizes(commits, row.folder) if isinstance(commits, PutCommits) else None
        each = (_nodes(one, paths.join(row.folder, name), commits, sizes) for name, one in found.items())
        nodes = list(itertools.chain.from_iterable(each))
        return dataclasses.replace(_with_nodes(row, nodes or row.nodes), checked=True)
    except (errors.EpochCheckpointError, OSError) as error:
        if _says_nothing(commits, error):
            raise
        return dataclasses.replace(row, state=_state(error), detail=errors.say(error), checked=True)


def _with_nodes(row: EpochRow, nodes: Sequence[NodeRow]) -> EpochRow:
    """The row with its nodes; damaged if one of them is."""
    row = dataclasses.replace(row, nodes=tuple(nodes))
    bad = [node for node in nodes if node.state == DAMAGED]
    if nodes and all(node.state == ELSEWHERE for node in nodes):
        return dataclasses.replace(row, state=DAMAGED, detail="this host has no node's files of it")
    if not bad:
        return row
    more = f" (and {len(bad) - 1} more nodes are damaged)" if len(bad) > 1 else ""
    return dataclasses.replace(row, state=DAMAGED, detail=f"{bad[0].detail}{more}")


# -- all epochs --------------------------------------------------------------------------------------------------------


def look(
    directory: str | os.PathLike[str],
    *,
    metric: str | None = None,
    mode: str = "max",
    limit: int | None = 100,
    options: ocp.CheckpointManagerOptions | None = None,
    check: bool = True,
    known: Commits | None = None,
    mirror: str | None = None,
) -> Overview:
    """Looks at a directory, which jobs may be writing to; for the arguments see `inspect` and `Inspection.overview`.

    The newest epochs up to the limit become rows. The best epoch and attempts always do, and so does the latest that
    can be read, unless the limit is 0. `check` looks at about `CHECKED_FILES` files: are they there, with the sizes
    that were recorded? In an object store it looks at about `CHECKED_REQUESTS / 2` epochs, and the rows of the others
    are those of the head: no request is made for them. `known`: the directory as it was opened before. `mirror`: its
    mirror, which is looked at, too.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise errors.InvalidArgumentError(f"limit is a number of epochs, or None for all; got {limit!r}")
    commits = known or open_commits(directory, options, single=True)
    with access(commits.store):
        found = _Scan(commits, metric, mode).overview(limit, check, options.todelete_subdir if options else None)
        return found if commits.names.only else tiers.with_tiers(commits, found, limit, _row_of, mirror)


def _row_of(commits: Commits, epoch: int) -> EpochRow | LeftoverRow | None:
    """The row of an epoch in a mirror."""
    if in_bucket(commits):
        return brief(commits, epoch, commits.entries()[epoch])
    return read(commits, commits.folder(epoch), epoch)


class _Scan:
    """One look at a directory."""

    def __init__(self, commits: Commits, metric: str | None, mode: str):
        self._commits, self._metric, self._mode = commits, metric, mode
        self._problems: dict[str, str] = {}
        self._rows: dict[int, EpochRow] = {}

    def overview(self, limit: int | None, check: bool, todelete_subdir: str | None) -> Overview:
        commits, only = self._commits, self._commits.names.only
        if in_bucket(commits):
            found = self._read_head(commits, limit, todelete_subdir)
        else:
            # Attempts first: one that is committed meanwhile is then seen in its new place.
            found = leftovers.Leftovers() if only else leftovers.find(commits, time.time_ns(), todelete_subdir)
            found.others.extend(self._read_all(self._folders()))

        # Which rows are shown: the newest, and those that are marked. A check may find that a marked epoch is damaged;
        # then another one is.
        newest = sorted(self._rows, reverse=True)
        if self._metric is not None:
            self._update(self._attach, self._rows)
        shown, more = set[int](), set(newest if limit is None else newest[:limit])
        while True:
            if self._metric is None:
                self._update(self._attach, more)
            if check:
                self._update(functools.partial(checked, commits), more if shown else self._first(more))
            shown |= more
            latest = max((epoch for epoch, row in self._rows.items() if row.state in (COMMITTED, NEWER)), default=None)
            best = self._best()
            more = {epoch for epoch in (best, latest if limit != 0 else None) if epoch is not None} - shown
            if not more:
                break
        sized = {epoch: with_size(commits, self._rows[epoch]) for epoch in shown}
        rows = [dataclasses.replace(row, latest=e == latest, best=e == best) for e, row in sized.items()]

        committed = {row.attempt for row in rows}
        epochs = [*rows, *(row for row in found.attempts if row.attempt not in committed)]
        epochs.sort(key=lambda row: (row.epoch, row.state not in (COMMITTED, DAMAGED), row.attempt))
        hidden = [row for epoch, row in self._rows.items() if epoch not in shown]
        seen = Overview(
            directory=place(commits),
            epochs=tuple(epochs),
            hidden=len(hidden),
            hidden_nbytes=sum(row.nbytes for row in hidden),
            leftovers=tuple(sorted(found.others, key=lambda row: row.path)),
            metric=self._metric or "",
            mode=self._mode,
            unit=next((row.unit for row in reversed(epochs) if row.notes), "epoch"),
        )
        seen = whole_run.completed(seen, self._rows.values(), self._deleted())
        return dataclasses.replace(seen, problems={**found.problems, **self._problems, **self._no_metric()})

    def _deleted(self) -> Mapping[int, Line]:
        try:
            return self._commits.deleted()
        except (errors.EpochCheckpointError, OSError) as error:
            self._problems[paths.METRICS_LOG] = errors.say(error)
            return {}

    def _read_head(self, commits: PutCommits, limit: int | None, todelete_subdir: str | None) -> leftovers.Leftovers:
        """Makes the rows of an object store; returns what lies beside the epochs."""
        entries = commits.entries()
        found = objects.beside(commits, commits.head.seen() or Head(), time.time_ns(), todelete_subdir)
        self._rows = {epoch: brief(commits, epoch, entry) for epoch, entry in entries.items()}
        # Metrics that are too large for the head are in the record: they are read for what is shown, and to compare.
        listed = entries if limit is None or self._metric is not None else sorted(entries)[-limit or len(entries) :]
        self._read_all({epoch: commits.folder(epoch) for epoch in listed if entries[epoch].large})
        return found

    def _read_all(self, folders: Mapping[int, str]) -> list[LeftoverRow]:
        """Reads the records of epochs into rows; returns what is none."""
        found = dict[int, EpochRow | LeftoverRow | None]()
        self._commits.store.each(lambda e: found.__setitem__(e, read(self._commits, folders[e], e)), list(folders))
        self._rows |= {epoch: row for epoch, row in found.items() if isinstance(row, EpochRow)}
        return [row for row in found.values() if isinstance(row, LeftoverRow)]

    def _first(self, epochs: Collection[int]) -> list[int]:
        """The newest of some epochs, at least one, that together cost as much as a look may."""
        bucket, cost, chosen = in_bucket(self._commits), 0, list[int]()
        entries = self._commits.entries() if in_bucket(self._commits) else {}
        for epoch in sorted(epochs, reverse=True):
            row = self._rows[epoch]
            if bucket:
                cost += 2 + 2 * (entries[epoch].nodes if epoch in entries else 0) // 1000
            else:
                cost += max(2 * len(row.nodes), 10 if row.writer == "orbax" else 1)
            if cost > (CHECKED_REQUESTS if bucket else CHECKED_FILES) and chosen:
                break
            chosen.append(epoch)
        return chosen

    def _folders(self) -> dict[int, str]:
        entries = {entry.name: entry.is_folder for entry in self._commits.store.list("")}
        hidden: frozenset[int] = frozenset()
        if paths.ROLLBACK_RECORD in entries:
            try:
                hidden = self._commits.hidden()
                numbers = ", ".join(map(str, sorted(hidden)))
                problem = f"a rollback is setting aside {numbers}; the next open finishes it" if hidden else ""
            except (errors.EpochCheckpointError, ValueError, OSError) as error:
                problem = f"{error}; no manager can open the directory as long as it is there"
            if problem:
                self._problems[paths.ROLLBACK_RECORD] = problem
        found = folders_of(self._commits, entries, hidden)
        if not found and not hidden:
            hint = step_names.named_otherwise(self._commits.store, list(entries.items()))
            self._problems |= {"": hint} if hint else {}
        return found

    def _update(self, change: Callable[[EpochRow], EpochRow], epochs: Collection[int]) -> None:
        self._commits.store.each(lambda e: self._rows.__setitem__(e, change(self._rows[e])), list(epochs))

    def _attach(self, row: EpochRow) -> EpochRow:
        try:
            return _with_attached(self._commits, row)
        except OSError as error:
            self._problems[row.folder] = str(error)
            return row

    def _best(self) -> int | None:
        """The best epoch, the later of equals."""
        if self._metric is None:
            return None
        return whole_run.best(self._rows.values(), self._metric, self._mode)

    def _no_metric(self) -> dict[str, str]:
        """Why no epoch is best."""
        rows = self._rows.values()
        if self._metric is None or any(_metrics.number(row.metrics, self._metric) is not None for row in rows):
            return {}
        known = sorted({name for row in rows for name in _metrics.flat(row.metrics)})
        if not known:
            return {"": f"no epoch has metrics, so none is best by {self._metric!r}"}
        return {"": f"no epoch has the metric {self._metric!r}; {_text.near(self._metric, known)}"}
