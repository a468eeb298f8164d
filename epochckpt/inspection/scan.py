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
from epochckpt.directory import EpochDirectory, attached_metrics, directory_of
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head
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
        self.only = only
        self._epoch = epoch

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
) -> EpochDirectory:
    """The epochs of a directory, for reading. With `single` the directory may be the folder of one epoch itself."""
    store = open_store(directory)
    epoch_directory = directory_of(store, StepNames.of(options))
    with access(store):
        if store.atomic_folder_rename:
            with contextlib.suppress(FileNotFoundError):  # `isdir` says no where this user may not look
                os.lstat(store.root)
            if not os.path.isdir(store.root):
                raise errors.NotACheckpointDirectoryError(f"{store.root} {suggest.no_folder(store.root)}")
        if in_bucket(epoch_directory) and epoch_directory.head.read() is not None:
            return epoch_directory
        found = {entry.name: entry.is_folder for entry in store.list("")}
        if single and step_names.is_single(set(found)) and not step_names.is_item(store, set(found)):
            # The epoch that lies in the folder, seen from the directory above it.
            above, name = open_file(os.path.realpath(store.root) if store.atomic_folder_rename else store.address)
            return directory_of(above, _OneName(name, step_names.number_of(store)))
        if in_bucket(epoch_directory):
            epoch_directory.scan()  # raises where there are epochs without a head
        if not any(_is_sign(epoch_directory, name, is_folder) for name, is_folder in reversed(found.items())):
            raise errors.NotACheckpointDirectoryError(f"{store.root} {suggest.folder(store, found)}")
    return epoch_directory


def in_bucket(epoch_directory: EpochDirectory) -> TypeGuard[BucketDirectory]:
    """Whether a head says which epochs there are."""
    return isinstance(epoch_directory, BucketDirectory) and not epoch_directory.names.only


@contextlib.contextmanager
def access(store: Store) -> Generator[None]:
    """Turns a PermissionError into an AccessError that names the directory and the user."""
    try:
        yield
    except PermissionError as error:
        if isinstance(error, errors.EpochCheckpointError):
            raise
        raise errors.AccessError(f"{store.root}: {error}; this user (uid {os.getuid()}) needs read access") from error


def place(epoch_directory: EpochDirectory) -> str:
    """Where the epochs lie, for people: the directory, or the folder of the one epoch."""
    only = epoch_directory.names.only
    return paths.join(epoch_directory.store.root.rstrip("/"), only) if only else epoch_directory.store.root


def _is_sign(epoch_directory: EpochDirectory, name: str, is_folder: bool) -> bool:
    """Whether an entry shows that the directory is one of checkpoints."""
    if not is_folder:
        return name == paths.ROLLBACK_RECORD
    epoch = epoch_directory.names.parse(name)
    return (
        leftovers.is_sign(epoch_directory, name)
        if epoch is None
        else isinstance(read(epoch_directory, name, epoch), EpochRow)
    )


def folders_of(epoch_directory: EpochDirectory, entries: Mapping[str, bool], hidden: Collection[int]) -> dict[int, str]:
    """The folder of each epoch that is not hidden, going by the names in a POSIX directory."""
    found: dict[int, str] = {}
    epoch_directory.names.learn(entries)
    for name, is_folder in entries.items():
        epoch = epoch_directory.names.parse(name) if is_folder else None
        if (
            epoch is not None
            and epoch not in hidden
            and (epoch not in found or name == epoch_directory.names.build(epoch))
        ):
            found[epoch] = name
    return found


# -- one epoch ---------------------------------------------------------------------------------------------------------


def read(
    epoch_directory: EpochDirectory, folder: str, epoch: int, *, sure: bool = False
) -> EpochRow | LeftoverRow | None:
    """What a folder named like an epoch holds: an epoch, or a leftover; None if the folder is gone.

    An epoch whose record cannot be used is damaged. With `sure`, an error of storage is raised instead of shown as
    damage. The row of a step of stock Orbax has no size, see `with_size`.
    """
    try:
        if in_bucket(epoch_directory):
            return _of_any(epoch_directory.read_seen(epoch), folder)
        record = epoch_directory.read_in(folder, epoch)
        if record is not None:
            return _of_record(record, folder)
        if not epoch_directory.store.exists(folder):
            return None
        return (
            _of_orbax(epoch_directory, folder, epoch)
            or _of_nodes(epoch_directory, folder, epoch)
            or _of_none(epoch_directory, folder)
        )
    except (errors.EpochCheckpointError, OSError) as error:
        if _says_nothing(epoch_directory, error) or (sure and isinstance(error, errors.StorageError)):
            raise
        with contextlib.suppress(OSError):
            if isinstance(error, errors.EpochNotFoundError) or not epoch_directory.store.exists(folder):
                return None
        return EpochRow(epoch, _state(error), detail=errors.say(error), folder=folder)


def _state(error: Exception) -> str:
    """The state of an epoch whose record or files cannot be used."""
    return NEWER if isinstance(error, errors.FormatVersionError) else DAMAGED


def unit_of(epoch_directory: EpochDirectory) -> str:
    """What the job counts that saved the newest three epochs: `epoch` or `step`; `epoch` if they do not tell."""
    with contextlib.suppress(errors.EpochCheckpointError, OSError):  # whoever reads on is told
        epochs = epoch_directory.entries() if in_bucket(epoch_directory) else epoch_directory.list_epochs()
        newest = sorted(epochs)[:-4:-1]  # several: one may be damaged, or no runner's
        rows = (read(epoch_directory, epoch_directory.folder(epoch), epoch) for epoch in newest)
        return next((row.unit for row in rows if isinstance(row, EpochRow) and row.notes), "epoch")
    return "epoch"


def _says_nothing(epoch_directory: EpochDirectory, error: Exception) -> bool:
    """Whether an error of an object store is about the store, and not about what lies there."""
    is_bucket = not epoch_directory.store.atomic_folder_rename
    return is_bucket and isinstance(error, errors.StorageError | errors.AccessError)


def brief(epoch_directory: BucketDirectory, epoch: int, entry: EpochSummary) -> EpochRow:
    """The row of an epoch in an object store, as the head tells it; `read` and `checked` have the rest."""
    metrics = entry.metrics if isinstance(entry.metrics, Mapping) else {"metrics": entry.metrics}
    row = EpochRow(
        epoch,
        COMMITTED,
        folder=epoch_directory.folder(epoch),
        save_id=entry.save_id,
        nodes=tuple(NodeRow(name, None, secs) for name, secs in entry.node_secs.items()),
        nbytes=entry.nbytes,
        started_ns=entry.started_ns,
        committed_ns=entry.committed_ns,
        blocked_secs=entry.blocked_secs,
        metrics={} if entry.metrics is None else metrics,
        custom_metadata=None,
        notes=None,
        writer="orbax" if paths.save_id_in(entry.save_id) is None else "epochckpt",
    )
    return _with_sources(row, entry.attached)


def find(epoch_directory: EpochDirectory, epoch: int) -> EpochRow | None:
    """The row of an epoch, from its record and the attached metrics; None if the epoch does not exist."""
    if in_bucket(epoch_directory):
        epoch_directory.head.read()  # as it is now
        if epoch not in epoch_directory.entries():
            return None
    row = None if epoch in epoch_directory.hidden() else read(epoch_directory, epoch_directory.folder(epoch), epoch)
    if not isinstance(row, EpochRow):
        return None
    try:
        row = _with_attached(epoch_directory, row)
    except errors.StorageError as error:
        logging.warning("attached metrics are left out: %s", error)
    return with_size(epoch_directory, row)


def with_size(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row with the bytes of a step of stock Orbax, whose files must be looked at for that."""
    if row.writer != "orbax" or row.nbytes:
        return row
    with contextlib.suppress(OSError):
        return dataclasses.replace(row, nbytes=steps.nbytes(epoch_directory.store, row.folder))
    return row


def _with_attached(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row with the metrics that were attached later."""
    if row.state != COMMITTED or not row.save_id:
        return row
    return _with_sources(row, attached_metrics.of_save(epoch_directory, row.folder, row.epoch, row.save_id))


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


def _of_orbax(epoch_directory: EpochDirectory, folder: str, epoch: int) -> EpochRow | None:
    """The row of a step of stock Orbax; None if the folder is no step."""
    store = epoch_directory.store
    if not steps.is_step(store, folder, lambda name: epoch_directory.names.parse(name) is not None):
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
    epoch_directory: EpochDirectory | None = None,
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
    if epoch_directory is not None and not record.per_node and tiers.host_of(epoch_directory) is not None:
        here = {entry.name for entry in epoch_directory.store.list(folder)}
    for number, node in enumerate(record.nodes):
        state = COMMITTED
        detail = ""
        try:
            if here is not None and node.folder not in here:
                state = ELSEWHERE
            elif epoch_directory is not None:
                epoch_directory.check_node(folder, record, number, sizes)
                if here is not None:
                    _check_replicas(epoch_directory, folder, record, number)
        except (errors.EpochCheckpointError, OSError) as error:
            state = DAMAGED
            detail = errors.say(error)
        yield NodeRow(node.name, node.nbytes, node.secs, state, detail)


def _check_replicas(epoch_directory: EpochDirectory, folder: str, record: EpochRecord, number: int) -> None:
    """Raises DamagedError for the first missing or short file of what a node wrote of cells that others own."""
    path = paths.join(folder, record.path(number))
    node = parsing.read_record(epoch_directory.store, path, parsing.parse_node)
    if node is not None and node.replicas:
        entry = dataclasses.replace(record.nodes[number], files=node.replicas)
        epoch_directory.check_node(folder, dataclasses.replace(record, nodes=(entry,)), 0)


def _of_nodes(epoch_directory: EpochDirectory, folder: str, epoch: int) -> EpochRow | None:
    """The row of an epoch that each node saved by itself; None if there is no such."""
    found = epoch_directory.read_per_node(folder, epoch)
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
        save_id=rows[0].save_id if len(rows) == 1 else "",
        nbytes=sum(r.nbytes for r in rows),
        started_ns=min(r.started_ns or 0 for r in rows),
        committed_ns=max(r.committed_ns or 0 for r in rows),
        custom_metadata=custom,
        notes=notes,
    )
    return _with_nodes(row, [node for name, record in found.items() for node in _nodes(record, name)])


def _of_none(epoch_directory: EpochDirectory, folder: str) -> EpochRow | LeftoverRow | None:
    """What else a folder with an epoch's name may be: an epoch that lost its record, or somebody else's folder."""
    if epoch_directory.lost_records(folder):
        detail = f"its commit record, {paths.EPOCH_RECORD}, is missing: nothing of it can be verified, it is not read"
        size = leftovers.extent(epoch_directory.store, folder) or leftovers.DiskUsage()
        return EpochRow(
            epoch_directory.names.parse(folder) or 0, DAMAGED, detail=detail, folder=folder, nbytes=size.nbytes
        )
    detail = "named like an epoch, and none: neither ours nor stock Orbax's on a file system"
    return leftovers.row_of(epoch_directory.store, folder, FOREIGN, time.time_ns(), (), detail)


# -- the files of one epoch --------------------------------------------------------------------------------------------


def checked(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    """The row of an epoch after a look at its files: are they there, with the sizes recorded?

    An epoch that is replaced meanwhile is looked at again. The row of an epoch that is deleted meanwhile stays.
    """
    for _ in range(_TRIES):
        if in_bucket(epoch_directory):
            found = _checked_objects(epoch_directory, row)
            if found.state == COMMITTED:
                return found
            epoch_directory.head.read()
            save_id = epoch_directory.seen_save_id(row.epoch)
            if save_id in (None, found.save_id):
                return row if save_id is None else found
            continue
        if row.state == DAMAGED and not row.nodes:
            return row
        found = _checked(epoch_directory, row)
        fresh = row if found.state == COMMITTED else read(epoch_directory, row.folder, row.epoch)
        if not isinstance(fresh, EpochRow):
            return row
        if all(getattr(fresh, name) == getattr(row, name) for name in ("state", "save_id", "committed_ns", "nodes")):
            return found
        row = fresh
    return row


def _checked_objects(epoch_directory: BucketDirectory, row: EpochRow) -> EpochRow:
    """The row in full after a look at the objects: one request for the record and one for their sizes."""
    try:
        record = epoch_directory.read_seen(row.epoch)
        fresh = _with_attached(epoch_directory, _of_any(record, row.folder))
        if isinstance(record, steps.OrbaxRecord):
            steps.check(epoch_directory.store, row.folder, record)
            return dataclasses.replace(fresh, checked=True)
        nodes = list(_nodes(record, row.folder, epoch_directory, objects.sizes(epoch_directory, row.folder)))
        return dataclasses.replace(_with_nodes(fresh, nodes), checked=True)
    except (errors.EpochCheckpointError, OSError) as error:
        if _says_nothing(epoch_directory, error):
            raise
        fields = {"state": _state(error), "detail": errors.say(error), "checked": True}
        return dataclasses.replace(row, save_id=epoch_directory.seen_save_id(row.epoch) or row.save_id, **fields)


def _checked(epoch_directory: EpochDirectory, row: EpochRow) -> EpochRow:
    try:
        if row.writer == "orbax":
            steps.check(epoch_directory.store, row.folder, steps.read(epoch_directory.store, row.folder, row.epoch))
            return dataclasses.replace(row, checked=True)
        record = epoch_directory.read_in(row.folder, row.epoch)
        found = epoch_directory.read_per_node(row.folder, row.epoch) if record is None else {"": record}
        sizes = objects.sizes(epoch_directory, row.folder) if isinstance(epoch_directory, BucketDirectory) else None
        each = (_nodes(one, paths.join(row.folder, name), epoch_directory, sizes) for name, one in found.items())
        nodes = list(itertools.chain.from_iterable(each))
        return dataclasses.replace(_with_nodes(row, nodes or row.nodes), checked=True)
    except (errors.EpochCheckpointError, OSError) as error:
        if _says_nothing(epoch_directory, error):
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
    known: EpochDirectory | None = None,
    mirror: str | None = None,
) -> Overview:
    """Looks at a directory, which jobs may be writing to; for the arguments see `inspect` and `Inspection.overview`.

    The newest epochs up to the limit become rows. The best epoch and attempts always do, and so does the latest that
    can be read, unless the limit is 0. `check` looks at about `CHECKED_FILES` files: are they there, with the sizes
    that were recorded? In an object store it looks at about `CHECKED_REQUESTS / 2` epochs; the rows of other
    epochs are made from the head, without requests. `known`: the directory as it was opened before. `mirror`: its
    mirror, which is looked at, too.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise errors.InvalidArgumentError(f"limit is a number of epochs, or None for all; got {limit!r}")
    epoch_directory = known or open_commits(directory, options, single=True)
    with access(epoch_directory.store):
        found = _Scan(epoch_directory, metric, mode).overview(
            limit, check, options.todelete_subdir if options else None
        )
        return found if epoch_directory.names.only else tiers.with_tiers(epoch_directory, found, limit, _row_of, mirror)


def _row_of(epoch_directory: EpochDirectory, epoch: int) -> EpochRow | LeftoverRow | None:
    """The row of an epoch in a mirror."""
    if in_bucket(epoch_directory):
        return brief(epoch_directory, epoch, epoch_directory.entries()[epoch])
    return read(epoch_directory, epoch_directory.folder(epoch), epoch)


class _Scan:
    """One look at a directory."""

    def __init__(self, epoch_directory: EpochDirectory, metric: str | None, mode: str):
        self._epoch_directory = epoch_directory
        self._metric = metric
        self._mode = mode
        self._problems: dict[str, str] = {}
        self._rows: dict[int, EpochRow] = {}

    def overview(self, limit: int | None, check: bool, todelete_subdir: str | None) -> Overview:
        epoch_directory = self._epoch_directory
        only = self._epoch_directory.names.only
        if in_bucket(epoch_directory):
            found = self._read_head(epoch_directory, limit, todelete_subdir)
        else:
            # Attempts first: one that is committed meanwhile is then seen in its new place.
            found = leftovers.Leftovers() if only else leftovers.find(epoch_directory, time.time_ns(), todelete_subdir)
            found.others.extend(self._read_all(self._folders()))

        # Which rows are shown: the newest, and those that are marked. A check may find that a marked epoch is damaged;
        # then another one is.
        newest = sorted(self._rows, reverse=True)
        if self._metric is not None:
            self._update(self._attach, self._rows)
        shown = set[int]()
        more = set(newest if limit is None else newest[:limit])
        while True:
            if self._metric is None:
                self._update(self._attach, more)
            if check:
                self._update(functools.partial(checked, epoch_directory), more if shown else self._first(more))
            shown |= more
            latest = max((epoch for epoch, row in self._rows.items() if row.state in (COMMITTED, NEWER)), default=None)
            best = self._best()
            more = {epoch for epoch in (best, latest if limit != 0 else None) if epoch is not None} - shown
            if not more:
                break
        sized = {epoch: with_size(epoch_directory, self._rows[epoch]) for epoch in shown}
        rows = [dataclasses.replace(row, latest=e == latest, best=e == best) for e, row in sized.items()]

        committed = {row.save_id for row in rows}
        epochs = [*rows, *(row for row in found.attempts if row.save_id not in committed)]
        epochs.sort(key=lambda row: (row.epoch, row.state not in (COMMITTED, DAMAGED), row.save_id))
        hidden = [row for epoch, row in self._rows.items() if epoch not in shown]
        seen = Overview(
            directory=place(epoch_directory),
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
            return self._epoch_directory.deleted()
        except (errors.EpochCheckpointError, OSError) as error:
            self._problems[paths.METRICS_LOG] = errors.say(error)
            return {}

    def _read_head(
        self, epoch_directory: BucketDirectory, limit: int | None, todelete_subdir: str | None
    ) -> leftovers.Leftovers:
        """Makes the rows of an object store; returns the things beside the epochs."""
        entries = epoch_directory.entries()
        found = objects.leftovers_of(
            epoch_directory, epoch_directory.head.seen() or Head(), time.time_ns(), todelete_subdir
        )
        self._rows = {epoch: brief(epoch_directory, epoch, entry) for epoch, entry in entries.items()}
        # Metrics that are too large for the head are read from records: for the rows shown, and to compare all epochs.
        listed = entries if limit is None or self._metric is not None else sorted(entries)[-limit or len(entries) :]
        self._read_all({epoch: epoch_directory.folder(epoch) for epoch in listed if entries[epoch].large})
        return found

    def _read_all(self, folders: Mapping[int, str]) -> list[LeftoverRow]:
        """Reads the records of epochs into rows; returns what is none."""
        found = dict[int, EpochRow | LeftoverRow | None]()
        self._epoch_directory.store.each(
            lambda e: found.__setitem__(e, read(self._epoch_directory, folders[e], e)), list(folders)
        )
        self._rows |= {epoch: row for epoch, row in found.items() if isinstance(row, EpochRow)}
        return [row for row in found.values() if isinstance(row, LeftoverRow)]

    def _first(self, epochs: Collection[int]) -> list[int]:
        """The newest of some epochs, at least one, that together cost as much as a look may."""
        bucket = in_bucket(self._epoch_directory)
        cost = 0
        chosen = list[int]()
        entries = self._epoch_directory.entries() if in_bucket(self._epoch_directory) else {}
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
        entries = {entry.name: entry.is_folder for entry in self._epoch_directory.store.list("")}
        hidden: frozenset[int] = frozenset()
        if paths.ROLLBACK_RECORD in entries:
            try:
                hidden = self._epoch_directory.hidden()
                numbers = ", ".join(map(str, sorted(hidden)))
                problem = f"a rollback is setting aside {numbers}; the next open finishes it" if hidden else ""
            except (errors.EpochCheckpointError, ValueError, OSError) as error:
                problem = f"{error}; no manager can open the directory as long as it is there"
            if problem:
                self._problems[paths.ROLLBACK_RECORD] = problem
        found = folders_of(self._epoch_directory, entries, hidden)
        if not found and not hidden:
            hint = step_names.named_otherwise(self._epoch_directory.store, list(entries.items()))
            self._problems |= {"": hint} if hint else {}
        return found

    def _update(self, change: Callable[[EpochRow], EpochRow], epochs: Collection[int]) -> None:
        self._epoch_directory.store.each(lambda e: self._rows.__setitem__(e, change(self._rows[e])), list(epochs))

    def _attach(self, row: EpochRow) -> EpochRow:
        try:
            return _with_attached(self._epoch_directory, row)
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
