"""JSON that users save with an epoch or a manager: metrics, and metadata of their own."""

import json
from collections.abc import Mapping
from typing import Any

from epochckpt.format import checksums


def checked_json(value: Any, where: str) -> Any:
    """User data as it will come back from JSON; InvalidArgumentError if JSON cannot hold it."""
    return checksums.unpack_json(checksums.pack_json(value, where))


def root_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Content of the file in which Orbax, too, keeps a manager's own metadata."""
    data = {"internal_metadata": {}, "custom_metadata": checksums.pack_json(dict(metadata), "metadata")}
    return json.dumps(data).encode()
