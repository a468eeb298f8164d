"""Steps that stock Orbax wrote: finds them among folders, reads their small files, and reports missing files.

Reads JSON and lists folders, on POSIX and on `gs://`; `orbax.leaves` reads the arrays. Retention deletes steps, so a
name alone proves nothing: a sweep has `<seed>/<step>`, TensorFlow writes `checkpoint`, zarr `.zarray`. A folder that is
named like an epoch and has no `epoch.json` is

| what it holds | what it is |
| --- | --- |
| a mark of ours, see `lost_records` | one of ours that lost its records: no epoch, refused |
| `_CHECKPOINT_METADATA`, a JSON object with Orbax's fields | a step |
| `_METADATA`, a JSON object with a `tree_metadata` | a step without folders of items, without its record |
| a folder that is named like no epoch, and is no step itself, with such a `_METADATA` | a step without its record |
| anything else | foreign: refused |

Orbax renames a finished step into place, so its folder under its final name is finished unless files were lost. On
`gs://` it writes it in place, and `commit_success.txt` last: without that file the folder is foreign.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from absl import logging

from epochckpt.errors import DamagedError, FormatError, StorageError, kept, unreadable
from epochckpt.format import EpochRecord, checksums, paths
from epochckpt.orbax import step_files
from epochckpt.orbax.step_files import ARRAY_RECORDS, COMMIT, MAX_BYTES, OCDBT, STEP_RECORD, TREE_RECORD
from epochckpt.storage import Store, patiently, read_json

AGGREGATE = "checkpoint"  # a whole tree as msgpack, or its structure: before there was a `_METADATA`
METRICS = "metrics"
ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")  # of leaves, as `_METADATA` names them: those stored as arrays

_OUR_INDEX = "index.0"  # beside the manifest; Orbax's own databases have no such file
_OUR_RECORD = b'"format":"epochckpt"'  # early in every record of ours
_KEY_FOLDERS = ("jax_random_key", "np_random_key")  # where Orbax's items of random keys have their arrays
_NO_RECORD = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP)  # no regular file of that name
_ZARR = frozenset({".zarray", "zarr.json"})
_TREE_MARKS = frozenset({TREE_RECORD, OCDBT, "_sharding", "_strings.json", AGGREGATE})  # files
_NO_ITEMS = frozenset({METRICS, "descriptor"})  # folders that Orbax's manager keeps for itself
_ARRAY_HANDLERS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler", "ArrayCheckpointHandler")
_JSON_HANDLER = (
    "JsonCheckpointHandler",
    "json_handler.JsonHandler",
)  # v0 and v1; the view says v0's of a node's folder


def is_step(store: Store, folder: str, is_epoch: Callable[[str], bool]) -> bool:
    """Whether a folder without a commit record of ours is a step of stock Orbax; a deleted one is not."""
    files = step_files.of(store)
    if not files.may_be_step(folder):
        return False

    def holds_tree() -> bool:
        if _has_tree(store, folder, entries):
            return True
        inner = [n for n, kind in entries.items() if kind == "folder" and paths.TMP_SUFFIX not in n]
        items = [paths.join(folder, n) for n in inner if not n.isdigit() and not is_epoch(n)]
        # An item that has a record is a step that a plain Checkpointer wrote.
        return any(STEP_RECORD not in (found := look(store, at)) and _has_tree(store, at, found) for at in items)

    try:
        entries = files.look(folder)
        if not files.is_committed(entries):
            return False
        try:
            record = step_record(store, folder)
        except StorageError:  # a bad sector: it does not matter where the folder is a step without it, too
            record = None
            if not holds_tree():
                raise
        else:
            if record is None and not holds_tree():
                return False
        return not _is_ours(store, folder, entries, record)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
        return False


def is_other(store: Store, folder: str, save_id: str) -> bool:
    """Whether a folder has the record of another step than this attempt (see `read`), or of one that is being written.

    A folder without a record may be what is left of any.
    """
    info = step_record(store, folder)
    if info is None:
        return False
    committed = _nanoseconds(info.get("commit_timestamp_nsecs"))
    return save_id != f"orbax-{committed}" if committed is not None else not save_id.startswith("orbax-folder-")


def is_finished(store: Store, folder: str) -> bool:
    """Whether a step's record has a time of commit. While Orbax writes a step, its record has none."""
    return _nanoseconds((step_record(store, folder) or {}).get("commit_timestamp_nsecs")) is not None


def is_our_record(store: Store, path: str) -> bool:
    """Whether a file is a record of ours, such as the copy of a node's in the view."""
    return _OUR_RECORD in _start(store, path)


def lost_records(store: Store, folder: str) -> bool:
    """Whether a folder without a commit record is an epoch of ours: its bytes would be read unverified.

    Its marks: `node.json`, the data files or the link of a node; links of the Orbax view; what the view says in
    `commit_success.txt`. An export to Orbax's form has none of them: it is a step.
    """
    try:
        return _is_ours(store, folder, look(store, folder), step_record(store, folder))
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
        return False


def step_record(store: Store, folder: str) -> dict[str, Any] | None:
    """A step's `_CHECKPOINT_METADATA`; None if the file is missing or lacks Orbax's fields."""
    info, _ = read_object(store, paths.join(folder, STEP_RECORD))
    return info if info is not None and has_orbax_fields(info) else None


def has_orbax_fields(info: Mapping[str, Any]) -> bool:
    """Whether an object is what Orbax writes as a step's record."""
    times = (info.get("init_timestamp_nsecs"), info.get("commit_timestamp_nsecs"))
    return isinstance(info.get("item_handlers"), dict | str) or any(type(t) is int for t in times)


def read_object(store: Store, path: str) -> tuple[dict[str, Any] | None, str]:
    """A JSON object; or None and what is wrong with the file, which is empty if the file is missing.

    An OSError says that the file cannot be read now, or not by this user, and nothing about its content.
    """
    try:
        data = read_json(store, path, limit_bytes=MAX_BYTES)
        checksums.unpack_json(data)  # refuses what is nested too deeply to be looked at
    except OSError as error:
        if error.errno not in _NO_RECORD and not isinstance(unreadable(path, error), DamagedError):
            raise unreadable(path, error) from error
        return None, "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else f"cannot be read: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"is no JSON: {error}"
    return (data, "") if isinstance(data, dict) else (None, "is no JSON object")


def _json(store: Store, path: str, problems: dict[str, str], unread: dict[str, StorageError]) -> dict[str, Any]:
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


def look(store: Store, at: str) -> dict[str, str]:
    """See `StepFiles.look`."""
    return step_files.of(store).look(at)


def _is_ours(store: Store, folder: str, entries: Mapping[str, str], record: Mapping[str, Any] | None) -> bool:
    if entries.get(COMMIT) == "file" and b"epochckpt" in _start(store, paths.join(folder, COMMIT)):
        return True
    handlers = (record or {}).get("item_handlers")
    for name in (n for n, kind in entries.items() if kind == "folder"):
        known = handlers.get(name, "") if isinstance(handlers, dict) else ""
        others = isinstance(known, str) and known != "" and not known.endswith(_JSON_HANDLER)
        at = paths.join(folder, name)
        inner = look(store, at)
        if paths.NODE_RECORD in inner or _links_to_node(store, at, inner):
            return True
        if inner.get(paths.JSON_FILE) == "file" and _OUR_RECORD in _start(store, paths.join(at, paths.JSON_FILE)):
            return True  # the link to a node's record, followed by a copy
        if not others and any(n.endswith(paths.DATA_SUFFIX) and k == "file" for n, k in inner.items()):
            return True  # others: files of a user's handler
        deeper = [paths.join(at, n) for n in _KEY_FOLDERS if inner.get(n) == "folder"]
        if _is_linked_index(inner) or any(_is_linked_index(look(store, d)) for d in deeper):
            return True
    return False


def _has_tree(store: Store, at: str, entries: Mapping[str, str]) -> bool:
    if entries.get(TREE_RECORD, "folder") == "folder":
        return False
    tree, _ = read_object(store, paths.join(at, TREE_RECORD))
    return tree is not None and isinstance(tree.get("tree_metadata"), dict)


def _is_linked_index(entries: Mapping[str, str]) -> bool:
    return _OUR_INDEX in entries and OCDBT in entries and "link" in entries.values()


def _links_to_node(store: Store, at: str, entries: Mapping[str, str]) -> bool:
    """Whether a link of the view is there: `metadata -> node.json`, or `<file> -> ../<node>/<item>/<file>`."""
    item = at.rpartition("/")[2]
    for name in (n for n, kind in entries.items() if kind == "link"):
        path = os.path.join(_full(store, at), name)
        target = patiently(path, functools.partial(os.readlink, path))
        if target == paths.NODE_RECORD or (target.startswith("../") and target.endswith(f"/{item}/{name}")):
            return True
    return False


def _start(store: Store, path: str) -> bytes:
    """The first bytes of a file; empty if it cannot be read."""
    try:
        with store.open_reader(path) as reader:
            data = bytearray(min(reader.size, 256))
            reader.read_into(0, memoryview(data))
            return bytes(data)
    except StorageError:
        raise
    except (OSError, EOFError):
        return b""


def _full(store: Store, at: str) -> str:
    return os.path.join(store.root, at)


@dataclasses.dataclass(frozen=True)
class OrbaxRecord(EpochRecord):
    """What the files of a step of stock Orbax say; takes the place of `epoch.json`. It has no nodes of ours."""

    # The folder of each item in the step's; "" in the old layout, which has no folders of items.
    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as far as Orbax recorded them
    # What is wrong, by path, with small files that the step is read without. Those that storage did not give may be
    # good, and the record without them wrong.
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: Mapping[str, StorageError] = dataclasses.field(default_factory=dict)
    sure: bool = False  # nothing is missing that says what the folder is and how good; else retention leaves it alone

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
    info = _json(store, paths.join(folder, STEP_RECORD), problems, unread)
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
        metrics = _json(store, path, problems, unread)
        if METRICS in recorded and not metrics and path not in {*unread, *problems} and not store.exists(path):
            problems[path] = f"is missing; {STEP_RECORD} names it"
    for path, problem in problems.items():
        logging.warning("%s/%s %s; the step is read without it", store.root, path, problem)
    committed = _nanoseconds(info.get("commit_timestamp_nsecs"))
    save_id = f"orbax-{committed}"
    if committed is None:
        committed, save_id = step_files.of(store).commit_of(folder)
    started = _nanoseconds(info.get("init_timestamp_nsecs"))
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
        for name in (n for n, kind in look(store, folder).items() if kind == "link"):
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
        if record.handlers.get(name, "").endswith(_JSON_HANDLER):
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


def tree_record(store: Store, at: str, epoch: int) -> dict[str, Any]:
    """An item's `_METADATA`; DamagedError if it cannot be used."""
    path = paths.join(at, TREE_RECORD)
    try:
        tree = read_json(store, path, limit_bytes=MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise half_written(epoch, path, "is missing; expected the tree of the item") from error
    except OSError as error:  # says nothing about the content: no reason to delete anything
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise half_written(epoch, path, f"is no JSON: {error}; expected the tree of the item") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("tree_metadata"), dict):
        raise half_written(epoch, path, "has no tree_metadata")
    return tree


def kind(store: Store, at: str, name: str, record: OrbaxRecord) -> str:
    """What an item is: `arrays` (a pytree), `json`, or `other`: something of another handler."""
    handler = record.handlers.get(name, "")
    names = _names(store, at)
    if handler.endswith(_ARRAY_HANDLERS) or names & (_TREE_MARKS | {ARRAY_RECORDS}) or _holds_arrays(store, at):
        return "arrays"
    if handler.endswith(_JSON_HANDLER) or (not handler and paths.JSON_FILE in names):
        return "json"
    return "other"


def json_file(store: Store, at: str) -> str:
    """The file of an item of JSON: v0 and v1 have different names for it."""
    return next(
        (name for name in (paths.JSON_FILE, "data.json") if store.exists(paths.join(at, name))), paths.JSON_FILE
    )


def half_written(epoch: int, path: str, problem: str, leaf: str | None = None) -> DamagedError:
    """The error for a step that is not whole: where, what, and what to do."""
    return DamagedError(
        path,
        f"{problem}. Stock Orbax did not finish checkpoint {epoch}, or files of it were lost or damaged since. Nothing "
        "was changed: restore an older one, or repair this one from a whole copy of it. What is left of it may still "
        f"be of use; if nobody needs it, delete({epoch}) removes it",
        leaf,
    )


def unexpected(path: str, error: Exception) -> FormatError:
    """The error for a file that was understood as JSON, but not as what Orbax writes there."""
    return FormatError(path, f"is not what Orbax writes there: {error!r}")


def nbytes(store: Store, folder: str) -> int:
    """See `StepFiles.nbytes`."""
    return step_files.of(store).nbytes(folder)


def array_key(param: str, file: str) -> str:
    """The key of a file of an array, as TensorStore makes it of Orbax's name for the array: with one slash."""
    return f"{param.removesuffix('/')}/{file}" if param not in ("", "/") else file


def prng_impls(store: Store, at: str) -> dict[str, str]:
    """The PRNG implementation of each typed key of an item, by Orbax's parameter name."""
    found: dict[str, str] = {}
    if ARRAY_RECORDS not in _names(store, at):
        return found
    for entry in store.list(paths.join(at, ARRAY_RECORDS)):
        path = paths.join(at, ARRAY_RECORDS, entry.name)
        try:
            for row in read_json(store, path, limit_bytes=MAX_BYTES)["array_metadatas"]:
                one = row["array_metadata"]
                impl = (one.get("ext_metadata") or {}).get("random_key_impl")
                if impl is not None:
                    found[str(one["param_name"])] = str(impl)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise unexpected(path, error) from None
    return found


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
    return any(_ZARR & _names(store, paths.join(at, e.name)) for e in store.list(at) if e.is_folder)


def _names(store: Store, at: str) -> set[str]:
    return {e.name for e in store.list(at)}


def _nanoseconds(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
