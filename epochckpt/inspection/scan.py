"""A directory of checkpoints as rows: epochs and attempts at them, and what else lies there. Only looks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from epochckpt import _text
from epochckpt.commit import Commits, attached_metrics, commits_of
from epochckpt.commit.conditional_put import PutCommits
from epochckpt.commit.retention import best_of, rank
from epochckpt.errors import (
    AccessError,
    EpochCheckpointError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    StorageError,
)
from epochckpt.format import paths as layout
from epochckpt.inspection import epoch_rows, leftovers, suggest
from epochckpt.inspection.rows import ABANDONED, COMMITTED, IN_PROGRESS, EpochRow, LeftoverRow, Overview
from epochckpt.orbax import StepNames, step_names
from epochckpt.storage import Store, open_store

CHECKED_FILES = 2000
"""About so many files are looked at; the newest epochs come first."""

_LOOKED_INTO = 3  # committed epochs on an object store, for attempts beside them


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


def open_commits(
    directory: str | os.PathLike[str], options: ocp.CheckpointManagerOptions | None = None, *, single: bool = False
) -> Commits:
    """The epochs of a directory, for reading.

    Args:
        directory: a path or a URL.
        options: the step name format, if it is not the default.
        single: the folder of one epoch will do: of ours, of stock Orbax, or of a tree that an Orbax checkpointer saved.

    Raises:
        NotACheckpointDirectoryError: it is no checkpoint directory; says what it looks like instead.
        AccessError: it may not be read.
        OSError: it cannot be reached.
    """
    store = open_store(directory)
    commits = commits_of(store, StepNames.of(options or ocp.CheckpointManagerOptions()))
    try:
        if store.renames:
            with contextlib.suppress(FileNotFoundError):  # `isdir` says no where this user may not look
                os.lstat(store.root)
        if store.renames and not os.path.isdir(store.root):
            problem = suggest.file if os.path.exists(store.root) else suggest.missing
            raise NotACheckpointDirectoryError(f"{store.root} {problem(store.root)}")
        found = [(entry.name, entry.is_folder) for entry in store.list("")]
        names = {name for name, _ in found}
        if single and step_names.is_single(names) and not step_names.is_item(store, names):
            return _single(store)
        if not any(_is_sign(commits, name, is_folder) for name, is_folder in reversed(found)):
            raise NotACheckpointDirectoryError(f"{store.root} {suggest.folder(store, found)}")
    except PermissionError as error:
        raise no_access(commits, error) from error
    return commits


def _single(store: Store) -> Commits:
    """The epoch that lies in a folder, seen from the directory above it."""
    root = os.path.realpath(store.root) if store.renames else store.root.rstrip("/")
    above, _, name = root.rpartition("/")
    return commits_of(open_store(above or "/"), _OneName(name, step_names.number_of(store)))


def place(commits: Commits) -> str:
    """Where the epochs lie, for people: the directory, or the folder of the one epoch."""
    only = commits.names.only
    return layout.join(commits.store.root.rstrip("/"), only) if only else commits.store.root


def no_access(commits: Commits, error: OSError) -> AccessError:
    """The error for a directory that may not be looked at."""
    return AccessError(f"{commits.store.root}: {error}; this user (uid {os.getuid()}) needs read access")


def _is_sign(commits: Commits, name: str, is_folder: bool) -> bool:
    """Whether a name in a directory shows that it is one of checkpoints."""
    if not is_folder:
        return name == layout.ROLLBACK_RECORD
    epoch = commits.names.parse(name)
    if epoch is not None:
        return isinstance(epoch_rows.read(commits, name, epoch, brief=True), EpochRow)
    return leftovers.is_sign(commits, name)


def look(
    directory: str | os.PathLike[str],
    *,
    metric: str | None = None,
    mode: str = "max",
    limit: int | None = 100,
    options: ocp.CheckpointManagerOptions | None = None,
    check: bool = True,
) -> Overview:
    """Looks at a directory, which others may be writing to.

    Args:
        directory: a path or a URL.
        metric: by which the best epoch is to be found; `a/b` finds `{"a": {"b": …}}`, too.
        mode: `max` or `min`: which value of it is best. NaN is worst.
        limit: how many epochs are to be rows, the newest; None: all. The best is one in any case, and so are attempts
            and, unless it is 0, the latest that can be read.
        options: the step name format and `todelete_subdir`, if they are not the defaults.
        check: see whether the files of the newest epochs are there, with the sizes that were recorded. At most about
            `CHECKED_FILES` files are looked at; `checked` of a row says whether its were.

    Raises:
        NotACheckpointDirectoryError: it is no checkpoint directory; says what it looks like instead.
        AccessError: it may not be read.
        InvalidArgumentError: a mode, or a limit, that makes no sense.
        OSError: it cannot be reached.
    """
    if mode not in ("max", "min"):
        raise InvalidArgumentError(f"mode {mode!r} is not known; expected 'max' or 'min'")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InvalidArgumentError(f"limit is a number of epochs, or None for all; got {limit!r}")
    commits = open_commits(directory, options, single=True)
    try:
        return _Look(commits, metric, mode).overview(limit, check, options.todelete_subdir if options else None)
    except PermissionError as error:
        if isinstance(error, EpochCheckpointError):
            raise
        raise no_access(commits, error) from error


class _Look:
    """One look."""

    def __init__(self, commits: Commits, metric: str | None, mode: str):
        self._commits, self._metric, self._mode = commits, metric, mode
        self._said: dict[str, str] = {}

    def overview(self, limit: int | None, check: bool, kept: str | None) -> Overview:
        now_ns = time.time_ns()
        # attempts first: one that is committed meanwhile is then seen in its new place
        found = leftovers.Leftovers() if self._commits.names.only else leftovers.find(self._commits, now_ns, kept)
        folders = self._folders()
        order = sorted(folders, reverse=True)
        shown = set(order if limit is None else order[:limit])
        rows: dict[int, EpochRow] = {}
        others: list[LeftoverRow] = []
        hidden: list[EpochRow] = []
        for epoch, row in zip(order, self._read(folders, order, shown), strict=True):
            if isinstance(row, LeftoverRow):
                others.append(row)
            elif row is not None and epoch in shown:
                rows[epoch] = row
            elif row is not None:
                hidden.append(row)
        self._attach(rows, hidden)
        if check:
            self._check(rows)
        while (best := self._best([*rows.values(), *hidden])) is not None and best not in rows:
            self._show(best, rows, hidden, check)
        while (latest := _latest([*rows.values(), *hidden])) is not None and latest not in rows and limit != 0:
            self._show(latest, rows, hidden, check)  # what is newer is damaged
        marked = [dataclasses.replace(row, latest=epoch == latest, best=epoch == best) for epoch, row in rows.items()]
        committed = {row.attempt for row in marked}
        attempts = [row for row in found.attempts if row.attempt not in committed]
        if isinstance(self._commits, PutCommits) and not self._commits.names.only:
            unread = [folders[epoch] for epoch in order if epoch not in rows]
            newest = [folders[epoch] for epoch in order[:_LOOKED_INTO]]
            attempts += leftovers.orphans(self._commits, {*newest, *unread} - {row.folder for row in hidden})
        return Overview(
            directory=place(self._commits),
            epochs=tuple(sorted([*marked, *attempts], key=_order)),
            hidden=len(hidden),
            hidden_nbytes=sum(row.nbytes for row in hidden),
            leftovers=tuple(sorted([*found.others, *others], key=lambda row: row.path)),
            metric=self._metric or "",
            mode=self._mode,
            problems={**found.problems, **self._said, **self._problems([*marked, *hidden])},
        )

    def _show(self, epoch: int, rows: dict[int, EpochRow], hidden: list[EpochRow], check: bool) -> None:
        """Makes a whole row of one that was not to be shown: the best or the latest, unless a check says otherwise."""
        (brief,) = [row for row in hidden if row.epoch == epoch]
        hidden.remove(brief)
        whole = epoch_rows.read(self._commits, brief.folder, epoch)
        if isinstance(whole, EpochRow):  # else it was deleted meanwhile
            one = {epoch: whole}
            self._attach(one, [])
            rows[epoch] = epoch_rows.checked(self._commits, one[epoch]) if check else one[epoch]

    def _folders(self) -> dict[int, str]:
        """The folder of each epoch, as far as names say."""
        names, folders = self._commits.names, dict[int, str]()
        entries = self._commits.store.list("")
        hidden = self._hidden() if any(e.name == layout.ROLLBACK_RECORD for e in entries) else frozenset()
        if not any(entry.is_folder and names.parse(entry.name) is not None for entry in entries):
            said = step_names.named_otherwise(self._commits.store, [(e.name, e.is_folder) for e in entries])
            if said:
                self._said[""] = said
        for entry in entries:
            epoch = names.parse(entry.name) if entry.is_folder else None
            if epoch is None or epoch in hidden:
                continue
            if epoch not in folders or entry.name == names.build(epoch):
                folders[epoch] = entry.name
        return folders

    def _hidden(self) -> frozenset[int]:
        """The epochs that a rollback is setting aside."""
        try:
            hidden = self._commits.hidden()
        except (EpochCheckpointError, ValueError, OSError) as error:
            self._said[layout.ROLLBACK_RECORD] = f"{error}; no manager can open the directory as long as it is there"
            return frozenset()
        if hidden:
            what = ", ".join(map(str, sorted(hidden)))
            self._said[layout.ROLLBACK_RECORD] = f"a rollback is setting aside {what}; the next open finishes it"
        return hidden

    def _read(self, folders: Mapping[int, str], order: Sequence[int], shown: set[int]) -> list[Any]:
        found: list[Any] = [None] * len(order)

        def read(place: int) -> None:
            epoch = order[place]
            found[place] = epoch_rows.read(self._commits, folders[epoch], epoch, brief=epoch not in shown)

        self._commits.store.each(read, range(len(order)))
        return found

    def _attach(self, rows: dict[int, EpochRow], hidden: list[EpochRow]) -> None:
        """Completes the rows with metrics that were attached to their epochs."""
        wanted = [*rows.values(), *(hidden if self._metric is not None else ())]
        files = self._attached_files([row.folder for row in wanted if row.state == COMMITTED])

        places = [place for place, row in enumerate(wanted) if row.state == COMMITTED and files.get(row.folder)]

        def complete(place: int) -> None:
            row = wanted[place]
            try:
                found = attached_metrics.read(self._commits, files[row.folder], row.epoch, row.attempt)
            except StorageError as error:
                self._said[row.folder] = str(error)
                return
            wanted[place] = epoch_rows.with_attached(row, found)

        self._commits.store.each(complete, places)
        shown = len(rows)
        rows.update({row.epoch: row for row in wanted[:shown]})
        if len(wanted) > shown:
            hidden[:] = wanted[shown:]

    def _attached_files(self, folders: Sequence[str]) -> Mapping[str, list[str]]:
        store = self._commits.store
        if not store.renames:
            return attached_metrics.by_folder(self._commits)  # one listing; here it is one for each folder
        found: dict[str, list[str]] = {}
        for folder in folders:
            try:
                if paths := store.find(layout.METRICS_PREFIX, folder):
                    found[folder] = paths
            except OSError as error:
                self._said[folder] = str(error)
        return found

    def _check(self, rows: dict[int, EpochRow]) -> None:
        """Looks at the files of the newest epochs, at least of one."""
        files, chosen = 0, list[int]()
        for epoch in sorted(rows, reverse=True):
            files += epoch_rows.files_of(rows[epoch])
            if files > CHECKED_FILES and chosen:
                break
            chosen.append(epoch)

        def check(epoch: int) -> None:
            rows[epoch] = epoch_rows.checked(self._commits, rows[epoch])

        self._commits.store.each(check, chosen)

    def _best(self, rows: Sequence[EpochRow]) -> int | None:
        """The best epoch, the later of equals."""
        if self._metric is None:
            return None
        values = {row.epoch: _value(row.metrics, self._metric) for row in rows if row.state == COMMITTED}
        return best_of({epoch: None if value is None else rank(value, self._mode) for epoch, value in values.items()})

    def _problems(self, rows: Sequence[EpochRow]) -> dict[str, str]:
        """What is to be said beside the rows."""
        if self._metric is None or any(_value(row.metrics, self._metric) is not None for row in rows):
            return {}
        known = sorted({name for row in rows for name in row.metrics})
        if not known:
            return {"": f"no epoch has metrics, so none is best by {self._metric!r}"}
        return {"": f"no epoch has the metric {self._metric!r}; {_text.near(self._metric, known)}"}


def _latest(rows: Sequence[EpochRow]) -> int | None:
    return max((row.epoch for row in rows if row.state == COMMITTED), default=None)


def _order(row: EpochRow) -> tuple[int, bool, str]:
    return row.epoch, row.state in (IN_PROGRESS, ABANDONED), row.attempt


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    """One metric as a number; None if it is not there, or is none."""
    value: Any = metrics.get(name)
    if value is None and "/" in name:
        value = metrics
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value
