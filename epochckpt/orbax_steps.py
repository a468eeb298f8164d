"""Steps that stock Orbax wrote: which folders are such steps, what their small files say, and what is missing.

Reads JSON and lists folders, nothing else; the arrays are read by Orbax's own handlers (`orbax_reader`). On POSIX
Orbax renames a finished step into place, so its folder under its final name is finished unless files were lost.

| folder, without `epoch.json` | what it is |
| --- | --- |
| has a folder with a `node.json` | one of ours that lost its commit record: no epoch, refused |
| has `_CHECKPOINT_METADATA` or `commit_success.txt`, or a file or folder that only Orbax's handlers write | a step |
| anything else | somebody else's: refused |
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from absl import logging

from epochckpt import layout
from epochckpt.errors import DamagedError, FormatError, unreadable
from epochckpt.records import EpochRecord
from epochckpt.store import Store

STEP_RECORD = "_CHECKPOINT_METADATA"
TREE_RECORD = "_METADATA"
ARRAY_RECORDS = "array_metadatas"
AGGREGATE = "checkpoint"  # a whole tree as msgpack, or its structure: before there was a `_METADATA`
METRICS = "metrics"

_COMMIT = "commit_success.txt"
_OCDBT = "manifest.ocdbt"
_ZARR = frozenset({".zarray", "zarr.json"})
_TREE_MARKS = frozenset({TREE_RECORD, _OCDBT, ARRAY_RECORDS, "_sharding", "_strings.json"})
_MARKS = _TREE_MARKS | _ZARR | {_COMMIT, AGGREGATE}
_NO_ITEMS = frozenset({METRICS, "descriptor"})  # folders that Orbax's manager keeps for itself
_ARRAY_HANDLERS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler", "ArrayCheckpointHandler")
_MAX_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class OrbaxRecord(EpochRecord):
    """What the files of a step of stock Orbax say; takes the place of `epoch.json`. It has no nodes of ours.

    Attributes:
        folders: folder of each item, relative to the step's; `""` in the old layout that has no folders of items.
        handlers: the handler that Orbax recorded for each item, as far as it did.
    """

    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The items, without Orbax's own."""
        return [name for name in self.folders if name not in _NO_ITEMS]


def is_step(store: Store, folder: str) -> bool:
    """Whether a folder without a commit record of ours is a step of stock Orbax; see the table above."""
    try:
        entries = {e.name: e.is_folder for e in store.list(folder)}
        inner = [layout.join(folder, name) for name, is_folder in entries.items() if is_folder]
        if any(store.exists(layout.join(at, layout.NODE_RECORD)) for at in inner):
            return False
        if {STEP_RECORD, _COMMIT} & entries.keys() or _is_bare(entries):
            return True
        return any(layout.TMP_SUFFIX in at or _names(store, at) & _MARKS or _holds_arrays(store, at) for at in inner)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
        return False


def read(store: Store, folder: str, epoch: int) -> OrbaxRecord:
    """What Orbax recorded of a step.

    Raises:
        FileNotFoundError: it is gone.
    """
    entries = {e.name: e.is_folder for e in store.list(folder)}
    info = _json(store, layout.join(folder, STEP_RECORD)) if STEP_RECORD in entries else {}
    handlers = info.get("item_handlers")
    if _is_bare(entries) or isinstance(handlers, str):
        folders = {layout.DEFAULT_ITEM: ""}
        handlers = {layout.DEFAULT_ITEM: handlers}
    else:
        folders = {n: n for n, is_folder in sorted(entries.items()) if is_folder and layout.TMP_SUFFIX not in n}
    metrics = _json(store, layout.join(folder, METRICS, METRICS)) if METRICS in folders else None
    committed = _nanoseconds(info.get("commit_timestamp_nsecs"))
    if committed is None:  # what Orbax takes, too
        committed = os.stat(os.path.join(store.root, folder)).st_mtime_ns
    started = _nanoseconds(info.get("init_timestamp_nsecs"))
    custom = info.get("custom_metadata")
    return OrbaxRecord(
        epoch=epoch,
        attempt=f"orbax-{committed}",
        objects=False,
        plan="",
        nodes=(),
        items={},
        default_item=[n for n in folders if n not in _NO_ITEMS] == [layout.DEFAULT_ITEM],
        metrics=metrics or None,
        custom_metadata=custom if isinstance(custom, dict) else {},
        started_ns=committed if started is None else started,
        committed_ns=committed,
        timings={},
        folders=folders,
        handlers={n: h for n, h in handlers.items() if isinstance(h, str)} if isinstance(handlers, dict) else {},
    )


def check(store: Store, folder: str, record: OrbaxRecord) -> None:
    """Looks for what a step that was written to its end has, without reading arrays.

    Raises:
        DamagedError: the first thing that is missing; says where, what was found and what to do.
    """
    try:
        entries = store.list(folder)
        for entry in entries:
            if layout.TMP_SUFFIX in entry.name:
                item = entry.name.partition(layout.TMP_SUFFIX)[0]
                raise half_written(record.epoch, layout.join(folder, entry.name), f"item {item!r} was not finished")
        for name in record.handlers:
            if name not in record.folders and name not in _NO_ITEMS:
                raise half_written(record.epoch, layout.join(folder, name), f"is missing; {STEP_RECORD} names it")
        if not record.names:
            raise half_written(record.epoch, folder, "holds no item")
        for name in record.names:
            _check_item(store, layout.join(folder, record.folders[name]), name, record)
    except OSError as error:
        raise unreadable(folder, error) from error


def _check_item(store: Store, at: str, name: str, record: OrbaxRecord) -> None:
    """The same for one item in the folder `at`."""
    entries = {e.name: e.is_folder for e in store.list(at)}
    if not entries:
        raise half_written(record.epoch, at, "is an empty folder")
    if kind(store, at, name, record) != "arrays":
        if record.handlers.get(name, "").endswith("JsonCheckpointHandler") and not store.size(
            _first_file(at, entries, record.epoch)
        ):
            raise half_written(record.epoch, _first_file(at, entries, record.epoch), "has 0 bytes; expected JSON")
        return
    if TREE_RECORD not in entries:
        if entries.get(AGGREGATE) is False:
            return
        found = f"the folder holds {', '.join(sorted(entries)[:6])}"
        problem = f"is missing; expected the tree of item {name!r} ({found})"
        raise half_written(record.epoch, layout.join(at, TREE_RECORD), problem)
    tree = tree_record(store, at, record.epoch)
    if tree.get("use_ocdbt") and _OCDBT not in entries:
        expected = f"expected the index of the arrays of item {name!r}, as {TREE_RECORD} says"
        raise half_written(record.epoch, layout.join(at, _OCDBT), f"is missing; {expected}")
    if _OCDBT in entries and not store.size(layout.join(at, _OCDBT)):
        raise half_written(record.epoch, layout.join(at, _OCDBT), "has 0 bytes; expected the index of the arrays")


def tree_record(store: Store, at: str, epoch: int) -> dict[str, Any]:
    """An item's `_METADATA`.

    Raises:
        DamagedError: it cannot be used.
    """
    path = layout.join(at, TREE_RECORD)
    try:
        data = store.read(path, limit_bytes=_MAX_BYTES)
        tree = json.loads(data)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise half_written(epoch, path, f"is no JSON ({error}); expected the tree of the item") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("tree_metadata"), dict):
        raise half_written(epoch, path, "has no tree_metadata")
    return tree


def kind(store: Store, at: str, name: str, record: OrbaxRecord) -> str:
    """What an item is: `arrays` (a pytree), `json`, or `other`: something of another handler."""
    handler = record.handlers.get(name, "")
    names = _names(store, at)
    if handler.endswith(_ARRAY_HANDLERS) or names & (_TREE_MARKS | {AGGREGATE}) or _holds_arrays(store, at):
        return "arrays"
    if handler.endswith("JsonCheckpointHandler") or (not handler and layout.JSON_FILE in names):
        return "json"
    return "other"


def half_written(epoch: int, path: str, problem: str) -> DamagedError:
    """The error for a step that is not whole: where, what, and what to do."""
    return DamagedError(
        path,
        f"{problem}. Stock Orbax did not finish epoch {epoch}, or it was damaged since. "
        f"Nothing was changed: restore an older epoch, or remove this one with delete({epoch})",
    )


def nbytes(store: Store, folder: str) -> int:
    """Bytes of all files of a step."""
    return sum(
        store.size(path) if not entry.is_folder else nbytes(store, path)
        for entry in store.list(folder)
        for path in [layout.join(folder, entry.name)]
    )


def prng_impls(store: Store, at: str) -> dict[str, str]:
    """The PRNG implementation of each typed key of an item, by Orbax's parameter name."""
    found: dict[str, str] = {}
    if ARRAY_RECORDS not in _names(store, at):
        return found
    for entry in store.list(layout.join(at, ARRAY_RECORDS)):
        path = layout.join(at, ARRAY_RECORDS, entry.name)
        try:
            for row in json.loads(store.read(path, limit_bytes=_MAX_BYTES))["array_metadatas"]:
                one = row["array_metadata"]
                impl = (one.get("ext_metadata") or {}).get("random_key_impl")
                if impl is not None:
                    found[str(one["param_name"])] = str(impl)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(path, f"is not what Orbax writes there: {error!r}") from None
    return found


def _is_bare(entries: Mapping[str, bool]) -> bool:
    """Whether the tree of a single item lies in the step's folder itself, as a plain Checkpointer writes it."""
    return bool(_TREE_MARKS & entries.keys()) or entries.get(AGGREGATE) is False


def _holds_arrays(store: Store, at: str) -> bool:
    """Whether there is an array that is stored as a folder of its own."""
    return any(_ZARR & _names(store, layout.join(at, e.name)) for e in store.list(at) if e.is_folder)


def _names(store: Store, at: str) -> set[str]:
    return {e.name for e in store.list(at)}


def _first_file(at: str, entries: Mapping[str, bool], epoch: int) -> str:
    files = sorted(n for n, is_folder in entries.items() if not is_folder and n != _COMMIT)
    if not files:
        raise half_written(epoch, layout.join(at, layout.JSON_FILE), "is missing; expected JSON")
    return layout.join(at, files[0])


def _json(store: Store, path: str) -> dict[str, Any]:
    """A small JSON object that the step can be read without; empty if it cannot be used, which is logged."""
    try:
        data = json.loads(store.read(path, limit_bytes=_MAX_BYTES))
        if isinstance(data, dict):
            return data
        problem = "is no JSON object"
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        problem = f"is no JSON: {error}"
    logging.warning("%s/%s %s; the step is read without it", store.root, path, problem)
    return {}


def _nanoseconds(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
