"""Steps that stock Orbax wrote: reads what their small files say, and reports missing files.

Reads JSON and lists folders, on POSIX and on `gs://`; `orbax.leaves` reads the arrays, and `orbax.step_recognition`
finds the steps.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from absl import logging

from epochckpt.errors import DamagedError, StorageError, kept, unreadable
from epochckpt.format import EpochRecord, paths
from epochckpt.orbax import step_files
from epochckpt.orbax.small_files import (
    JSON_HANDLERS,
    half_written,
    has_orbax_fields,
    names_in,
    nanoseconds,
    read_object,
    tree_record,
)
from epochckpt.orbax.step_files import ARRAY_RECORDS, COMMIT, OCDBT, STEP_RECORD, TREE_RECORD
from epochckpt.storage import Store

AGGREGATE = "checkpoint"  # a whole tree as msgpack, or its structure: before there was a `_METADATA`
METRICS = "metrics"
ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")  # of leaves, as `_METADATA` names them: those stored as arrays

_ZARR = frozenset({".zarray", "zarr.json"})
_TREE_MARKS = frozenset({TREE_RECORD, OCDBT, "_sharding", "_strings.json", AGGREGATE})  # files
_NO_ITEMS = frozenset({METRICS, "descriptor"})  # folders that Orbax's manager keeps for itself
_ARRAY_HANDLERS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler", "ArrayCheckpointHandler")


def _small_object(store: Store, path: str, problems: dict[str, str], unread: dict[str, StorageError]) -> dict[str, Any]:
    """A small JSON object that the step can be read without; empty if it cannot be used, which is noted."""
    try:
        found, problem = read_object(store, path)
    except StorageError as error:
        found = None
        problem = f"cannot be read: {error}"
        unread[path] = kept(error)
    if problem:
        problems[path] = problem
    return found or {}


@dataclasses.dataclass(frozen=True)
class OrbaxRecord(EpochRecord):
    """What the files of a step of stock Orbax say; takes the place of `epoch.json`. It has no nodes of ours."""

    # The folder of each item in the step's; "" in the old layout, which has no folders of items.
    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as far as Orbax recorded them
    # What is wrong, by path, with small files that the step is read without. Those that storage did not give may be
    # good, and the record without them wrong.
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Of an epoch of ours the next two never change.
    unread: Mapping[str, StorageError] = dataclasses.field(default_factory=dict)  # pyright: ignore[reportIncompatibleVariableOverride]
    # Nothing is missing that says what the folder is and how good; else retention leaves it alone.
    sure: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    stock: ClassVar[bool] = True

    @property
    def names(self) -> list[str]:
        """The items, without Orbax's own."""
        return [name for name in self.folders if name not in _NO_ITEMS]


def read(store: Store, folder: str, epoch: int) -> OrbaxRecord:
    """What Orbax recorded of a step; FileNotFoundError if it is gone."""
    entries = {e.name: e.is_folder for e in store.list(folder)}
    problems: dict[str, str] = {}
    unread: dict[str, StorageError] = {}
    info = _small_object(store, paths.join(folder, STEP_RECORD), problems, unread)
    handlers = info.get("item_handlers")
    if _is_bare(entries, handlers):
        folders = {paths.DEFAULT_ITEM: ""}
        handlers = {paths.DEFAULT_ITEM: handlers}
    else:
        folders = {n: n for n, is_folder in sorted(entries.items()) if is_folder and paths.TMP_SUFFIX not in n}
    recorded = {n: h for n, h in handlers.items() if isinstance(h, str)} if isinstance(handlers, dict) else {}
    metrics: dict[str, Any] = {}
    if METRICS in folders or METRICS in recorded:
        path = paths.join(folder, METRICS, METRICS)
        metrics = _small_object(store, path, problems, unread)
        if METRICS in recorded and not metrics and path not in {*unread, *problems} and not store.exists(path):
            problems[path] = f"is missing; {STEP_RECORD} names it"
    for path, problem in problems.items():
        logging.warning("%s/%s %s; the step is read without it", store.root, path, problem)
    committed = nanoseconds(info.get("commit_timestamp_nsecs"))
    save_id = f"orbax-{committed}"
    if committed is None:
        committed, save_id = step_files.of(store).commit_of(folder)
    started = nanoseconds(info.get("init_timestamp_nsecs"))
    custom = info.get("custom_metadata")
    return OrbaxRecord(
        epoch=epoch,
        save_id=save_id,
        objects=False,
        plan="",
        nodes=(),
        items={},
        default_item=[n for n in folders if n not in _NO_ITEMS] == [paths.DEFAULT_ITEM],
        metrics=metrics or None,
        custom_metadata=custom if isinstance(custom, dict) else {},
        started_ns=committed if started is None else started,
        committed_ns=committed,
        timings={},
        folders=folders,
        handlers=recorded,
        problems=problems,
        unread=unread,
        sure=not problems and has_orbax_fields(info) and not _holds_steps(store, folder),
    )


def check(store: Store, folder: str, record: OrbaxRecord) -> None:
    """Raises DamagedError for the first thing that a finished step has and this one lacks, or that must not be read."""
    try:
        for name in (n for n, kind in step_files.of(store).look(folder).items() if kind == "link"):
            path = paths.join(folder, name)
            if not os.path.isfile(os.path.join(store.root, path)):  # a file that is elsewhere is read there
                raise DamagedError(
                    path,
                    f"is a symlink, which is not followed, so checkpoint {record.epoch} cannot be read here. Nothing "
                    "was changed: open the directory that the data lies in, or put the folder in the link's place",
                )
        step_files.of(store).check(folder)
        for entry in store.list(folder):
            if paths.TMP_SUFFIX in entry.name:
                item = entry.name.partition(paths.TMP_SUFFIX)[0]
                raise half_written(record.epoch, paths.join(folder, entry.name), f"item {item!r} was not finished")
        for name in record.handlers:
            if name not in record.folders and name not in _NO_ITEMS:
                raise half_written(record.epoch, paths.join(folder, name), f"is missing; {STEP_RECORD} names it")
        if not record.names:
            raise half_written(record.epoch, folder, "holds no item")
        for name in record.names:
            _check_item(store, paths.join(folder, record.folders[name]), name, record)
    except OSError as error:
        raise unreadable(folder, error) from error


def _check_item(store: Store, at: str, name: str, record: OrbaxRecord) -> None:
    """The same for one item in the folder `at`."""
    entries = {e.name: e.is_folder for e in store.list(at)}
    if not entries:
        raise half_written(record.epoch, at, "is an empty folder")
    if kind(store, at, name, record) != "arrays":
        if record.handlers.get(name, "").endswith(JSON_HANDLERS):
            files = sorted(n for n, is_folder in entries.items() if not is_folder and n != COMMIT)
            if not files:
                raise half_written(record.epoch, paths.join(at, paths.JSON_FILE), "is missing; expected JSON")
            if not store.size(paths.join(at, files[0])):
                raise half_written(record.epoch, paths.join(at, files[0]), "has 0 bytes; expected JSON")
        return
    if TREE_RECORD not in entries:
        if entries.get(AGGREGATE) is False:
            return
        found = f"the folder holds {', '.join(sorted(entries)[:6])}"
        problem = f"is missing; expected the tree of item {name!r} ({found})"
        raise half_written(record.epoch, paths.join(at, TREE_RECORD), problem)
    tree = tree_record(store, at, record.epoch)
    if tree.get("use_ocdbt") and OCDBT not in entries and _has_arrays(tree):  # without arrays Orbax writes no index
        expected = f"expected the index of the arrays of item {name!r}, as {TREE_RECORD} says"
        raise half_written(record.epoch, paths.join(at, OCDBT), f"is missing; {expected}")
    if OCDBT in entries and not store.size(paths.join(at, OCDBT)):
        raise half_written(record.epoch, paths.join(at, OCDBT), "has 0 bytes; expected the index of the arrays")
    rows = paths.join(at, ARRAY_RECORDS)
    if _has_jax_arrays(tree) and not (entries.get(ARRAY_RECORDS) and store.list(rows)):
        problem = f"is missing; expected what the jax arrays of item {name!r} are (PRNG keys among them)"
        raise half_written(record.epoch, rows, problem)


def kind(store: Store, at: str, name: str, record: OrbaxRecord) -> str:
    """What an item is: `arrays` (a pytree), `json`, or `other`: something of another handler."""
    handler = record.handlers.get(name, "")
    names = names_in(store, at)
    if handler.endswith(_ARRAY_HANDLERS) or names & (_TREE_MARKS | {ARRAY_RECORDS}) or _holds_arrays(store, at):
        return "arrays"
    if handler.endswith(JSON_HANDLERS) or (not handler and paths.JSON_FILE in names):
        return "json"
    return "other"


def nbytes(store: Store, folder: str) -> int:
    """See `StepFiles.nbytes`."""
    return step_files.of(store).nbytes(folder)


def _is_bare(entries: Mapping[str, bool], handlers: Any) -> bool:
    """Whether the tree of a single item lies in the step's folder itself, as a plain Checkpointer writes it."""
    if isinstance(handlers, dict | str):
        return isinstance(handlers, str)
    return any(entries.get(name) is False for name in _TREE_MARKS)


def _holds_steps(store: Store, folder: str) -> bool:
    """Whether something was saved below a step that is no part of it."""
    inner = [paths.join(folder, e.name) for e in store.list(folder) if e.is_folder]
    return any(store.exists(paths.join(at, name)) for at in inner for name in (STEP_RECORD, paths.EPOCH_RECORD))


def _has_arrays(tree: Mapping[str, Any]) -> bool:
    """Whether an item's `_METADATA` names a leaf that is stored as an array."""
    return any(row.get("value_type") in ARRAY_TYPES for row in _leaf_rows(tree))


def _has_jax_arrays(tree: Mapping[str, Any]) -> bool:
    """Whether an item's `_METADATA` names a leaf that has a row in `array_metadatas`."""
    return any(row.get("write_shape") is not None for row in _leaf_rows(tree))


def _leaf_rows(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an item's `_METADATA` says of the values of its leaves."""
    rows = [row.get("value_metadata") for row in tree["tree_metadata"].values() if isinstance(row, dict)]
    return [row for row in rows if isinstance(row, dict)]


def _holds_arrays(store: Store, at: str) -> bool:
    """Whether there is an array that is stored as a folder of its own."""
    return any(_ZARR & names_in(store, paths.join(at, e.name)) for e in store.list(at) if e.is_folder)
