"""Several runs side by side: the checkpoint directories below a folder, a row for each."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epochckpt import _text, errors
from epochckpt._metrics import numbers
from epochckpt.directory import contents, owners
from epochckpt.inspection import configs, opening, scan, suggest
from epochckpt.inspection.directory import Inspection, inspect
from epochckpt.inspection.epoch import NamedContents
from epochckpt.inspection.rows import COMMITTED, DAMAGED, IN_PROGRESS, NEWER, DirectoryRow, Overview, RunsOverview
from epochckpt.jobs.notes import RunNotes
from epochckpt.storage import Store, listing, open_store

if TYPE_CHECKING:
    from epochckpt._lazy import ocp
    from epochckpt.directory import EpochDirectory
    from epochckpt.inspection.plots import RunsPlots

_DEPTH = 4  # levels below the folder that are searched
_SEARCHED = 2000  # folders
_NEWEST = 20  # epochs whose times tell how often a run saves
_LATE = 10  # times its usual interval without an epoch: then nothing trains there any more, as far as one can see
_LATE_SECS = 600.0  # and at least so long


def inspect_runs(
    directory: str | os.PathLike[str],
    *,
    metric: str | None = None,
    mode: str = "max",
    sort: str | None = None,
    options: ocp.CheckpointManagerOptions | None = None,
) -> Runs:
    """Opens a folder of runs to look at them side by side: the checkpoint directories in it, up to four levels below.

    Examples:
        >>> import epochckpt as ec, jax.numpy as jnp, orbax.checkpoint as ocp
        >>> for name, loss in (("a", 2.0), ("b", 1.0)):
        ...     with ec.CheckpointManager(f"runs/{name}") as manager:
        ...         _ = manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics={"loss": loss})
        >>> runs = ec.inspect_runs("runs", metric="loss", mode="min")
        >>> [(row.name, row.latest, row.best_value) for row in runs.rows()]
        [('a', 0, 2.0), ('b', 0, 1.0)]
        >>> runs["b"].latest.epoch
        0

    Args:
        directory: a path or a URL.
        metric: the metric by which each run's best epoch is found; None: the one that most runs have is shown.
        mode: which value of the metric is best: `max` or `min`.
        sort: by which column rows are ordered: `run`, `state`, `latest`, `age`, `trained`, `best`, `epochs`, `bytes`,
            the name of a metric (its latest value) or of a value of the configs. With `-` before it the greatest comes
            first; runs without a value come last. None: by name.
        options: the step name format, if it is not the default.

    Raises:
        NotACheckpointDirectoryError: no checkpoint directory is in it; the message guesses its nature.
        AccessError: it may not be read.
        InvalidArgumentError: an unknown mode; of `sort` when rows are asked for.
    """
    if mode not in ("max", "min"):
        raise errors.InvalidArgumentError(f"mode {mode!r} is not known; expected 'max' or 'min'")
    found = Runs(directory, metric, mode, sort, options)
    if not len(found):
        inspect(directory, options=options)  # raises, with a hint at its contents
        raise errors.NotACheckpointDirectoryError(f"{found.directory} is one checkpoint directory: use `inspect`")
    return found


class Runs(NamedContents):
    """A folder of runs; see `inspect_runs`. Iterates over their names, which are their paths below the folder."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str | None,
        mode: str,
        sort: str | None,
        options: ocp.CheckpointManagerOptions | None,
    ):
        self._store = open_store(directory)
        self._metric = metric
        self._mode = mode
        self._options = options
        self._sort = sort

    @property
    def directory(self) -> str:
        """Its path or URL, in full."""
        return self._store.root

    def __getitem__(self, name: str) -> Inspection:
        """One run.

        Raises:
            NotACheckpointDirectoryError: no run has this name.
        """
        return inspect(self._store.address_of(name), metric=self._metric, mode=self._mode, options=self._options)

    def rows(self) -> tuple[DirectoryRow, ...]:
        """A row per run, by name or as was asked for."""
        return self.overview().runs

    def overview(self) -> RunsOverview:
        """The rows, and what could not be looked at."""
        found: dict[str, DirectoryRow] = {}
        problems: dict[str, str] = {}

        def look(name: str) -> None:
            asked = {"metric": self._metric, "mode": self._mode, "limit": _NEWEST, "options": self._options}
            try:
                address = self._store.address_of(name)
                epoch_directory = opening.open_directory(address, self._options, single=True)
                seen = scan.look(address, check=False, known=epoch_directory, **asked)
                found[name] = _row(name, seen, _owners(epoch_directory), _config(epoch_directory, seen))
            except (errors.EpochCheckpointError, OSError) as error:
                problems[name] = errors.say(error)

        search = self._search()
        self._store.each(look, search.names)
        if search.left_out:
            problems[self.directory] = search.left_out
        runs = tuple(row for _, row in sorted(found.items()))
        if self._sort is not None:
            runs = ordered(runs, self._sort)
        counts = collections.Counter(name for row in runs for name in dict.fromkeys([*row.history, *row.metrics]))
        sort = (self._sort or "").removeprefix("-")
        asked = self._metric or (sort if sort in counts else None)
        return RunsOverview(
            self.directory,
            runs,
            metric=asked or max(counts, key=lambda name: counts[name], default=""),
            mode=self._mode,
            ranked=self._metric is not None,
            sort=sort,
            problems=problems,
        )

    @property
    def plots(self) -> RunsPlots:
        """Plots of all runs over each other."""
        from epochckpt.inspection.plots import RunsPlots

        return RunsPlots(self.overview)

    def _names(self) -> Sequence[str]:
        return self._search().names

    def _search(self) -> _FolderSearch:
        with opening.access(self._store):
            return _searched(self._store)

    def _rows(self) -> RunsOverview:
        return self.overview()


@dataclasses.dataclass(frozen=True)
class _FolderSearch:
    """The names of the checkpoint directories that a search found; and, in words, the limits of the search."""

    names: Sequence[str]
    left_out: str = ""


def _searched(store: Store) -> _FolderSearch:
    """The checkpoint directories below a folder that is no such directory. Found ones are not searched further."""
    walk = _walk(store, "", _DEPTH)
    seen = list(itertools.islice(walk, _SEARCHED))
    found = sorted(path for path, is_run in seen if is_run)
    if next(walk, None) is None:
        return _FolderSearch(found)
    ((most, count),) = collections.Counter(os.path.dirname(path) for path, _ in seen).most_common(1)
    return _FolderSearch(
        found,
        f"only {_SEARCHED} folders were searched for runs, and there are more; {count} of them lie in {most or '.'}. "
        "Name a folder further down to see what else is there",
    )


def _walk(store: Store, folder: str, depth: int) -> Iterator[tuple[str, bool]]:
    """The folders below a folder, and whether each is a run; from each folder in it in turns, so none delays others."""
    turns = collections.deque(_visit(store, path, depth) for path in _folders(store, folder))
    while turns:
        visit = turns.popleft()
        for seen in itertools.islice(visit, 1):
            yield seen
            turns.append(visit)


def _visit(store: Store, path: str, depth: int) -> Iterator[tuple[str, bool]]:
    """A folder, and then those below it, unless it is a run."""
    is_run = suggest.holds_epochs(store, path)
    yield path, is_run
    if not is_run and depth > 1:
        yield from _walk(store, path, depth - 1)


def _folders(store: Store, folder: str) -> list[str]:
    """The folders in a folder that may be runs, or have runs in them."""
    folders = [name for name, is_folder in listing.names(store, folder) if is_folder and not name.startswith(".")]
    return [f"{folder}/{name}".lstrip("/") for name in folders if contents.kind_of(name) is None]


class Owners(enum.Enum):
    """What is known of the runs that have claimed a directory."""

    NONE = "every run has closed it"
    ENDED = "a run's process has ended without closing it"
    ALIVE = "a run may be alive"


def _owners(epoch_directory: EpochDirectory) -> Owners:
    processes = [owners.Process.parse(owner) for owner in epoch_directory.owners()]
    if not processes:
        return Owners.NONE
    return Owners.ENDED if all(process.has_ended for process in processes) else Owners.ALIVE


def _config(epoch_directory: EpochDirectory, seen: Overview) -> configs.RunConfig:
    whole = [row for row in seen.epochs if row.state == COMMITTED and row.writer == "epochckpt"]
    return configs.config_of(epoch_directory, whole[0], whole[-1]) if whole else configs.RunConfig()


_COLUMNS: Mapping[str, Callable[[DirectoryRow], Any]] = {
    "run": lambda row: row.name,
    "state": lambda row: row.state,
    "latest": lambda row: row.latest,
    "age": lambda row: None if row.committed_ns is None else -row.committed_ns,
    "trained": lambda row: row.trained_secs,
    "best": lambda row: row.best_value,
    "epochs": lambda row: row.epochs,
    "bytes": lambda row: row.nbytes,
}
"""The columns that every table of runs has, and by what their rows are ordered."""


def ordered(runs: Sequence[DirectoryRow], sort: str) -> tuple[DirectoryRow, ...]:
    """The rows in the order of a column, those without a value last; see `inspect_runs`."""
    column = sort.removeprefix("-")
    known = dict.fromkeys([*_COLUMNS, *(name for row in runs for name in (*row.metrics, *row.config))])
    if column not in known:
        raise errors.UnknownNameError(f"no column {_text.shown(column)!r} to sort runs by; {_text.near(column, known)}")

    def value(row: DirectoryRow) -> Any:
        if column in _COLUMNS:
            return _COLUMNS[column](row)
        return row.metrics.get(column, row.config.get(column))

    def key(row: DirectoryRow) -> tuple[bool, Any]:  # numbers come before texts
        found = value(row)
        return (False, found) if isinstance(found, int | float) else (True, str(found))

    def has_value(row: DirectoryRow) -> bool:
        return (found := value(row)) is not None and found == found

    having = sorted(filter(has_value, runs), key=key, reverse=sort.startswith("-"))
    return (*having, *itertools.filterfalse(has_value, runs))


def _row(name: str, seen: Overview, owners: Owners, config: configs.RunConfig) -> DirectoryRow:
    whole = [row for row in seen.epochs if row.state == COMMITTED]
    latest = next((row for row in seen.epochs if row.latest), None)
    best = next((row for row in whole if row.best), None)
    epochs = [row for row in seen.epochs if row.state in (COMMITTED, DAMAGED, NEWER)]
    state, detail = state_of(seen, owners)
    points = seen.history.get(seen.metric, ())
    return DirectoryRow(
        name,
        state,
        detail,
        epochs=len(epochs) + seen.hidden,
        nbytes=sum(row.nbytes for row in epochs) + seen.hidden_nbytes,
        latest=None if latest is None else latest.epoch,
        committed_ns=None if latest is None else latest.committed_ns,
        best=None if best is None else best.epoch,
        best_value=None if best is None else dict(points).get(best.epoch),
        better=seen.better,
        unit=seen.unit,
        history=seen.history,
        metrics={} if latest is None else numbers(latest.metrics),
        damaged=tuple(row.epoch for row in epochs if row.state == DAMAGED),
        trained_secs=config.trained_secs,
        config=config.values,
    )


def state_of(seen: Overview, owners: Owners = Owners.ALIVE) -> tuple[str, str]:
    """What goes on in a run, and why. Stock Orbax does not say whether a run of its own is alive."""
    whole = [row for row in seen.epochs if row.state == COMMITTED]
    latest = next((row for row in seen.epochs if row.latest), None)
    damaged = [row.epoch for row in seen.epochs if row.state == DAMAGED]
    if damaged and (latest is None or damaged[-1] > latest.epoch):
        return DAMAGED, f"{seen.unit} {damaged[-1]}"
    if latest is not None and (finished := RunNotes.read(latest.notes).finished):
        return "finished", "; ".join(finished)
    if any(row.state == IN_PROGRESS for row in seen.epochs):
        return "saving", ""
    times = [row.committed_ns for row in whole if row.committed_ns is not None]
    if not times:
        return "empty", ""
    if latest is not None and latest.writer == "epochckpt" and owners is not Owners.ALIVE:
        return ("closed", "") if owners is Owners.NONE else ("ended", owners.value)
    spans = [(after - before) / 1e9 for before, after in itertools.pairwise(times) if after > before]
    usual = statistics.median(spans) if spans else 0.0
    late = (time.time_ns() - max(times)) / 1e9 > max(_LATE * usual, _LATE_SECS)
    return "stale" if late else "training", ""
