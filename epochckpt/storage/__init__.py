"""Where bytes lie: one small interface, `Store`, over POSIX folders and object stores.

Promises: data are durable when the call that says so returns; an existing file is never overwritten unless the caller
asks for it; an error of a store that does not answer is distinct from an error of the data. `epochckpt.testing` has the
tests that every store must pass.
"""

import os
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.storage.object_client import plain
from epochckpt.storage.object_store import ObjectStore
from epochckpt.storage.other_programs import fetch, local_folder, tensorstore_spec
from epochckpt.storage.posix import ALIGNMENT, PosixStore
from epochckpt.storage.schemes import SCHEMES, Scheme
from epochckpt.storage.schemes import of as scheme_of
from epochckpt.storage.store import (
    Conflicts,
    Entry,
    File,
    Reader,
    Store,
    Tally,
    Writer,
    patiently,
    read_json,
    rounds,
    writing,
)

__all__ = [
    "ALIGNMENT",
    "Conflicts",
    "Entry",
    "File",
    "PosixStore",
    "Reader",
    "Scheme",
    "Store",
    "Tally",
    "Writer",
    "expanded",
    "fetch",
    "local_folder",
    "open_file",
    "open_store",
    "opening_through",
    "path_text",
    "patiently",
    "plain",
    "read_json",
    "rounds",
    "scheme_of",
    "tensorstore_spec",
    "with_settings",
    "writing",
]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_outer = list[Callable[[Store], Store]]()  # what `opening_through` makes of every store
_COLLAPSED_URL = re.compile(rf"(?:{'|'.join(SCHEMES)}|hf|file|https?):/[^/]")  # not only those that are stores


def expanded(path: str) -> str:
    """The path with a leading `~` or `~user` replaced by that home directory."""
    return os.path.expanduser(path)


def path_text(path: str | os.PathLike[str], name: str = "the path") -> str:
    """The text of a path or URL; of `file:///a%20b` it is `/a b`.

    InvalidArgumentError, under `name`: it is neither, or a URL that `pathlib.Path` has damaged (`gs:/bucket`).
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(text, str) and text.startswith("file:///"):
        text = urllib.parse.unquote(text.removeprefix("file://"), errors="surrogateescape")
    if not isinstance(text, str) or not text or "\0" in text:
        text_of_it = repr(plain(text) if isinstance(text, str) and _URL.match(text) else path)
        raise InvalidArgumentError(f"{name} must be a path or URL, got {text_of_it:.100}")
    if isinstance(path, pathlib.PurePath) and _COLLAPSED_URL.match(text):
        shown = repr(text.partition("?")[0])
        raise InvalidArgumentError(
            f"{name} {shown} was a URL before pathlib.Path removed a slash; pass a str or an epath.Path"
        )
    return text


def open_store(
    directory: str | os.PathLike[str],
    *,
    folder_mode: int | None = None,
    settings: Mapping[str, Any] | None = None,
    cached_bytes: int = 0,
) -> Store:
    """Opens the store for a directory; reads and writes nothing.

    The directory is the URL of an object store (see `schemes`), or a POSIX path, made absolute now,
    with `~` expanded, also as `file:///path`. `folder_mode` are the permission bits of new POSIX folders; None leaves
    them to the umask. Files of at most `cached_bytes` stay in the page cache of a local disk. `settings` are those of a
    bucket (`StorageOptions.store`); the query of a URL comes before them.
    InvalidArgumentError: no such scheme, wrong settings, or see `path_text`.
    """
    name = path_text(directory, "the directory")
    if _URL.match(name):
        store: Store = ObjectStore(name, settings)
    else:
        store = PosixStore(expanded(name), folder_mode=folder_mode, cached_bytes=cached_bytes)
    for wrap in _outer:
        store = wrap(store)
    return store


@contextmanager
def opening_through(wrap: Callable[[Store], Store]) -> Generator[None]:
    """During the block, everything in this process that opens a store gets what `wrap` makes of the store.

    It is for tests, and for stores that count or trace: see `epochckpt.testing`.
    """
    _outer.append(wrap)
    try:
        yield
    finally:
        _outer.remove(wrap)


def with_settings(directory: str | os.PathLike[str], settings: Mapping[str, Any] | None) -> str | os.PathLike[str]:
    """The directory with settings of a bucket in the query of its URL, where its own come first; a path as it is."""
    if not settings or not _URL.match(path_text(directory)):
        return directory
    return ObjectStore(path_text(directory), settings).address


def open_file(path: str | os.PathLike[str], name: str = "the path") -> tuple[Store, str]:
    """The store of the folder of a file, and the file's name in it. Raises what `open_store` raises."""
    text = expanded(path_text(path, name))
    mark = ""
    query = ""
    if _URL.match(text):
        text, mark, query = text.partition("?")
    else:
        text = os.path.abspath(text)
    folder, _, file = text.rpartition("/")
    return open_store(f"{folder}/{mark}{query}"), file
