"""Finds the steps of stock Orbax among folders, and tells them from epochs of ours that lost their records.

Retention deletes steps, so a name alone proves nothing: a sweep has `<seed>/<step>`, TensorFlow writes `checkpoint`,
zarr `.zarray`. A folder that is named like an epoch and has no `epoch.json` is

| what it holds | what it is |
| --- | --- |
| a mark of ours, see `lost_records` | one of ours that lost its records: no epoch, refused |
| `_CHECKPOINT_METADATA`, a JSON object with Orbax's fields | a step |
| `_METADATA`, a JSON object with a `tree_metadata` | a step without folders of items, without its record |
| a folder that is named like no epoch, and is no step itself, with such a `_METADATA` | a step without its record |
| anything else | foreign: refused |

Orbax renames a finished step into place, so its folder under its final name is finished unless files were lost. On
`gs://` it writes it in place, and `commit_success.txt` last: without that file the folder is foreign.
`orbax.step_files` has what differs between the two.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from epochckpt.errors import StorageError
from epochckpt.format import paths
from epochckpt.orbax import step_files
from epochckpt.orbax.small_files import JSON_HANDLERS, nanoseconds, read_object, step_record
from epochckpt.orbax.step_files import COMMIT, OCDBT, OUR_COMMIT, STEP_RECORD, TREE_RECORD
from epochckpt.storage import Store, patiently

_OUR_INDEX = "index.0"  # beside the manifest; Orbax's own databases have no such file
_OUR_RECORD = b'"format":"epochckpt"'  # early in every record of ours
_KEY_FOLDERS = ("jax_random_key", "np_random_key")  # where Orbax's items of random keys have their arrays


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
    committed = nanoseconds(info.get("commit_timestamp_nsecs"))
    return save_id != f"orbax-{committed}" if committed is not None else not save_id.startswith("orbax-folder-")


def is_finished(store: Store, folder: str) -> bool:
    """Whether a step's record has a time of commit. While Orbax writes a step, its record has none."""
    return nanoseconds((step_record(store, folder) or {}).get("commit_timestamp_nsecs")) is not None


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


def look(store: Store, at: str) -> dict[str, str]:
    """See `StepFiles.look`."""
    return step_files.of(store).look(at)


def _is_ours(store: Store, folder: str, entries: Mapping[str, str], record: Mapping[str, Any] | None) -> bool:
    if entries.get(COMMIT) == "file" and _start(store, paths.join(folder, COMMIT)) == OUR_COMMIT:
        return True
    handlers = (record or {}).get("item_handlers")
    for name in (n for n, kind in entries.items() if kind == "folder"):
        known = handlers.get(name, "") if isinstance(handlers, dict) else ""
        others = isinstance(known, str) and known != "" and not known.endswith(JSON_HANDLERS)
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
