"""Small records that only a directory on a file system has: of its mirror, and of the host whose disk it is on."""

from collections.abc import Callable
from typing import TypeVar

from epochckpt.format import parsing
from epochckpt.storage import Store

T = TypeVar("T")


def read(store: Store, path: str, parse: Callable[[str, bytes], T]) -> T | None:
    """What `parse` makes of a record's path and content; None if there is no such record. A bucket is not asked.

    Raises what `parsing.read_record` raises.
    """
    return None if store.local_path is None else parsing.read_record(store, path, parse)
