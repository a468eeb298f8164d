"""Where other programs find the files of an item of stock Orbax: TensorStore, and Orbax's handlers.

TensorStore reads file systems, and buckets for which it has a driver (see `storage.schemes`). Its server is the cloud's
own, or the one that an environment variable names; no setting changes it. If our server is another one, TensorStore
reads a local copy.
"""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Generator
from typing import Any

from absl import logging

from epochckpt.format import paths
from epochckpt.storage import Store, scheme_of

_RETRIES = {"max_retries": 8, "initial_delay": "0.2s", "max_delay": "8s"}  # of a request to a bucket: half a minute


@contextlib.contextmanager
def local_folder(store: Store, at: str, names: Collection[str] | None = None) -> Generator[str]:
    """A path of a folder, or of these files in it, that any program can read; of a bucket a copy that is removed."""
    if store.local_path is not None:
        yield os.path.join(store.local_path, at)
        return
    with tempfile.TemporaryDirectory(prefix="epochckpt-") as folder:
        _fetch(store, at, folder, names)
        yield folder


def _fetch(store: Store, at: str, folder: str, names: Collection[str] | None = None) -> None:
    def fetch(name: str) -> None:
        place = os.path.join(folder, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with store.open_reader(paths.join(at, name)) as reader, open(place, "wb") as file:
            for piece in reader.pieces():
                file.write(piece)

    store.each(fetch, [file.path for file in store.files(at)] if names is None else names)


class TensorFiles:
    """The folder of an item, for TensorStore; a copy of it goes with this object."""

    def __init__(self, store: Store, at: str):
        self._store = store
        self._at = at
        self._copy = ""

    def resources(self, reads: int) -> dict[str, Any]:
        """What its context bounds: so many reads at once, and the settings of the bucket."""
        asked = self._store.settings
        retries = dict[str, Any](_RETRIES)
        retries |= {"max_retries": asked["retries"]} if "retries" in asked else {}
        for name, setting in (("initial_delay", "first_retry_secs"), ("max_delay", "longest_retry_secs")):
            retries |= {name: f"{asked[setting]:g}s"} if setting in asked else {}
        concurrency = {"limit": asked.get("concurrency", reads)}
        found = {"file_io_concurrency": {"limit": reads}, "gcs_request_concurrency": concurrency}
        found["gcs_request_retries"] = retries
        if payer := asked.get("requester_pays"):
            found["gcs_user_project"] = {"project_id": payer}
        return found

    def kvstore(self) -> dict[str, Any]:
        """The spec of the folder as a key-value store; the first call may make the copy."""
        if self._store.local_path is not None:
            return {"driver": "file", "path": f"{os.path.join(self._store.local_path, self._at)}/"}
        place = os.path.join(self._store.root, self._at)
        driver = scheme_of(self._store.root).tensorstore
        advice = ""
        if driver is not None:
            asked = os.environ.get(driver.server_variable, "").rstrip("/") or driver.server
            if (self._store.endpoint or driver.server) == asked:
                bucket, _, path = place.partition("://")[2].partition("/")
                return {"driver": driver.name, "bucket": bucket, "path": f"{path}/"}
            advice = f". Set {driver.server_variable} to avoid that"
        if not self._copy:
            self._copy = tempfile.mkdtemp(prefix="epochckpt-")
            weakref.finalize(self, shutil.rmtree, self._copy, True)
            text = "%s: TensorStore does not ask %s, so the whole item is copied to %s (see TMPDIR)%s"
            logging.warning(text, place, self._store.endpoint or "this store", self._copy, advice)
            _fetch(self._store, self._at, self._copy)
        return {"driver": "file", "path": f"{self._copy}/"}
