"""Which folders are steps of stock Orbax, and which are epochs of ours that lost their records: by content.

Retention deletes steps, so a name alone proves nothing: a sweep has `<seed>/<step>`, TensorFlow writes `checkpoint`,
zarr `.zarray`. POSIX only. A folder that is named like an epoch and has no `epoch.json` is

| what it holds | what it is |
| --- | --- |
| a mark of ours, see `lost_records` | one of ours that lost its records: no epoch, refused |
| `_CHECKPOINT_METADATA`, a JSON object with Orbax's fields | a step |
| `_METADATA`, a JSON object with a `tree_metadata` | a step without folders of items, without its record |
| a folder that is named like no epoch, and is no step itself, with such a `_METADATA` | a step without its record |
| anything else | foreign: refused |
"""

import errno
import functools
import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

from epochckpt.errors import DamagedError, StorageError, unreadable
from epochckpt.format import paths
from epochckpt.storage import Store, patiently

STEP_RECORD = "_CHECKPOINT_METADATA"
TREE_RECORD = "_METADATA"
COMMIT = "commit_success.txt"
OCDBT = "manifest.ocdbt"
ARRAY_RECORDS = "array_metadatas"
MAX_BYTES = 256 * 2**20

# Files of metadata, wherever they lie in a step.
_SMALL = frozenset({OCDBT, TREE_RECORD, STEP_RECORD, COMMIT, "_sharding", "_strings.json", "metadata"})
_SMALL |= {".zarray", ".zattrs", "zarr.json"}
_OUR_INDEX = "index.0"  # beside the manifest; Orbax's own databases have no such file
_OUR_RECORD = b'"format":"epochckpt"'  # early in every record of ours
_KEY_FOLDERS = ("jax_random_key", "np_random_key")  # where Orbax's items of random keys have their arrays
_JSON_HANDLER = "JsonCheckpointHandler"  # what the view says of a node's folder
_NO_RECORD = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP)  # no regular file of that name


def is_step(store: Store, folder: str, is_epoch: Callable[[str], bool]) -> bool:
    """Whether a folder without a commit record of ours is a step of stock Orbax; a deleted one is not."""
    if os.path.islink(_full(store, folder)):
        return False

    def holds_tree() -> bool:
        if _has_tree(store, folder, entries):
            return True
        inner = [n for n, kind in entries.items() if kind == "folder" and paths.TMP_SUFFIX not in n]
        items = [paths.join(folder, n) for n in inner if not n.isdigit() and not is_epoch(n)]
        # An item that has a record is a step that a plain Checkpointer wrote.
        return any(STEP_RECORD not in (found := look(store, at)) and _has_tree(store, at, found) for at in items)

    try:
        entries = look(store, folder)
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
    """A step's `_CHECKPOINT_METADATA`; None if there is none with Orbax's fields."""
    info, _ = read_object(store, paths.join(folder, STEP_RECORD))
    return info if info is not None and has_orbax_fields(info) else None


def has_orbax_fields(info: Mapping[str, Any]) -> bool:
    """Whether an object is what Orbax writes as a step's record."""
    times = (info.get("init_timestamp_nsecs"), info.get("commit_timestamp_nsecs"))
    return isinstance(info.get("item_handlers"), dict | str) or any(type(t) is int for t in times)


def read_object(store: Store, path: str) -> tuple[dict[str, Any] | None, str]:
    """A JSON object, or None and what is wrong with the file; nothing is wrong where there is none.

    An OSError says that the file cannot be read now, or not by this user, and nothing about its content.
    """
    try:
        data = json.loads(store.read(path, limit_bytes=MAX_BYTES))
    except OSError as error:
        if error.errno not in _NO_RECORD and not isinstance(unreadable(path, error), DamagedError):
            raise unreadable(path, error) from error
        return None, "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else f"cannot be read: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"is no JSON: {error}"
    return (data, "") if isinstance(data, dict) else (None, "is no JSON object")


def look(store: Store, at: str) -> dict[str, str]:
    """The entries of a folder by name: `folder`, `link` (not followed), `file`, or `other`: a pipe or a device."""
    place = _full(store, at)

    def read() -> list[tuple[str, str]]:
        with os.scandir(place) as entries:
            return [
                (e.name, _kind(e.is_symlink(), e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)))
                for e in entries
            ]

    return dict(sorted(patiently(place, read)))


def check_files(store: Store, at: str) -> None:
    """Raises DamagedError for the first thing below a folder that Orbax and TensorStore would read and must not.

    A symlink that leads out of the directory, which could be any file of this user's; a pipe, for which TensorStore
    would wait for ever; a file of metadata that is larger than any, which TensorStore takes into memory as a whole: a
    sparse one of a terabyte ends the process. Links inside the directory are followed.
    """
    root = os.path.realpath(store.root)
    waiting, seen = [(at, os.path.realpath(_full(store, at)))], set[str]()
    while waiting:
        folder, place = waiting.pop()
        if place in seen:  # links may lead in a circle
            continue
        seen.add(place)
        for name, kind in look(store, place).items():
            path, target = paths.join(folder, name), os.path.join(place, name)
            if kind == "link":
                target = os.path.realpath(target)
                if os.path.commonpath([root, target]) != root:
                    raise DamagedError(
                        path,
                        f"is a symlink that leads out of {store.root}, to {target}: not followed. Nothing was changed: "
                        "put the file itself in the link's place",
                    )
                kind = _kind_of(path, target)
            if kind == "folder":
                waiting.append((path, target))
            elif kind == "other":
                raise DamagedError(path, "is neither a file nor a folder, but a pipe or a device: it is not read")
            elif kind == "file" and (name in _SMALL or os.path.basename(place) == ARRAY_RECORDS):
                try:
                    size = os.path.getsize(target)
                except OSError:  # reading it will fail, too
                    continue
                if size > MAX_BYTES:
                    problem = f"has {size} bytes; expected at most {MAX_BYTES} of such a file: it is not read"
                    raise DamagedError(path, problem)


def _kind(link: bool, folder: bool, file: bool) -> str:
    return "link" if link else "folder" if folder else "file" if file else "other"


def _kind_of(path: str, target: str) -> str:
    """The same of what a link leads to; `nothing` if that is missing."""
    try:
        mode = patiently(path, functools.partial(os.stat, target)).st_mode
    except StorageError:
        raise
    except OSError:  # missing, or a link to itself
        return "nothing"
    return _kind(False, stat.S_ISDIR(mode), stat.S_ISREG(mode))


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
    """The first bytes of a file; empty if it is none that can be read."""
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
