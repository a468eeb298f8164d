"""The small files of a step of stock Orbax, which are JSON, and the names that its arrays have on storage."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from epochckpt.errors import DamagedError, FormatError, unreadable
from epochckpt.format import checksums, paths
from epochckpt.orbax.step_files import ARRAY_RECORDS, MAX_BYTES, STEP_RECORD, TREE_RECORD
from epochckpt.storage import Store, read_json

_NO_RECORD = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP)  # no regular file of that name
# Of v0 and v1; the view says v0's of a node's folder.
JSON_HANDLERS = ("JsonCheckpointHandler", "json_handler.JsonHandler")


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


def array_key(param: str, file: str) -> str:
    """The key of a file of an array, as TensorStore makes it of Orbax's name for the array: with one slash."""
    return f"{param.removesuffix('/')}/{file}" if param not in ("", "/") else file


def prng_impls(store: Store, at: str) -> dict[str, str]:
    """The PRNG implementation of each typed key of an item, by Orbax's parameter name."""
    found: dict[str, str] = {}
    if ARRAY_RECORDS not in names_in(store, at):
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


def names_in(store: Store, at: str) -> set[str]:
    """The names of the files and folders in a folder."""
    return {e.name for e in store.list(at)}


def nanoseconds(value: Any) -> int | None:
    """A time of a record; None if it is none."""
    return value if type(value) is int and value >= 0 else None
