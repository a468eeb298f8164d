"""Where other programs find the files of a store: a path on this host, or the address in a bucket for TensorStore."""

import contextlib
import os
import tempfile
from collections.abc import Collection, Generator
from typing import Any

from epochckpt.storage import schemes
from epochckpt.storage.store import Store


@contextlib.contextmanager
def local_folder(store: Store, folder: str, names: Collection[str] | None = None) -> Generator[str]:
    """A path of a folder, or of these files in it, that any program can read; of a bucket a copy that is removed."""
    if store.local_path is not None:
        yield os.path.join(store.local_path, folder)
        return
    with tempfile.TemporaryDirectory(prefix="epochckpt-") as copy:
        fetch(store, folder, copy, names)
        yield copy


def fetch(store: Store, folder: str, into: str, names: Collection[str] | None = None) -> None:
    """Copies the files of a folder in a bucket, or those of these `names`, to a local folder."""

    def fetch_one(name: str) -> None:
        place = os.path.join(into, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with store.open_reader(f"{folder}/{name}" if folder else name) as reader, open(place, "wb") as file:
            for piece in reader.pieces():
                file.write(piece)

    store.each(fetch_one, [file.path for file in store.files(folder)] if names is None else names)


def tensorstore_spec(store: Store, folder: str) -> dict[str, Any] | None:
    """The key-value store of TensorStore that is a folder; None if TensorStore cannot reach it.

    It reads file systems, and buckets for which it has a driver (see `schemes`). Its server is the cloud's own, or the
    one that an environment variable names; no setting changes it.
    """
    if store.local_path is not None:
        return {"driver": "file", "path": f"{os.path.join(store.local_path, folder)}/"}
    driver = schemes.of(store.root).tensorstore
    if driver is None:
        return None
    asked = os.environ.get(driver.server_variable, "").rstrip("/") or driver.server
    if (store.endpoint or driver.server) != asked:
        return None
    bucket, _, path = os.path.join(store.root, folder).partition("://")[2].partition("/")
    return {"driver": driver.name, "bucket": bucket, "path": f"{path}/"}
