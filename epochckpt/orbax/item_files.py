"""The files of an item of stock Orbax, for TensorStore. Where it cannot ask the server that we ask, it reads a copy."""

import os
import shutil
import tempfile
import weakref
from typing import Any

from absl import logging

from epochckpt.storage import Store, fetch, scheme_of, tensorstore_spec

_RETRIES = {"max_retries": 8, "initial_delay": "0.2s", "max_delay": "8s"}  # of a request to a bucket: half a minute


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
        found = tensorstore_spec(self._store, self._at)
        if found is not None:
            return found
        if not self._copy:
            self._copy = tempfile.mkdtemp(prefix="epochckpt-")
            weakref.finalize(self, shutil.rmtree, self._copy, True)
            driver = scheme_of(self._store.root).tensorstore
            advice = "" if driver is None else f". Set {driver.server_variable} to avoid that"
            text = "%s: TensorStore does not ask %s, so the whole item is copied to %s (see TMPDIR)%s"
            place = os.path.join(self._store.root, self._at)
            logging.warning(text, place, self._store.endpoint or "this store", self._copy, advice)
            fetch(self._store, self._at, self._copy)
        return {"driver": "file", "path": f"{self._copy}/"}
