"""What lies in a directory beside its epochs: attempts under way or left over, and what was taken out of sight.

The names are those that `commit_rename`, `commit_put`, `node_epochs`, uploads and exports give; this table is the one
place that reads all of them:

| name | what it is |
| --- | --- |
| `incarnation-<id>.orbax-checkpoint-tmp/` | a run's staging; it stays while the run lives, empty between saves |
| `node-<node>-<id>.orbax-checkpoint-tmp/` | the same of a job that saves epochs of one node |
| in them `<epoch>-<try>/` | an attempt |
| in them `removed-<id>[-<what>]`, and such folders of earlier runs | out of sight, being removed, see `placing` |
| in them `moving-<id>-<where to>` | epochs on the move: the next run puts them where they belong |
| `rolled-back-<id>/`, `damaged-<id>/`, the folder that `todelete_subdir` named | epochs that are kept out of sight |
| `<step>.orbax-checkpoint-tmp*/` | staging of stock Orbax |
| `upload-*`, `export-*`, `gc-*`, with that suffix | staging of an upload, an export, a removal |
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection, Sequence

from epochckpt import layout, parsing, placing, records, surveying, units
from epochckpt.commit import Commits
from epochckpt.commit_put import PutCommits
from epochckpt.errors import EpochCheckpointError
from epochckpt.rows import IN_PROGRESS, LEFTOVER, EpochRow, NodeRow, RemainRow
from epochckpt.store import Store
from epochckpt.surveying import Extent

LIVE_SECS = 600.0
"""An attempt that something was written to within so many seconds counts as under way."""

ATTEMPT, ROLLED_BACK, SET_ASIDE, DELETED, ORBAX, FOREIGN = (
    "attempt",
    "rolled back",
    "set aside",
    "deleted",
    "orbax attempt",
    "foreign",
)

GC_PREFIX = "gc-"

_ATTEMPT = re.compile(r"(\d+)-(\d+)\Z")
_TOKEN = re.compile(r"-([0-9a-f]{8,16})" + re.escape(layout.TMP_SUFFIX) + r"\Z")
_ID = re.compile(r"[0-9a-f]{16}\Z")
_KEPT = {
    "rolled-back-": (ROLLED_BACK, "set aside by rollback_to"),
    "damaged-": (SET_ASIDE, "a damaged epoch that was replaced"),
}
_STAGING = {
    "upload-": (ATTEMPT, "staging of an upload"),
    "export-": (ATTEMPT, "staging of an export"),
    GC_PREFIX: (DELETED, "being removed, or left by a removal that was interrupted"),
}
_NO_NODES = frozenset({"metrics", "descriptor"})  # folders of the Orbax view; no node may be called so
_VIEW = frozenset({"manifest.ocdbt", "_METADATA", "array_metadatas"})


@dataclasses.dataclass(frozen=True)
class Remains:
    """What was found.

    Attributes:
        attempts: saves that have not been committed, each as a row of its own.
        others: the rest.
        problems: what could not be looked at, and why, by path.
    """

    attempts: list[EpochRow] = dataclasses.field(default_factory=list)
    others: list[RemainRow] = dataclasses.field(default_factory=list)
    problems: dict[str, str] = dataclasses.field(default_factory=dict)


def find(commits: Commits, now_ns: int, kept: str | None = None) -> Remains:
    """Looks for everything in the table above; for attempts on object stores see `orphans`.

    Args:
        commits: the directory.
        now_ns: the time, nanoseconds since 1970.
        kept: the folder that `todelete_subdir` names.

    Raises:
        OSError: the directory cannot be looked at.
    """
    found = Remains()
    for name, is_folder in surveying.names(commits.store, ""):
        if not is_folder or commits.names.parse(name) is not None:
            continue
        try:
            _look_at(commits, name, now_ns, kept, found)
        except OSError as error:
            found.problems[name] = str(error)
    return found


def is_sign(commits: Commits, name: str) -> bool:
    """Whether a folder that is named like no epoch shows that the directory is one of checkpoints."""
    if layout.parse_incarnation(name) is not None or layout.parse_node_staging(name) is not None:
        return True
    if layout.TMP_SUFFIX in name and commits.names.parse(name.partition(layout.TMP_SUFFIX)[0]) is not None:
        return True
    if any(name.startswith(prefix) for prefix in _KEPT):
        return bool(_epochs_in(commits, name))
    return name == layout.ROOT_METADATA[0] and commits.store.exists(layout.join(*layout.ROOT_METADATA))


def _look_at(commits: Commits, name: str, now_ns: int, kept: str | None, found: Remains) -> None:
    store = commits.store
    if layout.parse_incarnation(name) is not None or layout.parse_node_staging(name) is not None:
        if store.renames:
            _look_into_staging(commits, name, now_ns, found)
        return
    for prefix, (kind, detail) in _KEPT.items():
        if name.startswith(prefix) and _ID.match(name.removeprefix(prefix)):  # else somebody else's
            _add(found, store, name, kind, now_ns, _epochs_in(commits, name), detail)
            return
    if name == kept:
        detail = "deleted epochs, kept because of todelete_subdir"
        _add(found, store, name, SET_ASIDE, now_ns, _epochs_in(commits, name), detail)
    elif layout.TMP_SUFFIX in name:
        for prefix, (kind, detail) in _STAGING.items():
            if name.startswith(prefix) and _TOKEN.search(name):
                moves = list(placing.on_the_move(store, name)) if store.renames else []
                for path, where in moves:
                    said = f"an epoch on the move to {where}: the next upload puts it there"
                    _add(found, store, path, SET_ASIDE, now_ns, (), said)
                if moves:
                    return
                _add(found, store, name, kind, now_ns, (), detail)
                return
        step = commits.names.parse(name.partition(layout.TMP_SUFFIX)[0])
        if step is not None:
            _add(found, store, name, ORBAX, now_ns, (step,), "a save of stock Orbax, under way or left over")


def orphans(commits: PutCommits, folders: Collection[str] | None = None) -> list[EpochRow]:
    """Attempts on an object store, which does not tell when they were written: only those of earlier runs are dead.

    Args:
        commits: the directory.
        folders: look only into these folders of epochs.
    """
    newest = commits.newest
    nodes: dict[tuple[str, str], list[NodeRow]] = {}
    for path in commits.unrecorded(folders):
        if path.count("/") != 2:
            continue  # attached metrics: the next run removes them
        folder, node, attempt = path.split("/")
        if layout.parse_incarnation(layout.incarnation_folder(attempt.partition("-")[0])) is None:
            continue  # not named as attempts are
        row = _node(commits.store, path, node)
        if row is not None:
            nodes.setdefault((folder, attempt), []).append(row)
    rows = []
    for (folder, attempt), found in nodes.items():
        live = not is_fenced_off(attempt, newest)
        detail = f"{_progress(found)}; " + (
            "of the newest run, or of an upload: under way, or that was killed (object stores tell no times)"
            if live
            else "of an earlier run, which can no longer commit it"
        )
        rows.append(
            EpochRow(
                epoch=commits.names.parse(folder) or 0,
                state=IN_PROGRESS if live else LEFTOVER,
                detail=detail,
                folder=folder,
                attempt=attempt,
                nodes=tuple(found),
                nbytes=sum(n.nbytes for n in found),
            )
        )
    return rows


def is_fenced_off(attempt: str, newest: str) -> bool:
    """Whether an attempt on an object store is of a run that a later one has fenced off. Uploads keep ids of others."""
    run = attempt.partition("-")[0]
    return len(run) == len(newest) and run.isdigit() and int(run) < int(newest)


def _look_into_staging(commits: Commits, home: str, now_ns: int, found: Remains) -> None:
    store = commits.store
    token = home.removesuffix(layout.TMP_SUFFIX).rpartition("-")[2]
    node = layout.parse_node_staging(home)
    for name, is_folder in surveying.names(store, home):
        path = layout.join(home, name)
        if not is_folder:
            continue
        tried = _ATTEMPT.match(name)
        if tried:
            attempt = f"{token}-{tried[2] if node else name}"
            row = _attempt(store, path, int(tried[1]), attempt, node, now_ns)
            if row is not None:
                found.attempts.append(row)
            continue
        gone = placing.parse_removed(name)
        if (where := placing.parse_moving(name)) is not None:
            detail = f"an epoch on the move to {where}: the next run puts it there"
            _add(found, store, path, SET_ASIDE, now_ns, (), detail)
        elif name.endswith(layout.TMP_SUFFIX) and any(placing.on_the_move(store, path)):
            _add(found, store, path, SET_ASIDE, now_ns, (), "what an earlier run left, with an epoch on the move in it")
        elif name.endswith(layout.TMP_SUFFIX):
            _add(found, store, path, DELETED, now_ns, (), "what an earlier run left, out of sight")
        elif gone is not None:
            epoch = commits.names.parse(gone)
            epochs = () if epoch is None else (epoch,)
            detail = "a deleted or replaced epoch, out of sight" if gone else "a failed save, or a draft, out of sight"
            _add(found, store, path, DELETED, now_ns, epochs, detail)
        else:
            _add(found, store, path, FOREIGN, now_ns, (), "not known")


def _attempt(store: Store, path: str, epoch: int, attempt: str, alone: str | None, now_ns: int) -> EpochRow | None:
    """The row of an attempt; None if it is gone: committed, or discarded."""
    whole = surveying.extent(store, path)
    if whole is None:
        return None
    nodes = []
    for name, is_folder in [(layout.folder_name(alone), True)] if alone else surveying.names(store, path):
        row = _node(store, path if alone else layout.join(path, name), name) if is_folder else None
        if row is not None:
            nodes.append(row)
    age = whole.age_secs(now_ns) or 0.0
    detail = _progress(nodes)
    if age >= LIVE_SECS:
        detail += f"; nothing was written for {units.secs(age)}: it failed, or its job was killed"
    return EpochRow(
        epoch=epoch,
        state=IN_PROGRESS if age < LIVE_SECS else LEFTOVER,
        detail=whole.problem or detail,
        folder=path,
        attempt=attempt,
        nodes=tuple(nodes),
        nbytes=whole.nbytes,
        started_ns=whole.oldest_ns,
        age_secs=age,
    )


def _progress(nodes: Sequence[NodeRow]) -> str:
    done = sum(n.state == "written" for n in nodes)
    began = units.several(len(nodes), "node", "nodes")
    return f"{done} of the {began} that began {'has' if done == 1 else 'have'} written"


def _node(store: Store, path: str, name: str) -> NodeRow | None:
    """One node's part of an attempt; None if the folder is none of a node's, or gone."""
    inner = surveying.names(store, path)
    files = {n for n, is_folder in inner if not is_folder}
    written = layout.NODE_RECORD in files
    if not written and (name in _NO_NODES or {n for n, _ in inner} & _VIEW or _links_up(store, path, files)):
        return None  # an item of the Orbax view
    size = surveying.extent(store, path)
    if size is None:
        return None
    secs = None
    if written:
        at = layout.join(path, layout.NODE_RECORD)
        try:
            record = parsing.parse_node(at, store.read(at, limit_bytes=records.MAX_RECORD_BYTES))
            secs = record.timings.get("write_secs")
        except (EpochCheckpointError, OSError, ValueError):  # being written just now, or gone
            written = False
    return NodeRow(layout.shown_name(name), size.nbytes, secs, "written" if written else "writing")


def _links_up(store: Store, path: str, names: Collection[str]) -> bool:
    """Whether a folder holds links into folders of nodes, as items of the Orbax view do."""
    for name in names if store.renames else ():
        with contextlib.suppress(OSError):  # no link, or gone
            if os.readlink(os.path.join(store.root, path, name)).startswith("../"):
                return True
    return False


def _epochs_in(commits: Commits, folder: str) -> tuple[int, ...]:
    numbers = (commits.names.parse(name) for name, _ in surveying.names(commits.store, folder))
    return tuple(sorted(n for n in numbers if n is not None))


def _add(found: Remains, store: Store, path: str, kind: str, now_ns: int, epochs: tuple[int, ...], detail: str) -> None:
    size = surveying.extent(store, path)
    if size is not None:
        found.others.append(row_of(path, kind, size, now_ns, epochs, detail))


def row_of(path: str, kind: str, size: Extent, now_ns: int, epochs: tuple[int, ...], detail: str) -> RemainRow:
    """The row of something that was measured."""
    if size.problem:
        detail = f"{detail} ({size.problem})" if detail else size.problem
    return RemainRow(path, kind, size.nbytes, size.age_secs(now_ns), epochs, detail)
